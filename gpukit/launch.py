"""From a checked call to the driver: kernels by handle, one launch path for both languages, eager and prepared.

An op is a function under `operation` that checks its arguments and ends with `Kernel.launch`, or with `host` or `nothing`; `.prepare` runs the same
function, but keeps what would have been launched.
Every kernel parameter is eight bytes (an address or an int64; CUDA C also takes doubles), but for a last one of as many bytes as its argument has. So
one packed buffer serves every kernel and a launch is one `cuLaunchKernel` with arguments written in place. Kernels are compiled by `compile` and
loaded here, on first use or by `warmup`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

from gpukit import devices
from gpukit.arrays import HOST
from gpukit.compile import count_loaded, cubin
from gpukit.errors import ArgumentError, ArgumentTypeError, ColdKernelError, DeviceError, ForkError, Signal

__all__ = ["IDS", "Kernel", "Operation", "Plan", "PreparedCall", "host", "kernels", "launch_all", "nothing", "operation", "overlapping", "warmup"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

# The dtypes that page ids, lengths and request indices may have.
IDS = ("int32", "int64")

# (kernel, blocks, threads, arguments), one of several.
Launch = tuple["Kernel", int, int, tuple[Any, ...]]

# (kernel, variant, device, stream, blocks, threads, arguments, result); without a kernel `arguments` is what to call instead, if anything.
Plan = tuple[Any, ...]

_MOST_PARAMETERS = 40
# Of eight bytes: of a parameter that is longer.
_MOST_WORDS = 128
_HANDLES_OF_DEFAULT_STREAMS = (0, 1, 2)
# Blocks of a cluster that no device has to be asked to allow.
_PORTABLE_CLUSTER = 8
# Compute capability from which launches may overlap and blocks form clusters.
_HOPPER = (9, 0)

_kernels: list[Kernel] = []
_load_lock = threading.RLock()


class _Mode(threading.local):
    """What one thread is doing: whether its next launch is to be planned, not made, whether its launches may overlap, and whether either is
    the case; whether it has ever had a context."""

    planning = False
    overlapping = False
    special = False
    has_context = False

    def set(self, *, planning: bool | None = None, overlapping: bool | None = None) -> None:
        self.planning = self.planning if planning is None else planning
        self.overlapping = self.overlapping if overlapping is None else overlapping
        self.special = self.planning or self.overlapping


_mode = _Mode()


class _Packed:
    """Argument values, eight bytes each but the last, and the array of their addresses that the driver wants."""

    __slots__ = ("addresses", "buffer", "pointer")

    def __init__(self) -> None:
        self.buffer = (ctypes.c_int64 * (_MOST_PARAMETERS + _MOST_WORDS))()
        base = ctypes.addressof(self.buffer)
        self.addresses = (ctypes.c_void_p * _MOST_PARAMETERS)(*(base + 8 * slot for slot in range(_MOST_PARAMETERS)))
        self.pointer = ctypes.addressof(self.addresses)


# Buffers not in use. list.pop and append are atomic, so threads share it without a lock.
_free_buffers: list[_Packed] = []


class Kernel:
    """A kernel of one of the two languages, with a handle per type variant and device.

    Parameters
    ----------
    subject, name : str
        ``kernels/<language>/<subject>`` and the kernel in it.
    variants : sequence of tuples of str
        dtype names for the kernel's type variables; what `warmup` loads and the compile gate compiles.
    language : {"numba", "cuda"}
    doubles : tuple of int
        Positions of the parameters that are doubles; all others are integers.
    early : bool
        Whether its device code waits for the kernel in front (``wait_for_predecessor``, or words that this writes) before it touches what may be
        others', so that it may be launched before that has ended.
    shared_bytes : int
        Shared memory of a block that is sized at the launch (``extern __shared__``), asked for when it is loaded. Several kernels may have the same
        device code and differ in this.
    carveout : int, optional
        Percent of the most shared memory of a multiprocessor that it is to have, the rest being L1; without it the L1 stays as small as a kernel
        in front has made it.
    capability : tuple of int, optional
        Compute capability of the devices that it is for; all by default. `warmup` loads it nowhere else.
    cluster : tuple of int, optional
        Blocks of the clusters that its device code is compiled for, and threads of a block. `has_room` says where it can be launched.
    """

    def __init__(
        self,
        subject: str,
        name: str,
        variants: Sequence[tuple[str, ...]] = ((),),
        language: str = "numba",
        doubles: tuple[int, ...] = (),
        early: bool = False,
        shared_bytes: int = 0,
        carveout: int | None = None,
        capability: tuple[int, int] | None = None,
        cluster: tuple[int, int] | None = None,
    ):
        self.subject = subject
        self.name = name
        self.variants = tuple(variants)
        self.language = language
        self.handles: dict[tuple[tuple[str, ...], int], Any] = {}
        self.doubles = doubles
        self.early = early
        self.shared_bytes = shared_bytes
        self.carveout = carveout
        self.capability = capability
        self.cluster = cluster
        self.rooms: dict[int, bool] = {}
        self.pack_into: Callable[..., None] | None = None
        _kernels.append(self)

    def __repr__(self) -> str:
        return f"Kernel({self.subject}.{self.name}, {self.language})"

    def load(self, variant: tuple[str, ...], device: int, stream: int | None = None) -> Any:
        """Handle of a variant on a device, compiled and loaded if need be.

        Raises
        ------
        ColdKernelError
            It is not loaded yet and `stream` is capturing.
        """
        handle = self.handles.get((variant, device))
        if handle is not None:
            return handle
        if stream is not None and devices.is_capturing(stream):
            raise ColdKernelError(f"{self.subject}.{self.name}{list(variant)} is not loaded and its stream is capturing; call gpukit.warmup() first")
        with _load_lock:
            handle = self.handles.get((variant, device))
            if handle is None:
                handle = self._load(variant, device)
                count_loaded()
                self.handles[(variant, device)] = handle
        return handle

    def is_for(self, device: int) -> bool:
        """Whether a device is one of those that it is for."""
        return self.capability is None or self.capability == devices.properties(device).compute_capability

    def has_room(self, device: int, stream: int) -> bool:
        """Whether a device can run one of its clusters: it has clusters, and as many multiprocessors side by side.

        Raises
        ------
        ColdKernelError
            The kernel is not loaded yet and `stream` is capturing.
        """
        room = self.rooms.get(device)
        if room is None:
            room = self.cluster is not None and devices.properties(device).compute_capability >= _HOPPER and self._fits(device, stream)
            self.rooms[device] = room
        return room

    def _fits(self, device: int, stream: int) -> bool:
        handle, bindings = self.load((), device, stream), devices.driver()
        config = _configuration(*(self.cluster or (1, 1)), self.shared_bytes)
        with devices.current(device):
            status, clusters = bindings.cuOccupancyMaxActiveClusters(bindings.CUfunction(handle), config)
        return bool(status == 0 and clusters > 0)

    def launch(
        self, variant: tuple[str, ...], device: int, stream: int, blocks: int, threads: int, arguments: tuple[Any, ...], result: Any = None
    ) -> Any:
        """What an op on device arrays ends with: launch a variant on a stream and return `result`."""
        if _mode.special and _mode.planning:
            return (self, variant, device, stream, blocks, threads, arguments, result)
        handle = self.handles.get((variant, device)) or self.load(variant, device, stream)
        try:
            packed = _free_buffers.pop()
        except IndexError:
            packed = _Packed()
        (self.pack_into or self.make_packer(arguments))(packed.buffer, 0, *arguments)
        if stream in _HANDLES_OF_DEFAULT_STREAMS and not _mode.has_context:
            _give_context(device)
        try:
            if _mode.special and self.early:
                _launch_early(device, handle, blocks, threads, self.shared_bytes, stream, packed.pointer)
            else:
                _launch_kernel(handle, blocks, 1, 1, threads, 1, 1, self.shared_bytes, stream, packed.pointer, 0)
        except ForkError:
            raise
        except Exception:
            _submit(device, stream, (handle, blocks, 1, 1, threads, 1, 1, self.shared_bytes, stream, packed.pointer, 0))
        # The driver copied the arguments before it returned.
        _free_buffers.append(packed)
        return result

    def make_packer(self, arguments: tuple[Any, ...]) -> Callable[..., None]:
        """Remember how this kernel's arguments are packed; their number never changes."""
        kinds = ("d" if slot in self.doubles else f"{len(value)}s" if isinstance(value, bytes) else "q" for slot, value in enumerate(arguments))
        self.pack_into = struct.Struct("=" + "".join(kinds)).pack_into
        return self.pack_into

    def _most_shared_bytes(self) -> int:
        """Of all kernels of its device code, which has one limit: whichever of them is loaded last sets it."""
        own = (self.language, self.subject, self.name)
        return max(kernel.shared_bytes for kernel in _kernels if (kernel.language, kernel.subject, kernel.name) == own)

    def _load(self, variant: tuple[str, ...], device: int) -> Any:
        bindings = devices.driver()
        _bind_driver()
        library = _library(self.language, self.subject, self.name if self.language == "numba" else "", variant, devices.architecture(device))
        kernel = devices.call(bindings.cuLibraryGetKernel(library, f"gpukit_{self.name}".encode()), "cuLibraryGetKernel")
        relaxed = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        attributes = bindings.CUfunction_attribute
        if most := self._most_shared_bytes():
            shared_bytes = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            devices.call(bindings.cuKernelSetAttribute(shared_bytes, most, kernel, device), "cuKernelSetAttribute")
        if self.carveout is not None:
            carveout = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            devices.call(bindings.cuKernelSetAttribute(carveout, self.carveout, kernel, device), "cuKernelSetAttribute")
        if self.cluster and self.cluster[0] > _PORTABLE_CLUSTER and devices.properties(device).compute_capability >= _HOPPER:
            # A device that refuses has no room.
            bindings.cuKernelSetAttribute(attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, kernel, device)
        with devices.current(device):
            # Loading into the context now keeps lazy loading out of a later capture; another thread may be capturing meanwhile.
            mode = devices.call(bindings.cuThreadExchangeStreamCaptureMode(relaxed), "cuThreadExchangeStreamCaptureMode")
            try:
                function = devices.call(bindings.cuKernelGetFunction(kernel), "cuKernelGetFunction")
                devices.call(bindings.cuFuncLoad(function), "cuFuncLoad")
            finally:
                devices.call(bindings.cuThreadExchangeStreamCaptureMode(mode), "cuThreadExchangeStreamCaptureMode")
        # The context-free handle runs in the context of the stream it is launched on.
        return int(kernel)


