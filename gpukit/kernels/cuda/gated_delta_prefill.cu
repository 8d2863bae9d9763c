// Device code of `prefill` in chunks: what the op promises stands in `kernels/gated_delta_prefill.py`. Within a chunk of 64 tokens the rule is
// a triangular system (the WY form). With G the sum of the gates from the chunk's first token on, S the state before the chunk and kn, qn
// the normalised keys and queries,
//
//     d_t = beta_t (v_t − exp(G_t) S kn_t) − sum over s < t of L_ts d_s,      L_ts = beta_t exp(G_t − G_s) kn_t·kn_s
//     o_t = scale exp(G_t) S qn_t + sum over s <= t of A_ts d_s,              A_ts = scale exp(G_t − G_s) kn_s·qn_t
//     S  ← exp(G_63) S + sum over t of exp(G_63 − G_t) d_t kn_t
//
// `prefill_prepare` makes (1 + L)^-1 and A of every chunk and head, all at once; `prefill_scan` goes through the chunks of a sequence, and
// keeps 32 rows of V of a state in a block's registers. Raw keys and queries are bfloat16 as they are; norms, gates and strengths scale the
// other factor, in fp32. Factors in fp32 go to the tensor cores in two parts, a bfloat16 and the bfloat16 of what is left, 16 bits together:
// one part alone misses the tolerance of states where decay is slow, and that of outputs where queries are long. Exponents are differences
// of sums in the order of time, so none is positive.

#include "gpukit.cuh"
#include "bf16.cuh"
#include "mma.cuh"
#include "packed.cuh"
#include "staging.cuh"

using Bits = unsigned short;  // of a bfloat16

constexpr int CHUNK = 64;
constexpr int THREADS = 256;
// Rows of V of a block of the scan.
constexpr int TILE = 32;
// Sixteen bytes between the rows of a matrix in shared memory keep eight of its rows in different banks.
constexpr int PADDING = 8;
// Bytes of a chunk and head in the workspace.
constexpr int RECORD = 21632;
constexpr float EPSILON = 1e-6f;
// The exponential is 0 from here on; sums of gates stay finite and their differences exact enough.
constexpr float LEAST_GATE = -104.0f;

// 16 x 16 blocks on and below the diagonal of a chunk's 64 x 64 matrices.
constexpr int BLOCKS = 10;

__device__ __forceinline__ constexpr int block_of(int row, int column)
{
    return row * (row + 1) / 2 + column;
}

// What a chunk's first launch leaves to its second. Matrices are fragments of left tiles, a lane's sixteen bytes.
struct Record {
    Bytes16 inverse[2][BLOCKS][32];    // (1 + L)^-1 − 1, in two parts
    Bytes16 attention[2][BLOCKS][32];  // A, in two parts
    float4 tokens[CHUNK];              // (exp(G) / |k|, beta, exp(G_63 − G) / |k|, scale exp(G) / |q|)
    float decay;                       // exp(G_63)
};

static_assert(sizeof(Record) <= RECORD, "the host allocates RECORD bytes");

__device__ __forceinline__ Record* record_at(void* workspace, int64 place, int64 heads, int head)
{
    return reinterpret_cast<Record*>(static_cast<char*>(workspace) + (place * heads + head) * RECORD);
}

__device__ __forceinline__ const Record* next_record(const Record* record, int64 heads)
{
    return reinterpret_cast<const Record*>(reinterpret_cast<const char*>(record) + heads * RECORD);
}

// The first record of a sequence: no two sequences share one, and nobody needs to sum their chunks.
__device__ __forceinline__ int64 first_place(int64 sequence, int64 begin)
{
    return begin / CHUNK + sequence;
}

// Copy the rows of a head to shared memory, zeros behind the last one.
template <int DIM>
__device__ __forceinline__ void copy_rows(Bits (*to)[DIM + PADDING], const Bits* from, int64 stride, int rows)
{
    constexpr int VECTORS = DIM / 8;
    constexpr int STEP = THREADS / VECTORS;
    const int first = threadIdx.x / VECTORS;
    const int column = threadIdx.x % VECTORS * 8;
    from += first * stride + column;
#pragma unroll
    for (int row = 0; row < CHUNK; row += STEP) {
        copy_later(&to[first + row][column], from, first + row < rows);
        from += STEP * stride;
    }
}

