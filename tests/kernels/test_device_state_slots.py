"""State moves: their arguments and their NumPy backend anywhere, their kernel against the reference on a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpukit.compile.cuda_c import source_path
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels import state_slots

POOL, IDS = np.zeros((2, 4, 2, 4), np.float32), np.array([1, 2])
SOURCE = np.ones((2, 2, 3, 2, 4), np.float32)
READ_ONLY = POOL.copy()
READ_ONLY.flags.writeable = False
copy, clear, scatter, track = state_slots.copy_slots, state_slots.clear_slots, state_slots.scatter_states, state_slots.track_states
WIDE = np.zeros((2, 4, 2, 5), np.float32)

VALUE, TYPE = ArgumentError, ArgumentTypeError
BAD_CALLS = [
    (lambda: clear((), IDS), VALUE, "pools: expected 1 … 4 parts, got 0"),
    (lambda: clear([POOL] * 5, IDS), VALUE, "pools: expected 1 … 4 parts, got 5"),
    (lambda: clear((POOL, None), IDS), TYPE, r"pools\[1\]: expected an array .* got NoneType"),
    (lambda: clear(POOL[0, 0], IDS), VALUE, r"pools\[0\]: expected 3 or .* dimensions, got shape \(2, 4\)"),
    (lambda: clear((POOL, POOL[:, :3]), IDS), VALUE, r"pools\[1\]: expected the layers and slots of pools\[0\], \(2, 4\), got shape \(2, 3, 2, 4\)"),
    (lambda: clear(WIDE[..., :4], IDS), VALUE, r"pools\[0\]: expected the last 2 dimensions contiguous"),
    (lambda: clear(POOL[..., :1, :3], IDS), VALUE, r"pools\[0\]: expected states of a multiple of 16 bytes, got 12 bytes"),
    (lambda: clear(POOL[..., :0], IDS), VALUE, r"pools\[0\]: expected states of a multiple of 16 bytes, got 0 bytes"),
    (lambda: clear(POOL[:, ::-1], IDS), VALUE, r"pools\[0\]: expected strides that are multiples of 16 bytes and not negative"),
    (lambda: clear(READ_ONLY, IDS), VALUE, r"pools\[0\]: expected a writable array"),
    (lambda: clear(np.lib.stride_tricks.as_strided(POOL, (2, 4, 4), (0, 16, 4)), IDS), VALUE, r"pools\[0\]: expected elements apart"),
    (lambda: clear(POOL, IDS * 1.0), TYPE, "slots: expected dtype int32 or int64, got float64"),
    (lambda: copy(POOL, IDS, IDS[:1]), VALUE, r"destination: expected shape \(2,\) like source, got \(1,\)"),
    (lambda: scatter((SOURCE, SOURCE), POOL, IDS, IDS), VALUE, "sources: expected 1 parts like pools, got 2"),
    (lambda: scatter(SOURCE.view(np.int32), POOL, IDS, IDS), TYPE, r"sources\[0\]: expected dtype float32 like pools\[0\], got int32"),
    (lambda: scatter(SOURCE[:1], POOL, IDS, IDS), VALUE, r"sources\[0\]: expected shape \(2, 2, 3, 2, 4\), got \(1, 2, 3, 2, 4\)"),
    (lambda: scatter(POOL[:, :2, None], POOL, IDS, IDS), VALUE, r"sources\[0\]: expected memory apart from pools\[0\]"),
    (lambda: scatter(SOURCE, POOL, IDS[:1], IDS), VALUE, r"slots: expected shape \(2,\), the rows of sources, got \(1,\)"),
    (lambda: scatter(SOURCE, POOL, IDS, IDS[:1]), VALUE, r"steps: expected shape \(2,\), the rows of sources, got \(1,\)"),
    (lambda: track(SOURCE, POOL, IDS, IDS, IDS[:1], IDS), VALUE, r"track_slots: expected shape \(2,\)"),
    (lambda: track(SOURCE, POOL, IDS, IDS, IDS, IDS.astype("int32")), TYPE, "track_steps: expected dtype int64, got int32"),
    (lambda: track(SOURCE, POOL, IDS, IDS, None, IDS), TYPE, "track_slots: expected an array"),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[message for _, _, message in BAD_CALLS])
def test_bad_arguments_are_named_and_nothing_is_written(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
    assert not POOL.any() and not WIDE.any()


def test_numpy_arrays_run_the_reference() -> None:
    pool, history = POOL.copy(), np.zeros((2, 4, 8), ml_dtypes.bfloat16)
    recorded, signal = np.arange(96).reshape(2, 2, 3, 8).astype(np.uint16), Signal()
    state_slots.track_states(
        (SOURCE, recorded), (pool, history), np.array([3, 0]), np.array([2, -1]), np.array([1, 9]), np.array([0, 0]), signal=signal
    )
    assert (pool[:, [1, 3]] == 1).all() and not pool[:, [0, 2]].any() and signal.counts() == {"out_of_range": 1}
    assert (history.view(np.uint16)[:, 3] == recorded[:, 0, 2]).all() and (history.view(np.uint16)[:, 1] == recorded[:, 0, 0]).all()
    call = state_slots.copy_slots.prepare([pool, history], np.array([3]), np.array([2]))
    call()
    state_slots.clear_slots([pool, history], np.array([3], np.int32))
    call()
    assert not pool[:, 2].any() and not history[:, 2].any()


def test_the_constants_of_the_plan_are_those_of_the_kernel() -> None:
    source = source_path("state_slots").read_text()
    constants = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", source)}
    assert (constants["THREADS"], constants["STEPS"]) == (state_slots._THREADS, state_slots._STEPS)
    assert f"destination{state_slots._MOST_PARTS - 1}," in source and f"destination{state_slots._MOST_PARTS}," not in source


# On a GPU.


@pytest.fixture
def card() -> Iterator[Any]:
    """A GPU through CuPy, whose arrays lie between guard bytes."""
    from tests.helpers.device import CupyDevice

    made = CupyDevice()
    yield made
    made.check_guards()


LAYERS, SLOTS = 3, 11
# Bytes of a state by part: one vector, an odd number of them, about a block's piece, several pieces.
PARTS = [(16,), (48, 8192), (8176, 16, 24_592), (1040, 8208, 16, 112)]
DTYPES = (np.uint16, np.float32, np.uint8, np.int64)


class Memory:
    """Pools and recorded states of some parts in one buffer each; `views` makes them of a buffer, wherever it lies."""

    def __init__(self, sizes: tuple[int, ...], layout: str, rows: int, steps: int):
        self.sizes, self.layout, self.rows, self.steps = sizes, layout, rows, steps
        self.entry = sum(sizes) + 32
        rng = np.random.default_rng(rows)
        self.pool, self.recorded = (
            rng.integers(0, 256, size, dtype=np.uint8) for size in (LAYERS * SLOTS * self.entry, LAYERS * rows * steps * self.entry)
        )

    def views(self, buffer: Any, leading: tuple[int, ...]) -> list[Any]:
        """A part each; `layout` says whether layers are outermost or slots (or rows) are, and parts of an entry lie side by side."""
        strides = [self.entry] * len(leading)
        order = range(len(leading)) if self.layout == "layer-major" else (*range(1, len(leading)), 0)
        stride = self.entry
        for axis in reversed(list(order)):
            strides[axis] = stride
            stride *= leading[axis]
        views, offset = [], 0
        for size, dtype in zip(self.sizes, DTYPES, strict=False):
            shape = (*leading, size // np.dtype(dtype).itemsize)
            views.append(strided(buffer, offset, shape, (*strides, np.dtype(dtype).itemsize), dtype))
            offset += size + 16 * (offset == 0)
        return views


def strided(buffer: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
    """A view with byte strides of a buffer of any of the libraries in play."""
    if isinstance(buffer, np.ndarray):
        return np.empty(shape, dtype) if 0 in shape else np.ndarray(shape, dtype, buffer, offset, strides)
    if hasattr(buffer, "values"):
        return type(buffer)(strided(buffer.values, offset, shape, strides, dtype), buffer.owner)
    import cupy

    return cupy.empty(shape, dtype) if 0 in shape else cupy.ndarray(shape, dtype, buffer[offset:].data, strides=strides)


def indices(rng: np.random.Generator, rows: int, past: int, dtype: str) -> np.ndarray:
    """Indices with negative ones, ones past the end and repeated ones among them."""
    found = rng.integers(0, past, rows)
    return np.where(rng.random(rows) < 0.25, rng.choice([-1, -9, past, 2**31 - 1], rows), found).astype(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("id_dtype", ["int32", "int64"])
@pytest.mark.parametrize("layout", ["layer-major", "slot-major"])
@pytest.mark.parametrize("sizes", PARTS)
@pytest.mark.parametrize("rows", [0, 1, 5, 40])
@pytest.mark.parametrize("with_track", [False, True])
def test_scatter_and_track_equal_the_reference(card: Any, with_track: bool, rows: int, sizes: tuple[int, ...], layout: str, id_dtype: str) -> None:
    rng = np.random.default_rng(rows + len(sizes))
    memory, steps = Memory(sizes, layout, rows, 3), 3
    sets = [indices(rng, rows, past, id_dtype) for past in (SLOTS, steps, SLOTS, steps)]
    there = [card.array(array) for array in (memory.pool, memory.recorded, *sets)]
    recorded, signals = memory.recorded.copy(), (Signal(), Signal(like=there[0]))
    for (pool, states, *where), signal in (((memory.pool, memory.recorded, *sets), signals[0]), (there, signals[1])):
        pools, sources = memory.views(pool, (LAYERS, SLOTS)), memory.views(states, (LAYERS, rows, steps))
        if with_track:
            state_slots.track_states(sources, pools, *where, signal=signal)
        else:
            state_slots.scatter_states(sources, pools, *where[:2], signal=signal)
    assert (card.host(there[0]) == memory.pool).all() and (card.host(there[1]) == recorded).all()
    assert signals[1].counts() == signals[0].counts()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["layer-major", "slot-major"])
@pytest.mark.parametrize("sizes", PARTS)
@pytest.mark.parametrize("rows", [0, 1, 2, 30])
def test_copy_and_clear_equal_the_reference(card: Any, rows: int, sizes: tuple[int, ...], layout: str) -> None:
    rng = np.random.default_rng(rows + len(sizes))
    memory = Memory(sizes, layout, 1, 1)
    # Sources are the lower slots, destinations the upper ones.
    source, destination = indices(rng, rows, 5, "int32"), indices(rng, rows, SLOTS - 5, "int64")
    source, destination = np.where(source == 5, SLOTS, source).astype("int32"), np.where(destination >= 0, destination + 5, destination)
    cleared = indices(rng, rows, SLOTS, "int32")
    there = [card.array(array) for array in (memory.pool, source, destination, cleared)]
    signals = Signal(), Signal(like=there[0])
    for (pool, origins, targets, slots), signal in (((memory.pool, source, destination, cleared), signals[0]), (there, signals[1])):
        pools = memory.views(pool, (LAYERS, SLOTS))
        state_slots.copy_slots(pools, origins, targets, signal=signal)
        state_slots.clear_slots(pools, slots, signal=signal)
    assert (card.host(there[0]) == memory.pool).all()
    assert signals[1].counts() == signals[0].counts()


@pytest.mark.gpu
def test_many_rows_find_their_duplicates(card: Any) -> None:
    pool, source = np.zeros((1, 700, 4), np.float32), np.arange(300, dtype=np.float32).repeat(4).reshape(1, 300, 1, 4)
    slots, steps = np.arange(300), np.zeros(300, np.int64)
    slots[299], slots[140], steps[0] = 7, 0, -1
    there, signal = card.array(pool), Signal(like=card.array(pool))
    state_slots.scatter_states(card.array(source), there, card.array(slots), card.array(steps), signal=signal)
    found = card.host(there)[0, :, 0]
    assert signal.counts() == {"unbound": 1} and found[0] == 140 and found[7] == 7 and found[299] == 0 and not found[300:].any()


@pytest.mark.gpu
def test_bad_device_arguments_are_named(card: Any) -> None:
    memory = card.array(np.zeros(132, np.uint8))
    with pytest.raises(ArgumentError, match=r"pools\[0\]: expected an address that is a multiple of 16, got 0x"):
        state_slots.clear_slots(strided(memory, 4, (1, 2, 4), (64, 16, 4), np.float32), card.array(IDS))
    pool = strided(memory, 0, (1, 2, 4), (64, 16, 4), np.float32)
    with pytest.raises(ArgumentTypeError, match=r"pools\[1\]: expected an array in device 0 like the first argument"):
        state_slots.clear_slots((pool, POOL[:1, :2]), card.array(IDS))
    with pytest.raises(ArgumentError, match="signal: expected a Signal of device 0"):
        state_slots.clear_slots(pool, card.array(IDS), signal=Signal())


def small_calls() -> dict[str, Any]:
    """By op: its arguments made of the arrays of a small call."""
    pools = ("history", "state")
    return {
        "copy_slots": lambda a: (([a[key] for key in pools], a["steps"], a["slots"]), {}),
        "clear_slots": lambda a: (([a[key] for key in pools], a["slots"]), {}),
        "scatter_states": lambda a: ((a["recorded"], a["state"], a["slots"], a["steps"]), {}),
        "track_states": lambda a: ((a["recorded"], a["state"], a["slots"], a["steps"], a["track"], a["steps"]), {}),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", state_slots.__all__)
def test_prepared_and_captured_calls_equal_eager_ones(card: Any, name: str) -> None:
    from tests.helpers.replay import require_same, twice_three_ways

    rng = np.random.default_rng(4)
    arrays = {"state": rng.random((2, 9, 4, 32), np.float32), "recorded": rng.random((2, 3, 4, 4, 32), np.float32)}
    arrays |= {"history": rng.integers(0, 99, (2, 9, 3, 64)).astype(np.uint16), "slots": np.array([4, 7, -1]), "steps": np.array([3, 0, 1])}
    arrays |= {"track": np.array([8, -1, 5])}
    ways = twice_three_ways(card, "state_slots", getattr(state_slots, name), arrays, small_calls()[name])
    require_same(ways)
    assert (ways[0]["state"] != arrays["state"]).any()
