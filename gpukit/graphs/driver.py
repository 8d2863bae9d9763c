"""The few driver calls of this package, in one place: the persisting limit, windows of streams and of graph nodes, walking a graph.

`LimitDriver` is what `reservation` needs of a driver; tests put a double in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

from gpukit import devices
from gpukit.errors import ArgumentError
from gpukit.graphs.window import AccessWindow

__all__ = ["CudaLimits", "KernelNode", "LimitDriver"]


class LimitDriver(Protocol):
    """What owning the persisting limit takes. Each call raises `DeviceError` when the driver refuses."""

    def switch(self, device: int) -> AbstractContextManager[None]:
        """Make a device current for a while."""
        ...

    def read(self) -> int:
        """The current device's limit, in bytes."""
        ...

    def write(self, size: int) -> None:
        """Set the current device's limit."""
        ...


class CudaLimits:
    """The real one: ``cuCtxSetLimit`` in the device's primary context, which is what ``cudaDeviceSetLimit`` does."""

    @contextmanager
    def switch(self, device: int) -> Iterator[None]:
        """See `LimitDriver`."""
        # A reservation may be collected at any moment, also while this or another thread captures.
        with devices.current(device), devices.beside_captures():
            yield

    def read(self) -> int:
        """See `LimitDriver`."""
        bindings = devices.driver()
        return int(devices.call(bindings.cuCtxGetLimit(bindings.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE), "cuCtxGetLimit"))

    def write(self, size: int) -> None:
        """See `LimitDriver`."""
        bindings = devices.driver()
        what = f"cuCtxSetLimit(persisting L2, {size})"
        devices.call(bindings.cuCtxSetLimit(bindings.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE, size), what)


def reset_persisting(device: int) -> None:
    """Make every persisting line of a device normal again. Waits for the device; never on a hot path."""
    bindings = devices.driver()
    with devices.current(device):
        devices.call(bindings.cuCtxSynchronize(), "cuCtxSynchronize")
        devices.call(bindings.cuCtxResetPersistingL2Cache(), "cuCtxResetPersistingL2Cache")


_PROPERTIES = ("normal", "streaming", "persisting")


def _encode(bindings: Any, kind: Any, window: AccessWindow | None) -> Any:
    """A stream's or a node's attribute value; no bytes is no window."""
    inner, value = bindings.CUaccessPolicyWindow(), kind()
    inner.base_ptr = 0 if window is None else window.base
    inner.num_bytes = 0 if window is None else window.size
    inner.hitRatio = 0.0 if window is None else window.ratio
    properties = ("normal", "normal") if window is None else (window.hit, window.miss)
    inner.hitProp, inner.missProp = (bindings.CUaccessProperty(_PROPERTIES.index(name)) for name in properties)
    value.accessPolicyWindow = inner
    return value


def _decode(value: Any) -> AccessWindow | None:
    inner = value.accessPolicyWindow
    size = int(inner.num_bytes)
    if size == 0:
        return None
    hit, miss = _PROPERTIES[int(inner.hitProp)], _PROPERTIES[int(inner.missProp)]
    return AccessWindow(int(inner.base_ptr), size, float(inner.hitRatio), hit, miss)


def stream_window(stream: int, device: int) -> AccessWindow | None:
    """The window that a stream gives to the kernels launched on it."""
    bindings = devices.driver()
    attribute = bindings.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    with devices.current(device):
        return _decode(devices.call(bindings.cuStreamGetAttribute(stream, attribute), "cuStreamGetAttribute"))


def set_stream_window(stream: int, device: int, window: AccessWindow | None) -> None:
    """Give a stream a window, or take it away."""
    bindings = devices.driver()
    attribute = bindings.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    value = _encode(bindings, bindings.CUstreamAttrValue, window)
    with devices.current(device):
        devices.call(bindings.cuStreamSetAttribute(stream, attribute, value), "cuStreamSetAttribute")


