"""Page-table kernels against their reference: the same call on device arrays and on NumPy copies, then every array compared.

Valid input must give equal tables and outputs. Bad input is mixed in at random: what is skipped, what is counted and what stays untouched must be
equal too; only which of several duplicates wins is open, so for those the tables are checked for being mutually inverse.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpukit import Signal
from gpukit.kernels import page_table
from gpukit.kernels.free_list import DevicePages

IDS = ("int32", "int64")
PAGE_SIZES = (1, 3, 16, 64, 128)


def random_tables(rng: np.random.Generator, pages: int, share: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Tables with a random share of the pages bound."""
    v2p, p2v = page_table.empty(pages + 1, pages + 3)
    bound = int(pages * share)
    virtual = rng.permutation(pages)[:bound] + 1
    physical = rng.permutation(pages + 2)[:bound] + 1
    v2p[virtual], p2v[physical] = physical, virtual
    return v2p, p2v


def spoiled(rng: np.random.Generator, ids: np.ndarray, rows: int) -> np.ndarray:
    """The ids with about a fifth replaced by ids that no table has."""
    bad = rng.choice([-1, 0, -(2**31), rows - 1, rows, rows + 5, 2**31 - 1], len(ids))
    return np.where(rng.random(len(ids)) < 0.2, bad, ids)


def assert_inverse(v2p: np.ndarray, p2v: np.ndarray) -> None:
    """Row 0 and the sentinel are as ever, and every bound pair points at each other."""
    for table in (v2p, p2v):
        assert table[0] == 0 and table[-1] == -1
        assert ((table == -1) | (table >= 0)).all()
    bound = np.flatnonzero(v2p[1:-1] > 0) + 1
    assert (p2v[v2p[bound]] == bound).all()
    assert np.count_nonzero(v2p[1:-1] > 0) == np.count_nonzero(p2v[1:-1] > 0)


class Pair:
    """The same arrays on the host and on the device, with a signal each."""

    def __init__(self, device: Any, *arrays: np.ndarray):
        self._device = device
        self.host = arrays
        self.there = tuple(device.array(array) for array in arrays)
        self.signals = Signal(), Signal(like=self.there[0])

    def assert_equal(self) -> None:
        for there, here in zip(self.there, self.host, strict=True):
            np.testing.assert_array_equal(self._device.host(there), here)
        assert self.signals[1].counts() == self.signals[0].counts()


@pytest.mark.parametrize("dtype", IDS)
@pytest.mark.parametrize("bad", [False, True])
def test_bind_equals_the_reference(device: Any, size: int, dtype: str, bad: bool) -> None:
    rng = np.random.default_rng(size)
    v2p, p2v = page_table.empty(size + 1, size + 3)
    virtual, physical = rng.permutation(size) + 1, rng.permutation(size + 2)[:size] + 1
    if bad:
        virtual, physical = spoiled(rng, virtual, len(v2p)), spoiled(rng, physical, len(p2v))
    pair = Pair(device, v2p, p2v, virtual.astype(dtype), physical.astype(dtype))
    for (a, b, v, p), signal in zip((pair.host, pair.there), pair.signals, strict=True):
        page_table.bind(v, p, a, b, signal=signal)
    pair.assert_equal()


@pytest.mark.parametrize("dtype", IDS)
@pytest.mark.parametrize("distinct", [2, 5, 40])
def test_bind_of_duplicates_leaves_inverse_tables(device: Any, distinct: int, dtype: str) -> None:
    rng = np.random.default_rng(distinct)
    pairs = 300 if device.simulated else 20_000
    v2p, p2v = random_tables(rng, distinct)
    before = v2p.copy()
    virtual = (rng.integers(0, distinct, pairs) + 1).astype(dtype)
    physical = (rng.integers(0, distinct + 2, pairs) + 1).astype(dtype)
    tables = device.array(v2p), device.array(p2v)
    signal = Signal(like=tables[0])
    page_table.bind(device.array(virtual), device.array(physical), *tables, signal=signal)
    v2p, p2v = device.host(tables[0]), device.host(tables[1])
    assert_inverse(v2p, p2v)
    given = {*zip(virtual.tolist(), physical.tolist(), strict=True), *enumerate(before.tolist())}
    assert all(pair in given for pair in enumerate(v2p.tolist()) if pair[1] > 0)
    assert 0 < signal.counts()["rebound"] <= pairs


