// Device code of the experts of few tokens in one launch: gate and up projections, down projections and their weighted sum, as `kernels/moe.py`
// promises them. Weights come to shared memory in the order in which they are needed, asked for by warps that do nothing else, so that the memory
// never waits for sums, nor the down projections' weights for the activations. Blocks take gate and up projections from a counter until there are no
// more: who waits for activations waits for blocks that are running, however many of them there are. All sums are taken in the order of moe.cu.

#include "exchange.cuh"
#include "moe.cuh"

// Warps that sum up: a unit is a group's, a quarter of it each warp's.
constexpr int GROUP_WARPS = 4;
constexpr int GROUPS = 3;
constexpr int GROUP_THREADS = 32 * GROUP_WARPS;
// Warps that ask for weights, and with them one that takes work.
constexpr int ASKING_WARPS = 3;
constexpr int OTHER_WARPS = ASKING_WARPS + 1;
constexpr int SUMMING_WARPS = GROUPS * GROUP_WARPS;
constexpr int SUMMING_THREADS = 32 * SUMMING_WARPS;
constexpr int EXPERTS_THREADS = 32 * (SUMMING_WARPS + OTHER_WARPS);
// Shared memory of a block, sized at the launch.
constexpr int SHARED_BYTES = 227 * 1024;
// Most units that are on their way, more than there are groups, and turns that have been taken.
constexpr int ENTRIES = 16;
constexpr int CLAIMS = 2;
static_assert(GROUPS < ENTRIES, "a round of the ring is longer than one of the groups");
// Rows of a tile of gate and up projections that lie side by side.
constexpr int GATE_ROWS = TILE / 2;
// Octs of activations, or of their terms, that a warp has in shared memory at once.
constexpr int VECTORS = 128;
constexpr int BUFFER_BYTES = 16 * VECTORS;
static_assert(TILE * COLUMNS * 4 <= BUFFER_BYTES, "a warp's sums take the place of its activations");
// Numbers of barriers for some of a block's warps: all groups', and from the second on one for each group.
constexpr int ALL_GROUPS_BARRIER = 1;
constexpr int FIRST_GROUP_BARRIER = 2;

// COMBINE and END go to each group: the sums of a tile are all there, and there is nothing more.
enum Kind { GATE_UP, DOWN, COMBINE, END };

struct alignas(32) Unit {
    int kind;
    int segment;  // the first of up to four for down projections
    int tile;
    int at;           // of its weights
    int piece_bytes;  // from one warp's to the next's in down projections
};

struct Experts {
    const Bytes16* x;
    int64 x_row;
    int64 hidden;
    int64 width;
    const Groups* groups;
    Counts* counts;             // of the groups
    unsigned* act;              // [tokens, paths, width], handed on as terms, absent at first
    int64 paths;
    int handing, shared_handing;
    const float* alpha;         // [tokens, TOP]
    const float* shared_scale;  // [tokens], 0 without a shared expert
    Bytes2* dest;
    int64 dest_row;
    int64 tokens;
    int64 most_segments;
    // What all tokens need, which is known before the choice: the shared expert's rows.
    int64 shared_bytes;
    const char* ahead;
    int64 ahead_bytes;
};

// Units on their way: each is told before its bytes come.
struct Ring {
    uint64 told[ENTRIES];
    uint64 filled[ENTRIES];
    uint64 emptied[ENTRIES];
    uint64 all_done;
    uint64 claimed[CLAIMS];
    uint64 taken[CLAIMS];
    int claims[CLAIMS];  // turns
    int segments_there, shared_segments;
    Unit units[ENTRIES];
};

constexpr int RING_BYTES = 960;
static_assert(sizeof(Ring) == RING_BYTES, "the plan of the launch counts on it");

extern __shared__ __align__(1024) unsigned char at_launch[];

// A value of which the compiler does not know where it is from: what hangs on it is worked out where it is needed, and not in registers all the time.
__device__ __forceinline__ unsigned opaque(unsigned value)
{
    asm volatile("" : "+r"(value));
    return value;
}

// Rows of a bank that lie side by side are staged plane by plane, those of the base in parts, a little apart: four rows are read at once, each at the
// same place, and come from parts of their own, so that they are in different banks.
template <typename Format>
struct Staging {
    static constexpr int PARTS = 4, COPIES = PARTS + 1 + (Format::HIGH_BYTES > 0);
    int rows, steps;

    __device__ __forceinline__ Staging(int rows, int64 length) : rows(rows), steps(opaque(static_cast<unsigned>(length)) / Format::STEP) {}

    __device__ __forceinline__ int high_begin() const
    {
        return rows * steps * Format::STEP_BYTES + PARTS * Format::BASE_PAD;
    }

    __device__ __forceinline__ int scales_begin() const
    {
        return high_begin() + rows * steps * Format::HIGH_BYTES;
    }

    __device__ __forceinline__ int bytes() const
    {
        return scales_begin() + rows * steps * 2;
    }

    __device__ __forceinline__ int copied_bytes() const
    {
        return bytes() - PARTS * Format::BASE_PAD;
    }

