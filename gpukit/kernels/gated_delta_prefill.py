"""The gated delta rule over long sequences: a prompt's tokens into the states of a pool, wherever the pool's strides put them.

The rule, its states and its heads are those of `gated_delta`. Sequences of many lengths lie packed one behind the other.
"""

from __future__ import annotations

import contextlib
from typing import Any

from gpukit import arrays, devices
from gpukit.arrays import ITEMSIZE, contiguous_strides, describe
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels._plans import allocate, refuse_other_device, signal_pointer, whole
from gpukit.kernels._recurrent import (
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
    token_inputs,
)
from gpukit.kernels._tensors import BF16, require_aligned
from gpukit.kernels.reference import gated_delta_prefill as reference
from gpukit.kernels.state_pool import DIMS, StatePool
from gpukit.launch import IDS, Kernel, Launch, host, launch_all, nothing, operation
from gpukit.streams import choose

__all__ = ["prefill", "prefill_workspace"]

# CHUNK, THREADS, TILE and RECORD of cuda/gated_delta_prefill.cu, and the bytes of its ScanScratch<128>.
_CHUNK = 64
_THREADS = 256
_TILE = 32
_RECORD = 21632
_SCAN_BYTES = 101376

_PREPARE = Kernel("gated_delta_prefill", "prefill_prepare", language="cuda")
_SCAN = Kernel("gated_delta_prefill", "prefill_scan", language="cuda", shared_bytes=_SCAN_BYTES)
_SEQUENTIAL = Kernel("gated_delta_prefill_sequential", "prefill_sequential", language="cuda")

# 32 times WARPS and TILE of cuda/gated_delta.cu, CLEARED of cuda/gated_delta_prefill_sequential.cu.
_SEQUENTIAL_THREADS = 64
_SEQUENTIAL_TILE = 8
_CLEARED = 64

_METHODS = ("auto", "chunked", "sequential", "fla")
# Tokens of a sequence, on average, from which on "auto" is "chunked".
_CHUNKED_FROM = 16
_MOST_TOKENS = 2**30


