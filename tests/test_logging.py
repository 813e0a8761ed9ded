"""Ordinary logging decides which lines of ranks are printed, and the caller's level holds in the ranks."""

from __future__ import annotations

import logging
import logging.config
from collections.abc import Iterator

import pytest
from tests.conftest import of_ranks

from rankzero import InvalidJobError, Launcher, WorkerFailedError
from rankzero.run.printing import print_line

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
    # As logging.config does to loggers that it does not know.
    monkeypatch.setattr(ranks, "disabled", True)
    assert printed(capsys) == LINES


@pytest.mark.parametrize(("level", "count"), [(logging.WARNING, 2), (logging.ERROR, 1), (logging.CRITICAL + 1, 0)])
def test_a_level_silences_lines(
    ranks: logging.Logger, capsys: pytest.CaptureFixture[str], level: int, count: int
) -> None:
    ranks.setLevel(level)
    assert printed(capsys) == LINES[len(LINES) - count :]


def test_a_handler_gets_lines_with_level_and_run(
    ranks: logging.Logger, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    ranks.handlers[:] = [caplog.handler]
    assert printed(capsys) == []
    levels = [logging.INFO, logging.WARNING, logging.ERROR]
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == list(zip(levels, LINES, strict=True))
    assert {vars(record)["run_id"] for record in caplog.records} == {"nightly"}


@pytest.mark.parametrize("level", [15, 5])
def test_a_level_of_the_caller_may_have_any_number_and_name(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    monkeypatch.setitem(logging._levelToName, 5, "TRACE")
    monkeypatch.setitem(logging._nameToLevel, "TRACE", 5)
    monkeypatch.setattr(logging.getLogger(), "level", level)

    def train() -> int:
        return logging.getLogger().level

    one = launcher.options(num_processes=1)
    assert one.run(train) == level
    assert one.options(env={"RANKZERO_LOG_LEVEL": "trace"}).run(train) == 5
    with pytest.raises(InvalidJobError, match="env: RANKZERO_LOG_LEVEL='LOUD' names no level"):
        one.options(env={"RANKZERO_LOG_LEVEL": "LOUD"}).run(train)
    monkeypatch.setenv("RANKZERO_LOG_LEVEL", "LOUD")
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    with pytest.raises(WorkerFailedError, match="RANKZERO_LOG_LEVEL='LOUD' names no level"):
        one.run(train)


def test_the_callers_level_holds_in_ranks(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(configures: bool) -> None:
        if configures:
            logging.basicConfig(format="mine: %(message)s")
        logging.getLogger("model").debug("detail")
        logging.getLogger("model").info("begins")

    def printed() -> list[str]:
        return of_ranks(capsys.readouterr().out.splitlines())

    launcher = launcher.options(num_processes=1)
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    launcher.run(train, False)
    assert printed() == []
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    launcher.run(train, False)
    assert printed() == ["[0] INFO:model:begins"]
    launcher.run(train, True)
    assert printed() == ["[0] mine: begins"]
    launcher.options(env={"RANKZERO_LOG_LEVEL": "DEBUG"}).run(train, True)
    assert printed() == ["[0] mine: detail", "[0] mine: begins"]
