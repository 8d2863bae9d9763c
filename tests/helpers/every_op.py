"""One small call of every public op, for properties that must hold for all of them: capture, prepared calls, no waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpukit.kernels import (
    conv,
    decode_step,
    free_list,
    gated_delta,
    gated_delta_prefill,
    gates,
    linear,
    metadata,
    moe,
    norm,
    page_copy,
    page_table,
    residency,
    row_split,
    sliding_window,
    speculative,
    state_slots,
)
from gpukit.kernels.free_list import DevicePages
from gpukit.kernels.state_pool import ReplayLog, StatePool
from tests.helpers.bf16 import bits, random_bits

Make = Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class OpCase:
    """An op, the NumPy arrays of a small call, and how they are passed; `pages` names DevicePages to make beside them, `scratch` the arrays
    that a device may leave anything in."""

    name: str
    op: Any
    values: dict[str, np.ndarray]
    call: Callable[[dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    pages: dict[str, int] = field(default_factory=dict)
    scratch: tuple[str, ...] = ()

    def make(self, make: Make) -> dict[str, Any]:
        """Fresh arguments in a library."""
        made = {name: make(np.ascontiguousarray(value)) for name, value in self.values.items()}
        like = next(iter(made.values()))
        return made | {name: DevicePages(capacity, like=like) for name, capacity in self.pages.items()}

    def run(self, made: dict[str, Any]) -> Any:
        args, kwargs = self.call(made)
        return self.op(*args, **kwargs)

    def prepare(self, made: dict[str, Any]) -> Any:
        args, kwargs = self.call(made)
        return self.op.prepare(*args, **kwargs) if hasattr(self.op, "prepare") else None

    def arrays(self, made: dict[str, Any]) -> dict[str, Any]:
        """Everything that the op may have written, by name."""
        found = {name: made[name] for name in self.values if name not in self.scratch}
        for name in self.pages:
            found |= {f"{name}.ring": made[name].ring, f"{name}.counters": made[name].counters}
        return found


def _tables(pages: int = 600) -> dict[str, np.ndarray]:
    v2p, p2v = page_table.empty(pages)
    virtual, physical = np.arange(1, pages // 2), np.arange(pages // 2 + 1, pages)
    page_table.bind(virtual, physical, v2p, p2v)
    return {"v2p": v2p, "p2v": p2v}


def page_table_ops() -> list[OpCase]:
    ids, fresh, taken = np.arange(1, 301), np.arange(300, 590), np.arange(1, 291)
    zeros = np.zeros(600, np.int64)
    return [
        OpCase("bind", page_table.bind, {"v": fresh, "p": taken, **_tables()}, lambda a: ((a["v"], a["p"], a["v2p"], a["p2v"]), {})),
        OpCase(
            "bind_range",
            page_table.bind_range,
            {"v": fresh, "out": zeros[:290], **_tables()},
            lambda a: ((a["v"], 5, a["v2p"], a["p2v"]), {"out": a["out"]}),
        ),
        OpCase("unbind", page_table.unbind, {"v": ids, "out": zeros[:300], **_tables()}, lambda a: ((a["v"], a["v2p"], a["p2v"]), {"out": a["out"]})),
        OpCase(
            "unbind_into",
            page_table.unbind_into,
            {"v": ids, **_tables()},
            lambda a: ((a["v"], a["v2p"], a["p2v"], a["pages"]), {}),
            {"pages": 600},
        ),
        OpCase("remap", page_table.remap, {"s": fresh + 10, "d": taken, **_tables()}, lambda a: ((a["s"], a["d"], a["v2p"], a["p2v"]), {})),
        OpCase(
            "translate",
            page_table.translate,
            {"ids": ids * 7, "out": zeros[:400], **_tables()},
            lambda a: ((a["ids"], a["v2p"], 16), {"out": a["out"], "out_width": 400}),
        ),
    ]


def free_list_ops() -> list[OpCase]:
    rng = np.random.default_rng(1)
    prefix = rng.integers(0, 50, 30)
    seq = prefix + rng.integers(0, 40, 30)
    pages = int((-(-seq // 16) + (-prefix // 16)).sum())
    last = np.where(prefix > 0, 16 * 9 + prefix % 16 - 1, -1)
    tokens = int((seq - prefix).sum())
    return [
        OpCase(
            "gather_extend",
            free_list.gather_extend,
            {"free": np.arange(1, pages + 1), "prefix": prefix, "seq": seq, "last": last, "out": np.zeros(tokens, np.int64)},
            lambda a: (
                (a["prefix"], a["seq"], a["last"], a["free"], 16),
                {"num_tokens": tokens, "num_pages": pages, "out": a["out"]},
            ),
        ),
        OpCase(
            "gather_decode",
            free_list.gather_decode,
            {"seq": seq + 1, "last": 16 * 9 + seq % 16 - 1, "free": np.arange(1, 31), "out": np.zeros(30, np.int64)},
            lambda a: ((a["seq"], a["last"], a["free"], 16), {"out": a["out"]}),
        ),
        OpCase(
            "compact",
            free_list.compact,
            {"ids": rng.integers(0, 99, 700), "keep": rng.random(700) < 0.5, "out": np.zeros(700, np.int64), "length": np.zeros(1, np.int64)},
            lambda a: ((a["ids"], a["keep"]), {"out": a["out"], "out_len": a["length"]}),
        ),
    ]


def sliding_window_ops() -> list[OpCase]:
    rows = (np.arange(1, 161).reshape(4, 40)[:, :, None] * 8 + np.arange(8)).reshape(4, 320)
    return [
        OpCase(
            "retire",
            sliding_window.retire,
            {"rows": rows, "starts": np.array([0, 8, 16, 0]), "stops": np.array([160, 8, 320, 24]), **_tables(400)},
            lambda a: ((a["rows"], a["starts"], a["stops"], 8, a["v2p"], a["p2v"], a["pages"]), {}),
            {"pages": 400},
        ),
        OpCase(
            "free_segment",
            sliding_window.free_segment,
            {"row": rows[0], **_tables(400), **{f"other_{name}": table for name, table in _tables(400).items()}},
            lambda a: (
                (a["row"], 0, 8, a["v2p"], a["p2v"], a["other_v2p"], a["other_p2v"], a["virtual"], a["owner"], a["other"]),
                {},
            ),
            {"virtual": 400, "owner": 400, "other": 400},
        ),
    ]


def metadata_ops() -> list[OpCase]:
    rng = np.random.default_rng(2)
    rows = rng.integers(16, 290 * 16, (6, 200))
    lens = np.array([0, 200, 17, 64, 1, 130])
    starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    batch = {"rows": rows, "lens": lens, **_tables()}
    table, stream = np.zeros((6, 13), np.int32), np.zeros(420, np.int32)

    def spaces(a: dict[str, Any]) -> Any:
        return metadata.AddressSpaces(a["v2p"])

    return [
        OpCase(
            "read_table",
            metadata.read_table,
            batch | {"out": table},
            lambda a: ((a["rows"], a["lens"], a["v2p"], 16), {"out": a["out"], "zero_tail": True}),
        ),
        OpCase(
            "read_stream",
            metadata.read_stream,
            batch | {"indptr": starts, "out": stream},
            lambda a: ((a["rows"], a["lens"], a["v2p"], 16, a["indptr"]), {"out": a["out"]}),
        ),
        OpCase(
            "read_table_and_stream",
            metadata.read_table_and_stream,
            batch | {"indptr": starts, "table": table, "stream": stream},
            lambda a: ((a["rows"], a["lens"], a["v2p"], 16, a["indptr"]), {"table_out": a["table"], "stream_out": a["stream"]}),
        ),
        OpCase(
            "decode_metadata",
            metadata.decode_metadata,
            batch | {"lengths": np.zeros(6, np.int32), "sums": np.zeros(7, np.int32), "full": table, "swa": table + 1},
            lambda a: (
                (a["rows"], a["lens"], spaces(a), 16),
                {"lengths_out": a["lengths"], "cu_lengths_out": a["sums"], "full_out": a["full"], "swa_out": a["swa"]},
            ),
        ),
        OpCase(
            "gather_translate_window",
            metadata.gather_translate_window,
            batch | {"widths": np.array([1, 0, 4, 4, 2, 4]), "full": np.zeros(20, np.int64), "virtual": np.zeros(20, np.int64)},
            lambda a: (
                (a["rows"], a["widths"], a["widths"], (a["v2p"],), 16),
                {"outs": (a["full"],), "virtual_out": a["virtual"]},
            ),
        ),
        OpCase(
            "replay_state_indices",
            metadata.replay_state_indices,
            {"requests": np.array([3, 0, 2, 9, 9]), "mapping": np.array([5, 6, 7, 8]), **_tables(), "out": np.zeros(5, np.int32)},
            lambda a: ((a["requests"], a["mapping"], a["v2p"], 3, 4, a["out"]), {}),
        ),
    ]


def page_copy_ops() -> list[OpCase]:
    rng = np.random.default_rng(3)
    buffer = rng.integers(0, 256, 64 * 4096).astype(np.uint8)
    return [
        OpCase(
            "move_pages",
            page_copy.move_pages,
            {"buffer": buffer, "s": np.arange(1, 20), "d": np.arange(40, 59)},
            lambda a: ((a["buffer"], 4096, a["s"], a["d"]), {}),
        ),
        OpCase("shift_pages", page_copy.shift_pages, {"buffer": buffer}, lambda a: ((a["buffer"], 4096, 3, 20, 2), {})),
        OpCase(
            "zero_pages",
            page_copy.zero_pages,
            {"buffer": buffer, "pages": np.array([1, 5, 63])},
            lambda a: ((a["buffer"], 4096, a["pages"]), {}),
        ),
        OpCase(
            "store_kv",
            page_copy.store_kv,
            {
                "k": rng.integers(0, 99, (9, 64)).astype(np.uint16),
                "v": rng.integers(0, 99, (9, 48)).astype(np.uint16),
                "where": np.array([3, 0, -1, 9, 4, 5, 6, 7, 8]),
                "keys": np.zeros((12, 64), np.uint16),
                "values": np.zeros((12, 48), np.uint16),
            },
            lambda a: ((a["k"], a["v"], a["where"], a["keys"], a["values"]), {}),
        ),
    ]


def gated_delta_ops() -> list[OpCase]:
    # Small whole numbers and no decay: every product and sum is exact, in whatever order it is taken.
    rng = np.random.default_rng(4)

    def small(*shape: int, often: float = 0.05) -> np.ndarray:
        chosen = rng.random(shape)
        return np.where(chosen < often, 0x3F80, np.where(chosen > 1 - often, 0xBF80, 0)).astype(np.uint16)

    values = {
        "q": small(2, 3, 1, 64),
        "k": small(2, 3, 1, 64, often=0.02),
        "v": small(2, 3, 2, 64, often=0.5),
        "g": np.zeros((2, 3, 2), np.float32),
        "beta": np.ones((2, 3, 2), np.float32),
        "rec": rng.integers(-2, 3, (2, 4, 2, 64, 64)).astype(np.float32),
        "slots": np.array([2, 0], np.int32),
    }
    out = {"out": np.zeros((2, 3, 2, 64), np.uint16)}
    log = {
        "log_k": small(2, 3, 3, 1, 64, often=0.02),
        "log_v": small(2, 3, 3, 2, 64, often=0.5),
        "gates": np.tile(np.array([0, 1], np.float32), (2, 3, 3, 2, 1)),
    }
    histories = {"conv": small(2, 4, 3, 16), "log_conv": small(2, 3, 3, 16, often=0.5)}
    counts = {"accepted": np.array([2, 1])}
    exact = {"layer": 1, "scale": 1.0, "normalize": False}

    def inputs(a: dict[str, Any]) -> tuple[Any, ...]:
        return a["q"], a["k"], a["v"], a["g"], a["beta"], StatePool(a["rec"]), a["slots"]

    columns_log = {"log_conv": small(2, 3, 3, 256, often=0.5)}
    columns = {
        # Eights and sums of two of them, which the activation leaves as they are.
        "x": np.where(small(2, 3, 256, often=0.02), 0x4100, 0).astype(np.uint16),
        "weight": np.tile(np.array([0, 0, 0x3F80, 0x3F80], np.uint16), (256, 1)),
        **{name: values[name] for name in ("g", "beta", "rec", "slots")},
        "conv": np.where(small(2, 4, 3, 256, often=0.02), 0x4100, 0).astype(np.uint16),
        **columns_log,
    }

    def column_inputs(a: dict[str, Any]) -> tuple[Any, ...]:
        return a["x"], a["weight"], a["g"], a["beta"], StatePool(a["rec"], a["conv"]), a["slots"]

    def log_of(a: dict[str, Any], name: str = "") -> ReplayLog:
        return ReplayLog(a[f"{name}log_k"], a[f"{name}log_v"], a[f"{name}gates"], a.get(f"{name}log_conv"))

    return [
        OpCase("direct", gated_delta.direct, values | out, lambda a: (inputs(a), {**exact, "out": a["out"]})),
        OpCase(
            "snapshot",
            gated_delta.snapshot,
            values | out | {"kept": np.array([[1, -1, 2], [-1, -1, -1]], values["slots"].dtype)},
            lambda a: ((*inputs(a), a["kept"]), {**exact, "out": a["out"]}),
        ),
        OpCase("record", gated_delta.record, values | out | log, lambda a: ((*inputs(a), log_of(a)), {**exact, "out": a["out"]})),
        OpCase(
            "fold_record",
            gated_delta.fold_record,
            values | out | log | counts | {f"new_{name}": np.zeros_like(array) for name, array in log.items()},
            lambda a: ((*inputs(a), log_of(a), a["accepted"], log_of(a, "new_")), {**exact, "out": a["out"]}),
        ),
        OpCase(
            "conv_record",
            gated_delta.conv_record,
            columns | out | log,
            lambda a: ((*column_inputs(a), log_of(a)), {**exact, "out": a["out"]}),
        ),
        OpCase(
            "conv_fold_record",
            gated_delta.conv_fold_record,
            columns | out | log | counts | {f"new_{name}": np.zeros_like(array) for name, array in (log | columns_log).items()},
            lambda a: ((*column_inputs(a), log_of(a), a["accepted"], log_of(a, "new_")), {**exact, "out": a["out"]}),
        ),
        OpCase(
            "fold",
            gated_delta.fold,
            {"rec": values["rec"], **log, **histories, "rows": np.array([[0, 0, 2], [1, 3, 3], [2, 2, 0]])},
            lambda a: ((StatePool(a["rec"], a["conv"]), log_of(a), a["rows"]), {"normalize": False}),
        ),
        OpCase(
            "prefill",
            gated_delta_prefill.prefill,
            {name: array.reshape(6, *array.shape[2:]) for name, array in (values | out).items() if name not in ("rec", "slots")}
            | {"rec": values["rec"], "slots": values["slots"], "cu_seqlens": np.array([0, 4, 6])}
            | {"workspace": np.zeros(gated_delta_prefill.prefill_workspace(6, 2, 2), np.uint8)},
            lambda a: ((*inputs(a), a["cu_seqlens"]), {**exact, "out": a["out"], "workspace": a["workspace"], "method": "chunked"}),
            scratch=("workspace",),
        ),
    ]


def norm_gate_and_conv_ops() -> list[OpCase]:
    """Floating-point ops on values far from every tie, so that any device rounds to the same bits."""
    rng = np.random.default_rng(687)
    x, gate, weight = random_bits(rng, 3, 64), random_bits(rng, 3, 64), random_bits(rng, 64)
    columns, taps, history = random_bits(rng, 3, 2, 32), random_bits(rng, 32, 4), random_bits(rng, 5, 3, 32)
    slots, like_columns = np.array([4, -1, 0]), np.zeros((3, 2, 32), np.uint16)
    # Above 20 the softplus is exact, and so is the sigmoid of 0 and of numbers whose exponential is lost beside 1.
    a, b = rng.integers(21, 90, (4, 32)).astype(np.float32), rng.choice([-120, 0, 120], (4, 32)).astype(np.float32)
    zeros = np.zeros((4, 32), np.float32)
    return [
        OpCase("rms_norm", norm.rms_norm, {"x": x, "w": weight, "out": x * 0}, lambda a: ((a["x"], a["w"]), {"out": a["out"]})),
        OpCase(
            "gated_rms_norm",
            norm.gated_rms_norm,
            {"x": x, "gate": gate, "w": weight, "out": x * 0},
            lambda a: ((a["x"], a["gate"], a["w"]), {"out": a["out"], "offset": True}),
        ),
        OpCase(
            "gate_control",
            gates.gate_control,
            {"a": a, "b": b, "log": zeros[0], "bias": zeros[1] + 2, "g": zeros, "beta": zeros},
            lambda a: ((a["a"], a["b"], a["log"], a["bias"]), {"g_out": a["g"], "beta_out": a["beta"]}),
        ),
        OpCase(
            "conv1d_silu",
            conv.conv1d_silu,
            {"x": columns, "taps": taps, "history": history, "slots": slots, "out": like_columns},
            lambda a: ((a["x"], a["taps"], a["history"], a["slots"]), {"out": a["out"]}),
        ),
        OpCase(
            "conv1d_silu_record",
            conv.conv1d_silu_record,
            {
                "x": columns,
                "taps": taps,
                "history": history,
                "slots": slots,
                "log": like_columns,
                "out": like_columns,
                "valid": np.array([2, 1, 1]),
            },
            lambda a: ((a["x"], a["taps"], a["history"], a["slots"], a["log"]), {"out": a["out"], "valid": a["valid"]}),
        ),
    ]


def linear_ops() -> list[OpCase]:
    # Ones, minus ones and zeros: sums are exact in any order.
    rng = np.random.default_rng(6)
    x, weight, residual = (rng.choice(np.array([0, 0x3F80, 0xBF80], np.uint16), shape) for shape in ((3, 64), (24, 64), (3, 24)))
    ids, out = np.array([23, -1, 0]), np.zeros((3, 64), np.uint16)
    return [
        OpCase(
            "linear",
            linear.linear,
            {"x": x, "weight": weight, "residual": residual, "out": residual * 0},
            lambda a: ((a["x"], a["weight"]), {"out": a["out"], "residual": a["residual"]}),
        ),
        OpCase("embed", linear.embed, {"ids": ids, "table": weight, "out": out}, lambda a: ((a["ids"], a["table"]), {"out": a["out"]})),
    ]


def state_slots_ops() -> list[OpCase]:
    rng = np.random.default_rng(5)
    history, state = rng.integers(0, 99, (2, 6, 3, 8)).astype(np.uint16), rng.random((2, 6, 4, 8), np.float32)
    columns, states = rng.integers(0, 99, (2, 3, 4, 3, 8)).astype(np.uint16), rng.random((2, 3, 4, 4, 8), np.float32)
    pools, recorded = {"history": history, "state": state}, {"columns": columns, "states": states}
    slots, steps, track = np.array([4, -1, 0]), np.array([3, 2, 0]), np.array([5, 1, -1])

    def parts(a: dict[str, Any]) -> tuple[Any, Any]:
        return a["history"], a["state"]

    def sources(a: dict[str, Any]) -> tuple[Any, Any]:
        return a["columns"], a["states"]

    return [
        OpCase("copy_slots", state_slots.copy_slots, {**pools, "s": steps, "d": slots}, lambda a: ((parts(a), a["s"], a["d"]), {})),
        OpCase("clear_slots", state_slots.clear_slots, {**pools, "slots": slots}, lambda a: ((parts(a), a["slots"]), {})),
        OpCase(
            "scatter_states",
            state_slots.scatter_states,
            {**pools, **recorded, "slots": slots, "steps": steps},
            lambda a: ((sources(a), parts(a), a["slots"], a["steps"]), {}),
        ),
        OpCase(
            "track_states",
            state_slots.track_states,
            {**pools, **recorded, "slots": slots, "steps": steps, "track": track},
            lambda a: ((sources(a), parts(a), a["slots"], a["steps"], a["track"], a["steps"]), {}),
        ),
    ]


def residency_ops() -> list[OpCase]:
    words = np.random.default_rng(5).integers(-(2**31), 2**31, (2, 3, 1640)).astype(np.int32)
    advance = {"states": words, "slots": np.array([2, -1, 0])}
    stream = {"weights": words.reshape(-1), "out": np.zeros(3, np.int32)}
    return [
        OpCase("advance_states", residency.advance_states, advance, lambda a: ((a["states"], a["slots"]), {"keep": 0.5})),
        OpCase("stream_weights", residency.stream_weights, stream, lambda a: ((a["weights"], a["out"]), {"keep": 0.0})),
    ]


def row_split_ops() -> list[OpCase]:
    rng = np.random.default_rng(8)
    codes, values = rng.integers(-16, 16, (3, 128)).astype(np.int8), rng.standard_normal((3, 128)).astype(np.float32)
    base, high, scales = np.zeros((3, 2, 32), np.uint8), np.zeros((3, 2, 8), np.uint8), np.ones((3, 2), np.float16)
    planes = {"base": base + 0x5A, "high": high + 0x3C, "scales": scales}

    def matrix(a: dict[str, Any]) -> row_split.RowSplit:
        return row_split.RowSplit("q5", a["base"], a["high"], a["scales"])

    return [
        OpCase(
            "pack_codes",
            row_split.pack_codes,
            {"codes": codes, "base": base, "high": high},
            lambda a: ((a["codes"], "q5"), {"base": a["base"], "high": a["high"]}),
        ),
        OpCase("unpack_codes", row_split.unpack_codes, planes | {"out": codes}, lambda a: ((a["base"], a["high"], "q5"), {"out": a["out"]})),
        OpCase("quantize", row_split.quantize, {"values": values, **planes}, lambda a: ((a["values"], "q5"), {"out": matrix(a)})),
        OpCase("dequantize", row_split.dequantize, planes | {"out": values}, lambda a: ((matrix(a),), {"out": a["out"]})),
    ]


def moe_ops() -> list[OpCase]:
    """Equal scores and whole numbers, whose sums are exact in any order, and gates whose sigmoid is 0.5 or 1."""
    rng = np.random.default_rng(9)

    def some(values: list[int], often: float, *shape: int) -> np.ndarray:
        return bits(rng.choice([0, *values], shape, p=[1 - often] + [often / len(values)] * len(values)))

    router = np.zeros((13, 128), np.uint16)
    router[[0, 2, 3, 5, 6, 8, 9, 11], 0] = bits(2)
    x = some([1], 0.3, 3, 128)
    x[:, 0] = bits(1)
    gates = np.concatenate((some([32], 0.05, 13, 128, 128), some([-1, 1], 0.1, 13, 128, 128)), axis=1).reshape(13 * 256, 128)
    downs = some([-1, 1], 0.1, 13 * 128, 128)
    weights = {"router": router, "gate_up": gates[:-256], "down": downs[:-128], "shared_gate_up": gates[-256:], "shared_down": downs[-128:]}
    ids = np.flatnonzero(router[:, 0]).astype(np.int32)[None] + np.array([[0], [1], [0]], np.int32)
    alpha, scale, dest = np.full((3, 8), 0.125, np.float32), np.full(3, 0.5, np.float32), some([1, 2], 0.5, 3, 128)
    act = np.zeros((3, 9, 128), np.float32)
    index, grouped = rng.integers(0, 20, (3, 9)).astype(np.int32), some([1, -3], 0.7, 20, 128)

    def mixture(a: dict[str, Any]) -> moe.MoeWeights:
        return moe.MoeWeights(**{name: a[name] for name in weights})

    scratch = {"workspace": np.zeros(moe.workspace_bytes(3, moe.MoeWeights(**weights)), np.uint8)}
    return [
        OpCase(
            "route",
            moe.route,
            {"x": x, "router": router, "ids": ids * 0, "alpha": alpha * 0, "scale": scale * 0, **scratch},
            lambda a: (
                (a["x"], a["router"]),
                {"ids": a["ids"], "alpha": a["alpha"], "shared_scale": a["scale"], "workspace": a["workspace"]},
            ),
            scratch=("workspace",),
        ),
        OpCase(
            "gate_up",
            moe.gate_up,
            {"x": x, "ids": ids, "act": act, **weights, **scratch},
            lambda a: ((a["x"], a["ids"], mixture(a)), {"out": a["act"], "workspace": a["workspace"]}),
            scratch=("workspace",),
        ),
        OpCase(
            "down_add",
            moe.down_add,
            {"ids": ids, "alpha": alpha, "scale": scale, "act": act + 3, "dest": dest, **weights, **scratch},
            lambda a: ((a["ids"], a["alpha"], a["scale"], a["act"], mixture(a), a["dest"]), {"workspace": a["workspace"]}),
            scratch=("workspace",),
        ),
        OpCase(
            "sparse_moe",
            moe.sparse_moe,
            {"x": x, "dest": dest, **weights, **scratch},
            lambda a: ((a["x"], mixture(a), a["dest"]), {"workspace": a["workspace"]}),
            scratch=("workspace",),
        ),
        OpCase(
            "prefill_reduce",
            moe.prefill_reduce,
            {"grouped": grouped, "index": index, "weights": np.tile(alpha[:, :1], 9), "out": dest},
            lambda a: ((a["grouped"], a["index"], a["weights"], a["out"]), {}),
        ),
    ]


def speculative_ops() -> list[OpCase]:
    rng = np.random.default_rng(7)
    logits, hidden = (rng.standard_normal((3, 4, 130)) * 3).astype(np.float32), random_bits(rng, 3, 4, 24)
    targets = rng.integers(0, 3, (3, 4))
    table = {"anchors": np.array([7, 8, 9]), "drafts": rng.integers(0, 3, (3, 9)), "lengths": np.array([5, -1, 0])}
    outcome = {"accepted": np.zeros(3, np.int64), "rows": np.zeros((3, 3), np.int32), "emitted": np.zeros((3, 4), np.int64)}
    before = {"ids": rng.integers(0, 3, (3, 4)), "lengths": table["lengths"], "anchors": table["anchors"], "valid": np.array([4, 4, 2]), **outcome}
    settings = {"seeds": np.arange(3), "temperature": np.array([1, 1, 0.5], np.float32), "top_k": np.array([9, 0, 4])}
    workspace = {"workspace": speculative.workspace(12)}

    def named(a: dict[str, Any], *names: str) -> dict[str, Any]:
        return {name: a[name] for name in names}

    return [
        OpCase(
            "prepare_verify",
            speculative.prepare_verify,
            {**table, "starts": np.array([2, 0, 7]), "ids": targets, "positions": targets * 0},
            lambda a: ((a["anchors"], a["drafts"], a["lengths"]), {"tokens": 4, "draft_starts": a["starts"], **named(a, "ids", "positions")}),
        ),
        OpCase(
            "accept_greedy",
            speculative.accept_greedy,
            {"targets": targets, **before},
            lambda a: ((a["targets"], a["ids"], a["lengths"], a["anchors"]), named(a, "valid", "accepted", "rows", "emitted")),
        ),
        OpCase(
            "accept_sampled",
            speculative.accept_sampled,
            {"logits": logits, **before, **settings, **workspace},
            lambda a: ((a["logits"], a["ids"], a["lengths"], a["anchors"]), named(a, "valid", *settings, *outcome, *workspace)),
        ),
        OpCase(
            "sample",
            speculative.sample,
            {"logits": logits[:, 0], "positions": table["lengths"], "out": np.zeros(3, np.int64), **settings, **workspace},
            lambda a: ((a["logits"], a["seeds"], a["positions"], a["temperature"]), named(a, "out", "workspace")),
        ),
        OpCase(
            "select_hidden",
            speculative.select_hidden,
            {"hidden": hidden, "accepted": np.array([4, 0, 2]), "out": hidden[:, 0]},
            lambda a: ((a["hidden"], a["accepted"]), {"out": a["out"]}),
        ),
        OpCase(
            "argmax_columns",
            speculative.argmax_columns,
            {"logits": logits[0], "out": np.zeros(130, np.int64), "workspace": speculative.workspace(130)},
            lambda a: ((a["logits"],), named(a, "out", "workspace")),
        ),
    ]


def decode_step_ops() -> list[OpCase]:
    """Rounds without new pages, because lists begin empty: lengths, locations, sums, and pages that leave the window."""
    names = ("rows", "lengths", "pages", "retired", "requests", "advance", "locations", "kv", "sums", "full_table", "swa_table", "status")
    table = np.zeros((3, 60), np.int32)
    values = {
        "rows": np.arange(1, 241).reshape(4, 60),
        "lengths": np.array([600, 90, 7, 0]),
        "pages": np.array([60, 20, 10, 0]),
        "retired": np.zeros(4, np.int64),
        "requests": np.array([1, -1, 0]),
        "advance": np.array([3, 1, 2]),
        "locations": np.zeros((2, 3, 4), np.int64),
        "kv": np.zeros(3, np.int32),
        "sums": np.zeros(4, np.int32),
        "full_table": table,
        "swa_table": table + 1,
        "status": np.zeros(3, np.int64),
    }

    def state(a: dict[str, Any]) -> decode_step.DecodeState:
        return decode_step.DecodeState(*(a[name] for name in names[:6]), 4, *(a[name] for name in names[6:]))

    return [
        OpCase(
            "decode_step",
            decode_step.decode_step,
            values | _tables() | {f"swa_{name}": array for name, array in _tables().items()},
            lambda a: (
                (state(a), 16, 60, (a["v2p"], a["p2v"]), (a["swa_v2p"], a["swa_p2v"]), a["ids"], a["pool"], a["window"]),
                {},
            ),
            {"ids": 600, "pool": 600, "window": 600},
        )
    ]


def every_op() -> list[OpCase]:
    """All of them."""
    return [
        *page_table_ops(),
        *free_list_ops(),
        *sliding_window_ops(),
        *decode_step_ops(),
        *metadata_ops(),
        *page_copy_ops(),
        *gated_delta_ops(),
        *norm_gate_and_conv_ops(),
        *linear_ops(),
        *state_slots_ops(),
        *speculative_ops(),
        *residency_ops(),
        *row_split_ops(),
        *moe_ops(),
    ]
