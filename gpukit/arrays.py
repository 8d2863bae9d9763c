"""The one place that reads arrays: NumPy, CuPy, torch, Numba, and anything with the CUDA array interface or DLPack.

`describe` turns an array of any of them into one plain tuple; the other functions check such tuples and say, by argument name, what was
expected and what came. Nothing here copies data or waits for a device. Streams are read in `streams`, not here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpukit.errors import ArgumentError, ArgumentTypeError

__all__ = ["HOST", "ITEMSIZE", "concatenate", "describe", "device_of", "empty", "full", "is_host", "matrix", "output", "overlap", "vector"]

# The device ordinal of an array in host memory.
HOST = -1

# (pointer, dtype name, shape, element strides or None when C-contiguous, device ordinal, writable)
Description = tuple[int, str, tuple[int, ...], "tuple[int, ...] | None", int, bool]

ITEMSIZE = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}


def _describe_numpy(array: Any) -> Description:
    strides = None if array.flags.c_contiguous else _element_strides(array.strides, array.dtype)
    return array.ctypes.data, _name(array.dtype), array.shape, strides, HOST, array.flags.writeable


def _name(dtype: Any) -> str:
    if not dtype.isnative:
        raise ArgumentTypeError(f"array: expected values in this machine's byte order, got dtype {dtype.str}")
    return str(dtype.name)


def _element_strides(strides: Sequence[int], dtype: Any) -> tuple[int, ...]:
    if any(stride % dtype.itemsize for stride in strides):
        raise ArgumentError(f"array: expected strides of whole elements ({dtype.itemsize} bytes), got byte strides {tuple(strides)}")
    return tuple(stride // dtype.itemsize for stride in strides)


# torch.Tensor and the names of its dtypes, once torch has been seen: the checks of vectors read plain tensors in place, without a call in between.
_Tensor: Any = None
_tensor_dtypes: dict[Any, str] = {}


def _describe_torch(tensor: Any) -> Description:
    strides = None if tensor.is_contiguous() else tensor.stride()
    return tensor.data_ptr(), _tensor_dtypes[tensor.dtype], tensor.shape, strides, tensor.get_device(), True


def _learn_torch(torch: Any) -> None:
    global _Tensor
    _tensor_dtypes.update({value: str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)})
    _Tensor = torch.Tensor


def _describe_cupy(array: Any) -> Description:
    memory = array.data
    dtype = array.dtype
    strides = None if array._c_contiguous else _element_strides(array.strides, dtype)
    return memory.ptr, dtype.name, array.shape, strides, memory.device_id, True


def _describe_interface(array: Any) -> Description:
    from gpukit import devices

    try:
        interface = array.__cuda_array_interface__
    except AttributeError:
        # JAX has the property on every array and refuses it for those of the host.
        return _describe_dlpack(array)
    if interface.get("mask") is not None:
        raise ArgumentTypeError("array: expected an array without a mask, got one with a mask")
    dtype = np.dtype(interface["typestr"])
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    strides = None if strides is None else _element_strides(strides, dtype)
    pointer, read_only = interface["data"]
    if strides == contiguous_strides(shape):
        strides = None
    return pointer or 0, _name(dtype), shape, strides, devices.of_pointer(pointer or 0), not read_only


def _describe_dlpack(array: Any) -> Description:
    kind, ordinal = array.__dlpack_device__()
    # kDLCPU = 1, kDLCUDAHost = 3: host memory of a library that is not NumPy.
    if kind not in (1, 3):
        from cuda.core.utils import StridedMemoryView

        view = StridedMemoryView.from_dlpack(array, stream_ptr=-1)
        shape = tuple(view.shape)
        strides = None if view.strides is None or tuple(view.strides) == contiguous_strides(shape) else tuple(view.strides)
        return view.ptr, np.dtype(view.dtype).name, shape, strides, ordinal, not view.readonly
    return (*_describe_numpy(np.from_dlpack(array))[:4], HOST, False)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Element strides of a C-contiguous array of `shape`."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


_readers: dict[type, Callable[[Any], Description]] = {np.ndarray: _describe_numpy}


def _find_reader(kind: type, name: str) -> Callable[[Any], Description]:
    """Choose, once per type, how arrays of that type are read."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    reader: Callable[[Any], Description]
    if issubclass(kind, np.ndarray):
        reader = _describe_numpy
    elif torch is not None and issubclass(kind, torch.Tensor):
        _learn_torch(torch)
        reader = _describe_torch
    elif cupy is not None and issubclass(kind, cupy.ndarray):
        reader = _describe_cupy
    elif hasattr(kind, "__cuda_array_interface__"):
        reader = _describe_interface
    elif hasattr(kind, "__dlpack__"):
        reader = _describe_dlpack
    else:
        raise ArgumentTypeError(f"{name}: expected an array (NumPy, CuPy, torch, __cuda_array_interface__ or DLPack), got {kind.__name__}")
    _readers[kind] = reader
    return reader


