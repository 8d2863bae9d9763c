"""Weights as small integers in planes of bits: packing and unpacking of codes, the canonical encoder, and its exact inverse.

A kernel reads the planes side by side with loads that are all aligned, whatever the number of bits, and takes what several formats share from the
same plane.
"""

from __future__ import annotations

from typing import Any

from gpukit import arrays
from gpukit.arrays import ITEMSIZE
from gpukit.errors import ArgumentError, Signal
from gpukit.kernels._plans import allocate, blocks_for, signal_pointer
from gpukit.kernels._row_split import FORMATS, Format, RowSplit, blocks_of, code_planes, format_of, keep_apart, plane, planes
from gpukit.kernels._tensors import BF16, Tensor, require_aligned, tensor
from gpukit.kernels.reference import row_split as reference
from gpukit.launch import Kernel, host, nothing, operation
from gpukit.streams import choose

__all__ = ["FORMATS", "Format", "RowSplit", "dequantize", "pack_codes", "quantize", "unpack_codes"]

_PACK = Kernel("row_split", "pack_codes", language="cuda")
_UNPACK = Kernel("row_split", "unpack_codes", language="cuda")
_QUANTIZE = Kernel("row_split", "quantize", language="cuda")
_DEQUANTIZE = Kernel("row_split", "dequantize", language="cuda")

# THREADS and OCT of cuda/row_split.cu.
_THREADS = 256
_OCT = 8
_MOST_BLOCKS = 2**31 - 1


