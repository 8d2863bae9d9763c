// Kernels of the gated delta rule: what the ops promise stands in `kernels/gated_delta.py`. One module, so that all of them are compiled alike.

#include "gated_delta.cuh"
#include "gated_delta_verify.cuh"

// Tokens one after the other. The state is stored behind the last one, or with `snapshots` behind every one in a slot of its own. What is settled
// is read before the kernel in front has ended. `heads` is a number or a Divisor.
template <int DIM, bool snapshots, bool settled, class Heads>
__device__ __forceinline__ void direct(
    void* memory, const Batch& batch, Heads heads, const States& states, const void* source, const void* destination, int64 id_bytes,
    float scale, bool normalize, int64* signal)
{
    const Place<DIM, WARPS, ROWS, LANES> place(blockIdx.x, heads);
    int key_head = 0;
    if constexpr (!snapshots)
        key_head = batch.key_head(place.head, heads);
    auto& shared = *static_cast<Tokens<DIM, WARPS, TILE, true, HALF, !snapshots>*>(memory);
    const int tokens = static_cast<int>(batch.tokens);
    Part<DIM, TILE, true> part{};
    const auto wait_and_load = [&] {
        wait_for_predecessor();
        if constexpr (settled)
            release_successor();
        if (shared.mine() < tokens) {
            if constexpr (snapshots)
                part.load(source_of<DIM>(batch, place, shared.mine()));
            else
                part.load(addresses_of<DIM>(batch, place, shared.mine(), key_head).load());
        }
    };
    if constexpr (!settled)
        wait_and_load();
    const int64 from = load_id(source, id_bytes, place.item);
    const int64 per_item = snapshots ? tokens : 1;
    const int64 first_id = place.item * per_item;
    bool is_padding = from < 0, is_beyond = from >= states.slots;
    if constexpr (snapshots) {
#pragma unroll 1
        for (int t = 0; t < tokens; t++)
            is_beyond |= load_id(destination, id_bytes, first_id + t) >= states.slots;
    } else {
        is_padding |= load_id(destination, id_bytes, first_id) < 0;
        is_beyond |= load_id(destination, id_bytes, first_id) >= states.slots;
    }
    if (is_padding || is_beyond) {
        if constexpr (settled)
            wait_for_predecessor();
        if (!is_padding && place.is_first())
            count(signal, OUT_OF_RANGE);
        return clear_outputs(batch, place, 0);
    }
    float4 state[ROWS][DIM / 4 / LANES];
    states.load<DIM, LANES>(state, from * states.slot_stride + place.state());
    states.fetch_next<DIM>(from * states.slot_stride + place.block_state(), place.rows);
    if constexpr (settled)
        wait_and_load();
    if (batch.items > 1) {
        bool taken = false;
#pragma unroll 1
        for (int t = 0; t < per_item; t++) {
            const int64 to = load_id(destination, id_bytes, first_id + t);
            taken |= to >= 0 && is_taken(source, destination, id_bytes, batch.items, per_item, snapshots, states.slots, place.item, to);
        }
        if (taken) {
            if (place.is_first())
                count(signal, OCCUPIED);
            return clear_outputs(batch, place, 0);
        }
    }
    walk<DIM>(state, shared, part, batch, place, tokens, states.are_bfloat16, scale, normalize, [&](int t) {
        if constexpr (snapshots) {
            const int64 to = load_id(destination, id_bytes, first_id + t);
            if (to >= 0)
                states.store<DIM, LANES>(state, to * states.slot_stride + place.state());
        }
    });
    if constexpr (!settled)
        release_successor();
    if constexpr (!snapshots)
        states.store<DIM, LANES>(state, load_id(destination, id_bytes, first_id) * states.slot_stride + place.state());
}

template <int DIM>
struct BulkMemory {
    Rows<DIM> rows[BULK_WARPS];
    Tokens<DIM, BULK_WARPS, BULK_TILE, true, HALF, true> tokens;
};

