// The arithmetic of the causal convolution of a decode step, the same to the bit for every kernel that convolves: four taps a channel, oldest
// first, then SiLU, fp32 inside and one rounding.

#pragma once

#include "bf16.cuh"
#include "gpukit.cuh"

constexpr int TAPS = 4;

// Two channels in a word, or one in a half word, and their taps as one access.
template <typename Word>
struct Channels;

template <>
struct Channels<Bytes4> {
    using Taps = Bytes16;
    float low, high;

    __device__ __forceinline__ explicit Channels(Bytes4 word) : low(low_of_pair(word)), high(high_of_pair(word)) {}

    __device__ __forceinline__ static Bytes4 output(const Taps& taps, Channels a, Channels b, Channels c, Channels d)
    {
        float low = a.low * low_of_pair(taps.x);
        low = fmaf(b.low, high_of_pair(taps.x), low);
        low = fmaf(c.low, low_of_pair(taps.y), low);
        low = fmaf(d.low, high_of_pair(taps.y), low);
        float high = a.high * low_of_pair(taps.z);
        high = fmaf(b.high, high_of_pair(taps.z), high);
        high = fmaf(c.high, low_of_pair(taps.w), high);
        high = fmaf(d.high, high_of_pair(taps.w), high);
        return floats_to_pair(silu(low), silu(high));
    }
};

template <>
struct Channels<Bytes2> {
    using Taps = Bytes8;
    float value;

    __device__ __forceinline__ explicit Channels(Bytes2 word) : value(bf16_to_float(word)) {}

    __device__ __forceinline__ static Bytes2 output(const Taps& taps, Channels a, Channels b, Channels c, Channels d)
    {
        float sum = a.value * low_of_pair(taps.x);
        sum = fmaf(b.value, high_of_pair(taps.x), sum);
        sum = fmaf(c.value, low_of_pair(taps.y), sum);
        sum = fmaf(d.value, high_of_pair(taps.y), sum);
        return float_to_bf16(silu(sum));
    }
};
