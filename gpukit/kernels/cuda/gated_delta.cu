// Device code of the gated delta rule: what the ops promise stands in `kernels/gated_delta.py`. A few lanes share a row of V, a warp holds several
// rows side by side, so a sum along K is a sum in a thread's registers and two or three exchanges. What a token needs once a head (widened
// keys, norms, decay) a warp works out for its block while the state is on its way. `advance` takes a state past one token, for every kernel
// that writes states. Each of its operations is spelled out, and none depends on what else a thread holds, so states are the same to the bit
// whoever computes them.

#include "gpukit.cuh"
#include "bf16.cuh"
#include "conv.cuh"

using Bits = unsigned short;  // of a bfloat16

// Warps of a block and rows of V of a lane. Many small blocks, all resident: what is read and what is written then alternates finely.
constexpr int WARPS = 2;
constexpr int ROWS = 1;
constexpr int FOLD_WARPS = 2;
constexpr int FOLD_ROWS = 1;
constexpr int RECORD_WARPS = 2;
// A lane may hold two of the tensor cores' 16 rows, or one, and leave half of them empty: then twice the warps share a block's work, which is
// quicker while multiprocessors have only a block or two.
constexpr int RECORD_ROWS = 2;
constexpr int WIDE_RECORD_WARPS = 4;
constexpr int WIDE_RECORD_ROWS = 1;
// Blocks side by side on a multiprocessor: so many that registers just suffice. The compiler for Hopper, on which they were measured, needs the
// fewest.
constexpr bool IS_HOPPER = __CUDA_ARCH__ == 900;
constexpr int DIRECT_BLOCKS = IS_HOPPER ? 14 : 12;
constexpr int FOLD_BLOCKS = IS_HOPPER ? 16 : 14;
constexpr int RECORD_BLOCKS = IS_HOPPER ? 8 : 6;
constexpr int WIDE_RECORD_BLOCKS = IS_HOPPER ? 4 : 3;
// Tokens of a verification for which there is a kernel of its own, and the most there can be.
constexpr int SHORT = 4;
constexpr int MOST_TOKENS = 16;
constexpr float EPSILON = 1e-6f;
// A decay of exp(-100) is 0 in fp32; sums of what is beyond would lose the digits of their neighbours.
constexpr float LEAST_GATE = -100.0f;

// Lanes of a row: as many as make memory quick, and as tensor cores want them. Sums have the tree of SUM_LANES whatever the lanes are.
constexpr int LANES = 8;
constexpr int RECORD_LANES = 4;
constexpr int SUM_LANES = 8;
// Rows of V that a block works on.
constexpr int TILE = WARPS * 32 / LANES * ROWS;
constexpr int FOLD_TILE = FOLD_WARPS * 32 / LANES * FOLD_ROWS;
constexpr int RECORD_TILE = RECORD_WARPS * 32 / RECORD_LANES * RECORD_ROWS;

// What the bits of a kernel's `flags` say.
enum Flags { NORMALIZE = 1, BFLOAT16_STATES = 2, WIDE_SLOTS = 4, WIDE_VALID = 8, WIDE_ACCEPTED = 16 };

__device__ __forceinline__ int64 id_bytes_of(int64 flags, Flags wide)
{
    return flags & wide ? 8 : 4;
}

// Which sequence, value head and rows a block works on, and which part of them a thread holds: rows first_row + groups * r.
template <int DIM, int WARPS, int ROWS, int LANES>
struct Place {
    static constexpr int groups = 32 / LANES;           // of lanes in a warp, each with rows of its own
    static constexpr int threads = 32 * WARPS;
    static constexpr int rows = WARPS * groups * ROWS;  // of a block
    static constexpr int tiles = DIM / rows;            // blocks of a head

    int64 item;  // sequence of the batch, or row of the log, after all layers before
    int head;
    int tile;
    int lane;      // along K
    int first_row; // of the thread

    __device__ __forceinline__ Place(unsigned block, unsigned heads)
    {
        tile = block % tiles;
        block /= tiles;
        // Most of the time of a single sequence is waiting: it does without the division.
        const unsigned before = block < heads ? 0u : block / heads;
        head = block - before * heads;
        item = before;
        lane = threadIdx.x % LANES;
        first_row = tile * rows + threadIdx.x / 32 * groups * ROWS + threadIdx.x % 32 / LANES;
    }

    // Element of a state [heads, V, K] where the thread's first row begins.
    __device__ __forceinline__ int64 state() const
    {
        return (static_cast<int64>(head) * DIM + first_row) * DIM + 4 * lane;
    }

    // Element where the block's rows begin.
    __device__ __forceinline__ int64 block_state() const
    {
        return (static_cast<int64>(head) * DIM + tile * rows) * DIM;
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

__device__ __forceinline__ uint2 narrow(float4 four)
{
    return make_uint2(floats_to_pair(four.x, four.y), floats_to_pair(four.z, four.w));
}

__device__ __forceinline__ float dot(float4 a, float4 b)
{
    return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmul_rn(a.x, b.x))));
}

// A row times a vector; every lane of the row has the result. SUM_LANES sums run along K, of which a lane has one or several, and meet in the
// order of a butterfly.
template <int LANES, int STEPS>
__device__ __forceinline__ float sum_along(const float4 (&row)[STEPS], const float4 (&vector)[STEPS])
{
    constexpr int SUMS = SUM_LANES / LANES;
    float all[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        float4 sum = make_float4(__fmul_rn(row[i].x, vector[i].x), __fmul_rn(row[i].y, vector[i].y), __fmul_rn(row[i].z, vector[i].z),
                                 __fmul_rn(row[i].w, vector[i].w));
#pragma unroll
        for (int j = i + SUMS; j < STEPS; j += SUMS) {
            sum.x = __fmaf_rn(row[j].x, vector[j].x, sum.x);
            sum.y = __fmaf_rn(row[j].y, vector[j].y, sum.y);
            sum.z = __fmaf_rn(row[j].z, vector[j].z, sum.z);
            sum.w = __fmaf_rn(row[j].w, vector[j].w, sum.w);
        }
        all[i] = __fadd_rn(__fadd_rn(sum.x, sum.y), __fadd_rn(sum.z, sum.w));
#pragma unroll
        for (int mask = 1; mask < LANES; mask *= 2)
            all[i] = __fadd_rn(all[i], __shfl_xor_sync(0xffffffffu, all[i], mask));
    }
#pragma unroll
    for (int count = SUMS; count > 1; count /= 2)
#pragma unroll
        for (int i = 0; i < count / 2; i++)
            all[i] = __fadd_rn(all[2 * i], all[2 * i + 1]);
    return all[0];
}

// A sum over half a warp; every lane of it has the result.
__device__ __forceinline__ float sum_half(float value)
{
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2)
        value = __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, mask));
    return value;
}

// Where the inputs of one token of one head are.
struct Source {
    const Bits* k;
    const Bits* q;
    const Bits* v;
    float g;
    float beta;
};

// A lane's share of a key or query that half a warp reads: DIM / 16 numbers.
template <int DIM>
struct Share {
    uint2 words[DIM / 64];

    __device__ __forceinline__ void load(const Bits* vector, int lane)
    {
#pragma unroll
        for (int i = 0; i < DIM / 64; i++)
            words[i] = __ldg(reinterpret_cast<const uint2*>(vector) + 16 * i + lane);
    }

    __device__ __forceinline__ void store(float4* to, int lane) const
    {
#pragma unroll
        for (int i = 0; i < DIM / 64; i++)
            to[16 * i + lane] = widen(words[i]);
    }

    __device__ __forceinline__ float times(const Share& other) const
    {
        float sum = dot(widen(words[0]), widen(other.words[0]));
#pragma unroll
        for (int i = 1; i < DIM / 64; i++)
            sum = __fadd_rn(sum, dot(widen(words[i]), widen(other.words[i])));
        return sum_half(sum);
    }
};

// What half a warp reads of a token that it prepares: key, query, values of the block's rows, gates.
template <int DIM, int TILE, bool outputs>
struct Part {
    Share<DIM> k;
    Share<outputs ? DIM : 64> q;
    Bits v[(TILE + 15) / 16];
    float g;
    float beta;

    __device__ __forceinline__ void load(const Source& source)
    {
        const int lane = threadIdx.x % 16;
        k.load(source.k, lane);
        if constexpr (outputs)
            q.load(source.q, lane);
#pragma unroll
        for (int i = 0; i < (TILE + 15) / 16; i++)
            if (TILE % 16 == 0 || lane < TILE)
                v[i] = __ldg(source.v + 16 * i + lane);
        g = source.g;
        beta = source.beta;
    }
};

// The tokens that a block goes past next, each prepared by half a warp.
template <int DIM, int WARPS, int TILE, bool outputs>
struct Tokens {
    static constexpr int count = 2 * WARPS;
    using Part = ::Part<DIM, TILE, outputs>;

    float4 k[count][DIM / 4];
    float4 q[outputs ? count : 1][DIM / 4];
    float4 gates[count];  // decay, beta, factors that make key and query of norm 1
    float kq[count];      // product of raw key and query
    float v[count][TILE];

    // Which token of those is the thread's.
    static __device__ __forceinline__ int mine()
    {
        return threadIdx.x / 16;
    }

    // All threads of a warp come here, or none.
    __device__ __forceinline__ void share(const Part& part, bool normalize)
    {
        const int t = mine(), lane = threadIdx.x % 16;
        part.k.store(k[t], lane);
        const float key_scale = normalize ? rsqrtf(__fadd_rn(part.k.times(part.k), EPSILON)) : 1.0f;
        float query_scale = 1.0f;
        if constexpr (outputs) {
            part.q.store(q[t], lane);
            const float square = part.q.times(part.q);
            kq[t] = part.k.times(part.q);
            query_scale = normalize ? rsqrtf(__fadd_rn(square, EPSILON)) : 1.0f;
        }
        gates[t] = make_float4(expf(part.g), part.beta, key_scale, query_scale);
#pragma unroll
        for (int i = 0; i < (TILE + 15) / 16; i++)
            if (TILE % 16 == 0 || lane < TILE)
                v[t][16 * i + lane] = bf16_to_float(part.v[i]);
    }
};

