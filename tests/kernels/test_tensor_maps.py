"""What the host says of the rows that kernels of few tokens copy by tensor maps: which planes, how long, how many, in the order that they read."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from gpukit.compile.cuda_c import source_path
from gpukit.kernels import _moe_decode, _tensor_maps
from gpukit.kernels._moe import Geometry

EXPERTS = 5
GATE_UP, DOWN, SHARED_GATE_UP, SHARED_DOWN = (10, 11, 12), (20, 21, 22), (30, 31, 32), (40, 41, 42)
GATE_ROWS, DOWN_ROWS = 2 * 512, 2048


def geometry(gate_up: str, down: str, is_other: bool = False, paths: int = 9) -> Geometry:
    banks = (GATE_UP, DOWN, SHARED_GATE_UP, SHARED_DOWN)
    return Geometry(EXPERTS, 2048, 512, paths, gate_up, down, 1, *banks, is_other, is_other, 0, 0)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    calls: list[tuple[int, ...]] = []

    def describe(*call: int) -> bytes:
        calls.append(call)
        return bytes(128)

    monkeypatch.setattr(_moe_decode, "rows_by_lines", describe)
    _moe_decode.experts_few_maps.cache_clear()
    yield calls
    _moe_decode.experts_few_maps.cache_clear()


def test_base_and_high_bits_of_all_banks_in_the_order_of_the_kernel(described: list[tuple[int, ...]]) -> None:
    maps = _moe_decode.experts_few_maps(geometry("q6", "q6"), 3)
    assert described == [
        (3, 10, 1024, EXPERTS * GATE_ROWS, 8), (3, 11, 512, EXPERTS * GATE_ROWS, 8), (3, 30, 1024, GATE_ROWS, 8), (3, 31, 512, GATE_ROWS, 8),
        (3, 20, 256, EXPERTS * DOWN_ROWS, 16), (3, 21, 128, EXPERTS * DOWN_ROWS, 16), (3, 40, 256, DOWN_ROWS, 16), (3, 41, 128, DOWN_ROWS, 16),
    ]  # fmt: skip
    assert len(maps) == 8 * 128


@pytest.mark.parametrize(("is_other", "paths"), [(True, 9), (False, 8)])
def test_high_bits_of_less_than_a_line_and_a_shared_expert_elsewhere_have_none(is_other: bool, paths: int, described: list[tuple[int, ...]]) -> None:
    _moe_decode.experts_few_maps(geometry("q4", "q5", is_other, paths), 0)
    assert [call[1] for call in described] == [10, 10, 20, 20]
    assert [call[2] for call in described] == [1024, 1024, 256, 256]


def test_maps_are_made_once_for_the_same_banks(described: list[tuple[int, ...]]) -> None:
    for _ in range(2):
        _moe_decode.experts_few_maps(geometry("q6", "q6"), 0)
    assert len(described) == 8
    _moe_decode.experts_few_maps(geometry("q6", "q6"), 1)
    assert len(described) == 16


def test_host_and_device_agree_on_sizes() -> None:
    text = source_path("staging").with_name("staging.cuh").read_text()
    assert int(re.search(r"struct alignas\(64\) TensorMap \{\s*char bytes\[(\d+)\];", text)[1]) == _tensor_maps._MAP_BYTES
    tile = source_path("moe_tile").with_name("moe_tile.cuh").read_text()
    assert int(re.search(r"static constexpr int LINE = (\d+)", tile)[1]) == _tensor_maps.LINE
