"""The gated delta rule at the shape of a 35B hybrid model: direct, record, fold and fold_record, a layer or thirty of them.

Cold without a flush in between: the calls of a round go through more than 250 MB of states, so that none finds its own in L2. `moved` counts
states, tokens and logs, each once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpukit.kernels import gated_delta
from gpukit.kernels.state_pool import ReplayLog, StatePool
from gpukit.launch import overlapping
from perf.conftest import GPU, NODES, on_device, there

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


def ahead(mode: str, layers: int) -> Iterator[dict[str, Any]]:
    """The layers of one call after the other; with "ahead" in `mode` each says which comes next, with "settled" that its states are there."""
    for layer in itertools.cycle(range(layers)):
        following = {"prefetch_layer": (layer + 1) % layers} if "ahead" in mode else {}
        yield {"layer": layer, "settled": "settled" in mode, **following}


def in_mode(mode: str, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call, overlapping the one in front unless `mode` is "plain"."""

    def overlapped() -> None:
        with overlapping(mode != "plain"):
            call()

    return overlapped


MODES = pytest.mark.parametrize("mode", ["plain", "overlapping", "ahead", "settled"])


@pytest.mark.parametrize("mode", ["plain", "overlapping", "ahead", "settled", "settled ahead"])
@pytest.mark.parametrize("items", [1, 8, 32])
@pytest.mark.parametrize("tokens", [1, 4])
def test_direct(device_benchmark: Callable[..., None], tokens: int, items: int, mode: str) -> None:
    """One layer of a decode step."""
    layers = layers_of(items)
    pool, inputs, slots = StatePool.allocate(layers, items, HEADS, DIM, like=like()), inputs_of(items, tokens), there(np.arange(items))
    turns = ahead(mode, layers)
    moved = items * (2 * STATE_BYTES + tokens * TOKEN_BYTES)
    call = in_mode(mode, lambda: gated_delta.direct(**inputs, pool=pool, slots=slots, **next(turns)))
    device_benchmark(call, moved=moved, nodes=layers)


@pytest.mark.parametrize("kind", ["record", "exact", "fold 0", "fold 3"])
@MODES
@pytest.mark.parametrize("items", [1, 8, 32])
@pytest.mark.parametrize("tokens", [4, 16])
def test_record(device_benchmark: Callable[..., None], tokens: int, items: int, mode: str, kind: str) -> None:
    """One layer of a verification; in one pass with the commit of some tokens of the previous one, if they are named."""
    layers = layers_of(items)
    pool, inputs, slots = StatePool.allocate(layers, items, HEADS, DIM, like=like()), inputs_of(items, tokens), there(np.arange(items))
    logs = [ReplayLog.allocate(layers, items, max(tokens, 4), KEY_HEADS, HEADS, DIM, like=like()) for _ in range(2)]
    turns = ahead(mode, layers)
    moved = items * (STATE_BYTES + tokens * (TOKEN_BYTES + LOG_BYTES))
    arguments = {**inputs, "pool": pool, "slots": slots, "log": logs[0]}
    if not kind.startswith("fold"):
        call = in_mode(mode, lambda: gated_delta.record(**arguments, **next(turns), exact=kind == "exact"))
        device_benchmark(call, moved=moved, nodes=layers)
        return
    folded = int(kind[5:])
    arguments |= {"previous": logs[1], "accepted": there(np.full(items, folded))}
    moved += items * (STATE_BYTES * (folded > 0) + folded * LOG_BYTES)
    device_benchmark(in_mode(mode, lambda: gated_delta.fold_record(**arguments, **next(turns))), moved=moved, nodes=layers)


@MODES
@pytest.mark.parametrize("items", [1, 8, 32])
@pytest.mark.parametrize("tokens", [4, 16])
def test_conv_record(device_benchmark: Callable[..., None], tokens: int, items: int, mode: str) -> None:
    """One layer of a verification with the convolution in front of it in the same kernel."""
    layers, channels = layers_of(items), (2 * KEY_HEADS + HEADS) * DIM
    pool = StatePool.allocate(layers, items, HEADS, DIM, channels=channels, like=like())
    log = ReplayLog.allocate(layers, items, tokens, KEY_HEADS, HEADS, DIM, channels=channels, like=like())
    rng = np.random.default_rng(0)
    columns, weight = bfloat16(rng, items, tokens, channels), bfloat16(rng, channels, 4)
    inputs = {name: array for name, array in inputs_of(items, tokens).items() if name in ("g", "beta", "out")}
    slots, turns = there(np.arange(items)), ahead(mode, layers)
    # Columns are read and logged, and three of a history read; queries, keys and values stay on the chip.
    moved = items * (STATE_BYTES + 6 * channels + tokens * (2 * channels + TOKEN_BYTES + LOG_BYTES)) + 8 * channels
    call = in_mode(mode, lambda: gated_delta.conv_record(columns, weight, **inputs, pool=pool, slots=slots, log=log, **next(turns)))
    device_benchmark(call, moved=moved, nodes=layers)


