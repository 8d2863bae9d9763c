"""The picture of a replay: pages in use, free and retired over time. Needs matplotlib, which nothing else in gpukit imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpukit.decode.report import DecodeReport
from gpukit.pictures import require

__all__ = ["save"]


def save(report: DecodeReport, path: str | Path) -> None:
    """Write the picture of a report to a file; its ending says the format."""
    require(path)
    # A figure of its own: pyplot would keep global state and might open a window.
    from matplotlib.figure import Figure

    timeline, options = report.timeline, report.options
    figure = Figure(figsize=(9, 8), layout="constrained")
    full, swa, requests = figure.subplots(3, 1, sharex=True)
    _pages(full, "FULL pages", timeline.full_used, options.pages)
    _pages(swa, "SWA pages", timeline.swa_used, options.swa_pages)
    retired = swa.twinx()
    retired.plot(timeline.retired, color="tab:red", linewidth=1, label="retired so far")
    retired.set_ylabel("retired so far")
    retired.set_ylim(bottom=0)
    retired.legend(loc="lower right")
    requests.plot(timeline.running, label="running")
    requests.plot(timeline.waiting, label="waiting")
    requests.set_ylabel("requests")
    requests.set_xlabel("round")
    requests.legend(loc="upper right")
    source = options.trace or f"drawn trace, seed {options.seed}"
    figure.suptitle(f"{Path(source).name}, page size {options.page_size}, window {options.window}", fontsize=10)
    figure.savefig(path)


def _pages(axes: Any, title: str, used: list[int], total: int) -> None:
    rounds = range(len(used))
    axes.stackplot(rounds, used, [total - count for count in used], labels=["in use", "free"], colors=["tab:blue", "lightgray"])
    axes.set_ylabel(title)
    axes.set_ylim(0, total)
    axes.legend(loc="upper right")