@pytest.mark.parametrize("dtype", IDS)
@pytest.mark.parametrize("repeated", ["virtual", "physical"])
def test_of_pairs_that_share_a_page_exactly_one_stays(device: Any, repeated: str, dtype: str) -> None:
    pairs = 40 if device.simulated else 5_000
    same, distinct = np.full(pairs, 2).astype(dtype), np.arange(1, pairs + 1).astype(dtype)
    tables = tuple(device.array(table) for table in page_table.empty(pairs + 1))
    signal = Signal(like=tables[0])
    virtual, physical = (same, distinct) if repeated == "virtual" else (distinct, same)
    page_table.bind(device.array(virtual), device.array(physical), *tables, signal=signal)
    v2p, p2v = (device.host(table) for table in tables)
    assert_inverse(v2p, p2v)
    assert np.count_nonzero(v2p > 0) == 1
    assert signal.counts() == {"rebound": pairs - 1}


@pytest.mark.parametrize("dtype", IDS)
def test_binding_bound_pages_again_overwrites(device: Any, size: int, dtype: str) -> None:
    rng = np.random.default_rng(size)
    v2p, p2v = random_tables(rng, max(size, 1), 1.0)
    fresh = (rng.permutation(size) + 1).astype(dtype), (rng.permutation(size + 2)[:size] + 1).astype(dtype)
    tables = device.array(v2p), device.array(p2v)
    signal = Signal(like=tables[0])
    page_table.bind(device.array(fresh[0]), device.array(fresh[1]), *tables, signal=signal)
    v2p, p2v = device.host(tables[0]), device.host(tables[1])
    assert_inverse(v2p, p2v)
    # Virtual and physical ids are each distinct, so every pair must stand.
    np.testing.assert_array_equal(v2p[fresh[0]], fresh[1])
    # A pair may find both its pages already freed by the pairs before it.
    assert bool(size) <= signal.counts().get("rebound", 0) <= size


@pytest.mark.parametrize("garbage", [-2, -3, -(2**40), 30, 2**40])
@pytest.mark.parametrize("side", [0, 1])
def test_bind_survives_tables_that_hold_anything(device: Any, side: int, garbage: int) -> None:
    tables = page_table.empty(9, 5)
    tables[side][3] = garbage
    pair = Pair(device, *tables, np.array([3, 2, 4]), np.array([3, 1, 2]))
    for (a, b, v, p), signal in zip((pair.host, pair.there), pair.signals, strict=True):
        page_table.bind(v, p, a, b, signal=signal)
    pair.assert_equal()
    assert pair.signals[0].counts() == {"rebound": 1}


@pytest.mark.parametrize("dtype", IDS)
@pytest.mark.parametrize("bad", [False, True])
def test_bind_range_equals_the_reference(device: Any, size: int, dtype: str, bad: bool) -> None:
    rng = np.random.default_rng(size)
    v2p, p2v = page_table.empty(size + 1, size + 4)
    virtual = rng.permutation(size) + 1
    virtual = spoiled(rng, virtual, len(v2p)) if bad else virtual
    pair = Pair(device, v2p, p2v, virtual.astype(dtype), np.full(size, 77, np.int64))
    for (a, b, v, out), signal in zip((pair.host, pair.there), pair.signals, strict=True):
        assert page_table.bind_range(v, 3, a, b, out=out, signal=signal) is out
    pair.assert_equal()


@pytest.mark.parametrize("dtype", IDS)
@pytest.mark.parametrize("bad", [False, True])
def test_unbind_equals_the_reference(device: Any, size: int, dtype: str, bad: bool) -> None:
    rng = np.random.default_rng(size)
    v2p, p2v = random_tables(rng, size)
    virtual = rng.permutation(size) + 1
    virtual = spoiled(rng, virtual, len(v2p)) if bad else virtual
    pair = Pair(device, v2p, p2v, virtual.astype(dtype), np.full(size, 77, np.int64))
    for (a, b, v, out), signal in zip((pair.host, pair.there), pair.signals, strict=True):
        page_table.unbind(v, a, b, out=out, signal=signal)
    pair.assert_equal()


