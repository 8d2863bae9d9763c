"""The usual compositions of hybrid models, by name: which sub-pool grows from which end."""

from __future__ import annotations

from typing import Any

from gpukit.memory.layout import Entry, PoolLayout, SubPool, require_entry
from gpukit.memory.pool import UnifiedPool

__all__ = ["full_and_state", "full_and_swa", "full_and_swa_layout", "full_swa_and_state"]


def full_and_swa(buffer_bytes: int, full: Entry, swa: Entry, *, page_size: int, **options: Any) -> UnifiedPool:
    """Full attention, growing down, and sliding-window attention, growing up, which binds the ids that FULL mints.

    Parameters
    ----------
    buffer_bytes : int
        Bytes to share.
    full, swa : Entry
        What a token holds in each.
    page_size : int
        Tokens per page of both.
    **options
        Of `UnifiedPool`.

    Examples
    --------
    >>> from gpukit.memory import Part
    >>> pool = full_and_swa(1 << 16, Entry((Part("k", (8,), "float32"),)), Entry((Part("k", (4,), "float32"),)), page_size=16)
    >>> pool.available("full"), pool.available("swa"), pool.available({"full": 1, "swa": 1})
    (127, 127, 63)
    """
    return UnifiedPool(full_and_swa_layout(buffer_bytes, full, swa, page_size=page_size), **options)


def full_and_swa_layout(buffer_bytes: int, full: Entry, swa: Entry, *, page_size: int) -> PoolLayout:
    """The layout of `full_and_swa`, for arithmetic without a pool."""
    full, swa = require_entry(full, "full"), require_entry(swa, "swa")
    return PoolLayout(buffer_bytes, [SubPool("swa", swa, "up", page_size, owner="full"), SubPool("full", full, "down", page_size)])


def full_and_state(buffer_bytes: int, full: Entry, state: Entry, *, page_size: int, **options: Any) -> UnifiedPool:
    """Recurrent states, growing up, a slot a page, and full attention, growing down. Arguments as in `full_and_swa`."""
    full, state = require_entry(full, "full"), require_entry(state, "state")
    return UnifiedPool(PoolLayout(buffer_bytes, [SubPool("state", state, "up"), SubPool("full", full, "down", page_size)]), **options)


def full_swa_and_state(buffer_bytes: int, full: Entry, swa: Entry, state: Entry, *, page_size: int, **options: Any) -> UnifiedPool:
    """Recurrent states up, sliding-window attention afloat, full attention down. Arguments as in `full_and_swa`.

    Examples
    --------
    >>> from gpukit.memory import Part
    >>> row = Entry((Part("k", (8,), "float32"),))
    >>> pool = full_swa_and_state(1 << 16, row, row, Entry((Part("state", (1024,), "float32"),)), page_size=16)
    >>> found = pool.alloc_joint({"full": 2, "swa": 2, "state": 1})
    >>> {name: len(ids) for name, ids in found.items()}
    {'state': 1, 'full': 2, 'swa': 2}
    """
    full, swa, state = require_entry(full, "full"), require_entry(swa, "swa"), require_entry(state, "state")
    sub_pools = [SubPool("state", state, "up"), SubPool("swa", swa, "float", page_size, owner="full"), SubPool("full", full, "down", page_size)]
    return UnifiedPool(PoolLayout(buffer_bytes, sub_pools), **options)
