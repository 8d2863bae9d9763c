"""Two devices: each has its own reserve, graphs, kernels and signals, and none is touched because the other is current. Without two, skipped by name.

The refusals that need no second device run anywhere, against a driver double.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import gpukit
from gpukit import Signal, arrays, devices, graphs, streams
from gpukit.errors import ArgumentError, DeviceError
from gpukit.graphs import Reservation
from gpukit.graphs import driver as calls
from gpukit.kernels import page_table, residency
from tests.helpers.every_op import every_op
from tests.helpers.graphs import FakeGraphs

two = [pytest.mark.gpu, pytest.mark.gpu2]
MIB = 1 << 20


def marked(function: Callable[..., None]) -> Callable[..., None]:
    """A test that needs two devices."""
    for mark in two:
        function = mark(function)
    return function


# Anywhere.


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGraphs]:
    double = FakeGraphs(2)
    double.install(monkeypatch)
    double.device_of = {71: 1, 70: 0}
    yield double
    double.restore()


class Owned:
    """Stands for an array of a device."""

    def __init__(self, device: int):
        self.device = device


@pytest.mark.parametrize(("stream", "ordinal", "fine"), [(70, 0, True), (71, 1, True), (71, 0, False), (70, 1, False), (0, 1, True), (2, 0, True)])
def test_a_stream_of_another_device_is_refused(fake: FakeGraphs, monkeypatch: pytest.MonkeyPatch, stream: int, ordinal: int, fine: bool) -> None:
    monkeypatch.setitem(arrays._readers, Owned, lambda array: (4096, "int64", (1,), None, array.device, True))
    if fine:
        assert streams.choose(stream, Owned(ordinal)) == stream
    else:
        message = f"stream: expected a stream of device {ordinal}, where the arrays are, got one of device {1 - ordinal}"
        with pytest.raises(ArgumentError, match=message):
            streams.choose(stream, Owned(ordinal))
    assert fake.stack == []


def test_with_one_device_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    double = FakeGraphs(1)
    double.install(monkeypatch)
    monkeypatch.setattr(devices, "of_stream", lambda stream: pytest.fail("asked"))
    assert streams.choose(71, Owned(0)) == 71
    double.restore()


def test_a_stream_that_the_driver_does_not_know_is_left_to_the_launch(fake: FakeGraphs) -> None:
    from tests.helpers.driver import Result

    fake.refuse["cuStreamGetCtx"] = Result.CUDA_ERROR_INVALID_HANDLE
    assert devices.of_stream(99) is None


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("owner", [0, 1])
def test_an_address_is_of_its_device_whatever_is_current(fake: FakeGraphs, owner: int, pooled: bool) -> None:
    address = (owner << 40) + 4096
    fake.pooled = {address} if pooled else set()
    assert devices.of_pointer(address) == owner and fake.stack == []
    with devices.current(1 - owner):
        assert devices.of_pointer(address) == owner


# On two devices.


def part(device: int, sixteenths: int) -> int:
    """Bytes of the L2; the driver may grant whole sixteenths only."""
    return sixteenths * devices.properties(device).l2 // 16


def limit(device: int) -> int:
    with devices.current(device):
        return calls.CudaLimits().read()


@pytest.fixture
def limits_are_restored() -> Iterator[None]:
    before = [limit(device) for device in (0, 1)]
    yield
    gc.collect()
    assert [limit(device) for device in (0, 1)] == before


def synchronize() -> None:
    for device in (0, 1):
        with devices.current(device):
            devices.call(devices.driver().cuCtxSynchronize(), "cuCtxSynchronize")


def current() -> int:
    import cupy

    return int(cupy.cuda.runtime.getDevice())


def _torch(values: np.ndarray, device: int) -> Any:
    import torch

    return torch.from_numpy(values.copy()).to(f"cuda:{device}")


def _cupy(values: np.ndarray, device: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        return cupy.asarray(values)


def _numba(values: np.ndarray, device: int) -> Any:
    from numba import cuda

    with cuda.gpus[device]:
        return cuda.to_device(values)


LIBRARIES = {"torch": _torch, "cupy": _cupy, "numba": _numba}


def to_numpy(array: Any) -> np.ndarray:
    kind = type(array).__module__.partition(".")[0]
    found = array.cpu().numpy() if kind == "torch" else array.copy_to_host() if kind == "numba" else array.get()
    return np.asarray(found)


@marked
def test_reserves_are_two(limits_are_restored: None) -> None:
    before = [limit(device) for device in (0, 1)]
    with Reservation(part(0, 6), 0), Reservation(part(1, 2), 1) as second:
        assert [limit(device) for device in (0, 1)] == [part(0, 6), part(1, 2)]
        with second.suspended():
            assert [limit(device) for device in (0, 1)] == [part(0, 6), before[1]]
    assert [limit(device) for device in (0, 1)] == before


@marked
def test_a_failure_on_one_device_leaves_the_other_alone(limits_are_restored: None) -> None:
    most = devices.properties(1).persisting_l2_max
    with Reservation(part(0, 6), 0), Reservation(part(1, 2), 1) as second:
        with pytest.raises(DeviceError, match="cuCtxSetLimit"):
            second.request(most + part(1, 16))
        assert [limit(device) for device in (0, 1)] == [part(0, 6), part(1, 2)]


@marked
@pytest.mark.parametrize("held", [0, 1])
def test_a_handle_is_released_while_the_other_device_is_current(held: int, limits_are_restored: None) -> None:
    before = limit(held)
    handle = Reservation(part(held, 2), held)
    with devices.current(1 - held):
        handle.release()
        assert limit(held) == before
        handle.request(part(held, 6))
        assert limit(held) == part(held, 6)
        del handle
        gc.collect()
        assert limit(held) == before


@marked
def test_threads_on_both_devices_restore_both(limits_are_restored: None) -> None:
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for turn in range(200):
                device = (worker + turn) % 2
                wanted = part(device, 1 + (worker + turn % 3) % 10)
                with Reservation(wanted, device) as handle:
                    assert limit(device) >= wanted
                    if turn % 5 == 0:
                        with handle.suspended():
                            pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@marked
def test_graphs_of_both_devices_audit_whole(limits_are_restored: None) -> None:
    import cupy

    made = []
    for device in (0, 1):
        gpukit.warmup(device, ["residency"])
        with cupy.cuda.Device(device):
            states, slots = cupy.zeros((4, 2, 1 << 21), cupy.int32), cupy.zeros(1, cupy.int64)
            cupy.cuda.Device().synchronize()
        plan = graphs.plan(states, device=device, wanted=part(device, 1 + device))
        stream = devices.create_stream(device)
        with graphs.capture(stream, device=device, plan=plan) as graph:
            for layer in range(4):
                residency.advance_states(states[layer : layer + 1], slots, stream=stream)
        graph.keep(states, slots)
        made.append((graph, plan, states))
    assert current() == 0
    for graph, plan, states in made:
        found = graphs.audit(graph)
        assert str(found) == "4 of 4 kernel nodes windowed" and found.is_exactly(plan) and limit(plan.device) == plan.reserve
        graph.launch()
        synchronize()
        assert (to_numpy(states)[:, 0] == 1013904223).all()
        graph.close()
    with pytest.raises(ArgumentError, match="plan: expected one for device 0"), graphs.capture(devices.create_stream(0), plan=made[1][1]):
        raise AssertionError("not reached")


@marked
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("op", every_op(), ids=lambda op: op.name)
def test_every_op_on_the_second_device(op: Any, library: str) -> None:
    make = LIBRARIES[library]
    here, there = op.make(lambda values: make(values, 0)), op.make(lambda values: make(values, 1))
    synchronize()
    for _ in range(2):
        op.run(here)
        op.run(there)
    assert current() == 0
    synchronize()
    for name, array in op.arrays(here).items():
        np.testing.assert_array_equal(to_numpy(op.arrays(there)[name]), to_numpy(array), err_msg=name)


@marked
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("op", every_op(), ids=lambda op: op.name)
def test_prepared_calls_on_the_second_device(op: Any, library: str) -> None:
    make = LIBRARIES[library]
    eager, prepared = op.make(lambda values: make(values, 1)), op.make(lambda values: make(values, 1))
    synchronize()
    call = op.prepare(prepared)
    if call is None:
        pytest.skip("not an Operation")
    for _ in range(2):
        op.run(eager)
        call()
    synchronize()
    for name, array in op.arrays(eager).items():
        np.testing.assert_array_equal(to_numpy(op.arrays(prepared)[name]), to_numpy(array), err_msg=name)


@contextmanager
def torch_stream_of_the_second_device() -> Iterator[Any]:
    """Current on device 1, while device 0 is the current device."""
    import torch

    before, stream = torch.cuda.current_stream(1), torch.cuda.Stream(device=1)
    torch.cuda.set_stream(stream)
    torch.cuda.set_device(0)
    try:
        yield stream
    finally:
        torch.cuda.set_stream(before)
        torch.cuda.set_device(0)


@marked
@pytest.mark.parametrize("op", every_op(), ids=lambda op: op.name)
def test_graphs_on_the_second_device(op: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    gpukit.warmup(1)
    eager, captured = op.make(lambda values: _torch(values, 1)), op.make(lambda values: _torch(values, 1))
    op.run(eager)
    op.run(eager)
    synchronize()
    with torch_stream_of_the_second_device() as stream, graphs.capture(stream, device=1) as graph:
        op.run(captured)
    assert current() == 0
    graph.launch()
    graph.launch()
    synchronize()
    for name, array in op.arrays(eager).items():
        np.testing.assert_array_equal(to_numpy(op.arrays(captured)[name]), to_numpy(array), err_msg=name)


@marked
@pytest.mark.parametrize("library", LIBRARIES)
def test_arrays_of_two_devices_are_refused_by_name(library: str) -> None:
    make = LIBRARIES[library]
    v2p, p2v = page_table.empty(9)
    ids = make(np.array([1]), 0)
    for first, second, name in ((0, 1, "p2v"), (1, 0, "v2p")):
        with pytest.raises(ArgumentError, match=rf"{name}: expected an array in device 0 like the first argument, got one in device 1"):
            page_table.unbind(ids, make(v2p, first), make(p2v, second))


@marked
def test_a_stream_of_the_other_device_is_refused_by_name() -> None:
    stream, ids = devices.create_stream(1), _cupy(np.array([1]), 0)
    table, out = _cupy(page_table.empty(9)[0], 0), _cupy(np.array([-7]), 0)
    for given in (stream, _External(stream)):
        with pytest.raises(ArgumentError, match="stream: expected a stream of device 0, where the arrays are, got one of device 1"):
            page_table.translate(ids, table, 1, out=out, stream=given)
        with pytest.raises(ArgumentError, match="stream: expected a stream of device 0"):
            page_table.translate.prepare(ids, table, 1, out=out, stream=given)
    synchronize()
    assert to_numpy(out).tolist() == [-7]
    page_table.translate(ids, table, 1, out=out, stream=devices.create_stream(0))


class _External:
    """A stream of a library that only speaks the protocol."""

    def __init__(self, handle: int):
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@marked
def test_one_compilation_serves_both_devices(tmp_path: Any) -> None:
    if devices.architecture(0) != devices.architecture(1):
        pytest.skip(f"the devices are {devices.architecture(0)} and {devices.architecture(1)}")
    code = """