// The same for a batch of many heads: a block has all of its rows on their way before it has registers for them. With settled states those that the
// next call will want follow when they have come, and only what needs the tokens is left for when the kernel in front has ended.
template <int DIM>
__device__ __forceinline__ void direct_in_bulk(
    BulkMemory<DIM>& memory, const Batch& batch, Divisor heads, const States& states, const void* source, const void* destination, int64 id_bytes,
    float scale, bool normalize, bool settled, int64* signal)
{
    Place<DIM, BULK_WARPS, BULK_ROWS, LANES> place(blockIdx.x, heads);
    const auto addresses = [&](int t) { return addresses_of<DIM>(batch, place, t, batch.key_head(place.head, heads)); };
    Rows<DIM>& rows = memory.rows[threadIdx.x / 32];
    auto& shared = memory.tokens;
    const int tokens = static_cast<int>(batch.tokens);
    // Blocks side by side have their first token prepared by different warps, so that not all wait for one scheduler.
    const int mine = (shared.mine() + shared.of_warp * (blockIdx.x ^ blockIdx.x / 128)) % shared.count;
    rows.prepare();
    if (!settled)
        wait_for_predecessor();
    const int64 from = load_id_in_order(source, id_bytes, place.item), to = load_id_in_order(destination, id_bytes, place.item);
    const bool is_padding = from < 0 || to < 0;
    if (is_padding || from >= states.slots || to >= states.slots) {
        if (settled)
            wait_for_predecessor();
        if (!is_padding && place.is_first())
            count(signal, OUT_OF_RANGE);
        return clear_outputs(batch, place, 0);
    }
    // More slots than 32 bits count, no memory holds, and registers are short.
    const unsigned own_slot = static_cast<unsigned>(to);
    rows.fetch(states, from * states.slot_stride + place.warp_state());
    const auto is_in_the_way = [&] {
        return batch.items > 1 && is_taken(source, destination, id_bytes, batch.items, 1, false, states.slots, place.item, to);
    };
    const bool is_ahead = settled && states.prefetch;
    bool taken = false;
    float4 state[BULK_ROWS][DIM / 4 / LANES];
    if (settled)
        taken = is_in_the_way();
    if (is_ahead)
        rows.wait();
    states.fetch_next<DIM>(from * states.slot_stride + place.block_state(), place.rows);
    if (is_ahead)
        rows.load(state, states.are_bfloat16);
    Addresses inputs = addresses(mine);
    inputs.settle();
    if (settled) {
        wait_for_predecessor();
        release_successor();
    }
    Part<DIM, BULK_TILE, true> part{};
    if (mine < tokens)
        part.load(inputs.load());
    if (!settled)
        taken = is_in_the_way();
    if (taken) {
        if (place.is_first())
            count(signal, OCCUPIED);
        rows.wait();
        return clear_outputs(batch, place, 0);
    }
    if (mine / shared.of_warp * shared.of_warp < tokens)
        shared.share(part, normalize, mine);
    shared.synchronize();
    if (!is_ahead) {
        rows.wait();
        rows.load(state, states.are_bfloat16);
    }
    const auto go_past = [&](int first) {
#pragma unroll 1
        for (int t = first; t < min(first + shared.count, tokens); t++) {
            float output[BULK_ROWS];
            advance<DIM, LANES, true>(state, shared, t - first, place.lane, place.first_row % BULK_TILE, states.are_bfloat16, scale, output);
            store_output(batch, place, t, 0, output);
        }
    };
    go_past(0);
    // Tokens of a later turn are not asked for before the one in front is over: beside the state there are no registers for them.
#pragma unroll 1
    for (int first = shared.count; first < tokens; first += shared.count) {
        place.forget();
        shared.synchronize();
        if (first + mine / shared.of_warp * shared.of_warp < tokens) {
            Part<DIM, BULK_TILE, true> later{};
            if (first + mine < tokens)
                later.load(addresses(first + mine).load());
            shared.share(later, normalize, mine);
        }
        shared.synchronize();
        go_past(first);
    }
    states.store<DIM, LANES>(state, own_slot * states.slot_stride + place.state());
    if (!settled)
        release_successor();
}

#define GPUKIT_BATCH_PARAMETERS                            \
    const Bits *q, int64 q_batch, int64 q_token,           \
    const Bits *k, int64 k_batch, int64 k_token,           \
    const Bits *v, int64 v_batch, int64 v_token,           \
    const float *g, int64 g_batch, int64 g_token,          \
    const float *beta, int64 beta_batch, int64 beta_token, \
    Bits *out, int64 items, int64 tokens, int64 key_heads, int64 heads, int64 dim

