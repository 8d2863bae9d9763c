"""Runs the device tests in the Numba simulator, which needs a process of its own: it replaces numba.cuda for good."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(900)
@pytest.mark.skipif(os.environ.get("NUMBA_ENABLE_CUDASIM") == "1", reason="this is the simulator's process")
def test_device_code_in_the_simulator() -> None:
    pytest.importorskip("numba.cuda", reason="the simulator comes with numba-cuda")
    command = [sys.executable, "-m", "pytest", "tests/kernels", "-q", "-m", "simulator", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"})
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = [word for word in run.stdout.splitlines()[-1].replace(",", " ").split() if word.isdigit()]
    assert passed and int(passed[0]) > 100, run.stdout[-500:]
