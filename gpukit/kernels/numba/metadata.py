"""Device code of the attention-metadata ops. What they promise stands in `kernels/metadata.py`.

Lengths, request indices and whatever else is read once per lane may be int32 or int64: such an array comes as two pointers, at least one of
them null, so that there is one binary per dtype of the rows. A row entry stands for `entry_tokens` tokens, `page_entries` entries make a
page, and one of the two is 1. A lane has a power of two of threads, `workers`, that stride over its pages or tokens.
"""

from __future__ import annotations

from gpukit.compile.device import (
    BLOCK,
    MISMATCH,
    OUT_OF_RANGE,
    count,
    cuda,
    device_function,
    exclusive_scan,
    int64,
    is_null,
    kernel,
)
from gpukit.kernels.numba._translate import count_missing, divide, find_page, location_in, translate_page

# What no length is added to.
MOST = 2**63 - 1


@device_function
def element(array32, array64, i):
    # Element of the one array of the two that was given.
    if is_null(array64):
        return int64(array32[i])
    return int64(array64[i])


@device_function
def element_or(array32, array64, i, value):
    # The same, or `value` where neither was given.
    if is_null(array32) and is_null(array64):
        return int64(value)
    return element(array32, array64, i)


@device_function
def put(array32, array64, i, value):
    # Store into the one array of the two that was given.
    if is_null(array64):
        array32[i] = value
    else:
        array64[i] = value


@device_function
def row_of(lane, requests32, requests64, num_rows):
    # Row of a lane, -1 where its request has none.
    request = element_or(requests32, requests64, lane, lane)
    if request < 0 or request >= num_rows:
        return int64(-1)
    return request


@device_function
def live_lane(lane, lens32, lens64, delta, requests32, requests64, num_rows, valid, valid32, valid64):
    # Row and length of a lane: (0, 0) for padding, (-1, 0) where the request has no row.
    if lane >= element_or(valid32, valid64, 0, valid):
        return int64(0), int64(0)
    # Loaded before the branch, so that the two loads wait together.
    length = element(lens32, lens64, lane)
    row = row_of(lane, requests32, requests64, num_rows)
    # Compared before it is added: the compiler assumes that no int64 sum goes round.
    if row < 0 or length < -delta or length > MOST - max(delta, int64(0)):
        return row, int64(0)
    return row, length + delta


@device_function
def stream_range(lane, tokens, indptr, out_length):
    # Where a lane's stream begins, and how many of its tokens find room; none before the array.
    begin = int64(indptr[lane])
    if begin < 0:
        return begin, int64(0)
    return begin, min(tokens, min(int64(indptr[lane + 1]), out_length) - begin)


@device_function
def pages_of(tokens, page_size, shift):
    # Pages that the tokens begin.
    if tokens < 1:
        return int64(0)
    return divide(tokens - 1, page_size, shift) + 1


@device_function
def page_of(entry, page_entries, entries_shift):
    # Virtual page of a row entry; padding stays negative.
    if entry < 0:
        return int64(-1)
    return divide(entry, page_entries, entries_shift)


@device_function
def row_page(column, pages, rows, row_start, page_stride, page_entries, entries_shift):
    # Virtual page number `column` of a row, padding from `pages` on.
    if column >= pages:
        return int64(-1)
    return page_of(int64(rows[row_start + column * page_stride]), page_entries, entries_shift)


# What the four ops that read a batch of rows begin with.
BATCH = dict(
    rows="id*", num_rows="int64", row_stride="int64", column_stride="int64", row_width="int64",
    page_entries="int64", entries_shift="int64", entry_tokens="int64", tokens_shift="int64", page_size="int64", shift="int64",
    lens32="int32*", lens64="int64*", lanes="int64", delta="int64", requests32="int32*", requests64="int64*",
    valid="int64", valid32="int32*", valid64="int64*",
)  # fmt: skip


@kernel(
    **BATCH, v2p="int64*", table_rows="int64",
    out="int32*", width="int64", out_row_stride="int64", out_column_stride="int64", zero_tail="int64", worker_bits="int64", signal="int64*",
)  # fmt: skip
def read_table(
    rows, num_rows, row_stride, column_stride, row_width, page_entries, entries_shift, entry_tokens, tokens_shift, page_size, shift,
    lens32, lens64, lanes, delta, requests32, requests64, valid, valid32, valid64, v2p, table_rows,
    out, width, out_row_stride, out_column_stride, zero_tail, worker_bits, signal,
):  # fmt: skip
    lane = int64(cuda.grid(1)) >> worker_bits
    workers = int64(1) << worker_bits
    column = int64(cuda.grid(1)) & (workers - 1)
    if lane >= lanes:
        return
    row, length = live_lane(lane, lens32, lens64, delta, requests32, requests64, num_rows, valid, valid32, valid64)
    if row < 0 and column == 0:
        count(signal, OUT_OF_RANGE, 1)
    pages = min(pages_of(length, page_size, shift), pages_of(row_width, page_entries, entries_shift))
    end = width if zero_tail else min(pages, width)
    while column < end:
        page = row_page(column, pages, rows, row * row_stride, column_stride * page_entries, page_entries, entries_shift)
        out[lane * out_row_stride + column * out_column_stride] = translate_page(page, v2p, table_rows, signal)
        column += workers


