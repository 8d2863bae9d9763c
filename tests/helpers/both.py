"""One call on two sides: NumPy arrays, which run the reference, and device copies, which run the kernel. Then everything is compared."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpukit import Signal
from gpukit.kernels.free_list import DevicePages

POISON = -77


class Both:
    """The same arrays and lists on the host and on the device, with a signal each; iterate to make the call on either side.

    `lists` names `DevicePages` by capacity. Each is empty, with its head far enough in the ring for that to wrap.
    """

    def __init__(self, device: Any, lists: dict[str, int] | None = None, **arrays: np.ndarray):
        self._device = device
        self._lists = list(lists or {})
        self.host = SimpleNamespace(**arrays)
        self.there = SimpleNamespace(**{name: device.array(array) for name, array in arrays.items()})
        like = next(iter(vars(self.there).values()))
        for name, capacity in (lists or {}).items():
            for side, other in ((self.host, None), (self.there, like)):
                made = DevicePages(capacity, like=other)
                # As if so many pages had gone through it, without a launch.
                made.counters[:] = made._tail = made._taken = capacity * 2 // 3
                setattr(side, name, made)
        self._arrays = list(arrays)
        self.signals = Signal(), Signal(like=like)

    def __iter__(self) -> Iterator[tuple[SimpleNamespace, Signal]]:
        return iter(((self.host, self.signals[0]), (self.there, self.signals[1])))

    def assert_equal(self) -> None:
        for name in self._arrays:
            self._equal(getattr(self.there, name), getattr(self.host, name), name)
        for name in self._lists:
            here, there = getattr(self.host, name), getattr(self.there, name)
            self._equal(there.counters, here.counters, f"{name}.counters")
            self._equal(there.ring, here.ring, f"{name}.ring")
            assert not self._device.host(there.workspace).any(), f"{name}.workspace"
        assert self.signals[1].counts() == self.signals[0].counts()

    def held(self, name: str) -> list[int]:
        """What a list of the host's side holds, oldest first."""
        pages = getattr(self.host, name)
        head, tail = pages.counters.tolist()
        return [int(pages.ring[i % len(pages.ring)]) for i in range(head, tail)]

    def _equal(self, there: Any, here: np.ndarray, name: str) -> None:
        np.testing.assert_array_equal(self._device.host(there), here, err_msg=name)


def poison(*shape: int, dtype: str = "int64") -> np.ndarray:
    return np.full(shape, POISON, dtype)


def random_pair(rng: np.random.Generator, pages: int, share: float = 0.8, num_virtual: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Tables of a sub-pool with pages 1 … pages, and a few more physical ones, of which a random share is bound."""
    virtual_pages = pages if num_virtual is None else num_virtual
    v2p, p2v = np.full(virtual_pages + 2, -1), np.full(pages + 5, -1)
    v2p[0] = p2v[0] = 0
    bound = int(min(pages, virtual_pages) * share)
    virtual, physical = rng.permutation(virtual_pages)[:bound] + 1, rng.permutation(pages + 3)[:bound] + 1
    v2p[virtual], p2v[physical] = physical, virtual
    return v2p, p2v
