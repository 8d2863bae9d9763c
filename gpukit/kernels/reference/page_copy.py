"""What the page-byte ops mean, in NumPy: moving, shifting and clearing pages of a byte buffer, and storing K and V rows.

Bytes only: which page is bound to what is told to the page tables by `remap`, in a call of its own.
"""

from __future__ import annotations

import numpy as np

from gpukit.errors import Signal
from gpukit.kernels.reference._ids import Array, add, as_ids


def _as_pages(buffer: Array, page_bytes: int) -> Array:
    """The whole pages of a buffer as a view [pages, page_bytes]."""
    count = len(buffer) // page_bytes
    return buffer[: count * page_bytes].reshape(count, page_bytes)


def move_pages(buffer: Array, page_bytes: int, source: Array, destination: Array, *, signal: Signal | None = None) -> None:
    """Copy page `source[i]` onto page `destination[i]`; the two sets are disjoint. The sink neither moves nor is written."""
    pages = _as_pages(buffer, page_bytes)
    source, destination = as_ids(source), as_ids(destination)
    valid = (source > 0) & (source < len(pages)) & (destination > 0) & (destination < len(pages))
    add(signal, "out_of_range", ~valid)
    pages[destination[valid]] = pages[source[valid]]


def shift_pages(buffer: Array, page_bytes: int, first: int, count: int, offset: int, *, signal: Signal | None = None) -> None:
    """Move `count` pages from `first` by `offset` pages; source and destination may overlap."""
    pages = _as_pages(buffer, page_bytes)
    pages[first + offset : first + offset + count] = pages[first : first + count]


def zero_pages(buffer: Array, page_bytes: int, pages: Array, *, signal: Signal | None = None) -> None:
    """Fill pages with zeros, the sink too if it is named."""
    view = _as_pages(buffer, page_bytes)
    ids = as_ids(pages)
    valid = (ids >= 0) & (ids < len(view))
    add(signal, "out_of_range", ~valid)
    view[ids[valid]] = 0


def store_kv(k: Array, v: Array, locations: Array, key_rows: Array, value_rows: Array, *, signal: Signal | None = None) -> None:
    """Write the bytes of row i of `k` and `v` at slot `locations[i]`; 0 and negative locations are padding."""
    slots = as_ids(locations)
    past = slots >= min(len(key_rows), len(value_rows))
    add(signal, "out_of_range", past)
    stored = (slots > 0) & ~past
    for values, rows in ((k, key_rows), (v, value_rows)):
        rows.view(np.uint8)[slots[stored]] = values.view(np.uint8)[stored]
