"""The NumPy backend of `prefill` against float64, and against `direct`, sequence by sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpukit import Signal
from gpukit.errors import ArgumentError
from gpukit.kernels import gated_delta, gated_delta_prefill
from gpukit.kernels.state_pool import StatePool
from tests.helpers.bf16 import bits, check, numbers
from tests.helpers.gated_delta import GEOMETRIES, assert_states_close, oracle, states_of, tokens_of


def packed(tokens: int, key_heads: int, heads: int, dim: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {name: array[0] for name, array in tokens_of(1, tokens, key_heads, heads, dim, seed).items()}


def part_of(batch: dict[str, np.ndarray], begin: int, end: int) -> dict[str, np.ndarray]:
    """One sequence, as a batch of one."""
    return {name: array[None, begin:end] for name, array in batch.items()}


def pool_of(slots: int, heads: int, dim: int, layout: str = "layer", dtype: str = "float32") -> StatePool:
    pool = StatePool.allocate(2, slots, heads, dim, layout=layout, dtype=dtype)
    pool.rec[...] = states_of(pool.rec.shape) if dtype == "float32" else bits(states_of(pool.rec.shape))
    return pool


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("key_heads", "heads", "dim"), GEOMETRIES)
def test_prefill_is_the_rule(key_heads: int, heads: int, dim: int, normalize: bool) -> None:
    offsets = np.array([2, 2, 3, 40, 51], np.int32)
    batch = packed(53, key_heads, heads, dim)
    if not normalize:
        batch["k"] = bits(numbers(batch["k"]) / (1.5 * dim**0.5))
    pool = pool_of(6, heads, dim)
    before = pool.rec.copy()
    slots, resume = np.array([0, 4, 2, 5]), np.array([1, 1, 0, 7])
    out = gated_delta_prefill.prefill(**batch, pool=pool, slots=slots, cu_seqlens=offsets, layer=1, resume=resume, normalize=normalize)
    expected = before.copy()
    for s, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        start = before[1, slots[s]] * bool(resume[s])
        outputs, state = oracle(part_of(batch, begin, end), start, 0, end - begin, dim**-0.5, normalize)
        if end > begin:
            check(out[begin:end], outputs)
        assert_states_close(pool.rec[1, slots[s]], state, end - begin)
        expected[1, slots[s]] = pool.rec[1, slots[s]]
    assert np.array_equal(pool.rec, expected), "another state was touched"
    assert not out[:2].any() and not out[51:].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["layer", "slot"])
def test_prefill_is_direct_sequence_by_sequence(layout: str, dtype: str) -> None:
    offsets = np.array([0, 5, 5, 12])
    batch = packed(12, 1, 2, 64)
    pool, plain = (pool_of(7, 2, 64, layout, dtype) for _ in range(2))
    slots, destinations = np.array([6, 3, 0], np.int32), np.array([6, 4, 1], np.int32)
    out = gated_delta_prefill.prefill(**batch, pool=pool, slots=slots, cu_seqlens=offsets, layer=0, destination_slots=destinations)
    for s, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if begin == end:
            plain.rec[0, destinations[s]] = plain.rec[0, slots[s]]
            continue
        one = gated_delta.direct(**part_of(batch, begin, end), pool=plain, slots=slots[s : s + 1], destination_slots=destinations[s : s + 1], layer=0)
        assert np.array_equal(out[begin:end], one[0])
    assert np.array_equal(pool.rec, plain.rec)


def test_a_sequence_that_starts_afresh_does_not_read_its_slot() -> None:
    batch = packed(3, 1, 2, 64)
    pool, clean = (StatePool.allocate(1, 2, 2, 64) for _ in range(2))
    pool.rec[...] = np.nan
    arguments: dict[str, Any] = {"slots": np.array([1]), "cu_seqlens": np.array([0, 3]), "layer": 0, "resume": np.array([0])}
    out = gated_delta_prefill.prefill(**batch, pool=pool, **arguments)
    assert np.array_equal(out, gated_delta_prefill.prefill(**batch, pool=clean, **arguments))
    assert np.array_equal(pool.rec[0, 1], clean.rec[0, 1]) and np.isnan(pool.rec[0, 0]).all()


def test_what_is_skipped_is_counted_and_leaves_everything_alone() -> None:
    batch = packed(12, 1, 2, 64)
    pool = pool_of(4, 2, 64)
    before, signal = pool.rec.copy(), Signal()
    # Padding, past the pool, two with one destination, one whose destination is another's source, and a sound one that both collide with.
    slots, destinations = np.array([-1, 4, 0, 1, 2, 3]), np.array([0, 0, 3, 3, 1, 2])
    arguments: dict[str, Any] = {**batch, "pool": pool, "slots": slots, "destination_slots": destinations, "layer": 0, "signal": signal}
    out = gated_delta_prefill.prefill(**arguments, cu_seqlens=np.arange(0, 14, 2))
    assert signal.counts() == {"out_of_range": 1, "occupied": 4}
    assert np.array_equal(pool.rec, before) and not out.any()


@pytest.mark.parametrize("offsets", [(0, 2, 1, 12), (-1, 2, 3, 4), (0, 1, 2, 13)])
def test_offsets_that_are_none_skip_every_sequence(offsets: tuple[int, ...]) -> None:
    pool, signal = pool_of(4, 2, 64), Signal()
    before = pool.rec.copy()
    out = gated_delta_prefill.prefill(
        **packed(12, 1, 2, 64), pool=pool, slots=np.array([0, -1, 2]), cu_seqlens=np.array(offsets), layer=0, signal=signal
    )
    assert signal.counts() == {"out_of_range": 2}
    assert np.array_equal(pool.rec, before) and not out.any()


def test_offsets_that_wrap_are_bad_ones() -> None:
    pool, batch, signal = pool_of(4, 2, 64), packed(5, 1, 2, 64), Signal()
    before, offsets = pool.rec.copy(), np.array([0, 2**63 - 1, -(2**63), -1, 5])
    gated_delta_prefill.prefill(**batch, pool=pool, slots=np.arange(4), cu_seqlens=offsets, layer=0, signal=signal)
    assert signal.counts() == {"out_of_range": 4} and np.array_equal(pool.rec, before)


def test_outputs_over_inputs_are_refused() -> None:
    pool, batch = pool_of(2, 2, 64), packed(5, 1, 2, 64)
    v = np.array(batch["v"])
    with pytest.raises(ArgumentError, match="out: expected memory apart from v, but it overlaps it"):
        gated_delta_prefill.prefill(**{**batch, "v": v}, pool=pool, slots=np.array([0]), cu_seqlens=np.array([0, 5]), layer=0, out=v)
