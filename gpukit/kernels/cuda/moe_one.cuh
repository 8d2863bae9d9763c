// One token: blocks of the gate and up projections and of the down projections beside each other on a multiprocessor, whose registers and shared memory
// they share, so that weights of the second are on their way while the first are multiplied, and operands of the tensor cores when activations come. A
// block of the gate and up projections asks for more than half of the shared memory, to be alone there with one of the down projections.

#pragma once

#include "moe_gate_slots.cuh"
#include "moe_slots.cuh"

// Registers of a thread of both: each quarter of a multiprocessor has 512 for each of its lanes, and two warps of each block.
constexpr int GATE_ONE_REGISTERS = 72;
constexpr int DOWN_ONE_REGISTERS = 184;
// Groups of GATE_WARPS warps of a block of the gate and up projections; each has units and slots of its own.
constexpr int GATE_GROUPS = 2;

// A warp's slice of the token.
using TokenSlice = Bytes16[KNOWN_LENGTH / 8];

// Bytes of a group's slots: two units, or one where rows are long, and one of eight bits where the shared expert may be in them.
template <typename Format, bool HAS_OTHER>
__device__ __forceinline__ constexpr int gate_one_bytes()
{
    constexpr int OWN = (Format::HAS_SCALE ? 2 : 1) * GateSlot<Format, true>::BYTES, OTHER = HAS_OTHER ? GateSlot<Wide, true>::BYTES : 0;
    return OWN > OTHER ? OWN : OTHER;
}

template <int SOME_BYTES, bool HAS_OTHER>
struct GateOneMemory {
    static constexpr int SLOTS_BYTES = SOME_BYTES, MOST_SLOTS = 2;
    char slots[GATE_GROUPS][SLOTS_BYTES];
    // Of the routed experts and of the shared one.
    uint64 arrivals[2][GATE_GROUPS][MOST_SLOTS];
    // In the order of the format, and in that of eight bits.
    TokenSlice token[HAS_OTHER ? 2 : 1][GATE_WARPS];
    float partial[GATE_GROUPS][2][GATE_WARPS][TILE];
    int experts[TOP];
};

// A lane's octs of the token in a step, in shared memory, in the order of the format.
template <typename Format>
struct InOrder {
    static constexpr int SETS = 1;
    const Bytes16* octs;

    __device__ __forceinline__ void take(int oct, unsigned (&operands)[SETS][4]) const
    {
        take_vector(octs[oct], operands[0]);
    }
};

