"""What one ladder says: paired differences with their errors, and whether its noise, its controls and its counters let it say so.

It runs nothing and rewrites nothing. `replication` puts several ladders together; `speedup` splits that of a speculative decode into its factors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpukit.errors import ArgumentError
from gpukit.measure.design import LadderDesign
from gpukit.measure.ladder_file import Cell, LadderHeader, Value
from gpukit.measure.tables import csv_text
from gpukit.measure.verification import LadderFile, Verification, read

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Analysis", "Delta", "Finding", "Spread", "analyze", "counted_cells", "median_error", "read_verified"]

# A median of n normal samples scatters 1.25 times as much as their mean.
MEDIAN_FACTOR = 1.25


@dataclass(frozen=True)
class Delta:
    """One metric of one arm against another, in pairs inside a pass.

    Attributes
    ----------
    metric, base, arm : str
    median : float
        Median over passes of ``100 * (arm / base - 1)``, in percent.
    standard_error : float or None
        Of the median: 1.25 s / √n, in percentage points; None for a single pair.
    n : int
        Pairs.
    pairs : dict of int to float
        The difference in percent by pass.
    verdict : {"better", "worse", "no difference", "unknown"}
        By the design's number of standard errors, and by which direction is better for this metric.
    flags : tuple of str
        Why the difference may not mean what it seems to.
    """

    metric: str
    base: str
    arm: str
    median: float
    standard_error: float | None
    n: int
    pairs: dict[int, float]
    verdict: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Spread:
    """How much one metric of one arm varied over passes: its median, and the standard deviation by it in percent (None for one pass)."""

    metric: str
    arm: str
    median: float
    percent: float | None
    n: int


@dataclass(frozen=True)
class Finding:
    """Something a reader of the deltas must know: ``unverified``, ``noise``, ``null arm``, ``structural zero``, ``counters differ``, ``drift``."""

    kind: str
    message: str
    arm: str
    metric: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True)
class Analysis:
    """What one ladder says.

    Attributes
    ----------
    header : LadderHeader
        Design and provenance, as written before the run.
    verification : Verification
    digest : str
        SHA-256 of the file.
    deltas : tuple of Delta
        Pair by pair, every metric.
    spreads : tuple of Spread
        Every arm, every metric.
    disqualifications : tuple of Finding
        Why the ladder does not count; empty if it does. Its numbers are kept all the same.
    flags : tuple of Finding
        What else must be known.
    """

    header: LadderHeader
    verification: Verification
    digest: str
    deltas: tuple[Delta, ...]
    spreads: tuple[Spread, ...]
    disqualifications: tuple[Finding, ...]
    flags: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether the ladder counts."""
        return not self.disqualifications

    @property
    def verdict(self) -> str:
        """One line: qualified, or disqualified and why."""
        if self.ok:
            return "qualified" + (f", with {len(self.flags)} flags" if self.flags else "")
        return "disqualified: " + "; ".join(map(str, self.disqualifications))

    def delta(self, arm: str, base: str | None = None, metric: str | None = None) -> Delta:
        """The delta of one pair; against the base arm and of the first metric unless named."""
        wanted = (metric or self.header.design.metrics[0], base or self.header.design.base, arm)
        for delta in self.deltas:
            if (delta.metric, delta.base, delta.arm) == wanted:
                return delta
        raise ArgumentError(f"arm, base, metric: expected a pair that was analyzed, got {arm} against {wanted[1]}, {wanted[0]}")

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain types."""
        fields = asdict(self)
        fields["header"] = {"design": self.header.design.to_dict(), "provenance": dict(self.header.provenance)}
        fields["verification"] = self.verification.to_dict()
        return {"ok": self.ok, "verdict": self.verdict, **fields}

    def to_json(self) -> str:
        """Everything as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def to_csv(self) -> str:
        """The deltas as CSV text, one row each, with the ladder's file and verdict beside them."""
        names = ("metric", "base", "arm", "median", "standard_error", "n", "verdict")
        rows = [[getattr(delta, name) for name in names] + ["; ".join(delta.flags)] for delta in self.deltas]
        head = (self.verification.path, self.header.design.tag, self.verdict)
        return csv_text(("file", "tag", "ladder", *names, "flags"), ((*head, *row) for row in rows))

    def print(self, console: Console) -> None:
        """Print the tables and the verdict."""
        from gpukit.measure import tables

        tables.print_analysis(self, console)


