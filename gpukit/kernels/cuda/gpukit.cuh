// What every CUDA C subject is written with: 64-bit integers, ids of either width, a signal's counters, loads and stores that leave the
// caches to others. A kernel's parameters are all 8 bytes, addresses and `int64`, but for a last one; the entry point of kernel `name` is
// `gpukit_name`.

#pragma once

using int64 = long long;
using uint64 = unsigned long long;

// Slots of a Signal's counters, in the order of errors.SIGNAL_KINDS.
enum SignalKind { OUT_OF_RANGE, UNBOUND, REBOUND, OCCUPIED, MISMATCH, EXHAUSTED };

// Add one to a signal's counter, if there is a signal.
__device__ __forceinline__ void count(int64* signal, SignalKind kind)
{
    if (signal)
        atomicAdd(reinterpret_cast<uint64*>(signal) + kind, 1ull);
}

// Element `i` of an array of int32 (id_bytes 4) or int64 (id_bytes 8) ids that no thread of the launch writes.
__device__ __forceinline__ int64 load_id(const void* ids, int64 id_bytes, int64 i)
{
    return id_bytes == 8 ? __ldg(static_cast<const int64*>(ids) + i) : __ldg(static_cast<const int*>(ids) + i);
}

// The same behind a wait for what writes them: `__ldg` is no load that the assembler keeps behind it (seen where only some launches wait).
__device__ __forceinline__ int64 load_id_in_order(const void* ids, int64 id_bytes, int64 i)
{
    int64 wide;
    int narrow;
    if (id_bytes == 8) {
        asm volatile("ld.global.b64 %0, [%1];" : "=l"(wide) : "l"(static_cast<const int64*>(ids) + i) : "memory");
        return wide;
    }
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(narrow) : "l"(static_cast<const int*>(ids) + i) : "memory");
    return narrow;
}

// Bytes that are copied without looking at them, as one access of the widest kind.
using Bytes16 = uint4;
using Bytes8 = uint2;
using Bytes4 = unsigned int;
using Bytes2 = unsigned short;
using Bytes1 = unsigned char;

// What is read once, or not read again soon, is the first that a cache gives up: weights and state keep their place in it.
template <typename Bytes>
__device__ __forceinline__ Bytes load_streaming(const Bytes* address)
{
    return __ldcs(address);
}

template <typename Bytes>
__device__ __forceinline__ void store_streaming(Bytes* address, Bytes value)
{
    __stcs(address, value);
}

// A divisor that the host knows, with 2^32 / divisor, rounded down to 32 bits: a quotient by it is at most one short.
struct Divisor {
    unsigned value, inverse;

    __device__ __forceinline__ unsigned quotient(unsigned n) const
    {
        const unsigned low = __umulhi(n, inverse);
        return low + (n - low * value >= value);
    }
};

__device__ __forceinline__ Divisor divisor_of(int64 value, int64 inverse)
{
    return {static_cast<unsigned>(value), static_cast<unsigned>(inverse)};
}

// One of two types.
template <bool is_first, class First, class Second>
struct Choice {
    using type = First;
};

template <class First, class Second>
struct Choice<false, First, Second> {
    using type = Second;
};

// So many threads of a block meet at one of its barriers, of which the first is that of all threads.
template <int THREADS>
__device__ __forceinline__ void meet(int barrier)
{
    // The instruction is a whole warp's, and lanes may come from branches of their own.
    __syncwarp();
    asm volatile("barrier.sync.aligned %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// The same without waiting for the others.
template <int THREADS>
__device__ __forceinline__ void arrive_to_meet(int barrier)
{
    __syncwarp();
    asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

__device__ __forceinline__ unsigned shared_address(const void* at)
{
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// First thing in a kernel that may be launched before the one in front of it has ended: wait until all that was written there is to be seen.
// Nothing where it is launched the plain way.
__device__ __forceinline__ void wait_for_predecessor()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Let the next kernel come up: small kernels at once, large ones when most of the work is behind them. Earlier, the blocks of several kernels to
// come would take the places that those of the next one should be spread over (measured: a microsecond slower), unless those have something to
// read that is there already.
__device__ __forceinline__ void release_successor()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