// Two neighbours in two parts.
__device__ __forceinline__ void split(float low, float high, unsigned& first, unsigned& second)
{
    first = floats_to_pair(low, high);
    second = floats_to_pair(low - low_of_pair(first), high - high_of_pair(first));
}

__device__ __forceinline__ void store_fragments(Bytes16 (&to)[2][BLOCKS][32], int block, int lane, const unsigned (&parts)[2][4])
{
#pragma unroll
    for (int part = 0; part < 2; part++)
        to[part][block][lane] = make_uint4(parts[part][0], parts[part][1], parts[part][2], parts[part][3]);
}

constexpr int SIDE = CHUNK + 4;
constexpr int WORK_SIDE = CHUNK / 2 + 4;

template <int DIM>
struct PrepareScratch {
    union {
        struct {
            Bits keys[CHUNK][DIM + PADDING];
            Bits queries[CHUNK][DIM + PADDING];
        };
        struct {
            alignas(16) float system[CHUNK][SIDE];   // L, below the diagonal
            alignas(16) float inverse[CHUNK][SIDE];  // (1 + L)^-1, in blocks on and below the diagonal
        };
    };
    alignas(16) float work[CHUNK / 2][WORK_SIDE];
    float sum[CHUNK];  // G
    float beta[CHUNK];
    float scales[2][CHUNK];  // of keys and queries
    int64 first_token;
    int rows;
};

template <int COUNT>
struct alignas(4 * COUNT) Several {
    float at[COUNT];
};

// to = sign left right, of SIZE x SIZE matrices, by 8 SIZE threads.
template <int SIZE>
__device__ __forceinline__ void multiply(
    float* to, int to_side, const float* left, int left_side, const float* right, int right_side, float sign, int thread)
{
    using Part = Several<SIZE / 8>;
    const int row = thread / 8;
    const int column = thread % 8 * (SIZE / 8);
    Part sum{};
#pragma unroll 8
    for (int i = 0; i < SIZE; i++) {
        const float factor = left[row * left_side + i];
        const Part values = *reinterpret_cast<const Part*>(right + i * right_side + column);
#pragma unroll
        for (int j = 0; j < SIZE / 8; j++)
            sum.at[j] += factor * values.at[j];
    }
#pragma unroll
    for (int j = 0; j < SIZE / 8; j++)
        sum.at[j] *= sign;
    *reinterpret_cast<Part*>(to + row * to_side + column) = sum;
}

// inverse = (1 + system)^-1 in fp32: blocks of 16 by substitution, then twice the lower left quarter of a square twice as large.
template <int DIM>
__device__ __forceinline__ void invert(PrepareScratch<DIM>& shared)
{
    if (threadIdx.x < CHUNK) {
        const int first = threadIdx.x / 16 * 16;
        const int column = threadIdx.x % 16;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
            for (int j = 0; j < i; j++)
                x[i] -= shared.system[first + i][first + j] * x[j];
            shared.inverse[first + i][first + column] = x[i];
        }
    }
    __syncthreads();
    {
        const int first = threadIdx.x / 128 * 32;
        const int thread = threadIdx.x % 128;
        float* work = shared.work[first / 2];
        multiply<16>(work, WORK_SIDE, &shared.system[first + 16][first], SIDE, &shared.inverse[first][first], SIDE, 1.0f, thread);
        __syncthreads();
        multiply<16>(&shared.inverse[first + 16][first], SIDE, &shared.inverse[first + 16][first + 16], SIDE, work, WORK_SIDE, -1.0f, thread);
        // The square of 32 is whole from here on, with zeros above.
#pragma unroll
        for (int i = thread; i < 256; i += 128)
            shared.inverse[first + i / 16][first + 16 + i % 16] = 0.0f;
    }
    __syncthreads();
    multiply<32>(shared.work[0], WORK_SIDE, &shared.system[32][0], SIDE, &shared.inverse[0][0], SIDE, 1.0f, threadIdx.x);
    __syncthreads();
    multiply<32>(&shared.inverse[32][0], SIDE, &shared.inverse[32][32], SIDE, shared.work[0], WORK_SIDE, -1.0f, threadIdx.x);
    __syncthreads();
}

