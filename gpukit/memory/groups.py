"""Deferred frees: ids that are collected in arrays of their own and freed together."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpukit import arrays
from gpukit.errors import ArgumentError

if TYPE_CHECKING:
    from gpukit.memory.pool import UnifiedPool

__all__ = ["FreeGroup"]


class FreeGroup:
    """What `UnifiedPool.free_group` returns: frees inside its ``with`` are queued, and made at the end.

    Queued ids are copies, never views of a row: a row may be rewritten before the group ends. If the block raises, what was queued is freed all the
    same, because its owner has let go of it.
    """

    def __init__(self, pool: UnifiedPool):
        self.pool = pool
        # Ids and vouched counts, by sub-pool and dtype.
        self._queued: dict[tuple[str, str], list[tuple[Any, int | None, int | None]]] = {}

    def __enter__(self) -> FreeGroup:
        if self.pool.group is not None:
            raise ArgumentError("free_group: expected no open group, got one inside another")
        self.pool.group = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.pool.group = None
        queued, self._queued = self._queued, {}
        for (name, _), batches in queued.items():
            ids = batches[0][0]
            for more, _, _ in batches[1:]:
                ids = arrays.concatenate(ids, more)
            lives = [live for _, live, _ in batches]
            others = [live for _, _, live in batches]
            self.pool.free(name, ids, live=_total(lives), follower_live=_total(others))

    def add(self, name: str, ids: Any, live: int | None, follower_live: int | None) -> None:
        """Queue ids, which nobody else may write any more."""
        _, _, dtype, _ = arrays.vector(ids, "ids", ("int32", "int64"))
        self._queued.setdefault((name, dtype), []).append((ids, live, follower_live))

    def queued(self, name: str) -> list[Any]:
        """The arrays of ids that wait to be freed in a sub-pool."""
        return [ids for (owner, _), batches in self._queued.items() if owner == name for ids, _, _ in batches]


def _total(counts: list[int | None]) -> int | None:
    """The sum of vouched counts; None where one of them is not known."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total
