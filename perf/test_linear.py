"""Projections of a decode step: the floor is reading the weight once. cuBLAS beside ours, through torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpukit.kernels import linear
from perf.conftest import GPU, on_device, there

pytestmark = on_device

# Tokens: a step of one and of eight sequences, verifications of 4 tokens of 4, 8 and 16 sequences.
TOKENS = (1, 8, 16, 32, 64)
# (outputs, inputs): in- and out-projection of a recurrent layer of Qwen3.6-35B-A3B and of a 27B model, and the head of the first.
WEIGHTS = {"in": (12_352, 2_048), "out": (2_048, 4_096), "in_27b": (16_480, 5_120), "out_27b": (5_120, 6_144), "head": (151_936, 2_048)}


def random(*shape: int) -> Any:
    """Normal numbers of bfloat16; a few of them where there is no GPU."""
    if not GPU:
        return np.zeros((shape[0], 64), np.uint16)
    import torch

    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("implementation", ["gpukit", "torch"])
def test_linear(device_benchmark: Callable[..., None], implementation: str, weight: str, tokens: int) -> None:
    """Cold: a model's other layers have pushed the weight out of the L2."""
    outputs, inputs = WEIGHTS[weight] if GPU else (64, 64)
    x, matrix = random(tokens, inputs), random(outputs, inputs)
    out = random(tokens, outputs)
    moved = 2 * (outputs * inputs + tokens * (inputs + outputs))
    if implementation == "gpukit":
        device_benchmark(lambda: linear.linear(x, matrix, out=out), moved=moved, nodes=8, cold=True)
        return
    if not GPU:
        pytest.skip("a peer needs a GPU")
    import torch

    device_benchmark(lambda: torch.mm(x, matrix.T, out=out), moved=moved, nodes=8, cold=True)


@pytest.mark.parametrize("tokens", TOKENS)
def test_embed(device_benchmark: Callable[..., None], tokens: int) -> None:
    """Rows of 2,048."""
    width = 2_048 if GPU else 64
    table, out = random(4_096, width), random(tokens, width)
    ids = there(np.arange(tokens) * 61)
    device_benchmark(lambda: linear.embed(ids, table, out=out), moved=4 * tokens * width)
