"""bfloat16 for tests: random numbers as uint16 bits, the float64 numbers that bits stand for, and the tolerances of bfloat16 outputs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


def bits(values: Any) -> np.ndarray:
    """Numbers rounded to bfloat16, as uint16."""
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def random_bits(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Normal numbers as uint16 bits of bfloat16."""
    return bits(rng.standard_normal(shape) * scale)


def numbers(array: np.ndarray) -> np.ndarray:
    """The float64 numbers of bfloat16 or of uint16 bits of it."""
    return array.view(ml_dtypes.bfloat16).astype(np.float64)


def check(found: np.ndarray, expected: np.ndarray) -> None:
    """Compare bfloat16 outputs with float64 numbers."""
    got = numbers(found)
    np.testing.assert_allclose(got, expected, atol=1e-3, rtol=1e-2)
    norm = np.linalg.norm(expected)
    assert np.linalg.norm(got - expected) <= 8e-3 * norm if norm else not got.any()


def sigmoid(x: np.ndarray) -> np.ndarray:
    """In float64, without overflow."""
    return np.exp(-np.logaddexp(0, -x))
