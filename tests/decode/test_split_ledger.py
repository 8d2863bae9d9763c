"""The ledger of split memory by hand: one small request whose pages, locations and retirements are written out."""

from __future__ import annotations

from collections import deque

import numpy as np

from gpukit.decode.scheduler import Batch, Running
from gpukit.decode.split_ledger import SplitLedger
from gpukit.decode.trace import Request


def test_a_request_by_hand():
    # Pages of 4 tokens, window of 4: after 13 tokens only the pages from token 8 on can still be seen.
    ledger = SplitLedger(4, 4, {"virtual": [7, 2, 5, 3], "full": [10, 20, 30, 40], "swa": [100, 200, 300, 400]})
    running = Running(Request(0, 12, 5), row=0, prompt=12, length=13, frontier=8, retired_from=8)
    expected = ledger.play(Batch(0, [running], admitted=[running], new_pages=1))
    # The prompt ends at 12, so its first two pages are outside the window and not in the SWA pool.
    assert ledger.swa == {5: 100, 3: 200}
    assert expected.prompts is not None
    assert expected.prompts.tokens.tolist() == [28, 29, 30, 31, 8, 9, 10, 11, 20, 21, 22, 23]
    assert expected.prompts.full.tolist() == [40, 41, 42, 43, 80, 81, 82, 83, 120, 121, 122, 123]
    assert expected.prompts.swa.tolist() == [0] * 8 + [400, 401, 402, 403]
    assert (expected.locations, expected.full_locations, expected.swa_locations) == ([12], [160], [800])
    full, swa = ledger.page_tables(Batch(0, [running]), (2, 5))
    assert full.tolist() == [[10, 20, 30, 40, 0], [0] * 5]
    assert swa.tolist() == [[0, 0, 100, 200, 0], [0] * 5]
    assert ledger.row(running).tolist() == [28, 29, 30, 31, 8, 9, 10, 11, 20, 21, 22, 23, 12]

    for length in (14, 15, 16):
        running.length = length
        expected = ledger.play(Batch(length - 13, [running]))
    assert ledger.swa == {5: 100, 3: 200} and (expected.locations, expected.swa_locations) == ([15], [803])
    running.length = 17
    ledger.free = {kind: deque([*pages, page]) for (kind, pages), page in zip(ledger.free.items(), (8, 50, 500), strict=True)}
    expected = ledger.play(Batch(4, [running]))
    # Behind 16 tokens the third page leaves: its tokens end at 12, a window before the last whole page.
    assert ledger.swa == {3: 200, 8: 300} and list(ledger.free["swa"]) == [400, 500, 100]
    assert (expected.locations, expected.full_locations, expected.swa_locations) == ([32], [200], [1200])

    ledger.close(Batch(4, [running], finished=[running]))
    assert ledger.full == {} and ledger.swa == {} and ledger.pages == {}
    assert [list(ledger.free[kind]) for kind in ("virtual", "full", "swa")] == [[7, 2, 5, 3, 8], [10, 20, 30, 40, 50], [400, 500, 100, 200, 300]]


def test_pages_are_handed_out_in_the_order_they_came_back():
    ledger = SplitLedger(2, 100, {"virtual": [1, 2, 3], "full": [3, 2, 1], "swa": [2, 1, 3]})
    first = Running(Request(0, 3, 2), row=0, prompt=3, length=4, frontier=0, retired_from=0)
    ledger.play(Batch(0, [first], admitted=[first]))
    second = Running(Request(1, 5, 1), row=1, prompt=5, length=6, frontier=0, retired_from=0)
    expected = ledger.play(Batch(1, [second], admitted=[second], preempted=[first]))
    assert ledger.pages == {1: [3, 1, 2]} and ledger.full == {3: 1, 1: 3, 2: 2} and ledger.swa == {3: 3, 1: 2, 2: 1}
    assert expected.locations == [5] and np.array_equal(ledger.row(second), [6, 7, 2, 3, 4, 5])
