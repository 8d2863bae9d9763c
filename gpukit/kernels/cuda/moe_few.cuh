// Few tokens, in the usual sizes: gate and up projections and down projections in one launch, for which a multiprocessor has one block. Groups of warps
// have units of the gate and up projections, each for a claim of its own, in slots of shared memory; when there are none left, a slot's place is taken by
// tiles of the down projections, so that weights are on their way all the time. Activations are words that are waited for. Whoever waits has nothing left
// to claim: what it waits for is being done, whether or not all blocks are there.

#pragma once

#include "moe_gate_slots.cuh"
#include "moe_slots.cuh"

constexpr int FEW_GROUPS = DOWN_WARPS / GATE_WARPS, GROUP_THREADS = 32 * GATE_WARPS;
// Where a group has two slots, there is a group more, whose warps ask for what comes to these, one for each group, and one for the shared expert in
// another format: whoever asks is late, and would hold up those with which it multiplies. Registers of a thread of each kind; a quarter of a
// multiprocessor has 512 for each of its lanes, and a warp of each group.
constexpr int ASKING_REGISTERS = 32, MULTIPLYING_REGISTERS = 160;
static_assert(ASKING_REGISTERS + FEW_GROUPS * MULTIPLYING_REGISTERS <= 512, "a quarter has a warp of each");

// Accesses of a token, and from one token to the next: those of a step with two octs that are read at once are in different banks.
constexpr int TOKEN_LENGTH = GATE_WARPS * KNOWN_LENGTH / 8, TOKEN_PITCH = TOKEN_LENGTH + QUADS;

// Instead of a first claim: a group that has something else to do first leaves first units to others, and claims later.
constexpr int NOT_CLAIMED = -1;

// Eight bits beside an exponent: the lower seven are 2 + bits / 64, and the sign makes what is to be taken off 4 instead of 2. More instructions than
// `Wide` has, and quicker here. The same numbers, so that sums of all batches overflow alike.
struct FewWide : Wide {
    static __device__ __forceinline__ unsigned pair(unsigned bytes)
    {
        return multiply_add_pair(masked_or(bytes, 0x007f007fu, 0x40004000u), 0x3f803f80u, masked_or(bytes, 0x00800080u, 0xc000c000u));
    }

    static __device__ __forceinline__ void expand(const Raw& raw, int oct, unsigned (&pairs)[4])
    {
        Wide::expand<FewWide>(raw, oct, pairs);
    }
};

// Where there is more to do for as many bytes, rows are in different banks. Elsewhere memory is all that is waited for, and whole lines are copied.
template <typename Format>
constexpr bool IS_SWIZZLED = Format::HAS_SCALE && Format::ORDER != BYTES;

template <typename Format, bool IS_OWN = IS_SWIZZLED<Format>>
struct FewSlots {
    using Gate = GateSlot<Format, false>;
    using Down = Slot<Format, false>;
};

template <typename Format>
struct FewSlots<Format, true> {
    using Gate = SwizzledGateSlot<Format>;
    using Down = SwizzledSlot<Format>;
};

template <typename Format>
using FewGateSlot = typename FewSlots<Format>::Gate;
template <typename Format>
using FewSlot = typename FewSlots<Format>::Down;

// The tensor maps of the banks: of the base, and of high bits that are swizzled too.
template <typename Format>
struct FewMaps {
    static constexpr int EACH = 1 + FewSlot<Format>::IS_HIGH_SWIZZLED;
    TensorMap gate[EACH], shared_gate[EACH], down[EACH], shared_down[EACH];
};

// All warps of a group have so many registers from now on, what it had more or less being the block's.
template <int REGISTERS>
__device__ __forceinline__ void keep_registers()
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers()
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}

// Where an oct of a token is: two octs of a lane make a step, in each of which those of quads lie side by side.
__device__ __forceinline__ constexpr int place_of_oct(int oct)
{
    return oct / (2 * QUADS) * 2 * QUADS + oct % 2 * QUADS + oct % (2 * QUADS) / 2;
}

