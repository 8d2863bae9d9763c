"""The reference of projections and look-ups against float64 and brute force."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gpukit.errors import Signal
from gpukit.kernels.reference import linear
from tests.helpers.bf16 import bits, numbers, random_bits


def oracle(x, weight, residual=None):
    """The products in float64."""
    product = numbers(x) @ numbers(weight).T
    return product if residual is None else product + numbers(residual)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(0, 32, 4), (1, 32, 1), (3, 96, 17), (8, 256, 40), (70, 64, 5)])
def test_against_float64(tokens, inputs, outputs, with_residual):
    rng = np.random.default_rng(tokens + inputs)
    x, weight, residual = random_bits(rng, tokens, inputs), random_bits(rng, outputs, inputs), random_bits(rng, tokens, outputs)
    expected = oracle(x, weight, residual if with_residual else None)
    for dtype in (np.float32, np.uint16):
        out = np.zeros((tokens, outputs), dtype)
        assert linear.linear(x, weight, out, residual if with_residual else None) is out
        rounded = expected.astype(np.float32)
        np.testing.assert_array_equal(out, rounded if dtype == np.float32 else bits(rounded))


def test_the_residual_is_added_before_the_only_rounding():
    # 1 + 2^-8 is no bfloat16, and neither is half of what the residual adds.
    out = np.zeros((1, 1), np.uint16)
    x, weight = np.zeros((1, 32), np.uint16), bits(np.ones((1, 32)))
    x[0, :2] = bits([1, 2**-8])
    linear.linear(x, weight, out, bits([[2**-8]]))
    assert numbers(out)[0, 0] == 1 + 2**-7


def test_a_row_has_the_same_bits_in_any_batch():
    rng = np.random.default_rng(0)
    x, weight = random_bits(rng, 9, 320), random_bits(rng, 33, 320)
    together = linear.linear(x, weight, np.zeros((9, 33), np.float32))
    for row in range(9):
        assert (linear.linear(x[row : row + 1], weight, np.zeros((1, 33), np.float32)) == together[row]).all()


def test_bfloat16_and_its_bits_are_the_same():
    rng = np.random.default_rng(1)
    x, weight = random_bits(rng, 3, 32), random_bits(rng, 4, 32)
    one, other = np.zeros((3, 4), np.uint16), np.zeros((3, 4), ml_dtypes.bfloat16)
    linear.linear(x, weight, one)
    linear.linear(x.view(ml_dtypes.bfloat16), weight.view(ml_dtypes.bfloat16), other)
    assert one.any() and (one == other.view(np.uint16)).all()


@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
def test_embed_gathers_rows_and_gives_zeros_for_ids_of_none(id_dtype):
    table, signal = random_bits(np.random.default_rng(2), 5, 3), Signal()
    ids = np.array([4, -1, 0, 5, 4, np.iinfo(id_dtype).max, np.iinfo(id_dtype).min], id_dtype)
    out = linear.embed(ids, table, np.full((7, 3), 9, np.uint16), signal=signal)
    for row, wanted in zip(out, ids.tolist(), strict=True):
        assert (row == (table[wanted] if 0 <= wanted < 5 else 0)).all()
    assert signal.counts() == {"out_of_range": 2}
