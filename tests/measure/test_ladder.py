"""The harness: the order, what is called when, what a cell may return, and what the file says of where it ran."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpukit.errors import ArgumentError, ArgumentTypeError, DeviceError
from gpukit.measure import Ladder, LadderDesign, analyze, verify, workloads
from gpukit.measure.ladder_file import LadderHeader
from gpukit.measure.provenance import git_state
from gpukit.measure.verification import read

QUIET: dict[str, Any] = {"git": lambda: None}


def header_of(path: Path) -> LadderHeader:
    header = read(path).header
    assert header is not None
    return header


def test_every_pass_runs_every_arm_once_and_starts_one_arm_later():
    order = list(LadderDesign(arms=("a", "b", "c", "d"), base="a", passes=6).order())
    passes = ["".join(slot.arm for slot in order if slot.pass_index == index) for index in range(6)]
    assert passes == ["abcd", "bcda", "cdab", "dabc", "abcd", "bcda"]
    assert [slot.position for slot in order] == [0, 1, 2, 3] * 6


def test_arms_are_prepared_warmed_up_measured_and_torn_down_cell_by_cell(tmp_path):
    calls: list[str] = []

    class Arm:
        def prepare(self) -> None:
            calls.append("prepare")

        def run(self) -> None:
            calls.append("run")

        def teardown(self) -> None:
            calls.append("teardown")

    Ladder({"object": Arm(), "function": lambda: calls.append("call")}, passes=3, warmup=2, repetitions=3).run(tmp_path / "a.csv", probes=QUIET)
    one, other = ["prepare", *["run"] * 5, "teardown"], ["call"] * 5
    assert calls == one + other + other + one + one + other


def test_an_arm_is_torn_down_when_its_cell_fails(tmp_path):
    calls: list[str] = []

    class Arm:
        def run(self) -> None:
            raise RuntimeError("out of memory")

        def teardown(self) -> None:
            calls.append("teardown")

    with pytest.raises(RuntimeError, match="out of memory"):
        Ladder({"a": Arm(), "b": Arm()}).run(tmp_path / "a.csv", probes=QUIET)
    assert calls == ["teardown"] and not verify(tmp_path / "a.csv").ok


def test_a_cell_keeps_the_median_of_its_repetitions_and_names_counters_that_differed(tmp_path):
    seconds, rounds = itertools.cycle([5.0, 1.0, 2.0]), itertools.cycle([678, 678, 690])
    ladder = Ladder(
        {"a": lambda: 0, "b": lambda: 0},
        lambda run: {"seconds": next(seconds), "rounds": next(rounds), "steady": np.int64(3), "window": "0x7f00"},
        **{"passes": 3, "repetitions": 3, "warmup": 0, "counters": ["rounds", "steady"], "geometry": ["window"]},
    )
    cells = read(ladder.run(tmp_path / "a.csv", probes=QUIET)).cells
    assert len(cells) == 6
    assert all(cell.values == {"seconds": 2.0, "rounds": 678, "steady": 3, "window": "0x7f00"} and cell.unsteady == ("rounds",) for cell in cells)


def test_numbers_come_back_to_the_bit(tmp_path):
    values = [0.1 + 0.2, 5e-324, 1e300, np.float32(0.1), 7, np.float64(1 / 3)]
    given = iter(values)
    cells = read(Ladder({"a": int, "b": int}, lambda run: {"seconds": next(given)}, passes=3, warmup=0).run(tmp_path / "a.csv", probes=QUIET)).cells
    assert [cell.values["seconds"] for cell in cells] == [float(value) for value in values]


def test_every_line_is_in_the_file_when_the_next_cell_runs(tmp_path):
    path, lines = tmp_path / "a.csv", []

    def arm() -> None:
        lines.append(path.read_text().count("\n"))

    Ladder({"a": arm, "b": arm}, passes=3, warmup=0).run(path, probes=QUIET)
    assert lines == [2, 3, 4, 5, 6, 7]


def test_the_header_is_written_before_the_first_cell_and_holds_design_and_surroundings(tmp_path):
    def failing() -> None:
        raise OSError("no card")

    probes = {"device": lambda: "a card", "driver": failing, "other_processes": lambda: [{"pid": 1, "bytes": 2}], "git": lambda: Path("here")}
    ladder = Ladder({"a": int, "b": int, "c": int}, null="b", structural_zero="c", noise_limit=0.4, tag="trial", passes=3)
    header = header_of(ladder.run(tmp_path / "a.csv", probes=probes))
    assert header.design == ladder.design and (header.design.base, header.design.null, header.design.noise_limit) == ("a", "b", 0.4)
    seen = header.provenance
    assert (seen["device"], seen["driver"], seen["other_processes"]) == ("a card", {"error": "no card"}, [{"pid": 1, "bytes": 2}])
    assert seen["git"] == "here" and {"python", "gpukit", "numpy"} == set(seen["versions"]) and seen["started"].endswith("+00:00") and seen["pid"] > 0


def test_without_probes_the_fields_of_a_gpu_are_none(tmp_path):
    seen = header_of(Ladder({"a": int, "b": int}, passes=3).run(tmp_path / "a.csv")).provenance
    assert seen["device"] is seen["driver"] is seen["other_processes"] is None


def test_git_state_tells_revision_and_dirt(tmp_path):
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    assert git_state(tmp_path) is None
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    assert git_state(tmp_path) == {"revision": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {"revision": git("rev-parse", "HEAD"), "dirty": True}


def test_a_ladder_is_never_overwritten(tmp_path):
    ladder = Ladder({"a": int, "b": int}, passes=3)
    content = ladder.run(tmp_path / "a.csv", probes=QUIET).read_bytes()
    with pytest.raises(ArgumentError, match="path: expected a file that does not exist yet"):
        ladder.run(tmp_path / "a.csv", probes=QUIET)
    assert (tmp_path / "a.csv").read_bytes() == content
    with pytest.raises(ArgumentError, match="path: expected a file that can be made"):
        ladder.run(tmp_path / "nowhere" / "a.csv", probes=QUIET)


def test_progress_counts_cells(tmp_path):
    seen: list[tuple[int, int]] = []
    Ladder({"a": int, "b": int}, passes=3).run(tmp_path / "a.csv", probes=QUIET, progress=lambda *counts: seen.append(counts))
    assert seen == [(number, 6) for number in range(1, 7)]


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        ({"seconds": 1.0}, ArgumentError, "cell: expected seconds, rounds from arm a, got seconds"),
        ({"seconds": 1.0, "rounds": 1, "extra": 1}, ArgumentError, "got seconds, rounds, extra"),
        (None, ArgumentError, "got None"),
        ({"seconds": 0.0, "rounds": 1}, ArgumentError, "expected a number above 0 for seconds of arm a, got 0.0"),
        ({"seconds": float("nan"), "rounds": 1}, ArgumentTypeError, "expected a finite number for seconds of arm a, got nan"),
        ({"seconds": "1", "rounds": 1}, ArgumentTypeError, "finite number for seconds of arm a, got '1'"),
        ({"seconds": 1.0, "rounds": "678"}, ArgumentTypeError, "finite number for rounds of arm a, got '678'"),
    ],
)
def test_a_cell_returns_exactly_its_names_and_numbers(tmp_path, result, error, message):
    ladder = Ladder({"a": int, "b": int}, lambda run: result, counters=["rounds"], warmup=0)
    with pytest.raises(error, match=message):
        ladder.run(tmp_path / "a.csv", probes=QUIET)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arms": {"a": int}}, "arms: expected a tuple of at least 2 names"),
        ({"arms": {"a": int, "b ": int}}, "arms: expected printable names"),
        ({"arms": {"a": int, "b\n": int}}, "arms: expected printable names"),
        ({"arms": {"a": int, "b": 3}}, "arms: expected a callable or an object with run"),
        ({"base": "c"}, "base: expected one of the arms a, b, got 'c'"),
        ({"null": "a"}, "base, null, structural_zero: expected different arms"),
        ({"structural_zero": "z"}, "structural_zero: expected one of the arms"),
        ({"passes": 2}, "passes: expected a whole number from 3"),
        ({"passes": True}, "passes: expected a whole number"),
        ({"repetitions": 0}, "repetitions: expected a whole number from 1"),
        ({"warmup": -1}, "warmup: expected a whole number from 0"),
        ({"noise_limit": 0.0}, "noise_limit: expected a number above 0"),
        ({"replication_limit": float("nan")}, "replication_limit: expected a number above 0"),
        ({"metrics": []}, "metrics: expected a tuple of at least 1"),
        ({"metrics": "seconds"}, "metrics: expected a sequence of names, got the text 'seconds'"),
        ({"metrics": ["decode s"]}, "metrics: expected names of letters"),
        ({"counters": ["seconds"]}, "metrics, counters, geometry: expected names of their own"),
        ({"counters": ["clock_ns"]}, "metrics, counters, geometry: expected names of their own"),
        ({"counters": ["a", "a"]}, "counters: expected different names"),
        ({"higher_is_better": ["tokens"]}, "higher_is_better: expected some of the metrics seconds, got tokens"),
        ({"judged_by": ["tokens"]}, "judged_by: expected some of the metrics seconds, got tokens"),
        ({"tag": "a\nb"}, "tag: expected printable text"),
    ],
)
def test_what_a_ladder_cannot_be_is_refused_by_name(options, message):
    with pytest.raises(ArgumentError, match=message):
        Ladder(**{"arms": {"a": int, "b": int}, **options})


def test_an_unknown_probe_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="probes: expected fields of device, .*got weather"):
        Ladder({"a": int, "b": int}).run(tmp_path / "a.csv", probes={"weather": int})
    assert not (tmp_path / "a.csv").exists()


def test_the_builtin_workloads_make_verified_files_with_constant_counters(tmp_path):
    for name in workloads.summaries():
        try:
            workload = workloads.build(name)
        except DeviceError:  # a workload of a GPU, and there is none
            continue
        path = workload.ladder(passes=3, warmup=0, tag=name).run(tmp_path / f"{name}.csv", probes={**QUIET, **workload.probes})
        found = analyze(path)
        assert found.verification.ok and not found.flags, found.flags


def test_workloads_are_registered_once_and_unknown_ones_named(monkeypatch):
    monkeypatch.setattr(workloads.WORKLOADS, "builders", dict(workloads.WORKLOADS.builders))
    workloads.register("mine", "a test")(lambda: workloads.Workload({"a": int, "b": int}))
    assert workloads.summaries()["mine"] == "a test" and workloads.build("mine").ladder(passes=4).design.cells == 8
    with pytest.raises(ArgumentError, match="name: expected a workload that is not registered yet, got 'mine'"):
        workloads.register("mine", "again")(lambda: workloads.Workload({}))
    with pytest.raises(ArgumentError, match="workload: expected one of translate, copy, mine, got 'other'"):
        workloads.build("other")


def test_the_file_reads_as_csv_between_marked_lines(tmp_path):
    path = Ladder({"a": int, "b": int}, passes=3).run(tmp_path / "a.csv", probes=QUIET)
    start, columns, *rows, done = path.read_text().splitlines()
    assert json.loads(start.removeprefix("# start "))["format"] == 1 and json.loads(done.removeprefix("# done "))["cells"] == len(rows) == 6
    assert columns == "pass,position,arm,clock_ns,seconds,unsteady" and rows[0].startswith("0,0,a,")
