"""A band: the pages that one sub-pool holds in the buffer, its tables, its free lists, and the numbers that the host keeps of them.

A band's holes lie in a device ring, so that what ops free or retire on the device becomes free without the host knowing which pages these are.
The host knows how many: by its own count where the caller vouches for it, otherwise by a read-back that it never waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpukit import devices
from gpukit.errors import ArgumentTypeError
from gpukit.kernels import page_table
from gpukit.kernels.free_list import DevicePages
from gpukit.memory._arrays import to_device, to_host
from gpukit.memory.geometry import DOWN, FLOAT, UP, BandState
from gpukit.memory.layout import PoolLayout
from gpukit.streams import choose

__all__ = ["Band", "Epoch", "is_done", "require_event"]

_KINDS = {"up": UP, "float": FLOAT, "down": DOWN}
# More ids than any band can have pages.
_UNLIMITED = 2**62


class Epoch:
    """A number that changes whenever a capacity field is bound anew."""

    def __init__(self) -> None:
        self.value = 0


class CapacityField:
    """An attribute that capacity depends on: every rebind of it changes the epoch, so that no answer outlives what it was made of."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = f"_{name}"

    def __get__(self, band: Any, owner: type | None = None) -> Any:
        return self if band is None else band.__dict__[self._slot]

    def __set__(self, band: Any, value: int) -> None:
        band.__dict__[self._slot] = value
        band.epoch.value += 1


class CountField(CapacityField):
    """One that decode rounds change, too: they are taken account of before it is looked at."""

    def __get__(self, band: Any, owner: type | None = None) -> Any:
        if band is None:
            return self
        band.holes.settle()
        return band.__dict__[self._slot]


def is_done(event: Any) -> bool:
    """Whether an event has fired: torch and Numba ``query()``, CuPy ``done``, cuda.core ``is_done``. Never waits."""
    query = getattr(event, "query", None)
    if query is not None:
        return bool(query())
    return bool(event.done if hasattr(event, "done") else event.is_done)


def require_event(event: Any, name: str) -> None:
    """Refuse by name what `is_done` cannot ask, or what cannot be told from other events."""
    known = callable(getattr(event, "query", None)) or hasattr(event, "done") or hasattr(event, "is_done")
    if not known or type(event).__hash__ is None:
        raise ArgumentTypeError(f"{name}: expected an event (torch, Numba, CuPy or cuda.core), got {type(event).__name__}")
    # An event that cannot say whether it has fired must not be found out when pages wait for it.
    is_done(event)


