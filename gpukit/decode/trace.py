"""Request traces: what each request of a replay asks for, read from a CSV file or drawn from a seeded generator.

Only lengths matter here. Arrival times are not used: a replay is saturated, every request is waiting from the first round on.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np

from gpukit.errors import ArgumentError

__all__ = ["COLUMNS", "Request", "generate_trace", "read_trace"]

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LARGEST_LENGTH = 2**31 - 1

# Mean and deviation of the logarithm of the lengths in a public chat service trace (Azure LLM inference 2023, conversation).
PROMPT_LOGNORMAL = (6.63, 0.99)
GENERATED_LOGNORMAL = (5.02, 0.86)
LONGEST_PROMPT = 8192
LONGEST_GENERATED = 1024


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes
    ----------
    index : int
        Position in the trace, from 0.
    prompt : int
        Tokens to place when the request is admitted, at least 1.
    generate : int
        Tokens to generate, one per round, at least 1.
    """

    index: int
    prompt: int
    generate: int

    @property
    def total(self) -> int:
        """Tokens the request holds when it ends."""
        return self.prompt + self.generate


def read_trace(path: str | Path, limit: int | None = None) -> list[Request]:
    """Read a trace with the columns TIMESTAMP, ContextTokens and GeneratedTokens; others are ignored.

    Parameters
    ----------
    path : path
        A CSV file with a header line. Blank lines are skipped.
    limit : int, optional
        Stop after this many requests; later lines are not looked at.

    Raises
    ------
    ArgumentError
        The file cannot be read, a column is missing, a length is not a whole number from 1 to 2**31 - 1, or there is no
        request at all. The message names the file, the line and the column.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            requests = list(islice(_parse(str(path), file), limit))
    except OSError as error:
        raise ArgumentError(f"trace: expected a readable CSV file, got {path} ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"trace {path}: expected UTF-8 text, got {error.reason} at byte {error.start}") from error
    except csv.Error as error:
        raise ArgumentError(f"trace {path}: expected a CSV file, got {error}") from error
    if not requests:
        raise ArgumentError(f"trace {path}: expected at least one request, got none")
    return requests


def _parse(path: str, file: TextIO) -> Iterator[Request]:
    reader = csv.reader(file)
    header = [name.strip() for name in next(reader, [])]
    for name in COLUMNS:
        if name not in header:
            raise ArgumentError(f"trace {path}, line 1: expected a column {name}, got {','.join(header) or 'an empty line'}")
    prompt, generate = header.index("ContextTokens"), header.index("GeneratedTokens")
    for index, row in enumerate(row for row in reader if row):
        place = f"trace {path}, line {reader.line_num}"
        if len(row) != len(header):
            raise ArgumentError(f"{place}: expected {len(header)} columns as in the header, got {len(row)}")
        yield Request(index, _length(place, header[prompt], row[prompt]), _length(place, header[generate], row[generate]))


def _length(place: str, column: str, text: str) -> int:
    digits = text.strip()
    # isdigit alone would let other scripts' digits through, int alone "1_000" and "+5".
    if digits.isascii() and digits.isdigit() and len(digits) <= 10 and 1 <= int(digits) <= LARGEST_LENGTH:
        return int(digits)
    shown = text if len(text) <= 40 else text[:40] + "…"
    raise ArgumentError(f"{place}, column {column}: expected a whole number from 1 to {LARGEST_LENGTH}, got {shown!r}")


def generate_trace(requests: int, seed: int = 0) -> list[Request]:
    """Draw a trace with log-normal lengths, the shape of a chat service's: median prompt 757 tokens, median answer 151.

    The same seed gives the same requests, and a shorter trace is the beginning of a longer one. Lengths are rounded to whole
    tokens and clipped to 1 … 8,192 (prompt) and 1 … 1,024 (generated).
    """
    normal = np.random.default_rng(seed).standard_normal((requests, 2))
    mean, deviation = np.array([PROMPT_LOGNORMAL, GENERATED_LOGNORMAL]).T
    lengths = np.rint(np.exp(mean + deviation * normal))
    lengths = np.clip(lengths, 1, [LONGEST_PROMPT, LONGEST_GENERATED]).astype(np.int64)
    return [Request(index, prompt, generate) for index, (prompt, generate) in enumerate(lengths.tolist())]
