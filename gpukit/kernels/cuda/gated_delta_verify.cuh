// Verification: outputs of a few tokens from a state that stays as it is, and a log of them. With tensor cores, all products with the state at
// once, or token by token with the bits of `direct`; keys, queries and values given, or convolved first.

#pragma once

#include "conv.cuh"
#include "gated_delta.cuh"

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

    // Neither padding nor refused.
    __device__ __forceinline__ bool is_usable(int64 slots, const void* accepted, int64 previous_width) const
    {
        return slot >= 0 && slot < slots && m >= 0 && !(accepted && m > previous_width);
    }

    // What is not usable: outputs are zeros, and what is refused is counted.
    template <class Place>
    __device__ __forceinline__ void skip(const Batch& batch, const Place& place, int64* signal) const
    {
        if (slot >= 0 && place.is_first())
            count(signal, OUT_OF_RANGE);
        clear_outputs(batch, place, 0);
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

// Rows of V in a block.
__device__ constexpr int tile_of(int warps, int rows)
{
    return warps * 32 / RECORD_LANES * rows;
}

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

// Keys, queries and values of a verification that are in memory as they are needed.
template <int DIM>
struct Given {
    const Batch& batch;
    int item, key_offset, value_offset;

    template <class Place>
    __device__ __forceinline__ Given(const Columns&, Nothing&, const Batch& batch, const Place& place, int key_head)
        : batch(batch), item(static_cast<int>(place.item)), key_offset(key_head * DIM), value_offset(place.head * DIM + place.tile * place.rows)
    {
    }

    __device__ __forceinline__ void load_weights() {}

    __device__ __forceinline__ void load_tokens(int) {}

    __device__ __forceinline__ void load_history(int64) {}

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
template <int DIM, int WIDTH, int TILE>
struct Convolved {
    // Rows of keys, then of queries. Those of four tokens meet no bank twice.
    alignas(16) Bits vectors[2 * WIDTH][DIM + 16];
    alignas(16) Bits values[WIDTH][TILE];
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
__device__ __forceinline__ void fetch_line(const void* address)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Keys, queries and values that the block convolves first. A thread has a pair or two of the channels of key and query for four tokens at a time,
// and a pair of the values for one token of the four. What does not depend on the slot is loaded before the slot is known.
template <int DIM, int WIDTH, int WARPS, int TILE>
struct Convolution {
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int PAIRS = DIM > THREADS ? DIM / THREADS : 1;
    static constexpr int VALUE_PAIRS = TILE / 2;
    static constexpr int VALUE_THREADS = SHORT * VALUE_PAIRS;
    static constexpr int PAST = TAPS - 1;
    using Shared = Convolved<128, WIDTH, TILE>;
    using Pair = Channels<Bytes4>;

    const Columns* arrays;
    Convolved<DIM, WIDTH, TILE>* shared;
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
        : arrays(&arrays), shared(reinterpret_cast<Convolved<DIM, WIDTH, TILE>*>(&memory)), x(arrays.x + place.item * arrays.x_batch),
          last(static_cast<int>(batch.tokens) - 1)
    {
        along = static_cast<int>(threadIdx.x) * 2 * PAIRS;
        // Keys first, like the rows they become.
        const int key_heads = static_cast<int>(batch.key_heads);
        channel = along < DIM ? (key_heads + key_head) * DIM + along : key_head * DIM + along - DIM;
        const int unit = static_cast<int>(threadIdx.x) - (THREADS - VALUE_THREADS);
        value_pair = unit % VALUE_PAIRS;
        turn = unit / VALUE_PAIRS;
        value_channel = (2 * key_heads + place.head) * DIM + place.tile * TILE + 2 * value_pair;
    }

    __device__ __forceinline__ void load_weights()
    {
        if (takes_part())
#pragma unroll
            for (int i = 0; i < PAIRS; i++)
                taps[i] = __ldg(reinterpret_cast<const Bytes16*>(arrays->weight + TAPS * channel) + i);
        if (takes_values())
            value_taps = __ldg(reinterpret_cast<const Bytes16*>(arrays->weight + TAPS * value_channel));
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
            const Bits* at = x + first * arrays->x_token + channel;
#pragma unroll
            for (int t = 0; t < SHORT; t++) {
                load_pairs(window[PAST + t], at);
                if (first + t < last)
                    at += arrays->x_token;
            }
        }
        if (takes_values()) {
            const Bits* at = x + max(0, min(first + turn - PAST, last)) * arrays->x_token + value_channel;
#pragma unroll
            for (int i = 0; i < TAPS; i++) {
                const int t = first + turn + i - PAST;
                if (t >= 0)
                    value_window[i] = __ldg(reinterpret_cast<const Bytes4*>(at));
                if (t >= 0 && t < last)
                    at += arrays->x_token;
            }
        }
    }

    __device__ __forceinline__ void load_history(int64 slot)
    {
        const Bits* past = arrays->past + slot * arrays->slot_stride;
        if (takes_part())
#pragma unroll
            for (int i = 0; i < PAST; i++)
                load_pairs(window[i], past + i * arrays->channels + channel);
        if (takes_values())
#pragma unroll
            for (int i = 0; i < PAST; i++)
                if (turn + i < PAST)
                    value_window[i] = __ldg(reinterpret_cast<const Bytes4*>(past + (turn + i) * arrays->channels + value_channel));
    }

    // Let the L2 fetch the histories of the block's channels, so many elements from where they are; keys and queries only if it `has_keys`.
    __device__ __forceinline__ void fetch(int64 slot, int64 apart, bool has_keys) const
    {
        const Bits* next = arrays->past + slot * arrays->slot_stride + apart;
        if (has_keys && takes_part())
#pragma unroll
            for (int i = 0; i < PAST; i++)
                fetch_line(next + i * arrays->channels + channel);
        if (takes_values() && turn < PAST)
            fetch_line(next + turn * arrays->channels + value_channel);
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
            Bits* logged = arrays->log + (entry + first) * arrays->channels;
            if (has_keys && takes_part())
#pragma unroll
                for (int t = 0; t < SHORT; t++)
                    if (first + t < tokens)
                        store_pairs(logged + t * arrays->channels + channel, window[PAST + t]);
            if (takes_values() && first + turn < tokens)
                *reinterpret_cast<Bytes4*>(logged + turn * arrays->channels + value_channel) = value_window[PAST];
            if (takes_values())
                reinterpret_cast<Bytes4*>(shared->values[first + turn])[value_pair] =
                    Pair::output(value_taps, Pair(value_window[0]), Pair(value_window[1]), Pair(value_window[2]), Pair(value_window[3]));
            if (takes_part()) {
                Bits* rows = shared->vectors[along / DIM * WIDTH + first] + along % DIM;
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
                    reinterpret_cast<const Bytes16*>(shared->vectors[t])[lane];
    }

    // As in `Given`.
    __device__ __forceinline__ const uint2* columns_at(int first) const
    {
        const int lane = threadIdx.x % 32;
        return reinterpret_cast<const uint2*>(shared->vectors[lane / 16 * WIDTH + first + lane / 4 % 4]) + lane % RECORD_LANES;
    }

    static __device__ __forceinline__ uint2 load(const uint2* from)
    {
        return *from;
    }

    __device__ __forceinline__ Bits value(int t, int row) const
    {
        return shared->values[t][row];
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

// Shared memory of a verification by blocks of WARPS warps with ROWS rows a lane, behind a replay or a convolution or neither.
template <int TOKENS, int WARPS, int ROWS, bool folds, bool convolves>
struct RecordMemory {
    static constexpr int TILE = tile_of(WARPS, ROWS);
    typename Choice<folds, Tokens<128, WARPS, TILE, false>, Nothing>::type replayed;
    typename Choice<convolves, Convolved<128, TOKENS, TILE>, Nothing>::type convolved;
    Scratch<TOKENS> scratch[WARPS];
};

template <int DIM, int WIDTH, int WARPS, int TILE, bool convolves>
struct InputsOf {
    using type = Given<DIM>;
};

template <int DIM, int WIDTH, int WARPS, int TILE>
struct InputsOf<DIM, WIDTH, WARPS, TILE, true> {
    using type = Convolution<DIM, WIDTH, WARPS, TILE>;
};

// Verification of up to WIDTH tokens with tensor cores: all products with the state are independent of each other, and tokens meet in
// triangular systems of T equations (the WY form), so that the chain is that of one token. With a previous log the state is first taken past
// its accepted tokens and stored. A warp needs no other; only a replay or a convolution in front does.
// What is settled is read before the kernel in front has ended.
template <int DIM, bool settled, int WIDTH, int WARPS, int ROWS, bool folds, bool convolves>
__device__ __forceinline__ void record(
    RecordMemory<WIDTH, WARPS, ROWS, folds, convolves>& memory, const Batch& batch, const Columns& arrays, const States& states,
    const void* source, const void* valid, const Log& log, const Log& previous, const void* accepted, float scale, int64 flags, int64* signal)
{
    constexpr int TILE = tile_of(WARPS, ROWS);
    using Inputs = typename InputsOf<DIM, WIDTH, WARPS, TILE, convolves>::type;
    Place<DIM, WARPS, ROWS, RECORD_LANES> place(blockIdx.x, static_cast<unsigned>(batch.heads));
    const Groups groups{upper_half(flags)};
    const int key_head = groups.key_head(place.head);
    if constexpr (!settled) {
        wait_for_predecessor();
        release_successor();
    }
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
    Inputs inputs(arrays, memory.convolved, batch, place, key_head);
    // Values of the lane's own token.
    Bits own[ROWS];
    const auto load_own = [&] {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            own[r] = inputs.value(turn, row + place.groups * r);
    };
    float g = 0.0f, beta = 0.0f;
    const auto load_tokens = [&] {
        inputs.load_tokens(0);
        if constexpr (!settled)
            inputs.load_weights();
        if constexpr (!convolves)
            load_columns(columns, inputs, 0);
        if constexpr (!convolves && !reads_again)
            load_own();
        if (lane < batch.tokens) {
            g = __ldg(batch.g + place.item * batch.g_batch + lane * batch.g_token + place.head);
            beta = __ldg(batch.beta + place.item * batch.beta_batch + lane * batch.beta_token + place.head);
        }
    };
    // Registers do not suffice for a state beside the windows of a long convolution.
    constexpr bool loads_late = convolves && WIDTH > SHORT;
    // A replay needs the registers of a convolution: then the L2 fetches what that needs, and it is loaded after.
    constexpr bool folds_early = folds && !loads_late && (settled || convolves);
    if constexpr (!settled && !(folds_early && convolves))
        load_tokens();
    if constexpr (settled && !folds)
        inputs.load_weights();
    const Verification found{
        slot.value(id_bytes_of(flags, WIDE_SLOTS)), count_of_previous.value(id_bytes_of(flags, WIDE_ACCEPTED)),
        tokens_of(batch, valid ? limit.value(id_bytes_of(flags, WIDE_VALID)) : batch.tokens)};
    if (!found.is_usable(states.slots, accepted, previous.width)) {
        if constexpr (settled)
            wait_for_predecessor();
        return found.skip(batch, place, signal);
    }
    const int tokens = found.tokens;
    if constexpr (folds_early && convolves)
        inputs.fetch(found.slot, 0, true);
    else
        inputs.load_history(found.slot);
    int64 at = found.slot * states.slot_stride + place.state();
    float4 state[ROWS][DIM / 16];
    if constexpr (!loads_late)
        states.load<DIM, RECORD_LANES>(state, at);
    states.fetch_next<DIM>(found.slot * states.slot_stride + place.block_state(), place.rows);
    Part<DIM, TILE, false> part{};
    const auto load_part = [&] {
        if (threadIdx.x / 16 < found.m)
            part.load(source_of<DIM>(previous, place, place.item, threadIdx.x / 16));
    };
    if constexpr (folds && !loads_late)
        load_part();
    const auto fold = [&] {
        auto& prepared = reinterpret_cast<Tokens<DIM, WARPS, TILE, false>&>(memory.replayed);
        replay<DIM>(state, prepared, part, previous, place, place.item, static_cast<int>(found.m), normalize, states.are_bfloat16);
    };
    if constexpr (folds_early) {
        fold();
        if constexpr (convolves) {
            place.forget();
            inputs = Inputs(arrays, memory.convolved, batch, place, groups.key_head(place.head));
            if constexpr (settled)
                inputs.load_weights();
            inputs.load_history(found.slot);
        }
    }
    if constexpr (settled) {
        wait_for_predecessor();
        release_successor();
    }
    if constexpr (settled || (folds_early && convolves))
        load_tokens();
    if constexpr (folds)
        if (batch.items > 1
            && is_taken(source, source, id_bytes_of(flags, WIDE_SLOTS), batch.items, 1, false, states.slots, place.item, found.slot)) {
            if (place.is_first())
                count(signal, OCCUPIED);
            return clear_outputs(batch, place, 0);
        }
    if constexpr (folds_early)
        if (found.m > 0)
            states.store<DIM, RECORD_LANES>(state, at);

    const int64 entry = place.item * log.width;
    const bool has_keys = place.tile == 0 && groups.is_first(place.head);
    if (place.tile == 0 && threadIdx.x < tokens)
        log.gates[(entry + lane) * log.heads + place.head] = make_float2(g, beta);
    // What the next call will want of keys and queries is left to one block.
    if constexpr (convolves)
        if (arrays.prefetch)
            inputs.fetch(found.slot, arrays.prefetch, has_keys);
    // Where registers suffice, the gates are done with before the columns are there.
    constexpr bool weighs_early = WIDTH == SHORT && ROWS == 1;
    Weights early;
    if constexpr (weighs_early)
        early = Weights(sum_gates<WIDTH>(g), beta, 0, 0, scale);
    if constexpr (convolves) {
        inputs.convolve(entry, tokens, has_keys);
        if (WIDTH > SHORT && has_keys)
            inputs.log_keys(log, entry, key_head, tokens);
        load_columns(columns, inputs, 0);
    }
    if constexpr (loads_late) {
        // The slot is read again: it is one register too many beside the windows.
        place.forget();
        at = load_id(source, id_bytes_of(flags, WIDE_SLOTS), place.item) * states.slot_stride + place.state();
        states.load<DIM, RECORD_LANES>(state, at);
        if constexpr (folds)
            load_part();
    }
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
        if (!convolves && WIDTH > SHORT)
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
        if (!convolves && WIDTH == SHORT)
            log_keys(first);
    }
    if constexpr (convolves && WIDTH == SHORT)
        if (has_keys)
            inputs.log_keys(log, entry, key_head, tokens);
    __syncwarp();
    if constexpr (folds && !folds_early)
        if (found.m > 0) {
            fold();
            states.store<DIM, RECORD_LANES>(state, at);
        }
    const int64 stride = batch.heads * DIM;
    const auto logged_values = [&] { return log.v + (place.item * log.width * log.heads + place.head) * DIM + place.tile * place.rows; };
    const auto outputs = [&] { return batch.out + batch.output(place.item, 0, place.head, DIM) + place.tile * place.rows; };
    if constexpr (WIDTH == SHORT) {
        if constexpr (convolves || reads_again)
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

// `record` by the kernel that the memory belongs to. The way of what is settled is there for few tokens of large heads: elsewhere it is not worth
// the code.
template <int WIDTH, int WARPS, int ROWS, bool folds, bool convolves>
__device__ __forceinline__ void verify(
    RecordMemory<WIDTH, WARPS, ROWS, folds, convolves>& memory, const Batch& batch, const Columns& columns, const States& states,
    const void* source, const void* valid, const Log& log, const Log& previous, const void* accepted, float scale, int64 dim, int64 flags,
    int64* signal)
{
    constexpr bool has_settled = WIDTH == SHORT;
    if (dim == 128 && !(has_settled && flags & SETTLED))
        record<128, false>(memory, batch, columns, states, source, valid, log, previous, accepted, scale, flags, signal);
    else if (has_settled && dim == 128)
        record<128, has_settled>(memory, batch, columns, states, source, valid, log, previous, accepted, scale, flags, signal);
    else
        record<64, false>(memory, batch, columns, states, source, valid, log, previous, accepted, scale, flags, signal);
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
    if (!found.is_usable(states.slots, accepted, previous.width))
        return found.skip(batch, place, signal);
    int64 at = found.slot * states.slot_stride + place.state();
    float4 state[ROWS][DIM / 4 / LANES];
    states.load<DIM, LANES>(state, at);
    states.fetch_next<DIM>(found.slot * states.slot_stride + place.block_state(), place.rows);
    if constexpr (folds) {
        auto& logged = reinterpret_cast<Tokens<DIM, WARPS, TILE, false>&>(memory->logged);
        Part<DIM, TILE, false> part{};
        if (logged.mine() < found.m)
            part.load(source_of<DIM>(previous, place, place.item, logged.mine()));
        if (batch.items > 1 && is_taken(source, source, id_bytes, batch.items, 1, false, states.slots, place.item, found.slot)) {
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
            store_output(batch, place, first + i, 0, output);
        }
    }
    clear_outputs(batch, place, found.tokens);
}
