"""The gated delta ops: their arguments anywhere; on a GPU their kernels against float64 and the reference, and states to the bit.

Device arrays lie between guard bytes in allocations of their own, and pools have slots that nobody names: both must survive.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from gpukit import Signal
from gpukit.compile.cuda_c import source_path
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.kernels import gated_delta
from gpukit.kernels.state_pool import ReplayLog, StatePool
from tests.helpers.bf16 import bits, check, numbers
from tests.helpers.gated_delta import GEOMETRIES, assert_states_close, oracle, states_of, tokens_of
from tests.helpers.gated_delta_device import host, make_log, make_pool, output_of, put, run_direct

LAYOUTS = ("layer", "slot", "page")
INPUTS = ("q", "k", "v", "g", "beta")

# Anywhere: arguments.

TOKENS = tokens_of(2, 3, 1, 2, 64)
POOL = StatePool.allocate(2, 4, 2, 64)
LOG = ReplayLog.allocate(2, 2, 3, 1, 2, 64)
SLOTS = np.array([1, 2])
SHARED_V = np.array(TOKENS["v"])
VALUE, TYPE = ArgumentError, ArgumentTypeError


def direct(**changes: Any) -> Any:
    return gated_delta.direct(**{**TOKENS, "pool": POOL, "slots": SLOTS, "layer": 1, **changes})


def record(**changes: Any) -> Any:
    return gated_delta.record(**{**TOKENS, "pool": POOL, "slots": SLOTS, "log": LOG, "layer": 1, **changes})


def fold_record(**changes: Any) -> Any:
    previous = ReplayLog.allocate(2, 2, 3, 1, 2, 64)
    arguments = {**TOKENS, "pool": POOL, "slots": SLOTS, "previous": previous, "accepted": SLOTS, "log": LOG, "layer": 1}
    return gated_delta.fold_record(**{**arguments, **changes})


def overlapping_log() -> ReplayLog:
    """A log whose gates are some of the pool's states."""
    return ReplayLog(LOG.k, LOG.v, POOL.rec.reshape(-1)[: LOG.gates.size].reshape(LOG.gates.shape))


def strided(array: np.ndarray, strides: tuple[int, ...]) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(array, array.shape, strides)


