"""Capture, windows and audits against a driver that captures nothing real: what is called in which order, what is left after every failure."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpukit import devices
from gpukit.errors import ArgumentError, DeviceError
from gpukit.graphs import (
    AccessWindow,
    Graph,
    Limits,
    Plan,
    Region,
    Reservation,
    apply,
    audit,
    capture,
    install,
    installed,
    reservation,
    set_windows,
    window,
)
from gpukit.graphs import driver as calls
from tests.helpers.driver import Result
from tests.helpers.graphs import H200, MIB, FakeGraph, FakeGraphs

DEFAULT = 11_796_480
WINDOW = AccessWindow(1 << 30, 128_778_240, 0.25, "persisting", "normal")
OLD = AccessWindow(1 << 20, 512, 1.0, "streaming", "streaming")
PLAN = Plan("window", 0, WINDOW, 24 * MIB)
STREAM = 77


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGraphs]:
    double = FakeGraphs(2)
    double.install(monkeypatch)
    monkeypatch.setattr(devices, "properties", functools.cache(lambda device=0: H200))
    # Reservations on a record of their own.
    monkeypatch.setattr(install, "Reservation", lambda size, device: Reservation(size, device, limits=limits))
    limits = Limits()
    yield double
    gc.collect()
    assert double.limits == {1000: DEFAULT, 1001: DEFAULT}
    double.restore()


def captured(fake: FakeGraphs, plan: Plan | None = None, names: tuple[str, ...] = ("one", "two", "three")) -> Graph:
    with capture(STREAM, plan=plan) as graph:
        for name in names:
            fake.launch(STREAM, name)
    return graph


def test_the_window_is_there_before_the_capture_and_gone_after_it(fake: FakeGraphs) -> None:
    graph = captured(fake, PLAN)
    assert fake.calls == [f"limit {24 * MIB}", "window", "begin", "end", "no window"]
    assert calls.stream_window(STREAM, 0) is None and fake.limits[1000] == 24 * MIB
    found = audit(graph, plan=PLAN, regions={"pool": Region(1 << 30, 128_778_240)})
    assert str(found) == "3 of 3 kernel nodes windowed" and found.windows == {WINDOW: 3} and found.is_exactly(PLAN)
    other = Plan("window", 0, AccessWindow(WINDOW.base, WINDOW.size, 0.5), 24 * MIB)
    assert not found.is_exactly(other) and not found.is_exactly(Plan("window", 0, WINDOW, 24 * MIB, nodes=("two",)))
    assert found.held == {"pool": pytest.approx(24 * MIB / 128_778_240)} and found.reserve == 24 * MIB
    graph.launch()
    graph.close()
    assert fake.limits[1000] == DEFAULT and not fake.executables


def test_without_a_plan_nothing_of_the_device_is_touched(fake: FakeGraphs) -> None:
    for plan in (None, Plan(), Plan("guarded", guarded="too large")):
        fake.calls.clear()
        graph = captured(fake, plan)
        assert fake.calls == ["begin", "end"] and str(audit(graph)) == "0 of 3 kernel nodes windowed"
        assert audit(graph).is_exactly(plan or Plan()) and not audit(graph).is_exactly(PLAN)


def test_what_a_stream_had_before_it_has_after(fake: FakeGraphs) -> None:
    calls.set_stream_window(STREAM, 0, OLD)
    assert audit(captured(fake, PLAN)).windows == {WINDOW: 3}
    assert calls.stream_window(STREAM, 0) == OLD
    with pytest.raises(KeyError), installed(WINDOW, STREAM):
        assert calls.stream_window(STREAM, 0) == WINDOW
        raise KeyError
    assert calls.stream_window(STREAM, 0) == OLD


def test_an_exception_leaves_nothing_behind(fake: FakeGraphs) -> None:
    with pytest.raises(KeyError) as caught, capture(STREAM, plan=PLAN) as graph:
        fake.launch(STREAM, "one")
        raise KeyError("mine")
    assert fake.calls[-3:] == ["end", "no window", f"limit {DEFAULT}"] and not fake.capturing
    assert caught.value.__notes__ == ["raised inside a capture of stream 0x4d, which is over; the stream is usable"]
    assert all(made.destroyed for made in fake.graphs.values())
    for call in (graph.launch, lambda: graph.nodes, lambda: graph.kernels, graph.__enter__):
        with pytest.raises(ArgumentError, match="expected a captured graph, got one that is closed"):
            call()
    assert audit(captured(fake)).kernels == 3


@pytest.mark.parametrize("refused", ["cuStreamEndCapture", "cuGraphInstantiate", "cuStreamBeginCapture", "cuStreamSetAttribute"])
def test_a_refusal_of_the_driver_leaves_nothing_behind(fake: FakeGraphs, refused: str) -> None:
    fake.refuse[refused] = Result.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(DeviceError, match=f"{refused} failed: CUDA_ERROR_LAUNCH_FAILED"):
        captured(fake, PLAN)
    fake.refuse.clear()
    assert fake.limits[1000] == DEFAULT and calls.stream_window(STREAM, 0) is None and not fake.executables
    assert audit(captured(fake)).kernels == 3


def test_checks_narrow_down_what_broke_a_capture(fake: FakeGraphs) -> None:
    with pytest.raises(DeviceError, match=r"capture: layer 2 broke it \(after layer 1\)"), capture(STREAM) as graph:
        graph.check("layer 1")
        fake.refuse["cuStreamIsCapturing"] = Result.CUDA_ERROR_LAUNCH_FAILED
        graph.check("layer 2")
    fake.refuse.clear()
    fake.refuse["cuStreamEndCapture"] = Result.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(DeviceError, match="something in the block after layer 1 is not allowed"), capture(STREAM) as graph:
        graph.check("layer 1")


def test_windows_on_chosen_nodes_only(fake: FakeGraphs) -> None:
    plan = Plan("states", 0, WINDOW, 24 * MIB, nodes=("wo", "three"))
    with capture(STREAM, plan=plan) as graph:
        for name in ("one", "two", "three", "two", "weights"):
            fake.launch(STREAM, name)
    assert "window" not in fake.calls
    assert [node.window for node in audit(graph).nodes] == [None, WINDOW, WINDOW, WINDOW, None]
    assert audit(graph).is_exactly(plan) and len(fake.executables) == 1
    assert graph.set_windows(None, ("three",)) == 1
    assert graph.set_windows(OLD, lambda position, name: position == 0 or name == "weights") == 2
    assert [node.window for node in audit(graph).nodes] == [OLD, WINDOW, None, WINDOW, OLD] and len(fake.executables) == 1
    assert set_windows(graph, None) == 5 and audit(graph).windowed == 0
    with pytest.raises(ArgumentError, match=r"nodes: expected texts .* \(one, three, two, weights\), got weihgts"):
        graph.set_windows(WINDOW, ("weihgts",))
    assert set_windows(graph, WINDOW, ["three"]) == 1  # type: ignore[arg-type]
    for nodes, message in (
        ("three", "expected a sequence, got the text 'three'"),
        (5, "expected a sequence, got int"),
        ([5], "expected text, got int"),
    ):
        with pytest.raises(ArgumentError, match=f"nodes: {message}"):
            graph.set_windows(WINDOW, nodes)  # type: ignore[arg-type]
    for call in (lambda: graph.set_windows("all"), lambda: installed("all", STREAM).__enter__()):  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="window: expected an AccessWindow or None, got str"):
            call()
    assert audit(graph).windowed == 1
    with pytest.raises(ArgumentError, match="regions: expected a Region for pool, got int"):
        audit(graph, regions={"pool": 5})  # type: ignore[dict-item]


def test_the_guard_is_in_front_of_every_window(fake: FakeGraphs, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(window, "_messages", 0)
    large = AccessWindow(1 << 30, H200.access_window_max + 1, 0.1)
    graph = captured(fake)
    assert graph.set_windows(large) == set_windows(graph, large, ("one",)) == 0 and audit(graph).windowed == 0
    with installed(large, STREAM):
        assert calls.stream_window(STREAM, 0) is None
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert graph.set_windows(large, guard=False) == 3 and audit(graph).windows == {large: 3}
    with installed(large, STREAM, guard=False):
        assert calls.stream_window(STREAM, 0) == large
    for nodes in (None, ("two",)):
        with capture(STREAM, plan=Plan("unguarded", 0, large, nodes=nodes)) as forced:
            fake.launch(STREAM, "two")
        assert audit(forced).windows == {large: 1}


def test_a_name_that_is_not_there_fails_the_capture_of_a_plan(fake: FakeGraphs) -> None:
    with pytest.raises(ArgumentError, match="nodes: expected texts"):
        captured(fake, Plan("states", 0, WINDOW, 24 * MIB, nodes=("four",)))
    assert fake.limits[1000] == DEFAULT and not fake.executables


def test_child_graphs_are_walked(fake: FakeGraphs) -> None:
    child = FakeGraph()
    child.nodes = [SimpleNamespace(kind="kernel", name="inner", window=None, child=None)]
    with capture(STREAM, plan=PLAN) as graph:
        fake.launch(STREAM, "outer")
        fake.other(STREAM, "graph", child)
        fake.other(STREAM, "memset")
        fake.launch(STREAM, "last")
    found = audit(graph)
    assert [node.kernel for node in found.nodes] == ["outer", "inner", "last"] and graph.kernels == ("outer", "inner", "last")
    assert [node.window is None for node in found.nodes] == [False, True, False] and found.others == {"memset": 1}
    assert str(found) == "2 of 3 kernel nodes windowed" and found.to_dict()["windows"][0]["nodes"] == 2
    assert not found.is_exactly(PLAN)
    assert graph.set_windows(WINDOW, ("inner",)) == 1 and audit(graph).windowed == 3


def test_any_graph_is_audited(fake: FakeGraphs) -> None:
    graph = captured(fake, PLAN)
    handle = int(graph.handle)
    torch = SimpleNamespace(raw_cuda_graph=lambda: handle)
    for other in (handle, fake.CUgraph(handle), torch, SimpleNamespace(graph=handle)):
        assert audit(other) == audit(graph)

    def thrown_away() -> int:
        raise RuntimeError("You cannot access the raw graph\nmore")

    with pytest.raises(ArgumentError, match=r"keep_graph=True.*You cannot access the raw graph$"):
        audit(SimpleNamespace(raw_cuda_graph=thrown_away))
    for wrong in (0, None, True, object(), SimpleNamespace(graph=0)):
        with pytest.raises(ArgumentError, match="graph: expected a graph of gpukit, torch or CuPy"):
            audit(wrong)


def test_apply_goes_around_any_capture(fake: FakeGraphs) -> None:
    with apply(PLAN, STREAM) as held:
        fake.cuStreamBeginCapture(STREAM, 0)
        fake.launch(STREAM, "one")
        foreign = fake.cuStreamEndCapture(STREAM)[1]
    assert held is not None and fake.limits[1000] == 24 * MIB and calls.stream_window(STREAM, 0) is None
    assert audit(foreign).is_exactly(PLAN)
    with pytest.raises(ArgumentError, match="stream: expected one that is not capturing yet"):
        fake.cuStreamBeginCapture(STREAM, 0)
        with apply(PLAN, STREAM):
            raise AssertionError("not reached")
    fake.cuStreamEndCapture(STREAM)
    held.close()
    with apply(Plan(), STREAM) as nothing:
        assert nothing is None


def test_apply_on_a_handle_of_the_caller(fake: FakeGraphs) -> None:
    handle = Reservation(limits=Limits())
    with apply(PLAN, STREAM, reservation=handle) as held:
        assert held is handle and handle.size == 24 * MIB
    assert handle.size == 24 * MIB
    with pytest.raises(KeyError), apply(Plan("more", 0, WINDOW, 32 * MIB), STREAM, reservation=handle):
        raise KeyError
    assert handle.size == 24 * MIB and fake.limits[1000] == 24 * MIB
    handle.release()
    with pytest.raises(KeyError), apply(PLAN, STREAM, reservation=handle):
        raise KeyError
    assert handle.size is None and fake.limits[1000] == DEFAULT
    handle.close()


def test_a_graph_gives_its_reserve_back_when_it_is_deleted(fake: FakeGraphs) -> None:
    one, two = captured(fake, PLAN), captured(fake, PLAN)
    del one
    gc.collect()
    assert fake.limits[1000] == 24 * MIB
    del two
    gc.collect()
    assert fake.limits[1000] == DEFAULT


@pytest.mark.parametrize("updatable", [True, False])
def test_an_update_takes_the_work_of_another_graph(fake: FakeGraphs, updatable: bool) -> None:
    fake.updatable = updatable
    graph, other = captured(fake, PLAN), captured(fake, PLAN, ("four", "five", "six"))
    kept = object()
    other.keep(kept)
    graph.update(other)
    assert "update" in fake.calls and graph.kernels == ("four", "five", "six") and len(fake.executables) == 1
    assert kept in graph._kept and sum(not made.destroyed for made in fake.graphs.values()) == 1
    with pytest.raises(ArgumentError, match="other: expected two captured graphs"):
        graph.update(other)
    other.close()
    graph.launch()
    assert fake.limits[1000] == 24 * MIB


def test_an_update_that_changes_windows_instantiates_again(fake: FakeGraphs) -> None:
    graph, other = captured(fake, PLAN), captured(fake)
    graph.update(other)
    assert "update" not in fake.calls and audit(graph).windowed == 0 and fake.limits[1000] == DEFAULT
    with pytest.raises(ArgumentError, match="other: expected a graph of device 0, got one of device 1"):
        graph.update(Graph(1, STREAM))


def test_an_old_graph_may_go_away_while_the_next_one_is_captured(fake: FakeGraphs) -> None:
    graph, counters = captured(fake), devices.DeviceCounters(0, 4)
    assert graph.kernels == ("one", "two", "three")
    with capture(STREAM) as graph:
        fake.launch(STREAM, "another")
        # Like anything else with device memory that is collected in here.
        del counters
    assert graph.kernels == ("another",) and len(fake.executables) == 1 and fake.allocated == 0


def test_a_plan_of_another_device_is_refused(fake: FakeGraphs) -> None:
    with pytest.raises(ArgumentError, match="plan: expected one for device 1, got one for device 0"), capture(STREAM, device=1, plan=PLAN):
        raise AssertionError("not reached")
    for stream in (0, 1, 2):
        with pytest.raises(ArgumentError, match="default streams cannot be captured"), capture(stream):
            raise AssertionError("not reached")
    for wrong in (None, "fast"):
        with pytest.raises(ArgumentError, match=f"^stream: expected an int handle, or a stream .*, got {type(wrong).__name__}"), capture(wrong):
            raise AssertionError("not reached")
    plan = Plan("second", 1, WINDOW, 24 * MIB)
    with capture(STREAM, device=1, plan=plan) as graph:
        assert fake.limits == {1000: DEFAULT, 1001: 24 * MIB}
    graph.close()


def test_the_real_structs_carry_a_window() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    for kind in (bindings.CUstreamAttrValue, bindings.CUkernelNodeAttrValue):
        for own in (WINDOW, OLD, None):
            assert calls._decode(calls._encode(bindings, kind, own)) == own
    assert bindings.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW == bindings.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW


def test_importing_and_planning_touch_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpukit import devices

    def refuse() -> Any:
        raise AssertionError("the driver was touched")

    monkeypatch.setattr(devices, "driver", refuse)
    assert reservation._LIMITS.requests(0) == () and Reservation().size is None
