"""bfloat16 in plain NumPy: arrays of ml_dtypes' bfloat16, or of uint16 that stands for it, to float32 and back with one rounding. No op is here."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def as_float(values: Array) -> Array:
    """The numbers as float32, exactly."""
    if values.dtype == np.float32:
        return values
    widened: Array = (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return widened


def rounded(values: Array) -> Array:
    """The bits of float32 numbers as bfloat16, to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = (bits + (((bits >> 16) & 1) + 0x7FFF).astype(np.uint32)) >> 16
    return np.where(np.isnan(values), 0x7FFF, nearest).astype(np.uint16)


def store(out: Array, values: Array) -> None:
    """Round numbers into an array of bfloat16 or uint16."""
    out.view(np.uint16)[...] = rounded(values)


def silu(values: Array) -> Array:
    """``x / (1 + exp(-x))``; the exponential of a very negative number overflows to infinity, as it should."""
    with np.errstate(over="ignore"):
        gated: Array = values / (1 + np.exp(-values))
    return gated
