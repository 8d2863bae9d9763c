"""Device code of the page-table ops. What they promise stands in `kernels/page_table.py`."""

from __future__ import annotations

from gpukit.compile.device import (
    BLOCK,
    OCCUPIED,
    OUT_OF_RANGE,
    REBOUND,
    UNBOUND,
    atomic_add,
    atomic_compare_exchange,
    atomic_exchange,
    count,
    cuda,
    device_function,
    exclusive_scan,
    int64,
    kernel,
)
from gpukit.kernels.numba._append import finish_tiles, next_tile, push, take_live, tile_base
from gpukit.kernels.numba._translate import translate_id

# States of a table entry while `bind_pair` owns it; any other thread that meets one waits for it to pass. No table holds them otherwise.
# TRYING: its owner waits for nothing and will soon commit or put the old value back.
# OWNED + p: its owner has both entries and will store p here, whatever it still waits for.
TRYING = -(2**63)
OWNED = TRYING + 1
LOCKED_BELOW = -(2**62)


@device_function
def bind_pair(v, p, v2p, virtual_rows, p2v, physical_rows, signal):
    # Valid input: both entries are unbound, both exchanges are in flight together, nothing is ever retried.
    old_p = atomic_compare_exchange(v2p, v, -1, TRYING)
    old_v = atomic_compare_exchange(p2v, p, -1, TRYING)
    if old_p == -1 and old_v == -1:
        p2v[p] = v
        # Whoever takes v after this must find p pointing back.
        cuda.threadfence()
        v2p[v] = p
        return
    if old_p == -1:
        atomic_exchange(v2p, v, -1)
    if old_v == -1:
        atomic_exchange(p2v, p, -1)
    rebind_pair(v, p, v2p, virtual_rows, p2v, physical_rows, signal)


@device_function
def rebind_pair(v, p, v2p, virtual_rows, p2v, physical_rows, signal):
    # Apply the pair as if alone: take v, then p, or put v back and begin again. Holders of both always finish, so somebody always does.
    while True:
        old_p = atomic_add(v2p, v, 0)
        if old_p < LOCKED_BELOW or atomic_compare_exchange(v2p, v, old_p, TRYING) != old_p:
            continue
        old_v = atomic_add(p2v, p, 0)
        if old_v < LOCKED_BELOW or atomic_compare_exchange(p2v, p, old_v, TRYING) != old_v:
            atomic_exchange(v2p, v, old_p)
            continue
        break
    if old_p != -1 or old_v != -1:
        count(signal, REBOUND, 1)
    atomic_exchange(v2p, v, OWNED + p)
    # What a table says may be anything; only a page has a partner.
    if 0 < old_p <= physical_rows - 2 and old_p != p:
        # Fails only where another thread owns the page and will overwrite it.
        atomic_compare_exchange(p2v, old_p, v, -1)
    if 0 < old_v <= virtual_rows - 2 and old_v != v:
        # The old owner of p may still be committing to p, or trying: wait until its entry is settled or goes elsewhere.
        seen = atomic_compare_exchange(v2p, old_v, p, -1)
        while seen == TRYING or seen == OWNED + p:
            seen = atomic_compare_exchange(v2p, old_v, p, -1)
    cuda.threadfence()
    atomic_exchange(p2v, p, v)
    cuda.threadfence()
    atomic_exchange(v2p, v, p)


@kernel(virtual="id*", physical="id*", pairs="int64", v2p="int64*", virtual_rows="int64", p2v="int64*", physical_rows="int64", signal="int64*")
def bind(virtual, physical, pairs, v2p, virtual_rows, p2v, physical_rows, signal):
    i = cuda.grid(1)
    if i < pairs:
        v = int64(virtual[i])
        p = int64(physical[i])
        if v < 1 or v > virtual_rows - 2 or p < 1 or p > physical_rows - 2:
            count(signal, OUT_OF_RANGE, 1)
        else:
            bind_pair(v, p, v2p, virtual_rows, p2v, physical_rows, signal)


@kernel(
    virtual="id*", pairs="int64", first="int64", v2p="int64*", virtual_rows="int64", p2v="int64*", physical_rows="int64",
    out="int64*", signal="int64*",
)  # fmt: skip
def bind_range(virtual, pairs, first, v2p, virtual_rows, p2v, physical_rows, out, signal):
    i = cuda.grid(1)
    if i < pairs:
        v = int64(virtual[i])
        p = first + i
        if v < 1 or v > virtual_rows - 2:
            count(signal, OUT_OF_RANGE, 1)
            out[i] = -1
        else:
            out[i] = p
            bind_pair(v, p, v2p, virtual_rows, p2v, physical_rows, signal)


