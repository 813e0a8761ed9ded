"""Lines of ranks in the log of their task."""

import logging

import pytest


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("[0] loss 0.3", logging.INFO),
        ("[0] DEBUG:mine:stays visible", logging.INFO),
        ("[12] WARNING:root:the learning rate is high", logging.WARNING),
        ("[1] ERROR: no such file", logging.ERROR),
        ("[1] 2026-01-02 03:04:05,678 CRITICAL mine: full", logging.CRITICAL),
        ("[1] [ERROR] no such file", logging.ERROR),
        ("[1] no ERROR at all", logging.INFO),
        ("[1] ERRORS are counted", logging.INFO),
    ],
)
def test_a_line_has_the_level_that_it_begins_with(caplog: pytest.LogCaptureFixture, line: str, level: int) -> None:
    from airflow_rankzero import tries

    caplog.set_level(logging.INFO)
    tries.show_line(logging.getLogger("task"), line)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(level, line)]


@pytest.mark.parametrize("word", ["::group::", "::endgroup::"])
def test_a_line_of_a_rank_opens_and_ends_no_group(caplog: pytest.LogCaptureFixture, word: str) -> None:
    from airflow_rankzero import tries

    caplog.set_level(logging.INFO)
    tries.show_line(logging.getLogger("task"), f"[0] {word} of a rank")
    assert word not in caplog.text
    assert caplog.records[0].getMessage().replace("\u200b", "") == f"[0] {word} of a rank"
