// Sequences of many lengths one behind the other, and where each begins.

#pragma once

#include "gpukit.cuh"

// `sequences` + 1 ascending numbers of 0 … tokens.
struct Offsets {
    const void* values;
    int64 id_bytes, sequences, tokens;

    __device__ __forceinline__ int64 operator[](int64 i) const
    {
        return load_id(values, id_bytes, i);
    }

    // To be called by all threads of a block.
    __device__ __forceinline__ bool are_bad() const
    {
        bool bad = false;
#pragma unroll 1
        for (int64 i = threadIdx.x; i <= sequences; i += blockDim.x) {
            const int64 own = (*this)[i];
            bad |= own < (i ? (*this)[i - 1] : 0) || own > tokens;
        }
        return __syncthreads_or(bad);
    }
};

// Zero what belongs to no sequence: `vectors` of 16 bytes in `rows` rows from `first` on, which lie `stride` vectors apart.
__device__ __forceinline__ void clear_unowned(const Offsets& offsets, bool are_bad, int64 first, int rows, Bytes16* out, int vectors, int64 stride)
{
    const int64 begin = are_bad ? 0 : offsets[0];
    const int64 end = are_bad ? 0 : offsets[offsets.sequences];
    const int there = static_cast<int>(max(0ll, min(static_cast<int64>(rows), offsets.tokens - first)));
    if (first >= begin && first + there <= end)
        return;
#pragma unroll 1
    for (int i = threadIdx.x; i < there * vectors; i += blockDim.x) {
        const int64 row = first + i / vectors;
        if (row < begin || row >= end)
            out[row * stride + i % vectors] = Bytes16{};
    }
}
