"""What the gated delta rule means, in NumPy: fp32 states taken past tokens, directly or by a log that is folded later.

Arithmetic is fp32 in the order of the formulas, so that results agree with the kernels' within rounding, not to the bit. bfloat16 is read
and written as its 16 bits, whatever dtype the arrays have for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpukit.errors import Signal
from gpukit.kernels.reference import conv
from gpukit.kernels.reference._bf16 import as_float, rounded
from gpukit.kernels.reference._ids import Array, add, as_ids

if TYPE_CHECKING:
    from gpukit.kernels.state_pool import ReplayLog, StatePool


def step(state: Array, k: Array, v: Array, g: Array, beta: Array, normalize: bool) -> None:
    """Take states [Hv, V, K] past one token: k [Hk, K], v [Hv, V], g and beta [Hv]. In place."""
    k = _per_value_head(_normalized(k, normalize), len(state))
    decay = np.exp(g)[:, None]
    d = beta[:, None] * (v - decay * np.einsum("hvk,hk->hv", state, k))
    state[:] = decay[:, :, None] * state + d[:, :, None] * k[:, None, :]


def states_in(states: Array, slot: int) -> Array:
    """A copy of the states in a slot, as float32."""
    found = states[slot]
    return np.array(found) if found.dtype == np.float32 else as_float(found)


def put(states: Array, slot: int, state: Array) -> None:
    """Store states, rounded if they are kept in bfloat16."""
    if states.dtype == np.float32:
        states[slot] = state
    else:
        states[slot].view(np.uint16)[...] = rounded(state)


def pass_token(state: Array, k: Array, v: Array, g: Array, beta: Array, normalize: bool, like: Array) -> None:
    """`step`, and then what storing the states in an array like `like` would leave of them."""
    step(state, k, v, g, beta, normalize)
    if like.dtype != np.float32:
        state[:] = as_float(rounded(state))


def look(state: Array, q: Array, scale: float, normalize: bool) -> Array:
    """What a query [Hk, K] reads from states [Hv, V, K]."""
    out: Array = np.float32(scale) * np.einsum("hvk,hk->hv", state, _per_value_head(_normalized(q, normalize), len(state)))
    return out


def _normalized(x: Array, normalize: bool) -> Array:
    if not normalize:
        return x
    scaled: Array = x / np.sqrt((x * x).sum(-1, keepdims=True) + np.float32(1e-6))
    return scaled


def _per_value_head(x: Array, heads: int) -> Array:
    return np.repeat(x, heads // len(x), axis=0)


def _free_destinations(sources: Array, destinations: Array, usable: Array) -> Array:
    """Mask of the usable items whose destination is neither source nor destination of another usable one."""
    free = np.zeros(len(sources), bool)
    for i in np.flatnonzero(usable):
        others = usable & (np.arange(len(usable)) != i)
        free[i] = not ((sources[others] == destinations[i]) | (destinations[others] == destinations[i])).any()
    return free


def direct(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    pool: StatePool,
    slots: Array,
    *,
    layer: int,
    out: Array,
    destination_slots: Array | None,
    scale: float,
    normalize: bool,
    signal: Signal | None = None,
) -> Array:
    """Take the states in `slots` past all tokens and store them; outputs on the way."""
    sources = as_ids(slots)
    destinations = sources if destination_slots is None else as_ids(destination_slots)
    padding = (sources < 0) | (destinations < 0)
    usable = ~padding & (sources < pool.slots) & (destinations < pool.slots)
    free = _free_destinations(sources, destinations, usable)
    add(signal, "out_of_range", ~padding & ~usable)
    add(signal, "occupied", usable & ~free)
    states, bits = pool.rec[layer], out.view(np.uint16)
    bits[...] = 0
    for b in np.flatnonzero(free):
        state = states_in(states, sources[b])
        for t in range(q.shape[1]):
            pass_token(state, as_float(k[b, t]), as_float(v[b, t]), g[b, t], beta[b, t], normalize, states)
            bits[b, t] = rounded(look(state, as_float(q[b, t]), scale, normalize))
        put(states, destinations[b], state)
    return out


def snapshot(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    pool: StatePool,
    slots: Array,
    snapshot_slots: Array,
    *,
    layer: int,
    out: Array,
    scale: float,
    normalize: bool,
    signal: Signal | None = None,
) -> Array:
    """Take the states in `slots` past all tokens and store them behind each; outputs on the way."""
    sources, kept = as_ids(slots), as_ids(snapshot_slots)
    beyond = (sources >= 0) & ((sources >= pool.slots) | (kept >= pool.slots).any(1))
    usable = (sources >= 0) & ~beyond
    add(signal, "out_of_range", beyond)
    free = usable.copy()
    for b in np.flatnonzero(usable):
        others = (sources >= 0) & (sources < pool.slots) & (np.arange(len(sources)) != b)
        free[b] = not np.isin(kept[b][kept[b] >= 0], np.concatenate((sources[others], kept[others].ravel()))).any()
    add(signal, "occupied", usable & ~free)
    states, bits = pool.rec[layer], out.view(np.uint16)
    bits[...] = 0
    for b in np.flatnonzero(free):
        state = states_in(states, sources[b])
        for t in range(q.shape[1]):
            pass_token(state, as_float(k[b, t]), as_float(v[b, t]), g[b, t], beta[b, t], normalize, states)
            bits[b, t] = rounded(look(state, as_float(q[b, t]), scale, normalize))
            if kept[b, t] >= 0:
                put(states, kept[b, t], state)
    return out


def record(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    pool: StatePool,
    slots: Array,
    log: ReplayLog,
    *,
    layer: int,
    out: Array,
    valid: Array | None,
    scale: float,
    normalize: bool,
    signal: Signal | None = None,
) -> Array:
    """Outputs as if the states in `slots` had been taken past the tokens, and a log of the tokens; the states stay."""
    sources = as_ids(slots)
    add(signal, "out_of_range", sources >= pool.slots)
    usable = (sources >= 0) & (sources < pool.slots)
    return _verify(q, k, v, g, beta, pool.rec[layer], sources, usable, log, layer, out, valid, scale, normalize)


def conv_record(
    x: Array,
    weight: Array,
    g: Array,
    beta: Array,
    pool: StatePool,
    slots: Array,
    log: ReplayLog,
    *,
    layer: int,
    out: Array,
    valid: Array | None,
    scale: float,
    normalize: bool,
    signal: Signal | None = None,
) -> Array:
    """The convolution into an array of its own, then `record`."""
    counts, q, k, v = _convolved(x, weight, pool, as_ids(slots), log, layer, valid)
    return record(q, k, v, g, beta, pool, slots, log, layer=layer, out=out, valid=counts, scale=scale, normalize=normalize, signal=signal)


def conv_fold_record(
    x: Array,
    weight: Array,
    g: Array,
    beta: Array,
    pool: StatePool,
    slots: Array,
    previous: ReplayLog,
    accepted: Array,
    log: ReplayLog,
    *,
    layer: int,
    out: Array,
    valid: Array | None,
    scale: float,
    normalize: bool,
    signal: Signal | None = None,
) -> Array:
    """The convolution of the sequences that are not skipped into an array of its own, then `fold_record`."""
    sources, folded = as_ids(slots), as_ids(accepted)
    usable = _foldable(sources, folded, pool, previous)
    counts, q, k, v = _convolved(x, weight, pool, np.where(usable, sources, -1), log, layer, valid)
    return fold_record(
        q, k, v, g, beta, pool, slots, previous, accepted, log, layer=layer, out=out, valid=counts, scale=scale, normalize=normalize, signal=signal
    )


def _foldable(sources: Array, counts: Array, pool: StatePool, previous: ReplayLog) -> Array:
    """Mask of the sequences with a slot of their own and a number of accepted tokens that the previous log has."""
    usable = (sources >= 0) & (sources < pool.slots)
    return _free_destinations(sources, sources, usable) & (counts >= 0) & (counts <= previous.width)


def _convolved(
    x: Array, weight: Array, pool: StatePool, slots: Array, log: ReplayLog, layer: int, valid: Array | None
) -> tuple[Array, Array, Array, Array]:
    """How many tokens there are of each sequence, and their queries, keys and values; raw columns go to the log."""
    items, tokens, channels = x.shape
    counts = np.full(items, tokens) if valid is None else np.clip(as_ids(valid), 0, tokens)
    convolved = np.zeros((items, tokens, channels // log.dim, log.dim), np.uint16)
    conv.conv1d_silu_record(x, weight, pool.conv[layer], slots, log.conv[layer, :items], convolved.reshape(x.shape), counts)
    q, k, v = np.split(convolved, (log.key_heads, 2 * log.key_heads), axis=2)
    return counts, q, k, v


def fold_record(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    pool: StatePool,
    slots: Array,
    previous: ReplayLog,
    accepted: Array,
    log: ReplayLog,
    *,
    layer: int,
    out: Array,
    valid: Array | None,
    scale: float,
    normalize: bool,
    signal: Signal | None = None,
) -> Array:
    """Take the states past the accepted tokens of the previous log, then `record`."""
    sources, counts = as_ids(slots), as_ids(accepted)
    wrong = (sources >= 0) & ((sources >= pool.slots) | (counts < 0) | (counts > previous.width))
    add(signal, "out_of_range", wrong)
    free = _foldable(sources, counts, pool, previous)
    add(signal, "occupied", (sources >= 0) & ~wrong & ~free)
    states = pool.rec[layer]
    for b in np.flatnonzero(free):
        if counts[b] > 0:
            put(states, sources[b], _replayed(states, sources[b], previous, layer, int(b), int(counts[b]), normalize))
    return _verify(q, k, v, g, beta, states, sources, free, log, layer, out, valid, scale, normalize)


def _verify(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    states: Array,
    sources: Array,
    usable: Array,
    log: ReplayLog,
    layer: int,
    out: Array,
    valid: Array | None,
    scale: float,
    normalize: bool,
) -> Array:
    tokens = q.shape[1]
    limits = np.full(len(sources), tokens) if valid is None else np.clip(as_ids(valid), 0, tokens)
    bits = out.view(np.uint16)
    bits[...] = 0
    for b in np.flatnonzero(usable):
        state = states_in(states, sources[b])
        for t in range(limits[b]):
            pass_token(state, as_float(k[b, t]), as_float(v[b, t]), g[b, t], beta[b, t], normalize, states)
            bits[b, t] = rounded(look(state, as_float(q[b, t]), scale, normalize))
            log.k[layer, b, t].view(np.uint16)[...] = k[b, t].view(np.uint16)
            log.v[layer, b, t].view(np.uint16)[...] = v[b, t].view(np.uint16)
            log.gates[layer, b, t, :, 0], log.gates[layer, b, t, :, 1] = g[b, t], beta[b, t]
    return out


def _replayed(states: Array, slot: int, log: ReplayLog, layer: int, row: int, m: int, normalize: bool) -> Array:
    state = states_in(states, slot)
    for t in range(m):
        gates = log.gates[layer, row, t]
        pass_token(state, as_float(log.k[layer, row, t]), as_float(log.v[layer, row, t]), gates[:, 0], gates[:, 1], normalize, states)
    return state


def fold(pool: StatePool, log: ReplayLog, rows: Array, *, states: bool, histories: bool, normalize: bool, signal: Signal | None = None) -> None:
    """Row i: from slot `rows[i, 0]` to slot `rows[i, 1]`, past the first `rows[i, 2]` tokens of log row i, in every layer."""
    sources, destinations, counts = as_ids(rows).T
    idle = (sources < 0) | (destinations < 0) | ((counts == 0) & (sources == destinations))
    usable = ~idle & (sources < pool.slots) & (destinations < pool.slots) & (counts >= 0) & (counts <= log.width)
    add(signal, "out_of_range", ~idle & ~usable)
    free = _free_destinations(sources, destinations, usable)
    add(signal, "occupied", usable & ~free)
    for row in np.flatnonzero(free):
        source, destination, m = sources[row], destinations[row], counts[row]
        for layer in range(pool.layers):
            kept = pool.rec[layer]
            if states:
                put(kept, destination, _replayed(kept, source, log, layer, int(row), int(m), normalize))
            if histories and pool.conv is not None:
                seen = np.concatenate((pool.conv[layer, source].view(np.uint16), log.conv[layer, row, :m].view(np.uint16)))
                pool.conv[layer, destination].view(np.uint16)[...] = seen[m : m + 3]
