"""Device code of the sliding-window ops. What they promise stands in `kernels/sliding_window.py`."""

from __future__ import annotations

from gpukit.compile.device import (
    BLOCK,
    MISMATCH,
    OUT_OF_RANGE,
    count,
    cuda,
    device_function,
    exclusive_scan,
    inclusive_max,
    int64,
    is_null,
    kernel,
)
from gpukit.kernels.numba._append import finish_tiles, move_tail, next_tile, push, sum_tiles, take_if_live, take_live, tile_base
from gpukit.kernels.numba._translate import divide

# Slots of a tile of retire, one per page and one more.
SLOTS = BLOCK + 1

# What `segment` says instead of a number of pages.
NO_ROW = -1
NOT_ALIGNED = -2

# free_segment keeps two counts in one sum: the owner's pages in the lower half, the other sub-pool's in the upper half.
OTHER = 1 << 32


@device_function
def segment(request, starts, stops, request_indices, num_rows, row_stride, page_stride, columns, page_size, shift):
    # How many pages of its row a request retires, and the element that the first of them begins with.
    row = request
    if not is_null(request_indices):
        row = int64(request_indices[request])
    if row < 0 or row >= num_rows:
        return int64(NO_ROW), int64(0)
    start = int64(starts[request])
    stop = int64(stops[request])
    if start < 0:
        return int64(NOT_ALIGNED), int64(0)
    first = divide(start, page_size, shift)
    if start != first * page_size:
        return int64(NOT_ALIGNED), int64(0)
    if stop <= start or first >= columns:
        return int64(0), int64(0)
    # The row ends somewhere in its last column of pages.
    return min(divide(stop, page_size, shift), columns) - first, row * row_stride + first * page_stride


@device_function
def page_of(token, page_size, shift):
    return divide(token, page_size, shift) if token >= 0 else int64(-1)


@kernel(
    rows="id*", num_rows="int64", row_stride="int64", page_stride="int64", columns="int64",
    starts="length*", stops="length*", request_indices="length*", requests="int64", page_size="int64", shift="int64",
    v2p="int64*", virtual_rows="int64", p2v="int64*", physical_rows="int64",
    ring="int64*", capacity="int64", counters="int64*", workspace="int64*", most_tiles="int64", signal="int64*",
)  # fmt: skip
def retire(
    rows, num_rows, row_stride, page_stride, columns,
    starts, stops, request_indices, requests, page_size, shift,
    v2p, virtual_rows, p2v, physical_rows,
    ring, capacity, counters, workspace, most_tiles, signal,
):  # fmt: skip
    # One slot per page of the tile, used where a request begins there; slot 0 is for the request that began before the tile.
    scratch = cuda.shared.array(BLOCK, int64)
    used = cuda.shared.array(SLOTS, int64)
    shifted = cuda.shared.array(SLOTS, int64)
    thread = int64(cuda.threadIdx.x)
    found = int64(0)
    request = thread
    while request < requests:
        pages, begin = segment(request, starts, stops, request_indices, num_rows, row_stride, page_stride, columns, page_size, shift)
        if pages >= 0:
            found += pages
        elif cuda.blockIdx.x == 0:
            count(signal, OUT_OF_RANGE if pages == NO_ROW else MISMATCH, 1)
        request += BLOCK
    all_pages = exclusive_scan(scratch, found)[1]
    tiles = (all_pages + BLOCK - 1) // BLOCK
    # One tile needs one block, and more tiles than the workspace has counts get one, too. Every block decides the same.
    alone = cuda.gridDim.x == 1 or tiles <= 1 or tiles > most_tiles
    if alone and cuda.blockIdx.x > 0:
        return
    base = int64(0)
    tile = next_tile(int64(-1), alone, workspace, scratch)
    while tile < tiles:
        tile_begin = tile * BLOCK
        used[thread + 1] = 0
        pages_before = int64(0)
        first = int64(0)
        while first < requests and pages_before < tile_begin + BLOCK:
            request = first + thread
            pages, begin = int64(0), int64(0)
            if request < requests:
                pages, begin = segment(request, starts, stops, request_indices, num_rows, row_stride, page_stride, columns, page_size, shift)
                pages = max(pages, int64(0))
            before, total = exclusive_scan(scratch, pages)
            start = pages_before + before
            if pages > 0 and start < tile_begin + BLOCK and start + pages > tile_begin:
                slot = max(start - tile_begin + 1, int64(0))
                used[slot] = slot
                # Element of a page = this + its number in the batch * page_stride.
                shifted[slot] = begin - start * page_stride
            pages_before += total
            first += BLOCK
        cuda.syncthreads()
        # The request of a page is the last one that begins at it or before.
        slot = inclusive_max(scratch, used[thread + 1])[0]
        i = tile_begin + thread
        p = int64(-1)
        if i < all_pages:
            v = page_of(int64(rows[shifted[slot] + i * page_stride]), page_size, shift)
            p = take_live(v, v2p, virtual_rows, p2v, physical_rows, signal)
        before, total = exclusive_scan(scratch, int64(p > 0))
        base = tile_base(base, tile, total, alone, workspace, scratch)
        if p > 0:
            push(base + before, p, ring, capacity, counters, signal)
        base += total
        tile = next_tile(tile, alone, workspace, scratch)
    finish_tiles(base, tiles, alone, capacity, counters, workspace, scratch)


