// Device code of the gated delta rule: what the ops promise stands in `kernels/gated_delta.py`. A lane holds four neighbours along K of
// ROWS rows of V, so a state is read and written in accesses of 16 bytes and a sum along K is a sum over lanes: 32 of them for K = 128, the
// 16 of half a warp for K = 64. `advance` takes a state past one token, for every kernel that writes states. Each of its operations is
// spelled out, and a sum over lanes has the same tree whatever else is summed beside it, so states are the same to the bit whoever
// computes them.

#include "gpukit.cuh"
#include "bf16.cuh"

using Bits = unsigned short;  // of a bfloat16

constexpr int WARPS = 4;
// More of them share what a verification does once a block.
constexpr int RECORD_WARPS = 8;
// Rows of V in the registers of a lane. Several tokens in a row make a fold short of issue slots: more rows share what a key costs.
constexpr int ROWS = 4;
constexpr int FOLD_ROWS = 8;
// Blocks side by side on a multiprocessor: 48 KB of state in flight or more, where the memory of an H200 needs about 40. The compiler
// spills a few registers for sm_120, if it is to have eight.
constexpr int DIRECT_BLOCKS = __CUDA_ARCH__ < 1200 ? 8 : 7;
constexpr int RECORD_BLOCKS = 3;
constexpr int FOLD_BLOCKS = 5;
constexpr int MOST_TOKENS = 16;
constexpr float EPSILON = 1e-6f;

template <int DIM>
struct Shape {
    static constexpr int lanes = DIM / 4;      // along a row
    static constexpr int groups = 32 / lanes;  // of lanes in a warp, each with rows of its own
};

// Which sequence, value head and rows a block works on, and which part of them a thread holds.
template <int DIM, int WARPS, int ROWS>
struct Place {
    static constexpr int threads = 32 * WARPS;
    static constexpr int rows = WARPS * Shape<DIM>::groups * ROWS;  // of a block
    static constexpr int tiles = DIM / rows;                        // blocks of a head

    int64 item;  // sequence of the batch, or row of the log, after all layers before
    int head;
    int tile;
    int lane;      // along K
    int first_row; // of the thread

    __device__ __forceinline__ Place(unsigned block, unsigned heads)
    {
        tile = block % tiles;
        block /= tiles;
        head = block % heads;
        item = block / heads;
        lane = threadIdx.x % Shape<DIM>::lanes;
        first_row = tile * rows + threadIdx.x / Shape<DIM>::lanes * ROWS;
    }

    // Element of a state [heads, V, K] where the thread's first row begins.
    __device__ __forceinline__ int64 state() const
    {
        return (static_cast<int64>(head) * DIM + first_row) * DIM + 4 * lane;
    }

    // Whether this thread speaks for its item where something is counted.
    __device__ __forceinline__ bool is_first() const
    {
        return head == 0 && tile == 0 && threadIdx.x == 0;
    }
};

__device__ __forceinline__ float4 widen(uint2 four)
{
    return make_float4(low_of_pair(four.x), high_of_pair(four.x), low_of_pair(four.y), high_of_pair(four.y));
}

__device__ __forceinline__ float dot(float4 a, float4 b)
{
    return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmul_rn(a.x, b.x))));
}

// COUNT sums over 2 * MASK lanes at once: the halves exchange half of the values each, until lane i holds sum i * COUNT / (2 * MASK). The
// tree of every sum is that of a butterfly from MASK down to 1. Recursion, because an array indexed at run time would live in memory.
template <int MASK, int COUNT>
__device__ __forceinline__ float sum_lanes(const float (&values)[COUNT])
{
    if constexpr (MASK == 0) {
        return values[0];
    } else if constexpr (COUNT == 1) {
        const float sum[1] = {__fadd_rn(values[0], __shfl_xor_sync(0xffffffffu, values[0], MASK))};
        return sum_lanes<MASK / 2>(sum);
    } else {
        const bool is_upper = threadIdx.x & MASK;
        float kept[COUNT / 2];
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
            const float given = is_upper ? values[i] : values[i + COUNT / 2];
            kept[i] = __fadd_rn(is_upper ? values[i + COUNT / 2] : values[i], __shfl_xor_sync(0xffffffffu, given, MASK));
        }
        return sum_lanes<MASK / 2>(kept);
    }
}

// What a lane needs of a token: its four of the key (and the query), the value of the row whose sum it will hold, the gates.
struct Token {
    uint2 k;
    uint2 q;
    Bits v;
    float g;
    float beta;
};

