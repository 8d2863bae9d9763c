// How the weights of the decode schedule stream from memory to registers, and what becomes of the sums.

#pragma once

#include "moe.cuh"

constexpr int GATE_WARPS = 4;
constexpr int DOWN_WARPS = 12;

// What a unit is: an expert and its tokens, the route of the one that is this lane's column, and tiles of rows.
struct Place {
    Bytes8 head;  // the expert, and how many tokens
    Bytes2 route;
    bool is_shared;
    int tile;

    __device__ __forceinline__ Place() {}

    __device__ __forceinline__ Place(const Segment* segment, bool is_shared, int tile) : is_shared(is_shared), tile(tile)
    {
        // From the L2: the L1 may be older than the groups, where they are read before the wait for the launch in front.
        head = __ldcg(reinterpret_cast<const Bytes8*>(segment));
        route = __ldcg(segment->routes + (threadIdx.x & 31) / 4);
    }

    // Of a segment in shared memory.
    static __device__ __forceinline__ Place here(const Segment& segment, bool is_shared, int tile)
    {
        Place place;
        place.head = *reinterpret_cast<const Bytes8*>(&segment);
        place.route = segment.routes[(threadIdx.x & 31) / 4];
        place.is_shared = is_shared;
        place.tile = tile;
        return place;
    }

    __device__ __forceinline__ int expert() const
    {
        return static_cast<int>(head.x);
    }

    __device__ __forceinline__ int count() const
    {
        return static_cast<int>(head.y);
    }

    // Whether this lane's column has a token.
    __device__ __forceinline__ bool has_token() const
    {
        return (threadIdx.x & 31) / 4 < head.y;
    }
};

// A warp's way through its units: `Work` says where a unit's weights and activations are and what becomes of its sums. A unit is one or more tiles of
// rows, for all of which activations are loaded once. With STEPS known, a unit is a straight line of instructions, in which the compiler tells loads
// apart: each step waits for its own, STAGES of them are always on their way, and activations a step ahead, the next unit's behind this one's. With
// 0 they are any number: the compiler has one scoreboard for loads across branches, so that whoever waits for one of them waits for all, and they are
// loaded in turns.
template <typename Format, int STAGES, int STEPS, typename Work>
__device__ __forceinline__ void stream(Work& work, Place place, int unit, int apart, int units)
{
    constexpr int TILES = Work::TILES;
    static_assert(STEPS % STAGES == 0, "a unit begins at the first stage");
    // A ticket may share a scoreboard with the loads around it: it is looked at when these have been waited for.
    constexpr bool HAS_TICKETS = Work::HAS_TICKETS && STEPS > 0;
    constexpr int TICKET_STEP = STEPS / 4;
    static_assert(!HAS_TICKETS || TICKET_STEP + STAGES + 1 < STEPS, "a unit is long enough for a ticket");
    using Activations = typename Work::template Activations<Format>;
    const int quad = threadIdx.x & 3, steps = STEPS ? STEPS : work.own_steps;
    // Weights are read once, or by others at the same time.
    const CachePolicy policy = policy_evict_first();
    typename Format::Raw held[STAGES][TILES][2];
    const auto row_of = [&](const Place& place) {
        return Format::row(choose(place.is_shared, work.banks.shared, work.banks.routed), work.first_step(place), quad);
    };
    const auto load = [&](int stage, const Row& row, int step) {
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++)
            load_step<Format>(held[stage][i / 2][i % 2], row_behind<Format>(row, work.steps_to(i / 2, i % 2)), step, policy);
    };
    const auto load_wanted = [&](int stage, const Row& row, int step, bool is_wanted) {
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++)
            load_wanted_step<Format>(held[stage][i / 2][i % 2], row_behind<Format>(row, work.steps_to(i / 2, i % 2)), step, policy, is_wanted);
    };
    const auto activations_of = [&](const Place& place, int step) {
        return work.activations(place.route) + step * Work::STEP_LENGTH * Format::OCTS;
    };
    RowScales<Format, STEPS> scales[TILES][2];
    const auto load_scales = [&](const Row& row) {
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++)
            scales[i / 2][i % 2].load(row_behind<Format>(row, work.steps_to(i / 2, i % 2)));
    };
    Row row = row_of(place);
    load_scales(row);
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++)
        if (stage < steps)
            load(stage, row, stage);
    work.wait();
    Activations taken;
    taken.load(activations_of(place, 0), place.has_token());
