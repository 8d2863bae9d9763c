"""Placement arithmetic against brute force: every way to lay bands out in a few dozen bytes."""

from __future__ import annotations

from itertools import product

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gpukit.memory.geometry import DOWN, FLOAT, UP, BandState, bound, largest, pack, place

BYTES = 28
UNLIMITED = 1000


@st.composite
def chains(draw: st.DrawFn) -> list[BandState]:
    """Three or four bands in order, apart, with some holes."""
    floats = draw(st.integers(0, 2))
    sizes = [draw(st.integers(1, 4)) for _ in range(floats + 2)]
    cuts = sorted(draw(st.lists(st.integers(4, BYTES), min_size=2 * floats + 2, max_size=2 * floats + 2)))
    bands = []
    for position, size in enumerate(sizes):
        kind = UP if position == 0 else DOWN if position == floats + 1 else FLOAT
        if kind == UP:
            low = -(-4 // size)
            high = max(low, cuts[0] // size)
        elif kind == DOWN:
            high = BYTES // size
            low = min(high, -(-cuts[-1] // size))
        else:
            low, high = -(-cuts[2 * position - 1] // size), cuts[2 * position] // size
            high = max(low, high)
            if low == high:
                low = high = 1
        span = high - low
        holes = draw(st.integers(0, span))
        pending = draw(st.sampled_from([0, 0, 1])) if holes < span else 0
        movable = draw(st.booleans()) and not pending
        bands.append(BandState(kind, size, low, high, holes, pending, draw(st.sampled_from([UNLIMITED, UNLIMITED, 3])), movable))
    assume(disjoint(bands, [(band.low, band.high) for band in bands]))
    return bands


counts_of = st.lists(st.integers(0, 6), min_size=4, max_size=4)


def disjoint(bands: list[BandState], spans: list[tuple[int, int]]) -> bool:
    floor = 4
    for band, (low, high) in zip(bands, spans, strict=True):
        # An END keeps the place where it begins, an empty FLOAT nothing.
        if high > low or band.kind != FLOAT:
            if low * band.page_bytes < floor or high * band.page_bytes > BYTES:
                return False
            floor = high * band.page_bytes
    return True


def possible(bands: list[BandState], counts: list[int], moves: bool) -> bool:
    """Whether any spans hold what is there and what comes, by trying all."""
    choices: list[list[tuple[int, int]]] = []
    for band, count in zip(bands, counts, strict=True):
        if count > band.ids:
            return False
        span, most = band.high - band.low, BYTES // band.page_bytes
        loose = (moves and band.movable) or span == 0
        size = band.live + count if loose else span + max(0, count - band.holes)
        if band.kind == UP:
            choices.append([(band.low, band.low + size)])
        elif band.kind == DOWN:
            choices.append([(band.high - size, band.high)])
        elif loose:
            choices.append([(low, low + size) for low in range(1, most + 1 - size + (size == 0))] or [(1, 1 + size)])
        else:
            more = size - span
            choices.append([(band.low - more, band.high), (band.low, band.high + more)])
    return any(disjoint(bands, list(spans)) for spans in product(*choices))


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(chains(), counts_of)
def test_place_finds_room_exactly_where_there_is_some(bands: list[BandState], counts: list[int]) -> None:
    counts = counts[: len(bands)]
    takes = place(bands, counts)
    assert (takes is not None) == possible(bands, counts, moves=False)
    if takes is not None:
        assert disjoint(bands, [take.span for take in takes])
        for band, count, take in zip(bands, counts, takes, strict=True):
            assert take.holes + take.extra == count and take.holes == min(count, band.holes)
            assert take.span[1] - take.span[0] == band.high - band.low + take.extra
            if take.extra:
                assert take.first in (take.span[0], take.span[1] - take.extra)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(chains(), counts_of)
def test_pack_finds_room_exactly_where_moving_makes_some(bands: list[BandState], counts: list[int]) -> None:
    counts = counts[: len(bands)]
    spans = pack(bands, counts)
    assert (spans is not None) == possible(bands, counts, moves=True)
    if spans is not None:
        assert disjoint(bands, spans)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(chains(), counts_of)
def test_what_fits_now_fits_after_moving_and_so_does_less(bands: list[BandState], counts: list[int]) -> None:
    counts = counts[: len(bands)]
    if place(bands, counts) is not None:
        assert pack(bands, counts) is not None
        assert place(bands, [count // 2 for count in counts]) is not None


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(chains(), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_the_bound_is_never_too_low(bands: list[BandState], units: list[int]) -> None:
    units = units[: len(bands)]
    if any(units):
        placed = [n for n in range(BYTES) if place(bands, [n * unit for unit in units]) is not None]
        assert max(placed, default=0) <= bound(bands, units)


def test_a_float_starts_at_the_midpoint_and_goes_where_there_is_more_room() -> None:
    ends = [BandState(UP, 1, 1, 11, 0, 0, UNLIMITED, True), BandState(DOWN, 1, 91, 100, 0, 0, UNLIMITED, True)]

    def span(low: int, high: int, count: int, holes: int = 0) -> tuple[int, int]:
        takes = place([ends[0], BandState(FLOAT, 1, low, high, holes, 0, UNLIMITED, True), ends[1]], [0, count, 0])
        assert takes is not None
        return takes[1].span

    assert span(1, 1, 5) == (51, 56)
    assert span(1, 1, 70) == (21, 91)
    assert span(30, 60, 10) == (30, 70)
    assert span(50, 80, 10) == (40, 80)
    assert span(50, 80, 10, holes=4) == (44, 80)
    # Never split over both sides: 19 and 11 are free, 20 do not fit.
    assert place([ends[0], BandState(FLOAT, 1, 30, 80, 0, 0, UNLIMITED, True), ends[1]], [0, 20, 0]) is None


def test_largest_is_exact_wherever_it_starts() -> None:
    for answer in range(20):
        for most in range(answer, 20):
            assert largest(lambda n, answer=answer: n <= answer, most) == answer
    assert largest(lambda n: False, 10) == 0 == largest(lambda n: True, -5)
