// Down projections through shared memory, where rows have KNOWN_LENGTH elements. A warp has units as in `stream`, each in a slot of its own, where it
// comes by copies in bulk. Loads of weights take a scoreboard, of which the compiler has few: it lets them share one with loads of activations, so
// that whoever waits for these waits for memory. Copies take none, and registers are left for the activations of a whole unit.

#pragma once

#include "moe_choice.cuh"
#include "moe_stream.cuh"
#include "moe_tile.cuh"
#include "staging.cuh"

// Batches of three sizes: most tokens, warps, each of which has units of its own, and their slots.
struct ManyTokens {
    static constexpr int TOKENS = BATCH, WARPS = 8, SLOTS = 2;
    static constexpr bool ARE_WORDS = false, HAS_GAPS = false;
};

// Activations of a unit are half as many registers as those of more tokens, and words that are waited for.
template <int SLOTS_OF_WARP>
struct FewTokens {
    static constexpr int TOKENS = HALF_COLUMNS, WARPS = DOWN_WARPS, SLOTS = SLOTS_OF_WARP;
    static constexpr bool ARE_WORDS = true, HAS_GAPS = false;
};

struct OneToken {
    static constexpr int TOKENS = 1, WARPS = TOP + 1, SLOTS = 1;
    static constexpr bool ARE_WORDS = false, HAS_GAPS = true;
};

// Where a tile's planes are in its slot: what lies one behind the other in the bank, in parts.
template <typename Format, bool HAS_GAPS>
struct Slot : TilePlanes<Format, KNOWN_LENGTH / Format::STEP, HAS_GAPS> {
    using Planes = TilePlanes<Format, KNOWN_LENGTH / Format::STEP, HAS_GAPS>;
    using typename Planes::Rows;
    using Planes::ROW, Planes::HIGH_ROW, Planes::SCALES_ROW, Planes::HIGH, Planes::SCALES;
    // From a tile to the next one, of several in a slot.
    static constexpr int STEPS = KNOWN_LENGTH / Format::STEP, APART = Planes::BYTES;

    // One thread asks for the tile from a row on, when all are done with what the slot had.
    static __device__ __forceinline__ void ask(const Bank& bank, int64 row, const void* slot, const uint64* barrier)
    {
        const unsigned to = shared_address(slot), arrival = shared_address(barrier);
        const CachePolicy policy = policy_evict_first();
        arrive_and_expect(arrival, Planes::COPIED_BYTES);
#pragma unroll
        for (int first = 0; first < TILE; first += Rows::ROWS) {
            const int base = Rows::place(first, ROW, Rows::GAP), high = HIGH + Rows::place(first, HIGH_ROW, Rows::HIGH_GAP);
            copy_in_bulk(to + base, bank.base + (row + first) * ROW, Rows::ROWS * ROW, arrival, policy);
            if (HIGH_ROW)
                copy_in_bulk(to + high, bank.high + (row + first) * HIGH_ROW, Rows::ROWS * HIGH_ROW, arrival, policy);
        }
        if (SCALES_ROW)
            copy_in_bulk(to + SCALES, bank.scales + row * SCALES_ROW, TILE * SCALES_ROW, arrival, policy);
    }

    // Of this lane's row in a half.
    static __device__ __forceinline__ const char* scales(const char* slot, int half)
    {
        return Planes::scales_of(slot, Rows::own(half));
    }
};

// Where they are if they are swizzled, of a tile of four that have a slot: behind the planes of all four are the scales of all four.
template <typename Format>
struct SwizzledSlot : SwizzledPlanes<Format, KNOWN_LENGTH / Format::STEP, false> {
    using Planes = SwizzledPlanes<Format, KNOWN_LENGTH / Format::STEP, false>;
    using typename Planes::Rows;
    using Planes::HIGH_ROW, Planes::SCALES_ROW, Planes::HIGH, Planes::SCALES, Planes::BYTES;
    // From a tile to the next one of the four: as much as its planes take.
    static constexpr int STEPS = KNOWN_LENGTH / Format::STEP, APART = SCALES, SCALES_BYTES = BYTES - APART;

    // From the planes of that tile on.
    static __device__ __forceinline__ int scales_at(int number)
    {
        return (GATE_WARPS - number) * APART + number * SCALES_BYTES;
    }

