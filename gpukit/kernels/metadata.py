"""Attention metadata: page tables, token streams, lengths and write locations of a batch, from its rows of virtual ids.

A row is what the engine keeps per request: ``rows[r, t]`` is the virtual id of token t (granularity "token"), or ``rows[r, c]`` the virtual
page of tokens from ``c * page_size`` on ("page"). A lane of the batch reads the row of its request. Consumers ask by address space, through
`AddressSpaces`, and never hold the pool; who owns and binds pages is for `page_table` and `free_list`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpukit import arrays
from gpukit.arrays import ITEMSIZE, describe, vector
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels._plans import THREADS, blocks_for, page_shift, positive, refuse_other_device, refuse_overlap, signal_pointer, whole
from gpukit.kernels._plans import read_table as readable_table
from gpukit.kernels.reference import metadata as reference
from gpukit.launch import IDS, Kernel, host, nothing, operation
from gpukit.streams import choose

__all__ = [
    "AddressSpaces",
    "decode_metadata",
    "gather_translate_window",
    "read_stream",
    "read_table",
    "read_table_and_stream",
    "replay_state_indices",
]

_BY_ID = tuple((dtype,) for dtype in IDS)
_READ_TABLE = Kernel("metadata", "read_table", _BY_ID)
_READ_STREAM = Kernel("metadata", "read_stream", _BY_ID)
_READ_TABLE_AND_STREAM = Kernel("metadata", "read_table_and_stream", _BY_ID)
_DECODE_METADATA = Kernel("metadata", "decode_metadata", _BY_ID)
_GATHER_TRANSLATE_WINDOW = Kernel("metadata", "gather_translate_window", _BY_ID)
_REPLAY_STATE_INDICES = Kernel("metadata", "replay_state_indices", _BY_ID)

_INT32 = ("int32",)
_INT64 = ("int64",)

# Threads that share out the lanes of a batch: half of what fits the largest devices at once. More lanes get a warp each.
_MOST_THREADS = 1 << 17
_LEAST_WORKER_BITS = 5

# Blocks of a window gather: two per multiprocessor of the largest devices. Each sums all widths for itself, so more would cost more.
_MOST_BLOCKS = 264

_MOST_SPACES = 4


class AddressSpaces:
    """The tables by which consumers of a pool address it; immutable.

    Parameters
    ----------
    full : int64 array, shape (num_virtual + 1,), or None
        ``v2p`` of the FULL sub-pool. None where virtual pages are physical ones.
    swa, state : int64 array, optional
        ``v2p`` of the sliding-window and of the recurrent-state sub-pool. A consumer without a table of its own falls back to FULL.

    Examples
    --------
    >>> spaces = AddressSpaces(np.array([0, 2, 1, -1]), swa=np.array([0, -1, 1, -1]))
    >>> spaces.table("swa"), spaces.table("state"), spaces.table("virtual")
    (array([ 0, -1,  1, -1]), array([ 0,  2,  1, -1]), None)
    """

    __slots__ = ("_tables",)
    _tables: dict[str, Any]

    def __init__(self, full: Any, *, swa: Any = None, state: Any = None):
        tables = {"virtual": None, "full": full, "swa": full if swa is None else swa, "state": full if state is None else state}
        object.__setattr__(self, "_tables", tables)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name}: an AddressSpaces is immutable, make a new one")

    def __repr__(self) -> str:
        own = [space for space in ("swa", "state") if self._tables[space] is not self._tables["full"]]
        return f"AddressSpaces({', '.join(['full', *own])})"

    def table(self, space: str) -> Any:
        """The ``v2p`` of a space: ``"virtual"`` (None: ids stay as they are), ``"full"``, ``"swa"`` or ``"state"``.

        Raises
        ------
        ArgumentError
            No such space.
        """
        try:
            return self._tables[space]
        except (KeyError, TypeError):
            raise ArgumentError(f"space: expected one of {', '.join(self._tables)}, got {space!r}") from None


def _pair(pointer: int, dtype: str) -> tuple[int, int]:
    """An int32 or int64 array as the two pointers that kernels take, one of them null."""
    return (pointer, 0) if dtype == "int32" else (0, pointer)


def _per_lane(array: Any, name: str, lanes: int, device: int, like: str) -> tuple[int, int]:
    """Pointers of an array with one id per lane."""
    pointer, length, dtype, _ = vector(array, name, IDS, device)
    if length != lanes:
        raise ArgumentError(f"{name}: expected shape ({lanes},) like {like}, got ({length},)")
    return _pair(pointer, dtype)


def _number_of_lanes(value: Any, name: str, lanes: int, device: int) -> tuple[int, int, int]:
    """A number of lanes that the host knows, or else a device array holds: ``(number, pointer, pointer)``. None is all of them."""
    if value is None:
        return lanes, 0, 0
    if isinstance(value, int | np.integer):
        number = whole(value, name)
        if number > lanes:
            raise ArgumentError(f"{name}: expected 0 … {lanes} lanes, got {number}")
        return number, 0, 0
    pointer, length, dtype, _ = vector(value, name, IDS, device)
    if length != 1:
        raise ArgumentError(f"{name}: expected an integer or an array of shape (1,), got shape ({length},)")
    return 0, *_pair(pointer, dtype)


def _rows(rows: Any) -> tuple[tuple[int, ...], int, int, str, int]:
    """Kernel arguments of the rows, their number and width, dtype and device."""
    pointer, (num_rows, width), strides, id_type, device = arrays.matrix(rows, "rows", IDS)
    return (pointer, num_rows, *strides, width), num_rows, width, id_type, device


def _requests(request_indices: Any, lanes: int, num_rows: int, device: int, like: str) -> tuple[int, int]:
    """Pointers of the request indices; without them there must be a row for every lane."""
    if request_indices is not None:
        return _per_lane(request_indices, "request_indices", lanes, device, like)
    if lanes > num_rows:
        raise ArgumentError(f"rows: expected at least {lanes} rows like {like}, as there are no request_indices; got {num_rows}")
    return 0, 0


def _batch(
    rows: Any, lens: Any, page_size: int, delta: int, request_indices: Any, granularity: str, valid: Any
) -> tuple[int, str, int, int, tuple[int, ...], tuple[int, int]]:
    """Check what the read ops begin with: ``(device, dtype of the rows, lanes, tokens of a row, kernel arguments, address and bytes of lens)``."""
    row_arguments, num_rows, width, id_type, device = _rows(rows)
    pointer, lanes, length_type, _ = vector(lens, "lens", IDS, device)
    requests = _requests(request_indices, lanes, num_rows, device, "lens")
    shift = page_shift(page_size)
    if granularity == "token":
        entries: tuple[int, int, int, int] = (page_size, shift, 1, 0)
    elif granularity == "page":
        entries = (1, 0, page_size, shift)
    else:
        raise ArgumentError(f"granularity: expected 'token' or 'page', got {granularity!r}")
    lengths = (*_pair(pointer, length_type), lanes, delta)
    arguments = (*row_arguments, *entries, page_size, shift, *lengths, *requests, *_number_of_lanes(valid, "valid", lanes, device))
    return device, id_type, lanes, width * entries[2], arguments, (pointer, ITEMSIZE[length_type] * lanes)


def _table_out(out: Any, name: str, lanes: int, device: int) -> tuple[int, int, int, int]:
    """Pointer, width and strides of a page table to write."""
    pointer, dtype, shape, strides, where, writable = describe(out, name)
    refuse_other_device(name, where, device)
    if dtype != "int32":
        raise ArgumentTypeError(f"{name}: expected dtype int32, got {dtype}")
    if not writable:
        raise ArgumentError(f"{name}: expected a writable array, got a read-only one")
    if len(shape) != 2 or shape[0] != lanes:
        raise ArgumentError(f"{name}: expected shape ({lanes}, pages), got {tuple(shape)}")
    row_stride, column_stride = (shape[1], 1) if strides is None else strides
    return pointer, shape[1], row_stride, column_stride


def _stream_out(indptr: Any, out: Any, name: str, lanes: int, device: int) -> tuple[int, int, int, int]:
    """Pointers of the row starts and of the stream to write, and the stream's length."""
    starts, length, _, _ = vector(indptr, "indptr", _INT32, device)
    if length != lanes + 1:
        raise ArgumentError(f"indptr: expected shape ({lanes + 1},), one more than lens, got ({length},)")
    pointer, room, dtype, _ = arrays.output(out, name, IDS, device)
    return starts, *_pair(pointer, dtype), room


