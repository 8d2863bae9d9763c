"""Row-split integers: arguments and NumPy backend anywhere, the kernels bit for bit against the reference on a GPU."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpukit.compile.cuda_c import source_path
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels import row_split as ops
from gpukit.kernels.row_split import FORMATS, RowSplit, dequantize, pack_codes, quantize, unpack_codes

NAMES = sorted(FORMATS)
CODES, VALUES = np.zeros((2, 128), np.int8), np.ones((2, 128), np.float32)
Q4, Q5 = RowSplit.empty("q4", 2, 128), RowSplit.empty("q5", 2, 128)
for planes in (Q4, Q5):
    planes.base[:], planes.scales[:] = 0, 0
READ_ONLY = np.zeros((2, 2, 32), np.uint8)
READ_ONLY.flags.writeable = False

VALUE, TYPE = ArgumentError, ArgumentTypeError
BAD_CALLS = [
    (lambda: pack_codes(CODES, "q3"), VALUE, "format: expected one of q4, q5, q6, w8, got 'q3'"),
    (lambda: pack_codes(CODES.astype(int), "q4"), TYPE, "codes: expected dtype int8, got int64"),
    (lambda: pack_codes(CODES[:, :96], "q4"), VALUE, "codes: expected a contiguous array"),
    (lambda: pack_codes(CODES[:, :96].copy(), "q4"), VALUE, "codes: expected rows of a multiple of 64 elements, the group of q4"),
    (lambda: pack_codes(CODES, "q5", base=Q5.base), VALUE, r"high: expected an array of shape \(2, 2, 8\), the plane of q5, got None"),
    (lambda: pack_codes(CODES, "q6", base=Q5.base, high=Q5.high), VALUE, r"high: expected shape \(2, 2, 16\), got \(2, 2, 8\)"),
    (lambda: pack_codes(CODES, "q4", base=Q5.base, high=Q5.high), VALUE, "high: expected None, because q4 has no such plane"),
    (lambda: pack_codes(CODES, "w8", base=Q4.base), VALUE, r"base: expected shape \(2, 4, 32\), got \(2, 2, 32\)"),
    (lambda: pack_codes(CODES, "q4", base=READ_ONLY), VALUE, "base: expected a writable array"),
    (lambda: unpack_codes(Q4.base[0], None, "q4"), VALUE, "base: expected 3 dimensions"),
    (lambda: unpack_codes(Q4.base, None, "q4", out=CODES[:1]), VALUE, r"out: expected shape \(2, 128\), got \(1, 128\)"),
    (lambda: quantize(CODES, "q4"), TYPE, "values: expected dtype float32 or bfloat16 or uint16, got int8"),
    (lambda: quantize(VALUES, "q4", out=Q5), VALUE, "out: expected a RowSplit of format q4, got q5"),
    (lambda: quantize(VALUES, "q4", out=Q4.base), TYPE, "out: expected a RowSplit, got ndarray"),
    (lambda: quantize(VALUES[:1], "q4", out=Q4), VALUE, r"out.base: expected shape \(1, 2, 32\)"),
    (lambda: quantize(VALUES * np.nan, "q4", out=Q4), VALUE, "values: expected finite numbers"),
    (lambda: dequantize(VALUES), TYPE, "weights: expected a RowSplit, got ndarray"),
    (lambda: dequantize(RowSplit("q4", Q4.base, None, Q4.scales[:, :1].copy())), VALUE, r"weights.base: expected shape \(2, 1, 32\)"),
    (lambda: dequantize(RowSplit("q4", Q4.base, None, VALUES)), TYPE, "weights.scales: expected dtype float16, got float32"),
    (lambda: dequantize(Q4, out=VALUES[:1]), VALUE, "out: expected shape"),
    (lambda: RowSplit.empty("q4", 2, 96), VALUE, "columns: expected a multiple of 64, the group of q4, got 96"),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[message for _, _, message in BAD_CALLS])
def test_bad_arguments_are_named_and_nothing_is_written(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
    assert not any(array.any() for array in (CODES, READ_ONLY, Q4.base, Q4.scales)) and (VALUES == 1).all()


@pytest.mark.parametrize("name", NAMES)
def test_numpy_arrays_run_the_reference(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((3, 128)).astype(np.float32)
    weights = quantize(values, name)
    assert weights.shape == (3, 128) and weights.format == name
    codes = unpack_codes(weights.base, weights.high, name)
    assert codes.dtype == np.int8 and (pack_codes(codes, name)[0] == weights.base).all()
    error = np.abs(dequantize(weights) - values).reshape(3, -1, FORMATS[name].group)
    assert (error <= weights.scales.astype(float)[..., None] / 2 * 1.01).all()
    assert quantize(values[:0], name).shape == (0, 128) and quantize(values[:, :0].copy(), name).shape == (3, 0)


def test_addresses_are_asked_for_on_numpy_as_on_a_device() -> None:
    raw = np.zeros(4096, np.uint8)
    with pytest.raises(ArgumentError, match="base: expected an address that is a multiple of 16"):
        pack_codes(CODES, "q4", base=raw[1 : 1 + 128].reshape(2, 2, 32))
    with pytest.raises(ArgumentError, match="values: expected an address that is a multiple of 16"):
        quantize(raw[4 : 4 + 1024].view(np.float32).reshape(2, 128), "q4")
    assert not raw.any()


def test_the_constants_of_the_plan_are_those_of_the_kernel() -> None:
    constants = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", source_path("row_split").read_text())}
    assert (constants["THREADS"], constants["OCT"]) == (ops._THREADS, ops._OCT)


# On a GPU.

SHAPES = [(0, 64), (1, 64), (3, 0), (1, 128), (5, 192), (257, 2048), (7, 64 * 33)]


def interesting(rng: np.random.Generator, rows: int, columns: int, kind: Any) -> np.ndarray:
    """Numbers of every size, with ties, zeros, denormals, and groups that have no scale."""
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    grouped = values.reshape(rows, columns // kind.group, kind.group)
    grouped *= np.exp2(rng.integers(-60, 14, (*grouped.shape[:2], 1))).astype(np.float32)
    choice = rng.random(grouped.shape[:2])
    grouped[choice < 0.1] = (rng.integers(-2 * kind.most, 2 * kind.most + 1, grouped.shape)[choice < 0.1] / 2).astype(np.float32)
    grouped[(choice >= 0.1) & (choice < 0.15)] = 0
    grouped[(choice >= 0.15) & (choice < 0.2)] *= np.float32(2.0**-100)
    for bound, bad in ((0.85, np.nan), (0.9, np.inf), (0.95, 65520.0 * kind.most)):
        grouped[choice > bound, 3] = bad
    return values


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_encoder_and_decoder_equal_the_reference_to_the_bit(card: Any, rows: int, columns: int, name: str, dtype: Any) -> None:
    kind, rng = FORMATS[name], np.random.default_rng(rows)
    values = interesting(rng, rows, columns, kind).astype(dtype)
    values = values if dtype is np.float32 else values.view(np.uint16)
    here = RowSplit.empty(name, rows, columns)
    for array in (here.base, here.high, here.scales):
        if array is not None:
            array.view(np.uint8)[...] = 0x5A
    there = RowSplit(name, *(None if array is None else card.array(array) for array in (here.base, here.high, here.scales)))
    on_device = card.array(values)
    signals = Signal(), Signal(like=there.base)
    quantize(values, name, out=here, signal=signals[0])
    assert quantize(on_device, name, out=there, signal=signals[1]) is there
    for one, other in ((here.base, there.base), (here.high, there.high), (here.scales.view(np.uint16), there.scales)):
        if one is not None:
            assert (card.host(other).view(one.dtype) == one).all()
    assert signals[0].counts() == signals[1].counts()
    assert (card.host(dequantize(there)).view(np.uint32) == dequantize(here).view(np.uint32)).all()
    codes = unpack_codes(here.base, here.high, name)
    assert (card.host(unpack_codes(there.base, there.high, name)) == codes).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_every_code_at_every_place_comes_back(card: Any, name: str) -> None:
    kind = FORMATS[name]
    every = np.arange(kind.least - 1, kind.most + 2)
    codes = every[(np.arange(2 * kind.group) + np.arange(len(every))[:, None]) % len(every)].astype(np.int8)
    codes[::3] = np.clip(codes[::3], kind.least, kind.most)
    base, high = np.full((len(every), 2, 32), 0xA5, np.uint8), np.full((len(every), 2, kind.high_bytes), 0xA5, np.uint8)
    there = card.array(base), card.array(high) if kind.high_bytes else None
    signals = Signal(), Signal(like=there[0])
    pack_codes(codes, name, base=base, high=high if kind.high_bytes else None, signal=signals[0])
    pack_codes(card.array(codes), name, base=there[0], high=there[1], signal=signals[1])
    assert (card.host(there[0]) == base).all() and (there[1] is None or (card.host(there[1]) == high).all())
    assert signals[0].counts() == signals[1].counts()
    assert (card.host(unpack_codes(*there, name)) == unpack_codes(base, high if kind.high_bytes else None, name)).all()


@pytest.mark.gpu
def test_bad_device_arguments_are_named(card: Any) -> None:
    import cupy

    raw = cupy.zeros(4096, cupy.uint8)
    off = raw[1 : 1 + 128].reshape(2, 2, 32)
    with pytest.raises(ArgumentError, match="base: expected an address that is a multiple of 16"):
        pack_codes(card.array(CODES), "q4", base=off)
    with pytest.raises(ArgumentError, match="values: expected an address that is a multiple of 16"):
        quantize(raw[4 : 4 + 1024].view(cupy.float32).reshape(2, 128), "q4")
    with pytest.raises(ArgumentTypeError, match="out.base: expected an array in device 0 like the first argument, got one in host memory"):
        quantize(card.array(VALUES), "q4", out=Q4)
    assert not raw.any()


def test_planes_that_share_memory_are_refused() -> None:
    codes, memory = np.zeros((2, 64), np.int8), np.zeros((2, 1, 48), np.uint8)
    base, high = memory[..., :32].copy(), np.zeros((2, 1, 16), np.uint8)
    with pytest.raises(ArgumentError, match="base: expected an array apart from codes"):
        pack_codes(codes, "q6", base=codes.view(np.uint8).reshape(-1)[:64].reshape(2, 1, 32), high=high)
    with pytest.raises(ArgumentError, match="high: expected an array apart from base"):
        pack_codes(codes, "q6", base=base, high=base.reshape(-1)[:32].reshape(2, 1, 16))
    with pytest.raises(ArgumentError, match="out: expected an array apart from base"):
        planes = np.zeros(128, np.uint8)
        unpack_codes(planes[:64].reshape(2, 1, 32), None, "q4", out=planes.view(np.int8).reshape(2, 64))