#define GPUKIT_BATCH                                                                                                              \
    const Batch batch{q,       q_batch, q_token,    k,          k_batch, k_token, v,     v_batch,   v_token, g, g_batch, g_token, \
                      beta,    beta_batch, beta_token, out, items, tokens, key_heads, heads}

#define GPUKIT_DIRECT_PARAMETERS                                                                                                      \
    GPUKIT_BATCH_PARAMETERS,                                                                                                          \
    void *pool,               /* [slots, Hv, V, K] of the layer */                                                                    \
    int64 slot_stride,        /* in elements */                                                                                       \
    int64 slots,                                                                                                                      \
    const void *source,       /* [B] */                                                                                               \
    const void *destination,  /* [B], or of a slot a token [B, T] */                                                                  \
    int64 prefetch,           /* elements from a state to the one that the next call will want, or 0 */                               \
    int64 scale,              /* bits of a float, which then needs no register; above them the hint of the states */                  \
    int64 flags,                                                                                                                      \
    int64 *signal

#define GPUKIT_STATES                                                                                                                 \
    const States states{pool, slot_stride, slots, (flags & BFLOAT16_STATES) != 0, prefetch, upper_half(scale)};                       \
    const float scale_of_outputs = __int_as_float(static_cast<int>(scale))

// `destination` holds a slot a sequence, here and in bulk.
extern "C" __global__ void __launch_bounds__(32 * WARPS, DIRECT_BLOCKS) gpukit_direct(
    GPUKIT_DIRECT_PARAMETERS, int64 heads_inverse)  // 2^32 / heads, as a Divisor has it
{
    GPUKIT_BATCH;
    __shared__ Tokens<128, WARPS, TILE, true, HALF, true> memory;
    GPUKIT_STATES;
    const Divisor head_divisor = divisor_of(heads, heads_inverse);
    if (dim == 128 && flags & SETTLED)
        direct<128, false, true>(&memory, batch, head_divisor, states, source, destination, id_bytes_of(flags, WIDE_SLOTS), scale_of_outputs,
            flags & NORMALIZE, signal);
    else if (dim == 128)
        direct<128, false, false>(&memory, batch, head_divisor, states, source, destination, id_bytes_of(flags, WIDE_SLOTS), scale_of_outputs,
            flags & NORMALIZE, signal);
    else
        direct<64, false, false>(&memory, batch, head_divisor, states, source, destination, id_bytes_of(flags, WIDE_SLOTS), scale_of_outputs,
            flags & NORMALIZE, signal);
}

extern "C" __global__ void __launch_bounds__(32 * BULK_WARPS, BULK_BLOCKS) gpukit_direct_bulk(GPUKIT_DIRECT_PARAMETERS, int64 heads_inverse)
{
    GPUKIT_BATCH;
    __shared__ BulkMemory<128> memory;
    GPUKIT_STATES;
    const Divisor head_divisor = divisor_of(heads, heads_inverse);
    if (dim == 128)
        direct_in_bulk<128>(memory, batch, head_divisor, states, source, destination, id_bytes_of(flags, WIDE_SLOTS), scale_of_outputs,
                            flags & NORMALIZE, flags & SETTLED, signal);
    else
        direct_in_bulk<64>(reinterpret_cast<BulkMemory<64>&>(memory), batch, head_divisor, states, source, destination,
                           id_bytes_of(flags, WIDE_SLOTS), scale_of_outputs, flags & NORMALIZE, flags & SETTLED, signal);
}

// `destination` holds a slot a token.
extern "C" __global__ void __launch_bounds__(32 * WARPS, EXACT_BLOCKS) gpukit_snapshot(GPUKIT_DIRECT_PARAMETERS)
{
    GPUKIT_BATCH;
    __shared__ Tokens<128, WARPS, TILE, true> memory;
    GPUKIT_STATES;
    if (dim == 128)
        direct<128, true, false>(&memory, batch, static_cast<unsigned>(heads), states, source, destination, id_bytes_of(flags, WIDE_SLOTS),
                                 scale_of_outputs, flags & NORMALIZE, signal);
    else
        direct<64, true, false>(&memory, batch, static_cast<unsigned>(heads), states, source, destination, id_bytes_of(flags, WIDE_SLOTS),
                                scale_of_outputs, flags & NORMALIZE, signal);
}

