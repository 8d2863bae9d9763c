"""The metadata references against loops over single entries. Outputs start poisoned: what must stay is compared too."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpukit.errors import Signal
from gpukit.kernels.reference import metadata
from tests.helpers import models
from tests.helpers.models import POISON

examples = settings(max_examples=120, deadline=None)
LEAST, MOST = -(2**63), 2**63 - 1
ENDS = LEAST, LEAST + 1, -(2**62), -(2**31), -2, -1, 0, 1, 5, 2**31, 2**62, MOST - 2**31, MOST - 1, MOST
WIDTHS = 0, 1, 2, 3, 4, 6  # of page tables


def nonzero(*counters):
    return {kind: count for kind, count in sum(counters, models.Counter()).items() if count}


def make_batch(pick, page_size):
    """Rows, lengths and lanes of a batch, with the options every read op takes."""
    tables, granularity = pick.tables(), pick(["token", "page"])
    rows = pick.rows(pick([1, 2, 3]), tables, page_size, granularity)
    lanes = pick.size(4)
    request, by_index = pick.requests(len(rows), lanes)
    # Around every page boundary, and anything.
    lens = pick.many(lanes, [c * page_size + extra for c in range(6) for extra in (-1, 0, 1)] + [*range(5 * page_size)])
    delta = pick([0, 0, 1, 3])
    valid = pick([None, None, *range(-1, lanes + 2)])
    options = dict(
        delta=delta,
        granularity=granularity,
        request_indices=pick.view(request) if by_index else None,
        valid=pick.view([valid]) if valid is not None and pick([False, True]) else valid,
    )
    counts = models.Counter()
    lengths = models.live_lengths(lens, delta, lanes if valid is None else valid, request, len(rows), counts)
    identity = pick([False, False, False, True])
    return SimpleNamespace(
        model=models.Identity() if identity else tables,
        v2p=None if identity else tables.arrays()[0],
        tables=tables,
        page_size=page_size,
        rows=rows,
        array=pick.view(np.reshape(rows, (len(rows), -1)), axis=pick([0, 1])),
        lens=pick.view(lens),
        lengths=lengths,
        request=[r if 0 <= r < len(rows) else 0 for r in request],
        options=options,
        granularity=granularity,
        counts=counts,
    )


batches = st.builds(make_batch, models.picks, models.page_sizes)


def expected_table(case, out, zero_tail, counts):
    want = out.tolist()
    models.read_table(case.rows, case.lengths, case.model, case.page_size, want, zero_tail, case.request, case.granularity, counts)
    return want


def expected_stream(case, indptr, out, counts):
    want = out.tolist()
    models.read_stream(case.rows, case.lengths, case.model, case.page_size, indptr, want, case.request, case.granularity, counts)
    return want


def row_starts(pick, lengths):
    """The prefix sum of the lengths; sometimes with rooms that are too small or too large, or a negative start."""
    indptr = [pick([0, 0, 0, 2, -1])]
    for length in lengths:
        indptr.append(indptr[-1] + max(length + pick([0, 0, 0, -2, 2]), 0))
    return indptr


@examples
@given(batches, models.picks)
def test_read_table(case, pick):
    zero_tail, width = pick([False, True]), pick(WIDTHS)
    out = np.full((len(case.lengths), 2 * width), POISON, dtype=np.int32)[:, ::2]
    want = expected_table(case, out, zero_tail, case.counts)
    signal = Signal()
    got = metadata.read_table(case.array, case.lens, case.v2p, case.page_size, out=out, zero_tail=zero_tail, signal=signal, **case.options)
    assert got is out and out.tolist() == want
    assert (out.base[:, 1::2] == POISON).all()
    assert signal.counts() == nonzero(case.counts)


@examples
@given(batches, models.picks)
def test_read_stream(case, pick):
    indptr = row_starts(pick, case.lengths)
    out = np.full(max(indptr[-1] + pick([0, 0, 3, -2]), 0), POISON, dtype=pick([np.int32, np.int64]))
    want = expected_stream(case, indptr, out, case.counts)
    signal = Signal()
    starts = models.as_view(indptr, np.int32)
    got = metadata.read_stream(case.array, case.lens, case.v2p, case.page_size, starts, out=out, signal=signal, **case.options)
    assert got is out and out.tolist() == want
    assert signal.counts() == nonzero(case.counts)


@examples
@given(batches, models.picks)
def test_read_table_and_stream(case, pick):
    indptr, width = row_starts(pick, case.lengths), pick(WIDTHS)
    table = np.full((len(case.lengths), width), POISON, dtype=np.int32)
    stream = np.full(max(indptr[-1], 0), POISON, dtype=np.int64)
    want = expected_table(case, table, True, case.counts), expected_stream(case, indptr, stream, case.counts)
    signal = Signal()
    starts = np.array(indptr, dtype=np.int32)
    got = metadata.read_table_and_stream(
        case.array, case.lens, case.v2p, case.page_size, starts,
        table_out=table, stream_out=stream, zero_tail=True, signal=signal, **case.options,
    )  # fmt: skip
    assert got[0] is table and got[1] is stream
    assert (table.tolist(), stream.tolist()) == want
    assert signal.counts() == nonzero(case.counts)


@pytest.mark.parametrize("delta", [-(2**31), -1, 0, 1, 2**31])
def test_lengths_at_the_ends_of_64_bits(delta):
    """A sum below zero is no token, and so is one beyond 64 bits. Lengths that are given stay as they are."""
    lens = np.array(ENDS)
    sums = [length + delta if 0 <= length + delta <= MOST else 0 for length in ENDS]
    rows, out = np.ones((len(ENDS), 4), np.int64), np.zeros((len(ENDS), 4), np.int32)
    got = metadata.read_table(rows, lens, None, 3, out=out, delta=delta, granularity="page")
    assert got.sum(axis=1).tolist() == [min(-(-length // 3), 4) for length in sums]
    assert lens.tolist() == list(ENDS)


@pytest.mark.parametrize("page_size", models.PAGE_SIZES)
def test_pages_at_the_ends_of_64_bits_in_a_stream(page_size):
    """A page past the table is none, also where its first token is one of the table's once it went round; without one all are pages that fit."""
    model = models.Tables(6, 9, {1: 8, 2: 3, 5: 4})
    for tables, v2p, most in ((model, model.arrays()[0], MOST), (models.Identity(), None, MOST // page_size - 1)):
        pages = [page for page in (*ENDS, *(2**64 // page_size + page for page in range(-3, 7)), most) if page <= most]
        length = len(pages) * page_size
        want, counts, signal = [POISON] * length, models.Counter(), Signal()
        models.read_stream([pages], [length], tables, page_size, [0, length], want, [0], "page", counts)
        out = np.full(length, POISON)
        options = dict(granularity="page", signal=signal)
        metadata.read_stream(np.array([pages]), np.array([length]), v2p, page_size, np.array([0, length]), out=out, **options)
        assert out.tolist() == want and signal.counts() == nonzero(counts)


@examples
@given(batches, models.picks)
def test_decode_metadata(case, pick):
    swa = pick.tables(num_virtual=case.tables.num_virtual)
    spaces = {"full": case.v2p, "swa": swa.arrays()[0]}
    zero_tail, lanes = pick([False, True]), len(case.lengths)
    full_out = np.full((lanes, pick(WIDTHS)), POISON, dtype=np.int32)
    swa_out = np.full((lanes, pick(WIDTHS)), POISON, dtype=np.int32) if pick([False, True]) else None
    lengths_out, cu_lengths_out = np.full(lanes, POISON, dtype=np.int32), np.full(lanes + 1, POISON, dtype=np.int32)
    want_full = expected_table(case, full_out, zero_tail, case.counts)
    if swa_out is not None:
        case.model = swa
        want_swa = expected_table(case, swa_out, zero_tail, models.Counter())
    signal = Signal()
    metadata.decode_metadata(
        case.array, case.lens, SimpleNamespace(table=spaces.get), case.page_size,
        lengths_out=lengths_out, cu_lengths_out=cu_lengths_out, full_out=full_out, swa_out=swa_out,
        zero_tail=zero_tail, signal=signal, **case.options,
    )  # fmt: skip
    assert lengths_out.tolist() == case.lengths
    assert cu_lengths_out.tolist() == [sum(case.lengths[:b]) for b in range(lanes + 1)]
    assert full_out.tolist() == want_full
    if swa_out is not None:
        assert swa_out.tolist() == want_swa
    assert signal.counts() == nonzero(case.counts)


def test_decode_metadata_known_answer():
    """P=4, two drafts: a verify batch of two requests and a padded lane; the retired SWA page reads as the sink, uncounted."""
    full, swa = models.Tables(6, 9, {1: 8, 2: 3, 3: 5, 4: 1}), models.Tables(6, 9, {2: 4, 3: 2, 4: 7})
    rows = np.array([[4, 5, 6, 7, 12, 13, 0, 0], [16, 17, 18, 19, 8, 9, 10, 11]], dtype=np.int32)
    spaces = SimpleNamespace(table={"full": full.arrays()[0], "swa": swa.arrays()[0]}.get)
    lengths, cu = np.full(3, POISON, np.int32), np.full(4, POISON, np.int32)
    full_out, swa_out = np.full((3, 3), POISON, np.int32), np.full((3, 3), POISON, np.int32)
    signal = Signal()
    metadata.decode_metadata(
        rows, np.array([4, 2, 9], np.int32), spaces, 4, lengths_out=lengths, cu_lengths_out=cu, full_out=full_out, swa_out=swa_out,
        delta=2, request_indices=np.array([0, 1, 55]), valid=np.array([2]), signal=signal,
    )  # fmt: skip
    assert lengths.tolist() == [6, 4, 0] and cu.tolist() == [0, 6, 10, 10]
    assert full_out.tolist() == [[8, 5, 0], [1, 0, 0], [0, 0, 0]]
    assert swa_out.tolist() == [[0, 2, 0], [7, 0, 0], [0, 0, 0]]
    assert signal.counts() == {}


@examples
@given(models.picks, models.page_sizes)
def test_gather_translate_window(pick, page_size):
    spaces = [pick.tables(num_virtual=7) for _ in range(pick([0, 1, 2]))]
    wanted = not spaces or pick([False, True])
    width = pick([0, 1, 5, 6, 7, 8, 9])
    rows = [pick.tokens(width, 7, page_size, spaces[0].where if spaces else ()) for _ in range(pick([1, 2, 3]))]
    lanes = pick.size(4)
    request, by_index = pick.requests(len(rows), lanes)
    starts = pick.many(lanes, range(-2, width + 2))
    uniform = pick([False, True])
    widths = [pick(range(5))] * lanes if uniform else pick.many(lanes, range(-1, 5))
    counts, signal, ids = models.Counter(), Signal(), []
    for r, start, n in zip(request, starts, widths, strict=True):
        counts["out_of_range"] += not 0 <= r < len(rows)
        for t in range(start, start + n):
            ids.append(rows[r][t] if 0 <= r < len(rows) and 0 <= t < width else (r, t))
    room = len(ids) if uniform else max(len(ids) + pick([0, 0, 3, -1]), 0)
    counts["mismatch"] += len(ids) > room
    for i, token in enumerate(ids):
        if isinstance(token, tuple):
            counts["out_of_range"] += i < room and 0 <= token[0] < len(rows)
            ids[i] = 0
    written = ids[:room]
    want = [[model.token(t, page_size, counts) for t in written] + [0] * (room - len(written)) for model in spaces]
    outs = [np.full(room, POISON) for _ in spaces]
    virtual_out = np.full(room, POISON) if wanted else None
    metadata.gather_translate_window(
        pick.view(np.reshape(rows, (len(rows), width))),
        pick.view(starts),
        (widths[0] if lanes else 3) if uniform else pick.view(widths),
        [model.arrays()[0] for model in spaces],
        page_size,
        outs=outs,
        virtual_out=virtual_out,
        request_indices=pick.view(request) if by_index else None,
        signal=signal,
    )
    assert [out.tolist() for out in outs] == want
    if virtual_out is not None:
        assert virtual_out.tolist() == [max(t, 0) for t in written] + [0] * (room - len(written))
    assert signal.counts() == nonzero(counts)


@examples
@given(models.picks)
def test_replay_state_indices(pick):
    model = pick.tables()
    mapping = pick.pages(pick.size(5), model.num_virtual, model.where)
    lanes = pick.size(6)
    request = pick.many(lanes, [*range(len(mapping))] * 4 + [-1, len(mapping)])
    track = pick.pages(lanes, model.num_virtual, model.where)
    total = pick([lanes, lanes, *range(-1, lanes + 2)])
    valid = pick([lanes, lanes, *range(-1, lanes + 2)])
    tracked, on_device = pick([False, True]), pick([False, True])
    counts, signal = models.Counter(), Signal()
    want, want_track, want_request = [POISON] * lanes, [POISON] * lanes, list(request)
    for b in range(min(total, lanes)):
        if b >= valid:
            want[b] = want_track[b] = -1
            want_request[b] = 0
            continue
        if 0 <= request[b] < len(mapping):
            want[b] = model.page(mapping[request[b]], counts)
        else:
            want[b] = 0
            counts["out_of_range"] += 1
        want_track[b] = model.page(track[b], counts) if tracked else POISON
    dtype = pick([np.int32, np.int64])
    requests, out, track_out = np.array(request, dtype=dtype), np.full(lanes, POISON, np.int32), np.full(lanes, POISON, np.int32)
    got = metadata.replay_state_indices(
        requests,
        pick.view(mapping, dtype),
        model.arrays()[0],
        np.array([valid]) if on_device else valid,
        np.array([total], dtype=np.int32) if on_device else total,
        out,
        track_in=pick.view(track, dtype) if tracked else None,
        track_out=track_out if tracked else None,
        signal=signal,
    )
    assert got is out and out.tolist() == want
    assert requests.tolist() == want_request
    assert track_out.tolist() == (want_track if tracked else [POISON] * lanes)
    assert signal.counts() == nonzero(counts)


@pytest.mark.parametrize("granularity", ["token", "page"])
def test_nothing_is_read_when_there_is_nothing(granularity):
    """No lanes, no rows and no columns: outputs of that shape come back and nothing fails."""
    empty = np.zeros((0, 0), dtype=np.int32)
    none = np.zeros(0, dtype=np.int32)
    v2p = models.Tables(1, 1).arrays()[0]
    assert metadata.read_table(empty, none, v2p, 16, out=empty.copy(), granularity=granularity).shape == (0, 0)
    assert metadata.read_stream(empty, none, v2p, 16, np.zeros(1, np.int32), out=none.copy(), granularity=granularity).shape == (0,)
    cu = np.full(1, POISON, dtype=np.int32)
    metadata.decode_metadata(
        empty, none, SimpleNamespace(table=lambda space: v2p), 16,
        lengths_out=none.copy(), cu_lengths_out=cu, full_out=empty.copy(), granularity=granularity,
    )  # fmt: skip
    assert cu.tolist() == [0]