// The row, counted from the thread's first, whose sum along the key ends in this lane; with outputs the sums along the query follow in the
// upper half of the lanes, in the same order.
template <int DIM, bool outputs, int ROWS>
__device__ __forceinline__ int row_of_lane(int lane)
{
    constexpr int lanes = Shape<DIM>::lanes / (outputs ? 2 : 1);
    return lane % lanes / (lanes / ROWS);
}

// Take the state past a token. Returns the output of row `row_of_lane` in the upper half of the lanes, where outputs are asked for: taken
// from the old state in the same pass, as a (S q) + d (k q).
template <int DIM, bool outputs, int ROWS>
__device__ __forceinline__ float advance(float4 (&state)[ROWS], const Token& token, int lane, bool normalize, float scale)
{
    constexpr int LANES = Shape<DIM>::lanes;
    constexpr int SUMS = outputs ? 2 * ROWS : ROWS;
    const float4 k = widen(token.k);
    const float4 q = outputs ? widen(token.q) : k;
    float along[SUMS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        along[r] = dot(state[r], k);
        if constexpr (outputs)
            along[ROWS + r] = dot(state[r], q);
    }
    const float held = sum_lanes<LANES / 2>(along);
    float kk, qq = 0.0f, kq = 0.0f;
    if constexpr (outputs) {
        const float products[4] = {dot(k, k), dot(q, q), dot(k, q), 0.0f};
        const float product = sum_lanes<LANES / 2>(products);
        kk = __shfl_sync(0xffffffffu, product, 0, LANES);
        qq = __shfl_sync(0xffffffffu, product, LANES / 4, LANES);
        kq = __shfl_sync(0xffffffffu, product, LANES / 2, LANES);
    } else {
        const float products[1] = {dot(k, k)};
        kk = sum_lanes<LANES / 2>(products);
    }
    // Sums are taken with the raw key, and scaled after: the norm is then not waited for.
    const float key_scale = normalize ? rsqrtf(__fadd_rn(kk, EPSILON)) : 1.0f;
    const float decay = expf(token.g);
    const float d = __fmul_rn(token.beta, __fmaf_rn(-decay, __fmul_rn(key_scale, held), bf16_to_float(token.v)));
    const float weight = __fmul_rn(d, key_scale);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float w = __shfl_sync(0xffffffffu, weight, r * (LANES / SUMS), LANES);
        state[r].x = __fmaf_rn(w, k.x, __fmul_rn(decay, state[r].x));
        state[r].y = __fmaf_rn(w, k.y, __fmul_rn(decay, state[r].y));
        state[r].z = __fmaf_rn(w, k.z, __fmul_rn(decay, state[r].z));
        state[r].w = __fmaf_rn(w, k.w, __fmul_rn(decay, state[r].w));
    }
    if constexpr (outputs) {
        const float query_scale = normalize ? rsqrtf(__fadd_rn(qq, EPSILON)) : 1.0f;
        const float w = __shfl_sync(0xffffffffu, weight, lane % (LANES / 2), LANES);
        return scale * (query_scale * __fmaf_rn(decay, held, w * kq));
    }
    return 0.0f;
}

template <int DIM, int ROWS>
__device__ __forceinline__ void load_state(float4 (&state)[ROWS], const float* from)
{
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        state[r] = load_streaming(reinterpret_cast<const float4*>(from + r * DIM));
}

template <int DIM, int ROWS>
__device__ __forceinline__ void store_state(const float4 (&state)[ROWS], float* to)
{
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        store_streaming(reinterpret_cast<float4*>(to + r * DIM), state[r]);
}

// Whether the destination of an item is the source or destination of another one: neither must be written then.
__device__ __forceinline__ bool is_taken(const void* source, const void* destination, int64 id_bytes, int64 items, int64 slots, int64 item, int64 to)
{
    bool taken = false;
#pragma unroll 1
    for (int64 i = threadIdx.x; i < items; i += blockDim.x) {
        const int64 s = load_id(source, id_bytes, i);
        const int64 d = load_id(destination, id_bytes, i);
        taken |= i != item && s >= 0 && s < slots && d >= 0 && d < slots && (s == to || d == to);
    }
    return taken;
}

// The inputs of a batch of sequences; strides in elements.
struct Batch {
    const Bits* q;     // [B, T, Hk, K]
    int64 q_batch, q_token;
    const Bits* k;     // [B, T, Hk, K]
    int64 k_batch, k_token;
    const Bits* v;     // [B, T, Hv, V]
    int64 v_batch, v_token;
    const float* g;    // [B, T, Hv]
    int64 g_batch, g_token;
    const float* beta; // [B, T, Hv]
    int64 beta_batch, beta_token;
    Bits* out;         // [B, T, Hv, V]
    int64 items, tokens, key_heads, heads;
};