// Take the state past a prepared token; `rounds`, if it is kept as bfloat16. With outputs, those of the rows: taken from the old state in the
// same pass, as a (S q) + d (k q).
template <int DIM, int LANES, bool outputs, int ROWS, int WARPS, int TILE>
__device__ __forceinline__ void advance(
    float4 (&state)[ROWS][DIM / 4 / LANES], const Tokens<DIM, WARPS, TILE, outputs>& tokens, int i, int lane, int row, bool rounds,
    float scale, float (&out)[ROWS])
{
    constexpr int STEPS = DIM / 4 / LANES;
    float4 key[STEPS];
#pragma unroll
    for (int j = 0; j < STEPS; j++)
        key[j] = tokens.k[i][LANES * j + lane];
    const float4 gates = tokens.gates[i];
    float weight[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        // Sums are taken with the raw key, and scaled after.
        const float held = __fmul_rn(gates.z, sum_along<LANES>(state[r], key));
        const float d = __fmul_rn(gates.y, __fmaf_rn(-gates.x, held, tokens.v[i][row + 32 / LANES * r]));
        weight[r] = __fmul_rn(d, gates.z);
    }
    if constexpr (outputs) {
        float4 query[STEPS];
#pragma unroll
        for (int j = 0; j < STEPS; j++)
            query[j] = tokens.q[i][LANES * j + lane];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float asked = sum_along<LANES>(state[r], query);
            out[r] = __fmul_rn(scale, __fmul_rn(gates.w, __fmaf_rn(gates.x, asked, __fmul_rn(weight[r], tokens.kq[i]))));
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
            float4& s = state[r][j];
            s.x = __fmaf_rn(weight[r], key[j].x, __fmul_rn(gates.x, s.x));
            s.y = __fmaf_rn(weight[r], key[j].y, __fmul_rn(gates.x, s.y));
            s.z = __fmaf_rn(weight[r], key[j].z, __fmul_rn(gates.x, s.z));
            s.w = __fmaf_rn(weight[r], key[j].w, __fmul_rn(gates.x, s.w));
        }
    // As if it had been stored and read again, so that several tokens at once are several tokens one by one.
    if (rounds)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int j = 0; j < STEPS; j++)
                state[r][j] = widen(narrow(state[r][j]));
}

// The states of a layer, or of all, and how they are kept. Offsets and strides in elements.
struct States {
    void* pool;          // [slots, Hv, V, K]
    int64 slot_stride;
    int64 slots;
    bool are_bfloat16;
    int64 prefetch;      // from a state to the one that the next call will want, 0 for none

    // Let the L2 fetch the rows of a block of that state: `first_row` of the block's state begins at element `from`.
    template <int DIM>
    __device__ __forceinline__ void fetch_next(int64 from, int rows) const
    {
#if __CUDA_ARCH__ >= 900
        if (prefetch && threadIdx.x == 0) {
            const int bytes = are_bfloat16 ? 2 : 4;
            const char* next = static_cast<const char*>(pool) + (from + prefetch) * bytes;
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(next), "r"(rows * DIM * bytes));
        }
#endif
    }

    // Rows of a state, `32 / LANES` apart.
    template <int DIM, int LANES, int ROWS, int STEPS>
    __device__ __forceinline__ void load(float4 (&state)[ROWS][STEPS], int64 from) const
    {
        if (are_bfloat16)
            visit<DIM, LANES>(state, static_cast<const Bits*>(pool) + from, [](float4& four, const Bits* at) {
                four = widen(load_streaming(reinterpret_cast<const uint2*>(at)));
            });
        else
            visit<DIM, LANES>(state, static_cast<const float*>(pool) + from, [](float4& four, const float* at) {
                four = load_streaming(reinterpret_cast<const float4*>(at));
            });
    }

    template <int DIM, int LANES, int ROWS, int STEPS>
    __device__ __forceinline__ void store(float4 (&state)[ROWS][STEPS], int64 to) const
    {
        if (are_bfloat16)
            visit<DIM, LANES>(state, static_cast<Bits*>(pool) + to, [](float4& four, Bits* at) {
                store_streaming(reinterpret_cast<uint2*>(at), narrow(four));
            });
        else
            visit<DIM, LANES>(state, static_cast<float*>(pool) + to, [](float4& four, float* at) {
                store_streaming(reinterpret_cast<float4*>(at), four);
            });
    }

    template <int DIM, int LANES, int ROWS, int STEPS, class Pointer, class Access>
    static __device__ __forceinline__ void visit(float4 (&state)[ROWS][STEPS], Pointer first, Access access)
    {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int j = 0; j < STEPS; j++)
                access(state[r][j], first + 32 / LANES * r * DIM + 4 * LANES * j);
    }
};

// Whether slot `to` of an item is the source or one of the `per_item` destinations of another item: neither must be written then. The same
// in every thread of a warp.
__device__ __forceinline__ bool is_taken(
    const void* source, const void* destination, int64 id_bytes, int64 items, int64 per_item, int64 slots, int64 item, int64 to)
{
    bool taken = false;
#pragma unroll 1
    for (int64 i = threadIdx.x % 32; i < items * per_item; i += 32) {
        const int64 other = i / per_item;
        const int64 s = load_id(source, id_bytes, other);
        const int64 d = load_id(destination, id_bytes, i);
        taken |= other != item && s >= 0 && s < slots && d < slots && (s == to || d == to);
    }
    return __any_sync(0xffffffffu, taken);
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

    __device__ __forceinline__ int group() const
    {
        return static_cast<unsigned>(heads) / static_cast<unsigned>(key_heads);
    }

    // Element of `out` where a head of a token begins.
    __device__ __forceinline__ int64 output(int64 item, int64 t, int head, int dim) const
    {
        return ((item * tokens + t) * heads + head) * dim;
    }
};

template <int DIM, class Place>
__device__ __forceinline__ Source source_of(const Batch& batch, const Place& place, int64 t)
{
    const int key = place.head / batch.group() * DIM;
    return {batch.k + place.item * batch.k_batch + t * batch.k_token + key,
            batch.q + place.item * batch.q_batch + t * batch.q_token + key,
            batch.v + place.item * batch.v_batch + t * batch.v_token + place.head * DIM + place.tile * place.rows,
            __ldg(batch.g + place.item * batch.g_batch + t * batch.g_token + place.head),
            __ldg(batch.beta + place.item * batch.beta_batch + t * batch.beta_token + place.head)};
}

// Zero the outputs of a block from a token on.
template <int DIM, int WARPS, int ROWS, int LANES>
__device__ __forceinline__ void clear_outputs(const Batch& batch, const Place<DIM, WARPS, ROWS, LANES>& place, int64 first)
{
    constexpr int rows = Place<DIM, WARPS, ROWS, LANES>::rows;
    for (int64 i = first * rows + threadIdx.x; i < batch.tokens * rows; i += place.threads)
        batch.out[batch.output(place.item, i / rows, place.head, DIM) + place.tile * rows + i % rows] = 0;
}

// One lane of a row stores its output.
template <int DIM, int WARPS, int ROWS, int LANES>
__device__ __forceinline__ void store_output(const Batch& batch, const Place<DIM, WARPS, ROWS, LANES>& place, int64 t, const float (&output)[ROWS])
{
    Bits* out = batch.out + batch.output(place.item, t, place.head, DIM) + place.first_row;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (place.lane == r)
            out[place.groups * r] = float_to_bf16(output[r]);
}

// Tokens one after the other. The state is stored behind the last one, or with `snapshots` behind every one in a slot of its own.
template <int DIM, bool snapshots>
__device__ __forceinline__ void direct(
    void* memory, const Batch& batch, const States& states, const void* source, const void* destination, int64 id_bytes, float scale,
    bool normalize, int64* signal)
{
    const Place<DIM, WARPS, ROWS, LANES> place(blockIdx.x, static_cast<unsigned>(batch.heads));
    auto& shared = *static_cast<Tokens<DIM, WARPS, TILE, true>*>(memory);
    const int tokens = static_cast<int>(batch.tokens);
    const int64 from = load_id(source, id_bytes, place.item);
    const int64 per_item = snapshots ? tokens : 1;
    const int64 first_id = place.item * per_item;
    typename Tokens<DIM, WARPS, TILE, true>::Part part{};
    if (shared.mine() < tokens)
        part.load(source_of<DIM>(batch, place, shared.mine()));
    bool is_padding = from < 0, is_beyond = from >= states.slots;
    if constexpr (snapshots) {
#pragma unroll 1
        for (int t = 0; t < tokens; t++)
            is_beyond |= load_id(destination, id_bytes, first_id + t) >= states.slots;
    } else {
        is_padding |= load_id(destination, id_bytes, first_id) < 0;
        is_beyond |= load_id(destination, id_bytes, first_id) >= states.slots;
    }
    if (is_padding || is_beyond) {
        if (!is_padding && place.is_first())
            count(signal, OUT_OF_RANGE);
        return clear_outputs(batch, place, 0);
    }
    float4 state[ROWS][DIM / 4 / LANES];
    states.load<DIM, LANES>(state, from * states.slot_stride + place.state());
    states.fetch_next<DIM>(from * states.slot_stride + place.block_state(), place.rows);
    if (batch.items > 1) {
        bool taken = false;
#pragma unroll 1
        for (int t = 0; t < per_item; t++) {
            const int64 to = load_id(destination, id_bytes, first_id + t);
            taken |= to >= 0 && is_taken(source, destination, id_bytes, batch.items, per_item, states.slots, place.item, to);
        }
        if (taken) {
            if (place.is_first())
                count(signal, OCCUPIED);
            return clear_outputs(batch, place, 0);
        }
    }
#pragma unroll 1
    for (int first = 0; first < tokens; first += shared.count) {
        if (first > 0)
            __syncthreads();
        if (first + shared.mine() / 2 * 2 < tokens)
            shared.share(part, normalize);
        __syncthreads();
        const int next = first + shared.count;
        if (next + shared.mine() < tokens)
            part.load(source_of<DIM>(batch, place, next + shared.mine()));
#pragma unroll 1
        for (int t = first; t < min(next, tokens); t++) {
            float output[ROWS];
            advance<DIM, LANES, true>(state, shared, t - first, place.lane, place.first_row % TILE, states.are_bfloat16, scale, output);
            store_output(batch, place, t, output);
            if constexpr (snapshots) {
                const int64 to = load_id(destination, id_bytes, first_id + t);
                if (to >= 0)
                    states.store<DIM, LANES>(state, to * states.slot_stride + place.state());
            }
        }
    }
    release_successor();
    if constexpr (!snapshots)
        states.store<DIM, LANES>(state, load_id(destination, id_bytes, first_id) * states.slot_stride + place.state());
}

