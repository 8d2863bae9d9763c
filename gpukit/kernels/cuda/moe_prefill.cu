// Device code of the prefill schedule of a sparse mixture of experts: what it promises stands in `kernels/moe.py`. After scores and selection, which
// are those of the decode schedule, tokens get places, grouped by expert; two grouped products follow, and the sum of each token's rows.
// Weights go from memory to registers as tensor-core operands, each read by one warp of its block; tokens wait in shared memory for all warps.
// Activations between the products are sums of two bfloat16, the second being what the first leaves.

#include "moe.cuh"
#include "staging.cuh"

#ifndef DYNAMIC_SHARED
extern __shared__ Bytes16 dynamic_shared[];
#define DYNAMIC_SHARED dynamic_shared
#endif

constexpr int SCAN_THREADS = 512;
constexpr int GATHER_THREADS = BATCH * TOP;
constexpr int GEMM_WARPS = 8;
constexpr int REDUCE_THREADS = 256;
// Rows of a warp, and of a block, in a grouped product.
constexpr int ROW_TILES = 2;
constexpr int WARP_ROWS = 16 * ROW_TILES;
constexpr int BLOCK_ROWS = WARP_ROWS * GEMM_WARPS;
// Chunks of tokens in shared memory; steps of a chunk, which are also the steps of weights on their way.
constexpr int CHUNKS = 3;
constexpr int CHUNK_STEPS = 2;
// How many chunks before they are multiplied weights come to the L2: one before they are loaded.
constexpr int CHUNKS_AHEAD = 2;

// Tokens of an expert that a block multiplies at once.
struct Run {
    int expert;
    int first;  // place
    int count;
    int is_read_again;
};

struct Runs {
    int64 count;
    int64 shared;  // of them, at the end
    Run each[1];
};

__device__ __forceinline__ void commit_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until all but the last COUNT groups of copies of this thread have arrived.
template <int COUNT>
__device__ __forceinline__ void wait_for_older_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}

// Places of tokens: experts one behind the other, their tokens in order; then all tokens, for the shared expert.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS) gpukit_scan(
    const uint64* owners,  // [batches, experts]: tokens of each expert, as bits
    int64 batches,
    int64 experts,
    int64 tokens,
    int64 has_shared,
    int64 run_tokens,      // most tokens of a run
    int* before,           // [batches, experts]: tokens of the expert in earlier batches
    int* firsts,           // [experts]
    Runs* runs)
{
    __shared__ int2 totals[SCAN_THREADS / 32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, expert = threadIdx.x, length = static_cast<int>(run_tokens);
    wait_for_predecessor();
    release_successor();
    int size = 0;
    if (expert < experts)
#pragma unroll 8
        for (int64 batch = 0; batch < batches; batch++) {
            before[batch * experts + expert] = size;
            size += __popcll(owners[batch * experts + expert]);
        }
    const int own_runs = (size + length - 1) / length;
    int places = size, all_runs = own_runs;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int more_places = __shfl_up_sync(~0u, places, distance), more_runs = __shfl_up_sync(~0u, all_runs, distance);
        places += lane >= distance ? more_places : 0;
        all_runs += lane >= distance ? more_runs : 0;
    }
    if (lane == 31)
        totals[warp] = make_int2(places, all_runs);
    __syncthreads();
    for (int other = 0; other < warp; other++) {
        places += totals[other].x;
        all_runs += totals[other].y;
    }
    if (expert < experts) {
        firsts[expert] = places - size;
        for (int i = 0; i < own_runs; i++)
            *reinterpret_cast<Bytes16*>(runs->each + all_runs - own_runs + i) =
                make_uint4(expert, places - size + i * length, min(size - i * length, length), own_runs > 1);
    }
    // The last thread has no expert, and so the number of all runs.
    __shared__ int routed;
    if (threadIdx.x == SCAN_THREADS - 1)
        routed = all_runs;
    __syncthreads();
    const int shared = has_shared ? static_cast<int>((tokens + length - 1) / length) : 0;
    for (int i = threadIdx.x; i < shared; i += SCAN_THREADS)
        *reinterpret_cast<Bytes16*>(runs->each + routed + i) = make_uint4(
            0, static_cast<int>(TOP * tokens) + i * length, static_cast<int>(min(tokens - i * length, static_cast<int64>(length))), shared > 1);
    if (threadIdx.x == 0) {
        runs->count = routed + shared;
        runs->shared = shared;
    }
}

