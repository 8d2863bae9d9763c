"""The norm references against float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gpukit.kernels.reference import norm
from tests.helpers.bf16 import bits, check, numbers, random_bits, sigmoid


def oracle(x, weight, epsilon, offset, gate=None):
    """The formula in float64."""
    x, weight = numbers(x), numbers(weight)
    result = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * (1 + weight if offset else weight)
    return result if gate is None else result * numbers(gate) * sigmoid(numbers(gate))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("width", [1, 7, 128, 1000, 8192])
def test_against_float64(width, offset, gated):
    rng = np.random.default_rng(width)
    x, weight = random_bits(rng, 5, width, scale=3), random_bits(rng, width)
    gate = random_bits(rng, 5, width, scale=4) if gated else None
    out = np.zeros_like(x)
    assert norm.rms_norm(x, weight, out, 1e-6, offset, gate) is out
    check(out, oracle(x, weight, 1e-6, offset, gate))


def test_a_row_of_zeros_stays_zero_and_epsilon_counts():
    x = bits([[0, 0], [0.5, -0.5]])
    out = np.zeros_like(x)
    norm.rms_norm(x, bits([1, 1]), out, 0.75, False)
    assert numbers(out).tolist() == [[0, 0], [0.5, -0.5]]


def test_gates_of_any_size_keep_it_finite():
    x, gate = bits(np.ones((1, 4))), bits([[-3e38, -100, 100, 3e38]])
    out = np.zeros_like(x)
    norm.rms_norm(x, bits(np.ones(4)), out, 0.0, False, gate)
    assert numbers(out)[0, :2].tolist() == [0, 0] and (numbers(out)[0, 2:] == numbers(gate)[0, 2:]).all()


def test_bfloat16_and_its_bits_are_the_same():
    rng = np.random.default_rng(0)
    x, weight = random_bits(rng, 3, 4, 16), random_bits(rng, 16)
    one, other = np.zeros_like(x), np.zeros(x.shape, ml_dtypes.bfloat16)
    norm.rms_norm(x, weight, one, 1e-6, True)
    norm.rms_norm(x.view(ml_dtypes.bfloat16), weight, other, 1e-6, True)
    assert (one == other.view(np.uint16)).all()


def test_rounding_is_to_nearest_even_and_keeps_nan():
    from gpukit.kernels.reference._bf16 import rounded

    rng = np.random.default_rng(1)
    values = np.concatenate((rng.integers(0, 2**32, 20_000, np.uint32).view(np.float32), np.float32([np.nan, -np.nan, np.inf, -np.inf, 0, -0.0])))
    values = np.concatenate((values, (np.arange(0x3F80, 0x3FA0, dtype=np.uint32) << 16 | 0x8000).view(np.float32)))
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    found = rounded(values).view(ml_dtypes.bfloat16)
    finite = ~np.isnan(values)
    assert (found.view(np.uint16) == expected.view(np.uint16))[finite].all() and np.isnan(found[~finite].astype(np.float32)).all()
