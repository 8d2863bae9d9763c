"""Workloads of `gpukit ladder run` on a GPU: an instrument's own test, a copy of about a millisecond with nothing, or with a little more, to do.

They are registered by `workloads`; everything that needs a device happens when one is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpukit import devices
from gpukit.measure.workloads import Workload, register

__all__: list[str] = []

# Bytes of one side of the copy: about a millisecond at 4.2 TB/s.
_COPY_BYTES = 2_112_000_000 // 4096 * 4096
_REPLAYS = 5


def _probes(device: int) -> dict[str, Callable[[], Any]]:
    """Where the ladder ran, and who else was there."""
    bindings = devices.driver()

    def others() -> list[str] | None:
        import shutil
        import subprocess

        if shutil.which("nvidia-smi") is None:
            return None
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader", "-i", str(device)]
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()

    return {
        "device": lambda: devices.properties(device).name,
        "driver": lambda: int(devices.call(bindings.cuDriverGetVersion(), "cuDriverGetVersion")),
        "other_processes": others,
    }


class _Copy:
    """One arm: a graph of a copy of `size` bytes, timed by events around its replays."""

    def __init__(self, source: int, target: int, size: int, stream: int):
        from gpukit.kernels import calibration
        from gpukit.measure import timing

        self._graph = timing.record(lambda: calibration.copy(source, target, size, stream), 1, stream)
        self._size = size

    def run(self) -> dict[str, Any]:
        """Seconds of the median replay, and what it copied."""
        from gpukit.measure import timing

        times = sorted(timing.replay_times(self._graph, _REPLAYS, warmup=1))
        return {"seconds": times[_REPLAYS // 2] / 1e6, "replays": _REPLAYS, "bytes": self._size}


@register("copy", "a millisecond of copying on the GPU: stock, a null arm, and one with 0.5 % more to copy")
def _copy() -> Workload:
    """The instrument's own test: the null arm must read zero, the third must read half a percent slower."""
    bindings = devices.driver()
    more = _COPY_BYTES + _COPY_BYTES // 200 // 4096 * 4096
    with devices.current(0):
        source, target = (int(devices.call(bindings.cuMemAlloc(more), "cuMemAlloc")) for _ in range(2))
        devices.call(bindings.cuMemsetD32(source, 0x5A3C96E1, more // 4), "cuMemsetD32")
    stream = devices.create_stream(0)
    sizes = {"stock": _COPY_BYTES, "null": _COPY_BYTES, "slower": more}
    return Workload(
        arms={name: _Copy(source, target, size, stream) for name, size in sizes.items()},
        cell=lambda run: run(),
        null="null",
        counters=("replays",),
        geometry=("bytes",),
        probes=_probes(0),
    )
