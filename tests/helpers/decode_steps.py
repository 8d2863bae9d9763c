"""A batch for the decode step, and what a round of it should do, in plain Python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from gpukit.kernels.decode_step import MOST_RETIRED, DecodeState
from gpukit.kernels.free_list import DevicePages


def batch(
    rng: np.random.Generator,
    *,
    lanes: int,
    page_size: int,
    lookahead: int = 1,
    columns: int = 24,
    spare: int = 200,
    window: int | None = 16,
    swa: bool = True,
    row_type: str = "int64",
    length_type: str = "int64",
    width: int | None = None,
) -> dict[str, Any]:
    """NumPy arrays of a batch: most lanes hold requests of random length on scattered pages, some are padding; magazines hold `spare` pages each.

    Returns what `assemble` makes a state, tables and magazines of.
    """
    num_rows = lanes + 3
    longest = max(columns * page_size - 3 * lookahead * 2, 1)
    lengths = np.zeros(num_rows, np.int64)
    lengths[:] = rng.integers(0, longest, num_rows)
    held = -(-lengths // page_size)
    retired = np.zeros(num_rows, np.int64)
    total = int(held.sum())
    size = total + spare
    virtual, full, other = (rng.permutation(size) + 1 for _ in range(3))
    rows = np.zeros((num_rows, columns), row_type)
    tables = {name: np.full(size + 2, -1) for name in ("full_v2p", "full_p2v", "swa_v2p", "swa_p2v")}
    for table in tables.values():
        table[0] = 0
    used = 0
    for row in range(num_rows):
        pages = virtual[used : used + held[row]]
        rows[row, : len(pages)] = pages
        if window is not None:
            # What earlier rounds have retired, or a little less.
            edge = max(lengths[row] // page_size * page_size - window, 0) // page_size
            retired[row] = max(edge - rng.integers(0, 3), 0)
        first = retired[row] if swa else held[row]
        bound = slice(used, used + len(pages))
        tables["full_v2p"][pages], tables["full_p2v"][full[bound]] = full[bound], pages
        kept = slice(used + first, used + len(pages))
        tables["swa_v2p"][virtual[kept]], tables["swa_p2v"][other[kept]] = other[kept], virtual[kept]
        used += len(pages)
    requests = np.where(rng.random(lanes) < 0.1, -1, rng.permutation(num_rows)[:lanes]).astype(length_type)
    bound_swa = np.flatnonzero(tables["swa_p2v"][1:-1] > 0) + 1
    width = columns if width is None else width
    return tables | {
        "rows": rows, "lengths": lengths, "pages": held, "retired": retired,
        "requests": requests, "advance": np.zeros(lanes, length_type),
        "locations": np.full((2, lanes, lookahead), -77),
        "kv_lengths": np.full(lanes, -77, np.int32), "cu_lengths": np.full(lanes + 1, -77, np.int32),
        "full_table": np.full((lanes, width), -77, np.int32), "swa_table": np.full((lanes, width), -77, np.int32), "status": np.zeros(3, np.int64),
        "free virtual": virtual[used:], "free full": full[used:], "free swa": np.setdiff1d(np.arange(1, size + 1), bound_swa),
    }  # fmt: skip


def extremes(rng: np.random.Generator, arrays: dict[str, np.ndarray], page_size: int) -> list[int | None]:
    """Give every other lane numbers at the ends of 64 and of 31 bits, for a lookahead of 1; those whose row would be full become padding.

    Returns each lane's length after the advance, 0 for padding, None where it makes no sense; in Python's integers, which do not go round.
    """
    ends = [-(2**63), 1 - 2**63, -(2**31), -1, 0, 1, 8, 2**31 - 2, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1]
    lanes, columns = len(arrays["requests"]), arrays["rows"].shape[1]
    arrays["requests"][:] = range(lanes)
    numbers = [arrays["lengths"][:lanes], arrays["advance"], arrays["retired"][:lanes], arrays["pages"][:lanes]]
    for values in numbers:
        values[::2] = rng.choice(ends, (lanes + 1) // 2)
    # Some that make sense: little text on pages beyond counting.
    numbers[0][:16:2], numbers[1][:16:2], numbers[2][:16:2], numbers[3][:16:2] = 8, 1, np.repeat([2**31, 2**62], 4), np.tile(ends[-4:], 2)
    lengths: list[int | None] = []
    for lane, (before, step, gone, held) in enumerate(zip(*(values.tolist() for values in numbers), strict=True)):
        makes_sense = before >= 0 and step >= 0 and 0 <= gone <= held and before + step <= min(held * page_size, 2**31 - 2)
        lengths.append(before + step if makes_sense else None)
        if makes_sense and before + step >= columns * page_size:
            arrays["requests"][lane], lengths[lane] = -1, 0
    return lengths


def assemble(arrays: dict[str, Any], lookahead: int, swa: bool = True) -> SimpleNamespace:
    """State, tables and magazines of a batch's arrays, wherever these are."""
    state = DecodeState(
        *(arrays[name] for name in ("rows", "lengths", "pages", "retired", "requests", "advance")),
        lookahead,
        *(arrays[name] for name in ("locations", "kv_lengths", "cu_lengths", "full_table", "swa_table", "status")),
    )
    made = SimpleNamespace(state=state, full=(arrays["full_v2p"], arrays["full_p2v"]), swa=(arrays["swa_v2p"], arrays["swa_p2v"]) if swa else None)
    size = len(arrays["full_v2p"])
    for name in ("virtual", "full", "swa"):
        pages = DevicePages(size, like=arrays["rows"])
        pages.fill(arrays[f"free {name}"])
        setattr(made, f"{name}_pages", pages if swa or name != "swa" else None)
    return made


