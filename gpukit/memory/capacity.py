"""How many pages could be allocated: queries over one snapshot of the chain, remembered until something that they depend on changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.kernels._plans import positive, whole
from gpukit.memory.bands import Band, Epoch
from gpukit.memory.geometry import BandState, bound, largest, pack, place

__all__ = ["Chain", "Weights"]

Weights = str | Mapping[str, int]

# Equal to no question.
_NOTHING = object()


class _Answers:
    """What is known of one kind of query, and the last question apart: to tell that it is asked again takes less than to look it up."""

    def __init__(self, work_out: Callable[[Weights], int]):
        self._work_out = work_out
        self.forget()

    def forget(self) -> None:
        self._known: dict[object, int] = {}
        self._last: tuple[object, object, int] = (_NOTHING, (), 0)

    def to(self, wanted: Weights, gates: tuple[bool, ...] = ()) -> int:
        last, last_gates, answer = self._last
        try:
            if wanted == last and gates == last_gates:
                return answer
        except ValueError:
            # A weight that is none, as working it out will say.
            pass
        key = (gates, _key(wanted))
        try:
            answer = self._known[key]
        except (KeyError, TypeError):
            answer = self._known[key] = self._work_out(wanted)
        self._last = (wanted if isinstance(wanted, str) else dict(wanted), gates, answer)
        return answer


class Chain:
    """The bands of a pool in byte order, and the capacity queries over them.

    Attributes
    ----------
    bands : tuple of Band
    epoch : Epoch
        Changes whenever a capacity field of a band is bound anew.
    snapshots : int
        How often the bands' numbers were read: once per query that was not remembered.
    """

    def __init__(self, bands: Sequence[Band], epoch: Epoch, usable_bytes: int):
        self.bands = tuple(bands)
        self.positions = {band.name: position for position, band in enumerate(self.bands)}
        self.epoch = epoch
        self.usable_bytes = usable_bytes
        self.snapshots = 0
        # Bands that have a gate.
        self.gated: list[Band] = []
        # Answers until the epoch changes, and bands that hold pages in wait for an event.
        self._available = _Answers(lambda wanted: self._most(wanted, moves=False))
        self._schedulable = _Answers(lambda wanted: self._most(wanted, moves=True))
        self._waiting: list[Band] = []
        self._known_at = -1

    def snapshot(self) -> list[BandState]:
        """The numbers of all bands, read once."""
        self.snapshots += 1
        return [band.state() for band in self.bands]

    def band(self, name: str) -> Band:
        """The band of that name."""
        try:
            return self.bands[self.positions[name]]
        except (KeyError, TypeError):
            raise ArgumentError(f"name: expected one of {', '.join(self.positions)}, got {name!r}") from None

    def joint(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Counts of a joint allocation, after a check of each: sub-pools that bind others' ids have at most as many as their owner."""
        if not isinstance(counts, Mapping):
            raise ArgumentTypeError(f"counts: expected a mapping of sub-pools to pages, got {type(counts).__name__}")
        checked = {name: whole(count, f"counts[{name!r}]") for name, count in counts.items()}
        for name, count in checked.items():
            owner = self.band(name).spec.owner
            if owner is not None and owner not in checked:
                raise ArgumentError(f"counts[{name!r}]: expected a count of {owner}, whose new ids it binds, beside it, got none")
            if owner is not None and count > checked[owner]:
                raise ArgumentError(f"counts[{name!r}]: expected at most the {checked[owner]} new ids of {owner}, got {count}")
        return checked

    def counts(self, wanted: Mapping[str, int]) -> list[int]:
        """Counts by name as counts by band."""
        counts = [0] * len(self.bands)
        for name, count in wanted.items():
            self.band(name)
            counts[self.positions[name]] = count
        return counts

    def available(self, wanted: Weights) -> int:
        """See `UnifiedPool.available`."""
        if self.epoch.value != self._known_at:
            self._forget()
        return self._available.to(wanted)

    def schedulable(self, wanted: Weights) -> int:
        """See `UnifiedPool.schedulable`."""
        if self.epoch.value != self._known_at:
            self._forget()
        if self._waiting:
            for band in self._waiting:
                band.collect(None)
            if self.epoch.value != self._known_at:
                self._forget()
        # A gate may flip without any field being bound, so what the gates say is part of the question.
        gates = tuple([band.gate() for band in self.gated]) if self.gated else ()  # type: ignore[misc]
        return self._schedulable.to(wanted, gates)

    def _forget(self) -> None:
        self._available.forget()
        self._schedulable.forget()
        # Pages begin to wait, and cease to, only together with a capacity field.
        self._waiting = [band for band in self.bands if band.pending]
        self._known_at = self.epoch.value

    def _most(self, wanted: Weights, *, moves: bool) -> int:
        weights = {wanted: 1} if isinstance(wanted, str) else {name: positive(weight, f"wanted[{name!r}]") for name, weight in wanted.items()}
        if not weights:
            raise ArgumentError("wanted: expected at least one sub-pool, got none")
        units = self.counts(weights)
        bands = self.snapshot()
        most = min(band.ids // unit for band, unit in zip(bands, units, strict=True) if unit)
        if not moves:
            return largest(lambda n: place(bands, [n * unit for unit in units]) is not None, min(most, bound(bands, units)))
        # Every byte is in use once: no more than this can fit, wherever it goes.
        room = self.usable_bytes - sum((band.live + band.pending) * band.page_bytes for band in bands)
        most = min(most, room // sum(unit * band.page_bytes for band, unit in zip(bands, units, strict=True)))
        return largest(lambda n: pack(bands, [n * unit for unit in units]) is not None, most)


def _key(wanted: Weights) -> object:
    """What a query is remembered by. A mapping is no key; its items are."""
    if isinstance(wanted, str):
        return wanted
    if not isinstance(wanted, Mapping):
        raise ArgumentTypeError(f"wanted: expected a sub-pool or a mapping of sub-pools to pages, got {type(wanted).__name__}")
    return tuple(wanted.items())
