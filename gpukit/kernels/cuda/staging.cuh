// Copies from global to shared memory that arrive on their own, and the barriers in shared memory that say when. Barriers and copies in bulk need
// sm_90, and name places in shared memory by 32-bit addresses.

#pragma once

#include "cache_hints.cuh"
#include "gpukit.cuh"

// Sixteen bytes from global to shared memory that arrive later, past L1; zeros, and nothing read, unless `is_there`.
__device__ __forceinline__ void copy_later(void* to, const void* from, bool is_there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}

// Until the copies of this thread have arrived; a barrier makes them those of all.
__device__ __forceinline__ void wait_for_copies()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// A barrier whose phase ends when `count` have arrived and all bytes that they expect have come.
__device__ __forceinline__ void init_barrier(unsigned barrier, unsigned count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Copies that this thread asks for see the barriers that it has made.
__device__ __forceinline__ void fence_for_copies()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Other blocks of a cluster see the barriers that this thread has made, once they have met.
__device__ __forceinline__ void fence_for_cluster()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive_and_expect(unsigned barrier, unsigned bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Until the phase of that parity has ended.
__device__ __forceinline__ void wait_for_phase(unsigned barrier, unsigned parity)
{
    asm volatile("{\n\t"
                 ".reg .pred there;\n"
                 "again:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n\t"
                 "@there bra done;\n\t"
                 "bra again;\n"
                 "done:\n\t"
                 "}" ::"r"(barrier), "r"(parity) : "memory");
}

// What the host says of the rows of a matrix: a copy brings as many of them as it says, line by line of 128 bytes, each of all these rows. In a line the
// place of 16 bytes is their number, xor the line's own, for which `to` is a multiple of 1024.
struct alignas(64) TensorMap {
    char bytes[128];
};

__device__ __forceinline__ void prefetch_map(const TensorMap* map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void copy_rows(unsigned to, const TensorMap* map, int row, unsigned barrier, CachePolicy policy)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;"
                 ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(0), "r"(barrier), "l"(policy) : "memory");
}

// Both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void copy_in_bulk(unsigned to, const char* from, unsigned bytes, unsigned barrier, CachePolicy policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