#define GPUKIT_BATCH_PARAMETERS                            \
    const Bits *q, int64 q_batch, int64 q_token,           \
    const Bits *k, int64 k_batch, int64 k_token,           \
    const Bits *v, int64 v_batch, int64 v_token,           \
    const float *g, int64 g_batch, int64 g_token,          \
    const float *beta, int64 beta_batch, int64 beta_token, \
    Bits *out, int64 items, int64 tokens, int64 key_heads, int64 heads, int64 dim

#define GPUKIT_BATCH                                                                                                              \
    const Batch batch{q,       q_batch, q_token,    k,          k_batch, k_token, v,     v_batch,   v_token, g, g_batch, g_token, \
                      beta,    beta_batch, beta_token, out, items, tokens, key_heads, heads}

// `destination` holds a slot a sequence.
extern "C" __global__ void __launch_bounds__(32 * WARPS, DIRECT_BLOCKS) gpukit_direct(
    GPUKIT_BATCH_PARAMETERS,
    void* pool,               // [slots, Hv, V, K] of the layer
    int64 slot_stride,        // in elements
    int64 slots,
    const void* source,       // [B]
    const void* destination,  // [B]
    int64 prefetch,           // elements from a state to the one that the next call will want, or 0
    int64 scale,              // bits of a float, which then needs no register
    int64 flags,
    int64* signal)
{
    wait_for_predecessor();
    GPUKIT_BATCH;
    __shared__ Tokens<128, WARPS, TILE, true> memory;
    const States states{pool, slot_stride, slots, (flags & BFLOAT16_STATES) != 0, prefetch};
    const float scale_of_outputs = __int_as_float(static_cast<int>(scale));
    if (dim == 128)
        direct<128, false>(&memory, batch, states, source, destination, id_bytes_of(flags, WIDE_SLOTS), scale_of_outputs, flags & NORMALIZE, signal);
    else
        direct<64, false>(&memory, batch, states, source, destination, id_bytes_of(flags, WIDE_SLOTS), scale_of_outputs, flags & NORMALIZE, signal);
}

// `destination` holds a slot a token.
extern "C" __global__ void __launch_bounds__(32 * WARPS, DIRECT_BLOCKS) gpukit_snapshot(
    GPUKIT_BATCH_PARAMETERS,
    void* pool,
    int64 slot_stride,
    int64 slots,
    const void* source,       // [B]
    const void* destination,  // [B, T]
    int64 prefetch,
    int64 scale,
    int64 flags,
    int64* signal)
{
    wait_for_predecessor();
    GPUKIT_BATCH;
    __shared__ Tokens<128, WARPS, TILE, true> memory;
    const States states{pool, slot_stride, slots, (flags & BFLOAT16_STATES) != 0, prefetch};
    const float scale_of_outputs = __int_as_float(static_cast<int>(scale));
    if (dim == 128)
        direct<128, true>(&memory, batch, states, source, destination, id_bytes_of(flags, WIDE_SLOTS), scale_of_outputs, flags & NORMALIZE, signal);
    else
        direct<64, true>(&memory, batch, states, source, destination, id_bytes_of(flags, WIDE_SLOTS), scale_of_outputs, flags & NORMALIZE, signal);
}

// A log of one layer, or of all.
struct Log {
    Bits* k;       // [rows, W, Hk, K]
    Bits* v;       // [rows, W, Hv, V]
    float2* gates; // [rows, W, Hv], (g, beta)
    int64 width, key_heads, heads;
};

// `row` is the row of the log.
template <int DIM, class Place>
__device__ __forceinline__ Source source_of(const Log& log, const Place& place, int64 row, int64 t)
{
    const int64 entry = row * log.width + t;
    const int key_head = place.head / (static_cast<unsigned>(log.heads) / static_cast<unsigned>(log.key_heads));
    const float2 gates = __ldg(log.gates + entry * log.heads + place.head);
    const Bits* k = log.k + (entry * log.key_heads + key_head) * DIM;
    return {k, k, log.v + (entry * log.heads + place.head) * DIM + place.tile * place.rows, gates.x, gates.y};
}

// Take the state past the first `m` tokens of a row of the log. What lies behind them is not read. `part` is the thread's of the first tokens.
template <int DIM, int WARPS, int ROWS, int LANES, int TILE>
__device__ __forceinline__ void replay(
    float4 (&state)[ROWS][DIM / 4 / LANES], Tokens<DIM, WARPS, TILE, false>& shared, Part<DIM, TILE, false>& part, const Log& log,
    const Place<DIM, WARPS, ROWS, LANES>& place, int64 row, int m, bool normalize, bool rounds)
{
    float nothing[ROWS];
#pragma unroll 1
    for (int first = 0; first < m; first += shared.count) {
        if (first > 0)
            __syncthreads();
        if (first + shared.mine() / 2 * 2 < m)
            shared.share(part, normalize);
        __syncthreads();
        const int next = first + shared.count;
        if (next + shared.mine() < m)
            part.load(source_of<DIM>(log, place, row, next + shared.mine()));
#pragma unroll 1
        for (int t = first; t < min(next, m); t++)
            advance<DIM, LANES, false>(state, shared, t - first, place.lane, place.first_row % TILE, rounds, 1.0f, nothing);
    }
}

// An id that is on its way: nothing waits for it before `value`.
struct Id {
    int low, high;

    __device__ __forceinline__ Id(const void* ids, int64 id_bytes, int64 i)
    {
        const bool is_wide = id_bytes == 8;
        const int* at = static_cast<const int*>(ids) + (is_wide ? 2 * i : i);
        low = ids ? __ldg(at) : 0;
        high = ids && is_wide ? __ldg(at + 1) : 0;
    }

    __device__ __forceinline__ int64 value(int64 id_bytes) const
    {
        return id_bytes == 8 ? static_cast<int64>(static_cast<uint64>(static_cast<unsigned>(high)) << 32 | static_cast<unsigned>(low)) : low;
    }
};

// What a verification works on: which slot, how many tokens, how many of the previous log come first.
struct Verification {
    int64 slot;
    int64 m;
    int tokens;

    // Neither padding nor refused; what is refused is counted.
    template <class Place>
    __device__ __forceinline__ bool is_usable(
        const Place& place, int64 slots, const void* accepted, int64 previous_width, int64* signal) const
    {
        const bool is_refused = slot >= slots || m < 0 || (accepted && m > previous_width);
        if (is_refused && slot >= 0 && place.is_first())
            count(signal, OUT_OF_RANGE);
        return !is_refused && slot >= 0;
    }
};

__device__ __forceinline__ int tokens_of(const Batch& batch, int64 limit)
{
    return static_cast<int>(max(0ll, min(limit, batch.tokens)));
}

// Which key head a value head has, without a division: the inverse of a group's size in units of 2^-30, rounded up.
struct Groups {
    unsigned inverse;

    __device__ __forceinline__ int key_head(int head) const
    {
        return static_cast<int>(__umulhi(4u * static_cast<unsigned>(head), inverse));
    }

    __device__ __forceinline__ bool is_first(int head) const
    {
        return head == 0 || key_head(head - 1) != key_head(head);
    }
};

// Rows of V in a warp of a long verification.
constexpr int LONG_ROWS = 32 / RECORD_LANES * RECORD_ROWS;

// What the lanes of a warp tell each other in a verification of up to WIDTH tokens: coefficients of the triangular systems
// d_t = beta_t v_t - from_key_t S·k_t - sum of key_key_ts d_s over s < t and o_t = from_query_t S·q_t + sum of key_query_ts d_s over s <= t.
template <int WIDTH>
struct alignas(16) Scratch {
    float key_key[WIDTH][WIDTH];    // [t][s]: beta_t decay(s … t) kn_s·kn_t
    float key_query[WIDTH][WIDTH];  // [t][s]: scale decay(s … t) kn_s·qn_t, zeros for s > t
    float from_key[WIDTH];          // factor of S·k_t
    float from_query[WIDTH];        // factor of S·q_t
    float beta[WIDTH];
    float key_scale[WIDTH];         // what makes a key of norm 1
    // Of a long verification [row]: S·k of all tokens, then S·q; rows of 16 bytes that meet no bank twice.
    float along[WIDTH > SHORT ? LONG_ROWS : 1][2 * WIDTH + 4];
};

// The product of 16 rows with 8 columns along 16 of K, added to four sums: rows `lane / 4` and that + 8, columns 2 (lane % 4) and + 1.
__device__ __forceinline__ void multiply(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, uint2 b)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}

// Two floats as the bfloat16 that their upper halves are, and as what is left of them, rounded to bfloat16: 16 bits of mantissa together.
__device__ __forceinline__ void split(float low, float high, unsigned& upper, unsigned& rest)
{
    const unsigned a = __float_as_uint(low), b = __float_as_uint(high);
    upper = __byte_perm(a, b, 0x7632);
    rest = floats_to_pair(low - __uint_as_float(a & 0xffff0000u), high - __uint_as_float(b & 0xffff0000u));
}

// Nothing, where others have something.
struct Nothing {
};

// Keys, queries and values of a verification that are in memory as they are needed.
template <int DIM>
struct Given {
    static constexpr bool convolves = false;
    using Arrays = Nothing;
    using Shared = Nothing;

    const Batch& batch;
    int item, key_offset, value_offset;

    template <class Place>
    __device__ __forceinline__ Given(const Nothing&, Nothing&, const Batch& batch, const Place& place, int key_head)
        : batch(batch), item(static_cast<int>(place.item)), key_offset(key_head * DIM), value_offset(place.head * DIM + place.tile * place.rows)
    {
    }

    // Keys (lanes of the lower half) and queries (upper half) of four tokens, as columns for `multiply`. Behind the last token stands anything:
    // nothing comes of it.
    __device__ __forceinline__ const uint2* columns_at(int first) const
    {
        const int lane = threadIdx.x % 32;
        const int t = min(first + lane / 4 % 4, static_cast<int>(batch.tokens) - 1);
        const Bits* vector = lane < 16 ? batch.k + item * batch.k_batch + t * batch.k_token : batch.q + item * batch.q_batch + t * batch.q_token;
        return reinterpret_cast<const uint2*>(vector + key_offset) + lane % RECORD_LANES;
    }

