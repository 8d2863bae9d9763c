"""Windows, reserves, audits and tuning on a GPU. Sizes are those of the published runs, so a card with less L2 or smaller windows skips by name."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpukit
from gpukit import devices, graphs
from gpukit.errors import ArgumentError, DeviceError, Signal
from gpukit.graphs import Plan, Recipe, Region, Reservation, rounds
from gpukit.graphs import driver as calls
from gpukit.kernels import residency
from gpukit.measure.timing import Stopwatch

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SMALL_POOL, LARGE_POOL = 128_778_240, 307_888_128


def limit(device: int = 0) -> int:
    driver = calls.CudaLimits()
    with driver.switch(device):
        return driver.read()


@pytest.fixture(autouse=True)
def limit_is_restored() -> Iterator[None]:
    """Limit before is limit after, whatever a test does."""
    before = limit()
    yield
    gc.collect()
    assert limit() == before


@pytest.fixture
def card() -> devices.DeviceProperties:
    found = devices.properties(0)
    if found.persisting_l2_max < 16 * MIB or found.access_window_max < SMALL_POOL:
        pytest.skip(f"{found.name} sets aside {found.persisting_l2_max} bytes, with windows of {found.access_window_max}")
    return found


class Work:
    """A pool of 30 layers and 2 slots, and a round of one kernel per layer on it beside one on weights."""

    def __init__(self, layers: int = 30):
        import cupy

        gpukit.warmup(subjects=["residency", "calibration"])
        self.layers = layers
        self.states = cupy.zeros((layers, 2, 2_146_304 // 4), cupy.int32)
        self.weights = cupy.arange(MIB, dtype=cupy.int32)
        self.sums = cupy.zeros(64, cupy.int32)
        self.slots = cupy.zeros(1, cupy.int64)
        self.stream = devices.create_stream(0)
        cupy.cuda.Device().synchronize()

    def enqueue(self, stream: Any) -> None:
        for layer in range(self.layers):
            residency.advance_states(self.states[layer : layer + 1], self.slots, stream=stream)
            residency.stream_weights(self.weights, self.sums, stream=stream)

    def capture(self, plan: Plan | None = None) -> graphs.Graph:
        with graphs.capture(self.stream, plan=plan) as graph:
            self.enqueue(self.stream)
        return graph


@pytest.fixture(scope="module")
def work() -> Work:
    return Work()


def test_the_pool_is_the_published_one(work: Work) -> None:
    assert work.states.nbytes == SMALL_POOL


def test_our_graph_carries_the_planned_window(work: Work, card: devices.DeviceProperties) -> None:
    plan = graphs.plan(work.states)
    assert plan.window is not None and plan.window.size == SMALL_POOL and plan.reserve == min(SMALL_POOL, card.persisting_l2_max)
    before = limit()
    with work.capture(plan) as graph:
        found = graphs.audit(graph, plan=plan, regions={"pool": Region.of(work.states)})
        assert str(found) == "60 of 60 kernel nodes windowed" and found.is_exactly(plan)
        assert {node.kernel for node in found.nodes} == {"gpukit_advance_states", "gpukit_stream_weights"}
        assert limit() == plan.reserve and calls.stream_window(work.stream, 0) is None
        graph.launch()
        devices.call(devices.driver().cuStreamSynchronize(work.stream), "cuStreamSynchronize")
    assert limit() == before
    if card.name == "NVIDIA H200":
        assert plan.reserve == 39_321_600 and round(plan.window.ratio, 4) == 0.3053


def test_without_a_plan_no_node_is_windowed(work: Work) -> None:
    with work.capture() as graph:
        assert str(graphs.audit(graph)) == "0 of 60 kernel nodes windowed" and graphs.audit(graph).is_exactly(Plan())


def test_geometry_is_the_same_with_and_without_the_guard(work: Work, card: devices.DeviceProperties, capfd: pytest.CaptureFixture[str]) -> None:
    plans = [graphs.plan(work.states, guard=guard) for guard in (True, False)]
    assert plans[0] == plans[1]
    audits = []
    for plan in plans:
        with work.capture(plan) as graph:
            audits.append(graphs.audit(graph))
    assert audits[0] == audits[1] and capfd.readouterr().err == ""


def test_a_graph_of_torch_carries_it_too(work: Work, card: devices.DeviceProperties) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    plan = graphs.plan(work.states)
    stream, x = torch.cuda.Stream(), torch.zeros(1 << 20, device="cuda")
    with torch.cuda.stream(stream):
        x.mul_(2).add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with graphs.apply(plan, stream) as held, torch.cuda.graph(graph, stream=stream):
        for _ in range(5):
            x.mul_(2).add_(1)
        work.enqueue(stream)
    found = graphs.audit(graph)
    assert found.kernels == 70 and found.is_exactly(plan) and calls.stream_window(stream.cuda_stream, 0) is None
    assert held is not None and limit() == plan.reserve
    graph.replay()
    torch.cuda.synchronize()
    held.close()
    stock = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(stock, stream=stream):
        work.enqueue(stream)
    assert str(graphs.audit(stock)) == "0 of 60 kernel nodes windowed"
    thrown_away = torch.cuda.CUDAGraph()
    with torch.cuda.graph(thrown_away, stream=stream):
        work.enqueue(stream)
    with pytest.raises(ArgumentError, match="keep_graph=True"):
        graphs.audit(thrown_away)


def test_a_graph_of_cupy_carries_it_too(work: Work, card: devices.DeviceProperties) -> None:
    import cupy

    plan, stream = graphs.plan(work.states), cupy.cuda.Stream(non_blocking=True)
    with graphs.apply(plan, stream) as held:
        stream.begin_capture()
        work.enqueue(stream)
        graph = stream.end_capture()
    assert str(graphs.audit(graph)) == "60 of 60 kernel nodes windowed" and graphs.audit(graph).is_exactly(plan)
    assert calls.stream_window(stream.ptr, 0) is None
    graph.launch(stream)
    stream.synchronize()
    assert held is not None
    held.close()


def test_what_runs_eagerly_after_the_capture_has_no_window(work: Work, card: devices.DeviceProperties) -> None:
    with work.capture(graphs.plan(work.states)), work.capture() as later:
        assert graphs.audit(later).windowed == 0


def test_an_exception_leaves_window_limit_and_stream_as_they_were(work: Work, card: devices.DeviceProperties) -> None:
    before = limit()
    with pytest.raises(KeyError), graphs.capture(work.stream, plan=graphs.plan(work.states)):
        work.enqueue(work.stream)
        assert limit() != before
        raise KeyError
    assert limit() == before and calls.stream_window(work.stream, 0) is None and not devices.is_capturing(work.stream)
    with work.capture() as graph:
        graph.launch()


def test_a_call_that_breaks_a_capture_is_told(work: Work) -> None:
    bindings = devices.driver()
    with pytest.raises(DeviceError, match=r"capture: the wait broke it \(after the round\)"), graphs.capture(work.stream) as graph:
        work.enqueue(work.stream)
        graph.check("the round")
        assert bindings.cuStreamSynchronize(work.stream)[0] != 0
        graph.check("the wait")
    with pytest.raises(DeviceError, match="cuStreamEndCapture failed: .*; something in the block"), graphs.capture(work.stream):
        work.enqueue(work.stream)
        bindings.cuStreamSynchronize(work.stream)
    with work.capture() as graph:
        graph.launch()
    devices.call(bindings.cuStreamSynchronize(work.stream), "cuStreamSynchronize")


def test_windows_land_on_exactly_the_chosen_nodes(work: Work, card: devices.DeviceProperties) -> None:
    plan = graphs.plan(work.states, nodes=("advance_states",))
    with work.capture(plan) as graph:
        found = graphs.audit(graph)
        assert found.is_exactly(plan) and found.windowed == 30
        assert all((node.window is not None) == (node.kernel == "gpukit_advance_states") for node in found.nodes)
        assert graph.set_windows(None) == 60 and graphs.audit(graph).windowed == 0
        assert graph.set_windows(plan.window, lambda position, name: position in (3, 7)) == 2
        assert [node.position for node in graphs.audit(graph).nodes if node.window is not None] == [3, 7]
        graph.launch()
        devices.call(devices.driver().cuStreamSynchronize(work.stream), "cuStreamSynchronize")


def test_an_update_in_place_runs_the_new_work(work: Work) -> None:
    import cupy

    one, two = cupy.zeros((1, 1, 4), cupy.int32), cupy.zeros((1, 1, 4), cupy.int32)
    cupy.cuda.Device().synchronize()
    made = []
    for states in (one, two):
        with graphs.capture(work.stream) as graph:
            residency.advance_states(states, work.slots, stream=work.stream)
        made.append(graph)
    made[0].update(made[1])
    made[0].launch()
    devices.call(devices.driver().cuStreamSynchronize(work.stream), "cuStreamSynchronize")
    assert not one.any() and (two == 1013904223).all()


def test_what_goes_away_inside_a_capture_leaves_it_alone(work: Work) -> None:
    import cupy

    states = cupy.zeros((1, 1, 4), cupy.int32)
    cupy.cuda.Device().synchronize()
    for _ in range(3):
        signal, watch = Signal(like=states), Stopwatch(work.stream)
        # The graph of the turn before goes away when the name is given to its successor.
        with graphs.capture(work.stream) as graph:
            del signal, watch
            residency.advance_states(states, work.slots, stream=work.stream)
    graph.launch()
    devices.call(devices.driver().cuStreamSynchronize(work.stream), "cuStreamSynchronize")
    assert (states == 1013904223).all()


def test_child_graphs_are_walked(work: Work, card: devices.DeviceProperties) -> None:
    bindings = devices.driver()
    plan = graphs.plan(work.states)
    with work.capture(plan) as inner:
        outer = devices.call(bindings.cuGraphCreate(0), "cuGraphCreate")
        devices.call(bindings.cuGraphAddChildGraphNode(outer, [], 0, inner.handle), "cuGraphAddChildGraphNode")
        assert str(graphs.audit(outer)) == "60 of 60 kernel nodes windowed" and graphs.audit(outer).is_exactly(plan)
        bindings.cuGraphDestroy(outer)


def test_a_pool_larger_than_the_largest_window_is_guarded_once_per_process(card: devices.DeviceProperties) -> None:
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("device_graphs", {str(Path(__file__))!r})
module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
from gpukit import graphs
from gpukit.graphs import Region
work, before = module.Work(), module.limit()
for _ in range(3):
    plan = graphs.plan(Region(work.states.data.ptr, {LARGE_POOL}))
    with work.capture(plan) as graph:
        assert str(graphs.audit(graph)) == "0 of 60 kernel nodes windowed" and module.limit() == before
    chosen = graphs.plan(Region(work.states.data.ptr, {LARGE_POOL}), nodes=("advance_states",))
    with work.capture(chosen) as graph:
        assert graphs.audit(graph).windowed == 0 and module.limit() == before
small = graphs.plan(work.states)
with work.capture(small) as graph:
    assert graphs.audit(graph).is_exactly(small)
assert module.limit() == before
"""
    if card.access_window_max >= LARGE_POOL:
        pytest.skip(f"{card.name} has windows of {card.access_window_max} bytes")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)
    assert run.returncode == 0, run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("gpukit:")]
    assert str(LARGE_POOL) in line and str(card.access_window_max) in line