@kernel(
    tokens="id*", token_stride="int64", pages="int64", page_size="int64", shift="int64",
    owner_v2p="int64*", owner_virtual="int64", owner_p2v="int64*", owner_physical="int64",
    other_v2p="int64*", other_virtual="int64", other_p2v="int64*", other_physical="int64",
    virtual_ring="int64*", virtual_capacity="int64", virtual_counters="int64*",
    owner_ring="int64*", owner_capacity="int64", owner_counters="int64*",
    other_ring="int64*", other_capacity="int64", other_counters="int64*", workspace="int64*", signal="int64*",
)  # fmt: skip
def free_segment(
    tokens, token_stride, pages, page_size, shift,
    owner_v2p, owner_virtual, owner_p2v, owner_physical,
    other_v2p, other_virtual, other_p2v, other_physical,
    virtual_ring, virtual_capacity, virtual_counters,
    owner_ring, owner_capacity, owner_counters,
    other_ring, other_capacity, other_counters, workspace, signal,
):  # fmt: skip
    scratch = cuda.shared.array(BLOCK, int64)
    alone = cuda.gridDim.x == 1
    tiles = (pages + BLOCK - 1) // BLOCK
    base = int64(0)
    tile = next_tile(int64(-1), alone, workspace, scratch)
    while tile < tiles:
        i = tile * BLOCK + cuda.threadIdx.x
        v, p, q = int64(0), int64(-1), int64(-1)
        if i < pages:
            v = page_of(int64(tokens[i * page_size * token_stride]), page_size, shift)
            p = take_live(v, owner_v2p, owner_virtual, owner_p2v, owner_physical, signal)
            if p > 0:
                # A page that the window has retired there before is ordinary, and not counted.
                q = take_if_live(v, other_v2p, other_virtual, other_p2v, other_physical)
        found = int64(p > 0) + OTHER * int64(q > 0)
        before, total = exclusive_scan(scratch, found)
        base = tile_base(base, tile, total, alone, workspace, scratch)
        before += base
        if p > 0:
            push(before % OTHER, v, virtual_ring, virtual_capacity, virtual_counters, signal)
            push(before % OTHER, p, owner_ring, owner_capacity, owner_counters, signal)
        if q > 0:
            push(before // OTHER, q, other_ring, other_capacity, other_counters, signal)
        base += total
        tile = next_tile(tile, alone, workspace, scratch)
    total = sum_tiles(base, tiles, alone, workspace, scratch)
    if total >= 0 and cuda.threadIdx.x == 0:
        move_tail(total % OTHER, virtual_capacity, virtual_counters)
        move_tail(total % OTHER, owner_capacity, owner_counters)
        move_tail(total // OTHER, other_capacity, other_counters)
