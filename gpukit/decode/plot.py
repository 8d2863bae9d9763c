"""The picture of a replay: who has the pages, or of unified memory the bytes, over time. Needs matplotlib, which nothing else in gpukit imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpukit.decode.report import DecodeReport
from gpukit.decode.rooms import layout_of
from gpukit.pictures import require

__all__ = ["save"]


def save(report: DecodeReport, path: str | Path) -> None:
    """Write the picture of a report to a file; its ending says the format."""
    require(path)
    # A figure of its own: pyplot would keep global state and might open a window.
    from matplotlib.figure import Figure

    timeline, options = report.timeline, report.options
    figure = Figure(figsize=(9, 8), layout="constrained")
    first, second, requests = figure.subplots(3, 1, sharex=True)
    if options.memory == "unified":
        _bytes(first, report)
        second.plot(timeline.tokens, color="tab:blue", label="tokens held")
        second.set_ylabel("tokens")
        second.set_ylim(bottom=0)
        second.legend(loc="upper right")
    else:
        _pages(first, "FULL pages", timeline.full_used, options.pages)
        _pages(second, "SWA pages", timeline.swa_used, options.swa_pages)
    retired = second.twinx()
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


def _bytes(axes: Any, report: DecodeReport) -> None:
    """The buffer from its floor to its top: SWA pages grow up, FULL pages grow down."""
    timeline, layout = report.timeline, layout_of(report.options)
    kinds = {"SWA in use": ("swa", timeline.swa_used), "SWA holes": ("swa", timeline.swa_holes)}
    kinds |= {"FULL holes": ("full", timeline.full_holes), "FULL in use": ("full", timeline.full_used)}
    shares = {
        label: [100 * layout.by_name[name].page_bytes * count / layout.buffer_bytes for count in counts] for label, (name, counts) in kinds.items()
    }
    # A hole that the same round has filled is in use.
    free = [max(100 - sum(parts), 0) for parts in zip(*shares.values(), strict=False)]
    bands = [shares["SWA in use"], shares["SWA holes"], free, shares["FULL holes"], shares["FULL in use"]]
    labels = ["SWA in use", "SWA holes", "free", "FULL holes", "FULL in use"]
    colors = ["tab:orange", "moccasin", "lightgray", "lightsteelblue", "tab:blue"]
    axes.stackplot(range(len(free)), [band[: len(free)] for band in bands], labels=labels, colors=colors)
    axes.set_ylabel("% of the buffer")
    axes.set_ylim(0, 100)
    axes.legend(loc="upper right", ncols=3)


def _pages(axes: Any, title: str, used: list[int], total: int) -> None:
    rounds = range(len(used))
    axes.stackplot(rounds, used, [total - count for count in used], labels=["in use", "free"], colors=["tab:blue", "lightgray"])
    axes.set_ylabel(title)
    axes.set_ylim(0, total)
    axes.legend(loc="upper right")
