"""Whole states of recurrent layers on the move: between slots of a pool, from the steps of a verification into slots, or cleared.

A state has parts, like the history of the convolution (bfloat16) and the recurrent matrix (float32), each in a pool of its own. Every op takes up
to four parts and moves them in one launch. The ops know bytes only; what a state is, is told by `conv` and the gated delta rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from gpukit.arrays import ITEMSIZE, vector
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels._plans import signal_pointer
from gpukit.kernels._tensors import Tensor, refuse_overlap, same_bytes, tensor
from gpukit.kernels.reference import state_slots as reference
from gpukit.launch import IDS, Kernel, host, nothing, operation
from gpukit.streams import choose

__all__ = ["clear_slots", "copy_slots", "scatter_states", "track_states"]

_MOVE_STATES = Kernel("state_slots", "move_states", language="cuda", early=True)

# THREADS, STEPS and parts of cuda/state_slots.cu; bytes of one access.
_THREADS = 128
_STEPS = 4
_MOST_PARTS = 4
_VECTOR = 16

_ANY = tuple(ITEMSIZE)
_DIMENSIONS = tuple(range(3, 9))
_MOST_BLOCKS = 2**31 - 1
_NO_PART = (0, 0, 0, 0, 0)

Arrays = Any | Sequence[Any]


@operation
def copy_slots(pools: Arrays, source: Any, destination: Any, *, stream: Any = None, signal: Signal | None = None) -> Any:
    """Copy the state of slot `source[i]` onto slot `destination[i]`, in every layer of every part.

    Parameters
    ----------
    pools : array, or sequence of at most 4 arrays, shape (layers, slots, …)
        The parts of the states, of any dtypes, with the same layers and slots. A state is contiguous, of a multiple of 16 bytes at a multiple of
        16; the strides of layers and slots are free (not negative): layer-major, slot-major or one part of a page. Written.
    source, destination : int32 or int64 array, shape (n,)
        A pair with a negative slot is skipped, one with a slot past the end is skipped and counted as ``out_of_range``. Destinations are distinct;
        of pairs with equal ones the first counts, the others are skipped and counted as ``unbound``. No destination is another pair's source.
    stream : stream, optional
        Where to launch; the current stream of the first pool's library by default.
    signal : Signal, optional
        Counts ``out_of_range`` and ``unbound``, once a pair.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Parts do not fit each other, a state is not contiguous or not aligned, or an array has the wrong dtype, shape or device. Nothing is launched.

    Notes
    -----
    One launch whatever the number of parts, no host synchronisation, no scratch memory, safe inside a capture. Where a slot is a destination and
    another pair's source, the bytes that are copied from it are some of either.

    Examples
    --------
    >>> history, state = np.arange(24, dtype=np.uint16).reshape(1, 3, 8), np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    >>> copy_slots((history, state), np.array([2]), np.array([0]))
    >>> history[0, 0], state[0, 0]
    (array([16, 17, 18, 19, 20, 21, 22, 23], dtype=uint16), array([ 8.,  9., 10., 11.], dtype=float32))
    """
    parts, layers, slot_count, device = _pools(pools)
    source_at, rows, source_type, _ = vector(source, "source", IDS, device)
    destination_at, length, destination_type, _ = vector(destination, "destination", IDS, device)
    if length != rows:
        raise ArgumentError(f"destination: expected shape ({rows},) like source, got ({length},)")
    if device < 0:
        return host(reference.copy_slots, _as_list(pools), source, destination, signal=signal)
    # The pool is the source too: its slots are the steps of a single row.
    moves = [(part, part[0], _units(part, 0), 0, _units(part, 1)) for part in parts]
    indices = (destination_at, ITEMSIZE[destination_type], source_at, ITEMSIZE[source_type], 0, 0)
    return _launch(moves, indices, rows, slot_count, slot_count, layers, device, pools, stream, signal)


@operation
def clear_slots(pools: Arrays, slots: Any, *, stream: Any = None, signal: Signal | None = None) -> Any:
    """Fill slots with zero bytes, in every layer of every part.

    Parameters
    ----------
    pools : array, or sequence of at most 4 arrays, shape (layers, slots, …)
        As in `copy_slots`. Written.
    slots : int32 or int64 array, shape (n,)
        Negative ones are skipped; those past the end are skipped and counted as ``out_of_range``, repeated ones as ``unbound``.
    stream, signal
        As in `copy_slots`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `copy_slots`. Nothing is launched.

    Notes
    -----
    As in `copy_slots`.

    Examples
    --------
    >>> state = np.ones((1, 3, 4), np.float32)
    >>> clear_slots(state, np.array([1, -1]))
    >>> state[0, :, 0]
    array([1., 0., 1.], dtype=float32)
    """
    parts, layers, slot_count, device = _pools(pools)
    slots_at, rows, id_type, _ = vector(slots, "slots", IDS, device)
    if device < 0:
        return host(reference.clear_slots, _as_list(pools), slots, signal=signal)
    moves = [(part, 0, 0, 0, 0) for part in parts]
    indices = (slots_at, ITEMSIZE[id_type], 0, 0, 0, 0)
    return _launch(moves, indices, rows, slot_count, 1, layers, device, pools, stream, signal)


@operation
def scatter_states(sources: Arrays, pools: Arrays, slots: Any, steps: Any, *, stream: Any = None, signal: Signal | None = None) -> Any:
    """Commit one of the recorded states of every row: ``pool[l, slots[r]] = source[l, r, steps[r]]`` for every part and layer.

    Parameters
    ----------
    sources : array, or sequence of at most 4 arrays, shape (layers, rows, steps, …)
        The recorded states, a part each, in the order of `pools`: dtype (uint16 stands for bfloat16, uint8 for float8) and shape of a state are
        those of the pool. Contiguity and alignment as in `copy_slots`; layers, rows and steps have strides of their own.
    pools : array, or sequence of at most 4 arrays, shape (layers, slots, …)
        As in `copy_slots`. Written.
    slots : int32 or int64 array, shape (rows,)
        Where each row goes. Negative ones are skipped; those past the end are skipped and counted as ``out_of_range``, repeated ones (after the
        first) as ``unbound``.
    steps : int32 or int64 array, shape (rows,)
        Which state of each row. Rows with a negative step are skipped and claim no slot; steps past the end are skipped and counted as
        ``out_of_range``.
    stream, signal
        As in `copy_slots`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `copy_slots`; also where a source overlaps a pool. Nothing is launched.

    Notes
    -----
    As in `copy_slots`. The commit of a speculative round that snapshots every step.

    Examples
    --------
    >>> recorded = np.arange(8, dtype=np.float32).repeat(4).reshape(1, 2, 4, 4)  # two rows of four steps
    >>> pool = np.zeros((1, 3, 4), np.float32)
    >>> scatter_states(recorded, pool, np.array([2, 0]), np.array([1, -1]))
    >>> pool[0, :, 0]
    array([0., 0., 1.], dtype=float32)
    """
    return _scatter(sources, pools, slots, steps, None, None, stream, signal)


@operation
def track_states(
    sources: Arrays,
    pools: Arrays,
    slots: Any,
    steps: Any,
    track_slots: Any,
    track_steps: Any,
    *,
    stream: Any = None,
    signal: Signal | None = None,
) -> Any:
    """Commit as `scatter_states` does, and in the same launch keep a second state of some rows in slots of their own.

    Parameters
    ----------
    sources, pools, slots, steps, stream, signal
        As in `scatter_states`.
    track_slots, track_steps : int32 or int64 array, shape (rows,)
        The second set, of the dtypes of `slots` and `steps` and with the same rules: a row whose step is negative tracks nothing. A tracking slot
        that `slots` writes too is skipped and counted as ``unbound``.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `scatter_states`. Nothing is launched.

    Notes
    -----
    As in `copy_slots`. For prefix caches, which want the state at a page boundary that the accepted tokens passed.

    Examples
    --------
    >>> recorded = np.arange(8, dtype=np.float32).repeat(4).reshape(1, 2, 4, 4)
    >>> pool = np.zeros((1, 4, 4), np.float32)
    >>> track_states(recorded, pool, np.array([0, 1]), np.array([3, 2]), np.array([3, 2]), np.array([1, -1]))
    >>> pool[0, :, 0]
    array([3., 6., 0., 1.], dtype=float32)
    """
    return _scatter(sources, pools, slots, steps, track_slots, track_steps, stream, signal, track=True)


def _scatter(
    sources: Arrays,
    pools: Arrays,
    slots: Any,
    steps: Any,
    track_slots: Any,
    track_steps: Any,
    stream: Any,
    signal: Signal | None,
    track: bool = False,
) -> Any:
    parts, layers, slot_count, device = _pools(pools)
    recorded = [_states(array, name, 3, device) for name, array in _named(sources, "sources")]
    if len(recorded) != len(parts):
        raise ArgumentError(f"sources: expected {len(parts)} parts like pools, got {len(recorded)}")
    rows, step_count = recorded[0][1][1:3]
    for number, (part, origin) in enumerate(zip(parts, recorded, strict=True)):
        name = f"sources[{number}]"
        if not same_bytes(origin[3], part[3]):
            raise ArgumentTypeError(f"{name}: expected dtype {part[3]} like pools[{number}], got {origin[3]}")
        expected = (layers, rows, step_count, *part[1][2:])
        if origin[1] != expected:
            raise ArgumentError(f"{name}: expected shape {expected}, got {origin[1]}")
        for other, pool in enumerate(parts):
            refuse_overlap(name, origin, f"pools[{other}]", pool)
    slots_at, length, slot_type, _ = vector(slots, "slots", IDS, device)
    steps_at, steps_length, step_type, _ = vector(steps, "steps", IDS, device)
    lengths = {"slots": length, "steps": steps_length}
    track_slots_at = track_steps_at = 0
    if track:
        track_slots_at, lengths["track_slots"], _, _ = vector(track_slots, "track_slots", (slot_type,), device)
        track_steps_at, lengths["track_steps"], _, _ = vector(track_steps, "track_steps", (step_type,), device)
    for name, length in lengths.items():
        if length != rows:
            raise ArgumentError(f"{name}: expected shape ({rows},), the rows of sources, got ({length},)")
    if device < 0:
        sets = [(slots, steps), (track_slots, track_steps)] if track else [(slots, steps)]
        return host(reference.scatter_states, _as_list(sources), _as_list(pools), sets, signal=signal)
    moves = [(part, origin[0], _units(origin, 0), _units(origin, 1), _units(origin, 2)) for part, origin in zip(parts, recorded, strict=True)]
    indices = (slots_at, ITEMSIZE[slot_type], steps_at, ITEMSIZE[step_type], track_slots_at, track_steps_at)
    return _launch(moves, indices, rows, slot_count, step_count, layers, device, pools, stream, signal)


def _as_list(arrays: Arrays) -> list[Any]:
    return list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]


def _named(arrays: Arrays, name: str) -> list[tuple[str, Any]]:
    """The parts, each with how a message calls it."""
    parts = _as_list(arrays)
    if not 0 < len(parts) <= _MOST_PARTS:
        raise ArgumentError(f"{name}: expected 1 … {_MOST_PARTS} parts, got {len(parts)}")
    return [(f"{name}[{number}]", part) for number, part in enumerate(parts)]


def _pools(pools: Arrays) -> tuple[list[Tensor], int, int, int]:
    """The parts of a pool, its layers and slots, and its device."""
    parts: list[Tensor] = []
    for name, array in _named(pools, "pools"):
        parts.append(_states(array, name, 2, parts[0][4] if parts else None, written=True))
        if parts[-1][1][:2] != parts[0][1][:2]:
            raise ArgumentError(f"{name}: expected the layers and slots of pools[0], {parts[0][1][:2]}, got shape {parts[-1][1]}")
    layers, slots = parts[0][1][:2]
    return parts, layers, slots, parts[0][4]


def _states(array: Any, name: str, leading: int, device: int | None, written: bool = False) -> Tensor:
    """One part: states behind `leading` strided dimensions, each contiguous and aligned."""
    own = tensor(array, name, _ANY, _DIMENSIONS[leading - 2 :], device, contiguous=-leading, written=written)
    pointer, shape, strides, dtype, where = own
    size = ITEMSIZE[dtype]
    state_bytes = prod(shape[leading:]) * size
    if state_bytes == 0 or state_bytes % _VECTOR:
        raise ArgumentError(f"{name}: expected states of a multiple of {_VECTOR} bytes, got {state_bytes} bytes, shape {shape}")
    if pointer % _VECTOR and where >= 0:
        raise ArgumentError(f"{name}: expected an address that is a multiple of {_VECTOR}, got {pointer:#x}")
    for length, stride in zip(shape[:leading], strides[:leading], strict=True):
        if length > 1 and (stride < 0 or stride * size % _VECTOR or stride * size >= _VECTOR << 32):
            raise ArgumentError(f"{name}: expected strides that are multiples of {_VECTOR} bytes and not negative, got element strides {strides}")
    return own


def _units(own: Tensor, axis: int) -> int:
    """A stride in vectors; one that leads nowhere is 0."""
    return own[2][axis] * ITEMSIZE[own[3]] // _VECTOR if own[1][axis] > 1 else 0


def _launch(
    moves: list[tuple[Tensor, int, int, int, int]],
    indices: tuple[int, ...],
    rows: int,
    slot_count: int,
    step_count: int,
    layers: int,
    device: int,
    pools: Arrays,
    stream: Any,
    signal: Signal | None,
) -> Any:
    counters = signal_pointer(signal, device) if signal is not None else 0
    if rows == 0 or layers == 0:
        return nothing()
    described: tuple[int, ...] = ()
    pieces = 0
    for part, source_at, source_layer, source_row, source_step in moves:
        vectors = prod(part[1][2:]) * ITEMSIZE[part[3]] // _VECTOR
        pieces += -(-vectors // (_THREADS * _STEPS))
        described += (
            source_at, part[0], _both(source_layer, source_row), _both(source_step, vectors), _both(_units(part, 0), _units(part, 1)),
        )  # fmt: skip
    blocks = rows * layers * pieces
    if blocks > _MOST_BLOCKS:
        raise ArgumentError(f"pools: expected at most {_MOST_BLOCKS} pieces of {_THREADS * _STEPS * _VECTOR} bytes to move, got {blocks}")
    described += _NO_PART * (_MOST_PARTS - len(moves))
    arguments = (*indices, rows, slot_count, step_count, pieces, layers, counters, *described)
    return _MOVE_STATES.launch((), device, choose(stream, _as_list(pools)[0]), blocks, _THREADS, arguments)


def _both(low: int, high: int) -> int:
    """Two numbers of 32 bits in one parameter, which is signed."""
    both = low | high << 32
    return both - (1 << 64) if both >> 63 else both
