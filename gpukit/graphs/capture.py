"""`capture` records what is enqueued on a stream; the `Graph` that comes out replays it.

Only the calling thread is watched (thread-local capture mode), so other threads may allocate and load meanwhile. Kernels must be loaded before:
see `gpukit.warmup`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpukit import devices, streams
from gpukit.errors import ArgumentError, DeviceError

__all__ = ["Graph", "capture"]


class Graph:
    """Captured work, ready to be launched any number of times.

    Attributes
    ----------
    device : int
        Ordinal of its device.
    stream : int
        The stream that it was captured on, where `launch` runs it by default.

    Notes
    -----
    The arrays that the captured work uses must outlive the graph; `keep` holds on to objects for as long.
    """

    def __init__(self, device: int, stream: int):
        self.device = device
        self.stream = stream
        self._graph: Any = None
        self._executable: Any = None
        self._kept: list[Any] = []

    def __repr__(self) -> str:
        state = "open" if self._executable is not None else "closed"
        return f"Graph({self.nodes if self._graph is not None else 0} nodes, device {self.device}, {state})"

    def keep(self, *objects: Any) -> None:
        """Hold references for the life of the graph."""
        self._kept.extend(objects)

    @property
    def nodes(self) -> int:
        """Number of nodes of every kind."""
        bindings = devices.driver()
        return int(devices.call(bindings.cuGraphGetNodes(self._graph), "cuGraphGetNodes")[1])

    def launch(self, stream: Any = None) -> None:
        """Enqueue the work on `stream`, or on the stream of the capture. Does not wait.

        Raises
        ------
        ArgumentError
            The graph is closed, or its capture failed.
        """
        if self._executable is None:
            raise ArgumentError("graph: expected a captured graph, got one that is closed or whose capture failed")
        handle = self.stream if stream is None else streams.handle_of(stream)
        status = devices.driver().cuGraphLaunch(self._executable, handle)[0]
        if status != 0:
            raise DeviceError(f"cuGraphLaunch failed: {status.name}")

    def close(self) -> None:
        """Free the graph. Launches that are under way finish."""
        bindings = devices.driver()
        if self._executable is not None:
            bindings.cuGraphExecDestroy(self._executable)
            self._executable = None
        if self._graph is not None:
            bindings.cuGraphDestroy(self._graph)
            self._graph = None
        self._kept.clear()

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:
            # At interpreter exit the driver may be gone already.
            pass


@contextmanager
def capture(stream: Any, *, device: int = 0) -> Iterator[Graph]:
    """Capture everything that the calling thread enqueues on a stream.

    Parameters
    ----------
    stream : stream
        Any stream but the default ones, of any library; make it the current stream of the libraries whose work shall be captured.
    device : int
        Ordinal of the stream's device.

    Yields
    ------
    Graph
        Ready to launch when the block ends. After an exception it is closed, and the stream is usable.

    Raises
    ------
    ArgumentError
        The stream is a default stream, which cannot be captured, or is capturing already.
    DeviceError
        The driver ended the capture, because something in the block is not allowed in one.
    """
    handle = streams.handle_of(stream)
    if handle in (0, 1, 2):
        raise ArgumentError(f"stream: expected a stream of its own, because default streams cannot be captured; got handle {handle}")
    if devices.is_capturing(handle):
        raise ArgumentError("stream: expected one that is not capturing, got one that is")
    bindings = devices.driver()
    graph = Graph(device, handle)
    mode = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    devices.call(bindings.cuStreamBeginCapture(handle, mode), "cuStreamBeginCapture")
    try:
        yield graph
    except BaseException:
        status, captured = bindings.cuStreamEndCapture(handle)
        if status == 0 and captured is not None:
            bindings.cuGraphDestroy(captured)
        raise
    status, captured = bindings.cuStreamEndCapture(handle)
    if status != 0:
        raise DeviceError(f"cuStreamEndCapture failed: {status.name}; something in the block is not allowed in a capture")
    graph._graph = captured
    with devices.current(device):
        graph._executable = devices.call(bindings.cuGraphInstantiate(captured, 0), "cuGraphInstantiate")
