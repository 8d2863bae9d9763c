"""`gpukit audit` and `gpukit tune` from outside, on a made-up round and device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

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

        monkeypatch.setitem(rounds._builders, "made up", ("for a test", build))
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


@pytest.mark.skipif(devices.count() > 0, reason="there is a GPU")
@pytest.mark.parametrize("command", ["audit", "tune"])
def test_without_a_gpu_it_says_so(command: str) -> None:
    result = runner.invoke(cli.app, [command])
    assert result.exit_code == 2 and result.stderr.startswith("gpukit: no NVIDIA driver")


def test_options_that_no_round_can_have() -> None:
    for wrong in ({"layers": 0}, {"weights": -1}, {"decodes": 0}):
        with pytest.raises(ArgumentError, match="options: expected numbers from 1"):
            rounds.RoundOptions(**wrong)
    assert rounds.RoundOptions(prefill=1, decodes=3).phases == {"prefill": 1, "decode": 3} and rounds.RoundOptions().phases == {"decode": 1}
    with pytest.raises(ArgumentError, match="name: expected a round that is not registered yet"):
        rounds.register("synthetic", "again")(lambda options: None)  # type: ignore[arg-type,return-value]
