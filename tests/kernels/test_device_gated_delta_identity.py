"""Ways to the same bits: token by token, with snapshots, verified exactly, kept as bfloat16, fetched ahead, overlapping in a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpukit import Signal
from gpukit.kernels import gated_delta
from gpukit.kernels.state_pool import StatePool
from gpukit.launch import overlapping
from tests.helpers.bf16 import bits, numbers
from tests.helpers.gated_delta import oracle, states_of, tokens_of
from tests.helpers.gated_delta_device import host, make_log, make_pool, output_of, put

pytestmark = pytest.mark.gpu

GEOMETRIES = ((2, 4, 64), (1, 2, 128), (1, 3, 128))


def direct_one_by_one(card: Any, before: np.ndarray, batch: dict[str, np.ndarray], slots: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """States after 0, 1, 2 … tokens, each token a call of its own, and the outputs."""
    pool = make_pool(card, before, "layer")
    states, outputs = [host(card, pool.rec)], []
    for t in range(batch["q"].shape[1]):
        token = {name: np.ascontiguousarray(array[:, t : t + 1]) for name, array in batch.items()}
        out = output_of(card, token)
        gated_delta.direct(**put(card, token), pool=pool, slots=card.array(slots), layer=0, out=out)
        states.append(host(card, pool.rec))
        outputs.append(host(card, out))
    return states, np.concatenate(outputs, axis=1)


def states_as(dtype: str, *shape: int) -> np.ndarray:
    values = states_of(shape)
    return values if dtype == "float32" else bits(values)


@pytest.mark.usefixtures("direct_kernel")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 4, 5, 9])
@pytest.mark.parametrize(("key_heads", "heads", "dim"), GEOMETRIES)
def test_all_ways_past_the_tokens_are_the_same(card: Any, key_heads: int, heads: int, dim: int, tokens: int, dtype: str) -> None:
    batch, slots = tokens_of(2, tokens, key_heads, heads, dim, seed=3), np.array([4, 1])
    before = states_as(dtype, 1, 2 * tokens + 6, heads, dim, dim)
    states, outputs = direct_one_by_one(card, before, batch, slots)
    ids, there = card.array(slots), put(card, batch)

    pool, out = make_pool(card, before, "layer"), output_of(card, batch)
    gated_delta.direct(**there, pool=pool, slots=ids, layer=0, out=out)
    assert np.array_equal(host(card, pool.rec), states[-1]) and np.array_equal(host(card, out), outputs)

    pool, out, log = make_pool(card, before, "slot"), output_of(card, batch), make_log(card, 1, 2, tokens, key_heads, heads, dim)
    gated_delta.record(**there, pool=pool, slots=ids, log=log, layer=0, out=out, exact=True)
    assert np.array_equal(host(card, pool.rec), before) and np.array_equal(host(card, out), outputs)
    for name in ("k", "v"):
        assert np.array_equal(host(card, getattr(log, name))[0], batch[name]), name
    assert np.array_equal(host(card, log.gates)[0], np.stack((batch["g"], batch["beta"]), axis=-1))
    for m in range(tokens + 1):
        for settled in (False, True):
            committed = make_pool(card, before, "page")
            gated_delta.fold(committed, log, card.array(np.stack((slots, slots, [m, tokens - m]), axis=1)), settled=settled)
            found = host(card, committed.rec)
            assert np.array_equal(found[0, 4], states[m][0, 4]) and np.array_equal(found[0, 1], states[tokens - m][0, 1]), settled
        for exact in (False, True):
            committed, again = make_pool(card, before, "layer"), make_log(card, 1, 2, tokens, key_heads, heads, dim)
            counts = card.array(np.array([m, tokens - m], np.int32))
            gated_delta.fold_record(
                **there, pool=committed, slots=ids, previous=log, accepted=counts, log=again, layer=0, out=output_of(card, batch), exact=exact
            )
            assert np.array_equal(host(card, committed.rec), found), (m, exact)

    pool, out = make_pool(card, before, "layer"), output_of(card, batch)
    kept = np.concatenate((np.arange(5, 5 + tokens), np.arange(5 + tokens, 5 + 2 * tokens))).reshape(2, tokens)
    kept[1, 0] = -1
    gated_delta.snapshot(**there, pool=pool, slots=ids, snapshot_slots=card.array(kept), layer=0, out=out)
    expected = before.copy()
    for item, slot in enumerate(slots):
        for t in range(tokens):
            if kept[item, t] >= 0:
                expected[0, kept[item, t]] = states[t + 1][0, slot]
    assert np.array_equal(host(card, pool.rec), expected) and np.array_equal(host(card, out), outputs)


def test_a_snapshot_that_others_need_is_refused(card: Any) -> None:
    before, batch = states_of((1, 6, 2, 64, 64)), tokens_of(4, 2, 1, 2, 64)
    pool, out = make_pool(card, before, "layer"), output_of(card, batch)
    signal = Signal(like=pool.rec)
    slots, kept = np.array([0, 1, 2, -1]), np.array([[3, 1], [4, 6], [5, 3], [5, 5]])
    gated_delta.snapshot(**put(card, batch), pool=pool, slots=card.array(slots), snapshot_slots=card.array(kept), layer=0, out=out, signal=signal)
    # The first and the third would write one slot; the second is out of range; a padded row neither writes nor stands in the way.
    assert signal.counts() == {"out_of_range": 1, "occupied": 2}
    assert np.array_equal(host(card, pool.rec), before) and not host(card, out).any()


@pytest.mark.usefixtures("direct_kernel")
@pytest.mark.parametrize(("key_heads", "heads", "dim"), GEOMETRIES)
def test_states_in_bfloat16_are_as_good_as_their_digits(card: Any, key_heads: int, heads: int, dim: int) -> None:
    tokens = 32
    batch, slots = tokens_of(1, tokens, key_heads, heads, dim), np.array([1])
    before = bits(states_of((1, 2, heads, dim, dim)))
    pool, out = make_pool(card, before, "layer"), output_of(card, batch)
    gated_delta.direct(**put(card, batch), pool=pool, slots=card.array(slots), layer=0, out=out)
    outputs, state = oracle(batch, numbers(before)[0, 1].astype(np.float32), 0, tokens, dim**-0.5)
    found = numbers(host(card, pool.rec))[0, 1]
    # Half a unit of the eighth bit a token, and the decay forgets the older ones.
    assert np.linalg.norm(found - state) <= 8e-3 * np.linalg.norm(state)
    assert np.linalg.norm(numbers(host(card, out))[0] - outputs) <= 1.6e-2 * np.linalg.norm(outputs)


@pytest.mark.usefixtures("direct_kernel")
@pytest.mark.parametrize("items", [1, 3])
def test_fetching_ahead_and_overlapping_change_nothing(items: int) -> None:
    import torch

    import gpukit
    from gpukit.graphs import capture
    from gpukit.measure.timing import own_stream

    gpukit.warmup(subjects=["gated_delta"])
    tokens, key_heads, heads, dim, layers = 4, 1, 2, 128, 4
    batch = tokens_of(items, tokens, key_heads, heads, dim)
    before = states_of((layers, items, heads, dim, dim))

    def on_device(array: np.ndarray) -> Any:
        tensor = torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array).cuda()
        return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor

    inputs, slots = {name: on_device(array) for name, array in batch.items()}, torch.arange(items, device="cuda")
    seen = []
    for ahead, settled in ((False, False), (True, False), (True, True)):
        pool = StatePool(on_device(before))
        outs = [torch.zeros(items, tokens, heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
        torch.cuda.synchronize()
        with own_stream() as stream:
            with overlapping(ahead), capture(stream) as graph:
                for layer in range(layers):
                    # Each layer reads what the one before put out, so that overlapping too far would show.
                    values = {**inputs, "v": outs[layer - 1]} if layer else inputs
                    following = (layer + 1) % layers if ahead else None
                    gated_delta.direct(**values, pool=pool, slots=slots, layer=layer, out=outs[layer], prefetch_layer=following, settled=settled)
            for _ in range(5):
                graph.launch()
        torch.cuda.synchronize()
        seen.append([pool.rec.cpu().numpy(), *(out.view(torch.int16).cpu().numpy() for out in outs)])
        graph.close()
    for plain, *others in zip(*seen, strict=True):
        assert all(np.array_equal(plain, other) for other in others)