#pragma unroll 1
    while (true) {
        int next_unit = unit + apart;
        if constexpr (HAS_TICKETS)
            next_unit = work.next_unit();
        const bool is_last = next_unit >= units;
        // Behind the last unit its own once more, of which only what is small is loaded: a branch would cost more.
        const Place next = work.place(is_last ? unit : next_unit);
        const Row next_row = row_of(next);
        float sums[TILES][Activations::SETS][4] = {};
        if constexpr (STEPS > 0) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const int stage = step % STAGES, later = step + STAGES;
                if constexpr (HAS_TICKETS) {
                    if (step == TICKET_STEP)
                        work.take_ticket();
                    if (step == TICKET_STEP + STAGES + 1)
                        work.pass_on_ticket(apart);
                }
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    scales[tile][0].take(held[stage][tile][0], step);
                    scales[tile][1].take(held[stage][tile][1], step);
                    multiply_step<Format>(sums[tile], held[stage][tile][0], held[stage][tile][1], taken);
                }
                if (step + 1 < STEPS)
                    taken.load(activations_of(place, step + 1), place.has_token());
                else
                    taken.load(activations_of(next, 0), next.has_token());
                if (later < STEPS)
                    load(stage, row, later);
                else
                    load_wanted(stage, next_row, later - STEPS, !is_last);
                // Loads of later steps do not come before: there are not so many registers.
                if (STEPS > 8 && !Format::HAS_SCALE && step % 8 == 7)
                    __syncwarp();
            }
            load_scales(next_row);
        } else {
#pragma unroll 1
            for (int from = 0; from < steps; from += STAGES) {
                // What comes into the place of a stage: the unit's next steps, or the next unit's first.
                const bool is_end = from + STAGES >= steps;
                const int later = is_end ? 0 : from + STAGES, left = is_end ? (is_last ? 0 : steps) : steps - from - STAGES;
                const Row later_row = choose(is_end, next_row, row);
#pragma unroll
                for (int stage = 0; stage < STAGES; stage++)
                    if (from + stage < steps) {
#pragma unroll
                        for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
                            for (int half = 0; half < 2; half++)
                                Format::load_scale(held[stage][tile][half], row_behind<Format>(row, work.steps_to(tile, half)), from + stage);
                            multiply_step<Format>(sums[tile], held[stage][tile][0], held[stage][tile][1], taken);
                        }
                        if (from + stage + 1 < steps)
                            taken.load(activations_of(place, from + stage + 1), place.has_token());
                    }
#pragma unroll
                for (int stage = 0; stage < STAGES; stage++)
                    if (stage < left)
                        load(stage, later_row, later + stage);
            }
            taken.load(activations_of(next, 0), next.has_token());
        }
        work.finish(place, sums);
        if (is_last)
            return;
        place = next;
        row = next_row;
        unit = next_unit;
    }
}

// `place` is that of the first unit, looked up before it was known how many there are.
template <typename Format, int STAGES, typename Work>
__device__ __forceinline__ void stream(Work& work, Place place, int unit, int apart, int units)
{
    if (unit >= units)
        return;
#if __CUDA_ARCH__ == 900
    // Elsewhere registers do not suffice, or nobody has measured it.
    if (work.is_usual()) {
        work.take_usual();
        return stream<Format, STAGES, KNOWN_LENGTH / Format::STEP>(work, place, unit, apart, units);
    }
#endif
    stream<Format, STAGES, 0>(work, place, unit, apart, units);
}

// The first unit from `first` on that is this block's or warp's: unit u belongs to number u % all.
__device__ __forceinline__ int first_unit(int own, int all, int first)
{
    return own >= first ? own : own + (first - own + all - 1) / all * all;
}

// A block's next unit, and how far apart its units are, once it has done those of a shared expert in eight bits, each of which takes as long as two
// others: where there are few, as of few tokens, it has none of these.
__device__ __forceinline__ void go_on_behind_shared(int& unit, int& apart, int shared_units, int units)
{
    const int all = apart;
    if (units - shared_units <= 2 * (all - shared_units))
        apart = all - shared_units;
    if (unit < shared_units)
        unit = apart < all ? units : first_unit(unit, all, shared_units);
}

struct GateUp {
    const Bytes16* x;
    int64 x_row;
    int64 hidden;
    int64 width;
    Groups* groups;
    unsigned* act;  // [tokens, paths, width], handed on as
    int64 paths;
    int handing, shared_handing;
    Divisor tiles;  // of a segment
    // What all tokens need: the shared expert's gate and up rows, and its down rows, which the next launch reads.
    int64 shared_bytes;
    const char* ahead;
    int64 ahead_bytes;
    // Of one token: whether its scores of so many experts are words that are waited for, with which the token is there; else it is grouped in front.
    bool has_scores;
    int experts;
    int64* signal;  // counts a token whose scores are not all numbers
    int64 tokens;   // of few
};

