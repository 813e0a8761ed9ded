"""What the docstrings of airflow_rankzero show is true."""

from __future__ import annotations

import pytest
from tests.conftest import ROOT
from tests.docstrings import modules_with_examples, run_examples


@pytest.mark.parametrize("name", modules_with_examples(ROOT / "airflow_provider" / "airflow_rankzero"))
def test_the_examples_are_true(name: str) -> None:
    run_examples(name)
