"""The free-list references against lists and walks: the ring over its wrap, placement token by token, compaction."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpukit.errors import Signal
from gpukit.kernels.reference import free_list
from tests.helpers import models

examples = settings(max_examples=150, deadline=None)


LEAST, MOST = -(2**63), 2**63 - 1
ENDS = LEAST, LEAST + 1, -(2**62), -2, -1, 0, 1, 5, 2**31, 2**62, MOST - 1, MOST


def nonzero(counts):
    return {kind: count for kind, count in counts.items() if count}


@examples
@given(st.integers(1, 5), st.integers(0, 30), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=12))
def test_ring_is_a_queue_that_drops_what_does_not_fit(capacity, start, steps):
    pages = models.device_pages(capacity, taken=start)
    held, counts, signal, following = [], models.Counter(), Signal(), 1
    for is_push, n in steps:
        if is_push:
            values = list(range(following, following + n))
            following += n
            assert free_list.append(pages, np.array(values, dtype=np.int64), signal) is None
            models.push(held, capacity, values, counts)
        else:
            got = free_list.take(pages, n, signal=signal)
            counts["exhausted"] += max(n - len(held), 0)
            assert got.tolist() == (held[:n] + [0] * n)[:n]
            held = held[n:]
        assert models.held_pages(pages) == held
    assert signal.counts() == nonzero(counts)
    assert pages.counters.dtype == np.int64 and start <= pages.counters[0] <= pages.counters[1]


def test_take_writes_only_its_n_entries():
    pages = models.device_pages(4, [7, 8, 9], taken=2)
    out = np.full(5, models.POISON)
    assert free_list.take(pages, 2, out) is out
    assert out.tolist() == [7, 8] + [models.POISON] * 3
    assert pages.counters.tolist() == [4, 5]


@examples
@given(models.picks, models.page_sizes)
def test_gather_extend(pick, page_size):
    """Requests of which most keep the contract, some break it on purpose."""
    lengths = [0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size, *range(2 * page_size + 2)]
    prefix, seq, last = [], [], []
    flaws = pick([[None] * 10, [None] * 6 + ["prefix", "seq", "last"]])
    for _ in range(pick.size(5)):
        flaw, start = pick(flaws), pick(lengths)
        kept = -1 if start == 0 else pick(range(9)) * page_size + (start - 1) % page_size
        prefix.append(pick([-1, -page_size]) if flaw == "prefix" else start)
        seq.append(start - 1 if flaw == "seq" else start + pick(lengths))
        last.append(pick([kept + 1, kept - 10 * page_size, -1, -2]) if flaw == "last" else kept)
    tokens = sum(max(s - p, 0) for p, s in zip(prefix, seq, strict=True) if p >= 0)
    pages = sum(sum(t % page_size == 0 for t in range(p, s)) for p, s in zip(prefix, seq, strict=True) if p >= 0)
    num_tokens = max(tokens + pick([0, 0, 0, 0, 1, -1, -3, 5]), 0)
    num_pages = max(pages + pick([0, 0, 0, 0, 1, -1]), 0)
    free = pick.many(num_pages + pick([0, 2]), pick([[11, 12, 13, 10**9], [11, 12, 13, 14, 0, -1]]))

    counts, signal = models.Counter(), Signal()
    want = models.gather_extend(prefix, seq, last, free, page_size, num_tokens, num_pages, counts)
    out = np.full(num_tokens + 2, models.POISON)
    inputs = [pick.view(values) for values in (prefix, seq, last)] + [pick.view(free, np.int64)]
    sizes = dict(num_tokens=num_tokens, num_pages=num_pages)
    got = free_list.gather_extend(*inputs, page_size, **sizes, out=out[:num_tokens], signal=signal)
    assert got.tolist() == want
    assert out[num_tokens:].tolist() == [models.POISON] * 2
    assert signal.counts() == nonzero(counts)
    fresh = free_list.gather_extend(*inputs, page_size, **sizes)
    assert fresh.dtype == np.int64 and fresh.tolist() == want


def test_gather_extend_known_answer():
    """P=4: a request that fills its page and takes two more, one that starts empty, one with nothing to do."""
    got = free_list.gather_extend(
        np.array([2, 0, 4]), np.array([9, 3, 4]), np.array([41, -1, 23]), np.array([5, 7, 9, 8]), 4, num_tokens=10, num_pages=3
    )
    assert got.tolist() == [42, 43, 20, 21, 22, 23, 28, 36, 37, 38]


def test_gather_extend_survives_absurd_device_lengths():
    """Lengths that only the device knows: nothing is allocated for them and `out` is all that is written."""
    out, signal = np.full(3, models.POISON), Signal()
    free_list.gather_extend(
        np.array([0, 0]), np.array([2**31 - 1] * 2, dtype=np.int32), np.array([-1, -1]), np.array([4]), 16,
        num_tokens=3, num_pages=1, out=out, signal=signal,
    )  # fmt: skip
    assert out.tolist() == [64, 65, 66] and signal.counts() == {"mismatch": 1}


@pytest.mark.parametrize("page_size", models.PAGE_SIZES)
def test_gather_extend_at_the_ends_of_64_bits(page_size):
    """One token behind every prefix with every last location; behind the last location of all there is none."""
    prefix, last = (values.ravel().tolist() for values in np.meshgrid(np.minimum(ENDS, MOST - 1), ENDS))
    seq = [each + 1 for each in prefix]
    known = [-1 if each == MOST and start % page_size else each for start, each in zip(prefix, last, strict=True)]
    free, counts, signal = list(range(1, 201)), models.Counter(), Signal()
    want = models.gather_extend(prefix, seq, known, free, page_size, 200, 200, counts)
    got = free_list.gather_extend(*map(np.array, (prefix, seq, last, free)), page_size, num_tokens=200, num_pages=200, signal=signal)
    assert got.tolist() == want and signal.counts() == nonzero(counts)


@pytest.mark.parametrize("page_size", models.PAGE_SIZES)
def test_gather_extend_into_the_last_page_of_all(page_size):
    """The rest of a page, and what begins behind it, up to the largest length."""
    for prefix in range(MOST - 2 * page_size, MOST):
        last = 2 * page_size + (prefix - 1) % page_size
        want = models.gather_extend([prefix], [MOST], [last], [7, 8, 9], page_size, MOST - prefix, 3, models.Counter())
        given = (np.array(each) for each in ([prefix], [MOST], [last], [7, 8, 9]))
        assert free_list.gather_extend(*given, page_size, num_tokens=MOST - prefix, num_pages=3).tolist() == want


@pytest.mark.parametrize("page_size", models.PAGE_SIZES)
def test_gather_decode_at_the_ends_of_64_bits(page_size):
    """Every length with every last location; behind the last location of all there is none."""
    seq, last = (values.ravel().tolist() for values in np.meshgrid(ENDS, ENDS))
    free, counts, signal = list(range(1, 201)), models.Counter(), Signal()
    want = models.gather_decode(seq, [-1 if each == MOST else each for each in last], free, page_size, counts)
    assert free_list.gather_decode(*map(np.array, (seq, last, free)), page_size, signal=signal).tolist() == want
    assert signal.counts() == nonzero(counts)


@examples
@given(models.picks, models.page_sizes)
def test_gather_decode(pick, page_size):
    seq, last = [], []
    for _ in range(pick.size(7)):
        length = pick([-1, 0, 1, 1, page_size + 1, page_size + 1, *range(1, 2 * page_size + 2)])
        kept = pick(range(9)) * page_size + (length - 2) % page_size
        seq.append(length)
        last.append(pick([kept] * 6 + [-1, kept + 1, kept - 10 * page_size]))
    free = pick.many(pick([0, 2, 7, 8]), pick([[1, 5, 9, 10**10], [1, 5, 0, -1]]))
    counts, signal = models.Counter(), Signal()
    want = models.gather_decode(seq, last, free, page_size, counts)
    inputs = pick.view(seq), pick.view(last), pick.view(free, np.int64)
    out = np.full(len(seq), models.POISON)
    assert free_list.gather_decode(*inputs, page_size, out=out, signal=signal) is out
    assert out.tolist() == want == free_list.gather_decode(*inputs, page_size).tolist()
    assert signal.counts() == nonzero(counts)


def test_gather_decode_known_answer():
    """P=4: goes on, starts a page, padded lane, starts a page, goes on; the padded lane takes no page."""
    got = free_list.gather_decode(np.array([3, 5, 0, 1, 8]), np.array([9, 23, 77, -1, 14]), np.array([6, 2, 3]), 4)
    assert got.tolist() == [10, 24, 0, 8, 15]


@pytest.mark.parametrize("flag", [bool, np.uint8])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("n", [0, 1, 2, 65])
def test_compact(n, dtype, flag):
    rng = np.random.default_rng(n)
    ids = rng.integers(-5, 100, n).astype(dtype)
    keep = (rng.integers(0, 2, n) * (1 if flag is bool else 200)).astype(flag)
    want = [i for i, k in zip(ids.tolist(), keep.tolist(), strict=True) if k]
    out, out_len = np.full(n, models.POISON, dtype=dtype), np.zeros(1, dtype=np.int64)
    got = free_list.compact(ids, keep, out=out, out_len=out_len)
    assert got[0] is out and got[1] is out_len
    assert out_len.tolist() == [len(want)]
    assert out.tolist() == want + [models.POISON] * (n - len(want))
    fresh, count = free_list.compact(models.as_view(ids, dtype, "reverse"), keep)
    assert fresh.dtype == dtype and fresh[: count[0]].tolist() == want and count.dtype == np.int64
