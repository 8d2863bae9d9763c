"""A sparse mixture of experts of a 35B model, the whole block: router, selection, experts, shared expert, residual.

The floor is reading the router and every distinct expert of the draw once; the draw is fixed by its seed, and printed with floor and time. Weights
are cold as in a model, without a flush in between, which would make instructions cold too: calls go through layers whose routers choose other
experts, more than 250 MB of them. Peers run the whole block too, over the same layers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpukit.decode.geometry import EXPERT_FORMATS, expert_layer_bytes
from gpukit.kernels import moe
from gpukit.kernels.row_split import quantize
from gpukit.launch import overlapping
from perf.conftest import GPU, on_device, there

pytestmark = on_device

EXPERTS, HIDDEN, WIDTH = (256, 2048, 512) if GPU else (16, 128, 128)
PREFILL = (1024, 4096)
# Mixes and numbers of tokens: formats of few bits are for few tokens.
CASES = [(mix, tokens) for mix in ("bf16", "fp8") for tokens in (1, 4, 16, 64)]
CASES += [(mix, tokens) for mix in ("q4_q5", "q6", "w8") for tokens in (1, 4)]
# Distinct experts of the draw of four tokens in the quantised mixes: those of a published run.
DISTINCT = {("q4_q5", 4): 23}
READ_CEILING = 4.53e12
ROTATED_BYTES = 260e6 if GPU else 0.0


def matrix(rows: int, columns: int, kind: str) -> Any:
    """Random weights of a format, torch tensors on a GPU."""
    if not GPU:
        values = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32) * np.float32(columns**-0.5)
        if kind == "fp8":
            return moe.Fp8(np.full((rows, columns), 0x20, np.uint8), np.ones((rows, columns // 128), np.float32))
        return (values.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else quantize(values, kind)
    import torch

    if kind == "fp8":
        codes = (torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 64).to(torch.float8_e4m3fn)
        return moe.Fp8(codes, torch.full((rows, columns // 128), columns**-0.5 / 64, device="cuda"))
    values = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * columns**-0.5
    return values if kind == "bf16" else quantize(values, kind)


@functools.cache
def weights_of(mix: str) -> moe.MoeWeights:
    """A layer's weights, made once for all cases: 5 GB in all formats."""
    gate_up, down, shared = EXPERT_FORMATS[mix]
    if GPU:
        import torch

        torch.manual_seed(0)
    return moe.MoeWeights(
        matrix(EXPERTS + 1, HIDDEN, "bf16"),
        matrix(EXPERTS * 2 * WIDTH, HIDDEN, gate_up),
        matrix(EXPERTS * HIDDEN, WIDTH, down),
        matrix(2 * WIDTH, HIDDEN, shared),
        matrix(HIDDEN, WIDTH, shared),
    )


def bfloat16(values: np.ndarray) -> Any:
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if not GPU:
        return bits
    import torch

    return there(bits.view(np.int16)).view(torch.bfloat16)


def distinct_experts(x: Any, weights: moe.MoeWeights) -> int:
    """How many experts the tokens have between them."""
    ids = moe.route(x, weights.router)[0]
    return len(np.unique(ids.cpu().numpy() if GPU else ids))


def draw(tokens: int, weights: moe.MoeWeights, distinct: int | None = None) -> tuple[Any, int]:
    """Tokens, and their distinct experts: as many as are asked for, by drawing tokens that are more or less alike."""
    for seed in range(1000 if GPU and distinct else 1):
        rng = np.random.default_rng(seed)
        alike = 0.0 if distinct is None else rng.random()
        values = alike * rng.standard_normal((1, HIDDEN)) + (1 - alike**2) ** 0.5 * rng.standard_normal((tokens, HIDDEN))
        x = bfloat16(values)
        found = distinct_experts(x, weights)
        if found == distinct:
            break
    return x, found


def floor_bytes(mix: str, tokens: int, distinct: int) -> int:
    """Router, distinct experts and shared expert once, tokens read, and their sums read and written."""
    return expert_layer_bytes(EXPERTS, HIDDEN, WIDTH, mix, distinct) + 6 * tokens * HIDDEN


def copied(matrix: Any) -> Any:
    """The same matrix in other memory."""
    if dataclasses.is_dataclass(matrix):
        parts = {field.name: getattr(matrix, field.name) for field in dataclasses.fields(matrix)}
        return type(matrix)(**{name: copied(part) for name, part in parts.items()})
    clone = getattr(matrix, "clone", None) or getattr(matrix, "copy", None)
    return matrix if clone is None else clone()


