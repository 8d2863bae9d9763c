"""Device time of the page-table ops per graph node, beside the same work in Triton. Every node has ids of its own, and all of them are valid."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpukit.kernels import page_table
from perf.conftest import GPU, on_device, there
from perf.shapes import PAGE_COUNTS, PAGE_SIZE

pytestmark = on_device

NODES = 32
IMPLEMENTATIONS = ("gpukit", "triton")
OPS = ("bind", "bind_range", "unbind", "translate")


class Case:
    """Tables for `NODES` calls of `count` ids each, and the call of one op on the next ids."""

    def __init__(self, implementation: str, op: str, count: int):
        self.count = count
        self.op = op
        # As many nodes as warm-up calls and the graph together use.
        pages = count * (NODES + 3)
        rng = np.random.default_rng(count)
        self.v2p, self.p2v = (there(table) for table in page_table.empty(pages + 1))
        self.virtual, self.physical = (there(rng.permutation(pages) + 1) for _ in range(2))
        self.out = there(np.zeros(pages, np.int64))
        self.module: Any = page_table
        if implementation == "triton":
            if not GPU:
                pytest.skip("a peer needs a GPU")
            self.module = pytest.importorskip("perf.peers.triton_paging")
        self._position = itertools.cycle(range(NODES + 3))
        self.reset()

    def reset(self) -> None:
        """Unbound tables for the ops that bind, bound ones for the others."""
        for table in (self.v2p, self.p2v):
            table[1:] = -1
        if self.op in ("unbind", "translate"):
            self.v2p[self.virtual], self.p2v[self.physical] = self.physical, self.virtual

    def call(self) -> None:
        """The op on the ids that come next."""
        first = next(self._position) * self.count
        part = slice(first, first + self.count)
        virtual, physical, out = self.virtual[part], self.physical[part], self.out[part]
        if self.op == "bind":
            self.module.bind(virtual, physical, self.v2p, self.p2v)
        elif self.op == "bind_range":
            self.module.bind_range(virtual, first + 1, self.v2p, self.p2v, out=out)
        elif self.op == "unbind":
            self.module.unbind(virtual, self.v2p, self.p2v, out=out)
        else:
            self.module.translate(virtual, self.v2p, PAGE_SIZE, out=out)


def bytes_moved(op: str, count: int) -> int:
    """Fewest bytes: every id, table entry and output once."""
    return 8 * count * {"bind": 4, "bind_range": 4, "unbind": 4, "translate": 3}[op]


@pytest.mark.parametrize("count", PAGE_COUNTS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_device_time(device_benchmark: Callable[..., None], implementation: str, op: str, count: int) -> None:
    """µs per graph node."""
    case = Case(implementation, op, count)
    device_benchmark(case.call, moved=bytes_moved(op, count), nodes=NODES, before_round=case.reset)
