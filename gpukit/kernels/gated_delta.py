"""The gated delta rule: recurrent states taken past tokens, at once or, for speculative decoding, recorded first and folded when accepted.

A state is a matrix S [V, K] for every value head, in a `StatePool`; value head h uses key head ``h // (value_heads / key_heads)``. One token:

    kn = k / sqrt(sum k² + 1e-6),  qn likewise    (as they are with normalize=False)
    a  = exp(g)
    d  = beta (v − a S kn)
    S  ← a S + d kn
    o  = scale S qn                               (the new S)

All arithmetic is fp32; outputs are rounded once to bfloat16. The rule is that of Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving
Mamba2 with Delta Rule", 2024. Gates come as they are used: what makes g and beta of projections is not here, nor is the convolution in front.

States are the same to the bit whichever op computes them: in any layout, at any place of any batch, eager and captured.
"""

from __future__ import annotations

import struct
from typing import Any

from gpukit.arrays import ITEMSIZE, contiguous_strides, describe, overlap, vector
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels._plans import allocate, refuse_other_device, signal_pointer, whole
from gpukit.kernels._tensors import BF16
from gpukit.kernels.reference import gated_delta as reference
from gpukit.kernels.state_pool import DIMS, ReplayLog, StatePool
from gpukit.launch import IDS, Kernel, host, nothing, operation
from gpukit.streams import choose

__all__ = ["direct", "fold", "fold_record", "record"]

_DIRECT = Kernel("gated_delta", "direct", language="cuda")
_RECORD = Kernel("gated_delta", "record", language="cuda")
_FOLD_RECORD = Kernel("gated_delta", "fold_record", language="cuda")
_FOLD = Kernel("gated_delta", "fold", language="cuda")

# 32 times WARPS and RECORD_WARPS, ROWS, FOLD_ROWS and MOST_TOKENS of cuda/gated_delta.cu.
_THREADS = 128
_RECORD_THREADS = 256
_ROWS = 4
_FOLD_ROWS = 8
_MOST_TOKENS = 16
# Elements of a lane along K, and channels of a thread along a history.
_LANE = 4
_CHANNELS = 8

