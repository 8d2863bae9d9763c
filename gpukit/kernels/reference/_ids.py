"""Rules shared by the NumPy references: which ids are valid, what an id without a page becomes, how ragged batches are laid out.

Nothing here is an op. All arithmetic is 64-bit and divisions are floor divisions. Look-ups use `take(mode="clip")`: a negative
id then reads row 0 (the sink, 0) and an id past the table reads the last row (the sentinel, -1), so that no id can read outside.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpukit.errors import Signal

Array = np.ndarray[Any, np.dtype[Any]]


def as_ids(values: Any) -> Array:
    """Ids or lengths as int64, without a copy where they are already."""
    return np.asarray(values, dtype=np.int64)


def add(signal: Signal | None, kind: str, mask: Array) -> None:
    """Count the True entries of a mask, if anybody wants to know."""
    if signal is not None:
        signal.add(kind, int(np.count_nonzero(mask)))


def every(mask: Array) -> bool:
    """`mask.all()`, a few times faster on short masks."""
    return bool(np.count_nonzero(mask) == mask.size)


def is_page(ids: Array, table: Array) -> Array:
    """Mask of the valid page ids of a table: neither sink, nor sentinel, nor outside."""
    return (ids > 0) & (ids < len(table) - 1)


def live_partner(ids: Array, table: Array, inverse: Array) -> Array:
    """`table[id]` where the two tables agree on the pair, -1 where they do not or the id is invalid."""
    partner = table.take(ids, mode="clip")
    partner[(inverse.take(partner, mode="clip") != ids) | (ids == 0)] = -1  # the sink is its own partner, and not a page
    return partner


def all_different(pages: Array, table: Array) -> bool:
    """Whether no page repeats. Uses the pages' rows of `table` as scratch: the caller writes them next."""
    order = np.arange(len(pages))
    table[pages] = order
    return every(table[pages] == order)


def is_first(pages: Array) -> Array:
    """Mask of the first of each set of equal pages. Sorts: for the rare batch that has duplicates."""
    first = np.zeros(len(pages), dtype=bool)
    first[np.unique(pages, return_index=True)[1]] = True
    return first


def physical_pages(pages: Array, v2p: Array | None, signal: Signal | None = None) -> Array:
    """Physical page of each virtual page, the sink 0 where there is none. No table is the virtual space itself."""
    if v2p is None:
        return np.maximum(pages, 0)
    physical = v2p.take(pages, mode="clip")
    _count_unmapped(pages, physical, v2p, signal)
    return np.maximum(physical, 0)


def token_locations(ids: Array, v2p: Array | None, page_size: int, signal: Signal | None = None) -> Array:
    """Physical token of each virtual token id, 0 where its page has none. No table is the virtual space itself."""
    if v2p is None:
        return np.maximum(ids, 0)
    page = ids // page_size
    physical = v2p.take(page, mode="clip")
    _count_unmapped(page, physical, v2p, signal)
    location: Array = (physical - page) * page_size + ids  # physical * page_size + ids % page_size
    location[(ids < 0) | (physical < 0)] = 0
    return location


def _count_unmapped(pages: Array, physical: Array, v2p: Array, signal: Signal | None) -> None:
    if signal is not None:
        past = pages >= len(v2p) - 1
        add(signal, "out_of_range", past)
        add(signal, "unbound", (physical < 0) & ~past)


def expand(counts: Array) -> tuple[Array, Array]:
    """Lane and position within the lane of every item of a ragged batch, in lane order."""
    lane = np.repeat(np.arange(len(counts)), counts)
    return lane, np.arange(len(lane)) - (counts.cumsum() - counts)[lane]


def ceil_div(dividend: Any, divisor: int) -> Any:
    """Division rounded up."""
    return -(-dividend // divisor)