def test_unbind_frees_each_of_equal_ids_once(device: Any) -> None:
    v2p, p2v = random_tables(np.random.default_rng(0), 9, 1.0)
    ids = np.tile(np.arange(1, 10), 40)
    tables = device.array(v2p), device.array(p2v)
    signal = Signal(like=tables[0])
    out = device.host(page_table.unbind(device.array(ids), *tables, signal=signal))
    assert sorted(out[out > 0]) == sorted(v2p[1:-1])
    assert (device.host(tables[0])[1:] == -1).all() and (device.host(tables[1])[1:] == -1).all()
    assert signal.counts() == {"unbound": len(ids) - 9}


def test_unbind_leaves_a_page_that_belongs_to_another_id(device: Any) -> None:
    v2p, p2v = page_table.empty(4)
    v2p[[1, 2]], p2v[3] = 3, 2  # id 1 is stale: page 3 is id 2's by now
    pair = Pair(device, v2p, p2v, np.array([1]), np.zeros(1, np.int64))
    for (a, b, v, out), signal in zip((pair.host, pair.there), pair.signals, strict=True):
        page_table.unbind(v, a, b, out=out, signal=signal)
    pair.assert_equal()
    assert pair.host[0].tolist() == [0, -1, 3, -1, -1] and pair.host[3].tolist() == [-1]


@pytest.mark.parametrize("dtype", IDS)
@pytest.mark.parametrize("bad", [False, True])
def test_unbind_into_appends_live_pages_in_input_order(device: Any, size: int, dtype: str, bad: bool) -> None:
    rng = np.random.default_rng(size)
    v2p, p2v = random_tables(rng, size)
    virtual = rng.permutation(size) + 1
    virtual = spoiled(rng, virtual, len(v2p)) if bad else virtual
    pair = Pair(device, v2p, p2v, virtual.astype(dtype))
    lists = DevicePages(size + 5), DevicePages(size + 5, like=pair.there[0])
    for (a, b, v), pages, signal in zip((pair.host, pair.there), lists, pair.signals, strict=True):
        # A head and a tail that are not zero, and a second call that finds nothing live.
        pages.fill(v[:0])
        page_table.unbind_into(v, a, b, pages, signal=signal)
        page_table.unbind_into(v, a, b, pages, signal=signal)
    pair.assert_equal()
    for here, there in ((lists[0].ring, lists[1].ring), (lists[0].counters, lists[1].counters)):
        np.testing.assert_array_equal(device.host(there), here)
    assert not device.host(lists[1].workspace).any()


def test_a_ring_wraps_around_and_drops_what_does_not_fit(device: Any) -> None:
    v2p, p2v = page_table.empty(8)
    v2p[1:8], p2v[1:8] = np.arange(1, 8), np.arange(1, 8)
    pair = Pair(device, v2p, p2v, np.arange(1, 8))
    lists = DevicePages(5), DevicePages(5, like=pair.there[0])
    for (a, b, v), pages, signal in zip((pair.host, pair.there), lists, pair.signals, strict=True):
        pages.fill(v[:4])
        pages.take(3)
        page_table.unbind_into(v, a, b, pages, signal=signal)
    pair.assert_equal()
    assert pair.signals[0].counts() == {"exhausted": 3}
    np.testing.assert_array_equal(device.host(lists[1].ring), lists[0].ring)
    np.testing.assert_array_equal(device.host(lists[1].counters), [3, 8])