def describe(array: Any, name: str = "array") -> Description:
    """Read an array of any supported library.

    Returns
    -------
    tuple
        ``(pointer, dtype name, shape, element strides or None when C-contiguous, device ordinal or HOST, writable)``.

    Raises
    ------
    ArgumentTypeError
        The object is no array.

    Examples
    --------
    >>> import numpy as np
    >>> describe(np.zeros((2, 3), np.int64)[:, ::2])[1:]
    ('int64', (2, 2), (3, 2), -1, True)
    """
    kind = type(array)
    reader = _readers.get(kind) or _find_reader(kind, name)
    try:
        found = reader(array)
    except ArgumentError as error:
        raise type(error)(str(error).replace("array", name, 1)) from None
    if found[4] < 0:
        if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
            raise ArgumentTypeError(f"{name}: expected a NumPy array or one in device memory, got {_kind(kind)} in host memory")
    elif found[0] % ITEMSIZE.get(found[1], 1):
        raise ArgumentError(f"{name}: expected an address aligned to its {ITEMSIZE[found[1]]}-byte elements, got {found[0]:#x}")
    return found


def _kind(kind: type) -> str:
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def is_host(array: Any) -> bool:
    """Whether the array lies in host memory, that is, whether ops on it run the NumPy reference."""
    return describe(array)[4] < 0


def device_of(array: Any) -> int:
    """Ordinal of the array's device, `HOST` for host memory."""
    return max(describe(array)[4], HOST)


def vector(array: Any, name: str, dtypes: tuple[str, ...], device: int | None = None) -> tuple[int, int, str, int]:
    """Check a contiguous 1-D input and return ``(pointer, length, dtype name, device)``; `device` is where it must be, if given."""
    if type(array) is _Tensor and array.is_contiguous():
        shape, dtype, where = array.shape, _tensor_dtypes[array.dtype], array.get_device()
        if len(shape) == 1 and dtype in dtypes and where >= 0 and (device is None or where == device):
            return array.data_ptr(), shape[0], dtype, where
    pointer, dtype, shape, strides, where, _ = describe(array, name)
    if dtype not in dtypes or len(shape) != 1 or strides is not None or (device is not None and where != device):
        _refuse(name, dtype, shape, strides, where, dtypes, 1, device, contiguous=True)
    return pointer, shape[0], dtype, where


def matrix(array: Any, name: str, dtypes: tuple[str, ...], device: int | None = None) -> tuple[int, tuple[int, int], tuple[int, int], str, int]:
    """Check a 2-D input of any strides and return ``(pointer, shape, element strides, dtype name, device)``."""
    pointer, dtype, shape, strides, where, _ = describe(array, name)
    if dtype not in dtypes or len(shape) != 2 or (device is not None and where != device):
        _refuse(name, dtype, shape, strides, where, dtypes, 2, device, contiguous=False)
    rows, columns = shape
    return pointer, (rows, columns), (columns, 1) if strides is None else (strides[0], strides[1]), dtype, where


def output(array: Any, name: str, dtypes: tuple[str, ...], device: int, length: int | None = None) -> tuple[int, int, str, int]:
    """Check a contiguous, writable 1-D output; `length` is the exact length it must have, if given."""
    if type(array) is _Tensor and array.is_contiguous():
        shape, dtype, where = array.shape, _tensor_dtypes[array.dtype], array.get_device()
        if where == device >= 0 and dtype in dtypes and len(shape) == 1 and (length is None or shape[0] == length):
            return array.data_ptr(), shape[0], dtype, where
    pointer, dtype, shape, strides, where, writable = describe(array, name)
    if dtype not in dtypes or len(shape) != 1 or strides is not None or where != device:
        _refuse(name, dtype, shape, strides, where, dtypes, 1, device, contiguous=True)
    if not writable:
        raise ArgumentError(f"{name}: expected a writable array, got a read-only one")
    if length is not None and shape[0] != length:
        raise ArgumentError(f"{name}: expected shape ({length},), got {tuple(shape)}")
    return pointer, shape[0], dtype, where


def require_writable(array: Any, name: str) -> None:
    """Refuse a read-only array by name."""
    if not describe(array, name)[5]:
        raise ArgumentError(f"{name}: expected a writable array, got a read-only one")


def place(device: int) -> str:
    """How a device is called in messages."""
    return "host memory" if device < 0 else f"device {device}"


def _refuse(
    name: str,
    dtype: str,
    shape: Sequence[int],
    strides: Sequence[int] | None,
    where: int,
    dtypes: tuple[str, ...],
    dimensions: int,
    device: int | None,
    contiguous: bool,
) -> None:
    if device is not None and where != device:
        kind = ArgumentTypeError if (where < 0) != (device < 0) else ArgumentError
        raise kind(f"{name}: expected an array in {place(device)} like the first argument, got one in {place(where)}")
    if dtype not in dtypes:
        raise ArgumentTypeError(f"{name}: expected dtype {' or '.join(dtypes)}, got {dtype}")
    if len(shape) != dimensions:
        raise ArgumentError(f"{name}: expected {dimensions} dimension{'s' * (dimensions > 1)}, got shape {tuple(shape)}")
    if contiguous and strides is not None:
        # A single element or an empty array is contiguous whatever its strides say.
        raise ArgumentError(f"{name}: expected a contiguous array, got element strides {tuple(strides)}")


