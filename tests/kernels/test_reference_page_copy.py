"""The page-byte references against slices of a bytearray and against rows copied one by one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpukit.errors import Signal
from gpukit.kernels.reference import page_copy
from tests.helpers import models

examples = settings(max_examples=80, deadline=None)


def make_buffer(pages, page_bytes, slack=0):
    return np.random.default_rng(pages).integers(0, 256, pages * page_bytes + slack, dtype=np.uint8)


def nonzero(counts):
    return {kind: count for kind, count in counts.items() if count}


@examples
@given(st.data())
def test_move_pages(data):
    pages, page_bytes = data.draw(st.integers(1, 12)), data.draw(st.sampled_from([16, 48]))
    order = data.draw(st.permutations(range(1, pages)))
    moves = data.draw(st.integers(0, len(order) // 2))
    pairs = list(zip(order[:moves], order[moves : 2 * moves], strict=True))
    bad = [0, -1, pages, pages + 1, 2**31 - 1, -(2**31)]
    for _ in range(data.draw(st.integers(0, 2))):
        good = data.draw(st.integers(0, pages - 1))
        pair = (data.draw(st.sampled_from(bad)), good)
        pairs.insert(data.draw(st.integers(0, len(pairs))), pair if data.draw(st.booleans()) else pair[::-1])
    buffer = make_buffer(pages, page_bytes, slack=5)
    want, before, counts = bytearray(buffer.tobytes()), buffer.tobytes(), models.Counter()
    for s, d in pairs:
        if 1 <= s < pages and 1 <= d < pages:
            want[d * page_bytes : (d + 1) * page_bytes] = before[s * page_bytes : (s + 1) * page_bytes]
        else:
            counts["out_of_range"] += 1
    dtype, style, signal = data.draw(models.id_dtypes), data.draw(models.view_styles), Signal()
    source, destination = ([pair[side] for pair in pairs] for side in (0, 1))
    page_copy.move_pages(buffer, page_bytes, models.as_view(source, dtype, style), models.as_view(destination, dtype, style), signal=signal)
    assert buffer.tobytes() == bytes(want)
    assert signal.counts() == nonzero(counts)


@pytest.mark.parametrize("offset", [-4, -3, -1, 0, 1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_shift_pages_like_memmove(count, offset):
    page_bytes, first = 32, 4
    buffer = make_buffer(15, page_bytes)
    want, before = bytearray(buffer.tobytes()), buffer.tobytes()
    for i in range(first, first + count):
        want[(i + offset) * page_bytes : (i + offset + 1) * page_bytes] = before[i * page_bytes : (i + 1) * page_bytes]
    page_copy.shift_pages(buffer, page_bytes, first, count, offset)
    assert buffer.tobytes() == bytes(want)


@examples
@given(st.data())
def test_zero_pages(data):
    pages, page_bytes = data.draw(st.integers(1, 6)), 16
    ids = data.draw(st.lists(st.integers(-2, pages + 1), max_size=7))
    buffer = make_buffer(pages, page_bytes, slack=3) | 1
    want, signal = bytearray(buffer.tobytes()), Signal()
    for page in ids:
        if 0 <= page < pages:
            want[page * page_bytes : (page + 1) * page_bytes] = bytes(page_bytes)
    page_copy.zero_pages(buffer, page_bytes, models.as_view(ids, data.draw(models.id_dtypes), data.draw(models.view_styles)), signal=signal)
    assert buffer.tobytes() == bytes(want)
    assert signal.counts() == nonzero({"out_of_range": sum(not 0 <= page < pages for page in ids)})


@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.uint8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("tokens", [0, 1, 2, 9])
def test_store_kv_copies_bytes_into_strided_rows(tokens, dtype, id_dtype):
    """K and V of different widths, both views into one entry of a byte buffer; payloads of every bit pattern, NaN included."""
    size = np.dtype(dtype).itemsize
    key_width, value_width, slots, entry = 8, 5, 12, 64
    rng = np.random.default_rng(tokens)
    k = rng.integers(0, 256, (tokens, key_width * size + 4 * size), dtype=np.uint8).view(dtype)[:, :key_width]
    v = rng.integers(0, 256, (tokens, value_width * size), dtype=np.uint8).view(dtype)
    memory = make_buffer(slots, entry)
    entries = memory.reshape(slots, entry)
    key_rows = entries[:, : key_width * size].view(dtype)
    value_rows = entries[:, 40 : 40 + value_width * size].view(dtype)
    locations = np.array([3, 0, 11, -1, 12, 7, 1, -9, 10**6], dtype=id_dtype)[:tokens]
    want, counts, signal = bytearray(memory.tobytes()), models.Counter(), Signal()
    for i, slot in enumerate(locations.tolist()):
        if slot >= slots:
            counts["out_of_range"] += 1
        elif slot > 0:
            want[slot * entry : slot * entry + key_width * size] = k[i].tobytes()
            want[slot * entry + 40 : slot * entry + 40 + value_width * size] = v[i].tobytes()
    page_copy.store_kv(k, v, locations, key_rows, value_rows, signal=signal)
    assert memory.tobytes() == bytes(want)
    assert signal.counts() == nonzero(counts)


def test_store_kv_never_leaves_the_shorter_of_the_two_pools():
    k, v = np.ones((2, 4), np.float32), np.ones((2, 4), np.float32)
    keys, values, signal = np.zeros((5, 4), np.float32), np.zeros((3, 4), np.float32), Signal()
    page_copy.store_kv(k, v, np.array([2, 4]), keys, values, signal=signal)
    assert keys.sum(axis=1).tolist() == [0, 0, 4, 0, 0] and values.sum(axis=1).tolist() == [0, 0, 4]
    assert signal.counts() == {"out_of_range": 1}
