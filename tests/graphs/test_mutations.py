"""The mutations of `tests.mutations` still have something to replace. Running them takes minutes and is a command of its own."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_text_to_replace_stands_there_once(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text()
    assert source.count(mutation.old) == 1 and mutation.new != mutation.old
    compile(source.replace(mutation.old, mutation.new), mutation.file, "exec")


def test_names_are_different() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 60