template <int ORDER>
__device__ __forceinline__ Bytes16 arranged(const Bytes16& oct)
{
    unsigned pairs[4];
    take_vector(oct, pairs);
    arrange<ORDER>(pairs);
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// The units of this group of warps, of the routed experts or of the shared one. IS_OTHER: of the shared one in eight bits where the others are not.
// UNROLLED: as many steps at once as there are registers for.
template <typename Format, int UNROLLED, bool IS_OTHER, typename Memory>
struct GateOneStream {
    using Own = GateSlot<Format, true>;
    static constexpr int STEPS = Own::STEPS, SLOTS = least(Memory::SLOTS_BYTES / Own::BYTES, Memory::MOST_SLOTS);
    const GateUp& call;
    const Bank& bank;
    Memory& memory;
    int tiles, end;
    bool is_shared;

    __device__ __forceinline__ GateOneStream(const GateUp& call, const Bank& bank, Memory& memory, int paths, bool is_shared)
        : call(call), bank(bank), memory(memory), tiles(static_cast<int>(call.tiles.value)), end(paths * tiles), is_shared(is_shared)
    {
    }

    static __device__ __forceinline__ int group()
    {
        return threadIdx.x / (32 * GATE_WARPS);
    }

    static __device__ __forceinline__ int first()
    {
        return blockIdx.x + group() * gridDim.x;
    }

    static __device__ __forceinline__ int apart()
    {
        return GATE_GROUPS * gridDim.x;
    }

    __device__ __forceinline__ uint64* arrival(int slot) const
    {
        return memory.arrivals[is_shared][group()] + slot;
    }

    __device__ __forceinline__ char* slot_at(int slot) const
    {
        return memory.slots[group()] + slot * Own::BYTES;
    }

    __device__ __forceinline__ void ask(int unit, int slot) const
    {
        if (unit >= end)
            return;
        const int path = call.tiles.quotient(unit), expert = is_shared ? 0 : memory.experts[path];
        Own::ask(bank, expert, unit - path * tiles, static_cast<int>(call.width), slot_at(slot), arrival(slot));
    }

    __device__ __forceinline__ void ask_first() const
    {
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++)
            ask(first() + slot * apart(), slot);
    }

    static __device__ __forceinline__ void meet_group()
    {
        asm volatile("barrier.sync.aligned %0, %1;" ::"r"(group() + 1), "n"(32 * GATE_WARPS) : "memory");
    }

    __device__ __forceinline__ void multiply(int slot, unsigned phase, float (&partial)[GATE_WARPS][TILE]) const
    {
        const int warp = threadIdx.x / 32 % GATE_WARPS, line = (threadIdx.x & 31) / 4, quad = threadIdx.x & 3;
        wait_for_phase(shared_address(arrival(slot)), phase);
        const char* own = slot_at(slot);
        const TokenSlice& token = memory.token[IS_OTHER][warp];
        float sums[1][4] = {};
#pragma unroll UNROLLED
        for (int step = 0; step < STEPS; step++) {
            typename Format::Raw held[2];
            Own::take(own, step, held);
            take_scale<Format>(held[0], Own::scales(own, 0), step);
            take_scale<Format>(held[1], Own::scales(own, 1), step);
            // The other columns have the same token, and are not looked at.
            multiply_step<Format>(sums, held[0], held[1], InOrder<Format>{token + (QUADS * step + quad) * Format::OCTS});
        }
        if (quad == 0) {
            partial[warp][line] = sums[0][0];
            partial[warp][line + 8] = sums[0][2];
        }
    }

    __device__ __forceinline__ void finish(int unit, const float (&partial)[GATE_WARPS][TILE]) const
    {
        const int element = threadIdx.x % 8, number = call.tiles.quotient(unit), path = is_shared ? TOP : number;
        float gate = partial[0][element], up = partial[0][element + 8];
#pragma unroll
        for (int other = 1; other < GATE_WARPS; other++) {
            gate += partial[other][element];
            up += partial[other][element + 8];
        }
        int word;
        const Handing handing(is_shared ? call.shared_handing : call.handing);
        const unsigned result = word_of_oct(silu(gate) * up, handing, unit - number * tiles, word);
        if (threadIdx.x % 32 < 8)
            call.act[path * call.width + word] = result;
    }

    // What comes into all slots has been asked for.
    __device__ __forceinline__ void run() const
    {
        int slot = 0, turn = 0;
        unsigned phase = 0;
#pragma unroll 1
        for (int unit = first(); unit < end; unit += apart()) {
            float(&partial)[GATE_WARPS][TILE] = memory.partial[group()][turn];
            multiply(slot, phase, partial);
            meet_group();
            if (threadIdx.x / 32 % GATE_WARPS == 0)
                finish(unit, partial);
            ask(unit + SLOTS * apart(), slot);
            slot = slot + 1 < SLOTS ? slot + 1 : 0;
            phase ^= slot == 0;
            turn ^= 1;
        }
    }
};

