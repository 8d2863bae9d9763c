"""Root-mean-square norms of bfloat16 rows: the plain one in front of a layer, and the gated one behind a gated delta rule.

Both compute in float32 and round once. Neither adds a residual: that belongs to the projection in front of it.
"""

from __future__ import annotations

from typing import Any

from gpukit import arrays
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels._plans import allocate, blocks_for, signal_pointer
from gpukit.kernels._tensors import BF16, like_shape, multiple_of, tensor
from gpukit.kernels.reference import norm as reference
from gpukit.launch import Kernel, host, nothing, operation
from gpukit.streams import choose

__all__ = ["gated_rms_norm", "rms_norm"]

_RMS_NORM = Kernel("norm", "rms_norm", language="cuda", doubles=(15,), early=True)

# MOST_THREADS and STEPS of cuda/norm.cu; elements of one access of 16 bytes.
_MOST_THREADS = 512
_STEPS = 2
_VECTOR = 8
# Short rows share blocks of this size: enough blocks for a decode batch to spread over a device.
_THREADS = 128
_MOST_ROWS = 2**31 - 1


@operation
def rms_norm(
    x: Any, weight: Any, *, out: Any = None, epsilon: float = 1e-6, offset: bool = False, stream: Any = None, signal: Signal | None = None
) -> Any:
    """Scale every row to unit mean square, then by a weight: ``x / sqrt(mean(x²) + epsilon) * weight``.

    Parameters
    ----------
    x : bfloat16 (or uint16 for it) array, shape (rows, width) or (batch, heads, width)
        Rows are contiguous within, the strides between them are free.
    weight : bfloat16 (or uint16) array, shape (width,)
        Contiguous.
    out : bfloat16 (or uint16) array, shape of `x`, optional
        Receives the result; strides as for `x`. It may be `x` itself, but not another overlapping view.
    epsilon : float
        Added to the mean square; not negative.
    offset : bool
        Scale by ``1 + weight`` instead, as models do that keep their weights around zero.
    stream : stream, optional
        Where to launch; the current stream of `x`'s library by default.
    signal : Signal, optional
        For uniformity with the other ops; there is nothing to count.

    Returns
    -------
    bfloat16 (or uint16) array, shape of `x`
        `out`, or a new array of the library and dtype of `x`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides or device, or `epsilon` is negative. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` is given. float32 inside, rounded once at the end. Rows of up to 8,192
    elements whose widths, strides and addresses are multiples of 8 elements are read once, in accesses of 16 bytes; others element by element,
    twice. The result of a row does not depend on the rows beside it. Method: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Examples
    --------
    >>> from ml_dtypes import bfloat16
    >>> x = np.array([[3, 4], [0, 2]], bfloat16)
    >>> rms_norm(x, np.array([1, 2], bfloat16), epsilon=0.0).astype(np.float32)
    array([[0.84765625, 2.265625  ],
           [0.        , 2.828125  ]], dtype=float32)
    """
    return _launch(x, None, weight, out, epsilon, offset, stream, signal)


@operation
def gated_rms_norm(
    x: Any, gate: Any, weight: Any, *, out: Any = None, epsilon: float = 1e-6, offset: bool = False, stream: Any = None, signal: Signal | None = None
) -> Any:
    """The norm of every row times the SiLU of its gate: ``rms_norm(x) * weight * silu(gate)``.

    Parameters
    ----------
    x : bfloat16 (or uint16 for it) array, shape (rows, width) or (batch, heads, width)
        As in `rms_norm`; here a row is the output of a value head.
    gate : bfloat16 (or uint16) array, shape of `x`
        Strides of its own: a slice of a wider projection is read in place.
    weight, out, epsilon, offset, stream, signal
        As in `rms_norm`; `out` may be `x` or `gate` itself.

    Returns
    -------
    bfloat16 (or uint16) array, shape of `x`
        `out`, or a new array of the library and dtype of `x`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `rms_norm`. Nothing is launched.

    Notes
    -----
    As in `rms_norm`. ``silu(z) = z / (1 + exp(-z))``. The norm comes before the gate, as in the gated delta rule's output of Qwen3-Next; the norm
    there rounds twice on the way, here nothing is rounded but the result. Method: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024.

    Examples
    --------
    >>> from ml_dtypes import bfloat16
    >>> x, gate = np.array([[3, 4]], bfloat16), np.array([[0, 8]], bfloat16)
    >>> gated_rms_norm(x, gate, np.array([1, 1], bfloat16), epsilon=0.0).astype(np.float32)
    array([[0.    , 9.0625]], dtype=float32)
    """
    if gate is None:
        raise ArgumentTypeError("gate: expected an array, got None")
    return _launch(x, gate, weight, out, epsilon, offset, stream, signal)