    // Row `number` of a part.
    __device__ __forceinline__ StagedRow row(unsigned at, int part, int number) const
    {
        const int before = (part * (rows / PARTS) + number) * steps;
        const unsigned base = at + before * Format::STEP_BYTES + part * Format::BASE_PAD;
        return {base, at + high_begin() + before * Format::HIGH_BYTES, at + scales_begin() + before * 2};
    }

    // One of its copies: a part of the base, behind them the scales and the high bits.
    __device__ __forceinline__ void ask(int number, unsigned to, const Bank& bank, int first, unsigned barrier, CachePolicy policy) const
    {
        const bool is_base = number < PARTS, is_scales = number == PARTS;
        const int part_rows = rows / PARTS, begin = is_base ? number * part_rows : 0;
        const int64 before = static_cast<int64>(first + begin) * steps;
        const StagedRow target = row(to, is_base ? number : 0, 0);
        const int step_bytes = is_base ? Format::STEP_BYTES : is_scales ? 2 : Format::HIGH_BYTES;
        const char* plane = is_base ? bank.base : is_scales ? bank.scales : bank.high;
        copy_in_bulk(
            is_base ? target.base : is_scales ? target.scales : target.high, plane + before * step_bytes,
            (is_base ? part_rows : rows) * steps * step_bytes, barrier, policy);
    }
};

// A warp's lines of a tile: which of its lanes' lines has a row of the eight that lie side by side, and which row of sixteen a line is.
__device__ __forceinline__ int gate_line(int row)
{
    return row % 2 * 4 + row / 2;
}

__device__ __forceinline__ int down_row(int line)
{
    return line % 4 * 4 + line / 4;
}

// A lane's octs of a step in shared memory, in their format's order.
template <int TERMS_OF_OCT>
struct Shared {
    static constexpr int TERMS = TERMS_OF_OCT;
    unsigned at;
    unsigned apart;

    __device__ __forceinline__ void expand(int oct, unsigned (&terms)[TERMS][4]) const
    {
#pragma unroll
        for (int term = 0; term < TERMS; term++) {
            const Bytes16 v = load_shared16(at + oct * apart + 16 * term);
            terms[term][0] = v.x;
            terms[term][1] = v.y;
            terms[term][2] = v.z;
            terms[term][3] = v.w;
        }
    }
};

// A segment's activations on their way to a warp's shared memory, as many octs of all its tokens at once as there is room for, each of two terms.
// Other blocks of the launch write them.
template <typename Format>
struct Activations {
    static constexpr int TERMS = 2, LOADS = 2;
    const Segment& segment;
    unsigned buffer, thread;
    int octs, log_tokens, log_octs;
    Bytes16 taken[LOADS][TERMS];

    __device__ __forceinline__ Activations(const Segment& segment, unsigned buffer, unsigned thread, int octs)
        : segment(segment), buffer(buffer), thread(thread), octs(octs)
    {
        log_tokens = 32 - __clz(segment.count - 1);
        log_octs = 6 - log_tokens;
    }

    // Where the lane's load is from: an oct past `first`, and its token.
    __device__ __forceinline__ void name(int load, int& oct, int& token) const
    {
        const int number = 32 * load + (thread & 31);
        oct = number & ((1 << log_octs) - 1);
        token = number >> log_octs;
    }

    template <typename RowOf>
    __device__ __forceinline__ void fetch(int first, RowOf row_of)
    {
#pragma unroll
        for (int load = 0; load < LOADS; load++) {
            int oct, token;
            name(load, oct, token);
            const bool is_there = token < segment.count && first + oct < octs;
            const Bytes16* from = row_of(is_there ? segment.routes[token] : segment.routes[0]);
            from += Handing::place(first + oct, Format::OCTS);
#pragma unroll
            for (int term = 0; term < TERMS; term++)
                taken[load][term] = is_there ? load_relaxed(from + QUADS * term) : Bytes16{};
        }
    }

    // Whether all of what was fetched has been written.
    __device__ __forceinline__ bool are_there() const
    {
        bool is_absent = false;
#pragma unroll
        for (int load = 0; load < LOADS; load++)
#pragma unroll
            for (int term = 0; term < TERMS; term++)
                is_absent |= is_part_absent(taken[load][term]);
        return !__any_sync(~0u, is_absent);
    }

    __device__ __forceinline__ void put(int first) const
    {
#pragma unroll
        for (int load = 0; load < LOADS; load++) {
            int oct, token;
            name(load, oct, token);
            if (first + oct >= octs)
                continue;
#pragma unroll
            for (int term = 0; term < TERMS; term++)
                store_shared16(buffer + 16 * ((((oct << log_tokens) + token) * TERMS) + term), taken[load][term]);
        }
    }

    template <typename RowOf>
    __device__ __forceinline__ void bring(int first, RowOf row_of)
    {
        do
            fetch(first, row_of);
        while (!are_there());
        put(first);
        __syncwarp();
    }

    // Columns without a token have the first one's: nobody looks at their sums.
    __device__ __forceinline__ Shared<TERMS> first_step() const
    {
        const int line = (thread & 31) >> 2, quad = thread & 3, token = line < segment.count ? line : 0;
        const unsigned apart = 16 * TERMS << log_tokens;
        return {buffer + quad * Format::OCTS * apart + 16 * TERMS * token, apart};
    }
};