// A lane's octs of a step of its column's token, in shared memory in the order of a format, or of nibbles where the format takes bytes.
template <typename Format, int STORED>
struct FromTokens {
    static constexpr int SETS = 1;
    static_assert(Format::ORDER == STORED || STORED == NIBBLES && Format::ORDER == BYTES, "one order is made of another");
    const Bytes16* octs;

    __device__ __forceinline__ void take(int oct, unsigned (&operands)[SETS][4]) const
    {
        take_vector(octs[QUADS * oct], operands[0]);
        if (Format::ORDER != STORED) {
            const unsigned a = operands[0][0], b = operands[0][1], c = operands[0][2], d = operands[0][3];
            operands[0][0] = __byte_perm(a, c, 0x5410);
            operands[0][1] = __byte_perm(b, d, 0x5410);
            operands[0][2] = __byte_perm(a, c, 0x7632);
            operands[0][3] = __byte_perm(b, d, 0x7632);
        }
    }

    // Of a step behind this one.
    __device__ __forceinline__ FromTokens of_step(int step) const
    {
        return {octs + place_of_oct(Format::OCTS * QUADS * step)};
    }
};

// A lane's octs of its column's token in all steps of a slice, in registers. They are the same for all units of a warp, so that shared memory has only
// weights to give.
template <typename Format>
struct HeldTokens {
    static constexpr int STEPS = KNOWN_LENGTH / Format::STEP;
    Bytes16 octs[STEPS][Format::OCTS];

    __device__ __forceinline__ explicit HeldTokens(const FromTokens<Format, Format::ORDER>& first)
    {
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int oct = 0; oct < Format::OCTS; oct++)
                octs[step][oct] = first.of_step(step).octs[QUADS * oct];
    }

    __device__ __forceinline__ InOrder<Format> of_step(int step) const
    {
        return {octs[step]};
    }
};

// The tokens in shared memory, in an order; so many warps bring them, of which this is thread `thread`.
template <int WARPS, int ORDER>
__device__ __forceinline__ void bring_tokens(const GateUp& call, int thread, Bytes16 (&tokens)[HALF_COLUMNS][TOKEN_PITCH])
{
    constexpr int APART = 32 * WARPS, ALL = HALF_COLUMNS * TOKEN_LENGTH, EACH = (ALL + APART - 1) / APART;
    Bytes16 taken[EACH];
    // Of fewer tokens the last again: without branches all loads are on their way at once. From the L2: the L1 may have what was there before.
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = thread + i * APART;
        taken[i] = __ldcg(call.x + min(at / TOKEN_LENGTH, static_cast<int>(call.tokens) - 1) * call.x_row + at % TOKEN_LENGTH);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = thread + i * APART;
        if (ALL % APART == 0 || at < ALL)
            tokens[at / TOKEN_LENGTH][place_of_oct(at % TOKEN_LENGTH)] = arranged<ORDER>(taken[i]);
    }
}

// What the warps of a group have of a unit's sums, a column for each token, and what they are together: of a lane's row, gate and up.
struct FewSums {
    alignas(16) float each[GATE_WARPS][TILE][HALF_COLUMNS];

    __device__ __forceinline__ void put(int warp, const float (&sums)[4])
    {
        const int line = (threadIdx.x & 31) / 4, quad = threadIdx.x & 3;
        if (2 * quad < HALF_COLUMNS) {
            *reinterpret_cast<float2*>(&each[warp][line][2 * quad]) = make_float2(sums[0], sums[1]);
            *reinterpret_cast<float2*>(&each[warp][line + 8][2 * quad]) = make_float2(sums[2], sums[3]);
        }
    }

    __device__ __forceinline__ float2 take(int token) const
    {
        const int row = threadIdx.x % 8;
        float gate = each[0][row][token], up = each[0][row + 8][token];
#pragma unroll
        for (int warp = 1; warp < GATE_WARPS; warp++) {
            gate += each[warp][row][token];
            up += each[warp][row + 8][token];
        }
        return make_float2(gate, up);
    }
};

