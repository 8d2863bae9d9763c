"""What a round is made of besides `record` and `fold`: the commit in one pass with the next verification and its convolution, histories alone,
and launches that read what is settled while the kernel in front still runs. Always against the ops one by one, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpukit import Signal
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.kernels import gated_delta
from gpukit.kernels.state_pool import ReplayLog, StatePool
from gpukit.launch import overlapping
from tests.helpers.bf16 import bits, random_bits
from tests.helpers.gated_delta import GEOMETRIES, states_of, tokens_of
from tests.helpers.gated_delta_device import host, make_log, make_pool

LAYERS = 2


class OnHost:
    """NumPy arrays where a card would have its own."""

    array = staticmethod(np.array)
    host = staticmethod(np.asarray)


def columns_of(seed: int, items: int, tokens: int, key_heads: int, heads: int, dim: int) -> dict[str, np.ndarray]:
    """Raw columns and gates of a batch."""
    rng = np.random.default_rng(seed)
    return {
        "x": random_bits(rng, items, tokens, (2 * key_heads + heads) * dim),
        "g": (-rng.exponential(0.3, (items, tokens, heads))).astype(np.float32),
        "beta": rng.random((items, tokens, heads), np.float32),
    }


class Rounds:
    """Two rounds: tokens that were verified, of which some are accepted, and those verified next."""

    def __init__(
        self, card: Any, items: int, tokens: int, key_heads: int, heads: int, dim: int, layout: str = "layer", dtype: str = "float32", width: int = 0
    ):
        self.card, self.items, self.tokens = card, items, tokens
        # Tokens of the first round, by default as many.
        self.width = width or tokens
        channels = (2 * key_heads + heads) * dim
        states = states_of((LAYERS, items + 1, heads, dim, dim))
        self.states = states if dtype == "float32" else bits(states)
        self.histories = random_bits(np.random.default_rng(0), LAYERS, items + 1, 3, channels)
        self.layout = layout
        self.shape = key_heads, heads, dim, channels
        self.weight = card.array(random_bits(np.random.default_rng(1), channels, 4))
        self.batches = [
            {name: card.array(array) for name, array in columns_of(seed, items, count, *self.shape[:3]).items()}
            for seed, count in ((2, self.width), (3, tokens))
        ]
        self.slots = np.random.default_rng(items).permutation(items + 1)[:items]

    def log(self, width: int = 0) -> ReplayLog:
        key_heads, heads, dim, channels = self.shape
        width = width or self.tokens
        empty = np.full((LAYERS, self.items, width, channels), 0x7FC0, np.uint16)
        return make_log(self.card, LAYERS, self.items, width, key_heads, heads, dim, empty)

    def pool(self) -> StatePool:
        return make_pool(self.card, self.states, self.layout, self.histories)

    def out(self, tokens: int = 0) -> Any:
        _, heads, dim, _ = self.shape
        return self.card.array(np.full((self.items, tokens or self.tokens, heads, dim), 0x7FC0, np.uint16))

    def verify_first(self, pool: StatePool) -> ReplayLog:
        log, out = self.log(self.width), self.out(self.width)
        for layer in range(LAYERS):
            gated_delta.conv_record(
                **self.batches[0], weight=self.weight, pool=pool, slots=self.card.array(self.slots), log=log, layer=layer, out=out
            )
        return log

    def commit_and_verify(self, accepted: np.ndarray, in_one_pass: bool, **options: Any) -> list[np.ndarray]:
        """Everything that the second round leaves."""
        pool = self.pool()
        previous, log, outs = self.verify_first(pool), self.log(), []
        rows = self.card.array(np.stack((self.slots, self.slots, accepted), 1))
        gated_delta.fold(pool, previous, rows, states=not in_one_pass)
        for layer in range(LAYERS):
            arguments = {**self.batches[1], "weight": self.weight, "pool": pool, "slots": self.card.array(self.slots), "log": log, "layer": layer}
            outs.append(self.out())
            if in_one_pass:
                folded = {"previous": previous, "accepted": self.card.array(accepted.astype(options.get("ids", np.int64)))}
                gated_delta.conv_fold_record(**arguments, **folded, out=outs[-1], settled=options.get("settled", False))
            else:
                gated_delta.conv_record(**arguments, out=outs[-1])
        return [host(self.card, array) for array in (pool.rec, pool.conv, *outs, log.k, log.v, log.gates, log.conv)]


def assert_same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for position, (first, second) in enumerate(zip(one, other, strict=True)):
        assert np.array_equal(first.view(np.uint8), second.view(np.uint8)), position


# On the NumPy backend.


@pytest.mark.parametrize("tokens", [1, 3])
def test_one_pass_is_a_fold_and_a_verification(tokens: int) -> None:
    rounds = Rounds(OnHost(), 3, tokens, 1, 2, 64)
    accepted = np.array([0, 1, tokens])
    assert_same(rounds.commit_and_verify(accepted, False), rounds.commit_and_verify(accepted, True))


def test_states_and_histories_are_folded_apart_as_together() -> None:
    rounds, rows = Rounds(OnHost(), 2, 3, 1, 2, 64), None
    together, apart = rounds.pool(), rounds.pool()
    log = rounds.verify_first(together)
    rows = np.stack((rounds.slots, rounds.slots[::-1], [2, 0]), 1)
    rows[:, 1] = rounds.slots
    gated_delta.fold(together, log, rows)
    gated_delta.fold(apart, log, rows, states=False)
    assert np.array_equal(apart.rec, rounds.states) and np.array_equal(apart.conv, together.conv)
    gated_delta.fold(apart, log, rows, histories=False)
    gated_delta.fold(apart, log, rows, states=False, histories=False)
    assert np.array_equal(apart.rec, together.rec) and np.array_equal(apart.conv, together.conv)


def test_logs_of_one_memory_are_refused() -> None:
    rounds = Rounds(OnHost(), 1, 2, 1, 2, 64)
    pool, log = rounds.pool(), rounds.log()
    with pytest.raises(ArgumentError, match="log: expected memory of its own, but it overlaps previous"):
        gated_delta.conv_fold_record(
            **rounds.batches[0], weight=rounds.weight, pool=pool, slots=rounds.slots, previous=log, accepted=np.zeros(1, int), log=log, layer=0
        )
    assert np.array_equal(pool.rec, rounds.states)


@pytest.mark.parametrize(("keep", "kind", "message"), [(1.5, ArgumentError, "from 0 to 1, got 1.5"), ("x", ArgumentTypeError, "a number, got str")])
def test_shares_that_are_none_are_refused(keep: Any, kind: type[Exception], message: str) -> None:
    rounds = Rounds(OnHost(), 1, 2, 1, 2, 64)
    pool, log = rounds.pool(), rounds.log()
    with pytest.raises(kind, match=f"keep: expected .*{message}"):
        gated_delta.fold(pool, log, np.array([[0, 0, 1]]), keep=keep)
    with pytest.raises(kind, match="keep: expected a number"):
        gated_delta.conv_record(**rounds.batches[0], weight=rounds.weight, pool=pool, slots=rounds.slots, log=log, layer=0, keep=keep)
    assert np.array_equal(pool.rec, rounds.states)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 16])
@pytest.mark.parametrize(("key_heads", "heads", "dim"), GEOMETRIES)
def test_one_pass_equals_two_to_the_bit(card: Any, key_heads: int, heads: int, dim: int, tokens: int, settled: bool) -> None:
    for items, layout in ((1, "layer"), (3, "slot"), (8, "page")):
        rounds = Rounds(card, items, tokens, key_heads, heads, dim, layout)
        for turn in range(3):
            accepted = (np.arange(items) * 3 + turn * 2) % (tokens + 1)
            assert_same(rounds.commit_and_verify(accepted, False), rounds.commit_and_verify(accepted, True, settled=settled, ids=np.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize(("items", "width"), [(40, 4), (70, 3), (2, 16)])
def test_one_pass_of_large_batches_and_long_logs(card: Any, items: int, width: int, settled: bool) -> None:
    """Batches for which `conv_record` takes large blocks too, and more accepted tokens than a block prepares at once."""
    rounds = Rounds(card, items, 4, 2, 4, 128, width=width)
    accepted = (np.arange(items) * 7 + 3) % (width + 1)
    assert_same(rounds.commit_and_verify(accepted, False), rounds.commit_and_verify(accepted, True, settled=settled))


@pytest.mark.usefixtures("direct_kernel")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("keep", [0, 0.3, 1.0])
def test_what_the_l2_is_asked_to_keep_changes_nothing(card: Any, keep: float, dtype: str) -> None:
    rounds = Rounds(card, 3, 4, 1, 2, 128, dtype=dtype)
    q, k, v = (card.array(random_bits(np.random.default_rng(7), 3, 4, heads, 128)) for heads in (1, 1, 2))
    gates = {name: rounds.batches[0][name] for name in ("g", "beta")}
    slots, accepted = card.array(rounds.slots), card.array(np.array([1, 0, 4]))
    rows = card.array(np.stack((rounds.slots, rounds.slots, [2, 1, 4]), 1))
    left = []
    for hint in (None, keep):
        pool, outs = rounds.pool(), [rounds.out() for _ in range(5)]
        logs = [rounds.verify_first(pool), rounds.log()]
        common = {"pool": pool, "slots": slots, "layer": 1, "keep": hint}
        gated_delta.direct(q, k, v, **gates, **common, out=outs[0])
        gated_delta.record(q, k, v, **gates, **common, log=logs[1], out=outs[1])
        gated_delta.fold_record(q, k, v, **gates, **common, previous=logs[0], accepted=accepted, log=logs[1], out=outs[2])
        gated_delta.conv_record(rounds.batches[0]["x"], rounds.weight, **gates, **common, log=logs[1], out=outs[3])
        gated_delta.fold(pool, logs[0], rows, keep=hint)
        one_pass = {"previous": logs[0], "accepted": accepted, "log": logs[1], "out": outs[4]}
        gated_delta.conv_fold_record(rounds.batches[0]["x"], rounds.weight, **gates, **common, **one_pass)
        left.append([host(card, array) for array in (pool.rec, pool.conv, *outs, logs[1].k, logs[1].v)])
    assert_same(*left)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 7])
def test_one_pass_with_states_in_bfloat16(card: Any, tokens: int) -> None:
    rounds = Rounds(card, 3, tokens, 2, 6, 128, dtype="bfloat16")
    accepted = np.array([tokens, 0, 2])
    assert_same(rounds.commit_and_verify(accepted, False), rounds.commit_and_verify(accepted, True))


@pytest.mark.gpu
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("tokens", [3, 6])
def test_what_is_skipped_is_counted_and_leaves_everything_alone(card: Any, tokens: int, settled: bool) -> None:
    rounds = Rounds(card, 7, tokens, 1, 2, 128)
    pool = rounds.pool()
    previous, log, out = rounds.verify_first(pool), rounds.log(), rounds.out()
    signal = Signal(like=pool.rec)
    # Padding, past the pool, twice the same, fine, m below 0 and above W.
    slots, accepted = np.array([-1, 8, 2, 2, 5, 6, 7]), np.array([1, 1, 1, 1, 0, -1, tokens + 1])
    gated_delta.conv_fold_record(
        **rounds.batches[1], weight=rounds.weight, pool=pool, slots=card.array(slots), previous=previous, accepted=card.array(accepted), log=log,
        layer=1, out=out, signal=signal, settled=settled,
    )  # fmt: skip
    assert signal.counts() == {"out_of_range": 3, "occupied": 2}
    assert np.array_equal(host(card, pool.rec), rounds.states) and np.array_equal(host(card, pool.conv), rounds.histories)
    found, columns = host(card, out), host(card, log.conv)
    assert found[4].any() and not np.delete(found, 4, 0).any()
    assert (columns[1, 4] != 0x7FC0).all() and (np.delete(columns[1], 4, 0) == 0x7FC0).all() and (columns[0] == 0x7FC0).all()


@pytest.mark.gpu
def test_histories_alone_count_what_they_skip(card: Any) -> None:
    rounds = Rounds(card, 4, 3, 1, 2, 64)
    pool = rounds.pool()
    log, signal = rounds.verify_first(pool), Signal(like=pool.rec)
    gated_delta.fold(pool, log, card.array(np.array([[0, 9, 1], [1, 1, 4], [2, 3, 1], [3, 3, 2]])), states=False, signal=signal)
    assert signal.counts() == {"out_of_range": 2, "occupied": 2}
    assert np.array_equal(host(card, pool.conv), rounds.histories)


@pytest.mark.usefixtures("direct_kernel")
@pytest.mark.gpu
@pytest.mark.parametrize(("items", "tokens"), [(1, 1), (1, 4), (3, 4), (20, 4)])
@pytest.mark.parametrize("op", ["direct", "record", "fold_record", "conv_record", "conv_fold_record"])
def test_what_is_settled_may_be_read_while_the_kernel_in_front_runs(op: str, items: int, tokens: int) -> None:
    """A chain of layers, each of which reads what the one before it put out, so that overlapping too far would show."""
    import torch

    import gpukit
    from gpukit.graphs import capture
    from gpukit.measure.timing import own_stream

    gpukit.warmup(subjects=["gated_delta"])
    key_heads, heads, dim, layers = 2, 4, 128, 6
    channels = (2 * key_heads + heads) * dim
    rng = np.random.default_rng(items)

    def on_device(array: np.ndarray) -> Any:
        tensor = torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array).cuda()
        return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor

    x = on_device(random_bits(rng, items, tokens, channels))
    weight = on_device(random_bits(rng, channels, 4))
    gates = {name: on_device(rng.random((items, tokens, heads), np.float32)) for name in ("g", "beta")}
    gates["g"].neg_()
    states, histories = states_of((layers, items, heads, dim, dim)), random_bits(rng, layers, items, 3, channels)
    slots, accepted = torch.arange(items, device="cuda"), torch.arange(items, device="cuda") % (tokens + 1)
    seen = []
    for settled in (False, True):
        pool = StatePool(on_device(states), on_device(histories))
        logs = [ReplayLog.allocate(layers, items, tokens, key_heads, heads, dim, channels=channels, like=slots) for _ in range(2)]
        inner = on_device(random_bits(np.random.default_rng(5), layers * items * tokens * key_heads * dim))
        logs[0].k.view(torch.int16).copy_(inner.view(torch.int16).view(logs[0].k.shape))
        logs[0].v.view(torch.int16).zero_()
        logs[0].gates.fill_(-0.5)
        for name in ("k", "v", "gates", "conv"):
            getattr(logs[1], name).view(torch.uint8).zero_()
        outs = [torch.zeros(items, tokens, heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
        inputs = [x.clone() for _ in range(layers)]
        if "conv" in op and items == tokens == 1:
            # The values among the next layer's columns are this one's outputs, with no copy in between.
            outs[:-1] = [columns[..., 2 * key_heads * dim :].view(1, 1, heads, dim) for columns in inputs[1:]]
        torch.cuda.synchronize()

        def chain(settled: bool = settled, pool: StatePool = pool, logs: Any = logs, outs: Any = outs, inputs: Any = inputs) -> None:
            for layer in range(layers):
                common = {**gates, "pool": pool, "slots": slots, "layer": layer, "out": outs[layer], "settled": settled}
                folded = {"previous": logs[0], "accepted": accepted} if "fold" in op else {}
                logged = {} if op == "direct" else {"log": logs[1]}
                # The next layer's values are this one's outputs.
                columns = inputs[layer]
                if layer and "conv" in op and items * tokens > 1:
                    columns.unflatten(-1, (-1, dim))[:, :, 2 * key_heads :] = outs[layer - 1]
                if "conv" in op:
                    getattr(gated_delta, op)(columns, weight, **common, **folded, **logged)
                else:
                    q, k, v = columns.unflatten(-1, (-1, dim)).split((key_heads, key_heads, heads), dim=2)
                    v = outs[layer - 1] if layer else v
                    getattr(gated_delta, op)(q, k, v, **common, **folded, **logged)

        with own_stream() as stream:
            with overlapping(settled), capture(stream) as graph:
                chain()
            for _ in range(5):
                graph.launch()
            torch.cuda.synchronize()
            graph.close()
        left = [*outs, *(getattr(logs[1], name) for name in ("k", "v", "gates", "conv") if op != "direct")]
        seen.append([pool.rec.cpu().numpy(), *(array.view(torch.uint8).cpu().numpy() for array in left)])
    for plain, other in zip(*seen, strict=True):
        assert np.array_equal(plain, other)


@pytest.mark.gpu
@pytest.mark.parametrize("items", [1, 5])
def test_a_settled_fold_runs_beside_the_op_in_front(items: int) -> None:
    """Two pools take turns: each is folded while the other is verified, and verified again right behind the fold of its own. What is folded is said
    anew each time, an op before the one beside which it is read."""
    import torch

    import gpukit
    from gpukit.graphs import capture
    from gpukit.measure.timing import own_stream

    gpukit.warmup(subjects=["gated_delta"])
    layers, tokens, key_heads, heads, dim, channels = 3, 4, 2, 4, 128, 1024
    rng = np.random.default_rng(items)
    like = torch.empty(1, device="cuda")
    batch = tokens_of(items, tokens, key_heads, heads, dim)
    tensors = {name: torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array).cuda() for name, array in batch.items()}
    inputs = {name: tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor for name, tensor in tensors.items()}
    states, histories = states_of((layers, items, heads, dim, dim)), random_bits(rng, layers, items, 3, channels)
    columns = random_bits(rng, layers, items, tokens, channels)
    slots = torch.arange(items, device="cuda")
    said = [torch.stack((slots, slots, (slots + turn) % (tokens + 1)), 1).contiguous() for turn in range(6)]
    rows = said[0].clone()
    seen = []
    for settled in (False, True):
        pools = [StatePool(torch.from_numpy(states).cuda(), torch.from_numpy(histories.view(np.int16)).cuda().view(torch.bfloat16)) for _ in range(2)]
        logs = [ReplayLog.allocate(layers, items, tokens, key_heads, heads, dim, channels=channels, like=like) for _ in range(2)]
        for log in logs:
            log.conv.view(torch.int16).copy_(torch.from_numpy(columns.view(np.int16)))
        outs = [[torch.zeros(items, tokens, heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(layers)] for _ in range(2)]
        torch.cuda.synchronize()

        def verify(which: int, pools: Any = pools, logs: Any = logs, outs: Any = outs) -> None:
            for layer in range(layers):
                gated_delta.record(**inputs, pool=pools[which], slots=slots, log=logs[which], layer=layer, out=outs[which][layer])

        with own_stream() as stream:
            with overlapping(settled), capture(stream) as graph:
                verify(0)
                for turn in range(6):
                    rows.copy_(said[turn])
                    verify(1 - turn % 2)
                    gated_delta.fold(pools[turn % 2], logs[turn % 2], rows, settled=settled)
            for _ in range(5):
                graph.launch()
            torch.cuda.synchronize()
            graph.close()
        seen.append([array.view(torch.uint8).cpu().numpy() for pool in pools for array in (pool.rec, pool.conv)])
        seen[-1] += [out.view(torch.uint8).cpu().numpy() for of_pool in outs for out in of_pool]
    for plain, other in zip(*seen, strict=True):
        assert np.array_equal(plain, other)
