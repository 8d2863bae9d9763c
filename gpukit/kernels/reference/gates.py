"""What the gates of a gated delta rule mean, in NumPy."""

from __future__ import annotations

import numpy as np

from gpukit.kernels.reference._bf16 import Array, as_float


def gate_control(x_a: Array, x_b: Array, a_log: Array, dt_bias: Array, g_out: Array, beta_out: Array) -> tuple[Array, Array]:
    """Log decay ``-exp(a_log) * softplus(x_a + dt_bias)`` and write strength ``sigmoid(x_b)``."""
    shifted = as_float(x_a) + as_float(dt_bias)
    # Above 20 the softplus is its argument, to float32; the exponential is not needed there.
    softplus = np.where(shifted > 20, shifted, np.log1p(np.exp(np.minimum(shifted, 20))))
    g_out[...] = -np.exp(as_float(a_log)) * softplus
    with np.errstate(over="ignore"):
        beta_out[...] = 1 / (1 + np.exp(-as_float(x_b)))
    return g_out, beta_out
