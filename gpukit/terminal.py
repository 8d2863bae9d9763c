"""What the commands share at the terminal: a console, and refusals as one line and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from gpukit.errors import GpukitError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["BAD_ARGUMENT", "console", "refusals"]

# The exit code for bad arguments, as the shell's own programs use it.
BAD_ARGUMENT = 2


def console(stderr: bool = False) -> Console:
    """A rich console on one of the two streams."""
    from rich.console import Console

    return Console(stderr=stderr)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn gpukit's own errors, unwritable files and sizes past memory into one line on standard error and the exit code for bad arguments."""
    try:
        yield
    except (GpukitError, OSError) as error:
        message = str(error)
    except MemoryError as error:
        message = f"expected sizes that fit into memory, got {error or 'too little of it'}"
    else:
        return
    typer.echo(f"gpukit: {message}", err=True)
    raise typer.Exit(BAD_ARGUMENT)
