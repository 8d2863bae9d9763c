"""The call path on a real GPU: array libraries and streams, capture, cold kernels, no synchronisation, compilation counts, threads, forks.

What an op computes is tested in tests/kernels; here one op of each language stands for all, and `every_op` runs them all where the property must hold
for every one of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import gpukit
from gpukit import Signal, errors, launch
from gpukit.kernels import page_table
from tests.helpers.every_op import every_op

pytestmark = pytest.mark.gpu


class OnlyInterface:
    """An array of which gpukit sees nothing but `__cuda_array_interface__`."""

    def __init__(self, array: Any):
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.array.__cuda_array_interface__  # type: ignore[no-any-return]


class OnlyDlpack:
    """An array of which gpukit sees nothing but DLPack."""

    def __init__(self, array: Any):
        self.array = array

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def _torch(values: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(values.copy()).cuda()


def _cupy(values: np.ndarray) -> Any:
    import cupy

    return cupy.asarray(values)


def _numba(values: np.ndarray) -> Any:
    from numba import cuda

    return cuda.to_device(values)


LIBRARIES = {
    "torch": _torch,
    "cupy": _cupy,
    "numba": _numba,
    "interface": lambda values: OnlyInterface(_cupy(values)),
    "dlpack": lambda values: OnlyDlpack(_cupy(values)),
}


def to_numpy(array: Any) -> np.ndarray:
    import cupy

    array = array.array if isinstance(array, OnlyInterface | OnlyDlpack) else array
    return cupy.asnumpy(cupy.asarray(array))


def _streams() -> dict[str, Any]:
    import cupy
    import torch
    from cuda.core import Device
    from numba import cuda

    Device(0).set_current()
    torch_stream, cupy_stream = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    return {
        "none": None,
        "legacy default": 0,
        "torch": torch_stream,
        "cupy": cupy_stream,
        "numba": cuda.stream(),
        "cuda.core": Device(0).create_stream(),
        "handle": torch_stream.cuda_stream,
    }


@pytest.mark.parametrize("stream_kind", ["none", "legacy default", "torch", "cupy", "numba", "cuda.core", "handle"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_on_every_stream(library: str, stream_kind: str) -> None:
    import torch

    make, stream = LIBRARIES[library], _streams()[stream_kind]
    v2p, p2v = page_table.empty(50)
    virtual, physical = np.arange(1, 21), np.arange(30, 50)
    arrays = [make(array) for array in (virtual, physical, v2p, p2v)]
    torch.cuda.synchronize()
    page_table.bind(*arrays, stream=stream)
    out = page_table.translate(arrays[0], arrays[2], 1, stream=stream)
    torch.cuda.synchronize()
    page_table.bind(virtual, physical, v2p, p2v)
    np.testing.assert_array_equal(to_numpy(arrays[2]), v2p)
    np.testing.assert_array_equal(to_numpy(arrays[3]), p2v)
    np.testing.assert_array_equal(to_numpy(out), physical)
    expected = {"torch": "torch", "numba": "numba"}.get(library, "cupy")
    assert type(out).__module__.partition(".")[0] == expected


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("op", every_op(), ids=lambda op: op.name)
def test_every_op_of_every_library_equals_numpy(op: Any, library: str) -> None:
    here, there = op.make(np.copy), op.make(LIBRARIES[library])
    for _ in range(2):
        op.run(here)
        op.run(there)
    for name, array in op.arrays(here).items():
        np.testing.assert_array_equal(to_numpy(op.arrays(there)[name]), array, err_msg=name)


def test_libraries_mix_on_one_device() -> None:
    v2p, p2v = page_table.empty(9)
    tables = _torch(v2p), _cupy(p2v)
    out = page_table.bind_range(_numba(np.array([3, 5])), 1, tables[0], tables[1])
    assert to_numpy(out).tolist() == [1, 2] and to_numpy(tables[0])[[3, 5]].tolist() == [1, 2]


def test_host_and_device_arrays_do_not_mix() -> None:
    v2p, p2v = page_table.empty(9)
    with pytest.raises(TypeError, match=r"p2v: expected an array in device 0 like the first argument, got one in host memory"):
        page_table.unbind(_cupy(np.array([1])), _cupy(v2p), p2v)
    with pytest.raises(TypeError, match="v2p: expected an array in host memory"):
        page_table.unbind(np.array([1]), _torch(v2p), p2v)


def test_a_torch_stream_context_is_followed() -> None:
    import torch

    table, ids = _torch(page_table.empty(9)[0]), _torch(np.array([1]))
    stream = torch.cuda.Stream()
    page_table.translate(ids, table, 1)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        page_table.translate(ids, table, 1)
        assert not stream.query()
    assert torch.cuda.default_stream().query()
    stream.synchronize()


def test_jax_arrays_are_inputs_only() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("jax has no GPU here")
    ids = jax.numpy.asarray(np.array([3, 1, 2], np.int32))
    table = _cupy(np.array([0, 5, 6, 7, -1]))
    assert to_numpy(page_table.translate(ids, table, 1)).tolist() == [7, 5, 6]
    jax.config.update("jax_enable_x64", True)
    with pytest.raises(errors.ArgumentError, match="v2p: expected a writable array"):
        page_table.unbind(ids, jax.numpy.asarray(np.array([0, 1, 2, 3, -1])), table)


@pytest.mark.parametrize("op", every_op(), ids=lambda op: op.name)
def test_capture_and_two_replays_equal_eager(op: Any) -> None:
    import torch

    gpukit.warmup()
    eager, captured = op.make(_torch), op.make(_torch)
    op.run(eager)
    op.run(eager)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(captured)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    for name, array in op.arrays(eager).items():
        np.testing.assert_array_equal(to_numpy(op.arrays(captured)[name]), to_numpy(array), err_msg=name)


@pytest.mark.parametrize("op", every_op(), ids=lambda op: op.name)
def test_prepared_calls_equal_eager(op: Any) -> None:
    eager, prepared = op.make(_cupy), op.make(_cupy)
    op.run(eager)
    op.run(eager)
    call = op.prepare(prepared)
    if call is None:
        pytest.skip("not an Operation")
    call()
    call()
    for name, array in op.arrays(eager).items():
        np.testing.assert_array_equal(to_numpy(op.arrays(prepared)[name]), to_numpy(array), err_msg=name)


@pytest.mark.parametrize("op", every_op(), ids=lambda op: op.name)
def test_no_op_waits_for_the_device(op: Any) -> None:
    import torch

    arguments = op.make(_torch)
    op.run(arguments)
    torch.cuda.synchronize()
    cycles = 100_000_000
    torch.cuda._sleep(cycles)
    start = time.perf_counter()
    op.run(arguments)
    took = time.perf_counter() - start
    assert not torch.cuda.current_stream().query(), "the pending kernel ended too soon for this test to mean anything"
    torch.cuda.synchronize()
    # The kernel takes 50 ms or more; what a call costs the host is measured elsewhere, on a machine that does nothing else.
    assert took < 2e-3, f"{op.name} took {took * 1e6:.0f} µs behind a pending kernel"


def test_a_cold_kernel_inside_a_capture_is_refused_and_the_stream_lives_on() -> None:
    code = """