// In shared memory: what the warps have of a unit's sums, and which unit is the next one, where a block has tickets.
template <int TILES>
struct alignas(16) GateUpTurn {
    float sums[GATE_WARPS][TILES * TILE][COLUMNS];
    int next_unit;
};

// A unit is tiles of 8 gate and 8 up rows for a segment; GATE_WARPS warps have slices of the rows. With tickets, where sizes are the usual ones, a
// block has its first two units, and behind them others as it comes for them, because multiprocessors get their bytes at different rates: each for a
// ticket, which its first thread takes a unit before. IS_FEW: segments are in shared memory, and activations words that are waited for.
template <typename Format, int SOME_TILES, bool SOME_TICKETS, bool IS_FEW = false>
struct GateUpWork {
    template <typename Own>
    using Activations = AsTheyAre<Own>;
    // Accesses of 16 bytes in a step, an oct of each lane being one.
    static constexpr int TILES = SOME_TILES, STEP_LENGTH = 4;
    static constexpr bool HAS_TICKETS = SOME_TICKETS;
    const GateUp& call;
    Banks banks;
    GateUpTurn<TILES>* turns;  // two
    const Segment* segments;
    int shared_segments, all_steps, begin, own_steps, parity, ticket;

    __device__ __forceinline__ GateUpWork(
        const GateUp& call, const Banks& banks, int shared_segments, GateUpTurn<TILES>* turns, const Segment* segments = nullptr)
        : call(call), banks(banks), turns(turns), segments(segments), shared_segments(shared_segments)
    {
        all_steps = static_cast<int>(call.hidden) / Format::STEP;
        begin = slice_begin<Format>(all_steps, warp(), GATE_WARPS);
        own_steps = slice_begin<Format>(all_steps, warp() + 1, GATE_WARPS) - begin;
        parity = 0;
    }

    // Of those that have a unit.
    static __device__ __forceinline__ int warp()
    {
        return IS_FEW ? threadIdx.x / 32 % GATE_WARPS : threadIdx.x / 32;
    }

    __device__ __forceinline__ Place place(int unit) const
    {
        const int segment = call.tiles.quotient(unit), tile = unit - segment * static_cast<int>(call.tiles.value);
        const bool is_shared = segment < shared_segments;
        return IS_FEW ? Place::here(segments[segment], is_shared, tile) : Place(call.groups->each + segment, is_shared, tile);
    }

    // In steps from the beginning of the bank: of this lane's first row, and from there to its other ones.
    __device__ __forceinline__ int first_step(const Place& place) const
    {
        return (place.expert() * 2 * static_cast<int>(call.width) + place.tile * 8 * TILES + (threadIdx.x & 31) / 4) * all_steps + begin;
    }

    __device__ __forceinline__ int steps_to(int tile, int half) const
    {
        return (tile * 8 + half * static_cast<int>(call.width)) * all_steps;
    }

    __device__ __forceinline__ bool is_usual() const
    {
        return call.hidden == GATE_WARPS * KNOWN_LENGTH;
    }

    // The same sizes, as constants.
    __device__ __forceinline__ void take_usual()
    {
        own_steps = KNOWN_LENGTH / Format::STEP;
        all_steps = GATE_WARPS * own_steps;
        begin = warp() * own_steps;
    }

    __device__ __forceinline__ void wait() const {}

    __device__ __forceinline__ int next_unit() const
    {
        return turns[parity].next_unit;
    }

    __device__ __forceinline__ void take_ticket()
    {
        if (threadIdx.x == 0)
            ticket = claim(&call.groups->tickets, 1);
    }

    // All know it behind the barrier of `finish`. So many blocks have the first units, two each.
    __device__ __forceinline__ void pass_on_ticket(int blocks) const
    {
        if (threadIdx.x == 0)
            turns[parity ^ 1].next_unit = 2 * blocks + ticket;
    }

    __device__ __forceinline__ const Bytes16* activations(int route) const
    {
        return call.x + (route >> 4) * call.x_row + (begin * STEP_LENGTH + (threadIdx.x & 3)) * Format::OCTS;
    }

    // From the sums of a row of a tile and a column.
    __device__ __forceinline__ void put_activation(const Place& place, int route, int tile, int column, float gate, float up) const
    {
        const Handing handing((route & 15) == TOP ? call.shared_handing : call.handing);
        const unsigned word = word_of_oct(silu(gate) * up, handing);
        if (column < place.count()) {
            unsigned* to = call.act + ((route >> 4) * call.paths + (route & 15)) * call.width + place_in_row(handing, place.tile * TILES + tile);
            if (IS_FEW)
                store_relaxed(to, word);
            else
                *to = word;
        }
    }

