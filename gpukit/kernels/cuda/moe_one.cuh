// One token: blocks of the gate and up projections and of the down projections beside each other on a multiprocessor, whose registers and shared memory
// they share, so that weights of the second are on their way while the first are multiplied, and operands of the tensor cores when activations come. A
// block of the gate and up projections asks for more than half of the shared memory, to be alone there with one of the down projections. In bfloat16 the
// two do not fit, and down projections come up behind.

#pragma once

#include "moe_gate_slots.cuh"
#include "moe_slots.cuh"

// Registers of a thread of both: each quarter of a multiprocessor has 512 for each of its lanes, and two warps of each block.
constexpr int GATE_ONE_REGISTERS = 72;
constexpr int DOWN_ONE_REGISTERS = 184;
constexpr int GATE_ONE_WARPS = 8;

// A single tile is waited for.
template <typename Format>
using OneGateSlot = GateSlot<Format, true>;
template <typename Format>
using OneSlot = Slot<Format, true>;

// Groups of warps, each of which has units and slots of its own. Where an element with a scale is a byte, a slice of rows is shared by two warps:
// products of its steps are put together at the end, in their order, whoever has made them. All warps then have a unit together, whose weights are
// multiplied while the next one's are on their way. Other formats have more to do for as many bytes, and lose by it what it costs.
template <typename Format>
struct GateGroup {
    static constexpr bool IS_OF_BYTES = Format::HAS_SCALE && Format::ORDER == BYTES;
    static constexpr int SHARERS = IS_OF_BYTES ? 2 : 1, WARPS = GATE_WARPS * SHARERS, GROUPS = GATE_ONE_WARPS / WARPS;
    // Together as many units as a block has of 512 on 132 multiprocessors, if rows are not too long.
    static constexpr int SLOTS = (Format::HAS_SCALE ? 4 : 2) / GROUPS, SLOTS_BYTES = SLOTS * OneGateSlot<Format>::BYTES;
    // The shared expert's units, which are the first group's, have a slot of their own, if there is room for one, beside down projections if these fit.
    static constexpr bool HAS_SHARED_SLOT = !IS_OF_BYTES && Format::HIGH_BYTES < 16;
};

// A slice of the token.
using TokenSlice = Bytes16[KNOWN_LENGTH / 8];

// HAS_OTHER: whether the shared expert may be in eight bits where the others are not.
template <typename Format, bool HAS_OTHER>
struct GateOneMemory {
    using Group = GateGroup<Format>;
    static constexpr int OWN_BYTES = OneGateSlot<Format>::BYTES, OTHER_BYTES = OneGateSlot<Wide>::BYTES;
    static constexpr int SHARED_BYTES = HAS_OTHER && OTHER_BYTES > OWN_BYTES ? OTHER_BYTES : OWN_BYTES, ALL_BYTES = Group::GROUPS * Group::SLOTS_BYTES;
    // Else they come to the last ones of the group's, of which so many are free beside them.
    static constexpr int SHARED_AT = Group::HAS_SHARED_SLOT ? ALL_BYTES : Group::SLOTS_BYTES - SHARED_BYTES;
    static constexpr int FREE_SLOTS = Group::HAS_SHARED_SLOT ? Group::SLOTS : SHARED_AT / OWN_BYTES;
    char slots[Group::HAS_SHARED_SLOT ? ALL_BYTES + SHARED_BYTES : ALL_BYTES];
    // Of slices of rows, in turns; where they are shared out, slots have them.
    float sums[2][Group::GROUPS][Group::SLOTS][GATE_WARPS][TILE];
    float sums_of_shared[2][GATE_WARPS][TILE];
    uint64 arrivals[Group::GROUPS][Group::SLOTS];
    uint64 shared_arrival;
    // In the order of the format, and in that of eight bits.
    TokenSlice token[HAS_OTHER ? 2 : 1][GATE_WARPS];
    Chosen chosen;
};

