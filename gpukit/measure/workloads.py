"""The workloads of `gpukit ladder run`, by name. Each builds its arms only when it is asked for; running and judging them is the ladder's job.

A new workload is a function that returns a `Workload`, registered under a name::

    @register("name", "one line for the list")
    def build() -> Workload: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpukit.measure.ladder import Ladder, Measure, wall_seconds
from gpukit.measure.provenance import Probe
from gpukit.registry import Registry

__all__ = ["WORKLOADS", "Workload", "build", "register", "summaries"]


@dataclass(frozen=True)
class Workload:
    """What a ladder needs of a workload, see `Ladder`; `probes` say how to find its device."""

    arms: Mapping[str, Any]
    cell: Measure = wall_seconds
    base: str | None = None
    null: str | None = None
    structural_zero: str | None = None
    metrics: tuple[str, ...] = ("seconds",)
    higher_is_better: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    geometry: tuple[str, ...] = ()
    probes: Mapping[str, Probe] = field(default_factory=dict)

    def ladder(self, **options: Any) -> Ladder:
        """A ladder of it; `options` are the passes, limits and tag of `Ladder`."""
        roles: dict[str, Any] = {"base": self.base, "null": self.null, "structural_zero": self.structural_zero}
        columns: dict[str, Any] = {name: getattr(self, name) for name in ("metrics", "higher_is_better", "counters", "geometry")}
        return Ladder(self.arms, self.cell, **roles, **columns, **options)


WORKLOADS: Registry[[], Workload] = Registry("workload", elsewhere=("gpukit.measure.device_workloads",))
register, summaries, build = WORKLOADS.register, WORKLOADS.summaries, WORKLOADS.build


@register("translate", "page-table translation in NumPy, with and without the table read beforehand")
def _translate() -> Workload:
    """Reading the table first may bring it nearer; reading a table of that size that nothing translates by must not."""
    from gpukit.kernels.reference import page_table

    pages, page_size = 1 << 15, 64
    generator = np.random.default_rng(0)
    v2p, p2v = page_table.empty(pages)
    page_table.bind(np.arange(1, pages), generator.permutation(np.arange(1, pages)), v2p, p2v)
    ids = generator.integers(page_size, pages * page_size, size=1 << 17)
    nothing, elsewhere = v2p[:0], v2p.copy()

    def arm(touched: Any) -> Callable[[], Any]:
        def run() -> dict[str, int]:
            if touched is not None:
                touched.sum()
            located = page_table.translate(ids, v2p, page_size)
            return {"located": int(np.count_nonzero(located)), "touched_bytes": 0 if touched is None else touched.nbytes}

        return run

    def cell(run: Callable[[], Any]) -> dict[str, Any]:
        seen: dict[str, int] = {}
        return {**wall_seconds(lambda: seen.update(run())), **seen}

    return Workload(
        arms={"stock": arm(None), "armed": arm(nothing), "table": arm(v2p), "elsewhere": arm(elsewhere)},
        cell=cell,
        null="armed",
        structural_zero="elsewhere",
        counters=("located",),
        geometry=("touched_bytes",),
    )