// Norms of keys and queries, two threads a row.
template <int DIM>
__device__ __forceinline__ void take_norms(PrepareScratch<DIM>& shared, bool normalize)
{
    const int which = threadIdx.x / 128;
    const int row = threadIdx.x / 2 % CHUNK;
    const Bytes16* vectors = reinterpret_cast<const Bytes16*>(&(which ? shared.queries : shared.keys)[row][threadIdx.x % 2 * (DIM / 2)]);
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        const Bytes16 vector = vectors[i];
        const unsigned pairs[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            square += low_of_pair(pairs[j]) * low_of_pair(pairs[j]) + high_of_pair(pairs[j]) * high_of_pair(pairs[j]);
    }
    square += __shfl_xor_sync(0xffffffffu, square, 1);
    if (threadIdx.x % 2 == 0)
        shared.scales[which][row] = normalize ? rsqrtf(square + EPSILON) : 1.0f;
}

template <int DIM>
__device__ __forceinline__ void prepare(
    PrepareScratch<DIM>& shared, const Bits* q, int64 q_token, const Bits* k, int64 k_token, const float* g, int64 g_token, const float* beta,
    int64 beta_token, Bits* out, const Offsets& offsets, int64 key_heads, int64 heads, void* workspace, float scale, bool normalize)
{
    const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(heads));
    const int64 place = blockIdx.x / static_cast<unsigned>(heads);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0)
        shared.rows = 0;
    const bool is_bad = offsets.are_bad();
    if (!is_bad) {
#pragma unroll 1
        for (int64 s = threadIdx.x; s < offsets.sequences; s += THREADS) {
            const int64 begin = offsets[s];
            const int64 left = offsets[s + 1] - begin - (place - first_place(s, begin)) * CHUNK;
            if (place >= first_place(s, begin) && left > 0) {
                shared.first_token = offsets[s + 1] - left;
                shared.rows = static_cast<int>(min(left, static_cast<int64>(CHUNK)));
            }
        }
    }
    Bytes16* outputs = reinterpret_cast<Bytes16*>(out + head * DIM);
    clear_unowned(offsets, is_bad, place * CHUNK, CHUNK, outputs, DIM / 8, heads * (DIM / 8));
    __syncthreads();
    const int rows = shared.rows;
    if (rows == 0)
        return;
    const int64 token = shared.first_token;
    const int key_head = head / (static_cast<unsigned>(heads) / static_cast<unsigned>(key_heads));
    copy_rows<DIM>(shared.keys, k + token * k_token + key_head * DIM, k_token, rows);
    copy_rows<DIM>(shared.queries, q + token * q_token + key_head * DIM, q_token, rows);
    if (threadIdx.x < CHUNK)
        shared.beta[threadIdx.x] = threadIdx.x < rows ? __ldg(beta + (token + threadIdx.x) * beta_token + head) : 0.0f;
    if (warp == 1) {
        float gates[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int t = 2 * lane + i;
            gates[i] = t < rows ? __ldg(g + (token + t) * g_token + head) : 0.0f;
            // Not a maximum, which would make a number of NaN.
            gates[i] = gates[i] < LEAST_GATE ? LEAST_GATE : gates[i];
        }
        float sum = gates[0] + gates[1];
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const float before = __shfl_up_sync(0xffffffffu, sum, distance);
            sum += lane >= distance ? before : 0.0f;
        }
        shared.sum[2 * lane] = sum - gates[1];
        shared.sum[2 * lane + 1] = sum;
    }
    wait_for_copies();
    __syncthreads();
    take_norms(shared, normalize);

    // A warp has 16 rows and 32 columns of both products, of which nothing above the diagonal is wanted.
    const int row_block = warp % 4;
    const int first_column_block = warp / 4 * 2;
    float key_key[4][4] = {};
    float key_query[4][4] = {};
