"""What unified memory must look like after a round, by a ledger of who has which page: the independent half of its checks.

The ledger is told who runs and how many tokens each request has, and works out how many pages that takes and which of them left the window. Which
page comes next, and where pages move to make room, is the pool's to choose: the ledger accepts a page only if nobody has it, and a move only where
the pool says that pages have moved; from then on everything must agree with what it has written down. It calls no op.
"""

from __future__ import annotations

import numpy as np

from gpukit.decode.checks import Findings, Violation, check_owners
from gpukit.decode.rooms import layout_of
from gpukit.decode.scheduler import Batch, Running
from gpukit.decode.unified import UnifiedLane

__all__ = ["UnifiedLedger"]


class UnifiedLedger:
    """Who has which page.

    Parameters
    ----------
    lane : UnifiedLane
        What is checked.

    Attributes
    ----------
    pages : int64 array, shape (rows, columns)
        Virtual pages of each request row, in order; 0 behind them.
    held, gone : int64 array, shape (rows,)
        Pages of each row, and how many of its first ones left the window.
    owned : bool array
        Whether a virtual page is held.
    places : dict of str to int64 array
        Physical page of each virtual one in FULL and in SWA, 0 where it has none.
    """

    def __init__(self, lane: UnifiedLane):
        self.lane, options = lane, lane.options
        self.page_size, self.window = options.page_size, options.window
        layout = layout_of(options)
        self.sizes = {name: layout.by_name[name].page_bytes for name in ("full", "swa")}
        self.pages = np.zeros((options.batch, lane.memory.state.columns), np.int64)
        self.held, self.gone = np.zeros(options.batch, np.int64), np.zeros(options.batch, np.int64)
        self.owned = np.zeros(layout.num_virtual("full"), bool)
        self.places = {name: np.zeros(len(self.owned), np.int64) for name in self.sizes}
        self.physical = {name: layout.num_physical(name) for name in self.sizes}
        self.moved = 0

    def round(self, batch: Batch) -> tuple[list[Violation], int]:
        """What is wrong after a round's last stage, and how many locations were compared; what is new is written down."""
        lane, findings, count = self.lane, Findings(batch.number), len(batch.running)
        to_host, state = lane.backend.to_host, lane.memory.state
        for running in batch.preempted:
            self._give_back(running.row)
        rows = np.array([running.row for running in batch.running], np.int64)
        lengths = np.array([running.length for running in batch.running], np.int64)
        there = {"full": to_host(state.full_table), "swa": to_host(state.swa_table)}
        self._retire(rows, lengths - 1)
        self._follow_moves(findings, rows, {name: table[:count] for name, table in there.items()}, lane.moved_pages - self.moved)
        self.moved = lane.moved_pages
        self._adopt(findings, rows, -(-lengths // self.page_size), to_host(state.rows)[rows], there)
        for name, table in there.items():
            expected_table = np.zeros(table.shape, np.int64)
            expected_table[:count] = self.places[name][self.pages[rows]]
            findings.equal("metadata", f"{name} page table", expected_table, table)
        kv_lengths = np.zeros(lane.options.batch, np.int64)
        kv_lengths[:count] = lengths
        findings.equal("metadata", "kv_lengths", kv_lengths, to_host(state.kv_lengths))
        findings.equal("metadata", "cu_lengths", np.concatenate([[0], np.cumsum(kv_lengths)]), to_host(state.cu_lengths))
        written = self.pages[rows, (lengths - 1) // self.page_size]
        # Requests that ended have given their pages back already.
        going_on = ~np.isin(rows, [running.row for running in batch.finished])
        for name, locations in zip(self.places, to_host(state.locations)[:, :, 0], strict=True):
            places = self.places[name][written]
            expected = np.zeros(lane.options.batch, np.int64)
            expected[:count] = places * self.page_size + (lengths - 1) % self.page_size
            findings.equal("translation", f"{name} locations", expected, locations)
            band, virtual, physical = lane.bands[name], written[going_on], places[going_on]
            findings.equal("inverse_tables", f"{name}.v2p of the round's pages", physical, to_host(band.v2p)[virtual])
            findings.equal("inverse_tables", f"{name}.p2v of the round's pages", virtual, to_host(band.p2v)[physical])
        for running in batch.finished:
            self._give_back(running.row)
        self._check_counts(findings, lane)
        return findings.violations, 2 * lane.options.batch

    def tables(self, number: int, running: list[Running]) -> list[Violation]:
        """Every table, list, row and counter between two rounds, and whether any op had to skip a value."""
        lane, findings = self.lane, Findings(number)
        to_host, state = lane.backend.to_host, lane.memory.state
        free = lane.free_pages()
        for name, band in lane.bands.items():
            places = self.places[name]
            bound = np.flatnonzero(places)
            v2p, p2v = np.full(len(places) + 1, -1, np.int64), np.full(self.physical[name] + 1, -1, np.int64)
            v2p[0] = p2v[0] = 0
            v2p[bound], p2v[places[bound]] = places[bound], bound
            findings.equal("binding", f"{name}.v2p", v2p, to_host(band.v2p))
            findings.equal("binding", f"{name}.p2v", p2v, to_host(band.p2v))
            used = np.flatnonzero(to_host(band.p2v)[1:-1] != -1) + 1
            # Pages of the span count from 1, as if the span were a pool of its own.
            check_owners(findings, name, free[name] - band.low + 1, used - band.low + 1, band.high - band.low)
        check_owners(findings, "virtual", free["virtual"], np.flatnonzero(self.owned), len(self.owned) - 1)
        self._check_bytes(findings)
        rows = to_host(state.rows)
        for request in running:
            held = int(self.held[request.row])
            findings.equal("request_row", f"row {request.row}", self.pages[request.row, :held], rows[request.row, :held])
        for kind, count in lane.signal.counts().items():
            findings.add("skipped_value", f"ops skipped {count} values of kind {kind}, expected none")
        for message in lane.pool.check():
            findings.add("pool", message)
        for message in lane.memory.check():
            findings.add("mirror", message)
        return findings.violations

    def _give_back(self, row: int) -> None:
        held = int(self.held[row])
        pages = self.pages[row, :held]
        for places in self.places.values():
            places[pages] = 0
        self.owned[pages] = False
        self.pages[row, :held] = 0
        self.held[row] = self.gone[row] = 0

    def _follow_moves(self, findings: Findings, rows: np.ndarray, there: dict[str, np.ndarray], moved: int) -> None:
        """Write down where pages are after a round that moved some of them: of a request's pages, as many as the pool says at most."""
        if not moved:
            return
        changes = 0
        old = np.arange(self.pages.shape[1]) < self.held[rows][:, None]
        for name, table in there.items():
            pages = self.pages[rows][old]
            before, now = self.places[name][pages], table[old].astype(np.int64)
            # What is bound where nothing was, or the other way round, is for the comparison that follows.
            changed = (before != now) & (before != 0) & (now != 0)
            changes += int(np.count_nonzero(changed))
            self.places[name][pages[changed]] = now[changed]
            bound = self.places[name][self.places[name] != 0]
            if len(np.unique(bound)) != len(bound):
                findings.add("double_owner", f"{name} pages: expected a page each after a move, got one for two")
        if changes > moved:
            findings.add("binding", f"expected at most the {moved} pages that moved in another place, got {changes}")

    def _adopt(self, findings: Findings, rows: np.ndarray, need: np.ndarray, row_pages: np.ndarray, there: dict[str, np.ndarray]) -> None:
        """Write down the pages that requests got in this round, if nobody has them."""
        column = np.arange(self.pages.shape[1])
        old = column < self.held[rows][:, None]
        findings.equal("request_row", "pages held before", self.pages[rows], row_pages * old)
        if (self.held[rows] == need).all():
            return
        new = (column < need[:, None]) & ~old
        self.held[rows] = need
        ids = row_pages[new].astype(np.int64)
        if not self._are_free(findings, "virtual", ids, self.owned):
            return
        lane, place = np.nonzero(new)
        self.pages[rows[lane], place] = ids
        self.owned[ids] = True
        in_window = place >= self.gone[rows[lane]]
        for name, chosen in (("full", np.ones(len(ids), bool)), ("swa", in_window)):
            physical = there[name][lane, place].astype(np.int64)[chosen]
            taken = np.zeros(self.physical[name], bool)
            taken[self.places[name]] = True
            if self._are_free(findings, name, physical, taken):
                self.places[name][ids[chosen]] = physical

    def _are_free(self, findings: Findings, kind: str, pages: np.ndarray, taken: np.ndarray) -> bool:
        """Whether nobody has any of these pages, each there once."""
        foreign = pages[(pages < 1) | (pages >= len(taken))]
        if len(foreign):
            findings.add("double_owner", f"new {kind} pages: expected ids from 1 to {len(taken) - 1}, got {foreign[0]}")
            return False
        again = pages[taken[pages]]
        if len(again) or len(np.unique(pages)) != len(pages):
            findings.add("double_owner", f"new {kind} pages: expected pages that nobody has, got {again[0] if len(again) else 'one twice'}")
            return False
        return True

    def _retire(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Strike out what left the window behind so many tokens; of a prompt nothing is written down yet."""
        # Whole pages behind the window of the last whole page: no later token can see any of theirs.
        gone = np.maximum(lengths - lengths % self.page_size - self.window, 0) // self.page_size
        for slot in np.flatnonzero(gone > self.gone[rows]):
            row = rows[slot]
            self.places["swa"][self.pages[row, self.gone[row] : gone[slot]]] = 0
            self.gone[row] = gone[slot]

    def _check_counts(self, findings: Findings, lane: UnifiedLane) -> None:
        """The pool counts as many live pages as requests hold."""
        for name, band in lane.bands.items():
            expected = int(np.count_nonzero(self.places[name]))
            if band.live != expected:
                kind = "lost_page" if band.live > expected else "double_owner"
                findings.add(kind, f"{name} pages: expected {expected} live, got {band.live} ({band!r})")

    def _check_bytes(self, findings: Findings) -> None:
        """No byte belongs to two pages: SWA ends below where FULL begins."""
        full, swa = (self.places[name][self.places[name] != 0] for name in ("full", "swa"))
        if len(full) and len(swa):
            begin, end = int(full.min()) * self.sizes["full"], (int(swa.max()) + 1) * self.sizes["swa"]
            if end > begin:
                findings.add("double_owner", f"bytes: expected SWA pages below byte {begin}, where FULL begins, got one that ends at {end}")