    static __device__ __forceinline__ uint2 load(const uint2* from)
    {
        return __ldg(from);
    }

    __device__ __forceinline__ Bits value(int t, int row) const
    {
        return __ldg(batch.v + item * batch.v_batch + min(t, static_cast<int>(batch.tokens) - 1) * batch.v_token + value_offset + row);
    }
};

// Keys, queries and values of a block behind the convolution.
template <int DIM, int WIDTH>
struct Convolved {
    // Rows of keys, then of queries. Those of four tokens meet no bank twice.
    alignas(16) Bits vectors[2 * WIDTH][DIM + 16];
    alignas(16) Bits values[WIDTH][RECORD_TILE];
};

// The arrays of a convolution in front of a verification; channels are those of all queries, then keys, then values.
struct Columns {
    const Bits* x;       // [B, T, C]
    int64 x_batch, x_token;
    const Bits* weight;  // [C, TAPS]
    const Bits* past;    // [slots, TAPS - 1, C] of the layer, oldest first
    int64 slot_stride;
    int64 prefetch;      // from a history to the one that the next call will want, or 0
    Bits* log;           // [rows, W, C] of the layer
    int64 channels;
};

// A pair or two of neighbouring channels, as one access.
template <int PAIRS>
__device__ __forceinline__ void load_pairs(Bytes4 (&pairs)[PAIRS], const Bits* from)
{
    if constexpr (PAIRS == 2) {
        const Bytes8 both = __ldg(reinterpret_cast<const Bytes8*>(from));
        pairs[0] = both.x;
        pairs[1] = both.y;
    } else {
        pairs[0] = __ldg(reinterpret_cast<const Bytes4*>(from));
    }
}

template <int PAIRS>
__device__ __forceinline__ void store_pairs(Bits* to, const Bytes4 (&pairs)[PAIRS])
{
    if constexpr (PAIRS == 2)
        *reinterpret_cast<Bytes8*>(to) = make_uint2(pairs[0], pairs[1]);
    else
        *reinterpret_cast<Bytes4*>(to) = pairs[0];
}

// Let the L2 fetch a line.
__device__ __forceinline__ void fetch(const void* address)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Keys, queries and values that the block convolves first. A thread has a pair or two of the channels of key and query for four tokens at a time,
// and a pair of the values for one token of the four. What does not depend on the slot is loaded before the slot is known.
template <int DIM, int WIDTH, int WARPS>
struct Convolution {
    static constexpr bool convolves = true;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int PAIRS = DIM > THREADS ? DIM / THREADS : 1;
    static constexpr int VALUE_PAIRS = RECORD_TILE / 2;
    static constexpr int VALUE_THREADS = SHORT * VALUE_PAIRS;
    static constexpr int PAST = TAPS - 1;
    using Arrays = Columns;
    using Shared = Convolved<128, WIDTH>;
    using Pair = Channels<Bytes4>;

    const Columns& arrays;
    Convolved<DIM, WIDTH>& shared;
    const Bits* x;         // of the sequence
    int last;              // token
    int along;             // the thread's first channel within key and query of the block
    int channel;           // the same in a column
    int value_channel;
    int value_pair, turn;  // which pair of the values, and which token of four
    Bytes4 window[PAST + SHORT][PAIRS];
    Bytes16 taps[PAIRS];
    Bytes4 value_window[TAPS];
    Bytes16 value_taps;

    template <class Place>
    __device__ __forceinline__ Convolution(const Columns& arrays, Shared& memory, const Batch& batch, const Place& place, int key_head)
        : arrays(arrays), shared(reinterpret_cast<Convolved<DIM, WIDTH>&>(memory)), x(arrays.x + place.item * arrays.x_batch),
          last(static_cast<int>(batch.tokens) - 1)
    {
        along = static_cast<int>(threadIdx.x) * 2 * PAIRS;
        // Keys first, like the rows they become.
        const int key_heads = static_cast<int>(batch.key_heads);
        channel = along < DIM ? (key_heads + key_head) * DIM + along : key_head * DIM + along - DIM;
        const int unit = static_cast<int>(threadIdx.x) - (THREADS - VALUE_THREADS);
        value_pair = unit % VALUE_PAIRS;
        turn = unit / VALUE_PAIRS;
        value_channel = (2 * key_heads + place.head) * DIM + place.tile * RECORD_TILE + 2 * value_pair;
        load_tokens(0);
        if (takes_part())
#pragma unroll
            for (int i = 0; i < PAIRS; i++)
                taps[i] = __ldg(reinterpret_cast<const Bytes16*>(arrays.weight + TAPS * channel) + i);
        if (takes_values())
            value_taps = __ldg(reinterpret_cast<const Bytes16*>(arrays.weight + TAPS * value_channel));
    }

    static __device__ __forceinline__ bool takes_part()
    {
        return DIM / PAIRS == THREADS || threadIdx.x < DIM / PAIRS;
    }

    static __device__ __forceinline__ bool takes_values()
    {
        return VALUE_THREADS == THREADS || threadIdx.x >= THREADS - VALUE_THREADS;
    }

    // Columns of four tokens; behind the last one, that one again.
    __device__ __forceinline__ void load_tokens(int first)
    {
        if (takes_part()) {
            const Bits* at = x + first * arrays.x_token + channel;
#pragma unroll
            for (int t = 0; t < SHORT; t++) {
                load_pairs(window[PAST + t], at);
                if (first + t < last)
                    at += arrays.x_token;
            }
        }
        if (takes_values()) {
            const Bits* at = x + max(0, min(first + turn - PAST, last)) * arrays.x_token + value_channel;
#pragma unroll
            for (int i = 0; i < TAPS; i++) {
                const int t = first + turn + i - PAST;
                if (t >= 0)
                    value_window[i] = __ldg(reinterpret_cast<const Bytes4*>(at));
                if (t >= 0 && t < last)
                    at += arrays.x_token;
            }
        }
    }

    __device__ __forceinline__ void load_history(int64 slot)
    {
        const Bits* past = arrays.past + slot * arrays.slot_stride;
        if (takes_part())
#pragma unroll
            for (int i = 0; i < PAST; i++)
                load_pairs(window[i], past + i * arrays.channels + channel);
        if (takes_values())
#pragma unroll
            for (int i = 0; i < PAST; i++)
                if (turn + i < PAST)
                    value_window[i] = __ldg(reinterpret_cast<const Bytes4*>(past + (turn + i) * arrays.channels + value_channel));
    }

    // Let the L2 fetch the histories of the block's channels that the next call will want; keys and queries are left to one block.
    __device__ __forceinline__ void fetch_next(int64 slot, bool has_keys) const
    {
        if (!arrays.prefetch)
            return;
        const Bits* next = arrays.past + slot * arrays.slot_stride + arrays.prefetch;
        if (has_keys && takes_part())
#pragma unroll
            for (int i = 0; i < PAST; i++)
                fetch(next + i * arrays.channels + channel);
        if (takes_values() && turn < PAST)
            fetch(next + turn * arrays.channels + value_channel);
    }

    // Convolve into shared memory and log the raw columns; those of keys and queries are left to one block. All threads of the block come here.
    __device__ __forceinline__ void convolve(int64 entry, int tokens, bool has_keys)
    {
#pragma unroll 1
        for (int first = 0; first < (WIDTH > SHORT ? tokens : SHORT); first += SHORT) {
            if (WIDTH > SHORT && first > 0) {
#pragma unroll
                for (int i = 0; i < PAST; i++)
#pragma unroll
                    for (int p = 0; p < PAIRS; p++)
                        window[i][p] = window[SHORT + i][p];
                load_tokens(first);
            }
            // Raw columns are here before the history is.
            Bits* logged = arrays.log + (entry + first) * arrays.channels;
            if (has_keys && takes_part())
#pragma unroll
                for (int t = 0; t < SHORT; t++)
                    if (first + t < tokens)
                        store_pairs(logged + t * arrays.channels + channel, window[PAST + t]);
            if (takes_values() && first + turn < tokens)
                *reinterpret_cast<Bytes4*>(logged + turn * arrays.channels + value_channel) = value_window[PAST];
            if (takes_values())
                reinterpret_cast<Bytes4*>(shared.values[first + turn])[value_pair] =
                    Pair::output(value_taps, Pair(value_window[0]), Pair(value_window[1]), Pair(value_window[2]), Pair(value_window[3]));
            if (takes_part()) {
                Bits* rows = shared.vectors[along / DIM * WIDTH + first] + along % DIM;
                // The last token of four needs no history.
#pragma unroll
                for (int t = SHORT - 1; t >= 0; t--) {
                    Bytes4 outputs[PAIRS];
#pragma unroll
                    for (int p = 0; p < PAIRS; p++)
                        outputs[p] = Pair::output(
                            taps[p], Pair(window[t][p]), Pair(window[t + 1][p]), Pair(window[t + 2][p]), Pair(window[t + 3][p]));
                    store_pairs(rows + t * (DIM + 16), outputs);
                }
            }
        }
        __syncthreads();
    }

    // The warps of the block share the tokens.
    __device__ __forceinline__ void log_keys(const Log& log, int64 entry, int key_head, int tokens) const
    {
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int t = threadIdx.x / 32; t < tokens; t += WARPS)
            if (lane < DIM / 8)
                reinterpret_cast<Bytes16*>(log.k + ((entry + t) * log.key_heads + key_head) * DIM)[lane] =
                    reinterpret_cast<const Bytes16*>(shared.vectors[t])[lane];
    }

    // As in `Given`.
    __device__ __forceinline__ const uint2* columns_at(int first) const
    {
        const int lane = threadIdx.x % 32;
        return reinterpret_cast<const uint2*>(shared.vectors[lane / 16 * WIDTH + first + lane / 4 % 4]) + lane % RECORD_LANES;
    }

    static __device__ __forceinline__ uint2 load(const uint2* from)
    {
        return *from;
    }

    __device__ __forceinline__ Bits value(int t, int row) const
    {
        return shared.values[t][row];
    }
};

template <class Inputs, int STEPS>
__device__ __forceinline__ void load_columns(uint2 (&columns)[STEPS], const Inputs& inputs, int first)
{
    const uint2* from = inputs.columns_at(first);
#pragma unroll
    for (int j = 0; j < STEPS; j++)
        columns[j] = Inputs::load(from + RECORD_LANES * j);
}

