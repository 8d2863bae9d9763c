"""Projections of a decode step: few tokens times a weight that is read once, and the embedding rows that the first layer starts from.

Up to 64 tokens share one reading of the weight. A token's result has the same bits whatever tokens are beside it, and however many: a step that
decodes one token of a sequence and a step that verifies several compute the same, which is what makes them comparable.
"""

from __future__ import annotations

from typing import Any

from gpukit import arrays
from gpukit.arrays import ITEMSIZE, vector
from gpukit.errors import ArgumentError, Signal
from gpukit.kernels._plans import allocate, blocks_for, signal_pointer
from gpukit.kernels._tensors import BF16, NUMBERS, Tensor, like_shape, multiple_of, refuse_overlap, require_aligned, tensor
from gpukit.kernels.reference import linear as reference
from gpukit.launch import IDS, Kernel, host, nothing, operation
from gpukit.streams import choose

__all__ = ["embed", "linear"]

_LINEAR = {tokens: Kernel("linear", f"linear_{tokens}", language="cuda", early=True) for tokens in (8, 16, 32, 64)}
_EMBED = Kernel("linear", "embed", language="cuda", early=True)

# MOST_WARPS, STEP and EMBED_THREADS of cuda/linear.cu, and the weight rows of a warp of each kernel.
_MOST_WARPS = 16
_STEP = 32
_EMBED_THREADS = 128
_ROWS = {8: 16, 16: 16, 32: 16, 64: 32}
# Weights of fewer rows are cut into twice as many slices: their few blocks must keep as many bytes on the way. The slices of a weight follow from
# its shape alone, or results would depend on the batch.
_FEW_ROWS = 4096
# Eight rows, of tokens or of the weight, lie less than 2^31 bytes apart.
_MOST_STRIDE = 2**27
_MOST_BLOCKS = 2**31 - 1


@operation
def linear(x: Any, weight: Any, *, out: Any = None, residual: Any = None, stream: Any = None, signal: Signal | None = None) -> Any:
    """Multiply tokens by a weight: ``x @ weight.T + residual``.

    Parameters
    ----------
    x : bfloat16 (or uint16 for it) array, shape (tokens, inputs)
        Rows are contiguous within, the stride between them is a free multiple of 8 elements, the address a multiple of 16. `inputs` is a multiple
        of 32.
    weight : bfloat16 (or uint16) array, shape (outputs, inputs)
        Contiguous, at an address that is a multiple of 16. Any number of outputs.
    out : bfloat16 (or uint16) or float32 array, shape (tokens, outputs), optional
        Receives the products; rows are contiguous within, the stride between them is free.
    residual : bfloat16 (or uint16) array, shape of `out`, optional
        Added before the only rounding; strides as for `out`. It may be `out` itself, but no other view that overlaps it.
    stream : stream, optional
        Where to launch; the current stream of `x`'s library by default.
    signal : Signal, optional
        For uniformity with the other ops; there is nothing to count.

    Returns
    -------
    bfloat16 (or uint16) or float32 array, shape (tokens, outputs)
        `out`, or a new array of the library and dtype of `x`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides, alignment or device, or `out` overlaps an input. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` is given. Products of bfloat16 are summed in float32 by the tensor cores,
    in slices of a row whose sums are added in a fixed order; both follow from the shape of `weight` alone. The weight is read once for every 64
    tokens. Method: tokens as the rows of tensor-core tiles and weight rows as their columns, split along the inputs within a block.

    Examples
    --------
    >>> from ml_dtypes import bfloat16
    >>> x, weight = np.ones((2, 32), bfloat16), np.ones((3, 32), bfloat16)
    >>> x[1] = 0.25
    >>> linear(x, weight).astype(np.float32)
    array([[32., 32., 32.],
           [ 8.,  8.,  8.]], dtype=float32)
    """
    tokens_of_x = tensor(x, "x", BF16, (2,))
    x_at, (tokens, inputs), x_strides, dtype, device = tokens_of_x
    rows_of_weight = tensor(weight, "weight", BF16, (2,), device, contiguous=2)
    weight_at, (outputs, weight_inputs), _, _, _ = rows_of_weight
    if inputs == 0 or inputs % _STEP or inputs >= _MOST_STRIDE:
        raise ArgumentError(f"x: expected rows of a multiple of {_STEP} elements, less than {_MOST_STRIDE}, got shape {(tokens, inputs)}")
    if weight_inputs != inputs:
        raise ArgumentError(f"weight: expected shape (outputs, {inputs}), the inputs of x, got {(outputs, weight_inputs)}")
    shape = (tokens, outputs)
    result: Tensor | None = None
    if out is not None:
        result = tensor(out, "out", NUMBERS, (2,), device, written=True)
        like_shape(result[1], "out", shape, "x and weight")
        refuse_overlap("out", result, "x", tokens_of_x)
        refuse_overlap("out", result, "weight", rows_of_weight)
    residual_at = residual_row = 0
    if residual is not None:
        added = tensor(residual, "residual", BF16, (2,), device)
        residual_at, residual_shape, (residual_row, _), _, _ = added
        like_shape(residual_shape, "residual", shape, "x and weight")
        if result is not None and (added[:3] != result[:3] or result[3] == "float32"):
            refuse_overlap("out", result, "residual", added)
    x_row = x_strides[0] if tokens > 1 else inputs
    if tokens and outputs:
        _require_accesses(x_at, x_row, weight_at)
    if device < 0:
        out = arrays.empty(shape, dtype, x) if out is None else out
        return host(reference.linear, x, weight, out, residual)
    if signal is not None:
        signal_pointer(signal, device)
    handle = choose(stream, x)
    if result is None:
        out, out_at = allocate("out", shape, dtype, x, handle)
        out_row, out_type = outputs, dtype
    else:
        out_at, _, (out_row, _), out_type, _ = result
    if tokens == 0 or outputs == 0:
        return nothing(out)
    width = min((size for size in _LINEAR if size >= tokens), default=64)
    slice_shift = 4 if outputs < _FEW_ROWS else 3
    # Groups of rows share a block, and so what they read of the tokens, once that is much beside the weight.
    groups = 1 if tokens <= 2 else _MOST_WARPS >> slice_shift
    token_blocks = blocks_for(tokens, width)
    blocks = blocks_for(outputs, groups * _ROWS[width]) * token_blocks
    if blocks > _MOST_BLOCKS:
        raise ArgumentError(f"x: expected at most {_MOST_BLOCKS} blocks of 64 tokens and {_ROWS[64]} outputs, got {tokens} tokens")
    arguments = (
        x_at, x_row // 8, weight_at, inputs // _STEP, outputs, tokens, out_at, out_row, ITEMSIZE[out_type], residual_at, residual_row,
        slice_shift, token_blocks,
    )  # fmt: skip
    return _LINEAR[width].launch((), device, handle, blocks, 32 * groups << slice_shift, arguments, out)