class KernelNode(NamedTuple):
    """A kernel node of a graph or of one of its child graphs: the driver's handle, and the kernel's name (empty where it has none)."""

    handle: Any
    name: str


def graph_handle(graph: Any) -> Any:
    """The driver's graph behind a gpukit, CuPy or torch graph, or a raw ``cudaGraph_t``.

    Raises
    ------
    ArgumentError
        The object is no graph, or one that has been thrown away after instantiation.
    """
    if type(graph).__name__ in ("CUgraph", "cudaGraph_t"):
        return devices.driver().CUgraph(int(graph))
    if isinstance(graph, int) and not isinstance(graph, bool) and graph > 0:
        return devices.driver().CUgraph(graph)
    own = getattr(graph, "handle", None)
    if own is not None and type(own).__name__ in ("CUgraph", "cudaGraph_t"):
        return devices.driver().CUgraph(int(own))
    raw = getattr(graph, "raw_cuda_graph", None)
    if raw is not None:
        try:
            return devices.driver().CUgraph(int(raw()))
        except RuntimeError as error:
            advice = "expected a torch.cuda.CUDAGraph(keep_graph=True), because torch throws the graph away otherwise"
            raise ArgumentError(f"graph: {advice}; got one that says: {str(error).splitlines()[0]}") from None
    pointer = getattr(graph, "graph", None)
    if isinstance(pointer, int) and pointer > 0:
        return devices.driver().CUgraph(pointer)
    raise ArgumentError(f"graph: expected a graph of gpukit, torch or CuPy, or a cudaGraph_t that is not 0, got {type(graph).__name__}")


def walk(graph: Any) -> Iterator[tuple[str, Any]]:
    """Kind and handle of every node, in the driver's order; those of child graphs in the place of their node."""
    bindings = devices.driver()
    kinds = bindings.CUgraphNodeType
    count = int(devices.call(bindings.cuGraphGetNodes(graph), "cuGraphGetNodes")[1])
    if count == 0:
        return
    nodes = devices.call(bindings.cuGraphGetNodes(graph, count), "cuGraphGetNodes")[0]
    for node in nodes:
        kind = devices.call(bindings.cuGraphNodeGetType(node), "cuGraphNodeGetType")
        if kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
            yield from walk(devices.call(bindings.cuGraphChildGraphNodeGetGraph(node), "cuGraphChildGraphNodeGetGraph"))
        else:
            yield kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower(), node


def kernel_nodes(graph: Any) -> list[KernelNode]:
    """Every kernel node with its name, child graphs included."""
    return [KernelNode(node, kernel_name(node)) for kind, node in walk(graph) if kind == "kernel"]


def kernel_name(node: Any) -> str:
    bindings = devices.driver()
    status, parameters = bindings.cuGraphKernelNodeGetParams(node)
    if status != 0:
        return ""
    # A kernel may come as a function of its context or as the context-free handle that gpukit launches.
    for handle, ask in ((parameters.func, bindings.cuFuncGetName), (parameters.kern, bindings.cuKernelGetName)):
        if int(handle):
            status, name = ask(handle)
            if status == 0 and name:
                return name.decode() if isinstance(name, bytes) else str(name)
    return ""


def node_window(node: Any) -> AccessWindow | None:
    """The window of a kernel node."""
    bindings = devices.driver()
    attribute = bindings.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    return _decode(devices.call(bindings.cuGraphKernelNodeGetAttribute(node, attribute), "cuGraphKernelNodeGetAttribute"))


def set_node_window(node: Any, window: AccessWindow | None) -> None:
    """Give a kernel node a window, or take it away. Graphs that are instantiated already do not see it."""
    bindings = devices.driver()
    attribute = bindings.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    value = _encode(bindings, bindings.CUkernelNodeAttrValue, window)
    devices.call(bindings.cuGraphKernelNodeSetAttribute(node, attribute, value), "cuGraphKernelNodeSetAttribute")
