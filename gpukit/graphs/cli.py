"""`gpukit audit` and `gpukit tune`: read options, build a round, print. Registered by `gpukit.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpukit.errors import ArgumentError
from gpukit.pictures import require
from gpukit.terminal import console, refusals

if TYPE_CHECKING:
    from gpukit.graphs.rounds import Round
    from gpukit.graphs.window import Plan

__all__ = ["audit", "tune"]

MIB = 1 << 20

_ROUNDS = "Which round: recurrent (kernels of a decode step), synthetic (memory traffic alone) or decode (a model's)."
RoundName = Annotated[str, typer.Argument(help=_ROUNDS)]
Weights = Annotated[int, typer.Option(help="MiB of weights that a round streams past the state.", min=0)]
Prefill = Annotated[int, typer.Option(help="MiB that a prefill streams, once in a cycle; 0 for no prefill.", min=0)]
Decodes = Annotated[int, typer.Option(help="Decode graphs in a cycle with a prefill.", min=1)]
Layers = Annotated[int, typer.Option(help="Layers of recurrent state.", min=1)]
Slots = Annotated[int, typer.Option(help="Slots of the pool, of which one is live.", min=1)]
Device = Annotated[int, typer.Option(help="Ordinal of the device.", min=0)]


def _build(name: str, weights: int, prefill: int, decodes: int, layers: int, slots: int, device: int) -> Round:
    from gpukit.graphs import rounds

    options = rounds.RoundOptions(weights=weights * MIB, prefill=prefill * MIB, decodes=decodes, layers=layers, slots=slots, device=device)
    return rounds.build(name, options)


def _plan(text: str, made: Round, device: int) -> Plan:
    from gpukit.graphs.tune import resolve

    for recipe in made.recipes:
        if recipe.name == text:
            return recipe.plan(made.regions, device=device)
    return resolve("off" if text == "stock" else text, made.regions, device=device)


def audit(
    name: RoundName = "recurrent",
    plan: Annotated[
        str, typer.Option(help="stock, a candidate of gpukit tune by name (published is maximum reserve, whole pool), or a JSON file.")
    ] = "published",
    weights: Weights = 64,
    prefill: Prefill = 0,
    decodes: Decodes = 4,
    layers: Layers = 30,
    slots: Slots = 2,
    device: Device = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Capture a round's graphs under a plan and ask every kernel node which window it carries."""
    from gpukit.graphs.audit import audit as ask
    from gpukit.graphs.capture import Graph

    with refusals():
        made = _build(name, weights, prefill, decodes, layers, slots, device)
        chosen = _plan(plan, made, device)
        built = made.build_graph(chosen)
        found = {phase: ask(graph, regions=made.regions, plan=chosen) for phase, graph in built.phases.items() if isinstance(graph, Graph)}
        if json:
            from json import dumps

            typer.echo(dumps({phase: own.to_dict() for phase, own in found.items()}, indent=1))
            return
        terminal = console()
        for phase, own in found.items():
            terminal.print(f"{phase}, plan {chosen.name}" + (f", guarded: {chosen.guarded}" if chosen.guarded else ""), style="bold", highlight=False)
            own.print(terminal)


def tune(
    name: RoundName = "recurrent",
    weights: Weights = 64,
    prefill: Prefill = 0,
    decodes: Decodes = 4,
    layers: Layers = 30,
    slots: Slots = 2,
    device: Device = 0,
    passes: Annotated[int, typer.Option(help="Passes of each ladder; the first warms up.", min=3)] = 8,
    ladders: Annotated[int, typer.Option(help="Ladders that must count.", min=2)] = 2,
    confirm: Annotated[bool, typer.Option(help="Measure the best once more in ladders of its own.")] = True,
    census: Annotated[bool, typer.Option(help="List every kernel's change too; needs torch.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON, which --plan and load_plan take; used again if it fits.")] = None,
    raw: Annotated[Path | None, typer.Option(help="Keep the ladder files in this directory.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the sweep into this file.")] = None,
) -> None:
    """Measure which L2 plan, if any, makes a round faster in total, and say so only if it is beyond doubt."""
    from gpukit import checks
    from gpukit.graphs.result import read_result
    from gpukit.graphs.tune import tune as measure

    terminal = console(stderr=True)
    with refusals():
        if plot is not None:
            require(plot)
            checks.writable(plot, "plot")
        if out is not None and out.exists():
            read_result(out, "out")
        elif out is not None:
            checks.writable(out, "out")
        if raw is not None and raw.exists() and not raw.is_dir():
            raise ArgumentError(f"raw: expected a directory, got {raw}")
        made = _build(name, weights, prefill, decodes, layers, slots, device)
        status = terminal.status("") if terminal.is_terminal else None
        if status is not None:
            status.start()
        try:
            result = measure(
                made.build_graph,
                made.regions,
                made.phases,
                recipes=made.recipes,
                device=device,
                passes=passes,
                ladders=ladders,
                confirm=confirm,
                census=census,
                geometry=made.geometry,
                folder=raw,
                reuse=out,
                progress=None if status is None else lambda what, done, cells: status.update(f"{what}: {done} of {cells} cells"),
            )
        finally:
            if status is not None:
                status.stop()
        result.print(console())
        if plot is not None:
            result.plot(plot)
