"""`capture` records what is enqueued on a stream; the `Graph` that comes out replays it.

Only the calling thread is watched (thread-local capture mode), so other threads may allocate and load meanwhile. Kernels must be loaded before:
see `gpukit.warmup`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from gpukit import devices, streams
from gpukit.errors import ArgumentError, DeviceError

if TYPE_CHECKING:
    from gpukit.graphs.window import AccessWindow, Plan

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
    The arrays that the captured work uses must outlive the graph; `keep` holds on to objects for as long. A graph captured under a plan keeps the
    plan's reservation.
    """

    def __init__(self, device: int, stream: int):
        self.device = device
        self.stream = stream
        self._graph: Any = None
        self._executable: Any = None
        self._kept: list[Any] = []
        self._reached = ""

    def __repr__(self) -> str:
        state = "open" if self._executable is not None else "closed"
        return f"Graph({self.nodes if self._graph is not None else 0} nodes, device {self.device}, {state})"

    def keep(self, *objects: Any) -> None:
        """Hold references for the life of the graph."""
        self._kept.extend(objects)

    @property
    def handle(self) -> Any:
        """The driver's ``CUgraph``.

        Raises
        ------
        ArgumentError
            The graph is closed, or its capture has not ended.
        """
        if self._graph is None:
            raise ArgumentError("graph: expected a captured graph, got one that is closed or whose capture failed")
        return self._graph

    @property
    def nodes(self) -> int:
        """Number of nodes of every kind; a child graph is one."""
        bindings = devices.driver()
        return int(devices.call(bindings.cuGraphGetNodes(self.handle), "cuGraphGetNodes")[1])

    @property
    def kernels(self) -> tuple[str, ...]:
        """Name of every kernel node, child graphs included, in the driver's order."""
        from gpukit.graphs import driver

        return tuple(node.name for node in driver.kernel_nodes(self.handle))

    def check(self, what: str) -> None:
        """Inside the capture: refuse to go on if something has broken it, saying since when.

        Parameters
        ----------
        what : str
            What was just captured. Call it after each part whose failure should be told from the others'.

        Raises
        ------
        DeviceError
            The capture is broken; the message names `what` and the part before it.
        """
        bindings = devices.driver()
        status, state = bindings.cuStreamIsCapturing(self.stream)
        if status != 0 or state != bindings.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            since = f"after {self._reached}" if self._reached else "after the capture began"
            raise DeviceError(f"capture: {what} broke it ({since}): it did what is not allowed in a capture")
        self._reached = what

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

    def set_windows(
        self, window: AccessWindow | None, nodes: tuple[str, ...] | Callable[[int, str], bool] | None = None, *, guard: bool = True
    ) -> int:
        """Give chosen kernel nodes a window, or take it away, and instantiate again; see `gpukit.graphs.set_windows`.

        Returns
        -------
        int
            Nodes that were set. Launches that are under way run as they were.
        """
        from gpukit.graphs.install import set_windows

        count = set_windows(self, window, nodes, device=self.device, guard=guard)
        self._instantiate()
        return count

    def update(self, other: Graph) -> None:
        """Make this graph do what `other` does, in place where the driver can: for a step that was captured again with other addresses or sizes.

        `other` gives its work away and is closed. Where only parameters differ the executable is updated, which is quicker than instantiating;
        where windows or the shape of the graph differ it is instantiated again.

        Raises
        ------
        ArgumentError
            One of both is closed, or they are on different devices.
        """
        from gpukit.graphs.audit import windows_of

        if other.device != self.device:
            raise ArgumentError(f"other: expected a graph of device {self.device}, got one of device {other.device}")
        if self._executable is None or other._executable is None:
            raise ArgumentError("other: expected two captured graphs, got one that is closed or whose capture failed")
        bindings = devices.driver()
        in_place = False
        # An update is not documented to carry windows over.
        if windows_of(self) == windows_of(other):
            with devices.current(self.device):
                in_place = bindings.cuGraphExecUpdate(self._executable, other._graph)[0] == 0
        if in_place:
            _destroy(other._executable, self._graph)
        else:
            _destroy(self._executable, self._graph)
            self._executable = other._executable
        self._graph, self._kept = other._graph, list(other._kept)
        other._graph = other._executable = None
        other._kept.clear()

    def close(self) -> None:
        """Free the graph. Launches that are under way finish."""
        _destroy(self._executable, self._graph)
        self._executable = self._graph = None
        self._kept.clear()

    def _instantiate(self) -> None:
        bindings = devices.driver()
        with devices.current(self.device):
            executable = devices.call(bindings.cuGraphInstantiate(self.handle, 0), "cuGraphInstantiate")
        _destroy(self._executable, None)
        self._executable = executable

    def __enter__(self) -> Graph:
        # Raises for a closed one, which could launch nothing in the block.
        _ = self.handle
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:
            # At interpreter exit the driver may be gone already.
            pass


