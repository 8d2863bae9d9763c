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


def nonzero(*counters):
    return {kind: count for kind, count in sum(counters, models.Counter()).items() if count}


@st.composite
def batches(draw):
    """Rows, lengths and lanes of a batch, with the options every read op takes."""
    model, page_size = draw(models.tables()), draw(models.page_sizes)
    granularity = draw(st.sampled_from(["token", "page"]))
    pages = draw(st.integers(0, 4))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        ids = draw(st.lists(models.page_ids(model.num_virtual), min_size=pages, max_size=pages))
        rows.append(ids if granularity == "page" else [v * page_size + i for v in ids for i in range(page_size)])
    if granularity == "token" and pages:
        cut = draw(st.integers(0, page_size - 1))
        rows = [row[: len(row) - cut] for row in rows]
    lanes = draw(st.integers(0, 4))
    by_index = lanes > len(rows) or draw(st.booleans())
    request = draw(st.lists(st.integers(-1, len(rows)), min_size=lanes, max_size=lanes)) if by_index else list(range(lanes))
    lens = draw(st.lists(st.integers(-1, 4 * page_size + 2), min_size=lanes, max_size=lanes))
    delta = draw(st.sampled_from([0, 0, 1, 3]))
    valid = draw(st.none() | st.integers(-1, lanes + 1))
    dtype, style = draw(models.id_dtypes), draw(models.view_styles)
    options = dict(
        delta=delta,
        granularity=granularity,
        request_indices=models.as_view(request, dtype, style) if by_index else None,
        valid=np.array([valid], dtype=dtype) if valid is not None and draw(st.booleans()) else valid,
    )
    counts = models.Counter()
    lengths = models.live_lengths(lens, delta, lanes if valid is None else valid, request, len(rows), counts)
    request = [r if 0 <= r < len(rows) else 0 for r in request]
    array = models.as_view(np.reshape(rows, (len(rows), -1)), dtype, style, axis=draw(st.sampled_from([0, 1])))
    identity = draw(st.integers(0, 4)) == 0
    return SimpleNamespace(
        model=models.Identity() if identity else model,
        v2p=None if identity else model.arrays()[0],
        tables=model,
        page_size=page_size,
        rows=rows,
        array=array,
        lens=models.as_view(lens, dtype, style),
        lengths=lengths,
        request=request,
        options=options,
        granularity=granularity,
        counts=counts,
    )


def expected_table(case, out, zero_tail, counts):
    want = out.tolist()
    models.read_table(case.rows, case.lengths, case.model, case.page_size, want, zero_tail, case.request, case.granularity, counts)
    return want


def expected_stream(case, indptr, out, counts):
    want = out.tolist()
    models.read_stream(case.rows, case.lengths, case.model, case.page_size, indptr, want, case.request, case.granularity, counts)
    return want


def row_starts(data, lengths):
    """The prefix sum of the lengths; sometimes with rooms that are too small or too large, or a negative start."""
    indptr = [data.draw(st.sampled_from([0, 0, 0, 2, -1]))]
    for length in lengths:
        indptr.append(indptr[-1] + max(length + data.draw(st.sampled_from([0, 0, 0, -2, 2])), 0))
    return indptr


@examples
@given(batches(), st.data())
def test_read_table(case, data):
    zero_tail, width = data.draw(st.booleans()), data.draw(st.integers(0, 6))
    out = np.full((len(case.lengths), 2 * width), POISON, dtype=np.int32)[:, ::2]
    want = expected_table(case, out, zero_tail, case.counts)
    signal = Signal()
    got = metadata.read_table(case.array, case.lens, case.v2p, case.page_size, out=out, zero_tail=zero_tail, signal=signal, **case.options)
    assert got is out and out.tolist() == want
    assert (out.base[:, 1::2] == POISON).all()
    assert signal.counts() == nonzero(case.counts)


@examples
@given(batches(), st.data())
def test_read_stream(case, data):
    indptr = row_starts(data, case.lengths)
    out = np.full(max(indptr[-1] + data.draw(st.sampled_from([0, 0, 3, -2])), 0), POISON, dtype=data.draw(models.id_dtypes))
    want = expected_stream(case, indptr, out, case.counts)
    signal = Signal()
    starts = models.as_view(indptr, np.int32)
    got = metadata.read_stream(case.array, case.lens, case.v2p, case.page_size, starts, out=out, signal=signal, **case.options)
    assert got is out and out.tolist() == want
    assert signal.counts() == nonzero(case.counts)


@examples
@given(batches(), st.data())
def test_read_table_and_stream(case, data):
    indptr, width = row_starts(data, case.lengths), data.draw(st.integers(0, 6))
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


