"""Gates: their arguments and their NumPy backend anywhere, their kernel against the reference on a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpukit.compile.cuda_c import source_path
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.kernels import gates
from tests.helpers.bf16 import numbers, random_bits

A, LOG, G = np.ones((2, 4), np.float32), np.ones(4, np.float32), np.zeros((2, 4), np.float32)
BETA = np.zeros((2, 4), np.float32)
control = gates.gate_control

VALUE, TYPE = ArgumentError, ArgumentTypeError
BAD_CALLS = [
    (lambda: control(A.astype(float), A, LOG, LOG, g_out=G, beta_out=BETA), TYPE, "x_a: expected dtype float32 or bfloat16 or uint16, got float64"),
    (lambda: control(A[0], A, LOG, LOG, g_out=G, beta_out=BETA), VALUE, r"x_a: expected 2 or 3 dimensions, got shape \(4,\)"),
    (lambda: control(A, A[:1], LOG, LOG, g_out=G, beta_out=BETA), VALUE, r"x_b: expected shape \(2, 4\) like x_a, got \(1, 4\)"),
    (lambda: control(A, A, LOG[:3], LOG, g_out=G, beta_out=BETA), VALUE, r"a_log: expected shape \(4,\), the heads of x_a, got \(3,\)"),
    (lambda: control(A, A, LOG, A[0, ::2], g_out=G, beta_out=BETA), VALUE, "dt_bias: expected a contiguous array"),
    (lambda: control(A, A, LOG, LOG, g_out=G.view(np.int32), beta_out=BETA), TYPE, "g_out: expected dtype float32, got int32"),
    (lambda: control(A, A, LOG, LOG, g_out=G, beta_out=BETA[:, :2]), VALUE, r"beta_out: expected shape \(2, 4\) like x_a, got \(2, 2\)"),
    (lambda: control(A, A, LOG, LOG, g_out=np.broadcast_to(G[:1], (2, 4)), beta_out=BETA), VALUE, "g_out: expected a writable array"),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[message for _, _, message in BAD_CALLS])
def test_bad_arguments_are_named_and_nothing_is_written(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
    assert not G.any() and not BETA.any()


def test_numpy_arrays_run_the_reference() -> None:
    g, beta = gates.gate_control(A, A, LOG, LOG)
    assert g.dtype == beta.dtype == np.float32 and (g < 0).all() and (beta > 0.5).all()
    assert gates.gate_control(A[:0], A[:0], LOG, LOG)[0].shape == (0, 4)
    call = gates.gate_control.prepare(A, A, LOG, LOG, g_out=G.copy(), beta_out=BETA.copy())
    assert (call()[0] == g).all()


def test_the_constants_of_the_plan_are_those_of_the_kernel() -> None:
    constants = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", source_path("gates").read_text())}
    assert constants["THREADS"] == gates._THREADS


# On a GPU.


@pytest.fixture
def card() -> Iterator[Any]:
    """A GPU through CuPy, whose arrays lie between guard bytes."""
    from tests.helpers.device import CupyDevice

    made = CupyDevice()
    yield made
    made.check_guards()


@pytest.mark.gpu
@pytest.mark.parametrize("float32", [False, True])
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (1, 32), (8, 48), (33, 17), (3, 4, 32), (2, 5, 7)])
def test_the_kernel_equals_the_reference(card: Any, shape: tuple[int, ...], float32: bool) -> None:
    """The projections are slices of wider ones, the outputs the two halves of pairs."""
    rng = np.random.default_rng(shape[0])
    heads = shape[-1]
    both, a_log, dt_bias = random_bits(rng, *shape[:-1], 2 * heads + 3, scale=12), random_bits(rng, heads), random_bits(rng, heads, scale=2)
    write = random_bits(rng, *shape[:-1], heads + 5, scale=12)
    if float32:
        both, a_log = numbers(both).astype(np.float32), numbers(a_log).astype(np.float32)
    pairs = np.zeros((*shape, 2), np.float32)
    there = [card.array(array) for array in (both, a_log, dt_bias, pairs, write)]
    for projections, decay, bias, out, strengths in ((both, a_log, dt_bias, pairs, write), there):
        x_a, x_b = projections[..., 1 : 2 * heads + 1 : 2], strengths[..., 2 : heads + 2]
        gates.gate_control(x_a, x_b, decay, bias, g_out=out[..., 0], beta_out=out[..., 1])
    np.testing.assert_allclose(card.host(there[3]), pairs, rtol=3e-6, atol=1e-7)


@pytest.mark.gpu
def test_extremes_on_the_device(card: Any) -> None:
    x_a, x_b = np.float32([[20.5, 1e30, -1e30, 20, -100]]), np.float32([[1e30, -1e30, 0, -80, 90]])
    zeros = np.zeros(5, np.float32)
    there = [card.array(array) for array in (x_a, x_b, zeros, zeros, x_a, x_b)]
    gates.gate_control(*there[:4], g_out=there[4], beta_out=there[5])
    g, beta = gates.gate_control(x_a, x_b, zeros, zeros)
    np.testing.assert_allclose(card.host(there[4]), g, rtol=3e-6, atol=1e-40)
    np.testing.assert_allclose(card.host(there[5]), beta, rtol=3e-6)


@pytest.mark.gpu
def test_prepared_and_captured_calls_equal_eager_ones(card: Any) -> None:
    from tests.helpers.replay import require_same, twice_three_ways

    rng = np.random.default_rng(4)
    arrays = {"a": random_bits(rng, 5, 32), "b": random_bits(rng, 5, 32), "log": random_bits(rng, 32), "bias": random_bits(rng, 32)}
    arrays |= {"g": np.zeros((5, 32), np.float32), "beta": np.zeros((5, 32), np.float32)}
    ways = twice_three_ways(
        card,
        "gates",
        gates.gate_control,
        arrays,
        lambda a: ((a["a"], a["b"], a["log"], a["bias"]), {"g_out": a["g"], "beta_out": a["beta"]}),
    )
    require_same(ways)
    assert ways[0]["g"].any()
