"""What retirement of pages that left the sliding window means, in NumPy: tombstones in one sub-pool, or a free in both.

Which tokens a window still needs is the caller's business; `frontier` is the one rule given here. Ids stay with whoever minted them.
"""

from __future__ import annotations

import numpy as np

from gpukit.errors import Signal
from gpukit.kernels.reference._ids import Array, add, as_ids, ceil_div, expand
from gpukit.kernels.reference.free_list import Ring, append
from gpukit.kernels.reference.page_table import unbind, unbind_into


def retire(
    rows: Array,
    starts: Array,
    stops: Array,
    page_size: int,
    v2p: Array,
    p2v: Array,
    pages: Ring,
    *,
    request_indices: Array | None = None,
    signal: Signal | None = None,
) -> None:
    """Unbind the whole pages of tokens [start, stop) of each request's row and append them to `pages`, by request, then page."""
    starts, stops = as_ids(starts), as_ids(stops)
    request = np.arange(len(starts)) if request_indices is None else as_ids(request_indices)
    known = (request >= 0) & (request < len(rows))
    aligned = (starts >= 0) & (starts % page_size == 0)
    add(signal, "out_of_range", ~known)
    add(signal, "mismatch", known & ~aligned)
    first = starts // page_size
    last = np.minimum(stops // page_size, ceil_div(rows.shape[1], page_size))  # cut where the row ends
    lane, step = expand(np.where(known & aligned & (last > first), last - first, 0))
    if len(lane):
        tokens = as_ids(rows[request[lane], (first[lane] + step) * page_size])
        unbind_into(tokens // page_size, v2p, p2v, pages, signal=signal)


def free_segment(
    row_slice: Array,
    start: int,
    page_size: int,
    owner_v2p: Array,
    owner_p2v: Array,
    other_v2p: Array,
    other_p2v: Array,
    virtual_pages: Ring,
    owner_pages: Ring,
    other_pages: Ring,
    *,
    signal: Signal | None = None,
) -> None:
    """Free the pages of one row slice in both sub-pools. A page the other sub-pool has retired before is ordinary there."""
    virtual = as_ids(row_slice[::page_size]) // page_size
    physical = unbind(virtual, owner_v2p, owner_p2v, signal=signal)
    freed = physical > 0
    other = unbind(virtual[freed], other_v2p, other_p2v)
    append(virtual_pages, virtual[freed], signal)
    append(owner_pages, physical[freed], signal)
    append(other_pages, other[other > 0], signal)


def frontier(key_length: int, window: int, page_size: int, *, old: int = 0, retain: int | None = None) -> int:
    """First token that must stay when a key of this length is cached: everything before it may be retired."""
    insertion_end = key_length // page_size * page_size
    safe = max(old, 0, (insertion_end - window) // page_size * page_size)
    return safe if retain is None else min(safe, retain)
