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
// Rows of a tile.
constexpr int TILE = 16;
// Elements of a row that a warp takes in the geometries that the decode schedule is tuned for: 2,048 by four warps, or 512.
constexpr int KNOWN_LENGTH = 512;

// Up to eight tokens of an expert.
struct Segment {
    int expert;
    int count;
    int is_read_again;  // other tokens of the batch have it too
    int unused;
    Bytes2 routes[COLUMNS];  // 16 times the token and its rank of the expert: 0 … 7, 8 for the shared one
};

// How many turns blocks have taken, and how many results are there: 0 when a batch has been grouped. Each is in a line of its own.
struct Counts {
    unsigned taken;
    unsigned beside_taken[31];
    unsigned done;
    unsigned beside_done[31];
};

// A batch grouped by expert. Those of the shared expert come first.
struct Groups {
    int segments;
    int shared_segments;
    uint64 tokens;  // those that have experts, as bits
    int64 unused[14];
    Counts counts;
    Segment each[MOST_EXPERTS + 2 * BATCH];
};

// A matrix in one of the formats; of `high` and `scales` what the format has.
struct Bank {
    const char* base;
    const char* high;
    const char* scales;
};

// A row that was copied to shared memory: addresses of its planes there.
struct StagedRow {
    unsigned base;
    unsigned high;
    unsigned scales;
};

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

// A format: STEP elements of a row are taken at a time, STEP_BYTES of the base and HIGH_BYTES of the high bits, OCTS octs a lane; `at` counts steps
// from the beginning of the bank, or of the staged row; rows are staged so that BASE_PAD bytes are between them, and `take_scale`
// has what is in four bytes for two steps. `prefetch_rest` is for what is beside the base; two lanes share it.
struct Bf16 {
    static constexpr int STEP = 32, STEP_BYTES = 64, OCTS = 1, ORDER = STRAIGHT;
    static constexpr bool HAS_SCALE = false;
    struct Raw {
        Bytes16 base;
    };

    static __device__ __forceinline__ void load(Raw& raw, const Bank& bank, int at, int quad, CachePolicy policy)
    {
        raw.base = load_weights(reinterpret_cast<const Bytes16*>(bank.base) + (4ll * at + quad), policy);
    }

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
    static constexpr int STEP = 64, STEP_BYTES = 64, OCTS = 2, ORDER = BYTES;
    static constexpr int HIGH_BYTES = 0, BASE_PAD = 64;
    static constexpr bool HAS_SCALE = true;
    struct Raw {
        Bytes16 base;
        float scale;
    };

    static __device__ __forceinline__ void load(Raw& raw, const Bank& bank, int at, int quad, CachePolicy policy)
    {
        raw.base = load_weights(reinterpret_cast<const Bytes16*>(bank.base) + (4ll * at + quad), policy);
        raw.scale = __ldg(reinterpret_cast<const float*>(bank.scales) + (at >> 1));
    }

    static __device__ __forceinline__ void take(Raw& raw, const StagedRow& row, int at, int quad)
    {
        raw.base = load_shared16(row.base + STEP_BYTES * at + 16 * quad);
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

    static __device__ __forceinline__ unsigned pair(unsigned bytes)
    {
        return multiply_add_pair((bytes & 0x80008000u) | (bytes >> 4 & 0x07f007f0u), 0x7b807b80u, 0);
    }

    static __device__ __forceinline__ void expand(const Raw& raw, int oct, unsigned (&pairs)[4])
    {
        const unsigned first = oct ? raw.base.z : raw.base.x, second = oct ? raw.base.w : raw.base.y;
        pairs[0] = pair(first << 8);
        pairs[1] = pair(first);
        pairs[2] = pair(second << 8);
        pairs[3] = pair(second);
    }

    static __device__ __forceinline__ float scale(const Raw& raw)
    {
        return raw.scale;
    }
};

// Four to six bits. Beside the exponent of 128 the bits of a code are a bfloat16 of 128 + code + 2^(BITS - 1), once the sign is turned over.
template <int BITS>
struct Split {
    static constexpr int STEP = 64, STEP_BYTES = 32, OCTS = 2, ORDER = NIBBLES;
    static constexpr int HIGH_BYTES = 8 * (BITS - 4), BASE_PAD = 32;
    static constexpr bool HAS_SCALE = true;
    struct Raw {
        Bytes8 base;
        unsigned high;
        unsigned short scale;
    };

