"""Pictures of a ladder and of a roofline. Needs matplotlib, which is imported only when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpukit.measure.analysis import Analysis, Delta
from gpukit.measure.roofline import CEILINGS, Roofline
from gpukit.pictures import require

__all__ = ["save_ladders", "save_roofline"]


def save_ladders(analyses: Sequence[Analysis], path: str | Path) -> None:
    """Draw the paired deltas of each pass, one row per metric and one column per ladder, medians as lines in bands of one standard error."""
    figure = _figure(path, width=2 + 5 * len(analyses), height=1 + 3 * len(analyses[0].header.design.metrics))
    metrics = analyses[0].header.design.metrics
    grid = figure.subplots(len(metrics), len(analyses), squeeze=False, sharex=True, sharey="row")
    for row, metric in zip(grid, metrics, strict=True):
        row[0].set_ylabel(f"{metric}, delta %")
        for axes, analysis in zip(row, analyses, strict=True):
            axes.axhline(0, color="black", linewidth=0.8)
            for number, delta in enumerate(delta for delta in analysis.deltas if delta.metric == metric):
                _draw_delta(axes, delta, f"C{number}")
            axes.legend(fontsize=7)
    for axes, analysis in zip(grid[0], analyses, strict=True):
        axes.set_title(f"{Path(analysis.verification.path).name}: {'qualified' if analysis.ok else 'DISQUALIFIED'}", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("pass")
    figure.savefig(path)


def _draw_delta(axes: Any, delta: Delta, color: str) -> None:
    error = delta.standard_error or 0.0
    label = f"{delta.arm} against {delta.base}: {delta.median:+.3f} ± {error:.3f} %"
    axes.plot(list(delta.pairs), list(delta.pairs.values()), "o", color=color, label=label, markersize=4)
    axes.axhline(delta.median, color=color, linewidth=1)
    axes.axhspan(delta.median - error, delta.median + error, color=color, alpha=0.15)


def save_roofline(roofline: Roofline, path: str | Path) -> None:
    """Draw achieved rate over bytes per launch, with a line for every ceiling."""
    figure = _figure(path, width=8, height=5)
    axes = figure.subplots()
    for number, (name, ceiling) in enumerate(roofline.ceilings.items()):
        axes.axhline(ceiling, color=f"C{number}", linewidth=1, label=f"{CEILINGS[name]}, {ceiling:,.0f} GB/s")
    axes.scatter([row.bytes_moved for row in roofline.rows], [row.gb_per_s for row in roofline.rows], color="black", s=18, zorder=3)
    for row in roofline.rows:
        axes.annotate(row.name, (row.bytes_moved, row.gb_per_s), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="bytes read and written per launch", ylabel="GB/s")
    axes.legend(fontsize=8)
    figure.savefig(path)


def _figure(path: str | Path, width: float, height: float) -> Any:
    require(path)
    # A figure of its own: pyplot would keep global state and might open a window.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
