"""The small kernels of a speculative round: verify inputs from drafts, accept what the model confirms, and what the next round starts from.

All of it stays on the device: accepted counts become the rows of `gated_delta.fold`, so that verification, acceptance and commit are one graph.
B is the number of sequences, T = drafts + 1 the tokens of a verification, the anchor first: the last token that was emitted, whose state is still
to come. Columns of logits belong to these tokens, and each predicts the token after its own.

Sampling is by perturbed maximum: ``argmax(logits / temperature + noise)`` over the tokens that top-k and top-p leave, with Gumbel noise, is a draw
from their softmax. The noise of a token is a function of the sequence's seed, the position and the token's id alone, so a draw depends on seed,
position and logits and on nothing else: not on the batch, the launch, or whether the position was reached by speculation.
"""

from __future__ import annotations

from typing import Any

from gpukit import arrays, devices
from gpukit.arrays import ITEMSIZE, output, span, vector
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels._plans import allocate, blocks_for, signal_pointer, whole
from gpukit.kernels._tensors import NUMBERS, Tensor, like_shape, multiple_of, refuse_overlap, same_bytes, tensor
from gpukit.kernels.reference import speculative as reference
from gpukit.launch import IDS, Kernel, host, nothing, operation
from gpukit.streams import choose

__all__ = ["accept_greedy", "accept_sampled", "argmax_columns", "prepare_verify", "sample", "select_hidden", "workspace"]

_PREPARE_VERIFY = Kernel("speculative", "prepare_verify", language="cuda", early=True)
_ACCEPT_GREEDY = Kernel("speculative", "accept_greedy", language="cuda", early=True)
_DRAW = Kernel("speculative", "draw", language="cuda", early=True)
_DRAW_SELECTED = Kernel("speculative", "draw_selected", language="cuda", early=True)
_SELECT_HIDDEN = Kernel("speculative", "select_hidden", language="cuda", early=True)
_ARGMAX_COLUMNS = Kernel("speculative", "argmax_columns", language="cuda", early=True)

# THREADS, SELECT_THREADS and AHEAD of cuda/speculative.cu.
_THREADS = 256
_SELECT_THREADS = 1024
_AHEAD = 8

_FLOAT = ("float32",)
_INT64 = ("int64",)
_WORDS = ("float16", "bfloat16", "int16", "uint16", "float32", "int32", "uint32")
_MOST_BLOCKS = 2**31 - 1
# Masses of 2^44 at most add up in 64 bits.
_MOST_VOCABULARY = 2**19
_MOST_ROWS_OF_LOGITS = 2**31 - 2**16
# A few blocks for every multiprocessor of today's devices; more would only meet at the same words.
_ENOUGH_BLOCKS = 1024
# Words of a workspace for each row: a best candidate, a mark, an arrival count.
_ROW_WORDS = 3


class _Owned(int):
    """An address that keeps its array alive."""

    array: Any = None


def workspace(rows: int, like: Any = None) -> Any:
    """The workspace of `argmax_columns`, `sample` (`rows` of either) and `accept_sampled` (B times T rows).

    Parameters
    ----------
    rows : int
        Rows or columns of logits of the largest call it serves.
    like : array, optional
        An array of the library and device to allocate in; NumPy by default.

    Returns
    -------
    int64 array, shape (3 * rows,)
        Zeros. Every call leaves zeros again, so one workspace serves any number of calls of these ops, one stream at a time.

    Examples
    --------
    >>> workspace(2)
    array([0, 0, 0, 0, 0, 0])
    """
    return arrays.full(_ROW_WORDS * whole(rows, "rows"), 0, "int64", like)