// The units of this group of warps, of the routed experts or, the first group's, of the shared one. IS_OTHER: of the shared one in eight bits where the
// others are not. UNROLLED: as many steps at once as there are registers for.
template <typename Format, int UNROLLED, bool IS_SHARED, bool IS_OTHER, typename Memory>
struct GateOneStream {
    using Group = typename Memory::Group;
    using Own = OneGateSlot<Format>;
    static constexpr bool IS_SHARED_OUT = Group::SHARERS > 1;
    static constexpr int STEPS = Own::STEPS, EACH = STEPS / Group::SHARERS, SLOTS = IS_SHARED ? 1 : Group::SLOTS;
    const GateUp& call;
    const Bank& bank;
    Memory& memory;
    int tiles, end;

    __device__ __forceinline__ GateOneStream(const GateUp& call, const Bank& bank, Memory& memory, int paths)
        : call(call), bank(bank), memory(memory), tiles(static_cast<int>(call.tiles.value)), end(paths * tiles)
    {
    }

    static __device__ __forceinline__ int group()
    {
        return threadIdx.x / (32 * Group::WARPS);
    }

    // In the group.
    static __device__ __forceinline__ int warp()
    {
        return threadIdx.x / 32 % Group::WARPS;
    }

    static __device__ __forceinline__ int first()
    {
        return blockIdx.x + group() * gridDim.x;
    }

    static __device__ __forceinline__ int apart()
    {
        return (IS_SHARED ? 1 : Group::GROUPS) * gridDim.x;
    }

    __device__ __forceinline__ uint64* arrival(int slot) const
    {
        return IS_SHARED ? &memory.shared_arrival : memory.arrivals[group()] + slot;
    }

    __device__ __forceinline__ char* slot_at(int slot) const
    {
        return memory.slots + (IS_SHARED ? Memory::SHARED_AT : group() * Group::SLOTS_BYTES + slot * Own::BYTES);
    }

    __device__ __forceinline__ float (*sums(int slot, int turn) const)[TILE]
    {
        return IS_SHARED ? memory.sums_of_shared[turn] : memory.sums[turn][group()][slot];
    }

    // Warps ask for what comes into slots from one on, units behind each other from the first one's on.
    template <int WARPS>
    __device__ __forceinline__ void ask(int first_unit, int from, int to) const
    {
        // Slots whose copies are asked for beside each other.
        constexpr int AT_ONCE = least(SLOTS, Own::COPIES <= WARPS / 2 ? 2 : 1);
        const int number = warp() + WARPS * (threadIdx.x & 31), beside = AT_ONCE > 1 ? number / Own::COPIES : 0, copy = number - beside * Own::COPIES;
        if (warp() >= WARPS || beside >= AT_ONCE || copy >= Own::COPIES)
            return;
#pragma unroll 1
        for (int slot = from + beside; slot < to; slot += AT_ONCE) {
            const int unit = first_unit + slot * apart();
            if (unit >= end)
                return;
            const int path = call.tiles.quotient(unit), expert = IS_SHARED ? 0 : memory.chosen.ids[path];
            if (copy == 0)
                Own::expect(arrival(slot));
            Own::ask(bank, expert, unit - path * tiles, static_cast<int>(call.width), slot_at(slot), arrival(slot), copy, policy_evict_first());
        }
    }

    static __device__ __forceinline__ void meet_group()
    {
        meet<32 * Group::WARPS>(1 + group());
    }

    // Where products of a step and a row are: in place of weights of the first rows, which have been read.
    __device__ __forceinline__ float* product(int slot, int slice, int step, int row) const
    {
        constexpr int ROWS = least(Format::STEP_BYTES / sizeof(float), TILE);
        const int of_row = Own::Rows::place(row / ROWS, Own::ROW, Own::Rows::GAP), of_step = (slice * STEPS + step) * Format::STEP_BYTES;
        return reinterpret_cast<float*>(slot_at(slot) + of_row + of_step) + row % ROWS;
    }

