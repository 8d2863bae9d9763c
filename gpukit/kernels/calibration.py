"""Kernels that measuring is calibrated with: nothing, a sleep of known length, a pure read and a pure copy. Not ops: they take addresses.

All enqueue on the given stream handle and return. Sizes are in bytes and multiples of 16.
"""

from __future__ import annotations

from gpukit import devices
from gpukit.launch import Kernel, PreparedCall

__all__ = ["copy", "empty", "prepare_empty", "read", "sleep"]

_EMPTY = Kernel("calibration", "empty", language="cuda")
_SLEEP = Kernel("calibration", "sleep", language="cuda")
_READ = Kernel("calibration", "read", language="cuda")
_COPY = Kernel("calibration", "copy", language="cuda")

# Blocks of a read: four of 512 threads fill a multiprocessor.
_BLOCKS_PER_MULTIPROCESSOR = 4
_THREADS = 512
_COPY_THREADS = 128


def empty(stream: int, device: int = 0) -> None:
    """A kernel that does nothing."""
    _EMPTY.launch((), device, stream, 1, 64, (0,))


def prepare_empty(stream: int, device: int = 0) -> PreparedCall[None]:
    """The same as a prepared call: what a launch costs with its arguments packed beforehand."""
    return PreparedCall((_EMPTY, (), device, stream, 1, 64, (0,), None), ())


def sleep(microseconds: float, stream: int, device: int = 0) -> None:
    """Keep the stream busy for a known time with one thread."""
    _SLEEP.launch((), device, stream, 1, 1, (round(microseconds * 1e3),))


def read(source: int, size: int, sink: int, stream: int, device: int = 0, passes: int = 1) -> None:
    """Read memory past the L1, `passes` times; `sink` is written only for one impossible value."""
    blocks = _BLOCKS_PER_MULTIPROCESSOR * devices.properties(device).multiprocessors
    _READ.launch((), device, stream, blocks, _THREADS, (source, size // 16, passes, sink))


def copy(source: int, target: int, size: int, stream: int, device: int = 0) -> None:
    """Copy memory."""
    _COPY.launch((), device, stream, -(-size // (32 * _COPY_THREADS)), _COPY_THREADS, (source, target, size // 16))
