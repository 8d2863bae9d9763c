"""The causal depthwise convolution of a recurrent layer in decode: four taps a channel and SiLU, over a history of three columns a slot.

For one token or a few of every row of a batch, with the histories in pool slots: `conv1d_silu` moves them on, `conv1d_silu_record` leaves them
alone and logs what a later fold will need. Long prompts are not its work: a thread walks the tokens of its channels.
"""

from __future__ import annotations

from typing import Any

from gpukit import arrays
from gpukit.arrays import ITEMSIZE, vector
from gpukit.errors import ArgumentError, Signal
from gpukit.kernels._plans import allocate, blocks_for, signal_pointer
from gpukit.kernels._tensors import BF16, Tensor, like_shape, multiple_of, refuse_overlap, tensor
from gpukit.kernels.reference import conv as reference
from gpukit.launch import IDS, Kernel, host, nothing, operation
from gpukit.streams import choose

__all__ = ["conv1d_silu", "conv1d_silu_record"]

_CONV1D_SILU = Kernel("conv", "conv1d_silu", language="cuda", early=True)

# THREADS and TAPS of cuda/conv.cu, and the columns of a history.
_THREADS = 128
_TAPS = 4
_HISTORY = _TAPS - 1


@operation
def conv1d_silu(x: Any, weight: Any, history: Any, slots: Any, *, out: Any = None, stream: Any = None, signal: Signal | None = None) -> Any:
    """Convolve the new tokens of every row, behind its history, and move the history on.

    ``y[t] = silu(Σ_j weight[:, j] * u[t - 3 + j])``, where ``u`` is the history followed by `x`.

    Parameters
    ----------
    x : bfloat16 (or uint16 for it) array, shape (rows, tokens, channels)
        New columns, oldest first. Columns are contiguous, the strides of rows and tokens are free.
    weight : bfloat16 (or uint16) array, shape (channels, 4)
        Taps, oldest first; contiguous, at an address that is a multiple of 8.
    history : bfloat16 (or uint16) array, shape (slots, 3, channels)
        The last three columns of every slot, oldest first: a layer of a pool, with a slot stride of its own. Written.
    slots : int32 or int64 array, shape (rows,)
        The slot of each row. Rows with a negative slot are skipped: nothing of them is read or written, `out` included. Those past the last slot
        are skipped and counted as ``out_of_range``; of rows with equal slots the first counts, the others are skipped and counted as ``unbound``.
    out : bfloat16 (or uint16) array, shape of `x`, optional
        Receives the outputs; strides as for `x`. It may be `x` itself.
    stream : stream, optional
        Where to launch; the current stream of `x`'s library by default.
    signal : Signal, optional
        Counts ``out_of_range`` and ``unbound``, once a row.

    Returns
    -------
    bfloat16 (or uint16) array, shape of `x`
        `out`, or a new array of the library and dtype of `x`, whose skipped rows hold anything.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides or device, or `history` overlaps `x` or `out`. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` is given. float32 inside, one rounding; the history holds the bfloat16
    columns. Any number of channels; an even one, with even strides, is quicker. Method: the short convolution of Mamba-2 and Gated DeltaNet.

    Examples
    --------
    >>> from ml_dtypes import bfloat16
    >>> history = np.zeros((2, 3, 1), bfloat16)
    >>> weight = np.array([[0, 0, 1, 2]], bfloat16)
    >>> x = np.array([[[1], [4]]], bfloat16)  # one row, two tokens, one channel
    >>> conv1d_silu(x, weight, history, np.array([1])).astype(np.float32).ravel()
    array([1.7578125, 9.       ], dtype=float32)
    >>> history[1].astype(np.float32).ravel()
    array([0., 1., 4.], dtype=float32)
    """
    return _launch(x, weight, history, slots, None, out, None, stream, signal)