def library_of(array: Any) -> str:
    """Name of the library whose arrays `empty` makes for `array`: numpy, torch, cupy or numba; cupy for every unknown device array."""
    root = type(array).__module__.partition(".")[0]
    if root in ("torch", "cupy", "numba"):
        return root
    if isinstance(array, np.ndarray):
        return "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return "torch"
    return "numpy" if is_host(array) else "cupy"


def empty(shape: int | tuple[int, ...], dtype: str, like: Any, stream: int | None = None) -> Any:
    """Allocate an uninitialised array in the library and on the device of `like`, ordered on `stream` (None: its current stream)."""
    shape = (shape,) if isinstance(shape, int) else shape
    library = "numpy" if like is None else library_of(like)
    if library == "numpy":
        return np.empty(shape, np.dtype(dtype))
    device = device_of(like)
    if library == "torch":
        torch = sys.modules["torch"]
        if stream is None or stream == torch._C._cuda_getCurrentRawStream(device):
            return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=like.device)):
            return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    if library == "numba":
        cuda = sys.modules["numba.cuda"]
        with cuda.gpus[device]:
            return cuda.device_array(shape, np.dtype(dtype))
    import cupy

    with cupy.cuda.Device(device):
        if stream is None or stream == cupy.cuda.get_current_stream().ptr:
            return cupy.empty(shape, dtype)
        with cupy.cuda.ExternalStream(stream, device):
            return cupy.empty(shape, dtype)


def full(shape: int | tuple[int, ...], value: int, dtype: str, like: Any) -> Any:
    """Allocate an array like `empty` does and fill it with `value`."""
    library = "numpy" if like is None else library_of(like)
    if library != "numpy":
        from gpukit import devices, streams

        if devices.is_capturing(streams.current(like)):
            raise ArgumentError("like: expected a stream that is not capturing, because a replay would fill the array again")
    if library == "numba":
        cuda = sys.modules["numba.cuda"]
        with cuda.gpus[device_of(like)]:
            return cuda.to_device(np.full(shape, value, np.dtype(dtype)))
    array = empty(shape, dtype, like)
    # Not every array of an unknown library: `empty` makes CuPy's for it, but for a stand-in of the tests one of its own.
    if type(array).__module__.partition(".")[0] == "cupy":
        import cupy

        # CuPy fills with a kernel of the current device.
        with cupy.cuda.Device(device_of(like)):
            array[...] = value
    else:
        array[...] = value
    return array


def concatenate(first: Any, second: Any) -> Any:
    """A new array in the library of `first` with the elements of both contiguous vectors, copied on its current stream without waiting."""
    if is_host(first):
        return np.concatenate((first, second))
    from gpukit import devices, streams

    handle = streams.current(first)
    dtype, device = describe(first)[1], device_of(first)
    joined = empty(len(first) + len(second), dtype, first, handle)
    target = describe(joined)[0]
    bindings = devices.driver()
    with devices.current(device):
        for part in (first, second):
            size = len(part) * ITEMSIZE[dtype]
            if size:
                devices.call(bindings.cuMemcpyDtoDAsync(target, describe(part)[0], size, handle), "cuMemcpyDtoDAsync")
            target += size
    return joined


class _Layout:
    """A strided array by its numbers alone, for NumPy's exact overlap test; its memory is never touched."""

    def __init__(self, pointer: int, itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...]):
        byte_strides = tuple(stride * itemsize for stride in strides)
        self.__array_interface__ = {"version": 3, "data": (pointer, False), "typestr": f"|V{itemsize}", "shape": shape, "strides": byte_strides}


# (pointer, item size, shape, element strides): an array by its numbers alone.
Extent = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def span(extent: Extent) -> tuple[int, int]:
    """Address of the first byte of an array and of the one after its last; twice the same for an empty one.

    Examples
    --------
    >>> span((4096, 8, (4,), (-2,)))
    (4048, 4104)
    """
    pointer, itemsize, shape, strides = extent
    low = high = 0
    for length, stride in zip(shape, strides, strict=True):
        if length == 0:
            return pointer, pointer
        reach = (length - 1) * stride
        if reach < 0:
            low += reach
        else:
            high += reach
    return pointer + low * itemsize, pointer + (high + 1) * itemsize


def overlap(first: Extent, second: Extent) -> bool:
    """Whether two arrays share an element; True where that is too hard to say.

    Examples
    --------
    >>> overlap((4096, 8, (4,), (2,)), (4104, 8, (4,), (2,)))
    False
    """
    (begin, end), (other_begin, other_end) = span(first), span(second)
    # The exact test costs more than a launch.
    if begin >= other_end or other_begin >= end:
        return False
    one, other = np.asarray(_Layout(*first)), np.asarray(_Layout(*second))
    try:
        # The stubs know only two of the integers that max_work may be.
        return np.shares_memory(one, other, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