extern "C" __global__ void __launch_bounds__(GATHER_THREADS) gpukit_gather(
    const int* ids,        // [tokens, TOP]
    const uint64* owners,  // [batches, experts]
    const int* before,     // [batches, experts]
    const int* firsts,     // [experts]
    int64 experts,
    int64 tokens,
    int64 paths,
    int* packed,           // [tokens, paths]: places
    int* token_of)         // [places]
{
    wait_for_predecessor();
    release_successor();
    const int in_batch = threadIdx.x / TOP, rank = threadIdx.x % TOP;
    const int64 token = static_cast<int64>(blockIdx.x) * BATCH + in_batch;
    if (token >= tokens)
        return;
    const int id = ids[token * TOP + rank];
    int place = -1;
    if (id >= 0) {
        const int64 own = static_cast<int64>(blockIdx.x) * experts + id;
        place = firsts[id] + before[own] + __popcll(owners[own] & ((1ull << in_batch) - 1));
        token_of[place] = static_cast<int>(token);
    }
    packed[token * paths + rank] = place;
    if (rank == 0 && paths > TOP) {
        packed[token * paths + TOP] = id >= 0 ? static_cast<int>(TOP * tokens + token) : -1;
        token_of[TOP * tokens + token] = static_cast<int>(token);
    }
}

struct Product {
    const char* tokens;     // bfloat16, 16-byte rows of token_row accesses
    int64 token_row;
    const int* token_of;    // rows of places, or 0 where places are rows
    int64 inputs;
    int64 features;         // of an expert; of gate and up together
    const Runs* runs;
    void* out;              // [places, out_row]: activations, bfloat16 and what they leave, or float32 rows
    int64 out_row;
    int64 blocks_of_run;
};

// A step of a row and its scale, which is the `at`-th of the bank.
template <typename Format>
__device__ __forceinline__ void load_step(typename Format::Raw& raw, const Bank& bank, int at, int quad, CachePolicy policy)
{
    const Row row = Format::row(bank, at, quad);
    load_step<Format>(raw, row, 0, policy);
    Format::load_scale(raw, row, 0);
}

// A lane brings a chunk of one of its warp's rows into the L2.
template <typename Format>
__device__ __forceinline__ void prefetch_chunk(const Bank& bank, int at)
{
    const char* base = bank.base + static_cast<int64>(at) * Format::STEP_BYTES;
#pragma unroll
    for (int byte = 0; byte < CHUNK_STEPS * Format::STEP_BYTES; byte += 64)
        prefetch_line(base + byte);
    Format::prefetch_rest(bank, at, 0);
    Format::prefetch_rest(bank, at, 1);
}

// TOKENS columns by BLOCK_ROWS rows. Rows of a lane are neighbours, so that its sums of a token are: four of the output, or gate and up of two.
template <typename Format, int TOKENS, bool IS_GATE>
__device__ __forceinline__ void multiply(const Product& call, const Bank& bank, const Run& run, int row_block)
{
    constexpr int TERMS = IS_GATE ? 1 : 2, TILES = TOKENS / COLUMNS;
    constexpr int CHUNK_OCTS = CHUNK_STEPS * 4 * Format::OCTS, COLUMN_OCTS = TERMS * CHUNK_OCTS, SLOTS = TOKENS * COLUMN_OCTS;
    // Two tokens that a quarter of a warp reads at once lie in different banks.
    constexpr int TURN = Format::OCTS == 1 ? 4 : 1;
    Bytes16* shared = reinterpret_cast<Bytes16*>(DYNAMIC_SHARED);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, line = lane >> 2, quad = lane & 3;
    const int steps = static_cast<int>(call.inputs) / Format::STEP, chunks = steps / CHUNK_STEPS;
    const int features = static_cast<int>(call.features), half = features / 2;
    const CachePolicy policy = run.is_read_again ? policy_keep_normally() : policy_evict_first();
    // [tile][upper or lower] in steps from the beginning of the bank.
    int rows[ROW_TILES][2];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            const int row = IS_GATE ? row_block * (BLOCK_ROWS / 2) + warp * 16 + 2 * line + tile + lower * half
                                    : min(row_block * BLOCK_ROWS + warp * WARP_ROWS + 4 * line + 2 * tile + lower, features - 1);
            rows[tile][lower] = (run.expert * features + row) * steps;
        }
    typename Format::Raw held[CHUNK_STEPS][ROW_TILES][2];
