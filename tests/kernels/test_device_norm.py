"""Norms: their arguments and their NumPy backend anywhere, their kernel against the reference on a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpukit.compile.cuda_c import source_path
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels import norm
from tests.helpers.bf16 import bits, check, numbers, random_bits

X, W, OUT = bits(np.ones((2, 8))), bits(np.ones(8)), np.zeros((2, 8), np.uint16)
plain, gated = norm.rms_norm, norm.gated_rms_norm
READ_ONLY = X.copy()
READ_ONLY.flags.writeable = False

VALUE, TYPE = ArgumentError, ArgumentTypeError
BAD_CALLS = [
    (lambda: plain([1], W, out=OUT), TYPE, "x: expected an array .* got list"),
    (lambda: plain(X.view(np.float16), W, out=OUT), TYPE, "x: expected dtype bfloat16 or uint16, got float16"),
    (lambda: plain(X[0], W, out=OUT), VALUE, r"x: expected 2 or 3 dimensions, got shape \(8,\)"),
    (lambda: plain(X[:, ::2], W[:4], out=OUT[:, :4]), VALUE, r"x: expected the last 1 dimension contiguous, .* strides \(8, 2\)"),
    (lambda: plain(X[:, :0], W[:0], out=OUT[:, :0]), VALUE, "x: expected rows of at least one element"),
    (lambda: plain(X, W[:7], out=OUT), VALUE, r"weight: expected shape \(8,\), the width of x, got \(7,\)"),
    (lambda: plain(X, W.astype(np.float32), out=OUT), TYPE, "weight: expected dtype bfloat16 or uint16, got float32"),
    (lambda: plain(X, W, out=OUT[:1]), VALUE, r"out: expected shape \(2, 8\) like x, got \(1, 8\)"),
    (lambda: plain(X, W, out=READ_ONLY), VALUE, "out: expected a writable array"),
    (lambda: plain(X, W, out=np.lib.stride_tricks.as_strided(OUT, (2, 8), (4, 2))), VALUE, "out: expected elements apart from each other"),
    (lambda: plain(X, W, out=OUT, epsilon=-1e-6), VALUE, "epsilon: expected a finite number of at least 0, got -1e-06"),
    (lambda: plain(X, W, out=OUT, epsilon=float("nan")), VALUE, "epsilon: expected a finite number .* got nan"),
    (lambda: plain(X, W, out=OUT, epsilon=None), TYPE, "epsilon: expected a number, got NoneType"),
    (lambda: gated(X, None, W, out=OUT), TYPE, "gate: expected an array, got None"),
    (lambda: gated(X, X[:1], W, out=OUT), VALUE, r"gate: expected shape \(2, 8\) like x, got \(1, 8\)"),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[message for _, _, message in BAD_CALLS])
def test_bad_arguments_are_named_and_nothing_is_written(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
    assert not OUT.any()


def test_numpy_arrays_run_the_reference_and_new_outputs_have_the_dtype_of_the_input() -> None:
    x = X.view(ml_dtypes.bfloat16)
    made = norm.rms_norm(x, W, offset=True, epsilon=0.0)
    assert made.dtype == ml_dtypes.bfloat16 and (made.astype(float) == 2).all()
    assert norm.gated_rms_norm(X[:0], X[:0], W).shape == (0, 8)
    call = norm.gated_rms_norm.prepare(X, X, W, out=OUT.copy())
    assert call().any()


def test_the_constants_of_the_plan_are_those_of_the_kernel() -> None:
    constants = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", source_path("norm").read_text())}
    assert (constants["MOST_THREADS"], constants["STEPS"]) == (norm._MOST_THREADS, norm._STEPS)


# On a GPU.


@pytest.fixture
def card() -> Iterator[Any]:
    """A GPU through CuPy, whose arrays lie between guard bytes."""
    from tests.helpers.device import CupyDevice

    made = CupyDevice()
    yield made
    made.check_guards()


WIDTHS = [1, 2, 7, 8, 24, 64, 128, 129, 255, 256, 264, 1000, 2048, 4096, 5120, 8184, 8192, 8200, 10_007]


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("with_gate", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 17])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_kernel_equals_the_reference(card: Any, width: int, rows: int, with_gate: bool, offset: bool) -> None:
    rng = np.random.default_rng(width + rows)
    x, gate, weight = random_bits(rng, rows, width, scale=3), random_bits(rng, rows, width, scale=3), random_bits(rng, width)
    x[1:2] = 0
    out, there_out = np.zeros_like(x), card.array(np.full_like(x, 0x7FC0))
    there = [card.array(array) for array in (x, gate, weight)]
    if with_gate:
        norm.gated_rms_norm(*there, out=there_out, offset=offset)
        norm.gated_rms_norm(x, gate, weight, out=out, offset=offset)
    else:
        norm.rms_norm(there[0], there[2], out=there_out, offset=offset)
        norm.rms_norm(x, weight, out=out, offset=offset)
    check(card.host(there_out), numbers(out))


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "skip", "total"), [(128, 0, 1024), (128, 8, 1040), (128, 3, 1000), (64, 64, 273), (7, 1, 41)])
def test_heads_in_slices_of_wider_rows_keep_what_is_beside_them(card: Any, width: int, skip: int, total: int) -> None:
    """x, gate and out are heads [batch, heads, width] in rows of their own widths."""
    rng = np.random.default_rng(width)
    heads = 3
    memory = [random_bits(rng, 5, total + extra) for extra in (0, 24, 9)]
    weight = random_bits(rng, width)

    def heads_of(array: np.ndarray) -> np.ndarray:
        step = array.itemsize
        return np.lib.stride_tricks.as_strided(array[:, skip:], (5, heads, width), (array.strides[0], (width + 8) * step, step))

    expected = [array.copy() for array in memory]
    there = [card.array(array) for array in memory]
    if hasattr(there[0], "values"):
        views = [type(array)(heads_of(array.values), array.owner) for array in there]
    else:
        import cupy

        views = [
            cupy.ndarray((5, heads, width), array.dtype, array[:, skip:].data, strides=(array.strides[0], (width + 8) * 2, 2)) for array in there
        ]
    norm.gated_rms_norm(views[0], views[1], card.array(weight), out=views[2])
    norm.gated_rms_norm(heads_of(expected[0]), heads_of(expected[1]), weight, out=heads_of(expected[2]))
    found = [card.host(array) for array in there]
    assert (found[0] == memory[0]).all() and (found[1] == memory[1]).all()
    check(heads_of(found[2]), numbers(heads_of(expected[2])))
    heads_of(found[2])[...] = heads_of(memory[2])[...] = 0
    assert (found[2] == memory[2]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 8192, 9001])
@pytest.mark.parametrize("place", ["x", "gate"])
def test_the_output_may_take_the_place_of_an_input(card: Any, place: str, width: int) -> None:
    rng = np.random.default_rng(width)
    arrays = {"x": random_bits(rng, 4, width), "gate": random_bits(rng, 4, width)}
    weight, there = card.array(random_bits(rng, width)), {key: card.array(array) for key, array in arrays.items()}
    apart = card.array(np.zeros((4, width), np.uint16))
    norm.gated_rms_norm(there["x"], there["gate"], weight, out=apart)
    norm.gated_rms_norm(there["x"], there["gate"], weight, out=there[place])
    assert (card.host(there[place]) == card.host(apart)).all()


@pytest.mark.gpu
def test_a_row_has_the_same_bits_in_any_batch(card: Any) -> None:
    rng = np.random.default_rng(2)
    x, gate, weight = (card.array(random_bits(rng, *shape)) for shape in ((9, 2048), (9, 2048), (2048,)))
    together, alone = (card.array(np.zeros((9, 2048), np.uint16)) for _ in range(2))
    norm.gated_rms_norm(x, gate, weight, out=together)
    for row in range(9):
        norm.gated_rms_norm(x[row : row + 1], gate[row : row + 1], weight, out=alone[row : row + 1])
    assert (card.host(together) == card.host(alone)).all()


@pytest.mark.gpu
def test_bad_device_arguments_are_named(card: Any) -> None:
    x = card.array(X)
    with pytest.raises(ArgumentTypeError, match="weight: expected an array in device 0 like the first argument, got one in host memory"):
        norm.rms_norm(x, W, out=x)
    with pytest.raises(ArgumentError, match="signal: expected a Signal of device 0"):
        norm.rms_norm(x, card.array(W), out=x, signal=Signal())
    assert (card.host(x) == X).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", norm.__all__)
def test_prepared_and_captured_calls_equal_eager_ones(card: Any, name: str) -> None:
    from tests.helpers.replay import require_same, twice_three_ways

    rng = np.random.default_rng(4)
    arrays = {
        "x": random_bits(rng, 5, 1024),
        "gate": random_bits(rng, 5, 1024),
        "weight": random_bits(rng, 1024),
        "out": np.zeros((5, 1024), np.uint16),
    }
    inputs = ("x", "gate", "weight") if name == "gated_rms_norm" else ("x", "weight")
    ways = twice_three_ways(card, "norm", getattr(norm, name), arrays, lambda a: (tuple(a[key] for key in inputs), {"out": a["out"]}))
    require_same(ways)
    assert ways[0]["out"].any()
