"""A picture of a sweep. Needs matplotlib, which is imported only when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpukit import checks
from gpukit.pictures import require

if TYPE_CHECKING:
    from gpukit.graphs.result import TuneResult

__all__ = ["save_sweep"]


def save_sweep(result: TuneResult, path: str | Path) -> None:
    """Draw every candidate's change against stock, phase by phase: the range over ladders, widened by the largest standard error within one."""
    require(path)
    checks.writable(path, "plot")
    from matplotlib.figure import Figure

    rows = [row for row in result.rows if row.change]
    phases = list(result.rows[0].seconds)
    figure = Figure(figsize=(4 + 3.2 * len(phases), 1.6 + 0.28 * len(rows)), layout="constrained")
    grid = figure.subplots(1, len(phases), squeeze=False, sharey=True)[0]
    for axes, phase in zip(grid, phases, strict=True):
        axes.axvline(0, color="black", linewidth=0.8)
        for height, row in enumerate(rows):
            low, high = row.change[phase]
            color = "C2" if row.recipe.name == result.winner.name else "C3" if row.role not in ("candidate", "published") else "C0"
            error = row.errors[phase]
            axes.plot([low - error, high + error], [height, height], color=color, linewidth=1)
            axes.plot([low, high], [height, height], "o", color=color, markersize=4)
        axes.set_xlabel(f"{phase}, change %")
        # One catastrophic plan must not flatten all the others.
        axes.set_xscale("symlog", linthresh=5)
        axes.grid(axis="x", linewidth=0.3)
    grid[0].set_yticks(range(len(rows)), [row.recipe.name for row in rows], fontsize=7)
    grid[0].invert_yaxis()
    figure.suptitle(f"{result.key['device']}: against stock; winner: {result.winner.name}", fontsize=9)
    figure.savefig(path)
