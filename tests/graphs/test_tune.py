"""How a plan is chosen: the whole of `tune` on a driver that captures nothing, with times made up by the test. Decisions, controls, limits, files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpukit.errors import ArgumentError, DeviceError
from gpukit.graphs import Plan, Recipe, Region, TuneResult, candidates, load_plan, resolve, tune
from gpukit.terminal import console
from tests.helpers.graphs import H200, MIB
from tests.helpers.tuning import DEFAULT, REGIONS, Lab, module, open_lab

SMALL = Recipe("small", "states", reserve=8 * MIB)
LARGE = Recipe("large", "states")
RECIPES = [SMALL, LARGE, Recipe("hinted", options={"keep": 0.5})]


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    yield from open_lab(monkeypatch)


def run(lab: Lab, **options: Any) -> TuneResult:
    settings: dict[str, Any] = {"recipes": RECIPES, "passes": 6} | options
    return tune(lab.build, REGIONS, {"prefill": 1, "decode": 4}, **settings)


def test_what_beats_stock_in_total_wins(lab: Lab) -> None:
    lab.changes = {"small": -4.0, "large": 20.0, "hinted": -2.0, "structural zero": 3.0}
    result = run(lab)
    assert result.winner == SMALL and "confirmed" in result.reason
    assert [row.recipe.name for row in result.rows] == ["stock", "null", "structural zero", "published", "small", "large", "hinted"]
    small = result.row("small")
    assert small.beats_stock and set(small.seconds) == set(small.change) == {"prefill", "decode", "total"}
    low, high = small.change["total"]
    assert -4.1 < low <= high < -3.9 and small.geometry == "4 of 4 nodes windowed, 67108864 bytes at 0.1250, reserve 8388608"
    assert result.row("stock").geometry == "0 of 4 nodes windowed" and result.row("null").geometry == "0 of 4 nodes windowed, reserve 11796480"
    assert not result.row("large").beats_stock and result.row("hinted").beats_stock
    assert len(result.ladders) == 4 and all(verdict.startswith("qualified") for _, verdict in result.ladders)
    assert "same bits under every plan" in result.identity


def test_the_limit_belongs_to_the_arm_that_runs(lab: Lab) -> None:
    run(lab)
    assert lab.seen["stock"] == lab.seen["null"] == lab.seen["hinted"] == {DEFAULT}
    assert lab.seen["small"] == lab.seen["structural zero"] == {8 * MIB} and lab.seen["large"] == {39_321_600}
    assert all(plan.reserve is None for plan in lab.plans.values())
    assert lab.plans["hinted"].options == {"keep": 0.5} and lab.plans["structural zero"].window.base == 1 << 40  # type: ignore[union-attr]
    assert lab.fake.calls.count("reset") > 0


def test_the_published_recipe_is_always_there_and_the_guard_may_stop_it(lab: Lab) -> None:
    published = run(lab, recipes=[Recipe("published", "pool"), SMALL]).row("published")
    assert published.role == "published" and published.geometry == "0 of 4 nodes windowed" and "307888128" in published.guarded
    assert lab.seen["published"] == {DEFAULT}
    assert run(lab, recipes=[]).row("published").recipe.region == "states"


STOCK_WINS: list[tuple[str, dict[Any, float], str]] = [
    ("nothing differs", {}, "nothing beat stock"),
    ("everything is slower", {"small": 1.0, "large": 2.0, "hinted": 3.0}, "nothing beat stock"),
    ("decode gains and prefill loses more", {("small", "decode"): -1.0, ("small", "prefill"): 5.0}, "nothing beat stock"),
    ("the null arm moves", {"small": -5.0, "null": -0.5}, "0 of 3 ladders count"),
    ("the structural zero gains", {"small": -5.0, "structural zero": -1.0}, "0 of 3 ladders count"),
    ("the controls gain most", {"structural zero": 1.0, "null": 0.0}, "nothing beat stock"),
]


@pytest.mark.parametrize(("changes", "reason"), [row[1:] for row in STOCK_WINS], ids=[row[0] for row in STOCK_WINS])
def test_otherwise_stock_wins(lab: Lab, changes: dict[Any, float], reason: str) -> None:
    lab.changes = changes
    result = run(lab)
    assert result.winner == Recipe("stock") and result.reason.startswith(reason), result.reason


def test_too_much_noise_is_no_result(lab: Lab) -> None:
    lab.changes, lab.noise = {"small": -5.0}, 4.0
    result = run(lab, noise_limit=0.5)
    assert result.winner.name == "stock" and len(result.ladders) == 3 and all("noise" in verdict for _, verdict in result.ladders)
    # Nothing is left out of the table all the same.
    assert all(set(row.seconds) == {"prefill", "decode", "total"} for row in result.rows)


def test_a_gain_within_the_distance_of_the_ladders_is_none(lab: Lab) -> None:
    # Three timed stretches set the cycles; then two ladders of 6 passes and 7 arms.
    lab.changes, lab.later = {"small": -0.3}, (3 + 6 * 7, {"small": -1.2})
    result = run(lab, confirm=False)
    assert result.winner.name == "stock" and not result.row("small").beats_stock
    low, high = result.row("small").change["total"]
    assert high - low > -high


def test_what_was_lucky_once_is_found_out(lab: Lab) -> None:
    lab.changes, lab.later = {"small": -2.0}, (3 + 2 * 6 * 7, {})
    result = run(lab)
    assert result.winner.name == "stock" and result.reason == "small beat stock in the sweep and not when measured again"
    assert len(result.ladders) >= 4
    lab.count = itertools.count()
    assert run(lab, confirm=False).winner == SMALL


def test_more_ladders_are_run_where_some_do_not_count(lab: Lab) -> None:
    lab.changes, lab.later = {"small": -2.0, "null": 1.0}, (3 + 6 * 7, {"small": -2.0})
    result = run(lab, confirm=False)
    assert result.winner == SMALL and [verdict[:4] for _, verdict in result.ladders] == ["disq", "qual", "qual"]


def test_controls_below_the_resolution_are_flags_and_nothing_wins_by_less(lab: Lab) -> None:
    lab.noise, lab.changes = 0.001, {"null": 0.05, "structural zero": -0.05, "small": -0.08, "hinted": -0.5}
    result = run(lab)
    assert result.winner.name == "hinted" and not result.row("small").beats_stock and all("flags" in verdict for _, verdict in result.ladders)
    assert run(lab, control_limit=0.02).reason == "0 of 3 ladders count, which is no replication"
    lab.changes = {"small": -0.08}
    assert run(lab).winner.name == "stock" and run(lab, control_limit=0.02).winner == SMALL


def test_a_plan_that_changes_bits_stops_everything(lab: Lab) -> None:
    lab.broken = "large"
    with pytest.raises(DeviceError, match="the bit-identity gate was not passed: large differs from stock on input 1, 2"):
        run(lab)
    assert run(lab, seeds=()).identity == "not checked"


def test_a_grant_that_differs_is_in_the_table(lab: Lab, recwarn: pytest.WarningsRecorder) -> None:
    lab.fake.unit = 3_932_160
    result = run(lab, recipes=[SMALL])
    assert result.row("small").geometry.endswith("reserve 8388608, granted 11796480") and not recwarn.list
    assert "granted" not in result.row("published").geometry + result.row("null").geometry


def test_a_failure_in_the_middle_leaves_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, cycles: int) -> Any:
        if self.recipe.name == "large":
            raise KeyError("in the cell")
        return lab.timed(self, cycles)

    monkeypatch.setattr(module._Arm, "_timed", fail)
    with pytest.raises(KeyError, match="in the cell"):
        run(lab)


def test_results_survive_a_file_and_are_used_again(lab: Lab, tmp_path: Path) -> None:
    lab.changes = {"small": -4.0}
    path = tmp_path / "plan.json"
    result = run(lab, reuse=path, geometry={"batch": 1})
    built = lab.built
    again = run(lab, reuse=path, geometry={"batch": 1})
    assert lab.built == built and again == result and load_plan(path) == SMALL
    assert json.loads(path.read_text())["key"]["geometry"] == {"batch": 1}
    assert run(lab, reuse=path, geometry={"batch": 2}).key["geometry"] == {"batch": 2} and lab.built > built
    with pytest.raises(ArgumentError, match=r"expected what TuneResult.to_json wrote"):
        TuneResult.from_json("{}")


def test_ladder_files_are_kept_where_asked(lab: Lab, tmp_path: Path) -> None:
    from gpukit.measure import verify

    run(lab, folder=tmp_path / "raw")
    files = sorted((tmp_path / "raw").iterdir())
    assert [file.name for file in files] == ["sweep-1.csv", "sweep-2.csv"] and all(verify(file).ok for file in files)
    assert "8388608" in files[0].read_text()


def test_the_table_and_the_picture_have_every_row(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab.changes = {"small": -4.0}
    result = run(lab)
    terminal = console()
    terminal.width = 250
    result.print(terminal)
    printed = capsys.readouterr().out
    for row in result.rows:
        assert row.recipe.name in printed
    assert "winner: small" in printed and "bit identity" in printed
    pytest.importorskip("matplotlib", reason="pictures need the extra plot")
    result.plot(tmp_path / "sweep.svg")
    assert "states" not in (tmp_path / "sweep.svg").name and (tmp_path / "sweep.svg").stat().st_size > 5_000


BAD: list[tuple[Callable[[Lab], Any], str]] = [
    (lambda lab: tune(lab.build, REGIONS, {}), "phases: expected names other than total"),
    (lambda lab: tune(lab.build, REGIONS, {"decode": 0}), "phases: expected names other than total"),
    (lambda lab: tune(lab.build, REGIONS, {"total": 1}), "phases: expected names other than total"),
    (lambda lab: tune(lab.build, REGIONS, {"verify": 1}), "phases: expected build_graph to return verify, got no verify"),
    (lambda lab: run(lab, ladders=1), "ladders: expected at least 2"),
    (lambda lab: run(lab, recipes=[SMALL, SMALL]), "recipes: expected different names"),
    (lambda lab: run(lab, recipes=[Recipe("null")]), "recipes: expected different names other than"),
    (lambda lab: run(lab, seeds=(1,)), "seeds: expected none, or at least two that all differ, got 1"),
    (lambda lab: run(lab, seeds=(1, 2, 1)), "seeds: expected none, or at least two that all differ, got 1, 2, 1"),
    (lambda lab: run(lab, seeds=5), "seeds: expected a sequence, got int"),
    (lambda lab: run(lab, seeds="12"), "seeds: expected a sequence, got the text '12'"),
    (lambda lab: run(lab, seeds=(1, 2.5)), "seeds: expected an integer, got float"),
    (lambda lab: tune(lab.build, {}, {"decode": 1}, recipes=[]), "regions: expected at least one, got none"),
    (lambda lab: tune(lab.build, {}, {"decode": 1}), "regions: expected at least one, got none"),
    (lambda lab: tune(lab.build, [REGIONS["pool"]], {"decode": 1}), "regions: expected a mapping, got list"),  # type: ignore[arg-type]
    (lambda lab: tune(lab.build, {"a": 5}, {"decode": 1}), "regions: expected a Region for a, got int"),  # type: ignore[dict-item]
    (lambda lab: tune(None, REGIONS, {"decode": 1}), "build_graph: expected a callable, got NoneType"),  # type: ignore[arg-type]
    (lambda lab: tune(lab.build, REGIONS, None), "phases: expected a mapping, got NoneType"),  # type: ignore[arg-type]
    (lambda lab: tune(lab.build, REGIONS, "decode"), "phases: expected a mapping, got str"),  # type: ignore[arg-type]
    (lambda lab: tune(lab.build, REGIONS, {"decode": 1.5}), "phases: expected an integer, got float"),  # type: ignore[dict-item]
    (lambda lab: tune(lab.build, REGIONS, {"decode": True}), "phases: expected an integer, got bool"),
    (lambda lab: tune(lab.build, REGIONS, {5: 1}), "phases: expected text as keys, got 5"),  # type: ignore[dict-item]
    (lambda lab: tune(lab.build, REGIONS, {"de code": 1}), "phases: expected names of letters, digits and underscores, got 'de code'"),
    (lambda lab: tune(lab.build, REGIONS, {"geometry": 1}), "phases: expected names that are no other column of a ladder file, got geometry"),
    (lambda lab: run(lab, ladders=2.5), "ladders: expected an integer, got float"),
    (lambda lab: run(lab, ladders="2"), "ladders: expected an integer, got str"),
    (lambda lab: run(lab, passes=0), "passes: expected a whole number from 3 to 10000, got 0"),
    (lambda lab: run(lab, passes=6.5), "passes: expected an integer, got float"),
    (lambda lab: run(lab, cell_us=float("nan")), "cell_us: expected a finite number from 0 on, got nan"),
    (lambda lab: run(lab, cell_us=float("inf")), "cell_us: expected a finite number from 0 on, got inf"),
    (lambda lab: run(lab, cell_us=-1), "cell_us: expected a finite number from 0 on, got -1"),
    (lambda lab: run(lab, cell_us="4000"), "cell_us: expected a number, got str"),
    (lambda lab: run(lab, control_limit=float("nan")), "control_limit: expected a finite number from 0 on, got nan"),
    (lambda lab: run(lab, noise_limit=float("nan")), "noise_limit: expected a finite number from 0 on, got nan"),
    (lambda lab: run(lab, noise_limit=0), "noise_limit: expected a number above 0, got 0"),
    (lambda lab: run(lab, replication_limit=None), "replication_limit: expected a number, got NoneType"),
    (lambda lab: run(lab, device=-1), "device: expected at least 0, got -1"),
    (lambda lab: run(lab, geometry={"a": {1, 2}}), "geometry: expected plain types"),
    (lambda lab: run(lab, geometry={"a": float("nan")}), "geometry: expected plain types"),
    (lambda lab: run(lab, geometry=[1]), "geometry: expected a mapping, got list"),
    (lambda lab: run(lab, progress=5), "progress: expected a callable, got int"),
    (lambda lab: run(lab, reuse=5), "reuse: expected a path, got int"),
    (lambda lab: run(lab, folder=5), "folder: expected a path, got int"),
    (lambda lab: run(lab, folder=__file__), "folder: expected a directory, or a place for one, got .*test_tune.py"),
    (lambda lab: run(lab, recipes=SMALL), "recipes: expected a sequence, got Recipe"),
    (lambda lab: run(lab, recipes=["small"]), "recipes: expected a sequence of Recipe, got str in it"),
    (lambda lab: run(lab, recipes=[Recipe("x", "nowhere")]), "recipes: expected one of the regions states, pool for x, got 'nowhere'"),
    (lambda lab: run(lab, recipes=[Recipe("x", "nowhere", reserve=1)]), "recipes: expected one of the regions states, pool for x, got 'nowhere'"),
    (lambda lab: run(lab, recipes=[Recipe("x", "states", size=1 << 40)]), "begin, size: expected a part of the 67108864 bytes of states"),
    (
        lambda lab: run(lab, recipes=[Recipe("x", "states", suspend=("typo",))]),
        "recipes: expected phases of prefill, decode to suspend for x, got typo",
    ),
    (lambda lab: run(lab, recipes=[Recipe("x", reserve=1 << 40)]), "reserve: expected at most the device's 39321600 bytes"),
    (lambda lab: run(lab, recipes=[Recipe("x ", "states")]), "recipes: expected printable names without spaces at their ends, got 'x '"),
    (lambda lab: run(lab, recipes=[Recipe("x", options={"a": {1}})]), "recipes: options of x: expected plain types"),
    (lambda lab: run(lab, recipes=[Recipe("published")]), "recipes: expected at least one with a region"),
    (lambda lab: tune(lambda plan: None, REGIONS, {"decode": 1}), "build_graph: expected it to return a Built, got NoneType"),  # type: ignore[arg-type,return-value]
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arguments_are_named(lab: Lab, call: Callable[[Lab], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(lab)
    # What only the first graph can tell is told by the first graph.
    assert lab.built == ("build_graph to return" in message) and not lab.seen


def test_files_are_checked_before_anything_is_built(lab: Lab, tmp_path: Path) -> None:
    result, path = run(lab), tmp_path / "result.json"
    lab.built = 0
    contents: list[tuple[bytes, str]] = [(b"\xff\xfe", "codec can't decode"), (b"[" * 100_000, "recursion"), (b"{}", "'rows'"), (b"[1]", "mapping")]
    for field, wrong in (
        ("rows", []),
        ("rows", 5),
        ("key", [1]),
        ("key", {}),
        ("reason", 5),
        ("identity", None),
        ("censuses", {"a": 5}),
        ("ladders", ["ab"]),
        ("winner", "small"),
    ):
        contents.append((json.dumps({**json.loads(result.to_json()), field: wrong}).encode(), ""))
    for field, wrong in (
        ("seconds", [1]),
        ("seconds", {"total": "x"}),
        ("seconds", {"total": 1.0}),
        ("change", 5),
        ("change", {"total": [1]}),
        ("errors", None),
        ("beats_stock", "yes"),
        ("role", 5),
        ("recipe", {"name": "a", "reserve": "1"}),
    ):
        content = json.loads(result.to_json())
        content["rows"][1][field] = wrong
        contents.append((json.dumps(content).encode(), ""))
    for written, message in contents:
        path.write_bytes(written)
        with pytest.raises(ArgumentError, match=rf"^reuse: expected a file of TuneResult.to_json, or none yet, got .*result\.json.*{message}"):
            run(lab, reuse=path)
        assert path.read_bytes() == written
    with pytest.raises(ArgumentError, match="reuse: expected a file of TuneResult.to_json"):
        run(lab, reuse=tmp_path)
    for unwritable in (tmp_path / "none" / "x.json", path / "x.json"):
        with pytest.raises(ArgumentError, match="reuse: expected a file that can be written in an existing directory"):
            run(lab, reuse=unwritable)
    assert lab.built == 0
    with pytest.raises(ArgumentError, match="plot: expected a file that can be written in an existing directory"):
        pytest.importorskip("matplotlib", reason="pictures need the extra plot") and result.plot(tmp_path / "none" / "x.png")
    assert TuneResult.from_json(result.to_json()) == result


def test_numpy_numbers_are_numbers(lab: Lab) -> None:
    numbers = {"ladders": np.int64(2), "passes": np.int64(6), "cell_us": np.float32(4000), "seeds": [np.int64(1), 2], "device": np.int64(0)}
    assert run(lab, recipes=[SMALL], confirm=False, **numbers).winner.name == "stock"


def test_a_phase_may_give_the_reserve_back(lab: Lab) -> None:
    recipe = Recipe("gives back", "states", reserve=24 * MIB, suspend=("prefill",))
    arm = module._Arm(recipe, recipe.plan(REGIONS, properties=H200), lab.build(Plan("x")), {"prefill": 1, "decode": 1})
    limits: list[int] = []
    arm.built.run = lambda phase: limits.append(lab.fake.limits[1000])
    arm.prepare()
    arm.run_once()
    arm.teardown()
    arm.close()
    assert limits == [DEFAULT, 24 * MIB]


def test_the_usual_candidates() -> None:
    regions = {"live": Region(0, 64 * MIB), "pool": Region(0, 128 * MIB)}
    found = candidates(regions, H200, pool="pool", nodes=("advance",), options={"live": {"layout": "slot"}}, hints=[{"keep": 0.5}])
    names = [recipe.name for recipe in found]
    assert len(set(names)) == len(names) == 3 + 2 * 4 * 3 + 1
    assert found[0] == Recipe("published", "pool") and "only layout slot" in names and names[-1] == "only keep 0.5"
    assert {recipe.reserve for recipe in found if recipe.region} == {None, 7 * MIB, 12 * MIB, 25 * MIB, 39_321_600}
    small = candidates({"live": Region(0, 8 * MIB)}, H200)
    assert [recipe.name for recipe in small[2:]] == ["live, 7.0 MiB", "live, first 7.0 MiB", "live, 8.0 MiB"]
    assert candidates({"live": Region(0, 100)}, SimpleNamespace(persisting_l2_max=0)) == [Recipe("published", "live")]  # type: ignore[arg-type]


BAD_CANDIDATES: list[tuple[Callable[[], Any], str]] = [
    (lambda: candidates({}, H200), "regions: expected at least one, got none"),
    (lambda: candidates({"a": np.zeros(3)}, H200), "regions: expected a Region for a, got ndarray"),  # type: ignore[dict-item]
    (lambda: candidates(REGIONS, H200, nodes="gated"), "nodes: expected a sequence, got the text 'gated'"),
    (lambda: candidates(REGIONS, H200, nodes=[1]), "nodes: expected text, got int"),  # type: ignore[list-item]
    (lambda: candidates(REGIONS, H200, pool="typo"), "pool: expected one of states, pool, got 'typo'"),
    (lambda: candidates(REGIONS, H200, pool=""), "pool: expected one of states, pool, got ''"),
    (lambda: candidates(REGIONS, H200, options={"typo": {}}), "options: expected one of states, pool, got 'typo'"),
    (lambda: candidates(REGIONS, H200, options={"pool": 5}), "options: expected a mapping, got int"),  # type: ignore[dict-item]
    (lambda: candidates(REGIONS, H200, reserves=5), "reserves: expected a sequence, got int"),  # type: ignore[arg-type]
    (lambda: candidates(REGIONS, H200, reserves=[1.5]), "reserves: expected an integer, got float"),  # type: ignore[list-item]
    (lambda: candidates(REGIONS, H200, hints={"keep": 0.5}), "hints: expected a sequence, got dict"),  # type: ignore[arg-type]
    (lambda: candidates(REGIONS, H200, hints=["keep"]), "hints: expected a mapping, got str"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("call", "message"), BAD_CANDIDATES, ids=[message for _, message in BAD_CANDIDATES])
def test_candidates_of_bad_arguments_are_refused_by_name(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_what_an_option_means(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(SMALL.to_dict()))
    assert resolve("off", REGIONS).does_nothing and resolve("auto", REGIONS, properties=H200).does_nothing
    assert resolve(str(path), REGIONS, properties=H200) == SMALL.plan(REGIONS, properties=H200)
    measured = SimpleNamespace(winner=LARGE)
    assert resolve("auto", REGIONS, measure=lambda: measured, properties=H200).reserve == 39_321_600  # type: ignore[arg-type,return-value]
    with pytest.raises(ArgumentError, match="path: expected a readable JSON file, got on"):
        resolve("on", REGIONS)
