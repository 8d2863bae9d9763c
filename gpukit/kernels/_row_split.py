"""The formats of row-split integers, and the planes that hold a matrix in one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpukit import arrays
from gpukit.arrays import describe
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.kernels._plans import refuse_overlap
from gpukit.kernels._tensors import require_aligned, tensor

__all__ = ["FORMATS", "Format", "RowSplit", "planes"]


@dataclass(frozen=True)
class Format:
    """A row-split format: its bits, elements of a group, smallest and largest code, and the bytes of a group in the two planes of bits."""

    bits: int
    group: int
    least: int
    most: int
    base_bytes: int
    high_bytes: int


FORMATS = {
    "q4": Format(4, 64, -8, 7, 32, 0),
    "q5": Format(5, 64, -16, 15, 32, 8),
    "q6": Format(6, 64, -32, 31, 32, 16),
    "w8": Format(8, 32, -127, 127, 32, 0),
}


@dataclass(frozen=True)
class RowSplit:
    """A matrix of row-split integers: symmetric codes in planes of bits, one float16 scale for every group of a row.

    Parameters
    ----------
    format : {"q4", "q5", "q6", "w8"}
        Bits of a code; groups have 64 elements, those of "w8" 32.
    base : uint8 array, shape (rows, groups, 32)
        The four low bits of every code, element 2j in the low half of byte j; all eight bits for "w8". Two's complement.
    high : uint8 array, shape (rows, groups, 8 or 16), or None
        What is above them, least significant bit first: one bit a code for "q5", two for "q6"; None for the others.
    scales : float16 array, shape (rows, groups)
        What codes are multiplied by.

    Examples
    --------
    >>> RowSplit.empty("q5", 4, 128).high.shape
    (4, 2, 8)
    """

    format: str
    base: Any
    high: Any
    scales: Any

    @classmethod
    def empty(cls, format: str, rows: int, columns: int, like: Any = None) -> RowSplit:
        """Planes for a matrix, uninitialised, in the library and on the device of `like`.

        Raises
        ------
        ArgumentError
            There is no such format, or `columns` is no multiple of its group.
        """
        kind = format_of(format)
        if columns % kind.group:
            raise ArgumentError(f"columns: expected a multiple of {kind.group}, the group of {format}, got {columns}")
        groups = columns // kind.group
        high = arrays.empty((rows, groups, kind.high_bytes), "uint8", like) if kind.high_bytes else None
        base, scales = arrays.empty((rows, groups, kind.base_bytes), "uint8", like), arrays.empty((rows, groups), "float16", like)
        return cls(format, base, high, scales)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, elements of a row)."""
        rows, groups = describe(self.scales, "scales")[2]
        return rows, groups * FORMATS[self.format].group


def format_of(format: Any) -> Format:
    """The format of a name."""
    if not isinstance(format, str) or format not in FORMATS:
        raise ArgumentError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    return FORMATS[format]


def plane(array: Any, name: str, shape: tuple[int, ...], device: int | None, *, dtype: str = "uint8", written: bool = False) -> int:
    """Address of a plane of the shape that is needed, contiguous, at a multiple of 16."""
    address, found, _, _, _ = tensor(array, name, (dtype,), (len(shape),), device, contiguous=len(shape), written=written)
    if found != shape:
        raise ArgumentError(f"{name}: expected shape {shape}, got {found}")
    require_aligned(name, address)
    return address


def code_planes(format: Any, base: Any, high: Any, rows: int, columns: int, device: int, *, name: str = "", written: bool = False) -> tuple[int, int]:
    """Addresses of the two planes of bits, 0 for one that the format has not."""
    kind = format_of(format)
    if columns % kind.group:
        raise ArgumentError(f"{name or 'codes'}: expected rows of a multiple of {kind.group} elements, the group of {format}, got {columns}")
    groups = columns // kind.group
    base_at = plane(base, f"{name}base", (rows, groups, kind.base_bytes), device, written=written)
    if kind.high_bytes == 0:
        if high is not None:
            raise ArgumentError(f"{name}high: expected None, because {format} has no such plane, got {type(high).__name__}")
        return base_at, 0
    if high is None:
        raise ArgumentError(f"{name}high: expected an array of shape {(rows, groups, kind.high_bytes)}, the plane of {format}, got None")
    return base_at, plane(high, f"{name}high", (rows, groups, kind.high_bytes), device, written=written)


def planes(weights: Any, name: str, rows: int, columns: int, device: int, *, written: bool = False) -> tuple[int, int, int]:
    """Addresses of base, high and scales of a matrix of known size."""
    if not isinstance(weights, RowSplit):
        raise ArgumentTypeError(f"{name}: expected a RowSplit, got {type(weights).__name__}")
    base_at, high_at = code_planes(weights.format, weights.base, weights.high, rows, columns, device, name=f"{name}.", written=written)
    groups = columns // FORMATS[weights.format].group
    return base_at, high_at, plane(weights.scales, f"{name}.scales", (rows, groups), device, dtype="float16", written=written)


Block = tuple[str, int, int]


def blocks_of(name: str, format: str, rows: int, columns: int, base_at: int, high_at: int, scales_at: int = 0) -> list[Block]:
    """Name, address and bytes of the planes that are there."""
    kind = FORMATS[format]
    groups = rows * (columns // kind.group)
    found = (("base", base_at, groups * kind.base_bytes), ("high", high_at, groups * kind.high_bytes), ("scales", scales_at, 2 * groups))
    return [(name + plane, address, size) for plane, address, size in found if address]


def keep_apart(written: list[Block], read: list[Block]) -> None:
    """Raise, if blocks that are written share memory with each other or with what is read."""
    for i, block in enumerate(written):
        for other in (*written[:i], *read):
            refuse_overlap(*block, *other)