def _destroy(executable: Any, graph: Any) -> None:
    """Free what there is of both. An old graph often goes away while its successor, of the same name, is being captured."""
    bindings = devices.driver()
    if executable is None and graph is None:
        return
    with devices.beside_captures():
        if executable is not None:
            bindings.cuGraphExecDestroy(executable)
        if graph is not None:
            bindings.cuGraphDestroy(graph)


@contextmanager
def capture(stream: Any, *, device: int = 0, plan: Plan | None = None) -> Iterator[Graph]:
    """Capture everything that the calling thread enqueues on a stream.

    Parameters
    ----------
    stream : stream
        Any stream but the default ones, of any library; make it the current stream of the libraries whose work shall be captured.
    device : int
        Ordinal of the stream's device.
    plan : Plan, optional
        What to keep in the L2: its window is on the stream while it captures, or on the chosen nodes afterwards; the graph keeps its reservation.

    Yields
    ------
    Graph
        Ready to launch when the block ends. After an exception it is closed, the stream is usable and has the window that it had before.

    Raises
    ------
    ArgumentError
        The stream is none, or a default stream, which cannot be captured, or is capturing already; the plan is for another device.
    DeviceError
        The driver ended the capture, because something in the block is not allowed in one. The call that broke it raised an error of its own
        library, if that did not hide it; `Graph.check` narrows it down.
    """
    handle = streams.handle_of(stream, optional=False)
    if handle in (0, 1, 2):
        raise ArgumentError(f"stream: expected a stream of its own, because default streams cannot be captured; got handle {handle}")
    if devices.is_capturing(handle):
        raise ArgumentError("stream: expected one that is not capturing, got one that is")
    if plan is not None and plan.device != device:
        raise ArgumentError(f"plan: expected one for device {device}, got one for device {plan.device}")
    graph = Graph(device, handle)
    try:
        with ExitStack() as around:
            if plan is not None and not plan.does_nothing:
                from gpukit.graphs.install import apply

                graph.keep(around.enter_context(apply(plan, handle)))
            yield from _record(graph, handle)
        if plan is not None and plan.window is not None and plan.nodes is not None:
            # The plan was guarded when it was made, or meant to be without.
            graph.set_windows(plan.window, plan.nodes, guard=False)
        else:
            graph._instantiate()
    except BaseException:
        graph.close()
        raise


def _record(graph: Graph, handle: int) -> Iterator[Graph]:
    """Begin the capture, hand over, end it whatever happened."""
    bindings = devices.driver()
    mode = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    devices.call(bindings.cuStreamBeginCapture(handle, mode), "cuStreamBeginCapture")
    try:
        yield graph
    except BaseException as error:
        status, captured = bindings.cuStreamEndCapture(handle)
        if status == 0 and captured is not None:
            _destroy(None, captured)
        error.add_note(f"raised inside a capture of stream {handle:#x}, which is over; the stream is usable")
        raise
    status, captured = bindings.cuStreamEndCapture(handle)
    if status != 0:
        since = f" after {graph._reached}" if graph._reached else ""
        if status.name.endswith("UNJOINED"):
            why = "a stream that was forked from it was not joined again"
        else:
            why = f"something in the block{since} is not allowed in a capture, and its error was not raised; Graph.check tells what"
        raise DeviceError(f"cuStreamEndCapture failed: {status.name}; {why}")
    graph._graph = captured
