"""CUDA graphs and what they keep in the L2: capture, access-policy windows, the reserve behind them, audits, and plans chosen by measurement.

A graph is captured from work of any library that runs on a stream, and replayed at the cost of one launch. A window tells the L2 which lines to keep
between its kernels; how much of the L2 they may fill is a limit of the whole device, which `Reservation` owns. Size says where that cannot
work (`plan` has a guard), never where it helps: the largest reserve can double the time of a round that a small one makes faster. So `tune`
measures, and returns stock unless something beat it.

With nothing of this called, nothing of the device is touched; importing needs no GPU.
"""

from gpukit.graphs.audit import Audit, AuditedNode, audit
from gpukit.graphs.candidates import candidates
from gpukit.graphs.capture import Graph, capture
from gpukit.graphs.identity import Identity, compare_outputs, digest
from gpukit.graphs.install import apply, installed, set_windows
from gpukit.graphs.reservation import Limits, Reservation, break_even_us
from gpukit.graphs.result import Row, TuneResult
from gpukit.graphs.tune import Built, resolve, tune
from gpukit.graphs.window import STOCK, AccessWindow, Plan, Recipe, Region, load_plan, plan

__all__ = [
    "STOCK",
    "AccessWindow",
    "Audit",
    "AuditedNode",
    "Built",
    "Graph",
    "Identity",
    "Limits",
    "Plan",
    "Recipe",
    "Region",
    "Reservation",
    "Row",
    "TuneResult",
    "apply",
    "audit",
    "break_even_us",
    "candidates",
    "capture",
    "compare_outputs",
    "digest",
    "installed",
    "load_plan",
    "plan",
    "resolve",
    "set_windows",
    "tune",
]
