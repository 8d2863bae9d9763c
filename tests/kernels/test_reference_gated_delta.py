"""The NumPy backend of the gated delta rule against float64, and record, fold and fold_record against direct."""

from __future__ import annotations

import numpy as np
import pytest

from gpukit import Signal
from gpukit.kernels import gated_delta
from gpukit.kernels.state_pool import ReplayLog, StatePool
from tests.helpers.bf16 import bits, check, numbers
from tests.helpers.gated_delta import GEOMETRIES, assert_states_close, oracle, states_of, tokens_of


def pool_of(layers: int, slots: int, heads: int, dim: int, channels: int = 0, layout: str = "layer") -> StatePool:
    pool = StatePool.allocate(layers, slots, heads, dim, channels=channels, layout=layout)
    pool.rec[...] = states_of(pool.rec.shape)
    if channels:
        pool.conv[...] = np.random.default_rng(5).integers(0, 2**16, pool.conv.shape)
    return pool


def log_of(pool: StatePool, rows: int, width: int, key_heads: int) -> ReplayLog:
    """Full of NaN, so that whatever is read without having been written shows."""
    log = ReplayLog.allocate(pool.layers, rows, width, key_heads, pool.heads, pool.dim, channels=pool.channels)
    log.k[...], log.v[...], log.gates[...] = 0x7FC0, 0x7FC0, np.nan
    if log.conv is not None:
        log.conv[...] = np.random.default_rng(6).integers(0, 2**16, log.conv.shape)
    return log


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("key_heads", "heads", "dim"), GEOMETRIES)
def test_direct_is_the_rule(key_heads: int, heads: int, dim: int, normalize: bool, tokens: int) -> None:
    batch = tokens_of(2, tokens, key_heads, heads, dim)
    if not normalize:
        batch["k"] = bits(numbers(batch["k"]) / (1.5 * dim**0.5))
    pool = pool_of(2, 4, heads, dim)
    before = pool.rec.copy()
    out = gated_delta.direct(**batch, pool=pool, slots=np.array([3, 1]), layer=1, normalize=normalize)
    for item, slot in enumerate((3, 1)):
        outputs, state = oracle(batch, before[1, slot], item, tokens, dim**-0.5, normalize)
        check(out[item], outputs)
        assert_states_close(pool.rec[1, slot], state, tokens)
    pool.rec[1, [1, 3]] = before[1, [1, 3]]
    assert np.array_equal(pool.rec, before)


@pytest.mark.parametrize("layout", ["layer", "slot"])
def test_fold_commits_what_direct_would_have_computed(layout: str) -> None:
    batch = tokens_of(3, 4, 2, 4, 64)
    for m in range(5):
        pool, plain = (pool_of(2, 6, 4, 64, channels=16, layout=layout) for _ in range(2))
        log = log_of(pool, 3, 5, 2)
        slots = np.array([4, 0, 5])
        histories = pool.conv.copy()
        for layer in range(2):
            verified = gated_delta.record(**batch, pool=pool, slots=slots, log=log, layer=layer)
            assert np.array_equal(pool.rec, plain.rec) or layer
            if m:
                part = {name: array[:, :m] for name, array in batch.items()}
                out = gated_delta.direct(**part, pool=plain, slots=slots, layer=layer, destination_slots=np.array([4, 1, 5]))
                assert np.array_equal(verified[:, :m], out)
            else:
                plain.rec[layer, 1] = plain.rec[layer, 0]
        gated_delta.fold(pool, log, np.array([[4, 4, m], [0, 1, m], [5, 5, m]], np.int32))
        assert np.array_equal(pool.rec, plain.rec)
        for row, (source, destination) in enumerate(((4, 4), (0, 1), (5, 5))):
            seen = np.concatenate((histories[:, source], log.conv[:, row, :m]), axis=1)
            assert np.array_equal(pool.conv[:, destination], seen[:, -3:])


def test_fold_record_is_fold_then_record() -> None:
    first, second = tokens_of(2, 3, 1, 2, 64), tokens_of(2, 3, 1, 2, 64, seed=1)
    pool, plain = (pool_of(1, 3, 2, 64) for _ in range(2))
    logs = [log_of(pool, 2, 3, 1) for _ in range(3)]
    slots, accepted = np.array([2, 0]), np.array([3, 1])
    gated_delta.record(**first, pool=pool, slots=slots, log=logs[0], layer=0)
    got = gated_delta.fold_record(**second, pool=pool, slots=slots, previous=logs[0], accepted=accepted, log=logs[1], layer=0)
    gated_delta.fold(plain, logs[0], np.stack((slots, slots, accepted), axis=1))
    expected = gated_delta.record(**second, pool=plain, slots=slots, log=logs[2], layer=0)
    assert np.array_equal(got, expected) and np.array_equal(pool.rec, plain.rec)
    assert np.array_equal(logs[1].k, logs[2].k) and np.array_equal(logs[1].v, logs[2].v) and np.array_equal(logs[1].gates, logs[2].gates)


def test_tokens_past_the_valid_ones_leave_zeros_and_no_log() -> None:
    batch = tokens_of(3, 3, 1, 2, 64)
    pool = pool_of(1, 3, 2, 64)
    log = log_of(pool, 3, 3, 1)
    out = gated_delta.record(**batch, pool=pool, slots=np.array([0, 1, 2]), log=log, layer=0, valid=np.array([2, -1, 9]))
    assert [int((numbers(row) != 0).any(axis=(1, 2)).sum()) for row in out] == [2, 0, 3]
    assert np.isnan(log.gates[0, :, :, 0, 0]).tolist() == [[False, False, True], [True] * 3, [False] * 3]


def test_what_is_skipped_is_counted_and_leaves_everything_alone() -> None:
    batch = tokens_of(6, 1, 1, 2, 64)
    pool = pool_of(1, 4, 2, 64)
    before = pool.rec.copy()
    signal = Signal()
    # Padding, past the pool, two with one destination, one whose destination is another's source, and a sound one.
    slots, destinations = np.array([-1, 4, 0, 1, 2, 3]), np.array([0, 0, 3, 3, 1, 2])
    out = gated_delta.direct(**batch, pool=pool, slots=slots, destination_slots=destinations, layer=0, signal=signal)
    assert signal.counts() == {"out_of_range": 1, "occupied": 4}
    assert np.array_equal(pool.rec, before) and not out.any()
    signal.reset()
    log = log_of(pool, 6, 2, 1)
    rows = np.array([[-1, 0, 1], [4, 0, 1], [0, 1, 3], [1, 1, -1], [2, 3, 0], [3, 3, 0]])
    gated_delta.fold(pool, log, rows, signal=signal)
    assert signal.counts() == {"out_of_range": 3}
    assert np.array_equal(pool.rec[0, 3], before[0, 2])
    pool.rec[0, 3] = before[0, 3]
    assert np.array_equal(pool.rec, before)
