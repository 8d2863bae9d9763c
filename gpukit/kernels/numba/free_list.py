"""Device code of the free lists and of token placement. What it promises stands in `kernels/free_list.py`."""

from __future__ import annotations

from gpukit.compile.device import (
    BLOCK,
    EXHAUSTED,
    MISMATCH,
    atomic_add,
    count,
    cuda,
    device_function,
    exclusive_scan,
    inclusive_max,
    int64,
    is_null,
    kernel,
    load_word,
    misaligned_by,
)
from gpukit.kernels.numba._append import FINISHED, push
from gpukit.kernels.numba._translate import divide

# Tokens per block of gather_extend: each block walks the requests again, so it should have some work of its own.
TILE = 4 * BLOCK
TILE_SLOTS = TILE + 1

# What a slot of gather_extend says where it has no number of a free page.
NO_REQUEST = -2
BROKEN = -1

# Nothing lies behind it.
MOST = 2**63 - 1

# Loads that a thread of the counting loops has in flight.
UNROLL = 16


@device_function
def is_last_block(workspace, shared):
    # True in every thread of the block that is the last to get here: all others have read what it is about to change.
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        shared[0] = atomic_add(workspace, FINISHED, 1)
    cuda.syncthreads()
    last = shared[0] == cuda.gridDim.x - 1
    if last and cuda.threadIdx.x == 0:
        workspace[FINISHED] = 0
    return last


@kernel(values="id*", length="int64", ring="int64*", capacity="int64", counters="int64*", workspace="int64*", signal="int64*")
def append(values, length, ring, capacity, counters, workspace, signal):
    shared = cuda.shared.array(1, int64)
    i = int64(cuda.grid(1))
    if i < length:
        push(i, int64(values[i]), ring, capacity, counters, signal)
    if is_last_block(workspace, shared) and cuda.threadIdx.x == 0:
        counters[1] += min(length, capacity - (counters[1] - counters[0]))


@kernel(out="int64*", n="int64", ring="int64*", capacity="int64", counters="int64*", workspace="int64*")
def take(out, n, ring, capacity, counters, workspace):
    shared = cuda.shared.array(1, int64)
    i = int64(cuda.grid(1))
    head = counters[0]
    held = counters[1] - head
    if i < n:
        # The host takes only what it knows to be there; anything else is the sink.
        page = int64(0)
        if i < held:
            page = ring[(head + i) % capacity]
        out[i] = page
    if is_last_block(workspace, shared) and cuda.threadIdx.x == 0:
        counters[0] = head + min(n, held)


@device_function
def follows(last, offset, page_size, shift):
    # Whether the token after `last` has this offset in its page. A first token need not lie behind anything: -1 is ordinary there.
    # ~last is -(last + 1), whose remainder is as good: only whether it is 0 matters there. Neither can go round, as last + 1 could.
    distance = last if last >= 0 else ~last
    within = distance - divide(distance, page_size, shift) * page_size
    if last < 0:
        return offset == 0 and within == 0
    if offset == 0:
        return within == page_size - 1
    return within == offset - 1 and last < MOST


@kernel(
    prefix_lens="length*", seq_lens="length*", last_loc="id*", requests="int64", free_pages="int64*", num_pages="int64",
    page_size="int64", shift="int64", out="int64*", num_tokens="int64", signal="int64*",
)  # fmt: skip
def gather_extend(prefix_lens, seq_lens, last_loc, requests, free_pages, num_pages, page_size, shift, out, num_tokens, signal):
    # One slot per token of the tile, used where a request begins there; slot 0 is for the request that began before the tile.
    scratch = cuda.shared.array(BLOCK, int64)
    first_free = cuda.shared.array(TILE_SLOTS, int64)
    new_from = cuda.shared.array(TILE_SLOTS, int64)
    old_shift = cuda.shared.array(TILE_SLOTS, int64)
    thread = int64(cuda.threadIdx.x)
    tile = int64(cuda.blockIdx.x) * TILE
    tile_end = min(tile + TILE, num_tokens)
    # The first block sees every request, if anybody wants to know; the others stop where their tile does.
    counts = tile == 0 and not is_null(signal)
    slot = thread
    while slot < TILE_SLOTS:
        first_free[slot] = NO_REQUEST
        slot += BLOCK
    tokens_before, pages_before = int64(0), int64(0)
    first = int64(0)
    while first < requests and (counts or tokens_before < tile_end):
        request = first + thread
        tokens, pages, until_new, next_loc = int64(0), int64(0), int64(0), int64(0)
        broken = False
        if request < requests:
            prefix = int64(prefix_lens[request])
            length = int64(seq_lens[request])
            last = int64(last_loc[request])
            if prefix < 0 or length < prefix:
                broken = True
            else:
                first_page = divide(prefix, page_size, shift)
                offset = prefix - first_page * page_size
                broken = not follows(last, offset, page_size, shift)
                if offset > 0:
                    until_new = page_size - offset
                    first_page += 1
                    if not broken:
                        next_loc = last + 1
                end_page = divide(length, page_size, shift)
                if length > end_page * page_size:
                    end_page += 1
                # One too many says as much as any number, and no sum can overflow.
                tokens = min(length - prefix, num_tokens + 1)
                pages = min(end_page - first_page, num_pages + 1)
            if broken and counts:
                count(signal, MISMATCH, 1)
        before, all_tokens = exclusive_scan(scratch, tokens)
        start = tokens_before + before
        before, all_pages = exclusive_scan(scratch, pages)
        if tokens > 0 and start < tile_end and start + tokens > tile:
            slot = max(start - tile + 1, int64(0))
            first_free[slot] = BROKEN if broken else pages_before + before
            new_from[slot] = start + until_new
            old_shift[slot] = next_loc - start
        tokens_before += all_tokens
        pages_before += all_pages
        first += BLOCK
    if counts and thread == 0 and tokens_before != num_tokens:
        count(signal, MISMATCH, 1)
    cuda.syncthreads()
    latest = int64(0)
    step = int64(0)
    while tile + step < tile_end:
        # The request of a token is the last one that begins at it or before.
        token = tile + step + thread
        slot = step + thread + 1
        if first_free[slot] == NO_REQUEST:
            slot = int64(0)
        slot, highest = inclusive_max(scratch, slot)
        slot = max(slot, latest)
        latest = max(latest, highest)
        if token < tile_end:
            location = int64(0)
            free = first_free[slot]
            if token < tokens_before and free >= 0:
                ahead = token - new_from[slot]
                if ahead < 0:
                    location = token + old_shift[slot]
                else:
                    page = divide(ahead, page_size, shift)
                    granted = int64(0)
                    if free + page < num_pages:
                        granted = free_pages[free + page]
                    if granted > 0:
                        location = granted * page_size + (ahead - page * page_size)
                    else:
                        count(signal, EXHAUSTED, 1)
            out[token] = location
        step += BLOCK