// The sum of the gates up to the token of the lane's number. A lane comes with the gate of that token.
template <int WIDTH>
__device__ __forceinline__ float sum_gates(float g)
{
    const int lane = threadIdx.x % 32;
    float sum = fmaxf(g, LEAST_GATE);
    if constexpr (WIDTH == SHORT) {
        // The exchanges do not wait for each other.
        float before[SHORT];
#pragma unroll
        for (int step = 1; step < SHORT; step++)
            before[step] = __shfl_up_sync(0xffffffffu, fmaxf(g, LEAST_GATE), step);
#pragma unroll
        for (int step = 1; step < SHORT; step++)
            if (lane >= step)
                sum += before[step];
    } else {
#pragma unroll
        for (int step = 1; step < WIDTH; step *= 2) {
            const float before = __shfl_up_sync(0xffffffffu, sum, step);
            if (lane >= step)
                sum += before;
        }
    }
    return sum;
}

// Where a lane is in the product of keys (rows 0 … 3) and queries (rows 4 … 7) of four tokens with keys (columns 0 … 3) and queries of four, of
// which it holds two columns.
struct Cell {
    int row;
    int t;       // of the row
    int s;       // of the first column
    bool is_key; // whether the columns are keys

    __device__ __forceinline__ Cell()
    {
        const int lane = threadIdx.x % 32;
        row = lane / 4;
        t = row % 4;
        s = lane % 2 * 2;
        is_key = lane % 4 < 2;
    }
};

// What makes a vector of norm 1.
__device__ __forceinline__ float scale_of(float square, bool normalize)
{
    return normalize ? rsqrtf(square + EPSILON) : 1.0f;
}

// What the gates make of a lane's cell: factors of its two products, and of the product of the row's token with the state.
struct Weights {
    float left, right, from_start;
    float beta;  // of the row's token

    Weights() = default;

    // A lane comes with the sum of gates and the beta of the token of its number.
    __device__ __forceinline__ Weights(float gates, float beta_of_lane, int first_of, int first_with, float scale)
    {
        const Cell cell;
        const int s = first_with + cell.s;
        const float late = __shfl_sync(0xffffffffu, gates, first_of + cell.t);
        beta = __shfl_sync(0xffffffffu, beta_of_lane, first_of + cell.t);
        const float factor = cell.row < 4 ? beta : scale;
        left = factor * expf(late - __shfl_sync(0xffffffffu, gates, s));
        right = factor * expf(late - __shfl_sync(0xffffffffu, gates, s + 1));
        from_start = factor * expf(late);
    }
};

// Coefficients of four tokens with the same four or, `earlier`, with four before them. `row_scale` is what makes the lane's row of norm 1, found
// with the same four.
template <class Inputs, int CHAINS, bool earlier, int WIDTH, int STEPS, class WeightsOf>
__device__ __forceinline__ void make_coefficients(
    Scratch<WIDTH>& scratch, const uint2 (&of)[STEPS], int first_of, const uint2* with, int first_with, const WeightsOf& weights_of,
    bool normalize, float& row_scale)
{
    const Cell cell;
    const int t = first_of + cell.t, s = first_with + cell.s;
    float sums[CHAINS][4] = {};
#pragma unroll
    for (int j = 0; j < STEPS; j++)
        multiply(sums[j % CHAINS], of[j].x, 0u, of[j].y, 0u, earlier ? Inputs::load(with + RECORD_LANES * j) : of[j]);
    const Weights weights = weights_of(first_of, first_with);
#pragma unroll
    for (int count = CHAINS / 2; count > 0; count /= 2)
#pragma unroll
        for (int i = 0; i < count; i++) {
            sums[i][0] += sums[i + count][0];
            sums[i][1] += sums[i + count][1];
        }
    const float a = sums[0][0], b = sums[0][1];
    float2 column_scale;
    if constexpr (earlier) {
        column_scale = *reinterpret_cast<const float2*>(scratch.key_scale + s);
    } else {
        // Squares are on the diagonal: that of row r in lane 4 r + r / 2.
        const float own = cell.row % 2 ? b : a;
        row_scale = scale_of(__shfl_sync(0xffffffffu, own, 4 * cell.row + cell.row / 2), normalize);
        column_scale = make_float2(scale_of(__shfl_sync(0xffffffffu, a, 9 * (cell.s / 2)), normalize),
                                   scale_of(__shfl_sync(0xffffffffu, b, 9 * (cell.s / 2) + 4), normalize));
    }
    float* to = cell.row < 4 ? scratch.key_key[t] : scratch.key_query[t];
    if (cell.is_key)
        *reinterpret_cast<float2*>(to + s) = make_float2(s <= t ? a * (weights.left * row_scale) * column_scale.x : 0.0f,
                                                         s + 1 <= t ? b * (weights.right * row_scale) * column_scale.y : 0.0f);
    else if (!earlier && cell.s == 0) {
        (cell.row < 4 ? scratch.from_key : scratch.from_query)[t] = weights.from_start * row_scale;
        if (cell.row < 4) {
            scratch.key_scale[t] = row_scale;
            scratch.beta[t] = weights.beta;
        }
    }
}

// Four of a row of coefficients or sums.
__device__ __forceinline__ float4 four(const float* from)
{
    return *reinterpret_cast<const float4*>(from);
}

// Products of the state with the columns of four tokens: of rows lane / 4 and that + 8 with columns 2 (lane % 4) and + 1.
template <int DIM, int ROWS>
__device__ __forceinline__ void multiply_state(float (&products)[4], const float4 (&state)[ROWS][DIM / 16], const uint2 (&columns)[DIM / 16])
{
    float sums[4][4] = {};
#pragma unroll
    for (int j = 0; j < DIM / 16; j++) {
        unsigned upper[4] = {}, rest[4] = {};
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            split(state[r][j].x, state[r][j].y, upper[r], rest[r]);
            split(state[r][j].z, state[r][j].w, upper[r + 2], rest[r + 2]);
        }
        multiply(sums[j % 2], upper[0], upper[1], upper[2], upper[3], columns[j]);
        multiply(sums[2 + j % 2], rest[0], rest[1], rest[2], rest[3], columns[j]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        products[i] = sums[0][i] + sums[1][i] + (sums[2][i] + sums[3][i]);
}

// The lane of the row that holds the products with the key of a token, for `multiply_state`; the query's is two beyond.
__device__ __forceinline__ int holder_of(int t)
{
    return threadIdx.x % 32 / 4 * 4 + t / 2;
}

// Which operations are fused is spelled out, so that every kernel rounds alike.

// Solve the systems of a lane's rows for four tokens, each lane of a row for the token of its number in the row, and store its outputs.
// `values` are those of that token, times beta.
template <int ROWS>
__device__ __forceinline__ void solve_short(
    const Scratch<SHORT>& scratch, const float (&values)[ROWS], const float (&products)[4], int tokens, Bits* out, int64 stride)
{
    const int t = threadIdx.x % 4;
    const float4 from_key = four(scratch.from_key);
    const float of_0 = scratch.key_key[1][0];
    const float2 of_01 = *reinterpret_cast<const float2*>(scratch.key_key[2]);
    const float4 of_012 = four(scratch.key_key[3]), with = four(scratch.key_query[t]);
    const float from_query = scratch.from_query[t];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float even = __shfl_sync(0xffffffffu, products[2 * r], holder_of(t) + 2);
        const float odd = __shfl_sync(0xffffffffu, products[2 * r + 1], holder_of(t) + 2);
        float held[SHORT], d[SHORT];
#pragma unroll
        for (int i = 0; i < SHORT; i++)
            held[i] = __shfl_sync(0xffffffffu, products[2 * r + i % 2], holder_of(i));
#pragma unroll
        for (int i = 0; i < SHORT; i++)
            d[i] = __shfl_sync(0xffffffffu, values[r], threadIdx.x % 32 / 4 * 4 + i);
        // What stands behind the last token may be no number.
        d[0] = __fmaf_rn(-from_key.x, held[0], d[0]);
        d[1] = __fmaf_rn(-of_0, d[0], __fmaf_rn(-from_key.y, held[1], d[1]));
        d[1] = tokens > 1 ? d[1] : 0.0f;
        d[2] = __fmaf_rn(-of_01.y, d[1], __fmaf_rn(-of_01.x, d[0], __fmaf_rn(-from_key.z, held[2], d[2])));
        d[2] = tokens > 2 ? d[2] : 0.0f;
        d[3] = __fmaf_rn(-of_012.y, d[1], __fmaf_rn(-of_012.x, d[0], __fmaf_rn(-from_key.w, held[3], d[3])));
        d[3] = tokens > 3 ? __fmaf_rn(-of_012.z, d[2], d[3]) : 0.0f;
        const float asked = __fmul_rn(from_query, t % 2 ? odd : even);
        const float output = __fmaf_rn(with.w, d[3], __fmaf_rn(with.z, d[2], __fmaf_rn(with.y, d[1], __fmaf_rn(with.x, d[0], asked))));
        if (t < tokens)
            out[t * stride + 8 * r] = float_to_bf16(output);
    }
}

