"""A trace from one buffer and from splits: everything ends, no page is lost, and sharing holds more tokens."""

from __future__ import annotations

import pytest

from gpukit import ArgumentError
from gpukit.decode.trace import Request, generate_trace
from gpukit.memory.split_comparison import HybridShape, compare, replay_split, replay_unified, table

SHAPE = HybridShape(full_layers=2, swa_layers=10, window=128, page_size=16)


def test_one_buffer_holds_more_than_any_split() -> None:
    results = compare(generate_trace(60), SHAPE, 160 << 20, lanes=32, splits=(0.2, 0.6), check_every=50)
    unified, *splits = results
    for result in results:
        assert (result.finished, result.skipped, result.findings) == (60, 0, []), result.name
        assert result.tokens >= sum(request.generate for request in generate_trace(60))
    assert all(unified.mean_tokens > split.mean_tokens and unified.rounds <= split.rounds for split in splits)
    assert 0.5 < unified.mean_share <= unified.peak_share <= 1 and 0 <= unified.mean_holes <= unified.peak_holes < 0.5
    text = table(results)
    assert text.count("\n") == 3 and "unified" in text and "+" in text


@pytest.mark.parametrize("unified", [True, False])
def test_requests_that_give_way_come_back(unified: bool) -> None:
    """Short prompts and long answers: admission is too hopeful, and the youngest make room."""
    trace = [Request(index, 20, 300) for index in range(20)]
    size = SHAPE.entry(12).bytes * 16 * 100
    result = replay_unified(trace, SHAPE, size, lanes=16, check_every=20) if unified else replay_split(trace, SHAPE, size, 0.6, lanes=16)
    assert result.preemptions > 0 and result.finished == 20 and result.findings == []
    assert result.tokens == 20 * 300


def test_a_request_that_never_fits_is_skipped() -> None:
    trace = [Request(0, 50_000, 4), Request(1, 20, 4)]
    for result in compare(trace, SHAPE, 8 << 20, lanes=4, splits=(0.5,)):
        assert (result.finished, result.skipped, result.findings) == (1, 1, [])


def test_a_split_must_be_a_proportion() -> None:
    with pytest.raises(ArgumentError, match="^swa_per_full: expected more than 0"):
        replay_split([], SHAPE, 1 << 20, 0.0)
