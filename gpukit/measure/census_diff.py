"""The difference of two kernel censuses: every kernel, regressions as prominently as gains, and the total. Taking a census is `census`'s job."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gpukit.errors import ArgumentError
from gpukit.measure.tables import csv_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["CensusDiff", "KernelChange", "KernelCount", "diff_censuses"]


@dataclass(frozen=True)
class KernelCount:
    """How often a kernel ran in what was observed, and the median device time of a launch in µs."""

    count: int
    median_us: float

    def __post_init__(self) -> None:
        if self.count < 1 or not (math.isfinite(self.median_us) and self.median_us >= 0):
            raise ArgumentError(f"count, median_us: expected at least 1 launch and a time from 0, got {self.count!r} and {self.median_us!r}")

    @property
    def total_us(self) -> float:
        """Count by median."""
        return self.count * self.median_us


@dataclass(frozen=True)
class KernelChange:
    """One kernel before and after; a side where it did not run is None. `total_us` is the change of count by median, µs: above 0 is slower."""

    name: str
    before: KernelCount | None
    after: KernelCount | None
    total_us: float

    @property
    def percent(self) -> float | None:
        """Change of the median in percent; None where there is nothing to compare."""
        if self.before is None or self.after is None or self.before.median_us == 0:
            return None
        return 100 * (self.after.median_us / self.before.median_us - 1)


@dataclass(frozen=True)
class CensusDiff:
    """Two censuses side by side.

    Attributes
    ----------
    problems : tuple of str
        Kernels that only one side has, or that ran more often on one side. Times then belong to different work.
    changes : tuple of KernelChange
        Every kernel, the largest change of either sign first.
    before_us, after_us : float
        The totals.
    """

    problems: tuple[str, ...]
    changes: tuple[KernelChange, ...]
    before_us: float
    after_us: float

    @property
    def same_kernels(self) -> bool:
        """Whether both sides ran the same kernels equally often."""
        return not self.problems

    @property
    def total_us(self) -> float:
        """Change of the total, µs: above 0 is slower."""
        return self.after_us - self.before_us

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain types."""
        changes = [asdict(change) | {"percent": change.percent} for change in self.changes]
        return asdict(self) | {"same_kernels": self.same_kernels, "total_us": self.total_us, "changes": changes}

    def to_json(self) -> str:
        """Everything as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def to_csv(self) -> str:
        """Every kernel as CSV text, the total last."""
        names = ("name", "count_before", "median_us_before", "count_after", "median_us_after", "percent", "total_us")
        rows = [(change.name, *_side(change.before), *_side(change.after), change.percent, change.total_us) for change in self.changes]
        return csv_text(names, [*rows, ("total", None, None, None, None, None, self.total_us)])

    def print(self, console: Console) -> None:
        """Print the table, what is not alike first."""
        from gpukit.measure import tables

        tables.print_census_diff(self, console)


def diff_censuses(before: Mapping[str, KernelCount], after: Mapping[str, KernelCount]) -> CensusDiff:
    """Compare two censuses, kernel by kernel.

    Parameters
    ----------
    before, after : mapping of str to KernelCount
        All kernels of the same work, by name.

    Examples
    --------
    >>> stock = {"attention": KernelCount(40, 12.0), "norm": KernelCount(80, 2.0)}
    >>> window = {"attention": KernelCount(40, 11.5), "norm": KernelCount(80, 2.3)}
    >>> found = diff_censuses(stock, window)
    >>> [(change.name, round(change.total_us, 3)) for change in found.changes], round(found.total_us, 3)
    ([('norm', 24.0), ('attention', -20.0)], 4.0)
    """
    names = dict.fromkeys((*before, *after))
    problems = tuple(problem for name in names if (problem := _unlike(name, before.get(name), after.get(name))))
    changes = [KernelChange(name, before.get(name), after.get(name), _total(after.get(name)) - _total(before.get(name))) for name in names]
    changes.sort(key=lambda change: -abs(change.total_us))
    return CensusDiff(problems, tuple(changes), sum(map(_total, before.values())), sum(map(_total, after.values())))


def _unlike(name: str, before: KernelCount | None, after: KernelCount | None) -> str:
    if before is None or after is None:
        return f"{name} ran only {'after' if before is None else 'before'}"
    return f"{name} ran {before.count} times before and {after.count} after" if before.count != after.count else ""


def _total(kernel: KernelCount | None) -> float:
    return 0.0 if kernel is None else kernel.total_us


def _side(kernel: KernelCount | None) -> list[object]:
    return [None, None] if kernel is None else [kernel.count, kernel.median_us]
