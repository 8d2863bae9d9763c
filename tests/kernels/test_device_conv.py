"""The decode convolution: its arguments and its NumPy backend anywhere, its kernel against the reference on a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpukit.compile.cuda_c import source_path
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels import conv
from tests.helpers.bf16 import check, numbers, random_bits

X, W, OUT = np.ones((2, 3, 8), np.uint16), np.ones((8, 4), np.uint16), np.zeros((2, 3, 8), np.uint16)
HISTORY, LOG, SLOTS = np.zeros((4, 3, 8), np.uint16), np.zeros((2, 4, 8), np.uint16), np.array([1, 3])
BOTH = np.zeros((2, 6, 8), np.uint16)
READ_ONLY = HISTORY.copy()
READ_ONLY.flags.writeable = False
update, record = conv.conv1d_silu, conv.conv1d_silu_record

VALUE, TYPE = ArgumentError, ArgumentTypeError
BAD_CALLS = [
    (lambda: update(X[0], W, HISTORY, SLOTS, out=OUT), VALUE, r"x: expected 3 dimensions, got shape \(3, 8\)"),
    (lambda: update(X.view(np.int16), W, HISTORY, SLOTS, out=OUT), TYPE, "x: expected dtype bfloat16 or uint16, got int16"),
    (lambda: update(X[:, :, ::2], W[:4], HISTORY, SLOTS, out=OUT), VALUE, "x: expected the last 1 dimension contiguous"),
    (lambda: update(X, W[:, :3].copy(), HISTORY, SLOTS, out=OUT), VALUE, r"weight: expected shape \(8, 4\), .* got \(8, 3\)"),
    (lambda: update(X, W[:7], HISTORY, SLOTS, out=OUT), VALUE, r"weight: expected shape \(8, 4\), .* got \(7, 4\)"),
    (lambda: update(X, W[::2], HISTORY, SLOTS, out=OUT), VALUE, "weight: expected a contiguous array"),
    (lambda: update(X, W, HISTORY[:, :2], SLOTS, out=OUT), VALUE, r"history: expected shape \(slots, 3, 8\), got \(4, 2, 8\)"),
    (lambda: update(X, W, READ_ONLY, SLOTS, out=OUT), VALUE, "history: expected a writable array"),
    (lambda: update(X, W, HISTORY, SLOTS * 1.0, out=OUT), TYPE, "slots: expected dtype int32 or int64, got float64"),
    (lambda: update(X, W, HISTORY, SLOTS[:1], out=OUT), VALUE, r"slots: expected shape \(2,\), the rows of x, got \(1,\)"),
    (lambda: update(X, W, HISTORY, SLOTS, out=OUT[:, :2]), VALUE, r"out: expected shape \(2, 3, 8\) like x, got \(2, 2, 8\)"),
    (lambda: update(HISTORY[:2], W, HISTORY, SLOTS, out=OUT), VALUE, "history: expected memory apart from x"),
    (lambda: update(X, W, HISTORY, SLOTS, out=HISTORY[2:]), VALUE, "out: expected memory apart from history"),
    (lambda: record(X, W, HISTORY, SLOTS, LOG[:, :2], out=OUT), VALUE, r"log: expected shape \(2, at least 3, 8\), got \(2, 2, 8\)"),
    (lambda: record(X, W, HISTORY, SLOTS, LOG[:1], out=OUT), VALUE, r"log: expected shape \(2, at least 3, 8\), got \(1, 4, 8\)"),
    (lambda: record(X, W, HISTORY, SLOTS, BOTH[:, :3], out=BOTH[:, 2:5]), VALUE, "log: expected memory apart from out"),
    (lambda: record(BOTH[:, :3], W, HISTORY, SLOTS, BOTH[:, 2:], out=OUT), VALUE, "log: expected memory apart from x"),
    (lambda: record(X, W, HISTORY, SLOTS, HISTORY[:2], out=OUT), VALUE, "log: expected memory apart from history"),
    (lambda: record(X, W, HISTORY, SLOTS, LOG, out=OUT, valid=SLOTS[:1]), VALUE, r"valid: expected shape \(2,\), .* got \(1,\)"),
    (lambda: record(X, W, HISTORY, SLOTS, LOG, out=OUT, accepted=SLOTS), VALUE, "accepted: expected an array with previous, and only then"),
    (lambda: record(X, W, HISTORY, SLOTS, LOG, out=OUT, previous=LOG, accepted=SLOTS), VALUE, "previous: expected memory apart from log"),
    (lambda: record(X, W, HISTORY, SLOTS, LOG, out=OUT, previous=X[:1], accepted=SLOTS), VALUE, r"previous: expected shape \(2, any, 8\)"),
    (lambda: record(X, W, HISTORY, SLOTS, LOG, out=OUT, previous=X, accepted=SLOTS[:1]), VALUE, r"accepted: expected shape \(2,\)"),
    (lambda: record(X, W, READ_ONLY, SLOTS, LOG, out=OUT, previous=X, accepted=SLOTS), VALUE, "history: expected a writable array"),
    (lambda: record(X, W, HISTORY, SLOTS, None, out=OUT), TYPE, "log: expected an array"),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[message for _, _, message in BAD_CALLS])
def test_bad_arguments_are_named_and_nothing_is_written(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
    assert not OUT.any() and not HISTORY.any() and not LOG.any() and not BOTH.any()


def test_interleaved_log_and_output_are_apart() -> None:
    out = record(X, W, HISTORY, SLOTS, BOTH[:, ::2], out=BOTH.copy()[:, 1::2])
    assert (BOTH[:, ::2] == X).all() and not BOTH[:, 1::2].any() and out.shape == X.shape
    BOTH[...] = 0


def test_numpy_arrays_run_the_reference() -> None:
    history, signal = HISTORY.copy(), Signal()
    assert conv.conv1d_silu(X, W, history, np.array([3, 4]), signal=signal).shape == X.shape
    assert (history[3] == 1).all() and signal.counts() == {"out_of_range": 1}
    call = conv.conv1d_silu.prepare(X[:, :1], W, history, np.array([0, 1]), out=OUT[:, :1].copy())
    call()
    call()
    assert (history[0] == [[0], [1], [1]]).all()


def test_the_constants_of_the_plan_are_those_of_the_kernel() -> None:
    sources = (source_path("conv"), source_path("conv").with_suffix(".cuh"))
    constants = {name: int(value) for source in sources for name, value in re.findall(r"constexpr int (\w+) = (\d+);", source.read_text())}
    assert (constants["THREADS"], constants["TAPS"]) == (conv._THREADS, conv._TAPS)


# On a GPU.


@pytest.fixture
def card() -> Iterator[Any]:
    """A GPU through CuPy, whose arrays lie between guard bytes."""
    from tests.helpers.device import CupyDevice

    made = CupyDevice()
    yield made
    made.check_guards()


def row_slots(rng: np.random.Generator, rows: int, slots: int, dtype: str) -> np.ndarray:
    """Slots with skipped ones, ones past the end and repeated ones among them."""
    some = rng.permutation(slots)[:rows]
    some = np.where(rng.random(rows) < 0.3, rng.choice([-1, -7, slots, 2**31 - 1], rows), some)
    return np.where(rng.random(rows) < 0.15, some[rng.integers(0, rows, rows)], some).astype(dtype) if rows else some.astype(dtype)


SHAPES = [(0, 1, 8), (1, 1, 8192), (8, 1, 256), (3, 4, 7), (2, 5, 1), (5, 2, 130), (4, 9, 255), (1, 16, 514), (140, 1, 32), (33, 3, 64)]


@pytest.mark.gpu
@pytest.mark.parametrize("id_dtype", ["int32", "int64"])
@pytest.mark.parametrize("padding", [0, 2, 3])
@pytest.mark.parametrize(("rows", "tokens", "channels"), SHAPES)
def test_update_equals_the_reference(card: Any, rows: int, tokens: int, channels: int, padding: int, id_dtype: str) -> None:
    rng = np.random.default_rng(rows + channels + padding)
    slots = rows + 3
    x, weight = random_bits(rng, rows, tokens, channels + padding), random_bits(rng, channels, 4)
    # Slots lie apart, as in a slot-major pool.
    pool, ids = random_bits(rng, slots, 4, channels + padding), row_slots(rng, rows, slots, id_dtype)
    out = np.full((rows, tokens, channels), 0x7FC0, np.uint16)
    there = [card.array(array) for array in (x, weight, pool, ids, out)]
    signals = Signal(), Signal(like=there[0])
    for (a, w, h, s, o), signal in (((x, weight, pool, ids, out), signals[0]), (there, signals[1])):
        conv.conv1d_silu(a[:, :, :channels], w, h[:, :3, :channels], s, out=o, signal=signal)
    found = card.host(there[4])
    skipped = out == 0x7FC0
    assert ((found == 0x7FC0) == skipped).all() and (card.host(there[2]) == pool).all()
    check(np.where(skipped, 0, found), numbers(np.where(skipped, 0, out).astype(np.uint16)))
    assert signals[1].counts() == signals[0].counts()


@pytest.mark.gpu
@pytest.mark.parametrize("id_dtype", ["int32", "int64"])
@pytest.mark.parametrize("with_valid", [False, True])
@pytest.mark.parametrize(("rows", "tokens", "channels"), SHAPES)
def test_record_equals_the_reference(card: Any, rows: int, tokens: int, channels: int, with_valid: bool, id_dtype: str) -> None:
    rng = np.random.default_rng(rows + channels)
    x, weight, history = random_bits(rng, rows, tokens, channels), random_bits(rng, channels, 4), random_bits(rng, rows + 3, 3, channels)
    ids, valid = row_slots(rng, rows, rows + 3, id_dtype), rng.integers(-1, tokens + 2, rows).astype(id_dtype)
    out, log = (np.full((rows, width, channels), 0x7FC0, np.uint16) for width in (tokens, tokens + 2))
    there = [card.array(array) for array in (x, weight, history, ids, log, out, valid)]
    signals = Signal(), Signal(like=there[0])
    for (a, w, h, s, kept, o, v), signal in (((x, weight, history, ids, log, out, valid), signals[0]), (there, signals[1])):
        conv.conv1d_silu_record(a, w, h, s, kept, out=o, valid=v if with_valid else None, signal=signal)
    found = card.host(there[5])
    skipped = out == 0x7FC0
    assert ((found == 0x7FC0) == skipped).all() and (card.host(there[2]) == history).all() and (card.host(there[4]) == log).all()
    check(np.where(skipped, 0, found), numbers(np.where(skipped, 0, out).astype(np.uint16)))
    assert signals[1].counts() == signals[0].counts()


@pytest.mark.gpu
@pytest.mark.parametrize("id_dtype", ["int32", "int64"])
@pytest.mark.parametrize(("rows", "tokens", "channels"), SHAPES)
def test_record_after_another_equals_the_reference(card: Any, rows: int, tokens: int, channels: int, id_dtype: str) -> None:
    rng = np.random.default_rng(rows + channels)
    x, weight, history = random_bits(rng, rows, tokens, channels), random_bits(rng, channels, 4), random_bits(rng, rows + 3, 3, channels)
    ids, accepted = row_slots(rng, rows, rows + 3, id_dtype), rng.integers(-1, 7, rows).astype(id_dtype)
    previous = random_bits(rng, rows, 5, channels)
    # What was not accepted is never read.
    previous[np.arange(5) >= accepted[:, None]] = 0x7FC0
    out, log = (np.full((rows, tokens, channels), 0x7FC0, np.uint16) for _ in range(2))
    there = [card.array(array) for array in (x, weight, history, ids, log, out, previous, accepted)]
    signals = Signal(), Signal(like=there[0])
    for (a, w, h, s, kept, o, p, m), signal in (((x, weight, history, ids, log, out, previous, accepted), signals[0]), (there, signals[1])):
        conv.conv1d_silu_record(a, w, h, s, kept, out=o, previous=p, accepted=m, signal=signal)
    found = card.host(there[5])
    skipped = out == 0x7FC0
    assert ((found == 0x7FC0) == skipped).all() and (card.host(there[2]) == history).all() and (card.host(there[4]) == log).all()
    check(np.where(skipped, 0, found), numbers(np.where(skipped, 0, out).astype(np.uint16)))
    assert signals[1].counts() == signals[0].counts()


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [64, 63])
def test_record_update_and_single_tokens_have_the_same_bits(card: Any, channels: int) -> None:
    rng = np.random.default_rng(channels)
    x, weight, slots = card.array(random_bits(rng, 3, 6, channels)), card.array(random_bits(rng, channels, 4)), card.array(np.array([2, 0, 1]))
    before = random_bits(rng, 3, 3, channels)
    first, second = card.array(before), card.array(before)
    recorded, updated, single, log = (card.array(np.zeros((3, 6, channels), np.uint16)) for _ in range(4))
    conv.conv1d_silu_record(x, weight, first, slots, log, out=recorded)
    assert (card.host(first) == before).all() and (card.host(log) == card.host(x)).all()
    conv.conv1d_silu(x, weight, first, slots, out=updated)
    for token in range(6):
        conv.conv1d_silu(x[:, token : token + 1], weight, second, slots, out=single[:, token : token + 1])
    assert (card.host(recorded) == card.host(updated)).all() and (card.host(single) == card.host(updated)).all()
    assert (card.host(first) == card.host(second)).all()
    conv.conv1d_silu(x, weight, card.array(before), slots, out=x)
    assert (card.host(x) == card.host(updated)).all()


@pytest.mark.gpu
def test_bad_device_arguments_are_named(card: Any) -> None:
    x, history = card.array(X), card.array(HISTORY)
    with pytest.raises(ArgumentTypeError, match="slots: expected an array in device 0"):
        conv.conv1d_silu(x, card.array(W), history, SLOTS, out=x)
    memory = card.array(np.zeros(33, np.uint16))
    odd = memory[1:]
    weight = type(odd)(odd.values.reshape(8, 4), odd.owner) if hasattr(odd, "values") else odd.reshape(8, 4)
    with pytest.raises(ArgumentError, match="weight: expected an address that is a multiple of 8, got 0x"):
        conv.conv1d_silu(x, weight, history, card.array(SLOTS), out=x)
    assert not card.host(history).any() and (card.host(x) == X).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", conv.__all__)
def test_prepared_and_captured_calls_equal_eager_ones(card: Any, name: str) -> None:
    from tests.helpers.replay import require_same, twice_three_ways

    rng = np.random.default_rng(4)
    arrays = {"x": random_bits(rng, 3, 4, 640), "weight": random_bits(rng, 640, 4), "history": random_bits(rng, 5, 3, 640)}
    arrays |= {"slots": np.array([4, 0, 2]), "out": np.zeros((3, 4, 640), np.uint16), "log": np.zeros((3, 4, 640), np.uint16)}
    inputs = ["x", "weight", "history", "slots"] + ["log"] * (name == "conv1d_silu_record")
    ways = twice_three_ways(card, "conv", getattr(conv, name), arrays, lambda a: (tuple(a[key] for key in inputs), {"out": a["out"]}))
    require_same(ways)
    assert ways[0]["out"].any()
