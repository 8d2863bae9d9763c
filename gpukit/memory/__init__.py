"""The unified pool: one buffer that full-attention, sliding-window and recurrent memory share, with its tables on the device.

`PoolLayout` says what lies in the buffer, `UnifiedPool` allocates, frees and makes room, `DecodeMemory` does a decode round's memory work in one
kernel. Host policy over the ops of `gpukit.kernels`; NumPy arrays and device arrays take the same path.
"""

from gpukit.memory.compositions import full_and_state, full_and_swa, full_swa_and_state
from gpukit.memory.decode import DecodeMemory
from gpukit.memory.groups import FreeGroup
from gpukit.memory.invariants import InvariantError, InvariantWarning
from gpukit.memory.layout import Entry, Part, PoolLayout, SubPool
from gpukit.memory.mirror import Mirror
from gpukit.memory.pool import UnifiedPool
from gpukit.memory.split_comparison import HybridShape, ReplayResult

__all__ = [
    "DecodeMemory",
    "Entry",
    "FreeGroup",
    "HybridShape",
    "InvariantError",
    "InvariantWarning",
    "Mirror",
    "Part",
    "PoolLayout",
    "ReplayResult",
    "SubPool",
    "UnifiedPool",
    "full_and_state",
    "full_and_swa",
    "full_swa_and_state",
]
