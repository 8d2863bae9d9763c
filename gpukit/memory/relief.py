"""Making room: flushing holes at the edges of a span, moving live pages together, and the ladder that an allocation climbs before it gives up.

All of it waits for the device, because which pages are free is known only there: one read-back a band. Nothing here decides whether there is room;
that is `geometry.pack`'s arithmetic, asked before anything moves.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from gpukit.kernels import page_copy, page_table
from gpukit.memory._arrays import to_device
from gpukit.memory.bands import Band
from gpukit.memory.capacity import Chain
from gpukit.memory.geometry import DOWN, FLOAT, UP, BandState, Take, pack, place

__all__ = ["compact", "flush", "make_room", "relieve"]


class Pool(Protocol):
    """What relief needs of a pool."""

    chain: Chain
    buffer: Any
    signal: Any
    moved_pages: int


def flush(band: Band, stream: Any = None) -> int:
    """Give up the holes at the edges of a span; moves nothing. Returns the pages by which the span shrank."""
    before = int(band.high - band.low)
    band.settle(stream)
    band.collect(stream)
    _hold(band, _live_pages(band, stream), stream)
    return before - int(band.high - band.low)


def compact(pool: Pool, band: Band, *, start: int | None = None, event: Any = None, stream: Any = None) -> int:
    """Move live pages together: outermost page into innermost hole for an END, to the pages from `start` on for a FLOAT.

    With an event the pages that were left wait for it. Returns how many pages moved.
    """
    band.settle(stream)
    band.collect(stream)
    live = _live_pages(band, stream)
    targets = _targets(band, len(live), start)
    source = np.setdiff1d(live, targets, assume_unique=True)
    destination = np.setdiff1d(targets, live, assume_unique=True)
    if band.kind == UP:
        # The outermost page into the innermost hole.
        source = source[::-1]
    elif band.kind == DOWN:
        destination = destination[::-1]
    if len(source):
        pair = to_device(np.ascontiguousarray([source, destination]).reshape(-1), band.like)
        there, here = pair[: len(source)], pair[len(source) :]
        if pool.buffer is not None:
            page_copy.move_pages(pool.buffer, band.page_bytes, there, here, stream=stream, signal=pool.signal)
        page_table.remap(there, here, band.v2p, band.p2v, stream=stream, signal=pool.signal)
        if event is not None:
            band.wait_for(event, source)
        pool.moved_pages += len(source)
    _hold(band, targets, stream)
    return len(source)


def make_room(pool: Pool, band: Band, low_byte: int, high_byte: int, stream: Any = None) -> bool:
    """Move a whole FLOAT into a byte range, as little as that allows. False, with nothing moved, where it does not fit or must not move."""
    floor, ceiling = _limits(pool.chain, band)
    size = band.page_bytes
    begin, end = -(-max(low_byte, floor) // size), min(high_byte, ceiling) // size
    if not band.movable or end - begin < band.live:
        return False
    if not begin <= band.low <= band.high <= end:
        compact(pool, band, start=min(max(band.low, begin), end - band.live), stream=stream)
    return True


def relieve(pool: Pool, counts: list[int], stream: Any = None) -> list[Take] | None:
    """Make room for `counts` pages: flush, then move FLOATs, then compact ENDs. None, with nothing changed, where that cannot be enough."""
    chain = pool.chain
    for band in chain.bands:
        if band.pending:
            band.collect(stream)
    if pack(chain.snapshot(), counts) is None:
        return None
    for band in chain.bands:
        if band.dirty and band.movable:
            flush(band, stream)
    takes = place(chain.snapshot(), counts)
    for move_ends in (False, True):
        if takes is not None:
            break
        spans = pack(chain.snapshot(), counts, move_ends=move_ends)
        if spans is None:
            continue
        if move_ends:
            for band in (chain.bands[0], chain.bands[-1]):
                if band.hole_count and band.movable:
                    compact(pool, band, stream=stream)
        _move_floats(pool, [span[0] for span in spans], stream)
        takes = place(chain.snapshot(), counts)
    return takes


def _move_floats(pool: Pool, starts: list[int], stream: Any) -> None:
    """Move FLOATs to where they were planned, in an order in which none lands on another."""
    floats = [pair for pair in zip(pool.chain.bands, starts, strict=True) if pair[0].kind == FLOAT]
    moves = [(band, start) for band, start in floats if band.movable and band.low != band.high]
    if len(moves) > 1:
        # Without holes a band moves in one direction only.
        for band, start in moves:
            if band.hole_count:
                compact(pool, band, start=min(max(start, band.low), band.high - band.live), stream=stream)
    downwards = [(band, start) for band, start in moves if start < band.low]
    upwards = [(band, start) for band, start in moves if start >= band.low]
    for band, start in (*downwards, *reversed(upwards)):
        if band.low != start or band.hole_count:
            compact(pool, band, start=start, stream=stream)


def _limits(chain: Chain, band: Band) -> tuple[int, int]:
    """The bytes between which a FLOAT may lie: where its nearest neighbours that hold something end and begin."""
    position = chain.positions[band.name]
    states: list[BandState] = chain.snapshot()
    below = max(state.high * state.page_bytes for state in states[:position] if state.kind == UP or state.low != state.high)
    above = min(state.low * state.page_bytes for state in states[position + 1 :] if state.kind == DOWN or state.low != state.high)
    return below, above


def _live_pages(band: Band, stream: Any) -> np.ndarray:
    """The pages in use, ascending. Empties the list of holes: `_hold` fills it again."""
    free = np.zeros(band.high - band.low, bool)
    free[band.take_holes(stream) - band.low] = True
    free[band.pending_pages() - band.low] = True
    return np.flatnonzero(~free) + int(band.low)


def _targets(band: Band, count: int, start: int | None) -> np.ndarray:
    """Where so many live pages shall lie, ascending: the innermost pages that do not wait for an event, or those from `start` on."""
    pages = np.arange(band.low, band.high) if start is None else np.arange(start, start + count)
    if band.pending:
        pages = np.setdiff1d(pages, band.pending_pages(), assume_unique=True)
    return pages[len(pages) - count :] if band.kind == DOWN else pages[:count]


def _hold(band: Band, live: np.ndarray, stream: Any) -> None:
    """Let the span be what the live and the pending pages need, and everything else in it holes."""
    kept = np.concatenate([live, band.pending_pages()])
    low, high = band.low, band.high
    if band.kind == FLOAT:
        low, high = (int(kept.min()), int(kept.max()) + 1) if len(kept) else (low, low)
    elif band.kind == UP:
        high = int(kept.max()) + 1 if len(kept) else band.first
    else:
        low = int(kept.min()) if len(kept) else high
    free = np.ones(high - low, bool)
    free[kept - low] = False
    band.low, band.high = low, high
    band.hole_count = 0
    band.put_holes(np.flatnonzero(free) + low, stream)
    band.dirty = False
