"""Rates and shares of ceilings: the published numbers, what counts as evidence, and what is refused. Then the census diff."""

from __future__ import annotations

import csv
import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from gpukit.errors import ArgumentError
from gpukit.measure import KernelCount, KernelTraffic, Roofline, diff_censuses

CEILINGS = {"dram_copy": 1503.4, "dram_read": 1600.0, "l2_read": 4000.0}
COPY = KernelTraffic("30 layers", 30 * (49_152 + 2_097_152), 30 * (49_152 + 2_097_152), median_us=54.944)


def printed(found: Any) -> str:
    text = io.StringIO()
    found.print(Console(file=text, width=200))
    return text.getvalue()


def test_the_published_copy_is_more_than_dram_can_do():
    row = Roofline.of([COPY], CEILINGS).rows[0]
    assert round(row.gb_per_s, 1) == 2343.8 and round(row.shares["dram_copy"], 2) == 1.56
    assert row.evidence == "1.56 × what DRAM can do (1,503.4 GB/s): another medium carries the difference"


def test_the_published_layer():
    row = Roofline.of([KernelTraffic("one layer", 2_097_152, 0, median_us=5.344)], CEILINGS).rows[0]
    assert round(row.gb_per_s, 1) == 392.4 and row.evidence == ""
    assert row.shares == pytest.approx({"dram_copy": 392.43 / 1503.4, "dram_read": 392.43 / 1600, "l2_read": 392.43 / 4000}, rel=1e-4)


@pytest.mark.parametrize(
    ("read", "written", "able"),
    [(1, 1, 1503.4), (1, 0, 1600.0), (3, 1, 4 / (2 / 1503.4 + 2 / 1600.0)), (0, 1, 1600.0)],
)
def test_dram_copies_what_is_read_and_written_and_reads_the_rest(read, written, able):
    for factor, evident in ((0.999, False), (1.001, True)):
        size = 10**9
        kernel = KernelTraffic("k", read * size, written * size, median_us=(read + written) * 1e6 / (able * factor))
        assert bool(Roofline.of([kernel], CEILINGS).rows[0].evidence) == evident


def test_a_rate_above_the_l2_is_named_too():
    row = Roofline.of([KernelTraffic("k", 10**9, 0, median_us=200.0)], CEILINGS).rows[0]
    assert "what DRAM can do" in row.evidence and "1.25 × what L2 can do" in row.evidence


def test_ceilings_that_are_not_known_have_no_share():
    table = Roofline.of([COPY], {"l2_read": 4000.0})
    assert set(table.rows[0].shares) == {"l2_read"} and table.rows[0].evidence == ""
    assert next(csv.DictReader(io.StringIO(table.to_csv())))["share_of_dram_copy"] == ""
    assert Roofline.of([COPY], {"dram_read": 1600.0}).rows[0].evidence.startswith("1.46 ×")


def test_measured_ceilings_are_taken_as_they_are():
    measured: Any = SimpleNamespace(**{name: SimpleNamespace(value=value) for name, value in CEILINGS.items()}, device="a card")
    assert Roofline.of([COPY], measured) == Roofline.of([COPY], CEILINGS)


def test_the_slowest_in_all_comes_first_in_every_form():
    kernels = [KernelTraffic("rare [x]", 1000, 0, 50.0), KernelTraffic("often", 1000, 500, 2.0, launches=100)]
    table = Roofline.of(kernels, CEILINGS)
    assert [row.name for row in table.rows] == ["often", "rare [x]"]
    assert [row["bytes_moved"] for row in json.loads(table.to_json())["rows"]] == [1500, 1000]
    assert [(row["name"], row["launches"]) for row in csv.DictReader(io.StringIO(table.to_csv()))] == [("often", "100"), ("rare [x]", "1")]
    assert "rare [x]" in printed(table) and "% of DRAM copy" in printed(table)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 0, 1.0), "bytes_read, bytes_written: expected bytes moved by k"),
        ((-1, 5, 1.0), "bytes_read, bytes_written"),
        ((1, 0, 0.0), "median_us: expected a time above 0 for k"),
        ((1, 0, float("nan")), "median_us"),
        ((1, 0, 1.0, 0), "launches: expected at least 1 of k"),
    ],
)
def test_numbers_no_kernel_has_are_refused(numbers, message):
    with pytest.raises(ArgumentError, match=message):
        KernelTraffic("k", *numbers)


@pytest.mark.parametrize("ceilings", [{}, {"hbm": 1.0}, {"dram_copy": 0.0}, {"dram_copy": float("inf")}])
def test_ceilings_no_card_has_are_refused(ceilings):
    with pytest.raises(ArgumentError, match="ceilings: expected"):
        Roofline.of([COPY], ceilings)


BEFORE = {"attention": KernelCount(40, 12.0), "norm": KernelCount(80, 2.0), "same": KernelCount(1, 5.0)}


def test_a_census_diff_lists_every_kernel_and_the_total():
    found = diff_censuses(BEFORE, {"same": KernelCount(1, 5.0), "norm": KernelCount(80, 2.5), "attention": KernelCount(40, 11.5)})
    assert found.same_kernels
    assert [(change.name, change.total_us, change.percent) for change in found.changes] == [
        ("norm", 40.0, 25.0),
        ("attention", -20.0, pytest.approx(-100 / 24)),
        ("same", 0.0, 0.0),
    ]
    assert (found.before_us, found.after_us, found.total_us) == (645.0, 665.0, 20.0)
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["name"] for row in rows] == ["norm", "attention", "same", "total"] and float(rows[-1]["total_us"]) == 20.0
    assert json.loads(found.to_json())["changes"][0]["percent"] == 25.0
    assert all(text in printed(found) for text in ("+40.000", "-20.000", "+20.000", "+25.00"))


def test_a_census_diff_of_other_kernels_says_so_first():
    found = diff_censuses(BEFORE, {"attention": KernelCount(41, 12.0), "norm": KernelCount(80, 2.0), "fused": KernelCount(1, 1.0)})
    assert found.problems == ("attention ran 40 times before and 41 after", "same ran only before", "fused ran only after")
    assert not found.same_kernels and printed(found).startswith("not the same kernels: attention ran 40 times")
    by_name = {change.name: change for change in found.changes}
    assert len(by_name) == 4 and by_name["fused"].percent is None and by_name["same"].total_us == -5.0 and found.total_us == 8.0


def test_an_empty_census_and_times_of_zero_divide_nothing():
    assert printed(diff_censuses({}, {})) and diff_censuses({"k": KernelCount(1, 0.0)}, {"k": KernelCount(1, 1.0)}).changes[0].percent is None
    with pytest.raises(ArgumentError, match="count, median_us: expected at least 1 launch"):
        KernelCount(0, 1.0)
