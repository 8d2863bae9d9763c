"""What the pool promises beside its state machine: bytes, capacity queries and their cost, launches, ladders, layouts, pictures."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpukit import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels import page_copy, page_table, sliding_window
from gpukit.kernels.free_list import DevicePages
from gpukit.memory import Entry, Part, PoolLayout, SubPool, UnifiedPool, full_and_state, full_and_swa, full_swa_and_state
from tests.helpers.pool_machine import Event

PLAIN = Entry((Part("k", (8,), "float32"),))
FUSED = Entry(
    (
        Part("k", (2, 12), "bfloat16", layers=3),
        Part("v", (2, 7), "bfloat16", layers=3),
        Part("draft k", (1, 10), "bfloat16", draft=True),
        Part("draft v", (1, 3), "bfloat16", draft=True),
    )
)
STATE = Entry(
    (Part("state", (2, 4, 4), "float32", layers=2), Part("conv", (3, 8), "bfloat16", layers=2), Part("draft state", (5,), "float32", draft=True))
)


def fused_pool() -> UnifiedPool:
    return full_swa_and_state(1 << 17, FUSED, FUSED, STATE, page_size=4)


def tokens_of(pool: UnifiedPool, name: str, ids: np.ndarray) -> np.ndarray:
    band = pool.band(name)
    return page_table.translate((ids[:, None] * band.page_size + np.arange(band.page_size)).reshape(-1), band.v2p, band.page_size)


def fill(pool: UnifiedPool, name: str, ids: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Write random rows into every part of some pages; returns what was written."""
    slots, written = tokens_of(pool, name, ids), {}
    for part in pool.band(name).spec.entry.parts:
        view = pool.view(name, part.name)
        values = rng.integers(0, 1 << 15, view[:, slots].shape).astype(view.dtype)
        view[:, slots] = values
        written[part.name] = values
    return written


def assert_holds(pool: UnifiedPool, name: str, ids: np.ndarray, written: dict[str, np.ndarray], keep: slice = slice(None)) -> None:
    slots, size = tokens_of(pool, name, ids), pool.band(name).page_size
    for part, values in written.items():
        kept = values.reshape(values.shape[0], -1, size, *values.shape[2:])[:, keep]
        np.testing.assert_array_equal(pool.view(name, part)[:, slots], kept.reshape(values.shape[0], -1, *values.shape[2:]), err_msg=part)


def test_rows_of_different_widths_and_draft_rows_are_carried_by_moves() -> None:
    """Stored, moved by compaction and by make_room, and read back exactly, in every sub-pool."""
    rng, pool = np.random.default_rng(0), fused_pool()
    found = pool.alloc_joint({"full": 12, "swa": 12, "state": 12})
    assert found is not None
    written = {name: fill(pool, name, ids, rng) for name, ids in found.items()}
    pool.free("full", found["full"][4:7])
    pool.free("state", found["state"][4:7])
    keep = [*range(4), *range(7, 12)]
    for name in found:
        assert pool.compact(name) > 0
    before = pool.band("swa").low
    assert pool.make_room("swa", 1 << 16, 1 << 17) and pool.band("swa").low != before
    for name, ids in found.items():
        assert_holds(pool, name, ids[keep], written[name], keep)
    assert pool.check() == []


def test_a_draft_only_clear_leaves_the_host_part_untouched() -> None:
    rng, pool = np.random.default_rng(1), fused_pool()
    found = pool.alloc_joint({"full": 4, "swa": 4, "state": 4})
    assert found is not None
    for name, ids in found.items():
        written = fill(pool, name, ids, rng)
        pool.clear(name, ids[1:3], draft_only=True)
        for part in written:
            if part.startswith("draft"):
                size = pool.band(name).page_size
                written[part][:, size : 3 * size] = 0
        assert_holds(pool, name, ids, written)
        pool.clear(name, ids[:1])
        assert all((pool.view(name, part)[:, tokens_of(pool, name, ids[:1])] == 0).all() for part in written)
        assert_holds(pool, name, ids[1:], written, slice(1, None))


