"""What the memory work of a decode round means, in NumPy: pages for the coming tokens, tombstones behind the window, locations, lengths, page tables.

Magazines are anything with `ring` and `counters` (see `free_list`). All or nothing: a round that cannot be served changes nothing but `status`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gpukit.errors import Signal
from gpukit.kernels.reference._ids import Array, add, as_ids, ceil_div, expand, is_page
from gpukit.kernels.reference.free_list import Ring, append, take
from gpukit.kernels.reference.page_table import unbind

# Pages that a request retires in one round at most; more wait for the next rounds.
MOST_RETIRED = 16

# Tokens of a request at most, those of the coming round among them.
MOST_TOKENS = 2**31 - 1


class Plan(NamedTuple):
    """What a round asks of each lane; all of it follows from lengths. Lanes that are not live ask for nothing.

    Attributes
    ----------
    row : int64 array, shape (lanes,)
        The request's row, 0 where the lane is not live.
    live : bool array
        Whether the lane holds a request that makes sense.
    length, new, gone : int64 array
        Length after the advance, pages to take, pages to retire.
    blocked : bool array
        Live lanes whose row has no room for the pages.
    """

    row: Array
    live: Array
    length: Array
    new: Array
    gone: Array
    blocked: Array


def plan(state: Any, page_size: int, window: int | None, signal: Signal | None = None) -> Plan:
    """Work out a round from lengths alone; changes nothing."""
    requests, advance = as_ids(state.requests), as_ids(state.advance)
    known = requests < len(state.rows)
    add(signal, "out_of_range", ~known)
    live = (requests >= 0) & known
    row = np.where(live, requests, 0)
    before, held, retired = state.lengths[row], state.pages[row], state.retired[row]
    # kv_lengths holds int32. Nothing is added or multiplied that could go round.
    most = np.minimum(np.clip(held, 0, MOST_TOKENS) * page_size, max(MOST_TOKENS - state.lookahead, -1))
    broken = live & ((before < 0) | (advance < 0) | (retired < 0) | (retired > held) | (advance > most - np.maximum(before, 0)))
    add(signal, "mismatch", broken)
    live = live & ~broken
    length = np.where(live, before + advance, 0)
    needed = ceil_div(length + state.lookahead, page_size)
    blocked = live & (needed > state.rows.shape[1])
    new = np.where(live & ~blocked, np.maximum(needed - held, 0), 0)
    gone = np.zeros_like(new)
    if window is not None:
        edge = np.maximum(length // page_size * page_size - window, 0) // page_size
        gone = np.where(live, np.clip(edge - retired, 0, MOST_RETIRED), 0)
    return Plan(row, live, length, new, gone, blocked)


def decode_step(
    state: Any,
    page_size: int,
    window: int | None,
    full: tuple[Array, Array],
    swa: tuple[Array, Array] | None,
    virtual_pages: Ring,
    full_pages: Ring,
    swa_pages: Ring | None,
    *,
    signal: Signal | None = None,
) -> None:
    """One round for every lane, in lane order."""
    round_ = plan(state, page_size, window if swa is not None else None, signal)
    magazines = [pages for pages in (virtual_pages, full_pages, swa_pages) if pages is not None]
    total = int(round_.new.sum())
    missing = max(total - min(int(pages.counters[1] - pages.counters[0]) for pages in magazines), 0)
    if missing or round_.blocked.any():
        state.status[1] += 1
        state.status[2] = missing
        if signal is not None:
            signal.add("exhausted", missing + int(np.count_nonzero(round_.blocked)))
        return
    state.status[0] += 1
    if swa is not None and swa_pages is not None:
        _retire(state, round_, swa, swa_pages, signal)
    _grow(state, round_, full, swa, virtual_pages, full_pages, swa_pages, signal)
    rows = round_.row[round_.live]
    state.lengths[rows] = round_.length[round_.live]
    state.pages[rows] += round_.new[round_.live]
    state.retired[rows] += round_.gone[round_.live]
    _write(state, round_, page_size, full, swa)


def _retire(state: Any, round_: Plan, swa: tuple[Array, Array], swa_pages: Ring, signal: Signal | None) -> None:
    """Tombstone the pages that left the window, by lane, then page; pages that are not live are skipped."""
    lane, step = expand(round_.gone)
    column = state.retired[round_.row[lane]] + step
    physical = unbind(as_ids(state.rows[round_.row[lane], column]), *swa, signal=signal)
    append(swa_pages, physical[physical > 0], signal)
    _write_table(state.swa_table, lane, column, 0)


def _grow(
    state: Any,
    round_: Plan,
    full: tuple[Array, Array],
    swa: tuple[Array, Array] | None,
    virtual_pages: Ring,
    full_pages: Ring,
    swa_pages: Ring | None,
    signal: Signal | None,
) -> None:
    """Pop the new pages, by lane, then page, and bind them."""
    lane, step = expand(round_.new)
    column = state.pages[round_.row[lane]] + step
    virtual = take(virtual_pages, len(lane))
    state.rows[round_.row[lane], column] = virtual
    for tables, pages, table in ((full, full_pages, state.full_table), (swa, swa_pages, state.swa_table)):
        if tables is None or pages is None:
            continue
        v2p, p2v = tables
        physical = take(pages, len(lane))
        valid = is_page(virtual, v2p) & is_page(physical, p2v)
        add(signal, "out_of_range", ~valid)
        v2p[virtual[valid]], p2v[physical[valid]] = physical[valid], virtual[valid]
        _write_table(table, lane, column, np.where(valid, physical, 0))


def _write(state: Any, round_: Plan, page_size: int, full: tuple[Array, Array], swa: tuple[Array, Array] | None) -> None:
    """Write locations, lengths and sums; lanes that are not live write to the sink."""
    position = round_.length[:, None] + np.arange(state.lookahead)
    column = np.where(round_.live[:, None], position // page_size, 0)
    virtual = as_ids(state.rows[round_.row[:, None], column])
    for place, tables in enumerate((full, swa)):
        physical = np.zeros_like(virtual) if tables is None else tables[0].take(virtual, mode="clip")
        state.locations[place] = np.where(round_.live[:, None] & (physical > 0), physical * page_size + position % page_size, 0)
    state.kv_lengths[:] = np.where(round_.live, round_.length + state.lookahead, 0)
    state.cu_lengths[0] = 0
    state.cu_lengths[1:] = np.cumsum(state.kv_lengths)


def _write_table(table: Array, lane: Array, column: Array, values: Any) -> None:
    """Entries of a page table, as far as it is wide enough."""
    inside = column < table.shape[1]
    table[lane[inside], column[inside]] = values if np.isscalar(values) else values[inside]
