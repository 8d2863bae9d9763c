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
