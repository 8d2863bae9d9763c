"""The unified pool's device path in the simulator: what the host knows and when, and the same tables as on NumPy. A GPU has tests of its own.

Pools have no bytes here, because the kernels that move these are CUDA C.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpukit.memory import DecodeMemory, Entry, Part, UnifiedPool, full_and_swa, full_swa_and_state
from tests.helpers.device import SimulatedArray

ROW = Entry((Part("k", (8,), "float32"),))


@pytest.fixture
def simulated(device: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The simulated device, between which and the host the pool can copy."""
    if not device.simulated:
        pytest.skip("a GPU has tests of its own")
    from gpukit import devices
    from gpukit.memory import _arrays, bands, decode, invariants, pool, relief

    def to_device(values: np.ndarray, like: Any) -> Any:
        return device.array(values) if isinstance(like, SimulatedArray) else values

    def to_host(array: Any) -> np.ndarray:
        return np.array(array.values if isinstance(array, SimulatedArray) else array)

    def owned(array: Any) -> Any:
        return device.array(array.values) if isinstance(array, SimulatedArray) else array.copy()

    def assign(array: SimulatedArray, key: Any, value: Any) -> None:
        array.values[key] = value.values if isinstance(value, SimulatedArray) else value

    for module in (_arrays, bands, decode, invariants, pool, relief):
        for name, function in (("to_device", to_device), ("to_host", to_host), ("owned", owned)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)
    monkeypatch.setattr(SimulatedArray, "__setitem__", assign)
    monkeypatch.setattr(devices, "driver", lambda: SimpleNamespace(cuStreamSynchronize=lambda stream: (0,)))
    monkeypatch.setattr(devices, "call", lambda result, what: None)
    return device


class Twins:
    """A pool on NumPy and one on the device; `do` does the same to both, and compares them once the host has heard of everything."""

    def __init__(self, device: Any):
        like = device.array(np.zeros(1, np.int64))
        self.pools = [full_swa_and_state(60 * 128, ROW, ROW, ROW, page_size=4, bytes=False, like=side) for side in (None, like)]
        self.device = device

    def do(self, call: Callable[[UnifiedPool, int], Any]) -> list[Any]:
        results = [call(pool, side) for side, pool in enumerate(self.pools)]
        for band in self.pools[1].chain.bands:
            band.settle(None)
        for here, there in zip(*(pool.chain.bands for pool in self.pools), strict=True):
            assert here.state() == there.state()
            for name in ("v2p", "p2v"):
                np.testing.assert_array_equal(self.device.host(getattr(there, name)), getattr(here, name), err_msg=f"{here.name}.{name}")
        assert self.pools[1].check() == []
        return results


def test_the_same_tables_as_on_numpy(simulated: Any) -> None:
    twins = Twins(simulated)
    ids = twins.do(lambda pool, side: pool.alloc_joint({"full": 12, "swa": 9, "state": 5}))
    twins.do(lambda pool, side: pool.free("full", ids[side]["full"][2:7]))
    assert twins.do(lambda pool, side: pool.compact("full"))[0] > 0
    twins.do(lambda pool, side: pool.compact("swa"))
    assert twins.do(lambda pool, side: pool.make_room("swa", 3_000, 7_000)) == [True, True]
    more = twins.do(lambda pool, side: pool.alloc_joint({"full": 16, "swa": 16}, relieve=True))
    assert more[0] is not None
    twins.do(lambda pool, side: pool.unbind("swa", more[side]["full"][:6]))

    def in_a_group(pool: UnifiedPool, side: int) -> None:
        with pool.free_group():
            pool.free("state", ids[side]["state"][1:4])

    twins.do(in_a_group)
    twins.do(lambda pool, side: pool.flush("state"))
    twins.do(lambda pool, side: pool.stock("full", 3))


def test_what_the_host_knows(simulated: Any) -> None:
    """Frees are known at once where the caller vouches for them, else when a read-back has arrived; never too early."""
    pool = Twins(simulated).pools[1]
    ids = pool.alloc_joint({"full": 12, "swa": 12})["full"]
    full, swa = pool.band("full"), pool.band("swa")
    pool.free("full", ids[:3], live=3, follower_live=3)
    assert (full.hole_count, swa.hole_count, full.id_count) == (3, 3, full.num_virtual - 1 - 9)
    pool.free("full", ids[3:5])
    assert (full.hole_count, swa.hole_count) == (3, 3)
    for _ in range(2):
        pool.refresh()
    assert (full.hole_count, swa.hole_count) == (5, 5) and pool.check() == []
    pool.free("full", ids[:5], live=5, follower_live=5)
    for _ in range(2):
        pool.refresh()
    assert (full.hole_count, swa.hole_count) == (5, 5) and pool.check() == []


@pytest.mark.parametrize("lookahead", [1, 3])
def test_decode_rounds(simulated: Any, monkeypatch: pytest.MonkeyPatch, lookahead: int) -> None:
    """Mirror, lists and arrays of the same rounds on both sides."""
    memories = []
    for like in (None, simulated.array(np.zeros(1, np.int64))):
        pool = full_and_swa(120 * 4 * 32, ROW, ROW, page_size=4, bytes=False, like=like)
        memories.append(DecodeMemory(pool, num_rows=4, columns=20, lanes=3, window=8, lookahead=lookahead))
    for memory in memories:
        assert memory.admit(1, 9) and memory.admit(3, 14)
        memory.seat([3, 1])
    for number in range(14):
        for memory in memories:
            advance = np.random.default_rng(number).integers(1, lookahead + 1, 2) if lookahead > 1 and number else None
            assert memory.step(advance) and memory.check() == []
            if number % 3 == 0:
                memory.pool.refresh()
        here, there = (memory.state for memory in memories)
        for name in ("rows", "lengths", "pages", "retired", "locations", "kv_lengths", "cu_lengths", "full_table", "swa_table"):
            np.testing.assert_array_equal(simulated.host(getattr(there, name)), getattr(here, name), err_msg=f"{number}: {name}")
        for band in memories[1].pool.chain.bands:
            head, tail = simulated.host(band.holes.counters).tolist()
            assert band.hole_count <= tail - head
    for memory in memories:
        memory.end(1)
        memory.end(3)
        for band in memory.pool.chain.bands:
            band.settle(None)
        assert memory.full.live == memory.swa.live == 0 and memory.pool.check() == []
