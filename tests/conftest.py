"""Fixtures. Device tests run in two places: in the simulator's own process (NUMBA_ENABLE_CUDASIM=1, small sizes) and on a GPU (`-m gpu`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

SIMULATOR = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


def pytest_configure(config: pytest.Config) -> None:
    if "GPUKIT_CACHE_DIR" not in os.environ and os.environ.get("CI"):
        os.environ["GPUKIT_CACHE_DIR"] = str(config.rootpath / ".pytest_cache" / "cubin")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from gpukit import devices
    from tests.helpers.device import has_gpu

    gpu = not SIMULATOR and has_gpu()
    several = gpu and devices.count() > 1
    # Tests that have a time limit of their own come first: of several processes none shall wait for one at the end.
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)
    for item in items:
        on_device = "device" in getattr(item, "fixturenames", ())
        if on_device:
            item.add_marker(pytest.mark.gpu if not SIMULATOR else pytest.mark.simulator)
        if on_device and not SIMULATOR and not gpu:
            item.add_marker(pytest.mark.skip(reason="device test: runs in the simulator's process or on a GPU"))
        elif item.get_closest_marker("gpu") and not gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        elif item.get_closest_marker("gpu2") and not several:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Device arrays with guard bytes, checked when the test ends."""
    from tests.helpers.device import CupyDevice, Device, SimulatedDevice

    made: Device
    if SIMULATOR:
        made = SimulatedDevice()
        made.install(monkeypatch)
    else:
        made = CupyDevice()
    yield made
    made.check_guards()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`size` runs over the sizes of the device at hand."""
    from tests.helpers.device import CupyDevice, SimulatedDevice

    if "size" in metafunc.fixturenames:
        metafunc.parametrize("size", (SimulatedDevice if SIMULATOR else CupyDevice).sizes)


@pytest.fixture
def card() -> Iterator[Any]:
    """A GPU through CuPy, whose arrays lie between guard bytes."""
    from tests.helpers.device import CupyDevice

    made = CupyDevice()
    yield made
    made.check_guards()


@pytest.fixture(params=["one by one", "in bulk"])
def direct_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels of `gated_delta.direct`, one after the other, whatever the number of heads."""
    from gpukit.kernels import gated_delta

    monkeypatch.setattr(gated_delta, "_BULK_NUMBERS", range(2**40 if request.param == "in bulk" else 0))
