"""Sparse mixture of experts: a router picks eight experts for every token, whose weighted answers, with those of a shared expert, are added to it.

Few tokens are bound by reading the weights of the experts that they have between them. The schedule "decode" groups the tokens of a batch by
expert on the device, so that each expert is read once, in its stored format, and gives a token the same bits whatever is beside it. The schedule
"prefill" is for many tokens, where every expert has enough of them to keep the tensor cores busy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gpukit import arrays, devices
from gpukit.arrays import ITEMSIZE
from gpukit.errors import ArgumentError, Signal
from gpukit.kernels._moe import TOP, Fp8, Geometry, MoeWeights, geometry_of, router_experts
from gpukit.kernels._moe_decode import (
    CARVEOUT,
    FEW_TOKENS,
    FORMATS,
    MOST_SEGMENTS,
    ExpertsFew,
    down_for,
    experts_few_for,
    experts_few_maps,
    gate_up_for,
    scores_one_for,
)
from gpukit.kernels._plans import allocate, blocks_for, inverse, signal_pointer, whole
from gpukit.kernels._row_split import RowSplit
from gpukit.kernels._tensors import BF16, NUMBERS, Tensor, like_shape, refuse_overlap, require_aligned, tensor
from gpukit.kernels.reference import moe as reference
from gpukit.launch import Kernel, Launch, host, launch_all, nothing, operation
from gpukit.streams import choose

__all__ = ["Fp8", "MoeWeights", "RowSplit", "down_add", "gate_up", "prefill_reduce", "route", "route_workspace", "sparse_moe", "workspace_bytes"]

_SCORES = Kernel("moe", "scores", language="cuda", early=True, carveout=CARVEOUT)
_SELECT = Kernel("moe", "select", language="cuda", early=True, carveout=CARVEOUT)
_HAND_ON = Kernel("moe", "hand_on", language="cuda", early=True)
_SCAN = Kernel("moe_prefill", "scan", language="cuda", early=True)
_GATHER = Kernel("moe_prefill", "gather", language="cuda", early=True)
_REDUCE = Kernel("moe_prefill", "prefill_reduce", language="cuda", early=True)


def _grouped(product: str) -> dict[tuple[str, int], Kernel]:
    """The kernels of a grouped product, by format and most tokens of a run, with shared memory for three chunks of as many tokens."""
    made = {}
    for name, tokens in (*((name, 64) for name in FORMATS), ("bf16", 128)):
        # Activations, unlike tokens, are two numbers each.
        octs = (8 if name in ("bf16", "w8") else 16) * (2 if product == "grouped_down" else 1)
        made[name, tokens] = Kernel("moe_prefill", f"{product}_{name}_{tokens}", language="cuda", early=True, shared_bytes=3 * tokens * octs * 16)
    return made


_GROUPED_GATE_UP = _grouped("grouped_gate_up")
_GROUPED_DOWN = _grouped("grouped_down")

# Constants of cuda/moe.cuh and moe.cu: tokens of a batch and of a segment, rows of a tile, parts of a router row, warps of kernels.
_BATCH = 64
_COLUMNS = 8
_TILE = 16
_SCORE_PARTS = 4
_SCORE_WARPS = 8
_SELECT_WARPS = 16
_SELECT_BLOCKS = 8
# Rows of the router of a block that scores one token.
_SCORED_ROWS = 2
# Tokens of a block that scores them: few of a batch, so that there are blocks enough, and more of many, which read the router again and again.
_SCORE_TOKENS, _MANY_SCORE_TOKENS = 16, 64
# Most tokens and steps of 32 elements in a row of the router that one cluster routes, its blocks and their warps.
_FEW = 16
_FEW_STEPS = 64
_ROUTE_BLOCKS = 16
_ROUTE_WARPS = 16
# Most scores of a token, in how many places they or the experts of few are; and sizeof(Groups).
_MOST_SCORES, _SCORE_COPIES, _CHOICE_COPIES = 264, 32, 16
_GROUPS_BYTES = 128 + 4 * (_SCORE_COPIES * _MOST_SCORES + _CHOICE_COPIES * FEW_TOKENS * TOP) + MOST_SEGMENTS * 32
_HANDING_THREADS = 128
# How activations are handed on: as float32, or as the terms that tensor cores take, by the down bank's format: its order, and four times its octs.
_AS_FLOATS = 0
_AS_TERMS = {"bf16": 0 + 4, "fp8": 2 + 8, "q4": 1 + 8, "q5": 1 + 8, "q6": 1 + 8, "w8": 2 + 4}
# Most tokens for which the shared expert is fetched while experts are chosen: later it is a small part of all.
_FETCHED_TO = 16

_SELECT_TOGETHER = Kernel("moe", "select_together", language="cuda", early=True, carveout=CARVEOUT, cluster=(_SELECT_BLOCKS, 32 * _SELECT_WARPS))
_ROUTE_FEW = Kernel("moe", "route_few", language="cuda", early=True, carveout=CARVEOUT, cluster=(_ROUTE_BLOCKS, 32 * _ROUTE_WARPS))

# Of cuda/moe_prefill.cu: threads of its kernels, rows of a block of a grouped product.
_SCAN_THREADS = 512
_GATHER_THREADS = 512
_GEMM_THREADS = 256
_REDUCE_THREADS = 256
_BLOCK_ROWS = 256
# sizeof(Runs) without runs, and sizeof(Run)
_RUNS_BYTES, _RUN_BYTES = 16, 16
# Tokens of an expert, on average, above which bf16 runs are of 128 tokens.
_LONG_RUNS_FROM = 64

# What gate and up projections wait for: whether for scores, of how many experts, and a signal's counters.
_AWAITS_NOTHING = (0, 0, 0)

_SCHEDULES = ("auto", "decode", "prefill")
_MOST_TOKENS = 2**20
_MOST_STRIDE = 2**27


@operation
def route(
    x: Any,
    router: Any,
    *,
    shared: bool = True,
    ids: Any = None,
    alpha: Any = None,
    shared_scale: Any = None,
    workspace: Any = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> tuple[Any, Any, Any]:
    """Choose the eight experts of every token, and what each of them counts.

    Parameters
    ----------
    x : bfloat16 (or uint16 for it) array, shape (T, H)
        Tokens. Rows are contiguous within, the stride between them is a free multiple of 8 elements, the address a multiple of 16. H is a
        multiple of 128.
    router : bfloat16 (or uint16) array, shape (E + 1, H), or (E, H) without a shared expert
        One row an expert, 8 … 256 of them; the last row is the gate of the shared expert.
    shared : bool
        Whether there is a shared expert.
    ids : int32 array, shape (T, 8), optional
        Receives the experts with the largest scores, best first; of equal scores the smaller id, and -0 equals +0.
    alpha : float32 array, shape (T, 8), optional
        Receives the softmax over the eight scores.
    shared_scale : float32 array, shape (T,), optional
        Receives the sigmoid of the last score.
    workspace : uint8 array, shape (at least ``route_workspace(T, len(router))``,), optional
        Scratch, contiguous, at a multiple of 16; a new one by default.
    stream : stream, optional
        Where to launch; the current stream of `x`'s library by default.
    signal : Signal, optional
        Counts ``out_of_range`` once a token with a NaN score; its ids are -1, its alpha and scale 0.

    Returns
    -------
    (int32 array, float32 array, float32 array or None)
        ids, alpha and shared scale, given or new.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides, alignment, size or device. Nothing is launched.

    Notes
    -----
    Up to 16 tokens of an H up to 2,048 take one launch on devices that have room for a cluster of 16 blocks, none before compute capability 9.0;
    others take two. No host synchronisation, safe inside a capture when outputs and workspace are given. Scores are float32 sums in an order that
    follows from H alone, so that a token's choice has the same bits whatever is beside it. Where launches overlap (`gpukit.launch.overlapping`) the
    router is read before launches in front have ended: none of those may write it.

    Examples
    --------
    >>> from ml_dtypes import bfloat16
    >>> x, router = np.zeros((1, 128), bfloat16), np.zeros((9, 128), bfloat16)
    >>> x[0, 0], router[:, 0] = 1, [0, 5, 0, 0, 5, 0, 0, 0, 1]
    >>> ids, alpha, _ = route(x, router, shared=False)
    >>> ids, alpha[0, :2].round(3)
    (array([[1, 4, 8, 0, 2, 3, 5, 6]], dtype=int32), array([0.487, 0.487], dtype=float32))
    """
    tokens_of_x = _tokens(x)
    x_at, (tokens, hidden), _, _, device = tokens_of_x
    router_at, shape, _, _, _ = tensor(router, "router", BF16, (2,), device, contiguous=2)
    experts = router_experts(shape[0], shared, "router")
    like_shape(shape, "router", (shape[0], hidden), "the rows of x")
    require_aligned("router", router_at)
    handle = choose(stream, x) if device >= 0 else 0
    counters = signal_pointer(signal, device) if signal is not None and device >= 0 else 0
    ids, ids_at = _result(ids, "ids", (tokens, TOP), "int32", x, device, handle)
    alpha, alpha_at = _result(alpha, "alpha", (tokens, TOP), "float32", x, device, handle)
    shared_at = 0
    if shared:
        shared_scale, shared_at = _result(shared_scale, "shared_scale", (tokens,), "float32", x, device, handle)
    elif shared_scale is not None:
        raise ArgumentError(f"shared_scale: expected None without a shared expert, got {type(shared_scale).__name__}")
    parts_at = _workspace_address(workspace, route_workspace(tokens, shape[0]), device)
    if device < 0:
        return host(_route_on_host, x, router, ids, alpha, shared_scale, signal=signal)  # type: ignore[no-any-return]
    if tokens == 0:
        return nothing((ids, alpha, shared_scale))  # type: ignore[no-any-return]
    if workspace is None:
        workspace, parts_at = allocate("workspace", route_workspace(tokens, shape[0]), "uint8", x, handle)
    routed = _Routed(tokens_of_x, 0, tokens, router_at, experts, shared, (ids_at, alpha_at, TOP, shared_at, 1), 0, counters)
    launches = _routing(routed, parts_at, 0, device, handle)
    return launch_all(launches, device, handle, (ids, alpha, shared_scale), workspace)  # type: ignore[no-any-return]


def route_workspace(tokens: int, rows: int) -> int:
    """Bytes of workspace that `route` needs for so many tokens and rows of the router.

    Examples
    --------
    >>> route_workspace(tokens=4, rows=257)
    16896
    """
    return 4 * _SCORE_PARTS * whole(tokens, "tokens") * _padded(whole(rows, "rows"))


@operation
def gate_up(
    x: Any, ids: Any, weights: MoeWeights, *, out: Any = None, workspace: Any = None, stream: Any = None, signal: Signal | None = None
) -> Any:
    """Apply the gate and up projections of each token's experts: ``silu(gate · x) * (up · x)``.

    Parameters
    ----------
    x : bfloat16 (or uint16) array, shape (T, H)
        As in `route`.
    ids : int32 array, shape (T, 8)
        Experts of each token, contiguous. A token whose ids are not eight different experts is left out, and counted unless all are negative.
    weights : MoeWeights
        Of which the router only says how many experts there are.
    out : float32 array, shape (T, 9, I), or (T, 8, I) without a shared expert, optional
        Receives the activations, in the order of `ids`, those of the shared expert last; contiguous, at a multiple of 16.
    workspace : uint8 array, shape (at least ``workspace_bytes(T, weights, "decode")``,), optional
        Scratch, contiguous, at a multiple of 16; a new one by default.
    stream : stream, optional
        Where to launch; the current stream of `x`'s library by default.
    signal : Signal, optional
        Counts ``out_of_range``, once a token.

    Returns
    -------
    float32 array
        `out`, or a new array of the library of `x`; both hold anything for tokens that are left out.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides, alignment, size or device. Nothing is launched.

    Notes
    -----
    Two launches for every 64 tokens, no host synchronisation, safe inside a capture when `out` and `workspace` are given. Activations have the same
    bits whatever tokens are beside them.

    Examples
    --------
    >>> x = np.full((1, 128), 0x3F80, np.uint16)
    >>> weights = MoeWeights(np.zeros((8, 128), np.uint16), np.full((8 * 256, 128), 0x3F80, np.uint16), np.zeros((8 * 128, 128), np.uint16))
    >>> gate_up(x, np.arange(8, dtype=np.int32)[None], weights)[0, 7, :2]
    array([16384., 16384.], dtype=float32)
    """
    tokens_of_x = _tokens(x)
    _, (tokens, hidden), _, _, device = tokens_of_x
    geometry = geometry_of(weights, device)
    like_shape((tokens, hidden), "x", (tokens, geometry.hidden), "the rows of weights.router")
    ids_at = _given(ids, "ids", (tokens, TOP), "int32", device)
    handle = choose(stream, x) if device >= 0 else 0
    counters = signal_pointer(signal, device) if signal is not None and device >= 0 else 0
    out, out_at = _result(out, "out", (tokens, geometry.paths, geometry.width), "float32", x, device, handle)
    offsets = _layout(tokens, geometry, "decode")
    workspace_at = _workspace_address(workspace, offsets[-1], device)
    if device < 0:
        return host(reference.gate_up, x, ids, weights, out, signal=signal)
    if tokens == 0:
        return nothing(out)
    if workspace is None:
        workspace, workspace_at = allocate("workspace", offsets[-1], "uint8", x, handle)
    scratch = _Scratch(*_addresses(workspace_at, offsets))
    launches: list[Launch] = []
    for first in range(0, tokens, _BATCH):
        some = min(_BATCH, tokens - first)
        launches.append(_grouping(ids_at + 4 * TOP * first, some, geometry, scratch.groups, counters))
        act_at = out_at + 4 * geometry.paths * geometry.width * first
        launches.append(_gate_up(tokens_of_x, first, some, geometry, scratch.groups, act_at, (_AS_FLOATS, _AS_FLOATS), device))
    return launch_all(launches, device, handle, out, workspace)


@operation
def down_add(
    ids: Any,
    alpha: Any,
    shared_scale: Any,
    act: Any,
    weights: MoeWeights,
    dest: Any,
    *,
    workspace: Any = None,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Apply the down projections of each token's experts, and add their weighted sum to what is there.

    Parameters
    ----------
    ids, alpha, shared_scale
        What `route` returns; `shared_scale` is None without a shared expert. A token whose ids are not eight different experts is left out, and
        counted unless all are negative.
    act : float32 array, shape (T, 9, I), or (T, 8, I) without a shared expert
        What `gate_up` returns.
    weights : MoeWeights
        Of which the router only says how many experts there are.
    dest : bfloat16 (or uint16) array, shape (T, H)
        Holds the residual, and receives the sums; the stride between rows is free.
    workspace, stream, signal
        As in `gate_up`.

    Returns
    -------
    bfloat16 (or uint16) array, shape (T, H)
        `dest`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As for `gate_up`.

    Notes
    -----
    Three launches for every 64 tokens, no host synchronisation, safe inside a capture when `workspace` is given. Sums are float32, in the order
    residual, experts by rank, shared expert, and rounded once. Activations are float32; each goes to the tensor cores as two bfloat16 numbers
    that keep 16 bits of it, made by the second launch. In `sparse_moe` those that make the activations make the numbers too.

    Examples
    --------
    >>> from ml_dtypes import bfloat16
    >>> weights = MoeWeights(np.zeros((8, 128), bfloat16), np.zeros((8 * 256, 128), bfloat16), np.ones((8 * 128, 128), bfloat16))
    >>> ids, alpha = np.arange(8, dtype=np.int32)[None], np.full((1, 8), 0.125, np.float32)
    >>> dest = np.ones((1, 128), bfloat16)
    >>> down_add(ids, alpha, None, np.ones((1, 8, 128), np.float32), weights, dest)[0, :2].tolist()
    [129.0, 129.0]
    """
    residual = tensor(dest, "dest", BF16, (2,), written=True)
    _, (tokens, hidden), _, _, device = residual
    geometry = geometry_of(weights, device)
    like_shape((tokens, hidden), "dest", (tokens, geometry.hidden), "the rows of weights.router")
    ids_at = _given(ids, "ids", (tokens, TOP), "int32", device)
    alpha_at = _given(alpha, "alpha", (tokens, TOP), "float32", device)
    shared_at = 0
    if geometry.has_shared:
        shared_at = _given(shared_scale, "shared_scale", (tokens,), "float32", device)
    elif shared_scale is not None:
        raise ArgumentError(f"shared_scale: expected None without a shared expert, got {type(shared_scale).__name__}")
    act_at = _given(act, "act", (tokens, geometry.paths, geometry.width), "float32", device)
    require_aligned("act", act_at)
    counters = signal_pointer(signal, device) if signal is not None and device >= 0 else 0
    offsets = _layout(tokens, geometry, "decode")
    workspace_at = _workspace_address(workspace, offsets[-1], device)
    if device < 0:
        return host(reference.down_add, ids, alpha, shared_scale, act, weights, dest, signal=signal)
    handle = choose(stream, dest)
    if tokens == 0:
        return nothing(dest)
    if workspace is None:
        workspace, workspace_at = allocate("workspace", offsets[-1], "uint8", dest, handle)
    scratch = _Scratch(*_addresses(workspace_at, offsets))
    launches: list[Launch] = []
    for first in range(0, tokens, _BATCH):
        some = min(_BATCH, tokens - first)
        launches.append(_grouping(ids_at + 4 * TOP * first, some, geometry, scratch.groups, counters))
        launches.append(_hand_on(some, geometry, scratch, act_at + 4 * geometry.paths * geometry.width * first))
        at = (scratch.act, alpha_at + 4 * TOP * first, shared_at + 4 * first if shared_at else 0)
        launches.append(_down(residual, first, some, geometry, scratch.groups, *at, device))
    return launch_all(launches, device, handle, dest, workspace)


