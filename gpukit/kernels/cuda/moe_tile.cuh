// How the rows of a tile lie in shared memory.

#pragma once

#include "moe.cuh"

// A row of the base is a multiple of all banks long, and a warp reads a step from as many rows at once as fit into these. HAS_GAPS: so that they are
// in different banks, rows that are side by side in the bank of weights are a part, for which one copy is enough; parts lie a step further apart than
// they are long, and lines of a warp that are side by side have rows of different parts. It is quicker for whoever waits for a single tile; copies
// that are not whole lines of 128 bytes on both sides are slower, which is more where memory is all that is waited for.
template <typename Format, bool HAS_GAPS>
struct TileRows {
    static constexpr int BANKS_BYTES = 128, PARTS = HAS_GAPS ? BANKS_BYTES / Format::STEP_BYTES : 1, ROWS = TILE / PARTS, GAPS = PARTS - 1;
    // From this lane's row in one half of what a tensor core takes to that in the other.
    static constexpr int APART = ROWS / 2;
    // Of the base; and of the high bits, which are less: as little as a copy's end can be moved, so that at most two rows meet.
    static constexpr int GAP = Format::STEP_BYTES, HIGH_GAP = 16;

    // Where a row of so many bytes begins.
    static __device__ __forceinline__ constexpr int place(int row, int length, int gap)
    {
        return row * length + row / ROWS * gap;
    }

    // This lane's row in a half.
    static __device__ __forceinline__ int own(int half)
    {
        const int line = (threadIdx.x & 31) / 4;
        return line % PARTS * ROWS + line / PARTS + half * APART;
    }

    // Where that begins: both are in the same part.
    static __device__ __forceinline__ int own_place(int half, int length, int gap)
    {
        const int line = (threadIdx.x & 31) / 4;
        return line % PARTS * (ROWS * length + gap) + line / PARTS * length + half * APART * length;
    }
};

// The planes of a tile, one behind the other, whose rows of so many steps come by tensor maps: lines are swizzled, so that a step of all rows is in different
// banks, and yet whole lines are copied. HALVES: the rows of both halves of what a tensor core takes come apart, else together. Scales come as they stand, behind
// the others, and so do high bits of less than a line a row.
template <typename Format, int LENGTH, bool HALVES>
struct SwizzledPlanes {
    using Rows = TileRows<Format, false>;
    static constexpr int LINE = 128, LINES_APART = (HALVES ? TILE / 2 : TILE) * LINE;
    static constexpr int ROW = LENGTH * Format::STEP_BYTES, HIGH_ROW = LENGTH * Format::HIGH_BYTES, SCALES_ROW = 2 * LENGTH;
    static constexpr int HIGH = TILE * ROW, SCALES = TILE * (ROW + HIGH_ROW), BYTES = SCALES + TILE * SCALES_ROW;
    static constexpr bool IS_HIGH_SWIZZLED = HIGH_ROW > 0 && HIGH_ROW % LINE == 0;
    static_assert(ROW % LINE == 0 && SCALES % 1024 == 0, "planes begin where their first line does");

    // Where the rows of the second half are.
    static __device__ __forceinline__ constexpr int half_apart(int row_bytes)
    {
        return TILE / 2 * (HALVES ? row_bytes : LINE);
    }

    // Where so many bytes of this lane's step are, which are `at` bytes into what all lanes of its row have of it.
    template <int STEP_BYTES>
    static __device__ __forceinline__ const char* find(const char* plane, int half, int step, int at, int row_bytes)
    {
        constexpr int STEPS = LINE / STEP_BYTES;
        const int line = (threadIdx.x & 31) / 4;
        return plane + half * half_apart(row_bytes) + step / STEPS * LINES_APART + ((line * LINE | (line * 16 ^ at)) ^ step % STEPS * STEP_BYTES);
    }

    // All but the scale of this lane's part of a step, of its row in a half.
    static __device__ __forceinline__ void take(const char* tile, int half, int step, typename Format::Raw& held)
    {
        const int quad = threadIdx.x & 3;
        held.base = *reinterpret_cast<const decltype(held.base)*>(find<Format::STEP_BYTES>(tile, half, step, Format::STEP_BYTES / QUADS * quad, ROW));
        if constexpr (IS_HIGH_SWIZZLED)
            Format::take_high(held, find<Format::HIGH_BYTES>(tile + HIGH, half, step, 0, HIGH_ROW), quad);
        else if constexpr (HIGH_ROW > 0)
            Format::take_high(held, tile + HIGH + Rows::own(half) * HIGH_ROW + step * Format::HIGH_BYTES, quad);
    }

    static __device__ __forceinline__ const char* scales_of(const char* tile, int row)
    {
        return tile + SCALES + row * SCALES_ROW;
    }
};

// Where the planes of a tile are, one behind the other, whose rows have so many steps.
template <typename Format, int LENGTH, bool HAS_GAPS>
struct TilePlanes {
    using Rows = TileRows<Format, HAS_GAPS>;
    static constexpr int ROW = LENGTH * Format::STEP_BYTES, HIGH_ROW = LENGTH * Format::HIGH_BYTES, SCALES_ROW = Format::HAS_SCALE ? 2 * LENGTH : 0;
    static constexpr int HIGH = TILE * ROW + Rows::GAPS * Rows::GAP;
    static constexpr int SCALES = HIGH + TILE * HIGH_ROW + (HIGH_ROW > 0 ? Rows::GAPS * Rows::HIGH_GAP : 0), BYTES = SCALES + TILE * SCALES_ROW;
    // Without the gaps: what comes.
    static constexpr int COPIED_BYTES = TILE * (ROW + HIGH_ROW + SCALES_ROW);

    // All but the scale of this lane's part of a step, of its row in a half.
    static __device__ __forceinline__ void take(const char* tile, int half, int step, typename Format::Raw& held)
    {
        const int quad = threadIdx.x & 3;
        held.base = reinterpret_cast<const decltype(held.base)*>(tile + Rows::own_place(half, ROW, Rows::GAP) + step * Format::STEP_BYTES)[quad];
        Format::take_high(held, tile + HIGH + Rows::own_place(half, HIGH_ROW, Rows::HIGH_GAP) + step * Format::HIGH_BYTES, quad);
    }

    static __device__ __forceinline__ const char* scales_of(const char* tile, int row)
    {
        return tile + SCALES + row * SCALES_ROW;
    }
};
