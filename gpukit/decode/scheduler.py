"""Who runs in a round: admission, preemption and the page counts, decided on the host from lengths alone.

A scheduler reads no array. It knows how many pages each step takes and gives back, so its counts are exact without asking
the device; how many fit is the business of `rooms`, and which pages those are that of a lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from gpukit.decode.options import DecodeOptions
from gpukit.decode.rooms import Room, room_of
from gpukit.decode.trace import Request
from gpukit.errors import ArgumentError
from gpukit.kernels.sliding_window import frontier

__all__ = ["Batch", "Running", "Scheduler"]


@dataclass(slots=True)
class Running:
    """A request that holds pages.

    Attributes
    ----------
    request : Request
        What it asks for.
    row : int
        Its request row.
    prompt : int
        Tokens placed when it was admitted: the trace's prompt, and after a preemption what it had generated too.
    length : int
        Tokens placed so far, the one of this round included.
    frontier : int
        First token whose SWA page is still bound; page-aligned.
    retired_from : int
        Frontier before this round: the pages of [retired_from, frontier) leave the window in this round, behind the tokens before its own.
    """

    request: Request
    row: int
    prompt: int
    length: int
    frontier: int
    retired_from: int


@dataclass
class Batch:
    """One round's decisions, the same for every backend. Stages read it and change nothing in it.

    Attributes
    ----------
    number : int
        The round, from 0.
    running : list of Running
        Lanes of the round, oldest first: one token each.
    admitted : list of Running
        Those of `running` whose prompt is placed in this round; the last lanes.
    preempted : list of Running
        Requests that give their pages back before anything else, youngest first.
    finished : list of Running
        Those of `running` whose last token is placed in this round.
    new_pages : int
        Lanes whose token opens a page.
    """

    number: int
    running: list[Running]
    admitted: list[Running] = field(default_factory=list)
    preempted: list[Running] = field(default_factory=list)
    finished: list[Running] = field(default_factory=list)
    new_pages: int = 0

    @property
    def retired_pages(self) -> bool:
        """Whether any page leaves the window in this round."""
        return any(lane.retired_from < lane.frontier for lane in self.running)

    def control(self, capacity: int) -> np.ndarray:
        """The numbers the ops of a round need, for one upload.

        Returns
        -------
        int64 array, shape (4, capacity)
            Request rows, lengths, and the token ranges that leave the window (starts, stops). Lanes without a request are 0.
        """
        control = np.zeros((4, capacity), np.int64)
        lanes = [(lane.row, lane.length, lane.retired_from, lane.frontier) for lane in self.running]
        control[:, : len(lanes)] = np.array(lanes, np.int64).T
        return control


class Scheduler:
    """Admits in trace order as soon as pages allow, and takes pages back from the youngest when they run out.

    Parameters
    ----------
    options : DecodeOptions
        Sizes of pages, window, pools and batch.
    requests : iterable of Request
        The trace. Requests that could not run even alone are left out and counted in `skipped`.
    room : Room, optional
        How many pages fit, instead of what the options say.

    Attributes
    ----------
    used, swa_used : int
        Pages that are held.

    Notes
    -----
    A request is admitted when there is room for the pages of its prompt and of its first token after the growth of those already
    running, and a row is free. So an admitted request always advances, the oldest is never preempted, and a replay ends. A
    request that gives way waits at the front, and nobody is admitted in the same round: the pages it needs are those that were missing.
    Of a prompt only the pages inside the window are bound in the SWA pool: the others are computed, read by the prompt's own
    attention, and never read again.
    """

    def __init__(self, options: DecodeOptions, requests: Iterable[Request], room: Room | None = None):
        self.page_size = options.page_size
        self.window = options.window
        self.room = room_of(options) if room is None else room
        self.used = self.swa_used = 0
        everyone = list(requests)
        self.waiting = deque(request for request in everyone if self.fits(request))
        self.skipped = len(everyone) - len(self.waiting)
        self.longest = max((request.total for request in self.waiting), default=0)
        self.running: list[Running] = []
        self.rows = list(range(options.batch - 1, -1, -1))
        self.generated: dict[int, int] = {}
        self.rounds = self.finished = self.preemptions = self.tokens = self.prompt_tokens = self.retired = 0

    @property
    def done(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self.running and not self.waiting

    def fits(self, request: Request) -> bool:
        """Whether there is room for the request when it is alone, at its longest."""
        total = self.page_count(request.total)
        # Whole pages of the window, the one that is opened, and the one that leaves in the same round.
        return self.room.holds(total, min(total, self.page_count(self.window) + 2))

    def page_count(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def swa_count(self, running: Running) -> int:
        """SWA pages a request holds."""
        return self.page_count(running.length) - running.frontier // self.page_size

    def plan(self) -> Batch:
        """Decide the next round."""
        batch = Batch(self.rounds, [])
        self._preempt(batch)
        if not batch.preempted:
            self._admit(batch)
        batch.running = list(self.running)
        if not batch.running:
            raise ArgumentError("plan: expected a waiting request, got none")
        self._grow(batch)
        batch.finished = [running for running in batch.running if self._answered(running) == running.request.generate]
        return batch

    def commit(self, batch: Batch) -> None:
        """Close the round: pages of the window and of finished requests are free again."""
        for running in batch.running:
            pages = (running.frontier - running.retired_from) // self.page_size
            self.swa_used -= pages
            self.retired += pages
        for running in batch.finished:
            self._release(running)
        ended = {running.row for running in batch.finished}
        self.running = [running for running in self.running if running.row not in ended]
        self.finished += len(batch.finished)
        self.tokens += len(batch.running)
        self.rounds += 1

    def _answered(self, running: Running) -> int:
        """Tokens generated so far, over all of the request's admissions."""
        return running.length - running.request.prompt

    def _growth(self) -> int:
        """Pages the running requests open with their next token."""
        return sum(1 for running in self.running if running.length % self.page_size == 0)

    def _release(self, running: Running) -> None:
        self.used -= self.page_count(running.length)
        self.swa_used -= self.swa_count(running)
        self.rows.append(running.row)

    def _preempt(self, batch: Batch) -> None:
        while not self.room.holds(self.used + (growth := self._growth()), self.swa_used + growth):
            youngest = self.running.pop()
            self._release(youngest)
            batch.preempted.append(youngest)
            self.generated[youngest.request.index] = self._answered(youngest)
            self.waiting.appendleft(youngest.request)
        self.preemptions += len(batch.preempted)

    def _admit(self, batch: Batch) -> None:
        growth = self._growth()
        while self.waiting and self.rows:
            request = self.waiting[0]
            prompt = request.prompt + self.generated.get(request.index, 0)
            edge = frontier(prompt, self.window, self.page_size)
            candidate = Running(request, self.rows[-1], prompt, prompt, edge, edge)
            opens = 1 if prompt % self.page_size == 0 else 0
            pages, swa_pages = self.page_count(prompt), self.swa_count(candidate)
            growth += opens
            if not self.room.holds(self.used + pages + growth, self.swa_used + swa_pages + growth):
                return
            self.used, self.swa_used = self.used + pages, self.swa_used + swa_pages
            self.waiting.popleft()
            self.rows.pop()
            self.running.append(candidate)
            batch.admitted.append(candidate)
            self.prompt_tokens += prompt

    def _grow(self, batch: Batch) -> None:
        batch.new_pages = self._growth()
        self.used += batch.new_pages
        self.swa_used += batch.new_pages
        for running in batch.running:
            running.length += 1
            running.retired_from = running.frontier
            # It moves at page ends only.
            if (running.length - 1) % self.page_size == 0:
                running.frontier = frontier(running.length - 1, self.window, self.page_size, old=running.frontier)
