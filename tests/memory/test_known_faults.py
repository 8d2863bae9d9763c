"""Faults that production engines had in this place, each as a test that would fail if the pool had it too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpukit import ArgumentError, Signal
from gpukit.kernels.free_list import DevicePages
from gpukit.memory import Entry, Part, PoolLayout, SubPool, UnifiedPool, full_and_swa, full_swa_and_state
from tests.helpers.pool_machine import Event

PAGE_SIZES = (1, 4, 64)


def entry(width: int = 8) -> Entry:
    return Entry((Part("k", (width,), "float32"),))


def pool_of(page_size: int, pages: int = 32, **options: Any) -> UnifiedPool:
    return full_and_swa(pages * page_size * 32, entry(), entry(), page_size=page_size, detection="strict", **options)


def row_of(ids: np.ndarray, page_size: int) -> np.ndarray:
    return (ids[:, None] * page_size + np.arange(page_size)).reshape(-1)


def held(pages: DevicePages) -> list[int]:
    head, tail = pages.counters.tolist()
    return [int(pages.ring[i % len(pages.ring)]) for i in range(head, tail)]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_unmapped_representatives_are_not_freed_as_page_0(page_size: int) -> None:
    """Row entries of the sink, of free and of impossible ids free nothing, and no list ever holds page 0."""
    pool = pool_of(page_size)
    ids = pool.alloc_joint({"full": 3, "swa": 3})["full"]
    row = row_of(np.array([0, ids[1], 31, -1]), page_size)
    pool.free_segment("full", row, 0)
    assert pool.band("full").live == 2 and len(held(pool.band("full").holes)) == 1
    for band in pool.chain.bands:
        assert 0 not in held(band.holes) and band.p2v[0] == band.v2p[0] == 0
    assert 0 not in pool.alloc("full", 1)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_tokens_of_one_page_do_not_free_it_once_each(page_size: int) -> None:
    """A whole page is freed once, however many of its tokens are in the slice, and however often it is freed."""
    pool = pool_of(page_size)
    ids = pool.alloc_joint({"full": 2, "swa": 2})["full"]
    row = row_of(ids, page_size)
    for _ in range(2):
        pool.free_segment("full", row, 0)
    pool.free("full", np.concatenate([ids, ids]))
    assert len(held(pool.band("full").holes)) == len(held(pool.band("swa").holes)) == 2
    again = pool.alloc("full", 4)
    assert len(set(again.tolist())) == 4


def test_a_stale_tombstone_does_not_free_a_reused_slot() -> None:
    """A page retired for one request and bound to another stays with the other when the first is freed."""
    pool = pool_of(4)
    first = pool.alloc_joint({"full": 1, "swa": 1})["full"]
    pool.retire("swa", row_of(first, 4)[None], [0], [4])
    second = pool.alloc_joint({"full": 1, "swa": 1})["full"]
    reused = pool.band("swa").v2p[second]
    pool.free("full", first)
    pool.retire("swa", row_of(first, 4)[None], [0], [4])
    assert pool.band("swa").v2p[second] == reused and pool.band("swa").p2v[reused] == second


def test_a_memo_does_not_outlive_a_gate() -> None:
    """No capacity field is bound when a gate flips; the answer changes all the same."""
    pool = pool_of(1, pages=12)
    closed = {"value": False}
    pool.set_gate("full", lambda: not closed["value"])
    ids = pool.alloc("full", 8)
    pool.free("full", ids[::2])
    epoch = pool.chain.epoch.value
    assert pool.schedulable("swa") == 7
    closed["value"] = True
    assert pool.schedulable("swa") == pool.available("swa") == 3
    closed["value"] = False
    assert pool.schedulable("swa") == 7 and pool.chain.epoch.value == epoch


def test_batches_that_share_an_event_do_not_overwrite_each_other() -> None:
    pool = pool_of(1)
    event = Event()
    for _ in range(2):
        ids = pool.alloc("full", 4)
        pool.free("full", ids[2:])
        pool.compact("full", event=event)
    waiting = pool.band("full").pending_count
    assert waiting == len(pool.band("full").pending_pages()) > 2 and len(pool.band("full").pending) == 1
    span = pool.band("full").high - pool.band("full").low
    assert span == pool.band("full").live + pool.band("full").hole_count + waiting
    event.fired = True
    pool.refresh()
    assert pool.band("full").pending_count == 0
    pool.compact("full")
    assert pool.band("full").high - pool.band("full").low == 4


def test_an_unfiltered_free_does_not_make_alloc_hand_out_minus_1() -> None:
    pool = pool_of(1)
    ids = pool.alloc("full", 4)
    pool.free("full", np.concatenate([ids, [-1, 0, 10_000, -(2**40)], ids]))
    for name in ("full", "swa"):
        assert min(held(pool.band(name).holes), default=1) > 0
    again = pool.alloc("full", pool.available("full"))
    assert again.min() > 0 and pool.band("full").v2p[again].min() > 0


def test_virtual_ids_are_not_physical_pages_after_compaction() -> None:
    """Ids stay, places change, and everything that asks by id finds its bytes."""
    pool = pool_of(4)
    ids = pool.alloc_joint({"full": 6, "swa": 6})["full"]
    keys = pool.view("full", "k")
    places = pool.band("full").v2p[ids]
    keys[0].reshape(-1, 4, 8)[places] = ids[:, None, None]
    # FULL grows down, so its last page lies innermost.
    pool.free("full", ids[3:])
    assert pool.compact("full") > 0
    kept = ids[:3]
    moved = pool.band("full").v2p[kept]
    assert (moved != places[:3]).any() and (moved != kept).any()
    assert (keys[0].reshape(-1, 4, 8)[moved] == kept[:, None, None]).all()
    assert pool.spaces().table("full") is pool.band("full").v2p


def test_shared_bytes_are_not_counted_twice() -> None:
    pool = full_and_swa(9 * 128, entry(), entry(), page_size=4)
    assert pool.available("full") == pool.available("swa") == 8 and pool.available({"full": 1, "swa": 1}) == 4
    pool.alloc("full", 1)
    # FULL 7 and SWA 7 over shared bytes are 3 together.
    assert pool.available("full") == pool.available("swa") == 7 and pool.available({"full": 1, "swa": 1}) == 3
    assert pool.alloc_joint({"full": 4, "swa": 4}) is None and pool.alloc_joint({"full": 3, "swa": 3}) is not None


def test_a_slot_stride_does_not_wrap_at_32_bits() -> None:
    """Byte offsets of a pool of 64 GB and of the views' strides are whole numbers of any size."""
    wide = Entry((Part("k", (8, 128), "bfloat16", layers=64), Part("v", (8, 128), "bfloat16", layers=64)))
    layout = PoolLayout(64 << 30, [SubPool("swa", wide, "up", 64, owner="full"), SubPool("full", wide, "down", 64)])
    pool = UnifiedPool(layout, bytes=False)
    assert layout.by_name["full"].page_bytes == 64 * 64 * 2 * 2048 and layout.num_physical("full") == 4096
    ids = pool.alloc("full", 4000)
    assert pool.band("full").low * pool.band("full").page_bytes == (4096 - 4000) * layout.by_name["full"].page_bytes
    assert (4096 - 1) * layout.by_name["full"].page_bytes > 2**35 and pool.available("swa") == 95 and len(ids) == 4000