template <int DIM, int WARPS, int ROWS>
__device__ __forceinline__ Token load_token(const Batch& batch, const Place<DIM, WARPS, ROWS>& place, int64 t)
{
    const int64 key = place.head / (static_cast<unsigned>(batch.heads) / static_cast<unsigned>(batch.key_heads)) * DIM + 4 * place.lane;
    const int row = place.first_row + row_of_lane<DIM, true, ROWS>(place.lane);
    Token token;
    token.k = __ldg(reinterpret_cast<const uint2*>(batch.k + place.item * batch.k_batch + t * batch.k_token + key));
    token.q = __ldg(reinterpret_cast<const uint2*>(batch.q + place.item * batch.q_batch + t * batch.q_token + key));
    token.v = __ldg(batch.v + place.item * batch.v_batch + t * batch.v_token + place.head * DIM + row);
    token.g = __ldg(batch.g + place.item * batch.g_batch + t * batch.g_token + place.head);
    token.beta = __ldg(batch.beta + place.item * batch.beta_batch + t * batch.beta_token + place.head);
    return token;
}

// Zero the outputs of a block from a token on.
template <int DIM, int WARPS, int ROWS>
__device__ __forceinline__ void clear_outputs(const Batch& batch, const Place<DIM, WARPS, ROWS>& place, int64 first)
{
    constexpr int rows = Place<DIM, WARPS, ROWS>::rows;
    for (int64 i = first * rows + threadIdx.x; i < batch.tokens * rows; i += place.threads)
        batch.out[((place.item * batch.tokens + i / rows) * batch.heads + place.head) * DIM + place.tile * rows + i % rows] = 0;
}

template <int DIM>
__device__ __forceinline__ void direct(
    const Batch& batch, float* pool, int64 slot_stride, int64 slots, const void* source, const void* destination, int64 id_bytes,
    float scale, bool normalize, int64* signal)
{
    constexpr int LANES = Shape<DIM>::lanes;
    Place<DIM, WARPS, ROWS> place(blockIdx.x, static_cast<unsigned>(batch.heads));
    const int64 from = load_id(source, id_bytes, place.item);
    const int64 to = load_id(destination, id_bytes, place.item);
    Token token = load_token(batch, place, 0);
    const bool is_padding = from < 0 || to < 0;
    if (is_padding || from >= slots || to >= slots) {
        if (!is_padding && place.is_first())
            count(signal, OUT_OF_RANGE);
        return clear_outputs(batch, place, 0);
    }
    float4 state[ROWS];
    load_state<DIM>(state, pool + from * slot_stride + place.state());
    if (batch.items > 1 && __syncthreads_or(is_taken(source, destination, id_bytes, batch.items, slots, place.item, to))) {
        if (place.is_first())
            count(signal, OCCUPIED);
        return clear_outputs(batch, place, 0);
    }
    const bool writes = place.lane >= LANES / 2 && place.lane % (LANES / (2 * ROWS)) == 0;
    const int tokens = static_cast<int>(batch.tokens);
#pragma unroll 1
    for (int t = 0; t < tokens; t++) {
        // Hides where the number comes from, or the addresses of all inputs are kept through the loop and spilled.
        asm volatile("" : "+l"(place.item));
        Token next = token;
        if (t + 1 < tokens)
            next = load_token(batch, place, t + 1);
        const float output = advance<DIM, true>(state, token, place.lane, normalize, scale);
        if (writes)
            batch.out[((place.item * batch.tokens + t) * batch.heads + place.head) * DIM + place.first_row +
                      row_of_lane<DIM, true, ROWS>(place.lane)] = float_to_bf16(output);
        token = next;
    }
    store_state<DIM>(state, pool + to * slot_stride + place.state());
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, DIRECT_BLOCKS) gpukit_direct(
    const Bits* q, int64 q_batch, int64 q_token,
    const Bits* k, int64 k_batch, int64 k_token,
    const Bits* v, int64 v_batch, int64 v_token,
    const float* g, int64 g_batch, int64 g_token,
    const float* beta, int64 beta_batch, int64 beta_token,
    Bits* out,
    int64 items, int64 tokens, int64 key_heads, int64 heads, int64 dim,
    float* pool,              // [slots, Hv, V, K] of the layer
    int64 slot_stride,
    int64 slots,
    const void* source,       // [B]
    const void* destination,  // [B]
    int64 id_bytes,
    int64 scale,              // bits of a float, which then needs no register
    int64 normalize,
    int64* signal)
{
    const Batch batch{q, q_batch, q_token, k, k_batch, k_token, v, v_batch, v_token, g, g_batch, g_token, beta, beta_batch, beta_token,
                      out, items, tokens, key_heads, heads};
    if (dim == 128)
        direct<128>(batch, pool, slot_stride, slots, source, destination, id_bytes, __int_as_float(static_cast<int>(scale)), normalize, signal);
    else
        direct<64>(batch, pool, slot_stride, slots, source, destination, id_bytes, __int_as_float(static_cast<int>(scale)), normalize, signal);
}

