// Device code of the causal convolution of a decode step: what it promises stands in `kernels/conv.py`. A thread takes one or two channels of a
// row through all its tokens; the window lives in registers, and a batch of tokens is loaded before the first is needed.

#include "bf16.cuh"
#include "conv.cuh"
#include "gpukit.cuh"

// Few channels a thread and small blocks: a single row of 8,192 channels is on 32 multiprocessors.
constexpr int THREADS = 128;
// Tokens loaded at once: a verification of three drafts waits for memory once.
constexpr int AHEAD = 4;

// One row of a call; strides in words.
template <typename Word>
struct Row {
    const Word* x;
    int64 x_token;
    Word* history;
    int64 history_column;
    Word* log;  // 0: the history is written instead
    int64 log_token;
    const Word* previous;  // columns that the history has yet to take
    int64 previous_token;
    int64 accepted;        // how many
    Word* out;
    int64 out_token;

    // Column `i` of the history once it has taken the accepted columns.
    __device__ __forceinline__ Word moved_on(int64 i) const
    {
        i += accepted;
        return i < TAPS - 1 ? history[i * history_column] : previous[(i - (TAPS - 1)) * previous_token];
    }

    __device__ __forceinline__ void write_history(Word a, Word b, Word c) const
    {
        history[0] = a;
        history[history_column] = b;
        history[2 * history_column] = c;
    }
};

template <typename Word>
__device__ __forceinline__ void convolve(
    const Row<Word>& row, const typename Channels<Word>::Taps& taps, int64 tokens, int64 valid)
{
    using Column = Channels<Word>;
    Word a = row.moved_on(0), b = row.moved_on(1), c = row.moved_on(2);
    if (row.accepted)
        row.write_history(a, b, c);
#pragma unroll 1
    for (int64 first = 0; first < valid; first += AHEAD) {
        Word columns[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (first + i < valid)
                columns[i] = row.x[(first + i) * row.x_token];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (first + i < valid) {
                const Word d = columns[i];
                row.out[(first + i) * row.out_token] = Column::output(taps, Column(a), Column(b), Column(c), Column(d));
                if (row.log)
                    row.log[(first + i) * row.log_token] = d;
                a = b, b = c, c = d;
            }
    }
#pragma unroll 1
    for (int64 token = valid; token < tokens; token++)
        row.out[token * row.out_token] = 0;
    if (!row.log)
        row.write_history(a, b, c);
}

struct Call {
    const void* x;         // [rows, tokens, channels]
    int64 x_row;
    int64 x_token;
    const void* weight;    // [channels, TAPS]
    void* history;         // [slot_count, 3, channels], oldest first
    int64 history_slot;
    int64 history_column;
    int64 slot_count;
    const void* slots;     // [rows]
    int64 slot_bytes;
    void* log;             // [rows, at least tokens, channels], or 0
    int64 log_row;
    int64 log_token;
    const void* valid;     // [rows], or 0
    int64 valid_bytes;
    const void* previous;  // [rows, previous_tokens, channels], or 0
    int64 previous_row;
    int64 previous_token;
    int64 previous_tokens;
    const void* accepted;  // [rows]
    int64 accepted_bytes;
    void* out;             // [rows, tokens, channels]
    int64 out_row;
    int64 out_token;
    int64 tokens;
    int64 words;           // of a column; strides are in words
    int64 chunks;          // blocks of a row
    int64* signal;

    __device__ __forceinline__ int64 valid_of(int64 row) const
    {
        return valid ? load_id(valid, valid_bytes, row) : tokens;
    }

    __device__ __forceinline__ int64 accepted_of(int64 row) const
    {
        return previous ? load_id(accepted, accepted_bytes, row) : 0;
    }

    __device__ __forceinline__ bool in_range(int64 slot, int64 own_valid, int64 own_accepted) const
    {
        return slot < slot_count && own_valid >= 0 && own_valid <= tokens && own_accepted >= 0 && own_accepted <= previous_tokens;
    }

    // Whether an earlier row takes the same slot. Every thread of the block calls it.
    __device__ __forceinline__ bool has_earlier(int64 row, int64 slot) const
    {
        bool found = false;
#pragma unroll 1
        for (int64 i = threadIdx.x; i < row; i += THREADS)
            found |= load_id(slots, slot_bytes, i) == slot && in_range(slot, valid_of(i), accepted_of(i));
        return __syncthreads_or(found);
    }
};

template <typename Word>
__device__ __forceinline__ void run(const Call& call)
{
    using Taps = typename Channels<Word>::Taps;
    const unsigned b = blockIdx.x / static_cast<unsigned>(call.chunks);
    const unsigned chunk = blockIdx.x - b * static_cast<unsigned>(call.chunks);
    const unsigned word = chunk * THREADS + threadIdx.x;
    const bool counts = chunk == 0 && threadIdx.x == 0;
    const bool live = word < call.words;
    const int64 slot = load_id(call.slots, call.slot_bytes, b);
    const int64 valid = call.valid_of(b);
    const int64 accepted = call.accepted_of(b);
    Taps taps{};
    if (live)
        taps = __ldg(static_cast<const Taps*>(call.weight) + word);
    if (slot < 0)
        return;
    if (!call.in_range(slot, valid, accepted)) {
        if (counts)
            count(call.signal, OUT_OF_RANGE);
        return;
    }
    Row<Word> row;
    row.x = static_cast<const Word*>(call.x) + b * call.x_row + word;
    row.x_token = call.x_token;
    row.history = static_cast<Word*>(call.history) + slot * call.history_slot + word;
    row.history_column = call.history_column;
    row.log = call.log ? static_cast<Word*>(call.log) + b * call.log_row + word : nullptr;
    row.log_token = call.log_token;
    row.previous = static_cast<const Word*>(call.previous) + b * call.previous_row + word;
    row.previous_token = call.previous_token;
    row.accepted = accepted;
    row.out = static_cast<Word*>(call.out) + b * call.out_row + word;
    row.out_token = call.out_token;
    // Rows may share a history that nobody writes.
    if ((!row.log || call.previous) && call.has_earlier(b, slot)) {
        if (counts)
            count(call.signal, UNBOUND);
        return;
    }
    if (live)
        convolve(row, taps, call.tokens, valid);
}

extern "C" __global__ void __launch_bounds__(THREADS) gpukit_conv1d_silu(
    const void* x, int64 x_row, int64 x_token, const void* weight,
    void* history, int64 history_slot, int64 history_column, int64 slot_count,
    const void* slots, int64 slot_bytes, void* log, int64 log_row, int64 log_token, const void* valid, int64 valid_bytes,
    const void* previous, int64 previous_row, int64 previous_token, int64 previous_tokens, const void* accepted, int64 accepted_bytes,
    void* out, int64 out_row, int64 out_token, int64 tokens, int64 words, int64 chunks,
    int64 channels_a_word,  // 2, where pairs of channels are whole words everywhere, or 1
    int64* signal)
{
    wait_for_predecessor();
    release_successor();
    const Call call{x, x_row, x_token, weight, history, history_slot, history_column, slot_count, slots, slot_bytes,
                    log, log_row, log_token, valid, valid_bytes,
                    previous, previous_row, previous_token, previous_tokens, accepted, accepted_bytes,
                    out, out_row, out_token, tokens, words, chunks, signal};
    if (channels_a_word == 2)
        run<Bytes4>(call);
    else
        run<Bytes2>(call);
}
