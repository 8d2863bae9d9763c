"""Page tables: which physical page a virtual page lies in, and the ops that change and read that.

One pair of tables per sub-pool: `v2p` int64 [num_virtual + 1] and `p2v` int64 [num_physical + 1]. Row 0 is the padding sink and stays 0, the
last row is a permanent -1 sentinel, -1 elsewhere means not bound. A page id is valid from 1 to rows - 2. The tables belong to the caller.
Which pages are free is for `free_list`, moving their bytes for `page_copy`.
"""

from __future__ import annotations

from typing import Any

from gpukit import arrays
from gpukit.arrays import ITEMSIZE, describe, vector
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels._plans import (
    THREADS,
    allocate,
    blocks_for,
    out_vector,
    page_shift,
    positive,
    read_table,
    refuse_other_device,
    refuse_overlap,
    signal_pointer,
    tables,
    whole,
)
from gpukit.kernels.free_list import DevicePages
from gpukit.kernels.reference import page_table as reference
from gpukit.launch import IDS, Kernel, host, nothing, operation
from gpukit.streams import choose

__all__ = ["bind", "bind_range", "empty", "remap", "translate", "unbind", "unbind_into"]

_INT64 = ("int64",)
_BY_ID = tuple((dtype,) for dtype in IDS)
_BIND = Kernel("page_table", "bind", _BY_ID)
_BIND_RANGE = Kernel("page_table", "bind_range", _BY_ID)
_UNBIND = Kernel("page_table", "unbind", _BY_ID)
_UNBIND_INTO = Kernel("page_table", "unbind_into", _BY_ID)
_REMAP = Kernel("page_table", "remap", _BY_ID)
_TRANSLATE = Kernel("page_table", "translate", _BY_ID)
# The usual call: contiguous vectors and a page size that is a power of two. Without a division in it the kernel is 0.4 µs faster on an H200.
_TRANSLATE_VECTOR = Kernel("page_table", "translate_vector", _BY_ID)


def empty(num_virtual: int, num_physical: int | None = None, *, like: Any = None) -> tuple[Any, Any]:
    """Make a pair of tables with nothing bound.

    Parameters
    ----------
    num_virtual : int
        Virtual pages, the sink included: ids 1 … num_virtual - 1 can be bound.
    num_physical : int, optional
        Physical pages, the sink included; as many as virtual ones by default.
    like : array, optional
        An array whose library and device the tables shall have; NumPy by default.

    Returns
    -------
    v2p : int64 array, shape (num_virtual + 1,)
    p2v : int64 array, shape (num_physical + 1,)

    Raises
    ------
    ArgumentError
        A count is below 1.

    Examples
    --------
    >>> empty(3)
    (array([ 0, -1, -1, -1]), array([ 0, -1, -1, -1]))
    """
    num_virtual = positive(num_virtual, "num_virtual")
    num_physical = num_virtual if num_physical is None else positive(num_physical, "num_physical")
    tables = []
    for rows in (num_virtual + 1, num_physical + 1):
        made = arrays.full(rows, -1, "int64", like)
        made[0:1] = 0
        tables.append(made)
    return tables[0], tables[1]


