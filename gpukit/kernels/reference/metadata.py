"""What the attention-metadata ops mean, in NumPy: from rows of virtual ids to physical page tables, token streams and slots.

Rows are read and never written, except the padded request indices that `replay_state_indices` clears. Nothing here owns pages:
a table is a `v2p` array, or None for the virtual space itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from gpukit.errors import Signal
from gpukit.kernels.reference._ids import Array, add, as_ids, ceil_div, every, expand, physical_pages, token_locations

# What no length is added to.
MOST = 2**63 - 1


class Spaces(Protocol):
    """What `decode_metadata` asks of an `AddressSpaces`."""

    def table(self, space: str) -> Array | None:
        """The `v2p` of a space."""
        ...


def _lane_count(count: int | Array | None, limit: int) -> int:
    """A number of lanes, host int or array of one, kept within the batch."""
    return limit if count is None else min(max(int(np.asarray(count).reshape(-1)[0]), 0), limit)


def _known_rows(rows: Array, lanes: int, request_indices: Array | None) -> tuple[Array, Array]:
    """The row of each lane, 0 where the request index lies outside, and the mask of those inside."""
    request = np.arange(lanes) if request_indices is None else as_ids(request_indices)[:lanes]
    known = (request >= 0) & (request < len(rows))
    return np.where(known, request, 0), known


def _live_lanes(
    rows: Array, lens: Array, delta: int, valid: int | Array | None, request_indices: Array | None, signal: Signal | None
) -> tuple[Array, Array]:
    """Row and length of each lane. Padding and lanes with no row of their own have length 0."""
    length = as_ids(lens)
    # Compared before it is added: a sum below 0 is no token, and so is one that would go round.
    length = np.where((length < -delta) | (length > MOST - max(delta, 0)), 0, length + delta)
    length[_lane_count(valid, len(length)) :] = 0
    request, known = _known_rows(rows, len(length), request_indices)
    if not every(known):
        unknown = ~known
        unknown[_lane_count(valid, len(length)) :] = False
        add(signal, "out_of_range", unknown)
        length[~known] = 0
    return request, length


def _row_pages(rows: Array, request: Array, length: Array, page_size: int, granularity: str, width: int) -> tuple[Array, Array]:
    """Virtual pages [lanes, columns] of the first `length` tokens, cut at `width` and at the row; 0 and False past the end."""
    step = page_size if granularity == "token" else 1
    count = np.minimum(ceil_div(length, page_size), min(width, ceil_div(rows.shape[1], step)))
    columns = int(count.max(initial=0))
    inside = np.arange(columns) < count[:, None]
    if not columns:
        return inside.astype(np.int64), inside
    page = as_ids(rows[:, : columns * step : step][request]) // step
    return np.where(inside, page, 0), inside


def _write_table(out: Array, page: Array, inside: Array, v2p: Array | None, zero_tail: bool, signal: Signal | None) -> None:
    """Write the physical pages into the top left of `out`, and the sink right of them when asked to."""
    lanes, columns = page.shape
    physical = physical_pages(page, v2p, signal)
    if zero_tail:
        out[:lanes, :columns] = physical
        out[:lanes, columns:] = 0
    else:
        np.copyto(out[:lanes, :columns], physical, where=inside, casting="same_kind")


def read_table(
    rows: Array,
    lens: Array,
    v2p: Array | None,
    page_size: int,
    *,
    out: Array,
    delta: int = 0,
    zero_tail: bool = False,
    request_indices: Array | None = None,
    granularity: str = "token",
    valid: int | Array | None = None,
    signal: Signal | None = None,
) -> Array:
    """Page table of each lane: `out[b, c]` is the physical page of tokens [c * page_size, (c + 1) * page_size)."""
    request, length = _live_lanes(rows, lens, delta, valid, request_indices, signal)
    page, inside = _row_pages(rows, request, length, page_size, granularity, out.shape[1])
    _write_table(out, page, inside, v2p, zero_tail, signal)
    return out


def read_stream(
    rows: Array,
    lens: Array,
    v2p: Array | None,
    page_size: int,
    indptr: Array,
    *,
    out: Array,
    delta: int = 0,
    request_indices: Array | None = None,
    granularity: str = "token",
    valid: int | Array | None = None,
    signal: Signal | None = None,
) -> Array:
    """Physical tokens of each lane, packed: `out[indptr[b] + t]` is token t, as far as `indptr`, `out` and the row reach."""
    request, length = _live_lanes(rows, lens, delta, valid, request_indices, signal)
    _write_stream(rows, request, length, v2p, page_size, indptr, out, granularity, signal)
    return out


def _write_stream(
    rows: Array,
    request: Array,
    length: Array,
    v2p: Array | None,
    page_size: int,
    indptr: Array,
    out: Array,
    granularity: str,
    signal: Signal | None,
) -> None:
    bounds = as_ids(indptr)
    begin, end = bounds[: len(length)], np.minimum(bounds[1 : len(length) + 1], len(out))
    add(signal, "mismatch", (begin < 0) & (length > 0))
    tokens_per_entry = 1 if granularity == "token" else page_size
    count = np.minimum(length, rows.shape[1] * tokens_per_entry)
    lane, token = expand(np.where(begin < 0, 0, np.minimum(np.maximum(end - begin, 0), count)))
    entry = as_ids(rows[request[lane], token // tokens_per_entry])
    if granularity == "token":
        out[begin[lane] + token] = token_locations(entry, v2p, page_size, signal)
    else:
        out[begin[lane] + token] = _page_locations(entry, token % page_size, v2p, page_size, signal)


def _page_locations(page: Array, offset: Array, v2p: Array | None, page_size: int, signal: Signal | None) -> Array:
    """Physical token of an offset in each virtual page, 0 where the page has none."""
    if v2p is None:
        return np.where(page < 0, 0, page * page_size + offset)
    # Compared before it is multiplied: no page past the table may come round to one of it.
    page = np.clip(page, -1, len(v2p) - 1)
    return token_locations(page * page_size + offset, v2p, page_size, signal)


def read_table_and_stream(
    rows: Array,
    lens: Array,
    v2p: Array | None,
    page_size: int,
    indptr: Array,
    *,
    table_out: Array,
    stream_out: Array,
    delta: int = 0,
    zero_tail: bool = False,
    request_indices: Array | None = None,
    granularity: str = "token",
    valid: int | Array | None = None,
    signal: Signal | None = None,
) -> tuple[Array, Array]:
    """`read_table` and `read_stream` of the same rows; every entry written as the sink for want of a page counts."""
    request, length = _live_lanes(rows, lens, delta, valid, request_indices, signal)
    page, inside = _row_pages(rows, request, length, page_size, granularity, table_out.shape[1])
    _write_table(table_out, page, inside, v2p, zero_tail, signal)
    _write_stream(rows, request, length, v2p, page_size, indptr, stream_out, granularity, signal)
    return table_out, stream_out


def decode_metadata(
    rows: Array,
    lens: Array,
    spaces: Spaces,
    page_size: int,
    *,
    lengths_out: Array,
    cu_lengths_out: Array,
    full_out: Array,
    swa_out: Array | None = None,
    delta: int = 0,
    zero_tail: bool = True,
    request_indices: Array | None = None,
    granularity: str = "token",
    valid: int | Array | None = None,
    signal: Signal | None = None,
) -> None:
    """Lengths, their running sum, and the FULL and SWA page tables of a decode batch. Bad ids are counted in FULL only."""
    request, length = _live_lanes(rows, lens, delta, valid, request_indices, signal)
    lengths_out[: len(length)] = length
    cu_lengths_out[0] = 0
    cu_lengths_out[1 : len(length) + 1] = length.cumsum()
    page, inside = _row_pages(rows, request, length, page_size, granularity, full_out.shape[1])
    _write_table(full_out, page, inside, spaces.table("full"), zero_tail, signal)
    if swa_out is not None:
        if swa_out.shape[1] != full_out.shape[1]:
            page, inside = _row_pages(rows, request, length, page_size, granularity, swa_out.shape[1])
        _write_table(swa_out, page, inside, spaces.table("swa"), zero_tail, None)  # pages retired from the window are ordinary


def gather_translate_window(
    rows: Array,
    starts: Array,
    width: int | Array,
    tables: Sequence[Array | None],
    page_size: int,
    *,
    outs: Sequence[Array],
    virtual_out: Array | None = None,
    request_indices: Array | None = None,
    signal: Signal | None = None,
) -> None:
    """Tokens [start, start + width) of each request, packed, in virtual space and in the space of every table."""
    starts = as_ids(starts)
    uniform = np.ndim(width) == 0
    widths = np.full(len(starts), max(int(width), 0)) if uniform else np.maximum(as_ids(width), 0)
    request, known = _known_rows(rows, len(starts), request_indices)
    add(signal, "out_of_range", ~known)

    targets = list(outs) if virtual_out is None else [*outs, virtual_out]
    room = min(len(out) for out in targets)
    widths = np.minimum(widths, room + 1)  # so that no sum can wrap
    ends = widths.cumsum()
    if signal is not None:
        signal.add("mismatch", int(widths.sum() > room))
    lane, step = expand(np.minimum(ends, room) - np.minimum(ends - widths, room))
    position = starts[lane] + step
    outside = (position < 0) | (position >= rows.shape[1])
    add(signal, "out_of_range", outside & known[lane])
    readable = known[lane] & ~outside
    ids = np.zeros(len(lane), dtype=np.int64)
    ids[readable] = rows[request[lane[readable]], position[readable]]

    for table, out in zip([*tables, None], targets, strict=False):  # the virtual space comes last, if it is wanted
        out[: len(ids)] = token_locations(ids, table, page_size, signal)
        if not uniform:
            out[len(ids) :] = 0


def replay_state_indices(
    request_indices: Array,
    mapping: Array,
    v2p: Array | None,
    valid: int | Array,
    total: int | Array,
    out: Array,
    *,
    track_in: Array | None = None,
    track_out: Array | None = None,
    signal: Signal | None = None,
) -> Array:
    """State slots of a captured batch: live lanes get theirs, padding gets -1 and request 0, lanes from `total` on stay."""
    total = _lane_count(total, min(len(out), len(request_indices)))
    valid = _lane_count(valid, total)
    request = as_ids(request_indices[:valid])
    known = (request >= 0) & (request < len(mapping))
    add(signal, "out_of_range", ~known)
    slot = np.zeros(valid, dtype=np.int64)
    slot[known] = mapping[request[known]]
    out[:valid] = physical_pages(slot, v2p, signal)
    out[valid:total] = -1
    request_indices[valid:total] = 0
    if track_in is not None and track_out is not None:
        track_out[:valid] = physical_pages(as_ids(track_in[:valid]), v2p, signal)
        track_out[valid:total] = -1
    return out
