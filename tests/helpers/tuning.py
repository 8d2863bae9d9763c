"""A laboratory for `tune`: graphs on a driver that captures nothing, timed as the test says."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpukit import devices
from gpukit.graphs import Built, Limits, Plan, Region, Reservation, capture
from tests.helpers.graphs import H200, MIB, FakeGraphs

module: Any = importlib.import_module("gpukit.graphs.tune")
DEFAULT = 11_796_480
STREAM = 77
REGIONS = {"states": Region(1 << 30, 64 * MIB), "pool": Region(1 << 31, 307_888_128)}


class Lab:
    """Builds graphs of two kernels, and times them as a table of changes in percent says: by candidate, or by candidate and phase."""

    def __init__(self, fake: FakeGraphs):
        self.fake = fake
        self.changes: dict[Any, float] = {}
        self.noise = 0.02
        self.seen: dict[str, set[int]] = {}
        self.plans: dict[str, Plan] = {}
        self.built = 0
        self.generator = np.random.default_rng(1)
        self.broken = ""
        # Changes from this many timed stretches on, instead.
        self.later: tuple[int, dict[Any, float]] = (1 << 30, {})
        self.count = itertools.count()

    def build(self, plan: Plan) -> Built:
        self.built += 1
        self.plans[plan.name] = plan
        with capture(STREAM, plan=plan) as graph:
            self.fake.launch(STREAM, "advance")
            self.fake.launch(STREAM, "weights")

        def outputs(seed: int) -> list[Any]:
            return [np.arange(4) + seed + (plan.name == self.broken)]

        return Built({"prefill": graph, "decode": graph}, STREAM, outputs)

    def timed(self, arm: Any, cycles: int) -> dict[str, list[float]]:
        name, limit = arm.recipe.name, self.fake.limits[1000]
        self.seen.setdefault(name, set()).add(limit)
        after, changes = self.later
        changes = changes if next(self.count) >= after else self.changes
        found = {}
        for phase, runs in arm._phases.items():
            percent = changes.get((name, phase), changes.get(name, 0.0)) + self.noise * self.generator.standard_normal()
            found[phase] = [1e-3 * runs * (1 + percent / 100)] * cycles
        return found


def open_lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """A laboratory, and afterwards: nothing of it is left on the device."""
    fake = FakeGraphs()
    fake.install(monkeypatch)
    made = Lab(fake)
    limits = Limits()
    monkeypatch.setattr(module, "Reservation", lambda size, device: Reservation(size, device, limits=limits))
    monkeypatch.setattr(module._Arm, "_timed", lambda self, cycles: made.timed(self, cycles))
    monkeypatch.setattr(devices, "properties", functools.cache(lambda device=0: H200))
    yield made
    assert fake.limits == {1000: DEFAULT} and fake.allocated == 0 and limits.requests(0) == ()
    assert not fake.executables and all(graph.destroyed for graph in fake.graphs.values())
    fake.restore()
