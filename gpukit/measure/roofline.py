"""How close kernels come to the card's ceilings: bytes and time of each, its rate, and its share of DRAM copy, DRAM read and L2 read.

Bytes are counted as the kernel must move them, read plus written; nothing here reads a hardware counter or runs a kernel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gpukit.errors import ArgumentError
from gpukit.measure.tables import csv_text

if TYPE_CHECKING:
    from rich.console import Console

    from gpukit.measure.ceilings import Ceilings

__all__ = ["CEILINGS", "KernelTraffic", "Roofline", "RooflineRow"]

CEILINGS = {"dram_copy": "DRAM copy", "dram_read": "DRAM read", "l2_read": "L2 read"}


@dataclass(frozen=True)
class KernelTraffic:
    """What one kernel moved, per launch.

    Attributes
    ----------
    name : str
    bytes_read, bytes_written : int
        Bytes per launch, each from 0, together above 0.
    median_us : float
        Median device time of a launch, µs.
    launches : int
        How often it ran.
    """

    name: str
    bytes_read: int
    bytes_written: int
    median_us: float
    launches: int = 1

    def __post_init__(self) -> None:
        if self.bytes_read < 0 or self.bytes_written < 0 or self.bytes_read + self.bytes_written <= 0:
            raise ArgumentError(f"bytes_read, bytes_written: expected bytes moved by {self.name}, got {self.bytes_read} and {self.bytes_written}")
        if not (math.isfinite(self.median_us) and self.median_us > 0):
            raise ArgumentError(f"median_us: expected a time above 0 for {self.name}, got {self.median_us!r}")
        if self.launches < 1:
            raise ArgumentError(f"launches: expected at least 1 of {self.name}, got {self.launches!r}")

    @property
    def bytes_moved(self) -> int:
        """Read plus written, per launch."""
        return self.bytes_read + self.bytes_written

    @property
    def gb_per_s(self) -> float:
        """Achieved rate, 10⁹ bytes a second."""
        return self.bytes_moved / self.median_us / 1e3


@dataclass(frozen=True)
class RooflineRow:
    """One kernel beside the ceilings.

    Attributes
    ----------
    name, launches, median_us
        As given.
    bytes_moved : int
        Read plus written, per launch.
    gb_per_s : float
        Achieved rate.
    shares : dict
        Rate by ceiling, for each ceiling that is known.
    evidence : str
        What a rate above a medium's ceiling says; empty for none.
    """

    name: str
    launches: int
    bytes_moved: int
    median_us: float
    gb_per_s: float
    shares: dict[str, float]
    evidence: str


@dataclass(frozen=True)
class Roofline:
    """Kernels beside the ceilings, slowest in all first. `ceilings` holds GB/s by name."""

    rows: tuple[RooflineRow, ...]
    ceilings: dict[str, float]

    @classmethod
    def of(cls, kernels: Iterable[KernelTraffic], ceilings: Mapping[str, float] | Ceilings) -> Roofline:
        """Set kernels beside the ceilings.

        Parameters
        ----------
        kernels : iterable of KernelTraffic
        ceilings : Ceilings or mapping of str to float
            What `gpukit.measure.ceilings` measured, or GB/s (read plus written) under some of ``dram_copy``, ``dram_read``, ``l2_read``.

        Returns
        -------
        Roofline
            A rate above what a medium can do is named as evidence that another medium carries the difference. What DRAM can do is the copy
            ceiling for bytes that are read and written, and the read ceiling for the rest.

        Raises
        ------
        ArgumentError
            No ceiling, or one that is unknown or not above 0.

        Examples
        --------
        >>> moved = 30 * (49_152 + 2_097_152)
        >>> table = Roofline.of([KernelTraffic("page copy", moved, moved, median_us=54.944)], {"dram_copy": 1503.4})
        >>> print(f"{table.rows[0].gb_per_s:.1f} GB/s")
        2343.8 GB/s
        >>> print(table.rows[0].evidence)
        1.56 × what DRAM can do (1,503.4 GB/s): another medium carries the difference
        """
        known = _known(ceilings)
        ordered = sorted(kernels, key=lambda kernel: -kernel.launches * kernel.median_us)
        return cls(tuple(_row(kernel, known) for kernel in ordered), known)

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain types."""
        return asdict(self)

    def to_json(self) -> str:
        """Everything as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def to_csv(self) -> str:
        """The rows as CSV text."""
        names = ("name", "launches", "bytes_moved", "median_us", "gb_per_s")
        rows = [[getattr(row, name) for name in names] + [row.shares.get(ceiling) for ceiling in CEILINGS] + [row.evidence] for row in self.rows]
        return csv_text((*names, *(f"share_of_{ceiling}" for ceiling in CEILINGS), "evidence"), rows)

    def print(self, console: Console) -> None:
        """Print the table."""
        from gpukit.measure import tables

        tables.print_roofline(self, console)


def _known(ceilings: Mapping[str, float] | Ceilings) -> dict[str, float]:
    given = dict(ceilings) if isinstance(ceilings, Mapping) else {name: getattr(ceilings, name).value for name in CEILINGS}
    if not given or not set(given) <= set(CEILINGS):
        raise ArgumentError(f"ceilings: expected some of {', '.join(CEILINGS)}, got {', '.join(map(str, given)) or 'none'}")
    for name, value in given.items():
        if not (math.isfinite(value) and value > 0):
            raise ArgumentError(f"ceilings: expected GB/s above 0 for {name}, got {value!r}")
    return {name: float(given[name]) for name in CEILINGS if name in given}


def _row(kernel: KernelTraffic, ceilings: dict[str, float]) -> RooflineRow:
    rate = kernel.gb_per_s
    media = {"DRAM": _dram(kernel, ceilings), "L2": ceilings.get("l2_read")}
    exceeded = [f"{rate / able:.2f} × what {medium} can do ({able:,.1f} GB/s)" for medium, able in media.items() if able is not None and rate > able]
    evidence = " and ".join(exceeded) + ": another medium carries the difference" if exceeded else ""
    shares = {name: rate / ceiling for name, ceiling in ceilings.items()}
    return RooflineRow(kernel.name, kernel.launches, kernel.bytes_moved, kernel.median_us, rate, shares, evidence)


def _dram(kernel: KernelTraffic, ceilings: dict[str, float]) -> float | None:
    """What DRAM can do for a kernel's mix of reads and writes: copies what it can pair, and moves the rest at the rate of reads."""
    copy, read = (ceilings.get(name) for name in ("dram_copy", "dram_read"))
    if copy is None or read is None:
        return copy or read
    paired = 2 * min(kernel.bytes_read, kernel.bytes_written)
    return kernel.bytes_moved / (paired / copy + (kernel.bytes_moved - paired) / read)
