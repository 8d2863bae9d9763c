"""Replays over unified memory: each planted fault is found and named, room is made by moving, and a GPU does what NumPy does.

A fault is planted by one more stage at the end of a round, which then touches a lane the way a wrong kernel or a wrong pool would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpukit.decode import DecodeOptions, Request, run
from gpukit.decode import replay as replay_module
from gpukit.decode.replay import Replay
from gpukit.decode.scheduler import Batch
from gpukit.decode.unified import UnifiedLane
from gpukit.decode.unified_ledger import UnifiedLedger
from gpukit.kernels import page_table
from gpukit.memory import DecodeMemory
from tests.helpers.fake_device import FakeDevice

REQUESTS = [Request(index, prompt, generate) for index, (prompt, generate) in enumerate([(37, 20), (5, 33), (64, 9), (1, 40), (50, 50)])]
SMALL = DecodeOptions(page_size=4, window=12, batch=4, pages=44, swa_pages=14, backend="numpy", check_every=4)

Fault = Callable[[UnifiedLane], Any]


def first_row(lane: UnifiedLane) -> int:
    return lane.seated[0]


def swap_two(table: np.ndarray) -> None:
    first, second = np.flatnonzero(table > 0)[:2]
    table[[first, second]] = table[[second, first]]


def add_to(array: Callable[[UnifiedLane], np.ndarray], place: object) -> Fault:
    def fault(lane: UnifiedLane) -> None:
        array(lane)[place] += 1

    return fault


def unbind_oldest(lane: UnifiedLane) -> None:
    state, swa = lane.memory.state, lane.bands["swa"]
    page = state.rows[first_row(lane), state.retired[first_row(lane)]]
    page_table.unbind_into(np.array([page]), swa.v2p, swa.p2v, swa.holes)


def drop_hole(lane: UnifiedLane) -> None:
    band = lane.bands["swa"]
    if not band.holes.known:
        lane.pool.stock("swa", 1)
    band.holes.take(1)


def free_again(lane: UnifiedLane, kind: str) -> None:
    """A page in use goes into the list of its kind."""
    band = lane.bands["full" if kind == "virtual" else kind]
    page = lane.memory.state.rows[first_row(lane), lane.memory.state.pages[first_row(lane)] - 1]
    if kind == "virtual":
        # In place of a free one, so that no count is wrong.
        band.virtual.ring[band.virtual.counters[0] % band.virtual.capacity] = page
    else:
        band.holes.fill(band.v2p[[page]])


def move_silently(lane: UnifiedLane) -> None:
    """Two pages change places in every table, as after a move that the pool does not count."""
    band, state = lane.bands["full"], lane.memory.state
    pages = state.rows[first_row(lane), :2]
    band.v2p[pages] = band.v2p[pages[::-1]]
    band.p2v[band.v2p[pages]] = pages
    state.full_table[0, :2] = state.full_table[0, 1::-1]


def move_more_than_counted(lane: UnifiedLane) -> None:
    move_silently(lane)
    lane.pool.moved_pages += 1


def move_onto_another(lane: UnifiedLane) -> None:
    """A counted move that puts a page where another one is, as its own page table says."""
    lane.memory.state.full_table[0, 0] = lane.memory.state.full_table[0, 1]
    lane.pool.moved_pages += 1


FAULTS: dict[str, tuple[Fault, str]] = {
    "two FULL pages exchanged one way": (lambda lane: swap_two(lane.bands["full"].v2p), "binding"),
    "two SWA pages exchanged one way": (lambda lane: swap_two(lane.bands["swa"].p2v), "binding"),
    "sentinel overwritten": (lambda lane: lane.bands["full"].v2p.__setitem__(-1, 0), "binding"),
    "sink overwritten": (lambda lane: lane.bands["swa"].p2v.__setitem__(0, 1), "pool"),
    "page unbound too early": (unbind_oldest, "binding"),
    "hole taken and dropped": (drop_hole, "lost_page"),
    "FULL page in use freed": (lambda lane: free_again(lane, "full"), "double_owner"),
    "SWA page in use freed": (lambda lane: free_again(lane, "swa"), "double_owner"),
    "id in use freed": (lambda lane: free_again(lane, "virtual"), "double_owner"),
    "unknown page freed": (lambda lane: lane.bands["swa"].holes.fill(np.array([10**6])), "double_owner"),
    "span too wide": (lambda lane: setattr(lane.bands["swa"], "high", lane.bands["swa"].high + 1), "lost_page"),
    "pages moved and not counted": (move_silently, "metadata"),
    "more pages moved than counted": (move_more_than_counted, "binding"),
    "page moved onto another": (move_onto_another, "double_owner"),
    "wrong FULL location": (add_to(lambda lane: lane.memory.state.locations, (0, 0)), "translation"),
    "wrong SWA location": (add_to(lambda lane: lane.memory.state.locations, (1, 0)), "translation"),
    "idle lane writes": (add_to(lambda lane: lane.memory.state.locations, (0, 3)), "translation"),
    "wrong length for attention": (add_to(lambda lane: lane.memory.state.kv_lengths, 0), "metadata"),
    "wrong cumulative length": (add_to(lambda lane: lane.memory.state.cu_lengths, -1), "metadata"),
    "wrong FULL page table": (add_to(lambda lane: lane.memory.state.full_table, (0, 0)), "metadata"),
    "stale tail of the SWA page table": (add_to(lambda lane: lane.memory.state.swa_table, (3, -1)), "metadata"),
    "wrong page in a row": (lambda lane: add_to(lambda lane: lane.memory.state.rows, (first_row(lane), 0))(lane), "request_row"),
    "wrong length of a request": (lambda lane: add_to(lambda lane: lane.memory.state.lengths, first_row(lane))(lane), "mirror"),
    "wrong count of rounds": (add_to(lambda lane: lane.memory.state.status, 0), "mirror"),
    "value skipped by an op": (lambda lane: lane.signal.add("unbound"), "skipped_value"),
}


def plant(monkeypatch: pytest.MonkeyPatch, fault: Fault, number: int, name: str = "numpy") -> None:
    """Let the fault happen at the end of one round on the lanes of a backend."""

    def stage(batch: Batch, lane: UnifiedLane) -> None:
        if batch.number == number and lane.backend.name == name:
            fault(lane)

    monkeypatch.setitem(replay_module.STAGES, "unified", [*replay_module.STAGES["unified"], stage])


@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_found_and_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault, violation = FAULTS[name]
    plant(monkeypatch, fault, number=7)
    report = run(SMALL, REQUESTS)
    assert report.stopped == "violation" and report.partial and not report.ok and report.sharing == []
    assert violation in {found.name for found in report.violations}
    # Round 7 is one whose tables are checked; nothing is seen earlier and nothing is played later.
    assert {found.round for found in report.violations} == {7} and report.rounds == 8


CHEAP = ["wrong FULL location", "wrong cumulative length", "wrong FULL page table", "wrong page in a row", "span too wide"]


@pytest.mark.parametrize("name", CHEAP)
def test_cheap_checks_run_in_every_round(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant(monkeypatch, FAULTS[name][0], number=5)
    assert {found.round for found in run(SMALL, REQUESTS).violations} == {5}


def test_bindings_of_written_pages_are_checked_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda lane: lane.bands["full"].p2v.__setitem__(lane.memory.state.locations[0, 0, 0] // 4, 1), number=5)
    assert {(found.name, found.round) for found in run(SMALL, REQUESTS).violations} == {("inverse_tables", 5)}


def test_a_page_that_somebody_has_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id in use is minted again: found in the round that does so, before any list is looked at."""
    plant(monkeypatch, FAULTS["id in use freed"][0], number=4)
    found = run(replace(SMALL, check_every=1000), REQUESTS).violations
    assert found[0].name == "double_owner" and found[0].message.startswith("new virtual pages: expected pages that nobody has, got")