def test_store_kv_writes_through_the_views() -> None:
    """The op that a decode step's locations are for: K and V rows of different widths, at the physical tokens."""
    pool = fused_pool()
    ids = pool.alloc("full", 2)
    slots = tokens_of(pool, "full", ids)
    keys, values = pool.view("full", "k")[1], pool.view("full", "v")[1]
    k, v = np.arange(8 * 24, dtype=np.uint16).reshape(8, 2, 12), np.arange(8 * 14, dtype=np.uint16).reshape(8, 2, 7)
    page_copy.store_kv(k, v, slots, keys, values)
    np.testing.assert_array_equal(keys[slots], k)
    np.testing.assert_array_equal(values[slots], v)
    assert (pool.view("full", "k")[[0, 2]] == 0).all()


def test_views_begin_at_byte_0_with_the_entry_as_stride() -> None:
    pool = fused_pool()
    state = pool.view("state", "state")
    assert state.shape == (2, pool.layout.num_physical("state"), 2, 4, 4) and state.strides[:2] == (128, STATE.bytes)
    assert state.ctypes.data == pool.buffer.ctypes.data and not state.flags.c_contiguous and state[0, 0].flags.c_contiguous
    with pytest.raises(ArgumentError, match="^part: expected one of"):
        pool.view("state", "v")


# Capacity


def test_a_query_takes_one_snapshot_and_none_when_remembered() -> None:
    pool = fused_pool()
    for query in ("full", {"full": 4, "swa": 4}, {"full": 4, "swa": 2, "state": 1}):
        for ask in (pool.available, pool.schedulable):
            before = pool.chain.snapshots
            answers = {ask(query) for _ in range(3)}
            assert pool.chain.snapshots == before + 1 and len(answers) == 1
    pool.alloc("full", 1)
    before = pool.chain.snapshots
    pool.available("full")
    assert pool.chain.snapshots == before + 1


def test_fits_is_what_an_allocation_does() -> None:
    pool = full_and_swa(33 * 128, PLAIN, PLAIN, page_size=4)
    ids = pool.alloc("full", 20)
    pool.free("full", ids[10:])
    for count in (11, 12, 13, 22, 23):
        for relieve in (False, True):
            other = full_and_swa(33 * 128, PLAIN, PLAIN, page_size=4)
            other.free("full", other.alloc("full", 20)[10:])
            assert pool.fits({"full": count, "swa": 0}, relieve=relieve) == (other.alloc("full", count, relieve=relieve) is not None)


def test_every_capacity_field_changes_the_epoch() -> None:
    band = fused_pool().band("swa")
    for name in ("low", "high", "hole_count", "pending_count", "id_count"):
        before = band.epoch.value
        setattr(band, name, getattr(band, name))
        assert band.epoch.value == before + 1


def test_queries_refuse_what_is_no_band() -> None:
    pool = fused_pool()
    for query in ("no", {"no": 1}):
        with pytest.raises(ArgumentError, match="^name: expected one of state, swa, full, got 'no'"):
            pool.available(query)
    with pytest.raises(ArgumentError, match="^wanted\\['full'\\]: expected at least 1"):
        pool.available({"full": 0})
    with pytest.raises(ArgumentError, match="^wanted: expected at least one sub-pool"):
        pool.schedulable({})
    for ask in (pool.available, pool.schedulable):
        for query in (None, 3, ["full"]):
            with pytest.raises(ArgumentTypeError, match="^wanted: expected a sub-pool or a mapping"):
                ask(query)
        with pytest.raises(ArgumentTypeError, match="^wanted\\['full'\\]: expected an integer, got list"):
            ask({"full": [1]})
    with pytest.raises(ArgumentTypeError, match="^n: expected an integer, got float"):
        pool.alloc("full", 1.5)  # type: ignore[arg-type]
    for name in (None, ["full"]):
        with pytest.raises(ArgumentError, match="^name: expected one of"):
            pool.band(name)  # type: ignore[arg-type]


def test_a_query_is_remembered_as_it_was_asked_until_something_changes() -> None:
    pool = fused_pool()
    for ask in (pool.available, pool.schedulable):
        query = {"full": 1, "swa": 2}
        first, alone, snapshots = ask(query), ask("full"), pool.chain.snapshots
        assert (ask(query), ask("full"), ask(dict(query)), pool.chain.snapshots) == (first, alone, first, snapshots)
        # The caller's mapping is not what is remembered.
        query["swa"] = 1
        assert ask(query) == ask({"full": 1, "swa": 1}) and ask({"full": 1, "swa": 2}) == first
        for wrong in ({"full": np.ones(2), "swa": np.ones(2)}, np.ones(2), None):
            with pytest.raises(ArgumentTypeError, match="^wanted"):
                ask(wrong)
    assert pool.alloc("full", 1) is not None
    assert pool.available("full") < alone


