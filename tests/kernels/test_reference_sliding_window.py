"""The sliding-window references against dictionaries: which pages go, in which order, and what stays untouched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpukit.errors import Signal
from gpukit.kernels.reference import sliding_window
from tests.helpers import models

examples = settings(max_examples=120, deadline=None)


def nonzero(*counters):
    return {kind: count for kind, count in sum(counters, models.Counter()).items() if count}


def assert_tables(model, v2p, p2v):
    want_v2p, want_p2v = model.arrays()
    assert v2p.tolist() == want_v2p.tolist() and p2v.tolist() == want_p2v.tolist()


@examples
@given(models.picks, models.page_sizes)
def test_retire(pick, page_size):
    model = pick.tables()
    rows = pick.rows(pick([1, 2, 3]), model, page_size)
    lanes = pick.size(4)
    request, by_index = pick.requests(len(rows), lanes)
    bad = [-page_size, 1, page_size + 1]
    starts = pick.many(lanes, [0, 0, 0, page_size, page_size, 2 * page_size] * 2 + bad)
    stops = pick.many(lanes, [c * page_size + pick([0, 0, 1]) for c in range(1, 7)] * 2 + bad)
    v2p, p2v = model.arrays()
    capacity = pick([1, 2, 3, 30])
    pages, held, signal, counts = models.device_pages(capacity, taken=3), [], Signal(), models.Counter()
    array = pick.view(np.reshape(rows, (len(rows), -1)), axis=pick([0, 1]))
    for _ in range(2):  # the second time nothing is left to retire
        sliding_window.retire(
            array,
            pick([pick.view(starts), starts]),
            pick([pick.view(stops), stops]),
            page_size,
            v2p,
            p2v,
            pages,
            request_indices=pick.view(request) if by_index else None,
            signal=signal,
        )
        models.push(held, capacity, models.retire(rows, starts, stops, page_size, model, request), counts)
        assert models.held_pages(pages) == held
        assert_tables(model, v2p, p2v)
    assert signal.counts() == nonzero(model.counts, counts)


@pytest.mark.parametrize("page_size", models.PAGE_SIZES)
def test_retire_at_the_ends_of_64_bits(page_size):
    """Every stop for every first token, with a row of its own."""
    least, most = -(2**63), 2**63 - 1
    ends = least, least + 1, -(2**62), -1, 0, page_size, 2 * page_size, 2**62, most // page_size * page_size, most - 1, most
    starts, stops = (values.ravel().tolist() for values in np.meshgrid(ends, ends))
    lanes = len(starts)
    model = models.Tables(3 * lanes + 1, 3 * lanes + 1, {v: 3 * lanes + 1 - v for v in range(1, 3 * lanes + 1)})
    rows = [[v * page_size for v in range(3 * lane + 1, 3 * lane + 4) for _ in range(page_size)] for lane in range(lanes)]
    v2p, p2v = model.arrays()
    pages, signal = models.device_pages(3 * lanes), Signal()
    sliding_window.retire(np.array(rows), starts, stops, page_size, v2p, p2v, pages, signal=signal)
    # The model walks, and needs not walk past the row.
    want = models.retire(rows, starts, [min(stop, 3 * page_size) for stop in stops], page_size, model, range(lanes))
    assert models.held_pages(pages) == want and len(want) > 10
    assert_tables(model, v2p, p2v)
    assert signal.counts() == nonzero(model.counts)


def test_retire_known_answer():
    """P=2: the last page of one row and the first two of another leave; the virtual ids stay in the rows."""
    model = models.Tables(8, 8, {1: 7, 2: 6, 3: 5, 4: 4, 5: 3, 6: 2})
    v2p, p2v = model.arrays()
    rows = np.array([[2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13]], dtype=np.int32)
    rows.flags.writeable = False
    pages = models.device_pages(8)
    sliding_window.retire(rows, [4, 0], [6, 4], 2, v2p, p2v, pages)
    assert models.held_pages(pages) == [5, 4, 3]
    assert v2p.tolist() == [0, 7, 6, -1, -1, -1, 2, -1, -1] and p2v.tolist() == [0, -1, 6, -1, -1, -1, 2, 1, -1]


@examples
@given(models.picks, models.page_sizes)
def test_free_segment(pick, page_size):
    owner = pick.tables()
    other = pick.tables(num_virtual=owner.num_virtual)
    row = pick.rows(1, owner, page_size)[0]
    tables = *owner.arrays(), *other.arrays()
    capacities = pick.many(3, [1, 2, 6, 6])
    rings = [models.device_pages(capacity, taken=2) for capacity in capacities]
    signal, counts = Signal(), models.Counter()
    sliding_window.free_segment(pick.view(row), 3 * page_size, page_size, *tables, *rings, signal=signal)
    for ring, capacity, freed in zip(rings, capacities, models.free_segment(row, page_size, owner, other), strict=True):
        held = []
        models.push(held, capacity, freed, counts)
        assert models.held_pages(ring) == held
    assert_tables(owner, *tables[:2])
    assert_tables(other, *tables[2:])
    assert signal.counts() == nonzero(owner.counts, counts)


def test_free_segment_skips_what_the_window_has_retired():
    owner, other = models.Tables(5, 5, {1: 4, 2: 3, 3: 2}), models.Tables(5, 9, {3: 8})
    tables = *owner.arrays(), *other.arrays()
    rings = [models.device_pages(4) for _ in range(3)]
    signal = Signal()
    row = np.array([4, 5, 6, 7, 12])  # P=4: page 1, and one token of page 3
    sliding_window.free_segment(row, 8, 4, *tables, *rings, signal=signal)
    assert [models.held_pages(ring) for ring in rings] == [[1, 3], [4, 2], [8]]
    assert signal.counts() == {}
    assert tables[0].tolist() == [0, -1, 3, -1, -1, -1] and tables[2].tolist() == [0, -1, -1, -1, -1, -1]


@pytest.mark.parametrize(
    ("key_length", "old", "retain", "want"),
    [
        (1023, 0, None, 832),
        (1024, 0, None, 896),
        (960, 0, None, 832),
        (0, 0, None, 0),
        (126, 0, None, 0),
        (191, 0, None, 0),
        (192, 0, None, 64),
        (1024, 960, None, 960),
        (1024, 0, 128, 128),
        (1024, 960, 128, 128),
    ],
)
def test_frontier_known_answers(key_length, old, retain, want):
    assert sliding_window.frontier(key_length, 127, 64, old=old, retain=retain) == want


@examples
@given(st.integers(0, 700), st.integers(0, 300), models.page_sizes, st.integers(0, 5), st.none() | st.integers(0, 5))
def test_frontier(key_length, window, page_size, old, retain):
    old, retain = old * page_size, None if retain is None else retain * page_size
    got = sliding_window.frontier(key_length, window, page_size, old=old, retain=retain)
    assert got == models.frontier(key_length, window, page_size, old, retain)
    assert type(got) is int
