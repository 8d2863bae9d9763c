"""The gated delta rule: recurrent states taken past tokens, at once or, for speculative decoding, recorded first and folded when accepted.

A state is a matrix S [V, K] for every value head, in a `StatePool`; value head h uses key head ``h // (value_heads / key_heads)``. One token:

    kn = k / sqrt(sum k² + 1e-6),  qn likewise    (as they are with normalize=False)
    a  = exp(g)
    d  = beta (v − a S kn)
    S  ← a S + d kn
    o  = scale S qn                               (the new S)

All arithmetic is fp32; outputs are rounded once to bfloat16. The rule is that of Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving
Mamba2 with Delta Rule", 2024. Gates come as they are used: what makes g and beta of projections is not here, and the
convolution in front only in `conv_record`.

States are the same to the bit whichever op computes them: in any layout, at any place of any batch, eager and captured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gpukit import checks
from gpukit.arrays import ITEMSIZE, describe
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels._plans import inverse, refuse_other_device, signal_pointer
from gpukit.kernels._recurrent import (
    batch_inputs,
    column_inputs,
    device_of,
    float_bits,
    ids,
    keep_apart,
    layer_of,
    optional_ids,
    output_like,
    output_scale,
    require,
    states_at,
)
from gpukit.kernels.reference import gated_delta as reference
from gpukit.kernels.state_pool import ReplayLog, StatePool, share_memory
from gpukit.launch import IDS, Kernel, host, nothing, operation
from gpukit.streams import choose

__all__ = ["conv_fold_record", "conv_record", "direct", "fold", "fold_record", "record", "snapshot"]

_DIRECT, _DIRECT_BULK, _SNAPSHOT, _RECORD_EXACT, _FOLD_RECORD_EXACT, _FOLD = (
    Kernel("gated_delta", name, language="cuda", early=True)
    for name in ("direct", "direct_bulk", "snapshot", "record_exact", "fold_record_exact", "fold")
)


class _Verifier(NamedTuple):
    """A kernel of a verification, threads of a block and rows of V that a block works on: WARPS and ROWS of its kind in cuda/gated_delta.cuh."""

    kernel: Kernel
    threads: int
    tile: int


def _verifiers(*of: tuple[str, int, int]) -> tuple[_Verifier, ...]:
    return tuple(_Verifier(Kernel("gated_delta", name, language="cuda", early=True), threads, tile) for name, threads, tile in of)


# For few tokens in few blocks, for few tokens, for many.
_RECORDS = _verifiers(("record_wide", 128, 32), ("record", 64, 32), ("record_long", 64, 32))
_FOLD_RECORDS = _verifiers(("fold_record", 64, 32), ("fold_record_long", 64, 32))
_CONV_RECORDS = _verifiers(("conv_record_wide", 128, 32), ("conv_record", 128, 64), ("conv_record_long", 64, 32))
_CONV_FOLD_RECORDS = _verifiers(("conv_fold_record", 128, 64), ("conv_fold_record_long", 64, 32))

# WARPS and ROWS of cuda/gated_delta.cuh and its BULK_ and FOLD_ variants, as threads of a block and rows of V that a block works on.
_THREADS, _TILE = 64, 8
_BULK_THREADS, _BULK_TILE = 128, 64
_FOLD_THREADS, _FOLD_TILE = 32, 8
# With so many numbers in the states of a call they come in bulk: 128 to 511 heads of 128. Fewer come quicker one by one, more as quick.
_BULK_NUMBERS = range(1 << 21, 1 << 23)
# Up to so many blocks, two of an H200's multiprocessor, twice the warps share each one's work.
_FEW_BLOCKS = 264
_SHORT, _MOST_TOKENS = 4, 16
# Bits of a kernel's flags.
_NORMALIZE, _BFLOAT16_STATES, _WIDE_SLOTS, _WIDE_VALID, _WIDE_ACCEPTED, _SETTLED = 1, 2, 4, 8, 16, 32
# Channels of a thread along a history.
_CHANNELS = 8


@operation
def direct(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    pool: StatePool,
    slots: Any,
    *,
    layer: int,
    out: Any = None,
    destination_slots: Any = None,
    scale: float | None = None,
    normalize: bool = True,
    prefetch_layer: int | None = None,
    settled: bool = False,
    keep: float | None = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Take the states of a batch past its tokens, one after the other, and return the outputs: a plain decode step of one layer.

    Parameters
    ----------
    q, k : bfloat16 or uint16 array, shape (B, T, key_heads, K)
        Queries and keys. Heads are contiguous within a token; the strides of sequences and tokens are free multiples of 8 elements, and the
        address is a multiple of 16: views of one projection will do.
    v : bfloat16 or uint16 array, shape (B, T, value_heads, V)
        Values, with the same freedom of strides and none of the alignment.
    g, beta : float32 array, shape (B, T, value_heads)
        Logarithm of the decay, at most 0, and strength of the update. Contiguous within a token.
    pool : StatePool
        States; those of `layer` are read and written.
    slots : int32 or int64 array, shape (B,)
        Where the state of each sequence is. Negative is padding; a slot past the pool is skipped and counted as ``out_of_range``.
    layer : int
        Layer of the pool.
    out : bfloat16 or uint16 array, shape (B, T, value_heads, V), optional
        Outputs, contiguous; zeros for sequences that are padding or skipped.
    destination_slots : array like `slots`, optional
        Where the new state goes; `slots` by default. Destinations are distinct, and none is the source of another sequence: a sequence
        whose destination is taken is skipped and counted as ``occupied``.
    scale : float, optional
        Of the outputs; ``1 / sqrt(K)`` by default.
    normalize : bool
        Whether keys and queries are divided by their norms.
    prefetch_layer : int, optional
        Layer whose states of the same slots the L2 shall fetch meanwhile: the one that the next call works on. Pays while states of two layers are
        well within the L2; with many heads most together with `settled`, which lets them come when this layer's have come. Changes no result.
    settled : bool
        Whether everything but the tokens (`q`, `k`, `v`, `g`, `beta`) was there before the op in front of this one on its stream went to work, and
        stays as it is while that one runs: states, slots and whatever else is read. A launch that overlaps it (`gpukit.launch.overlapping`) may then
        read them meanwhile. So it is where each layer has states of its own and slots come with the batch, but not in the first layer behind a
        `fold`, which writes states and histories, and not behind a kernel that lets others begin before it has waited itself, like a settled
        `fold` or one of another library. Nothing checks it. Changes no result.
    keep : float, optional
        Share of the states' lines that the L2 is asked to keep (evict_last), by the accesses themselves; the others are the first to go
        (evict_first). None: no hints. Changes no result.
    stream : stream, optional
        Where to launch; the current stream of `q`'s library by default.
    signal : Signal, optional
        Counts ``out_of_range`` and ``occupied``, once a sequence.

    Returns
    -------
    bfloat16 or uint16 array, shape (B, T, value_heads, V)
        `out`, or a new array like `v`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Shapes do not fit each other or the pool, an array has the wrong dtype, strides, alignment or device, or `layer` is not in the pool.
        Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` is given. A state is read once and written once, whatever T is; with 128 to
    511 heads of 128, of all sequences together, by bulk copies. The output of a token is taken from the state before it, as
    ``scale (a S qn + d (kn · qn))``, which equals the formula but for rounding.

    Examples
    --------
    >>> pool = StatePool.allocate(layers=1, slots=4, heads=2, dim=64)
    >>> import ml_dtypes
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.normal(size=(1, 1, heads, 64)).astype(ml_dtypes.bfloat16) for heads in (1, 1, 2))
    >>> g, beta = np.full((1, 1, 2), -0.5, np.float32), np.ones((1, 1, 2), np.float32)
    >>> out = direct(q, k, v, g, beta, pool, np.array([3]), layer=0)
    >>> kn = k[0, 0, 0] / np.linalg.norm(k[0, 0, 0].astype(float))
    >>> bool(np.allclose(pool.rec[0, 3] @ kn.astype(np.float32), v[0, 0].astype(float), atol=0.02))  # the key recalls its value
    True
    """
    device = device_of(q, "q")
    inputs, read, items, tokens, key_heads = batch_inputs(q, k, v, g, beta, pool, device)
    layer = layer_of(layer, pool)
    ahead = _ahead(prefetch_layer, layer, pool)
    slots_at, _, id_type, _ = ids(slots, "slots", IDS, items, device)
    if destination_slots is None:
        destination_at = slots_at
    else:
        destination_at, _, _, _ = ids(destination_slots, "destination_slots", (id_type,), items, device)
    scale, hint = output_scale(scale, pool), _hint(keep)
    handle = choose(stream, q) if device >= 0 else 0
    out, out_at = output_like(out, v, (items, tokens, pool.heads, pool.dim), device, handle)
    keep_apart(out_at, items * tokens * pool.heads * pool.dim, read, pool)
    if device < 0:
        return host(
            reference.direct, q, k, v, g, beta, pool, slots, layer=layer, out=out, destination_slots=destination_slots, scale=scale,
            normalize=normalize, signal=signal,
        )  # fmt: skip
    counters = signal_pointer(signal, device) if signal is not None else 0
    if items == 0:
        return nothing(out)
    flags = _flags(normalize, pool, id_type) | _SETTLED * bool(settled)
    arguments = (
        *inputs, out_at, items, tokens, key_heads, pool.heads, pool.dim, states_at(pool, layer), pool.slot_stride, pool.slots,
        slots_at, destination_at, ahead, float_bits(scale) | hint, flags, counters, inverse(pool.heads),
    )  # fmt: skip
    heads = items * pool.heads
    if heads * pool.dim * pool.dim in _BULK_NUMBERS:
        return _DIRECT_BULK.launch((), device, handle, heads * (pool.dim // _BULK_TILE), _BULK_THREADS, arguments, out)
    return _DIRECT.launch((), device, handle, heads * (pool.dim // _TILE), _THREADS, arguments, out)


@operation
def snapshot(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    pool: StatePool,
    slots: Any,
    snapshot_slots: Any,
    *,
    layer: int,
    out: Any = None,
    scale: float | None = None,
    normalize: bool = True,
    prefetch_layer: int | None = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Take the states of a batch past its tokens and keep the state behind every one of them, each in a slot of its own.

    The older scheme of verification, for engines that copy the state behind the last accepted token back: it writes T states where `record`
    writes a log of their inputs.

    Parameters
    ----------
    q, k, v, g, beta, pool, layer, out, scale, normalize, prefetch_layer, stream, signal
        As in `direct`.
    slots : int32 or int64 array, shape (B,)
        Where the state of each sequence is; it is only read, unless it is among the sequence's own `snapshot_slots`.
    snapshot_slots : array like `slots`, shape (B, T)
        Where the state behind each token goes, contiguous. Negative: that one is not kept. A sequence with a slot past the pool is skipped and
        counted as ``out_of_range``; one that would write what another sequence reads or writes is skipped and counted as ``occupied``.

    Returns
    -------
    bfloat16 or uint16 array, shape (B, T, value_heads, V)
        `out`, or a new array like `v`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As `direct`. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` is given. States and outputs equal those of `direct` to the bit.

    Examples
    --------
    >>> pool = StatePool.allocate(layers=1, slots=4, heads=2, dim=64)
    >>> import ml_dtypes
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.normal(size=(1, 2, heads, 64)).astype(ml_dtypes.bfloat16) for heads in (1, 1, 2))
    >>> g, beta = np.full((1, 2, 2), -0.5, np.float32), np.ones((1, 2, 2), np.float32)
    >>> out = snapshot(q, k, v, g, beta, pool, np.array([0]), np.array([[2, 3]]), layer=0)
    >>> [bool(state.any()) for state in pool.rec[0]]
    [False, False, True, True]
    """
    device = device_of(q, "q")
    inputs, read, items, tokens, key_heads = batch_inputs(q, k, v, g, beta, pool, device)
    layer = layer_of(layer, pool)
    ahead = _ahead(prefetch_layer, layer, pool)
    slots_at, _, id_type, _ = ids(slots, "slots", IDS, items, device)
    snapshots_at = _snapshot_slots(snapshot_slots, id_type, (items, tokens), device)
    scale = output_scale(scale, pool)
    handle = choose(stream, q) if device >= 0 else 0
    out, out_at = output_like(out, v, (items, tokens, pool.heads, pool.dim), device, handle)
    keep_apart(out_at, items * tokens * pool.heads * pool.dim, read, pool)
    if device < 0:
        return host(
            reference.snapshot, q, k, v, g, beta, pool, slots, snapshot_slots, layer=layer, out=out, scale=scale, normalize=normalize,
            signal=signal,
        )  # fmt: skip
    counters = signal_pointer(signal, device) if signal is not None else 0
    if items == 0:
        return nothing(out)
    arguments = (
        *inputs, out_at, items, tokens, key_heads, pool.heads, pool.dim, states_at(pool, layer), pool.slot_stride, pool.slots,
        slots_at, snapshots_at, ahead, float_bits(scale), _flags(normalize, pool, id_type), counters,
    )  # fmt: skip
    return _SNAPSHOT.launch((), device, handle, items * pool.heads * (pool.dim // _TILE), _THREADS, arguments, out)


@operation
def record(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    pool: StatePool,
    slots: Any,
    log: ReplayLog,
    *,
    layer: int,
    out: Any = None,
    valid: Any = None,
    exact: bool = False,
    scale: float | None = None,
    normalize: bool = True,
    prefetch_layer: int | None = None,
    settled: bool = False,
    keep: float | None = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Verify T tokens of each sequence from its committed state, which stays as it is, and log what `fold` needs to commit some of them.

    Parameters
    ----------
    q, k, v, g, beta
        As in `direct`, with T of 1 … 16 and at most the log's width.
    pool : StatePool
        States; those of `layer` are read, never written.
    slots : int32 or int64 array, shape (B,)
        As in `direct`. Sequences may share a slot.
    log : ReplayLog
        Entries ``[layer, b, 0 … T - 1]`` of keys, values and gates receive the tokens of sequence b; its convolution columns are not touched.
    layer : int
        Layer of pool and log.
    out : bfloat16 or uint16 array, shape (B, T, value_heads, V), optional
        Outputs, contiguous; zeros for sequences that are padding or skipped.
    valid : int32 or int64 array, shape (B,), optional
        How many tokens of each sequence there are; T by default, larger ones are T and negative ones 0. Outputs of the rest are zeros, and
        log entries of the rest stay as they are.
    exact : bool
        Whether outputs are those of `direct` to the bit, taken token by token, so that a run with speculation equals one without. Slower.
    scale, normalize, prefetch_layer, settled, keep, stream, signal
        As in `direct`.

    Returns
    -------
    bfloat16 or uint16 array, shape (B, T, value_heads, V)
        `out`, or a new array like `v`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As `direct`; T is too large; or the log does not fit pool or batch, or overlaps the pool. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` is given. The log holds exactly what came in. Unless
    `exact`, outputs are those of `direct` within rounding, not to the bit: all products with the committed state are taken at once, by tensor
    cores with 16 bits of each number of the state, and what the tokens do to each other is solved from the products of their keys (the WY
    form). Gates below -100 count as -100 there.

    Examples
    --------
    >>> pool = StatePool.allocate(layers=1, slots=4, heads=2, dim=64)
    >>> log = ReplayLog.allocate(layers=1, rows=1, width=3, key_heads=1, heads=2, dim=64)
    >>> import ml_dtypes
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.normal(size=(1, 3, heads, 64)).astype(ml_dtypes.bfloat16) for heads in (1, 1, 2))
    >>> g, beta = np.full((1, 3, 2), -0.5, np.float32), np.ones((1, 3, 2), np.float32)
    >>> out = record(q, k, v, g, beta, pool, np.array([3]), log, layer=0)
    >>> bool(out.any()), bool(pool.rec.any()), bool((log.v[0, 0] == v[0].view(np.uint16)).all())
    (True, False, True)
    """
    device = device_of(q, "q")
    inputs, read, items, tokens, key_heads = batch_inputs(q, k, v, g, beta, pool, device)
    layer = layer_of(layer, pool)
    ahead = _ahead(prefetch_layer, layer, pool)
    slots_at, _, id_type, _ = ids(slots, "slots", IDS, items, device)
    log_parts = _log(log, "log", pool, items, tokens, key_heads, layer, device)
    valid_at, valid_bytes = optional_ids(valid, "valid", items, device)
    scale, hint = output_scale(scale, pool), _hint(keep)
    handle = choose(stream, q) if device >= 0 else 0
    out, out_at = output_like(out, v, (items, tokens, pool.heads, pool.dim), device, handle)
    keep_apart(out_at, items * tokens * pool.heads * pool.dim, read, pool, log)
    if device < 0:
        return host(
            reference.record, q, k, v, g, beta, pool, slots, log, layer=layer, out=out, valid=valid, scale=scale, normalize=normalize,
            signal=signal,
        )  # fmt: skip
    counters = signal_pointer(signal, device) if signal is not None else 0
    if items == 0:
        return nothing(out)
    arguments = (
        *inputs, out_at, items, tokens, key_heads, pool.heads, pool.dim, states_at(pool, layer), pool.slot_stride, pool.slots,
        slots_at, valid_at, *log_parts, ahead, float_bits(scale) | hint,
        _record_flags(normalize, pool, key_heads, id_type, valid_bytes) | _SETTLED * bool(settled), counters,
    )  # fmt: skip
    if exact:
        return _RECORD_EXACT.launch((), device, handle, items * pool.heads * (pool.dim // _TILE), _THREADS, arguments, out)
    return _launch_record(_RECORDS, tokens, device, handle, items * pool.heads, pool.dim, arguments, out)


@operation
def conv_record(
    x: Any,
    weight: Any,
    g: Any,
    beta: Any,
    pool: StatePool,
    slots: Any,
    log: ReplayLog,
    *,
    layer: int,
    out: Any = None,
    valid: Any = None,
    scale: float | None = None,
    normalize: bool = True,
    prefetch_layer: int | None = None,
    settled: bool = False,
    keep: float | None = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Convolve and verify T tokens of each sequence in one pass: `conv.conv1d_silu_record`, then `record` of what it puts out.

    Parameters
    ----------
    x : bfloat16 or uint16 array, shape (B, T, C)
        Raw columns, T of 1 … 16 and at most the log's width. ``C = 2 * key_heads * K + value_heads * V`` channels: those of all queries, then
        all keys, then all values, head by head; `log` says how many key heads there are. Channels are contiguous within a token; the strides of
        sequences and tokens are free multiples of 8 elements, and the address is a multiple of 16.
    weight : bfloat16 or uint16 array, shape (C, 4)
        Taps of the convolution, oldest first; contiguous, at an address that is a multiple of 16.
    g, beta : float32 array, shape (B, T, value_heads)
        As in `direct`.
    pool : StatePool
        States and histories of the convolution; those of `layer` are read, never written.
    slots : int32 or int64 array, shape (B,)
        Where state and history of each sequence are, as in `record`.
    log : ReplayLog
        Entries ``[layer, b, 0 … T - 1]`` receive the tokens of sequence b: keys and values as the convolution puts them out, gates, and the raw
        columns.
    layer : int
        Layer of pool and log.
    out : bfloat16 or uint16 array, shape (B, T, value_heads, V), optional
        Outputs, contiguous; zeros for sequences that are padding or skipped.
    valid : int32 or int64 array, shape (B,), optional
        As in `record`.
    scale, normalize
        As in `direct`.
    prefetch_layer : int, optional
        Layer whose states and histories of the same slots the L2 shall fetch meanwhile: the one that the next call works on. Changes no result.
    settled : bool
        As in `direct`, of everything but `x`, `g` and `beta`.
    keep : float, optional
        As in `direct`.
    stream : stream, optional
        Where to launch; the current stream of `x`'s library by default.
    signal : Signal, optional
        Counts ``out_of_range``, once a sequence.

    Returns
    -------
    bfloat16 or uint16 array, shape (B, T, value_heads, V)
        `out`, or a new array of the library and dtype of `x`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As `record`; pool or log have no convolution, or another number of channels; or the log overlaps `x`. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` is given. Outputs and log equal those of the two ops to the bit. What
    is convolved is never in memory but for the log: every block convolves what its rows need.

    Examples
    --------
    >>> pool = StatePool.allocate(layers=1, slots=4, heads=2, dim=64, channels=256)
    >>> log = ReplayLog.allocate(layers=1, rows=1, width=3, key_heads=1, heads=2, dim=64, channels=256)
    >>> import ml_dtypes
    >>> rng = np.random.default_rng(0)
    >>> x, weight = (rng.normal(size=shape).astype(ml_dtypes.bfloat16) for shape in ((1, 3, 256), (256, 4)))
    >>> g, beta = np.full((1, 3, 2), -0.5, np.float32), np.ones((1, 3, 2), np.float32)
    >>> out = conv_record(x, weight, g, beta, pool, np.array([3]), log, layer=0)
    >>> out.shape, bool((log.conv[0, 0] == x[0].view(np.uint16)).all()), bool(pool.rec.any() or pool.conv.any())
    ((1, 3, 2, 64), True, False)
    """
    return _convolve_and_record(
        x, weight, g, beta, pool, slots, log, layer, out, valid, scale, normalize, prefetch_layer, settled, keep, stream, signal, None, None
    )


@operation
def fold_record(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    pool: StatePool,
    slots: Any,
    previous: ReplayLog,
    accepted: Any,
    log: ReplayLog,
    *,
    layer: int,
    out: Any = None,
    valid: Any = None,
    exact: bool = False,
    scale: float | None = None,
    normalize: bool = True,
    prefetch_layer: int | None = None,
    settled: bool = False,
    keep: float | None = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Commit the accepted tokens of the previous round while reading the states for this one: `fold` in place, then `record`, in one pass.

    Parameters
    ----------
    q, k, v, g, beta
        As in `record`.
    pool : StatePool
        States; those of `layer` are read, and written where something was accepted.
    slots : int32 or int64 array, shape (B,)
        As in `direct`. Slots are distinct: sequences that share one are skipped and counted as ``occupied``.
    previous : ReplayLog
        Log of the previous round; row b belongs to sequence b. Entries from ``accepted[b]`` on are never read.
    accepted : int32 or int64 array, shape (B,)
        How many of them are folded; 0 for none. A number outside 0 … W skips its sequence and is counted as ``out_of_range``.
    log : ReplayLog
        Log of this round, as in `record`; another one than `previous`.
    layer, out, valid, exact, scale, normalize, prefetch_layer, settled, keep, stream, signal
        As in `record`.

    Returns
    -------
    bfloat16 or uint16 array, shape (B, T, value_heads, V)
        `out`, or a new array like `v`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As `record`, and the two logs overlap. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` is given. With two logs that change places every round, a round reads
    and writes a state once. States equal those of `fold` to the bit, outputs those of `record`. Histories of a convolution are not advanced.
    The last round of a sequence is committed by `fold`.

    Examples
    --------
    >>> pool = StatePool.allocate(layers=1, slots=4, heads=2, dim=64)
    >>> logs = [ReplayLog.allocate(layers=1, rows=1, width=2, key_heads=1, heads=2, dim=64) for _ in range(2)]
    >>> import ml_dtypes
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.normal(size=(1, 2, heads, 64)).astype(ml_dtypes.bfloat16) for heads in (1, 1, 2))
    >>> g, beta = np.full((1, 2, 2), -0.5, np.float32), np.ones((1, 2, 2), np.float32)
    >>> slots, accepted = np.array([3]), np.array([0])
    >>> first = fold_record(q, k, v, g, beta, pool, slots, logs[1], accepted, logs[0], layer=0)
    >>> accepted[:] = 1  # of the two
    >>> second = fold_record(q, k, v, g, beta, pool, slots, logs[0], accepted, logs[1], layer=0)
    >>> bool((np.abs(pool.rec[0, 3] @ k[0, 0, 0].astype(np.float32)) > 0.1).any())  # the first key is known, the second is not yet
    True
    """
    device = device_of(q, "q")
    inputs, read, items, tokens, key_heads = batch_inputs(q, k, v, g, beta, pool, device)
    layer = layer_of(layer, pool)
    ahead = _ahead(prefetch_layer, layer, pool)
    slots_at, _, id_type, _ = ids(slots, "slots", IDS, items, device)
    previous_parts = _log(previous, "previous", pool, items, 0, key_heads, layer, device)
    accepted_at, _, accepted_type, _ = ids(accepted, "accepted", IDS, items, device)
    log_parts = _log(log, "log", pool, items, tokens, key_heads, layer, device)
    _refuse_overlap(log, "log", previous, "previous")
    valid_at, valid_bytes = optional_ids(valid, "valid", items, device)
    scale, hint = output_scale(scale, pool), _hint(keep)
    handle = choose(stream, q) if device >= 0 else 0
    out, out_at = output_like(out, v, (items, tokens, pool.heads, pool.dim), device, handle)
    keep_apart(out_at, items * tokens * pool.heads * pool.dim, read, pool, log, previous)
    if device < 0:
        return host(
            reference.fold_record, q, k, v, g, beta, pool, slots, previous, accepted, log, layer=layer, out=out, valid=valid, scale=scale,
            normalize=normalize, signal=signal,
        )  # fmt: skip
    counters = signal_pointer(signal, device) if signal is not None else 0
    if items == 0:
        return nothing(out)
    flags = _record_flags(normalize, pool, key_heads, id_type, valid_bytes) | _WIDE_ACCEPTED * (accepted_type == "int64") | _SETTLED * bool(settled)
    arguments = (
        *inputs, out_at, items, tokens, key_heads, pool.heads, pool.dim, states_at(pool, layer), pool.slot_stride, pool.slots,
        slots_at, valid_at, *log_parts, *previous_parts, accepted_at, ahead, float_bits(scale) | hint, flags, counters,
    )  # fmt: skip
    if exact:
        return _FOLD_RECORD_EXACT.launch((), device, handle, items * pool.heads * (pool.dim // _TILE), _THREADS, arguments, out)
    return _launch_record(_FOLD_RECORDS, tokens, device, handle, items * pool.heads, pool.dim, arguments, out)


@operation
def conv_fold_record(
    x: Any,
    weight: Any,
    g: Any,
    beta: Any,
    pool: StatePool,
    slots: Any,
    previous: ReplayLog,
    accepted: Any,
    log: ReplayLog,
    *,
    layer: int,
    out: Any = None,
    valid: Any = None,
    scale: float | None = None,
    normalize: bool = True,
    prefetch_layer: int | None = None,
    settled: bool = False,
    keep: float | None = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Commit the accepted tokens of the previous round while reading the states for this one, with the convolution in front: `fold_record` of what
    `conv_record` convolves, in one pass.

    Parameters
    ----------
    x, weight, g, beta
        As in `conv_record`.
    pool : StatePool
        States; those of `layer` are read, and written where something was accepted. Histories of the convolution are only read: they must have
        been taken past the same tokens before, by ``fold(pool, previous, rows, states=False)``, one launch for all layers.
    slots, previous, accepted
        As in `fold_record`. `previous` and `log` have the same shapes, as have `g` and `beta`: nothing can notice when they are exchanged.
    log : ReplayLog
        Log of this round, as in `conv_record`; another one than `previous`.
    layer, out, valid, scale, normalize, prefetch_layer, settled, keep, stream, signal
        As in `conv_record`.

    Returns
    -------
    bfloat16 or uint16 array, shape (B, T, value_heads, V)
        `out`, or a new array of the library and dtype of `x`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As `conv_record`, and the two logs overlap. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` is given. With distinct slots, states, outputs and log equal those of
    `fold` and `conv_record` to the bit; sequences that share a slot are skipped, though their histories have been taken along. With large batches
    a round is quickest this way, because it reads and writes a state once; with a sequence or two `conv_record` and a `fold` at the end are.

    Examples
    --------
    >>> pool = StatePool.allocate(layers=1, slots=4, heads=2, dim=64, channels=256)
    >>> logs = [ReplayLog.allocate(layers=1, rows=1, width=2, key_heads=1, heads=2, dim=64, channels=256) for _ in range(2)]
    >>> import ml_dtypes
    >>> rng = np.random.default_rng(0)
    >>> x, weight = (rng.normal(size=shape).astype(ml_dtypes.bfloat16) for shape in ((1, 2, 256), (256, 4)))
    >>> g, beta = np.full((1, 2, 2), -0.5, np.float32), np.ones((1, 2, 2), np.float32)
    >>> slots = np.array([3])
    >>> first = conv_record(x, weight, g, beta, pool, slots, logs[0], layer=0)
    >>> fold(pool, logs[0], np.array([[3, 3, 1]]), states=False)  # one of the two was accepted
    >>> second = conv_fold_record(x, weight, g, beta, pool, slots, logs[0], np.array([1]), logs[1], layer=0)
    >>> bool(pool.rec[0, 3].any()), bool((pool.conv[0, 3, 2] == x[0, 0].view(np.uint16)).all())
    (True, True)
    """
    return _convolve_and_record(
        x, weight, g, beta, pool, slots, log, layer, out, valid, scale, normalize, prefetch_layer, settled, keep, stream, signal, previous, accepted
    )


@operation
def fold(
    pool: StatePool,
    log: ReplayLog,
    rows: Any,
    *,
    states: bool = True,
    histories: bool = True,
    normalize: bool = True,
    settled: bool = False,
    keep: float | None = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Commit accepted tokens: take states past the first m logged tokens, in all layers.

    Parameters
    ----------
    pool : StatePool
        States, and histories of the convolution if it has them; read and written.
    log : ReplayLog
        What `record` has logged, with convolution columns if the pool has histories. Entries from m on are never read.
    rows : int32 or int64 array, shape (R, 3)
        ``(source slot, destination slot, m)``, contiguous; row i belongs to row i of the log. m counts verified tokens, the anchor
        included. With m = 0 nothing happens in place, and the state is copied otherwise. A row with a negative slot is idle; one with a
        slot past the pool, or m outside 0 … W, is skipped and counted as ``out_of_range``. Destinations are distinct, and none is
        another row's source: a row whose destination is taken is skipped and counted as ``occupied``; of rows that share a destination, all are.
    states, histories : bool
        Whether states are taken along, and histories if the pool has them. Histories alone are what `conv_fold_record` wants to have been
        taken along before it; ``states=False`` does nothing, and counts nothing, where pool and log have no histories.
    normalize : bool
        As it was in `record`.
    settled : bool
        Whether all that is read, `rows` and `log` too, was there before the op in front of this one on its stream went to work, and stays as it is
        while that one runs, which touches none of the states and histories of this call either: so it is with an op that launches something between
        acceptance and the fold, unless that op is a settled `fold` itself or another kernel that lets others begin before it has waited. A launch
        that overlaps it (`gpukit.launch.overlapping`) then does all of its work meanwhile. Nothing checks it. Changes no result.
    keep : float, optional
        As in `direct`.
    stream : stream, optional
        Where to launch; the current stream of `rows`' library by default.
    signal : Signal, optional
        Counts ``out_of_range`` and ``occupied``, once a row.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Pool and log do not fit each other or overlap, or `rows` has the wrong dtype, shape or device. Nothing is launched.

    Notes
    -----
    One launch for all layers, no host synchronisation, safe inside a capture: `rows` lies on the device, so accepted counts never visit the
    host. States equal those of `direct` on the logged tokens, to the bit. The history after m tokens is the last three of the old history and
    the first m logged columns.

    Examples
    --------
    >>> pool = StatePool.allocate(layers=2, slots=4, heads=2, dim=64)
    >>> log = ReplayLog.allocate(layers=2, rows=1, width=3, key_heads=1, heads=2, dim=64)
    >>> pool.rec[:, 1] = 5
    >>> log.k[...], log.v[...], log.gates[...] = 0x3F80, 0, -1  # keys of ones; v = 0, g = beta = -1
    >>> fold(pool, log, np.array([[1, 2, 1]]))
    >>> pool.rec[1, 1:3, 0, 0, 0].round(2)
    array([5.  , 3.68], dtype=float32)
    """
    require(pool, StatePool, "pool")
    require(log, ReplayLog, "log")
    device = pool.device
    refuse_other_device("log", log.device, device)
    if (log.layers, log.heads, log.dim) != (pool.layers, pool.heads, pool.dim):
        expected = f"{pool.layers} layers of {pool.heads} heads of {pool.dim}"
        raise ArgumentError(f"log: expected {expected} like pool, got {log.layers} of {log.heads} of {log.dim}")
    if log.channels != pool.channels:
        raise ArgumentError(f"log: expected {pool.channels} convolution channels like pool, got {log.channels}")
    _refuse_overlap(log, "log", pool, "pool")
    rows_at, id_type, shape, strides, where, _ = describe(rows, "rows")
    refuse_other_device("rows", max(where, -1), device)
    if id_type not in IDS:
        raise ArgumentTypeError(f"rows: expected dtype {' or '.join(IDS)}, got {id_type}")
    if len(shape) != 2 or shape[1] != 3 or strides is not None:
        raise ArgumentError(f"rows: expected a contiguous array of shape (at most {log.rows}, 3), got shape {tuple(shape)}, strides {strides}")
    if shape[0] > log.rows:
        raise ArgumentError(f"rows: expected at most {log.rows} rows, as the log has, got {shape[0]}")
    hint = _hint(keep)
    if not (states or (histories and pool.channels)):
        return nothing()
    if device < 0:
        return host(reference.fold, pool, log, rows, states=states, histories=histories, normalize=normalize, signal=signal)
    counters = signal_pointer(signal, device) if signal is not None else 0
    count = shape[0]
    state_blocks = bool(states) * pool.layers * count * pool.heads * (pool.dim // _FOLD_TILE)
    history_blocks = bool(histories) * pool.layers * count * -(-pool.channels // (_CHANNELS * _FOLD_THREADS))
    if state_blocks + history_blocks == 0:
        return nothing()
    arguments = (
        pool.pointer, pool.layer_stride, pool.slot_stride, pool.slots, log.k_pointer, log.v_pointer, log.gates_pointer, log.rows, log.width,
        log.key_heads, pool.heads, pool.dim, rows_at, ITEMSIZE[id_type], count, inverse(pool.heads), inverse(count),
        _flags(normalize, pool) | _SETTLED * bool(settled) | hint, state_blocks, pool.conv_pointer, pool.conv_layer_stride, pool.conv_slot_stride,
        log.conv_pointer, pool.channels, counters,
    )  # fmt: skip
    return _FOLD.launch((), device, choose(stream, rows), state_blocks + history_blocks, _FOLD_THREADS, arguments)


def _convolve_and_record(
    x: Any,
    weight: Any,
    g: Any,
    beta: Any,
    pool: StatePool,
    slots: Any,
    log: ReplayLog,
    layer: int,
    out: Any,
    valid: Any,
    scale: float | None,
    normalize: bool,
    prefetch_layer: int | None,
    settled: bool,
    keep: float | None,
    stream: Any,
    signal: Signal | None,
    previous: ReplayLog | None,
    accepted: Any,
) -> Any:
    """What `conv_record` does, and `conv_fold_record`, which has a previous log."""
    device = device_of(x, "x")
    require(pool, StatePool, "pool")
    refuse_other_device("pool", pool.device, device)
    require(log, ReplayLog, "log")
    inputs, read, items, tokens = column_inputs(x, weight, g, beta, pool, log.key_heads, device)
    layer = layer_of(layer, pool)
    ahead = _ahead(prefetch_layer, layer, pool)
    history_ahead = 0 if prefetch_layer is None else (int(prefetch_layer) - layer) * pool.conv_layer_stride
    slots_at, _, id_type, _ = ids(slots, "slots", IDS, items, device)
    key_heads, channels = log.key_heads, (2 * log.key_heads + pool.heads) * pool.dim
    for name, found in (("pool", pool.channels), ("log", log.channels)):
        if found != channels:
            raise ArgumentError(f"{name}: expected {channels} convolution channels like x, got {found}")
    *log_parts, width = _log(log, "log", pool, items, tokens, key_heads, layer, device, "x")
    if previous is not None:
        previous_parts = _log(previous, "previous", pool, items, 0, key_heads, layer, device, "x")
        accepted_at, _, accepted_type, _ = ids(accepted, "accepted", IDS, items, device)
        _refuse_overlap(log, "log", previous, "previous")
    valid_at, valid_bytes = optional_ids(valid, "valid", items, device)
    scale, hint = output_scale(scale, pool), _hint(keep)
    handle = choose(stream, x) if device >= 0 else 0
    out, out_at = output_like(out, x, (items, tokens, pool.heads, pool.dim), device, handle)
    keep_apart(out_at, items * tokens * pool.heads * pool.dim, read, pool, log, previous)
    if device < 0:
        logs = (log,) if previous is None else (previous, accepted, log)
        function = reference.conv_record if previous is None else reference.conv_fold_record
        return host(
            function, x, weight, g, beta, pool, slots, *logs, layer=layer, out=out, valid=valid, scale=scale, normalize=normalize, signal=signal
        )
    counters = signal_pointer(signal, device) if signal is not None else 0
    if items == 0:
        return nothing(out)
    histories = pool.conv_pointer + 2 * layer * pool.conv_layer_stride
    log_columns = log.conv_pointer + 2 * layer * log.rows * log.width * channels
    flags = _record_flags(normalize, pool, key_heads, id_type, valid_bytes) | _SETTLED * bool(settled)
    verifiers: tuple[_Verifier, ...] = _CONV_RECORDS
    folded: tuple[int, ...] = ()
    if previous is not None:
        verifiers, folded = _CONV_FOLD_RECORDS, (*previous_parts, accepted_at)
        flags |= _WIDE_ACCEPTED * (accepted_type == "int64")
    arguments = (
        *inputs, out_at, items, tokens, key_heads, pool.heads, pool.dim, states_at(pool, layer), pool.slot_stride, pool.slots, slots_at, valid_at,
        histories, pool.conv_slot_stride, *log_parts, log_columns, width, *folded, ahead, history_ahead, float_bits(scale) | hint, flags, counters,
    )  # fmt: skip
    return _launch_record(verifiers, tokens, device, handle, items * pool.heads, pool.dim, arguments, out)


def _flags(normalize: bool, pool: StatePool, slots: str = "int32") -> int:
    return _NORMALIZE * bool(normalize) | _BFLOAT16_STATES * (pool.itemsize == 2) | _WIDE_SLOTS * (slots == "int64")


def _hint(keep: Any) -> int:
    """A share of lines to keep, as the upper half of a parameter: one more than the bits of the float, or 0 without a hint."""
    if keep is None:
        return 0
    return (float_bits(checks.number(keep, "keep", 0, 1)) + 1) << 32


def _ahead(prefetch_layer: int | None, layer: int, pool: StatePool) -> int:
    """Elements from the states of a layer to those of the layer to be fetched into the L2; 0 for none."""
    return 0 if prefetch_layer is None else (layer_of(prefetch_layer, pool, "prefetch_layer") - layer) * pool.layer_stride


def _record_flags(normalize: bool, pool: StatePool, key_heads: int, slots: str, valid_bytes: int) -> int:
    """Flags of a verification; above them the inverse of the value heads a key head has, in units of 2^-30, rounded up."""
    inverse = -(-(2**30) * key_heads // pool.heads)
    return _flags(normalize, pool, slots) | _WIDE_VALID * (valid_bytes == 8) | inverse << 32


def _launch_record(
    verifiers: tuple[_Verifier, ...], tokens: int, device: int, handle: int, heads: int, dim: int, arguments: tuple[int, ...], out: Any
) -> Any:
    """Verification of so many heads, of all sequences, by the kernel for few tokens in few blocks, if there is one, for few tokens, or for many."""
    *wide, short, long = verifiers
    if tokens > _SHORT:
        chosen = long
    elif wide and heads * (dim // wide[0].tile) <= _FEW_BLOCKS:
        chosen = wide[0]
    else:
        chosen = short
    return chosen.kernel.launch((), device, handle, heads * (dim // chosen.tile), chosen.threads, arguments, out)


def _snapshot_slots(array: Any, dtype: str, expected: tuple[int, int], device: int) -> int:
    pointer, got, shape, strides, where, _ = describe(array, "snapshot_slots")
    refuse_other_device("snapshot_slots", max(where, -1), device)
    if got != dtype:
        raise ArgumentTypeError(f"snapshot_slots: expected dtype {dtype} like slots, got {got}")
    if tuple(shape) != expected or strides is not None:
        raise ArgumentError(f"snapshot_slots: expected a contiguous array of shape {expected}, got shape {tuple(shape)}, strides {strides}")
    return pointer


def _log(
    log: ReplayLog, name: str, pool: StatePool, items: int, tokens: int, key_heads: int, layer: int, device: int, whose: str = "q"
) -> tuple[int, int, int, int]:
    """Addresses of a layer's keys, values and gates in a log, and its width. The tokens are those of the argument `whose`."""
    require(log, ReplayLog, name)
    refuse_other_device(name, log.device, device)
    if (log.key_heads, log.heads, log.dim) != (key_heads, pool.heads, pool.dim):
        got = f"{log.key_heads} and {log.heads} of {log.dim}"
        raise ArgumentError(f"{name}: expected {key_heads} key heads and {pool.heads} value heads of {pool.dim}, got {got}")
    if log.layers != pool.layers or log.rows < items:
        raise ArgumentError(f"{name}: expected {pool.layers} layers and at least {items} rows, got {log.layers} and {log.rows}")
    if tokens > min(log.width, _MOST_TOKENS):
        raise ArgumentError(f"{whose}: expected at most {min(log.width, _MOST_TOKENS)} tokens, of {name}'s width and 16, got {tokens}")
    _refuse_overlap(log, name, pool, "pool")
    entries = layer * log.rows * log.width
    values = entries * log.heads
    return log.k_pointer + 2 * entries * key_heads * log.dim, log.v_pointer + 2 * values * log.dim, log.gates_pointer + 8 * values, log.width


def _refuse_overlap(log: ReplayLog, name: str, other: StatePool | ReplayLog, other_name: str) -> None:
    if other in log.apart_from:
        return
    if share_memory(log.parts, other.parts):
        raise ArgumentError(f"{name}: expected memory of its own, but it overlaps {other_name}")
    log.apart_from.add(other)
