"""Page bytes: ops that move, shift and clear whole pages of a byte buffer, and store K and V rows where a step put its tokens.

One uint8 buffer, seen as pages of `page_bytes` bytes from byte 0; a rest that is no whole page is never touched. The ops know bytes only:
which page is bound to what is told to the tables by `page_table.remap`, which pages are free by `free_list`.
"""

from __future__ import annotations

from math import prod
from typing import Any

from gpukit import arrays
from gpukit.arrays import ITEMSIZE, describe, vector
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels._plans import refuse_other_device, signal_pointer, whole
from gpukit.kernels._tensors import same_bytes
from gpukit.kernels.reference import page_copy as reference
from gpukit.launch import IDS, Kernel, host, nothing, operation
from gpukit.streams import choose

__all__ = ["move_pages", "shift_pages", "store_kv", "zero_pages"]

_MOVE_PAGES = Kernel("page_copy", "move_pages", language="cuda")
_SHIFT_PAGES = Kernel("page_copy", "shift_pages", language="cuda")
_ZERO_PAGES = Kernel("page_copy", "zero_pages", language="cuda")
_STORE_KV = Kernel("page_copy", "store_kv", language="cuda")

# Bytes of one access, and so what buffers and pages are aligned to.
_VECTOR = 16

# THREADS_SHIFT and STEPS of cuda/page_copy.cu, as powers of two.
_THREADS_SHIFT = 7
_THREADS = 1 << _THREADS_SHIFT
_STEPS_SHIFT = 1
# MOST_SHIFT_THREADS and SHIFT_STEPS of it.
_SHIFT_THREADS = 1024
# Threads of a shift that has chains enough, as a power of two.
_BAND_SHIFT = 8
_SHIFT_STEPS = 8

# Up to here (4 MB) a thread moves one vector, so that the work is on every multiprocessor at once; beyond, several.
_FEW_VECTORS = 1 << 18


@operation
def move_pages(buffer: Any, page_bytes: int, source: Any, destination: Any, *, stream: Any = None, signal: Signal | None = None) -> Any:
    """Copy the bytes of pages onto other pages: page `source[i]` onto page `destination[i]`.

    Parameters
    ----------
    buffer : uint8 array, shape (bytes,)
        The pages, contiguous, beginning at an address that is a multiple of 16; written.
    page_bytes : int
        Bytes of a page, a multiple of 16.
    source, destination : int32 or int64 array, shape (n,)
        Pages, both of one dtype. The two sets are disjoint and destinations are distinct. A pair with a page outside
        1 … ``len(buffer) // page_bytes - 1`` is skipped and counted as ``out_of_range``: the sink, page 0, neither moves nor is written.
    stream : stream, optional
        Where to launch; the current stream of `buffer`'s library by default.
    signal : Signal, optional
        Counts ``out_of_range``.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Lengths differ, `page_bytes` or the buffer is not aligned, or an array has the wrong dtype, shape or device. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, no scratch memory, safe inside a capture. Large pages are shared between blocks and small ones
    pooled, so that one page of megabytes fills a device as 100,000 pages of kilobytes do. Where a page is both source and destination, or
    the destination of two, the bytes of that page are some of either.

    Examples
    --------
    >>> buffer = np.repeat(np.arange(4, dtype=np.uint8), 16)  # four pages of 16 bytes
    >>> move_pages(buffer, 16, np.array([3]), np.array([1]))
    >>> buffer[::16]
    array([0, 3, 2, 3], dtype=uint8)
    """
    pointer, page_vectors, buffer_pages, device = _pages(buffer, page_bytes)
    source_at, pages, id_type, _ = vector(source, "source", IDS, device)
    destination_at, length, _, _ = vector(destination, "destination", (id_type,), device)
    if length != pages:
        raise ArgumentError(f"destination: expected shape ({pages},) like source, got ({length},)")
    if device < 0:
        return host(reference.move_pages, buffer, page_bytes, source, destination, signal=signal)
    counters = signal_pointer(signal, device) if signal is not None else 0
    if pages == 0:
        return nothing()
    steps_shift = _steps_shift(pages * page_vectors)
    blocks = _blocks(pages, page_vectors, steps_shift)
    arguments = (
        pointer, page_vectors, buffer_pages, source_at, destination_at, ITEMSIZE[id_type], pages, steps_shift, counters,
    )  # fmt: skip
    return _MOVE_PAGES.launch((), device, choose(stream, buffer), blocks, _THREADS, arguments)


