"""The ceilings of a device, measured on the card at hand: what memory, caches, graph nodes and launches can do at best.

Every figure comes from two runs that must agree (bandwidths within 0.5 %, host costs within 5 %); a pair that does not is reported as such. The
result is kept per device and driver in the cache directory, because floors are asked for more often than they change.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from gpukit import devices
from gpukit.compile import cache
from gpukit.kernels import calibration
from gpukit.measure import timing

__all__ = ["Ceiling", "Ceilings", "ceilings", "measure"]

_BYTES = 8 << 30
# Of the L2, so that neither of its halves overflows.
_L2_SHARE = 4

# A host's cost is the best of so many tries: what else the host does, and on which core, only ever adds.
_HOST_TRIES = 7
_C_LAUNCH = r"""
#include <chrono>
#include <cstdio>
#include <algorithm>
#include <vector>
__global__ void kernel(void*, void*, void*, long long, long long) {}
int main() {
    std::vector<double> samples;
    cudaStream_t stream;
    if (cudaStreamCreate(&stream) != cudaSuccess) return 1;
    for (int round = 0; round < 120; ++round) {
        cudaStreamSynchronize(stream);
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < 200; ++i) kernel<<<1, 64, 0, stream>>>(nullptr, nullptr, nullptr, 1, 2);
        samples.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / 200);
    }
    std::sort(samples.begin(), samples.end());
    // A low quantile: what the host does besides only ever adds.
    std::printf("%f\n", samples[30]);
    return cudaDeviceSynchronize() != cudaSuccess;
}
"""


@dataclass(frozen=True)
class Ceiling:
    """One figure, measured twice.

    Attributes
    ----------
    value : float
        Mean of the two runs.
    unit : {"GB/s", "us"}
    runs : tuple of float
        Both runs.
    tolerance : float
        Largest relative difference at which the runs agree.
    how : str
        What was run.
    """

    value: float
    unit: str
    runs: tuple[float, float]
    tolerance: float
    how: str

    @property
    def difference(self) -> float:
        """Relative difference of the runs."""
        return abs(self.runs[0] - self.runs[1]) / self.value

    @property
    def agrees(self) -> bool:
        """Whether the runs agree.

        Examples
        --------
        >>> Ceiling(100.0, "GB/s", (99.9, 100.1), 0.005, "copy").agrees
        True
        """
        return self.difference <= self.tolerance


@dataclass(frozen=True)
class Ceilings:
    """The ceilings of one device. GB/s count bytes read plus bytes written, 10⁹ each."""

    device: str
    driver: str
    dram_copy: Ceiling
    dram_read: Ceiling
    l2_read: Ceiling
    graph_node: Ceiling
    host_launch: Ceiling
    c_launch: Ceiling | None

    def rows(self) -> list[tuple[str, Ceiling]]:
        """Name and figure, in the order of the table."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [(name, value) for name, value in pairs if isinstance(value, Ceiling)]


def _twice(run: Callable[[], float], unit: str, tolerance: float, how: str) -> Ceiling:
    first, second = run(), run()
    return Ceiling((first + second) / 2, unit, (first, second), tolerance, how)


def _twice_best(run: Callable[[], float], how: str) -> Ceiling:
    """Two host costs, each the best of several tries that take turns: what slows a host down for a while meets both."""
    samples = [run() for _ in range(2 * _HOST_TRIES)]
    first, second = min(samples[::2]), min(samples[1::2])
    return Ceiling((first + second) / 2, "us", (first, second), 0.05, how)


def _bandwidth(device: int, moved: int, nodes: int, call: Callable[[int], None]) -> Callable[[], float]:
    def run() -> float:
        with timing.own_stream(device) as stream:
            took = timing.device_time(lambda: call(stream), nodes=nodes, rounds=41, stream=stream, device=device).samples
        # The best replay: interference only ever lowers a bandwidth.
        return moved / min(took) / 1e3

    return run