@operation
def prepare_verify(
    anchors: Any,
    drafts: Any,
    lengths: Any,
    *,
    tokens: int | None = None,
    draft_starts: Any = None,
    padding: int = -1,
    ids: Any = None,
    positions: Any = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> tuple[Any, Any]:
    """The inputs of a verification: every sequence's anchor, then its drafts, and their positions.

    ``ids[b] = [anchors[b], *drafts[b, start : start + T - 1]]`` and ``positions[b, t] = lengths[b] + t``.

    Parameters
    ----------
    anchors : int32 or int64 array, shape (B,)
        The last token of each sequence, not yet in its state.
    drafts : int32 or int64 array, shape (B, D)
        Guesses for the tokens after it, contiguous within a row: a round's drafts, or a longer table (a prompt to look up, drafts to replay).
    lengths : int32 or int64 array, shape (B,)
        Tokens before the anchor, which is its position. A sequence with a negative length is idle.
    tokens : int, optional
        T, at least 1; D + 1 by default.
    draft_starts : int32 or int64 array, shape (B,), optional
        Where in its row of `drafts` each sequence's guesses begin; 0 by default. What lies outside the row is padding, never read.
    padding : int
        The id of padding and of idle sequences. ``-1`` is accepted by no acceptance. Where an embedding must be able to look it up, take any
        id of the vocabulary: accepted or not, it is then a draft like others.
    ids : int32 or int64 array, shape (B, T), optional
        Receives the input ids; contiguous within a row.
    positions : int32 or int64 array, shape (B, T), optional
        Receives the positions, -1 for idle sequences; contiguous within a row.
    stream : stream, optional
        Where to launch; the current stream of `anchors`' library by default.
    signal : Signal, optional
        For uniformity with the other ops; there is nothing to count.

    Returns
    -------
    tuple of int32 or int64 arrays, shape (B, T)
        `ids` and `positions`, or new arrays of `anchors`' library with the dtypes of `anchors` and `lengths`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides or device, or an output overlaps another array. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `ids` and `positions` are given.

    Examples
    --------
    >>> ids, positions = prepare_verify(np.array([7, 8]), np.array([[1, 2], [3, 4]]), np.array([10, -1]))
    >>> ids, positions
    (array([[ 7,  1,  2], [-1, -1, -1]]), array([[10, 11, 12], [-1, -1, -1]]))
    >>> prepare_verify(np.array([7]), np.array([[5, 6, 7, 1, 2]]), np.array([10]), tokens=4, draft_starts=np.array([3]))[0]
    array([[ 7,  1,  2, -1]])
    """
    own = tensor(anchors, "anchors", IDS, (1,))
    (rows,), device = own[1], own[4]
    table = tensor(drafts, "drafts", IDS, (2,), device)
    if table[1][0] != rows:
        raise ArgumentError(f"drafts: expected shape ({rows}, any), the sequences of anchors, got {table[1]}")
    width = table[1][1]
    tokens = width + 1 if tokens is None else whole(tokens, "tokens", 1, 2**31 - 1)
    padding = whole(padding, "padding", -(2**31), 2**31 - 1)
    length = _vector(lengths, "lengths", rows, device)
    starts = _vector(draft_starts, "draft_starts", rows, device) if draft_starts is not None else None
    out_ids = _block(ids, "ids", rows, tokens, device) if ids is not None else None
    out_positions = _block(positions, "positions", rows, tokens, device) if positions is not None else None
    _apart({"ids": out_ids, "positions": out_positions}, {"anchors": own, "drafts": table, "lengths": length, "draft_starts": starts})
    if device < 0:
        ids = arrays.empty((rows, tokens), own[3], anchors) if ids is None else ids
        positions = arrays.empty((rows, tokens), length[3], anchors) if positions is None else positions
        return host(_reference_prepare_verify, anchors, drafts, lengths, draft_starts, ids, positions, padding)  # type: ignore[no-any-return]
    if signal is not None:
        signal_pointer(signal, device)
    handle = choose(stream, anchors)
    if out_ids is None:
        ids, pointer = allocate("ids", (rows, tokens), own[3], anchors, handle)
        out_ids = (pointer, (rows, tokens), (tokens, 1), own[3], device)
    if out_positions is None:
        positions, pointer = allocate("positions", (rows, tokens), length[3], anchors, handle)
        out_positions = (pointer, (rows, tokens), (tokens, 1), length[3], device)
    result = ids, positions
    if rows == 0:
        return nothing(result)  # type: ignore[no-any-return]
    arguments = (
        *_plain(own), *_plain(table), table[2][0], width, *_plain(length), *_plain(starts),
        *_plain(out_ids), out_ids[2][0], *_plain(out_positions), out_positions[2][0], rows, tokens, padding,
    )  # fmt: skip
    blocks = _grid(blocks_for(rows * tokens, _THREADS), "tokens")
    return _PREPARE_VERIFY.launch((), device, handle, blocks, _THREADS, arguments, result)  # type: ignore[no-any-return]


def _reference_prepare_verify(anchors: Any, drafts: Any, lengths: Any, starts: Any, ids: Any, positions: Any, padding: int) -> tuple[Any, Any]:
    reference.prepare_verify(anchors, drafts, lengths, starts, ids, positions, padding)
    return ids, positions


@operation
def accept_greedy(
    targets: Any,
    ids: Any,
    lengths: Any,
    anchors: Any,
    *,
    valid: Any = None,
    slots: Any = None,
    accepted: Any = None,
    rows: Any = None,
    emitted: Any = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Accept the longest prefix of the drafts that the model's own choices confirm, and take every sequence to its next anchor.

    m is 1 plus the length of the longest prefix with ``targets[b, i] == ids[b, i + 1]``: the verified inputs that stand, the anchor among them, and
    as many new tokens, ``targets[b, :m]``. The last of these is the next anchor.

    Parameters
    ----------
    targets : int32 or int64 array, shape (B, T)
        The model's choice after every input, as of `argmax_columns`; contiguous within a row.
    ids : int32 or int64 array, shape (B, T)
        The inputs, as of `prepare_verify`; contiguous within a row. The first is not looked at. A negative id is no draft and ends the prefix.
    lengths : int32 or int64 array, shape (B,)
        Tokens before the anchor: ``lengths[b] += m``, in place. A sequence with a negative length is idle.
    anchors : int32 or int64 array, shape (B,)
        Written: ``anchors[b] = targets[b, m - 1]``.
    valid : int32 or int64 array, shape (B,), optional
        Inputs of each sequence that count, so that m is at most ``valid[b]``; T by default. With 0 the sequence is idle; with a number outside
        0 … T it is skipped like an idle one, and counted as ``out_of_range``.
    slots : int32 or int64 array, shape (B,), optional
        The state slot of each sequence, for `rows`; b itself by default.
    accepted : int32 or int64 array, shape (B,), optional
        Receives m, 0 for idle sequences, whose length and anchor stay as they are.
    rows : int32 or int64 array, shape (B, 3), optional
        Receives ``(slots[b], slots[b], m)``, what `gated_delta.fold` takes; contiguous. Not wanted by default.
    emitted : int32 or int64 array, shape (B, T), optional
        Receives the new tokens ``targets[b, :m]``, then -1; contiguous within a row. Not wanted by default.
    stream : stream, optional
        Where to launch; the current stream of `targets`' library by default.
    signal : Signal, optional
        Counts ``out_of_range``, once a sequence.

    Returns
    -------
    int32 or int64 array, shape (B,)
        `accepted`, or a new array of `targets`' library with the dtype of `lengths`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides or device, or one that is written overlaps another. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `accepted` is given. A warp takes a sequence. Method: Leviathan, Kalman and
    Matias, "Fast Inference from Transformers via Speculative Decoding", 2023, at temperature 0.

    Examples
    --------
    >>> targets, ids = np.array([[5, 6, 9, 1]]), np.array([[4, 5, 6, 7]])
    >>> lengths, anchors, emitted = np.array([10]), np.array([4]), np.zeros((1, 4), np.int64)
    >>> accept_greedy(targets, ids, lengths, anchors, emitted=emitted)
    array([3])
    >>> lengths, anchors, emitted
    (array([13]), array([9]), array([[ 5,  6,  9, -1]]))
    """
    chosen = tensor(targets, "targets", IDS, (2,))
    device = chosen[4]
    outcome = _Outcome(chosen[1], "targets", ids, lengths, anchors, valid, slots, accepted, rows, emitted, device)
    outcome.refuse_overlaps({"targets": chosen})
    if device < 0:
        accepted = outcome.on_host(accepted, targets)
        return host(reference.accept_greedy, targets, ids, lengths, anchors, valid, slots, accepted, rows, emitted, signal=signal)
    counters = signal_pointer(signal, device) if signal is not None else 0
    handle = choose(stream, targets)
    accepted = outcome.on_device(accepted, targets, handle)
    if outcome.sequences == 0:
        return nothing(accepted)
    arguments = (*_plain(chosen), chosen[2][0], *outcome.arguments(), outcome.sequences, outcome.tokens, counters)
    blocks = _grid(blocks_for(outcome.sequences * 32, _THREADS), "targets")
    return _ACCEPT_GREEDY.launch((), device, handle, blocks, _THREADS, arguments, accepted)


@operation
def accept_sampled(
    logits: Any,
    ids: Any,
    lengths: Any,
    anchors: Any,
    *,
    seeds: Any,
    temperature: Any,
    top_k: Any = None,
    top_p: Any = None,
    vocabulary: int | None = None,
    valid: Any = None,
    slots: Any = None,
    accepted: Any = None,
    rows: Any = None,
    emitted: Any = None,
    workspace: Any = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Draw a token after every input, and accept the longest prefix of the drafts that the draws confirm.

    Speculative sampling accepts a draft d, which is certain here, with its probability p(d) under the model, and else draws from p without d. That is
    what drawing x from p does: x equals d with probability p(d), and an x that differs is distributed as p without d. So the op is `sample` on
    every column and `accept_greedy` on the draws, and emitted tokens are distributed as without drafts; what is more, they are the *same* tokens.

    Parameters
    ----------
    logits : float32, bfloat16 or uint16 (for bfloat16) array, shape (B, T, vocabulary or more)
        Contiguous within a column, the strides of sequences and tokens are free. NaN counts as minus infinity.
    ids, lengths, anchors, valid, slots, accepted, rows, emitted
        As in `accept_greedy`, the draws being the targets.
    seeds : int32 or int64 array, shape (B,)
        Of the noise of each sequence.
    temperature : float32 array, shape (B,)
        Logits are divided by it. Below 1e-5 the largest logit is taken, the lowest id on ties. With a negative or non-finite temperature, too, and
        the sequence is counted as ``out_of_range``.
    top_k : int32 or int64 array, shape (B,), optional
        Only the k largest logits take part, and all that equal the last of them; 0, a negative number or one from the vocabulary's size on is off.
    top_p : float32 array, shape (B,), optional
        Of what top-k left, only the smallest set of largest logits whose probabilities add up to p takes part, at least one, and all that equal
        the last of them; 1 or more is off. NaN is off and counted as ``out_of_range``.
    vocabulary : int, optional
        Ids from here on are padding of the logits: never read, never drawn. At most 2^19.
    workspace : int64 array, shape (3 * B * T or more,), optional
        Zeros, as of `workspace`; zeros again afterwards. Without one an array is allocated and cleared, which is a second operation on the stream.
    stream : stream, optional
        Where to launch; the current stream of `logits`' library by default.
    signal : Signal, optional
        Counts ``out_of_range``: once a sequence for a bad `valid`, once for a bad temperature or `top_p`, once a column with NaN among its logits.

    Returns
    -------
    int32 or int64 array, shape (B,)
        `accepted`, or a new array of `logits`' library with the dtype of `lengths`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides or device, or one that is written overlaps another. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `accepted` and `workspace` are given. The draw after input t of sequence b is
    ``argmax(logits[b, t] * (1 / temperature) + gumbel)``, the lowest id on ties, in float32. ``gumbel = -log(-log(1 - v))``, ``v = (r + 1/2) / 2^32``
    with r word ``id % 4`` of Philox4x32-10 with the key ``seed`` and the counter ``(id // 4, position, purpose)``: one word, two, and one that is 0
    for drawing; the position is the input's, ``lengths[b] + t``. Logarithms, exponentials and sums are those of NumPy's backend to the bit, on
    every device: results differ in no way. Noise ends at 22.9, so tokens of a probability under 2^-35 or so are drawn still less often.
    Top-k and top-p find their smallest logit by its digits, 11 bits at a time, counting logits or adding probabilities as integers of 2^-44 of the
    largest one, in which the order of additions does not matter; nothing is sorted. Without both, several blocks share a column.
    Methods: Gumbel-max, as in Maddison, Tarlow and Minka, "A* Sampling", 2014; Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011;
    Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", 2023.

    Examples
    --------
    >>> logits = np.log(np.array([[[0.1, 0.9], [0.5, 0.5], [0.2, 0.8]]], np.float32))
    >>> ids, lengths, anchors, emitted = np.array([[0, 1, 0]]), np.array([10]), np.array([0]), np.zeros((1, 3), np.int64)
    >>> sampling = {"seeds": np.array([5]), "temperature": np.ones(1, np.float32)}
    >>> accept_sampled(logits, ids, lengths, anchors, **sampling, emitted=emitted)
    array([2])
    >>> emitted, lengths, anchors
    (array([[ 1,  1, -1]]), array([12]), array([1]))
    >>> sample(logits[0], np.full(3, 5), np.array([10, 11, 12]), np.ones(3, np.float32))
    array([1, 1, 1])
    """
    own = tensor(logits, "logits", NUMBERS, (3,))
    _, shape, strides, _, device = own
    sequences, tokens = shape[:2]
    outcome = _Outcome((sequences, tokens), "logits", ids, lengths, anchors, valid, slots, accepted, rows, emitted, device)
    draws = _Sampling(own, seeds, temperature, top_k, top_p, vocabulary, workspace, sequences, sequences * tokens)
    outcome.refuse_overlaps(draws.read, {"workspace": draws.workspace})
    if device < 0:
        accepted = outcome.on_host(accepted, logits)
        return host(
            reference.accept_sampled,
            logits,
            ids,
            lengths,
            anchors,
            seeds,
            temperature,
            top_k,
            top_p,
            draws.vocabulary,
            valid,
            slots,
            accepted,
            rows,
            emitted,
            signal=signal,
        )
    counters = signal_pointer(signal, device) if signal is not None else 0
    handle = choose(stream, logits)
    accepted = outcome.on_device(accepted, logits, handle)
    if sequences == 0:
        return nothing(accepted)
    kernel, blocks, threads, arguments = draws.launch(strides[0], strides[1], sequences, tokens, None, logits, handle)
    return kernel.launch((), device, handle, blocks, threads, (*arguments, *outcome.arguments(), tokens, counters), accepted)


@operation
def sample(
    logits: Any,
    seeds: Any,
    positions: Any,
    temperature: Any,
    *,
    top_k: Any = None,
    top_p: Any = None,
    vocabulary: int | None = None,
    out: Any = None,
    workspace: Any = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Draw a token from every row of logits: plain decode, with the very draws of `accept_sampled`.

    Parameters
    ----------
    logits : float32, bfloat16 or uint16 (for bfloat16) array, shape (N, vocabulary or more)
        Contiguous within a row. NaN counts as minus infinity.
    seeds : int32 or int64 array, shape (N,)
        Of the noise of each row.
    positions : int32 or int64 array, shape (N,)
        Positions of the inputs that the logits belong to. A row with a negative one is idle and gets -1.
    temperature, top_k, top_p
        As in `accept_sampled`, one a row.
    vocabulary : int, optional
        Ids from here on are padding of the logits: never read, never drawn. At most 2^19.
    out : int32 or int64 array, shape (N,), optional
        Receives the drawn ids.
    workspace : int64 array, shape (3 * N or more,), optional
        As in `accept_sampled`.
    stream : stream, optional
        Where to launch; the current stream of `logits`' library by default.
    signal : Signal, optional
        Counts ``out_of_range``: once a row for a bad temperature or `top_p`, once for NaN among its logits.

    Returns
    -------
    int32 or int64 array, shape (N,)
        `out`, or a new array of `logits`' library with the dtype of `positions`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides or device, or one that is written overlaps another. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` and `workspace` are given. Method: as in `accept_sampled`.

    Examples
    --------
    >>> logits = np.log(np.array([[0.1, 0.2, 0.7]] * 4, np.float32))
    >>> seeds, positions, temperature = np.array([3, 4, 3, 3]), np.array([5, 5, 0, 0]), np.ones(4, np.float32)
    >>> sample(logits, seeds, positions, temperature)
    array([2, 0, 1, 1])
    >>> sample(logits, seeds, positions, temperature, top_k=np.ones(4, np.int64))
    array([2, 2, 2, 2])
    """
    own = tensor(logits, "logits", NUMBERS, (2,))
    _, shape, strides, _, device = own
    count = shape[0]
    place = _vector(positions, "positions", count, device)
    draws = _Sampling(own, seeds, temperature, top_k, top_p, vocabulary, workspace, count, count)
    drawn = _vector(out, "out", count, device, written=True) if out is not None else None
    _apart({"out": drawn, "workspace": draws.workspace}, {**draws.read, "positions": place})
    if device < 0:
        out = arrays.empty(count, place[3], logits) if out is None else out
        return host(reference.sample, logits, seeds, positions, temperature, top_k, top_p, draws.vocabulary, out, signal=signal)
    counters = signal_pointer(signal, device) if signal is not None else 0
    handle = choose(stream, logits)
    if drawn is None:
        out, pointer = allocate("out", count, place[3], logits, handle)
        drawn = (pointer, (count,), (1,), place[3], device)
    if count == 0:
        return nothing(out)
    kernel, blocks, threads, arguments = draws.launch(strides[0], 0, count, 1, drawn, logits, handle)
    no_round = (0, 0, 0, *_plain(place), *(0,) * 13)
    return kernel.launch((), device, handle, blocks, threads, (*arguments, *no_round, 1, counters), out)


@operation
def select_hidden(hidden: Any, accepted: Any, *, out: Any = None, stream: Any = None, signal: Signal | None = None) -> Any:
    """The hidden vector of the last accepted input of every sequence: ``out[b] = hidden[b, accepted[b] - 1]``.

    Parameters
    ----------
    hidden : array of a 2-byte or 4-byte dtype, shape (B, T, D)
        Vectors are contiguous, the strides of sequences and tokens are free.
    accepted : int32 or int64 array, shape (B,)
        Accepted inputs of each sequence, as of `accept_greedy`. With 0 its vector is zeros; so it is with a number outside 0 … T, which is counted
        as ``out_of_range``.
    out : array of the dtype of `hidden`, shape (B, D), optional
        Receives the vectors; contiguous within a row. uint16 and bfloat16 stand for each other.
    stream : stream, optional
        Where to launch; the current stream of `hidden`'s library by default.
    signal : Signal, optional
        Counts ``out_of_range``, once a sequence.

    Returns
    -------
    array of the dtype of `hidden`, shape (B, D)
        `out`, or a new array of the library of `hidden`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides or device, or `out` overlaps another. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` is given.

    Examples
    --------
    >>> select_hidden(np.arange(12, dtype=np.float32).reshape(2, 3, 2), np.array([2, 0]))
    array([[2., 3.],
           [0., 0.]], dtype=float32)
    """
    own = tensor(hidden, "hidden", _WORDS, (3,))
    pointer, (sequences, tokens, width), strides, dtype, device = own
    counts = _vector(accepted, "accepted", sequences, device)
    selected: Tensor | None = None
    if out is not None:
        selected = tensor(out, "out", _WORDS, (2,), device, written=True)
        if not same_bytes(selected[3], dtype):
            raise ArgumentTypeError(f"out: expected dtype {dtype} like hidden, got {selected[3]}")
        like_shape(selected[1], "out", (sequences, width), "hidden without its tokens")
    _apart({"out": selected}, {"hidden": own, "accepted": counts})
    if device < 0:
        out = arrays.empty((sequences, width), dtype, hidden) if out is None else out
        return host(reference.select_hidden, hidden, accepted, out, signal=signal)
    counters = signal_pointer(signal, device) if signal is not None else 0
    handle = choose(stream, hidden)
    if selected is None:
        out, out_at = allocate("out", (sequences, width), dtype, hidden, handle)
        selected = (out_at, (sequences, width), (width, 1), dtype, device)
    if sequences == 0:
        return nothing(out)
    size = ITEMSIZE[dtype]
    row, token, out_row = strides[0] * size, strides[1] * size, selected[2][0] * size
    # The widest access that every vector is made of.
    unit = next(unit for unit in (16, 4, 2) if multiple_of(unit, pointer, selected[0], row, token, out_row, width * size))
    units = width * size // unit
    # At least one block: an empty vector's count may still be bad.
    chunks = max(blocks_for(units, _THREADS), 1)
    arguments = (pointer, row, token, *_plain(counts), selected[0], out_row, tokens, units, unit, chunks, counters)
    return _SELECT_HIDDEN.launch((), device, handle, _grid(sequences * chunks, "hidden"), _THREADS, arguments, out)


@operation
def argmax_columns(
    logits: Any, *, vocabulary: int | None = None, out: Any = None, workspace: Any = None, stream: Any = None, signal: Signal | None = None
) -> Any:
    """The id of the largest logit of every column, the lowest on ties.

    Parameters
    ----------
    logits : float32, bfloat16 or uint16 (for bfloat16) array, shape (vocabulary or more, N)
        A column per token, of any strides: pass row-major logits (N, vocabulary) as ``.T``. NaN counts as minus infinity.
    vocabulary : int, optional
        Ids from here on are padding of the logits: never read, never chosen.
    out : int32 or int64 array, shape (N,), optional
        Receives the ids.
    workspace : int64 array, shape (3 * N or more,), optional
        Zeros, as of `workspace`; zeros again afterwards. Without one an array is allocated and cleared, which is a second operation on the stream.
    stream : stream, optional
        Where to launch; the current stream of `logits`' library by default.
    signal : Signal, optional
        Counts ``out_of_range``, once a column with NaN among its logits.

    Returns
    -------
    int32 or int64 array, shape (N,)
        `out`, or a new int64 array of the library of `logits`. A column of nothing but NaN and minus infinity gives 0.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides or device, or one that is written overlaps another. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` and `workspace` are given. Blocks share a column: each puts its best logit,
    above the complement of its id, into one 64-bit word by an integer maximum, whose result does not depend on the order. Warps read along the
    vocabulary where it is the closer dimension, along the columns where they are.

    Examples
    --------
    >>> argmax_columns(np.array([[1, 5], [3, 5], [9, 0]], np.float32), vocabulary=2)
    array([1, 0])
    """
    own = tensor(logits, "logits", NUMBERS, (2,), contiguous=0)
    pointer, (padded, columns), (along, across), dtype, device = own
    live = _vocabulary(vocabulary, padded, _MOST_ROWS_OF_LOGITS)
    chosen = _vector(out, "out", columns, device, written=True) if out is not None else None
    scratch = _workspace(workspace, columns, device)
    _apart({"out": chosen, "workspace": scratch}, {"logits": own})
    if device < 0:
        out = arrays.empty(columns, "int64", logits) if out is None else out
        return host(reference.argmax_columns, logits, live, out, signal=signal)
    counters = signal_pointer(signal, device) if signal is not None else 0
    handle = choose(stream, logits)
    if chosen is None:
        out, out_at = allocate("out", columns, "int64", logits, handle)
        chosen = (out_at, (columns,), (1,), "int64", device)
    if columns == 0:
        return nothing(out)
    # Columns of a block as a power of two: one where the vocabulary is contiguous, else what a warp reads side by side.
    shift = 0 if abs(along) <= abs(across) or columns == 1 else min((columns - 1).bit_length(), 5)
    tiles = blocks_for(columns, 1 << shift)
    chunks = min(blocks_for(live, _AHEAD * (_THREADS >> shift)), max(_ENOUGH_BLOCKS // tiles, 1))
    scratch_at = scratch[0] if scratch is not None else _cleared(columns, logits, device, handle)
    arguments = (pointer, ITEMSIZE[dtype], along, across, live, columns, shift, chunks, scratch_at, *_plain(chosen), counters)
    return _ARGMAX_COLUMNS.launch((), device, handle, _grid(tiles * chunks, "logits"), _THREADS, arguments, out)


class _Outcome:
    """The arrays that both acceptances read and write beside the targets."""

    def __init__(
        self,
        shape: tuple[int, ...],
        whose: str,
        ids: Any,
        lengths: Any,
        anchors: Any,
        valid: Any,
        slots: Any,
        accepted: Any,
        rows: Any,
        emitted: Any,
        device: int,
    ):
        self.sequences, self.tokens = count, tokens = shape[0], shape[1]
        if tokens == 0:
            raise ArgumentError(f"{whose}: expected at least one token of every sequence, got shape {tuple(shape)}")
        self.ids = tensor(ids, "ids", IDS, (2,), device)
        like_shape(self.ids[1], "ids", (count, tokens), whose)
        self.lengths = _vector(lengths, "lengths", count, device, written=True)
        self.anchors = _vector(anchors, "anchors", count, device, written=True)
        self.valid = _vector(valid, "valid", count, device) if valid is not None else None
        self.slots = _vector(slots, "slots", count, device) if slots is not None else None
        self.accepted = _vector(accepted, "accepted", count, device, written=True) if accepted is not None else None
        self.rows: Tensor | None = None
        if rows is not None:
            self.rows = tensor(rows, "rows", IDS, (2,), device, contiguous=2, written=True)
            if self.rows[1] != (count, 3):
                raise ArgumentError(f"rows: expected shape ({count}, 3), got {self.rows[1]}")
        self.emitted = _block(emitted, "emitted", count, tokens, device) if emitted is not None else None

    def refuse_overlaps(self, read: dict[str, Tensor | None], written: dict[str, Tensor | None] | None = None) -> None:
        """Refuse a written array that shares memory with any other."""
        names = "lengths", "anchors", "accepted", "rows", "emitted"
        outputs = {name: getattr(self, name) for name in names}
        _apart(outputs | (written or {}), read | {"ids": self.ids, "valid": self.valid, "slots": self.slots})

    def on_host(self, accepted: Any, like: Any) -> Any:
        """The array of accepted counts, a new one if none is given."""
        return arrays.empty(self.sequences, self.lengths[3], like) if accepted is None else accepted

    def on_device(self, accepted: Any, like: Any, handle: int) -> Any:
        """The same in device memory."""
        if accepted is None:
            accepted, pointer = allocate("accepted", self.sequences, self.lengths[3], like, handle)
            self.accepted = (pointer, (self.sequences,), (1,), self.lengths[3], self.lengths[4])
        return accepted

    def arguments(self) -> tuple[int, ...]:
        """What the kernels take, in their order."""
        return (
            *_plain(self.ids), self.ids[2][0], *_plain(self.lengths), *_plain(self.anchors), *_plain(self.valid), *_plain(self.slots),
            *_plain(self.accepted), *_plain(self.rows), *_plain(self.emitted), self.emitted[2][0] if self.emitted else 0,
        )  # fmt: skip


class _Sampling:
    """Logits and how tokens are drawn from them."""

    def __init__(
        self, logits: Tensor, seeds: Any, temperature: Any, top_k: Any, top_p: Any, vocabulary: Any, workspace: Any, sequences: int, rows: int
    ):
        self.logits, self.rows = logits, rows
        device = logits[4]
        self.vocabulary = _vocabulary(vocabulary, logits[1][-1], _MOST_VOCABULARY)
        self.seeds = _vector(seeds, "seeds", sequences, device)
        self.temperature = _vector(temperature, "temperature", sequences, device, _FLOAT)
        self.top_k = _vector(top_k, "top_k", sequences, device) if top_k is not None else None
        self.top_p = _vector(top_p, "top_p", sequences, device, _FLOAT) if top_p is not None else None
        self.workspace = _workspace(workspace, rows, device)
        self.read = {"logits": logits, "seeds": self.seeds, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    def launch(
        self, row: int, token: int, sequences: int, tokens: int, drawn: Tensor | None, like: Any, handle: int
    ) -> tuple[Kernel, int, int, tuple[Any, ...]]:
        """Kernel, blocks, threads and the first arguments, with the strides of sequences and tokens."""
        size = ITEMSIZE[self.logits[3]]
        in_fours = multiple_of(4 * size, self.logits[0]) and multiple_of(4, row, token)
        selects = self.top_k is not None or self.top_p is not None
        chunks = 1 if selects else min(blocks_for(self.vocabulary, 4 * _THREADS), max(_ENOUGH_BLOCKS // self.rows, 1))
        scratch = self.workspace[0] if self.workspace is not None else _cleared(self.rows, like, self.logits[4], handle)
        arguments = (
            self.logits[0], size, row, token, int(in_fours), self.vocabulary, *_plain(self.seeds), self.temperature[0], *_plain(self.top_k),
            self.top_p[0] if self.top_p else 0, scratch, *_plain(drawn), sequences, chunks,
        )  # fmt: skip
        kernel, threads = (_DRAW_SELECTED, _SELECT_THREADS) if selects else (_DRAW, _THREADS)
        return kernel, _grid(sequences * tokens * chunks, "logits"), threads, arguments


def _vector(array: Any, name: str, length: int, device: int, dtypes: tuple[str, ...] = IDS, written: bool = False) -> Tensor:
    """Check a contiguous vector of a given length."""
    if written:
        pointer, found, dtype, where = output(array, name, dtypes, device, length)
    else:
        pointer, found, dtype, where = vector(array, name, dtypes, device)
        if found != length:
            raise ArgumentError(f"{name}: expected shape ({length},), got ({found},)")
    return pointer, (found,), (1,), dtype, where


def _block(array: Any, name: str, rows: int, tokens: int, device: int) -> Tensor:
    """Check an output of ids, a row a sequence."""
    found = tensor(array, name, IDS, (2,), device, written=True)
    if found[1] != (rows, tokens):
        raise ArgumentError(f"{name}: expected shape ({rows}, {tokens}), got {found[1]}")
    return found


def _vocabulary(vocabulary: Any, padded: int, most: int) -> int:
    """Ids that may be chosen."""
    if padded < 1:
        raise ArgumentError(f"logits: expected a vocabulary of at least one token, got {padded}")
    if vocabulary is None:
        if padded > most:
            raise ArgumentError(f"logits: expected a vocabulary of at most {most} tokens, got {padded}")
        return padded
    return whole(vocabulary, "vocabulary", 1, min(padded, most))


def _workspace(array: Any, rows: int, device: int) -> Tensor | None:
    """Check a workspace, if one is given."""
    if array is None:
        return None
    pointer, words, dtype, where = output(array, "workspace", _INT64, device)
    if words < _ROW_WORDS * rows:
        raise ArgumentError(f"workspace: expected at least {_ROW_WORDS * rows} words, got shape ({words},)")
    return pointer, (words,), (1,), dtype, where


def _cleared(rows: int, like: Any, device: int, handle: int) -> _Owned:
    """Address of a new workspace, cleared on the stream."""
    array, pointer = allocate("workspace", _ROW_WORDS * rows, "int64", like, handle)
    with devices.current(device):
        devices.call(devices.driver().cuMemsetD8Async(pointer, 0, 8 * _ROW_WORDS * rows, handle), "cuMemsetD8Async")
    owned = _Owned(pointer)
    owned.array = array
    return owned


def _plain(array: Tensor | None) -> tuple[int, int]:
    """Address and element size; zeros for an array that is not there."""
    return (array[0], ITEMSIZE[array[3]]) if array is not None else (0, 0)


def _grid(blocks: int, name: str) -> int:
    if blocks > _MOST_BLOCKS:
        raise ArgumentError(f"{name}: expected at most {_MOST_BLOCKS} blocks' worth, got {blocks}")
    return blocks


def _apart(written: dict[str, Tensor | None], read: dict[str, Tensor | None]) -> None:
    """Refuse an output that shares memory with any other array. Extents are compared first: most calls need nothing else."""
    extents = []
    for outputs, tensors in ((True, written), (False, read)):
        for name, array in tensors.items():
            if array is not None:
                pointer, shape, strides, dtype, _ = array
                size = ITEMSIZE[dtype]
                # Most are vectors, whose extent is quickly said.
                begin, end = (pointer, pointer + shape[0] * size) if len(shape) == 1 else span((pointer, size, shape, strides))
                extents.append((begin, end, outputs, name, array))
    extents.sort(key=lambda extent: extent[:2])
    for place, (_, end, is_output, name, array) in enumerate(extents):
        for begin, _, other_is_output, other_name, other in extents[place + 1 :]:
            if begin >= end:
                break
            if is_output:
                refuse_overlap(name, array, other_name, other)
            elif other_is_output:
                refuse_overlap(other_name, other, name, array)