def test_without_the_guard_the_driver_has_its_say(work: Work, card: devices.DeviceProperties) -> None:
    """Some drivers truncate a window without a word, others refuse it; either way nothing is left behind."""
    plan = graphs.plan(Region(work.states.data.ptr, LARGE_POOL), guard=False)
    try:
        with work.capture(plan) as graph:
            assert graphs.audit(graph).windowed == 60 and limit() == plan.reserve
    except DeviceError as error:
        assert "cuStreamSetAttribute" in str(error)
    assert calls.stream_window(work.stream, 0) is None


@pytest.mark.parametrize("sixteenths", [2, 6])
def test_a_reservation_on_the_real_driver(card: devices.DeviceProperties, sixteenths: int) -> None:
    # The driver may grant whole sixteenths of the cache only; these are below and above an H200's default of three.
    before, wanted = limit(), sixteenths * card.l2 // 16
    with Reservation(wanted) as handle:
        assert limit() == handle.granted == wanted
        with handle.suspended():
            assert limit() == before
        assert limit() == wanted
        with pytest.raises(DeviceError, match="cuCtxSetLimit"):
            handle.request(card.persisting_l2_max + card.l2)
        assert limit() == wanted
    assert limit() == before
    with pytest.raises(DeviceError):
        Reservation(card.persisting_l2_max + card.l2)
    assert limit() == before
    handle = Reservation()
    for _ in range(1000):
        handle.request(wanted)
        handle.release()
    handle.close()
    assert limit() == before


