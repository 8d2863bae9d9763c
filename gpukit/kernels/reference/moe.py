"""What a sparse mixture of experts means, in NumPy: one token after the other, so that the bits of one do not depend on the others."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gpukit.errors import Signal
from gpukit.kernels._moe import TOP, Fp8, MoeWeights
from gpukit.kernels._row_split import RowSplit
from gpukit.kernels.reference import row_split
from gpukit.kernels.reference._bf16 import Array, as_float, silu, store


@functools.cache
def _numbers_of_fp8() -> Array:
    """The number of every e4m3 byte."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    numbers = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    numbers[[0x7F, 0xFF]] = np.nan
    return np.where(codes < 128, numbers, -numbers).astype(np.float32)


def rows_of(matrix: Any, first: int, count: int) -> Array:
    """Rows of a matrix of any format as float32."""
    some = slice(first, first + count)
    if isinstance(matrix, RowSplit):
        high = None if matrix.high is None else matrix.high[some]
        return row_split.dequantize(matrix.base[some], high, matrix.scales[some], matrix.format, np.empty((count, matrix.shape[1]), np.float32))
    if isinstance(matrix, Fp8):
        numbers: Array = _numbers_of_fp8()[matrix.codes[some].view(np.uint8)] * np.repeat(matrix.scales[some], 128, axis=1)
        return numbers
    return as_float(matrix[some])


def _times(matrix: Array, vector: Array) -> Array:
    """A product whose sums are as good as exact, in float32."""
    product: Array = (matrix.astype(np.float64) @ vector.astype(np.float64)).astype(np.float32)
    return product


def route(x: Array, router: Array, ids: Array, alpha: Array, shared_scale: Array | None, *, signal: Signal | None = None) -> None:
    """The eight experts of each token, best first, and their weights; -1 and 0 for a token that has a NaN score."""
    rows = as_float(router)
    experts = len(rows) - (shared_scale is not None)
    for token, vector in enumerate(as_float(x)):
        with np.errstate(invalid="ignore", over="ignore"):
            scores = _times(rows, vector)
            if np.isnan(scores).any():
                ids[token], alpha[token] = -1, 0
                if shared_scale is not None:
                    shared_scale[token] = 0
                if signal is not None:
                    signal.add("out_of_range")
                continue
            chosen = np.argsort(-scores[:experts], kind="stable")[:TOP]
            ids[token] = chosen
            weights = np.exp(scores[chosen] - scores[chosen[0]])
            alpha[token] = weights / weights.sum()
            if shared_scale is not None:
                shared_scale[token] = 1 / (1 + np.exp(-scores[experts]))


def _is_bad(ids: Array, experts: int, signal: Signal | None) -> bool:
    """Whether a token is left out: its ids are not eight different experts. Padding is not counted."""
    if len(set(ids.tolist())) == TOP and (ids >= 0).all() and (ids < experts).all():
        return False
    if signal is not None and (ids >= 0).any():
        signal.add("out_of_range")
    return True


def _experts(weights: MoeWeights) -> int:
    return len(weights.router) - (weights.shared_down is not None)


def gate_up(x: Array, ids: Array, weights: MoeWeights, act: Array, *, signal: Signal | None = None) -> Array:
    """``silu(gate) * up`` of every expert of every token."""
    width, experts = act.shape[2], _experts(weights)
    for token, vector in enumerate(as_float(x)):
        if _is_bad(ids[token], experts, signal):
            continue
        for path in range(act.shape[1]):
            matrix, first = (weights.gate_up, int(ids[token, path]) * 2 * width) if path < TOP else (weights.shared_gate_up, 0)
            both = _times(rows_of(matrix, first, 2 * width), vector)
            act[token, path] = silu(both[:width]) * both[width:]
    return act


def down_add(
    ids: Array, alpha: Array, shared_scale: Array | None, act: Array, weights: MoeWeights, dest: Array, *, signal: Signal | None = None
) -> Array:
    """The weighted sum of the down projections, added to what is there: in rank order, the shared expert last, one rounding."""
    hidden, experts = dest.shape[1], _experts(weights)
    for token in range(len(dest)):
        if _is_bad(ids[token], experts, signal):
            continue
        total = as_float(dest[token])
        for path in range(act.shape[1]):
            matrix, first = (weights.down, int(ids[token, path]) * hidden) if path < TOP else (weights.shared_down, 0)
            scale = alpha[token, path] if path < TOP or shared_scale is None else shared_scale[token]
            total = total + scale * _times(rows_of(matrix, first, hidden), act[token, path])
        store(dest[token], total)
    return dest


def sparse_moe(x: Array, weights: MoeWeights, dest: Array, *, signal: Signal | None = None) -> Array:
    """All of it."""
    width = _width(weights)
    tokens, has_shared = len(x), weights.shared_down is not None
    ids, alpha = np.empty((tokens, TOP), np.int32), np.empty((tokens, TOP), np.float32)
    shared_scale = np.empty(tokens, np.float32) if has_shared else None
    act = np.zeros((tokens, TOP + has_shared, width), np.float32)
    route(x, weights.router, ids, alpha, shared_scale, signal=signal)
    gate_up(x, ids, weights, act)
    return down_add(ids, alpha, shared_scale, act, weights, dest)


def _width(weights: MoeWeights) -> int:
    matrix = weights.gate_up.scales if isinstance(weights.gate_up, Fp8 | RowSplit) else weights.gate_up
    return len(matrix) // (2 * _experts(weights))


def prefill_reduce(grouped: Array, packed_index: Array, alpha: Array, out: Array, *, signal: Signal | None = None) -> Array:
    """Add to each row the weighted sum of the rows that its indices name; a row with an index of none stays as it is."""
    for token, places in enumerate(packed_index):
        if (places < 0).any() or (places >= len(grouped)).any():
            if signal is not None and (places >= len(grouped)).any():
                signal.add("out_of_range")
            continue
        total = as_float(out[token])
        for scale, place in zip(alpha[token], places, strict=True):
            total = total + scale * as_float(grouped[place])
        store(out[token], total)
    return out
