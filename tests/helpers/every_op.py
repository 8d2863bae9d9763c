"""One small call of every public op, for properties that must hold for all of them: capture, prepared calls, no waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpukit.kernels import page_table
from gpukit.kernels.free_list import DevicePages

Make = Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class OpCase:
    """An op, the NumPy arrays of a small call, and how they are passed; `pages` names DevicePages to make beside them."""

    name: str
    op: Any
    values: dict[str, np.ndarray]
    call: Callable[[dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    pages: dict[str, int] = field(default_factory=dict)

    def make(self, make: Make) -> dict[str, Any]:
        """Fresh arguments in a library."""
        made = {name: make(value) for name, value in self.values.items()}
        like = next(iter(made.values()))
        return made | {name: DevicePages(capacity, like=like) for name, capacity in self.pages.items()}

    def run(self, made: dict[str, Any]) -> Any:
        args, kwargs = self.call(made)
        return self.op(*args, **kwargs)

    def prepare(self, made: dict[str, Any]) -> Any:
        args, kwargs = self.call(made)
        return self.op.prepare(*args, **kwargs) if hasattr(self.op, "prepare") else None

    def arrays(self, made: dict[str, Any]) -> dict[str, Any]:
        """Everything that the op may have written, by name."""
        found = {name: made[name] for name in self.values}
        for name in self.pages:
            found |= {f"{name}.ring": made[name].ring, f"{name}.counters": made[name].counters}
        return found


def _tables(pages: int = 600) -> dict[str, np.ndarray]:
    v2p, p2v = page_table.empty(pages)
    virtual, physical = np.arange(1, pages // 2), np.arange(pages // 2 + 1, pages)
    page_table.bind(virtual, physical, v2p, p2v)
    return {"v2p": v2p, "p2v": p2v}


def page_table_ops() -> list[OpCase]:
    ids, fresh, taken = np.arange(1, 301), np.arange(300, 590), np.arange(1, 291)
    zeros = np.zeros(600, np.int64)
    return [
        OpCase("bind", page_table.bind, {"v": fresh, "p": taken, **_tables()}, lambda a: ((a["v"], a["p"], a["v2p"], a["p2v"]), {})),
        OpCase(
            "bind_range",
            page_table.bind_range,
            {"v": fresh, "out": zeros[:290], **_tables()},
            lambda a: ((a["v"], 5, a["v2p"], a["p2v"]), {"out": a["out"]}),
        ),
        OpCase("unbind", page_table.unbind, {"v": ids, "out": zeros[:300], **_tables()}, lambda a: ((a["v"], a["v2p"], a["p2v"]), {"out": a["out"]})),
        OpCase(
            "unbind_into",
            page_table.unbind_into,
            {"v": ids, **_tables()},
            lambda a: ((a["v"], a["v2p"], a["p2v"], a["pages"]), {}),
            {"pages": 600},
        ),
        OpCase("remap", page_table.remap, {"s": fresh + 10, "d": taken, **_tables()}, lambda a: ((a["s"], a["d"], a["v2p"], a["p2v"]), {})),
        OpCase(
            "translate",
            page_table.translate,
            {"ids": ids * 7, "out": zeros[:400], **_tables()},
            lambda a: ((a["ids"], a["v2p"], 16), {"out": a["out"], "out_width": 400}),
        ),
    ]


def every_op() -> list[OpCase]:
    """All of them."""
    return page_table_ops()