@operation
def bind(virtual_pages: Any, physical_pages: Any, v2p: Any, p2v: Any, *, stream: Any = None, signal: Signal | None = None) -> Any:
    """Bind virtual pages to physical pages: ``v2p[v] = p`` and ``p2v[p] = v``.

    Parameters
    ----------
    virtual_pages, physical_pages : int32 or int64 array, shape (n,)
        Pairs to bind, both of one dtype. A pair with an invalid side is skipped and counted as ``out_of_range``.
    v2p, p2v : int64 array
        The tables; written.
    stream : stream, optional
        Where to launch; the current stream of `virtual_pages`' library by default.
    signal : Signal, optional
        Counts ``out_of_range`` and ``rebound``.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Lengths differ, or an array has the wrong dtype, shape or device. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture. Pages are expected to be unbound. The result is that of binding the pairs one
    after the other in some order: binding a page again first makes its old partner's entry -1, so that the tables stay mutually inverse whatever
    comes in, and is counted as ``rebound``; of duplicates exactly one stays. Each entry is taken by compare-and-swap before it is written.

    Examples
    --------
    >>> v2p, p2v = empty(4)
    >>> bind(np.array([1, 2]), np.array([3, 1]), v2p, p2v)
    >>> v2p, p2v
    (array([ 0,  3,  1, -1, -1]), array([ 0,  2, -1,  1, -1]))
    """
    virtual, pairs, id_type, device = vector(virtual_pages, "virtual_pages", IDS)
    physical, length, _, _ = vector(physical_pages, "physical_pages", (id_type,), device)
    to_physical, virtual_rows, to_virtual, physical_rows = tables(v2p, p2v, device)
    if length != pairs:
        raise ArgumentError(f"physical_pages: expected shape ({pairs},) like virtual_pages, got ({length},)")
    if device < 0:
        return host(reference.bind, virtual_pages, physical_pages, v2p, p2v, signal=signal)
    counters = signal_pointer(signal, device) if signal is not None else 0
    if pairs == 0:
        return nothing()
    arguments = (virtual, physical, pairs, to_physical, virtual_rows, to_virtual, physical_rows, counters)
    return _BIND.launch((id_type,), device, choose(stream, virtual_pages), blocks_for(pairs), THREADS, arguments)


@operation
def bind_range(virtual_pages: Any, first: int, v2p: Any, p2v: Any, *, out: Any = None, stream: Any = None, signal: Signal | None = None) -> Any:
    """Bind virtual pages to the physical pages ``first, first + 1, …`` in order.

    Parameters
    ----------
    virtual_pages : int32 or int64 array, shape (n,)
        Pages to bind. Invalid ones are skipped and counted as ``out_of_range``; their physical page stays unbound.
    first : int
        First physical page. A pool that grows downwards passes ``watermark - n + 1``, so that the range ascends for it too.
    v2p, p2v : int64 array
        The tables; written.
    out : int64 array, shape (n,), optional
        Receives the physical pages, -1 where skipped.
    stream, signal
        As in `bind`.

    Returns
    -------
    int64 array, shape (n,)
        `out`, or a new array of `virtual_pages`' library.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The range leaves the table, or an array has the wrong dtype, shape or device. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` is given. Bound pages and duplicates as in `bind`.

    Examples
    --------
    >>> v2p, p2v = empty(5)
    >>> bind_range(np.array([4, 2]), 1, v2p, p2v)
    array([1, 2])
    >>> v2p
    array([ 0, -1,  2, -1,  1, -1])
    """
    virtual, pages, id_type, device = vector(virtual_pages, "virtual_pages", IDS)
    to_physical, virtual_rows, to_virtual, physical_rows = tables(v2p, p2v, device)
    if type(first) is not int:
        first = whole(first, "first", -(2**62))
    if pages and not 1 <= first <= physical_rows - 1 - pages:
        raise ArgumentError(f"first: expected {pages} pages within 1 … {physical_rows - 2} of p2v, got {first} … {first + pages - 1}")
    if device < 0:
        if out is not None:
            arrays.output(out, "out", ("int64",), device, pages)
        return host(reference.bind_range, virtual_pages, first, v2p, p2v, out=out, signal=signal)
    counters = signal_pointer(signal, device) if signal is not None else 0
    launch_stream = choose(stream, virtual_pages)
    out, result = out_vector(out, "out", pages, "int64", device, virtual_pages, launch_stream)
    if result != virtual:
        refuse_overlap("out", result, 8 * pages, "virtual_pages", virtual, ITEMSIZE[id_type] * pages)
    if pages == 0:
        return nothing(out)
    arguments = (virtual, pages, first, to_physical, virtual_rows, to_virtual, physical_rows, result, counters)
    return _BIND_RANGE.launch((id_type,), device, launch_stream, blocks_for(pages), THREADS, arguments, out)


