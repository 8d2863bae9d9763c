// What the kernels of sparse mixtures of experts share: how weights of every format become operands of the tensor cores, and which tokens an
// expert has. Weights are the rows of tensor-core tiles, tokens their columns. A lane's 8 elements of a row in a step (an *oct*) are one access of
// its planes; which elements meet in which product is the same for rows and tokens, and so does not matter.

#pragma once

#include "bf16.cuh"
#include "cache_hints.cuh"
#include "gpukit.cuh"
#include "half.cuh"
#include "mma.cuh"
#include "staging.cuh"

// Routed experts of a token.
constexpr int TOP = 8;
constexpr int MOST_EXPERTS = 256;
// Tokens that are grouped together, and those that share one reading of an expert from the L2.
constexpr int BATCH = 64;
constexpr int COLUMNS = 8;
// Tokens that are few: of so many one set of columns has both terms, the first ones in its first columns, the second ones in the others.
constexpr int HALF_COLUMNS = COLUMNS / 2;
// A token's scores, with what fills them up to accesses of the widest kind.
constexpr int MOST_SCORES = MOST_EXPERTS + 8;
constexpr int SCORE_COPIES = 32;
constexpr int CHOICE_COPIES = 16;
// Rows of a tile.
constexpr int TILE = 16;
// Elements of a row that a warp takes in the geometries that the decode schedule is tuned for: 2,048 by four warps, or 512.
constexpr int KNOWN_LENGTH = 512;
// As many segments as there can be, and more: those of units that are looked up before it is known how many there are.
constexpr int MOST_SEGMENTS = MOST_EXPERTS + 2 * BATCH;

// The smaller of two constants.
__device__ constexpr int least(int one, int other)
{
    return one < other ? one : other;
}

// Up to eight tokens of an expert.
struct Segment {
    int expert;
    int count;
    int64 unused;
    Bytes2 routes[COLUMNS];  // 16 times the token and its rank of the expert: 0 … 7, 8 for the shared one
};

// A batch grouped by expert. Those of the shared expert come first.
struct Groups {
    int segments;
    int shared_segments;
    uint64 tokens;  // those that have experts, as bits
    int tickets;    // that blocks of the gate and up projections have taken
    int claims[2];  // of units of few tokens, and of those of the shared expert in another format; taken back in front
    int unused[25];
    // Words that are waited for, in places where nothing else ever is: scores of one token, or experts of few. There are copies for the many blocks.
    unsigned scores[SCORE_COPIES][MOST_SCORES];
    int choices[CHOICE_COPIES][HALF_COLUMNS * TOP];
    Segment each[MOST_SEGMENTS];
};

// A matrix in one of the formats; of `high` and `scales` what the format has.
struct Bank {
    const char* base;
    const char* high;
    const char* scales;
    // Where it is swizzled: of the base, and of the high bits if these are rows of whole lines.
    const TensorMap* maps = nullptr;
};

struct Banks {
    Bank routed;
    Bank shared;  // of the shared expert
};

// A lane's part of a row in memory: where its planes are, from the first of a warp's steps on.
using Row = Bank;

// One of two, plane by plane: a reference to one of them would put both into memory.
__device__ __forceinline__ Bank choose(bool is_first, const Bank& first, const Bank& second)
{
    return {is_first ? first.base : second.base, is_first ? first.high : second.high, is_first ? first.scales : second.scales,
            is_first ? first.maps : second.maps};
}

// a * b + c of two pairs, each rounded once.
__device__ __forceinline__ unsigned multiply_add_pair(unsigned a, unsigned b, unsigned c)
{
    unsigned result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// (a & mask) ^ bits and (a & mask) | bits as one instruction, which the compiler makes two of where both are constants.
__device__ __forceinline__ unsigned masked_xor(unsigned a, unsigned mask, unsigned bits)
{
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(a), "r"(mask), "r"(bits));
    return result;
}

__device__ __forceinline__ unsigned masked_or(unsigned a, unsigned mask, unsigned bits)
{
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(mask), "r"(bits));
    return result;
}

// Weights: past the L1, with what is beside them in a line of 128 bytes, all of which will be read.
__device__ __forceinline__ Bytes16 load_weights(const Bytes16* address, CachePolicy policy)
{
    Bytes16 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address), "l"(policy) : "memory");
    return v;
}

