"""Reading a ladder's file and verifying it: the only possible order is replayed against it, cell for cell. No measured number is judged here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpukit.errors import ArgumentError
from gpukit.measure.design import ORDER_COLUMNS, LadderDesign, Slot
from gpukit.measure.ladder_file import DONE, START, Cell, LadderHeader, Value, done_line, join, number, split

__all__ = ["LadderFile", "Problem", "Verification", "read", "verify"]

# Problems that the one line of text spells out; `Verification.problems` holds all.
SPELLED_OUT = 6


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a file: a short name, the line counted from 1, and what was expected and found."""

    kind: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.kind}: {self.message}"


@dataclass(frozen=True)
class Verification:
    """What `verify` says about a file.

    Attributes
    ----------
    path : str
    problems : tuple of Problem
        Empty for one connected run.
    passes, arms, cells : int
        Passes and arms of the design, and rows found before the done line; 0 where the start line cannot be read.
    """

    path: str
    problems: tuple[Problem, ...]
    passes: int = 0
    arms: int = 0
    cells: int = 0

    @property
    def ok(self) -> bool:
        """Whether the file is one connected run."""
        return not self.problems

    def __str__(self) -> str:
        if self.ok:
            return f"one connected run: {self.passes} passes × {self.arms} arms = {self.cells} cells"
        more = len(self.problems) - SPELLED_OUT
        return "; ".join(map(str, self.problems[:SPELLED_OUT])) + (f"; and {more} more" if more > 0 else "")

    def to_dict(self) -> dict[str, Any]:
        """The answer in plain types."""
        return {"ok": self.ok, "verdict": str(self), **asdict(self)}


@dataclass(frozen=True)
class LadderFile:
    """A file's start line, its cells, and the verdict on it.

    Attributes
    ----------
    header : LadderHeader or None
        None where the start line cannot be read.
    cells : tuple of Cell
        In the order of the file. Of a file that is not one connected run: the whole cells up to a second start line or the done line.
    verification : Verification
    digest : str
        SHA-256 of the file, which tells two files apart.
    """

    header: LadderHeader | None
    cells: tuple[Cell, ...]
    verification: Verification
    digest: str


def verify(path: str | Path) -> Verification:
    """Replay the only possible order against a ladder's file, cell for cell.

    Returns
    -------
    Verification
        `ok` for a file exactly as `Ladder.run` wrote it; otherwise every problem by name: ``truncated``, ``start line``, ``second start line``,
        ``column row``, ``rows after done``, ``columns`` (a row of too many or too few), ``value``, ``unknown arm``, ``unknown slot``,
        ``repeat``, ``gap``, ``out of order``, ``clock`` (running backwards), ``done line`` (a wrong count), ``digest`` (any other change).

    Raises
    ------
    ArgumentError
        There is no such file, or it cannot be read.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from gpukit.measure import Ladder
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "ladder.csv"
    >>> _ = Ladder({"stock": lambda: 0, "other": lambda: 0}, passes=3).run(path)
    >>> print(verify(path))
    one connected run: 3 passes × 2 arms = 6 cells
    >>> lines = path.read_text().splitlines(keepends=True)
    >>> _ = path.write_text("".join(lines[:4] + lines[5:]))
    >>> print(verify(path))
    line 5: gap: pass 1, position 0, arm other is missing; line 8: done line: expected a count of 5 cells, got ...
    """
    return read(path).verification