def _worker_bits(lanes: int, items: int) -> int:
    """log2 of the threads per lane: one per item, but no more than the lanes' share of the device. Fixed by shapes, never by lengths."""
    share = max((_MOST_THREADS // lanes).bit_length() - 1, _LEAST_WORKER_BITS)
    return min((max(items, 1) - 1).bit_length(), share)


@operation
def read_table(
    rows: Any,
    lens: Any,
    v2p: Any,
    page_size: int,
    *,
    out: Any,
    delta: int = 0,
    zero_tail: bool = False,
    request_indices: Any = None,
    granularity: str = "token",
    valid: Any = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Page table of a batch: ``out[b, c]`` is the physical page of tokens ``[c * page_size, (c + 1) * page_size)`` of lane b.

    Parameters
    ----------
    rows : int32 or int64 array, shape (requests, width)
        Virtual ids, token- or page-granular; any strides.
    lens : int32 or int64 array, shape (B,)
        Tokens of each lane; negative is 0.
    v2p : int64 array or None
        Table of the address space to read in; None is the virtual space itself.
    page_size : int
        Tokens per page, at least 1.
    out : int32 array, shape (B, max_pages)
        The table to write, any strides. Lane b gets ``ceil((lens[b] + delta) / page_size)`` entries, cut at this width and at the row's.
    delta : int
        Tokens on top of every length, as of drafts that are to be verified.
    zero_tail : bool
        Also write 0, the sink, from there to the end of each lane. Otherwise the tail is left as it is.
    request_indices : int32 or int64 array, shape (B,), optional
        Row of each lane; row b by default. A lane whose index has no row counts as ``out_of_range`` and has length 0.
    granularity : {"token", "page"}
        Whether `rows` hold an id per token or per page.
    valid : int, or int32 or int64 array of shape (1,), optional
        Number of live lanes; the others are padding of length 0. All are live by default.
    stream : stream, optional
        Where to launch; the current stream of `rows`' library by default.
    signal : Signal, optional
        Counts ``out_of_range`` (no such row, or page past the table) and ``unbound``. Negative ids are padding and not counted.

    Returns
    -------
    int32 array, shape (B, max_pages)
        `out`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape or device, or a number is out of its range. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, no allocation, safe inside a capture. The layout is FlashAttention's ``page_table``. Every lane has
    a fixed number of threads that stride over its pages as far as the device's lengths reach, so a replay costs what the present lengths
    cost, not the longest possible ones (but `zero_tail` writes the whole width). Negative and unbound pages and those past the table
    become 0.

    Examples
    --------
    >>> v2p = np.array([0, 8, 3, -1, 5, -1])
    >>> rows = np.array([[4, 5, 6, 7, 16, 17, 0, 0], [8, 9, 0, 0, 0, 0, 0, 0]])
    >>> read_table(rows, np.array([6, 2]), v2p, 4, out=np.full((2, 3), -7, np.int32), zero_tail=True)
    array([[8, 5, 0], [3, 0, 0]], dtype=int32)
    """
    page_size, delta = positive(page_size, "page_size"), whole(delta, "delta", -(2**31), 2**31)
    device, id_type, lanes, _, batch, _ = _batch(rows, lens, page_size, delta, request_indices, granularity, valid)
    table = readable_table(v2p, "v2p", device)
    target = _table_out(out, "out", lanes, device)
    if device < 0:
        return host(
            reference.read_table, rows, lens, v2p, page_size, out=out, delta=delta, zero_tail=zero_tail,
            request_indices=request_indices, granularity=granularity, valid=valid, signal=signal,
        )  # fmt: skip
    counters = signal_pointer(signal, device)
    if lanes == 0:
        return nothing(out)
    bits = _worker_bits(lanes, target[1])
    arguments = (*batch, *table, *target, int(bool(zero_tail)), bits, counters)
    return _READ_TABLE.launch((id_type,), device, choose(stream, rows), blocks_for(lanes << bits), THREADS, arguments, out)


@operation
def read_stream(
    rows: Any,
    lens: Any,
    v2p: Any,
    page_size: int,
    indptr: Any,
    *,
    out: Any,
    delta: int = 0,
    request_indices: Any = None,
    granularity: str = "token",
    valid: Any = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Physical tokens of a batch, packed: ``out[indptr[b] + t]`` is token t of lane b.

    Parameters
    ----------
    rows, lens, v2p, page_size
        As in `read_table`.
    indptr : int32 array, shape (B + 1,)
        Where each lane's tokens begin in `out`, and where the last one's end.
    out : int32 or int64 array, shape (at least ``indptr[B]``,)
        The stream to write. Lane b gets ``lens[b] + delta`` tokens, cut at ``indptr[b + 1]``, at the end of `out` and at the row's.
    delta, request_indices, granularity, valid, stream
        As in `read_table`.
    signal : Signal, optional
        As in `read_table`, per token; also ``mismatch`` for every lane with tokens whose ``indptr[b]`` is negative: it is skipped.

    Returns
    -------
    int32 or int64 array
        `out`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape or device, or a number is out of its range. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, no allocation, safe inside a capture. The layout is FlashInfer's ``kv_indices`` by ``kv_indptr``,
    for pages of one token; a strided loop per lane writes it, as in SGLang's ``create_flashinfer_kv_indices_triton``. Lanes of an `indptr`
    that does not ascend may overwrite each other.

    Examples
    --------
    >>> v2p = np.array([0, 8, 3, -1, 5, -1])
    >>> rows = np.array([[1, 4], [2, 0]])
    >>> indptr = np.array([0, 6, 8], np.int32)
    >>> read_stream(rows, np.array([6, 2]), v2p, 4, indptr, out=np.zeros(8, np.int64), granularity="page")
    array([32, 33, 34, 35, 20, 21, 12, 13])
    """
    page_size, delta = positive(page_size, "page_size"), whole(delta, "delta", -(2**31), 2**31)
    device, id_type, lanes, tokens, batch, _ = _batch(rows, lens, page_size, delta, request_indices, granularity, valid)
    table = readable_table(v2p, "v2p", device)
    target = _stream_out(indptr, out, "out", lanes, device)
    if device < 0:
        return host(
            reference.read_stream, rows, lens, v2p, page_size, indptr, out=out, delta=delta,
            request_indices=request_indices, granularity=granularity, valid=valid, signal=signal,
        )  # fmt: skip
    counters = signal_pointer(signal, device)
    if lanes == 0:
        return nothing(out)
    bits = _worker_bits(lanes, tokens)
    arguments = (*batch, *table, *target, bits, counters)
    return _READ_STREAM.launch((id_type,), device, choose(stream, rows), blocks_for(lanes << bits), THREADS, arguments, out)


@operation
def read_table_and_stream(
    rows: Any,
    lens: Any,
    v2p: Any,
    page_size: int,
    indptr: Any,
    *,
    table_out: Any,
    stream_out: Any,
    delta: int = 0,
    zero_tail: bool = False,
    request_indices: Any = None,
    granularity: str = "token",
    valid: Any = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """What `read_table` and `read_stream` write, from one reading of the rows and in one launch.

    Parameters
    ----------
    rows, lens, v2p, page_size, delta, zero_tail, request_indices, granularity, valid, stream
        As in `read_table`.
    indptr : int32 array, shape (B + 1,)
        As in `read_stream`.
    table_out : int32 array, shape (B, max_pages)
        The table to write, as `out` of `read_table`.
    stream_out : int32 or int64 array, shape (at least ``indptr[B]``,)
        The stream to write, as `out` of `read_stream`.
    signal : Signal, optional
        Counts what the two ops would count: a bad page once for the table and once for each of its tokens in the stream, but a lane without
        a row only once.

    Returns
    -------
    table_out, stream_out

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape or device, or a number is out of its range. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, no allocation, safe inside a capture.

    Examples
    --------
    >>> v2p, rows = np.array([0, 8, 3, -1, 5, -1]), np.array([[1, 4], [2, 0]])
    >>> read_table_and_stream(
    ...     rows, np.array([6, 2]), v2p, 4, np.array([0, 6, 8], np.int32), granularity="page",
    ...     table_out=np.zeros((2, 2), np.int32), stream_out=np.zeros(8, np.int64),
    ... )
    (array([[8, 5], [3, 0]], dtype=int32), array([32, 33, 34, 35, 20, 21, 12, 13]))
    """
    page_size, delta = positive(page_size, "page_size"), whole(delta, "delta", -(2**31), 2**31)
    device, id_type, lanes, tokens, batch, _ = _batch(rows, lens, page_size, delta, request_indices, granularity, valid)
    table = readable_table(v2p, "v2p", device)
    table_target = _table_out(table_out, "table_out", lanes, device)
    stream_target = _stream_out(indptr, stream_out, "stream_out", lanes, device)
    if device < 0:
        return host(
            reference.read_table_and_stream, rows, lens, v2p, page_size, indptr, table_out=table_out, stream_out=stream_out,
            delta=delta, zero_tail=zero_tail, request_indices=request_indices, granularity=granularity, valid=valid, signal=signal,
        )  # fmt: skip
    counters = signal_pointer(signal, device)
    result = (table_out, stream_out)
    if lanes == 0:
        return nothing(result)
    bits = _worker_bits(lanes, max(tokens, table_target[1]))
    arguments = (*batch, *table, *table_target, int(bool(zero_tail)), *stream_target, bits, counters)
    return _READ_TABLE_AND_STREAM.launch((id_type,), device, choose(stream, rows), blocks_for(lanes << bits), THREADS, arguments, result)


@operation
def decode_metadata(
    rows: Any,
    lens: Any,
    spaces: AddressSpaces,
    page_size: int,
    *,
    lengths_out: Any,
    cu_lengths_out: Any,
    full_out: Any,
    swa_out: Any = None,
    delta: int = 0,
    zero_tail: bool = True,
    request_indices: Any = None,
    granularity: str = "token",
    valid: Any = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Everything an attention kernel reads of a decode or verify batch: lengths, cumulative lengths, FULL and SWA page tables.

    Parameters
    ----------
    rows, lens, page_size
        As in `read_table`.
    spaces : AddressSpaces
        Where FULL and SWA pages lie; without a table of its own SWA reads FULL.
    lengths_out : int32 array, shape (B,)
        Receives ``lens[b] + delta`` of live lanes, 0 of padding.
    cu_lengths_out : int32 array, shape (B + 1,)
        Receives the running sum of those, from 0.
    full_out : int32 array, shape (B, max_pages)
        Receives the FULL page table, as `read_table` writes it; any strides.
    swa_out : int32 array, shape (B, max_pages), optional
        Receives the SWA page table; its width may differ. Pages that left the window are 0.
    delta : int
        Tokens on top of every length: 0 for decode, the number of drafts for verify.
    zero_tail : bool
        Write 0, the sink, behind each lane's pages; on by default, for captured buffers.
    request_indices, granularity, valid, stream
        As in `read_table`.
    signal : Signal, optional
        Counts ``out_of_range`` and ``unbound`` of the FULL table only: an SWA page without a place is ordinary.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape or device, or a number is out of its range. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, no allocation, safe inside a capture, and one reading of the rows for both tables. The layouts are
    those of FlashAttention: ``cache_seqlens``, ``cu_seqlens_k``, ``page_table``. The first blocks write the lengths, each summing those
    before its own for itself instead of waiting for other blocks; the rest write the tables like `read_table`.

    Examples
    --------
    >>> spaces = AddressSpaces(np.array([0, 8, 3, -1, 5, -1]), swa=np.array([0, -1, 3, -1, 2, -1]))
    >>> rows = np.array([[1, 4], [2, 0]])
    >>> lengths, sums = np.zeros(2, np.int32), np.zeros(3, np.int32)
    >>> full, swa = np.zeros((2, 3), np.int32), np.zeros((2, 3), np.int32)
    >>> decode_metadata(
    ...     rows, np.array([6, 2]), spaces, 4, granularity="page",
    ...     lengths_out=lengths, cu_lengths_out=sums, full_out=full, swa_out=swa,
    ... )
    >>> lengths, sums
    (array([6, 2], dtype=int32), array([0, 6, 8], dtype=int32))
    >>> full, swa
    (array([[8, 5, 0], [3, 0, 0]], dtype=int32), array([[0, 2, 0], [3, 0, 0]], dtype=int32))
    """
    page_size, delta = positive(page_size, "page_size"), whole(delta, "delta", -(2**31), 2**31)
    device, id_type, lanes, _, batch, read = _batch(rows, lens, page_size, delta, request_indices, granularity, valid)
    if not isinstance(spaces, AddressSpaces):
        raise ArgumentTypeError(f"spaces: expected an AddressSpaces, got {type(spaces).__name__}")
    lengths = arrays.output(lengths_out, "lengths_out", _INT32, device, lanes)[0]
    sums = arrays.output(cu_lengths_out, "cu_lengths_out", _INT32, device, lanes + 1)[0]
    # Every block sums the lengths before its own again.
    refuse_overlap("lengths_out", lengths, 4 * lanes, "lens", *read)
    refuse_overlap("cu_lengths_out", sums, 4 * lanes + 4, "lens", *read)
    full = (*readable_table(spaces.table("full"), "spaces.full", device), *_table_out(full_out, "full_out", lanes, device))
    swa = (0, 0, 0, 0, 0, 0)
    if swa_out is not None:
        swa = (*readable_table(spaces.table("swa"), "spaces.swa", device), *_table_out(swa_out, "swa_out", lanes, device))
    if device < 0:
        return host(
            reference.decode_metadata, rows, lens, spaces, page_size,
            lengths_out=lengths_out, cu_lengths_out=cu_lengths_out, full_out=full_out, swa_out=swa_out, delta=delta, zero_tail=zero_tail,
            request_indices=request_indices, granularity=granularity, valid=valid, signal=signal,
        )  # fmt: skip
    bits = _worker_bits(max(lanes, 1), max(full[3], swa[3]))
    # Even an empty batch has a first cumulative length.
    blocks = max(blocks_for(lanes), 1) + blocks_for(lanes << bits)
    arguments = (*batch, lengths, sums, *full, *swa, int(bool(zero_tail)), bits, signal_pointer(signal, device))
    return _DECODE_METADATA.launch((id_type,), device, choose(stream, rows), blocks, THREADS, arguments)


@operation
def gather_translate_window(
    rows: Any,
    starts: Any,
    width: Any,
    tables: Sequence[Any],
    page_size: int,
    *,
    outs: Sequence[Any],
    virtual_out: Any = None,
    request_indices: Any = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Tokens ``[start, start + width)`` of each request, packed, in virtual space and in several physical ones: a draft's write window.

    Parameters
    ----------
    rows : int32 or int64 array, shape (requests, tokens)
        Virtual token ids; any strides.
    starts : int32 or int64 array, shape (B,)
        First token of each request's window. A token outside its row becomes 0 and counts as ``out_of_range``.
    width : int, or int32 or int64 array, shape (B,)
        Tokens of every window, or of each one (negative is 0).
    tables : sequence of up to 4 int64 arrays or None
        ``v2p`` of each physical space; None is the virtual space itself.
    page_size : int
        Tokens per page, at least 1.
    outs : sequence of int64 arrays
        One per table. With one `width` each has at least ``B * width`` entries, of which that many are written. With an array of widths all
        have one length; the windows are packed by their running sum, what finds no room is dropped, leftover entries become 0.
    virtual_out : int64 array, optional
        Receives the virtual tokens, negative ones as 0; shaped like `outs`.
    request_indices : int32 or int64 array, shape (B,), optional
        Row of each lane; row b by default. The window of a lane whose index has no row becomes 0 and counts once as ``out_of_range``.
    stream : stream, optional
        Where to launch; the current stream of `rows`' library by default.
    signal : Signal, optional
        Counts ``out_of_range`` and ``unbound`` per token and space, and one ``mismatch`` if the widths' sum is more than the outputs hold.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape or device, or a number is out of its range. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, no allocation, safe inside a capture; each row entry is read once for all spaces. For a width array
    every block computes the running sum for itself, at one sum per 256th of the batch, and finds its requests by binary search.

    Examples
    --------
    >>> rows, full, swa = np.array([[4, 5, 6, 7], [8, 9, 0, 0]]), np.array([0, 8, 3, -1]), np.array([0, -1, 2, -1])
    >>> outs, virtual = [np.zeros(4, np.int64), np.zeros(4, np.int64)], np.zeros(4, np.int64)
    >>> gather_translate_window(rows, np.array([2, 0]), 2, [full, swa], 4, outs=outs, virtual_out=virtual)
    >>> outs, virtual
    ([array([34, 35, 12, 13]), array([0, 0, 8, 9])], array([6, 7, 8, 9]))
    """
    row_arguments, num_rows, _, id_type, device = _rows(rows)
    starts_at, lanes, start_type, _ = vector(starts, "starts", IDS, device)
    requests = _requests(request_indices, lanes, num_rows, device, "starts")
    page_size = positive(page_size, "page_size")
    uniform = isinstance(width, int | np.integer)
    widths = (whole(width, "width"), 0, 0) if uniform else (-1, *_per_lane(width, "width", lanes, device, "starts"))
    if len(tables) != len(outs) or len(tables) > _MOST_SPACES:
        raise ArgumentError(f"outs: expected one for each of up to {_MOST_SPACES} tables, got {len(outs)} for {len(tables)} tables")
    room = lanes * widths[0] if uniform else -1
    spaces: list[int] = []
    for number, (v2p, out) in enumerate(zip(tables, outs, strict=True)):
        pointer, room = _window_out(out, f"outs[{number}]", room, uniform, device)
        spaces += (*readable_table(v2p, f"tables[{number}]", device), pointer)
    virtual = 0
    if virtual_out is not None:
        virtual, room = _window_out(virtual_out, "virtual_out", room, uniform, device)
    elif not outs:
        raise ArgumentError("outs: expected at least one output, or virtual_out, got neither")
    if device < 0:
        return host(
            reference.gather_translate_window, rows, starts, width, tables, page_size,
            outs=outs, virtual_out=virtual_out, request_indices=request_indices, signal=signal,
        )  # fmt: skip
    counters = signal_pointer(signal, device)
    if room == 0 and (lanes == 0 or signal is None):
        return nothing()
    spaces += [0] * (3 * _MOST_SPACES - len(spaces))
    arguments = (
        *row_arguments, *_pair(starts_at, start_type), lanes, *widths, *requests, page_size, page_shift(page_size),
        *spaces, virtual, room, counters,
    )  # fmt: skip
    # A launch with no room only counts.
    blocks = min(max(blocks_for(room), 1), _MOST_BLOCKS)
    return _GATHER_TRANSLATE_WINDOW.launch((id_type,), device, choose(stream, rows), blocks, THREADS, arguments)


def _window_out(out: Any, name: str, room: int, uniform: bool, device: int) -> tuple[int, int]:
    """Pointer of a window output and the room of them all: what a uniform window needs, or the one length of packed outputs."""
    pointer, length, _, _ = arrays.output(out, name, _INT64, device)
    if uniform and length < room:
        raise ArgumentError(f"{name}: expected at least {room} entries, width for each of starts, got {length}")
    if not uniform and room not in (-1, length):
        raise ArgumentError(f"{name}: expected shape ({room},) like the other outputs, got ({length},)")
    return pointer, room if uniform else length


@operation
def replay_state_indices(
    request_indices: Any,
    mapping: Any,
    v2p: Any,
    valid: Any,
    total: Any,
    out: Any,
    *,
    track_in: Any = None,
    track_out: Any = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Recurrent-state slots of a captured batch: live lanes get their request's slot, padding gets -1.

    Parameters
    ----------
    request_indices : int32 or int64 array, shape (B,)
        Request of each lane; those of padded lanes are set to 0 in place, so that what replays with them reads a row that exists.
    mapping : int32 or int64 array, shape (requests,)
        Virtual state slot of each request.
    v2p : int64 array or None
        Table of the state space; None is the virtual space itself.
    valid, total : int, or int32 or int64 array of shape (1,)
        Lanes below `valid` are live, those from there to `total` are padding, those from `total` on are left untouched everywhere.
    out : int32 array, shape (B,)
        Receives the physical slot: 0, the sink, where a live lane has none.
    track_in : int32 or int64 array, shape (B,), optional
        Virtual slots that the states shall also be written to, as for prefix caching.
    track_out : int32 array, shape (B,), optional
        Receives their physical slots, -1 for padding. Given exactly when `track_in` is.
    stream : stream, optional
        Where to launch; the current stream of `request_indices`' library by default.
    signal : Signal, optional
        Counts ``out_of_range`` (no such request, or slot past the table) and ``unbound``.

    Returns
    -------
    int32 array, shape (B,)
        `out`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape or device, or a number is out of its range. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, no allocation, safe inside a capture.

    Examples
    --------
    >>> requests = np.array([1, 0, 9, 9])
    >>> replay_state_indices(requests, np.array([2, 1]), np.array([0, 5, 3, -1]), 2, 3, np.full(4, 77, np.int32))
    array([ 5,  3, -1, 77], dtype=int32)
    >>> requests
    array([1, 0, 0, 9])
    """
    requests, lanes, request_type, device = vector(request_indices, "request_indices", IDS)
    arrays.require_writable(request_indices, "request_indices")
    mapping_at, mapping_length, id_type, _ = vector(mapping, "mapping", IDS, device)
    table = readable_table(v2p, "v2p", device)
    numbers = (*_number_of_lanes(valid, "valid", lanes, device), *_number_of_lanes(total, "total", lanes, device))
    slots = arrays.output(out, "out", _INT32, device, lanes)[0]
    refuse_overlap("out", slots, 4 * lanes, "request_indices", requests, ITEMSIZE[request_type] * lanes)
    track = (0, 0, 0)
    if (track_in is None) != (track_out is None):
        missing, given = ("track_in", "track_out") if track_in is None else ("track_out", "track_in")
        raise ArgumentError(f"{missing}: expected an array, as {given} is given, got None")
    if track_in is not None:
        virtual = _per_lane(track_in, "track_in", lanes, device, "request_indices")
        track = (*virtual, arrays.output(track_out, "track_out", _INT32, device, lanes)[0])
    if device < 0:
        return host(
            reference.replay_state_indices, request_indices, mapping, v2p, valid, total, out,
            track_in=track_in, track_out=track_out, signal=signal,
        )  # fmt: skip
    counters = signal_pointer(signal, device)
    if lanes == 0:
        return nothing(out)
    arguments = (*_pair(requests, request_type), lanes, mapping_at, mapping_length, *table, *numbers, slots, *track, counters)
    return _REPLAY_STATE_INDICES.launch((id_type,), device, choose(stream, request_indices), blocks_for(lanes), THREADS, arguments, out)
