"""gpukit: kernels for the memory and state of an LLM decode step, authored in Python GPU DSLs, and the tools to measure them.

Importing it needs no GPU, no driver and none of the GPU packages, and loads what is used when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gpukit.errors import (
    ArgumentError,
    ArgumentTypeError,
    ColdKernelError,
    CompileError,
    DeviceError,
    ForkError,
    GpukitError,
    OutOfPages,
    Signal,
    SignalError,
)

if TYPE_CHECKING:
    from gpukit import compile, decode, graphs, kernels, measure, memory
    from gpukit.compile import CompileStats, compile_stats
    from gpukit.launch import warmup

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ColdKernelError",
    "CompileError",
    "CompileStats",
    "DeviceError",
    "ForkError",
    "GpukitError",
    "OutOfPages",
    "Signal",
    "SignalError",
    "compile",
    "compile_stats",
    "decode",
    "graphs",
    "kernels",
    "measure",
    "memory",
    "warmup",
]

# Where the names live that are loaded on first use; None is a module of its own.
_LAZY = {"CompileStats": "gpukit.compile", "compile_stats": "gpukit.compile", "warmup": "gpukit.launch"} | dict.fromkeys(
    ("compile", "decode", "graphs", "kernels", "measure", "memory")
)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'gpukit' has no attribute {name!r}")
    home = _LAZY[name]
    value = importlib.import_module(f"gpukit.{name}") if home is None else getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
