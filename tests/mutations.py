"""Break `gpukit.graphs` in named ways, one at a time, and see that a test fails: ``python -m tests.mutations [name ...]``.

Each mutation replaces one piece of a source file in a copy of the tree, where the tests named with it run. A mutation that no test kills is a
survivor, and the exit code says so. Those with a reason change nothing that a test could see.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESERVATION, WINDOW, INSTALL, CAPTURE = (f"gpukit/graphs/{name}.py" for name in ("reservation", "window", "install", "capture"))
AUDIT, DRIVER, TUNE, IDENTITY = (f"gpukit/graphs/{name}.py" for name in ("audit", "driver", "tune", "identity"))
STREAMS = "gpukit/streams.py"


class Mutation(NamedTuple):
    """What to replace where; `old` stands in the file exactly once. `tests` are the files that must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    reason: str = ""


_BOOKS = ("tests/graphs/test_reservation.py",)
_PLANS = ("tests/graphs/test_window.py",)
_GRAPHS = ("tests/graphs/test_install.py",)
_TUNING = ("tests/graphs/test_tune.py",)
_GATE = ("tests/graphs/test_identity.py",)
_DEVICES = ("tests/test_two_gpus.py",)

MUTATIONS = [
    Mutation("smallest instead of largest", RESERVATION, "return max((size for", "return min((size for", _BOOKS),
    Mutation(
        "the baseline counts as a request", RESERVATION, "target = table.target()", "target = max(table.target() or 0, table.baseline or 0)", _BOOKS
    ),
    Mutation(
        "the baseline is forgotten before it is restored",
        RESERVATION,
        ("        note = self._apply(device, table)\n        if not table.requests:\n"),
        (
            "        kept, table.baseline = table.baseline, table.baseline if table.requests else None\n"
            "        table.requests = table.requests or {0: kept}\n"
            "        note = self._apply(device, table)\n"
            "        table.requests.pop(0, None)\n"
            "        if not table.requests:\n"
        ),
        _BOOKS,
    ),
    Mutation("books keyed by size", RESERVATION, "return next(self._keys)", "return 1", _BOOKS),
    Mutation(
        "one book for all devices",
        RESERVATION,
        "table = self._tables.setdefault(device, _Table())",
        "table = self._tables.setdefault(0, _Table())",
        _BOOKS,
    ),
    Mutation(
        "a refused request stays on record",
        RESERVATION,
        ("                table.requests.pop(key, None)\n                if old is not None:"),
        "                if old is not None:",
        _BOOKS,
    ),
    Mutation(
        "a refused request drops the old one",
        RESERVATION,
        ("                if old is not None:\n                    table.requests[key] = old\n"),
        "",
        _BOOKS,
    ),
    Mutation(
        "a refused first request leaves its baseline",
        RESERVATION,
        ("                if recorded:\n                    table.baseline = None\n                raise"),
        "                raise",
        _BOOKS,
    ),
    Mutation(
        "any refused request takes the baseline back",
        RESERVATION,
        ("                if recorded:\n                    table.baseline = None\n                raise"),
        ("                table.baseline = None\n                raise"),
        _BOOKS,
    ),
    Mutation(
        "the baseline is kept for ever",
        RESERVATION,
        ("            table.baseline = table.told = table.granted = None\n        return note"),
        ("            table.told = table.granted = None\n        return note"),
        _BOOKS,
    ),
    Mutation(
        "release forgets to settle",
        RESERVATION,
        ("        table.requests.pop(key, None)\n        return self._settle(device, table)"),
        ("        table.requests.pop(key, None)\n        return ''"),
        _BOOKS,
    ),
    Mutation(
        "withdraw before the new request",
        RESERVATION,
        "                table.requests[key] = size\n",
        (
            "                self._release(device, key)\n"
            "                if table.baseline is None:\n"
            "                    table.baseline = self._driver.limits[device]\n"
            "                table.requests[key] = size\n"
        ),
        _BOOKS,
    ),
    Mutation(
        "write without switching",
        RESERVATION,
        ("        with self._driver.switch(device):\n            self._driver.write(target)"),
        ("        if True:\n            self._driver.write(target)"),
        _BOOKS,
    ),
    Mutation(
        "write although the switch failed",
        RESERVATION,
        ("        with self._driver.switch(device):\n            self._driver.write(target)"),
        (
            "        try:\n"
            "            self._driver.switch(device).__enter__()\n"
            "        except DeviceError:\n"
            "            pass\n"
            "        if True:\n"
            "            self._driver.write(target)"
        ),
        _BOOKS,
    ),
    Mutation("no lock", RESERVATION, ("            with self._lock:\n                yield"), "            yield", _BOOKS),
    Mutation("the grant is not read back", RESERVATION, "table.granted = self._driver.read()", "table.granted = target", _BOOKS),
    Mutation(
        "no bytes release",
        RESERVATION,
        ('        if size < 1:\n            raise ArgumentError(f"size'),
        ('        if size < 1:\n            return self.release()\n            raise ArgumentError(f"size'),
        _BOOKS,
    ),
    Mutation(
        "a moved handle still releases",
        RESERVATION,
        ('            self._closed, self._size, self._granted = "moved", None, None\n            self._finalizer.detach()'),
        '            self._closed, self._size, self._granted = "moved", None, None',
        _BOOKS,
    ),
    Mutation(
        "a closed handle still works",
        RESERVATION,
        ('        if self._closed:\n            raise ArgumentError(f"reservation: expected an open'),
        ('        if False:\n            raise ArgumentError(f"reservation: expected an open'),
        _BOOKS,
    ),
    Mutation(
        "inner suspended ends the outer",
        RESERVATION,
        'note = self._limits.resume(self.device, self._key) if self._suspensions == 0 else ""',
        "note = self._limits.resume(self.device, self._key)",
        _BOOKS,
    ),
    Mutation(
        "suspended is not undone after an exception",
        RESERVATION,
        ("            yield\n        finally:\n            with self._state:\n                self._suspensions -= 1"),
        (
            "            yield\n"
            "        except BaseException:\n"
            "            raise\n"
            "        else:\n"
            "            with self._state:\n"
            "                self._suspensions -= 1"
        ),
        _BOOKS,
    ),
    Mutation(
        "collected while locked is lost",
        RESERVATION,
        ("        self._collected.append((device, key))\n        self._drain()"),
        (
            "        if self._lock.acquire(blocking=False):\n"
            "            self._lock.release()\n"
            "            self._collected.append((device, key))\n"
            "            self._drain()"
        ),
        _BOOKS,
    ),
    Mutation(
        "collection waits for the lock",
        RESERVATION,
        "self._lock.acquire(blocking=False)",
        "self._lock.acquire(timeout=20)",
        _BOOKS,
        "slow, not wrong, until the test's own deadline",
    ),
    Mutation("a forked child restores", RESERVATION, "os.register_at_fork(after_in_child=_LIMITS.forget)\n", "", _BOOKS),
    Mutation("nothing is restored at exit", RESERVATION, "atexit.register(_LIMITS.restore_all)\n", "", _BOOKS),
    Mutation("guard by the reserve limit", WINDOW, "    if size > known.access_window_max:", "    if size > known.persisting_l2_max:", _PLANS),
    Mutation("guard one byte early", WINDOW, "    if size > known.access_window_max:", "    if size >= known.access_window_max:", _PLANS),
    Mutation("no guard under MIG", WINDOW, "if known.persisting_l2_max == 0 or known.access_window_max == 0:", "if False:", _PLANS),
    Mutation(
        "the guard only drops the window",
        WINDOW,
        "return Plan(**common, guarded=reason)",
        "return Plan(**common, guarded=reason, reserve=known.persisting_l2_max)",
        _PLANS,
    ),
    Mutation("the guard speaks every time", WINDOW, ("        if _messages > 1:\n            return\n"), "", _PLANS),
    Mutation("the guard is silent", WINDOW, "    print(text, file=sys.stderr, flush=True)", "    pass", _PLANS),
    Mutation("ratio always one", WINDOW, "ratio = reserve / region.size if region.size > reserve else 1.0", "ratio = 1.0", _PLANS),
    Mutation(
        "reserve ignores what is wanted",
        WINDOW,
        "known.persisting_l2_max, region.size if wanted is None else wanted)",
        "known.persisting_l2_max)",
        _PLANS,
    ),
    Mutation("dead bytes count as held", WINDOW, "* self.live_in(window) / self.live_bytes", "* window.size / self.live_bytes", _PLANS),
    Mutation(
        "the window stays after the capture",
        INSTALL,
        ("    finally:\n        driver.set_stream_window(handle, device, before)"),
        ("    finally:\n        pass"),
        _GRAPHS,
    ),
    Mutation(
        "the window stays after an exception",
        INSTALL,
        ("        yield\n    finally:\n        driver.set_stream_window(handle, device, before)"),
        ("        yield\n    except BaseException:\n        raise\n    else:\n        driver.set_stream_window(handle, device, before)"),
        _GRAPHS,
    ),
    Mutation(
        "an older window is wiped",
        INSTALL,
        "driver.set_stream_window(handle, device, before)",
        "driver.set_stream_window(handle, device, None)",
        _GRAPHS,
    ),
    Mutation("windows on a capturing stream", INSTALL, "    if devices.is_capturing(handle):", "    if False:", _GRAPHS),
    Mutation(
        "the reserve stays after an exception",
        INSTALL,
        "                reservation.close()\n",
        "                pass\n",
        _GRAPHS,
        "the dropped handle is collected, which gives its request back",
    ),
    Mutation("chosen nodes and the stream too", INSTALL, "plan.window if plan.nodes is None else None", "plan.window", _GRAPHS),
    Mutation("a misspelled node is nothing", INSTALL, "if isinstance(nodes, tuple) and not chosen:", "if False:", _GRAPHS),
    Mutation(
        "the graph does not keep its reserve",
        CAPTURE,
        "graph.keep(around.enter_context(apply(plan, handle)))",
        "around.enter_context(apply(plan, handle))",
        _GRAPHS,
    ),
    Mutation(
        "windows set after instantiation only",
        CAPTURE,
        ("        count = set_windows(self, window, nodes, device=self.device, guard=guard)\n        self._instantiate()"),
        "        count = set_windows(self, window, nodes, device=self.device, guard=guard)",
        _GRAPHS,
    ),
    Mutation("an update forgets that windows differ", CAPTURE, "if windows_of(self) == windows_of(other):", "if True:", _GRAPHS),
    Mutation("the audit skips child graphs", DRIVER, "            yield from walk(devices.call(", "            list(devices.call(", _GRAPHS),
    Mutation("no guard for windows on nodes", INSTALL, "if guard and window is not None and admit(window, device) is None:", "if False:", _GRAPHS),
    Mutation("no guard for windows on streams", INSTALL, "        window = admit(window, device)", "        pass", _GRAPHS),
    Mutation("the null arm is not judged", TUNE, "        null=NULL_NAME,\n", "        null=None,\n", _TUNING),
    Mutation("the structural zero is not judged", TUNE, "        structural_zero=ZERO_NAME,\n", "        structural_zero=None,\n", _TUNING),
    Mutation("the spread of the ladders does not count", TUNE, "ranges[TOTAL].beats_base and -ranges", "-ranges", _TUNING),
    Mutation("the resolution of the controls does not count", TUNE, " and -ranges[TOTAL].high > control_limit", "", _TUNING),
    Mutation("the best is not confirmed", TUNE, "if again.beats_stock:", "if True:", _TUNING),
    Mutation("every candidate's reserve at once", TUNE, "dataclasses.replace(plan, reserve=None)", "plan", _TUNING),
    Mutation("the dead buffer leaks", TUNE, "devices.driver().cuMemFree(self._dead)", "pass", _TUNING),
    Mutation(
        "graphs are left open",
        TUNE,
        ("            if isinstance(work, Graph):\n                work.close()"),
        "            pass",
        _TUNING,
        "a dropped graph closes itself, as soon as the collector comes by",
    ),
    Mutation("a result of another geometry is used again", TUNE, '"geometry": dict(geometry),', '"geometry": {},', _TUNING),
    Mutation("a suspended phase keeps its reserve", TUNE, "phase in self.plan.suspend", "False", _TUNING),
    Mutation(
        "decode alone is judged",
        TUNE,
        "TOTAL in ranges and ranges[TOTAL].beats_base and -ranges[TOTAL].high",
        '"decode" in ranges and ranges["decode"].beats_base and -ranges["decode"].high',
        _TUNING,
    ),
    Mutation("stock is not compared with itself", IDENTITY, "    if again != digests[stock]:", "    if False:", _GATE),
    Mutation(
        "outputs need not depend on inputs",
        IDENTITY,
        "    if (different := len(set(again.values()))) < len(inputs):",
        "    if (different := len(set(again.values()))) < 0:",
        _GATE,
    ),
    Mutation("digests of bytes alone", IDENTITY, 'found.update(f"{dtype}{tuple(shape)}".encode())', "pass", _GATE),
    Mutation("the audit does not compare ratios", AUDIT, "return same and abs(found.ratio - expected.ratio) < 1e-6", "return same", _GRAPHS),
    Mutation(
        "the audit overlooks nodes that should have no window",
        AUDIT,
        "plan.window if chosen else None",
        "plan.window if chosen else node.window",
        _GRAPHS,
    ),
    Mutation("a stream of another device is taken", STREAMS, "if devices.count() > 1:", "if False:", _DEVICES),
]

