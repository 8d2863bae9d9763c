"""The ladder: an A/B experiment that can be trusted. It runs the arms in the fixed order and writes what each cell measured; judging is `analysis`'s.

All arms run in one process, each once per pass, and the order rotates from pass to pass, so that slow drift of clocks and temperature meets every
arm alike and cancels in the differences inside a pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from statistics import median
from typing import Any

from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.measure import provenance
from gpukit.measure.design import LadderDesign
from gpukit.measure.ladder_file import Cell, LadderHeader, LadderWriter, Value

__all__ = ["Ladder", "wall_seconds"]

Run = Callable[[], Any]
Measure = Callable[[Run], Mapping[str, Any]]


def wall_seconds(run: Run) -> dict[str, float]:
    """The default cell: seconds of wall time of one call. It waits for no device.

    Examples
    --------
    >>> list(wall_seconds(lambda: None))
    ['seconds']
    """
    start = time.perf_counter_ns()
    run()
    return {"seconds": (time.perf_counter_ns() - start) / 1e9}


class Ladder:
    """Variants of one workload, measured in rotation in one process.

    Parameters
    ----------
    arms : mapping of str to callable or object
        The variants by name. An object has ``run()``, and may have ``prepare()``, called before each of its cells, and ``teardown()``, called
        after each, also when it failed.
    cell : callable
        ``cell(run)`` calls the arm's ``run`` and returns one value for each metric, counter and geometry name, and no others. It is called `warmup`
        times for nothing, then `repetitions` times. ``lambda run: run()`` suits arms that measure themselves.
    base, null, structural_zero : str, optional
        Roles of arms; `base` is the first arm unless named.
    passes, repetitions, warmup : int
        Passes in all with the warm-up pass 0, and runs per cell.
    metrics, higher_is_better, judged_by, counters, geometry : sequence of str
        The columns, see `LadderDesign`.
    noise_limit, replication_limit : float
        Percent, and percentage points. They are written to the file before the first cell.
    tag : str
        The experiment's name.

    Raises
    ------
    ArgumentError
        A name, role or number that a ladder cannot have, or an arm that cannot run.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from gpukit.measure import verify
    >>> ladder = Ladder({"short": lambda: sum(range(100)), "long": lambda: sum(range(200))}, passes=4, tag="sums")
    >>> path = ladder.run(pathlib.Path(tempfile.mkdtemp()) / "sums.csv")
    >>> print(verify(path))
    one connected run: 4 passes × 2 arms = 8 cells
    """

    def __init__(
        self,
        arms: Mapping[str, Any],
        cell: Measure = wall_seconds,
        *,
        base: str | None = None,
        null: str | None = None,
        structural_zero: str | None = None,
        passes: int = 8,
        repetitions: int = 1,
        warmup: int = 1,
        metrics: Sequence[str] = ("seconds",),
        higher_is_better: Sequence[str] = (),
        judged_by: Sequence[str] = (),
        counters: Sequence[str] = (),
        geometry: Sequence[str] = (),
        noise_limit: float = 0.20,
        replication_limit: float = 0.15,
        tag: str = "",
    ):
        for name, arm in arms.items():
            if not callable(getattr(arm, "run", arm)):
                raise ArgumentTypeError(f"arms: expected a callable or an object with run(), got {arm!r} for {name}")
        self._arms = dict(arms)
        self._cell = cell
        self.design = LadderDesign(
            arms=tuple(arms),
            base=next(iter(arms), "") if base is None else base,
            null=null,
            structural_zero=structural_zero,
            passes=passes,
            repetitions=repetitions,
            warmup=warmup,
            metrics=_names("metrics", metrics),
            higher_is_better=_names("higher_is_better", higher_is_better),
            judged_by=_names("judged_by", judged_by),
            counters=_names("counters", counters),
            geometry=_names("geometry", geometry),
            noise_limit=noise_limit,
            replication_limit=replication_limit,
            tag=tag,
        )

    def run(
        self,
        path: str | Path,
        *,
        probes: Mapping[str, provenance.Probe] | None = None,
        progress: Callable[[int, int], None] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> Path:
        """Measure every cell and write the file.

        Parameters
        ----------
        path : path
            A file that does not exist yet.
        probes : mapping of str to callable, optional
            How to find device, driver, versions, git and other_processes; see `provenance.collect`.
        progress : callable, optional
            ``progress(cells measured, cells in all)`` after each cell.
        clock : callable
            Nanoseconds that never run backwards.

        Returns
        -------
        Path
            The file.

        Raises
        ------
        ArgumentError
            The file exists or cannot be made, or a cell returned other names or values than it should. What was measured until then stays in
            the file, which lacks its done line and so does not verify.
        """
        header = LadderHeader(self.design, provenance.collect(probes), clock())
        with LadderWriter(path, header) as writer:
            for count, slot in enumerate(self.design.order(), start=1):
                values, unsteady = self._measure(slot.arm)
                writer.write(Cell(slot, clock(), values, unsteady))
                if progress is not None:
                    progress(count, self.design.cells)
            writer.done()
        return Path(path)

    def _measure(self, name: str) -> tuple[dict[str, Value], tuple[str, ...]]:
        """One cell: the medians of its metrics, the rest as first seen, and the names of what differed between repetitions."""
        arm = self._arms[name]
        run = getattr(arm, "run", arm)
        try:
            getattr(arm, "prepare", _nothing)()
            for _ in range(self.design.warmup):
                self._cell(run)
            results = [self._checked(name, self._cell(run)) for _ in range(self.design.repetitions)]
        finally:
            getattr(arm, "teardown", _nothing)()
        values = {key: median(result[key] for result in results) if key in self.design.metrics else results[0][key] for key in results[0]}
        steady = (*self.design.counters, *self.design.geometry)
        return values, tuple(key for key in steady if len({result[key] for result in results}) > 1)

    def _checked(self, arm: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """A cell's result in plain types, with exactly the names of the design."""
        design = self.design
        wanted = (*design.metrics, *design.counters, *design.geometry)
        if not isinstance(result, Mapping) or set(result) != set(wanted):
            got = ", ".join(map(str, result)) if isinstance(result, Mapping) else repr(result)
            raise ArgumentError(f"cell: expected {', '.join(wanted)} from arm {arm}, got {got}")
        return {key: _plain(f"{key} of arm {arm}", result[key], key in design.metrics, key in design.geometry) for key in wanted}


def _nothing() -> None:
    pass


def _names(argument: str, names: Sequence[str]) -> tuple[str, ...]:
    # A lone string would pass as a sequence of its letters.
    if isinstance(names, str):
        raise ArgumentTypeError(f"{argument}: expected a sequence of names, got the text {names!r}")
    return tuple(names)


def _plain(what: str, value: Any, positive: bool, text: bool) -> Value:
    """A number as int or float, or printable text where that is allowed."""
    if text and isinstance(value, str) and (value == "" or value.isprintable()):
        return value
    if isinstance(value, Integral):
        number: int | float = int(value)
    elif isinstance(value, Real) and math.isfinite(value):
        number = float(value)
    else:
        raise ArgumentTypeError(f"cell: expected a finite number for {what}, got {value!r}")
    if positive and number <= 0:
        raise ArgumentError(f"cell: expected a number above 0 for {what}, got {value!r}")
    return number