#pragma unroll
    for (int step = 0; step < CHUNK_STEPS; step++)
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++)
#pragma unroll
            for (int lower = 0; lower < 2; lower++)
                load_step<Format>(held[step][tile][lower], bank, rows[tile][lower] + step, quad, policy);
    const int ahead = quad & 2 ? (quad & 1 ? rows[1][1] : rows[1][0]) : (quad & 1 ? rows[0][1] : rows[0][0]);
    for (int chunk = 1; chunk < min(CHUNKS_AHEAD, chunks); chunk++)
        prefetch_chunk<Format>(bank, ahead + chunk * CHUNK_STEPS);
    // Released only after the wait: the next launch counts on the runs' being there.
    wait_for_predecessor();
    release_successor();

    constexpr int COPIES = TOKENS * CHUNK_OCTS / (GEMM_WARPS * 32);
    const int term_bytes = static_cast<int>(call.inputs) * 2;
    const char* sources[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const int slot = threadIdx.x + i * GEMM_WARPS * 32, column = slot / CHUNK_OCTS, oct = slot % CHUNK_OCTS;
        const int place = run.first + min(column, run.count - 1);
        const int64 row = call.token_of ? call.token_of[place] : place;
        sources[i] = call.tokens + (row * call.token_row + oct) * 16;
    }
    const auto copy = [&](int chunk) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int slot = threadIdx.x + i * GEMM_WARPS * 32, column = slot / CHUNK_OCTS, oct = slot % CHUNK_OCTS;
            if (chunk < chunks && column < ((run.count + 15) & ~15))
