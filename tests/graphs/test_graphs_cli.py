"""`gpukit audit` and `gpukit tune` from outside, on a made-up round and device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gpukit import cli, devices
from gpukit.errors import ArgumentError
from gpukit.graphs import Built, Plan, Recipe, rounds
from tests.helpers.tuning import REGIONS, Lab, open_lab

runner = CliRunner()


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    for made in open_lab(monkeypatch):
        graphs: list[Built] = []

        def build_graph(plan: Plan, made: Lab = made, graphs: list[Built] = graphs) -> Built:
            graphs.append(made.build(plan))
            return graphs[-1]

        def build(options: rounds.RoundOptions, made: Lab = made) -> rounds.Round:
            made.options = options  # type: ignore[attr-defined]
            recipes = [Recipe("published", "states"), Recipe("small", "states", reserve=8 << 20)]
            return rounds.Round(build_graph, REGIONS, {"prefill": 1, "decode": options.decodes}, recipes, {})

        monkeypatch.setitem(rounds.ROUNDS.builders, "made up", ("for a test", build))
        yield made
        for built in graphs:
            built.phases["decode"].close()  # type: ignore[union-attr]


def test_tune_prints_the_table_and_writes_what_was_asked(lab: Lab, tmp_path: Path) -> None:
    lab.changes = {"small": -4.0}
    out, raw = tmp_path / "plan.json", tmp_path / "raw"
    arguments = ["tune", "made up", "--weights", "3", "--decodes", "2", "--passes", "5", "--out", str(out), "--raw", str(raw), "--no-confirm"]
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "winner: small" in result.stdout and "structural zero" in result.stdout and "-4.00" in result.stdout and result.stderr == ""
    assert lab.options.weights == 3 << 20 and json.loads(out.read_text())["winner"]["name"] == "small"  # type: ignore[attr-defined]
    assert sorted(file.name for file in raw.iterdir()) == ["sweep-1.csv", "sweep-2.csv"]
    built = lab.built
    assert runner.invoke(cli.app, arguments).exit_code == 0 and lab.built == built
    audited = runner.invoke(cli.app, ["audit", "made up", "--plan", str(out), "--json"])
    found = json.loads(audited.stdout)["decode"]
    assert (found["windowed"], found["kernels"], found["reserve"]) == (2, 2, 8 << 20)


def test_tune_draws_the_sweep(lab: Lab, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra plot")
    plot = tmp_path / "sweep.png"
    result = runner.invoke(cli.app, ["tune", "made up", "--passes", "3", "--plot", str(plot)])
    assert result.exit_code == 0 and plot.stat().st_size > 5_000, result.output
    assert runner.invoke(cli.app, ["tune", "made up", "--plot", "sweep.xyz"]).exit_code == 2


@pytest.mark.parametrize(("plan", "windowed"), [("published", "2 of 2"), ("stock", "0 of 2"), ("off", "0 of 2")])
def test_audit_prints_what_the_graphs_carry(lab: Lab, plan: str, windowed: str) -> None:
    result = runner.invoke(cli.app, ["audit", "made up", "--plan", plan])
    assert result.exit_code == 0, result.output
    assert f"{windowed} kernel nodes windowed" in result.stdout and "advance" in result.stdout and result.stderr == ""


def test_bad_arguments_are_one_line_and_exit_code_2(lab: Lab) -> None:
    for arguments in (["audit", "no such round"], ["tune", "no such round"], ["audit", "made up", "--plan", "/no/such/plan.json"]):
        result = runner.invoke(cli.app, arguments)
        assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1 and result.stdout == "", result.output


def test_files_that_cannot_be_written_or_read_are_found_before_anything_is_built(lab: Lab, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra plot")
    no_text, no_result = tmp_path / "binary.json", tmp_path / "other.json"
    no_text.write_bytes(b"\xff\xfe")
    no_result.write_text(json.dumps(Recipe("a recipe, no result").to_dict()))
    (tmp_path / "folder.png").mkdir()
    for option, path in (
        ("out", tmp_path / "none" / "x.json"),
        ("out", tmp_path),
        ("out", no_text),
        ("out", no_result),
        ("out", no_text / "x.json"),
        ("plot", tmp_path / "none" / "x.png"),
        ("plot", tmp_path / "folder.png"),
        ("raw", no_text),
    ):
        result = runner.invoke(cli.app, ["tune", "made up", f"--{option}", str(path)])
        assert result.exit_code == 2 and result.stdout == "" and len(result.stderr.splitlines()) == 1, result.output
        assert result.stderr.startswith(f"gpukit: {option}: expected a") and str(path) in result.stderr
    assert lab.built == 0 and not hasattr(lab, "options")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"name": "a", "region": "states", "reserve": "1"}', "reserve: expected an integer, got str"),
        ('{"name": "a", "region": "states", "options": [1]}', "options: expected a mapping, got list"),
        ('{"name": "a", "region": "states", "nodes": "gated"}', "nodes: expected a sequence, got the text 'gated'"),
        ('{"name": "a", "reserve": 1000000000000}', "reserve: expected at most the device's 39321600 bytes, got 1000000000000"),
        ("[" * 100_000, "path: expected a readable JSON file"),
    ],
)
def test_a_plan_file_with_wrong_types_is_one_line(lab: Lab, tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    result = runner.invoke(cli.app, ["audit", "made up", "--plan", str(path)])
    assert result.exit_code == 2 and result.stderr.startswith(f"gpukit: {message}") and len(result.stderr.splitlines()) == 1, result.output
    assert lab.built == 0


@pytest.mark.skipif(devices.count() > 0, reason="there is a GPU")
@pytest.mark.parametrize("command", ["audit", "tune"])
def test_without_a_gpu_it_says_so(command: str) -> None:
    result = runner.invoke(cli.app, [command])
    assert result.exit_code == 2 and result.stderr.startswith("gpukit: no NVIDIA driver")


def test_options_that_no_round_can_have() -> None:
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"layers": 0}, "layers: expected at least 1, got 0"),
        ({"weights": -1}, "weights: expected at least 0, got -1"),
        ({"decodes": 0}, "decodes: expected at least 1, got 0"),
        ({"slots": 1.5}, "slots: expected an integer, got float"),
        ({"device": "0"}, "device: expected an integer, got str"),
    ]
    for wrong, message in wrongs:
        with pytest.raises(ArgumentError, match=message):
            rounds.RoundOptions(**wrong)
    assert rounds.RoundOptions(prefill=1, decodes=3).phases == {"prefill": 1, "decode": 3} and rounds.RoundOptions().phases == {"decode": 1}
    with pytest.raises(ArgumentError, match="name: expected a round that is not registered yet"):
        rounds.register("synthetic", "again")(lambda options: None)  # type: ignore[arg-type,return-value]
