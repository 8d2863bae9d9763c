"""The page-table references against a dictionary: single ops on built ids, then any sequence of ops on the same tables.

Compared are both tables whole, the output, and the counts of the signal, so that a stray write anywhere fails.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

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
@given(models.picks)
def test_any_sequence_of_table_ops(pick):
    model = pick.tables()
    v2p, p2v = model.arrays()
    signal = Signal()
    for _ in range(4):
        dtype, n = pick([np.int32, np.int64]), pick.size(7)
        owned, unowned = list(model.owners()), [p for p in range(1, model.num_physical) if p not in model.owners()]
        unbound = [v for v in range(1, model.num_virtual) if v not in model.where]
        op = pick(["bind", "bind_range", "unbind", "unbind_into", "remap"])
        if op == "bind":
            virtual, physical = pick.pages(n, model.num_virtual, unbound), pick.pages(n, model.num_physical, unowned)
            assert page_table.bind(pick.view(virtual, dtype), pick.view(physical, dtype), v2p, p2v, signal=signal) is None
            for v, p in zip(virtual, physical, strict=True):
                model.bind(v, p)
        elif op == "bind_range":
            n = min(n, model.num_physical - 1)
            first = pick(range(1, max(model.num_physical - n, 1) + 1))
            virtual = pick.pages(n, model.num_virtual, unbound)
            out = page_table.bind_range(pick.view(virtual, dtype), first, v2p, p2v, signal=signal)
            assert out.dtype == np.int64
            assert out.tolist() == [first + i if model.is_virtual(v) else -1 for i, v in enumerate(virtual)]
            for i, v in enumerate(virtual):
                model.bind(v, first + i)
        elif op == "unbind":
            virtual = pick.pages(n, model.num_virtual, model.where)
            out = page_table.unbind(pick.view(virtual, dtype), v2p, p2v, signal=signal)
            assert out.dtype == np.int64
            assert out.tolist() == [model.unbind(v) for v in virtual]
        elif op == "unbind_into":
            virtual = pick.pages(n, model.num_virtual, model.where)
            held, capacity = [5, 6], pick(range(2, 10))
            pages = models.device_pages(capacity, held, taken=pick(range(20)))
            page_table.unbind_into(pick.view(virtual, dtype), v2p, p2v, pages, signal=signal)
            models.push(held, capacity, [p for p in map(model.unbind, virtual) if p > 0], model.counts)
            assert models.held_pages(pages) == held
        else:
            source, destination = pick.pages(n, model.num_physical, owned), pick.pages(n, model.num_physical, unowned)
            page_table.remap(pick.view(source, dtype), pick.view(destination, dtype), v2p, p2v, signal=signal)
            model.remap(list(zip(source, destination, strict=True)))
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
@given(models.picks)
def test_remap_with_many_duplicates(pick):
    """Few pages, all eligible, so that most batches repeat a source, a destination or both."""
    model = models.Tables(8, 12, {4: 1, 2: 2, 6: 3})
    pairs = [(pick([1, 2, 3]), pick([4, 5, 6])) for _ in range(pick.size(5))]
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
@given(models.picks, models.page_sizes)
def test_translate(pick, page_size):
    model, size = pick.tables(), pick([1, 1, 2, 3])
    rank = pick(range(size))
    height, width = pick.size(3), pick([0, 1, 2, 5])
    ids = [[t * size + pick(range(size)) for t in pick.tokens(width, model.num_virtual, page_size, model.where)] for _ in range(height)]
    array = pick.view(np.reshape(ids, (height, width)), axis=pick([0, 1]))
    counts = models.Counter()

    def expected(t):
        return model.token(t // size, page_size, counts) if t >= 0 and t % size == rank else 0

    v2p, _ = model.arrays()
    signal = Signal()
    want = [[expected(t) for t in row] for row in ids]
    out_width = pick([None, width, width + 3])
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
