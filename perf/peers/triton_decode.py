"""A decode round's memory work as engines drive it from the host: one Triton kernel after another, with the tensor operations between them.

The kernels follow the shape of production allocators: a program per request that sums the requests before it for the pages of a batch, a program
per request for its page table. Page-table ops are those of `triton_paging`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from perf.peers import triton_paging

BLOCK = 128


@triton.jit
def _alloc_decode(seq_lens, last_loc, free_pages, out, requests, PAGE: tl.constexpr, BATCH: tl.constexpr):
    request = tl.program_id(0)
    i = tl.arange(0, BATCH)
    lens = tl.load(seq_lens + i, mask=i <= request, other=0).to(tl.int64)
    opens = (lens > 0) & ((lens - 1) % PAGE == 0)
    length = tl.load(seq_lens + request).to(tl.int64)
    mine = ((length - 1) % PAGE == 0).to(tl.int64)
    before = tl.sum(opens.to(tl.int64)) - mine
    if mine == 0:
        tl.store(out + request, tl.load(last_loc + request).to(tl.int64) + 1)
    else:
        tl.store(out + request, tl.load(free_pages + before) * PAGE)


@triton.jit
def _page_table(rows, lens, v2p, out, row_stride, width, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    pages = (tl.load(lens + request).to(tl.int64) + PAGE - 1) // PAGE
    for first in range(0, pages, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < pages
        token = tl.load(rows + request * row_stride + column * PAGE, mask=inside, other=0).to(tl.int64)
        physical = tl.load(v2p + token // PAGE, mask=inside, other=0)
        tl.store(out + request * width + column, tl.maximum(physical, 0).to(tl.int32), mask=inside)


def alloc_decode(seq_lens: Any, last_loc: Any, free_pages: Any, page_size: int, out: Any) -> None:
    """A token for each request: behind its last one, or first in the next free page."""
    count = seq_lens.numel()
    _alloc_decode[(count,)](seq_lens, last_loc, free_pages, out, count, PAGE=page_size, BATCH=triton.next_power_of_2(count))


def page_table(rows: Any, lens: Any, v2p: Any, page_size: int, out: Any) -> None:
    """The physical page of every page of every request."""
    _page_table[(rows.shape[0],)](rows, lens, v2p, out, rows.stride(0), out.shape[1], PAGE=page_size, BLOCK=BLOCK)


class Round:
    """The round of a batch: token rows, tables and lists as torch tensors; `play` enqueues one, with the host's page counts.

    `opening` are the lanes that open a page in this round, `leaving` the first tokens of the pages that leave the window; both are
    worked out by the host's scheduler beforehand, and not part of what is measured.
    """

    def __init__(self, rows: Any, lens: Any, full: tuple[Any, Any], swa: tuple[Any, Any], page_size: int):
        self.rows, self.lens, self.full, self.swa, self.page_size = rows, lens, full, swa, page_size
        lanes, columns = rows.shape[0], rows.shape[1] // page_size
        device = rows.device
        self.lanes = torch.arange(lanes, device=device)
        self.out, self.full_out, self.swa_out = (torch.zeros(lanes, dtype=torch.int64, device=device) for _ in range(3))
        self.freed = torch.zeros(lanes, dtype=torch.int64, device=device)
        self.full_table, self.swa_table = (torch.zeros((lanes, columns), dtype=torch.int32, device=device) for _ in range(2))
        self.cu_lens = torch.zeros(lanes + 1, dtype=torch.int32, device=device)

    def play(self, virtual: Any, full_pages: Any, swa_pages: Any, leaving: Any) -> None:
        """Every launch of a round."""
        size = self.page_size
        self.lens += 1
        last_loc = self.rows[self.lanes, self.lens - 2]
        alloc_decode(self.lens, last_loc, virtual, size, self.out)
        if len(virtual):
            triton_paging.bind(virtual, full_pages, *self.full)
            triton_paging.bind(virtual, swa_pages, *self.swa)
        self.rows[self.lanes, self.lens - 1] = self.out
        if len(leaving):
            triton_paging.unbind(leaving // size, *self.swa, out=self.freed[: len(leaving)])
        triton_paging.translate(self.out, self.full[0], size, self.full_out)
        triton_paging.translate(self.out, self.swa[0], size, self.swa_out)
        page_table(self.rows, self.lens, self.full[0], size, self.full_table)
        page_table(self.rows, self.lens, self.swa[0], size, self.swa_table)
        torch.cumsum(self.lens, 0, out=self.cu_lens[1:])
