"""Drivers that are not there: one that keeps persisting limits, and one that captures, and keeps windows on streams and graph nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from gpukit.devices import DeviceProperties
from gpukit.errors import DeviceError
from tests.helpers.driver import CaptureStatus, FakeDriver, Result

MIB = 1 << 20


def card(name: str, l2: int, persisting: int, window: int) -> DeviceProperties:
    """Properties of a device, of which only the L2 counts."""
    return DeviceProperties(0, name, (9, 0), 132, 1 << 37, l2, persisting, window)


H200 = card("H200", 62_914_560, 39_321_600, 134_217_728)
RTX_5090 = card("RTX 5090", 96 * MIB, 62_914_560, 134_217_728)
MIG = card("MIG slice", 8 * MIB, 0, 0)
MIG_WITH_WINDOWS = card("MIG slice with windows", 8 * MIB, 0, 134_217_728)
# A card whose windows are smaller than what it may reserve.
NARROW = card("narrow", 64 * MIB, 32 * MIB, 16 * MIB)


class FakeLimits:
    """Persisting limits of a few devices. Calls are counted; what a test tells it to refuse it refuses, without changing anything."""

    def __init__(self, baselines: tuple[int, ...] = (11_796_480,), most: int = 39_321_600, unit: int = 1):
        self.limits = list(baselines)
        self.most = most
        # A driver that grants whole units only.
        self.unit = unit
        self.current: int | None = None
        self.refuse: set[str] = set()
        self.writes: list[tuple[int | None, int]] = []
        self.reads = 0
        self.inside = 0
        self.overlapped = False
        # Whether it lets other threads run in the middle of a call.
        self.slow = False
        self._context = threading.local()

    @contextmanager
    def switch(self, device: int) -> Iterator[None]:
        self._refuse("switch")
        before, self._context.device = getattr(self._context, "device", self.current), device
        # Two threads in here at once would mean that the table is not guarded.
        self.inside += 1
        self.overlapped |= self.inside > 1
        if self.slow:
            time.sleep(1e-5)
        try:
            yield
        finally:
            self.inside -= 1
            self._context.device = before

    def read(self) -> int:
        self._refuse("read")
        self.reads += 1
        return self.limits[self._device()]

    def write(self, size: int) -> None:
        self.writes.append((self._device(), size))
        self._refuse("write")
        if size > self.most:
            raise DeviceError(f"cuCtxSetLimit(persisting L2, {size}) failed: CUDA_ERROR_INVALID_VALUE")
        self.limits[self._device()] = size // self.unit * self.unit

    def _device(self) -> int:
        device = getattr(self._context, "device", self.current)
        assert device is not None, "no device was current"
        return int(device)

    def _refuse(self, what: str) -> None:
        if what in self.refuse:
            raise DeviceError(f"{what} was refused")


class FakeGraph:
    """Nodes in order: (kind, name, window, child)."""

    def __init__(self) -> None:
        self.nodes: list[SimpleNamespace] = []
        self.destroyed = False


class CUgraph(int):
    """A handle as the bindings have them: made from an int or from another handle."""


class NamedKernel(int):
    """A kernel's handle, which knows its name."""

    name = ""


KINDS = {"kernel": 0, "memcpy": 1, "memset": 2, "graph": 4}


class Kind(int):
    @property
    def name(self) -> str:
        return "CU_GRAPH_NODE_TYPE_" + {value: key for key, value in KINDS.items()}[int(self)].upper()