    __device__ __forceinline__ void multiply(int slot, unsigned turn) const
    {
        const int upper = Own::Rows::own(0), lower = Own::Rows::own(1), quad = threadIdx.x & 3;
        const int slice = warp() % GATE_WARPS, from = warp() / GATE_WARPS * EACH;
        wait_for_phase(shared_address(arrival(slot)), turn);
        const char* own = slot_at(slot);
        const TokenSlice& token = memory.token[IS_OTHER][slice];
        const auto octs_of = [&](int step) { return InOrder<Format>{token + (QUADS * step + quad) * Format::OCTS}; };
        if constexpr (IS_SHARED_OUT) {
            static_assert(EACH % UNROLLED == 0, "steps at once are all there");
            // From this warp's steps on.
            const char* const own_steps = own + from * Format::STEP_BYTES;
            const InOrder<Format> own_octs = octs_of(from);
            float* const own_products = product(slot, slice, from, upper);
#pragma unroll
            for (int begin = 0; begin < EACH; begin += UNROLLED) {
                float products[UNROLLED][1][4] = {};
#pragma unroll
                for (int i = 0; i < UNROLLED; i++) {
                    typename Format::Raw held[2];
                    Own::take(own_steps, begin + i, held);
                    multiply_unscaled<Format>(products[i], held[0], held[1], InOrder<Format>{own_octs.octs + QUADS * Format::OCTS * (begin + i)});
                }
                // Where they go all lanes have read. Of columns, which all have the same token, only the first is looked at.
                __syncwarp();
                if (quad == 0)
#pragma unroll
                    for (int i = 0; i < UNROLLED; i++) {
                        float* of_step = own_products + (begin + i) * Format::STEP_BYTES / sizeof(float);
                        of_step[0] = products[i][0][0];
                        of_step[Own::Rows::APART] = products[i][0][2];
                    }
            }
        } else {
            float sums_of_columns[1][4] = {};
#pragma unroll UNROLLED
            for (int step = 0; step < STEPS; step++) {
                typename Format::Raw held[2];
                Own::take(own, step, held);
                take_scale<Format>(held[0], Own::scales(own, upper, slice), step);
                take_scale<Format>(held[1], Own::scales(own, lower, slice), step);
                multiply_step<Format>(sums_of_columns, held[0], held[1], octs_of(step));
            }
            if (quad == 0) {
                sums(slot, turn)[slice][upper] = sums_of_columns[0][0];
                sums(slot, turn)[slice][lower] = sums_of_columns[0][2];
            }
        }
    }

    // The sum of a row's slice.
    __device__ __forceinline__ float sum_of(int slot, int turn, int slice, int row) const
    {
        if constexpr (!IS_SHARED_OUT)
            return sums(slot, turn)[slice][row];
        RowScales<Format, STEPS> scales;
        scales.take_all(Own::scales(slot_at(slot), row, slice));
        float sum = 0.0f;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            typename Format::Raw of_step;
            scales.take(of_step, step);
            sum = fmaf(Format::scale(of_step), *product(slot, slice, step, row), sum);
        }
        return sum;
    }

    // Where this lane's word of a unit's activations goes.
    __device__ __forceinline__ unsigned* place(int unit) const
    {
        const int number = call.tiles.quotient(unit), path = IS_SHARED ? TOP : number;
        const Handing handing(IS_SHARED ? call.shared_handing : call.handing);
        return call.act + path * call.width + place_in_row(handing, unit - number * tiles);
    }

    // A warp puts together what all have made: this lane's word.
    __device__ __forceinline__ unsigned finish(int slot, int turn) const
    {
        const int lane = threadIdx.x & 31, element = lane % 8;
        const float of_gate = sum_of(slot, turn, lane / 8, element), of_up = sum_of(slot, turn, lane / 8, element + 8);
        float gate = of_gate, up = of_up;
#pragma unroll
        for (int slice = 1; slice < GATE_WARPS; slice++) {
            gate += __shfl_sync(~0u, of_gate, 8 * slice + element);
            up += __shfl_sync(~0u, of_up, 8 * slice + element);
        }
        return word_of_oct(silu(gate) * up, Handing(IS_SHARED ? call.shared_handing : call.handing));
    }

    // What comes into all slots has been asked for. `behind_reading`: what is done when the last slots have been read.
    template <typename Behind>
    __device__ __forceinline__ void run(const Behind& behind_reading) const
    {
        unsigned turn = 0;
#pragma unroll 1
        for (int unit = first(); unit < end; unit += SLOTS * apart(), turn ^= 1) {
            const int later = unit + SLOTS * apart(), own = unit + warp() * apart();
            // Before there is something to do.
            unsigned* const to = place(own);
            unsigned word;
#pragma unroll 1
            for (int slot = 0; slot < SLOTS && unit + slot * apart() < end; slot++)
                multiply(slot, turn);
            // Copies come behind what has been stored in their place.
            if (IS_SHARED_OUT)
                fence_for_copies();
            meet_group();
            if (!IS_SHARED_OUT)
                ask<Group::WARPS>(later, 0, SLOTS);
            const bool has_own = warp() < SLOTS && own < end;
            if (has_own)
                word = finish(warp(), turn);
            if (IS_SHARED_OUT && later < end) {
                meet_group();
                ask<Group::WARPS>(later, 0, SLOTS);
            }
            if (later >= end)
                behind_reading();
            // Last of all: fences would wait for it.
            if (has_own && threadIdx.x % 32 < 8)
                *to = word;
        }
    }
};

