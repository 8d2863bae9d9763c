// Copies from global to shared memory that arrive on their own, and the barriers in shared memory that say when: what is shared by warps that ask and
// warps that take. Needs sm_90. Places in shared memory are 32-bit addresses, so that a load says what it is.

#pragma once

#include "cache_hints.cuh"
#include "gpukit.cuh"

__device__ __forceinline__ Bytes16 load_shared16(unsigned address)
{
    Bytes16 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

__device__ __forceinline__ Bytes8 load_shared8(unsigned address)
{
    Bytes8 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}

__device__ __forceinline__ unsigned load_shared4(unsigned address)
{
    unsigned v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

__device__ __forceinline__ unsigned short load_shared2(unsigned address)
{
    unsigned short v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
    return v;
}

__device__ __forceinline__ void store_shared16(unsigned address, Bytes16 v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

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

// Both; behind the making of barriers, before a block's threads meet.
__device__ __forceinline__ void fence_barriers()
{
    fence_for_cluster();
    fence_for_copies();
}

__device__ __forceinline__ void arrive(unsigned barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_and_expect(unsigned barrier, unsigned bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
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

// Both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void copy_in_bulk(unsigned to, const char* from, unsigned bytes, unsigned barrier, CachePolicy policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

// `threads` of the block, whole warps, meet at a barrier of their own.
__device__ __forceinline__ void wait_for_threads(int barrier, int threads)
{
    asm volatile("barrier.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
