"""Whole replays in little memory: clean ones stay clean on every page size and window, and of split memory each planted fault is found and named.

A fault is planted by one more stage at the end of a round, which then touches a lane's arrays the way a wrong kernel would.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpukit import devices
from gpukit.decode import DecodeOptions, Request, backend, run
from gpukit.decode import lane as lane_module
from gpukit.decode import replay as replay_module
from gpukit.decode.lane import Lane
from gpukit.decode.options import MEMORIES
from gpukit.decode.replay import Replay
from gpukit.decode.scheduler import Batch
from gpukit.errors import DeviceError
from gpukit.kernels import page_table
from tests.helpers.fake_device import FakeDevice

REQUESTS = [Request(index, prompt, generate) for index, (prompt, generate) in enumerate([(37, 20), (5, 33), (64, 9), (1, 40), (50, 50)])]
SMALL = DecodeOptions(memory="split", page_size=4, window=12, batch=4, pages=44, swa_pages=14, backend="numpy", check_every=4)
either = pytest.mark.parametrize("small", [SMALL, replace(SMALL, memory="unified", swa_layers=10)], ids=lambda options: options.memory)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("window", [1, 7, 64, 10_000])
def test_tight_memory_preempts_and_stays_clean(page_size, window, memory):
    tokens = 130
    swa_tokens = tokens if window > tokens else 2 * (window + 2 * page_size)
    options = DecodeOptions(
        memory=memory,
        page_size=page_size,
        window=window,
        batch=4,
        full_layers=50,
        swa_layers=1,
        pages=-(-tokens // page_size),
        swa_pages=-(-swa_tokens // page_size),
        backend="numpy",
        check_every=1,
    )
    # The first two open a page at the same time whatever the page size, and only one of them gets it.
    lengths = [(60, 20), (60, 20), (37, 20), (5, 33), (64, 9), (1, 40), (100, 30)]
    report = run(options, [Request(index, *pair) for index, pair in enumerate(lengths)])
    assert report.violations == []
    assert (report.finished, report.skipped, report.stopped) == (len(lengths), 0, "end")
    assert report.tokens_generated == sum(generate for _, generate in lengths)
    assert report.preempted > 0
    assert (report.retired_pages > 0) == (window < 100)
    assert report.checked_rounds == report.rounds and report.checked_tables == report.rounds + 1


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=8),
    page_size=st.integers(1, 9),
    window=st.integers(1, 40),
    batch=st.integers(1, 4),
    pages=st.integers(1, 60),
    swa_pages=st.integers(1, 40),
    seed=st.integers(0, 3),
    memory=st.sampled_from(MEMORIES),
    layers=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_any_replay_is_clean(lengths, page_size, window, batch, pages, swa_pages, seed, memory, layers):
    options = DecodeOptions(
        memory=memory,
        page_size=page_size,
        window=window,
        batch=batch,
        pages=pages,
        swa_pages=swa_pages,
        full_layers=layers[0],
        swa_layers=layers[1],
        seed=seed,
        backend="numpy",
        check_every=3,
        debug_mirror=memory == "unified",
    )
    report = run(options, [Request(index, *pair) for index, pair in enumerate(lengths)])
    assert report.violations == [] and report.finished + report.skipped == len(lengths)


@either
def test_the_report_is_the_same_whatever_is_checked(small):
    reports = [run(replace(small, check_every=every), REQUESTS) for every in (0, 1, 5)]
    facts = [(report.rounds, report.tokens_generated, report.preempted, report.retired_pages, report.timeline) for report in reports]
    assert facts[0] == facts[1] == facts[2]
    assert (reports[0].checked_rounds, reports[0].checked_tables, reports[0].checked_locations) == (0, 0, 0)


@either
def test_a_request_too_large_is_skipped_and_the_others_run(small):
    report = run(small, [Request(0, 1000, 1), *[Request(request.index + 1, request.prompt, request.generate) for request in REQUESTS]])
    assert (report.skipped, report.finished, report.stopped, report.violations) == (1, 5, "end", [])


@either
def test_a_replay_that_skips_every_request_is_whole_but_not_right(small):
    report = run(small, [Request(0, 1000, 1)])
    assert (report.rounds, report.skipped, report.partial, report.ok) == (0, 1, False, False)


Fault = Callable[[Lane], None]


def swap_two(table: np.ndarray) -> None:
    first, second = np.flatnonzero(table > 0)[:2]
    table[[first, second]] = table[[second, first]]


def first_row(lane: Lane) -> np.ndarray:
    return lane.rows[lane.control[0, 0]]


def unbind_oldest(lane: Lane) -> None:
    page = first_row(lane)[lane.control[3, 0]] // lane.options.page_size
    page_table.unbind_into(np.array([page]), lane.swa.v2p, lane.swa.p2v, lane.supplies["swa"].ring)


def replace_free(lane: Lane, page: int) -> None:
    lane.supplies["swa"].list.pages[0] = page


def add_to(array: Callable[[Lane], np.ndarray], place: object, amount: int = 1) -> Fault:
    def fault(lane: Lane) -> None:
        array(lane)[place] += amount

    return fault


FAULTS: dict[str, tuple[Fault, str]] = {
    "two FULL pages exchanged one way": (lambda lane: swap_two(lane.full.v2p), "inverse_tables"),
    "two SWA pages exchanged one way": (lambda lane: swap_two(lane.swa.p2v), "inverse_tables"),
    "sentinel overwritten": (lambda lane: lane.full.v2p.__setitem__(-1, 0), "inverse_tables"),
    "sink overwritten": (lambda lane: lane.swa.p2v.__setitem__(0, 1), "inverse_tables"),
    "page past the table bound": (lambda lane: lane.full.v2p.__setitem__(int(np.flatnonzero(lane.full.v2p > 0)[0]), 999), "inverse_tables"),
    "page unbound too early": (unbind_oldest, "binding"),
    "FULL page taken and dropped": (lambda lane: lane.supplies["full"].list.take(1), "lost_page"),
    "virtual page taken and dropped": (lambda lane: lane.supplies["virtual"].list.take(1), "lost_page"),
    "SWA page freed twice": (lambda lane: lane.supplies["swa"].list.append(lane.supplies["swa"].list.pages[:1]), "double_owner"),
    "page in use freed": (lambda lane: lane.supplies["full"].list.append(lane.full_locations[:1] // 4), "double_owner"),
    "unknown page freed": (lambda lane: lane.supplies["full"].list.append(np.array([99])), "double_owner"),
    "free page replaced by one in use": (lambda lane: replace_free(lane, lane.swa_locations[0] // 4), "lost_page"),
    "page in use in place of a free one": (lambda lane: replace_free(lane, lane.swa_locations[0] // 4), "double_owner"),
    "unknown page in place of a free one": (lambda lane: replace_free(lane, 99), "double_owner"),
    "wrong virtual location": (add_to(lambda lane: lane.locations, 1), "location"),
    "wrong FULL location": (add_to(lambda lane: lane.full_locations, 0), "translation"),
    "wrong SWA location": (add_to(lambda lane: lane.swa_locations, 1), "translation"),
    "idle lane writes": (add_to(lambda lane: lane.full_locations, 3), "translation"),
    "wrong length": (add_to(lambda lane: lane.lengths, 0), "metadata"),
    "wrong cumulative length": (add_to(lambda lane: lane.cu_lengths, -1), "metadata"),
    "wrong FULL page table": (add_to(lambda lane: lane.full_pages, (0, 0)), "metadata"),
    "stale tail of the SWA page table": (add_to(lambda lane: lane.swa_pages, (3, -1)), "metadata"),
    "wrong token in a row": (add_to(first_row, 1), "request_row"),
    "value skipped by an op": (lambda lane: lane.signal.add("unbound"), "skipped_value"),
}


def plant(monkeypatch: pytest.MonkeyPatch, fault: Fault, number: int, name: str = "numpy") -> None:
    """Let the fault happen at the end of one round of split memory on the lanes of a backend."""

    def stage(batch: Batch, lane: Lane) -> None:
        if batch.number == number and lane.backend.name == name:
            fault(lane)

    monkeypatch.setitem(replay_module.STAGES, "split", [*replay_module.STAGES["split"], stage])


@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_found_and_named(monkeypatch, name):
    fault, violation = FAULTS[name]
    plant(monkeypatch, fault, number=7)
    report = run(SMALL, REQUESTS)
    assert report.stopped == "violation" and report.partial and not report.ok
    assert violation in {found.name for found in report.violations}
    # Round 7 is one whose tables are checked; nothing is seen earlier and nothing is played later.
    assert {found.round for found in report.violations} == {7} and report.rounds == 8


@pytest.mark.parametrize("kind", ["full", "swa"])
def test_wrong_prompt_locations_are_found(monkeypatch, kind):
    plant(monkeypatch, lambda lane: getattr(lane.prompts, kind).__setitem__(-1, 3), number=0)
    report = run(SMALL, REQUESTS)
    assert [(found.name, found.round) for found in report.violations] == [("translation", 0)]
    assert f"{kind} prompt locations[" in report.violations[0].message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong FULL location", "full locations[0]: expected"),
        ("virtual page taken and dropped", "virtual pages: expected 44 in all, got"),
        ("SWA page freed twice", "swa pages: expected 14 in all, got"),
    ],
)
def test_cheap_checks_run_in_every_round(monkeypatch, name, message):
    fault, violation = FAULTS[name]
    plant(monkeypatch, fault, number=5)
    report = run(SMALL, REQUESTS)
    assert [(found.name, found.round) for found in report.violations] == [(violation, 5)]
    assert message in report.violations[0].message


def test_bindings_of_written_pages_are_checked_in_every_round(monkeypatch):
    plant(monkeypatch, lambda lane: lane.full.p2v.__setitem__(lane.full_locations[0] // 4, 1), number=5)
    assert {(found.name, found.round) for found in run(SMALL, REQUESTS).violations} == {("inverse_tables", 5)}


def test_tables_are_checked_between_only_every_few_rounds(monkeypatch):
    plant(monkeypatch, FAULTS["sentinel overwritten"][0], number=4)
    assert {found.round for found in run(SMALL, REQUESTS).violations} == {7}


@pytest.mark.parametrize("check_every", [0, 1000])
def test_lost_pages_end_a_replay_even_where_nothing_is_checked(monkeypatch, check_every):
    plant(monkeypatch, lambda lane: lane.supplies["full"].list.take(len(lane.supplies["full"].list)), number=2)
    report = run(replace(SMALL, check_every=check_every), REQUESTS)
    assert report.stopped == "violation" and report.violations[0].name == "lost_page"


def test_the_last_check_sees_what_happened_after_the_last_but_one(monkeypatch):
    clean = run(SMALL, REQUESTS)
    assert clean.rounds % SMALL.check_every != 0
    plant(monkeypatch, FAULTS["sentinel overwritten"][0], number=clean.rounds - 1)
    found = run(SMALL, REQUESTS).violations
    assert found[0].name == "inverse_tables" and found[0].round == clean.rounds - 1


@either
def test_a_limit_of_rounds_ends_a_replay_early(small):
    report = run(replace(small, rounds=6), REQUESTS)
    assert (report.rounds, report.stopped, report.partial, report.ok) == (6, "rounds", True, True)
    assert report.checked_tables == 2 and report.finished < 5


@pytest.mark.parametrize("within_a_round", [False, True])
def test_an_interrupt_leaves_a_partial_report(monkeypatch, within_a_round):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if within_a_round:
        plant(monkeypatch, interrupt, number=3)
        report = run(SMALL, REQUESTS)
    else:
        report = run(SMALL, REQUESTS, progress=lambda ended, requests, rounds: interrupt() if rounds == 3 else None)
    assert (report.stopped, report.partial, report.ok, report.rounds) == ("interrupt", True, True, 3)
    assert report.tokens_generated > 0 and report.ops


@either
def test_progress_counts_to_the_end(small):
    seen: list[tuple[int, int, int]] = []
    report = run(small, [*REQUESTS, Request(5, 1000, 1)], progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (6, 6, report.rounds) and [rounds for _, _, rounds in seen] == list(range(1, report.rounds + 1))


@either
def test_a_device_plays_beside_numpy_and_is_compared(small):
    device = FakeDevice()
    replay = Replay(small, REQUESTS, backend=device)
    report = replay.run()
    assert (report.backend, report.violations, report.finished) == ("gpu", [], 5)
    assert [lane.backend.name for lane in replay.lanes] == ["gpu", "numpy"]
    assert all(len(op.device_us) == len(op.host_ns) for op in replay.lane.meter.times.values())
    assert all(op.device_us_median == 1.0 and op.device_ms_total == pytest.approx(op.calls / 1000) for op in report.ops)


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in ("wrong length", "value skipped by an op")])
def test_a_device_that_differs_is_found(monkeypatch, name):
    plant(monkeypatch, FAULTS[name][0], number=7, name="gpu")
    report = Replay(SMALL, REQUESTS, backend=FakeDevice()).run()
    assert {(found.name, found.round) for found in report.violations} == {("backend_mismatch", 7)}


def test_a_device_that_places_prompts_elsewhere_is_found(monkeypatch):
    plant(monkeypatch, lambda lane: lane.prompts.swa.__setitem__(-1, 3), number=0, name="gpu")
    report = Replay(replace(SMALL, check_every=1), REQUESTS, backend=FakeDevice()).run()
    assert [(found.name, found.round) for found in report.violations] == [("backend_mismatch", 0)]
    assert "gpu against numpy: prompt swa[" in report.violations[0].message


def test_a_device_that_skips_values_is_found(monkeypatch):
    plant(monkeypatch, FAULTS["value skipped by an op"][0], number=7, name="gpu")
    report = Replay(SMALL, REQUESTS, backend=FakeDevice()).run()
    assert [(found.name, found.round) for found in report.violations] == [("skipped_value", 7)]


@either
def test_a_round_reads_nothing_back_and_rarely_waits(monkeypatch, small):
    device = FakeDevice()
    monkeypatch.setattr(replay_module, "SETTLE_ROUNDS", 10**9)
    replay = Replay(replace(small, check_every=0), REQUESTS, backend=device)
    before = device.reads
    while not replay.done:
        replay.step()
    assert device.reads == before and device.waits == 0
    assert replay.lanes == [replay.lane]


class AsyncRing(lane_module.free_list.DevicePages):  # type: ignore[misc]
    """A ring whose length the host learns late, as from a device: one read-back at a time, collected by a later `refresh`."""

    def __init__(self, capacity: int, *, like: object = None):
        super().__init__(capacity, like=like)
        self.arrived_tail = 0
        self.under_way: int | None = None

    def has_arrived(self) -> bool:
        return True

    @property
    def known(self) -> int:
        return self.arrived_tail - int(self.counters[0])

    def refresh(self, *, stream: object = None) -> int:
        if self.under_way is not None and self.has_arrived():
            self.arrived_tail, self.under_way = self.under_way, None
        if self.under_way is None:
            self.under_way = int(self.counters[1])
            self.started()
        return self.known

    def started(self) -> None:
        pass


def slow_ring(fake: FakeDevice) -> type[AsyncRing]:
    """A ring whose read-backs arrive only when somebody waits for the device."""

    class SlowRing(AsyncRing):
        def has_arrived(self) -> bool:
            return fake.waits > self.waits_at_start

        def started(self) -> None:
            self.waits_at_start = fake.waits

    return SlowRing


def test_late_ring_lengths_cost_waits_and_change_nothing(monkeypatch):
    prompt = run(SMALL, REQUESTS)
    device = FakeDevice()
    monkeypatch.setattr(lane_module.free_list, "DevicePages", slow_ring(device))
    replay = Replay(replace(SMALL, check_every=0), REQUESTS, backend=device)
    late = replay.run()
    assert late.waits > 0 and prompt.waits == 0
    assert (late.stopped, late.rounds, late.finished, late.timeline) == ("end", prompt.rounds, prompt.finished, prompt.timeline)


def test_asking_ahead_saves_waits(monkeypatch):
    monkeypatch.setattr(lane_module.free_list, "DevicePages", AsyncRing)
    waits = {}
    for ahead in (True, False):
        if not ahead:
            monkeypatch.setattr(lane_module.PageSupply, "stock", lambda supply, low: None)
        report = run(SMALL, REQUESTS)
        assert report.violations == []
        waits[ahead] = report.waits
    assert waits[True] < waits[False]


def test_pages_are_handed_out_shuffled_and_each_once():
    orders = [lane_module.shuffled_pages(50, seed, kind).tolist() for seed in (0, 1) for kind in (0, 1, 2)]
    assert all(sorted(order) == list(range(1, 51)) for order in orders)
    assert len({tuple(order) for order in orders}) == 6 and list(range(1, 51)) not in orders
    assert lane_module.shuffled_pages(50, 1, 2).tolist() == orders[-1]


def test_a_missing_gpu_is_refused_by_name_and_auto_does_without(monkeypatch):
    monkeypatch.setattr(backend, "_missing_for_gpu", lambda: "no CUDA device")
    with pytest.raises(DeviceError, match="backend: expected a CUDA device and the GPU stack, got no CUDA device"):
        run(DecodeOptions(backend="gpu"), REQUESTS)
    report = run(replace(SMALL, backend="auto"), REQUESTS)
    assert (report.backend, report.backend_reason) == ("numpy", "no CUDA device")


@pytest.mark.parametrize(
    ("missing", "reason"),
    [("driver", "no NVIDIA driver"), ("device", "no CUDA device"), ("cupy", r"no CuPy \(.*\); install gpukit with the extra")],
)
def test_what_keeps_a_replay_off_the_gpu_is_said(monkeypatch, missing, reason):
    def driver() -> None:
        if missing == "driver":
            raise DeviceError("no NVIDIA driver on this machine")

    monkeypatch.setattr(devices, "driver", driver)
    monkeypatch.setattr(devices, "count", lambda: 0 if missing == "device" else 1)
    monkeypatch.setitem(sys.modules, "cupy", None if missing == "cupy" else object())
    chosen, why = backend.choose_backend("auto")
    assert chosen.name == "numpy" and re.match(reason, why)