@operation
def shift_pages(buffer: Any, page_bytes: int, first: int, count: int, offset: int, *, stream: Any = None, signal: Signal | None = None) -> Any:
    """Move a run of pages by `offset` pages; where it came from and where it goes may overlap, as in memmove.

    Parameters
    ----------
    buffer : uint8 array, shape (bytes,)
        As in `move_pages`; written.
    page_bytes : int
        Bytes of a page, a multiple of 16.
    first, count : int
        The run: pages ``first … first + count - 1``.
    offset : int
        How far it goes, in pages; negative towards byte 0.
    stream : stream, optional
        Where to launch; the current stream of `buffer`'s library by default.
    signal : Signal, optional
        For uniformity with the other ops; there is nothing to count.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The run leaves the buffer before or after it has moved, `page_bytes` or the buffer is not aligned, or the buffer has the wrong
        dtype or shape. Nothing is launched.

    Notes
    -----
    One launch, in place without scratch memory, no host synchronisation, safe inside a capture. Bytes that lie ``abs(offset) * page_bytes``
    apart form chains that nothing else depends on. A block walks a band of chains from the end that leaves the run, and reads a window of
    it before it writes it. Parallelism is therefore ``abs(offset) * page_bytes``: from about 4 KB on it is enough for the full rate of the
    memory, below the rate falls in proportion (pages of 16 bytes that move by one are the work of a single block). Runs that do not overlap
    are a plain copy.

    Examples
    --------
    >>> buffer = np.repeat(np.arange(5, dtype=np.uint8), 16)
    >>> shift_pages(buffer, 16, 1, 3, 1)
    >>> buffer[::16]
    array([0, 1, 1, 2, 3], dtype=uint8)
    """
    pointer, page_vectors, buffer_pages, device = _pages(buffer, page_bytes)
    first = whole(first, "first")
    count = whole(count, "count")
    offset = whole(offset, "offset", -(2**62))
    if first > buffer_pages:
        raise ArgumentError(f"first: expected at most {buffer_pages}, the pages of buffer, got {first}")
    if first + count > buffer_pages:
        raise ArgumentError(f"count: expected at most {buffer_pages - first}, the pages of buffer from {first} on, got {count}")
    if not -first <= offset <= buffer_pages - first - count:
        raise ArgumentError(f"offset: expected {-first} … {buffer_pages - first - count}, which stays in buffer, got {offset}")
    if device < 0:
        return host(reference.shift_pages, buffer, page_bytes, first, count, offset, signal=signal)
    if signal is not None:
        signal_pointer(signal, device)
    if count == 0 or offset == 0:
        return nothing()
    vectors, distance = count * page_vectors, offset * page_vectors
    rows, width, band_shift, blocks, threads = _shift_layout(vectors, distance)
    arguments = (pointer + first * page_vectors * _VECTOR, vectors, distance, rows, width, band_shift)
    return _SHIFT_PAGES.launch((), device, choose(stream, buffer), blocks, threads, arguments)


@operation
def zero_pages(buffer: Any, page_bytes: int, pages: Any, *, stream: Any = None, signal: Signal | None = None) -> Any:
    """Fill pages with zero bytes.

    Parameters
    ----------
    buffer : uint8 array, shape (bytes,)
        As in `move_pages`; written.
    page_bytes : int
        Bytes of a page, a multiple of 16.
    pages : int32 or int64 array, shape (n,)
        Pages to clear, in any order, repeated or not; the sink, page 0, may be one. Ids outside 0 … ``len(buffer) // page_bytes - 1`` are
        skipped and counted as ``out_of_range``.
    stream, signal
        As in `move_pages`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        `page_bytes` or the buffer is not aligned, or an array has the wrong dtype, shape or device. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture.

    Examples
    --------
    >>> buffer = np.repeat(np.arange(4, dtype=np.uint8), 16)
    >>> zero_pages(buffer, 16, np.array([2]))
    >>> buffer[::16]
    array([0, 1, 0, 3], dtype=uint8)
    """
    pointer, page_vectors, buffer_pages, device = _pages(buffer, page_bytes)
    ids, count, id_type, _ = vector(pages, "pages", IDS, device)
    if device < 0:
        return host(reference.zero_pages, buffer, page_bytes, pages, signal=signal)
    counters = signal_pointer(signal, device) if signal is not None else 0
    if count == 0:
        return nothing()
    steps_shift = _steps_shift(count * page_vectors)
    blocks = _blocks(count, page_vectors, steps_shift)
    arguments = (pointer, page_vectors, buffer_pages, ids, ITEMSIZE[id_type], count, steps_shift, counters)
    return _ZERO_PAGES.launch((), device, choose(stream, buffer), blocks, _THREADS, arguments)


