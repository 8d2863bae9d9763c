"""The checks of split memory: what a lane's arrays hold against the ledger, against themselves, and against another backend.

`check_round` looks at what one round wrote and is cheap enough for every round; `check_tables` looks at everything and is not.
Each returns the violations it found; none changes anything. They read arrays back, so they wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gpukit.decode.backend import Backend
from gpukit.decode.lane import Lane, PoolTables
from gpukit.decode.scheduler import Batch, Running
from gpukit.decode.split_ledger import Expected, SplitLedger

__all__ = ["Findings", "SplitChecks", "Violation", "check_metadata", "check_owners", "check_round", "check_tables", "compare_lanes"]


@dataclass(frozen=True)
class Violation:
    """Something a check found wrong.

    Attributes
    ----------
    round : int
        The round after which it was seen.
    name : str
        What kind: ``location``, ``translation``, ``metadata``, ``request_row``, ``inverse_tables``, ``binding``, ``lost_page``,
        ``double_owner``, ``skipped_value`` or ``backend_mismatch``; of unified memory also ``pool`` and ``mirror``, what its own checks found.
    message : str
        Where, what was expected and what came.
    """

    round: int
    name: str
    message: str


class Findings:
    """Collects the violations of one round."""

    def __init__(self, number: int):
        self.number = number
        self.violations: list[Violation] = []

    def add(self, name: str, message: str) -> None:
        self.violations.append(Violation(self.number, name, message))

    def equal(self, name: str, what: str, expected: Any, got: np.ndarray) -> None:
        """Note the first place where two arrays differ, if any."""
        expected = np.asarray(expected)
        if expected.shape != got.shape:
            self.add(name, f"{what}: expected shape {expected.shape}, got {got.shape}")
            return
        wrong = expected != got
        if wrong.any():
            place = tuple(int(axis) for axis in np.argwhere(wrong)[0])
            where = place[0] if len(place) == 1 else place
            self.add(name, f"{what}[{where}]: expected {expected[place]}, got {got[place]} ({np.count_nonzero(wrong)} differ)")


class SplitChecks:
    """The ledger beside a lane, and what it says of each round."""

    def __init__(self, lane: Lane):
        self.lane = lane
        free = {kind: pages.tolist() for kind, pages in lane.free_pages().items()}
        self.ledger = SplitLedger(lane.options.page_size, lane.options.window, free)

    def round(self, batch: Batch) -> tuple[list[Violation], int]:
        """What is wrong after a round, page tables only where `tables` follows; and how many locations were compared."""
        expected = self.ledger.play(batch)
        whole = (batch.number + 1) % self.lane.options.check_every == 0
        violations = check_metadata(batch, self.lane, self.ledger) if whole else []
        self.ledger.close(batch)
        violations += check_round(batch, self.lane, self.ledger, expected)
        prompt_tokens = 0 if expected.prompts is None else len(expected.prompts.tokens)
        return violations, 3 * (len(expected.locations) + prompt_tokens)

    def tables(self, number: int, running: list[Running]) -> list[Violation]:
        """What is wrong anywhere, between two rounds."""
        return check_tables(number, running, self.lane, self.ledger)


def check_round(batch: Batch, lane: Lane, ledger: SplitLedger, expected: Expected) -> list[Violation]:
    """Locations, translations, lengths and page counts of the round just played. Call after the ledger has closed the round."""
    findings, to_host, count = Findings(batch.number), lane.backend.to_host, len(batch.running)
    idle = [0] * (lane.options.batch - count)
    findings.equal("location", "locations", expected.locations, to_host(lane.locations)[:count])
    findings.equal("translation", "full locations", expected.full_locations + idle, to_host(lane.full_locations))
    findings.equal("translation", "swa locations", expected.swa_locations + idle, to_host(lane.swa_locations))
    if expected.prompts is not None and lane.prompts is not None:
        findings.equal("location", "prompt locations", expected.prompts.tokens, to_host(lane.prompts.tokens))
        findings.equal("translation", "full prompt locations", expected.prompts.full, to_host(lane.prompts.full))
        findings.equal("translation", "swa prompt locations", expected.prompts.swa, to_host(lane.prompts.swa))
    lengths = np.array(expected.lengths + idle, np.int64)
    findings.equal("metadata", "lengths", lengths, to_host(lane.lengths))
    findings.equal("metadata", "cu_lengths", np.concatenate([[0], np.cumsum(lengths)]), to_host(lane.cu_lengths))
    # Requests that ended have given their pages back already.
    ended = {running.row for running in batch.finished}
    held = [slot for slot, running in enumerate(batch.running) if running.row not in ended]
    for name, tables, physical in (("full", lane.full, expected.full_locations), ("swa", lane.swa, expected.swa_locations)):
        written = np.array([expected.locations, physical], np.int64)[:, held]
        _check_written_pages(findings, name, tables, lane, written)
    _check_counts(findings, lane, ledger)
    return findings.violations


def check_metadata(batch: Batch, lane: Lane, ledger: SplitLedger) -> list[Violation]:
    """Both pools' page tables of the round just played. Call before the ledger closes the round."""
    findings, to_host = Findings(batch.number), lane.backend.to_host
    full, swa = ledger.page_tables(batch, lane.full_pages.shape)
    findings.equal("metadata", "full page table", full, to_host(lane.full_pages))
    findings.equal("metadata", "swa page table", swa, to_host(lane.swa_pages))
    return findings.violations


