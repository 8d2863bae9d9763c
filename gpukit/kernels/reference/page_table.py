"""What the page-table ops mean: bind, unbind, remap and translate in NumPy, the oracle and the CPU backend.

Arguments are validated by the public ops of `gpukit.kernels.page_table`; here only values matter. Page bytes are moved by
`page_copy`, lists of free pages are kept by `free_list`.
"""

from __future__ import annotations

import numpy as np

from gpukit.errors import Signal
from gpukit.kernels.reference._ids import Array, add, all_different, as_ids, every, is_first, is_page, live_partner, token_locations
from gpukit.kernels.reference.free_list import Ring, append


def empty(num_virtual: int, num_physical: int | None = None) -> tuple[Array, Array]:
    """Tables with nothing bound: row 0 is the sink, the last row the sentinel."""
    tables = []
    for count in (num_virtual, num_virtual if num_physical is None else num_physical):
        table = np.full(count + 1, -1, dtype=np.int64)
        table[0] = 0
        tables.append(table)
    return tables[0], tables[1]


def bind(virtual_pages: Array, physical_pages: Array, v2p: Array, p2v: Array, *, signal: Signal | None = None) -> None:
    """Bind pairs as if one after the other in input order; of duplicates the last stays."""
    virtual, physical = as_ids(virtual_pages), as_ids(physical_pages)
    valid = is_page(virtual, v2p) & is_page(physical, p2v)
    if not every(valid):
        add(signal, "out_of_range", ~valid)
        virtual, physical = virtual[valid], physical[valid]
    if every(v2p[virtual] == -1) and every(p2v[physical] == -1):
        if all_different(virtual, v2p) and all_different(physical, p2v):
            v2p[virtual], p2v[physical] = physical, virtual
            return
        v2p[virtual], p2v[physical] = -1, -1
    _rebind(virtual, physical, v2p, p2v, signal)


def _rebind(virtual: Array, physical: Array, v2p: Array, p2v: Array, signal: Signal | None) -> None:
    # A loop, because what a pair overwrites depends on the pairs before it; only bad input comes here.
    rebound = 0
    for v, p in zip(virtual.tolist(), physical.tolist(), strict=True):
        old_physical, old_virtual = v2p[v], p2v[p]
        rebound += bool(old_physical != -1 or old_virtual != -1)
        if is_page(old_physical, p2v) and p2v[old_physical] == v:  # a stale entry's page stays with its owner
            p2v[old_physical] = -1
        if is_page(old_virtual, v2p) and v2p[old_virtual] == p:
            v2p[old_virtual] = -1
        v2p[v], p2v[p] = p, v
    if signal is not None:
        signal.add("rebound", rebound)


def bind_range(virtual_pages: Array, first: int, v2p: Array, p2v: Array, *, out: Array | None = None, signal: Signal | None = None) -> Array:
    """Bind page i to physical page `first + i`; -1 in `out` where the virtual page is invalid."""
    virtual = as_ids(virtual_pages)
    physical = np.arange(first, first + len(virtual), dtype=np.int64)
    bind(virtual, physical, v2p, p2v, signal=signal)
    out = np.empty(len(virtual), dtype=np.int64) if out is None else out
    out[:] = np.where(is_page(virtual, v2p), physical, -1)
    return out


def unbind(virtual_pages: Array, v2p: Array, p2v: Array, *, out: Array | None = None, signal: Signal | None = None) -> Array:
    """Free the live pages and say where they were, -1 elsewhere; of duplicates the first frees."""
    virtual = as_ids(virtual_pages)
    valid = is_page(virtual, v2p).nonzero()[0]
    owners = virtual[valid]
    physical = live_partner(virtual, v2p, p2v)
    if not all_different(owners, v2p):
        physical[valid[~is_first(owners)]] = -1
    v2p[owners] = -1  # a stale entry too: its page belongs to another by now, and stays with it
    freed = physical > 0
    p2v[physical[freed]] = -1
    if signal is not None:
        signal.add("out_of_range", len(virtual) - len(valid))
        signal.add("unbound", len(valid) - int(np.count_nonzero(freed)))
    if out is None:
        return physical
    out[:] = physical
    return out


def unbind_into(virtual_pages: Array, v2p: Array, p2v: Array, pages: Ring, *, signal: Signal | None = None) -> None:
    """Free the live pages and append their physical pages to `pages` in input order."""
    physical = unbind(virtual_pages, v2p, p2v, signal=signal)
    append(pages, physical[physical > 0], signal)


def remap(source: Array, destination: Array, v2p: Array, p2v: Array, *, signal: Signal | None = None) -> None:
    """Point the owners of `source` at `destination`. What was bound at the call decides, so no pair can feed another."""
    source, destination = as_ids(source), as_ids(destination)
    valid = is_page(source, p2v) & is_page(destination, p2v)
    virtual = live_partner(source, p2v, v2p)
    unbound = valid & (virtual < 0)
    occupied = valid & ~unbound & (p2v.take(destination, mode="clip") != -1)
    moved = valid & ~unbound & ~occupied
    add(signal, "out_of_range", ~valid)
    add(signal, "unbound", unbound)
    add(signal, "occupied", occupied)
    source, destination, virtual = source[moved], destination[moved], virtual[moved]
    if not (all_different(source, p2v) and all_different(destination, p2v)):
        first = _first_of_both(source, destination, signal)
        p2v[destination], p2v[source] = -1, virtual  # give back the rows that the check borrowed
        source, destination, virtual = source[first], destination[first], virtual[first]
    v2p[virtual], p2v[destination], p2v[source] = destination, virtual, -1


def _first_of_both(source: Array, destination: Array, signal: Signal | None) -> list[int]:
    # A loop, because a pair that is skipped for one side leaves its other side to a later pair; only bad input comes here.
    left: set[int] = set()
    filled: set[int] = set()
    taken = []
    for i, (s, d) in enumerate(zip(source.tolist(), destination.tolist(), strict=True)):
        if s not in left and d not in filled:
            taken.append(i)
            left.add(s)
            filled.add(d)
        elif signal is not None:
            signal.add("unbound" if s in left else "occupied", 1)
    return taken


def translate(
    ids: Array,
    v2p: Array | None,
    page_size: int,
    *,
    out: Array | None = None,
    out_width: int | None = None,
    dcp: tuple[int, int] = (1, 0),
    signal: Signal | None = None,
) -> Array:
    """Physical token of each virtual token id; 0 for ids that are negative, unbound, past the table or another rank's."""
    ids = as_ids(ids)
    size, rank = dcp
    if size > 1:
        ids = np.where(ids % size == rank, ids // size, 0)
    width = ids.shape[-1]
    location = token_locations(ids, v2p, page_size, signal)
    if out is None:
        if out_width in (None, width):
            return location
        out = np.empty((*ids.shape[:-1], out_width), dtype=np.int64)
    out[..., :width] = location
    if out_width is not None:
        out[..., width:out_width] = 0
    return out
