"""What is fixed before a ladder runs: arms and their roles, order, repetitions, columns and limits. It measures nothing and judges nothing.

The design is written into the first line of the ladder's file, so that neither the order of the cells nor a limit can be chosen afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from gpukit.errors import ArgumentError

__all__ = ["ORDER_COLUMNS", "RULE", "UNSTEADY_COLUMN", "LadderDesign", "Slot"]

# The one order there is: pass p starts with arm p modulo the number of arms and goes round.
RULE = "rotate by one arm per pass"
ORDER_COLUMNS = ("pass", "position", "arm", "clock_ns")
# Names the counters and geometry that differed between the repetitions of one cell.
UNSTEADY_COLUMN = "unsteady"
# Pass 0 warms up, and one pair has no spread.
FEWEST_PASSES, MOST_PASSES = 3, 10_000


class Slot(NamedTuple):
    """One place in the order: which arm runs at which position of which pass. All count from 0."""

    pass_index: int
    position: int
    arm: str


@dataclass(frozen=True)
class LadderDesign:
    """A ladder's arms, order, columns and limits.

    Attributes
    ----------
    arms : tuple of str
        Names of the variants, in the order of pass 0.
    base : str
        The arm whose spread is held against `noise_limit`, and the default left side of every pair.
    null : str or None
        An arm with the mechanism armed and nothing installed: it must read zero within noise.
    structural_zero : str or None
        An arm of the same cost, aimed at something nothing reads: it must not gain.
    passes : int
        Passes in all, the warm-up pass 0 included: the file holds ``passes * len(arms)`` cells.
    repetitions, warmup : int
        Measured and unmeasured runs of each cell. A cell's metric is the median of its repetitions.
    metrics : tuple of str
        What is measured, each a number above 0. Less is better unless named in `higher_is_better`.
    higher_is_better : tuple of str
        Metrics that are rates.
    judged_by : tuple of str
        Metrics whose noise and controls can disqualify the ladder; empty is all of them. The others are flagged only.
    counters : tuple of str
        What must not depend on the arm: rounds, fallback steps, acceptance.
    geometry : tuple of str
        What the cell reports about its memory window; numbers or text.
    noise_limit : float
        Largest spread of the base arm, in percent: the standard deviation over passes by the median.
    replication_limit : float
        Largest distance between the medians of several ladders, in percentage points.
    control_errors : float
        How many standard errors of the median a null arm may read, a structural-zero arm may gain, and a delta must exceed to be called one.
    tag : str
        The experiment's name.
    rule : str
        The rule of the order.

    Raises
    ------
    ArgumentError
        A name, role or number that a ladder cannot have.

    Examples
    --------
    >>> design = LadderDesign(arms=("stock", "window", "null"), base="stock", null="null", passes=3)
    >>> ["".join(slot.arm[0] for slot in design.order() if slot.pass_index == p) for p in range(3)]
    ['swn', 'wns', 'nsw']
    """

    arms: tuple[str, ...]
    base: str
    null: str | None = None
    structural_zero: str | None = None
    passes: int = 8
    repetitions: int = 1
    warmup: int = 1
    metrics: tuple[str, ...] = ("seconds",)
    higher_is_better: tuple[str, ...] = ()
    judged_by: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    geometry: tuple[str, ...] = ()
    noise_limit: float = 0.20
    replication_limit: float = 0.15
    control_errors: float = 3.0
    tag: str = ""
    rule: str = RULE

    def __post_init__(self) -> None:
        self._check_names()
        self._check_roles()
        self._check_numbers()

    @property
    def cells(self) -> int:
        """Rows of a complete file."""
        return self.passes * len(self.arms)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the file's columns, in order."""
        return (*ORDER_COLUMNS, *self.metrics, *self.counters, *self.geometry, UNSTEADY_COLUMN)

    @property
    def judged(self) -> tuple[str, ...]:
        """The metrics that can disqualify the ladder."""
        return self.judged_by or self.metrics

    def order(self) -> Iterator[Slot]:
        """Every slot in the only order there is."""
        for index in range(self.passes):
            start = index % len(self.arms)
            for position, arm in enumerate(self.arms[start:] + self.arms[:start]):
                yield Slot(index, position, arm)

    def to_dict(self) -> dict[str, Any]:
        """The design in plain types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> LadderDesign:
        """The design that `to_dict`, or JSON made from it, describes; no field may be missing or unknown."""
        names = {field.name for field in fields(cls)}
        if set(content) != names:
            raise ArgumentError(f"design: expected the fields {', '.join(sorted(names))}, got {', '.join(sorted(content))}")
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
        return cls(**values)

    def _check_names(self) -> None:
        _require_names("arms", self.arms, at_least=2)
        for argument in ("metrics", "counters", "geometry", "higher_is_better", "judged_by"):
            names = getattr(self, argument)
            _require_names(argument, names, at_least=1 if argument == "metrics" else 0)
            if odd := [name for name in names if not name.isidentifier()]:
                raise ArgumentError(f"{argument}: expected names of letters, digits and underscores, got {', '.join(odd)}")
        if len(set(self.columns)) < len(self.columns):
            raise ArgumentError(f"metrics, counters, geometry: expected names of their own beside the file's, got {self.columns}")
        for argument in ("higher_is_better", "judged_by"):
            if unknown := set(getattr(self, argument)) - set(self.metrics):
                raise ArgumentError(f"{argument}: expected some of the metrics {', '.join(self.metrics)}, got {', '.join(sorted(unknown))}")
        if not isinstance(self.tag, str) or not (self.tag == "" or self.tag.isprintable()):
            raise ArgumentError(f"tag: expected printable text, got {self.tag!r}")
        if self.rule != RULE:
            raise ArgumentError(f"rule: expected {RULE!r}, got {self.rule!r}")

    def _check_roles(self) -> None:
        roles = {name: arm for name in ("base", "null", "structural_zero") if (arm := getattr(self, name)) is not None or name == "base"}
        for role, arm in roles.items():
            if arm not in self.arms:
                raise ArgumentError(f"{role}: expected one of the arms {', '.join(self.arms)}, got {arm!r}")
        if len(set(roles.values())) < len(roles):
            raise ArgumentError(f"base, null, structural_zero: expected different arms, got {', '.join(map(repr, roles.values()))}")

    def _check_numbers(self) -> None:
        for name, least, most in (("passes", FEWEST_PASSES, MOST_PASSES), ("repetitions", 1, math.inf), ("warmup", 0, math.inf)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ArgumentError(f"{name}: expected a whole number from {least} to {most}, got {value!r}")
        for name in ("noise_limit", "replication_limit", "control_errors"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
                raise ArgumentError(f"{name}: expected a number above 0, got {value!r}")


def _require_names(argument: str, names: Any, at_least: int) -> None:
    """Refuse names that could not stand in a line of a CSV file and be told apart."""
    if not isinstance(names, tuple) or len(names) < at_least:
        raise ArgumentError(f"{argument}: expected a tuple of at least {at_least} names, got {names!r}")
    for name in names:
        if not isinstance(name, str) or not name or not name.isprintable() or name != name.strip():
            raise ArgumentError(f"{argument}: expected printable names without spaces at their ends, got {name!r}")
    if len(set(names)) < len(names):
        raise ArgumentError(f"{argument}: expected different names, got {', '.join(names)}")
