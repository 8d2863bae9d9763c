"""`gpukit ladder run | verify | analyze`: reads options, calls the package, prints, and sets the exit code.

Exit codes: 0, 1 for a file that is rejected or a ladder that does not count, 2 for bad arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpukit.pictures import require
from gpukit.terminal import console, refusals

if TYPE_CHECKING:
    from gpukit.measure.analysis import Analysis
    from gpukit.measure.replication import Replication

__all__ = ["app"]

REJECTED = 1

app = typer.Typer(name="ladder", no_args_is_help=True, help="A/B experiments that can be trusted: run, verify, analyze.")


@app.command()
def run(
    workload: Annotated[str, typer.Argument(help="What to measure; a wrong name lists those there are.")],
    out: Annotated[Path, typer.Option(help="The file to write; it must not exist yet.")],
    passes: Annotated[int, typer.Option(help="Passes in all; the first warms up and is dropped.")] = 8,
    repetitions: Annotated[int, typer.Option(help="Measured runs per cell.")] = 5,
    warmup: Annotated[int, typer.Option(help="Unmeasured runs per cell.")] = 1,
    noise_limit: Annotated[float, typer.Option(help="Largest spread of the base arm, in percent.")] = 0.20,
    replication_limit: Annotated[float, typer.Option(help="Largest distance between ladders, in percentage points.")] = 0.15,
    tag: Annotated[str, typer.Option(help="The experiment's name. Default: the workload's.")] = "",
) -> None:
    """Measure a built-in workload's arms in rotation and write a ladder file."""
    from gpukit.measure import workloads

    with refusals():
        chosen = workloads.build(workload)
        ladder = chosen.ladder(
            passes=passes, repetitions=repetitions, warmup=warmup, noise_limit=noise_limit, replication_limit=replication_limit, tag=tag or workload
        )
        with _progress() as progress:
            ladder.run(out, probes=chosen.probes, progress=progress)
    typer.echo(f"{out}: {ladder.design.cells} cells")


@app.command()
def verify(files: Annotated[list[Path], typer.Argument(help="Ladder files.")]) -> None:
    """Replay the only possible order against each file: one connected run, or what is wrong."""
    from gpukit.measure.verification import verify as verify_file

    with refusals():
        answers = [verify_file(path) for path in files]
    for answer in answers:
        typer.echo(f"{answer.path}: {answer if answer.ok else f'REJECTED: {answer}'}")
    if not all(answer.ok for answer in answers):
        raise typer.Exit(REJECTED)


@app.command()
def analyze(
    files: Annotated[list[Path], typer.Argument(help="Ladder files; several of one design combine to a range.")],
    base: Annotated[str | None, typer.Option(help="Left side of the pair. Default: the ladder's base arm.")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Right side of the pair; may be given several times. Default: every other arm.")] = None,
    unverified: Annotated[bool, typer.Option("--unverified", help="Also read files that are not one connected run; they stay disqualified.")] = False,
    json: Annotated[str | None, typer.Option(help="Write the analysis as JSON to this file; - is standard output.")] = None,
    csv: Annotated[str | None, typer.Option(help="Write the deltas, or the ranges of ladders, as CSV to this file; - is standard output.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the paired deltas per pass into this file.")] = None,
) -> None:
    """Print paired deltas with their errors, and whether noise, controls and counters let the ladder count."""
    from gpukit.measure import analysis, replication

    with refusals():
        if plot is not None:
            require(plot)
        ladders = [analysis.analyze(path, _pairs(path, base, arm), unverified=unverified) for path in files]
        found: Analysis | Replication = ladders[0] if len(ladders) == 1 else replication.combine(ladders)
        # What a machine reads from standard output must not be mixed with tables.
        found.print(console(stderr="-" in (json, csv)))
        _write(json, lambda: found.to_json() + "\n")
        _write(csv, found.to_csv)
        if plot is not None:
            from gpukit.measure import plots

            plots.save_ladders(ladders, plot)
    if not found.ok:
        raise typer.Exit(REJECTED)


def _pairs(path: Path, base: str | None, arms: list[str] | None) -> list[tuple[str, str]] | None:
    """The pairs asked for; None for every arm against the ladder's base."""
    from gpukit.measure.verification import read

    header = read(path).header
    if header is None or (base is None and not arms):
        return None
    left = header.design.base if base is None else base
    return [(left, arm) for arm in arms or header.design.arms if arm != left]


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on standard error, when that is a terminal."""
    terminal = console(stderr=True)
    if not terminal.is_terminal:
        yield None
        return
    from rich.progress import Progress

    with Progress(console=terminal, transient=True) as bar:
        task = bar.add_task("cells")
        yield lambda count, total: bar.update(task, completed=count, total=total)


def _write(target: str | None, text: Callable[[], str]) -> None:
    if target == "-":
        sys.stdout.write(text())
    elif target is not None:
        Path(target).write_text(text(), encoding="utf-8")