def analyze(path: str | Path, pairs: Iterable[tuple[str, str]] | None = None, *, unverified: bool = False) -> Analysis:
    """Judge one ladder: paired deltas, noise, controls, counters.

    Parameters
    ----------
    path : path
        A ladder's file.
    pairs : iterable of (base, arm), optional
        Any two arms, as often as wanted. Left out: every arm against the base.
    unverified : bool
        Analyze the whole cells of a file that is not one connected run; the ladder is then disqualified for that.

    Returns
    -------
    Analysis
        Pass 0 is left out. A judged metric disqualifies the ladder if the base arm's spread exceeds the noise limit, if the null arm reads
        anything beyond noise, or if the structural-zero arm gains beyond noise; noise is the design's number of standard errors of the
        median (3). Counters that differ between arms or drift within one are flagged: equal output does not imply equal rounds.

    Raises
    ------
    ArgumentError
        The file is not one connected run and `unverified` is not set, its start line cannot be read, or a pair names an unknown arm.

    Examples
    --------
    >>> import itertools, pathlib, tempfile
    >>> from gpukit.measure import Ladder
    >>> ticks = itertools.cycle([1.000, 1.001, 0.999, 1.0005])
    >>> ladder = Ladder({"stock": lambda: next(ticks), "slow": lambda: next(ticks) * 1.01}, lambda run: {"seconds": run()}, passes=8, warmup=0)
    >>> path = ladder.run(pathlib.Path(tempfile.mkdtemp()) / "slow.csv")
    >>> found = analyze(path)
    >>> found.verdict, found.delta("slow").verdict, found.delta("slow").n
    ('qualified', 'worse', 7)
    """
    file = read_verified(path, unverified)
    assert file.header is not None
    design = file.header.design
    if pairs is None:
        pairs = ((design.base, arm) for arm in design.arms if arm != design.base)
    table = _Table(design, counted_cells(file))
    deltas = [delta for base, arm in pairs for metric in design.metrics if (delta := table.delta(metric, base, arm)) is not None]
    judged, noted = table.judge()
    if not file.verification.ok:
        judged.insert(0, Finding("unverified", str(file.verification), ""))
    return Analysis(
        header=file.header,
        verification=file.verification,
        digest=file.digest,
        deltas=tuple(deltas),
        spreads=tuple(spread for metric in design.metrics for arm in design.arms if (spread := table.spread(metric, arm)) is not None),
        disqualifications=tuple(judged),
        flags=tuple(noted),
    )


def read_verified(path: str | Path, unverified: bool = False) -> LadderFile:
    """Read a ladder's file and refuse it if it is not one connected run, unless told otherwise; one without a readable start line in any case."""
    file = read(path)
    if file.header is None or not (file.verification.ok or unverified):
        raise ArgumentError(f"path: expected a verified ladder file, got {path}: {file.verification}")
    return file


def counted_cells(file: LadderFile) -> dict[tuple[str, int], Cell]:
    """The cells that count, those after pass 0, by arm and pass."""
    return {(cell.slot.arm, cell.slot.pass_index): cell for cell in file.cells if cell.slot.pass_index > 0}


def median_error(samples: Sequence[float] | NDArray[np.float64]) -> tuple[float, float | None]:
    """Median and its standard error, 1.25 s / √n; None for fewer than two samples.

    Examples
    --------
    >>> median, error = median_error([1.0, 2.0, 3.0, 4.0])
    >>> print(f"{median:.2f} ± {error:.4f}")
    2.50 ± 0.8069
    """
    if len(samples) < 2:
        return float(np.median(samples)), None
    return float(np.median(samples)), MEDIAN_FACTOR * float(np.std(samples, ddof=1)) / math.sqrt(len(samples))


def _listing(values: Sequence[Value]) -> str:
    """A few values in words."""
    return " / ".join(map(str, values[:4])) + (" / …" if len(values) > 4 else "")


