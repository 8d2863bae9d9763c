"""The gated delta rule at the shape of a 35B hybrid model: direct, record, fold and fold_record, a layer or thirty of them.

Cold without a flush in between: the calls of a round go through more than 250 MB of states, so that none finds its own in L2. `moved` counts
states, tokens and logs, each once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpukit.kernels import gated_delta
from gpukit.kernels.state_pool import ReplayLog, StatePool
from perf.conftest import GPU, on_device, there

pytestmark = on_device

KEY_HEADS, HEADS, DIM = (16, 32, 128) if GPU else (1, 2, 64)
STATE_BYTES = 4 * HEADS * DIM * DIM
ROTATED_BYTES = 260e6 if GPU else 0.0
MODEL_LAYERS = 30 if GPU else 2
TOKEN_BYTES = 2 * (2 * KEY_HEADS + 2 * HEADS) * DIM + 8 * HEADS  # q, k, v, out and gates
LOG_BYTES = 2 * (KEY_HEADS + HEADS) * DIM + 8 * HEADS


def like() -> Any:
    """An array of the library and device under measurement; None is NumPy."""
    return there(np.zeros(1, np.float32)) if GPU else None


def bfloat16(rng: np.random.Generator, *shape: int) -> Any:
    """Normal numbers."""
    bits = (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if not GPU:
        return bits
    import torch

    return there(bits.view(np.int16)).view(torch.bfloat16)


def inputs_of(items: int, tokens: int) -> dict[str, Any]:
    """Tokens, and where their outputs go."""
    rng = np.random.default_rng(0)
    return {
        "q": bfloat16(rng, items, tokens, KEY_HEADS, DIM),
        "k": bfloat16(rng, items, tokens, KEY_HEADS, DIM),
        "v": bfloat16(rng, items, tokens, HEADS, DIM),
        "g": there(-rng.random((items, tokens, HEADS), np.float32)),
        "beta": there(rng.random((items, tokens, HEADS), np.float32)),
        "out": bfloat16(rng, items, tokens, HEADS, DIM),
    }


def layers_of(items: int) -> int:
    """Layers whose states are more than a cache holds."""
    return max(2, -(-int(ROTATED_BYTES) // (items * STATE_BYTES)))


@pytest.mark.parametrize("items", [1, 8, 32])
@pytest.mark.parametrize("tokens", [1, 4])
def test_direct(device_benchmark: Callable[..., None], tokens: int, items: int) -> None:
    """One layer of a decode step."""
    layers = layers_of(items)
    pool, inputs, slots = StatePool.allocate(layers, items, HEADS, DIM, like=like()), inputs_of(items, tokens), there(np.arange(items))
    turns = itertools.cycle(range(layers))
    moved = items * (2 * STATE_BYTES + tokens * TOKEN_BYTES)
    device_benchmark(lambda: gated_delta.direct(**inputs, pool=pool, slots=slots, layer=next(turns)), moved=moved, nodes=layers)


@pytest.mark.parametrize("items", [1, 8, 32])
@pytest.mark.parametrize("tokens", [1, 4, 8, 16])
@pytest.mark.parametrize("folded", [None, 0, 3])
def test_record(device_benchmark: Callable[..., None], folded: int | None, tokens: int, items: int) -> None:
    """One layer of a verification; with `folded`, in one pass with the commit of the previous one."""
    layers = layers_of(items)
    pool, inputs, slots = StatePool.allocate(layers, items, HEADS, DIM, like=like()), inputs_of(items, tokens), there(np.arange(items))
    logs = [ReplayLog.allocate(layers, items, max(tokens, 4), KEY_HEADS, HEADS, DIM, like=like()) for _ in range(2)]
    turns = itertools.cycle(range(layers))
    moved = items * (STATE_BYTES + tokens * (TOKEN_BYTES + LOG_BYTES))
    if folded is None:
        device_benchmark(lambda: gated_delta.record(**inputs, pool=pool, slots=slots, log=logs[0], layer=next(turns)), moved=moved, nodes=layers)
        return
    inputs |= {"pool": pool, "slots": slots, "previous": logs[1], "accepted": there(np.full(items, folded)), "log": logs[0]}
    moved += items * (STATE_BYTES * (folded > 0) + folded * LOG_BYTES)
    device_benchmark(lambda: gated_delta.fold_record(**inputs, layer=next(turns)), moved=moved, nodes=layers)


@pytest.mark.parametrize("items", [1, 8])
@pytest.mark.parametrize("m", [1, 2, 4])
def test_fold(device_benchmark: Callable[..., None], m: int, items: int) -> None:
    """The commit of all layers in place."""
    turns = 2 + int(ROTATED_BYTES) // (MODEL_LAYERS * items * STATE_BYTES)
    pool = StatePool.allocate(MODEL_LAYERS, turns * items, HEADS, DIM, like=like())
    log = ReplayLog.allocate(MODEL_LAYERS, items, 4, KEY_HEADS, HEADS, DIM, like=like())
    rows = np.zeros((turns, items, 3), np.int64)
    rows[..., 0] = rows[..., 1] = np.arange(turns * items).reshape(turns, items)
    rows[..., 2] = m
    sets = itertools.cycle([there(one) for one in rows])
    moved = MODEL_LAYERS * items * (2 * STATE_BYTES + m * LOG_BYTES)
    device_benchmark(lambda: gated_delta.fold(pool, log, next(sets)), moved=moved, nodes=turns)
