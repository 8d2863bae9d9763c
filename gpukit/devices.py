"""Devices: whether there is one, its properties and limits, its primary context, and the few bytes gpukit itself keeps on it.

Everything goes through cuda.bindings and begins with `driver`, which refuses by name where the driver or the package is missing: a driver
call after a failed initialisation can hang for ever, so none is made. Kernels are launched in `launch`, not here.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gpukit.errors import ArgumentError, DeviceError, ForkError

__all__ = ["DeviceProperties", "count", "properties"]


FORKED = "gpukit was used on the GPU before this process was forked; start workers with the 'spawn' method"

_bindings: Any = None
_forked = False
# Why the driver did not initialise. It is not asked twice: a call after a failed initialisation can hang.
_failure: list[str] = []


def driver() -> Any:
    """The initialised `cuda.bindings.driver` module.

    Raises
    ------
    DeviceError
        No NVIDIA driver library, no cuda-bindings, or the driver does not initialise.
    ForkError
        This process was forked after gpukit had used the driver.
    """
    global _bindings
    if _bindings is None:
        if _forked:
            raise ForkError(FORKED)
        _bindings = _load_driver()
    return _bindings


def _after_fork_in_child() -> None:
    global _bindings, _forked
    _forked = _forked or _bindings is not None
    _bindings = None


os.register_at_fork(after_in_child=_after_fork_in_child)


def _load_driver() -> Any:
    if _failure:
        raise DeviceError(_failure[0])
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise DeviceError("no NVIDIA driver on this machine; NumPy arrays run on the CPU") from None
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise DeviceError(f"the GPU stack is not installed ({error}); install gpukit with the extra cu13 or cu12") from None
    status = bindings.cuInit(0)[0]
    if status != bindings.CUresult.CUDA_SUCCESS:
        _failure.append(f"cuInit failed: {status.name}")
        raise DeviceError(_failure[0])
    return bindings


def call(result: tuple[Any, ...], what: str) -> Any:
    """Unpack a driver call's result, or raise `DeviceError` naming the call and the driver's answer."""
    status = result[0]
    if status != 0:
        raise DeviceError(f"{what} failed: {status.name}")
    return result[1] if len(result) == 2 else result[1:]


@functools.cache
def count() -> int:
    """Number of CUDA devices; 0 where the driver or the GPU stack is missing."""
    try:
        return int(call(driver().cuDeviceGetCount(), "cuDeviceGetCount"))
    except DeviceError:
        return 0


@dataclass(frozen=True)
class DeviceProperties:
    """What gpukit needs to know of a device. Sizes in bytes.

    Attributes
    ----------
    ordinal : int
        CUDA ordinal.
    name : str
        The driver's name of it.
    compute_capability : tuple of int
        (major, minor).
    multiprocessors : int
        Number of streaming multiprocessors.
    memory : int
        Device memory.
    l2 : int
        L2 cache.
    persisting_l2_max : int
        Largest part of the L2 that persisting accesses can reserve; 0 where there is none (MIG).
    access_window_max : int
        Largest access-policy window.
    """

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory: int
    l2: int
    persisting_l2_max: int
    access_window_max: int


@functools.cache
def properties(device: int = 0) -> DeviceProperties:
    """Properties of a device, read once.

    Raises
    ------
    DeviceError
        No driver, or no such device.
    """
    bindings = driver()
    handle = call(bindings.cuDeviceGet(device), f"cuDeviceGet({device})")
    name = call(bindings.cuDeviceGetName(256, handle), "cuDeviceGetName")
    memory = call(bindings.cuDeviceTotalMem(handle), "cuDeviceTotalMem")
    attribute = bindings.CUdevice_attribute

    def read(key: str) -> int:
        return int(call(bindings.cuDeviceGetAttribute(getattr(attribute, "CU_DEVICE_ATTRIBUTE_" + key), handle), key))

    return DeviceProperties(
        ordinal=device,
        name=name.split(b"\0", 1)[0].decode(),
        compute_capability=(read("COMPUTE_CAPABILITY_MAJOR"), read("COMPUTE_CAPABILITY_MINOR")),
        multiprocessors=read("MULTIPROCESSOR_COUNT"),
        memory=int(memory),
        l2=read("L2_CACHE_SIZE"),
        persisting_l2_max=read("MAX_PERSISTING_L2_CACHE_SIZE"),
        access_window_max=read("MAX_ACCESS_POLICY_WINDOW_SIZE"),
    )


def architecture(device: int) -> str:
    """Compile target of a device, like ``sm_90``."""
    major, minor = properties(device).compute_capability
    return f"sm_{major}{minor}"


@functools.cache
def primary_context(device: int) -> Any:
    """The device's primary context, the one that torch, CuPy and Numba use too; retained for the life of the process."""
    bindings = driver()
    handle = call(bindings.cuDeviceGet(device), f"cuDeviceGet({device})")
    return call(bindings.cuDevicePrimaryCtxRetain(handle), "cuDevicePrimaryCtxRetain")