// Elsewhere registers do not suffice, or nobody has measured it.
constexpr bool IS_MEASURED = __CUDA_ARCH__ == 900;

// Sums over steps whose activations are all in shared memory, `STEP_BYTES` apart. Weights of a step are asked for under the sums of the one before.
template <typename Format, int STEPS, int STEP_BYTES, int TERMS>
__device__ __forceinline__ void sum_straight(
    float (&sums)[4], const StagedRow& upper, const StagedRow& lower, int begin, const Shared<TERMS>& first, int quad)
{
    static_assert(STEPS % 8 == 0, "scales come sixteen bytes at a time");
    Bytes16 scales[2];
    typename Format::Raw held[2][2];
    Format::take(held[0][0], upper, begin, quad);
    Format::take(held[0][1], lower, begin, quad);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        if (i % 8 == 0) {
            scales[0] = load_shared16(upper.scales + 2 * (begin + i));
            scales[1] = load_shared16(lower.scales + 2 * (begin + i));
        }
        if (i + 1 < STEPS) {
            Format::take(held[(i + 1) % 2][0], upper, begin + i + 1, quad);
            Format::take(held[(i + 1) % 2][1], lower, begin + i + 1, quad);
        }
#pragma unroll
        for (int row = 0; row < 2; row++)
            Format::take_scale(held[i % 2][row], scales_of(scales[row], i), i);
        multiply_step<Format>(sums, held[i % 2][0], held[i % 2][1], Shared<TERMS>{first.at + i * STEP_BYTES, first.apart});
        // Loads of later steps do not come before: there are not so many registers.
        if (STEPS > 8 && i % 8 == 7)
            __syncwarp();
    }
}

template <typename Format, int TERMS>
__device__ __forceinline__ void sum_in_turns(
    float (&sums)[4], const StagedRow& upper, const StagedRow& lower, int begin, int steps, const Shared<TERMS>& first, unsigned step_bytes, int quad)
{
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
        typename Format::Raw one, other;
        const int at = begin + i;
        Format::take(one, upper, at, quad);
        Format::take(other, lower, at, quad);
        Format::take_scale(one, load_shared4(upper.scales + 4 * (at / 2)), at);
        Format::take_scale(other, load_shared4(lower.scales + 4 * (at / 2)), at);
        multiply_step<Format>(sums, one, other, Shared<TERMS>{first.at + i * step_bytes, first.apart});
    }
}

// A number that goes on, as a place among so many and the parity of its round.
template <int COUNT>
struct Cursor {
    static_assert((COUNT & (COUNT - 1)) == 0, "places are the lowest bits");
    unsigned number = 0;

    __device__ __forceinline__ int place() const
    {
        return number % COUNT;
    }

    __device__ __forceinline__ int parity() const
    {
        return number / COUNT & 1;
    }
};

struct Block {
    const Experts& call;
    Ring& ring;
    const Segment* segments;
    // All tokens in the orders of the two formats.
    unsigned tokens_at, other_tokens_at, token_bytes;

    __device__ __forceinline__ int segments_there() const
    {
        return load_count(&ring.segments_there);
    }

    __device__ __forceinline__ int shared_segments() const
    {
        return load_count(&ring.shared_segments);
    }

    __device__ __forceinline__ int gate_units() const
    {
        return segments_there() * (static_cast<int>(call.width) / GATE_ROWS);
    }

    // Looked up each time: registers are dear.
    __device__ __forceinline__ static int load_count(const int* from)
    {
        return static_cast<int>(load_shared4(shared_address(from)));
    }
};

// Gate and up projections are done in turns, which blocks take from a counter. The first turns, as many as there are blocks, are most of a block's
// share; the others, a unit each, are to even out.
struct Turns {
    int units, first_length;

    __device__ __forceinline__ explicit Turns(const Block& block) : units(block.gate_units())
    {
        const int share = units / static_cast<int>(gridDim.x);
        first_length = max(1, share - share / 8);
    }

    __device__ __forceinline__ int begin(int turn) const
    {
        const int long_ones = min(turn, static_cast<int>(gridDim.x));
        return min(long_ones * first_length + (turn - long_ones), units);
    }
};

__device__ __forceinline__ int take_turn(const Experts& call)
{
    return static_cast<int>(atomicAdd(&call.counts->taken, 1));
}

// The warp that takes turns, the next while the other warps have some in hand, and waits for all results: a single lane of a block, so that it does
// not keep from the memory those that it waits for. That most are there is known from their number, that all are from themselves.
__device__ __forceinline__ void take_work(const Block& block, int turn)
{
    if (threadIdx.x & 31)
        return;
    const Turns turns(block);
    Cursor<CLAIMS> cursor;
#pragma unroll 1
    while (true) {
        if (cursor.number >= CLAIMS)
            wait_for_phase(shared_address(&block.ring.taken[cursor.place()]), cursor.parity() ^ 1);
        block.ring.claims[cursor.place()] = turn;
        arrive(shared_address(&block.ring.claimed[cursor.place()]));
        if (turns.begin(turn) == turns.units)
            break;
        cursor.number += 1;
        turn = take_turn(block.call);
    }
    while (load_relaxed(&block.call.counts->done) < static_cast<unsigned>(turns.units))
        __nanosleep(20);
    arrive(shared_address(&block.ring.all_done));
}