class Band:
    """The state of one sub-pool.

    Attributes
    ----------
    name : str
    v2p, p2v : int64 array
        Its tables.
    holes : DevicePages
        Free pages inside the span.
    virtual : DevicePages or None
        Ids that can be minted; None where the ids belong to the owner.
    low, high : int
        The span in pages, ``[low, high)``.
    hole_count, pending_count, id_count : int
        As far as the host knows; `hole_count` and `id_count` never say more than there is.
    pending : dict of event to int64 array
        Pages that a graph in flight may still read, by the event after which they are free.
    gate : callable, optional
        Says whether the band's pages may move; they may without one.
    dirty : bool
        Whether pages were freed since the last flush.
    """

    low = CapacityField()
    high = CapacityField()
    hole_count = CountField()
    pending_count = CapacityField()
    id_count = CountField()

    def __init__(self, layout: PoolLayout, name: str, epoch: Epoch, like: Any):
        self.spec = layout.by_name[name]
        self.name = name
        self.epoch = epoch
        self.like = like
        self.kind = _KINDS[self.spec.place]
        self.page_size = self.spec.page_size
        self.page_bytes = self.spec.page_bytes
        self.first = layout.first_page(name)
        self.num_physical = layout.num_physical(name)
        self.num_virtual = layout.num_virtual(name)
        self.v2p, self.p2v = page_table.empty(self.num_virtual, self.num_physical, like=like)
        self.holes = DevicePages(self.num_physical, like=like)
        self.virtual: DevicePages | None = None
        self.low = self.high = self.num_physical if self.kind == DOWN else self.first
        self.hole_count = self.pending_count = 0
        self.id_count = _UNLIMITED
        if self.spec.owner is None:
            self.virtual = DevicePages(self.num_virtual, like=like)
            self.virtual.fill(to_device(np.arange(1, self.num_virtual, dtype=np.int64), like))
            self.id_count = self.num_virtual - 1
        self.pending: dict[Any, list[np.ndarray]] = {}
        self.gate: Callable[[], bool] | None = None
        self._dirty = False

    def __repr__(self) -> str:
        counts = f"{self.live} live, {self.hole_count} holes, {self.pending_count} pending"
        return f"Band({self.name}, {self.spec.place}, pages [{self.low}, {self.high}): {counts})"

    @property
    def live(self) -> int:
        """Pages in use, as far as the host knows: the span without holes and pending pages."""
        return int(self.high - self.low - self.hole_count - self.pending_count)

    @property
    def movable(self) -> bool:
        """Whether pages may move now: the gate is open, and no page waits for an event."""
        return not self.pending_count and (self.gate is None or self.gate())

    @property
    def dirty(self) -> bool:
        """Whether pages were freed since the last flush."""
        self.holes.settle()
        return self._dirty

    @dirty.setter
    def dirty(self, value: bool) -> None:
        self._dirty = value

    def state(self) -> BandState:
        """The numbers that capacity depends on."""
        self.holes.settle()
        fields = self.__dict__
        return BandState(
            self.kind, self.page_bytes,
            fields["_low"], fields["_high"], fields["_hole_count"], fields["_pending_count"], fields["_id_count"], self.movable,
        )  # fmt: skip

    def note(self, holes: int | None, ids: int | None, stream: Any) -> None:
        """Take account of pages and ids that an op has put into the lists: so many where the caller vouches for it, None where nobody knows.

        A read-back starts for what is not known; NumPy lists are counted at once.
        """
        self.hole_count = _account(self.holes, holes, stream)
        if self.virtual is not None:
            self.id_count = _account(self.virtual, ids, stream)
        self.dirty = True

    def stepped(self, change: int) -> None:
        """Take account of what a decode step did to the lists, as far as it is certain: pages pushed less pages popped."""
        holes, virtual = self.holes, self.virtual
        if holes.device >= 0:
            holes.note(change)
            if virtual is not None:
                virtual.note(change)
        self.hole_count = holes.known
        if virtual is not None:
            self.id_count = virtual.known
        self.dirty = True

    def refresh(self, stream: Any) -> None:
        """Collect what has arrived of the lists' lengths. Never waits."""
        self.hole_count = self.holes.refresh(stream=stream)
        if self.virtual is not None:
            self.id_count = self.virtual.refresh(stream=stream)

    def settle(self, stream: Any) -> None:
        """Learn the lists' true lengths. Waits for the device, where there is one."""
        if self.holes.device < 0:
            self.refresh(stream)
            return
        # Twice, because a read-back that was under way may be older than the latest frees; the one that follows it is not.
        for _ in range(2):
            self.refresh(stream)
            devices.call(devices.driver().cuStreamSynchronize(choose(stream, self.holes.ring)), "cuStreamSynchronize")
        self.refresh(stream)

    def take_holes(self, stream: Any) -> np.ndarray:
        """All holes, sorted and on the host; the list is empty then. Waits for the device: the one read-back of a flush."""
        if not self.holes.known:
            return np.empty(0, np.int64)
        pages = to_host(self.holes.take(self.holes.known, stream=stream))
        pages.sort()
        return pages

    def put_holes(self, pages: np.ndarray, stream: Any) -> None:
        """Put pages of the span into the list, innermost first for an END."""
        if len(pages):
            self.holes.fill(to_device(pages[::-1].copy() if self.kind == DOWN else pages, self.like), stream=stream)
        self.hole_count = self.holes.known

    def pending_pages(self) -> np.ndarray:
        """Every page that waits for an event."""
        groups = [pages for batches in self.pending.values() for pages in batches]
        return np.concatenate(groups) if groups else np.empty(0, np.int64)

    def wait_for(self, event: Any, pages: np.ndarray) -> None:
        """Keep pages until an event fires, beside those that wait for it already."""
        if len(pages):
            self.pending.setdefault(event, []).append(pages)
            self.pending_count += len(pages)

    def collect(self, stream: Any) -> None:
        """Turn pages whose event has fired into holes. Never waits."""
        for event in [event for event in self.pending if is_done(event)]:
            pages = np.concatenate(self.pending.pop(event))
            self.put_holes(np.sort(pages), stream)
            self.pending_count -= len(pages)
            self.dirty = True


def _account(pages: DevicePages, count: int | None, stream: Any) -> int:
    """Length of a list after an op has appended to it, as far as the host knows."""
    if pages.device < 0:
        return pages.known
    if count is None:
        return pages.refresh(stream=stream)
    pages.note(count)
    return pages.known