template <typename GateFormat, typename DownFormat, bool HAS_OTHER>
struct FewMemory {
    static constexpr int ORDER = GateFormat::ORDER, GATE_BYTES = FewGateSlot<GateFormat>::BYTES, TILE_BYTES = FewSlot<DownFormat>::BYTES;
    static constexpr int SLOT_BYTES = GATE_BYTES > GATE_WARPS * TILE_BYTES ? GATE_BYTES : GATE_WARPS * TILE_BYTES;
    // Of a group: two where a unit is small. More on its way than memory takes to answer only makes multiprocessors end at different times.
    static constexpr int SLOTS = IS_SWIZZLED<GateFormat> ? 2 : 1;
    static_assert(!IS_SWIZZLED<GateFormat> || SLOT_BYTES % 1024 == 0, "lines are where they would be in the first slot");
    static constexpr bool HAS_ASKERS = SLOTS > 1;
    static constexpr int WARPS = DOWN_WARPS + (HAS_ASKERS ? GATE_WARPS : 0);
    char slots[FEW_GROUPS][SLOTS][SLOT_BYTES];
    // The first group's unit and the first warp's tile of the shared expert in eight bits.
    char other_unit[HAS_OTHER ? FewGateSlot<FewWide>::BYTES : 16];
    char other_tile[HAS_OTHER ? FewSlot<FewWide>::BYTES : 16];
    uint64 gate_arrivals[FEW_GROUPS][SLOTS], gate_ends[FEW_GROUPS][SLOTS], down_arrivals[DOWN_WARPS][SLOTS];
    uint64 other_gate_arrival, other_gate_end, other_down_arrival;
    FewGroups groups;
    FewSums sums_of_units[FEW_GROUPS][2];
    // Which units are in the slots, what groups have claimed first, or NOT_CLAIMED, and which unit of the shared expert in another format is there.
    int units[FEW_GROUPS][SLOTS];
    int first[FEW_GROUPS], other, warps_done;
    DownMemory<HALF_COLUMNS> down;
    Bytes16 tokens[HALF_COLUMNS][TOKEN_PITCH];

    // A warp has what it wants of claims and of what has been chosen, which the next launch takes back: behind the last one that is let go.
    __device__ __forceinline__ void end_claiming()
    {
        if (threadIdx.x % 32 == 0 && atomicAdd(&warps_done, 1) == WARPS - 1)
            release_successor();
    }
};

// The barriers of a group: one for each slot, and the last one for what the first group has besides.
constexpr int GROUP_BARRIERS = 3, LAST_BARRIER = GROUP_BARRIERS - 1;

__device__ __forceinline__ constexpr int barrier_of(int group, int number)
{
    return 1 + group * GROUP_BARRIERS + number;
}

// A warp's part of a group's units of the gate and up projections.
template <typename Format, typename Memory>
struct FewGateStream {
    using Own = FewGateSlot<Format>;
    using Work = GateUpWork<Format, 1, false, true>;
    static constexpr int SLOTS = Memory::SLOTS, STEPS = Own::STEPS;
    static constexpr bool HAS_ASKERS = Memory::HAS_ASKERS;
    Work work;
    Memory& memory;
    int group, warp;

    __device__ __forceinline__ FewGateStream(const GateUp& call, const Banks& banks, Memory& memory)
        : work(call, banks, memory.groups.shared_segments, nullptr, memory.groups.each), memory(memory), group(threadIdx.x / GROUP_THREADS),
          warp(Work::warp())
    {
        work.take_usual();
    }

    // So many threads ask for a unit beside each other.
    static __device__ __forceinline__ void ask(const Work& work, int unit, const char* slot, const uint64* arrival, int thread, int threads)
    {
        const int segment = work.call.tiles.quotient(unit), tile = unit - segment * static_cast<int>(work.call.tiles.value);
        const Bank bank = choose(segment < work.shared_segments, work.banks.shared, work.banks.routed);
        const int width = static_cast<int>(work.call.width), expert = work.segments[segment].expert;
        const CachePolicy policy = policy_evict_first();
        if (thread == 0)
            Own::expect(arrival);
#pragma unroll
        for (int copy = thread; copy < Own::COPIES; copy += threads)
            Own::ask(bank, expert, tile, width, slot, arrival, copy, policy);
    }