#define GPUKIT_RECORD_PARAMETERS                                    \
    GPUKIT_BATCH_PARAMETERS,                                        \
    void *pool,          /* [slots, Hv, V, K] of the layer */       \
    int64 slot_stride,   /* in elements */                          \
    int64 slots,                                                    \
    const void *source,  /* [B] */                                  \
    const void *valid,   /* [B] or null */                          \
    Bits *log_k,         /* of the layer */                         \
    Bits *log_v,                                                    \
    float2 *log_gates,                                              \
    int64 width

#define GPUKIT_PREVIOUS_PARAMETERS                                  \
    Bits *previous_k,    /* of the layer */                         \
    Bits *previous_v,                                               \
    float2 *previous_gates,                                         \
    int64 previous_width,                                           \
    const void *accepted /* [B] */

#define GPUKIT_FOLD_RECORD_PARAMETERS GPUKIT_RECORD_PARAMETERS, GPUKIT_PREVIOUS_PARAMETERS

#define GPUKIT_RECORD                                                  \
    const Log log{log_k, log_v, log_gates, width, key_heads, heads};   \
    GPUKIT_STATES

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_record(
    GPUKIT_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<SHORT, RECORD_WARPS, RECORD_ROWS, false, false> memory;
    GPUKIT_BATCH;
    GPUKIT_RECORD;
    verify(memory, batch, {}, states, source, valid, log, log, nullptr, scale_of_outputs, dim, flags, signal);
}

extern "C" __global__ void __launch_bounds__(32 * WIDE_RECORD_WARPS, WIDE_RECORD_BLOCKS) gpukit_record_wide(
    GPUKIT_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<SHORT, WIDE_RECORD_WARPS, WIDE_RECORD_ROWS, false, false> memory;
    GPUKIT_BATCH;
    GPUKIT_RECORD;
    verify(memory, batch, {}, states, source, valid, log, log, nullptr, scale_of_outputs, dim, flags, signal);
}

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_record_long(
    GPUKIT_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<MOST_TOKENS, RECORD_WARPS, RECORD_ROWS, false, false> memory;
    GPUKIT_BATCH;
    GPUKIT_RECORD;
    verify(memory, batch, {}, states, source, valid, log, log, nullptr, scale_of_outputs, dim, flags, signal);
}

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_fold_record(
    GPUKIT_FOLD_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<SHORT, RECORD_WARPS, RECORD_ROWS, true, false> memory;
    GPUKIT_BATCH;
    GPUKIT_RECORD;
    const Log previous{previous_k, previous_v, previous_gates, previous_width, key_heads, heads};
    verify(memory, batch, {}, states, source, valid, log, previous, accepted, scale_of_outputs, dim, flags, signal);
}

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_fold_record_long(
    GPUKIT_FOLD_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<MOST_TOKENS, RECORD_WARPS, RECORD_ROWS, true, false> memory;
    GPUKIT_BATCH;
    GPUKIT_RECORD;
    const Log previous{previous_k, previous_v, previous_gates, previous_width, key_heads, heads};
    verify(memory, batch, {}, states, source, valid, log, previous, accepted, scale_of_outputs, dim, flags, signal);
}

#define GPUKIT_CONV_RECORD_PARAMETERS                                   \
    const Bits *x,            /* [B, T, C], raw columns */              \
    int64 x_batch, int64 x_token,                                       \
    const Bits *weight,       /* [C, TAPS] */                           \
    const float *g, int64 g_batch, int64 g_token,                       \
    const float *beta, int64 beta_batch, int64 beta_token,              \
    Bits *out, int64 items, int64 tokens, int64 key_heads, int64 heads, int64 dim, \
    void *pool, int64 slot_stride, int64 slots, const void *source, const void *valid, \
    const Bits *histories,    /* [slots, TAPS - 1, C] of the layer */   \
    int64 history_slot_stride,                                          \
    Bits *log_k, Bits *log_v, float2 *log_gates,                        \
    Bits *log_conv,           /* of the layer */                        \
    int64 width

#define GPUKIT_CONV_RECORD                                                                                                        \
    const Batch batch{nullptr, 0, 0, nullptr, 0, 0, nullptr, 0, 0, g, g_batch, g_token, beta, beta_batch, beta_token, out, items, tokens, \
                      key_heads, heads};                                                                                          \
    const Columns columns{x, x_batch, x_token, weight, histories, history_slot_stride, history_prefetch, log_conv,                \
                          (2 * key_heads + heads) * dim};                                                                         \
    GPUKIT_RECORD