@pytest.mark.parametrize("items", [1, 8])
def test_snapshot(device_benchmark: Callable[..., None], items: int) -> None:
    """The older scheme: four states written a layer."""
    layers, tokens = layers_of(items), 4
    pool, inputs = StatePool.allocate(layers, items * (tokens + 1), HEADS, DIM, like=like()), inputs_of(items, tokens)
    slots, kept = there(np.arange(items)), there(items + np.arange(items * tokens).reshape(items, tokens))
    turns = itertools.cycle(range(layers))
    moved = items * ((1 + tokens) * STATE_BYTES + tokens * TOKEN_BYTES)
    device_benchmark(
        lambda: gated_delta.snapshot(**inputs, pool=pool, slots=slots, snapshot_slots=kept, layer=next(turns)), moved=moved, nodes=layers
    )


@pytest.mark.parametrize("items", [1, 8])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("peer", ["fla", "torch"])
def test_peer(device_benchmark: Callable[..., None], peer: str, tokens: int, items: int) -> None:
    """Tokens past the states of one layer, by others: from states of a batch to new ones, over as much memory as ours."""
    if not GPU:
        pytest.skip("a peer needs a GPU")
    pytest.importorskip("fla" if peer == "fla" else "torch")
    from perf.peers import recurrent

    inputs, layers = inputs_of(items, tokens), layers_of(items)
    states = itertools.cycle([there(np.zeros((items, HEADS, DIM, DIM), np.float32)) for _ in range(layers)])
    step = getattr(recurrent, f"{peer}_step")
    moved = items * (2 * STATE_BYTES + tokens * TOKEN_BYTES)
    device_benchmark(lambda: step(inputs, next(states)), moved=moved, nodes=layers)


def folds(items: int, m: int) -> tuple[Callable[..., Any], int, int]:
    """The commit of all layers in place, in turns of slots of their own, how many there are, and the bytes that one moves."""
    turns = 2 + int(ROTATED_BYTES) // (MODEL_LAYERS * items * STATE_BYTES)
    pool = StatePool.allocate(MODEL_LAYERS, turns * items, HEADS, DIM, like=like())
    log = ReplayLog.allocate(MODEL_LAYERS, items, 4, KEY_HEADS, HEADS, DIM, like=like())
    rows = np.zeros((turns, items, 3), np.int64)
    rows[..., 0] = rows[..., 1] = np.arange(turns * items).reshape(turns, items)
    rows[..., 2] = m
    sets = itertools.cycle([there(one) for one in rows])
    moved = MODEL_LAYERS * items * (2 * STATE_BYTES + m * LOG_BYTES)
    return lambda **options: gated_delta.fold(pool, log, next(sets), **options), turns, moved


@pytest.mark.parametrize("items", [1, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_fold(device_benchmark: Callable[..., None], m: int, items: int) -> None:
    """A launch of its own."""
    call, turns, moved = folds(items, m)
    device_benchmark(call, moved=moved, nodes=turns)


def measure_settled(device_benchmark: Callable[..., None], m: int, items: int, **options: float) -> None:
    """Each begins while the one in front ends; as many as elsewhere, so that the first one, which has none in front, does not count."""
    call, turns, moved = folds(items, m)
    device_benchmark(in_mode("settled", lambda: call(settled=True, **options)), moved=moved, nodes=-(-NODES // turns) * turns)


@pytest.mark.parametrize("items", [1, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_settled_fold(device_benchmark: Callable[..., None], m: int, items: int) -> None:
    """One behind the other."""
    measure_settled(device_benchmark, m, items)


@pytest.mark.parametrize("items", [1, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_settled_fold_of_kept_states(device_benchmark: Callable[..., None], m: int, items: int) -> None:
    """The same, whose states the L2 is asked to keep, though they are gone long before they are read again."""
    measure_settled(device_benchmark, m, items, keep=1.0)
