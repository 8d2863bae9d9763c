"""Measuring on a real GPU: sleeps of known length, ceilings that agree, ladders that tell nothing from half a percent, a census."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpukit import errors
from gpukit.kernels import calibration, page_table
from gpukit.measure import analyze, ceilings, census, diff_censuses, timing, verify, workloads

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("microseconds", [5, 20, 50, 200, 1_000, 5_000])
def test_a_sleep_of_known_length_is_measured_within_five_percent(microseconds: int) -> None:
    with timing.own_stream() as stream:
        took = timing.device_time(lambda: calibration.sleep(microseconds, stream), nodes=32 if microseconds < 500 else 4, rounds=9, stream=stream)
    net = took.median - timing.empty_node_time().median
    assert abs(net / microseconds - 1) < 0.05, took


def test_work_on_another_stream_is_refused() -> None:
    with timing.own_stream() as stream, pytest.raises(errors.ArgumentError, match="call: expected work on stream"):
        timing.device_time(lambda: None, stream=stream)


def test_a_cold_call_is_slower_than_a_hot_one() -> None:
    import cupy

    table, ids = cupy.arange(-1, 500_001), cupy.random.randint(0, 500_000, 4_096)
    out = cupy.zeros(4_096, cupy.int64)

    def call() -> None:
        page_table.translate(ids, table, 1, out=out)

    hot, cold = timing.device_time(call), timing.device_time(call, cold=True)
    assert cold.median > hot.median > 0.5


def test_ceilings_agree_twice_and_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUKIT_CACHE_DIR", str(tmp_path / "cubin"))
    found = ceilings.ceilings(refresh=True)
    for name, figure in found.rows():
        if figure.unit == "GB/s":
            assert figure.agrees, (name, figure)
    assert ceilings.ceilings() == found
    assert found.l2_read.value > found.dram_read.value > found.dram_copy.value * 0.9 > 1000


@pytest.mark.timeout(250)
def test_twenty_null_ladders_and_a_planted_half_percent(tmp_path: Path) -> None:
    workload = workloads.build("copy")
    within, found = 0, 0
    for number in range(20):
        file = tmp_path / f"{number}.csv"
        workload.ladder(passes=8, repetitions=1, warmup=1, tag="copy").run(file, probes=workload.probes)
        assert verify(file).ok, verify(file)
        deltas = {(delta.base, delta.arm): delta for delta in analyze(file, [("stock", "null"), ("stock", "slower")]).deltas}
        null, slower = deltas["stock", "null"], deltas["stock", "slower"]
        within += abs(null.median) <= 3 * null.standard_error
        found += slower.median > 0 and slower.median > 3 * slower.standard_error
    assert within >= 18
    assert found >= 19


def test_a_census_counts_every_kernel_and_its_diff_is_complete() -> None:
    pytest.importorskip("torch")
    import cupy

    v2p, p2v = (cupy.asarray(table) for table in page_table.empty(1_000))
    ids, out = cupy.arange(1, 501), cupy.zeros(500, cupy.int64)

    def call() -> Any:
        page_table.bind(ids, ids, v2p, p2v)
        page_table.unbind(ids, v2p, p2v, out=out)
        page_table.bind(ids, ids, v2p, p2v)

    before = census.census(call)
    assert {name: kernel.count for name, kernel in before.items()} == {"gpukit_bind": 2, "gpukit_unbind": 1}
    assert len(diff_censuses(before, census.census(call)).changes) == 2
    assert np.isfinite(before["gpukit_bind"].median_us)