__device__ __forceinline__ Bytes8 load_weights(const Bytes8* address, CachePolicy policy)
{
    Bytes8 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(v.x), "=r"(v.y) : "l"(address), "l"(policy) : "memory");
    return v;
}

// What others want too, or whose neighbours in a line come next, in the order of the program: `__ldg` comes behind a wait that it stands before.
__device__ __forceinline__ Bytes16 load_in_order(const Bytes16* address)
{
    Bytes16 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
    return v;
}

__device__ __forceinline__ Bytes4 load_in_order(const Bytes4* address)
{
    Bytes4 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}

__device__ __forceinline__ Bytes2 load_in_order(const Bytes2* address)
{
    Bytes2 v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(address) : "memory");
    return v;
}

// The same, where they are wanted; else `v` stays what it is. No branch: the compiler tells loads apart only on a straight line.
__device__ __forceinline__ void load_wanted(Bytes16& v, const Bytes16* address, CachePolicy policy, bool is_wanted)
{
    asm volatile("{\n.reg .pred is_wanted;\nsetp.ne.u32 is_wanted, %6, 0;\n"
                 "@is_wanted ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;\n}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(address), "l"(policy), "r"(static_cast<int>(is_wanted)) : "memory");
}

__device__ __forceinline__ void load_wanted(Bytes8& v, const Bytes8* address, CachePolicy policy, bool is_wanted)
{
    asm volatile("{\n.reg .pred is_wanted;\nsetp.ne.u32 is_wanted, %4, 0;\n"
                 "@is_wanted ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v2.u32 {%0, %1}, [%2], %3;\n}"
                 : "+r"(v.x), "+r"(v.y) : "l"(address), "l"(policy), "r"(static_cast<int>(is_wanted)) : "memory");
}

// What others of the block want too, where it is wanted.
__device__ __forceinline__ void load_wanted(Bytes16& v, const Bytes16* address, bool is_wanted)
{
    asm volatile("{\n.reg .pred is_wanted;\nsetp.ne.u32 is_wanted, %5, 0;\n@is_wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(address), "r"(static_cast<int>(is_wanted)) : "memory");
}

// What others write meanwhile: past the L1.
__device__ __forceinline__ Bytes16 load_relaxed(const Bytes16* address)
{
    Bytes16 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
    return v;
}

__device__ __forceinline__ unsigned load_relaxed(const unsigned* address)
{
    unsigned v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}

__device__ __forceinline__ void store_relaxed(unsigned* address, unsigned v)
{
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}

__device__ __forceinline__ int load_relaxed(const int* address)
{
    return static_cast<int>(load_relaxed(reinterpret_cast<const unsigned*>(address)));
}

__device__ __forceinline__ void store_relaxed(int* address, int v)
{
    store_relaxed(reinterpret_cast<unsigned*>(address), static_cast<unsigned>(v));
}

// The same, where it is wanted.
__device__ __forceinline__ void load_relaxed_wanted(Bytes16& v, const Bytes16* address, bool is_wanted)
{
    asm volatile("{\n.reg .pred is_wanted;\nsetp.ne.u32 is_wanted, %5, 0;\n@is_wanted ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(address), "r"(static_cast<int>(is_wanted)) : "memory");
}

// So many numbers that nobody else has: the first of them, an answer that takes its time.
__device__ __forceinline__ int claim(int* next, int numbers)
{
    int first;
    asm volatile("atom.global.relaxed.gpu.add.s32 %0, [%1], %2;" : "=r"(first) : "l"(next), "r"(numbers) : "memory");
    return first;
}

__device__ __forceinline__ void prefetch_line(const char* address)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// The threads of all blocks bring `bytes` into the L2.
__device__ __forceinline__ void prefetch_all(const char* from, int64 bytes)
{
    const int64 apart = 128ll * gridDim.x * blockDim.x;
    for (int64 at = 128ll * (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x); at < bytes; at += apart)
        prefetch_line(from + at);
}

// Lines that stay as long as any others.
__device__ __forceinline__ CachePolicy policy_keep_normally()
{
    CachePolicy policy;
    asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Which elements of an oct are the four pairs that a format's bits fall into.
enum Order { STRAIGHT, NIBBLES, BYTES };

// Four pairs in the order of the elements, put into that of a format.
template <int ORDER>
__device__ __forceinline__ void arrange(unsigned (&pairs)[4])
{
    if (ORDER == STRAIGHT)
        return;
    constexpr int OTHER = ORDER == NIBBLES ? 2 : 1, NEXT = ORDER == NIBBLES ? 1 : 2;
    const unsigned a = pairs[0], b = pairs[OTHER], c = pairs[NEXT], d = pairs[3];
    pairs[0] = __byte_perm(a, b, 0x5410);
    pairs[1] = __byte_perm(a, b, 0x7632);
    pairs[2] = __byte_perm(c, d, 0x5410);
    pairs[3] = __byte_perm(c, d, 0x7632);
}

__device__ __forceinline__ void take_vector(const Bytes16& v, unsigned (&operand)[4])
{
    operand[0] = v.x;
    operand[1] = v.y;
    operand[2] = v.z;
    operand[3] = v.w;
}

// The same, of a vector.
template <int ORDER>
__device__ __forceinline__ Bytes16 arranged(const Bytes16& oct)
{
    unsigned pairs[4];
    take_vector(oct, pairs);
    arrange<ORDER>(pairs);
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// A format: STEP elements of a row are taken at a time, STEP_BYTES of the base and HIGH_BYTES of the high bits, OCTS octs a lane; `at` counts steps
// from the beginning of the bank, `step` those of a row. A warp's steps begin where a scale does, so at a multiple of SCALE_STEPS. Scales are loaded
// apart, since those of many steps are one access: two bytes a step, whatever the format, and `take_scale` has what is in four bytes for two steps.
// `prefetch_rest` is for what is beside the base; two lanes share it.
struct Bf16 {
    static constexpr int STEP = 32, STEP_BYTES = 64, OCTS = 1, SCALE_STEPS = 1, ORDER = STRAIGHT;
    static constexpr int HIGH_BYTES = 0;
    static constexpr bool HAS_SCALE = false;
    struct Raw {
        Bytes16 base;
    };

    static __device__ __forceinline__ Row row(const Bank& bank, int at, int quad)
    {
        return {bank.base + 16 * (4ll * at + quad), nullptr, nullptr};
    }

    static __device__ __forceinline__ void load_high(Raw&, const Row&, int) {}

    static __device__ __forceinline__ void take_high(Raw&, const char*, int) {}

    static __device__ __forceinline__ void load_scale(Raw&, const Row&, int) {}

    static __device__ __forceinline__ void take_scale(Raw&, unsigned, int) {}

    static __device__ __forceinline__ void prefetch_rest(const Bank&, int, int) {}

    static __device__ __forceinline__ void expand(const Raw& raw, int, unsigned (&pairs)[4])
    {
        pairs[0] = raw.base.x;
        pairs[1] = raw.base.y;
        pairs[2] = raw.base.z;
        pairs[3] = raw.base.w;
    }

    static __device__ __forceinline__ float scale(const Raw&)
    {
        return 1.0f;
    }
};

// e4m3 with a float32 scale for 128 elements. As bits, the number is a bfloat16 whose exponent is 120 too small, even below the normal numbers.
struct Fp8 {
    static constexpr int STEP = 64, STEP_BYTES = 64, OCTS = 2, SCALE_STEPS = 2, ORDER = BYTES;
    static constexpr int HIGH_BYTES = 0;
    static constexpr bool HAS_SCALE = true;
    struct Raw {
        Bytes16 base;
        float scale;
    };

    static __device__ __forceinline__ Row row(const Bank& bank, int at, int quad)
    {
        return {bank.base + 16 * (4ll * at + quad), nullptr, bank.scales + 4ll * (at >> 1)};
    }

    static __device__ __forceinline__ void load_high(Raw&, const Row&, int) {}

    static __device__ __forceinline__ void take_high(Raw&, const char*, int) {}

    static __device__ __forceinline__ void load_scale(Raw& raw, const Row& row, int step)
    {
        raw.scale = reinterpret_cast<const float*>(row.scales)[step >> 1];
    }

    static __device__ __forceinline__ void take_scale(Raw& raw, unsigned pair, int)
    {
        raw.scale = __uint_as_float(pair);
    }

    static __device__ __forceinline__ void prefetch_rest(const Bank& bank, int at, int lane)
    {
        if (lane == 0)
            prefetch_line(bank.scales + 4ll * (at >> 1));
    }

    // The first and the third number of a word, and the second and the fourth.
    static __device__ __forceinline__ void expand_word(unsigned word, unsigned& even, unsigned& odd)
    {
        // Signs of all four at once, which the compiler would take apart again.
        unsigned signs;
        asm("and.b32 %0, %1, 0x80808080;" : "=r"(signs) : "r"(word));
        even = multiply_add_pair(selected(0x07f007f0u, word << 4, signs << 8), 0x7b807b80u, 0);
        odd = multiply_add_pair(selected(0x07f007f0u, word >> 4, signs), 0x7b807b80u, 0);
    }

    // The bits of one where the mask is set, and of the other elsewhere.
    static __device__ __forceinline__ unsigned selected(unsigned mask, unsigned one, unsigned other)
    {
        unsigned bits;
        asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(bits) : "r"(mask), "r"(one), "r"(other));
        return bits;
    }

    static __device__ __forceinline__ void expand(const Raw& raw, int oct, unsigned (&pairs)[4])
    {
        expand_word(oct ? raw.base.z : raw.base.x, pairs[0], pairs[1]);
        expand_word(oct ? raw.base.w : raw.base.y, pairs[2], pairs[3]);
    }

    static __device__ __forceinline__ float scale(const Raw& raw)
    {
        return raw.scale;
    }
};

// Four to six bits. Up to eight bits without an exponent are a bfloat16, below the normal numbers and at their beginning: 2^-133 times what they are. With
// the sign turned over they are 2^(BITS - 1) more than the code. `expand` gives codes divided by UNIT, by which `scale` multiplies.
template <int BITS>
struct Split {
    static constexpr int STEP = 64, STEP_BYTES = 32, OCTS = 2, SCALE_STEPS = 1, ORDER = NIBBLES;
    static constexpr int HIGH_BYTES = 8 * (BITS - 4), UNIT = BITS == 4 ? 4 : 64;
    static constexpr bool HAS_SCALE = true;
    struct Raw {
        Bytes8 base;
        unsigned high;
        unsigned short scale;
    };

    static __device__ __forceinline__ Row row(const Bank& bank, int at, int quad)
    {
        const int64 number = 4ll * at + quad;
        return {bank.base + 8 * number, bank.high + HIGH_BYTES / 4 * number, bank.scales + 2ll * at};
    }

    static __device__ __forceinline__ void load_high(Raw& raw, const Row& row, int step)
    {
        if (BITS == 5)
            raw.high = load_in_order(reinterpret_cast<const Bytes2*>(row.high + HIGH_BYTES * step));
        if (BITS == 6)
            raw.high = load_in_order(reinterpret_cast<const Bytes4*>(row.high + HIGH_BYTES * step));
    }

    // The same, from shared memory.
    static __device__ __forceinline__ void take_high(Raw& raw, const char* from, int quad)
    {
        if (BITS == 5)
            raw.high = reinterpret_cast<const Bytes2*>(from)[quad];
        if (BITS == 6)
            raw.high = reinterpret_cast<const Bytes4*>(from)[quad];
    }

    static __device__ __forceinline__ void load_scale(Raw& raw, const Row& row, int step)
    {
        raw.scale = reinterpret_cast<const Bytes2*>(row.scales)[step];
    }

    static __device__ __forceinline__ void take_scale(Raw& raw, unsigned pair, int step)
    {
        raw.scale = static_cast<unsigned short>(pair >> 16 * (step & 1));
    }

    static __device__ __forceinline__ void prefetch_rest(const Bank& bank, int at, int lane)
    {
        if (lane == 0)
            prefetch_line(bank.scales + 2ll * at);
        else if (BITS > 4)
            prefetch_line(bank.high + (BITS - 4) * 8ll * at);
    }

    static __device__ __forceinline__ void expand(const Raw& raw, int oct, unsigned (&pairs)[4])
    {
        const unsigned low = oct ? raw.base.y : raw.base.x;
        if constexpr (BITS == 4) {
            // Beside the exponent of 32 a code is 34 + code / 4; the upper one of a byte needs none where it stands, and no shift.
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const unsigned two = low >> 4 * i;
                pairs[i] = multiply_add_pair(masked_xor(two, 0x000f000fu, 0x42084208u), 0x3f803f80u, 0xc208c208u);
                pairs[i + 1] = multiply_add_pair(masked_xor(two, 0x00f000f0u, 0x00800080u), 0x7f007f00u, 0xc000c000u);
            }
        } else if constexpr (BITS == 5) {
            // Pair i comes to 2^i times what it is: there one product, which turns them over, brings the upper bits of all pairs.
            constexpr unsigned SPREAD = 1u << 4 | 1u << 16;
            const unsigned above = (raw.high >> 8 * oct & 0xff) * (0 - SPREAD) + 0xff * SPREAD;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned bits = masked_or(above, 0x00100010u << i, low >> 3 * i & 0x000f000fu << i);
                pairs[i] = multiply_add_pair(bits, 0x7f007f00u - i * 0x00800080u, 0xbe80be80u);
            }
        } else {
            // Every other pair comes to four times what it is: there the upper bits of two pairs are at once.
            const unsigned above = __byte_perm(raw.high, 0, oct ? 0x4342 : 0x4140);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int up = i % 2 * 2;
                const unsigned lower = masked_xor(low >> (4 * i - up), 0x000f000fu << up, 0x00200020u << up);
                const unsigned bits = masked_xor(i < 2 ? above << 4 : above, 0x00300030u << up, lower);
                pairs[i] = multiply_add_pair(bits, 0x7f007f00u - up * 0x00800080u, 0xbf00bf00u);
            }
        }
    }

    static __device__ __forceinline__ float scale(const Raw& raw)
    {
        return half_to_float(raw.scale) * UNIT;
    }
};

// Eight bits without an exponent, as above: 2 + code / 64, once the sign is turned over and they are multiplied by 2^127.
struct Wide {
    static constexpr int STEP = 32, STEP_BYTES = 32, OCTS = 1, SCALE_STEPS = 1, ORDER = BYTES;
    static constexpr int HIGH_BYTES = 0, UNIT = 64;
    static constexpr bool HAS_SCALE = true;
    struct Raw {
        Bytes8 base;
        unsigned short scale;
    };

    static __device__ __forceinline__ Row row(const Bank& bank, int at, int quad)
    {
        return {bank.base + 8 * (4ll * at + quad), nullptr, bank.scales + 2ll * at};
    }

    static __device__ __forceinline__ void load_high(Raw&, const Row&, int) {}

    static __device__ __forceinline__ void take_high(Raw&, const char*, int) {}

    static __device__ __forceinline__ void load_scale(Raw& raw, const Row& row, int step)
    {
        raw.scale = reinterpret_cast<const Bytes2*>(row.scales)[step];
    }

    static __device__ __forceinline__ void take_scale(Raw& raw, unsigned pair, int step)
    {
        raw.scale = static_cast<unsigned short>(pair >> 16 * (step & 1));
    }

    static __device__ __forceinline__ void prefetch_rest(const Bank& bank, int at, int lane)
    {
        if (lane == 0)
            prefetch_line(bank.scales + 2ll * at);
    }

    static __device__ __forceinline__ unsigned pair(unsigned bytes)
    {
        return multiply_add_pair(masked_xor(bytes, 0x00ff00ffu, 0x00800080u), 0x7f007f00u, 0xc000c000u);
    }

    template <typename Own = Wide>
    static __device__ __forceinline__ void expand(const Raw& raw, int, unsigned (&pairs)[4])
    {
        pairs[0] = Own::pair(raw.base.x);
        pairs[1] = Own::pair(raw.base.x >> 8);
        pairs[2] = Own::pair(raw.base.y);
        pairs[3] = Own::pair(raw.base.y >> 8);
    }

    static __device__ __forceinline__ float scale(const Raw& raw)
    {
        return half_to_float(raw.scale) * UNIT;
    }
};

template <typename Format>
__device__ __forceinline__ void load_step(typename Format::Raw& raw, const Row& row, int step, CachePolicy policy)
{
    raw.base = load_weights(reinterpret_cast<const decltype(raw.base)*>(row.base + Format::STEP_BYTES * step), policy);
    Format::load_high(raw, row, step);
}

// Where it is not wanted, only the small part of it.
template <typename Format>
__device__ __forceinline__ void load_wanted_step(typename Format::Raw& raw, const Row& row, int step, CachePolicy policy, bool is_wanted)
{
    load_wanted(raw.base, reinterpret_cast<const decltype(raw.base)*>(row.base + Format::STEP_BYTES * step), policy, is_wanted);
    Format::load_high(raw, row, step);
}

// The scale of a step of a row whose scales begin there, in shared memory.
template <typename Format>
__device__ __forceinline__ void take_scale(typename Format::Raw& raw, const char* scales, int step)
{
    Format::load_scale(raw, {nullptr, nullptr, scales}, step);
}

// Where the slice of warp `number` of so many begins, of a row of `steps`.
template <typename Format>
__device__ __forceinline__ int slice_begin(int steps, int number, int warps)
{
    return steps / Format::SCALE_STEPS * number / warps * Format::SCALE_STEPS;
}

// The row that is so many steps behind another, a multiple of a row's.
template <typename Format>
__device__ __forceinline__ Row row_behind(const Row& row, int steps)
{
    const int64 apart = steps;
    return {row.base + Format::STEP_BYTES * apart, row.high + Format::HIGH_BYTES * apart, row.scales + 2 * apart};
}

// Of the scales of eight steps the four bytes that have those of a step and its neighbour.
__device__ __forceinline__ unsigned scales_of(const Bytes16& eight, int step)
{
    return step % 8 < 2 ? eight.x : step % 8 < 4 ? eight.y : step % 8 < 6 ? eight.z : eight.w;
}

// The scales of a row's steps, all at once; with 0 steps none.
template <typename Format, int STEPS>
struct RowScales {
    static constexpr bool IS_THERE = Format::HAS_SCALE && STEPS > 0;
    static_assert(STEPS % 8 == 0, "scales come sixteen bytes at a time");
    Bytes16 words[IS_THERE ? STEPS / 8 : 1];

    __device__ __forceinline__ void load(const Row& row)
    {
        if constexpr (IS_THERE)
#pragma unroll
            for (int i = 0; i < STEPS / 8; i++)
                words[i] = load_in_order(reinterpret_cast<const Bytes16*>(row.scales) + i);
    }

    // The same, from shared memory.
    __device__ __forceinline__ void take_all(const char* from)
    {
        if constexpr (IS_THERE)
#pragma unroll
            for (int i = 0; i < STEPS / 8; i++)
                words[i] = reinterpret_cast<const Bytes16*>(from)[i];
    }

    __device__ __forceinline__ void take(typename Format::Raw& raw, int step) const
    {
        if (IS_THERE)
            Format::take_scale(raw, scales_of(words[IS_THERE ? step / 8 : 0], step), step);
    }
};

// sums += tile of weights times an oct of tokens: two products of 16 elements each.
__device__ __forceinline__ void multiply_oct(float (&sums)[4], const unsigned (&upper)[4], const unsigned (&lower)[4], const unsigned (&tokens)[4])
{
    const unsigned first[4] = {upper[0], lower[0], upper[1], lower[1]}, second[4] = {upper[2], lower[2], upper[3], lower[3]};
    multiply_tiles(sums, first, tokens[0], tokens[1]);
    multiply_tiles(sums, second, tokens[2], tokens[3]);
}

// The same where it is wanted, by all lanes or by none.
__device__ __forceinline__ void multiply_oct(
    float (&sums)[4], const unsigned (&upper)[4], const unsigned (&lower)[4], const unsigned (&tokens)[4], bool is_wanted)
{
    const unsigned first[4] = {upper[0], lower[0], upper[1], lower[1]}, second[4] = {upper[2], lower[2], upper[3], lower[3]};
    multiply_tiles(sums, first, tokens[0], tokens[1], is_wanted);
    multiply_tiles(sums, second, tokens[2], tokens[3], is_wanted);
}

// How far apart in an oct the two elements of a pair are.
__device__ __forceinline__ constexpr int apart_in(int order)
{
    return order == NIBBLES ? 4 : order == BYTES ? 2 : 1;
}

// Two float32 numbers as sums of two bfloat16 numbers, the second being what the first leaves.
__device__ __forceinline__ void split_pair(float low, float high, unsigned& first, unsigned& rest)
{
    first = floats_to_pair(low, high);
    rest = floats_to_pair(low - low_of_pair(first), high - high_of_pair(first));
}

// Eight of them, in an order.
template <int ORDER>
__device__ __forceinline__ void split(const Bytes16 (&oct)[2], Bytes16 (&terms)[2])
{
    const unsigned bits[8] = {oct[0].x, oct[0].y, oct[0].z, oct[0].w, oct[1].x, oct[1].y, oct[1].z, oct[1].w};
    unsigned made[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int first = ORDER == NIBBLES ? i : ORDER == BYTES ? i % 2 + i / 2 * 4 : 2 * i;
        split_pair(__uint_as_float(bits[first]), __uint_as_float(bits[first + apart_in(ORDER)]), made[0][i], made[1][i]);
    }
#pragma unroll
    for (int term = 0; term < 2; term++)
        terms[term] = make_uint4(made[term][0], made[term][1], made[term][2], made[term][3]);
}

// Two numbers of 16 bits, both NaN of a kind that arithmetic does not give: terms that are not there yet, where words are waited for.
constexpr unsigned NO_WORD = ~0u;

// How activations are handed on: as float32; or as the terms that `split` makes of an oct in a format's order, each a vector of 16 bytes. In a row of
// terms, those that a warp loads at once lie side by side: the vectors of an oct are QUADS apart.
constexpr int QUADS = 4;

struct Handing {
    int order, octs;  // of the format: one or two, none for float32

    __device__ __forceinline__ explicit Handing(int code) : order(code & 3), octs(code >> 2) {}

    // Where the first term of a row's oct is, in vectors.
    static __device__ __forceinline__ int place(int oct, int octs)
    {
        const int has_two = octs - 1, step = oct >> (2 + has_two), number = oct & has_two, quad = oct >> has_two & (QUADS - 1);
        return ((step << has_two) + number) * 2 * QUADS + quad;
    }
};

// Eight lanes side by side have the elements of an oct, and a word of what is handed on each: what is in it.
__device__ __forceinline__ unsigned word_of_oct(float value, const Handing& handing)
{
    const int apart = apart_in(handing.order);
    const float other = __shfl_xor_sync(~0u, value, apart);
    if (handing.octs == 0)
        return __float_as_uint(value);
    const bool is_upper = threadIdx.x % 8 & apart;
    unsigned first, rest;
    split_pair(is_upper ? other : value, is_upper ? value : other, first, rest);
    return is_upper ? rest : first;
}

// And which word of the row it is.
__device__ __forceinline__ int place_in_row(const Handing& handing, int oct)
{
    const int element = threadIdx.x % 8;
    if (handing.octs == 0)
        return 8 * oct + element;
    const bool is_upper = element & apart_in(handing.order);
    const int pair = handing.order == NIBBLES ? element % 4 : handing.order == BYTES ? element % 2 + element / 4 * 2 : element / 2;
    return 4 * (Handing::place(oct, handing.octs) + QUADS * is_upper) + pair;
}

// A lane's octs in a step, in sets of columns. Tokens are numbers of 16 bits as they are, a set of them.
template <typename Format>
struct AsTheyAre {
    static constexpr int SETS = 1;
    Bytes16 octs[Format::OCTS];

    __device__ __forceinline__ void load(const Bytes16* from, bool is_there)
    {
#pragma unroll
        for (int oct = 0; oct < Format::OCTS; oct++)
            octs[oct] = is_there ? from[oct] : Bytes16{};
    }

    __device__ __forceinline__ void load_wanted(const Bytes16* from, bool is_wanted)
    {
#pragma unroll
        for (int oct = 0; oct < Format::OCTS; oct++)
            ::load_wanted(octs[oct], from + oct, is_wanted);
    }

    __device__ __forceinline__ void take(int oct, unsigned (&operands)[SETS][4]) const
    {
        take_vector(octs[oct], operands[0]);
        arrange<Format::ORDER>(operands[0]);
    }
};

// Activations are sums of two terms, products of which are summed up apart: here each has a set of columns.
template <typename Format>
struct FromTerms {
    static constexpr int SETS = 2;
    static constexpr bool IS_SECOND_FOR_MANY = false;
    Bytes16 octs[Format::OCTS][SETS];

    __device__ __forceinline__ void load(const Bytes16* from, bool is_there)
    {
#pragma unroll
        for (int oct = 0; oct < Format::OCTS; oct++)
#pragma unroll
            for (int set = 0; set < SETS; set++)
                octs[oct][set] = is_there ? from[QUADS * (SETS * oct + set)] : Bytes16{};
    }

    __device__ __forceinline__ void take(int oct, unsigned (&operands)[SETS][4]) const
    {
#pragma unroll
        for (int set = 0; set < SETS; set++)
            take_vector(octs[oct][set], operands[set]);
    }
};

// Where a lane's elements of a unit's activations begin, whether its column has any, else they are the first column's, and whether the unit has more
// tokens than one set is for.
struct Columns {
    const Bytes16* from;
    bool is_there;
    bool are_many;
};

// SETS: 2, of which the second is there for many tokens, or 1, where there are never many. ARE_WORDS: others write them meanwhile.
template <typename Format, int SOME_SETS, bool ARE_WORDS = false>
struct FromColumns {
    static constexpr int SETS = SOME_SETS;
    static constexpr bool IS_SECOND_FOR_MANY = true;
    Bytes16 octs[Format::OCTS][SETS];

    // All columns': of conditions the compiler makes branches here, each of which waits for the load in front of it.
    __device__ __forceinline__ void load(const Columns& columns, int at)
    {
        const Bytes16 *first = columns.from + at, *second = first + (columns.are_many ? QUADS : 0);
#pragma unroll
        for (int oct = 0; oct < Format::OCTS; oct++) {
            octs[oct][0] = ARE_WORDS ? load_relaxed(first + QUADS * 2 * oct) : load_in_order(first + QUADS * 2 * oct);
            if (SETS > 1)
                octs[oct][SETS - 1] = load_in_order(second + QUADS * 2 * oct);
        }
    }

    // The largest word, NO_WORD where one is not there.
    __device__ __forceinline__ unsigned largest() const
    {
        unsigned most = 0;
#pragma unroll
        for (int oct = 0; oct < Format::OCTS; oct++)
            most = max(most, max(max(octs[oct][0].x, octs[oct][0].y), max(octs[oct][0].z, octs[oct][0].w)));
        return most;
    }

    // Between other instructions; columns without a token keep what they had, which nobody looks at.
    __device__ __forceinline__ void load_wanted(const Columns& columns, int at, bool is_wanted)
    {
        const Bytes16* first = columns.from + at;
#pragma unroll
        for (int oct = 0; oct < Format::OCTS; oct++) {
            if (ARE_WORDS)
                load_relaxed_wanted(octs[oct][0], first + QUADS * 2 * oct, is_wanted && columns.is_there);
            else
                ::load_wanted(octs[oct][0], first + QUADS * 2 * oct, is_wanted && columns.is_there);
            if (SETS > 1)
                ::load_wanted(octs[oct][SETS - 1], first + QUADS * (2 * oct + 1), is_wanted && columns.is_there && columns.are_many);
        }
    }

    __device__ __forceinline__ void take(int oct, unsigned (&operands)[SETS][4]) const
    {
#pragma unroll
        for (int set = 0; set < SETS; set++)
            take_vector(octs[oct][set], operands[set]);
    }
};

// products += a step of 16 rows times the tokens, without its scales.
template <typename Format, typename Activations>
__device__ __forceinline__ void multiply_unscaled(float (&products)[Activations::SETS][4], const typename Format::Raw& upper,
                                                  const typename Format::Raw& lower, const Activations& taken, bool are_many = true)
{
    constexpr int SETS = Activations::SETS;
#pragma unroll
    for (int oct = 0; oct < Format::OCTS; oct++) {
        unsigned one[4], other[4], operands[SETS][4];
        Format::expand(upper, oct, one);
        Format::expand(lower, oct, other);
        taken.take(oct, operands);
        multiply_oct(products[0], one, other, operands[0]);
        if constexpr (SETS > 1) {
            if (Activations::IS_SECOND_FOR_MANY)
                multiply_oct(products[1], one, other, operands[1], are_many);
            else
                multiply_oct(products[1], one, other, operands[1]);
        }
    }
}

// sums += a step of 16 rows times the tokens.
template <typename Format, typename Activations>
__device__ __forceinline__ void multiply_step(float (&sums)[Activations::SETS][4], const typename Format::Raw& upper,
                                              const typename Format::Raw& lower, const Activations& taken, bool are_many = true)
{
    constexpr int SETS = Activations::SETS;
    float products[SETS][4] = {};
    multiply_unscaled<Format>(Format::HAS_SCALE ? products : sums, upper, lower, taken, are_many);
    if (Format::HAS_SCALE) {
        const float of_upper = Format::scale(upper), of_lower = Format::scale(lower);
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            sums[set][0] = fmaf(of_upper, products[set][0], sums[set][0]);
            sums[set][1] = fmaf(of_upper, products[set][1], sums[set][1]);
            sums[set][2] = fmaf(of_lower, products[set][2], sums[set][2]);
            sums[set][3] = fmaf(of_lower, products[set][3], sums[set][3]);
        }
    }
}

// sums[0] becomes the sum of both terms, where one set may have them: in the lanes of its first columns.
template <int SETS>
__device__ __forceinline__ void add_terms(float (&sums)[SETS][4], bool are_many)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float other = __shfl_xor_sync(~0u, sums[0][i], HALF_COLUMNS / 2);
        sums[0][i] += SETS > 1 && are_many ? sums[SETS - 1][i] : other;
    }
}
