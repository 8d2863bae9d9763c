"""Random tokens of the gated delta rule, and what becomes of them in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.helpers.bf16 import bits, numbers

GEOMETRIES = ((2, 4, 64), (1, 2, 128), (2, 6, 128), (3, 3, 64))


def tokens_of(items: int, tokens: int, key_heads: int, heads: int, dim: int, seed: int = 0) -> dict[str, np.ndarray]:
    """q, k, v as the bits of bfloat16, g and beta as float32: keys that have something in common, decays from slow to fast."""
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(items, tokens, key_heads, dim)) + rng.normal(size=(items, 1, key_heads, dim))
    return {
        "q": bits(rng.normal(size=(items, tokens, key_heads, dim))),
        "k": bits(k),
        "v": bits(rng.normal(size=(items, tokens, heads, dim))),
        "g": (-rng.exponential(0.3, (items, tokens, heads))).astype(np.float32),
        "beta": rng.random((items, tokens, heads), np.float32),
    }


def states_of(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """States of about the size that tokens give them."""
    return (0.3 * np.random.default_rng(seed + 99).normal(size=shape)).astype(np.float32)


def oracle(batch: dict[str, Any], state: np.ndarray, item: int, tokens: int, scale: float, normalize: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [tokens, Hv, V] and the state after them, head by head and token by token in float64."""
    q, k, v = (numbers(np.ascontiguousarray(batch[name][item])) for name in ("q", "k", "v"))
    states = state.astype(np.float64)
    heads = len(states)
    out = np.zeros((tokens, *v.shape[1:]))
    for h in range(heads):
        key_head = h // (heads // k.shape[1])
        for t in range(tokens):
            key, query = k[t, key_head], q[t, key_head]
            if normalize:
                key, query = key / np.sqrt(key @ key + 1e-6), query / np.sqrt(query @ query + 1e-6)
            decay = np.exp(np.float64(batch["g"][item, t, h]))
            d = np.float64(batch["beta"][item, t, h]) * (v[t, h] - decay * (states[h] @ key))
            states[h] = decay * states[h] + np.outer(d, key)
            out[t, h] = scale * (states[h] @ query)
    return out, states


def assert_states_close(got: np.ndarray, expected: np.ndarray, tokens: int) -> None:
    """Within the tolerances of fp32 states: 1e-5 for a token, 5e-3 for 64."""
    np.testing.assert_allclose(got, expected, atol=5e-4, rtol=5e-3)
    assert np.linalg.norm(got - expected) <= 1e-5 * max(1, tokens) * np.linalg.norm(expected)