def _c_launch() -> Ceiling | None:
    """Host cost of a launch from C, where nvcc is there; None otherwise."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "launch.cu", Path(folder) / "launch"
        source.write_text(_C_LAUNCH)
        built = subprocess.run([compiler, "-O2", "-arch=native", "-o", str(program), str(source)], capture_output=True)
        if built.returncode:
            return None

        def run() -> float:
            return float(subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout)

        try:
            return _twice_best(run, "kernel<<<>>> from C, five arguments")
        except subprocess.CalledProcessError:
            return None


def _prepacked_launch(device: int) -> float:
    with timing.own_stream(device) as stream:
        return timing.host_time(calibration.prepare_empty(stream, device), device=device, rounds=21).median


def measure(device: int = 0) -> Ceilings:
    """Measure every ceiling of a device, each twice. Takes a few seconds and 16 GiB of device memory, or an eighth of it if that is less."""
    properties = devices.properties(device)
    bindings = devices.driver()
    size = min(_BYTES, properties.memory // 16) // 4096 * 4096
    with devices.current(device):
        source, target = (int(devices.call(bindings.cuMemAlloc(size), "cuMemAlloc")) for _ in range(2))
        for buffer in (source, target):
            # Not zeros: they can read and write faster than data does.
            devices.call(bindings.cuMemsetD32(buffer, 0x5A3C96E1, size // 4), "cuMemsetD32")
    l2_bytes = properties.l2 // _L2_SHARE // 4096 * 4096
    try:
        copy = _bandwidth(device, 2 * size, 2, lambda stream: calibration.copy(source, target, size, stream, device))
        read = _bandwidth(device, size, 2, lambda stream: calibration.read(source, size, target, stream, device))
        cached = _bandwidth(device, l2_bytes * 200, 2, lambda stream: calibration.read(source, l2_bytes, target, stream, device, passes=200))
        return Ceilings(
            device=properties.name,
            driver=str(devices.call(bindings.cuDriverGetVersion(), "cuDriverGetVersion")),
            dram_copy=_twice(copy, "GB/s", 0.005, f"copy kernel over {size >> 20} MiB, read + written"),
            dram_read=_twice(read, "GB/s", 0.005, f"read kernel over {size >> 20} MiB"),
            l2_read=_twice(cached, "GB/s", 0.005, f"read kernel over {l2_bytes >> 20} MiB, 200 passes, past the L1"),
            graph_node=_twice(lambda: timing.empty_node_time(device).median, "us", 0.05, "empty kernel in a graph of 256"),
            host_launch=_twice_best(lambda: _prepacked_launch(device), "cuLaunchKernel from Python, arguments packed beforehand"),
            c_launch=_c_launch(),
        )
    finally:
        with devices.current(device):
            for buffer in (source, target):
                bindings.cuMemFree(buffer)


def _file(device: int) -> Path:
    bindings = devices.driver()
    driver = devices.call(bindings.cuDriverGetVersion(), "cuDriverGetVersion")
    name = "".join(letter if letter.isalnum() else "-" for letter in devices.properties(device).name)
    return cache.directory().parent / f"ceilings-{name}-{driver}.json"


def to_json(found: Ceilings) -> str:
    """As kept on disk."""
    return json.dumps(asdict(found), indent=2)


def from_json(text: str) -> Ceilings:
    """Back from `to_json`.

    Examples
    --------
    >>> one = Ceiling(1.0, "us", (1.0, 1.0), 0.05, "test")
    >>> kept = Ceilings("a device", "13000", one, one, one, one, one, None)
    >>> from_json(to_json(kept)) == kept
    True
    """
    raw = json.loads(text)
    for name, value in raw.items():
        if isinstance(value, dict):
            raw[name] = Ceiling(**value | {"runs": tuple(value["runs"])})
    return Ceilings(**raw)


def ceilings(device: int = 0, *, refresh: bool = False) -> Ceilings:
    """The kept ceilings of a device, measured first if there are none or `refresh` is set.

    Raises
    ------
    DeviceError
        No driver, no device or no GPU stack.
    """
    file = _file(device)
    if not refresh:
        try:
            return from_json(file.read_text())
        except (OSError, TypeError, ValueError):
            pass
    found = measure(device)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(to_json(found))
    except OSError:
        pass
    return found
