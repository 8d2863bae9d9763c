"""The form of a ladder's raw file, and its writer: a start line, a row per cell as it is measured, a done line. `verification` reads it.

The file is CSV between two marked lines of JSON::

    # start {"format": 1, "clock_ns": …, "design": {…}, "provenance": {…}}
    pass,position,arm,clock_ns,seconds,rounds,unsteady
    0,0,stock,81120355,0.25,678,
    …
    # done {"cells": 48, "sha256": "…"}

`pandas.read_csv(path, comment="#")` reads it. The digest covers everything above the done line, so that a number or a limit changed later
shows; it is no protection against someone who computes it anew.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from gpukit.errors import ArgumentError
from gpukit.measure.design import ORDER_COLUMNS, LadderDesign, Slot

__all__ = ["DONE", "START", "Cell", "LadderHeader", "LadderWriter", "Value", "done_line", "join", "number", "split"]

START, DONE = "# start ", "# done "
FORMAT = 1

Value = int | float | str


class Cell(NamedTuple):
    """One row: its slot, the clock in nanoseconds when it was written, what was measured by column, and the names that were not steady."""

    slot: Slot
    clock_ns: int
    values: Mapping[str, Value]
    unsteady: tuple[str, ...] = ()


@dataclass(frozen=True)
class LadderHeader:
    """The start line: the design, where the ladder ran, and the clock in nanoseconds before the first cell."""

    design: LadderDesign
    provenance: Mapping[str, Any]
    clock_ns: int

    def to_line(self) -> str:
        """The line without its end."""
        content = {"format": FORMAT, "clock_ns": self.clock_ns, "design": self.design.to_dict(), "provenance": self.provenance}
        # A probe may answer with a path or a version object; its text will do.
        return START + json.dumps(content, default=str)

    @classmethod
    def from_line(cls, line: str) -> LadderHeader:
        """Read a start line; ArgumentError says what is wrong with it."""
        if not line.startswith(START):
            raise ArgumentError(f"start line: expected {START!r} and JSON, got {line[:40]!r}")
        try:
            content = json.loads(line[len(START) :])
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"start line: expected JSON, got {line[len(START) :][:40]!r}: {error}") from error
        wanted = {"format": int, "clock_ns": int, "design": dict, "provenance": dict}
        if not isinstance(content, dict) or {name: type(value) for name, value in content.items()} != wanted or content["format"] != FORMAT:
            raise ArgumentError(f"start line: expected clock_ns, design, provenance and format {FORMAT}, got {line[len(START) :][:40]!r}")
        return cls(LadderDesign.from_dict(content["design"]), content["provenance"], content["clock_ns"])


class LadderWriter:
    """Writes a ladder's file, flushing every line, so that an interrupted run leaves what it measured. Use as a context manager.

    Parameters
    ----------
    path : path
        A file that does not exist yet: ladders are kept, never overwritten.
    header : LadderHeader
        Written at once, with the row of column names.

    Raises
    ------
    ArgumentError
        The file exists or cannot be made.
    """

    def __init__(self, path: str | Path, header: LadderHeader):
        try:
            self._file = open(path, "xb")
        except FileExistsError as error:
            raise ArgumentError(f"path: expected a file that does not exist yet, got {path}; a ladder is never overwritten") from error
        except OSError as error:
            raise ArgumentError(f"path: expected a file that can be made, got {path}: {error.strerror}") from error
        self._digest = hashlib.sha256()
        self._measured = header.design.columns[len(ORDER_COLUMNS) : -1]
        self._cells = 0
        self._write(header.to_line())
        self._write(join(header.design.columns))

    def __enter__(self) -> LadderWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def write(self, cell: Cell) -> None:
        """Append one row."""
        self._write(join((*cell.slot, cell.clock_ns, *(cell.values[name] for name in self._measured), " ".join(cell.unsteady))))
        self._cells += 1

    def done(self) -> None:
        """Write the done line, which makes the file whole."""
        self._write(done_line(self._cells, self._digest.hexdigest()))

    def _write(self, line: str) -> None:
        content = (line + "\n").encode()
        self._digest.update(content)
        self._file.write(content)
        self._file.flush()


def done_line(cells: int, digest: str) -> str:
    """The done line of a file of so many cells, whose bytes before it have this SHA-256 digest."""
    return DONE + json.dumps({"cells": cells, "sha256": digest})


def join(fields: Iterable[object]) -> str:
    """One line of CSV without its end; floats are written so that they read back to the bit."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(fields)
    return text.getvalue()


def split(line: str) -> list[str]:
    """The fields of one line of CSV, none where it is malformed."""
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return []


def number(text: str) -> int | float | None:
    """An int or a finite float as `join` writes it, else None."""
    if not text.isascii() or "_" in text or text != text.strip():
        return None
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if math.isfinite(value) else None
    return None
