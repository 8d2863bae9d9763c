"""The package as a user meets it: light to import, typed, honest about what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gpukit
from gpukit import devices, errors

HEAVY = ("torch", "cupy", "numba", "matplotlib", "cuda")


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


def test_import_is_quick_and_light() -> None:
    code = f"import time; t = time.perf_counter(); import gpukit, sys; print(time.perf_counter() - t, [m for m in {HEAVY} if m in sys.modules])"
    answers = [_run(code).split(" ", 1) for _ in range(3)]
    assert answers[0][1].strip() == "[]"
    assert min(float(seconds) for seconds, _ in answers) < 0.2


def test_the_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    assert gpukit.__version__ == version("gpukit")


def test_every_public_name_is_there() -> None:
    for name in gpukit.__all__:
        assert hasattr(gpukit, name)
    assert (Path(gpukit.__file__).parent / "py.typed").exists()


@pytest.mark.skipif(devices.count() > 0, reason="there is a GPU")
def test_without_a_driver_every_device_call_says_so() -> None:
    for call in (lambda: devices.properties(0), lambda: gpukit.warmup(subjects=["page_table"]), devices.driver):
        with pytest.raises(errors.DeviceError, match="no NVIDIA driver|not installed"):
            call()


def test_argument_errors_are_value_errors_and_type_errors_too() -> None:
    assert issubclass(errors.ArgumentError, ValueError) and issubclass(errors.ArgumentTypeError, TypeError)


def test_signal_kinds_have_the_slots_of_the_device_code() -> None:
    device = pytest.importorskip("gpukit.compile.device")
    for slot, kind in enumerate(errors.SIGNAL_KINDS):
        assert getattr(device, kind.upper()) == slot
