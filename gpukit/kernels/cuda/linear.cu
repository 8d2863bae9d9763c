// Device code of the projections: what they promise stands in `kernels/linear.py`. Weights stream from memory to registers once, in accesses of
// 16 bytes that are the tensor cores' operands as they come: tiles have tokens for rows and weight rows for columns. The warps of a block split the
// elements of a row into slices; their partial sums meet in shared memory and are added in the order of the slices. Slices, steps and that order
// follow from the weight's shape alone, and a row of a tile knows nothing of its neighbours, so that a token's result never depends on the batch.

#include "bf16.cuh"
#include "gpukit.cuh"
#include "mma.cuh"

constexpr int MOST_WARPS = 16;
// Rows and columns of a tensor-core tile.
constexpr int TILE_TOKENS = 16;
constexpr int TILE_ROWS = 8;
// Elements that a warp takes of a row at a time: 16 bytes for each of the four lanes that share the row.
constexpr int STEP = 32;
constexpr int STEP_BYTES = 2 * STEP;
// Steps that wait in the L2, an even number up to 8: 17 MB of all warps that fit on an H200, a third of its L2.
constexpr int AHEAD = 4;
constexpr int EMBED_THREADS = 128;

// What is read once stays out of the L1, which is left to the tokens; the other half of a 128-byte line comes along into the L2. Volatile, lest the
// load is moved up to before the wait for the kernel in front.
__device__ __forceinline__ Bytes16 load_weights(const Bytes16* address)
{
    Bytes16 value;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
        : "l"(address));
    return value;
}

__device__ __forceinline__ Bytes16 load_tokens(const Bytes16* address)
{
    Bytes16 value;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
        : "l"(address));
    return value;
}

// Bring a line into the L2, where it may still be written: nothing is read yet.
__device__ __forceinline__ void prefetch(const Bytes16* address)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ __forceinline__ unsigned block_index()
{
    unsigned index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}

struct Call {
    const Bytes16* x;  // [tokens, 8 elements each]
    int64 x_row;       // in accesses of 16 bytes, like all of x and weight
    const Bytes16* weight;
    int64 steps;       // of a row
    int64 features;    // rows of the weight
    int64 tokens;
    void* out;         // [tokens, features]
    int64 out_row;
    int64 out_bytes;   // 2 for bfloat16, 4 for float32
    const Bytes2* residual;  // like out, perhaps out itself; 0 for none
    int64 residual_row;
    int64 slice_shift;  // log2 of the slices
    int64 token_blocks;
};

// COUNT lines of a matrix, weight rows or tokens, eight apart, of each of which a lane reads some. Those past the last are read as the last.
template <int COUNT>
struct Lines {
    const char* first;
    int apart;  // bytes between two
    int last;   // index of the last that there is

    __device__ __forceinline__ Lines(const Bytes16* matrix, int64 row_length, int64 line, int64 lines)
    {
        const int64 left = lines - 1 - line;
        first = reinterpret_cast<const char*>(matrix + (left < 0 ? lines - 1 : line) * row_length);
        apart = static_cast<int>(row_length * 8 * sizeof(Bytes16));
        last = left < 0 ? 0 : static_cast<int>(min(left / 8, static_cast<int64>(COUNT)));
        if (COUNT == 2 && last == 0)
            apart = 0;
    }

    __device__ __forceinline__ const Bytes16* at(int index, int step) const
    {
        const int64 offset = COUNT == 2 ? index * apart : static_cast<int64>(min(index, last)) * apart;
        return reinterpret_cast<const Bytes16*>(first + (COUNT == 1 ? 0 : offset) + step * STEP_BYTES);
    }

    // Lest addresses be computed anew, or all ahead: there are registers for neither.
    __device__ __forceinline__ void keep()
    {
#ifdef __CUDA_ARCH__
        if (COUNT > 2)
            asm volatile("" : "+l"(first), "+r"(apart), "+r"(last));
        else if (COUNT == 2)
            asm volatile("" : "+l"(first), "+r"(apart));
        else
            asm volatile("" : "+l"(first));
#endif
    }
};

// A warp's work: TOKENS tokens, 8 or a multiple of 16, by ROW_TILES tiles of weight rows, with STAGES steps of weights on their way.
template <int TOKENS, int ROW_TILES, int STAGES>
struct Warp {
    static constexpr int TILES = (TOKENS + TILE_TOKENS - 1) / TILE_TOKENS;
    static constexpr int HALVES = (TOKENS + 7) / 8;
    static constexpr int ROWS = ROW_TILES * TILE_ROWS;
    static constexpr int TOKEN_COUNT = TOKENS;
    using Weight = Lines<ROW_TILES>;
    using Tokens = Lines<HALVES>;
    Weight weight;
    Tokens x;
    Bytes16 held[STAGES][ROW_TILES];
    float sums[TILES][ROW_TILES][4];