import gpukit
gpukit.warmup(0, ["residency", "page_table"]); first = gpukit.compile_stats()
gpukit.warmup(1, ["residency", "page_table"]); second = gpukit.compile_stats()
assert first.compiled > 0 and (second.compiled, second.cached) == (first.compiled, first.cached), (first, second)
assert second.loaded == 2 * first.loaded, (first, second)
"""
    import os

    environment = os.environ | {"GPUKIT_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr


@marked
def test_a_signal_counts_on_its_own_device() -> None:
    v2p, p2v = (_cupy(table, 1) for table in page_table.empty(9))
    ids, signal = _cupy(np.array([1, 99]), 1), Signal(like=v2p)
    assert signal.device == 1 and current() == 0
    page_table.unbind(ids, v2p, p2v, signal=signal)
    assert signal.counts() == {"out_of_range": 1, "unbound": 1}
    signal.reset()
    assert signal.counts() == {}
    with pytest.raises(ArgumentError, match="signal: expected a Signal of device 1 .* got one of device 0"):
        page_table.unbind(ids, v2p, p2v, signal=Signal(like=_cupy(np.array([1]), 0)))


@marked
def test_the_synthetic_round_runs_on_the_second_device(limits_are_restored: None) -> None:
    from gpukit.graphs import rounds

    made = rounds.build("synthetic", rounds.RoundOptions(weights=4 * MIB, layers=2, rounds=2, device=1))
    result = graphs.tune(made.build_graph, made.regions, made.phases, recipes=made.recipes[:3], device=1, passes=3, cell_us=500, confirm=False)
    assert "same bits" in result.identity and current() == 0