    // The first slot's first unit, and which it is, where it has been claimed.
    __device__ __forceinline__ void ask_first(int begin, int end) const
    {
        if (HAS_ASKERS && memory.first[group] == NOT_CLAIMED)
            return;
        const int first = begin + memory.first[group];
        const bool is_first = threadIdx.x % GROUP_THREADS == 0;
        const uint64* arrival = memory.gate_arrivals[group];
        if (is_first)
            memory.units[group][0] = first;
        if (first >= end) {
            if (is_first)
                arrive(shared_address(arrival));
        } else if (threadIdx.x % 32 == 0) {
            ask(work, first, memory.slots[group][0], arrival, warp, GATE_WARPS);
        }
    }

    // This lane's part of the slice's first step of its column's token: a column has the token of its number, whether or not a unit is for it.
    __device__ __forceinline__ FromTokens<Format, Memory::ORDER> tokens() const
    {
        return {memory.tokens[threadIdx.x / 4 % HALF_COLUMNS] + warp * KNOWN_LENGTH / 8 + place_of_oct(Format::OCTS * (threadIdx.x & 3))};
    }

    // The sums of a unit that is there.
    template <typename Tokens>
    __device__ __forceinline__ void multiply(const Tokens& tokens, const char* slot, float (&sums)[1][1][4]) const
    {
        RowScales<Format, Format::HAS_SCALE ? STEPS : 0> scales[2];
        scales[0].take_all(Own::scales(slot, Own::Rows::own(0), warp));
        scales[1].take_all(Own::scales(slot, Own::Rows::own(1), warp));
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            typename Format::Raw held[2];
            Own::take(slot, step, held);
            scales[0].take(held[0], step);
            scales[1].take(held[1], step);
            multiply_step<Format>(sums[0], held[0], held[1], tokens.of_step(step));
        }
    }

    // A warp puts a unit together, and hands activations on: a lane has a row and one of the routes, which are those of the lanes 4 * column. `behind` is
    // done when it has the sums.
    template <typename Behind>
    __device__ __forceinline__ void hand_on(const Place& place, const FewSums& sums, const Behind& behind) const
    {
        const int column = threadIdx.x % 32 / 8, route = __shfl_sync(~0u, static_cast<int>(place.route), 4 * column);
        const float2 all = sums.take(route >> 4);
        __syncwarp();
        behind();
        work.put_activation(place, route, 0, column, all.x, all.y);
    }

    // All units of the group, until nothing comes to any slot; which one that was first. A warp in turn puts a unit together, while the others go on; without
    // a group that asks the first one asks instead.
    template <typename Asker>
    __device__ __forceinline__ int run(Asker& asker) const
    {
        const HeldTokens<Format> held(tokens());
        // Slots that nothing comes to any more, as bits.
        unsigned ended = 0;
        int number = 0;
#pragma unroll 1
        for (; ended != (1 << SLOTS) - 1; number++) {
            const int slot = number % SLOTS;
            if (ended >> slot & 1)
                continue;
            wait_for_phase(shared_address(memory.gate_arrivals[group] + slot), number / SLOTS & 1);
            const int unit = memory.units[group][slot];
            if (unit >= asker.end) {
                ended |= 1u << slot;
                continue;
            }
            const Place place = work.place(unit);
            FewSums& sums_of_unit = memory.sums_of_units[group][number % 2];
            float sums[1][1][4] = {};
            multiply(held, memory.slots[group][slot], sums);
            sums_of_unit.put(warp, sums[0][0]);
            // Sums have two places, so that those of the next unit may come before these have been taken.
            const bool is_asker = !HAS_ASKERS && warp == 0;
            const int its_turn = HAS_ASKERS ? number % GATE_WARPS : 1 + number % (GATE_WARPS - 1);
            if (!is_asker && warp != its_turn) {
                arrive_to_meet<GROUP_THREADS>(barrier_of(group, slot));
                continue;
            }
            meet<GROUP_THREADS>(barrier_of(group, slot));
            // All are done with the slot.
            if (is_asker) {
                if (threadIdx.x % 32 == 0)
                    asker.ask_claimed(slot);
                continue;
            }
            // The slot's next unit comes to these sums too.
            hand_on(place, sums_of_unit, [&] {
                if (HAS_ASKERS && threadIdx.x % 32 == 0)
                    arrive(shared_address(memory.gate_ends[group] + slot));
            });
        }
        return number % SLOTS;
    }
};