// A log of one layer, or of all.
struct Log {
    Bits* k;       // [rows, W, Hk, K]
    Bits* v;       // [rows, W, Hv, V]
    float2* gates; // [rows, W, Hv], (g, beta)
    int64 width, key_heads, heads;
};

// `place.item` is the row of the log.
template <int DIM, int WARPS, int ROWS>
__device__ __forceinline__ Token load_token(const Log& log, const Place<DIM, WARPS, ROWS>& place, int64 t)
{
    const int64 entry = place.item * log.width + t;
    const int key_head = place.head / (static_cast<unsigned>(log.heads) / static_cast<unsigned>(log.key_heads));
    const float2 gates = __ldg(log.gates + entry * log.heads + place.head);
    Token token;
    token.k = __ldg(reinterpret_cast<const uint2*>(log.k + (entry * log.key_heads + key_head) * DIM + 4 * place.lane));
    token.q = token.k;
    token.v = __ldg(log.v + (entry * log.heads + place.head) * DIM + place.first_row + row_of_lane<DIM, false, ROWS>(place.lane));
    token.g = gates.x;
    token.beta = gates.y;
    return token;
}

// Take the state past the first `m` tokens of a log. What lies behind them is not read.
template <int DIM, int WARPS, int ROWS>
__device__ __forceinline__ void replay(
    float4 (&state)[ROWS], Token token, const Log& log, const Place<DIM, WARPS, ROWS>& place, int64 m, bool normalize)
{
#pragma unroll 1
    for (int64 t = 0; t < m; t++) {
        Token next = token;
        if (t + 1 < m)
            next = load_token(log, place, t + 1);
        advance<DIM, false>(state, token, place.lane, normalize, 1.0f);
        token = next;
    }
}

// What the threads of a verification tell each other. Products are of raw keys and queries until they become coefficients.
struct Scratch {
    Bytes16 keys[MOST_TOKENS * 128 / 8];
    Bytes16 queries[MOST_TOKENS * 128 / 8];
    float key_key[MOST_TOKENS][MOST_TOKENS];      // [t][s], then beta_t decay(s … t) kn_s·kn_t
    float key_query[MOST_TOKENS][MOST_TOKENS];    // [t][s], then scale decay(s … t) kn_s·qn_t
    float key_scale[MOST_TOKENS];
    float query_scale[MOST_TOKENS];
    float g[MOST_TOKENS];
    float beta[MOST_TOKENS];
    float from_key[MOST_TOKENS];                  // factor of S·k_t
    float from_query[MOST_TOKENS];                // factor of S·q_t
    float values[MOST_TOKENS][64];                // [t][row]
    float along[2][64][MOST_TOKENS + 1];          // S·k_t, then d_t; S·q_t
};

// Four of a token's key or query, as a lane wants them.
template <int DIM>
__device__ __forceinline__ float4 four(const Bytes16* vectors, int t, int lane)
{
    return widen(reinterpret_cast<const uint2*>(vectors)[t * (DIM / 4) + lane]);
}

// The products of all keys with all keys and queries up to their own token.
template <int DIM>
__device__ __forceinline__ void multiply_tokens(Scratch& shared, int tokens, int lane, bool normalize)
{
    constexpr int LANES = Shape<DIM>::lanes;
    constexpr int GROUPS = Shape<DIM>::groups;
    const int warp = threadIdx.x / 32;
    const int group = threadIdx.x % 32 / LANES;
    int turn = 0;
#pragma unroll 1
    for (int first_t = 0; first_t < tokens; first_t += GROUPS)
#pragma unroll 1
        for (int first_s = 0; first_s < min(first_t + GROUPS, tokens); first_s += 4) {
            if (turn++ % RECORD_WARPS != warp)
                continue;
            const int t = min(first_t + group, tokens - 1);
            const float4 k = four<DIM>(shared.keys, t, lane);
            const float4 q = four<DIM>(shared.queries, t, lane);
            float products[8];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float4 other = four<DIM>(shared.keys, min(first_s + i, tokens - 1), lane);
                products[i] = dot(other, k);
                products[4 + i] = dot(other, q);
            }
            const float product = sum_lanes<LANES / 2>(products);
            const float squares[1] = {dot(q, q)};
            const float square = sum_lanes<LANES / 2>(squares);
            const int sum = lane / (LANES / 8);
            const int s = first_s + sum % 4;
            if (lane % (LANES / 8) == 0 && s <= t) {
                if (sum >= 4)
                    shared.key_query[t][s] = product;
                else if (s < t)
                    shared.key_key[t][s] = product;
                else {
                    shared.key_scale[t] = normalize ? rsqrtf(product + EPSILON) : 1.0f;
                    shared.query_scale[t] = normalize ? rsqrtf(square + EPSILON) : 1.0f;
                }
            }
        }
}

