"""What a ladder says: known numbers by hand, and statistics by simulation with known truth."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gpukit.errors import ArgumentError
from gpukit.measure import Analysis, analyze, combine
from gpukit.measure.analysis import median_error
from tests.helpers import ladders


@pytest.fixture
def path(tmp_path):
    numbers = iter(range(1000))
    return lambda: tmp_path / f"{next(numbers)}.csv"


def printed(found: Any) -> str:
    text = io.StringIO()
    found.print(Console(file=text, width=200))
    return text.getvalue()


def kinds(found: Analysis) -> list[str]:
    return [finding.kind for finding in found.disqualifications]


def test_deltas_are_pairs_inside_a_pass_with_the_error_of_the_median(path):
    drift = [9.0, 1.0, 2.0, 4.0, 8.0]
    percent = [50.0, 1.0, 2.0, 4.0, 3.0]

    def script(slot):
        return {"seconds": drift[slot.pass_index] * (1 + percent[slot.pass_index] / 100 if slot.arm == "b" else 1)}

    file = ladders.write(path(), script, ["a", "b"], passes=5, noise_limit=100)
    delta = analyze(file).delta("b")
    assert delta.pairs == pytest.approx({1: 1.0, 2: 2.0, 3: 4.0, 4: 3.0}) and delta.n == 4
    assert delta.median == pytest.approx(2.5)
    assert delta.standard_error == pytest.approx(1.25 * np.std([1, 2, 4, 3], ddof=1) / 2)
    assert delta.verdict == "worse"


def test_any_two_arms_make_a_pair(path):
    file = ladders.write(path(), lambda slot: {"seconds": {"a": 1.0, "b": 2.0, "c": 3.0}[slot.arm]}, ["a", "b", "c"])
    found = analyze(file, [("b", "c"), ("c", "b"), ("a", "a")])
    assert [delta.median for delta in found.deltas] == pytest.approx([50.0, 100 * (2 / 3 - 1), 0.0])
    assert found.delta("c", "b").verdict == "worse" and found.delta("b", "c").verdict == "better" and found.delta("a", "a").verdict == "no difference"
    with pytest.raises(ArgumentError, match="pairs: expected arms of a, b, c, got 'd'"):
        analyze(file, [("a", "d")])
    with pytest.raises(ArgumentError, match="expected a pair that was analyzed, got b against a"):
        found.delta("b", "a")


def test_the_direction_of_better_is_the_metrics(path):
    def script(slot):
        return {"seconds": 1.0 + (slot.arm == "b"), "tokens_per_s": 2.0 - (slot.arm == "b")}

    found = analyze(ladders.write(path(), script, ["a", "b"], metrics=["seconds", "tokens_per_s"], higher_is_better=["tokens_per_s"]))
    assert [(delta.metric, delta.median, delta.verdict) for delta in found.deltas] == [("seconds", 100.0, "worse"), ("tokens_per_s", -50.0, "worse")]


def test_the_error_of_the_median_covers_gaussian_noise():
    generator = np.random.default_rng(1)
    answers = [median_error(generator.standard_normal(51)) for _ in range(400)]
    assert np.std([median for median, _ in answers]) == pytest.approx(np.mean([error for _, error in answers]), rel=0.1)


def test_null_ladders_read_zero_within_three_errors(path):
    files = [ladders.write(path(), ladders.noisy(seed, noise=0.1), ["stock", "null"], null="null") for seed in range(20)]
    deltas = [analyze(file).delta("null") for file in files]
    assert sum(abs(delta.median) <= 3 * delta.standard_error for delta in deltas) >= 18
    # And the errors are not simply huge.
    assert max(delta.standard_error for delta in deltas) < 0.15


def test_a_planted_slow_down_is_found_with_the_right_sign_by_one_ladder_of_eight_passes(path):
    for seed in range(20):
        delta = analyze(ladders.write(path(), ladders.noisy(seed, 0.1, {"window": 0.5}))).delta("window")
        assert delta.median > 0 and delta.n == 7 and abs(delta.median - 0.5) < 4 * delta.standard_error
    verdicts = [analyze(ladders.write(path(), ladders.noisy(seed, 0.1, {"window": 0.5}))).delta("window").verdict for seed in range(20)]
    assert verdicts.count("worse") >= 18 and "better" not in verdicts


def test_slow_drift_cancels_inside_a_pass(path):
    def script(slot):
        return {"seconds": 1 + 0.01 * slot.pass_index + (0.005 if slot.arm == "b" else 0.0)}

    found = analyze(ladders.write(path(), script, ["a", "b"], noise_limit=5))
    assert found.ok and found.delta("b").verdict == "worse" and found.delta("b").standard_error < 0.01


def test_a_clean_ladder_qualifies_and_warm_up_does_not_count(path):
    found = analyze(
        ladders.write(path(), ladders.noisy(3, 0.1, {"window": -0.6}, rounds=678), null="null", structural_zero="zero", counters=["rounds"])
    )
    assert found.ok and found.verdict == "qualified" and found.flags == ()
    assert found.delta("window").verdict == "better"
    assert all(spread.n == 7 and spread.median == pytest.approx(1, abs=0.02) for spread in found.spreads)


def test_a_noisy_base_disqualifies(path):
    found = analyze(ladders.write(path(), lambda slot: {"seconds": 1 + (0.004 * (slot.pass_index % 2) if slot.arm == "stock" else 0)}))
    spread = 100 * np.std([0, 0.004, 0, 0.004, 0, 0.004, 0.004], ddof=1) / 1.004
    assert kinds(found) == ["noise"] and not found.ok
    assert found.verdict == f"disqualified: noise: seconds: the spread of the base arm stock is {spread:.3f} %, the limit 0.2 %"
    # Kept, and named so.
    assert len(found.deltas) == 3 and "disqualified" in printed(found) and "disqualified" in found.to_csv()


def test_noise_of_another_arm_does_not(path):
    assert analyze(ladders.write(path(), lambda slot: {"seconds": 1 + (0.004 * (slot.pass_index % 2) if slot.arm == "window" else 0)})).ok


@pytest.mark.parametrize("effect", [0.5, -0.5])
def test_a_null_arm_that_reads_anything_disqualifies(path, effect):
    found = analyze(ladders.write(path(), ladders.noisy(0, 0.05, {"null": effect}), null="null", structural_zero="zero"))
    assert kinds(found) == ["null arm"] and "null must read zero within noise, and reads" in found.verdict


@pytest.mark.parametrize(("effect", "expected"), [(-0.5, ["structural zero"]), (+1.08, [])])
def test_a_structural_zero_arm_may_cost_and_must_not_gain(path, effect, expected):
    found = analyze(ladders.write(path(), ladders.noisy(0, 0.05, {"zero": effect}), null="null", structural_zero="zero"))
    assert kinds(found) == expected


def test_a_structural_zero_arm_of_a_rate_must_not_rise(path):
    for sign, expected in ((1, ["structural zero"]), (-1, [])):
        script = ladders.noisy(0, 0.05, {"zero": 0.5 * sign})
        options: dict[str, Any] = {"metrics": ["rate"], "higher_is_better": ["rate"], "structural_zero": "zero"}
        found = analyze(ladders.write(path(), lambda slot, script=script: {"rate": script(slot)["seconds"]}, **options))
        assert kinds(found) == expected


def test_a_metric_that_does_not_judge_is_flagged_only(path):
    def script(slot):
        return {"decode": 1.0, "prefill": 1 + 0.01 * (slot.pass_index % 2)}

    assert kinds(analyze(ladders.write(path(), script, metrics=["decode", "prefill"]))) == ["noise"]
    found = analyze(ladders.write(path(), script, metrics=["decode", "prefill"], judged_by=["decode"]))
    assert found.ok and [finding.kind for finding in found.flags] == ["noise"] and found.verdict == "qualified, with 1 flags"


def test_counters_that_differ_between_arms_flag_the_delta(path):
    def script(slot):
        return {"seconds": 1.0, "rounds": 714 if slot.arm == "window" else 690}

    file = ladders.write(path(), script, counters=["rounds"])
    found = analyze(file)
    flag = "rounds 690 in stock, 714 in window: equal output does not imply equal rounds"
    assert found.delta("window").flags == (flag,) and found.delta("null").flags == ()
    assert [(finding.kind, finding.arm) for finding in found.flags] == [("counters differ", "window")]
    assert analyze(file, [("null", "window")]).deltas[0].flags == (flag.replace("stock", "null"),)
    assert printed(found).count("flag: rounds 690") == 1


def test_a_counter_that_drifts_within_an_arm_is_flagged(path):
    def script(slot):
        return {"seconds": 1.0, "rounds": 690 if slot.arm == "window" and slot.pass_index == 5 else 678}

    found = analyze(ladders.write(path(), script, counters=["rounds"]))
    drift = "rounds is not constant within window: 678 / 690"
    assert [finding.message for finding in found.flags if finding.kind == "drift"] == [drift]
    assert drift in found.delta("window").flags and found.delta("zero").flags == ()


def test_a_counter_that_drifts_within_a_cell_is_flagged(path):
    values = iter(range(10_000))
    file = ladders.write(path(), lambda slot: {"seconds": 1.0, "rounds": 678 + next(values) % 2}, counters=["rounds"], repetitions=2)
    found = analyze(file)
    assert len(found.flags) == 4 and all("differs between the repetitions" in finding.message for finding in found.flags)


def test_counters_of_the_warm_up_pass_do_not_matter_and_geometry_must_not_change(path):
    def script(slot):
        return {"seconds": 1.0, "rounds": 1 if slot.pass_index == 0 else 678, "window": "A" if slot.pass_index < 4 else "B"}

    found = analyze(ladders.write(path(), script, ["a", "b"], counters=["rounds"], geometry=["window"]))
    assert [finding.message for finding in found.flags] == [f"window is not constant within {arm}: A / B" for arm in "ab"]


def test_an_unverified_file_is_refused_unless_told_otherwise(path):
    file = ladders.write(path(), ladders.noisy(0, 0.01))
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-3]))
    with pytest.raises(ArgumentError, match="path: expected a verified ladder file, got .*: line 33: truncated"):
        analyze(file)
    found = analyze(file, unverified=True)
    assert kinds(found) == ["unverified"] and {delta.n for delta in found.deltas} == {6, 7}
    file.write_text("".join(lines[1:]))
    with pytest.raises(ArgumentError, match="start line"):
        analyze(file, unverified=True)


def test_of_a_cut_file_only_what_is_there_is_said(path):
    file = ladders.write(path(), ladders.noisy(0, 0.01), null="null")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:8]))  # pass 0, and null and zero of pass 1
    found = analyze(file, [("null", "zero"), ("stock", "null")], unverified=True)
    assert [(delta.arm, delta.n, delta.standard_error, delta.verdict) for delta in found.deltas] == [("zero", 1, None, "unknown")]
    assert kinds(found) == ["unverified", "noise", "null arm"] and "unknown" in found.verdict
    assert json.loads(found.to_json())["deltas"][0]["standard_error"] is None and "zero" in printed(found)


def test_a_second_ladder_in_the_file_is_not_mixed_in(path):
    one, other = (ladders.write(path(), lambda slot, seconds=seconds: {"seconds": seconds}) for seconds in (1.0, 2.0))
    # The first was cut, so the second holds cells that the first lacks.
    one.write_text("".join(one.read_text().splitlines(keepends=True)[:20]) + other.read_text())
    assert {spread.median for spread in analyze(one, unverified=True).spreads} == {1.0}


def test_the_exports_hold_every_delta(path):
    found = analyze(ladders.write(path(), ladders.noisy(0, 0.01, {"window": 0.3}), tag='a, "b"'))
    content = json.loads(found.to_json())
    assert content["ok"] and content["header"]["design"]["passes"] == 8 and len(content["deltas"][0]["pairs"]) == 7
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["arm"] for row in rows] == ["null", "zero", "window"] and float(rows[2]["median"]) == found.delta("window").median
    assert rows[0]["tag"] == 'a, "b"' and rows[2]["verdict"] == "worse"
    assert f"{found.delta('window').median:+.3f}" in printed(found) and "qualified" in printed(found)


def replicas(path: Any, effects: list[float], noise: float = 0.02, **options: Any) -> list[Analysis]:
    files = [ladders.write(path(), ladders.noisy(seed, noise, {"window": effect}), **options) for seed, effect in enumerate(effects)]
    return [analyze(file) for file in files]


def test_ladders_combine_to_a_range(path):
    analyses = replicas(path, [-0.50, -0.55, -0.58])
    found = combine(analyses)
    medians = [analysis.delta("window").median for analysis in analyses]
    window = found.ranges[2]
    assert (window.arm, window.low, window.high, window.ladders) == ("window", min(medians), max(medians), 3)
    assert window.spread == max(medians) - min(medians) and window.errors == tuple(analysis.delta("window").standard_error for analysis in analyses)
    assert window.replicated and window.beats_base and found.ok and not found.ranges[0].beats_base
    assert found.verdict == "3 of 3 ladders count, replicated within the limit"
    assert "ranges over n ladders" in printed(found) and json.loads(found.to_json())["ranges"][2]["ladders"] == 3
    assert [row["arm"] for row in csv.DictReader(io.StringIO(found.to_csv()))] == ["null", "zero", "window"]


def test_ladders_further_apart_than_the_limit_do_not_replicate(path):
    found = combine(replicas(path, [-0.30, -0.51]))
    assert found.ranges[2].replicated is False and not found.ok
    assert "not replicated: seconds: window against stock lies 0.2" in found.verdict and "points apart, the limit 0.15" in found.verdict
    # 0.3 percent against a quarter of a point between the ladders: still more than they lie apart.
    assert found.ranges[2].beats_base
    assert combine(replicas(path, [-0.30, -0.51], replication_limit=0.5)).ok


def test_a_gain_smaller_than_the_distance_of_its_ladders_is_none(path):
    window = combine(replicas(path, [-0.10, -0.40], noise=0.01)).ranges[2]
    assert window.high < 0 and not window.beats_base


def test_a_disqualified_ladder_is_kept_named_and_left_out(path):
    analyses = replicas(path, [-0.50, -0.52])
    noisy = analyze(ladders.write(path(), ladders.noisy(9, 2.0, {"window": 30.0})))
    found = combine([*analyses, noisy])
    assert len(found.analyses) == 3 and found.disqualified == (noisy,) and not found.ok
    assert found.ranges[2].ladders == 2 and found.ranges[2].high < 0
    assert "2 of 3 ladders count" in found.verdict and f"left out: {noisy.verification.path}: disqualified: noise" in printed(found).replace(
        "\n", " "
    )
    assert combine([noisy]).ranges == () and "there is nothing to say" in combine([noisy]).verdict


def test_one_ladder_is_no_replication(path):
    found = combine(replicas(path, [-0.5]))
    assert (
        found.ranges[2].replicated is None
        and not found.ranges[2].beats_base
        and found.verdict == "1 of 1 ladders count, one ladder is no replication"
    )


def test_only_ladders_of_one_design_on_one_device_combine(path):
    one = replicas(path, [0.0])[0]
    for change in ({"noise_limit": 0.3}, {"passes": 9}, {"null": "null"}):
        with pytest.raises(ArgumentError, match=f"which differ in {next(iter(change))}"):
            combine([one, *replicas(path, [0.1], **change)])
    with pytest.raises(ArgumentError, match="which differ in device"):
        combine([one, *replicas(path, [0.1], device="another")])
    with pytest.raises(ArgumentError, match="which differ in pairs"):
        combine([one, analyze(ladders.write(path(), ladders.noisy(5, 0.1)), [("null", "zero")])])
    with pytest.raises(ArgumentError, match="expected each ladder once"):
        combine([one, one])
    with pytest.raises(ArgumentError, match="expected at least one ladder"):
        combine([])
    assert len(combine([one, *replicas(path, [0.1], tag="another tag")]).analyses) == 2