@operation
def pack_codes(codes: Any, format: str, *, base: Any = None, high: Any = None, stream: Any = None, signal: Signal | None = None) -> tuple[Any, Any]:
    """Lay codes into the planes of a format.

    Parameters
    ----------
    codes : int8 array, shape (rows, K)
        Contiguous; K is a multiple of the format's group.
    format : {"q4", "q5", "q6", "w8"}
        Codes are -8 … 7, -16 … 15, -32 … 31 and -127 … 127.
    base : uint8 array, shape (rows, groups, 32), optional
        Receives the low bits, contiguous, at a multiple of 16 like every array here.
    high : uint8 array, shape (rows, groups, 8 or 16), optional
        Receives what is above them; None where the format has nothing there.
    stream : stream, optional
        Where to launch; the current stream of `codes`' library by default.
    signal : Signal, optional
        Counts ``out_of_range`` once a group with a code that the format has not; its bytes are not touched.

    Returns
    -------
    (uint8 array, uint8 array or None)
        The planes, given or new.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        No such format, or an array has the wrong dtype, shape, strides, alignment or device. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when the planes are given.

    Examples
    --------
    >>> codes = np.zeros((1, 64), np.int8)
    >>> codes[0, :4] = 1, -2, 7, -16
    >>> base, high = pack_codes(codes, "q5")
    >>> [hex(byte) for byte in base[0, 0, :2]], bin(high[0, 0, 0])
    (['0xe1', '0x7'], '0b1010')
    """
    kind = format_of(format)
    address, (rows, columns), _, _, device = _matrix(codes, "codes", ("int8",), kind, format)
    groups = columns // kind.group
    handle = choose(stream, codes) if device >= 0 else 0
    if base is not None or high is not None:
        base_at, high_at = code_planes(format, base, high, rows, columns, device, written=True)
        keep_apart(blocks_of("", format, rows, columns, base_at, high_at), [("codes", address, rows * columns)])
    elif device < 0:
        base, high = _new_planes(kind, rows, groups, codes)
    else:
        base, base_at = allocate("base", (rows, groups, kind.base_bytes), "uint8", codes, handle)
        high, high_at = allocate("high", (rows, groups, kind.high_bytes), "uint8", codes, handle) if kind.high_bytes else (None, 0)
    if device < 0:
        return host(reference.pack_codes, codes, format, base, high, signal=signal)  # type: ignore[no-any-return]
    counters = signal_pointer(signal, device) if signal is not None else 0
    arguments = (address, base_at, high_at, kind.bits, rows * columns // _OCT, counters)
    return _launch(_PACK, rows * columns, device, handle, arguments, (base, high))  # type: ignore[no-any-return]


@operation
def unpack_codes(base: Any, high: Any, format: str, *, out: Any = None, stream: Any = None, signal: Signal | None = None) -> Any:
    """Take codes out of their planes: the exact inverse of `pack_codes`.

    Parameters
    ----------
    base, high
        As in `pack_codes`.
    format : {"q4", "q5", "q6", "w8"}
        Their format.
    out : int8 array, shape (rows, K), optional
        Receives the codes.
    stream : stream, optional
        Where to launch; the current stream of `base`'s library by default.
    signal : Signal, optional
        For uniformity with the other ops; there is nothing to count.

    Returns
    -------
    int8 array, shape (rows, K)
        `out`, or a new array of the library of `base`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As for `pack_codes`.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` is given.

    Examples
    --------
    >>> codes = np.arange(-32, 32, dtype=np.int8)[None]
    >>> bool((unpack_codes(*pack_codes(codes, "q6"), "q6") == codes).all())
    True
    """
    kind = format_of(format)
    _, shape, _, _, device = tensor(base, "base", ("uint8",), (3,), contiguous=3)
    rows, columns = shape[0], shape[1] * kind.group
    base_at, high_at = code_planes(format, base, high, rows, columns, device)
    handle = choose(stream, base) if device >= 0 else 0
    out, out_at = _output(out, (rows, columns), "int8", base, device, handle)
    if out_at:
        keep_apart([("out", out_at, rows * columns)], blocks_of("", format, rows, columns, base_at, high_at))
    if device < 0:
        return host(reference.unpack_codes, base, high, format, out)
    if signal is not None:
        signal_pointer(signal, device)
    arguments = (base_at, high_at, out_at, kind.bits, rows * columns // _OCT)
    return _launch(_UNPACK, rows * columns, device, handle, arguments, out)


@operation
def quantize(values: Any, format: str, *, out: RowSplit | None = None, stream: Any = None, signal: Signal | None = None) -> RowSplit:
    """Encode a matrix as row-split integers.

    Parameters
    ----------
    values : float32 or bfloat16 (or uint16 for it) array, shape (rows, K)
        Contiguous; K is a multiple of the format's group.
    format : {"q4", "q5", "q6", "w8"}
        What to encode as.
    out : RowSplit of that format, optional
        Receives planes and scales.
    stream : stream, optional
        Where to launch; the current stream of `values`' library by default.
    signal : Signal, optional
        Counts ``out_of_range`` once a group that has a NaN or an infinity or whose scale is past the range of float16; its bytes are not touched.
        Without one, NumPy values of that kind raise.

    Returns
    -------
    RowSplit
        `out`, or a new one.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As for `pack_codes`.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` is given.

    Every step is float32, rounded to nearest, ties to even: the scale is ``max|x| / largest code`` as float16, 2^-24 where that is zero though the
    group is not; codes are ``x`` times the reciprocal of the *rounded* scale, rounded, and clamped to the format's codes. A group of zeros has
    scale +0. NumPy and GPU agree bit for bit. What `dequantize` makes of the result is encoded as the same again, where scales are normal
    numbers of float16 (2^-14 and more): among the few codes that smaller scales leave, another scale may be nearer.

    Examples
    --------
    >>> weights = quantize(np.linspace(-7, 7, 64, dtype=np.float32)[None], "q4")
    >>> weights.scales, unpack_codes(weights.base, weights.high, "q4")[0, ::9]
    (array([[1.]], dtype=float16), array([-7, -5, -3, -1,  1,  3,  5,  7], dtype=int8))
    """
    kind = format_of(format)
    source = _matrix(values, "values", ("float32", *BF16), kind, format)
    address, (rows, columns), _, dtype, device = source
    if out is not None and isinstance(out, RowSplit) and out.format != format:
        raise ArgumentError(f"out: expected a RowSplit of format {format}, got {out.format}")
    handle = choose(stream, values) if device >= 0 else 0
    if out is not None:
        base_at, high_at, scales_at = planes(out, "out", rows, columns, device, written=True)
        own = blocks_of("out.", format, rows, columns, base_at, high_at, scales_at)
        keep_apart(own, [("values", address, rows * columns * ITEMSIZE[dtype])])
    elif device < 0:
        out = RowSplit.empty(format, rows, columns, values)
    else:
        groups = columns // kind.group
        base, base_at = allocate("out", (rows, groups, kind.base_bytes), "uint8", values, handle)
        high, high_at = allocate("out", (rows, groups, kind.high_bytes), "uint8", values, handle) if kind.high_bytes else (None, 0)
        scales, scales_at = allocate("out", (rows, groups), "float16", values, handle)
        out = RowSplit(format, base, high, scales)
    if device < 0:
        return host(_encode, values, out, signal=signal)  # type: ignore[no-any-return]
    counters = signal_pointer(signal, device) if signal is not None else 0
    arguments = (address, int(dtype == "float32"), base_at, high_at, scales_at, kind.bits, rows * columns // _OCT, counters)
    return _launch(_QUANTIZE, rows * columns, device, handle, arguments, out)  # type: ignore[no-any-return]


@operation
def dequantize(weights: RowSplit, *, out: Any = None, stream: Any = None, signal: Signal | None = None) -> Any:
    """Multiply codes by their scales, exactly.

    Parameters
    ----------
    weights : RowSplit
        Planes of any codes.
    out : float32 array, shape (rows, K), optional
        Receives the products.
    stream : stream, optional
        Where to launch; the current stream of the planes' library by default.
    signal : Signal, optional
        For uniformity with the other ops; there is nothing to count.

    Returns
    -------
    float32 array, shape (rows, K)
        `out`, or a new array of the library of the planes.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As for `pack_codes`.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture when `out` is given. A code and a scale have at most 19 bits together, so no product
    is rounded.

    Examples
    --------
    >>> dequantize(quantize(np.full((1, 32), 3, np.float32), "w8"))[0, :2]
    array([2.999817, 2.999817], dtype=float32)
    """
    if not isinstance(weights, RowSplit):
        planes(weights, "weights", 0, 0, arrays.HOST)
    kind = format_of(weights.format)
    _, (rows, groups), _, _, device = tensor(weights.scales, "weights.scales", ("float16",), (2,), contiguous=2)
    columns = groups * kind.group
    base_at, high_at, scales_at = planes(weights, "weights", rows, columns, device)
    handle = choose(stream, weights.base) if device >= 0 else 0
    out, out_at = _output(out, (rows, columns), "float32", weights.base, device, handle)
    if out_at:
        keep_apart([("out", out_at, 4 * rows * columns)], blocks_of("weights.", weights.format, rows, columns, base_at, high_at, scales_at))
    if device < 0:
        return host(reference.dequantize, weights.base, weights.high, weights.scales, weights.format, out)
    if signal is not None:
        signal_pointer(signal, device)
    arguments = (base_at, high_at, scales_at, out_at, kind.bits, rows * columns // _OCT)
    return _launch(_DEQUANTIZE, rows * columns, device, handle, arguments, out)


def _encode(values: Any, out: RowSplit, *, signal: Signal | None) -> RowSplit:
    reference.quantize(values, out.format, out.base, out.high, out.scales, signal=signal)
    return out


def _matrix(array: Any, name: str, dtypes: tuple[str, ...], kind: Format, format: str) -> Tensor:
    """A contiguous matrix whose rows are whole groups."""
    found = tensor(array, name, dtypes, (2,), contiguous=2)
    if found[1][1] % kind.group:
        raise ArgumentError(f"{name}: expected rows of a multiple of {kind.group} elements, the group of {format}, got shape {found[1]}")
    require_aligned(name, found[0])
    return found


def _new_planes(kind: Format, rows: int, groups: int, like: Any) -> tuple[Any, Any]:
    base = arrays.empty((rows, groups, kind.base_bytes), "uint8", like)
    return base, arrays.empty((rows, groups, kind.high_bytes), "uint8", like) if kind.high_bytes else None


def _output(out: Any, shape: tuple[int, int], dtype: str, like: Any, device: int, stream: int) -> tuple[Any, int]:
    if out is not None:
        return out, plane(out, "out", shape, device, dtype=dtype, written=True)
    if device < 0:
        return arrays.empty(shape, dtype, like), 0
    return allocate("out", shape, dtype, like, stream)


def _launch(kernel: Kernel, elements: int, device: int, handle: int, arguments: tuple[Any, ...], result: Any) -> Any:
    if elements == 0:
        return nothing(result)
    blocks = blocks_for(elements // _OCT, _THREADS)
    if blocks > _MOST_BLOCKS:
        raise ArgumentError(f"codes: expected at most {_MOST_BLOCKS * _THREADS * _OCT} elements, got {elements}")
    return kernel.launch((), device, handle, blocks, _THREADS, arguments, result)
