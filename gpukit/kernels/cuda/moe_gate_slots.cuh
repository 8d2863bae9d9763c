// Gate and up projections through shared memory, where rows have GATE_WARPS * KNOWN_LENGTH elements. A unit, a tile of 8 gate and 8 up rows of an
// expert, comes to a slot by copies in bulk, which take neither registers nor scoreboards.

#pragma once

#include "moe_choice.cuh"
#include "moe_stream.cuh"
#include "staging.cuh"

// Where the planes of a unit are in its slot: of each plane the gate rows, then the up rows. IS_PADDED: rows of the base lie a lane's accesses further
// apart than they are long, so that the eight which a warp reads from at once are in different banks; a row is then a copy of its own.
template <typename Format, bool IS_PADDED>
struct GateSlot {
    static constexpr int STEPS = KNOWN_LENGTH / Format::STEP, ALL_STEPS = GATE_WARPS * STEPS, HALF = TILE / 2;
    static constexpr int ROW = ALL_STEPS * Format::STEP_BYTES, PITCH = ROW + (IS_PADDED ? Format::STEP_BYTES : 0);
    static constexpr int HIGH_ROW = ALL_STEPS * Format::HIGH_BYTES, SCALES_ROW = Format::HAS_SCALE ? 2 * ALL_STEPS : 0;
    static constexpr int HIGH = TILE * PITCH, SCALES = HIGH + TILE * HIGH_ROW, BYTES = SCALES + TILE * SCALES_ROW;

    // Of the base a row or a half is a copy, of the other planes a half.
    static constexpr int BASES = IS_PADDED ? TILE : 2, HIGHS = HIGH_ROW > 0 ? 2 : 0, COPIES = BASES + HIGHS + (SCALES_ROW > 0 ? 2 : 0);

    static __device__ __forceinline__ void expect(const uint64* barrier)
    {
        arrive_and_expect(shared_address(barrier), TILE * (ROW + HIGH_ROW + SCALES_ROW));
    }

    // One of the copies, when all are done with what the slot had.
    static __device__ __forceinline__ void ask(
        const Bank& bank, int expert, int tile, int width, const char* slot, const uint64* barrier, int copy, CachePolicy policy)
    {
        const int of_other = copy - BASES;
        const bool is_base = of_other < 0, is_high = of_other < HIGHS;
        const int rows = is_base ? TILE / BASES : HALF, first = is_base ? copy * rows : of_other % 2 * HALF;
        const int row_bytes = is_base ? ROW : is_high ? HIGH_ROW : SCALES_ROW;
        const int to = is_base ? first * PITCH : (is_high ? HIGH : SCALES) + first * row_bytes;
        const char* plane = is_base ? bank.base : is_high ? bank.high : bank.scales;
        const int64 row = (2 * expert + first / HALF) * width + tile * HALF + first % HALF;
        copy_in_bulk(shared_address(slot) + to, plane + row * row_bytes, rows * row_bytes, shared_address(barrier), policy);
    }

    // All but the scales of this lane's part of a step of this warp's slice.
    static __device__ __forceinline__ void take(const char* slot, int step, typename Format::Raw (&held)[2])
    {
        const int line = (threadIdx.x & 31) / 4, quad = threadIdx.x & 3, at = threadIdx.x / 32 % GATE_WARPS * STEPS + step;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = half * HALF + line;
            held[half].base = reinterpret_cast<const decltype(held[half].base)*>(slot + row * PITCH + at * Format::STEP_BYTES)[quad];
            Format::take_high(held[half], slot + HIGH + row * HIGH_ROW + at * Format::HIGH_BYTES, quad);
        }
    }

    // Where the scales of a row's slice are.
    static __device__ __forceinline__ const char* scales(const char* slot, int row, int slice)
    {
        return slot + SCALES + row * SCALES_ROW + slice * 2 * STEPS;
    }
};

// Few tokens: blocks of a multiprocessor. Formats that are more work than their bytes have the tokens in shared memory, in the order of nibbles, which
// takes loads and permutations out of the loop and leaves registers for one more block, where its slots fit.
template <typename Format>
struct GateFew {
    static constexpr bool HAS_TOKENS = Format::ORDER == NIBBLES;
    static constexpr int BLOCKS = HAS_TOKENS && Format::HIGH_BYTES == 0 ? 4 : 3;
};
constexpr int GATE_SLOTS = 2;
// Accesses of a token, and from one token to the next: those of a step with two octs that are read at once are in different banks.
constexpr int TOKEN_LENGTH = GATE_WARPS * KNOWN_LENGTH / 8, TOKEN_PITCH = TOKEN_LENGTH + QUADS;