import numpy as np, torch, gpukit
from gpukit.kernels import page_table
v2p, p2v = (torch.from_numpy(t).cuda() for t in page_table.empty(9))
ids = torch.tensor([1, 2], device="cuda"); out = torch.zeros(2, dtype=torch.int64, device="cuda")
stream = torch.cuda.Stream(); graph = torch.cuda.CUDAGraph()
with torch.cuda.stream(stream):
    graph.capture_begin()
    try:
        page_table.bind_range(ids, 3, v2p, p2v, out=out)
        raise SystemExit("not refused")
    except gpukit.ColdKernelError as error:
        assert "page_table.bind_range['int64'] is not loaded and its stream is capturing" in str(error), error
    out.fill_(7)
    graph.capture_end()
graph.replay(); torch.cuda.synchronize()
assert out.tolist() == [7, 7]
with torch.cuda.stream(stream):
    page_table.bind_range(ids, 3, v2p, p2v, out=out)
torch.cuda.synchronize()
assert out.tolist() == [3, 4]
print("fine")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "fine" in run.stdout, run.stdout + run.stderr


def test_without_out_inside_a_capture_it_refuses_by_name() -> None:
    import torch

    gpukit.warmup(subjects=["page_table"])
    v2p, p2v = (_torch(table) for table in page_table.empty(9))
    ids = _torch(np.array([1, 2]))
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        with pytest.raises(errors.ArgumentError, match="out: expected an array, because the stream is capturing"):
            page_table.unbind(ids, v2p, p2v)
        out.fill_(1)
    graph.replay()
    assert out.item() == 1


