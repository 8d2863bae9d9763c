"""The round that L2 plans are tried on, in NumPy. Hints mean nothing here."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpukit.errors import Signal

__all__ = ["advance_states", "stream_weights"]

# Threads of a block of a stream, which decide which sums a block makes.
STREAM_THREADS = 512


def advance_states(states: Any, slots: Any, signal: Signal | None = None) -> None:
    """Every word of the rows' slots a step further."""
    taken: set[int] = set()
    for slot in slots.tolist():
        kind = "out_of_range" if slot >= states.shape[1] else "unbound" if slot in taken else ""
        if slot < 0 or kind:
            if kind and signal is not None:
                signal.add(kind)
            continue
        taken.add(slot)
        words = states[:, slot].view(np.uint32)
        words *= np.uint32(1664525)
        words += np.uint32(1013904223)


def stream_weights(weights: Any, out: Any) -> Any:
    """The sum, modulo 2^32, of what each block reads: vector i is read by thread ``i % (512 * len(out))``, 512 threads a block."""
    vectors = np.bitwise_xor.reduce(weights.view(np.uint32).reshape(-1, 4), axis=1)
    blocks = np.arange(len(vectors)) // STREAM_THREADS % max(len(out), 1)
    sums = np.zeros(len(out), np.uint32)
    np.add.at(sums, blocks, vectors)
    out[:] = sums.view(np.int32)
    return out