extern "C" __global__ void __launch_bounds__(32 * LARGE_RECORD_WARPS, LARGE_RECORD_BLOCKS) gpukit_conv_record(
    GPUKIT_CONV_RECORD_PARAMETERS, int64 prefetch, int64 history_prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<SHORT, LARGE_RECORD_WARPS, RECORD_ROWS, false, true> memory;
    GPUKIT_CONV_RECORD;
    verify(memory, batch, columns, states, source, valid, log, log, nullptr, scale_of_outputs, dim, flags, signal);
}

extern "C" __global__ void __launch_bounds__(32 * WIDE_RECORD_WARPS, WIDE_RECORD_BLOCKS) gpukit_conv_record_wide(
    GPUKIT_CONV_RECORD_PARAMETERS, int64 prefetch, int64 history_prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<SHORT, WIDE_RECORD_WARPS, WIDE_RECORD_ROWS, false, true> memory;
    GPUKIT_CONV_RECORD;
    verify(memory, batch, columns, states, source, valid, log, log, nullptr, scale_of_outputs, dim, flags, signal);
}

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, RECORD_BLOCKS) gpukit_conv_record_long(
    GPUKIT_CONV_RECORD_PARAMETERS, int64 prefetch, int64 history_prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<MOST_TOKENS, RECORD_WARPS, RECORD_ROWS, false, true> memory;
    GPUKIT_CONV_RECORD;
    verify(memory, batch, columns, states, source, valid, log, log, nullptr, scale_of_outputs, dim, flags, signal);
}

extern "C" __global__ void __launch_bounds__(32 * LARGE_RECORD_WARPS, LARGE_RECORD_BLOCKS) gpukit_conv_fold_record(
    GPUKIT_CONV_RECORD_PARAMETERS, GPUKIT_PREVIOUS_PARAMETERS, int64 prefetch, int64 history_prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<SHORT, LARGE_RECORD_WARPS, RECORD_ROWS, true, true> memory;
    GPUKIT_CONV_RECORD;
    const Log previous{previous_k, previous_v, previous_gates, previous_width, key_heads, heads};
    verify(memory, batch, columns, states, source, valid, log, previous, accepted, scale_of_outputs, dim, flags, signal);
}

extern "C" __global__ void __launch_bounds__(32 * RECORD_WARPS, LONG_FOLD_RECORD_BLOCKS) gpukit_conv_fold_record_long(
    GPUKIT_CONV_RECORD_PARAMETERS, GPUKIT_PREVIOUS_PARAMETERS, int64 prefetch, int64 history_prefetch, int64 scale, int64 flags, int64* signal)
{
    __shared__ RecordMemory<MOST_TOKENS, RECORD_WARPS, RECORD_ROWS, true, true> memory;
    GPUKIT_CONV_RECORD;
    const Log previous{previous_k, previous_v, previous_gates, previous_width, key_heads, heads};
    verify(memory, batch, columns, states, source, valid, log, previous, accepted, scale_of_outputs, dim, flags, signal);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, EXACT_BLOCKS) gpukit_record_exact(
    GPUKIT_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    wait_for_predecessor();
    GPUKIT_BATCH;
    const Log log{log_k, log_v, log_gates, width, key_heads, heads};
    __shared__ ExactMemory memory;
    GPUKIT_STATES;
    if (dim == 128)
        record_exactly<128, false>(&memory, batch, states, source, id_bytes_of(flags, WIDE_SLOTS), valid,
               id_bytes_of(flags, WIDE_VALID), log, log, nullptr, 0, scale_of_outputs, flags & NORMALIZE, signal);
    else
        record_exactly<64, false>(&memory, batch, states, source, id_bytes_of(flags, WIDE_SLOTS), valid,
               id_bytes_of(flags, WIDE_VALID), log, log, nullptr, 0, scale_of_outputs, flags & NORMALIZE, signal);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, EXACT_BLOCKS) gpukit_fold_record_exact(
    GPUKIT_FOLD_RECORD_PARAMETERS, int64 prefetch, int64 scale, int64 flags, int64* signal)
{
    wait_for_predecessor();
    GPUKIT_BATCH;
    const Log log{log_k, log_v, log_gates, width, key_heads, heads};
    const Log previous{previous_k, previous_v, previous_gates, previous_width, key_heads, heads};
    __shared__ ExactMemory memory;
    GPUKIT_STATES;
    if (dim == 128)
        record_exactly<128, true>(&memory, batch, states, source, id_bytes_of(flags, WIDE_SLOTS), valid,
               id_bytes_of(flags, WIDE_VALID), log, previous, accepted, id_bytes_of(flags, WIDE_ACCEPTED), scale_of_outputs,
               flags & NORMALIZE, signal);
    else
        record_exactly<64, true>(&memory, batch, states, source, id_bytes_of(flags, WIDE_SLOTS), valid,
               id_bytes_of(flags, WIDE_VALID), log, previous, accepted, id_bytes_of(flags, WIDE_ACCEPTED), scale_of_outputs,
               flags & NORMALIZE, signal);
}

