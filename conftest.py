"""What every docstring example and every test may use."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    import numpy

    doctest_namespace["np"] = numpy
