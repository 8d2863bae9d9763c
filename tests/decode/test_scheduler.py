"""The scheduler on its own: page counts that never go wrong, order, preemption of the youngest, and an end to every trace."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpukit.decode.options import DecodeOptions
from gpukit.decode.rooms import UnifiedRoom, layout_of
from gpukit.decode.scheduler import Scheduler
from gpukit.decode.trace import Request
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.memory import UnifiedPool


def requests_of(*lengths: tuple[int, int]) -> list[Request]:
    return [Request(index, prompt, generate) for index, (prompt, generate) in enumerate(lengths)]


def pages_held(scheduler: Scheduler) -> tuple[int, int]:
    """FULL and SWA pages that the running requests hold, by counting tokens."""
    size = scheduler.page_size
    full = sum(len({token // size for token in range(running.length)}) for running in scheduler.running)
    swa = sum(len({token // size for token in range(running.frontier, running.length)}) for running in scheduler.running)
    return full, swa


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), max_size=12),
    page_size=st.integers(1, 8),
    window=st.integers(1, 20),
    batch=st.integers(1, 5),
    pages=st.integers(1, 30),
    swa_pages=st.integers(1, 20),
    memory=st.sampled_from(["unified", "split"]),
)
def test_every_trace_ends_with_every_page_free(lengths, page_size, window, batch, pages, swa_pages, memory):
    options = DecodeOptions(
        memory=memory, page_size=page_size, window=window, batch=batch, pages=pages, swa_pages=swa_pages, full_layers=2, swa_layers=3
    )
    scheduler = Scheduler(options, requests_of(*lengths))
    runnable = [request for request in requests_of(*lengths) if scheduler.fits(request)]
    answered: dict[int, int] = {}
    while not scheduler.done:
        batch_of_round = scheduler.plan()
        assert scheduler.room.holds(scheduler.used, scheduler.swa_used)
        assert pages_held_now(scheduler) == (scheduler.used, scheduler.swa_used)
        assert not (batch_of_round.preempted and batch_of_round.admitted)
        order = [running.request.index for running in batch_of_round.running]
        assert order == sorted(order) and len(set(order)) == len(order) <= batch
        rows = [running.row for running in batch_of_round.running]
        assert len(set(rows)) == len(rows) and set(rows) <= set(range(batch))
        for running in batch_of_round.running:
            answered[running.request.index] = answered.get(running.request.index, 0) + 1
        scheduler.commit(batch_of_round)
        assert pages_held(scheduler) == (scheduler.used, scheduler.swa_used)
        assert scheduler.rounds <= sum(generate for _, generate in lengths)
    assert (scheduler.used, scheduler.swa_used) == (0, 0)
    assert answered == {request.index: request.generate for request in runnable}
    assert (scheduler.finished, scheduler.skipped) == (len(runnable), len(lengths) - len(runnable))


def pages_held_now(scheduler: Scheduler) -> tuple[int, int]:
    """The same within a round, before pages that leave the window are free again."""
    full, swa = pages_held(scheduler)
    return full, swa + sum((running.frontier - running.retired_from) // scheduler.page_size for running in scheduler.running)


def test_the_youngest_gives_way_and_comes_back_with_what_it_had():
    options = DecodeOptions(memory="split", page_size=4, window=64, batch=4, pages=4, swa_pages=4)
    scheduler = Scheduler(options, requests_of((4, 9), (3, 9), (1, 1)))
    rounds = []
    while not scheduler.done:
        batch = scheduler.plan()
        rounds.append([[running.request.index for running in group] for group in (batch.running, batch.preempted, batch.admitted)])
        if batch.preempted:
            assert [running.length for running in batch.preempted] == [7]
        scheduler.commit(batch)
    # Requests 0 and 1 hold two pages each when request 0 opens its third; request 1 returns when request 0 has ended.
    assert rounds[:4] == [[[0, 1, 2], [], [0, 1, 2]], [[0, 1], [], []], [[0, 1], [], []], [[0, 1], [], []]]
    assert rounds[4:9] == [[[0], [1], []], [[0], [], []], [[0], [], []], [[0], [], []], [[0], [], []]]
    assert rounds[9:] == [[[1], [], [1]], [[1], [], []], [[1], [], []], [[1], [], []], [[1], [], []]]
    assert (scheduler.preemptions, scheduler.prompt_tokens) == (1, 4 + 3 + 1 + 7)


@pytest.mark.parametrize(
    ("pages", "swa_pages", "fits"),
    [(5, 4, True), (4, 4, False), (5, 3, False)],
    ids=["just", "one FULL page short", "one SWA page short"],
)
def test_requests_too_large_for_the_pools_are_skipped(pages, swa_pages, fits):
    # 17 tokens are 5 pages of 4; a window of 8 tokens is 2 whole pages, the one that is opened, and the one that leaves in the same round.
    options = DecodeOptions(memory="split", page_size=4, window=8, batch=1, pages=pages, swa_pages=swa_pages)
    scheduler = Scheduler(options, requests_of((9, 8)))
    assert (scheduler.skipped, scheduler.done) == (int(not fits), not fits)


@settings(deadline=None, max_examples=60)
@given(
    pages=st.integers(1, 40),
    swa_pages=st.integers(1, 20),
    page_size=st.sampled_from([1, 3, 16]),
    layers=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)
def test_unified_room_is_what_a_pool_can_hold(pages, swa_pages, page_size, layers):
    options = DecodeOptions(pages=pages, swa_pages=swa_pages, page_size=page_size, full_layers=layers[0], swa_layers=layers[1])
    room, pool = UnifiedRoom(layout_of(options)), UnifiedPool(layout_of(options), bytes=False)
    assert room.holds(pages, swa_pages)
    for full in range(room.most[0] + 2):
        # A request never has more SWA pages than FULL ones, and the pool refuses to be asked.
        for swa in {min(swa, full) for swa in (0, 1, swa_pages, room.most[1], room.most[1] + 1)}:
            assert room.holds(full, swa) == pool.fits({"full": full, "swa": swa}, relieve=True), (full, swa)


def test_a_buffer_holds_what_its_split_holds_and_other_proportions():
    requests = requests_of(*[(40, 8)] * 6)
    options = DecodeOptions(page_size=4, window=8, batch=6, pages=24, swa_pages=26, full_layers=1, swa_layers=1)
    rounds = {}
    for memory in ("unified", "split"):
        scheduler = Scheduler(DecodeOptions(**{**vars(options), "memory": memory}), requests)
        while not scheduler.done:
            scheduler.commit(scheduler.plan())
        rounds[memory] = scheduler.rounds
    # Two requests of 12 FULL pages at a time, against one more in the bytes that SWA does not need.
    assert rounds == {"unified": 16, "split": 24}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("page_size", 0, "page_size: expected a number from 1 to"),
        ("window", 0, "window: expected a number from 1 to"),
        ("batch", -1, "batch: expected a number from 1 to .* got -1"),
        ("pages", 2**24 + 1, "pages: expected a number from 1 to 16777216, got 16777217"),
        ("swa_pages", 1.5, "swa_pages: expected a whole number, got 1.5"),
        ("requests", 0, "requests: expected"),
        ("rounds", True, "rounds: expected a whole number, got True"),
        ("seed", -1, "seed: expected a number from 0 to"),
        ("check_every", -1, "check_every: expected"),
        ("memory", "shared", "memory: expected one of unified, split, got 'shared'"),
        ("swa_layers", 0, "swa_layers: expected a number from 1 to"),
        ("backend", "cuda", "backend: expected one of auto, numpy, gpu, got 'cuda'"),
    ],
)
def test_options_are_refused_by_name(name, value, error):
    with pytest.raises(ArgumentError, match=error) as caught:
        DecodeOptions(**{name: value})
    assert isinstance(caught.value, ArgumentTypeError) == isinstance(value, float | bool)


def test_split_memory_has_no_mirror():
    with pytest.raises(ArgumentError, match="debug_mirror: expected unified memory, of which the host keeps a mirror, got split"):
        DecodeOptions(memory="split", debug_mirror=True)
