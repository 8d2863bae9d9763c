"""Splits the gain of a speculative decode into "fewer rounds" and "faster rounds", from plain numbers or a ladder's file. It measures nothing.

With t = decode seconds / rounds the identity ``time(base) / time(arm) = [rounds(base) / rounds(arm)] · [t(base) / t(arm)]`` is exact. Only the
second factor is the speed of the kernels; where the first is not 1, the arms did different work and do not compare at face value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukit.errors import ArgumentError
from gpukit.measure.analysis import counted_cells, median_error, read_verified

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Decode", "Split", "acceptance", "split", "split_ladder"]


@dataclass(frozen=True)
class Decode:
    """One speculative decode.

    Attributes
    ----------
    seconds : float
        Decode time, above 0.
    rounds : float
        Verification rounds, above 0.
    accepted : float or None
        Drafts accepted in all.
    fallback : float or None
        Steps that ran without speculation.
    """

    seconds: float
    rounds: float
    accepted: float | None = None
    fallback: float | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "rounds"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ArgumentError(f"{name}: expected a number above 0, got {getattr(self, name)!r}")
        for name in ("accepted", "fallback"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ArgumentError(f"{name}: expected a number from 0, got {value!r}")

    @property
    def seconds_per_round(self) -> float:
        """t, the time of one round."""
        return self.seconds / self.rounds

    @property
    def tokens(self) -> float | None:
        """Tokens made: each round makes one of its own and keeps the drafts it accepted. None where the accepted drafts are unknown."""
        return None if self.accepted is None else self.rounds + self.accepted


@dataclass(frozen=True)
class Split:
    """The factors of ``time(base) / time(arm)``; above 1 the arm is faster.

    Attributes
    ----------
    base, arm : Decode
        Of a ladder: the medians over passes.
    flags : tuple of str
        Why the time ratio does not compare at face value; empty if it does.
    passes : tuple of Split
        The splits pass by pass, empty for plain numbers.
    """

    base: Decode
    arm: Decode
    flags: tuple[str, ...]
    passes: tuple[Split, ...] = ()

    @property
    def time_ratio(self) -> float:
        """time(base) / time(arm)."""
        return self.base.seconds / self.arm.seconds

    @property
    def rounds_ratio(self) -> float:
        """rounds(base) / rounds(arm): fewer rounds."""
        return self.base.rounds / self.arm.rounds

    @property
    def round_time_ratio(self) -> float:
        """t(base) / t(arm): faster rounds."""
        return self.base.seconds_per_round / self.arm.seconds_per_round

    @property
    def standard_error(self) -> float | None:
        """Standard error of the median time ratio over passes; None for fewer than two passes."""
        return median_error([one.time_ratio for one in self.passes])[1] if self.passes else None

    @property
    def comparable(self) -> bool:
        """Whether all of a gain is round speed."""
        return not self.flags

    @property
    def verdict(self) -> str:
        """One line: what the gain is made of."""
        product = f"{self.time_ratio:.4f} = {self.rounds_ratio:.4f} (fewer rounds) × {self.round_time_ratio:.4f} (faster rounds)"
        return f"{product}: " + ("all of it is round speed" if self.comparable else "not comparable at face value: " + "; ".join(self.flags))

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain types."""
        ratios = {name: getattr(self, name) for name in ("time_ratio", "rounds_ratio", "round_time_ratio", "standard_error", "comparable", "verdict")}
        passes = [{name: getattr(one, name) for name in ("time_ratio", "rounds_ratio", "round_time_ratio")} for one in self.passes]
        return {**ratios, "base": asdict(self.base), "arm": asdict(self.arm), "flags": list(self.flags), "passes": passes}

    def to_json(self) -> str:
        """Everything as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def print(self, console: Console) -> None:
        """Print the factors and the verdict."""
        from gpukit.measure import tables

        tables.print_split(self, console)


def acceptance(rounds: float, accepted: float, drafts_per_round: int) -> float:
    """Share of the drafts that were accepted.

    Examples
    --------
    >>> round(acceptance(rounds=678, accepted=1626, drafts_per_round=3), 10)
    0.7994100295
    """
    if not (rounds > 0 and drafts_per_round > 0 and 0 <= accepted <= rounds * drafts_per_round):
        raise ArgumentError(f"accepted: expected 0 … rounds × drafts_per_round ({rounds} × {drafts_per_round}), got {accepted}")
    return accepted / (rounds * drafts_per_round)


def split(base: Decode, arm: Decode, *, tokens: int | None = None) -> Split:
    """Split the ratio of two decodes' times.

    Parameters
    ----------
    base, arm : Decode
    tokens : int, optional
        How many tokens each should have made; checked where the accepted drafts are known.

    Examples
    --------
    >>> found = split(Decode(10.0, 678, accepted=1626), Decode(9.9, 678, accepted=1626), tokens=6 * 384)
    >>> found.comparable, round(found.round_time_ratio, 4)
    (True, 1.0101)
    >>> print(split(Decode(10.0, 714), Decode(9.9, 690)).verdict)
    1.0101 = 1.0348 (fewer rounds) × 0.9761 (faster rounds): not comparable at face value: 714 rounds against 690
    """
    flags = []
    if base.rounds != arm.rounds:
        flags.append(f"{base.rounds:g} rounds against {arm.rounds:g}")
    if base.fallback != arm.fallback:
        flags.append(f"{base.fallback} fallback steps against {arm.fallback}")
    for name, decode in (("base", base), ("arm", arm)):
        if tokens is not None and decode.tokens is not None and decode.tokens != tokens:
            flags.append(f"rounds and accepted drafts of {name} make {decode.tokens:g} tokens, expected {tokens}")
    if tokens is None and base.tokens != arm.tokens:
        flags.append(f"{base.tokens} tokens against {arm.tokens}")
    return Split(base, arm, tuple(flags))


def split_ladder(
    path: str | Path,
    arm: str,
    base: str | None = None,
    *,
    seconds: str = "decode_seconds",
    rounds: str = "rounds",
    accepted: str | None = None,
    fallback: str | None = None,
    tokens: int | None = None,
    unverified: bool = False,
) -> Split:
    """Split the gain of one arm of a ladder over another, pass by pass and in the median.

    Parameters
    ----------
    path : path
        A ladder's file.
    arm, base : str
        Arms; `base` is the ladder's own base unless named.
    seconds, rounds, accepted, fallback : str
        The columns that hold them; `accepted` and `fallback` may be left out.
    tokens : int, optional
        How many tokens each decode should have made.
    unverified : bool
        Take a file that is not one connected run.

    Raises
    ------
    ArgumentError
        An unverified file, an unknown arm or column, or no pass that holds both arms.
    """
    file = read_verified(path, unverified)
    assert file.header is not None
    design = file.header.design
    base = design.base if base is None else base
    columns = {"seconds": seconds, "rounds": rounds, "accepted": accepted, "fallback": fallback}
    measured = (*design.metrics, *design.counters)
    for argument, name in {"base": base, "arm": arm, **columns}.items():
        known = design.arms if argument in ("base", "arm") else measured
        if name is not None and name not in known:
            raise ArgumentError(f"{argument}: expected one of {', '.join(known)}, got {name!r}")
    cells = counted_cells(file)
    both = [index for index in range(design.passes) if (base, index) in cells and (arm, index) in cells]
    if not both:
        raise ArgumentError(f"path: expected a pass with both {base} and {arm}, got none in {path}")
    runs = {side: [_decode(cells[side, index].values, columns) for index in both] for side in (base, arm)}
    passes = [split(left, right, tokens=tokens) for left, right in zip(runs[base], runs[arm], strict=True)]
    total = split(_median(runs[base]), _median(runs[arm]), tokens=tokens)
    drifts = [f"rounds drift in {side}" for side in dict.fromkeys((base, arm)) if len({run.rounds for run in runs[side]}) > 1]
    return Split(total.base, total.arm, (*total.flags, *drifts), tuple(passes))


def _decode(values: Any, columns: dict[str, str | None]) -> Decode:
    return Decode(**{name: values[column] for name, column in columns.items() if column is not None})


def _median(runs: Sequence[Decode]) -> Decode:
    """The decode of the medians: its t is the median time by the median rounds, so the identity stays exact."""
    medians: dict[str, Any] = {}
    for name in ("seconds", "rounds", "accepted", "fallback"):
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        medians[name] = median_error(values)[0] if values else None
    return Decode(**medians)
