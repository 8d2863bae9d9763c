"""`prefill` at the shape of a layer of a 35B hybrid model: one long prompt, several short ones, by each method.

`moved` counts states, tokens and workspace, each once. The states of a call are small beside its tokens, so nothing is rotated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpukit.kernels.gated_delta_prefill import prefill, prefill_workspace
from gpukit.kernels.state_pool import StatePool
from perf.conftest import GPU, on_device, there

KEY_HEADS, HEADS, DIM = (16, 32, 128) if GPU else (1, 2, 64)
STATE_BYTES = 4 * HEADS * DIM * DIM
TOKEN_BYTES = 2 * (2 * KEY_HEADS + 2 * HEADS) * DIM + 8 * HEADS  # q, k, v, out and gates
LENGTHS = {"4096": [4096], "512": [512], "8x512": [512] * 8, "mixed": [2048, 1024, 512, 256, 128, 64, 63, 1]}
SHORT = {"1": [1], "8": [8], "16": [16], "32": [32], "64": [64]}


def arguments_of(lengths: list[int]) -> dict[str, Any]:
    """A call over packed sequences of these lengths; on NumPy they are shorter."""
    lengths = lengths if GPU else [min(length, 3) for length in lengths]
    rng = np.random.default_rng(0)
    tokens, count = sum(lengths), len(lengths)

    def bfloat16(*shape: int) -> Any:
        bits = (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if not GPU:
            return bits
        import torch

        return there(bits.view(np.int16)).view(torch.bfloat16)

    return {
        "q": bfloat16(tokens, KEY_HEADS, DIM),
        "k": bfloat16(tokens, KEY_HEADS, DIM),
        "v": bfloat16(tokens, HEADS, DIM),
        "out": bfloat16(tokens, HEADS, DIM),
        "g": there(-rng.exponential(0.05, (tokens, HEADS)).astype(np.float32)),
        "beta": there(rng.random((tokens, HEADS), np.float32)),
        "pool": StatePool.allocate(1, count, HEADS, DIM, like=there(np.zeros(1, np.float32)) if GPU else None),
        "slots": there(np.arange(count)),
        "cu_seqlens": there(np.concatenate(([0], np.cumsum(lengths)))),
        "layer": 0,
        "workspace": there(np.zeros(prefill_workspace(tokens, count, HEADS), np.uint8)),
    }


def moved_by(arguments: dict[str, Any], method: str) -> int:
    """Bytes of states, tokens and, for "chunked", of the workspace's records."""
    tokens, count = len(arguments["q"]), len(arguments["slots"])
    return 2 * count * STATE_BYTES + tokens * TOKEN_BYTES + (2 * prefill_workspace(tokens, 0, HEADS) if method == "chunked" else 0)


@on_device
@pytest.mark.parametrize("lengths", LENGTHS)
def test_chunked(device_benchmark: Callable[..., None], lengths: str) -> None:
    """Prompts by tensor cores."""
    arguments = arguments_of(LENGTHS[lengths])
    device_benchmark(lambda: prefill(**arguments, method="chunked"), moved=moved_by(arguments, "chunked"))


@on_device
@pytest.mark.parametrize("lengths", SHORT)
@pytest.mark.parametrize("method", ["chunked", "sequential"])
def test_short(device_benchmark: Callable[..., None], method: str, lengths: str) -> None:
    """From which length on "auto" should be "chunked"."""
    arguments = arguments_of(SHORT[lengths])
    device_benchmark(lambda: prefill(**arguments, method=method), moved=moved_by(arguments, method))


@on_device
@pytest.mark.skipif(not GPU, reason="flash-linear-attention needs a GPU")
@pytest.mark.parametrize("length", [512, 4096])
def test_flash_linear_attention_alone(device_benchmark: Callable[..., None], length: int) -> None:
    """The peer's chunked kernels on one sequence, with states as it wants them: nothing gathered, scattered or repeated under the clock."""
    fla = pytest.importorskip("fla.ops.gated_delta_rule")
    arguments = arguments_of([length])
    q, k = (arguments[name].repeat_interleave(HEADS // KEY_HEADS, 1)[None] for name in ("q", "k"))
    v, g, beta = (arguments[name][None] for name in ("v", "g", "beta"))
    state = arguments["pool"].rec[0].transpose(-1, -2).contiguous()

    def call() -> None:
        fla.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)

    # Its kernels are tuned in the first call.
    call()
    device_benchmark(call, moved=moved_by(arguments, "fla"), nodes=8)


@pytest.mark.skipif(not GPU, reason="flash-linear-attention needs a GPU")
@pytest.mark.parametrize("lengths", LENGTHS)
def test_flash_linear_attention(host_benchmark: Callable[..., None], lengths: str) -> None:
    """The peer, with the gather and scatter of states that it needs; it waits for the device, so this is the clock on the wall."""
    import torch

    pytest.importorskip("fla.ops.gated_delta_rule")
    arguments = arguments_of(LENGTHS[lengths])
    del arguments["workspace"]

    def call() -> None:
        prefill(**arguments, method="fla")
        torch.cuda.synchronize()

    host_benchmark(call, batch=10)
