"""Planning windows: the known answers of published runs and of devices at their limits, the guard, shares of live bytes, recipes. No driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpukit.errors import ArgumentError
from gpukit.graphs import STOCK, AccessWindow, Plan, Recipe, Region, load_plan, plan, window
from tests.helpers.graphs import H200, MIB, MIG, MIG_WITH_WINDOWS, NARROW, RTX_5090

SMALL_POOL = 30 * 2 * (49_152 + 2_097_152)
LARGE_POOL = 48 * 2 * (61_440 + 3_145_728)

# device, bytes, wanted: reserve and ratio, or None where the guard stops it.
KNOWN: list[tuple[Any, int, int | None, tuple[int, float] | None]] = [
    (RTX_5090, SMALL_POOL, None, (62_914_560, 0.4885)),
    (RTX_5090, LARGE_POOL, None, None),
    (H200, SMALL_POOL, None, (39_321_600, 0.3053)),
    (H200, LARGE_POOL, None, None),
    (H200, SMALL_POOL // 2, None, (39_321_600, 0.6107)),
    (H200, SMALL_POOL, 8 * MIB, (8 * MIB, 0.0651)),
    (H200, 20 * MIB, None, (20 * MIB, 1.0)),
    (H200, 20 * MIB, 30 * MIB, (20 * MIB, 1.0)),
    (H200, 20 * MIB, 5 * MIB, (5 * MIB, 0.25)),
    (H200, H200.persisting_l2_max, None, (39_321_600, 1.0)),
    (H200, H200.access_window_max, None, (39_321_600, 0.293)),
    (H200, H200.access_window_max + 1, None, None),
    (H200, 1, None, (1, 1.0)),
    (NARROW, 12 * MIB, None, (12 * MIB, 1.0)),
    (NARROW, 16 * MIB, None, (16 * MIB, 1.0)),
    # Fits the reserve, not the window: the threshold is the window's.
    (NARROW, 20 * MIB, None, None),
    (MIG, 1 * MIB, None, None),
    (MIG, 1, None, None),
    (MIG_WITH_WINDOWS, 1, None, None),
]


def test_the_pools_have_their_published_sizes() -> None:
    assert (SMALL_POOL, LARGE_POOL) == (128_778_240, 307_888_128)


@pytest.mark.parametrize(("properties", "nbytes", "wanted", "expected"), KNOWN, ids=[f"{row[0].name} {row[1]} {row[2]}" for row in KNOWN])
def test_known_answers(properties: Any, nbytes: int, wanted: int | None, expected: tuple[int, float] | None) -> None:
    made = plan(Region(4096, nbytes), wanted=wanted, properties=properties)
    if expected is None:
        assert made.does_nothing and made.window is None and made.reserve is None
        assert str(nbytes) in made.guarded and str(properties.access_window_max) in made.guarded
    else:
        assert made.window is not None and (made.window.base, made.window.size) == (4096, nbytes)
        assert made.reserve == expected[0] and round(made.window.ratio, 4) == expected[1]
        assert (made.window.hit, made.window.miss, made.guarded) == ("persisting", "normal", "")


@pytest.mark.parametrize("row", [row for row in KNOWN if row[3] is not None], ids=str)
def test_geometry_is_the_same_with_and_without_the_guard(row: Any) -> None:
    device, size, wanted, _ = row
    assert plan(Region(0, size), wanted=wanted, properties=device) == plan(Region(0, size), wanted=wanted, properties=device, guard=False)


def test_without_the_guard_the_driver_may_truncate() -> None:
    made = plan(Region(0, LARGE_POOL), properties=H200, guard=False)
    assert made.window is not None and made.window.size == LARGE_POOL and made.reserve == 39_321_600 and not made.guarded
    nothing = plan(Region(0, MIB), properties=MIG, guard=False)
    assert nothing.window is not None and nothing.window.ratio == 0 and nothing.reserve is None


def test_the_guard_says_so_once_per_process() -> None:
    code = """
