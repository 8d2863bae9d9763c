"""Device time by events around graph replays, host cost by the wall clock around calls that do not wait. Medians and spread, never one run.

A callable is captured `nodes` times into a graph, so that what is measured is the device's time per call without the gaps of the host. Between hot
and cold lies a flush of several times the L2, put between the calls inside the graph and measured alone for the difference.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from gpukit import devices
from gpukit.errors import ArgumentError
from gpukit.graphs.capture import Graph, capture
from gpukit.kernels import calibration

__all__ = ["Stopwatch", "Timing", "device_time", "empty_node_time", "flush", "host_time", "own_stream"]

# Microseconds that the device sleeps before a measured stretch begins; issuing a graph launch and two events takes the host less than half of it.
_HEAD_START = 40.0


@dataclass(frozen=True)
class Timing:
    """Microseconds per call.

    Attributes
    ----------
    median, spread : float
        Median and interquartile range of the samples, µs.
    samples : tuple of float
        One per round, µs.
    clock : {"device", "host"}
    """

    median: float
    spread: float
    samples: tuple[float, ...]
    clock: str

    @classmethod
    def of(cls, samples: Sequence[float], clock: str) -> Timing:
        """Summarise samples.

        Examples
        --------
        >>> Timing.of([1.0, 2.0, 3.0, 9.0], "host").median
        2.5
        """
        ordered = sorted(samples)
        quartiles = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else [ordered[0]] * 3
        return cls(statistics.median(ordered), quartiles[2] - quartiles[0], tuple(samples), clock)


@contextmanager
def own_stream(device: int = 0) -> Iterator[int]:
    """A stream of gpukit's own, current in torch and CuPy too where they are imported, so that every library's work lands on it."""
    import sys

    bindings = devices.driver()
    with ExitStack() as stack:
        stack.enter_context(devices.current(device))
        handle = devices.create_stream(device)
        stack.callback(bindings.cuStreamDestroy, handle)
        stack.callback(bindings.cuStreamSynchronize, handle)
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        if torch is not None and torch.cuda.is_available():
            stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(handle, device=device)))
        if cupy is not None:
            stack.enter_context(cupy.cuda.ExternalStream(handle, device))
        yield handle


class Stopwatch:
    """Two events on a stream; `elapsed` waits for the second."""

    def __init__(self, stream: int, device: int = 0):
        bindings = devices.driver()
        self._stream = stream
        self._device = device
        # The calling thread may have no context yet, or that of another device.
        with devices.current(device):
            self._events = [devices.call(bindings.cuEventCreate(0), "cuEventCreate") for _ in range(2)]

    def start(self) -> None:
        """Record the first event, behind a short sleep that lets the host get ahead: its delays stay out of the measurement."""
        calibration.sleep(_HEAD_START, self._stream, self._device)
        devices.call(devices.driver().cuEventRecord(self._events[0], self._stream), "cuEventRecord")

    def stop(self) -> None:
        """Record the second event."""
        devices.call(devices.driver().cuEventRecord(self._events[1], self._stream), "cuEventRecord")

    def elapsed(self) -> float:
        """Microseconds between the events, after the second has happened."""
        bindings = devices.driver()
        devices.call(bindings.cuEventSynchronize(self._events[1]), "cuEventSynchronize")
        return float(devices.call(bindings.cuEventElapsedTime(*self._events), "cuEventElapsedTime")) * 1e3

    def __del__(self) -> None:
        try:
            with devices.beside_captures():
                for event in self._events:
                    devices.driver().cuEventDestroy(event)
        except Exception:
            # At interpreter exit the driver may be gone already.
            pass


@functools.cache
def _flush_buffer(device: int) -> tuple[int, int]:
    # Four times the L2, never freed: it is needed again and again.
    size = 4 * devices.properties(device).l2
    with devices.current(device):
        return int(devices.call(devices.driver().cuMemAlloc(size), "cuMemAlloc")), size


def flush(stream: int, device: int = 0) -> None:
    """Put other data in the L2: read four times its size. Works inside a capture if it ran once before."""
    pointer, size = _flush_buffer(device)
    calibration.read(pointer, size, pointer, stream, device)


def record(call: Callable[[], Any], nodes: int, stream: int, device: int = 0, before: Callable[[], Any] | None = None) -> Graph:
    """A graph of `nodes` calls, each after `before` if given."""
    for _ in range(3):
        call()
    devices.call(devices.driver().cuStreamSynchronize(stream), "cuStreamSynchronize")
    with capture(stream, device=device) as graph:
        for _ in range(nodes):
            if before is not None:
                before()
            call()
    if graph.nodes < nodes:
        raise ArgumentError(f"call: expected work on stream {stream:#x}, got {graph.nodes} graph nodes from {nodes} calls; is it the current one?")
    graph.keep(call)
    return graph


def replay_times(graph: Graph, rounds: int, warmup: int = 3) -> list[float]:
    """Microseconds of each of `rounds` replays."""
    watch = Stopwatch(graph.stream, graph.device)
    times = []
    with devices.current(graph.device):
        for replay in range(warmup + rounds):
            watch.start()
            graph.launch()
            watch.stop()
            took = watch.elapsed()
            if replay >= warmup:
                times.append(took)
    return times


def device_time(
    call: Callable[[], Any], *, nodes: int = 64, rounds: int = 15, cold: bool = False, stream: int | None = None, device: int = 0
) -> Timing:
    """Device time of one call, in µs, from replays of a graph that holds it `nodes` times.

    Parameters
    ----------
    call : callable
        Enqueues the work on the current stream of its library, which is set to a stream of gpukit's, or on `stream`. It must be capturable.
    nodes, rounds : int
        Calls per graph and replays.
    cold : bool
        Flush the L2 before every call, and subtract what the flush takes alone.
    stream : int, optional
        Handle of the stream that `call` enqueues on, if it is not the current one.
    device : int
        Ordinal.
    """
    if nodes < 1 or rounds < 2:
        raise ArgumentError(f"nodes, rounds: expected at least 1 and 2, got {nodes} and {rounds}")
    with ExitStack() as stack:
        handle = stream if stream is not None else stack.enter_context(own_stream(device))
        if not cold:
            samples = [took / nodes for took in replay_times(record(call, nodes, handle, device), rounds)]
            return Timing.of(samples, "device")
        flush(handle, device)
        with_call = replay_times(record(call, nodes, handle, device, before=lambda: flush(handle, device)), rounds)
        alone = statistics.median(replay_times(record(lambda: flush(handle, device), nodes, handle, device), rounds))
        return Timing.of([(took - alone) / nodes for took in with_call], "device")


def empty_node_time(device: int = 0, *, nodes: int = 256, rounds: int = 15) -> Timing:
    """What a graph node of an empty kernel costs: the floor of every device time."""
    with own_stream(device) as stream:
        return device_time(lambda: calibration.empty(stream, device), nodes=nodes, rounds=rounds, stream=stream, device=device)


def host_time(call: Callable[[], Any], *, batch: int = 200, rounds: int = 21, warmup: int = 50, synchronize: bool = True, device: int = 0) -> Timing:
    """Host cost of one call, in µs: the wall time of issuing a batch that does not fill the launch queue, without waiting for it.

    Parameters
    ----------
    call : callable
        Enqueues work and returns.
    batch, rounds, warmup : int
        Calls per sample (well below the 1,024 launches that the queue holds), samples, and calls before them.
    synchronize : bool
        Empty the queue before each sample; False for calls that touch no device.
    """
    for _ in range(warmup):
        call()
    samples = []
    for _ in range(rounds):
        if synchronize:
            with devices.current(device):
                devices.call(devices.driver().cuCtxSynchronize(), "cuCtxSynchronize")
        start = time.perf_counter_ns()
        for _ in range(batch):
            call()
        samples.append((time.perf_counter_ns() - start) / batch / 1e3)
    return Timing.of(samples, "host")