// What becomes of a row of the log: where its state comes from and goes to, and how many tokens it is taken past.
struct Commit {
    int64 from;
    int64 to;
    int64 m;

    __device__ __forceinline__ Commit(const void* rows, int64 id_bytes, int64 row)
    {
        if (id_bytes == 8)
            load(static_cast<const int64*>(rows) + 3 * row);
        else
            load(static_cast<const int*>(rows) + 3 * row);
    }

    template <class Number>
    __device__ __forceinline__ void load(const Number* at)
    {
        from = __ldg(at);
        to = __ldg(at + 1);
        m = __ldg(at + 2);
    }

    __device__ __forceinline__ bool is_idle() const
    {
        return from < 0 || to < 0 || (m == 0 && from == to);
    }

    __device__ __forceinline__ bool is_valid(int64 slots, int64 width) const
    {
        return from < slots && to < slots && m >= 0 && m <= width;
    }

    // Whether it is neither idle nor refused and comes from or goes to a slot: without branches, in which loads that are on their way would be
    // waited for.
    __device__ __forceinline__ bool needs(int64 slot, int64 slots, int64 width) const
    {
        const bool is_there = static_cast<uint64>(from) < slots & static_cast<uint64>(to) < slots & static_cast<uint64>(m) <= width;
        return is_there & ((from == slot) | (to == slot)) & ((m != 0) | (from != to));
    }
};

// Whether another row needs the slot that one goes to. `near` is that of the lane's own number, or the last: asked for early.
__device__ __forceinline__ bool is_taken(
    const Commit& near, const void* rows, int64 id_bytes, unsigned count, int64 slots, int64 width, unsigned row, int64 to)
{
    const unsigned lane = threadIdx.x % 32;
    bool taken = (min(lane, count - 1) != row) & near.needs(to, slots, width);
#pragma unroll 1
    for (unsigned i = lane + 32; i < count; i += 32)
        taken |= i != row && Commit(rows, id_bytes, i).needs(to, slots, width);
    return __any_sync(0xffffffffu, taken);
}

// Tokens of the log on their way to shared memory: a wait for them does not wait for states that registers are to have.
template <int DIM>
struct Fetched {
    struct Token {
        alignas(16) Bits k[DIM];
        alignas(16) Bits v[FOLD_TILE];
        float2 gates;
    };

    Token tokens[32 / QUARTER];

    // A quarter of the warp copies its token.
    __device__ __forceinline__ void fetch(const Bits* k, const Bits* v, const float2* gates)
    {
        const int lane = threadIdx.x % QUARTER;
        Token& token = tokens[threadIdx.x / QUARTER];
#pragma unroll
        for (int i = 0; i < DIM / 8 / QUARTER; i++)
            copy_later(token.k + 8 * (QUARTER * i + lane), k + 8 * (QUARTER * i + lane), true);
        static_assert(FOLD_TILE % 8 == 0 && FOLD_TILE / 8 < QUARTER);
        if (lane < FOLD_TILE / 8)
            copy_later(token.v + 8 * lane, v + 8 * lane, true);
        else if (lane == FOLD_TILE / 8)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(&token.gates)), "l"(gates) : "memory");
    }

    // As what is prepared next. Nothing comes of what has not been fetched.
    template <class Part>
    __device__ __forceinline__ void load(Part& part) const
    {
        const int lane = threadIdx.x % QUARTER;
        const Token& token = tokens[threadIdx.x / QUARTER];
#pragma unroll
        for (int i = 0; i < DIM / 4 / QUARTER; i++)
            part.k.words[i] = reinterpret_cast<const uint2*>(token.k)[QUARTER * i + lane];
#pragma unroll
        for (int i = 0; i < FOLD_TILE / QUARTER; i++)
            part.v[i] = token.v[QUARTER * i + lane];
        part.g = token.gates.x;
        part.beta = token.gates.y;
    }
};