// Of few tokens. Rows are contiguous in their slots: warps wait for memory, not for banks.
template <typename Format>
struct GateSlotMemory {
    static constexpr bool HAS_TOKENS = GateFew<Format>::HAS_TOKENS;
    char slots[GATE_SLOTS * GateSlot<Format, false>::BYTES];
    uint64 arrivals[2][GATE_SLOTS];
    FewGroups groups;
    Bytes16 tokens[HAS_TOKENS ? HALF_COLUMNS : 1][HAS_TOKENS ? TOKEN_PITCH : 1];
};

// Where an oct of a token is: two octs of a lane make a step, in each of which those of quads lie side by side.
__device__ __forceinline__ constexpr int place_of_oct(int oct)
{
    return oct / (2 * QUADS) * 2 * QUADS + oct % 2 * QUADS + oct % (2 * QUADS) / 2;
}

// A lane's octs of a step of its column's token, in the order of nibbles.
template <typename Format>
struct FromNibbles {
    static constexpr int SETS = 1;
    const Bytes16* octs;

    __device__ __forceinline__ void take(int oct, unsigned (&operands)[SETS][4]) const
    {
        take_vector(octs[QUADS * oct], operands[0]);
        if (Format::ORDER == BYTES) {
            const unsigned a = operands[0][0], b = operands[0][1], c = operands[0][2], d = operands[0][3];
            operands[0][0] = __byte_perm(a, c, 0x5410);
            operands[0][1] = __byte_perm(b, d, 0x5410);
            operands[0][2] = __byte_perm(a, c, 0x7632);
            operands[0][3] = __byte_perm(b, d, 0x7632);
        }
    }
};

// A block's units, `apart` from each other.
template <typename Format, typename Memory>
struct GateSlotStream {
    using Own = GateSlot<Format, false>;
    using Work = GateUpWork<Format, 1, false, true>;
    static constexpr bool HAS_TOKENS = Memory::HAS_TOKENS;
    static constexpr int STEPS = Own::STEPS, LENGTH = Work::STEP_LENGTH * Format::OCTS;
    static constexpr int SLOTS = least(sizeof Memory::slots / Own::BYTES, GATE_SLOTS);
    static_assert(SLOTS > 0, "a unit fits");
    Work& work;
    Memory& memory;
    uint64* arrivals;
    int tiles;
    AsTheyAre<Format> taken[HAS_TOKENS ? 1 : STEPS];

    __device__ __forceinline__ GateSlotStream(Work& work, Memory& memory, uint64* arrivals)
        : work(work), memory(memory), arrivals(arrivals), tiles(static_cast<int>(work.call.tiles.value))
    {
    }

    __device__ __forceinline__ void ask(int unit, int end, int slot) const
    {
        if (unit >= end)
            return;
        const int segment = work.call.tiles.quotient(unit), tile = unit - segment * tiles, warp = threadIdx.x / 32;
        const Bank bank = choose(segment < work.shared_segments, work.banks.shared, work.banks.routed);
        const int expert = work.segments[segment].expert, width = static_cast<int>(work.call.width);
        const CachePolicy policy = policy_evict_first();
        // Warps ask beside each other.
        if (threadIdx.x % 32 == 0) {
            if (warp == 0)
                Own::expect(arrivals + slot);
#pragma unroll
            for (int copy = warp; copy < Own::COPIES; copy += GATE_WARPS)
                Own::ask(bank, expert, tile, width, memory.slots + slot * Own::BYTES, arrivals + slot, copy, policy);
        }
    }

    // Of this lane's column; those without a token have the first one's.
    static __device__ __forceinline__ int route_of(const Place& place)
    {
        return __shfl_sync(~0u, static_cast<int>(place.route), place.has_token() ? threadIdx.x & 31 : 0);
    }

    // Where this lane's elements of its column's token begin.
    __device__ __forceinline__ const Bytes16* token_of(const Place& place) const
    {
        return work.activations(route_of(place));
    }

    // The same in shared memory.
    __device__ __forceinline__ const Bytes16* token_here(const Place& place) const
    {
        return memory.tokens[route_of(place) >> 4] + threadIdx.x / 32 * KNOWN_LENGTH / 8 + place_of_oct(Format::OCTS * (threadIdx.x & 3));
    }

