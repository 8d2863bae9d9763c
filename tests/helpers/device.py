"""Device arrays for tests, with guard bytes around every one: the Numba simulator's, or CuPy's on a GPU.

A test asks for the `device` fixture, makes arrays with it, calls public ops and compares. In the simulator process the launcher runs the kernel's
Python function on bounds-checked views instead of a cubin; everything before it, the op's plan included, is the real thing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

GUARD = 64
_GUARD_BYTE = 0xA5


class Device:
    """What both kinds share: guarded allocation and copies to and from NumPy."""

    simulated = False
    # Sizes around nothing, one, odd and one block; a GPU adds several blocks and a million.
    sizes: tuple[int, ...] = (0, 1, 2, 7, 255, 256, 257)

    def array(self, values: Any, dtype: str | None = None) -> Any:
        """A contiguous device copy between guard bytes."""
        raise NotImplementedError

    def host(self, array: Any) -> np.ndarray:
        """A NumPy copy of a device array."""
        raise NotImplementedError

    def check_guards(self) -> None:
        """Fail if anything was written beside an array made by `array`."""
        raise NotImplementedError


class SimulatedArray:
    """A view into NumPy memory that gpukit takes for device memory."""

    def __init__(self, values: np.ndarray, owner: np.ndarray):
        self.values = values
        self.owner = owner

    def __getitem__(self, key: Any) -> SimulatedArray:
        return SimulatedArray(self.values[key], self.owner)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.values[key] = value

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def T(self) -> SimulatedArray:
        return SimulatedArray(self.values.T, self.owner)


class CheckedPointer:
    """What a kernel sees of an array: a typed pointer that refuses to leave its allocation."""

    def __init__(self, elements: np.ndarray, offset: int):
        self._elements = elements
        self._offset = offset

    @property
    def address(self) -> int:
        """Where it points."""
        return int(self._elements.ctypes.data) + self._offset * self._elements.itemsize

    def _position(self, index: Any) -> int:
        position = self._offset + int(index)
        if not 0 <= position < len(self._elements):
            raise IndexError(f"kernel access at element {int(index)}, outside its allocation of {len(self._elements)} (offset {self._offset})")
        return position

    def __getitem__(self, index: Any) -> Any:
        return self._elements[self._position(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._elements[self._position(index)] = value


class SimulatedDevice(Device):
    simulated = True

    def __init__(self) -> None:
        self._guarded: list[np.ndarray] = []
        self._allocations: list[np.ndarray] = []

    def array(self, values: Any, dtype: str | None = None) -> SimulatedArray:
        values = np.ascontiguousarray(values, dtype)
        raw = np.full(values.nbytes + 2 * GUARD, _GUARD_BYTE, np.uint8)
        raw[GUARD : GUARD + values.nbytes] = values.reshape(-1).view(np.uint8)
        self._guarded.append(raw)
        owner = raw[GUARD : GUARD + values.nbytes].view(values.dtype)
        self._allocations.append(owner)
        return SimulatedArray(owner.reshape(values.shape), owner)

    def host(self, array: SimulatedArray) -> np.ndarray:
        return np.array(array.values)

    def check_guards(self) -> None:
        for raw in self._guarded:
            assert (raw[:GUARD] == _GUARD_BYTE).all() and (raw[-GUARD:] == _GUARD_BYTE).all()

    def pointer(self, address: int, dtype: str) -> CheckedPointer | None:
        """The checked pointer behind an address that a plan took from an array."""
        if address == 0:
            return None
        for owner in self._allocations:
            start = owner.ctypes.data
            if start <= address < start + max(owner.nbytes, 1):
                return CheckedPointer(owner.view(dtype), (address - start) // np.dtype(dtype).itemsize)
        raise AssertionError(f"a kernel got an address that no test array owns: {address:#x}")

    def install(self, monkeypatch: Any) -> None:
        """Make gpukit read `SimulatedArray` as an array of device 0 and run kernels in the simulator."""
        from numba.cuda.simulator import kernel as simulator

        from gpukit import arrays, devices, launch, streams
        from gpukit.compile.numba_dsl import kernel_source
        from tests.helpers.lanes import Block

        def describe(array: SimulatedArray) -> Any:
            values = array.values
            strides = None if values.flags.c_contiguous else tuple(stride // values.itemsize for stride in values.strides)
            return values.ctypes.data, values.dtype.name, values.shape, strides, 0, True

        def simulate(kernel: Any, variant: Any, device: int, stream: int, blocks: int, threads: int, arguments: Any, result: Any = None) -> Any:
            if launch._mode.planning:
                return (kernel, variant, device, stream, blocks, threads, arguments, result)
            assert variant in kernel.variants, f"{kernel} declares {kernel.variants}, was launched as {variant}"
            source = kernel_source(kernel.subject, kernel.name)
            bound = dict(zip(source.type_variables, variant, strict=True))
            assert len(arguments) == len(source.parameters), f"{kernel} takes {list(source.parameters)}, was launched with {len(arguments)} arguments"
            values = []
            for (name, text), value in zip(source.parameters.items(), arguments, strict=True):
                assert type(value) in (int, float, np.int64), f"{kernel}: parameter {name} got {type(value)}"
                word = text.rstrip("*")
                values.append(self.pointer(value, bound.get(word, word)) if text.endswith("*") else value)
            source.dispatcher()[blocks, threads](*values)
            return result

        def empty(shape: Any, dtype: str, like: Any, stream: Any = None) -> Any:
            if isinstance(like, SimulatedArray):
                # Poisoned, so that an entry that no thread writes shows.
                return self.array(np.full(shape, 77, np.dtype(dtype)))
            return real_empty(shape, dtype, like, stream)

        real_empty = arrays.empty
        monkeypatch.setitem(arrays._readers, SimulatedArray, describe)
        monkeypatch.setitem(streams._readers, SimulatedArray, lambda array: 0)
        monkeypatch.setattr(arrays, "empty", empty)
        monkeypatch.setattr(launch.Kernel, "launch", simulate)
        monkeypatch.setattr(devices, "is_capturing", lambda stream: False)
        monkeypatch.setattr(devices, "DeviceCounters", self._counters)
        monkeypatch.setattr(devices, "AsyncReader", self._reader)
        monkeypatch.setattr(devices, "stage", self._stage)
        monkeypatch.setattr(simulator, "BlockManager", Block)

    def _counters(self, device: int, slots: int) -> Any:
        return _SimulatedCounters(self, slots)

    def _stage(self, values: np.ndarray, name: str, device: int, stream: int) -> int:
        return int(self.array(values).values.ctypes.data)

    def _reader(self, device: int, pointer: int, slots: int) -> Any:
        return _SimulatedReader(self, pointer, slots)


class _SimulatedCounters:
    """Stands in for `devices.DeviceCounters`."""

    device = 0

    def __init__(self, owner: SimulatedDevice, slots: int):
        self._array = owner.array(np.zeros(slots, np.int64))
        self.pointer = self._array.values.ctypes.data

    def read(self) -> tuple[int, ...]:
        return tuple(self._array.values.tolist())

    def clear(self) -> None:
        self._array.values[:] = 0


class _SimulatedReader:
    """Stands in for `devices.AsyncReader`: a copy arrives at the next poll."""

    def __init__(self, owner: SimulatedDevice, pointer: int, slots: int):
        self._source = owner.pointer(pointer, "int64")
        self._slots = slots
        self._pending: Any = None

    def start(self, stream: int) -> bool:
        if self._pending is not None or self._source is None:
            return False
        self._pending = tuple(int(self._source[slot]) for slot in range(self._slots))
        return True

    def poll(self) -> Any:
        arrived, self._pending = self._pending, None
        return arrived


class CupyDevice(Device):
    """A real GPU through CuPy, every array in an allocation of its own: pools would hide an overrun from the memory checker."""

    sizes = (*Device.sizes, 65_537, 1_000_000)

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._guarded: list[Any] = []

    def array(self, values: Any, dtype: str | None = None) -> Any:
        cupy = self._cupy
        values = np.ascontiguousarray(values, dtype)
        memory = cupy.cuda.Memory(values.nbytes + 2 * GUARD)
        raw = cupy.ndarray((values.nbytes + 2 * GUARD,), cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
        raw[:] = _GUARD_BYTE
        raw[GUARD : GUARD + values.nbytes] = cupy.asarray(values.reshape(-1).view(np.uint8))
        self._guarded.append(raw)
        return raw[GUARD : GUARD + values.nbytes].view(values.dtype).reshape(values.shape)

    def host(self, array: Any) -> np.ndarray:
        return self._cupy.asnumpy(array)

    def check_guards(self) -> None:
        for raw in self._guarded:
            guards = self._cupy.asnumpy(self._cupy.concatenate((raw[:GUARD], raw[-GUARD:])))
            assert (guards == _GUARD_BYTE).all()


def has_gpu() -> bool:
    """Whether a CUDA device can be used."""
    from gpukit import devices

    return devices.count() > 0