def test_a_request_that_does_not_give_its_pages_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeMemory, "end", lambda memory, row: None)
    report = run(SMALL, REQUESTS)
    assert report.stopped == "violation" and "lost_page" in {found.name for found in report.violations if "live, got" in found.message}


@pytest.mark.parametrize("debug", [False, True])
def test_the_mirror_is_compared_every_round_when_asked(monkeypatch: pytest.MonkeyPatch, debug: bool) -> None:
    fault, violation = FAULTS["wrong length of a request"]
    plant(monkeypatch, fault, number=5)
    found = run(replace(SMALL, debug_mirror=debug, check_every=4 if debug else 1), REQUESTS).violations
    assert found[0].round == 5 and found[0].name == "mirror"
    assert found[0].message.startswith("numpy: lengths[" if debug else "lengths[")
    monkeypatch.undo()
    assert run(replace(SMALL, debug_mirror=True), REQUESTS).violations == []


@pytest.mark.parametrize("check_every", [0, 1000])
def test_lost_pages_end_a_replay_even_where_nothing_is_checked(monkeypatch: pytest.MonkeyPatch, check_every: int) -> None:
    plant(monkeypatch, lambda lane: lane.pool.alloc("full", lane.pool.schedulable("full"), relieve=True), number=2)
    report = run(replace(SMALL, check_every=check_every), REQUESTS)
    assert report.stopped == "violation" and report.violations[0].name == "lost_page"


def test_bytes_that_belong_to_two_pages_are_found() -> None:
    replay = Replay(SMALL, REQUESTS)
    ledger = replay.checks
    assert isinstance(ledger, UnifiedLedger)
    replay.step()
    assert ledger.tables(0, replay.scheduler.running) == []
    ledger.places["swa"][len(ledger.owned) - 1] = ledger.places["full"].max() // 5
    assert any("bytes: expected SWA pages below byte" in found.message for found in ledger.tables(0, replay.scheduler.running))


