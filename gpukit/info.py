"""The environment report of `gpukit info`: interpreter, packages, driver, devices, caches. It reads and changes nothing.

Every probe is guarded: what cannot be found out is reported as the reason why. No GPU library is imported but cuda.bindings, and that
only where there is a driver, so the report works on the base install.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["PACKAGES", "collect", "print_report"]

# What decides how gpukit behaves: itself, the base, the GPU stacks, and the array libraries it may be handed.
PACKAGES = (
    *("gpukit", "numpy", "ml-dtypes", "typer", "rich", "platformdirs", "matplotlib"),
    *("cuda-core", "cuda-bindings", "cuda-pathfinder", "cuda-toolkit", "numba", "numba-cuda", "llvmlite"),
    *("cupy-cuda13x", "cupy-cuda12x", "cupy", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-nvjitlink", "nvidia-nvjitlink-cu12"),
    *("torch", "triton", "jax"),
)


def collect() -> dict[str, Any]:
    """The report in plain types.

    Returns
    -------
    dict
        ``python``, ``platform``, ``packages`` (version or None), ``driver``, ``devices`` (a list) and ``cache``. A section that could
        not be read is ``{"error": reason}``.

    Examples
    --------
    >>> sorted(collect())
    ['cache', 'devices', 'driver', 'packages', 'platform', 'python']
    """
    sections: dict[str, Any] = {
        "python": _guarded(_python),
        "platform": _guarded(_platform),
        "packages": {name: _guarded(partial(_version, name)) for name in PACKAGES},
        "driver": _guarded(_driver),
        "cache": _guarded(_cache),
    }
    # After a failed initialisation the next driver call can hang, so there is none.
    missing = sections["driver"].get("error")
    sections["devices"] = _guarded(_devices) if missing is None else {"error": missing}
    return sections


def _guarded(probe: Callable[[], Any]) -> Any:
    """What the probe found, or why it found nothing."""
    try:
        return probe()
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


def _python() -> dict[str, str]:
    return {"version": platform.python_version(), "implementation": platform.python_implementation(), "executable": sys.executable}


def _platform() -> dict[str, Any]:
    return {"system": platform.platform(), "machine": platform.machine(), "cpus": os.cpu_count()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> dict[str, Any]:
    """The CUDA version the driver supports, and its own version where the kernel module tells."""
    from gpukit import devices

    bindings = devices.driver()
    version = int(devices.call(bindings.cuDriverGetVersion(), "cuDriverGetVersion"))
    return {"cuda": f"{version // 1000}.{version % 1000 // 10}", "kernel_module": _guarded(_kernel_module)}


def _kernel_module() -> str:
    with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
        return file.readline().strip()


def _devices() -> list[Any]:
    """Properties of every device; one that cannot be read does not hide the others."""
    from gpukit import devices

    return [_guarded(partial(_device, ordinal)) for ordinal in range(devices.count())]


def _device(ordinal: int) -> dict[str, Any]:
    from gpukit import devices

    return asdict(devices.properties(ordinal))


def _cache() -> dict[str, Any]:
    """Where cubins are kept, how many there are and how large they are together."""
    from gpukit.compile import cache

    folder = cache.directory()
    sizes = [file.stat().st_size for file in folder.glob("*.cubin")]
    return {"directory": str(folder), "cubins": len(sizes), "bytes": sum(sizes)}


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as a table; packages that are not installed are left out."""
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for section, content in report.items():
        table.add_section()
        for name, value in _lines(section, content):
            table.add_row(name, value)
    console.print(table)


def _lines(section: str, content: Any) -> list[tuple[str, str]]:
    """Pairs of name and text for one section of the table."""
    if isinstance(content, list):
        if not content:
            return [(section, "none")]
        return [line for ordinal, entry in enumerate(content) for line in _lines(f"device {ordinal}", entry)]
    if "error" in content:
        return [(section, f"not available: {content['error']}")]
    return [(f"{section} {name}", _text(name, value)) for name, value in content.items() if value is not None]


def _text(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"not available: {value['error']}"
    if name == "compute_capability":
        return ".".join(str(part) for part in value)
    return f"{value:,}" if isinstance(value, int) else str(value)
