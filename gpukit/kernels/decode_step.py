"""The memory work of a decode round in one launch: pages for the coming tokens, tombstones behind the window, locations, lengths, page tables.

Which pages may be used is in device rings, the *magazines*, that the host fills and empties between rounds (`gpukit.memory`); the step pops and
pushes. What it needs and leaves behind is a `DecodeState`. The tokens themselves, and their K and V, are none of its business.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from gpukit import arrays
from gpukit.arrays import ITEMSIZE, describe, vector
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels._plans import THREADS, blocks_for, page_shift, positive, refuse_other_device, refuse_overlap, signal_pointer, tables, whole
from gpukit.kernels.free_list import DevicePages
from gpukit.kernels.reference import decode_step as reference
from gpukit.kernels.reference.decode_step import MOST_RETIRED
from gpukit.launch import IDS, Kernel, host, operation
from gpukit.streams import choose

__all__ = ["MOST_RETIRED", "DecodeState", "decode_step"]

_DECODE_STEP = Kernel("decode_step", "decode_step", tuple(product(IDS, IDS)))

# The pages of a batch are summed in 40 bits, and the rows that are full in the 23 above them.
_MOST_PAGES = 2**40
_MOST_LANES = 2**23


class DecodeState:
    """The requests of an engine as a decode step sees them: what it keeps from round to round, what it is told, and what it writes.

    Parameters
    ----------
    rows : int32 or int64 array, shape (num_rows, columns)
        Virtual pages of each request, in order. Contiguous. The step writes the pages that it adds.
    lengths, pages, retired : int64 array, shape (num_rows,)
        Of each request: tokens so far, pages that it holds, and how many of its first pages left the window. The host sets them when a request
        is admitted; pages that others share count as retired, so that the step leaves them alone.
    requests, advance : int32 or int64 array, shape (lanes,)
        Row of the request in each lane, negative for padding, each row once; and by how many tokens it advances: 1, or what the last round
        accepted. Both of one dtype.
    lookahead : int
        Tokens that the coming round writes per request: 1, or the drafts and one more.
    locations : int64 array, shape (2, lanes, lookahead)
        Receives where the coming tokens are written in FULL and SWA; 0, the sink, for padding.
    kv_lengths, cu_lengths : int32 array, shape (lanes,) and (lanes + 1,)
        Receive ``length + lookahead``, 0 for padding, and the sums.
    full_table, swa_table : int32 array, shape (lanes, width)
        The page tables that attention reads. The step writes the entries that change: pages that it adds, and zeros for those that it retires.
        The host fills a lane's line when another request takes the lane (`metadata.decode_metadata`).
    status : int64 array, shape (3,)
        Rounds served, rounds refused, and the pages that were missing in the last refused one (0 where a row was full).

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape or device, or two that are written share memory.

    Examples
    --------
    >>> state = DecodeState.allocate(num_rows=8, columns=16, lanes=4, lookahead=3)
    >>> state
    DecodeState(8 rows of 16 pages, 4 lanes, lookahead 3, host memory)
    """

    def __init__(
        self,
        rows: Any,
        lengths: Any,
        pages: Any,
        retired: Any,
        requests: Any,
        advance: Any,
        lookahead: int,
        locations: Any,
        kv_lengths: Any,
        cu_lengths: Any,
        full_table: Any,
        swa_table: Any,
        status: Any,
    ):
        self.rows, self.lengths, self.pages, self.retired = rows, lengths, pages, retired
        self.requests, self.advance, self.lookahead = requests, advance, positive(lookahead, "lookahead")
        self.locations, self.kv_lengths, self.cu_lengths = locations, kv_lengths, cu_lengths
        self.full_table, self.swa_table, self.status = full_table, swa_table, status
        at, self.id_type, shape, _, self.device, _ = describe(rows, "rows")
        if self.id_type not in IDS:
            raise ArgumentTypeError(f"rows: expected dtype int32 or int64, got {self.id_type}")
        if len(shape) != 2:
            raise ArgumentError(f"rows: expected 2 dimensions, got shape {tuple(shape)}")
        self.num_rows, self.columns = shape
        if self.num_rows < 1:
            raise ArgumentError("rows: expected at least one row, got none")
        requests_at, self.lanes, self.length_type, _ = vector(requests, "requests", IDS, self.device)
        if self.lanes >= _MOST_LANES:
            raise ArgumentError(f"requests: expected fewer than {_MOST_LANES} lanes, got {self.lanes}")
        advance_at, given, _, _ = vector(advance, "advance", (self.length_type,), self.device)
        if given != self.lanes:
            raise ArgumentError(f"advance: expected shape ({self.lanes},) like requests, got ({given},)")
        if self.lanes * self.columns >= _MOST_PAGES:
            raise ArgumentError(f"rows: expected fewer than {_MOST_PAGES} pages in a batch, got {self.lanes} lanes of {self.columns}")
        _, _, table_shape, _, _, _ = describe(full_table, "full_table")
        if len(table_shape) != 2:
            raise ArgumentError(f"full_table: expected 2 dimensions, got shape {tuple(table_shape)}")
        self.width = table_shape[1]
        written = {
            "rows": (rows, self.id_type, (self.num_rows, self.columns)),
            "lengths": (lengths, "int64", (self.num_rows,)),
            "pages": (pages, "int64", (self.num_rows,)),
            "retired": (retired, "int64", (self.num_rows,)),
            "locations": (locations, "int64", (2, self.lanes, self.lookahead)),
            "kv_lengths": (kv_lengths, "int32", (self.lanes,)),
            "cu_lengths": (cu_lengths, "int32", (self.lanes + 1,)),
            "full_table": (full_table, "int32", (self.lanes, self.width)),
            "swa_table": (swa_table, "int32", (self.lanes, self.width)),
            "status": (status, "int64", (3,)),
        }
        self.spans = [
            ("requests", requests_at, self.lanes * ITEMSIZE[self.length_type]),
            ("advance", advance_at, self.lanes * ITEMSIZE[self.length_type]),
        ]
        pointers = {name: self._written(name, *what) for name, what in written.items()}
        self.inputs = (
            at, self.num_rows, self.columns, pointers["lengths"], pointers["pages"], pointers["retired"],
            requests_at, advance_at, self.lanes, self.lookahead,
        )  # fmt: skip
        self.outputs = (
            pointers["locations"], pointers["kv_lengths"], pointers["cu_lengths"],
            pointers["full_table"], pointers["swa_table"], self.width, pointers["status"],
        )  # fmt: skip

    def __repr__(self) -> str:
        place = arrays.place(self.device)
        return f"DecodeState({self.num_rows} rows of {self.columns} pages, {self.lanes} lanes, lookahead {self.lookahead}, {place})"

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        columns: int,
        lanes: int,
        lookahead: int = 1,
        *,
        width: int | None = None,
        row_type: str = "int64",
        like: Any = None,
    ) -> DecodeState:
        """Arrays of those sizes, with no request in any lane; page tables `width` pages wide, as wide as a row by default."""
        num_rows, columns, lanes = whole(num_rows, "num_rows", 1), whole(columns, "columns"), whole(lanes, "lanes")
        lookahead = positive(lookahead, "lookahead")
        width = columns if width is None else whole(width, "width")
        if row_type not in IDS:
            raise ArgumentTypeError(f"row_type: expected int32 or int64, got {row_type!r}")

        def zeros(*shape: int, dtype: str = "int64") -> Any:
            return arrays.full(shape, 0, dtype, like)

        return cls(
            zeros(num_rows, columns, dtype=row_type),
            *(zeros(num_rows), zeros(num_rows), zeros(num_rows)),
            *(arrays.full(lanes, -1, "int64", like), zeros(lanes), lookahead, zeros(2, lanes, lookahead)),
            *(zeros(lanes, dtype="int32"), zeros(lanes + 1, dtype="int32")),
            *(zeros(lanes, width, dtype="int32"), zeros(lanes, width, dtype="int32"), zeros(3)),
        )

    def _written(self, name: str, array: Any, dtype: str, expected: tuple[int, ...]) -> int:
        """Pointer of a contiguous array that the step writes, apart from those before it."""
        pointer, found, shape, strides, where, writable = describe(array, name)
        if where != self.device:
            refuse_other_device(name, where, self.device)
        if found != dtype:
            raise ArgumentTypeError(f"{name}: expected dtype {dtype}, got {found}")
        if tuple(shape) != expected:
            raise ArgumentError(f"{name}: expected shape {expected}, got {tuple(shape)}")
        if strides is not None:
            raise ArgumentError(f"{name}: expected a contiguous array, got element strides {tuple(strides)}")
        if not writable:
            raise ArgumentError(f"{name}: expected a writable array, got a read-only one")
        size = ITEMSIZE[dtype]
        for length in shape:
            size *= length
        for other, other_pointer, other_size in self.spans:
            refuse_overlap(name, pointer, size, other, other_pointer, other_size)
        self.spans.append((name, pointer, size))
        return pointer


@operation
def decode_step(
    state: DecodeState,
    page_size: int,
    window: int | None,
    full: tuple[Any, Any],
    swa: tuple[Any, Any] | None,
    virtual_pages: DevicePages,
    full_pages: DevicePages,
    swa_pages: DevicePages | None,
    *,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Do a round's memory work for a batch of requests.

    Parameters
    ----------
    state : DecodeState
        The requests; written.
    page_size : int
        Tokens per page.
    window : int or None
        Tokens that must stay behind the last whole page, as in `sliding_window.frontier`. None retires nothing.
    full : tuple of int64 arrays
        ``v2p`` and ``p2v`` of the FULL sub-pool; written.
    swa : tuple of int64 arrays, or None
        The same of the sliding-window sub-pool, with as many virtual pages; None where there is none.
    virtual_pages, full_pages, swa_pages : DevicePages
        The magazines: virtual pages, and physical ones of either sub-pool, that nothing is bound to. `swa_pages` is None where `swa` is.
    stream : stream, optional
        Where to launch; the current stream of the rows' library by default. Ops on one magazine must run on one stream.
    signal : Signal, optional
        Counts requests without a row and pages of a magazine that are none as ``out_of_range``; requests whose state makes no sense, such as an
        advance beyond the pages that they hold, as ``mismatch``; pages that were to be retired and are not live as ``unbound``; and, once for
        every page that is missing and every row that is full, ``exhausted``.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        A table or a magazine has the wrong dtype, shape or device, or two are one. Nothing is launched.

    Notes
    -----
    For each lane, in order: ``length += advance``; pages are popped and bound in FULL and SWA until there are enough for ``length + lookahead``
    tokens; pages that left the window are tombstoned in SWA and pushed back, at most `MOST_RETIRED` of them in a round, the rest later;
    locations, lengths, sums, and the entries of the page tables that changed are written. Pages for drafts that are rejected stay with the
    request and are used next, so nothing is ever rolled back. Lanes with a negative request, and those that make no sense, are padding.

    All or nothing: where a magazine is short, or a row is full, nothing changes but ``status``. Magazines are looked at as the round begins;
    what it pushes can be popped by the next one.

    One launch, no host synchronisation, no allocation, safe inside a capture: a captured step is a decode round for the price of a graph
    launch. One block serves up to 256 lanes; several count the batch each for itself, tombstones are put in order by a prefix sum over tiles
    (after D. Merrill and M. Garland, "Single-pass parallel prefix scan with decoupled look-back", 2016), and the block of the last tile moves
    lengths and counters. The answer is the same every time.

    Examples
    --------
    >>> from gpukit.kernels import page_table
    >>> full, swa = page_table.empty(9), page_table.empty(9)
    >>> virtual, physical, window_pages = (DevicePages(9) for _ in range(3))
    >>> for pages in (virtual, physical, window_pages):
    ...     pages.fill(np.arange(1, 9))
    >>> state = DecodeState.allocate(num_rows=2, columns=8, lanes=2)
    >>> state.requests[:] = [1, -1]  # one request, and a padded lane
    >>> decode_step(state, 4, None, full, swa, virtual, physical, window_pages)
    >>> state.advance[:] = 1
    >>> for _ in range(4):
    ...     decode_step(state, 4, None, full, swa, virtual, physical, window_pages)
    >>> state.lengths, state.rows[1, :3], state.locations[0, :, 0], state.kv_lengths
    (array([0, 4]), array([1, 2, 0]), array([8, 0]), array([5, 0], dtype=int32))
    """
    if not isinstance(state, DecodeState):
        raise ArgumentTypeError(f"state: expected a DecodeState, got {type(state).__name__}")
    device = state.device
    page_size = positive(page_size, "page_size")
    if state.lookahead > MOST_RETIRED * page_size:
        raise ArgumentError(f"state: expected a lookahead of at most {MOST_RETIRED} pages of {page_size} tokens, got {state.lookahead} tokens")
    window_tokens = -1 if window is None else whole(window, "window")
    full_v2p, virtual_rows, full_p2v, full_rows = _tables("full", full, device)
    swa_v2p = swa_p2v = swa_rows = 0
    if (swa is None) != (swa_pages is None):
        raise ArgumentError(f"swa_pages: expected a list exactly where there are swa tables, got {type(swa_pages).__name__}")
    if swa is not None:
        swa_v2p, rows, swa_p2v, swa_rows = _tables("swa", swa, device)
        if rows != virtual_rows:
            raise ArgumentError(f"swa: expected a v2p of {virtual_rows} rows like full's, got {rows}")
        for place, pointer, length in (("v2p", swa_v2p, rows), ("p2v", swa_p2v, swa_rows)):
            for other, other_pointer, other_rows in (("v2p", full_v2p, virtual_rows), ("p2v", full_p2v, full_rows)):
                refuse_overlap(f"swa {place}", pointer, 8 * length, f"full {other}", other_pointer, 8 * other_rows)
    magazines = {"virtual_pages": virtual_pages, "full_pages": full_pages, "swa_pages": swa_pages}
    rings: list[int] = []
    seen: list[DevicePages] = []
    for name, pages in magazines.items():
        if pages is None:
            rings += (0, 1, 0)
            continue
        rings += DevicePages.checked(pages, name, device, state.lanes)[:3]
        if any(pages is other for other in seen):
            raise ArgumentError(f"{name}: expected a list of its own, got one twice")
        seen.append(pages)
    if device < 0:
        return host(
            reference.decode_step,
            *(state, page_size, None if window_tokens < 0 else window_tokens, full, swa, virtual_pages, full_pages, swa_pages),
            signal=signal,
        )
    counters = signal_pointer(signal, device)
    arguments = (
        *state.inputs, page_size, page_shift(page_size), window_tokens,
        virtual_rows, full_v2p, full_p2v, full_rows, swa_v2p, swa_p2v, swa_rows,
        *rings, describe(virtual_pages.workspace)[0], *state.outputs, counters,
    )  # fmt: skip
    blocks = max(blocks_for(state.lanes), 1)
    return _DECODE_STEP.launch((state.id_type, state.length_type), device, choose(stream, state.rows), blocks, THREADS, arguments)


def _tables(name: str, pair: Any, device: int) -> tuple[int, int, int, int]:
    """Pointers and rows of a pair of tables; errors name the pair."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ArgumentTypeError(f"{name}: expected a pair of tables (v2p, p2v), got {type(pair).__name__}")
    try:
        return tables(pair[0], pair[1], device)
    except ArgumentError as error:
        raise type(error)(f"{name} {error}") from None
