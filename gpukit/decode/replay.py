"""The replay itself: plan a round, play it on every lane and in the model, check, and in the end report.

On the NumPy backend there is one lane. On a GPU there are two, which play the same rounds: the GPU's, whose calls are
timed, and NumPy's, which the model checks every round and the GPU's arrays are compared with when tables are checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from gpukit.decode.backend import Backend, NumpyBackend, choose_backend
from gpukit.decode.checks import Violation, check_metadata, check_round, check_tables, compare_lanes
from gpukit.decode.lane import Lane, LostPages
from gpukit.decode.model import DictionaryModel
from gpukit.decode.options import GENERATED_REQUESTS, DecodeOptions
from gpukit.decode.report import DecodeReport, Timeline, summarize
from gpukit.decode.round import STAGES
from gpukit.decode.scheduler import Batch, Scheduler
from gpukit.decode.trace import Request, generate_trace, read_trace

__all__ = ["Progress", "Replay", "load_requests", "run"]

Progress = Callable[[int, int, int], None]
"""Called after every round with requests ended, requests in all, rounds played."""

# Device time marks are read back at least this often, so that a run without checks does not pile them up.
SETTLE_ROUNDS = 256


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
        self.lane = Lane(options, self.scheduler.longest, chosen)
        self.lanes = [self.lane]
        self.mirror = self.lane
        if options.check_every and chosen.name != NumpyBackend.name:
            self.mirror = Lane(options, self.scheduler.longest, NumpyBackend())
            self.lanes.append(self.mirror)
        free = {kind: supply.contents().tolist() for kind, supply in self.mirror.supplies.items()}
        self.model = DictionaryModel(options.page_size, options.window, free)
        self.timeline = Timeline()
        self.violations: list[Violation] = []
        self.checked_rounds = self.checked_tables = self.checked_locations = 0
        self.seconds = 0.0

    @property
    def done(self) -> bool:
        """Whether the trace has been played, or a check found something."""
        return self.scheduler.done or bool(self.violations)

    def step(self) -> None:
        """Play and check one round."""
        batch = self.scheduler.plan()
        self._note(batch)
        for lane in self.lanes:
            try:
                for stage in STAGES:
                    stage(batch, lane)
            except LostPages as error:
                self.violations.append(Violation(batch.number, "lost_page", f"{lane.backend.name}: {error}"))
                return
        if self.options.check_every:
            self._check(batch)
        else:
            self.scheduler.commit(batch)
        if self.scheduler.rounds % SETTLE_ROUNDS == 0:
            self.lane.meter.settle()

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
        self.violations += check_tables(number, running, self.mirror, self.model)
        if self.mirror is not self.lane:
            self.violations += compare_lanes(number, self.lane, self.mirror)
            for kind, count in self.lane.signal.counts().items():
                message = f"{self.lane.backend.name}: ops skipped {count} values of kind {kind}, expected none"
                self.violations.append(Violation(number, "skipped_value", message))
        self.checked_tables += 1

    def report(self, stopped: str) -> DecodeReport:
        """What is known so far."""
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
            peak_running=max(self.timeline.running, default=0),
            refill_waits=sum(supply.waits for supply in self.lane.supplies.values()),
            checked_rounds=self.checked_rounds,
            checked_tables=self.checked_tables,
            checked_locations=self.checked_locations,
            seconds=self.seconds,
            ops=summarize(self.lane.meter.times),
            violations=list(self.violations),
            timeline=self.timeline,
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
        return "end" if scheduler.done else "rounds"

    def _check(self, batch: Batch) -> None:
        """Play the round in the model, compare, and close it."""
        expected = self.model.play(batch)
        whole = (batch.number + 1) % self.options.check_every == 0
        if whole:
            self.violations += check_metadata(batch, self.mirror, self.model)
        self.model.close(batch)
        self.scheduler.commit(batch)
        self.violations += check_round(batch, self.mirror, self.model, expected)
        self.checked_rounds += 1
        prompt_tokens = 0 if expected.prompts is None else len(expected.prompts.tokens)
        self.checked_locations += 3 * (len(expected.locations) + prompt_tokens)
        if whole:
            self.check_tables()

    def _note(self, batch: Batch) -> None:
        scheduler, timeline = self.scheduler, self.timeline
        timeline.full_used.append(scheduler.pages - scheduler.free)
        timeline.swa_used.append(scheduler.swa_pages - scheduler.swa_free)
        timeline.retired.append(scheduler.retired)
        timeline.running.append(len(batch.running))
        timeline.waiting.append(len(scheduler.waiting))


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