class Case:
    """Tokens, sums, weights and workspace of a measured call, and the floor that it is compared with."""

    def __init__(self, mix: str, tokens: int, schedule: str = "auto"):
        self.name = f"{mix}, {tokens} tokens"
        self.weights = weights_of(mix)
        self.x, self.distinct = draw(tokens, self.weights, DISTINCT.get((mix, tokens)))
        self.moved = floor_bytes(mix, tokens, self.distinct)
        self.dest = bfloat16(np.zeros((tokens, HIDDEN)))
        self.workspace = there(np.zeros(moe.workspace_bytes(tokens, self.weights, schedule), np.uint8))
        self.layers = [self._layer(number) for number in range(max(2, -(-int(ROTATED_BYTES) // self.moved)))]

    def _layer(self, number: int) -> moe.MoeWeights:
        """A layer of its own router and shared expert that chooses as many experts of the bank, but others."""
        own = self.weights
        if number == 0:
            return own
        shift = number * max(self.distinct, 1) % EXPERTS
        router = own.router.copy() if not GPU else own.router.clone()
        router[shift:EXPERTS], router[:shift] = own.router[: EXPERTS - shift], own.router[EXPERTS - shift : EXPERTS]
        return moe.MoeWeights(router, own.gate_up, own.down, copied(own.shared_gate_up), copied(own.shared_down))

    def agrees(self, found: Any, schedule: str = "auto") -> bool:
        """Whether another implementation has added the same to zeros, for tokens whose choice does not hang on the rounding of scores."""
        expected = moe.sparse_moe(self.x, self.weights, found.new_zeros(found.shape), workspace=self.workspace, schedule=schedule)
        best = (self.x.float() @ self.weights.router[:EXPERTS].float().T).topk(9).values
        clear = best[:, 7] - best[:, 8] > 0.05
        apart = (found.float() - expected.float())[clear].norm()
        return bool(apart <= 3e-2 * expected.float()[clear].norm())


@pytest.fixture
def measure(device_benchmark: Callable[..., None], benchmark: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Measure a call with cold weights, and print its draw, floor and time."""

    def run(block: Callable[[moe.MoeWeights], Any], case: Case, rounds: int = 2, moved: int = 0) -> None:
        moved, layers = moved or case.moved, itertools.cycle(case.layers)
        device_benchmark(lambda: block(next(layers)), moved=moved, nodes=rounds * len(case.layers))
        floor = moved / READ_CEILING * 1e6
        benchmark.extra_info.update({"distinct_experts": case.distinct, "floor_us": round(floor, 2)})
        with capsys.disabled():
            took = f"{benchmark.extra_info['device_us']:.1f} us" if "device_us" in benchmark.extra_info else "not measured"
            print(f"\n{benchmark.name}: {case.name}, {case.distinct} distinct experts, {moved / 1e6:.1f} MB, floor {floor:.1f} us, {took}")

    return run


@pytest.mark.parametrize(("mix", "tokens"), CASES)
def test_block(measure: Callable[..., None], mix: str, tokens: int) -> None:
    """The schedule "decode", kernels overlapping."""
    case = Case(mix, tokens)

    def block(weights: moe.MoeWeights) -> None:
        with overlapping():
            moe.sparse_moe(case.x, weights, case.dest, workspace=case.workspace, exclusive=True)

    measure(block, case)


@pytest.mark.skipif(not GPU, reason="a peer needs a GPU")
@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
@pytest.mark.parametrize("peer", ["triton", "torch"])
def test_block_of_peers(measure: Callable[..., None], peer: str, tokens: int) -> None:
    """The same block, bfloat16; each gives what ours does."""
    from perf.peers import triton_moe

    case = Case("bf16", tokens)
    triton = {id(weights): triton_moe.TritonMoe(weights, tokens) for weights in case.layers}

    def block(weights: moe.MoeWeights, sums: Any = case.dest) -> None:
        if peer == "triton":
            triton[id(weights)](case.x, dest=sums)
        else:
            triton_moe.torch_moe(case.x, weights, sums)

    # The first call tunes.
    found = case.dest.clone()
    block(case.weights, found)
    block(case.weights, found.zero_())
    assert case.agrees(found)
    measure(block, case)


@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_routing(measure: Callable[..., None], tokens: int) -> None:
    """Router and selection alone, over the routers of more layers than the L2 holds."""
    case = Case("bf16", tokens)
    case.layers = [case._layer(number) for number in range(140 if GPU else 2)]
    ids, alpha, scale = moe.route(case.x, case.weights.router)
    workspace = there(np.zeros(moe.route_workspace(tokens, EXPERTS + 1), np.uint8))

    def block(weights: moe.MoeWeights) -> None:
        with overlapping():
            moe.route(case.x, weights.router, ids=ids, alpha=alpha, shared_scale=scale, workspace=workspace)

    measure(block, case, rounds=1, moved=2 * (EXPERTS + 1) * HIDDEN)


@pytest.mark.parametrize("tokens", PREFILL)
@pytest.mark.parametrize("implementation", ["gpukit", "torch"])
def test_prefill(measure: Callable[..., None], implementation: str, tokens: int) -> None:
    """Many tokens, bfloat16: the schedule "prefill" and torch's grouped product."""
    if implementation == "torch" and not GPU:
        pytest.skip("a peer needs a GPU")
    case = Case("bf16", tokens if GPU else 3, "prefill")

    def ours(weights: moe.MoeWeights) -> None:
        with overlapping():
            moe.sparse_moe(case.x, weights, case.dest, workspace=case.workspace, schedule="prefill")

    if implementation == "gpukit":
        return measure(ours, case)
    from perf.peers import triton_moe

    triton_moe.torch_moe(case.x, case.weights, case.dest)
    assert case.agrees(case.dest, "prefill")
    return measure(lambda weights: triton_moe.torch_moe(case.x, weights, case.dest), case)
