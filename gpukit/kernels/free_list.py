"""Free pages: the lists that hold them, and the ops that place tokens in them.

`FreeList` is for counts that the host knows: it hands out views and never waits. `DevicePages` is for counts that only the device knows, such
as how many of the pages of a batch were still live. Which page a token's page is bound to is for `page_table`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from gpukit import arrays, devices
from gpukit.arrays import ITEMSIZE, describe, library_of, vector
from gpukit.errors import ArgumentError, ArgumentTypeError, OutOfPages, Signal
from gpukit.kernels._plans import THREADS, allocate, blocks_for, out_vector, page_shift, positive, refuse_overlap, signal_pointer, whole
from gpukit.kernels.reference import free_list as reference
from gpukit.launch import IDS, Kernel, host, nothing, operation
from gpukit.streams import choose, current

__all__ = ["DevicePages", "FreeList", "compact", "gather_decode", "gather_extend"]

_BY_ID = tuple((dtype,) for dtype in IDS)
_APPEND = Kernel("free_list", "append", _BY_ID)
_TAKE = Kernel("free_list", "take")
_BY_LENGTH_AND_ID = tuple(product(IDS, IDS))
_GATHER_EXTEND = Kernel("free_list", "gather_extend", _BY_LENGTH_AND_ID)
_GATHER_DECODE = Kernel("free_list", "gather_decode", _BY_LENGTH_AND_ID)
_COMPACT = Kernel("free_list", "compact", _BY_ID)

# Blocks of an append: two per multiprocessor of the largest devices, so that every tile has a running block soon.
_MOST_BLOCKS = 264

# Blocks of the ops whose blocks count what lies before their own part: more would count more and not end sooner.
_MOST_COUNTING_BLOCKS = 132

# Tokens per block of gather_extend, as in its device code.
_TILE = 4 * THREADS


class FreeList:
    """A host-driven list of free pages: an int64 array whose length the host knows.

    Parameters
    ----------
    pages : int64 array, shape (n,)
        Free pages, in the order in which they are handed out. NumPy, torch, CuPy or Numba. Not copied and never written.

    Notes
    -----
    `take` returns a *view*, not a copy: the list is rebound to the remainder, never modified in place, and `append` builds a new array. A view
    therefore stays valid and unchanged for as long as it is held, whatever the list does meanwhile, provided that its consumers run on the
    stream that the list is used on: this is the whole lifetime contract.

    Examples
    --------
    >>> pages = FreeList(np.array([1, 2, 3]))
    >>> pages.take(2), len(pages)
    (array([1, 2]), 1)
    >>> pages.append(np.array([2]))
    >>> pages.pages
    array([3, 2])
    """

    def __init__(self, pages: Any):
        vector(pages, "pages", ("int64",))
        if library_of(pages) == "cupy" and type(pages).__module__.partition(".")[0] != "cupy":
            raise ArgumentTypeError(f"pages: expected a NumPy, torch, CuPy or Numba array, got {type(pages).__name__}")
        self._pages = pages
        self._length = len(pages)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"FreeList({self._length} pages, {arrays.place(arrays.device_of(self._pages))})"

    @property
    def pages(self) -> Any:
        """The pages not taken yet, as a view."""
        return self._pages

    def take(self, n: int) -> Any:
        """The next `n` pages as a view; the list goes on behind them.

        Returns
        -------
        int64 array, shape (n,)
            A view of the list's array: not copied, never written by the list.

        Raises
        ------
        OutOfPages
            Fewer than `n` pages are left. Nothing changes.
        """
        n = whole(n, "n")
        if n > self._length:
            raise OutOfPages(f"n: expected at most the {self._length} pages of the list, got {n}")
        taken = self._pages[:n]
        self._pages = self._pages[n:]
        self._length -= n
        return taken

    def append(self, pages: Any) -> None:
        """Put pages behind the others: both are copied into a new array on the current stream of the list's library.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            `pages` is no contiguous int64 array on the list's device, or the stream is capturing. Nothing changes.
        """
        _, length, _, _ = vector(pages, "pages", ("int64",), arrays.device_of(self._pages))
        if length and arrays.device_of(self._pages) >= 0 and devices.is_capturing(current(self._pages)):
            raise ArgumentError("pages: expected a stream that is not capturing, because the host would count them once and a replay again")
        if length:
            self._pages = arrays.concatenate(self._pages, pages)
            self._length += length


class DevicePages:
    """A device-driven list of free pages: a ring that ops append to without the host knowing how many.

    Parameters
    ----------
    capacity : int
        Most pages it can hold: the number of pages of its sub-pool, so that it is never full.
    like : array, optional
        An array whose library and device the ring shall have; NumPy by default.

    Attributes
    ----------
    ring : int64 array, shape (capacity,)
        The pages, from ``head % capacity`` on. Only ops write it; there are no views into it.
    counters : int64 array, shape (2,)
        ``head, tail``: pages taken and appended since the start; they only grow.
    workspace : int64 array
        What the blocks of an append say to each other; zero between launches.
    owed : callable or None
        For an owner that takes account of many launches at once: called, once, before anybody looks at how many pages are known. It notes them.

    Notes
    -----
    All ops on one list must run on one stream. `known` is a lower bound of the length, because what ops appended reaches the host only by
    `refresh`, which starts a copy of the counters and collects those that have arrived, and never waits.

    Examples
    --------
    >>> pages = DevicePages(8)
    >>> pages.fill(np.array([5, 6, 7]))
    >>> pages.known, pages.take(2), pages.known
    (3, array([5, 6]), 1)
    """

    def __init__(self, capacity: int, *, like: Any = None):
        self.capacity = positive(capacity, "capacity")
        # One count per tile of an append; a call may have as many ids as the list has pages, and at least a million.
        tiles = max(4096, blocks_for(self.capacity))
        self.ring = arrays.full(self.capacity, 0, "int64", like)
        self.counters = arrays.full(2, 0, "int64", like)
        self.workspace = arrays.full(tiles + 2, 0, "int64", like)
        self.most_items = tiles * THREADS
        self.device = arrays.device_of(self.ring)
        self._pointers = (describe(self.ring)[0], self.capacity, describe(self.counters)[0], describe(self.workspace)[0])
        self.owed: Callable[[], None] | None = None
        self._known = 0
        # What the host did since the read-back under way was started: pages filled, or taken as a negative number.
        self._since: list[int] = []
        self._reader = devices.AsyncReader(self.device, self._pointers[2], 2) if self.device >= 0 else None

    def __repr__(self) -> str:
        return f"DevicePages(capacity={self.capacity}, known={self.known}, {arrays.place(self.device)})"

    def checked(self, name: str, device: int, items: int) -> tuple[int, int, int, int]:
        """Addresses for an op that appends up to `items` pages, after a check of device and size."""
        if not isinstance(self, DevicePages):
            raise ArgumentTypeError(f"{name}: expected a DevicePages, got {type(self).__name__}")
        if self.device != device:
            raise ArgumentError(f"{name}: expected a list in {arrays.place(device)} like the first argument, got one in {arrays.place(self.device)}")
        if items > self.most_items:
            raise ArgumentError(f"{name}: expected at most {self.most_items} items per call (its workspace), got {items}")
        return self._pointers

    def blocks_for(self, items: int) -> int:
        """Blocks of an append: a single one, which needs no workspace, for small batches."""
        return min(blocks_for(items), _MOST_BLOCKS)

    def settle(self) -> None:
        """Have the owner note what it has launched so far."""
        if self.owed is not None:
            owed, self.owed = self.owed, None
            owed()

    @property
    def known(self) -> int:
        """Pages that the list holds for certain, as far as the host has heard."""
        self.settle()
        if self._reader is None:
            return int(self.counters[1] - self.counters[0])
        return self._known

    def refresh(self, *, stream: Any = None) -> int:
        """Collect a finished read-back of the counters, start the next one on `stream`, and return `known`. Never waits.

        Raises
        ------
        ArgumentError
            The stream is capturing: a read-back belongs between graph launches.
        """
        if self._reader is not None:
            self.settle()
            handle = choose(stream, self.ring)
            if devices.is_capturing(handle):
                raise ArgumentError("stream: expected one that is not capturing, because the host reads the counters between graph launches")
            arrived = self._reader.poll()
            if arrived is not None:
                head, tail = arrived
                known = tail - head
                for change in self._since:
                    known = min(known + change, self.capacity)
                self._known = known
            if self._reader.start(handle):
                self._since = []
        return self.known

    def fill(self, pages: Any, *, stream: Any = None, signal: Signal | None = None) -> None:
        """Append pages whose number the host knows: one launch. They are taken as they are; free pages are for the caller to give.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            `pages` is no contiguous int32 or int64 array on the list's device, is longer than the room that is left for certain, or the stream
            is capturing. Nothing changes. Where the device holds more than is known, what does not fit is dropped, and counted as ``exhausted``.
        """
        _, length, _, _ = vector(pages, "pages", IDS, self.device)
        if length > self.capacity - self.known:
            raise ArgumentError(f"pages: expected at most {self.capacity - self.known} pages (capacity {self.capacity}), got {length}")
        self._refuse_capture(stream)
        _append(pages, self, stream=stream, signal=signal)
        self.note(length)

    def take(self, n: int, *, out: Any = None, stream: Any = None) -> Any:
        """Pop the `n` oldest pages: one launch.

        Parameters
        ----------
        n : int
            How many; at most `known`.
        out : int64 array, shape (n,), optional
            Receives the pages.
        stream : stream, optional
            Where to launch; the current stream of the list's library by default.

        Returns
        -------
        int64 array, shape (n,)
            `out`, or a new array of the list's library.

        Raises
        ------
        OutOfPages
            Fewer than `n` are known to be there (see `refresh`). Nothing changes.
        ArgumentError
            `out` does not fit, or the stream is capturing: the host counts what it takes.
        """
        n = whole(n, "n")
        if n > self.known:
            raise OutOfPages(f"n: expected at most the {self.known} pages known to be in the list, got {n}")
        self._refuse_capture(stream)
        out = _take(self, n, out=out, stream=stream)
        self.note(-n)
        return out

    def _refuse_capture(self, stream: Any) -> None:
        if self._reader is not None and devices.is_capturing(choose(stream, self.ring)):
            raise ArgumentError("stream: expected one that is not capturing, because the host would count the pages once and every replay again")

    def note(self, change: int) -> None:
        """Take account of a launch whose outcome the host knows: pages put in or, negative, taken. `fill` and `take` do so themselves."""
        if self._reader is not None:
            self.settle()
            # What does not fit is dropped, but then the list is full.
            self._known = min(self._known + change, self.capacity)
            self._since.append(change)


@operation
def _append(values: Any, pages: DevicePages, *, stream: Any = None, signal: Signal | None = None) -> Any:
    """Append every value of an array."""
    pointer, length, id_type, device = vector(values, "pages", IDS)
    ring = pages.checked("pages", device, 0)
    if device < 0:
        return host(reference.append, pages, values, signal)
    if length == 0:
        return nothing()
    arguments = (pointer, length, *ring, signal_pointer(signal, device))
    return _APPEND.launch((id_type,), device, choose(stream, values), blocks_for(length), THREADS, arguments)


@operation
def _take(pages: DevicePages, n: int, *, out: Any = None, stream: Any = None) -> Any:
    """Pop pages that are known to be there."""
    if pages.device < 0:
        if out is not None:
            arrays.output(out, "out", ("int64",), pages.device, n)
        return host(reference.take, pages, n, out)
    launch_stream = choose(stream, pages.ring)
    out, result = out_vector(out, "out", n, "int64", pages.device, pages.ring, launch_stream)
    refuse_overlap("out", result, 8 * n, "the list's ring", describe(pages.ring)[0], 8 * pages.capacity)
    if n == 0:
        return nothing(out)
    arguments = (result, n, *pages.checked("pages", pages.device, 0))
    return _TAKE.launch((), pages.device, launch_stream, blocks_for(n), THREADS, arguments, out)


@operation
def gather_extend(
    prefix_lens: Any,
    seq_lens: Any,
    last_loc: Any,
    free_pages: Any,
    page_size: int,
    *,
    num_tokens: int,
    num_pages: int,
    out: Any = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Place the new tokens of a prefill: each request fills its last page, then takes new ones from a list.

    Parameters
    ----------
    prefix_lens, seq_lens : int32 or int64 array, shape (requests,)
        Tokens that each request has already, and will have; both of one dtype.
    last_loc : int32 or int64 array, shape (requests,)
        Location of each request's last token, with ``(last_loc + 1) % page_size == prefix % page_size``; -1 where the prefix is empty.
    free_pages : int64 array, shape (>= num_pages,)
        Pages to take, such as a view of a `FreeList`; the first `num_pages` are used, in order.
    page_size : int
        Tokens per page.
    num_tokens, num_pages : int
        The totals by the host's lengths: the sum of ``seq - prefix``, and of ``ceil(seq / page_size) - ceil(prefix / page_size)``.
    out : int64 array, shape (num_tokens,), optional
        Receives the locations, request after request.
    stream : stream, optional
        Where to launch; the current stream of `prefix_lens`' library by default.
    signal : Signal, optional
        Counts ``mismatch``, once per request whose lengths or `last_loc` break the contract (its tokens become 0, one with
        ``seq < prefix`` has none) and once if the device's total is not `num_tokens` (what is missing becomes 0, what is too much is
        dropped); and ``exhausted``, once per token whose page lies past `num_pages` or is no page (it becomes 0).

    Returns
    -------
    int64 array, shape (num_tokens,)
        `out`, or a new array of `prefix_lens`' library.

    Raises
    ------
    OutOfPages
        `free_pages` is shorter than `num_pages`. Nothing is launched.
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape or device, or a number is out of its range. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, no workspace, safe inside a capture when `out` is given. The placement is that of SGLang's paged
    allocator. Each block finds the requests of its tokens by a prefix sum over the lengths and a running maximum over the tokens where
    requests begin (after G. E. Blelloch, "Prefix sums and their applications", 1990), so a request may be of any length.

    Examples
    --------
    >>> prefix_lens, seq_lens, last_loc = np.array([2, 0]), np.array([6, 3]), np.array([41, -1])
    >>> gather_extend(prefix_lens, seq_lens, last_loc, np.array([5, 7]), 4, num_tokens=7, num_pages=2)
    array([42, 43, 20, 21, 28, 29, 30])
    """
    prefixes, requests, length_type, device = vector(prefix_lens, "prefix_lens", IDS)
    lengths, given, _, _ = vector(seq_lens, "seq_lens", (length_type,), device)
    _same_length("seq_lens", given, "prefix_lens", requests)
    last, given, id_type, _ = vector(last_loc, "last_loc", IDS, device)
    _same_length("last_loc", given, "prefix_lens", requests)
    free, listed, _, _ = vector(free_pages, "free_pages", ("int64",), device)
    page_size = positive(page_size, "page_size")
    num_tokens = whole(num_tokens, "num_tokens")
    num_pages = whole(num_pages, "num_pages")
    if num_pages > listed:
        raise OutOfPages(f"free_pages: expected at least the {num_pages} pages of num_pages, got {listed}")
    if out is not None:
        result = arrays.output(out, "out", ("int64",), device, num_tokens)[0]
        inputs = (("prefix_lens", prefixes, length_type), ("seq_lens", lengths, length_type), ("last_loc", last, id_type))
        for name, pointer, dtype in inputs:
            _refuse_overlap("out", result, 8 * num_tokens, name, pointer, dtype, requests)
        _refuse_overlap("out", result, 8 * num_tokens, "free_pages", free, "int64", num_pages)
    if device < 0:
        return host(
            reference.gather_extend,
            prefix_lens, seq_lens, last_loc, free_pages, page_size, num_tokens=num_tokens, num_pages=num_pages, out=out, signal=signal,
        )  # fmt: skip
    counters = signal_pointer(signal, device)
    launch_stream = choose(stream, prefix_lens)
    if out is None:
        out, result = allocate("out", num_tokens, "int64", prefix_lens, launch_stream)
    if num_tokens == 0 and (requests == 0 or not counters):
        return nothing(out)
    arguments = (prefixes, lengths, last, requests, free, num_pages, page_size, page_shift(page_size), result, num_tokens, counters)
    blocks = max(blocks_for(num_tokens, _TILE), 1)
    return _GATHER_EXTEND.launch((length_type, id_type), device, launch_stream, blocks, THREADS, arguments, out)


