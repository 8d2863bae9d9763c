"""The decode step on the device against its reference: the same rounds on device arrays and on NumPy copies, then every array compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpukit import Signal
from gpukit.kernels.decode_step import decode_step
from gpukit.kernels.free_list import DevicePages
from tests.helpers.decode_steps import assemble, batch, extremes

IDS = ("int32", "int64")

# The compiler assumes that no int64 sum goes round. The simulator says where one does.
pytestmark = pytest.mark.filterwarnings("error:overflow encountered:RuntimeWarning")


class Pair:
    """A batch on both sides, played in step."""

    def __init__(self, device: Any, arrays: dict[str, np.ndarray], page_size: int, window: int | None, lookahead: int, swa: bool = True):
        self.device, self.page_size, self.window = device, page_size, window
        self.arrays = arrays, {name: device.array(array) for name, array in arrays.items()}
        self.sides = [assemble(side, lookahead, swa) for side in self.arrays]
        self.signals = Signal(), Signal(like=self.arrays[1]["rows"])

    def play(self, advance: np.ndarray | None = None) -> None:
        for made, signal in zip(self.sides, self.signals, strict=True):
            if advance is not None:
                made.state.advance[:] = advance if made is self.sides[0] or self.device.simulated else _cupy(advance)
            decode_step(
                *(made.state, self.page_size, self.window, made.full, made.swa, made.virtual_pages, made.full_pages, made.swa_pages),
                signal=signal,
            )

    def assert_equal(self) -> None:
        for name, here in self.arrays[0].items():
            np.testing.assert_array_equal(self.device.host(self.arrays[1][name]), here, err_msg=name)
        for name in ("virtual_pages", "full_pages", "swa_pages"):
            here, there = getattr(self.sides[0], name), getattr(self.sides[1], name)
            if here is not None:
                for array in ("counters", "ring"):
                    np.testing.assert_array_equal(self.device.host(getattr(there, array)), getattr(here, array), err_msg=f"{name}.{array}")
                assert not self.device.host(there.workspace).any()
        assert self.signals[1].counts() == self.signals[0].counts()


def _cupy(values: np.ndarray) -> Any:
    import cupy

    return cupy.asarray(values)


def batch_sizes(device: Any, large: bool) -> tuple[int, ...]:
    """Around one block, and several: blocks count the batch in strides of four lanes a thread."""
    if device.simulated:
        return (0, 1, 1_100) if large else (0, 1, 300)
    return (0, 1, 7, 255, 256, 257, 1_024, 1_100, 4_096, 5_000)


@pytest.mark.parametrize("lookahead", [1, 4])
@pytest.mark.parametrize("page_size", [1, 3, 64, 256])
def test_equals_the_reference(device: Any, page_size: int, lookahead: int) -> None:
    if device.simulated and lookahead == 4 and page_size in (64, 256):
        pytest.skip("nothing that page size 3 does not show")
    rng = np.random.default_rng([page_size, lookahead])
    for lanes in batch_sizes(device, (page_size, lookahead) == (3, 1)):
        row_type, length_type = rng.permutation(IDS)
        window = [None, 0, page_size + 3][int(rng.integers(3))] if lanes < 300 else page_size + 3
        arrays = batch(
            rng,
            **{"lanes": lanes, "page_size": page_size, "lookahead": lookahead, "columns": 12 + 8 * lookahead, "window": window},
            **{"spare": 30 + 6 * lanes * lookahead, "row_type": row_type, "length_type": length_type, "width": 15},
        )
        pair = Pair(device, arrays, page_size, window, lookahead)
        rounds = 2 if device.simulated else 5
        for number in range(rounds):
            pair.play(rng.integers(1, lookahead + 1, lanes).astype(length_type) if number else None)
            pair.assert_equal()
        assert int(arrays["status"][0]) == rounds


@pytest.mark.parametrize("lanes", [5, 300])
@pytest.mark.parametrize("short", ["virtual", "full", "swa", "row"])
def test_a_step_that_cannot_be_served_changes_nothing(device: Any, short: str, lanes: int) -> None:
    """And the next one is served, when there is room."""
    rng = np.random.default_rng(lanes)
    arrays = batch(rng, lanes=lanes, page_size=2, columns=12, spare=lanes + 50)
    arrays["lengths"][:] = arrays["pages"] * 2
    spared = {name: arrays[f"free {name}"] for name in ("virtual", "full", "swa")}
    row = max(int(arrays["requests"].max()), 0)
    before = int(arrays["lengths"][row]), int(arrays["pages"][row])
    if short == "row":
        arrays["lengths"][row], arrays["pages"][row] = 24, 12
    else:
        arrays[f"free {short}"] = spared[short][:2]
    pair = Pair(device, arrays, 2, 4, 1)
    pair.play()
    pair.assert_equal()
    assert arrays["status"].tolist()[:2] == [0, 1] and set(pair.signals[0].counts()) == {"exhausted"}
    for made, side in zip(pair.sides, pair.arrays, strict=True):
        if short == "row":
            side["lengths"][row : row + 1], side["pages"][row : row + 1] = before
        else:
            more = spared[short][2:]
            pages: DevicePages = getattr(made, f"{short}_pages")
            pages.fill(more if made is pair.sides[0] else device.array(more))
    pair.play()
    pair.assert_equal()
    assert arrays["status"].tolist()[:2] == [1, 1]


def test_lanes_that_make_no_sense(device: Any) -> None:
    arrays = batch(np.random.default_rng(6), lanes=8, page_size=4, columns=12, spare=80)
    arrays["requests"][:] = [0, 1, 99, 3, 4, 5, 6, 2**40]
    arrays["lengths"][:7], arrays["pages"][:7], arrays["retired"][:7] = 8, 2, 0
    arrays["advance"][1], arrays["advance"][3] = -1, 1
    arrays["pages"][4] = arrays["retired"][5] = -3
    arrays["retired"][6], arrays["lengths"][0] = 3, -5
    pair = Pair(device, arrays, 4, 2, 1)
    pair.play()
    pair.assert_equal()
    assert pair.signals[0].counts() == {"out_of_range": 2, "mismatch": 6}


@pytest.mark.parametrize("lanes", [9, 300])
def test_sums_that_go_round_and_lengths_beyond_31_bits(device: Any, lanes: int) -> None:
    """Padding wherever a block counts: as what it serves, as what lies before it, and as what it changes."""
    arrays = batch(np.random.default_rng(6), lanes=lanes, page_size=4, columns=12, spare=lanes + 80)
    arrays["requests"][:] = range(lanes)
    for row in range(0, lanes, 2):
        length, pages, advance = (
            (8, 2, 2**63 - 1), (2**63 - 1, 2, 1), (2**63 - 1, 2**63 - 1, 2**63 - 1), (8, 2, -(2**63)), (2**31, 2**31, 0), (2**31 - 2, 2**31, 1),
        )[row // 2 % 6]  # fmt: skip
        arrays["lengths"][row], arrays["pages"][row], arrays["advance"][row], arrays["retired"][row] = length, pages, advance, 0
    pair = Pair(device, arrays, 4, 2, 1)
    pair.play()
    pair.assert_equal()
    assert pair.signals[0].counts() == {"mismatch": (lanes + 1) // 2} and arrays["status"].tolist() == [1, 0, 0]


@pytest.mark.parametrize("page_size", [3, 4])
@pytest.mark.parametrize("lanes", [40, 300])
def test_extreme_values_together(device: Any, page_size: int, lanes: int) -> None:
    """Every number of a lane is one where sums, differences and products leave 64 or 31 bits, beside lanes that are ordinary."""
    arrays = batch(np.random.default_rng(6), lanes=lanes, page_size=page_size, columns=12, spare=lanes + 200)
    lengths = extremes(np.random.default_rng([page_size, lanes]), arrays, page_size)
    pair = Pair(device, arrays, page_size, 2 * page_size, 1)
    pair.play()
    pair.assert_equal()
    assert arrays["status"].tolist() == [1, 0, 0] and pair.signals[0].counts()["mismatch"] == lengths.count(None)


def test_bad_pages_in_a_magazine_are_skipped(device: Any) -> None:
    """A page of a magazine that is none is counted and stays out of the tables."""
    arrays = batch(np.random.default_rng(6), lanes=4, page_size=1, columns=12, spare=80)
    arrays["requests"][:] = range(4)
    arrays["free full"][:2], arrays["free virtual"][2] = [0, 2**40], -1
    arrays["lengths"][:4] = arrays["pages"][:4]
    pair = Pair(device, arrays, 1, None, 1)
    pair.play()
    pair.assert_equal()
    assert pair.signals[0].counts()["out_of_range"] == 4


def test_pages_that_are_not_live_any_more(device: Any) -> None:
    """Retired behind the step's back: counted, and nothing is pushed for them."""
    rng = np.random.default_rng(3)
    lanes = 300
    arrays = batch(rng, lanes=lanes, page_size=1, columns=20, spare=400, window=6)
    arrays["retired"][:] = np.maximum(arrays["retired"] - 2, 0)
    pair = Pair(device, arrays, 1, 6, 1)
    pair.play()
    pair.assert_equal()
    assert pair.signals[0].counts()["unbound"] > 50


