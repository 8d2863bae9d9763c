"""Decode rounds over a pool: the mirror against the device's arrays, with and without speculation, and rounds that cannot be served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpukit import ArgumentError, ArgumentTypeError
from gpukit.memory import DecodeMemory, Entry, Mirror, Part, decode, full_and_state, full_and_swa, full_swa_and_state

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


def test_forecast_follows_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a row is full, without a look at every request in between."""
    monkeypatch.setattr(decode, "FORECAST", 10)
    monkeypatch.setattr(decode, "LONG_FORECAST", 40)
    memory = memory_of(pages=400)
    for row in range(3):
        memory.admit(row, 5 + row)
    memory.seat([0, 1, 2])
    assert memory.step()
    monkeypatch.setattr(memory, "_step", None)
    for number in range(160 - 7 - 1):
        assert memory.step()
        if number in (9, 10, 49, 60, 140):
            assert memory.check() == [] and memory.mirror.exact
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="rows: expected at most 160 tokens"):
        memory.step()
    assert memory.check() == [] and memory.pool.check() == []


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


class Unread:
    """A read-back of a list's counters that never arrives."""

    def poll(self) -> None:
        return None

    def start(self, stream: Any) -> bool:
        return False


def counted_by_notes(memory: DecodeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host know of the lists only what is noted, as on a device."""
    lists = memory._magazines
    for pages in lists:
        monkeypatch.setattr(pages, "_known", pages.known)
        monkeypatch.setattr(pages, "_reader", Unread())

    def launch() -> None:
        for pages in lists:
            pages.device = -1
        memory._call()
        for pages in lists:
            pages.device = 0

    for pages in lists:
        monkeypatch.setattr(pages, "device", 0)
    monkeypatch.setattr(memory, "_launch", launch)


ASK: dict[str, Callable[[DecodeMemory], Any]] = {
    "holes": lambda memory: (memory.full.hole_count, memory.swa.hole_count, memory.full.id_count),
    "live": lambda memory: (memory.full.live, memory.swa.live),
    "state": lambda memory: [band.state() for band in memory.pool.chain.bands],
    "available": lambda memory: [memory.pool.available(name) for name in ("full", "swa")],
    "schedulable": lambda memory: memory.pool.schedulable({"full": 1, "swa": 1}),
    "known": lambda memory: [pages.known for pages in memory._magazines],
    "dirty": lambda memory: memory.swa.dirty,
}


@pytest.mark.parametrize("asked", ASK)
@pytest.mark.parametrize("on_a_device", [False, True])
def test_books_are_up_to_date_whenever_somebody_asks(asked: str, on_a_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are taken account of in bulk. Against a memory that is asked after every round, and against the lists themselves."""
    rng = np.random.default_rng(len(asked))
    seldom, often = memory_of(pages=400), memory_of(pages=400)
    for memory in (seldom, often):
        for row in range(5):
            memory.admit(row, 7 + 3 * row)
        memory.seat(range(5))
        for band in (memory.full, memory.swa):
            assert memory.pool.stock(band.name, 130 if on_a_device else 60)
            band.dirty = False
        memory.step()
        if on_a_device:
            counted_by_notes(memory, monkeypatch)
    quiet = 0
    for number in range(90):
        assert seldom.step() and often.step()
        expected = ASK[asked](often)
        quiet -= 1
        if quiet < 0:
            # The second answer may be remembered.
            assert ASK[asked](seldom) == ASK[asked](seldom) == expected, number
            quiet = int(rng.integers(0, 15))
    for memory in (seldom, often):
        for pages in memory._magazines:
            assert pages.known == pages.counters[1] - pages.counters[0]
        np.testing.assert_array_equal(memory.mirror.low.pages, memory.state.pages)


def test_pages_that_go_elsewhere_between_rounds() -> None:
    """The rounds that the magazines had pages for are counted anew."""
    memory = memory_of(pages=300)
    for row in range(4):
        memory.admit(row, 9)
    memory.seat(range(4))
    assert memory.pool.stock("full", 50) and memory.pool.stock("swa", 50)
    for _ in range(5):
        assert memory.step()
    held = memory.pool.alloc_joint({"full": 50, "swa": 50})
    assert held is not None and memory.full.hole_count < 4
    for _ in range(20):
        assert memory.step()
    assert memory.check() == [] and memory.pool.check() == []


@pytest.mark.parametrize("pages", [2_000, 300])
def test_magazines_are_stocked_ahead_while_there_is_plenty(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stocking is a launch: for many rounds at once, but not with the last pages of a pool."""
    memory = memory_of(pages=pages)
    for row in range(3):
        memory.admit(row, 8 + row)
    memory.seat(range(3))
    assert memory.step()
    stocked: list[int] = []
    stock = memory.pool.stock
    monkeypatch.setattr(memory.pool, "stock", lambda name, n: stocked.append(n) or stock(name, n))
    for _ in range(50):
        assert memory.step()
    # Three requests take a page each in every fourth round.
    assert stocked[:2] == [48, 48] and len(stocked) == 2 if pages == 2_000 else set(stocked) == {1}
    assert memory.check() == [] and memory.pool.check() == []


def test_two_memories_of_one_pool() -> None:
    """What one of them pops the other knows of."""
    one = memory_of(pages=300)
    other = DecodeMemory(one.pool, num_rows=4, columns=40, lanes=4, window=12)
    rng = np.random.default_rng(2)
    for memory in (one, other):
        for row in range(4):
            memory.admit(row, 10 + row)
        memory.seat(range(4))
    assert one.pool.stock("full", 40) and one.pool.stock("swa", 40)
    for _ in range(60):
        memory = (one, other)[int(rng.integers(2))]
        for _ in range(int(rng.integers(1, 5))):
            if memory.mirror.high.lengths[:4].max() < 150:
                assert memory.step()
    assert one.check() == other.check() == one.pool.check() == []


def test_unknown_rounds_after_a_forecast_have_room_for_themselves() -> None:
    """Rounds of the forecast lengthen the requests, too."""
    memory = memory_of(pages=200, lookahead=2)
    memory.admit(0, 20)
    memory.seat([0])
    assert memory.pool.stock("full", 50) and memory.pool.stock("swa", 50)
    for _ in range(139):
        assert memory.step()
    memory.state.advance[:1] = 1
    for known in (False, True, False):
        with pytest.raises(ArgumentError, match="rows: expected at most 160 tokens"):
            memory.step(known=known)
    assert memory.check() == []


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


def heard(memory: DecodeMemory) -> None:
    """The lengths of the lists as the device has them now have been read back."""
    for band in (memory.full, memory.swa):
        for pages in (band.holes, band.virtual):
            if pages is not None:
                pages._known = int(pages.counters[1] - pages.counters[0])
        band.hole_count = band.holes.known
        if band.virtual is not None:
            band.id_count = band.virtual.known


@pytest.mark.parametrize("on_a_device", [False, True])
def test_a_round_may_pop_what_one_in_wait_has_left(on_a_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either of two rounds may be the one that takes a page, and the lists were counted in between."""
    memory = memory_of(lanes=2, window=None)
    memory.admit(0, 3)
    memory.admit(1, 2)
    memory.seat([0, 1])
    assert memory.step()
    if on_a_device:
        assert memory.pool.stock("full", 3) and memory.pool.stock("swa", 3)
        counted_by_notes(memory, monkeypatch)
    for advance in ([0, 1], [1, 1]):
        memory.state.advance[:] = advance
        assert memory.step(known=False)
        for band in (memory.full, memory.swa):
            assert band.hole_count <= band.holes.counters[1] - band.holes.counters[0]
        if on_a_device:
            heard(memory)
    memory.arrived([0, 1])
    memory.arrived([1, 1])
    assert memory.state.status[:2].tolist() == [3, 0] and memory.check() == []


@pytest.mark.parametrize("on_a_device", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_device_serves_every_round_that_the_host_launches(seed: int, on_a_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts with late counts in a pool that is nearly full, lists that are counted now and then."""
    rng = np.random.default_rng(seed)
    page_size, lookahead = int(rng.choice([1, 3, 4])), int(rng.integers(1, 5))
    memory = memory_of(pages=int(rng.integers(60, 80)), page_size=page_size, lanes=3, lookahead=lookahead, window=int(rng.choice([0, 5, 30])))
    for row in range(3):
        assert memory.admit(row, int(rng.integers(0, 4 * page_size)))
    memory.seat(range(3))
    for band in (memory.full, memory.swa):
        assert memory.pool.stock(band.name, 18)
    assert memory.step()
    if on_a_device:
        counted_by_notes(memory, monkeypatch)
        # Stocking launches, which lists that are nowhere cannot.
        monkeypatch.setattr(memory, "_stock", lambda need, relieve: False)
    waiting: deque[np.ndarray] = deque()
    served = 1
    for _ in range(60):
        room = memory.state.pages[:3] * page_size - memory.state.lengths[:3]
        advance = np.minimum(rng.integers(0, lookahead + 1, 3), room)
        if memory.mirror.high.lengths[:3].max() + 2 * lookahead > 38 * page_size:
            break
        memory.state.advance[:3] = advance
        if memory.step(known=False):
            waiting.append(advance)
            served += 1
        assert memory.state.status[:2].tolist() == [served, 0]
        for band in (memory.full, memory.swa):
            assert band.hole_count <= band.holes.counters[1] - band.holes.counters[0]
        while waiting and rng.random() < 0.4:
            memory.arrived(waiting.popleft())
        if on_a_device and rng.random() < 0.3:
            heard(memory)
    while waiting:
        memory.arrived(waiting.popleft())
    assert served > 3
    np.testing.assert_array_equal(memory.mirror.low.lengths, memory.state.lengths)
    np.testing.assert_array_equal(memory.mirror.low.pages, memory.state.pages)


def test_a_refused_round_of_a_sampler_leaves_no_counts_behind() -> None:
    memory = memory_of(pages=30, page_size=1, lanes=2, window=None)
    memory.admit(0, 5)
    memory.seat([0])
    assert memory.step() and memory.step()
    for name in ("full", "swa"):
        memory.pool.flush(name)
    left = {"full": 1, "swa": 1}
    taken = memory.pool.alloc_joint(dict.fromkeys(left, memory.pool.available(left)))
    assert taken is not None
    rest = memory.pool.alloc("full", memory.pool.available("full"))
    memory.state.advance[:] = 0
    assert not memory.step(known=False)
    memory.pool.free("full", taken["full"])
    assert memory.step() and memory.state.lengths[0] == 7 and memory.check() == [] and rest is not None


def test_a_first_round_is_the_first_one_that_a_request_is_seated_in() -> None:
    memory = memory_of()
    memory.admit(0, 6)
    memory.seat([0])
    memory.admit(1, 8)
    assert memory.step()
    memory.seat([0, 1])
    assert memory.step() and memory.state.lengths[:2].tolist() == [7, 8] and memory.check() == []


def test_a_forecast_takes_no_notice_of_how_large_pages_are() -> None:
    mirror = Mirror(2, 1, 1 << 40, None)
    mirror.set(0, length=(1 << 40) - 3, pages=1, retired=0)
    assert mirror.forecast(np.array([0]), 4) == ([0, 0, 1, 0], [0, 0, 0, 0])


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
    for advance, message in ((None, "known: expected False while 1 rounds wait"), ([1], "advance: expected None while 1 rounds wait")):
        for call in (memory.step, memory.ready):
            assert_refused(memory, ArgumentError, message, lambda call=call, advance=advance: call(advance))
    memory.arrived([0])
    assert memory.step() and memory.check() == []


def everything(memory: DecodeMemory) -> dict[str, Any]:
    """What a refusal must leave as it is: the device's arrays, the mirror, the lists and the books."""
    mirror, state = memory.mirror, memory.state
    arrays = {f"state.{name}": array for name, array in vars(state).items() if isinstance(array, np.ndarray)}
    arrays |= {f"{bound}.{name}": array for bound in ("low", "high", "known") for name, array in vars(getattr(mirror, bound)).items()}
    for band in memory.pool.chain.bands:
        arrays |= {f"{band.name}.v2p": band.v2p, f"{band.name}.p2v": band.p2v, f"{band.name} holes": band.holes.counters}
    found = {name: array.tolist() for name, array in arrays.items()}
    books = {
        "rounds": memory.rounds,
        "rows": memory.rows.tolist(),
        "waiting": mirror.waiting,
        "bands": [band.state() for band in memory.pool.chain.bands],
    }
    return found | books


def assert_refused(memory: DecodeMemory, error: type[Exception], message: str, call: Callable[[], object]) -> None:
    before = everything(memory)
    with pytest.raises(error, match=f"^{message}"):
        call()
    assert everything(memory) == before and memory.check() == [] and memory.pool.check() == []


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ArgumentError, "row: expected at most 11, got 99", {"row": 99}),
        (ArgumentError, "row: expected at least 0, got -1", {"row": -1}),
        (ArgumentTypeError, "row: expected an integer, got float", {"row": 1.0}),
        (ArgumentTypeError, "row: expected an integer, got str", {"row": "a"}),
        (ArgumentTypeError, "row: expected an integer, got bool", {"row": True}),
        (ArgumentError, "row: expected a row that no request has, got 0", {"row": 0}),
        (ArgumentTypeError, "length: expected an integer, got float", {"length": 6.0}),
        (ArgumentError, "length: expected at least 0, got -1", {"length": -1}),
        (ArgumentError, "shared: expected at most 2, got 5", {"shared": 5}),
        (ArgumentError, "shared: expected at least 0, got -1", {"shared": -1}),
        (ArgumentTypeError, "shared: expected an integer, got float", {"shared": 1.0}),
        (ArgumentError, "shared: expected at most 2, got 5", {"shared": 5, "pages": np.array([1, 2])}),
        (ArgumentTypeError, "pages: expected an array", {"pages": [1, 2]}),
        (ArgumentTypeError, "pages: expected dtype int32 or int64, got float64", {"pages": np.array([1.0, 2.0])}),
        (ArgumentError, "pages: expected 1 dimension", {"pages": np.array([[1, 2]])}),
        (ArgumentError, "pages: expected ids from 1 to [0-9]+, got -3", {"pages": np.array([1, -3])}),
        (ArgumentError, "pages: expected ids from 1 to [0-9]+, got 0", {"pages": np.array([0, 1])}),
        (ArgumentError, "pages: expected ids from 1 to [0-9]+, got 100000", {"pages": np.array([1, 100_000])}),
    ],
)
@pytest.mark.parametrize("swa", [True, False])
def test_an_admission_that_is_refused_changes_nothing(swa: bool, error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    if swa:
        memory = memory_of()
    else:
        memory = DecodeMemory(full_and_state(1 << 15, ROW, STATE, page_size=4), num_rows=12, columns=40, lanes=8, window=None)
    assert memory.admit(0, 6)
    memory.seat([0])
    assert_refused(memory, error, message, lambda: memory.admit(**{"row": 3, "length": 6} | arguments))
    memory.step()
    memory.end(0)
    assert memory.full.live == 0


def test_the_ids_of_the_last_pages_are_pages() -> None:
    memory = memory_of()
    everyone = memory.pool.alloc("full", memory.pool.available("full"))
    last = everyone[-2:].astype(np.int32)
    assert last[1] == memory.full.num_virtual - 1 and memory.admit(np.int32(11), np.int64(6), pages=last, shared=2)
    assert memory.state.rows[11, :2].tolist() == last.tolist() and memory.state.retired[11] == 2


def test_an_end_that_is_refused_changes_nothing() -> None:
    memory = memory_of()
    for row in (0, 8):
        assert memory.admit(row, 20)
    memory.seat([0])
    memory.step()
    for row, error, message in (
        (-4, ArgumentError, "row: expected at least 0, got -4"),
        (12, ArgumentError, "row: expected at most 11, got 12"),
        (7, ArgumentError, "row: expected a row that a request has, got 7"),
        (0.0, ArgumentTypeError, "row: expected an integer, got float"),
        ("a", ArgumentTypeError, "row: expected an integer, got str"),
    ):
        assert_refused(memory, error, message, lambda row=row: memory.end(row))
    memory.end(8)
    assert_refused(memory, ArgumentError, "row: expected a row that a request has, got 8", lambda: memory.end(8))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("known", [True, False])
def test_a_seated_request_that_has_ended_is_not_decoded(known: bool, again: bool) -> None:
    """Nor one that has its row now, in a lane that still holds the other's pages."""
    memory = memory_of()
    assert memory.admit(0, 7) and memory.admit(1, 7)
    memory.seat([0, 1])
    for _ in range(3):
        assert memory.step()
    memory.end(0)
    if again:
        assert memory.admit(0, 13)
    # Takes what the request gave back.
    memory.admit(5, 20)
    for call in (lambda: memory.step(known=known), lambda: memory.ready(known=known), lambda: memory.ready(known=known, relieve=True)):
        assert_refused(memory, ArgumentError, r"rows: expected a new seating \(seat\), because \[0\] ended", call)
    memory.seat([0, 1, 5] if again else [1, 5])
    if not known:
        memory.state.advance[:] = 0
    assert memory.step(known=known)
    if not known:
        memory.arrived(np.zeros(len(memory.rows), np.int64))
    assert memory.check() == [] and memory.pool.check() == []
    for row in memory.rows.tolist():
        memory.end(row)
    memory.seat([])
    assert memory.step() and memory.full.live == memory.swa.live == 0 and memory.pool.check() == []


def test_the_end_of_a_request_that_is_not_seated_stops_nobody() -> None:
    memory = memory_of()
    assert memory.admit(0, 7) and memory.admit(1, 7)
    memory.seat([1])
    memory.end(0)
    assert memory.step() and memory.check() == []


def test_counts_that_arrive_after_an_end_are_not_the_next_requests() -> None:
    memory = memory_of(lookahead=4)
    assert memory.admit(0, 7) and memory.admit(1, 9)
    memory.seat([0, 1])
    for advance in ([0, 0], [2, 3]):
        memory.state.advance[:2] = advance
        assert memory.step(known=False)
    memory.end(0)
    assert memory.admit(0, 21)
    memory.seat([1, 0])
    memory.state.advance[:2] = [1, 0]
    assert memory.step(known=False) and memory.check() == []
    for advance in ([0, 0], [2, 3], [1, 0]):
        memory.arrived(advance)
        assert memory.check() == []
    assert memory.mirror.exact and memory.mirror.low.lengths[:2].tolist() == [21, 13]


@pytest.mark.parametrize(
    ("error", "message", "advance"),
    [
        (ArgumentError, "advance: expected shape \\(2,\\), one count a seated request, got \\(1,\\)", [1]),
        (ArgumentError, "advance: expected shape \\(2,\\), one count a seated request, got \\(3,\\)", [1, 1, 1]),
        (ArgumentError, "advance: expected shape \\(2,\\), one count a seated request, got \\(\\)", 1),
        (ArgumentError, "advance: expected 0 to 2 tokens for the request in lane 0, got -1", [-1, 0]),
        (ArgumentError, "advance: expected 0 to 2 tokens for the request in lane 1, got 3", [0, 3]),
        (ArgumentError, "advance: expected 0 to 2 tokens for the request in lane 0, got 100", [100, 0]),
        (ArgumentError, "advance: expected 0 to 2 tokens for the request in lane 0, got 18446744073709551615", np.array([2**64 - 1, 0], np.uint64)),
        (ArgumentTypeError, "advance: expected whole numbers, got dtype float64", [1.0, 1.0]),
        (ArgumentTypeError, "advance: expected whole numbers, got dtype bool", [True, False]),
        (ArgumentTypeError, "advance: expected whole numbers, got str", "ab"),
        (ArgumentTypeError, "advance: expected whole numbers, got list", [[1], [1, 2]]),
    ],
)
@pytest.mark.parametrize("late", [True, False])
def test_counts_are_checked(late: bool, error: type[Exception], message: str, advance: Any) -> None:
    """Those of a step, and those that arrive for the oldest round."""
    memory = memory_of(lookahead=2)
    assert memory.admit(3, 6) and memory.admit(1, 6)
    memory.seat([3, 1])
    assert memory.step()
    if late:
        memory.state.advance[:2] = [1, 2]
        assert memory.step(known=False)
        assert_refused(memory, error, message, lambda: memory.arrived(advance))
        memory.arrived([1, 2])
    else:
        assert_refused(memory, error, message, lambda: memory.step(advance))
        assert_refused(memory, error, message, lambda: memory.ready(advance))
        assert memory.step(np.array([1, 2], np.int32))
    assert memory.mirror.exact and memory.check() == [] and memory.state.lengths[[3, 1]].tolist() == [7, 8]


def test_a_first_round_does_not_advance_beyond_the_prompts_pages() -> None:
    """The device would leave the request where it is."""
    memory = memory_of()
    assert memory.admit(0, 8) and memory.admit(1, 7)
    memory.seat([0, 1])
    message = "advance: expected 0 to 0 tokens for the request in lane 0, got 1"
    assert_refused(memory, ArgumentError, message, lambda: memory.step([1, 1]))
    assert memory.step([0, 1]) and memory.step([1, 1]) and memory.check() == []
    assert memory.state.lengths[:2].tolist() == [9, 9]


def test_counts_that_nobody_waits_for() -> None:
    memory = memory_of()
    memory.admit(0, 5)
    memory.seat([0])
    assert_refused(memory, ArgumentError, "advance: expected no counts, because no round waits", lambda: memory.arrived([1]))
    assert_refused(memory, ArgumentError, "advance: expected None where the device alone knows", lambda: memory.step([0], known=False))


def test_a_round_that_was_not_launched_is_not_in_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of()
    memory.admit(0, 5)
    memory.seat([0])

    def fail() -> None:
        raise RuntimeError("no launch")

    for arguments in ({"advance": [0]}, {}, {"advance": [1]}, {}, {"known": False}):
        with monkeypatch.context() as broken:
            broken.setattr(memory, "_launch", fail)
            before = {name: value for name, value in everything(memory).items() if name not in ("state.advance", "bands") and "holes" not in name}
            with pytest.raises(RuntimeError, match="no launch"):
                memory.step(**arguments)
            after = everything(memory)
            assert {name: after[name] for name in before} == before and memory.check() == []
        if arguments.get("known", True):
            assert memory.step(**arguments) and memory.check() == []
    assert memory.step() and memory.step() and memory.check() == [] and memory.pool.check() == []


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ArgumentError, "window: expected at least 0, got -1", {"window": -1}),
        (ArgumentTypeError, "window: expected an integer, got float", {"window": 1.5}),
        (ArgumentError, "lookahead: expected at most 64 tokens, 16 pages, got 65", {"lookahead": 65}),
        (ArgumentTypeError, "lookahead: expected an integer, got float", {"lookahead": 1.5}),
        (ArgumentError, "num_rows: expected at least 1, got 0", {"num_rows": 0}),
        (ArgumentError, "columns: expected at least 1, got 0", {"columns": 0}),
        (ArgumentError, "columns: expected at least 1, got -1", {"columns": -1}),
        (ArgumentTypeError, "lanes: expected an integer, got str", {"lanes": "a"}),
        (ArgumentTypeError, "pool: expected a UnifiedPool, got int", {"pool": 5}),
    ],
)
def test_sizes_are_checked(error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    pool = full_and_swa(1 << 14, ROW, ROW, page_size=4)
    with pytest.raises(error, match=f"^{message}"):
        DecodeMemory(**{"pool": pool, "num_rows": 4, "columns": 8, "lanes": 2, "window": 8} | arguments)
    assert DecodeMemory(pool, num_rows=4, columns=8, lanes=2, window=0, lookahead=64).step()


def test_none_is_not_offered_as_a_stream_to_capture_on() -> None:
    with pytest.raises(ArgumentTypeError, match="^stream: expected an int handle, or a stream of .*, got NoneType"):
        memory_of().capture(None)


def test_a_seating_that_is_refused_changes_nothing() -> None:
    memory = memory_of()
    for row in (0, 1):
        assert memory.admit(row, 6)
    memory.seat([1, 0])
    memory.step()
    for rows, error, message in (
        ("a", ArgumentTypeError, "rows: expected whole numbers, got str"),
        ([0.5], ArgumentTypeError, "rows: expected whole numbers, got dtype float64"),
        ([None], ArgumentTypeError, "rows: expected whole numbers, got list"),
        ([2**70], ArgumentTypeError, "rows: expected whole numbers, got list"),
        (np.array([2**64 - 1], np.uint64), ArgumentError, "rows: expected at most 8 different rows below 12"),
        ([0, 5, 7], ArgumentError, "rows: expected rows that requests have, got \\[5, 7\\], which none has"),
    ):
        assert_refused(memory, error, message, lambda rows=rows: memory.seat(rows))
    assert memory.step() and memory.rows.tolist() == [1, 0]


@pytest.mark.parametrize("known", [True, False])
def test_a_request_that_fills_its_row_is_not_decoded_beyond_it(known: bool) -> None:
    """The device would refuse the round, and the mirror go on: up to the last token rounds are served, the next one is refused here."""
    pool = full_and_swa(1 << 14, ROW, ROW, page_size=4)
    memory = DecodeMemory(pool, num_rows=3, columns=4, lanes=2, window=8, lookahead=2)
    assert memory.admit(0, 3) and memory.admit(2, 6)
    # So that no round stops for want of pages.
    assert pool.stock("full", 10) and pool.stock("swa", 10)
    memory.seat([0, 2])
    advance, served = np.zeros(2, np.int64), 0
    while memory.mirror.low.lengths[2] + advance[1] + 2 <= 16:
        if not known:
            memory.state.advance[:] = advance
        assert memory.step(known=known)
        if not known:
            memory.arrived(advance)
        advance = np.array([1, 1 if known else 2])
        served += 1
        # The host does not know what a round accepts before it is done.
        if not known and memory.mirror.low.lengths[2] + 4 > 16:
            break
    assert served == (9 if known else 5) and memory.check() == [] and memory.state.status.tolist() == [served, 0, 0]
    message = "rows: expected at most 16 tokens in a row, got up to [0-9]+ of the coming round in row 2"
    for call in (memory.step, memory.ready):
        assert_refused(memory, ArgumentError, message, lambda call=call: call(known=known))
    memory.end(2)
    memory.seat([0])
    memory.state.advance[:] = 1
    assert memory.step(known=known) and memory.state.status.tolist() == [served + 1, 0, 0]


def test_a_forecast_ends_where_a_row_is_full() -> None:
    memory = DecodeMemory(full_and_swa(1 << 14, ROW, ROW, page_size=4), num_rows=1, columns=4, lanes=1, window=8)
    assert memory.admit(0, 6) and memory.pool.stock("full", 10) and memory.pool.stock("swa", 10)
    memory.seat([0])
    # Nobody looks at the mirror in between, which would begin a new forecast.
    assert all(memory.step() for _ in range(10))
    with pytest.raises(ArgumentError, match="^rows: expected at most 16 tokens in a row, got up to 17 of the coming round in row 0"):
        memory.step()
    assert memory.state.status.tolist() == [10, 0, 0] and memory.check() == []


def test_rounds_in_a_row_that_nobody_hears_of_stop_before_a_row_may_be_full() -> None:
    memory = DecodeMemory(full_and_swa(1 << 14, ROW, ROW, page_size=4), num_rows=1, columns=6, lanes=1, window=8, lookahead=2)
    assert memory.admit(0, 4)
    assert memory.pool.stock("full", 10) and memory.pool.stock("swa", 10)
    memory.seat([0])
    rounds = [0, *[2] * 8]
    for advance in rounds:
        memory.state.advance[:] = advance
        assert memory.step(known=False)
    assert memory.mirror.high.lengths[0] == 22
    assert_refused(memory, ArgumentError, "rows: expected at most 24 tokens", lambda: memory.step(known=False))
    for advance in rounds:
        memory.arrived([advance])
    assert memory.step(known=False) is True and memory.state.status.tolist() == [10, 0, 0]
