"""Free lists and token placement against their reference: the same call on device arrays and on NumPy copies, then all compared.

Placements mix valid requests with ones that break the contract. Sizes count requests or ids; what is made of them is random but seeded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpukit import ArgumentError, ArgumentTypeError, OutOfPages, Signal
from gpukit.kernels import free_list, page_table
from gpukit.kernels.free_list import DevicePages, FreeList
from tests.helpers.both import POISON, Both, poison

IDS = ("int32", "int64")
PAGE_SIZES = (1, 3, 16, 64, 128)


def kinds(device: Any, size: int, page_size: int) -> tuple[bool, ...]:
    """Whether to make a valid or a bad batch: both, but the simulator has time for one."""
    return ((size + page_size) % 2 == 1,) if device.simulated else (False, True)


def test_views_of_a_free_list_stay_as_they_are(device: Any) -> None:
    """Views are held across many takes and appends; none of them changes."""
    rng = np.random.default_rng(1)
    as_array = np.asarray if device.simulated else device.array
    pages = FreeList(as_array(np.arange(1, 101)))
    model, views, following = list(range(1, 101)), [], 1000
    for _ in range(60):
        n = int(rng.integers(0, 7))
        if n > len(model):
            with pytest.raises(OutOfPages):
                pages.take(n)
        else:
            views.append((pages.take(n), model[:n]))
            del model[:n]
        if rng.random() < 0.5:
            fresh = list(range(following, following + int(rng.integers(0, 5))))
            following += len(fresh)
            given = as_array(np.array(fresh, np.int64))
            pages.append(given)
            model += fresh
        assert len(pages) == len(model)
        for view, expected in (*views, (pages.pages, model)):
            assert (np.asarray(view) if device.simulated else device.host(view)).tolist() == expected


def test_a_ring_equals_the_reference(device: Any, size: int) -> None:
    both = Both(device, {"pages": size + 3}, values=np.arange(1, size + 1).astype(IDS[size % 2]), out=poison(size))
    for side, _ in both:
        side.pages.fill(side.values)
        side.pages.refresh()
        side.pages.refresh()
        assert side.pages.known == size
        side.pages.take(size // 2, out=side.out[: size // 2])
        side.pages.take(size - size // 2, out=side.out[size // 2 :])
        assert side.pages.known == 0
    both.assert_equal()
    assert both.host.out.tolist() == list(range(1, size + 1))


def test_a_ring_refuses_what_it_does_not_know_to_fit(device: Any) -> None:
    both = Both(device, values=np.arange(1, 8))
    for side, _ in both:
        pages = DevicePages(5, like=side.values)
        pages.fill(side.values[:3])
        with pytest.raises(ArgumentError, match=r"^pages: expected at most 2 pages"):
            pages.fill(side.values[:3])
        with pytest.raises(OutOfPages, match=r"^n: expected at most the 3 pages"):
            pages.take(4)
        assert pages.known == 3


def extension(rng: np.random.Generator, requests: int, page_size: int, bad: bool, most: int) -> dict[str, Any]:
    """A batch for gather_extend by its arguments; every seventh request or so has nothing to place."""
    prefix = rng.integers(0, 2 * page_size + 1, requests)
    last = np.where(prefix == 0, -1, rng.integers(0, 9, requests) * page_size + (prefix - 1) % page_size)
    length = prefix + np.where(rng.random(requests) < 0.15, 0, rng.integers(0, most + 1, requests))
    tokens = int((length - prefix).sum())
    pages = int((-(-length // page_size) + -prefix // page_size).sum())
    free = rng.permutation(pages + 3) + 1
    if bad:
        wrong = rng.random(requests)
        last = np.where(wrong < 0.1, rng.choice([-1 - page_size, -2, -1, 0, 3], requests), last)
        length = np.where((wrong > 0.1) & (wrong < 0.15), prefix - 1, length)
        prefix = np.where((wrong > 0.15) & (wrong < 0.2), -page_size, prefix)
        free[rng.random(len(free)) < 0.1] = rng.choice([0, -1])
        tokens = max(tokens + int(rng.integers(-5, 6)), 0)
        pages = max(pages - int(rng.integers(0, 3)), 0)
    return {"prefix": prefix, "length": length, "last": last, "free": free, "num_tokens": tokens, "num_pages": pages}


def place(device: Any, batch: dict[str, Any], page_size: int, length_type: str = "int64", id_type: str = "int64") -> Both:
    """Call gather_extend on both sides, into the middle of a poisoned array."""
    num_tokens = batch["num_tokens"]
    both = Both(
        device,
        prefix=batch["prefix"].astype(length_type),
        length=batch["length"].astype(length_type),
        last=batch["last"].astype(id_type),
        free=np.array(batch["free"], np.int64),
        out=poison(num_tokens + 4),
    )
    for side, signal in both:
        free_list.gather_extend(
            *(side.prefix, side.length, side.last, side.free, page_size),
            num_tokens=num_tokens,
            num_pages=batch["num_pages"],
            out=side.out[2 : num_tokens + 2],
            signal=signal,
        )
    both.assert_equal()
    assert both.host.out[[0, 1, -2, -1]].tolist() == [POISON] * 4
    return both


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_gather_extend_equals_the_reference(device: Any, size: int, page_size: int) -> None:
    rng = np.random.default_rng([size, page_size])
    for bad in kinds(device, size, page_size):
        # Few tokens per request, so that the simulator has two blocks at most.
        batch = extension(rng, size, page_size, bad, 2 * page_size + 2 if size < 8 else 6)
        both = place(device, batch, page_size, *rng.permutation(IDS) if bad else ("int32", "int32"))
        assert bad or both.signals[0].counts() == {}


@pytest.mark.parametrize("page_size", [3, 64])
def test_gather_extend_of_requests_longer_than_a_tile(device: Any, page_size: int) -> None:
    """Requests over several blocks, with empty ones at their ends, and tiles in which none begins."""
    lengths = np.array([0, 1500, 0, 0, 1, 2100, 7, 0]) if device.simulated else np.array([0, 150_000, 0, 0, 1, 2_100_000, 7, 0] * 5)
    prefix = np.arange(len(lengths)) % (2 * page_size)
    last = np.where(prefix == 0, -1, 5 * page_size + (prefix - 1) % page_size)
    pages = int((-(-(prefix + lengths) // page_size) + -prefix // page_size).sum())
    batch = {"prefix": prefix, "length": prefix + lengths, "last": last, "free": np.arange(pages, 0, -1)}
    both = place(device, batch | {"num_tokens": int(lengths.sum()), "num_pages": pages}, page_size)
    assert both.signals[0].counts() == {}


def test_gather_extend_survives_absurd_lengths(device: Any) -> None:
    """Lengths that only the device knows: `out` is all that is written, and no sum overflows."""
    base = {"free": np.array([4]), "num_tokens": 3, "num_pages": 1, "last": np.array([-1, -1])}
    both = place(device, base | {"prefix": np.array([0, 0]), "length": np.array([2**31 - 1] * 2)}, 16, "int32")
    assert both.host.out[2:5].tolist() == [64, 65, 66] and both.signals[0].counts() == {"mismatch": 1}
    both = place(device, base | {"prefix": np.array([2**62, 0]), "length": np.array([2**62 + 2**61, 5])}, 16)
    assert both.signals[0].counts() == {"mismatch": 1}
    place(device, base | {"prefix": np.array([-1, 2**62]), "length": np.array([2**62, 2**62 - 1])}, 3)


def test_gather_extend_does_not_let_sums_wrap_around(device: Any) -> None:
    """The reference's sums would: the fifth of these requests begins at token 2**64."""
    last, out = 4 * np.arange(1, 6), device.array(poison(3))
    prefix, length = device.array(np.ones(5, np.int64)), device.array(np.full(5, 2**62 + 1))
    signal = Signal(like=out)
    free_list.gather_extend(
        *(prefix, length, device.array(last), device.array(np.arange(1, 3)), 4), num_tokens=3, num_pages=2, out=out, signal=signal
    )
    assert device.host(out).tolist() == [5, 6, 7] and signal.counts() == {"mismatch": 1}


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_gather_extend_without_tokens_or_requests(device: Any, num_tokens: int) -> None:
    """What the host promised but the device does not have is 0, and the disagreement is counted even when there is nothing to write."""
    nothing = np.zeros(0, np.int64)
    batch = {"prefix": nothing, "length": nothing, "last": nothing, "free": nothing, "num_tokens": num_tokens, "num_pages": 0}
    assert place(device, batch, 4).signals[0].counts() == ({"mismatch": 1} if num_tokens else {})
    batch |= {"prefix": np.array([1]), "length": np.array([4]), "last": np.array([0])}
    assert place(device, batch, 4).signals[0].counts() == {"mismatch": 1}


