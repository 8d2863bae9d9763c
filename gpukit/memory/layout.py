"""What one buffer holds: entries and their parts, sub-pools and their page sizes, and the order in which they share the bytes.

Nothing here is allocated; a layout is checked where it is made, and everything else in `gpukit.memory` trusts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from gpukit.arrays import ITEMSIZE
from gpukit.checks import items, text
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.kernels._plans import positive, whole

__all__ = ["Entry", "Part", "PoolLayout", "SubPool"]

# Bytes that a part is aligned to, because ops move and clear units of 16, and that an entry is rounded up to.
PART_ALIGNMENT = 16
ENTRY_ALIGNMENT = 32

UP, FLOAT, DOWN = "up", "float", "down"


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


@dataclass(frozen=True)
class Part:
    """The rows that one tensor keeps in every slot, one row a layer.

    Attributes
    ----------
    name : str
        What it is called in its entry, such as ``"k"``.
    shape : tuple of int
        Shape of a row: ``(heads, width)`` of a K or V row, or of a recurrent state. K and V may differ.
    dtype : str
        dtype name; ``bfloat16`` and ``float8_*`` are seen as uint16 and uint8 where a library lacks them.
    layers : int
        Rows in a slot.
    draft : bool
        Whether it belongs to the draft model. A draft's rows lie in the entry of the host model's slot, so that moves carry them.
    offset : int, optional
        Byte in the entry, a multiple of 16; behind the parts before it by default.

    Examples
    --------
    >>> Part("k", (2, 96), "bfloat16", layers=3).bytes
    1152
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layers: int = 1
    draft: bool = False
    offset: int | None = None

    def __post_init__(self) -> None:
        text(self.name, "name")
        # A list would leave a frozen part that cannot be hashed.
        object.__setattr__(self, "shape", items(self.shape, f"part {self.name}: shape"))
        if text(self.dtype, f"part {self.name}: dtype") not in ITEMSIZE:
            raise ArgumentError(f"part {self.name}: expected a dtype of {', '.join(ITEMSIZE)}, got {self.dtype}")
        positive(self.layers, f"part {self.name}: layers")
        for length in self.shape:
            positive(length, f"part {self.name}: shape")
        if self.offset is not None and (whole(self.offset, f"part {self.name}: offset") % PART_ALIGNMENT):
            raise ArgumentError(f"part {self.name}: expected an offset that is a multiple of {PART_ALIGNMENT}, got {self.offset}")

    @property
    def row_stride(self) -> int:
        """Bytes from layer to layer: a row, rounded up to 16."""
        return _round_up(prod(self.shape) * ITEMSIZE[self.dtype], PART_ALIGNMENT)

    @property
    def bytes(self) -> int:
        """Bytes of all layers."""
        return self.layers * self.row_stride


@dataclass(frozen=True)
class Entry:
    """All bytes of one slot: its parts, each at a multiple of 16, and 32 bytes' rounding.

    Attributes
    ----------
    parts : tuple of Part
        With distinct names; their bytes do not overlap.
    offsets : tuple of int
        Byte of each part.
    bytes : int
        Size of the entry, and so the stride from slot to slot.

    Examples
    --------
    >>> entry = Entry((Part("k", (1, 24), "bfloat16"), Part("v", (1, 8), "bfloat16"), Part("draft k", (1, 8), "bfloat16", draft=True)))
    >>> entry.offsets, entry.bytes
    ((0, 48, 64), 96)
    """

    parts: tuple[Part, ...]
    offsets: tuple[int, ...] = field(init=False)
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", items(self.parts, "parts"))
        for position, part in enumerate(self.parts):
            if not isinstance(part, Part):
                raise ArgumentTypeError(f"parts[{position}]: expected a Part, got {type(part).__name__}")
        names = [part.name for part in self.parts]
        if not names or len(set(names)) != len(names):
            raise ArgumentError(f"parts: expected at least one, with distinct names, got {names}")
        end, offsets = 0, []
        for part in self.parts:
            offsets.append(end if part.offset is None else part.offset)
            end = max(end, offsets[-1] + part.bytes)
        spans = sorted((offset, offset + part.bytes, part.name) for offset, part in zip(offsets, self.parts, strict=True))
        for (_, stop, name), (start, _, other) in zip(spans, spans[1:], strict=False):
            if start < stop:
                raise ArgumentError(f"part {other}: expected bytes apart from those of part {name}, got an overlap at byte {start}")
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "bytes", _round_up(end, ENTRY_ALIGNMENT))

    def part(self, name: str) -> tuple[Part, int]:
        """A part and its offset."""
        for part, offset in zip(self.parts, self.offsets, strict=True):
            if part.name == name:
                return part, offset
        raise ArgumentError(f"part: expected one of {', '.join(part.name for part in self.parts)}, got {name}")


def require_entry(value: Any, name: str) -> Entry:
    """An entry; a part alone is none."""
    if not isinstance(value, Entry):
        raise ArgumentTypeError(f"{name}: expected an Entry, got {type(value).__name__}")
    return value