@operation
def store_kv(k: Any, v: Any, locations: Any, key_rows: Any, value_rows: Any, *, stream: Any = None, signal: Signal | None = None) -> Any:
    """Write the K and V rows of tokens at their physical locations: ``key_rows[locations[i]] = k[i]``, the same for V.

    Parameters
    ----------
    k, v : array, shape (tokens, …)
        A row a token, of any dtype; K and V may differ in width and in dtype. Rows are contiguous within, the stride between them is free.
    locations : int32 or int64 array, shape (tokens,)
        Physical tokens, distinct. 0 and negative ones are padding: their rows are dropped. Those past the end of `key_rows` or of
        `value_rows` are skipped and counted as ``out_of_range``.
    key_rows, value_rows : array, shape (slots, …)
        Where rows go, of the row shape and dtype of `k` and `v`; uint16 stands for bfloat16 and uint8 for float8 on either side. Rows are
        contiguous within, the stride between them is free: views of one part of every entry of a pool. Written.
    stream : stream, optional
        Where to launch; the current stream of `k`'s library by default.
    signal : Signal, optional
        Counts ``out_of_range``, once a location.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Lengths, row shapes or dtypes do not fit each other, rows are not contiguous or overlap themselves, or an array is on another
        device. Nothing is launched.

    Notes
    -----
    One launch for both, no host synchronisation, safe inside a capture. Rows are moved in units of up to 16 bytes, of what bases, strides
    and widths are multiples of, for K and V apart. The memory of `k` and `v` must not be among the rows that are written; where two tokens
    share a location, or a key row shares bytes with a value row, those bytes are some of either.

    Examples
    --------
    >>> entries = np.zeros((4, 3), np.float32)  # a slot holds a key row of 2 and a value row of 1
    >>> k, v = np.array([[1, 2], [3, 4]], np.float32), np.array([[5], [6]], np.float32)
    >>> store_kv(k, v, np.array([2, 0]), entries[:, :2], entries[:, 2:])
    >>> entries[2], entries.sum()
    (array([1., 2., 5.], dtype=float32), np.float32(8.0))
    """
    k_at, k_shape, k_stride, k_bytes, k_type, device, _ = _rows(k, "k")
    v_at, v_shape, v_stride, v_bytes, v_type, _, _ = _rows(v, "v", device)
    locations_at, tokens, id_type, _ = vector(locations, "locations", IDS, device)
    if k_shape[0] != tokens or v_shape[0] != tokens:
        name, shape = ("v", v_shape) if k_shape[0] == tokens else ("k", k_shape)
        raise ArgumentError(f"{name}: expected {tokens} rows like locations, got shape {tuple(shape)}")
    key_at, key_slots, key_stride = _target(key_rows, "key_rows", "k", k_shape, k_bytes, k_type, device)
    value_at, value_slots, value_stride = _target(value_rows, "value_rows", "v", v_shape, v_bytes, v_type, device)
    if device < 0:
        return host(reference.store_kv, k, v, locations, key_rows, value_rows, signal=signal)
    counters = signal_pointer(signal, device) if signal is not None else 0
    if tokens == 0:
        return nothing()
    k_unit = _unit(k_at | k_stride | k_bytes | key_at | key_stride)
    v_unit = _unit(v_at | v_stride | v_bytes | value_at | value_stride)
    key_vectors, value_vectors = k_bytes // k_unit, v_bytes // v_unit
    steps_shift = _steps_shift(tokens * (key_vectors + value_vectors))
    key_blocks = _blocks(tokens, key_vectors, steps_shift)
    blocks = key_blocks + _blocks(tokens, value_vectors, steps_shift)
    arguments = (
        k_at, k_stride // k_unit, v_at, v_stride // v_unit, locations_at, ITEMSIZE[id_type], tokens,
        key_at, key_stride // k_unit, value_at, value_stride // v_unit, min(key_slots, value_slots),
        key_vectors, k_unit, value_vectors, v_unit, key_blocks, steps_shift, counters,
    )  # fmt: skip
    return _STORE_KV.launch((), device, choose(stream, k), blocks, _THREADS, arguments)


def _pages(buffer: Any, page_bytes: int) -> tuple[int, int, int, int]:
    """Pointer of a buffer, vectors of a page, whole pages in the buffer, and its device."""
    pointer, dtype, shape, strides, device, writable = describe(buffer, "buffer")
    if dtype != "uint8" or len(shape) != 1 or strides is not None or not writable:
        arrays.output(buffer, "buffer", ("uint8",), device)
    page_bytes = whole(page_bytes, "page_bytes", 1)
    if page_bytes % _VECTOR:
        raise ArgumentError(f"page_bytes: expected a multiple of {_VECTOR}, got {page_bytes}")
    if pointer % _VECTOR:
        raise ArgumentError(f"buffer: expected an address that is a multiple of {_VECTOR}, got {pointer:#x}")
    pages = shape[0] // page_bytes
    # Without a page in the buffer every id is skipped, whatever a page may be.
    return pointer, page_bytes // _VECTOR if pages else 1, pages, device