// Products to coefficients of the triangular systems d_t = beta_t v_t - from_key_t S·k_t - sum of key_key_ts d_s over s < t and
// o_t = from_query_t S·q_t + sum of key_query_ts d_s over s <= t.
__device__ __forceinline__ void make_coefficients(Scratch& shared, int tokens, float scale)
{
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * MOST_TOKENS; i += 32 * RECORD_WARPS) {
        const int t = i / MOST_TOKENS, s = i % MOST_TOKENS;
        if (s > t)
            continue;
        float between = 0.0f;
#pragma unroll 1
        for (int j = s + 1; j <= t; j++)
            between += shared.g[j];
        const float decay = expf(between);
        shared.key_query[t][s] *= scale * decay * shared.key_scale[s] * shared.query_scale[t];
        if (s < t)
            shared.key_key[t][s] *= shared.beta[t] * decay * shared.key_scale[s] * shared.key_scale[t];
        if (s == 0) {
            const float whole = decay * expf(shared.g[0]);
            shared.from_key[t] = shared.beta[t] * whole * shared.key_scale[t];
            shared.from_query[t] = scale * whole * shared.query_scale[t];
        }
    }
}

// Verification: all products with the state are independent of each other, and tokens meet in triangular systems of T equations (the WY
// form), so that the chain is that of one token. With a previous log the state is first taken past its accepted tokens and stored.
template <int DIM, bool folds>
__device__ __forceinline__ void record(
    Scratch& shared, const Batch& batch, float* pool, int64 slot_stride, int64 slots, const void* source, int64 id_bytes, const void* valid,
    int64 valid_bytes, const Log& log, const Log& previous, const void* accepted, int64 accepted_bytes, float scale, bool normalize,
    int64* signal)
{
    constexpr int LANES = Shape<DIM>::lanes;
    constexpr int THREADS = 32 * RECORD_WARPS;
    constexpr int TILE = Place<DIM, RECORD_WARPS, ROWS>::rows;
    constexpr int VECTORS = DIM / 8;  // of 16 bytes in a key
    constexpr int VECTOR_STEPS = 2 * MOST_TOKENS * VECTORS / THREADS;
    constexpr int VALUE_STEPS = MOST_TOKENS * TILE / THREADS;
    constexpr int CHUNK = LANES / (2 * ROWS);  // tokens whose sums fill the lanes
    const Place<DIM, RECORD_WARPS, ROWS> place(blockIdx.x, static_cast<unsigned>(batch.heads));
    const unsigned group = static_cast<unsigned>(batch.heads) / static_cast<unsigned>(batch.key_heads);
    const int key_head = place.head / group;
    const int64 slot = load_id(source, id_bytes, place.item);
    const int64 m = folds ? load_id(accepted, accepted_bytes, place.item) : 0;
    const int64 limit = valid ? load_id(valid, valid_bytes, place.item) : batch.tokens;
    const int tokens = static_cast<int>(max(0ll, min(limit, batch.tokens)));
    const bool is_bad = slot >= slots || m < 0 || (folds && m > previous.width);
    if (slot < 0 || is_bad) {
        if (slot >= 0 && place.is_first())
            count(signal, OUT_OF_RANGE);
        return clear_outputs(batch, place, 0);
    }

    // Everything is on its way before anything is waited for. Keys and queries of T tokens as one run of vectors.
    Bytes16 vectors[VECTOR_STEPS];
#pragma unroll
    for (int step = 0; step < VECTOR_STEPS; step++) {
        const int i = step * THREADS + threadIdx.x;
        const int t = i / (2 * VECTORS);
        const int part = i % VECTORS;
        if (t < tokens) {
            const Bits* key = batch.k + place.item * batch.k_batch + t * batch.k_token;
            const Bits* query = batch.q + place.item * batch.q_batch + t * batch.q_token;
            vectors[step] = __ldg(reinterpret_cast<const Bytes16*>((i / VECTORS % 2 ? query : key) + key_head * DIM) + part);
        }
    }
    float4 state[ROWS];
    float* at = pool + slot * slot_stride + place.state();
    load_state<DIM>(state, at);
    Token logged{};
    if (folds && m > 0)
        logged = load_token(previous, place, 0);
    Bits values[VALUE_STEPS];
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; step++) {
        const int i = step * THREADS + threadIdx.x;
        if (i / TILE < tokens)
            values[step] = __ldg(batch.v + place.item * batch.v_batch + i / TILE * batch.v_token + place.head * DIM + place.tile * TILE + i % TILE);
    }
    float2 gates{};
    if (threadIdx.x < tokens) {
        gates.x = __ldg(batch.g + place.item * batch.g_batch + threadIdx.x * batch.g_token + place.head);
        gates.y = __ldg(batch.beta + place.item * batch.beta_batch + threadIdx.x * batch.beta_token + place.head);
    }
    if (folds && batch.items > 1 && __syncthreads_or(is_taken(source, source, id_bytes, batch.items, slots, place.item, slot))) {
        if (place.is_first())
            count(signal, OCCUPIED);
        return clear_outputs(batch, place, 0);
    }

    const int64 entry = place.item * log.width;
    const bool logs_keys = place.tile == 0 && place.head % group == 0;
