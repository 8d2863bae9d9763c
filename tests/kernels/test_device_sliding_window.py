"""Sliding-window ops on the device against their reference: the same call on device arrays and on NumPy copies, then all compared.

Rows hold bad and dead ids at random; ids are distinct unless a test is about duplicates, of which any may be the one that frees. Sizes
count requests or pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpukit import ArgumentError, ArgumentTypeError, arrays
from gpukit.kernels import page_table, sliding_window
from gpukit.kernels.free_list import DevicePages
from tests.helpers.both import Both, random_pair

IDS = ("int32", "int64")
PAGE_SIZES = (1, 3, 16, 64, 128)


def token_ids(rng: np.random.Generator, count: int, pages: int, page_size: int, bad: bool) -> np.ndarray:
    """First tokens of `count` distinct pages out of 1 … pages, as far as there are; with bad ones a tenth is none of the table's."""
    ids = np.resize(rng.permutation(pages) + 1, count) if count > pages else rng.permutation(pages)[:count] + 1
    tokens = ids * page_size + rng.integers(0, page_size, count)
    if bad:
        tokens = np.where(rng.random(count) < 0.1, rng.choice([-1, 0, -7 * page_size, (pages + 1) * page_size, 2**31 - 1], count), tokens)
    return tokens


def page_rows(rng: np.random.Generator, shape: tuple[int, int], page_size: int, pages: int, bad: bool) -> np.ndarray:
    """Token-granular rows of distinct pages, of which only the first token of each page tells; the others are poison."""
    height, columns = shape
    rows = np.full((height, columns * page_size), -5)
    rows[:, ::page_size] = token_ids(rng, height * columns, pages, page_size, bad).reshape(shape)
    return rows


