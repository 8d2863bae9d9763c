"""The one place that reads streams: an int handle, `__cuda_stream__` objects, torch, CuPy and Numba streams, a cuda.core GraphBuilder.

Everything becomes the driver's handle as an int (0 is the legacy default stream). gpukit orders nothing between streams: an array that is
used on another stream than its own must be ready there, and must live until that work is done; both are the caller's duty.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gpukit import devices
from gpukit.errors import ArgumentError, ArgumentTypeError

__all__ = ["current", "handle_of"]


def handle_of(stream: Any, *, optional: bool = True) -> int:
    """Handle of a stream of any supported kind.

    Parameters
    ----------
    stream : stream
        Any but None.
    optional : bool
        Whether the caller takes None by itself, so that the error may offer it.

    Raises
    ------
    ArgumentTypeError
        The object is no stream.

    Examples
    --------
    >>> handle_of(0)
    0
    """
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version_and_handle = protocol() if callable(protocol) else protocol
        return int(version_and_handle[1])
    # A cuda.core GraphBuilder captures on a stream of its own.
    inner = getattr(stream, "stream", None)
    if inner is not None and hasattr(inner, "__cuda_stream__"):
        return handle_of(inner, optional=optional)
    for attribute in ("cuda_stream", "ptr", "handle"):
        value = getattr(stream, attribute, None)
        if isinstance(value, int):
            return value
        # Numba keeps a ctypes pointer, whose value is None for the default stream.
        if value is not None and hasattr(value, "value"):
            return int(value.value or 0)
    # None came here because the caller does not take it.
    none = "None, " if optional and stream is not None else ""
    raise ArgumentTypeError(f"stream: expected {none}an int handle, or a stream of torch, CuPy, Numba or cuda.core, got {type(stream).__name__}")


def _current_cupy(array: Any) -> int:
    cupy = sys.modules["cupy"]
    device = array.data.device_id
    if device == cupy.cuda.runtime.getDevice():
        return int(cupy.cuda.get_current_stream().ptr)
    return int(cupy.cuda.get_current_stream(device).ptr)


def _current_interface(array: Any) -> int:
    return int(array.__cuda_array_interface__.get("stream") or 0)


def _legacy_default(array: Any) -> int:
    return 0


def _torch_current(torch: Any) -> Callable[[Any], int]:
    raw_stream = torch._C._cuda_getCurrentRawStream

    def read(tensor: Any) -> int:
        return raw_stream(tensor.get_device())  # type: ignore[no-any-return]

    return read


_readers: dict[type, Callable[[Any], int]] = {}


def _find_reader(kind: type) -> Callable[[Any], int]:
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and issubclass(kind, torch.Tensor):
        reader = _torch_current(torch)
    elif cupy is not None and issubclass(kind, cupy.ndarray):
        reader = _current_cupy
    elif hasattr(kind, "__cuda_array_interface__"):
        reader = _current_interface
    else:
        reader = _legacy_default
    _readers[kind] = reader
    return reader


def current(array: Any) -> int:
    """Handle of the stream that the library of `array` currently uses on the array's device.

    torch and CuPy say it themselves; the CUDA array interface carries it; a DLPack-only array gets the legacy default stream.
    """
    reader = _readers.get(type(array)) or _find_reader(type(array))
    return reader(array)


def choose(stream: Any, array: Any) -> int:
    """Handle of `stream`, or of the current stream of `array`'s library when `stream` is None.

    Raises
    ------
    ArgumentError
        The stream is of another device than the array.
    """
    if stream is not None:
        handle = handle_of(stream)
        # Only a machine with several devices pays for the question.
        if devices.count() > 1:
            _refuse_other_device(handle, array)
        return handle
    return (_readers.get(type(array)) or _find_reader(type(array)))(array)


def _refuse_other_device(handle: int, array: Any) -> None:
    from gpukit.arrays import device_of

    own, where = devices.of_stream(handle), device_of(array)
    if own is not None and where >= 0 and own != where:
        raise ArgumentError(f"stream: expected a stream of device {where}, where the arrays are, got one of device {own}")
