"""The list of small calls is complete, and each of them runs on NumPy and, prepared, twice with the same results."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from gpukit import kernels
from tests.helpers.every_op import every_op


def test_every_public_op_is_in_the_list() -> None:
    listed = {case.name for case in every_op()}
    modules = [value for value in vars(kernels).values() if isinstance(value, types.ModuleType) and value.__name__.startswith("gpukit.kernels.")]
    public = {name for module in modules for name in getattr(module, "__all__", ()) if hasattr(getattr(module, name), "prepare")}
    assert public == listed


@pytest.mark.parametrize("case", every_op(), ids=lambda case: case.name)
def test_prepared_calls_equal_eager_ones_on_numpy(case: Any) -> None:
    eager, prepared = case.make(np.copy), case.make(np.copy)
    case.run(eager)
    case.run(eager)
    call = case.prepare(prepared)
    call()
    call()
    changed = False
    for name, array in case.arrays(eager).items():
        np.testing.assert_array_equal(case.arrays(prepared)[name], array, err_msg=name)
        changed |= name in case.values and not np.array_equal(array, case.values[name])
    assert changed, "the case changes nothing, so it proves nothing"