def test_a_grant_is_read_back_and_a_different_one_reported(card: devices.DeviceProperties) -> None:
    wanted = card.l2 // 16 + 12_345
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Reservation(wanted) as handle:
            print(f"{card.name}: {wanted} bytes asked for, {handle.granted} granted")
            assert handle.granted == limit() and handle.size == wanted
            differs = handle.granted != wanted
    assert bool(said) == differs and all("granted" in str(own.message) for own in said)


def test_a_reservation_may_change_while_a_capture_is_under_way(work: Work, card: devices.DeviceProperties) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    before, wanted = limit(), 4 * card.l2 // 16
    with graphs.capture(work.stream) as ours:
        work.enqueue(work.stream)
        with Reservation(wanted):
            assert limit() == wanted
    stream, theirs = torch.cuda.Stream(), torch.cuda.CUDAGraph(keep_graph=True)
    # torch watches every thread.
    with torch.cuda.graph(theirs, stream=stream):
        work.enqueue(stream)
        with Reservation(wanted):
            assert limit() == wanted
    assert graphs.audit(ours).kernels == graphs.audit(theirs).kernels == 60 and limit() == before


def test_a_deleted_graph_gives_its_reserve_back(work: Work, card: devices.DeviceProperties) -> None:
    before = limit()
    wanted = 4 * card.l2 // 16
    graph = work.capture(graphs.plan(work.states, wanted=wanted))
    assert limit() == wanted
    del graph
    gc.collect()
    assert limit() == before


