"""Checks of arguments that the plans of the recurrent-state ops share: batches of tokens, slot ids, layers, outputs. Each names the argument."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpukit import arrays
from gpukit.arrays import ITEMSIZE, Extent, contiguous_strides, describe, overlap, span, vector
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.kernels._plans import allocate, refuse_other_device, whole
from gpukit.kernels._tensors import BF16, require_aligned, tensor
from gpukit.kernels.state_pool import DIMS, Part, ReplayLog, StatePool, share_memory
from gpukit.launch import IDS

__all__ = [
    "Inputs",
    "batch",
    "batch_inputs",
    "column_inputs",
    "device_of",
    "float_bits",
    "ids",
    "keep_apart",
    "layer_of",
    "optional_ids",
    "output_like",
    "output_scale",
    "require",
    "states_at",
    "token_inputs",
]

_FLOAT32 = ("float32",)
_LARGEST = float(np.finfo(np.float32).max)
# Taps of the convolution in front.
_TAPS = 4
# Shapes by what is known of them, filled in only where a message says them.
_QUERIES, _COLUMNS = "(B, T, key_heads, {3}), as pool says", "(B, T, {2}), as pool and log say"


def float_bits(scale: float) -> int:
    """A float's bits: a kernel then finds it among its parameters as it is."""
    return int.from_bytes(struct.pack("<f", scale), "little")


def output_scale(scale: float | None, pool: StatePool) -> float:
    """The factor of outputs, as fp32 can hold it."""
    if scale is None:
        return float(pool.dim**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, int | float | np.integer | np.floating):
        raise ArgumentTypeError(f"scale: expected a number, got {type(scale).__name__}")
    if not abs(scale) <= _LARGEST:
        raise ArgumentError(f"scale: expected a number within float32, got {scale}")
    return float(scale)


def device_of(array: Any, name: str) -> int:
    return max(describe(array, name)[4], -1)


def require(value: Any, kind: type, name: str) -> None:
    if not isinstance(value, kind):
        raise ArgumentTypeError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")


def layer_of(layer: int, pool: StatePool, name: str = "layer") -> int:
    layer = whole(layer, name)
    if layer >= pool.layers:
        raise ArgumentError(f"{name}: expected at most {pool.layers - 1}, the last of pool, got {layer}")
    return layer


def states_at(pool: StatePool, layer: int) -> int:
    """Address of a layer's first state."""
    return pool.pointer + pool.itemsize * layer * pool.layer_stride


def batch(
    array: Any,
    name: str,
    dtypes: tuple[str, ...],
    device: int,
    shape: tuple[int | None, ...],
    alignment: int = 1,
    inner: str = "heads",
    expected: str = "",
    like: str = "",
) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """``(pointer, stride of sequences, stride of tokens)`` and shape of an input; None in `shape` is any size but 0. Messages say what was
    expected as `shape` and `like`, or as `expected`, whose fields are the sizes of `shape`."""
    pointer, dtype, got, strides, where, _ = describe(array, name)
    if where != device:
        refuse_other_device(name, max(where, -1), device)
    if dtype not in dtypes:
        raise ArgumentTypeError(f"{name}: expected dtype {' or '.join(dtypes)}, got {dtype}")
    if got != shape and (len(got) != len(shape) or any(n != m if m is not None else n == 0 for n, m in zip(got, shape, strict=True))):
        raise ArgumentError(f"{name}: expected shape {expected.format(*shape) or shape}{like}, got {tuple(got)}")
    if strides is None:
        token = math.prod(got[2:])
        return (pointer, got[1] * token, token), got
    plain = contiguous_strides(got)
    # An axis of length 1 has no stride worth looking at.
    seen = tuple(p if n == 1 else s for n, s, p in zip(got, strides, plain, strict=True))
    if seen[2:] != plain[2:]:
        raise ArgumentError(f"{name}: expected {inner} that are contiguous within a token, got element strides {tuple(strides)}")
    if seen[0] % alignment or seen[1] % alignment:
        raise ArgumentError(f"{name}: expected strides of multiples of {alignment} elements, got {tuple(strides)}")
    return (pointer, seen[0], seen[1]), got


# The inputs of an op by name, to be kept apart from what it writes.
Inputs = tuple[tuple[str, Extent], ...]


