// Device code of `prefill` token by token: `direct` over sequences of many lengths, with the same `advance`, so that states are the same to
// the bit.

#include "gated_delta.cuh"
#include "packed.cuh"

// Tokens whose outputs a block clears, where no sequence has them.
constexpr int CLEARED = 64;
// Blocks side by side on a multiprocessor.
constexpr int SEQUENTIAL_BLOCKS = 8;

template <int DIM>
__device__ __forceinline__ void prefill(
    void* memory, Batch batch, const Offsets& offsets, bool are_bad, const States& states, const void* source, const void* destination,
    int64 id_bytes, const void* resume, int64 resume_bytes, float scale, bool normalize, int64* signal)
{
    Place<DIM, WARPS, ROWS, LANES> place(blockIdx.x, static_cast<unsigned>(batch.heads));
    auto& shared = *static_cast<Tokens<DIM, WARPS, TILE, true>*>(memory);
    const int64 sequence = place.item;
    const int64 from = load_id(source, id_bytes, sequence);
    const int64 to = load_id(destination, id_bytes, sequence);
    const bool is_padding = from < 0 || to < 0;
    if (are_bad) {
        if (!is_padding && place.is_first())
            count(signal, OUT_OF_RANGE);
        return;
    }
    // A batch of this sequence alone.
    const int64 begin = offsets[sequence];
    batch.q += begin * batch.q_token;
    batch.k += begin * batch.k_token;
    batch.v += begin * batch.v_token;
    batch.g += begin * batch.g_token;
    batch.beta += begin * batch.beta_token;
    batch.out += begin * batch.heads * DIM;
    batch.tokens = offsets[sequence + 1] - begin;
    place.item = 0;
    if (is_padding || from >= states.slots || to >= states.slots) {
        if (!is_padding && place.is_first())
            count(signal, OUT_OF_RANGE);
        return clear_outputs(batch, place, 0);
    }
    if (is_taken(source, destination, id_bytes, offsets.sequences, 1, false, states.slots, sequence, to)) {
        if (place.is_first())
            count(signal, OCCUPIED);
        return clear_outputs(batch, place, 0);
    }
    const int tokens = static_cast<int>(batch.tokens);
    typename Tokens<DIM, WARPS, TILE, true>::Part part{};
    if (shared.mine() < tokens)
        part.load(source_of<DIM>(batch, place, shared.mine()));
    float4 state[ROWS][DIM / 4 / LANES] = {};
    if (!resume || load_id(resume, resume_bytes, sequence))
        states.load<DIM, LANES>(state, from * states.slot_stride + place.state());
    walk<DIM>(state, shared, part, batch, place, tokens, states.are_bfloat16, scale, normalize, [](int) {});
    states.store<DIM, LANES>(state, to * states.slot_stride + place.state());
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, SEQUENTIAL_BLOCKS) gpukit_prefill_sequential(
    const Bits* q, int64 q_token,         // [N, Hk, K]
    const Bits* k, int64 k_token,         // [N, Hk, K]
    const Bits* v, int64 v_token,         // [N, Hv, V]
    const float* g, int64 g_token,        // [N, Hv]
    const float* beta, int64 beta_token,  // [N, Hv]
    Bits* out,                            // [N, Hv, V]
    const void* offsets, int64 offset_bytes, int64 sequences, int64 tokens,
    int64 key_heads, int64 heads, int64 dim,
    void* pool,                           // [slots, Hv, V, K] of the layer
    int64 state_bytes,                    // of an element: 4 for floats, 2 for bfloat16
    int64 slot_stride,                    // in elements
    int64 slots,
    const void* source,                   // [S]
    const void* destination,              // [S]
    int64 id_bytes,
    const void* resume,                   // [S] or null
    int64 resume_bytes,
    int64 state_blocks,                   // blocks with states; the rest clear outputs
    int64 scale,                          // bits of a float, which then needs no register
    int64 normalize,
    int64* signal)
{
    const Offsets packed{offsets, offset_bytes, sequences, tokens};
    const bool are_bad = packed.are_bad();
    if (blockIdx.x >= state_blocks) {
        const int vectors = static_cast<int>(heads * dim / 8);
        clear_unowned(packed, are_bad, (blockIdx.x - state_blocks) * CLEARED, CLEARED, reinterpret_cast<Bytes16*>(out), vectors, vectors);
        return;
    }
    const Batch batch{q, 0, q_token, k, 0, k_token, v, 0, v_token, g, 0, g_token, beta, 0, beta_token, out, 1, 0, key_heads, heads};
    __shared__ Tokens<128, WARPS, TILE, true> memory;
    const States states{pool, slot_stride, slots, state_bytes == 2, 0, 0};
    const float factor = __int_as_float(static_cast<int>(scale));
    if (dim == 128)
        prefill<128>(&memory, batch, packed, are_bad, states, source, destination, id_bytes, resume, resume_bytes, factor, normalize, signal);
    else
        prefill<64>(&memory, batch, packed, are_bad, states, source, destination, id_bytes, resume, resume_bytes, factor, normalize, signal);
}
