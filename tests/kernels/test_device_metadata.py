"""Metadata kernels against their reference: the same call on device arrays and on NumPy copies, then every array and count compared.

Rows hold bad ids at random, outputs start poisoned and are strided where an op takes strides, so what must stay untouched is compared too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpukit import ArgumentError, ArgumentTypeError
from gpukit.kernels import metadata
from gpukit.kernels.metadata import AddressSpaces
from tests.helpers.both import POISON, Both, poison

IDS = ("int32", "int64")
PAGE_SIZES = (1, 3, 16, 64, 128)
GRANULARITIES = ("token", "page")


def words(*shape: int) -> np.ndarray:
    """A poisoned int32 output."""
    return poison(*shape, dtype="int32")


def random_table(rng: np.random.Generator, pages: int) -> np.ndarray:
    """A `v2p` with four fifths of its pages bound. Any negative entry is unbound; ops that bind pass through -2 and below."""
    v2p = np.where(rng.random(pages + 2) < 0.8, rng.integers(1, 1000, pages + 2), rng.choice([-1, -2, -3], pages + 2))
    v2p[0], v2p[-1] = 0, -1
    return v2p


def random_ids(rng: np.random.Generator, shape: tuple[int, ...], pages: int, tokens_per_page: int) -> np.ndarray:
    """Ids of a table with so many pages, a tenth of them bad: negative, the sentinel's, past the table."""
    ids = rng.integers(0, (pages + 1) * tokens_per_page, shape)
    bad = rng.choice([-1, -(2**31), -tokens_per_page, (pages + 1) * tokens_per_page, (pages + 3) * tokens_per_page, 2**31 - 1], shape)
    return np.where(rng.random(shape) < 0.1, bad, ids)


# Views of a base array that is twice as wide as needed: contiguous rows with a gap, column stride 2, both strides negative, column-major.
VIEWS = {
    "gap": (lambda base, width: base[:, :width], False),
    "step": (lambda base, width: base[:, ::2], False),
    "reverse": (lambda base, width: base[::-1, ::-2], False),
    "columns": (lambda base, width: base.T[:, :width], True),
}