@operation
def unbind(virtual_pages: Any, v2p: Any, p2v: Any, *, out: Any = None, stream: Any = None, signal: Signal | None = None) -> Any:
    """Free virtual pages: read where they were, then make both entries -1.

    Parameters
    ----------
    virtual_pages : int32 or int64 array, shape (n,)
        Pages to free. Invalid ids are skipped and counted as ``out_of_range``; ids with no live page, later duplicates too, as ``unbound``.
    v2p, p2v : int64 array
        The tables; written. A page whose physical side belongs to another id by now loses only its own entry.
    out : int64 array, shape (n,), optional
        Receives the physical page of each id, -1 where it was skipped.
    stream, signal
        As in `bind`.

    Returns
    -------
    int64 array, shape (n,)
        `out`, or a new array of `virtual_pages`' library.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        A table or `out` has the wrong dtype, shape or device. Nothing is launched.

    Notes
    -----
    One launch instead of a gather and two fills; no host synchronisation, safe inside a capture when `out` is given.

    Examples
    --------
    >>> v2p, p2v = empty(4)
    >>> bind(np.array([1, 2]), np.array([3, 1]), v2p, p2v)
    >>> unbind(np.array([2, 1, 2]), v2p, p2v)
    array([ 1,  3, -1])
    """
    virtual, pages, id_type, device = vector(virtual_pages, "virtual_pages", IDS)
    to_physical, virtual_rows, to_virtual, physical_rows = tables(v2p, p2v, device)
    if device < 0:
        if out is not None:
            arrays.output(out, "out", ("int64",), device, pages)
        return host(reference.unbind, virtual_pages, v2p, p2v, out=out, signal=signal)
    counters = signal_pointer(signal, device) if signal is not None else 0
    launch_stream = choose(stream, virtual_pages)
    out, result = out_vector(out, "out", pages, "int64", device, virtual_pages, launch_stream)
    if result != virtual:
        refuse_overlap("out", result, 8 * pages, "virtual_pages", virtual, ITEMSIZE[id_type] * pages)
    if pages == 0:
        return nothing(out)
    arguments = (virtual, pages, to_physical, virtual_rows, to_virtual, physical_rows, result, counters)
    return _UNBIND.launch((id_type,), device, launch_stream, blocks_for(pages), THREADS, arguments, out)


@operation
def unbind_into(virtual_pages: Any, v2p: Any, p2v: Any, pages: DevicePages, *, stream: Any = None, signal: Signal | None = None) -> Any:
    """Free virtual pages and append the physical pages of the live ones to a device-driven list, in input order.

    Parameters
    ----------
    virtual_pages : int32 or int64 array, shape (n,)
        Pages to free, as in `unbind`; at most ``pages.most_items`` of them.
    v2p, p2v : int64 array
        The tables; written.
    pages : DevicePages
        Receives the pages. What does not fit is dropped and counted as ``exhausted``.
    stream, signal
        As in `bind`. Ops that append to one list must run on one stream.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape or device, or there are too many ids. Nothing is launched.

    Notes
    -----
    One launch of fixed shape: no mask selection, nothing read back, safe inside a capture. The order comes from a prefix sum over tiles that
    are taken by ticket (after D. Merrill and M. Garland, "Single-pass parallel prefix scan with decoupled look-back", 2016).

    Examples
    --------
    >>> v2p, p2v = empty(4)
    >>> bind(np.array([1, 2]), np.array([3, 1]), v2p, p2v)
    >>> pages = DevicePages(4)
    >>> unbind_into(np.array([2, 3, 1]), v2p, p2v, pages)
    >>> pages.take(2)
    array([1, 3])
    """
    virtual, count, id_type, device = vector(virtual_pages, "virtual_pages", IDS)
    to_physical, virtual_rows, to_virtual, physical_rows = tables(v2p, p2v, device)
    ring = DevicePages.checked(pages, "pages", device, count)
    if device < 0:
        return host(reference.unbind_into, virtual_pages, v2p, p2v, pages, signal=signal)
    counters = signal_pointer(signal, device)
    if count == 0:
        return nothing()
    arguments = (virtual, count, to_physical, virtual_rows, to_virtual, physical_rows, *ring, counters)
    return _UNBIND_INTO.launch((id_type,), device, choose(stream, virtual_pages), pages.blocks_for(count), THREADS, arguments)


