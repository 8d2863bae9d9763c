"""The convolution references against a loop in float64, token by token."""

from __future__ import annotations

import numpy as np
import pytest

from gpukit.errors import Signal
from gpukit.kernels.reference import conv
from tests.helpers.bf16 import check, numbers, random_bits, sigmoid


def oracle(x, weight, history):
    """Outputs of one row [tokens, channels], in float64."""
    window = [numbers(column) for column in history]
    out = []
    for column in x:
        window.append(numbers(column))
        y = sum(numbers(weight)[:, tap] * window[tap - 4] for tap in range(4))
        out.append(y * sigmoid(y))
    return np.array(out)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("channels", [1, 7, 64])
def test_update_against_float64(channels, tokens):
    rng = np.random.default_rng(channels)
    x, weight, history = random_bits(rng, 3, tokens, channels), random_bits(rng, channels, 4), random_bits(rng, 5, 3, channels)
    before, out = history.copy(), np.zeros_like(x)
    conv.conv1d_silu(x, weight, history, np.array([4, -1, 0]), out)
    for row, slot in ((0, 4), (2, 0)):
        check(out[row], oracle(x[row], weight, before[slot]))
        assert (history[slot] == np.concatenate((before[slot], x[row]))[-3:]).all()
    assert not out[1].any() and (history[1:4] == before[1:4]).all()


@pytest.mark.parametrize("tokens", [1, 4, 6])
def test_tokens_one_by_one_are_tokens_at_once(tokens):
    rng = np.random.default_rng(tokens)
    x, weight, history = random_bits(rng, 2, tokens, 8), random_bits(rng, 8, 4), random_bits(rng, 2, 3, 8)
    at_once, one_by_one = history.copy(), history.copy()
    out, step = np.zeros_like(x), np.zeros_like(x)
    conv.conv1d_silu(x, weight, at_once, np.array([1, 0]), out)
    for token in range(tokens):
        conv.conv1d_silu(x[:, token : token + 1], weight, one_by_one, np.array([1, 0]), step[:, token : token + 1])
    assert (out == step).all() and (at_once == one_by_one).all()


def test_record_is_the_update_without_a_trace_and_with_a_log():
    rng = np.random.default_rng(0)
    x, weight, history = random_bits(rng, 4, 5, 6), random_bits(rng, 6, 4), random_bits(rng, 4, 3, 6)
    slots, valid = np.array([2, 2, -1, 0]), np.array([5, 0, 3, 2], np.int32)
    before, log = history.copy(), np.full((4, 7, 6), 9, np.uint16)
    out = np.full_like(x, 9)
    conv.conv1d_silu_record(x, weight, history, slots, log, out, valid)
    expected = np.zeros_like(x)
    conv.conv1d_silu(x, weight, before.copy(), np.array([2, -1, -1, 0]), expected)
    assert (history == before).all()
    assert (out[0] == expected[0]).all() and not out[1].any() and (out[2] == 9).all()
    assert (out[3, :2] == expected[3, :2]).all() and not out[3, 2:].any()
    for row, count in enumerate((5, 0, 0, 2)):
        assert (log[row, :count] == x[row, :count]).all() and (log[row, count:] == 9).all()


@pytest.mark.parametrize("accepted", range(6))
def test_a_record_after_another_starts_where_the_accepted_columns_end(accepted):
    rng = np.random.default_rng(accepted)
    first, second = random_bits(rng, 1, 5, 6), random_bits(rng, 1, 3, 6)
    weight, history, slots = random_bits(rng, 6, 4), random_bits(rng, 2, 3, 6), np.array([1])
    plain, log, other_log = history.copy(), np.zeros_like(first), np.zeros_like(second)
    conv.conv1d_silu_record(first, weight, history, slots, log, np.zeros_like(first), None)
    log[:, accepted:] = 0x7FC0
    out, expected = np.zeros_like(second), np.zeros_like(second)
    conv.conv1d_silu_record(second, weight, history, slots, other_log, out, None, log, np.array([accepted]))
    conv.conv1d_silu(first[:, :accepted], weight, plain, slots, np.zeros_like(first[:, :accepted]))
    assert (history == plain).all() and (other_log == second).all()
    conv.conv1d_silu(second, weight, plain, slots, expected)
    assert (out == expected).all()


def test_bad_slots_are_counted_and_nothing_of_them_is_written():
    x, weight, history = np.ones((5, 2, 2), np.uint16), np.ones((2, 4), np.uint16), np.zeros((3, 3, 2), np.uint16)
    out, signal = np.full_like(x, 7), Signal()
    conv.conv1d_silu(x, weight, history, np.array([3, 1, 1, -5, 2**40]), out, signal=signal)
    assert signal.counts() == {"out_of_range": 2, "unbound": 1}
    assert (out[[0, 2, 3, 4]] == 7).all() and not history[[0, 2]].any() and history[1].any()
    log, signal = np.zeros((5, 2, 2), np.uint16), Signal()
    conv.conv1d_silu_record(x, weight, history, np.array([3, 1, 1, -5, 0]), log, out, np.array([1, 3, -1, 9, 2]), signal=signal)
    assert signal.counts() == {"out_of_range": 3} and (out[:4] != 7).sum() == (out[1] != 7).sum()
    assert not log[:4].any() and (log[4] == x[4]).all()