def test_bits_are_the_same_under_every_plan_the_guard_among_them(card: devices.DeviceProperties) -> None:
    made = rounds.build("synthetic", rounds.RoundOptions(weights=8 * MIB, layers=4, rounds=2, prefill=4 * MIB))
    regions = {**made.regions, "too large": Region(made.regions["pool"].base, card.access_window_max + 1)}
    recipes = [Recipe("stock"), *made.recipes, Recipe("guarded", "too large"), Recipe("suspended", "live", suspend=("prefill",))]
    built = {recipe.name: made.build_graph(recipe.plan(regions)) for recipe in recipes}
    try:
        found = graphs.compare_outputs(lambda name, seed: list(built[name].outputs(seed)), list(built), [1, 2, 3])
        assert found.ok, str(found)
        assert len(built) > 20
    finally:
        for own in built.values():
            for graph in own.phases.values():
                graph.close()


def test_the_recurrent_round_has_the_same_bits_under_every_plan(card: devices.DeviceProperties) -> None:
    made = rounds.build("recurrent", rounds.RoundOptions(weights=2 * MIB, layers=3, rounds=2))
    built = {recipe.name: made.build_graph(recipe.plan(made.regions)) for recipe in [Recipe("stock"), *made.recipes]}
    try:
        found = graphs.compare_outputs(lambda name, seed: list(built[name].outputs(seed)), list(built), [1, 2])
        assert found.ok, str(found)
    finally:
        for own in built.values():
            for graph in own.phases.values():
                graph.close()