    static __device__ __forceinline__ void load(Raw& raw, const Bank& bank, int at, int quad, CachePolicy policy)
    {
        raw.base = load_weights(reinterpret_cast<const Bytes8*>(bank.base) + (4ll * at + quad), policy);
        if (BITS == 5)
            raw.high = __ldg(reinterpret_cast<const Bytes2*>(bank.high) + (4ll * at + quad));
        if (BITS == 6)
            raw.high = __ldg(reinterpret_cast<const Bytes4*>(bank.high) + (4ll * at + quad));
        raw.scale = __ldg(reinterpret_cast<const Bytes2*>(bank.scales) + at);
    }

    static __device__ __forceinline__ void take(Raw& raw, const StagedRow& row, int at, int quad)
    {
        raw.base = load_shared8(row.base + STEP_BYTES * at + 8 * quad);
        if (BITS == 5)
            raw.high = load_shared2(row.high + HIGH_BYTES * at + 2 * quad);
        if (BITS == 6)
            raw.high = load_shared4(row.high + HIGH_BYTES * at + 4 * quad);
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
        constexpr unsigned EXPONENT = 0x4300 | 1 << (BITS - 1), SIGN = 0x8000;
        constexpr unsigned TURN = EXPONENT | EXPONENT << 16;
        constexpr int EXTRA = BITS - 4;
        const unsigned low = oct ? raw.base.y : raw.base.x;
        unsigned above = 0;
        if (BITS == 5) {
            const unsigned own = raw.high >> 8 * oct & 0xff;
            above = own << 4 | own << 16;
        } else if (BITS == 6) {
            const unsigned own = raw.high >> 16 * oct & 0xffff;
            above = own << 4 | own << 12;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            unsigned bits = masked_xor(low >> 4 * i, 0x000f000fu, TURN);
            if (EXTRA)
                bits = masked_xor(above >> EXTRA * i, ((1u << EXTRA) - 1) * 0x00100010u, bits);
            pairs[i] = multiply_add_pair(bits, 0x3f803f80u, TURN | SIGN | SIGN << 16);
        }
    }

    static __device__ __forceinline__ float scale(const Raw& raw)
    {
        return half_to_float(raw.scale);
    }
};

// Eight bits are one too many beside an exponent: the lower seven, and 0 or 128 to be taken off, apart.
struct Wide {
    static constexpr int STEP = 32, STEP_BYTES = 32, OCTS = 1, ORDER = BYTES;
    static constexpr int HIGH_BYTES = 0, BASE_PAD = 32;
    static constexpr bool HAS_SCALE = true;
    struct Raw {
        Bytes8 base;
        unsigned short scale;
    };

    static __device__ __forceinline__ void load(Raw& raw, const Bank& bank, int at, int quad, CachePolicy policy)
    {
        raw.base = load_weights(reinterpret_cast<const Bytes8*>(bank.base) + (4ll * at + quad), policy);
        raw.scale = __ldg(reinterpret_cast<const Bytes2*>(bank.scales) + at);
    }

    static __device__ __forceinline__ void take(Raw& raw, const StagedRow& row, int at, int quad)
    {
        raw.base = load_shared8(row.base + STEP_BYTES * at + 8 * quad);
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
        return multiply_add_pair(masked_or(bytes, 0x007f007fu, 0x43004300u), 0x3f803f80u, masked_or(bytes, 0x00800080u, 0xc300c300u));
    }

    static __device__ __forceinline__ void expand(const Raw& raw, int, unsigned (&pairs)[4])
    {
        pairs[0] = pair(raw.base.x);
        pairs[1] = pair(raw.base.x >> 8);
        pairs[2] = pair(raw.base.y);
        pairs[3] = pair(raw.base.y >> 8);
    }