// The shared expert hangs on no choice: its units come first. HAS_OTHER: whether it may be in eight bits where the others are not.
template <typename Format, int UNROLLED, bool HAS_OTHER>
__device__ __forceinline__ void run_gate_up_one(const GateUp& call, const Banks& banks, bool is_shared_other)
{
#if __CUDA_ARCH__ == 900
    extern __shared__ __align__(128) char dynamic[];
    using Memory = GateOneMemory<gate_one_bytes<Format, HAS_OTHER>(), HAS_OTHER>;
    Memory& memory = *reinterpret_cast<Memory*>(dynamic);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const bool has_shared = call.paths > TOP, is_other = HAS_OTHER && is_shared_other;
    // One of the two, by the format that the shared expert is in.
    const GateOneStream<Format, UNROLLED, false, Memory> shared(call, banks.shared, memory, has_shared, true);
    const GateOneStream<Wide, UNROLLED, HAS_OTHER, Memory> other(call, banks.shared, memory, has_shared, true);
    if (threadIdx.x < 2 * GATE_GROUPS * Memory::MOST_SLOTS)
        init_barrier(shared_address(memory.arrivals[0][0] + threadIdx.x), 1);
    fence_for_copies();
    __syncthreads();
    if (is_other)
        other.ask_first();
    else
        shared.ask_first();
    prefetch_all(call.ahead, call.ahead_bytes);
    if (!call.are_tokens_ready)
        wait_for_predecessor();
    constexpr int LENGTH = KNOWN_LENGTH / 8;
    static_assert(LENGTH == 2 * 32, "a lane has two accesses of a slice");
    if (warp < GATE_WARPS)
#pragma unroll
        for (int i = lane; i < LENGTH; i += 32) {
            // From the L2: the L1 may have what was there before.
            const Bytes16 oct = __ldcg(call.x + warp * LENGTH + i);
            memory.token[0][warp][i] = arranged<Format::ORDER>(oct);
            if (is_other)
                memory.token[HAS_OTHER][warp][i] = arranged<Wide::ORDER>(oct);
        }
    __syncthreads();
    if (is_other)
        other.run();
    else
        shared.run();
    wait_for_predecessor();
    const Segment* segment = call.groups->each + has_shared + threadIdx.x % TOP;
    const int segments = __ldcg(&call.groups->segments), expert = __ldcg(&segment->expert), path = __ldcg(segment->routes);
    // A token without a choice has no segments.
    if (segments && threadIdx.x < TOP)
        memory.experts[path] = expert;
    __syncthreads();
    const GateOneStream<Format, UNROLLED, false, Memory> routed(call, banks.routed, memory, segments ? TOP : 0, false);
    routed.ask_first();
    // Only now: the next launch counts on the groups' being there.
    release_successor();
    routed.run();
#endif
}

// Down projections: a warp has an expert, and a part of the shared one.
constexpr int DOWN_ONE_WARPS = TOP;
// Octs of a lane in a row, and in a warp's part of one.
constexpr int ROW_OCTS = KNOWN_LENGTH / 8 / QUADS, PART_OCTS = ROW_OCTS / DOWN_ONE_WARPS;

template <int SLOT_BYTES>
struct DownOneMemory {
    // Of the experts and of the shared one. Activations come to where operands have been.
    char slots[TOP + 1][SLOT_BYTES];
    uint64 arrivals[TOP + 1];
    // Of the shared expert's steps: products of both terms.
    float products[ROW_OCTS][2][TILE];
};

// Octs of this lane's two rows in a tile.
template <int OCTS>
struct Operands {
    unsigned upper[OCTS][4], lower[OCTS][4];

    // From a slot, from a step on.
    template <typename Format>
    __device__ __forceinline__ void take(const char* slot, int first)
    {
#pragma unroll
        for (int step = 0; step < OCTS / Format::OCTS; step++) {
            typename Format::Raw held[2];
            Slot<Format>::take(slot, 0, first + step, held[0]);
            Slot<Format>::take(slot, 1, first + step, held[1]);
#pragma unroll
            for (int oct = 0; oct < Format::OCTS; oct++) {
                Format::expand(held[0], oct, upper[step * Format::OCTS + oct]);
                Format::expand(held[1], oct, lower[step * Format::OCTS + oct]);
            }
        }
    }

