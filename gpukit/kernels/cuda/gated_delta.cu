// Device code of the gated delta rule: what the ops promise stands in `kernels/gated_delta.py`. A few lanes share a row of V, a warp holds several
// rows side by side, so a sum along K is a sum in a thread's registers and two or three exchanges. What a token needs once a head (widened
// keys, norms, decay) a warp works out for its block while the state is on its way. `advance` takes a state past one token, for every kernel
// that writes states. Each of its operations is spelled out, and none depends on what else a thread holds, so states are the same to the bit
// whoever computes them.

#include "gpukit.cuh"
#include "bf16.cuh"

using Bits = unsigned short;  // of a bfloat16

// Warps of a block and rows of V of a lane. Many small blocks, all resident: what is read and what is written then alternates finely.
constexpr int WARPS = 2;
constexpr int ROWS = 1;
constexpr int FOLD_WARPS = 2;
constexpr int FOLD_ROWS = 1;
constexpr int RECORD_WARPS = 2;
// A lane may hold two of the tensor cores' 16 rows, or one, and leave half of them empty.
constexpr int RECORD_ROWS = 2;
// Blocks side by side on a multiprocessor: so many that registers just suffice. The compiler for Hopper, on which they were measured, needs the
// fewest.
constexpr bool IS_HOPPER = __CUDA_ARCH__ == 900;
constexpr int DIRECT_BLOCKS = IS_HOPPER ? 14 : 12;
constexpr int FOLD_BLOCKS = IS_HOPPER ? 16 : 14;
constexpr int RECORD_BLOCKS = IS_HOPPER ? 8 : 6;
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
// Rows of V in a warp of a verification.
constexpr int WARP_ROWS = 32 / RECORD_LANES * RECORD_ROWS;
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
        head = block % heads;
        item = block / heads;
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

// Take the state past a prepared token; `rounds`, if it is kept as bfloat16. With outputs, those of the rows: taken from the old state in the same pass, as a (S q) + d (k q).
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

// What a verification works on: which slot, how many tokens, how many of the previous log come first.
struct Verification {
    int64 slot;
    int64 m;
    int tokens;
    bool is_idle;  // padding or refused

    template <int DIM, int WARPS, int ROWS, int LANES>
    __device__ __forceinline__ Verification(
        const Batch& batch, const Place<DIM, WARPS, ROWS, LANES>& place, int64 slots, const void* source, int64 id_bytes, const void* valid,
        int64 valid_bytes, const void* accepted, int64 accepted_bytes, int64 previous_width, int64* signal)
    {
        slot = load_id(source, id_bytes, place.item);
        m = accepted ? load_id(accepted, accepted_bytes, place.item) : 0;
        const int64 limit = valid ? load_id(valid, valid_bytes, place.item) : batch.tokens;
        tokens = static_cast<int>(max(0ll, min(limit, batch.tokens)));
        is_idle = slot < 0 || slot >= slots || m < 0 || (accepted && m > previous_width);
        if (is_idle && slot >= 0 && place.is_first())
            count(signal, OUT_OF_RANGE);
    }
};

