"""Convolution and verification in one kernel: arguments and NumPy anywhere, on a GPU the two ops to the bit.

Device arrays lie between guard bytes, logs are full of NaN, and pools have slots that nobody names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpukit import Signal
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.kernels import conv, gated_delta
from gpukit.kernels.state_pool import ReplayLog, StatePool
from tests.helpers.bf16 import bits, check, numbers, random_bits
from tests.helpers.gated_delta import GEOMETRIES, oracle, states_of
from tests.helpers.gated_delta_device import host, make_log, make_pool

# Anywhere: arguments.

CHANNELS = 256
X, W = np.zeros((2, 3, CHANNELS), np.uint16), np.zeros((CHANNELS, 4), np.uint16)
GATES = np.zeros((2, 3, 2), np.float32)
POOL = StatePool.allocate(2, 4, 2, 64, channels=CHANNELS)
LOG = ReplayLog.allocate(2, 2, 3, 1, 2, 64, channels=CHANNELS)
SLOTS = np.array([1, 2])
VALUE, TYPE = ArgumentError, ArgumentTypeError


def call(**changes: Any) -> Any:
    arguments = {"x": X, "weight": W, "g": GATES, "beta": GATES, "pool": POOL, "slots": SLOTS, "log": LOG, "layer": 1}
    return gated_delta.conv_record(**{**arguments, **changes})


def log_of(width: int = 3, key_heads: int = 1, channels: int = CHANNELS, rows: int = 2) -> ReplayLog:
    return ReplayLog.allocate(2, rows, width, key_heads, 2, 64, channels=channels)


BAD_CALLS = [
    (lambda: call(x=[1]), TYPE, "x: expected an array .* got list"),
    (lambda: call(x=X.astype(np.float32)), TYPE, "x: expected dtype bfloat16 or uint16, got float32"),
    (lambda: call(x=X[..., :128]), VALUE, r"x: expected shape \(B, T, 256\), as pool and log say, got \(2, 3, 128\)"),
    (lambda: call(x=X[0]), VALUE, r"x: expected shape \(B, T, 256\), .* got \(3, 256\)"),
    (lambda: call(x=X[..., ::-1]), VALUE, "x: expected channels that are contiguous within a token"),
    (lambda: call(x=np.zeros((2, 3, 260), np.uint16)[..., :256]), VALUE, "x: expected strides of multiples of 8 elements"),
    (lambda: call(x=np.zeros((2, 3, 264), np.uint16)[..., 4:260]), VALUE, "x: expected an address that is a multiple of 16, got 0x"),
    (lambda: call(weight=W[:, :3]), VALUE, r"weight: expected"),
    (lambda: call(weight=W[:64]), VALUE, r"weight: expected shape \(256, 4\), .* got \(64, 4\)"),
    (lambda: call(weight=np.zeros(1032, np.uint16)[4:-4].reshape(256, 4)), VALUE, "weight: expected an address that is a multiple of 16, got 0x"),
    (lambda: call(g=GATES[:, :2]), VALUE, r"g: expected shape \(2, 3, 2\), got \(2, 2, 2\)"),
    (lambda: call(beta=GATES.astype(float)), TYPE, "beta: expected dtype float32, got float64"),
    (lambda: call(pool=POOL.rec), TYPE, "pool: expected a StatePool, got ndarray"),
    (lambda: call(log=POOL), TYPE, "log: expected a ReplayLog, got StatePool"),
    (lambda: call(pool=StatePool.allocate(2, 4, 2, 64)), VALUE, "pool: expected 256 convolution channels like x, got 0"),
    (lambda: call(log=log_of(channels=0)), VALUE, "log: expected 256 convolution channels like x, got 0"),
    (lambda: call(log=log_of(key_heads=2)), VALUE, r"x: expected shape \(B, T, 384\), as pool and log say"),
    (lambda: call(log=log_of(width=2)), VALUE, "x: expected at most 2 tokens, of log's width and 16, got 3"),
    (lambda: call(log=log_of(rows=1)), VALUE, "log: expected 2 layers and at least 2 rows, got 2 and 1"),
    (lambda: call(x=LOG.conv[1]), VALUE, "log: expected memory apart from x"),
    (lambda: call(slots=SLOTS[:1]), VALUE, r"slots: expected shape \(2,\), one a sequence, got \(1,\)"),
    (lambda: call(valid=SLOTS * 1.0), TYPE, "valid: expected dtype int32 or int64, got float64"),
    (lambda: call(layer=2), VALUE, "layer: expected at most 1, the last of pool, got 2"),
    (lambda: call(prefetch_layer=2), VALUE, "prefetch_layer: expected at most 1, the last of pool, got 2"),
    (lambda: call(out=np.zeros((2, 3, 256), np.uint16)), VALUE, r"out: expected shape \(2, 3, 2, 64\), got \(2, 3, 256\)"),
]


@pytest.mark.parametrize(("bad_call", "kind", "message"), BAD_CALLS, ids=[message for _, _, message in BAD_CALLS])
def test_bad_arguments_are_named_and_nothing_is_written(bad_call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        bad_call()
    assert not any(array.any() for array in (POOL.rec, POOL.conv, LOG.k, LOG.v, LOG.gates, LOG.conv))


def test_an_empty_batch_gives_an_empty_array() -> None:
    assert call(x=X[:0], g=GATES[:0], beta=GATES[:0], slots=SLOTS[:0]).shape == (0, 3, 2, 64)


# Both: one op against two.


def columns_of(items: int, tokens: int, key_heads: int, heads: int, dim: int) -> dict[str, np.ndarray]:
    """Raw columns, taps and gates."""
    rng = np.random.default_rng(items + tokens + heads)
    channels = (2 * key_heads + heads) * dim
    return {
        "x": random_bits(rng, items, tokens, channels),
        "weight": random_bits(rng, channels, 4),
        "g": (-rng.exponential(0.3, (items, tokens, heads))).astype(np.float32),
        "beta": rng.random((items, tokens, heads), np.float32),
    }


def heads_of(convolved: Any, key_heads: int, heads: int, dim: int) -> dict[str, Any]:
    """Queries, keys and values among convolved columns."""
    items, tokens, _ = convolved.shape
    keys = key_heads * dim
    return {
        "q": convolved[..., :keys].reshape(items, tokens, key_heads, dim),
        "k": convolved[..., keys : 2 * keys].reshape(items, tokens, key_heads, dim),
        "v": convolved[..., 2 * keys :].reshape(items, tokens, heads, dim),
    }


def test_numpy_arrays_go_through_both_references() -> None:
    key_heads, heads, dim, items, tokens = 1, 2, 64, 4, 5
    batch = columns_of(items, tokens, key_heads, heads, dim)
    slots, valid = np.array([3, 0, -1, 7]), np.array([99, 3, 2, 1])
    rng = np.random.default_rng(1)
    found = []
    pool = StatePool(states_of((2, 4, heads, dim, dim)), random_bits(rng, 2, 4, 3, CHANNELS))
    for is_one in (False, True):
        log, signal = ReplayLog.allocate(2, 6, 8, key_heads, heads, dim, channels=CHANNELS), Signal()
        if is_one:
            out = gated_delta.conv_record(**batch, pool=pool, slots=slots, log=log, layer=1, valid=valid, signal=signal)
        else:
            counts = np.clip(valid, 0, tokens)
            there = np.where(slots < 4, slots, -1)
            convolved = conv.conv1d_silu_record(batch["x"], batch["weight"], pool.conv[1], there, log.conv[1, :items], valid=counts)
            inputs = {**heads_of(convolved, key_heads, heads, dim), "g": batch["g"], "beta": batch["beta"]}
            out = gated_delta.record(**inputs, pool=pool, slots=slots, log=log, layer=1, valid=valid, signal=signal)
        assert signal.counts() == {"out_of_range": 1}
        found.append([out, log.k, log.v, log.gates, log.conv])
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)
    assert found[0][0][:2].any() and not found[0][0][2:].any()


# On a GPU.


def verify(card: Any, batch: dict[str, Any], pool: StatePool, slots: Any, log: ReplayLog, is_one: bool, valid: Any, **options: Any) -> np.ndarray:
    """Outputs by one op, or by two with the convolved columns in between."""
    items, tokens, _ = batch["x"].shape
    out = card.array(np.full((items, tokens, pool.heads, pool.dim), 0x7FC0, np.uint16))
    if is_one:
        gated_delta.conv_record(**batch, pool=pool, slots=slots, log=log, layer=1, out=out, valid=valid, **options)
        return host(card, out)
    convolved = card.array(np.zeros((items, tokens, pool.channels), np.uint16))
    counts = card.array(np.full(items, tokens) if valid is None else np.clip(host(card, valid), 0, tokens))
    conv.conv1d_silu_record(batch["x"], batch["weight"], pool.conv[1], slots, log.conv[1, :items], out=convolved, valid=counts)
    inputs = {**heads_of(convolved, log.key_heads, log.heads, log.dim), "g": batch["g"], "beta": batch["beta"]}
    gated_delta.record(**inputs, pool=pool, slots=slots, log=log, layer=1, out=out, valid=valid, **options)
    return host(card, out)


def empty_log(card: Any, rows: int, width: int, key_heads: int, heads: int, dim: int, channels: int) -> ReplayLog:
    return make_log(card, 2, rows, width, key_heads, heads, dim, np.full((2, rows, width, channels), 0x7FC0, np.uint16))


def assert_same(card: Any, logs: list[ReplayLog]) -> None:
    for name in ("k", "v", "gates", "conv"):
        one, other = (host(card, getattr(log, name)) for log in logs)
        assert np.array_equal(one.view(np.uint8), other.view(np.uint8)), name


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 11, 16])
@pytest.mark.parametrize(("key_heads", "heads", "dim"), GEOMETRIES)
def test_one_kernel_equals_two_to_the_bit(card: Any, key_heads: int, heads: int, dim: int, tokens: int, normalize: bool) -> None:
    items, channels = 3, (2 * key_heads + heads) * dim
    batch = columns_of(items, tokens, key_heads, heads, dim)
    if not normalize:
        # Keys of norm 1 or less.
        batch["x"] = bits(np.random.default_rng(0).normal(size=batch["x"].shape) / dim**0.5)
        batch["weight"] = np.tile(bits([0, 0, 1, 0.5]), (channels, 1))
    states, histories = states_of((2, 4, heads, dim, dim)), random_bits(np.random.default_rng(tokens), 2, 4, 3, channels)
    there = {name: card.array(array) for name, array in batch.items()}
    slots, valid = card.array(np.array([3, 1, 3])), card.array(np.array([tokens, tokens // 2, 99], np.int32))
    outputs, logs = [], []
    for is_one in (False, True):
        pool = make_pool(card, states, "slot", histories)
        logs.append(empty_log(card, items + 1, 16, key_heads, heads, dim, channels))
        outputs.append(verify(card, there, pool, slots, logs[-1], is_one, valid, normalize=normalize))
        assert np.array_equal(host(card, pool.rec), states) and np.array_equal(host(card, pool.conv), histories)
    assert np.array_equal(outputs[0], outputs[1])
    assert_same(card, logs)
    log, counts = logs[1], np.minimum([tokens, tokens // 2, 99], tokens)
    columns = host(card, log.conv)
    for item, count in enumerate(counts):
        assert np.array_equal(columns[1, item, :count], batch["x"][item, :count])
        assert (columns[1, item, count:] == 0x7FC0).all() and not outputs[1][item, count:].any()
    assert (columns[0] == 0x7FC0).all() and (columns[1, items] == 0x7FC0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 6])
def test_it_is_the_rule_behind_the_convolution(card: Any, tokens: int) -> None:
    key_heads, heads, dim, channels = 2, 4, 128, 1024
    batch = columns_of(2, tokens, key_heads, heads, dim)
    states, histories = states_of((2, 2, heads, dim, dim)), random_bits(np.random.default_rng(0), 2, 2, 3, channels)
    pool, log = make_pool(card, states, "layer", histories), empty_log(card, 2, tokens, key_heads, heads, dim, channels)
    there = {name: card.array(array) for name, array in batch.items()}
    out = verify(card, there, pool, card.array(np.array([1, 0])), log, True, None)
    convolved, logged = np.zeros_like(batch["x"]), np.zeros_like(batch["x"])
    conv.conv1d_silu_record(batch["x"], batch["weight"], histories[1], np.array([1, 0]), logged, out=convolved)
    inputs = {**heads_of(convolved, key_heads, heads, dim), "g": batch["g"], "beta": batch["beta"]}
    for item in range(2):
        expected, _ = oracle(inputs, states[1, 1 - item], item, tokens, dim**-0.5)
        check(host(card, log.k)[1, item], numbers(inputs["k"][item]))
        # Where NumPy and the device round a convolved number differently, the outputs differ by that much.
        assert np.linalg.norm(numbers(out[item]) - expected) <= 8e-3 * np.linalg.norm(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("items", [1, 2, 8, 40])
@pytest.mark.parametrize("layout", ["layer", "slot", "page"])
@pytest.mark.parametrize(("key_heads", "heads", "dim", "tokens"), [(1, 2, 128, 4), (2, 4, 64, 3), (2, 4, 128, 7)])
def test_any_batch_layout_and_stride_gives_the_same(card: Any, key_heads: int, heads: int, dim: int, tokens: int, layout: str, items: int) -> None:
    channels = (2 * key_heads + heads) * dim
    batch = columns_of(items, tokens, key_heads, heads, dim)
    states, histories = states_of((2, items + 1, heads, dim, dim)), random_bits(np.random.default_rng(0), 2, items + 1, 3, channels)
    # A part of a wider projection, whose sequences and tokens lie apart, and gates side by side.
    projected = np.full((items, tokens + 1, channels + 24), 0x7FC0, np.uint16)
    projected[:, :tokens, 16 : 16 + channels] = batch["x"]
    gates = card.array(np.concatenate((batch["g"], batch["beta"]), axis=-1))
    views = {
        "x": card.array(projected)[:, :tokens, 16 : 16 + channels],
        "weight": card.array(batch["weight"]),
        "g": gates[..., :heads],
        "beta": gates[..., heads:],
    }
    order = np.random.default_rng(items).permutation(items + 1)[:items]
    there = {name: card.array(array) for name, array in batch.items()}
    outputs, logs = [], []
    for is_one, inputs, ids, options in (
        (False, there, order, {}),
        (True, views, order.astype(np.int32), {"prefetch_layer": 0}),
    ):
        pool = make_pool(card, states, layout if is_one else "layer", histories)
        logs.append(empty_log(card, items, tokens, key_heads, heads, dim, channels))
        outputs.append(verify(card, inputs, pool, card.array(ids), logs[-1], is_one, None, **options))
    assert np.array_equal(outputs[0], outputs[1]) and outputs[0].any()
    assert_same(card, logs)
    # The first one alone, for which other kernels may be chosen.
    for is_one in (False, True):
        first = {name: array if name == "weight" else card.array(batch[name][:1]) for name, array in there.items()}
        log = empty_log(card, 1, tokens, key_heads, heads, dim, channels)
        alone = verify(card, first, make_pool(card, states, "layer", histories), card.array(order[:1]), log, is_one, None)
        assert np.array_equal(alone[0], outputs[0][0])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 6])
def test_states_in_bfloat16(card: Any, tokens: int) -> None:
    key_heads, heads, dim, channels = 1, 3, 128, 640
    batch = columns_of(2, tokens, key_heads, heads, dim)
    states, histories = bits(states_of((2, 3, heads, dim, dim))), random_bits(np.random.default_rng(0), 2, 3, 3, channels)
    there, slots = {name: card.array(array) for name, array in batch.items()}, card.array(np.array([2, 0]))
    outputs, logs = [], []
    for is_one in (False, True):
        logs.append(empty_log(card, 2, tokens, key_heads, heads, dim, channels))
        outputs.append(verify(card, there, make_pool(card, states, "layer", histories), slots, logs[-1], is_one, None))
    assert np.array_equal(outputs[0], outputs[1]) and outputs[0].any()
    assert_same(card, logs)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 6])
def test_what_is_skipped_is_counted_and_leaves_everything_alone(card: Any, tokens: int) -> None:
    key_heads, heads, dim = 1, 2, 64
    batch = columns_of(7, tokens, key_heads, heads, dim)
    states, histories = states_of((2, 4, heads, dim, dim)), random_bits(np.random.default_rng(0), 2, 4, 3, CHANNELS)
    pool, log = make_pool(card, states, "layer", histories), empty_log(card, 7, tokens, key_heads, heads, dim, CHANNELS)
    signal = Signal(like=pool.rec)
    slots, valid = np.array([-1, 4, 2**31, -5, 9, 3, 2]), np.array([1, 1, 1, 1, 1, -3, 0])
    there = {name: card.array(array) for name, array in batch.items()}
    out = verify(card, there, pool, card.array(slots), log, True, card.array(valid), signal=signal)
    assert signal.counts() == {"out_of_range": 3}
    assert not out.any() and np.isnan(host(card, log.gates)).all()
    assert all((host(card, getattr(log, name)) == 0x7FC0).all() for name in ("k", "v", "conv"))
    assert np.array_equal(host(card, pool.rec), states) and np.array_equal(host(card, pool.conv), histories)


@pytest.mark.gpu
def test_a_token_behind_the_last_one_may_be_no_number(card: Any) -> None:
    key_heads, heads, dim, tokens, channels = 1, 2, 128, 4, 512
    batch = columns_of(1, tokens, key_heads, heads, dim)
    states, histories = states_of((2, 1, heads, dim, dim)), random_bits(np.random.default_rng(0), 2, 1, 3, channels)
    outputs = []
    for is_bad in (False, True):
        if is_bad:
            batch["x"][:, 2:], batch["g"][:, 2:], batch["beta"][:, 2:] = 0x7FC0, np.nan, np.nan
        there = {name: card.array(array) for name, array in batch.items()}
        pool, log = make_pool(card, states, "layer", histories), empty_log(card, 1, tokens, key_heads, heads, dim, channels)
        outputs.append(verify(card, there, pool, card.array(np.zeros(1, int)), log, True, card.array(np.array([2]))))
    assert np.array_equal(outputs[0], outputs[1]) and outputs[0][:, :2].any()
