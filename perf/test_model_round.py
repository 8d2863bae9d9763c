"""Whole rounds of decoding with the recurrent layers of Qwen3.6-35B-A3B's shape, embedding and head included: plain steps and speculative rounds,
without the experts behind the layers and with them.

The floor is what a round must read and write: weights once, states two or three times. No draft is accepted, which changes nothing about that. With
experts there is none: random weights choose much the same tokens for all sequences, and those much the same experts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from gpukit.decode.backend import Backend, CupyBackend, NumpyBackend
from gpukit.decode.geometry import GEOMETRIES, Geometry
from gpukit.decode.recurrent import Decoder
from gpukit.decode.weights import Weights
from gpukit.launch import overlapping
from perf.conftest import GPU, on_device

# Only what is imported is told of the stream under measurement.
with contextlib.suppress(ImportError):
    import cupy  # noqa: F401

pytestmark = on_device

WHOLE = GEOMETRIES["qwen3.6-35b-a3b" if GPU else "tiny"]
MODEL = replace(WHOLE, experts=0)
SEQUENCES = (1, 8)
DRAFTS = 3


@functools.cache
def backend() -> Backend:
    return CupyBackend() if GPU else NumpyBackend()


# One model at a time: with experts in bfloat16 it has 50 GB.
@functools.lru_cache(1)
def weights(geometry: Geometry) -> Weights:
    return Weights.random(geometry, backend())


@pytest.mark.parametrize("sequences", SEQUENCES)
def test_plain_step(device_benchmark: Callable[..., None], sequences: int) -> None:
    """A token of every sequence."""
    decoder = Decoder(MODEL, weights(MODEL), backend(), sequences)
    decoder.start(np.arange(sequences))
    with overlapping():
        device_benchmark(decoder.round, moved=MODEL.round_bytes(sequences, 1, 2), nodes=2, rounds=15)


@pytest.mark.parametrize("verify", ["exact", "fast"])
@pytest.mark.parametrize("commit", ["fold", "fold_record"])
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_speculative_round(device_benchmark: Callable[..., None], sequences: int, commit: str, verify: str) -> None:
    """Three drafts of every sequence."""
    decoder = Decoder(MODEL, weights(MODEL), backend(), sequences, drafts=DRAFTS, commit=commit, exact=verify == "exact")
    decoder.start(np.arange(sequences))
    sides = itertools.cycle(range(len(decoder.logs)))
    moved = MODEL.round_bytes(sequences, DRAFTS + 1, 2 if decoder.deferred else 3)
    with overlapping():
        device_benchmark(lambda: decoder.round(next(sides)), moved=moved, nodes=2, rounds=15)


@pytest.mark.parametrize(("experts", "sequences"), [(experts, sequences) for experts in ("bf16", "fp8", "q4_q5") for sequences in SEQUENCES])
def test_speculative_round_with_experts(device_benchmark: Callable[..., None], experts: str, sequences: int) -> None:
    """Three drafts of every sequence, by the quickest verification, through a mixture of experts behind every layer."""
    model = replace(WHOLE, expert_format=experts)
    decoder = Decoder(model, weights(model), backend(), sequences, drafts=DRAFTS, exact=False)
    decoder.start(np.arange(sequences))
    with overlapping():
        device_benchmark(decoder.round, nodes=2, rounds=15)
