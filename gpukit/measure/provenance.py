"""Where and with what a ladder ran: device, driver, versions, revision, other processes. It looks, and changes nothing.

Every probe is guarded: a field is None where nobody could look, and ``{"error": reason}`` where looking failed.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import gpukit
from gpukit.errors import ArgumentError

__all__ = ["FIELDS", "Probe", "collect", "git_state"]

Probe = Callable[[], Any]
FIELDS = ("device", "driver", "versions", "git", "other_processes")
GIT_SECONDS = 10


def collect(probes: Mapping[str, Probe] | None = None) -> dict[str, Any]:
    """Ask every probe.

    Parameters
    ----------
    probes : mapping of str to callable, optional
        What to ask for each of `FIELDS`; the answers must be plain types. Left out, versions and git are looked up here and the fields of
        a GPU are None.

    Returns
    -------
    dict
        One entry per field, and ``started`` (UTC) and ``pid``.

    Raises
    ------
    ArgumentError
        A probe for a field that is not one of `FIELDS`.

    Examples
    --------
    >>> seen = collect({"device": lambda: "a card", "driver": lambda: 1 / 0, "git": lambda: None})
    >>> seen["device"], seen["driver"], seen["other_processes"]
    ('a card', {'error': 'division by zero'}, None)
    """
    asked: dict[str, Probe] = {"versions": versions, "git": git_state, **(probes or {})}
    if unknown := set(asked) - set(FIELDS):
        raise ArgumentError(f"probes: expected fields of {', '.join(FIELDS)}, got {', '.join(sorted(unknown))}")
    answers = {field: _guarded(asked[field]) if field in asked else None for field in FIELDS}
    return {**answers, "started": datetime.now(UTC).isoformat(timespec="seconds"), "pid": os.getpid()}


def _guarded(probe: Probe) -> Any:
    try:
        return probe()
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


def versions() -> dict[str, str]:
    """Versions of what every ladder runs on."""
    return {"python": platform.python_version(), "gpukit": gpukit.__version__, "numpy": np.__version__}


def git_state(directory: Path | None = None) -> dict[str, Any] | None:
    """Revision of the working tree and whether a tracked file was changed; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    answer = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=GIT_SECONDS)
    if answer.returncode:
        return None
    revision, _, dirty = answer.stdout.strip().partition("-")
    return {"revision": revision, "dirty": bool(dirty)}
