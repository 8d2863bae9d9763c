"""gpukit: memory, state and MoE kernels of an LLM decode step, authored in Python GPU DSLs.

Importing it needs no GPU, no driver and none of the GPU packages.
"""

from gpukit import kernels
from gpukit.compile import CompileStats, compile_stats
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
    "compile_stats",
    "kernels",
    "warmup",
]