import threading
from gpukit.graphs import Region, plan
from tests.helpers.graphs import H200, MIG
plan(Region(0, 128_778_240), properties=H200)
threads = [threading.Thread(target=plan, args=(Region(0, 307_888_128),), kwargs={"properties": H200}) for _ in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
plan(Region(0, 1), properties=MIG)
plan(Region(0, 307_888_128), properties=H200, guard=False)
import sys; assert "cuda" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert run.returncode == 0 and run.stdout == "", run.stderr
    (line,) = run.stderr.splitlines()
    assert "307888128" in line and "134217728" in line


def test_a_plan_that_fits_says_nothing(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "_messages", 0)
    plan(Region(0, SMALL_POOL), properties=H200)
    assert capfd.readouterr().err == ""
    plan(Region(0, LARGE_POOL), properties=H200)
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_what_a_window_holds_of_the_live_bytes() -> None:
    interleaved = tuple((2 * layer * 2_146_304, 2_146_304) for layer in range(30))
    pool = Region(0, SMALL_POOL, interleaved)
    assert pool.live_bytes == SMALL_POOL // 2
    whole = plan(pool, properties=H200)
    assert whole.window is not None and whole.reserve is not None
    # Half of what the reserve holds is dead.
    assert pool.held_share(whole.window, whole.reserve) == pytest.approx(39_321_600 / SMALL_POOL)
    together = Region(0, SMALL_POOL, ((0, SMALL_POOL // 2),))
    live = plan(Region(0, SMALL_POOL // 2), properties=H200)
    assert live.window is not None and live.reserve is not None
    assert together.held_share(live.window, live.reserve) == pytest.approx(39_321_600 / (SMALL_POOL // 2))
    assert together.held_share(AccessWindow(SMALL_POOL // 2, 100), MIB) == 0
    assert together.held_share(AccessWindow(0, SMALL_POOL // 2, hit="streaming"), MIB) == 0
    # At ratio 1 the reserve is the bound.
    assert Region(0, 100).held_share(AccessWindow(0, 100), 25) == 0.25


BAD = [
    (lambda: plan(Region(0, 0), properties=H200), "region: expected at least 1 byte"),
    (lambda: plan(Region(0, 10), wanted=0, properties=H200), "wanted: expected at least 1 byte, got 0"),
    (lambda: plan(Region(0, 10), ratio=1.5, properties=H200), "ratio: expected a number from 0 to 1, got 1.5"),
    (lambda: plan(Region(0, 10), ratio=float("nan"), properties=H200), "ratio: expected a number from 0 to 1, got nan"),
    (lambda: plan(Region(0, 10), miss="persisting", properties=H200), "hit, miss: expected one of"),
    (lambda: AccessWindow(0, 0), "window: expected an address and at least 1 byte"),
    (lambda: Region(0, 10, ((0, 6), (5, 2))), "live: expected parts inside 10 bytes"),
    (lambda: Region(0, 10, ((5, 6),)), "live: expected parts inside 10 bytes"),
    (lambda: Recipe("r", "x").plan({"y": Region(0, 10)}), "region: expected one of y, got 'x'"),
    (lambda: Recipe("r", "y", begin=5, size=6).plan({"y": Region(0, 10)}), "begin, size: expected a part of the 10 bytes of y, got 6 from 5"),
    (lambda: Recipe.from_dict({"name": "r", "reserv": 3}), "recipe: expected fields of .*, got reserv"),
    (lambda: Recipe.from_dict({"region": "r"}), "recipe: expected a name, got none"),
    (lambda: load_plan("/no/such/file"), "path: expected a readable JSON file"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arguments_are_named(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_a_recipe_becomes_a_plan_where_the_region_lies() -> None:
    recipe = Recipe("middle", "states", begin=100, size=200, reserve=50, nodes=("delta",), options={"keep": 0.5}, suspend=("prefill",))
    made = recipe.plan({"states": Region(1000, 400)}, properties=H200, device=0)
    assert made.window == AccessWindow(1100, 200, 0.25) and made.reserve == 50
    assert (made.name, made.nodes, made.options, made.suspend) == ("middle", ("delta",), {"keep": 0.5}, ("prefill",))
    assert Recipe("nothing").plan({}) == Plan("nothing") and Plan("nothing").does_nothing and STOCK.does_nothing
    only_reserve = Recipe("reserve", reserve=MIB).plan({})
    assert only_reserve.window is None and only_reserve.reserve == MIB and not only_reserve.does_nothing


def test_recipes_survive_a_file(tmp_path: Path) -> None:
    recipe = Recipe("half", "states", size=8, nodes=("a", "b"), options={"keep": 0.25})
    for content in (recipe.to_dict(), {"winner": recipe.to_dict(), "rows": []}):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(content))
        assert load_plan(path) == recipe
    path.write_text("[1]")
    with pytest.raises(ArgumentError, match="expected a recipe or a result of tune, got list"):
        load_plan(path)
