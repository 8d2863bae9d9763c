"""Numba-CUDA by pointer signatures: a kernel of `kernels/numba/<subject>.py` to a cubin. Works without a device or a driver.

A kernel declares its parameters in words (``"id*"``, ``"int64"``); names that are no dtype are type variables, bound by the variant. Pointers
carry no layout, alignment or read-only flag, so there is nothing to specialise on: one binary per kernel, variant and architecture.
"""

from __future__ import annotations

import importlib
import re
import types as python_types
from collections.abc import Callable
from typing import Any

from gpukit.compile import ptxas
from gpukit.errors import CompileError

try:
    from gpukit.compile import device
except ImportError as error:
    raise CompileError(f"Numba-CUDA is not installed ({error}); install gpukit with the extra cu13 or cu12") from None

__all__ = ["KernelSource", "compile_kernel", "kernel_source", "to_ptx"]

KernelSource = device.KernelSource


def kernel_source(subject: str, name: str) -> device.KernelSource:
    """The declared kernel `name` of `kernels/numba/<subject>.py`."""
    source = getattr(importlib.import_module(f"gpukit.kernels.numba.{subject}"), name)
    assert isinstance(source, device.KernelSource)
    return source


def _signature(source: device.KernelSource, variant: tuple[str, ...]) -> Any:
    from numba import types

    bound = dict(zip(source.type_variables, variant, strict=True))

    def resolve(text: str) -> Any:
        base = getattr(types, bound.get(text.rstrip("*"), text.rstrip("*")))
        return types.CPointer(base) if text.endswith("*") else base

    return types.void(*(resolve(text) for text in source.parameters.values()))


def to_ptx(source: device.KernelSource, variant: tuple[str, ...], arch: str) -> str:
    """PTX of a kernel, its entry renamed to ``gpukit_<name>``."""
    from numba import cuda
    from numba.cuda import dispatcher

    digits = re.sub(r"\D", "", arch)
    capability = (int(digits[:-1]), int(digits[-1]))
    # Device functions ask for the current device, even when an architecture is given; the compiler has none and needs none.
    stand_in: Callable[[], Any] = lambda: python_types.SimpleNamespace(compute_capability=capability)  # noqa: E731
    original = dispatcher.get_current_device
    dispatcher.get_current_device = stand_in
    try:
        # Overloads of device functions are kept per types, not per architecture.
        for function in device.device_functions:
            function.overloads.clear()
        ptx, _ = cuda.compile(source.function, _signature(source, variant), device=False, abi="numba", cc=capability, output="ptx", opt=True)
    except Exception as error:
        raise CompileError(f"kernel {source.function.__name__}{list(variant)} does not compile for {arch}: {error}") from error
    finally:
        dispatcher.get_current_device = original
    # Numba's entry names hold a per-process counter.
    entries = re.findall(r"\.visible \.entry (\w+)\(", ptx)
    if len(entries) != 1:
        raise CompileError(f"kernel {source.function.__name__}: expected one entry in its PTX, got {entries}")
    return str(ptx).replace(entries[0], f"gpukit_{source.function.__name__}")


def compile_kernel(subject: str, name: str, variant: tuple[str, ...], arch: str) -> bytes:
    """Compile one kernel variant.

    Raises
    ------
    CompileError
        With the compiler's message.
    """
    return ptxas.assemble(to_ptx(kernel_source(subject, name), variant, arch), arch)
