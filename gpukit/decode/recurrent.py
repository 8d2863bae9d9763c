"""A model of recurrent layers in decode, with or without experts behind them: the state of a batch of sequences, and a round of plain or speculative
decoding.

A round calls public ops and enqueues; it reads nothing back and knows no lengths, which live on the device with everything else. So on a GPU a
round is one captured graph, replayed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from gpukit.decode.backend import Backend, CupyBackend
from gpukit.decode.geometry import Geometry
from gpukit.decode.weights import Weights
from gpukit.errors import Signal
from gpukit.kernels import conv, gated_delta, gates, linear, moe, norm, speculative
from gpukit.kernels.state_pool import ReplayLog, StatePool
from gpukit.launch import overlapping

if TYPE_CHECKING:
    from gpukit.graphs import Graph, Plan

__all__ = ["SUBJECTS", "Decoder", "own_stream"]

# The subjects whose kernels a round launches.
SUBJECTS = ("conv", "gated_delta", "gates", "linear", "moe", "norm", "speculative")

# Slots of a pool that no sequence has, and what they hold: a round that touches one is seen.
SPARE_SLOTS = 2
POISON = 0x7FC0


@contextmanager
def own_stream(backend: Backend) -> Iterator[int]:
    """A stream that can be captured, current while the block runs; 0 where there are none."""
    if not isinstance(backend, CupyBackend):
        yield 0
        return
    from gpukit.measure import timing

    try:
        with timing.own_stream() as stream:
            yield stream
    finally:
        # Memory that a stream has used is kept for it alone.
        backend.cupy.get_default_memory_pool().free_all_blocks()


class Decoder:
    """A batch of sequences in a model: their states, the buffers of a round, and the round.

    Parameters
    ----------
    geometry, weights
        The model.
    backend : Backend
        Where the arrays live.
    batch : int
        Sequences.
    drafts : int, optional
        Tokens guessed per round, which makes it a speculative one: `table` then holds the guesses. None decodes plainly, a token a round.
    width : int
        Columns of the table of drafts.
    commit : {"fold", "fold_record"}
        Whether states are taken past accepted tokens at the end of their round, or while the next one is recorded.
    exact : bool
        Whether verification computes the bits of plain decoding. Otherwise it has the convolution in front in the same kernel.
    seed : int
        Of the order of the slots.

    Attributes
    ----------
    anchors, lengths : int64 arrays, shape (batch,)
        The last token of each sequence and how many are before it. A negative length is an idle sequence.
    slots : int64 array, shape (batch,)
        Where its state is.
    table : int64 array, shape (batch, width)
        The guess for the token behind each position.
    accepted, emitted : int64 arrays, shapes (batch,) and (batch, tokens)
        Of the last round: how many tokens came out, and which, -1 behind them.
    """

    def __init__(
        self,
        geometry: Geometry,
        weights: Weights,
        backend: Backend,
        batch: int,
        *,
        drafts: int | None = None,
        width: int = 1,
        commit: str = "fold",
        exact: bool = True,
        seed: int = 0,
    ):
        self.geometry, self.weights, self.backend = geometry, weights, backend
        self.batch, self.tokens = batch, 1 if drafts is None else drafts + 1
        self.speculative, self.deferred = drafts is not None, commit == "fold_record"
        self.fused = self.speculative and not exact
        self.signal = Signal(like=backend.like)
        self.launches = 0
        self.graphs: list[Any] = []
        heads, dim, rows = geometry.value_heads, geometry.dim, batch * self.tokens
        self.pool = StatePool.allocate(geometry.layers, batch + SPARE_SLOTS, heads, dim, channels=geometry.channels, layout="slot", like=backend.like)
        order = np.random.default_rng([seed, 2]).permutation(batch + SPARE_SLOTS)
        self.places, self.spare = order[:batch], order[batch:]
        self.logs = [
            ReplayLog.allocate(geometry.layers, batch, self.tokens, geometry.key_heads, heads, dim, channels=geometry.channels, like=backend.like)
            for _ in range(self.speculative + (self.speculative and self.deferred))
        ]
        self.anchors, self.lengths, self.slots, self.accepted = (backend.zeros(batch, np.int64) for _ in range(4))
        self.rows = backend.zeros((batch, 3), np.int64)
        self.table = backend.zeros((batch, width), np.int64)
        self.ids, self.positions, self.targets, self.emitted = (backend.zeros((batch, self.tokens), np.int64) for _ in range(4))
        self.workspace = speculative.workspace(rows, like=backend.like)
        experts = weights.layers[0].experts
        # All tokens by the schedule whose bits do not depend on their number.
        self._expert_workspace = backend.zeros(moe.workspace_bytes(rows, experts, "decode") if experts else 0, np.uint8)
        self.logits = backend.zeros((rows, geometry.vocabulary), np.float32)
        self._hidden, self._normed = (backend.zeros((rows, geometry.hidden), np.uint16) for _ in range(2))
        # Rows begin at multiples of 16 bytes, or the norm of a single row would take another path than that of several, and round differently.
        padded = -(-geometry.projection // 8) * 8
        projected = backend.zeros((rows, padded), np.uint16)
        self._projected = projected[:, : geometry.projection]
        self._convolved = backend.zeros((batch, self.tokens, geometry.channels), np.uint16)
        self._g, self._beta = (backend.zeros((batch, self.tokens, heads), np.float32) for _ in range(2))
        self._mixed = backend.zeros((batch, self.tokens, heads, dim), np.uint16)
        self._gated = backend.zeros((rows, heads, dim), np.uint16)
        # Views of the projections' columns and of the convolution's channels, as the ops take them.
        channels, values = geometry.channels, geometry.values
        by_sequence = projected.reshape(batch, self.tokens, padded)
        self._columns = by_sequence[:, :, :channels]
        self._gate = projected[:, channels : channels + values].reshape(rows, heads, dim)
        self._x_a = by_sequence[:, :, channels + values : channels + values + heads]
        self._x_b = by_sequence[:, :, channels + values + heads : geometry.projection]
        keys = geometry.key_heads * dim
        self._q, self._k = (self._convolved[:, :, start : start + keys].reshape(batch, self.tokens, geometry.key_heads, dim) for start in (0, keys))
        self._v = self._convolved[:, :, 2 * keys :].reshape(batch, self.tokens, heads, dim)

    def start(self, anchors: np.ndarray, table: np.ndarray | None = None) -> None:
        """Put every sequence before its first token, an anchor each, with nothing in its state; spare slots are poisoned."""
        self.pool.rec[...] = 0
        self.pool.conv[...] = 0
        for slot in self.spare.tolist():
            self.pool.rec[:, slot] = np.float32("nan")
            self.pool.conv[:, slot] = POISON
        for log in self.logs:
            # What a round does not write, a commit must not read.
            log.k[...], log.v[...], log.conv[...], log.gates[...] = POISON, POISON, POISON, np.float32("nan")
        self.accepted[...] = 0
        self.rows[...] = 0
        self.anchors[...] = self.backend.to_device(anchors)
        self.set_active(np.zeros(self.batch, np.int64))
        if table is not None:
            self.table[...] = self.backend.to_device(table)

    def set_active(self, lengths: np.ndarray) -> None:
        """Set the sequences' lengths; those with a negative one are idle and keep their states."""
        self.lengths[...] = self.backend.to_device(lengths)
        self.slots[...] = self.backend.to_device(np.where(lengths < 0, -1, self.places))

    def compile(self, stream: int, plan: Plan | None = None) -> list[Callable[[], Any]]:
        """The rounds, to be called in turn: two where logs change places, else one. On a GPU they are graphs, captured on a stream under a plan."""
        sides = range(max(len(self.logs), 1))
        if not isinstance(self.backend, CupyBackend):
            return [functools.partial(self.round, side) for side in sides]
        self.graphs += [self.capture(stream, side, plan) for side in sides]
        return [graph.launch for graph in self.graphs]

    def capture(self, stream: int, side: int = 0, plan: Plan | None = None) -> Graph:
        """One round as a graph, whose kernels may overlap."""
        from gpukit.graphs import capture

        with capture(stream, plan=plan) as graph, overlapping():
            self.round(side)
        return graph

    @property
    def kernels(self) -> int:
        """Kernels of a round: those of its graph; without one as many as ops were called."""
        return len(self.graphs[0].kernels) if self.graphs else self.launches

    def close(self) -> None:
        """Free the graphs, which hold on to nothing that the decoder does not."""
        for graph in self.graphs:
            graph.close()
        self.graphs.clear()

    def round(self, side: int = 0) -> None:
        """Decode a token, or verify the drafts and go past those that are right. `side` is the log that it writes."""
        self.launches = 0
        self._call(
            speculative.prepare_verify, self.anchors, self.table, self.lengths, tokens=self.tokens, draft_starts=self.lengths,
            ids=self.ids, positions=self.positions,
        )  # fmt: skip
        self._call(linear.embed, self.ids.reshape(-1), self.weights.embedding, out=self._hidden)
        for layer in range(self.geometry.layers):
            self._layer(layer, side)
        self._call(norm.rms_norm, self._hidden, self.weights.final_norm, out=self._normed)
        self._call(linear.linear, self._normed, self.weights.head, out=self.logits)
        self._call(speculative.argmax_columns, self.logits.T, out=self.targets.reshape(-1), workspace=self.workspace)
        self._call(
            speculative.accept_greedy, self.targets, self.ids, self.lengths, self.anchors, slots=self.slots, accepted=self.accepted,
            rows=self.rows, emitted=self.emitted,
        )  # fmt: skip
        if self.speculative and not self.deferred:
            self.commit(side)
        elif self.fused:
            # The next round convolves while it takes states along, from histories that must have been taken along before.
            self._call(gated_delta.fold, self.pool, self.logs[side], self.rows, states=False)

    def commit(self, side: int) -> None:
        """Take states and histories past the tokens accepted from a log: at the end of a round, or of the last one where commits are deferred."""
        histories = not (self.deferred and self.fused)
        self._call(gated_delta.fold, self.pool, self.logs[side], self.rows, histories=histories)
        if self.deferred:
            # The next round must not take them again.
            self.accepted[...] = 0

    def _layer(self, layer: int, side: int) -> None:
        weights = self.weights.layers[layer]
        self._call(norm.rms_norm, self._hidden, weights.norm, out=self._normed)
        self._call(linear.linear, self._normed, weights.projection, out=self._projected)
        if not self.fused:
            self._convolve(layer, side, weights.taps)
        self._call(gates.gate_control, self._x_a, self._x_b, weights.a_log, weights.dt_bias, g_out=self._g, beta_out=self._beta)
        self._mix(layer, side, weights.taps)
        self._call(norm.gated_rms_norm, self._mixed.reshape(self._gated.shape), self._gate, weights.output_norm, out=self._gated)
        self._call(linear.linear, self._gated.reshape(len(self._gated), -1), weights.output, out=self._hidden, residual=self._hidden)
        if weights.experts is not None:
            self._call(norm.rms_norm, self._hidden, weights.expert_norm, out=self._normed)
            self._call(
                moe.sparse_moe, self._normed, weights.experts, self._hidden, workspace=self._expert_workspace, exclusive=True, schedule="decode"
            )

    def _convolve(self, layer: int, side: int, taps: Any) -> None:
        history = self.pool.conv[layer]
        if not self.speculative:
            self._call(conv.conv1d_silu, self._columns, taps, history, self.slots, out=self._convolved)
            return
        before = {"previous": self.logs[1 - side].conv[layer], "accepted": self.accepted} if self.deferred else {}
        log = self.logs[side].conv[layer]
        self._call(conv.conv1d_silu_record, self._columns, taps, history, self.slots, log, out=self._convolved, **before)

    def _mix(self, layer: int, side: int, taps: Any) -> None:
        inputs = (self._g, self._beta, self.pool, self.slots)
        logs = (self.logs[1 - side], self.accepted, self.logs[side]) if self.deferred else self.logs[side : side + 1]
        # The op in front makes gates and writes nothing else; acceptance and folds lie several ops before it, in the first layer too.
        options = {"layer": layer, "out": self._mixed, "settled": True}
        if not self.speculative:
            self._call(gated_delta.direct, self._q, self._k, self._v, *inputs, **options)
        elif self.fused:
            convolve = gated_delta.conv_fold_record if self.deferred else gated_delta.conv_record
            self._call(convolve, self._columns, taps, *inputs, *logs, **options)
        else:
            verify = gated_delta.fold_record if self.deferred else gated_delta.record
            self._call(verify, self._q, self._k, self._v, *inputs, *logs, **options, exact=True)

    def _call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.launches += 1
        op(*args, **kwargs, signal=self.signal)
