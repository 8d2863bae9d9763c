"""Device time of free lists, sliding window and attention metadata at decode-batch shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpukit.kernels import free_list, metadata, page_table, sliding_window
from gpukit.kernels.free_list import DevicePages
from perf.conftest import on_device, there
from perf.shapes import BATCHES, CONTEXT, PAGE_SIZE

pytestmark = on_device


def bound_tables(pages: int) -> tuple[Any, Any]:
    """Tables in which every virtual page is bound to a random physical one."""
    v2p, p2v = page_table.empty(pages + 1)
    physical = np.random.default_rng(0).permutation(pages) + 1
    page_table.bind(np.arange(1, pages + 1), physical, v2p, p2v)
    return there(v2p), there(p2v)


def rows_of(batch: int) -> tuple[Any, int]:
    """Token rows of `CONTEXT` tokens each on distinct virtual pages, and the number of pages."""
    pages = batch * (CONTEXT // PAGE_SIZE)
    tokens = np.arange(PAGE_SIZE, (pages + 1) * PAGE_SIZE, dtype=np.int32).reshape(batch, CONTEXT)
    return there(tokens), pages


@pytest.mark.parametrize("batch", BATCHES)
def test_gather_decode(device_benchmark: Callable[..., None], batch: int) -> None:
    """One new token per request, a fiftieth of them on a new page."""
    lens = np.random.default_rng(1).integers(1, CONTEXT, batch)
    last = PAGE_SIZE * 3 + (lens - 2) % PAGE_SIZE
    pages, out = there(np.arange(1, batch + 1)), there(np.zeros(batch, np.int64))
    arguments = (there(lens), there(last), pages, PAGE_SIZE)
    device_benchmark(lambda: free_list.gather_decode(*arguments, out=out), moved=8 * 3 * batch)


@pytest.mark.parametrize("batch", BATCHES)
def test_gather_extend(device_benchmark: Callable[..., None], batch: int) -> None:
    """65,536 new tokens over the batch."""
    tokens = 65_536
    seq = np.full(batch, tokens // batch)
    pages = int((-(-seq // PAGE_SIZE)).sum())
    zero, before = np.zeros(batch, np.int64), np.full(batch, -1)
    out = there(np.zeros(tokens, np.int64))
    arguments = (there(zero), there(seq), there(before), there(np.arange(1, pages + 1)), PAGE_SIZE)
    device_benchmark(lambda: free_list.gather_extend(*arguments, num_tokens=tokens, num_pages=pages, out=out), moved=8 * (tokens + pages))


@pytest.mark.parametrize("count", [4_096, 65_536, 1_000_000])
def test_compact(device_benchmark: Callable[..., None], count: int) -> None:
    """Half of the ids are kept."""
    keep = np.random.default_rng(2).random(count) < 0.5
    out, length = there(np.zeros(count, np.int64)), there(np.zeros(1, np.int64))
    arguments = there(np.arange(count)), there(keep)
    device_benchmark(lambda: free_list.compact(*arguments, out=out, out_len=length), moved=count + 12 * count, nodes=16)


@pytest.mark.parametrize("batch", BATCHES)
def test_retire_of_nothing(device_benchmark: Callable[..., None], batch: int) -> None:
    """What the launch costs when no page has left the window: the usual round."""
    rows, pages = rows_of(batch)
    v2p, p2v = bound_tables(pages)
    retired = DevicePages(pages, like=rows)
    zero = there(np.zeros(batch, np.int64))
    device_benchmark(lambda: sliding_window.retire(rows, zero, zero, PAGE_SIZE, v2p, p2v, retired), moved=16 * batch)


@pytest.mark.parametrize("batch", BATCHES)
def test_decode_metadata(device_benchmark: Callable[..., None], batch: int) -> None:
    """Lengths, sums, FULL and SWA tables at half the context."""
    rows, pages = rows_of(batch)
    full, _ = bound_tables(pages)
    spaces = metadata.AddressSpaces(full, swa=bound_tables(pages)[0])
    lens = there(np.full(batch, CONTEXT // 2, np.int32))
    columns = CONTEXT // PAGE_SIZE
    outs = {
        "lengths_out": there(np.zeros(batch, np.int32)),
        "cu_lengths_out": there(np.zeros(batch + 1, np.int32)),
        "full_out": there(np.zeros((batch, columns), np.int32)),
        "swa_out": there(np.zeros((batch, columns), np.int32)),
    }
    read = batch * columns // 2 * (4 + 8 + 8)
    device_benchmark(lambda: metadata.decode_metadata(rows, lens, spaces, PAGE_SIZE, **outs), moved=read + 2 * 4 * batch * columns, nodes=16)


@pytest.mark.parametrize("batch", BATCHES)
def test_read_table(device_benchmark: Callable[..., None], batch: int) -> None:
    """A page table at half the context."""
    rows, pages = rows_of(batch)
    v2p, _ = bound_tables(pages)
    lens, columns = there(np.full(batch, CONTEXT // 2, np.int32)), CONTEXT // PAGE_SIZE
    out = there(np.zeros((batch, columns), np.int32))
    device_benchmark(lambda: metadata.read_table(rows, lens, v2p, PAGE_SIZE, out=out), moved=batch * columns // 2 * 16, nodes=16)


@pytest.mark.parametrize("batch", BATCHES)
def test_translate_window(device_benchmark: Callable[..., None], batch: int) -> None:
    """Four draft tokens per request in virtual, FULL and SWA space."""
    rows, pages = rows_of(batch)
    tables = bound_tables(pages)[0], bound_tables(pages)[0]
    starts = there(np.full(batch, CONTEXT // 2))
    outs = tuple(there(np.zeros(4 * batch, np.int64)) for _ in range(2))
    virtual = there(np.zeros(4 * batch, np.int64))
    moved = 4 * batch * (4 + 2 * 8 + 3 * 8)
    device_benchmark(lambda: metadata.gather_translate_window(rows, starts, 4, tables, PAGE_SIZE, outs=outs, virtual_out=virtual), moved=moved)
