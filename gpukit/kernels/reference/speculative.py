"""What the small kernels of a speculative round mean, in NumPy. Every draw has the very bits of the device's: float32, one rounding an operation."""

from __future__ import annotations

import numpy as np

from gpukit.errors import Signal
from gpukit.kernels.reference._bf16 import Array, as_float
from gpukit.kernels.reference._ids import add, as_ids

_F = np.float32
_LARGEST = np.finfo(_F).max


def prepare_verify(anchors: Array, drafts: Array, lengths: Array, starts: Array | None, ids: Array, positions: Array, padding: int) -> None:
    """Anchor and drafts of every row, and their positions."""
    length, width, tokens = as_ids(lengths), drafts.shape[1], ids.shape[1]
    positions[...] = np.where(length[:, None] < 0, -1, length[:, None] + np.arange(tokens))
    ids[...] = padding
    for row in np.flatnonzero(length >= 0):
        ids[row, 0] = anchors[row].astype(ids.dtype)
        start = 0 if starts is None else int(starts[row])
        for token in range(1, tokens):
            if 0 <= start + token - 1 < width:
                ids[row, token] = drafts[row, start + token - 1].astype(ids.dtype)


def _live_tokens(lengths: Array, valid: Array | None, tokens: int, signal: Signal | None) -> Array:
    """How many tokens of each row count; 0 for the idle ones."""
    live = np.full(len(lengths), tokens) if valid is None else as_ids(valid)
    bad = (lengths >= 0) & ((live < 0) | (live > tokens))
    add(signal, "out_of_range", bad)
    return np.where((lengths < 0) | bad, 0, live)


def _settle(
    targets: Array,
    live: Array,
    ids: Array,
    lengths: Array,
    anchors: Array,
    slots: Array | None,
    accepted: Array,
    rows: Array | None,
    emitted: Array | None,
) -> Array:
    """Accept the longest confirmed prefix of every row."""
    for row, most in enumerate(live):
        produced = min(int(most), 1)
        while 0 < produced < most and 0 <= ids[row, produced] == targets[row, produced - 1]:
            produced += 1
        accepted[row] = produced
        if emitted is not None:
            emitted[row] = -1
            emitted[row, :produced] = targets[row, :produced].astype(emitted.dtype)
        if rows is not None:
            slot = row if slots is None else slots[row].astype(rows.dtype)
            rows[row] = slot, slot, produced
        if produced:
            lengths[row] += produced
            anchors[row] = targets[row, produced - 1].astype(anchors.dtype)
    return accepted


def accept_greedy(
    targets: Array,
    ids: Array,
    lengths: Array,
    anchors: Array,
    valid: Array | None,
    slots: Array | None,
    accepted: Array,
    rows: Array | None,
    emitted: Array | None,
    *,
    signal: Signal | None = None,
) -> Array:
    """Accept the drafts that the targets confirm."""
    live = _live_tokens(lengths, valid, targets.shape[1], signal)
    return _settle(targets, live, ids, lengths, anchors, slots, accepted, rows, emitted)


def philox(counter: Array, key: tuple[int, int]) -> Array:
    """Philox4x32-10 of counters [4, n], as uint32 [4, n]."""
    x = [np.asarray(word, np.uint64) for word in counter]
    low, first, second = np.uint64(0xFFFFFFFF), key[0], key[1]
    for _ in range(10):
        a, b = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [(b >> np.uint64(32)) ^ x[1] ^ np.uint64(first), b & low, (a >> np.uint64(32)) ^ x[3] ^ np.uint64(second), a & low]
        first, second = (first + 0x9E3779B9) & 0xFFFFFFFF, (second + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(x).astype(np.uint32)


def _log_of(f: Array, exponent: Array) -> Array:
    """log(2^exponent (1 + f)) for f in about -0.3 … 0.42 (Cephes' logf)."""
    square = f * f
    tail = np.full_like(f, 7.0376836292e-2)
    for coefficient in (
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    ):
        tail = tail * f + _F(coefficient)
    tail = tail * f * square
    tail = tail + exponent * _F(-2.12194440e-4)
    tail = tail + square * _F(-0.5)
    result: Array = (f + tail) + exponent * _F(0.693359375)
    return result


def _log(y: Array) -> Array:
    """log of positive normal float32 numbers."""
    bits = y.view(np.uint32)
    exponent = (bits >> 23).astype(np.int32) - 126
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).view(_F)
    below = mantissa < _F(0.707106781)
    return _log_of(np.where(below, mantissa + mantissa, mantissa) - _F(1), (exponent - below).astype(_F))


def gumbel(random: Array) -> Array:
    """-log(-log(1 - v)), v = (random + 1/2) / 2^32, from uint32. Large noise belongs to small v, which floats resolve."""
    small = random < 0x40000000
    v = np.where(small, random, ~random).astype(_F) * _F(2.0**-32) + _F(2.0**-33)
    exponential = -np.where(small, _log_of(np.where(small, -v, _F(0)), np.zeros_like(v)), _log(v))
    return -_log(exponential)