@operation
def remap(source: Any, destination: Any, v2p: Any, p2v: Any, *, stream: Any = None, signal: Signal | None = None) -> Any:
    """After the bytes of pages were moved: point their owners at the new places, ``v2p[v] = d; p2v[d] = v; p2v[s] = -1``.

    Parameters
    ----------
    source, destination : int32 or int64 array, shape (n,)
        Physical pages, both of one dtype; the two sets are disjoint. Invalid ids are skipped and counted as ``out_of_range``, sources that
        nobody owns (later duplicates too) as ``unbound``, destinations in use (later duplicates too) as ``occupied``.
    v2p, p2v : int64 array
        The tables; written.
    stream, signal
        As in `bind`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Lengths differ, or an array has the wrong dtype, shape or device. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture. A skipped pair leaves its page where it was.

    Examples
    --------
    >>> v2p, p2v = empty(5)
    >>> bind(np.array([1, 2]), np.array([3, 4]), v2p, p2v)
    >>> remap(np.array([4]), np.array([1]), v2p, p2v)
    >>> v2p, p2v
    (array([ 0,  3,  1, -1, -1, -1]), array([ 0,  2, -1,  1, -1, -1]))
    """
    source_at, pages, id_type, device = vector(source, "source", IDS)
    destination_at, length, _, _ = vector(destination, "destination", (id_type,), device)
    to_physical, virtual_rows, to_virtual, physical_rows = tables(v2p, p2v, device)
    if length != pages:
        raise ArgumentError(f"destination: expected shape ({pages},) like source, got ({length},)")
    if device < 0:
        return host(reference.remap, source, destination, v2p, p2v, signal=signal)
    counters = signal_pointer(signal, device)
    if pages == 0:
        return nothing()
    arguments = (source_at, destination_at, pages, to_physical, virtual_rows, to_virtual, physical_rows, counters)
    return _REMAP.launch((id_type,), device, choose(stream, source), blocks_for(pages), THREADS, arguments)


