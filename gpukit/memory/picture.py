"""A pool as text and as a picture: where the bands lie in the buffer, and which of their pages are live, holes or pending."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpukit import pictures
from gpukit.memory._arrays import to_host
from gpukit.memory.bands import Band

if TYPE_CHECKING:
    from gpukit.memory.pool import UnifiedPool

__all__ = ["describe", "picture"]

_UNITS = ("B", "KB", "MB", "GB", "TB")


def _size(count: float) -> str:
    """Bytes in a readable unit.

    Examples
    --------
    >>> _size(1536)
    '1.5 KB'
    """
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def describe(pool: UnifiedPool) -> str:
    """The bands from byte 0 up, one a line; from the host's numbers alone, so nothing waits.

    Examples
    --------
    >>> from gpukit.memory import Entry, Part, full_and_swa
    >>> entry = Entry((Part("k", (8,), "float32"),))
    >>> pool = full_and_swa(1 << 14, entry, entry, page_size=4)
    >>> ids = pool.alloc("full", 3)
    >>> print(pool.describe())
    16.0 KB, 384 B in use, 0 B in holes, 0 B pending
    band  place    pages        bytes              live  holes  pending  page   available  schedulable
    swa   up       1 … 0        0 B … 0 B             0      0        0  128 B        124          124
    full  down     125 … 127    15.6 KB … 16.0 KB     3      0        0  128 B        124          124
    """
    bands = pool.chain.bands
    used, holes, pending = (sum(count(band) * band.page_bytes for band in bands) for count in (_live, _holes, _pending))
    lines = [f"{_size(pool.layout.buffer_bytes)}, {_size(used)} in use, {_size(holes)} in holes, {_size(pending)} pending"]
    rows = [("band", "place", "pages", "bytes", "live", "holes", "pending", "page", "available", "schedulable")]
    for band in bands:
        empty = band.low == band.high
        low, high = (0, 0) if empty else (band.low * band.page_bytes, band.high * band.page_bytes)
        rows.append((
            band.name, band.spec.place, f"{band.low} … {band.high - 1}", f"{_size(low)} … {_size(high)}", str(band.live), str(band.hole_count),
            str(band.pending_count), _size(band.page_bytes), str(pool.available(band.name)), str(pool.schedulable(band.name)),
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = {4, 5, 6, 8, 9}
    for row in rows:
        cells = [cell.rjust(width) if column in right else cell.ljust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _live(band: Band) -> int:
    return band.live


def _holes(band: Band) -> int:
    return int(band.hole_count)


def _pending(band: Band) -> int:
    return int(band.pending_count)


def picture(pool: UnifiedPool, path: str | Path) -> None:
    """Draw the buffer as a bar a band: live pages, holes and pending pages at their bytes. Waits for the device.

    Raises
    ------
    ArgumentError
        The file's ending is not known, or matplotlib is not installed.
    """
    pictures.require(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    bands, scale, unit = pool.chain.bands, *_scale(pool.layout.buffer_bytes)
    figure = Figure(figsize=(11, 1.2 + 0.7 * len(bands)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = {"live": "#3b6ea5", "holes": "#f2c14e", "pending": "#c8553d"}
    for line, band in enumerate(bands):
        size = band.page_bytes / scale
        axes.broken_barh(
            [(band.low * size, (band.high - band.low) * size)], (line - 0.42, 0.84), facecolors="none", edgecolors="#666666", linewidth=0.8
        )
        for kind, pages in _pages(band).items():
            runs = [(start * size, count * size) for start, count in _runs(pages)]
            axes.broken_barh(runs, (line - 0.38, 0.76), facecolors=colours[kind], linewidth=0)
    axes.axvspan(0, pool.layout.floor_bytes / scale, color="#dddddd", zorder=0)
    axes.set(xlim=(0, pool.layout.buffer_bytes / scale), ylim=(-0.6, len(bands) - 0.4), xlabel=f"byte of the buffer [{unit}]")
    axes.set_yticks(range(len(bands)), [f"{band.name} ({band.spec.place})\n{band.live} live" for band in bands])
    axes.legend(
        handles=[*(Patch(color=colour, label=kind) for kind, colour in colours.items()), Patch(color="#dddddd", label="reserved floor")],
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=150)


def _scale(size: int) -> tuple[int, str]:
    power = min((size.bit_length() - 1) // 10, len(_UNITS) - 1)
    return 1 << 10 * power, _UNITS[power]


def _pages(band: Band) -> dict[str, np.ndarray]:
    """Pages by what they are."""
    live = np.flatnonzero(to_host(band.p2v)[1:-1] > 0) + 1
    ring, (head, tail) = to_host(band.holes.ring), to_host(band.holes.counters).tolist()
    return {"live": live, "holes": np.sort(ring[np.arange(head, tail) % len(ring)]), "pending": np.sort(band.pending_pages())}


def _runs(pages: np.ndarray) -> list[tuple[int, int]]:
    """Consecutive pages as pairs of start and count.

    Examples
    --------
    >>> _runs(np.array([3, 4, 5, 9]))
    [(3, 3), (9, 1)]
    """
    if not len(pages):
        return []
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    return [(int(run[0]), len(run)) for run in np.split(pages, breaks)]