@operation
def conv1d_silu_record(
    x: Any,
    weight: Any,
    history: Any,
    slots: Any,
    log: Any,
    *,
    out: Any = None,
    valid: Any = None,
    previous: Any = None,
    accepted: Any = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Convolve the tokens of a verification and log their columns; histories do not take them.

    Parameters
    ----------
    x, weight, slots, out, stream
        As in `conv1d_silu`. Without `previous` rows may share a slot: nobody writes it.
    history : bfloat16 (or uint16) array, shape (slots, 3, channels)
        As in `conv1d_silu`; only read, unless `previous` is given.
    log : bfloat16 (or uint16) array, shape (rows, window, channels)
        Receives the columns of `x` as they are: ``log[b, t] = x[b, t]`` for ``t < valid[b]``; the rest of the window, of at least as many tokens as
        `x`, is not touched. Columns are contiguous, the other strides are free: a layer of a replay log.
    valid : int32 or int64 array, shape (rows,), optional
        Tokens of each row that count; all by default. Later outputs are zero. Rows with a number outside 0 … tokens are skipped and counted as
        ``out_of_range``.
    previous : bfloat16 (or uint16) array, shape (rows, previous window, channels), optional
        The log of the round before, where its fold is still to come: each history first takes the columns that were accepted, and is written.
    accepted : int32 or int64 array, shape (rows,)
        How many columns of `previous` each history takes; given with it, and only then. Later ones are never read. Rows with a number outside
        0 … previous window are skipped and counted as ``out_of_range``.
    signal : Signal, optional
        Counts ``out_of_range`` and, with `previous`, ``unbound``, once a row.

    Returns
    -------
    bfloat16 (or uint16) array, shape of `x`
        `out`, or a new array of the library and dtype of `x`, whose skipped rows hold anything.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides or device, `log` or `previous` overlaps another array, or `out` the
        history. Nothing is launched.

    Notes
    -----
    As in `conv1d_silu`, whose outputs these are bit for bit. After m accepted tokens the history is the last three columns of itself followed by
    the first m logged ones: the fold's work.

    Examples
    --------
    >>> from ml_dtypes import bfloat16
    >>> history, log = np.zeros((2, 3, 1), bfloat16), np.zeros((1, 4, 1), bfloat16)
    >>> weight = np.array([[0, 0, 1, 2]], bfloat16)
    >>> x = np.array([[[1], [4], [9]]], bfloat16)
    >>> out = conv1d_silu_record(x, weight, history, np.array([1]), log, valid=np.array([2]))
    >>> out.astype(np.float32).ravel(), log.astype(np.float32).ravel()
    (array([1.7578125, 9.       , 0.       ], dtype=float32), array([1., 4., 0., 0.], dtype=float32))
    """
    return _launch(x, weight, history, slots, log, out, valid, stream, signal, record=True, previous=previous, accepted=accepted)


def _launch(
    x: Any,
    weight: Any,
    history: Any,
    slots: Any,
    log: Any,
    out: Any,
    valid: Any,
    stream: Any,
    signal: Signal | None,
    record: bool = False,
    previous: Any = None,
    accepted: Any = None,
) -> Any:
    columns = tensor(x, "x", BF16, (3,))
    x_at, shape, x_strides, dtype, device = columns
    rows, tokens, channels = shape
    weight_at, weight_shape, _, _, _ = tensor(weight, "weight", BF16, (2,), device, contiguous=2)
    if weight_shape != (channels, _TAPS):
        raise ArgumentError(f"weight: expected shape ({channels}, {_TAPS}), the channels of x and {_TAPS} taps, got {weight_shape}")
    past = tensor(history, "history", BF16, (3,), device, written=not record or previous is not None)
    history_at, history_shape, history_strides, _, _ = past
    if history_shape[1:] != (_HISTORY, channels):
        raise ArgumentError(f"history: expected shape (slots, {_HISTORY}, {channels}), got {history_shape}")
    slots_at, length, id_type, _ = vector(slots, "slots", IDS, device)
    if length != rows:
        raise ArgumentError(f"slots: expected shape ({rows},), the rows of x, got ({length},)")
    log_at = valid_at = valid_bytes = 0
    log_strides: tuple[int, ...] = (0, 0, 1)
    previous_at = previous_tokens = accepted_at = accepted_bytes = 0
    previous_strides: tuple[int, ...] = (0, 0, 1)
    result: Tensor | None = None
    if out is not None:
        result = tensor(out, "out", BF16, (3,), device, written=True)
        like_shape(result[1], "out", shape, "x")
        refuse_overlap("out", result, "history", past)
    if record:
        logged = tensor(log, "log", BF16, (3,), device, written=True)
        log_at, log_shape, log_strides = logged[:3]
        if log_shape[0] != rows or log_shape[1] < tokens or log_shape[2] != channels:
            raise ArgumentError(f"log: expected shape ({rows}, at least {tokens}, {channels}), got {log_shape}")
        refuse_overlap("log", logged, "x", columns)
        refuse_overlap("log", logged, "history", past)
        if result is not None:
            refuse_overlap("log", logged, "out", result)
        if valid is not None:
            valid_at, length, valid_type, _ = vector(valid, "valid", IDS, device)
            valid_bytes = ITEMSIZE[valid_type]
            if length != rows:
                raise ArgumentError(f"valid: expected shape ({rows},), the rows of x, got ({length},)")
        if (previous is None) != (accepted is None):
            raise ArgumentError(f"accepted: expected an array with previous, and only then, got previous={previous!r:.40}, accepted={accepted!r:.40}")
        if previous is not None:
            before = tensor(previous, "previous", BF16, (3,), device)
            previous_at, previous_shape, previous_strides, _, _ = before
            previous_tokens = previous_shape[1]
            if previous_shape[0] != rows or previous_shape[2] != channels:
                raise ArgumentError(f"previous: expected shape ({rows}, any, {channels}), got {previous_shape}")
            for name, other in (("log", logged), ("history", past), ("out", result)):
                if other is not None:
                    refuse_overlap("previous", before, name, other)
            refuse_overlap("history", past, "x", columns)
            accepted_at, length, accepted_type, _ = vector(accepted, "accepted", IDS, device)
            accepted_bytes = ITEMSIZE[accepted_type]
            if length != rows:
                raise ArgumentError(f"accepted: expected shape ({rows},), the rows of x, got ({length},)")
    else:
        refuse_overlap("history", past, "x", columns)
    if device < 0:
        out = arrays.empty(shape, dtype, x) if out is None else out
        if record:
            return host(reference.conv1d_silu_record, x, weight, history, slots, log, out, valid, previous, accepted, signal=signal)
        return host(reference.conv1d_silu, x, weight, history, slots, out, signal=signal)
    counters = signal_pointer(signal, device) if signal is not None else 0
    handle = choose(stream, x)
    if result is None:
        out, out_at = allocate("out", shape, dtype, x, handle)
        out_strides: tuple[int, ...] = (tokens * channels, channels, 1)
    else:
        out_at, _, out_strides, _, _ = result
    if rows == 0 or tokens == 0 or channels == 0:
        return nothing(out)
    strides = [stride for own in (x_strides, history_strides, log_strides, previous_strides, out_strides) for stride in own[:2]]
    # Pairs of channels are words where every column begins at one, and four taps of two channels an access.
    in_pairs = multiple_of(2, channels, *strides) and multiple_of(4, x_at, history_at, log_at, previous_at, out_at) and multiple_of(16, weight_at)
    unit = 2 if in_pairs else 1
    if not in_pairs and not multiple_of(8, weight_at):
        raise ArgumentError(f"weight: expected an address that is a multiple of 8, got {weight_at:#x}")
    x_row, x_token, history_slot, history_column, log_row, log_token, previous_row, previous_token, out_row, out_token = (
        stride // unit for stride in strides
    )
    words = channels // unit
    chunks = blocks_for(words, _THREADS)
    arguments = (
        x_at, x_row, x_token, weight_at, history_at, history_slot, history_column, history_shape[0], slots_at, ITEMSIZE[id_type],
        log_at, log_row, log_token, valid_at, valid_bytes,
        previous_at, previous_row, previous_token, previous_tokens, accepted_at, accepted_bytes,
        out_at, out_row, out_token, tokens, words, chunks, unit, counters,
    )  # fmt: skip
    return _CONV1D_SILU.launch((), device, handle, rows * chunks, _THREADS, arguments, out)
