"""Ladder files with numbers made up for a test, written by the harness itself, and files changed afterwards."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpukit.measure import Ladder
from gpukit.measure.design import Slot
from gpukit.measure.ladder_file import DONE, done_line

Script = Callable[[Slot], Mapping[str, Any]]
ARMS = ("stock", "null", "zero", "window")


def write(path: Path, script: Script, arms: Sequence[str] = ARMS, *, device: str | None = None, **options: Any) -> Path:
    """Run a ladder whose cells read `script` instead of measuring; a tick of the clock is one microsecond."""
    cells: list[Mapping[str, Any]] = []
    ladder = Ladder({arm: lambda: cells.pop(0) for arm in arms}, lambda run: run(), warmup=0, **options)
    cells += [script(slot) for slot in ladder.design.order() for _ in range(ladder.design.repetitions)]
    ticks = itertools.count(5000, 1000)
    return ladder.run(path, probes={"git": lambda: None, "device": lambda: device}, clock=lambda: next(ticks))


def noisy(seed: int, noise: float, effects: Mapping[str, float] | None = None, **more: Any) -> Script:
    """One second, with Gaussian noise and an effect per arm, both in percent; pass 0 takes twice as long."""
    generator = np.random.default_rng(seed)

    def script(slot: Slot) -> Mapping[str, Any]:
        percent = (effects or {}).get(slot.arm, 0.0) + noise * generator.standard_normal()
        return {"seconds": (1 + percent / 100) * (2 if slot.pass_index == 0 else 1), **more}

    return script


def seal(lines: Sequence[str]) -> bytes:
    """A file of these lines with a done line that counts its rows and has their digest, so that only the structure can give a change away."""
    body = "".join(f"{line}\n" for line in lines if not line.startswith(DONE)).encode()
    cells = sum(not line.startswith("#") for line in lines) - 1
    return body + (done_line(cells, hashlib.sha256(body).hexdigest()) + "\n").encode()