class Batch:
    """A random batch: its arrays, and the arguments of a read op over them on either side."""

    def __init__(self, seed: int, lanes: int, page_size: int, granularity: str, dtype: str, pages: int = 3, view: str = "step"):
        rng = self.rng = np.random.default_rng(seed)
        tokens_per_page = page_size if granularity == "token" else 1
        # The last page is partial.
        self.width = max(pages * tokens_per_page - page_size // 3 * (granularity == "token"), 1)
        self.tokens = self.width if granularity == "token" else self.width * page_size
        self.lanes, self.page_size, self.pages, self.view = lanes, page_size, pages, view
        num_rows = min(lanes, 300) + 1
        shape = (num_rows, 2 * self.width)
        rows = random_ids(rng, shape[::-1] if VIEWS[view][1] else shape, 40, tokens_per_page)
        lens = rng.integers(-1, pages * page_size + 2, lanes)
        requests = rng.integers(0, num_rows, lanes)
        requests[rng.random(lanes) < 0.1] = rng.choice([-1, num_rows])
        # One lane is certain to be there and full.
        lens[:1], requests[:1] = pages * page_size, 0
        self.delta = int(rng.integers(0, 3))
        self.valid = int(rng.integers(lanes * 3 // 4, lanes + 1))
        # dtypes of per-lane arrays have nothing to do with that of the rows.
        other, third = IDS if seed % 2 else IDS[::-1]
        self.arrays = dict(
            rows=rows.astype(dtype), lens=lens.astype(other), requests=requests.astype(third), valid=np.array([self.valid], other),
            v2p=random_table(rng, 40), swa=random_table(rng, 40),
        )  # fmt: skip
        self.options = dict(delta=self.delta, granularity=granularity)

    def arguments(self, at: SimpleNamespace) -> tuple[Any, ...]:
        return VIEWS[self.view][0](at.rows, self.width), at.lens

    def row_starts(self) -> np.ndarray:
        """Where each lane's tokens begin, some with too little or too much room, and sometimes a negative start."""
        room = np.maximum(self.arrays["lens"].astype(np.int64) + self.delta + self.rng.choice([0, 0, -2, 2], self.lanes), 0)
        starts = np.concatenate(([0], room.cumsum())) + self.rng.choice([0, 0, 3, -1])
        return starts.astype(np.int32)


# The simulator has no time for the whole product: dtypes and views take turns over it.
VARIANTS = [
    (page_size, granularity, IDS[(number + number // 4) % 2], list(VIEWS)[number % 4])
    for number, (page_size, granularity) in enumerate((p, g) for p in PAGE_SIZES for g in GRANULARITIES)
]
variants = pytest.mark.parametrize("page_size, granularity, dtype, view", VARIANTS)


def turns(size: int) -> tuple[str, str]:
    """A dtype and a granularity for a batch size."""
    return IDS[size % 2], GRANULARITIES[size // 2 % 2]


@variants
@pytest.mark.parametrize("zero_tail", [False, True])
def test_read_table_equals_the_reference(device: Any, page_size: int, granularity: str, dtype: str, view: str, zero_tail: bool) -> None:
    batch = Batch(page_size, 7, page_size, granularity, dtype, view=view)
    both = Both(device, **batch.arrays, out=words(7, 10))
    for at, signal in both:
        out = at.out[:, 1::2]
        got = metadata.read_table(
            *batch.arguments(at), at.v2p, page_size, out=out, zero_tail=zero_tail,
            request_indices=at.requests, valid=at.valid, signal=signal, **batch.options,
        )  # fmt: skip
        assert got is out
    both.assert_equal()
    assert (both.host.out[:, ::2] == POISON).all() and (both.host.out[0, 1:7:2] != POISON).all()


def test_read_table_of_any_batch(device: Any, size: int) -> None:
    batch = Batch(size + 1, size, 3, *turns(size)[::-1], pages=2)
    both = Both(device, **batch.arrays, out=words(size, 2), virtual=words(size, 1))
    for at, signal in both:
        options = dict(batch.options, request_indices=at.requests, signal=signal)
        metadata.read_table(*batch.arguments(at), at.v2p, 3, out=at.out, valid=batch.valid, **options)
        metadata.read_table(*batch.arguments(at), None, 3, out=at.virtual, **options)
    both.assert_equal()
    if size > 100:
        assert {"out_of_range", "unbound"} == both.signals[0].counts().keys()


@variants
def test_read_stream_equals_the_reference(device: Any, page_size: int, granularity: str, dtype: str, view: str) -> None:
    batch = Batch(page_size, 4, page_size, granularity, dtype, pages=2, view=view)
    indptr = batch.row_starts()
    # Too short for the last lane, or longer than needed.
    room = int(indptr[-1]) + (-2 if granularity == "page" else 9)
    both = Both(device, **batch.arrays, indptr=indptr, out=poison(max(room, 0), dtype=dtype))
    for at, signal in both:
        got = metadata.read_stream(
            *batch.arguments(at), at.v2p, page_size, at.indptr, out=at.out, request_indices=at.requests, valid=batch.valid,
            signal=signal, **batch.options,
        )  # fmt: skip
        assert got is at.out
    both.assert_equal()
    assert (both.host.out != POISON).any()


def test_read_stream_of_any_batch(device: Any, size: int) -> None:
    batch = Batch(size, size, 3, "token", turns(size)[0], pages=1)
    indptr = batch.row_starts()
    both = Both(device, **batch.arrays, indptr=indptr, out=poison(max(int(indptr[-1]), 0)))
    for at, signal in both:
        metadata.read_stream(*batch.arguments(at), None, 3, at.indptr, out=at.out, request_indices=at.requests, signal=signal, **batch.options)
    both.assert_equal()


@variants
def test_read_table_and_stream_equals_the_reference(device: Any, page_size: int, granularity: str, dtype: str, view: str) -> None:
    batch = Batch(page_size + 1, 4, page_size, granularity, dtype, pages=2, view=view)
    indptr = batch.row_starts()
    # The stream's room ends within a lane: the table goes on.
    both = Both(device, **batch.arrays, indptr=indptr, table=words(4, 6), out=poison(max(int(indptr[-1]) // 2, 0), dtype=dtype))
    for at, signal in both:
        table = at.table[:, ::2]
        got = metadata.read_table_and_stream(
            *batch.arguments(at), at.v2p, page_size, at.indptr, table_out=table, stream_out=at.out,
            zero_tail=page_size == 16, request_indices=at.requests, valid=at.valid, signal=signal, **batch.options,
        )  # fmt: skip
        assert got[0] is table and got[1] is at.out
    both.assert_equal()
    assert (both.host.table[0, ::2] != POISON).any() and (indptr[0] < 0 or (both.host.out != POISON).any())


def test_a_table_narrower_than_its_stream(device: Any, size: int) -> None:
    batch = Batch(size + 2, size, 2, "page", turns(size)[0], pages=2)
    indptr = batch.row_starts()
    both = Both(device, **batch.arrays, indptr=indptr, table=words(size, 1), out=poison(max(int(indptr[-1]), 0)))
    for at, signal in both:
        metadata.read_table_and_stream(
            *batch.arguments(at), at.v2p, 2, at.indptr, table_out=at.table, stream_out=at.out,
            request_indices=at.requests, signal=signal, **batch.options,
        )  # fmt: skip
    both.assert_equal()


@variants
def test_decode_metadata_equals_the_reference(device: Any, page_size: int, granularity: str, dtype: str, view: str) -> None:
    batch = Batch(page_size + 2, 7, page_size, granularity, dtype, view=view)
    both = Both(device, **batch.arrays, lengths=words(7), sums=words(8), full=words(7, 10), window=words(7, 4))
    for at, signal in both:
        metadata.decode_metadata(
            *batch.arguments(at), AddressSpaces(at.v2p, swa=at.swa), page_size,
            lengths_out=at.lengths, cu_lengths_out=at.sums, full_out=at.full[:, ::2], swa_out=at.window[:, ::-2],
            zero_tail=page_size != 3, request_indices=at.requests, valid=at.valid, signal=signal, **batch.options,
        )  # fmt: skip
    both.assert_equal()
    assert (both.host.full[:, 1::2] == POISON).all() and (both.host.window[:, ::2] == POISON).all()


def test_decode_metadata_of_any_batch(device: Any, size: int) -> None:
    batch = Batch(size + 3, size, 3, *turns(size)[::-1], pages=2)
    both = Both(device, **batch.arrays, lengths=words(size), sums=words(size + 1), full=words(size, 1), window=words(size, 2))
    for at, signal in both:
        metadata.decode_metadata(
            *batch.arguments(at), AddressSpaces(at.v2p), 3, lengths_out=at.lengths, cu_lengths_out=at.sums,
            full_out=at.full, swa_out=at.window, request_indices=at.requests, valid=batch.valid, signal=signal, **batch.options,
        )  # fmt: skip
    both.assert_equal()
    np.testing.assert_array_equal(both.host.window[:, :1], both.host.full)


def test_decode_metadata_sums_over_several_tiles(device: Any) -> None:
    batch = Batch(0, 513, 16, "token", "int32", pages=1)
    both = Both(device, **batch.arrays, lengths=words(513), sums=words(514), full=words(513, 0))
    for at, signal in both:
        metadata.decode_metadata(
            *batch.arguments(at), AddressSpaces(at.v2p), 16, lengths_out=at.lengths, cu_lengths_out=at.sums, full_out=at.full,
            request_indices=at.requests, signal=signal, **batch.options,
        )  # fmt: skip
    both.assert_equal()
    np.testing.assert_array_equal(np.diff(both.host.sums), both.host.lengths)
    assert both.host.sums[512] > both.host.sums[256] > 0


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_lanes_longer_than_their_threads(device: Any, monkeypatch: pytest.MonkeyPatch, granularity: str) -> None:
    """Four threads a lane, so that every loop over a lane goes round several times."""
    monkeypatch.setattr(metadata, "_MOST_THREADS", 32)
    monkeypatch.setattr(metadata, "_LEAST_WORKER_BITS", 2)
    batch = Batch(8, 8, 3, granularity, "int32", pages=20)
    indptr = batch.row_starts()
    both = Both(
        device, **batch.arrays, indptr=indptr, out=words(int(indptr[-1])), table=words(8, 23), again=words(8, 23),
        lengths=words(8), sums=words(9), full=words(8, 18), window=words(8, 23),
    )  # fmt: skip
    for at, signal in both:
        options = dict(batch.options, request_indices=at.requests, signal=signal)
        arguments = batch.arguments(at)
        metadata.read_table(*arguments, at.v2p, 3, out=at.table, zero_tail=True, **options)
        metadata.read_stream(*arguments, at.v2p, 3, at.indptr, out=at.out, **options)
        metadata.read_table_and_stream(*arguments, at.v2p, 3, at.indptr, table_out=at.again, stream_out=at.out, **options)
        metadata.decode_metadata(
            *arguments, AddressSpaces(at.v2p, swa=at.swa), 3, lengths_out=at.lengths, cu_lengths_out=at.sums,
            full_out=at.full, swa_out=at.window, **options,
        )  # fmt: skip
    both.assert_equal()


def test_rows_without_request_indices(device: Any) -> None:
    batch = Batch(1, 4, 16, "token", "int32")
    indptr = np.array([0, 50, 100, 150, 200], np.int32)
    both = Both(device, **batch.arrays, indptr=indptr, out=words(200), table=words(4, 3))
    for at, signal in both:
        metadata.read_table_and_stream(
            *batch.arguments(at), at.v2p, 16, at.indptr, table_out=at.table, stream_out=at.out, signal=signal, **batch.options
        )
    both.assert_equal()


def test_row_starts_that_are_negative_or_descend(device: Any) -> None:
    both = Both(
        device, rows=np.arange(40).reshape(5, 8), lens=np.array([0, 2, 3, 6, 1]), v2p=np.arange(22),
        indptr=np.array([-3, -3, -1, 0, 4, 2], np.int32), out=words(6), again=words(6), table=words(5, 4),
    )  # fmt: skip
    for at, signal in both:
        metadata.read_stream(at.rows, at.lens, at.v2p, 2, at.indptr, out=at.out, signal=signal)
        metadata.read_table_and_stream(at.rows, at.lens, at.v2p, 2, at.indptr, table_out=at.table, stream_out=at.again, signal=signal)
    both.assert_equal()
    assert both.host.out.tolist() == [24, 25, 26, 27, POISON, POISON]
    assert both.signals[1].counts() == {"mismatch": 4}


@pytest.mark.parametrize("valid, dtype", [(-5, "int32"), (0, "int64"), (2, "int32"), (9, "int64")])
def test_a_device_count_of_lanes_is_kept_within_the_batch(device: Any, valid: int, dtype: str) -> None:
    both = Both(
        device, rows=np.full((3, 8), 9), lens=np.array([8, 5, 4]), valid=np.array([valid], dtype), v2p=np.array([0, 5, 6, -1]),
        requests=np.array([0, 9, 1]), lengths=words(3), sums=words(4), full=words(3, 3),
    )  # fmt: skip
    for at, signal in both:
        metadata.decode_metadata(
            at.rows, at.lens, AddressSpaces(at.v2p), 4, lengths_out=at.lengths, cu_lengths_out=at.sums, full_out=at.full,
            request_indices=at.requests, valid=at.valid, signal=signal,
        )  # fmt: skip
    both.assert_equal()
    assert both.host.lengths.tolist() == [8 * (valid > 0), 0, 4 * (valid > 2)]
    assert both.signals[1].counts() == ({"out_of_range": 1} if valid > 1 else {})


def test_ids_and_lengths_past_32_bits(device: Any) -> None:
    rows = np.array([[2**40 + 5, -(2**40), 2**35, 7]])
    both = Both(
        device, rows=rows, lens=np.array([2**40]), v2p=np.array([0, 3, -1]), indptr=np.array([0, 4], np.int32),
        table=words(1, 4), out=poison(4), virtual=poison(4), starts=np.array([0]),
        window=poison(4),
    )  # fmt: skip
    for at, signal in both:
        metadata.read_table_and_stream(at.rows, at.lens, at.v2p, 3, at.indptr, table_out=at.table, stream_out=at.out, signal=signal)
        metadata.read_stream(at.rows, at.lens, None, 3, at.indptr, out=at.virtual, signal=signal)
        metadata.gather_translate_window(at.rows, at.starts, 4, [at.v2p], 3, outs=[at.window], signal=signal)
    both.assert_equal()
    assert both.host.virtual.tolist() == [2**40 + 5, 0, 2**35, 7]


def test_a_signal_is_optional(device: Any) -> None:
    batch = Batch(3, 7, 3, "token", "int32")
    indptr = batch.row_starts()
    both = Both(device, **batch.arrays, indptr=indptr, out=words(int(indptr[-1])), table=words(7, 3), window=poison(21))
    for at, _ in both:
        metadata.read_table_and_stream(
            *batch.arguments(at), at.v2p, 3, at.indptr, table_out=at.table, stream_out=at.out, request_indices=at.requests, **batch.options
        )
        rows, starts = batch.arguments(at)
        metadata.gather_translate_window(rows, starts, 3, [at.v2p], 3, outs=[at.window], request_indices=at.requests)
    both.assert_equal()


def windows(batch: Batch, room: int, spaces: int = 2) -> dict[str, np.ndarray]:
    """Arrays of a window gather: starts from before the row to past its end, and poisoned outputs."""
    starts = batch.rng.integers(-2, batch.width + 1, batch.lanes).astype(IDS[batch.lanes % 2])
    outs = {f"out_{number}": poison(room) for number in range(spaces)}
    return dict(batch.arrays, starts=starts, virtual=poison(room), **outs)


@variants
def test_uniform_windows_equal_the_reference(device: Any, page_size: int, granularity: str, dtype: str, view: str) -> None:
    batch = Batch(page_size, 7, page_size, "token", dtype, view=view)
    # Longer outputs than needed keep their ends.
    both = Both(device, **windows(batch, 7 * 4 + 3))
    for at, signal in both:
        rows, _ = batch.arguments(at)
        requests = at.requests if granularity == "token" else None
        metadata.gather_translate_window(
            rows, at.starts, 4, [at.v2p, at.swa], page_size, outs=[at.out_0, at.out_1], virtual_out=at.virtual,
            request_indices=requests, signal=signal,
        )  # fmt: skip
    both.assert_equal()
    assert (both.host.virtual[-3:] == POISON).all() and (both.host.out_1[-3:] == POISON).all()
    assert (both.host.virtual[:-3] >= 0).all()


def test_uniform_windows_of_any_batch(device: Any, size: int) -> None:
    batch = Batch(size + 4, size, 3, "token", turns(size)[0])
    both = Both(device, **windows(batch, size * 2))
    for at, signal in both:
        rows, _ = batch.arguments(at)
        metadata.gather_translate_window(rows, at.starts, 2, [at.v2p, None], 3, outs=[at.out_0, at.out_1], request_indices=at.requests, signal=signal)
        metadata.gather_translate_window(rows, at.starts, 0, [], 3, outs=[], virtual_out=at.virtual, request_indices=at.requests, signal=signal)
    both.assert_equal()


def test_windows_of_several_widths_of_any_batch(device: Any, size: int) -> None:
    batch = Batch(size + 5, size, 3, "token", turns(size)[0])
    widths = batch.rng.integers(-1, 3, size).astype(IDS[size // 2 % 2])
    needed = int(np.maximum(widths, 0).sum())
    rooms = needed + 5, max(needed - 2, 0)
    for room in rooms if size < 100 or not device.simulated else rooms[size % 2 :][:1]:
        both = Both(device, **windows(batch, room), widths=widths)
        for at, signal in both:
            rows, _ = batch.arguments(at)
            metadata.gather_translate_window(
                rows, at.starts, at.widths, [at.v2p, at.swa], 3, outs=[at.out_0, at.out_1], virtual_out=at.virtual,
                request_indices=at.requests, signal=signal,
            )  # fmt: skip
        both.assert_equal()
        assert (both.host.out_0[needed:] == 0).all() and not (both.host.out_1 == POISON).any()
        assert both.signals[0].counts().get("mismatch", 0) == (needed > room)


def test_windows_of_more_lanes_than_threads(device: Any) -> None:
    """Runs of three lanes per thread, most of them empty, and a last lane that holds nearly everything."""
    batch = Batch(6, 600, 16, "token", "int32")
    widths = np.where(batch.rng.random(600) < 0.1, 3, 0)
    widths[-1] = 40
    needed = int(widths.sum())
    both = Both(device, **windows(batch, needed), widths=widths)
    for at, signal in both:
        rows, _ = batch.arguments(at)
        metadata.gather_translate_window(
            rows, at.starts, at.widths, [at.v2p], 16, outs=[at.out_0], virtual_out=at.virtual, request_indices=at.requests, signal=signal
        )
    both.assert_equal()
    assert "mismatch" not in both.signals[0].counts()


@pytest.mark.parametrize("uniform", [True, False])
def test_windows_of_fewer_blocks_than_tokens(device: Any, monkeypatch: pytest.MonkeyPatch, uniform: bool) -> None:
    monkeypatch.setattr(metadata, "_MOST_BLOCKS", 1)
    batch = Batch(7, 300, 3, "token", "int64")
    both = Both(device, **windows(batch, 600, 4), widths=np.full(300, 2))
    for at, signal in both:
        rows, _ = batch.arguments(at)
        outs = [at.out_0, at.out_1, at.out_2, at.out_3]
        metadata.gather_translate_window(
            rows, at.starts, 2 if uniform else at.widths, [at.v2p, at.swa, None, at.v2p], 3, outs=outs,
            request_indices=at.requests, signal=signal,
        )  # fmt: skip
    both.assert_equal()


def test_windows_of_no_lanes_clear_packed_outputs(device: Any) -> None:
    batch = Batch(8, 0, 3, "token", "int32")
    both = Both(device, **windows(batch, 5), widths=np.zeros(0, np.int32))
    for at, signal in both:
        metadata.gather_translate_window(batch.arguments(at)[0], at.starts, at.widths, [at.v2p], 3, outs=[at.out_0], signal=signal)
    both.assert_equal()
    assert both.host.out_0.tolist() == [0] * 5


@pytest.mark.parametrize("counts, dtype", [("host", "int32"), ("int32", "int64"), ("int64", "int32")])
def test_replay_state_indices_equals_the_reference(device: Any, size: int, counts: str, dtype: str) -> None:
    rng = np.random.default_rng(size)
    total, valid = size - size // 5, size // 2
    both = Both(
        device, requests=rng.integers(-1, 31, size).astype(IDS[size % 2]), mapping=random_ids(rng, (30,), 40, 1).astype(dtype),
        v2p=random_table(rng, 40), out=words(size),
        track_in=random_ids(rng, (size,), 40, 1).astype(IDS[1 - size % 2]), track_out=words(size),
        valid=np.array([valid], None if counts == "host" else counts), total=np.array([total], None if counts == "host" else counts),
    )  # fmt: skip
    for at, signal in both:
        numbers = (valid, total) if counts == "host" else (at.valid, at.total)
        tracking = dict(track_in=at.track_in, track_out=at.track_out) if counts != "int32" else {}
        assert metadata.replay_state_indices(at.requests, at.mapping, at.v2p, *numbers, at.out, signal=signal, **tracking) is at.out
    both.assert_equal()
    assert (both.host.out[valid:total] == -1).all() and (both.host.requests[valid:total] == 0).all()
    assert (both.host.out[total:] == POISON).all()


@pytest.mark.parametrize("valid, total", [(-3, 3), (9, 2), (1, 9), (2, -1)])
def test_device_counts_of_a_replay_are_kept_within_the_batch(device: Any, valid: int, total: int) -> None:
    both = Both(
        device, requests=np.array([1, 0, 1, 1]), mapping=np.array([1, 2]), out=words(4),
        valid=np.array([valid]), total=np.array([total]),
    )  # fmt: skip
    for at, signal in both:
        metadata.replay_state_indices(at.requests, at.mapping, None, at.valid, at.total, at.out, signal=signal)
    both.assert_equal()


def host_call(**changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Good arguments of `decode_metadata` on NumPy arrays, with some replaced."""
    values = dict(
        rows=np.zeros((3, 8), np.int32), lens=np.zeros(2, np.int32), spaces=AddressSpaces(np.array([0, -1])), page_size=4,
        lengths_out=words(2), cu_lengths_out=words(3), full_out=words(2, 2),
    )  # fmt: skip
    values |= changes
    positional = tuple(values.pop(name) for name in ("rows", "lens", "spaces", "page_size"))
    return positional, values


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"rows": np.zeros((3, 8))}, ArgumentTypeError, "rows: expected dtype int32 or int64, got float64"),
        ({"rows": np.zeros(8, np.int32)}, ArgumentError, "rows: expected 2 dimensions, got shape"),
        ({"rows": np.zeros((1, 8), np.int32)}, ArgumentError, "rows: expected at least 2 rows like lens"),
        ({"lens": np.zeros(4, np.int32)[::2]}, ArgumentError, "lens: expected a contiguous array"),
        ({"lens": [1, 2]}, ArgumentTypeError, "lens: expected an array"),
        ({"spaces": np.array([0, -1])}, ArgumentTypeError, "spaces: expected an AddressSpaces, got ndarray"),
        ({"spaces": AddressSpaces(np.zeros(1, np.int64))}, ArgumentError, "spaces.full: expected at least 2 rows"),
        ({"spaces": AddressSpaces(np.zeros(3, np.int32))}, ArgumentTypeError, "spaces.full: expected dtype int64"),
        ({"page_size": 0}, ArgumentError, "page_size: expected at least 1, got 0"),
        ({"page_size": 4.0}, ArgumentTypeError, "page_size: expected an integer, got float"),
        ({"lengths_out": words(3)}, ArgumentError, r"lengths_out: expected shape \(2,\), got \(3,\)"),
        ({"cu_lengths_out": words(2)}, ArgumentError, r"cu_lengths_out: expected shape \(3,\), got \(2,\)"),
        ({"full_out": poison(2, 2)}, ArgumentTypeError, "full_out: expected dtype int32, got int64"),
        ({"full_out": words(1, 2)}, ArgumentError, r"full_out: expected shape \(2, pages\), got \(1, 2\)"),
        ({"swa_out": np.broadcast_to(np.int32(0), (2, 2))}, ArgumentError, "swa_out: expected a writable array"),
        ({"request_indices": np.zeros(3, np.int32)}, ArgumentError, r"request_indices: expected shape \(2,\) like lens, got \(3,\)"),
        ({"delta": 1.5}, ArgumentTypeError, "delta: expected an integer, got float"),
        ({"granularity": "block"}, ArgumentError, "granularity: expected 'token' or 'page', got 'block'"),
        ({"valid": 3}, ArgumentError, "valid: expected 0 … 2 lanes, got 3"),
        ({"valid": -1}, ArgumentError, "valid: expected at least 0, got -1"),
        ({"valid": np.zeros(2, np.int32)}, ArgumentError, r"valid: expected an integer or an array of shape \(1,\), got shape \(2,\)"),
        ({"valid": True}, ArgumentTypeError, "valid: expected an integer, got bool"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    positional, keywords = host_call(**changes)
    with pytest.raises(error, match=message):
        metadata.decode_metadata(*positional, **keywords)
    assert all((value == POISON).all() for name, value in keywords.items() if name in ("lengths_out", "cu_lengths_out", "full_out"))


def test_bad_arguments_of_the_other_ops_are_named() -> None:
    rows, lens, v2p, ids = np.zeros((2, 4), np.int32), np.zeros(2, np.int32), np.array([0, -1]), np.zeros(4, np.int64)
    with pytest.raises(ArgumentError, match=r"indptr: expected shape \(3,\), one more than lens, got \(2,\)"):
        metadata.read_stream(rows, lens, v2p, 4, lens, out=ids)
    with pytest.raises(ArgumentTypeError, match="indptr: expected dtype int32, got int64"):
        metadata.read_stream(rows, lens, v2p, 4, np.zeros(3, np.int64), out=ids)
    with pytest.raises(ArgumentTypeError, match="stream_out: expected dtype int32 or int64, got float32"):
        metadata.read_table_and_stream(rows, lens, v2p, 4, np.zeros(3, np.int32), table_out=words(2, 1), stream_out=np.zeros(4, np.float32))
    with pytest.raises(ArgumentError, match=r"outs\[1\]: expected at least 4 entries, width for each of starts, got 3"):
        metadata.gather_translate_window(rows, lens, 2, [v2p, v2p], 4, outs=[ids, ids[:3]])
    with pytest.raises(ArgumentError, match=r"virtual_out: expected shape \(4,\) like the other outputs, got \(3,\)"):
        metadata.gather_translate_window(rows, lens, lens, [v2p], 4, outs=[ids], virtual_out=ids[:3])
    with pytest.raises(ArgumentError, match="outs: expected one for each of up to 4 tables, got 1 for 2 tables"):
        metadata.gather_translate_window(rows, lens, 2, [v2p, v2p], 4, outs=[ids])
    with pytest.raises(ArgumentError, match="outs: expected at least one output, or virtual_out, got neither"):
        metadata.gather_translate_window(rows, lens, 2, [], 4, outs=[])
    with pytest.raises(ArgumentError, match=r"width: expected shape \(2,\) like starts, got \(3,\)"):
        metadata.gather_translate_window(rows, lens, np.zeros(3, np.int32), [v2p], 4, outs=[ids])
    with pytest.raises(ArgumentError, match="track_out: expected an array, as track_in is given, got None"):
        metadata.replay_state_indices(lens, lens, v2p, 1, 2, words(2), track_in=lens)
    with pytest.raises(ArgumentError, match="total: expected 0 … 2 lanes, got 3"):
        metadata.replay_state_indices(lens, lens, v2p, 1, 3, words(2))
    lens.flags.writeable = False
    with pytest.raises(ArgumentError, match="request_indices: expected a writable array"):
        metadata.replay_state_indices(lens, lens, v2p, 1, 2, words(2))


def test_address_spaces_fall_back_to_full_and_stay_as_they_are() -> None:
    full, swa = np.array([0, 1, -1]), np.array([0, 2, -1])
    spaces = AddressSpaces(full, swa=swa)
    assert spaces.table("virtual") is None and spaces.table("full") is full
    assert spaces.table("swa") is swa and spaces.table("state") is full
    assert repr(spaces) == "AddressSpaces(full, swa)"
    with pytest.raises(ArgumentError, match="space: expected one of virtual, full, swa, state, got 'draft'"):
        spaces.table("draft")
    with pytest.raises(AttributeError, match="full: an AddressSpaces is immutable"):
        spaces.full = swa  # type: ignore[attr-defined]