class FakeGraphs(FakeDriver):
    """A driver that captures kernels by name, with the window that the stream has at that moment. Its limit is that of device 0."""

    CUgraph = CUgraph
    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_GRAPH=KINDS["graph"], CU_GRAPH_NODE_TYPE_KERNEL=KINDS["kernel"])
    CUstreamAttrID = CUkernelNodeAttrID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW=1)
    CUstreamAttrValue = CUkernelNodeAttrValue = CUaccessPolicyWindow = SimpleNamespace
    CUaccessProperty = staticmethod(int)
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_CONTEXT="context", CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL="ordinal")
    CUlimit = SimpleNamespace(CU_LIMIT_PERSISTING_L2_CACHE_SIZE=6)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)

    def __init__(self, devices: int = 1):
        super().__init__(devices)
        self.windows: dict[int, Any] = {}
        self.limits = dict.fromkeys(range(1000, 1000 + devices), 11_796_480)
        self.graphs: dict[int, FakeGraph] = {}
        self.recording: dict[int, FakeGraph] = {}
        self.executables: set[int] = set()
        self.calls: list[str] = []
        self.allocated = 0
        # A driver that grants whole units only.
        self.unit = 1
        # Streams that are not of device 0.
        self.device_of: dict[int, int] = {}
        self.updatable = True
        # Addresses that belong to no context, as those of memory pools do.
        self.pooled: set[int] = set()
        self._handles = iter(range(1, 1 << 20))

    # What a test plays.

    def launch(self, stream: int, name: str) -> None:
        """A kernel on a stream that captures."""
        self.recording[stream].nodes.append(SimpleNamespace(kind="kernel", name=name, window=self.windows.get(stream), child=None))

    def other(self, stream: int, kind: str, child: FakeGraph | None = None) -> None:
        self.recording[stream].nodes.append(SimpleNamespace(kind=kind, name="", window=None, child=child))

    def made(self, graph: FakeGraph) -> CUgraph:
        """A raw handle."""
        handle = CUgraph(next(self._handles))
        self.graphs[handle] = graph
        return handle

    # The driver's side.

    def cuStreamBeginCapture(self, stream: int, mode: Any) -> Any:
        self.calls.append("begin")
        answer = self._answer("cuStreamBeginCapture")
        if answer[0] == 0:
            self.capturing.add(stream)
            self.recording[stream] = FakeGraph()
        return answer

    def cuStreamEndCapture(self, stream: int) -> Any:
        self.calls.append("end")
        self.capturing.discard(stream)
        return self._answer("cuStreamEndCapture", self.made(self.recording.pop(stream)))

    def cuStreamIsCapturing(self, stream: int) -> Any:
        return self._answer("cuStreamIsCapturing", CaptureStatus(int(stream in self.capturing)))

    def cuGraphInstantiate(self, graph: int, flags: int) -> Any:
        handle = next(self._handles)
        answer = self._answer("cuGraphInstantiate", handle)
        if answer[0] == 0:
            self.executables.add(handle)
        return answer

    def cuGraphExecUpdate(self, executable: int, graph: int) -> Any:
        self.calls.append("update")
        return (Result.CUDA_SUCCESS if self.updatable else Result.CUDA_ERROR_INVALID_HANDLE, None)

    def cuGraphLaunch(self, executable: int, stream: int) -> Any:
        assert executable in self.executables
        self.calls.append("launch")
        return self._answer("cuGraphLaunch")

    def cuGraphExecDestroy(self, executable: int) -> Any:
        self.require_harmless("cuGraphExecDestroy")
        self.executables.remove(executable)
        return self._answer("cuGraphExecDestroy")

    def cuGraphDestroy(self, graph: int) -> Any:
        self.require_harmless("cuGraphDestroy")
        assert not self.graphs[graph].destroyed
        self.graphs[graph].destroyed = True
        return self._answer("cuGraphDestroy")

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> Any:
        nodes = self.graphs[graph].nodes
        return self._answer("cuGraphGetNodes", nodes if count else None, len(nodes))

    def cuGraphNodeGetType(self, node: Any) -> Any:
        return self._answer("cuGraphNodeGetType", Kind(KINDS[node.kind]))

    def cuGraphChildGraphNodeGetGraph(self, node: Any) -> Any:
        return self._answer("cuGraphChildGraphNodeGetGraph", self.made(node.child))

    def cuGraphKernelNodeGetParams(self, node: Any) -> Any:
        kernel = NamedKernel(1)
        kernel.name = node.name
        return self._answer("cuGraphKernelNodeGetParams", SimpleNamespace(func=0, kern=kernel))

    def cuFuncGetName(self, function: Any) -> Any:
        raise AssertionError("the node has no function")

    def cuKernelGetName(self, kernel: Any) -> Any:
        return self._answer("cuKernelGetName", kernel.name.encode())

    def cuGraphKernelNodeGetAttribute(self, node: Any, attribute: int) -> Any:
        return self._answer("cuGraphKernelNodeGetAttribute", SimpleNamespace(accessPolicyWindow=node.window or _NO_WINDOW))

    def cuGraphKernelNodeSetAttribute(self, node: Any, attribute: int, value: Any) -> Any:
        node.window = value.accessPolicyWindow
        return self._answer("cuGraphKernelNodeSetAttribute")

    def cuStreamGetAttribute(self, stream: int, attribute: int) -> Any:
        return self._answer("cuStreamGetAttribute", SimpleNamespace(accessPolicyWindow=self.windows.get(stream, _NO_WINDOW)))

    def cuStreamSetAttribute(self, stream: int, attribute: int, value: Any) -> Any:
        self.calls.append("window" if value.accessPolicyWindow.num_bytes else "no window")
        answer = self._answer("cuStreamSetAttribute")
        if answer[0] == 0:
            self.windows[stream] = value.accessPolicyWindow
        return answer

    def cuStreamGetCtx(self, stream: int) -> Any:
        return self._answer("cuStreamGetCtx", 1000 + self.device_of.get(stream, 0))

    def cuPointerGetAttribute(self, attribute: str, pointer: int) -> Any:
        """Addresses of device i begin at i << 40. Like the real one it answers 0 to the question for the ordinal while no context is current."""
        owner = pointer >> 40
        if attribute == "context":
            return self._answer("cuPointerGetAttribute", 0 if pointer in self.pooled else 1000 + owner)
        return self._answer("cuPointerGetAttribute", owner if self.stack else 0)

    def cuCtxGetDevice(self) -> Any:
        return self._answer("cuCtxGetDevice", self.stack[-1] - 1000)

    def cuCtxResetPersistingL2Cache(self) -> Any:
        self.calls.append("reset")
        return self._answer("cuCtxResetPersistingL2Cache")

    def cuCtxSynchronize(self) -> Any:
        return self._answer("cuCtxSynchronize")

    def cuStreamSynchronize(self, stream: int) -> Any:
        return self._answer("cuStreamSynchronize")

    def cuMemAlloc(self, size: int) -> Any:
        self.require_harmless("cuMemAlloc")
        self.allocated += 1
        return self._answer("cuMemAlloc", 1 << 40)

    def cuMemsetD8(self, pointer: int, value: int, size: int) -> Any:
        return self._answer("cuMemsetD8")

    def cuMemFree(self, pointer: int) -> Any:
        self.require_harmless("cuMemFree")
        self.allocated -= 1
        return self._answer("cuMemFree")

    def cuCtxGetLimit(self, limit: int) -> Any:
        return self._answer("cuCtxGetLimit", self.limits[self.stack[-1]])

    def cuCtxSetLimit(self, limit: int, size: int) -> Any:
        self.calls.append(f"limit {size}")
        answer = self._answer("cuCtxSetLimit")
        if answer[0] == 0:
            self.limits[self.stack[-1]] = -(-size // self.unit) * self.unit
        return answer


_NO_WINDOW = SimpleNamespace(base_ptr=0, num_bytes=0, hitRatio=0.0, hitProp=0, missProp=0)
