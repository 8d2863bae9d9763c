"""What a call costs the host, per route and array library: 64 pages to unbind, `out` given. Wall clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpukit.kernels import calibration, page_table
from perf.conftest import GPU, there

gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
PAGES = 64


def make(library: str, values: np.ndarray) -> Any:
    """A device array of a library; NumPy where there is no GPU."""
    if not GPU or library == "torch":
        return there(values)
    if library == "numba":
        from numba import cuda

        return cuda.to_device(values)
    import cupy

    return cupy.asarray(values)


def arguments(library: str) -> dict[str, Any]:
    """Ids, physical pages, tables and an output."""
    v2p, p2v = page_table.empty(4_096)
    ids = np.arange(1, PAGES + 1)
    values = {"ids": ids, "physical": ids + 100, "v2p": v2p, "p2v": p2v, "out": np.zeros(PAGES, np.int64)}
    return {name: make(library, value) for name, value in values.items()}


CALLS: dict[str, Callable[[dict[str, Any]], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "bind": lambda a: (page_table.bind, (a["ids"], a["physical"], a["v2p"], a["p2v"]), {}),
    "bind_range": lambda a: (page_table.bind_range, (a["ids"], 101, a["v2p"], a["p2v"]), {"out": a["out"]}),
    "unbind": lambda a: (page_table.unbind, (a["ids"], a["v2p"], a["p2v"]), {"out": a["out"]}),
    "translate": lambda a: (page_table.translate, (a["ids"], a["v2p"], 64), {"out": a["out"]}),
}


@gpu
def test_floor(host_benchmark: Any, stream: int) -> None:
    """cuLaunchKernel from Python with its arguments packed beforehand."""
    host_benchmark(calibration.prepare_empty(stream), host_only=True)


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("library", ["torch", "cupy", "numba"])
def test_eager(host_benchmark: Any, stream: int, library: str, op: str) -> None:
    """A checked call."""
    function, args, kwargs = CALLS[op](arguments(library))
    host_benchmark(lambda: function(*args, **kwargs), host_only=True)


@pytest.mark.parametrize("op", CALLS)
def test_prepared(host_benchmark: Any, stream: int, op: str) -> None:
    """A prepared call."""
    function, args, kwargs = CALLS[op](arguments("torch"))
    host_benchmark(function.prepare(*args, **kwargs), host_only=True)


@gpu
@pytest.mark.parametrize("op", CALLS)
def test_triton(host_benchmark: Any, stream: int, op: str) -> None:
    """The peer: the same work and checks from Triton's launcher behind a plain wrapper."""
    triton_paging = pytest.importorskip("perf.peers.triton_paging")
    a = arguments("torch")
    calls = {
        "bind": lambda: triton_paging.bind(a["ids"], a["physical"], a["v2p"], a["p2v"]),
        "bind_range": lambda: triton_paging.bind_range(a["ids"], 101, a["v2p"], a["p2v"], a["out"]),
        "unbind": lambda: triton_paging.unbind(a["ids"], a["v2p"], a["p2v"], a["out"]),
        "translate": lambda: triton_paging.translate(a["ids"], a["v2p"], 64, a["out"]),
    }
    host_benchmark(calls[op], host_only=True)