#pragma unroll 2
    for (int i = 0; i < DIM; i += 16) {
        unsigned own_keys[4], own_queries[4];
        load_left(own_keys, shared.keys, 16 * row_block, i, lane);
        load_left(own_queries, shared.queries, 16 * row_block, i, lane);
#pragma unroll
        for (int pair = 0; pair < 2; pair++)
            if (first_column_block + pair <= row_block) {
                unsigned others[4];
                load_right_transposed(others, shared.keys, 16 * (first_column_block + pair), i, lane);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    multiply_tiles(key_key[2 * pair + n], own_keys, others[2 * n], others[2 * n + 1]);
                    multiply_tiles(key_query[2 * pair + n], own_queries, others[2 * n], others[2 * n + 1]);
                }
            }
    }
    // Keys and queries have been read: the systems take their place.
    __syncthreads();
    Record* record = record_at(workspace, place, heads, head);
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        const int column_block = first_column_block + pair;
        if (column_block > row_block)
            continue;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int t = 16 * row_block + lane / 4 + i / 2 * 8;
                const int s = 16 * column_block + 8 * n + lane % 4 * 2 + i % 2;
                const float decay = s <= t ? expf(shared.sum[t] - shared.sum[s]) * shared.scales[0][s] : 0.0f;
                float& product = key_query[2 * pair + n][i];
                product = s <= t ? product * scale * decay * shared.scales[1][t] : 0.0f;
                shared.system[t][s] = s < t ? key_key[2 * pair + n][i] * decay * shared.beta[t] * shared.scales[0][t] : 0.0f;
            }
        unsigned parts[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float (&two)[4] = key_query[2 * pair + i / 2];
            split(two[i % 2 * 2], two[i % 2 * 2 + 1], parts[0][i], parts[1][i]);
        }
        store_fragments(record->attention, block_of(row_block, column_block), lane, parts);
    }
    if (threadIdx.x < CHUNK) {
        const int t = threadIdx.x;
        const float until = expf(shared.sum[t]);
        const float after = expf(shared.sum[CHUNK - 1] - shared.sum[t]);
        const float key_scale = shared.scales[0][t];
        record->tokens[t] = make_float4(until * key_scale, shared.beta[t], after * key_scale, scale * until * shared.scales[1][t]);
        if (t == CHUNK - 1)
            record->decay = until;
    }
    __syncthreads();
    invert(shared);
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        const int column_block = first_column_block + pair;
        if (column_block > row_block)
            continue;
        unsigned parts[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = 16 * row_block + lane / 4 + i % 2 * 8;
            const int s = 16 * column_block + lane % 4 * 2 + i / 2 * 8;
            const float low = s < t ? shared.inverse[t][s] : 0.0f;
            const float high = s + 1 < t ? shared.inverse[t][s + 1] : 0.0f;
            split(low, high, parts[0][i], parts[1][i]);
        }
        store_fragments(record->inverse, block_of(row_block, column_block), lane, parts);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) gpukit_prefill_prepare(
    const Bits* q, int64 q_token,         // [N, Hk, K]
    const Bits* k, int64 k_token,         // [N, Hk, K]
    const float* g, int64 g_token,        // [N, Hv]
    const float* beta, int64 beta_token,  // [N, Hv]
    Bits* out,                            // [N, Hv, V]
    const void* offsets, int64 offset_bytes, int64 sequences, int64 tokens,
    int64 key_heads, int64 heads, int64 dim,
    void* workspace,                      // [N / 64 + S, Hv] records
    int64 scale,                          // bits of a float
    int64 normalize)
{
    __shared__ union {
        PrepareScratch<64> small;
        PrepareScratch<128> large;
    } shared;
    const Offsets packed{offsets, offset_bytes, sequences, tokens};
    const float factor = __int_as_float(static_cast<int>(scale));
    if (dim == 128)
        prepare<128>(shared.large, q, q_token, k, k_token, g, g_token, beta, beta_token, out, packed, key_heads, heads, workspace, factor, normalize);
    else
        prepare<64>(shared.small, q, q_token, k, k_token, g, g_token, beta, beta_token, out, packed, key_heads, heads, workspace, factor, normalize);
}

template <int DIM>
struct ScanScratch {
    Bits keys[2][CHUNK][DIM + PADDING];            // of this chunk and the next
    Bits queries[CHUNK][DIM + PADDING];
    Bits state[2][TILE][DIM + PADDING];            // in two parts
    Bits residual[2][CHUNK][TILE + PADDING];       // beta (v − exp(G) S kn), in two parts; then second parts of A, for each half of the warps
    Bits update[2][CHUNK][TILE + PADDING];         // d, in two parts
    Bits weighted[2][CHUNK][TILE + PADDING];       // exp(G_63 − G) d / |k|, in two parts
    float4 tokens[CHUNK];
};

