"""What a replay leaves behind: numbers that agree with the calls made, JSON that reads back, a picture, a table without colour codes."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gpukit import pictures
from gpukit.decode import DecodeOptions, DecodeReport, Request, plot, run
from gpukit.decode.backend import Meter, NumpyBackend, OpTimes
from gpukit.decode.checks import Violation
from gpukit.decode.report import summarize
from gpukit.errors import ArgumentError
from tests.helpers.fake_device import FakeDevice

OPTIONS = DecodeOptions(page_size=4, window=12, batch=4, pages=44, swa_pages=14, backend="numpy")


@pytest.fixture(scope="module")
def report() -> DecodeReport:
    return run(OPTIONS, [Request(index, 20 + index, 20) for index in range(6)])


def printed(report: DecodeReport) -> str:
    text = io.StringIO()
    report.print(Console(file=text, width=160))
    return text.getvalue()


def test_op_times_are_summed_and_their_median_taken():
    host, device = OpTimes([1000, 9000, 2000], []), OpTimes([4000], [2.0])
    first, second = summarize({"a": host, "b": device})
    assert (first.op, first.calls, first.host_us_median, first.host_ms_total) == ("a", 3, 2.0, 0.012)
    assert (first.device_us_median, first.device_ms_total) == (None, None)
    assert (second.device_us_median, second.device_ms_total) == (2.0, 0.002)


def test_the_meter_passes_arguments_and_results_on_and_counts_calls():
    meter = Meter(NumpyBackend())
    assert meter("divmod", divmod, 7, 2) == (3, 1) and meter("sorted", sorted, [1, 2], reverse=True) == [2, 1]
    meter("divmod", divmod, 1, 1)
    assert {op: len(times.host_ns) for op, times in meter.times.items()} == {"divmod": 2, "sorted": 1}
    assert all(times.device_us == [] for times in meter.times.values())


def test_device_times_are_read_only_when_they_are_settled():
    device = FakeDevice()
    meter = Meter(device)
    meter("divmod", divmod, 7, 2)
    assert device.waits == 0 and meter.times["divmod"].device_us == []
    meter.settle()
    meter.settle()
    assert device.waits == 1 and meter.times["divmod"].device_us == [1.0]


def test_counts_agree_with_the_calls(report):
    calls = {op.op: op.calls for op in report.ops}
    assert calls["free_list.gather_decode"] == calls["metadata.decode_metadata"] == report.rounds
    assert calls["sliding_window.free_segment"] == report.finished + report.preempted
    assert len(report.timeline.full_used) == len(report.timeline.waiting) == report.rounds
    assert report.peak_pages == max(report.timeline.full_used) <= OPTIONS.pages
    assert report.peak_running == max(report.timeline.running) <= OPTIONS.batch


def test_json_reads_back(report):
    fields = json.loads(replace(report, options=replace(OPTIONS, trace=Path("a.csv"))).to_json())
    assert (fields["ok"], fields["partial"], fields["options"]["trace"], fields["rounds"]) == (True, False, "a.csv", report.rounds)
    assert fields["ops"][0].keys() >= {"op", "calls", "host_us_median", "device_us_median"}
    assert fields["timeline"]["swa_used"] == report.timeline.swa_used


def test_the_table_names_every_op_and_every_total(report):
    text = printed(report)
    for op in report.ops:
        assert op.op in text
    for line in ("requests finished", "6 of 6", "requests preempted", "peak SWA pages", "tokens generated", "120"):
        assert line in text
    assert text.startswith("backend: numpy (asked for)")
    assert "device" not in text
    assert f"the whole trace was played; no violations in {report.rounds:,} rounds checked" in text


def test_device_columns_appear_with_device_times(report):
    text = printed(replace(report, ops=summarize({"a": OpTimes([4000], [2.5]), "b": OpTimes([4000], [])})))
    assert "device µs" in text and "2.5" in text


def test_violations_are_printed_by_name(report):
    found = replace(report, stopped="violation", violations=[Violation(3, "lost_page", "full page [7]: expected one owner, got no owner")])
    text = printed(found)
    assert "violation: lost_page after round 3: full page [7]: expected one owner" in text
    assert "partial report: stopped at the first violation; 1 violations" in text


def test_an_unchecked_replay_does_not_claim_to_be_clean(report):
    text = printed(replace(report, checked_rounds=0, stopped="interrupt"))
    assert "partial report: interrupted; nothing was checked" in text and "no violations" not in text


@pytest.mark.parametrize("ending", pictures.FORMATS)
def test_the_picture_is_written_in_each_format(report, tmp_path, ending):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"pages{ending}"
    plot.save(report, path)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml", b"%PDF-")
    assert "matplotlib.pyplot" not in sys.modules


def test_an_empty_replay_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plot.save(run(OPTIONS, [Request(0, 1000, 1)]), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0


def test_pictures_that_cannot_be_drawn_are_refused(monkeypatch):
    with pytest.raises(ArgumentError, match=r"plot: expected a file name ending in .png, .svg, .pdf, got pages.bmp"):
        pictures.require("pages.bmp")
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="plot: expected matplotlib to be installed"):
        pictures.require("pages.png")
