"""Pools, logs and tokens on a GPU: between guard bytes, in every layout, full of NaN where nothing has been written."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpukit.kernels import gated_delta
from gpukit.kernels.state_pool import ReplayLog, StatePool


def make_pool(card: Any, values: np.ndarray, layout: str, histories: np.ndarray | None = None) -> StatePool:
    """A pool on the device in one of the layouts; in pages, other bytes lie between the states of a slot."""
    if layout == "layer":
        return StatePool(card.array(values), None if histories is None else card.array(histories))
    if layout == "slot":
        rec = card.array(values.swapaxes(0, 1)).swapaxes(0, 1)
        return StatePool(rec, None if histories is None else card.array(histories.swapaxes(0, 1)).swapaxes(0, 1))
    layers, slots, heads, *state = values.shape
    pages = np.full((slots, layers, heads + 1, *state), 7, values.dtype)
    pages[:, :, :heads] = values.swapaxes(0, 1)
    return StatePool(card.array(pages)[:, :, :heads].swapaxes(0, 1), None if histories is None else card.array(histories))


def make_log(card: Any, layers: int, rows: int, width: int, key_heads: int, heads: int, dim: int, columns: np.ndarray | None = None) -> ReplayLog:
    """Full of NaN, so that whatever is read without having been written shows."""
    outer = (layers, rows, width)
    return ReplayLog(
        card.array(np.full((*outer, key_heads, dim), 0x7FC0, np.uint16)),
        card.array(np.full((*outer, heads, dim), 0x7FC0, np.uint16)),
        card.array(np.full((*outer, heads, 2), np.nan, np.float32)),
        None if columns is None else card.array(columns),
    )


def put(card: Any, batch: dict[str, np.ndarray], tokens: int | None = None) -> dict[str, Any]:
    return {name: card.array(array[:, :tokens]) for name, array in batch.items()}


def output_of(card: Any, batch: dict[str, np.ndarray]) -> Any:
    return card.array(np.full(batch["v"].shape, 0x7FC0, np.uint16))


def host(card: Any, array: Any) -> np.ndarray:
    return np.ascontiguousarray(card.host(array))


def run_direct(card: Any, before: np.ndarray, batch: dict[str, np.ndarray], sources: np.ndarray, destinations: np.ndarray, m: int) -> np.ndarray:
    """States after m tokens in every layer, sequence by sequence: what every other way must equal."""
    pool = make_pool(card, before, "layer")
    for layer in range(pool.layers):
        for b in range(len(sources)):
            part = {name: np.ascontiguousarray(array[b : b + 1, :m]) for name, array in batch.items()}
            ids = (card.array(sources[b : b + 1]), card.array(destinations[b : b + 1]))
            gated_delta.direct(**put(card, part), pool=pool, slots=ids[0], destination_slots=ids[1], layer=layer, out=output_of(card, part))
    return host(card, pool.rec)
