// States of the gated delta rule and how they go past tokens. A few lanes share a row of V, a warp holds several rows side by side, so a sum along
// K is a sum in a thread's registers and two or three exchanges. What a token needs once a head (widened keys, norms, decay) half a warp, or a
// quarter, works out for its block while the state is on its way. `advance` takes a state past one token, for every kernel that writes states. Each
// of its operations is spelled out, and none depends on what else a thread holds, so states are the same to the bit whoever computes them.

#pragma once

#include "bf16.cuh"
#include "cache_hints.cuh"
#include "gpukit.cuh"
#include "staging.cuh"

using Bits = unsigned short;  // of a bfloat16

// Warps of a block and rows of V of a lane. Many small blocks, all resident: what is read and what is written then alternates finely.
constexpr int WARPS = 2;
constexpr int ROWS = 1;
// Where states come in bulk.
constexpr int BULK_WARPS = 4;
constexpr int BULK_ROWS = 4;
// A warp by itself waits for no other, and two rows a lane keep more of memory on its way than registers for one would.
constexpr int FOLD_WARPS = 1;
constexpr int FOLD_ROWS = 2;
constexpr int RECORD_WARPS = 2;
// A lane may hold two of the tensor cores' 16 rows, or one, and leave half of them empty: then twice the warps share a block's work, which is
// quicker while multiprocessors have only a block or two.
constexpr int RECORD_ROWS = 2;
constexpr int WIDE_RECORD_WARPS = 4;
constexpr int WIDE_RECORD_ROWS = 1;
// Larger blocks convolve less: each convolves the keys and queries of its head again.
constexpr int LARGE_RECORD_WARPS = 4;
// Blocks side by side on a multiprocessor: so many that registers just suffice. The compiler for Hopper, on which they were measured, needs the
// fewest.
constexpr bool IS_HOPPER = __CUDA_ARCH__ == 900;
constexpr int DIRECT_BLOCKS = IS_HOPPER ? 14 : 10;
// Without tensor cores, but for `direct`.
constexpr int EXACT_BLOCKS = IS_HOPPER ? 14 : 12;
constexpr int BULK_BLOCKS = IS_HOPPER ? 4 : 3;
constexpr int FOLD_BLOCKS = 20;
constexpr int RECORD_BLOCKS = IS_HOPPER ? 8 : 6;
constexpr int LARGE_RECORD_BLOCKS = IS_HOPPER ? 4 : 3;
constexpr int LONG_FOLD_RECORD_BLOCKS = 6;
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
// Lanes that prepare a token: half a warp, or, where a warp is all of a block, a quarter. Sums have the tree of half a warp.
constexpr int HALF = 16;
constexpr int QUARTER = 8;
// Rows of V that a block works on.
constexpr int TILE = WARPS * 32 / LANES * ROWS;
constexpr int BULK_TILE = BULK_WARPS * 32 / LANES * BULK_ROWS;
constexpr int FOLD_TILE = FOLD_WARPS * 32 / LANES * FOLD_ROWS;

// Upper half of a parameter whose lower half is something else.
__device__ __forceinline__ unsigned upper_half(int64 both)
{
    return static_cast<unsigned>(static_cast<uint64>(both) >> 32);
}

