// Device code of the state moves: what they promise stands in `kernels/state_slots.py`. One kernel for all of them: states of several parts (the
// convolution's, the recurrent one's) go to slots, from a slot, from a step of a row, or from nowhere, which clears. A *vector* is 16 bytes.

#include "gpukit.cuh"

// As in page_copy.cu: small blocks, all loads of a thread before its first store.
constexpr int THREADS = 128;
constexpr int STEPS = 4;

// What one part of a move is; strides in vectors, two to a parameter, because parameters are few.
struct Part {
    const Bytes16* source;  // [layers, rows, steps, vectors]; 0 to clear
    Bytes16* destination;   // [layers, slots, vectors]
    uint64 source_strides;  // of a layer, and of a row << 32
    uint64 step_stride;     // of a step, and the vectors of a state << 32
    uint64 strides;         // of a layer of the destination, and of a slot << 32
};

__device__ __forceinline__ int64 low(uint64 both)
{
    return static_cast<int64>(both & 0xffffffffu);
}

__device__ __forceinline__ int64 high(uint64 both)
{
    return static_cast<int64>(both >> 32);
}

// On to the next part, if the piece is none of this one's. A part that is not there has no vectors and so no pieces.
__device__ __forceinline__ void go_on(Part& part, int64& piece, const Part& next)
{
    const int64 own = (high(part.step_stride) + THREADS * STEPS - 1) / (THREADS * STEPS);
    if (piece >= own) {
        piece -= own;
        part = next;
    }
}

// Where the rows go: one set of indices, or a second one for tracking.
struct Indices {
    const void* slots;  // [rows]
    const void* steps;  // [rows]; 0 is step 0 of all
    int64 slot_bytes;
    int64 step_bytes;
    int64 slot_count;
    int64 step_count;

    __device__ __forceinline__ int64 step(int64 row) const
    {
        return steps ? load_id(steps, step_bytes, row) : 0;
    }

    __device__ __forceinline__ bool moves(int64 slot, int64 step) const
    {
        return slot >= 0 && slot < slot_count && step >= 0 && step < step_count;
    }

    // Whether one of the first rows moves something to a slot; the threads of the block share the rows.
    __device__ __forceinline__ bool any_moves_to(int64 slot, int64 rows) const
    {
        bool found = false;
#pragma unroll 1
        for (int64 row = threadIdx.x; row < rows; row += THREADS)
            found |= load_id(slots, slot_bytes, row) == slot && moves(slot, step(row));
        return found;
    }
};

__device__ __forceinline__ void move_piece(const Part& part, int64 layer, int64 row, int64 step, int64 slot, int64 first)
{
    const int64 vectors = high(part.step_stride);
    const Bytes16* source = part.source + (layer * low(part.source_strides) + row * high(part.source_strides) + step * low(part.step_stride));
    Bytes16* destination = part.destination + (layer * low(part.strides) + slot * high(part.strides));
    Bytes16 held[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const int64 vector = first + i * THREADS + threadIdx.x;
        held[i] = make_uint4(0, 0, 0, 0);
        if (part.source && vector < vectors)
            held[i] = load_streaming(source + vector);
    }
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const int64 vector = first + i * THREADS + threadIdx.x;
        if (vector < vectors)
            store_streaming(destination + vector, held[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gpukit_move_states(
    const void* slots, int64 slot_bytes, const void* steps, int64 step_bytes,
    const void* track_slots,  // 0 for one set of indices
    const void* track_steps,
    int64 rows,
    int64 slot_count,
    int64 step_count,
    int64 pieces,             // blocks of a row and layer; a row's blocks are side by side, layer by layer
    int64 layers,
    int64* signal,
    const Bytes16* source0, Bytes16* destination0, uint64 source_strides0, uint64 step_stride0, uint64 strides0,
    const Bytes16* source1, Bytes16* destination1, uint64 source_strides1, uint64 step_stride1, uint64 strides1,
    const Bytes16* source2, Bytes16* destination2, uint64 source_strides2, uint64 step_stride2, uint64 strides2,
    const Bytes16* source3, Bytes16* destination3, uint64 source_strides3, uint64 step_stride3, uint64 strides3)
{
    wait_for_predecessor();
    const unsigned row_layer = blockIdx.x / static_cast<unsigned>(pieces);
    int64 piece = blockIdx.x - row_layer * static_cast<unsigned>(pieces);
    const unsigned row = row_layer / static_cast<unsigned>(layers);
    const unsigned layer = row_layer - row * static_cast<unsigned>(layers);
    const bool counts = layer == 0 && piece == 0 && threadIdx.x == 0;

    Part part{source0, destination0, source_strides0, step_stride0, strides0};
    go_on(part, piece, {source1, destination1, source_strides1, step_stride1, strides1});
    go_on(part, piece, {source2, destination2, source_strides2, step_stride2, strides2});
    go_on(part, piece, {source3, destination3, source_strides3, step_stride3, strides3});

#pragma unroll 1
    for (int set = 0; set < (track_slots ? 2 : 1); set++) {
        const Indices own{set ? track_slots : slots, set ? track_steps : steps, slot_bytes, step_bytes, slot_count, step_count};
        const int64 slot = load_id(own.slots, slot_bytes, row);
        const int64 step = own.step(row);
        if (slot < 0 || step < 0)
            continue;
        if (!own.moves(slot, step)) {
            if (counts)
                count(signal, OUT_OF_RANGE);
            continue;
        }
        bool taken = own.any_moves_to(slot, row);
        if (set)
            taken |= Indices{slots, steps, slot_bytes, step_bytes, slot_count, step_count}.any_moves_to(slot, rows);
        if (__syncthreads_or(taken)) {
            if (counts)
                count(signal, UNBOUND);
            continue;
        }
        move_piece(part, layer, row, step, slot, piece * (THREADS * STEPS));
    }
}
