"""The small kernels around a gated delta rule at decode sizes, and the moves of whole states; torch's own norm beside ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpukit.kernels import conv, gates, norm, state_slots
from perf.conftest import GPU, on_device, there

pytestmark = on_device

# Rows of a decode batch; channels of the convolution and width of the hidden state; value heads and their width.
BATCHES = (1, 8)
CHANNELS = 8_192
HEADS, HEAD_WIDTH = 32, 128
# Layers of recurrent state, and steps of a verification.
LAYERS, TOKENS = 30, 4


def zeros(*shape: int, dtype: str = "uint16") -> Any:
    """Zeros on the device; of bfloat16, which uint16 stands for on the host, where that is asked."""
    if not GPU:
        return np.zeros(shape, dtype)
    import torch

    return torch.zeros(shape, dtype=torch.bfloat16 if dtype == "uint16" else getattr(torch, dtype), device="cuda")


def random(*shape: int) -> Any:
    """Normal numbers of bfloat16."""
    if not GPU:
        return np.zeros(shape, np.uint16)
    import torch

    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("implementation", ["gpukit", "torch"])
def test_rms_norm(device_benchmark: Callable[..., None], implementation: str, rows: int) -> None:
    """Rows of 8,192."""
    x, weight, out = random(rows, CHANNELS), random(CHANNELS), zeros(rows, CHANNELS)
    moved = 2 * 2 * rows * CHANNELS + 2 * CHANNELS
    if implementation == "gpukit":
        device_benchmark(lambda: norm.rms_norm(x, weight, out=out), moved=moved)
        return
    if not GPU:
        pytest.skip("a peer needs a GPU")
    import torch

    device_benchmark(lambda: torch.nn.functional.rms_norm(x, (CHANNELS,), weight, 1e-6), moved=moved)


@pytest.mark.parametrize("rows", BATCHES)
def test_gated_rms_norm(device_benchmark: Callable[..., None], rows: int) -> None:
    """The heads of a batch."""
    x, gate, out = (random(rows, HEADS, HEAD_WIDTH) for _ in range(3))
    weight = random(HEAD_WIDTH)
    device_benchmark(lambda: norm.gated_rms_norm(x, gate, weight, out=out), moved=3 * 2 * rows * HEADS * HEAD_WIDTH)


@pytest.mark.parametrize("rows", BATCHES)
def test_gate_control(device_benchmark: Callable[..., None], rows: int) -> None:
    """Into the pairs of a log."""
    a, b, pairs = random(rows, HEADS), random(rows, HEADS), zeros(rows, HEADS, 2, dtype="float32")
    a_log, dt_bias = zeros(HEADS, dtype="float32"), random(HEADS)
    device_benchmark(lambda: gates.gate_control(a, b, a_log, dt_bias, g_out=pairs[..., 0], beta_out=pairs[..., 1]), moved=12 * rows * HEADS)


@pytest.mark.parametrize("rows", BATCHES)
def test_conv1d_silu(device_benchmark: Callable[..., None], rows: int) -> None:
    """One token of every row."""
    x, weight, out = random(rows, 1, CHANNELS), random(CHANNELS, 4), zeros(rows, 1, CHANNELS)
    history, slots = random(2 * rows, 3, CHANNELS), there(np.arange(rows) * 2)
    device_benchmark(lambda: conv.conv1d_silu(x, weight, history, slots, out=out), moved=2 * CHANNELS * (8 * rows + 4))


@pytest.mark.parametrize("rows", BATCHES)
def test_conv1d_silu_record(device_benchmark: Callable[..., None], rows: int) -> None:
    """A verification of three drafts."""
    x, weight, out, log = random(rows, TOKENS, CHANNELS), random(CHANNELS, 4), zeros(rows, TOKENS, CHANNELS), zeros(rows, TOKENS, CHANNELS)
    history, slots = random(2 * rows, 3, CHANNELS), there(np.arange(rows) * 2)
    moved = 2 * CHANNELS * (rows * (3 * TOKENS + 3) + 4)
    device_benchmark(lambda: conv.conv1d_silu_record(x, weight, history, slots, log, out=out), moved=moved)


def pools_of(slots: int) -> tuple[Any, Any]:
    """Histories and states of 30 layers, layer-major; small ones where there is no GPU."""
    if not GPU:
        return zeros(LAYERS, slots, 3, 64), zeros(LAYERS, slots, 2, 8, 8, dtype="float32")
    return zeros(LAYERS, slots, 3, CHANNELS), zeros(LAYERS, slots, HEADS, HEAD_WIDTH, HEAD_WIDTH, dtype="float32")


def state_bytes(pools: tuple[Any, Any]) -> int:
    """Bytes of the state of one slot, all layers and parts."""
    history, state = pools
    return 2 * int(np.prod(history.shape)) // history.shape[1] + 4 * int(np.prod(state.shape)) // state.shape[1]


@pytest.mark.parametrize("rows", BATCHES)
def test_copy_slots(device_benchmark: Callable[..., None], rows: int) -> None:
    """Whole states from slot to slot."""
    pools = pools_of(2 * rows)
    source, destination = there(np.arange(rows) * 2), there(np.arange(rows) * 2 + 1)
    moved = 2 * rows * state_bytes(pools)
    device_benchmark(lambda: state_slots.copy_slots(pools, source, destination), moved=moved, nodes=4, cold=True)


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("tracked", [0, 1])
def test_track_states(device_benchmark: Callable[..., None], tracked: int, rows: int) -> None:
    """The commit of a round by snapshots, with the state of one row tracked, or of none."""
    pools = pools_of(rows + 1)
    sources = tuple(zeros(LAYERS, rows, TOKENS, *part.shape[2:], dtype=dtype) for part, dtype in zip(pools, ("uint16", "float32"), strict=True))
    slots, steps = there(np.arange(rows)), there(np.arange(rows) % TOKENS)
    track, track_steps = there(np.full(rows, rows)), there(np.where(np.arange(rows) < tracked, 0, -1))
    moved = 2 * (rows + tracked) * state_bytes(pools)
    device_benchmark(lambda: state_slots.track_states(sources, pools, slots, steps, track, track_steps), moved=moved, nodes=4, cold=True)
