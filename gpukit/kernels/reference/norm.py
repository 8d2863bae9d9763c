"""What the norms mean, in NumPy: bfloat16 in and out, float32 inside, rounded once."""

from __future__ import annotations

import numpy as np

from gpukit.kernels.reference._bf16 import Array, as_float, silu, store


def rms_norm(x: Array, weight: Array, out: Array, epsilon: float, offset: bool, gate: Array | None = None) -> Array:
    """``x / sqrt(mean(x²) + epsilon) * weight``, with an offset times ``1 + weight``, with a gate times ``silu(gate)``."""
    values, scale = as_float(x), as_float(weight)
    if offset:
        scale = scale + np.float32(1)
    mean = np.mean(values * values, axis=-1, keepdims=True, dtype=np.float32)
    result = values / np.sqrt(mean + np.float32(epsilon)) * scale
    if gate is not None:
        result = result * silu(as_float(gate))
    store(out, result)
    return out
