"""The benchmarks never rot: they run once without a GPU; and a comparison fails when it should and refuses what it cannot compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytest_benchmark", reason="the benchmarks need the extra perf")

ROOT = Path(__file__).resolve().parent.parent
ONE = "perf/test_page_copy.py::test_zero_pages"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    # In a process of pytest-xdist pytest-benchmark measures nothing; these are processes of their own.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=environment)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("perf") / "baseline.json"
    done = run(ONE, f"--benchmark-json={file}")
    assert done.returncode == 0, done.stdout
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def compare(baseline: dict[str, Any], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "0001_baseline.json"
    file.write_text(json.dumps(baseline))
    return run(ONE, f"--benchmark-compare={file}", "--benchmark-compare-fail=median:10%")


def test_the_suites_run_once_without_measuring() -> None:
    done = run("perf", "--benchmark-disable")
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("key", ["instrument", "device", "shapes"])
def test_a_baseline_of_another_kind_is_refused(baseline: dict[str, Any], key: str, tmp_path: Path) -> None:
    changed = json.loads(json.dumps(baseline))
    changed["machine_info"]["gpukit"][key] = "another"
    done = compare(changed, tmp_path)
    assert done.returncode != 0 and f"the baseline is not comparable: {key} another" in done.stdout + done.stderr


def test_a_much_quicker_baseline_fails_the_comparison(baseline: dict[str, Any], tmp_path: Path) -> None:
    changed = json.loads(json.dumps(baseline))
    for name in ("min", "max", "mean", "median"):
        changed["benchmarks"][0]["stats"][name] /= 1_000
    done = compare(changed, tmp_path)
    assert done.returncode != 0 and "Performance has regressed" in done.stdout + done.stderr


@pytest.mark.gpu
def test_a_planted_fifteen_percent_fails_and_the_same_code_passes(baseline: dict[str, Any], tmp_path: Path) -> None:
    assert compare(baseline, tmp_path).returncode == 0
    changed = json.loads(json.dumps(baseline))
    for name in ("min", "max", "mean", "median"):
        changed["benchmarks"][0]["stats"][name] /= 1.15
    done = compare(changed, tmp_path)
    assert done.returncode != 0 and "Performance has regressed" in done.stdout + done.stderr
