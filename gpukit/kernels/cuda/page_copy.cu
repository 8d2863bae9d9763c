// Device code of the page-byte ops: what they promise stands in `kernels/page_copy.py`. All of it is moving bytes at the rate of the
// memory: accesses of 16 bytes, several loads of a thread in flight before its first store, blocks that share large pages and pool small
// ones. A *vector* is one access.

#include "gpukit.cuh"

// Small blocks with two vectors a thread copied fastest on an H200: 4.26 TB/s, against 4.1 with 256 threads and four vectors.
constexpr int THREADS_SHIFT = 7;
constexpr int THREADS = 1 << THREADS_SHIFT;
constexpr int STEPS = 2;
// Blocks side by side on a multiprocessor, whose loads are all in flight together: 48 KB, where the memory of an H200 needs about 20 (its
// rate times a microsecond, over 132 multiprocessors).
constexpr int BLOCKS = 12;

constexpr int MOST_SHIFT_THREADS = 1024;
// More here, because the threads of a shift wait for each other between their loads and their stores.
constexpr int SHIFT_STEPS = 8;

// Where an item (page or row) comes from and goes to, in vectors. A view may run backwards, so a negative offset is one like any other.
struct Route {
    int64 from;
    int64 to;
};
constexpr int64 SKIPPED = -0x7fffffffffffffffll - 1;

// The share of a block, and of a thread in it, in a batch of equal items: several small items, or a piece of a large one. A thread
// handles one vector a step, threads side by side have vectors side by side. Shares are powers of two: only the block's number is divided.
struct Share {
    int64 first_item;  // of the block
    int items;         // of the block, some perhaps past the end of the batch
    int item;          // of the thread at step 0, within the block
    int64 vector;      // of the thread at step 0, within the item
    bool is_first;     // whether it holds the beginning of its items
    int lane_shift;    // 1 << lane_shift threads go along an item together,
    int item_shift;    // 1 << item_shift steps long, then over to another item
    int steps;

    __device__ __forceinline__ Share(unsigned block, int64 item_vectors, int64 steps_shift)
    {
        const int bits = 64 - __clzll(item_vectors - 1);
        lane_shift = min(bits, THREADS_SHIFT);
        item_shift = min(bits - lane_shift, static_cast<int>(steps_shift));
        steps = 1 << steps_shift;
        const int piece_shift = lane_shift + item_shift;
        const unsigned pieces = static_cast<unsigned>((item_vectors - 1) >> piece_shift) + 1;
        const unsigned piece = block % pieces;
        items = steps << THREADS_SHIFT >> piece_shift;
        first_item = static_cast<int64>(block / pieces) * items;
        item = threadIdx.x >> lane_shift;
        vector = (static_cast<int64>(piece) << piece_shift) + (threadIdx.x & ((1 << lane_shift) - 1));
        is_first = piece == 0;
    }

    __device__ __forceinline__ int item_at(int step) const
    {
        return item + (step >> item_shift << (THREADS_SHIFT - lane_shift));
    }

    __device__ __forceinline__ int64 vector_at(int step) const
    {
        return vector + ((step & ((1 << item_shift) - 1)) << THREADS_SHIFT);
    }
};