BAD_CALLS = [
    (lambda: direct(q=[1]), TYPE, "q: expected an array .* got list"),
    (lambda: direct(q=TOKENS["q"].astype(np.float32)), TYPE, "q: expected dtype bfloat16 or uint16, got float32"),
    (lambda: direct(q=TOKENS["q"][..., :32]), VALUE, r"q: expected shape \(B, T, key_heads, 64 or 128\), got \(2, 3, 1, 32\)"),
    (lambda: direct(pool=StatePool.allocate(2, 4, 2, 128)), VALUE, r"q: expected shape \(B, T, key_heads, 128\), as pool says"),
    (lambda: direct(pool=StatePool.allocate(2, 4, 3, 64), q=np.repeat(TOKENS["q"], 2, 2)), VALUE, "q: expected key heads that divide the 3 value"),
    (lambda: direct(k=TOKENS["k"][:, :2]), VALUE, r"k: expected shape \(2, 3, 1, 64\) like q, got \(2, 2, 1, 64\)"),
    (lambda: direct(v=TOKENS["v"][:, :, :1]), VALUE, r"v: expected shape \(2, 3, 2, 64\), got \(2, 3, 1, 64\)"),
    (lambda: direct(v=TOKENS["v"][..., ::-1]), VALUE, "v: expected heads that are contiguous within a token"),
    (lambda: direct(q=strided(TOKENS["q"], (2 * 68, 2 * 12, 128, 2))), VALUE, "q: expected strides of multiples of 8 elements"),
    (lambda: direct(q=np.zeros((2, 3, 1, 65), np.uint16)[..., 1:]), VALUE, "q: expected strides of multiples of 8 elements"),
    (lambda: direct(q=np.zeros((2, 3, 1, 72), np.uint16)[..., 4:68]), VALUE, "q: expected an address that is a multiple of 16, got 0x"),
    (lambda: direct(g=TOKENS["g"].astype(float)), TYPE, "g: expected dtype float32, got float64"),
    (lambda: direct(beta=TOKENS["beta"][:1]), VALUE, r"beta: expected shape \(2, 3, 2\), got \(1, 3, 2\)"),
    (lambda: direct(pool=POOL.rec), TYPE, "pool: expected a StatePool, got ndarray"),
    (lambda: direct(slots=SLOTS * 1.0), TYPE, "slots: expected dtype int32 or int64, got float64"),
    (lambda: direct(slots=SLOTS[:1]), VALUE, r"slots: expected shape \(2,\), one a sequence, got \(1,\)"),
    (lambda: direct(destination_slots=SLOTS.astype(np.int32)), TYPE, "destination_slots: expected dtype int64, got int32"),
    (lambda: direct(layer=2), VALUE, "layer: expected at most 1, the last of pool, got 2"),
    (lambda: direct(layer=-1), VALUE, "layer: expected at least 0, got -1"),
    (lambda: direct(out=np.zeros((2, 3, 2, 64), np.float32)), TYPE, "out: expected dtype bfloat16 or uint16, got float32"),
    (lambda: direct(out=np.zeros((2, 3, 2, 65), np.uint16)), VALUE, r"out: expected shape \(2, 3, 2, 64\), got \(2, 3, 2, 65\)"),
    (lambda: direct(out=np.zeros((2, 3, 2, 128), np.uint16)[..., ::2]), VALUE, "out: expected a contiguous array"),
    (lambda: direct(out=SHARED_V, v=SHARED_V), VALUE, "out: expected memory apart from v, but it overlaps it"),
    (lambda: record(out=SHARED_V, v=SHARED_V), VALUE, "out: expected memory apart from v, but it overlaps it"),
    (lambda: direct(out=POOL.rec.view(np.uint16).reshape(-1)[:768].reshape(2, 3, 2, 64)), VALUE, "out: expected memory apart from pool"),
    (lambda: record(out=LOG.v.view(np.uint16)[1].reshape(2, 3, 2, 64)), VALUE, "out: expected memory apart from log"),
    (lambda: record(k=LOG.k.view(np.uint16)[1]), VALUE, "log: expected memory apart from k, but it overlaps it"),
    (lambda: direct(scale="1"), TYPE, "scale: expected a number, got str"),
    (lambda: direct(scale=1e300), VALUE, "scale: expected a number within float32, got 1e.300"),
    (lambda: direct(scale=float("nan")), VALUE, "scale: expected a number within float32, got nan"),
    (lambda: direct(prefetch_layer=2), VALUE, "prefetch_layer: expected at most 1"),
    (lambda: record(log=ReplayLog.allocate(2, 2, 2, 1, 2, 64)), VALUE, "q: expected at most 2 tokens, of log's width and 16, got 3"),
    (lambda: record(log=ReplayLog.allocate(2, 1, 3, 1, 2, 64)), VALUE, "log: expected 2 layers and at least 2 rows, got 2 and 1"),
    (lambda: record(log=ReplayLog.allocate(2, 2, 3, 2, 2, 64)), VALUE, "log: expected 1 key heads and 2 value heads of 64, got 2 and 2 of 64"),
    (lambda: record(log=overlapping_log()), VALUE, "log: expected memory of its own, but it overlaps pool"),
    (lambda: record(valid=SLOTS[:1]), VALUE, r"valid: expected shape \(2,\)"),
    (lambda: fold_record(previous=LOG), VALUE, "log: expected memory of its own, but it overlaps previous"),
    (lambda: gated_delta.fold(POOL, LOG, np.zeros((3, 3), int)), VALUE, "rows: expected at most 2 rows, as the log has, got 3"),
    (lambda: gated_delta.fold(POOL, LOG, np.zeros((2, 4), int)), VALUE, r"rows: expected a contiguous array of shape \(at most 2, 3\)"),
    (lambda: gated_delta.fold(POOL, LOG, np.zeros((2, 3))), TYPE, "rows: expected dtype int32 or int64, got float64"),
    (lambda: gated_delta.fold(StatePool.allocate(2, 4, 2, 64, channels=8), LOG, SLOTS), VALUE, "log: expected 8 convolution channels like pool"),
    (lambda: gated_delta.fold(StatePool.allocate(3, 4, 2, 64), LOG, SLOTS), VALUE, "log: expected 3 layers of 2 heads of 64 like pool"),
    (lambda: StatePool(np.zeros((1, 1, 1, 32, 32), np.float32)), VALUE, "rec: expected states of 64 x 64 or 128 x 128"),
    (lambda: StatePool(POOL.rec.astype(np.float16)), TYPE, "rec: expected dtype float32 or bfloat16 or uint16, got float16"),
    (lambda: StatePool(strided(POOL.rec, (0, *POOL.rec.strides[1:]))), VALUE, "rec: expected states apart from each other"),
    (lambda: StatePool(POOL.rec.swapaxes(3, 4)), VALUE, "rec: expected the axes behind layers and slots contiguous"),
    (lambda: StatePool(POOL.rec, np.zeros((2, 4, 2, 8), np.uint16)), VALUE, r"conv: expected shape \(2, 4, 3, multiple of 8\)"),
    (lambda: StatePool.allocate(1, 1, 1, 64, layout="head"), VALUE, "layout: expected 'layer' or 'slot', got 'head'"),
    (lambda: StatePool.allocate(1, 1, 1, 64, channels=250), VALUE, "channels: expected a multiple of 8, got 250"),
    (lambda: StatePool.allocate(1, 1, 1, 64, channels=-8), VALUE, "channels: expected at least 0, got -8"),
    (lambda: ReplayLog.allocate(1, 1, 1, 1, 1, 64, channels=250), VALUE, "channels: expected a multiple of 8, got 250"),
    (lambda: ReplayLog.allocate(1, 1, 1, key_heads=2, heads=3, dim=64), VALUE, "heads: expected a multiple of 2, the key heads, got 3"),
    (lambda: ReplayLog(LOG.k, LOG.k, LOG.gates), VALUE, r"gates: expected shape \(2, 2, 3, 1, 2\) like v"),
    (lambda: ReplayLog(LOG.k, LOG.k, np.zeros((2, 2, 3, 1, 2), np.float32)), VALUE, "v: expected memory of its own, but it overlaps k"),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[message for _, _, message in BAD_CALLS])