def test_a_non_owners_tables_have_the_owners_virtual_count() -> None:
    """Its p2v has its own physical count; either may be the longer."""
    for full_width, swa_width in ((8, 64), (64, 8)):
        pool = full_and_swa(1 << 14, entry(full_width), entry(swa_width), page_size=4, detection="strict")
        full, swa = pool.band("full"), pool.band("swa")
        assert len(swa.v2p) == len(full.v2p) and (len(swa.p2v) > len(full.p2v)) == (swa_width < full_width)
        both = pool.available({"full": 1, "swa": 1})
        ids = pool.alloc_joint({"full": both, "swa": both})["full"]
        assert ids.max() < len(swa.v2p) - 1 and swa.v2p[ids].min() > 0


def test_capacity_is_checked_before_anything_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(4)
    most = pool.available({"full": 1, "swa": 1})

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("launched")

    for name in ("bind", "bind_range", "remap", "unbind_into"):
        monkeypatch.setattr(f"gpukit.kernels.page_table.{name}", refuse)
    monkeypatch.setattr(DevicePages, "take", refuse)
    assert pool.alloc_joint({"full": most + 1, "swa": most + 1}) is None and pool.alloc("full", 1000) is None
    with pytest.raises(ArgumentError, match="at most the 2 new ids"):
        pool.alloc_joint({"full": 2, "swa": 3})


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_sizes_other_than_1(page_size: int) -> None:
    """A partial last page, a start inside the row, and a start that is none."""
    signal = Signal()
    pool = pool_of(page_size, signal=signal)
    ids = pool.alloc_joint({"full": 5, "swa": 5})["full"]
    row = row_of(ids, page_size)
    pool.free_segment("full", row[2 * page_size :][: 2 * page_size + 1], 2 * page_size)
    assert pool.band("full").live == pool.band("swa").live == 2
    if page_size > 1:
        with pytest.raises(ArgumentError, match="^start: expected a multiple of page_size"):
            pool.free_segment("full", row, 1)
        with pytest.raises(ArgumentError, match="^start: expected a multiple of page_size"), pool.free_group():
            pool.free_segment("full", row, 1)
    assert signal.counts() == {}


def test_a_deferred_free_does_not_follow_a_row_that_is_rewritten() -> None:
    pool = pool_of(4)
    ids = pool.alloc("full", 4)
    row = row_of(ids, 4)
    with pool.free_group():
        pool.free_segment("full", row[:8], 0)
        row[:] = row_of(ids[::-1].copy(), 4)
    assert pool.band("full").v2p[ids].tolist()[:2] == [-1, -1] and (pool.band("full").v2p[ids[2:]] > 0).all()


def test_an_empty_float_is_transparent() -> None:
    pool = full_swa_and_state(1 << 14, entry(), entry(), entry(), page_size=4)
    most = pool.available("full")
    ids = pool.alloc_joint({"full": 2, "swa": 2})["full"]
    assert pool.available("full") < most - 2
    pool.free("full", ids)
    # Freeing never shrinks the span of a FLOAT; a flush does.
    assert pool.band("swa").high - pool.band("swa").low == 2
    assert pool.flush("swa") == 2 and pool.flush("swa") == 0
    assert pool.available("full") == most
