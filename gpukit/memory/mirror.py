"""The host's mirror of decode steps: lengths, pages and tombstones of every request, by arithmetic alone.

While the host knows every advance the mirror is exact. Under speculation it holds bounds, which tighten when accepted counts arrive.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpukit.errors import ArgumentError
from gpukit.kernels.decode_step import MOST_RETIRED
from gpukit.memory._arrays import whole_numbers

__all__ = ["Counts", "Mirror"]


@dataclass
class Counts:
    """Of each row: tokens, pages that it holds, and pages that left the window. int64 arrays, shape (num_rows,)."""

    lengths: np.ndarray
    pages: np.ndarray
    retired: np.ndarray

    def copy(self) -> Counts:
        """The same numbers in arrays of their own."""
        return Counts(self.lengths.copy(), self.pages.copy(), self.retired.copy())


class Mirror:
    """Arithmetic over rounds.

    Parameters
    ----------
    num_rows, lookahead, page_size : int
    window : int or None
        As for `decode_step`.

    Attributes
    ----------
    low, high : Counts
        Bounds of what the device has after the rounds launched so far; equal while every advance is known.
    waiting : int
        Rounds whose accepted counts have not arrived.

    Examples
    --------
    >>> mirror = Mirror(2, 1, 4, None)
    >>> mirror.set(0, length=3, pages=1, retired=0)
    >>> mirror.round(np.array([0]), np.array([1])), mirror.round(np.array([0]), np.array([1]))
    ((1, 0), (0, 0))
    """

    def __init__(self, num_rows: int, lookahead: int, page_size: int, window: int | None):
        self.lookahead, self.page_size, self.window = lookahead, page_size, window
        self.known = Counts(*(np.zeros(num_rows, np.int64) for _ in range(3)))
        self.low, self.high = self.known.copy(), self.known.copy()
        # Rows of each round in wait; -1 for those whose request has ended since.
        self._rounds: deque[np.ndarray] = deque()

    @property
    def waiting(self) -> int:
        """Rounds whose accepted counts have not arrived."""
        return len(self._rounds)

    @property
    def exact(self) -> bool:
        """Whether nothing has to arrive."""
        return not self._rounds

    def set(self, row: int, length: int, pages: int, retired: int) -> None:
        """A request begins, or ends with zeros; rounds in wait say nothing about it."""
        for rows in self._rounds:
            rows[rows == row] = -1
        for counts in (self.known, self.low, self.high):
            counts.lengths[row], counts.pages[row], counts.retired[row] = length, pages, retired

    def checked(self, advance: Any, rows: np.ndarray) -> np.ndarray:
        """What these rows advance by, as int64, after a check of type, shape and range.

        A request advances by at most the lookahead, and not beyond the pages that it holds: a new one holds those of its prompt alone.
        """
        counts = whole_numbers(advance, "advance")
        if counts.shape != rows.shape:
            raise ArgumentError(f"advance: expected shape ({len(rows)},), one count a seated request, got {counts.shape}")
        ended = rows < 0
        room = np.minimum(self.known.pages[rows] * self.page_size - self.known.lengths[rows], self.lookahead)
        wrong = (counts < 0) | (counts > self.lookahead) | ~ended & (counts > room)
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            most = self.lookahead if ended[lane] else int(room[lane])
            raise ArgumentError(f"advance: expected 0 to {most} tokens for the request in lane {lane}, got {counts[lane]}")
        return counts.astype(np.int64)

    def need(self, rows: np.ndarray, advance: np.ndarray | None = None) -> int:
        """Pages that the next round pops, or the most that it may pop where the advance is not known, whatever rounds in wait have popped."""
        step = self.lookahead if advance is None else advance
        pages = -(-(self.high.lengths[rows] + step + self.lookahead) // self.page_size)
        most = np.maximum(pages - self.low.pages[rows], 0)
        if self._rounds:
            # A row that has had a round holds pages for its lookahead already, and takes no more than that many tokens fill.
            had_one = self.low.lengths[rows] < self.high.lengths[rows]
            most = np.where(had_one, np.minimum(most, -(-self.lookahead // self.page_size)), most)
        return int(most.sum())

    def forecast(self, rows: np.ndarray, rounds: int) -> tuple[list[int], list[int]] | None:
        """Pages popped and pushed in each of the next rounds if every row advances by 1 in each; None where a row has something to catch up with.

        One count over the rows, whatever the number of rounds: a row takes a page every `page_size` rounds, and gives one back as often.

        Examples
        --------
        >>> mirror = Mirror(2, 1, 4, 4)
        >>> mirror.set(0, length=6, pages=2, retired=0)
        >>> mirror.forecast(np.array([0]), 8)
        ([0, 1, 0, 0, 0, 1, 0, 0], [0, 1, 0, 0, 0, 1, 0, 0])
        """
        found = self.turns(rows, rounds)
        return None if found is None else (found[0].tolist(), found[1].tolist())

    def turns(self, rows: np.ndarray, rounds: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The same as int64 arrays."""
        if self._rounds:
            return None
        length, size = self.known.lengths[rows], self.page_size
        needs = _every(self.known.pages[rows] * size - length - self.lookahead, size, rounds)
        if needs is None or self.window is None:
            return None if needs is None else (needs, np.zeros(rounds, np.int64))
        # A page leaves when the length reaches its end, and the pages of the window behind that.
        kept = -(-self.window // size) + 1
        gives = _every((self.known.retired[rows] + kept) * size - length - 1, size, rounds)
        return None if gives is None else (needs, gives)

    def skip(self, rows: np.ndarray, rounds: int) -> None:
        """So many rounds in which every row advanced by 1, all known."""
        counts = self.known
        before = counts.retired[rows]
        self._advance(counts, rows, rounds)
        if self.window is not None:
            edge = np.maximum(counts.lengths[rows] // self.page_size * self.page_size - self.window, 0) // self.page_size
            counts.retired[rows] = np.minimum(np.maximum(edge, before), before + MOST_RETIRED * rounds)
        self.low, self.high = counts.copy(), counts.copy()

    def round(self, rows: np.ndarray, advance: np.ndarray | None) -> tuple[int, int]:
        """A round of these rows; `advance` is None where only the device knows.

        Returns
        -------
        popped : int
            Pages popped, or the most that may have been.
        pushed : int
            Pages pushed back, or the least that must have been.
        """
        before = int(self.high.pages[rows].sum()), int(self.low.retired[rows].sum())
        if advance is not None and self._rounds:
            raise ArgumentError(f"advance: expected None while {len(self._rounds)} rounds wait for their counts, got counts")
        if advance is None:
            self._rounds.append(rows.copy())
            self._advance(self.low, rows, 0)
            self._advance(self.high, rows, self.lookahead)
        else:
            self._advance(self.known, rows, advance)
            for counts in (self.low, self.high):
                counts.lengths[rows], counts.pages[rows], counts.retired[rows] = (
                    self.known.lengths[rows], self.known.pages[rows], self.known.retired[rows],
                )  # fmt: skip
        return int(self.high.pages[rows].sum()) - before[0], int(self.low.retired[rows].sum()) - before[1]

    def arrive(self, advance: Any) -> None:
        """The counts of the oldest round in wait, one a row of it; those of requests that have ended since are nothing."""
        if not self._rounds:
            raise ArgumentError("advance: expected no counts, because no round waits for its own, got some")
        advance = self.checked(advance, self._rounds[0])
        rows = self._rounds.popleft()
        live = rows >= 0
        self._advance(self.known, rows[live], advance[live])
        self.low, self.high = self.known.copy(), self.known.copy()
        for later in self._rounds:
            later = later[later >= 0]
            self._advance(self.low, later, 0)
            self._advance(self.high, later, self.lookahead)

    def disagreements(self, device: Counts, rows: np.ndarray) -> list[str]:
        """Where the device's counts of these rows are not what they must be, or not within the bounds."""
        found = []
        for name in ("lengths", "pages", "retired"):
            low, high, there = getattr(self.low, name), getattr(self.high, name), getattr(device, name)
            for row in rows[(there[rows] < low[rows]) | (there[rows] > high[rows])][:3]:
                expected = str(low[row]) if low[row] == high[row] else f"{low[row]} … {high[row]}"
                found.append(f"{name}[{row}]: expected {expected}, got {there[row]}")
        return found

    def _advance(self, counts: Counts, rows: np.ndarray, advance: np.ndarray | int) -> None:
        length = counts.lengths[rows] + advance
        counts.lengths[rows] = length
        counts.pages[rows] = np.maximum(counts.pages[rows], -(-(length + self.lookahead) // self.page_size))
        if self.window is not None:
            edge = np.maximum(length // self.page_size * self.page_size - self.window, 0) // self.page_size
            counts.retired[rows] += np.clip(edge - counts.retired[rows], 0, MOST_RETIRED)


def _every(first: np.ndarray, period: int, rounds: int) -> np.ndarray | None:
    """How many of the rows have their turn in each round: row i in round ``first[i]``, and again every `period`; None where one is overdue."""
    if len(first) and first.min() < 0:
        return None
    if period >= rounds:
        return np.bincount(first[first < rounds], minlength=rounds)
    whole = -(-rounds // period) * period
    turns = np.bincount(first[first < whole], minlength=whole)
    return turns.reshape(-1, period).cumsum(axis=0).reshape(-1)[:rounds]