// Solve the systems of a row, `lane % LONG_ROWS` of the warp's, and store its outputs; the lanes of a row take turns with the tokens.
template <int WIDTH>
__device__ __forceinline__ void solve_long(const Scratch<WIDTH>& scratch, const Bits (&values)[WIDTH], int tokens, Bits* out, int64 stride)
{
    const int lane = threadIdx.x % 32;
    const float* along = scratch.along[lane % LONG_ROWS];
    float d[WIDTH];
#pragma unroll
    for (int first = 0; first < WIDTH; first += 4) {
        if (first >= tokens) {
#pragma unroll
            for (int t = first; t < first + 4; t++)
                d[t] = 0.0f;
            continue;
        }
        const float4 beta = four(scratch.beta + first), factor = four(scratch.from_key + first), sums = four(along + first);
        d[first] = __fmaf_rn(-factor.x, sums.x, __fmul_rn(beta.x, bf16_to_float(values[first])));
        d[first + 1] = __fmaf_rn(-factor.y, sums.y, __fmul_rn(beta.y, bf16_to_float(values[first + 1])));
        d[first + 2] = __fmaf_rn(-factor.z, sums.z, __fmul_rn(beta.z, bf16_to_float(values[first + 2])));
        d[first + 3] = __fmaf_rn(-factor.w, sums.w, __fmul_rn(beta.w, bf16_to_float(values[first + 3])));
#pragma unroll
        for (int t = first; t < first + 4; t++) {
#pragma unroll
            for (int s = 0; s < t; s += 4) {
                const float4 with = four(scratch.key_key[t] + s);
                d[t] = __fmaf_rn(-with.x, d[s], d[t]);
                if (s + 1 < t)
                    d[t] = __fmaf_rn(-with.y, d[s + 1], d[t]);
                if (s + 2 < t)
                    d[t] = __fmaf_rn(-with.z, d[s + 2], d[t]);
                if (s + 3 < t)
                    d[t] = __fmaf_rn(-with.w, d[s + 3], d[t]);
            }
            // What stands behind the last token may be no number.
            if (t >= tokens)
                d[t] = 0.0f;
        }
    }
#pragma unroll
    for (int turn = 0; turn < WIDTH * LONG_ROWS / 32; turn++) {
        const int t = 32 / LONG_ROWS * turn + lane / LONG_ROWS;
        if (t < tokens) {
            float output = __fmul_rn(scratch.from_query[t], along[WIDTH + t]);
#pragma unroll
            for (int s = 0; s < WIDTH; s += 4) {
                const float4 with = four(scratch.key_query[t] + s);
                output = __fmaf_rn(
                    with.w, d[s + 3], __fmaf_rn(with.z, d[s + 2], __fmaf_rn(with.y, d[s + 1], __fmaf_rn(with.x, d[s], output))));
            }
            out[t * stride] = float_to_bf16(output);
        }
    }
}

// `before` is for what comes in front of a verification.
template <int WIDTH, int WARPS, class Before>
struct RecordMemory {
    Before before;
    Scratch<WIDTH> scratch[WARPS];
};

using ReplayMemory = Tokens<128, RECORD_WARPS, RECORD_TILE, false>;

// Verification of up to WIDTH tokens with tensor cores: all products with the state are independent of each other, and tokens meet in
// triangular systems of T equations (the WY form), so that the chain is that of one token. With a previous log the state is first taken past
// its accepted tokens and stored. A warp needs no other; only a replay or a convolution in front does.
template <int DIM, bool folds, int WIDTH, int WARPS, int ROWS, class Inputs, class Before>
__device__ __forceinline__ void record(
    RecordMemory<WIDTH, WARPS, Before>& memory, const Batch& batch, const typename Inputs::Arrays& arrays, const States& states,
    const void* source, const void* valid, const Log& log, const Log& previous, const void* accepted, float scale, int64 flags, int64* signal)
{
    const Place<DIM, WARPS, ROWS, RECORD_LANES> place(blockIdx.x, static_cast<unsigned>(batch.heads));
    const Groups groups{static_cast<unsigned>(static_cast<uint64>(flags) >> 32)};
    const int key_head = groups.key_head(place.head);
    wait_for_predecessor();
    // Everything is on its way before anything is waited for; first what more loads depend on.
    const Id slot(source, id_bytes_of(flags, WIDE_SLOTS), place.item), limit(valid, id_bytes_of(flags, WIDE_VALID), place.item),
        count_of_previous(accepted, id_bytes_of(flags, WIDE_ACCEPTED), place.item);
    const int lane = threadIdx.x % 32;
    const bool normalize = flags & NORMALIZE;
    Scratch<WIDTH>& scratch = memory.scratch[threadIdx.x / 32];
    // Rows of the block: the lane's first, and a lane's own token of four.
    const int row = place.first_row - place.tile * place.rows, turn = lane % 4;
    // Registers are short where states go past several tokens, or there are many: what is needed late is then read again.
    constexpr bool reads_again = folds || WIDTH > SHORT;
    // Sums in the same order in every kernel for so many tokens, and so the same bits.
    constexpr int CHAINS = WIDTH > SHORT ? 1 : 2;
    uint2 columns[DIM / 16];
    typename Inputs::Shared* shared = nullptr;
    if constexpr (Inputs::convolves)
        shared = &memory.before;
    Inputs inputs(arrays, *shared, batch, place, key_head);
    if constexpr (!Inputs::convolves)
        load_columns(columns, inputs, 0);
    // Values of the lane's own token.
    Bits own[ROWS];
    const auto load_own = [&] {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            own[r] = inputs.value(turn, row + place.groups * r);
    };
    if constexpr (!Inputs::convolves && !reads_again)
        load_own();
    float g = 0.0f, beta = 0.0f;
    if (lane < batch.tokens) {
        g = __ldg(batch.g + place.item * batch.g_batch + lane * batch.g_token + place.head);
        beta = __ldg(batch.beta + place.item * batch.beta_batch + lane * batch.beta_token + place.head);
    }
    const Verification found{
        slot.value(id_bytes_of(flags, WIDE_SLOTS)), count_of_previous.value(id_bytes_of(flags, WIDE_ACCEPTED)),
        tokens_of(batch, valid ? limit.value(id_bytes_of(flags, WIDE_VALID)) : batch.tokens)};
    if (!found.is_usable(place, states.slots, accepted, previous.width, signal))
        return clear_outputs(batch, place, 0);
    const int tokens = found.tokens;
    if constexpr (Inputs::convolves)
        inputs.load_history(found.slot);
    const int64 at = found.slot * states.slot_stride + place.state();
    float4 state[ROWS][DIM / 16];
    // Registers do not suffice for a state beside the windows of a long convolution.
    constexpr bool loads_late = Inputs::convolves && WIDTH > SHORT;
    if constexpr (!loads_late)
        states.load<DIM, RECORD_LANES>(state, at);
    states.fetch_next<DIM>(found.slot * states.slot_stride + place.block_state(), place.rows);
    Part<DIM, RECORD_TILE, false> part{};
    if constexpr (folds) {
        if (threadIdx.x / 16 < found.m)
            part.load(source_of<DIM>(previous, place, place.item, threadIdx.x / 16));
        if (batch.items > 1 && is_taken(source, source, id_bytes_of(flags, WIDE_SLOTS), batch.items, 1, states.slots, place.item, found.slot)) {
            if (place.is_first())
                count(signal, OCCUPIED);
            return clear_outputs(batch, place, 0);
        }
    }

    const int64 entry = place.item * log.width;
    const bool has_keys = place.tile == 0 && groups.is_first(place.head);
    if (place.tile == 0 && threadIdx.x < tokens)
        log.gates[(entry + lane) * log.heads + place.head] = make_float2(g, beta);
    if constexpr (Inputs::convolves)
        inputs.fetch_next(found.slot, has_keys);
    // Where registers suffice, the gates are done with before the columns are there.
    constexpr bool weighs_early = WIDTH == SHORT && ROWS == 1;
    Weights early;
    if constexpr (weighs_early)
        early = Weights(sum_gates<WIDTH>(g), beta, 0, 0, scale);
    if constexpr (Inputs::convolves) {
        inputs.convolve(entry, tokens, has_keys);
        if (WIDTH > SHORT && has_keys)
            inputs.log_keys(log, entry, key_head, tokens);
        load_columns(columns, inputs, 0);
    }
    if constexpr (loads_late)
        states.load<DIM, RECORD_LANES>(state, at);
    const float gates = weighs_early ? 0.0f : sum_gates<WIDTH>(g);
    const auto weights_of = [&](int of, int with) { return weighs_early ? early : Weights(gates, beta, of, with, scale); };
    const auto log_keys = [&](int first) {
        const int t = first + lane / 4;
        if (has_keys && threadIdx.x < 16 && t < tokens) {
            uint2* to = reinterpret_cast<uint2*>(log.k + ((entry + t) * log.key_heads + key_head) * DIM) + lane % 4;
#pragma unroll
            for (int j = 0; j < DIM / 16; j++)
                to[RECORD_LANES * j] = columns[j];
        }
    };
    if constexpr (WIDTH > SHORT) {
        // No token sees what comes behind its four, and 0 times what happens to stand there need not be 0.
        for (int i = lane; i < WIDTH * WIDTH; i += 32)
            scratch.key_query[i / WIDTH][i % WIDTH] = 0.0f;
        __syncwarp();
    }
#pragma unroll 1
    for (int first = 0; first < (WIDTH > SHORT ? tokens : SHORT); first += SHORT) {
        if (WIDTH > SHORT && first > 0)
            load_columns(columns, inputs, first);
        // With few tokens the coefficients come first: somebody waits for them.
        if (!Inputs::convolves && WIDTH > SHORT)
            log_keys(first);
        float row_scale;
        make_coefficients<Inputs, CHAINS, false>(scratch, columns, first, nullptr, first, weights_of, normalize, row_scale);
        if constexpr (WIDTH > SHORT) {
            __syncwarp();
#pragma unroll 1
            for (int other = 0; other < first; other += SHORT)
                make_coefficients<Inputs, CHAINS, true>(
                    scratch, columns, first, inputs.columns_at(other), other, weights_of, normalize, row_scale);
        }
        if (!Inputs::convolves && WIDTH == SHORT)
            log_keys(first);
    }
    if constexpr (Inputs::convolves && WIDTH == SHORT)
        if (has_keys)
            inputs.log_keys(log, entry, key_head, tokens);
    __syncwarp();
    if constexpr (folds)
        if (found.m > 0) {
            auto& prepared = reinterpret_cast<Tokens<DIM, RECORD_WARPS, RECORD_TILE, false>&>(memory.before);
            replay<DIM>(state, prepared, part, previous, place, place.item, static_cast<int>(found.m), normalize, states.are_bfloat16);
            states.store<DIM, RECORD_LANES>(state, at);
        }
    const int64 stride = batch.heads * DIM;
    const auto logged_values = [&] { return log.v + (place.item * log.width * log.heads + place.head) * DIM + place.tile * place.rows; };
    const auto outputs = [&] { return batch.out + batch.output(place.item, 0, place.head, DIM) + place.tile * place.rows; };
    if constexpr (WIDTH == SHORT) {
        if constexpr (Inputs::convolves || reads_again)
            load_own();
        float values[ROWS], products[4];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (turn < tokens)
                logged_values()[turn * stride + row + place.groups * r] = own[r];
            values[r] = __fmul_rn(scratch.beta[turn], bf16_to_float(own[r]));
        }
        if (reads_again)
            load_columns(columns, inputs, 0);
        multiply_state<DIM>(products, state, columns);
        release_successor();
        solve_short(scratch, values, products, tokens, outputs() + row, stride);
    } else {
        const int own_row = row - lane / RECORD_LANES + lane % LONG_ROWS;
#pragma unroll 1
        for (int first = 0; first < tokens; first += SHORT) {
            load_columns(columns, inputs, first);
            float products[4];
            multiply_state<DIM>(products, state, columns);
            const int column = turn < 2 ? first + 2 * turn : WIDTH + first + 2 * turn - 4;
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                *reinterpret_cast<float2*>(&scratch.along[lane / 4 + 8 * r][column]) = make_float2(products[2 * r], products[2 * r + 1]);
        }
        release_successor();
        __syncwarp();
        Bits values[WIDTH];
#pragma unroll
        for (int t = 0; t < WIDTH; t++)
            values[t] = t < tokens ? inputs.value(t, own_row) : 0;
        solve_long(scratch, values, tokens, outputs() + own_row, stride);
        Bits* logged = logged_values();
#pragma unroll
        for (int t = 0; t < WIDTH; t++)
            if (t < tokens && t % (32 / LONG_ROWS) == lane / LONG_ROWS)
                logged[t * stride + own_row] = values[t];
    }
    if (tokens < batch.tokens)
        clear_outputs(batch, place, tokens);
}