@pytest.mark.parametrize("dtype", IDS)
@pytest.mark.parametrize("bad", [False, True])
def test_remap_equals_the_reference(device: Any, size: int, dtype: str, bad: bool) -> None:
    rng = np.random.default_rng(size)
    v2p, p2v = random_tables(rng, 2 * size)
    owned, free = np.flatnonzero(p2v[1:-1] > 0) + 1, np.flatnonzero(p2v[1:-1] < 0) + 1
    source, destination = rng.permutation(owned)[: size // 2], rng.permutation(free)[: size // 2]
    if bad:
        # Owned destinations and unowned sources among them; source and destination ids stay distinct.
        source, destination = rng.permutation(len(p2v) - 2)[: 2 * (size // 2)].reshape(2, -1) + 1
        source = spoiled(rng, source, len(p2v))
    pair = Pair(device, v2p, p2v, source.astype(dtype), destination.astype(dtype))
    for (a, b, s, d), signal in zip((pair.host, pair.there), pair.signals, strict=True):
        page_table.remap(s, d, a, b, signal=signal)
    pair.assert_equal()
    assert_inverse(pair.host[0], pair.host[1])


def test_remap_of_anything_keeps_the_tables_inverse(device: Any) -> None:
    rng = np.random.default_rng(3)
    for _ in range(6):
        v2p, p2v = random_tables(rng, 12)
        tables = device.array(v2p), device.array(p2v)
        source, destination = rng.integers(-1, 17, (2, 200))
        page_table.remap(device.array(source), device.array(destination), *tables)
        after = device.host(tables[0]), device.host(tables[1])
        assert_inverse(*after)
        np.testing.assert_array_equal(after[0] > 0, v2p > 0)


@pytest.mark.parametrize("dtype", IDS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_translate_equals_the_reference(device: Any, size: int, dtype: str, page_size: int) -> None:
    rng = np.random.default_rng(size)
    v2p, p2v = random_tables(rng, max(size // page_size, 3), 0.8)
    ids = rng.integers(-3, len(v2p) * page_size + 40, size).astype(dtype)
    pair = Pair(device, v2p, ids, np.full(size + 9, 77, np.int64))
    for (table, tokens, out), signal in zip((pair.host, pair.there), pair.signals, strict=True):
        page_table.translate(tokens, table, page_size, out=out, out_width=size + 4, signal=signal)
    pair.assert_equal()


@pytest.mark.parametrize("dtype", IDS)
def test_translate_of_strided_matrices(device: Any, dtype: str) -> None:
    rng = np.random.default_rng(5)
    v2p, _ = random_tables(rng, 30, 0.8)
    ids, out = rng.integers(-3, 120, (6, 20)).astype(dtype), np.full((6, 40), 77, np.int64)
    pair = Pair(device, v2p, ids, out)
    for table, tokens, target in (pair.host, pair.there):
        page_table.translate(tokens[:, 3:13:2], table, 4, out=target[:, 1::3], out_width=9)
        page_table.translate(tokens[1:5], table, 4, out=target[1:5, 20:], dcp=(3, 1))
        page_table.translate(tokens[::2, ::-1], table, 4)
    pair.assert_equal()


def test_translate_in_place_and_for_a_rank(device: Any) -> None:
    rng = np.random.default_rng(6)
    v2p, _ = random_tables(rng, 30, 0.8)
    pair = Pair(device, v2p, rng.integers(-3, 250, 200))
    for (table, ids), signal in zip((pair.host, pair.there), pair.signals, strict=True):
        page_table.translate(ids[:150], table, 8, out=ids, out_width=180, dcp=(2, 1), signal=signal)
    pair.assert_equal()


def test_ids_past_32_bits(device: Any) -> None:
    v2p, _ = page_table.empty(4)
    v2p[3] = 2**40
    pair = Pair(device, v2p, np.array([3 * 2**20 + 5, 2**62, -(2**62)]), np.zeros(3, np.int64))
    for table, ids, out in (pair.host, pair.there):
        page_table.translate(ids, table, 2**20, out=out)
    pair.assert_equal()
    assert pair.host[2].tolist() == [2**60 + 5, 0, 0]


@pytest.mark.parametrize("offset", [0, 1])
def test_views_of_a_free_list_bind_alike(device: Any, offset: int) -> None:
    v2p, p2v = page_table.empty(10)
    pair = Pair(device, v2p, p2v, np.arange(1, 10))
    for a, b, ids in (pair.host, pair.there):
        page_table.bind(ids[offset : offset + 4], ids[5:9], a, b)
    pair.assert_equal()
