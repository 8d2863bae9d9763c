"""Rounds over unified memory: one buffer for FULL and SWA pages, and one launch a round, on a GPU that of a captured graph.

Ends of requests and admissions go through `gpukit.memory` between rounds. Stages as in `split_round`: what was decided is in a `Batch`, and nothing
is read back but by what makes room.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from gpukit.decode.backend import Backend, Meter
from gpukit.decode.lane import LostPages
from gpukit.decode.options import DecodeOptions
from gpukit.decode.rooms import layout_of
from gpukit.decode.scheduler import Batch
from gpukit.errors import Signal
from gpukit.kernels.free_list import DevicePages
from gpukit.memory import DecodeMemory, UnifiedPool

__all__ = ["STAGES", "UnifiedLane"]


class UnifiedLane:
    """One backend's state of a replay.

    Parameters
    ----------
    options : DecodeOptions
        Sizes of pages, layers and batch.
    longest : int
        Tokens of the longest request.
    backend : Backend
        Where the tables live. On a GPU the lane has a stream of its own, on which the step is captured.

    Attributes
    ----------
    waits : int
        How often room had to be made by flushing and moving.
    holes : tuple of int
        Free FULL pages, and SWA pages, between those in use, as the last step left them.
    """

    def __init__(self, options: DecodeOptions, longest: int, backend: Backend):
        self.options = options
        self.backend = backend
        self.meter = Meter(backend)
        self.signal = Signal(like=backend.like)
        self.stream = backend.stream()
        self.waits = 0
        self.holes = 0, 0
        self.seated: list[int] = []
        with self.current():
            self.pool = UnifiedPool(layout_of(options), like=backend.like, bytes=False, signal=self.signal)
            self.memory = DecodeMemory(
                self.pool,
                num_rows=options.batch,
                columns=max(1, -(-longest // options.page_size)),
                lanes=options.batch,
                window=options.window,
            )
            if self.stream is not None:
                from gpukit.launch import warmup

                warmup(subjects=["decode_step"])
                self.memory.capture(self.stream)
        self.bands = {name: self.pool.band(name) for name in ("full", "swa")}

    def current(self) -> AbstractContextManager[Any]:
        """Make the lane's stream the current one: everything that is done to it belongs there."""
        return self.backend.using(self.stream)

    @property
    def moved_pages(self) -> int:
        """Pages that were moved to make room."""
        return self.pool.moved_pages

    def make_room(self) -> bool:
        """Let the next step have its pages, whatever must move."""
        self.waits += 1
        return self.memory.ready(relieve=True)

    def admit(self, row: int, length: int) -> bool:
        """Admit a request, whatever must move."""
        if self.memory.admit(row, length):
            return True
        self.waits += 1
        return self.memory.admit(row, length, relieve=True)

    def tables(self) -> dict[str, Any]:
        """Every array that two backends must agree on after a round, by name."""
        state = self.memory.state
        tables = {f"{name}.{table}": getattr(band, table) for name, band in self.bands.items() for table in ("v2p", "p2v")}
        spans = {f"{name} span": np.array([band.low, band.high]) for name, band in self.bands.items()}
        return tables | spans | {
            "rows": state.rows,
            "lengths": state.lengths,
            "pages of the requests": state.pages,
            "retired pages": state.retired,
            "locations": state.locations,
            "kv_lengths": state.kv_lengths,
            "cu_lengths": state.cu_lengths,
            "full page table": state.full_table,
            "swa page table": state.swa_table,
        }  # fmt: skip

    def free_pages(self) -> dict[str, np.ndarray]:
        """Every free id, and the holes of both bands, in the order of use, on the host. Waits for the device: for checks only."""
        virtual = self.bands["full"].virtual
        assert virtual is not None
        return {"virtual": self._contents(virtual), **{name: self._contents(band.holes) for name, band in self.bands.items()}}

    def _contents(self, pages: DevicePages) -> np.ndarray:
        head, tail = self.backend.to_host(pages.counters).tolist()
        ring = self.backend.to_host(pages.ring)
        return np.asarray(ring[np.arange(head, tail) % pages.capacity])


def refresh(batch: Batch, lane: UnifiedLane) -> None:
    """Collect what the host has heard of the lists' lengths."""
    lane.meter("UnifiedPool.refresh", lane.pool.refresh)


def preempt(batch: Batch, lane: UnifiedLane) -> None:
    """Give back the pages of preempted requests."""
    for running in batch.preempted:
        lane.meter("DecodeMemory.end", lane.memory.end, running.row)


def admit(batch: Batch, lane: UnifiedLane) -> None:
    """Bind pages for the prompts of admitted requests: all of them in FULL, those inside the window in SWA."""
    for running in batch.admitted:
        if not lane.meter("DecodeMemory.admit", lane.admit, running.row, running.prompt):
            raise LostPages(f"the pages of a prompt of {running.prompt} tokens must fit, {lane.pool!r} has no room for them")


def seat(batch: Batch, lane: UnifiedLane) -> None:
    """Say which request is in which lane, where that has changed."""
    rows = [running.row for running in batch.running]
    # A row may have changed hands.
    if batch.admitted or rows != lane.seated:
        lane.meter("DecodeMemory.seat", lane.memory.seat, rows)
        lane.seated = rows


def step(batch: Batch, lane: UnifiedLane) -> None:
    """The round's memory work: pages, tombstones, locations, lengths, page tables."""
    memory, meter = lane.memory, lane.meter
    served = meter("DecodeMemory.step", memory.step)
    if not served and meter("DecodeMemory.ready", lane.make_room):
        served = meter("DecodeMemory.step", memory.step)
    if not served:
        raise LostPages(f"{batch.new_pages} pages of each kind must fit, {lane.pool!r} has no room for them")
    full, swa = lane.bands["full"], lane.bands["swa"]
    lane.holes = full.hole_count, swa.hole_count


def finish(batch: Batch, lane: UnifiedLane) -> None:
    """Give back the pages of requests that have all their tokens."""
    for running in batch.finished:
        lane.meter("DecodeMemory.end", lane.memory.end, running.row)


STAGES = [refresh, preempt, admit, seat, step, finish]