// A block chooses from scores that are there, and says what, or is told by what the launch in front has grouped.
__device__ __forceinline__ void choose_for_one(const GateUp& call, ScoresMemory& memory, Chosen& chosen)
{
    const bool has_shared = call.paths > TOP;
    if (call.has_scores) {
        const float shared = has_shared ? memory.scores[call.experts] : 0.0f;
        choose_in_block(memory.scores[min(static_cast<int>(threadIdx.x), call.experts - 1)], shared, call.experts, memory, chosen);
        for (int copy = blockIdx.x; copy < CHOICE_COPIES && threadIdx.x < TOP; copy += gridDim.x)
            store_relaxed(call.groups->choices[copy] + threadIdx.x, id_of(chosen, threadIdx.x));
    } else {
        const Segment* segment = call.groups->each + has_shared + threadIdx.x % TOP;
        const int segments = __ldcg(&call.groups->segments), expert = __ldcg(&segment->expert), path = __ldcg(segment->routes);
        // A token without a choice has no segments.
        if (threadIdx.x == 0)
            chosen.is_bad = !segments;
        if (segments && threadIdx.x < TOP)
            chosen.ids[path] = expert;
        __syncthreads();
    }
}

// The shared expert hangs on no choice: its units are asked for first, and multiplied while those of the routed experts are on their way.
template <typename Format, int UNROLLED, bool HAS_OTHER>
__device__ __forceinline__ void run_gate_up_one(const GateUp& call, const Banks& banks, bool is_shared_other)
{
#if __CUDA_ARCH__ == 900
    extern __shared__ __align__(128) char dynamic[];
    using Memory = GateOneMemory<Format, HAS_OTHER>;
    using Group = typename Memory::Group;
    Memory& memory = *reinterpret_cast<Memory*>(dynamic);
    // Before weights come to the slots.
    ScoresMemory& choice = *reinterpret_cast<ScoresMemory*>(dynamic);
    static_assert(sizeof(ScoresMemory) <= Memory::SHARED_AT, "the shared expert's slot is elsewhere");
    const bool has_shared = call.paths > TOP, is_other = HAS_OTHER && is_shared_other;
    // One of the two, by the format that the shared expert is in.
    using OtherFormat = typename Choice<HAS_OTHER, Wide, Format>::type;
    const GateOneStream<Format, UNROLLED, true, false, Memory> shared(call, banks.shared, memory, has_shared);
    const GateOneStream<OtherFormat, UNROLLED, true, HAS_OTHER, Memory> other(call, banks.shared, memory, has_shared);
    const bool has_unit_of_shared = shared.group() == 0 && shared.first() < shared.end;
    if (threadIdx.x < 32) {
        if (threadIdx.x < Group::GROUPS * Group::SLOTS + 1)
            init_barrier(shared_address(memory.arrivals[0] + threadIdx.x), 1);
        fence_for_copies();
        __syncwarp();
        if (is_other)
            other.template ask<1>(other.first(), 0, 1);
        else
            shared.template ask<1>(shared.first(), 0, 1);
    }
    begin_choice(choice, memory.chosen);
    // Early: fences wait for them.
    prefetch_all(call.ahead, call.ahead_bytes);
    constexpr int LENGTH = KNOWN_LENGTH / 8, THREADS = 32 * GATE_ONE_WARPS;
    static_assert(GATE_WARPS * LENGTH == THREADS && MOST_EXPERTS == THREADS, "a thread has an access of the token, and an expert");
    // By warps that have nothing else to do.
    if (call.has_scores)
        wait_for_scores(call.groups, call.experts + has_shared, THREADS / 2, choice);
    else
        wait_for_predecessor();
    __syncthreads();
    // From the L2: the L1 may have what was there before.
    const Bytes16 oct = __ldcg(call.x + threadIdx.x);
    choose_for_one(call, choice, memory.chosen);
    // The slots have had other things.
    fence_for_copies();
    const bool is_good = !memory.chosen.is_bad;
    const GateOneStream<Format, UNROLLED, false, false, Memory> routed(call, banks.routed, memory, is_good ? TOP : 0);
    routed.template ask<Group::WARPS>(routed.first(), 0, has_unit_of_shared ? Memory::FREE_SLOTS : Group::SLOTS);
    memory.token[0][threadIdx.x / LENGTH][threadIdx.x % LENGTH] = arranged<Format::ORDER>(oct);
    if (is_other)
        memory.token[HAS_OTHER][threadIdx.x / LENGTH][threadIdx.x % LENGTH] = arranged<Wide::ORDER>(oct);
    __syncthreads();
    // Later than weights are asked for: those of the next launch come behind.
    release_successor();
    if (call.has_scores && !is_good && blockIdx.x == 0 && threadIdx.x == 0)
        count(call.signal, OUT_OF_RANGE);
    const auto ask_for_the_rest = [&] {
        if constexpr (Memory::FREE_SLOTS < Group::SLOTS) {
            shared.meet_group();
            routed.template ask<Group::WARPS>(routed.first(), Memory::FREE_SLOTS, Group::SLOTS);
        }
    };
    if (has_unit_of_shared) {
        if (is_other)
            other.run(ask_for_the_rest);
        else
            shared.run(ask_for_the_rest);
    }
    routed.run([] {});
    // Whoever waits for this launch counts on those in front of it.
    wait_for_predecessor();
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
            OneSlot<Format>::take(slot, 0, first + step, held[0]);
            OneSlot<Format>::take(slot, 1, first + step, held[1]);
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
        const int quad = threadIdx.x & 3;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            float sums[4] = {};
#pragma unroll
            for (int oct = step * Format::OCTS; oct < (step + 1) * Format::OCTS; oct++)
                operands.multiply(sums, oct, activations[oct]);
            // Of the columns of the first and of the second term.
            if (quad % 2 == 0) {
                products[first() + step][quad / 2][OneSlot<Format>::Rows::own(0)] = sums[0];
                products[first() + step][quad / 2][OneSlot<Format>::Rows::own(1)] = sums[2];
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
            take_scale<Format>(of_step, OneSlot<Format>::scales_of(slot, row), step);
#pragma unroll
            for (int term = 0; term < 2; term++)
                terms[term] = fmaf(Format::scale(of_step), products[step][term][row], terms[term]);
        }
        return terms[0] + terms[1];
    }
};