    __device__ __forceinline__ Warp(const Weight& weight, const Tokens& x) : weight(weight), x(x)
    {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int column = 0; column < ROW_TILES; column++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sums[tile][column][i] = 0.0f;
    }

    __device__ __forceinline__ void load(int stage, int step)
    {
#pragma unroll
        for (int column = 0; column < ROW_TILES; column++)
            held[stage][column] = load_weights(weight.at(column, step));
    }

    // Which 8 of a step's 32 elements a lane has, and which of these go into which product, is the same for tokens and rows, and so does not matter.
    __device__ __forceinline__ void compute(int stage, int step)
    {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const Bytes16 upper = load_tokens(x.at(2 * tile, step));
            Bytes16 lower = make_uint4(0, 0, 0, 0);
            if (HALVES > 1)
                lower = load_tokens(x.at(2 * tile + 1, step));
            const unsigned first[4] = {upper.x, lower.x, upper.y, lower.y}, second[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
            for (int column = 0; column < ROW_TILES; column++)
                multiply_tiles(sums[tile][column], first, held[stage][column].x, held[stage][column].y);
#pragma unroll
            for (int column = 0; column < ROW_TILES; column++)
                multiply_tiles(sums[tile][column], second, held[stage][column].z, held[stage][column].w);
        }
    }

    // A line of 128 bytes of every row, two steps long.
    __device__ __forceinline__ void begin_reading(int step) const
    {
#pragma unroll
        for (int column = 0; column < ROW_TILES; column++)
            prefetch(weight.at(column, step));
    }

    __device__ __forceinline__ void accumulate(int steps, int quad)
    {
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++)
            if (stage < steps)
                load(stage, stage);
#pragma unroll 1
        for (; TOKENS < 32 && steps >= 2 * STAGES; steps -= STAGES) {
            weight.keep();
            x.keep();
#pragma unroll
            for (int stage = 0; stage < STAGES; stage++) {
                compute(stage, stage);
                load(stage, stage + STAGES);
            }
            weight.first += STAGES * STEP_BYTES;
            x.first += STAGES * STEP_BYTES;
        }
#pragma unroll 1
        for (; steps > 0; steps -= STAGES) {
            weight.keep();
            x.keep();
#pragma unroll
            for (int stage = 0; stage < STAGES; stage++) {
                // A single stage is too few bytes on their way: what comes next waits in the L2.
                if (STAGES == 1 && quad == 0 && steps % 2 == 0 && steps > AHEAD)
                    begin_reading(AHEAD);
                if (stage < steps)
                    compute(stage, stage);
                if (stage + STAGES < steps)
                    load(stage, stage + STAGES);
            }
            weight.first += STAGES * STEP_BYTES;
            x.first += STAGES * STEP_BYTES;
        }
    }
};

// Where a block's rows and tokens begin. Asked for twice rather than kept meanwhile, hence the volatile read.
struct Place {
    int64 first_row;
    int64 first_token;

    __device__ __forceinline__ Place(const Call& call, int rows, int tokens)
    {
        const unsigned block = block_index(), row_block = block / static_cast<unsigned>(call.token_blocks);
        first_row = static_cast<int64>(row_block) * rows;
        first_token = static_cast<int64>(block - row_block * static_cast<unsigned>(call.token_blocks)) * tokens;
    }
};

// A warp's sums over its slice.
template <typename Own>
__device__ __forceinline__ Own begin_work(const Call& call)
{
    const int warp = threadIdx.x >> 5, line = (threadIdx.x & 31) >> 2, quad = threadIdx.x & 3;
    const int slice = warp & ((1 << call.slice_shift) - 1), group = warp >> call.slice_shift, groups = blockDim.x >> (5 + call.slice_shift);
    const Place block(call, groups * Own::ROWS, Own::TOKEN_COUNT);
    const int steps = static_cast<int>(call.steps);
    const int begin = (steps * slice) >> call.slice_shift, end = (steps * (slice + 1)) >> call.slice_shift;
    const int start = 4 * begin + quad;
    Own own(typename Own::Weight(call.weight + start, 4 * call.steps, block.first_row + group * Own::ROWS + line, call.features),
            typename Own::Tokens(call.x + start, call.x_row, block.first_token + line, call.tokens));
    // Launched before the kernel in front has ended, this one meanwhile moves weights towards itself.
    if (2 * quad < min(AHEAD, end - begin))
        own.begin_reading(2 * quad);
    wait_for_predecessor();
    own.accumulate(end - begin, quad);
    return own;
}

