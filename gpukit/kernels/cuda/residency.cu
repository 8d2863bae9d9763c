// Device code of the round that L2 plans are tried on: what the ops promise stands in `kernels/residency.py`. The memory traffic of a decode step and
// next to no arithmetic: states are read and written in place, weights are only read.

#include "cache_hints.cuh"

constexpr int THREADS = 256;
// Vectors of a thread: 64 bytes in flight each way.
constexpr int VECTORS = 4;
constexpr int STREAM_THREADS = 512;
// Independent loads in flight per thread of a stream.
constexpr int LOADS = 8;

// A step of a linear congruential generator (Numerical Recipes): a bijection, so that a lost or doubled update shows for ever.
__device__ __forceinline__ Bytes16 step(Bytes16 v)
{
    return make_uint4(v.x * 1664525u + 1013904223u, v.y * 1664525u + 1013904223u, v.z * 1664525u + 1013904223u, v.w * 1664525u + 1013904223u);
}

template <bool HINTED>
__device__ __forceinline__ void advance(Bytes16* state, int64 first, int64 vectors, CachePolicy policy)
{
    Bytes16 value[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (first + i * THREADS < vectors)
            value[i] = HINTED ? load_hinted(state + first + i * THREADS, policy) : state[first + i * THREADS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (first + i * THREADS < vectors) {
            if (HINTED)
                store_hinted(state + first + i * THREADS, step(value[i]), policy);
            else
                state[first + i * THREADS] = step(value[i]);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS) gpukit_advance_states(
    Bytes16* states,    // [layers, slot_count, vectors]; strides in vectors
    int64 layer_stride, int64 slot_stride, int64 slot_count, int64 vectors,
    const void* slots,  // [rows]
    int64 slot_bytes, int64 rows,
    int64 chunks,       // blocks of a state of one layer
    int64 hinted,       // 0: no hints, 1: lines all over the states are kept, 2: those of the first blocks
    double keep, int64* signal)
{
    const unsigned chunk = blockIdx.x % static_cast<unsigned>(chunks);
    const unsigned place = blockIdx.x / static_cast<unsigned>(chunks);
    const unsigned row = place % static_cast<unsigned>(rows);
    const unsigned layer = place / static_cast<unsigned>(rows);
    const bool counts = layer == 0 && chunk == 0 && threadIdx.x == 0;
    const int64 slot = load_id(slots, slot_bytes, row);
    if (slot < 0)
        return;
    if (slot >= slot_count) {
        if (counts)
            count(signal, OUT_OF_RANGE);
        return;
    }
    bool earlier = false;
    for (unsigned i = threadIdx.x; i < row; i += THREADS)
        earlier |= load_id(slots, slot_bytes, i) == slot;
    if (__syncthreads_or(earlier)) {
        if (counts)
            count(signal, UNBOUND);
        return;
    }
    Bytes16* state = states + layer * layer_stride + slot * slot_stride;
    const int64 first = static_cast<int64>(chunk) * (THREADS * VECTORS) + threadIdx.x;
    const double share = hinted == 2 ? (blockIdx.x < keep * gridDim.x ? 1.0 : 0.0) : keep;
    if (hinted)
        advance<true>(state, first, vectors, policy_keep(static_cast<float>(share)));
    else
        advance<false>(state, first, vectors, 0);
}

template <bool HINTED>
__device__ __forceinline__ unsigned sum_of(const Bytes16* weights, int64 vectors, CachePolicy policy)
{
    unsigned sum = 0;
    const int64 threads = static_cast<int64>(gridDim.x) * STREAM_THREADS;
    for (int64 base = static_cast<int64>(blockIdx.x) * STREAM_THREADS + threadIdx.x; base < vectors; base += LOADS * threads) {
        Bytes16 value[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int64 at = base + i * threads;
            value[i] = make_uint4(0, 0, 0, 0);
            if (at < vectors)
                value[i] = HINTED ? load_hinted(weights + at, policy) : __ldcg(weights + at);
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++)
            sum += value[i].x ^ value[i].y ^ value[i].z ^ value[i].w;
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(STREAM_THREADS) gpukit_stream_weights(
    const Bytes16* weights, int64 vectors, unsigned* out, int64 hinted, double keep)
{
    unsigned sum = hinted ? sum_of<true>(weights, vectors, policy_keep(static_cast<float>(keep))) : sum_of<false>(weights, vectors, 0);
    __shared__ unsigned sums[STREAM_THREADS / 32];
#pragma unroll
    for (int offset = 16; offset; offset /= 2)
        sum += __shfl_down_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 32 == 0)
        sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned total = 0;
#pragma unroll
        for (int warp = 0; warp < STREAM_THREADS / 32; warp++)
            total += sums[warp];
        out[blockIdx.x] = total;
    }
}