def _rows(array: Any, name: str, device: int | None = None) -> tuple[int, tuple[int, ...], int, int, str, int, bool]:
    """Pointer, shape, bytes from row to row, bytes of a row, dtype, device and whether writable, of rows that are contiguous within."""
    pointer, dtype, shape, strides, where, writable = describe(array, name)
    if device is not None and where != device:
        refuse_other_device(name, where, device)
    size = ITEMSIZE.get(dtype)
    if size is None:
        raise ArgumentTypeError(f"{name}: expected dtype {', '.join(ITEMSIZE)}, got {dtype}")
    if len(shape) < 2:
        raise ArgumentError(f"{name}: expected rows, at least 2 dimensions, got shape {tuple(shape)}")
    row_bytes = prod(shape[1:]) * size
    if row_bytes == 0:
        raise ArgumentError(f"{name}: expected rows of at least one element, got shape {tuple(shape)}")
    if strides is None:
        return pointer, shape, row_bytes, row_bytes, dtype, where, writable
    if strides[-1] != 1 or (len(shape) > 2 and not _is_contiguous(shape, strides)):
        got = f"shape {tuple(shape)}, element strides {tuple(strides)}"
        raise ArgumentError(f"{name}: expected rows that are contiguous within, got {got}")
    # The stride of a single row leads nowhere.
    return pointer, shape, strides[0] * size if shape[0] > 1 else row_bytes, row_bytes, dtype, where, writable


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the dimensions after the first have the strides of a contiguous array, wherever there is more than one element."""
    expected = 1
    for axis in range(len(shape) - 1, 0, -1):
        if strides[axis] != expected and shape[axis] > 1:
            return False
        expected *= shape[axis]
    return True


def _target(array: Any, name: str, values: str, shape: tuple[int, ...], row_bytes: int, dtype: str, device: int) -> tuple[int, int, int]:
    """Pointer, slots and bytes from slot to slot of the rows that `values` are written to."""
    pointer, own_shape, stride, _, own_dtype, _, writable = _rows(array, name, device)
    if not same_bytes(own_dtype, dtype):
        raise ArgumentTypeError(f"{name}: expected dtype {dtype} like {values}, got {own_dtype}")
    if own_shape[1:] != shape[1:]:
        raise ArgumentError(f"{name}: expected rows of shape {tuple(shape[1:])} like {values}, got shape {tuple(own_shape)}")
    if not writable:
        raise ArgumentError(f"{name}: expected a writable array, got a read-only one")
    if abs(stride) < row_bytes:
        raise ArgumentError(f"{name}: expected rows apart from each other, got rows of {row_bytes} bytes every {stride} bytes")
    return pointer, own_shape[0], stride


def _unit(multiple: int) -> int:
    """The widest access, 16, 8, 4, 2 or 1 bytes, of which a number is a multiple."""
    multiple |= _VECTOR
    return multiple & -multiple


def _steps_shift(vectors: int) -> int:
    """How many vectors a thread handles, as a power of two."""
    return 0 if vectors <= _FEW_VECTORS else _STEPS_SHIFT


def _blocks(items: int, item_vectors: int, steps_shift: int) -> int:
    """Blocks for a batch of items, as `Share` in cuda/page_copy.cu divides it."""
    bits = (item_vectors - 1).bit_length()
    piece_shift = min(bits, _THREADS_SHIFT + steps_shift)
    items_a_block = 1 << (_THREADS_SHIFT + steps_shift - piece_shift)
    pieces = ((item_vectors - 1) >> piece_shift) + 1
    return pieces * -(-items // items_a_block)


def _shift_layout(vectors: int, distance: int) -> tuple[int, int, int, int, int]:
    """Rows, their width, columns of a band (as a power of two), blocks and threads of a shift; see `gpukit_shift_pages`."""
    if abs(distance) < vectors:
        width = abs(distance)
    elif vectors <= _FEW_VECTORS:
        width = vectors
    else:
        # Nothing overlaps, so rows may be anything: as many as a thread has steps.
        width = _round_up(-(-vectors // _SHIFT_STEPS), 1 << _BAND_SHIFT)
    rows = -(-vectors // width)
    # Bands narrow enough for many blocks, wide enough that neighbours read whole cache lines.
    threads = 1 << _BAND_SHIFT
    band_shift = min(_floor_log2(width // min(1024, -(-vectors // (1 << _BAND_SHIFT)))), _BAND_SHIFT)
    if width < 4096 and rows << band_shift > (1 << _BAND_SHIFT) * _SHIFT_STEPS:
        # Few chains and long ones: as much of each in flight as a block can hold.
        threads = _SHIFT_THREADS
        band_shift = min(_floor_log2(width // 128), 3)
    return rows, width, band_shift, -(-width >> band_shift), threads


def _floor_log2(number: int) -> int:
    return max(number, 1).bit_length() - 1


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
