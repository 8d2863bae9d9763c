"""Mixtures of experts for tests: weights in every format, in NumPy or CuPy, and what they give in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpukit.kernels.moe import Fp8, MoeWeights, RowSplit
from gpukit.kernels.row_split import dequantize, quantize

# Format of the gate and up bank, of the down bank, and of both matrices of the shared expert.
MIXES = [
    ("bf16", "bf16", "bf16"), ("fp8", "fp8", "fp8"), ("q4", "q5", "w8"), ("q4", "q4", "q4"), ("q5", "q6", None), ("q6", "w8", "w8"),
    ("q5", "q5", "q5"), ("w8", "q4", "w8"), ("bf16", "bf16", None), ("q6", "q6", "q6"),
]  # fmt: skip


def bf16_bits(values: Any) -> Any:
    """float32 numbers cut to bfloat16, as uint16, in NumPy or CuPy."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def normal(xp: Any, rng: Any, *shape: int) -> Any:
    """float32 normal numbers of a library's generator."""
    return rng.standard_normal(shape, dtype=np.float32) if xp is np else rng.standard_normal(shape, dtype=xp.float32)


def matrix(xp: Any, rng: Any, rows: int, columns: int, kind: str, size: float = 1.0) -> Any:
    """Random weights of a format that give results `size` times as large as what they are applied to."""
    values = normal(xp, rng, rows, columns) * np.float32(size * columns**-0.5)
    if kind == "bf16":
        return bf16_bits(values)
    if kind == "fp8":
        codes = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x05
        scales = (xp.abs(normal(xp, rng, rows, columns // 128)) + np.float32(0.5)) * np.float32(size * columns**-0.5 / 200)
        return Fp8(codes, scales)
    return quantize(values, kind)


def random_weights(xp: Any, seed: int, experts: int, hidden: int, width: int, mix: tuple[str, str, str | None]) -> MoeWeights:
    """A mixture of experts in three formats."""
    rng = xp.random.default_rng(seed)
    # As in trained models, what a block adds is a fraction of what it is added to.
    shared = [None, None] if mix[2] is None else [matrix(xp, rng, 2 * width, hidden, mix[2]), matrix(xp, rng, hidden, width, mix[2], 0.5)]
    return MoeWeights(
        matrix(xp, rng, experts + (mix[2] is not None), hidden, "bf16"),
        matrix(xp, rng, experts * 2 * width, hidden, mix[0]),
        matrix(xp, rng, experts * hidden, width, mix[1], 0.5),
        *shared,
    )


def map_weights(weights: MoeWeights, function: Any) -> MoeWeights:
    """The same weights with every array passed through a function."""

    def mapped(one: Any) -> Any:
        if one is None:
            return None
        if isinstance(one, Fp8):
            return Fp8(function(one.codes), function(one.scales))
        if isinstance(one, RowSplit):
            return RowSplit(one.format, function(one.base), None if one.high is None else function(one.high), function(one.scales))
        return function(one)

    return MoeWeights(*(mapped(getattr(weights, name)) for name in ("router", "gate_up", "down", "shared_gate_up", "shared_down")))


def _table() -> np.ndarray:
    import ml_dtypes

    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def numbers(xp: Any, one: Any) -> Any:
    """The float64 numbers of a matrix."""
    if isinstance(one, Fp8):
        return xp.asarray(_table())[one.codes] * xp.repeat(one.scales.astype(np.float64), 128, axis=1)
    if isinstance(one, RowSplit):
        return dequantize(one).astype(np.float64)
    return (one.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def some_rows(one: Any, first: int, count: int) -> Any:
    """Rows of a matrix."""
    some = slice(first, first + count)
    if isinstance(one, Fp8):
        return Fp8(one.codes[some], one.scales[some])
    if isinstance(one, RowSplit):
        return RowSplit(one.format, one.base[some], None if one.high is None else one.high[some], one.scales[some])
    return one[some]


def scores_of(xp: Any, x: Any, weights: MoeWeights) -> Any:
    """float64 scores, (T, E) or (T, E + 1)."""
    return numbers(xp, x) @ numbers(xp, weights.router).T


def margin(xp: Any, scores: Any) -> Any:
    """How far each token's eighth score is above the ninth."""
    ordered = xp.sort(scores, axis=1)[:, ::-1]
    return ordered[:, 7] - ordered[:, 8] if scores.shape[1] > 8 else xp.ones(len(scores))


def oracle(xp: Any, x: Any, weights: MoeWeights, dest: Any) -> tuple[Any, Any]:
    """The block in float64, and the margin of each token's choice."""
    has_shared = weights.shared_down is not None
    experts, tokens, hidden = len(weights.router) - has_shared, x.shape[0], x.shape[1]
    gate = weights.gate_up.scales if isinstance(weights.gate_up, Fp8 | RowSplit) else weights.gate_up
    width = len(gate) // (2 * experts)
    scores, vectors, total = scores_of(xp, x, weights), numbers(xp, x), numbers(xp, dest)
    routed = scores[:, :experts]
    chosen = xp.argsort(-routed, axis=1)[:, :8]
    logits = xp.take_along_axis(routed, chosen, axis=1)
    alpha = xp.exp(logits - logits[:, :1])
    alpha /= alpha.sum(axis=1, keepdims=True)

    def answer(rows: Any, both: Any, down: Any) -> Any:
        mixed = vectors[rows] @ numbers(xp, both).T
        gates, ups = mixed[:, :width], mixed[:, width:]
        return (gates / (1 + xp.exp(-gates)) * ups) @ numbers(xp, down).T

    for expert in range(experts):
        rows, ranks = xp.nonzero(chosen == expert)
        if len(rows):
            own = some_rows(weights.gate_up, expert * 2 * width, 2 * width), some_rows(weights.down, expert * hidden, hidden)
            total[rows] += alpha[rows, ranks][:, None] * answer(rows, *own)
    if has_shared:
        everyone = xp.arange(tokens)
        total += answer(everyone, weights.shared_gate_up, weights.shared_down) / (1 + xp.exp(-scores[:, experts:]))
    return total, margin(xp, routed)


def check_block(xp: Any, found: Any, expected: Any, margins: Any) -> None:
    """The bars of the block, for tokens whose choice does not hang on a rounding."""
    clear = margins > 1e-4
    assert clear.mean() > 0.9
    got, wanted = numbers(xp, found)[clear], expected[clear]
    assert bool(xp.isfinite(got).all())
    assert bool((xp.abs(got - wanted) <= 2e-3 + 1.6e-2 * xp.abs(wanted)).all())
    assert float(xp.linalg.norm(got - wanted)) <= 8e-3 * float(xp.linalg.norm(wanted))