struct ExactMemory {
    Tokens<128, WARPS, TILE, true> tokens;
    Tokens<128, WARPS, TILE, false> logged;
};

// Verification token by token: what `direct` puts out, to the bit.
template <int DIM, bool folds>
__device__ __forceinline__ void record_exactly(
    ExactMemory* memory, const Batch& batch, const States& states, const void* source, int64 id_bytes, const void* valid, int64 valid_bytes,
    const Log& log, const Log& previous, const void* accepted, int64 accepted_bytes, float scale, bool normalize, int64* signal)
{
    const Place<DIM, WARPS, ROWS, LANES> place(blockIdx.x, static_cast<unsigned>(batch.heads));
    auto& shared = reinterpret_cast<Tokens<DIM, WARPS, TILE, true>&>(memory->tokens);
    const Verification found{
        load_id(source, id_bytes, place.item), accepted ? load_id(accepted, accepted_bytes, place.item) : 0,
        tokens_of(batch, valid ? load_id(valid, valid_bytes, place.item) : batch.tokens)};
    if (!found.is_usable(place, states.slots, accepted, previous.width, signal))
        return clear_outputs(batch, place, 0);
    const int64 at = found.slot * states.slot_stride + place.state();
    float4 state[ROWS][DIM / 4 / LANES];
    states.load<DIM, LANES>(state, at);
    states.fetch_next<DIM>(found.slot * states.slot_stride + place.block_state(), place.rows);
    if constexpr (folds) {
        auto& logged = reinterpret_cast<Tokens<DIM, WARPS, TILE, false>&>(memory->logged);
        Part<DIM, TILE, false> part{};
        if (logged.mine() < found.m)
            part.load(source_of<DIM>(previous, place, place.item, logged.mine()));
        if (batch.items > 1 && is_taken(source, source, id_bytes, batch.items, 1, states.slots, place.item, found.slot)) {
            if (place.is_first())
                count(signal, OCCUPIED);
            return clear_outputs(batch, place, 0);
        }
        if (found.m > 0) {
            replay<DIM>(state, logged, part, previous, place, place.item, static_cast<int>(found.m), normalize, states.are_bfloat16);
            states.store<DIM, LANES>(state, at);
        }
    }
    const int group = batch.group();
    const int lane = threadIdx.x % 16;
#pragma unroll 1
    for (int first = 0; first < found.tokens; first += shared.count) {
        if (first > 0)
            __syncthreads();
        const int t = first + shared.mine();
        Part<DIM, TILE, true> part{};
        if (t < found.tokens) {
            part.load(source_of<DIM>(batch, place, t));
            const int64 entry = place.item * log.width + t;
            Bits* v = log.v + (entry * log.heads + place.head) * DIM + place.tile * TILE;
#pragma unroll
            for (int i = 0; i < (TILE + 15) / 16; i++)
                if (TILE % 16 == 0 || lane < TILE)
                    v[16 * i + lane] = part.v[i];
            if (place.tile == 0 && lane == 0)
                log.gates[entry * log.heads + place.head] = make_float2(part.g, part.beta);
            if (place.tile == 0 && place.head % group == 0) {
                uint2* k = reinterpret_cast<uint2*>(log.k + (entry * log.key_heads + place.head / group) * DIM);
#pragma unroll
                for (int i = 0; i < DIM / 64; i++)
                    k[16 * i + lane] = part.k.words[i];
            }
        }
        if (first + shared.mine() / 2 * 2 < found.tokens)
            shared.share(part, normalize);
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < min(shared.count, found.tokens - first); i++) {
            float output[ROWS];
            advance<DIM, LANES, true>(state, shared, i, place.lane, place.first_row % TILE, states.are_bfloat16, scale, output);
            store_output(batch, place, first + i, output);
        }
    }
    clear_outputs(batch, place, found.tokens);
}

#define GPUKIT_RECORD_PARAMETERS                                    \
    GPUKIT_BATCH_PARAMETERS,                                        \
    void *pool,          /* [slots, Hv, V, K] of the layer */       \
    int64 slot_stride,   /* in elements */                          \
    int64 slots,                                                    \
    const void *source,  /* [B] */                                  \
    const void *valid,   /* [B] or null */                          \
    Bits *log_k,         /* of the layer */                         \
    Bits *log_v,                                                    \
    float2 *log_gates,                                              \
    int64 width

#define GPUKIT_FOLD_RECORD_PARAMETERS                               \
    GPUKIT_RECORD_PARAMETERS,                                       \
    Bits *previous_k,    /* of the layer */                         \
    Bits *previous_v,                                               \
    float2 *previous_gates,                                         \
    int64 previous_width,                                           \
    const void *accepted /* [B] */

#define GPUKIT_RECORD                                                                  \
    const Log log{log_k, log_v, log_gates, width, key_heads, heads};                   \
    const States states{pool, slot_stride, slots, (flags & BFLOAT16_STATES) != 0, prefetch}; \
    const float scale_of_outputs = __int_as_float(static_cast<int>(scale))

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_record(
    GPUKIT_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<SHORT, RECORD_WARPS, Nothing> memory;
    GPUKIT_BATCH;
    GPUKIT_RECORD;
    if (dim == 128)
        record<128, false, SHORT, RECORD_WARPS, RECORD_ROWS, Given<128>>(
            memory, batch, {}, states, source, valid, log, log, nullptr, scale_of_outputs, flags, signal);
    else
        record<64, false, SHORT, RECORD_WARPS, RECORD_ROWS, Given<64>>(
            memory, batch, {}, states, source, valid, log, log, nullptr, scale_of_outputs, flags, signal);
}

extern "C" __global__ void __launch_bounds__(32 * WIDE_RECORD_WARPS, WIDE_RECORD_BLOCKS) gpukit_record_wide(
    GPUKIT_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<SHORT, WIDE_RECORD_WARPS, Nothing> memory;
    GPUKIT_BATCH;
    GPUKIT_RECORD;
    if (dim == 128)
        record<128, false, SHORT, WIDE_RECORD_WARPS, WIDE_RECORD_ROWS, Given<128>>(
            memory, batch, {}, states, source, valid, log, log, nullptr, scale_of_outputs, flags, signal);
    else
        record<64, false, SHORT, WIDE_RECORD_WARPS, WIDE_RECORD_ROWS, Given<64>>(
            memory, batch, {}, states, source, valid, log, log, nullptr, scale_of_outputs, flags, signal);
}

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_record_long(
    GPUKIT_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<MOST_TOKENS, RECORD_WARPS, Nothing> memory;
    GPUKIT_BATCH;
    GPUKIT_RECORD;
    if (dim == 128)
        record<128, false, MOST_TOKENS, RECORD_WARPS, RECORD_ROWS, Given<128>>(
            memory, batch, {}, states, source, valid, log, log, nullptr, scale_of_outputs, flags, signal);
    else
        record<64, false, MOST_TOKENS, RECORD_WARPS, RECORD_ROWS, Given<64>>(
            memory, batch, {}, states, source, valid, log, log, nullptr, scale_of_outputs, flags, signal);
}

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_fold_record(
    GPUKIT_FOLD_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<SHORT, RECORD_WARPS, ReplayMemory> memory;
    GPUKIT_BATCH;
    GPUKIT_RECORD;
    const Log previous{previous_k, previous_v, previous_gates, previous_width, key_heads, heads};
    if (dim == 128)
        record<128, true, SHORT, RECORD_WARPS, RECORD_ROWS, Given<128>>(
            memory, batch, {}, states, source, valid, log, previous, accepted, scale_of_outputs, flags, signal);
    else
        record<64, true, SHORT, RECORD_WARPS, RECORD_ROWS, Given<64>>(
            memory, batch, {}, states, source, valid, log, previous, accepted, scale_of_outputs, flags, signal);
}

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_fold_record_long(
    GPUKIT_FOLD_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<MOST_TOKENS, RECORD_WARPS, ReplayMemory> memory;
    GPUKIT_BATCH;
    GPUKIT_RECORD;
    const Log previous{previous_k, previous_v, previous_gates, previous_width, key_heads, heads};
    if (dim == 128)
        record<128, true, MOST_TOKENS, RECORD_WARPS, RECORD_ROWS, Given<128>>(
            memory, batch, {}, states, source, valid, log, previous, accepted, scale_of_outputs, flags, signal);
    else
        record<64, true, MOST_TOKENS, RECORD_WARPS, RECORD_ROWS, Given<64>>(
            memory, batch, {}, states, source, valid, log, previous, accepted, scale_of_outputs, flags, signal);
}