@contextmanager
def current(device: int) -> Iterator[None]:
    """Make a device's primary context current in this thread, and put back what was current before."""
    bindings = driver()
    call(bindings.cuCtxPushCurrent(primary_context(device)), "cuCtxPushCurrent")
    try:
        yield
    finally:
        call(bindings.cuCtxPopCurrent(), "cuCtxPopCurrent")


def of_pointer(pointer: int) -> int:
    """Ordinal of the device that owns an address; of the first device for a null pointer (an empty array)."""
    if pointer == 0:
        return 0
    bindings = driver()
    attribute = bindings.CUpointer_attribute
    if count() > 1:
        # With no context current the driver answers 0 to the question for the ordinal, whatever the device.
        status, context = bindings.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_CONTEXT, pointer)
        if status == 0 and int(context):
            return of_context(context)
        with current(0):
            status, ordinal = bindings.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer)
    else:
        status, ordinal = bindings.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer)
    if status != 0:
        raise ArgumentError(f"array: expected an address in device memory, got {pointer:#x} ({status.name})")
    return int(ordinal)


def of_context(context: Any) -> int:
    """Ordinal of a context's device."""
    bindings = driver()
    call(bindings.cuCtxPushCurrent(context), "cuCtxPushCurrent")
    try:
        return int(call(bindings.cuCtxGetDevice(), "cuCtxGetDevice"))
    finally:
        call(bindings.cuCtxPopCurrent(), "cuCtxPopCurrent")


def create_stream(device: int) -> int:
    """Handle of a new non-blocking stream; whoever asks destroys it, or keeps it for the life of the process."""
    bindings = driver()
    with current(device):
        return int(call(bindings.cuStreamCreate(bindings.CUstream_flags.CU_STREAM_NON_BLOCKING), "cuStreamCreate"))


def of_stream(stream: int) -> int | None:
    """Ordinal of a stream's device; None for the default streams, which are of whichever device is current, and where the driver cannot say."""
    if stream in (0, 1, 2):
        return None
    bindings = driver()
    status, context = bindings.cuStreamGetCtx(stream)
    return None if status != 0 else of_context(context)


