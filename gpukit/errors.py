"""Every exception gpukit raises, and `Signal`, the counter of bad values met on the device.

Exceptions speak of arguments and are raised before anything is launched or written. A `Signal` speaks of values that only
the device sees (page ids, lengths): kernels skip them, never write outside their arrays, and count them by kind.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "SIGNAL_KINDS",
    "ArgumentError",
    "ArgumentTypeError",
    "ColdKernelError",
    "CompileError",
    "DeviceError",
    "ForkError",
    "GpukitError",
    "OutOfPages",
    "Signal",
    "SignalError",
]


class GpukitError(Exception):
    """Base class of every error gpukit raises on purpose."""


class ArgumentError(GpukitError, ValueError):
    """An argument has the wrong value, shape, stride, alignment or device. Nothing was launched or written."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has the wrong type or dtype, or host and device arrays are mixed. Nothing was launched or written."""


class OutOfPages(GpukitError):
    """A free list holds fewer pages than were asked for. The list is unchanged."""


class ColdKernelError(GpukitError):
    """A kernel that is not loaded yet was called while its stream was capturing. The capture is untouched; call `warmup` before it."""


class CompileError(GpukitError):
    """Device code did not compile. The message carries the compiler's log."""


class DeviceError(GpukitError):
    """The driver refused a call, or the GPU stack is missing. The message names the call and the driver's answer."""


class ForkError(GpukitError):
    """A device call was made in a child forked after gpukit first used the device. Use the 'spawn' start method."""


class SignalError(GpukitError):
    """`Signal.check` found counted values; `counts` holds them by kind."""

    def __init__(self, counts: dict[str, int]):
        self.counts = counts
        listing = ", ".join(f"{kind}: {count}" for kind, count in counts.items())
        super().__init__(f"bad values were met and skipped ({listing})")


# The position of a kind is its slot in the device counters; device code names the slots in compile/device.py.
SIGNAL_KINDS = ("out_of_range", "unbound", "rebound", "occupied", "mismatch", "exhausted")


class Signal:
    """Counts, by kind, the values that ops had to skip.

    Parameters
    ----------
    like : array, optional
        An array of the device whose kernels will count. None counts on the host, for the NumPy backend.

    Notes
    -----
    Pass it as `signal=` to any number of ops. Counting costs one atomic add per bad value and nothing without one.
    `counts` and `check` wait for the device; the ops never do. Kinds: ``out_of_range`` (id or slot outside its table),
    ``unbound`` (a valid id with nothing bound, or a later duplicate), ``rebound`` (a bind that overwrote),
    ``occupied`` (a remap destination in use), ``mismatch`` (device lengths against the host's counts, broken page
    alignment), ``exhausted`` (a list too short or a ring full).

    Examples
    --------
    >>> import numpy as np, gpukit
    >>> from gpukit.kernels import page_table
    >>> v2p, p2v = page_table.empty(4, 4)
    >>> signal = gpukit.Signal()
    >>> page_table.unbind(np.array([1, 99]), v2p, p2v, signal=signal)
    array([-1, -1])
    >>> signal.counts()
    {'out_of_range': 1, 'unbound': 1}
    >>> signal.check()
    Traceback (most recent call last):
    ...
    gpukit.errors.SignalError: bad values were met and skipped (out_of_range: 1, unbound: 1)
    >>> signal.counts()
    {}
    """

    def __init__(self, like: Any = None):
        self._host = [0] * len(SIGNAL_KINDS)
        self._device_counters: Any = None
        if like is not None:
            from gpukit import arrays

            if not arrays.is_host(like):
                from gpukit.devices import DeviceCounters

                self._device_counters = DeviceCounters(arrays.device_of(like), len(SIGNAL_KINDS))

    def __repr__(self) -> str:
        return f"Signal({'host' if self.device is None else f'device {self.device}'})"

    @property
    def device(self) -> int | None:
        """Ordinal of the device that counts, None on the host."""
        return None if self._device_counters is None else self._device_counters.device

    @property
    def pointer(self) -> int:
        """Device address of the int64 counters, 0 on the host."""
        return 0 if self._device_counters is None else self._device_counters.pointer

    def add(self, kind: str, count: int = 1) -> None:
        """Count on the host: what the NumPy backend calls."""
        self._host[SIGNAL_KINDS.index(kind)] += int(count)

    def counts(self) -> dict[str, int]:
        """Counts so far by kind, zeros left out. Waits for all work of the device."""
        totals = list(self._host)
        if self._device_counters is not None:
            totals = [host + device for host, device in zip(totals, self._device_counters.read(), strict=True)]
        return {kind: total for kind, total in zip(SIGNAL_KINDS, totals, strict=True) if total}

    def reset(self) -> None:
        """Set every count to zero. Waits for all work of the device."""
        self._host = [0] * len(SIGNAL_KINDS)
        if self._device_counters is not None:
            self._device_counters.clear()

    def check(self) -> None:
        """Raise `SignalError` if anything was counted, and reset either way. Waits for all work of the device."""
        counts = self.counts()
        if counts:
            self.reset()
            raise SignalError(counts)
