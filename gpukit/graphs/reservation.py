"""The one owner of the persisting L2 limit: counted requests per device, the limit in force before them restored after the last.

The limit is state of the whole device. It outlives every graph, and while it is up everything else on the device has that much less L2; so it is
never set without a request on record here. One lock guards one table per device; nothing is touched until somebody asks.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gpukit import checks
from gpukit.errors import ArgumentError, ArgumentTypeError, DeviceError
from gpukit.graphs.driver import CudaLimits, LimitDriver

__all__ = ["Limits", "Reservation", "break_even_us"]


@dataclass
class _Table:
    """One device's requests: bytes by key, and which of them are suspended."""

    requests: dict[int, int] = field(default_factory=dict)
    suspended: set[int] = field(default_factory=set)
    baseline: int | None = None
    # What the driver was last told, and what it said then; None while nothing of ours is in force.
    told: int | None = None
    granted: int | None = None

    def target(self) -> int | None:
        """The limit that the requests ask for: the largest live one, else what was there before."""
        return max((size for key, size in self.requests.items() if key not in self.suspended), default=self.baseline)


class Limits:
    """The tables of all devices of one driver. What differs from what was asked comes back as text, for the caller to report outside the lock.

    Parameters
    ----------
    driver : LimitDriver, optional
        What reads and writes limits; the real driver by default.
    """

    def __init__(self, driver: LimitDriver | None = None):
        self._driver: LimitDriver = CudaLimits() if driver is None else driver
        self._lock = threading.Lock()
        self._tables: dict[int, _Table] = {}
        self._keys = itertools.count(1)
        # Handles that were collected while the lock was held, perhaps by the very thread that the collection interrupted.
        self._collected: deque[tuple[int, int]] = deque()

    def new_key(self) -> int:
        """A name for a handle."""
        return next(self._keys)

    def requests(self, device: int) -> tuple[int, ...]:
        """Bytes of every request on record, ascending."""
        with self._locked():
            return tuple(sorted(self._tables[device].requests.values())) if device in self._tables else ()

    def request(self, device: int, key: int, size: int) -> tuple[int | None, str]:
        """Put a request on record in the place of the key's old one, after the driver took it; the limit that it granted."""
        with self._locked():
            table = self._tables.setdefault(device, _Table())
            old, recorded = table.requests.get(key), table.baseline is None
            try:
                if recorded:
                    with self._driver.switch(device):
                        table.baseline = self._driver.read()
                # The new size counts before the old one goes, so the limit never drops in between.
                table.requests[key] = size
                note = self._apply(device, table)
            except BaseException:
                table.requests.pop(key, None)
                if old is not None:
                    table.requests[key] = old
                # Only the request that recorded the baseline may take it back; one kept after a failed restore stays.
                if recorded:
                    table.baseline = None
                raise
            return table.granted, note

    def release(self, device: int, key: int) -> str:
        """Take a request off the record and put the limit where the others want it, or back to the baseline."""
        with self._locked():
            return self._release(device, key)

    def suspend(self, device: int, key: int) -> str:
        """Leave a request out of account; if the driver refuses, it stays in."""
        with self._locked():
            table = self._tables.get(device)
            if table is None or key not in table.requests:
                return ""
            table.suspended.add(key)
            try:
                return self._apply(device, table)
            except BaseException:
                table.suspended.discard(key)
                raise

    def resume(self, device: int, key: int) -> str:
        """Take a request into account again."""
        with self._locked():
            table = self._tables.get(device)
            if table is None or key not in table.suspended:
                return ""
            table.suspended.discard(key)
            return self._apply(device, table)

    def collect(self, device: int, key: int) -> None:
        """Release on behalf of a handle that nobody holds any more; never waits, never raises."""
        self._collected.append((device, key))
        self._drain()

    def restore_all(self) -> None:
        """Drop every request and restore every baseline, those kept after a failed restore too: what happens at exit."""
        with self._locked():
            for device, table in self._tables.items():
                table.requests.clear()
                try:
                    _complain(self._settle(device, table))
                except Exception as error:
                    _complain(str(error))

    def forget(self) -> None:
        """Drop the record without touching a device: a forked child owns nothing."""
        self._lock = threading.Lock()
        self._tables.clear()
        self._collected.clear()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            self._drain()

    def _drain(self) -> None:
        # Whoever holds the lock looks again after letting go of it, so nothing is left behind.
        while self._collected and self._lock.acquire(blocking=False):
            try:
                while self._collected:
                    try:
                        _complain(self._release(*self._collected.popleft()))
                    except Exception as error:
                        _complain(str(error))
            finally:
                self._lock.release()

    def _release(self, device: int, key: int) -> str:
        table = self._tables.get(device)
        if table is None:
            return ""
        table.requests.pop(key, None)
        return self._settle(device, table)

    def _settle(self, device: int, table: _Table) -> str:
        """Put the limit where what is left on record wants it, and forget the baseline once it is restored."""
        table.suspended &= table.requests.keys()
        if table.baseline is None:
            return ""
        note = self._apply(device, table)
        if not table.requests:
            table.baseline = table.told = table.granted = None
        return note

    def _apply(self, device: int, table: _Table) -> str:
        """Tell the driver the target, if it was last told something else, and read back what it made of it."""
        target = table.target()
        assert target is not None
        if target == table.told:
            return ""
        with self._driver.switch(device):
            self._driver.write(target)
            table.told, table.granted = target, None
            try:
                table.granted = self._driver.read()
            except DeviceError as error:
                return f"the persisting L2 limit of device {device} was set to {target} bytes, but could not be read back: {error}"
        return "" if table.granted == target else f"device {device} was asked for {target} bytes of persisting L2 and granted {table.granted}"


