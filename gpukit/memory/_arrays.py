"""The few array operations that the pool needs beside ops: copies between host and device, owned copies, byte views. By the arrays' library."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gpukit import arrays
from gpukit.arrays import ITEMSIZE, describe, library_of
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.kernels._plans import refuse_other_device
from gpukit.launch import IDS

__all__ = ["by_page", "byte_view", "check_ids", "owned", "to_device", "to_host", "whole_numbers"]

# dtypes that NumPy and CuPy lack, and what stands for them.
_TWINS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def check_ids(ids: Any, name: str, device: int) -> None:
    """Refuse what is no vector of int32 or int64 on the device; its strides may be any."""
    _, dtype, shape, _, where, _ = describe(ids, name)
    if where != device:
        refuse_other_device(name, where, device)
    if dtype not in IDS:
        raise ArgumentTypeError(f"{name}: expected dtype int32 or int64, got {dtype}")
    if len(shape) != 1:
        raise ArgumentError(f"{name}: expected 1 dimension, got shape {tuple(shape)}")


def whole_numbers(values: Any, name: str) -> np.ndarray:
    """Whole numbers of the host as a NumPy array, in the dtype that they have; empty ones in any."""
    # Reading an array of a device would wait for it.
    if hasattr(values, "__cuda_array_interface__"):
        raise ArgumentTypeError(f"{name}: expected whole numbers in host memory, got {type(values).__name__} on a device")
    try:
        found = np.asarray(values)
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"{name}: expected whole numbers, got {type(values).__name__}") from None
    if found.size and found.dtype.kind not in "iu":
        kind = type(values).__name__ if found.dtype.kind not in "bf" else f"dtype {found.dtype}"
        raise ArgumentTypeError(f"{name}: expected whole numbers, got {kind}")
    return found


def to_host(array: Any) -> np.ndarray:
    """A NumPy copy. Waits for the device: for flushes, compaction and checks."""
    library = library_of(array)
    if library == "numpy":
        return np.array(array)
    if library == "torch":
        return np.asarray(array.cpu().numpy())
    if library == "numba":
        return np.asarray(array.copy_to_host())
    return np.asarray(sys.modules["cupy"].asnumpy(array))


def to_device(values: np.ndarray, like: Any) -> Any:
    """A copy in the library and on the device of `like`, through pinned memory where the library stages it; NumPy's own array otherwise."""
    library = "numpy" if like is None else library_of(like)
    if library == "numpy":
        return values
    if library == "torch":
        torch = sys.modules["torch"]
        return torch.from_numpy(np.ascontiguousarray(values)).pin_memory().to(like.device, non_blocking=True)
    if library == "numba":
        return sys.modules["numba.cuda"].to_device(values)
    # CuPy stages host arrays in its own pinned pool.
    return sys.modules["cupy"].asarray(values)


def owned(array: Any) -> Any:
    """A contiguous copy that nobody else writes, enqueued on the current stream of the array's library."""
    if library_of(array) == "torch":
        return array.contiguous().clone()
    if library_of(array) == "numba":
        return arrays.concatenate(array, array[:0])
    return array.copy()


def by_page(row_slice: Any, page_size: int) -> Any:
    """The virtual page of every `page_size`-th token of a row slice, in an array of its own."""
    return owned(row_slice[::page_size] // page_size if page_size > 1 else row_slice)


def byte_view(buffer: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
    """A strided view into a uint8 buffer; strides in bytes."""
    library, size = library_of(buffer), ITEMSIZE[dtype]
    if library == "torch":
        torch = sys.modules["torch"]
        elements = buffer[: len(buffer) // size * size].view(getattr(torch, dtype))
        return torch.as_strided(elements, shape, tuple(stride // size for stride in strides), offset // size)
    known = np.dtype(_TWINS.get(dtype, dtype))
    if library == "numpy":
        return np.ndarray(shape, known, buffer, offset, strides)
    if library == "cupy":
        cupy = sys.modules["cupy"]
        return cupy.ndarray(shape, known, cupy.cuda.MemoryPointer(buffer.data.mem, buffer.data.ptr - buffer.data.mem.ptr + offset), strides)
    raise ArgumentTypeError(f"buffer: expected a NumPy, CuPy or torch array, got {type(buffer).__name__}")