#pragma unroll
                for (int term = 0; term < TERMS; term++)
                    copy_later(shared + chunk % CHUNKS * SLOTS + column * COLUMN_OCTS + term * CHUNK_OCTS + (oct ^ (column & 1) * TURN),
                               sources[i] + term * term_bytes + chunk * CHUNK_OCTS * 16, column < run.count);
        }
        commit_copies();
    };
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS - 1; chunk++)
        copy(chunk);

    // Before what is there is multiplied, if there are registers: the compiler has one scoreboard for loads across branches, so that whoever waits
    // for one of them waits for all. Past the end comes the last step again.
    constexpr bool IS_EARLY = TOKENS > 64 || Format::HAS_SCALE;
    const auto load_next = [&](int chunk, int step) {
        const int next = min((chunk + 1) * CHUNK_STEPS + step, steps - 1);
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; i++)
            load_step<Format>(held[step][i / 2][i % 2], bank, rows[i / 2][i % 2] + next, quad, policy);
    };

    float sums[TILES][ROW_TILES][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
        wait_for_older_copies<CHUNKS - 2>();
        __syncthreads();
        copy(chunk + CHUNKS - 1);
        if (chunk + CHUNKS_AHEAD < chunks)
            prefetch_chunk<Format>(bank, ahead + (chunk + CHUNKS_AHEAD) * CHUNK_STEPS);
        const Bytes16* own = shared + chunk % CHUNKS * SLOTS + line * COLUMN_OCTS;
#pragma unroll
        for (int step = 0; step < CHUNK_STEPS; step++) {
            // Codes have sums of their own until their scale is multiplied in.
            float products[Format::HAS_SCALE ? TILES : 1][ROW_TILES][4] = {};
            float scales[ROW_TILES][2];
#pragma unroll
            for (int oct = 0; oct < Format::OCTS; oct++) {
                unsigned weights[ROW_TILES][2][4];
#pragma unroll
                for (int tile = 0; tile < ROW_TILES; tile++)
#pragma unroll
                    for (int lower = 0; lower < 2; lower++)
                        Format::expand(held[step][tile][lower], oct, weights[tile][lower]);
                if (oct == Format::OCTS - 1) {
#pragma unroll
                    for (int i = 0; i < 2 * ROW_TILES; i++)
                        scales[i / 2][i % 2] = Format::scale(held[step][i / 2][i % 2]);
                    if (IS_EARLY)
                        load_next(chunk, step);
                }
                const int at = ((step * 4 + quad) * Format::OCTS + oct) ^ (line & 1) * TURN;
#pragma unroll
                for (int pair = 0; pair < TILES / 2; pair++) {
                    if (pair * 2 * COLUMNS >= run.count)
                        break;
#pragma unroll
                    for (int term = 0; term < TERMS; term++) {
                        unsigned tokens[2][4];
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            const Bytes16 taken = own[(2 * pair + i) * COLUMNS * COLUMN_OCTS + term * CHUNK_OCTS + at];
                            tokens[i][0] = taken.x;
                            tokens[i][1] = taken.y;
                            tokens[i][2] = taken.z;
                            tokens[i][3] = taken.w;
                            arrange<Format::ORDER>(tokens[i]);
                        }
#pragma unroll
                        for (int i = 0; i < 2; i++)
#pragma unroll
                            for (int tile = 0; tile < ROW_TILES; tile++)
                                multiply_oct(Format::HAS_SCALE ? products[Format::HAS_SCALE ? 2 * pair + i : 0][tile] : sums[2 * pair + i][tile],
                                             weights[tile][0], weights[tile][1], tokens[i]);
                    }
                }
            }
            if (Format::HAS_SCALE)
#pragma unroll
                for (int tile = 0; tile < ROW_TILES; tile++)
#pragma unroll
                    for (int column = 0; column < TILES; column++)
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const float product = products[Format::HAS_SCALE ? column : 0][tile][i];
                            sums[column][tile][i] = fmaf(scales[tile][i / 2], product, sums[column][tile][i]);
                        }
            if (!IS_EARLY)
                load_next(chunk, step);
        }
    }
    wait_for_older_copies<0>();
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int column = tile * COLUMNS + 2 * quad + i;
            if (column >= run.count)
                continue;
            const int64 at = (run.first + column) * call.out_row;
            if (IS_GATE) {
                Bytes2* to = static_cast<Bytes2*>(call.out) + at + row_block * (BLOCK_ROWS / 2) + warp * 16 + 2 * line;
                const float first = silu(sums[tile][0][i]) * sums[tile][0][i + 2], second = silu(sums[tile][1][i]) * sums[tile][1][i + 2];
                const unsigned pair = floats_to_pair(first, second);
                *reinterpret_cast<unsigned*>(to) = pair;
                *reinterpret_cast<unsigned*>(to + half) = floats_to_pair(first - low_of_pair(pair), second - high_of_pair(pair));
            } else {
                const int feature = row_block * BLOCK_ROWS + warp * WARP_ROWS + 4 * line;
                if (feature < features)
                    *reinterpret_cast<float4*>(static_cast<float*>(call.out) + at + feature) =
                        make_float4(sums[tile][0][i], sums[tile][0][i + 2], sums[tile][1][i], sums[tile][1][i + 2]);
            }
        }
}

template <typename Format, int TOKENS, bool IS_GATE, bool HAS_OTHER>
__device__ __forceinline__ void run_product(const Product& call, const Bank& bank, const Bank& shared, bool is_shared_other)
{
    // The launch in front of the one in front made the runs. From the L2: the L1 may be older.
    const int index = blockIdx.x / static_cast<unsigned>(call.blocks_of_run), row_block = blockIdx.x % static_cast<unsigned>(call.blocks_of_run);
    const int count = static_cast<int>(__ldcg(&call.runs->count)), routed = count - static_cast<int>(__ldcg(&call.runs->shared));
    if (index >= count) {
        wait_for_predecessor();
        return;
    }
    const Bytes16 bits = __ldcg(reinterpret_cast<const Bytes16*>(call.runs->each + index));
    const Run run = {static_cast<int>(bits.x), static_cast<int>(bits.y), static_cast<int>(bits.z), static_cast<int>(bits.w)};
    const bool is_shared = index >= routed;
    if (HAS_OTHER && is_shared && is_shared_other) {
        multiply<Wide, TOKENS, IS_GATE>(call, shared, run, row_block);
        return;
    }
    const Bank own = {is_shared ? shared.base : bank.base, is_shared ? shared.high : bank.high, is_shared ? shared.scales : bank.scales};
    multiply<Format, TOKENS, IS_GATE>(call, own, run, row_block);
}

#define PRODUCT_PARAMETERS                                                                                                                    \
    const char *base, const char *high, const char *scales, const char *shared_base, const char *shared_high, const char *shared_scales,       \
        int64 is_shared_other, const char *tokens, int64 token_row, const int *token_of, int64 inputs, int64 features, const Runs *runs,       \
        void *out, int64 out_row, int64 blocks_of_run

