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
from gpukit.decode.scheduler import Scheduler
from gpukit.decode.sharing import Timeline, summarize_sharing
from gpukit.errors import ArgumentError
from tests.helpers.fake_device import FakeDevice

OPTIONS = DecodeOptions(page_size=4, window=12, batch=4, pages=44, swa_pages=14, backend="numpy")
REQUESTS = [Request(index, 20 + index, 20) for index in range(6)]


@pytest.fixture(scope="module")
def report() -> DecodeReport:
    return run(OPTIONS, REQUESTS)


@pytest.fixture(scope="module")
def split() -> DecodeReport:
    return run(replace(OPTIONS, memory="split"), REQUESTS)


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


def test_counts_agree_with_the_calls(report, split):
    calls = {op.op: op.calls for op in split.ops}
    assert calls["free_list.gather_decode"] == calls["metadata.decode_metadata"] == split.rounds
    assert calls["sliding_window.free_segment"] == split.finished + split.preempted
    calls = {op.op: op.calls for op in report.ops}
    assert calls["DecodeMemory.step"] - calls.get("DecodeMemory.ready", 0) == calls["UnifiedPool.refresh"] == report.rounds
    assert calls["DecodeMemory.end"] == calls["DecodeMemory.admit"] == report.finished + report.preempted
    for each in (report, split):
        timeline = each.timeline
        assert len(timeline.full_used) == len(timeline.waiting) == len(timeline.tokens) == each.rounds
        assert each.peak_pages == max(timeline.full_used) <= each.most_pages[0]
        assert each.peak_running == max(timeline.running) <= OPTIONS.batch
    assert len(report.timeline.moved) == len(report.timeline.full_holes) == report.rounds and split.timeline.moved == []
    assert split.most_pages == (OPTIONS.pages, OPTIONS.swa_pages)


def test_shares_of_the_bytes_by_hand():
    # A page of either kind is a unit of the buffer: 9 + 5 of them, sinks counted.
    options = DecodeOptions(page_size=4, window=8, batch=2, pages=8, swa_pages=4, full_layers=1, swa_layers=1)
    scheduler = Scheduler(options, [])
    timeline = Timeline(full_used=[7, 8, 1], swa_used=[0, 6, 2], waiting=[3, 1, 0], tokens=[20, 30, 4])
    timeline.full_holes, timeline.swa_holes, timeline.moved = [7, 0, 9], [0, 0, 4], [0, 2, 5]
    found = summarize_sharing(options, scheduler, timeline)
    assert (found.memory, found.rounds, found.mean_tokens, found.peak_tokens, found.moved_pages) == ("unified", 3, 25.0, 30, 5)
    assert (found.mean_use, found.peak_use, found.mean_holes, found.peak_holes) == (0.75, 1.0, 0.25, 0.5)
    timeline.waiting = [0, 0, 0]
    assert summarize_sharing(options, scheduler, timeline).mean_tokens == 18.0
    assert summarize_sharing(options, scheduler, Timeline()).mean_tokens == 0.0


def test_json_reads_back(report):
    fields = json.loads(replace(report, options=replace(OPTIONS, trace=Path("a.csv"))).to_json())
    assert (fields["ok"], fields["partial"], fields["options"]["trace"], fields["rounds"]) == (True, False, "a.csv", report.rounds)
    assert fields["ops"][0].keys() >= {"op", "calls", "host_us_median", "device_us_median"}
    assert fields["timeline"]["swa_used"] == report.timeline.swa_used
    assert [way["memory"] for way in fields["sharing"]] == ["unified", "split"]
    assert fields["sharing"][0]["mean_tokens"] == report.sharing[0].mean_tokens


def test_the_table_names_every_op_and_every_total(report):
    text = printed(report)
    for op in report.ops:
        assert op.op in text
    for line in ("requests finished", "6 of 6", "requests preempted", "peak SWA pages", "tokens generated", "120"):
        assert line in text
    for line in ("peak FULL pages", "times room was made", "split into 44 + 14 pages", "mean tokens held", "peak bytes in holes", "pages moved"):
        assert line in text
    assert text.startswith("backend: numpy (asked for)")
    assert "device" not in text
    assert f"the whole trace was played; no violations in {report.rounds:,} rounds checked" in text


@pytest.mark.parametrize(
    ("rounds", "caption"),
    [
        ((5, 7), "means over the rounds in which requests wait"),
        ((0, 0), "no request waited: means over all rounds"),
        ((0, 7), "means over the rounds in which requests wait; unified: no request waited, over all rounds"),
        ((5, 0), "means over the rounds in which requests wait; split: no request waited, over all rounds"),
    ],
)
def test_the_caption_says_which_rounds_the_means_are_over(report, rounds, caption):
    sharing = [replace(way, waiting_rounds=number) for way, number in zip(report.sharing, rounds, strict=True)]
    # A caption is broken where the table ends; the closing line follows it.
    assert f" {caption} the whole trace was played" in " ".join(printed(replace(report, sharing=sharing)).split())


def test_requests_that_all_fit_never_wait():
    report = run(OPTIONS, REQUESTS[:1])
    assert [way.waiting_rounds for way in report.sharing] == [0, 0] and report.sharing[0].mean_tokens > 0
    assert "no request waited: means over all rounds" in " ".join(printed(report).split())


def test_split_memory_is_compared_with_nothing(split):
    text = printed(split)
    assert "waits for freed pages" in text and "sliding_window.retire" in text and "split into" not in text


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
def test_the_picture_is_written_in_each_format(report, split, tmp_path, ending):
    pytest.importorskip("matplotlib")
    for each in (report, split):
        path = tmp_path / f"{each.options.memory}{ending}"
        plot.save(each, path)
        assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml", b"%PDF-")
    assert "matplotlib.pyplot" not in sys.modules


def test_an_empty_replay_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plot.save(run(OPTIONS, [Request(0, 1000, 1)]), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0


def test_a_replay_stopped_in_a_round_can_be_drawn(report, tmp_path):
    """The last round was planned and not played, so some lists of the time line are shorter."""
    pytest.importorskip("matplotlib")
    timeline = replace(report.timeline, full_holes=report.timeline.full_holes[:-1], swa_holes=report.timeline.swa_holes[:-1])
    plot.save(replace(report, timeline=timeline), tmp_path / "cut.png")
    assert (tmp_path / "cut.png").stat().st_size > 0


def test_pictures_that_cannot_be_drawn_are_refused(monkeypatch):
    with pytest.raises(ArgumentError, match=r"plot: expected a file name ending in .png, .svg, .pdf, got pages.bmp"):
        pictures.require("pages.bmp")
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="plot: expected matplotlib to be installed"):
        pictures.require("pages.png")
