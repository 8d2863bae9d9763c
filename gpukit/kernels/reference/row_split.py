"""What row-split integers mean, in NumPy: how codes lie in planes of bits, and the encoder, to the bit."""

from __future__ import annotations

import numpy as np

from gpukit.errors import ArgumentError, Signal
from gpukit.kernels._row_split import FORMATS, Format
from gpukit.kernels.reference._bf16 import Array, as_float
from gpukit.kernels.reference._ids import add

_ONE = np.float32(1)
# The smallest scale, for groups whose own is zero though they are not.
_SMALLEST = np.float16(2.0**-24)


def _grouped(values: Array, kind: Format) -> Array:
    """[rows, K] as [rows, groups, elements]."""
    return values.reshape(len(values), values.shape[1] // kind.group, kind.group)


def _bits(codes: Array, kind: Format) -> tuple[Array, Array]:
    """The two planes of codes [rows, groups, elements]."""
    if kind.bits == 8:
        return codes.view(np.uint8), np.zeros((*codes.shape[:2], 0), np.uint8)
    low = codes.view(np.uint8) & 15
    base = low[..., 0::2] | low[..., 1::2] << 4
    extra = kind.bits - 4
    if extra == 0:
        return base, np.zeros((*codes.shape[:2], 0), np.uint8)
    high = codes.view(np.uint8) >> 4 & (1 << extra) - 1
    single = high[..., None] >> np.arange(extra, dtype=np.uint8) & 1
    return base, np.packbits(single.reshape(*codes.shape[:2], kind.group * extra), axis=-1, bitorder="little")


def pack_codes(codes: Array, name: str, base: Array, high: Array | None, *, signal: Signal | None = None) -> tuple[Array, Array | None]:
    """Lay codes into planes; groups with a code that the format has not are left out."""
    kind = FORMATS[name]
    grouped = _grouped(codes, kind)
    good = np.all((grouped >= kind.least) & (grouped <= kind.most), axis=-1)
    add(signal, "out_of_range", np.logical_not(good))
    low, upper = _bits(np.ascontiguousarray(grouped), kind)
    base[good] = low[good]
    if high is not None:
        high[good] = upper[good]
    return base, high


def unpack_codes(base: Array, high: Array | None, name: str, out: Array) -> Array:
    """The codes that planes hold."""
    kind = FORMATS[name]
    grouped = _grouped(out, kind)
    if kind.bits == 8:
        grouped[...] = base.view(np.int8)
        return out
    numbers = np.stack((base & 15, base >> 4), -1).reshape(grouped.shape)
    extra = kind.bits - 4
    if extra and high is not None:
        single = np.unpackbits(high, axis=-1, bitorder="little").reshape(*grouped.shape, extra)
        numbers = numbers | (single << np.arange(extra, dtype=np.uint8)).sum(-1, dtype=np.uint8) << 4
    # Two's complement of fewer bits: shift the sign to the top, and back.
    grouped[...] = (numbers << 8 - kind.bits).view(np.int8) >> 8 - kind.bits
    return out


def quantize(values: Array, name: str, base: Array, high: Array | None, scales: Array, *, signal: Signal | None = None) -> None:
    """The canonical encoder, every step rounded to float32; groups that are not finite or too large are left out."""
    kind = FORMATS[name]
    grouped = _grouped(as_float(values), kind)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        largest = np.abs(grouped).max(-1) if grouped.size else np.zeros(grouped.shape[:2], np.float32)
        rounded = (largest / np.float32(kind.most)).astype(np.float16)
        good = np.isfinite(rounded)
        if signal is None and not good.all():
            row, group = np.argwhere(~good)[0].tolist()
            wanted = f"finite numbers, max|x| / {kind.most} in the range of float16"
            raise ArgumentError(f"values: expected {wanted}, got others in row {row}, group {group}")
        add(signal, "out_of_range", ~good)
        rounded[(rounded == 0) & (largest > 0)] = _SMALLEST
        reciprocal = np.where(rounded == 0, np.float32(0), _ONE / rounded.astype(np.float32))
        codes = np.clip(np.rint(grouped * reciprocal[..., None]), kind.least, kind.most)
    codes[~good] = 0
    low, upper = _bits(codes.astype(np.int8), kind)
    base[good], scales[good] = low[good], rounded[good]
    if high is not None:
        high[good] = upper[good]


def dequantize(base: Array, high: Array | None, scales: Array, name: str, out: Array) -> Array:
    """Code times scale, exact in float32."""
    kind = FORMATS[name]
    codes = unpack_codes(base, high, name, np.empty(out.shape, np.int8))
    np.multiply(_grouped(codes, kind), scales.astype(np.float32)[..., None], out=_grouped(out, kind), dtype=np.float32)
    return out