@examples
@given(batches(), st.data())
def test_decode_metadata(case, data):
    swa = data.draw(models.tables(num_virtual=case.tables.num_virtual))
    spaces = {"full": case.v2p, "swa": swa.arrays()[0]}
    zero_tail, lanes = data.draw(st.booleans()), len(case.lengths)
    full_out = np.full((lanes, data.draw(st.integers(0, 6))), POISON, dtype=np.int32)
    swa_out = np.full((lanes, data.draw(st.integers(0, 6))), POISON, dtype=np.int32) if data.draw(st.booleans()) else None
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
@given(st.data())
def test_gather_translate_window(data):
    page_size = data.draw(models.page_sizes)
    spaces = [data.draw(models.tables(num_virtual=7)) for _ in range(data.draw(st.integers(0, 2)))]
    wanted = data.draw(st.booleans()) or not spaces
    width = data.draw(st.integers(0, 9))
    rows = data.draw(
        st.lists(st.lists(models.token_ids(7, page_size), min_size=width, max_size=width), min_size=1, max_size=3),
    )
    lanes = data.draw(st.integers(0, 4))
    by_index = lanes > len(rows) or data.draw(st.booleans())
    request = data.draw(st.lists(st.integers(-1, len(rows)), min_size=lanes, max_size=lanes)) if by_index else list(range(lanes))
    starts = data.draw(st.lists(st.integers(-2, width + 1), min_size=lanes, max_size=lanes))
    uniform = data.draw(st.booleans())
    widths = [data.draw(st.integers(0, 4))] * lanes if uniform else data.draw(
        st.lists(st.integers(-1, 4), min_size=lanes, max_size=lanes)
    )  # fmt: skip
    counts, signal, ids = models.Counter(), Signal(), []
    for r, start, n in zip(request, starts, widths, strict=True):
        counts["out_of_range"] += not 0 <= r < len(rows)
        for t in range(start, start + n):
            ids.append(rows[r][t] if 0 <= r < len(rows) and 0 <= t < width else (r, t))
    room = len(ids) if uniform else max(len(ids) + data.draw(st.sampled_from([0, 0, 3, -1])), 0)
    counts["mismatch"] += len(ids) > room
    for i, token in enumerate(ids):
        if isinstance(token, tuple):
            counts["out_of_range"] += i < room and 0 <= token[0] < len(rows)
            ids[i] = 0
    written = ids[:room]
    want = [[model.token(t, page_size, counts) for t in written] + [0] * (room - len(written)) for model in spaces]
    dtype, style = data.draw(models.id_dtypes), data.draw(models.view_styles)
    outs = [np.full(room, POISON) for _ in spaces]
    virtual_out = np.full(room, POISON) if wanted else None
    metadata.gather_translate_window(
        models.as_view(np.reshape(rows, (len(rows), width)), dtype, style),
        models.as_view(starts, dtype, style),
        (widths[0] if lanes else 3) if uniform else models.as_view(widths, dtype, style),
        [model.arrays()[0] for model in spaces],
        page_size,
        outs=outs,
        virtual_out=virtual_out,
        request_indices=models.as_view(request, dtype, style) if by_index else None,
        signal=signal,
    )
    assert [out.tolist() for out in outs] == want
    if virtual_out is not None:
        assert virtual_out.tolist() == [max(t, 0) for t in written] + [0] * (room - len(written))
    assert signal.counts() == nonzero(counts)


@examples
@given(st.data())
def test_replay_state_indices(data):
    model = data.draw(models.tables())
    mapping = data.draw(st.lists(models.page_ids(model.num_virtual), max_size=5))
    lanes = data.draw(st.integers(0, 6))
    request = data.draw(st.lists(st.integers(-1, len(mapping)), min_size=lanes, max_size=lanes))
    track = data.draw(st.lists(models.page_ids(model.num_virtual), min_size=lanes, max_size=lanes))
    total = data.draw(st.integers(-1, lanes + 1))
    valid = data.draw(st.integers(-1, lanes + 1))
    tracked, on_device = data.draw(st.booleans()), data.draw(st.booleans())
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
    dtype = data.draw(models.id_dtypes)
    requests, out, track_out = np.array(request, dtype=dtype), np.full(lanes, POISON, np.int32), np.full(lanes, POISON, np.int32)
    got = metadata.replay_state_indices(
        requests,
        models.as_view(mapping, dtype, data.draw(models.view_styles)),
        model.arrays()[0],
        np.array([valid]) if on_device else valid,
        np.array([total], dtype=np.int32) if on_device else total,
        out,
        track_in=models.as_view(track, dtype) if tracked else None,
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