@operation
def gather_decode(
    seq_lens: Any,
    last_loc: Any,
    free_pages: Any,
    page_size: int,
    *,
    out: Any = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Place one new token per request: behind its last one, or first in the next free page where it starts a page.

    Parameters
    ----------
    seq_lens : int32 or int64 array, shape (requests,)
        Length of each request with the new token; 0 or less is a padded lane, which gets location 0 and no page.
    last_loc : int32 or int64 array, shape (requests,)
        Location of each request's last token. Not read where the new token starts a page.
    free_pages : int64 array
        Pages to take: the request that is the k-th to start a page takes ``free_pages[k]``.
    page_size : int
        Tokens per page.
    out : int64 array, shape (requests,), optional
        Receives the locations; apart from `seq_lens`, `last_loc` itself is allowed.
    stream : stream, optional
        Where to launch; the current stream of `seq_lens`' library by default.
    signal : Signal, optional
        Counts ``mismatch`` where ``(last_loc + 1) % page_size`` is not the new token's place in its page, and ``exhausted`` where
        `free_pages` has no page left or holds no page there. The token becomes 0.

    Returns
    -------
    int64 array, shape (requests,)
        `out`, or a new array of `seq_lens`' library.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape or device, or `out` overlaps `seq_lens`. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, no workspace, safe inside a capture when `out` is given. The placement is that of SGLang's paged
    allocator; which page is whose follows from a count over the lengths, so it is the same every time.

    Examples
    --------
    >>> gather_decode(np.array([3, 5, 0, 1]), np.array([9, 23, 0, -1]), np.array([6, 2, 3]), 4)
    array([10, 24,  0,  8])
    """
    lengths, requests, length_type, device = vector(seq_lens, "seq_lens", IDS)
    last, given, id_type, _ = vector(last_loc, "last_loc", IDS, device)
    _same_length("last_loc", given, "seq_lens", requests)
    free, num_pages, _, _ = vector(free_pages, "free_pages", ("int64",), device)
    page_size = positive(page_size, "page_size")
    launch_stream = 0 if device < 0 else choose(stream, seq_lens)
    if out is not None:
        result = arrays.output(out, "out", ("int64",), device, requests)[0]
        _refuse_overlap("out", result, 8 * requests, "seq_lens", lengths, length_type, requests)
        _refuse_overlap("out", result, 8 * requests, "free_pages", free, "int64", num_pages)
        if result != last:
            _refuse_overlap("out", result, 8 * requests, "last_loc", last, id_type, requests)
    if device < 0:
        return host(reference.gather_decode, seq_lens, last_loc, free_pages, page_size, out=out, signal=signal)
    counters = signal_pointer(signal, device)
    if out is None:
        out, result = allocate("out", requests, "int64", seq_lens, launch_stream)
    if requests == 0:
        return nothing(out)
    arguments = (lengths, last, requests, free, num_pages, page_size, page_shift(page_size), result, counters)
    blocks = min(blocks_for(requests), _MOST_COUNTING_BLOCKS)
    return _GATHER_DECODE.launch((length_type, id_type), device, launch_stream, blocks, THREADS, arguments, out)


@operation
def compact(ids: Any, keep: Any, *, out: Any = None, out_len: Any = None, stream: Any = None, signal: Signal | None = None) -> Any:
    """Keep the flagged ids, in order, and say how many there are: a selection whose length stays on the device.

    Parameters
    ----------
    ids : int32 or int64 array, shape (n,)
        Ids to choose from; any values.
    keep : bool or uint8 array, shape (n,)
        Not zero where the id stays.
    out : array of `ids`' dtype, shape (n,), optional
        Receives the ids that stay; entries past their number are left as they are. Apart from `ids` and `keep`.
    out_len : int64 array, shape (1,), optional
        Receives the number.
    stream, signal
        As in `gather_decode`; nothing is counted.

    Returns
    -------
    out : array of `ids`' dtype, shape (n,)
    out_len : int64 array, shape (1,)
        The given ones, or new arrays of `ids`' library.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape or device, or `out` overlaps an input. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, no workspace, safe inside a capture when `out` and `out_len` are given. Each block counts the flags
    before its part itself, which for the sizes of a batch costs less than a second launch or a look-back.

    Examples
    --------
    >>> compact(np.array([4, 7, 2]), np.array([True, False, True]), out=np.array([0, 0, 9]))
    (array([4, 2, 9]), array([2]))
    """
    source, length, id_type, device = vector(ids, "ids", IDS)
    flags, given, flag_type, _ = vector(keep, "keep", ("bool", "uint8"), device)
    _same_length("keep", given, "ids", length)
    if out is not None:
        result = arrays.output(out, "out", (id_type,), device, length)[0]
        size = length * ITEMSIZE[id_type]
        _refuse_overlap("out", result, size, "ids", source, id_type, length)
        _refuse_overlap("out", result, size, "keep", flags, flag_type, length)
    if out_len is not None:
        number = arrays.output(out_len, "out_len", ("int64",), device, 1)[0]
    if device < 0:
        return host(reference.compact, ids, keep, out=out, out_len=out_len, signal=signal)
    signal_pointer(signal, device)
    launch_stream = choose(stream, ids)
    if out is None:
        out, result = allocate("out", length, id_type, ids, launch_stream)
    if out_len is None:
        out_len, number = allocate("out_len", 1, "int64", ids, launch_stream)
    arguments = (source, flags, length, result, number)
    blocks = min(max(blocks_for(length), 1), _MOST_COUNTING_BLOCKS)
    return _COMPACT.launch((id_type,), device, launch_stream, blocks, THREADS, arguments, (out, out_len))


def _same_length(name: str, length: int, other: str, expected: int) -> None:
    if length != expected:
        raise ArgumentError(f"{name}: expected shape ({expected},) like {other}, got ({length},)")


def _refuse_overlap(name: str, pointer: int, size: int, other: str, other_pointer: int, other_type: str, other_length: int) -> None:
    refuse_overlap(name, pointer, size, other, other_pointer, other_length * ITEMSIZE[other_type])
