"""The decode step's reference against a plain model, and what must hold over many rounds: no page is lost, refused rounds change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpukit import ArgumentError, ArgumentTypeError, Signal
from gpukit.kernels import page_table
from gpukit.kernels.decode_step import MOST_RETIRED, DecodeState, decode_step
from gpukit.kernels.free_list import DevicePages
from gpukit.kernels.sliding_window import frontier
from tests.helpers.decode_steps import Model, assemble, batch, extremes


def play(made: Any, page_size: int, window: int | None, signal: Signal | None = None) -> None:
    decode_step(made.state, page_size, window, made.full, made.swa, made.virtual_pages, made.full_pages, made.swa_pages, signal=signal)


def held(pages: DevicePages) -> list[int]:
    head, tail = pages.counters.tolist()
    return [int(pages.ring[i % len(pages.ring)]) for i in range(head, tail)]


def assert_equal(made: Any, model: Model) -> None:
    state = made.state
    assert state.lengths.tolist() == model.length and state.retired.tolist() == model.retired
    assert state.pages.tolist() == [len(pages) for pages in model.rows]
    for row, pages in enumerate(model.rows):
        assert state.rows[row, : len(pages)].tolist() == pages
    for (v2p, p2v), pool in ((made.full, model.full), (made.swa, model.swa)):
        assert {v: int(p) for v, p in enumerate(v2p) if p > 0} == pool
        assert {p: int(v) for p, v in enumerate(p2v) if v > 0} == {p: v for v, p in pool.items()}
    for name in ("virtual", "full", "swa"):
        assert held(getattr(made, f"{name}_pages")) == model.free[name]
    assert state.locations.tolist() == model.locations
    assert state.kv_lengths.tolist() == model.kv_lengths
    assert state.full_table.tolist() == model.tables["full"] and state.swa_table.tolist() == model.tables["swa"]
    assert state.status[:2].tolist() == [model.served, model.refused]


@pytest.mark.parametrize("lookahead", [1, 4])
@pytest.mark.parametrize("page_size", [1, 3, 4, 64])
@pytest.mark.parametrize("lanes", [1, 7, 40])
def test_equals_a_plain_model(lanes: int, page_size: int, lookahead: int) -> None:
    rng = np.random.default_rng([lanes, page_size, lookahead])
    for window in (None, 0, 2 * page_size + 1):
        arrays = batch(rng, lanes=lanes, page_size=page_size, lookahead=lookahead, columns=30, spare=40 * lanes // 8 + 20, window=window, width=26)
        model = Model(arrays, page_size, lookahead, window)
        made = assemble(arrays, lookahead)
        signal = Signal()
        for number in range(25):
            most = lookahead if number else 0
            made.state.advance[:] = rng.integers(min(most, 1), most + 1, lanes)
            served = model.play(made.state.requests.tolist(), made.state.advance.tolist())
            play(made, page_size, window, signal)
            assert (made.state.status[1] == model.refused) and (served or signal.counts().get("exhausted"))
            if served:
                assert_equal(made, model)
            else:
                break
        if not served:
            assert_equal(made, model)
        assert set(signal.counts()) <= {"exhausted"}


def test_ten_thousand_rounds_of_drafts_lose_no_page() -> None:
    """Lookahead 4, random acceptance, requests that end and begin: at the end every page is where it was."""
    rng = np.random.default_rng(0)
    lanes, page_size, window, lookahead, size = 8, 4, 20, 4, 400
    full, swa = page_table.empty(size + 1), page_table.empty(size + 1)
    magazines = [DevicePages(size) for _ in range(3)]
    for pages in magazines:
        pages.fill(rng.permutation(size) + 1)
    state = DecodeState.allocate(num_rows=lanes, columns=40, lanes=lanes, lookahead=lookahead)
    state.requests[:] = np.arange(lanes)
    for number in range(10_000):
        state.advance[:] = rng.integers(1, lookahead + 1, lanes) if number else 0
        ending = np.flatnonzero(state.lengths + 2 * lookahead + state.advance > 40 * page_size - 30)
        if len(ending):
            _end(ending, state, full, swa, magazines)
        decode_step(state, page_size, window, full, swa, *magazines)
        in_rows = int(state.pages.sum())
        assert [pages.known for pages in magazines] == [size - in_rows, size - in_rows, size - in_rows + int(state.retired.sum())]
        # The window's bound is the host's own rule.
        assert state.retired.tolist() == [frontier(length, window, page_size) // page_size for length in state.lengths.tolist()]
    assert state.status.tolist() == [10_000, 0, 0]
    _end(np.arange(lanes), state, full, swa, magazines)
    for pages in magazines:
        assert sorted(held(pages)) == list(range(1, size + 1))
    for table in (*full, *swa):
        assert table[0] == 0 and (table[1:] == -1).all()


def _end(rows: np.ndarray, state: DecodeState, full: Any, swa: Any, magazines: list[DevicePages]) -> None:
    """Requests give all their pages back and begin anew, empty."""
    from gpukit.kernels.sliding_window import free_segment

    for row in rows.tolist():
        free_segment(state.rows[row, : state.pages[row]], 0, 1, *full, *swa, *magazines)
        state.lengths[row] = state.pages[row] = state.retired[row] = 0
        state.advance[row] = 0


@pytest.mark.parametrize("short", ["virtual", "full", "swa", "row"])
def test_a_step_that_cannot_be_served_changes_nothing_and_the_next_works(short: str) -> None:
    rng = np.random.default_rng(5)
    arrays = batch(rng, lanes=6, page_size=2, columns=12, spare=50)
    arrays["requests"][:] = np.arange(6)
    arrays["lengths"][:6] = arrays["pages"][:6] * 2
    made = assemble(arrays, 1)
    if short == "row":
        full_row = 3
        made.state.lengths[full_row], made.state.pages[full_row] = 24, 12
    else:
        pages = getattr(made, f"{short}_pages")
        taken = pages.take(pages.known - 5)
    before = {name: array.copy() for name, array in arrays.items() if name != "status"}
    rings = [held(getattr(made, f"{name}_pages")) for name in ("virtual", "full", "swa")]
    signal = Signal()
    play(made, 2, 4, signal)
    assert made.state.status.tolist() == [0, 1, 0 if short == "row" else 1] and signal.counts() == {"exhausted": 1}
    for name, array in before.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)
    assert rings == [held(getattr(made, f"{name}_pages")) for name in ("virtual", "full", "swa")]
    if short == "row":
        made.state.requests[full_row] = -1
    else:
        pages.fill(taken)
    play(made, 2, 4)
    assert made.state.status[0] == 1


def test_lanes_that_make_no_sense_are_padding_and_counted() -> None:
    arrays = batch(np.random.default_rng(6), lanes=8, page_size=4, columns=12, spare=80)
    arrays["requests"][:] = [0, 1, 99, 3, 4, 5, 6, -1]
    arrays["lengths"][:7], arrays["pages"][:7], arrays["retired"][:7] = 8, 2, 0
    arrays["advance"][1] = -1
    arrays["advance"][3] = 1  # beyond the two pages it holds
    arrays["pages"][4] = arrays["retired"][5] = -3
    arrays["retired"][6] = 3
    made, signal = assemble(arrays, 1), Signal()
    play(made, 4, None, signal)
    assert signal.counts() == {"out_of_range": 1, "mismatch": 5}
    assert made.state.kv_lengths.tolist() == [9, 0, 0, 0, 0, 0, 0, 0] and made.state.cu_lengths.tolist() == [0, *[9] * 8]
    assert (made.state.locations[:, 1:] == 0).all() and made.state.lengths[:7].tolist() == [8] * 7


@pytest.mark.parametrize(
    ("page_size", "length", "pages", "advance"),
    [
        (4, 8, 2, 2**63 - 1),
        (4, 2**63 - 1, 2, 1),
        (4, 2**63 - 1, 2**63 - 1, 2**63 - 1),
        (4, 8, 2, -(2**63)),
        (4, 2**31, 2**31, 0),
        (4, 2**31 - 1, 2**31, 0),
        (4, 2**31 - 2, 2**31, 1),
        (1, 2**63 - 2, 2**63 - 1, 1),
    ],
)
def test_sums_that_go_round_and_lengths_beyond_31_bits_are_padding(page_size: int, length: int, pages: int, advance: int) -> None:
    """The lane beside it is served as if it were alone."""
    arrays = batch(np.random.default_rng(6), lanes=2, page_size=page_size, columns=12, spare=80)
    arrays["requests"][:] = [0, 1]
    arrays["lengths"][:2], arrays["pages"][:2], arrays["retired"][:2] = [length, 3], [pages, 3], 0
    arrays["advance"][0] = advance
    made, signal = assemble(arrays, 1), Signal()
    play(made, page_size, 2, signal)
    state = made.state
    assert signal.counts()["mismatch"] == 1 and "exhausted" not in signal.counts() and state.status.tolist() == [1, 0, 0]
    assert state.kv_lengths.tolist() == [0, 4] and state.lengths[:2].tolist() == [length, 3] and state.pages[0] == pages
    assert (state.locations[:, 0] == 0).all()


@pytest.mark.parametrize("page_size", [1, 3, 4, 64])
def test_extreme_values_make_sense_where_python_integers_say_so(page_size: int) -> None:
    arrays = batch(np.random.default_rng(6), lanes=200, page_size=page_size, columns=12, spare=400)
    lengths = extremes(np.random.default_rng(page_size), arrays, page_size)
    made, signal = assemble(arrays, 1), Signal()
    play(made, page_size, 2 * page_size, signal)
    assert made.state.status.tolist() == [1, 0, 0] and signal.counts()["mismatch"] == lengths.count(None)
    live = zip(lengths, made.state.requests, strict=True)
    assert made.state.kv_lengths.tolist() == [0 if length is None or row < 0 else length + 1 for length, row in live]


def test_the_longest_length_makes_sense() -> None:
    """And is refused for the width of its row."""
    arrays = batch(np.random.default_rng(6), lanes=1, page_size=4, columns=12, spare=80)
    arrays["requests"][:], arrays["lengths"][0], arrays["pages"][0], arrays["retired"][0] = 0, 2**31 - 2, 2**29, 0
    made, signal = assemble(arrays, 1), Signal()
    play(made, 4, None, signal)
    assert signal.counts() == {"exhausted": 1} and made.state.status.tolist() == [0, 1, 0]


def test_a_backlog_of_retirement_is_worked_off_in_rounds() -> None:
    arrays = batch(np.random.default_rng(7), lanes=1, page_size=1, columns=80, spare=90, window=None)
    arrays["requests"][:] = 0
    row = np.arange(1, 51)
    for name in ("full", "swa"):
        arrays[f"{name}_v2p"][1:], arrays[f"{name}_p2v"][1:] = -1, -1
        page_table.bind(row, row, arrays[f"{name}_v2p"], arrays[f"{name}_p2v"])
    arrays["rows"][0, :50], arrays["lengths"][0], arrays["pages"][0] = row, 50, 50
    for name in ("virtual", "full", "swa"):
        arrays[f"free {name}"] = np.arange(51, 80)
    made = assemble(arrays, 1)
    for expected in (MOST_RETIRED, 2 * MOST_RETIRED, 40, 40):
        play(made, 1, 10)
        assert made.state.retired[0] == expected


def test_a_duplicate_retirement_is_skipped_and_no_page_is_handed_out_twice() -> None:
    arrays = batch(np.random.default_rng(8), lanes=2, page_size=1, columns=20, spare=60, window=None)
    arrays["requests"][:] = [0, 1]
    arrays["rows"][1, :5] = arrays["rows"][0, :5] = [1, 2, 3, 4, 5]
    arrays["lengths"][:2], arrays["pages"][:2] = 5, 5
    for name in ("full", "swa"):
        arrays[f"{name}_v2p"][1:], arrays[f"{name}_p2v"][1:] = -1, -1
        page_table.bind(np.arange(1, 6), np.arange(1, 6), arrays[f"{name}_v2p"], arrays[f"{name}_p2v"])
    for name in ("virtual", "full", "swa"):
        arrays[f"free {name}"] = np.arange(6, 20)
    made, signal = assemble(arrays, 1), Signal()
    play(made, 1, 3, signal)
    assert signal.counts() == {"unbound": 2} and held(made.swa_pages) == [*range(8, 20), 1, 2]


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (ArgumentTypeError, "state: expected a DecodeState", {"state": 3}),
        (ArgumentError, "page_size: expected at least 1", {"page_size": 0}),
        (ArgumentError, "window: expected at least 0", {"window": -1}),
        (ArgumentTypeError, "full: expected a pair of tables", {"full": 5}),
        (ArgumentTypeError, "full v2p: expected dtype int64", {"full": (np.zeros(5, np.int32), np.zeros(5, np.int64))}),
        (ArgumentError, "swa: expected a v2p of 82 rows", {"swa": page_table.empty(5)}),
        (ArgumentError, "swa_pages: expected a list exactly where", {"swa": None}),
        (ArgumentTypeError, "virtual_pages: expected a DevicePages", {"virtual_pages": [1]}),
        (ArgumentError, "full_pages: expected a list of its own", {"full_pages": "virtual"}),
        (ArgumentError, "state: expected a lookahead of at most 16 pages", {"lookahead": 17}),
    ],
)
def test_refuses_by_name(error: type[Exception], message: str, changed: dict[str, Any]) -> None:
    lookahead = changed.pop("lookahead", 1)
    arrays = batch(np.random.default_rng(9), lanes=0, page_size=1, columns=4, spare=80, lookahead=lookahead)
    arrays = {name: table[:82] if name[-3:] in ("v2p", "p2v") else table for name, table in arrays.items()}
    made = assemble(arrays, lookahead)
    arguments = {
        "state": made.state, "page_size": 1, "window": 4, "full": page_table.empty(81), "swa": page_table.empty(81),
        "virtual_pages": made.virtual_pages, "full_pages": made.full_pages, "swa_pages": made.swa_pages,
    }  # fmt: skip
    if changed.get("full_pages") == "virtual":
        changed["full_pages"] = made.virtual_pages
    with pytest.raises(error, match=f"^{message}"):
        decode_step(**arguments | changed)


@pytest.mark.parametrize(
    ("error", "message", "name", "array"),
    [
        (ArgumentTypeError, "rows: expected dtype int32 or int64, got float64", "rows", np.zeros((3, 4))),
        (ArgumentError, "rows: expected 2 dimensions", "rows", np.zeros(3, np.int64)),
        (ArgumentError, "requests: expected fewer than 8388608 lanes, got 8388608", "requests", np.zeros(2**23, np.int32)),
        (ArgumentError, "advance: expected shape \\(0,\\) like requests", "advance", np.zeros(2, np.int64)),
        (ArgumentError, "lengths: expected shape \\(3,\\), got \\(4,\\)", "lengths", np.zeros(4, np.int64)),
        (ArgumentError, "rows: expected a contiguous array", "rows", np.zeros((3, 8), np.int64)[:, ::2]),
        (ArgumentTypeError, "kv_lengths: expected dtype int32, got int64", "kv_lengths", np.zeros(0, np.int64)),
        (ArgumentError, "status: expected shape", "status", np.zeros(2, np.int64)),
        (ArgumentError, "retired: expected an array apart from pages", "retired", "pages"),
    ],
)
def test_a_state_refuses_by_name(error: type[Exception], message: str, name: str, array: Any) -> None:
    arrays = batch(np.random.default_rng(9), lanes=0, page_size=1, columns=4)
    with pytest.raises(error, match=f"^{message}"):
        assemble(arrays | {name: arrays[array] if isinstance(array, str) else array}, 1)


@pytest.mark.parametrize(
    ("error", "message", "sizes"),
    [
        (ArgumentError, "num_rows: expected at least 1, got -1", {"num_rows": -1}),
        (ArgumentError, "num_rows: expected at least 1, got 0", {"num_rows": 0}),
        (ArgumentTypeError, "num_rows: expected an integer, got float", {"num_rows": 2.0}),
        (ArgumentError, "columns: expected at least 0, got -1", {"columns": -1}),
        (ArgumentError, "lanes: expected at least 0, got -1", {"lanes": -1}),
        (ArgumentTypeError, "lanes: expected an integer, got str", {"lanes": "a"}),
        (ArgumentTypeError, "lookahead: expected an integer, got float", {"lookahead": 1.5}),
        (ArgumentError, "lookahead: expected at least 1, got 0", {"lookahead": 0}),
        (ArgumentError, "width: expected at least 0, got -1", {"width": -1}),
        (ArgumentTypeError, "row_type: expected int32 or int64, got 'float64'", {"row_type": "float64"}),
    ],
)
def test_an_allocation_refuses_by_name(error: type[Exception], message: str, sizes: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^{message}"):
        DecodeState.allocate(**{"num_rows": 2, "columns": 3, "lanes": 1} | sizes)
