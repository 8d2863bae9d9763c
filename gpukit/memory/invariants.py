"""Checks of a whole pool: capacity, span conservation, ownership, sentinel rows and deferred frees.

They read everything back, so they are for tests and for hunting faults; nothing in the pool relies on them.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

from gpukit.errors import ArgumentError, GpukitError
from gpukit.memory._arrays import to_host
from gpukit.memory.bands import Band
from gpukit.memory.geometry import FLOAT

if TYPE_CHECKING:
    from gpukit.memory.pool import UnifiedPool

__all__ = ["Detection", "InvariantError", "InvariantWarning", "findings"]

LEVELS = ("off", "warn", "strict")


class InvariantError(GpukitError):
    """The pool contradicts itself; `findings` says how."""

    def __init__(self, where: str, found: list[str]):
        self.findings = found
        super().__init__(f"after {where}: " + "; ".join(found))


class InvariantWarning(UserWarning):
    """What `InvariantError` says, at the level "warn"."""


class Detection:
    """Checks a pool after every call: ``"warn"`` warns, ``"strict"`` raises."""

    def __init__(self, level: str):
        if level not in LEVELS:
            raise ArgumentError(f"detection: expected one of {', '.join(LEVELS)}, got {level!r}")
        self.level = level

    def check(self, pool: UnifiedPool, where: str) -> None:
        """Look at everything and say what is wrong."""
        found = findings(pool)
        if not found:
            return
        if self.level == "strict":
            raise InvariantError(where, found)
        warnings.warn(f"after {where}: " + "; ".join(found), InvariantWarning, stacklevel=3)


def findings(pool: UnifiedPool) -> list[str]:
    """Everything that is wrong, each as one line. Waits for the device."""
    found = _capacity(pool)
    tables = {band.name: (to_host(band.v2p), to_host(band.p2v)) for band in pool.chain.bands}
    for band in pool.chain.bands:
        v2p, p2v = tables[band.name]
        found += _sentinels(band, v2p, p2v)
        found += _ownership(band, v2p, p2v)
        found += _conservation(band, p2v)
        found += _ids(band, v2p)
        if band.spec.owner is not None:
            owner = tables[band.spec.owner][0]
            orphans = np.flatnonzero((v2p[1:-1] > 0) & (owner[1:-1] <= 0)) + 1
            if len(orphans):
                found.append(f"ownership: {band.name} binds id {orphans[0]}, which {band.spec.owner} has freed ({len(orphans)} such)")
        found += _deferred(pool, band, v2p)
    return found


def _capacity(pool: UnifiedPool) -> list[str]:
    """Spans lie in the buffer, in order, apart; counts are not negative."""
    found, floor = [], pool.layout.floor_bytes
    for band in pool.chain.bands:
        if min(band.live, band.hole_count, band.pending_count, band.id_count) < 0:
            found.append(f"capacity: {band!r} counts less than nothing")
        if band.low == band.high and band.kind == FLOAT:
            continue
        low, high = band.low * band.page_bytes, band.high * band.page_bytes
        if low < floor or high < low or high > pool.layout.buffer_bytes:
            found.append(f"capacity: {band.name} spans bytes [{low}, {high}), expected them within [{floor}, {pool.layout.buffer_bytes})")
        floor = max(floor, high)
    return found


def _sentinels(band: Band, v2p: np.ndarray, p2v: np.ndarray) -> list[str]:
    found = []
    for name, table in (("v2p", v2p), ("p2v", p2v)):
        if table[0] != 0 or table[-1] != -1:
            found.append(f"sentinel: {band.name}.{name} begins with {table[0]} and ends with {table[-1]}, expected 0 and -1")
    return found


def _ownership(band: Band, v2p: np.ndarray, p2v: np.ndarray) -> list[str]:
    """Each table leads back through the other, and bound pages lie in the span."""
    found = []
    for name, table, back in (("v2p", v2p, p2v), ("p2v", p2v, v2p)):
        bound = np.flatnonzero(table[1:-1] != -1) + 1
        partner = table[bound]
        inside = (partner >= 1) & (partner < len(back) - 1)
        wrong = bound[~inside]
        if not len(wrong):
            wrong = bound[back[partner] != bound]
        if len(wrong):
            found.append(f"ownership: {band.name}.{name}[{wrong[0]}] is {table[wrong[0]]}, which does not lead back ({len(wrong)} such)")
    used = np.flatnonzero(p2v[1:-1] != -1) + 1
    outside = used[(used < band.low) | (used >= band.high)]
    if len(outside):
        found.append(f"ownership: {band.name} page {outside[0]} is bound outside the span [{band.low}, {band.high})")
    return found


def _conservation(band: Band, p2v: np.ndarray) -> list[str]:
    """span = live + holes + pending, each page once."""
    found = []
    holes = _ring(band.holes)
    pending = band.pending_pages()
    # An answer that has not arrived yet makes the host know of fewer holes, never of more.
    if band.hole_count > len(holes) or (band.holes.device < 0 and band.hole_count != len(holes)):
        found.append(f"conservation: {band.name} counts {band.hole_count} holes, its list holds {len(holes)}")
    if band.pending_count != len(pending):
        found.append(f"conservation: {band.name} counts {band.pending_count} pending pages, holds {len(pending)}")
    free = np.concatenate([holes, pending])
    outside = free[(free < max(band.low, 1)) | (free >= band.high)]
    if len(outside):
        found.append(f"conservation: {band.name} holds the free page {outside[0]} outside the span [{band.low}, {band.high}) ({len(outside)} such)")
        return found
    if len(np.unique(free)) != len(free):
        found.append(f"conservation: {band.name} holds a free page twice")
    used = free[p2v[free] != -1]
    if len(used):
        found.append(f"conservation: {band.name} page {used[0]} is free and bound ({len(used)} such)")
    live = int(np.count_nonzero(p2v[1:-1] != -1))
    if live + len(free) != band.high - band.low:
        found.append(
            f"conservation: {band.name} spans {band.high - band.low} pages, expected {live} live + {len(holes)} holes + {len(pending)} pending"
        )
    return found


def _ids(band: Band, v2p: np.ndarray) -> list[str]:
    """Every virtual id is bound or free, never both."""
    if band.virtual is None:
        return []
    ids = _ring(band.virtual)
    wrong = ids[(ids < 1) | (ids >= band.num_virtual)]
    if len(wrong):
        return [f"ownership: {band.name} holds the free id {wrong[0]}, expected 1 … {band.num_virtual - 1}"]
    found = []
    if len(np.unique(ids)) != len(ids):
        found.append(f"ownership: {band.name} holds a free id twice")
    used = ids[v2p[ids] != -1]
    if len(used):
        found.append(f"ownership: {band.name} id {used[0]} is free and bound ({len(used)} such)")
    bound = int(np.count_nonzero(v2p[1:-1] != -1))
    if len(ids) + bound != band.num_virtual - 1:
        found.append(f"conservation: {band.name} has {band.num_virtual - 1} ids, expected {bound} bound + {len(ids)} free")
    return found


def _deferred(pool: UnifiedPool, band: Band, v2p: np.ndarray) -> list[str]:
    """Queued ids are live, and queued once."""
    if pool.group is None or band.virtual is None:
        return []
    batches = [to_host(ids) for ids in pool.group.queued(band.name)]
    if not batches:
        return []
    ids = np.concatenate(batches)
    dead = ids[v2p.take(ids, mode="clip") <= 0]
    if len(dead):
        return [f"deferred: id {dead[0]} waits to be freed in {band.name}, and is not live"]
    if len(np.unique(ids)) != len(ids):
        return [f"deferred: an id waits twice to be freed in {band.name}"]
    return []


def _ring(pages: object) -> np.ndarray:
    """What a list holds, on the host."""
    ring, counters = to_host(pages.ring), to_host(pages.counters)  # type: ignore[attr-defined]
    return np.asarray(ring[np.arange(counters[0], counters[1]) % len(ring)])
