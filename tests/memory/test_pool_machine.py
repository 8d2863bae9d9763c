"""Random operations on the pool against a dictionary model: two- and three-band chains, page sizes 1, 4 and 64, gates flipping, events firing.

A rule is one operation with its numbers, which shrinks well, or a burst of operations from a seed, which is cheap enough for very many of them.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from gpukit.memory import capacity
from tests.helpers.pool_machine import PoolMachine

CHAINS = [(bands, page_size) for bands in (2, 3) for page_size in (1, 4, 64)]
OPERATIONS = 200_000
BURST = 250
BURSTS = -(-OPERATIONS // (len(CHAINS) * BURST))

numbers = st.integers(0, 1 << 10)
quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


class Rules(RuleBasedStateMachine):
    """Every operation as a rule."""

    chain = (2, 1)

    @initialize(pages=st.integers(4, 60))
    def make(self, pages: int) -> None:
        self.machine: Any = PoolMachine(*self.chain, pages=pages)

    @precondition(lambda self: hasattr(self, "machine"))
    @rule(kind=st.integers(0, 16), a=numbers, b=numbers, c=numbers)
    def operation(self, kind: int, a: int, b: int, c: int) -> None:
        self.machine.step(kind, a, b, c)
        self.machine.check()

    @precondition(lambda self: hasattr(self, "machine"))
    @rule(seed=st.integers(0, 1 << 32), count=st.integers(1, 20))
    def burst(self, seed: int, count: int) -> None:
        self.machine.burst(seed, count)


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: f"{chain[0]} bands, page size {chain[1]}")
def test_rules(chain: tuple[int, int]) -> None:
    machine = type("Rules", (Rules,), {"chain": chain})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=quiet))


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: f"{chain[0]} bands, page size {chain[1]}")
def test_bursts(chain: tuple[int, int]) -> None:
    """Every chain does its share of the operations."""
    done = 0

    @settings(max_examples=BURSTS, deadline=None, suppress_health_check=quiet)
    @given(seed=st.integers(0, 1 << 48), pages=st.integers(4, 60))
    def bursts(seed: int, pages: int) -> None:
        nonlocal done
        machine = PoolMachine(*chain, pages=pages)
        machine.burst(seed, BURST)
        done += machine.operations

    bursts()
    assert done * len(CHAINS) >= OPERATIONS


def test_a_wrong_capacity_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine can fail: a capacity of one too many, and a burst that notices."""
    right = capacity.Chain._most
    monkeypatch.setattr(capacity.Chain, "_most", lambda chain, wanted, *, moves: right(chain, wanted, moves=moves) + 1)
    with pytest.raises(AssertionError):
        PoolMachine(2, 4).burst(0, 50)


def test_a_compaction_that_forgets_bytes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpukit.kernels import page_copy

    monkeypatch.setattr(page_copy, "move_pages", lambda *args, **kwargs: None)
    with pytest.raises(AssertionError):
        PoolMachine(3, 4).burst(0, 150)
