// How a block chooses the experts of a token from its scores, and what kernels of few tokens tell each other while they run: words that are waited for.

#pragma once

#include "moe_stream.cuh"
#include "staging.cuh"

// Larger for larger numbers, 0 for none; -0 is 0.
__device__ __forceinline__ unsigned to_key(float value)
{
    const unsigned bits = __float_as_uint(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_key(unsigned key)
{
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Of the scores of lanes 0 … TOP - 1, the largest first.
__device__ __forceinline__ float softmax(float score)
{
    const float weight = expf(score - __shfl_sync(~0u, score, 0));
    float sum = weight;
#pragma unroll
    for (int distance = 1; distance < TOP; distance *= 2)
        sum += __shfl_xor_sync(~0u, sum, distance);
    return weight / sum;
}

__device__ __forceinline__ float sigmoid(float value)
{
    return 1.0f / (1.0f + expf(-value));
}

// A segment of an expert that has so many tokens left, none of which has a route in it yet.
__device__ __forceinline__ void begin_segment(Segment* segment, int expert, int left)
{
    *reinterpret_cast<Bytes16*>(segment) = make_uint4(expert, min(left, COLUMNS), 0, 0);
    *reinterpret_cast<Bytes16*>(segment->routes) = Bytes16{};
}

// One of its routes: a token's, and its rank of the expert.
__device__ __forceinline__ void put_route(Segment& segment, int column, int token, int rank)
{
    segment.routes[column] = static_cast<Bytes2>(16 * token + rank);
}

// That of a single token's path, which is the shared expert, of number 0 in its bank, where it is less than 0.
__device__ __forceinline__ void put_path(Segment& segment, int path, int expert)
{
    begin_segment(&segment, expert, 1);
    put_route(segment, 0, 0, path < 0 ? TOP : path);
}

// Words that are waited for while they are made, and say themselves whether they are there. All NaN scores are SOME_NAN; a choice is an expert, or
// NO_EXPERT of a token that has none.
constexpr unsigned NO_SCORE = ~0u;
constexpr unsigned SOME_NAN = 0x7fffffff;
constexpr int NO_EXPERT = -1;
constexpr int NO_CHOICE = -2;
constexpr int FEW_SEGMENTS = HALF_COLUMNS * TOP + 1;
// Warps that choose together: a thread has an expert.
constexpr int EXPERT_WARPS = MOST_EXPERTS / 32;

// The experts of a token, in the order of their ranks; in shared memory.
struct Chosen {
    int ids[TOP];
    float scores[TOP];
    bool is_bad;  // a score is NaN
    int candidates;
};

__device__ __forceinline__ int id_of(const Chosen& chosen, int rank)
{
    return chosen.is_bad ? NO_EXPERT : chosen.ids[rank];
}

// Experts that are compared with each other at once.
constexpr int CANDIDATES = 64;

// What a block needs while it chooses.
struct ChoiceMemory {
    // The largest key of each warp: as many experts are as large as the least of them.
    alignas(16) unsigned largest[EXPERT_WARPS];
    // Those that are: a key, and below it the complement of the id, so that of equal keys the smaller id is the larger; behind them 0.
    alignas(16) uint64 candidates[CANDIDATES];
    // Of all, where more are.
    alignas(16) unsigned keys[MOST_EXPERTS];
};

// Before the block meets.
__device__ __forceinline__ void begin_choice(ChoiceMemory& memory, Chosen& chosen)
{
    if (threadIdx.x < CANDIDATES)
        memory.candidates[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        chosen.is_bad = false;
        chosen.candidates = 0;
    }
}

__device__ __forceinline__ void take_rank(Chosen& chosen, int rank, int id, unsigned key)
{
    if (rank < TOP) {
        chosen.ids[rank] = id;
        chosen.scores[rank] = from_key(key);
    }
}

// How many experts come before one, of all.
__device__ __forceinline__ int rank_in_all(const unsigned (&keys)[MOST_EXPERTS], unsigned key, int own)
{
    int rank = 0;
#pragma unroll 2
    for (int i = 0; i < MOST_EXPERTS; i += 4) {
        const Bytes16 four = *reinterpret_cast<const Bytes16*>(keys + i);
        rank += (four.x > key) + (four.y > key) + (four.z > key) + (four.w > key);
        rank += (four.x == key && i < own) + (four.y == key && i + 1 < own) + (four.z == key && i + 2 < own) + (four.w == key && i + 3 < own);
    }
    return rank;
}

// A block of at least as many threads as there may be experts chooses for a token: a thread has an expert's score, and all that of the shared one.
__device__ __forceinline__ void choose_in_block(float score, float shared, int experts, ChoiceMemory& memory, Chosen& chosen)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, own = threadIdx.x;
    const bool is_there = own < experts;
    if ((is_there && score != score) || shared != shared)
        chosen.is_bad = true;
    // NaN has the key of an expert that is not there: ranks are those of an order, come what may.
    const unsigned key = is_there && score == score ? to_key(score) : 0, largest = __reduce_max_sync(~0u, key);
    if (lane == 0 && warp < EXPERT_WARPS)
        memory.largest[warp] = largest;
    __syncthreads();
    const Bytes16* quarters = reinterpret_cast<const Bytes16*>(memory.largest);
    static_assert(EXPERT_WARPS == 8 && CANDIDATES * 4 == MOST_EXPERTS, "eight keys, and four threads for a candidate");
    const Bytes16 one = quarters[0], other = quarters[1];
    const unsigned least = min(min(min(one.x, one.y), min(one.z, one.w)), min(min(other.x, other.y), min(other.z, other.w)));
    const bool is_candidate = is_there && key >= least;
    const unsigned lanes = __ballot_sync(~0u, is_candidate);
    int place = 0;
    if (lane == 0 && lanes)
        place = atomicAdd(&chosen.candidates, __popc(lanes));
    place = __shfl_sync(~0u, place, 0) + __popc(lanes & ((1u << lane) - 1));
    if (is_candidate && place < CANDIDATES)
        memory.candidates[place] = static_cast<uint64>(key) << 32 | ~static_cast<unsigned>(own);
    __syncthreads();
    if (chosen.candidates > CANDIDATES) {
        // Many are alike, or all of a warp small.
        if (own < MOST_EXPERTS)
            memory.keys[own] = key;
        __syncthreads();
        if (is_there)
            take_rank(chosen, rank_in_all(memory.keys, key, own), own, key);
    } else if (own < MOST_EXPERTS) {
        // Four threads count what is in front of a candidate.
        const uint64 candidate = memory.candidates[own / 4];
        int rank = 0;
#pragma unroll
        for (int i = 0; i < CANDIDATES; i += 8) {
            const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(memory.candidates + i + own % 4 * 2);
            rank += (two.x > candidate) + (two.y > candidate);
        }
        rank += __shfl_xor_sync(~0u, rank, 1);
        rank += __shfl_xor_sync(~0u, rank, 2);
        if (candidate && own % 4 == 0)
            take_rank(chosen, rank, static_cast<int>(~static_cast<unsigned>(candidate)), static_cast<unsigned>(candidate >> 32));
    }
    __syncthreads();
}

// The same by scores that are waited for.
struct ScoresMemory : ChoiceMemory {
    alignas(16) float scores[MOST_SCORES];
};

// Threads from one on bring them to shared memory, as soon as they are there.
__device__ __forceinline__ void wait_for_scores(const Groups* groups, int rows, int first_thread, ScoresMemory& memory)
{
    const int i = static_cast<int>(threadIdx.x) - first_thread;
    if (i < 0 || 4 * i >= rows)
        return;
    const Bytes16* from = reinterpret_cast<const Bytes16*>(groups->scores[blockIdx.x % SCORE_COPIES]) + i;
    Bytes16 taken;
    do
        taken = load_relaxed(from);
    while (taken.x == NO_SCORE || taken.y == NO_SCORE || taken.z == NO_SCORE || taken.w == NO_SCORE);
    reinterpret_cast<Bytes16*>(memory.scores)[i] = taken;
}

// Few tokens, grouped in shared memory.
struct FewGroups {
    alignas(16) Segment each[FEW_SEGMENTS];
    int segments, shared_segments;
    unsigned present;  // bit TOP * token: whether it has experts

    // The same, a bit a token.
    __device__ __forceinline__ uint64 tokens() const
    {
        uint64 bits = 0;
#pragma unroll
        for (int token = 0; token < HALF_COLUMNS; token++)
            bits |= static_cast<uint64>(present >> TOP * token & 1) << token;
        return bits;
    }
};

// A warp groups few tokens; lane TOP * t + r has the expert of rank r of token t, or NO_EXPERT.
__device__ __forceinline__ void group_lanes(int id, bool has_shared, FewGroups& groups)
{
    const int lane = threadIdx.x & 31, token = lane / TOP, rank = lane % TOP;
    const unsigned below = (1u << lane) - 1;
    // Lanes of the same expert.
    const unsigned same = __match_any_sync(~0u, id);
    const bool has_expert = id >= 0, is_first = has_expert && !(same & below);
    const unsigned firsts = __ballot_sync(~0u, is_first), present = __ballot_sync(~0u, has_expert && rank == 0);
    const int shared_segments = has_shared && present, segment = shared_segments + __popc(firsts & ((1u << (__ffs(same) - 1)) - 1));
    if (is_first)
        begin_segment(groups.each + segment, id, __popc(same));
    if (lane == 0) {
        if (shared_segments)
            begin_segment(groups.each, 0, __popc(present));
        groups.segments = shared_segments + __popc(firsts);
        groups.shared_segments = shared_segments;
        groups.present = present;
    }
    __syncwarp();
    if (has_expert)
        put_route(groups.each[segment], __popc(same & below), token, rank);
    if (has_expert && rank == 0 && shared_segments)
        put_route(groups.each[0], __popc(present & below), token, TOP);
}

// A word of the choice, as soon as it is there.
__device__ __forceinline__ int wait_for_choice(const Groups* groups, int number)
{
    const int* word = groups->choices[blockIdx.x % CHOICE_COPIES] + number;
    int id;
    do
        id = load_relaxed(word);
    while (id == NO_CHOICE);
    return id;
}

// A lane's score of a token's choice, that of rank lane % TOP, and that of the shared expert.
struct ChosenScores {
    const unsigned *word, *word_of_shared;
    unsigned own, of_shared;

    __device__ __forceinline__ ChosenScores() {}

    // By the ids of these ranks: on their way from now on.
    __device__ __forceinline__ ChosenScores(const Groups* groups, int id, int experts, bool has_shared)
        : word(groups->scores[blockIdx.x % SCORE_COPIES] + max(id, 0)), word_of_shared(groups->scores[blockIdx.x % SCORE_COPIES] + experts * has_shared)
    {
        load();
    }

    __device__ __forceinline__ void load()
    {
        own = load_relaxed(word);
        of_shared = load_relaxed(word_of_shared);
    }

    // A warp tells what paths are multiplied by.
    __device__ __forceinline__ void weigh(float* weights)
    {
        // Whoever chose has seen another copy.
        while (own == NO_SCORE || of_shared == NO_SCORE)
            load();
        __syncwarp();
        // -0 is 0, as where experts are chosen.
        const int lane = threadIdx.x & 31;
        const float weight = softmax(__uint_as_float(own) + 0.0f);
        if (lane < TOP)
            weights[lane] = weight;
        if (lane == TOP)
            weights[TOP] = sigmoid(__uint_as_float(of_shared));
    }
};
