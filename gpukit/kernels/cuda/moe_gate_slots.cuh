// Gate and up projections through shared memory, where rows have GATE_WARPS * KNOWN_LENGTH elements. A unit, a tile of 8 gate and 8 up rows of an
// expert, comes to a slot by copies in bulk, which take neither registers nor scoreboards.

#pragma once

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

    // The threads of GATE_WARPS warps ask for a unit, when all are done with what the slot had.
    static __device__ __forceinline__ void ask(const Bank& bank, int expert, int tile, int width, const char* slot, const uint64* barrier)
    {
        constexpr int EACH = TILE / GATE_WARPS;
        const unsigned to = shared_address(slot), arrival = shared_address(barrier);
        const CachePolicy policy = policy_evict_first();
        const int thread = threadIdx.x % (32 * GATE_WARPS), number = thread / 32 * EACH + thread % 32;
        if (thread == 0) {
            arrive_and_expect(arrival, TILE * (ROW + HIGH_ROW + SCALES_ROW));
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64 row = (2 * expert + half) * width + tile * HALF;
                if (!IS_PADDED)
                    copy_in_bulk(to + half * HALF * ROW, bank.base + row * ROW, HALF * ROW, arrival, policy);
                if (HIGH_ROW)
                    copy_in_bulk(to + HIGH + half * HALF * HIGH_ROW, bank.high + row * HIGH_ROW, HALF * HIGH_ROW, arrival, policy);
                if (SCALES_ROW)
                    copy_in_bulk(to + SCALES + half * HALF * SCALES_ROW, bank.scales + row * SCALES_ROW, HALF * SCALES_ROW, arrival, policy);
            }
        }
        if (IS_PADDED && thread % 32 < EACH) {
            const int64 row = (2 * expert + number / HALF) * width + tile * HALF + number % HALF;
            copy_in_bulk(to + number * PITCH, bank.base + row * ROW, ROW, arrival, policy);
        }
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

    // Where the scales of a row of this lane's are, of this warp's slice.
    static __device__ __forceinline__ const char* scales(const char* slot, int half)
    {
        return slot + SCALES + (half * HALF + (threadIdx.x & 31) / 4) * SCALES_ROW + threadIdx.x / 32 % GATE_WARPS * 2 * STEPS;
    }
};

// What a block has in shared memory for few tokens: slots, as many as fit of a format, and the segments. Contiguous copies suit it better than padded
// rows: its warps wait for memory, not for banks.
constexpr int GATE_SLOTS_BYTES = 70656;
constexpr int MOST_GATE_SLOTS = 4;
constexpr int FEW_SEGMENTS = HALF_COLUMNS * TOP + 1;

struct GateSlotMemory {
    char slots[GATE_SLOTS_BYTES];
    uint64 arrivals[2][MOST_GATE_SLOTS];
    Segment segments[FEW_SEGMENTS];
};

// A block's units, `apart` from each other.
template <typename Format>
struct GateSlotStream {
    using Own = GateSlot<Format, false>;
    using Work = GateUpWork<Format, 1>;
    static constexpr int STEPS = Own::STEPS, LENGTH = Work::STEP_LENGTH * Format::OCTS;
    static constexpr int SLOTS = least(GATE_SLOTS_BYTES / Own::BYTES, MOST_GATE_SLOTS);
    Work& work;
    GateSlotMemory& memory;
    uint64* arrivals;
    int tiles;
    AsTheyAre<Format> taken[STEPS];

    __device__ __forceinline__ GateSlotStream(Work& work, GateSlotMemory& memory, uint64* arrivals)
        : work(work), memory(memory), arrivals(arrivals), tiles(static_cast<int>(work.call.tiles.value))
    {
    }

    __device__ __forceinline__ Place place(int unit) const
    {
        const int segment = work.call.tiles.quotient(unit);
        Place place;
        place.head = *reinterpret_cast<const Bytes8*>(memory.segments + segment);
        place.route = memory.segments[segment].routes[(threadIdx.x & 31) / 4];
        place.is_shared = segment < work.shared_segments;
        place.tile = unit - segment * tiles;
        return place;
    }

