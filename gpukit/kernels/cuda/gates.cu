// Device code of the gates of a gated delta rule: what they promise stands in `kernels/gates.py`. A thread per token and value head.

#include "bf16.cuh"
#include "gpukit.cuh"

constexpr int THREADS = 128;

// Element `i` of an array of float (bytes 4) or bfloat16 (bytes 2) numbers.
__device__ __forceinline__ float load_number(const void* numbers, int64 bytes, int64 i)
{
    return bytes == 4 ? __ldg(static_cast<const float*>(numbers) + i) : bf16_to_float(__ldg(static_cast<const Bytes2*>(numbers) + i));
}

extern "C" __global__ void __launch_bounds__(THREADS) gpukit_gate_control(
    const void* a,        // [rows / inner_rows, inner_rows, heads]
    int64 a_bytes,
    int64 a_outer,
    int64 a_inner,
    int64 a_head,
    const void* b,        // like a
    int64 b_bytes,
    int64 b_outer,
    int64 b_inner,
    int64 b_head,
    const void* a_log,    // [heads]
    int64 a_log_bytes,
    const void* dt_bias,  // [heads]
    int64 dt_bias_bytes,
    float* g,             // like a
    int64 g_outer,
    int64 g_inner,
    int64 g_head,
    float* beta,          // like a
    int64 beta_outer,
    int64 beta_inner,
    int64 beta_head,
    int64 rows,
    int64 inner_rows,
    int64 heads)
{
    wait_for_predecessor();
    release_successor();
    const int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= rows * heads)
        return;
    // Divisions of 64 bits cost more than all the rest.
    const unsigned row = static_cast<unsigned>(i) / static_cast<unsigned>(heads);
    const unsigned head = static_cast<unsigned>(i) - row * static_cast<unsigned>(heads);
    const unsigned outer = row / static_cast<unsigned>(inner_rows);
    const unsigned inner = row - outer * static_cast<unsigned>(inner_rows);
    const float decay = load_number(a_log, a_log_bytes, head);
    const float bias = load_number(dt_bias, dt_bias_bytes, head);
    const float x = load_number(a, a_bytes, outer * a_outer + inner * a_inner + head * a_head) + bias;
    const float y = load_number(b, b_bytes, outer * b_outer + inner * b_inner + head * b_head);
    const float softplus = x > 20.0f ? x : log1pf(expf(x));
    g[outer * g_outer + inner * g_inner + head * g_head] = -expf(decay) * softplus;
    beta[outer * beta_outer + inner * beta_inner + head * beta_head] = 1.0f / (1.0f + expf(-y));
}