    // Some number that hangs on all of them.
    __device__ __forceinline__ unsigned digest() const
    {
        unsigned bits = 0;
#pragma unroll
        for (int oct = 0; oct < OCTS; oct++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                bits ^= upper[oct][i] ^ lower[oct][i];
        return bits;
    }

    __device__ __forceinline__ void multiply(float (&sums)[4], int oct, const Bytes16& activations) const
    {
        unsigned operand[4];
        take_vector(activations, operand);
        multiply_oct(sums, upper[oct], lower[oct], operand);
    }
};

// A warp's part of the shared expert's row, whose steps are put together when all warps have theirs.
template <typename Format>
struct SharedPart {
    static constexpr int STEPS = PART_OCTS / Format::OCTS, ALL_STEPS = ROW_OCTS / Format::OCTS;

    static __device__ __forceinline__ int first()
    {
        return (threadIdx.x >> 5) * STEPS;
    }

    static __device__ __forceinline__ void multiply(
        const Operands<PART_OCTS>& operands, const Bytes16 (&activations)[PART_OCTS], float (&products)[ROW_OCTS][2][TILE])
    {
        const int line = (threadIdx.x & 31) / 4, quad = threadIdx.x & 3;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            float sums[4] = {};
#pragma unroll
            for (int oct = step * Format::OCTS; oct < (step + 1) * Format::OCTS; oct++)
                operands.multiply(sums, oct, activations[oct]);
            // Of the columns of the first and of the second term.
            if (quad % 2 == 0) {
                products[first() + step][quad / 2][line] = sums[0];
                products[first() + step][quad / 2][line + 8] = sums[2];
            }
        }
    }

    // In the order of a row that a warp has whole.
    static __device__ __forceinline__ float sum_of(const float (&products)[ROW_OCTS][2][TILE], const char* slot, int row)
    {
        float terms[2] = {};
#pragma unroll
        for (int step = 0; step < ALL_STEPS; step++) {
            typename Format::Raw of_step;
            take_scale<Format>(of_step, Slot<Format>::scales_of(slot, row), step);
#pragma unroll
            for (int term = 0; term < 2; term++)
                terms[term] = fmaf(Format::scale(of_step), products[step][term][row], terms[term]);
        }
        return terms[0] + terms[1];
    }
};

// `is_other`: whether the shared expert is in eight bits and the others are not.
template <typename Format, typename Memory>
__device__ __forceinline__ void multiply_one(
    const Down& call, const Banks& banks, bool is_other, bool has_shared, int expert, int path, Memory& memory, float (&sums_of_paths)[TOP + 1][TILE])
{
    constexpr int STEPS = ROW_OCTS / Format::OCTS, EACH = KNOWN_LENGTH / 4 / 32;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, line = lane >> 2, quad = lane & 3, tile = blockIdx.x * TILE;
    char *slot = memory.slots[warp], *shared_slot = memory.slots[TOP];
    if (lane == 0)
        Slot<Format>::ask(banks.routed, expert * call.hidden + tile, slot, memory.arrivals + warp);
    if (has_shared && threadIdx.x == 0) {
        if (is_other)
            Slot<Wide>::ask(banks.shared, tile, shared_slot, memory.arrivals + TOP);
        else
            Slot<Format>::ask(banks.shared, tile, shared_slot, memory.arrivals + TOP);
    }
    Operands<ROW_OCTS> own;
    Operands<PART_OCTS> part;
    if (has_shared) {
        wait_for_phase(shared_address(memory.arrivals + TOP), 0);
        if (is_other)
            part.template take<Wide>(shared_slot, SharedPart<Wide>::first());
        else
            part.template take<Format>(shared_slot, SharedPart<Format>::first());
    }
    wait_for_phase(shared_address(memory.arrivals + warp), 0);
    own.template take<Format>(slot, 0);
    // Operands are made before the wait only if it hangs on them: the compiler would make them where they are used. One wait more does no harm.
    const int64 turns = call.tokens + (own.digest() == 1);
#pragma unroll 1
    for (int64 turn = 0; turn < turns; turn++)
        wait_for_predecessor();
    const Bytes16* act = reinterpret_cast<const Bytes16*>(call.act);
    const int row_length = static_cast<int>(call.width) / 4, term = line / HALF_COLUMNS;
    Bytes16 taken[EACH], of_part[PART_OCTS] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++)
        taken[i] = act[path * row_length + lane + 32 * i];
    if (has_shared)
