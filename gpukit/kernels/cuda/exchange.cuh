// What blocks of a running launch say to each other through global memory, word by word: no fence, which would wait for all that a thread has on its
// way. Words say themselves whether they are there: before the launch they are ABSENT.

#pragma once

#include "gpukit.cuh"

// Not a number that arithmetic gives.
constexpr unsigned ABSENT = 0xffffffffu;

__device__ __forceinline__ unsigned load_relaxed(const unsigned* address)
{
    unsigned v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}

__device__ __forceinline__ Bytes16 load_relaxed(const Bytes16* address)
{
    Bytes16 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
    return v;
}

__device__ __forceinline__ void store_relaxed(unsigned* address, unsigned value)
{
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void add_relaxed(unsigned* address, unsigned value)
{
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ bool is_part_absent(const Bytes16& words)
{
    return max(max(words.x, words.y), max(words.z, words.w)) == ABSENT;
}

// All threads of a launch make `count` times 16 bytes absent.
__device__ __forceinline__ void make_absent(Bytes16* words, int64 count)
{
    const int64 apart = static_cast<int64>(gridDim.x) * blockDim.x;
    for (int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += apart)
        words[i] = make_uint4(ABSENT, ABSENT, ABSENT, ABSENT);
}
