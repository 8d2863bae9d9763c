"""Decode rounds over a pool: the mirror against the device's arrays, with and without speculation, and rounds that cannot be served."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from gpukit import ArgumentError
from gpukit.memory import DecodeMemory, Entry, Mirror, Part, full_and_state, full_and_swa, full_swa_and_state

ROW = Entry((Part("k", (8,), "float32"),))
STATE = Entry((Part("state", (64,), "float32"),))


def memory_of(pages: int = 200, page_size: int = 4, lanes: int = 8, lookahead: int = 1, window: int | None = 12, **options: object) -> DecodeMemory:
    pool = full_and_swa(pages * page_size * ROW.bytes, ROW, ROW, page_size=page_size, **options)
    return DecodeMemory(pool, num_rows=lanes + 4, columns=40, lanes=lanes, window=window, lookahead=lookahead)


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_the_mirror_is_exact_without_speculation(page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    memory = memory_of(pages=320, page_size=page_size)
    running: list[int] = []
    for _ in range(400):
        if len(running) < 8 and rng.random() < 0.3:
            row = next(row for row in range(12) if row not in running)
            if memory.admit(row, int(rng.integers(0, 20 * page_size)), relieve=True):
                running.append(row)
                memory.seat(running)
        ended = [row for row in running if memory.mirror.low.lengths[row] > 38 * page_size or rng.random() < 0.02]
        for row in ended:
            memory.end(row)
            running.remove(row)
        memory.seat(running)
        while not memory.step():
            memory.end(running.pop())
            memory.seat(running)
        assert memory.check() == [] and memory.pool.check() == []
        state = memory.state
        np.testing.assert_array_equal(state.kv_lengths[: len(running)], memory.mirror.low.lengths[running] + 1)
        for lane, row in enumerate(running):
            held = int(state.pages[row])
            for table, band in ((state.full_table, memory.full), (state.swa_table, memory.swa)):
                np.testing.assert_array_equal(table[lane, :held], np.maximum(band.v2p[state.rows[row, :held]], 0))
    for row in running:
        memory.end(row)
    assert memory.full.live == memory.swa.live == 0 and memory.pool.check() == []


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("lookahead", [1, 4])
@pytest.mark.parametrize("window", [None, 0, 7])
def test_a_forecast_is_what_the_rounds_do(window: int | None, lookahead: int, page_size: int) -> None:
    """Pages popped and pushed in each of many rounds, and where the mirror is after skipping them, against round by round."""
    rng = np.random.default_rng([page_size, lookahead])
    one, other = Mirror(6, lookahead, page_size, window), Mirror(6, lookahead, page_size, window)
    for row in range(6):
        length = int(rng.integers(0, 300))
        for mirror in (one, other):
            mirror.set(row, length, -(-length // page_size), 2 if row == 5 and length > 2 * page_size else 0)
    rows = np.array([0, 2, 3, 5])
    for _ in range(40):
        one.round(rows, np.ones(4, np.int64))
        other.round(rows, np.ones(4, np.int64))
    forecast = one.forecast(rows, 150)
    assert forecast is not None
    assert list(zip(*forecast, strict=True)) == [other.round(rows, np.ones(4, np.int64)) for _ in range(150)]
    one.skip(rows, 150)
    for name in ("lengths", "pages", "retired"):
        np.testing.assert_array_equal(getattr(one.low, name), getattr(other.low, name), err_msg=name)
    behind = Mirror(1, lookahead, page_size, 0)
    behind.set(0, 100 * page_size, 100, 0)
    behind.round(np.array([0]), np.array([0]))
    assert behind.forecast(np.array([0]), 4) is None


def test_rounds_that_follow_a_forecast_are_in_the_mirror_when_it_is_asked() -> None:
    memory = memory_of(pages=400, page_size=4)
    for row in range(3):
        memory.admit(row, 5 + row)
    memory.seat([0, 1, 2])
    for number in range(60):
        assert memory.step()
        if number % 7 == 0:
            assert memory.check() == [] and memory.mirror.exact
    assert memory.rounds == 60 and memory.check() == [] and memory.pool.check() == []


def test_the_first_round_writes_behind_the_prompt() -> None:
    memory = memory_of()
    memory.admit(3, 8)
    memory.seat([3])
    for position in (8, 9, 10):
        assert memory.step()
        page = memory.full.v2p[memory.state.rows[3, position // 4]]
        assert memory.state.locations[0, 0, 0] == page * 4 + position % 4


def test_ten_thousand_rounds_of_drafts_with_late_counts() -> None:
    """Lookahead 4, random acceptance that the host hears of up to three rounds later: bounds hold, and no page is lost."""
    rng = np.random.default_rng(1)
    memory = memory_of(pages=500, lookahead=4, lanes=6)
    pool, state = memory.pool, memory.state
    running: list[int] = []
    late: deque[np.ndarray] = deque()
    for number in range(10_000):
        full_rows = [row for row in running if memory.mirror.high.lengths[row] > 40 * 4 - 12]
        if full_rows or not running:
            while late:
                memory.arrived(late.popleft())
            for row in full_rows:
                memory.end(row)
                running.remove(row)
            while len(running) < 6:
                row = next(row for row in range(10) if row not in running)
                assert memory.admit(row, int(rng.integers(0, 60)))
                running.append(row)
            memory.seat(running)
            accepted = np.zeros(6, np.int64)
        else:
            accepted = rng.integers(1, 5, 6)
        state.advance[:] = accepted
        assert memory.step(known=False)
        late.append(accepted)
        pool.refresh()
        if len(late) > 3 or rng.random() < 0.3:
            memory.arrived(late.popleft())
        if number % 50 == 0:
            assert memory.check() == [] and pool.check() == []
    assert state.status.tolist() == [10_000, 0, 0]
    while late:
        memory.arrived(late.popleft())
    assert memory.mirror.exact and memory.check() == []
    np.testing.assert_array_equal(memory.mirror.low.pages, state.pages)
    for row in running:
        memory.end(row)
    assert memory.full.live == memory.swa.live == 0 and pool.check() == []
    assert pool.available({"full": 1, "swa": 1}) >= 0
    for name in ("full", "swa"):
        pool.flush(name)
    assert pool.available("full") == 499


def test_a_step_that_cannot_be_served_changes_nothing_and_works_after_room_is_made() -> None:
    memory = memory_of(pages=20)
    assert memory.admit(0, 16) and memory.admit(1, 16)
    memory.seat([0, 1])
    rest = memory.pool.alloc("full", memory.pool.available("full"))
    before = {name: array.copy() for name, array in vars(memory.state).items() if isinstance(array, np.ndarray)}
    assert not memory.step() and not memory.ready(relieve=True)
    for name, array in before.items():
        np.testing.assert_array_equal(getattr(memory.state, name), array, err_msg=name)
    assert memory.check() == [] and memory.rounds == 0
    memory.pool.free("full", rest)
    # FULL must give the bytes back before SWA can have them.
    assert memory.step() or (memory.ready(relieve=True) and memory.step())
    assert memory.check() == [] and memory.state.kv_lengths[:2].tolist() == [17, 17]


def test_the_tables_follow_pages_that_move() -> None:
    memory = memory_of(pages=60, lanes=4)
    for row in range(4):
        assert memory.admit(row, 24)
    memory.seat([0, 2, 3])
    memory.step()
    memory.end(1)
    for name in ("full", "swa"):
        assert memory.pool.compact(name) > 0
    memory.refill_tables()
    memory.step()
    for lane, row in enumerate([0, 2, 3]):
        held = int(memory.state.pages[row])
        np.testing.assert_array_equal(memory.state.full_table[lane, :held], memory.full.v2p[memory.state.rows[row, :held]])
    assert memory.check() == [] and memory.pool.check() == []


def test_pages_that_others_share_are_never_retired() -> None:
    memory = memory_of(page_size=1, window=2)
    assert memory.admit(0, 10, shared=8) and memory.admit(1, 10)
    memory.seat([0, 1])
    for _ in range(5):
        memory.step()
    assert memory.state.retired[:2].tolist() == [12, 12]
    memory = memory_of(page_size=1, window=6)
    pages = memory.pool.alloc_joint({"full": 10, "swa": 10})["full"]
    assert memory.admit(0, 10, pages=pages, shared=9)
    memory.seat([0])
    for _ in range(4):
        memory.step()
    assert memory.state.retired[0] == 9 and (memory.swa.v2p[pages[:9]] > 0).all()


@pytest.mark.parametrize("make", [full_and_state, full_swa_and_state])
def test_other_compositions(make: object) -> None:
    entries = (ROW, STATE) if make is full_and_state else (ROW, ROW, STATE)
    pool = make(1 << 15, *entries, page_size=4)
    memory = DecodeMemory(pool, num_rows=4, columns=20, lanes=2, window=8)
    assert pool.alloc("state", 2) is not None
    assert memory.admit(1, 9) and memory.admit(2, 30)
    memory.seat([2, 1])
    for _ in range(20):
        assert memory.step()
    assert memory.check() == [] and pool.check() == []
    assert "lanes" in repr(memory)


def test_the_check_finds_what_the_mirror_does_not_know() -> None:
    memory = memory_of()
    memory.admit(0, 5)
    memory.seat([0])
    memory.step()
    memory.state.lengths[0] += 1
    memory.state.status[1] += 1
    memory.swa.holes.counters[0] += 1
    found = memory.check()
    assert len(found) == 3 and found[0] == "lengths[0]: expected 5, got 6"


def test_refuses_by_name() -> None:
    memory = memory_of()
    with pytest.raises(ArgumentError, match="^length: expected at most 160 tokens"):
        memory.admit(0, 161)
    with pytest.raises(ArgumentError, match="^pages: expected the 2 pages of 5 tokens, got 1"):
        memory.admit(0, 5, pages=np.array([1]))
    for rows in ([0, 0], [-1], [99], list(range(9))):
        with pytest.raises(ArgumentError, match="^rows: expected at most 8 different rows below 12"):
            memory.seat(rows)
    memory.admit(0, 5)
    memory.seat([0])
    memory.step(known=False)
    with pytest.raises(ArgumentError, match="^advance: expected None while 1 rounds wait"):
        memory.step()