def check_tables(number: int, running: list[Running], lane: Lane, ledger: SplitLedger) -> list[Violation]:
    """Every table, list and row between two rounds, and whether any op had to skip a value."""
    findings, to_host = Findings(number), lane.backend.to_host
    for name, tables, bound in (("full", lane.full, ledger.full), ("swa", lane.swa, ledger.swa)):
        v2p, p2v = to_host(tables.v2p), to_host(tables.p2v)
        _check_inverse(findings, name, v2p, p2v)
        findings.equal("binding", f"{name}.v2p", _table(bound, len(v2p)), v2p)
        findings.equal("binding", f"{name}.p2v", _table({page: virtual for virtual, page in bound.items()}, len(p2v)), p2v)
    free = lane.free_pages()
    for kind, in_use in _pages_in_use(lane).items():
        check_owners(findings, kind, free[kind], in_use, len(lane.supplies[kind].ring.ring))
    rows = to_host(lane.rows)
    for request in running:
        findings.equal("request_row", f"row {request.row}", ledger.row(request), rows[request.row, : request.length])
    for kind, count in lane.signal.counts().items():
        findings.add("skipped_value", f"ops skipped {count} values of kind {kind}, expected none")
    return findings.violations


class Compared(Protocol):
    """What two lanes are compared by."""

    backend: Backend

    def tables(self) -> dict[str, Any]: ...
    def free_pages(self) -> dict[str, np.ndarray]: ...


def compare_lanes(number: int, lane: Compared, other: Compared) -> list[Violation]:
    """Every table, buffer and free list of two backends that played the same rounds."""
    findings = Findings(number)
    names = f"{lane.backend.name} against {other.backend.name}"
    theirs = other.tables()
    for name, array in lane.tables().items():
        findings.equal("backend_mismatch", f"{names}: {name}", other.backend.to_host(theirs[name]), lane.backend.to_host(array))
    others = other.free_pages()
    for kind, pages in lane.free_pages().items():
        findings.equal("backend_mismatch", f"{names}: free {kind} pages", others[kind], pages)
    return findings.violations


def _check_written_pages(findings: Findings, name: str, tables: PoolTables, lane: Lane, locations: np.ndarray) -> None:
    """The pages that the round wrote to lead to each other in both tables."""
    virtual, physical = locations // lane.options.page_size
    findings.equal("inverse_tables", f"{name}.v2p of the round's pages", physical, lane.backend.to_host(tables.v2p)[virtual])
    findings.equal("inverse_tables", f"{name}.p2v of the round's pages", virtual, lane.backend.to_host(tables.p2v)[physical])


def _check_counts(findings: Findings, lane: Lane, ledger: SplitLedger) -> None:
    """Free and live pages of each kind make up the total."""
    live = {"virtual": len(ledger.full), "full": len(ledger.full), "swa": len(ledger.swa)}
    for kind, supply in lane.supplies.items():
        head, tail = lane.backend.to_host(supply.ring.counters).tolist()
        free, total = len(supply.list) + tail - head, len(supply.ring.ring)
        if free + live[kind] != total:
            name = "lost_page" if free + live[kind] < total else "double_owner"
            findings.add(name, f"{kind} pages: expected {total} in all, got {free} free and {live[kind]} live")


def _check_inverse(findings: Findings, name: str, v2p: np.ndarray, p2v: np.ndarray) -> None:
    """Each table leads back through the other, row 0 is the sink and the last row the sentinel."""
    for label, table, back in ((f"{name}.v2p", v2p, p2v), (f"{name}.p2v", p2v, v2p)):
        findings.equal("inverse_tables", f"{label}, sink and sentinel", [0, -1], table[[0, -1]])
        bound = np.flatnonzero(table[1:-1] != -1) + 1
        ids = table[bound]
        inside = (ids >= 1) & (ids < len(back) - 1)
        if not inside.all():
            worst = bound[~inside][0]
            findings.add("inverse_tables", f"{label}[{worst}]: expected a page from 1 to {len(back) - 2} or -1, got {table[worst]}")
            continue
        findings.equal("inverse_tables", f"{label} and back", bound, back[ids])


def _table(bound: dict[int, int], rows: int) -> np.ndarray:
    """The table a dictionary stands for."""
    table = np.full(rows, -1, np.int64)
    table[0] = 0
    table[list(bound.keys())] = list(bound.values())
    return table


def _pages_in_use(lane: Lane) -> dict[str, np.ndarray]:
    """Pages of each kind that the tables call bound."""

    def bound(table: Any) -> np.ndarray:
        return np.flatnonzero(lane.backend.to_host(table)[1:-1] != -1) + 1

    full: PoolTables = lane.full
    return {"virtual": bound(full.v2p), "full": bound(full.p2v), "swa": bound(lane.swa.p2v)}


def check_owners(findings: Findings, kind: str, free: np.ndarray, in_use: np.ndarray, total: int) -> None:
    """Each page 1 … total is free once or in use once, and nothing else is anywhere."""
    pages = np.concatenate([free, in_use])
    foreign = pages[(pages < 1) | (pages > total)]
    if len(foreign):
        findings.add("double_owner", f"{kind} pages: expected ids from 1 to {total}, got {foreign[0]} in a list or table")
    owners = np.bincount(pages[(pages >= 1) & (pages <= total)], minlength=total + 1)[1:]
    for name, wrong, meaning in (("lost_page", owners == 0, "no owner"), ("double_owner", owners > 1, "two owners")):
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0]) + 1
            findings.add(name, f"{kind} page {first}: expected one owner, got {meaning} ({np.count_nonzero(wrong)} such pages)")
