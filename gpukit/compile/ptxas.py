"""PTX to cubin by ptxas, the whole program at once.

The linker library (nvJitLink) assembles PTX as if it were a part of something larger: 64-bit divisions stay calls, and kernels that divide need a
fifth more registers. ptxas comes with the extras (nvidia-cuda-nvcc) and with every CUDA toolkit; where there is neither, the linker library does it.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

from gpukit.errors import CompileError

__all__ = ["assemble", "version"]


@functools.cache
def _program() -> str | None:
    """The ptxas of the pinned package, or else one on the path."""
    package = find_spec("nvidia")
    for root in package.submodule_search_locations or () if package else ():
        for found in sorted(Path(root).glob("*/bin/ptxas")):
            if os.access(found, os.X_OK):
                return str(found)
    return shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")


@functools.cache
def version() -> str:
    """What assembles: the release of ptxas, or the linker library."""
    program = _program()
    if program is None:
        return "nvjitlink"
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[-1].strip()


def assemble(ptx: str, arch: str) -> bytes:
    """A cubin.

    Raises
    ------
    CompileError
        With the assembler's message.
    """
    program = _program()
    if program is None:
        return _assemble_by_linker(ptx, arch)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        done = subprocess.run([program, f"-arch={arch}", "-O3", str(source), "-o", str(target)], capture_output=True, text=True)
        if done.returncode:
            raise CompileError(f"ptxas refused the PTX for {arch}: {done.stdout}{done.stderr}")
        return target.read_bytes()


def _assemble_by_linker(ptx: str, arch: str) -> bytes:
    from cuda.core import Program, ProgramOptions

    try:
        return bytes(Program(ptx, code_type="ptx", options=ProgramOptions(arch=arch)).compile("cubin").code)
    except Exception as error:
        raise CompileError(f"the linker library refused the PTX for {arch}: {error}") from error