// A thread asks for a group's units behind the one claimed first, or for all where none was. With one slot it claims the next unit when it has asked for
// one, because an answer takes its time. Of two slots one is multiplied meanwhile: a unit is claimed when the one in front of it is there, and the second
// slot's first one when the choice is known, which leaves more to groups that are early, and something to blocks that come up late.
template <typename Format, typename Memory>
struct FewAsker {
    using Gates = FewGateStream<Format, Memory>;
    static constexpr int SLOTS = Memory::SLOTS;
    const typename Gates::Work& work;
    Memory& memory;
    int group, begin, end, claimed;

    __device__ __forceinline__ FewAsker(const typename Gates::Work& work, Memory& memory, int group, int begin, int end)
        : work(work), memory(memory), group(group), begin(begin), end(end)
    {
    }

    __device__ __forceinline__ int claim_next() const
    {
        return begin + claim(work.call.groups->claims, 1);
    }

    // Whether what the group has claimed first is a unit.
    __device__ __forceinline__ bool has_first() const
    {
        return begin + memory.first[group] < end;
    }

    // What comes to a slot next, when all are done with what it had; false if nothing does.
    __device__ __forceinline__ bool ask(int slot, int unit) const
    {
        const uint64* arrival = memory.gate_arrivals[group] + slot;
        memory.units[group][slot] = unit;
        if (unit >= end) {
            arrive(shared_address(arrival));
            return false;
        }
        Gates::ask(work, unit, memory.slots[group][slot], arrival, 0, 1);
        return true;
    }

    // What has been claimed.
    __device__ __forceinline__ void ask_claimed(int slot)
    {
        if (ask(slot, claimed))
            claimed = claim_next();
    }

    // All units, as the group ends those in front. When nothing comes to a slot, the first one, `behind` is done.
    template <typename Behind>
    __device__ __forceinline__ void ask_for_all(const Behind& behind) const
    {
        unsigned ended = 0;
        const auto go_on = [&](int slot, bool has_next) {
            if (!has_next && ended == 0)
                behind(slot);
            ended |= !has_next << slot;
        };
        const bool has_claim = memory.first[group] != NOT_CLAIMED;
#pragma unroll 1
        for (int slot = 0; slot < SLOTS; slot++)
            go_on(slot, slot == 0 && has_claim ? has_first() : ask(slot, claim_next()));
#pragma unroll 1
        for (int turn = 0; ended != (1 << SLOTS) - 1; turn++)
#pragma unroll 1
            for (int slot = 0; slot < SLOTS; slot++) {
                if (ended >> slot & 1)
                    continue;
                wait_for_phase(shared_address(memory.gate_arrivals[group] + slot), turn & 1);
                const int unit = claim_next();
                wait_for_phase(shared_address(memory.gate_ends[group] + slot), turn & 1);
                go_on(slot, ask(slot, unit));
            }
    }
};

// A thread asks for a unit of the shared expert in another format.
template <typename Memory>
__device__ __forceinline__ void ask_for_other_unit(const Banks& banks, Memory& memory, int unit)
{
    using Own = FewGateSlot<FewWide>;
    const CachePolicy policy = policy_evict_first();
    Own::expect(&memory.other_gate_arrival);
#pragma unroll
    for (int copy = 0; copy < Own::COPIES; copy++)
        Own::ask(banks.shared, 0, unit, KNOWN_LENGTH, memory.other_unit, &memory.other_gate_arrival, copy, policy);
}

