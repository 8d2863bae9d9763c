// Device code of a speculative round: what it promises stands in `kernels/speculative.py`. Every number that decides a draw comes from separate
// roundings of products and sums, never contracted, so that NumPy and every architecture get the same bits.

#include "bf16.cuh"
#include "gpukit.cuh"

constexpr unsigned ALL = 0xffffffffu;
constexpr int THREADS = 256;
// A row under top-k or top-p belongs to one block: as many threads as a block takes.
constexpr int SELECT_THREADS = 1024;

// An element of an int32 (bytes 4) or int64 (bytes 8) array that this launch may also write.
__device__ __forceinline__ int64 read_id(const void* ids, int64 bytes, int64 i)
{
    return bytes == 8 ? static_cast<const int64*>(ids)[i] : static_cast<const int*>(ids)[i];
}

__device__ __forceinline__ void write_id(void* ids, int64 bytes, int64 i, int64 value)
{
    if (bytes == 8)
        static_cast<int64*>(ids)[i] = value;
    else
        static_cast<int*>(ids)[i] = static_cast<int>(value);
}

extern "C" __global__ void __launch_bounds__(THREADS) gpukit_prepare_verify(
    const void* anchors, int64 anchor_bytes,               // [rows]
    const void* drafts, int64 draft_bytes, int64 draft_row, int64 width,  // [rows, width]
    const void* lengths, int64 length_bytes,               // [rows]
    const void* starts, int64 start_bytes,                 // [rows], or 0
    void* ids, int64 id_bytes, int64 id_row,               // [rows, tokens]
    void* positions, int64 position_bytes, int64 position_row,
    int64 rows, int64 tokens, int64 padding)
{
    wait_for_predecessor();
    const int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= rows * tokens)
        return;
    const int64 row = i / tokens, token = i - row * tokens;
    const int64 length = load_id(lengths, length_bytes, row);
    int64 id = padding;
    if (length >= 0 && token == 0)
        id = load_id(anchors, anchor_bytes, row);
    else if (length >= 0) {
        const int64 start = starts ? load_id(starts, start_bytes, row) : 0;
        // A start past the table is refused before the sum, which could overflow.
        const int64 place = start < width ? start + token - 1 : -1;
        if (place >= 0 && place < width)
            id = load_id(drafts, draft_bytes, row * draft_row + place);
    }
    write_id(ids, id_bytes, row * id_row + token, id);
    write_id(positions, position_bytes, row * position_row + token, length < 0 ? -1 : length + token);
}

// What the two acceptances share: the arrays of one sequence's outcome.
struct Round {
    const void* ids;      // [rows, tokens]
    int64 id_bytes;
    int64 id_row;
    void* lengths;        // [rows]
    int64 length_bytes;
    void* anchors;        // [rows]
    int64 anchor_bytes;
    const void* valid;    // [rows], or 0
    int64 valid_bytes;
    const void* slots;    // [rows], or 0
    int64 slot_bytes;
    void* accepted;       // [rows]
    int64 accepted_bytes;
    void* fold_rows;      // [rows, 3], or 0
    int64 fold_bytes;
    void* emitted;        // [rows, tokens], or 0
    int64 emitted_bytes;
    int64 emitted_row;
    int64 tokens;
    int64* signal;

    // How many tokens of a row count; 0 for an idle one.
    __device__ __forceinline__ int64 live_tokens(int64 row, int64 length) const
    {
        const int64 own = valid ? load_id(valid, valid_bytes, row) : tokens;
        return length < 0 || own < 0 || own > tokens ? 0 : own;
    }

    // Accept the longest prefix that `target(token)` confirms. Called by a whole warp; `target` is asked once for every live token.
    template <typename Target>
    __device__ __forceinline__ void settle(int64 row, int64 length, const Target& target) const
    {
        const int lane = threadIdx.x & 31;
        const int64 live = live_tokens(row, length);
        int64 produced = 0;
        bool open = live > 0;
#pragma unroll 1
        for (int64 base = 0; base < tokens; base += 32) {
            const int64 token = base + lane;
            const int64 own = token < live ? target(token) : -1;
            bool confirmed = false;
            if (token < live - 1) {
                const int64 draft = load_id(ids, id_bytes, row * id_row + token + 1);
                confirmed = draft >= 0 && draft == own;
            }
            const unsigned refuted = ~__ballot_sync(ALL, confirmed);
            if (open) {
                produced = base + (refuted ? __ffs(refuted) : 32);
                open = refuted == 0;
            }
            const bool kept = token < produced;
            if (emitted && token < tokens)
                write_id(emitted, emitted_bytes, row * emitted_row + token, kept ? own : -1);
            if (!open && kept && token == produced - 1)
                write_id(anchors, anchor_bytes, row, own);
        }
        if (lane != 0)
            return;
        if (produced)
            write_id(lengths, length_bytes, row, length + produced);
        write_id(accepted, accepted_bytes, row, produced);
        if (fold_rows) {
            const int64 slot = slots ? load_id(slots, slot_bytes, row) : row;
            write_id(fold_rows, fold_bytes, 3 * row, slot);
            write_id(fold_rows, fold_bytes, 3 * row + 1, slot);
            write_id(fold_rows, fold_bytes, 3 * row + 2, produced);
        }
        const int64 own = valid ? load_id(valid, valid_bytes, row) : tokens;
        if (length >= 0 && (own < 0 || own > tokens))
            count(signal, OUT_OF_RANGE);
    }
};

