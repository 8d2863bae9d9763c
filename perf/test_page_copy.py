"""Page bytes: moved, shifted, cleared and stored, far past the L2 or cold, against the copy ceiling; torch's indexing beside the moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpukit.kernels import page_copy
from perf.conftest import GPU, on_device, there
from perf.shapes import KV_STORES, PAGE_COPIES

pytestmark = on_device


def buffer_of(size: int) -> Any:
    """Random bytes; a few of them where there is no GPU."""
    if not GPU:
        return np.zeros(size, np.uint8)
    import torch

    return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")


def pages_of(count: int) -> tuple[Any, Any]:
    """Disjoint random source and destination pages."""
    ids = np.random.default_rng(0).permutation(2 * count) + 1
    return there(ids[:count]), there(ids[count:])


def scaled(count: int) -> int:
    """Fewer pages on a machine without a GPU."""
    return count if GPU else min(count, 8)


@pytest.mark.parametrize(("page_bytes", "count"), PAGE_COPIES)
@pytest.mark.parametrize("implementation", ["gpukit", "torch"])
def test_move_pages(device_benchmark: Callable[..., None], implementation: str, page_bytes: int, count: int) -> None:
    """`count` pages from and to random places."""
    count = scaled(count)
    buffer = buffer_of((2 * count + 1) * page_bytes)
    source, destination = pages_of(count)
    moved = 2 * count * page_bytes
    if implementation == "gpukit":
        device_benchmark(lambda: page_copy.move_pages(buffer, page_bytes, source, destination), moved=moved, nodes=4, cold=moved < 1 << 28)
        return
    if not GPU:
        pytest.skip("a peer needs a GPU")
    import torch

    pages = buffer.view(-1, page_bytes).view(torch.int64)

    def move() -> None:
        pages[destination] = pages[source]

    device_benchmark(move, moved=moved, nodes=4, cold=moved < 1 << 28)


@pytest.mark.parametrize("offset", [1, 64, 100_000])
def test_shift_pages(device_benchmark: Callable[..., None], offset: int) -> None:
    """A run of 64 KiB pages, overlapping and not."""
    page_bytes, count = 65_536, scaled(8_192)
    offset = min(offset, count)
    buffer = buffer_of((2 * count + 1) * page_bytes)
    device_benchmark(lambda: page_copy.shift_pages(buffer, page_bytes, 1, count, offset), moved=2 * count * page_bytes, nodes=4)


def test_zero_pages(device_benchmark: Callable[..., None]) -> None:
    """8,192 pages of 64 KiB."""
    page_bytes, count = 65_536, scaled(8_192)
    buffer, pages = buffer_of((2 * count + 1) * page_bytes), pages_of(count)[0]
    device_benchmark(lambda: page_copy.zero_pages(buffer, page_bytes, pages), moved=count * page_bytes, nodes=4)


@pytest.mark.parametrize(("tokens", "key_width", "value_width"), KV_STORES)
def test_store_kv(device_benchmark: Callable[..., None], tokens: int, key_width: int, value_width: int) -> None:
    """K and V rows at random locations; each width in elements of two bytes."""
    rng = np.random.default_rng(1)
    rows = 4 * tokens
    k, v = (there(rng.integers(0, 2**15, (tokens, width)).astype(np.int16)) for width in (key_width, value_width))
    keys, values = (there(np.zeros((rows, width), np.int16)) for width in (key_width, value_width))
    locations = there(rng.permutation(rows - 1)[:tokens] + 1)
    device_benchmark(lambda: page_copy.store_kv(k, v, locations, keys, values), moved=2 * 2 * tokens * (key_width + value_width))