_FLOAT32 = ("float32",)


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
    One launch, no host synchronisation, safe inside a capture when `out` is given. A state is read once and written once, whatever T is.
    The output of a token is taken from the state before it, as ``scale (a S qn + d (kn · qn))``, which equals the formula but for rounding.

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
    device = _device(q, "q")
    inputs, items, tokens, key_heads = _inputs(q, k, v, g, beta, pool, device)
    layer = _layer(layer, pool)
    slots_at, _, id_type, _ = _ids(slots, "slots", IDS, items, device)
    if destination_slots is None:
        destination_at = slots_at
    else:
        destination_at, _, _, _ = _ids(destination_slots, "destination_slots", (id_type,), items, device)
    scale = _scale(scale, pool)
    handle = choose(stream, q) if device >= 0 else 0
    out, out_at = _out(out, v, (items, tokens, pool.heads, pool.dim), device, handle)
    if device < 0:
        return host(
            reference.direct, q, k, v, g, beta, pool, slots, layer=layer, out=out, destination_slots=destination_slots, scale=scale,
            normalize=normalize, signal=signal,
        )  # fmt: skip
    counters = signal_pointer(signal, device) if signal is not None else 0
    if items == 0:
        return nothing(out)
    arguments = (
        *inputs, out_at, items, tokens, key_heads, pool.heads, pool.dim, _states(pool, layer), pool.slot_stride, pool.slots,
        slots_at, destination_at, ITEMSIZE[id_type], _bits(scale), int(normalize), counters,
    )  # fmt: skip
    return _DIRECT.launch((), device, handle, items * pool.heads * _tiles(pool.dim), _THREADS, arguments, out)


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
    scale: float | None = None,
    normalize: bool = True,
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
    scale, normalize, stream, signal
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
    One launch, no host synchronisation, safe inside a capture when `out` is given. The log holds exactly what came in. Outputs are those of
    `direct` within rounding, not to the bit: all products with the committed state are taken at once, and what the tokens do to each other
    is solved from the products of their keys (the WY form).

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
    device = _device(q, "q")
    inputs, items, tokens, key_heads = _inputs(q, k, v, g, beta, pool, device)
    layer = _layer(layer, pool)
    slots_at, _, id_type, _ = _ids(slots, "slots", IDS, items, device)
    log_parts = _log(log, "log", pool, items, tokens, key_heads, layer, device)
    valid_at, valid_bytes = _optional_ids(valid, "valid", items, device)
    scale = _scale(scale, pool)
    handle = choose(stream, q) if device >= 0 else 0
    out, out_at = _out(out, v, (items, tokens, pool.heads, pool.dim), device, handle)
    if device < 0:
        return host(
            reference.record, q, k, v, g, beta, pool, slots, log, layer=layer, out=out, valid=valid, scale=scale, normalize=normalize,
            signal=signal,
        )  # fmt: skip
    counters = signal_pointer(signal, device) if signal is not None else 0
    if items == 0:
        return nothing(out)
    arguments = (
        *inputs, out_at, items, tokens, key_heads, pool.heads, pool.dim, _states(pool, layer), pool.slot_stride, pool.slots,
        slots_at, ITEMSIZE[id_type], valid_at, valid_bytes, *log_parts, _bits(scale), int(normalize), counters,
    )  # fmt: skip
    return _RECORD.launch((), device, handle, items * pool.heads * _tiles(pool.dim, _RECORD_THREADS), _RECORD_THREADS, arguments, out)


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
    scale: float | None = None,
    normalize: bool = True,
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
    layer, out, valid, scale, normalize, stream, signal
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
    device = _device(q, "q")
    inputs, items, tokens, key_heads = _inputs(q, k, v, g, beta, pool, device)
    layer = _layer(layer, pool)
    slots_at, _, id_type, _ = _ids(slots, "slots", IDS, items, device)
    previous_parts = _log(previous, "previous", pool, items, 0, key_heads, layer, device)
    accepted_at, _, accepted_type, _ = _ids(accepted, "accepted", IDS, items, device)
    log_parts = _log(log, "log", pool, items, tokens, key_heads, layer, device)
    _refuse_overlap(log, "log", previous, "previous")
    valid_at, valid_bytes = _optional_ids(valid, "valid", items, device)
    scale = _scale(scale, pool)
    handle = choose(stream, q) if device >= 0 else 0
    out, out_at = _out(out, v, (items, tokens, pool.heads, pool.dim), device, handle)
    if device < 0:
        return host(
            reference.fold_record, q, k, v, g, beta, pool, slots, previous, accepted, log, layer=layer, out=out, valid=valid, scale=scale,
            normalize=normalize, signal=signal,
        )  # fmt: skip
    counters = signal_pointer(signal, device) if signal is not None else 0
    if items == 0:
        return nothing(out)
    flags = int(normalize) | 2 * (accepted_type == "int64")
    arguments = (
        *inputs, out_at, items, tokens, key_heads, pool.heads, pool.dim, _states(pool, layer), pool.slot_stride, pool.slots,
        slots_at, ITEMSIZE[id_type], valid_at, valid_bytes, *log_parts, *previous_parts, accepted_at, _bits(scale), flags, counters,
    )  # fmt: skip
    return _FOLD_RECORD.launch((), device, handle, items * pool.heads * _tiles(pool.dim, _RECORD_THREADS), _RECORD_THREADS, arguments, out)


