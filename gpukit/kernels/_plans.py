"""What the plans of several ops share: checks of tables, sizes, signals and outputs. Each names the argument in its error."""

from __future__ import annotations

from typing import Any

from gpukit import arrays, devices
from gpukit.arrays import ITEMSIZE, describe, output, place
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal

__all__ = [
    "THREADS",
    "allocate",
    "blocks_for",
    "out_vector",
    "page_shift",
    "positive",
    "read_table",
    "refuse_other_device",
    "signal_pointer",
    "table",
    "whole",
]

# Threads per block of the element-wise index kernels: 64 to 256 measured alike on an H200, and small calls fit one block.
THREADS = 256

_INT64 = ("int64",)
_ONLY = {dtype: (dtype,) for dtype in ITEMSIZE}


def table(array: Any, name: str, device: int) -> tuple[int, int]:
    """Pointer and row count of a page table: int64, contiguous, writable, at least the sink and the sentinel."""
    pointer, rows, _, _ = output(array, name, _INT64, device)
    if rows < 2:
        raise ArgumentError(f"{name}: expected at least 2 rows (sink and sentinel), got {rows}")
    return pointer, rows


def read_table(array: Any, name: str, device: int) -> tuple[int, int]:
    """The same for a table that is only read; None is the virtual space, which translates to itself: (0, 0)."""
    if array is None:
        return 0, 0
    pointer, rows, _, _ = arrays.vector(array, name, _INT64, device)
    if rows < 2:
        raise ArgumentError(f"{name}: expected at least 2 rows (sink and sentinel), got {rows}")
    return pointer, rows


def whole(value: Any, name: str, least: int = 0) -> int:
    """A Python or NumPy integer of at least `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(f"{name}: expected an integer, got {type(value).__name__}")
    number = value.__index__()
    if number < least:
        raise ArgumentError(f"{name}: expected at least {least}, got {number}")
    return int(number)


def positive(value: Any, name: str) -> int:
    """A Python or NumPy integer of at least 1."""
    if type(value) is int and value > 0:
        return value
    return whole(value, name, 1)


def page_shift(page_size: int) -> int:
    """log2 of a power of two, else -1: kernels divide by shifting where they can."""
    return page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else -1


def signal_pointer(signal: Signal | None, device: int) -> int:
    """Address of a signal's counters, 0 without one."""
    if signal is None:
        return 0
    if signal.device != device:
        where = "the host" if signal.device is None else f"device {signal.device}"
        raise ArgumentError(f"signal: expected a Signal of device {device} (Signal(like=array)), got one of {where}")
    return signal.pointer


def out_vector(out: Any, name: str, length: int, dtype: str, device: int, like: Any, stream: int) -> tuple[Any, int]:
    """The given output after a check, or a new one in the library of `like`, and its pointer."""
    if out is not None:
        return out, output(out, name, _ONLY[dtype], device, length)[0]
    return allocate(name, length, dtype, like, stream)


def allocate(name: str, shape: int | tuple[int, ...], dtype: str, like: Any, stream: int) -> tuple[Any, int]:
    """A new output in the library of `like`, and its pointer; refused inside a capture, where an allocation would be lost."""
    if devices.is_capturing(stream):
        raise ArgumentError(f"{name}: expected an array, because the stream is capturing and nothing may be allocated; got None")
    array = arrays.empty(shape, dtype, like, stream)
    return array, describe(array)[0]


def blocks_for(count: int, threads: int = THREADS) -> int:
    """Blocks that give every one of `count` elements a thread."""
    return (count + threads - 1) // threads


def refuse_other_device(name: str, where: int, device: int) -> None:
    """Raise, if `where` is not the device of the first argument."""
    if where != device:
        kind = ArgumentTypeError if (where < 0) != (device < 0) else ArgumentError
        raise kind(f"{name}: expected an array in {place(device)} like the first argument, got one in {place(where)}")