    // One thread asks for the tile from a row on, when all are done with what the slot had, for the warp of that number.
    static __device__ __forceinline__ void ask(const Bank& bank, int64 row, const void* tile, const uint64* barrier, int warp = threadIdx.x / 32)
    {
        const unsigned to = shared_address(tile), arrival = shared_address(barrier);
        const CachePolicy policy = policy_evict_first();
        arrive_and_expect(arrival, BYTES);
        copy_rows(to, bank.maps, static_cast<int>(row), arrival, policy);
        if constexpr (Planes::IS_HIGH_SWIZZLED)
            copy_rows(to + HIGH, bank.maps + 1, static_cast<int>(row), arrival, policy);
        else if constexpr (HIGH_ROW > 0)
            copy_in_bulk(to + HIGH, bank.high + row * HIGH_ROW, TILE * HIGH_ROW, arrival, policy);
        copy_in_bulk(to + scales_at(warp % GATE_WARPS), bank.scales + row * SCALES_ROW, SCALES_BYTES, arrival, policy);
    }

    // Of this lane's row in a half.
    static __device__ __forceinline__ const char* scales(const char* tile, int half)
    {
        return tile + scales_at(threadIdx.x / 32 % GATE_WARPS) + Rows::own(half) * SCALES_ROW;
    }
};

// Bytes of a slot for a format, and for eight bits where the shared expert may be in them.
template <typename Format, bool HAS_OTHER, bool HAS_GAPS>
__device__ __forceinline__ constexpr int slot_bytes()
{
    constexpr int OWN = Slot<Format, HAS_GAPS>::BYTES, OTHER = Slot<Wide, HAS_GAPS>::BYTES;
    return HAS_OTHER && OTHER > OWN ? OTHER : OWN;
}

template <typename Batch, int SLOT_BYTES>
struct SlotMemory {
    char slots[Batch::WARPS][Batch::SLOTS][SLOT_BYTES];
    Segment segments[Batch::TOKENS > 1 ? MOST_SEGMENTS : TOP + 1];
    uint64 arrivals[Batch::WARPS][Batch::SLOTS];
};

// A batch's segments come to shared memory, the first ones with what says how many there are.
template <int THREADS, int MOST>
__device__ __forceinline__ DownStart take_segments(const Down& call, Segment (&segments)[MOST])
{
    const Bytes16* from = reinterpret_cast<const Bytes16*>(call.groups->each);
    Bytes16* halves = reinterpret_cast<Bytes16*>(segments);
    constexpr int FIRST = least(THREADS, 2 * MOST);
    const Bytes16 half = __ldcg(from + min(static_cast<int>(threadIdx.x), FIRST - 1));
    const DownStart start = down_start(call);
    if (threadIdx.x < FIRST)
        halves[threadIdx.x] = half;
#pragma unroll 1
    for (int i = threadIdx.x + THREADS; i < 2 * start.segments; i += THREADS)
        halves[i] = __ldcg(from + i);
    return start;
}

// The same of one token, lane r of each warp having the expert of rank r: as they stand, behind the shared one.
__device__ __forceinline__ DownStart take_chosen(int id, bool has_shared, Segment* segments)
{
    const int path = static_cast<int>(threadIdx.x) - has_shared, expert = __shfl_sync(~0u, id, max(path, 0) % TOP);
    if (id < 0)
        return {};
    if (path < TOP)
        put_path(segments[threadIdx.x], path, path < 0 ? 0 : expert);
    return {TOP + has_shared, has_shared, 1};
}

// A warp's units, as many segments apart as there are warps.
template <typename Format, typename Batch, int SLOT_BYTES, typename SomeSlot = Slot<Format, Batch::HAS_GAPS>>
struct SlotStream {
    using Own = SomeSlot;
    static constexpr int STEPS = Own::STEPS, WARPS = Batch::WARPS, SLOTS = Batch::SLOTS;
    // A unit is asked for when the activations of the one in front are there, not a turn ahead: these would wait for what nobody needs yet.
    static constexpr bool ASKS_LATE = Batch::ARE_WORDS && SLOTS > 1;
    using Activations = FromColumns<Format, Batch::TOKENS <= HALF_COLUMNS ? 1 : 2, Batch::ARE_WORDS>;
    static_assert(Own::BYTES <= SLOT_BYTES, "a tile fits");
    const DownWork<Format>& work;
    const Segment* segments;
    char (*slots)[SLOT_BYTES];
    uint64* arrivals;
    int end;
    // A unit's, and its activations.
    Place own;
    Activations taken[STEPS];
    static constexpr int LENGTH = DownWork<Format>::STEP_LENGTH * Format::OCTS;

