"""The command line: reads options, calls the package, prints, and sets the exit code. What a command does is written elsewhere.

Heavy imports stay inside the commands, so that `gpukit --help` is quick. Exit codes: 0, 1 for violations found, 2 for bad arguments, 130
for an interrupt.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpukit.graphs import cli as graphs
from gpukit.measure.cli import app as ladder
from gpukit.pictures import require
from gpukit.terminal import console, refusals

if TYPE_CHECKING:
    from gpukit.decode import DecodeReport
    from gpukit.decode.replay import Progress

__all__ = ["app", "main"]

VIOLATION, INTERRUPTED = 1, 130
# A run shorter than this shows no progress bar.
SECONDS_BEFORE_PROGRESS = 1.0

app = typer.Typer(name="gpukit", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(ladder)
app.command()(graphs.audit)
app.command()(graphs.tune)


@app.callback()
def gpukit() -> None:
    """Kernels for the memory and state of an LLM decode step, and the tools to measure them."""


@app.command()
def decode(
    trace: Annotated[Path | None, typer.Option(help="CSV file: TIMESTAMP,ContextTokens,GeneratedTokens. Default: a drawn trace.")] = None,
    requests: Annotated[int | None, typer.Option(help="Requests to replay. Default: all of the file, or 1,500 drawn ones.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the drawn trace and of the order of the pools' pages.")] = 0,
    page_size: Annotated[int, typer.Option(help="Tokens per page.")] = 64,
    window: Annotated[int, typer.Option(help="Sliding-attention window, in tokens.")] = 512,
    batch: Annotated[int, typer.Option(help="Most requests that run at once.")] = 128,
    memory: Annotated[str, typer.Option(help="unified: one buffer, a launch a round. split: two pools, single ops.")] = "unified",
    pages: Annotated[int, typer.Option(help="Pages of the FULL pool; unified memory has the bytes of both pools.")] = 2048,
    swa_pages: Annotated[int, typer.Option(help="Pages of the SWA pool.")] = 1024,
    full_layers: Annotated[int, typer.Option(help="Layers with full attention.")] = 10,
    swa_layers: Annotated[int, typer.Option(help="Layers with sliding-window attention.")] = 50,
    rounds: Annotated[int | None, typer.Option(help="Stop after this many rounds.")] = None,
    backend: Annotated[str, typer.Option(help="auto, numpy or gpu. auto is the GPU where there is one.")] = "auto",
    check: Annotated[str, typer.Option(help="Check every table every N rounds, and cheaper things every round; or off.")] = "16",
    debug_mirror: Annotated[bool, typer.Option("--debug-mirror", help="Compare the host's mirror with the device every round.")] = False,
    json: Annotated[str | None, typer.Option(help="Write the report as JSON to this file; - is standard output.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw pages in use, free and retired over time into this file.")] = None,
    model: Annotated[str, typer.Option(help="tiny, qwen3.6-35b-a3b, qwen3.8-27b or none: recurrent layers and experts to decode with.")] = "tiny",
    sequences: Annotated[int, typer.Option(help="Sequences that the model decodes at once.")] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens that each of them gets at least.")] = 24,
    drafts: Annotated[int, typer.Option(help="Tokens guessed per speculative round.")] = 3,
    acceptance: Annotated[float, typer.Option(help="Probability that a guess is right.")] = 0.7,
    verify: Annotated[str, typer.Option(help="exact: bits of plain decoding; fast: agrees within rounding.")] = "exact",
    commit: Annotated[str, typer.Option(help="fold accepted tokens after a round, or fold_record: during the next.")] = "fold",
    residency: Annotated[str, typer.Option(help="L2 plan of the model's rounds on a GPU: off, auto (measured), or a file of gpukit tune.")] = "off",
    experts: Annotated[str, typer.Option(help="Format of the model's experts: bf16, fp8, q4_q5, q6, w8; or none.")] = "bf16",
) -> None:
    """Replay a request trace through decode rounds with FULL and SWA pages, checking every step; then decode with a model's recurrent layers
    and experts, plainly and speculatively, and compare."""
    from gpukit.decode import DecodeOptions, ModelOptions, ModelRun, Replay

    with refusals():
        options = DecodeOptions(
            trace=trace,
            requests=requests,
            seed=seed,
            page_size=page_size,
            window=window,
            batch=batch,
            memory=memory,
            pages=pages,
            swa_pages=swa_pages,
            full_layers=full_layers,
            swa_layers=swa_layers,
            rounds=rounds,
            backend=backend,
            check_every=_check_every(check),
            debug_mirror=debug_mirror,
        )
        _require_writable("json", None if json in (None, "-") else Path(str(json)))
        _require_writable("plot", plot)
        if plot is not None:
            require(plot)
        run = None
        if model != "none":
            run = ModelRun(
                ModelOptions(
                    model=model,
                    sequences=sequences,
                    tokens=tokens,
                    drafts=drafts,
                    acceptance=acceptance,
                    verify=verify,
                    commit=commit,
                    seed=seed,
                    backend=backend,
                    residency=residency,
                    experts=experts,
                )
            )
        replay = Replay(options)
    with _progress() as progress:
        report = replay.run(progress)
    if run is not None and report.ok and report.stopped != "interrupt":
        with refusals():
            try:
                report.model = run.run()
            except KeyboardInterrupt:
                report.stopped = "interrupt"
    _write_report(report, json, plot)
    if report.stopped == "interrupt":
        raise typer.Exit(INTERRUPTED)
    if not report.ok:
        raise typer.Exit(VIOLATION)


@app.command()
def info(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Report the environment: packages, driver, devices, caches."""
    from gpukit import info as environment

    report = environment.collect()
    if json:
        from json import dumps

        typer.echo(dumps(report, indent=1))
    else:
        environment.print_report(report, console())