// What the lanes of a warp tell each other in a verification of up to WIDTH tokens. Products are of raw keys and queries until they become
// coefficients.
template <int WIDTH>
struct Scratch {
    float key_key[WIDTH][WIDTH];    // [t][s], then beta_t decay(s … t) kn_s·kn_t
    float key_query[WIDTH][WIDTH];  // [t][s], then scale decay(s … t) kn_s·qn_t, zeros for s > t
    float query_query[WIDTH];
    float beta[WIDTH];
    float from_key[WIDTH];          // factor of S·k_t
    float from_query[WIDTH];        // factor of S·q_t
    float4 token[WIDTH];            // sum of g, beta, factors that make key and query of norm 1
    float along[WARP_ROWS][2 * WIDTH + 4]; // [row]: S·k of all tokens, then S·q; rows of 16 bytes that meet no bank twice
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

// Where the keys (lanes of the lower half) and queries (upper half) of four tokens are, as columns for `multiply`. Behind the last token stands
// anything: no coefficient comes of it.
__device__ __forceinline__ const uint2* columns_of(const Batch& batch, int64 item, int key_offset, int first)
{
    const int lane = threadIdx.x % 32;
    const int64 t = min(static_cast<int64>(first + lane / 4 % 4), batch.tokens - 1);
    const Bits* vector = lane < 16 ? batch.k + item * batch.k_batch + t * batch.k_token : batch.q + item * batch.q_batch + t * batch.q_token;
    return reinterpret_cast<const uint2*>(vector + key_offset) + lane % RECORD_LANES;
}

template <int STEPS>
__device__ __forceinline__ void load_columns(uint2 (&columns)[STEPS], const uint2* from)
{
#pragma unroll
    for (int j = 0; j < STEPS; j++)
        columns[j] = __ldg(from + RECORD_LANES * j);
}

// Products of the keys and queries of four tokens with the keys of four tokens, and of a query with itself.
template <int WIDTH, int STEPS>
__device__ __forceinline__ void multiply_tokens(
    Scratch<WIDTH>& scratch, const uint2 (&of)[STEPS], int first_of, const uint2* with, int first_with)
{
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < STEPS; j++)
        multiply(sums, of[j].x, 0u, of[j].y, 0u, first_of == first_with ? of[j] : __ldg(with + RECORD_LANES * j));
    const int row = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
    const int t = first_of + row % 4;
    if (column < 4) {
        float* to = row < 4 ? &scratch.key_key[t][first_with + column] : &scratch.key_query[t][first_with + column];
        to[0] = sums[0];
        to[1] = sums[1];
    } else if (first_of == first_with && row / 2 * 2 == column)
        scratch.query_query[t] = row % 2 ? sums[1] : sums[0];
}

// Products to coefficients of the triangular systems d_t = beta_t v_t - from_key_t S·k_t - sum of key_key_ts d_s over s < t and
// o_t = from_query_t S·q_t + sum of key_query_ts d_s over s <= t. A lane comes with the gates of the token of its number.
template <int WIDTH>
__device__ __forceinline__ void make_coefficients(Scratch<WIDTH>& scratch, int tokens, float g, float beta, float scale, bool normalize)
{
    const int lane = threadIdx.x % 32;
    float sum = fmaxf(g, LEAST_GATE);
#pragma unroll
    for (int step = 1; step < WIDTH; step *= 2) {
        const float before = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step)
            sum += before;
    }
    if (lane < tokens) {
        const float key_scale = normalize ? rsqrtf(scratch.key_key[lane][lane] + EPSILON) : 1.0f;
        const float query_scale = normalize ? rsqrtf(scratch.query_query[lane] + EPSILON) : 1.0f;
        const float decay = expf(sum);
        scratch.token[lane] = make_float4(sum, beta, key_scale, query_scale);
        scratch.beta[lane] = beta;
        scratch.from_key[lane] = beta * decay * key_scale;
        scratch.from_query[lane] = scale * decay * query_scale;
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < WIDTH * WIDTH; i += 32) {
        const int t = i / WIDTH, s = i % WIDTH;
        if (t >= tokens)
            continue;
        const float4 late = scratch.token[t], early = scratch.token[min(s, t)];
        const float between = expf(late.x - early.x) * early.z;
        scratch.key_query[t][s] = s <= t ? scratch.key_query[t][s] * (scale * between * late.w) : 0.0f;
        scratch.key_key[t][s] *= late.y * between * late.z;
    }
}

// Four of a row of coefficients or sums.
__device__ __forceinline__ float4 four(const float* from)
{
    return *reinterpret_cast<const float4*>(from);
}

// Products of the state with the columns of four tokens, for `along`. A warp holds 16 rows.
template <int DIM, int WIDTH>
__device__ __forceinline__ void multiply_state(
    Scratch<WIDTH>& scratch, const float4 (&state)[RECORD_ROWS][DIM / 16], const uint2 (&columns)[DIM / 16], int first)
{
    float sums[4][4] = {};
#pragma unroll
    for (int j = 0; j < DIM / 16; j++) {
        unsigned upper[4] = {}, rest[4] = {};
#pragma unroll
        for (int r = 0; r < RECORD_ROWS; r++) {
            split(state[r][j].x, state[r][j].y, upper[r], rest[r]);
            split(state[r][j].z, state[r][j].w, upper[r + 2], rest[r + 2]);
        }
        multiply(sums[j % 2], upper[0], upper[1], upper[2], upper[3], columns[j]);
        multiply(sums[2 + j % 2], rest[0], rest[1], rest[2], rest[3], columns[j]);
    }
#pragma unroll
    for (int i = 0; i < 2 * RECORD_ROWS; i++)
        sums[0][i] += sums[1][i] + (sums[2][i] + sums[3][i]);
    const int lane = threadIdx.x % 32;
    const int column = lane % 4 < 2 ? first + 2 * (lane % 4) : WIDTH + first + 2 * (lane % 4) - 4;
#pragma unroll
    for (int r = 0; r < RECORD_ROWS; r++)
        *reinterpret_cast<float2*>(&scratch.along[lane / 4 + 8 * r][column]) = make_float2(sums[0][2 * r], sums[0][2 * r + 1]);
}