template <int DIM>
struct FoldMemory {
    Fetched<DIM> fetched;
    Tokens<DIM, FOLD_WARPS, FOLD_TILE, false, QUARTER> tokens;
};

template <int DIM>
__device__ __forceinline__ void fold(
    FoldMemory<DIM>& memory, const States& states, int64 layer_stride, const Log& log, unsigned log_rows, const void* rows, int64 id_bytes,
    Divisor row_count, Divisor heads, bool normalize, bool settled, int64* signal)
{
    static_assert(FOLD_WARPS == 1);
    using FoldPlace = Place<DIM, FOLD_WARPS, FOLD_ROWS, LANES>;
    auto& shared = memory.tokens;
    const unsigned block = blockIdx.x / FoldPlace::tiles;
    const unsigned item = heads.quotient(block);
    const FoldPlace place(item, block - item * heads.value, blockIdx.x % FoldPlace::tiles);
    const unsigned layer = row_count.quotient(item), row = item - layer * row_count.value;
    // All rows are on their way at once.
    const Commit commit(rows, id_bytes, row);
    const Commit near(rows, id_bytes, min(threadIdx.x % 32, row_count.value - 1));
    if (commit.is_idle())
        return;
    if (!commit.is_valid(states.slots, log.width)) {
        if (layer == 0 && place.is_first())
            count(signal, OUT_OF_RANGE);
        return;
    }
    if (row_count.value > 1 && is_taken(near, rows, id_bytes, row_count.value, states.slots, log.width, row, commit.to)) {
        if (layer == 0 && place.is_first())
            count(signal, OCCUPIED);
        return;
    }
    const int m = static_cast<int>(commit.m);
    const unsigned entry = (layer * log_rows + row) * static_cast<unsigned>(log.width);
    const unsigned key_heads = static_cast<unsigned>(log.key_heads);
    const unsigned key_head = heads.quotient(place.head * key_heads);
    const auto fetch = [&](int t) {
        if (t < m) {
            // More entries, or heads of them, than 32 bits count, no memory holds.
            const unsigned at = (entry + t) * heads.value + place.head;
            const int64 keys = (entry + t) * key_heads + key_head;
            memory.fetched.fetch(log.k + keys * DIM, log.v + static_cast<int64>(at) * DIM + place.tile * place.rows, log.gates + at);
        }
    };
    fetch(shared.mine());
    const int64 at = layer * layer_stride + place.state();
    float4 state[FOLD_ROWS][DIM / 4 / LANES];
    states.load<DIM, LANES>(state, at + static_cast<unsigned>(commit.from) * states.slot_stride);
#pragma unroll 1
    for (int first = 0; first < m; first += shared.count) {
        wait_for_copies();
        shared.synchronize();
        // Tokens are prepared while the state is on its way.
        typename Tokens<DIM, FOLD_WARPS, FOLD_TILE, false, QUARTER>::Part part;
        memory.fetched.load(part);
        shared.share(part, normalize);
        shared.synchronize();
        fetch(first + shared.count + shared.mine());
        float nothing[FOLD_ROWS];
#pragma unroll 1
        for (int t = 0; t < min(shared.count, m - first); t++)
            advance<DIM, LANES, false>(state, shared, t, place.lane, place.first_row % FOLD_TILE, states.are_bfloat16, 1.0f, nothing);
    }
    if (!settled)
        release_successor();
    states.store<DIM, LANES>(state, at + static_cast<unsigned>(commit.to) * states.slot_stride);
}

