"""The memory work of a decode round: device time of the step, and what the round costs the host, beside the same work driven op by op.

Device time is per graph node; every node advances every request by a token, so pages are taken and retired as in a decode. Host time is the wall
clock of issuing a round: the captured step with and without the host's bookkeeping, this package's ops one after another, and Triton's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpukit.kernels import free_list, metadata, page_table, sliding_window
from gpukit.kernels.decode_step import DecodeState, decode_step
from gpukit.kernels.free_list import DevicePages
from gpukit.memory import DecodeMemory, Entry, Part, full_and_swa, full_swa_and_state
from perf.conftest import GPU, on_device, there
from perf.shapes import BATCHES, PAGE_SIZE

STEP_BATCHES = (*BATCHES, 4_096)
CONTEXT, WINDOW, NODES = 2_048, 512, 64
COLUMNS = CONTEXT // PAGE_SIZE + 40
ROW = Entry((Part("k", (8,), "float32"),))


class Batch:
    """Requests of about `CONTEXT` tokens on random pages, and magazines that hold enough for every node of a graph."""

    def __init__(self, lanes: int, lookahead: int = 1):
        rng = np.random.default_rng(lanes)
        lengths = CONTEXT // 2 + rng.integers(0, CONTEXT // 2, lanes)
        held = -(-(lengths + lookahead) // PAGE_SIZE)
        retired = np.maximum(lengths // PAGE_SIZE * PAGE_SIZE - WINDOW, 0) // PAGE_SIZE
        spare = lanes * (NODES * lookahead // PAGE_SIZE + 8)
        size = int(held.sum()) + spare
        rows = np.zeros((lanes, COLUMNS), np.int64)
        virtual, full, swa = (rng.permutation(size) + 1 for _ in range(3))
        used = 0
        tables = [np.array([0, *[-1] * (size + 1)]) for _ in range(4)]
        for lane, (count, gone) in enumerate(zip(held.tolist(), retired.tolist(), strict=True)):
            rows[lane, :count] = virtual[used : used + count]
            page_table.bind(virtual[used : used + count], full[used : used + count], *tables[:2])
            page_table.bind(virtual[used + gone : used + count], swa[used + gone : used + count], *tables[2:])
            used += count
        free_swa = np.flatnonzero(tables[3][1:-1] == -1) + 1
        self.saved = [there(array) for array in (rows, lengths, held, retired, *tables)]
        self.arrays = [array.clone() if GPU else array.copy() for array in self.saved]
        lanes_of = there(np.arange(lanes))
        self.state = DecodeState(
            *(*self.arrays[:4], lanes_of, there(np.full(lanes, lookahead)), lookahead),
            *(there(np.zeros((2, lanes, lookahead), np.int64)), there(np.zeros(lanes, np.int32)), there(np.zeros(lanes + 1, np.int32))),
            *(there(np.zeros((lanes, COLUMNS), np.int32)), there(np.zeros((lanes, COLUMNS), np.int32)), there(np.zeros(3, np.int64))),
        )
        self.full, self.swa = tuple(self.arrays[4:6]), tuple(self.arrays[6:8])
        self.lists = []
        for free in (virtual[used:], full[used:], free_swa):
            pages = DevicePages(size, like=self.arrays[0])
            pages.fill(there(np.ascontiguousarray(free)))
            self.lists.append(pages)
        self.rings = [(pages.ring.clone(), pages.counters.clone()) if GPU else (pages.ring.copy(), pages.counters.copy()) for pages in self.lists]

    def reset(self) -> None:
        """As it was before the first round."""
        for array, saved in zip(self.arrays, self.saved, strict=True):
            array[...] = saved
        for pages, (ring, counters) in zip(self.lists, self.rings, strict=True):
            pages.ring[...], pages.counters[...] = ring, counters

    def step(self) -> None:
        decode_step(self.state, PAGE_SIZE, WINDOW, self.full, self.swa, *self.lists)


@on_device
@pytest.mark.parametrize("lookahead", [1, 4])
@pytest.mark.parametrize("lanes", STEP_BATCHES)
def test_decode_step(device_benchmark: Callable[..., None], lanes: int, lookahead: int) -> None:
    """A step: state, rows and tables of every lane are read, locations, lengths and sums written."""
    batch = Batch(lanes, lookahead)
    moved = lanes * (8 * 3 * 2 + 8 * 2 + 8 + 8 * 2 + 8 * 2 * lookahead + 8)
    device_benchmark(batch.step, moved=moved, nodes=NODES, before_round=batch.reset)
    if GPU:
        batch.reset()
        before = batch.state.status.clone()
        batch.step()
        served, refused, _ = (batch.state.status - before).tolist()
        assert (served, refused) == (1, 0), "the benchmark ran out of pages"


def _memory(lanes: int, stream: int) -> DecodeMemory:
    pages = lanes * COLUMNS
    pool = full_and_swa(2 * pages * PAGE_SIZE * ROW.bytes, ROW, ROW, page_size=PAGE_SIZE, like=there(np.zeros(1, np.int64)), bytes=False)
    memory = DecodeMemory(pool, num_rows=lanes, columns=COLUMNS, lanes=lanes, window=WINDOW)
    for row in range(lanes):
        assert memory.admit(row, 64 + row % 64)
    memory.seat(range(lanes))
    for name in ("full", "swa"):
        assert pool.stock(name, lanes * 30)
    if GPU:
        memory.step()
        memory.capture(stream)
    return memory


@pytest.mark.parametrize("lanes", BATCHES)
def test_host_cost_of_a_captured_round(host_benchmark: Callable[..., None], stream: int, lanes: int) -> None:
    """`DecodeMemory.step`: the graph launch and the host's mirror of it."""
    memory = _memory(lanes, stream)
    host_benchmark(memory.step, host_only=True, batch=40, rounds=30)
    assert memory.check() == []


