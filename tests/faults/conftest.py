"""Tests marked ``soak`` are run by hand: ``pytest -m soak tests/faults``."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "soak" in str(config.option.markexpr):
        return
    skip = pytest.mark.skip(reason="by hand: run with -m soak")
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(skip)
