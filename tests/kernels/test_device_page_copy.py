"""Page-byte ops: their arguments and their NumPy backend anywhere, their kernels against the reference on a GPU.

A device test makes the same arrays on the host and on the device, calls the op on both and compares every byte of the buffer and every
count of the signal. Device arrays lie between guard bytes in allocations of their own, and buffers end in bytes that are no page: both
must survive.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpukit import Signal
from gpukit.compile.cuda_c import source_path
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.kernels import page_copy

IDS = ("int32", "int64")
SMALL = (16, 48, 4096)
LARGE = 2 * 2**20 + 16
# (page_bytes, pages): none, one, two, odd, many, and a page larger than what blocks share.
BATCHES = [(page_bytes, pages) for page_bytes in SMALL for pages in (0, 1, 2, 33, 257)]
BATCHES += [(16, 65_537), (48, 65_537), (4096, 65_537), (4112, 301), (10_240, 77), (LARGE, 0), (LARGE, 1), (LARGE, 2), (LARGE, 7)]
SLACK = 13


def make_buffer(pages: int, page_bytes: int, seed: int = 0) -> np.ndarray:
    """Random pages and a rest that is none, as many bytes as a test can tell apart."""
    return np.random.default_rng(seed).integers(0, 256, pages * page_bytes + SLACK, dtype=np.uint8)


def spoiled(rng: np.random.Generator, ids: np.ndarray, pages: int) -> np.ndarray:
    """The ids with about a fifth replaced by ids that no buffer has."""
    bad = rng.choice([-1, -(2**31), pages, pages + 1, 2**31 - 1], len(ids))
    return np.where(rng.random(len(ids)) < 0.2, bad, ids)


# Anywhere: arguments, and the NumPy backend.

ids = np.array([1, 2])
pages_of_16 = np.zeros(64, np.uint8)
ROWS = np.zeros((5, 4), np.float32)
K = np.ones((2, 4), np.float32)


def misaligned() -> np.ndarray:
    """A buffer that begins 8 bytes after a multiple of 16."""
    memory = np.zeros(128, np.uint8)
    start = 8 - memory.ctypes.data % 16
    return memory[start % 16 :][:64]


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


move, shift, zero, store = page_copy.move_pages, page_copy.shift_pages, page_copy.zero_pages, page_copy.store_kv
OVERLAPPING = np.lib.stride_tricks.as_strided(ROWS, (5, 4), (8, 4))

VALUE, TYPE = ArgumentError, ArgumentTypeError
BAD_CALLS = [
    (lambda: move([1], 16, ids, ids), TYPE, "buffer: expected an array .* got list"),
    (lambda: move(pages_of_16.view(np.int8), 16, ids, ids), TYPE, "buffer: expected dtype uint8, got int8"),
    (lambda: move(pages_of_16.reshape(4, 16), 16, ids, ids), VALUE, r"buffer: expected 1 dimension, got shape \(4, 16\)"),
    (lambda: move(pages_of_16[::2], 16, ids, ids), VALUE, "buffer: expected a contiguous array"),
    (lambda: move(read_only(pages_of_16), 16, ids, ids), VALUE, "buffer: expected a writable array"),
    (lambda: move(misaligned(), 16, ids, ids), VALUE, "buffer: expected an address that is a multiple of 16, got 0x"),
    (lambda: move(pages_of_16, 24, ids, ids), VALUE, "page_bytes: expected a multiple of 16, got 24"),
    (lambda: move(pages_of_16, 0, ids, ids), VALUE, "page_bytes: expected at least 1, got 0"),
    (lambda: move(pages_of_16, 16.0, ids, ids), TYPE, "page_bytes: expected an integer, got float"),
    (lambda: move(pages_of_16, 16, ids * 1.0, ids), TYPE, "source: expected dtype int32 or int64, got float64"),
    (lambda: move(pages_of_16, 16, ids, ids.astype("int32")), TYPE, "destination: expected dtype int64, got int32"),
    (lambda: move(pages_of_16, 16, ids, ids[:1]), VALUE, r"destination: expected shape \(2,\) like source, got \(1,\)"),
    (lambda: zero(pages_of_16, 8, ids), VALUE, "page_bytes: expected a multiple of 16, got 8"),
    (lambda: zero(pages_of_16, 16, ids[::-1]), VALUE, "pages: expected a contiguous array"),
    (lambda: shift(pages_of_16, 16, 5, 0, 0), VALUE, "first: expected at most 4, the pages of buffer, got 5"),
    (lambda: shift(pages_of_16, 16, -1, 1, 1), VALUE, "first: expected at least 0, got -1"),
    (lambda: shift(pages_of_16, 16, 1, 4, -1), VALUE, "count: expected at most 3, .* from 1 on, got 4"),
    (lambda: shift(pages_of_16, 16, 1, 2, 2), VALUE, "offset: expected -1 … 1, which stays in buffer, got 2"),
    (lambda: shift(pages_of_16, 16, 1, 2, -2), VALUE, "offset: expected -1 … 1, which stays in buffer, got -2"),
    (lambda: shift(pages_of_16, 16, 1, 2, None), TYPE, "offset: expected an integer, got NoneType"),
    (lambda: store(K[0], K, ids, ROWS, ROWS), VALUE, r"k: expected rows, at least 2 dimensions, got shape \(4,\)"),
    (lambda: store(K[:1], K, ids, ROWS, ROWS), VALUE, r"k: expected 2 rows like locations, got shape \(1, 4\)"),
    (lambda: store(K, K[:0], ids, ROWS, ROWS), VALUE, r"v: expected 2 rows like locations, got shape \(0, 4\)"),
    (lambda: store(K[:, :0], K, ids, ROWS[:, :0], ROWS), VALUE, "k: expected rows of at least one element"),
    (lambda: store(K, K[:, ::2], ids, ROWS, ROWS), VALUE, "v: expected rows that are contiguous within, .* strides"),
    (lambda: store(K.astype(complex), K, ids, ROWS, ROWS), TYPE, "k: expected dtype .*, got complex128"),
    (lambda: store(K, K, ids * 1.0, ROWS, ROWS), TYPE, "locations: expected dtype int32 or int64, got float64"),
    (lambda: store(K, K, ids, ROWS.view(np.int32), ROWS), TYPE, "key_rows: expected dtype float32 like k, got int32"),
    (lambda: store(K, K, ids, ROWS, ROWS.view(np.uint16)), TYPE, "value_rows: expected dtype float32 like v, got uint16"),
    (lambda: store(K, K, ids, ROWS, ROWS[:, :3]), VALUE, r"value_rows: expected rows of shape \(4,\) like v, got shape \(5, 3\)"),
    (lambda: store(K, K, ids, read_only(ROWS), ROWS), VALUE, "key_rows: expected a writable array"),
    (lambda: store(K, K, ids, OVERLAPPING, ROWS), VALUE, "key_rows: expected rows apart from each other, got rows of 16 bytes every 8"),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[message for _, _, message in BAD_CALLS])
def test_bad_arguments_are_named_and_nothing_is_written(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
    assert not pages_of_16.any() and not ROWS.any()


def test_numpy_arrays_run_the_reference_and_count_on_the_host() -> None:
    buffer, signal = np.repeat(np.arange(6, dtype=np.uint8), 48), Signal()
    page_copy.move_pages(buffer, 48, np.array([5, 0, 9]), np.array([1, 2, 3]), signal=signal)
    page_copy.shift_pages(buffer, 48, 2, 3, 1, signal=signal)
    page_copy.zero_pages(buffer, 48, np.array([2, 6], np.int32), signal=signal)
    assert buffer[::48].tolist() == [0, 5, 0, 2, 3, 4]
    assert signal.counts() == {"out_of_range": 3}


def test_rows_of_more_dimensions_and_twin_dtypes_on_the_host() -> None:
    key_rows, value_rows = np.zeros((4, 2, 3), np.uint16), np.zeros((4, 5), ml_dtypes.float8_e4m3fn)
    k = np.arange(12).reshape(2, 2, 3).astype(ml_dtypes.bfloat16)
    v = np.arange(10, dtype=np.uint8).reshape(2, 5)
    signal = Signal()
    page_copy.store_kv(k, v, np.array([3, 4]), key_rows, value_rows, signal=signal)
    assert (key_rows[3] == k[0].view(np.uint16)).all() and not key_rows[:3].any()
    assert value_rows[3].view(np.uint8).tolist() == v[0].tolist() and not value_rows[:3].view(np.uint8).any()
    assert signal.counts() == {"out_of_range": 1}


def test_prepared_calls_on_the_host_run_again() -> None:
    buffer = np.repeat(np.arange(5, dtype=np.uint8), 16)
    call = page_copy.shift_pages.prepare(buffer, 16, 1, 3, 1)
    call()
    call()
    assert buffer[::16].tolist() == [0, 1, 1, 1, 2]


def test_the_constants_of_the_plans_are_those_of_the_kernels() -> None:
    source = source_path("page_copy").read_text()
    constants = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", source)}
    assert constants["THREADS_SHIFT"] == page_copy._THREADS_SHIFT
    assert constants["STEPS"] == 1 << page_copy._STEPS_SHIFT
    assert constants["MOST_SHIFT_THREADS"] == page_copy._SHIFT_THREADS
    assert constants["SHIFT_STEPS"] == page_copy._SHIFT_STEPS


@pytest.mark.parametrize("steps_shift", [0, page_copy._STEPS_SHIFT])
@pytest.mark.parametrize("item_vectors", [1, 2, 3, 255, 256, 257, 1023, 1024, 1025, 131_072, 131_073])
def test_blocks_are_enough_and_not_many_more(item_vectors: int, steps_shift: int) -> None:
    for items in (1, 2, 33, 100_000):
        vectors, capacity = items * item_vectors, page_copy._blocks(items, item_vectors, steps_shift) * (page_copy._THREADS << steps_shift)
        # Shares are powers of two: at worst every other place of a block is free, and the last block of each item or of all.
        assert vectors <= capacity < 2 * vectors + (page_copy._THREADS << steps_shift)


@pytest.mark.parametrize("distance", [1, 3, 16, 128, 2000, 4096, 131_073, 2**30])
@pytest.mark.parametrize("vectors", [1, 2, 255, 4096, 131_073, 2**26])
def test_shift_layouts_cover_the_run_in_whole_chains(vectors: int, distance: int) -> None:
    for signed in (distance, -distance):
        rows, width, band_shift, blocks, threads = page_copy._shift_layout(vectors, signed)
        assert (rows - 1) * width < vectors <= rows * width
        assert width == distance or distance >= vectors
        assert (blocks - 1) << band_shift < width <= blocks << band_shift
        assert 1 << band_shift <= threads <= page_copy._SHIFT_THREADS and threads & (threads - 1) == 0


def test_a_page_of_megabytes_and_many_of_kilobytes_fill_a_device() -> None:
    assert page_copy._blocks(1, 2**21 // 16, page_copy._steps_shift(2**21 // 16)) >= 264
    assert page_copy._blocks(100_000, 4096 // 16, page_copy._steps_shift(100_000 * 4096 // 16)) >= 264
    assert page_copy._shift_layout(2**21 // 16, 2**30)[3] >= 264


# On a GPU.


@pytest.fixture
def card() -> Iterator[Any]:
    """A GPU through CuPy, whose arrays lie between guard bytes."""
    from tests.helpers.device import CupyDevice

    made = CupyDevice()
    yield made
    made.check_guards()


def to_numpy(array: Any) -> np.ndarray:
    """A host copy of an array of any GPU library."""
    import cupy

    return cupy.asnumpy(cupy.asarray(array))


@pytest.mark.gpu
@pytest.mark.parametrize("id_dtype", IDS)
@pytest.mark.parametrize(("page_bytes", "pages"), BATCHES)
def test_move_pages_equals_the_reference(card: Any, page_bytes: int, pages: int, id_dtype: str) -> None:
    rng = np.random.default_rng(pages)
    total = 2 * pages + 3
    order = rng.permutation(total - 1) + 1
    source, destination = spoiled(rng, order[:pages], total).astype(id_dtype), order[pages : 2 * pages].astype(id_dtype)
    # Some of the bad ones are destinations, and some pairs name the sink.
    source[::7], destination[::7] = destination[::7].copy(), source[::7].copy()
    source[3::11], destination[5::11] = 0, 0
    buffer = make_buffer(total, page_bytes)
    there = card.array(buffer)
    here_signal, there_signal = Signal(), Signal(like=there)
    page_copy.move_pages(there, page_bytes, card.array(source), card.array(destination), signal=there_signal)
    page_copy.move_pages(buffer, page_bytes, source, destination, signal=here_signal)
    assert np.array_equal(card.host(there), buffer)
    assert there_signal.counts() == here_signal.counts()


@pytest.mark.gpu
@pytest.mark.parametrize("id_dtype", IDS)
@pytest.mark.parametrize(("page_bytes", "pages"), BATCHES)
def test_zero_pages_equals_the_reference(card: Any, page_bytes: int, pages: int, id_dtype: str) -> None:
    rng = np.random.default_rng(pages)
    total = pages + 3
    # Repeated ids and the sink among them.
    cleared = spoiled(rng, rng.integers(0, total, pages), total).astype(id_dtype)
    buffer = make_buffer(total, page_bytes)
    there = card.array(buffer)
    here_signal, there_signal = Signal(), Signal(like=there)
    page_copy.zero_pages(there, page_bytes, card.array(cleared), signal=there_signal)
    page_copy.zero_pages(buffer, page_bytes, cleared, signal=here_signal)
    assert np.array_equal(card.host(there), buffer)
    assert there_signal.counts() == here_signal.counts()


@pytest.mark.gpu
@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 5, 7, 8, 16, 33])
@pytest.mark.parametrize(
    ("page_bytes", "count"),
    [
        *((page_bytes, count) for page_bytes in SMALL for count in (0, 1, 2, 33, 1001)),
        *((16, 65_537), (48, 65_537), (4096, 8193), (LARGE, 2), (LARGE, 33)),
    ],
)
def test_shift_pages_equals_the_reference(card: Any, page_bytes: int, count: int, offset: int, direction: int) -> None:
    first = 2 if direction > 0 else offset + 2
    buffer = make_buffer(first + count + offset + 2, page_bytes, seed=count)
    there = card.array(buffer)
    page_copy.shift_pages(there, page_bytes, first, count, direction * offset)
    page_copy.shift_pages(buffer, page_bytes, first, count, direction * offset)
    assert np.array_equal(card.host(there), buffer)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.99, 1, 1.5])
@pytest.mark.parametrize(("page_bytes", "count"), [(16, 1001), (4096, 33), (4096, 8193), (LARGE, 10)])
def test_shifts_by_about_the_length_of_the_run(card: Any, page_bytes: int, count: int, share: float, direction: int) -> None:
    offset = round(count * share)
    first = 0 if direction > 0 else offset
    buffer = make_buffer(first + count + offset, page_bytes, seed=count)
    there = card.array(buffer)
    page_copy.shift_pages(there, page_bytes, first, count, direction * offset)
    page_copy.shift_pages(buffer, page_bytes, first, count, direction * offset)
    assert np.array_equal(card.host(there), buffer)


@pytest.mark.gpu
def test_shifts_there_and_back_many_times_lose_nothing(card: Any) -> None:
    """The window of a chain is read before it is written whatever the timing: a race would show as a lost page sooner or later."""
    buffer = make_buffer(40_010, 2048)
    there = card.array(buffer)
    for _ in range(20):
        page_copy.shift_pages(there, 2048, 0, 40_000, 3)
        page_copy.shift_pages(there, 2048, 3, 40_000, -3)
    after = card.host(there)
    assert np.array_equal(after[: 40_000 * 2048], buffer[: 40_000 * 2048])


@pytest.mark.gpu
@pytest.mark.parametrize("id_dtype", IDS)
def test_a_buffer_without_a_whole_page_counts_every_id(card: Any, id_dtype: str) -> None:
    there, some = card.array(np.ones(SLACK, np.uint8)), card.array(np.arange(-1, 3).astype(id_dtype))
    signal = Signal(like=there)
    page_copy.move_pages(there, 2**40, some, some, signal=signal)
    page_copy.zero_pages(there, 16, some, signal=signal)
    assert signal.counts() == {"out_of_range": 8} and card.host(there).all()


@pytest.mark.gpu
def test_ids_past_32_bits_are_skipped(card: Any) -> None:
    buffer = make_buffer(8, 16)
    there, far = card.array(buffer), card.array(np.array([2**32 + 1, -(2**32) + 1, 2**63 - 1, -(2**63), 2**60 + 1]))
    near = card.array(np.array([1, 2, 3, 4, 5]))
    signal = Signal(like=there)
    page_copy.move_pages(there, 16, far, near, signal=signal)
    page_copy.move_pages(there, 16, near, far, signal=signal)
    page_copy.zero_pages(there, 16, far, signal=signal)
    assert np.array_equal(card.host(there), buffer) and signal.counts() == {"out_of_range": 15}


@pytest.mark.gpu
def test_pages_beyond_four_gigabytes() -> None:
    import cupy

    page_bytes, pages = 2**20, 4500
    buffer = cupy.zeros(pages * page_bytes, cupy.uint8)
    buffer[:page_bytes] = 7
    buffer[page_bytes : 2 * page_bytes] = cupy.arange(page_bytes, dtype=cupy.uint32).view(cupy.uint8)[:page_bytes]
    expected = buffer[page_bytes : 2 * page_bytes].copy()
    page_copy.move_pages(buffer, page_bytes, cupy.array([1]), cupy.array([4400]))
    page_copy.shift_pages(buffer, page_bytes, 4300, 150, 30)
    assert (buffer[4430 * page_bytes : 4431 * page_bytes] == expected).all()
    page_copy.zero_pages(buffer, page_bytes, cupy.array([4430]))
    assert not buffer[4401 * page_bytes :].any()


def random_locations(rng: np.random.Generator, tokens: int, slots: int, id_dtype: str) -> np.ndarray:
    """Distinct slots, with padding and slots past the end among them."""
    locations = rng.permutation(slots - 1)[:tokens] + 1
    bad = rng.choice([0, 0, -1, -7, slots, slots + 1, 2**31 - 1], tokens)
    return np.where(rng.random(tokens) < 0.3, bad, locations).astype(id_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("id_dtype", IDS)
@pytest.mark.parametrize("dtype", ["float16", "uint16", "float32", "uint8", "int64"])
@pytest.mark.parametrize(
    ("key_width", "value_width", "gap", "padding"),
    # Widths, bytes between the parts of an entry and after it in elements: accesses of 16 bytes, of an element, of anything between.
    [(64, 64, 0, 0), (1024, 512, 0, 0), (576, 512, 16, 32), (8, 5, 3, 0), (12, 4, 0, 2), (1, 1, 0, 0), (130, 66, 6, 2), (3000, 4100, 0, 0)],
)
@pytest.mark.parametrize("tokens", [0, 1, 2, 33, 1025])
def test_store_kv_equals_the_reference(
    card: Any, tokens: int, key_width: int, value_width: int, gap: int, padding: int, dtype: str, id_dtype: str
) -> None:
    rng = np.random.default_rng(tokens + key_width)
    slots, entry = 1500, key_width + gap + value_width + padding
    size = np.dtype(dtype).itemsize

    def random(rows: int, width: int) -> np.ndarray:
        return rng.integers(0, 256, (rows, width * size), dtype=np.uint8).view(dtype)

    entries, projected = random(slots, entry), random(tokens, key_width + value_width + 1)
    locations = random_locations(rng, tokens, slots, id_dtype)
    there, projected_there = card.array(entries), card.array(projected)
    signals = Signal(), Signal(like=there)
    here = entries, projected, locations, signals[0]
    for memory, rows, places, signal in (here, (there, projected_there, card.array(locations), signals[1])):
        key_rows, value_rows = memory[:, :key_width], memory[:, key_width + gap : key_width + gap + value_width]
        page_copy.store_kv(rows[:, 1 : key_width + 1], rows[:, key_width + 1 :], places, key_rows, value_rows, signal=signal)
    assert np.array_equal(card.host(there).view(np.uint8), entries.view(np.uint8))
    assert signals[1].counts() == signals[0].counts()


@pytest.mark.gpu
def test_store_kv_never_leaves_the_shorter_of_the_two_pools(card: Any) -> None:
    k, v = np.ones((3, 4), np.float32), np.ones((3, 8), np.float32)
    keys, values = card.array(np.zeros((5, 4), np.float32)), card.array(np.zeros((3, 8), np.float32))
    signal = Signal(like=keys)
    page_copy.store_kv(card.array(k), card.array(v), card.array(np.array([2, 4, 5])), keys, values, signal=signal)
    assert card.host(keys).sum(axis=1).tolist() == [0, 0, 4, 0, 0] and card.host(values).sum(axis=1).tolist() == [0, 0, 8]
    assert signal.counts() == {"out_of_range": 2}


@pytest.mark.gpu
def test_store_kv_of_heads_into_reversed_rows(card: Any) -> None:
    rng = np.random.default_rng(3)
    k, v = rng.random((9, 4, 16), np.float32), rng.random((9, 2, 24), np.float32)
    key_rows, value_rows = np.zeros((20, 4, 16), np.float32), np.zeros((20, 2, 24), np.float32)
    locations = random_locations(rng, 9, 20, "int64")
    there = [card.array(array) for array in (k, v, locations, key_rows, value_rows)]
    for a, b, places, keys, values in ((k, v, locations, key_rows, value_rows), there):
        page_copy.store_kv(a[::-1], b, places, keys[::-1], values)
    assert np.array_equal(card.host(there[3]), key_rows) and np.array_equal(card.host(there[4]), value_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("pool", ["torch", "cupy"])
def test_store_kv_of_bfloat16_and_float8_tensors(pool: str) -> None:
    import cupy
    import torch

    rng = np.random.default_rng(4)
    k, v = (torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)).cuda() for shape in ((7, 128), (7, 96)))
    locations = random_locations(rng, 7, 30, "int64")
    if pool == "torch":
        keys = torch.zeros(30, 64, dtype=torch.bfloat16, device="cuda")
        values = torch.zeros(30, 96, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    else:
        keys, values = cupy.zeros((30, 64), cupy.uint16), cupy.zeros((30, 96), cupy.uint8)
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()
    page_copy.store_kv(k.view(torch.bfloat16), v.view(torch.float8_e4m3fn), torch.from_numpy(locations).cuda(), keys, values)
    torch.cuda.synchronize()
    expected_keys, expected_values = np.zeros((30, 64), np.uint16), np.zeros((30, 96), np.uint8)
    page_copy.store_kv(k.cpu().numpy().view(np.uint16), v.cpu().numpy(), locations, expected_keys, expected_values)
    if pool == "torch":
        keys, values = keys.view(torch.int16), values.view(torch.uint8)
    assert np.array_equal(to_numpy(keys).view(np.uint16), expected_keys) and np.array_equal(to_numpy(values), expected_values)


@pytest.mark.gpu
def test_bad_device_arguments_are_named() -> None:
    import cupy

    memory, some = cupy.zeros(160, cupy.uint8), cupy.array([1, 2])
    with pytest.raises(ArgumentError, match="buffer: expected an address that is a multiple of 16, got 0x"):
        page_copy.move_pages(memory[8:], 16, some, some)
    with pytest.raises(ArgumentTypeError, match="source: expected an array in device 0 like the first argument, got one in host memory"):
        page_copy.move_pages(memory, 16, np.array([1]), some)
    with pytest.raises(ArgumentTypeError, match="pages: expected an array in host memory"):
        page_copy.zero_pages(np.zeros(160, np.uint8), 16, some)
    with pytest.raises(ArgumentError, match=r"signal: expected a Signal of device 0 .* got one of the host"):
        page_copy.shift_pages(memory, 16, 1, 2, 1, signal=Signal())
    rows = cupy.zeros((3, 4), cupy.float32)
    with pytest.raises(ArgumentTypeError, match="value_rows: expected an array in device 0"):
        page_copy.store_kv(rows[:2], rows[:2], some, rows, np.zeros((3, 4), np.float32))
    assert not memory.any()


def small_calls() -> dict[str, tuple[Any, dict[str, np.ndarray], Any]]:
    """By op: the op, the arrays of a small call, and its arguments made of them."""
    rng = np.random.default_rng(8)
    order = rng.permutation(99) + 1
    return {
        "move_pages": (
            page_copy.move_pages,
            {"buffer": make_buffer(100, 4096), "source": order[:40], "destination": order[40:80]},
            lambda a: (a["buffer"], 4096, a["source"], a["destination"]),
        ),
        "shift_pages": (page_copy.shift_pages, {"buffer": make_buffer(100, 4096)}, lambda a: (a["buffer"], 4096, 3, 60, 7)),
        "zero_pages": (
            page_copy.zero_pages,
            {"buffer": make_buffer(100, 48), "pages": order[:40].astype(np.int32)},
            lambda a: (a["buffer"], 48, a["pages"]),
        ),
        "store_kv": (
            page_copy.store_kv,
            {
                "k": rng.random((40, 64), np.float32),
                "v": rng.random((40, 30), np.float32),
                "locations": order[:40],
                "key_rows": np.zeros((100, 64), np.float32),
                "value_rows": np.zeros((100, 30), np.float32),
            },
            lambda a: (a["k"], a["v"], a["locations"], a["key_rows"], a["value_rows"]),
        ),
    }


OPS = tuple(small_calls())


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_prepared_and_captured_calls_equal_eager_ones(card: Any, name: str) -> None:
    import cupy

    import gpukit

    gpukit.warmup(subjects=["page_copy"])
    op, arrays, arguments = small_calls()[name]
    prepared, captured = ({key: card.array(array) for key, array in arrays.items()} for _ in range(2))
    call = op.prepare(*arguments(prepared))
    call()
    call()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    op(*arguments(captured), stream=stream)
    graph = stream.end_capture()
    graph.launch(stream)
    graph.launch(stream)
    stream.synchronize()
    cupy.cuda.Device().synchronize()
    op(*arguments(arrays))
    op(*arguments(arrays))
    for key, array in arrays.items():
        assert np.array_equal(card.host(prepared[key]), array) and np.array_equal(card.host(captured[key]), array), key


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_the_raw_module_is_the_same_kernel(card: Any, name: str) -> None:
    import cupy

    from gpukit.compile import raw_module

    op, arrays, arguments = small_calls()[name]
    there = {key: card.array(array) for key, array in arrays.items()}
    _, _, _, _, blocks, threads, packed, _ = op.plan(*arguments(there))
    kernel = raw_module("page_copy").get_function(f"gpukit_{name}")
    kernel((blocks,), (threads,), tuple(np.int64(value) for value in packed))
    cupy.cuda.Device().synchronize()
    op(*arguments(arrays))
    for key, array in arrays.items():
        assert np.array_equal(card.host(there[key]), array), key