// The warps that ask for weights, all of them for a part of every unit.
template <typename Gate, typename Down, bool HAS_OTHER>
struct Asking {
    // The formats that a shared expert may have beside those of the banks.
    using OtherGate = typename Choice<HAS_OTHER, Wide, Gate>::type;
    using OtherDown = typename Choice<HAS_OTHER, Wide, Down>::type;
    const Block& block;
    const Bank &gate_up, &shared_gate_up, &down, &shared_down;
    bool is_gate_up_other, is_down_other;
    int own;  // number of the thread among those that ask, which go round the warps
    // Where weights may lie. Units lie one behind the other, and go in that order: the place of the next and its room, and `head`, which counts all
    // that has been given or left out.
    unsigned begin, capacity;
    unsigned place = 0, head = 0, room = 0;
    // The next unit and the oldest that is there, by number; the head where each began, in the lane of its entry.
    int number = 0, oldest = 0;
    unsigned begins = 0;

    // Wait until the next unit has so much room, and an entry.
    __device__ __forceinline__ void allot(unsigned bytes)
    {
        room = (bytes + 127) / 128 * 128;
        if (place + room > capacity) {
            head += capacity - place;
            place = 0;
        }
#pragma unroll 1
        while (oldest < number && (number - oldest >= ENTRIES || head + room - __shfl_sync(~0u, begins, oldest % ENTRIES) > capacity)) {
            wait_for_phase(shared_address(&block.ring.emptied[oldest % ENTRIES]), oldest / ENTRIES & 1);
            oldest++;
        }
        // No lane may still look at a phase when the first one tells the unit: it could end, and the next one too.
        __syncwarp();
        if ((threadIdx.x & 31) == number % ENTRIES)
            begins = head;
    }

    // Tell the next unit, and expect its bytes: the barrier on which they come.
    __device__ __forceinline__ unsigned tell(const Unit& unit, unsigned bytes) const
    {
        const int entry = number % ENTRIES;
        const unsigned barrier = shared_address(&block.ring.filled[entry]);
        if (own == 0) {
            block.ring.units[entry] = unit;
            arrive(shared_address(&block.ring.told[entry]));
            arrive_and_expect(barrier, bytes);
        } else if (own < ASKING_WARPS) {
            // Nor does the unit end before all that ask are past it.
            arrive(barrier);
        }
        __syncwarp();
        return barrier;
    }

    __device__ __forceinline__ void go_on()
    {
        place += room;
        head += room;
        number++;
    }

    __device__ __forceinline__ static CachePolicy policy_of(const Segment& segment)
    {
        return segment.is_read_again ? policy_keep_normally() : policy_evict_first();
    }

    template <typename Format>
    __device__ __forceinline__ void push_gate_up(const Bank& bank, int segment, int tile)
    {
        constexpr int COPIES = Staging<Format>::COPIES;
        const Staging<Format> staging(GATE_ROWS, block.call.hidden);
        const int bytes = staging.bytes(), width = static_cast<int>(block.call.width);
        allot(2 * bytes);
        const unsigned to = begin + place, barrier = tell({GATE_UP, segment, tile, static_cast<int>(to), 0}, 2 * staging.copied_bytes());
        const Segment& itself = block.segments[segment];
        const int row = 2 * itself.expert * width + tile * GATE_ROWS;
        if (own < 2 * COPIES)
            staging.ask(own % COPIES, to + own / COPIES * bytes, bank, row + own / COPIES * width, barrier, policy_of(itself));
        go_on();
    }

    // A segment's part of a tile is a warp's.
    __device__ __forceinline__ void push_down(int first, int tile)
    {
        constexpr int USUAL_COPIES = Staging<Down>::COPIES, OTHER_COPIES = Staging<OtherDown>::COPIES;
        constexpr int COPIES = USUAL_COPIES > OTHER_COPIES ? USUAL_COPIES : OTHER_COPIES;
        const int count = min(GROUP_WARPS, block.segments_there() - first), width = static_cast<int>(block.call.width);
        const int others = HAS_OTHER && is_down_other ? max(0, min(count, block.shared_segments() - first)) : 0;
        const Staging<Down> usual(TILE, width);
        const Staging<OtherDown> other(TILE, width);
        const int apart = others ? max(usual.bytes(), other.bytes()) : usual.bytes();
        allot(count * apart);
        const unsigned to = begin + place;
        const int bytes = (count - others) * usual.copied_bytes() + others * other.copied_bytes();
        const unsigned barrier = tell({DOWN, first, tile, static_cast<int>(to), apart}, bytes);
#pragma unroll 1
        for (int i = own; i < count * COPIES; i += 32 * ASKING_WARPS) {
            const int piece = i / COPIES, copy = i % COPIES;
            const Segment& segment = block.segments[first + piece];
            const int row = segment.expert * static_cast<int>(block.call.hidden) + tile * TILE;
            if (HAS_OTHER && piece < others) {
                if (copy < OTHER_COPIES)
                    other.ask(copy, to + piece * apart, shared_down, row, barrier, policy_of(segment));
            } else if (copy < USUAL_COPIES) {
                const Bank bank = choose(first + piece < block.shared_segments(), shared_down, down);
                usual.ask(copy, to + piece * apart, bank, row, barrier, policy_of(segment));
            }
        }
        go_on();
    }

