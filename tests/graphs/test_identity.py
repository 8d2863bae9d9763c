"""The bit-identity gate: what passes, and every way in which it must not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpukit.errors import ArgumentError
from gpukit.graphs import compare_outputs, digest, identity

PLANS, INPUTS = ["stock", "window", "guarded"], [1, 2, 3]


def test_equal_bits_pass() -> None:
    found = compare_outputs(lambda plan, seed: [np.arange(5.0) * seed, np.array([seed])], PLANS, INPUTS)
    assert found.ok and set(found.digests) == set(PLANS) and len(set(found.digests["stock"].values())) == 3


def test_one_bit_of_one_plan_on_one_input_fails() -> None:
    def run(plan: str, seed: int) -> list[Any]:
        values = np.arange(5.0) * seed
        if (plan, seed) == ("window", 2):
            values.view(np.uint64)[3] ^= 1
        return [values]

    assert compare_outputs(run, PLANS, INPUTS).problems == ("window differs from stock on input 2",)


def test_stock_is_compared_with_itself_before_anything_else() -> None:
    calls = []

    def run(plan: str, seed: int) -> list[Any]:
        calls.append(plan)
        return [np.array([len(calls)])]

    found = compare_outputs(run, PLANS, INPUTS)
    assert found.problems == ("stock differs from itself on input 1, 2, 3",) and set(calls) == {"stock"}


def test_outputs_that_do_not_depend_on_the_input_fail() -> None:
    assert compare_outputs(lambda plan, seed: [np.zeros(2)], PLANS, INPUTS).problems == ("stock: 3 inputs, but 1 different outputs",)


@pytest.mark.parametrize(("plans", "inputs"), [([], INPUTS), (PLANS, [1]), (PLANS, [1, 1]), (PLANS, [])])
def test_a_gate_that_could_not_fail_is_refused(plans: list[str], inputs: list[int]) -> None:
    with pytest.raises(ArgumentError, match="expected at least one plan and two different inputs"):
        compare_outputs(lambda plan, seed: [np.array([seed])], plans, inputs)


@pytest.mark.parametrize(
    ("plans", "inputs", "name"), [("stock", INPUTS, "plans"), (PLANS, "12", "inputs"), (PLANS, 5, "inputs"), ([1], INPUTS, "plans")]
)
def test_a_lone_text_is_no_sequence(plans: Any, inputs: Any, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: expected"):
        compare_outputs(lambda plan, seed: [np.array([seed])], plans, inputs)


def test_a_digest_of_what_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="outputs: expected an array"):
        digest([5])
    monkeypatch.setattr(identity.arrays, "describe", lambda array, name="array": (4096, "complex64", (10,), None, 0, True))
    with pytest.raises(ArgumentError, match="outputs: expected dtype bool, .*, got complex64"):
        digest([object()])


def test_a_digest_is_of_bits_shape_and_dtype() -> None:
    one = np.arange(6, dtype=np.int32)
    others = [one.reshape(2, 3), one.view(np.uint32), one[::-1], one.astype(np.int64), np.array([-0.0]), np.array([0.0])]
    assert len({digest([array]) for array in [one, *others]}) == 7
    assert digest([one[::2]]) == digest([one[::2].copy()]) and digest([one, one]) != digest([one])
