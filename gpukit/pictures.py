"""Whether a picture can be drawn: the question that everything with a plot asks before its work. Those who draw import matplotlib themselves."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from gpukit.errors import ArgumentError

__all__ = ["FORMATS", "require"]

FORMATS = (".png", ".svg", ".pdf")


def require(path: str | Path) -> None:
    """Refuse what `save` could not do, before a long run rather than after it.

    Raises
    ------
    ArgumentError
        The file's ending is not one of `FORMATS`, or matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise ArgumentError(f"plot: expected a file name ending in {', '.join(FORMATS)}, got {path}")
    if find_spec("matplotlib") is None:
        raise ArgumentError("plot: expected matplotlib to be installed, got none; install gpukit with the extra plot")