@operation
def sparse_moe(
    x: Any,
    weights: MoeWeights,
    dest: Any,
    *,
    workspace: Any = None,
    exclusive: bool = False,
    schedule: str = "auto",
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Add the answers of a sparse mixture of experts to what is there.

    Parameters
    ----------
    x : bfloat16 (or uint16) array, shape (T, H)
        Tokens, as in `route`.
    weights : MoeWeights
        Router, experts and shared expert.
    dest : bfloat16 (or uint16) array, shape (T, H)
        Holds the residual, and receives ``dest + Σ_r alpha_r · y_r + sigmoid(score) · y_shared``, apart from `x`; the stride between rows is free,
        for "prefill" a multiple of 8 elements, at an address that is a multiple of 16.
    workspace : uint8 array, shape (at least ``workspace_bytes(T, weights, schedule)``,), optional
        Scratch, contiguous, at a multiple of 16; a new one by default. Nothing in it outlives the call.
    exclusive : bool
        Whether `workspace` is memory that nobody but calls of this op, behind each other, has used or will use while launches overlap
        (`gpukit.launch.overlapping`): made once for a model, not a temporary array, whose memory may be that of another before. Up to four tokens
        then write to it before launches in front have ended. Without overlapping it makes no difference.
    schedule : {"auto", "decode", "prefill"}
        How a GPU does it, for any number of tokens. "auto" is "decode" up to 64 tokens and "prefill" above, whatever the format.
    stream : stream, optional
        Where to launch; the current stream of `x`'s library by default.
    signal : Signal, optional
        Counts ``out_of_range`` once a token with a NaN score, whose row of `dest` stays as it is.

    Returns
    -------
    bfloat16 (or uint16) array, shape (T, H)
        `dest`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides, alignment, size or device, or there is no such schedule. Nothing is launched.

    Notes
    -----
    No host synchronisation, safe inside a capture when `workspace` is given. "decode" takes four launches for every 64 tokens: scores; selection
    and grouping; `gate_up`; `down_add`; the first two are one where they are in `route`. All of them may overlap (`gpukit.launch.overlapping`):
    weights are on their way before launches in front have ended, none of which may write them. In the tuned sizes (H of 2,048 and I of 512,
    capability 9.0) the experts of up to four tokens come up before it is known what is chosen and wait for it, so that no launch has to end in
    between: of one token in three launches, of two to four in two, the second having both projections, where both banks are in bf16, fp8, q6 or w8,
    or one in q4 and one in q5. Its blocks wait for each other's activations, but never for blocks that are not there. A token's result has the same
    bits whatever is beside it, within a schedule.

    "prefill" groups all tokens by expert (select and count, scan, gather), runs two grouped products on tensor cores, and adds each token's rows:
    seven launches, see `prefill_reduce`. As in "decode", activations go to the tensor cores as two bfloat16 numbers that keep 16 bits of them: one
    alone would leave the tolerances of few tokens where a sum is near zero.

    The method is that of Qwen3-Next and its like: softmax over the chosen scores only, a sigmoid gate before the shared expert.

    Examples
    --------
    >>> from ml_dtypes import bfloat16
    >>> rng = np.random.default_rng(0)
    >>> def random(*shape): return (rng.standard_normal(shape) / 8).astype(bfloat16)
    >>> weights = MoeWeights(random(17, 128), random(16 * 256, 128), random(16 * 128, 128), random(256, 128), random(128, 128))
    >>> dest = np.zeros((2, 128), bfloat16)
    >>> sparse_moe(random(2, 128), weights, dest) is dest, bool(dest.any())
    (True, True)
    """
    tokens_of_x = _tokens(x)
    _, (tokens, hidden), _, _, device = tokens_of_x
    geometry = geometry_of(weights, device)
    like_shape((tokens, hidden), "x", (tokens, geometry.hidden), "the rows of weights.router")
    residual = tensor(dest, "dest", BF16, (2,), device, written=True)
    like_shape(residual[1], "dest", (tokens, hidden), "x")
    refuse_overlap("dest", residual, "x", tokens_of_x)
    schedule = _schedule(schedule, tokens)
    if schedule == "prefill":
        require_aligned("dest", residual[0])
        if tokens > 1 and residual[2][0] % 8:
            raise ArgumentError(f"dest: expected rows at a stride that is a multiple of 8 elements for prefill, got {residual[2][0]}")
    if exclusive and workspace is None:
        raise ArgumentError("exclusive: expected False without a workspace, got True")
    offsets = _layout(tokens, geometry, schedule)
    workspace_at = _workspace_address(workspace, offsets[-1], device)
    if device < 0:
        return host(reference.sparse_moe, x, weights, dest, signal=signal)
    handle = choose(stream, x)
    counters = signal_pointer(signal, device) if signal is not None else 0
    if tokens == 0:
        return nothing(dest)
    if workspace is None:
        workspace, workspace_at = allocate("workspace", offsets[-1], "uint8", x, handle)
    call = (tokens_of_x, residual, geometry, _addresses(workspace_at, offsets), counters, device, handle)
    launches = _decode(*call, bool(exclusive)) if schedule == "decode" else _prefill(*call)
    return launch_all(launches, device, handle, dest, workspace)


@operation
def prefill_reduce(grouped: Any, packed_index: Any, alpha: Any, out: Any, *, stream: Any = None, signal: Signal | None = None) -> Any:
    """Add to every token the weighted sum of its rows: the last step of "prefill".

    Parameters
    ----------
    grouped : bfloat16 (or uint16) or float32 array, shape (P, H)
        Rows grouped by expert, contiguous, at a multiple of 16. H is a multiple of 8.
    packed_index : int32 array, shape (T, N)
        Which rows a token has. A token with a negative index is padding, and one with an index past P is counted as ``out_of_range``: their rows
        of `out` stay as they are.
    alpha : float32 array, shape (T, N)
        What the rows are multiplied by.
    out : bfloat16 (or uint16) array, shape (T, H)
        Holds the residual, and receives the sums; at a multiple of 16, the stride between rows is a free multiple of 8.
    stream : stream, optional
        Where to launch; the current stream of `grouped`'s library by default.
    signal : Signal, optional
        Counts ``out_of_range``, once a token.

    Returns
    -------
    bfloat16 (or uint16) array, shape (T, H)
        `out`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides, alignment or device, or `out` overlaps `grouped`. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture. Sums are float32, in the order residual, then the indices as they stand, and
    rounded once.

    Examples
    --------
    >>> from ml_dtypes import bfloat16
    >>> grouped, out = np.arange(24, dtype=np.float32).reshape(3, 8), np.ones((1, 8), bfloat16)
    >>> prefill_reduce(grouped, np.array([[2, 0]], np.int32), np.array([[1, 0.5]], np.float32), out)[0, :3].tolist()
    [17.0, 18.5, 20.0]
    """
    rows = tensor(grouped, "grouped", NUMBERS, (2,), contiguous=2)
    grouped_at, (places, hidden), _, dtype, device = rows
    if hidden % 8:
        raise ArgumentError(f"grouped: expected rows of a multiple of 8 elements, got shape {(places, hidden)}")
    packed_at, shape, _, _, _ = tensor(packed_index, "packed_index", ("int32",), (2,), device, contiguous=2)
    alpha_at = _given(alpha, "alpha", shape, "float32", device)
    sums = tensor(out, "out", BF16, (2,), device, written=True)
    out_at, out_shape, (out_row, _), _, _ = sums
    tokens, paths = shape
    like_shape(out_shape, "out", (tokens, hidden), "packed_index and grouped")
    refuse_overlap("out", sums, "grouped", rows)
    require_aligned("grouped", grouped_at)
    require_aligned("out", out_at)
    if tokens > 1 and out_row % 8:
        raise ArgumentError(f"out: expected rows at a stride that is a multiple of 8 elements, got {out_row}")
    if device < 0:
        return host(reference.prefill_reduce, grouped, packed_index, alpha, out, signal=signal)
    counters = signal_pointer(signal, device) if signal is not None else 0
    handle = choose(stream, grouped)
    if tokens == 0 or hidden == 0:
        return nothing(out)
    arguments = (grouped_at, ITEMSIZE[dtype], places, hidden // 8, packed_at, alpha_at, paths, out_at, out_row, counters)
    return _REDUCE.launch((), device, handle, tokens, _REDUCE_THREADS, arguments, out)


def workspace_bytes(tokens: int, weights: MoeWeights, schedule: str = "auto") -> int:
    """Bytes of workspace that `sparse_moe` needs.

    Parameters
    ----------
    tokens : int
        T. With "auto" a workspace for the most tokens there will be need not do for fewer: ask for both schedules.
    weights : MoeWeights
        What is to be called with; only sizes are looked at.
    schedule : {"auto", "decode", "prefill"}
        As in `sparse_moe`.

    Returns
    -------
    int
        Bytes.

    Examples
    --------
    >>> weights = MoeWeights(np.zeros((8, 128), np.uint16), np.zeros((8 * 256, 128), np.uint16), np.zeros((8 * 128, 128), np.uint16))
    >>> workspace_bytes(1, weights) < workspace_bytes(64, weights)
    True
    """
    return _layout(whole(tokens, "tokens", 0, _MOST_TOKENS), geometry_of(weights), _schedule(schedule, tokens))[-1]


def _schedule(schedule: Any, tokens: int) -> str:
    if schedule not in _SCHEDULES:
        raise ArgumentError(f"schedule: expected one of {', '.join(_SCHEDULES)}, got {schedule!r}")
    if schedule == "auto":
        return "decode" if tokens <= _BATCH else "prefill"
    return str(schedule)


def _padded(rows: int) -> int:
    """Floats between two tokens' scores: whole accesses of a lane."""
    return -(-rows // 8) * 8


def _offsets(*sizes: int) -> tuple[int, ...]:
    """Where parts of a workspace begin, at multiples of 16, and where the last one ends."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // 16) * 16)
    return tuple(offsets)


def _layout(tokens: int, geometry: Geometry, schedule: str) -> tuple[int, ...]:
    """Offsets of the parts of a workspace, and its size."""
    rows = geometry.experts + geometry.has_shared
    if schedule == "prefill":
        batches, places = blocks_for(tokens, _BATCH), geometry.paths * tokens
        most = _most_runs(tokens, geometry)
        # Nothing is ever where decode batches have words that are waited for.
        return _offsets(
            _GROUPS_BYTES,
            route_workspace(tokens, rows), 4 * TOP * tokens, 4 * places, 8 * batches * geometry.experts, 4 * batches * geometry.experts,
            4 * geometry.experts, _RUNS_BYTES + _RUN_BYTES * most, 4 * places, 4 * places, 4 * places * geometry.width, 4 * places * geometry.hidden,
        )  # fmt: skip
    some = min(tokens, _BATCH)
    choice = (route_workspace(some, rows), 4 * TOP * some, 4 * TOP * some, 4 * some)
    return _offsets(_GROUPS_BYTES, *choice, 4 * some * geometry.paths * geometry.width)


def _addresses(workspace_at: int, offsets: tuple[int, ...]) -> list[int]:
    """Where the parts of a workspace begin."""
    return [workspace_at + offset for offset in offsets[:-1]]


class _Scratch(NamedTuple):
    """Addresses of the parts of a workspace for "decode"."""

    groups: int
    parts: int  # of scores
    ids: int
    alpha: int
    shared_scale: int
    act: int  # as terms


def _tokens(x: Any) -> Tensor:
    """The tokens: contiguous rows of whole units, at a stride of whole accesses."""
    found = tensor(x, "x", BF16, (2,))
    address, (tokens, hidden), (row, _), _, _ = found
    if hidden == 0 or hidden % 128 or hidden >= _MOST_STRIDE:
        raise ArgumentError(f"x: expected rows of a multiple of 128 elements, less than {_MOST_STRIDE}, got shape {(tokens, hidden)}")
    if tokens > _MOST_TOKENS:
        raise ArgumentError(f"x: expected at most {_MOST_TOKENS} tokens, got {tokens}")
    if tokens > 1 and (row % 8 or abs(row) >= _MOST_STRIDE):
        raise ArgumentError(f"x: expected rows at a stride that is a multiple of 8 elements and less than {_MOST_STRIDE}, got {row}")
    require_aligned("x", address)
    return found


def _given(array: Any, name: str, shape: tuple[int, ...], dtype: str, device: int, *, written: bool = False) -> int:
    """Address of a contiguous array of known shape."""
    address, found, _, _, _ = tensor(array, name, (dtype,), (len(shape),), device, contiguous=len(shape), written=written)
    if found != shape:
        raise ArgumentError(f"{name}: expected shape {shape}, got {found}")
    return address


def _result(array: Any, name: str, shape: tuple[int, ...], dtype: str, like: Any, device: int, stream: int) -> tuple[Any, int]:
    """The given output after a check, or a new one, and its address."""
    if array is not None:
        address = _given(array, name, shape, dtype, device, written=True)
        require_aligned(name, address)
        return array, address
    if device < 0:
        return arrays.empty(shape, dtype, like), 0
    return allocate(name, shape, dtype, like, stream)


def _workspace_address(workspace: Any, needed: int, device: int) -> int:
    """Address of a given workspace, 0 without one."""
    if workspace is None:
        return 0
    address, size, _, _ = arrays.output(workspace, "workspace", ("uint8",), device)
    if size < needed:
        raise ArgumentError(f"workspace: expected at least {needed} bytes, got {size}")
    require_aligned("workspace", address)
    return address


def _route_on_host(x: Any, router: Any, ids: Any, alpha: Any, shared_scale: Any, *, signal: Signal | None) -> tuple[Any, Any, Any]:
    reference.route(x, router, ids, alpha, shared_scale, signal=signal)
    return ids, alpha, shared_scale


def _row(x: Tensor) -> int:
    """Stride of the tokens."""
    return x[2][0] if x[1][0] > 1 else x[1][1]


def _token_at(x: Tensor, first: int) -> int:
    """Address of a token."""
    return x[0] + 2 * first * _row(x)


def _are_routed_together(tokens: int, hidden: int, device: int, stream: int) -> bool:
    """Whether one cluster routes so many tokens."""
    return tokens <= _FEW and hidden // 32 <= _FEW_STEPS and _ROUTE_FEW.has_room(device, stream)


class _Routed(NamedTuple):
    """So many tokens of x, from one on, and their router; where ids, alpha, its stride, shared scale and its stride go, and groups, or 0."""

    x: Tensor
    first: int
    tokens: int
    router_at: int
    experts: int
    has_shared: bool
    outputs: tuple[int, int, int, int, int]
    groups_at: int
    counters: int

    @property
    def of_tokens(self) -> tuple[int, int, int, int]:
        """Where the tokens are, and how far apart, in accesses; the router, and its steps."""
        return _token_at(self.x, self.first), _row(self.x) // 8, self.router_at, self.x[1][1] // 32

    @property
    def of_choice(self) -> tuple[int, ...]:
        """What is chosen from, and where that goes."""
        return self.experts, int(self.has_shared), self.tokens, *self.outputs, self.groups_at


def _routing_of_few(routed: _Routed, words: tuple[int, int, int, int] = (0, 0, 0, 0)) -> Launch:
    """Scores and selection in one launch.

    `words`: whether it says what is chosen as soon as it knows, for a launch that waits for that; whether these words are this call's alone before
    the launch in front has ended; and activations that are taken back for the same launch, their address and so many accesses.
    """
    return _ROUTE_FEW, _ROUTE_BLOCKS, 32 * _ROUTE_WARPS, (*routed.of_tokens, *routed.of_choice, routed.counters, *words)


def _routing(routed: _Routed, parts_at: int, owners_at: int, device: int, stream: int) -> list[Launch]:
    """Scores and selection, in one launch for few tokens."""
    tokens = routed.tokens
    if not owners_at and _are_routed_together(tokens, routed.x[1][1], device, stream):
        return [_routing_of_few(routed)]
    rows = routed.experts + routed.has_shared
    tiles, padded = blocks_for(rows, _TILE), _padded(rows)
    block_tokens = _SCORE_TOKENS if tokens <= _BATCH else _MANY_SCORE_TOKENS
    scored = (*routed.of_tokens, rows, tokens, block_tokens, parts_at, padded, tiles)
    selected = (parts_at, padded, *routed.of_choice, owners_at, routed.counters)
    is_together = tokens > _SELECT_WARPS and _SELECT_TOGETHER.has_room(device, stream)
    select, blocks = (_SELECT_TOGETHER, _SELECT_BLOCKS) if is_together else (_SELECT, 1)
    return [
        (_SCORES, tiles * _SCORE_PARTS * blocks_for(tokens, block_tokens), 32 * _SCORE_WARPS, scored),
        (select, blocks * blocks_for(tokens, _BATCH), 32 * _SELECT_WARPS, selected),
    ]


def _grouping(ids_at: int, tokens: int, geometry: Geometry, groups_at: int, counters: int) -> Launch:
    """A check of given ids, and the batch grouped by expert."""
    arguments = (0, 0, geometry.experts, int(geometry.has_shared), tokens, ids_at, 0, 0, 0, 0, groups_at, 0, counters)
    return _SELECT, 1, 32 * _SELECT_WARPS, arguments


def _fetched(tokens: int, geometry: Geometry) -> tuple[int, int, int]:
    """What of the shared expert comes to the L2 while experts are chosen: bytes of its gate and up rows, and its down rows and their bytes."""
    return (geometry.shared_gate_up_bytes, geometry.shared_down[0], geometry.shared_down_bytes) if tokens <= _FETCHED_TO else (0, 0, 0)


def _terms(geometry: Geometry) -> tuple[int, int]:
    """What activations of routed experts and of the shared one are as terms."""
    return _AS_TERMS[geometry.down_format], _AS_TERMS["w8" if geometry.is_down_other else geometry.down_format]


def _most_segments(tokens: int, geometry: Geometry) -> int:
    """As many segments as there can be: tokens of different experts, or full ones."""
    return min(TOP * tokens, geometry.experts + tokens) + geometry.has_shared * blocks_for(tokens, _COLUMNS)


def _gate_up(
    x: Tensor,
    first: int,
    tokens: int,
    geometry: Geometry,
    groups_at: int,
    act_at: int,
    handing: tuple[int, int],
    device: int,
    *,
    awaited: tuple[int, int, int] = _AWAITS_NOTHING,
) -> Launch:
    found = gate_up_for(geometry.gate_up_format, tokens, geometry.hidden, device)
    tiles = geometry.width // (8 * found.tiles)
    blocks = min(_most_segments(tokens, geometry) * tiles, found.blocks * devices.properties(device).multiprocessors)
    arguments = (
        *geometry.gate_up, *geometry.shared_gate_up, int(geometry.is_gate_up_other), _token_at(x, first), _row(x) // 8,
        geometry.hidden, geometry.width, groups_at, act_at, geometry.paths, *handing, tiles, inverse(tiles), *_fetched(tokens, geometry),
        *awaited,
    )  # fmt: skip
    return found.kernel, blocks, 32 * found.warps, arguments


def _hand_on(tokens: int, geometry: Geometry, scratch: _Scratch, act_at: int) -> Launch:
    octs = geometry.width // 8
    arguments = (act_at, tokens, geometry.paths, octs, *_terms(geometry), scratch.groups, scratch.act)
    return _HAND_ON, blocks_for(tokens * geometry.paths * octs, _HANDING_THREADS), _HANDING_THREADS, arguments


def _down(
    dest: Tensor,
    first: int,
    tokens: int,
    geometry: Geometry,
    groups_at: int,
    act_at: int,
    alpha_at: int,
    shared_at: int,
    device: int,
    *,
    are_groups_ready: bool = False,
    awaited: tuple[int, int] = (0, 0),
) -> Launch:
    row = dest[2][0]
    arguments = (
        *geometry.down, *geometry.shared_down, int(geometry.is_down_other), act_at, geometry.paths, geometry.hidden, geometry.width, groups_at,
        alpha_at, shared_at, dest[0] + 2 * first * row, row, tokens, int(are_groups_ready), *awaited,
    )  # fmt: skip
    found = down_for(geometry.down_format, tokens, geometry.width, device)
    return found.kernel, geometry.hidden // _TILE, 32 * found.warps, arguments


def _decode(x: Tensor, dest: Tensor, geometry: Geometry, parts: list[int], counters: int, device: int, stream: int, is_early: bool) -> list[Launch]:
    """Routing and one or two launches for every batch, one behind the other in the same workspace."""
    tokens = x[1][0]
    scratch = _Scratch(*parts)
    shared_at = scratch.shared_scale if geometry.has_shared else 0
    outputs = (scratch.ids, scratch.alpha, TOP, shared_at, 1)
    launches: list[Launch] = []
    experts = geometry.experts
    for first in range(0, tokens, _BATCH):
        some = min(_BATCH, tokens - first)
        routed = _Routed(x, first, some, geometry.router, experts, geometry.has_shared, outputs, scratch.groups, counters)
        together = experts_few_for(geometry.gate_up_format, geometry.down_format, some, geometry.hidden, geometry.width, device)
        if together and _are_routed_together(some, geometry.hidden, device, stream):
            words = (1, int(is_early), scratch.act, some * geometry.paths * geometry.width // 4)
            launches.append(_routing_of_few(routed, words))
            launches.append(_experts_few(together, x, dest, first, some, geometry, scratch, shared_at, device))
            continue
        awaited = _AWAITS_NOTHING
        gate_up, down = (
            gate_up_for(geometry.gate_up_format, some, geometry.hidden, device), down_for(geometry.down_format, some, geometry.width, device)
        )  # fmt: skip
        if gate_up.can_wait and down.can_wait:
            launches.append(_scores_of_one(x, first, geometry, scratch.groups, is_early))
            awaited = (1, experts, counters)
        else:
            launches += _routing(routed, scratch.parts, 0, device, stream)
        launches.append(_gate_up(x, first, some, geometry, scratch.groups, scratch.act, _terms(geometry), device, awaited=awaited))
        at = (scratch.act, scratch.alpha, shared_at)
        launches.append(_down(dest, first, some, geometry, scratch.groups, *at, device, are_groups_ready=True, awaited=awaited[:2]))
    return launches


def _experts_few(
    few: ExpertsFew, x: Tensor, dest: Tensor, first: int, tokens: int, geometry: Geometry, scratch: _Scratch, shared_at: int, device: int
) -> Launch:
    """Both projections, and their sum, in one launch: a tile of rows a block, and a block for every multiprocessor."""
    row = dest[2][0]
    arguments = (
        *geometry.gate_up, *geometry.shared_gate_up, int(geometry.is_gate_up_other), *geometry.down, *geometry.shared_down,
        int(geometry.is_down_other), _token_at(x, first), _row(x) // 8, tokens, geometry.paths, scratch.groups, scratch.act, *_terms(geometry),
        *_fetched(tokens, geometry), scratch.alpha, shared_at, dest[0] + 2 * first * row, row,
        *((experts_few_maps(geometry, device),) if few.has_maps else ()),
    )  # fmt: skip
    blocks = max(geometry.hidden // _TILE, devices.properties(device).multiprocessors)
    return few.kernel, blocks, 32 * few.warps, arguments


def _scores_of_one(x: Tensor, first: int, geometry: Geometry, groups_at: int, is_early: bool) -> Launch:
    """Scores of one token, which the two launches behind choose from."""
    rows = geometry.experts + geometry.has_shared
    arguments = (_token_at(x, first), geometry.router, rows, int(is_early), groups_at)
    return scores_one_for(geometry.down_format), _padded(rows) // _SCORED_ROWS, 32 * (_SCORE_WARPS + 1), arguments


def _run_tokens(tokens: int, geometry: Geometry) -> int:
    """Most tokens of a run in the grouped products."""
    is_bf16 = geometry.gate_up_format == geometry.down_format == "bf16"
    return 128 if is_bf16 and TOP * tokens > _LONG_RUNS_FROM * geometry.experts else 64


def _most_runs(tokens: int, geometry: Geometry) -> int:
    """As many runs as there can be: full ones, and one more for each expert."""
    length = _run_tokens(tokens, geometry)
    return min(TOP * tokens, geometry.experts + TOP * tokens // length) + geometry.has_shared * blocks_for(tokens, length)


def _prefill(x: Tensor, dest: Tensor, geometry: Geometry, parts: list[int], counters: int, device: int, stream: int) -> list[Launch]:
    """Scores, selection and count, scan, gather, two grouped products, and the sum of each token's rows."""
    tokens, paths, experts = x[1][0], geometry.paths, geometry.experts
    _, parts_at, ids_at, alpha_at, owners_at, before_at, firsts_at, runs_at, packed_at, token_of_at, act_at, grouped_at = parts
    outputs = (ids_at, alpha_at, paths, alpha_at + 4 * TOP if geometry.has_shared else 0, paths)
    routed = _Routed(x, 0, tokens, geometry.router, experts, geometry.has_shared, outputs, 0, counters)
    launches = _routing(routed, parts_at, owners_at, device, stream)
    batches, length, most = blocks_for(tokens, _BATCH), _run_tokens(tokens, geometry), _most_runs(tokens, geometry)
    scanned = (owners_at, batches, experts, tokens, int(geometry.has_shared), length, before_at, firsts_at, runs_at)
    launches.append((_SCAN, 1, _SCAN_THREADS, scanned))
    gathered = (ids_at, owners_at, before_at, firsts_at, experts, tokens, paths, packed_at, token_of_at)
    launches.append((_GATHER, batches, _GATHER_THREADS, gathered))
    row_blocks = geometry.width // (_BLOCK_ROWS // 2)
    arguments = (
        *geometry.gate_up, *geometry.shared_gate_up, int(geometry.is_gate_up_other), x[0], _row(x) // 8, token_of_at, geometry.hidden,
        2 * geometry.width, runs_at, act_at, 2 * geometry.width, row_blocks,
    )  # fmt: skip
    launches.append((_GROUPED_GATE_UP[geometry.gate_up_format, length], most * row_blocks, _GEMM_THREADS, arguments))
    row_blocks = blocks_for(geometry.hidden, _BLOCK_ROWS)
    arguments = (
        *geometry.down, *geometry.shared_down, int(geometry.is_down_other), act_at, 2 * geometry.width // 8, 0, geometry.width,
        geometry.hidden, runs_at, grouped_at, geometry.hidden, row_blocks,
    )  # fmt: skip
    launches.append((_GROUPED_DOWN[geometry.down_format, length], most * row_blocks, _GEMM_THREADS, arguments))
    reduced = (grouped_at, 4, paths * tokens, geometry.hidden // 8, packed_at, alpha_at, paths, dest[0], dest[2][0], 0)
    launches.append((_REDUCE, tokens, _REDUCE_THREADS, reduced))
    return launches