static_assert(sizeof(ScanScratch<128>::residual[0]) >= BLOCKS * 32 * sizeof(Bytes16), "second parts of A lie where residuals were");
static_assert(sizeof(ScanScratch<128>) <= 99 * 1024, "more than a block has on sm_86 to sm_120");

// Whether the destination of a sequence is the source or destination of another one: neither must be written then.
__device__ __forceinline__ bool is_taken(
    const void* source, const void* destination, int64 id_bytes, int64 sequences, int64 slots, int64 sequence, int64 to)
{
    bool taken = false;
#pragma unroll 1
    for (int64 i = threadIdx.x; i < sequences; i += THREADS) {
        const int64 s = load_id(source, id_bytes, i);
        const int64 d = load_id(destination, id_bytes, i);
        taken |= i != sequence && s >= 0 && s < slots && d >= 0 && d < slots && (s == to || d == to);
    }
    return taken;
}

// Two neighbours of a state.
__device__ __forceinline__ float2 load_two(const void* states, int64 bytes, int64 at)
{
    if (bytes == 4)
        return load_streaming(reinterpret_cast<const float2*>(static_cast<const float*>(states) + at));
    const unsigned pair = load_streaming(reinterpret_cast<const unsigned*>(static_cast<const Bits*>(states) + at));
    return make_float2(low_of_pair(pair), high_of_pair(pair));
}

__device__ __forceinline__ void store_two(void* states, int64 bytes, int64 at, float2 two)
{
    if (bytes == 4)
        store_streaming(reinterpret_cast<float2*>(static_cast<float*>(states) + at), two);
    else
        store_streaming(reinterpret_cast<unsigned*>(static_cast<Bits*>(states) + at), floats_to_pair(two.x, two.y));
}

// A lane's two neighbours in each of the two parts of a matrix.
template <int WIDTH>
__device__ __forceinline__ void store_parts(Bits (*first)[WIDTH], Bits (*second)[WIDTH], int row, int column, float low, float high)
{
    split(low, high, *reinterpret_cast<unsigned*>(&first[row][column]), *reinterpret_cast<unsigned*>(&second[row][column]));
}

// Stays where it stands: fragments that are loaded as early as they could be want more registers than there are.
__device__ __forceinline__ void load_fragment(unsigned (&to)[4], const Bytes16* from)
{
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
}

__device__ __forceinline__ void take_fragment(unsigned (&to)[4], Bytes16 fragment)
{
    to[0] = fragment.x;
    to[1] = fragment.y;
    to[2] = fragment.z;
    to[3] = fragment.w;
}

// sum += left * right, both in two parts; what the second parts make together is beyond the 16 bits.
__device__ __forceinline__ void multiply_split(
    float (&sum)[2][4], const unsigned (&left_first)[4], const unsigned (&left_second)[4], const unsigned (&right_first)[4],
    const unsigned (&right_second)[4])
{
#pragma unroll
    for (int n = 0; n < 2; n++)
        multiply_tiles(sum[n], left_first, right_first[2 * n], right_first[2 * n + 1]);
#pragma unroll
    for (int n = 0; n < 2; n++)
        multiply_tiles(sum[n], left_second, right_first[2 * n], right_first[2 * n + 1]);
#pragma unroll
    for (int n = 0; n < 2; n++)
        multiply_tiles(sum[n], left_first, right_second[2 * n], right_second[2 * n + 1]);
}