@pytest.mark.parametrize(
    ("error", "message", "counts"),
    [
        (ArgumentError, "counts\\['full'\\]: expected at least 0, got -1", {"full": -1}),
        (ArgumentTypeError, "counts\\['full'\\]: expected an integer, got float", {"full": 2.5}),
        (ArgumentTypeError, "counts\\['full'\\]: expected an integer, got bool", {"full": True}),
        (ArgumentError, "counts\\['swa'\\]: expected at most the 1 new ids of full, got 2", {"full": 1, "swa": 2}),
        (ArgumentError, "counts\\['swa'\\]: expected a count of full, whose new ids it binds", {"swa": 1}),
        (ArgumentError, "counts\\['swa'\\]: expected a count of full, whose new ids it binds", {"swa": 0}),
        (ArgumentError, "name: expected one of state, swa, full, got 'no'", {"no": 1}),
        (ArgumentTypeError, "counts: expected a mapping", 5),
        (ArgumentTypeError, "counts: expected a mapping", None),
    ],
)
def test_fits_refuses_what_an_allocation_refuses(error: type[Exception], message: str, counts: Any) -> None:
    pool = fused_pool()
    for ask in (pool.alloc_joint, pool.fits):
        for relieve in (False, True):
            with pytest.raises(error, match=f"^{message}"):
                ask(counts, relieve=relieve)
    assert pool.check() == [] and pool.band("full").live == 0


