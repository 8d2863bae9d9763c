"""L2 plans where they are for: the sweep on the synthetic round, the real kernels' round, what changing the limit costs, and when that pays.

The sweeps are experiments, not regressions: each is one ladder after the other (see `gpukit.graphs.tune`). They run where `GPUKIT_SWEEPS` names a
directory, and put their JSON and pictures there: ``GPUKIT_SWEEPS=sweeps pytest perf/test_residency.py -s -k "sweep or round or suspending"``.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpukit import devices, graphs
from gpukit.graphs import Recipe, Reservation, rounds
from gpukit.kernels import residency
from perf.conftest import GPU, on_device, there

MIB = 1 << 20
LAYERS, PAGE = 30, 2_146_304
sweep = pytest.mark.skipif(not (GPU and os.environ.get("GPUKIT_SWEEPS")), reason="set GPUKIT_SWEEPS to a directory, on a machine with a GPU")
# What an H200 has to give, in percent of the round, by MiB of weights.
LEAST_GAIN = {0: 12.0, 64: 8.0, 512: 1.5}


@on_device
@pytest.mark.parametrize("keep", [None, 0.5, 0.0])
@pytest.mark.parametrize("layout", ["layer", "slot"])
def test_advance_states(device_benchmark: Callable[..., None], layout: str, keep: float | None) -> None:
    """The live slot of two, 64 MB read and written: what a round does to its state."""
    layers, page = (LAYERS, PAGE) if GPU else (2, 4096)
    shape = (layers, 2, page // 4) if layout == "layer" else (2, layers, page // 4)
    states = there(np.zeros(shape, np.int32))
    states = states if layout == "layer" else states.swapaxes(0, 1)
    slots = there(np.zeros(1, np.int64))
    device_benchmark(lambda: residency.advance_states(states, slots, keep=keep), moved=2 * layers * page, nodes=8)


@on_device
@pytest.mark.parametrize("keep", [None, 0.0])
@pytest.mark.parametrize("mib", [64, 512])
def test_stream_weights(device_benchmark: Callable[..., None], mib: int, keep: float | None) -> None:
    """Weights read once."""
    size = mib * MIB if GPU else 4096
    blocks = 4 * devices.properties(0).multiprocessors if GPU else 4
    weights, out = there(np.zeros(size // 4, np.int32)), there(np.zeros(blocks, np.int32))
    device_benchmark(lambda: residency.stream_weights(weights, out, keep=keep), moved=size, nodes=8)


def _report(result: graphs.TuneResult, name: str) -> None:
    from rich.console import Console

    result.print(Console(width=160))
    folder = Path(os.environ["GPUKIT_SWEEPS"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(result.to_json())
    result.plot(folder / f"{name}.png")


def _tune(name: str, options: rounds.RoundOptions, **settings: Any) -> tuple[graphs.TuneResult, rounds.Round]:
    made = rounds.build(name, options)
    started = time.perf_counter()
    result = graphs.tune(made.build_graph, made.regions, made.phases, recipes=made.recipes, geometry=made.geometry, **settings)
    print(f"{name}, {options.weights // MIB} MiB of weights: {time.perf_counter() - started:.1f} s")
    return result, made


@sweep
@pytest.mark.parametrize("mib", list(LEAST_GAIN))
def test_the_sweep_on_the_synthetic_round(mib: int) -> None:
    """What must be found, is found; and what doubled the time of a round is in the table."""
    result, _ = _tune("synthetic", rounds.RoundOptions(weights=mib * MIB), passes=6)
    _report(result, f"synthetic-{mib}")
    if devices.properties(0).name == "NVIDIA H200":
        assert -result.row(result.winner.name).change["total"][1] >= LEAST_GAIN[mib] if result.winner.name != "stock" else False, result.reason
        assert result.row("published").change["total"][0] > 0


@sweep
@pytest.mark.parametrize(("mib", "prefill"), [(64, 0), (512, 1024)])
def test_the_round_of_real_kernels_never_gets_slower(mib: int, prefill: int) -> None:
    """Whatever is returned, a fresh pair of ladders does not show it slower than stock in total time by more than three standard errors."""
    options = rounds.RoundOptions(weights=mib * MIB, prefill=prefill * MIB)
    result, made = _tune("recurrent", options, passes=5)
    _report(result, f"recurrent-{mib}-{prefill}")
    if result.winner.name == "stock":
        return
    again = graphs.tune(made.build_graph, made.regions, made.phases, recipes=[result.winner], passes=8, confirm=False, seeds=())
    row = again.row(result.winner.name)
    assert row.change["total"][1] <= 3 * row.errors["total"], row


@sweep
def test_what_suspending_a_reserve_costs_in_a_busy_loop() -> None:
    """`suspended()` around a prefill between decode graphs that keep the device busy, against the same loop without it; and when it pays."""
    reserve = min(24 * MIB, devices.properties(0).persisting_l2_max)
    made = rounds.build("synthetic", rounds.RoundOptions(weights=64 * MIB, prefill=64 * MIB))
    built = made.build_graph(Recipe("live", "live", reserve=reserve, options={"layout": "slot"}).plan(made.regions))
    bindings = devices.driver()
    cycles = 40

    def wait() -> None:
        with devices.current(0):
            devices.call(bindings.cuStreamSynchronize(built.stream), "cuStreamSynchronize")

    with Reservation(reserve) as held:

        def loop(suspend: bool, waiting: bool) -> float:
            wait()
            start = time.perf_counter()
            for _ in range(cycles):
                for _ in range(3):
                    built.run("decode")
                if waiting:
                    wait()
                with held.suspended() if suspend else nullcontext():
                    built.run("prefill")
                    if waiting:
                        wait()
            wait()
            return (time.perf_counter() - start) / cycles * 1e6

        def idle() -> float:
            wait()
            start = time.perf_counter()
            for _ in range(cycles):
                with held.suspended():
                    pass
            return (time.perf_counter() - start) / cycles * 1e6

        # In rotation, so that drift meets all alike.
        runs = {(suspend, waiting): [] for waiting in (False, True) for suspend in (False, True)}
        idles = []
        for _ in range(9):
            for key, own in runs.items():
                own.append(loop(*key))
            idles.append(idle())
    for graph in built.phases.values():
        graph.close()
    alone = statistics.median(idles)
    costs = {waiting: statistics.median(b - a for a, b in zip(runs[False, waiting], runs[True, waiting], strict=True)) for waiting in (False, True)}
    print(f"a suspended() block: {alone:.1f} µs on an idle device, {costs[False]:+.1f} µs a cycle in a loop that never waits,")
    print(f"{costs[True]:+.1f} µs where the loop waits for the device around the phase, as it must for the phase to run without the reserve")
    cost = max(alone, *costs.values())
    for tax in (0.007, 0.02, 0.1):
        print(f"pays for phases longer than {graphs.break_even_us(cost, tax) / 1e3:.2f} ms at a tax of {tax:.1%}")
    assert alone < 200