def _complain(text: str) -> None:
    """What nobody can be told, because nobody called, is said."""
    if text:
        print(f"gpukit: a reservation was not given back as it should: {text}", file=sys.stderr, flush=True)


def _report(note: str) -> None:
    if note:
        warnings.warn(f"gpukit: {note}", RuntimeWarning, stacklevel=3)


_LIMITS = Limits()
os.register_at_fork(after_in_child=_LIMITS.forget)
atexit.register(_LIMITS.restore_all)


class Reservation:
    """A request for L2 memory that persisting lines may fill, counted with all others of its device.

    The device's limit is the largest request alive, above the driver's default or below it; when the last is gone, it is what it was before the
    first. Held by whoever needs it for as long: it must outlive every graph that relies on it (`Graph.keep`).

    Parameters
    ----------
    size : int, optional
        Bytes to request at once; None makes a handle without a request.
    device : int
        Ordinal.
    limits : Limits, optional
        Whose record to be on; the process's by default.

    Raises
    ------
    ArgumentError
        The size is not at least 1, or an argument has a type that it cannot have.
    DeviceError
        The driver refused: more than the device has, or a failed switch to it. Nothing has changed.

    Notes
    -----
    Handles may be used from several threads, and are released when they are collected, and at exit. A grant that differs from what was asked
    is reported as a RuntimeWarning and as `granted`. Calls do not wait for the device and cost two driver calls where the limit changes.

    Examples
    --------
    >>> from contextlib import nullcontext
    >>> class Driver:
    ...     limit = 11_796_480
    ...     switch = staticmethod(lambda device: nullcontext())
    ...     def read(self): return self.limit
    ...     def write(self, size): self.limit = size
    >>> driver = Driver()
    >>> with Reservation(25_165_824, limits=Limits(driver)) as reservation:
    ...     inside = driver.limit
    ...     with reservation.suspended():
    ...         meanwhile = driver.limit
    >>> inside, meanwhile, driver.limit
    (25165824, 11796480, 11796480)
    """

    def __init__(self, size: int | None = None, device: int = 0, *, limits: Limits | None = None):
        if limits is not None and not isinstance(limits, Limits):
            raise ArgumentTypeError(f"limits: expected a Limits or None, got {type(limits).__name__}")
        device = checks.whole(device, "device")
        self.device = device
        self._limits = _LIMITS if limits is None else limits
        self._key = self._limits.new_key()
        self._state = threading.Lock()
        self._closed = ""
        self._suspensions = 0
        self._size: int | None = None
        self._granted: int | None = None
        # Runs when the handle is collected, and at exit for those that live then.
        self._finalizer = weakref.finalize(self, self._limits.collect, device, self._key)
        if size is not None:
            self.request(size)

    def __repr__(self) -> str:
        state = self._closed or ("empty" if self._size is None else f"{self._size} bytes")
        return f"Reservation(device {self.device}, {state})"

    @property
    def size(self) -> int | None:
        """Bytes requested, None without a request."""
        return self._size

    @property
    def granted(self) -> int | None:
        """The device's limit as read back at this handle's last request; None without one, or where it could not be read."""
        return self._granted

    def request(self, size: int) -> None:
        """Request so many bytes, in the place of this handle's earlier request, which stays in force if the driver refuses.

        Raises
        ------
        ArgumentError
            The size is not at least 1 (it is no way to release), or the handle is closed or suspended.
        DeviceError
            The driver refused.
        """
        size = checks.integer(size, "size")
        if size < 1:
            raise ArgumentError(f"size: expected at least 1 byte, got {size}; release() gives a request back")
        with self._state:
            self._require_open()
            if self._suspensions:
                raise ArgumentError("reservation: expected one that is not suspended, got a request inside suspended()")
            self._granted, note = self._limits.request(self.device, self._key, size)
            self._size = size
        _report(note)

    def release(self) -> None:
        """Give the request back; the handle may request again. Without a request it only tries a restore again that failed before.

        Raises
        ------
        ArgumentError
            The handle is closed.
        DeviceError
            The limit could not be put back. The request is gone; the limit before the first is kept on record, and the next change of any
            request tries again.
        """
        with self._state:
            self._require_open()
            self._size = self._granted = None
            note = self._limits.release(self.device, self._key)
        _report(note)

    def close(self) -> None:
        """Give the request back for good; twice is once."""
        with self._state:
            if self._closed:
                return
            self._closed, self._size, self._granted = "closed", None, None
            self._finalizer.detach()
            note = self._limits.release(self.device, self._key)
        _report(note)

    def move(self) -> Reservation:
        """A new handle that has this one's request; this one is closed. The device is not touched."""
        with self._state:
            self._require_open()
            if self._suspensions:
                raise ArgumentError("reservation: expected one that is not suspended, got a move inside suspended()")
            taken = Reservation(None, self.device, limits=self._limits)
            taken._finalizer.detach()
            taken._key, taken._size, taken._granted = self._key, self._size, self._granted
            self._closed, self._size, self._granted = "moved", None, None
            self._finalizer.detach()
            taken._finalizer = weakref.finalize(taken, taken._limits.collect, taken.device, taken._key)
        return taken

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave this request out of account inside the block, for a phase that would only be taxed by it.

        Notes
        -----
        It costs two changes of the limit, so it pays for phases longer than `break_even_us`, not counting that lines evicted meanwhile must be
        fetched again: on an H200 8.7 µs in a loop that waits for the device around the phase, so phases from 1.24 ms on at a tax of 0.7 %, and
        from 0.09 ms at 10 %. Blocks nest, also from several threads; the outermost counts.

        Raises
        ------
        ArgumentError
            The handle is closed.
        DeviceError
            The limit could not be changed. After the block the request is on record all the same; the next change of any request tries again.
        """
        with self._state:
            self._require_open()
            note = self._limits.suspend(self.device, self._key) if self._suspensions == 0 else ""
            self._suspensions += 1
        try:
            _report(note)
            yield
        finally:
            with self._state:
                self._suspensions -= 1
                note = self._limits.resume(self.device, self._key) if self._suspensions == 0 else ""
            _report(note)

    def _require_open(self) -> None:
        if self._closed:
            raise ArgumentError(f"reservation: expected an open one, got one that is {self._closed}")

    def __enter__(self) -> Reservation:
        # The block would run without the reserve that it was written for.
        with self._state:
            self._require_open()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def break_even_us(cost_us: float, tax: float) -> float:
    """How long a phase must last for `Reservation.suspended` to pay: the cost of both changes by the share of the phase that the reserve takes.

    Parameters
    ----------
    cost_us : float
        Microseconds of a `suspended` block with nothing in it.
    tax : float
        By how much the reserve slows the phase: 0.1 is ten percent.

    Examples
    --------
    >>> round(break_even_us(30, 0.1))
    300
    """
    cost_us, tax = checks.number(cost_us, "cost_us", 0), checks.number(tax, "tax", 0)
    if tax == 0:
        raise ArgumentError("tax: expected a number above 0, got 0")
    return cost_us / tax
