"""Device code of the decode step. What it promises stands in `kernels/decode_step.py`.

A thread serves a lane, a block a tile of them. With several blocks each counts the whole batch, so that all decide alike whether it can be served;
tiles are taken by ticket and pushes put in order as in `_append`. What the others count from is changed by the block of the last tile, when all have
published what they push.

A block is one chain of loads that wait for each other, so whatever can be loaded is loaded before it is known to be needed, and sums go behind as few
barriers as possible.
"""

from __future__ import annotations

from gpukit.compile.device import (
    BLOCK,
    EXHAUSTED,
    MISMATCH,
    OUT_OF_RANGE,
    UNBOUND,
    atomic_add,
    atomic_exchange,
    count,
    cuda,
    device_function,
    fresh_scan,
    fresh_scan_and_sums,
    int64,
    is_null,
    kernel,
    uint32,
)
from gpukit.kernels.numba._append import FINISHED, PUBLISHED, TICKET, place_in_ring, tile_base, unbind_physical, unbind_virtual
from gpukit.kernels.numba._translate import find_page

# Pages that a request retires in one round at most, as in the reference; what a thread keeps until it knows where to push them.
MOST_RETIRED = 16
TAKEN = MOST_RETIRED * BLOCK

# What the sums of a block go through.
SUMS = 4 * BLOCK

# Tokens of a request at most, those of the coming round among them: kv_lengths holds int32.
MOST_TOKENS = 2147483647

# What `state_of` says where a lane is not live.
PADDING, NO_ROW, BROKEN = -1, -2, -3

# What a lane asks for, in one word that adds up over a block: pages (at most 16, because the lookahead is no longer), full rows, tokens.
ROW_BITS, TOKEN_BITS = 13, 22
FULL_ROW = 1 << ROW_BITS
MOST_ROWS = (1 << (TOKEN_BITS - ROW_BITS)) - 1

# The sum over a batch leaves its upper bits to the number of rows that are full.
FULL_ROW_OF_MANY = 1 << 40