@kernel(
    **BATCH, v2p="int64*", table_rows="int64",
    indptr="int32*", out32="int32*", out64="int64*", out_length="int64", worker_bits="int64", signal="int64*",
)  # fmt: skip
def read_stream(
    rows, num_rows, row_stride, column_stride, row_width, page_entries, entries_shift, entry_tokens, tokens_shift, page_size, shift,
    lens32, lens64, lanes, delta, requests32, requests64, valid, valid32, valid64, v2p, table_rows,
    indptr, out32, out64, out_length, worker_bits, signal,
):  # fmt: skip
    lane = int64(cuda.grid(1)) >> worker_bits
    workers = int64(1) << worker_bits
    token = int64(cuda.grid(1)) & (workers - 1)
    if lane >= lanes:
        return
    row, length = live_lane(lane, lens32, lens64, delta, requests32, requests64, num_rows, valid, valid32, valid64)
    if row < 0 and token == 0:
        count(signal, OUT_OF_RANGE, 1)
    begin, tokens = stream_range(lane, min(length, row_width * entry_tokens), indptr, out_length)
    if begin < 0 and length > 0 and token == 0:
        count(signal, MISMATCH, 1)
    while token < tokens:
        index = divide(token, entry_tokens, tokens_shift)
        entry = int64(rows[row * row_stride + index * column_stride])
        page = page_of(entry, page_entries, entries_shift)
        physical = find_page(page, v2p, table_rows)
        count_missing(physical, 1, signal)
        # One of the two offsets is always 0: entries are tokens or pages.
        offset = entry - page * page_entries + token - index * entry_tokens
        put(out32, out64, begin + token, location_in(physical, page_size, offset))
        token += workers


@kernel(
    **BATCH, v2p="int64*", table_rows="int64",
    table_out="int32*", width="int64", out_row_stride="int64", out_column_stride="int64", zero_tail="int64",
    indptr="int32*", stream32="int32*", stream64="int64*", stream_length="int64", worker_bits="int64", signal="int64*",
)  # fmt: skip
def read_table_and_stream(
    rows, num_rows, row_stride, column_stride, row_width, page_entries, entries_shift, entry_tokens, tokens_shift, page_size, shift,
    lens32, lens64, lanes, delta, requests32, requests64, valid, valid32, valid64, v2p, table_rows,
    table_out, width, out_row_stride, out_column_stride, zero_tail, indptr, stream32, stream64, stream_length, worker_bits, signal,
):  # fmt: skip
    lane = int64(cuda.grid(1)) >> worker_bits
    workers = int64(1) << worker_bits
    worker = int64(cuda.grid(1)) & (workers - 1)
    if lane >= lanes:
        return
    row, length = live_lane(lane, lens32, lens64, delta, requests32, requests64, num_rows, valid, valid32, valid64)
    if row < 0 and worker == 0:
        count(signal, OUT_OF_RANGE, 1)
    begin, tokens = stream_range(lane, min(length, row_width * entry_tokens), indptr, stream_length)
    if begin < 0 and length > 0 and worker == 0:
        count(signal, MISMATCH, 1)
    pages = min(pages_of(length, page_size, shift), pages_of(row_width, page_entries, entries_shift))
    token = worker
    while token < tokens:
        index = divide(token, entry_tokens, tokens_shift)
        entry = int64(rows[row * row_stride + index * column_stride])
        page = page_of(entry, page_entries, entries_shift)
        physical = find_page(page, v2p, table_rows)
        offset = entry - page * page_entries + token - index * entry_tokens
        put(stream32, stream64, begin + token, location_in(physical, page_size, offset))
        column = divide(token, page_size, shift)
        times = int64(1)
        if column * page_size == token and column < width:
            times = int64(2)
            table_out[lane * out_row_stride + column * out_column_stride] = max(physical, int64(0))
        count_missing(physical, times, signal)
        token += workers
    # Pages that the stream had no room for, and the tail.
    column = pages_of(tokens, page_size, shift) + worker
    end = width if zero_tail else min(pages, width)
    while column < end:
        page = row_page(column, pages, rows, row * row_stride, column_stride * page_entries, page_entries, entries_shift)
        table_out[lane * out_row_stride + column * out_column_stride] = translate_page(page, v2p, table_rows, signal)
        column += workers


