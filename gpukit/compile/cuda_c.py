"""CUDA C by NVRTC: `kernels/cuda/<subject>.cu` to a cubin with one fixed option tuple. Works without a device or a driver."""

from __future__ import annotations

import io
from pathlib import Path

from gpukit.errors import CompileError

__all__ = ["compile_subject", "compile_text", "source_path"]

_FOLDER = Path(__file__).resolve().parent.parent / "kernels" / "cuda"


def source_path(subject: str) -> Path:
    """The .cu file of a subject."""
    return _FOLDER / f"{subject}.cu"


def _include_directories() -> list[str]:
    # NVRTC finds cuda_bf16.h only when told where the runtime's headers are.
    from cuda import pathfinder

    found = (pathfinder.locate_nvidia_header_directory(name) for name in ("cudart", "cccl"))
    paths = [str(_FOLDER)]
    for header in found:
        path = getattr(header, "abs_path", header)
        if path:
            paths.append(str(path))
    return paths


# What only this architecture has is in the target of its own name.
_TARGETS = {"sm_90": "sm_90a"}


def compile_subject(subject: str, arch: str) -> bytes:
    """Compile a subject's file.

    Raises
    ------
    CompileError
        With the compiler's log, or naming the extra to install.
    """
    file = source_path(subject)
    return compile_text(file.read_text(), file.name, arch)


def compile_text(source: str, name: str, arch: str) -> bytes:
    """Compile a text, which may include the headers of the subjects.

    Raises
    ------
    CompileError
        With the compiler's log, or naming the extra to install.
    """
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise CompileError(f"NVRTC is not installed ({error}); install gpukit with the extra cu13 or cu12") from None
    # Contraction is left on; where bits matter the sources say fmaf themselves. Denormals, division and square roots are IEEE.
    options = ProgramOptions(arch=_TARGETS.get(arch, arch), std="c++17", include_path=_include_directories(), name=name)
    log = io.StringIO()
    try:
        return bytes(Program(source, code_type="c++", options=options).compile("cubin", logs=log).code)
    except Exception as error:
        raise CompileError(f"{name} does not compile for {arch}: {error}\n{log.getvalue()}") from error