@operation
def prefill(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    pool: StatePool,
    slots: Any,
    cu_seqlens: Any,
    *,
    layer: int,
    out: Any = None,
    destination_slots: Any = None,
    resume: Any = None,
    method: str = "auto",
    workspace: Any = None,
    scale: float | None = None,
    normalize: bool = True,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Take the states of S sequences past all of their tokens, each straight from its slot and into its slot, and return the outputs.

    Parameters
    ----------
    q, k : bfloat16 or uint16 array, shape (N, key_heads, K)
        Queries and keys of all sequences' tokens. Heads are contiguous within a token; the stride of tokens is a free multiple of 8 elements,
        and the address is a multiple of 16: views of one projection will do.
    v : bfloat16 or uint16 array, shape (N, value_heads, V)
        Values, with the same freedom.
    g, beta : float32 array, shape (N, value_heads)
        Logarithm of the decay, at most 0, and strength of the update. Contiguous within a token.
    pool : StatePool
        States; those of `layer` are read and written, in the named slots only.
    slots : int32 or int64 array, shape (S,)
        Where the state of each sequence is. Negative is padding; a slot past the pool is skipped and counted as ``out_of_range``.
    cu_seqlens : int32 or int64 array, shape (S + 1,)
        Sequence s has the tokens from ``cu_seqlens[s]`` to before ``cu_seqlens[s + 1]``; it may have none. Ascending numbers of 0 … N; if they
        are not, all sequences are skipped and counted as ``out_of_range``. On the device, and never read by the host.
    layer : int
        Layer of the pool.
    out : bfloat16 or uint16 array, shape (N, value_heads, V), optional
        Outputs, contiguous, at an address that is a multiple of 16; zeros for tokens of no sequence, of padding and of skipped sequences.
    destination_slots : array like `slots`, optional
        Where the new state goes; `slots` by default. Destinations are distinct, and none is the source of another sequence: a sequence
        whose destination is taken is skipped and counted as ``occupied``.
    resume : int32 or int64 array, shape (S,), optional
        0 where a sequence starts from zeros: what its slot holds is not read then. All resume by default.
    method : {"auto", "chunked", "sequential", "fla"}
        How a GPU does it. "chunked": 64 tokens at a time on tensor cores, in two launches. "sequential": token by token in one launch. "fla": the
        chunked kernels of flash-linear-attention, to compare with: torch tensors only, states gathered and scattered around the call, the
        host waits for slots and lengths, so that nothing of it can be captured, and `signal` is refused because bad ones raise. "auto" is
        "chunked" where N is at least 16 S, else "sequential"; never "fla". NumPy arrays are always taken token by token.
    workspace : uint8 array, shape (at least ``prefill_workspace(N, S, value_heads)``,), optional
        Scratch of "chunked", contiguous, at an address that is a multiple of 16; a new one by default.
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
    bfloat16 or uint16 array, shape (N, value_heads, V)
        `out`, or a new array like `v`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Shapes do not fit each other or the pool, an array has the wrong dtype, strides, alignment or device, `layer` is not in the pool, or
        there is no such method. Nothing is launched.

    Notes
    -----
    No host synchronisation (but "fla"), safe inside a capture when `out` and, for "chunked", `workspace` are given.

    Bytes: a state is read once, or not at all where `resume` is 0, and written once; nothing is gathered or scattered, and no other slot is
    touched, whatever the layout. Keys and queries are read once for every value head of their group ("chunked": and again for every 32 rows
    of V, from L2), values, gates and outputs once; "chunked" writes and reads 21,632 bytes of workspace for every 64 tokens and value head.

    States of "sequential" equal those of `direct` to the bit. "chunked" is the WY form of the rule (Yang, Kautz and Hatamizadeh, 2024; Yang,
    Wang, Zhang, Shen and Kim, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024) with a fp32 state and 16 bits
    of every number on the tensor cores, so it differs from "sequential" by rounding far below a bfloat16's; a NaN may reach outputs of up to
    63 earlier tokens of its sequence there, and gates below -104 count as -104. A pool of bfloat16 states is rounded after every token by
    "sequential", at the end by "chunked".

    Examples
    --------
    >>> pool = StatePool.allocate(layers=1, slots=4, heads=2, dim=64)
    >>> import ml_dtypes
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.normal(size=(5, heads, 64)).astype(ml_dtypes.bfloat16) for heads in (1, 1, 2))
    >>> g, beta = np.full((5, 2), -0.5, np.float32), np.ones((5, 2), np.float32)
    >>> out = prefill(q, k, v, g, beta, pool, np.array([3, 1]), np.array([0, 4, 5]), layer=0)
    >>> [bool(state.any()) for state in pool.rec[0]]
    [False, True, False, True]
    >>> kn = k[4, 0] / np.linalg.norm(k[4, 0].astype(float))
    >>> bool(np.allclose(pool.rec[0, 1] @ kn.astype(np.float32), v[4].astype(float), atol=0.02))  # the key recalls its value
    True
    """
    device = device_of(q, "q")
    require(pool, StatePool, "pool")
    refuse_other_device("pool", pool.device, device)
    if method not in _METHODS:
        raise ArgumentError(f"method: expected one of {', '.join(_METHODS)}, got {method!r}")
    shape = describe(q, "q")[2]
    if len(shape) != 3 or shape[2] not in DIMS:
        raise ArgumentError(f"q: expected shape (N, key_heads, 64 or 128), got {tuple(shape)}")
    tokens, key_heads, _ = shape
    if tokens > _MOST_TOKENS:
        raise ArgumentError(f"q: expected at most {_MOST_TOKENS} tokens, got {tokens}")
    if key_heads == 0 or pool.heads % key_heads:
        raise ArgumentError(f"q: expected key heads that divide the {pool.heads} value heads of pool, got {key_heads}")
    q_part = _tokens(q, "q", BF16, (tokens, key_heads, pool.dim), device)
    k_part = _tokens(k, "k", BF16, (tokens, key_heads, pool.dim), device)
    v_part = _tokens(v, "v", BF16, (tokens, pool.heads, pool.dim), device)
    g_part = _tokens(g, "g", ("float32",), (tokens, pool.heads), device)
    beta_part = _tokens(beta, "beta", ("float32",), (tokens, pool.heads), device)
    layer = layer_of(layer, pool)
    slots_at, sequences, id_type, _ = arrays.vector(slots, "slots", IDS, device)
    offsets_at, _, offset_type, _ = ids(cu_seqlens, "cu_seqlens", IDS, sequences + 1, device)
    if destination_slots is None:
        destination_at = slots_at
    else:
        destination_at, _, _, _ = ids(destination_slots, "destination_slots", (id_type,), sequences, device)
    resume_at, resume_bytes = optional_ids(resume, "resume", sequences, device)
    scale = output_scale(scale, pool)
    if method == "fla":
        return _launch_fla(
            q, k, v, g, beta, pool, slots, cu_seqlens, layer=layer, out=out, destination_slots=destination_slots, resume=resume, scale=scale,
            normalize=normalize, stream=stream, signal=signal,
        )  # fmt: skip
    is_chunked = method == "chunked" or (method == "auto" and tokens >= _CHUNKED_FROM * sequences)
    handle = choose(stream, q) if device >= 0 else 0
    workspace_at = _workspace(workspace, tokens, sequences, pool.heads, device)
    out, out_at = output_like(out, v, (tokens, pool.heads, pool.dim), device, handle)
    require_aligned("out", out_at)
    heads = pool.heads * pool.dim
    read = token_inputs((q_part, k_part, v_part, g_part, beta_part), (tokens,), key_heads * pool.dim, heads, pool.heads)
    scratch = (("workspace", (workspace_at, 1, (prefill_workspace(tokens, sequences, pool.heads),), (1,))),) if workspace_at else ()
    keep_apart(out_at, tokens * heads, (*read, *scratch), pool)
    if device < 0:
        return host(
            reference.prefill, q, k, v, g, beta, pool, slots, cu_seqlens, layer=layer, out=out, destination_slots=destination_slots,
            resume=resume, scale=scale, normalize=normalize, signal=signal,
        )  # fmt: skip
    counters = signal_pointer(signal, device) if signal is not None else 0
    if tokens == sequences == 0:
        return nothing(out)
    packed = (offsets_at, ITEMSIZE[offset_type], sequences, tokens)
    sizes = (key_heads, pool.heads, pool.dim)
    states = (
        states_at(pool, layer), pool.itemsize, pool.slot_stride, pool.slots, slots_at, destination_at, ITEMSIZE[id_type],
        resume_at, resume_bytes,
    )  # fmt: skip
    if not is_chunked:
        state_blocks = sequences * pool.heads * (pool.dim // _SEQUENTIAL_TILE)
        inputs = (*q_part, *k_part, *v_part, *g_part, *beta_part, out_at)
        arguments = (*inputs, *packed, *sizes, *states, state_blocks, float_bits(scale), int(normalize), counters)
        return _SEQUENTIAL.launch((), device, handle, state_blocks + -(-tokens // _CLEARED), _SEQUENTIAL_THREADS, arguments, out)
    if workspace_at == 0:
        workspace, workspace_at = allocate("workspace", prefill_workspace(tokens, sequences, pool.heads), "uint8", q, handle)
    prepared = (*q_part, *k_part, *g_part, *beta_part, out_at, *packed, *sizes, workspace_at, float_bits(scale), int(normalize))
    launches: list[Launch] = [(_PREPARE, _places(tokens, sequences) * pool.heads, _THREADS, prepared)]
    if sequences:
        scanned = (*q_part, *k_part, *v_part, out_at, *packed, *sizes, *states, workspace_at, counters)
        launches.append((_SCAN, sequences * pool.heads * (pool.dim // _TILE), _THREADS, scanned))
    return launch_all(launches, device, handle, out, workspace)


def prefill_workspace(tokens: int, sequences: int, heads: int) -> int:
    """Bytes of workspace that `prefill` by "chunked" needs.

    Parameters
    ----------
    tokens, sequences, heads : int
        N and S, or the most there will be, and value heads.

    Returns
    -------
    int
        Bytes: 21,632 for every value head and chunk of 64 tokens, of which there may be ``N // 64 + S``.

    Examples
    --------
    >>> prefill_workspace(tokens=4096, sequences=1, heads=32)
    44994560
    """
    return _places(whole(tokens, "tokens"), whole(sequences, "sequences")) * whole(heads, "heads") * _RECORD


def _places(tokens: int, sequences: int) -> int:
    """Chunks that sequences of any lengths can have together, or as many as clear the outputs of no sequence."""
    return tokens // _CHUNK + max(sequences, 1)


def _tokens(array: Any, name: str, dtypes: tuple[str, ...], expected: tuple[int, ...], device: int) -> tuple[int, int]:
    """Pointer and stride of tokens of a packed input."""
    pointer, dtype, shape, strides, where, _ = describe(array, name)
    refuse_other_device(name, max(where, -1), device)
    if dtype not in dtypes:
        raise ArgumentTypeError(f"{name}: expected dtype {' or '.join(dtypes)}, got {dtype}")
    if tuple(shape) != expected:
        raise ArgumentError(f"{name}: expected shape {expected}, got {tuple(shape)}")
    plain = contiguous_strides(expected)
    # Axes of length 1 have no stride worth looking at.
    seen = plain if strides is None else tuple(p if n == 1 else s for n, s, p in zip(expected, strides, plain, strict=True))
    if seen[1:] != plain[1:]:
        raise ArgumentError(f"{name}: expected heads that are contiguous within a token, got element strides {tuple(strides or ())}")
    if len(expected) == 3 and seen[0] % 8:
        raise ArgumentError(f"{name}: expected a stride of tokens that is a multiple of 8 elements, got {seen[0]}")
    if len(expected) == 3:
        require_aligned(name, pointer)
    return pointer, seen[0]


def _workspace(workspace: Any, tokens: int, sequences: int, heads: int, device: int) -> int:
    """Pointer to a given workspace, 0 without one."""
    if workspace is None:
        return 0
    pointer, size, _, _ = arrays.output(workspace, "workspace", ("uint8",), device)
    needed = prefill_workspace(tokens, sequences, heads)
    if size < needed:
        raise ArgumentError(f"workspace: expected at least {needed} bytes, got {size}")
    require_aligned("workspace", pointer)
    return pointer


def _launch_fla(q: Any, *inputs: Any, out: Any, stream: Any, signal: Signal | None, **options: Any) -> Any:
    """Check what only flash-linear-attention cannot do, and leave the rest to it."""
    if arrays.library_of(q) != "torch" or device_of(q, "q") < 0:
        raise ArgumentTypeError(f"method: 'fla' takes torch tensors of a GPU, got {type(q).__module__}.{type(q).__name__}")
    if signal is not None:
        raise ArgumentError("signal: expected None with method 'fla', which raises where others count")
    handle = choose(stream, q)
    if devices.is_capturing(handle):
        raise ArgumentError("method: expected one that can be captured; 'fla' reads lengths on the host")
    v = inputs[1]
    out, _ = output_like(out, v, tuple(v.shape), device_of(q, "q"), handle)
    return host(_by_fla, q, *inputs, out=out, handle=handle, **options)


def _by_fla(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    pool: StatePool,
    slots: Any,
    cu_seqlens: Any,
    *,
    layer: int,
    out: Any,
    destination_slots: Any,
    resume: Any,
    scale: float,
    normalize: bool,
    handle: int,
) -> Any:
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise ArgumentError(f"method: 'fla' needs the package fla-core, which cannot be imported ({error})") from None
    import torch

    if any(array.dtype != torch.bfloat16 for array in (q, k, v, out)):
        raise ArgumentTypeError("method: 'fla' takes q, k, v and out of dtype bfloat16, not its bits")
    is_current = handle == torch.cuda.current_stream(q.device).cuda_stream
    with contextlib.nullcontext() if is_current else torch.cuda.stream(torch.cuda.ExternalStream(handle, device=q.device)):
        sources, offsets = slots.long(), cu_seqlens.long()
        destinations = sources if destination_slots is None else destination_slots.long()
        if any(bool(((taken < 0) | (taken >= pool.slots)).any()) for taken in (sources, destinations)):
            raise ArgumentError(f"slots: expected 0 to {pool.slots - 1} with method 'fla', got another one")
        if int(offsets[0]) != 0 or int(offsets[-1]) != len(q) or bool((offsets.diff() < 0).any()):
            raise ArgumentError(f"cu_seqlens: expected ascending numbers from 0 to {len(q)} with method 'fla', got others")
        states = pool.rec[layer]
        initial = states[sources].float().transpose(-1, -2)
        if resume is not None:
            initial = initial.masked_fill((resume == 0)[:, None, None, None], 0)
        group = pool.heads // q.shape[1]
        outputs, final = chunk_gated_delta_rule(
            q.repeat_interleave(group, 1)[None], k.repeat_interleave(group, 1)[None], v[None], g[None], beta[None], scale=scale,
            initial_state=initial.contiguous(), output_final_state=True, use_qk_l2norm_in_kernel=normalize, cu_seqlens=offsets,
        )  # fmt: skip
        out.copy_(outputs[0])
        states.index_copy_(0, destinations, final.transpose(-1, -2).to(states.dtype))
    return out