# Launches


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each op is called: on a device each call is a launch."""
    from gpukit.kernels import free_list, state_slots
    from gpukit.kernels.reference import free_list as reference

    counts: Counter[str] = Counter()
    for module in (page_table, sliding_window, page_copy, state_slots):
        for name in module.__all__:
            if callable(getattr(module, name)) and name not in ("empty", "frontier"):
                op = getattr(module, name)
                monkeypatch.setattr(module, name, lambda *args, name=name, op=op, **kwargs: (counts.update([name]), op(*args, **kwargs))[1])
    for name in ("_append", "_take"):
        op = getattr(free_list, name)
        monkeypatch.setattr(free_list, name, lambda *args, name=name, op=op, **kwargs: (counts.update([name]), op(*args, **kwargs))[1])
    assert reference
    return counts


@pytest.mark.parametrize("pages", [1, 7, 100])
def test_frees_and_retirement_are_one_launch_each(launches: Counter[str], pages: int) -> None:
    pool = full_swa_and_state(1 << 17, PLAIN, PLAIN, PLAIN, page_size=4)
    ids = pool.alloc_joint({"full": pages + 30, "swa": pages + 30})["full"]
    row = (ids[:, None] * 4 + np.arange(4)).reshape(-1)
    requests = np.array([row[: 4 * pages], row[4 * 30 :]])
    launches.clear()
    pool.retire("swa", requests, [0, 0], [4 * pages, 0])
    assert launches == {"retire": 1}
    pool.unbind("swa", ids[pages:])
    assert launches == {"retire": 1, "unbind_into": 1}
    launches.clear()
    pool.free_segment("full", row[: 4 * pages], 0)
    pool.free("full", ids[pages : pages + 20])
    assert launches == {"free_segment": 2}
    launches.clear()
    with pool.free_group():
        for page in range(pages + 20, pages + 30):
            pool.free("full", ids[page : page + 1])
        assert not launches
    assert launches == {"free_segment": 1} and pool.band("full").live == 0


def test_an_allocation_is_a_few_launches_and_detection_off_adds_none(launches: Counter[str]) -> None:
    pool = full_and_swa(1 << 15, PLAIN, PLAIN, page_size=4)
    launches.clear()
    ids = pool.alloc_joint({"full": 9, "swa": 9})["full"]
    assert launches == {"_take": 1, "bind_range": 2}
    pool.free("full", ids[:5])
    launches.clear()
    pool.alloc("full", 9)
    assert launches == {"_take": 2, "bind": 1, "bind_range": 1}
    launches.clear()
    pool.available({"full": 1, "swa": 1}), pool.schedulable("full"), pool.alloc("full", 10**6), pool.refresh()
    assert not launches
    pool.free("full", ids[5:6])
    assert launches == {"free_segment": 1}


def test_a_compaction_is_one_copy_and_one_remap(launches: Counter[str]) -> None:
    pool = full_and_swa(1 << 15, PLAIN, PLAIN, page_size=4)
    ids = pool.alloc("full", 40)
    pool.free("full", ids[20:30])
    launches.clear()
    assert pool.compact("full") == 10
    assert launches == {"_take": 1, "move_pages": 1, "remap": 1}
    launches.clear()
    assert pool.flush("full") == 0 and not launches


# Making room


def test_the_ladder_flushes_before_it_moves_and_asks_last(launches: Counter[str]) -> None:
    asked: list[dict[str, int]] = []
    pool = full_and_swa(33 * 128, PLAIN, PLAIN, page_size=4, reclaim=lambda counts: bool(asked.append(counts)))
    ids = pool.alloc_joint({"full": 16, "swa": 16})["full"]
    # FULL ascends from its outer edge, so the first ids lie there.
    pool.free("full", ids[:4])
    launches.clear()
    assert pool.bind("swa", pool.alloc("full", 0)) and pool.available("swa") == 4
    swa = pool.band("swa")
    pool.unbind("swa", ids[4:])
    assert pool.alloc_joint({"full": 8, "swa": 8}, relieve=True) is not None
    assert "move_pages" not in launches and not asked
    assert swa.live == 8
    assert pool.alloc("full", 40, relieve=True) is None and asked == [{"full": 40}]


def test_reclaim_frees_and_the_allocation_goes_on() -> None:
    kept: list[Any] = []

    def evict(counts: dict[str, int]) -> bool:
        if kept:
            pool.free("full", kept.pop())
            return True
        return False

    pool = full_and_swa(33 * 128, PLAIN, PLAIN, page_size=4, reclaim=evict)
    for _ in range(4):
        kept.append(pool.alloc("full", 6))
    assert pool.alloc("full", 20) is None and len(kept) == 4
    assert pool.alloc("full", 20, relieve=True) is not None and len(kept) == 2
    assert pool.alloc("full", 33, relieve=True) is None and not kept and pool.check() == []


@pytest.mark.parametrize("frees", [0, 2])
def test_a_reclaim_that_frees_nothing_is_not_asked_for_ever(frees: int) -> None:
    """Whatever it returns; while it frees something it is asked again."""
    asked: list[dict[str, int]] = []

    def boast(counts: dict[str, int]) -> bool:
        asked.append(counts)
        assert len(asked) < 20
        if len(asked) <= frees:
            pool.free("full", ids[len(asked) : len(asked) + 1])
        return True

    pool = full_and_swa(33 * 128, PLAIN, PLAIN, page_size=4, reclaim=boast)
    ids = pool.alloc("full", 20)
    assert pool.alloc("full", 30, relieve=True) is None and asked == [{"full": 30}] * (frees + 1)
    assert pool.band("full").live == 20 - frees and pool.check() == []


@pytest.mark.parametrize("how", ["gate", "event"])
def test_a_reclaim_that_opens_a_gate_or_awaits_an_event_is_asked_again(how: str) -> None:
    pool = full_and_swa(33 * 128, PLAIN, PLAIN, page_size=4)
    ids, event, asked = pool.alloc("full", 20), Event(), []
    pool.free("full", ids[15:])
    if how == "event":
        assert pool.compact("full", event=event) == 5
    else:
        pool.set_gate("full", lambda: event.fired)

    def reclaim(counts: dict[str, int]) -> bool:
        asked.append(counts)
        event.fired = True
        if len(asked) > 1:
            pool.free("full", ids[:5])
        return len(asked) < 3

    pool.reclaim = reclaim
    assert pool.alloc_joint({"full": 10, "swa": 10}, relieve=True) is not None
    assert len(asked) == 2 and pool.check() == []


def test_a_float_moves_as_a_whole_and_no_further_than_it_must() -> None:
    pool = full_swa_and_state(1 << 14, PLAIN, PLAIN, PLAIN, page_size=4)
    swa = pool.band("swa")
    pool.alloc_joint({"full": 4, "swa": 4})
    middle = swa.low
    assert 40 < middle < 80
    assert pool.make_room("swa", 0, 1 << 14) and swa.low == middle
    assert pool.make_room("swa", 100 * 128, 110 * 128) and swa.low == 100
    assert pool.make_room("swa", 10 * 128 - 1, 20 * 128 + 1) and swa.low == 16
    assert not pool.make_room("swa", 0, 4 * 128) and swa.low == 16
    pool.set_gate("swa", lambda: False)
    assert not pool.make_room("swa", 100 * 128, 110 * 128) and swa.low == 16
    with pytest.raises(ArgumentError, match="^name: expected a FLOAT, got full, an END"):
        pool.make_room("full", 0, 1)


def test_pages_that_a_graph_may_still_read_wait_for_its_event() -> None:
    pool = full_and_swa(33 * 128, PLAIN, PLAIN, page_size=4)
    ids = pool.alloc("full", 12)
    pool.free("full", ids[6:])
    event, full = Event(), pool.band("full")
    moved = pool.compact("full", event=event)
    assert moved == 6 == full.pending_count and full.live == 6
    old = full.pending_pages()
    assert (full.p2v[old] == -1).all() and pool.available("swa") == 20
    # Its pages are not handed out, and moving more is not counted on.
    fresh = pool.alloc("full", pool.available("full"))
    assert not set(full.v2p[fresh].tolist()) & set(old.tolist())
    pool.free("full", fresh)
    assert pool.schedulable("swa") == pool.available("swa")
    event.fired = True
    assert pool.schedulable("swa") == 26 and full.pending_count == 0
    assert pool.alloc("full", 0) is not None and pool.bind("swa", pool.alloc("full", 3), relieve=True)


def test_stock_extends_the_span_and_flush_takes_it_back() -> None:
    pool = full_and_swa(33 * 128, PLAIN, PLAIN, page_size=4)
    assert pool.stock("full", 5) and pool.band("full").hole_count == 5 and pool.available("swa") == 27
    assert pool.stock("full", 3) and pool.band("full").hole_count == 5
    assert not pool.stock("swa", 28) and pool.check() == []
    assert pool.flush("full") == 5 and pool.available("swa") == 32


# Layouts


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("part k: expected a dtype of", lambda: Part("k", (8,), "complex64")),
        ("part k: shape: expected a sequence, got int", lambda: Part("k", 128, "float32")),
        ("part k: shape: expected a sequence, got the text '128'", lambda: Part("k", "128", "float32")),
        ("part k: shape: expected an integer, got float", lambda: Part("k", (1.5,), "float32")),
        ("part k: dtype: expected text, got list", lambda: Part("k", (8,), ["float32"])),
        ("name: expected text, got tuple", lambda: Part((8,), "k", "float32")),
        ("parts: expected a sequence, got Part", lambda: Entry(Part("k", (8,), "float32"))),
        ("parts\\[1\\]: expected a Part, got Entry", lambda: Entry((Part("k", (8,), "float32"), PLAIN))),
        ("sub-pool a: entry: expected an Entry, got Part", lambda: SubPool("a", Part("k", (8,), "float32"), "up")),
        ("sub_pools: expected a sequence, got SubPool", lambda: PoolLayout(4096, SubPool("a", PLAIN, "up"))),
        ("sub_pools\\[0\\]: expected a SubPool, got Entry", lambda: PoolLayout(4096, [PLAIN, PLAIN])),
        ("full: expected an Entry, got Part", lambda: full_and_swa(4096, PLAIN.parts[0], PLAIN, page_size=1)),
        ("swa: expected an Entry, got tuple", lambda: full_and_swa(4096, PLAIN, PLAIN.parts, page_size=1)),
        ("state: expected an Entry, got Part", lambda: full_and_state(4096, PLAIN, PLAIN.parts[0], page_size=1)),
        ("swa: expected an Entry, got NoneType", lambda: full_swa_and_state(4096, PLAIN, None, PLAIN, page_size=1)),
        ("part k: layers: expected at least 1", lambda: Part("k", (8,), "float32", layers=0)),
        ("part k: expected an offset that is a multiple of 16, got 8", lambda: Part("k", (8,), "float32", offset=8)),
        ("part v: expected bytes apart from those of part k", lambda: Entry((Part("k", (8,), "float32"), Part("v", (8,), "float32", offset=16)))),
        ("parts: expected at least one, with distinct names", lambda: Entry((Part("k", (8,), "float32"), Part("k", (8,), "float32")))),
        ("sub_pools: expected one 'up'", lambda: PoolLayout(4096, [SubPool("a", PLAIN, "down"), SubPool("b", PLAIN, "up")])),
        ("sub_pools: expected one 'up'", lambda: PoolLayout(4096, [SubPool("a", PLAIN, "up")])),
        ("sub_pools: expected distinct names", lambda: PoolLayout(4096, [SubPool("a", PLAIN, "up"), SubPool("a", PLAIN, "down")])),
        ("sub-pool b: expected room for a page", lambda: PoolLayout(4096, [SubPool("a", PLAIN, "up"), SubPool("b", PLAIN, "down", 127)])),
        ("sub-pool a: expected an owner", lambda: PoolLayout(4096, [SubPool("a", PLAIN, "up", owner="c"), SubPool("b", PLAIN, "down")])),
        (
            "sub-pool a: expected its owner's page_size 2, got 1",
            lambda: PoolLayout(4096, [SubPool("a", PLAIN, "up", owner="b"), SubPool("b", PLAIN, "down", 2)]),
        ),
        (
            "sub-pool f: expected an owner that no other sub-pool has",
            lambda: PoolLayout(4096, [SubPool("a", PLAIN, "up", owner="b"), SubPool("f", PLAIN, "float", owner="b"), SubPool("b", PLAIN, "down")]),
        ),
        ("buffer: expected at least 4096 bytes", lambda: full_and_state(4096, PLAIN, PLAIN, page_size=1, buffer=np.zeros(100, np.uint8))),
        (
            "buffer: expected an address that is a multiple of 16, got 0x",
            lambda: full_and_state(4096, PLAIN, PLAIN, page_size=1, buffer=np.zeros(5000, np.uint8)[1:]),
        ),
        ("buffer: expected an array", lambda: full_and_state(4096, PLAIN, PLAIN, page_size=1, buffer=[1])),
        ("buffer: expected dtype uint8, got int64", lambda: full_and_state(4096, PLAIN, PLAIN, page_size=1, buffer=np.zeros(5000, np.int64))),
        ("like: expected an array", lambda: full_and_state(4096, PLAIN, PLAIN, page_size=1, like=[1])),
        ("signal: expected a gpukit.Signal or None, got int", lambda: full_and_state(4096, PLAIN, PLAIN, page_size=1, signal=5)),
        ("reclaim: expected a callable or None, got int", lambda: full_and_state(4096, PLAIN, PLAIN, page_size=1, reclaim=5)),
        ("layout: expected a PoolLayout, got int", lambda: UnifiedPool(4096)),
    ],
)
def test_layouts_are_validated(message: str, make: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        make()


def test_lists_are_the_same_as_tuples() -> None:
    assert Entry([Part("k", [8], "float32")]) == PLAIN and hash(Part("k", [8], "float32")) == hash(PLAIN.parts[0])


def test_an_entry_is_rounded_and_its_parts_aligned() -> None:
    assert FUSED.offsets == (0, 144, 240, 272) and FUSED.bytes == 288
    assert all(offset % 16 == 0 for offset in STATE.offsets) and STATE.bytes % 32 == 0
    layout = PoolLayout(100_000, [SubPool("state", STATE, "up"), SubPool("full", FUSED, "down", 4)])
    assert layout.floor_bytes == 4 * 288 and layout.first_page("full") == 1 and layout.first_page("state") == -(-1152 // STATE.bytes)
    assert layout.describe()["full"]["page_bytes"] == 1152


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("name: expected a sub-pool that mints ids, got swa, whose ids are full's", lambda pool: pool.free("swa", np.array([1]))),
        ("name: expected a sub-pool with an owner, got full", lambda pool: pool.unbind("full", np.array([1]))),
        ("name: expected a sub-pool with an owner, got full", lambda pool: pool.bind("full", np.array([1]))),
        ("n: expected at least 0", lambda pool: pool.alloc("full", -1)),
        ("name: expected a sub-pool that mints ids, got swa", lambda pool: pool.alloc("swa", 1)),
        ("name: expected a sub-pool that mints ids, got swa", lambda pool: pool.alloc("swa", 0)),
        ("pool: expected one with bytes", lambda pool: pool.view("full", "k")),
    ],
)
def test_calls_refuse_by_name(message: str, call: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        call(full_and_swa(4096, PLAIN, PLAIN, page_size=4, bytes=False))


def test_a_signal_of_another_device_is_refused_before_ids_are_taken() -> None:
    class Elsewhere(Signal):
        device = 0  # type: ignore[assignment]

    with pytest.raises(ArgumentError, match="^signal: expected one of host memory, as the pool's tables are, got one of device 0"):
        full_and_swa(4096, PLAIN, PLAIN, page_size=4, signal=Elsewhere())


class Broken:
    """An event that cannot be asked."""

    def query(self) -> bool:
        raise RuntimeError("lost")


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ArgumentTypeError, "event: expected an event .*, got int", lambda pool, ids: pool.compact("full", event=5)),
        (ArgumentTypeError, "event: expected an event .*, got list", lambda pool, ids: pool.compact("full", event=[])),
        (RuntimeError, "lost", lambda pool, ids: pool.compact("full", event=Broken())),
        (ArgumentTypeError, "gate: expected a callable or None, got int", lambda pool, ids: pool.set_gate("full", 5)),
        (ArgumentTypeError, "ids: expected an array", lambda pool, ids: pool.free("full", [1])),
        (ArgumentTypeError, "ids: expected dtype int32 or int64, got float64", lambda pool, ids: pool.free("full", ids * 1.0)),
        (ArgumentError, "ids: expected 1 dimension, got shape \\(1, 9\\)", lambda pool, ids: pool.free("full", ids[None])),
        (ArgumentTypeError, "row_slice: expected an array", lambda pool, ids: pool.free_segment("full", [1], 0)),
        (ArgumentTypeError, "row_slice: expected dtype int32 or int64", lambda pool, ids: pool.free_segment("full", ids * 1.0, 0)),
        (ArgumentError, "row_slice: expected 1 dimension", lambda pool, ids: pool.free_segment("full", ids[None], 0)),
        (ArgumentTypeError, "start: expected an integer, got float", lambda pool, ids: pool.free_segment("full", ids, 1.0)),
        (ArgumentTypeError, "live: expected an integer, got str", lambda pool, ids: pool.free("full", ids, live="9")),
        (ArgumentError, "follower_live: expected at least 0, got -1", lambda pool, ids: pool.free("full", ids, follower_live=-1)),
        (ArgumentTypeError, "live: expected an integer, got float", lambda pool, ids: pool.free_segment("full", ids * 4, 0, live=1.0)),
        (ArgumentTypeError, "live: expected an integer, got str", lambda pool, ids: pool.retire("swa", (ids * 4)[None], [0], [4], live="1")),
        (ArgumentTypeError, "live: expected an integer, got str", lambda pool, ids: pool.unbind("swa", ids, live="1")),
        (ArgumentTypeError, "ids: expected an array", lambda pool, ids: pool.unbind("swa", [1])),
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_what_is_refused_changes_nothing(error: type[Exception], message: str, call: Any, grouped: bool) -> None:
    """And the pool works as before, in a group of frees or not."""
    pool = full_and_swa(1 << 14, PLAIN, PLAIN, page_size=4)
    ids = pool.alloc_joint({"full": 10, "swa": 10})["full"]
    pool.free("full", ids[3:4])
    ids = np.delete(ids, 3)
    before = [band.state() for band in pool.chain.bands], [(band.v2p.copy(), band.p2v.copy()) for band in pool.chain.bands]
    with pytest.raises(error, match=f"^{message}"), pool.free_group() if grouped else nullcontext():
        call(pool, ids)
    assert [band.state() for band in pool.chain.bands] == before[0]
    for band, tables in zip(pool.chain.bands, before[1], strict=True):
        np.testing.assert_array_equal(band.v2p, tables[0])
        np.testing.assert_array_equal(band.p2v, tables[1])
    pool.refresh()
    assert pool.schedulable("full") > 0 and pool.check() == []


def test_groups_do_not_nest() -> None:
    pool = full_and_swa(4096, PLAIN, PLAIN, page_size=4)
    with pool.free_group(), pytest.raises(ArgumentError, match="^free_group: expected no open group"), pool.free_group():
        pass
    assert pool.group is None


# Looking at it


def test_it_can_be_read_and_seen(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pool = fused_pool()
    found = pool.alloc_joint({"full": 12, "swa": 12, "state": 5})
    assert found is not None
    pool.free("full", found["full"][4:7])
    pool.compact("full", event=Event())
    text = pool.describe()
    for word in ("state", "swa", "full", "live", "holes", "pending", "available"):
        assert word in text
    pool.picture(tmp_path / "pool.png")
    assert (tmp_path / "pool.png").stat().st_size > 5000
    assert isinstance(pool.band("full").holes, DevicePages)
    with pytest.raises(ArgumentError, match="^plot: expected a file name"):
        pool.picture(tmp_path / "pool.xyz")
