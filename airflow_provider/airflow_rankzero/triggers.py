"""`RunTrigger`: follows a run for a deferred task, in the triggerer, while no worker slot is taken."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_rankzero import lines
from rankzero.errors import RankZeroError
from rankzero.run import RunHandle

if TYPE_CHECKING:
    from rankzero.directory import Position

POLL_INTERVAL = 0.5
"""Seconds between two looks at the run directory."""


class RunTrigger(BaseTrigger):
    """Fires when a run has ended, however it ended; shows what the ranks write meanwhile.

    It holds nothing that is not in the run directory, so a triggerer may be restarted, or another one take it over.

    Args:
        directory: The run directory, which the triggerer must be able to read.
        since: Where each rank's lines ended before this training, as `lines.to_json` writes it.
    """

    def __init__(self, directory: str, since: dict[str, list[int]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.directory = directory
        self.since = since or {}

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """How Airflow makes this trigger again."""
        return "airflow_rankzero.triggers.RunTrigger", {"directory": self.directory, "since": self.since}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Gives one event: ``directory`` and, if the run cannot be read any more, ``error``."""
        try:
            handle = await asyncio.to_thread(RunHandle[Any].attach, self.directory)
            positions = await asyncio.to_thread(lines.begin, handle, lines.from_json(self.since))
            self.log.info("following the run in %s", self.directory)
            while True:
                ended, written = await asyncio.to_thread(_look, handle, positions)
                for line in written:
                    self.log.info("%s", line)
                if ended:
                    break
                await asyncio.sleep(POLL_INTERVAL)
        except Exception as error:
            # The task tells it, with its own retries.
            yield self._event(error=f"{type(error).__name__}: {error}")
            return
        yield self._event()

    def _event(self, **facts: str) -> TriggerEvent:
        return TriggerEvent({"directory": self.directory, **facts})  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """A user marked the task or cleared it. (A restart of the triggerer comes to `cleanup` alone.)"""
        with contextlib.suppress(OSError, RankZeroError):
            await asyncio.to_thread(lambda: RunHandle.attach(self.directory).cancel())


def _look(handle: RunHandle[Any], positions: dict[int, Position]) -> tuple[bool, list[str]]:
    """Whether the run has ended, and the lines since the last look. Renews the run's lease."""
    ended = handle.status().final
    return ended, list(handle.lines(positions, follow=False, prefix=True))
