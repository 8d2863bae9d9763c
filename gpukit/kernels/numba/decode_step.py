"""Device code of the decode step. What it promises stands in `kernels/decode_step.py`.

A thread serves a lane, a block a tile of them. With several blocks each counts the whole batch, so that all decide alike whether it can be served;
tiles are taken by ticket and pushes put in order as in `_append`, and what the others count from is changed by the last block to finish.
"""

from __future__ import annotations

from gpukit.compile.device import (
    BLOCK,
    EXHAUSTED,
    MISMATCH,
    OUT_OF_RANGE,
    UNBOUND,
    count,
    cuda,
    device_function,
    exclusive_scan,
    int64,
    is_null,
    kernel,
    uint32,
)
from gpukit.kernels.numba._append import move_tail, next_tile, push, sum_tiles, take_if_live, tile_base
from gpukit.kernels.numba._translate import find_page, location_in

# Pages that a request retires in one round at most, as in the reference; what a thread keeps until it knows where to push them.
MOST_RETIRED = 16
TAKEN = MOST_RETIRED * BLOCK

# Tokens of a request at most, those of the coming round among them: kv_lengths holds int32.
MOST_TOKENS = 2147483647

# What `row_of` says where a lane is not live.
PADDING, NO_ROW, BROKEN = -1, -2, -3

# A sum of pages leaves its upper bits to the number of rows that are full.
FULL_ROW = 1 << 40


