"""The kernels of the schedule "decode" for gate, up and down projections, and which of them are for a batch."""

from __future__ import annotations

import functools
from typing import NamedTuple

from gpukit.kernels import _row_split
from gpukit.kernels._moe import TOP, Geometry, may_have_other
from gpukit.kernels._tensor_maps import LINE, rows_by_lines
from gpukit.launch import Kernel

# What reads tokens again and again lives off the L1, which kernels with much shared memory leave small: where nobody said so, 64 tokens in fp8 took
# 242 µs, not 199. A quarter of it holds the shared memory of all blocks.
CARVEOUT = 28
# For what shares a multiprocessor with other kernels, as much shared memory as there is.
MOST_SHARED = 100
# Kernels tuned for sizes are for the devices that they have been measured on, elements of rows being these.
_HOPPER = (9, 0)
USUAL_HIDDEN, USUAL_WIDTH = 2048, 512

# Constants of cuda/moe.cuh, moe_tile.cuh, moe_stream.cuh, moe_slots.cuh, moe_gate_slots.cuh, moe_one.cuh, moe_few.cuh and moe.cu.
_TILE = 16
_BANKS_BYTES, _HIGH_GAP = 128, 16
GATE_WARPS = 4
DOWN_WARPS = 12
# Blocks of the gate and up projections that fit on a multiprocessor.
GATE_BLOCKS = 3
# Tiles of 8 gate and up rows in a unit of work.
GATE_TILES = {"bf16": 1, "fp8": 2, "q4": 1, "q5": 1, "q6": 1, "w8": 1}
# Most tokens that are few.
FEW_TOKENS = 4
# Most segments of a batch, of few tokens and of one; and sizeof(Segment).
MOST_SEGMENTS, FEW_SEGMENTS, ONE_SEGMENTS, _SEGMENT_BYTES = 384, FEW_TOKENS * TOP + 1, TOP + 1, 32
# Warps of down projections through shared memory, and their slots, for many tokens.
SLOT_WARPS, SLOTS = 8, 2
# sizeof(Chosen), in whole accesses.
_CHOSEN_BYTES = 80
# Groups of warps that both projections of few tokens have on a multiprocessor, and warps of the gate and up projections of one token.
GATE_GROUPS, GATE_ONE_WARPS = DOWN_WARPS // GATE_WARPS, 8
# A block that asks for more than half of a multiprocessor's shared memory is alone of its kind there, beside those of other kernels; of blocks that
# ask for more than a third, and have some that is static, there are at most two.
_MORE_THAN_HALF, _MORE_THAN_THIRD = 116 * 1024, 74 * 1024


class _Step(NamedTuple):
    """A step of a row: its elements, and bytes of its base, its high bits and its scale."""

    elements: int
    base: int
    high: int = 0
    scale: int = 0


# Of row-split integers a step is a group.
STEPS = {"bf16": _Step(32, 64), "fp8": _Step(64, 64, 0, 2)} | {
    name: _Step(kind.group, kind.base_bytes, kind.high_bytes, 2) for name, kind in _row_split.FORMATS.items()
}
FORMATS = tuple(STEPS)
# Formats whose elements, scaled, are a byte.
_BYTES = ("fp8", "w8")
# Formats in which gate and up projections of one token have a slot for the shared expert alone.
_SHARED_SLOT = ("bf16", "q4", "q5")


