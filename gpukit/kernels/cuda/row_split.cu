// Device code of row-split integers: what a plane holds stands in `kernels/row_split.py`. A thread has eight elements of a group, whose bits are
// whole bytes of every plane; the eight threads of a group (four, where a group has 32 elements) lie side by side in a warp.

#include "bf16.cuh"
#include "gpukit.cuh"
#include "half.cuh"

constexpr int THREADS = 256;
// Elements of a thread.
constexpr int OCT = 8;

template <int BITS>
struct Codes {
    static constexpr int MOST = BITS == 8 ? 127 : (1 << (BITS - 1)) - 1;
    static constexpr int LEAST = BITS == 8 ? -127 : -MOST - 1;
    // Threads of a group.
    static constexpr int LANES = (BITS == 8 ? 32 : 64) / OCT;
};

// Write the bits of eight codes.
template <int BITS>
__device__ __forceinline__ void store_codes(const int (&codes)[OCT], unsigned char* base, unsigned char* high, int64 oct)
{
    if (BITS == 8) {
        Bytes8 bytes = {};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bytes.x |= (codes[i] & 0xffu) << 8 * i;
            bytes.y |= (codes[i + 4] & 0xffu) << 8 * i;
        }
        reinterpret_cast<Bytes8*>(base)[oct] = bytes;
        return;
    }
    unsigned low = 0, upper = 0;
#pragma unroll
    for (int i = 0; i < OCT; i++) {
        low |= (codes[i] & 15u) << 4 * i;
        upper |= (codes[i] >> 4 & ((1u << (BITS & 3)) - 1)) << (BITS & 3) * i;
    }
    reinterpret_cast<Bytes4*>(base)[oct] = low;
    if (BITS == 5)
        high[oct] = static_cast<unsigned char>(upper);
    if (BITS == 6)
        reinterpret_cast<Bytes2*>(high)[oct] = static_cast<Bytes2>(upper);
}

template <int BITS>
__device__ __forceinline__ void load_codes(int (&codes)[OCT], const unsigned char* base, const unsigned char* high, int64 oct)
{
    if (BITS == 8) {
        const Bytes8 bytes = __ldg(reinterpret_cast<const Bytes8*>(base) + oct);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            codes[i] = static_cast<int>(bytes.x << (24 - 8 * i)) >> 24;
            codes[i + 4] = static_cast<int>(bytes.y << (24 - 8 * i)) >> 24;
        }
        return;
    }
    const unsigned low = __ldg(reinterpret_cast<const Bytes4*>(base) + oct);
    unsigned upper = 0;
    if (BITS == 5)
        upper = __ldg(high + oct);
    if (BITS == 6)
        upper = __ldg(reinterpret_cast<const Bytes2*>(high) + oct);
#pragma unroll
    for (int i = 0; i < OCT; i++) {
        const unsigned above = upper >> (BITS & 3) * i & ((1u << (BITS & 3)) - 1);
        codes[i] = static_cast<int>(((low >> 4 * i & 15u) | above << 4) << (32 - BITS)) >> (32 - BITS);
    }
}

// The eight threads, or four, that share a group, as bits of the warp.
template <int BITS>
__device__ __forceinline__ unsigned group_mask()
{
    constexpr unsigned lanes = (1u << Codes<BITS>::LANES) - 1;
    return lanes << (threadIdx.x & 31 & ~(Codes<BITS>::LANES - 1));
}

template <int BITS>
__device__ __forceinline__ void pack(const Bytes8* codes, unsigned char* base, unsigned char* high, int64 oct, int64 octs, int64* signal)
{
    const bool there = oct < octs;
    const Bytes8 bytes = there ? __ldg(codes + oct) : Bytes8{};
    int own[OCT];
    bool good = true;
#pragma unroll
    for (int i = 0; i < OCT; i++) {
        own[i] = static_cast<int>((i < 4 ? bytes.x : bytes.y) << (24 - 8 * (i & 3))) >> 24;
        good &= own[i] >= Codes<BITS>::LEAST && own[i] <= Codes<BITS>::MOST;
    }
    const unsigned bad = __ballot_sync(~0u, !good) & group_mask<BITS>();
    if (!there)
        return;
    if (!bad)
        store_codes<BITS>(own, base, high, oct);
    else if (oct % Codes<BITS>::LANES == 0)
        count(signal, OUT_OF_RANGE);
}

