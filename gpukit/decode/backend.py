"""Where a replay's arrays live: a few array functions for NumPy or CuPy, and a meter of what each op costs.

The ops themselves choose their implementation by the arrays they are given; nothing here knows about pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from gpukit.errors import DeviceError

__all__ = ["Backend", "CupyBackend", "Meter", "NumpyBackend", "OpTimes", "array_module", "choose_backend"]

Result = TypeVar("Result")


class Backend(Protocol):
    """What a replay needs of an array library."""

    name: str
    like: Any
    """An array of the library, or None for NumPy; handed to ops that make arrays."""

    def to_device(self, host: np.ndarray) -> Any:
        """Copy a host array to where the ops run. Does not wait."""

    def to_host(self, array: Any) -> np.ndarray:
        """Copy an array to the host. Waits for the device: for checks only."""

    def empty(self, shape: int | tuple[int, ...], dtype: type) -> Any:
        """An uninitialised array."""

    def zeros(self, shape: int | tuple[int, ...], dtype: type) -> Any:
        """A zeroed array."""

    def concatenate(self, arrays: list[Any]) -> Any:
        """Join 1-D arrays."""

    def synchronize(self) -> None:
        """Wait for all work of the device."""

    def stream(self) -> Any:
        """A new stream that can be captured, None where there are none."""

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one while the block runs; None leaves it as it is."""

    def mark(self) -> Any:
        """Note a point in time on the current stream, None where there is no device clock."""

    def microseconds(self, begin: Any, end: Any) -> float:
        """Device time between two marks that have been passed."""


class NumpyBackend:
    """The CPU: every op runs its NumPy reference."""

    name = "numpy"
    like: Any = None

    def to_device(self, host: np.ndarray) -> Any:
        return host

    def to_host(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def empty(self, shape: int | tuple[int, ...], dtype: type) -> Any:
        return np.empty(shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: type) -> Any:
        return np.zeros(shape, dtype)

    def concatenate(self, arrays: list[Any]) -> Any:
        return np.concatenate(arrays)

    def synchronize(self) -> None:
        pass

    def stream(self) -> Any:
        return None

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> Any:
        return None

    def microseconds(self, begin: Any, end: Any) -> float:
        return 0.0


class CupyBackend:
    """The first CUDA device, with CuPy as the array library and its current stream."""

    name = "gpu"

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self.like: Any = cupy.empty(0, np.int64)

    def free_bytes(self) -> int:
        """Memory of the device that nobody has, what CuPy keeps for later included."""
        return int(self.cupy.cuda.Device().mem_info[0] + self.cupy.get_default_memory_pool().free_bytes())

    def to_device(self, host: np.ndarray) -> Any:
        # CuPy stages host arrays in its own pinned pool, so this enqueues a copy and returns.
        return self.cupy.asarray(host)

    def to_host(self, array: Any) -> np.ndarray:
        host: np.ndarray = self.cupy.asnumpy(array)
        return host

    def empty(self, shape: int | tuple[int, ...], dtype: type) -> Any:
        return self.cupy.empty(shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: type) -> Any:
        return self.cupy.zeros(shape, dtype)

    def concatenate(self, arrays: list[Any]) -> Any:
        return self.cupy.concatenate(arrays)

    def synchronize(self) -> None:
        self.cupy.cuda.get_current_stream().synchronize()

    def stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        # A stream object must not be entered twice, so every block gets one of its own.
        context: AbstractContextManager[Any] = nullcontext() if stream is None else self.cupy.cuda.ExternalStream(stream.ptr)
        return context

    def mark(self) -> Any:
        event = self.cupy.cuda.Event()
        event.record()
        return event

    def microseconds(self, begin: Any, end: Any) -> float:
        return 1000.0 * float(self.cupy.cuda.get_elapsed_time(begin, end))


def choose_backend(name: str) -> tuple[Backend, str]:
    """The backend of that name, and one line on why it was chosen.

    Raises
    ------
    DeviceError
        "gpu" was asked for and there is no device, or the GPU stack is not installed.
    """
    if name == "numpy":
        return NumpyBackend(), "asked for"
    missing = _missing_for_gpu()
    if missing is None:
        return CupyBackend(), "asked for" if name == "gpu" else "a CUDA device is here"
    if name == "gpu":
        raise DeviceError(f"backend: expected a CUDA device and the GPU stack, got {missing}")
    return NumpyBackend(), missing


def _missing_for_gpu() -> str | None:
    """What keeps a replay off the GPU, None when nothing does."""
    from gpukit import devices

    try:
        devices.driver()
        if not devices.count():
            return "no CUDA device"
        import cupy  # noqa: F401
    except DeviceError as error:
        return str(error)
    except ImportError as error:
        return f"no CuPy ({error}); install gpukit with the extra cu13 or cu12"
    return None


@dataclass
class OpTimes:
    """What the calls of one op cost, in the order they were made.

    Attributes
    ----------
    host_ns : list of int
        Host time of each call; on the NumPy backend this is the work itself.
    device_us : list of float
        Device time of each call. It spans the op's place on the stream, so where the stream was idle it holds the wait for the
        launch too. Empty on the NumPy backend.
    """

    host_ns: list[int] = field(default_factory=list)
    device_us: list[float] = field(default_factory=list)


class Meter:
    """Calls ops and notes what each call costs."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self.times: dict[str, OpTimes] = {}
        self._marks: list[tuple[OpTimes, Any, Any]] = []

    def __call__(self, op: str, function: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
        """Call an op under the name it has in the report."""
        times = self.times.get(op)
        if times is None:
            times = self.times[op] = OpTimes()
        begin = self.backend.mark()
        start = time.perf_counter_ns()
        result = function(*arguments, **keywords)
        times.host_ns.append(time.perf_counter_ns() - start)
        if begin is not None:
            self._marks.append((times, begin, self.backend.mark()))
        return result

    def settle(self) -> None:
        """Read the device times noted so far. Waits for the device."""
        if not self._marks:
            return
        self.backend.synchronize()
        for times, begin, end in self._marks:
            times.device_us.append(self.backend.microseconds(begin, end))
        self._marks.clear()


def array_module(backend: Backend) -> Any:
    """NumPy, or what takes its place on a GPU."""
    return backend.cupy if isinstance(backend, CupyBackend) else np
