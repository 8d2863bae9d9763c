"""Source to cubin, for both languages: compiled once per kernel, type variant and architecture, kept on disk, never touching a tensor.

`cubin` is all that `launch` needs. It asks the disk cache first, so a second process compiles nothing and does not even import the
compilers. Nothing here needs a device or a driver; the compile gate of the tests runs the very same code.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any

from gpukit.compile import cache

__all__ = ["CompileStats", "compile_stats", "cubin", "raw_module"]


@dataclass
class CompileStats:
    """What this process did to get its kernels.

    Attributes
    ----------
    compiled : int
        Cubins compiled from source.
    cached : int
        Cubins read from the disk cache.
    loaded : int
        Kernel variants loaded into a device's context.
    """

    compiled: int = 0
    cached: int = 0
    loaded: int = 0


_stats = CompileStats()
_lock = threading.RLock()


def compile_stats() -> CompileStats:
    """A copy of the counts so far.

    Examples
    --------
    >>> before = compile_stats().compiled
    >>> compile_stats().compiled - before
    0
    """
    return CompileStats(**asdict(_stats))


def count_loaded() -> None:
    """Note that a kernel variant was loaded into a context."""
    with _lock:
        _stats.loaded += 1


def cubin(language: str, subject: str, name: str, variant: tuple[str, ...], arch: str) -> bytes:
    """The cubin that holds a kernel.

    Parameters
    ----------
    language : {"numba", "cuda"}
        Which of `kernels/numba/<subject>.py` and `kernels/cuda/<subject>.cu` holds the kernel.
    subject, name : str
        File and kernel. A CUDA C subject is one cubin with all its kernels; a Numba kernel is a cubin of its own.
    variant : tuple of str
        dtype names bound to the kernel's type variables, in their order; empty for CUDA C.
    arch : str
        Target, like ``sm_90``.

    Raises
    ------
    CompileError
        The source does not compile, or the compiler is not installed.
    """
    key = cache.key(language, subject, name, variant, arch)
    with _lock:
        stored = cache.load(key)
        if stored is not None:
            _stats.cached += 1
            return stored
        if language == "numba":
            from gpukit.compile.numba_dsl import compile_kernel

            code = compile_kernel(subject, name, variant, arch)
        else:
            from gpukit.compile.cuda_c import compile_subject

            code = compile_subject(subject, arch)
        _stats.compiled += 1
        cache.store(key, code)
        return code


def raw_module(subject: str, device: int = 0) -> Any:
    """A CUDA C subject as a plain `cupy.RawModule`, from the same cubin that gpukit launches; for notebooks.

    Its kernels take every argument as 8 bytes: addresses and integers as `numpy.int64`.

    Raises
    ------
    DeviceError
        No driver, no device, or CuPy is not installed.
    """
    from gpukit import devices
    from gpukit.errors import DeviceError

    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"raw_module needs CuPy ({error}); install gpukit with the extra cu13 or cu12") from None

    arch = devices.architecture(device)
    key = cache.key("cuda", subject, "", (), arch)
    cubin("cuda", subject, "", (), arch)
    path = cache.path(key)
    if path is None:
        from gpukit.errors import CompileError

        raise CompileError("raw_module: expected a writable cache directory (GPUKIT_CACHE_DIR), got none")
    return cupy.RawModule(path=str(path))
