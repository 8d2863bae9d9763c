"""Decode rounds over a unified pool: the requests' rows, the captured step, the magazines' stock, and the host's mirror of it all.

A round costs the host one graph launch and some arithmetic. Admission and ends of requests are the slow path, between rounds.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np

from gpukit import arrays
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.graphs import Graph, capture
from gpukit.kernels import metadata
from gpukit.kernels._plans import whole
from gpukit.kernels.decode_step import MOST_RETIRED, DecodeState, decode_step
from gpukit.kernels.free_list import DevicePages
from gpukit.kernels.reference.decode_step import MOST_TOKENS
from gpukit.launch import IDS
from gpukit.memory._arrays import to_device, to_host, whole_numbers
from gpukit.memory.mirror import Counts, Mirror
from gpukit.memory.pool import UnifiedPool

__all__ = ["DecodeMemory"]

# Rounds for which the pages that will be popped and pushed are worked out at once: first after a seating, which may not last, and then.
FORECAST, LONG_FORECAST = 256, 1_024

# Rounds that the magazines are stocked for at once while the pool has so many times the pages.
AHEAD, PLENTY = 64, 16


class DecodeMemory:
    """The decode rounds of one pool.

    Parameters
    ----------
    pool : UnifiedPool
        With a sub-pool ``full`` that mints ids, and perhaps ``swa`` that binds them.
    num_rows : int
        Requests at a time.
    columns : int
        Pages of the longest request, at least 1.
    lanes : int
        Requests of a round.
    window : int or None
        Tokens that must stay behind the last whole page in SWA; None retires nothing.
    lookahead : int
        Tokens written per request and round: 1, or drafts and one more.

    Attributes
    ----------
    state : DecodeState
        The device's side.
    rows : int64 array
        Rows of the requests that are seated, by lane.

    Notes
    -----
    No call takes a ``stream=``: the pool's one stream, current in the arrays' library, serves all of them. A captured step runs on the stream that
    it was captured on, so that is to be the same one.

    While the pool has plenty of pages, the step's lists are stocked for many rounds at once. These pages are holes of their bands, which a flush
    gives up.

    Examples
    --------
    >>> from gpukit.memory import Entry, Part, full_and_swa
    >>> entry = Entry((Part("k", (8,), "float32"),))
    >>> memory = DecodeMemory(full_and_swa(1 << 14, entry, entry, page_size=4), num_rows=4, columns=16, lanes=2, window=4)
    >>> memory.admit(0, length=6)
    True
    >>> memory.seat([0])
    >>> for _ in range(6):
    ...     served = memory.step()
    >>> memory.state.kv_lengths, memory.mirror.low.retired, memory.check()
    (array([12,  0], dtype=int32), array([1, 0, 0, 0]), [])
    >>> memory.end(0)
    >>> memory.pool.band("full").live, memory.pool.band("swa").live
    (0, 0)
    """

    def __init__(self, pool: UnifiedPool, *, num_rows: int, columns: int, lanes: int, window: int | None, lookahead: int = 1):
        if not isinstance(pool, UnifiedPool):
            raise ArgumentTypeError(f"pool: expected a UnifiedPool, got {type(pool).__name__}")
        self.pool = pool
        self.full = pool.band("full")
        self.swa = pool.band("swa") if "swa" in pool.chain.positions else None
        self.page_size = self.full.page_size
        most = MOST_RETIRED * self.page_size
        if whole(lookahead, "lookahead", 1) > most:
            raise ArgumentError(f"lookahead: expected at most {most} tokens, {MOST_RETIRED} pages, got {lookahead}")
        window = None if window is None else whole(window, "window")
        columns = whole(columns, "columns", 1)
        self.state = DecodeState.allocate(num_rows, columns, lanes, lookahead, like=pool.like)
        self.window = window if self.swa is not None else None
        self._mirror = Mirror(self.state.num_rows, self.state.lookahead, self.page_size, self.window)
        self.rows = np.empty(0, np.int64)
        self.rounds = 0
        self._graph: Graph | None = None
        self._admitted: set[int] = set()
        # Seated requests that have ended: until the next seating the lanes still hold their pages.
        self._ended: set[int] = set()
        # Requests that have not had a round yet: their length counts all their tokens.
        self._fresh: set[int] = set()
        # The forecast: pages popped and pushed before each of its rounds, and by all.
        self._popped, self._pushed = [0], [0]
        # Rounds of it that were launched, that the bands know of, and the mirror.
        self._launched = self._booked = self._mirrored = 0
        # Rounds that every row had room for when the forecast was made.
        self._left = 0
        # Rounds after the launched ones that the magazines hold pages for, whatever comes back meanwhile.
        self._covered = 0
        # Whether the pool may have plenty of pages.
        self._plenty = True
        # The lists that the step pops from call `_book` when somebody wants to know how many pages they hold.
        lists = self.full.holes, self.full.virtual, None if self.swa is None else self.swa.holes
        self._magazines: list[DevicePages] = [pages for pages in lists if pages is not None]
        self._books = self._book
        # Rounds whose advance only the device knows that are not in the mirror yet.
        self._blind = 0
        # Such rounds that every row has room for, whatever they accept; none while there is a forecast.
        self._roomy = 0
        self._tokens = min(self.state.columns * self.page_size, MOST_TOKENS)
        # What `state.advance` holds, as far as the host wrote it.
        self._advance: np.ndarray | None = None
        # Whole rows go into the page tables when a lane gets another request: pages that are held for drafts, too.
        self._whole = to_device(np.full(lanes, self.state.columns * self.page_size, np.int64), pool.like)
        self._scratch = arrays.full(lanes, 0, "int32", pool.like), arrays.full(lanes + 1, 0, "int32", pool.like)

    def __repr__(self) -> str:
        return f"DecodeMemory({len(self.rows)} of {self.state.lanes} lanes, {self.rounds} rounds, {self.mirror.waiting} in wait, {self.pool!r})"

    @property
    def mirror(self) -> Mirror:
        """The host's side, with all rounds that were launched."""
        if self._launched > self._mirrored or self._blind:
            self._catch_up()
        return self._mirror

    def _catch_up(self) -> None:
        if self._launched > self._mirrored:
            self._mirror.skip(self.rows, self._launched - self._mirrored)
        for _ in range(self._blind):
            self._mirror.round(self.rows, None)
        self._mirrored, self._blind = self._launched, 0

    def _book(self) -> None:
        """Tell the bands of the rounds that they have not heard of."""
        for pages in self._magazines:
            if pages.owed is self._books:
                pages.owed = None
        popped = self._popped[self._launched] - self._popped[self._booked]
        pushed = self._pushed[self._launched] - self._pushed[self._booked]
        self._booked, self._covered = self._launched, 0
        if popped:
            self.full.stepped(-popped)
        if self.swa is not None and (popped or pushed):
            self.swa.stepped(pushed - popped)

    def _expect(self, rounds: int) -> None:
        """Forecast so many rounds, each of which advances every request by 1; none with 0, or where requests have something to catch up with."""
        self._catch_up()
        self._book()
        self._popped, self._pushed = [0], [0]
        self._launched = self._booked = self._mirrored = self._roomy = 0
        self._plenty = True
        turns = self._mirror.turns(self.rows, rounds) if rounds else None
        if turns is not None:
            for sums, found in zip((self._popped, self._pushed), turns, strict=True):
                sums += found.cumsum().tolist()

    # Requests

    def admit(self, row: int, length: int, *, pages: Any = None, shared: int = 0, relieve: bool = False) -> bool:
        """A request begins with a prompt of `length` tokens; False, with nothing changed, where its pages do not fit.

        Parameters
        ----------
        row : int
            A row that no request has.
        length : int
            Tokens that have their K and V, or get them before the first round. The first round does not advance the request; where a
            sampler writes ``state.advance``, that is 0 then.
        pages : int64 array, optional
            Virtual pages that the caller has allocated, as many as `length` tokens take; int32 also. By default they are allocated here, and
            only those inside the window are bound in SWA.
        shared : int
            First pages that others share, at most all of them: the step never retires them.
        relieve : bool
            Whether to make room if need be.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            The row is none, or a request's; `length`, `pages` and `shared` do not fit each other. Nothing changes.
        """
        row, length = whole(row, "row", 0, self.state.num_rows - 1), whole(length, "length")
        if row in self._admitted:
            raise ArgumentError(f"row: expected a row that no request has, got {row}, which one has")
        count = -(-length // self.page_size)
        if count > self.state.columns:
            raise ArgumentError(f"length: expected at most {self.state.columns * self.page_size} tokens, the width of a row, got {length}")
        retired = whole(shared, "shared", 0, count)
        if pages is None:
            if self.window is not None:
                retired = max(retired, max(length // self.page_size * self.page_size - self.window, 0) // self.page_size)
            counts = {"full": count} | ({"swa": count - retired} if self.swa is not None else {})
            found = self.pool.alloc_joint(counts, relieve=relieve)
            if found is None:
                return False
            pages = found["full"]
        else:
            self._check_pages(pages, count, length)
        state = self.state
        state.rows[row] = 0
        if count:
            state.rows[row, :count] = pages
        state.lengths[row], state.pages[row], state.retired[row] = length, count, retired
        self.mirror.set(row, length, count, retired)
        self._admitted.add(row)
        self._fresh.add(row)
        if relieve:
            self.refill_tables()
        return True

    def seat(self, rows: Any) -> None:
        """Say which request is in which lane, and fill the lanes' lines of the page tables: one copy and one launch. Lanes past the end are padding.

        A captured step keeps working: the arrays stay where they are.
        """
        rows = whole_numbers(rows, "rows").reshape(-1)
        if (
            len(rows) > self.state.lanes
            or len(np.unique(rows)) != len(rows)
            or (len(rows) and not 0 <= rows.min() <= rows.max() < self.state.num_rows)
        ):
            raise ArgumentError(f"rows: expected at most {self.state.lanes} different rows below {self.state.num_rows}, got {rows.tolist()}")
        rows = rows.astype(np.int64)
        if not self._admitted.issuperset(rows.tolist()):
            raise ArgumentError(f"rows: expected rows that requests have, got {sorted(set(rows.tolist()) - self._admitted)}, which none has")
        # Rounds with the former seating go into the mirror before it changes.
        self._expect(0)
        seats = np.full(self.state.lanes, -1, np.int64)
        seats[: len(rows)] = rows
        self.state.requests[:] = to_device(seats, self.pool.like)
        self.rows = rows
        self._ended.clear()
        self.refill_tables()

    def refill_tables(self) -> None:
        """Write the page tables of all lanes anew: after pages have moved."""
        metadata.decode_metadata(
            *(self.state.rows, self._whole, self.pool.spaces(), self.page_size),
            granularity="page",
            lengths_out=self._scratch[0],
            cu_lengths_out=self._scratch[1],
            full_out=self.state.full_table,
            swa_out=self.state.swa_table,
            request_indices=self.state.requests,
            valid=len(self.rows),
            zero_tail=True,
        )

    def end(self, row: int) -> None:
        """A request ends and gives its pages back: one launch.

        Where it is seated, `ready` and `step` refuse until `seat` says who goes on: its lane would go on with pages that are others' now.
        """
        row = whole(row, "row", 0, self.state.num_rows - 1)
        if row not in self._admitted:
            raise ArgumentError(f"row: expected a row that a request has, got {row}, which none has")
        high, low = self.mirror.high, self.mirror.low
        count = int(high.pages[row])
        exact = self.mirror.exact
        self.pool.free(
            "full",
            self.state.rows[row, :count],
            live=count if exact else None,
            follower_live=count - int(low.retired[row]) if exact and self.swa is not None else None,
        )
        self.mirror.set(row, 0, 0, 0)
        self._admitted.discard(row)
        self._fresh.discard(row)
        if row in self.rows:
            self._ended.add(row)

    def _check_pages(self, pages: Any, count: int, length: int) -> None:
        """Refuse pages that are not as many as `length` tokens take, or, where the host can see them, none of the pool's."""
        _, given, _, _ = arrays.vector(pages, "pages", IDS, self.state.device)
        if given != count:
            raise ArgumentError(f"pages: expected the {count} pages of {length} tokens, got {given}")
        if count and self.state.device < 0:
            most, values = self.full.num_virtual - 1, np.asarray(pages)
            wrong = values[(values < 1) | (values > most)]
            if len(wrong):
                raise ArgumentError(f"pages: expected ids from 1 to {most}, got {wrong[0]}")

    # Rounds

    def ready(self, advance: np.ndarray | None = None, *, relieve: bool = False, known: bool = True) -> bool:
        """Stock the magazines for the next round; False where the pool has not enough for the most that it may need.

        `advance` and `known` as for `step`. With ``relieve=True`` the pool makes room, after which the page tables are filled anew.
        """
        return self._stock(self.mirror.need(self.rows, self._checked_advance(advance, known)), relieve)

    def _stock(self, need: int, relieve: bool) -> bool:
        if self.full.id_count < need:
            self.pool.refresh()
        bands = [band for band in (self.full, self.swa) if band is not None]
        if self.full.id_count >= need and all(self.pool.stock(band.name, need) for band in bands):
            return True
        if not relieve or self.pool.schedulable({band.name: need for band in bands} if need else bands[0].name) < 1:
            return False
        found = self.pool.alloc_joint({band.name: need for band in bands}, relieve=True)
        if found is None:
            return False
        # There is room now; the pages themselves go back into the lists, where the step pops them.
        self.pool.free("full", found["full"], live=need, follower_live=need)
        self.refill_tables()
        return True

    def step(self, advance: np.ndarray | None = None, *, known: bool = True) -> bool:
        """A round's memory work: one launch, of the captured graph where there is one.

        Parameters
        ----------
        advance : int64 array, shape (seated,), optional
            Tokens by which each seated request advances. By default 1, and 0 in a request's first round. Copied to the device where that
            holds something else.
        known : bool
            False where ``state.advance`` was written on the device, by a sampler. The host then holds bounds until `arrived`.

        Returns
        -------
        bool
            False, with nothing launched, where the magazines might be short: see `ready`.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            `advance` is no count from 0 to the lookahead for each seated request, or goes beyond a request's pages; counts are given where
            rounds wait for theirs, or with ``known=False``; a seated request has ended (see `end`), or may need more tokens than its row has.
            Nothing is launched.
        """
        if self._ended:
            self._refuse_ended()
        if advance is None and known and (self._covered or self._foresee()):
            if not self._covered and not self._cover():
                return False
            self._launch()
            self.rounds += 1
            self._launched += 1
            self._covered -= 1
            return True
        if advance is None and not known and self._roomy:
            # The most that any round pops; tighter bounds would take a look at every request.
            need = len(self.rows) * -(-self.state.lookahead // self.page_size)
            if need <= self._stock_count():
                self._launch()
                self.rounds += 1
                self.full.stepped(-need)
                if self.swa is not None:
                    self.swa.stepped(-need)
                self._blind += 1
                self._roomy -= 1
                self._advance = None
                if self._fresh:
                    self._fresh.difference_update(self.rows.tolist())
                return True
        return self._step(advance, known)

    def _stock_count(self) -> int:
        """Pages that a round can pop for certain."""
        held: int = min(self.full.id_count, self.full.hole_count)
        return held if self.swa is None else min(held, self.swa.hole_count)

    def _foresee(self) -> bool:
        """Whether the next round is forecast; where a forecast has run out, another one follows."""
        rounds = len(self._popped) - 1
        if rounds and self._launched == rounds:
            self._left -= rounds
            self._expect(min(LONG_FORECAST, self._left))
        return self._launched < len(self._popped) - 1

    def _cover(self) -> bool:
        """See for how many rounds of the forecast the magazines hold pages, after stocking them for the next one if need be."""
        popped, coming = self._popped, self._launched
        need = popped[coming + 1] - popped[coming]
        stock = self._stock_count()
        if need > stock:
            if not self._stock_ahead(popped[min(coming + AHEAD, len(popped) - 1)] - popped[coming]) and not self._stock(need, relieve=False):
                return False
            stock = self._stock_count()
        for pages in self._magazines:
            pages.owed = self._books
        self._covered = bisect_right(popped, popped[coming] + stock) - 1 - coming
        # No answer about capacity outlives the rounds.
        self.full.epoch.value += 1
        return True

    def _stock_ahead(self, need: int) -> bool:
        """Stock the magazines for many rounds, if that takes little of what the pool has: each time costs launches."""
        names = ("full",) if self.swa is None else ("full", "swa")
        # Asking costs as much as stocking, so a pool that is nearly full is not asked again in this forecast.
        self._plenty = self._plenty and self.pool.available(dict.fromkeys(names, need)) >= PLENTY
        return self._plenty and self._stock(need, relieve=False)

    def _step(self, advance: np.ndarray | None, known: bool) -> bool:
        """The same with all the arithmetic."""
        step = self._checked_advance(advance, known)
        if step is None:
            # Served or not: the device holds a sampler's counts now.
            self._advance = None
            self._expect(0)
        need = self.mirror.need(self.rows, step)
        if need > self._stock_count() and not self._stock(need, relieve=False):
            return False
        if step is not None:
            # The round is not the one that was forecast.
            self._expect(0)
            self._upload(step)
        # Only what was launched goes into the books.
        self._launch()
        self.rounds += 1
        self._fresh.difference_update(self.rows.tolist())
        popped, pushed = self._mirror.round(self.rows, step)
        if step is None:
            # Read-backs count what rounds in wait have done already: what the bounds grow by may be less than what this one does.
            popped, pushed = need, 0
        longest = int(self._mirror.high.lengths[self.rows].max()) if len(self.rows) else 0
        left = self._tokens - longest - self.state.lookahead
        self._roomy = max(left // self.state.lookahead, 0)
        self.full.stepped(-popped)
        if self.swa is not None:
            self.swa.stepped(pushed - popped)
        if advance is None and known:
            self._upload(np.ones(len(self.rows), np.int64))
            self._left = max(left, 0)
            self._expect(min(FORECAST, self._left))
        return True

    def arrived(self, advance: Any) -> None:
        """The accepted counts of the oldest round in wait have come, one per request that was seated then, those that have ended since included.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            No round waits, or `advance` is no count from 0 to the lookahead for each of its requests. Nothing changes.
        """
        self.mirror.arrive(advance)

    def capture(self, stream: Any) -> Graph:
        """Capture the step into a graph on a stream of its own; `step` launches it from now on. Kernels must be loaded (`gpukit.warmup`)."""
        with capture(stream, device=self.state.device) as graph:
            self._call(stream)
        graph.keep(self)
        self._graph = graph
        return graph

    def check(self) -> list[str]:
        """Compare mirror and device; empty where they agree. Waits for the device: what ``--debug-mirror`` does after every round."""
        state = self.state
        counts = Counts(*(to_host(array) for array in (state.lengths, state.pages, state.retired)))
        found = self.mirror.disagreements(counts, np.array(sorted(self._admitted), np.int64))
        served, refused, missing = to_host(state.status).tolist()
        if served != self.rounds or refused:
            found.append(f"rounds: expected {self.rounds} served, got {served} served and {refused} refused, {missing} pages short")
        for band in (self.full, self.swa):
            if band is not None:
                head, tail = to_host(band.holes.counters).tolist()
                if band.hole_count > tail - head or (self.mirror.exact and band.hole_count != tail - head and band.holes.device < 0):
                    found.append(f"{band.name}: expected {band.hole_count} pages in its list, got {tail - head}")
        return found

    def _checked_advance(self, advance: np.ndarray | None, known: bool) -> np.ndarray | None:
        """What the round advances by, None where only the device knows, after a check that every row has room for it."""
        step = self._known_advance(advance, known)
        most = np.where(np.isin(self.rows, list(self._fresh)), 0, self.state.lookahead) if step is None else step
        length = self._mirror.high.lengths[self.rows] + most + self.state.lookahead
        full = np.flatnonzero(length > self._tokens)
        if len(full):
            row = int(self.rows[full[0]])
            raise ArgumentError(
                f"rows: expected at most {self._tokens} tokens in a row, got up to {length[full[0]]} of the coming round in row {row}"
            )
        return step

    def _known_advance(self, advance: np.ndarray | None, known: bool) -> np.ndarray | None:
        if self._ended:
            self._refuse_ended()
        waiting = self.mirror.waiting
        if not known:
            if advance is not None:
                raise ArgumentError("advance: expected None where the device alone knows it (known=False), got counts")
            return None
        if waiting:
            name, expected, given = ("known", False, True) if advance is None else ("advance", None, "counts")
            raise ArgumentError(f"{name}: expected {expected} while {waiting} rounds wait for their counts, got {given}")
        if advance is not None:
            return self._mirror.checked(advance, self.rows)
        ones = np.ones(len(self.rows), np.int64)
        if self._fresh:
            ones[np.isin(self.rows, list(self._fresh))] = 0
        return ones

    def _refuse_ended(self) -> None:
        raise ArgumentError(f"rows: expected a new seating (seat), because {sorted(self._ended)} ended in their lanes, got the former one")

    def _upload(self, advance: np.ndarray) -> None:
        padded = np.zeros(self.state.lanes, np.int64)
        padded[: len(advance)] = advance
        if self._advance is None or not np.array_equal(padded, self._advance):
            self.state.advance[:] = to_device(padded, self.pool.like)
            self._advance = padded

    def _launch(self) -> None:
        if self._graph is not None:
            self._graph.launch()
        else:
            self._call()

    def _call(self, stream: Any = None) -> None:
        virtual = self.full.virtual
        assert virtual is not None
        swa = (None, None) if self.swa is None else ((self.swa.v2p, self.swa.p2v), self.swa.holes)
        decode_step(
            *(self.state, self.page_size, self.window, (self.full.v2p, self.full.p2v), swa[0], virtual, self.full.holes, swa[1]),
            stream=stream,
            signal=self.pool.signal,
        )
