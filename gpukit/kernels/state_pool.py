"""Where recurrent states live: pools of committed states, and logs of the tokens that a verification has not committed yet.

Containers over arrays that the caller owns, checked once, so that ops only compare numbers. They hold no requests and give out no slots;
what happens to states is in `gated_delta`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from gpukit import arrays
from gpukit.arrays import ITEMSIZE, Extent, describe, overlap, span
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.kernels._plans import positive, refuse_other_device, whole
from gpukit.kernels._tensors import BF16

__all__ = ["DIMS", "ReplayLog", "StatePool"]

# K and V that the kernels are made for.
DIMS = (64, 128)
# Columns of a convolution's history: four taps, one of them the token itself.
TAPS = 3
_ALIGNMENT = 16


class StatePool:
    """Committed states by layer and slot, in any layout that strides can say.

    Parameters
    ----------
    rec : float32, bfloat16 or uint16 array, shape (layers, slots, value_heads, V, K)
        States, uint16 as the bits of bfloat16: half the traffic, at 8 bits of precision, rounded after every token. ``V == K``, 64 or 128. The
        last three axes are contiguous; the strides of layers and slots are free, as long as states lie apart: layer-major, slot-major
        (``array.transpose(1, 0, 2, 3, 4)`` of [slots, layers, …]), or views of one part of every page. Addresses are multiples of 16.
    conv : bfloat16 or uint16 array, shape (layers, slots, 3, channels), optional
        Histories of the convolution, oldest column first. The last two axes are contiguous, `channels` is a multiple of 8.

    Attributes
    ----------
    rec, conv
        The arrays.
    layers, slots, heads, dim : int
        Their shape.
    layer_stride, slot_stride, conv_layer_stride, conv_slot_stride : int
        In elements.
    itemsize : int
        Bytes of a state's number, 4 or 2.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides or alignment, is read-only, or both are not on one device.

    Notes
    -----
    Nothing is copied and nothing is owned: the arrays live as long as the pool. What is in a slot that nothing was written to is undefined.

    Examples
    --------
    >>> pool = StatePool.allocate(layers=3, slots=5, heads=2, dim=64, layout="slot")
    >>> pool.rec.shape, pool.layer_stride, pool.slot_stride
    ((3, 5, 2, 64, 64), 8192, 24576)
    """

    __slots__ = (
        "channels", "conv", "conv_layer_stride", "conv_pointer", "conv_slot_stride", "device", "dim", "heads", "itemsize", "layer_stride",
        "layers", "__weakref__", "parts", "pointer", "rec", "slot_stride", "slots",
    )  # fmt: skip

    def __init__(self, rec: Any, conv: Any = None):
        self.rec, self.conv = rec, conv
        self.pointer, shape, strides, self.device = _pool_part(rec, "rec", ("float32", *BF16), 5)
        self.itemsize = ITEMSIZE[describe(rec, "rec")[1]]
        self.layers, self.slots, self.heads, self.dim, keys = shape
        if self.dim not in DIMS or keys != self.dim:
            raise ArgumentError(f"rec: expected states of 64 x 64 or 128 x 128 (V x K), got {self.dim} x {keys}")
        self.layer_stride, self.slot_stride = strides[:2]
        self.conv_pointer = self.conv_layer_stride = self.conv_slot_stride = self.channels = 0
        if conv is not None:
            self.conv_pointer, conv_shape, conv_strides, where = _pool_part(conv, "conv", BF16, 4)
            refuse_other_device("conv", where, self.device)
            self.channels = conv_shape[3]
            if conv_shape[:3] != (self.layers, self.slots, TAPS) or self.channels % 8:
                raise ArgumentError(f"conv: expected shape ({self.layers}, {self.slots}, {TAPS}, multiple of 8), got {conv_shape}")
            self.conv_layer_stride, self.conv_slot_stride = conv_strides[:2]
            states, histories = self._extents()
            if overlap(states, histories):
                raise ArgumentError("conv: expected memory of its own, but it overlaps rec")
        self.parts = parts_of(self._extents())

    @classmethod
    def allocate(
        cls, layers: int, slots: int, heads: int, dim: int, *, channels: int = 0, layout: str = "layer", dtype: str = "float32", like: Any = None
    ) -> StatePool:
        """A pool of zeros.

        Parameters
        ----------
        layers, slots, heads, dim : int
            Shape of the states: [layers, slots, heads, dim, dim].
        channels : int
            Channels of the convolution, a multiple of 8; 0 for a pool without histories.
        layout : {"layer", "slot"}
            Whether the slots of a layer or the layers of a slot lie together. With few of many slots live, slot-major keeps the live bytes
            together.
        dtype : {"float32", "bfloat16"}
            Of the states.
        like : array, optional
            In whose library and on whose device; NumPy by default.
        """
        if layout not in ("layer", "slot"):
            raise ArgumentError(f"layout: expected 'layer' or 'slot', got {layout!r}")
        if dtype not in ("float32", "bfloat16"):
            raise ArgumentError(f"dtype: expected 'float32' or 'bfloat16', got {dtype!r}")
        channels = _channels(channels)
        outer = (positive(layers, "layers"), positive(slots, "slots"))
        outer = outer if layout == "layer" else outer[::-1]
        rec = arrays.full((*outer, positive(heads, "heads"), positive(dim, "dim"), dim), 0, dtype if dtype == "float32" else _bfloat16(like), like)
        conv = arrays.full((*outer, TAPS, channels), 0, _bfloat16(like), like) if channels else None
        if layout == "slot":
            rec = rec.swapaxes(0, 1)
            conv = None if conv is None else conv.swapaxes(0, 1)
        return cls(rec, conv)

    def _extents(self) -> list[Extent]:
        """Pointer, item size, shape and element strides of each part."""
        shape, size = (self.layers, self.slots), self.heads * self.dim**2
        found: list[Extent] = [(self.pointer, self.itemsize, (*shape, size), (self.layer_stride, self.slot_stride, 1))]
        if self.conv is not None:
            found.append((self.conv_pointer, 2, (*shape, TAPS * self.channels), (self.conv_layer_stride, self.conv_slot_stride, 1)))
        return found


class ReplayLog:
    """The inputs of tokens that were verified, by layer and row of the batch, for `fold` to replay the accepted ones.

    Parameters
    ----------
    k : bfloat16 or uint16 array, shape (layers, rows, W, key_heads, K)
        Keys as they came: after convolution and activation, before normalisation. `W` is the most tokens a verification may have.
    v : bfloat16 or uint16 array, shape (layers, rows, W, value_heads, V)
    gates : float32 array, shape (layers, rows, W, value_heads, 2)
        Pairs (g, beta).
    conv : bfloat16 or uint16 array, shape (layers, rows, W, channels), optional
        Raw columns of the convolution, which `fold` makes histories of.

    Attributes
    ----------
    k, v, gates, conv
        The arrays, contiguous, at addresses that are multiples of 16.
    layers, rows, width, key_heads, heads, dim, channels : int
        Their shape.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape or alignment, is not contiguous, is read-only, overlaps another, or is on another device.

    Examples
    --------
    >>> log = ReplayLog.allocate(layers=2, rows=8, width=4, key_heads=16, heads=32, dim=128)
    >>> log.v.shape, log.gates.shape
    ((2, 8, 4, 32, 128), (2, 8, 4, 32, 2))
    """

    __slots__ = (
        "__weakref__", "apart_from", "channels", "conv", "conv_pointer", "device", "dim", "gates", "gates_pointer", "heads", "k", "k_pointer",
        "key_heads", "layers", "parts", "rows", "v", "v_pointer", "width",
    )  # fmt: skip

    def __init__(self, k: Any, v: Any, gates: Any, conv: Any = None):
        self.k, self.v, self.gates, self.conv = k, v, gates, conv
        self.k_pointer, shape, self.device = _log_part(k, "k", BF16, 5)
        self.layers, self.rows, self.width, self.key_heads, self.dim = shape
        if self.dim not in DIMS:
            raise ArgumentError(f"k: expected keys of 64 or 128, got {self.dim}")
        self.v_pointer, v_shape, v_device = _log_part(v, "v", BF16, 5)
        refuse_other_device("v", v_device, self.device)
        self.heads = v_shape[3]
        if v_shape != (*shape[:3], self.heads, self.dim) or self.heads % self.key_heads:
            expected = f"({self.layers}, {self.rows}, {self.width}, multiple of {self.key_heads}, {self.dim})"
            raise ArgumentError(f"v: expected shape {expected} like k, got {v_shape}")
        self.gates_pointer, gates_shape, gates_device = _log_part(gates, "gates", ("float32",), 5)
        refuse_other_device("gates", gates_device, self.device)
        if gates_shape != (*v_shape[:4], 2):
            raise ArgumentError(f"gates: expected shape {(*v_shape[:4], 2)} like v, got {gates_shape}")
        self.conv_pointer = self.channels = 0
        if conv is not None:
            self.conv_pointer, conv_shape, conv_device = _log_part(conv, "conv", BF16, 4)
            refuse_other_device("conv", conv_device, self.device)
            self.channels = conv_shape[3]
            if conv_shape[:3] != shape[:3] or self.channels % 8:
                raise ArgumentError(f"conv: expected shape ({self.layers}, {self.rows}, {self.width}, multiple of 8), got {conv_shape}")
        parts = self._extents()
        names = ("k", "v", "gates", "conv")
        for i, part in enumerate(parts):
            for j in range(i):
                if overlap(parts[j], part):
                    raise ArgumentError(f"{names[i]}: expected memory of its own, but it overlaps {names[j]}")
        self.parts = parts_of(parts)
        # Pools and logs found to share no memory with this one; nothing about either can change.
        self.apart_from: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def allocate(cls, layers: int, rows: int, width: int, key_heads: int, heads: int, dim: int, *, channels: int = 0, like: Any = None) -> ReplayLog:
        """A log of zeros, in the library and on the device of `like`; NumPy by default."""
        channels = _channels(channels)
        if positive(heads, "heads") % positive(key_heads, "key_heads"):
            raise ArgumentError(f"heads: expected a multiple of {key_heads}, the key heads, got {heads}")
        outer = (positive(layers, "layers"), positive(rows, "rows"), positive(width, "width"))
        bfloat16 = _bfloat16(like)
        return cls(
            arrays.full((*outer, key_heads, positive(dim, "dim")), 0, bfloat16, like),
            arrays.full((*outer, heads, dim), 0, bfloat16, like),
            arrays.full((*outer, heads, 2), 0, "float32", like),
            arrays.full((*outer, channels), 0, bfloat16, like) if channels else None,
        )

    def _extents(self) -> list[Extent]:
        """Pointer, item size, shape and element strides of each part."""
        entries = self.layers * self.rows * self.width
        found: list[Extent] = [
            (self.k_pointer, 2, (entries * self.key_heads * self.dim,), (1,)),
            (self.v_pointer, 2, (entries * self.heads * self.dim,), (1,)),
            (self.gates_pointer, 4, (entries * self.heads * 2,), (1,)),
        ]
        if self.conv is not None:
            found.append((self.conv_pointer, 2, (entries * self.channels,), (1,)))
        return found


# Address of the first byte, of the one behind the last, and the array by its numbers.
Part = tuple[int, int, Extent]


def parts_of(extents: Iterable[Extent]) -> tuple[Part, ...]:
    """Arrays that are often asked whether they share memory with others."""
    return tuple((*span(extent), extent) for extent in extents)


def share_memory(some: Iterable[Part], others: Iterable[Part]) -> bool:
    """Whether one of some arrays shares an element with one of others."""
    return any(
        begin < high and low < end and overlap(extent, other)
        for begin, end, extent in some
        for low, high, other in others
    )  # fmt: skip


def _channels(channels: Any) -> int:
    """Channels of a convolution, 0 for none: whole accesses of 16 bytes."""
    found = whole(channels, "channels", 0)
    if found % 8:
        raise ArgumentError(f"channels: expected a multiple of 8, got {found}")
    return found


def _bfloat16(like: Any) -> str:
    """The name of bfloat16 in the library of `like`, uint16 where it has none."""
    return "bfloat16" if like is not None and arrays.library_of(like) == "torch" else "uint16"


def _part(array: Any, name: str, dtypes: tuple[str, ...], dimensions: int) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """Pointer, shape, element strides (those of axes of length 1 as if contiguous) and device of a writable, aligned array."""
    pointer, dtype, shape, given, device, writable = describe(array, name)
    if dtype not in dtypes:
        raise ArgumentTypeError(f"{name}: expected dtype {' or '.join(dtypes)}, got {dtype}")
    shape = tuple(shape)
    if len(shape) != dimensions:
        raise ArgumentError(f"{name}: expected {dimensions} dimensions, got shape {shape}")
    if 0 in shape:
        raise ArgumentError(f"{name}: expected at least one element, got shape {shape}")
    if not writable:
        raise ArgumentError(f"{name}: expected a writable array, got a read-only one")
    if pointer % _ALIGNMENT:
        raise ArgumentError(f"{name}: expected an address that is a multiple of {_ALIGNMENT}, got {pointer:#x}")
    plain = arrays.contiguous_strides(shape)
    strides = plain if given is None else tuple(p if n == 1 else s for n, s, p in zip(shape, given, plain, strict=True))
    return pointer, shape, strides, max(device, arrays.HOST)


def _log_part(array: Any, name: str, dtypes: tuple[str, ...], dimensions: int) -> tuple[int, tuple[int, ...], int]:
    pointer, shape, strides, device = _part(array, name, dtypes, dimensions)
    if strides != arrays.contiguous_strides(shape):
        raise ArgumentError(f"{name}: expected a contiguous array, got element strides {strides}")
    return pointer, shape, device


def _pool_part(array: Any, name: str, dtypes: tuple[str, ...], dimensions: int) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    pointer, shape, strides, device = _part(array, name, dtypes, dimensions)
    dtype = describe(array)[1]
    inner = arrays.contiguous_strides(shape[2:])
    if strides[2:] != inner:
        raise ArgumentError(f"{name}: expected the axes behind layers and slots contiguous, got element strides {strides}")
    size = inner[0] * shape[2]
    axes = sorted((stride, n) for stride, n in zip(strides[:2], shape[:2], strict=True) if n > 1)
    reach = size
    for stride, n in axes:
        if stride < reach:
            raise ArgumentError(f"{name}: expected states apart from each other, got {size} elements with strides {strides[:2]}")
        reach += stride * (n - 1)
    if any(stride * ITEMSIZE[dtype] % _ALIGNMENT for stride, _ in axes):
        raise ArgumentError(f"{name}: expected strides of a multiple of {_ALIGNMENT} bytes, got element strides {strides[:2]}")
    return pointer, shape, strides, device
