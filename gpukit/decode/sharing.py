"""How well bytes are used: tokens that a way of sharing them held, and what the same bytes would have held as two pools of fixed sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gpukit.decode.options import DecodeOptions
from gpukit.decode.rooms import SplitRoom, layout_of
from gpukit.decode.scheduler import Batch, Scheduler
from gpukit.decode.trace import Request

__all__ = ["Sharing", "Timeline", "count_split", "summarize_sharing"]


@dataclass
class Timeline:
    """One entry per round: pages in use at their highest, pages retired so far, requests running and waiting, tokens held.

    Unified memory adds free pages between pages in use, of each kind, and the pages that were moved so far; split memory has neither.
    """

    full_used: list[int] = field(default_factory=list)
    swa_used: list[int] = field(default_factory=list)
    retired: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    full_holes: list[int] = field(default_factory=list)
    swa_holes: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)

    def note(self, scheduler: Scheduler, batch: Batch) -> None:
        """Add a round that has been planned."""
        self.full_used.append(scheduler.used)
        self.swa_used.append(scheduler.swa_used)
        self.retired.append(scheduler.retired)
        self.running.append(len(batch.running))
        self.waiting.append(len(scheduler.waiting))
        self.tokens.append(sum(running.length for running in batch.running))


@dataclass(frozen=True)
class Sharing:
    """How a way to share the bytes did on a trace.

    Attributes
    ----------
    memory : str
        "unified" or "split".
    rounds, preempted, skipped : int
        Rounds it took, how often a request gave its pages back, requests that could not run even alone.
    mean_tokens, peak_tokens : float, int
        Tokens held at a time. Means, and the peak of the holes, are over the rounds in which requests were waiting, or over all where none ever was.
    mean_use, peak_use : float
        Share of the bytes that pages in use take.
    mean_holes, peak_holes : float
        Share of the bytes that lies free between pages in use: fragmentation. 0 for a split.
    moved_pages : int
        Pages that were moved to make room.
    waiting_rounds : int
        Rounds in which requests were waiting.
    """

    memory: str
    rounds: int
    preempted: int
    skipped: int
    mean_tokens: float
    peak_tokens: int
    mean_use: float
    peak_use: float
    mean_holes: float
    peak_holes: float
    moved_pages: int
    waiting_rounds: int


def summarize_sharing(options: DecodeOptions, scheduler: Scheduler, timeline: Timeline) -> Sharing:
    """What a time line says; the bytes are those of the options, whatever the memory."""
    layout = layout_of(options)
    full_bytes, swa_bytes = (layout.by_name[name].page_bytes for name in ("full", "swa"))

    def shares(full: list[int], swa: list[int]) -> list[float]:
        return [(one * full_bytes + other * swa_bytes) / layout.buffer_bytes for one, other in zip(full, swa, strict=True)]

    use, holes = shares(timeline.full_used, timeline.swa_used), shares(timeline.full_holes, timeline.swa_holes)
    waited = [number for number, waiting in enumerate(timeline.waiting) if waiting]
    crowded = waited or range(len(timeline.waiting))

    def mean(values: list[float] | list[int]) -> float:
        return sum(values[number] for number in crowded) / max(len(crowded), 1) if values else 0.0

    return Sharing(
        memory="unified" if timeline.moved else "split",
        rounds=len(timeline.tokens),
        preempted=scheduler.preemptions,
        skipped=scheduler.skipped,
        mean_tokens=mean(timeline.tokens),
        peak_tokens=max(timeline.tokens, default=0),
        mean_use=mean(use),
        peak_use=max(use, default=0.0),
        mean_holes=mean(holes),
        peak_holes=max((holes[number] for number in crowded), default=0.0) if holes else 0.0,
        moved_pages=timeline.moved[-1] if timeline.moved else 0,
        waiting_rounds=len(waited),
    )


def count_split(options: DecodeOptions, requests: Iterable[Request]) -> Sharing:
    """How the two pools of the options would do on a trace: the same scheduler, counted, without pages.

    Examples
    --------
    >>> count_split(DecodeOptions(page_size=4, window=8, pages=8, swa_pages=4), [Request(0, 10, 6), Request(1, 17, 3), Request(2, 90, 1)])
    Sharing(memory='split', rounds=9, preempted=0, skipped=1, mean_tokens=13.5, peak_tokens=20, ...)
    """
    scheduler = Scheduler(options, requests, SplitRoom(options.pages, options.swa_pages))
    timeline = Timeline()
    while not scheduler.done and scheduler.rounds != options.rounds:
        batch = scheduler.plan()
        timeline.note(scheduler, batch)
        scheduler.commit(batch)
    return summarize_sharing(options, scheduler, timeline)
