"""Where pages could go: pure arithmetic over a snapshot of the chain, no arrays and no waiting.

`place` answers what fits now, with no page moved; `pack` what fits once everything that may move has moved. Capacities are the largest counts
for which they say yes, and an allocation follows the placement that they return, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

__all__ = ["BandState", "Span", "Take", "bound", "largest", "pack", "place"]

# Kinds of bands.
UP, FLOAT, DOWN = 0, 1, 2

Span = tuple[int, int]


class BandState(NamedTuple):
    """The numbers of one band: all that capacity depends on.

    Attributes
    ----------
    kind : int
        UP, FLOAT or DOWN.
    page_bytes : int
    low, high : int
        The span in pages, ``[low, high)``; an UP band's `low` and a DOWN band's `high` never change.
    holes, pending : int
        Free pages inside the span, and pages that wait for an event.
    ids : int
        Virtual ids that can be minted now.
    movable : bool
        Whether pages may move now: no gate is closed, and nothing is pending.
    """

    kind: int
    page_bytes: int
    low: int
    high: int
    holes: int
    pending: int
    ids: int
    movable: bool

    @property
    def live(self) -> int:
        """Pages in use."""
        return self.high - self.low - self.holes - self.pending


class Take(NamedTuple):
    """What an allocation takes of one band: `holes` pages from the holes, then `extra` pages from `first` on, and the span after it."""

    holes: int
    first: int
    extra: int
    span: Span


def place(bands: Sequence[BandState], counts: Sequence[int]) -> list[Take] | None:
    """Place `counts` pages in the bands, in byte order, without moving any; None where they do not fit.

    Holes go first. ENDs grow, then each FLOAT extends to one side, the roomier one if that leaves room for the others; an empty FLOAT starts at
    the midpoint of its free region, or as low as it can.
    """
    extra = []
    for band, count in zip(bands, counts, strict=True):
        if count > band.ids:
            return None
        extra.append(count - band.holes if count > band.holes else 0)
    bottom, top = bands[0], bands[-1]
    low_end, high_end = bottom.high + extra[0], top.low - extra[-1]
    floor, ceiling = low_end * bottom.page_bytes, high_end * top.page_bytes
    if len(bands) == 2:
        if floor > ceiling:
            return None
        spans: list[Span] = []
    else:
        found = _place_floats(bands, extra, 1, floor, ceiling)
        if found is None:
            return None
        spans = found
    takes = [Take(counts[0] - extra[0], bottom.high, extra[0], (bottom.low, low_end))]
    for position, span in enumerate(spans, 1):
        band, more = bands[position], extra[position]
        first = span[0] if span[0] < band.low or band.low == band.high else band.high
        takes.append(Take(counts[position] - more, first, more, span))
    takes.append(Take(counts[-1] - extra[-1], high_end, extra[-1], (high_end, top.high)))
    return takes


def _place_floats(bands: Sequence[BandState], extra: Sequence[int], position: int, floor: int, ceiling: int) -> list[Span] | None:
    """Spans of the FLOATs from `position` on, between the bytes `floor` and `ceiling`."""
    if position == len(bands) - 1:
        return [] if floor <= ceiling else None
    _, size, low, high, *_ = bands[position]
    more = extra[position]
    if low == high and not more:
        rest = _place_floats(bands, extra, position + 1, floor, ceiling)
        return None if rest is None else [(low, high), *rest]
    limit = ceiling
    for later in bands[position + 1 : -1]:
        if later.low != later.high:
            limit = later.low * later.page_bytes
            break
    begin, end = -(-floor // size), limit // size
    options: tuple[Span, ...]
    if low == high:
        start = min((begin + end) // 2, end - more)
        options = ((start, start + more), (begin, begin + more)) if start >= begin else ()
    elif begin > low or high > end:
        options = ()
    elif not more:
        options = ((low, high),)
    else:
        down, up = (low - more, high), (low, high + more)
        options = (down, up) if low - begin > end - high else (up, down)
    for span in options:
        if span[0] >= begin and span[1] <= end:
            rest = _place_floats(bands, extra, position + 1, span[1] * size, ceiling)
            if rest is not None:
                return [span, *rest]
    return None


def pack(bands: Sequence[BandState], counts: Sequence[int], *, move_ends: bool = True) -> list[Span] | None:
    """Spans that hold what is live and `counts` pages more, once the bands that may move have moved; None where even that does not fit.

    Bands that may not move keep their span, and grow from it. FLOATs stay as near to where they are as the others allow. With
    ``move_ends=False`` the ENDs keep their spans too.
    """
    sizes = []
    for band, count in zip(bands, counts, strict=True):
        if count > band.ids:
            return None
        loose = band.movable and (move_ends or band.kind == FLOAT)
        grown = band.high - band.low + max(count - band.holes, 0)
        sizes.append(band.live + count if loose or band.low == band.high else grown)
    bottom, top = bands[0], bands[-1]
    spans: list[Span] = [(bottom.low, bottom.low + sizes[0])]
    floor = spans[0][1] * bottom.page_bytes
    # As low as possible: what does not fit like this does not fit.
    for band, size in zip(bands[1:-1], sizes[1:-1], strict=True):
        span = _lowest(band, size, floor)
        if span is None:
            return None
        spans.append(span)
        if size:
            floor = span[1] * band.page_bytes
    last = (top.high - sizes[-1], top.high)
    if last[0] * top.page_bytes < floor:
        return None
    spans.append(last)
    _raise_towards(bands, sizes, spans)
    return spans


def _lowest(band: BandState, size: int, floor: int) -> Span | None:
    """The lowest span of a FLOAT of `size` pages above a byte."""
    begin = -(-floor // band.page_bytes)
    if band.movable or band.low == band.high:
        return (begin, begin + size)
    more = size - (band.high - band.low)
    if band.low < begin:
        return None
    return (band.low - more, band.high) if band.low - more >= begin else (band.low, band.high + more)


def _raise_towards(bands: Sequence[BandState], sizes: Sequence[int], spans: list[Span]) -> None:
    """Move loose FLOATs from the lowest place back up, as far as where they are now or as the bands above allow."""
    limits = [0] * len(bands)
    limit = spans[-1][0] * bands[-1].page_bytes
    for position in range(len(bands) - 2, 0, -1):
        limits[position] = limit
        if sizes[position]:
            band = bands[position]
            loose = band.movable or band.low == band.high
            limit = (limit // band.page_bytes - sizes[position] if loose else spans[position][0]) * band.page_bytes
    for position in range(1, len(bands) - 1):
        band, size = bands[position], sizes[position]
        if size and (band.movable and band.low != band.high):
            highest = limits[position] // band.page_bytes - size
            start = min(max(band.low, spans[position][0]), highest)
            spans[position] = (start, start + size)
        if size and position + 1 < len(bands) - 1:
            _push_above(bands, sizes, spans, position)


def _push_above(bands: Sequence[BandState], sizes: Sequence[int], spans: list[Span], position: int) -> None:
    """Keep the next FLOAT that holds something above this one."""
    floor = spans[position][1] * bands[position].page_bytes
    for later in range(position + 1, len(bands) - 1):
        if sizes[later]:
            band = bands[later]
            if band.movable or band.low == band.high:
                begin = max(spans[later][0], -(-floor // band.page_bytes))
                spans[later] = (begin, begin + sizes[later])
            return


def bound(bands: Sequence[BandState], units: Sequence[int]) -> int:
    """At least as many units as `place` can place, and hardly more: what the gaps between the bands have room for, whichever way FLOATs extend."""
    occupied = [position for position, band in enumerate(bands) if band.kind != FLOAT or band.low != band.high]
    choices = [(True, False) if bands[position].kind == FLOAT and units[position] else (bands[position].kind == UP,) for position in occupied]
    best = 0
    for ups in product(*choices):
        least = None
        for below, above, up, also_up in zip(occupied, occupied[1:], ups, ups[1:], strict=False):
            first, second = bands[below], bands[above]
            takers = [below] if up and units[below] else []
            takers += [position for position in range(below + 1, above) if units[position]]
            if not also_up and units[above]:
                takers.append(above)
            if takers:
                room = second.low * second.page_bytes - first.high * first.page_bytes
                found = _units_in(room, [(units[taker], bands[taker].holes, bands[taker].page_bytes) for taker in takers])
                least = found if least is None or found < least else least
        best = max(best, least or 0)
    return best


def _units_in(room: int, takers: list[tuple[int, int, int]]) -> int:
    """Units that fit in a gap whose takers have so many pages a unit, holes, and bytes a page."""
    while True:
        found = (room + sum(holes * size for _, holes, size in takers)) // sum(unit * size for unit, _, size in takers)
        # Holes that a band does not need are no room for the others.
        needy = [taker for taker in takers if taker[0] * found > taker[1]]
        if len(needy) == len(takers) or not needy:
            return max([found, *(holes // unit for unit, holes, _ in takers)]) if not needy else found
        takers = needy


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 0 to `most` for which a monotone test says yes, 0 where it never does; quick where `most` is nearly right.

    Examples
    --------
    >>> largest(lambda n: n * n <= 30, 100)
    5
    """
    low, high, step = max(most, 0), max(most, 0), 1
    while low > 0 and not fits(low):
        high = low - 1
        low = max(low - step, 0)
        step *= 2
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
