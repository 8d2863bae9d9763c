"""Every notebook runs from top to bottom; on a machine without a GPU on the CPU backend."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.py"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path) -> None:
    jupytext = pytest.importorskip("jupytext", reason="notebooks need the extra notebooks")
    nbclient = pytest.importorskip("nbclient", reason="notebooks need the extra notebooks")
    document = jupytext.read(notebook)
    nbclient.NotebookClient(document, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(notebook.parent.parent)}}).execute()
