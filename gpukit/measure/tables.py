"""Tables of what the measuring modules found, for the terminal and as CSV. The numbers are others'; rich is imported only to print."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from gpukit.measure.analysis import Analysis
    from gpukit.measure.census_diff import CensusDiff, KernelCount
    from gpukit.measure.replication import Replication
    from gpukit.measure.roofline import Roofline
    from gpukit.measure.speedup import Split

__all__ = ["csv_text", "print_analysis", "print_census_diff", "print_replication", "print_roofline", "print_split"]

# Cells of these texts are coloured, so that a regression is seen as readily as a gain.
COLORS = {"better": "green", "worse": "red"}


def csv_text(names: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A table as CSV text; None is an empty field."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([names, *rows])
    return text.getvalue()


def print_analysis(analysis: Analysis, console: Console) -> None:
    """Deltas, spreads, findings, verdict."""
    design, device = analysis.header.design, analysis.header.provenance.get("device")
    title = ", ".join(filter(None, [analysis.verification.path, design.tag, "" if device is None else str(device)]))
    deltas = []
    for delta in analysis.deltas:
        numbers = f"{delta.median:+.3f}", _number(delta.standard_error), str(delta.n)
        deltas.append((delta.metric, delta.arm, delta.base, *numbers, delta.verdict, "flagged" if delta.flags else ""))
    _print(console, title, ("metric", "arm", "against", ">delta %", ">± s.e.", ">n", "verdict", ""), deltas)
    roles = {design.base: "base", design.null: "null", design.structural_zero: "structural zero"}
    spreads = []
    for spread in analysis.spreads:
        numbers = f"{spread.median:.6g}", _number(spread.percent), str(spread.n)
        spreads.append((spread.metric, spread.arm, roles.get(spread.arm, ""), *numbers))
    _print(console, "over passes", ("metric", "arm", "role", ">median", ">spread %", ">n"), spreads)
    # A finding about the base and an arm is also a flag of their delta.
    for text in dict.fromkeys([finding.message for finding in analysis.flags] + [flag for delta in analysis.deltas for flag in delta.flags]):
        _say(console, f"flag: {text}", "yellow")
    _say(console, analysis.verdict, "green" if analysis.ok else "red")


def print_replication(replication: Replication, console: Console) -> None:
    """Every ladder, then the ranges over those that count."""
    for analysis in replication.analyses:
        print_analysis(analysis, console)
    rows = []
    for found in replication.ranges:
        errors = [error for error in found.errors if error is not None]
        within = f"{min(errors):.3f}–{max(errors):.3f}" if errors else ""
        numbers = f"{found.low:+.3f}", f"{found.high:+.3f}", f"{found.spread:.3f}", within, str(found.ladders)
        rows.append((found.metric, found.arm, found.base, *numbers, "yes" if found.beats_base else "no", "flagged" if found.flags else ""))
    columns = ("metric", "arm", "against", ">low %", ">high %", ">apart", ">s.e.", ">n", "beats", "")
    _print(console, "ranges over n ladders, with the standard errors within a ladder", columns, rows)
    for analysis in replication.disqualified:
        _say(console, f"left out: {analysis.verification.path}: {analysis.verdict}", "red")
    _say(console, replication.verdict, "green" if replication.ok else "red")


def print_split(split: Split, console: Console) -> None:
    """Both decodes and the factors."""
    rows = []
    for name, decode in (("base", split.base), ("arm", split.arm)):
        counts = _number(decode.accepted, 0), _number(decode.fallback, 0)
        rows.append((name, f"{decode.seconds:.4f}", f"{decode.rounds:g}", f"{decode.seconds_per_round * 1e6:,.1f}", *counts))
    _print(console, "speculative decode", ("", ">seconds", ">rounds", ">µs a round", ">accepted", ">fallback"), rows)
    _say(console, split.verdict, "green" if split.comparable else "yellow")


def print_roofline(roofline: Roofline, console: Console) -> None:
    """Kernels with their rates and shares."""
    from gpukit.measure.roofline import CEILINGS

    rows = []
    for row in roofline.rows:
        shares = [f"{100 * row.shares[name]:.1f}" for name in roofline.ceilings]
        rows.append((row.name, f"{row.launches:,}", f"{row.bytes_moved:,}", f"{row.median_us:,.3f}", f"{row.gb_per_s:,.1f}", *shares, row.evidence))
    title = "ceilings: " + ", ".join(f"{CEILINGS[name]} {value:,.1f} GB/s" for name, value in roofline.ceilings.items())
    columns = [f">% of {CEILINGS[name]}" for name in roofline.ceilings]
    _print(console, title, ("kernel", ">launches", ">bytes", ">median µs", ">GB/s", *columns, "evidence"), rows)


def print_census_diff(diff: CensusDiff, console: Console) -> None:
    """What is not alike, then every kernel, then the total."""
    for problem in diff.problems:
        _say(console, f"not the same kernels: {problem}", "red")
    rows = []
    for change in diff.changes:
        changes = _number(change.percent, 2, "+"), f"{change.total_us:+,.3f}"
        rows.append((change.name, *_side(change.before), *_side(change.after), *changes))
    relative = f"{100 * diff.total_us / diff.before_us:+.2f}" if diff.before_us else ""
    rows.append(("total", "", f"{diff.before_us:,.3f}", "", f"{diff.after_us:,.3f}", relative, f"{diff.total_us:+,.3f}"))
    columns = ("kernel", ">count before", ">median µs", ">count after", ">median µs", ">change %", ">change of count × median, µs")
    _print(console, "kernels, largest change first", columns, rows)


def _print(console: Console, title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; columns that begin with > hold numbers. Cells are taken as they are: a kernel's name may look like markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for column in columns:
        is_number = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=COLORS.get(cell, "")) for cell in row))
    console.print(table)


def _say(console: Console, text: str, style: str) -> None:
    console.print(text, style=style, markup=False, highlight=False)


def _number(value: float | None, digits: int = 3, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign},.{digits}f}"


def _side(kernel: KernelCount | None) -> tuple[str, str]:
    return ("", "") if kernel is None else (f"{kernel.count:,}", f"{kernel.median_us:,.3f}")
