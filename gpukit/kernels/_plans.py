"""What the plans of several ops share: checks of tables, sizes, signals and outputs. Each names the argument in its error."""

from __future__ import annotations

from typing import Any

from gpukit import arrays, devices
from gpukit.arrays import ITEMSIZE, describe, output, place
from gpukit.checks import whole
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal

__all__ = [
    "THREADS",
    "allocate",
    "blocks_for",
    "inverse",
    "out_vector",
    "page_shift",
    "positive",
    "read_table",
    "refuse_other_device",
    "refuse_overlap",
    "signal_pointer",
    "table",
    "tables",
    "whole",
]

# Threads per block of the element-wise index kernels: 64 to 256 measured alike on an H200, and small calls fit one block.
THREADS = 256

_INT64 = ("int64",)
_MOST = 2**31 - 1
_ONLY = {dtype: (dtype,) for dtype in ITEMSIZE}


def table(array: Any, name: str, device: int) -> tuple[int, int]:
    """Pointer and row count of a page table: int64, contiguous, writable, at least the sink and the sentinel."""
    pointer, rows, _, _ = output(array, name, _INT64, device)
    if rows < 2:
        raise ArgumentError(f"{name}: expected at least 2 rows (sink and sentinel), got {rows}")
    return pointer, rows


def tables(v2p: Any, p2v: Any, device: int) -> tuple[int, int, int, int]:
    """Pointers and row counts of a pair of tables that share no memory."""
    to_physical, virtual_rows = table(v2p, "v2p", device)
    to_virtual, physical_rows = table(p2v, "p2v", device)
    if to_physical < to_virtual + 8 * physical_rows and to_virtual < to_physical + 8 * virtual_rows:
        raise ArgumentError("p2v: expected a table apart from v2p, got one that shares memory with it")
    return to_physical, virtual_rows, to_virtual, physical_rows


def refuse_overlap(name: str, pointer: int, size: int, other: str, other_pointer: int, other_size: int) -> None:
    """Raise, if an output of `size` bytes shares memory with another argument: threads would read what others have written."""
    if pointer < other_pointer + other_size and other_pointer < pointer + size:
        raise ArgumentError(f"{name}: expected an array apart from {other}, got one that shares memory with it")


def read_table(array: Any, name: str, device: int) -> tuple[int, int]:
    """The same for a table that is only read; None is the virtual space, which translates to itself: (0, 0)."""
    if array is None:
        return 0, 0
    pointer, rows, _, _ = arrays.vector(array, name, _INT64, device)
    if rows < 2:
        raise ArgumentError(f"{name}: expected at least 2 rows (sink and sentinel), got {rows}")
    return pointer, rows


def positive(value: Any, name: str) -> int:
    """A Python or NumPy integer from 1 to 2^31 - 1: a page size, a number of pages, bytes of a page."""
    if type(value) is int and 0 < value <= _MOST:
        return value
    return whole(value, name, 1, _MOST)


def page_shift(page_size: int) -> int:
    """log2 of a power of two, else -1: kernels divide by shifting where they can."""
    return page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else -1


def signal_pointer(signal: Signal | None, device: int) -> int:
    """Address of a signal's counters, 0 without one."""
    if signal is None:
        return 0
    if not isinstance(signal, Signal):
        raise ArgumentTypeError(f"signal: expected a gpukit.Signal or None, got {type(signal).__name__}")
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


def inverse(divisor: int) -> int:
    """What a kernel divides by a number with: 2^32 / divisor, rounded down to 32 bits."""
    return min(2**32 // divisor, 2**32 - 1)


def refuse_other_device(name: str, where: int, device: int) -> None:
    """Raise, if `where` is not the device of the first argument."""
    if where != device:
        kind = ArgumentTypeError if (where < 0) != (device < 0) else ArgumentError
        raise kind(f"{name}: expected an array in {place(device)} like the first argument, got one in {place(where)}")
