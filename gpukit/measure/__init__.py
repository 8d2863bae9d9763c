"""Measuring: ladders (A/B experiments that can be trusted), the split of speculative throughput, rooflines and census differences.

Importing it needs no GPU, and neither matplotlib nor rich. What runs on a device is imported by its own name, as `gpukit.measure.timing`.
"""

from gpukit.measure.analysis import Analysis, Delta, Finding, Spread, analyze
from gpukit.measure.census_diff import CensusDiff, KernelChange, KernelCount, diff_censuses
from gpukit.measure.design import LadderDesign
from gpukit.measure.ladder import Ladder
from gpukit.measure.replication import Range, Replication, combine
from gpukit.measure.roofline import KernelTraffic, Roofline, RooflineRow
from gpukit.measure.speedup import Decode, Split, acceptance, split, split_ladder
from gpukit.measure.verification import Problem, Verification, verify

__all__ = [
    "Analysis",
    "CensusDiff",
    "Decode",
    "Delta",
    "Finding",
    "KernelChange",
    "KernelCount",
    "KernelTraffic",
    "Ladder",
    "LadderDesign",
    "Problem",
    "Range",
    "Replication",
    "Roofline",
    "RooflineRow",
    "Split",
    "Spread",
    "Verification",
    "acceptance",
    "analyze",
    "combine",
    "diff_censuses",
    "split",
    "split_ladder",
    "verify",
]
