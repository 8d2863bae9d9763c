"""The small kernels of a speculative round at the vocabularies of today's models; torch's argmax beside ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpukit.kernels import speculative
from perf.conftest import GPU, on_device, there

pytestmark = on_device

# Sequences of a batch, and tokens of a verification of three drafts.
BATCHES = (1, 8)
TOKENS = 4
# Rows of the embedding, padded, and the width of the hidden state; small where there is no GPU.
VOCABULARIES = (151_936, 248_320) if GPU else (512, 768)
WIDTH = 2_048
SETTINGS = {
    "plain": {},
    "top_k": {"top_k": np.int64(50)},
    "top_p": {"top_p": np.float32(0.9)},
    "top_k_top_p": {"top_k": np.int64(20), "top_p": np.float32(0.95)},
}


def logits_of(rows: int, vocabulary: int) -> Any:
    """Logits of bfloat16 whose largest stand out, as a model's do."""
    if not GPU:
        return np.zeros((rows, vocabulary), np.uint16)
    import torch

    return (torch.randn((rows, vocabulary), device="cuda") * 2.5).to(torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 4, 32])
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("implementation", ["gpukit", "torch"])
def test_argmax_columns(device_benchmark: Callable[..., None], implementation: str, layout: str, rows: int) -> None:
    """The greedy choice, of logits that lie along the vocabulary or across it; they have just been written, so they may be in L2."""
    vocabulary = VOCABULARIES[0]
    values = logits_of(rows, vocabulary).T
    if layout == "columns":
        values = values.contiguous() if GPU else np.ascontiguousarray(values)
    moved = 2 * rows * vocabulary
    if implementation == "gpukit":
        out, workspace = there(np.zeros(rows, np.int64)), there(speculative.workspace(rows))
        device_benchmark(lambda: speculative.argmax_columns(values, out=out, workspace=workspace), moved=moved)
        return
    if not GPU:
        pytest.skip("a peer needs a GPU")
    device_benchmark(lambda: values.argmax(dim=0), moved=moved)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_accept_sampled(device_benchmark: Callable[..., None], settings: str, rows: int, vocabulary: int) -> None:
    """A draw for every column of a verification, and the acceptance."""
    logits = logits_of(rows * TOKENS, vocabulary).reshape(rows, TOKENS, vocabulary)
    own = {name: there(np.full(rows, value)) for name, value in SETTINGS[settings].items()}
    own |= {"seeds": there(np.arange(rows)), "temperature": there(np.ones(rows, np.float32))}
    own["workspace"] = there(speculative.workspace(rows * TOKENS))
    ids, lengths, anchors, accepted = (there(np.zeros(shape, np.int64)) for shape in ((rows, TOKENS), rows, rows, rows))
    moved = 2 * rows * TOKENS * vocabulary
    device_benchmark(lambda: speculative.accept_sampled(logits, ids, lengths, anchors, accepted=accepted, **own), moved=moved)


@pytest.mark.parametrize("rows", BATCHES)
def test_prepare_verify(device_benchmark: Callable[..., None], rows: int) -> None:
    """Inputs from drafts."""
    anchors, lengths, drafts = there(np.zeros(rows, np.int64)), there(np.zeros(rows, np.int64)), there(np.zeros((rows, TOKENS - 1), np.int64))
    out = {name: there(np.zeros((rows, TOKENS), np.int64)) for name in ("ids", "positions")}
    device_benchmark(lambda: speculative.prepare_verify(anchors, drafts, lengths, **out))


@pytest.mark.parametrize("rows", BATCHES)
def test_accept_greedy(device_benchmark: Callable[..., None], rows: int) -> None:
    """With the rows of a fold and the new tokens."""
    targets, ids, emitted = (there(np.zeros((rows, TOKENS), np.int64)) for _ in range(3))
    lengths, anchors, accepted = (there(np.zeros(rows, np.int64)) for _ in range(3))
    fold = there(np.zeros((rows, 3), np.int64))
    device_benchmark(lambda: speculative.accept_greedy(targets, ids, lengths, anchors, accepted=accepted, rows=fold, emitted=emitted))


@pytest.mark.parametrize("rows", BATCHES)
def test_select_hidden(device_benchmark: Callable[..., None], rows: int) -> None:
    """Vectors of 2,048."""
    hidden, out = there(np.zeros((rows, TOKENS, WIDTH), np.int16)), there(np.zeros((rows, WIDTH), np.int16))
    accepted = there(np.ones(rows, np.int64))
    device_benchmark(lambda: speculative.select_hidden(hidden, accepted, out=out), moved=4 * rows * WIDTH)
