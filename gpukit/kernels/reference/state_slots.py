"""What the state moves mean, in NumPy: whole states of several parts between slots, from the steps of a verification into slots, or cleared.

States are bytes here. A move is ``destination[layer, slot[row]] = source[layer, row, step[row]]`` for every part and layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpukit.errors import Signal
from gpukit.kernels.reference._ids import add, as_ids, is_first

Array = np.ndarray[Any, np.dtype[Any]]
# Rows that move, with the slot and the step of each.
Moves = tuple[Array, Array, Array]


def _moves(sets: Sequence[tuple[Array, Array]], slot_count: int, step_count: int, signal: Signal | None) -> list[Moves]:
    """The valid rows of each set of indices; of equal slots the first counts, and earlier sets come before later ones."""
    found: list[Moves] = []
    taken = np.zeros(0, np.int64)
    for slots, steps in sets:
        active = (slots >= 0) & (steps >= 0)
        past = active & ((slots >= slot_count) | (steps >= step_count))
        add(signal, "out_of_range", past)
        rows = np.flatnonzero(active & ~past)
        first = is_first(slots[rows]) & ~np.isin(slots[rows], taken)
        add(signal, "unbound", ~first)
        taken = np.concatenate((taken, slots[rows]))
        rows = rows[first]
        found.append((rows, slots[rows], steps[rows]))
    return found


def _bits(array: Array) -> Array:
    """The array as unsigned integers of its width: a twin dtype is copied, not converted."""
    return array.view(f"u{array.itemsize}")


def copy_slots(pools: Sequence[Array], source: Array, destination: Array, *, signal: Signal | None = None) -> None:
    """Copy slot `source[i]` onto slot `destination[i]` in every layer of every pool."""
    count = pools[0].shape[1]
    ((_, slots, origins),) = _moves([(as_ids(destination), as_ids(source))], count, count, signal)
    for pool in pools:
        pool[:, slots] = pool[:, origins]


def clear_slots(pools: Sequence[Array], slots: Array, *, signal: Signal | None = None) -> None:
    """Fill slots with zeros in every layer of every pool."""
    ids = as_ids(slots)
    ((_, cleared, _),) = _moves([(ids, np.zeros_like(ids))], pools[0].shape[1], 1, signal)
    for pool in pools:
        pool[:, cleared] = 0


def scatter_states(sources: Sequence[Array], pools: Sequence[Array], sets: Sequence[tuple[Array, Array]], *, signal: Signal | None = None) -> None:
    """Write the state after step `steps[row]` of each row to slot `slots[row]`, for every set (slots, steps) of indices."""
    ids = [(as_ids(slots), as_ids(steps)) for slots, steps in sets]
    for rows, slots, steps in _moves(ids, pools[0].shape[1], sources[0].shape[2], signal):
        for source, pool in zip(sources, pools, strict=True):
            _bits(pool)[:, slots] = _bits(source)[:, rows, steps]