def mass(x: Array) -> Array:
    """exp(x) in units of 2^-44 for x <= 0, as uint64 (Cephes' expf); 0 where it is less than one."""
    counts = x >= -31
    x = np.where(counts, x, _F(0))
    n = np.rint(x * _F(1.44269504))
    r = (x - n * _F(0.693359375)) + n * _F(2.12194440e-4)
    tail = np.full_like(r, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        tail = tail * r + _F(coefficient)
    e = (tail * (r * r) + r) + _F(1)
    return np.where(counts, np.ldexp(e, n.astype(np.int32) + 44), 0).astype(np.uint64)


def noise(count: int, seed: int, position: int) -> Array:
    """The noise of tokens 0 … count - 1 at a position."""
    groups = np.arange((count + 3) // 4)
    low, high = position & 0xFFFFFFFF, position >> 32 & 0xFFFFFFFF
    counter = np.stack([groups, np.full_like(groups, low), np.full_like(groups, high), np.zeros_like(groups)])
    return gumbel(philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)).T.reshape(-1)[:count])


def kept(x: Array, inverse: np.float32, top_k: int, top_p: float) -> Array:
    """Mask of what top-k, then top-p leave; everything equal to the last one stays."""
    keep = np.ones(len(x), bool)
    if 0 < top_k < len(x):
        keep &= x >= np.partition(x, len(x) - top_k)[len(x) - top_k]
    if top_p < 1:
        masses = np.where(keep, mass((x - x.max()) * inverse), np.uint64(0))
        share = int(float(top_p) * 2.0**64) if top_p > 0 else 0
        target = max(int(masses.sum()) * share >> 64, 1)
        order = np.argsort(-x, kind="stable")
        reached = masses[order].cumsum() >= target
        if reached.any():
            keep &= x >= x[order[reached.argmax()]]
    return keep


def _clean(logits: Array) -> tuple[Array, bool]:
    """float32 numbers without NaN, and whether there were any."""
    x = as_float(logits)
    nan = np.isnan(x)
    return np.minimum(np.where(nan, _F(-np.inf), x), _LARGEST), bool(nan.any())


def _draw(x: Array, seed: int, position: int, temperature: np.float32, top_k: int, top_p: float) -> int:
    if not _F(1e-5) <= temperature <= _LARGEST:
        return int(x.argmax())
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        inverse = _F(1) / temperature
        candidates = np.flatnonzero(kept(x, inverse, top_k, top_p))
        scores = x * inverse + noise(len(x), seed, position)
    return int(candidates[scores[candidates].argmax()])


def _draws(
    logits: Array,
    live: Array,
    positions: Array,
    seeds: Array,
    temperature: Array,
    top_k: Array | None,
    top_p: Array | None,
    vocabulary: int,
    signal: Signal | None,
) -> Array:
    """A token for every live column of every row, -1 for the others."""
    drawn = np.full(logits.shape[:2], -1)
    for row, tokens in enumerate(live):
        own_p = 1.0 if top_p is None else top_p[row]
        bad = bool(np.isnan(own_p)) or not 0 <= temperature[row] <= _LARGEST
        add(signal, "out_of_range", np.array(bad and tokens > 0))
        for token in range(tokens):
            x, has_nan = _clean(logits[row, token, :vocabulary])
            add(signal, "out_of_range", np.array(has_nan))
            own_k = 0 if top_k is None else int(top_k[row])
            drawn[row, token] = _draw(x, int(seeds[row]), int(positions[row]) + token, temperature[row], own_k, own_p)
    return drawn


def accept_sampled(
    logits: Array,
    ids: Array,
    lengths: Array,
    anchors: Array,
    seeds: Array,
    temperature: Array,
    top_k: Array | None,
    top_p: Array | None,
    vocabulary: int,
    valid: Array | None,
    slots: Array | None,
    accepted: Array,
    rows: Array | None,
    emitted: Array | None,
    *,
    signal: Signal | None = None,
) -> Array:
    """Draw a token for every column, and accept the drafts that they confirm."""
    live = _live_tokens(lengths, valid, logits.shape[1], signal)
    drawn = _draws(logits, live, lengths, seeds, temperature, top_k, top_p, vocabulary, signal)
    return _settle(drawn, live, ids, lengths, anchors, slots, accepted, rows, emitted)


def sample(
    logits: Array,
    seeds: Array,
    positions: Array,
    temperature: Array,
    top_k: Array | None,
    top_p: Array | None,
    vocabulary: int,
    out: Array,
    *,
    signal: Signal | None = None,
) -> Array:
    """Draw a token for every row with a position."""
    live = np.where(as_ids(positions) < 0, 0, 1)
    out[...] = _draws(logits[:, None], live, positions, seeds, temperature, top_k, top_p, vocabulary, signal)[:, 0]
    return out


def select_hidden(hidden: Array, accepted: Array, out: Array, *, signal: Signal | None = None) -> Array:
    """The vector of the last accepted token of every row, zeros where there is none."""
    counts = as_ids(accepted)
    bad = (counts < 0) | (counts > hidden.shape[1])
    add(signal, "out_of_range", bad)
    own = f"V{hidden.dtype.itemsize}"
    out[...] = np.zeros((), out.dtype)
    rows = np.flatnonzero(~bad & (counts > 0))
    out.view(own)[rows] = hidden.view(own)[rows, counts[rows] - 1]
    return out


def argmax_columns(logits: Array, vocabulary: int, out: Array, *, signal: Signal | None = None) -> Array:
    """The lowest id of the largest logit of every column."""
    x = as_float(logits[:vocabulary])
    nan = np.isnan(x)
    add(signal, "out_of_range", np.any(nan, axis=0, keepdims=True))
    out[...] = np.where(nan, _F(-np.inf), x).argmax(axis=0)
    return out
