// Down projections through shared memory, where rows of eight bits have KNOWN_LENGTH elements. A warp has units as in `stream`, each in a slot of its
// own, where it comes by copies in bulk. Loads of weights take a scoreboard, of which the compiler has few: it lets them share one with loads of
// activations, so that whoever waits for these waits for memory. Copies take none, and registers are left for the activations of a whole unit.

#pragma once

#include "moe_stream.cuh"
#include "staging.cuh"

// With more warps a scheduler has three of 168 registers instead of two of 255.
constexpr int SLOT_WARPS = 8;
constexpr int SLOTS = 2;
constexpr int SLOT_BYTES = 8704;

// Where a tile's planes are in its slot: what lies one behind the other in the bank.
template <typename Format>
struct Slot {
    static constexpr int STEPS = KNOWN_LENGTH / Format::STEP;
    static constexpr int ROW = STEPS * Format::STEP_BYTES, SCALES_ROW = 2 * STEPS;
    static constexpr int BASE = TILE * ROW, SCALES = TILE * SCALES_ROW;
    static_assert(Format::HIGH_BYTES == 0 && Format::HAS_SCALE && BASE + SCALES <= SLOT_BYTES, "a tile of eight bits fits");
};

struct SlotMemory {
    char slots[SLOT_WARPS][SLOTS][SLOT_BYTES];
    Segment segments[MOST_SEGMENTS];
    uint64 arrivals[SLOT_WARPS][SLOTS];
};

// A warp's units, SLOT_WARPS segments apart.
template <typename Format>
struct SlotStream {
    using Own = Slot<Format>;
    static constexpr int STEPS = Own::STEPS;
    const DownWork<Format>& work;
    const Segment* segments;
    char (*slots)[SLOT_BYTES];
    uint64* arrivals;
    int end;
    FromTerms<Format> taken[STEPS];

    __device__ __forceinline__ SlotStream(const DownWork<Format>& work, SlotMemory& memory, int end)
        : work(work), segments(memory.segments), slots(memory.slots[threadIdx.x >> 5]), arrivals(memory.arrivals[threadIdx.x >> 5]), end(end), taken{}
    {
        if ((threadIdx.x & 31) < SLOTS)
            init_barrier(shared_address(arrivals + (threadIdx.x & 31)), 1);
        fence_for_copies();
        __syncwarp();
    }

    __device__ __forceinline__ Place place(int unit) const
    {
        Place place;
        place.head = *reinterpret_cast<const Bytes8*>(segments + unit);
        place.route = segments[unit].routes[(threadIdx.x & 31) / 4];
        return place;
    }

    // One lane asks for a unit, when all lanes are done with what the slot had.
    __device__ __forceinline__ void ask(int unit, int slot) const
    {
        if (unit >= end || (threadIdx.x & 31))
            return;
        const Bank bank = choose(unit < work.shared_segments, work.banks.shared, work.banks.routed);
        const int64 row = segments[unit].expert * work.call.hidden + blockIdx.x * TILE;
        const unsigned to = shared_address(slots[slot]), arrival = shared_address(arrivals + slot);
        const CachePolicy policy = policy_evict_first();
        arrive_and_expect(arrival, Own::BASE + Own::SCALES);
        copy_in_bulk(to, bank.base + row * Own::ROW, Own::BASE, arrival, policy);
        copy_in_bulk(to + Own::BASE, bank.scales + row * Own::SCALES_ROW, Own::SCALES, arrival, policy);
    }

    __device__ __forceinline__ void load(const Place& place, int step, bool is_wanted)
    {
        const Bytes16* from = work.activations(place.route) + step * DownWork<Format>::STEP_LENGTH * Format::OCTS;
        taken[step].load_wanted(from, is_wanted && place.has_token());
    }

    // A unit's sums, with the next one's activations on their way to where its own were.
    __device__ __forceinline__ void multiply(const Place& place, const Place& next, bool has_next, int slot, unsigned phase)
    {
        const int line = (threadIdx.x & 31) >> 2, quad = threadIdx.x & 3;
        wait_for_phase(shared_address(arrivals + slot), phase);
        const char* own = slots[slot];
        float sums[1][4] = {};
        RowScales<Format, STEPS> scales[2];
        scales[0].take_all(own + Own::BASE + line * Own::SCALES_ROW);
        scales[1].take_all(own + Own::BASE + (line + 8) * Own::SCALES_ROW);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            typename Format::Raw held[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const char* at = own + (line + 8 * half) * Own::ROW + step * Format::STEP_BYTES;
                held[half].base = reinterpret_cast<const decltype(held[half].base)*>(at)[quad];
                scales[half].take(held[half], step);
            }
            multiply_step<Format>(sums[0], held[0], held[1], taken[step]);
            load(next, step, has_next);
        }
        __syncwarp();
        work.finish(place, sums);
    }

    __device__ __forceinline__ void run(int unit)
    {
        if (unit >= end)
            return;
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++)
            ask(unit + slot * SLOT_WARPS, slot);
        work.wait();
        Place own = place(unit);
#pragma unroll
        for (int step = 0; step < STEPS; step++)
            load(own, step, true);
        unsigned phase = 0;
#pragma unroll 1
        while (true) {
#pragma unroll
            for (int slot = 0; slot < SLOTS; slot++) {
                const bool has_next = unit + SLOT_WARPS < end;
                const Place next = place(has_next ? unit + SLOT_WARPS : unit);
                multiply(own, next, has_next, slot, phase);
                ask(unit + SLOTS * SLOT_WARPS, slot);
                if (!has_next)
                    return;
                own = next;
                unit += SLOT_WARPS;
            }
            phase ^= 1;
        }
    }
};