    __device__ __forceinline__ void push_for_all(Kind kind, int tile)
    {
#pragma unroll 1
        for (int group = 0; group < GROUPS; group++) {
            allot(0);
            tell({kind, 0, tile, 0, 0}, 0);
            go_on();
        }
    }

    __device__ __forceinline__ void push_gate_up(int unit)
    {
        const int tiles = static_cast<int>(block.call.width) / GATE_ROWS, segment = unit / tiles, tile = unit % tiles;
        const bool is_shared = segment < block.shared_segments();
        if (HAS_OTHER && is_gate_up_other && is_shared)
            push_gate_up<OtherGate>(shared_gate_up, segment, tile);
        else
            push_gate_up<Gate>(choose(is_shared, shared_gate_up, gate_up), segment, tile);
    }

    // Nobody waits for a tile of down projections: they are dealt out.
    __device__ __forceinline__ void push_tiles()
    {
        const int tiles = block.segments_there() ? static_cast<int>(block.call.hidden) / TILE : 0;
#pragma unroll 1
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
#pragma unroll 1
            for (int first = 0; first < block.segments_there(); first += GROUP_WARPS)
                push_down(first, tile);
            push_for_all(COMBINE, tile);
        }
    }

    __device__ __forceinline__ void run()
    {
        const Turns turns(block);
        Cursor<CLAIMS> cursor;
#pragma unroll 1
        while (true) {
            // One lane reads, and says that it has: the others may be late.
            int turn = 0;
            if ((threadIdx.x & 31) == 0) {
                wait_for_phase(shared_address(&block.ring.claimed[cursor.place()]), cursor.parity());
                turn = block.ring.claims[cursor.place()];
                arrive(shared_address(&block.ring.taken[cursor.place()]));
            }
            turn = __shfl_sync(~0u, turn, 0);
            const int begin = turns.begin(turn), end = turns.begin(turn + 1);
            if (begin == turns.units)
                break;
            cursor.number += 1;
#pragma unroll 1
            for (int unit = begin; unit < end; unit++)
                push_gate_up(unit);
        }
        push_tiles();
        push_for_all(END, 0);
        release_successor();
    }
};

// A warp of a group that sums up.
template <typename Gate, typename Down, bool HAS_OTHER>
struct Summing {
    // The formats that a shared expert may have beside those of the banks.
    using OtherGate = typename Choice<HAS_OTHER, Wide, Gate>::type;
    using OtherDown = typename Choice<HAS_OTHER, Wide, Down>::type;
    const Block& block;
    unsigned buffers;  // of all groups
    float (*sums_of_paths)[TILE];
    const float* weights;  // of each token's paths
    float* kept;           // one number for each thread
    bool is_gate_up_other, is_down_other;
    // Whether sums in the buffers may still be read by others of the group.
    bool are_sums_read = false;
    // The thread's own number, of which the compiler does not know that it is always the same.
    unsigned thread = threadIdx.x;
    Cursor<ENTRIES> cursor;

    __device__ __forceinline__ int tokens() const
    {
        return static_cast<int>(opaque(static_cast<unsigned>(block.call.tokens)));
    }

    __device__ __forceinline__ int group() const
    {
        return thread / GROUP_THREADS;
    }

    __device__ __forceinline__ unsigned buffer_of(int warp) const
    {
        return buffers + (group() * GROUP_WARPS + warp) * BUFFER_BYTES;
    }

    // Where the group is, worked out each time.
    __device__ __forceinline__ Cursor<ENTRIES> now() const
    {
        return {opaque(cursor.number)};
    }

    // What has been told of the unit, looked up each time.
    __device__ __forceinline__ int told(int Unit::*field) const
    {
        return Block::load_count(&(block.ring.units[now().place()].*field));
    }

    __device__ __forceinline__ void wait_for_weights() const
    {
        wait_for_phase(shared_address(&block.ring.filled[now().place()]), now().parity());
    }

    __device__ __forceinline__ void release() const
    {
        __syncwarp();
        if ((thread & 31) == 0)
            arrive(shared_address(&block.ring.emptied[now().place()]));
    }

    __device__ __forceinline__ void meet_group() const
    {
        wait_for_threads(FIRST_GROUP_BARRIER + group(), GROUP_THREADS);
    }

    __device__ __forceinline__ void leave_sums()
    {
        if (are_sums_read)
            meet_group();
        are_sums_read = false;
    }