TIGHT = replace(SMALL, batch=8, full_layers=5, swa_layers=3, pages=40, swa_pages=16, check_every=1, debug_mirror=True)
MANY = [Request(index, 1 + index * 37 % 90, 1 + index * 53 % 61) for index in range(40)]


def test_room_is_made_by_moving_pages_and_everything_stays_in_its_place() -> None:
    report = run(TIGHT, MANY)
    assert report.violations == [] and report.finished == 40
    assert report.sharing[0].moved_pages > 20 and report.waits > 20 and report.preempted > 0
    assert 0.7 < report.sharing[0].mean_use < report.sharing[0].peak_use <= 1 and 0 < report.sharing[0].mean_holes < report.sharing[0].peak_holes


def test_the_report_compares_with_a_split_of_the_same_bytes() -> None:
    report = run(TIGHT, MANY)
    unified, split = report.sharing
    played = run(replace(TIGHT, memory="split", debug_mirror=False), MANY)
    assert (split.memory, split.rounds, split.preempted, split.skipped) == ("split", played.rounds, played.preempted, played.skipped)
    assert played.sharing == [] and split.peak_tokens == max(played.timeline.tokens)
    assert (unified.memory, unified.rounds, unified.preempted) == ("unified", report.rounds, report.preempted)
    assert unified.mean_tokens > split.mean_tokens and unified.rounds < split.rounds
    assert report.most_pages[0] > TIGHT.pages and report.most_pages[1] > TIGHT.swa_pages


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "value skipped by an op"])
def test_a_device_that_differs_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "wrong count of rounds":
        pytest.skip("the counter is no table; --debug-mirror looks at it")
    plant(monkeypatch, FAULTS[name][0], number=7, name="gpu")
    report = Replay(SMALL, REQUESTS, backend=FakeDevice()).run()
    assert {(found.name, found.round) for found in report.violations} == {("backend_mismatch", 7)}


def test_a_device_that_skips_values_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, FAULTS["value skipped by an op"][0], number=7, name="gpu")
    report = Replay(SMALL, REQUESTS, backend=FakeDevice()).run()
    assert [(found.name, found.round) for found in report.violations] == [("skipped_value", 7)]


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("memory", ["unified", "split"])
def test_the_same_trace_gives_the_same_tables_on_a_gpu(memory: str, page_size: int) -> None:
    """NumPy plays beside the GPU and is checked; every table, list and row is compared after every round."""
    unified = memory == "unified"
    tokens = {"pages": -(-160 // page_size), "swa_pages": -(-64 // page_size) + 4}
    options = replace(TIGHT, memory=memory, page_size=page_size, backend="gpu", debug_mirror=unified, **tokens)
    replay = Replay(options, MANY)
    report = replay.run()
    assert report.violations == [] and report.finished + report.skipped == 40 and report.finished > 30
    assert report.backend == "gpu" and report.checked_tables == report.rounds + 1
    if unified:
        graph = replay.lanes[0].memory._graph
        assert graph is not None and graph.nodes == 1 and (page_size == 64 or report.sharing[0].moved_pages > 0)


@pytest.mark.gpu
def test_a_captured_step_is_an_eager_one() -> None:
    from gpukit.decode.backend import CupyBackend

    class Eager(CupyBackend):
        """Has no stream of its own, so that nothing is captured."""

        def stream(self) -> Any:
            return None

    options = replace(TIGHT, check_every=0, debug_mirror=False)
    captured, eager = Replay(options, MANY, backend=CupyBackend()), Replay(options, MANY, backend=Eager())
    assert captured.lanes[0].memory._graph is not None and eager.lanes[0].memory._graph is None
    while not eager.done:
        tables = []
        for replay in (captured, eager):
            replay.step()
            with replay.lane.current():
                arrays = {name: replay.lane.backend.to_host(array) for name, array in replay.lane.tables().items()}
                tables.append(arrays | {f"free {kind}": pages for kind, pages in replay.lane.free_pages().items()})
        for name, expected in tables[1].items():
            np.testing.assert_array_equal(tables[0][name], expected, err_msg=f"round {eager.scheduler.rounds}: {name}")
    assert captured.done and captured.violations == eager.violations == []


@pytest.mark.gpu
def test_a_round_without_admissions_is_a_graph_launch() -> None:
    """One launch a round, and no room to be made."""
    replay = Replay(replace(SMALL, backend="gpu", pages=200, check_every=0), [Request(index, 8, 40) for index in range(4)])
    launches = 0
    graph = replay.lanes[0].memory._graph
    inner = graph.launch

    def launch(*arguments: Any, **keywords: Any) -> Any:
        nonlocal launches
        launches += 1
        return inner(*arguments, **keywords)

    graph.launch = launch
    report = replay.run()
    assert launches == report.rounds == 40 and report.finished == 4 and report.waits == 0
