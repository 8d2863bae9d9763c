"""What a replay can be told: one dataclass, checked where it is made. Reading the command line is `gpukit.cli`'s business."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpukit.errors import ArgumentError, ArgumentTypeError

__all__ = ["BACKENDS", "MEMORIES", "DecodeOptions"]

BACKENDS = ("auto", "numpy", "gpu")
MEMORIES = ("unified", "split")
GENERATED_REQUESTS = 1500
# Bounds that keep a slip of the keyboard from filling the machine's memory; far above what engines use.
LARGEST = {"page_size": 2**16, "batch": 2**16, "pages": 2**24, "swa_pages": 2**24, "full_layers": 2**10, "swa_layers": 2**10}
LARGEST_OTHER = 2**31 - 1


@dataclass(frozen=True)
class DecodeOptions:
    """Options of `gpukit.decode.run`.

    Attributes
    ----------
    trace : path, optional
        CSV file with the columns TIMESTAMP, ContextTokens, GeneratedTokens. None draws a trace from `seed`.
    requests : int, optional
        Requests to replay. None: all of the file, or 1,500 drawn ones.
    seed : int
        Seed of the drawn trace and of the order in which split pools hand out their pages.
    memory : str
        "unified": one buffer for both kinds of pages, and rounds of the decode step. "split": a pool for each kind, and rounds of single ops.
    page_size : int
        Tokens per page.
    window : int
        Sliding-attention window in tokens: what stays readable in the SWA pool behind the end of a request.
    batch : int
        Most requests that run at once.
    pages, swa_pages : int
        Pages of the FULL and of the SWA pool, the sinks not counted. There are as many virtual pages as FULL ones. Unified memory has the bytes
        of such a split, and is compared with it.
    full_layers, swa_layers : int
        Layers with full and with sliding-window attention: how many bytes a page of each kind takes.
    rounds : int, optional
        Stop after this many rounds.
    backend : str
        "numpy", "gpu", or "auto": the GPU where there is one, else NumPy.
    check_every : int
        Locations and page counts are checked every round, tables and owners every this many rounds. 0 checks nothing.
    debug_mirror : bool
        Compare the host's mirror of unified memory with the device after every round, which then waits for it.
    """

    trace: str | Path | None = None
    requests: int | None = None
    seed: int = 0
    page_size: int = 64
    window: int = 512
    batch: int = 128
    memory: str = "unified"
    pages: int = 2048
    swa_pages: int = 1024
    full_layers: int = 10
    swa_layers: int = 50
    rounds: int | None = None
    backend: str = "auto"
    check_every: int = 16
    debug_mirror: bool = False

    def __post_init__(self) -> None:
        for name in ("page_size", "window", "batch", "pages", "swa_pages", "full_layers", "swa_layers"):
            _whole(name, getattr(self, name), 1)
        for name in ("seed", "check_every"):
            _whole(name, getattr(self, name), 0)
        for name in ("requests", "rounds"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        for name, known in (("backend", BACKENDS), ("memory", MEMORIES)):
            if getattr(self, name) not in known:
                raise ArgumentError(f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.debug_mirror and self.memory != "unified":
            raise ArgumentError(f"debug_mirror: expected unified memory, of which the host keeps a mirror, got {self.memory}")


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}: expected a whole number, got {value!r}")
    largest = LARGEST.get(name, LARGEST_OTHER)
    if not least <= value <= largest:
        raise ArgumentError(f"{name}: expected a number from {least} to {largest}, got {value}")