// Solve the triangular systems of a row, `lane % WARP_ROWS` of the warp's, and store its outputs; the lanes of a row take turns with the tokens.
template <int WIDTH>
__device__ __forceinline__ void solve(const Scratch<WIDTH>& scratch, const Bits (&values)[WIDTH], int tokens, Bits* out, int64 stride)
{
    const int lane = threadIdx.x % 32;
    const float* along = scratch.along[lane % WARP_ROWS];
    float d[WIDTH];
#pragma unroll
    for (int first = 0; first < WIDTH; first += 4) {
        if (WIDTH > SHORT && first >= tokens) {
#pragma unroll
            for (int t = first; t < first + 4; t++)
                d[t] = 0.0f;
            continue;
        }
        const float4 beta = four(scratch.beta + first), factor = four(scratch.from_key + first), sums = four(along + first);
        d[first] = beta.x * bf16_to_float(values[first]) - factor.x * sums.x;
        d[first + 1] = beta.y * bf16_to_float(values[first + 1]) - factor.y * sums.y;
        d[first + 2] = beta.z * bf16_to_float(values[first + 2]) - factor.z * sums.z;
        d[first + 3] = beta.w * bf16_to_float(values[first + 3]) - factor.w * sums.w;
#pragma unroll
        for (int t = first; t < first + 4; t++)
#pragma unroll
            for (int s = 0; s < t; s += 4) {
                const float4 with = four(scratch.key_key[t] + s);
                d[t] -= with.x * d[s];
                if (s + 1 < t)
                    d[t] -= with.y * d[s + 1];
                if (s + 2 < t)
                    d[t] -= with.z * d[s + 2];
                if (s + 3 < t)
                    d[t] -= with.w * d[s + 3];
            }
    }
#pragma unroll
    for (int turn = 0; turn < WIDTH * WARP_ROWS / 32; turn++) {
        const int t = 32 / WARP_ROWS * turn + lane / WARP_ROWS;
        if (t < tokens) {
            float output = scratch.from_query[t] * along[WIDTH + t];
#pragma unroll
            for (int s = 0; s < WIDTH; s += 4) {
                const float4 with = four(scratch.key_query[t] + s);
                output += with.x * d[s] + with.y * d[s + 1] + (with.z * d[s + 2] + with.w * d[s + 3]);
            }
            out[t * stride] = float_to_bf16(output);
        }
    }
}

template <int WIDTH>
struct RecordMemory {
    Tokens<128, RECORD_WARPS, RECORD_TILE, false> tokens;
    Scratch<WIDTH> scratch[RECORD_WARPS];
};