    __device__ __forceinline__ void finish(const Place& place, const float (&sums)[TILES][1][4])
    {
        const int line = (threadIdx.x & 31) >> 2, quad = threadIdx.x & 3;
        auto& own = turns[parity].sums;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            *reinterpret_cast<float2*>(&own[warp()][tile * TILE + line][2 * quad]) = make_float2(sums[tile][0][0], sums[tile][0][1]);
            *reinterpret_cast<float2*>(&own[warp()][tile * TILE + line + 8][2 * quad]) = make_float2(sums[tile][0][2], sums[tile][0][3]);
        }
        // A thread has a row of a tile and a column; the routes of columns are those of the lanes 4 * column.
        const int row = threadIdx.x % 8, tile = threadIdx.x / 8 % TILES, column = threadIdx.x / (8 * TILES);
        const int route = __shfl_sync(~0u, static_cast<int>(place.route), 4 * (column % COLUMNS));
        __syncthreads();
        if (warp() < 2 * TILES) {
            float gate = own[0][tile * TILE + row][column], up = own[0][tile * TILE + row + 8][column];
#pragma unroll
            for (int other = 1; other < GATE_WARPS; other++) {
                gate += own[other][tile * TILE + row][column];
                up += own[other][tile * TILE + row + 8][column];
            }
            put_activation(place, route, tile, column, gate, up);
        }
        parity ^= 1;
    }
};

struct Down {
    const unsigned* act;  // [tokens, paths, width], handed on as terms
    int64 paths;
    int64 hidden;
    int64 width;
    const Groups* groups;
    const float* alpha;         // [tokens, TOP]
    const float* shared_scale;  // [tokens], 0 without a shared expert
    Bytes2* dest;
    int64 dest_row;
    int64 tokens;
    // Whether the launch in front of the one in front made the groups, with all that is to be put together, behind whoever wrote `dest`; so that only
    // activations are waited for.
    int64 are_groups_ready;
    // Of one token, where that is so: whether its experts are words that are waited for, and its scores are there when those are, instead of groups and
    // what paths are multiplied by; of so many experts.
    bool has_choice;
    int experts;
};

// The sums of a block of the down projections of so many tokens, and what they are put together with.
template <int TOKENS>
struct DownMemory {
    float sums_of_paths[TOKENS * (TOP + 1)][TILE];
    float weights[TOKENS * (TOP + 1)];
    float residuals[TOKENS * TILE];

    // A token's residual of a row, and what its experts add to it, by rank: its paths are those from one on.
    __device__ __forceinline__ float with_experts(float residual, int first_path, int row) const
    {
#pragma unroll
        for (int path = first_path; path < first_path + TOP; path++)
            residual = fmaf(weights[path], sums_of_paths[path][row], residual);
        return residual;
    }
};

// A unit is a segment; the block's tile of rows is the same for all. Each warp has units of its own.
template <typename Format>
struct DownWork {
    template <typename Own>
    using Activations = FromTerms<Own>;
    static constexpr int TILES = 1, STEP_LENGTH = 8;
    static constexpr bool HAS_TICKETS = false;
    const Down& call;
    Banks banks;
    float (*sums_of_paths)[TILE];
    int shared_segments, own_steps;

    __device__ __forceinline__ DownWork(const Down& call, const Banks& banks, int shared_segments, float (*sums_of_paths)[TILE])
        : call(call), banks(banks), sums_of_paths(sums_of_paths), shared_segments(shared_segments)
    {
        own_steps = static_cast<int>(call.width) / Format::STEP;
    }

    __device__ __forceinline__ Place place(int unit) const
    {
        return {call.groups->each + unit, unit < shared_segments, static_cast<int>(blockIdx.x)};
    }

    __device__ __forceinline__ int first_step(const Place& place) const
    {
        return (place.expert() * static_cast<int>(call.hidden) + place.tile * TILE + (threadIdx.x & 31) / 4) * own_steps;
    }

    __device__ __forceinline__ int steps_to(int, int half) const
    {
        return half * 8 * own_steps;
    }

    __device__ __forceinline__ bool is_usual() const
    {
        return call.width == KNOWN_LENGTH;
    }

    __device__ __forceinline__ void take_usual()
    {
        own_steps = KNOWN_LENGTH / Format::STEP;
    }

    __device__ __forceinline__ void wait() const
    {
        if (call.are_groups_ready)
            wait_for_predecessor();
    }

