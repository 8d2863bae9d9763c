"""What every op costs the host, eager with `out` given and prepared, on torch tensors. Wall clock; the floor is in test_launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from perf.conftest import GPU
from tests.helpers.every_op import OpCase, every_op


def make(values: np.ndarray) -> Any:
    """A torch tensor on the device; NumPy where there is no GPU."""
    if not GPU:
        return values.copy()
    import torch

    return torch.from_numpy(values.copy()).cuda()


@pytest.mark.parametrize("case", every_op(), ids=lambda case: case.name)
def test_eager(host_benchmark: Callable[..., None], case: OpCase) -> None:
    """A checked call."""
    args, kwargs = case.call(case.make(make))
    host_benchmark(lambda: case.op(*args, **kwargs), host_only=True)


@pytest.mark.parametrize("case", every_op(), ids=lambda case: case.name)
def test_prepared(host_benchmark: Callable[..., None], case: OpCase) -> None:
    """A prepared call."""
    host_benchmark(case.prepare(case.make(make)), host_only=True)
