"""Planning windows: the known answers of published runs and of devices at their limits, the guard, shares of live bytes, recipes. No driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
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


BAD: list[tuple[Any, str]] = [
    (lambda: plan(Region(0, 0), properties=H200), "region: expected at least 1 byte"),
    (lambda: plan(Region(0, 10), wanted=0, properties=H200), "wanted: expected at least 1, got 0"),
    (lambda: plan(Region(0, 10), ratio=1.5, properties=H200), "ratio: expected a number from 0 to 1, got 1.5"),
    (lambda: plan(Region(0, 10), ratio=float("nan"), properties=H200), "ratio: expected a number from 0 to 1, got nan"),
    (lambda: plan(Region(0, 10), miss="persisting", properties=H200), "hit, miss: expected one of"),
    (lambda: AccessWindow(0, 0), "size: expected at least 1, got 0"),
    (lambda: AccessWindow(-1, 4), "base: expected at least 0, got -1"),
    (lambda: AccessWindow(0, 1.5), "size: expected an integer, got float"),
    (lambda: AccessWindow("a", 4), "base: expected an integer, got str"),
    (lambda: AccessWindow(2**64 - 4, 5), "size: expected at most 4, got 5"),
    (lambda: AccessWindow(0, 4, "1"), "ratio: expected a number, got str"),
    (lambda: AccessWindow(0, 4, True), "ratio: expected a number, got bool"),
    (lambda: AccessWindow(0, 4, 10**400), "ratio: expected a number from 0 to 1, got 10000"),
    (lambda: AccessWindow(0, 4, hit=1), "hit, miss: expected one of"),
    (lambda: Region(0, -5), "size: expected at least 0, got -5"),
    (lambda: Region(-1, 4), "base: expected at least 0, got -1"),
    (lambda: Region("a", 4), "base: expected an integer, got str"),
    (lambda: Region(True, 4), "base: expected an integer, got bool"),
    (lambda: Region(0, 1.5), "size: expected an integer, got float"),
    (lambda: Region(0, 10, 3), "live: expected a sequence, got int"),
    (lambda: Region(0, 10, (1, 2)), "live: expected a sequence, got int"),
    (lambda: Region(0, 10, ((1, 2, 3),)), "live: expected pairs of offset and size"),
    (lambda: Region(0, 10, ((0, 1.5),)), "live: expected an integer, got float"),
    (lambda: Region.of(np.zeros(3, np.complex64)), "array: expected dtype bool, .*, got complex64"),
    (lambda: Region.of(np.zeros(3, "datetime64[s]")), r"array: expected dtype bool, .*, got datetime64\[s\]"),
    (lambda: Region.of([1]), "array: expected an array .*, got list"),
    (lambda: plan([1], properties=H200), "region: expected an array .*, got list"),
    (lambda: plan(np.zeros(3), properties=H200), "region: expected an array on device 0, got one in host memory"),
    (lambda: plan(Region(0, 10), wanted=1.5, properties=H200), "wanted: expected an integer, got float"),
    (lambda: plan(Region(0, 10), wanted=True, properties=H200), "wanted: expected an integer, got bool"),
    (lambda: plan(Region(0, 10), ratio="1", properties=H200), "ratio: expected a number, got str"),
    (lambda: plan(Region(0, LARGE_POOL), ratio=7, properties=H200), "ratio: expected a number from 0 to 1, got 7"),
    (lambda: plan(Region(0, 10), device=-1, properties=H200), "device: expected at least 0, got -1"),
    (lambda: plan(Region(0, 10), name=3, properties=H200), "name: expected text, got int"),
    (lambda: plan(Region(0, 10), options=[1], properties=H200), "options: expected a mapping, got list"),
    (lambda: plan(Region(0, 10), nodes="gated", properties=H200), "nodes: expected a sequence, got the text 'gated'"),
    (lambda: plan(Region(0, 10), nodes=b"gated", properties=H200), "nodes: expected a sequence, got bytes"),
    (lambda: plan(Region(0, 10), nodes=(), properties=H200), "nodes: expected at least one text"),
    (lambda: plan(Region(0, 10), nodes=("",), properties=H200), "nodes: expected text, got none"),
    (lambda: plan(Region(0, 10), suspend="prefill", properties=H200), "suspend: expected a sequence, got the text 'prefill'"),
    (lambda: Plan(nodes="gated"), "nodes: expected a sequence, got the text 'gated'"),
    (lambda: Plan(suspend="prefill"), "suspend: expected a sequence, got the text 'prefill'"),
    (lambda: Plan(window=(0, 4)), "window: expected an AccessWindow or None, got tuple"),
    (lambda: Plan(reserve=0), "reserve: expected at least 1, got 0"),
    (lambda: Plan(device=0.0), "device: expected an integer, got float"),
    (lambda: Recipe("r", nodes="gated"), "nodes: expected a sequence, got the text 'gated'"),
    (lambda: Recipe("r", suspend="prefill"), "suspend: expected a sequence, got the text 'prefill'"),
    (lambda: Recipe("r", reserve=10**12).plan({}, properties=H200), "reserve: expected at most the device's 39321600 bytes, got 1000000000000"),
    (lambda: Recipe("r", "y").plan({"y": np.zeros(3)}, properties=H200), "regions: expected a Region for y, got ndarray"),
    (lambda: Recipe("r", "y").plan(None, properties=H200), "regions: expected a mapping, got NoneType"),
    (lambda: Recipe.from_dict([1]), "recipe: expected a mapping, got list"),
    (lambda: Recipe.from_dict({"name": "r", 3: 4}), "recipe: expected text as keys, got 3"),
    (lambda: load_plan(5), "path: expected a path, got int"),
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
    only_reserve = Recipe("reserve", reserve=MIB).plan({}, properties=H200)
    assert only_reserve.window is None and only_reserve.reserve == MIB and not only_reserve.does_nothing
    stopped = Recipe("reserve", reserve=MIB).plan({}, properties=MIG)
    assert stopped.does_nothing and stopped.guarded == "1048576 bytes wanted, but the device sets aside none"
    for unguarded in (Recipe("reserve", reserve=MIB).plan({}, guard=False), Recipe("reserve", reserve=10**12).plan({}, guard=False)):
        assert unguarded.reserve in (MIB, 10**12) and not unguarded.guarded


def test_numpy_numbers_and_lists_become_plain() -> None:
    own = AccessWindow(np.int64(4096), np.uint32(8), np.float32(0.5))  # type: ignore[arg-type]
    assert own == AccessWindow(4096, 8, 0.5) and {type(value) for value in (own.base, own.size)} == {int} and type(own.ratio) is float
    region = Region(np.int64(0), np.int64(100), [[np.int64(0), 10], [20, 10]])  # type: ignore[arg-type]
    assert region == Region(0, 100, ((0, 10), (20, 10))) and type(region.base) is int and hash(region)
    made = plan(Region(0, 100), wanted=np.int64(10), nodes=["a"], suspend=["b"], properties=H200)  # type: ignore[arg-type]
    assert made.reserve == 10 and made.nodes == ("a",) and made.suspend == ("b",)
    recipe = Recipe("r", "y", begin=np.int64(0), reserve=np.int64(5), ratio=1, nodes=["a"])  # type: ignore[arg-type]
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_an_array_lies_on_the_device_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window.arrays, "describe", lambda array, name="array": (4096, "float32", (10,), None, 1, True))
    with pytest.raises(ArgumentError, match="region: expected an array on device 0, got one in device 1"):
        plan(object(), properties=H200)
    assert plan(object(), device=1, properties=H200).window == AccessWindow(4096, 40)


WRONG_FIELDS: list[tuple[str, Any, str]] = [
    ("name", 5, "name: expected text, got int"),
    ("name", "", "name: expected text, got none"),
    ("region", 5, "region: expected text, got int"),
    ("begin", None, "begin: expected an integer, got NoneType"),
    ("begin", 0.5, "begin: expected an integer, got float"),
    ("begin", -1, "begin: expected at least 0, got -1"),
    ("size", "1", "size: expected an integer, got str"),
    ("size", 0, "size: expected at least 1, got 0"),
    ("reserve", "1", "reserve: expected an integer, got str"),
    ("reserve", -5, "reserve: expected at least 1, got -5"),
    ("reserve", True, "reserve: expected an integer, got bool"),
    ("ratio", "1", "ratio: expected a number, got str"),
    ("ratio", float("nan"), "ratio: expected a number from 0 to 1, got nan"),
    ("hit", 1, "hit, miss: expected one of"),
    ("miss", ["normal"], "hit, miss: expected one of"),
    ("nodes", "gated", "nodes: expected a sequence, got the text 'gated'"),
    ("nodes", [1], "nodes: expected text, got int"),
    ("options", [1], "options: expected a mapping, got list"),
    ("options", None, "options: expected a mapping, got NoneType"),
    ("suspend", "prefill", "suspend: expected a sequence, got the text 'prefill'"),
    ("suspend", [["a"]], "suspend: expected text, got list"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG_FIELDS, ids=[f"{field} {value!r}" for field, value, _ in WRONG_FIELDS])
@pytest.mark.parametrize("region", ["states", None])
def test_a_file_with_a_wrong_field_is_refused_by_name(tmp_path: Path, field: str, value: Any, message: str, region: str | None) -> None:
    path = tmp_path / "plan.json"
    for content in ({"name": "a", "region": region, field: value}, {"winner": {"name": "a", "region": region, field: value}}):
        path.write_text(json.dumps(content))
        with pytest.raises(ArgumentError, match=message) as caught:
            load_plan(path)
        assert str(caught.value).endswith(f", in {path}")


def test_a_file_that_is_no_text_or_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for content in (b"\xff\xfe", b"[" * 100_000, b'{"name": ' + b"9" * 5000 + b"}"):
        path.write_bytes(content)
        with pytest.raises(ArgumentError, match="path: expected a readable JSON file"):
            load_plan(path)
    with pytest.raises(ArgumentError, match="path: expected a readable JSON file"):
        load_plan(tmp_path)


def test_recipes_survive_a_file(tmp_path: Path) -> None:
    recipe = Recipe("half", "states", size=8, nodes=("a", "b"), options={"keep": 0.25})
    for content in (recipe.to_dict(), {"winner": recipe.to_dict(), "rows": []}):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(content))
        assert load_plan(path) == recipe
    path.write_text("[1]")
    with pytest.raises(ArgumentError, match="expected a recipe or a result of tune, got list"):
        load_plan(path)
