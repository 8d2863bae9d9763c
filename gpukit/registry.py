"""What can be asked for by name: `gpukit.measure.workloads` of `gpukit ladder run`, `gpukit.graphs.rounds` of `gpukit tune`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from gpukit.errors import ArgumentError

__all__ = ["Registry"]

Options = ParamSpec("Options")
Made = TypeVar("Made")


class Registry(Generic[Options, Made]):
    """Builders by name; nothing is built before it is asked for.

    Parameters
    ----------
    kind : str
        What they build, in one word, for messages.
    elsewhere : tuple of str
        Modules that register more of them; imported when names are first asked for, because they import the registry's own module.

    Attributes
    ----------
    builders : dict of str to (str, callable)
        One line about it, and its builder, by name.

    Examples
    --------
    >>> shapes = Registry[[int], list[int]]("shape")
    >>> @shapes.register("square", "as long as wide")
    ... def square(size: int) -> list[int]:
    ...     return [size, size]
    >>> shapes.summaries(), shapes.build("square", 3)
    ({'square': 'as long as wide'}, [3, 3])
    """

    def __init__(self, kind: str, elsewhere: tuple[str, ...] = ()):
        self.kind, self.elsewhere = kind, elsewhere
        self.builders: dict[str, tuple[str, Callable[Options, Made]]] = {}

    def register(self, name: str, summary: str) -> Callable[[Callable[Options, Made]], Callable[Options, Made]]:
        """Register the decorated function as the builder of `name`; ArgumentError where the name is taken."""

        def add(builder: Callable[Options, Made]) -> Callable[Options, Made]:
            if name in self.builders:
                raise ArgumentError(f"name: expected a {self.kind} that is not registered yet, got {name!r}")
            self.builders[name] = (summary, builder)
            return builder

        return add

    def summaries(self) -> dict[str, str]:
        """Every name and one line about it."""
        for module in self.elsewhere:
            importlib.import_module(module)
        return {name: summary for name, (summary, _) in self.builders.items()}

    def build(self, name: str, /, *args: Options.args, **kwargs: Options.kwargs) -> Made:
        """Build by name; ArgumentError names those there are."""
        if name not in (known := self.summaries()):
            raise ArgumentError(f"{self.kind}: expected one of {', '.join(known)}, got {name!r}")
        return self.builders[name][1](*args, **kwargs)
