"""What `tune` found, as a value: a row per candidate, the winner, JSON, a table, a picture. It measures nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukit import checks
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.graphs.window import Recipe

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["NULL_NAME", "PUBLISHED_NAME", "STOCK_NAME", "TOTAL", "ZERO_NAME", "Row", "TuneResult"]

STOCK_NAME, NULL_NAME, ZERO_NAME, PUBLISHED_NAME = "stock", "null", "structural zero", "published"
TOTAL = "total"


@dataclass(frozen=True)
class Row:
    """One candidate.

    Attributes
    ----------
    recipe : Recipe
    role : str
        ``stock``, ``null``, ``structural zero``, ``published`` or ``candidate``.
    geometry : str
        The audit of its graphs, and the reserve.
    guarded : str
        Why the guard kept it from doing anything.
    seconds : dict of str to float
        Median time of one run of each phase, and of the whole mix as ``total``, over all ladders.
    change : dict of str to (low, high)
        Against stock, in percent: smallest and largest median of a ladder that counts. Empty where none does.
    errors : dict of str to float
        Largest standard error within a ladder, percentage points.
    beats_stock : bool
        Whether every ladder's gain in total time exceeds its noise, the distance between the ladders and the limit of the controls.
    """

    recipe: Recipe
    role: str
    geometry: str
    guarded: str
    seconds: dict[str, float]
    change: dict[str, tuple[float, float]]
    errors: dict[str, float]
    beats_stock: bool


@dataclass(frozen=True)
class TuneResult:
    """What was measured and what to use.

    Attributes
    ----------
    winner : Recipe
        The best of those that beat stock, confirmed by ladders of their own; stock otherwise.
    reason : str
        Why it is that one.
    rows : tuple of Row
        Every candidate, none left out; the published recipe and both controls among them.
    key : dict
        Device, sizes of the regions, phases and the caller's geometry: what the result is good for.
    ladders : tuple of (path, verdict)
        Every ladder, those that do not count too.
    identity : str
        What the bit-identity gate said.
    censuses : dict of str to list
        Every kernel's change against stock under the published recipe and the winner, where a profiler is at hand.
    """

    winner: Recipe
    reason: str
    rows: tuple[Row, ...]
    key: dict[str, Any]
    ladders: tuple[tuple[str, str], ...]
    identity: str = ""
    censuses: Mapping[str, Any] = field(default_factory=dict)

    def row(self, name: str) -> Row:
        """The row of a candidate.

        Raises
        ------
        ArgumentError
            There is none of that name.
        """
        for row in self.rows:
            if row.recipe.name == name:
                return row
        raise ArgumentError(f"name: expected one of {', '.join(row.recipe.name for row in self.rows)}, got {name!r}")

    def to_json(self) -> str:
        """Everything as JSON text; `load_plan` takes the winner from it."""
        rows = [{**asdict(row), "recipe": row.recipe.to_dict()} for row in self.rows]
        content = {"winner": self.winner.to_dict(), "reason": self.reason, "key": self.key, "identity": self.identity, "rows": rows}
        return json.dumps({**content, "ladders": self.ladders, "censuses": self.censuses}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> TuneResult:
        """What `to_json` wrote.

        Raises
        ------
        ArgumentError
            The text is something else.
        """
        try:
            content = checks.mapping(json.loads(text), "result")
            rows = tuple(_row(own) for own in checks.items(content["rows"], "rows"))
            if not rows:
                raise ArgumentError("rows: expected at least one, got none")
            if any(set(row.seconds) != set(rows[0].seconds) for row in rows):
                raise ArgumentError("rows: expected the same phases in all, got others")
            key = dict(checks.mapping(content["key"], "key"))
            checks.text(key["device"], "device")
            censuses = checks.mapping(content["censuses"], "censuses")
            return cls(
                winner=Recipe.from_dict(content["winner"]),
                reason=checks.text(content["reason"], "reason"),
                rows=rows,
                key=key,
                ladders=tuple(
                    (path, verdict) for path, verdict in (checks.texts(own, "ladders") for own in checks.items(content["ladders"], "ladders"))
                ),
                identity=_text(content["identity"], "identity"),
                censuses={name: [dict(checks.mapping(own, name)) for own in checks.items(changes, name)] for name, changes in censuses.items()},
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ArgumentError(f"text: expected what TuneResult.to_json wrote, got something else: {error}") from None

    def print(self, console: Console) -> None:
        """A row per candidate, every kernel of the censuses, the winner."""
        from rich.table import Table
        from rich.text import Text

        phases = list(self.rows[0].seconds)
        title = f"{self.key['device']}: µs, and change against stock in % (smallest and largest of the ladders that count)"
        table = Table(title=title, title_justify="left", show_lines=True)
        table.add_column("candidate", min_width=16, overflow="fold")
        for phase in phases:
            table.add_column(phase, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for row in self.rows:
            cells = [row.recipe.name]
            for phase in phases:
                low, high = row.change.get(phase, (None, None))
                cells.append(f"{row.seconds[phase] * 1e6:,.2f}" + ("" if low is None else f"\n{low:+.2f} … {high:+.2f}"))
            chosen = row.recipe.name == self.winner.name
            cells.append("winner" if chosen else "beats\nstock" if row.beats_stock else "control" if row.role in (NULL_NAME, ZERO_NAME) else "")
            table.add_row(*map(Text, cells), style="green" if chosen and row.role != STOCK_NAME else "")
        console.print(table)
        table = Table("candidate", "what its graphs carry", title_justify="left")
        for row in self.rows:
            table.add_row(Text(row.recipe.name), Text(f"guarded: {row.guarded}" if row.guarded else row.geometry))
        console.print(table)
        for name, changes in self.censuses.items():
            table = Table("kernel", "count", "µs stock", "µs", "change %", title=f"every kernel under {name}", title_justify="left")
            for own in changes:
                before, after = own["before"] or {}, own["after"] or {}
                percent = own["percent"]
                numbers = [f"{side['median_us']:.3f}" if side else "" for side in (before, after)]
                table.add_row(Text(own["name"]), str(after.get("count", "")), *numbers, "" if percent is None else f"{percent:+.2f}")
            console.print(table)
        for path, verdict in self.ladders:
            console.print(f"{path}: {verdict}", highlight=False, markup=False)
        if self.identity:
            console.print(f"bit identity: {self.identity}", highlight=False, markup=False)
        console.print(f"winner: {self.winner.name} ({self.reason})", highlight=False, markup=False, style="bold")

    def plot(self, path: str | Path) -> None:
        """Draw the change of the total of every candidate, as the range of its ladders."""
        from gpukit.graphs import plots

        plots.save_sweep(self, path)


def _row(content: Any) -> Row:
    """A row of `TuneResult.to_json`, its types checked."""
    own = dict(checks.mapping(content, "rows"))
    if not isinstance(own["beats_stock"], bool):
        raise ArgumentTypeError(f"beats_stock: expected true or false, got {own['beats_stock']!r}")
    change = {
        phase: tuple(_finite(end, "change") for end in checks.items(ends, "change"))
        for phase, ends in checks.mapping(own["change"], "change").items()
    }
    if any(len(ends) != 2 for ends in change.values()):
        raise ArgumentError(f"change: expected pairs, got {own['change']}")
    return Row(
        **{
            **own,
            "recipe": Recipe.from_dict(own["recipe"]),
            "change": change,
            **{name: _text(own[name], name) for name in ("role", "geometry", "guarded")},
            **{name: {phase: _finite(value, name) for phase, value in checks.mapping(own[name], name).items()} for name in ("seconds", "errors")},
        }
    )


def _finite(value: Any, name: str) -> float:
    return checks.number(value, name, -sys.float_info.max)


def _text(value: Any, name: str) -> str:
    """Text that may be empty."""
    return value if value == "" else checks.text(value, name)


def read_result(path: str | Path, name: str) -> TuneResult:
    """The result in a file, which errors call `name`.

    Raises
    ------
    ArgumentError
        The file cannot be read, or holds no result.
    """
    file = checks.path(path, name)
    try:
        return TuneResult.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{name}: expected a file of TuneResult.to_json, or none yet, got {file}: {error}") from None