@device_function
def chunk_begin(length, block):
    # First item of a block; blocks share the items in whole tiles, in order, and each counts for itself what lies before its own.
    tiles = (length + BLOCK - 1) // BLOCK
    return min(length, (tiles + cuda.gridDim.x - 1) // cuda.gridDim.x * BLOCK * block)


@device_function
def starts_page(length, page_size, shift):
    # Whether the last of `length` tokens is the first of its page.
    return length > 0 and length - 1 - divide(length - 1, page_size, shift) * page_size == 0


@kernel(
    seq_lens="length*", last_loc="id*", requests="int64", free_pages="int64*", num_pages="int64",
    page_size="int64", shift="int64", out="int64*", signal="int64*",
)  # fmt: skip
def gather_decode(seq_lens, last_loc, requests, free_pages, num_pages, page_size, shift, out, signal):
    scratch = cuda.shared.array(BLOCK, int64)
    first = chunk_begin(requests, int64(cuda.blockIdx.x))
    end = chunk_begin(requests, int64(cuda.blockIdx.x) + 1)
    found = int64(0)
    request = int64(cuda.threadIdx.x)
    in_page = page_size - 1
    while shift >= 0 and request < first:
        # Without branches, so that the loads overlap.
        for ahead in range(UNROLL):
            other = request + ahead * BLOCK
            length = int64(seq_lens[min(other, first - 1)])
            found += int64((other < first) & (length > 0) & ((length ^ 1) & in_page == 0))
        request += UNROLL * BLOCK
    while request < first:
        found += int64(starts_page(int64(seq_lens[request]), page_size, shift))
        request += BLOCK
    taken = exclusive_scan(scratch, found)[1]
    while first < end:
        request = first + cuda.threadIdx.x
        length = int64(0)
        if request < end:
            length = int64(seq_lens[request])
        starts = starts_page(length, page_size, shift)
        before, total = exclusive_scan(scratch, int64(starts))
        location = int64(0)
        if starts:
            page = int64(0)
            if taken + before < num_pages:
                page = free_pages[taken + before]
            if page > 0:
                location = page * page_size
            else:
                count(signal, EXHAUSTED, 1)
        elif length > 0:
            last = int64(last_loc[request])
            position = length - 1
            if follows(last, position - divide(position, page_size, shift) * page_size, page_size, shift):
                location = last + 1
            else:
                count(signal, MISMATCH, 1)
        if request < end:
            out[request] = location
        taken += total
        first += BLOCK


@device_function
def set_bytes(word):
    # How many of the eight bytes of a word are not zero.
    word |= (word >> 4) & 0x0F0F0F0F0F0F0F0F
    word |= (word >> 2) & 0x3F3F3F3F3F3F3F3F
    word |= (word >> 1) & 0x7F7F7F7F7F7F7F7F
    return int64(cuda.popc(word & 0x0101010101010101))


@device_function
def flags_before(keep, first):
    # This thread's share of the flags before `first` that are set: whole words, several in flight, and the bytes around them.
    thread = int64(cuda.threadIdx.x)
    head = min(first, (8 - misaligned_by(keep)) & 7)
    words = (first - head) >> 3
    found = int64(0)
    word = thread
    while word < words:
        # Without branches, so that the loads overlap.
        for ahead in range(UNROLL):
            other = word + ahead * BLOCK
            found += int64(other < words) * set_bytes(load_word(keep, head + 8 * min(other, words - 1)))
        word += UNROLL * BLOCK
    if thread < head:
        found += int64(keep[thread] != 0)
    tail = head + 8 * words + thread
    if tail < first:
        found += int64(keep[tail] != 0)
    return found


@kernel(ids="id*", keep="uint8*", length="int64", out="id*", out_len="int64*")
def compact(ids, keep, length, out, out_len):
    scratch = cuda.shared.array(BLOCK, int64)
    first = chunk_begin(length, int64(cuda.blockIdx.x))
    end = chunk_begin(length, int64(cuda.blockIdx.x) + 1)
    found = flags_before(keep, first)
    kept = exclusive_scan(scratch, found)[1]
    while first < end:
        i = first + cuda.threadIdx.x
        stays = False
        if i < end:
            stays = keep[i] != 0
        before, total = exclusive_scan(scratch, int64(stays))
        if stays:
            out[kept + before] = ids[i]
        kept += total
        first += BLOCK
    if cuda.blockIdx.x == cuda.gridDim.x - 1 and cuda.threadIdx.x == 0:
        out_len[0] = kept