class _Table:
    """The counted cells of a ladder, asked by metric, arm and pass."""

    def __init__(self, design: LadderDesign, cells: dict[tuple[str, int], Cell]):
        self.design = design
        self.cells = cells

    def series(self, name: str, arm: str) -> dict[int, Value]:
        """One column of one arm by pass."""
        return {index: cell.values[name] for (owner, index), cell in sorted(self.cells.items()) if owner == arm}

    def delta(self, metric: str, base: str, arm: str) -> Delta | None:
        """The pairs of two arms, None where no pass holds both."""
        for name in (base, arm):
            if name not in self.design.arms:
                raise ArgumentError(f"pairs: expected arms of {', '.join(self.design.arms)}, got {name!r}")
        left, right = self.series(metric, base), self.series(metric, arm)
        pairs = {index: 100 * (float(right[index]) / float(left[index]) - 1) for index in left if index in right}
        if not pairs:
            return None
        median, error = median_error(list(pairs.values()))
        return Delta(metric, base, arm, median, error, len(pairs), pairs, self._verdict(metric, median, error), self._pair_flags(base, arm))

    def spread(self, metric: str, arm: str) -> Spread | None:
        values = [float(value) for value in self.series(metric, arm).values()]
        if not values:
            return None
        median = float(np.median(values))
        percent = 100 * float(np.std(values, ddof=1)) / median if len(values) > 1 else None
        return Spread(metric, arm, median, percent, len(values))

    def judge(self) -> tuple[list[Finding], list[Finding]]:
        """What disqualifies the ladder, and what is only flagged."""
        found = [finding for metric in self.design.metrics for finding in (self._noise(metric), *self._controls(metric)) if finding is not None]
        judged = [finding for finding in found if finding.metric in self.design.judged]
        noted = [finding for finding in found if finding.metric not in self.design.judged]
        return judged, noted + self._drifts() + self._differences()

    def _verdict(self, metric: str, median: float, error: float | None) -> str:
        if error is None:
            return "unknown"
        if abs(median) <= self.design.control_errors * error:
            return "no difference"
        return "better" if (median > 0) == (metric in self.design.higher_is_better) else "worse"

    def _noise(self, metric: str) -> Finding | None:
        base, limit = self.design.base, self.design.noise_limit
        spread = self.spread(metric, base)
        if spread is not None and spread.percent is not None and spread.percent <= limit:
            return None
        reading = "unknown" if spread is None or spread.percent is None else f"{spread.percent:.3f} %"
        return Finding("noise", f"{metric}: the spread of the base arm {base} is {reading}, the limit {limit:g} %", base, metric)

    def _controls(self, metric: str) -> list[Finding]:
        roles = (
            ("null arm", self.design.null, ("no difference",), "must read zero within noise"),
            ("structural zero", self.design.structural_zero, ("no difference", "worse"), "must not gain"),
        )
        findings = []
        for role, arm, allowed, rule in roles:
            delta = None if arm is None else self.delta(metric, self.design.base, arm)
            if arm is not None and (delta is None or delta.verdict not in allowed):
                reading = "nothing" if delta is None else f"{delta.median:+.3f} ± {delta.standard_error or math.nan:.3f} % ({delta.verdict})"
                findings.append(Finding(role, f"{metric}: {arm} {rule}, and reads {reading}", arm, metric))
        return findings

    def _values(self, name: str, arm: str) -> list[Value]:
        """The different values of a counter or geometry name in one arm, in order of appearance."""
        return list(dict.fromkeys(self.series(name, arm).values()))

    def _drift(self, name: str, arm: str) -> str:
        """What is not constant within one arm, in words; empty if it is."""
        seen = self._values(name, arm)
        if len(seen) > 1:
            return f"{name} is not constant within {arm}: {_listing(seen)}"
        unsteady = any(name in cell.unsteady for (owner, _), cell in self.cells.items() if owner == arm)
        return f"{name} is not constant within {arm}: it differs between the repetitions of a cell" if unsteady else ""

    def _drifts(self) -> list[Finding]:
        names = (*self.design.counters, *self.design.geometry)
        return [Finding("drift", drift, arm) for arm in self.design.arms for name in names if (drift := self._drift(name, arm))]

    def _differences(self) -> list[Finding]:
        base, arms, counters = self.design.base, self.design.arms, self.design.counters
        return [Finding("counters differ", text, arm) for name in counters for arm in arms if (text := self._difference(name, base, arm))]

    def _difference(self, name: str, base: str, arm: str) -> str:
        """How a counter differs between two arms, in words; empty if it does not."""
        left, right = (sorted(self._values(name, side), key=str) for side in (base, arm))
        if left == right:
            return ""
        return f"{name} {_listing(left)} in {base}, {_listing(right)} in {arm}: equal output does not imply equal rounds"

    def _pair_flags(self, base: str, arm: str) -> tuple[str, ...]:
        differences = [self._difference(name, base, arm) for name in self.design.counters]
        drifts = [self._drift(name, side) for side in (base, arm) for name in self.design.counters]
        return tuple(dict.fromkeys(filter(None, differences + drifts)))