def _tile_bytes(kind: str, length: int, has_gaps: bool) -> int:
    """Bytes of a tile of rows in shared memory; with gaps between parts of it, those that are read at once are in different banks."""
    step = STEPS[kind]
    gaps = _BANKS_BYTES // step.base - 1 if has_gaps else 0
    return _TILE * (length // step.elements) * (step.base + step.high + step.scale) + gaps * (step.base + _HIGH_GAP * (step.high > 0))


def _down_slot(kind: str, has_gaps: bool) -> int:
    """Bytes of a slot of the down projections, with its barrier."""
    tile = _tile_bytes(kind, USUAL_WIDTH, has_gaps)
    return 8 + (max(tile, _tile_bytes("w8", USUAL_WIDTH, has_gaps)) if may_have_other(kind) else tile)


def down_slots_bytes(kind: str, warps: int, slots: int, segments: int, has_gaps: bool = False) -> int:
    """sizeof(SlotMemory)"""
    return warps * slots * _down_slot(kind, has_gaps) + segments * _SEGMENT_BYTES


def down_one_bytes(kind: str) -> int:
    """sizeof(DownOneMemory): slots, and products of the shared expert's octs in two terms."""
    return (TOP + 1) * _down_slot(kind, True) + USUAL_WIDTH // 32 * 2 * _TILE * 4


def gate_one_bytes(kind: str) -> int:
    """sizeof(GateOneMemory), but more than half of what a multiprocessor has.

    Slots, one more for the shared expert where there is room, sums, barriers, the token once or in two orders, and its experts.
    """
    slots, own = 2 if kind == "bf16" else 4, _tile_bytes(kind, USUAL_HIDDEN, True)
    shared = max(own, _tile_bytes("w8", USUAL_HIDDEN, True)) if may_have_other(kind) else own
    sums = 2 * (slots + 1) * GATE_WARPS * _TILE * 4
    tokens = (2 if may_have_other(kind) else 1) * 2 * USUAL_HIDDEN
    barriers = -(-8 * (slots + 1) // 16) * 16
    return max(slots * own + (kind in _SHARED_SLOT) * shared + sums + barriers + tokens + _CHOSEN_BYTES, _MORE_THAN_HALF)


def _kernel(name: str, *, shared_bytes: int = 0, carveout: int | None = None, is_tuned: bool = True) -> Kernel:
    capability = _HOPPER if is_tuned else None
    return Kernel("moe", name, language="cuda", early=True, shared_bytes=shared_bytes, carveout=carveout, capability=capability)


class GateUp(NamedTuple):
    """A kernel of gate and up projections: tiles of a unit, blocks of a multiprocessor, warps of a block, and whether it can wait for words."""

    kernel: Kernel
    tiles: int
    blocks: int
    warps: int
    can_wait: bool = False


class Down(NamedTuple):
    """A kernel of down projections, warps of a block, and whether it can wait for words."""

    kernel: Kernel
    warps: int
    can_wait: bool = False


# Any tokens, sizes and devices.
_GATE_UP = {
    kind: GateUp(_kernel(f"gate_up_{kind}", carveout=CARVEOUT, is_tuned=False), GATE_TILES[kind], GATE_BLOCKS, GATE_WARPS) for kind in FORMATS
}
_DOWN = {kind: Down(_kernel(f"down_{kind}", is_tuned=False), DOWN_WARPS) for kind in FORMATS}
# One token. In bfloat16 the shared expert has a warp of its own.
_GATE_UP_ONE = {
    kind: GateUp(_kernel(f"gate_up_one_{kind}", shared_bytes=gate_one_bytes(kind), carveout=MOST_SHARED), 1, 1, GATE_ONE_WARPS, True)
    for kind in FORMATS
}
_DOWN_ONE = {
    kind: Down(_kernel(f"down_one_{kind}", shared_bytes=down_one_bytes(kind), carveout=MOST_SHARED), TOP, True) for kind in FORMATS if kind != "bf16"
}
_ONE_BF16_BYTES = down_slots_bytes("bf16", TOP + 1, 1, ONE_SEGMENTS, True)
_DOWN_ONE["bf16"] = Down(_kernel("down_one_bf16", shared_bytes=_ONE_BF16_BYTES, carveout=MOST_SHARED), TOP + 1, True)
# Its scores. Alone of their kind on a multiprocessor, or three blocks come to each that has no block of the down projections in front; in bfloat16
# these leave no room for that, and there are two.
_SCORES_ONE = _kernel("scores_one", shared_bytes=_MORE_THAN_THIRD, carveout=MOST_SHARED)
_SCORES_ONE_ALONE = _kernel("scores_one", shared_bytes=_MORE_THAN_HALF, carveout=MOST_SHARED)
# Many tokens.
_DOWN_SLOTS = {
    kind: Down(_kernel(f"down_slots_{kind}", shared_bytes=down_slots_bytes(kind, SLOT_WARPS, SLOTS, MOST_SEGMENTS)), SLOT_WARPS) for kind in _BYTES
}


def scores_one_for(down: str) -> Kernel:
    """The kernel of one token's scores, by the format of the down projections."""
    return _SCORES_ONE if down == "bf16" else _SCORES_ONE_ALONE


def _few_slots(gate_up: str) -> int:
    """Slots of a group of warps for units of few tokens; where these are two, a group more asks for what comes to them."""
    return 1 if gate_up == "bf16" or gate_up in _BYTES else 2


def experts_few_bytes(gate_up: str, down: str) -> int:
    """sizeof(FewMemory): slots, a unit and a tile in eight bits, barriers, groups, sums of units, who has what, sums of paths, and tokens."""
    slots = _few_slots(gate_up)
    slot = max(_tile_bytes(gate_up, USUAL_HIDDEN, False), GATE_WARPS * _tile_bytes(down, USUAL_WIDTH, False))
    others = _tile_bytes("w8", USUAL_HIDDEN, False) + _tile_bytes("w8", USUAL_WIDTH, False) if may_have_other(gate_up) else 2 * 16
    barriers = 8 * ((2 * GATE_GROUPS + DOWN_WARPS) * slots + 3)
    sums = GATE_GROUPS * 2 * GATE_WARPS * _TILE * FEW_TOKENS * 4
    paths = FEW_TOKENS * (TOP + 1)
    numbers = 4 * (GATE_GROUPS * (slots + 1) + 2 + paths * (_TILE + 1) + FEW_TOKENS * _TILE)
    tokens = FEW_TOKENS * (2 * USUAL_HIDDEN + 64)
    parts = GATE_GROUPS * slots * slot, others, barriers, FEW_SEGMENTS * _SEGMENT_BYTES + 16, sums, numbers, tokens
    return sum(-(-part // 16) * 16 for part in parts)


class ExpertsFew(NamedTuple):
    """A kernel of both projections of few tokens, warps of a block, and whether it is told of the banks by tensor maps."""

    kernel: Kernel
    warps: int
    has_maps: bool


def _experts_few(name: str, gate_up: str, down: str) -> ExpertsFew:
    kernel = _kernel(f"experts_few_{name}", shared_bytes=experts_few_bytes(gate_up, down), carveout=MOST_SHARED)
    has_askers = _few_slots(gate_up) > 1
    return ExpertsFew(kernel, DOWN_WARPS + (GATE_WARPS if has_askers else 0), has_askers)


# By the formats of the gate and up bank and of the down bank.
_EXPERTS_FEW = {("q4", "q5"): _experts_few("q4_q5", "q4", "q5")} | {
    (kind, kind): _experts_few(kind, kind, kind) for kind in ("bf16", "fp8", "q6", "w8")
}


@functools.lru_cache(maxsize=1024)
def experts_few_maps(geometry: Geometry, device: int) -> bytes:
    """FewMaps: of both banks, the routed experts' and the shared one's. Nobody asks for those of a shared expert in another format or of none."""
    has_gate_up, has_down = (geometry.has_shared and not is_other for is_other in (geometry.is_gate_up_other, geometry.is_down_other))
    gate_up, down = geometry.gate_up, geometry.down
    shared_gate_up, shared_down = geometry.shared_gate_up if has_gate_up else gate_up, geometry.shared_down if has_down else down
    gate_rows, down_rows, maps = 2 * USUAL_WIDTH, USUAL_HIDDEN, b""
    for kind, length, together, banks in (
        (geometry.gate_up_format, USUAL_HIDDEN, _TILE // 2, ((gate_up, geometry.experts * gate_rows), (shared_gate_up, gate_rows))),
        (geometry.down_format, USUAL_WIDTH, _TILE, ((down, geometry.experts * down_rows), (shared_down, down_rows))),
    ):
        step = STEPS[kind]
        row_bytes = [length // step.elements * bytes_of_step for bytes_of_step in (step.base, step.high)]
        for bank, rows in banks:
            maps += b"".join(
                rows_by_lines(device, address, of_row, rows, together) for address, of_row in zip(bank, row_bytes, strict=False) if of_row >= LINE
            )
    return maps


def experts_few_for(gate_up: str, down: str, tokens: int, hidden: int, width: int, device: int) -> ExpertsFew | None:
    """The kernel of both projections for so many tokens, where there is one."""
    is_few = 1 < tokens <= FEW_TOKENS and (hidden, width) == (USUAL_HIDDEN, USUAL_WIDTH)
    found = _EXPERTS_FEW.get((gate_up, down)) if is_few else None
    return found if found and found.kernel.is_for(device) else None


def gate_up_for(kind: str, tokens: int, hidden: int, device: int) -> GateUp:
    """The kernel of gate and up projections for so many tokens."""
    found = _GATE_UP_ONE[kind] if tokens == 1 and hidden == USUAL_HIDDEN else None
    return found if found and found.kernel.is_for(device) else _GATE_UP[kind]


def down_for(kind: str, tokens: int, width: int, device: int) -> Down:
    """The kernel of down projections for so many tokens."""
    found = (_DOWN_ONE if tokens == 1 else _DOWN_SLOTS).get(kind) if width == USUAL_WIDTH else None
    return found if found and found.kernel.is_for(device) else _DOWN[kind]
