"""Checks of strided tensors that the plans of the recurrent-state ops share: dtype, dimensions, what must be contiguous, and where writing is safe.

Strides are in elements. bfloat16 arrays may come as uint16, because an array library may lack the type.
"""

from __future__ import annotations

from typing import Any

from gpukit.arrays import ITEMSIZE, contiguous_strides, describe, overlap
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.kernels._plans import refuse_other_device

__all__ = ["BF16", "NUMBERS", "Tensor", "like_shape", "multiple_of", "refuse_overlap", "require_aligned", "same_bytes", "tensor"]

BF16 = ("bfloat16", "uint16")
NUMBERS = ("float32", *BF16)

# dtypes that stand for each other, because an array library may lack one of them.
_TWINS = {("uint16", "bfloat16"), ("uint8", "float8_e4m3fn"), ("uint8", "float8_e5m2")}

# (pointer, shape, element strides, dtype name, device)
Tensor = tuple[int, tuple[int, ...], tuple[int, ...], str, int]


def tensor(
    array: Any,
    name: str,
    dtypes: tuple[str, ...],
    dimensions: tuple[int, ...],
    device: int | None = None,
    *,
    contiguous: int = 1,
    written: bool = False,
) -> Tensor:
    """Check a tensor: its dtype, how many dimensions it has, that the last `contiguous` of them are, and that it may be written.

    With ``contiguous=-n`` all but the first n dimensions are contiguous.
    """
    pointer, dtype, shape, strides, where, writable = describe(array, name)
    if device is not None and where != device:
        refuse_other_device(name, where, device)
    if dtype not in dtypes:
        raise ArgumentTypeError(f"{name}: expected dtype {' or '.join(dtypes)}, got {dtype}")
    if len(shape) not in dimensions:
        raise ArgumentError(f"{name}: expected {' or '.join(map(str, dimensions))} dimensions, got shape {tuple(shape)}")
    full = contiguous_strides(shape)
    if contiguous < 0:
        contiguous += len(shape)
    if strides is None:
        strides = full
    elif any(shape[axis] > 1 and strides[axis] != full[axis] for axis in range(len(shape) - contiguous, len(shape))):
        wanted = "a contiguous array" if contiguous == len(shape) else f"the last {contiguous} dimension{'s' * (contiguous > 1)} contiguous"
        raise ArgumentError(f"{name}: expected {wanted}, got shape {tuple(shape)}, element strides {tuple(strides)}")
    if written:
        if not writable:
            raise ArgumentError(f"{name}: expected a writable array, got a read-only one")
        if 0 not in shape:
            _require_apart(name, shape, strides)
    return pointer, tuple(shape), tuple(strides), dtype, where


def _require_apart(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Refuse an output whose elements may lie on top of each other."""
    span = 1
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True) if length > 1):
        if stride < span:
            raise ArgumentError(f"{name}: expected elements apart from each other, got shape {tuple(shape)}, element strides {tuple(strides)}")
        span += stride * (length - 1)


def like_shape(shape: tuple[int, ...], name: str, expected: tuple[int, ...], whose: str) -> None:
    """Refuse a shape that is not the one of the argument `whose`."""
    if shape != expected:
        raise ArgumentError(f"{name}: expected shape {expected} like {whose}, got {shape}")


def same_bytes(one: str, other: str) -> bool:
    """Whether two dtypes are the same, or one stands for the other."""
    return one == other or (one, other) in _TWINS or (other, one) in _TWINS


def multiple_of(unit: int, *numbers: int) -> bool:
    """Whether all of the numbers are multiples of a power of two."""
    joined = 0
    for number in numbers:
        joined |= number
    return joined & (unit - 1) == 0


def require_aligned(name: str, address: int) -> None:
    """Refuse an address that accesses of 16 bytes cannot begin at."""
    if address % 16:
        raise ArgumentError(f"{name}: expected an address that is a multiple of 16, got {address:#x}")


def refuse_overlap(name: str, one: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse two tensors that share an element."""
    if overlap(*((own[0], ITEMSIZE[own[3]], own[1], own[2]) for own in (one, other))):
        raise ArgumentError(f"{name}: expected memory apart from {other_name}, got an array that overlaps it")
