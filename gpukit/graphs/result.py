"""What `tune` found, as a value: a row per candidate, the winner, JSON, a table, a picture. It measures nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukit.errors import ArgumentError
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
            content = json.loads(text)
            rows = []
            for own in content["rows"]:
                change = {phase: (low, high) for phase, (low, high) in own["change"].items()}
                rows.append(Row(**{**own, "recipe": Recipe.from_dict(own["recipe"]), "change": change}))
            return cls(
                winner=Recipe.from_dict(content["winner"]),
                reason=content["reason"],
                rows=tuple(rows),
                key=content["key"],
                ladders=tuple((path, verdict) for path, verdict in content["ladders"]),
                identity=content["identity"],
                censuses=content["censuses"],
            )
        except (ValueError, KeyError, TypeError) as error:
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
