"""What the free-list ops mean: the ring of freed pages, the placement of new tokens, stream compaction, in NumPy.

The classes `FreeList` and `DevicePages` are public and live in `gpukit.kernels.free_list`; here a ring is anything with
`ring` and `counters`. Which page is free is for the page tables to say, not for this module.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from gpukit.errors import Signal
from gpukit.kernels.reference._ids import Array, add, as_ids, ceil_div, expand

# Nothing lies behind it.
MOST = 2**63 - 1


class Ring(Protocol):
    """The arrays of a `DevicePages`: `ring` int64 [capacity], `counters` int64 [2] = pages taken and appended since the start."""

    ring: Array
    counters: Array


def append(pages: Ring, values: Array, signal: Signal | None = None) -> None:
    """Push values in order; those that find the ring full are dropped."""
    capacity = len(pages.ring)
    head, tail = pages.counters.tolist()
    count = min(len(values), capacity - (tail - head))
    if count < len(values) and signal is not None:
        signal.add("exhausted", len(values) - count)
    if count:
        pages.ring[np.arange(tail, tail + count) % capacity] = values[:count]
        pages.counters[1] = tail + count


def take(pages: Ring, n: int, out: Array | None = None, *, signal: Signal | None = None) -> Array:
    """Pop the n oldest pages; what the ring does not hold is the sink 0."""
    out = np.empty(n, dtype=np.int64) if out is None else out
    head, tail = pages.counters.tolist()
    count = min(n, tail - head)
    if count < n and signal is not None:
        signal.add("exhausted", n - count)
    if count:
        out[:count] = pages.ring[np.arange(head, head + count) % len(pages.ring)]
        pages.counters[0] = head + count
    out[count:n] = 0
    return out


def gather_extend(
    prefix_lens: Array,
    seq_lens: Array,
    last_loc: Array,
    free_pages: Array,
    page_size: int,
    *,
    num_tokens: int,
    num_pages: int,
    out: Array | None = None,
    signal: Signal | None = None,
) -> Array:
    """Locations of the tokens [prefix, seq) of each request: the rest of its last page, then new pages; lengths alone set offsets."""
    prefix, seq, last = as_ids(prefix_lens), as_ids(seq_lens), as_ids(last_loc)
    offset = prefix % page_size
    no_tokens = (prefix < 0) | (seq < prefix)
    # Compared so that last + 1 cannot go round.
    broken = no_tokens | (last % page_size != (offset - 1) % page_size) | ((offset > 0) & ((last < 0) | (last == MOST)))
    tokens = np.where(no_tokens, 0, seq - prefix)
    first_page = ceil_div(prefix, page_size)
    needed = np.where(no_tokens, 0, ceil_div(seq, page_size) - first_page)
    tokens, needed = np.minimum(tokens, num_tokens + 1), np.minimum(needed, num_pages + 1)  # so that no sum can wrap
    first_free, ends = needed.cumsum() - needed, tokens.cumsum()
    if signal is not None:
        signal.add("mismatch", int(np.count_nonzero(broken)) + int(tokens.sum() != num_tokens))

    out = np.empty(num_tokens, dtype=np.int64) if out is None else out
    lane, step = expand(np.minimum(ends, num_tokens) - np.minimum(ends - tokens, num_tokens))  # cut where `out` ends
    position = prefix[lane] + step
    free = np.zeros(num_pages + 1, dtype=np.int64)  # one more: what lies past the list is no page
    free[:num_pages] = free_pages[:num_pages]
    page = free.take(position // page_size + (first_free - first_page)[lane], mode="clip")
    # Pages are compared, because the first token of the next one may lie past 64 bits.
    on_new_page = position // page_size >= first_page[lane]
    exhausted = on_new_page & (page < 1) & ~broken[lane]
    add(signal, "exhausted", exhausted)
    location = np.where(on_new_page, page * page_size + position % page_size, last[lane] + 1 + step)
    location[exhausted | broken[lane]] = 0
    out[: len(location)] = location
    out[len(location) : num_tokens] = 0
    return out


def gather_decode(
    seq_lens: Array, last_loc: Array, free_pages: Array, page_size: int, *, out: Array | None = None, signal: Signal | None = None
) -> Array:
    """Location of the last token of each request: after `last_loc`, or first in the next free page when it starts a page."""
    # The smallest length of all less one would go round.
    position, last = np.maximum(as_ids(seq_lens), 0) - 1, as_ids(last_loc)
    offset = position % page_size
    live = position >= 0
    starts_page = live & (offset == 0)
    stays = live & (offset != 0)
    # Compared so that last + 1 cannot go round.
    follows = stays & (last >= 0) & (last < MOST) & (last % page_size == offset - 1)
    location = np.where(follows, last + 1, 0)
    takers = starts_page.nonzero()[0]
    granted = np.maximum(as_ids(free_pages[: len(takers)]), 0)
    location[takers[: len(granted)]] = granted * page_size
    if signal is not None:
        add(signal, "mismatch", stays & ~follows)
        signal.add("exhausted", len(takers) - int(np.count_nonzero(granted)))
    if out is None:
        return location
    out[:] = location
    return out


def compact(ids: Array, keep: Array, *, out: Array | None = None, out_len: Array | None = None, signal: Signal | None = None) -> tuple[Array, Array]:
    """The ids whose `keep` is not zero, in order, and their number. Entries past the number stay as they are."""
    kept = ids[keep != 0]
    out = np.empty(len(ids), dtype=ids.dtype) if out is None else out
    out_len = np.empty(1, dtype=np.int64) if out_len is None else out_len
    out[: len(kept)] = kept
    out_len[0] = len(kept)
    return out, out_len