#define GPUKIT_CONV_RECORD_PARAMETERS                                   \
    const Bits *x,            /* [B, T, C], raw columns */              \
    int64 x_batch, int64 x_token,                                       \
    const Bits *weight,       /* [C, TAPS] */                           \
    const float *g, int64 g_batch, int64 g_token,                       \
    const float *beta, int64 beta_batch, int64 beta_token,              \
    Bits *out, int64 items, int64 tokens, int64 key_heads, int64 heads, int64 dim, \
    void *pool, int64 slot_stride, int64 slots, const void *source, const void *valid, \
    const Bits *histories,    /* [slots, TAPS - 1, C] of the layer */   \
    int64 history_slot_stride,                                          \
    Bits *log_k, Bits *log_v, float2 *log_gates,                        \
    Bits *log_conv,           /* of the layer */                        \
    int64 width, int64 prefetch, int64 history_prefetch, int64 scale, int64 flags, int64 *signal

#define GPUKIT_CONV_RECORD                                                                                                        \
    const Batch batch{nullptr, 0, 0, nullptr, 0, 0, nullptr, 0, 0, g, g_batch, g_token, beta, beta_batch, beta_token, out, items, tokens, \
                      key_heads, heads};                                                                                          \
    const Columns columns{x, x_batch, x_token, weight, histories, history_slot_stride, history_prefetch, log_conv,                \
                          (2 * key_heads + heads) * dim};                                                                         \
    GPUKIT_RECORD

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_conv_record(GPUKIT_CONV_RECORD_PARAMETERS)
{
    __shared__ RecordMemory<SHORT, RECORD_WARPS, Convolved<128, SHORT>> memory;
    GPUKIT_CONV_RECORD;
    if (dim == 128)
        record<128, false, SHORT, RECORD_WARPS, RECORD_ROWS, Convolution<128, SHORT, RECORD_WARPS>>(
            memory, batch, columns, states, source, valid, log, log, nullptr, scale_of_outputs, flags, signal);
    else
        record<64, false, SHORT, RECORD_WARPS, RECORD_ROWS, Convolution<64, SHORT, RECORD_WARPS>>(
            memory, batch, columns, states, source, valid, log, log, nullptr, scale_of_outputs, flags, signal);
}

extern "C" __global__ void __launch_bounds__(32 * WIDE_RECORD_WARPS, WIDE_RECORD_BLOCKS) gpukit_conv_record_wide(GPUKIT_CONV_RECORD_PARAMETERS)
{
    __shared__ RecordMemory<SHORT, WIDE_RECORD_WARPS, Convolved<128, SHORT>> memory;
    GPUKIT_CONV_RECORD;
    if (dim == 128)
        record<128, false, SHORT, WIDE_RECORD_WARPS, WIDE_RECORD_ROWS, Convolution<128, SHORT, WIDE_RECORD_WARPS>>(
            memory, batch, columns, states, source, valid, log, log, nullptr, scale_of_outputs, flags, signal);
    else
        record<64, false, SHORT, WIDE_RECORD_WARPS, WIDE_RECORD_ROWS, Convolution<64, SHORT, WIDE_RECORD_WARPS>>(
            memory, batch, columns, states, source, valid, log, log, nullptr, scale_of_outputs, flags, signal);
}

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_conv_record_long(GPUKIT_CONV_RECORD_PARAMETERS)
{
    __shared__ RecordMemory<MOST_TOKENS, RECORD_WARPS, Convolved<128, MOST_TOKENS>> memory;
    GPUKIT_CONV_RECORD;
    if (dim == 128)
        record<128, false, MOST_TOKENS, RECORD_WARPS, RECORD_ROWS, Convolution<128, MOST_TOKENS, RECORD_WARPS>>(
            memory, batch, columns, states, source, valid, log, log, nullptr, scale_of_outputs, flags, signal);
    else
        record<64, false, MOST_TOKENS, RECORD_WARPS, RECORD_ROWS, Convolution<64, MOST_TOKENS, RECORD_WARPS>>(
            memory, batch, columns, states, source, valid, log, log, nullptr, scale_of_outputs, flags, signal);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, DIRECT_BLOCKS) gpukit_record_exact(
    GPUKIT_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    wait_for_predecessor();
    GPUKIT_BATCH;
    const Log log{log_k, log_v, log_gates, width, key_heads, heads};
    __shared__ ExactMemory memory;
    const States states{pool, slot_stride, slots, (flags & BFLOAT16_STATES) != 0, prefetch};
    const float scale_of_outputs = __int_as_float(static_cast<int>(scale));
    if (dim == 128)
        record_exactly<128, false>(&memory, batch, states, source, id_bytes_of(flags, WIDE_SLOTS), valid,
               id_bytes_of(flags, WIDE_VALID), log, log, nullptr, 0, scale_of_outputs, flags & NORMALIZE, signal);
    else
        record_exactly<64, false>(&memory, batch, states, source, id_bytes_of(flags, WIDE_SLOTS), valid,
               id_bytes_of(flags, WIDE_VALID), log, log, nullptr, 0, scale_of_outputs, flags & NORMALIZE, signal);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, DIRECT_BLOCKS) gpukit_fold_record_exact(
    GPUKIT_FOLD_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    wait_for_predecessor();
    GPUKIT_BATCH;
    const Log log{log_k, log_v, log_gates, width, key_heads, heads};
    const Log previous{previous_k, previous_v, previous_gates, previous_width, key_heads, heads};
    __shared__ ExactMemory memory;
    const States states{pool, slot_stride, slots, (flags & BFLOAT16_STATES) != 0, prefetch};
    const float scale_of_outputs = __int_as_float(static_cast<int>(scale));
    if (dim == 128)
        record_exactly<128, true>(&memory, batch, states, source, id_bytes_of(flags, WIDE_SLOTS), valid,
               id_bytes_of(flags, WIDE_VALID), log, previous, accepted, id_bytes_of(flags, WIDE_ACCEPTED), scale_of_outputs, flags & NORMALIZE, signal);
    else
        record_exactly<64, true>(&memory, batch, states, source, id_bytes_of(flags, WIDE_SLOTS), valid,
               id_bytes_of(flags, WIDE_VALID), log, previous, accepted, id_bytes_of(flags, WIDE_ACCEPTED), scale_of_outputs, flags & NORMALIZE, signal);
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
    for (int64 i = threadIdx.x % 32; i < count; i += 32) {
        const Commit other(rows, id_bytes, i);
        taken |= i != row && !other.is_idle() && other.is_valid(slots, width) && (other.from == to || other.to == to);
    }
    return __any_sync(0xffffffffu, taken);
}

template <int DIM>
__device__ __forceinline__ void fold(
    void* memory, const States& states, int64 layer_stride, const Log& log, int64 log_rows, const void* rows, int64 id_bytes, int64 row_count,
    bool normalize, int64* signal)
{
    const Place<DIM, FOLD_WARPS, FOLD_ROWS, LANES> place(blockIdx.x, static_cast<unsigned>(log.heads));
    auto& shared = *static_cast<Tokens<DIM, FOLD_WARPS, FOLD_TILE, false>*>(memory);
    const unsigned layer = static_cast<unsigned>(place.item) / static_cast<unsigned>(row_count);
    const unsigned row = static_cast<unsigned>(place.item) % static_cast<unsigned>(row_count);
    const Commit commit(rows, id_bytes, row);
    if (commit.is_idle())
        return;
    if (!commit.is_valid(states.slots, log.width)) {
        if (layer == 0 && place.is_first())
            count(signal, OUT_OF_RANGE);
        return;
    }
    const int64 at = layer * layer_stride + place.state();
    float4 state[FOLD_ROWS][DIM / 4 / LANES];
    states.load<DIM, LANES>(state, at + commit.from * states.slot_stride);
    const int64 logged = layer * log_rows + row;
    Part<DIM, FOLD_TILE, false> part{};
    if (shared.mine() < commit.m)
        part.load(source_of<DIM>(log, place, logged, shared.mine()));
    if (row_count > 1 && is_taken(rows, id_bytes, row_count, states.slots, log.width, row, commit.to)) {
        if (layer == 0 && place.is_first())
            count(signal, OCCUPIED);
        return;
    }
    replay<DIM>(state, shared, part, log, place, logged, static_cast<int>(commit.m), normalize, states.are_bfloat16);
    release_successor();
    states.store<DIM, LANES>(state, at + commit.to * states.slot_stride);
}

// The last three columns seen, after m more: eight channels a thread.
__device__ __forceinline__ void fold_history(
    unsigned block, Bits* pool, int64 layer_stride, int64 slot_stride, int64 slots, const Bits* log, int64 log_rows, int64 width,
    int64 channels, const void* rows, int64 id_bytes, int64 row_count)
{
    const unsigned vectors = static_cast<unsigned>(channels / 8);
    const unsigned pieces = (vectors + 32 * FOLD_WARPS - 1) / (32 * FOLD_WARPS);
    const unsigned vector = block % pieces * (32 * FOLD_WARPS) + threadIdx.x;
    const unsigned layer = block / pieces / static_cast<unsigned>(row_count);
    const unsigned row = block / pieces % static_cast<unsigned>(row_count);
    const Commit commit(rows, id_bytes, row);
    if (commit.is_idle() || !commit.is_valid(slots, width))
        return;
    if (row_count > 1 && is_taken(rows, id_bytes, row_count, slots, width, row, commit.to))
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

extern "C" __global__ void __launch_bounds__(32 * FOLD_WARPS, FOLD_BLOCKS) gpukit_fold(
    void* pool,            // [layers, slots, Hv, V, K]
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
    int64 flags,
    int64 state_blocks,    // the blocks before this one fold states, the rest histories
    Bits* histories,       // [layers, slots, 3, C]
    int64 history_layer_stride,
    int64 history_slot_stride,
    const Bits* log_conv,  // [layers, log_rows, W, C]
    int64 channels,
    int64* signal)
{
    wait_for_predecessor();
    if (blockIdx.x >= state_blocks)
        return fold_history(blockIdx.x - static_cast<unsigned>(state_blocks), histories, history_layer_stride, history_slot_stride, slots,
                            log_conv, log_rows, width, channels, rows, id_bytes, row_count);
    const Log log{log_k, log_v, log_gates, width, key_heads, heads};
    __shared__ Tokens<128, FOLD_WARPS, FOLD_TILE, false> memory;
    const States states{pool, slot_stride, slots, (flags & BFLOAT16_STATES) != 0, 0};
    if (dim == 128)
        fold<128>(&memory, states, layer_stride, log, log_rows, rows, id_bytes, row_count, flags & NORMALIZE, signal);
    else
        fold<64>(&memory, states, layer_stride, log, log_rows, rows, id_bytes, row_count, flags & NORMALIZE, signal);
}