#pragma unroll
        for (int oct = 0; oct < PART_OCTS; oct++)
            of_part[oct] = act[TOP * row_length + QUADS * (2 * (PART_OCTS * warp + oct) + term) + quad];
    Bytes16* activations = reinterpret_cast<Bytes16*>(slot);
    static_assert(sizeof(Bytes16) * KNOWN_LENGTH / 4 <= Slot<Format>::HIGH, "scales stay where they are");
    __syncwarp();
#pragma unroll
    for (int i = 0; i < EACH; i++)
        activations[lane + 32 * i] = taken[i];
    __syncwarp();
    RowScales<Format, STEPS> scales[2];
    scales[0].take_all(Slot<Format>::scales(slot, 0));
    scales[1].take_all(Slot<Format>::scales(slot, 1));
    float sums[1][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        typename Format::Raw of_step[2];
        float products[4] = {};
#pragma unroll
        for (int oct = step * Format::OCTS; oct < (step + 1) * Format::OCTS; oct++)
            // The other columns have the same token, and are not looked at.
            own.multiply(products, oct, activations[QUADS * (2 * oct + term) + quad]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            scales[half].take(of_step[half], step);
            const float scale = Format::scale(of_step[half]);
            sums[0][2 * half] = fmaf(scale, products[2 * half], sums[0][2 * half]);
            sums[0][2 * half + 1] = fmaf(scale, products[2 * half + 1], sums[0][2 * half + 1]);
        }
    }
    if (has_shared) {
        if (is_other)
            SharedPart<Wide>::multiply(part, of_part, memory.products);
        else
            SharedPart<Format>::multiply(part, of_part, memory.products);
    }
    add_terms(sums, false);
    if (quad == 0) {
        sums_of_paths[path][line] = sums[0][0];
        sums_of_paths[path][line + 8] = sums[0][2];
    }
    __syncthreads();
    if (has_shared && threadIdx.x < TILE)
        sums_of_paths[TOP][threadIdx.x] = is_other ? SharedPart<Wide>::sum_of(memory.products, shared_slot, threadIdx.x)
                                                   : SharedPart<Format>::sum_of(memory.products, shared_slot, threadIdx.x);
}

template <typename Format, bool HAS_OTHER>
__device__ __forceinline__ void run_down_one(const Down& call, const Banks& banks, bool is_shared_other)
{
#if __CUDA_ARCH__ == 900
    constexpr int THREADS = DOWN_ONE_WARPS * 32;
    __shared__ DownMemory<1> own;
    extern __shared__ __align__(128) char dynamic[];
    using Memory = DownOneMemory<slot_bytes<Format, HAS_OTHER>()>;
    Memory& memory = *reinterpret_cast<Memory*>(dynamic);
    if (threadIdx.x <= TOP)
        init_barrier(shared_address(memory.arrivals + threadIdx.x), 1);
    fence_for_copies();
    if (!call.are_groups_ready)
        wait_for_predecessor();
    const bool has_shared = call.paths > TOP;
    const Segment* segment = call.groups->each + (threadIdx.x >> 5) + has_shared;
    const int expert = __ldcg(&segment->expert), path = __ldcg(segment->routes);
    const DownStart<THREADS, 1> start(call);
    start.store(call, own);
    __syncthreads();
    if (start.segments)
        multiply_one<Format>(call, banks, HAS_OTHER && is_shared_other, has_shared, expert, path, memory, own.sums_of_paths);
    put_together<THREADS>(call, own, start.tokens);
#endif
}
