"""Fixtures of the benchmarks.

`device_benchmark` gives pytest-benchmark the *device's* clock: the callable is captured into a graph, a round is one replay, and the timer counts
events around it, so that pytest-benchmark's statistics, comparison and failure limits speak of device time per call. `host_benchmark` uses the wall
clock and says so. Without a GPU the suites run once with ``--benchmark-disable`` on the NumPy backend, so that they never rot.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpukit import devices
from gpukit.graphs.capture import Graph
from gpukit.kernels import calibration
from gpukit.measure import ceilings, timing
from perf import shapes

GPU = devices.count() > 0
# Calls in the graph of a case, where it does not say otherwise.
NODES = 64
# Microseconds of a device before it is measured.
WARM_UP = 30_000.0

# Only what is imported is told of the stream under measurement.
with contextlib.suppress(ImportError):
    import torch  # noqa: F401

# Peers import what the base installation lacks.
collect_ignore = ["peers"]


def there(values: np.ndarray) -> Any:
    """A copy as a torch tensor on the device; as a NumPy array where there is no GPU."""
    if not GPU:
        return values.copy()
    import torch

    return torch.from_numpy(values).cuda()


class DeviceClock:
    """A timer for pytest-benchmark: called before and after a round, it returns device seconds per call, accumulated."""

    def __init__(self) -> None:
        self._watch: timing.Stopwatch | None = None
        self._running = False
        self._seconds = 0.0
        self._scale = 1.0
        self._subtract = 0.0

    def attach(self, stream: int, nodes: int, subtract: float) -> None:
        """Watch a stream whose rounds hold `nodes` calls and `subtract` µs of other work."""
        self._watch = timing.Stopwatch(stream)
        self._running = False
        self._scale = 1e-6 / nodes
        self._subtract = subtract

    def __call__(self) -> float:
        if self._watch is None:
            return time.perf_counter()
        if not self._running:
            self._watch.start()
        else:
            self._watch.stop()
            self._seconds += max(self._watch.elapsed() - self._subtract, 0.0) * self._scale
        self._running = not self._running
        return self._seconds


device_clock = DeviceClock()

# Marks the cases of `device_benchmark`: pytest-benchmark takes the timer from the mark.
on_device = pytest.mark.benchmark(timer=device_clock)


def leaves_work_pending(call: Callable[[], Any], stream: int) -> bool:
    """Whether `call` returns before the work on its stream is done."""
    bindings = devices.driver()
    with devices.current(0):
        devices.call(bindings.cuCtxSynchronize(), "cuCtxSynchronize")
        calibration.sleep(3_000, stream)
        call()
        pending = bindings.cuStreamQuery(stream)[0] != 0
        devices.call(bindings.cuCtxSynchronize(), "cuCtxSynchronize")
    return pending


@pytest.fixture(scope="session", autouse=True)
def _ceilings_before_all_cases() -> None:
    """Cases are compared with the ceilings, which take seconds to measure: none is to run right behind them."""
    if GPU:
        ceilings.ceilings()


@pytest.fixture
def stream() -> Iterator[int]:
    """gpukit's own stream, current in torch and CuPy too; 0 where there is no GPU."""
    if not GPU:
        yield 0
        return
    with timing.own_stream() as handle:
        yield handle


@pytest.fixture
def device_benchmark(benchmark: Any, stream: int) -> Callable[..., None]:
    """``device_benchmark(call, moved=bytes, cold=False, nodes=64)``: device time per call. Needs the mark `on_device`.

    `before_round` is called, unmeasured, before every replay: to put back what the calls have consumed.
    """

    def run(call: Callable[[], Any], *, moved: int = 0, nodes: int = NODES, rounds: int = 30, cold: bool = False, before_round: Any = None) -> None:
        if not GPU:
            benchmark.pedantic(call, rounds=1)
            return
        assert benchmark._timer is device_clock, "mark the case with perf.conftest.on_device"
        before = (lambda: timing.flush(stream)) if cold else None
        if cold:
            timing.flush(stream)
        graph = timing.record(call, nodes, stream, before=before)
        subtract = 0.0
        if cold:
            alone = timing.record(lambda: timing.flush(stream), nodes, stream)
            subtract = timing.Timing.of(timing.replay_times(alone, 15), "device").median
        _warm_up(graph, before_round)
        device_clock.attach(stream, nodes, subtract)
        benchmark.pedantic(graph.launch, setup=before_round, rounds=rounds, iterations=1)
        benchmark.extra_info.update(_figures(benchmark, moved, cold))

    return run