// A thread asks for units of that behind the block's first one, as the first group ends those in front.
template <typename Memory>
__device__ __forceinline__ void ask_for_other_units(const GateUp& call, const Banks& banks, Memory& memory)
{
    const int end = static_cast<int>(call.tiles.value);
    unsigned phase = 0;
#pragma unroll 1
    for (int unit = memory.other; unit < end && memory.groups.shared_segments > 0; phase ^= 1) {
        wait_for_phase(shared_address(&memory.other_gate_arrival), phase);
        const int next = claim(call.groups->claims + 1, 1);
        wait_for_phase(shared_address(&memory.other_gate_end), phase);
        memory.other = unit = next;
        if (unit < end)
            ask_for_other_unit(banks, memory, unit);
        else
            arrive(shared_address(&memory.other_gate_arrival));
    }
}

// The first group's units of that.
template <typename Memory>
__device__ __forceinline__ void run_other_units(const GateUp& call, const Banks& banks, Memory& memory)
{
    static_assert(Memory::HAS_ASKERS, "one of those that ask has nothing else to do");
    const FewGateStream<FewWide, Memory> stream(call, banks, memory);
    const int end = static_cast<int>(call.tiles.value);
    int unit = memory.other;
#pragma unroll 1
    for (unsigned phase = 0; unit < end; phase ^= 1) {
        wait_for_phase(shared_address(&memory.other_gate_arrival), phase);
        unit = memory.other;
        if (unit >= end || memory.groups.shared_segments == 0)
            return;
        const Place place = stream.work.place(unit);
        FewSums& sums_of_unit = memory.sums_of_units[0][0];
        float sums[1][1][4] = {};
        stream.multiply(stream.tokens(), memory.other_unit, sums);
        sums_of_unit.put(stream.warp, sums[0][0]);
        meet<GROUP_THREADS>(barrier_of(0, LAST_BARRIER));
        if (threadIdx.x == 0)
            arrive(shared_address(&memory.other_gate_end));
        if (threadIdx.x < 32)
            stream.hand_on(place, sums_of_unit, [] {});
        meet<GROUP_THREADS>(barrier_of(0, LAST_BARRIER));
    }
}

// What a block of few tokens does: its tile of the down projections, if it has one, and what of the shared expert is in another format.
struct FewParts {
    bool has_shared, has_tile, has_other_units, has_other_tile;
    int tiles;  // of a segment of the gate and up projections

    __device__ __forceinline__ FewParts(const GateUp& gate, const Down& down, bool is_gate_other, bool is_down_other)
        : has_shared(gate.paths > TOP), has_tile(static_cast<int>(blockIdx.x) < static_cast<int>(down.hidden) / TILE),
          has_other_units(is_gate_other && has_shared), has_other_tile(is_down_other && has_shared && has_tile), tiles(static_cast<int>(gate.tiles.value))
    {
    }

    // A warp's first tile of the down projections but that in another format.
    __device__ __forceinline__ int first_tile(int warp) const
    {
        return has_other_tile && warp == 0 ? DOWN_WARPS : warp;
    }
};

// What hangs on no choice where the shared expert may be in another format: a thread asks for that one's tile of the first warp and for a unit for the first
// group, if there are any, and claims first units of all groups. Such a unit takes its group as long as two others: then it claims for the others alone.
template <typename Memory>
__device__ __forceinline__ void begin_other(
    const GateUp& gate, const Banks& gate_banks, const Banks& down_banks, const FewParts& parts, Memory& memory, int* claims)
{
    prefetch_map(gate_banks.routed.maps);
    prefetch_map(down_banks.routed.maps);
    init_barrier(shared_address(&memory.other_gate_arrival), 1);
    init_barrier(shared_address(&memory.other_gate_end), 1);
    init_barrier(shared_address(&memory.other_down_arrival), 1);
    fence_for_copies();
    if (parts.has_other_tile)
        FewSlot<FewWide>::ask(down_banks.shared, blockIdx.x * TILE, memory.other_tile, &memory.other_down_arrival);
    const int other = parts.has_other_units ? claim(claims + 1, 1) : parts.tiles, busy_groups = other < parts.tiles;
    memory.other = other;
    if (busy_groups)
        ask_for_other_unit(gate_banks, memory, other);
    const int first = claim(claims, FEW_GROUPS - busy_groups);
#pragma unroll
    for (int group = 0; group < FEW_GROUPS; group++)
        memory.first[group] = group < busy_groups ? NOT_CLAIMED : first + group - busy_groups;
}

