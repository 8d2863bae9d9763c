"""Reservations against a driver double that counts, refuses and grants less: the limit is the largest live request, or what it was before."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gpukit.errors import ArgumentError, DeviceError
from gpukit.graphs import Limits, Reservation, break_even_us
from tests.helpers.graphs import MIB, FakeLimits

DEFAULT = 11_796_480
BELOW, ABOVE, MORE = 8 * MIB, 24 * MIB, 32 * MIB


@pytest.fixture
def driver() -> FakeLimits:
    return FakeLimits()


@pytest.fixture
def limits(driver: FakeLimits) -> Limits:
    return Limits(driver)


@pytest.mark.parametrize("wanted", [1, BELOW, DEFAULT, ABOVE, 39_321_600])
def test_a_request_is_the_limit_until_it_is_released(driver: FakeLimits, limits: Limits, wanted: int) -> None:
    reservation = Reservation(wanted, limits=limits)
    assert driver.limits == [wanted] and reservation.size == reservation.granted == wanted
    reservation.release()
    assert driver.limits == [DEFAULT] and reservation.size is None and reservation.granted is None
    reservation.request(wanted)
    assert driver.limits == [wanted]
    reservation.close()
    reservation.close()
    assert driver.limits == [DEFAULT]


@pytest.mark.parametrize("sizes", [(BELOW, ABOVE), (ABOVE, BELOW), (BELOW, 4 * MIB), (MORE, ABOVE)], ids=str)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_the_largest_live_request_counts(driver: FakeLimits, limits: Limits, sizes: tuple[int, int], order: tuple[int, int]) -> None:
    handles = [Reservation(size, limits=limits) for size in sizes]
    assert driver.limits == [max(sizes)] and limits.requests(0) == tuple(sorted(sizes))
    handles[order[0]].release()
    assert driver.limits == [sizes[order[1]]]
    handles[order[1]].release()
    assert driver.limits == [DEFAULT]


@pytest.mark.parametrize("wanted", [BELOW, ABOVE])
def test_equal_twins_are_two(driver: FakeLimits, limits: Limits, wanted: int) -> None:
    one, other = Reservation(wanted, limits=limits), Reservation(wanted, limits=limits)
    one.release()
    assert driver.limits == [wanted]
    one.release()
    assert driver.limits == [wanted]
    other.release()
    assert driver.limits == [DEFAULT]


def test_blocks_nest(driver: FakeLimits, limits: Limits) -> None:
    with Reservation(BELOW, limits=limits):
        with Reservation(MORE, limits=limits):
            with Reservation(ABOVE, limits=limits):
                assert driver.limits == [MORE]
            assert driver.limits == [MORE]
        assert driver.limits == [BELOW]
    assert driver.limits == [DEFAULT]
    with pytest.raises(KeyError), Reservation(ABOVE, limits=limits):
        raise KeyError
    assert driver.limits == [DEFAULT]


def test_a_thousand_cycles_do_not_drift(driver: FakeLimits, limits: Limits) -> None:
    handle = Reservation(limits=limits)
    for cycle in range(1000):
        handle.request((BELOW, ABOVE)[cycle % 2])
        with Reservation(MORE, limits=limits), handle.suspended():
            assert driver.limits == [MORE]
        handle.release()
        assert driver.limits == [DEFAULT]
    # The baseline is whatever the owner of the process makes of it in between.
    driver.limits[0] = 5 * MIB
    handle.request(ABOVE)
    handle.close()
    assert driver.limits == [5 * MIB]


@pytest.mark.parametrize("wanted", [0, -1])
def test_no_bytes_are_no_request_and_no_release(driver: FakeLimits, limits: Limits, wanted: int) -> None:
    with pytest.raises(ArgumentError, match=f"size: expected at least 1 byte, got {wanted}"):
        Reservation(wanted, limits=limits)
    assert not driver.writes and driver.reads == 0
    handle = Reservation(ABOVE, limits=limits)
    with pytest.raises(ArgumentError, match="size: expected at least 1 byte"):
        handle.request(wanted)
    assert driver.limits == [ABOVE] and handle.size == ABOVE
    for wrong in (True, 1.5, "8"):
        with pytest.raises(TypeError, match="size: expected an integer"):
            handle.request(wrong)  # type: ignore[arg-type]


def test_a_moved_request_is_not_released_by_its_old_handle(driver: FakeLimits, limits: Limits) -> None:
    old = Reservation(ABOVE, limits=limits)
    calls = len(driver.writes)
    new = old.move()
    assert len(driver.writes) == calls and new.size == ABOVE and old.size is None
    old.close()
    with pytest.raises(ArgumentError, match="expected an open one, got one that is moved"):
        old.request(BELOW)
    del old
    gc.collect()
    assert driver.limits == [ABOVE]
    new.close()
    assert driver.limits == [DEFAULT]


@pytest.mark.parametrize(("first", "second"), [(BELOW, ABOVE), (ABOVE, BELOW), (ABOVE, MORE), (ABOVE, ABOVE)])
def test_a_live_handle_takes_the_new_request_before_it_loses_the_old(driver: FakeLimits, limits: Limits, first: int, second: int) -> None:
    handle = Reservation(first, limits=limits)
    driver.writes.clear()
    handle.request(second)
    # At no moment was there a third limit.
    assert driver.limits == [second] and {size for _, size in driver.writes} <= {second} and limits.requests(0) == (second,)
    handle.close()
    assert driver.limits == [DEFAULT]


@pytest.mark.parametrize("first", [BELOW, ABOVE])
def test_a_refused_request_leaves_the_old_one(driver: FakeLimits, limits: Limits, first: int) -> None:
    handle = Reservation(first, limits=limits)
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE"):
        handle.request(driver.most + 1)
    assert driver.limits == [first] and handle.size == handle.granted == first and limits.requests(0) == (first,)
    other = Reservation(limits=limits)
    with pytest.raises(DeviceError):
        other.request(driver.most + 1)
    assert other.size is None and limits.requests(0) == (first,)
    other.close()
    assert driver.limits == [first]
    handle.close()
    assert driver.limits == [DEFAULT]


def test_a_refused_first_request_leaves_nothing(driver: FakeLimits, limits: Limits) -> None:
    handle = Reservation(limits=limits)
    with pytest.raises(DeviceError):
        handle.request(driver.most + 1)
    assert driver.limits == [DEFAULT] and limits.requests(0) == () and handle.size is None
    # A baseline that it had left behind would be restored now.
    driver.limits[0] = 5 * MIB
    handle.request(ABOVE)
    handle.release()
    assert driver.limits == [5 * MIB]
    with pytest.raises(DeviceError):
        Reservation(driver.most + 1, limits=limits)
    assert driver.limits == [5 * MIB]


@pytest.mark.parametrize("what", ["switch", "read"])
def test_a_first_request_that_cannot_even_look_leaves_nothing(driver: FakeLimits, limits: Limits, what: str) -> None:
    driver.refuse = {what}
    with pytest.raises(DeviceError, match=f"{what} was refused"):
        Reservation(ABOVE, limits=limits)
    assert not driver.writes and limits.requests(0) == ()
    driver.refuse.clear()
    Reservation(ABOVE, limits=limits).close()
    assert driver.limits == [DEFAULT]


def test_after_a_failed_switch_nothing_is_written_to_the_current_device() -> None:
    driver = FakeLimits((DEFAULT, 6 * MIB))
    limits = Limits(driver)
    driver.current = 0
    handle = Reservation(BELOW, 1, limits=limits)
    driver.writes.clear()
    driver.refuse = {"switch"}
    for call in (lambda: handle.request(ABOVE), lambda: Reservation(ABOVE, 0, limits=limits), handle.release):
        with pytest.raises(DeviceError, match="switch was refused"):
            call()
    assert not driver.writes and driver.limits == [DEFAULT, BELOW]
    driver.refuse.clear()
    handle.request(ABOVE)
    handle.close()
    assert driver.limits == [DEFAULT, 6 * MIB]


def test_a_failed_restore_keeps_the_baseline_and_is_reported(driver: FakeLimits, limits: Limits) -> None:
    handle = Reservation(ABOVE, limits=limits)
    driver.refuse = {"write"}
    with pytest.raises(DeviceError, match="write was refused"):
        handle.release()
    assert handle.size is None and limits.requests(0) == () and driver.limits == [ABOVE]
    # A request that fails now recorded no baseline, so it must not take the kept one back.
    with pytest.raises(DeviceError):
        handle.request(MORE)
    driver.refuse.clear()
    handle.request(BELOW)
    assert driver.limits == [BELOW]
    handle.release()
    assert driver.limits == [DEFAULT]


def test_a_failed_restore_can_be_tried_again(driver: FakeLimits, limits: Limits) -> None:
    handle = Reservation(ABOVE, limits=limits)
    driver.refuse = {"write"}
    with pytest.raises(DeviceError):
        handle.close()
    driver.refuse.clear()
    Reservation(limits=limits).release()
    assert driver.limits == [DEFAULT]
    handle = Reservation(ABOVE, limits=limits)
    driver.refuse = {"write"}
    with pytest.raises(DeviceError):
        handle.close()
    driver.refuse.clear()
    limits.restore_all()
    assert driver.limits == [DEFAULT]


def test_a_failed_lowering_is_made_up_for(driver: FakeLimits, limits: Limits) -> None:
    low, high = Reservation(BELOW, limits=limits), Reservation(ABOVE, limits=limits)
    driver.refuse = {"write"}
    with pytest.raises(DeviceError):
        high.close()
    assert driver.limits == [ABOVE] and limits.requests(0) == (BELOW,)
    driver.refuse.clear()
    low.request(BELOW)
    assert driver.limits == [BELOW]
    low.close()
    assert driver.limits == [DEFAULT]


def test_a_grant_that_differs_is_reported() -> None:
    driver = FakeLimits((8 * MIB,), unit=MIB)
    limits = Limits(driver)
    with pytest.warns(RuntimeWarning, match=f"device 0 was asked for {BELOW + 5} bytes of persisting L2 and granted {BELOW}"):
        handle = Reservation(BELOW + 5, limits=limits)
    assert (handle.size, handle.granted) == (BELOW + 5, BELOW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # As an exception the report changes nothing about the books.
        with pytest.raises(RuntimeWarning):
            handle.request(ABOVE + 5)
        assert handle.size == ABOVE + 5 and limits.requests(0) == (ABOVE + 5,)
        handle.close()
    assert driver.limits == [8 * MIB]


def test_a_grant_that_cannot_be_read_is_reported(driver: FakeLimits, limits: Limits) -> None:
    handle = Reservation(BELOW, limits=limits)
    driver.refuse = {"read"}
    with pytest.warns(RuntimeWarning, match="was set to 25165824 bytes, but could not be read back: read was refused"):
        handle.request(ABOVE)
    assert handle.granted is None and driver.limits == [ABOVE]
    driver.refuse.clear()
    handle.close()
    assert driver.limits == [DEFAULT]


def test_suspended_leaves_one_request_out(driver: FakeLimits, limits: Limits) -> None:
    handle = Reservation(ABOVE, limits=limits)
    with handle.suspended():
        assert driver.limits == [DEFAULT]
        with handle.suspended():
            assert driver.limits == [DEFAULT]
        assert driver.limits == [DEFAULT]
        with Reservation(BELOW, limits=limits):
            assert driver.limits == [BELOW]
        with pytest.raises(ArgumentError, match="expected one that is not suspended"):
            handle.request(MORE)
        with pytest.raises(ArgumentError, match="expected one that is not suspended"):
            handle.move()
    assert driver.limits == [ABOVE]
    with pytest.raises(KeyError), handle.suspended():
        raise KeyError
    assert driver.limits == [ABOVE]
    with handle.suspended():
        handle.release()
        assert driver.limits == [DEFAULT]
    assert driver.limits == [DEFAULT]
    handle.request(ABOVE)
    with handle.suspended():
        handle.close()
    assert driver.limits == [DEFAULT] and limits.requests(0) == ()


def test_a_suspension_that_fails_is_none(driver: FakeLimits, limits: Limits) -> None:
    handle = Reservation(ABOVE, limits=limits)
    driver.refuse = {"write"}
    with pytest.raises(DeviceError), handle.suspended():
        raise AssertionError("not reached")
    driver.refuse.clear()
    handle.request(MORE)
    assert driver.limits == [MORE]
    with pytest.raises(DeviceError), handle.suspended():
        driver.refuse = {"write"}
    driver.refuse.clear()
    assert handle.size == MORE and driver.limits == [DEFAULT]
    handle.request(MORE)
    assert driver.limits == [MORE]


def test_a_closed_handle_refuses_everything(driver: FakeLimits, limits: Limits) -> None:
    handle = Reservation(ABOVE, limits=limits)
    handle.close()
    driver.writes.clear()
    for call in (lambda: handle.request(BELOW), handle.release, handle.move, handle.__enter__, lambda: handle.suspended().__enter__()):
        with pytest.raises(ArgumentError, match="expected an open one, got one that is closed"):
            call()
    assert not driver.writes and "closed" in repr(handle)
    moved = Reservation(ABOVE, limits=limits)
    with moved.move(), pytest.raises(ArgumentError, match="expected an open one, got one that is moved"), moved:
        raise AssertionError("not reached")


def test_arguments_are_checked_before_the_device_is_touched(driver: FakeLimits, limits: Limits) -> None:
    for device, message in ((-1, "expected at least 0, got -1"), (True, "expected an integer, got bool"), ("0", "expected an integer, got str")):
        with pytest.raises(ArgumentError, match=f"device: {message}"):
            Reservation(ABOVE, device, limits=limits)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="limits: expected a Limits or None, got FakeLimits"):
        Reservation(ABOVE, limits=driver)  # type: ignore[arg-type]
    assert not driver.writes and driver.reads == 0
    with Reservation(np.int64(ABOVE), np.int32(0), limits=limits) as handle:  # type: ignore[arg-type]
        assert driver.limits == [ABOVE] and type(handle.size) is int and type(handle.device) is int
        handle.request(np.uint32(BELOW))  # type: ignore[arg-type]
        assert limits.requests(0) == (BELOW,)
    for cost, tax, name in (("30", 0.1, "cost_us"), (float("nan"), 0.1, "cost_us"), (-1, 0.1, "cost_us"), (30, 0, "tax"), (30, None, "tax")):
        with pytest.raises(ArgumentError, match=f"^{name}: expected a"):
            break_even_us(cost, tax)  # type: ignore[arg-type]


def test_two_devices_have_two_books() -> None:
    driver = FakeLimits((DEFAULT, 6 * MIB))
    limits = Limits(driver)
    one, two = Reservation(ABOVE, 0, limits=limits), Reservation(BELOW, 1, limits=limits)
    assert driver.limits == [ABOVE, BELOW]
    with one.suspended():
        assert driver.limits == [DEFAULT, BELOW]
    with pytest.raises(DeviceError):
        two.request(driver.most + 1)
    one.close()
    assert driver.limits == [DEFAULT, BELOW]
    two.close()
    assert driver.limits == [DEFAULT, 6 * MIB]


def test_a_collected_handle_is_released(driver: FakeLimits, limits: Limits) -> None:
    kept, lost = Reservation(BELOW, limits=limits), Reservation(ABOVE, limits=limits)
    del lost
    gc.collect()
    assert driver.limits == [BELOW]
    cycle: list[Any] = [Reservation(ABOVE, limits=limits)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert driver.limits == [BELOW]
    kept.close()
    assert driver.limits == [DEFAULT]


def test_a_collection_inside_a_driver_call_does_not_hang(driver: FakeLimits, limits: Limits) -> None:
    lost = [Reservation(MORE, limits=limits)]
    plain = driver.write

    def collecting(size: int) -> None:
        # As if the garbage collector ran here: the same thread holds the lock.
        lost.clear()
        plain(size)

    other = Reservation(BELOW, limits=limits)
    driver.write = collecting  # type: ignore[method-assign]
    other.request(39 * 1_000_000)
    assert limits.requests(0) == (39 * 1_000_000,)
    other.close()
    assert driver.limits == [DEFAULT]


def test_what_fails_in_a_collection_is_said(driver: FakeLimits, limits: Limits, capfd: pytest.CaptureFixture[str]) -> None:
    handle = Reservation(ABOVE, limits=limits)
    driver.refuse = {"write"}
    del handle
    gc.collect()
    assert "a reservation was not given back as it should: write was refused" in capfd.readouterr().err
    driver.refuse.clear()
    Reservation(BELOW, limits=limits).close()
    assert driver.limits == [DEFAULT]


def test_eight_threads_share_a_handle(driver: FakeLimits, limits: Limits) -> None:
    handle, failures = Reservation(limits=limits), []

    def work(worker: int) -> None:
        try:
            for _ in range(20_000):
                handle.request(MIB * (1 + worker))
                handle.release()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and not driver.overlapped
    assert driver.limits == [DEFAULT] and limits.requests(0) == () and handle.size is None


def test_threads_with_handles_of_their_own() -> None:
    driver = FakeLimits((DEFAULT, 6 * MIB))
    driver.slow = True
    limits, failures = Limits(driver), []

    def work(worker: int) -> None:
        try:
            for turn in range(100):
                with Reservation(MIB * (1 + worker), worker % 2, limits=limits) as handle:
                    assert driver.limits[worker % 2] >= MIB * (1 + worker)
                    if turn % 3 == 0:
                        with handle.suspended():
                            pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and not driver.overlapped and driver.limits == [DEFAULT, 6 * MIB]


AT_EXIT = """
import atexit
from tests.helpers.graphs import FakeLimits
driver = FakeLimits()
atexit.register(lambda: print(driver.limits))
from gpukit.graphs import Limits, Reservation
{code}
print(driver.limits)
"""


@pytest.mark.parametrize(
    ("code", "inside"),
    [
        ("handle = Reservation(24 << 20, limits=Limits(driver))", 24 << 20),
        ("handle = Reservation(24 << 20, limits=Limits(driver)).move()", 24 << 20),
        ("from gpukit.graphs import reservation; reservation._LIMITS._driver = driver; handle = Reservation(24 << 20)", 24 << 20),
    ],
    ids=["own limits", "moved", "the process's"],
)
def test_what_lives_at_exit_is_released(code: str, inside: int) -> None:
    run = subprocess.run([sys.executable, "-c", AT_EXIT.format(code=code)], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60)
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert run.stdout.split("\n")[:2] == [f"[{inside}]", f"[{DEFAULT}]"]


def test_a_baseline_kept_after_a_failed_restore_is_tried_at_exit() -> None:
    code = """