def _launch(x: Any, gate: Any, weight: Any, out: Any, epsilon: float, offset: bool, stream: Any, signal: Signal | None) -> Any:
    x_at, shape, x_strides, dtype, device = tensor(x, "x", BF16, (2, 3))
    width = shape[-1]
    if width == 0:
        raise ArgumentError(f"x: expected rows of at least one element, got shape {shape}")
    gate_at, gate_strides = 0, x_strides
    if gate is not None:
        gate_at, gate_shape, gate_strides, _, _ = tensor(gate, "gate", BF16, (2, 3), device)
        like_shape(gate_shape, "gate", shape, "x")
    weight_at, weight_shape, _, _, _ = tensor(weight, "weight", BF16, (1,), device)
    if weight_shape != (width,):
        raise ArgumentError(f"weight: expected shape ({width},), the width of x, got {weight_shape}")
    try:
        epsilon = float(epsilon)
    except TypeError:
        raise ArgumentTypeError(f"epsilon: expected a number, got {type(epsilon).__name__}") from None
    if not 0 <= epsilon < float("inf"):
        raise ArgumentError(f"epsilon: expected a finite number of at least 0, got {epsilon}")
    if out is not None:
        out_at, out_shape, out_strides, _, _ = tensor(out, "out", BF16, (2, 3), device, written=True)
        like_shape(out_shape, "out", shape, "x")
    if device < 0:
        out = arrays.empty(shape, dtype, x) if out is None else out
        return host(reference.rms_norm, x, weight, out, epsilon, bool(offset), gate)
    if signal is not None:
        signal_pointer(signal, device)
    handle = choose(stream, x)
    if out is None:
        out, out_at = allocate("out", shape, dtype, x, handle)
        out_strides = (width, 1) if len(shape) == 2 else (shape[1] * width, width, 1)
    inner_rows = shape[1] if len(shape) == 3 else 1
    rows = shape[0] * inner_rows
    if rows == 0:
        return nothing(out)
    if rows > _MOST_ROWS:
        raise ArgumentError(f"x: expected at most {_MOST_ROWS} rows, got shape {shape}")
    (x_outer, x_inner), (gate_outer, gate_inner), (out_outer, out_inner) = (
        (strides[0], strides[1] if len(shape) == 3 else 0) for strides in (x_strides, gate_strides, out_strides)
    )
    in_vectors = width <= _MOST_THREADS * _STEPS * _VECTOR and _in_vectors(
        shape, (x_at, gate_at, weight_at, out_at), (x_strides, gate_strides, out_strides)
    )
    # Threads of a row, as a power of two: one a vector, or all of a block.
    lanes = min(width // _VECTOR if in_vectors else width, _MOST_THREADS)
    group_shift = (lanes - 1).bit_length()
    threads = max(_THREADS, 1 << group_shift)
    arguments = (
        x_at, x_outer, x_inner, gate_at, gate_outer, gate_inner, weight_at, out_at, out_outer, out_inner,
        rows, inner_rows, width, int(in_vectors), group_shift, epsilon, int(bool(offset)),
    )  # fmt: skip
    return _RMS_NORM.launch((), device, handle, blocks_for(rows, threads >> group_shift), threads, arguments, out)


def _in_vectors(shape: tuple[int, ...], pointers: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> bool:
    """Whether every row begins at a multiple of 16 bytes and is one long."""
    between = (stride for own in strides for stride, length in zip(own[:-1], shape[:-1], strict=True) if length > 1)
    return multiple_of(2 * _VECTOR, *pointers) and multiple_of(_VECTOR, shape[-1], *between)
