"""Sliding-window attention: give back the pages that left the window, or a whole segment in both sub-pools.

The FULL sub-pool mints virtual pages; the sliding-window sub-pool binds the same ids to pages of its own. A page that left the window is
retired in the latter alone: its virtual id and its FULL page stay. Which tokens a window still needs, `frontier` says for cached keys;
everything else about windows is the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from gpukit import devices
from gpukit.arrays import ITEMSIZE, describe, is_host, matrix, vector
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels._plans import THREADS, page_shift, positive, refuse_overlap, signal_pointer, table, tables, whole
from gpukit.kernels.free_list import DevicePages
from gpukit.kernels.reference import sliding_window as reference
from gpukit.launch import IDS, Kernel, host, nothing, operation
from gpukit.streams import choose

__all__ = ["free_segment", "frontier", "retire"]

_RETIRE = Kernel("sliding_window", "retire", tuple(product(IDS, IDS)))
_FREE_SEGMENT = Kernel("sliding_window", "free_segment", tuple((dtype,) for dtype in IDS))


@operation
def retire(
    rows: Any,
    starts: Any,
    stops: Any,
    page_size: int,
    v2p: Any,
    p2v: Any,
    pages: DevicePages,
    *,
    request_indices: Any = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Unbind the pages of each request that left the window, and append them to a device-driven list.

    Parameters
    ----------
    rows : int32 or int64 array, shape (num_rows, width)
        Virtual token ids of the requests, of any strides. The first token of a page speaks for it.
    starts, stops : int32 or int64 array or sequence of int, shape (requests,)
        Segment of each request in tokens. Its whole pages from `start` on are retired, cut where the row ends; ``stop <= start`` retires
        nothing. `start` lies at a page boundary. On the device or in host memory, whatever `rows` is on.
    page_size : int
        Tokens per page.
    v2p, p2v : int64 array
        The sliding-window sub-pool's tables; written.
    pages : DevicePages
        Receives the physical pages of the live ones, by request, then page. What does not fit is dropped and counted as ``exhausted``.
    request_indices : int32 or int64 array or sequence of int, shape (requests,), optional
        Row of each request; row b for request b by default. One dtype with `starts` and `stops`, as far as they are device arrays.
    stream : stream, optional
        Where to launch; the current stream of `rows`' library by default. Ops that append to one list must run on one stream.
    signal : Signal, optional
        Counts requests without a row and ids that are no page as ``out_of_range``, requests whose start on the device is no page boundary
        as ``mismatch``, pages that are not live (retired before, later duplicates) as ``unbound``. All are skipped.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape or device, a start in host memory is no page boundary, or host values were given while the
        stream is capturing. Nothing is launched.

    Notes
    -----
    One launch of fixed shape for the batch; no host synchronisation, nothing read back. Safe inside a capture when the values are on the
    device. Host values go through pinned memory and are fixed when the call is prepared; a graph that captured such a prepared call needs
    it kept alive. Retiring a segment again changes nothing. The order comes from prefix sums, as in `page_table.unbind_into`.

    Examples
    --------
    >>> from gpukit.kernels import page_table
    >>> v2p, p2v = page_table.empty(4)
    >>> page_table.bind(np.array([1, 2, 3]), np.array([3, 1, 2]), v2p, p2v)
    >>> rows = np.array([[8, 9, 10, 11, 4, 5]])  # pages 2 and 1 of four tokens, the latter half full
    >>> pages = DevicePages(4)
    >>> retire(rows, [0], [4], 4, v2p, p2v, pages)
    >>> pages.take(1), v2p
    (array([1]), array([ 0,  3, -1,  2, -1]))
    """
    at, (num_rows, width), (row_stride, column_stride), id_type, device = matrix(rows, "rows", IDS)
    page_size = positive(page_size, "page_size")
    to_physical, virtual_rows, to_virtual, physical_rows = tables(v2p, p2v, device)
    ring = DevicePages.checked(pages, "pages", device, 0)
    there, here = _segments({"starts": starts, "stops": stops, "request_indices": request_indices}, device)
    requests = len(here["starts"]) if "starts" in here else there["starts"][1]
    if "starts" in here:
        _refuse_unaligned(here["starts"], page_size)
    if request_indices is None and requests > num_rows:
        raise ArgumentError(f"starts: expected at most {num_rows} requests, one per row, without request_indices, got {requests}")
    if device < 0:
        return host(
            reference.retire,
            *(rows, here["starts"], here["stops"], page_size, v2p, p2v, pages),
            request_indices=here.get("request_indices"),
            signal=signal,
        )
    counters = signal_pointer(signal, device)
    # A row ends somewhere in its last column of pages.
    columns = -(-width // page_size)
    most = requests * columns
    if "starts" in here and "stops" in here:
        most = _whole_pages(here["starts"], here["stops"], page_size, columns)
    if requests == 0 or (most == 0 and not counters):
        return nothing()
    launch_stream = choose(stream, rows)
    length_type = next((dtype for _, _, dtype, _ in there.values()), "int64")
    addresses: dict[str, Any] = {name: described[0] for name, described in there.items()}
    addresses |= _stage(here, length_type, device, launch_stream)
    arguments = (
        at, num_rows, row_stride, page_size * column_stride, columns,
        addresses["starts"], addresses["stops"], addresses.get("request_indices", 0), requests, page_size, page_shift(page_size),
        to_physical, virtual_rows, to_virtual, physical_rows, *ring, pages.most_items // THREADS, counters,
    )  # fmt: skip
    return _RETIRE.launch((id_type, length_type), device, launch_stream, pages.blocks_for(max(most, 1)), THREADS, arguments)


@operation
def free_segment(
    row_slice: Any,
    start: int,
    page_size: int,
    owner_v2p: Any,
    owner_p2v: Any,
    other_v2p: Any,
    other_p2v: Any,
    virtual_pages: DevicePages,
    owner_pages: DevicePages,
    other_pages: DevicePages,
    *,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Free a segment of a request in both sub-pools, and append what became free to three device-driven lists.

    Parameters
    ----------
    row_slice : int32 or int64 array, shape (n,)
        Virtual token ids of the tokens ``start … start + n - 1`` of the request, of any stride. The first token of a page speaks for it;
        the last page may be partial.
    start : int
        First token, at a page boundary.
    page_size : int
        Tokens per page.
    owner_v2p, owner_p2v : int64 array
        Tables of the sub-pool that minted the ids (FULL); written.
    other_v2p, other_p2v : int64 array
        Tables of the sub-pool that bound them too (sliding window); written.
    virtual_pages, owner_pages, other_pages : DevicePages
        Receive, in row order, the virtual pages that were live in the owner's tables, their physical pages there, and the other sub-pool's
        physical pages of those that are live there too. Three lists; what does not fit is dropped and counted as ``exhausted``.
    stream : stream, optional
        Where to launch; the current stream of `row_slice`'s library by default. Ops that append to one list must run on one stream.
    signal : Signal, optional
        Counts ids that are no page of the owner as ``out_of_range``, those that are not live there (later duplicates too) as ``unbound``.
        A page that the window has retired in the other sub-pool before is ordinary, and not counted.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        `start` is no page boundary, two lists are one, there are more than ``owner_pages.most_items`` pages, or an array has the wrong
        dtype, shape or device. Nothing is launched.

    Notes
    -----
    One launch of fixed shape: no unique, no mask selection, nothing read back, safe inside a capture. The order comes from one prefix sum
    for the three lists, as in `page_table.unbind_into`.

    Examples
    --------
    >>> from gpukit.kernels import page_table
    >>> full, window = page_table.empty(4), page_table.empty(4)
    >>> page_table.bind(np.array([1, 2]), np.array([3, 1]), *full)
    >>> page_table.bind(np.array([2]), np.array([2]), *window)  # page 1 left the window before
    >>> ids, owner, other = (DevicePages(4) for _ in range(3))
    >>> free_segment(np.array([4, 5, 6, 7, 8]), 0, 4, *full, *window, ids, owner, other)
    >>> ids.take(2), owner.take(2), other.take(1)
    (array([1, 2]), array([3, 1]), array([2]))
    """
    at, id_type, shape, strides, device, _ = describe(row_slice, "row_slice")
    if id_type not in IDS:
        raise ArgumentTypeError(f"row_slice: expected dtype int32 or int64, got {id_type}")
    if len(shape) != 1:
        raise ArgumentError(f"row_slice: expected 1 dimension, got shape {tuple(shape)}")
    page_size = positive(page_size, "page_size")
    if whole(start, "start") % page_size:
        raise ArgumentError(f"start: expected a multiple of page_size {page_size}, got {start}")
    four_tables = (
        *table(owner_v2p, "owner_v2p", device), *table(owner_p2v, "owner_p2v", device),
        *table(other_v2p, "other_v2p", device), *table(other_p2v, "other_p2v", device),
    )  # fmt: skip
    _refuse_shared(four_tables)
    count = -(-shape[0] // page_size)
    virtual_ring = DevicePages.checked(virtual_pages, "virtual_pages", device, 0)
    owner_ring = DevicePages.checked(owner_pages, "owner_pages", device, count)
    other_ring = DevicePages.checked(other_pages, "other_pages", device, 0)
    if virtual_pages is owner_pages or owner_pages is other_pages or virtual_pages is other_pages:
        raise ArgumentError("virtual_pages, owner_pages, other_pages: expected three different lists, got one of them twice")
    if device < 0:
        return host(
            reference.free_segment,
            row_slice, start, page_size, owner_v2p, owner_p2v, other_v2p, other_p2v, virtual_pages, owner_pages, other_pages, signal=signal,
        )  # fmt: skip
    counters = signal_pointer(signal, device)
    if count == 0:
        return nothing()
    # The owner's list lends its workspace for all three.
    arguments = (
        at, 1 if strides is None else strides[0], count, page_size, page_shift(page_size), *four_tables,
        *virtual_ring[:3], *owner_ring[:3], *other_ring[:3], owner_ring[3], counters,
    )  # fmt: skip
    return _FREE_SEGMENT.launch((id_type,), device, choose(stream, row_slice), owner_pages.blocks_for(count), THREADS, arguments)


def _refuse_shared(four_tables: tuple[int, ...]) -> None:
    """Raise, if two of the tables share memory."""
    names = ("owner_v2p", "owner_p2v", "other_v2p", "other_p2v")
    spans = [(name, four_tables[2 * place], 8 * four_tables[2 * place + 1]) for place, name in enumerate(names)]
    for place, (name, pointer, size) in enumerate(spans):
        for other in spans[:place]:
            refuse_overlap(name, pointer, size, *other)


def frontier(key_length: int, window: int, page_size: int, *, old: int = 0, retain: int | None = None) -> int:
    """First token that must stay when a key of this length is cached; everything before it may be retired. On the host, pure.

    Parameters
    ----------
    key_length : int
        Tokens of the cached key. Its insertion ends at the last whole page.
    window : int
        Tokens that must stay behind the end of any cached insertion.
    page_size : int
        Tokens per page.
    old : int
        The frontier so far: it never moves back, except for `retain`.
    retain : int, optional
        A token from which on everything must stay.

    Returns
    -------
    int
        ``max(old, 0, floor(floor(key_length) - window))``, floors to whole pages, and at most `retain`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        A number is negative or no integer, or `page_size` is below 1.

    Notes
    -----
    The insertion's end is floored before the window is taken off, because the window must reach behind what is cached, not behind the key.

    Examples
    --------
    >>> frontier(1023, 127, 64), frontier(1024, 127, 64)
    (832, 896)
    """
    return reference.frontier(
        whole(key_length, "key_length"),
        whole(window, "window"),
        positive(page_size, "page_size"),
        old=whole(old, "old"),
        retain=None if retain is None else whole(retain, "retain"),
    )


def _segments(given: dict[str, Any], device: int) -> tuple[dict[str, tuple[int, int, str, int]], dict[str, np.ndarray]]:
    """The values per request, by where they are: described ones of the device, and int64 ones of the host. All of one length."""
    there: dict[str, tuple[int, int, str, int]] = {}
    here: dict[str, np.ndarray] = {}
    lengths = {}
    for name, values in given.items():
        if values is None:
            continue
        if isinstance(values, Sequence) or is_host(values):
            here[name] = _host_values(values, name)
            lengths[name] = len(here[name])
        else:
            dtypes = next(((dtype,) for _, _, dtype, _ in there.values()), IDS)
            there[name] = vector(values, name, dtypes, device)
            lengths[name] = there[name][1]
        if lengths[name] != lengths["starts"]:
            raise ArgumentError(f"{name}: expected shape ({lengths['starts']},) like starts, got ({lengths[name]},)")
    return there, here


def _host_values(values: Any, name: str) -> np.ndarray:
    found = np.asarray(values)
    if found.size == 0 and not isinstance(values, np.ndarray):
        found = found.astype(np.int64)
    if found.dtype.name not in IDS:
        raise ArgumentTypeError(f"{name}: expected dtype int32 or int64, got {found.dtype.name}")
    if found.ndim != 1:
        raise ArgumentError(f"{name}: expected 1 dimension, got shape {found.shape}")
    return found.astype(np.int64, copy=False)


def _refuse_unaligned(starts: np.ndarray, page_size: int) -> None:
    wrong = np.flatnonzero((starts < 0) | (starts % page_size != 0))
    if len(wrong):
        raise ArgumentError(f"starts: expected multiples of page_size {page_size}, got {starts[wrong[0]]} for request {wrong[0]}")


def _whole_pages(starts: np.ndarray, stops: np.ndarray, page_size: int, columns: int) -> int:
    """Pages that the segments cover: exact as far as it matters, and 0 only where there is none."""
    first, last = starts // page_size, np.minimum(stops // page_size, columns)
    # Compared before the difference, and summed as floats: neither can go round.
    return int(np.where(last > first, last - first, 0).sum(dtype=np.float64))


def _stage(values: dict[str, np.ndarray], dtype: str, device: int, stream: int) -> dict[str, Any]:
    """Addresses of device copies of host values, in one transfer. The first keeps the copy alive while it is an argument of a launch."""
    if not values:
        return {}
    for name, array in values.items():
        if dtype == "int32" and len(array) and (array.min() < -(2**31) or array.max() >= 2**31):
            found = f"{array.min()} … {array.max()}"
            raise ArgumentError(f"{name}: expected values within int32, the dtype of the values on the device, got {found}")
    first = next(iter(values))
    staged = devices.stage(np.concatenate(list(values.values())).astype(dtype), first, device, stream)
    size = len(values[first]) * ITEMSIZE[dtype]
    return {name: position * size + staged.__index__() if position else staged for position, name in enumerate(values)}