@kernel(virtual="id*", pages="int64", v2p="int64*", virtual_rows="int64", p2v="int64*", physical_rows="int64", out="int64*", signal="int64*")
def unbind(virtual, pages, v2p, virtual_rows, p2v, physical_rows, out, signal):
    i = cuda.grid(1)
    if i >= pages:
        return
    v = int64(virtual[i])
    valid = v >= 1 and v <= virtual_rows - 2
    p = int64(-1)
    if valid:
        # Lets exactly one of equal ids see the page.
        p = atomic_exchange(v2p, v, -1)
    # Stored before it is known to be live, so that the store is under way while the physical side answers.
    out[i] = p
    owner = ~v
    if p >= 1 and p <= physical_rows - 2:
        owner = atomic_compare_exchange(p2v, p, v, -1)
    if owner != v:
        out[i] = -1
        count(signal, UNBOUND if valid else OUT_OF_RANGE, 1)


@kernel(
    virtual="id*", pages="int64", v2p="int64*", virtual_rows="int64", p2v="int64*", physical_rows="int64",
    ring="int64*", capacity="int64", counters="int64*", workspace="int64*", signal="int64*",
)  # fmt: skip
def unbind_into(virtual, pages, v2p, virtual_rows, p2v, physical_rows, ring, capacity, counters, workspace, signal):
    scratch = cuda.shared.array(BLOCK, int64)
    alone = cuda.gridDim.x == 1
    tiles = (pages + BLOCK - 1) // BLOCK
    base = int64(0)
    tile = next_tile(int64(-1), alone, workspace, scratch)
    while tile < tiles:
        i = tile * BLOCK + cuda.threadIdx.x
        p = int64(-1)
        if i < pages:
            p = take_live(int64(virtual[i]), v2p, virtual_rows, p2v, physical_rows, signal)
        before, total = exclusive_scan(scratch, int64(p > 0))
        base = tile_base(base, tile, total, alone, workspace, scratch)
        if p > 0:
            push(base + before, p, ring, capacity, counters, signal)
        base += total
        tile = next_tile(tile, alone, workspace, scratch)
    finish_tiles(base, tiles, alone, capacity, counters, workspace, scratch)


@kernel(source="id*", destination="id*", pages="int64", v2p="int64*", virtual_rows="int64", p2v="int64*", physical_rows="int64", signal="int64*")
def remap(source, destination, pages, v2p, virtual_rows, p2v, physical_rows, signal):
    i = cuda.grid(1)
    if i >= pages:
        return
    s = int64(source[i])
    d = int64(destination[i])
    if s < 1 or s > physical_rows - 2 or d < 1 or d > physical_rows - 2:
        count(signal, OUT_OF_RANGE, 1)
        return
    v = p2v[s]
    if v < 1 or v > virtual_rows - 2 or v2p[v] != s:
        count(signal, UNBOUND, 1)
        return
    # Reserve the destination, then take the source: whoever fails has changed nothing that it does not put back.
    if atomic_compare_exchange(p2v, d, -1, TRYING) != -1:
        count(signal, OCCUPIED, 1)
    elif atomic_compare_exchange(p2v, s, v, -1) != v:
        atomic_exchange(p2v, d, -1)
        count(signal, UNBOUND, 1)
    else:
        v2p[v] = d
        p2v[d] = v


@kernel(
    ids="id*", rows="int64", columns="int64", row_stride="int64", column_stride="int64",
    v2p="int64*", table_rows="int64", page_size="int64", shift="int64",
    out="int64*", out_width="int64", out_row_stride="int64", out_column_stride="int64", size="int64", rank="int64", signal="int64*",
)  # fmt: skip
def translate(
    ids, rows, columns, row_stride, column_stride,
    v2p, table_rows, page_size, shift,
    out, out_width, out_row_stride, out_column_stride, size, rank, signal,
):  # fmt: skip
    i = cuda.grid(1)
    row = int64(0)
    column = int64(i)
    if rows > 1:
        row = i // out_width
        column = i - row * out_width
    if row >= rows or column >= out_width:
        return
    location = int64(0)
    if column < columns:
        token = int64(ids[row * row_stride + column * column_stride])
        if size > 1 and token >= 0:
            # Every rank owns each size-th token, and counts its own.
            if token % size != rank:
                token = int64(-1)
            else:
                token = token // size
        location = translate_id(token, v2p, table_rows, page_size, shift, signal)
    out[row * out_row_stride + column * out_column_stride] = location


# Six parameters fill one line of the constant bank; packing four into two measured 0.04 µs less on an H200.
@kernel(ids="id*", v2p="int64*", out="int64*", lengths="int64", table="int64", signal="int64*")
def translate_vector(ids, v2p, out, lengths, table, signal):
    i = int64(cuda.grid(1))
    if i >= lengths & 0xFFFFFFFF:
        return
    shift = table >> 56
    last_page = (table & 0xFFFFFFFFFFFFFF) - 2
    token = int64(-1)
    if i < lengths >> 32:
        token = int64(ids[i])
    page = token >> shift
    physical = int64(-1)
    if page >= 0 and page <= last_page:
        physical = v2p[page]
    location = int64(0)
    if physical >= 0:
        location = (physical << shift) | (token & ((int64(1) << shift) - 1))
    out[i] = location
    if physical < 0 and page >= 0:
        count(signal, UNBOUND if page <= last_page else OUT_OF_RANGE, 1)