template <int DIM>
__device__ __forceinline__ void scan(
    ScanScratch<DIM>& shared, const Bits* q, int64 q_token, const Bits* k, int64 k_token, const Bits* v, int64 v_token, Bits* out,
    const Offsets& offsets, int64 key_heads, int64 heads, void* pool, int64 state_bytes, int64 slot_stride, int64 slots,
    const void* source, const void* destination, int64 id_bytes, const void* resume, int64 resume_bytes, void* workspace, int64* signal)
{
    constexpr int TILES = DIM / TILE;       // blocks of a head
    constexpr int STATE_TILES = DIM / 32;   // of 8 keys in a warp's part of the state
    const int tile = blockIdx.x % TILES;
    const int head = static_cast<int>(blockIdx.x / TILES % static_cast<unsigned>(heads));
    const int sequence = static_cast<int>(blockIdx.x / TILES / static_cast<unsigned>(heads));
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const bool is_first = head == 0 && tile == 0 && threadIdx.x == 0;
    const int64 from = load_id(source, id_bytes, sequence);
    const int64 to = load_id(destination, id_bytes, sequence);
    const bool is_padding = from < 0 || to < 0;
    const bool is_outside = from >= slots || to >= slots;
    if (offsets.are_bad()) {
        if (!is_padding && is_first)
            count(signal, OUT_OF_RANGE);
        return;
    }
    const int64 begin = offsets[sequence];
    const int64 tokens = offsets[sequence + 1] - begin;
    out += (begin * heads + head) * DIM + tile * TILE;
    const bool occupied = !is_padding && !is_outside && offsets.sequences > 1 &&
                          __syncthreads_or(is_taken(source, destination, id_bytes, offsets.sequences, slots, sequence, to));
    if (is_padding || is_outside || occupied) {
        if (!is_padding && is_first)
            count(signal, occupied ? OCCUPIED : OUT_OF_RANGE);
#pragma unroll 1
        for (int64 i = threadIdx.x; i < tokens * (TILE / 8); i += THREADS)
            reinterpret_cast<Bytes16*>(out + i / (TILE / 8) * heads * DIM)[i % (TILE / 8)] = Bytes16{};
        return;
    }

    // The state of a warp: 16 rows of V, a quarter of K.
    const int half = warp / 4;
    int first_key = warp % 4 * (DIM / 4);
    const int own_state = (head * DIM + tile * TILE + 16 * half + lane / 4) * DIM + first_key + lane % 4 * 2;
    float state[STATE_TILES][4] = {};
    if (!resume || load_id(resume, resume_bytes, sequence)) {
        const int64 at = from * slot_stride + own_state;
#pragma unroll
        for (int n = 0; n < STATE_TILES; n++)
#pragma unroll
            for (int below = 0; below < 2; below++) {
                const float2 two = load_two(pool, state_bytes, at + below * 8 * DIM + 8 * n);
                state[n][2 * below] = two.x;
                state[n][2 * below + 1] = two.y;
            }
    }

    // The tokens of a warp: 16 of a chunk, with 16 rows of V. Later tokens look back at more: a scheduler has the first and last of them.
    const int row_block = half ? 3 - warp % 4 : warp % 4;
    const int first_row = 16 * row_block + lane / 4;
    const int key_head = head / (static_cast<unsigned>(heads) / static_cast<unsigned>(key_heads));
    q += begin * q_token + key_head * DIM;
    k += begin * k_token + key_head * DIM;
    v += begin * v_token + first_row * v_token + head * DIM + tile * TILE + 16 * half + lane % 4 * 2;
    out += first_row * heads * DIM + 16 * half + lane % 4 * 2;
    const Record* record = record_at(workspace, first_place(sequence, begin), heads, head);

    // `left` tokens, from this chunk on; `k` and `q` are ahead of it by what has been copied.
    int left = static_cast<int>(tokens);
    const auto copy_keys = [&](int buffer, int rows) {
        copy_rows<DIM>(shared.keys[buffer], k, k_token, rows);
        k += CHUNK * k_token;
    };
    const auto copy_queries = [&](const Record* of, int rows) {
        copy_rows<DIM>(shared.queries, q, q_token, rows);
        if (threadIdx.x < CHUNK)
            copy_later(&shared.tokens[threadIdx.x], &of->tokens[threadIdx.x], true);
        q += CHUNK * q_token;
    };
    const auto publish = [&]() {
#pragma unroll
        for (int n = 0; n < STATE_TILES; n++)
#pragma unroll
            for (int below = 0; below < 2; below++)
                store_parts(shared.state[0], shared.state[1], 16 * half + lane / 4 + 8 * below, first_key + 8 * n + lane % 4 * 2,
                            state[n][2 * below], state[n][2 * below + 1]);
    };
    if (left > 0) {
        copy_keys(0, left);
        copy_queries(record, left);
        publish();
    }
    int buffer = 0;
#pragma unroll 1
    for (; left > 0; left -= CHUNK) {
        // Hides where the addresses come from, or those of all rows are kept through the loop and spilled.
        asm volatile("" : "+l"(k), "+l"(q), "+l"(v), "+l"(out), "+l"(record), "+r"(first_key));
        const auto& keys = shared.keys[buffer];
        const bool is_last = left <= CHUNK;
        wait_for_copies();
        __syncthreads();
        if (!is_last)
            copy_keys(buffer ^ 1, left - CHUNK);
        unsigned inverse[2][4][4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j <= row_block)
                load_fragment(inverse[0][j], &record->inverse[0][block_of(row_block, j)][lane]);
        unsigned values[2][2];
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int below = 0; below < 2; below++) {
                const bool is_there = first_row + 8 * below < left;
                values[n][below] = is_there ? __ldg(reinterpret_cast<const unsigned*>(v + below * 8 * v_token + 8 * n)) : 0;
            }

        // What the state holds for keys and queries.
        float held[2][4] = {}, read[2][4] = {};
#pragma unroll 2
        for (int i = 0; i < DIM; i += 16) {
            unsigned own_keys[4], own_queries[4], parts[4];
            load_left(own_keys, keys, 16 * row_block, i, lane);
            load_left(own_queries, shared.queries, 16 * row_block, i, lane);
            load_right_transposed(parts, shared.state[0], 16 * half, i, lane);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                multiply_tiles(held[n], own_keys, parts[2 * n], parts[2 * n + 1]);
                multiply_tiles(read[n], own_queries, parts[2 * n], parts[2 * n + 1]);
            }
            load_right_transposed(parts, shared.state[1], 16 * half, i, lane);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                multiply_tiles(held[n], own_keys, parts[2 * n], parts[2 * n + 1]);
                multiply_tiles(read[n], own_queries, parts[2 * n], parts[2 * n + 1]);
            }
        }
        const float4 gates[2] = {shared.tokens[first_row], shared.tokens[first_row + 8]};
        float update[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int below = 0; below < 2; below++) {
                const float4 gate = gates[below];
                update[n][2 * below] = gate.y * (low_of_pair(values[n][below]) - gate.x * held[n][2 * below]);
                update[n][2 * below + 1] = gate.y * (high_of_pair(values[n][below]) - gate.x * held[n][2 * below + 1]);
                store_parts(shared.residual[0], shared.residual[1], first_row + 8 * below, 16 * half + 8 * n + lane % 4 * 2,
                            update[n][2 * below], update[n][2 * below + 1]);
            }
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j <= row_block)
                load_fragment(inverse[1][j], &record->inverse[1][block_of(row_block, j)][lane]);
        __syncthreads();
        if (!is_last)
            copy_queries(next_record(record, heads), left - CHUNK);
        const float decay = __ldcg(&record->decay);

        // The triangular system; its own residuals a warp still has in fp32.
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j <= row_block) {
                unsigned first[4], second[4];
                load_right(first, shared.residual[0], 16 * j, 16 * half, lane);
                load_right(second, shared.residual[1], 16 * j, 16 * half, lane);
                multiply_split(update, inverse[0][j], inverse[1][j], first, second);
            }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int below = 0; below < 2; below++) {
                const int row = first_row + 8 * below;
                const int column = 16 * half + 8 * n + lane % 4 * 2;
                const float low = update[n][2 * below], high = update[n][2 * below + 1];
                store_parts(shared.update[0], shared.update[1], row, column, low, high);
                store_parts(shared.weighted[0], shared.weighted[1], row, column, gates[below].z * low, gates[below].z * high);
            }
        __syncthreads();

        // The second parts wait where the residuals were, each for the thread that has asked for it: registers are short.
        unsigned attention[4][4];
        Bytes16(*second_parts)[32] = reinterpret_cast<Bytes16(*)[32]>(shared.residual[half]);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j <= row_block) {
                const int block = block_of(row_block, j);
                load_fragment(attention[j], &record->attention[0][block][lane]);
                copy_later(&second_parts[block][lane], &record->attention[1][block][lane], true);
            }

        // The state first: the next chunk waits for it.
