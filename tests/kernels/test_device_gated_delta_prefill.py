"""`prefill`: its arguments anywhere; on a GPU both of its kernels against float64, and one of them against `direct` to the bit.

Every array lies between guard bytes. What no sequence names is poison: NaN in the slots of the pool and between its pages, in the tokens in
front of the first sequence and behind the last one, and in what a sequence would read that starts from zeros.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpukit import Signal
from gpukit.compile.cuda_c import source_path
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.kernels import gated_delta, gated_delta_prefill
from gpukit.kernels.gated_delta_prefill import prefill, prefill_workspace
from gpukit.kernels.state_pool import StatePool
from tests.helpers.bf16 import bits, check, numbers
from tests.helpers.gated_delta import GEOMETRIES, oracle, states_of, tokens_of

METHODS = ("chunked", "sequential")
LAYOUTS = ("layer", "slot", "page")
INPUTS = ("q", "k", "v", "g", "beta")


def packed(tokens: int, key_heads: int, heads: int, dim: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {name: array[0] for name, array in tokens_of(1, tokens, key_heads, heads, dim, seed).items()}


# Anywhere: arguments.

TOKENS = packed(5, 1, 2, 64)
POOL = StatePool.allocate(2, 4, 2, 64)
SLOTS, OFFSETS = np.array([1, 2]), np.array([0, 3, 5])
VALUE, TYPE = ArgumentError, ArgumentTypeError


def call(**changes: Any) -> Any:
    return prefill(**{**TOKENS, "pool": POOL, "slots": SLOTS, "cu_seqlens": OFFSETS, "layer": 1, **changes})


def strided(array: np.ndarray, strides: tuple[int, ...]) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(array, array.shape, strides)


BAD_CALLS = [
    (lambda: call(q=[1]), TYPE, "q: expected an array .* got list"),
    (lambda: call(q=TOKENS["q"].astype(np.float32)), TYPE, "q: expected dtype bfloat16 or uint16, got float32"),
    (lambda: call(q=TOKENS["q"][..., :32]), VALUE, r"q: expected shape \(N, key_heads, 64 or 128\), got \(5, 1, 32\)"),
    (lambda: call(q=TOKENS["q"][None]), VALUE, r"q: expected shape \(N, key_heads, 64 or 128\), got \(1, 5, 1, 64\)"),
    (lambda: call(pool=StatePool.allocate(2, 4, 2, 128)), VALUE, r"q: expected shape \(5, 1, 128\), got \(5, 1, 64\)"),
    (lambda: call(q=np.repeat(TOKENS["q"], 3, 1)), VALUE, "q: expected key heads that divide the 2 value heads of pool, got 3"),
    (lambda: call(q=TOKENS["q"][:, :0]), VALUE, "q: expected key heads that divide the 2 value heads of pool, got 0"),
    (lambda: call(k=TOKENS["k"][:2]), VALUE, r"k: expected shape \(5, 1, 64\), got \(2, 1, 64\)"),
    (lambda: call(v=TOKENS["v"][:, :1]), VALUE, r"v: expected shape \(5, 2, 64\), got \(5, 1, 64\)"),
    (lambda: call(v=TOKENS["v"][..., ::-1]), VALUE, "v: expected heads that are contiguous within a token"),
    (lambda: call(k=strided(np.zeros((9, 1, 64), np.uint16)[:5], (2 * 68, 128, 2))), VALUE, "k: expected a stride of tokens that is a multiple of 8"),
    (lambda: call(v=np.zeros((5, 2, 72), np.uint16)[:, :, 4:68]), VALUE, "v: expected heads that are contiguous within a token"),
    (lambda: call(k=np.zeros((5, 1, 72), np.uint16)[:, :, 4:68]), VALUE, "k: expected an address that is a multiple of 16, got 0x"),
    (lambda: call(g=TOKENS["g"].astype(float)), TYPE, "g: expected dtype float32, got float64"),
    (lambda: call(beta=TOKENS["beta"][:1]), VALUE, r"beta: expected shape \(5, 2\), got \(1, 2\)"),
    (lambda: call(pool=POOL.rec), TYPE, "pool: expected a StatePool, got ndarray"),
    (lambda: call(slots=SLOTS * 1.0), TYPE, "slots: expected dtype int32 or int64, got float64"),
    (lambda: call(cu_seqlens=OFFSETS[:2]), VALUE, r"cu_seqlens: expected shape \(3,\)"),
    (lambda: call(cu_seqlens=OFFSETS * 1.0), TYPE, "cu_seqlens: expected dtype int32 or int64, got float64"),
    (lambda: call(destination_slots=SLOTS.astype(np.int32)), TYPE, "destination_slots: expected dtype int64, got int32"),
    (lambda: call(resume=SLOTS[:1]), VALUE, r"resume: expected shape \(2,\)"),
    (lambda: call(resume=SLOTS > 0), TYPE, "resume: expected dtype int32 or int64, got bool"),
    (lambda: call(layer=2), VALUE, "layer: expected at most 1, the last of pool, got 2"),
    (lambda: call(out=np.zeros((5, 2, 64), np.float32)), TYPE, "out: expected dtype bfloat16 or uint16, got float32"),
    (lambda: call(out=np.zeros((5, 2, 128), np.uint16)[..., ::2]), VALUE, "out: expected a contiguous array"),
    (lambda: call(method="parallel"), VALUE, "method: expected one of auto, chunked, sequential, fla, got 'parallel'"),
    (lambda: call(method="fla"), TYPE, "method: 'fla' takes torch tensors of a GPU, got numpy.ndarray"),
    (lambda: call(workspace=np.zeros(9, np.uint8)), VALUE, "workspace: expected at least 86528 bytes, got 9"),
    (lambda: call(workspace=np.zeros(9)), TYPE, "workspace: expected dtype uint8, got float64"),
]


@pytest.mark.parametrize(("bad", "kind", "message"), BAD_CALLS, ids=[message for _, _, message in BAD_CALLS])
def test_bad_arguments_are_named_and_nothing_is_written(bad: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        bad()
    assert not POOL.rec.any()


def test_no_sequences_and_no_tokens() -> None:
    nobody = {"slots": SLOTS[:0], "cu_seqlens": OFFSETS[:1]}
    assert call(**{name: array[:0] for name, array in TOKENS.items()}, **nobody).shape == (0, 2, 64)
    assert not call(out=np.full((5, 2, 64), 7, np.uint16), **nobody).any()


def test_the_constants_of_the_plans_are_those_of_the_kernels() -> None:
    def constants(name: str) -> dict[str, str]:
        return dict(re.findall(r"constexpr int (\w+) = ([^;]+);", source_path("gated_delta").with_name(name).read_text()))

    chunked, sequential, direct = (constants(f"gated_delta{name}") for name in ("_prefill.cu", "_prefill_sequential.cu", ".cuh"))
    own = gated_delta_prefill
    assert [int(chunked[name]) for name in ("CHUNK", "THREADS", "TILE", "RECORD")] == [own._CHUNK, own._THREADS, own._TILE, own._RECORD]
    assert int(sequential["CLEARED"]) == own._CLEARED and 32 * int(direct["WARPS"]) == own._SEQUENTIAL_THREADS
    assert own._SEQUENTIAL_THREADS // int(direct["LANES"]) * int(direct["ROWS"]) == own._SEQUENTIAL_TILE
    tokens, row, tile = own._CHUNK, 2 * (128 + int(chunked["PADDING"])), 2 * (own._TILE + int(chunked["PADDING"]))
    assert own._SCAN_BYTES == 3 * tokens * row + 2 * own._TILE * row + 6 * tokens * tile + 16 * tokens


# On a GPU.


@pytest.fixture
def card() -> Iterator[Any]:
    """A GPU through CuPy, whose arrays lie between guard bytes."""
    from tests.helpers.device import CupyDevice

    made = CupyDevice()
    yield made
    made.check_guards()


class Case:
    """Sequences of many lengths in one call, poisoned where nobody may look, and what float64 makes of them."""

    def __init__(
        self, lengths: tuple[int, ...], key_heads: int, heads: int, dim: int, *, seed: int = 0, lead: int = 3, tail: int = 70, id_type: str = "int64",
        half: bool = False, normalize: bool = True, gates: str = "mixed",
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        count = len(lengths)
        self.heads, self.dim, self.normalize, self.half = heads, dim, normalize, half
        self.offsets = (lead + np.concatenate(([0], np.cumsum(lengths)))).astype(id_type)
        self.tokens = int(self.offsets[-1]) + tail
        self.batch = packed(self.tokens, key_heads, heads, dim, seed)
        if gates == "slow":
            self.batch["g"] = (-1e-3 * np.logaddexp(0, rng.normal(size=self.batch["g"].shape))).astype(np.float32)
        elif gates == "steep":
            steep = rng.random(self.batch["g"].shape)
            self.batch["g"] = np.select([steep < 0.02, steep < 0.3], [-np.inf, -20.0], -1e-3).astype(np.float32)
        if not normalize:
            self.batch["k"] = bits(numbers(self.batch["k"]) / (1.5 * dim**0.5))
        for array in self.batch.values():
            array[:lead] = array[self.tokens - tail :] = 0x7FC0 if array.dtype == np.uint16 else np.nan
        self.slots = rng.permutation(2 * count + 2)[:count].astype(id_type)
        # Every third sequence starts from zeros, every other one moves to another slot.
        self.resume = (np.arange(count) % 3 != 1).astype(np.int32)
        free = np.setdiff1d(np.arange(2 * count + 2), self.slots)
        self.destinations = np.where(np.arange(count) % 2, free[:count], self.slots).astype(id_type)
        self.before = np.full((2, 2 * count + 2, heads, dim, dim), np.nan, np.float32)
        for s in np.flatnonzero(self.resume):
            self.before[1, self.slots[s]] = states_of((heads, dim, dim), seed + int(s))
        if half:
            self.before = bits(self.before)

    def numbers(self, states: np.ndarray) -> np.ndarray:
        return numbers(states) if self.half else states

    def run(self, card: Any, method: str, layout: str = "layer", prepared: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Outputs and pool after a call; all but the named slots must be as before."""
        pool, all_bytes = make_pool(card, self.before, layout)
        others = card.host(all_bytes).view(np.uint8)
        out = card.array(np.full(self.batch["v"].shape, 0x7FC0, np.uint16))
        workspace = card.array(np.full(prefill_workspace(self.tokens, len(self.slots), self.heads), 0xFF, np.uint8))
        arguments = {
            **{name: card.array(array) for name, array in self.batch.items()}, "pool": pool, "slots": card.array(self.slots),
            "cu_seqlens": card.array(self.offsets), "destination_slots": card.array(self.destinations), "resume": card.array(self.resume),
            "layer": 1, "out": out, "workspace": workspace, "method": method, "normalize": self.normalize,
        }  # fmt: skip
        if prepared:
            prefill.prepare(**arguments)()
        else:
            prefill(**arguments)
        after = np.ascontiguousarray(card.host(pool.rec))
        pool.rec[1][card.array(self.destinations)] = card.array(self.before)[1][card.array(self.destinations)]
        assert np.array_equal(card.host(all_bytes).view(np.uint8), others), "another state was touched"
        return card.host(out), after

    def check(self, outputs: np.ndarray, after: np.ndarray) -> None:
        begin, end = self.offsets[0], self.offsets[-1]
        assert not outputs[:begin].any() and not outputs[end:].any()
        for s, slot in enumerate(self.slots):
            begin, end = self.offsets[s : s + 2]
            start = self.numbers(self.before[1, slot]) if self.resume[s] else np.zeros(self.before.shape[2:])
            part = {name: array[None, begin:end] for name, array in self.batch.items()}
            expected, state = oracle(part, start, 0, end - begin, self.dim**-0.5, self.normalize)
            if end > begin:
                check(outputs[begin:end], expected)
            got = self.numbers(after[1, self.destinations[s]])
            np.testing.assert_allclose(got, state, atol=5e-4, rtol=1e-2 if self.half else 5e-3)
            assert np.linalg.norm(got - state) <= 5e-3 * np.linalg.norm(state)