// The last three columns seen, after m more: eight channels a thread. `signal` is for when there are no states that count.
__device__ __forceinline__ void fold_history(
    unsigned block, Bits* pool, int64 layer_stride, int64 slot_stride, int64 slots, const Bits* log, int64 log_rows, int64 width,
    int64 channels, const void* rows, int64 id_bytes, Divisor row_count, int64* signal)
{
    const unsigned vectors = static_cast<unsigned>(channels / 8);
    const unsigned pieces = (vectors + 32 * FOLD_WARPS - 1) / (32 * FOLD_WARPS);
    const unsigned item = block / pieces, layer = row_count.quotient(item), row = item - layer * row_count.value;
    const unsigned vector = (block - item * pieces) * (32 * FOLD_WARPS) + threadIdx.x;
    const Commit commit(rows, id_bytes, row);
    const Commit near(rows, id_bytes, min(threadIdx.x % 32, row_count.value - 1));
    const bool counts = block == item * pieces && layer == 0 && threadIdx.x == 0;
    if (commit.is_idle())
        return;
    if (!commit.is_valid(slots, width)) {
        if (counts)
            count(signal, OUT_OF_RANGE);
        return;
    }
    if (row_count.value > 1 && is_taken(near, rows, id_bytes, row_count.value, slots, width, row, commit.to)) {
        if (counts)
            count(signal, OCCUPIED);
        return;
    }
    if (vector >= vectors)
        return;
    Bits* histories = pool + layer * layer_stride;
    const Bits* columns = log + (static_cast<int64>(layer) * log_rows + row) * width * channels;
    Bytes16 kept[3];
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const int64 column = commit.m + i;
        const Bits* from = column < 3 ? histories + commit.from * slot_stride + column * channels : columns + (column - 3) * channels;
        kept[i] = reinterpret_cast<const Bytes16*>(from)[vector];
    }
#pragma unroll
    for (int i = 0; i < 3; i++)
        reinterpret_cast<Bytes16*>(histories + commit.to * slot_stride + i * channels)[vector] = kept[i];
}

extern "C" __global__ void __launch_bounds__(32 * FOLD_WARPS, FOLD_BLOCKS) gpukit_fold(
    void* pool,            // [layers, slots, Hv, V, K]
    int64 layer_stride,
    int64 slot_stride,
    int64 slots,
    Bits* log_k,           // [layers, log_rows, W, Hk, K]
    Bits* log_v,
    float2* log_gates,
    int64 log_rows,
    int64 width,
    int64 key_heads,
    int64 heads,
    int64 dim,
    const void* rows,      // [R, 3]
    int64 id_bytes,
    int64 row_count,
    int64 heads_inverse,   // 2^32 / heads, as a Divisor has it
    int64 rows_inverse,    // 2^32 / row_count
    int64 flags,
    int64 state_blocks,    // the blocks before this one fold states, the rest histories
    Bits* histories,       // [layers, slots, 3, C]
    int64 history_layer_stride,
    int64 history_slot_stride,
    const Bits* log_conv,  // [layers, log_rows, W, C]
    int64 channels,
    int64* signal)
{
    // What is settled needs no kernel in front, but whoever waits for this one waits for that one too: its last block, which ends it, waits.
    if (flags & SETTLED)
        release_successor();
    else
        wait_for_predecessor();
    const Divisor row_divisor = divisor_of(row_count, rows_inverse);
    if (blockIdx.x < state_blocks) {
        const Divisor head_divisor = divisor_of(heads, heads_inverse);
        const Log log{log_k, log_v, log_gates, width, key_heads, heads};
        __shared__ FoldMemory<128> memory;
        const States states{pool, slot_stride, slots, (flags & BFLOAT16_STATES) != 0, 0, upper_half(flags)};
        if (dim == 128)
            fold<128>(memory, states, layer_stride, log, static_cast<unsigned>(log_rows), rows, id_bytes, row_divisor, head_divisor,
                      flags & NORMALIZE, flags & SETTLED, signal);
        else
            fold<64>(reinterpret_cast<FoldMemory<64>&>(memory), states, layer_stride, log, static_cast<unsigned>(log_rows), rows, id_bytes,
                     row_divisor, head_divisor, flags & NORMALIZE, flags & SETTLED, signal);
    } else {
        fold_history(blockIdx.x - static_cast<unsigned>(state_blocks), histories, history_layer_stride, history_slot_stride, slots, log_conv,
                     log_rows, width, channels, rows, id_bytes, row_divisor, state_blocks ? nullptr : signal);
    }
    if (flags & SETTLED && blockIdx.x == gridDim.x - 1)
        wait_for_predecessor();
}
