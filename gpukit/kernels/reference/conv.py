"""What the causal convolution of a decode step means, in NumPy: four taps a channel, then SiLU, over a history of three columns a slot."""

from __future__ import annotations

import numpy as np

from gpukit.errors import Signal
from gpukit.kernels.reference._bf16 import Array, as_float, silu, store
from gpukit.kernels.reference._ids import add, as_ids, is_first


def _columns(x: Array, history: Array, slots: Array, rows: Array) -> Array:
    """The bits of history and input of some rows, one after the other in time: [rows, 3 + tokens, channels]."""
    return np.concatenate((history.view(np.uint16)[slots[rows]], x.view(np.uint16)[rows]), axis=1)


def _convolve(columns: Array, weight: Array) -> Array:
    """``silu(Σ_j weight[c, j] * column[t - 3 + j, c])`` as float32, for every token after the first three columns."""
    values, taps = as_float(columns), as_float(weight)
    tokens = columns.shape[1] - 3
    total = values[:, :tokens] * taps[:, 0]
    for tap in range(1, 4):
        total = total + values[:, tap : tap + tokens] * taps[:, tap]
    return silu(total)


def conv1d_silu(x: Array, weight: Array, history: Array, slots: Array, out: Array, *, signal: Signal | None = None) -> Array:
    """Convolve the rows and move their histories on; of equal slots the first row counts."""
    ids = as_ids(slots)
    past = ids >= len(history)
    add(signal, "out_of_range", past)
    rows = np.flatnonzero((ids >= 0) & ~past)
    first = is_first(ids[rows])
    add(signal, "unbound", ~first)
    rows = rows[first]
    columns = _columns(x, history, ids, rows)
    result = np.array(out.view(np.uint16)[rows])
    store(result, _convolve(columns, weight))
    out.view(np.uint16)[rows] = result
    history.view(np.uint16)[ids[rows]] = columns[:, -3:]
    return out


def conv1d_silu_record(
    x: Array,
    weight: Array,
    history: Array,
    slots: Array,
    log: Array,
    out: Array,
    valid: Array | None,
    previous: Array | None = None,
    accepted: Array | None = None,
    *,
    signal: Signal | None = None,
) -> Array:
    """Convolve the rows and log their columns; histories take the accepted columns of a previous log first, if there is one, and no others."""
    ids, tokens = as_ids(slots), x.shape[1]
    counts = np.full(len(ids), tokens) if valid is None else as_ids(valid)
    bad = (ids >= 0) & ((ids >= len(history)) | (counts < 0) | (counts > tokens))
    if previous is not None:
        taken = as_ids(accepted)
        bad |= (ids >= 0) & ((taken < 0) | (taken > previous.shape[1]))
    add(signal, "out_of_range", bad)
    rows = np.flatnonzero((ids >= 0) & ~bad)
    if previous is not None:
        first = is_first(ids[rows])
        add(signal, "unbound", ~first)
        rows = rows[first]
        known = _columns(previous, history, ids, rows)
        history.view(np.uint16)[ids[rows]] = known[np.arange(len(rows))[:, None], taken[rows, None] + np.arange(3)]
    columns = _columns(x, history, ids, rows)
    result = np.array(out.view(np.uint16)[rows])
    store(result, _convolve(columns, weight))
    is_valid = np.arange(tokens) < counts[rows, None]
    result[~is_valid] = 0
    where = np.nonzero(is_valid)
    log.view(np.uint16)[rows[where[0]], where[1]] = columns[:, 3:][where]
    out.view(np.uint16)[rows] = result
    return out
