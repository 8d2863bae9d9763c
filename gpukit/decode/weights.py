"""Random weights of a decoded model, the same for a seed on every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpukit.decode.backend import Backend, array_module
from gpukit.decode.geometry import EXPERT_FORMATS, TAPS, Geometry
from gpukit.kernels.moe import Fp8, MoeWeights
from gpukit.kernels.row_split import quantize

__all__ = ["LayerWeights", "Weights", "random_bfloat16", "random_matrix"]

_CHUNK = 2**24
# What random numbers in fp8 deviate by before they are scaled, far from both ends of the format.
_DEVIATION_OF_FP8 = 16.0
# Scores that deviate by so much have few experts decide: the eighth, for which another may be chosen within rounding, weighs little.
_DEVIATION_OF_SCORES = 4.0


def random_bfloat16(backend: Backend, shape: tuple[int, ...], deviation: float, seed: int) -> Any:
    """Uniform numbers around zero as the bits of bfloat16, the same on every backend: hashes of their position.

    Made in place, because no random library is part of the GPU stack and a model has billions of weights.
    """
    xp, count = array_module(backend), int(np.prod(shape))
    bits = backend.empty(count, np.uint16)
    width = np.float32(deviation * 12**0.5)
    start_of_seed = int(np.random.default_rng(seed).integers(2**32))
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        hashed = xp.arange(start, stop, dtype=np.uint32)
        hashed ^= np.uint32(start_of_seed)
        # Each multiplication carries bits up, each shift brings them down again.
        for multiplier, shift in ((0x9E3779B1, 15), (0x85EBCA77, 13), (0xC2B2AE3D, 16)):
            hashed *= np.uint32(multiplier)
            hashed ^= hashed >> np.uint32(shift)
        values = (hashed.astype(np.float32) * np.float32(2**-32) - np.float32(0.5)) * width
        words = values.view(np.uint32)
        bits[start:stop] = (words + (((words >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
    return bits.reshape(shape)


def random_matrix(backend: Backend, rows: int, columns: int, kind: str, deviation: float, seed: int) -> Any:
    """Random weights in one of the formats of experts: a bfloat16 array, an `Fp8` or a `RowSplit`."""
    if kind != "fp8":
        values = random_bfloat16(backend, (rows, columns), deviation, seed)
        return values if kind == "bf16" else quantize(values, kind)
    xp = array_module(backend)
    bits = random_bfloat16(backend, (rows, columns), _DEVIATION_OF_FP8, seed)
    # Three bits of the fraction, rounded, and an exponent whose bias is 7 instead of 127; what is too small for one becomes zero.
    magnitude = ((bits & np.uint16(0x7FFF)) + np.uint16(8)) >> np.uint16(4)
    codes = xp.maximum(magnitude, np.uint16(120 << 3)) - np.uint16(120 << 3)
    scales = backend.zeros((rows, columns // 128), np.float32)
    scales[...] = np.float32(deviation / _DEVIATION_OF_FP8)
    return Fp8((codes | (bits >> np.uint16(15) << np.uint16(7))).astype(np.uint8), scales)


def random_experts(geometry: Geometry, backend: Backend, numbers: np.random.Generator) -> MoeWeights:
    """The experts of a layer, a shared one among them."""
    hidden, width, experts = geometry.hidden, geometry.expert_width, geometry.experts
    gate_up, down, shared = EXPERT_FORMATS[geometry.expert_format]

    def matrix(rows: int, columns: int, kind: str, deviation: float) -> Any:
        return random_matrix(backend, rows, columns, kind, deviation, int(numbers.integers(2**31)))

    before, behind = hidden**-0.5, (2 * geometry.layers * width) ** -0.5
    return MoeWeights(
        router=matrix(experts + 1, hidden, "bf16", _DEVIATION_OF_SCORES * before),
        gate_up=matrix(experts * 2 * width, hidden, gate_up, before),
        down=matrix(experts * hidden, width, down, behind),
        shared_gate_up=matrix(2 * width, hidden, shared, before),
        shared_down=matrix(hidden, width, shared, behind),
    )


@dataclass(frozen=True)
class LayerWeights:
    """Weights of a recurrent layer, bfloat16 but for the gates' parameters, and of the experts behind it, if there are any."""

    norm: Any
    projection: Any
    taps: Any
    a_log: Any
    dt_bias: Any
    output_norm: Any
    output: Any
    expert_norm: Any
    experts: MoeWeights | None


@dataclass(frozen=True)
class Weights:
    """Weights of a model. `random` draws them; they mean nothing, but keep activations of the size that a model's have."""

    embedding: Any
    layers: tuple[LayerWeights, ...]
    final_norm: Any
    head: Any

    @classmethod
    def random(cls, geometry: Geometry, backend: Backend, seed: int = 0) -> Weights:
        """Weights of a geometry, the same for a seed on every backend."""
        numbers = np.random.default_rng([seed, 1])
        one = np.float32(1).view(np.uint32) >> 16

        def matrix(*shape: int, deviation: float) -> Any:
            return random_bfloat16(backend, shape, deviation, int(numbers.integers(2**31)))

        def ones(width: int) -> Any:
            return backend.to_device(np.full(width, one, np.uint16))

        def layer() -> LayerWeights:
            heads = geometry.value_heads
            # Decays of a token between 0.9 and 0.999 where the projection adds nothing, as models are initialised.
            steps = np.exp(numbers.uniform(np.log(1e-3), np.log(0.1), heads))
            return LayerWeights(
                norm=ones(geometry.hidden),
                projection=matrix(geometry.projection, geometry.hidden, deviation=geometry.hidden**-0.5),
                taps=matrix(geometry.channels, TAPS, deviation=0.5),
                a_log=backend.to_device(np.zeros(heads, np.float32)),
                dt_bias=backend.to_device(np.log(np.expm1(steps)).astype(np.float32)),
                output_norm=ones(geometry.dim),
                output=matrix(geometry.hidden, geometry.values, deviation=(2 * geometry.layers * geometry.values) ** -0.5),
                expert_norm=ones(geometry.hidden) if geometry.experts else None,
                experts=random_experts(geometry, backend, numbers) if geometry.experts else None,
            )

        return cls(
            embedding=matrix(geometry.vocabulary, geometry.hidden, deviation=1.0),
            layers=tuple(layer() for _ in range(geometry.layers)),
            final_norm=ones(geometry.hidden),
            head=matrix(geometry.vocabulary, geometry.hidden, deviation=geometry.hidden**-0.5),
        )