def batch_inputs(q: Any, k: Any, v: Any, g: Any, beta: Any, pool: StatePool, device: int) -> tuple[tuple[int, ...], Inputs, int, int, int]:
    """Pointers and strides of the inputs as the kernels take them, their extents, number of sequences, of tokens and of key heads."""
    require(pool, StatePool, "pool")
    refuse_other_device("pool", pool.device, device)
    shape = describe(q, "q")[2]
    if len(shape) != 4 or shape[3] not in DIMS:
        raise ArgumentError(f"q: expected shape (B, T, key_heads, 64 or 128), got {tuple(shape)}")
    items = shape[0]
    q_part, shape = batch(q, "q", BF16, device, (items, None, None, pool.dim), 8, expected=_QUERIES)
    _, tokens, key_heads, dim = shape
    if pool.heads % key_heads:
        raise ArgumentError(f"q: expected key heads that divide the {pool.heads} value heads of pool, got {key_heads}")
    k_part, _ = batch(k, "k", BF16, device, tuple(shape), 8, like=" like q")
    require_aligned("q", q_part[0])
    require_aligned("k", k_part[0])
    values = (items, tokens, pool.heads, dim)
    v_part, _ = batch(v, "v", BF16, device, values)
    g_part, _ = batch(g, "g", _FLOAT32, device, values[:3])
    beta_part, _ = batch(beta, "beta", _FLOAT32, device, values[:3])
    extents = token_inputs((q_part, k_part, v_part, g_part, beta_part), (items, tokens), key_heads * dim, pool.heads * dim, pool.heads)
    return (*q_part, *k_part, *v_part, *g_part, *beta_part), extents, items, tokens, key_heads


def token_inputs(parts: Sequence[tuple[int, ...]], shape: tuple[int, ...], keys: int, values: int, gates: int) -> Inputs:
    """Extents of q, k, v, g and beta, from pointers and strides, the shape in front of a token, and elements of a token."""
    widths = (("q", 2, keys), ("k", 2, keys), ("v", 2, values), ("g", 4, gates), ("beta", 4, gates))
    return tuple(
        (name, (pointer, itemsize, (*shape, width), (*strides, 1)))
        for (name, itemsize, width), (pointer, *strides) in zip(widths, parts, strict=True)
    )


def column_inputs(x: Any, weight: Any, g: Any, beta: Any, pool: StatePool, key_heads: int, device: int) -> tuple[tuple[int, ...], Inputs, int, int]:
    """Pointers and strides of raw columns, taps and gates as the kernels take them, their extents, number of sequences and of tokens."""
    shape = describe(x, "x")[2]
    channels = (2 * key_heads + pool.heads) * pool.dim
    x_part, shape = batch(x, "x", BF16, device, (shape[0] if shape else None, None, channels), 8, "channels", _COLUMNS)
    items, tokens, _ = shape
    require_aligned("x", x_part[0])
    weight_at, weight_shape, _, _, _ = tensor(weight, "weight", BF16, (2,), device, contiguous=2)
    if weight_shape != (channels, _TAPS):
        raise ArgumentError(f"weight: expected shape ({channels}, {_TAPS}), the channels of x and {_TAPS} taps, got {weight_shape}")
    require_aligned("weight", weight_at)
    gates = (items, tokens, pool.heads)
    g_part, _ = batch(g, "g", _FLOAT32, device, gates)
    beta_part, _ = batch(beta, "beta", _FLOAT32, device, gates)
    extents = (
        ("x", (x_part[0], 2, (items, tokens, channels), (*x_part[1:], 1))),
        ("weight", (weight_at, 2, (channels * _TAPS,), (1,))),
        ("g", (g_part[0], 4, gates, (*g_part[1:], 1))),
        ("beta", (beta_part[0], 4, gates, (*beta_part[1:], 1))),
    )
    return (*x_part, weight_at, *g_part, *beta_part), extents, items, tokens


def keep_apart(out_at: int, elements: int, inputs: Inputs, pool: StatePool, log: ReplayLog | None = None, previous: ReplayLog | None = None) -> None:
    """Raise, if what an op writes shares memory with what it reads, or its outputs with states and logs. `out_at` is 0 for none yet."""
    written = [("pool", pool.parts)]
    if log is not None:
        written.append(("log", log.parts))
    if out_at and elements:
        out: tuple[Part, ...] = ((out_at, out_at + 2 * elements, (out_at, 2, (elements,), (1,))),)
        for name, own in (("pool", pool), ("log", log), ("previous", previous)):
            if own is not None and share_memory(out, own.parts):
                raise ArgumentError(f"out: expected memory apart from {name}, but it overlaps it")
        written.append(("out", out))
    for name, extent in inputs:
        begin, end = span(extent)
        for other, parts in written:
            for low, high, part in parts:
                if begin < high and low < end and overlap(extent, part):
                    raise ArgumentError(f"{other}: expected memory apart from {name}, but it overlaps it")


def output_like(out: Any, v: Any, shape: tuple[int, ...], device: int, handle: int) -> tuple[Any, int]:
    if out is None:
        if device < 0:
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


def ids(array: Any, name: str, dtypes: tuple[str, ...], items: int, device: int) -> tuple[int, int, str, int]:
    found = vector(array, name, dtypes, device)
    if found[1] != items:
        raise ArgumentError(f"{name}: expected shape ({items},), one a sequence, got ({found[1]},)")
    return found


def optional_ids(array: Any, name: str, items: int, device: int) -> tuple[int, int]:
    """Pointer and bytes of an id, zeros without an array."""
    if array is None:
        return 0, 0
    pointer, _, dtype, _ = ids(array, name, IDS, items, device)
    return pointer, ITEMSIZE[dtype]