@functools.cache
def _library(language: str, subject: str, name: str, variant: tuple[str, ...], arch: str) -> Any:
    bindings = devices.driver()
    code = cubin(language, subject, name, variant, arch)
    return devices.call(bindings.cuLibraryLoadData(code, [], [], 0, [], [], 0), "cuLibraryLoadData")


def kernels() -> tuple[Kernel, ...]:
    """Every kernel that the imported ops declare."""
    import gpukit.kernels  # noqa: F401

    return tuple(_kernels)


def warmup(device: int = 0, subjects: Sequence[str] | None = None) -> None:
    """Compile and load kernels ahead of the first call, so that every op may be captured.

    Parameters
    ----------
    device : int
        Ordinal of the device.
    subjects : sequence of str, optional
        Subjects to load, like ``["page_table"]``; all by default.

    Raises
    ------
    ArgumentError
        No such subject.
    DeviceError
        No driver, no device or no GPU stack.

    Examples
    --------
    >>> warmup(subjects=["no_such_subject"])
    Traceback (most recent call last):
    ...
    gpukit.errors.ArgumentError: subjects: expected some of ..., got no_such_subject
    """
    known = sorted({kernel.subject for kernel in kernels()})
    unknown = [subject for subject in subjects or () if subject not in known]
    if unknown:
        raise ArgumentError(f"subjects: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    for kernel in kernels():
        if (subjects is None or kernel.subject in subjects) and kernel.is_for(device):
            for variant in kernel.variants:
                kernel.load(variant, device)
            if kernel.cluster:
                # The first question belongs outside of captures.
                kernel.has_room(device, 0)


def _bind_driver() -> None:
    """Take the driver's launch function, before the first kernel is loaded and so before any launch."""
    global _launch_kernel
    if not _launch_kernel:
        _launch_kernel = _quickest_launch()


def _quickest_launch() -> Callable[..., None]:
    """A function that calls cuLaunchKernel and raises if the driver refuses: CuPy's binding, half a microsecond quicker, else cuda.bindings'."""
    try:
        # CuPy's binding layer alone: it imports neither CuPy nor anything else.
        from cupy_backends.cuda.api.driver import launchKernel
    except ImportError:
        bindings = devices.driver()

        def launchKernel(*call: Any) -> None:
            devices.call(bindings.cuLaunchKernel(*call), "cuLaunchKernel")

    if devices.count() == 1:
        return launchKernel  # type: ignore[no-any-return]

    def launch_where_the_stream_lives(*call: Any) -> None:
        # With several devices a default stream does not say in whose context it runs; the careful way takes it from the arrays.
        if call[8] in _HANDLES_OF_DEFAULT_STREAMS:
            raise DeviceError("a default stream needs the context of its arrays' device")
        launchKernel(*call)

    return launch_where_the_stream_lives


def _refuse_after_fork(*call: Any) -> None:
    raise ForkError(devices.FORKED)


_launch_kernel: Any = None


def _after_fork_in_child() -> None:
    global _launch_kernel
    if _launch_kernel:
        _launch_kernel = _refuse_after_fork


os.register_at_fork(after_in_child=_after_fork_in_child)


def _give_context(device: int) -> None:
    """Like the runtime does: a thread without a context gets the device's primary one, which a launch on a default stream needs."""
    bindings = devices.driver()
    if not int(devices.call(bindings.cuCtxGetCurrent(), "cuCtxGetCurrent")):
        devices.call(bindings.cuCtxSetCurrent(devices.primary_context(device)), "cuCtxSetCurrent")
    _mode.has_context = True


@contextmanager
def overlapping(on: bool = True) -> Iterator[None]:
    """Let kernels that this thread launches in the block begin before the kernel in front of them on their stream has ended.

    They come up, read their parameters and what an op says is there before, and wait, on the device, until all that was written in front of them
    is there (programmatic dependent launch), so results are the same. Worth most between the small kernels of a captured decode step, where it
    hides what a launch costs the device; a launch costs the host more this way, so it pays inside captures. Kernels without the wait are launched
    the plain way, and all are on devices before compute capability 9.0.

    Examples
    --------
    >>> with overlapping():
    ...     pass  # calls of ops, usually inside `gpukit.graphs.capture`
    """
    before = _mode.overlapping
    _mode.set(overlapping=on)
    try:
        yield
    finally:
        _mode.set(overlapping=before)


def _configuration(blocks: int, threads: int, shared_bytes: int) -> Any:
    """What the driver is told of the size of a launch."""
    config = devices.driver().CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    return config


def _launch_early(device: int, handle: int, blocks: int, threads: int, shared_bytes: int, stream: int, arguments: int) -> None:
    """A launch that may begin before the kernel in front has ended, where the device can do that."""
    if devices.properties(device).compute_capability < _HOPPER:
        return cast("None", _launch_kernel(handle, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, 0))
    bindings = devices.driver()
    attribute = bindings.CUlaunchAttribute()
    attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = _configuration(blocks, threads, shared_bytes)
    config.hStream, config.attrs, config.numAttrs = stream, [attribute], 1
    return devices.call(bindings.cuLaunchKernelEx(config, handle, arguments, 0), "cuLaunchKernelEx")  # type: ignore[no-any-return]


def _submit(device: int, stream: int, call: tuple[Any, ...]) -> None:
    """Launch in the device's context where the stream does not name one, and explain what the driver refuses."""
    launch = devices.driver().cuLaunchKernel
    if stream in _HANDLES_OF_DEFAULT_STREAMS:
        with devices.current(device):
            status = launch(*call)[0]
    else:
        status = launch(*call)[0]
    if status == 0:
        return
    if status.name in ("CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_CONTEXT_IS_DESTROYED"):
        raise ArgumentError(f"stream: expected a live stream of device {device}, got handle {stream:#x} ({status.name})")
    raise DeviceError(f"cuLaunchKernel failed: {status.name}")


def host(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What an op on NumPy arrays ends with: the call of its reference."""
    signal = kwargs.get("signal")
    if signal is not None and (not isinstance(signal, Signal) or signal.device is not None):
        kind = "one of a device" if isinstance(signal, Signal) else type(signal).__name__
        raise ArgumentTypeError(f"signal: expected a gpukit.Signal of the host, as the arrays are NumPy's; got {kind}")
    if _mode.planning:
        return (None, (), HOST, 0, 0, 0, functools.partial(function, *args, **kwargs), None)
    return function(*args, **kwargs)


def launch_all(launches: Sequence[Launch], device: int, stream: int, result: Any = None, kept: Any = None) -> Any:
    """What an op ends with that takes several launches, one behind the other on its stream; a plan of them also holds `kept`."""
    # All or none: the second kernel must not be found cold, inside a capture, when the first has been launched.
    for kernel, _, _, _ in launches:
        kernel.load((), device, stream)
    made = [kernel.launch((), device, stream, blocks, threads, arguments) for kernel, blocks, threads, arguments in launches]
    if not _mode.planning:
        return result
    calls: list[PreparedCall[Any]] = [PreparedCall(plan, (kept,)) for plan in made]

    def launch_again() -> Any:
        for call in calls:
            call()
        return result

    return (None, (), HOST, 0, 0, 0, launch_again, result)


def nothing(result: Any = None) -> Any:
    """What an op ends with that has nothing to launch."""
    return (None, (), HOST, 0, 0, 0, None, result) if _mode.planning else result


class PreparedCall(Generic[R]):
    """An op with its arguments checked and packed once; calling it launches again and returns the same result array.

    It holds its arrays, and is safe to call from several threads. The stream is the one of the moment of preparation.
    """

    __slots__ = ("_call", "_device", "_early", "_instead", "_kept", "_packed", "_stream", "result")

    def __init__(self, plan: Plan, kept: tuple[Any, ...]):
        kernel, variant, device, stream, blocks, threads, arguments, self.result = plan
        # The arguments too: some own what they are an address of.
        self._kept = (kept, arguments)
        self._device = device
        self._stream = stream
        self._instead: Callable[[], Any] | None = None
        self._call: tuple[Any, ...] | None = None
        if kernel is None:
            self._instead = arguments
            return
        self._early = kernel.early
        self._packed = _Packed()
        kernel.make_packer(arguments)(self._packed.buffer, 0, *arguments)
        self._call = (kernel.load(variant, device, stream), blocks, 1, 1, threads, 1, 1, kernel.shared_bytes, stream, self._packed.pointer, 0)

    def __repr__(self) -> str:
        return "PreparedCall(host)" if self._call is None else f"PreparedCall(device {self._device}, stream {self._stream:#x})"

    def __call__(self) -> R:
        if self._call is None:
            if self._instead:
                self.result = self._instead()
            return self.result  # type: ignore[no-any-return]
        if self._stream in _HANDLES_OF_DEFAULT_STREAMS and not _mode.has_context:
            _give_context(self._device)
        try:
            if self._early and _mode.overlapping:
                handle, blocks, _, _, threads, _, _, shared_bytes, *_ = self._call
                _launch_early(self._device, handle, blocks, threads, shared_bytes, self._stream, self._packed.pointer)
            else:
                _launch_kernel(*self._call)
        except ForkError:
            raise
        except Exception:
            _submit(self._device, self._stream, self._call)
        return self.result  # type: ignore[no-any-return]


class Operation(Protocol[P, R_co]):
    """A public op: call it, or `prepare` it."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Check the arguments and launch."""
        ...

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Check the arguments and say what would be launched."""
        ...

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> PreparedCall[Any]:
        """Check and pack the arguments once; the returned callable launches at the driver's cost.

        Outputs are fixed at preparation: give `out=` arrays, or take the ones it allocates from `.result`.
        """
        ...


def _held(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Every argument, and the members of those that are lists: a list may be emptied while the call lives."""
    return tuple(tuple(value) if isinstance(value, list) else value for value in (*args, *kwargs.values()))


def operation(function: Callable[P, R]) -> Operation[P, R]:
    """Give an op its `plan` and `prepare`. The function itself stays as it is: a call of it has no layer in between."""

    def plan(*args: P.args, **kwargs: P.kwargs) -> Plan:
        _mode.set(planning=True)
        try:
            return cast("Plan", function(*args, **kwargs))
        finally:
            _mode.set(planning=False)

    def prepare(*args: P.args, **kwargs: P.kwargs) -> PreparedCall[Any]:
        return PreparedCall(plan(*args, **kwargs), _held(args, kwargs))

    op = cast("Any", function)
    op.plan, op.prepare = plan, prepare
    plan.__doc__, prepare.__doc__ = Operation.plan.__doc__, Operation.prepare.__doc__
    return cast("Operation[P, R]", function)