def retire_both(both: Both, page_size: int, times: int = 1, **arguments: Any) -> None:
    """Retire on both sides; `view` picks the rows, names in strings pick arrays of the side."""
    view = arguments.pop("view", lambda rows: rows)
    for side, signal in both:
        given = {name: getattr(side, value) if isinstance(value, str) else value for name, value in arguments.items()}
        starts, stops = given.pop("starts", None), given.pop("stops", None)
        for _ in range(times):
            sliding_window.retire(
                *(view(side.rows), side.starts if starts is None else starts, side.stops if stops is None else stops),
                *(page_size, side.v2p, side.p2v, side.pages),
                signal=signal,
                **given,
            )
    both.assert_equal()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_retire_equals_the_reference(device: Any, size: int, page_size: int) -> None:
    """Three pages a row; a second time in a row nothing is left to retire."""
    rng = np.random.default_rng([size, page_size])
    size = min(size, 2**24 // page_size)
    for bad in ((size + page_size) % 2 == 1,) if device.simulated else (False, True):
        v2p, p2v = random_pair(rng, 3 * size + 2, 0.6 if bad else 1.0)
        rows = page_rows(rng, (size, 3), page_size, 3 * size + 2, bad)[:, : max(3 * page_size - 2, 1)]
        starts = rng.integers(0, 3, size) * page_size
        stops = starts + rng.integers(-1, 3, size) * page_size
        request_indices = rng.permutation(size)
        if bad:
            wrong = rng.random(size)
            starts = np.where(wrong < 0.1, rng.choice([-page_size, -1, 1, 5], size), starts)
            stops = np.where((wrong > 0.1) & (wrong < 0.2), rng.choice([-1, 2 * page_size + 1, 2**31 - 1], size), stops)
            request_indices = np.where(wrong > 0.95, rng.choice([-1, size, size + 7], size), request_indices)
        id_type, length_type = rng.permutation(IDS)
        both = Both(
            device,
            {"pages": 3 * size + 5},
            rows=rows.astype(id_type),
            starts=starts.astype(length_type),
            stops=stops.astype(length_type),
            requests=request_indices.astype(length_type),
            v2p=v2p,
            p2v=p2v,
        )
        # starts that are no page boundary would be an error where they are in host memory.
        if bad:
            _assert_reference(device, both, page_size)
        else:
            retire_both(both, page_size, times=2 if size < 8 else 1, request_indices="requests")


def _assert_reference(device: Any, both: Both, page_size: int) -> None:
    """The device's op against the reference itself, which takes the starts that the op refuses on the host."""
    from gpukit.kernels.reference import sliding_window as reference

    here, there = both.host, both.there
    for retire, side, signal in ((reference.retire, here, both.signals[0]), (sliding_window.retire, there, both.signals[1])):
        retire(
            *(side.rows, side.starts, side.stops, page_size, side.v2p, side.p2v, side.pages),
            request_indices=side.requests,
            signal=signal,
        )
    both.assert_equal()


@pytest.mark.parametrize("small_workspace", [False, True])
def test_retire_of_several_tiles(device: Any, small_workspace: bool) -> None:
    """Long segments over tile borders beside empty ones; with a workspace for one tile one block does it all."""
    rng = np.random.default_rng(3)
    lengths = np.array([0, 200, 0, 1, 0, 110, 0]) if device.simulated else rng.integers(0, 3000, 700)
    width = int(lengths.max()) + 1
    total = len(lengths) * width
    v2p, p2v = random_pair(rng, total, 0.7)
    starts = rng.integers(0, 2, len(lengths)) * 2
    rows = page_rows(rng, (len(lengths), width), 2, total, True)
    both = Both(device, {"pages": total}, rows=rows, starts=starts, stops=starts + 2 * lengths, v2p=v2p, p2v=p2v)
    if small_workspace:
        pages = both.there.pages
        pages.workspace, pages.most_items = device.array(np.zeros(3, np.int64)), 256
        pages._pointers = (*pages._pointers[:3], arrays.describe(pages.workspace)[0])
    retire_both(both, 2)
    assert len(both.held("pages")) > lengths.sum() // 2


def test_retire_of_strided_rows(device: Any) -> None:
    rng = np.random.default_rng(4)
    views = (
        lambda rows: rows[:, 3:23],
        lambda rows: rows[::2, ::3],
        lambda rows: rows[::-1, 30:2:-1],
        lambda rows: rows.T[:6, :6],
    )
    for view in views:
        v2p, p2v = random_pair(rng, 1700)
        rows = token_ids(rng, 12 * 40, 1700, 4, False).reshape(12, 40).astype("int32")
        both = Both(device, {"pages": 400}, rows=rows, starts=np.array([4, 0, 8]), stops=np.array([16, 4, 8]), v2p=v2p, p2v=p2v)
        retire_both(both, 4, view=view)
        assert 1 < len(both.held("pages")) <= 4


@pytest.mark.parametrize("known", ["starts", "stops", "both", "all"])
def test_retire_of_host_values(device: Any, known: str) -> None:
    """Values in host memory beside device rows: lists, ranges and NumPy arrays, which may be changed right after the call."""
    rng = np.random.default_rng(5)
    v2p, p2v = random_pair(rng, 100, 1.0)
    starts, stops, requests = [0, 4, 8, 0], [8, 4, 20, 4], [3, 1, 0, 2]
    both = Both(
        device,
        {"pages": 100},
        rows=page_rows(rng, (5, 5), 4, 100, False),
        starts=np.array(starts, "int32"),
        stops=np.array(stops, "int32"),
        requests=np.array(requests, "int32"),
        v2p=v2p,
        p2v=p2v,
    )
    changed = np.array(stops)
    given: dict[str, Any] = {"starts": starts} if known != "stops" else {}
    given |= {"stops": changed} if known != "starts" else {}
    retire_both(both, 4, request_indices=tuple(requests) if known == "all" else "requests", **given)
    changed[:] = 0
    assert len(both.held("pages")) == 6


def test_retire_of_rows_without_tokens_and_of_no_requests(device: Any) -> None:
    rng = np.random.default_rng(6)
    v2p, p2v = random_pair(rng, 20)
    rows, starts, stops, requests = np.zeros((3, 0), np.int64), np.array([0, 0]), np.array([8, 0]), np.array([3, 0])
    both = Both(device, {"pages": 9}, rows=rows, starts=starts, stops=stops, requests=requests, v2p=v2p, p2v=p2v)
    retire_both(both, 4, request_indices="requests")
    assert both.signals[0].counts() == {"out_of_range": 1}
    retire_both(both, 4, starts=[], stops=[])
    retire_both(both, 4, starts=range(0, 8, 4), stops=(0, 0))


def test_host_values_on_a_busy_stream_and_in_a_capture(device: Any) -> None:
    """Each call's values arrive although the device is far behind; a capture refuses them by name, and takes a prepared call."""
    if device.simulated:
        pytest.skip("streams are a GPU's")
    import cupy

    rng = np.random.default_rng(7)
    v2p, p2v = random_pair(rng, 4000, 1.0)
    rows = page_rows(rng, (8, 500), 4, 4000, False)
    both = Both(device, {"pages": 4000}, rows=rows, v2p=v2p, p2v=p2v)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        pending = cupy.zeros(1 << 28, cupy.float32)
        for _ in range(100):
            pending += 1
    values = np.zeros((2, 8), np.int64)
    for _ in range(100):
        values[0], values[1] = values[1], values[1] + 4 * rng.integers(0, 6, 8)
        for side, _ in both:
            sliding_window.retire(side.rows, values[0], values[1], 4, side.v2p, side.p2v, side.pages, stream=stream)
    stream.synchronize()
    both.assert_equal()
    there, here = both.there, both.host
    stop = values[1] + 8
    prepared = sliding_window.retire.prepare(there.rows, values[1], stop, 4, there.v2p, there.p2v, there.pages, stream=stream)
    stream.begin_capture()
    with pytest.raises(ArgumentError, match=r"^starts: expected a device array, because the stream is capturing"):
        sliding_window.retire(there.rows, [0] * 8, [8] * 8, 4, there.v2p, there.p2v, there.pages, stream=stream)
    prepared()
    graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    sliding_window.retire(here.rows, values[1], stop, 4, here.v2p, here.p2v, here.pages)
    both.assert_equal()


def test_retire_counts_duplicates_and_a_full_ring(device: Any) -> None:
    v2p, p2v = page_table.empty(8)
    page_table.bind(np.arange(1, 8), np.arange(7, 0, -1), v2p, p2v)
    rows = np.tile(np.arange(4, 32), (3, 1))
    both = Both(device, {"pages": 5}, rows=rows, starts=np.array([0, 0, 8]), stops=np.array([28, 28, 16]), v2p=v2p, p2v=p2v)
    retire_both_counts(both)
    assert both.signals[1].counts() == {"unbound": 9, "exhausted": 2}


def retire_both_counts(both: Both) -> None:
    """Which of equal ids frees its page is open, and so is the order; tables, tail and counts are not."""
    for side, signal in both:
        sliding_window.retire(side.rows, side.starts, side.stops, 4, side.v2p, side.p2v, side.pages, signal=signal)
    for name in ("v2p", "p2v"):
        np.testing.assert_array_equal(both._device.host(getattr(both.there, name)), getattr(both.host, name))
    np.testing.assert_array_equal(both._device.host(both.there.pages.counters), both.host.pages.counters)
    assert both.signals[0].counts() == both.signals[1].counts()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_free_segment_equals_the_reference(device: Any, size: int, page_size: int) -> None:
    """`size` pages, the last one partial; a third of them is retired in the other sub-pool, whose tables are of other lengths."""
    rng = np.random.default_rng([size, page_size])
    size = min(size, 2**26 // page_size)
    for bad in ((size + page_size) % 2 == 1,) if device.simulated else (False, True):
        owner = random_pair(rng, size + 2, 0.8 if bad else 1.0)
        other = random_pair(rng, size // 2 + 2, 0.9, num_virtual=size + 2)
        tokens = token_ids(rng, size, size + 2, page_size, bad)
        row = np.full(size * page_size, -5)
        row[::page_size] = tokens
        row = row[: len(row) - page_size // 2] if size else row
        short = 3 * size // 4 + 1 if bad else size + 2
        both = Both(
            device,
            {"virtual": short, "owner": short + 1, "other": short // 2 + 1},
            row=row.astype(IDS[int(bad)]),
            **dict(zip(("owner_v2p", "owner_p2v", "other_v2p", "other_p2v"), (*owner, *other), strict=True)),
        )
        free_both(both, 2 * page_size, page_size)
        if not bad:
            assert both.held("virtual") == (tokens // page_size).tolist()


def free_both(both: Both, start: int, page_size: int, view: Any = lambda row: row) -> None:
    for side, signal in both:
        sliding_window.free_segment(
            *(view(side.row), start, page_size, side.owner_v2p, side.owner_p2v, side.other_v2p, side.other_p2v),
            *(side.virtual, side.owner, side.other),
            signal=signal,
        )
    both.assert_equal()


def test_free_segment_of_strided_rows_and_stale_tables(device: Any) -> None:
    """A row of a column-major matrix, backwards; one page's entries in the other sub-pool do not agree, so it is not freed there."""
    rng = np.random.default_rng(8)
    owner, other = random_pair(rng, 30, 1.0), random_pair(rng, 30, 1.0)
    matrix = token_ids(rng, 24, 30, 3, False).reshape(12, 2)
    both = Both(
        device,
        {"virtual": 30, "owner": 30, "other": 30},
        row=matrix,
        **dict(zip(("owner_v2p", "owner_p2v", "other_v2p", "other_p2v"), (*owner, *other), strict=True)),
    )
    free_both(both, 3, 3, view=lambda matrix: matrix[::-1, 1])
    assert both.held("virtual") == (matrix[::-3, 1] // 3).tolist()
    free_both(both, 3, 3, view=lambda matrix: matrix[::-1, 1])
    assert both.signals[0].counts() == {"unbound": 4}


def test_retire_then_free_segment(device: Any) -> None:
    """The life of a request: its window retires two pages, then it ends. No page is freed twice, none is lost."""
    full, window = page_table.empty(8, 9), page_table.empty(8, 9)
    page_table.bind(np.array([2, 5, 7]), np.array([8, 3, 1]), *full)
    page_table.bind(np.array([2, 5, 7]), np.array([1, 2, 4]), *window)
    row = np.array([[8, 9, 10, 11, 20, 21, 22, 23, 28, 29]])
    both = Both(
        device,
        {"pages": 9, "virtual": 9, "owner": 9},
        rows=row,
        starts=np.array([0]),
        stops=np.array([8]),
        **dict(zip(("owner_v2p", "owner_p2v", "v2p", "p2v"), (*full, *window), strict=True)),
    )
    retire_both(both, 4)
    assert both.held("pages") == [1, 2]
    for side, signal in both:
        sliding_window.free_segment(
            *(side.rows[0], 0, 4, side.owner_v2p, side.owner_p2v, side.v2p, side.p2v, side.virtual, side.owner, side.pages), signal=signal
        )
    both.assert_equal()
    assert [both.held(name) for name in ("virtual", "owner", "pages")] == [[2, 5, 7], [8, 3, 1], [1, 2, 4]]
    assert both.signals[0].counts() == {}


ROWS = np.zeros((3, 8), np.int64)
LONGS = np.zeros(3, np.int64)


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (ArgumentTypeError, "rows: expected dtype int32 or int64, got float64", {"rows": ROWS * 1.0}),
        (ArgumentError, r"rows: expected 2 dimensions, got shape \(3,\)", {"rows": LONGS}),
        (ArgumentError, "starts: expected multiples of page_size 4, got 2 for request 1", {"starts": [0, 2, 4]}),
        (ArgumentError, "starts: expected multiples of page_size 4, got -4 for request 2", {"starts": [0, 0, -4]}),
        (ArgumentTypeError, "starts: expected dtype int32 or int64, got float64", {"starts": [0.0, 4.0, 4.0]}),
        (ArgumentError, r"starts: expected 1 dimension, got shape \(1, 3\)", {"starts": [[0, 4, 4]]}),
        (ArgumentError, r"stops: expected shape \(3,\) like starts, got \(2,\)", {"stops": [0, 4]}),
        (ArgumentError, r"request_indices: expected shape \(3,\) like starts, got \(1,\)", {"request_indices": LONGS[:1]}),
        (ArgumentError, "starts: expected at most 3 requests, one per row, .* got 4", {"starts": [0] * 4, "stops": [0] * 4}),
        (ArgumentError, "page_size: expected at least 1, got 0", {"page_size": 0}),
        (ArgumentError, "v2p: expected at least 2 rows", {"v2p": LONGS[:1]}),
        (ArgumentTypeError, "p2v: expected dtype int64, got int32", {"p2v": np.zeros(3, np.int32)}),
        (ArgumentTypeError, "pages: expected a DevicePages, got list", {"pages": []}),
    ],
)
def test_retire_refuses_by_name(error: type[Exception], message: str, changed: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"rows": ROWS, "starts": LONGS, "stops": LONGS, "page_size": 4}
    arguments |= {"v2p": LONGS.copy(), "p2v": LONGS.copy(), "pages": DevicePages(3)} | changed
    with pytest.raises(error, match=f"^{message}"):
        sliding_window.retire(**arguments)


def test_retire_refuses_mixed_places_and_dtypes(device: Any) -> None:
    both = Both(device, {"pages": 3}, rows=ROWS, starts=LONGS, stops=LONGS, ints=LONGS.astype("int32"), v2p=LONGS.copy(), p2v=LONGS.copy())
    here, there = both.host, both.there
    with pytest.raises(ArgumentTypeError, match=r"^starts: expected an array in host memory"):
        sliding_window.retire(here.rows, there.starts, here.stops, 4, here.v2p, here.p2v, here.pages)
    with pytest.raises(ArgumentTypeError, match=r"^v2p: expected an array in device 0"):
        sliding_window.retire(there.rows, there.starts, there.stops, 4, here.v2p, there.p2v, there.pages)
    with pytest.raises(ArgumentTypeError, match=r"^stops: expected dtype int64, got int32"):
        sliding_window.retire(there.rows, there.starts, there.ints, 4, there.v2p, there.p2v, there.pages)
    with pytest.raises(ArgumentError, match=r"^stops: expected values within int32"):
        sliding_window.retire(there.rows, there.ints, [0, 0, 2**31], 4, there.v2p, there.p2v, there.pages)
    with pytest.raises(ArgumentError, match=r"^starts: expected multiples of page_size 4, got 3"):
        sliding_window.retire(there.rows, [0, 0, 3], there.stops, 4, there.v2p, there.p2v, there.pages)
    with pytest.raises(ArgumentError, match=r"^pages: expected a list in device 0"):
        sliding_window.retire(there.rows, there.starts, there.stops, 4, there.v2p, there.p2v, here.pages)
    both.assert_equal()


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (ArgumentTypeError, "row_slice: expected dtype int32 or int64, got float64", {"row_slice": LONGS * 1.0}),
        (ArgumentError, r"row_slice: expected 1 dimension, got shape \(3, 8\)", {"row_slice": ROWS}),
        (ArgumentError, "start: expected a multiple of page_size 4, got 6", {"start": 6}),
        (ArgumentError, "start: expected at least 0, got -4", {"start": -4}),
        (ArgumentError, "page_size: expected at least 1, got 0", {"page_size": 0}),
        (ArgumentTypeError, "owner_v2p: expected dtype int64", {"owner_v2p": LONGS.astype("int32")}),
        (ArgumentError, "owner_p2v: expected at least 2 rows", {"owner_p2v": LONGS[:1]}),
        (ArgumentTypeError, "other_v2p: expected dtype int64", {"other_v2p": LONGS.astype("int32")}),
        (ArgumentError, "other_p2v: expected a contiguous array", {"other_p2v": ROWS[:, 0]}),
        (ArgumentTypeError, "virtual_pages: expected a DevicePages, got ndarray", {"virtual_pages": LONGS}),
        (ArgumentError, "virtual_pages, owner_pages, other_pages: expected three different lists", {"same": True}),
    ],
)
def test_free_segment_refuses_by_name(error: type[Exception], message: str, changed: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"row_slice": LONGS, "start": 4, "page_size": 4}
    arguments |= {name: LONGS.copy() for name in ("owner_v2p", "owner_p2v", "other_v2p", "other_p2v")}
    arguments |= {name: DevicePages(3) for name in ("virtual_pages", "owner_pages", "other_pages")}
    if changed == {"same": True}:
        changed = {"other_pages": arguments["owner_pages"]}
    with pytest.raises(error, match=f"^{message}"):
        sliding_window.free_segment(**arguments | changed)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ArgumentError, "key_length: expected at least 0, got -1", (-1, 127, 64)),
        (ArgumentError, "window: expected at least 0, got -1", (5, -1, 64)),
        (ArgumentError, "page_size: expected at least 1, got 0", (5, 127, 0)),
        (ArgumentTypeError, "key_length: expected an integer, got float", (5.0, 127, 64)),
    ],
)
def test_frontier_refuses_by_name(error: type[Exception], message: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(error, match=f"^{message}"):
        sliding_window.frontier(*arguments)


def test_frontier_known_answers() -> None:
    """W=127, P=64, L=1024, with the key one token short or whole."""
    assert [sliding_window.frontier(length, 127, 64) for length in (1023, 1024)] == [832, 896]
    assert sliding_window.frontier(np.int64(1024), 127, 64, old=960, retain=128) == 128


def test_free_segment_orders_its_tiles_by_the_owners_workspace(device: Any) -> None:
    tables = [device.array(table) for table in (*page_table.empty(9), *page_table.empty(9))]
    lists = [DevicePages(capacity, like=tables[0]) for capacity in (9, 9, 5)]
    plan = sliding_window.free_segment.plan(device.array(np.arange(16, 48)), 0, 4, *tables, *lists)
    workspaces = [pages.checked("pages", 0, 0)[3] for pages in lists]
    assert workspaces[1] in plan[6] and workspaces[0] not in plan[6] and workspaces[2] not in plan[6]