def test_without_a_window_pool(device: Any) -> None:
    arrays = batch(np.random.default_rng(4), lanes=270, page_size=2, columns=14, spare=600)
    pair = Pair(device, arrays, 2, 5, 1, swa=False)
    for _ in range(2):
        pair.play()
        pair.assert_equal()
    assert (arrays["locations"][1] == 0).all()


def test_a_ring_that_wraps(device: Any) -> None:
    """Heads and tails beyond the end of a ring, and beyond 2**31."""
    for passes in (1, 2**26):
        arrays = batch(np.random.default_rng(5), lanes=40, page_size=1, columns=16, spare=60, window=3)
        pair = Pair(device, arrays, 1, 3, 1)
        for made in pair.sides:
            for pages in (made.virtual_pages, made.full_pages, made.swa_pages):
                size = pages.capacity
                turn = size * passes + size - 20
                ring, held = device.host(pages.ring) if made is pair.sides[1] else pages.ring, pages.known
                moved = np.zeros(size, np.int64)
                moved[(turn + np.arange(held)) % size] = ring[:held]
                counters = np.array([turn, turn + held])
                for name, values in (("ring", moved), ("counters", counters)):
                    getattr(pages, name)[:] = values if made is pair.sides[0] or device.simulated else _cupy(values)
        for _ in range(2):
            pair.play()
            pair.assert_equal()
        assert arrays["status"][0] == 2