    __device__ __forceinline__ const Bytes16* activations(int route) const
    {
        const unsigned* row = call.act + ((route >> 4) * call.paths + (route & 15)) * call.width;
        return reinterpret_cast<const Bytes16*>(row) + (threadIdx.x & 3);
    }

    __device__ __forceinline__ Columns columns(const Place& place) const
    {
        const bool are_many = place.count() > HALF_COLUMNS;
        const int line = (threadIdx.x & 31) / 4, column = line & (are_many ? COLUMNS - 1 : HALF_COLUMNS - 1);
        const bool is_there = column < place.count();
        const int route = __shfl_sync(~0u, static_cast<int>(place.route), is_there ? 4 * column : 0);
        return {activations(route) + (are_many ? 0 : line / HALF_COLUMNS * QUADS), is_there, are_many};
    }

    // Sums of two rows.
    __device__ __forceinline__ void store(const Place& place, const float (&sums)[4], int upper, int lower) const
    {
        const int quad = threadIdx.x & 3, paths = static_cast<int>(call.paths);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int route = __shfl_sync(~0u, static_cast<int>(place.route), 4 * (2 * quad + i));
            if (2 * quad + i < place.count()) {
                float* own = sums_of_paths[(route >> 4) * paths + (route & 15)];
                own[upper] = sums[i];
                own[lower] = sums[i + 2];
            }
        }
    }

    __device__ __forceinline__ void finish(const Place& place, float (&sums)[1][2][4]) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[0][0][i] += sums[0][1][i];
        const int line = (threadIdx.x & 31) / 4;
        store(place, sums[0][0], line, line + 8);
    }
};

// How a batch is grouped, for a block of down projections.
struct DownStart {
    int segments, shared_segments;
    uint64 tokens;
};

__device__ __forceinline__ DownStart down_start(const Down& call)
{
    const Bytes16 header = __ldcg(reinterpret_cast<const Bytes16*>(call.groups));
    return {static_cast<int>(header.x), static_cast<int>(header.y), header.z | static_cast<uint64>(header.w) << 32};
}

// What the sums are put together with, on its way to a thread: residuals, and what paths are multiplied by, unless that is there.
template <int THREADS, int TOKENS>
struct DownRest {
    static constexpr int EACH = (TOKENS * TILE + THREADS - 1) / THREADS;
    int weights, rows;
    float weight[EACH];
    Bytes2 residual[EACH];

    __device__ __forceinline__ explicit DownRest(const Down& call, bool has_tile = true)
    {
        const int paths = static_cast<int>(call.paths);
        weights = TOKENS == 1 && call.has_choice ? 0 : static_cast<int>(call.tokens) * paths;
        rows = has_tile ? static_cast<int>(call.tokens) * TILE : 0;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int i = threadIdx.x + e * THREADS, token = i / paths, path = i - token * paths;
            if (i < weights)
                weight[e] = __ldcg(path < TOP ? call.alpha + token * TOP + path : call.shared_scale + token);
            if (i < rows)
                residual[e] = __ldcg(call.dest + i / TILE * call.dest_row + blockIdx.x * TILE + i % TILE);
        }
    }

    __device__ __forceinline__ void put(DownMemory<TOKENS>& memory) const
    {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int i = threadIdx.x + e * THREADS;
            if (i < weights)
                memory.weights[i] = weight[e];
            if (i < rows)
                memory.residuals[i] = bf16_to_float(residual[e]);
        }
    }
};

template <int THREADS, int TOKENS>
__device__ __forceinline__ void bring_residuals(const Down& call, DownMemory<TOKENS>& memory)
{
    DownRest<THREADS, TOKENS>(call).put(memory);
}

// The end of a block: what its warps have left in shared memory, put together for each token and row. RELEASES: if the next launch is not let go before.
template <int THREADS, bool RELEASES = true, int TOKENS>
__device__ __forceinline__ void put_together(const Down& call, const DownMemory<TOKENS>& memory, uint64 tokens)
{
    const int paths = static_cast<int>(call.paths);
    wait_for_predecessor();
    if (RELEASES)
        release_successor();
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < call.tokens * TILE; i += THREADS) {
        const int row = i % TILE, token = i / TILE;
        if (!(tokens >> token & 1))
            continue;
        float sum = memory.with_experts(memory.residuals[i], token * paths, row);
        if (paths > TOP)
            sum = fmaf(memory.weights[token * paths + TOP], memory.sums_of_paths[token * paths + TOP][row], sum);
        call.dest[token * call.dest_row + blockIdx.x * TILE + row] = float_to_bf16(sum);
    }
}