@dataclass(frozen=True)
class SubPool:
    """One kind of memory in the buffer.

    Attributes
    ----------
    name : str
        ``"full"``, ``"swa"``, ``"state"`` or any other.
    entry : Entry
        What a slot holds.
    place : {"up", "float", "down"}
        The END that grows up from byte 0, a FLOAT in the middle, or the END that grows down from the top.
    page_size : int
        Slots (tokens) of a page; 1 for recurrent states.
    owner : str, optional
        The sub-pool that mints the virtual ids which this one binds, as FULL does for SWA. None mints its own.
    """

    name: str
    entry: Entry
    place: str
    page_size: int = 1
    owner: str | None = None

    def __post_init__(self) -> None:
        text(self.name, "name")
        require_entry(self.entry, f"sub-pool {self.name}: entry")

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.page_size * self.entry.bytes


class PoolLayout:
    """The sub-pools of a buffer, in byte order: an END that grows up, any number of FLOATs, an END that grows down.

    Parameters
    ----------
    buffer_bytes : int
        Size of the buffer; what is not a multiple of 32 is left over.
    sub_pools : sequence of SubPool
        In byte order, with distinct names. A sub-pool with an owner has its owner's page size, and is the only one with that owner.

    Attributes
    ----------
    floor_bytes : int
        The reserved floor: the sink page of every sub-pool lies at byte 0, so nothing else lies below the largest of them.

    Raises
    ------
    ArgumentError
        The order, the names, the owners or the sizes do not fit. The message names the sub-pool.

    Examples
    --------
    >>> entry = Entry((Part("k", (1, 8), "bfloat16"), Part("v", (1, 8), "bfloat16")))
    >>> layout = PoolLayout(4096, [SubPool("swa", entry, "up", 4, owner="full"), SubPool("full", entry, "down", 4)])
    >>> layout.floor_bytes, layout.first_page("full"), layout.num_physical("full"), layout.num_virtual("swa")
    (128, 1, 32, 32)
    """

    def __init__(self, buffer_bytes: int, sub_pools: Sequence[SubPool]):
        self.buffer_bytes = whole(buffer_bytes, "buffer_bytes", 1) // ENTRY_ALIGNMENT * ENTRY_ALIGNMENT
        self.sub_pools: tuple[SubPool, ...] = items(sub_pools, "sub_pools")
        for position, sub_pool in enumerate(self.sub_pools):
            if not isinstance(sub_pool, SubPool):
                raise ArgumentTypeError(f"sub_pools[{position}]: expected a SubPool, got {type(sub_pool).__name__}")
        self.by_name = {sub_pool.name: sub_pool for sub_pool in self.sub_pools}
        places = [sub_pool.place for sub_pool in self.sub_pools]
        if len(places) < 2 or places != [UP, *[FLOAT] * (len(places) - 2), DOWN]:
            raise ArgumentError(f"sub_pools: expected one 'up', any number of 'float' and one 'down', in byte order, got {places}")
        if len(self.by_name) != len(places):
            raise ArgumentError(f"sub_pools: expected distinct names, got {[sub_pool.name for sub_pool in self.sub_pools]}")
        for sub_pool in self.sub_pools:
            positive(sub_pool.page_size, f"sub-pool {sub_pool.name}: page_size")
        self.floor_bytes = max(sub_pool.page_bytes for sub_pool in self.sub_pools)
        self.followers: dict[str, str] = {}
        for sub_pool in self.sub_pools:
            self._check(sub_pool)

    def _check(self, sub_pool: SubPool) -> None:
        name = sub_pool.name
        if self.num_physical(name) <= self.first_page(name):
            usable = self.buffer_bytes - self.floor_bytes
            raise ArgumentError(f"sub-pool {name}: expected room for a page of {sub_pool.page_bytes} bytes above the floor, got {usable} bytes")
        if sub_pool.owner is None:
            return
        owner = self.by_name.get(sub_pool.owner)
        if owner is None or owner.owner is not None or owner is sub_pool:
            raise ArgumentError(f"sub-pool {name}: expected an owner that mints ids of its own, got {sub_pool.owner}")
        if owner.page_size != sub_pool.page_size:
            raise ArgumentError(f"sub-pool {name}: expected its owner's page_size {owner.page_size}, got {sub_pool.page_size}")
        if sub_pool.owner in self.followers:
            raise ArgumentError(f"sub-pool {name}: expected an owner that no other sub-pool has, got {sub_pool.owner}")
        self.followers[sub_pool.owner] = name

    def __repr__(self) -> str:
        return f"PoolLayout({self.buffer_bytes} bytes, {' | '.join(f'{sub_pool.name} ({sub_pool.place})' for sub_pool in self.sub_pools)})"

    def first_page(self, name: str) -> int:
        """Lowest page that lies above the floor."""
        return -(-self.floor_bytes // self.by_name[name].page_bytes)

    def num_physical(self, name: str) -> int:
        """Physical pages of a sub-pool, the sink counted: the pages of the whole buffer, whoever else may lie there."""
        return self.buffer_bytes // self.by_name[name].page_bytes

    def num_virtual(self, name: str) -> int:
        """Virtual pages, the sink counted: as many as its owner could ever bind."""
        owner = self.by_name[name].owner or name
        return self.num_physical(owner) - self.first_page(owner) + 1

    def describe(self) -> dict[str, Any]:
        """Sizes by sub-pool, for reports."""
        return {
            sub_pool.name: {
                "place": sub_pool.place,
                "page_size": sub_pool.page_size,
                "entry_bytes": sub_pool.entry.bytes,
                "page_bytes": sub_pool.page_bytes,
                "pages": self.num_physical(sub_pool.name) - self.first_page(sub_pool.name),
            }
            for sub_pool in self.sub_pools
        }
