"""A block of the Numba simulator whose threads take turns: several times faster than Numba's own, which polls, and the same every time.

Each thread runs until it reaches a barrier or ends, then hands over to the next. The order turns round at every barrier, so a kernel that
lacks a barrier gives a wrong result in one direction or the other. A thread that waits for another one without a barrier hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np


class Lane(threading.Thread):
    """One simulated thread after another. Numba's `cuda` module reads `threadIdx` and `blockIdx` from it, and calls `syncthreads`."""

    block: Block
    body: Callable[[], None]
    blockIdx: Any
    threadIdx: Any
    thread_id: int
    ended: bool

    def __init__(self) -> None:
        super().__init__(daemon=True)
        # Held, except at the moment in which the turn is passed on.
        self.turn = threading.Lock()
        self.turn.acquire()

    def run(self) -> None:
        while True:
            self.turn.acquire()
            try:
                self.body()
            except BaseException as error:
                self.block.failures.append((self.thread_id, error))
            self.ended = True
            self.block.hand_over()

    def syncthreads(self) -> None:
        self.block.hand_over()
        self.turn.acquire()
        if self.block.failures:
            raise SystemExit


# Starting a thread takes longer than most of them run. The simulator runs one block at a time.
_lanes: list[Lane] = []


class Block:
    """Stands in for Numba's `BlockManager`."""

    def __init__(self, function: Callable[..., None], grid_dim: Any, block_dim: Any, debug: bool):
        self._function = function
        self._block_dim = block_dim
        self._waiting: list[Lane] = []
        self._round_ended = threading.Lock()
        self._round_ended.acquire()
        self.failures: list[tuple[int, BaseException]] = []

    def hand_over(self) -> None:
        """Let the next thread of this round run; after the last one the block goes on to the next round."""
        (self._waiting.pop().turn if self._waiting else self._round_ended).release()

    def run(self, block_point: Any, *args: Any) -> None:
        from numba.cuda.simulator.kernelapi import Dim3

        points = list(np.ndindex(*self._block_dim))
        while len(_lanes) < len(points):
            _lanes.append(Lane())
            _lanes[-1].start()
        lanes = _lanes[: len(points)]
        for thread_id, (lane, point) in enumerate(zip(lanes, points, strict=True)):
            lane.block, lane.body, lane.ended = self, lambda: self._function(*args), False
            lane.blockIdx, lane.threadIdx, lane.thread_id = Dim3(*block_point), Dim3(*point), thread_id
        while lanes:
            self._waiting = lanes[::-1]
            self.hand_over()
            self._round_ended.acquire()
            lanes = [lane for lane in reversed(lanes) if not lane.ended]
        for thread, error in self.failures:
            if not isinstance(error, SystemExit):
                raise type(error)(f"thread {thread} of block {tuple(block_point)}: {error}") from error
