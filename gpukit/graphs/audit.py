"""What a graph really carries: every kernel node asked for its window, as the driver has it. Reads any graph, of any library; changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gpukit.graphs import driver
from gpukit.graphs.window import AccessWindow, Plan, Region, require_regions

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Audit", "AuditedNode", "audit"]


@dataclass(frozen=True)
class AuditedNode:
    """A kernel node: its position among the graph's kernels, its kernel's name, and its window or None."""

    position: int
    kernel: str
    window: AccessWindow | None


@dataclass(frozen=True)
class Audit:
    """What was found.

    Attributes
    ----------
    nodes : tuple of AuditedNode
        Every kernel node, child graphs included.
    others : dict of str to int
        Nodes of other kinds, which carry no window. The bodies of conditional nodes are not walked.
    reserve : int or None
        Bytes set aside for persisting lines under the plan, if one was given.
    held : dict of str to float
        Share of each region's live bytes that the windows hold under that reserve: for the window that holds most of it.
    """

    nodes: tuple[AuditedNode, ...]
    others: dict[str, int]
    reserve: int | None = None
    held: Mapping[str, float] | None = None

    @property
    def kernels(self) -> int:
        """Kernel nodes."""
        return len(self.nodes)

    @property
    def windowed(self) -> int:
        """Kernel nodes that carry a window."""
        return sum(node.window is not None for node in self.nodes)

    @property
    def windows(self) -> dict[AccessWindow, int]:
        """Every different window with the number of nodes that carry it, the most frequent first."""
        return dict(Counter(node.window for node in self.nodes if node.window is not None).most_common())

    def __str__(self) -> str:
        return f"{self.windowed} of {self.kernels} kernel nodes windowed"

    def is_exactly(self, plan: Plan) -> bool:
        """Whether the graph carries what a plan says and nothing else: its window on every node, or on its chosen ones.

        The driver keeps the ratio in single precision.
        """
        for node in self.nodes:
            chosen = plan.window is not None and (plan.nodes is None or any(text in node.kernel for text in plan.nodes))
            if not _same(node.window, plan.window if chosen else None):
                return False
        return True

    def to_dict(self) -> dict[str, Any]:
        """In plain types."""
        windows = [{**asdict(window), "nodes": count} for window, count in self.windows.items()]
        held = dict(self.held or {})
        return {"kernels": self.kernels, "windowed": self.windowed, "windows": windows, "others": self.others, "reserve": self.reserve, "held": held}

    def print(self, console: Console) -> None:
        """A row per different window, and one per kernel."""
        from rich.table import Table

        table = Table("window", "bytes", "ratio", "hit", "miss", "nodes", title=str(self), title_justify="left")
        for window, count in self.windows.items():
            table.add_row(f"{window.base:#x}", f"{window.size:,}", f"{window.ratio:.4f}", window.hit, window.miss, str(count))
        table.add_row("none", "", "", "", "", str(self.kernels - self.windowed))
        console.print(table)
        for name, share in (self.held or {}).items():
            console.print(f"{name}: the windows hold {share:.1%} of the live bytes, in {self.reserve or 0:,} bytes set aside", highlight=False)
        table = Table("kernel", "nodes", "windowed")
        counts = Counter(node.kernel for node in self.nodes)
        for kernel, count in counts.most_common():
            inside = sum(node.window is not None for node in self.nodes if node.kernel == kernel)
            table.add_row(kernel or "unnamed", str(count), str(inside))
        for kind, count in self.others.items():
            table.add_row(f"({kind})", str(count), "")
        console.print(table)


def audit(graph: Any, *, regions: Mapping[str, Region] | None = None, plan: Plan | None = None) -> Audit:
    """Ask every kernel node of a graph for its window.

    Parameters
    ----------
    graph : graph
        Of gpukit, of torch (``CUDAGraph(keep_graph=True)``), of CuPy, or a raw ``cudaGraph_t``.
    regions : mapping of str to Region, optional
        Whose live bytes to account for.
    plan : Plan, optional
        Under whose reserve.

    Returns
    -------
    Audit

    Raises
    ------
    ArgumentError
        The object is no graph, or torch has thrown it away; or `regions` holds something else than regions.
    DeviceError
        The driver refused.
    """
    if regions:
        regions = require_regions(regions)
    nodes: list[AuditedNode] = []
    others: Counter[str] = Counter()
    for kind, node in driver.walk(driver.graph_handle(graph)):
        if kind == "kernel":
            nodes.append(AuditedNode(len(nodes), driver.kernel_name(node), driver.node_window(node)))
        else:
            others[kind] += 1
    reserve = None if plan is None else plan.reserve or 0
    windows = {node.window for node in nodes if node.window is not None}
    held = None
    if regions is not None and reserve is not None:
        held = {name: max((region.held_share(window, reserve) for window in windows), default=0.0) for name, region in regions.items()}
    return Audit(tuple(nodes), dict(others), reserve, held)


def windows_of(graph: Any) -> list[AccessWindow | None]:
    """The window of every kernel node, in the driver's order."""
    return [driver.node_window(node.handle) for node in driver.kernel_nodes(driver.graph_handle(graph))]


def _same(found: AccessWindow | None, expected: AccessWindow | None) -> bool:
    if found is None or expected is None:
        return found is expected
    same = (found.base, found.size, found.hit, found.miss) == (expected.base, expected.size, expected.hit, expected.miss)
    return same and abs(found.ratio - expected.ratio) < 1e-6