def test_one_compilation_per_kernel_dtype_and_architecture() -> None:
    v2p, p2v = (_torch(table) for table in page_table.empty(2000))
    gpukit.warmup()
    before = gpukit.compile_stats()
    for dtype in (np.int32, np.int64):
        for offset in range(4):
            for count in (1, 2, 255, 256, 257, 1000):
                for make in (_torch, _cupy, _numba):
                    virtual, physical = make(np.arange(0, 1400).astype(dtype)), make(np.arange(0, 1400).astype(dtype))
                    page_table.bind(virtual[offset : offset + count], physical[offset + 1 : offset + 1 + count], v2p, p2v)
                    page_table.unbind(virtual[offset : offset + count], v2p, p2v)
    assert gpukit.compile_stats() == before


def test_odd_and_even_views_of_a_free_list_bind_alike() -> None:
    from gpukit.kernels.free_list import FreeList

    v2p, p2v = (_torch(table) for table in page_table.empty(100))
    pages = FreeList(_torch(np.arange(1, 50)))
    compiled, expected = gpukit.compile_stats().compiled, page_table.empty(100)
    for count in (3, 4, 1, 2, 5):
        taken = pages.take(count)
        first = int(taken[0])
        page_table.bind(taken, taken, v2p, p2v)
        page_table.bind(*[np.arange(first, first + count)] * 2, *expected)
        np.testing.assert_array_equal(to_numpy(v2p), expected[0])
        np.testing.assert_array_equal(to_numpy(p2v), expected[1])
    assert gpukit.compile_stats().compiled == compiled


def test_views_of_a_free_list_are_not_copies_and_never_change() -> None:
    import torch

    from gpukit.kernels.free_list import FreeList

    pages = FreeList(_torch(np.arange(1, 1001)))
    held = []
    torch.cuda.synchronize()
    for count in range(1, 30):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        view = pages.take(count)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        held.append((view, view.clone()))
        pages.append(view[:1])
    for view, copy in held:
        assert torch.equal(view, copy)


def test_a_second_process_compiles_nothing(tmp_path: Any) -> None:
    code = "import gpukit; gpukit.warmup(); s = gpukit.compile_stats(); import sys; print(s.compiled, s.cached, 'numba' in sys.modules)"
    outputs = []
    for _ in range(2):
        environment = os.environ | {"GPUKIT_CACHE_DIR": str(tmp_path)}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
        assert run.returncode == 0, run.stderr
        outputs.append(run.stdout.split())
    assert outputs[0][0] != "0"
    assert outputs[1][0] == "0" and outputs[1][1] == outputs[0][0] and outputs[1][2] == "False"


def test_threads_share_ops_and_prepared_calls() -> None:
    v2p, p2v = (_cupy(table) for table in page_table.empty(70_000))
    failures = []

    def work(worker: int) -> None:
        import cupy

        try:
            ids = _cupy(np.arange(1, 1001) + worker * 1000)
            out = _cupy(np.zeros(1000, np.int64))
            with cupy.cuda.Stream(non_blocking=True) as stream:
                unbind = page_table.unbind.prepare(ids, v2p, p2v, out=out)
                for _ in range(200):
                    page_table.bind(ids, ids, v2p, p2v)
                    unbind()
                    page_table.bind_range(ids, 1 + worker * 1000, v2p, p2v, out=out)
                    unbind()
                stream.synchronize()
            np.testing.assert_array_equal(to_numpy(out), to_numpy(ids))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert (to_numpy(v2p)[1:] == -1).all()