// What the bits of a kernel's `flags` say.
enum Flags { NORMALIZE = 1, BFLOAT16_STATES = 2, WIDE_SLOTS = 4, WIDE_VALID = 8, WIDE_ACCEPTED = 16, SETTLED = 32 };

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

    __device__ __forceinline__ Place(unsigned block, Divisor heads)
    {
        const unsigned before = heads.quotient(block / tiles);
        *this = Place(before, block / tiles - before * heads.value, block % tiles);
    }

    __device__ __forceinline__ Place(unsigned item, unsigned head, unsigned tile)
        : item(item), head(static_cast<int>(head)), tile(static_cast<int>(tile)), lane(threadIdx.x % LANES)
    {
        first_row = this->tile * rows + threadIdx.x / 32 * groups * ROWS + threadIdx.x % 32 / LANES;
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

    // Element where the rows of the thread's warp begin.
    __device__ __forceinline__ int64 warp_state() const
    {
        return block_state() + static_cast<int64>(threadIdx.x / 32 * groups * ROWS) * DIM;
    }

    // Let the compiler take the place for another one: what follows from it is worked out again, where keeping it would cost registers.
    __device__ __forceinline__ void forget()
    {
        int own = static_cast<int>(item);
        asm volatile("" : "+r"(own), "+r"(head), "+r"(tile));
        item = own;
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

// Sums over half a warp or what follows of them over a quarter, side by side; every lane has the results.
template <int LANES, int COUNT>
__device__ __forceinline__ void sum_over(float (&values)[COUNT])
{
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            values[i] = __fadd_rn(values[i], __shfl_xor_sync(0xffffffffu, values[i], mask));
}

// Where the inputs of one token of one head are.
struct Source {
    const Bits* k;
    const Bits* q;
    const Bits* v;
    float g;
    float beta;
};

// A lane's share of a key or query that so many lanes read: DIM / LANES numbers.
template <int DIM, int LANES>
struct Share {
    static constexpr int COUNT = DIM / 4 / LANES;
    static constexpr int SUMS = HALF / LANES;
    uint2 words[COUNT];

    __device__ __forceinline__ void load(const Bits* vector, int lane)
    {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            words[i] = __ldg(reinterpret_cast<const uint2*>(vector) + LANES * i + lane);
    }

    __device__ __forceinline__ void store(float4* to, int lane) const
    {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            to[LANES * i + lane] = widen(words[i]);
    }

    __device__ __forceinline__ float times(const Share& other) const
    {
        float sum[] = {part_of_product(other)};
        sum_over<LANES>(sum);
        return sum[0];
    }

    // The lane's, before the exchange. A lane of a quarter has what two of a half would have, and adds that first, as they do.
    __device__ __forceinline__ float part_of_product(const Share& other) const
    {
        float sums[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            sums[i] = dot(widen(words[i]), widen(other.words[i]));
#pragma unroll
            for (int j = i + SUMS; j < COUNT; j += SUMS)
                sums[i] = __fadd_rn(sums[i], dot(widen(words[j]), widen(other.words[j])));
        }
        if constexpr (SUMS == 2)
            sums[0] = __fadd_rn(sums[0], sums[1]);
        return sums[0];
    }
};

// What half or a quarter of a warp reads of a token that it prepares: key, query, values of the block's rows, gates.
template <int DIM, int TILE, bool outputs, int LANES = HALF>
struct Part {
    static constexpr int VALUES = (TILE + LANES - 1) / LANES;
    Share<DIM, LANES> k;
    Share<outputs ? DIM : 64, LANES> q;
    Bits v[VALUES];
    float g;
    float beta;

    __device__ __forceinline__ void load(const Source& source)
    {
        const int lane = threadIdx.x % LANES;
        k.load(source.k, lane);
        if constexpr (outputs)
            q.load(source.q, lane);
#pragma unroll
        for (int i = 0; i < VALUES; i++)
            if (TILE % LANES == 0 || lane < TILE)
                v[i] = __ldg(source.v + LANES * i + lane);
        g = source.g;
        beta = source.beta;
    }
};

// The tokens that a block goes past next, each prepared by so many lanes. `at_once` is for a block that has nothing else to do meanwhile: the sums of
// a token are exchanged side by side, needed or not, and a query is used up before its key comes to registers. The numbers are the same.
template <int DIM, int WARPS, int TILE, bool outputs, int LANES = HALF, bool at_once = false>
struct Tokens {
    static constexpr int of_warp = 32 / LANES;
    static constexpr int count = of_warp * WARPS;
    static_assert(outputs || !at_once);
    using Part = ::Part<DIM, TILE, outputs, LANES>;

    float4 k[count][DIM / 4];
    float4 q[outputs ? count : 1][DIM / 4];
    float4 gates[count];  // decay, beta, factors that make key and query of norm 1
    float kq[count];      // product of raw key and query
    float v[count][TILE];

    // Which token of those is the thread's.
    static __device__ __forceinline__ int mine()
    {
        return threadIdx.x / LANES;
    }

    // What a thread has written, all of the block may read.
    static __device__ __forceinline__ void synchronize()
    {
        if constexpr (WARPS == 1)
            __syncwarp();
        else
            __syncthreads();
    }

    // All threads of a warp come here, or none.
    __device__ __forceinline__ void share(const Part& part, bool normalize, int t = mine())
    {
        const int lane = threadIdx.x % LANES;
        part.k.store(k[t], lane);
        const auto scale_of = [&](float square) { return rsqrtf(__fadd_rn(square, EPSILON)); };
        float key_scale = 1.0f, query_scale = 1.0f;
        if constexpr (at_once) {
            // One after the other the exchanges would be most of what a token waits for.
            part.q.store(q[t], lane);
            float sums[] = {part.k.part_of_product(part.k), part.q.part_of_product(part.q), part.k.part_of_product(part.q)};
            sum_over<LANES>(sums);
            key_scale = normalize ? scale_of(sums[0]) : 1.0f;
            query_scale = normalize ? scale_of(sums[1]) : 1.0f;
            kq[t] = sums[2];
        } else {
            key_scale = normalize ? scale_of(part.k.times(part.k)) : 1.0f;
            if constexpr (outputs) {
                part.q.store(q[t], lane);
                const float square = part.q.times(part.q);
                kq[t] = part.k.times(part.q);
                query_scale = normalize ? scale_of(square) : 1.0f;
            }
        }
        gates[t] = make_float4(expf(part.g), part.beta, key_scale, query_scale);
#pragma unroll
        for (int i = 0; i < Part::VALUES; i++)
            if (TILE % LANES == 0 || lane < TILE)
                v[t][LANES * i + lane] = bf16_to_float(part.v[i]);
    }

    // Share the tokens from `first` on, of which `part` is the thread's; then it is that of the ones behind them, the first of which is returned. All
    // threads of the block come here.
    template <class SourceOf>
    __device__ __forceinline__ int take_turn(Part& part, int first, int tokens, bool normalize, const SourceOf& source_of)
    {
        if (first > 0)
            synchronize();
        if (first + mine() / of_warp * of_warp < tokens)
            share(part, normalize);
        synchronize();
        const int next = first + count;
        if (next + mine() < tokens)
            part.load(source_of(next + mine()));
        return next;
    }
};

// Take the state past a prepared token; `rounds`, if it is kept as bfloat16. With outputs, those of the rows: taken from the old state in the
// same pass, as a (S q) + d (k q).
template <int DIM, int LANES, bool outputs, int ROWS, int WARPS, int TILE, int PREPARING, bool at_once>
__device__ __forceinline__ void advance(
    float4 (&state)[ROWS][DIM / 4 / LANES], const Tokens<DIM, WARPS, TILE, outputs, PREPARING, at_once>& tokens, int i, int lane, int row,
    bool rounds, float scale, float (&out)[ROWS])
{
    constexpr int STEPS = DIM / 4 / LANES;
    float asked[ROWS];
    const auto ask = [&] {
        float4 query[STEPS];
#pragma unroll
        for (int j = 0; j < STEPS; j++)
            query[j] = tokens.q[i][LANES * j + lane];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            asked[r] = sum_along<LANES>(state[r], query);
    };
    if constexpr (outputs && at_once)
        ask();
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
    if constexpr (outputs && !at_once)
        ask();
    if constexpr (outputs)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            out[r] = __fmul_rn(scale, __fmul_rn(gates.w, __fmaf_rn(gates.x, asked[r], __fmul_rn(weight[r], tokens.kq[i]))));
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
    unsigned hint;       // 0, or one more than the bits of the share of lines that the L2 is asked to keep

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
        const Bits* narrow_rows = static_cast<const Bits*>(pool) + from;
        const float* rows = static_cast<const float*>(pool) + from;
        if (hint) {
            const CachePolicy policy = policy_keep(share());
            if (are_bfloat16)
                visit<DIM, LANES>(state, narrow_rows, [=](float4& four, const Bits* at) {
                    four = widen(load_hinted(reinterpret_cast<const uint2*>(at), policy));
                });
            else
                visit<DIM, LANES>(state, rows, [=](float4& four, const float* at) {
                    four = load_hinted(reinterpret_cast<const float4*>(at), policy);
                });
        } else if (are_bfloat16) {
            visit<DIM, LANES>(state, narrow_rows, [](float4& four, const Bits* at) {
                four = widen(load_streaming(reinterpret_cast<const uint2*>(at)));
            });
        } else {
            visit<DIM, LANES>(state, rows, [](float4& four, const float* at) { four = load_streaming(reinterpret_cast<const float4*>(at)); });
        }
    }

    template <int DIM, int LANES, int ROWS, int STEPS>
    __device__ __forceinline__ void store(float4 (&state)[ROWS][STEPS], int64 to) const
    {
        Bits* narrow_rows = static_cast<Bits*>(pool) + to;
        float* rows = static_cast<float*>(pool) + to;
        if (hint) {
            const CachePolicy policy = policy_keep(share());
            if (are_bfloat16)
                visit<DIM, LANES>(state, narrow_rows, [=](float4& four, Bits* at) {
                    store_hinted(reinterpret_cast<uint2*>(at), narrow(four), policy);
                });
            else
                visit<DIM, LANES>(state, rows, [=](float4& four, float* at) { store_hinted(reinterpret_cast<float4*>(at), four, policy); });
        } else if (are_bfloat16) {
            visit<DIM, LANES>(state, narrow_rows, [](float4& four, Bits* at) { store_streaming(reinterpret_cast<uint2*>(at), narrow(four)); });
        } else {
            visit<DIM, LANES>(state, rows, [](float4& four, float* at) { store_streaming(reinterpret_cast<float4*>(at), four); });
        }
    }

    __device__ __forceinline__ float share() const
    {
        return __uint_as_float(hint - 1);
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

// Whether slot `to` of an item is the source or a destination of another item: neither must be written then. An item that is padding or refused
// for its only destination stands in nobody's way; of several, the others count. The same in every thread of a warp.
__device__ __forceinline__ bool is_taken(
    const void* source, const void* destination, int64 id_bytes, int64 items, int64 per_item, bool are_several, int64 slots, int64 item, int64 to)
{
    bool taken = false;
#pragma unroll 1
    for (int64 i = threadIdx.x % 32; i < items * per_item; i += 32) {
        const int64 other = i / per_item;
        const int64 s = load_id(source, id_bytes, other);
        const int64 d = load_id(destination, id_bytes, i);
        taken |= other != item && s >= 0 && s < slots && (are_several || (d >= 0 && d < slots)) && (s == to || d == to);
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

    // The key head of a value head, without a division.
    __device__ __forceinline__ int key_head(int head, Divisor by_heads) const
    {
        return by_heads.quotient(head * static_cast<unsigned>(key_heads));
    }

    // Element of `out` where a head of a token begins.
    __device__ __forceinline__ int64 output(int64 item, int64 t, int head, int dim) const
    {
        return ((item * tokens + t) * heads + head) * dim;
    }
};

// Where the inputs of one token of one head are, before any of them may be read.
struct Addresses {
    const Bits* k;
    const Bits* q;
    const Bits* v;
    const float* g;
    const float* beta;

    __device__ __forceinline__ Source load() const
    {
        return {k, q, v, __ldg(g), __ldg(beta)};
    }

    // Let the compiler not know where they come from, so that it does not work them out behind a wait.
    __device__ __forceinline__ void settle()
    {
        asm volatile("" : "+l"(k), "+l"(q), "+l"(v), "+l"(g), "+l"(beta));
    }
};

// A Source or Addresses, whose gates `access` makes of their addresses.
template <class Inputs, int DIM, class Place, class Access>
__device__ __forceinline__ Inputs inputs_of(const Batch& batch, const Place& place, int64 t, int key_head, const Access& access)
{
    const int key = key_head * DIM;
    return {batch.k + place.item * batch.k_batch + t * batch.k_token + key,
            batch.q + place.item * batch.q_batch + t * batch.q_token + key,
            batch.v + place.item * batch.v_batch + t * batch.v_token + place.head * DIM + place.tile * place.rows,
            access(batch.g + place.item * batch.g_batch + t * batch.g_token + place.head),
            access(batch.beta + place.item * batch.beta_batch + t * batch.beta_token + place.head)};
}

template <int DIM, class Place>
__device__ __forceinline__ Addresses addresses_of(const Batch& batch, const Place& place, int64 t, int key_head)
{
    return inputs_of<Addresses, DIM>(batch, place, t, key_head, [](const float* gate) { return gate; });
}

template <int DIM, class Place>
__device__ __forceinline__ Source source_of(const Batch& batch, const Place& place, int64 t)
{
    return inputs_of<Source, DIM>(batch, place, t, place.head / batch.group(), [](const float* gate) { return __ldg(gate); });
}

// Zero the outputs of a block from a token on.
template <int DIM, int WARPS, int ROWS, int LANES>
__device__ __forceinline__ void clear_outputs(const Batch& batch, const Place<DIM, WARPS, ROWS, LANES>& place, int64 first)
{
    constexpr int rows = Place<DIM, WARPS, ROWS, LANES>::rows;
    for (int64 i = first * rows + threadIdx.x; i < batch.tokens * rows; i += place.threads)
        batch.out[batch.output(place.item, i / rows, place.head, DIM) + place.tile * rows + i % rows] = 0;
}

// One lane of a row stores its output; those of the lane's rows from `first` on.
template <int DIM, int WARPS, int ROWS, int LANES, int SOME>
__device__ __forceinline__ void store_output(
    const Batch& batch, const Place<DIM, WARPS, ROWS, LANES>& place, int64 t, int first, const float (&output)[SOME])
{
    Bits* out = batch.out + batch.output(place.item, t, place.head, DIM) + place.first_row + place.groups * first;
#pragma unroll
    for (int r = 0; r < SOME; r++)
        if (place.lane == r)
            out[place.groups * r] = float_to_bf16(output[r]);
}

// Take the state past the tokens of a sequence, one after the other, with outputs; `part` is the thread's of the first, `after(t)` follows each.
template <int DIM, bool at_once, class Place, class After>
__device__ __forceinline__ void walk(
    float4 (&state)[ROWS][DIM / 4 / LANES], Tokens<DIM, WARPS, TILE, true, HALF, at_once>& shared, Part<DIM, TILE, true>& part, const Batch& batch,
    const Place& place, int tokens, bool rounds, float scale, bool normalize, After after)
{
#pragma unroll 1
    for (int first = 0; first < tokens; first += shared.count) {
        const int next = shared.take_turn(part, first, tokens, normalize, [&](int t) { return source_of<DIM>(batch, place, t); });
#pragma unroll 1
        for (int t = first; t < min(next, tokens); t++) {
            float output[ROWS];
            advance<DIM, LANES, true>(state, shared, t - first, place.lane, place.first_row % TILE, rounds, scale, output);
            store_output(batch, place, t, 0, output);
            after(t);
        }
    }
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

// Rows of V of a warp, BULK_ROWS a lane, asked for at once: they come to shared memory on their own, by one copy on Hopper and later, and registers
// are not needed before they are there. A lane only ever reads what it would have loaded.
template <int DIM>
struct Rows {
    static constexpr int groups = 32 / LANES;
    static constexpr int count = groups * BULK_ROWS;  // of the warp
    static constexpr int STEPS = DIM / 4 / LANES;

    alignas(128) float numbers[count * DIM];  // or as many bfloat16
    uint64 arrived;

    // The lane's first element, of the row `groups * r` behind its own.
    static __device__ __forceinline__ int own(int r)
    {
        const int lane = threadIdx.x % 32;
        return (lane / LANES + groups * r) * DIM + 4 * (lane % LANES);
    }

    // Before `fetch`, so that it has less to do.
    __device__ __forceinline__ void prepare()
    {
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x % 32 == 0) {
            init_barrier(shared_address(&arrived), 1);
            fence_for_copies();
        }
#endif
    }

    // All lanes of the warp come here. `from` is the element where the warp's first row begins.
    __device__ __forceinline__ void fetch(const States& states, int64 from)
    {
        const int bytes = states.are_bfloat16 ? 2 : 4;
        const char* begin = static_cast<const char*>(states.pool) + from * bytes;
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x % 32 == 0) {
            const unsigned barrier = shared_address(&arrived), size = count * DIM * bytes;
            const CachePolicy policy = states.hint ? policy_keep(states.share()) : policy_evict_first();
            arrive_and_expect(barrier, size);
            copy_in_bulk(shared_address(numbers), begin, size, barrier, policy);
        }
        __syncwarp();
#else
#pragma unroll
        for (int r = 0; r < BULK_ROWS; r++)
#pragma unroll
            for (int j = 0; j < STEPS; j++) {
                const int at = (own(r) + 4 * LANES * j) * bytes;
                const unsigned to = shared_address(numbers) + at;
                if (states.are_bfloat16)
                    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(begin + at) : "memory");
                else
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(begin + at) : "memory");
            }
#endif
    }

    // The rows are here. What was asked for must have come before the block ends.
    __device__ __forceinline__ void wait()
    {
#if __CUDA_ARCH__ >= 900
        wait_for_phase(shared_address(&arrived), 0);
#else
        asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    }

    __device__ __forceinline__ void load(float4 (&state)[BULK_ROWS][STEPS], bool are_bfloat16) const
    {
        if (are_bfloat16)
            States::visit<DIM, LANES>(state, reinterpret_cast<const Bits*>(numbers) + own(0), [](float4& four, const Bits* at) {
                four = widen(*reinterpret_cast<const uint2*>(at));
            });
        else
            States::visit<DIM, LANES>(state, numbers + own(0), [](float4& four, const float* at) { four = *reinterpret_cast<const float4*>(at); });
    }
};

// Take the state past the first `m` tokens of a row of the log. What lies behind them is not read. `part` is the thread's of the first tokens.
template <int DIM, int WARPS, int ROWS, int LANES, int TILE>
__device__ __forceinline__ void replay(
    float4 (&state)[ROWS][DIM / 4 / LANES], Tokens<DIM, WARPS, TILE, false>& shared, Part<DIM, TILE, false>& part, const Log& log,
    const Place<DIM, WARPS, ROWS, LANES>& place, int64 row, int m, bool normalize, bool rounds)
{
    float nothing[ROWS];
#pragma unroll 1
    for (int first = 0; first < m; first += shared.count) {
        const int next = shared.take_turn(part, first, m, normalize, [&](int t) { return source_of<DIM>(log, place, row, t); });
#pragma unroll 1
        for (int t = first; t < min(next, m); t++)
            advance<DIM, LANES, false>(state, shared, t - first, place.lane, place.first_row % TILE, rounds, 1.0f, nothing);
    }
}