    static __device__ __forceinline__ float scale(const Raw& raw)
    {
        return half_to_float(raw.scale);
    }
};

// sums += tile of weights times an oct of tokens: two products of 16 elements each.
__device__ __forceinline__ void multiply_oct(float (&sums)[4], const unsigned (&upper)[4], const unsigned (&lower)[4], const unsigned (&tokens)[4])
{
    const unsigned first[4] = {upper[0], lower[0], upper[1], lower[1]}, second[4] = {upper[2], lower[2], upper[3], lower[3]};
    multiply_tiles(sums, first, tokens[0], tokens[1]);
    multiply_tiles(sums, second, tokens[2], tokens[3]);
}

// Eight float32 numbers as sums of two bfloat16 numbers, the second being what the first leaves, in a format's order.
template <int ORDER>
__device__ __forceinline__ void split(const float4 (&oct)[2], unsigned (&terms)[2][4])
{
    const float values[8] = {oct[0].x, oct[0].y, oct[0].z, oct[0].w, oct[1].x, oct[1].y, oct[1].z, oct[1].w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        constexpr int APART = ORDER == NIBBLES ? 4 : ORDER == BYTES ? 2 : 1;
        const int first = ORDER == NIBBLES ? i : ORDER == BYTES ? i % 2 + i / 2 * 4 : 2 * i;
        const float low = values[first], high = values[first + APART];
        const unsigned pair = floats_to_pair(low, high);
        terms[0][i] = pair;
        terms[1][i] = floats_to_pair(low - low_of_pair(pair), high - high_of_pair(pair));
    }
}

// A lane's octs of activations in a step: bfloat16 as they are, or float32 as a sum of two, the second being what the first leaves.
template <typename Format>
struct FromBf16 {
    static constexpr int TERMS = 1;
    Bytes16 octs[Format::OCTS];

    __device__ __forceinline__ void load(const Bytes16* from, bool is_there)
    {
#pragma unroll
        for (int oct = 0; oct < Format::OCTS; oct++)
            octs[oct] = is_there ? from[oct] : Bytes16{};
    }

    __device__ __forceinline__ void expand(int oct, unsigned (&terms)[TERMS][4]) const
    {
        terms[0][0] = octs[oct].x;
        terms[0][1] = octs[oct].y;
        terms[0][2] = octs[oct].z;
        terms[0][3] = octs[oct].w;
        arrange<Format::ORDER>(terms[0]);
    }
};

template <typename Format>
struct FromFloat {
    static constexpr int TERMS = 2;
    float4 octs[Format::OCTS][2];

    __device__ __forceinline__ void load(const Bytes16* from, bool is_there)
    {
#pragma unroll
        for (int oct = 0; oct < Format::OCTS; oct++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                octs[oct][half] = is_there ? reinterpret_cast<const float4*>(from)[2 * oct + half] : float4{};
    }

    __device__ __forceinline__ void expand(int oct, unsigned (&terms)[TERMS][4]) const
    {
        split<Format::ORDER>(octs[oct], terms);
    }
};

// sums += a step of 16 rows times the tokens.
template <typename Format, typename Activations>
__device__ __forceinline__ void multiply_step(
    float (&sums)[4], const typename Format::Raw& upper, const typename Format::Raw& lower, const Activations& taken)
{
    float products[4] = {};
    float(&target)[4] = Format::HAS_SCALE ? products : sums;
#pragma unroll
    for (int oct = 0; oct < Format::OCTS; oct++) {
        unsigned one[4], other[4], terms[Activations::TERMS][4];
        Format::expand(upper, oct, one);
        Format::expand(lower, oct, other);
        taken.expand(oct, terms);
#pragma unroll
        for (int term = 0; term < Activations::TERMS; term++)
            multiply_oct(target, one, other, terms[term]);
    }
    if (Format::HAS_SCALE) {
        const float of_upper = Format::scale(upper), of_lower = Format::scale(lower);
        sums[0] = fmaf(of_upper, products[0], sums[0]);
        sums[1] = fmaf(of_upper, products[1], sums[1]);
        sums[2] = fmaf(of_lower, products[2], sums[2]);
        sums[3] = fmaf(of_lower, products[3], sums[3]);
    }
}
