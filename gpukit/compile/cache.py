"""The cubin cache: one file per key under GPUKIT_CACHE_DIR (default: the user's cache directory), written whole or not at all.

A key is the digest of everything that the machine code depends on: the sources of its language, the kernel, its types, the target, the options
and the versions of the compilers. A directory that cannot be written is not an error: kernels are then compiled in every process.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

__all__ = ["directory", "key", "load", "path", "store"]

_PACKAGE = Path(__file__).resolve().parent.parent

# What each language's machine code is made from, besides the kernel's own name.
_SOURCES = {
    "numba": ("kernels/numba/*.py", "compile/device.py", "compile/numba_dsl.py", "compile/ptxas.py"),
    "cuda": ("kernels/cuda/*.cu", "kernels/cuda/*.cuh", "compile/cuda_c.py"),
}
_TOOLCHAIN = {
    "numba": ("numba", "numba-cuda", "llvmlite", "cuda-core", "nvidia-nvvm", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink"),
    "cuda": ("cuda-core", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
}


def directory() -> Path:
    """Where cubins are kept."""
    configured = os.environ.get("GPUKIT_CACHE_DIR")
    if configured:
        return Path(configured)
    import platformdirs

    return Path(platformdirs.user_cache_dir("gpukit")) / "cubin"


@functools.cache
def _base_digest(language: str) -> str:
    # Imported here, because importing gpukit must stay quick.
    import hashlib
    from importlib import metadata

    digest = hashlib.sha256()
    for pattern in _SOURCES[language]:
        for source in sorted(_PACKAGE.glob(pattern)):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    for package in _TOOLCHAIN[language]:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "absent"
        digest.update(f"{package}={version};".encode())
    if language == "numba":
        from gpukit.compile import ptxas

        digest.update(ptxas.version().encode())
    return digest.hexdigest()


@functools.cache
def key(language: str, subject: str, name: str, variant: tuple[str, ...], arch: str) -> str:
    """File name, without ending, of a cubin."""
    import hashlib

    # A CUDA C subject is one cubin, whichever of its kernels is asked for.
    name = "" if language == "cuda" else name
    text = "\0".join((_base_digest(language), language, subject, name, ",".join(variant), arch))
    return f"{subject}-{name or 'all'}-{arch}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def load(name: str) -> bytes | None:
    """A stored cubin, None where there is none."""
    try:
        return (directory() / f"{name}.cubin").read_bytes() or None
    except OSError:
        return None


def path(name: str) -> Path | None:
    """The file of a stored cubin, None where there is none."""
    file = directory() / f"{name}.cubin"
    return file if file.exists() else None


def store(name: str, code: bytes) -> None:
    """Keep a cubin; another process reading meanwhile sees the old state or the whole new file."""
    import tempfile

    folder = directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as part:
            part.write(code)
        os.replace(part.name, folder / f"{name}.cubin")
    except OSError:
        return