def test_gather_extend_past_32_bits(device: Any) -> None:
    prefix = np.array([2**40 + 3])
    batch = {"prefix": prefix, "length": prefix + 4, "last": 2**50 + prefix, "free": np.array([2**40]), "num_tokens": 4, "num_pages": 1}
    both = place(device, batch | {"last": np.array([2**50 + 2])}, 4)
    assert both.host.out[2:6].tolist() == [2**50 + 3, 2**42, 2**42 + 1, 2**42 + 2]


def test_gather_extend_allocates_for_the_caller(device: Any) -> None:
    both = Both(device, prefix=np.array([2, 0]), length=np.array([6, 3]), last=np.array([41, -1]), free=np.array([5, 7]))
    for side, _ in both:
        made = free_list.gather_extend(side.prefix, side.length, side.last, side.free, 4, num_tokens=7, num_pages=2)
        assert np.asarray(made if side is both.host else device.host(made)).tolist() == [42, 43, 20, 21, 28, 29, 30]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_gather_decode_equals_the_reference(device: Any, size: int, page_size: int) -> None:
    rng = np.random.default_rng([size, page_size])
    for bad in kinds(device, size, page_size):
        lengths = rng.integers(1, 3 * page_size + 1, size)
        last = np.where(lengths == 1, -1, rng.integers(0, 9, size) * page_size + (lengths - 2) % page_size)
        takers = int(np.count_nonzero((lengths - 1) % page_size == 0))
        free = rng.permutation(takers + 2) + 1
        if bad:
            wrong = rng.random(size)
            lengths = np.where(wrong < 0.1, rng.choice([0, -1, -5], size), lengths)
            last = np.where((wrong > 0.1) & (wrong < 0.3), rng.choice([-9, -1, 0, 5], size), last)
            free = np.where(rng.random(len(free)) < 0.1, rng.choice([0, -3], len(free)), free)[: takers * 3 // 4]
        length_type, id_type = rng.permutation(IDS) if bad else ("int64", "int64")
        both = Both(device, length=lengths.astype(length_type), last=last.astype(id_type), free=free, out=poison(size))
        for side, signal in both:
            assert free_list.gather_decode(side.length, side.last, side.free, page_size, out=side.out, signal=signal) is side.out
        both.assert_equal()
        assert bad or both.signals[0].counts() == {}


@pytest.fixture
def few_blocks(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that a block has several tiles to do, also in the simulator."""
    if device.simulated:
        monkeypatch.setattr(free_list, "_MOST_COUNTING_BLOCKS", 2)


@pytest.mark.usefixtures("few_blocks")
def test_gather_decode_over_the_last_locations_and_many_blocks(device: Any) -> None:
    """In place, with blocks that have several tiles."""
    rng = np.random.default_rng(4)
    requests = 1100 if device.simulated else 300_000
    for page_size in (2, 3):
        lengths = rng.integers(0, 9, requests)
        last = np.where(lengths < 2, -1, 12 + (lengths - 2) % page_size)
        both = Both(device, length=lengths, last=last, free=rng.permutation(requests) + 1)
        for side, signal in both:
            free_list.gather_decode(side.length, side.last, side.free, page_size, out=side.last, signal=signal)
        both.assert_equal()
        assert both.signals[0].counts() == {}


@pytest.mark.parametrize(("dtype", "flag"), [("int32", "bool"), ("int64", "uint8")])
def test_compact_equals_the_reference(device: Any, size: int, dtype: str, flag: str) -> None:
    rng = np.random.default_rng(size)
    keep = (rng.integers(0, 2, size) * rng.integers(1, 256, size)).astype(flag)
    both = Both(device, ids=rng.integers(-9, 2**31, size).astype(dtype), keep=keep, out=poison(size, dtype=dtype), number=poison(1))
    for side, signal in both:
        out, number = free_list.compact(side.ids, side.keep, out=side.out, out_len=side.number, signal=signal)
        assert out is side.out and number is side.number
    both.assert_equal()
    assert both.host.number.tolist() == [np.count_nonzero(keep)]


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("kept", [0, 1])
def test_compact_of_all_or_nothing_over_many_blocks(device: Any, kept: int) -> None:
    n = 1300 if device.simulated else 3_000_000
    both = Both(device, ids=np.arange(n), keep=np.full(n, kept, np.uint8), out=poison(n), number=poison(1))
    for side, _ in both:
        free_list.compact(side.ids, side.keep, out=side.out, out_len=side.number)
    both.assert_equal()


ONE, TWO = np.zeros(1, np.int64), np.zeros(2, np.int64)


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (ArgumentTypeError, "prefix_lens: expected dtype int32 or int64, got float64", {"prefix_lens": np.zeros(2)}),
        (ArgumentError, "prefix_lens: expected a contiguous array", {"prefix_lens": np.zeros(4, np.int64)[::2]}),
        (ArgumentTypeError, "seq_lens: expected dtype int64, got int32", {"seq_lens": np.zeros(2, np.int32)}),
        (ArgumentError, r"seq_lens: expected shape \(2,\) like prefix_lens, got \(1,\)", {"seq_lens": ONE}),
        (ArgumentError, r"last_loc: expected shape \(2,\) like prefix_lens, got \(1,\)", {"last_loc": ONE}),
        (ArgumentTypeError, "free_pages: expected dtype int64, got int32", {"free_pages": np.zeros(2, np.int32)}),
        (OutOfPages, "free_pages: expected at least the 2 pages of num_pages, got 1", {"free_pages": ONE}),
        (ArgumentError, "page_size: expected at least 1, got 0", {"page_size": 0}),
        (ArgumentError, "num_tokens: expected at least 0, got -1", {"num_tokens": -1}),
        (ArgumentTypeError, "num_pages: expected an integer, got float", {"num_pages": 1.0}),
        (ArgumentError, r"out: expected shape \(3,\), got \(2,\)", {"out": TWO}),
    ],
)
def test_gather_extend_refuses_by_name(error: type[Exception], message: str, changed: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"prefix_lens": TWO, "seq_lens": TWO, "last_loc": TWO, "free_pages": TWO, "page_size": 4}
    arguments |= {"num_tokens": 3, "num_pages": 2} | changed
    with pytest.raises(error, match=f"^{message}"):
        free_list.gather_extend(**arguments)


def test_gather_decode_and_compact_refuse_by_name(device: Any) -> None:
    both = Both(device, longs=np.zeros(4, np.int64), ints=np.zeros(2, np.int32), keep=np.zeros(2, bool))
    other = {id(both.host): both.there, id(both.there): both.host}
    for side, _ in both:
        two = side.longs[:2]
        with pytest.raises(ArgumentError, match=r"^last_loc: expected shape \(2,\) like seq_lens, got \(4,\)"):
            free_list.gather_decode(side.ints, side.longs, two, 4)
        with pytest.raises(ArgumentError, match=r"^out: expected an array apart from seq_lens"):
            free_list.gather_decode(two, side.ints, two, 4, out=side.longs[1:3])
        with pytest.raises(ArgumentTypeError, match=r"^free_pages: expected an array in .* like the first argument"):
            free_list.gather_decode(side.ints, two, other[id(side)].longs, 4)
        with pytest.raises(ArgumentError, match=r"^keep: expected shape \(4,\) like ids, got \(2,\)"):
            free_list.compact(side.longs, side.keep)
        with pytest.raises(ArgumentTypeError, match=r"^keep: expected dtype bool or uint8, got int32"):
            free_list.compact(two, side.ints)
        with pytest.raises(ArgumentTypeError, match=r"^out: expected dtype int32, got int64"):
            free_list.compact(side.ints, side.keep, out=two)
        with pytest.raises(ArgumentError, match=r"^out: expected an array apart from ids"):
            free_list.compact(two, side.keep, out=side.longs[1:3])
        with pytest.raises(ArgumentError, match=r"^out_len: expected shape \(1,\), got \(2,\)"):
            free_list.compact(two, side.keep, out_len=side.longs[2:])
        assert not np.asarray(side.longs if side is both.host else device.host(side.longs)).any()
    with pytest.raises(ArgumentError, match=r"^signal: expected a Signal of device"):
        free_list.compact(both.there.ints, both.there.keep, signal=Signal())


def test_the_host_never_counts_more_pages_than_the_list_holds(device: Any) -> None:
    pages = DevicePages(4, like=device.array(np.zeros(1, np.int64)))
    v2p, p2v = page_table.empty(9)
    page_table.bind(np.arange(1, 4), np.arange(5, 8), v2p, p2v)
    page_table.unbind_into(device.array(np.arange(1, 4)), device.array(v2p), device.array(p2v), pages)
    pages.refresh()
    pages.fill(device.array(np.array([1, 2])))
    assert pages.known == 2
    for _ in range(3 if device.simulated else 1):
        pages.refresh()
    if not device.simulated:
        import cupy

        cupy.cuda.Device().synchronize()
        pages.refresh()
    assert pages.known == 4
    assert device.host(pages.take(4)).tolist() == [5, 6, 7, 1]
    assert pages.known == 0
