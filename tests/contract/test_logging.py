"""Ordinary logging decides which lines of ranks are printed."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from rankzero.run.lines import print_line

LINES = ["[0] loss 0.3", "[1] WARNING:root:the learning rate is high", "[1] ERROR: no such file"]


@pytest.fixture
def ranks() -> Iterator[logging.Logger]:
    """The logger of ranks' lines, which is afterwards as it was."""
    logger = logging.getLogger("rankzero.ranks")
    before = logger.level, logger.propagate, list(logger.filters), list(logger.handlers)
    yield logger
    logger.level, logger.propagate, logger.filters[:], logger.handlers[:] = before
    logger.manager._clear_cache()


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    for line in LINES:
        print_line(line, "nightly")
    return capsys.readouterr().out.splitlines()


def test_lines_are_printed_whatever_the_root_level_is(
    ranks: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)
    # As logging.config does to loggers that it does not know. One below a logger that it names is as at the beginning.
    monkeypatch.setattr(ranks, "disabled", True)
    ranks.handlers[:], ranks.propagate = [], True
    ranks.setLevel(logging.NOTSET)
    assert printed(capsys) == LINES
    ranks.addFilter(lambda record: "ERROR" not in record.getMessage())
    assert printed(capsys) == LINES[:2]


def test_a_handler_gets_lines_with_their_run(
    ranks: logging.Logger, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    ranks.handlers[:], ranks.propagate, ranks.disabled = [caplog.handler], False, True
    ranks.setLevel(logging.NOTSET)
    assert printed(capsys) == []
    assert [record.getMessage() for record in caplog.records] == LINES
    assert {vars(record)["run_id"] for record in caplog.records} == {"nightly"}
    ranks.setLevel(logging.WARNING)
    assert (printed(capsys), len(caplog.records)) == ([], len(LINES))
    ranks.handlers.clear()
    ranks.setLevel(logging.INFO)
    assert printed(capsys) == []