def read(path: str | Path) -> LadderFile:
    """Read a ladder's file and verify it; what could be read is returned whatever the verdict.

    Raises
    ------
    ArgumentError
        There is no such file, or it cannot be read.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ArgumentError(f"path: expected a readable ladder file, got {path}: {error.strerror}") from error
    return _Reader(str(path), content).read()


@dataclass
class _Row:
    """A line that should be a cell, and what it means as far as it means anything."""

    line: int
    fields: list[str]
    slot: Slot | None = None
    clock_ns: int | None = None
    values: dict[str, Value] = field(default_factory=dict)
    whole: bool = True


class _Reader:
    """Goes over a file once per kind of problem. Lines count from 0 here and from 1 in messages."""

    def __init__(self, path: str, content: bytes):
        self.path = path
        self.content = content
        self.problems: list[Problem] = []
        # Not splitlines(): only a line feed ends a line here, and a file without the last one was cut.
        self.lines = content.decode(errors="replace").split("\n")
        self.ended = self.lines.pop() == ""
        self.starts = [index for index, line in enumerate(self.lines) if line.startswith(START)]
        self.done = next((index for index, line in enumerate(self.lines) if line.startswith(DONE)), None)

    def read(self) -> LadderFile:
        self._check_frame()
        try:
            header = LadderHeader.from_line(self.lines[0] if self.lines else "")
        except ArgumentError as error:
            self._report("start line", 0, str(error))
            return self._file(None, [])
        rows = self._rows(header.design)
        self._check_order(header.design, rows)
        self._check_clock(header.clock_ns, rows)
        self._check_done(len(rows))
        return self._file(header, rows)

    def _report(self, kind: str, line: int, message: str) -> None:
        self.problems.append(Problem(kind, line + 1, message))

    def _file(self, header: LadderHeader | None, rows: list[_Row]) -> LadderFile:
        shape = (header.design.passes, len(header.design.arms)) if header else (0, 0)
        verification = Verification(self.path, tuple(self.problems), *shape, cells=len(rows))
        second_start = next((line for line in self.starts if line > 0), len(self.lines))
        cells = tuple(
            Cell(row.slot, row.clock_ns, row.values, tuple(row.fields[-1].split()))
            for row in rows
            if row.whole and row.slot is not None and row.clock_ns is not None and row.line < second_start
        )
        return LadderFile(header, cells, verification, hashlib.sha256(self.content).hexdigest())

    def _check_frame(self) -> None:
        """One start line, then at the end one done line and the end of a line."""
        if not self.ended or self.done is None:
            self._report("truncated", len(self.lines), "the file ends without a done line" if self.ended else "the file ends within a line")
        for line in self.starts:
            if line > 0:
                self._report("second start line" if self.starts[0] == 0 else "start line", line, "expected one ladder, which starts on line 1")
        if self.done is not None and (after := self.lines[self.done + 1 :]):
            cells = sum(not line.startswith("#") for line in after)
            self._report("rows after done", self.done + 1, f"{cells} cells and {len(after) - cells} marked lines follow the done line")

    def _rows(self, design: LadderDesign) -> list[_Row]:
        """The rows between the start line and the done line, with their fields read."""
        names = join(design.columns)
        if self.lines[1:2] != [names]:
            self._report("column row", 1, f"expected {names}, got {self.lines[1] if len(self.lines) > 1 else 'nothing'}")
        rows = []
        for index, line in enumerate(self.lines[: self.done]):
            if line == names and index > 1:
                self._report("column row", index, "a second row of column names")
            elif line != names and index not in (0, *self.starts):
                rows.append(self._row(design, index, line))
        return rows

    def _row(self, design: LadderDesign, line: int, text: str) -> _Row:
        row = _Row(line, split(text))
        if len(row.fields) != len(design.columns):
            self._report("columns", line, f"expected {len(design.columns)} columns, got {len(row.fields)}")
            row.whole = False
            return row
        clock = row.fields[ORDER_COLUMNS.index("clock_ns")]
        row.clock_ns = int(clock) if clock.isascii() and clock.isdigit() else None
        if row.clock_ns is None:
            self._report("value", line, f"clock_ns: expected a whole number, got {clock!r}")
        for column, content in list(zip(design.columns, row.fields, strict=True))[len(ORDER_COLUMNS) : -1]:
            value = content if column in design.geometry else number(content)
            if value is None or (column in design.metrics and not (isinstance(value, (int, float)) and value > 0)):
                self._report("value", line, f"{column}: expected a number{' above 0' if column in design.metrics else ''}, got {content!r}")
                row.whole = False
            else:
                row.values[column] = value
        return row

    def _check_order(self, design: LadderDesign, rows: list[_Row]) -> None:
        """Give every row its slot, and name slots that are unknown, repeated, in the wrong place or missing."""
        order = list(design.order())
        # Compared as text: "01" is not what the harness writes.
        slots = {(str(slot.pass_index), str(slot.position), slot.arm): (place, slot) for place, slot in enumerate(order)}
        lines: dict[Slot, int] = {}
        before = -1
        for row in rows:
            place, slot = slots.get((*row.fields[:3],), (-1, None))  # type: ignore[arg-type]
            if slot is None:
                self._report_unknown(design, row)
                continue
            if slot in lines:
                self._report("repeat", row.line, f"{_name(slot)} was on line {lines[slot] + 1} already")
                continue
            if place < before:
                self._report("out of order", row.line, f"{_name(slot)} comes after {_name(order[before])}")
            row.slot, lines[slot], before = slot, row.line, place
        self._report_gaps(order, lines)

    def _report_unknown(self, design: LadderDesign, row: _Row) -> None:
        if len(row.fields) < 3:
            self._report("unknown slot", row.line, "expected pass, position and arm")
        elif row.fields[2] not in design.arms:
            self._report("unknown arm", row.line, f"expected one of {', '.join(design.arms)}, got {row.fields[2]!r}")
        else:
            self._report("unknown slot", row.line, "the order has no pass {}, position {}, arm {}".format(*row.fields))

    def _report_gaps(self, order: Sequence[Slot], lines: dict[Slot, int]) -> None:
        """Name the missing slots, each at the line where the next cell stands. What a cut took off the end is no gap."""
        gaps = []
        next_line = self.done
        for slot in reversed(order):
            if slot in lines:
                next_line = lines[slot]
            elif next_line is not None:
                gaps.append((next_line, slot))
        for line, slot in reversed(gaps):
            self._report("gap", line, f"{_name(slot)} is missing")

    def _check_clock(self, start_ns: int, rows: list[_Row]) -> None:
        before = start_ns
        for row in rows:
            if row.clock_ns is not None:
                if row.clock_ns < before:
                    self._report("clock", row.line, f"runs backwards, from {before} to {row.clock_ns} ns")
                before = row.clock_ns

    def _check_done(self, cells: int) -> None:
        """The done line must count the rows. Its digest is looked at last, because any other problem breaks it too."""
        if self.done is None:
            return
        line = self.lines[self.done]
        digest = hashlib.sha256(self.content[: self.content.rindex(DONE.encode())]).hexdigest()
        if not line.startswith(done_line(cells, "").removesuffix('"}')):
            self._report("done line", self.done, f"expected a count of {cells} cells, got {line}")
        elif not self.problems and line != done_line(cells, digest):
            self._report("digest", self.done, "something above was changed after it was written")


def _name(slot: Slot) -> str:
    return f"pass {slot.pass_index}, position {slot.position}, arm {slot.arm}"
