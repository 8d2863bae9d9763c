"""The environment report: complete where everything is there, and never an error where something is not."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gpukit import cli, devices, info
from gpukit.compile import cache
from gpukit.devices import DeviceProperties
from gpukit.errors import DeviceError

DEVICE = DeviceProperties(0, "NVIDIA H200", (9, 0), 132, 150_000_000_000, 62_914_560, 39_321_600, 134_217_728)


def printed(report: dict) -> str:
    text = io.StringIO()
    info.print_report(report, Console(file=text, width=200))
    return text.getvalue()


@pytest.fixture
def no_driver(monkeypatch):
    def refuse() -> None:
        raise DeviceError("no NVIDIA driver on this machine")

    def forbidden(*_: object) -> None:
        raise AssertionError("a driver call after a failed initialisation")

    monkeypatch.setattr(devices, "driver", refuse)
    monkeypatch.setattr(devices, "count", forbidden)


@pytest.fixture
def two_devices(monkeypatch):
    """A driver with two devices, of which the second cannot be read."""

    def properties(ordinal: int) -> DeviceProperties:
        if ordinal:
            raise DeviceError("cuDeviceGet(1) failed: CUDA_ERROR_UNKNOWN")
        return DEVICE

    monkeypatch.setattr(devices, "driver", lambda: SimpleNamespace(cuDriverGetVersion=lambda: (0, 13020)))
    monkeypatch.setattr(devices, "count", lambda: 2)
    monkeypatch.setattr(devices, "properties", properties)


def test_the_base_is_reported(no_driver):
    report = info.collect()
    assert report["python"]["version"] == sys.version.split()[0]
    assert report["platform"]["cpus"] >= 1
    assert report["packages"]["numpy"] == metadata.version("numpy")
    assert report["packages"].keys() == set(info.PACKAGES)


def test_without_a_driver_the_reason_is_given_and_no_call_is_made(no_driver):
    report = info.collect()
    assert report["driver"] == report["devices"] == {"error": "no NVIDIA driver on this machine"}
    assert "not available: no NVIDIA driver on this machine" in printed(report)


def test_devices_are_reported_and_one_does_not_hide_another(two_devices):
    report = info.collect()
    assert report["driver"]["cuda"] == "13.2"
    first, second = report["devices"]
    assert (first["name"], first["compute_capability"], first["l2"]) == ("NVIDIA H200", (9, 0), 62_914_560)
    assert second == {"error": "cuDeviceGet(1) failed: CUDA_ERROR_UNKNOWN"}
    text = printed(report)
    for expected in ("NVIDIA H200", "9.0", "62,914,560", "39,321,600", "134,217,728", "not available: cuDeviceGet(1) failed"):
        assert expected in text


@pytest.mark.parametrize("probe", ["_python", "_platform", "_version", "_driver", "_cache"])
def test_a_probe_that_fails_is_reported_and_the_rest_stays(monkeypatch, no_driver, probe):
    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(info, probe, fail)
    report = info.collect()
    section = probe[1:] if probe != "_version" else "packages"
    failed = report[section]["numpy"] if probe == "_version" else report[section]
    assert failed == {"error": "out of luck"}
    assert "out of luck" in printed(report)
    json.dumps(report)


def test_the_cache_is_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "directory", lambda: tmp_path / "cubin")
    assert info.collect()["cache"] == {"directory": str(tmp_path / "cubin"), "cubins": 0, "bytes": 0}
    (tmp_path / "cubin").mkdir()
    (tmp_path / "cubin" / "bind.cubin").write_bytes(b"12345")
    (tmp_path / "cubin" / "bind.part").write_bytes(b"1")
    assert info.collect()["cache"] == {"directory": str(tmp_path / "cubin"), "cubins": 1, "bytes": 5}


def test_packages_that_are_missing_are_none_in_json_and_left_out_of_the_table(monkeypatch, no_driver):
    monkeypatch.setattr(info, "PACKAGES", ("numpy", "no-such-package"))
    report = info.collect()
    assert report["packages"]["no-such-package"] is None
    assert "no-such-package" not in printed(report) and "packages numpy" in printed(report)


def test_the_command_prints_a_table_or_json():
    runner = CliRunner()
    table = runner.invoke(cli.app, ["info"])
    assert table.exit_code == 0 and "python version" in table.stdout
    fields = json.loads(runner.invoke(cli.app, ["info", "--json"]).stdout)
    assert fields.keys() == {"python", "platform", "packages", "driver", "cache", "devices"}


def test_the_report_imports_no_gpu_library():
    program = "import sys; from gpukit import info; info.collect(); print(sorted({'cupy', 'torch', 'numba', 'jax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_report_works_where_cuda_bindings_is_missing():
    program = "import sys; sys.modules['cuda'] = None; from gpukit import info; print(sorted(info.collect()['devices']))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "['error']"
