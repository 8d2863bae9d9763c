// bfloat16 as bits: exact to float, one rounding (to nearest, ties to even) back. A *pair* is two of them in a word, the lower address in the
// lower half.

#pragma once

__device__ __forceinline__ float bf16_to_float(unsigned bits)
{
    return __uint_as_float(bits << 16);
}

__device__ __forceinline__ float low_of_pair(unsigned pair)
{
    return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float high_of_pair(unsigned pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ unsigned floats_to_pair(float low, float high)
{
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ unsigned short float_to_bf16(float value)
{
    return static_cast<unsigned short>(floats_to_pair(value, 0.0f));
}

// The quick division is 0 where the exponential is beyond 2^126, and so is x * sigmoid(x) there, to any precision that is kept.
__device__ __forceinline__ float silu(float x)
{
    return __fdividef(x, 1.0f + expf(-x));
}