// Copy the vectors of a thread's share, all loads before all stores.
template <bool streaming, typename Bytes>
__device__ __forceinline__ void copy_share(
    const Share& share, int64 item_vectors, const Route* routes, const Bytes* source, Bytes* destination)
{
    Bytes* to[STEPS];
    Bytes held[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int64 vector = share.vector_at(step);
        const Route route = routes[share.item_at(step)];
        const bool is_mine = step < share.steps && vector < item_vectors && route.to != SKIPPED;
        to[step] = is_mine ? destination + (route.to + vector) : nullptr;
        if (is_mine)
            held[step] = load_streaming(source + (route.from + vector));
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++)
        if (to[step]) {
            if (streaming)
                store_streaming(to[step], held[step]);
            else
                *to[step] = held[step];
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gpukit_move_pages(
    Bytes16* buffer,          // [buffer_pages, page_vectors]
    int64 page_vectors,
    int64 buffer_pages,
    const void* source,       // [pages]
    const void* destination,  // [pages]
    int64 id_bytes,
    int64 pages,
    int64 steps_shift,        // a thread moves 1 << steps_shift vectors, at most STEPS
    int64* signal)
{
    __shared__ Route routes[THREADS * STEPS];
    const Share share(blockIdx.x, page_vectors, steps_shift);
#pragma unroll 1
    for (int i = threadIdx.x; i < share.items; i += THREADS) {
        const int64 pair = share.first_item + i;
        Route route{0, SKIPPED};
        if (pair < pages) {
            const int64 s = load_id(source, id_bytes, pair);
            const int64 d = load_id(destination, id_bytes, pair);
            // The sink neither moves nor is written.
            if (s > 0 && s < buffer_pages && d > 0 && d < buffer_pages)
                route = {s * page_vectors, d * page_vectors};
            else if (share.is_first)
                count(signal, OUT_OF_RANGE);
        }
        routes[i] = route;
    }
    __syncthreads();
    copy_share<true>(share, page_vectors, routes, buffer, buffer);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gpukit_zero_pages(
    Bytes16* buffer,     // [buffer_pages, page_vectors]
    int64 page_vectors,
    int64 buffer_pages,
    const void* ids,     // [pages]
    int64 id_bytes,
    int64 pages,
    int64 steps_shift,   // a thread clears 1 << steps_shift vectors, at most STEPS
    int64* signal)
{
    __shared__ int64 begins[THREADS * STEPS];
    const Share share(blockIdx.x, page_vectors, steps_shift);
#pragma unroll 1
    for (int i = threadIdx.x; i < share.items; i += THREADS) {
        int64 begin = SKIPPED;
        if (share.first_item + i < pages) {
            const int64 page = load_id(ids, id_bytes, share.first_item + i);
            if (page >= 0 && page < buffer_pages)
                begin = page * page_vectors;
            else if (share.is_first)
                count(signal, OUT_OF_RANGE);
        }
        begins[i] = begin;
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int64 vector = share.vector_at(step);
        const int64 begin = begins[share.item_at(step)];
        if (step < share.steps && vector < page_vectors && begin != SKIPPED)
            store_streaming(buffer + (begin + vector), make_uint4(0, 0, 0, 0));
    }
}

// Source vector i goes to i + distance. Seen as rows of `width` vectors, width = |distance| where source and destination overlap, every
// vector goes one row further in its own column. A block owns a band of columns, which nobody else reads or writes, and walks it from the
// row that leaves the source: a window of rows is read whole, then written. What a window overwrites was read by it or by the one before.
extern "C" __global__ void __launch_bounds__(MOST_SHIFT_THREADS) gpukit_shift_pages(
    Bytes16* source,   // [vectors], seen as [rows, width], the last row partly filled
    int64 vectors,
    int64 distance,
    int64 rows,
    int64 width,
    int64 band_shift)  // a band is 1 << band_shift columns, at most blockDim.x
{
    const unsigned band = 1u << band_shift;
    const unsigned rows_at_once = blockDim.x >> band_shift;
    const int64 column = (static_cast<int64>(blockIdx.x) << band_shift) + (threadIdx.x & (band - 1));
    const int64 walked = threadIdx.x >> band_shift;
    // The last row has no vector in the last columns; they are one row shorter.
    const int64 column_rows = column >= width ? 0 : rows - (column >= vectors - (rows - 1) * width);
    const int64 row = distance > 0 ? column_rows - 1 - walked : walked;
    int64 step = (distance > 0 ? -width : width) * rows_at_once;
    Bytes16* from = source + (row * width + column);
    // Vectors of this thread still to move.
    int64 left = column_rows <= walked ? 0 : (column_rows - walked + rows_at_once - 1) >> (31 - __clz(rows_at_once));
#pragma unroll 1
    for (int64 done = 0; done < rows; done += rows_at_once * SHIFT_STEPS) {
        // Hides where the step comes from, or the compiler keeps sixteen addresses through the loop and spills them.
        asm volatile("" : "+l"(step));
        const int live = static_cast<int>(min(left, static_cast<int64>(SHIFT_STEPS)));
        Bytes16 held[SHIFT_STEPS];
#pragma unroll
        for (int u = 0; u < SHIFT_STEPS; u++)
            if (u < live)
                held[u] = load_streaming(from + u * step);
        __syncthreads();
        Bytes16* to = from + distance;
#pragma unroll
        for (int u = 0; u < SHIFT_STEPS; u++, to += step)
            if (u < live)
                store_streaming(to, held[u]);
        from += SHIFT_STEPS * step;
        left -= SHIFT_STEPS;
    }
}

// Rows of K, or of V, and where they go; lengths and strides in vectors.
struct Rows {
    const void* values;     // [tokens, row_vectors]
    int64 value_stride;
    void* pool;             // [slots, row_vectors]
    int64 pool_stride;
    int64 row_vectors;
    const void* locations;  // [tokens]
    int64 id_bytes;
    int64 tokens;
    int64 slots;
};

template <typename Bytes>
__device__ __forceinline__ void store_rows(const Rows& rows, unsigned block, int64 steps_shift, Route* routes, int64* signal)
{
    const Share share(block, rows.row_vectors, steps_shift);
#pragma unroll 1
    for (int i = threadIdx.x; i < share.items; i += THREADS) {
        const int64 token = share.first_item + i;
        Route route{0, SKIPPED};
        if (token < rows.tokens) {
            const int64 slot = load_id(rows.locations, rows.id_bytes, token);
            // Zero and less are padding.
            if (slot > 0 && slot < rows.slots)
                route = {token * rows.value_stride, slot * rows.pool_stride};
            else if (slot >= rows.slots && share.is_first)
                count(signal, OUT_OF_RANGE);
        }
        routes[i] = route;
    }
    __syncthreads();
    copy_share<false>(share, rows.row_vectors, routes, static_cast<const Bytes*>(rows.values), static_cast<Bytes*>(rows.pool));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gpukit_store_kv(
    const void* k,               // [tokens, key_vectors]
    int64 k_stride,
    const void* v,               // [tokens, value_vectors]
    int64 v_stride,
    const void* locations,       // [tokens]
    int64 id_bytes,
    int64 tokens,
    void* key_rows,              // [slots, key_vectors]
    int64 key_stride,
    void* value_rows,            // [slots, value_vectors]
    int64 value_stride,
    int64 slots,
    int64 key_vectors,
    int64 key_vector_bytes,      // 16, 8, 4, 2 or 1: the unit of K's strides and vectors
    int64 value_vectors,
    int64 value_vector_bytes,
    int64 key_blocks,            // the blocks before this one store K, the rest V
    int64 steps_shift,
    int64* signal)
{
    __shared__ Route routes[THREADS * STEPS];
    const bool is_key = blockIdx.x < key_blocks;
    const unsigned block = is_key ? blockIdx.x : blockIdx.x - static_cast<unsigned>(key_blocks);
    const Rows rows = is_key ? Rows{k, k_stride, key_rows, key_stride, key_vectors, locations, id_bytes, tokens, slots}
                             : Rows{v, v_stride, value_rows, value_stride, value_vectors, locations, id_bytes, tokens, slots};
    // K and V both look a location up, one of them counts it.
    int64* counters = is_key ? signal : nullptr;
    switch (is_key ? key_vector_bytes : value_vector_bytes) {
    case 16:
        return store_rows<Bytes16>(rows, block, steps_shift, routes, counters);
    case 8:
        return store_rows<Bytes8>(rows, block, steps_shift, routes, counters);
    case 4:
        return store_rows<Bytes4>(rows, block, steps_shift, routes, counters);
    case 2:
        return store_rows<Bytes2>(rows, block, steps_shift, routes, counters);
    case 1:
        return store_rows<Bytes1>(rows, block, steps_shift, routes, counters);
    }
}