def test_bad_arguments_are_named_and_nothing_is_written(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
    assert not POOL.rec.any() and not LOG.k.any() and not LOG.v.any() and not LOG.gates.any()


def test_histories_inside_the_states_are_refused() -> None:
    memory = np.zeros(4 * 64 * 64 * 4 + 64, np.uint8)
    rec = memory[: 4 * 64 * 64 * 4].view(np.float32).reshape(1, 4, 1, 64, 64)
    conv = memory[: 4 * 3 * 8 * 2].view(np.uint16).reshape(1, 4, 3, 8)
    with pytest.raises(ArgumentError, match="conv: expected memory of its own, but it overlaps rec"):
        StatePool(rec, conv)


def test_what_is_padding_stands_in_nobodys_way() -> None:
    pool = StatePool(np.ones((1, 4, 2, 64, 64), np.float32))
    signal = Signal()
    direct(pool=pool, layer=0, slots=np.array([2, 1]), destination_slots=np.array([-1, 2]), signal=signal)
    assert signal.counts() == {} and (pool.rec[0, [0, 1, 3]] == 1).all() and not (pool.rec[0, 2] == 1).all()


def test_rows_that_share_a_destination_are_all_skipped() -> None:
    pool, signal = StatePool(np.arange(4, dtype=np.float32).repeat(2 * 64 * 64).reshape(1, 4, 2, 64, 64)), Signal()
    log = ReplayLog.allocate(1, 3, 1, 1, 2, 64)
    gated_delta.fold(pool, log, np.array([[1, 0, 0], [2, 0, 0], [1, 3, 0]]), signal=signal)
    assert signal.counts() == {"occupied": 2} and pool.rec[0, :, 0, 0, 0].tolist() == [0, 1, 2, 1]
    gated_delta.fold(pool, log, np.array([[1, 0, 0], [2, 0, 0]]), states=False, signal=signal)
    assert signal.counts() == {"occupied": 2}


def test_an_empty_batch_gives_an_empty_array() -> None:
    empty = {name: array[:0] for name, array in TOKENS.items()}
    assert direct(**empty, slots=SLOTS[:0]).shape == (0, 3, 2, 64)
    gated_delta.fold(POOL, LOG, np.zeros((0, 3), np.int32))


def test_the_constants_of_the_plans_are_those_of_the_kernels() -> None:
    source = source_path("gated_delta").with_suffix(".cuh").read_text()
    constants = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", source)}
    for kind in ("", "BULK_", "FOLD_"):
        assert getattr(gated_delta, f"_{kind}THREADS") == 32 * constants[f"{kind}WARPS"]
        assert getattr(gated_delta, f"_{kind}TILE") == constants[f"{kind}WARPS"] * (32 // constants["LANES"]) * constants[f"{kind}ROWS"]
    entries = source_path("gated_delta").read_text()
    for verifiers in (gated_delta._RECORDS, gated_delta._FOLD_RECORDS, gated_delta._CONV_RECORDS, gated_delta._CONV_FOLD_RECORDS):
        for kernel, threads, tile in verifiers:
            memory = entries[entries.index(f"gpukit_{kernel.name}(") :].partition("RecordMemory<")[2]
            tokens, warps, rows = memory.replace(">", ",").split(", ")[:3]
            assert threads == 32 * constants[warps] and tile == constants[warps] * (32 // constants["RECORD_LANES"]) * constants[rows]
            assert tokens == ("MOST_TOKENS" if kernel.name.endswith("long") else "SHORT")
    assert (constants["SHORT"], constants["MOST_TOKENS"]) == (gated_delta._SHORT, gated_delta._MOST_TOKENS)
    flags = dict(re.findall(r"(\w+) = (\d+)", re.search(r"enum Flags \{(.*)\}", source).group(1)))  # type: ignore[union-attr]
    assert {f"_{name}": int(value) for name, value in flags.items()}.items() <= vars(gated_delta).items()


# On a GPU.


@pytest.mark.usefixtures("direct_kernel")
@pytest.mark.gpu
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 64])
@pytest.mark.parametrize(("key_heads", "heads", "dim"), GEOMETRIES)
def test_direct_is_the_rule(card: Any, key_heads: int, heads: int, dim: int, tokens: int, normalize: bool) -> None:
    batch = tokens_of(2, tokens, key_heads, heads, dim)
    if not normalize:
        batch["k"] = bits(numbers(batch["k"]) / (1.5 * dim**0.5))
    before = states_of((2, 4, heads, dim, dim))
    pool, out = make_pool(card, before, "layer"), output_of(card, batch)
    gated_delta.direct(**put(card, batch), pool=pool, slots=card.array(np.array([3, 1])), layer=1, out=out, normalize=normalize)
    after, expected = host(card, pool.rec), before.copy()
    for item, slot in enumerate((3, 1)):
        outputs, state = oracle(batch, before[1, slot], item, tokens, dim**-0.5, normalize)
        check(host(card, out)[item], outputs)
        assert_states_close(after[1, slot], state, tokens)
        expected[1, slot] = after[1, slot]
    assert np.array_equal(after, expected), "another state was touched"


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 11, 16])
@pytest.mark.parametrize(("key_heads", "heads", "dim"), GEOMETRIES)
def test_record_is_the_rule_and_logs_what_came_in(card: Any, key_heads: int, heads: int, dim: int, tokens: int, normalize: bool) -> None:
    batch = tokens_of(3, tokens, key_heads, heads, dim, seed=tokens)
    if not normalize:
        batch["k"] = bits(numbers(batch["k"]) / (1.5 * dim**0.5))
    before = states_of((2, 4, heads, dim, dim))
    pool, out, log = make_pool(card, before, "slot"), output_of(card, batch), make_log(card, 2, 4, 16, key_heads, heads, dim)
    valid = np.array([tokens, tokens // 2, 99])
    slots = np.array([3, 1, 1])
    gated_delta.record(
        **put(card, batch), pool=pool, slots=card.array(slots), log=log, layer=1, out=out, valid=card.array(valid), normalize=normalize
    )
    outputs, keys, values, gates = (host(card, array) for array in (out, log.k, log.v, log.gates))
    for item, count in enumerate(np.minimum(valid, tokens)):
        expected, _ = oracle(batch, before[1, slots[item]], item, count, dim**-0.5, normalize)
        if count:
            check(outputs[item, :count], expected)
        assert not outputs[item, count:].any()
        assert np.array_equal(keys[1, item, :count], batch["k"][item, :count]) and (keys[1, item, count:] == 0x7FC0).all()
        assert np.array_equal(values[1, item, :count], batch["v"][item, :count]) and (values[1, item, count:] == 0x7FC0).all()
        assert np.array_equal(gates[1, item, :count, :, 0], batch["g"][item, :count]) and np.isnan(gates[1, item, count:]).all()
        assert np.array_equal(gates[1, item, :count, :, 1], batch["beta"][item, :count])
    assert (keys[0] == 0x7FC0).all() and (keys[1, 3] == 0x7FC0).all() and np.isnan(gates[0]).all()
    assert np.array_equal(host(card, pool.rec), before)


@pytest.mark.usefixtures("direct_kernel")
@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("items", [1, 2, 8])
@pytest.mark.parametrize(("key_heads", "heads", "dim"), [(2, 4, 64), (1, 2, 128)])
def test_record_and_fold_equal_direct_to_the_bit(card: Any, key_heads: int, heads: int, dim: int, items: int, layout: str) -> None:
    layers, tokens, channels = 2, 4, 1032
    rng = np.random.default_rng(items)
    batch = tokens_of(items, tokens, key_heads, heads, dim, seed=items)
    before = states_of((layers, 2 * items + 2, heads, dim, dim))
    histories = rng.integers(0, 2**16, (layers, 2 * items + 2, 3, channels)).astype(np.uint16)
    columns = rng.integers(0, 2**16, (layers, items, tokens + 1, channels)).astype(np.uint16)
    order = rng.permutation(2 * items + 2).astype(np.int32)
    sources = order[:items]
    # Every other sequence moves to another slot.
    destinations = np.where(np.arange(items) % 2, order[items : 2 * items], sources).astype(np.int32)
    for m in range(tokens + 1):
        pool = make_pool(card, before, layout, histories)
        log = make_log(card, layers, items, tokens + 1, key_heads, heads, dim, columns)
        for layer in range(layers):
            gated_delta.record(
                **put(card, batch, m if m else 1), pool=pool, slots=card.array(sources), log=log, layer=layer,
                out=card.array(np.zeros((items, m if m else 1, heads, dim), np.uint16)),
            )  # fmt: skip
        gated_delta.fold(pool, log, card.array(np.stack((sources, destinations, np.full(items, m, np.int32)), axis=1)))
        if m:
            expected = run_direct(card, before, batch, sources, destinations, m)
        else:
            expected = before.copy()
            expected[:, destinations] = before[:, sources]
        assert np.array_equal(host(card, pool.rec), expected), m
        conv = histories.copy()
        for b in range(items):
            seen = np.concatenate((histories[:, sources[b]], columns[:, b, :m]), axis=1)
            conv[:, destinations[b]] = seen[:, -3:]
        assert np.array_equal(host(card, pool.conv), conv), m


@pytest.mark.gpu
@pytest.mark.parametrize(("key_heads", "heads", "dim"), [(2, 4, 64), (1, 2, 128)])
@pytest.mark.parametrize("tokens", [1, 4, 7])
def test_rounds_of_fold_record_equal_fold_and_record_to_the_bit(card: Any, tokens: int, key_heads: int, heads: int, dim: int) -> None:
    items = 3
    rng = np.random.default_rng(tokens)
    before = states_of((1, 5, heads, dim, dim))
    pool, plain = make_pool(card, before, "layer"), make_pool(card, before, "slot")
    logs = [make_log(card, 1, items, tokens, key_heads, heads, dim) for _ in range(2)]
    slots, accepted = card.array(np.array([4, 1, 2])), np.zeros(items, np.int32)
    for turn in range(3):
        batch = tokens_of(items, tokens, key_heads, heads, dim, seed=turn)
        out, expected, log = output_of(card, batch), output_of(card, batch), make_log(card, 1, items, tokens, key_heads, heads, dim)
        previous = logs[turn % 2]
        rows = np.stack((np.array([4, 1, 2]), np.array([4, 1, 2]), accepted), axis=1)
        gated_delta.fold(plain, previous, card.array(rows))
        gated_delta.record(**put(card, batch), pool=plain, slots=slots, log=log, layer=0, out=expected)
        there = put(card, batch)
        gated_delta.fold_record(
            **there, pool=pool, slots=slots, previous=previous, accepted=card.array(accepted), log=logs[1 - turn % 2], layer=0, out=out
        )
        assert np.array_equal(host(card, pool.rec), host(card, plain.rec)), turn
        assert np.array_equal(host(card, out), host(card, expected)), turn
        for name in ("k", "v", "gates"):
            assert np.array_equal(host(card, getattr(logs[1 - turn % 2], name)), host(card, getattr(log, name))), name
        accepted = rng.integers(0, tokens + 1, items).astype(np.int32)


@pytest.mark.usefixtures("direct_kernel")
@pytest.mark.gpu
def test_what_is_skipped_is_counted_and_leaves_everything_alone(card: Any) -> None:
    before = states_of((1, 4, 2, 64, 64))
    batch = tokens_of(6, 2, 1, 2, 64)
    pool, out = make_pool(card, before, "layer"), output_of(card, batch)
    signal = Signal(like=pool.rec)
    slots, destinations = np.array([-1, 4, 0, 1, 2, 3]), np.array([0, 0, 3, 3, 1, 2])
    ids = (card.array(slots), card.array(destinations))
    gated_delta.direct(**put(card, batch), pool=pool, slots=ids[0], destination_slots=ids[1], layer=0, out=out, signal=signal)
    assert signal.counts() == {"out_of_range": 1, "occupied": 4}
    assert np.array_equal(host(card, pool.rec), before) and not host(card, out).any()
    signal.reset()
    log, out = make_log(card, 1, 6, 2, 1, 2, 64), output_of(card, batch)
    gated_delta.record(**put(card, batch), pool=pool, slots=card.array(np.array([-1, 4, 2**31, -5, 9, 4])), log=log, layer=0, out=out, signal=signal)
    assert signal.counts() == {"out_of_range": 4}
    assert not host(card, out).any() and np.isnan(host(card, log.gates)).all() and (host(card, log.k) == 0x7FC0).all()
    signal.reset()
    rows = np.array([[-1, 0, 1], [4, 0, 1], [0, 1, 3], [1, 1, -1], [2, 3, 0], [3, 3, 0]])
    gated_delta.fold(pool, log, card.array(rows), signal=signal)
    assert signal.counts() == {"out_of_range": 3}
    before[0, 3] = before[0, 2]
    assert np.array_equal(host(card, pool.rec), before)
    signal.reset()
    gated_delta.fold_record(
        **put(card, batch), pool=pool, slots=card.array(np.array([0, 1, 0, 4, 2, -1])), previous=log, log=make_log(card, 1, 6, 2, 1, 2, 64),
        accepted=card.array(np.array([0, 3, 0, 0, -1, 5])), layer=0, out=out, signal=signal,
    )  # fmt: skip
    assert signal.counts() == {"out_of_range": 3, "occupied": 2}
    assert np.array_equal(host(card, pool.rec), before) and not host(card, out).any()


@pytest.mark.gpu
def test_a_fold_of_more_rows_than_a_warp_has_lanes_sees_all_of_them(card: Any) -> None:
    before = states_of((2, 80, 3, 64, 64))
    pool, log = make_pool(card, before, "layer"), make_log(card, 2, 40, 1, 1, 3, 64)
    signal = Signal(like=pool.rec)
    rows = np.stack((np.arange(40), np.arange(40, 80), np.zeros(40, int)), axis=1)
    # One goes where another comes from, two to the same slot.
    rows[35, 1], rows[2, 1] = 3, 78
    gated_delta.fold(pool, log, card.array(rows), signal=signal)
    assert signal.counts() == {"occupied": 3}
    expected = before.copy()
    for row, (source, destination, _) in enumerate(rows):
        if row not in (2, 35, 38):
            expected[:, destination] = before[:, source]
    assert np.array_equal(host(card, pool.rec), expected)


@pytest.mark.usefixtures("direct_kernel")
@pytest.mark.gpu
def test_who_stands_in_whose_way_is_as_in_the_reference(card: Any) -> None:
    before, batch = states_of((1, 4, 2, 64, 64)), tokens_of(2, 1, 1, 2, 64)
    for op, name, destinations in (
        (gated_delta.direct, "destination_slots", np.array([-1, 2])),
        (gated_delta.snapshot, "snapshot_slots", np.array([[9], [2]])),
        (gated_delta.snapshot, "snapshot_slots", np.array([[-1], [2]])),
    ):
        slots, found = np.array([2, 1]), []
        for make, read in ((np.array, np.asarray), (card.array, card.host)):
            pool, out = StatePool(make(before)), make(np.full(batch["v"].shape, 7, np.uint16))
            signal = Signal() if read is np.asarray else Signal(like=pool.rec)
            inputs = {key: make(array) for key, array in batch.items()}
            op(**inputs, pool=pool, slots=make(slots), layer=0, out=out, signal=signal, **{name: make(destinations)})
            found.append((signal.counts(), (read(pool.rec) != before).any(axis=(0, 2, 3, 4)).tolist()))
        assert found[0] == found[1], (name, found)


@pytest.mark.usefixtures("direct_kernel")
@pytest.mark.gpu
def test_views_of_one_projection_are_read_by_their_strides(card: Any) -> None:
    rng = np.random.default_rng(0)
    # [B, T, q | k | v], and gates side by side.
    projected, gates = bits(rng.normal(size=(2, 3, 64 + 64 + 128 + 8))), (-rng.random((2, 3, 4))).astype(np.float32)
    batch = {
        "q": projected[:, :, None, :64],
        "k": projected[:, :, None, 64:128],
        "v": projected[:, :, 128:256].reshape(2, 3, 2, 64),
        "g": gates[..., :2],
        "beta": -gates[..., 2:],
    }
    before = states_of((1, 2, 2, 64, 64))
    slots = card.array(np.array([1, 0]))
    there, scales = card.array(projected), card.array(np.concatenate((gates[..., :2], -gates[..., 2:]), axis=-1))
    views = {"q": there[:, :, None, :64], "k": there[:, :, None, 64:128], "v": card.array(batch["v"]), "g": scales[..., :2], "beta": scales[..., 2:]}
    found = []
    for inputs in (put(card, batch), views):
        pool, out = make_pool(card, before, "layer"), output_of(card, batch)
        gated_delta.direct(**inputs, pool=pool, slots=slots, layer=0, out=out)
        log = make_log(card, 1, 2, 3, 1, 2, 64)
        gated_delta.record(**inputs, pool=pool, slots=slots, log=log, layer=0, out=out)
        found.append([host(card, array) for array in (pool.rec, out, log.k, log.v, log.gates)])
    for plain, viewed in zip(*found, strict=True):
        assert np.array_equal(plain, viewed)


@pytest.mark.gpu
def test_a_round_captured_once_commits_what_the_device_says() -> None:
    import torch

    import gpukit

    gpukit.warmup(subjects=["gated_delta"])
    items, tokens, key_heads, heads, dim, layers = 2, 4, 2, 4, 128, 3

    def on_device(array: np.ndarray) -> Any:
        tensor = torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array).cuda()
        return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor

    rounds = [tokens_of(items, tokens, key_heads, heads, dim, seed=seed) for seed in range(3)]
    before = states_of((layers, 4, heads, dim, dim))
    slots = torch.tensor([3, 1], device="cuda")
    accepted = [torch.tensor(counts, device="cuda") for counts in ([4, 0], [1, 2], [3, 4])]
    results = []
    for is_captured in (False, True):
        pool = StatePool(on_device(before))
        log = ReplayLog.allocate(layers, items, tokens, key_heads, heads, dim, like=pool.rec)
        inputs = {name: on_device(array) for name, array in rounds[0].items()}
        outs = [torch.empty(items, tokens, heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
        rows = torch.stack((slots, slots, accepted[0]), 1)

        def verify_and_commit(inputs: Any = inputs, pool: Any = pool, log: Any = log, outs: Any = outs, rows: Any = rows) -> None:
            for layer in range(layers):
                gated_delta.record(**inputs, pool=pool, slots=slots, log=log, layer=layer, out=outs[layer])
            gated_delta.fold(pool, log, rows)

        play = verify_and_commit
        if is_captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                verify_and_commit()
            play = graph.replay
        seen = []
        for batch, counts in zip(rounds, accepted, strict=True):
            for name, array in batch.items():
                inputs[name].copy_(on_device(array))
            rows[:, 2] = counts
            play()
            seen += [out.view(torch.int16).cpu().numpy().copy() for out in outs]
        results.append([*seen, pool.rec.cpu().numpy()])
    for eager, captured in zip(*results, strict=True):
        assert np.array_equal(eager, captured)