#pragma unroll
        for (int n = 0; n < STATE_TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                state[n][i] *= decay;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            unsigned first[4], second[4];
            load_left_transposed(first, shared.weighted[0], 16 * j, 16 * half, lane);
            load_left_transposed(second, shared.weighted[1], 16 * j, 16 * half, lane);
#pragma unroll
            for (int n = 0; n < STATE_TILES; n += 2) {
                unsigned own_keys[4];
                load_right(own_keys, keys, 16 * j, first_key + 8 * n, lane);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    multiply_tiles(state[n + i], first, own_keys[2 * i], own_keys[2 * i + 1]);
                    multiply_tiles(state[n + i], second, own_keys[2 * i], own_keys[2 * i + 1]);
                }
            }
        }
        if (!is_last)
            publish();
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                read[n][i] *= gates[i / 2].w;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j <= row_block) {
                unsigned parts[4];
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    load_right(parts, shared.update[part], 16 * j, 16 * half, lane);
#pragma unroll
                    for (int n = 0; n < 2; n++)
                        multiply_tiles(read[n], attention[j], parts[2 * n], parts[2 * n + 1]);
                }
            }
        wait_for_copies();
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j <= row_block) {
                unsigned second[4], updates[4];
                take_fragment(second, second_parts[block_of(row_block, j)][lane]);
                load_right(updates, shared.update[0], 16 * j, 16 * half, lane);
#pragma unroll
                for (int n = 0; n < 2; n++)
                    multiply_tiles(read[n], second, updates[2 * n], updates[2 * n + 1]);
            }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int below = 0; below < 2; below++) {
                if (first_row + 8 * below < left)
                    *reinterpret_cast<unsigned*>(out + below * 8 * heads * DIM + 8 * n) =
                        floats_to_pair(read[n][2 * below], read[n][2 * below + 1]);
            }
        v += CHUNK * v_token;
        out += CHUNK * heads * DIM;
        record = next_record(record, heads);
        buffer ^= 1;
    }
    // Read again, rather than kept through the loop.
    asm volatile("" : "+l"(destination));
    const int64 at = load_id(destination, id_bytes, sequence) * slot_stride + own_state;
