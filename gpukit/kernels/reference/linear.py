"""What projections and embedding look-ups mean, in NumPy."""

from __future__ import annotations

import numpy as np

from gpukit.errors import Signal
from gpukit.kernels.reference._bf16 import Array, as_float, store
from gpukit.kernels.reference._ids import add, as_ids


def linear(x: Array, weight: Array, out: Array, residual: Array | None = None) -> Array:
    """``x @ weight.T + residual``, one row at a time, so that the bits of a row do not depend on the others."""
    wide = as_float(weight).astype(np.float64)
    for row, values in enumerate(as_float(x).astype(np.float64)):
        total = wide @ np.array(values)
        if residual is not None:
            total = total + as_float(residual[row])
        if out.dtype == np.float32:
            out[row] = total
        else:
            store(out[row], total.astype(np.float32))
    return out


def embed(ids: Array, table: Array, out: Array, *, signal: Signal | None = None) -> Array:
    """Row ``ids[i]`` of the table; zeros for ids that are none of it."""
    wanted = as_ids(ids)
    add(signal, "out_of_range", wanted >= len(table))
    there = (wanted >= 0) & (wanted < len(table))
    bits = out.view(np.uint16)
    bits[~there] = 0
    bits[there] = table.view(np.uint16)[wanted[there]]
    return out