@pytest.mark.parametrize("lanes", BATCHES)
def test_host_cost_of_the_graph_launch_alone(host_benchmark: Callable[..., None], stream: int, lanes: int) -> None:
    memory = _memory(lanes, stream)
    host_benchmark(memory._launch, host_only=True, batch=40, rounds=30)


class HostDriven:
    """The same round, driven from the host op by op: gpukit's ops, or Triton kernels. Pages come from lists that the host knows."""

    def __init__(self, lanes: int, implementation: str):
        rng = np.random.default_rng(lanes)
        columns, rounds = 64, 3_000
        lengths = 64 + rng.integers(0, 64, lanes)
        pages = lanes * columns
        tokens = np.arange(PAGE_SIZE, (pages + 1) * PAGE_SIZE).reshape(lanes, columns * PAGE_SIZE)
        self.rows, self.lens = there(tokens), there(lengths)
        self.full, self.swa = (tuple(there(table) for table in page_table.empty(pages + 1)) for _ in range(2))
        new = max(lanes // PAGE_SIZE, 1)
        fresh = there(rng.permutation(pages) + 1)
        # The same few pages are bound in every round: what that costs the host is no different.
        self.pages = [fresh[i * new : (i + 1) * new] for i in range(3)]
        self.leaving = there(np.arange(new) * PAGE_SIZE + PAGE_SIZE)
        self.lists = DevicePages(pages, like=self.rows)
        self.starts, self.stops = there(np.zeros(lanes, np.int64)), there(np.zeros(lanes, np.int64))
        zeros = lambda *shape, dtype=np.int64: there(np.zeros(shape, dtype))  # noqa: E731
        self.out, self.full_out, self.swa_out = zeros(lanes), zeros(lanes), zeros(lanes)
        self.tables = zeros(lanes, columns, dtype=np.int32), zeros(lanes, columns, dtype=np.int32)
        self.lengths = zeros(lanes, dtype=np.int32), zeros(lanes + 1, dtype=np.int32)
        self.spaces = metadata.AddressSpaces(self.full[0], swa=self.swa[0])
        self.lanes = there(np.arange(lanes))
        self.turn = itertools.count()
        self.rounds = rounds
        self.triton: Any = None
        if implementation == "triton":
            if not GPU:
                pytest.skip("a peer needs a GPU")
            peer = pytest.importorskip("perf.peers.triton_decode")
            self.triton = peer.Round(self.rows, self.lens, self.full, self.swa, PAGE_SIZE)

    def play(self) -> None:
        if next(self.turn) % 1_000 == 999:
            self.lens -= 999
        if self.triton is not None:
            self.triton.play(*self.pages, self.leaving)
            return
        self.lens += 1
        last = self.rows[self.lanes, self.lens - 2]
        free_list.gather_decode(self.lens, last, self.pages[0], PAGE_SIZE, out=self.out)
        page_table.bind(self.pages[0], self.pages[1], *self.full)
        page_table.bind(self.pages[0], self.pages[2], *self.swa)
        self.rows[self.lanes, self.lens - 1] = self.out
        sliding_window.retire(self.rows, self.starts, self.stops, PAGE_SIZE, *self.swa, self.lists)
        page_table.translate(self.out, self.full[0], PAGE_SIZE, out=self.full_out)
        page_table.translate(self.out, self.swa[0], PAGE_SIZE, out=self.swa_out)
        metadata.decode_metadata(
            *(self.rows, self.lens, self.spaces, PAGE_SIZE),
            lengths_out=self.lengths[0],
            cu_lengths_out=self.lengths[1],
            full_out=self.tables[0],
            swa_out=self.tables[1],
        )


@pytest.mark.parametrize("lanes", BATCHES)
@pytest.mark.parametrize("implementation", ["gpukit", "triton"])
def test_host_cost_of_the_ops_one_by_one(host_benchmark: Callable[..., None], stream: int, lanes: int, implementation: str) -> None:
    """What a round costs the host without the step."""
    host_benchmark(HostDriven(lanes, implementation).play, host_only=True, batch=20, rounds=20)


@pytest.mark.parametrize("moves", ["available", "schedulable"])
@pytest.mark.parametrize("remembered", [True, False])
def test_capacity_query(host_benchmark: Callable[..., None], moves: str, remembered: bool) -> None:
    """A joint query on three bands with holes, remembered and worked out anew. Host arithmetic, the same with and without a GPU."""
    rows = [Entry((Part("k", (width,), "float32"),)) for width in (4_096, 1_024, 500_000)]
    pool = full_swa_and_state(8 << 30, *rows, page_size=16, bytes=False)
    found = pool.alloc_joint({"full": 4_000, "swa": 2_000, "state": 50})
    assert found is not None
    pool.free("full", found["full"][100:900])
    query, ask = {"full": 4, "swa": 2, "state": 1}, getattr(pool, moves)

    def forget_and_ask() -> int:
        pool.chain.epoch.value += 1
        return int(ask(query))

    host_benchmark((lambda: ask(query)) if remembered else forget_and_ask, host_only=True)
