"""What a round over split memory should have done, by a ledger of dictionaries and queues: the independent half of its checks.

The ledger is told only who runs and how many tokens each request has. It calls no op and reads no array of a replay: it
hands out pages from its own queues, keeps its own page dictionaries and works out for itself which pages left the window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gpukit.decode.scheduler import Batch, Running

__all__ = ["Expected", "ExpectedPrompts", "SplitLedger"]


@dataclass
class ExpectedPrompts:
    """Virtual token ids of the round's prompts, packed in lane order, and their locations in both pools; 0 is the sink."""

    tokens: np.ndarray
    full: np.ndarray
    swa: np.ndarray


@dataclass
class Expected:
    """What the ops of a round should have written, one entry per lane."""

    prompts: ExpectedPrompts | None
    locations: list[int]
    full_locations: list[int]
    swa_locations: list[int]
    lengths: list[int]


class SplitLedger:
    """Who has which page, in both pools.

    Parameters
    ----------
    page_size, window : int
        Tokens per page, tokens of the window.
    free : dict of str to iterable of int
        The pages each list ("virtual", "full", "swa") hands out, in order.
    """

    def __init__(self, page_size: int, window: int, free: dict[str, Iterable[int]]):
        self.page_size = page_size
        self.window = window
        self.free = {kind: deque(int(page) for page in pages) for kind, pages in free.items()}
        self.full: dict[int, int] = {}
        self.swa: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}
        self.first_bound: dict[int, int] = {}

    def play(self, batch: Batch) -> Expected:
        """Do what the round's stages do, up to its end of requests, and say what they should have written."""
        for running in batch.preempted:
            self._give_back(running)
        for running in batch.admitted:
            self._place(running)
        prompts = self._prompts(batch.admitted) if batch.admitted else None
        for running in batch.running:
            if (running.length - 1) % self.page_size == 0:
                self._open_page(running, in_window=True)
        for running in batch.running:
            self._retire(running)
        locations = [self._token(running, running.length - 1) for running in batch.running]
        return Expected(
            prompts,
            locations,
            [self._location(self.full, token) for token in locations],
            [self._location(self.swa, token) for token in locations],
            [running.length for running in batch.running],
        )

    def close(self, batch: Batch) -> None:
        """End the requests that have all their tokens."""
        for running in batch.finished:
            self._give_back(running)

    def row(self, running: Running) -> np.ndarray:
        """Every token id of a running request."""
        return self._tokens(self.pages[running.request.index], running.length)

    def page_tables(self, batch: Batch, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """The page tables attention should read: FULL and SWA, idle lanes and pages outside the window at the sink."""
        full, swa = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for lane, running in enumerate(batch.running):
            pages = self.pages[running.request.index]
            full[lane, : len(pages)] = [self.full.get(page, 0) for page in pages]
            swa[lane, : len(pages)] = [self.swa.get(page, 0) for page in pages]
        return full, swa

    def _open_page(self, running: Running, in_window: bool) -> None:
        page = self.free["virtual"].popleft()
        self.pages[running.request.index].append(page)
        self.full[page] = self.free["full"].popleft()
        if in_window:
            self.swa[page] = self.free["swa"].popleft()

    def _place(self, running: Running) -> None:
        self.pages[running.request.index] = []
        gone = 0
        for page in range(-(-running.prompt // self.page_size)):
            in_window = not self._left_window(page, running.prompt)
            gone += not in_window
            self._open_page(running, in_window)
        self.first_bound[running.request.index] = gone

    def _left_window(self, page: int, length: int) -> bool:
        """Whether no later token can see any token of the page: only whole pages behind the last whole page's window."""
        end_of_page = (page + 1) * self.page_size
        return end_of_page + self.window <= length - length % self.page_size

    def _retire(self, running: Running) -> None:
        index, first = running.request.index, self.first_bound[running.request.index]
        # Behind the tokens before that of this round.
        while self._left_window(first, running.length - 1):
            self.free["swa"].append(self.swa.pop(self.pages[index][first]))
            first += 1
        self.first_bound[index] = first

    def _give_back(self, running: Running) -> None:
        for virtual in self.pages.pop(running.request.index):
            self.free["virtual"].append(virtual)
            self.free["full"].append(self.full.pop(virtual))
            if virtual in self.swa:
                self.free["swa"].append(self.swa.pop(virtual))

    def _token(self, running: Running, position: int) -> int:
        page, offset = divmod(position, self.page_size)
        return self.pages[running.request.index][page] * self.page_size + offset

    def _location(self, pool: dict[int, int], token: int) -> int:
        page, offset = divmod(token, self.page_size)
        return pool[page] * self.page_size + offset if page in pool else 0

    def _prompts(self, admitted: list[Running]) -> ExpectedPrompts:
        tokens, full, swa = [], [], []
        for running in admitted:
            pages = self.pages[running.request.index]
            tokens.append(self._tokens(pages, running.prompt))
            full.append(self._tokens([self.full.get(page, 0) for page in pages], running.prompt))
            swa.append(self._tokens([self.swa.get(page, 0) for page in pages], running.prompt))
        return ExpectedPrompts(np.concatenate(tokens), np.concatenate(full), np.concatenate(swa))

    def _tokens(self, pages: list[int], length: int) -> np.ndarray:
        """The first `length` tokens of a list of pages; every token of page 0 is the sink, 0."""
        column = np.array(pages, np.int64)[:, None]
        tokens = np.where(column > 0, column * self.page_size + np.arange(self.page_size), 0)
        return tokens.ravel()[:length]
