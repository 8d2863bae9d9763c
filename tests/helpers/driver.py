"""A driver double: remembers what it was asked, keeps a context stack per thread, and refuses what a test tells it to refuse."""

from __future__ import annotations

import ctypes
import enum
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest


class Result(enum.IntEnum):
    """The few answers that the tests need, under the driver's names."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906


class CaptureStatus(enum.IntEnum):
    CU_STREAM_CAPTURE_STATUS_NONE = 0
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1


class FakeDriver:
    """Stands in for `cuda.bindings.driver` with `devices` devices."""

    CUresult = Result
    CUstreamCaptureStatus = CaptureStatus
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=9,
        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED=14,
    )
    CUlaunchConfig = SimpleNamespace

    def __init__(self, devices: int = 1):
        self.device_count = devices
        self.capturing: set[int] = set()
        self.refuse: dict[str, Result] = {}
        self.launches: list[dict[str, Any]] = []
        self.loaded: list[bytes] = []
        self.attributes: list[tuple[int, int]] = []
        # Clusters that there is room for, and the questions for it: blocks and their threads.
        self.clusters = 7
        self.asked: list[tuple[int, int]] = []
        self._contexts = threading.local()
        # How the thread meets captures: 2 is relaxed.
        self.capture_mode = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
        """Make gpukit use this driver, with nothing loaded yet."""
        from gpukit import devices, launch

        for cached in (devices.count, devices.properties, devices.primary_context, launch._library):
            cached.cache_clear()
        monkeypatch.setattr(devices, "driver", lambda: self)
        monkeypatch.setattr(devices, "architecture", lambda device: "sm_90")
        monkeypatch.setattr(launch, "cubin", lambda *key: b"\x7fELF" + repr(key).encode())
        monkeypatch.setattr(launch, "_launch_kernel", None)
        monkeypatch.setattr(launch, "_mode", launch._Mode())
        # CuPy's binding would reach for the real driver.
        monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api.driver", None)
        for kernel in launch.kernels():
            monkeypatch.setattr(kernel, "handles", {})
            monkeypatch.setattr(kernel, "pack_into", None)
            monkeypatch.setattr(kernel, "rooms", {})
        return self

    def restore(self) -> None:
        """Forget what was cached of this driver."""
        from gpukit import devices, launch

        for cached in (devices.count, devices.properties, devices.primary_context, launch._library):
            cached.cache_clear()

    @property
    def stack(self) -> list[int]:
        """Contexts of this thread, the current one last."""
        if not hasattr(self._contexts, "stack"):
            self._contexts.stack = []
        return self._contexts.stack  # type: ignore[no-any-return]

    def _answer(self, name: str, *values: Any) -> tuple[Any, ...]:
        status = self.refuse.get(name, Result.CUDA_SUCCESS)
        return (status, *values) if status == 0 else (status, *([None] * len(values)))

    def CUfunction(self, handle: int) -> int:
        return handle

    def cuDeviceGetCount(self) -> Any:
        return self._answer("cuDeviceGetCount", self.device_count)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return self._answer("cuDeviceGet", ordinal)

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return self._answer("cuDevicePrimaryCtxRetain", 1000 + device)

    def cuCtxPushCurrent(self, context: int) -> Any:
        answer = self._answer("cuCtxPushCurrent")
        if answer[0] == 0:
            self.stack.append(context)
        return answer

    def cuCtxGetCurrent(self) -> Any:
        return self._answer("cuCtxGetCurrent", self.stack[-1] if self.stack else 0)

    def cuCtxSetCurrent(self, context: int) -> Any:
        self.stack[-1:] = [context]
        return self._answer("cuCtxSetCurrent")

    def cuCtxPopCurrent(self) -> Any:
        return self._answer("cuCtxPopCurrent", self.stack.pop())

    def cuStreamIsCapturing(self, stream: int) -> Any:
        return self._answer("cuStreamIsCapturing", CaptureStatus(int(stream in self.capturing)))

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        before, self.capture_mode = self.capture_mode, mode
        return self._answer("cuThreadExchangeStreamCaptureMode", before)

    def require_harmless(self, name: str) -> None:
        """What a real driver lets break a capture that is under way."""
        assert not self.capturing or self.capture_mode == 2, f"{name} broke a capture"

    def cuLibraryLoadData(self, code: bytes, *options: Any) -> Any:
        self.loaded.append(code)
        return self._answer("cuLibraryLoadData", code)

    def cuLibraryGetKernel(self, library: bytes, name: bytes) -> Any:
        return self._answer("cuLibraryGetKernel", 7)

    def cuKernelSetAttribute(self, attribute: int, value: int, kernel: int, device: int) -> Any:
        self.attributes.append((attribute, value))
        return self._answer("cuKernelSetAttribute")

    def cuOccupancyMaxActiveClusters(self, function: int, config: Any) -> Any:
        self.asked.append((config.gridDimX, config.blockDimX))
        return self._answer("cuOccupancyMaxActiveClusters", self.clusters)

    def cuKernelGetFunction(self, kernel: int) -> Any:
        return self._answer("cuKernelGetFunction", kernel)

    def cuFuncLoad(self, function: int) -> Any:
        return self._answer("cuFuncLoad")

    def cuLaunchKernel(self, function: Any, *rest: Any) -> Any:
        gx, gy, gz, bx, by, bz, shared, stream, addresses, extra = rest
        answer = self._answer("cuLaunchKernel")
        if answer[0] == 0:
            pointers = (ctypes.c_void_p * 40).from_address(addresses)
            values = [ctypes.c_int64.from_address(pointer).value for pointer in pointers]
            context = self.stack[-1] if self.stack else None
            self.launches.append(
                {"grid": (gx, gy, gz), "block": (bx, by, bz), "shared": shared, "stream": stream, "values": values, "context": context}
            )
        return answer