    __device__ __forceinline__ void ask(int unit, int end, int slot) const
    {
        if (unit >= end)
            return;
        const int segment = work.call.tiles.quotient(unit);
        const Bank bank = choose(segment < work.shared_segments, work.banks.shared, work.banks.routed);
        const int expert = memory.segments[segment].expert, width = static_cast<int>(work.call.width);
        Own::ask(bank, expert, unit - segment * tiles, width, memory.slots + slot * Own::BYTES, arrivals + slot);
    }

    // Where this lane's elements of its column's token begin; columns without one have the first one's.
    __device__ __forceinline__ const Bytes16* token_of(const Place& place) const
    {
        return work.activations(__shfl_sync(~0u, static_cast<int>(place.route), place.has_token() ? threadIdx.x & 31 : 0));
    }

    // A unit's sums, with the next one's tokens on their way to where its own were.
    __device__ __forceinline__ void multiply(const Place& place, const Place& next, bool has_next, int slot, unsigned phase)
    {
        const Bytes16* token = token_of(next);
        wait_for_phase(shared_address(arrivals + slot), phase);
        const char* own = memory.slots + slot * Own::BYTES;
        float sums[1][1][4] = {};
        RowScales<Format, STEPS> scales[2];
        scales[0].take_all(Own::scales(own, 0));
        scales[1].take_all(Own::scales(own, 1));
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            typename Format::Raw held[2];
            Own::take(own, step, held);
            scales[0].take(held[0], step);
            scales[1].take(held[1], step);
            multiply_step<Format>(sums[0], held[0], held[1], taken[step]);
            taken[step].load_wanted(token + step * LENGTH, has_next && next.has_token());
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
        Place own = place(unit);
        const Bytes16* token = token_of(own);
#pragma unroll
        for (int step = 0; step < STEPS; step++)
            taken[step].load_in_order(token + step * LENGTH);
        int slot = 0;
        unsigned phase = 0;
#pragma unroll 1
        while (true) {
            const bool has_next = unit + apart < end;
            const Place next = place(has_next ? unit + apart : unit);
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

// HAS_OTHER: whether the shared expert may be in eight bits where the others are not.
template <typename Format, bool HAS_OTHER>
__device__ __forceinline__ void run_gate_up_slots(const GateUp& call, const Banks& banks, bool is_shared_other)
{
#if __CUDA_ARCH__ == 900
    __shared__ typename GateUpWork<Format, 1>::Partial partial[2];
    extern __shared__ __align__(128) char dynamic[];
    GateSlotMemory& memory = *reinterpret_cast<GateSlotMemory*>(dynamic);
    prefetch_all(banks.shared.base, call.shared_bytes);
    prefetch_all(call.ahead, call.ahead_bytes);
    if (threadIdx.x < 2 * MOST_GATE_SLOTS)
        init_barrier(shared_address(memory.arrivals[0] + threadIdx.x), 1);
    fence_for_copies();
    // Released only after the wait: the next launch counts on the groups' being there.
    wait_for_predecessor();
    release_successor();
    static_assert(2 * FEW_SEGMENTS <= GATE_WARPS * 32, "a thread has a half of a segment");
    const Bytes16 half = __ldcg(reinterpret_cast<const Bytes16*>(call.groups->each) + threadIdx.x);
    const Bytes8 numbers = __ldcg(reinterpret_cast<const Bytes8*>(call.groups));
    if (threadIdx.x < 2 * FEW_SEGMENTS)
        reinterpret_cast<Bytes16*>(memory.segments)[threadIdx.x] = half;
    __syncthreads();
    const int tiles = static_cast<int>(call.tiles.value), all = gridDim.x, shared_segments = numbers.y, units = numbers.x * tiles;
    int unit = blockIdx.x, apart = all;
    if (HAS_OTHER && is_shared_other) {
        GateUpWork<Wide, 1> work(call, banks, shared_segments, partial);
        const int shared_units = shared_segments * tiles;
        work.take_usual();
        GateSlotStream<Wide>(work, memory, memory.arrivals[1]).run(unit, all, shared_units);
        __syncthreads();
        go_on_behind_shared(unit, apart, shared_units, units);
    }
    GateUpWork<Format, 1> work(call, banks, shared_segments, partial);
    work.take_usual();
    GateSlotStream<Format>(work, memory, memory.arrivals[0]).run(unit, apart, units);
#endif
}