#define PRODUCT_KERNEL(name, format, tokens_at_once, is_gate, has_other, blocks)                                                              \
    extern "C" __global__ void __launch_bounds__(GEMM_WARPS * 32, blocks) gpukit_##name(PRODUCT_PARAMETERS)                                    \
    {                                                                                                                                         \
        run_product<format, tokens_at_once, is_gate, has_other>(                                                                              \
            Product { tokens, token_row, token_of, inputs, features, runs, out, out_row, blocks_of_run }, Bank { base, high, scales },         \
            Bank { shared_base, shared_high, shared_scales }, is_shared_other != 0);                                                          \
    }

// By the most tokens of a run. Weights that are multiplied out for every run have no registers left for more than 64.
#define PRODUCT_KERNELS(name, format, tokens_at_once, has_other, blocks)                                                   \
    PRODUCT_KERNEL(grouped_gate_up_##name##_##tokens_at_once, format, tokens_at_once, true, has_other, blocks)              \
    PRODUCT_KERNEL(grouped_down_##name##_##tokens_at_once, format, tokens_at_once, false, has_other, blocks)

PRODUCT_KERNELS(bf16, Bf16, 64, false, 2)
PRODUCT_KERNELS(bf16, Bf16, 128, false, 1)
PRODUCT_KERNELS(fp8, Fp8, 64, false, 1)
PRODUCT_KERNELS(q4, Split<4>, 64, true, 1)
PRODUCT_KERNELS(q5, Split<5>, 64, true, 1)
PRODUCT_KERNELS(q6, Split<6>, 64, true, 1)
PRODUCT_KERNELS(w8, Wide, 64, false, 1)

// out += sum of weighted rows, in the order of a token's indices; one block a token.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS) gpukit_prefill_reduce(
    const void* grouped,   // [places, octs] of bfloat16 or float32
    int64 grouped_bytes,   // 2 or 4
    int64 places,
    int64 octs,
    const int* packed,     // [tokens, paths]
    const float* alpha,    // [tokens, paths]
    int64 paths,
    Bytes2* out,
    int64 out_row,
    int64* signal)
{
    wait_for_predecessor();
    release_successor();
    const int64 token = blockIdx.x;
    const int* own = packed + token * paths;
    bool is_padding = false, is_bad = false;
    for (int path = 0; path < paths; path++) {
        is_padding |= own[path] < 0;
        is_bad |= own[path] >= places;
    }
    if (is_bad && threadIdx.x == 0)
        count(signal, OUT_OF_RANGE);
    if (is_padding || is_bad)
        return;
#pragma unroll 1
    for (int64 oct = threadIdx.x; oct < octs; oct += REDUCE_THREADS) {
        Bytes16* to = reinterpret_cast<Bytes16*>(out + token * out_row) + oct;
        const Bytes16 residual = *to;
        float sums[8] = {low_of_pair(residual.x), high_of_pair(residual.x), low_of_pair(residual.y), high_of_pair(residual.y),
                         low_of_pair(residual.z), high_of_pair(residual.z), low_of_pair(residual.w), high_of_pair(residual.w)};
#pragma unroll 3
        for (int path = 0; path < paths; path++) {
            const int64 at = own[path] * octs + oct;
            const float scale = alpha[token * paths + path];
            float values[8];
            if (grouped_bytes == 2) {
                const Bytes16 row = load_streaming(static_cast<const Bytes16*>(grouped) + at);
                const unsigned pairs[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    values[2 * i] = low_of_pair(pairs[i]);
                    values[2 * i + 1] = high_of_pair(pairs[i]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float4 row = load_streaming(static_cast<const float4*>(grouped) + 2 * at + i);
                    values[4 * i] = row.x;
                    values[4 * i + 1] = row.y;
                    values[4 * i + 2] = row.z;
                    values[4 * i + 3] = row.w;
                }
            }
#pragma unroll
            for (int i = 0; i < 8; i++)
                sums[i] = fmaf(scale, values[i], sums[i]);
        }
        *to = make_uint4(floats_to_pair(sums[0], sums[1]), floats_to_pair(sums[2], sums[3]), floats_to_pair(sums[4], sums[5]),
                         floats_to_pair(sums[6], sums[7]));
    }
}
