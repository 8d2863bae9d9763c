"""The page-table references against a dictionary: single ops on built ids, then any sequence of ops on the same tables.

Compared are both tables whole, the output, and the counts of the signal, so that a stray write anywhere fails.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpukit.errors import Signal
from gpukit.kernels.reference import page_table
from tests.helpers import models

examples = settings(max_examples=150, deadline=None)


def assert_tables(model, v2p, p2v):
    want_v2p, want_p2v = model.arrays()
    assert v2p.tolist() == want_v2p.tolist()
    assert p2v.tolist() == want_p2v.tolist()


def assert_counts(signal, *counters):
    total = sum(counters, models.Counter())
    assert signal.counts() == {kind: count for kind, count in total.items() if count}


def test_empty_tables_hold_sink_and_sentinel():
    v2p, p2v = page_table.empty(4, 2)
    assert v2p.tolist() == [0, -1, -1, -1, -1] and p2v.tolist() == [0, -1, -1]
    assert page_table.empty(3)[1].tolist() == [0, -1, -1, -1]
    assert v2p.dtype == p2v.dtype == np.int64


def test_known_answer():
    v2p, p2v = page_table.empty(4, 4)
    page_table.bind(np.array([1, 2]), np.array([3, 1]), v2p, p2v)
    assert v2p.tolist() == [0, 3, 1, -1, -1] and p2v.tolist() == [0, 2, -1, 1, -1]
    assert page_table.translate(np.array([16, 17, 47, 48, -1, 64]), v2p, 16).tolist() == [48, 49, 31, 0, 0, 0]
    assert page_table.unbind(np.array([2, 1]), v2p, p2v).tolist() == [1, 3]
    assert v2p.tolist() == [0, -1, -1, -1, -1] and p2v.tolist() == [0, -1, -1, -1, -1]


@examples
@given(st.data())
def test_any_sequence_of_table_ops(data):
    model = data.draw(models.tables())
    v2p, p2v = model.arrays()
    signal = Signal()
    for _ in range(data.draw(st.integers(1, 4))):
        op = data.draw(st.sampled_from(["bind", "bind_range", "unbind", "unbind_into", "remap"]))
        dtype, style = data.draw(models.id_dtypes), data.draw(models.view_styles)
        virtual = data.draw(st.lists(models.page_ids(model.num_virtual), max_size=7))
        physical = data.draw(st.lists(models.page_ids(model.num_physical), min_size=len(virtual), max_size=len(virtual)))
        ids, others = models.as_view(virtual, dtype, style), models.as_view(physical, dtype, style)
        if op == "bind":
            assert page_table.bind(ids, others, v2p, p2v, signal=signal) is None
            for v, p in zip(virtual, physical, strict=True):
                model.bind(v, p)
        elif op == "bind_range":
            virtual = virtual[: model.num_physical - 1]
            first = data.draw(st.integers(1, max(model.num_physical - len(virtual), 1)))
            out = page_table.bind_range(ids[: len(virtual)], first, v2p, p2v, signal=signal)
            assert out.dtype == np.int64
            assert out.tolist() == [first + i if model.is_virtual(v) else -1 for i, v in enumerate(virtual)]
            for i, v in enumerate(virtual):
                model.bind(v, first + i)
        elif op == "unbind":
            out = page_table.unbind(ids, v2p, p2v, signal=signal)
            assert out.dtype == np.int64
            assert out.tolist() == [model.unbind(v) for v in virtual]
        elif op == "unbind_into":
            held, capacity = [5, 6], data.draw(st.integers(2, 9))
            pages = models.device_pages(capacity, held, taken=data.draw(st.integers(0, 20)))
            page_table.unbind_into(ids, v2p, p2v, pages, signal=signal)
            models.push(held, capacity, [p for p in map(model.unbind, virtual) if p > 0], model.counts)
            assert models.held_pages(pages) == held
        else:
            ends = data.draw(st.lists(models.page_ids(model.num_physical), min_size=len(physical), max_size=len(physical)))
            page_table.remap(others, models.as_view(ends, dtype), v2p, p2v, signal=signal)
            model.remap(list(zip(physical, ends, strict=True)))
        assert_tables(model, v2p, p2v)
    assert_counts(signal, model.counts)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("n", [0, 1, 2, 257])
def test_valid_batches_of_any_size(n, dtype):
    v2p, p2v = page_table.empty(n + 1, n + 1)
    order = np.random.default_rng(n).permutation(np.arange(1, n + 1))
    signal = Signal()
    page_table.bind(np.arange(1, n + 1, dtype=dtype), order.astype(dtype), v2p, p2v, signal=signal)
    assert v2p[1:-1].tolist() == order.tolist() and (p2v[order] == np.arange(1, n + 1)).all()
    out = np.full(n, models.POISON)
    assert page_table.unbind(np.arange(1, n + 1, dtype=dtype), v2p, p2v, out=out, signal=signal) is out
    assert out.tolist() == order.tolist()
    assert_tables(models.Tables(n + 1, n + 1), v2p, p2v)
    assert signal.counts() == {}


def test_duplicates_last_bind_stays_first_unbind_frees():
    v2p, p2v = page_table.empty(6, 6)
    signal = Signal()
    page_table.bind(np.array([1, 1, 2, 3, 3]), np.array([1, 2, 2, 4, 4]), v2p, p2v, signal=signal)
    assert v2p.tolist() == [0, -1, 2, 4, -1, -1, -1] and p2v.tolist() == [0, -1, 2, -1, 3, -1, -1]
    assert signal.counts() == {"rebound": 3}
    signal.reset()
    assert page_table.unbind(np.array([3, 2, 3, 2]), v2p, p2v, signal=signal).tolist() == [4, 2, -1, -1]
    assert signal.counts() == {"unbound": 2}


@examples
@given(st.data())
def test_remap_with_many_duplicates(data):
    """Few pages, all eligible, so that most batches repeat a source, a destination or both."""
    model = models.Tables(8, 12, {4: 1, 2: 2, 6: 3})
    pairs = data.draw(st.lists(st.tuples(st.integers(1, 3), st.integers(4, 6)), max_size=5))
    v2p, p2v = model.arrays()
    signal = Signal()
    page_table.remap(np.array([s for s, _ in pairs], np.int32), np.array([d for _, d in pairs], np.int32), v2p, p2v, signal=signal)
    model.remap(pairs)
    assert_tables(model, v2p, p2v)
    assert_counts(signal, model.counts)


def test_remap_duplicates_and_pairs_that_would_feed_each_other():
    model = models.Tables(9, 9, {1: 1, 2: 2, 3: 3})
    v2p, p2v = model.arrays()
    signal = Signal()
    # 1 -> 5 moves; 1 -> 6 is a second source; 2 -> 5 finds it filled but 2 -> 7 may still go; 3 -> 1 was bound at the call
    page_table.remap(np.array([1, 1, 2, 2, 3]), np.array([5, 6, 5, 7, 1]), v2p, p2v, signal=signal)
    assert v2p.tolist() == [0, 5, 7, 3, -1, -1, -1, -1, -1, -1]
    assert p2v.tolist() == [0, -1, -1, 3, -1, 1, -1, 2, -1, -1]
    assert signal.counts() == {"unbound": 1, "occupied": 2}


@pytest.mark.parametrize("stale", [2, 9, 10**12, 0, -5])
def test_a_stale_entry_frees_only_itself(stale):
    """v2p names a page that belongs to another, or none at all: only a pair that agrees on both sides is live."""
    v2p, p2v = models.Tables(5, 5, {3: 2}).arrays()
    v2p[1] = stale
    signal = Signal()
    pages = models.device_pages(4)
    page_table.unbind_into(np.array([1]), v2p, p2v, pages, signal=signal)
    assert models.held_pages(pages) == [] and signal.counts() == {"unbound": 1}
    assert_tables(models.Tables(5, 5, {3: 2}), v2p, p2v)


@pytest.mark.parametrize("pair", [(1, 4), (4, 4)])
def test_binding_over_a_stale_entry_leaves_its_page_with_the_owner(pair):
    v2p, p2v = models.Tables(6, 6, {3: 2}).arrays()
    v2p[1], p2v[4] = 2, 3  # neither points back
    signal = Signal()
    page_table.bind(np.array(pair[:1]), np.array(pair[1:]), v2p, p2v, signal=signal)
    assert v2p[3] == 2 and p2v[2] == 3
    assert v2p[pair[0]] == pair[1] and p2v[pair[1]] == pair[0]
    assert signal.counts() == {"rebound": 1}


@examples
@given(st.data())
def test_translate(data):
    model, page_size = data.draw(models.tables()), data.draw(models.page_sizes)
    size = data.draw(st.integers(1, 3))
    rank = data.draw(st.integers(0, size - 1))
    height, width = data.draw(st.integers(0, 3)), data.draw(st.sampled_from([0, 1, 2, 5]))
    virtual = models.token_ids(model.num_virtual, page_size)
    positions = virtual if size == 1 else st.builds(lambda t, r: t * size + r, virtual, st.integers(0, size - 1))
    ids = data.draw(st.lists(st.lists(positions, min_size=width, max_size=width), min_size=height, max_size=height))
    array = models.as_view(np.reshape(ids, (height, width)), data.draw(models.id_dtypes), data.draw(models.view_styles))
    counts = models.Counter()

    def expected(t):
        return model.token(t // size, page_size, counts) if t >= 0 and t % size == rank else 0

    v2p, _ = model.arrays()
    signal = Signal()
    want = [[expected(t) for t in row] for row in ids]
    out_width = data.draw(st.sampled_from([None, width, width + 3]))
    got = page_table.translate(array, v2p, page_size, out_width=out_width, dcp=(size, rank), signal=signal)
    assert got.dtype == np.int64
    assert got.tolist() == [row + [0] * (got.shape[1] - width) for row in want]
    assert got.shape == (height, out_width or width)
    assert_counts(signal, counts)
    if height:
        assert page_table.translate(array[0], v2p, page_size, dcp=(size, rank)).tolist() == want[0]


def test_translate_into_strided_views_and_in_place():
    v2p, _ = models.Tables(5, 9, {1: 8, 2: 3}).arrays()
    ids = np.array([[4, 5, 9], [-1, 3, 19]])
    want = [[32, 33, 13], [0, 3, 0]]
    wide = np.full((2, 12), models.POISON)
    out = wide[:, 1:11:2]
    assert page_table.translate(ids, v2p, 4, out=out, out_width=4) is out
    assert out.tolist() == [[*row, 0, models.POISON] for row in want]
    assert (wide[:, ::2] == models.POISON).all()
    assert page_table.translate(ids, v2p, 4, out=ids) is ids
    assert ids.tolist() == want


def test_translate_keeps_64_bits_and_floors():
    v2p, _ = page_table.empty(4, 4)
    v2p[1] = 2**40
    assert page_table.translate(np.array([129, -1, -129], dtype=np.int32), v2p, 128).tolist() == [2**47 + 1, 0, 0]


def test_without_a_signal_bad_ids_are_skipped_all_the_same():
    v2p, p2v = page_table.empty(4, 4)
    bad = np.array([0, -1, 4, 5, 2**31 - 1, -(2**31)])
    page_table.bind(bad, np.ones_like(bad), v2p, p2v)
    page_table.bind(np.ones_like(bad), bad, v2p, p2v)
    page_table.remap(bad, bad, v2p, p2v)
    assert (page_table.unbind(bad, v2p, p2v) == -1).all()
    assert (page_table.translate(bad[1:], v2p, 1) == 0).all()
    assert_tables(models.Tables(4, 4), v2p, p2v)
