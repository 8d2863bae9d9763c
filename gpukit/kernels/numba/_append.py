"""Device functions that free live pages and append them to a `DevicePages` ring in input order, in one launch.

Blocks take tiles of `BLOCK` items by ticket, so a tile only ever waits for tiles that are already running. Each publishes how many pages it
found and sums what the tiles before it published; the last block to finish moves the ring's tail and leaves the workspace zeroed. A block
that works `alone`, all others having left, keeps its sum in a register and touches no workspace.
"""

from __future__ import annotations

from gpukit.compile.device import (
    BLOCK,
    EXHAUSTED,
    OUT_OF_RANGE,
    UNBOUND,
    atomic_add,
    atomic_compare_exchange,
    atomic_exchange,
    count,
    cuda,
    device_function,
    exclusive_scan,
    int64,
    uint32,
)

# Workspace: [TICKET], [FINISHED], then one published count + 1 per tile; 0 is "not yet".
TICKET, FINISHED, PUBLISHED = 0, 1, 2


@device_function
def unbind_virtual(v, v2p, virtual_rows):
    # Where v was, -1 if it is no page. The exchange lets exactly one of equal ids see the page.
    if v < 1 or v > virtual_rows - 2:
        return int64(-1)
    return atomic_exchange(v2p, v, -1)


@device_function
def unbind_physical(v, p, p2v, physical_rows):
    # The page that v was at, -1 where it was not live. A page that the physical side gave to another id meanwhile stays with that id.
    if p < 1 or p > physical_rows - 2 or atomic_compare_exchange(p2v, p, v, -1) != v:
        return int64(-1)
    return p


@device_function
def take_if_live(v, v2p, virtual_rows, p2v, physical_rows):
    # Free v and say where it was, -1 where it was not live.
    return unbind_physical(v, unbind_virtual(v, v2p, virtual_rows), p2v, physical_rows)


@device_function
def take_live(v, v2p, virtual_rows, p2v, physical_rows, signal):
    # The same, counting the ids that have no live page.
    p = take_if_live(v, v2p, virtual_rows, p2v, physical_rows)
    if p < 0:
        if v < 1 or v > virtual_rows - 2:
            count(signal, OUT_OF_RANGE, 1)
        else:
            count(signal, UNBOUND, 1)
    return p


@device_function
def next_tile(tile, alone, workspace, scratch):
    # The block's next tile, the same for all its threads.
    if alone:
        return tile + 1
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        scratch[0] = atomic_add(workspace, TICKET, 1)
    cuda.syncthreads()
    return scratch[0]


@device_function
def tile_base(base, tile, total, alone, workspace, scratch):
    # Pages found by all tiles before this one.
    if alone:
        return base
    if cuda.threadIdx.x == 0:
        atomic_exchange(workspace, PUBLISHED + tile, total + 1)
    found = int64(0)
    other = int64(cuda.threadIdx.x)
    while other < tile:
        published = atomic_add(workspace, PUBLISHED + other, 0)
        if published > 0:
            found += published - 1
            other += BLOCK
    return exclusive_scan(scratch, found)[1]


@device_function
def place_in_ring(counter, capacity):
    # 32-bit division is several times cheaper.
    if counter < 2147483648 and capacity < 2147483648:
        return int64(uint32(counter) % uint32(capacity))
    return counter % capacity


@device_function
def push(position, page, ring, capacity, counters, signal):
    # `position` counts from the tail before this launch. What does not fit is dropped and counted.
    head = counters[0]
    tail = counters[1]
    if position < capacity - (tail - head):
        ring[place_in_ring(tail + position, capacity)] = page
    else:
        count(signal, EXHAUSTED, 1)


@device_function
def move_tail(total, capacity, counters):
    # By one thread, when nobody reads the counters any more.
    counters[1] += min(total, capacity - (counters[1] - counters[0]))


@device_function
def sum_tiles(base, tiles, alone, workspace, scratch):
    # Called once by every block after its last tile. The last one gets the total and leaves the workspace zeroed, the others get -1.
    cuda.syncthreads()
    if alone:
        return base
    if cuda.threadIdx.x == 0:
        # Whoever sees this block finished must see what it published.
        cuda.threadfence()
        scratch[0] = atomic_add(workspace, FINISHED, 1)
    cuda.syncthreads()
    last = scratch[0] == cuda.gridDim.x - 1
    cuda.syncthreads()
    if not last:
        return int64(-1)
    found = int64(0)
    other = int64(cuda.threadIdx.x)
    while other < tiles:
        found += atomic_exchange(workspace, PUBLISHED + other, 0) - 1
        other += BLOCK
    if cuda.threadIdx.x == 0:
        workspace[TICKET] = 0
        workspace[FINISHED] = 0
    return exclusive_scan(scratch, found)[1]


@device_function
def finish_tiles(base, tiles, alone, capacity, counters, workspace, scratch):
    # The last block moves the ring's tail.
    total = sum_tiles(base, tiles, alone, workspace, scratch)
    if total >= 0 and cuda.threadIdx.x == 0:
        move_tail(total, capacity, counters)