    // A unit's sums, with the next one's tokens, where they come from memory, on their way to where its own were.
    __device__ __forceinline__ void multiply(const Place& place, const Place& next, bool has_next, int slot, unsigned phase)
    {
        const Bytes16* token = HAS_TOKENS ? token_here(place) : token_of(next);
        wait_for_phase(shared_address(arrivals + slot), phase);
        const char* own = memory.slots + slot * Own::BYTES;
        float sums[1][1][4] = {};
        RowScales<Format, STEPS> scales[2];
        const int line = (threadIdx.x & 31) / 4, slice = threadIdx.x / 32 % GATE_WARPS;
        scales[0].take_all(Own::scales(own, line, slice));
        scales[1].take_all(Own::scales(own, line + Own::HALF, slice));
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            typename Format::Raw held[2];
            Own::take(own, step, held);
            scales[0].take(held[0], step);
            scales[1].take(held[1], step);
            if constexpr (HAS_TOKENS) {
                multiply_step<Format>(sums[0], held[0], held[1], FromNibbles<Format>{token + place_of_oct(Format::OCTS * QUADS * step)});
            } else {
                multiply_step<Format>(sums[0], held[0], held[1], taken[step]);
                taken[step].load_wanted(token + step * LENGTH, has_next && next.has_token());
            }
        }
        work.finish(place, sums);
    }

    __device__ __forceinline__ void run(int unit, int apart, int end)
    {
        if (unit >= end)
            return;
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++)
            ask(unit + slot * apart, end, slot);
        work.wait();
        Place own = work.place(unit);
        if constexpr (!HAS_TOKENS) {
            const Bytes16* token = token_of(own);
#pragma unroll
            for (int step = 0; step < STEPS; step++)
                taken[step].load_in_order(token + step * LENGTH);
        }
        int slot = 0;
        unsigned phase = 0;
#pragma unroll 1
        while (true) {
            const bool has_next = unit + apart < end;
            const Place next = work.place(has_next ? unit + apart : unit);
            multiply(own, next, has_next, slot, phase);
            // All have been at a barrier since they read the slot.
            ask(unit + SLOTS * apart, end, slot);
            if (!has_next)
                return;
            own = next;
            unit += apart;
            slot = slot + 1 < SLOTS ? slot + 1 : 0;
            phase ^= slot == 0;
        }
    }
};

// The tokens in shared memory, in the order of nibbles.
__device__ __forceinline__ void bring_tokens(const GateUp& call, Bytes16 (&tokens)[HALF_COLUMNS][TOKEN_PITCH])
{
    constexpr int APART = 32 * GATE_WARPS, EACH = TOKEN_LENGTH / APART;
    Bytes16 taken[HALF_COLUMNS * EACH];
    // Of fewer tokens the last again: without branches all loads are on their way at once. From the L2: the L1 may have what was there before.
#pragma unroll
    for (int i = 0; i < HALF_COLUMNS * EACH; i++)
        taken[i] = __ldcg(call.x + min(i / EACH, static_cast<int>(call.tokens) - 1) * call.x_row + threadIdx.x + i % EACH * APART);
#pragma unroll
    for (int i = 0; i < HALF_COLUMNS * EACH; i++)
        tokens[i / EACH][place_of_oct(threadIdx.x + i % EACH * APART)] = arranged<NIBBLES>(taken[i]);
}

// HAS_OTHER: whether the shared expert may be in eight bits where the others are not.
template <typename Format, bool HAS_OTHER>
__device__ __forceinline__ void run_gate_up_slots(const GateUp& call, const Banks& banks, bool is_shared_other)
{
#if __CUDA_ARCH__ == 900
    __shared__ GateUpTurn<1> turns[2];
    extern __shared__ __align__(128) char dynamic[];
    using Memory = GateSlotMemory<Format>;
    Memory& memory = *reinterpret_cast<Memory*>(dynamic);
    prefetch_all(banks.shared.base, call.shared_bytes);
    prefetch_all(call.ahead, call.ahead_bytes);
    if (threadIdx.x < 2 * GATE_SLOTS)
        init_barrier(shared_address(memory.arrivals[0] + threadIdx.x), 1);
    fence_for_copies();
    if constexpr (Memory::HAS_TOKENS) {
        if (!call.has_choices)
            wait_for_predecessor();
        bring_tokens(call, memory.tokens);
    }
    take_choices(call, memory.groups);
    const int tiles = static_cast<int>(call.tiles.value), all = gridDim.x, shared_segments = memory.groups.shared_segments;
    const int units = memory.groups.segments * tiles;
    int unit = blockIdx.x, apart = all;
    if (HAS_OTHER && is_shared_other) {
        GateUpWork<Wide, 1, false, true> work(call, banks, shared_segments, turns, memory.groups.each);
        const int shared_units = shared_segments * tiles;
        work.take_usual();
        GateSlotStream<Wide, Memory>(work, memory, memory.arrivals[1]).run(unit, all, shared_units);
        __syncthreads();
        go_on_behind_shared(unit, apart, shared_units, units);
    }
    GateUpWork<Format, 1, false, true> work(call, banks, shared_segments, turns, memory.groups.each);
    work.take_usual();
    GateSlotStream<Format, Memory>(work, memory, memory.arrivals[0]).run(unit, apart, units);
    // Tokens without any expert have no units, but the next launch counts on what those in front of this one have written.
    wait_for_predecessor();
#endif
}
