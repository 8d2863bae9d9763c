"""The arrays of split memory on one backend: both pools' tables, the free pages of each kind, the request rows, a round's buffers.

A lane owns arrays and nothing else: what happens to them in a round is written in `split_round`, what should have happened in `split_ledger`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpukit.decode.backend import Backend, Meter
from gpukit.decode.options import DecodeOptions
from gpukit.errors import GpukitError, Signal
from gpukit.kernels import free_list, metadata, page_table

__all__ = ["Lane", "LostPages", "PageSupply", "PoolTables", "Prompts", "shuffled_pages"]


class LostPages(GpukitError):
    """Pages that the host knows to be free are in no list."""


def shuffled_pages(count: int, seed: int, kind: int) -> np.ndarray:
    """Pages 1 … count in a fixed random order, so that a page's ids in different spaces do not agree by luck."""
    return np.random.default_rng([seed, kind]).permutation(np.arange(1, count + 1, dtype=np.int64))


@dataclass
class PoolTables:
    """Virtual-to-physical and physical-to-virtual table of one pool."""

    v2p: Any
    p2v: Any


class PageSupply:
    """The free pages of one kind: a `FreeList` that the host takes from, and the ring where the device puts freed pages.

    Together they are one first-in, first-out queue, so which page is taken does not depend on when the host learns the
    ring's length. The ring goes back into the list at two safe points: at the end of a round when the list runs low (`stock`),
    with no waiting, and when a take finds the list too short (`take`), waiting for the device if the read-back has not
    arrived; such waits are counted.
    """

    def __init__(self, kind: str, pages: np.ndarray, backend: Backend, meter: Meter):
        self.kind = kind
        self.backend = backend
        self.meter = meter
        self.waits = 0
        self.list = free_list.FreeList(backend.to_device(pages))
        self.ring = free_list.DevicePages(len(pages), like=backend.like)

    def take(self, count: int) -> Any:
        """The next `count` free pages, a view that stays valid."""
        if len(self.list) < count:
            self._drain()
        if len(self.list) < count:
            self._wait()
        if len(self.list) < count:
            raise LostPages(f"{count} {self.kind} pages must be free, the lists hold {len(self.list)}")
        return self.meter("FreeList.take", self.list.take, count)

    def stock(self, low: int) -> None:
        """Refill the list from the ring if it holds fewer than `low` pages; what the host does not know of yet comes later."""
        if len(self.list) < low:
            self._drain()

    def _wait(self) -> None:
        self.waits += 1
        # Twice, because a read-back that was under way may be older than the latest frees; the one that follows it is not.
        for _ in range(2):
            self.backend.synchronize()
            self._drain()

    def _drain(self) -> None:
        self.meter("DevicePages.refresh", self.ring.refresh)
        if self.ring.known:
            freed = self.meter("DevicePages.take", self.ring.take, self.ring.known)
            self.meter("FreeList.append", self.list.append, freed)

    def contents(self) -> np.ndarray:
        """Every free page in the order of use, on the host. Waits for the device: for checks only."""
        head, tail = self.backend.to_host(self.ring.counters).tolist()
        ring = self.backend.to_host(self.ring.ring)
        in_ring = ring[np.arange(head, tail) % len(ring)]
        return np.concatenate([self.backend.to_host(self.list.pages), in_ring])


@dataclass
class Prompts:
    """The prompts placed in a round, packed in lane order: virtual token ids and where they are in both pools."""

    tokens: Any
    full: Any
    swa: Any


class Lane:
    """One backend's state of a replay.

    Parameters
    ----------
    options : DecodeOptions
        Sizes of pages, pools and batch.
    longest : int
        Tokens of the longest request.
    backend : Backend
        Where the arrays live.
    """

    def __init__(self, options: DecodeOptions, longest: int, backend: Backend):
        self.options = options
        self.backend = backend
        self.meter = Meter(backend)
        self.signal = Signal(like=backend.like)
        capacity, page_size = options.batch, options.page_size
        # Tables count the sink, page 0.
        self.full = PoolTables(*page_table.empty(options.pages + 1, options.pages + 1, like=backend.like))
        self.swa = PoolTables(*page_table.empty(options.pages + 1, options.swa_pages + 1, like=backend.like))
        self.spaces = metadata.AddressSpaces(self.full.v2p, swa=self.swa.v2p)
        counts = {"virtual": options.pages, "full": options.pages, "swa": options.swa_pages}
        pages = {kind: shuffled_pages(count, options.seed, slot) for slot, (kind, count) in enumerate(counts.items())}
        self.supplies = {kind: PageSupply(kind, pages[kind], backend, self.meter) for kind in counts}
        max_pages = max(1, -(-longest // page_size))
        last_token = (options.pages + 1) * page_size - 1
        row_dtype: type = np.int32 if last_token < 2**31 else np.int64
        self.rows = backend.zeros((capacity, max_pages * page_size), row_dtype)
        self.control = backend.zeros((4, capacity), np.int64)
        self.prompts: Prompts | None = None
        self.locations = backend.zeros(capacity, np.int64)
        self.full_locations = backend.zeros(capacity, np.int64)
        self.swa_locations = backend.zeros(capacity, np.int64)
        self.lengths = backend.zeros(capacity, np.int32)
        self.cu_lengths = backend.zeros(capacity + 1, np.int32)
        self.full_pages = backend.zeros((capacity, max_pages), np.int32)
        self.swa_pages = backend.zeros((capacity, max_pages), np.int32)

    def current(self) -> AbstractContextManager[Any]:
        """The lane uses the current stream, whatever it is."""
        return self.backend.using(None)

    @property
    def waits(self) -> int:
        """How often a free list had to wait for the device's read-back."""
        return sum(supply.waits for supply in self.supplies.values())

    def free_pages(self) -> dict[str, np.ndarray]:
        """Every free page by kind, in the order of use, on the host. Waits for the device: for checks only."""
        return {kind: supply.contents() for kind, supply in self.supplies.items()}

    def tables(self) -> dict[str, Any]:
        """Every array that two backends must agree on after a round, by name."""
        prompts = {} if self.prompts is None else vars(self.prompts)
        return {
            **{f"prompt {name}": array for name, array in prompts.items()},
            "full.v2p": self.full.v2p,
            "full.p2v": self.full.p2v,
            "swa.v2p": self.swa.v2p,
            "swa.p2v": self.swa.p2v,
            "rows": self.rows,
            "locations": self.locations,
            "full locations": self.full_locations,
            "swa locations": self.swa_locations,
            "lengths": self.lengths,
            "cu_lengths": self.cu_lengths,
            "full page table": self.full_pages,
            "swa page table": self.swa_pages,
        }