    __device__ __forceinline__ float sum_of(int row, int column) const
    {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < GROUP_WARPS; warp++) {
            const float part = __uint_as_float(load_shared4(buffer_of(warp) + 4 * (row * COLUMNS + column)));
            sum = warp ? sum + part : part;
        }
        return sum;
    }

    template <typename Format>
    __device__ __forceinline__ void sum_gate_up()
    {
        const Experts& call = block.call;
        const int lane = thread & 31, warp = thread / 32 % GROUP_WARPS, line = lane >> 2, quad = lane & 3;
        const Segment& segment = block.segments[told(&Unit::segment)];
        const Staging<Format> staging(GATE_ROWS, call.hidden);
        const unsigned at = told(&Unit::at);
        const int begin = slice_begin<Format>(staging.steps, warp, GROUP_WARPS);
        const int own_steps = slice_begin<Format>(staging.steps, warp + 1, GROUP_WARPS) - begin;
        const StagedRow upper = staging.row(at, line % 4, line / 4), lower = staging.row(at + staging.bytes(), line % 4, line / 4);
        float sums[4] = {};
        constexpr int STEPS = KNOWN_LENGTH / Format::STEP, STEP_BYTES = 64 * Format::OCTS;
        const int token = segment.routes[line < segment.count ? line : 0] >> 4;
        const unsigned tokens_at = Format::ORDER == Gate::ORDER ? block.tokens_at : block.other_tokens_at;
        const Shared<1> first = {tokens_at + token * block.token_bytes + (4 * begin + quad) * 16 * Format::OCTS, 16};
        wait_for_weights();
        if (IS_MEASURED && own_steps == STEPS)
            sum_straight<Format, STEPS, STEP_BYTES>(sums, upper, lower, begin, first, quad);
        else
            sum_in_turns<Format>(sums, upper, lower, begin, own_steps, first, STEP_BYTES, quad);
        leave_sums();
        const int tile = told(&Unit::tile);
        release();
        float* own = reinterpret_cast<float*>(at_launch + (buffer_of(warp) - shared_address(at_launch)));
        *reinterpret_cast<float2*>(own + line * COLUMNS + 2 * quad) = make_float2(sums[0], sums[1]);
        *reinterpret_cast<float2*>(own + (line + 8) * COLUMNS + 2 * quad) = make_float2(sums[2], sums[3]);
        meet_group();
        are_sums_read = true;
        if (warp >= 2 || 4 * warp >= segment.count)
            return;
        const int row = lane % 8, column = 4 * warp + lane / 8;
        const int route = segment.routes[column < segment.count ? column : 0];
        const float gate = sum_of(gate_line(row), column), up = sum_of(gate_line(row) + 8, column);
        int word;
        // Never absent: what is not a number becomes another one, as a term.
        const unsigned result = word_of_oct(silu(gate) * up, Handing((route & 15) == TOP ? call.shared_handing : call.handing), tile, word);
        if (column < segment.count)
            store_relaxed(call.act + ((route >> 4) * call.paths + (route & 15)) * call.width + word, result);
        if (thread % GROUP_THREADS == 0)
            add_relaxed(&call.counts->done, 1);
    }

    __device__ __forceinline__ const Segment& own_segment() const
    {
        return block.segments[told(&Unit::segment) + opaque(thread) / 32 % GROUP_WARPS];
    }

    template <typename Format>
    __device__ __forceinline__ void sum_down()
    {
        const Experts& call = block.call;
        const int warp = thread / 32 % GROUP_WARPS, line = (thread & 31) >> 2, quad = thread & 3;
        const int paths = static_cast<int>(call.paths);
        const unsigned at = told(&Unit::at) + warp * told(&Unit::piece_bytes), buffer = buffer_of(warp);
        const Staging<Format> staging(TILE, call.width);
        const int steps = staging.steps;
        const StagedRow upper = staging.row(at, line % 4, line / 4), lower = staging.row(at, line % 4, line / 4 + 2);
        const auto row_of = [&](int route) {
            return reinterpret_cast<const Bytes16*>(call.act + ((route >> 4) * call.paths + (route & 15)) * call.width);
        };
        constexpr int KNOWN = KNOWN_LENGTH / Format::STEP, STEP_OCTS = 4 * Format::OCTS;
        Activations<Format> activations(own_segment(), buffer, thread, steps * STEP_OCTS);
        const Shared<2> first = activations.first_step();
        float sums[4] = {};
        if (IS_MEASURED && steps == KNOWN && activations.log_tokens == 0) {
            activations.bring(0, row_of);
            wait_for_weights();
            sum_straight<Format, KNOWN, STEP_OCTS * 32>(sums, upper, lower, 0, Shared<2>{first.at, 32}, quad);
        } else {
            const int steps_at_once = (1 << activations.log_octs) / STEP_OCTS;
#pragma unroll 1
            for (int begin = 0; begin < steps; begin += steps_at_once) {
                activations.bring(begin * STEP_OCTS, row_of);
                wait_for_weights();
                sum_in_turns<Format>(sums, upper, lower, begin, min(steps_at_once, steps - begin), first, STEP_OCTS * first.apart, quad);
                __syncwarp();
            }
        }
        const Segment& segment = own_segment();
        const int again = opaque(thread) & 31, own_row = down_row(again >> 2), column = 2 * (again & 3);
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (column + i < segment.count) {
                const int route = segment.routes[column + i];
                float* own = sums_of_paths[(route >> 4) * paths + (route & 15)];
                own[own_row] = sums[i];
                own[own_row + 2] = sums[i + 2];
            }
    }

    // The residual of a tile's first tokens is asked for long before its sums are there.
    __device__ __forceinline__ void keep_residual(int tile)
    {
        const int token = thread / TILE;
        if (token < tokens() && tile * TILE < static_cast<int>(opaque(static_cast<unsigned>(block.call.hidden))))
            kept[thread] = bf16_to_float(block.call.dest[token * block.call.dest_row + tile * TILE + thread % TILE]);
    }

    __device__ __forceinline__ void combine(int tile)
    {
        const Experts& call = block.call;
        const int paths = static_cast<int>(call.paths);
        wait_for_threads(ALL_GROUPS_BARRIER, SUMMING_THREADS);
        const uint64 there = call.groups->tokens;
#pragma unroll 1
        for (int i = thread; i < tokens() * TILE; i += SUMMING_THREADS) {
            const int row = i % TILE, token = i / TILE;
            if (!(there >> token & 1))
                continue;
            Bytes2* dest = call.dest + token * call.dest_row + tile * TILE + row;
            float sum = i < SUMMING_THREADS ? kept[i] : bf16_to_float(*dest);
#pragma unroll
            for (int path = 0; path < TOP; path++)
                sum = fmaf(weights[token * (TOP + 1) + path], sums_of_paths[token * paths + path][row], sum);
            if (paths > TOP)
                sum = fmaf(weights[token * (TOP + 1) + TOP], sums_of_paths[token * paths + TOP][row], sum);
            *dest = float_to_bf16(sum);
        }
        keep_residual(tile + gridDim.x);
        // The next tile's sums come to the same place.
        wait_for_threads(ALL_GROUPS_BARRIER, SUMMING_THREADS);
    }

    __device__ __forceinline__ void run()
    {
        cursor.number = group();
        keep_residual(blockIdx.x);
#pragma unroll 1
        while (true) {
            wait_for_phase(shared_address(&block.ring.told[now().place()]), now().parity());
            thread = opaque(threadIdx.x);
            const int kind = told(&Unit::kind), segment = told(&Unit::segment);
            if (kind == GATE_UP) {
                if (HAS_OTHER && is_gate_up_other && segment < block.shared_segments())
                    sum_gate_up<OtherGate>();
                else
                    sum_gate_up<Gate>();
            } else if (kind == DOWN) {
                leave_sums();
                const int own = segment + thread / 32 % GROUP_WARPS;
                if (own < block.segments_there()) {
                    wait_for_phase(shared_address(&block.ring.all_done), 0);
                    if (HAS_OTHER && is_down_other && own < block.shared_segments())
                        sum_down<OtherDown>();
                    else
                        sum_down<Down>();
                } else {
                    wait_for_weights();
                }
                release();
            } else {
                const int tile = told(&Unit::tile);
                // Not before all that ask are past it.
                wait_for_weights();
                release();
                if (kind == END)
                    return;
                combine(tile);
            }
            cursor.number += GROUPS;
        }
    }
};

