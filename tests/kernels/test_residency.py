"""The round that L2 plans are tried on: its meaning by brute force, its arguments, and that plan and device code agree on constants."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from gpukit.compile.cuda_c import source_path
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels import residency
from gpukit.kernels.reference import residency as reference

STATES, SLOTS = np.zeros((2, 3, 8), np.int32), np.array([1, 2])
WEIGHTS, OUT = np.zeros(16, np.int32), np.zeros(4, np.int32)
READ_ONLY = STATES.copy()
READ_ONLY.flags.writeable = False
advance, stream = residency.advance_states, residency.stream_weights

BAD_CALLS = [
    (lambda: advance(STATES[0], SLOTS), ArgumentError, r"states: expected 3 dimensions, got shape \(3, 8\)"),
    (lambda: advance(STATES.astype(np.float32), SLOTS), ArgumentTypeError, "states: expected dtype int32, got float32"),
    (lambda: advance(STATES[:, :, :6], SLOTS), ArgumentError, "states: expected a multiple of 4 words, got 6"),
    (lambda: advance(STATES[:, :, ::2], SLOTS), ArgumentError, "states: expected the last 1 dimension contiguous"),
    (lambda: advance(READ_ONLY, SLOTS), ArgumentError, "states: expected a writable array"),
    (lambda: advance(STATES, SLOTS * 1.0), ArgumentTypeError, "slots: expected dtype int32 or int64, got float64"),
    (lambda: advance(STATES, SLOTS[None]), ArgumentError, "slots: expected 1 dimension"),
    (lambda: advance(STATES, STATES.reshape(-1)), ArgumentError, "states: expected memory apart from slots"),
    (lambda: advance(STATES, SLOTS, keep=1.5), ArgumentError, "keep: expected None or a number from 0 to 1, got 1.5"),
    (lambda: advance(STATES, SLOTS, keep="all"), ArgumentTypeError, "keep: expected None or a number from 0 to 1, got str"),
    (lambda: stream(WEIGHTS[:6], OUT), ArgumentError, "weights: expected a multiple of 4 words, got 6"),
    (lambda: stream(WEIGHTS.astype(np.int64), OUT), ArgumentTypeError, "weights: expected dtype int32, got int64"),
    (lambda: stream(WEIGHTS, OUT.astype(np.int64)), ArgumentTypeError, "out: expected dtype int32, got int64"),
    (lambda: stream(WEIGHTS, WEIGHTS[:4]), ArgumentError, "out: expected memory apart from weights"),
    (lambda: stream(WEIGHTS, OUT, keep=-0.1), ArgumentError, "keep: expected None or a number from 0 to 1, got -0.1"),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[message for _, _, message in BAD_CALLS])
def test_bad_arguments_are_named_and_nothing_is_written(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
    assert not STATES.any() and not OUT.any() and not WEIGHTS.any()


def test_states_move_one_step_each() -> None:
    rng = np.random.default_rng(0)
    states = rng.integers(-(2**31), 2**31, (3, 4, 8)).astype(np.int32)
    before, signal = states.copy(), Signal()
    advance(states, np.array([2, -1, 9, 0, 2]), keep=0.5, signal=signal)
    for layer, slot, word in np.ndindex(3, 4, 8):
        value = int(before[layer, slot, word])
        expected = (value * 1664525 + 1013904223) % 2**32 if slot in (0, 2) else value % 2**32
        assert int(states[layer, slot, word]) % 2**32 == expected
    assert signal.counts() == {"out_of_range": 1, "unbound": 1}


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("words", [0, 4, 8192, 20_480])
def test_every_vector_is_in_the_sum_of_its_block(words: int, blocks: int) -> None:
    weights = np.random.default_rng(words).integers(-(2**31), 2**31, words).astype(np.int32)
    expected = [0] * blocks
    for i in range(words // 4):
        a, b, c, d = (int(value) % 2**32 for value in weights[4 * i : 4 * i + 4])
        block = i % (512 * blocks) // 512
        expected[block] = (expected[block] + (a ^ b ^ c ^ d)) % 2**32
    assert [int(value) % 2**32 for value in stream(weights, np.full(blocks, -7, np.int32))] == expected


def test_the_constants_of_the_plans_are_those_of_the_kernels() -> None:
    constants = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", source_path("residency").read_text())}
    assert (constants["THREADS"], constants["VECTORS"], constants["STREAM_THREADS"]) == (
        residency._THREADS,
        residency._VECTORS,
        residency._STREAM_THREADS,
    )
    assert reference.STREAM_THREADS == residency._STREAM_THREADS
