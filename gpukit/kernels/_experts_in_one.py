"""Which batches have all their experts in one launch, and the kernels for it: cuda/moe_experts.cu."""

from __future__ import annotations

from gpukit.kernels._moe import TOP, Geometry
from gpukit.kernels._plans import blocks_for
from gpukit.launch import Kernel

__all__ = ["KERNELS", "THREADS", "is_better", "most_segments"]

# Most tokens for which one launch is quicker than two, on an H200, by the formats of the gate and up bank and of the down bank.
_MOST_TOKENS = {("fp8", "fp8"): 1, ("q4", "q4"): 1, ("q4", "q5"): 1, ("q5", "q5"): 1, ("q6", "q6"): 3, ("w8", "w8"): 4}
# Constants of cuda/moe_experts.cu: warps of a block that sum up, in groups that share a unit of weights, and all others; shared memory of a block,
# what the ring has of it, and each warp that sums up.
_GROUPS = 3
_GROUP_WARPS = 4
_OTHER_WARPS = 4
_SHARED_BYTES = 227 * 1024
_RING_BYTES = 960
_BUFFER_BYTES = 2048
_TILE = 16
_COLUMNS = 8
# Units of weights that are to fit into the rest at least: one on its way while one is summed up.
_LEAST_UNITS = 2
# Bytes of 128 elements of a row with all that belongs to them, and what is between the four parts of rows that lie side by side.
_STAGED = {"fp8": (132, 64), "q4": (68, 32), "q5": (84, 32), "q6": (100, 32), "w8": (136, 32)}

THREADS = 32 * (_GROUPS * _GROUP_WARPS + _OTHER_WARPS)
KERNELS = {
    pair: Kernel("moe_experts", f"experts_{pair[0]}_{pair[1]}", language="cuda", early=True, shared_bytes=_SHARED_BYTES, cluster=(1, THREADS))
    for pair in _MOST_TOKENS
}


def is_better(tokens: int, geometry: Geometry, device: int, stream: int) -> bool:
    """Whether one launch is quicker, and a block has memory for enough of the weights."""
    pair = (geometry.gate_up_format, geometry.down_format)
    if tokens > _MOST_TOKENS.get(pair, 0):
        return False
    return _SHARED_BYTES - _bytes_beside_weights(tokens, geometry) >= _LEAST_UNITS * _unit_bytes(geometry) and KERNELS[pair].has_room(device, stream)


def most_segments(tokens: int, geometry: Geometry) -> int:
    """As many segments as there can be: tokens of different experts, or full ones."""
    return min(TOP * tokens, geometry.experts + tokens) + geometry.has_shared * blocks_for(tokens, _COLUMNS)


def _unit_bytes(geometry: Geometry) -> int:
    """The largest unit of weights: a tile of gate and of up rows, or a tile of down rows for each warp of a group."""
    gate_up = {geometry.gate_up_format, "w8" if geometry.is_gate_up_other else geometry.gate_up_format}
    down = {geometry.down_format, "w8" if geometry.is_down_other else geometry.down_format}
    runs = [2 * _staged_bytes(_TILE // 2, geometry.hidden, kind) for kind in gate_up]
    return max(runs + [_GROUP_WARPS * _staged_bytes(_TILE, geometry.width, kind) for kind in down])


def _staged_bytes(rows: int, length: int, kind: str) -> int:
    of_unit, between = _STAGED[kind]
    return rows * length // 128 * of_unit + 4 * between


def _bytes_beside_weights(tokens: int, geometry: Geometry) -> int:
    """Ring, buffers and residuals, segments, sums of all paths of a tile, their weights, and the tokens, once in each order."""
    fixed = _RING_BYTES + _GROUPS * _GROUP_WARPS * (_BUFFER_BYTES + 4 * 32)
    of_batch = 32 * most_segments(tokens, geometry) + 4 * _TILE * tokens * geometry.paths + 4 * tokens * (TOP + 1)
    return _in_lines(_in_lines(fixed + of_batch) + tokens * (2 * geometry.hidden + 64) * (1 + geometry.is_gate_up_other))


def _in_lines(size: int) -> int:
    return 128 * blocks_for(size, 128)