// Tokens as they are to be met by weights of a format.
template <int ORDER>
__device__ __forceinline__ void share_tokens(const Experts& call, unsigned to, unsigned token_bytes)
{
    const int octs = static_cast<int>(call.hidden) / 8;
    for (int i = threadIdx.x; i < call.tokens * octs; i += EXPERTS_THREADS) {
        const int token = i / octs, oct = i % octs;
        const Bytes16 v = call.x[token * call.x_row + oct];
        unsigned pairs[4] = {v.x, v.y, v.z, v.w};
        arrange<ORDER>(pairs);
        store_shared16(to + token * token_bytes + 16 * oct, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
    }
}

template <typename Gate, typename Down, bool HAS_OTHER>
__device__ __forceinline__ void run_experts(
    const Experts& call, const Bank& gate_up, const Bank& shared_gate_up, const Bank& down, const Bank& shared_down, bool is_gate_up_other,
    bool is_down_other)
{
    const int warp = threadIdx.x / 32, most = static_cast<int>(call.most_segments), tokens = static_cast<int>(call.tokens);
    Ring& ring = *reinterpret_cast<Ring*>(at_launch);
    unsigned char* buffers = at_launch + sizeof(Ring);
    Segment* segments = reinterpret_cast<Segment*>(buffers + SUMMING_WARPS * BUFFER_BYTES);
    float(*sums_of_paths)[TILE] = reinterpret_cast<float(*)[TILE]>(segments + most);
    float* kept = sums_of_paths[tokens * call.paths];
    float* weights = kept + SUMMING_THREADS;
    // Rows of tokens begin in other banks.
    const unsigned token_bytes = 2 * static_cast<unsigned>(call.hidden) + 64, all_tokens = tokens * token_bytes;
    const bool has_other_order = HAS_OTHER && is_gate_up_other;
    const unsigned tokens_at = (shared_address(weights + tokens * (TOP + 1)) + 127) / 128 * 128, other_tokens_at = tokens_at + all_tokens;
    const unsigned begin = (other_tokens_at + has_other_order * all_tokens + 127) / 128 * 128, end = shared_address(at_launch) + SHARED_BYTES;
    if (threadIdx.x < ENTRIES) {
        init_barrier(shared_address(&ring.told[threadIdx.x]), 1);
        init_barrier(shared_address(&ring.filled[threadIdx.x]), ASKING_WARPS);
        init_barrier(shared_address(&ring.emptied[threadIdx.x]), GROUP_WARPS);
        if (threadIdx.x == 0)
            init_barrier(shared_address(&ring.all_done), 1);
        if (threadIdx.x < CLAIMS) {
            init_barrier(shared_address(&ring.claimed[threadIdx.x]), 1);
            init_barrier(shared_address(&ring.taken[threadIdx.x]), ASKING_WARPS);
        }
        fence_barriers();
    }
    prefetch_all(shared_gate_up.base, call.shared_bytes);
    prefetch_all(call.ahead, call.ahead_bytes);
    wait_for_predecessor();
    // The first turn comes while the rest is loaded.
    const int turn = threadIdx.x == 32 * (SUMMING_WARPS + ASKING_WARPS) ? take_turn(call) : 0;
    if (threadIdx.x == 0) {
        ring.segments_there = __ldcg(&call.groups->segments);
        ring.shared_segments = __ldcg(&call.groups->shared_segments);
    }
    for (int i = threadIdx.x; i < 2 * most; i += EXPERTS_THREADS)
        reinterpret_cast<Bytes16*>(segments)[i] = __ldcg(reinterpret_cast<const Bytes16*>(call.groups->each) + i);
    for (int i = threadIdx.x; i < tokens * (TOP + 1); i += EXPERTS_THREADS) {
        const int token = i / (TOP + 1), path = i % (TOP + 1);
        weights[i] = path < TOP ? call.alpha[token * TOP + path] : call.shared_scale ? call.shared_scale[token] : 0.0f;
    }
    share_tokens<Gate::ORDER>(call, tokens_at, token_bytes);
    if (has_other_order)
        share_tokens<Wide::ORDER>(call, other_tokens_at, token_bytes);
    const Block block = {call, ring, segments, tokens_at, other_tokens_at, token_bytes};
    __syncthreads();
    if (warp == SUMMING_WARPS + ASKING_WARPS) {
        take_work(block, turn);
    } else if (warp >= SUMMING_WARPS) {
        const int own = ASKING_WARPS * static_cast<int>(threadIdx.x & 31) + warp - SUMMING_WARPS;
        Asking<Gate, Down, HAS_OTHER> asking = {
            block, gate_up, shared_gate_up, down, shared_down, is_gate_up_other, is_down_other, own, begin, (end - begin) / 128 * 128};
        asking.run();
    } else {
        Summing<Gate, Down, HAS_OTHER> summing = {block, shared_address(buffers), sums_of_paths, weights, kept, is_gate_up_other, is_down_other};
        summing.run();
    }
}

#if __CUDA_ARCH__ >= 900
#define RUN_EXPERTS(gate, down_format, has_other)                                                                                             \
    run_experts<gate, down_format, has_other>(                                                                                                \
        Experts { x, x_row, hidden, width, groups, counts, act, paths, static_cast<int>(handing), static_cast<int>(shared_handing),            \
                  alpha, shared_scale, dest, dest_row, tokens, most_segments, shared_bytes, ahead, ahead_bytes },                              \
        Bank { base, high, scales }, Bank { shared_base, shared_high, shared_scales }, Bank { down_base, down_high, down_scales },             \
        Bank { shared_down_base, shared_down_high, shared_down_scales }, is_gate_up_other != 0, is_down_other != 0)
#else
#define RUN_EXPERTS(gate, down_format, has_other)
#endif

// HAS_OTHER: whether the shared expert may be in eight bits where the others are not.
#define EXPERTS_KERNEL(name, gate, down_format, has_other)                                                                                    \
    extern "C" __global__ void __launch_bounds__(EXPERTS_THREADS, 1) gpukit_experts_##name(                                                    \
        const char* base, const char* high, const char* scales, const char* shared_base, const char* shared_high, const char* shared_scales,   \
        int64 is_gate_up_other, const char* down_base, const char* down_high, const char* down_scales, const char* shared_down_base,           \
        const char* shared_down_high, const char* shared_down_scales, int64 is_down_other, const Bytes16* x, int64 x_row,                      \
        int64 hidden, int64 width, const Groups* groups, Counts* counts, unsigned* act, int64 paths, int64 handing, int64 shared_handing,      \
        const float* alpha, const float* shared_scale, Bytes2* dest, int64 dest_row, int64 tokens, int64 most_segments, int64 shared_bytes,    \
        const char* ahead, int64 ahead_bytes)                                                                                                 \
    {                                                                                                                                         \
        RUN_EXPERTS(gate, down_format, has_other);                                                                                            \
    }

EXPERTS_KERNEL(fp8_fp8, Fp8, Fp8, false)
EXPERTS_KERNEL(q4_q4, Split<4>, Split<4>, true)
EXPERTS_KERNEL(q4_q5, Split<4>, Split<5>, true)
EXPERTS_KERNEL(q5_q5, Split<5>, Split<5>, true)
EXPERTS_KERNEL(q6_q6, Split<6>, Split<6>, true)
EXPERTS_KERNEL(w8_w8, Wide, Wide, false)
