"""What a replay says at its end: counts, op times, violations and a time line, as a dataclass, as JSON and as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from gpukit.decode.backend import OpTimes
from gpukit.decode.checks import Violation
from gpukit.decode.options import DecodeOptions
from gpukit.decode.sharing import Sharing, Timeline

if TYPE_CHECKING:
    from rich.console import Console

    from gpukit.decode.model_run import ModelReport

__all__ = ["DecodeReport", "OpReport", "summarize"]


@dataclass(frozen=True)
class OpReport:
    """What one op cost. Host time is the work itself on NumPy and the cost of the call on a GPU; device time is None on NumPy."""

    op: str
    calls: int
    host_us_median: float
    host_ms_total: float
    device_us_median: float | None
    device_ms_total: float | None


@dataclass
class DecodeReport:
    """Everything `gpukit.decode.run` found out.

    Attributes
    ----------
    options : DecodeOptions
        What was asked for.
    backend, backend_reason : str
        "numpy" or "gpu", and why.
    stopped : str
        "end" of the trace, "rounds" reached, "violation" found, or "interrupt".
    requests, finished, preempted, skipped : int
        Requests of the trace; those that got all their tokens; how often one gave its pages back; those too large for the memory.
    rounds, tokens_generated, prompt_tokens, retired_pages : int
        Totals. Prompts placed again after a preemption count again.
    peak_pages, peak_swa_pages, peak_running : int
        Most pages in use and most requests running in any round.
    most_pages : tuple of int
        FULL pages and SWA pages that fit, each kind alone.
    waits : int
        How often split memory had to wait for a read-back of freed pages, or unified memory to make room by flushing and moving.
    checked_rounds, checked_tables, checked_locations : int
        Rounds checked, of these with every table, and token locations compared.
    seconds : float
        Wall time of the rounds and their checks.
    ops : list of OpReport
        What each op cost.
    violations : list of Violation
        What the checks found; the replay stops at the first round that has any.
    timeline : Timeline
        Pages, tokens and requests over the rounds.
    sharing : list of Sharing
        How unified memory used its bytes, and how two pools of fixed sizes would have; empty for split memory, and where the replay was cut short
        by a violation or an interrupt.
    model : ModelReport, optional
        What plain and speculative decoding of a model beside the replay brought, if they were asked for.
    """

    options: DecodeOptions
    backend: str
    backend_reason: str
    stopped: str
    requests: int
    finished: int
    preempted: int
    skipped: int
    rounds: int
    tokens_generated: int
    prompt_tokens: int
    retired_pages: int
    peak_pages: int
    peak_swa_pages: int
    peak_running: int
    most_pages: tuple[int, int]
    waits: int
    checked_rounds: int
    checked_tables: int
    checked_locations: int
    seconds: float
    ops: list[OpReport]
    violations: list[Violation]
    timeline: Timeline
    sharing: list[Sharing] = field(default_factory=list)
    model: ModelReport | None = None

    @property
    def replay_ok(self) -> bool:
        """Whether requests were played and no check of the replay found anything."""
        return not self.violations and self.skipped < max(self.requests, 1)

    @property
    def ok(self) -> bool:
        """Whether that is so, and no check of the model's decoding found anything either."""
        return self.replay_ok and (self.model is None or self.model.ok)

    @property
    def partial(self) -> bool:
        """Whether the trace was not played to its end."""
        return self.stopped != "end"

    def to_dict(self) -> dict[str, Any]:
        """The report in plain types, `ok` and `partial` included."""
        fields = asdict(self)
        if self.options.trace is not None:
            fields["options"]["trace"] = str(self.options.trace)
        if self.model is not None:
            fields["model"] = self.model.to_dict()
        return {"ok": self.ok, "partial": self.partial, **fields}

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def print(self, console: Console) -> None:
        """Print the table of ops, the totals and the violations."""
        console.print(f"backend: {self.backend} ({self.backend_reason})", markup=False, highlight=False)
        console.print(_ops_table(self))
        console.print(_totals_table(self))
        if self.sharing:
            console.print(_sharing_table(self))
        for violation in self.violations:
            console.print(f"violation: {violation.name} after round {violation.round}: {violation.message}", style="red", markup=False)
        console.print(_verdict(self), style="green" if self.replay_ok else "red", markup=False)
        if self.model is not None:
            self.model.print(console)


def summarize(times: dict[str, OpTimes]) -> list[OpReport]:
    """One line per op, in the order of first use."""
    return [_summarize_op(op, entry) for op, entry in times.items()]


def _summarize_op(op: str, times: OpTimes) -> OpReport:
    device = times.device_us
    return OpReport(
        op=op,
        calls=len(times.host_ns),
        host_us_median=median(times.host_ns) / 1e3,
        host_ms_total=sum(times.host_ns) / 1e6,
        device_us_median=median(device) if device else None,
        device_ms_total=sum(device) / 1e3 if device else None,
    )