@operation
def fold(pool: StatePool, log: ReplayLog, rows: Any, *, normalize: bool = True, stream: Any = None, signal: Signal | None = None) -> Any:
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
        another row's source: a row whose destination is taken is skipped and counted as ``occupied``.
    normalize : bool
        As it was in `record`.
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
    _container(pool, StatePool, "pool")
    _container(log, ReplayLog, "log")
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
    if len(shape) != 2 or shape[1] != 3 or shape[0] > log.rows or strides is not None:
        raise ArgumentError(f"rows: expected a contiguous array of shape (at most {log.rows}, 3), got shape {tuple(shape)}, strides {strides}")
    if device < 0:
        return host(reference.fold, pool, log, rows, normalize=normalize, signal=signal)
    counters = signal_pointer(signal, device) if signal is not None else 0
    count = shape[0]
    if count == 0:
        return nothing()
    state_blocks = pool.layers * count * pool.heads * _tiles(pool.dim, rows=_FOLD_ROWS)
    history_blocks = pool.layers * count * -(-pool.channels // (_CHANNELS * _THREADS))
    arguments = (
        pool.pointer, pool.layer_stride, pool.slot_stride, pool.slots, log.k_pointer, log.v_pointer, log.gates_pointer, log.rows, log.width,
        log.key_heads, pool.heads, pool.dim, rows_at, ITEMSIZE[id_type], count, int(normalize), state_blocks,
        pool.conv_pointer, pool.conv_layer_stride, pool.conv_slot_stride, log.conv_pointer, pool.channels, counters,
    )  # fmt: skip
    return _FOLD.launch((), device, choose(stream, rows), state_blocks + history_blocks, _THREADS, arguments)


def _tiles(dim: int, threads: int = _THREADS, rows: int = _ROWS) -> int:
    """Blocks of a head."""
    return dim * dim // (threads * rows * _LANE)


def _bits(scale: float) -> int:
    """A float's bits: a kernel then finds it among its parameters as it is."""
    return int.from_bytes(struct.pack("<f", scale), "little")


def _scale(scale: float | None, pool: StatePool) -> float:
    return pool.dim**-0.5 if scale is None else float(scale)


def _device(array: Any, name: str) -> int:
    return max(describe(array, name)[4], -1)


def _container(value: Any, kind: type, name: str) -> None:
    if not isinstance(value, kind):
        raise ArgumentTypeError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")


def _layer(layer: int, pool: StatePool) -> int:
    layer = whole(layer, "layer")
    if layer >= pool.layers:
        raise ArgumentError(f"layer: expected at most {pool.layers - 1}, the last of pool, got {layer}")
    return layer


def _states(pool: StatePool, layer: int) -> int:
    """Address of a layer's first state."""
    return pool.pointer + 4 * layer * pool.layer_stride


def _batch(
    array: Any, name: str, dtypes: tuple[str, ...], device: int, shape: tuple[int | None, ...], expected: str, alignment: int = 1
) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """``(pointer, stride of sequences, stride of tokens)`` and shape of an input; None in `shape` is any size but 0."""
    pointer, dtype, got, strides, where, _ = describe(array, name)
    refuse_other_device(name, max(where, -1), device)
    if dtype not in dtypes:
        raise ArgumentTypeError(f"{name}: expected dtype {' or '.join(dtypes)}, got {dtype}")
    if len(got) != len(shape) or any(n != m if m is not None else n == 0 for n, m in zip(got, shape, strict=True)):
        raise ArgumentError(f"{name}: expected shape {expected}, got {tuple(got)}")
    plain = contiguous_strides(got)
    if strides is None:
        return (pointer, plain[0], plain[1]), got
    # An axis of length 1 has no stride worth looking at.
    seen = tuple(p if n == 1 else s for n, s, p in zip(got, strides, plain, strict=True))
    if seen[2:] != plain[2:]:
        raise ArgumentError(f"{name}: expected heads that are contiguous within a token, got element strides {tuple(strides)}")
    if seen[0] % alignment or seen[1] % alignment:
        raise ArgumentError(f"{name}: expected strides of multiples of {alignment} elements, got {tuple(strides)}")
    return (pointer, seen[0], seen[1]), got


def _inputs(q: Any, k: Any, v: Any, g: Any, beta: Any, pool: StatePool, device: int) -> tuple[tuple[int, ...], int, int, int]:
    """Pointers and strides of the inputs as the kernels take them, number of sequences, of tokens and of key heads."""
    _container(pool, StatePool, "pool")
    refuse_other_device("pool", pool.device, device)
    shape = describe(q, "q")[2]
    if len(shape) != 4 or shape[3] not in DIMS:
        raise ArgumentError(f"q: expected shape (B, T, key_heads, 64 or 128), got {tuple(shape)}")
    items = shape[0]
    q_part, shape = _batch(q, "q", BF16, device, (items, None, None, pool.dim), f"(B, T, key_heads, {pool.dim}), as pool says", 8)
    _, tokens, key_heads, dim = shape
    if pool.heads % key_heads:
        raise ArgumentError(f"q: expected key heads that divide the {pool.heads} value heads of pool, got {key_heads}")
    k_part, _ = _batch(k, "k", BF16, device, tuple(shape), f"{tuple(shape)} like q", 8)
    for name, (pointer, _, _) in (("q", q_part), ("k", k_part)):
        if pointer % 16:
            raise ArgumentError(f"{name}: expected an address that is a multiple of 16, got {pointer:#x}")
    values = (items, tokens, pool.heads, dim)
    v_part, _ = _batch(v, "v", BF16, device, values, f"{values}")
    g_part, _ = _batch(g, "g", _FLOAT32, device, values[:3], f"{values[:3]}")
    beta_part, _ = _batch(beta, "beta", _FLOAT32, device, values[:3], f"{values[:3]}")
    return (*q_part, *k_part, *v_part, *g_part, *beta_part), items, tokens, key_heads


def _out(out: Any, v: Any, shape: tuple[int, ...], device: int, handle: int) -> tuple[Any, int]:
    if out is None:
        if device < 0:
            from gpukit import arrays

            return arrays.empty(shape, describe(v)[1], v), 0
        return allocate("out", shape, describe(v)[1], v, handle)
    pointer, dtype, got, strides, where, writable = describe(out, "out")
    refuse_other_device("out", max(where, -1), device)
    if dtype not in BF16:
        raise ArgumentTypeError(f"out: expected dtype {' or '.join(BF16)}, got {dtype}")
    if tuple(got) != shape:
        raise ArgumentError(f"out: expected shape {shape}, got {tuple(got)}")
    if strides is not None:
        raise ArgumentError(f"out: expected a contiguous array, got element strides {tuple(strides)}")
    if not writable:
        raise ArgumentError("out: expected a writable array, got a read-only one")
    return out, pointer


def _ids(array: Any, name: str, dtypes: tuple[str, ...], items: int, device: int) -> tuple[int, int, str, int]:
    found = vector(array, name, dtypes, device)
    if found[1] != items:
        raise ArgumentError(f"{name}: expected shape ({items},), one a sequence, got ({found[1]},)")
    return found


def _optional_ids(array: Any, name: str, items: int, device: int) -> tuple[int, int]:
    """Pointer and bytes of an id, zeros without an array."""
    if array is None:
        return 0, 0
    pointer, _, dtype, _ = _ids(array, name, IDS, items, device)
    return pointer, ITEMSIZE[dtype]


def _log(log: ReplayLog, name: str, pool: StatePool, items: int, tokens: int, key_heads: int, layer: int, device: int) -> tuple[int, int, int, int]:
    """Addresses of a layer's keys, values and gates in a log, and its width."""
    _container(log, ReplayLog, name)
    refuse_other_device(name, log.device, device)
    if (log.key_heads, log.heads, log.dim) != (key_heads, pool.heads, pool.dim):
        got = f"{log.key_heads} and {log.heads} of {log.dim}"
        raise ArgumentError(f"{name}: expected {key_heads} key heads and {pool.heads} value heads of {pool.dim}, got {got}")
    if log.layers != pool.layers or log.rows < items:
        raise ArgumentError(f"{name}: expected {pool.layers} layers and at least {items} rows, got {log.layers} and {log.rows}")
    if tokens > min(log.width, _MOST_TOKENS):
        raise ArgumentError(f"q: expected at most {min(log.width, _MOST_TOKENS)} tokens, of {name}'s width and 16, got {tokens}")
    _refuse_overlap(log, name, pool, "pool")
    entries = layer * log.rows * log.width
    values = entries * log.heads
    return log.k_pointer + 2 * entries * key_heads * log.dim, log.v_pointer + 2 * values * log.dim, log.gates_pointer + 8 * values, log.width


def _refuse_overlap(log: ReplayLog, name: str, other: StatePool | ReplayLog, other_name: str) -> None:
    if other in log.apart_from:
        return
    if log.span[0] < other.span[1] and other.span[0] < log.span[1]:
        for part in log.extents():
            if any(overlap(part, theirs) for theirs in other.extents()):
                raise ArgumentError(f"{name}: expected memory of its own, but it overlaps {other_name}")
    log.apart_from.add(other)
