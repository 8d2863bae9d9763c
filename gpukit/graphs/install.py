"""Put plans where they work: a window on a stream for as long as a capture takes, windows on chosen nodes of a finished graph, a reserve beside both.

Capture copies the stream's window into every kernel node, and a replay never looks at the stream again. So the window is there before the capture
begins and gone right after it ends, and what runs eagerly stays under the default policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpukit import checks, devices, streams
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.graphs import driver
from gpukit.graphs.reservation import Reservation
from gpukit.graphs.window import AccessWindow, Plan, admit

__all__ = ["apply", "installed", "set_windows"]


@contextmanager
def installed(window: AccessWindow | None, stream: Any, *, device: int = 0, guard: bool = True) -> Iterator[None]:
    """Give a stream of any library a window inside the block, and what it had before after it, also after an exception.

    Parameters
    ----------
    window : AccessWindow or None
        None leaves the stream alone.
    stream : stream
        One that is not capturing yet.
    device : int
        Ordinal of the stream's device.
    guard : bool
        Install nothing where the device cannot have the window, see `plan`.

    Raises
    ------
    ArgumentError
        The stream is capturing: nodes captured before would lack the window.
    DeviceError
        The driver refused.
    """
    _require_window(window)
    handle = streams.handle_of(stream, optional=False)
    if guard:
        window = admit(window, device)
    if window is None:
        yield
        return
    if devices.is_capturing(handle):
        raise ArgumentError("stream: expected one that is not capturing yet, got one that is; windows are installed before a capture begins")
    before = driver.stream_window(handle, device)
    driver.set_stream_window(handle, device, window)
    try:
        yield
    finally:
        driver.set_stream_window(handle, device, before)


@contextmanager
def apply(plan: Plan, stream: Any, *, reservation: Reservation | None = None) -> Iterator[Reservation | None]:
    """Put a plan around a capture of any library: its reserve requested, its window on the stream inside the block only.

    Parameters
    ----------
    plan : Plan
        With `nodes`, the stream gets no window: call `set_windows` on the finished graph.
    stream : stream
        The one that will capture, of any library; not capturing yet.
    reservation : Reservation, optional
        A handle to request the reserve on; a new one by default.

    Yields
    ------
    Reservation or None
        What must live as long as the graph: hold it, or `Graph.keep` it. None for a plan without a reserve. After an exception a new handle is
        closed and a given one has the request that it had.

    Examples
    --------
    Around torch::

        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph(keep_graph=True)
        with graphs.apply(plan, stream) as reservation, torch.cuda.graph(graph, stream=stream):
            step()
    """
    own = reservation is None
    before = None if reservation is None else reservation.size
    if plan.reserve is not None:
        if reservation is None:
            reservation = Reservation(plan.reserve, plan.device)
        else:
            reservation.request(plan.reserve)
    try:
        # The plan was guarded when it was made, or meant to be without.
        with installed(plan.window if plan.nodes is None else None, stream, device=plan.device, guard=False):
            yield reservation
    except BaseException:
        if reservation is not None and plan.reserve is not None:
            if own:
                reservation.close()
            elif before is None:
                reservation.release()
            else:
                reservation.request(before)
        raise


def set_windows(
    graph: Any,
    window: AccessWindow | None,
    nodes: tuple[str, ...] | Callable[[int, str], bool] | None = None,
    *,
    device: int = 0,
    guard: bool = True,
) -> int:
    """Give kernel nodes of a graph that is not instantiated yet a window, or take it away; all others keep what they have.

    Parameters
    ----------
    graph : graph
        Of gpukit, torch (``keep_graph=True``) or CuPy, or a ``cudaGraph_t``. What was instantiated from it before does not change; `Graph` has a
        method that instantiates again.
    window : AccessWindow or None
    nodes : tuple of str, or callable, optional
        Texts of which a kernel's name holds one, or ``nodes(position, name)`` that says whether; all kernel nodes by default.
    device : int
        Ordinal of the graph's device.
    guard : bool
        Set nothing where the device cannot have the window, see `plan`.

    Returns
    -------
    int
        Nodes that were set.

    Raises
    ------
    ArgumentError
        No kernel has such a name, because a misspelled one would silently do nothing; or `nodes` is a lone text, whose letters they would be.
    """
    _require_window(window)
    if nodes is not None and not callable(nodes):
        nodes = checks.texts(nodes, "nodes")
    if guard and window is not None and admit(window, device) is None:
        return 0
    found = driver.kernel_nodes(driver.graph_handle(graph))
    chosen = [node for position, node in enumerate(found) if _is_chosen(nodes, position, node.name)]
    if isinstance(nodes, tuple) and not chosen:
        names = ", ".join(sorted({node.name for node in found})) or "no kernels at all"
        raise ArgumentError(f"nodes: expected texts from the names of the graph's kernels ({names}), got {', '.join(nodes)}")
    for node in chosen:
        driver.set_node_window(node.handle, window)
    return len(chosen)


def _require_window(window: Any) -> None:
    if window is not None and not isinstance(window, AccessWindow):
        raise ArgumentTypeError(f"window: expected an AccessWindow or None, got {type(window).__name__}")


def _is_chosen(nodes: tuple[str, ...] | Callable[[int, str], bool] | None, position: int, name: str) -> bool:
    if nodes is None:
        return True
    if isinstance(nodes, tuple):
        return any(text in name for text in nodes)
    return bool(nodes(position, name))