@device_function
def whole_pages(tokens, page_size, shift):
    # Lengths fit into 31 bits here, and 32-bit division is several times cheaper.
    if shift >= 0:
        return (tokens & MOST_TOKENS) >> (shift & 31)
    return int64(uint32(tokens) // uint32(page_size))


@device_function
def state_of(row, step, num_rows, lengths, pages, retired, page_size, most_tokens):
    # Row of a lane that makes sense, its length after the advance, what it holds and what it retired. Without branches, so that the loads overlap.
    at = row if (row >= 0) & (row < num_rows) else int64(0)
    before = lengths[at]
    held = pages[at]
    gone = retired[at]
    # Cut to 31 bits before anything is added: the compiler assumes that no int64 sum goes round, and drops a comparison that would find out.
    length = (before & MOST_TOKENS) + (step & MOST_TOKENS)
    # Both factors fit into 31 bits, where a product is several times cheaper.
    most = min((min(held, int64(MOST_TOKENS)) & MOST_TOKENS) * page_size, most_tokens)
    makes_sense = (((before | step) & ~MOST_TOKENS) == 0) & (gone >= 0) & (gone <= held) & (length <= most)
    found = row if makes_sense else int64(BROKEN)
    found = found if row < num_rows else int64(NO_ROW)
    found = found if row >= 0 else int64(PADDING)
    return found, length & MOST_TOKENS, held, gone


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
def pages_for(length, lookahead, page_size, shift):
    # Pages that a request has to hold in this round.
    return whole_pages(length + lookahead - 1, page_size, shift) + 1


@device_function
def asks(row, length, held, lookahead, columns, page_size, shift):
    # Pages that a lane asks for, `FULL_ROW_OF_MANY` where its row has no room for them, and tokens; nothing where it is not live.
    needed = pages_for(length, lookahead, page_size, shift)
    new = max(needed - max(held, int64(0)), int64(0)) if needed <= columns else int64(FULL_ROW_OF_MANY)
    return new if row >= 0 else int64(0), length + lookahead if row >= 0 else int64(0)


@device_function
def pages_to_retire(gone, length, window, page_size, shift):
    # How many pages of a lane are behind the window now, as far as one round goes.
    if window < 0:
        return int64(0)
    edge = max(whole_pages(length, page_size, shift) * page_size - window, int64(0))
    return min(max(whole_pages(edge, page_size, shift) - gone, int64(0)), int64(MOST_RETIRED))


@device_function
def keep(row, length, held, gone, lookahead, window, page_size, shift, lengths, pages, retired):
    # What a lane holds after a round that was served.
    if row >= 0:
        lengths[row] = length
        pages[row] = max(held, pages_for(length, lookahead, page_size, shift))
        retired[row] = gone + pages_to_retire(gone, length, window, page_size, shift)


@device_function
def behind(place, steps, capacity):
    # The place so many steps behind a place, at most a ring behind; in range whatever the counters hold.
    place += steps
    if place >= capacity:
        place -= capacity
    return max(min(place, capacity - 1), int64(0))


@device_function
def draw_tile(workspace, scratch, drawn):
    # The block's tile, the same for all its threads.
    if cuda.threadIdx.x == 0:
        scratch[0] = drawn
    cuda.syncthreads()
    return scratch[0]


@device_function
def wait_for_others(tiles, workspace):
    # By the block of the last tile, after whose ticket none is drawn: until no other looks at the workspace any more.
    if cuda.threadIdx.x == 0:
        while atomic_add(workspace, FINISHED, 0) < tiles - 1:
            pass
        workspace[TICKET] = 0
        workspace[FINISHED] = 0


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
    sums = cuda.shared.array(SUMS, int64)
    scratch = cuda.shared.array(BLOCK, int64)
    taken = cuda.shared.array(TAKEN, int64)
    places = cuda.shared.array(3, int64)
    stocks = cuda.shared.array(3, int64)
    thread = int64(cuda.threadIdx.x)
    # Both fit into 31 bits, where products are cheaper.
    page_size &= MOST_TOKENS
    lookahead &= MOST_TOKENS
    most_tokens = int64(MOST_TOKENS) - lookahead
    has_swa = not is_null(swa_v2p)
    if not has_swa:
        window = int64(-1)
    alone = cuda.gridDim.x == 1
    tiles = int64(cuda.gridDim.x)
    drawn = int64(0)
    if not alone and thread == 0:
        drawn = atomic_add(workspace, TICKET, 1)

    # The last threads of a block look after a magazine each: virtual, full, swa. Loaded here, to arrive while the block counts.
    keeper = BLOCK - 1 - thread
    counters, capacity = virtual_counters, virtual_capacity
    if keeper == 1:
        counters, capacity = full_counters, full_capacity
    if keeper == 2 and has_swa:
        counters, capacity = swa_counters, swa_capacity
    head, tail = int64(0), int64(0)
    if keeper < 3:
        head = counters[0]
        tail = counters[1]

    # What the lanes before this tile and all of them ask for.
    tile = int64(0)
    new_before, tokens_before, all_new = int64(0), int64(0), int64(0)
    if not alone:
        # Four lanes at a time, so that their loads wait together, and the next ones' rows with them.
        row0, step0 = request_of(thread, requests, advance, lanes)
        row1, step1 = request_of(thread + BLOCK, requests, advance, lanes)
        row2, step2 = request_of(thread + 2 * BLOCK, requests, advance, lanes)
        row3, step3 = request_of(thread + 3 * BLOCK, requests, advance, lanes)
        tile = draw_tile(workspace, scratch, drawn)
        first_lane = tile * BLOCK
        other = thread
        while other < lanes:
            row0, length0, held0, _ = state_of(row0, step0, num_rows, lengths, pages, retired, page_size, most_tokens)
            row1, length1, held1, _ = state_of(row1, step1, num_rows, lengths, pages, retired, page_size, most_tokens)
            row2, length2, held2, _ = state_of(row2, step2, num_rows, lengths, pages, retired, page_size, most_tokens)
            row3, length3, held3, _ = state_of(row3, step3, num_rows, lengths, pages, retired, page_size, most_tokens)
            new0, tokens0 = asks(row0, length0, held0, lookahead, columns, page_size, shift)
            new1, tokens1 = asks(row1, length1, held1, lookahead, columns, page_size, shift)
            new2, tokens2 = asks(row2, length2, held2, lookahead, columns, page_size, shift)
            new3, tokens3 = asks(row3, length3, held3, lookahead, columns, page_size, shift)
            all_new += new0 + new1 + new2 + new3
            # A tile is a block wide: those before this one are lanes of whole strides.
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
            row0, step0 = request_of(other, requests, advance, lanes)
            row1, step1 = request_of(other + BLOCK, requests, advance, lanes)
            row2, step2 = request_of(other + 2 * BLOCK, requests, advance, lanes)
            row3, step3 = request_of(other + 3 * BLOCK, requests, advance, lanes)

    # What this lane asks for.
    lane = (tile * BLOCK + thread) & MOST_TOKENS
    row, length, held, gone = int64(PADDING), int64(0), int64(0), int64(0)
    if lane < lanes:
        row, length, held, gone = state_of(int64(requests[lane]), int64(advance[lane]), num_rows, lengths, pages, retired, page_size, most_tokens)
    live = row >= 0
    new, leaves, column, word, tokens = int64(0), int64(0), int64(0), int64(0), int64(0)
    v_kept, v_left = int64(0), int64(0)
    if live:
        tokens = length + lookahead
        needed = pages_for(length, lookahead, page_size, shift)
        column = whole_pages(length, page_size, shift)
        leaves = pages_to_retire(gone, length, window, page_size, shift)
        word = tokens << TOKEN_BITS
        if needed > columns:
            word += FULL_ROW
        else:
            # The page of the first token, unless it is a new one, and the first one that leaves; to arrive while the block sums up.
            v_kept = int64(rows[row * columns + column])
            if leaves > 0:
                v_left = int64(rows[row * columns + gone])
            new = max(needed - held, int64(0))
            word += new
    elif row == NO_ROW:
        count(signal, OUT_OF_RANGE, 1)
    elif row == BROKEN:
        count(signal, MISMATCH, 1)
    if keeper < 3:
        places[keeper] = place_in_ring(head, capacity)
        stocks[keeper] = tail - head
    if alone:
        word, all_new = fresh_scan(sums, word)
        rows_full = (all_new >> ROW_BITS) & MOST_ROWS
        all_new &= FULL_ROW - 1
    else:
        word, _, all_new, new_before, tokens_before = fresh_scan_and_sums(sums, word, all_new, new_before, tokens_before)
        rows_full = all_new // FULL_ROW_OF_MANY
        all_new -= rows_full * FULL_ROW_OF_MANY
    first_new = new_before + (word & (FULL_ROW - 1))
    first_token = tokens_before + (word >> TOKEN_BITS)

    # All or nothing; every block decides the same.
    missing = max(all_new - min(stocks[0], stocks[1], stocks[2]), int64(0))
    if missing > 0 or rows_full > 0:
        if tile == 0 and thread == 0:
            status[1] += 1
            status[2] = missing
            count(signal, EXHAUSTED, missing + rows_full)
        if tile < tiles - 1:
            if thread == 0:
                atomic_add(workspace, FINISHED, 1)
        elif not alone:
            wait_for_others(tiles, workspace)
        return

    # Everything that can be loaded now. Without a window pool the other one is looked at twice.
    other_ring, other_capacity, other_place, other_v2p = full_ring, full_capacity, places[1], full_v2p
    if has_swa:
        other_ring, other_capacity, other_place, other_v2p = swa_ring, swa_capacity, places[2], swa_v2p
    v, p, q = int64(0), int64(0), int64(0)
    if new > 0:
        v = virtual_ring[behind(places[0], first_new, virtual_capacity)]
        p = full_ring[behind(places[1], first_new, full_capacity)]
        q = other_ring[behind(other_place, first_new, other_capacity)]
    found = v_kept >= 0 and v_kept <= virtual_rows - 2 and column < held
    at = v_kept if found else int64(0)
    p_kept = full_v2p[at]
    q_kept = other_v2p[at]
    p_left = int64(-1)
    if leaves > 0:
        p_left = unbind_virtual(v_left, swa_v2p, virtual_rows)

    # New pages. The first one is remembered: tokens of this round go there.
    p_new, q_new, fresh = int64(0), int64(0), int64(-1)
    i = int64(0)
    while i < new:
        if i > 0:
            v = virtual_ring[behind(places[0], first_new + i, virtual_capacity)]
            p = full_ring[behind(places[1], first_new + i, full_capacity)]
            q = other_ring[behind(other_place, first_new + i, other_capacity)]
        to = held + i
        rows[row * columns + to] = v
        p = bind_page(v, virtual_rows, p, full_v2p, full_p2v, full_rows, signal)
        if to < width:
            full_table[lane * width + to] = p
        if has_swa:
            q = bind_page(v, virtual_rows, q, swa_v2p, swa_p2v, swa_rows, signal)
            if to < width:
                swa_table[lane * width + to] = q
        if i == 0 and p > 0 and q > 0:
            p_new, q_new, fresh = p, q, to
        i += 1

    # Where the coming tokens go.
    if lane == 0:
        cu_lengths[0] = 0
    if lane < lanes:
        kv_lengths[lane] = tokens
        cu_lengths[lane + 1] = first_token + tokens
        at = column if column < held else int64(-1)
        p = max(p_kept, int64(0)) if found else int64(0)
        q = max(q_kept, int64(0)) if found else int64(0)
        i = int64(0)
        while i < lookahead:
            offset = int64(0)
            if live:
                column = whole_pages(length + i, page_size, shift)
                offset = length + i - column * page_size
                if column != at:
                    # Tokens of one page are looked up once.
                    at = column
                    if at == fresh:
                        p, q = p_new, q_new
                    else:
                        v = int64(rows[row * columns + column])
                        p = max(find_page(v, full_v2p, virtual_rows), int64(0))
                        q = max(find_page(v, other_v2p, virtual_rows), int64(0))
            locations[lane * lookahead + i] = p * page_size + offset if p > 0 else int64(0)
            locations[(lanes + lane) * lookahead + i] = q * page_size + offset if q > 0 and has_swa else int64(0)
            i += 1

    # Tombstones. Taking a page says whether it was live, and only then is known where it is pushed.
    pushes = int64(0)
    i = int64(0)
    while i < leaves:
        page = unbind_physical(v_left, p_left, swa_p2v, swa_rows)
        if page > 0:
            taken[pushes * BLOCK + thread] = page
            pushes += 1
        else:
            count(signal, UNBOUND if v_left >= 1 and v_left <= virtual_rows - 2 else OUT_OF_RANGE, 1)
        if gone + i < width:
            swa_table[lane * width + gone + i] = 0
        i += 1
        if i < leaves:
            v_left = int64(rows[row * columns + gone + i])
            p_left = unbind_virtual(v_left, swa_v2p, virtual_rows)
    before, total = int64(0), int64(0)
    if window >= 0:
        before, total = fresh_scan(scratch, pushes)
    base = tile_base(int64(0), tile, total, alone, workspace, scratch)
    i = int64(0)
    while i < pushes:
        # What does not fit is dropped and counted, as in `push`.
        position = base + before + i
        if position < swa_capacity - stocks[2]:
            swa_ring[behind(places[2], stocks[2] + position, swa_capacity)] = taken[i * BLOCK + thread]
        else:
            count(signal, EXHAUSTED, 1)
        i += 1

    # The last tile has heard of all others, so nobody counts any more.
    if tile < tiles - 1:
        if thread == 0:
            atomic_add(workspace, FINISHED, 1)
        return
    if live and alone:
        lengths[row] = length
        pages[row] = held + new
        retired[row] = gone + leaves
    if not alone:
        other = thread
        while other < lanes:
            # All loads of four lanes before their stores.
            row0, step0 = request_of(other, requests, advance, lanes)
            row1, step1 = request_of(other + BLOCK, requests, advance, lanes)
            row2, step2 = request_of(other + 2 * BLOCK, requests, advance, lanes)
            row3, step3 = request_of(other + 3 * BLOCK, requests, advance, lanes)
            row0, length0, held0, gone0 = state_of(row0, step0, num_rows, lengths, pages, retired, page_size, most_tokens)
            row1, length1, held1, gone1 = state_of(row1, step1, num_rows, lengths, pages, retired, page_size, most_tokens)
            row2, length2, held2, gone2 = state_of(row2, step2, num_rows, lengths, pages, retired, page_size, most_tokens)
            row3, length3, held3, gone3 = state_of(row3, step3, num_rows, lengths, pages, retired, page_size, most_tokens)
            keep(row0, length0, held0, gone0, lookahead, window, page_size, shift, lengths, pages, retired)
            keep(row1, length1, held1, gone1, lookahead, window, page_size, shift, lengths, pages, retired)
            keep(row2, length2, held2, gone2, lookahead, window, page_size, shift, lengths, pages, retired)
            keep(row3, length3, held3, gone3, lookahead, window, page_size, shift, lengths, pages, retired)
            other += 4 * BLOCK
    if thread == 0:
        atomic_add(status, 0, 1)
    if keeper < 2 or (keeper == 2 and has_swa):
        counters[0] = head + all_new
    if keeper == 2 and has_swa:
        counters[1] = tail + min(base + total, capacity - (tail - head))
    if not alone:
        wait_for_others(tiles, workspace)
        cuda.syncthreads()
        other = thread
        while other < tiles:
            atomic_exchange(workspace, PUBLISHED + other, 0)
            other += BLOCK
