"""The command line from outside: what it prints where, the files it writes, and the exit code of every way a run can end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpukit import cli
from gpukit.decode import replay as replay_module
from gpukit.decode.scheduler import Batch
from gpukit.decode.unified import UnifiedLane

runner = CliRunner()
SMALL = ["decode", "--backend", "numpy", "--requests", "12", "--batch", "4", "--pages", "300", "--swa-pages", "60"]
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6,374,14\r\n2023-11-16 18:15:50.9,396,9"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def plant(monkeypatch: pytest.MonkeyPatch, number: int, fault: object) -> None:
    """Let something happen at the end of one round."""

    def stage(batch: Batch, lane: UnifiedLane) -> None:
        if batch.number == number:
            fault(lane)  # type: ignore[operator]

    monkeypatch.setitem(replay_module.STAGES, "unified", [*replay_module.STAGES["unified"], stage])


def test_a_drawn_trace_runs_clean():
    result = runner.invoke(cli.app, SMALL)
    assert result.exit_code == 0, result.output
    assert "12 of 12" in result.stdout and "no violations" in result.stdout and result.stderr == ""
    assert "DecodeMemory.step" in result.stdout and "split into 300 + 60 pages" in result.stdout


def test_split_memory_runs_clean():
    result = runner.invoke(cli.app, [*SMALL, "--memory", "split"])
    assert result.exit_code == 0, result.output
    assert "12 of 12" in result.stdout and "no violations" in result.stdout and "metadata.decode_metadata" in result.stdout


def test_a_trace_file_runs_clean(trace):
    result = runner.invoke(cli.app, ["decode", "--backend", "numpy", "--trace", trace])
    assert result.exit_code == 0, result.output
    assert "2 of 2" in result.stdout and "770" in result.stdout and "23" in result.stdout


def test_every_option_reaches_the_run(trace, tmp_path):
    path = tmp_path / "report.json"
    numbers = {"requests": 2, "seed": 3, "page_size": 16, "window": 32, "batch": 5, "pages": 70, "swa_pages": 9, "rounds": 4}
    numbers |= {"full_layers": 3, "swa_layers": 7}
    arguments = [word for name, value in numbers.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = ["--trace", trace, "--backend", "numpy", "--check", "7", "--memory", "unified", "--debug-mirror", "--json", str(path)]
    result = runner.invoke(cli.app, ["decode", *arguments, *words])
    assert result.exit_code == 0, result.output
    given = {"trace": trace, "backend": "numpy", "check_every": 7, "memory": "unified", "debug_mirror": True}
    assert json.loads(path.read_text())["options"] == numbers | given


def test_the_defaults_are_those_of_the_options(monkeypatch):
    from gpukit import decode

    class Stop(Exception):
        pass

    def stop(options: decode.DecodeOptions) -> None:
        assert options == decode.DecodeOptions()
        raise Stop

    monkeypatch.setattr(decode, "Replay", stop)
    assert isinstance(runner.invoke(cli.app, ["decode"]).exception, Stop)


def test_json_on_standard_output_is_alone_there():
    result = runner.invoke(cli.app, [*SMALL, "--json", "-"])
    fields = json.loads(result.stdout)
    assert (result.exit_code, fields["ok"], fields["finished"]) == (0, True, 12)
    assert "12 of 12" in result.stderr


def test_json_and_picture_go_to_files(tmp_path):
    pytest.importorskip("matplotlib")
    report, picture = tmp_path / "report.json", tmp_path / "pages.png"
    result = runner.invoke(cli.app, [*SMALL, "--json", str(report), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert json.loads(report.read_text())["finished"] == 12
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_violation_is_named_and_fails(monkeypatch, tmp_path):
    plant(monkeypatch, 3, lambda lane: lane.memory.state.locations.__setitem__((0, 0), 5))
    result = runner.invoke(cli.app, [*SMALL, "--json", str(tmp_path / "report.json")])
    assert result.exit_code == 1
    assert "violation: translation after round 3: full locations[0]: expected" in " ".join(result.stdout.split())
    fields = json.loads((tmp_path / "report.json").read_text())
    assert (fields["ok"], fields["stopped"], fields["violations"][0]["name"]) == (False, "violation", "translation")


def test_an_interrupt_leaves_a_partial_report(monkeypatch, tmp_path):
    def interrupt(lane: UnifiedLane) -> None:
        raise KeyboardInterrupt

    plant(monkeypatch, 5, interrupt)
    result = runner.invoke(cli.app, [*SMALL, "--json", str(tmp_path / "report.json")])
    assert result.exit_code == 130
    assert "partial report: interrupted" in result.stdout
    fields = json.loads((tmp_path / "report.json").read_text())
    assert (fields["partial"], fields["stopped"], fields["rounds"]) == (True, "interrupt", 5)


def test_a_limit_of_rounds_is_no_failure():
    result = runner.invoke(cli.app, [*SMALL, "--rounds", "3"])
    assert result.exit_code == 0 and "partial report: the limit of rounds was reached" in result.stdout


def test_checks_can_be_turned_off():
    result = runner.invoke(cli.app, [*SMALL, "--check", "off"])
    assert result.exit_code == 0 and "nothing was checked" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size", "0"], "page_size: expected a number from 1 to"),
        (["--pages", "x"], "Invalid value for '--pages'"),
        (["--memory", "shared"], "memory: expected one of unified, split, got 'shared'"),
        (["--memory", "split", "--debug-mirror"], "debug_mirror: expected unified memory"),
        (["--backend", "cuda"], "backend: expected one of auto, numpy, gpu, got 'cuda'"),
        (["--check", "0"], "check: expected a number of rounds from 1 or off, got '0'"),
        (["--check", "never"], "check: expected a number of rounds from 1 or off, got 'never'"),
        (["--check", "9" * 5000], "check: expected a number of rounds from 1 or off"),
        (["--trace", "absent.csv"], "trace: expected a readable CSV file, got absent.csv"),
        (["--json", "absent/report.json"], "json: expected a file in an existing directory, got absent/report.json"),
        (["--plot", "absent/pages.png"], "plot: expected a file in an existing directory, got absent/pages.png"),
        (["--plot", "pages.bmp"], "plot: expected a file name ending in"),
        (["--json", "."], "json: expected a file in an existing directory, got ."),
        (["--batch", "65537"], "batch: expected a number from 1 to 65536, got 65537"),
        (["--frames", "3"], "No such option"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else None,
)
def test_bad_arguments_are_refused_in_one_line(monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(cli.app, [*SMALL, *arguments])
    assert result.exit_code == 2 and result.stdout == ""
    assert message in " ".join(result.stderr.split())


def test_too_little_memory_is_a_bad_argument(monkeypatch):
    def refuse(*_: object) -> None:
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setitem(replay_module.LANES, "unified", refuse)
    result = runner.invoke(cli.app, SMALL)
    assert result.exit_code == 2 and "expected sizes that fit into memory, got Unable to allocate 9 TiB" in result.stderr


def test_a_bad_trace_names_line_and_column(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(TRACE + "\nt,5,many\n")
    result = runner.invoke(cli.app, ["decode", "--trace", str(path)])
    assert result.exit_code == 2
    assert f"gpukit: trace {path}, line 4, column GeneratedTokens: expected a whole number" in result.stderr


def test_progress_is_shown_only_on_a_terminal_and_only_on_long_runs(monkeypatch):
    import io

    from rich.console import Console

    def shown(seconds: float) -> str:
        text = io.StringIO()
        console = Console(file=text, force_terminal=True, width=100)
        monkeypatch.setattr(cli, "console", lambda stderr=False: console)
        monkeypatch.setattr(cli, "SECONDS_BEFORE_PROGRESS", seconds)
        with cli._progress() as progress:
            assert progress is not None
            progress(1, 4, 17)
        return text.getvalue()

    assert "17 rounds" in shown(-1.0) and "1/4" in shown(-1.0)
    assert "rounds" not in shown(1000.0)
    monkeypatch.setattr(cli, "console", lambda stderr=False: Console(file=io.StringIO()))
    with cli._progress() as progress:
        assert progress is None


def test_commands_are_listed():
    result = runner.invoke(cli.app, ["--help"])
    assert result.exit_code == 0 and "decode" in result.stdout and "info" in result.stdout


def test_importing_the_command_line_is_light():
    heavy = {"rich.progress", "matplotlib", "cupy", "torch", "numba", "cuda", "gpukit.decode", "gpukit.info"}
    program = f"import sys, gpukit.cli; print(sorted({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_run_imports_no_gpu_library_and_no_matplotlib():
    program = (
        "import sys; from typer.testing import CliRunner; from gpukit import cli;"
        f"assert CliRunner().invoke(cli.app, {SMALL!r}).exit_code == 0;"
        "print(sorted({'matplotlib', 'cupy', 'torch', 'numba'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
