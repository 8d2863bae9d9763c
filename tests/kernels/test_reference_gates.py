"""The gate reference against float64."""

from __future__ import annotations

import numpy as np
import pytest

from gpukit.kernels.reference import gates
from tests.helpers.bf16 import numbers, random_bits, sigmoid


def as_double(array):
    return array.astype(np.float64) if array.dtype == np.float32 else numbers(array)


def oracle(x_a, x_b, a_log, dt_bias):
    """The formulas in float64, with the softplus everywhere."""
    x_a, x_b, a_log, dt_bias = map(as_double, (x_a, x_b, a_log, dt_bias))
    return -np.exp(a_log) * np.logaddexp(0, x_a + dt_bias), sigmoid(x_b)


@pytest.mark.parametrize("shape", [(1, 1), (3, 32), (2, 4, 48)])
@pytest.mark.parametrize("float32", [False, True])
def test_against_float64(shape, float32):
    rng = np.random.default_rng(len(shape))
    x_a, x_b, a_log, dt_bias = (random_bits(rng, *own, scale=scale) for own, scale in ((shape, 12), (shape, 9), (shape[-1:], 1), (shape[-1:], 2)))
    if float32:
        x_a, dt_bias = numbers(x_a).astype(np.float32), numbers(dt_bias).astype(np.float32)
    pairs = np.zeros((*shape, 2), np.float32)
    gates.gate_control(x_a, x_b, a_log, dt_bias, pairs[..., 0], pairs[..., 1])
    g, beta = oracle(x_a, x_b, a_log, dt_bias)
    np.testing.assert_allclose(pairs[..., 0], g, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(pairs[..., 1], beta, rtol=1e-5, atol=1e-7)


def test_the_softplus_is_its_argument_above_20_and_nothing_overflows():
    x_a, x_b = np.float32([[20.5, 1e30, -1e30, 20]]), np.float32([[1e30, -1e30, 0, -88]])
    g, beta = np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32)
    gates.gate_control(x_a, x_b, np.zeros(4, np.float32), np.zeros(4, np.float32), g, beta)
    assert g[0, :3].tolist() == [-20.5, -np.float32(1e30), 0] and g[0, 3] == pytest.approx(-20)
    assert beta[0, :3].tolist() == [1, 0, 0.5] and beta[0, 3] == pytest.approx(6e-39, rel=0.1)
