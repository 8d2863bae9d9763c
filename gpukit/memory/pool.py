"""The unified pool: one buffer that sub-pools share, whose page tables live on the device and whose hot paths never wait for it.

Which pages exist, how many are free and where the next ones come from is decided here, on the host, from numbers alone; which pages these are only
the device knows. Prefix trees and reference counts belong to the engine: the pool frees what it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpukit import arrays
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels import page_copy, page_table, sliding_window, state_slots
from gpukit.kernels._plans import whole
from gpukit.kernels.free_list import DevicePages
from gpukit.kernels.metadata import AddressSpaces
from gpukit.launch import IDS
from gpukit.memory import relief
from gpukit.memory._arrays import by_page, byte_view, check_ids, owned, to_device
from gpukit.memory.bands import Band, Epoch, require_event
from gpukit.memory.capacity import Chain, Weights
from gpukit.memory.geometry import DOWN, UP, Take, pack, place
from gpukit.memory.groups import FreeGroup
from gpukit.memory.invariants import Detection
from gpukit.memory.layout import PART_ALIGNMENT, PoolLayout

__all__ = ["UnifiedPool"]

Reclaim = Callable[[dict[str, int]], bool]


class UnifiedPool:
    """A buffer shared by sub-pools.

    Parameters
    ----------
    layout : PoolLayout
        What lies in the buffer.
    like : array, optional
        An array whose library and device the tables and the buffer shall have; NumPy by default.
    buffer : uint8 array, shape (at least layout.buffer_bytes,), optional
        The bytes, at an address that is a multiple of 16. Allocated by default.
    bytes : bool
        False makes a pool without bytes, for planning and simulation: everything but them is the same.
    reclaim : callable, optional
        Called with the missing counts by sub-pool when moving pages is not enough; frees what the engine can spare and says whether it did. Asked
        again while that is not enough and the pool finds something freed.
    detection : {"off", "warn", "strict"}
        Whether every call is followed by a check of everything, and whether what that finds is a warning or an error. Off costs nothing.
    signal : Signal, optional
        Given to every op.

    Attributes
    ----------
    chain : Chain
        The bands in byte order; `band` finds one by name.
    buffer : uint8 array or None
    moved_pages : int
        Pages that compaction and relief have moved so far.

    Notes
    -----
    All calls belong to one thread and one stream, which is also the current one of the arrays' library: a ``stream=`` names it to the ops, and
    copies between host and device go where the library sends them. `alloc`, `bind`, `free`, `free_segment`, `retire`, `available` and
    `schedulable` never wait for the device; `flush`, `compact`, `make_room` and an allocation with ``relieve=True`` that has to move pages do,
    once per band.

    On a device the host under-reports what was freed until a read-back has arrived (`refresh`), unless the caller vouches for the number of
    live pages (``live=``), which makes them free at once. A number that is too high is corrected by the next read-back.

    Examples
    --------
    >>> from gpukit.memory import Entry, Part, PoolLayout, SubPool
    >>> entry = Entry((Part("k", (1, 8), "bfloat16"), Part("v", (1, 8), "bfloat16")))
    >>> layout = PoolLayout(4096, [SubPool("swa", entry, "up", 4, owner="full"), SubPool("full", entry, "down", 4)])
    >>> pool = UnifiedPool(layout)
    >>> pool.available("full"), pool.available({"full": 1, "swa": 1})
    (31, 15)
    >>> pages = pool.alloc_joint({"full": 2, "swa": 1})["full"]
    >>> pages, pool.band("full").v2p[:4], pool.band("swa").v2p[:4]
    (array([1, 2]), array([ 0, 30, 31, -1]), array([ 0, -1,  1, -1]))
    >>> pool.free("full", pages)
    >>> pool.available({"full": 1, "swa": 1})
    15
    """

    def __init__(
        self,
        layout: PoolLayout,
        *,
        like: Any = None,
        buffer: Any = None,
        bytes: bool = True,
        reclaim: Reclaim | None = None,
        detection: str = "off",
        signal: Signal | None = None,
    ):
        if not isinstance(layout, PoolLayout):
            raise ArgumentTypeError(f"layout: expected a PoolLayout, got {type(layout).__name__}")
        if reclaim is not None and not callable(reclaim):
            raise ArgumentTypeError(f"reclaim: expected a callable or None, got {type(reclaim).__name__}")
        self.layout = layout
        self.like = buffer if like is None else like
        device = arrays.HOST
        if self.like is not None:
            device = max(arrays.describe(self.like, "buffer" if like is None else "like")[4], arrays.HOST)
        if buffer is not None:
            _check_buffer(buffer, layout.buffer_bytes, device)
        _check_signal(signal, device)
        epoch = Epoch()
        bands = [Band(layout, sub_pool.name, epoch, self.like) for sub_pool in layout.sub_pools]
        self.chain = Chain(bands, epoch, layout.buffer_bytes - layout.floor_bytes)
        if buffer is None and bytes:
            buffer = arrays.full(layout.buffer_bytes, 0, "uint8", self.like)
        self.buffer = buffer
        self.device = device
        self.reclaim = reclaim
        self.signal = signal
        self.moved_pages = 0
        self.group: FreeGroup | None = None
        self.detection = Detection(detection) if detection != "off" else None
        # Stands in for the follower that a sub-pool does not have: no id is a page of its tables.
        self._nobody = (*page_table.empty(1, like=self.like), DevicePages(1, like=self.like))

    def __repr__(self) -> str:
        return f"UnifiedPool({self.layout.buffer_bytes} bytes, {', '.join(repr(band) for band in self.chain.bands)})"

    def band(self, name: str) -> Band:
        """The state of one sub-pool."""
        return self.chain.band(name)

    def follower(self, name: str) -> Band | None:
        """The band that binds the ids which this one mints, if any."""
        other = self.layout.followers.get(name)
        return None if other is None else self.chain.band(other)

    def spaces(self) -> AddressSpaces:
        """The tables by which attention addresses the pool: ``full``, ``swa`` and ``state``, as far as there are such sub-pools."""
        names = self.chain.positions
        return AddressSpaces(
            self.band("full").v2p,
            swa=self.band("swa").v2p if "swa" in names else None,
            state=self.band("state").v2p if "state" in names else None,
        )

    # Capacity

    def available(self, wanted: Weights) -> int:
        """Pages that an allocation gets now, with no page moved and no waiting.

        Parameters
        ----------
        wanted : str or mapping of str to int
            A sub-pool, or how many pages of each make a unit of a joint allocation.

        Returns
        -------
        int
            Pages or units: `alloc` or `alloc_joint` succeeds with so many, and not with one more.

        Notes
        -----
        One snapshot of the chain, then arithmetic; remembered until a capacity field changes. Sub-pools that share bytes are not added up:
        each may have 4 pages where a pair of them is available 3 times.
        """
        return self.chain.available(wanted)

    def schedulable(self, wanted: Weights) -> int:
        """Pages that an allocation gets with ``relieve=True``: after a flush and after everything has moved that may.

        As `available`; it also collects pages whose event has fired. Bands whose gate is closed, or that hold pages in wait for an event, keep
        their span.
        """
        return self.chain.schedulable(wanted)

    def fits(self, counts: Mapping[str, int], *, relieve: bool = False) -> bool:
        """Whether `alloc_joint` of these counts would succeed; arithmetic only. Refuses what that refuses."""
        wanted = self.chain.counts(self.chain.joint(counts))
        return (pack if relieve else place)(self.chain.snapshot(), wanted) is not None

    def set_gate(self, name: str, gate: Callable[[], bool] | None) -> None:
        """Let a callable say whether the pages of a band may move now; None lets them always."""
        band = self.band(name)
        if gate is not None and not callable(gate):
            raise ArgumentTypeError(f"gate: expected a callable or None, got {type(gate).__name__}")
        band.gate = gate
        self.chain.gated = [band for band in self.chain.bands if band.gate is not None]

    def refresh(self, *, stream: Any = None) -> None:
        """Collect what has arrived of the device's counts, and pages whose event has fired. Never waits; call it once a round."""
        for band in self.chain.bands:
            band.refresh(stream)
            band.collect(stream)

    # Allocation

    def alloc(self, name: str, n: int, *, relieve: bool = False, stream: Any = None) -> Any:
        """Mint `n` virtual pages and bind them.

        Parameters
        ----------
        name : str
            A sub-pool that mints ids.
        n : int
            How many pages.
        relieve : bool
            Whether to make room if need be: flush neighbours, move FLOATs, compact ENDs, and at last ask `reclaim`. Waits for the device then.
        stream : stream, optional
            Where to launch; the current stream of the tables' library by default.

        Returns
        -------
        int64 array, shape (n,), or None
            The ids; None, with nothing changed, where there is no room.
        """
        self._owner(name)
        found = self.alloc_joint({name: whole(n, "n")}, relieve=relieve, stream=stream)
        return None if found is None else found[name]

    def alloc_joint(self, counts: Mapping[str, int], *, relieve: bool = False, stream: Any = None) -> dict[str, Any] | None:
        """Allocate in several sub-pools, all or nothing.

        Parameters
        ----------
        counts : mapping of str to int
            Pages by sub-pool. Of a sub-pool with an owner at most as many as of the owner, which is to be named too: it binds the last of the new
            ids.
        relieve, stream
            As in `alloc`.

        Returns
        -------
        dict of str to int64 array, or None
            The ids by sub-pool; None, with nothing changed, where there is no room.
        """
        counts = self.chain.joint(counts)
        takes = self._find(counts, relieve, stream)
        if takes is None:
            return None
        found: dict[str, Any] = {}
        for band, take in zip(self.chain.bands, takes, strict=True):
            if band.virtual is not None and band.name in counts:
                found[band.name] = band.virtual.take(counts[band.name], stream=stream)
                band.id_count = band.virtual.known
                self._bind(band, take, found[band.name], stream)
        for band, take in zip(self.chain.bands, takes, strict=True):
            if band.virtual is None and band.name in counts:
                ids = found[band.spec.owner]  # type: ignore[index]
                found[band.name] = ids[len(ids) - counts[band.name] :]
                self._bind(band, take, found[band.name], stream)
        self._check("alloc")
        return found

    def bind(self, name: str, ids: Any, *, relieve: bool = False, stream: Any = None) -> bool:
        """Bind ids that the owner has minted, and that are not bound here, in a sub-pool that mints none. False, with nothing changed, if full."""
        band = self.band(name)
        if band.virtual is not None:
            raise ArgumentError(f"name: expected a sub-pool with an owner, got {name}, which mints its own ids")
        _, count, _, _ = arrays.vector(ids, "ids", IDS, self.device)
        takes = self._find({name: count}, relieve, stream)
        if takes is None:
            return False
        self._bind(band, takes[self.chain.positions[name]], ids, stream)
        self._check("bind")
        return True

    def stock(self, name: str, n: int, *, stream: Any = None) -> bool:
        """Let a band's list hold at least `n` pages, for a `decode_step` to pop; False, with nothing changed, where they do not fit.

        Extends the span; `flush` takes back what lies at its edge.
        """
        band = self.band(name)
        missing = whole(n, "n") - band.hole_count
        if missing <= 0:
            return True
        # Holes are counted as taken first, so asking for n pages extends by what is missing.
        takes = place(self.chain.snapshot(), self.chain.counts({name: n}))
        if takes is None:
            return False
        take = takes[self.chain.positions[name]]
        fresh = _range_of(take.first, take.extra, band.like)
        band.holes.fill(fresh, stream=stream, signal=self.signal)
        band.low, band.high = take.span
        band.hole_count = band.holes.known
        band.dirty = True
        self._check("stock")
        return True

    def _find(self, counts: Mapping[str, int], relieve: bool, stream: Any) -> list[Take] | None:
        wanted = self.chain.counts(counts)
        takes = place(self.chain.snapshot(), wanted)
        if takes is not None or not relieve:
            return takes
        takes = relief.relieve(self, wanted, stream)
        if takes is None and self.chain.bands[0].holes.device >= 0:
            # What was freed on the device may not have been heard of yet.
            for band in self.chain.bands:
                band.settle(stream)
            takes = place(self.chain.snapshot(), wanted) or relief.relieve(self, wanted, stream)
        held = self._held()
        while takes is None and self.reclaim is not None and self.reclaim(dict(counts)):
            if self.device >= 0:
                for band in self.chain.bands:
                    band.settle(stream)
            takes = place(self.chain.snapshot(), wanted) or relief.relieve(self, wanted, stream)
            before, held = held, self._held()
            if held >= before:
                # Nothing was freed, whatever it says: asking again would go on for ever.
                break
        return takes

    def _held(self) -> int:
        """Falls whenever pages are freed, an event fires or a gate opens, and is never negative."""
        return sum(state.live + state.pending + (not state.movable) for state in self.chain.snapshot())

    def _bind(self, band: Band, take: Take, ids: Any, stream: Any) -> None:
        if take.holes:
            pages = band.holes.take(take.holes, stream=stream)
            page_table.bind(ids[: take.holes], _as_ids_of(pages, ids), band.v2p, band.p2v, stream=stream, signal=self.signal)
            band.hole_count = band.holes.known
        if take.extra:
            page_table.bind_range(ids[take.holes :], take.first, band.v2p, band.p2v, stream=stream, signal=self.signal)
            band.low, band.high = take.span

    # Frees

    def free(self, name: str, ids: Any, *, live: int | None = None, follower_live: int | None = None, stream: Any = None) -> None:
        """Free pages by id, in the sub-pool that minted the ids and in its follower: one launch, whatever their number.

        Parameters
        ----------
        name : str
            A sub-pool that mints ids.
        ids : int32 or int64 array, shape (n,)
            Ids that are no page, or not live, are skipped on the device; of equal ones one is freed.
        live, follower_live : int, optional
            How many of them are live there and in the follower, if the caller knows: these pages are free at once. On NumPy this is known anyway.
        stream : stream, optional
            Where to launch; the current stream of `ids`' library by default.

        Notes
        -----
        Inside a free group the ids are copied and freed when the group ends. A page that was retired before is ordinary in the follower.
        """
        self._owner(name)
        check_ids(ids, "ids", self.device)
        live, follower_live = _vouched(live, "live"), _vouched(follower_live, "follower_live")
        if self.group is not None:
            self.group.add(name, owned(ids), live, follower_live)
        else:
            self._free(name, ids, 0, 1, live, follower_live, stream)

    def free_segment(
        self, name: str, row_slice: Any, start: int, *, live: int | None = None, follower_live: int | None = None, stream: Any = None
    ) -> None:
        """Free the pages of the tokens ``start … start + n - 1`` of a request, given as a slice of its row of virtual token ids: one launch.

        `start` lies at a page boundary; the first token of a page speaks for it, and the last page may be partial. Otherwise as `free`.
        """
        band = self._owner(name)
        check_ids(row_slice, "row_slice", self.device)
        if whole(start, "start") % band.page_size:
            raise ArgumentError(f"start: expected a multiple of page_size {band.page_size}, got {start}")
        live, follower_live = _vouched(live, "live"), _vouched(follower_live, "follower_live")
        if self.group is None:
            self._free(name, row_slice, start, band.page_size, live, follower_live, stream)
            return
        self.group.add(name, by_page(row_slice, band.page_size), live, follower_live)

    def free_group(self) -> FreeGroup:
        """A context in which frees are collected and made at its end, in one launch per sub-pool and id dtype.

        Examples
        --------
        >>> from gpukit.memory import Entry, Part, full_and_state
        >>> pool = full_and_state(1 << 16, Entry((Part("k", (8,), "float32"),)), Entry((Part("state", (64,), "float32"),)), page_size=4)
        >>> pages = pool.alloc("full", 3)
        >>> with pool.free_group():
        ...     pool.free("full", pages[:1])
        ...     pool.free("full", pages[1:])
        ...     pool.band("full").live
        3
        >>> pool.band("full").live
        0
        """
        return FreeGroup(self)

    def retire(
        self,
        name: str,
        rows: Any,
        starts: Any,
        stops: Any,
        *,
        request_indices: Any = None,
        live: int | None = None,
        stream: Any = None,
    ) -> None:
        """Tombstone pages that left the window, in this sub-pool only: one launch for a batch. Arguments as in `sliding_window.retire`."""
        band, live = self.band(name), _vouched(live, "live")
        sliding_window.retire(
            *(rows, starts, stops, band.page_size, band.v2p, band.p2v, band.holes),
            request_indices=request_indices,
            stream=stream,
            signal=self.signal,
        )
        band.note(live, 0, stream)
        self._check("retire")

    def unbind(self, name: str, ids: Any, *, live: int | None = None, stream: Any = None) -> None:
        """Tombstone ids in a sub-pool that mints none: one launch. Their owner keeps them."""
        band = self.band(name)
        if band.virtual is not None:
            raise ArgumentError(f"name: expected a sub-pool with an owner, got {name}, which mints its own ids; free them")
        live = _vouched(live, "live")
        arrays.vector(ids, "ids", IDS, self.device)
        page_table.unbind_into(ids, band.v2p, band.p2v, band.holes, stream=stream, signal=self.signal)
        band.note(live, 0, stream)
        self._check("unbind")

    def _owner(self, name: str) -> Band:
        band = self.band(name)
        if band.virtual is None:
            raise ArgumentError(f"name: expected a sub-pool that mints ids, got {name}, whose ids are {band.spec.owner}'s")
        return band

    def _free(self, name: str, ids: Any, start: int, page_size: int, live: int | None, follower_live: int | None, stream: Any) -> None:
        band, other = self._owner(name), self.follower(name)
        assert band.virtual is not None
        other_tables = self._nobody if other is None else (other.v2p, other.p2v, other.holes)
        sliding_window.free_segment(
            *(ids, start, page_size, band.v2p, band.p2v, *other_tables[:2], band.virtual, band.holes, other_tables[2]),
            stream=stream,
            signal=self.signal,
        )
        band.note(live, live, stream)
        if other is not None:
            other.note(follower_live, None, stream)
        self._check("free")

    # Making room

    def flush(self, name: str, *, stream: Any = None) -> int:
        """Give up the holes at the edges of a band's span, so that its neighbours can have them. Moves nothing; waits, only when dirty.

        Returns the pages that were given up.
        """
        band = self.band(name)
        given = relief.flush(band, stream) if band.dirty or band.pending else 0
        self._check("flush")
        return given

    def compact(self, name: str, *, event: Any = None, stream: Any = None) -> int:
        """Move the live pages of a band together, bytes and tables, and give up the rest. Waits.

        Parameters
        ----------
        name : str
            The band. Its gate is not asked: the caller knows that its pages may move.
        event : event, optional
            Something that fires when no graph in flight reads the old places any more (torch, Numba, CuPy or cuda.core event). Until then the
            pages that were left are pending. None where nothing is in flight.
        stream : stream, optional
            Where to launch.

        Returns
        -------
        int
            Pages that moved.
        """
        band = self.band(name)
        if event is not None:
            require_event(event, "event")
        moved = relief.compact(self, band, event=event, stream=stream)
        self._check("compact")
        return moved

    def make_room(self, name: str, low_byte: int, high_byte: int, *, stream: Any = None) -> bool:
        """Ask a FLOAT to move into a byte range, a target for the whole band. False, with nothing moved, where it does not fit or may not move."""
        band = self.band(name)
        if band.kind in (UP, DOWN):
            raise ArgumentError(f"name: expected a FLOAT, got {name}, an END")
        made = relief.make_room(self, band, whole(low_byte, "low_byte"), whole(high_byte, "high_byte"), stream)
        self._check("make_room")
        return made

    # Bytes

    def view(self, name: str, part: str) -> Any:
        """One part of every slot, as a view of the buffer.

        Returns
        -------
        array, shape (layers, slots, *row shape)
            Slot 0 lies at byte 0 and the stride of slots is the entry's size; only a row is contiguous. Rows of token t of a paged sub-pool are
            slot t. Dtypes that the library lacks are seen as uint16 or uint8.

        Notes
        -----
        Slots are physical, and so are those of a `gpukit.kernels.state_pool.StatePool` over the views of a sub-pool of states: its slots are
        physical pages, looked up by id in the sub-pool's ``v2p``. A move (`compact`, `make_room`, ``relieve=True``) changes them and keeps the
        ids, so slots are looked up anew after each.

        Examples
        --------
        >>> from gpukit.kernels.state_pool import StatePool
        >>> from gpukit.memory import Entry, Part, full_and_state
        >>> state = Entry((Part("rec", (2, 64, 64), "float32", layers=3), Part("conv", (3, 384), "bfloat16", layers=3)))
        >>> pool = full_and_state(1 << 20, Entry((Part("k", (8,), "float32"),)), state, page_size=4)
        >>> states = StatePool(pool.view("state", "rec"), pool.view("state", "conv"))
        >>> ids = pool.alloc("state", 3)
        >>> slots = pool.band("state").v2p[ids]
        >>> ids, slots
        (array([1, 2, 3]), array([1, 2, 3]))
        >>> states.rec[:, slots[2]] = 7

        Another request ends, and the last page moves into its place:

        >>> pool.free("state", ids[:1])
        >>> pool.compact("state")
        1
        >>> slots = pool.band("state").v2p[ids[1:]]
        >>> slots, bool((states.rec[:, slots[1]] == 7).all())
        (array([2, 1]), True)
        """
        sub_pool = self.band(name).spec
        found, offset = sub_pool.entry.part(part)
        slots = self.layout.num_physical(name) * sub_pool.page_size
        row = arrays.contiguous_strides(found.shape)
        size = arrays.ITEMSIZE[found.dtype]
        strides = (found.row_stride, sub_pool.entry.bytes, *(stride * size for stride in row))
        return byte_view(self._bytes(), offset, (found.layers, slots, *found.shape), strides, found.dtype)

    def clear(self, name: str, ids: Any, *, draft_only: bool = False, stream: Any = None) -> None:
        """Zero the bytes of pages, or only those of their draft parts; the host model's parts beside them stay untouched.

        `ids` are virtual pages; those with no page are skipped. Two launches, and one more per four parts.
        """
        band = self.band(name)
        # A page of page_size 1 is its own only token, so this reads the table itself; the sink comes out for what has no page.
        pages = page_table.translate(ids, band.v2p, 1, stream=stream)
        if not draft_only:
            page_copy.zero_pages(self._bytes(), band.page_bytes, pages, stream=stream, signal=self.signal)
            return
        entry, count = band.spec.entry, band.num_physical
        views = [
            byte_view(self._bytes(), offset, (band.page_size, count, part.bytes), (entry.bytes, band.page_bytes, 1), "uint8")
            for part, offset in zip(entry.parts, entry.offsets, strict=True)
            if part.draft
        ]
        for begin in range(0, len(views), 4):
            state_slots.clear_slots(views[begin : begin + 4], pages, stream=stream)

    def _bytes(self) -> Any:
        if self.buffer is None:
            raise ArgumentError("pool: expected one with bytes, got one made with bytes=False")
        return self.buffer

    # Looking at it

    def describe(self) -> str:
        """The bands as text: spans, live pages, holes, pending pages, and what is available."""
        from gpukit.memory.picture import describe

        return describe(self)

    def picture(self, path: Any) -> None:
        """Draw the buffer's bands, holes and pending pages into a file. Waits for the device; needs matplotlib."""
        from gpukit.memory.picture import picture

        picture(self, path)

    def check(self) -> list[str]:
        """Everything that is wrong with the pool, empty where nothing is. Waits for the device."""
        from gpukit.memory.invariants import findings

        return findings(self)

    def _check(self, where: str) -> None:
        if self.detection is not None:
            self.detection.check(self, where)


