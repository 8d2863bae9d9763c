"""The pool on a GPU: the same traces give the same tables as on NumPy, hot paths do not wait, a captured step is a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from gpukit.memory import DecodeMemory, Entry, Part, UnifiedPool, full_and_swa, full_swa_and_state
from gpukit.memory._arrays import to_host
from tests.helpers.pool_machine import PoolMachine

pytestmark = pytest.mark.gpu

ROW = Entry((Part("k", (8,), "float32"),))
FUSED = Entry((Part("k", (2, 12), "bfloat16", layers=2), Part("v", (2, 7), "bfloat16", layers=2), Part("draft k", (5,), "float32", draft=True)))


@pytest.fixture(params=["cupy", "torch"])
def library(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Callable[[np.ndarray], Any]]]:
    """An empty array of a library, and its copy from the host; on a stream of its own that is current."""
    if request.param == "cupy":
        cupy = pytest.importorskip("cupy")
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            yield cupy.zeros(1, np.int64), cupy.asarray
        return
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield torch.zeros(1, dtype=torch.int64, device="cuda"), lambda values: torch.from_numpy(np.ascontiguousarray(values)).cuda()


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("bands", [2, 3])
def test_the_same_trace_gives_the_same_tables(bands: int, page_size: int) -> None:
    cupy = pytest.importorskip("cupy")
    here, there = PoolMachine(bands, page_size), PoolMachine(bands, page_size, like=cupy.zeros(1, np.int64), to_device=cupy.asarray)
    random = Random(bands * 100 + page_size)
    for number in range(250):
        operation = [random.randrange(1 << 16) for _ in range(4)]
        here.step(*operation)
        there.step(*operation)
        if number % 5 == 4:
            one, other = here.snapshot(), there.snapshot()
            for name, value in one.items():
                if name == "states":
                    assert value == other[name], number
                else:
                    np.testing.assert_array_equal(other[name], value, err_msg=f"{number}: {name}")
    here.check()
    there.check()


def test_hot_paths_do_not_wait(library: tuple[Any, Callable[[np.ndarray], Any]]) -> None:
    """All of them behind a kernel that runs for half a second; it is still running when the last has returned."""
    from gpukit import devices, streams
    from gpukit.kernels import calibration

    like, to_device = library
    pool = full_swa_and_state(1 << 22, ROW, ROW, ROW, page_size=4, like=like)
    handle = streams.current(like)
    bindings = devices.driver()

    def everything() -> None:
        found = pool.alloc_joint({"full": 40, "swa": 40, "state": 2})
        assert found is not None
        ids = found["full"]
        row = (ids[:, None] * 4 + tokens).reshape(-1)
        pool.retire("swa", row[None], first, last, live=2)
        pool.free_segment("full", row[:64], 0, live=16, follower_live=14)
        pool.free("full", ids[16:30], live=14, follower_live=14)
        with pool.free_group():
            pool.free("full", ids[30:32], live=2, follower_live=2)
            pool.free("full", ids[32:40], live=8, follower_live=8)
        pool.free("state", found["state"])
        pool.available({"full": 1, "swa": 1}), pool.schedulable("full"), pool.refresh()

    tokens, first, last = to_device(np.arange(4)), to_device(np.array([0])), to_device(np.array([8]))
    for _ in range(3):
        everything()
    devices.call(bindings.cuStreamSynchronize(handle), "cuStreamSynchronize")
    calibration.sleep(500_000, handle)
    start = time.perf_counter()
    everything()
    took = time.perf_counter() - start
    assert bindings.cuStreamQuery(handle)[0] != 0, f"the hot paths waited: {took * 1e3:.1f} ms"
    devices.call(bindings.cuStreamSynchronize(handle), "cuStreamSynchronize")
    pool.refresh()
    pool.band("full").settle(None)
    assert pool.check() == [] and took < 0.1


def test_a_number_that_was_vouched_for_and_is_wrong_heals() -> None:
    cupy = pytest.importorskip("cupy")
    pool = full_and_swa(1 << 16, ROW, ROW, page_size=4, like=cupy.zeros(1, np.int64))
    ids = pool.alloc("full", 20)
    pool.free("full", ids[:5], live=9)
    for band in pool.chain.bands:
        band.settle(None)
    assert pool.band("full").hole_count == 5 and pool.check() == []
    pool.free("full", ids[5:9])
    pool.band("full").settle(None)
    assert pool.band("full").hole_count == 9


def test_relief_hears_of_frees_that_nobody_vouched_for() -> None:
    """Freed on the device and not yet known to the host: an allocation that may wait finds them."""
    cupy = pytest.importorskip("cupy")
    pool = full_and_swa(1 << 14, ROW, ROW, page_size=4, like=cupy.zeros(1, np.int64))
    ids = pool.alloc("full", pool.available("full"))
    assert pool.alloc("full", 1, relieve=True) is None
    pool.free("full", ids[:50])
    assert pool.alloc("full", 50, relieve=True) is not None and pool.check() == []


def _play(pool: UnifiedPool, captured: bool, rounds: int, lookahead: int) -> tuple[DecodeMemory, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    memory = DecodeMemory(pool, num_rows=70, columns=40, lanes=64, window=20, lookahead=lookahead)
    seen, running = [], []
    if captured:
        import cupy

        import gpukit

        gpukit.warmup(subjects=["decode_step"])
        memory.capture(cupy.cuda.get_current_stream())
    for number in range(rounds):
        if number % 10 == 0:
            for row in running[: len(running) // 3]:
                memory.end(row)
            running = running[len(running) // 3 :]
            for row in range(70):
                if row not in running and len(running) < 64:
                    assert memory.admit(row, int(rng.integers(0, 60)))
                    running.append(row)
            memory.seat(running)
        fresh = number % 10 == 0
        accepted = np.where(np.isin(running, list(memory._fresh)), 0, rng.integers(1, lookahead + 1, len(running))) if fresh else None
        accepted = rng.integers(1, lookahead + 1, len(running)) if accepted is None else accepted
        for band in pool.chain.bands:
            band.settle(None)
        assert memory.step(accepted)
        assert memory.check() == []
        state = memory.state
        seen.append(np.concatenate([to_host(array).reshape(-1) for array in (state.locations, state.kv_lengths, state.cu_lengths, state.full_table)]))
    return memory, seen


@pytest.mark.parametrize("lookahead", [1, 4])
def test_a_captured_step_is_a_round(lookahead: int) -> None:
    """The same decode on NumPy, eager on the device, and by graph launches: the same arrays after every round."""
    cupy = pytest.importorskip("cupy")
    rounds = 60
    expected = _play(full_and_swa(1 << 19, ROW, ROW, page_size=4), False, rounds, lookahead)
    for captured in (False, True):
        with cupy.cuda.Stream(non_blocking=True):
            pool = full_and_swa(1 << 19, ROW, ROW, page_size=4, like=cupy.zeros(1, np.int64))
            memory, seen = _play(pool, captured, rounds, lookahead)
            for number, (here, there) in enumerate(zip(expected[1], seen, strict=True)):
                np.testing.assert_array_equal(there, here, err_msg=f"round {number}")
            assert pool.check() == []
            if captured:
                assert memory._graph is not None and memory._graph.nodes == 1


def as_bits(array: Any) -> Any:
    """bfloat16 as whole numbers, which NumPy's side has for it."""
    import torch

    return array.view(torch.int16) if isinstance(array, torch.Tensor) and array.dtype == torch.bfloat16 else array


def test_views_and_clears_on_the_device(library: tuple[Any, Callable[[np.ndarray], Any]]) -> None:
    like, _ = library
    pool = full_and_swa(1 << 17, FUSED, FUSED, page_size=4, like=like)
    plain = full_and_swa(1 << 17, FUSED, FUSED, page_size=4)
    for side in (pool, plain):
        found = side.alloc_joint({"full": 6, "swa": 6})
        assert found is not None
        for value, part in enumerate(FUSED.parts, 3):
            as_bits(side.view("full", part.name))[...] = value
        side.clear("full", found["full"][2:4], draft_only=True)
        side.clear("full", found["full"][:1])
        side.free("full", found["full"][4:])
        side.compact("full")
    np.testing.assert_array_equal(to_host(pool.buffer), plain.buffer)
