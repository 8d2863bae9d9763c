"""The reference of row-split integers: every code of every format, the encoder against whole-number arithmetic, and properties of both."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpukit.errors import ArgumentError, Signal
from gpukit.kernels._row_split import FORMATS, RowSplit
from gpukit.kernels.reference import row_split

NAMES = sorted(FORMATS)


def packed(codes: np.ndarray, name: str) -> RowSplit:
    made = RowSplit.empty(name, *codes.shape)
    row_split.pack_codes(codes, name, made.base, made.high)
    return made


def unpacked(weights: RowSplit) -> np.ndarray:
    return row_split.unpack_codes(weights.base, weights.high, weights.format, np.zeros(weights.shape, np.int8))


def encoded(values: np.ndarray, name: str) -> RowSplit:
    made = RowSplit.empty(name, *values.shape)
    row_split.quantize(values, name, made.base, made.high, made.scales)
    return made


def decoded(weights: RowSplit) -> np.ndarray:
    return row_split.dequantize(weights.base, weights.high, weights.scales, weights.format, np.zeros(weights.shape, np.float32))


def bits_one_by_one(codes: list[int], name: str) -> tuple[bytes, bytes]:
    """The planes of one group, written bit by bit as big whole numbers."""
    kind = FORMATS[name]
    low_bits = min(kind.bits, 8) if kind.bits == 8 else 4
    low = high = 0
    for element, code in enumerate(codes):
        pattern = code & (1 << kind.bits) - 1
        low |= (pattern & (1 << low_bits) - 1) << low_bits * element
        high |= pattern >> low_bits << (kind.bits - low_bits) * element
    return low.to_bytes(kind.base_bytes, "little"), high.to_bytes(kind.high_bytes, "little")


def code_one_by_one(values: np.ndarray, name: str) -> tuple[np.float16, list[int]]:
    """The encoder with exact fractions, each step rounded to float32 by one conversion."""
    kind = FORMATS[name]
    largest = max(abs(float(value)) for value in values)
    scale = np.float16(np.float32(largest / kind.most))
    if scale == 0 and largest > 0:
        scale = np.float16(2.0**-24)
    if scale == 0:
        return scale, [0] * len(values)
    reciprocal = Fraction(float(np.float32(1 / float(scale))))
    codes = [round(Fraction(float(np.float32(float(Fraction(float(value)) * reciprocal))))) for value in values]
    return scale, [min(max(code, kind.least), kind.most) for code in codes]


@pytest.mark.parametrize("name", NAMES)
def test_every_code_at_every_place_comes_back(name: str) -> None:
    kind = FORMATS[name]
    every = np.arange(kind.least, kind.most + 1)
    codes = every[(np.arange(kind.group) + np.arange(len(every))[:, None]) % len(every)].astype(np.int8)
    weights = packed(codes, name)
    assert (unpacked(weights) == codes).all()
    for row, own in enumerate(codes.tolist()):
        high = weights.high[row].tobytes() if kind.high_bytes else b""
        assert (weights.base[row].tobytes(), high) == bits_one_by_one(own, name)


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_of_every_plane_comes_back(name: str) -> None:
    kind, rng = FORMATS[name], np.random.default_rng(0)
    base = rng.integers(0, 256, (300, 2, 32)).astype(np.uint8)
    if name == "w8":
        base[base == 128] = 0
    high = rng.integers(0, 256, (300, 2, kind.high_bytes)).astype(np.uint8) if kind.high_bytes else None
    again = packed(unpacked(RowSplit(name, base, high, np.zeros((300, 2), np.float16))), name)
    assert (again.base == base).all() and (high is None or (again.high == high).all())


@pytest.mark.parametrize("name", NAMES)
def test_groups_with_other_codes_are_counted_and_left(name: str) -> None:
    kind, signal = FORMATS[name], Signal()
    codes = np.ones((3, 2 * kind.group), np.int8)
    wrong = -128 if name == "w8" else kind.most + 1
    codes[1, 5] = codes[1, 6] = codes[2, -1] = wrong
    base, high = np.full((3, 2, 32), 0xA5, np.uint8), np.full((3, 2, kind.high_bytes), 0xA5, np.uint8)
    row_split.pack_codes(codes, name, base, high if kind.high_bytes else None, signal=signal)
    assert signal.counts() == {"out_of_range": 2}
    assert (base[1, 0] == 0xA5).all() and (base[2, 1] == 0xA5).all() and (high[1, 0] == 0xA5).all() and not (base[0] == 0xA5).any()


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_encoder_equals_exact_fractions(name: str, data: st.DataObject) -> None:
    kind = FORMATS[name]
    number = st.floats(-60000 * kind.most, 60000 * kind.most, width=32) | st.floats(-(2.0**-10), 2.0**-10, width=32) | st.just(-0.0)
    values = np.array(data.draw(st.lists(number, min_size=kind.group, max_size=kind.group)), np.float32)[None]
    if data.draw(st.booleans()):
        values *= np.float32(2.0 ** data.draw(st.integers(-40, -4)))
    weights = encoded(values, name)
    scale, codes = code_one_by_one(values[0], name)
    assert weights.scales.view(np.uint16)[0, 0] == scale.view(np.uint16)
    assert unpacked(weights)[0].tolist() == codes
    products = decoded(weights)
    assert (products == np.array(codes) * float(scale)).all()
    if scale >= 2.0**-14:
        again = encoded(products, name)
        assert (again.base == weights.base).all() and again.scales == weights.scales and (again.high is None or (again.high == weights.high).all())


@pytest.mark.parametrize("name", NAMES)
def test_encoding_what_was_decoded_gives_the_same_at_every_normal_scale(name: str) -> None:
    kind = FORMATS[name]
    scales = np.arange(0x0400, 0x7C00, dtype=np.uint16).view(np.float16)
    rng = np.random.default_rng(1)
    codes = rng.integers(-kind.most, kind.most + 1, (len(scales), kind.group))
    codes[np.arange(len(scales)), rng.integers(0, kind.group, len(scales))] = rng.choice([-kind.most, kind.most], len(scales))
    values = (codes * scales.astype(np.float32)[:, None]).astype(np.float32)
    weights = encoded(values, name)
    assert (weights.scales[:, 0] == scales).all() and (unpacked(weights) == codes).all() and (decoded(weights) == values).all()


@pytest.mark.parametrize("name", NAMES)
def test_edges_of_the_scale(name: str) -> None:
    kind = FORMATS[name]
    values = np.zeros((4, kind.group), np.float32)
    values[1, 3] = -(2.0**-149)  # the scale of a group that is not zero is not either
    values[2, 0] = 65504.0 * kind.most
    values[3, 0] = -0.0
    weights = encoded(values, name)
    assert weights.scales.view(np.uint16)[:, 0].tolist() == [0, 1, 0x7BFF, 0]
    assert unpacked(weights)[2, 0] == kind.most and not unpacked(weights)[[0, 1, 3]].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 65520.0])
@pytest.mark.parametrize("name", NAMES)
def test_what_has_no_scale_is_refused_or_counted(name: str, bad: float) -> None:
    kind, signal = FORMATS[name], Signal()
    values = np.ones((2, 2 * kind.group), np.float32)
    values[1, 1] = bad * (kind.most if bad == 65520.0 else 1)
    made = RowSplit.empty(name, *values.shape)
    made.base[:], made.scales[:] = 0xA5, 9
    with pytest.raises(ArgumentError, match="values: expected finite numbers, .* got others in row 1, group 0"):
        row_split.quantize(values, name, made.base, made.high, made.scales)
    assert (made.base == 0xA5).all() and (made.scales == 9).all()
    row_split.quantize(values, name, made.base, made.high, made.scales, signal=signal)
    assert signal.counts() == {"out_of_range": 1}
    assert (made.base[1, 0] == 0xA5).all() and made.scales[1, 0] == 9 and not (made.base[0] == 0xA5).any() and (made.scales[0] != 9).all()


def test_bfloat16_values_are_taken_as_they_are() -> None:
    values = np.random.default_rng(2).standard_normal((3, 128)).astype(np.float32).view(np.uint32) & 0xFFFF0000
    one, other = encoded(values.view(np.float32), "q6"), encoded((values >> 16).astype(np.uint16), "q6")
    assert (one.base == other.base).all() and (one.high == other.high).all() and (one.scales == other.scales).all()
