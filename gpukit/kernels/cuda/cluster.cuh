// Blocks of a cluster, which see each other's shared memory. Needs sm_90.

#pragma once

#include "gpukit.cuh"
#include "staging.cuh"

// Say that this block is there, and what it expects; a full fence, as of a release, would wait for loads on their way.
__device__ __forceinline__ void arrive_at_cluster()
{
    // The instruction is a whole warp's.
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_cluster()
{
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where another block of the cluster has what this one has at the address.
__device__ __forceinline__ unsigned address_in_block(const void* shared, unsigned block)
{
    unsigned address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(block));
    return address;
}

// Bytes that other blocks send here: one phase of an mbarrier, which ends when so many have come.
__device__ __forceinline__ void expect_bytes(uint64* arrivals, unsigned bytes)
{
    const unsigned barrier = shared_address(arrivals);
    init_barrier(barrier, 1);
    fence_for_cluster();
    arrive_and_expect(barrier, bytes);
}

__device__ __forceinline__ void wait_for_bytes(uint64* arrivals)
{
    unsigned is_there;
    do {
        asm volatile("{\n\t"
                     ".reg .pred p;\n\t"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t"
                     "}" : "=r"(is_there) : "r"(shared_address(arrivals)) : "memory");
    } while (!is_there);
}

// Store where another block has `to`, and count the bytes at its `arrivals`.
__device__ __forceinline__ void send(float4* to, unsigned block, float4 v, uint64* arrivals)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(address_in_block(to, block)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(address_in_block(arrivals, block)) : "memory");
}

__device__ __forceinline__ void send(float* to, unsigned block, float v, uint64* arrivals)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
                 ::"r"(address_in_block(to, block)), "f"(v), "r"(address_in_block(arrivals, block)) : "memory");
}

__device__ __forceinline__ void send(int* to, unsigned block, int v, uint64* arrivals)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];"
                 ::"r"(address_in_block(to, block)), "r"(v), "r"(address_in_block(arrivals, block)) : "memory");
}
