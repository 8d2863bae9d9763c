"""A unified pool beside a dictionary model: random operations on both, compared after each. The state machines and the traces drive it.

The model knows which ids are live, in which sub-pools, and a tag that was written into every page's bytes. It places nothing: where pages lie is the
pool's business, that they stay whole and apart is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from gpukit.memory import Entry, Part, PoolLayout, SubPool, UnifiedPool


class Event:
    """Fires when told to."""

    def __init__(self) -> None:
        self.fired = False

    def query(self) -> bool:
        return self.fired


def entry(width: int) -> Entry:
    """An entry of some multiples of 16 bytes."""
    return Entry((Part("rows", (width * 4,), "float32"),))


def layout(bands: int, page_size: int, pages: int = 40) -> PoolLayout:
    """Two or three bands with page sizes in bytes that are no multiples of each other; about `pages` of the largest fit."""
    full, swa, state = entry(6), entry(4), entry(10 * page_size)
    size = pages * page_size * 6 * 16
    if bands == 2:
        return PoolLayout(size, [SubPool("swa", swa, "up", page_size, owner="full"), SubPool("full", full, "down", page_size)])
    sub_pools = [SubPool("state", state, "up"), SubPool("swa", swa, "float", page_size, owner="full"), SubPool("full", full, "down", page_size)]
    return PoolLayout(size, sub_pools)


class Request:
    """A request of the model: its ids in order, and how many of them have left the window."""

    def __init__(self, ids: list[int], retired: int, state: int | None):
        self.ids = ids
        self.retired = retired
        self.state = state


class PoolMachine:
    """Operations on a pool and on its model. Each checks what it can see; `check` looks at everything."""

    def __init__(self, bands: int, page_size: int, pages: int = 40, like: Any = None, to_device: Callable[[np.ndarray], Any] = np.asarray):
        self.pool = UnifiedPool(layout(bands, page_size, pages), like=like)
        self.page_size = page_size
        self.to_device = to_device
        self.on_device = like is not None
        self.bands = {band.name: band for band in self.pool.chain.bands}
        self.has_state = "state" in self.bands
        self.live: dict[str, dict[int, int]] = {name: {} for name in self.bands}
        self.requests: list[Request] = []
        self.gates = dict.fromkeys(self.bands, True)
        self.events: list[Event] = []
        self.tags = 0
        self.operations = 0
        for name in self.bands:
            self.pool.set_gate(name, lambda name=name: self.gates[name])

    # What happens

    def start(self, pages: int, in_window: int, state: bool, relieve: bool = False) -> bool:
        """A request with some pages, of which the last ones are in the window."""
        counts = {"full": pages, "swa": min(in_window, pages)}
        if self.has_state and state:
            counts["state"] = 1
        expected = self._fits(counts, relieve)
        before = None if expected else self.snapshot()
        found = self.pool.alloc_joint(counts, relieve=relieve)
        assert (found is not None) == expected
        if found is None:
            self._unchanged(before)
            return False
        ids = {name: self.host(array).tolist() for name, array in found.items()}
        for name, minted in ids.items():
            self._born(name, minted)
        self.requests.append(Request(ids["full"], pages - counts["swa"], ids["state"][0] if "state" in ids else None))
        return True

    def decode(self, position: int, pages: int, relieve: bool = False) -> None:
        """A request grows by some pages."""
        request = self._request(position)
        if request is None:
            return
        counts = {"full": pages, "swa": pages}
        expected = self._fits(counts, relieve)
        found = self.pool.alloc_joint(counts, relieve=relieve)
        assert (found is not None) == expected
        if found is not None:
            ids = self.host(found["full"]).tolist()
            self._born("full", ids)
            self._born("swa", ids)
            request.ids += ids

    def retire(self, position: int, pages: int) -> None:
        """The first pages of a request leave the window; a second time nothing happens."""
        request = self._request(position)
        if request is None:
            return
        stop = min(request.retired + pages, len(request.ids))
        row = self._row(request)
        for _ in range(2):
            self.pool.retire("swa", row[None, :], [0], [stop * self.page_size])
        for page in request.ids[request.retired : stop]:
            del self.live["swa"][page]
        request.retired = max(request.retired, stop)

    def rebind(self, position: int) -> None:
        """A request's last retired page comes back into the window."""
        request = self._request(position)
        if request is None or not request.retired:
            return
        page = request.ids[request.retired - 1]
        expected = self.pool.available("swa") >= 1
        assert self.pool.bind("swa", self.to_device(np.array([page]))) == expected
        if expected:
            request.retired -= 1
            self._born("swa", [page])

    def free(self, position: int, how: str, keep: int = 0) -> None:
        """A request ends or is cut short: by ids, by a row slice, or in a group whose row is overwritten before it ends."""
        request = self._request(position)
        if request is None:
            return
        keep = min(keep, len(request.ids))
        gone = request.ids[keep:]
        self._verify("full", gone)
        self._verify("swa", [page for page in gone if page in self.live["swa"]])
        if how == "ids":
            self.pool.free("full", self.to_device(np.array(gone, np.int64)))
        elif how == "segment":
            row = self._row(request)[keep * self.page_size :]
            self.pool.free_segment("full", row[: len(row) - self.page_size // 2] if len(gone) else row, keep * self.page_size)
        else:
            row = np.array(gone, np.int64)
            with self.pool.free_group():
                for part in (row[:1], row[1:]):
                    part = self.to_device(part)
                    self.pool.free("full", part)
                    part[:] = 1
        for page in gone:
            del self.live["full"][page]
            self.live["swa"].pop(page, None)
        del request.ids[keep:]
        request.retired = min(request.retired, keep)
        if keep == 0:
            if request.state is not None:
                self._verify("state", [request.state])
                self.pool.free("state", self.to_device(np.array([request.state])))
                del self.live["state"][request.state]
            self.requests.remove(request)

    def free_again(self, position: int) -> None:
        """Ids that are no page, free ids and twice the same: only live ones are freed, once."""
        dead = [page for page in range(1, self.bands["full"].num_virtual) if page not in self.live["full"]][: 1 + position % 4]
        self.pool.free("full", self.to_device(np.array([-1, 0, *dead, *dead, self.bands["full"].num_virtual, 2**40])))

    def compact(self, position: int, with_event: bool) -> None:
        """Live pages of a band move together."""
        band = self._band(position)
        event = None
        if with_event:
            # Two batches may share an event.
            event = self.events[-1] if self.events and position % 2 else Event()
            if not any(event is other for other in self.events):
                self.events.append(event)
        self.pool.compact(band.name, event=event)

    def flush(self, position: int) -> None:
        """Holes at the edges are given up."""
        self.pool.flush(self._band(position).name)

    def make_room(self, low: int, high: int) -> None:
        """The FLOAT is asked to lie in a part of the buffer."""
        if self.has_state:
            size = self.pool.layout.buffer_bytes
            low, high = sorted((low * size // 100, high * size // 100))
            band = self.bands["swa"]
            if self.pool.make_room("swa", low, high):
                assert band.low == band.high or (low <= band.low * band.page_bytes and band.high * band.page_bytes <= high)

    def fire(self, position: int) -> None:
        """An event fires."""
        if self.events:
            self.events.pop(position % len(self.events)).fired = True
            if position % 3:
                self.pool.refresh()

    def flip(self, position: int) -> None:
        """A gate opens or closes."""
        name = self._band(position).name
        self.gates[name] = not self.gates[name]

    def stock(self, position: int, pages: int) -> None:
        """A band's list is filled up for a decode step."""
        self.pool.stock(self._band(position).name, pages)

    def exhaust(self, position: int, relieve: bool) -> None:
        """Exactly what is said to be there is there: one more fails and changes nothing, so many succeed."""
        wanted = [{"full": 1}, {"full": 1, "swa": 1}, {"full": 2, "swa": 1}]
        if self.has_state:
            wanted += [{"state": 1}, {"full": 3, "swa": 2, "state": 1}]
        units = wanted[position % len(wanted)]
        query: Any = next(iter(units)) if len(units) == 1 and position % 2 else units
        most = self.pool.schedulable(query) if relieve else self.pool.available(query)
        before = self.snapshot()
        assert self.pool.alloc_joint({name: (most + 1) * unit for name, unit in units.items()}, relieve=relieve) is None
        self._unchanged(before)
        found = self.pool.alloc_joint({name: most * unit for name, unit in units.items()}, relieve=relieve)
        assert found is not None, f"{query}: {most} were promised"
        self.everything_whole()
        for name in units:
            if self.bands[name].virtual is not None:
                self.pool.free(name, found[name])

    # What must hold

    def quick_check(self) -> None:
        """Counts, after every operation."""
        for name, band in self.bands.items():
            assert band.live == len(self.live[name]), f"{name}: {band!r}, the model has {len(self.live[name])} live"

    def check(self) -> None:
        """Everything: the pool against itself, against the model, and its bytes."""
        assert self.pool.check() == []
        for name, band in self.bands.items():
            v2p = self.host(band.v2p)
            assert (np.flatnonzero(v2p[1:-1] > 0) + 1).tolist() == sorted(self.live[name])
        self.everything_whole()
        self._check_available()

    def everything_whole(self) -> None:
        """Every live page still holds its tag."""
        for name in self.bands:
            self._verify(name, list(self.live[name]))

    def _check_available(self) -> None:
        """What END bands can have, worked out from the tables alone."""
        occupied = []
        for name, band in self.bands.items():
            pages = np.flatnonzero(self.host(band.p2v)[1:-1] != -1) + 1
            pages = np.concatenate([pages, band.pending_pages(), self._holes(band)])
            occupied += [(int(page) * band.page_bytes, (int(page) + 1) * band.page_bytes, name) for page in pages]
        top, bottom = self.bands["full"], self.bands["swa" if len(self.bands) == 2 else "state"]
        ends = {
            top.name: (min([low for low, _, name in occupied if name == top.name], default=top.num_physical * top.page_bytes)
            - max([high for _, high, name in occupied if name != top.name], default=self.pool.layout.floor_bytes)) // top.page_bytes,
        }  # fmt: skip
        floor = max([high for _, high, name in occupied if name == bottom.name], default=bottom.first * bottom.page_bytes)
        ceiling = min([low for low, _, name in occupied if name != bottom.name], default=top.num_physical * top.page_bytes)
        ends[bottom.name] = (ceiling - floor) // bottom.page_bytes
        for name, gap in ends.items():
            band = self.bands[name]
            # The grids of two page sizes leave up to a page between them; what was empty starts at the first page above the floor.
            most = len(self._holes(band)) + max(gap, 0)
            assert most - 1 <= self.pool.available(name) <= most or self.pool.available(name) == band.id_count < most, (name, most)

    def snapshot(self) -> dict[str, Any]:
        """Everything that an operation without room must leave as it is."""
        found: dict[str, Any] = {"states": [band.state() for band in self.pool.chain.bands]}
        for name, band in self.bands.items():
            found |= {f"{name}.v2p": self.host(band.v2p).copy(), f"{name}.p2v": self.host(band.p2v).copy()}
            found[f"{name}.holes"] = self._holes(band)
        return found

    def step(self, kind: int, a: int, b: int, c: int) -> None:
        """One operation out of all, by numbers: what a random driver calls."""
        flag = c % 2 == 1
        operations: list[Callable[[], Any]] = [
            lambda: self.start(a % 7, b % 7, flag, relieve=c % 4 > 1),
            lambda: self.start(a % 4, b % 4, flag, relieve=c % 4 > 1),
            lambda: self.decode(a, b % 3, relieve=flag),
            lambda: self.decode(a, 1),
            lambda: self.retire(a, b % 5),
            lambda: self.retire(a, 1),
            lambda: self.rebind(a),
            lambda: self.free(a, ("ids", "segment", "group")[b % 3]),
            lambda: self.free(a, ("ids", "segment", "group")[b % 3], keep=c % 5),
            lambda: self.free_again(a),
            lambda: self.compact(a, flag),
            lambda: self.flush(a),
            lambda: self.make_room(a % 101, b % 101),
            lambda: self.fire(a),
            lambda: self.flip(a),
            lambda: self.stock(a, b % 6),
            lambda: self.exhaust(a, relieve=flag),
        ]
        operations[kind % len(operations)]()
        self.operations += 1
        if self.on_device:
            # What the host knows of a device depends on when it hears of it; NumPy is heard of at once.
            for band in self.bands.values():
                band.settle(None)
        self.quick_check()

    def burst(self, seed: int, count: int) -> None:
        """So many operations from a seed, and a check of everything."""
        random = Random(seed)
        for number in range(count):
            self.step(*(random.randrange(1 << 16) for _ in range(4)))
            if number % 32 == 31:
                self.check()
        self.check()

    # Helpers

    @staticmethod
    def host(array: Any) -> np.ndarray:
        from gpukit.memory._arrays import to_host

        return array if isinstance(array, np.ndarray) else to_host(array)

    def _fits(self, counts: dict[str, int], relieve: bool) -> bool:
        from gpukit.memory.geometry import pack, place

        chain = self.pool.chain
        if relieve:
            # Collects what has fired, as the allocation will.
            self.pool.schedulable("full")
        states, wanted = [band.state() for band in chain.bands], chain.counts(counts)
        return (pack if relieve else place)(states, wanted) is not None

    def _holes(self, band: Any) -> np.ndarray:
        ring, (head, tail) = self.host(band.holes.ring), self.host(band.holes.counters).tolist()
        return np.asarray(ring[np.arange(head, tail) % len(ring)])

    def _unchanged(self, before: Any) -> None:
        after = self.snapshot()
        assert before["states"] == after.pop("states")
        for name, array in after.items():
            np.testing.assert_array_equal(before[name], array, err_msg=name)

    def _request(self, position: int) -> Request | None:
        return self.requests[position % len(self.requests)] if self.requests else None

    def _band(self, position: int) -> Any:
        return list(self.bands.values())[position % len(self.bands)]

    def _row(self, request: Request) -> Any:
        """The request's row of token ids."""
        tokens = np.array(request.ids, np.int64)[:, None] * self.page_size + np.arange(self.page_size)
        return self.to_device(tokens.reshape(-1))

    def _tag_rows(self, name: str, ids: list[int]) -> tuple[Any, Any]:
        """The bytes of all pages, and where these ids are."""
        band = self.bands[name]
        pages = self.pool.buffer[: band.num_physical * band.page_bytes].reshape(-1, band.page_bytes)
        return pages, self.host(band.v2p)[ids]

    def _born(self, name: str, ids: list[int]) -> None:
        """New pages: note them, and write a tag of their own at both ends of each."""
        if not ids:
            return
        for page in ids:
            assert page not in self.live[name], f"{name}: id {page} was handed out twice"
        tags = np.arange(self.tags, self.tags + len(ids))
        self.tags += len(ids)
        self.live[name].update(zip(ids, tags.tolist(), strict=True))
        pages, physical = self._tag_rows(name, ids)
        assert (physical > 0).all()
        at, values = self.to_device(physical), self.to_device(tags[:, None].view(np.uint8))
        pages[at, :8] = values
        pages[at, -8:] = values

    def _verify(self, name: str, ids: list[int]) -> None:
        if ids:
            pages, physical = self._tag_rows(name, ids)
            tags, at = np.array([self.live[name][page] for page in ids])[:, None].view(np.uint8), self.to_device(physical)
            assert (self.host(pages[at, :8]) == tags).all() and (self.host(pages[at, -8:]) == tags).all(), name
