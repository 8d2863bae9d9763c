"""The gates of a gated delta rule: from two projections of a token to the log decay and the write strength of every value head.

They are an op of their own, apart from the delta rule, because the log of a speculative round keeps them: direct, record and fold must see the
same bits.
"""

from __future__ import annotations

from typing import Any

from gpukit.arrays import ITEMSIZE, empty
from gpukit.errors import ArgumentError, Signal
from gpukit.kernels._plans import allocate, blocks_for, signal_pointer
from gpukit.kernels._tensors import NUMBERS, like_shape, tensor
from gpukit.kernels.reference import gates as reference
from gpukit.launch import Kernel, host, nothing, operation
from gpukit.streams import choose

__all__ = ["gate_control"]

_GATE_CONTROL = Kernel("gates", "gate_control", language="cuda", early=True)

# THREADS of cuda/gates.cu.
_THREADS = 128
_FLOAT = ("float32",)
_MOST_ELEMENTS = 2**31 - 1


@operation
def gate_control(
    x_a: Any, x_b: Any, a_log: Any, dt_bias: Any, *, g_out: Any = None, beta_out: Any = None, stream: Any = None, signal: Signal | None = None
) -> tuple[Any, Any]:
    """Log decay and write strength: ``g = -exp(a_log) * softplus(x_a + dt_bias)`` and ``beta = sigmoid(x_b)``.

    Parameters
    ----------
    x_a, x_b : bfloat16 (or uint16 for it) or float32 array, shape (rows, heads) or (batch, tokens, heads)
        The two projections, of any strides: slices of one wider projection are read in place.
    a_log, dt_bias : bfloat16 (or uint16) or float32 array, shape (heads,)
        Parameters of the layer, contiguous.
    g_out, beta_out : float32 array, shape of `x_a`, optional
        Receive the log decay (at most 0, natural logarithm) and the write strength (0 … 1). Any strides: ``pairs[..., 0]`` and ``pairs[..., 1]``
        of a replay log are filled in place. They overlap neither each other nor an input.
    stream : stream, optional
        Where to launch; the current stream of `x_a`'s library by default.
    signal : Signal, optional
        For uniformity with the other ops; there is nothing to count.

    Returns
    -------
    tuple of float32 arrays, shape of `x_a`
        `g_out` and `beta_out`, or new arrays of `x_a`'s library.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides or device. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when both outputs are given. All arithmetic is float32; the softplus is the
    identity above 20. Method: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024, with the decay of Mamba-2.

    Examples
    --------
    >>> x_a, x_b = np.array([[0, 30]], np.float32), np.array([[0, -1]], np.float32)
    >>> g, beta = gate_control(x_a, x_b, np.zeros(2, np.float32), np.zeros(2, np.float32))
    >>> g.round(4), beta.round(4)
    (array([[ -0.6931, -30.    ]], dtype=float32), array([[0.5   , 0.2689]], dtype=float32))
    """
    a_at, shape, a_strides, a_type, device = tensor(x_a, "x_a", NUMBERS, (2, 3), contiguous=0)
    b_at, b_shape, b_strides, b_type, _ = tensor(x_b, "x_b", NUMBERS, (2, 3), device, contiguous=0)
    like_shape(b_shape, "x_b", shape, "x_a")
    heads = shape[-1]
    a_log_at, a_log_shape, _, a_log_type, _ = tensor(a_log, "a_log", NUMBERS, (1,), device)
    dt_bias_at, dt_bias_shape, _, dt_bias_type, _ = tensor(dt_bias, "dt_bias", NUMBERS, (1,), device)
    for name, own in (("a_log", a_log_shape), ("dt_bias", dt_bias_shape)):
        if own != (heads,):
            raise ArgumentError(f"{name}: expected shape ({heads},), the heads of x_a, got {own}")
    if g_out is not None:
        g_at, g_shape, g_strides, _, _ = tensor(g_out, "g_out", _FLOAT, (2, 3), device, contiguous=0, written=True)
        like_shape(g_shape, "g_out", shape, "x_a")
    if beta_out is not None:
        beta_at, beta_shape, beta_strides, _, _ = tensor(beta_out, "beta_out", _FLOAT, (2, 3), device, contiguous=0, written=True)
        like_shape(beta_shape, "beta_out", shape, "x_a")
    inner_rows = shape[1] if len(shape) == 3 else 1
    rows = shape[0] * inner_rows
    if rows * heads > _MOST_ELEMENTS:
        raise ArgumentError(f"x_a: expected at most {_MOST_ELEMENTS} elements, got shape {shape}")
    if device < 0:
        g_out = empty(shape, "float32", x_a) if g_out is None else g_out
        beta_out = empty(shape, "float32", x_a) if beta_out is None else beta_out
        return host(reference.gate_control, x_a, x_b, a_log, dt_bias, g_out, beta_out)  # type: ignore[no-any-return]
    if signal is not None:
        signal_pointer(signal, device)
    handle = choose(stream, x_a)
    fresh = (heads, 1) if len(shape) == 2 else (inner_rows * heads, heads, 1)
    if g_out is None:
        g_out, g_at = allocate("g_out", shape, "float32", x_a, handle)
        g_strides = fresh
    if beta_out is None:
        beta_out, beta_at = allocate("beta_out", shape, "float32", x_a, handle)
        beta_strides = fresh
    if rows * heads == 0:
        return nothing((g_out, beta_out))  # type: ignore[no-any-return]
    arguments = (
        a_at, ITEMSIZE[a_type], *_three(a_strides), b_at, ITEMSIZE[b_type], *_three(b_strides),
        a_log_at, ITEMSIZE[a_log_type], dt_bias_at, ITEMSIZE[dt_bias_type],
        g_at, *_three(g_strides), beta_at, *_three(beta_strides), rows, inner_rows, heads,
    )  # fmt: skip
    blocks = blocks_for(rows * heads, _THREADS)
    return _GATE_CONTROL.launch((), device, handle, blocks, _THREADS, arguments, (g_out, beta_out))  # type: ignore[no-any-return]


def _three(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of (outer, inner, head); rows that are not grouped have no inner one."""
    return strides if len(strides) == 3 else (strides[0], 0, strides[1])