def _check_buffer(buffer: Any, least: int, device: int) -> None:
    """Refuse a buffer by name, before anything is made for it."""
    address, length, _, _ = arrays.output(buffer, "buffer", ("uint8",), device)
    if length < least:
        raise ArgumentError(f"buffer: expected at least {least} bytes, got {length}")
    if address % PART_ALIGNMENT:
        raise ArgumentError(f"buffer: expected an address that is a multiple of {PART_ALIGNMENT}, got {address:#x}")


def _check_signal(signal: Any, device: int) -> None:
    """Refuse a signal that the pool's ops would refuse, when ids have been taken."""
    if signal is None:
        return
    if not isinstance(signal, Signal):
        raise ArgumentTypeError(f"signal: expected a gpukit.Signal or None, got {type(signal).__name__}")
    where = arrays.HOST if signal.device is None else signal.device
    if where != device:
        raise ArgumentError(f"signal: expected one of {arrays.place(device)}, as the pool's tables are, got one of {arrays.place(where)}")


def _vouched(count: Any, name: str) -> int | None:
    """A number of live pages, if the caller gives one."""
    return None if count is None else whole(count, name)


def _as_ids_of(pages: Any, ids: Any) -> Any:
    """int64 pages in the dtype of the ids that they are bound to."""
    dtype = arrays.describe(ids)[1]
    return pages if dtype == "int64" else pages.astype(dtype) if hasattr(pages, "astype") else pages.to(ids.dtype)


def _range_of(first: int, count: int, like: Any) -> Any:
    """The pages ``first … first + count - 1`` where the tables are."""
    return to_device(np.arange(first, first + count, dtype=np.int64), like)