// `is_other`: whether the shared expert is in eight bits and the others are not.
template <typename Format, typename Memory>
__device__ __forceinline__ void ask_for_one(const Down& call, const Banks& banks, bool is_other, bool has_shared, int expert, Memory& memory)
{
    const int warp = threadIdx.x >> 5, tile = blockIdx.x * TILE;
    if (threadIdx.x % 32 == 0)
        OneSlot<Format>::ask(banks.routed, expert * call.hidden + tile, memory.slots[warp], memory.arrivals + warp);
    if (has_shared && threadIdx.x == 0) {
        if (is_other)
            OneSlot<Wide>::ask(banks.shared, tile, memory.slots[TOP], memory.arrivals + TOP);
        else
            OneSlot<Format>::ask(banks.shared, tile, memory.slots[TOP], memory.arrivals + TOP);
    }
}

template <typename Format, typename Memory>
__device__ __forceinline__ void multiply_one(
    const Down& call, bool is_other, bool has_shared, int path, Memory& memory, float (&sums_of_paths)[TOP + 1][TILE])
{
    constexpr int STEPS = ROW_OCTS / Format::OCTS, EACH = KNOWN_LENGTH / 4 / 32;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, line = lane >> 2, quad = lane & 3;
    char *slot = memory.slots[warp], *shared_slot = memory.slots[TOP];
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
    release_successor();
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
    static_assert(sizeof(Bytes16) * KNOWN_LENGTH / 4 <= OneSlot<Format>::HIGH, "scales stay where they are");
    __syncwarp();
#pragma unroll
    for (int i = 0; i < EACH; i++)
        activations[lane + 32 * i] = taken[i];
    __syncwarp();
    RowScales<Format, STEPS> scales[2];
    scales[0].take_all(OneSlot<Format>::scales(slot, 0));
    scales[1].take_all(OneSlot<Format>::scales(slot, 1));
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
        sums_of_paths[path][OneSlot<Format>::Rows::own(0)] = sums[0][0];
        sums_of_paths[path][OneSlot<Format>::Rows::own(1)] = sums[0][2];
    }
    __syncthreads();
}