// A warp takes a sequence.
extern "C" __global__ void __launch_bounds__(THREADS) gpukit_accept_greedy(
    const void* targets, int64 target_bytes, int64 target_row,  // [rows, tokens]
    const void* ids, int64 id_bytes, int64 id_row,              // [rows, tokens]
    void* lengths, int64 length_bytes, void* anchors, int64 anchor_bytes, const void* valid, int64 valid_bytes, const void* slots, int64 slot_bytes,
    void* accepted, int64 accepted_bytes, void* fold_rows, int64 fold_bytes, void* emitted, int64 emitted_bytes, int64 emitted_row,
    int64 rows, int64 tokens, int64* signal)
{
    wait_for_predecessor();
    const int64 row = (static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x) >> 5;
    if (row >= rows)
        return;
    const Round round{ids, id_bytes, id_row, lengths, length_bytes, anchors, anchor_bytes, valid, valid_bytes, slots, slot_bytes,
                      accepted, accepted_bytes, fold_rows, fold_bytes, emitted, emitted_bytes, emitted_row, tokens, signal};
    const int64 length = read_id(lengths, length_bytes, row);
    // Every lane knows the length before one of them moves it on.
    __syncwarp();
    round.settle(row, length, [&](int64 token) { return load_id(targets, target_bytes, row * target_row + token); });
}