template <int TOKENS, int ROW_TILES, int STAGES>
__device__ __forceinline__ void run(const Call& call)
{
    using Own = Warp<TOKENS, ROW_TILES, STAGES>;
    constexpr int AT_ONCE = TOKENS < TILE_TOKENS ? TOKENS : TILE_TOKENS;
    constexpr int ROWS = Own::ROWS;
    // A distance between tokens that puts a warp's stores into different banks.
    __shared__ float partial[MOST_WARPS][AT_ONCE][ROWS + 8];
    Own own = begin_work<Own>(call);
    release_successor();

    const int slices = 1 << call.slice_shift, groups = blockDim.x >> (5 + call.slice_shift);
    const int warp = threadIdx.x >> 5, line = (threadIdx.x & 31) >> 2, quad = threadIdx.x & 3;
    const Place block(call, groups * ROWS, TOKENS);
#pragma unroll
    for (int tile = 0; tile < Own::TILES; tile++) {
        if (tile > 0)
            __syncthreads();
#pragma unroll
        for (int column = 0; column < ROW_TILES; column++)
#pragma unroll
            for (int half = 0; half < AT_ONCE / 8; half++) {
                const float* sum = own.sums[tile][column] + 2 * half;
                *reinterpret_cast<float2*>(&partial[warp][line + 8 * half][column * TILE_ROWS + 2 * quad]) = make_float2(sum[0], sum[1]);
            }
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < groups * AT_ONCE * ROWS; i += blockDim.x) {
            const int row_in_group = i % ROWS, token_in_tile = i / ROWS % AT_ONCE, its_group = i / (ROWS * AT_ONCE);
            const int64 row = block.first_row + its_group * ROWS + row_in_group;
            const int64 token = block.first_token + tile * TILE_TOKENS + token_in_tile;
            if (row >= call.features || token >= call.tokens)
                continue;
            const int first_warp = its_group << call.slice_shift;
            float sum = partial[first_warp][token_in_tile][row_in_group];
#pragma unroll 4
            for (int s = 1; s < slices; s++)
                sum += partial[first_warp + s][token_in_tile][row_in_group];
            if (call.residual)
                sum += bf16_to_float(call.residual[token * call.residual_row + row]);
            if (call.out_bytes == 4)
                static_cast<float*>(call.out)[token * call.out_row + row] = sum;
            else
                static_cast<Bytes2*>(call.out)[token * call.out_row + row] = float_to_bf16(sum);
        }
    }
}

#define PARAMETERS                                                                                                            \
    const Bytes16 *x, int64 x_row, const Bytes16 *weight, int64 steps, int64 features, int64 tokens, void *out, int64 out_row, \
        int64 out_bytes, const Bytes2 *residual, int64 residual_row, int64 slice_shift, int64 token_blocks
#define CALL \
    Call { x, x_row, weight, steps, features, tokens, out, out_row, out_bytes, residual, residual_row, slice_shift, token_blocks }

// By the tokens of a block: 8, 16, 32 or 64.
extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32, 2) gpukit_linear_8(PARAMETERS)
{
    run<8, 2, 3>(CALL);
}

extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32, 2) gpukit_linear_16(PARAMETERS)
{
    run<16, 2, 2>(CALL);
}

extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32, 1) gpukit_linear_32(PARAMETERS)
{
    run<32, 2, 4>(CALL);
}

extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32, 1) gpukit_linear_64(PARAMETERS)
{
    run<64, 4, 1>(CALL);
}

template <typename Word>
__device__ __forceinline__ void copy_word(const void* table, int64 from, void* out, int64 to, bool there)
{
    static_cast<Word*>(out)[to] = there ? __ldg(static_cast<const Word*>(table) + from) : Word{};
}

extern "C" __global__ void __launch_bounds__(EMBED_THREADS) gpukit_embed(
    const void* ids,       // [rows]
    int64 id_bytes,
    const void* table,     // [vocabulary, words]
    int64 table_row,       // strides are in words
    int64 vocabulary,
    void* out,             // [rows, words]
    int64 out_row,
    int64 words,
    int64 chunks,          // blocks of a row
    int64 word_bytes,      // 16 where rows are made of such words everywhere, or 2
    int64* signal)
{
    wait_for_predecessor();
    const unsigned row = blockIdx.x / static_cast<unsigned>(chunks);
    const unsigned chunk = blockIdx.x - row * static_cast<unsigned>(chunks);
    const unsigned word = chunk * EMBED_THREADS + threadIdx.x;
    const int64 id = load_id(ids, id_bytes, row);
    if (id >= vocabulary && chunk == 0 && threadIdx.x == 0)
        count(signal, OUT_OF_RANGE);
    if (word >= words)
        return;
    const bool there = id >= 0 && id < vocabulary;
    if (word_bytes == 16)
        copy_word<Bytes16>(table, id * table_row + word, out, row * out_row + word, there);
    else
        copy_word<Bytes2>(table, id * table_row + word, out, row * out_row + word, there);
}