// Verification of up to WIDTH tokens with tensor cores: all products with the state are independent of each other, and tokens meet in
// triangular systems of T equations (the WY form), so that the chain is that of one token. With a previous log the state is first taken past
// its accepted tokens and stored. A warp needs no other; only a replay in front does.
template <int DIM, bool folds, int WIDTH>
__device__ __forceinline__ void record(
    RecordMemory<WIDTH>* memory, const Batch& batch, const States& states, const void* source, int64 id_bytes, const void* valid,
    int64 valid_bytes, const Log& log, const Log& previous, const void* accepted, int64 accepted_bytes, float scale, bool normalize,
    int64* signal)
{
    const Place<DIM, RECORD_WARPS, RECORD_ROWS, RECORD_LANES> place(blockIdx.x, static_cast<unsigned>(batch.heads));
    auto& shared = reinterpret_cast<Tokens<DIM, RECORD_WARPS, RECORD_TILE, false>&>(memory->tokens);
    Scratch<WIDTH>& scratch = memory->scratch[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    const int key_head = place.head / batch.group();
    // Registers are short where states go past several tokens, or there are many: what is needed late is then read again.
    constexpr bool is_long = folds || WIDTH > SHORT;
    // Everything is on its way before anything is waited for.
    uint2 columns[DIM / 16];
    load_columns(columns, columns_of(batch, place.item, key_head * DIM, 0));
    float g = 0.0f, beta = 0.0f;
    if (lane < batch.tokens) {
        g = __ldg(batch.g + place.item * batch.g_batch + lane * batch.g_token + place.head);
        beta = __ldg(batch.beta + place.item * batch.beta_batch + lane * batch.beta_token + place.head);
    }
    const int first_row = place.first_row - lane / 4;
    const Bits* v = batch.v + place.item * batch.v_batch + place.head * DIM + first_row + lane % WARP_ROWS;
    Bits values[WIDTH];
    if constexpr (!is_long)
#pragma unroll
        for (int t = 0; t < WIDTH; t++)
            values[t] = t < batch.tokens ? __ldg(v + t * batch.v_token) : 0;
    const Verification found(batch, place, states.slots, source, id_bytes, valid, valid_bytes, accepted, accepted_bytes, previous.width, signal);
    if (found.is_idle)
        return clear_outputs(batch, place, 0);
    const int tokens = found.tokens;
    const int64 at = found.slot * states.slot_stride + place.state();
    float4 state[RECORD_ROWS][DIM / 16];
    states.load<DIM, RECORD_LANES>(state, at);
    states.fetch_next<DIM>(found.slot * states.slot_stride + place.block_state(), place.rows);
    Part<DIM, RECORD_TILE, false> part{};
    if constexpr (folds) {
        if (shared.mine() < found.m)
            part.load(source_of<DIM>(previous, place, place.item, shared.mine()));
        if (batch.items > 1 && is_taken(source, source, id_bytes, batch.items, 1, states.slots, place.item, found.slot)) {
            if (place.is_first())
                count(signal, OCCUPIED);
            return clear_outputs(batch, place, 0);
        }
    }

    const int64 entry = place.item * log.width;
    const bool is_first_warp = place.tile == 0 && threadIdx.x < 32;
    const bool logs_keys = is_first_warp && place.head % batch.group() == 0;
    if (is_first_warp && lane < tokens)
        log.gates[(entry + lane) * log.heads + place.head] = make_float2(g, beta);
    const auto log_values = [&] {
        Bits* logged = log.v + (entry * log.heads + place.head) * DIM + first_row + lane % WARP_ROWS;
#pragma unroll
        for (int t = 0; t < WIDTH; t++)
            if (t < tokens && t % (32 / WARP_ROWS) == lane / WARP_ROWS)
                logged[t * log.heads * DIM] = values[t];
    };
    if constexpr (!is_long)
        log_values();
#pragma unroll 1
    for (int first = 0; first < tokens; first += 4) {
        if (WIDTH > SHORT && first > 0)
            load_columns(columns, columns_of(batch, place.item, key_head * DIM, first));
        const int t = first + lane / 4;
        if (logs_keys && lane < 16 && t < tokens) {
            uint2* to = reinterpret_cast<uint2*>(log.k + ((entry + t) * log.key_heads + key_head) * DIM) + lane % 4;
#pragma unroll
            for (int j = 0; j < DIM / 16; j++)
                to[RECORD_LANES * j] = columns[j];
        }
        multiply_tokens(scratch, columns, first, nullptr, first);
#pragma unroll 1
        for (int other = 0; WIDTH > SHORT && other < first; other += 4)
            multiply_tokens(scratch, columns, first, columns_of(batch, place.item, key_head * DIM, other), other);
    }
    __syncwarp();
    make_coefficients(scratch, tokens, g, beta, scale, normalize);
    if constexpr (folds)
        if (found.m > 0) {
            replay<DIM>(state, shared, part, previous, place, place.item, static_cast<int>(found.m), normalize, states.are_bfloat16);
            states.store<DIM, RECORD_LANES>(state, at);
        }
#pragma unroll 1
    for (int first = 0; first < tokens; first += 4) {
        if (is_long)
            load_columns(columns, columns_of(batch, place.item, key_head * DIM, first));
        multiply_state<DIM>(scratch, state, columns, first);
    }
    release_successor();
    __syncwarp();
    if constexpr (is_long)
#pragma unroll
        for (int t = 0; t < WIDTH; t++)
            values[t] = t < tokens ? __ldg(v + t * batch.v_token) : 0;
    solve(scratch, values, tokens, batch.out + batch.output(place.item, 0, place.head, DIM) + first_row + lane % WARP_ROWS, batch.heads * DIM);
    if constexpr (is_long)
        log_values();
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
    const Verification found(batch, place, states.slots, source, id_bytes, valid, valid_bytes, accepted, accepted_bytes, previous.width, signal);
    if (found.is_idle)
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

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_record(
    GPUKIT_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<SHORT> memory;
    wait_for_predecessor();
    GPUKIT_BATCH;
    const Log log{log_k, log_v, log_gates, width, key_heads, heads};
    const States states{pool, slot_stride, slots, (flags & BFLOAT16_STATES) != 0, prefetch};
    const float scale_of_outputs = __int_as_float(static_cast<int>(scale));
    if (dim == 128)
        record<128, false>(&memory, batch, states, source, id_bytes_of(flags, WIDE_SLOTS), valid, id_bytes_of(flags, WIDE_VALID), log,
                          log, nullptr, 0, scale_of_outputs, flags & NORMALIZE, signal);
    else
        record<64, false>(&memory, batch, states, source, id_bytes_of(flags, WIDE_SLOTS), valid, id_bytes_of(flags, WIDE_VALID), log,
                          log, nullptr, 0, scale_of_outputs, flags & NORMALIZE, signal);
}

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_fold_record(
    GPUKIT_FOLD_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<SHORT> memory;
    wait_for_predecessor();
    GPUKIT_BATCH;
    const Log log{log_k, log_v, log_gates, width, key_heads, heads};
    const Log previous{previous_k, previous_v, previous_gates, previous_width, key_heads, heads};
    const States states{pool, slot_stride, slots, (flags & BFLOAT16_STATES) != 0, prefetch};
    const float scale_of_outputs = __int_as_float(static_cast<int>(scale));
    if (dim == 128)
        record<128, true>(&memory, batch, states, source, id_bytes_of(flags, WIDE_SLOTS), valid, id_bytes_of(flags, WIDE_VALID), log,
                          previous, accepted, id_bytes_of(flags, WIDE_ACCEPTED), scale_of_outputs, flags & NORMALIZE, signal);
    else
        record<64, true>(&memory, batch, states, source, id_bytes_of(flags, WIDE_SLOTS), valid, id_bytes_of(flags, WIDE_VALID), log,
                          previous, accepted, id_bytes_of(flags, WIDE_ACCEPTED), scale_of_outputs, flags & NORMALIZE, signal);
}

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_record_long(
    GPUKIT_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<MOST_TOKENS> memory;
    wait_for_predecessor();
    GPUKIT_BATCH;
    const Log log{log_k, log_v, log_gates, width, key_heads, heads};
    const States states{pool, slot_stride, slots, (flags & BFLOAT16_STATES) != 0, prefetch};
    const float scale_of_outputs = __int_as_float(static_cast<int>(scale));
    if (dim == 128)
        record<128, false>(&memory, batch, states, source, id_bytes_of(flags, WIDE_SLOTS), valid, id_bytes_of(flags, WIDE_VALID), log,
                          log, nullptr, 0, scale_of_outputs, flags & NORMALIZE, signal);
    else
        record<64, false>(&memory, batch, states, source, id_bytes_of(flags, WIDE_SLOTS), valid, id_bytes_of(flags, WIDE_VALID), log,
                          log, nullptr, 0, scale_of_outputs, flags & NORMALIZE, signal);
}

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_fold_record_long(
    GPUKIT_FOLD_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<MOST_TOKENS> memory;
    wait_for_predecessor();
    GPUKIT_BATCH;
    const Log log{log_k, log_v, log_gates, width, key_heads, heads};
    const Log previous{previous_k, previous_v, previous_gates, previous_width, key_heads, heads};
    const States states{pool, slot_stride, slots, (flags & BFLOAT16_STATES) != 0, prefetch};
    const float scale_of_outputs = __int_as_float(static_cast<int>(scale));
    if (dim == 128)
        record<128, true>(&memory, batch, states, source, id_bytes_of(flags, WIDE_SLOTS), valid, id_bytes_of(flags, WIDE_VALID), log,
                          previous, accepted, id_bytes_of(flags, WIDE_ACCEPTED), scale_of_outputs, flags & NORMALIZE, signal);
    else
        record<64, true>(&memory, batch, states, source, id_bytes_of(flags, WIDE_SLOTS), valid, id_bytes_of(flags, WIDE_VALID), log,
                          previous, accepted, id_bytes_of(flags, WIDE_ACCEPTED), scale_of_outputs, flags & NORMALIZE, signal);
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
