"""Checks of plain arguments: numbers, texts, mappings, files. Each names the argument, what was expected and what came, and returns plain types."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpukit.errors import ArgumentError, ArgumentTypeError

__all__ = ["integer", "items", "mapping", "number", "path", "plain", "text", "texts", "whole", "writable"]


def integer(value: Any, name: str) -> int:
    """A Python or NumPy integer; a bool is none."""
    # Nor is an array of one element: reading one on a device would wait for it.
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentTypeError(f"{name}: expected an integer, got {type(value).__name__}")
    return int(value)


def whole(value: Any, name: str, least: int = 0, most: int = 2**62) -> int:
    """An integer from `least` to `most`.

    Examples
    --------
    >>> whole(np.int64(3), "layers", 1)
    3
    """
    found = integer(value, name)
    if found < least:
        raise ArgumentError(f"{name}: expected at least {least}, got {found}")
    if found > most:
        raise ArgumentError(f"{name}: expected at most {most}, got {found}")
    return found


def number(value: Any, name: str, least: float, most: float = sys.float_info.max) -> float:
    """A number from `least` to `most`, any finite one upwards by default; never NaN.

    Examples
    --------
    >>> number(1, "ratio", 0, 1)
    1.0
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ArgumentTypeError(f"{name}: expected a number, got {type(value).__name__}")
    if isinstance(value, np.generic):
        # A narrow one would be compared in its own precision.
        value = float(value)
    if not least <= value <= most:
        wanted = f"finite number from {least:g} on" if most == sys.float_info.max else f"number from {least:g} to {most:g}"
        raise ArgumentError(f"{name}: expected a {wanted}, got {value}")
    return float(value)


def text(value: Any, name: str) -> str:
    """Text that is not empty."""
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{name}: expected text, got {type(value).__name__}")
    if not value:
        raise ArgumentError(f"{name}: expected text, got none")
    return value


def items(value: Any, name: str) -> tuple[Any, ...]:
    """The items of a list, tuple or other sequence. Text is refused, because it would pass as a sequence of its letters."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        got = f"the text {value!r}" if isinstance(value, str) else type(value).__name__
        raise ArgumentTypeError(f"{name}: expected a sequence, got {got}")
    return tuple(value)


def texts(value: Any, name: str) -> tuple[str, ...]:
    """A sequence of texts.

    Examples
    --------
    >>> texts(["conv", "gated"], "nodes")
    ('conv', 'gated')
    >>> texts("gated", "nodes")
    Traceback (most recent call last):
    ...
    gpukit.errors.ArgumentTypeError: nodes: expected a sequence, got the text 'gated'
    """
    return tuple(text(own, name) for own in items(value, name))


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """A mapping from text."""
    if not isinstance(value, Mapping):
        raise ArgumentTypeError(f"{name}: expected a mapping, got {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise ArgumentTypeError(f"{name}: expected text as keys, got {key!r}")
    return value


def plain(value: Any, name: str) -> Any:
    """The same after a way through JSON, which only plain types survive; NaN would not even equal itself."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentTypeError(f"{name}: expected plain types, as JSON has them, got something else: {error}") from None


def path(value: Any, name: str) -> Path:
    """A path from text or an object that is one."""
    if not isinstance(value, str | os.PathLike):
        raise ArgumentTypeError(f"{name}: expected a path, got {type(value).__name__}")
    return Path(value)


def writable(value: Any, name: str) -> Path:
    """A file that can be made or overwritten, found out before the work whose result it takes."""
    file = path(value, name)
    if file.is_dir() or not file.parent.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ArgumentError(f"{name}: expected a file that can be written in an existing directory, got {file}")
    return file