def make_pool(card: Any, values: np.ndarray, layout: str) -> tuple[StatePool, Any]:
    """A pool on the device in one of the layouts, and all of its memory; in pages, NaN lies between the states of a slot."""
    if layout == "layer":
        memory = card.array(values)
        return StatePool(memory), memory
    if layout == "slot":
        memory = card.array(values.swapaxes(0, 1))
        return StatePool(memory.swapaxes(0, 1)), memory
    layers, slots, heads, *state = values.shape
    pages = np.full((slots, layers, heads + 1, *state), 0x7FC0 if values.dtype == np.uint16 else np.nan, values.dtype)
    pages[:, :, :heads] = values.swapaxes(0, 1)
    memory = card.array(pages)
    return StatePool(memory[:, :, :heads].swapaxes(0, 1)), memory


@pytest.mark.gpu
@pytest.mark.parametrize("gates", ["mixed", "slow", "steep"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("key_heads", "heads", "dim"), GEOMETRIES)
def test_prefill_is_the_rule(card: Any, key_heads: int, heads: int, dim: int, method: str, gates: str) -> None:
    case = Case((0, 1, 63, 64, 65, 200, 3, 0), key_heads, heads, dim, gates=gates)
    case.check(*case.run(card, method))


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_thousand_tokens(card: Any, method: str) -> None:
    case = Case((1000, 17), 1, 2, 128, seed=3, gates="slow")
    case.check(*case.run(card, method))


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dim", [64, 128])
def test_keys_and_queries_as_they_are(card: Any, dim: int, method: str) -> None:
    case = Case((130, 5), 1, 2, dim, normalize=False)
    case.check(*case.run(card, method))


@pytest.mark.gpu
@pytest.mark.parametrize("id_type", ["int32", "int64"])
@pytest.mark.parametrize("method", METHODS)
def test_layouts_and_prepared_calls_have_the_same_bits(card: Any, method: str, id_type: str) -> None:
    case = Case((70, 0, 64, 9), 2, 4, 64, seed=5, id_type=id_type)
    outputs, after = case.run(card, method)
    case.check(outputs, after)
    for layout in LAYOUTS[1:]:
        for found, expected in zip(case.run(card, method, layout, prepared=layout == "page"), (outputs, after), strict=True):
            assert np.array_equal(found.view(np.uint8), expected.view(np.uint8)), layout


@pytest.mark.gpu
def test_chunked_rounds_states_of_bfloat16_once(card: Any) -> None:
    case = Case((70, 1, 130), 1, 2, 64, seed=6, half=True, gates="slow")
    case.check(*case.run(card, "chunked"))


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("key_heads", "heads", "dim"), GEOMETRIES)
def test_sequential_equals_direct_to_the_bit(card: Any, key_heads: int, heads: int, dim: int, half: bool) -> None:
    case = Case((1, 70, 0, 5), key_heads, heads, dim, seed=7, half=half)
    case.resume[:] = 1
    case.before[1] = bits(states_of(case.before.shape[1:])) if half else states_of(case.before.shape[1:])
    outputs, after = case.run(card, "sequential")
    expected, _ = make_pool(card, case.before, "layer")
    for s in range(len(case.slots)):
        begin, end = case.offsets[s : s + 2]
        if begin == end:
            expected.rec[1, int(case.destinations[s])] = expected.rec[1, int(case.slots[s])]
            continue
        part = {name: card.array(array[None, begin:end]) for name, array in case.batch.items()}
        out = gated_delta.direct(
            **part, pool=expected, slots=card.array(case.slots[s : s + 1]), destination_slots=card.array(case.destinations[s : s + 1]), layer=1
        )
        assert np.array_equal(card.host(out)[0], outputs[begin:end])
    assert np.array_equal(card.host(expected.rec).view(np.uint8), after.view(np.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_parts_of_wider_arrays(card: Any, method: str) -> None:
    """Queries, keys and values of one projection, and a prompt in two pieces, which equals the prompt whole."""
    tokens, dim = 128, 64
    batch = packed(tokens, 1, 2, dim, 8)
    wide = card.array(np.concatenate([batch[name].reshape(tokens, -1) for name in ("q", "k", "v")], 1))
    gates = card.array(np.concatenate([batch["g"], batch["beta"]], 1))
    split = {
        "q": wide[:, :dim].reshape(tokens, 1, dim), "k": wide[:, dim : 2 * dim].reshape(tokens, 1, dim),
        "v": wide[:, 2 * dim :].reshape(tokens, 2, dim), "g": gates[:, :2], "beta": gates[:, 2:],
    }  # fmt: skip
    states = np.stack([states_of((2, dim, dim))] * 2)[None]
    pool = StatePool(card.array(states))
    plain = {name: card.array(array) for name, array in batch.items()}
    whole = prefill(**plain, pool=pool, slots=card.array(np.array([0])), cu_seqlens=card.array(np.array([0, tokens])), layer=0, method=method)
    pieces = []
    for begin in (0, 64):
        part = {name: array[begin : begin + 64] for name, array in split.items()}
        offsets = card.array(np.array([0, 64]))
        pieces.append(card.host(prefill(**part, pool=pool, slots=card.array(np.array([1])), cu_seqlens=offsets, layer=0, method=method)))
    assert np.array_equal(card.host(whole), np.concatenate(pieces))
    assert np.array_equal(card.host(pool.rec[0, 0]), card.host(pool.rec[0, 1]))


@pytest.mark.gpu
def test_auto_is_one_of_the_two_by_the_mean_length(card: Any) -> None:
    for length, method in ((16, "chunked"), (15, "sequential")):
        case = Case((length, length), 1, 2, 64, lead=0, tail=0)
        for found, expected in zip(case.run(card, "auto"), case.run(card, method), strict=True):
            assert np.array_equal(found.view(np.uint8), expected.view(np.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_what_is_skipped_is_counted_and_leaves_everything_alone(card: Any, method: str) -> None:
    before = states_of((1, 4, 2, 64, 64))
    batch = {name: card.array(array) for name, array in packed(90, 1, 2, 64).items()}
    pool, out = StatePool(card.array(before)), card.array(np.full((90, 2, 64), 0x7FC0, np.uint16))
    signal = Signal(like=pool.rec)
    slots, destinations = card.array(np.array([-1, 4, 0, 1, 2, 3])), card.array(np.array([0, 0, 3, 3, 1, 2]))
    arguments = {**batch, "pool": pool, "slots": slots, "destination_slots": destinations, "layer": 0, "out": out, "method": method}
    prefill(**arguments, cu_seqlens=card.array(np.arange(0, 105, 15)), signal=signal)
    assert signal.counts() == {"out_of_range": 1, "occupied": 4}
    assert np.array_equal(card.host(pool.rec), before) and not card.host(out).any()
    for offsets in ((0, 15, 14, 60, 70, 80, 90), (-1, 1, 2, 3, 4, 5, 6), (0, 1, 2, 3, 4, 5, 91)):
        out[...] = 0x7FC0
        signal.reset()
        prefill(**arguments, cu_seqlens=card.array(np.array(offsets)), signal=signal)
        assert signal.counts() == {"out_of_range": 5}
        assert np.array_equal(card.host(pool.rec), before) and not card.host(out).any()


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_no_sequences_clear_outputs_and_no_tokens_copy_states(card: Any, method: str) -> None:
    batch = {name: card.array(array) for name, array in packed(70, 1, 2, 64).items()}
    before = states_of((1, 4, 2, 64, 64))
    pool, out = StatePool(card.array(before)), card.array(np.full((70, 2, 64), 7, np.uint16))
    prefill(**batch, pool=pool, slots=card.array(np.zeros(0, int)), cu_seqlens=card.array(np.zeros(1, int)), layer=0, out=out, method=method)
    assert not card.host(out).any() and np.array_equal(card.host(pool.rec), before)
    empty = {name: array[:0] for name, array in batch.items()}
    slots, destinations, resume = (card.array(np.array(ids)) for ids in ([0, 3], [1, 3], [1, 0]))
    offsets = card.array(np.zeros(3, int))
    prefill(**empty, pool=pool, slots=slots, destination_slots=destinations, resume=resume, cu_seqlens=offsets, layer=0, method=method)
    before[0, 1], before[0, 3] = before[0, 0], 0
    assert np.array_equal(card.host(pool.rec), before)


@pytest.mark.gpu
def test_a_captured_prefill_needs_its_workspace(card: Any) -> None:
    import cupy

    import gpukit

    gpukit.warmup(subjects=["gated_delta_prefill"])
    case = Case((70, 20), 1, 2, 64, lead=0, tail=0)
    expected = case.run(card, "chunked")
    pool, _ = make_pool(card, case.before, "layer")
    arguments = {name: card.array(array) for name, array in case.batch.items()} | {
        "pool": pool, "slots": card.array(case.slots), "cu_seqlens": card.array(case.offsets), "layer": 1, "method": "chunked",
        "destination_slots": card.array(case.destinations), "resume": card.array(case.resume),
        "out": card.array(np.zeros(case.batch["v"].shape, np.uint16)),
    }  # fmt: skip
    workspace = card.array(np.zeros(prefill_workspace(case.tokens, 2, 2), np.uint8))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    with pytest.raises(ArgumentError, match="workspace: expected an array, because the stream is capturing"):
        prefill(**arguments, stream=stream)
    prefill(**arguments, workspace=workspace, stream=stream)
    graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    assert np.array_equal(card.host(arguments["out"]), expected[0])
    assert np.array_equal(card.host(pool.rec[1]).view(np.uint8)[case.destinations], expected[1][1].view(np.uint8)[case.destinations])


@pytest.mark.gpu
def test_flash_linear_attention_agrees() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("fla.ops.gated_delta_rule")
    lengths = (100, 1, 64)
    offsets = torch.tensor(np.concatenate(([0], np.cumsum(lengths))), device="cuda")
    batch = packed(sum(lengths), 1, 2, 128, 9)
    inputs = {
        name: torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16) if array.dtype == np.uint16 else torch.from_numpy(array).cuda()
        for name, array in batch.items()
    }
    states = torch.from_numpy(states_of((1, 4, 2, 128, 128))).cuda()
    results = []
    for method in ("fla", *METHODS):
        pool = StatePool(states.clone())
        slots, resume = torch.tensor([3, 0, 1], device="cuda"), torch.tensor([1, 0, 1], device="cuda")
        out = prefill(**inputs, pool=pool, slots=slots, cu_seqlens=offsets, layer=0, resume=resume, method=method)
        results.append((out.float(), pool.rec))
    for out, rec in results[1:]:
        for found, expected in ((results[0][0], out), (results[0][1], rec)):
            assert (found - expected).norm() <= 1e-2 * expected.norm()