@app.command()
def ceilings(
    device: Annotated[int, typer.Option(help="Ordinal of the device.")] = 0,
    refresh: Annotated[bool, typer.Option(help="Measure again, even where figures are kept.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure what this device's memory, caches, graph nodes and launches can do at best, each figure twice."""
    from rich.table import Table

    from gpukit.measure import ceilings as measured

    with refusals():
        found = measured.ceilings(device, refresh=refresh)
    if json:
        typer.echo(measured.to_json(found))
    else:
        table = Table("ceiling", "value", "unit", "two runs", "agree", "how", title=f"{found.device}, driver {found.driver}")
        for name, figure in found.rows():
            runs = f"{figure.runs[0]:,.2f} {figure.runs[1]:,.2f}"
            table.add_row(name, f"{figure.value:,.2f}", figure.unit, runs, "yes" if figure.agrees else f"no: {figure.difference:.2%}", figure.how)
        console().print(table)
    if not all(figure.agrees for _, figure in found.rows()):
        raise typer.Exit(VIOLATION)


def main() -> None:
    """Entry point of the `gpukit` command."""
    app()


def _check_every(text: str) -> int:
    from gpukit.errors import ArgumentError

    if text == "off":
        return 0
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= 1:
        return int(text)
    raise ArgumentError(f"check: expected a number of rounds from 1 or off, got {text!r}")


def _require_writable(name: str, path: Path | None) -> None:
    """Refuse an output file before the run rather than after it."""
    from gpukit.errors import ArgumentError

    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ArgumentError(f"{name}: expected a file in an existing directory, got {path}")


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A progress bar on standard error, when that is a terminal and the run is long enough."""
    terminal = console(stderr=True)
    if not terminal.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns: tuple[Any, ...] = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rounds]} rounds"))
    bar = Progress(*columns, TimeElapsedColumn(), console=terminal, transient=True)
    task = bar.add_task("decode", total=None, rounds=0)
    started = time.monotonic()

    def advance(ended: int, requests: int, rounds: int) -> None:
        if not bar.live.is_started and time.monotonic() - started > SECONDS_BEFORE_PROGRESS:
            bar.start()
        bar.update(task, completed=ended, total=requests, rounds=rounds)

    try:
        yield advance
    finally:
        bar.stop()


def _write_report(report: DecodeReport, json: str | None, plot: Path | None) -> None:
    """Print the tables and write the files asked for. With JSON on standard output the tables go to standard error."""
    report.print(console(stderr=json == "-"))
    with refusals():
        try:
            if json == "-":
                sys.stdout.write(report.to_json() + "\n")
            elif json is not None:
                Path(json).write_text(report.to_json() + "\n", encoding="utf-8")
            if plot is not None:
                from gpukit.decode import plot as plotting

                plotting.save(report, plot)
        except OSError as error:
            from gpukit.errors import ArgumentError

            raise ArgumentError(f"expected a writable output file, got {error}") from error
