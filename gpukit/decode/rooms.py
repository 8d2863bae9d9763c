"""How many pages fit: two pools of fixed sizes, or one buffer that both kinds of pages share. Arithmetic over counts; nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gpukit.decode.options import DecodeOptions
from gpukit.memory import HybridShape
from gpukit.memory.compositions import full_and_swa_layout
from gpukit.memory.layout import PoolLayout

__all__ = ["Room", "SplitRoom", "UnifiedRoom", "layout_of", "room_of"]


class Room(Protocol):
    """What a scheduler asks of the memory."""

    @property
    def most(self) -> tuple[int, int]:
        """Most FULL pages, and most SWA pages, each when it has the memory for itself."""

    def holds(self, full: int, swa: int) -> bool:
        """Whether so many pages of each kind fit at a time."""


@dataclass(frozen=True)
class SplitRoom:
    """Two pools.

    Examples
    --------
    >>> SplitRoom(4, 2).holds(4, 2), SplitRoom(4, 2).holds(1, 3)
    (True, False)
    """

    pages: int
    swa_pages: int

    @property
    def most(self) -> tuple[int, int]:
        return self.pages, self.swa_pages

    def holds(self, full: int, swa: int) -> bool:
        return full <= self.pages and swa <= self.swa_pages


@dataclass(frozen=True)
class UnifiedRoom:
    """One buffer: SWA pages from its floor up, FULL pages from its top down, each on a grid of its own page size.

    Pages can be moved together, so what counts is that the two do not meet.

    Examples
    --------
    >>> room = UnifiedRoom(layout_of(DecodeOptions(pages=20, swa_pages=4)))
    >>> room.most, room.holds(20, 4), room.holds(36, 1), room.holds(37, 1)
    ((41, 8), True, True, False)
    """

    layout: PoolLayout

    @property
    def most(self) -> tuple[int, int]:
        full, swa = (self.layout.num_physical(name) - self.layout.first_page(name) for name in ("full", "swa"))
        return full, swa

    def holds(self, full: int, swa: int) -> bool:
        layout = self.layout
        end_of_swa = (layout.first_page("swa") + swa) * layout.by_name["swa"].page_bytes
        begin_of_full = (layout.num_physical("full") - full) * layout.by_name["full"].page_bytes
        return end_of_swa <= begin_of_full


def layout_of(options: DecodeOptions) -> PoolLayout:
    """One buffer with the bytes that the two pools of the options would take, their sinks counted, rounded up to a whole FULL page."""
    shape = HybridShape(options.full_layers, options.swa_layers, window=options.window, page_size=options.page_size)
    full, swa = shape.entry(options.full_layers), shape.entry(options.swa_layers)
    full_pages = options.pages + 1 - (-(options.swa_pages + 1) * swa.bytes // full.bytes)
    return full_and_swa_layout(options.page_size * full_pages * full.bytes, full, swa, page_size=options.page_size)


def room_of(options: DecodeOptions) -> Room:
    """The room of the options' memory."""
    return UnifiedRoom(layout_of(options)) if options.memory == "unified" else SplitRoom(options.pages, options.swa_pages)
