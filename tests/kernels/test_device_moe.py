"""Sparse mixtures of experts: arguments and NumPy backend anywhere, the kernels against float64, and a token's bits in any batch, on a GPU."""

from __future__ import annotations

import copy
import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpukit import devices, launch
from gpukit.compile.cuda_c import compile_text, source_path
from gpukit.errors import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels import _moe, _moe_decode
from gpukit.kernels import moe as ops
from gpukit.kernels._moe import Geometry
from gpukit.kernels.moe import Fp8, MoeWeights, RowSplit, down_add, gate_up, prefill_reduce, route, route_workspace, sparse_moe, workspace_bytes
from gpukit.kernels.reference import moe as reference
from gpukit.launch import overlapping, warmup
from tests.helpers.bf16 import bits, numbers, random_bits
from tests.helpers.moe import MIXES, check_block, map_weights, margin, oracle, random_weights, scores_of
from tests.helpers.moe import numbers as numbers_of

E, H, W = 24, 256, 128
LARGE = (256, 2048, 512)
# In eight bits altogether, which few tokens have a kernel for.
ALL_W8 = ("w8", "w8", "w8")
WEIGHTS = {mix: random_weights(np, 1, E, H, W, mix) for mix in MIXES}
SMALL, QUANTIZED, ALONE, EIGHT = (WEIGHTS[MIXES[i]] for i in (0, 2, 8, 1))
X, DEST = bits(np.ones((2, H))), np.zeros((2, H), np.uint16)
IDS, ALPHA, SCALE = np.tile(np.arange(8, dtype=np.int32), (2, 1)), np.ones((2, 8), np.float32), np.ones(2, np.float32)
ACT, GROUPED = np.zeros((2, 9, W), np.float32), np.ones((4, 16), np.float32)
MEMORY = np.zeros((4, H), np.uint16)
BYTES = np.zeros(2**17, np.uint8)


def names(mix: tuple[str, str, str | None]) -> str:
    return "-".join(map(str, mix))


def changed(weights: MoeWeights, **fields: Any) -> MoeWeights:
    """Weights with other matrices."""
    named = {name: getattr(weights, name) for name in ("router", "gate_up", "down", "shared_gate_up", "shared_down")}
    return MoeWeights(**(named | fields))


def cut(one: RowSplit, **fields: Any) -> RowSplit:
    """A matrix with other planes."""
    return RowSplit(**({"format": one.format, "base": one.base, "high": one.high, "scales": one.scales} | fields))


def misaligned(array: np.ndarray) -> np.ndarray:
    """Zeros of the same shape at an address that is 8 above a multiple of 16."""
    begin = (8 - BYTES.ctypes.data) % 16
    return BYTES[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)


def wider(array: np.ndarray) -> np.ndarray:
    """Zeros of the same shape, whose rows lie a stride apart that is no multiple of 8."""
    return np.zeros((len(array), array.shape[1] + 4), array.dtype)[:, :-4]


