"""Projections and look-ups: their arguments and their NumPy backend anywhere, their kernels against float64 and the reference on a GPU."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpukit.compile.cuda_c import source_path
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels import linear as ops
from gpukit.launch import overlapping
from tests.helpers.bf16 import bits, numbers, random_bits

linear, embed = ops.linear, ops.embed
X, W, OUT = bits(np.ones((2, 64))), bits(np.ones((8, 64))), np.zeros((2, 8), np.uint16)
IDS, TABLE = np.array([1, 0]), bits(np.ones((3, 8)))
READ_ONLY = OUT.copy()
READ_ONLY.flags.writeable = False
MEMORY = np.zeros((4, 64), np.uint16)

VALUE, TYPE = ArgumentError, ArgumentTypeError
BAD_CALLS = [
    (lambda: linear([1], W, out=OUT), TYPE, "x: expected an array .* got list"),
    (lambda: linear(X.view(np.float16), W, out=OUT), TYPE, "x: expected dtype bfloat16 or uint16, got float16"),
    (lambda: linear(X[0], W, out=OUT), VALUE, r"x: expected 2 dimensions, got shape \(64,\)"),
    (lambda: linear(X[:, :33], W, out=OUT), VALUE, r"x: expected rows of a multiple of 32 elements, less than 134217728, got shape \(2, 33\)"),
    (lambda: linear(X[:, :0], W[:, :0], out=OUT), VALUE, "x: expected rows of a multiple of 32 elements"),
    (lambda: linear(X[:, ::2], W, out=OUT), VALUE, "x: expected the last 1 dimension contiguous"),
    (lambda: linear(X[:, :32], W, out=OUT), VALUE, r"weight: expected shape \(outputs, 32\), the inputs of x, got \(8, 64\)"),
    (lambda: linear(X[:, :32], W[:, :32], out=OUT), VALUE, "weight: expected a contiguous array"),
    (lambda: linear(X, W.astype(np.float32), out=OUT), TYPE, "weight: expected dtype bfloat16 or uint16, got float32"),
    (lambda: linear(X, W, out=OUT[:1]), VALUE, r"out: expected shape \(2, 8\) like x and weight, got \(1, 8\)"),
    (lambda: linear(X, W, out=OUT.astype(np.float64)), TYPE, "out: expected dtype float32 or bfloat16 or uint16, got float64"),
    (lambda: linear(X, W, out=READ_ONLY), VALUE, "out: expected a writable array"),
    (lambda: linear(X, W, out=OUT, residual=OUT[:, :7]), VALUE, r"residual: expected shape \(2, 8\)"),
    (lambda: linear(X, W, out=OUT, residual=X[:, :8].astype(np.float32)), TYPE, "residual: expected dtype bfloat16 or uint16, got float32"),
    (lambda: linear(MEMORY[:2], W, out=MEMORY[1:3, :8]), VALUE, "out: expected memory apart from x"),
    (lambda: linear(X, MEMORY, out=MEMORY[:2, :4]), VALUE, "out: expected memory apart from weight"),
    (lambda: linear(X, W, out=MEMORY[:2, :8], residual=MEMORY[1:3, :8]), VALUE, "out: expected memory apart from residual"),
    (lambda: linear(MEMORY[:2, 4:36], W[:, :32].copy(), out=OUT), VALUE, "x: expected an address that is a multiple of 16, got 0x"),
    (lambda: linear(X, MEMORY.reshape(-1)[4:196].reshape(3, 64)), VALUE, "weight: expected an address that is a multiple of 16, got 0x"),
    (lambda: linear(np.zeros((2, 68), np.uint16)[:, :64], W, out=OUT), VALUE, "x: expected rows at a stride that is a multiple .* got 68"),
    (lambda: embed(IDS.astype(np.uint8), TABLE), TYPE, "ids: expected dtype int32 or int64, got uint8"),
    (lambda: embed(IDS[:, None], TABLE), VALUE, r"ids: expected 1 dimension, got shape \(2, 1\)"),
    (lambda: embed(IDS, TABLE[0]), VALUE, r"table: expected 2 dimensions, got shape \(8,\)"),
    (lambda: embed(IDS, TABLE, out=OUT[:1]), VALUE, r"out: expected shape \(2, 8\) like ids and table, got \(1, 8\)"),
    (lambda: embed(IDS, MEMORY, out=MEMORY[1:3]), VALUE, "out: expected memory apart from table"),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[message for _, _, message in BAD_CALLS])
def test_bad_arguments_are_named_and_nothing_is_written(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
    assert not OUT.any() and not MEMORY.any()


def test_numpy_arrays_run_the_reference_and_new_outputs_have_the_dtype_of_the_input() -> None:
    made = linear(X.view(ml_dtypes.bfloat16), W)
    assert made.dtype == ml_dtypes.bfloat16 and (made.astype(float) == 64).all()
    hidden = bits(np.ones((2, 8)))
    assert linear(X, W, out=hidden, residual=hidden) is hidden and (numbers(hidden) == 65).all()
    assert linear(X[:0], W).shape == (0, 8) and linear(X, W[:0]).shape == (2, 0)
    # One row has no stride.
    assert (numbers(linear(np.pad(X, ((0, 0), (0, 4)))[:1, :64], W)) == 64).all()
    assert embed(IDS, TABLE.view(ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16 and embed(IDS[:0], TABLE).shape == (0, 8)


def test_the_constants_of_the_plan_are_those_of_the_kernel() -> None:
    source = source_path("linear").read_text()
    constants = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", source)}
    assert tuple(constants[name] for name in ("MOST_WARPS", "STEP", "EMBED_THREADS")) == (ops._MOST_WARPS, ops._STEP, ops._EMBED_THREADS)
    kernels = re.findall(r"gpukit_linear_(\d+)\(PARAMETERS\)\s*{\s*run<(\d+), (\d+), \d+>", source)
    assert all(name == tokens for name, tokens, _ in kernels)
    assert {int(tokens): constants["TILE_ROWS"] * int(tiles) for _, tokens, tiles in kernels} == ops._ROWS


# On a GPU.


@pytest.fixture
def card() -> Iterator[Any]:
    """A GPU through CuPy, whose arrays lie between guard bytes."""
    from tests.helpers.device import CupyDevice

    made = CupyDevice()
    yield made
    made.check_guards()


def check_product(found: np.ndarray, expected: np.ndarray) -> None:
    """bfloat16 within its rounding and what float32 sums differ by, float32 within 1e-3 of the norm; the tensor cores add a little coarser."""
    got = found.astype(np.float64) if found.dtype == np.float32 else numbers(found)
    norm = np.linalg.norm(expected)
    assert np.linalg.norm(got - expected) <= (1e-3 if found.dtype == np.float32 else 4e-3) * norm if norm else not got.any()
    if found.dtype != np.float32 and expected.size:
        np.testing.assert_allclose(got, expected, rtol=2**-8, atol=1e-3 * np.abs(expected).max())


SHAPES = [
    (0, 32, 8), (1, 32, 1), (1, 2048, 4100), (2, 4096, 2048), (3, 96, 17), (5, 128, 388), (8, 2048, 12352), (9, 544, 4097), (16, 1024, 4104),
    (17, 64, 70), (24, 2048, 33), (32, 2048, 12352), (33, 5120, 40), (64, 2048, 4097), (65, 64, 130), (130, 512, 257), (4, 6144, 5120),
]  # fmt: skip


@functools.lru_cache(maxsize=1)
def case(tokens: int, inputs: int, outputs: int) -> tuple[np.ndarray, ...]:
    """Tokens in wider rows, a weight, residuals in wider rows, and the product in float64."""
    rng = np.random.default_rng(tokens + inputs)
    x, weight = random_bits(rng, tokens, inputs + 8), random_bits(rng, outputs, inputs, scale=inputs**-0.5)
    return x, weight, random_bits(rng, tokens, outputs + 1), numbers(x[:, :inputs]) @ numbers(weight).T


# The shape changes last, so that its case is made once.
@pytest.mark.gpu
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), SHAPES)
def test_the_kernel_equals_float64(card: Any, tokens: int, inputs: int, outputs: int, dtype: type, with_residual: bool) -> None:
    x, weight, residual, expected = case(tokens, inputs, outputs)
    out = np.full((tokens, outputs + 3), 7, dtype)
    there = [card.array(array) for array in (x, weight, residual, out)]
    added = there[2][:, :outputs] if with_residual else None
    linear(there[0][:, :inputs], there[1], out=there[3][:, :outputs], residual=added)
    found = card.host(there[3])
    check_product(np.ascontiguousarray(found[:, :outputs]), expected + numbers(residual[:, :outputs]) if with_residual else expected)
    assert (found[:, outputs:] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 16), (128, 388), (2048, 4104), (4096, 2048), (544, 4097)])
def test_a_row_has_the_same_bits_in_any_batch(card: Any, inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(inputs)
    x, weight = random_bits(rng, 130, inputs), card.array(random_bits(rng, outputs, inputs, scale=inputs**-0.5))
    # A row beside infinities and NaN keeps its own numbers.
    x[7] = 0x7F80
    x[129] = 0x7FC0
    there, together = card.array(x), card.array(np.zeros((130, outputs), np.float32))
    linear(there, weight, out=together)
    expected = card.host(together)
    assert np.isfinite(np.delete(expected, [7, 129], axis=0)).all()
    for tokens in (1, 2, 4, 8, 9, 16, 20, 32, 45, 64, 100):
        for first in (0, 3, 30):
            some = card.array(np.zeros((tokens, outputs), np.float32))
            linear(there[first : first + tokens], weight, out=some)
            assert np.array_equal(card.host(some).view(np.uint32), expected[first : first + tokens].view(np.uint32)), (tokens, first)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_the_output_may_take_the_place_of_the_residual(card: Any, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    x, weight = card.array(random_bits(rng, tokens, 256)), card.array(random_bits(rng, 128, 256, scale=0.06))
    hidden, apart = card.array(random_bits(rng, tokens, 128)), card.array(np.zeros((tokens, 128), np.uint16))
    linear(x, weight, out=apart, residual=hidden)
    linear(x, weight, out=hidden, residual=hidden)
    assert (card.host(hidden) == card.host(apart)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_kernels_that_start_early_wait_for_what_is_in_front(card: Any, tokens: int) -> None:
    """A chain of projections, each of what the one before it writes, and of a weight that one of them writes."""
    import cupy

    import gpukit
    from gpukit.graphs import capture

    gpukit.warmup(subjects=["linear"])
    rng = np.random.default_rng(tokens)
    weights = [random_bits(rng, 2048, 512, scale=0.04), random_bits(rng, 512, 2048, scale=0.02)]
    start = random_bits(rng, tokens, 512)
    ends = []
    for captured in (False, True):
        wide, narrow, written = (card.array(np.zeros(shape, np.uint16)) for shape in ((tokens, 2048), (tokens, 512), (512, 512)))
        x, (up, down) = card.array(start), [card.array(weight) for weight in weights]

        def chain(stream: Any, x: Any = x, up: Any = up, down: Any = down, wide: Any = wide, narrow: Any = narrow, written: Any = written) -> None:
            for _ in range(20):
                linear(x, up, out=wide, stream=stream)
                linear(wide, down, out=x, residual=x, stream=stream)
            linear(up[:512], up[:512], out=written, stream=stream)
            linear(x, written, out=narrow, stream=stream)

        if captured:
            stream = cupy.cuda.Stream(non_blocking=True)
            cupy.cuda.Device().synchronize()
            with capture(stream) as graph, overlapping():
                chain(stream)
            graph.launch()
            stream.synchronize()
        else:
            chain(None)
        ends.append([card.host(array) for array in (x, narrow, written)])
    assert all(np.array_equal(eager, graph) for eager, graph in zip(*ends, strict=True)) and ends[0][1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("id_dtype", ["int32", "int64"])
@pytest.mark.parametrize("padding", [0, 8, 3])
@pytest.mark.parametrize(("tokens", "width"), [(0, 8), (1, 2048), (5, 7), (33, 128), (64, 1032), (3, 1)])
def test_embed_equals_the_reference(card: Any, tokens: int, width: int, padding: int, id_dtype: str) -> None:
    rng = np.random.default_rng(width)
    ids = rng.choice([-1, -(2**31), 0, 3, 10, 11, 2**31 - 1], tokens).astype(id_dtype)
    table, out = random_bits(rng, 11, width + padding), np.full((tokens, width + padding), 7, np.uint16)
    there = [card.array(array) for array in (ids, table, out)]
    signals = Signal(), Signal(like=there[0])
    for (i, t, o), signal in (((ids, table, out), signals[0]), (there, signals[1])):
        embed(i, t[:, :width], out=o[:, :width], signal=signal)
    assert (card.host(there[2]) == out).all() and signals[1].counts() == signals[0].counts()


@pytest.mark.gpu
def test_bad_device_arguments_are_named(card: Any) -> None:
    x, weight, out = card.array(X), card.array(W), card.array(OUT)
    with pytest.raises(ArgumentTypeError, match="weight: expected an array in device 0 like the first argument, got one in host memory"):
        linear(x, W, out=out)
    with pytest.raises(ArgumentError, match="signal: expected a Signal of device 0"):
        linear(x, weight, out=out, signal=Signal())
    wide = card.array(np.zeros((2, 68), np.uint16))
    with pytest.raises(ArgumentError, match="x: expected rows at a stride that is a multiple of 8 elements .* got 68"):
        linear(wide[:, :64], weight, out=out)
    with pytest.raises(ArgumentError, match="x: expected an address that is a multiple of 16"):
        linear(card.array(np.zeros((2, 72), np.uint16))[:, 4:68], weight, out=out)
    assert not card.host(out).any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ops.__all__)
def test_prepared_and_captured_calls_equal_eager_ones(card: Any, name: str) -> None:
    from tests.helpers.replay import require_same, twice_three_ways

    rng = np.random.default_rng(4)
    arrays = {"x": random_bits(rng, 5, 256), "weight": random_bits(rng, 256, 256), "ids": np.array([3, -1, 255, 0, 9])}
    arrays["out"] = np.zeros((5, 256), np.uint16)
    inputs = ("x", "weight") if name == "linear" else ("ids", "weight")
    ways = twice_three_ways(card, "linear", getattr(ops, name), arrays, lambda a: (tuple(a[key] for key in inputs), {"out": a["out"]}))
    require_same(ways)
    assert ways[0]["out"].any()


def test_rows_over_their_ids_are_refused() -> None:
    memory = np.zeros(8, np.int64)
    with pytest.raises(ArgumentError, match="out: expected memory apart from ids"):
        ops.embed(memory[:2], np.zeros((3, 4), np.uint16), out=memory.view(np.uint16)[:8].reshape(2, 4))
