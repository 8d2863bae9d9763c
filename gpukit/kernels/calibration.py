"""Kernels that measuring is calibrated with: nothing, a sleep of known length, a pure read and a pure copy. Not ops: they take addresses.

All enqueue on the given stream handle and return. Sizes are in bytes and multiples of 16.
"""

from __future__ import annotations

from gpukit import devices
from gpukit.launch import Kernel, PreparedCall, execute

__all__ = ["copy", "empty", "prepare_empty", "read", "sleep"]

_EMPTY = Kernel("calibration", "empty", language="cuda")
_SLEEP = Kernel("calibration", "sleep", language="cuda")
_READ = Kernel("calibration", "read", language="cuda")
_COPY = Kernel("calibration", "copy", language="cuda")

# Eight resident blocks of 512 threads would not fit; four keep every multiprocessor's load queue full.
_BLOCKS_PER_MULTIPROCESSOR = 4
_THREADS = 512


def empty(stream: int, device: int = 0) -> None:
    """A kernel that does nothing."""
    execute(_EMPTY, (), device, stream, 1, 64, (0,), None)


def prepare_empty(stream: int, device: int = 0) -> PreparedCall[None]:
    """The same as a prepared call: what a launch costs with its arguments packed beforehand."""
    return PreparedCall((_EMPTY, (), device, stream, 1, 64, (0,), None), ())


def sleep(microseconds: float, stream: int, device: int = 0) -> None:
    """Keep the stream busy for a known time with one thread."""
    execute(_SLEEP, (), device, stream, 1, 1, (round(microseconds * 1e3),), None)


def read(source: int, size: int, sink: int, stream: int, device: int = 0, passes: int = 1) -> None:
    """Read memory past the L1, `passes` times; `sink` is written only for one impossible value."""
    blocks = _BLOCKS_PER_MULTIPROCESSOR * devices.properties(device).multiprocessors
    execute(_READ, (), device, stream, blocks, _THREADS, (source, size // 16, passes, sink), None)


def copy(source: int, target: int, size: int, stream: int, device: int = 0) -> None:
    """Copy memory."""
    blocks = _BLOCKS_PER_MULTIPROCESSOR * devices.properties(device).multiprocessors
    execute(_COPY, (), device, stream, blocks, _THREADS, (source, target, size // 16), None)