#pragma unroll
    for (int step = 0; step < VECTOR_STEPS; step++) {
        const int i = step * THREADS + threadIdx.x;
        const int t = i / (2 * VECTORS);
        const int part = i % VECTORS;
        if (t < tokens) {
            const bool is_query = i / VECTORS % 2;
            (is_query ? shared.queries : shared.keys)[t * VECTORS + part] = vectors[step];
            if (logs_keys && !is_query)
                reinterpret_cast<Bytes16*>(log.k + ((entry + t) * log.key_heads + key_head) * DIM)[part] = vectors[step];
        }
    }
    if (threadIdx.x < tokens) {
        shared.g[threadIdx.x] = gates.x;
        shared.beta[threadIdx.x] = gates.y;
        if (place.tile == 0)
            log.gates[(entry + threadIdx.x) * log.heads + place.head] = gates;
    }
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; step++) {
        const int i = step * THREADS + threadIdx.x;
        if (i / TILE < tokens) {
            shared.values[i / TILE][i % TILE] = bf16_to_float(values[step]);
            log.v[((entry + i / TILE) * log.heads + place.head) * DIM + place.tile * TILE + i % TILE] = values[step];
        }
    }
    __syncthreads();
    multiply_tokens<DIM>(shared, tokens, place.lane, normalize);
    __syncthreads();
    make_coefficients(shared, tokens, scale);

    if (folds && m > 0) {
        replay(state, logged, previous, place, m, normalize);
        store_state<DIM>(state, at);
    }
