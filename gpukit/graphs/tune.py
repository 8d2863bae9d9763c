"""`tune` chooses a plan by measuring it. The caller's graph is built under every candidate and all run in rotation in one process, as ladders with
controls; what comes back is stock, unless something beat it in total time by more than its ladders lie apart.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukit import checks, devices
from gpukit.devices import DeviceProperties
from gpukit.errors import ArgumentError, ArgumentTypeError, DeviceError
from gpukit.graphs import driver
from gpukit.graphs.audit import audit
from gpukit.graphs.candidates import candidates
from gpukit.graphs.capture import Graph
from gpukit.graphs.identity import compare_outputs
from gpukit.graphs.reservation import Reservation
from gpukit.graphs.result import NULL_NAME, PUBLISHED_NAME, STOCK_NAME, TOTAL, ZERO_NAME, Row, TuneResult, read_result
from gpukit.graphs.window import Plan, Recipe, Region, load_plan, require_regions

if TYPE_CHECKING:
    from gpukit.measure import Analysis, Replication

__all__ = ["Built", "resolve", "tune"]


@dataclass
class Built:
    """What the caller builds under a plan.

    Attributes
    ----------
    phases : mapping of str to Graph or callable
        What one run of each phase is. A callable enqueues its work on `stream` and returns.
    stream : int
        Where everything runs.
    outputs : callable, optional
        ``outputs(seed)`` puts the inputs of a seed in place, runs every phase once on `stream` and returns all arrays that were written: what the
        bit-identity gate compares.
    keep : object
        Whatever must live as long.
    """

    phases: Mapping[str, Graph | Callable[[], Any]]
    stream: int
    outputs: Callable[[int], Iterable[Any]] | None = None
    keep: Any = None

    def run(self, phase: str) -> None:
        """One run of a phase."""
        work = self.phases[phase]
        if isinstance(work, Graph):
            work.launch(self.stream)
        else:
            work()


class _Arm:
    """A candidate in a ladder: its limit is in force from `prepare` to `teardown`, and lines that another arm pinned are let go before."""

    def __init__(self, recipe: Recipe, plan: Plan, built: Built, phases: Mapping[str, int]):
        self.recipe = recipe
        self.plan = plan
        self.built = built
        self.cycles = 1
        self._carried = self.geometry = _geometry(plan, built)
        self._phases = phases
        self._reservation: Reservation | None = None
        self._events: list[Any] = []

    def prepare(self) -> None:
        if devices.properties(self.plan.device).persisting_l2_max:
            driver.reset_persisting(self.plan.device)
        if self.plan.reserve is not None:
            with warnings.catch_warnings():
                # A grant that differs is in the table, once, not on the terminal for every cell.
                warnings.simplefilter("ignore", RuntimeWarning)
                self._reservation = Reservation(self.plan.reserve, self.plan.device)
            if self._reservation.granted != self.plan.reserve:
                self.geometry = f"{self._carried}, granted {self._reservation.granted}"

    def teardown(self) -> None:
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None

    def run(self) -> dict[str, Any]:
        """Seconds of one run of each phase and of the mix, from events around whole cycles of it, the first not counted."""
        times = self._timed(self.cycles)
        seconds = {phase: sum(times[phase]) / (self.cycles * runs) for phase, runs in self._phases.items()}
        total = sum(sum(own) for own in times.values()) / self.cycles
        return {**seconds, TOTAL: total, "geometry": self.geometry}

    def _timed(self, cycles: int) -> dict[str, list[float]]:
        from gpukit.kernels import calibration

        bindings, stream, device = devices.driver(), self.built.stream, self.plan.device
        marks = cycles * len(self._phases) + 1
        with devices.current(device):
            while len(self._events) < marks:
                self._events.append(devices.call(bindings.cuEventCreate(0), "cuEventCreate"))
            # The host gets ahead, so that its delays stay out of the measurement.
            calibration.sleep(60.0, stream, device)
            for phase, runs in self._phases.items():
                self._run(phase, runs)
            at = 0
            devices.call(bindings.cuEventRecord(self._events[0], stream), "cuEventRecord")
            for _ in range(cycles):
                for phase, runs in self._phases.items():
                    self._run(phase, runs)
                    at += 1
                    devices.call(bindings.cuEventRecord(self._events[at], stream), "cuEventRecord")
            devices.call(bindings.cuEventSynchronize(self._events[at]), "cuEventSynchronize")
            times: dict[str, list[float]] = {phase: [] for phase in self._phases}
            at = 0
            for _ in range(cycles):
                for phase in self._phases:
                    took = devices.call(bindings.cuEventElapsedTime(self._events[at], self._events[at + 1]), "cuEventElapsedTime")
                    times[phase].append(float(took) / 1e3)
                    at += 1
        return times

    def run_once(self) -> None:
        """Every phase once."""
        for phase in self._phases:
            self._run(phase, 1)

    def _run(self, phase: str, runs: int) -> None:
        if self._reservation is not None and phase in self.plan.suspend:
            with self._reservation.suspended():
                for _ in range(runs):
                    self.built.run(phase)
                # The limit must not come back while the phase still runs.
                devices.call(devices.driver().cuStreamSynchronize(self.built.stream), "cuStreamSynchronize")
            return
        for _ in range(runs):
            self.built.run(phase)

    def close(self) -> None:
        self.teardown()
        for event in self._events:
            devices.driver().cuEventDestroy(event)
        self._events.clear()
        for work in self.built.phases.values():
            if isinstance(work, Graph):
                work.close()


def _geometry(plan: Plan, built: Built) -> str:
    """What the graphs carry, in words."""
    graphs = [work for work in built.phases.values() if isinstance(work, Graph)]
    audits = [audit(graph) for graph in graphs]
    windows = {window: None for found in audits for window in found.windows}
    text = f"{sum(found.windowed for found in audits)} of {sum(found.kernels for found in audits)} nodes windowed"
    for window in windows:
        text += f", {window.size} bytes at {window.ratio:.4f}"
    return text + (f", reserve {plan.reserve}" if plan.reserve is not None else "")


def tune(
    build_graph: Callable[[Plan], Built],
    regions: Mapping[str, Region],
    phases: Mapping[str, int],
    *,
    recipes: Sequence[Recipe] | None = None,
    device: int = 0,
    ladders: int = 2,
    passes: int = 8,
    cell_us: float = 4000.0,
    noise_limit: float = 1.0,
    replication_limit: float = 1.0,
    control_limit: float = 0.25,
    confirm: bool = True,
    seeds: Sequence[int] = (1, 2),
    geometry: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    reuse: str | Path | None = None,
    census: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> TuneResult:
    """Build the caller's graphs under candidate plans, measure them against each other, and return the best if it beats stock.

    Parameters
    ----------
    build_graph : callable
        ``build_graph(plan)`` captures under the plan (``capture(stream, plan=plan)``, or `apply` around another library's capture), minds
        ``plan.options``, and returns a `Built`. The plan comes without a reserve: the limit belongs to whichever candidate is running.
    regions : mapping of str to Region
        What windows may lie over.
    phases : mapping of str to int
        The mix: runs of each phase in a cycle, in their order, ``{"prefill": 1, "decode": 32}``. Phases are timed inside the cycle, so
        what one evicts the next one pays for; ``total`` is the whole cycle.
    recipes : sequence of Recipe, optional
        Candidates; those of `candidates` by default. Stock, a null arm (the limit requested as it is, nothing installed), a structural-zero arm (a
        window of the same cost over a buffer that nothing reads) and the published recipe are always among them.
    device : int
        Ordinal.
    ladders, passes : int
        Ladders that must count, at least 2, and passes of each, of which the first warms up. Half as many again are run where some do not count.
    cell_us : float
        Microseconds that a cell lasts at least: whole cycles.
    noise_limit, replication_limit : float
        See `LadderDesign`; only the total is judged.
    control_limit : float
        Percent. A control that moves by less is a flag and no disqualification, however small its noise, and no plan wins by less.
    confirm : bool
        Measure the best once more, against stock and the controls alone, in ladders of their own: the best of many looks better than it is.
    seeds : sequence of int
        Inputs of the bit-identity gate, which is passed before anything is measured, if `Built` has outputs: two different ones or more, or
        none to leave it out.
    geometry : mapping, optional
        Whatever else the result depends on, in plain types: shapes, batch.
    folder : path, optional
        Where the raw ladder files go; a temporary directory by default.
    reuse : path, optional
        A result of `TuneResult.to_json`: returned without measuring if it is from this device, these phases, candidates and geometry; written
        otherwise.
    census : bool
        Profile every kernel under stock, the published recipe and the winner; needs torch.
    progress : callable, optional
        ``progress(what, done, all)``.

    Returns
    -------
    TuneResult

    Raises
    ------
    ArgumentError
        Phases, recipes, numbers, types or files that do not fit, found before anything is built; or `build_graph` returned no `Built` of all
        phases.
    DeviceError
        The bit-identity gate was not passed, or the driver refused.

    Notes
    -----
    The device's persisting limit is what it was before, whatever happens. Other work on the device would be measured too.
    """
    if not callable(build_graph):
        raise ArgumentTypeError(f"build_graph: expected a callable, got {type(build_graph).__name__}")
    if progress is not None and not callable(progress):
        raise ArgumentTypeError(f"progress: expected a callable, got {type(progress).__name__}")
    regions, phases, seeds = require_regions(regions), _checked_phases(phases), _checked_seeds(seeds)
    if (ladders := checks.integer(ladders, "ladders")) < 2:
        raise ArgumentError(f"ladders: expected at least 2, because one is no replication, got {ladders}")
    passes = checks.integer(passes, "passes")
    cell_us, control_limit = checks.number(cell_us, "cell_us", 0), checks.number(control_limit, "control_limit", 0)
    noise_limit, replication_limit = checks.number(noise_limit, "noise_limit", 0), checks.number(replication_limit, "replication_limit", 0)
    geometry = checks.plain(checks.mapping({} if geometry is None else geometry, "geometry"), "geometry")
    device = checks.whole(device, "device")
    given = None if recipes is None else _checked_recipes(recipes, regions, phases)
    known = devices.properties(device)
    chosen = _with_published(candidates(regions, known) if given is None else given, regions)
    for recipe in chosen:
        recipe.plan(regions, device=device, properties=known)
    _checked_design(phases, chosen, passes, noise_limit, replication_limit)
    key = _key(known, regions, phases, chosen, geometry)
    if reuse is not None:
        reuse = checks.path(reuse, "reuse")
        if reuse.exists() and (kept := read_result(reuse, "reuse")).key == key:
            return kept
        checks.writable(reuse, "reuse")
    if folder is not None:
        folder = _checked_folder(folder)
    with tempfile.TemporaryDirectory() as temporary, _Bench(build_graph, regions, phases, chosen, device, known, cell_us) as bench:
        where = Path(temporary if folder is None else folder)
        gate = bench.identity(seeds)
        limits = noise_limit, replication_limit, control_limit
        first = _ladders(bench, list(bench.arms), where, "sweep", ladders, passes, limits, progress)
        rows = tuple(_row(bench, name, first, control_limit) for name in bench.arms)
        beating = sorted((row for row in rows if row.beats_stock and row.role in ("candidate", PUBLISHED_NAME)), key=lambda row: row.change[TOTAL][1])
        winner, reason = bench.arms[STOCK_NAME].recipe, "nothing beat stock in total time beyond the spread of its ladders"
        told = [(found.verification.path, found.verdict) for found in first.analyses]
        counted = len(first.analyses) - len(first.disqualified)
        if counted < 2:
            reason = f"{counted} of {len(first.analyses)} ladders count, which is no replication"
            beating = []
        if beating:
            best = beating[0]
            low, high = best.change[TOTAL]
            winner, reason = best.recipe, f"{low:+.2f} … {high:+.2f} % in total time over {counted} ladders"
            if confirm:
                names = [STOCK_NAME, NULL_NAME, ZERO_NAME, best.recipe.name]
                second = _ladders(bench, names, where, "confirm", ladders, passes, limits, progress)
                told += [(found.verification.path, found.verdict) for found in second.analyses]
                again = _row(bench, best.recipe.name, second, control_limit)
                if again.beats_stock:
                    reason += f", confirmed at {again.change[TOTAL][0]:+.2f} … {again.change[TOTAL][1]:+.2f} %"
                else:
                    winner, reason = bench.arms[STOCK_NAME].recipe, f"{best.recipe.name} beat stock in the sweep and not when measured again"
        censuses = bench.censuses([PUBLISHED_NAME, winner.name]) if census else {}
        result = TuneResult(winner, reason, rows, key, tuple((Path(path).name, verdict) for path, verdict in told), gate, censuses)
    if reuse is not None:
        Path(reuse).write_text(result.to_json() + "\n", encoding="utf-8")
    return result


def resolve(
    residency: str,
    regions: Mapping[str, Region],
    *,
    device: int = 0,
    measure: Callable[[], TuneResult] | None = None,
    properties: DeviceProperties | None = None,
) -> Plan:
    """The plan that an option like ``--residency off|auto|plan.json`` means.

    Parameters
    ----------
    residency : str
        ``off`` is stock; ``auto`` is what `measure` finds, and stock where there is none, because sizes do not say where a plan helps; anything else
        is a file, see `load_plan`.
    regions : mapping of str to Region
        What the recipe's region may be.
    device : int
        Ordinal.
    measure : callable, optional
        Calls `tune`, usually with `reuse`, so that it measures once per device and geometry.
    properties : DeviceProperties, optional
        Of the device, if not read from it.

    Examples
    --------
    >>> resolve("off", {}).does_nothing
    True
    """
    if residency == "off":
        return Plan(device=device)
    if residency == "auto":
        recipe = Recipe(STOCK_NAME) if measure is None else measure().winner
    else:
        recipe = load_plan(residency)
    return recipe.plan(regions, device=device, properties=properties)


def _with_published(recipes: list[Recipe], regions: Mapping[str, Region]) -> list[Recipe]:
    names = [recipe.name for recipe in recipes]
    reserved = {STOCK_NAME, NULL_NAME, ZERO_NAME} & set(names)
    if len(set(names)) < len(names) or reserved:
        raise ArgumentError(f"recipes: expected different names other than {STOCK_NAME}, {NULL_NAME} and {ZERO_NAME}, got {', '.join(names)}")
    if PUBLISHED_NAME in names:
        return recipes
    return [Recipe(PUBLISHED_NAME, next(iter(regions))), *recipes]


def _checked_phases(phases: Any) -> dict[str, int]:
    for name, runs in checks.mapping(phases, "phases").items():
        # They are columns of the ladder files.
        if not name.isidentifier():
            raise ArgumentError(f"phases: expected names of letters, digits and underscores, got {name!r}")
        checks.integer(runs, "phases")
    if not phases or min(phases.values()) < 1 or TOTAL in phases:
        raise ArgumentError(f"phases: expected names other than {TOTAL} with at least 1 run each, got {dict(phases)}")
    return {name: int(runs) for name, runs in phases.items()}


def _checked_seeds(seeds: Any) -> tuple[int, ...]:
    found = tuple(checks.integer(seed, "seeds") for seed in checks.items(seeds, "seeds"))
    if len(found) == 1 or len(set(found)) < len(found):
        raise ArgumentError(f"seeds: expected none, or at least two that all differ, got {', '.join(map(str, found))}")
    return found


def _checked_recipes(recipes: Any, regions: Mapping[str, Region], phases: Mapping[str, int]) -> list[Recipe]:
    found = checks.items(recipes, "recipes")
    for recipe in found:
        if not isinstance(recipe, Recipe):
            raise ArgumentTypeError(f"recipes: expected a sequence of Recipe, got {type(recipe).__name__} in it")
        if recipe.region is not None and recipe.region not in regions:
            raise ArgumentError(f"recipes: expected one of the regions {', '.join(regions)} for {recipe.name}, got {recipe.region!r}")
        if unknown := [name for name in recipe.suspend if name not in phases]:
            raise ArgumentError(f"recipes: expected phases of {', '.join(phases)} to suspend for {recipe.name}, got {', '.join(unknown)}")
        checks.plain(recipe.options, f"recipes: options of {recipe.name}")
    if found and PUBLISHED_NAME in (recipe.name for recipe in found) and all(recipe.region is None for recipe in found):
        raise ArgumentError("recipes: expected at least one with a region, because the structural zero costs what its window does, got none")
    return list(found)


def _checked_design(phases: Mapping[str, int], recipes: Sequence[Recipe], passes: int, noise_limit: float, replication_limit: float) -> None:
    """Refuse now what the ladders would refuse once everything is built."""
    from gpukit.measure.design import ORDER_COLUMNS, UNSTEADY_COLUMN, LadderDesign

    if taken := {"geometry", *ORDER_COLUMNS, UNSTEADY_COLUMN} & set(phases):
        raise ArgumentError(f"phases: expected names that are no other column of a ladder file, got {', '.join(sorted(taken))}")
    arms = (STOCK_NAME, NULL_NAME, ZERO_NAME, *(recipe.name for recipe in recipes))
    if odd := [name for name in arms if not name.isprintable() or name != name.strip()]:
        raise ArgumentError(f"recipes: expected printable names without spaces at their ends, got {', '.join(map(repr, odd))}")
    metrics = (*phases, TOTAL)
    limits: dict[str, Any] = {"passes": passes, "noise_limit": noise_limit, "replication_limit": replication_limit}
    LadderDesign(arms, STOCK_NAME, NULL_NAME, ZERO_NAME, metrics=metrics, geometry=("geometry",), **limits)


def _checked_folder(folder: Any) -> Path:
    found = checks.path(folder, "folder")
    try:
        found.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"folder: expected a directory, or a place for one, got {found}: {error.strerror}") from None
    if not os.access(found, os.W_OK):
        raise ArgumentError(f"folder: expected a directory that can be written, got {found}")
    return found


def _key(
    known: DeviceProperties, regions: Mapping[str, Region], phases: Mapping[str, int], recipes: Sequence[Recipe], geometry: Mapping[str, Any]
) -> dict[str, Any]:
    """What a result is good for, in plain types; addresses are not part of it."""
    key = {
        "device": known.name,
        "l2": [known.l2, known.persisting_l2_max, known.access_window_max],
        "regions": {name: [region.size, region.live] for name, region in regions.items()},
        "phases": list(phases.items()),
        "recipes": [recipe.to_dict() for recipe in recipes],
        "geometry": dict(geometry),
    }
    return json.loads(json.dumps(key))  # type: ignore[no-any-return]


class _Bench:
    """All arms, built; closed with everything of theirs."""

    def __init__(
        self,
        build_graph: Callable[[Plan], Built],
        regions: Mapping[str, Region],
        phases: Mapping[str, int],
        recipes: Sequence[Recipe],
        device: int,
        known: DeviceProperties,
        cell_us: float,
    ):
        self.device = device
        self.phases = dict(phases)
        self.arms: dict[str, _Arm] = {}
        self._known = known
        self._build = build_graph
        self._cell_us = cell_us
        self._dead = 0
        try:
            self._add(Recipe(STOCK_NAME), regions)
            with devices.current(device):
                limit = driver.CudaLimits().read()
            # A device without a limit has nothing to arm.
            self._add(Recipe(NULL_NAME, reserve=limit or None), regions)
            self._add(*self._zero(recipes, regions))
            for recipe in recipes:
                self._add(recipe, regions)
            self._set_cycles()
        except BaseException:
            self.close()
            raise

    def _zero(self, recipes: Sequence[Recipe], regions: Mapping[str, Region]) -> tuple[Recipe, Mapping[str, Region]]:
        """The window of the candidate with the smallest reserve, over a buffer of its own that nothing reads."""
        windowed = [recipe for recipe in recipes if recipe.region is not None]
        recipe = min(windowed, key=lambda own: own.reserve or self._known.persisting_l2_max)
        size = min(regions[str(recipe.region)].size, self._known.access_window_max or 1)
        with devices.current(self.device):
            self._dead = int(devices.call(devices.driver().cuMemAlloc(size), "cuMemAlloc"))
        return Recipe(ZERO_NAME, "nothing reads this", reserve=recipe.reserve), {"nothing reads this": Region(self._dead, size)}

    def _add(self, recipe: Recipe, regions: Mapping[str, Region]) -> None:
        plan = recipe.plan(regions, device=self.device, properties=self._known)
        built = self._build(dataclasses.replace(plan, reserve=None))
        if not isinstance(built, Built):
            raise ArgumentTypeError(f"build_graph: expected it to return a Built, got {type(built).__name__}")
        if missing := set(self.phases) - set(built.phases):
            raise ArgumentError(f"phases: expected build_graph to return {', '.join(self.phases)}, got no {', '.join(sorted(missing))}")
        self.arms[recipe.name] = _Arm(recipe, plan, built, self.phases)

    def _set_cycles(self) -> None:
        """As many cycles of the mix for every arm as stock needs to fill a cell."""
        stock = self.arms[STOCK_NAME]
        stock.prepare()
        try:
            took = statistics.median(stock.run()[TOTAL] for _ in range(3)) * 1e6
        finally:
            stock.teardown()
        cycles = max(1, round(self._cell_us / max(took, 1e-3)))
        for arm in self.arms.values():
            arm.cycles = min(cycles, 10_000)

    def identity(self, seeds: Sequence[int]) -> str:
        """Pass the gate, or raise."""

        def outputs(name: str, seed: Any) -> Iterable[Any]:
            arm = self.arms[name]
            assert arm.built.outputs is not None
            arm.prepare()
            try:
                written = list(arm.built.outputs(seed))
                with devices.current(self.device):
                    devices.call(devices.driver().cuStreamSynchronize(arm.built.stream), "cuStreamSynchronize")
                return written
            finally:
                arm.teardown()

        if not seeds or any(arm.built.outputs is None for arm in self.arms.values()):
            return "not checked"
        found = compare_outputs(outputs, list(self.arms), list(seeds))
        if not found.ok:
            raise DeviceError(f"the bit-identity gate was not passed: {found}")
        return str(found)

    def censuses(self, names: Sequence[str]) -> dict[str, Any]:
        """Every kernel's change against stock, all phases once."""
        from gpukit.measure.census import census
        from gpukit.measure.census_diff import diff_censuses

        def one_of(name: str) -> Any:
            arm = self.arms[name]
            arm.prepare()
            try:
                return census(arm.run_once, device=self.device)
            finally:
                arm.teardown()

        try:
            stock = one_of(STOCK_NAME)
            return {name: diff_censuses(stock, one_of(name)).to_dict()["changes"] for name in dict.fromkeys(names) if name != STOCK_NAME}
        except DeviceError:
            # No profiler here; the table says so by having no kernels.
            return {}

    def close(self) -> None:
        for arm in self.arms.values():
            arm.close()
        self.arms.clear()
        if self._dead:
            with devices.current(self.device):
                devices.driver().cuCtxSynchronize()
                devices.driver().cuMemFree(self._dead)
            self._dead = 0

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _ladders(
    bench: _Bench,
    names: Sequence[str],
    folder: Path,
    tag: str,
    wanted: int,
    passes: int,
    limits: tuple[float, float, float],
    progress: Callable[[str, int, int], None] | None,
) -> Replication:
    """Run ladders until enough of them count, or half as many again have been run."""
    from gpukit.measure import Ladder, analyze, combine

    ladder = Ladder(
        {name: bench.arms[name] for name in names},
        lambda run: run(),
        base=STOCK_NAME,
        null=NULL_NAME,
        structural_zero=ZERO_NAME,
        passes=passes,
        warmup=0,
        metrics=(*bench.phases, TOTAL),
        judged_by=(TOTAL,),
        geometry=("geometry",),
        tag=tag,
        noise_limit=limits[0],
        replication_limit=limits[1],
    )
    probes = {"device": lambda: devices.properties(bench.device).name}
    analyses: list[Any] = []
    most = wanted + (wanted + 1) // 2
    while len(analyses) < most and sum(found.ok for found in analyses) < wanted:
        what = f"{tag} {len(analyses) + 1}"
        path = folder / f"{tag}-{len(analyses) + 1}.csv"
        path.unlink(missing_ok=True)
        ladder.run(path, probes=probes, progress=None if progress is None else lambda done, cells, what=what: progress(what, done, cells))  # type: ignore[misc]
        analyses.append(_within_resolution(analyze(path), limits[2]))
    return combine(analyses)


def _within_resolution(analysis: Analysis, limit: float) -> Analysis:
    """The same, with controls that moved by less than the limit as flags."""
    small = [
        found
        for found in analysis.disqualifications
        if found.kind in ("null arm", "structural zero") and abs(analysis.delta(found.arm, metric=found.metric).median) <= limit
    ]
    kept = tuple(found for found in analysis.disqualifications if found not in small)
    return dataclasses.replace(analysis, disqualifications=kept, flags=(*analysis.flags, *small))


def _row(bench: _Bench, name: str, found: Replication, control_limit: float) -> Row:
    """What all ladders say of one candidate."""
    arm = bench.arms[name]
    metrics = (*bench.phases, TOTAL)
    medians = {
        metric: statistics.median(spread.median for own in found.analyses for spread in own.spreads if (spread.arm, spread.metric) == (name, metric))
        for metric in metrics
    }
    ranges = {own.metric: own for own in found.ranges if own.arm == name}
    role = name if name in (STOCK_NAME, NULL_NAME, ZERO_NAME, PUBLISHED_NAME) else "candidate"
    return Row(
        recipe=arm.recipe,
        role=role,
        geometry=arm.geometry,
        guarded=arm.plan.guarded,
        seconds=medians,
        change={metric: (own.low, own.high) for metric, own in ranges.items()},
        errors={metric: own.largest_error or 0.0 for metric, own in ranges.items()},
        beats_stock=TOTAL in ranges and ranges[TOTAL].beats_base and -ranges[TOTAL].high > control_limit,
    )