def test_a_thread_without_a_context_may_call_on_the_default_stream() -> None:
    v2p, p2v = (_cupy(table) for table in page_table.empty(9))
    ids, out = _cupy(np.array([1, 2])), _cupy(np.zeros(2, np.int64))
    failures = []

    def work() -> None:
        try:
            page_table.bind_range(ids, 3, v2p, p2v, out=out, stream=0)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures and to_numpy(out).tolist() == [3, 4]


def test_a_fork_after_first_use_is_refused() -> None:
    code = """
import os, cupy, numpy as np, gpukit
from gpukit.kernels import page_table
v2p, p2v = (cupy.asarray(t) for t in page_table.empty(9))
ids, out = cupy.asarray(np.array([1])), cupy.zeros(1, cupy.int64)
prepared = page_table.unbind.prepare(ids, v2p, p2v, out=out)
prepared(); cupy.cuda.Device().synchronize()
child = os.fork()
if child == 0:
    code = 0
    for call in (prepared, lambda: gpukit.warmup(subjects=["free_list"])):
        try:
            call(); code = 1
        except gpukit.ForkError:
            pass
        except BaseException as error:
            print(repr(error), flush=True); code = 2
    os._exit(code)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_dead_stream_is_an_argument_error() -> None:
    v2p, p2v = (_cupy(table) for table in page_table.empty(9))
    with pytest.raises(errors.ArgumentTypeError, match="stream: expected None, an int handle"):
        page_table.unbind(_cupy(np.array([1])), v2p, p2v, stream="fast")


def test_a_signal_of_the_host_is_refused_for_device_arrays() -> None:
    v2p, p2v = (_cupy(table) for table in page_table.empty(9))
    with pytest.raises(errors.ArgumentError, match="signal: expected a Signal of device 0"):
        page_table.unbind(_cupy(np.array([1])), v2p, p2v, signal=Signal())


def test_a_signal_checks_and_resets() -> None:
    v2p, p2v = (_cupy(table) for table in page_table.empty(9))
    signal = Signal(like=v2p)
    page_table.unbind(_cupy(np.array([1, 99, -5])), v2p, p2v, signal=signal)
    with pytest.raises(errors.SignalError, match=r"out_of_range: 2, unbound: 1"):
        signal.check()
    signal.check()


def test_the_numba_dispatcher_form_equals_the_op() -> None:
    from numba import cuda

    from gpukit.compile.numba_dsl import kernel_source

    v2p, p2v = page_table.empty(20)
    page_table.bind(np.arange(1, 11), np.arange(5, 15), v2p, p2v)
    ids = np.array([3, 25, 3, 7, -1])
    there = [cuda.to_device(array) for array in (ids, v2p, p2v, np.zeros(5, np.int64), np.zeros(6, np.int64))]
    kernel_source("page_table", "unbind").dispatcher()[1, 32](there[0], 5, there[1], len(v2p), there[2], len(p2v), there[3], there[4])
    signal = Signal()
    out = page_table.unbind(ids, v2p, p2v, signal=signal)
    np.testing.assert_array_equal(there[3].copy_to_host()[[1, 3, 4]], out[[1, 3, 4]])
    assert sorted(there[3].copy_to_host()[[0, 2]]) == sorted(out[[0, 2]])
    np.testing.assert_array_equal(there[1].copy_to_host(), v2p)
    np.testing.assert_array_equal(there[4].copy_to_host()[:2], [signal.counts()["out_of_range"], signal.counts()["unbound"]])


def test_kernels_are_listed_for_warmup() -> None:
    assert {kernel.subject for kernel in launch.kernels()} >= {"page_table", "free_list", "sliding_window", "metadata", "page_copy"}