MIXED = changed(SMALL, shared_down=QUANTIZED.shared_down)
HIGH_CUT = cut(QUANTIZED.down, high=QUANTIZED.down.high[:, :1])
VALUE, TYPE = ArgumentError, ArgumentTypeError
SHORT = np.zeros(workspace_bytes(2, SMALL) - 1, np.uint8)
ONE_SHORT = np.zeros(workspace_bytes(2, SMALL, "decode") - 1, np.uint8)
BAD_CALLS = [
    (lambda: sparse_moe(X, [1], DEST), TYPE, "weights: expected a MoeWeights, got list"),
    (lambda: sparse_moe(X[:, :128].copy(), SMALL, DEST), VALUE, r"x: expected shape \(2, 256\) like the rows of weights.router, got \(2, 128\)"),
    (lambda: sparse_moe(X[:, :100], SMALL, DEST), VALUE, "x: expected rows of a multiple of 128 elements"),
    (lambda: sparse_moe(X.astype(np.float32), SMALL, DEST), TYPE, "x: expected dtype bfloat16 or uint16, got float32"),
    (lambda: sparse_moe(X, SMALL, DEST[:1]), VALUE, r"dest: expected shape \(2, 256\) like x"),
    (lambda: sparse_moe(MEMORY[:2], SMALL, MEMORY[1:3]), VALUE, "dest: expected memory apart from x"),
    (lambda: sparse_moe(X, SMALL, DEST, exclusive=True), VALUE, "exclusive: expected False without a workspace, got True"),
    (lambda: sparse_moe(X, SMALL, DEST, schedule="fast"), VALUE, "schedule: expected one of auto, decode, prefill, got 'fast'"),
    (lambda: sparse_moe(X, SMALL, DEST, workspace=SHORT), VALUE, f"workspace: expected at least {len(SHORT) + 1} bytes, got {len(SHORT)}"),
    (lambda: sparse_moe(X, SMALL, DEST, workspace=SHORT.view(np.int8)), TYPE, "workspace: expected dtype uint8, got int8"),
    (lambda: sparse_moe(X, changed(SMALL, shared_down=None), DEST), VALUE, "weights.shared_down: expected a matrix with weights.shared_gate_up"),
    (lambda: sparse_moe(X, changed(SMALL, router=SMALL.router[:8]), DEST), VALUE, "weights.router: expected 8 to 256 rows and one for the shared"),
    (lambda: sparse_moe(X, changed(SMALL, gate_up=SMALL.gate_up[:-1]), DEST), VALUE, "weights.gate_up: expected 24 times two times a multiple"),
    (lambda: sparse_moe(X, changed(SMALL, down=SMALL.down[:-1]), DEST), VALUE, r"weights.down: expected shape \(6144, 128\), got \(6143, 128\)"),
    (lambda: sparse_moe(X, changed(SMALL, down=SMALL.down.astype(np.int32)), DEST), TYPE, "weights.down: expected dtype bfloat16 or uint16"),
    (lambda: sparse_moe(X, MIXED, DEST), TYPE, "weights.shared_down: expected format bf16 beside bf16, got w8"),
    (lambda: sparse_moe(X, changed(QUANTIZED, down=cut(QUANTIZED.down, high=None)), DEST), VALUE, "weights.down.high: expected an array of shape"),
    (lambda: sparse_moe(X, changed(QUANTIZED, down=HIGH_CUT), DEST), VALUE, "weights.down.high: expected"),
    (lambda: sparse_moe(X, changed(QUANTIZED, gate_up=cut(QUANTIZED.gate_up, scales=SMALL.router)), DEST), VALUE, "weights.gate_up"),
    (lambda: sparse_moe(X, changed(EIGHT, down=Fp8(EIGHT.down.codes, EIGHT.down.scales[:1])), DEST), VALUE, "weights.down.scales: expected shape"),
    (lambda: route(X, SMALL.router[:, :128].copy()), VALUE, r"router: expected shape \(25, 256\) like the rows of x, got \(25, 128\)"),
    (lambda: route(X, SMALL.router, ids=IDS.astype(np.int64)), TYPE, "ids: expected dtype int32, got int64"),
    (lambda: route(X, SMALL.router, alpha=ALPHA[:1]), VALUE, r"alpha: expected shape \(2, 8\), got \(1, 8\)"),
    (lambda: route(X, SMALL.router, shared=False, shared_scale=SCALE), VALUE, "shared_scale: expected None without a shared expert"),
    (lambda: route(X, SMALL.router, workspace=SHORT[: route_workspace(2, 25) - 1]), VALUE, "workspace: expected at least"),
    (lambda: gate_up(X, IDS[:1], SMALL), VALUE, r"ids: expected shape \(2, 8\), got \(1, 8\)"),
    (lambda: gate_up(X, IDS, SMALL, workspace=ONE_SHORT), VALUE, "workspace: expected at least 58640 bytes, got 58639"),
    (lambda: down_add(IDS, ALPHA, SCALE, ACT, SMALL, DEST, workspace=ONE_SHORT), VALUE, "workspace: expected at least 58640 bytes, got 58639"),
    (lambda: gate_up(X, IDS, SMALL, out=ACT[:, :8]), VALUE, "out: expected a contiguous array"),
    (lambda: gate_up(X, IDS, ALONE, out=ACT), VALUE, r"out: expected shape \(2, 8, 128\), got \(2, 9, 128\)"),
    (lambda: down_add(IDS, ALPHA, None, ACT, SMALL, DEST), TYPE, "shared_scale: expected an array"),
    (lambda: down_add(IDS, ALPHA, SCALE, ACT[:, :8].copy(), ALONE, DEST), VALUE, "shared_scale: expected None without a shared expert"),
    (lambda: down_add(IDS, ALPHA, SCALE, ACT[:1], SMALL, DEST), VALUE, r"act: expected shape \(2, 9, 128\), got \(1, 9, 128\)"),
    (lambda: prefill_reduce(GROUPED[:, :12].copy(), IDS, ALPHA, DEST), VALUE, "grouped: expected rows of a multiple of 8 elements"),
    (lambda: prefill_reduce(GROUPED, IDS, ALPHA[:, :7].copy(), DEST), VALUE, r"alpha: expected shape \(2, 8\), got \(2, 7\)"),
    (lambda: prefill_reduce(GROUPED, IDS, ALPHA, DEST), VALUE, r"out: expected shape \(2, 16\) like packed_index and grouped, got \(2, 256\)"),
    (lambda: prefill_reduce(MEMORY, IDS, ALPHA, MEMORY[:2]), VALUE, "out: expected memory apart from grouped"),
    (lambda: sparse_moe(X, changed(SMALL, gate_up=SMALL.gate_up.reshape(E, 2 * W, H)), DEST), VALUE,
     r"weights.gate_up: expected 2 dimensions, got shape \(24, 256, 256\)"),
    (lambda: sparse_moe(X, changed(EIGHT, gate_up=Fp8(EIGHT.gate_up.codes, EIGHT.gate_up.scales[0])), DEST), VALUE,
     r"weights.gate_up.scales: expected 2 dimensions, got shape \(2,\)"),
    (lambda: sparse_moe(X, changed(SMALL, router=SMALL.router[:-1]), DEST), VALUE,
     r"rows \(23 experts: the rows of weights.router, less the shared expert's gate\), got 6144"),
    (lambda: sparse_moe(X, changed(ALONE, router=SMALL.router), DEST), VALUE, r"rows \(25 experts: the rows of weights.router\), got"),
    (lambda: sparse_moe(misaligned(X), SMALL, DEST), VALUE, "x: expected an address that is a multiple of 16, got 0x"),
    (lambda: sparse_moe(wider(X), SMALL, DEST), VALUE, "x: expected rows at a stride that is a multiple of 8 elements .* got 260"),
    (lambda: sparse_moe(X, SMALL, misaligned(DEST), schedule="prefill"), VALUE, "dest: expected an address that is a multiple of 16"),
    (lambda: sparse_moe(X, SMALL, wider(DEST), schedule="prefill"), VALUE, "dest: expected rows at a stride .* for prefill, got 260"),
    (lambda: sparse_moe(X, changed(SMALL, router=misaligned(SMALL.router)), DEST), VALUE, "weights.router: expected an address that is a multiple"),
    (lambda: sparse_moe(X, SMALL, DEST, workspace=misaligned(np.append(SHORT, SHORT[:1]))), VALUE, "workspace: expected an address"),
    (lambda: route(X, misaligned(SMALL.router)), VALUE, "^router: expected an address that is a multiple of 16"),
    (lambda: route(X, SMALL.router, ids=misaligned(IDS)), VALUE, "ids: expected an address that is a multiple of 16"),
    (lambda: gate_up(X, IDS, SMALL, out=misaligned(ACT)), VALUE, "out: expected an address that is a multiple of 16"),
    (lambda: down_add(IDS, ALPHA, SCALE, misaligned(ACT), SMALL, DEST), VALUE, "act: expected an address that is a multiple of 16"),
    (lambda: prefill_reduce(misaligned(GROUPED), IDS, ALPHA, DEST[:, :16]), VALUE, "grouped: expected an address that is a multiple of 16"),
    (lambda: prefill_reduce(GROUPED, IDS, ALPHA, MEMORY[:2, 4:20]), VALUE, "out: expected an address that is a multiple of 16"),
    (lambda: prefill_reduce(GROUPED, IDS, ALPHA, wider(DEST[:, :16])), VALUE, "out: expected rows at a stride .* got 20"),
    (lambda: workspace_bytes(-1, SMALL), VALUE, "tokens: expected at least 0, got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[message for _, _, message in BAD_CALLS])
def test_bad_arguments_are_named_and_nothing_is_written(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
    assert not any(array.any() for array in (DEST, ACT, MEMORY, SHORT, BYTES))


def test_numpy_arrays_run_the_reference() -> None:
    rng = np.random.default_rng(0)
    x, dest = random_bits(rng, 3, H), random_bits(rng, 3, H)
    expected = reference.sparse_moe(x, SMALL, dest.copy())
    for schedule in ("auto", "decode", "prefill"):
        assert (sparse_moe(x, SMALL, dest.copy(), schedule=schedule) == expected).all()
    ids, alpha, scale = route(x, SMALL.router)
    act = gate_up(x, ids, SMALL)
    assert (down_add(ids, alpha, scale, act, SMALL, dest) == expected).all() and act.shape == (3, 9, W)
    assert route(x, SMALL.router[:-1], shared=False)[2] is None
    assert sparse_moe(x[:0], SMALL, dest[:0]).shape == (0, H)


def test_weights_are_checked_again_where_they_look_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = MoeWeights(*(getattr(SMALL, field.name).copy() for field in dataclasses.fields(SMALL)))
    found = _moe.geometry_of(weights)
    with monkeypatch.context() as patch:
        patch.setattr(_moe, "_check", lambda weights, device: 1 / 0)
        assert _moe.geometry_of(weights) is found and _moe.geometry_of(weights, -1) is found
        # Another device, other memory, and another object.
        for other, device in ((weights, 0), (copy.deepcopy(weights), None), (dataclasses.replace(weights), None)):
            with pytest.raises(ZeroDivisionError):
                _moe.geometry_of(other, device)
    assert _moe.geometry_of(copy.deepcopy(weights)).router != found.router
    weights.gate_up.shape = (E, 2 * W, H)
    with pytest.raises(ArgumentError, match=r"weights.gate_up: expected 2 dimensions, got shape \(24, 256, 256\)"):
        _moe.geometry_of(weights)


STRUCTS = {"bf16": "Bf16", "fp8": "Fp8", "q4": "Split<4>", "q5": "Split<5>", "q6": "Split<6>", "w8": "Wide"}
DEVICE_FILES = (
    "moe.cu",
    "moe_prefill.cu",
    *(f"moe{part}.cuh" for part in ("", "_choice", "_few", "_gate_slots", "_one", "_slots", "_stream", "_tile")),
)


def device_code() -> str:
    """All device code of mixtures of experts."""
    folder = source_path("moe").parent
    return "".join((folder / name).read_text() for name in DEVICE_FILES)


def constants_of(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", text)}


def test_the_constants_of_the_plan_are_those_of_the_kernels() -> None:
    text = device_code()
    constants = constants_of(text)
    warps, blocks = ("SCORE_WARPS", "SELECT_WARPS", "ROUTE_WARPS"), ("SELECT_BLOCKS", "ROUTE_BLOCKS")
    threads = ("HANDING_THREADS", "SCAN_THREADS", "REDUCE_THREADS")
    for name in ("BATCH", "COLUMNS", "TILE", "SCORE_PARTS", "FEW", *warps, *blocks, *threads):
        assert constants[name] == getattr(ops, f"_{name}"), name
    for name in ("GATE_WARPS", "GATE_BLOCKS", "GATE_ONE_WARPS", "DOWN_WARPS"):
        assert constants[name] == getattr(_moe_decode, name), name
    assert ops._FEW_STEPS == constants["SCORE_PARTS"] * constants["SCORE_WARPS"] * constants["SLICE_STEPS"]
    # Of the largest batch, and of the segments of first units, which are looked up before it is known how many there are.
    most = Geometry(constants["MOST_EXPERTS"], H, W, 9, "bf16", "bf16", 0, *[(0, 0, 0)] * 4, False, False, 0, 0)
    segments = constants["MOST_EXPERTS"] + 2 * constants["BATCH"]
    assert max(ops._most_segments(tokens, most) for tokens in range(1, ops._BATCH + 1)) <= segments == _moe_decode.MOST_SEGMENTS
    words = ops._SCORE_COPIES * ops._MOST_SCORES + ops._CHOICE_COPIES * _moe_decode.FEW_TOKENS * constants["TOP"]
    assert ops._GROUPS_BYTES == 128 + 4 * words + 32 * segments and ops._MOST_SCORES == constants["MOST_EXPERTS"] + 8
    assert (ops._SCORE_COPIES, ops._CHOICE_COPIES, ops._SCORED_ROWS) == tuple(
        constants[name] for name in ("SCORE_COPIES", "CHOICE_COPIES", "SCORED_ROWS")
    )
    assert (_moe_decode.USUAL_WIDTH, _moe_decode.USUAL_HIDDEN) == (constants["KNOWN_LENGTH"], constants["GATE_WARPS"] * constants["KNOWN_LENGTH"])
    # Beside the two warps that down projections of one token have on a quarter of a multiprocessor there are two of gate and up, or three that score.
    quarter, down = 65536 // (4 * 32), 2 * constants["DOWN_ONE_REGISTERS"]
    assert down + 2 * constants["GATE_ONE_REGISTERS"] <= quarter and down + 3 * constants["ONE_SCORE_REGISTERS"] <= quarter
    assert ops._GATHER_THREADS == constants["BATCH"] * constants["TOP"] and ops._GEMM_THREADS == 32 * constants["GEMM_WARPS"]
    assert ops._BLOCK_ROWS == 16 * constants["ROW_TILES"] * constants["GEMM_WARPS"]
    assert ops._SCORE_TOKENS % constants["COLUMNS"] == ops._MANY_SCORE_TOKENS % constants["COLUMNS"] == 0
    tiles = re.findall(r"^MOE_KERNELS\((\w+), [\w<>]+, (\d), \d, \d, \d, (\w+)\)", text, re.MULTILINE)
    assert {name: int(of_unit) for name, of_unit, _ in tiles} == _moe_decode.GATE_TILES
    assert {name: other == "true" for name, _, other in tiles} == {name: _moe.may_have_other(name) for name in _moe_decode.FORMATS}
    # Activations are handed on in the order of the format that takes them.
    orders = ("STRAIGHT", "NIBBLES", "BYTES")
    for kind, struct in STRUCTS.items():
        octs, order = re.findall(rf"struct {struct.split('<')[0]} {{\n.*OCTS = (\d), .*ORDER = (\w+);", text)[0]
        assert ops._AS_TERMS[kind] == orders.index(order) + 4 * int(octs), kind
    # Tokens are one number for the tensor cores, activations two.
    for kernels, terms in ((ops._GROUPED_GATE_UP, 1), (ops._GROUPED_DOWN, 2)):
        for (kind, tokens), kernel in kernels.items():
            chunk = constants["CHUNK_STEPS"] * (32 if kind in ("bf16", "w8") else 64) * 2
            assert kernel.shared_bytes == constants["CHUNKS"] * tokens * chunk * terms <= 99 * 1024, kernel


def test_the_shared_memory_that_is_asked_for_is_what_kernels_have() -> None:
    pytest.importorskip("cuda.core", reason="needs NVRTC")
    gate_bytes, one_bytes, slots_bytes = _moe_decode.gate_one_bytes, _moe_decode.down_one_bytes, _moe_decode.down_slots_bytes
    sizes, most = {}, 228 * 1024
    for kind, struct in STRUCTS.items():
        other = "true" if _moe.may_have_other(kind) else "false"
        slot = f"slot_bytes<{struct}, {other}, true>()"
        sizes[f"GateOneMemory<{struct}, {other}>"] = gate_bytes(kind)
        if kind == "bf16":
            sizes[f"SlotMemory<OneToken, {slot}>"] = slots_bytes(kind, 9, 1, _moe_decode.ONE_SEGMENTS, True)
            continue
        sizes[f"DownOneMemory<{slot}>"] = one_bytes(kind)
        # Both kernels of a token fit beside each other, with what is static and what the device keeps for a block.
        assert gate_bytes(kind) + one_bytes(kind) < most - 5 * 1024
        assert one_bytes(kind) + _moe_decode._MORE_THAN_HALF < most - 9 * 1024
    # So do blocks of its scores, with a token's 4 KiB: more of them than are wanted do not.
    third, half, block = _moe_decode._MORE_THAN_THIRD, _moe_decode._MORE_THAN_HALF, 5 * 1024
    assert slots_bytes("bf16", 9, 1, _moe_decode.ONE_SEGMENTS, True) + third < most - 9 * 1024
    assert most < 3 * (third + block) and most < 2 * (half + block)
    for kind in ("fp8", "w8"):
        sizes[f"SlotMemory<ManyTokens, slot_bytes<{STRUCTS[kind]}, false, false>()>"] = slots_bytes(
            kind, _moe_decode.SLOT_WARPS, 2, _moe_decode.MOST_SEGMENTS
        )
    lines_of_warps, few_structs = [], STRUCTS | {"w8": "FewWide"}
    for (of_gate, of_down), few in _moe_decode._EXPERTS_FEW.items():
        has_other = _moe.may_have_other(of_gate)
        struct = f"FewMemory<{few_structs[of_gate]}, {few_structs[of_down]}, {str(has_other).lower()}>"
        sizes[struct] = _moe_decode.experts_few_bytes(of_gate, of_down)
        lines_of_warps.append(f"static_assert({struct}::WARPS == {few.warps});")
        assert few.kernel.shared_bytes == sizes[struct] <= 227 * 1024 and has_other == _moe.may_have_other(of_down)
    is_at_least = {True: "<=", False: "=="}
    lines = [f"static_assert(sizeof({struct}) {is_at_least[size == _moe_decode._MORE_THAN_HALF]} {size});" for struct, size in sizes.items()]
    assert len(lines) == 19
    lines += lines_of_warps
    # What the host's numbers of tokens, warps and slots are on the device.
    batches = {
        "FewTokens<2>": (_moe_decode.FEW_TOKENS, _moe_decode.DOWN_WARPS, 2),
        "ManyTokens": (64, _moe_decode.SLOT_WARPS, 2),
        "OneToken": (1, 9, 1),
    }
    for batch, (tokens, warps, slots) in batches.items():
        lines.append(f"static_assert({batch}::TOKENS == {tokens} && {batch}::WARPS == {warps} && {batch}::SLOTS == {slots});")
    lines.append(f"static_assert(DOWN_ONE_WARPS == 8 && FEW_SEGMENTS == {_moe_decode.FEW_SEGMENTS} && FEW_GROUPS == {_moe_decode.GATE_GROUPS});")
    compile_text("\n".join(['#include "moe_few.cuh"', '#include "moe_one.cuh"', *lines]), "sizes.cu", "sm_90")
    # What is static beside it: sums of all paths, what they are multiplied by, and residuals.
    floats = ops._BATCH * (9 * (16 + 1) + 16)
    assert 4 * floats <= 48 * 1024 and slots_bytes("w8", 8, 2, 384) + 4 * floats <= 227 * 1024


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_kernels_of_the_usual_sizes_are_for_the_devices_that_they_were_measured_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    properties = SimpleNamespace(compute_capability=capability, multiprocessors=132)
    monkeypatch.setattr("gpukit.devices.properties", lambda device: properties)

    def chosen(kind: str, hidden: int, width: int, tokens: int) -> list[str]:
        geometry = Geometry(256, hidden, width, 9, kind, kind, 0, *[(0, 0, 0)] * 4, False, False, 0, 0)
        x = (0, (tokens, hidden), (hidden, 1), "uint16", 0)
        up, down = ops._gate_up(x, 0, tokens, geometry, 0, 0, (0, 0), 0), ops._down(x, 0, tokens, geometry, 0, 0, 0, 0, 0)
        names = up[0].name, down[0].name
        # Blocks of gate and up projections have a unit each, if there are so many; those of down projections a tile of rows.
        is_one = "one" in names[0]
        units = ops._most_segments(tokens, geometry) * width // (8 * (1 if is_one else _moe_decode.GATE_TILES[kind]))
        assert up[1:3] == (min(units, 132 if is_one else 132 * 3), 256 if is_one else 128) and down[1] == hidden // 16
        warps = {"one": 9 if kind == "bf16" else 8, "slots": 8}
        assert down[2] == 32 * next((number for part, number in warps.items() if part in names[1]), 12)
        return list(names)

    is_hopper = capability == (9, 0)
    for kind in ("bf16", "fp8", "q4", "q5", "q6", "w8"):
        plain = [f"gate_up_{kind}", f"down_{kind}"]
        many = [f"gate_up_{kind}", f"down_slots_{kind}"] if is_hopper and kind in ("fp8", "w8") else plain
        assert chosen(kind, 2048, 512, 1) == ([f"gate_up_one_{kind}", f"down_one_{kind}"] if is_hopper else plain)
        assert chosen(kind, 2048, 384, 1) == ([f"gate_up_one_{kind}", f"down_{kind}"] if is_hopper else plain)
        assert chosen(kind, 1024, 512, 1) == ([f"gate_up_{kind}", f"down_one_{kind}"] if is_hopper else plain)
        assert chosen(kind, 2048, 512, 2) == chosen(kind, 2048, 512, 5) == chosen(kind, 128, 512, 64) == many
        assert chosen(kind, 2048, 384, 4) == chosen(kind, 2048, 384, 64) == plain
    # Both projections of few tokens by one launch.
    for of_gate, of_down in (("bf16", "bf16"), ("fp8", "fp8"), ("q4", "q5"), ("q6", "q6"), ("w8", "w8"), ("q5", "q5"), ("fp8", "bf16")):
        for tokens, hidden, width in ((1, 2048, 512), (2, 2048, 512), (4, 2048, 512), (5, 2048, 512), (4, 1024, 512), (4, 2048, 384)):
            found = _moe_decode.experts_few_for(of_gate, of_down, tokens, hidden, width, 0)
            is_there = is_hopper and tokens in (2, 4) and (hidden, width) == (2048, 512) and (of_gate, of_down) not in (("q5", "q5"), ("fp8", "bf16"))
            assert (found is not None) == is_there
            assert not found or found.kernel.name == ("experts_few_q4_q5" if of_gate == "q4" else f"experts_few_{of_gate}")


@pytest.mark.parametrize("is_early", [True, False])
def test_few_tokens_are_chosen_for_while_the_next_launch_comes_up(monkeypatch: pytest.MonkeyPatch, is_early: bool) -> None:
    """Which launches a batch is, what they wait for, and whether words are taken back before launches in front have ended."""
    monkeypatch.setattr("gpukit.devices.properties", lambda device: SimpleNamespace(compute_capability=(9, 0), multiprocessors=132))
    monkeypatch.setattr("gpukit.launch.Kernel.has_room", lambda kernel, device, stream: kernel.cluster is not None)

    def launches(tokens: int, hidden: int, width: int) -> list[tuple[str, tuple[int, ...]]]:
        geometry = Geometry(256, hidden, width, 9, "fp8", "fp8", 0, *[(0, 0, 0)] * 4, False, False, 0, 0)
        x = (0, (tokens, hidden), (hidden, 1), "uint16", 0)
        planned = ops._decode(x, x, geometry, [64] * 6, 5, 0, 0, is_early)
        # Of routing whether there are words, when they are taken back, and what else is; of projections what they wait for, or where the sums are.
        ends = {"gate": -3, "rout": -4}
        return [(kernel.name, arguments[ends.get(kernel.name[:4], -2) :]) for kernel, _, _, arguments in planned]

    early, nothing = int(is_early), (0, 0, 0)
    one = [("scores_one", (early, 64)), ("gate_up_one_fp8", (1, 256, 5)), ("down_one_fp8", (1, 256))]
    assert launches(1, 2048, 512) == one
    nobody_waits = (0, 0, 0, 0)
    assert launches(1, 2048, 384) == [("route_few", nobody_waits), ("gate_up_one_fp8", nothing), ("down_fp8", (0, 0))]
    for tokens in (2, 4):
        # Activations are two numbers of 16 bits each, in accesses of 16 bytes.
        assert launches(tokens, 2048, 512) == [("route_few", (1, early, 64, tokens * 9 * 512 * 4 // 16)), ("experts_few_fp8", (0, 2048))]
    assert launches(4, 2048, 384) == [("route_few", nobody_waits), ("gate_up_fp8", nothing), ("down_fp8", (0, 0))]
    some = [("route_few", nobody_waits), ("gate_up_fp8", nothing), ("down_slots_fp8", (0, 0))]
    assert launches(5, 2048, 512) == launches(16, 2048, 512) == some
    # Batches behind each other, of which the last one is a token.
    assert launches(65, 2048, 512)[-3:] == one


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize(("experts", "hidden"), [(256, 2048), (24, 256), (8, 128), (131, 384), (255, 128)])
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 17, 64, 65, 200])
def test_routing_equals_float64(card: Any, tokens: int, experts: int, hidden: int, has_shared: bool) -> None:
    rng = np.random.default_rng(tokens)
    x, router = random_bits(rng, tokens, hidden + 8), random_bits(rng, experts + has_shared, hidden, scale=hidden**-0.5)
    here = route(x[:, :hidden], router, shared=has_shared)
    workspace = card.array(np.full(route_workspace(tokens, len(router)), 0xFF, np.uint8))
    signal = Signal(like=workspace)
    kinds = (((tokens, 8), np.int32), ((tokens, 8), np.float32), ((tokens,), np.float32))
    outputs = [card.array(np.full(shape, 99, dtype)) for shape, dtype in kinds]
    there = route(
        card.array(x)[:, :hidden], card.array(router), shared=has_shared, ids=outputs[0], alpha=outputs[1],
        shared_scale=outputs[2] if has_shared else None, workspace=workspace, signal=signal,
    )  # fmt: skip
    exact = numbers(x[:, :hidden]) @ numbers(router).T
    # Two scores closer than their rounding may change places.
    ordered = np.sort(exact[:, :experts], 1)[:, ::-1][:, :9]
    clear = (ordered[:, :-1] - ordered[:, 1:]).min(1) > 1e-4
    assert clear.mean() > 0.8 or tokens < 8
    for one, other in zip(here, there, strict=True):
        if one is not None:
            found = card.host(other)
            assert (found == one)[clear].all() if found.dtype == np.int32 else np.allclose(found[clear], one[clear], rtol=1e-4)
    assert signal.counts() == {}
    alpha = card.host(there[1])
    assert (alpha[:, :-1] >= alpha[:, 1:]).all() and np.allclose(alpha.sum(1), 1, rtol=1e-5)


@pytest.mark.parametrize("has_room", [True, False])
def test_a_batch_is_selected_by_a_cluster_where_there_is_room_for_one(monkeypatch: pytest.MonkeyPatch, has_room: bool) -> None:
    monkeypatch.setattr("gpukit.launch.Kernel.has_room", lambda kernel, device, stream: has_room)
    one, cluster = ("select", 1), ("select_together", 8) if has_room else ("select", 1)
    for tokens, (name, blocks) in ((16, one), (17, cluster), (64, cluster), (65, cluster), (1024, cluster), (4096, cluster)):
        x = (0, (tokens, 4096), (4096, 1), "uint16", 0)
        _, (kernel, number, threads, _) = ops._routing(ops._Routed(x, 0, tokens, 0, 256, True, (0, 0, 8, 0, 1), 0, 0), 0, 0, 0, 0)
        assert (kernel.name, number, threads) == (name, blocks * -(-tokens // 64), 512), tokens


@pytest.mark.gpu
def test_ties_zeros_infinities_and_nan(card: Any) -> None:
    rows = np.zeros((9, 200), np.float32)
    rows[1] = np.where(np.arange(200) % 3, 0, -0.0)
    rows[2, [199, 5, 77, 3, 150]] = 4
    rows[3, 40:60] = 2
    rows[4, 100] = np.inf
    rows[5] = -np.arange(200)
    rows[6, 13] = np.nan
    rows[7, :12] = [1, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1]
    rows[8] = -np.inf
    rows[8, 192:] = 1
    # Token t meets column t of the router alone: 1 times its scores, and zeros.
    x, router = np.zeros((9, 256), np.float32), np.zeros((201, 256), np.float32)
    x[np.arange(9), np.arange(9)] = 1
    router[:200, :9] = np.where(np.isfinite(rows), rows, 0).T
    bad = bits(x)
    # An infinity or a NaN times the others' zeros would be NaN: these three tokens go alone.
    signals = Signal(), Signal(like=card.array(bad))
    for token in range(9):
        own = router.copy()
        own[:200, token] = rows[token]
        alone = bits(x[token : token + 1])
        alone[:, :] = 0
        alone[0, token] = bits(1)
        here = route(alone, bits(own), signal=signals[0])
        there = route(card.array(alone), card.array(bits(own)), signal=signals[1])
        assert (card.host(there[0]) == here[0]).all(), token
        np.testing.assert_allclose(card.host(there[1]), here[1], rtol=1e-5)
    assert signals[1].counts() == signals[0].counts() == {"out_of_range": 1}
    for copies in (1, 3):
        many = np.tile(bits(x), (copies, 1))
        whole = route(card.array(many), card.array(bits(router)))
        assert (card.host(whole[0]) == route(many, bits(router))[0]).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("experts", "hidden", "has_shared"), [(256, 2048, True), (256, 1920, False), (131, 1152, True), (20, 4096, True), (8, 128, False)]
)
def test_a_token_is_routed_to_the_same_bits_in_any_batch(card: Any, experts: int, hidden: int, has_shared: bool) -> None:
    """Few tokens are routed in one launch, many in two."""
    rng = np.random.default_rng(hidden)
    x, router = card.array(random_bits(rng, 70, hidden)), card.array(random_bits(rng, experts + has_shared, hidden, scale=hidden**-0.5))
    together = [None if part is None else card.host(part) for part in route(x, router, shared=has_shared)]
    for tokens in (1, 2, 7, 8, 9, 15, 16, 17, 64):
        for first in (0, 5):
            for part, whole in zip(route(x[first : first + tokens], router, shared=has_shared), together, strict=True):
                assert part is None or np.array_equal(card.host(part), whole[first : first + tokens]), (tokens, first)


TOKENS = [1, 2, 3, 7, 8, 9, 16, 17, 63, 64, 65, 128, 130]


def run(card: Any, weights: MoeWeights, x: np.ndarray, dest: np.ndarray, schedule: str, signal: Any = None) -> np.ndarray:
    """The block on a GPU, in a workspace full of NaN, with rows of x and dest inside wider ones."""
    tokens, hidden = x.shape
    wide_x, wide_dest = np.full((tokens, hidden + 8), 0x7FC0, np.uint16), np.full((tokens, hidden + 16), 0x1234, np.uint16)
    wide_x[:, :hidden], wide_dest[:, :hidden] = x, dest
    there = card.array(wide_dest)
    workspace = card.array(np.full(workspace_bytes(tokens, weights, schedule), 0xFF, np.uint8))
    sparse_moe(card.array(wide_x)[:, :hidden], weights, there[:, :hidden], workspace=workspace, schedule=schedule, signal=signal)
    found = card.host(there)
    assert (found[:, hidden:] == 0x1234).all()
    return np.ascontiguousarray(found[:, :hidden])


def block_by_parts(weights: MoeWeights, x: Any, dest: Any) -> None:
    ids, alpha, scale = route(x, weights.router, shared=weights.shared_down is not None)
    down_add(ids, alpha, scale, gate_up(x, ids, weights), weights, dest)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["decode", "prefill"])
@pytest.mark.parametrize("mix", MIXES, ids=names)
def test_the_block_equals_float64(card: Any, mix: tuple[str, str, str | None], schedule: str) -> None:
    weights = WEIGHTS[mix]
    there = map_weights(weights, card.array)
    rng = np.random.default_rng(2)
    x, dest = random_bits(rng, max(TOKENS), H), random_bits(rng, max(TOKENS), H)
    expected, margins = oracle(np, x, weights, dest)
    for tokens in TOKENS:
        check_block(np, run(card, there, x[:tokens], dest[:tokens], schedule), expected[:tokens], margins[:tokens])


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["decode", "prefill"])
@pytest.mark.parametrize("mix", MIXES[:3], ids=names)
def test_sums_near_zero_are_as_exact_as_others(card: Any, mix: tuple[str, str, str | None], schedule: str) -> None:
    """Activations that went from one product to the other as bfloat16 would be a hundred times as far off."""
    weights = WEIGHTS[mix]
    # So many that runs of bf16 in "prefill" are of 128 tokens.
    x = random_bits(np.random.default_rng(6), 200, H)
    added, margins = oracle(np, x, weights, np.zeros((200, H), np.uint16))
    dest = bits(-added)
    found = run(card, map_weights(weights, card.array), x, dest, schedule)
    wanted, clear = numbers(dest) + added, margins > 1e-4
    assert (np.abs(numbers(found) - wanted) <= 5e-5 + 2**-8 * np.abs(wanted))[clear].all()


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["decode", "prefill"])
@pytest.mark.parametrize("sizes", [(8, 128, 128), (256, 384, 256), (33, 128, 384), (16, 1024, 128), (16, 384, 512), (9, 2048, 128)], ids=str)
@pytest.mark.parametrize("mix", [*MIXES[:3], MIXES[5]], ids=names)
def test_other_geometries(card: Any, mix: tuple[str, str, str | None], sizes: tuple[int, int, int], schedule: str) -> None:
    weights = random_weights(np, 5, *sizes, mix)
    there = map_weights(weights, card.array)
    rng = np.random.default_rng(3)
    x, dest = random_bits(rng, 70, sizes[1]), random_bits(rng, 70, sizes[1])
    expected, margins = oracle(np, x, weights, dest)
    for tokens in (1, 3, 70):
        check_block(np, run(card, there, x[:tokens], dest[:tokens], schedule), expected[:tokens], margins[:tokens])


@pytest.mark.gpu
@pytest.mark.parametrize("mix", [MIXES[0], MIXES[1], MIXES[2], MIXES[6]], ids=names)
def test_the_geometry_of_a_large_model(card: Any, mix: tuple[str, str, str | None]) -> None:
    import cupy

    weights = random_weights(cupy, 6, *LARGE, mix)
    rng = np.random.default_rng(4)
    for tokens in (1, 2, 4, 5, 16, 63, 64, 65, 128, 1024, 2048, 2049, 4096):
        x, dest = random_bits(rng, tokens, LARGE[1]), random_bits(rng, tokens, LARGE[1])
        expected, margins = oracle(cupy, cupy.asarray(x), weights, cupy.asarray(dest))
        check_block(cupy, cupy.asarray(run(card, weights, x, dest, "auto")), expected, margins)
        if 64 < tokens <= 128:
            check_block(cupy, cupy.asarray(run(card, weights, x, dest, "decode")), expected, margins)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["decode", "prefill"])
@pytest.mark.parametrize("mix", MIXES[:4], ids=names)
def test_a_token_has_the_same_bits_in_any_batch(card: Any, mix: tuple[str, str, str | None], schedule: str) -> None:
    weights = WEIGHTS[mix]
    # An expert of all tokens, and a pair of tokens that share all eight.
    weights = changed(weights, router=weights.router.copy())
    # So many that runs of bf16 in "prefill" are of 128 tokens, those of fewer tokens of 64.
    rng = np.random.default_rng(5)
    x, dest = random_bits(rng, 200, H), random_bits(rng, 200, H)
    x[:, 0], weights.router[:, 0] = bits(8), 0
    weights.router[11, 0] = bits(8)
    x[3] = x[40]
    # Neighbours that are NaN, and infinite.
    x[7, 5], x[21, 9] = 0x7FC0, 0x7F80
    there = map_weights(weights, card.array)
    together = run(card, there, x, dest, schedule)
    assert (together[7] == dest[7]).all() and np.isfinite(numbers(np.delete(together, [7, 21], 0))).all()
    assert (card.host(route(card.array(x), there.router, shared=mix[2] is not None)[0])[np.delete(np.arange(200), [7, 21])] == 11).any(1).all()
    for tokens in (1, 2, 3, 8, 9, 16, 31, 63, 64, 65, 100):
        for first in (0, 3, 30):
            some = slice(first, first + tokens)
            assert np.array_equal(run(card, there, x[some], dest[some], schedule), together[some]), (tokens, first)
    order = rng.permutation(200)
    assert np.array_equal(run(card, there, x[order], dest[order], schedule), together[order])


@pytest.mark.gpu
@pytest.mark.parametrize("mix", [*MIXES, ALL_W8], ids=names)
def test_a_token_has_the_same_bits_in_any_batch_of_a_large_model(card: Any, mix: tuple[str, str, str | None]) -> None:
    import cupy

    weights = random_weights(cupy, 9, *LARGE, mix)
    rng = np.random.default_rng(9)
    x, dest = random_bits(rng, 64, LARGE[1]), random_bits(rng, 64, LARGE[1])
    # A token that is left, and one that another has all experts in common with.
    x[5, 3], x[9] = 0x7FC0, x[40]
    together = run(card, weights, x, dest, "decode")
    assert (together[5] == dest[5]).all()
    for first, tokens in ((0, 1), (5, 1), (9, 2), (3, 3), (20, 4), (4, 5), (38, 9), (0, 16), (1, 63)):
        some = slice(first, first + tokens)
        assert np.array_equal(run(card, weights, x[some], dest[some], "decode"), together[some]), (tokens, first)


@pytest.mark.gpu
@pytest.mark.parametrize("mix", [*MIXES[:3], MIXES[5], MIXES[8]], ids=names)
def test_the_parts_of_a_large_model_are_its_whole_eager_and_overlapping(card: Any, mix: tuple[str, str, str | None]) -> None:
    """Kernels for one token and for several, of layers that each take what the one before has left, and start before it has ended."""
    import cupy

    from gpukit.graphs import capture

    warmup(subjects=["moe"])
    layers = [random_weights(cupy, seed, *LARGE, mix) for seed in (10, 11)]
    rng = np.random.default_rng(12)
    stream = cupy.cuda.Stream(non_blocking=True)
    for tokens in (1, 3, 5, 64):
        start, other = random_bits(rng, tokens, LARGE[1]), random_bits(rng, tokens, LARGE[1])
        workspace = card.array(np.full(workspace_bytes(tokens, layers[0], "decode"), 0xFF, np.uint8))
        one, two = card.array(start), card.array(other)
        for _ in range(2):
            for weights in layers:
                for x, dest in ((one, two), (two, one)):
                    block_by_parts(weights, x, dest)
        wanted = card.host(one), card.host(two)
        assert np.isfinite(numbers(wanted[0])).all() and (wanted[0] != start).any()
        for overlaps in (False, True):
            one, two = card.array(start), card.array(other)
            cupy.cuda.Device().synchronize()
            with capture(stream) as graph, overlapping(overlaps):
                for weights in layers:
                    for x, dest in ((one, two), (two, one)):
                        sparse_moe(x, weights, dest, workspace=workspace, exclusive=overlaps, schedule="decode", stream=stream)
            graph.launch()
            graph.launch()
            stream.synchronize()
            assert all(np.array_equal(card.host(found), own) for found, own in zip((one, two), wanted, strict=True)), (tokens, overlaps)


@pytest.mark.gpu
def test_few_tokens_are_chosen_for_alike_whatever_their_scores(card: Any) -> None:
    """Equal scores, pairs of equal ones, a warp's experts that are all small, so that many come into question, zeros of both signs, and NaN."""
    import cupy

    weights = random_weights(cupy, 14, *LARGE, MIXES[1])
    rng = np.random.default_rng(14)
    plain = numbers(card.host(weights.router))
    small, equal, pairs, signed = (plain.copy() for _ in range(4))
    small[64:96, 0], small[200:232, 0] = -8, 8
    equal[:], pairs[1::2] = equal[:1], pairs[:-1:2]
    signed[:, 1:], signed[:, 0] = 0, np.where(np.arange(257) % 3, 0.0, -0.0)
    for router in (plain, small, equal, pairs, signed):
        own = changed(weights, router=card.array(bits(router)))
        for tokens in (1, 2, 4):
            x, dest = random_bits(rng, tokens, LARGE[1]), random_bits(rng, tokens, LARGE[1])
            x[:, 0] = bits(1)
            by_parts = card.array(dest)
            block_by_parts(own, card.array(x), by_parts)
            assert np.array_equal(run(card, own, x, dest, "decode"), card.host(by_parts)), tokens
    for tokens in (1, 4):
        x, dest = random_bits(rng, tokens, LARGE[1]), random_bits(rng, tokens, LARGE[1])
        x[tokens - 1, 5] = 0x7FC0
        signal = Signal(like=card.array(x))
        left = (run(card, weights, x, dest, "decode", signal) == dest).all(1)
        assert np.flatnonzero(left).tolist() == [tokens - 1] and signal.counts() == {"out_of_range": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("mix", [MIXES[1], MIXES[2], MIXES[8]], ids=names)
def test_a_batch_without_any_choice_overlaps_others(card: Any, mix: tuple[str, str, str | None]) -> None:
    """No token has an expert, and so no block a unit: what comes behind may not look at the groups of the call before."""
    import cupy

    from gpukit.graphs import capture

    warmup(subjects=["moe"])
    weights = random_weights(cupy, 17, 24, *LARGE[1:], mix)
    rng = np.random.default_rng(17)
    stream = cupy.cuda.Stream(non_blocking=True)
    for tokens in (1, 2, 4):
        x, dest = random_bits(rng, tokens, LARGE[1]), random_bits(rng, tokens, LARGE[1])
        none, good, left, sums = (card.array(array) for array in (np.full_like(x, 0x7FC0), x, dest, dest))
        workspace, signal = card.array(np.full(workspace_bytes(tokens, weights, "decode"), 0xFF, np.uint8)), Signal(like=left)
        cupy.cuda.Device().synchronize()
        with capture(stream) as graph, overlapping():
            for own_x, own_dest in ((good, sums), (none, left), (none, left), (good, sums), (none, left)):
                sparse_moe(own_x, weights, own_dest, workspace=workspace, exclusive=True, schedule="decode", stream=stream, signal=signal)
        for _ in range(20):
            graph.launch()
        stream.synchronize()
        assert np.array_equal(card.host(left), dest) and (card.host(sums) != dest).any(), tokens
        assert signal.counts() == {"out_of_range": 3 * 20 * tokens}


@pytest.mark.gpu
@pytest.mark.parametrize("mix", [MIXES[0], MIXES[1], MIXES[5]], ids=names)
def test_one_token_has_the_same_bits_on_few_multiprocessors(card: Any, monkeypatch: pytest.MonkeyPatch, mix: tuple[str, str, str | None]) -> None:
    """Blocks that say in several places what is chosen, and have many units, of the shared expert too."""
    import cupy

    weights = random_weights(cupy, 18, 24, *LARGE[1:], mix)
    rng = np.random.default_rng(18)
    x, dest = random_bits(rng, 1, LARGE[1]), random_bits(rng, 1, LARGE[1])
    wanted = run(card, weights, x, dest, "decode")
    few = dataclasses.replace(devices.properties(0), multiprocessors=5)
    monkeypatch.setattr("gpukit.devices.properties", lambda device: few)
    assert np.array_equal(run(card, weights, x, dest, "decode"), wanted)


@pytest.mark.gpu
def test_one_token_of_models_in_several_formats_by_turns(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded when first called: kernels of the same device code ask for different shared memory."""
    import cupy

    for kernel in launch.kernels():
        monkeypatch.setattr(kernel, "handles", {})
    rng = np.random.default_rng(19)
    x, dest = random_bits(rng, 1, LARGE[1]), random_bits(rng, 1, LARGE[1])
    weights = {mix: random_weights(cupy, 19, 24, *LARGE[1:], mix) for mix in (MIXES[1], MIXES[0])}
    first, again = ([run(card, own, x, dest, "decode") for own in weights.values()] for _ in range(2))
    assert np.array_equal(first, again) and (first[0] != dest).any()


@pytest.mark.gpu
@pytest.mark.parametrize("mix", [*MIXES[:3], MIXES[9], ALL_W8], ids=names)
def test_few_tokens_have_the_same_bits_whatever_blocks_are_there(
    card: Any, monkeypatch: pytest.MonkeyPatch, mix: tuple[str, str, str | None]
) -> None:
    """Fewer blocks than multiprocessors; more, of which some come up when others have ended; and those of two streams in each other's way."""
    import cupy

    weights = random_weights(cupy, 19, 24, *LARGE[1:], mix)
    rng = np.random.default_rng(19)
    starts = [(random_bits(rng, tokens, LARGE[1]), random_bits(rng, tokens, LARGE[1])) for tokens in (2, 3, 4)]
    wanted = [run(card, weights, x, dest, "decode") for x, dest in starts]
    properties = devices.properties(0)
    for multiprocessors in (5, 3 * properties.multiprocessors):
        with monkeypatch.context() as patch:
            other = dataclasses.replace(properties, multiprocessors=multiprocessors)
            patch.setattr("gpukit.devices.properties", lambda device, other=other: other)
            assert all(np.array_equal(run(card, weights, *start, "decode"), end) for start, end in zip(starts, wanted, strict=True))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    workspaces = [card.array(np.full(workspace_bytes(4, weights, "decode"), 0xFF, np.uint8)) for _ in streams]
    calls = [[(card.array(x), card.array(dest)) for x, dest in starts * 20] for _ in streams]
    cupy.cuda.Device().synchronize()
    with overlapping():
        for number in range(len(calls[0])):
            for stream, workspace, pairs in zip(streams, workspaces, calls, strict=True):
                x, dest = pairs[number]
                sparse_moe(x, weights, dest, workspace=workspace, exclusive=True, schedule="decode", stream=stream)
    cupy.cuda.Device().synchronize()
    for pairs in calls:
        assert all(np.array_equal(card.host(dest), wanted[number % 3]) for number, (_, dest) in enumerate(pairs))


@pytest.mark.gpu
@pytest.mark.parametrize("mix", [MIXES[1], MIXES[2], MIXES[8]], ids=names)
def test_calls_of_any_tokens_overlap_in_one_workspace(card: Any, mix: tuple[str, str, str | None]) -> None:
    """Words that are waited for are the call's own, whatever had the workspace before, and whether it is given or new."""
    import cupy

    from gpukit.graphs import capture

    layers = [random_weights(cupy, seed, 24, *LARGE[1:], mix) for seed in (15, 16)]
    rng = np.random.default_rng(15)
    calls = [(tokens, "prefill" if tokens == 70 else "decode") for tokens in (1, 4, 1, 3, 17, 1, 70, 2, 65)]
    starts = [(random_bits(rng, tokens, LARGE[1]), random_bits(rng, tokens, LARGE[1])) for tokens, _ in calls]
    most = max(workspace_bytes(tokens, layers[0], schedule) for tokens, schedule in calls)
    workspace, stream = card.array(np.full(most, 0xFF, np.uint8)), cupy.cuda.Stream(non_blocking=True)

    def ends(way: str) -> list[np.ndarray]:
        pairs = [(card.array(x), card.array(dest)) for x, dest in starts]
        cupy.cuda.Device().synchronize()

        def chain(workspace: Any) -> None:
            exclusive = way in ("captured", "exclusive")
            for weights in layers:
                for (x, dest), (_, schedule) in zip(pairs, calls, strict=True):
                    sparse_moe(x, weights, dest, workspace=workspace, exclusive=exclusive, schedule=schedule, stream=stream)

        with overlapping(way != "plain"):
            if way == "captured":
                with capture(stream) as graph:
                    chain(workspace)
            for _ in range(3):
                graph.launch() if way == "captured" else chain(None if way == "new" else workspace)
        stream.synchronize()
        return [card.host(dest) for _, dest in pairs]

    wanted = ends("plain")
    assert all(np.isfinite(numbers(end)).all() and (end != start).any() for end, (_, start) in zip(wanted, starts, strict=True))
    for way in ("captured", "exclusive", "given", "new"):
        assert all(np.array_equal(found, end) for found, end in zip(ends(way), wanted, strict=True)), way


@pytest.mark.gpu
@pytest.mark.parametrize("mix", [("fp8", "fp8", "fp8"), ("fp8", "fp8", None), ("w8", "w8", "w8"), ("w8", "w8", None)], ids=names)
def test_rows_of_eight_bits_of_all_experts_and_of_none(card: Any, mix: tuple[str, str, str | None]) -> None:
    """Down projections through shared memory: more than 32 units a warp, no shared expert, and tokens that have no experts."""
    weights = random_weights(np, 13, 256, 256, 512, mix)
    # 64 tokens have every expert twice.
    weights = changed(weights, router=bits(np.eye(256 + (mix[2] is not None), 256)))
    there = map_weights(weights, card.array)
    rng = np.random.default_rng(13)
    x, dest = bits(np.abs(rng.standard_normal((64, 256))) * 0.01), random_bits(rng, 64, 256)
    x[np.arange(64)[:, None], (8 * np.arange(64)[:, None] + np.arange(8)) % 256] = bits(np.arange(2, 10) / 8)
    expected, margins = oracle(np, x, weights, dest)
    assert len(np.unique(route(x, weights.router, shared=mix[2] is not None)[0])) == 256
    for tokens in (3, 33, 64):
        check_block(np, run(card, there, x[:tokens], dest[:tokens], "decode"), expected[:tokens], margins[:tokens])
    for tokens in (3, 64):
        assert (run(card, there, np.full_like(x[:tokens], 0x7FC0), dest[:tokens], "decode") == dest[:tokens]).all()
    ids = np.tile(np.arange(8, dtype=np.int32), (5, 1))
    ids[1], ids[3, 2] = -1, 256
    alpha, scale = np.full((5, 8), 0.125, np.float32), None if mix[2] is None else np.ones(5, np.float32)
    act, sums = rng.standard_normal((5, 8 + (mix[2] is not None), 512)).astype(np.float32), card.array(dest[:5])
    on_device = [None if array is None else card.array(array) for array in (ids, alpha, scale, act)]
    down_add(*on_device, there, sums)
    found, wanted = card.host(sums), reference.down_add(ids, alpha, scale, act, weights, dest[:5].copy())
    assert (found[[1, 3]] == dest[[1, 3]]).all() and (found[[0, 2, 4]] != dest[[0, 2, 4]]).any(1).all()
    np.testing.assert_allclose(numbers(found), numbers(wanted), rtol=2**-7, atol=2e-3 * np.abs(numbers(wanted)).max())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("kind", ["fp8", "q4", "q5", "q6", "w8"])
def test_every_code_is_the_number_that_it_stands_for(card: Any, kind: str, tokens: int) -> None:
    """A token of a single one gives the numbers of that column, and so do activations.

    Both projections of two to four tokens have a kernel of their own, whose bits another test compares with these.
    """
    rng = np.random.default_rng(17)

    def codes(rows: int, columns: int) -> Any:
        if kind == "fp8":
            values = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
            values[(values & 0x7F) == 0x7F] = 0
            return Fp8(values, np.ones((rows, columns // 128), np.float32))
        one = RowSplit.empty(kind, rows, columns)
        high = None if one.high is None else rng.integers(0, 256, one.high.shape).astype(np.uint8)
        return RowSplit(kind, rng.integers(0, 256, one.base.shape).astype(np.uint8), high, np.ones_like(one.scales))

    weights = MoeWeights(bits(rng.standard_normal((8, 2048))), codes(8 * 1024, 2048), codes(8 * 2048, 512))
    there = map_weights(weights, card.array)
    token = np.arange(tokens)
    ids = card.array(np.tile(np.arange(8, dtype=np.int32), (tokens, 1)))
    of_gate, of_down = numbers_of(np, weights.gate_up).reshape(8, 1024, 2048), numbers_of(np, weights.down).reshape(8, 2048, 512)
    # A lane has up to 16 elements of a step: each of them is met, whatever the number of tokens.
    for first in range(0, 2048, 129):
        column = (first + 37 * token) % 2048
        of_act, rank = column % 512, column % 8
        x, alpha, act = np.zeros((tokens, 2048)), np.zeros((tokens, 8), np.float32), np.zeros((tokens, 8, 512), np.float32)
        x[token, column], alpha[token, rank], act[token, rank, of_act] = 1, 1, 1
        gate, up = np.split(of_gate[:, :, column].transpose(2, 0, 1), 2, axis=2)
        np.testing.assert_allclose(card.host(gate_up(card.array(bits(x)), ids, there)), gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-30)
        sums = card.array(np.zeros((tokens, 2048), np.uint16))
        down_add(ids, card.array(alpha), None, card.array(act), there, sums)
        assert np.array_equal(numbers(card.host(sums)), of_down[rank, :, of_act])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 16, 64])
def test_tokens_that_share_all_some_and_no_experts(card: Any, tokens: int) -> None:
    weights = random_weights(np, 7, 256, 128, 128, MIXES[0])
    there = map_weights(weights, card.array)
    rng = np.random.default_rng(tokens)
    for share in ("all", "some", "none"):
        x = random_bits(rng, tokens, 128)
        if share == "all":
            x[:] = x[:1]
        elif share == "none":
            weights = changed(weights, router=bits(np.eye(257, 128)))
            there = map_weights(weights, card.array)
            x = bits(np.abs(rng.standard_normal((tokens, 128))) * 0.01)
            x[np.arange(tokens)[:, None], (8 * np.arange(tokens)[:, None] + np.arange(8)) % 128] = bits(np.arange(2, 10) / 8)
        dest = random_bits(rng, tokens, 128)
        expected, margins = oracle(np, x, weights, dest)
        for schedule in ("decode", "prefill"):
            check_block(np, run(card, there, x, dest, schedule), expected, np.maximum(margins, share == "all"))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 9, 16, 17])
def test_the_first_and_the_last_expert_are_experts_like_others(card: Any, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    weights = random_weights(np, 7, 256, 128, 128, MIXES[0])
    weights.router[:, 0] = 0
    weights.router[[0, 255], 0] = bits(8)
    there = map_weights(weights, card.array)
    for some in ([tokens - 1], list(range(tokens))):
        x, dest = random_bits(rng, tokens, 128), random_bits(rng, tokens, 128)
        x[:, 0] = 0
        x[some, 0] = bits(8)
        expected, margins = oracle(np, x, weights, dest)
        chosen = route(x[some], weights.router)[0]
        assert (chosen == 0).any(1).all() and (chosen == 255).any(1).all()
        check_block(np, run(card, there, x, dest, "decode"), expected, np.maximum(margins, 1e-3))


@pytest.mark.gpu
@pytest.mark.parametrize("mix", MIXES, ids=names)
@pytest.mark.parametrize("tokens", [1, 6, 70])
def test_the_parts_equal_the_reference_and_the_whole(card: Any, tokens: int, mix: tuple[str, str, str | None]) -> None:
    weights = WEIGHTS[mix]
    there = map_weights(weights, card.array)
    rng = np.random.default_rng(tokens)
    x, dest = random_bits(rng, tokens, H), random_bits(rng, tokens, H)
    on_device = card.array(x)
    ids, alpha, scale = route(on_device, there.router, shared=mix[2] is not None)
    workspace = card.array(np.full(workspace_bytes(tokens, there, "decode"), 0xFF, np.uint8))
    act = gate_up(on_device, ids, there, workspace=workspace)
    wanted = reference.gate_up(x, card.host(ids), weights, np.zeros(act.shape, np.float32))
    found = card.host(act)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())
    sums = card.array(dest)
    down_add(ids, alpha, scale, act, there, sums, workspace=workspace)
    host = [None if array is None else card.host(array) for array in (ids, alpha, scale)]
    summed = reference.down_add(*host, found, weights, dest.copy())
    np.testing.assert_allclose(numbers(card.host(sums)), numbers(summed), rtol=2**-7, atol=1e-3)
    assert np.array_equal(card.host(sums), run(card, there, x, dest, "decode"))


@pytest.mark.gpu
def test_tokens_with_ids_of_none_are_left_and_counted_unless_padding(card: Any) -> None:
    rng = np.random.default_rng(8)
    weights = map_weights(SMALL, card.array)
    x, dest = random_bits(rng, 6, H), random_bits(rng, 6, H)
    ids = np.tile(np.arange(8, dtype=np.int32), (6, 1))
    ids[1, 3], ids[2], ids[3, 0], ids[4, 7], ids[5, 2] = E, -1, -1, 0, 2**31 - 1
    there, out, sums = card.array(ids), card.array(np.full((6, 9, W), 7, np.float32)), card.array(dest)
    signal = Signal(like=there)
    gate_up(card.array(x), there, weights, out=out, signal=signal)
    assert signal.counts() == {"out_of_range": 4} and (card.host(out)[1:] == 7).all() and not (card.host(out)[0] == 7).any()
    alpha, scale = card.array(np.full((6, 8), 0.125, np.float32)), card.array(np.ones(6, np.float32))
    down_add(there, alpha, scale, out, weights, sums, signal=signal)
    found = card.host(sums)
    assert signal.counts() == {"out_of_range": 8} and (found[1:] == dest[1:]).all() and (found[0] != dest[0]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["decode", "prefill"])
@pytest.mark.parametrize("bad", [[0], [0, 8, 15], [0, 30, 66]], ids=str)
def test_tokens_with_nan_scores_are_left_and_counted(card: Any, bad: list[int], schedule: str) -> None:
    tokens = bad[-1] + 1
    rng = np.random.default_rng(9)
    x, dest = random_bits(rng, tokens, H), random_bits(rng, tokens, H)
    x[bad, 17] = 0x7FC0
    signal = Signal(like=card.array(x))
    found = run(card, map_weights(SMALL, card.array), x, dest, schedule, signal)
    left = (found == dest).all(1)
    assert np.flatnonzero(left).tolist() == bad and signal.counts() == {"out_of_range": len(bad)}
    x[:] = 0x7FC0
    assert (run(card, map_weights(SMALL, card.array), x, dest, schedule, signal) == dest).all()
    assert signal.counts() == {"out_of_range": len(bad) + tokens}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize(("places", "tokens", "paths", "hidden"), [(1, 1, 1, 8), (40, 5, 9, 2048), (7, 130, 3, 24), (9, 2, 8, 4104)])
def test_the_sum_of_rows_equals_the_reference(card: Any, places: int, tokens: int, paths: int, hidden: int, dtype: type) -> None:
    rng = np.random.default_rng(places)
    grouped = random_bits(rng, places, hidden) if dtype is np.uint16 else rng.standard_normal((places, hidden)).astype(np.float32)
    index = rng.integers(-1 if tokens > 2 else 0, places + (tokens > 2), (tokens, paths)).astype(np.int32)
    index[: tokens // 2] = np.clip(index[: tokens // 2], 0, places - 1)
    alpha, out = rng.random((tokens, paths)).astype(np.float32), random_bits(rng, tokens, hidden + 8)
    there = [card.array(array) for array in (grouped, index, alpha, out)]
    signals = Signal(), Signal(like=there[0])
    prefill_reduce(there[0], there[1], there[2], there[3][:, :hidden], signal=signals[1])
    expected = out.copy()
    prefill_reduce(grouped, index, alpha, expected[:, :hidden], signal=signals[0])
    found = card.host(there[3])
    np.testing.assert_allclose(numbers(found), numbers(expected), rtol=2**-7, atol=1e-5)
    assert (found[:, hidden:] == out[:, hidden:]).all() and signals[0].counts() == signals[1].counts()


@pytest.mark.gpu
def test_bad_device_arguments_are_named_and_nothing_is_launched(card: Any) -> None:
    weights = map_weights(QUANTIZED, card.array)
    x, dest = card.array(X), card.array(DEST)
    with pytest.raises(ArgumentTypeError, match=r"weights.gate_up.base: expected an array in device 0 .* got one in host memory"):
        sparse_moe(x, changed(weights, gate_up=QUANTIZED.gate_up), dest)
    for schedule in ("decode", "prefill"):
        needed = workspace_bytes(2, weights, schedule)
        memory = card.array(np.full(needed + 16, 0xFF, np.uint8))
        with pytest.raises(ArgumentError, match=f"workspace: expected at least {needed} bytes, got {needed - 1}"):
            sparse_moe(x, weights, dest, workspace=memory[: needed - 1], schedule=schedule)
        with pytest.raises(ArgumentError, match="workspace: expected an address that is a multiple of 16"):
            sparse_moe(x, weights, dest, workspace=memory[8:], schedule=schedule)
        assert (card.host(memory) == 0xFF).all()
    for plane in ("base", "high", "scales"):
        whole = getattr(QUANTIZED.down, plane)
        raw = card.array(np.zeros(whole.nbytes + 16, np.uint8))
        shifted = raw[8 : 8 + whole.nbytes].view(whole.dtype).reshape(whole.shape)
        with pytest.raises(ArgumentError, match=f"weights.down.{plane}: expected an address that is a multiple of 16"):
            sparse_moe(x, changed(weights, down=cut(weights.down, **{plane: shifted})), dest)
    odd = card.array(np.zeros((2, H + 4), np.uint16))
    with pytest.raises(ArgumentError, match="dest: expected rows at a stride that is a multiple of 8 elements for prefill, got 260"):
        sparse_moe(x, weights, odd[:, :H], schedule="prefill")
    with pytest.raises(ArgumentError, match="x: expected rows at a stride that is a multiple of 8 elements"):
        sparse_moe(odd[:, :H], weights, dest)
    with pytest.raises(ArgumentError, match="signal: expected a Signal of device 0"):
        sparse_moe(x, weights, dest, signal=Signal())
    assert not card.host(dest).any()


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["decode", "prefill"])
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_prepared_captured_and_overlapping_calls_equal_eager_ones(card: Any, tokens: int, schedule: str) -> None:
    """A chain of blocks, each of what the one before it writes: kernels that start early must wait for what is in front."""
    import cupy

    import gpukit
    from gpukit.graphs import capture

    gpukit.warmup(subjects=["moe", "moe_prefill"])
    weights = [map_weights(WEIGHTS[mix], card.array) for mix in (MIXES[2], MIXES[0], MIXES[1])]
    rng = np.random.default_rng(tokens)
    start, other = random_bits(rng, tokens, H), random_bits(rng, tokens, H)
    stream = cupy.cuda.Stream(non_blocking=True)
    ends = []
    for way in ("eager", "prepared", "captured", "overlapping"):
        one, two = card.array(start), card.array(other)
        workspace = card.array(np.full(max(workspace_bytes(tokens, own, schedule) for own in weights), 0xFF, np.uint8))
        cupy.cuda.Device().synchronize()
        arguments = [pair + (own,) for own in weights for pair in ((one, two), (two, one))]

        def chain(call: Any, arguments: Any = arguments, workspace: Any = workspace) -> list[Any]:
            return [call(x, own, dest, workspace=workspace, schedule=schedule, stream=stream) for x, dest, own in arguments]

        if way == "eager":
            chain(sparse_moe)
            chain(sparse_moe)
        elif way == "prepared":
            calls = chain(sparse_moe.prepare)
            for call in calls + calls:
                call()
        else:
            with capture(stream) as graph, overlapping(way == "overlapping"):
                chain(sparse_moe)
            graph.launch()
            graph.launch()
        stream.synchronize()
        ends.append((card.host(one), card.host(two)))
    assert all(np.array_equal(ends[0][i], own[i]) for own in ends[1:] for i in (0, 1))
    assert np.isfinite(numbers(ends[0][0])).all() and (ends[0][0] != start).any()


@pytest.mark.gpu
def test_the_block_of_transformers_gives_the_same(card: Any) -> None:
    """An independent implementation, whose router rounds its scores to bfloat16: compared away from near ties."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    configuration = pytest.importorskip("transformers.models.qwen3_next.configuration_qwen3_next")
    settings = {"hidden_size": H, "num_experts": E, "num_experts_per_tok": 8, "moe_intermediate_size": W, "shared_expert_intermediate_size": W}
    block = modeling.Qwen3NextSparseMoeBlock(configuration.Qwen3NextConfig(**settings, norm_topk_prob=True)).to("cuda", torch.bfloat16)
    parameters = dict(block.named_parameters())
    if "experts.gate_up_proj" not in parameters:
        pytest.skip("this version of transformers keeps its experts apart")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
    shared = torch.cat([parameters["shared_expert.gate_proj.weight"], parameters["shared_expert.up_proj.weight"]]).detach()
    weights = MoeWeights(
        torch.cat([parameters["gate.weight"], parameters["shared_expert_gate.weight"]]).detach(),
        parameters["experts.gate_up_proj"].detach().reshape(E * 2 * W, H),
        parameters["experts.down_proj"].detach().reshape(E * H, W),
        shared,
        parameters["shared_expert.down_proj.weight"].detach(),
    )
    x = torch.randn(50, H, device="cuda", dtype=torch.bfloat16)
    expected = block(x[None])
    expected = (expected[0] if isinstance(expected, tuple) else expected).reshape(50, H).float()
    dest = torch.zeros_like(x)
    sparse_moe(x, weights, dest)

    def on_host(tensor: Any) -> np.ndarray:
        return tensor.view(torch.int16).cpu().numpy().view(np.uint16)  # type: ignore[no-any-return]

    scores = scores_of(np, on_host(x), map_weights(weights, on_host))
    clear = torch.from_numpy(margin(np, scores[:, :E]) > 0.03).cuda()
    assert clear.sum() > 10
    assert (dest.float() - expected)[clear].norm() <= 2e-2 * expected[clear].norm()
