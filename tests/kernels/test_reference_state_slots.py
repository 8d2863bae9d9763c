"""The state moves against loops over rows and layers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpukit.errors import Signal
from gpukit.kernels.reference import state_slots

examples = settings(max_examples=60, deadline=None)
slots_of = st.integers(-2, 6)


def pools_of(slots=5, layers=2):
    rng = np.random.default_rng(slots)
    return [rng.integers(0, 99, (layers, slots, 3, 8)).astype(np.uint16), rng.random((layers, slots, 2, 4, 4), np.float32)]


def commit(sets, sources, pools):
    """Row by row, set by set: what is written, and what is counted."""
    counts, taken = {"out_of_range": 0, "unbound": 0}, set()
    slot_count, step_count = pools[0].shape[1], sources[0].shape[2]
    for slots, steps in sets:
        for row, (slot, step) in enumerate(zip(slots, steps, strict=True)):
            if slot < 0 or step < 0:
                continue
            if slot >= slot_count or step >= step_count:
                counts["out_of_range"] += 1
            elif slot in taken:
                counts["unbound"] += 1
            else:
                taken.add(slot)
                for source, pool in zip(sources, pools, strict=True):
                    for layer in range(pool.shape[0]):
                        pool[layer, slot] = source[layer, row, step]
    return {kind: count for kind, count in counts.items() if count}


@examples
@given(st.lists(st.tuples(slots_of, st.integers(-1, 4), slots_of, st.integers(-1, 4)), max_size=6), st.booleans())
def test_scatter_and_track(rows, track):
    slots, steps, track_slots, track_steps = np.array(rows, np.int64).reshape(-1, 4).T
    pools = pools_of()
    sources = [np.random.default_rng(1).integers(0, 99, (2, len(rows), 3, *pool.shape[2:])).astype(pool.dtype) for pool in pools]
    sets = [(slots, steps), (track_slots, track_steps)] if track else [(slots, steps)]
    expected, signal = [pool.copy() for pool in pools], Signal()
    counts = commit(sets, sources, expected)
    state_slots.scatter_states(sources, pools, sets, signal=signal)
    assert all((one == other).all() for one, other in zip(pools, expected, strict=True))
    assert signal.counts() == counts


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_copy_and_clear(dtype):
    pools = pools_of()
    before, signal = [pool.copy() for pool in pools], Signal()
    state_slots.copy_slots(pools, np.array([0, 4, -1, 5, 1], dtype), np.array([2, 2, 1, 3, -1], dtype), signal=signal)
    state_slots.clear_slots(pools, np.array([4, -3, 4, 9], dtype), signal=signal)
    for pool, old in zip(pools, before, strict=True):
        assert (pool[:, 2] == old[:, 0]).all() and not pool[:, 4].any()
        assert (pool[:, [0, 1, 3]] == old[:, [0, 1, 3]]).all()
    assert signal.counts() == {"out_of_range": 2, "unbound": 2}
