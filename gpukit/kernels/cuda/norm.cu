// Device code of the norms: what they promise stands in `kernels/norm.py`. A group of threads, a power of two, takes a row: everything that the
// row needs is loaded before its sum of squares is known, so that one trip to memory is waited for.

#include "bf16.cuh"
#include "gpukit.cuh"

constexpr int MOST_THREADS = 512;
// Vectors of 8 elements that a thread holds: rows of 8,192 elements stay in registers.
constexpr int STEPS = 2;

// Sum over the threads of a group, the same on every thread and in the same order always. Every thread of the block calls it.
__device__ __forceinline__ float group_sum(float sum, int group_shift)
{
    __shared__ float partial[MOST_THREADS / 32];
#pragma unroll
    for (int bit = 4; bit >= 0; bit--)
        if (bit < group_shift)
            sum += __shfl_xor_sync(0xffffffffu, sum, 1 << bit);
    if (group_shift > 5) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = 1 << (group_shift - 5);
        if (lane == 0)
            partial[warp] = sum;
        __syncthreads();
        sum = lane < warps ? partial[(warp & -warps) + lane] : 0.0f;
#pragma unroll
        for (int bit = 4; bit >= 0; bit--)
            sum += __shfl_xor_sync(0xffffffffu, sum, 1 << bit);
    }
    return sum;
}

__device__ __forceinline__ float normed(float x, float weight, float scale, bool offset)
{
    return x * scale * (offset ? 1.0f + weight : weight);
}

__device__ __forceinline__ float square_sum(unsigned pair, float sum)
{
    return fmaf(high_of_pair(pair), high_of_pair(pair), fmaf(low_of_pair(pair), low_of_pair(pair), sum));
}

__device__ __forceinline__ unsigned norm_pair(unsigned x, unsigned weight, unsigned gate, float scale, bool offset, bool gated)
{
    float low = normed(low_of_pair(x), low_of_pair(weight), scale, offset);
    float high = normed(high_of_pair(x), high_of_pair(weight), scale, offset);
    if (gated) {
        low *= silu(low_of_pair(gate));
        high *= silu(high_of_pair(gate));
    }
    return floats_to_pair(low, high);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 2) gpukit_rms_norm(
    const Bytes2* x,       // [rows / inner_rows, inner_rows, width]
    int64 x_outer,
    int64 x_inner,
    const Bytes2* gate,    // like x; 0 for none
    int64 gate_outer,
    int64 gate_inner,
    const Bytes2* weight,  // [width]
    Bytes2* out,           // like x, perhaps x or gate themselves
    int64 out_outer,
    int64 out_inner,
    int64 rows,
    int64 inner_rows,
    int64 width,
    int64 in_vectors,      // whether accesses of 8 elements fit everywhere and a thread holds its share of a row
    int64 group_shift,
    double epsilon,
    int64 offset)
{
    wait_for_predecessor();
    release_successor();
    const unsigned group = 1u << group_shift;
    const unsigned lane = threadIdx.x & (group - 1);
    const int64 row = static_cast<int64>(blockIdx.x) * (blockDim.x >> group_shift) + (threadIdx.x >> group_shift);
    const bool live = row < rows;
    // Rows are fewer than 2^31; a division of 64 bits would cost as much as the norm.
    const int64 outer = static_cast<unsigned>(row) / static_cast<unsigned>(inner_rows);
    const int64 inner = row - outer * inner_rows;
    x += outer * x_outer + inner * x_inner;
    const bool gated = gate != nullptr;
    gate += outer * gate_outer + inner * gate_inner;
    out += outer * out_outer + inner * out_inner;
    const float inverse_width = 1.0f / static_cast<float>(width);
    float sum = 0.0f;
    if (in_vectors) {
        const unsigned vectors = static_cast<unsigned>(width >> 3);
        Bytes16 held[STEPS], weights[STEPS], gates[STEPS];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const unsigned vector = lane + step * group;
            held[step] = gates[step] = weights[step] = make_uint4(0, 0, 0, 0);
            if (live && vector < vectors) {
                held[step] = reinterpret_cast<const Bytes16*>(x)[vector];
                weights[step] = __ldg(reinterpret_cast<const Bytes16*>(weight) + vector);
                if (gated)
                    gates[step] = reinterpret_cast<const Bytes16*>(gate)[vector];
            }
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            sum = square_sum(held[step].x, sum);
            sum = square_sum(held[step].y, sum);
            sum = square_sum(held[step].z, sum);
            sum = square_sum(held[step].w, sum);
        }
        const float scale = rsqrtf(fmaf(group_sum(sum, group_shift), inverse_width, static_cast<float>(epsilon)));
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const unsigned vector = lane + step * group;
            if (live && vector < vectors) {
                const Bytes16 w = weights[step], g = gates[step];
                Bytes16 result = held[step];
                result.x = norm_pair(result.x, w.x, g.x, scale, offset, gated);
                result.y = norm_pair(result.y, w.y, g.y, scale, offset, gated);
                result.z = norm_pair(result.z, w.z, g.z, scale, offset, gated);
                result.w = norm_pair(result.w, w.w, g.w, scale, offset, gated);
                reinterpret_cast<Bytes16*>(out)[vector] = result;
            }
        }
        return;
    }
    for (int64 i = lane; live && i < width; i += group)
        sum = fmaf(bf16_to_float(x[i]), bf16_to_float(x[i]), sum);
    const float scale = rsqrtf(fmaf(group_sum(sum, group_shift), inverse_width, static_cast<float>(epsilon)));
    for (int64 i = lane; live && i < width; i += group) {
        float value = normed(bf16_to_float(x[i]), bf16_to_float(weight[i]), scale, offset);
        if (gated)
            value *= silu(bf16_to_float(gate[i]));
        out[i] = float_to_bf16(value);
    }
}
