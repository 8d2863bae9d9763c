"""A device that is not there: NumPy arrays behind the interface of a GPU backend, for tests of what must not happen on one."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpukit.decode.backend import NumpyBackend


class FakeDevice(NumpyBackend):
    """Says that it is a GPU, counts waits and copies to the host, and has a clock that ticks once per mark."""

    name = "gpu"

    def __init__(self) -> None:
        self.waits = 0
        self.reads = 0
        self.clock = 0

    def to_device(self, host: np.ndarray) -> Any:
        # A copy, as an upload would be.
        return host.copy()

    def to_host(self, array: Any) -> np.ndarray:
        self.reads += 1
        return np.array(array)

    def synchronize(self) -> None:
        self.waits += 1

    def mark(self) -> Any:
        self.clock += 1
        return self.clock

    def microseconds(self, begin: Any, end: Any) -> float:
        return float(end - begin)
