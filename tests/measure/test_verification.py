"""A ladder's file is accepted exactly as the harness wrote it. Any single change is refused by name, even when the digest is made to fit again."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpukit.errors import ArgumentError
from gpukit.measure import Ladder, Verification, verify
from gpukit.measure.ladder_file import join
from tests.helpers import ladders

# One folder for all examples: hypothesis would share a fixture's among them anyway.
FOLDER = tempfile.TemporaryDirectory()


def verified(content: bytes) -> Verification:
    path = Path(FOLDER.name) / "changed.csv"
    path.write_bytes(content)
    return verify(path)


def kinds(content: bytes) -> set[str]:
    return {problem.kind for problem in verified(content).problems}


def written(**options: Any) -> bytes:
    path = Path(FOLDER.name) / "written.csv"
    path.unlink(missing_ok=True)
    return ladders.write(path, ladders.noisy(0, 0.1, rounds=678), counters=["rounds"], **options).read_bytes()


def lines_of(content: bytes) -> list[str]:
    return content.decode().split("\n")[:-1]


def with_field(line: str, column: int, text: str) -> str:
    fields = next(csv.reader([line]))
    return join([*fields[:column], text, *fields[column + 1 :]])


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6).filter(lambda name: name.isprintable() and name == name.strip())
FILES = st.builds(
    lambda arms, passes, tag: written(arms=arms, passes=passes, tag=tag),
    st.lists(
        st.one_of(NAMES, st.sampled_from(["a,b", 'say "x"', "# start ", "# done {}", "arm"])).filter(lambda name: name == name.strip()),
        min_size=2,
        max_size=5,
        unique=True,
    ),
    st.integers(3, 6),
    st.one_of(st.just(""), NAMES),
)


@pytest.mark.parametrize(("passes", "arms", "cells"), [(8, 6, 48), (7, 7, 49), (8, 7, 56), (8, 4, 32)])
def test_known_counts(passes, arms, cells):
    content = written(arms=[f"arm {number}" for number in range(arms)], passes=passes)
    assert str(verified(content)) == f"one connected run: {passes} passes × {arms} arms = {cells} cells"


def test_two_start_lines_and_thirty_cells_after_done_are_refused_for_that():
    lines = lines_of(written(passes=8))
    found = verified("".join(f"{line}\n" for line in [*lines, lines[0], *lines[2:32]]).encode())
    assert not found.ok
    assert {"second start line", "rows after done"} == {problem.kind for problem in found.problems}
    assert "30 cells and 1 marked lines follow the done line" in str(found) and "line 36: second start line" in str(found)


@settings(max_examples=25, deadline=None)
@given(FILES)
def test_what_the_harness_wrote_is_one_connected_run(content):
    assert verified(content).ok, str(verified(content))


def dropped(lines: list[str], at: int, other: int) -> tuple[list[str], set[str]]:
    return lines[:at] + lines[at + 1 :], {"gap"}


def repeated(lines: list[str], at: int, other: int) -> tuple[list[str], set[str]]:
    return [*lines[:other], lines[at], *lines[other:]], {"repeat"}


def swapped(lines: list[str], at: int, other: int) -> tuple[list[str], set[str]]:
    lines = list(lines)
    lines[at], lines[other] = lines[other], lines[at]
    return lines, {"out of order", "clock"} if at != other else set()


def clock_back(lines: list[str], at: int, other: int) -> tuple[list[str], set[str]]:
    return [*lines[:at], with_field(lines[at], 3, str(5000 + 1000 * (at - 2) - 1)), *lines[at + 1 :]], {"clock"}


def second_start(lines: list[str], at: int, other: int) -> tuple[list[str], set[str]]:
    return [*lines[:at], lines[0], *lines[at:]], {"second start line"}


def second_columns(lines: list[str], at: int, other: int) -> tuple[list[str], set[str]]:
    return [*lines[:at], lines[1], *lines[at:]], {"column row"}


def unknown_arm(lines: list[str], at: int, other: int) -> tuple[list[str], set[str]]:
    return [*lines[:at], with_field(lines[at], 2, "nobody"), *lines[at + 1 :]], {"unknown arm", "gap"}


def column_more(lines: list[str], at: int, other: int) -> tuple[list[str], set[str]]:
    return [*lines[:at], lines[at] + ",1", *lines[at + 1 :]], {"columns"}


def column_less(lines: list[str], at: int, other: int) -> tuple[list[str], set[str]]:
    return [*lines[:at], lines[at].rpartition(",")[0], *lines[at + 1 :]], {"columns"}


def blank(lines: list[str], at: int, other: int) -> tuple[list[str], set[str]]:
    return [*lines[:at], "", *lines[at:]], {"columns", "unknown slot"}


def no_number(lines: list[str], at: int, other: int) -> tuple[list[str], set[str]]:
    return [*lines[:at], with_field(lines[at], 4 + other % 2, ("nan", "", "1e999", "0x1", "1_0")[other % 5]), *lines[at + 1 :]], {"value"}


MUTATIONS = (
    *(dropped, repeated, swapped, clock_back, second_start, second_columns),
    *(unknown_arm, column_more, column_less, blank, no_number),
)


@settings(max_examples=120, deadline=None)
@given(FILES, st.sampled_from(MUTATIONS), st.data())
def test_every_mutation_of_a_row_is_refused_by_name_though_the_digest_fits(content, mutation: Callable[..., Any], data):
    lines = lines_of(content)
    rows = st.integers(2, len(lines) - 2)
    changed, expected = mutation(lines, data.draw(rows), data.draw(rows))
    found = kinds(ladders.seal(changed))
    assert expected <= found and bool(found) == bool(expected)
    assert bool(kinds("".join(f"{line}\n" for line in changed).encode())) == bool(expected)


@settings(max_examples=50, deadline=None)
@given(FILES, st.data())
def test_an_edited_digit_of_pass_position_or_arm_is_refused_though_the_digest_fits(content, data):
    lines = lines_of(content)
    at, column = data.draw(st.integers(2, len(lines) - 2)), data.draw(st.sampled_from([0, 1]))
    old = next(csv.reader([lines[at]]))[column]
    lines[at] = with_field(lines[at], column, data.draw(st.sampled_from([*(set("0123456789") - {old}), f"0{old}", f" {old}", f"+{old}", "", "٣"])))
    assert kinds(ladders.seal(lines)) & {"unknown slot", "repeat"}


def test_every_cut_is_truncated():
    content = written(passes=3, arms=["stock", "window"])
    assert all("truncated" in kinds(content[:end]) for end in range(len(content)))
    assert kinds(content + b"0") == kinds(content + content[:5]) == {"truncated"}


def test_a_cut_does_not_call_the_rest_a_gap():
    lines = lines_of(written(passes=3))
    assert kinds("".join(f"{line}\n" for line in lines[:8]).encode()) == {"truncated"}


def test_lines_that_are_no_rows_must_stand_where_they_do():
    lines = lines_of(written(passes=3))
    text = [f"{line}\n" for line in lines]

    def kinds_of(changed: list[str]) -> set[str]:
        return kinds("".join(changed).encode())

    assert kinds_of(text[1:]) == {"start line"}
    assert "column row" in kinds_of([text[0], *text[2:]])
    assert kinds_of(text[:-1]) == {"truncated"}
    assert kinds_of([*text, text[-1]]) == {"rows after done"}
    assert kinds_of([*text, text[5]]) == {"rows after done"}
    assert {"rows after done", "gap"} <= kinds_of([*text[:-2], text[-1], text[-2]])
    assert "start line" in kinds_of([text[1], text[0], *text[2:]])
    assert "column row" in kinds_of([text[0], text[2], text[1], *text[3:]])
    assert kinds_of([*text[:-1], text[-1].replace('"cells": 12', '"cells": 11')]) == {"done line"}


@settings(max_examples=80, deadline=None)
@given(FILES, st.data())
def test_any_edited_byte_is_refused(content, data):
    at = data.draw(st.integers(0, len(content) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[at]))
    assert not verified(content[:at] + bytes([byte]) + content[at + 1 :]).ok


def test_a_limit_raised_after_the_run_breaks_the_digest():
    content = written(passes=3)
    assert kinds(content.replace(b'"noise_limit": 0.2', b'"noise_limit": 0.9')) == {"digest"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"format": 1', '"format": 2'),
        ('"passes": 3', '"passes": 2'),
        ('"passes": 3', '"passes": 3000000000'),
        ('"passes": 3', '"passes": "3"'),
        ('"base": "stock"', '"base": "nobody"'),
        ('"base": "stock"', '"base": ["stock"]'),
        ('"arms": ["stock"', '"arms": [["stock"]'),
        ('"rule": "rotate', '"rule": "shuffle'),
        ('"tag"', '"label"'),
        ('"clock_ns": 5000', '"clock_ns": 5000.0'),
        ('"clock_ns": 5000', '"clock_ns": true'),
        ("}}", "}"),
    ],
)
def test_a_start_line_that_does_not_describe_a_ladder_is_refused(old, new):
    lines = lines_of(written(passes=3))
    assert old in lines[0]
    assert "start line" in kinds(ladders.seal([lines[0].replace(old, new), *lines[1:]]))


def test_bytes_that_are_no_text_are_refused():
    assert kinds(b"") == {"truncated", "start line"}
    assert not verified(b"\x00\xff\n" * 9).ok
    assert not verified(b"# start " + b"[" * 100_000 + b"\n").ok


def test_a_long_list_of_problems_is_cut_in_the_text_only():
    lines = lines_of(written(passes=8))
    found = verified(ladders.seal(lines[:2] + lines[20:-1]))
    assert len(found.problems) == 18 and str(found).endswith("and 12 more") and found.to_dict()["verdict"] == str(found)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ArgumentError, match="path: expected a readable ladder file, got .*nowhere"):
        verify(tmp_path / "nowhere.csv")


def test_an_interrupted_run_leaves_a_truncated_file(tmp_path):
    def cell(run):
        if len(seen) == 5:
            raise KeyboardInterrupt
        seen.append(run())
        return {"seconds": 1.0}

    seen: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        Ladder({"a": int, "b": int}, cell, passes=4, warmup=0).run(tmp_path / "cut.csv")
    found = verify(tmp_path / "cut.csv")
    assert (found.cells, [problem.kind for problem in found.problems]) == (5, ["truncated"])