template <int BITS>
__device__ __forceinline__ void encode(
    const void* values, bool are_floats, unsigned char* base, unsigned char* high, unsigned short* scales, int64 oct, int64 octs, int64* signal)
{
    const bool there = oct < octs;
    float own[OCT];
    if (are_floats) {
        const float4* from = static_cast<const float4*>(values) + 2 * oct;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float4 part = there ? __ldg(from + half) : float4{};
            own[4 * half] = part.x;
            own[4 * half + 1] = part.y;
            own[4 * half + 2] = part.z;
            own[4 * half + 3] = part.w;
        }
    } else {
        const Bytes16 part = there ? __ldg(static_cast<const Bytes16*>(values) + oct) : Bytes16{};
        const unsigned pairs[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            own[2 * i] = low_of_pair(pairs[i]);
            own[2 * i + 1] = high_of_pair(pairs[i]);
        }
    }
    // The bits of positive numbers are ordered like them, and NaN is above all.
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < OCT; i++)
        largest = max(largest, __float_as_uint(own[i]) & 0x7fffffffu);
#pragma unroll
    for (int distance = Codes<BITS>::LANES / 2; distance; distance /= 2)
        largest = max(largest, __shfl_xor_sync(~0u, largest, distance));
    if (!there)
        return;
    const bool is_first = oct % Codes<BITS>::LANES == 0;
    unsigned short scale = float_to_half(__fdiv_rn(__uint_as_float(largest), static_cast<float>(Codes<BITS>::MOST)));
    if (scale >= 0x7c00) {
        if (is_first)
            count(signal, OUT_OF_RANGE);
        return;
    }
    if (scale == 0 && largest)
        scale = 1;
    const float reciprocal = scale ? __fdiv_rn(1.0f, half_to_float(scale)) : 0.0f;
    int codes[OCT];
#pragma unroll
    for (int i = 0; i < OCT; i++) {
        const float code = rintf(__fmul_rn(own[i], reciprocal));
        codes[i] = static_cast<int>(fminf(fmaxf(code, static_cast<float>(Codes<BITS>::LEAST)), static_cast<float>(Codes<BITS>::MOST)));
    }
    store_codes<BITS>(codes, base, high, oct);
    if (is_first)
        scales[oct / Codes<BITS>::LANES] = scale;
}

template <int BITS>
__device__ __forceinline__ void unpack(const unsigned char* base, const unsigned char* high, Bytes8* out, int64 oct)
{
    int codes[OCT];
    load_codes<BITS>(codes, base, high, oct);
    Bytes8 bytes = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        bytes.x |= (codes[i] & 0xffu) << 8 * i;
        bytes.y |= (codes[i + 4] & 0xffu) << 8 * i;
    }
    out[oct] = bytes;
}

template <int BITS>
__device__ __forceinline__ void decode(const unsigned char* base, const unsigned char* high, const unsigned short* scales, float4* out, int64 oct)
{
    int codes[OCT];
    load_codes<BITS>(codes, base, high, oct);
    const float scale = half_to_float(__ldg(scales + oct / Codes<BITS>::LANES));
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int* own = codes + 4 * half;
        out[2 * oct + half] = make_float4(__fmul_rn(own[0], scale), __fmul_rn(own[1], scale), __fmul_rn(own[2], scale), __fmul_rn(own[3], scale));
    }
}

#define FOR_BITS(bits, call)  \
    if (bits == 4) {          \
        constexpr int B = 4;  \
        call;                 \
    } else if (bits == 5) {   \
        constexpr int B = 5;  \
        call;                 \
    } else if (bits == 6) {   \
        constexpr int B = 6;  \
        call;                 \
    } else {                  \
        constexpr int B = 8;  \
        call;                 \
    }

__device__ __forceinline__ int64 own_oct()
{
    return static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
}

extern "C" __global__ void __launch_bounds__(THREADS) gpukit_pack_codes(
    const Bytes8* codes, unsigned char* base, unsigned char* high, int64 bits, int64 octs, int64* signal)
{
    FOR_BITS(bits, pack<B>(codes, base, high, own_oct(), octs, signal))
}

extern "C" __global__ void __launch_bounds__(THREADS) gpukit_unpack_codes(
    const unsigned char* base, const unsigned char* high, Bytes8* out, int64 bits, int64 octs)
{
    if (own_oct() < octs)
        FOR_BITS(bits, unpack<B>(base, high, out, own_oct()))
}

extern "C" __global__ void __launch_bounds__(THREADS) gpukit_quantize(
    const void* values, int64 are_floats, unsigned char* base, unsigned char* high, unsigned short* scales, int64 bits, int64 octs, int64* signal)
{
    FOR_BITS(bits, encode<B>(values, are_floats != 0, base, high, scales, own_oct(), octs, signal))
}

extern "C" __global__ void __launch_bounds__(THREADS) gpukit_dequantize(
    const unsigned char* base, const unsigned char* high, const unsigned short* scales, float4* out, int64 bits, int64 octs)
{
    if (own_oct() < octs)
        FOR_BITS(bits, decode<B>(base, high, scales, out, own_oct()))
}
