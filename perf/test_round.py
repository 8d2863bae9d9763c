"""A whole speculative round of the recurrent layers of a 35B hybrid model: verify with the convolution in front, then commit.

Every kernel of a round is in the graph and its name in `extra_info`. Rounds go through several sets of slots, more than 250 MB of states.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpukit.kernels import conv, gated_delta
from gpukit.kernels.state_pool import ReplayLog, StatePool
from gpukit.launch import overlapping
from perf.conftest import GPU, on_device, there
from perf.test_gated_delta import DIM, HEADS, KEY_HEADS, LOG_BYTES, MODEL_LAYERS, ROTATED_BYTES, STATE_BYTES, TOKEN_BYTES, bfloat16, like

pytestmark = on_device

TOKENS, ACCEPTED = 4, 3
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM


# Accesses to a state, and to columns: those between two kernels go to memory and come back, one kernel reads them and logs them.
SCHEMES = {
    "record_and_fold": (3, 3),
    "conv_record_and_fold": (3, 2),
    "settled_conv_record_and_fold": (3, 2),
    "fold_record": (2, 3),
    "settled_conv_fold_record": (2, 2),
}


class Round:
    """Pools, logs and activations of a batch, and its kernels in order."""

    def __init__(self, items: int):
        self.turns = 2 + int(ROTATED_BYTES) // (MODEL_LAYERS * items * STATE_BYTES)
        self.pool = StatePool.allocate(MODEL_LAYERS, self.turns * items, HEADS, DIM, channels=CHANNELS, like=like())
        log = (MODEL_LAYERS, items, TOKENS, KEY_HEADS, HEADS, DIM)
        self.logs = [ReplayLog.allocate(*log, channels=CHANNELS, like=like()) for _ in range(2)]
        rng = np.random.default_rng(0)
        self.columns, self.weight, self.convolved = (
            bfloat16(rng, items, TOKENS, CHANNELS),
            bfloat16(rng, CHANNELS, 4),
            bfloat16(rng, items, TOKENS, CHANNELS),
        )
        keys = KEY_HEADS * DIM
        heads = (items, TOKENS, -1, DIM)
        self.inputs = {
            "q": self.convolved[..., :keys].reshape(heads),
            "k": self.convolved[..., keys : 2 * keys].reshape(heads),
            "v": self.convolved[..., 2 * keys :].reshape(heads),
            "g": there(-rng.random((items, TOKENS, HEADS), np.float32)),
            "beta": there(rng.random((items, TOKENS, HEADS), np.float32)),
            "out": bfloat16(rng, items, TOKENS, HEADS, DIM),
        }
        slots = np.arange(self.turns * items).reshape(self.turns, items)
        self.slots = [there(one) for one in slots]
        self.rows = [there(np.stack((one, one, np.full(items, ACCEPTED)), axis=1)) for one in slots]
        self.accepted = there(np.full(items, ACCEPTED))

    def record_and_fold(self, turn: int) -> None:
        """Verify all layers, then commit them in one launch."""
        for layer in range(MODEL_LAYERS):
            slots = self.slots[turn]
            conv.conv1d_silu_record(self.columns, self.weight, self.pool.conv[layer], slots, self.logs[0].conv[layer], out=self.convolved)
            gated_delta.record(**self.inputs, pool=self.pool, slots=slots, log=self.logs[0], layer=layer)
        gated_delta.fold(self.pool, self.logs[0], self.rows[turn])

    def conv_record_and_fold(self, turn: int, settled: bool = False) -> None:
        """Convolve and verify all layers, each in one kernel, then commit them in one launch."""
        inputs = {name: self.inputs[name] for name in ("g", "beta", "out")}
        for layer in range(MODEL_LAYERS):
            gated_delta.conv_record(
                self.columns, self.weight, **inputs, pool=self.pool, slots=self.slots[turn], log=self.logs[0], layer=layer,
                settled=settled and layer > 0,
            )  # fmt: skip
        gated_delta.fold(self.pool, self.logs[0], self.rows[turn])

    def settled_conv_record_and_fold(self, turn: int) -> None:
        """The same, while the kernel in front still runs."""
        self.conv_record_and_fold(turn, settled=True)

    def settled_conv_fold_record(self, turn: int) -> None:
        """Commit all histories, then each layer's states while it is verified, in one kernel with the convolution."""
        inputs = {name: self.inputs[name] for name in ("g", "beta", "out")}
        previous, log = self.logs
        gated_delta.fold(self.pool, previous, self.rows[turn], states=False)
        for layer in range(MODEL_LAYERS):
            gated_delta.conv_fold_record(
                self.columns, self.weight, **inputs, pool=self.pool, slots=self.slots[turn], previous=previous, accepted=self.accepted, log=log,
                layer=layer, prefetch_layer=(layer + 1) % MODEL_LAYERS, settled=layer > 0,
            )  # fmt: skip

    def fold_record(self, turn: int) -> None:
        """Verify each layer while the previous round is committed."""
        previous, log = self.logs
        for layer in range(MODEL_LAYERS):
            slots = self.slots[turn]
            conv.conv1d_silu_record(
                self.columns, self.weight, self.pool.conv[layer], slots, log.conv[layer], out=self.convolved,
                previous=previous.conv[layer], accepted=self.accepted,
            )  # fmt: skip
            gated_delta.fold_record(
                **self.inputs, pool=self.pool, slots=slots, previous=previous, accepted=self.accepted, log=log, layer=layer,
                prefetch_layer=(layer + 1) % MODEL_LAYERS,
            )  # fmt: skip


@pytest.mark.parametrize("is_overlapping", [False, True])
@pytest.mark.parametrize("items", [1, 8])
@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_round(device_benchmark: Callable[..., None], benchmark: Any, scheme: str, items: int, is_overlapping: bool) -> None:
    """Three of four tokens accepted."""
    work = Round(items)
    turns = itertools.cycle(range(work.turns))
    reads, columns = SCHEMES[scheme]
    token_bytes = TOKEN_BYTES - 2 * CHANNELS if columns == 2 else TOKEN_BYTES
    moved = MODEL_LAYERS * items * (reads * STATE_BYTES + TOKENS * (token_bytes + LOG_BYTES) + ACCEPTED * LOG_BYTES + 2 * CHANNELS * columns * TOKENS)

    def play() -> None:
        with overlapping(is_overlapping):
            getattr(work, scheme)(next(turns))

    device_benchmark(play, moved=moved, nodes=work.turns)
    if GPU:
        from gpukit.graphs import capture
        from gpukit.measure.timing import own_stream

        with own_stream() as stream, capture(stream) as graph:
            play()
        benchmark.extra_info["kernels"] = dict(Counter(graph.kernels))