def _require_accesses(x_at: int, x_row: int, weight_at: int) -> None:
    """Refuse addresses and rows that accesses of 16 bytes cannot begin at."""
    require_aligned("x", x_at)
    require_aligned("weight", weight_at)
    if x_row % 8 or abs(x_row) >= _MOST_STRIDE:
        raise ArgumentError(f"x: expected rows at a stride that is a multiple of 8 elements and less than {_MOST_STRIDE}, got {x_row}")


@operation
def embed(ids: Any, table: Any, *, out: Any = None, stream: Any = None, signal: Signal | None = None) -> Any:
    """Gather rows of an embedding table.

    Parameters
    ----------
    ids : int32 or int64 array, shape (tokens,)
        Rows wanted. A negative one is padding and gives zeros; one past the table gives zeros and is counted as ``out_of_range``.
    table : bfloat16 (or uint16 for it) array, shape (vocabulary, width)
        Rows are contiguous within, the stride between them is free.
    out : bfloat16 (or uint16) array, shape (tokens, width), optional
        Receives the rows; strides as for `table`.
    stream : stream, optional
        Where to launch; the current stream of `ids`' library by default.
    signal : Signal, optional
        Counts ``out_of_range``, once an id.

    Returns
    -------
    bfloat16 (or uint16) array, shape (tokens, width)
        `out`, or a new array of the library of `ids` and the dtype of `table`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides or device, or `out` overlaps `table`. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` is given. Rows whose width, strides and addresses are multiples of 8
    elements are copied in accesses of 16 bytes.

    Examples
    --------
    >>> table = np.arange(6, dtype=np.uint16).reshape(3, 2)
    >>> embed(np.array([2, -1, 0]), table)
    array([[4, 5],
           [0, 0],
           [0, 1]], dtype=uint16)
    """
    ids_at, tokens, id_type, device = vector(ids, "ids", IDS)
    device = max(device, arrays.HOST)
    rows = tensor(table, "table", BF16, (2,), device)
    table_at, (vocabulary, width), (table_row, _), dtype, _ = rows
    shape = (tokens, width)
    result: Tensor | None = None
    if out is not None:
        result = tensor(out, "out", BF16, (2,), device, written=True)
        like_shape(result[1], "out", shape, "ids and table")
        refuse_overlap("out", result, "table", rows)
        refuse_overlap("out", result, "ids", (ids_at, (tokens,), (1,), id_type, device))
    if device < 0:
        out = arrays.empty(shape, dtype, table) if out is None else out
        return host(reference.embed, ids, table, out, signal=signal)
    counters = signal_pointer(signal, device) if signal is not None else 0
    handle = choose(stream, ids)
    if result is None:
        out, out_at = allocate("out", shape, dtype, ids, handle)
        out_row = width
    else:
        out_at, _, (out_row, _), _, _ = result
    if tokens == 0 or width == 0:
        return nothing(out)
    in_vectors = multiple_of(16, table_at, out_at) and multiple_of(8, width, table_row, out_row)
    unit = 8 if in_vectors else 1
    words = width // unit
    chunks = blocks_for(words, _EMBED_THREADS)
    if tokens * chunks > _MOST_BLOCKS:
        raise ArgumentError(f"ids: expected at most {_MOST_BLOCKS // chunks} ids of rows that wide, got {tokens}")
    arguments = (
        ids_at, ITEMSIZE[id_type], table_at, table_row // unit, vocabulary, out_at, out_row // unit, words, chunks, 2 * unit, counters,
    )  # fmt: skip
    return _EMBED.launch((), device, handle, tokens * chunks, _EMBED_THREADS, arguments, out)
