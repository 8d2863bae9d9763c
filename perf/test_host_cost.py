"""What every op costs the host, eager with `out` given and prepared, on torch tensors. Wall clock; the floor is in test_launch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perf.conftest import there
from tests.helpers.every_op import OpCase, every_op


@pytest.mark.parametrize("case", every_op(), ids=lambda case: case.name)
def test_eager(host_benchmark: Callable[..., None], case: OpCase) -> None:
    """A checked call."""
    args, kwargs = case.call(case.make(there))
    host_benchmark(lambda: case.op(*args, **kwargs), host_only=True)


@pytest.mark.parametrize("case", every_op(), ids=lambda case: case.name)
def test_prepared(host_benchmark: Callable[..., None], case: OpCase) -> None:
    """A prepared call."""
    host_benchmark(case.prepare(case.make(there)), host_only=True)