@device_function
def whole_pages(tokens, page_size, shift):
    # Lengths fit into 31 bits here, and 32-bit division is several times cheaper.
    if shift >= 0:
        return tokens >> shift
    return int64(uint32(tokens) // uint32(page_size))


@device_function
def makes_sense(before, step, held, gone, page_size, most_tokens):
    # Compared before anything is added: the compiler assumes that no int64 sum goes round, and drops a comparison that would find out.
    # Both factors fit into 31 bits, where a product is several times cheaper.
    return (
        (before | step | gone) >= 0
        and gone <= held
        and step <= min(int64(uint32(min(held, int64(MOST_TOKENS)))) * int64(uint32(page_size)), most_tokens) - before
    )


@device_function
def row_of(lane, requests, num_rows, advance, lengths, pages, retired, page_size, most_tokens):
    # Row of a lane that makes sense, and its length after the advance.
    row = int64(requests[lane])
    if row < 0:
        return int64(PADDING), int64(0)
    if row >= num_rows:
        return int64(NO_ROW), int64(0)
    step = int64(advance[lane])
    before = lengths[row]
    held = pages[row]
    gone = retired[row]
    if not makes_sense(before, step, held, gone, page_size, most_tokens):
        return int64(BROKEN), int64(0)
    return row, before + step


@device_function
def request_of(lane, requests, advance, lanes):
    # Row and advance of a lane; padding past the end. What is loaded for nothing is in range.
    at = min(lane, lanes - 1)
    row = int64(requests[at])
    step = int64(advance[at])
    if lane >= lanes:
        row = int64(PADDING)
    return row, step


@device_function
def pages_to_take(held, length, lookahead, columns, page_size, shift):
    # How many pages a lane lacks; FULL_ROW where its row has no room for them.
    needed = whole_pages(length + lookahead - 1, page_size, shift) + 1
    if needed > columns:
        return int64(FULL_ROW)
    return max(needed - held, int64(0))


@device_function
def asks(row, step, num_rows, lengths, pages, retired, page_size, shift, most_tokens, lookahead, columns):
    # Pages and tokens that a lane asks for, nothing where it is not live; loads first, decisions after.
    at = row if row >= 0 and row < num_rows else int64(0)
    before = lengths[at]
    held = pages[at]
    gone = retired[at]
    if row < 0 or row >= num_rows or not makes_sense(before, step, held, gone, page_size, most_tokens):
        return int64(0), int64(0)
    length = before + step
    return pages_to_take(held, length, lookahead, columns, page_size, shift), length + lookahead


@device_function
def pages_to_retire(gone, length, window, page_size, shift):
    # How many pages of a lane are behind the window now, as far as one round goes.
    if window < 0:
        return int64(0)
    edge = whole_pages(length, page_size, shift) * page_size - window
    if edge < 0:
        return int64(0)
    return min(max(whole_pages(edge, page_size, shift) - gone, int64(0)), int64(MOST_RETIRED))


@device_function
def after(row, step, num_rows, lengths, pages, retired, page_size, shift, most_tokens, lookahead, window):
    # A lane's row, and what it holds after a round that was served; row -1 where it is not live.
    at = row if row >= 0 and row < num_rows else int64(0)
    before = lengths[at]
    held = pages[at]
    gone = retired[at]
    if row < 0 or row >= num_rows or not makes_sense(before, step, held, gone, page_size, most_tokens):
        return int64(-1), before, held, gone
    length = before + step
    needed = whole_pages(length + lookahead - 1, page_size, shift) + 1
    return row, length, max(held, needed), gone + pages_to_retire(gone, length, window, page_size, shift)


@device_function
def keep(row, length, held, gone, lengths, pages, retired):
    if row >= 0:
        lengths[row] = length
        pages[row] = held
        retired[row] = gone


@device_function
def ring_page(number, ring, capacity, counters):
    # The page that so many pops after the first of this round get. A count below 2**31 is divided in 32 bits.
    position = counters[0] + number
    if position < 2147483648:
        return ring[int64(uint32(position) % uint32(capacity))]
    return ring[position % capacity]


@device_function
def bind_page(v, virtual_rows, p, v2p, p2v, physical_rows, signal):
    # Bind two free pages; the sink where one is none.
    if v < 1 or v > virtual_rows - 2 or p < 1 or p > physical_rows - 2:
        count(signal, OUT_OF_RANGE, 1)
        return int64(0)
    v2p[v] = p
    p2v[p] = v
    return p


@kernel(
    rows="id*", num_rows="int64", columns="int64", lengths="int64*", pages="int64*", retired="int64*",
    requests="length*", advance="length*", lanes="int64", lookahead="int64", page_size="int64", shift="int64", window="int64",
    virtual_rows="int64", full_v2p="int64*", full_p2v="int64*", full_rows="int64", swa_v2p="int64*", swa_p2v="int64*", swa_rows="int64",
    virtual_ring="int64*", virtual_capacity="int64", virtual_counters="int64*",
    full_ring="int64*", full_capacity="int64", full_counters="int64*",
    swa_ring="int64*", swa_capacity="int64", swa_counters="int64*", workspace="int64*",
    locations="int64*", kv_lengths="int32*", cu_lengths="int32*", full_table="int32*", swa_table="int32*", width="int64",
    status="int64*", signal="int64*",
)  # fmt: skip
def decode_step(
    rows, num_rows, columns, lengths, pages, retired, requests, advance, lanes, lookahead, page_size, shift, window,
    virtual_rows, full_v2p, full_p2v, full_rows, swa_v2p, swa_p2v, swa_rows,
    virtual_ring, virtual_capacity, virtual_counters, full_ring, full_capacity, full_counters,
    swa_ring, swa_capacity, swa_counters, workspace,
    locations, kv_lengths, cu_lengths, full_table, swa_table, width, status, signal,
):  # fmt: skip
    scratch = cuda.shared.array(BLOCK, int64)
    taken = cuda.shared.array(TAKEN, int64)
    thread = int64(cuda.threadIdx.x)
    # Not below -1, so that a length can be taken from it.
    most_tokens = max(int64(MOST_TOKENS) - lookahead, int64(-1))
    has_swa = not is_null(swa_v2p)
    if not has_swa:
        window = int64(-1)
    alone = cuda.gridDim.x == 1
    tiles = int64(cuda.gridDim.x)
    tile = next_tile(int64(-1), alone, workspace, scratch)
    lane = tile * BLOCK + thread

    # Loaded here, to arrive while the block counts.
    there = min(virtual_counters[1] - virtual_counters[0], full_counters[1] - full_counters[0])
    if has_swa:
        there = min(there, swa_counters[1] - swa_counters[0])

    # What this lane asks for.
    row, length, new = int64(PADDING), int64(0), int64(0)
    if lane < lanes:
        row, length = row_of(lane, requests, num_rows, advance, lengths, pages, retired, page_size, most_tokens)
        if row == NO_ROW:
            count(signal, OUT_OF_RANGE, 1)
        elif row == BROKEN:
            count(signal, MISMATCH, 1)
    live = row >= 0
    held = int64(0)
    at, p, q = int64(-1), int64(0), int64(0)
    if live:
        held = pages[row]
        new = pages_to_take(held, length, lookahead, columns, page_size, shift)
        column = whole_pages(length, page_size, shift)
        if column < min(held, columns):
            # The page of the first token, unless it is a new one; no page that is retired now is that far behind.
            at = column
            v = int64(rows[row * columns + column])
            p = max(find_page(v, full_v2p, virtual_rows), int64(0))
            if has_swa:
                q = max(find_page(v, swa_v2p, virtual_rows), int64(0))
    tokens = length + lookahead if live else int64(0)

    # What the lanes before this tile and all of them ask for.
    first_new, all_new = exclusive_scan(scratch, new)
    first_token = exclusive_scan(scratch, tokens)[0]
    if not alone:
        new_before, tokens_before, summed = int64(0), int64(0), int64(0)
        other = thread
        while other < lanes:
            # Four lanes at a time, so that their loads wait together.
            row0, step0 = request_of(other, requests, advance, lanes)
            row1, step1 = request_of(other + BLOCK, requests, advance, lanes)
            row2, step2 = request_of(other + 2 * BLOCK, requests, advance, lanes)
            row3, step3 = request_of(other + 3 * BLOCK, requests, advance, lanes)
            new0, tokens0 = asks(row0, step0, num_rows, lengths, pages, retired, page_size, shift, most_tokens, lookahead, columns)
            new1, tokens1 = asks(row1, step1, num_rows, lengths, pages, retired, page_size, shift, most_tokens, lookahead, columns)
            new2, tokens2 = asks(row2, step2, num_rows, lengths, pages, retired, page_size, shift, most_tokens, lookahead, columns)
            new3, tokens3 = asks(row3, step3, num_rows, lengths, pages, retired, page_size, shift, most_tokens, lookahead, columns)
            summed += new0 + new1 + new2 + new3
            # A tile is a block wide: those before this one are lanes of whole strides.
            first_lane = tile * BLOCK
            if other < first_lane:
                new_before += new0
                tokens_before += tokens0
            if other + BLOCK < first_lane:
                new_before += new1
                tokens_before += tokens1
            if other + 2 * BLOCK < first_lane:
                new_before += new2
                tokens_before += tokens2
            if other + 3 * BLOCK < first_lane:
                new_before += new3
                tokens_before += tokens3
            other += 4 * BLOCK
        all_new = exclusive_scan(scratch, summed)[1]
        first_new += exclusive_scan(scratch, new_before)[1]
        first_token += exclusive_scan(scratch, tokens_before)[1]

    # All or nothing; every block decides the same.
    rows_full = all_new // FULL_ROW
    all_new -= rows_full * FULL_ROW
    missing = max(all_new - there, int64(0))
    if missing > 0 or rows_full > 0:
        if tile == 0 and thread == 0:
            status[1] += 1
            status[2] = missing
            count(signal, EXHAUSTED, missing + rows_full)
        sum_tiles(int64(0), tiles, alone, workspace, scratch)
        return

    # Tombstones. Taking a page says whether it was live, and only then is known where it is pushed.
    gone, found = int64(0), int64(0)
    if live and window >= 0:
        gone = pages_to_retire(retired[row], length, window, page_size, shift)
        column = retired[row]
        stop = column + gone
        while column < stop:
            page = take_if_live(int64(rows[row * columns + column]), swa_v2p, virtual_rows, swa_p2v, swa_rows)
            if page > 0:
                taken[found * BLOCK + thread] = page
                found += 1
            else:
                v = int64(rows[row * columns + column])
                count(signal, UNBOUND if v >= 1 and v <= virtual_rows - 2 else OUT_OF_RANGE, 1)
            if column < width:
                swa_table[lane * width + column] = 0
            column += 1
    base = int64(0)
    if window >= 0:
        before, total = exclusive_scan(scratch, found)
        base = tile_base(base, tile, total, alone, workspace, scratch)
        i = int64(0)
        while i < found:
            push(base + before + i, taken[i * BLOCK + thread], swa_ring, swa_capacity, swa_counters, signal)
            i += 1
        base += total
    elif not alone:
        base = tile_base(base, tile, int64(0), alone, workspace, scratch)

    # New pages.
    i = int64(0)
    while i < new:
        v = ring_page(first_new + i, virtual_ring, virtual_capacity, virtual_counters)
        column = held + i
        rows[row * columns + column] = v
        page = ring_page(first_new + i, full_ring, full_capacity, full_counters)
        page = bind_page(v, virtual_rows, page, full_v2p, full_p2v, full_rows, signal)
        if column < width:
            full_table[lane * width + column] = page
        if has_swa:
            page = ring_page(first_new + i, swa_ring, swa_capacity, swa_counters)
            page = bind_page(v, virtual_rows, page, swa_v2p, swa_p2v, swa_rows, signal)
            if column < width:
                swa_table[lane * width + column] = page
        i += 1

    # Where the coming tokens go.
    if lane == 0:
        cu_lengths[0] = 0
    if lane < lanes:
        kv_lengths[lane] = tokens
        cu_lengths[lane + 1] = first_token + tokens
        i = int64(0)
        while i < lookahead:
            offset = int64(0)
            if live:
                column = whole_pages(length + i, page_size, shift)
                offset = length + i - column * page_size
                if column != at:
                    # Tokens of one page are looked up once.
                    at = column
                    v = int64(rows[row * columns + column])
                    p = max(find_page(v, full_v2p, virtual_rows), int64(0))
                    if has_swa:
                        q = max(find_page(v, swa_v2p, virtual_rows), int64(0))
            locations[lane * lookahead + i] = location_in(p, page_size, offset) if p > 0 else int64(0)
            locations[(lanes + lane) * lookahead + i] = location_in(q, page_size, offset) if q > 0 else int64(0)
            i += 1

    # Nobody counts any more when the last block gets here.
    pushed = sum_tiles(base, tiles, alone, workspace, scratch)
    if pushed < 0:
        return
    other = thread
    while other < lanes:
        # All loads of four lanes before their stores.
        row0, step0 = request_of(other, requests, advance, lanes)
        row1, step1 = request_of(other + BLOCK, requests, advance, lanes)
        row2, step2 = request_of(other + 2 * BLOCK, requests, advance, lanes)
        row3, step3 = request_of(other + 3 * BLOCK, requests, advance, lanes)
        row0, length0, held0, gone0 = after(row0, step0, num_rows, lengths, pages, retired, page_size, shift, most_tokens, lookahead, window)
        row1, length1, held1, gone1 = after(row1, step1, num_rows, lengths, pages, retired, page_size, shift, most_tokens, lookahead, window)
        row2, length2, held2, gone2 = after(row2, step2, num_rows, lengths, pages, retired, page_size, shift, most_tokens, lookahead, window)
        row3, length3, held3, gone3 = after(row3, step3, num_rows, lengths, pages, retired, page_size, shift, most_tokens, lookahead, window)
        keep(row0, length0, held0, gone0, lengths, pages, retired)
        keep(row1, length1, held1, gone1, lengths, pages, retired)
        keep(row2, length2, held2, gone2, lengths, pages, retired)
        keep(row3, length3, held3, gone3, lengths, pages, retired)
        other += 4 * BLOCK
    if thread == 0:
        status[0] += 1
        virtual_counters[0] += all_new
        full_counters[0] += all_new
        if has_swa:
            swa_counters[0] += all_new
            move_tail(pushed, swa_capacity, swa_counters)
