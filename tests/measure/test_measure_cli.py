"""`gpukit ladder` from outside, the pictures, and that measuring is light to import."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gpukit import cli, pictures
from gpukit.errors import ArgumentError
from gpukit.measure import KernelTraffic, Roofline, analyze, plots
from tests.helpers import ladders

runner = CliRunner()


@pytest.fixture
def good(tmp_path):
    return str(ladders.write(tmp_path / "good.csv", ladders.noisy(0, 0.02, {"window": -0.5}), null="null", tag="trial"))


@pytest.fixture
def cut(tmp_path, good):
    path = tmp_path / "cut.csv"
    path.write_text("".join(open(good).readlines()[:20]))
    return str(path)


def ladder(*words: str):
    return runner.invoke(cli.app, ["ladder", *words])


def test_run_writes_a_file_that_verify_accepts(tmp_path):
    path = str(tmp_path / "a.csv")
    options = ["--passes", "4", "--repetitions", "2", "--warmup", "0", "--noise-limit", "99", "--replication-limit", "3", "--tag", "mine"]
    result = ladder("run", "translate", "--out", path, *options)
    assert result.exit_code == 0 and "16 cells" in result.stdout, result.output
    result = ladder("verify", path)
    assert result.exit_code == 0 and result.stdout == f"{path}: one connected run: 4 passes × 4 arms = 16 cells\n"
    result = ladder("analyze", path, "--json", "-")
    design = json.loads(result.stdout)["header"]["design"]
    assert [design[name] for name in ("passes", "repetitions", "warmup", "noise_limit", "replication_limit", "tag")] == [4, 2, 0, 99, 3, "mine"]
    result = ladder("run", "translate", "--out", path)
    assert result.exit_code == 2 and "never overwritten" in result.stderr


def test_run_names_the_workloads_and_bad_numbers(tmp_path):
    result = ladder("run", "nothing", "--out", str(tmp_path / "a.csv"))
    assert result.exit_code == 2 and "workload: expected one of translate" in result.stderr
    result = ladder("run", "translate", "--out", str(tmp_path / "a.csv"), "--passes", "1")
    assert result.exit_code == 2 and "passes: expected a whole number from 3" in result.stderr and not (tmp_path / "a.csv").exists()


def test_verify_rejects_one_of_several_and_names_each(good, cut):
    result = ladder("verify", good, cut)
    assert result.exit_code == 1
    assert f"{good}: one connected run: 8 passes × 4 arms = 32 cells" in result.stdout and f"{cut}: REJECTED: line 21: truncated" in result.stdout
    result = ladder("verify", good, "nowhere.csv")
    assert result.exit_code == 2 and "path: expected a readable ladder file, got nowhere.csv" in result.stderr and result.stdout == ""


def test_analyze_prints_and_passes_a_ladder_that_counts(good):
    result = ladder("analyze", good)
    assert result.exit_code == 0 and "qualified" in result.stdout and "-0.5" in result.stdout and "better" in result.stdout


def test_analyze_fails_a_ladder_that_does_not_count_and_still_prints_it(tmp_path):
    path = ladders.write(tmp_path / "noisy.csv", ladders.noisy(0, 5.0))
    result = ladder("analyze", str(path))
    assert result.exit_code == 1 and "disqualified: noise" in result.stdout and "window" in result.stdout


def test_analyze_refuses_an_unverified_file_unless_told_otherwise(cut):
    result = ladder("analyze", cut)
    assert result.exit_code == 2 and "expected a verified ladder file" in result.stderr
    result = ladder("analyze", cut, "--unverified")
    assert result.exit_code == 1 and "disqualified: unverified" in result.stdout


def test_analyze_takes_any_pair(good):
    result = ladder("analyze", good, "--base", "window", "--arm", "zero", "--arm", "null", "--csv", "-")
    assert [(row["base"], row["arm"]) for row in csv.DictReader(io.StringIO(result.stdout))] == [("window", "zero"), ("window", "null")]
    assert "qualified" in result.stderr
    result = ladder("analyze", good, "--base", "window", "--csv", "-")
    assert [row["arm"] for row in csv.DictReader(io.StringIO(result.stdout))] == ["stock", "null", "zero"]
    result = ladder("analyze", good, "--arm", "nobody")
    assert result.exit_code == 2 and "pairs: expected arms of" in result.stderr


def test_analyze_combines_several_ladders_and_writes_every_form(tmp_path, good):
    other = ladders.write(tmp_path / "other.csv", ladders.noisy(1, 0.02, {"window": -0.53}), null="null")
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "png")}
    result = ladder("analyze", good, str(other), "--json", str(files["json"]), "--csv", str(files["csv"]), "--plot", str(files["png"]))
    assert result.exit_code == 0 and "2 of 2 ladders count, replicated" in result.stdout, result.output
    assert json.loads(files["json"].read_text())["ok"] and files["csv"].read_text().startswith("metric,base,arm,low,high")
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    result = ladder("analyze", good, good)
    assert result.exit_code == 2 and "expected each ladder once" in result.stderr
    apart = ladders.write(tmp_path / "apart.csv", ladders.noisy(2, 0.02, {"window": -0.9}), null="null")
    result = ladder("analyze", good, str(apart))
    assert result.exit_code == 1 and "not replicated" in result.stdout


def test_files_that_cannot_be_written_are_named(tmp_path, good):
    assert ladder("analyze", good, "--json", str(tmp_path / "nowhere" / "a.json")).exit_code == 2
    result = ladder("analyze", good, "--plot", str(tmp_path / "a.txt"))
    assert result.exit_code == 2 and "plot: expected a file name ending in .png" in result.stderr and result.stdout == ""


def test_pictures_are_drawn_without_a_display(tmp_path, good, cut):
    analyses = [analyze(good), analyze(cut, unverified=True)]
    plots.save_ladders(analyses, tmp_path / "ladders.svg")
    text = (tmp_path / "ladders.svg").read_text()
    assert "<svg" in text and text.count("DISQUALIFIED") == 1
    kernels = [KernelTraffic("copy", 10**8, 10**8, 54.9), KernelTraffic("read", 10**6, 0, 5.0)]
    plots.save_roofline(Roofline.of(kernels, {"dram_copy": 1503.4, "l2_read": 4000.0}), tmp_path / "roofline.pdf")
    assert (tmp_path / "roofline.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(ArgumentError, match="plot: expected a file name ending in"):
        plots.save_ladders(analyses, tmp_path / "ladders")


def test_without_matplotlib_the_plot_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="expected matplotlib to be installed"):
        pictures.require(tmp_path / "a.png")


def test_importing_measure_imports_nothing_heavy():
    heavy = ("matplotlib", "scipy", "pandas", "cupy", "torch", "numba", "cuda", "rich")
    code = f"import sys, gpukit.measure; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
