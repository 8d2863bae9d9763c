"""The reference of sparse mixtures of experts against float64 and brute force."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gpukit.errors import Signal
from gpukit.kernels.moe import MoeWeights
from gpukit.kernels.reference import moe
from tests.helpers.bf16 import bits, numbers, random_bits
from tests.helpers.moe import MIXES, check_block, oracle, random_weights, scores_of
from tests.helpers.moe import numbers as numbers_of

SIZES = (24, 256, 128)  # experts, hidden, width


def routed(x: np.ndarray, router: np.ndarray, has_shared: bool = True, signal: Signal | None = None) -> tuple[np.ndarray, ...]:
    ids, alpha, scale = np.full((len(x), 8), 99, np.int32), np.full((len(x), 8), 9, np.float32), np.full(len(x), 9, np.float32)
    moe.route(x, router, ids, alpha, scale if has_shared else None, signal=signal)
    return ids, alpha, scale


def test_the_numbers_of_fp8_are_those_of_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(moe._numbers_of_fp8(), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 30])
def test_routing_against_brute_force(tokens: int, has_shared: bool) -> None:
    rng = np.random.default_rng(tokens)
    x, router = random_bits(rng, tokens, 128), random_bits(rng, 40 + has_shared, 128, scale=0.1)
    ids, alpha, scale = routed(x, router, has_shared)
    for token in range(tokens):
        scores = numbers(router) @ numbers(x[token])
        best = sorted(range(40), key=lambda expert: (-scores[expert], expert))[:8]
        assert ids[token].tolist() == best
        weights = np.exp(scores[best])
        np.testing.assert_allclose(alpha[token], weights / weights.sum(), rtol=2e-6)
        assert scale[token] == pytest.approx(1 / (1 + np.exp(-scores[-1])), rel=2e-6) if has_shared else scale[token] == 9


def test_equal_scores_go_to_the_smaller_id_and_zeros_are_equal() -> None:
    x, router = np.zeros((1, 128), np.uint16), np.zeros((21, 128), np.uint16)
    x[0, 0] = bits(1)
    router[:20, 0] = bits([-0.0, 0, -1, 3, 0, -0.0, 3, 3, -0.0, 0, 2, 2, 2, 2, -5, 2, 2, 2, 3, 2])
    ids, alpha, scale = routed(x, router)
    assert ids[0].tolist() == [3, 6, 7, 18, 10, 11, 12, 13] and scale[0] == 0.5
    router[:, 0] = np.where(np.arange(21) % 2, 0x8000, 0)
    ids, alpha, _ = routed(x, router)
    assert ids[0].tolist() == list(range(8)) and (alpha == 0.125).all()


@pytest.mark.parametrize("row", [0, 19, 20])
def test_a_token_with_a_nan_score_is_counted_and_left(row: int) -> None:
    rng, signal = np.random.default_rng(0), Signal()
    weights = random_weights(np, 0, 20, 128, 128, MIXES[0])
    weights.router[row, 5] = 0x7FC0
    x, dest = random_bits(rng, 3, 128), random_bits(rng, 3, 128)
    weights.router[row, 7] = 0
    x[[0, 2], 5] = 0
    before = dest.copy()
    # 0 * NaN is NaN too: all tokens are bad, until the router's NaN meets none of them.
    ids, alpha, scale = routed(x, weights.router, signal=signal)
    assert (ids == -1).all() and not alpha.any() and not scale.any() and signal.counts() == {"out_of_range": 3}
    weights.router[row, 5] = bits(1)
    x[1, 9] = 0x7FC0
    signal.reset()
    moe.sparse_moe(x, weights, dest, signal=signal)
    assert (dest[1] == before[1]).all() and (dest[[0, 2]] != before[[0, 2]]).any(1).all() and signal.counts() == {"out_of_range": 1}


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(map(str, mix)))
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_the_block_against_float64(tokens: int, mix: tuple[str, str, str | None]) -> None:
    rng = np.random.default_rng(tokens)
    weights = random_weights(np, 1, *SIZES, mix)
    x, dest = random_bits(rng, tokens, 256), random_bits(rng, tokens, 256)
    expected, margins = oracle(np, x, weights, dest) if tokens else (dest.astype(float), np.ones(0))
    found = moe.sparse_moe(x, weights, dest.copy())
    if tokens:
        check_block(np, found, expected, margins)
        assert (found != dest).any()


@pytest.mark.parametrize("mix", MIXES[:3], ids=lambda mix: "-".join(map(str, mix)))
def test_activations_and_sums_against_float64(mix: tuple[str, str, str | None]) -> None:
    rng = np.random.default_rng(3)
    weights = random_weights(np, 2, *SIZES, mix)
    x, dest = random_bits(rng, 2, 256), random_bits(rng, 2, 256)
    ids, alpha, scale = routed(x, weights.router)
    act = moe.gate_up(x, ids, weights, np.zeros((2, 9, 128), np.float32))
    found = moe.down_add(ids, alpha, scale, act, weights, dest.copy())
    for token in range(2):
        total = numbers(dest[token])
        for path in range(9):
            first = int(ids[token, path]) if path < 8 else 0
            both = numbers_of(np, weights.gate_up if path < 8 else weights.shared_gate_up)[first * 256 : first * 256 + 256] @ numbers(x[token])
            wanted = both[:128] / (1 + np.exp(-both[:128])) * both[128:]
            np.testing.assert_allclose(act[token, path], wanted, rtol=1e-5, atol=1e-6)
            down = numbers_of(np, weights.down if path < 8 else weights.shared_down)[first * 256 : first * 256 + 256]
            total = total + float(alpha[token, path] if path < 8 else scale[token]) * (down @ act[token, path].astype(float))
        np.testing.assert_allclose(numbers(found[token]), total, rtol=2**-8, atol=1e-6)


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    rng = np.random.default_rng(4)
    weights = random_weights(np, 3, *SIZES, MIXES[2])
    x, dest = random_bits(rng, 7, 256), random_bits(rng, 7, 256)
    together = moe.sparse_moe(x, weights, dest.copy())
    for token in range(7):
        assert (moe.sparse_moe(x[token : token + 1], weights, dest[token : token + 1].copy()) == together[token]).all()


def test_tokens_with_ids_of_none_are_left_and_counted_unless_padding() -> None:
    rng, signal = np.random.default_rng(5), Signal()
    weights = random_weights(np, 3, *SIZES, MIXES[8])
    x, dest = random_bits(rng, 5, 256), random_bits(rng, 5, 256)
    ids = np.tile(np.arange(8, dtype=np.int32), (5, 1))
    ids[1, 3], ids[2], ids[3, 0], ids[4, 7] = 24, -1, -1, 0
    act = moe.gate_up(x, ids, weights, np.full((5, 8, 128), 7, np.float32), signal=signal)
    assert signal.counts() == {"out_of_range": 3} and (act[1:] == 7).all() and not (act[0] == 7).any()
    found = moe.down_add(ids, np.full((5, 8), 0.125, np.float32), None, act, weights, dest.copy(), signal=signal)
    assert signal.counts() == {"out_of_range": 6} and (found[1:] == dest[1:]).all() and (found[0] != dest[0]).any()


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_the_sum_of_rows_against_brute_force(dtype: type) -> None:
    rng, signal = np.random.default_rng(6), Signal()
    grouped = rng.standard_normal((9, 16)).astype(np.float32)
    grouped = grouped if dtype is np.float32 else bits(grouped)
    index, alpha, out = rng.integers(0, 9, (6, 3)).astype(np.int32), rng.random((6, 3)).astype(np.float32), random_bits(rng, 6, 16)
    index[2, 1], index[4, 0], index[5] = -1, 9, [-1, 9, 0]
    found = moe.prefill_reduce(grouped, index, alpha, out.copy(), signal=signal)
    assert signal.counts() == {"out_of_range": 2} and (found[[2, 4, 5]] == out[[2, 4, 5]]).all()
    for token in (0, 1, 3):
        wide = grouped.astype(float) if dtype is np.float32 else numbers(grouped)
        wanted = numbers(out[token]) + alpha[token].astype(float) @ wide[index[token]]
        np.testing.assert_allclose(numbers(found[token]), wanted, rtol=2**-8, atol=1e-6)


def test_the_oracle_has_ids_of_its_own() -> None:
    # The oracle of the device tests sorts scores itself: a wrong choice of the reference cannot hide in it.
    weights = random_weights(np, 7, *SIZES, MIXES[8])
    x = random_bits(np.random.default_rng(8), 4, 256)
    ids, _, _ = routed(x, weights.router, has_shared=False)
    assert (np.sort(ids, 1) == np.sort(np.argsort(-scores_of(np, x, weights), axis=1)[:, :8], 1)).all()
    assert MoeWeights(*(getattr(weights, name) for name in ("router", "gate_up", "down"))).shared_down is None
