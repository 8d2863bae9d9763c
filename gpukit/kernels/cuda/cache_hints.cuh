// How long the L2 keeps a line, said by the access itself: a policy is made once a thread and goes with each load and store. Unlike a window it
// needs no reserve and touches nothing of the device; unlike `load_streaming` it acts on the L2, not on the L1.

#pragma once

#include "gpukit.cuh"

using CachePolicy = uint64;

// Lines that are the first to go: what is read once, like weights that do not fit.
__device__ __forceinline__ CachePolicy policy_evict_first()
{
    CachePolicy policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// A share of the lines, chosen by their address, stays as long as it can; the others are the first to go. The instruction refuses a share of 0.
__device__ __forceinline__ CachePolicy policy_keep(float share)
{
    if (!(share > 0.0f))
        return policy_evict_first();
    CachePolicy policy;
    asm("createpolicy.fractional.L2::evict_last.L2::evict_first.b64 %0, %1;" : "=l"(policy) : "f"(fminf(share, 1.0f)));
    return policy;
}

// The line does not go to the L1: what is read in place once has no use for it there.
__device__ __forceinline__ Bytes16 load_hinted(const Bytes16* address, CachePolicy policy)
{
    Bytes16 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address), "l"(policy) : "memory");
    return v;
}

__device__ __forceinline__ Bytes8 load_hinted(const Bytes8* address, CachePolicy policy)
{
    Bytes8 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(v.x), "=r"(v.y) : "l"(address), "l"(policy) : "memory");
    return v;
}

__device__ __forceinline__ float4 load_hinted(const float4* address, CachePolicy policy)
{
    float4 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(address), "l"(policy) : "memory");
    return v;
}

__device__ __forceinline__ void store_hinted(Bytes16* address, Bytes16 v, CachePolicy policy)
{
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
                 :: "l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy) : "memory");
}

__device__ __forceinline__ void store_hinted(Bytes8* address, Bytes8 v, CachePolicy policy)
{
    asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;" :: "l"(address), "r"(v.x), "r"(v.y), "l"(policy) : "memory");
}

__device__ __forceinline__ void store_hinted(float4* address, float4 v, CachePolicy policy)
{
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;"
                 :: "l"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "l"(policy) : "memory");
}