SURVIVORS = {mutation.name: mutation.reason for mutation in MUTATIONS if mutation.reason}


def killed(mutation: Mutation, tree: Path) -> bool:
    """Whether a test fails on the mutated copy."""
    file = tree / mutation.file
    source = (ROOT / mutation.file).read_text()
    if source.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.name}: expected its text once in {mutation.file}, found it {source.count(mutation.old)} times")
    file.write_text(source.replace(mutation.old, mutation.new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "60", *mutation.tests]
    run = subprocess.run(
        command, cwd=tree, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    )
    file.write_text(source)
    return run.returncode == 1


def main(names: list[str]) -> int:
    """Apply the named mutations, or all, and report."""
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    unexpected = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for part in ("gpukit", "tests"):
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        for part in ("pyproject.toml", "conftest.py"):
            shutil.copy(ROOT / part, tree / part)
        for mutation in chosen:
            dead = killed(mutation, tree)
            by_construction = mutation.name in SURVIVORS
            unexpected += not dead and not by_construction
            verdict = "killed" if dead else f"survives by construction: {mutation.reason}" if by_construction else "SURVIVES"
            print(f"{mutation.name}: {verdict}", flush=True)
    print(f"{len(chosen)} mutations, {unexpected} unexpected survivors")
    return 1 if unexpected else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
