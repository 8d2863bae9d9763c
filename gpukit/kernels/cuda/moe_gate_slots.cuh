// Gate and up projections through shared memory, where rows have GATE_WARPS * KNOWN_LENGTH elements. A unit, a tile of 8 gate and 8 up rows of an
// expert, comes to a slot by copies in bulk, which take neither registers nor scoreboards.

#pragma once

#include "moe_choice.cuh"
#include "moe_stream.cuh"
#include "moe_tile.cuh"
#include "staging.cuh"

// A lane's octs of a token in a step, in the order of the format.
template <typename Format>
struct InOrder {
    static constexpr int SETS = 1;
    const Bytes16* octs;

    __device__ __forceinline__ void take(int oct, unsigned (&operands)[SETS][4]) const
    {
        take_vector(octs[oct], operands[0]);
    }
};

// What a warp takes of a unit, of whose planes it has a slice.
template <typename Format, typename Planes>
struct GateSlices : Planes {
    static constexpr int STEPS = KNOWN_LENGTH / Format::STEP;

    // All but the scales of this lane's part of a step of this warp's slice.
    static __device__ __forceinline__ void take(const char* slot, int step, typename Format::Raw (&held)[2])
    {
        const int at = threadIdx.x / 32 % GATE_WARPS * STEPS + step;
#pragma unroll
        for (int half = 0; half < 2; half++)
            Planes::take(slot, half, at, held[half]);
    }

    // Where the scales of a row's slice are.
    static __device__ __forceinline__ const char* scales(const char* slot, int row, int slice)
    {
        return Planes::scales_of(slot, row) + slice * 2 * STEPS;
    }
};

// Where the planes of a unit are in its slot if they are swizzled: of each the gate rows, then the up rows.
template <typename Format>
struct SwizzledGateSlot : GateSlices<Format, SwizzledPlanes<Format, GATE_WARPS * KNOWN_LENGTH / Format::STEP, true>> {
    using Planes = SwizzledPlanes<Format, GATE_WARPS * KNOWN_LENGTH / Format::STEP, true>;
    using typename Planes::Rows;
    using Planes::ROW, Planes::HIGH_ROW, Planes::SCALES_ROW, Planes::HIGH, Planes::SCALES, Planes::BYTES;
    static constexpr int HALF = TILE / 2, HIGHS = HIGH_ROW > 0 ? 2 : 0, COPIES = 2 + HIGHS + 2;
    static_assert(HIGH_ROW == 0 || Planes::IS_HIGH_SWIZZLED, "rows of high bits are whole lines");

    static __device__ __forceinline__ void expect(const uint64* barrier)
    {
        arrive_and_expect(shared_address(barrier), BYTES);
    }

    // One of the copies, when all are done with what the slot had.
    static __device__ __forceinline__ void ask(
        const Bank& bank, int expert, int tile, int width, const char* slot, const uint64* barrier, int copy, CachePolicy policy)
    {
        const int half = copy % 2, row = (2 * expert + half) * width + tile * HALF;
        const unsigned to = shared_address(slot), arrival = shared_address(barrier);
        if (copy < 2)
            copy_rows(to + half * HALF * ROW, bank.maps, row, arrival, policy);
        else if (copy < 2 + HIGHS)
            copy_rows(to + HIGH + half * HALF * HIGH_ROW, bank.maps + 1, row, arrival, policy);
        else
            copy_in_bulk(to + SCALES + half * HALF * SCALES_ROW, bank.scales + static_cast<int64>(row) * SCALES_ROW, HALF * SCALES_ROW, arrival, policy);
    }
};

// Where the planes of a unit are in its slot: of each plane the gate rows, then the up rows, in parts.
template <typename Format, bool HAS_GAPS>
struct GateSlot : GateSlices<Format, TilePlanes<Format, GATE_WARPS * KNOWN_LENGTH / Format::STEP, HAS_GAPS>> {
    using Planes = TilePlanes<Format, GATE_WARPS * KNOWN_LENGTH / Format::STEP, HAS_GAPS>;
    using typename Planes::Rows;
    using Planes::ROW, Planes::HIGH_ROW, Planes::SCALES_ROW, Planes::HIGH, Planes::SCALES;
    static constexpr int HALF = TILE / 2;

    // A part is a copy, or a half.
    static constexpr int PARTS = Rows::PARTS > 2 ? Rows::PARTS : 2, HIGHS = HIGH_ROW > 0 ? PARTS : 0, COPIES = PARTS + HIGHS + (SCALES_ROW > 0 ? 2 : 0);

    static __device__ __forceinline__ void expect(const uint64* barrier)
    {
        arrive_and_expect(shared_address(barrier), Planes::COPIED_BYTES);
    }

    // One of the copies, when all are done with what the slot had.
    static __device__ __forceinline__ void ask(
        const Bank& bank, int expert, int tile, int width, const char* slot, const uint64* barrier, int copy, CachePolicy policy)
    {
        const bool is_base = copy < PARTS, is_high = !is_base && copy < PARTS + HIGHS;
        const int rows = is_base || is_high ? TILE / PARTS : HALF, first = (copy - (is_base ? 0 : is_high ? PARTS : PARTS + HIGHS)) * rows;
        const int row_bytes = is_base ? ROW : is_high ? HIGH_ROW : SCALES_ROW;
        const int to = is_base   ? Rows::place(first, ROW, Rows::GAP)
                       : is_high ? HIGH + Rows::place(first, HIGH_ROW, Rows::HIGH_GAP)
                                 : SCALES + first * SCALES_ROW;
        const char* plane = is_base ? bank.base : is_high ? bank.high : bank.scales;
        const int64 row = (2 * expert + first / HALF) * width + tile * HALF + first % HALF;
        copy_in_bulk(shared_address(slot) + to, plane + row * row_bytes, rows * row_bytes, shared_address(barrier), policy);
    }
};
