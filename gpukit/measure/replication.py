"""What several ladders of one design say together: a range, never a point.

Each ladder is judged by `analysis` first; those that failed are kept and named, and left out of the ranges.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gpukit.errors import ArgumentError
from gpukit.measure.analysis import Analysis, Delta
from gpukit.measure.tables import csv_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Range", "Replication", "combine"]


@dataclass(frozen=True)
class Range:
    """One metric of one pair over ladders, in percent and percentage points.

    Attributes
    ----------
    metric, base, arm : str
    low, high : float
        Smallest and largest median of a ladder.
    spread : float
        ``high - low``: how far the ladders lie apart.
    errors : tuple of float
        The standard errors within the ladders, in their order.
    ladders : int
        Ladders that count.
    replicated : bool or None
        Whether the spread keeps the replication limit; None for fewer than two ladders.
    beats_base : bool
        Whether every ladder gains more than the ladders lie apart, and more than its own noise.
    flags : tuple of str
        Flags of any of the deltas.
    """

    metric: str
    base: str
    arm: str
    low: float
    high: float
    spread: float
    errors: tuple[float | None, ...]
    ladders: int
    replicated: bool | None
    beats_base: bool
    flags: tuple[str, ...]

    @property
    def largest_error(self) -> float | None:
        """The largest standard error within a ladder, to set beside the spread between them."""
        return max((error for error in self.errors if error is not None), default=None)


@dataclass(frozen=True)
class Replication:
    """Several ladders of one design: `analyses` holds all of them, `ranges` only speaks of those that count."""

    analyses: tuple[Analysis, ...]
    ranges: tuple[Range, ...]

    @property
    def disqualified(self) -> tuple[Analysis, ...]:
        """The ladders that do not count."""
        return tuple(analysis for analysis in self.analyses if not analysis.ok)

    @property
    def ok(self) -> bool:
        """Whether every ladder counts and every judged range replicated."""
        return not self.disqualified and not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """The judged ranges that did not replicate, in words."""
        design = self.analyses[0].header.design
        return tuple(
            f"{found.metric}: {found.arm} against {found.base} lies {found.spread:.3f} points apart, the limit {design.replication_limit:g}"
            for found in self.ranges
            if found.replicated is False and found.metric in design.judged
        )

    @property
    def verdict(self) -> str:
        """One line: how many ladders count, and whether they agree."""
        counted = len(self.analyses) - len(self.disqualified)
        parts = [f"{counted} of {len(self.analyses)} ladders count"]
        if counted < 2:
            parts.append("one ladder is no replication" if counted else "there is nothing to say")
        else:
            parts.append("not replicated: " + "; ".join(self.failures) if self.failures else "replicated within the limit")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain types, the ladders included."""
        ladders = [analysis.to_dict() for analysis in self.analyses]
        return {"ok": self.ok, "verdict": self.verdict, "ranges": [asdict(found) for found in self.ranges], "ladders": ladders}

    def to_json(self) -> str:
        """Everything as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def to_csv(self) -> str:
        """The ranges as CSV text, one row each."""
        names = ("metric", "base", "arm", "low", "high", "spread", "largest_error", "ladders", "replicated", "beats_base")
        return csv_text((*names, "flags"), ([getattr(found, name) for name in names] + ["; ".join(found.flags)] for found in self.ranges))

    def print(self, console: Console) -> None:
        """Print every ladder, then the ranges and the verdict."""
        from gpukit.measure import tables

        tables.print_replication(self, console)


def combine(analyses: Iterable[Analysis]) -> Replication:
    """Put ladders of one design together.

    Parameters
    ----------
    analyses : iterable of Analysis
        At least one; the same design with the same limits, the same device, the same pairs; each file once.

    Raises
    ------
    ArgumentError
        There is none, one is there twice, or they are not ladders of one design on one device.

    Examples
    --------
    >>> import itertools, pathlib, tempfile
    >>> from gpukit.measure import Ladder, analyze
    >>> folder, ticks = pathlib.Path(tempfile.mkdtemp()), itertools.cycle([1.000, 1.001, 0.999, 1.0005])
    >>> ladder = Ladder({"stock": lambda: next(ticks), "slow": lambda: next(ticks) * 1.01}, lambda run: {"seconds": run()}, warmup=0)
    >>> both = combine([analyze(ladder.run(folder / name)) for name in ("1.csv", "2.csv")])
    >>> both.verdict, both.ranges[0].beats_base
    ('2 of 2 ladders count, replicated within the limit', False)
    """
    analyses = tuple(analyses)
    _require_alike(analyses)
    counted = [analysis for analysis in analyses if analysis.ok]
    series = zip(*(analysis.deltas for analysis in counted), strict=True) if counted else ()
    return Replication(analyses, tuple(_range(counted, deltas) for deltas in series))


def _require_alike(analyses: Sequence[Analysis]) -> None:
    if not analyses:
        raise ArgumentError("analyses: expected at least one ladder, got none")
    if len({analysis.digest for analysis in analyses}) < len(analyses):
        raise ArgumentError(f"analyses: expected each ladder once, got {', '.join(analysis.verification.path for analysis in analyses)}")
    first = analyses[0]
    for other in analyses[1:]:
        left, right = first.header.design.to_dict(), other.header.design.to_dict()
        differing = [name for name in left if name != "tag" and left[name] != right[name]]
        if first.header.provenance.get("device") != other.header.provenance.get("device"):
            differing.append("device")
        if [(delta.base, delta.arm, delta.metric) for delta in first.deltas] != [(delta.base, delta.arm, delta.metric) for delta in other.deltas]:
            differing.append("pairs")
        if differing:
            paths = f"{first.verification.path} and {other.verification.path}"
            raise ArgumentError(f"analyses: expected ladders of one design on one device, got {paths}, which differ in {', '.join(differing)}")


def _range(analyses: Sequence[Analysis], deltas: Sequence[Delta]) -> Range:
    first, design = deltas[0], analyses[0].header.design
    medians = [delta.median for delta in deltas]
    spread = max(medians) - min(medians)
    sign = 1 if first.metric in design.higher_is_better else -1
    return Range(
        metric=first.metric,
        base=first.base,
        arm=first.arm,
        low=min(medians),
        high=max(medians),
        spread=spread,
        errors=tuple(delta.standard_error for delta in deltas),
        ladders=len(deltas),
        replicated=spread <= design.replication_limit if len(deltas) > 1 else None,
        beats_base=len(deltas) > 1 and all(delta.verdict == "better" and sign * delta.median > spread for delta in deltas),
        flags=tuple(dict.fromkeys(flag for delta in deltas for flag in delta.flags)),
    )
