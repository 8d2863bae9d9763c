"""The replay itself: plan a round, play it on every lane, check, and in the end report.

Memory is unified (`unified`, checked by `unified_ledger`) or split (`lane` and `split_round`, checked by `checks` and `split_ledger`). On the NumPy
backend there is one lane. On a GPU there are two, which play the same rounds: the GPU's, whose calls are timed, and NumPy's, which is checked every
round and the GPU's arrays are compared with when tables are checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from gpukit.decode import split_round, unified
from gpukit.decode.backend import Backend, Meter, NumpyBackend, choose_backend
from gpukit.decode.checks import SplitChecks, Violation, compare_lanes
from gpukit.decode.lane import Lane, LostPages
from gpukit.decode.options import GENERATED_REQUESTS, DecodeOptions
from gpukit.decode.report import DecodeReport, summarize
from gpukit.decode.scheduler import Batch, Running, Scheduler
from gpukit.decode.sharing import Sharing, Timeline, count_split, summarize_sharing
from gpukit.decode.trace import Request, generate_trace, read_trace
from gpukit.decode.unified_ledger import UnifiedLedger
from gpukit.errors import Signal

__all__ = ["Progress", "Replay", "load_requests", "run"]

Progress = Callable[[int, int, int], None]
"""Called after every round with requests ended, requests in all, rounds played."""

# Device time marks are read back at least this often, so that a run without checks does not pile them up.
SETTLE_ROUNDS = 256


class AnyLane(Protocol):
    """What a replay asks of a lane, whatever its memory."""

    backend: Backend
    meter: Meter
    signal: Signal

    @property
    def waits(self) -> int: ...
    def current(self) -> AbstractContextManager[Any]: ...
    def tables(self) -> dict[str, Any]: ...
    def free_pages(self) -> dict[str, np.ndarray]: ...


class Checks(Protocol):
    """What a replay asks of the independent half of its checks."""

    def round(self, batch: Batch) -> tuple[list[Violation], int]: ...
    def tables(self, number: int, running: list[Running]) -> list[Violation]: ...


# What plays the rounds in either memory, what checks it, and what is done in a round, in order.
LANES: dict[str, Callable[..., Any]] = {"unified": unified.UnifiedLane, "split": Lane}
CHECKS: dict[str, Callable[[Any], Checks]] = {"unified": UnifiedLedger, "split": SplitChecks}
STAGES: dict[str, Sequence[Callable[[Batch, Any], None]]] = {"unified": unified.STAGES, "split": split_round.STAGES}


class Replay:
    """A replay's state, stepped round by round.

    Parameters
    ----------
    options : DecodeOptions
        What to replay and how.
    requests : iterable of Request, optional
        A trace made by the caller, instead of the one `options` name.
    backend : Backend, optional
        An array library of the caller's, instead of the one `options` name.
    """

    def __init__(self, options: DecodeOptions, requests: Iterable[Request] | None = None, backend: Backend | None = None):
        self.options = options
        self.requests = load_requests(options) if requests is None else list(requests)
        chosen, self.backend_reason = (backend, "given by the caller") if backend is not None else choose_backend(options.backend)
        self.scheduler = Scheduler(options, self.requests)
        # The lane that is timed, and on a GPU NumPy's beside it, whose arrays are the ones that are checked.
        backends: list[Backend] = [chosen]
        if options.check_every and chosen.name != NumpyBackend.name:
            backends.append(NumpyBackend())
        self.lanes: list[Any] = [LANES[options.memory](options, self.scheduler.longest, backend) for backend in backends]
        self.lane: AnyLane = self.lanes[0]
        self.checked: AnyLane = self.lanes[-1]
        self.checks = CHECKS[options.memory](self.lanes[-1])
        self.timeline = Timeline()
        self.sharing: list[Sharing] = []
        self.violations: list[Violation] = []
        self.checked_rounds = self.checked_tables = self.checked_locations = 0
        self.seconds = 0.0

    @property
    def done(self) -> bool:
        """Whether the trace has been played, or a check found something."""
        return self.scheduler.done or bool(self.violations)

    def step(self) -> None:
        """Play and check one round."""
        with self.lane.current():
            self._step()

    def run(self, progress: Progress | None = None) -> DecodeReport:
        """Step to the end, to the limit of rounds, to the first violation or to a keyboard interrupt, and report."""
        started = time.perf_counter()
        try:
            stopped = self._play(progress)
        except KeyboardInterrupt:
            stopped = "interrupt"
        self.seconds += time.perf_counter() - started
        return self.report(stopped)

    def check_tables(self) -> None:
        """Check every table, list and row, and on a GPU compare them with NumPy's. Call between two rounds."""
        number, running = max(self.scheduler.rounds - 1, 0), self.scheduler.running
        with self.lane.current():
            self.violations += self.checks.tables(number, running)
            if self.checked is not self.lane:
                self.violations += compare_lanes(number, self.lane, self.checked)
                for kind, count in self.lane.signal.counts().items():
                    message = f"{self.lane.backend.name}: ops skipped {count} values of kind {kind}, expected none"
                    self.violations.append(Violation(number, "skipped_value", message))
        self.checked_tables += 1

    def report(self, stopped: str) -> DecodeReport:
        """What is known so far."""
        with self.lane.current():
            self.lane.meter.settle()
        scheduler = self.scheduler
        return DecodeReport(
            options=self.options,
            backend=self.lane.backend.name,
            backend_reason=self.backend_reason,
            stopped=stopped,
            requests=len(self.requests),
            finished=scheduler.finished,
            preempted=scheduler.preemptions,
            skipped=scheduler.skipped,
            rounds=scheduler.rounds,
            tokens_generated=scheduler.tokens,
            prompt_tokens=scheduler.prompt_tokens,
            retired_pages=scheduler.retired,
            peak_pages=max(self.timeline.full_used, default=0),
            peak_swa_pages=max(self.timeline.swa_used, default=0),
            most_pages=scheduler.room.most,
            peak_running=max(self.timeline.running, default=0),
            waits=self.lane.waits,
            checked_rounds=self.checked_rounds,
            checked_tables=self.checked_tables,
            checked_locations=self.checked_locations,
            seconds=self.seconds,
            ops=summarize(self.lane.meter.times),
            violations=list(self.violations),
            timeline=self.timeline,
            sharing=list(self.sharing),
        )

    def _play(self, progress: Progress | None) -> str:
        """Every round, and a last check of everything; returns what ended it."""
        scheduler = self.scheduler
        while not self.done and scheduler.rounds != self.options.rounds:
            self.step()
            if progress is not None:
                progress(scheduler.finished + scheduler.skipped, len(self.requests), scheduler.rounds)
        if self.options.check_every and not self.violations:
            self.check_tables()
        if self.violations:
            return "violation"
        if self.options.memory == "unified":
            self.sharing = [summarize_sharing(self.options, scheduler, self.timeline), count_split(self.options, self.requests)]
        return "end" if scheduler.done else "rounds"

    def _step(self) -> None:
        scheduler, timeline, number = self.scheduler, self.timeline, self.scheduler.rounds
        batch = scheduler.plan()
        timeline.note(scheduler, batch)
        for lane in self.lanes:
            try:
                for stage in STAGES[self.options.memory]:
                    stage(batch, lane)
            except LostPages as error:
                self.violations.append(Violation(number, "lost_page", f"{lane.backend.name}: {error}"))
                return
            if self.options.debug_mirror:
                self.violations += [Violation(number, "mirror", f"{lane.backend.name}: {message}") for message in lane.memory.check()]
        if self.options.memory == "unified":
            full, swa = self.lanes[0].holes
            timeline.full_holes.append(full)
            timeline.swa_holes.append(swa)
            timeline.moved.append(self.lanes[0].moved_pages)
        if self.options.check_every:
            violations, locations = self.checks.round(batch)
            self.violations += violations
            self.checked_rounds += 1
            self.checked_locations += locations
        scheduler.commit(batch)
        if self.options.check_every and scheduler.rounds % self.options.check_every == 0:
            self.check_tables()
        if scheduler.rounds % SETTLE_ROUNDS == 0:
            self.lane.meter.settle()


def run(options: DecodeOptions, requests: Iterable[Request] | None = None, *, progress: Progress | None = None) -> DecodeReport:
    """Replay a request trace through continuous-batching decode rounds, checking as it goes.

    Parameters
    ----------
    options : DecodeOptions
        What to replay and how.
    requests : iterable of Request, optional
        A trace made by the caller, instead of the one `options` name.
    progress : callable, optional
        Called after every round with requests ended, requests in all and rounds played.

    Returns
    -------
    DecodeReport
        Counts, op times, violations. A keyboard interrupt ends the replay and marks the report as partial.

    Raises
    ------
    ArgumentError
        The trace cannot be read.
    DeviceError
        The GPU backend was asked for and there is none.

    Examples
    --------
    >>> report = run(DecodeOptions(requests=20, batch=8, pages=512, swa_pages=64, backend="numpy"))
    >>> report.finished, report.skipped, report.ok, report.partial
    (20, 0, True, False)
    """
    return Replay(options, requests).run(progress)


def load_requests(options: DecodeOptions) -> list[Request]:
    """The trace that the options name: a file's, or a drawn one."""
    if options.trace is not None:
        return read_trace(options.trace, options.requests)
    return generate_trace(options.requests or GENERATED_REQUESTS, options.seed)