#pragma unroll
    for (int n = 0; n < STATE_TILES; n++)
#pragma unroll
        for (int below = 0; below < 2; below++)
            store_two(pool, state_bytes, at + below * 8 * DIM + 8 * n, make_float2(state[n][2 * below], state[n][2 * below + 1]));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) gpukit_prefill_scan(
    const Bits* q, int64 q_token,  // [N, Hk, K]
    const Bits* k, int64 k_token,  // [N, Hk, K]
    const Bits* v, int64 v_token,  // [N, Hv, V]
    Bits* out,                     // [N, Hv, V]
    const void* offsets, int64 offset_bytes, int64 sequences, int64 tokens,
    int64 key_heads, int64 heads, int64 dim,
    void* pool,                    // [slots, Hv, V, K] of the layer
    int64 state_bytes,             // of an element: 4 for floats, 2 for bfloat16
    int64 slot_stride,             // in elements
    int64 slots,
    const void* source,            // [S]
    const void* destination,       // [S]
    int64 id_bytes,
    const void* resume,            // [S] or null
    int64 resume_bytes,
    void* workspace,               // [N / 64 + S, Hv] records
    int64* signal)
{
    extern __shared__ Bytes16 arena[];
    const Offsets packed{offsets, offset_bytes, sequences, tokens};
    if (dim == 128)
        scan<128>(*reinterpret_cast<ScanScratch<128>*>(arena), q, q_token, k, k_token, v, v_token, out, packed, key_heads, heads, pool,
                  state_bytes, slot_stride, slots, source, destination, id_bytes, resume, resume_bytes, workspace, signal);
    else
        scan<64>(*reinterpret_cast<ScanScratch<64>*>(arena), q, q_token, k, k_token, v, v_token, out, packed, key_heads, heads, pool,
                 state_bytes, slot_stride, slots, source, destination, id_bytes, resume, resume_bytes, workspace, signal);
}