@operation
def translate(
    ids: Any,
    v2p: Any,
    page_size: int,
    *,
    out: Any = None,
    out_width: int | None = None,
    dcp: tuple[int, int] = (1, 0),
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Physical tokens of virtual tokens: ``v2p[id // page_size] * page_size + id % page_size``.

    Parameters
    ----------
    ids : int32 or int64 array, shape (n,) or (rows, n)
        Virtual token ids; 2-D ids may have any strides.
    v2p : int64 array
        The table; read.
    page_size : int
        Tokens per page, at least 1.
    out : int64 array, shape (at least `out_width`,) or (rows, at least `out_width`), optional
        Receives the tokens; 2-D ones may have any strides. May be `ids` itself.
    out_width : int, optional
        Columns of `out` to write, n by default; those past n get 0, so that the stale tail of a captured buffer is cleared.
    dcp : (size, rank)
        Decode context parallelism: ids with ``id % size != rank`` belong to other ranks and give 0, the others are divided by `size` before
        the look-up. Positions are kept.
    stream, signal
        As in `bind`; counts ``out_of_range`` (past the table) and ``unbound``. Negative ids are padding and not counted.

    Returns
    -------
    int64 array
        `out`, or a new array of `ids`' library with `out_width` columns.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape or device, `out` overlaps `ids` without being it, or a number is out of its range.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` is given. Negative, unbound, foreign ids and those past the table
    become 0, in the sink page. Division floors.

    Examples
    --------
    >>> v2p, p2v = empty(4)
    >>> bind(np.array([1]), np.array([3]), v2p, p2v)
    >>> translate(np.array([16, 17, -1, 40]), v2p, 16, out_width=6)
    array([48, 49,  0,  0,  0,  0])
    """
    pointer, id_type, shape, strides, device, _ = describe(ids, "ids")
    if id_type not in IDS:
        raise ArgumentTypeError(f"ids: expected dtype int32 or int64, got {id_type}")
    dimensions = len(shape)
    if dimensions == 1:
        rows, columns = 1, shape[0]
        row_stride, column_stride = 0, 1 if strides is None else strides[0]
    elif dimensions == 2:
        rows, columns = shape
        row_stride, column_stride = (columns, 1) if strides is None else strides
    else:
        raise ArgumentError(f"ids: expected 1 or 2 dimensions, got shape {tuple(shape)}")
    to_physical, table_rows = read_table(v2p, "v2p", device)
    page_size = positive(page_size, "page_size")
    width = columns if out_width is None else whole(out_width, "out_width", columns)
    size, rank = dcp if dcp == (1, 0) else _ranks(dcp)
    launch_stream = 0 if device < 0 else choose(stream, ids)
    if out is not None:
        result, out_row_stride, out_column_stride = _translated(out, dimensions, rows, width, device)
        _refuse_partial_overlap(
            (pointer, ITEMSIZE[id_type], rows, columns, row_stride, column_stride), (result, 8, rows, width, out_row_stride, out_column_stride)
        )
    if device < 0:
        return host(reference.translate, ids, v2p, page_size, out=out, out_width=out_width, dcp=dcp, signal=signal)
    if out is None:
        out, result = allocate("out", width if dimensions == 1 else (rows, width), "int64", ids, launch_stream)
        out_row_stride, out_column_stride = width, 1
    counters = signal_pointer(signal, device) if signal is not None else 0
    if rows * width == 0:
        return nothing(out)
    shift = page_shift(page_size)
    if dimensions == 1 and size == 1 and shift >= 0 and column_stride == out_column_stride == 1 and width < 1 << 31:
        arguments: tuple[int, ...] = (pointer, to_physical, result, columns << 32 | width, shift << 56 | table_rows, counters)
        return _TRANSLATE_VECTOR.launch((id_type,), device, launch_stream, blocks_for(width), THREADS, arguments, out)
    arguments = (
        pointer, rows, columns, row_stride, column_stride, to_physical, table_rows, page_size, shift,
        result, width, out_row_stride, out_column_stride, size, rank, counters,
    )  # fmt: skip
    return _TRANSLATE.launch((id_type,), device, launch_stream, blocks_for(rows * width), THREADS, arguments, out)


def _ranks(dcp: Any) -> tuple[int, int]:
    """(size, rank) after its checks."""
    if not isinstance(dcp, tuple | list) or len(dcp) != 2:
        raise ArgumentTypeError(f"dcp: expected (size, rank), got {dcp!r}")
    size, rank = (whole(value, "dcp", 0, 2**31 - 1) for value in dcp)
    if rank >= size:
        raise ArgumentError(f"dcp: expected (size, rank) with 0 <= rank < size, got {(size, rank)}")
    return size, rank


def _translated(out: Any, dimensions: int, rows: int, width: int, device: int) -> tuple[int, int, int]:
    """Pointer and strides of a `translate` output after its checks."""
    pointer, dtype, shape, strides, where, writable = describe(out, "out")
    refuse_other_device("out", where, device)
    if dtype != "int64":
        raise ArgumentTypeError(f"out: expected dtype int64, got {dtype}")
    if not writable:
        raise ArgumentError("out: expected a writable array, got a read-only one")
    if len(shape) != dimensions or shape[-1] < width or (dimensions == 2 and shape[0] != rows):
        expected = f"(>= {width},)" if dimensions == 1 else f"({rows}, >= {width})"
        raise ArgumentError(f"out: expected shape {expected}, got {tuple(shape)}")
    if dimensions == 1:
        return pointer, shape[0], 1 if strides is None else strides[0]
    return (pointer, shape[1], 1) if strides is None else (pointer, strides[0], strides[1])


def _refuse_partial_overlap(ids: tuple[int, ...], out: tuple[int, ...]) -> None:
    """Raise if `out` shares memory with `ids` without having every element in the same place. Each: (pointer, item size, shape…, strides…)."""
    pointer, itemsize, rows, columns, row_stride, column_stride = ids
    target, _, _, width, out_row_stride, out_column_stride = out
    if rows == 1 and column_stride == out_column_stride == 1 and (target >= pointer + itemsize * columns or pointer >= target + 8 * width):
        return
    if target == pointer and itemsize == 8 and column_stride == out_column_stride and (rows == 1 or row_stride == out_row_stride):
        return
    if arrays.overlap(
        (pointer, itemsize, (rows, columns), (row_stride, column_stride)), (target, 8, (rows, width), (out_row_stride, out_column_stride))
    ):
        raise ArgumentError("out: expected ids itself or an array apart from it, got one that overlaps it")