#pragma unroll 1
    for (int first = 0; first < tokens; first += CHUNK) {
        float along[LANES];
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            const int t = min(first + i, tokens - 1);
            const float4 k = four<DIM>(shared.keys, t, place.lane);
            const float4 q = four<DIM>(shared.queries, t, place.lane);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                along[2 * i * ROWS + r] = dot(state[r], k);
                along[(2 * i + 1) * ROWS + r] = dot(state[r], q);
            }
        }
        const float held = sum_lanes<LANES / 2>(along);
        const int t = first + place.lane / (2 * ROWS);
        if (t < tokens)
            shared.along[place.lane / ROWS % 2][place.first_row % TILE + place.lane % ROWS][t] = held;
    }
    __syncthreads();
    if (threadIdx.x < TILE) {
        const int row = threadIdx.x;
        float d[MOST_TOKENS];
#pragma unroll
        for (int t = 0; t < MOST_TOKENS; t++)
            if (t < tokens) {
                float rest = shared.beta[t] * shared.values[t][row] - shared.from_key[t] * shared.along[0][row][t];
#pragma unroll
                for (int s = 0; s < t; s++)
                    rest -= shared.key_key[t][s] * d[s];
                d[t] = rest;
                shared.along[0][row][t] = rest;
            }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * TILE; i += THREADS) {
        const int t = i / TILE;
        const int row = i % TILE;
        float output = shared.from_query[t] * shared.along[1][row][t];
#pragma unroll 4
        for (int s = 0; s <= t; s++)
            output += shared.key_query[t][s] * shared.along[0][row][s];
        batch.out[((place.item * batch.tokens + t) * batch.heads + place.head) * DIM + place.tile * TILE + row] = float_to_bf16(output);
    }
    clear_outputs(batch, place, tokens);
}

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_record(
    const Bits* q, int64 q_batch, int64 q_token,
    const Bits* k, int64 k_batch, int64 k_token,
    const Bits* v, int64 v_batch, int64 v_token,
    const float* g, int64 g_batch, int64 g_token,
    const float* beta, int64 beta_batch, int64 beta_token,
    Bits* out,
    int64 items, int64 tokens, int64 key_heads, int64 heads, int64 dim,
    float* pool,           // [slots, Hv, V, K] of the layer, only read
    int64 slot_stride,
    int64 slots,
    const void* source,    // [B]
    int64 id_bytes,
    const void* valid,     // [B] or null
    int64 valid_bytes,
    Bits* log_k,           // of the layer
    Bits* log_v,
    float2* log_gates,
    int64 width,
    int64 scale,              // bits of a float, which then needs no register
    int64 normalize,
    int64* signal)
{
    __shared__ Scratch shared;
    const Batch batch{q, q_batch, q_token, k, k_batch, k_token, v, v_batch, v_token, g, g_batch, g_token, beta, beta_batch, beta_token,
                      out, items, tokens, key_heads, heads};
    const Log log{log_k, log_v, log_gates, width, key_heads, heads};
    if (dim == 128)
        record<128, false>(shared, batch, pool, slot_stride, slots, source, id_bytes, valid, valid_bytes, log, log, nullptr, 0,
                           __int_as_float(static_cast<int>(scale)), normalize, signal);
    else
        record<64, false>(shared, batch, pool, slot_stride, slots, source, id_bytes, valid, valid_bytes, log, log, nullptr, 0,
                          __int_as_float(static_cast<int>(scale)), normalize, signal);
}

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_fold_record(
    const Bits* q, int64 q_batch, int64 q_token,
    const Bits* k, int64 k_batch, int64 k_token,
    const Bits* v, int64 v_batch, int64 v_token,
    const float* g, int64 g_batch, int64 g_token,
    const float* beta, int64 beta_batch, int64 beta_token,
    Bits* out,
    int64 items, int64 tokens, int64 key_heads, int64 heads, int64 dim,
    float* pool,            // [slots, Hv, V, K] of the layer
    int64 slot_stride,
    int64 slots,
    const void* source,     // [B]
    int64 id_bytes,
    const void* valid,      // [B] or null
    int64 valid_bytes,
    Bits* log_k,            // of the layer
    Bits* log_v,
    float2* log_gates,
    int64 width,
    Bits* previous_k,       // of the layer
    Bits* previous_v,
    float2* previous_gates,
    int64 previous_width,
    const void* accepted,   // [B]
    int64 scale,              // bits of a float, which then needs no register
    int64 flags,            // 1: normalize, 2: `accepted` is int64
    int64* signal)
{
    __shared__ Scratch shared;
    const Batch batch{q, q_batch, q_token, k, k_batch, k_token, v, v_batch, v_token, g, g_batch, g_token, beta, beta_batch, beta_token,
                      out, items, tokens, key_heads, heads};
    const Log log{log_k, log_v, log_gates, width, key_heads, heads};
    const Log previous{previous_k, previous_v, previous_gates, previous_width, key_heads, heads};
    const int64 accepted_bytes = flags & 2 ? 8 : 4;
    if (dim == 128)
        record<128, true>(shared, batch, pool, slot_stride, slots, source, id_bytes, valid, valid_bytes, log, previous, accepted,
                          accepted_bytes, __int_as_float(static_cast<int>(scale)), flags & 1, signal);
    else
        record<64, true>(shared, batch, pool, slot_stride, slots, source, id_bytes, valid, valid_bytes, log, previous, accepted,
                         accepted_bytes, __int_as_float(static_cast<int>(scale)), flags & 1, signal);
}

// What becomes of a row of the log: where its state comes from and goes to, and how many tokens it is taken past.
struct Commit {
    int64 from;
    int64 to;
    int64 m;

    __device__ __forceinline__ Commit(const void* rows, int64 id_bytes, int64 row)
    {
        from = load_id(rows, id_bytes, 3 * row);
        to = load_id(rows, id_bytes, 3 * row + 1);
        m = load_id(rows, id_bytes, 3 * row + 2);
    }

    __device__ __forceinline__ bool is_idle() const
    {
        return from < 0 || to < 0 || (m == 0 && from == to);
    }

    __device__ __forceinline__ bool is_valid(int64 slots, int64 width) const
    {
        return from < slots && to < slots && m >= 0 && m <= width;
    }
};

__device__ __forceinline__ bool is_taken(const void* rows, int64 id_bytes, int64 count, int64 slots, int64 width, int64 row, int64 to)
{
    bool taken = false;
#pragma unroll 1
    for (int64 i = threadIdx.x; i < count; i += blockDim.x) {
        const Commit other(rows, id_bytes, i);
        taken |= i != row && !other.is_idle() && other.is_valid(slots, width) && (other.from == to || other.to == to);
    }
    return taken;
}

