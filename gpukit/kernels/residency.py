"""The memory traffic of a decode round with next to no arithmetic: states moved on in place, weights streamed past. What L2 plans are tried on.

Both take a share of lines that the L2 is asked to keep by the accesses themselves; it changes no value.
"""

from __future__ import annotations

from typing import Any

from gpukit.arrays import ITEMSIZE, output, vector
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels._plans import blocks_for, signal_pointer
from gpukit.kernels._tensors import multiple_of, refuse_overlap, require_aligned, tensor
from gpukit.kernels.reference import residency as reference
from gpukit.launch import IDS, Kernel, host, nothing, operation
from gpukit.streams import choose

__all__ = ["advance_states", "stream_weights"]

_ADVANCE_STATES = Kernel("residency", "advance_states", language="cuda", doubles=(10,))
_STREAM_WEIGHTS = Kernel("residency", "stream_weights", language="cuda", doubles=(4,))

# THREADS times VECTORS, and STREAM_THREADS, of cuda/residency.cu.
_THREADS, _VECTORS = 256, 4
_STREAM_THREADS = 512
_INT32 = ("int32",)


def _hint(keep: Any) -> tuple[int, float]:
    """Whether accesses carry a hint, and the share of lines to keep."""
    if keep is None:
        return 0, 0.0
    if isinstance(keep, bool) or not isinstance(keep, int | float):
        raise ArgumentTypeError(f"keep: expected None or a number from 0 to 1, got {type(keep).__name__}")
    if not 0.0 <= keep <= 1.0:
        raise ArgumentError(f"keep: expected None or a number from 0 to 1, got {keep}")
    return 1, float(keep)


@operation
def advance_states(
    states: Any, slots: Any, *, keep: float | None = None, scattered: bool = True, stream: Any = None, signal: Signal | None = None
) -> None:
    """Read, step and write every word of some slots of a pool, all layers: ``w = 1664525 w + 1013904223`` modulo 2^32.

    Parameters
    ----------
    states : int32 array, shape (layers, slots, words)
        Written in place. Words are contiguous and a multiple of 4; the strides of layers and slots are free multiples of 4, the address is a
        multiple of 16.
    slots : int32 or int64 array, shape (rows,)
        Which slots. Negative is padding; those past the last slot are skipped and counted as ``out_of_range``; of equal ones the first counts,
        the others as ``unbound``.
    keep : float, optional
        Share of the lines that the L2 is asked to keep (evict_last); the others are the first to go (evict_first). None: no hints.
    scattered : bool
        Whether the lines to keep lie all over the states, chosen by the hardware, or are the first ones, layer by layer.
    stream : stream, optional
        Where to launch; the current stream of `states`' library by default.
    signal : Signal, optional
        Counts ``out_of_range`` and ``unbound``, once a row.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, strides, alignment or device, or `keep` is not from 0 to 1. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture. A step is a bijection: a lost or doubled one shows in every later value.

    Examples
    --------
    >>> states = np.zeros((1, 3, 4), np.int32)
    >>> advance_states(states, np.array([1, -1]))
    >>> states[0, :, 0]
    array([         0, 1013904223,          0], dtype=int32)
    """
    hinted, share = _hint(keep)
    own = tensor(states, "states", _INT32, (3,), written=True)
    pointer, (layers, slot_count, words), (layer_stride, slot_stride, _), _, device = own
    if words % 4:
        raise ArgumentError(f"states: expected a multiple of 4 words, got {words}")
    slots_at, rows, id_type, _ = vector(slots, "slots", IDS, device)
    refuse_overlap("states", own, "slots", tensor(slots, "slots", IDS, (1,), device))
    if device < 0:
        return host(reference.advance_states, states, slots, signal=signal)  # type: ignore[no-any-return]
    counters = signal_pointer(signal, device) if signal is not None else 0
    handle = choose(stream, states)
    if rows == 0 or layers == 0 or words == 0:
        return nothing()  # type: ignore[no-any-return]
    if not multiple_of(16, pointer) or not multiple_of(4, layer_stride, slot_stride):
        raise ArgumentError(f"states: expected an address that is a multiple of 16 and strides of 4, got {pointer:#x}, {layer_stride}, {slot_stride}")
    chunks = blocks_for(words // 4, _THREADS * _VECTORS)
    arguments = (
        pointer, layer_stride // 4, slot_stride // 4, slot_count, words // 4, slots_at, ITEMSIZE[id_type], rows, chunks,
        hinted if scattered else 2 * hinted, share, counters,
    )  # fmt: skip
    return _ADVANCE_STATES.launch((), device, handle, layers * rows * chunks, _THREADS, arguments)  # type: ignore[no-any-return]


@operation
def stream_weights(weights: Any, out: Any, *, keep: float | None = None, stream: Any = None) -> Any:
    """Read weights once and leave a sum for every block.

    Parameters
    ----------
    weights : int32 array, shape (words,)
        A multiple of 4 words at an address that is a multiple of 16.
    out : int32 array, shape (blocks,)
        One block of 512 threads per element; four a multiprocessor reach the memory's rate. Receives the sum, modulo 2^32, of ``x ^ y ^ z ^ w``
        over the vectors of four words that the block reads: vector i is read by thread ``i % (512 * blocks)``.
    keep : float, optional
        As in `advance_states`: 0 asks the L2 to give the weights up first.
    stream : stream, optional
        Where to launch; the current stream of `weights`' library by default.

    Returns
    -------
    int32 array, shape (blocks,)
        `out`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An array has the wrong dtype, shape, alignment or device, both overlap, or `keep` is not from 0 to 1. Nothing is launched.

    Notes
    -----
    One launch, no host synchronisation, safe inside a capture.

    Examples
    --------
    >>> stream_weights(np.array([1, 2, 4, 8], np.int32), np.zeros(2, np.int32))
    array([15,  0], dtype=int32)
    """
    hinted, share = _hint(keep)
    pointer, words, _, device = vector(weights, "weights", _INT32)
    if words % 4:
        raise ArgumentError(f"weights: expected a multiple of 4 words, got {words}")
    out_at, blocks, _, _ = output(out, "out", _INT32, device)
    refuse_overlap("out", tensor(out, "out", _INT32, (1,), device), "weights", tensor(weights, "weights", _INT32, (1,), device))
    if device < 0:
        return host(reference.stream_weights, weights, out)
    handle = choose(stream, weights)
    if blocks == 0:
        return nothing(out)
    require_aligned("weights", pointer)
    arguments = (pointer, words // 4, out_at, hinted, share)
    return _STREAM_WEIGHTS.launch((), device, handle, blocks, _STREAM_THREADS, arguments, out)
