"""How many tokens fit: a request trace decoded from one shared buffer, and from the same bytes split in advance.

The shared buffer is a real `UnifiedPool` with its tables and decode steps, without bytes; a split is counted, page for page by the same arithmetic.
Both admit by one rule. Lengths matter only, not arrival times: every request waits from the beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from gpukit.errors import ArgumentError
from gpukit.memory.compositions import full_and_swa
from gpukit.memory.decode import DecodeMemory
from gpukit.memory.layout import Entry, Part
from gpukit.memory.mirror import Mirror

__all__ = ["HybridShape", "ReplayResult", "compare", "replay_split", "replay_unified", "table"]


class Request(Protocol):
    """What is read of a request: see `gpukit.decode.trace`."""

    @property
    def prompt(self) -> int: ...
    @property
    def generate(self) -> int: ...


@dataclass(frozen=True)
class HybridShape:
    """A hybrid model's attention layers.

    Attributes
    ----------
    full_layers, swa_layers : int
        Layers with full and with sliding-window attention.
    kv_heads, head_dim : int
        Of every layer; K and V in bfloat16.
    window : int
        Tokens of the sliding window.
    page_size : int
        Tokens per page.
    """

    full_layers: int = 10
    swa_layers: int = 50
    kv_heads: int = 8
    head_dim: int = 128
    window: int = 1024
    page_size: int = 64

    def entry(self, layers: int) -> Entry:
        """What a token holds in so many layers."""
        row = (self.kv_heads, self.head_dim)
        return Entry((Part("k", row, "bfloat16", layers=layers), Part("v", row, "bfloat16", layers=layers)))


@dataclass
class ReplayResult:
    """What a replay found.

    Attributes
    ----------
    name : str
        How the bytes were shared.
    finished, skipped, preemptions : int
        Requests that got all their tokens, that could not run even alone, and how often one gave its pages back.
    rounds, tokens : int
        Rounds played, tokens generated.
    peak_tokens, mean_tokens : float
        Tokens held at a time; the mean is over the rounds in which requests were waiting for room.
    peak_share, mean_share : float
        Share of the bytes that live pages take; the mean over the same rounds.
    mean_holes, peak_holes : float
        Share of the spans that is no live page, in those rounds: fragmentation. 0 for a split.
    moved_pages : int
        Pages that were moved to make room.
    findings : list of str
        What the checks found: nothing, if all is well.
    """

    name: str
    finished: int = 0
    skipped: int = 0
    preemptions: int = 0
    rounds: int = 0
    tokens: int = 0
    peak_tokens: int = 0
    mean_tokens: float = 0.0
    peak_share: float = 0.0
    mean_share: float = 0.0
    mean_holes: float = 0.0
    peak_holes: float = 0.0
    moved_pages: int = 0
    findings: list[str] = field(default_factory=list)


class _Memory(Protocol):
    """What the loop asks of a way to share memory."""

    name: str

    @property
    def mirror(self) -> Mirror: ...
    def fits(self, full: int, swa: int, headroom: int) -> bool: ...
    def admit(self, row: int, length: int) -> bool: ...
    def seat(self, rows: Sequence[int]) -> None: ...
    def step(self, fresh: set[int]) -> bool: ...
    def end(self, row: int) -> None: ...
    def shares(self) -> tuple[float, float]: ...
    def check(self) -> list[str]: ...


class _Unified:
    """One buffer."""

    name = "unified"

    def __init__(self, shape: HybridShape, buffer_bytes: int, lanes: int, columns: int):
        full, swa = shape.entry(shape.full_layers), shape.entry(shape.swa_layers)
        self.pool = full_and_swa(buffer_bytes, full, swa, page_size=shape.page_size, bytes=False)
        self.memory = DecodeMemory(self.pool, num_rows=lanes, columns=columns, lanes=lanes, window=shape.window)
        self.bands = self.pool.band("full"), self.pool.band("swa")

    @property
    def mirror(self) -> Mirror:
        return self.memory.mirror

    def fits(self, full: int, swa: int, headroom: int) -> bool:
        return self.pool.fits({"full": full + headroom, "swa": swa + headroom}, relieve=True)

    def admit(self, row: int, length: int) -> bool:
        return self.memory.admit(row, length, relieve=True)

    def seat(self, rows: Sequence[int]) -> None:
        self.memory.seat(rows)

    def step(self, fresh: set[int]) -> bool:
        return self.memory.step() or (self.memory.ready(relieve=True) and self.memory.step())

    def end(self, row: int) -> None:
        self.memory.end(row)

    def shares(self) -> tuple[float, float]:
        live = sum(band.live * band.page_bytes for band in self.bands)
        spans = sum((band.high - band.low) * band.page_bytes for band in self.bands)
        return live / self.pool.chain.usable_bytes, (spans - live) / max(spans, 1)

    def check(self) -> list[str]:
        return self.pool.check() + self.memory.check()


class _Split:
    """Two pools, counted."""

    def __init__(self, shape: HybridShape, buffer_bytes: int, lanes: int, swa_per_full: float):
        self.name = f"split, SWA tokens = {swa_per_full:g} × FULL"
        full, swa = (shape.entry(layers).bytes * shape.page_size for layers in (shape.full_layers, shape.swa_layers))
        self.sizes = full, swa
        pages = int(buffer_bytes / (full + swa_per_full * swa))
        # Each has a sink of its own.
        self.pages = [pages - 1, int(pages * swa_per_full) - 1]
        self.free = list(self.pages)
        self.mirror = Mirror(lanes, 1, shape.page_size, shape.window)
        self.shape, self.bytes = shape, buffer_bytes
        self.rows = np.empty(0, np.int64)

    def fits(self, full: int, swa: int, headroom: int) -> bool:
        return full + headroom <= self.free[0] and swa + headroom <= self.free[1]

    def admit(self, row: int, length: int) -> bool:
        full, swa = _pages(self.shape, length)
        if not self.fits(full, swa, 0):
            return False
        self.free[0] -= full
        self.free[1] -= swa
        self.mirror.set(row, length, full, full - swa)
        return True

    def seat(self, rows: Sequence[int]) -> None:
        self.rows = np.array(rows, np.int64)

    def step(self, fresh: set[int]) -> bool:
        advance = np.ones(len(self.rows), np.int64)
        if fresh:
            advance[np.isin(self.rows, list(fresh))] = 0
        if self.mirror.need(self.rows, advance) > min(self.free):
            return False
        popped, pushed = self.mirror.round(self.rows, advance)
        self.free[0] -= popped
        self.free[1] += pushed - popped
        return True

    def end(self, row: int) -> None:
        pages, retired = int(self.mirror.low.pages[row]), int(self.mirror.low.retired[row])
        self.free[0] += pages
        self.free[1] += pages - retired
        self.mirror.set(row, 0, 0, 0)

    def shares(self) -> tuple[float, float]:
        used = sum((pages - free) * size for pages, free, size in zip(self.pages, self.free, self.sizes, strict=True))
        return used / self.bytes, 0.0

    def check(self) -> list[str]:
        return [] if min(self.free) >= 0 else [f"free pages: {self.free}"]


def _pages(shape: HybridShape, length: int) -> tuple[int, int]:
    """Pages that a prompt takes in FULL and in SWA."""
    full = -(-length // shape.page_size)
    retired = max(length // shape.page_size * shape.page_size - shape.window, 0) // shape.page_size
    return full, full - retired


def replay_unified(
    requests: Iterable[Request], shape: HybridShape, buffer_bytes: int, *, lanes: int = 1024, check_every: int = 0, progress: Any = None
) -> ReplayResult:
    """Decode a trace from one shared buffer.

    Parameters
    ----------
    requests : iterable of Request
        ``prompt`` and ``generate`` tokens each.
    shape : HybridShape
    buffer_bytes : int
        Bytes to share; none is allocated.
    lanes : int
        Most requests at a time.
    check_every : int
        Check the whole pool and the host's mirror after so many rounds; 0 only at the end.
    progress : callable, optional
        Called with the requests finished so far.

    Examples
    --------
    >>> from gpukit.decode.trace import generate_trace
    >>> shape = HybridShape(full_layers=2, swa_layers=10, window=128)
    >>> result = replay_unified(generate_trace(30), shape, 1 << 28, lanes=16)
    >>> result.finished, result.findings
    (30, [])
    """
    trace = list(requests)
    columns = max((-(-(request.prompt + request.generate + 1) // shape.page_size) for request in trace), default=1)
    unified = _Unified(shape, buffer_bytes, lanes, columns)
    result = _play(trace, shape, unified, lanes, check_every, progress)
    if unified.pool.band("full").live or unified.pool.band("swa").live:
        result.findings.append(f"pages lost: {unified.pool!r}")
    result.moved_pages = unified.pool.moved_pages
    return result


def replay_split(requests: Iterable[Request], shape: HybridShape, buffer_bytes: int, swa_per_full: float, *, lanes: int = 1024) -> ReplayResult:
    """Decode a trace from two pools that share the bytes in a fixed proportion: `swa_per_full` SWA tokens for every FULL token."""
    if not 0 < swa_per_full <= 1:
        raise ArgumentError(f"swa_per_full: expected more than 0 and at most 1, got {swa_per_full}")
    split = _Split(shape, buffer_bytes, lanes, swa_per_full)
    result = _play(list(requests), shape, split, lanes, 0, None)
    if split.free != split.pages:
        result.findings.append(f"pages lost: {split.free} free of {split.pages}")
    return result


def _play(
    trace: list[Request], shape: HybridShape, memory: _Memory, lanes: int, check_every: int, progress: Callable[[int], None] | None
) -> ReplayResult:
    result = ReplayResult(memory.name)
    waiting = deque((request.prompt, request.generate) for request in trace)
    running: list[int] = []
    rows = list(range(lanes - 1, -1, -1))
    left = np.zeros(lanes, np.int64)
    full_rounds = held_tokens = 0
    share_sum = holes_sum = 0.0
    gave_way = False
    while waiting or running:
        # Who has just given way would find the same lack of room again.
        hold = gave_way and running
        fresh = set() if hold else _admit(waiting, running, rows, left, memory, shape, result)
        gave_way = False
        if not running:
            continue
        memory.seat(running)
        seated = np.array(running, np.int64)
        # The round's own token counts, and a request's first round does not advance it.
        now = int(memory.mirror.low.lengths[seated].sum()) + len(seated) - len(fresh)
        # Until the next request ends nothing changes but lengths.
        for _ in range(int(left[seated].min())):
            if not memory.step(fresh):
                _preempt(running, waiting, rows, left, fresh, memory)
                result.preemptions += 1
                gave_way = True
                break
            fresh = set()
            left[seated] -= 1
            now += len(seated)
            result.rounds += 1
            result.tokens += len(seated)
            result.peak_tokens = max(result.peak_tokens, now)
            share, holes = memory.shares()
            result.peak_share = max(result.peak_share, share)
            if waiting:
                result.peak_holes = max(result.peak_holes, holes)
                full_rounds, held_tokens = full_rounds + 1, held_tokens + now
                share_sum, holes_sum = share_sum + share, holes_sum + holes
            if check_every and result.rounds % check_every == 0:
                result.findings += memory.check()
        for row in [row for row in running if left[row] == 0]:
            memory.end(row)
            running.remove(row)
            rows.append(row)
            result.finished += 1
        if progress is not None:
            progress(result.finished)
    full_rounds = max(full_rounds, 1)
    result.mean_tokens, result.mean_share, result.mean_holes = held_tokens / full_rounds, share_sum / full_rounds, holes_sum / full_rounds
    result.findings += memory.check()
    return result


def _preempt(running: list[int], waiting: deque[tuple[int, int]], rows: list[int], left: np.ndarray, fresh: set[int], memory: _Memory) -> None:
    """The youngest gives its pages back, and waits at the front with what it has generated as a part of its prompt."""
    youngest = running.pop()
    waiting.appendleft((int(memory.mirror.low.lengths[youngest]) + (youngest not in fresh), int(left[youngest])))
    memory.end(youngest)
    rows.append(youngest)


def _admit(
    waiting: deque[tuple[int, int]], running: list[int], rows: list[int], left: np.ndarray, memory: _Memory, shape: HybridShape, result: ReplayResult
) -> set[int]:
    """Admit in order as long as there is room, with a page in four of the running requests' next ones kept free."""
    fresh: set[int] = set()
    while waiting and rows:
        prompt, generate = waiting[0]
        full, swa = _pages(shape, prompt)
        if not memory.fits(full, swa, len(running) // 4 + 1):
            if not running:
                # Not even alone.
                waiting.popleft()
                result.skipped += 1
                continue
            break
        row = rows.pop()
        if not memory.admit(row, prompt):
            rows.append(row)
            break
        waiting.popleft()
        running.append(row)
        fresh.add(row)
        left[row] = generate
    return fresh


def compare(
    requests: Iterable[Request],
    shape: HybridShape,
    buffer_bytes: int,
    *,
    lanes: int = 1024,
    splits: Sequence[float] = (0.2, 0.4, 0.6, 0.8, 1.0),
    check_every: int = 0,
    progress: Callable[[int], None] | None = None,
) -> list[ReplayResult]:
    """Replay a trace from one buffer and from each of the splits; the unified result comes first."""
    trace = list(requests)
    unified = replay_unified(trace, shape, buffer_bytes, lanes=lanes, check_every=check_every, progress=progress)
    return [unified, *(replay_split(trace, shape, buffer_bytes, split, lanes=lanes) for split in splits)]


def table(results: Sequence[ReplayResult]) -> str:
    """Results side by side, as text; the gain is that of the first over the others in tokens held at a time.

    Examples
    --------
    >>> one, other = ReplayResult("unified", mean_tokens=150.0, rounds=10), ReplayResult("split", mean_tokens=100.0, rounds=14)
    >>> print(table([one, other]))
    memory      mean tokens  peak tokens  first holds  rounds  preempted  mean use  peak use  mean holes  moved  lost
    unified             150            0            -      10          0      0.0%      0.0%        0.0%      0  none
    split               100            0       +50.0%      14          0      0.0%      0.0%        0.0%      0  none
    """
    head = ("memory", "mean tokens", "peak tokens", "first holds", "rounds", "preempted", "mean use", "peak use", "mean holes", "moved", "lost")
    lines = [head]
    for result in results:
        gain = "-" if result is results[0] else f"{results[0].mean_tokens / max(result.mean_tokens, 1) - 1:+.1%}"
        lines.append((
            result.name, f"{result.mean_tokens:,.0f}", f"{result.peak_tokens:,}", gain, f"{result.rounds:,}", f"{result.preemptions:,}",
            f"{result.mean_share:.1%}", f"{result.peak_share:.1%}", f"{result.mean_holes:.1%}", f"{result.moved_pages:,}",
            "none" if not result.findings else result.findings[0],
        ))  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    rows = (
        [
            cell.rjust(width) if 0 < column < len(head) - 1 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    )
    return "\n".join("  ".join(row).rstrip() for row in rows)