// The end of a block, when all warps have their sums: a thread has a row, and the shared expert's sum of it. `put_together` would wait and
// meet once more.
template <typename Format, typename Memory>
__device__ __forceinline__ void add_one(const Down& call, bool is_other, bool has_shared, const Memory& memory, const DownMemory<1>& rest)
{
    const int row = threadIdx.x;
    if (row >= TILE)
        return;
    float sum = rest.with_experts(rest.residuals[row], 0, row);
    if (has_shared) {
        const char* slot = memory.slots[TOP];
        const float of_shared = is_other ? SharedPart<Wide>::sum_of(memory.products, slot, row) : SharedPart<Format>::sum_of(memory.products, slot, row);
        sum = fmaf(rest.weights[TOP], of_shared, sum);
    }
    call.dest[blockIdx.x * TILE + row] = float_to_bf16(sum);
}

template <typename Format, bool HAS_OTHER>
__device__ __forceinline__ void run_down_one(const Down& call, const Banks& banks, bool is_shared_other)
{
#if __CUDA_ARCH__ == 900
    constexpr int THREADS = DOWN_ONE_WARPS * 32;
    __shared__ DownMemory<1> own;
    extern __shared__ __align__(128) char dynamic[];
    using Memory = DownOneMemory<slot_bytes<Format, HAS_OTHER, true>()>;
    Memory& memory = *reinterpret_cast<Memory*>(dynamic);
    const bool has_shared = call.paths > TOP, is_other = HAS_OTHER && is_shared_other;
    if (threadIdx.x <= TOP)
        init_barrier(shared_address(memory.arrivals + threadIdx.x), 1);
    fence_for_copies();
    int expert, path = threadIdx.x >> 5;
    bool is_good;
    ChosenScores scores;
    if (call.has_choice) {
        const int id = wait_for_choice(call.groups, threadIdx.x % TOP);
        // On their way before weights are.
        if (path == 0)
            scores = ChosenScores(call.groups, id, call.experts, has_shared);
        expert = __shfl_sync(~0u, id, path);
        is_good = expert >= 0;
    } else {
        if (!call.are_groups_ready)
            wait_for_predecessor();
        const Segment* segment = call.groups->each + path + has_shared;
        expert = __ldcg(&segment->expert);
        path = __ldcg(segment->routes);
        is_good = __ldcg(&call.groups->segments);
    }
    __syncthreads();
    if (is_good) {
        ask_for_one<Format>(call, banks, is_other, has_shared, expert, memory);
        if (call.has_choice && path == 0)
            scores.weigh(own.weights);
        bring_residuals<THREADS>(call, own);
        // The next launch may take back words that have been waited for, as soon as it is let go: all have what they want.
        __syncthreads();
        multiply_one<Format>(call, is_other, has_shared, path, memory, own.sums_of_paths);
        add_one<Format>(call, is_other, has_shared, memory, own);
    } else {
        // Whoever waits for this launch counts on those in front of it.
        wait_for_predecessor();
        release_successor();
    }
#endif
}
