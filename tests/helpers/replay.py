"""Eager, prepared and captured calls of one op on a GPU, which must leave the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Arguments = Callable[[dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def twice_three_ways(card: Any, subject: str, op: Any, arrays: dict[str, np.ndarray], arguments: Arguments) -> list[dict[str, np.ndarray]]:
    """Run an op twice eagerly, twice prepared and twice from a graph, each on fresh device arrays; what the arrays hold after each way."""
    import cupy

    import gpukit

    gpukit.warmup(subjects=[subject])
    eager, prepared, captured = ({key: card.array(array) for key, array in arrays.items()} for _ in range(3))
    args, kwargs = arguments(eager)
    op(*args, **kwargs)
    op(*args, **kwargs)
    args, kwargs = arguments(prepared)
    call = op.prepare(*args, **kwargs)
    call()
    call()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    args, kwargs = arguments(captured)
    stream.begin_capture()
    op(*args, **kwargs, stream=stream)
    graph = stream.end_capture()
    graph.launch(stream)
    graph.launch(stream)
    stream.synchronize()
    cupy.cuda.Device().synchronize()
    return [{key: card.host(array) for key, array in own.items()} for own in (eager, prepared, captured)]


def require_same(ways: list[dict[str, np.ndarray]]) -> None:
    """Fail unless all ways left the same bytes."""
    for own in ways[1:]:
        for key, array in own.items():
            assert np.array_equal(array.view(np.uint8), ways[0][key].view(np.uint8)), key