// What a block needs before its first unit: the groups, tokens, barriers, and first claims of the groups that have nothing else to do first. Warps are each
// for themselves: answers take their time where other blocks already have as much as fits on its way.
template <bool HAS_OTHER, typename Memory>
__device__ __forceinline__ void begin_few(const GateUp& gate, const Banks& gate_banks, const Banks& down_banks, const FewParts& parts, Memory& memory)
{
    constexpr int BARRIERS = (2 * FEW_GROUPS + DOWN_WARPS) * Memory::SLOTS, TOKEN_WARPS = Memory::WARPS - 2;
    const int warp = threadIdx.x / 32;
    int* claims = gate.groups->claims;
    if (warp == 0) {
        const int lane = threadIdx.x;
        int id = NO_EXPERT;
        if (lane < gate.tokens * TOP)
            id = wait_for_choice(gate.groups, lane);
        __syncwarp();
        group_lanes(id, parts.has_shared, memory.groups);
    } else if (warp == Memory::WARPS - 1) {
        if constexpr (HAS_OTHER)
            if (threadIdx.x % 32 == 0)
                begin_other(gate, gate_banks, down_banks, parts, memory, claims);
    } else {
        const int thread = threadIdx.x - 32;
        // Else a group may have something else to do first, which is known where that is claimed.
        const bool has_claim = !HAS_OTHER && thread < FEW_GROUPS;
        int first = 0;
        if (has_claim)
            first = claim(claims, 1);
        if (thread < BARRIERS)
            init_barrier(shared_address(memory.gate_arrivals[0] + thread), 1);
        if (thread == 0)
            memory.warps_done = 0;
        fence_for_copies();
        bring_tokens<TOKEN_WARPS, Memory::ORDER>(gate, thread, memory.tokens);
        if (has_claim)
            memory.first[thread] = first;
    }
    prefetch_all(gate_banks.shared.base, gate.shared_bytes);
    prefetch_all(gate.ahead, gate.ahead_bytes);
    __syncthreads();
}

// A thread asks for all units that come to the slots of a group, and behind them for the first tiles of its warps.
template <typename GateFormat, typename DownFormat, typename Memory>
__device__ __forceinline__ void ask_for_group(
    const GateUp& gate, const Down& down, const Banks& gate_banks, const Banks& down_banks, const FewParts& parts, Memory& memory,
    int group, int begin, int end)
{
    using Asker = FewAsker<GateFormat, Memory>;
    const int segments = memory.groups.segments, shared_segments = memory.groups.shared_segments;
    const typename Asker::Gates::Work work(gate, gate_banks, shared_segments, nullptr, memory.groups.each);
    Asker(work, memory, group, begin, end).ask_for_all([&](int slot) {
#pragma unroll 1
        for (int number = 0; number < GATE_WARPS && parts.has_tile; number++) {
            const int warp = group * GATE_WARPS + number, unit = parts.first_tile(warp);
            const Bank bank = choose(unit < shared_segments, down_banks.shared, down_banks.routed);
            if (unit < segments)
                FewSlot<DownFormat>::ask(bank, memory.groups.each[unit].expert * down.hidden + blockIdx.x * TILE,
                                         memory.slots[group][slot] + number * FewSlot<DownFormat>::APART, memory.down_arrivals[warp] + slot, warp);
        }
    });
}