def _ops_table(report: DecodeReport) -> Any:
    from rich.table import Table

    table = Table()
    on_device = any(op.device_us_median is not None for op in report.ops)
    table.add_column("op")
    for heading in ["calls", "median host µs", "host ms in all", *(["median device µs", "device ms in all"] if on_device else [])]:
        table.add_column(heading, justify="right")
    for op in report.ops:
        numbers = [f"{op.calls:,}", f"{op.host_us_median:,.1f}", f"{op.host_ms_total:,.1f}"]
        if on_device:
            numbers += ["" if value is None else f"{value:,.1f}" for value in (op.device_us_median, op.device_ms_total)]
        table.add_row(op.op, *numbers)
    table.add_section()
    totals = [f"{sum(op.calls for op in report.ops):,}", "", f"{sum(op.host_ms_total for op in report.ops):,.1f}"]
    if on_device:
        totals += ["", f"{sum(op.device_ms_total or 0 for op in report.ops):,.1f}"]
    table.add_row("total", *totals)
    return table


def _totals_table(report: DecodeReport) -> Any:
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    options, (most, most_swa) = report.options, report.most_pages
    unified = options.memory == "unified"
    for name, value in (
        ("requests finished", f"{report.finished:,} of {report.requests:,}"),
        ("requests preempted", f"{report.preempted:,}"),
        ("requests skipped (too large)", f"{report.skipped:,}"),
        ("rounds", f"{report.rounds:,}"),
        ("tokens generated", f"{report.tokens_generated:,}"),
        ("prompt tokens placed", f"{report.prompt_tokens:,}"),
        ("most requests running", f"{report.peak_running:,} of {options.batch:,}"),
        ("peak FULL pages", f"{report.peak_pages:,} of {most:,}"),
        ("peak SWA pages", f"{report.peak_swa_pages:,} of {most_swa:,}"),
        ("pages retired from the window", f"{report.retired_pages:,}"),
        ("times room was made" if unified else "waits for freed pages", f"{report.waits:,}"),
        ("seconds", f"{report.seconds:,.1f}"),
    ):
        table.add_row(name, value)
    return table


def _sharing_table(report: DecodeReport) -> Any:
    from rich.table import Table

    unified, split = report.sharing
    table = Table("the same bytes", caption=_means_over(unified, split))
    table.add_column("unified", justify="right")
    table.add_column(f"split into {report.options.pages:,} + {report.options.swa_pages:,} pages", justify="right")
    gain = unified.mean_tokens / max(split.mean_tokens, 1.0) - 1
    for name, values in (
        ("mean tokens held", [f"{unified.mean_tokens:,.0f} ({gain:+.1%})", f"{split.mean_tokens:,.0f}"]),
        ("peak tokens held", [f"{way.peak_tokens:,}" for way in report.sharing]),
        ("mean bytes in use", [f"{way.mean_use:.1%}" for way in report.sharing]),
        ("peak bytes in use", [f"{way.peak_use:.1%}" for way in report.sharing]),
        ("mean bytes in holes", [f"{way.mean_holes:.1%}" for way in report.sharing]),
        ("peak bytes in holes", [f"{way.peak_holes:.1%}" for way in report.sharing]),
        ("pages moved", [f"{way.moved_pages:,}" for way in report.sharing]),
        ("rounds", [f"{way.rounds:,}" for way in report.sharing]),
        ("requests preempted", [f"{way.preempted:,}" for way in report.sharing]),
        ("requests skipped", [f"{way.skipped:,}" for way in report.sharing]),
    ):
        table.add_row(name, *values)
    return table


def _means_over(unified: Sharing, split: Sharing) -> str:
    """Which rounds the means are over: those in which requests wait, or all of a way in which none ever does."""
    calm = [way.memory for way in (unified, split) if way.waiting_rounds == 0]
    if len(calm) == 2:
        return "no request waited: means over all rounds"
    return "means over the rounds in which requests wait" + (f"; {calm[0]}: no request waited, over all rounds" if calm else "")


def _verdict(report: DecodeReport) -> str:
    """One closing line: how far the replay came and what the checks say."""
    reasons = {
        "end": "the whole trace was played",
        "rounds": "partial report: the limit of rounds was reached",
        "violation": "partial report: stopped at the first violation",
        "interrupt": "partial report: interrupted",
    }
    if not report.replay_ok:
        return f"{reasons[report.stopped]}; {len(report.violations)} violations"
    if report.checked_rounds == 0:
        return f"{reasons[report.stopped]}; nothing was checked"
    return (
        f"{reasons[report.stopped]}; no violations in {report.checked_rounds:,} rounds checked"
        f" ({report.checked_locations:,} locations, every table {report.checked_tables:,} times)"
    )
