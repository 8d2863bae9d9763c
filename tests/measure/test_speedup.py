"""The split of a speculative decode: the published numbers, the identity, and the same from a ladder's file."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gpukit.errors import ArgumentError
from gpukit.measure import Decode, acceptance, split, split_ladder
from tests.helpers import ladders

TOKENS = 6 * 384
NUMBERS = st.floats(1e-6, 1e6)


@pytest.mark.parametrize(("rounds", "accepted"), [(678, 1626), (690, 1614), (714, 1590)])
def test_rounds_and_accepted_drafts_are_the_tokens(rounds, accepted):
    decode = Decode(1.0, rounds, accepted)
    assert decode.tokens == TOKENS == 2304
    assert split(decode, decode, tokens=TOKENS).comparable


def test_the_published_acceptance_is_that_of_three_drafts_a_round():
    assert acceptance(678, 1626, drafts_per_round=3) == pytest.approx(0.7994100295, abs=5e-11)


def test_with_equal_rounds_and_no_fallback_all_of_a_gain_is_round_speed():
    found = split(Decode(10.0, 678, 1626, 0), Decode(9.94, 678, 1626, 0), tokens=TOKENS)
    assert found.rounds_ratio == 1 and found.round_time_ratio == found.time_ratio == pytest.approx(10 / 9.94)
    assert found.comparable and found.verdict.endswith("all of it is round speed")


def test_714_rounds_against_690_do_not_compare_at_face_value():
    found = split(Decode(10.0, 714, 1590, 0), Decode(9.7, 690, 1614, 0), tokens=TOKENS)
    assert not found.comparable and found.verdict.endswith("not comparable at face value: 714 rounds against 690")
    # Faster in all, yet each round is slower.
    assert found.time_ratio > 1 > found.round_time_ratio and found.rounds_ratio == pytest.approx(714 / 690)


@given(NUMBERS, NUMBERS, st.integers(1, 10**6), st.integers(1, 10**6))
def test_the_identity_is_exact(base_seconds, arm_seconds, base_rounds, arm_rounds):
    found = split(Decode(base_seconds, base_rounds), Decode(arm_seconds, arm_rounds))
    assert found.rounds_ratio * found.round_time_ratio == pytest.approx(found.time_ratio, rel=1e-12)


def test_what_else_does_not_compare_is_named():
    whole = Decode(1.0, 678, 1626, 0)
    assert split(whole, Decode(1.0, 678, 1626, 3)).flags == ("0 fallback steps against 3",)
    assert split(whole, Decode(1.0, 678, 1600, 0)).flags == ("2304 tokens against 2278",)
    assert split(whole, Decode(1.0, 678, 1600, 0), tokens=TOKENS).flags == ("rounds and accepted drafts of arm make 2278 tokens, expected 2304",)


@pytest.mark.parametrize("numbers", [(0.0, 678), (-1.0, 678), (float("nan"), 678), (1.0, 0), (1.0, 678, -1), (1.0, 678, 0, float("inf"))])
def test_numbers_no_decode_has_are_refused(numbers):
    with pytest.raises(ArgumentError, match="expected a number"):
        Decode(*numbers)


def test_more_accepted_than_drafted_is_refused():
    with pytest.raises(ArgumentError, match="accepted: expected 0 … rounds × drafts_per_round"):
        acceptance(678, 2035, drafts_per_round=3)


OPTIONS = {"metrics": ["decode_seconds", "total_seconds"], "counters": ["rounds", "accepted", "fallback_steps"]}
COLUMNS = {"accepted": "accepted", "fallback": "fallback_steps", "tokens": TOKENS}


def script(slot):
    rounds, accepted = (690, 1614) if slot.arm == "window" else (714, 1590)
    seconds = (1.0 + 0.001 * slot.pass_index) * (0.97 if slot.arm == "window" else 1.0) * (5 if slot.pass_index == 0 else 1)
    return {"decode_seconds": seconds, "total_seconds": 9.0, "rounds": rounds, "accepted": accepted, "fallback_steps": 0}


def test_a_ladder_is_split_pass_by_pass_and_in_the_median(tmp_path):
    path = ladders.write(tmp_path / "a.csv", script, **OPTIONS)
    found = split_ladder(path, "window", **COLUMNS)
    assert found.base == Decode(1.004, 714, 1590, 0) and found.arm.rounds == 690 and len(found.passes) == 7
    assert found.time_ratio == pytest.approx(1 / 0.97) and found.rounds_ratio == 714 / 690
    assert found.rounds_ratio * found.round_time_ratio == pytest.approx(found.time_ratio, rel=1e-15)
    assert found.standard_error == pytest.approx(0, abs=1e-12) and found.flags == ("714 rounds against 690",)
    assert split_ladder(path, "null", "zero", **COLUMNS).comparable
    assert split_ladder(path, "window", seconds="total_seconds").time_ratio == 1


def test_rounds_that_drift_are_flagged(tmp_path):
    def drifting(slot):
        return {**script(slot), "rounds": 714 + (slot.arm == "null" and slot.pass_index == 3)}

    path = ladders.write(tmp_path / "a.csv", drifting, **OPTIONS)
    assert split_ladder(path, "null").flags == ("rounds drift in null",)


def test_what_a_ladder_lacks_is_named(tmp_path):
    path = ladders.write(tmp_path / "a.csv", script, **OPTIONS)
    for options, message in (
        ({"arm": "nobody"}, "arm: expected one of stock, null, zero, window, got 'nobody'"),
        ({"arm": "null", "base": "nobody"}, "base: expected one of stock"),
        ({"arm": "null", "rounds": "turns"}, "rounds: expected one of decode_seconds, .*got 'turns'"),
        ({"arm": "null", "accepted": "arm"}, "accepted: expected one of decode_seconds"),
    ):
        with pytest.raises(ArgumentError, match=message):
            split_ladder(path, **options)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:8]))
    with pytest.raises(ArgumentError, match="expected a verified ladder file"):
        split_ladder(path, "window")
    with pytest.raises(ArgumentError, match="expected a pass with both stock and window, got none"):
        split_ladder(path, "window", unverified=True)


def test_it_prints_and_exports(tmp_path):
    found = split_ladder(ladders.write(tmp_path / "a.csv", script, **OPTIONS), "window", **COLUMNS)
    text = io.StringIO()
    found.print(Console(file=text, width=150))
    assert "714" in text.getvalue() and "not comparable at face value" in text.getvalue()
    content = json.loads(found.to_json())
    assert content["comparable"] is False and content["base"]["rounds"] == 714 and len(content["passes"]) == 7