    __device__ __forceinline__ SlotStream(const DownWork<Format>& work, SlotMemory<Batch, SLOT_BYTES>& memory, int end)
        : work(work), segments(memory.segments), slots(memory.slots[threadIdx.x >> 5]), arrivals(memory.arrivals[threadIdx.x >> 5]), end(end)
    {
    }

    // With slots and barriers of this warp.
    __device__ __forceinline__ SlotStream(const DownWork<Format>& work, const Segment* segments, char* slots, uint64* arrivals, int end)
        : work(work), segments(segments), slots(reinterpret_cast<char (*)[SLOT_BYTES]>(slots)), arrivals(arrivals), end(end)
    {
    }

    // Of which this stream takes the expert, the tokens and their routes.
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
        if (unit >= end || threadIdx.x % 32)
            return;
        const Bank bank = choose(unit < work.shared_segments, work.banks.shared, work.banks.routed);
        Own::ask(bank, segments[unit].expert * work.call.hidden + blockIdx.x * TILE, slots[slot], arrivals + slot);
    }

    // Until all of a unit's activations are there.
    __device__ __forceinline__ void wait_for_activations(const Place& place)
    {
        const auto are_missing = [&] {
            unsigned most = 0;
#pragma unroll
            for (int step = 0; step < STEPS; step++)
                most = max(most, taken[step].largest());
            return __any_sync(~0u, most == NO_WORD);
        };
        while (are_missing()) {
            const Columns columns = work.columns(place);
            // Few bytes: what is written last.
            FromColumns<Format, 1, true> last;
            do
                last.load(columns, (STEPS - 1) * LENGTH);
            while (__any_sync(~0u, last.largest() == NO_WORD));
#pragma unroll
            for (int step = 0; step < STEPS; step++)
                taken[step].load(columns, step * LENGTH);
        }
    }

    // A unit's sums, with the next one's activations on their way to where its own were.
    __device__ __forceinline__ void multiply(int unit, const Place& place, const Place& next, bool has_next, int slot, unsigned phase)
    {
        constexpr int SETS = Activations::SETS;
        const Columns columns = work.columns(next);
        const bool are_many = place.count() > HALF_COLUMNS;
        wait_for_phase(shared_address(arrivals + slot), phase);
        if constexpr (Batch::ARE_WORDS)
            wait_for_activations(place);
        if (ASKS_LATE && has_next)
            ask(unit + WARPS, (slot + 1) % SLOTS);
        const char* tile = slots[slot];
        float sums[SETS][4] = {};
        RowScales<Format, Format::HAS_SCALE ? STEPS : 0> scales[2];
        scales[0].take_all(Own::scales(tile, 0));
        scales[1].take_all(Own::scales(tile, 1));
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            typename Format::Raw held[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                Own::take(tile, half, step, held[half]);
                scales[half].take(held[half], step);
            }
            multiply_step<Format>(sums, held[0], held[1], taken[step], are_many);
            taken[step].load_wanted(columns, step * LENGTH, has_next);
        }
        __syncwarp();
        add_terms(sums, are_many);
        work.store(place, sums[0], Own::Rows::own(0), Own::Rows::own(1));
    }

    // The first unit's activations.
    __device__ __forceinline__ void take(int unit)
    {
        if (unit >= end)
            return;
        own = place(unit);
        const Columns columns = work.columns(own);
#pragma unroll
        for (int step = 0; step < STEPS; step++)
            taken[step].load(columns, step * LENGTH);
    }

    // From a unit on, which has been taken; its slot has been asked for, and others unless that is done late. `had`: those that have had a phase, as bits.
    __device__ __forceinline__ void go_on(int unit, int slot, unsigned had)
    {
        if (unit >= end)
            return;
#pragma unroll 1
        while (true) {
            const bool has_next = unit + WARPS < end;
            const Place next = place(has_next ? unit + WARPS : unit);
            multiply(unit, own, next, has_next, slot, had >> slot & 1);
            if (!has_next)
                return;
            if (!ASKS_LATE)
                ask(unit + SLOTS * WARPS, slot);
            had ^= 1u << slot;
            slot = (slot + 1) % SLOTS;
            own = next;
            unit += WARPS;
        }
    }

    __device__ __forceinline__ void ask_first(int unit) const
    {
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++)
            ask(unit + slot * WARPS, slot);
    }
};
