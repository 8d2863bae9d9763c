"""What `prefill` means, in NumPy: the gated delta rule token by token over packed sequences, whatever method a GPU takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpukit.errors import Signal
from gpukit.kernels.reference._bf16 import as_float, rounded
from gpukit.kernels.reference._ids import Array, add, as_ids
from gpukit.kernels.reference.gated_delta import _free_destinations as free_destinations
from gpukit.kernels.reference.gated_delta import look, pass_token, put, states_in

if TYPE_CHECKING:
    from gpukit.kernels.state_pool import StatePool


def prefill(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    pool: StatePool,
    slots: Array,
    cu_seqlens: Array,
    *,
    layer: int,
    out: Array,
    destination_slots: Array | None,
    resume: Array | None,
    scale: float,
    normalize: bool,
    signal: Signal | None = None,
) -> Array:
    """Take the states in `slots`, or zeros where `resume` is 0, past the tokens of their sequences and store them; outputs on the way."""
    sources, offsets = as_ids(slots), as_ids(cu_seqlens)
    destinations = sources if destination_slots is None else as_ids(destination_slots)
    states, bits = pool.rec[layer], out.view(np.uint16)
    bits[...] = 0
    padding = (sources < 0) | (destinations < 0)
    if offsets[0] < 0 or offsets[-1] > len(q) or (offsets[1:] < offsets[:-1]).any():
        add(signal, "out_of_range", ~padding)
        return out
    usable = ~padding & (sources < pool.slots) & (destinations < pool.slots)
    add(signal, "out_of_range", ~padding & ~usable)
    free = free_destinations(sources, destinations, usable)
    add(signal, "occupied", usable & ~free)
    for s in np.flatnonzero(free):
        state = np.zeros(states.shape[1:], np.float32) if resume is not None and as_ids(resume)[s] == 0 else states_in(states, sources[s])
        for t in range(offsets[s], offsets[s + 1]):
            pass_token(state, as_float(k[t]), as_float(v[t]), g[t], beta[t], normalize, states)
            bits[t] = rounded(look(state, as_float(q[t]), scale, normalize))
        put(states, destinations[s], state)
    return out