def _warm_up(graph: Graph, before_round: Any) -> None:
    """Replay for a while: a device that was idle for seconds, while the host compiled, is slower at first (by 13 % in one case)."""
    spent = 0.0
    while spent < WARM_UP:
        if before_round is not None:
            before_round()
        spent += sum(timing.replay_times(graph, 1, warmup=0))


def _figures(benchmark: Any, moved: int, cold: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {"clock": "device", "l2": "cold" if cold else "hot"}
    if benchmark.stats is None:
        return figures
    microseconds = benchmark.stats.stats.median * 1e6
    found = ceilings.ceilings()
    figures |= {"device_us": round(microseconds, 3), "empty_node_us": round(found.graph_node.value, 3)}
    if moved:
        rate = moved / microseconds / 1e3
        figures |= {"bytes": moved, "gb_per_s": round(rate, 1), "share_of_dram_copy": round(rate / found.dram_copy.value, 3)}
    return figures


@pytest.fixture
def host_benchmark(benchmark: Any, stream: int) -> Callable[..., None]:
    """``host_benchmark(call, host_only=True)``: wall time of issuing a call, in batches that do not fill the launch queue.

    A callable that returns with work pending is refused unless it is marked `host_only`: its wall time says nothing about its work.
    """

    def run(call: Callable[[], Any], *, host_only: bool = False, batch: int = 200, rounds: int = 30) -> None:
        if not GPU:
            benchmark.pedantic(call, rounds=1)
            return
        if not host_only and leaves_work_pending(call, stream):
            raise pytest.UsageError("host_benchmark: expected a callable that waits for its work, or host_only=True; got one that leaves it pending")
        bindings = devices.driver()

        def empty_queue() -> None:
            with devices.current(0):
                devices.call(bindings.cuCtxSynchronize(), "cuCtxSynchronize")

        for _ in range(50):
            call()
        benchmark.pedantic(call, rounds=rounds, iterations=batch, warmup_rounds=2)
        empty_queue()
        benchmark.extra_info.update({"clock": "host", "host_only": host_only})
        if benchmark.stats is not None:
            benchmark.extra_info["host_us"] = round(benchmark.stats.stats.median * 1e6, 3)

    return run


@pytest.fixture(autouse=True)
def _same_card_for_every_case() -> Iterator[None]:
    """Flush the L2 before each case and put the persisting limit back after it."""
    if not GPU:
        yield
        return
    bindings = devices.driver()
    limit = bindings.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
    with devices.current(0):
        before = devices.call(bindings.cuCtxGetLimit(limit), "cuCtxGetLimit")
        timing.flush(0)
        devices.call(bindings.cuCtxSynchronize(), "cuCtxSynchronize")
    yield
    with devices.current(0):
        devices.call(bindings.cuCtxSynchronize(), "cuCtxSynchronize")
        if devices.call(bindings.cuCtxGetLimit(limit), "cuCtxGetLimit") != before:
            devices.call(bindings.cuCtxSetLimit(limit, before), "cuCtxSetLimit")


def instrument() -> dict[str, str]:
    """What a baseline belongs to: the measuring code, the device and the shapes. Another of any is refused, not compared."""
    sources = "".join(inspect.getsource(module) for module in (timing, calibration)) + inspect.getsource(DeviceClock)
    return {
        "instrument": hashlib.sha256(sources.encode()).hexdigest()[:16],
        "device": devices.properties(0).name if GPU else "none",
        "shapes": hashlib.sha256(inspect.getsource(shapes).encode()).hexdigest()[:16],
    }


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Write what the numbers belong to into the JSON."""
    machine_info["gpukit"] = instrument()


def pytest_benchmark_compare_machine_info(
    config: pytest.Config, benchmarksession: Any, machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
) -> None:
    """Refuse a baseline of another instrument, device or shape list."""
    ours, theirs = machine_info["gpukit"], compared_benchmark["machine_info"].get("gpukit", {})
    other = [f"{key} {theirs.get(key, 'unknown')} (now {value})" for key, value in ours.items() if theirs.get(key) != value]
    if other:
        raise pytest.UsageError("the baseline is not comparable: " + "; ".join(other))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many device cases did not run."""
    if not GPU:
        terminalreporter.write_line("no GPU: the benchmarks ran once on the NumPy backend and measured nothing")
