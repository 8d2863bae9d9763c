"""The measured table of perf/README.md, from a baseline: ``python -m perf.table perf/baselines/NVIDIA-H200.json``."""

from __future__ import annotations

import json
import sys
from typing import Any


def rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row per case: name, µs, clock, interquartile range, GB/s, share of the copy ceiling."""
    found = []
    for case in report["benchmarks"]:
        figures, stats = case["extra_info"], case["stats"]
        rate = f"{figures['gb_per_s']:,.0f}" if figures.get("gb_per_s", 0) >= 100 else ""
        share = f"{figures['share_of_dram_copy']:.0%}" if rate else ""
        suite = case["fullname"].split("/")[-1].split(".py")[0].removeprefix("test_")
        found.append(
            (suite, case["name"].removeprefix("test_"), f"{stats['median'] * 1e6:,.2f}", figures["clock"], f"{stats['iqr'] * 1e6:.2f}", rate, share)
        )
    return found


def markdown(report: dict[str, Any]) -> str:
    """The table, with what it was measured on."""
    machine = report["machine_info"]["gpukit"]
    lines = [
        f"{machine['device']}, {report['datetime'][:10]}, instrument `{machine['instrument']}`, shapes `{machine['shapes']}`.",
        "",
        "| suite | case | µs (median) | clock | IQR | GB/s | of copy ceiling |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows(report))])


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(markdown(json.load(file)))