class Model:
    """The same batch in lists and dictionaries; `play` is a round."""

    def __init__(self, arrays: dict[str, np.ndarray], page_size: int, lookahead: int, window: int | None):
        self.page_size, self.lookahead, self.window = page_size, lookahead, window
        self.columns, self.width = arrays["rows"].shape[1], arrays["full_table"].shape[1]
        self.length = arrays["lengths"].tolist()
        self.retired = arrays["retired"].tolist()
        self.rows = [row[:held].tolist() for row, held in zip(arrays["rows"], arrays["pages"].tolist(), strict=True)]
        self.full = {v: int(p) for v, p in enumerate(arrays["full_v2p"]) if p > 0}
        self.swa = {v: int(p) for v, p in enumerate(arrays["swa_v2p"]) if p > 0}
        self.free = {name: arrays[f"free {name}"].tolist() for name in ("virtual", "full", "swa")}
        self.tables = {name: arrays[f"{name}_table"].tolist() for name in ("full", "swa")}
        self.served = self.refused = 0
        self.locations: list[list[list[int]]] = arrays["locations"].tolist()
        self.kv_lengths: list[int] = arrays["kv_lengths"].tolist()

    def play(self, requests: list[int], advance: list[int]) -> bool:
        """One round; whether it was served."""
        needs = []
        for row, step in zip(requests, advance, strict=True):
            pages = -(-(self.length[row] + step + self.lookahead) // self.page_size) if row >= 0 else 0
            needs.append(max(pages - len(self.rows[row]), 0) if row >= 0 else 0)
            if pages > self.columns:
                needs.append(10**9)
        if sum(needs) > min(len(pages) for pages in self.free.values()):
            self.refused += 1
            return False
        self.served += 1
        for lane, (row, step) in enumerate(zip(requests, advance, strict=True)):
            if row >= 0:
                self.length[row] += step
                self._retire(lane, row)
        # What was pushed is at the end of the queue, so whether pops or pushes come first is the same.
        for lane, (row, need) in enumerate(zip(requests, needs, strict=True)):
            for _ in range(need):
                self._grow(lane, row)
        for lane, row in enumerate(requests):
            self._locate(lane, row)
        return True

    def _retire(self, lane: int, row: int) -> None:
        if self.window is None:
            return
        edge = (self.length[row] // self.page_size * self.page_size - self.window) // self.page_size
        for _ in range(MOST_RETIRED):
            if self.retired[row] >= edge:
                return
            page = self.swa.pop(self.rows[row][self.retired[row]], None)
            if page is not None:
                self.free["swa"].append(page)
            self._write("swa", lane, self.retired[row], 0)
            self.retired[row] += 1

    def _grow(self, lane: int, row: int) -> None:
        page = self.free["virtual"].pop(0)
        self.full[page], self.swa[page] = self.free["full"].pop(0), self.free["swa"].pop(0)
        self._write("full", lane, len(self.rows[row]), self.full[page])
        self._write("swa", lane, len(self.rows[row]), self.swa[page])
        self.rows[row].append(page)

    def _write(self, name: str, lane: int, column: int, page: int) -> None:
        if column < self.width:
            self.tables[name][lane][column] = page

    def _locate(self, lane: int, row: int) -> None:
        self.kv_lengths[lane] = self.length[row] + self.lookahead if row >= 0 else 0
        for i in range(self.lookahead):
            for place, pool in enumerate((self.full, self.swa)):
                physical = 0
                if row >= 0:
                    column, offset = divmod(self.length[row] + i, self.page_size)
                    page = pool.get(self.rows[row][column], 0)
                    physical = page * self.page_size + offset if page else 0
                self.locations[place][lane][i] = physical