@kernel(
    **BATCH, lengths_out="int32*", cu_lengths_out="int32*",
    full="int64*", full_rows="int64", full_out="int32*", full_width="int64", full_row_stride="int64", full_column_stride="int64",
    swa="int64*", swa_rows="int64", swa_out="int32*", swa_width="int64", swa_row_stride="int64", swa_column_stride="int64",
    zero_tail="int64", worker_bits="int64", signal="int64*",
)  # fmt: skip
def decode_metadata(
    rows, num_rows, row_stride, column_stride, row_width, page_entries, entries_shift, entry_tokens, tokens_shift, page_size, shift,
    lens32, lens64, lanes, delta, requests32, requests64, valid, valid32, valid64, lengths_out, cu_lengths_out,
    full, full_rows, full_out, full_width, full_row_stride, full_column_stride,
    swa, swa_rows, swa_out, swa_width, swa_row_stride, swa_column_stride, zero_tail, worker_bits, signal,
):  # fmt: skip
    scratch = cuda.shared.array(BLOCK, int64)
    # The first blocks write the lengths, one tile of lanes each and all at once: every block sums the lengths before its tile for itself.
    tiles = max((lanes + BLOCK - 1) // BLOCK, int64(1))
    first_lane = int64(cuda.blockIdx.x) * BLOCK
    if cuda.blockIdx.x < tiles:
        summed = int64(0)
        other = int64(cuda.threadIdx.x)
        while other < first_lane:
            row, length = live_lane(other, lens32, lens64, delta, requests32, requests64, num_rows, valid, valid32, valid64)
            summed += length
            other += BLOCK
        lane = int64(cuda.grid(1))
        row, length = int64(0), int64(0)
        if lane < lanes:
            row, length = live_lane(lane, lens32, lens64, delta, requests32, requests64, num_rows, valid, valid32, valid64)
        if row < 0:
            count(signal, OUT_OF_RANGE, 1)
        before_tile = exclusive_scan(scratch, summed)[1]
        before = before_tile + exclusive_scan(scratch, length)[0]
        if lane == 0:
            cu_lengths_out[0] = 0
        if lane < lanes:
            lengths_out[lane] = length
            cu_lengths_out[lane + 1] = before + length
        return
    # The other blocks write the tables.
    workers = int64(1) << worker_bits
    worker = int64(cuda.grid(1)) - tiles * BLOCK
    lane = worker >> worker_bits
    column = worker & (workers - 1)
    if lane >= lanes:
        return
    row, length = live_lane(lane, lens32, lens64, delta, requests32, requests64, num_rows, valid, valid32, valid64)
    pages = min(pages_of(length, page_size, shift), pages_of(row_width, page_entries, entries_shift))
    full_end = full_width if zero_tail else min(pages, full_width)
    swa_end = swa_width if zero_tail else min(pages, swa_width)
    while column < max(full_end, swa_end):
        page = row_page(column, pages, rows, row * row_stride, column_stride * page_entries, page_entries, entries_shift)
        if column < full_end:
            full_out[lane * full_row_stride + column * full_column_stride] = translate_page(page, full, full_rows, signal)
        if column < swa_end:
            # Pages that left the window are ordinary here, and not counted.
            swa_out[lane * swa_row_stride + column * swa_column_stride] = max(find_page(page, swa, swa_rows), int64(0))
        column += workers


@device_function
def run_sums(lanes, run, widths32, widths64, room, begins, scratch):
    # Number of all tokens; begins[k] becomes that before lane k * run. One more than there is room for is as good as many, and no sum goes round.
    lane = int64(cuda.threadIdx.x) * run
    stop = min(lane + run, lanes)
    summed = int64(0)
    while lane < stop:
        summed += min(max(element(widths32, widths64, lane), int64(0)), room + 1)
        lane += 1
    before, total = exclusive_scan(scratch, summed)
    begins[cuda.threadIdx.x] = before
    cuda.syncthreads()
    return total


@device_function
def locate(i, run, widths32, widths64, begins):
    # Lane and step of packed token i: the last run that begins at or before it, then lane by lane.
    found = int64(0)
    half = int64(BLOCK // 2)
    while half > 0:
        if begins[found + half] <= i:
            found += half
        half >>= 1
    step = i - begins[found]
    lane = found * run
    width = max(element(widths32, widths64, lane), int64(0))
    while step >= width:
        step -= width
        lane += 1
        width = max(element(widths32, widths64, lane), int64(0))
    return lane, step


@device_function
def place(page, offset, page_size, v2p, table_rows, out, i, signal):
    # Entry i of one space's output, if that space was asked for.
    if not is_null(out):
        physical = find_page(page, v2p, table_rows)
        count_missing(physical, 1, signal)
        out[i] = location_in(physical, page_size, offset)


@kernel(
    rows="id*", num_rows="int64", row_stride="int64", column_stride="int64", row_width="int64",
    starts32="int32*", starts64="int64*", lanes="int64", width="int64", widths32="int32*", widths64="int64*",
    requests32="int32*", requests64="int64*", page_size="int64", shift="int64",
    v2p_0="int64*", rows_0="int64", out_0="int64*", v2p_1="int64*", rows_1="int64", out_1="int64*",
    v2p_2="int64*", rows_2="int64", out_2="int64*", v2p_3="int64*", rows_3="int64", out_3="int64*",
    virtual_out="int64*", room="int64", signal="int64*",
)  # fmt: skip
def gather_translate_window(
    rows, num_rows, row_stride, column_stride, row_width, starts32, starts64, lanes, width, widths32, widths64,
    requests32, requests64, page_size, shift, v2p_0, rows_0, out_0, v2p_1, rows_1, out_1, v2p_2, rows_2, out_2, v2p_3, rows_3, out_3,
    virtual_out, room, signal,
):  # fmt: skip
    scratch = cuda.shared.array(BLOCK, int64)
    begins = cuda.shared.array(BLOCK, int64)
    i = int64(cuda.grid(1))
    threads = int64(cuda.gridDim.x) * BLOCK
    uniform = width >= 0
    run = (lanes + BLOCK - 1) // BLOCK
    total = room
    if not uniform:
        # Every block sums the widths for itself: cheaper than a second launch, and nothing to wait for.
        total = run_sums(lanes, run, widths32, widths64, room, begins, scratch)
        if i == 0 and total > room:
            count(signal, MISMATCH, 1)
    if not is_null(signal):
        lane = i
        while lane < lanes:
            if row_of(lane, requests32, requests64, num_rows) < 0:
                count(signal, OUT_OF_RANGE, 1)
            lane += threads
    while i < room:
        token = int64(-1)
        if i < total:
            if uniform:
                lane = divide(i, width, -1)
                step = i - lane * width
            else:
                lane, step = locate(i, run, widths32, widths64, begins)
            row = row_of(lane, requests32, requests64, num_rows)
            # What begins past the row is past it.
            position = min(element(starts32, starts64, lane), row_width) + step
            if row >= 0:
                if position < 0 or position >= row_width:
                    count(signal, OUT_OF_RANGE, 1)
                else:
                    token = int64(rows[row * row_stride + position * column_stride])
        page = page_of(token, page_size, shift)
        offset = token - page * page_size
        place(page, offset, page_size, v2p_0, rows_0, out_0, i, signal)
        place(page, offset, page_size, v2p_1, rows_1, out_1, i, signal)
        place(page, offset, page_size, v2p_2, rows_2, out_2, i, signal)
        place(page, offset, page_size, v2p_3, rows_3, out_3, i, signal)
        if not is_null(virtual_out):
            virtual_out[i] = max(token, int64(0))
        i += threads


@kernel(
    requests32="int32*", requests64="int64*", lanes="int64", mapping="id*", mapping_length="int64", v2p="int64*", table_rows="int64",
    valid="int64", valid32="int32*", valid64="int64*", total="int64", total32="int32*", total64="int64*",
    out="int32*", track_in32="int32*", track_in64="int64*", track_out="int32*", signal="int64*",
)  # fmt: skip
def replay_state_indices(
    requests32, requests64, lanes, mapping, mapping_length, v2p, table_rows, valid, valid32, valid64, total, total32, total64,
    out, track_in32, track_in64, track_out, signal,
):  # fmt: skip
    lane = int64(cuda.grid(1))
    if lane >= min(element_or(total32, total64, 0, total), lanes):
        return
    slot, track_slot = int64(-1), int64(-1)
    if lane >= element_or(valid32, valid64, 0, valid):
        put(requests32, requests64, lane, 0)
    else:
        request = element(requests32, requests64, lane)
        virtual_slot = int64(0)
        if request < 0 or request >= mapping_length:
            count(signal, OUT_OF_RANGE, 1)
        else:
            virtual_slot = int64(mapping[request])
        slot = translate_page(virtual_slot, v2p, table_rows, signal)
        if not is_null(track_out):
            track_slot = translate_page(element(track_in32, track_in64, lane), v2p, table_rows, signal)
    out[lane] = slot
    if not is_null(track_out):
        track_out[lane] = track_slot