template <int DIM>
__device__ __forceinline__ void fold(
    float* pool, int64 layer_stride, int64 slot_stride, int64 slots, const Log& log, int64 log_rows, const void* rows, int64 id_bytes,
    int64 row_count, bool normalize, int64* signal)
{
    Place<DIM, WARPS, FOLD_ROWS> place(blockIdx.x, static_cast<unsigned>(log.heads));
    const unsigned layer = static_cast<unsigned>(place.item) / static_cast<unsigned>(row_count);
    const unsigned row = static_cast<unsigned>(place.item) % static_cast<unsigned>(row_count);
    const Commit commit(rows, id_bytes, row);
    if (commit.is_idle())
        return;
    if (!commit.is_valid(slots, log.width)) {
        if (layer == 0 && place.is_first())
            count(signal, OUT_OF_RANGE);
        return;
    }
    float* states = pool + layer * layer_stride + place.state();
    float4 state[FOLD_ROWS];
    load_state<DIM>(state, states + commit.from * slot_stride);
    place.item = layer * log_rows + row;
    Token token{};
    if (commit.m > 0)
        token = load_token(log, place, 0);
    if (row_count > 1 && __syncthreads_or(is_taken(rows, id_bytes, row_count, slots, log.width, row, commit.to))) {
        if (layer == 0 && place.is_first())
            count(signal, OCCUPIED);
        return;
    }
    replay(state, token, log, place, commit.m, normalize);
    store_state<DIM>(state, states + commit.to * slot_stride);
}

// The last three columns seen, after m more: eight channels a thread.
__device__ __forceinline__ void fold_history(
    unsigned block, Bits* pool, int64 layer_stride, int64 slot_stride, int64 slots, const Bits* log, int64 log_rows, int64 width,
    int64 channels, const void* rows, int64 id_bytes, int64 row_count)
{
    const unsigned vectors = static_cast<unsigned>(channels / 8);
    const unsigned pieces = (vectors + 32 * WARPS - 1) / (32 * WARPS);
    const unsigned vector = block % pieces * (32 * WARPS) + threadIdx.x;
    const unsigned layer = block / pieces / static_cast<unsigned>(row_count);
    const unsigned row = block / pieces % static_cast<unsigned>(row_count);
    const Commit commit(rows, id_bytes, row);
    if (commit.is_idle() || !commit.is_valid(slots, width))
        return;
    if (row_count > 1 && __syncthreads_or(is_taken(rows, id_bytes, row_count, slots, width, row, commit.to)))
        return;
    if (vector >= vectors)
        return;
    Bits* histories = pool + layer * layer_stride;
    const Bits* columns = log + (static_cast<int64>(layer) * log_rows + row) * width * channels;
    Bytes16 kept[3];
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const int64 column = commit.m + i;
        const Bits* from = column < 3 ? histories + commit.from * slot_stride + column * channels : columns + (column - 3) * channels;
        kept[i] = reinterpret_cast<const Bytes16*>(from)[vector];
    }
#pragma unroll
    for (int i = 0; i < 3; i++)
        reinterpret_cast<Bytes16*>(histories + commit.to * slot_stride + i * channels)[vector] = kept[i];
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, FOLD_BLOCKS) gpukit_fold(
    float* pool,           // [layers, slots, Hv, V, K]
    int64 layer_stride,
    int64 slot_stride,
    int64 slots,
    Bits* log_k,           // [layers, log_rows, W, Hk, K]
    Bits* log_v,
    float2* log_gates,
    int64 log_rows,
    int64 width,
    int64 key_heads,
    int64 heads,
    int64 dim,
    const void* rows,      // [R, 3]
    int64 id_bytes,
    int64 row_count,
    int64 normalize,
    int64 state_blocks,    // the blocks before this one fold states, the rest histories
    Bits* histories,       // [layers, slots, 3, C]
    int64 history_layer_stride,
    int64 history_slot_stride,
    const Bits* log_conv,  // [layers, log_rows, W, C]
    int64 channels,
    int64* signal)
{
    if (blockIdx.x >= state_blocks)
        return fold_history(blockIdx.x - static_cast<unsigned>(state_blocks), histories, history_layer_stride, history_slot_stride, slots,
                            log_conv, log_rows, width, channels, rows, id_bytes, row_count);
    const Log log{log_k, log_v, log_gates, width, key_heads, heads};
    if (dim == 128)
        fold<128>(pool, layer_stride, slot_stride, slots, log, log_rows, rows, id_bytes, row_count, normalize, signal);
    else
        fold<64>(pool, layer_stride, slot_stride, slots, log, log_rows, rows, id_bytes, row_count, normalize, signal);
}