// Numbers as integers of the same order, without NaN and with one zero.
__device__ __forceinline__ unsigned ordered(float x)
{
    const unsigned bits = __float_as_uint(x);
    return bits == 0x80000000u ? 0x80000000u : bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float from_ordered(unsigned key)
{
    return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

constexpr float LARGEST = 3.402823466e38f;

__device__ __forceinline__ float minus_infinity()
{
    return __uint_as_float(0xff800000u);
}

// A score above an id in one word: the largest word is the best score and, among equals, the lowest id. No candidate is 0.
__device__ __forceinline__ uint64 packed(unsigned key, unsigned id)
{
    return static_cast<uint64>(key) << 32 | static_cast<unsigned>(~id);
}

__device__ __forceinline__ int64 id_of(uint64 best)
{
    return static_cast<unsigned>(~static_cast<unsigned>(best));
}

__device__ __forceinline__ uint64 larger(uint64 a, uint64 b)
{
    return a > b ? a : b;
}

// The largest of all threads of the block, on every one. Every thread calls it.
__device__ __forceinline__ uint64 block_max(uint64 best)
{
    __shared__ uint64 partial[SELECT_THREADS / 32];
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
#pragma unroll
    for (int bit = 16; bit > 0; bit >>= 1)
        best = larger(best, __shfl_xor_sync(ALL, best, bit));
    if (lane == 0)
        partial[threadIdx.x >> 5] = best;
    __syncthreads();
    best = lane < warps ? partial[lane] : 0;
#pragma unroll
    for (int bit = 16; bit > 0; bit >>= 1)
        best = larger(best, __shfl_xor_sync(ALL, best, bit));
    return best;
}

// Count this block's arrival; true, on every thread, in the one that makes it `all`. What the others wrote before theirs is then visible.
__device__ __forceinline__ bool is_last(uint64* arrivals, int64 all)
{
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(arrivals, 1ull) + 1 == static_cast<uint64>(all);
        // Only one block is the last, and nobody arrives after it.
        if (last)
            *arrivals = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011).
__device__ __forceinline__ uint4 philox(uint4 counter, unsigned key0, unsigned key1)
{
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint64 a = static_cast<uint64>(0xD2511F53u) * counter.x, b = static_cast<uint64>(0xCD9E8D57u) * counter.z;
        counter = make_uint4(static_cast<unsigned>(b >> 32) ^ counter.y ^ key0, static_cast<unsigned>(b),
                             static_cast<unsigned>(a >> 32) ^ counter.w ^ key1, static_cast<unsigned>(a));
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

__device__ __forceinline__ float multiply_add(float a, float b, float c)
{
    return __fadd_rn(__fmul_rn(a, b), c);
}

// log(2^exponent (1 + f)) for f in about -0.3 ... 0.42 (Cephes' logf).
__device__ __forceinline__ float log_of(float f, float exponent)
{
    const float square = __fmul_rn(f, f);
    float tail = 7.0376836292e-2f;
    tail = multiply_add(tail, f, -1.1514610310e-1f);
    tail = multiply_add(tail, f, 1.1676998740e-1f);
    tail = multiply_add(tail, f, -1.2420140846e-1f);
    tail = multiply_add(tail, f, 1.4249322787e-1f);
    tail = multiply_add(tail, f, -1.6668057665e-1f);
    tail = multiply_add(tail, f, 2.0000714765e-1f);
    tail = multiply_add(tail, f, -2.4999993993e-1f);
    tail = multiply_add(tail, f, 3.3333331174e-1f);
    tail = __fmul_rn(__fmul_rn(tail, f), square);
    tail = __fadd_rn(tail, __fmul_rn(exponent, -2.12194440e-4f));
    tail = __fadd_rn(tail, __fmul_rn(square, -0.5f));
    return __fadd_rn(__fadd_rn(f, tail), __fmul_rn(exponent, 0.693359375f));
}

// log of a positive normal number.
__device__ __forceinline__ float log_of(float y)
{
    const unsigned bits = __float_as_uint(y);
    int exponent = static_cast<int>(bits >> 23) - 126;
    float mantissa = __uint_as_float((bits & 0x007fffffu) | 0x3f000000u);
    if (mantissa < 0.707106781f) {
        exponent--;
        mantissa = __fadd_rn(mantissa, mantissa);
    }
    return log_of(__fadd_rn(mantissa, -1.0f), static_cast<float>(exponent));
}

// Gumbel noise -log(-log(1 - v)), v = (random + 1/2) / 2^32. Large noise belongs to small v, which floats resolve: no rounding to infinity.
__device__ __forceinline__ float gumbel(unsigned random)
{
    const bool small = random < 0x40000000u;
    const float v = multiply_add(__uint2float_rn(small ? random : ~random), 2.3283064365386963e-10f, 1.1641532182693481e-10f);
    const float exponential = -(small ? log_of(-v, 0.0f) : log_of(v));
    return -log_of(exponential);
}

// At least gumbel(random): -log(v) with a little to spare, by the leading zeros of v.
__device__ __forceinline__ float most_gumbel(unsigned random)
{
    return __fmul_rn(static_cast<float>(__clz(static_cast<int>(random)) + 1), 0.694f);
}

constexpr float MOST_GUMBEL = 23.0f;

// exp(x) in units of 2^-44 for x <= 0 (Cephes' expf); 0 where it is less than one.
__device__ __forceinline__ uint64 mass_of(float x)
{
    if (!(x >= -31.0f))
        return 0;
    const float n = rintf(__fmul_rn(x, 1.44269504f));
    const float r = __fadd_rn(__fadd_rn(x, -__fmul_rn(n, 0.693359375f)), __fmul_rn(n, 2.12194440e-4f));
    float tail = 1.9875691500e-4f;
    tail = multiply_add(tail, r, 1.3981999507e-3f);
    tail = multiply_add(tail, r, 8.3334519073e-3f);
    tail = multiply_add(tail, r, 4.1665795894e-2f);
    tail = multiply_add(tail, r, 1.6666665459e-1f);
    tail = multiply_add(tail, r, 5.0000001201e-1f);
    const float e = __fadd_rn(multiply_add(tail, __fmul_rn(r, r), r), 1.0f);
    return __float2ull_rz(__fmul_rn(e, __uint_as_float(static_cast<unsigned>(static_cast<int>(n) + 127 + 44) << 23)));
}

// What keys the noise of a row.
struct Noise {
    unsigned seed_low, seed_high, position_low, position_high;

    __device__ __forceinline__ uint4 of(unsigned group) const
    {
        // The last word is the purpose: 0, drawing a token.
        return philox(make_uint4(group, position_low, position_high, 0), seed_low, seed_high);
    }
};

// The logits of one row, without those of padding.
struct Row {
    const void* logits;
    int64 bytes;
    unsigned vocabulary;
    bool in_fours;  // four neighbours are one access

    __device__ __forceinline__ float clean(float x, bool& has_nan) const
    {
        if (x != x) {
            has_nan = true;
            return minus_infinity();
        }
        return fminf(x, LARGEST);
    }

    __device__ __forceinline__ float at(unsigned id, bool& has_nan) const
    {
        return clean(bytes == 4 ? __ldg(static_cast<const float*>(logits) + id) : bf16_to_float(__ldg(static_cast<const Bytes2*>(logits) + id)), has_nan);
    }

    // Logits 4 * group ... 4 * group + 3; minus infinity past the end.
    __device__ __forceinline__ float4 four(unsigned group, bool& has_nan) const
    {
        const unsigned id = group * 4;
        float4 x;
        if (in_fours && id + 4 <= vocabulary) {
            if (bytes == 4)
                x = __ldg(static_cast<const float4*>(logits) + group);
            else {
                const Bytes8 pairs = __ldg(static_cast<const Bytes8*>(logits) + group);
                x = make_float4(low_of_pair(pairs.x), high_of_pair(pairs.x), low_of_pair(pairs.y), high_of_pair(pairs.y));
            }
            return make_float4(clean(x.x, has_nan), clean(x.y, has_nan), clean(x.z, has_nan), clean(x.w, has_nan));
        }
        x.x = id < vocabulary ? at(id, has_nan) : minus_infinity();
        x.y = id + 1 < vocabulary ? at(id + 1, has_nan) : minus_infinity();
        x.z = id + 2 < vocabulary ? at(id + 2, has_nan) : minus_infinity();
        x.w = id + 3 < vocabulary ? at(id + 3, has_nan) : minus_infinity();
        return x;
    }
};

// The best candidate of a thread, in the making.
struct Best {
    unsigned key = 0;
    unsigned id = 0;

    __device__ __forceinline__ void offer(float score, unsigned own)
    {
        const unsigned own_key = ordered(score);
        if (own_key > key || (own_key == key && own < id)) {
            key = own_key;
            id = own;
        }
    }

    __device__ __forceinline__ uint64 word() const
    {
        return key ? packed(key, id) : 0;
    }
};

// A sampling temperature: 0 where the best logit is taken.
__device__ __forceinline__ float inverse_of(float temperature)
{
    return temperature >= 1e-5f && temperature <= LARGEST ? __fdiv_rn(1.0f, temperature) : 0.0f;
}

// The best of the groups of four logits first ... last - 1 whose keys are at least `threshold`; without noise if `inverse` is 0. Every thread
// of the block calls it.
__device__ __forceinline__ uint64 best_of_groups(
    const Row& row, const Noise& noise, float inverse, unsigned threshold, unsigned first, unsigned last, bool& has_nan)
{
    Best best;
    float to_beat = minus_infinity();
    // The next group is on its way while this one is worked on.
    float4 next = make_float4(0, 0, 0, 0);
    if (first + threadIdx.x < last)
        next = row.four(first + threadIdx.x, has_nan);
#pragma unroll 1
    for (unsigned base = first; base < last; base += blockDim.x) {
        const unsigned group = base + threadIdx.x, id = group * 4;
        const float4 x = next;
        if (group + blockDim.x < last)
            next = row.four(group + blockDim.x, has_nan);
        if (group < last) {
            const bool live_x = ordered(x.x) >= threshold, live_y = id + 1 < row.vocabulary && ordered(x.y) >= threshold;
            const bool live_z = id + 2 < row.vocabulary && ordered(x.z) >= threshold, live_w = id + 3 < row.vocabulary && ordered(x.w) >= threshold;
            if (inverse == 0.0f) {
                if (live_x) best.offer(x.x, id);
                if (live_y) best.offer(x.y, id + 1);
                if (live_z) best.offer(x.z, id + 2);
                if (live_w) best.offer(x.w, id + 3);
            } else {
                const float4 s = make_float4(__fmul_rn(x.x, inverse), __fmul_rn(x.y, inverse), __fmul_rn(x.z, inverse), __fmul_rn(x.w, inverse));
                const float highest = fmaxf(fmaxf(s.x, s.y), fmaxf(s.z, s.w));
                // What cannot win whatever its noise is not given any, and the logarithms are spared where the random bits say as much.
                if ((live_x || live_y || live_z || live_w) && __fadd_rn(highest, MOST_GUMBEL) >= to_beat) {
                    const uint4 random = noise.of(group);
                    if (live_x && __fadd_rn(s.x, most_gumbel(random.x)) >= to_beat)
                        best.offer(__fadd_rn(s.x, gumbel(random.x)), id);
                    if (live_y && __fadd_rn(s.y, most_gumbel(random.y)) >= to_beat)
                        best.offer(__fadd_rn(s.y, gumbel(random.y)), id + 1);
                    if (live_z && __fadd_rn(s.z, most_gumbel(random.z)) >= to_beat)
                        best.offer(__fadd_rn(s.z, gumbel(random.z)), id + 2);
                    if (live_w && __fadd_rn(s.w, most_gumbel(random.w)) >= to_beat)
                        best.offer(__fadd_rn(s.w, gumbel(random.w)), id + 3);
                }
            }
        }
        __syncwarp();
        const unsigned highest_key = __reduce_max_sync(ALL, best.key);
        to_beat = highest_key ? from_ordered(highest_key) : minus_infinity();
    }
    return best.word();
}

// A call of either sampling kernel.
struct Draws {
    const void* logits;        // [rows, tokens, vocabulary and padding]
    int64 logit_bytes;
    int64 logits_row;
    int64 logits_token;
    int64 in_fours;
    int64 vocabulary;
    const void* seeds;         // [rows]
    int64 seed_bytes;
    const float* temperature;  // [rows]
    const void* top_k;         // [rows], or 0
    int64 top_k_bytes;
    const float* top_p;        // [rows], or 0
    uint64* workspace;         // a best word per row and token, a NaN mark per row and token, arrivals per row; all 0 between launches
    void* drawn;               // [rows], or 0 where drafts are accepted
    int64 drawn_bytes;
    int64 rows;
    int64 chunks;              // blocks of a row and token

    __device__ __forceinline__ Row row_of(int64 row, int64 token) const
    {
        const int64 offset = (row * logits_row + token * logits_token) * logit_bytes;
        return Row{static_cast<const char*>(logits) + offset, logit_bytes, static_cast<unsigned>(vocabulary), in_fours != 0};
    }

    __device__ __forceinline__ Noise noise_of(int64 row, int64 position) const
    {
        const uint64 seed = static_cast<uint64>(load_id(seeds, seed_bytes, row));
        return Noise{static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32), static_cast<unsigned>(position),
                     static_cast<unsigned>(static_cast<uint64>(position) >> 32)};
    }

    // Hand in this block's best word; the last block of a row settles it. Every thread of the block calls it, `best` is the block's.
    __device__ __forceinline__ void hand_in(int64 row, int64 token, int64 length, uint64 best, bool has_nan, const Round& round) const
    {
        const int64 columns = rows * round.tokens;
        uint64* own = workspace + row * round.tokens;
        const bool any_nan = __syncthreads_or(has_nan);
        if (threadIdx.x == 0) {
            if (best)
                atomicMax(own + token, best);
            if (any_nan)
                atomicExch(own + columns + token, 1ull);
        }
        if (!is_last(workspace + 2 * columns + row, round.tokens * chunks) || threadIdx.x >= 32)
            return;
        for (int64 marked = threadIdx.x; marked < round.tokens; marked += 32)
            if (atomicExch(own + columns + marked, 0ull))
                count(round.signal, OUT_OF_RANGE);
        if (threadIdx.x == 0 && round.live_tokens(row, length) > 0) {
            const float own_temperature = temperature[row], own_top_p = top_p ? top_p[row] : 1.0f;
            if (!(own_temperature >= 0.0f && own_temperature <= LARGEST) || own_top_p != own_top_p)
                count(round.signal, OUT_OF_RANGE);
        }
        if (!drawn)
            round.settle(row, length, [&](int64 t) { return id_of(atomicExch(own + t, 0ull)); });
        else if (threadIdx.x == 0)
            write_id(drawn, drawn_bytes, row, length < 0 ? -1 : id_of(atomicExch(own, 0ull)));
    }
};

// Every logit is a candidate: several blocks share a row.
__device__ __forceinline__ void draw(const Draws& draws, const Round& round)
{
    const unsigned column = blockIdx.x / static_cast<unsigned>(draws.chunks), chunk = blockIdx.x - column * static_cast<unsigned>(draws.chunks);
    const unsigned row = column / static_cast<unsigned>(round.tokens), token = column - row * static_cast<unsigned>(round.tokens);
    const int64 length = read_id(round.lengths, round.length_bytes, row);
    uint64 best = 0;
    bool has_nan = false;
    if (token < round.live_tokens(row, length)) {
        const Row logits = draws.row_of(row, token);
        const unsigned groups = (logits.vocabulary + 3) / 4;
        const unsigned share = (groups + static_cast<unsigned>(draws.chunks) - 1) / static_cast<unsigned>(draws.chunks);
        const unsigned first = chunk * share, last = min(first + share, groups);
        best = block_max(best_of_groups(logits, draws.noise_of(row, length + token), inverse_of(draws.temperature[row]), 0, first, last, has_nan));
    }
    draws.hand_in(row, token, length, best, has_nan, round);
}

constexpr int BINS = 2048;
constexpr int BIN_BITS = 11;
// Groups of four logits that a thread asks for before it looks at the first: one block has all of a row to wait for.
constexpr int GROUPS_AHEAD = 2;
// Candidates that shared memory holds beside the histogram.
constexpr int LISTED = 3072;

// Weights by bin, 64 bits in two words: additions of 32 bits are the ones that shared memory does by itself.
struct Selection {
    unsigned low[BINS];
    unsigned high[BINS];
    float value[LISTED];
    unsigned id[LISTED];
    unsigned listed;
    uint64 warp_total[SELECT_THREADS / 32];
    unsigned chosen;
    uint64 above;
};

// One row under top-k and top-p: all its candidates, or once they are few, a list of them.
struct Selector {
    Selection& shared;
    const Row& row;
    float inverse;
    bool& has_nan;
    float highest;
    bool is_list;

    template <typename Visit>
    __device__ __forceinline__ void each(const Visit& visit) const
    {
        if (is_list) {
#pragma unroll 1
            for (unsigned i = threadIdx.x; i < shared.listed; i += SELECT_THREADS)
                visit(shared.value[i], shared.id[i]);
            return;
        }
        const unsigned groups = (row.vocabulary + 3) / 4;
#pragma unroll 1
        for (unsigned base = threadIdx.x; base < groups; base += GROUPS_AHEAD * SELECT_THREADS) {
            float4 x[GROUPS_AHEAD];
#pragma unroll
            for (int i = 0; i < GROUPS_AHEAD; i++)
                if (base + i * SELECT_THREADS < groups)
                    x[i] = row.four(base + i * SELECT_THREADS, has_nan);
#pragma unroll
            for (int i = 0; i < GROUPS_AHEAD; i++) {
                const unsigned id = (base + i * SELECT_THREADS) * 4;
                if (id < row.vocabulary) visit(x[i].x, id);
                if (id + 1 < row.vocabulary) visit(x[i].y, id + 1);
                if (id + 2 < row.vocabulary) visit(x[i].z, id + 2);
                if (id + 3 < row.vocabulary) visit(x[i].w, id + 3);
            }
        }
    }

    // The highest key such that the weight of all keys from it on, of those at least `floor`, reaches the target: of `k` ones, or of a share of
    // the total mass, `share` / 2^64. 0 where all the weight does not reach it.
    __device__ __forceinline__ unsigned threshold(bool by_mass, uint64 k, uint64 share, unsigned floor)
    {
        uint64 target = k;
        unsigned prefix = 0;
#pragma unroll 1
        for (int known = 32; known > 0; known = max(known - BIN_BITS, 0)) {
            const int shift = max(known - BIN_BITS, 0);
            for (int bin = threadIdx.x; bin < BINS; bin += SELECT_THREADS)
                shared.low[bin] = shared.high[bin] = 0;
            __syncthreads();
            each([&](float x, unsigned) {
                const unsigned key = ordered(x);
                if (key < floor || (known < 32 && key >> known != prefix >> known))
                    return;
                const unsigned bin = key >> shift & (BINS - 1);
                if (!by_mass) {
                    atomicAdd(&shared.low[bin], 1u);
                    return;
                }
                const uint64 mass = mass_of(__fmul_rn(__fsub_rn(x, highest), inverse));
                if (mass == 0)
                    return;
                const unsigned part = static_cast<unsigned>(mass), before = atomicAdd(&shared.low[bin], part);
                const unsigned carried = static_cast<unsigned>(mass >> 32) + (before + part < part);
                if (carried)
                    atomicAdd(&shared.high[bin], carried);
            });
            __syncthreads();
            // Thread i has the i-th pair of bins from the top.
            const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, upper = BINS - 1 - 2 * threadIdx.x;
            const uint64 first = static_cast<uint64>(shared.high[upper]) << 32 | shared.low[upper];
            const uint64 both = first + (static_cast<uint64>(shared.high[upper - 1]) << 32 | shared.low[upper - 1]);
            uint64 sum = both;
#pragma unroll
            for (int step = 1; step < 32; step <<= 1) {
                const uint64 other = __shfl_up_sync(ALL, sum, step);
                sum += lane >= step ? other : 0;
            }
            if (lane == 31)
                shared.warp_total[warp] = sum;
            __syncthreads();
            uint64 before = sum - both, total = 0;
#pragma unroll 1
            for (int other = 0; other < SELECT_THREADS / 32; other++) {
                before += other < warp ? shared.warp_total[other] : 0;
                total += shared.warp_total[other];
            }
            if (known == 32) {
                if (by_mass) {
                    target = __umul64hi(total, share);
                    target = target ? target : 1;
                }
                if (total < target)
                    return 0;
            }
            if (before < target && before + both >= target) {
                const bool in_first = before + first >= target;
                shared.chosen = static_cast<unsigned>(in_first ? upper : upper - 1);
                shared.above = in_first ? before : before + first;
            }
            __syncthreads();
            target -= shared.above;
            prefix |= shared.chosen << shift;
            if (known == 32 && !is_list)
                list(prefix);
        }
        return prefix;
    }

    // Keep the candidates whose keys are at least `least` as a list, if they fit one. Their order does not matter.
    __device__ __forceinline__ void list(unsigned least)
    {
        if (threadIdx.x == 0)
            shared.listed = 0;
        __syncthreads();
        each([&](float x, unsigned id) {
            // Once they are too many there is no use in counting on.
            if (ordered(x) < least || *static_cast<volatile unsigned*>(&shared.listed) > LISTED)
                return;
            const unsigned place = atomicAdd(&shared.listed, 1u);
            if (place < LISTED) {
                shared.value[place] = x;
                shared.id[place] = id;
            }
        });
        __syncthreads();
        is_list = shared.listed <= LISTED;
    }
};

// One block takes a row: what remains under top-k, then under top-p, and the best of that.
__device__ __forceinline__ void draw_selected(const Draws& draws, const Round& round)
{
    __shared__ Selection shared;
    const unsigned row = blockIdx.x / static_cast<unsigned>(round.tokens), token = blockIdx.x - row * static_cast<unsigned>(round.tokens);
    const int64 length = read_id(round.lengths, round.length_bytes, row);
    uint64 best = 0;
    bool has_nan = false;
    if (token < round.live_tokens(row, length)) {
        const Row logits = draws.row_of(row, token);
        const Noise noise = draws.noise_of(row, length + token);
        const float inverse = inverse_of(draws.temperature[row]);
        const int64 top_k = draws.top_k ? load_id(draws.top_k, draws.top_k_bytes, row) : 0;
        const float top_p = draws.top_p ? draws.top_p[row] : 1.0f;
        const bool by_count = top_k > 0 && top_k < draws.vocabulary, by_mass = top_p < 1.0f;
        unsigned threshold = 0;
        Selector selector{shared, logits, inverse, has_nan, minus_infinity(), false};
        if (inverse != 0.0f && (by_count || by_mass)) {
            float highest = minus_infinity();
            selector.each([&](float x, unsigned) { highest = fmaxf(highest, x); });
            selector.highest = from_ordered(static_cast<unsigned>(block_max(packed(ordered(highest), 0)) >> 32));
            __syncthreads();
            if (by_count)
                threshold = selector.threshold(false, static_cast<uint64>(top_k), 0, 0);
            if (by_mass) {
                const uint64 share = top_p > 0.0f ? static_cast<uint64>(static_cast<double>(top_p) * 18446744073709551616.0) : 0;
                threshold = max(threshold, selector.threshold(true, 0, share, threshold));
            }
        }
        if (selector.is_list) {
            Best drawn;
            selector.each([&](float x, unsigned id) {
                if (ordered(x) < threshold)
                    return;
                const uint4 random = noise.of(id / 4);
                const unsigned pair = id & 2 ? (id & 1 ? random.w : random.z) : (id & 1 ? random.y : random.x);
                drawn.offer(__fadd_rn(__fmul_rn(x, inverse), gumbel(pair)), id);
            });
            best = drawn.word();
        } else
            best = best_of_groups(logits, noise, inverse, threshold, 0, (logits.vocabulary + 3) / 4, has_nan);
        best = block_max(best);
    }
    draws.hand_in(row, token, length, best, has_nan, round);
}

#define GPUKIT_DRAW_PARAMETERS \
    const void *logits, int64 logit_bytes, int64 logits_row, int64 logits_token, int64 in_fours, int64 vocabulary, \
    const void *seeds, int64 seed_bytes, const float *temperature, const void *top_k, int64 top_k_bytes, const float *top_p, \
    uint64 *workspace, void *drawn, int64 drawn_bytes, int64 rows, int64 chunks, \
    const void *ids, int64 id_bytes, int64 id_row, void *lengths, int64 length_bytes, void *anchors, int64 anchor_bytes, \
    const void *valid, int64 valid_bytes, const void *slots, int64 slot_bytes, void *accepted, int64 accepted_bytes, \
    void *fold_rows, int64 fold_bytes, void *emitted, int64 emitted_bytes, int64 emitted_row, int64 tokens, int64 *signal
#define GPUKIT_DRAW_ARGUMENTS \
    Draws{logits, logit_bytes, logits_row, logits_token, in_fours, vocabulary, seeds, seed_bytes, temperature, top_k, top_k_bytes, top_p, \
          workspace, drawn, drawn_bytes, rows, chunks}, \
    Round{ids, id_bytes, id_row, lengths, length_bytes, anchors, anchor_bytes, valid, valid_bytes, slots, slot_bytes, \
          accepted, accepted_bytes, fold_rows, fold_bytes, emitted, emitted_bytes, emitted_row, tokens, signal}

extern "C" __global__ void __launch_bounds__(THREADS) gpukit_draw(GPUKIT_DRAW_PARAMETERS)
{
    wait_for_predecessor();
    draw(GPUKIT_DRAW_ARGUMENTS);
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS) gpukit_draw_selected(GPUKIT_DRAW_PARAMETERS)
{
    wait_for_predecessor();
    draw_selected(GPUKIT_DRAW_ARGUMENTS);
}

// Copy units of one width: hidden[row, accepted - 1] of every row, or zeros.
template <typename Bytes>
__device__ __forceinline__ void copy_hidden(const char* from, char* to, unsigned unit, bool zero)
{
    Bytes value{};
    if (!zero)
        value = __ldg(reinterpret_cast<const Bytes*>(from) + unit);
    reinterpret_cast<Bytes*>(to)[unit] = value;
}

extern "C" __global__ void __launch_bounds__(THREADS) gpukit_select_hidden(
    const char* hidden, int64 hidden_row, int64 hidden_token,  // strides in bytes
    const void* accepted, int64 accepted_bytes,
    char* out, int64 out_row,
    int64 tokens, int64 units, int64 unit_bytes, int64 chunks, int64* signal)
{
    wait_for_predecessor();
    const unsigned row = blockIdx.x / static_cast<unsigned>(chunks), chunk = blockIdx.x - row * static_cast<unsigned>(chunks);
    const unsigned unit = chunk * THREADS + threadIdx.x;
    const int64 produced = load_id(accepted, accepted_bytes, row);
    const bool bad = produced < 0 || produced > tokens, zero = bad || produced == 0;
    if (bad && chunk == 0 && threadIdx.x == 0)
        count(signal, OUT_OF_RANGE);
    if (unit >= units)
        return;
    const char* from = hidden + row * hidden_row + (zero ? 0 : produced - 1) * hidden_token;
    char* to = out + row * out_row;
    if (unit_bytes == 16)
        copy_hidden<Bytes16>(from, to, unit, zero);
    else if (unit_bytes == 4)
        copy_hidden<Bytes4>(from, to, unit, zero);
    else
        copy_hidden<Bytes2>(from, to, unit, zero);
}

// Logits that a thread asks for before it looks at the first.
constexpr int AHEAD = 8;

template <typename Load>
__device__ __forceinline__ uint64 best_of_column(const Load& load, unsigned first, unsigned last, unsigned step, bool& has_nan)
{
    if (first >= last)
        return 0;
    // Neither NaN nor minus infinity is above this, so the first id stands if there is nothing else.
    float best = minus_infinity();
    unsigned id = first;
#pragma unroll 1
    for (unsigned base = first; base < last; base += AHEAD * step) {
        float x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            x[i] = base + i * step < last ? load(base + i * step) : minus_infinity();
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            has_nan |= x[i] != x[i];
            if (x[i] > best) {
                best = x[i];
                id = base + i * step;
            }
        }
    }
    return packed(ordered(best), id);
}

// A block takes a share of the rows of 2^shift columns side by side; a warp reads along whichever dimension lies closer together.
extern "C" __global__ void __launch_bounds__(THREADS) gpukit_argmax_columns(
    const void* logits, int64 logit_bytes, int64 vocabulary_stride, int64 column_stride,  // [vocabulary and padding, columns]
    int64 vocabulary, int64 columns, int64 shift, int64 chunks,
    uint64* workspace,  // a best word per column, a NaN mark per column, arrivals per tile of columns; all 0 between launches
    void* out, int64 out_bytes, int64* signal)
{
    wait_for_predecessor();
    __shared__ uint64 partial[THREADS];
    const unsigned tile = blockIdx.x / static_cast<unsigned>(chunks), chunk = blockIdx.x - tile * static_cast<unsigned>(chunks);
    const unsigned width = 1u << shift, step = THREADS >> shift;
    const unsigned column = (tile << shift) + (threadIdx.x & (width - 1));
    const unsigned share = static_cast<unsigned>((vocabulary + chunks - 1) / chunks), first = chunk * share;
    const unsigned last = static_cast<unsigned>(min(static_cast<int64>(first) + share, vocabulary));
    uint64 best = 0;
    bool has_nan = false;
    if (column < columns) {
        const unsigned own = first + (threadIdx.x >> shift);
        if (logit_bytes == 4) {
            const float* values = static_cast<const float*>(logits) + column * column_stride;
            best = best_of_column([&](unsigned id) { return __ldg(values + id * vocabulary_stride); }, own, last, step, has_nan);
        } else {
            const Bytes2* values = static_cast<const Bytes2*>(logits) + column * column_stride;
            best = best_of_column([&](unsigned id) { return bf16_to_float(__ldg(values + id * vocabulary_stride)); }, own, last, step, has_nan);
        }
        if (has_nan)
            atomicExch(workspace + columns + column, 1ull);
    }
    if (shift == 0)
        best = block_max(best);
    else {
        partial[threadIdx.x] = best;
        for (unsigned half = THREADS / 2; half >= width; half >>= 1) {
            __syncthreads();
            if (threadIdx.x < half)
                partial[threadIdx.x] = best = larger(best, partial[threadIdx.x + half]);
        }
    }
    if (threadIdx.x < width && column < columns && best)
        atomicMax(workspace + column, best);
    // The marks and words of every thread come before the arrival.
    __threadfence();
    if (!is_last(workspace + 2 * columns + tile, chunks) || threadIdx.x >= width || column >= columns)
        return;
    write_id(out, out_bytes, column, id_of(atomicExch(workspace + column, 0ull)));
    if (atomicExch(workspace + columns + column, 0ull))
        count(signal, OUT_OF_RANGE);
}