from gpukit.graphs import reservation; reservation._LIMITS._driver = driver
handle = Reservation(24 << 20); driver.refuse = {"write"}
try: handle.close()
except Exception: pass
driver.refuse = set()
"""
    run = subprocess.run([sys.executable, "-c", AT_EXIT.format(code=code)], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60)
    assert run.stdout.split("\n")[:2] == [f"[{24 << 20}]", f"[{DEFAULT}]"], run.stderr


def test_a_forked_child_owns_nothing() -> None:
    code = """
import os
from gpukit.graphs import reservation; reservation._LIMITS._driver = driver
handle = Reservation(24 << 20)
child = os.fork()
if child == 0:
    handle.close(); assert driver.limits == [24 << 20]; os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    run = subprocess.run([sys.executable, "-c", AT_EXIT.format(code=code)], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:2] == [f"[{24 << 20}]", f"[{DEFAULT}]"]


SIZES = st.sampled_from([1, BELOW, DEFAULT, ABOVE, MORE, 39_321_600, 39_321_601])


class Books(RuleBasedStateMachine):
    """Any order of requests, releases and failures on three handles: the limit is what a plain list of requests says."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = FakeLimits()
        self.handles = [Reservation(limits=Limits(self.driver))]
        self.handles += [Reservation(limits=self.handles[0]._limits) for _ in range(2)]
        self.model: list[int | None] = [None] * 3
        self.settled = True

    @rule(which=st.integers(0, 2), size=SIZES, refuse=st.sampled_from([(), (), ("write",), ("switch",)]))
    def request(self, which: int, size: int, refuse: tuple[str, ...]) -> None:
        self.driver.refuse = set(refuse)
        try:
            self.handles[which].request(size)
        except DeviceError:
            pass
        else:
            self.model[which] = size
            self.settled = True
        self.driver.refuse.clear()

    @rule(which=st.integers(0, 2), refuse=st.sampled_from([(), (), ("write",), ("switch",)]))
    def release(self, which: int, refuse: tuple[str, ...]) -> None:
        self.driver.refuse = set(refuse)
        self.model[which] = None
        try:
            self.handles[which].release()
            self.settled = True
        except DeviceError:
            self.settled = False
        self.driver.refuse.clear()

    @rule(which=st.integers(0, 2))
    def move(self, which: int) -> None:
        self.handles[which] = self.handles[which].move()

    @invariant()
    def the_limit_is_the_largest_request_or_the_default(self) -> None:
        live = [size for size in self.model if size is not None]
        if self.settled:
            assert self.driver.limits == [max(live, default=DEFAULT)]

    def teardown(self) -> None:
        self.driver.refuse.clear()
        for handle in self.handles:
            handle.close()
        assert self.driver.limits == [DEFAULT]


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