def is_capturing(stream: int) -> bool:
    """Whether a stream is being captured into a graph."""
    bindings = driver()
    status, state = bindings.cuStreamIsCapturing(stream)
    # The legacy default stream answers with this error while another stream of the context captures.
    if status == bindings.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
        return True
    return bool(status == 0 and state != bindings.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


@contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread allocate, free and query events while it or another thread captures a stream."""
    bindings = driver()
    relaxed = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    mode = call(bindings.cuThreadExchangeStreamCaptureMode(relaxed), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        call(bindings.cuThreadExchangeStreamCaptureMode(mode), "cuThreadExchangeStreamCaptureMode")


class DeviceCounters:
    """A few zeroed int64 counters in device memory, freed with the object; the store behind `Signal`."""

    def __init__(self, device: int, slots: int):
        self.device = device
        self.slots = slots
        self.pointer = 0
        bindings = driver()
        with current(device), beside_captures():
            self.pointer = int(call(bindings.cuMemAlloc(8 * slots), "cuMemAlloc"))
        self.clear()

    def read(self) -> tuple[int, ...]:
        """The counters, after all work of the device."""
        values = bytearray(8 * self.slots)
        address = ctypes.addressof((ctypes.c_char * len(values)).from_buffer(values))
        bindings = driver()
        with current(self.device):
            call(bindings.cuCtxSynchronize(), "cuCtxSynchronize")
            call(bindings.cuMemcpyDtoH(address, self.pointer, len(values)), "cuMemcpyDtoH")
        return struct.unpack(f"{self.slots}q", values)

    def clear(self) -> None:
        """Zero the counters, after all work of the device."""
        bindings = driver()
        with current(self.device):
            call(bindings.cuCtxSynchronize(), "cuCtxSynchronize")
            call(bindings.cuMemsetD8(self.pointer, 0, 8 * self.slots), "cuMemsetD8")
            call(bindings.cuCtxSynchronize(), "cuCtxSynchronize")

    def __del__(self) -> None:
        if self.pointer:
            try:
                with current(self.device), beside_captures():
                    driver().cuMemFree(self.pointer)
            except Exception:
                # At interpreter exit the driver may be gone already; the memory went with it.
                pass


class AsyncReader:
    """Copies a few int64 counters to pinned host memory and tells when they have arrived, without ever waiting."""

    def __init__(self, device: int, pointer: int, slots: int):
        self.device = device
        self._source = pointer
        self._slots = slots
        self._pending = False
        bindings = driver()
        with current(device), beside_captures():
            self._target = int(call(bindings.cuMemHostAlloc(8 * slots, 0), "cuMemHostAlloc"))
            flags = bindings.CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._event = call(bindings.cuEventCreate(flags), "cuEventCreate")

    def start(self, stream: int) -> bool:
        """Begin a copy on `stream`, unless one is under way; whether it began."""
        if self._pending:
            return False
        bindings = driver()
        with current(self.device):
            call(bindings.cuMemcpyDtoHAsync(self._target, self._source, 8 * self._slots, stream), "cuMemcpyDtoHAsync")
            call(bindings.cuEventRecord(self._event, stream), "cuEventRecord")
        self._pending = True
        return True

    def poll(self) -> tuple[int, ...] | None:
        """The counters of a copy that has arrived, once; None otherwise."""
        if not self._pending:
            return None
        bindings = driver()
        with current(self.device), beside_captures():
            status = bindings.cuEventQuery(self._event)[0]
        if status == bindings.CUresult.CUDA_ERROR_NOT_READY:
            return None
        call((status,), "cuEventQuery")
        self._pending = False
        return struct.unpack(f"{self._slots}q", ctypes.string_at(self._target, 8 * self._slots))

    def __del__(self) -> None:
        try:
            bindings = driver()
            with current(self.device), beside_captures():
                # The copy may still be under way; its target must outlive it.
                bindings.cuEventSynchronize(self._event)
                bindings.cuEventDestroy(self._event)
                bindings.cuMemFreeHost(self._target)
        except Exception:
            # At interpreter exit the driver may be gone already; the memory went with it.
            pass


class _StageBuffer:
    """Pinned host memory, device memory of the same size, and the event after whose end both are free. Never given back to the driver."""

    def __init__(self, size: int):
        bindings = driver()
        self.size = size
        self.pinned = int(call(bindings.cuMemHostAlloc(size, 0), "cuMemHostAlloc"))
        self.target = int(call(bindings.cuMemAlloc(size), "cuMemAlloc"))
        self.free_after = call(bindings.cuEventCreate(bindings.CUevent_flags.CU_EVENT_DISABLE_TIMING), "cuEventCreate")


# Buffers by device, used before and perhaps still in use by the device.
_stage_buffers: dict[int, list[_StageBuffer]] = {}
_stage_lock = threading.RLock()


class Staged:
    """A device copy of host values for work on one stream; as a launch argument it is its address. Dropping it ends its use."""

    def __init__(self, buffer: _StageBuffer, device: int, stream: int):
        self._buffer = buffer
        self._device = device
        self._stream = stream

    def __index__(self) -> int:
        return self._buffer.target

    def __del__(self) -> None:
        try:
            # An event recorded into a capture never ends, so that buffer is lost.
            if not is_capturing(self._stream):
                with current(self._device):
                    call(driver().cuEventRecord(self._buffer.free_after, self._stream), "cuEventRecord")
                with _stage_lock:
                    _stage_buffers.setdefault(self._device, []).append(self._buffer)
        except Exception:
            # The stream is gone, or the driver at interpreter exit; so is the buffer.
            pass


def stage(values: Any, name: str, device: int, stream: int) -> Staged:
    """Copy a contiguous NumPy array to the device on `stream`, through pinned memory: nothing waits, and `values` may be changed at once.

    Raises
    ------
    ArgumentError
        The stream is capturing: the graph would replay the copy from memory that is used again.
    """
    if is_capturing(stream):
        raise ArgumentError(f"{name}: expected a device array, because the stream is capturing, got values in host memory")
    bindings = driver()
    size = max(values.nbytes, 1)
    with current(device), beside_captures():
        buffer = None
        with _stage_lock:
            buffers = _stage_buffers.setdefault(device, [])
            for position, candidate in enumerate(buffers):
                if candidate.size >= size and bindings.cuEventQuery(candidate.free_after)[0] == bindings.CUresult.CUDA_SUCCESS:
                    buffer = buffers.pop(position)
                    break
        if buffer is None:
            # Sizes are rounded up, so that batches of slowly growing size use the same buffers.
            buffer = _StageBuffer(max(4096, 1 << (size - 1).bit_length()))
        ctypes.memmove(buffer.pinned, values.ctypes.data, values.nbytes)
        staged = Staged(buffer, device, stream)
        call(bindings.cuMemcpyHtoDAsync(buffer.target, buffer.pinned, size, stream), "cuMemcpyHtoDAsync")
    return staged
