"""Every check catches the violation that is planted for it, at every level, and finds nothing in a healthy pool."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpukit import ArgumentError
from gpukit.memory import Entry, InvariantError, InvariantWarning, Part, UnifiedPool, full_swa_and_state
from tests.helpers.pool_machine import Event

ROW = Entry((Part("k", (8,), "float32"),))


def make(detection: str = "off") -> UnifiedPool:
    """A pool with live pages, holes and pending pages in every band."""
    pool = full_swa_and_state(1 << 15, ROW, ROW, ROW, page_size=4, detection=detection)
    found = pool.alloc_joint({"full": 12, "swa": 12, "state": 8})
    assert found is not None
    pool.free("full", found["full"][4:7])
    pool.free("state", found["state"][2:4])
    event = Event()
    for name in ("full", "swa", "state"):
        pool.compact(name, event=event)
    pool.free("full", found["full"][8:9])
    pool.free("state", found["state"][5:6])
    return pool


def _swap(table: np.ndarray) -> None:
    live = np.flatnonzero(table[1:-1] > 0) + 1
    table[live[:2]] = table[live[:2]][::-1]


def _double(pool: UnifiedPool) -> None:
    holes = pool.band("full").holes
    holes.ring[holes.counters[1] % len(holes.ring)] = holes.ring[holes.counters[0] % len(holes.ring)]
    holes.counters[1] += 1
    pool.band("full").hole_count += 1


def _hole(pool: UnifiedPool, name: str, page: int) -> None:
    holes = pool.band(name).holes
    holes.ring[holes.counters[0] % len(holes.ring)] = page


def _live(pool: UnifiedPool, name: str) -> int:
    return int(np.flatnonzero(pool.band(name).p2v[1:-1] > 0)[0]) + 1


def _set(pool: UnifiedPool, name: str, field: str, change: int) -> None:
    setattr(pool.band(name), field, getattr(pool.band(name), field) + change)


def _queue(pool: UnifiedPool, ids: list[int]) -> None:
    pool.free_group().__enter__().add("full", np.array(ids), None, None)


PLANTED: dict[str, tuple[Callable[[UnifiedPool], Any], str]] = {
    "span beyond the buffer": (lambda pool: _set(pool, "full", "high", 1), "capacity: full spans"),
    "spans overlap": (lambda pool: _set(pool, "state", "high", 500), "capacity: swa spans"),
    "fewer than nothing": (lambda pool: _set(pool, "swa", "hole_count", 99), "capacity: Band\\(swa"),
    "sink bound": (lambda pool: pool.band("full").v2p.__setitem__(0, 3), "sentinel: full.v2p"),
    "sentinel overwritten": (lambda pool: pool.band("swa").p2v.__setitem__(-1, 0), "sentinel: swa.p2v"),
    "two ids swapped": (lambda pool: _swap(pool.band("full").v2p), "ownership: full.v2p.*does not lead back"),
    "page lost": (lambda pool: pool.band("state").p2v.__setitem__(_live(pool, "state"), -1), "ownership: state.v2p.*does not lead back"),
    "entry out of range": (lambda pool: pool.band("swa").v2p.__setitem__(9, 10**6), "ownership: swa.v2p\\[9\\]"),
    "bound outside the span": (lambda pool: _set(pool, "state", "high", -5), "ownership: state page"),
    "follower binds a freed id": (lambda pool: pool.band("full").v2p.__setitem__(2, -1), "ownership: swa binds id"),
    "free page twice": (_double, "conservation: full holds a free page twice"),
    "minus one in a list": (lambda pool: _hole(pool, "full", -1), "conservation: full holds the free page -1"),
    "page 0 in a list": (lambda pool: _hole(pool, "swa", 0), "conservation: swa holds the free page 0"),
    "live page in a list": (lambda pool: _hole(pool, "full", _live(pool, "full")), "conservation: full page [0-9]+ is free and bound"),
    "hole not counted": (lambda pool: _set(pool, "full", "hole_count", -1), "conservation: full counts 0 holes"),
    "pending overwritten": (lambda pool: pool.band("full").pending.clear(), "conservation: full counts [0-9]+ pending"),
    "span does not add up": (lambda pool: _set(pool, "full", "low", -1), "conservation: full spans"),
    "free id twice": (lambda pool: pool.band("state").virtual.ring.__setitem__(slice(9, 11), 9), "ownership: state holds a free id twice"),
    "id lost": (lambda pool: pool.band("state").virtual.counters.__setitem__(0, 9), "conservation: state has"),
    "impossible id": (lambda pool: pool.band("state").virtual.ring.__setitem__(9, -1), "ownership: state holds the free id -1"),
    "deferred twice": (lambda pool: _queue(pool, [1, 1]), "deferred: an id waits twice"),
    "deferred and dead": (lambda pool: _queue(pool, [5]), "deferred: id 5 waits"),
}


def test_a_healthy_pool_has_nothing_to_find() -> None:
    pool = make("strict")
    assert pool.check() == [] and all(band.pending_count and band.hole_count for band in pool.chain.bands)


@pytest.mark.parametrize("violation", PLANTED)
def test_a_planted_violation_is_caught(violation: str) -> None:
    plant, message = PLANTED[violation]
    pool = make()
    assert pool.check() == []
    plant(pool)
    found = pool.check()
    assert any(re.match(message, finding) for finding in found), found


@pytest.mark.parametrize("level", ["warn", "strict"])
def test_levels(level: str) -> None:
    pool = make(level)
    pool.band("full").v2p[-1] = 0
    if level == "strict":
        with pytest.raises(InvariantError, match="after alloc: sentinel") as caught:
            pool.alloc("full", 1)
        assert len(caught.value.findings) == 1
    else:
        with pytest.warns(InvariantWarning, match="after alloc: sentinel"):
            assert pool.alloc("full", 1) is not None


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ArgumentError, match="^detection: expected one of off, warn, strict, got 'loud'"):
        make("loud")


def test_off_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero extra work: with detection off no check runs, and the same ops are called as with it on, less what the checks read."""
    from gpukit.memory import invariants

    monkeypatch.setattr(invariants, "findings", lambda pool: pytest.fail("looked"))
    make("off")