def test_kernels_that_start_early_carry_the_window_too(card: devices.DeviceProperties) -> None:
    from gpukit.launch import overlapping

    made = rounds.build("recurrent", rounds.RoundOptions(weights=2 * MIB, layers=3, rounds=2))
    plan = graphs.plan(made.regions["pool"])
    with overlapping():
        graph = made.build_graph(plan).phases["decode"]
    assert isinstance(graph, graphs.Graph)
    found = graphs.audit(graph)
    assert str(found) == "18 of 18 kernel nodes windowed" and found.is_exactly(plan)
    graph.close()


def test_tune_leaves_the_device_as_it_was_and_fills_its_table(card: devices.DeviceProperties, tmp_path: Path) -> None:
    before = limit()
    made = rounds.build("synthetic", rounds.RoundOptions(weights=16 * MIB, prefill=32 * MIB, layers=8))
    recipes = [made.recipes[0], *[recipe for recipe in made.recipes if recipe.reserve == 8 * MIB or "keep" in recipe.options][:4]]
    result = graphs.tune(made.build_graph, made.regions, made.phases, recipes=recipes, passes=4, cell_us=1000, folder=tmp_path, confirm=False)
    assert limit() == before and len(result.rows) == 8
    for row in result.rows:
        assert set(row.seconds) == {"prefill", "decode", "total"} and all(0 < value < 1 for value in row.seconds.values())
    assert "same bits" in result.identity and graphs.TuneResult.from_json(result.to_json()) == result


@pytest.mark.parametrize(("keep", "scattered"), [(None, True), (0.0, True), (0.3, True), (1.0, True), (0.3, False)])
@pytest.mark.parametrize("id_dtype", ["int32", "int64"])
@pytest.mark.parametrize(("layers", "slots", "words"), [(1, 1, 4), (2, 3, 4096), (3, 5, 4100), (1, 2, 536_576), (0, 1, 4), (2, 2, 0)])
@pytest.mark.parametrize("by_slot", [False, True])
def test_advance_states_equals_the_reference(
    layers: int, slots: int, words: int, by_slot: bool, id_dtype: str, keep: float | None, scattered: bool
) -> None:
    from tests.helpers.device import CupyDevice

    device = CupyDevice()
    rng = np.random.default_rng(words)
    pool = rng.integers(-(2**31), 2**31, (slots, layers, words + 4) if by_slot else (layers, slots, words + 4)).astype(np.int32)
    ids = np.array([slots - 1, -1, slots, 0, slots - 1, 2**31 - 1]).astype(id_dtype)
    there, ids_there = device.array(pool), device.array(ids)
    signals = gpukit.Signal(), gpukit.Signal(like=there)
    for array, own, signal in ((pool, ids, signals[0]), (there, ids_there, signals[1])):
        states = (array.swapaxes(0, 1) if by_slot else array)[:, :, :words]
        residency.advance_states(states, own, keep=keep, scattered=scattered, signal=signal)
    np.testing.assert_array_equal(device.host(there), pool)
    if layers and words:
        assert signals[1].counts() == signals[0].counts()
    device.check_guards()


@pytest.mark.parametrize("keep", [None, 0.0, 0.7])
@pytest.mark.parametrize("blocks", [1, 3, 528])
@pytest.mark.parametrize("words", [0, 4, 1640, 1 << 20])
def test_stream_weights_equals_the_reference(words: int, blocks: int, keep: float | None) -> None:
    from tests.helpers.device import CupyDevice

    device = CupyDevice()
    weights = np.random.default_rng(words).integers(-(2**31), 2**31, words).astype(np.int32)
    out = np.full(blocks, -7, np.int32)
    there = device.array(out)
    residency.stream_weights(device.array(weights), there, keep=keep)
    residency.stream_weights(weights, out, keep=keep)
    np.testing.assert_array_equal(device.host(there), out)
    device.check_guards()