template <typename GateFormat, typename DownFormat, bool HAS_OTHER>
__device__ __forceinline__ void run_experts_few(
    const GateUp& gate, const Down& down, const Banks& gate_banks, const Banks& down_banks, bool is_gate_other, bool is_down_other)
{
#if __CUDA_ARCH__ == 900
    constexpr int THREADS = 32 * DOWN_WARPS;
    // A name's alignment is that of all kernels: other ones' memory begins wherever it may.
    extern __shared__ __align__(1024) char of_lines[];
    using Memory = FewMemory<GateFormat, DownFormat, HAS_OTHER>;
    Memory& memory = *reinterpret_cast<Memory*>(of_lines);
    const FewParts parts(gate, down, HAS_OTHER && is_gate_other, HAS_OTHER && is_down_other);
    // Handed round by a shuffle, the warp's number is known to be the same in all lanes, and takes no register of each.
    const int warp = Memory::HAS_ASKERS ? __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0) : threadIdx.x / 32, group = warp / GATE_WARPS;
    begin_few<HAS_OTHER>(gate, gate_banks, down_banks, parts, memory);
    const int segments = memory.groups.segments, shared_segments = memory.groups.shared_segments;
    // Units of the shared expert in another format are apart.
    const int begin = parts.has_other_units ? shared_segments * parts.tiles : 0, end = segments * parts.tiles;
    if constexpr (Memory::HAS_ASKERS) {
        if (group == FEW_GROUPS) {
            keep_registers<ASKING_REGISTERS>();
            const int served = warp % GATE_WARPS;
            if (threadIdx.x % 32 == 0) {
                if (served < FEW_GROUPS)
                    ask_for_group<GateFormat, DownFormat>(gate, down, gate_banks, down_banks, parts, memory, served, begin, end);
                else if (HAS_OTHER && parts.has_other_units)
                    ask_for_other_units(gate, gate_banks, memory);
            }
            memory.end_claiming();
            return;
        }
        take_registers<MULTIPLYING_REGISTERS>();
    }
    const FewGateStream<GateFormat, Memory> gates(gate, gate_banks, memory);
    gates.ask_first(begin, end);
    FewAsker<GateFormat, Memory> asker(gates.work, memory, group, begin, end);
    if (!Memory::HAS_ASKERS && threadIdx.x % GROUP_THREADS == 0 && asker.has_first())
        asker.claimed = asker.claim_next();
    // Activations of the launch in front of routing have been read, when that has ended.
    wait_for_predecessor();
    const DownRest<THREADS, HALF_COLUMNS> rest(down, parts.has_tile);
    if constexpr (HAS_OTHER)
        if (group == 0 && parts.has_other_units)
            run_other_units(gate, gate_banks, memory);
    const int first_slot = gates.run(asker), first_tile = parts.first_tile(warp);
    const DownWork<DownFormat> work(down, down_banks, shared_segments, memory.down.sums_of_paths);
    // How many segments there are is read again: meanwhile it takes no register.
    SlotStream<DownFormat, FewTokens<Memory::SLOTS>, Memory::SLOT_BYTES, FewSlot<DownFormat>> stream(
        work, memory.groups.each, memory.slots[group][0] + warp % GATE_WARPS * FewSlot<DownFormat>::APART, memory.down_arrivals[warp],
        parts.has_tile ? memory.groups.segments : 0);
    if (!Memory::HAS_ASKERS) {
        // Activations first: they are few bytes.
        stream.take(first_tile);
        stream.ask(first_tile, first_slot);
    }
    memory.end_claiming();
    if (!parts.has_tile)
        return;
    rest.put(memory.down);
    if constexpr (HAS_OTHER)
        if (parts.has_other_tile && warp == 0) {
            const DownWork<FewWide> other_work(down, down_banks, shared_segments, memory.down.sums_of_paths);
            SlotStream<FewWide, FewTokens<1>, FewSlot<FewWide>::BYTES> other_stream(
                other_work, memory.groups.each, memory.other_tile, &memory.other_down_arrival, shared_segments);
            other_stream.take(0);
            other_stream.go_on(0, 0, 0);
            // Whether or not somebody needs it.
            wait_for_phase(shared_address(&memory.other_down_arrival), 0);
        }
    // Behind the other tile: there are not registers for the activations of both.
    if (Memory::HAS_ASKERS)
        stream.take(first_tile);
    stream.go_on(first_tile, first_slot, 0);
    put_together<THREADS, false>(down, memory.down, memory.groups.tokens());
#endif
}
