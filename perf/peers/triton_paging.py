"""Page-table kernels in Triton with the same checks as gpukit's: valid ids, sink rules, counted bad values, one launch.

They follow the shape of production engines' kernels: one program per block of ids, the wrapper computes the grid and launches. `bind` takes both
entries by compare-and-swap like gpukit's, but only counts a conflict where gpukit resolves it, which valid input never meets.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _bind(virtual, physical, v2p, p2v, signal, pairs, virtual_rows, physical_rows, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < pairs
    v = tl.load(virtual + i, mask=inside, other=0).to(tl.int64)
    p = tl.load(physical + i, mask=inside, other=0).to(tl.int64)
    valid = inside & (v >= 1) & (v <= virtual_rows - 2) & (p >= 1) & (p <= physical_rows - 2)
    # Triton's compare-and-swap takes no mask: invalid lanes aim at the sentinel row with a value that it never holds.
    never = tl.where(valid, -1, -9).to(tl.int64)
    busy = tl.full((BLOCK,), -2, tl.int64)
    old_p = tl.atomic_cas(v2p + tl.where(valid, v, virtual_rows - 1), never, busy, sem="relaxed")
    old_v = tl.atomic_cas(p2v + tl.where(valid, p, physical_rows - 1), never, busy, sem="relaxed")
    free = valid & (old_p == -1) & (old_v == -1)
    tl.store(p2v + p, v, mask=free)
    tl.atomic_xchg(v2p + tl.where(free, v, 0), tl.where(free, p, 0), mask=free, sem="release")
    if COUNT:
        tl.atomic_add(signal + 0, tl.sum((inside & ~valid).to(tl.int64)), sem="relaxed")
        tl.atomic_add(signal + 2, tl.sum((valid & ~free).to(tl.int64)), sem="relaxed")


@triton.jit
def _bind_range(virtual, v2p, p2v, out, signal, pairs, first, virtual_rows, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < pairs
    v = tl.load(virtual + i, mask=inside, other=0).to(tl.int64)
    p = (first + i).to(tl.int64)
    valid = inside & (v >= 1) & (v <= virtual_rows - 2)
    never = tl.where(valid, -1, -9).to(tl.int64)
    busy = tl.full((BLOCK,), -2, tl.int64)
    old_p = tl.atomic_cas(v2p + tl.where(valid, v, virtual_rows - 1), never, busy, sem="relaxed")
    old_v = tl.atomic_cas(p2v + tl.where(valid, p, 0), never, busy, sem="relaxed")
    free = valid & (old_p == -1) & (old_v == -1)
    tl.store(p2v + p, v, mask=free)
    tl.atomic_xchg(v2p + tl.where(free, v, 0), tl.where(free, p, 0), mask=free, sem="release")
    tl.store(out + i, tl.where(valid, p, -1), mask=inside)
    if COUNT:
        tl.atomic_add(signal + 0, tl.sum((inside & ~valid).to(tl.int64)), sem="relaxed")
        tl.atomic_add(signal + 2, tl.sum((valid & ~free).to(tl.int64)), sem="relaxed")


@triton.jit
def _unbind(virtual, v2p, p2v, out, signal, pages, virtual_rows, physical_rows, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < pages
    v = tl.load(virtual + i, mask=inside, other=0).to(tl.int64)
    valid = inside & (v >= 1) & (v <= virtual_rows - 2)
    none = tl.full((BLOCK,), -1, tl.int64)
    p = tl.atomic_xchg(v2p + tl.where(valid, v, 0), none, mask=valid, sem="relaxed")
    bound = valid & (p >= 1) & (p <= physical_rows - 2)
    owner = tl.atomic_cas(p2v + tl.where(bound, p, physical_rows - 1), tl.where(bound, v, -9), none, sem="relaxed")
    live = bound & (owner == v)
    tl.store(out + i, tl.where(live, p, -1), mask=inside)
    if COUNT:
        tl.atomic_add(signal + 0, tl.sum((inside & ~valid).to(tl.int64)), sem="relaxed")
        tl.atomic_add(signal + 1, tl.sum((valid & ~live).to(tl.int64)), sem="relaxed")


@triton.jit
def _translate(ids, v2p, out, signal, tokens, width, rows, PAGE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tokens
    token = tl.load(ids + i, mask=inside, other=-1).to(tl.int64)
    page = token // PAGE
    in_table = (token >= 0) & (page <= rows - 2)
    physical = tl.load(v2p + page, mask=in_table, other=-1)
    bound = in_table & (physical >= 0)
    tl.store(out + i, tl.where(bound, physical * PAGE + token % PAGE, 0), mask=i < width)
    if COUNT:
        tl.atomic_add(signal + 0, tl.sum((inside & (token >= 0) & ~in_table).to(tl.int64)), sem="relaxed")
        tl.atomic_add(signal + 1, tl.sum((in_table & ~bound).to(tl.int64)), sem="relaxed")


def bind(virtual: Any, physical: Any, v2p: Any, p2v: Any, signal: Any = None) -> None:
    """Like `gpukit.kernels.page_table.bind` on unbound pages."""
    assert virtual.dim() == 1 and physical.shape == virtual.shape and v2p.dtype == p2v.dtype == torch.int64
    n = virtual.numel()
    _bind[(triton.cdiv(n, BLOCK),)](virtual, physical, v2p, p2v, signal, n, v2p.numel(), p2v.numel(), COUNT=signal is not None, BLOCK=BLOCK)


def bind_range(virtual: Any, first: int, v2p: Any, p2v: Any, out: Any, signal: Any = None) -> Any:
    """Like `gpukit.kernels.page_table.bind_range` on unbound pages."""
    n = virtual.numel()
    assert virtual.dim() == 1 and out.shape == virtual.shape and 1 <= first <= p2v.numel() - 1 - n
    _bind_range[(triton.cdiv(n, BLOCK),)](virtual, v2p, p2v, out, signal, n, first, v2p.numel(), COUNT=signal is not None, BLOCK=BLOCK)
    return out


def unbind(virtual: Any, v2p: Any, p2v: Any, out: Any, signal: Any = None) -> Any:
    """Like `gpukit.kernels.page_table.unbind`."""
    assert virtual.dim() == 1 and out.shape == virtual.shape and v2p.dtype == p2v.dtype == torch.int64
    n = virtual.numel()
    _unbind[(triton.cdiv(n, BLOCK),)](virtual, v2p, p2v, out, signal, n, v2p.numel(), p2v.numel(), COUNT=signal is not None, BLOCK=BLOCK)
    return out


def translate(ids: Any, v2p: Any, page_size: int, out: Any, signal: Any = None) -> Any:
    """Like `gpukit.kernels.page_table.translate` of contiguous vectors; the page size is a compile-time constant here."""
    assert ids.dim() == 1 and out.numel() >= ids.numel() and v2p.dtype == torch.int64
    width = out.numel()
    _translate[(triton.cdiv(width, BLOCK),)](
        ids, v2p, out, signal, ids.numel(), width, v2p.numel(), PAGE=page_size, COUNT=signal is not None, BLOCK=BLOCK
    )
    return out
