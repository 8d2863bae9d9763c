"""Index kernels on numbers at the ends of 64 and of 31 bits: what Python's integers say, or the reference, which cannot go round either.

The compiler assumes that no int64 sum, difference or product goes round, and drops a comparison that would find out. The simulator says where one
does; on a GPU the answers show it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpukit import Signal
from gpukit.kernels import free_list, metadata, page_table, sliding_window
from gpukit.kernels.metadata import AddressSpaces
from tests.helpers.both import Both, poison, random_pair

pytestmark = pytest.mark.filterwarnings("error:overflow encountered:RuntimeWarning")

LEAST, MOST = -(2**63), 2**63 - 1
ENDS = np.array([LEAST, LEAST + 1, -(2**62), -(2**31), -2, -1, 0, 1, 5, 2**31 - 1, 2**31, 2**32, 2**62, MOST - 1, MOST])


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_lengths_below_zero_take_no_page(device: Any, page_size: int) -> None:
    """Neither their own nor, where other blocks count them, that of a request behind them."""
    lengths = np.full(600, LEAST)
    lengths[1:599:2] = LEAST + 1
    lengths[-1] = 1
    out, signal = device.array(poison(600)), Signal(like=device.array(poison(1)))
    free_list.gather_decode(device.array(lengths), device.array(np.full(600, -1)), device.array(np.array([7])), page_size, out=out, signal=signal)
    assert device.host(out).tolist() == [0] * 599 + [7 * page_size] and signal.counts() == {}


@pytest.mark.parametrize("page_size", [1, 3, 4, 64])
def test_last_locations_at_the_ends(device: Any, page_size: int) -> None:
    """Every length with every last location, for one token and for a prefill. Behind the last location of all there is none."""
    lengths, last = (values.ravel() for values in np.meshgrid(ENDS, ENDS))
    both = Both(device, lengths=lengths, last=last, free=np.arange(1, 400), out=poison(len(last)), many=poison(50))
    for at, signal in both:
        free_list.gather_decode(at.lengths, at.last, at.free, page_size, out=at.out, signal=signal)
        free_list.gather_extend(at.lengths, at.lengths, at.last, at.free, page_size, num_tokens=50, num_pages=9, out=at.many, signal=signal)
    both.assert_equal()
    lengths = page_size * 3 + np.arange(2 * page_size + 1)
    out, signal = device.array(poison(len(lengths))), Signal(like=device.array(poison(1)))
    free_list.gather_decode(
        device.array(lengths), device.array(np.full(len(lengths), MOST)), device.array(np.arange(1, 400)), page_size, out=out, signal=signal
    )
    stays = (lengths - 1) % page_size != 0
    assert (device.host(out)[stays] == 0).all() and signal.counts() == ({"mismatch": int(stays.sum())} if stays.any() else {})


@pytest.mark.parametrize("page_size", [1, 3, 4, 64])
def test_prefixes_at_the_ends(device: Any, page_size: int) -> None:
    """One token behind every prefix, with every last location: in the rest of a page that may be the last of all, or in a new one."""
    prefixes, last = (values.ravel() for values in np.meshgrid(np.minimum(ENDS, MOST - 1), ENDS))
    both = Both(device, prefixes=prefixes, lengths=prefixes + 1, last=last, free=np.arange(1, 61), out=poison(150))
    for at, signal in both:
        free_list.gather_extend(at.prefixes, at.lengths, at.last, at.free, page_size, num_tokens=150, num_pages=60, out=at.out, signal=signal)
    both.assert_equal()
    assert np.count_nonzero(both.host.out) > 9


@pytest.mark.parametrize("delta", [-(2**31), -1, 0, 1, 2**31])
@pytest.mark.parametrize("page_size", [3, 4])
def test_lengths_and_a_delta_on_top(device: Any, delta: int, page_size: int) -> None:
    """A sum below zero is no token, and so is one beyond 64 bits."""
    sums = [length + delta for length in ENDS.tolist()]
    tokens = [each if 0 <= each <= MOST else 0 for each in sums]
    rows = np.arange(1, 7) * np.ones((len(ENDS), 1), np.int64)
    lens, out = device.array(ENDS), device.array(poison(len(ENDS), 6, dtype="int32"))
    options: dict[str, Any] = dict(delta=delta, granularity="page", out=out, zero_tail=True)
    metadata.read_table(device.array(rows), lens, None, page_size, **options)
    assert (device.host(out) != 0).sum(axis=1).tolist() == [min(-(-each // page_size), 6) for each in tokens]


@pytest.mark.parametrize(("delta", "given"), [(1, [LEAST, -2, MOST, 2]), (-1, [LEAST, -1, 0, 4])])
def test_lengths_of_a_decode_batch_at_the_ends(device: Any, delta: int, given: list[int]) -> None:
    """Summed before every block of lanes: only the last of the four has tokens, three of them."""
    lanes = 300
    out, lengths, sums = (device.array(poison(*shape, dtype="int32")) for shape in ((lanes, 2), (lanes,), (lanes + 1,)))
    metadata.decode_metadata(
        *(device.array(np.ones((lanes, 2), np.int64)), device.array(np.resize(given, lanes)), AddressSpaces(None), 4),
        **dict(lengths_out=lengths, cu_lengths_out=sums, full_out=out, delta=delta, granularity="page"),
    )
    expected = np.resize([0, 0, 0, 3], lanes)
    assert device.host(lengths).tolist() == expected.tolist() and device.host(sums).tolist() == [0, *expected.cumsum()]
    assert device.host(out).tolist() == [[int(length > 0), 0] for length in expected]


@pytest.mark.parametrize("page_size", [1, 3, 4, 64])
def test_pages_of_a_row_at_the_ends(device: Any, page_size: int) -> None:
    """A page past the table is none, also where its first token is one of the table's once it went round 64 bits."""
    pages = np.concatenate([ENDS, 2**64 // 64 * np.array([1, 2, 4, 8]) + 2])
    lanes = len(pages)
    indptr = np.arange(lanes + 1, dtype="int32") * page_size
    both = Both(
        device, rows=pages[:, None], lens=np.full(lanes, page_size), v2p=np.array([0, 3, 2, -1, 1, 4, -1]), indptr=indptr,
        stream=poison(lanes * page_size), also=poison(lanes * page_size), table=poison(lanes, 1, dtype="int32"),
    )  # fmt: skip
    for at, signal in both:
        given: dict[str, Any] = dict(granularity="page", signal=signal)
        metadata.read_stream(at.rows, at.lens, at.v2p, page_size, at.indptr, out=at.stream, **given)
        metadata.read_table_and_stream(at.rows, at.lens, at.v2p, page_size, at.indptr, table_out=at.table, stream_out=at.also, **given)
    both.assert_equal()
    place = {0: 0, 1: 3, 5: 4}
    expected = [place[page] * page_size + offset if page in place else 0 for page in pages.tolist() for offset in range(page_size)]
    assert both.host.stream.tolist() == both.host.also.tolist() == expected


@pytest.mark.parametrize("widths", [[3, MOST, MOST, 5], [MOST] * 4, [LEAST, 2, -1, 2**62], [2, 2, 2, 2]])
def test_windows_that_begin_and_end_at_the_ends(device: Any, widths: list[int]) -> None:
    """Widths whose sum goes round, for every first token."""
    v2p = np.array([0, 3, 2, 1, -1])
    for start in ENDS.tolist():
        starts = np.array([start, 0, start, -1])
        both = Both(
            device, rows=np.arange(4 * 6).reshape(4, 6) % 13, starts=starts, widths=np.array(widths), v2p=v2p, out=poison(9), virtual=poison(9)
        )
        for at, signal in both:
            metadata.gather_translate_window(at.rows, at.starts, at.widths, [at.v2p], 4, outs=[at.out], virtual_out=at.virtual, signal=signal)
            metadata.gather_translate_window(at.rows, at.starts, 2, [at.v2p], 4, outs=[at.out], signal=signal)
        both.assert_equal()
        assert both.signals[0].counts().get("mismatch", 0) == (sum(max(width, 0) for width in widths) > 9)


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_segments_to_retire_at_the_ends(device: Any, page_size: int) -> None:
    """Every stop for every first page, with a row of its own."""
    starts, stops = (values.ravel() for values in np.meshgrid([value // page_size * page_size for value in (0, page_size, 2**31, 2**62, MOST)], ENDS))
    rng = np.random.default_rng(page_size)
    v2p, p2v = random_pair(rng, 4 * len(starts))
    rows = np.repeat((rng.permutation(4 * len(starts)).reshape(-1, 4) + 1) * page_size, page_size, axis=1)
    both = Both(device, {"pages": 4 * len(starts)}, rows=rows, starts=starts, stops=stops, v2p=v2p, p2v=p2v)
    for at, signal in both:
        sliding_window.retire(at.rows, at.starts, at.stops, page_size, at.v2p, at.p2v, at.pages, signal=signal)
    both.assert_equal()
    assert len(both.held("pages")) > len(ENDS) // 2


def test_segments_of_the_host_whose_difference_goes_round(device: Any) -> None:
    """Differences of 3, 2^63 - 1 and 2^63 - 2 would sum to nothing to do."""
    v2p, p2v = random_pair(np.random.default_rng(1), 12, 1.0)
    both = Both(device, {"pages": 12}, rows=np.arange(1, 13).reshape(3, 4), v2p=v2p, p2v=p2v)
    for at, _ in both:
        sliding_window.retire(at.rows, [0, 1, 2], [3, LEAST, LEAST], 1, at.v2p, at.p2v, at.pages)
    both.assert_equal()
    assert len(both.held("pages")) == 3


def test_ids_at_the_ends(device: Any) -> None:
    v2p, p2v = random_pair(np.random.default_rng(3), 30)
    both = Both(device, {"pages": 31}, ids=ENDS, back=ENDS[::-1].copy(), v2p=v2p, p2v=p2v, freed=poison(len(ENDS)), out=poison(3, len(ENDS)))
    for at, signal in both:
        for place, page_size in enumerate((1, 3, 64)):
            page_table.translate(at.ids, at.v2p, page_size, out=at.out[place], signal=signal)
        page_table.unbind(at.ids, at.v2p, at.p2v, out=at.freed, signal=signal)
        page_table.bind(at.ids, at.back, at.v2p, at.p2v, signal=signal)
        page_table.remap(at.back, at.ids, at.v2p, at.p2v, signal=signal)
        page_table.unbind_into(at.ids, at.v2p, at.p2v, at.pages, signal=signal)
    both.assert_equal()
