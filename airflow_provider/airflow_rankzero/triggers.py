"""`RunTrigger`: follows a run for a deferred task, in the triggerer, while no worker slot is taken."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_rankzero import tries
from airflow_rankzero.connection.target import Target
from rankzero import RunHandle
from rankzero.errors import RankZeroError
from rankzero.pipeline import Follower, LineWritten

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

POLL_INTERVAL = 0.5
"""Seconds between two looks at a run directory on a disk."""

THREADS = 8
"""In which the runs of all deferred trainings are looked at, those of the triggerer's loop being for all triggers: a
store that does not answer for a while holds a look for as long."""

_threads = ThreadPoolExecutor(THREADS, "rankzero-trigger")


class RunTrigger(BaseTrigger):
    """Fires when a run has ended, however it ended; shows what the ranks write meanwhile.

    It holds nothing that is not in the run directory, so a triggerer may be restarted, or another one take it over.

    Args:
        directory: The run directory, which the triggerer must be able to read and to write.
        submission: Which submission of the run this is; another one is not this trigger's to end.
        conn_id: The task's connection, whose secrets are masked in the lines; None if it has none.
        log_ranks: Whose lines are shown; None for all.
        attached: An earlier try has shown lines of this training.
    """

    def __init__(
        self,
        directory: str,
        submission: int,
        conn_id: str | None = None,
        log_ranks: list[int] | None = None,
        attached: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.conn_id = conn_id
        self.directory = directory
        self.submission = submission
        self.log_ranks = log_ranks
        self.attached = attached

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """How Airflow makes this trigger again."""
        arguments = {
            "directory": self.directory,
            "submission": self.submission,
            "conn_id": self.conn_id,
            "log_ranks": self.log_ranks,
            "attached": self.attached,
        }
        return "airflow_rankzero.triggers.RunTrigger", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Gives one event: ``directory`` and, if the run cannot be read any more, ``error``."""
        try:
            handle = await _in_thread(RunHandle[Any].attach, self.directory)
            # A triggerer that cannot write there cannot keep the run alive: its task has to follow.
            await _in_thread(handle.renew_lease)
            await _in_thread(self._mask_secrets)
            follower = await _in_thread(self._follower, handle)
            self.log.info("following the run in %s", self.directory)
            while not await _in_thread(self._show_new, follower):
                await asyncio.sleep(max(POLL_INTERVAL, handle.pace))
        except Exception as error:
            # The task reports it, with its own retries.
            yield self._event(error=f"{type(error).__name__}: {error}")
            return
        yield self._event()

    def _mask_secrets(self) -> None:
        """Airflow masks what a process has registered: here, too, what it does for the connection.

        What the run's environment and Spark configuration hold, its driver has masked.
        """
        # The worker may be the only one who can ask for it.
        with contextlib.suppress(Exception):
            Target.from_conn_id(self.conn_id)

    def _follower(self, handle: RunHandle[Any]) -> Follower:
        return Follower(handle, ranks=self.log_ranks, attached=self.attached)

    def _event(self, **facts: str) -> TriggerEvent:
        return TriggerEvent({"directory": self.directory, **facts})  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """A user marked the task or cleared it: ends the run.

        Airflow calls this also in a triggerer that was held up and whose triggers went to another one; the task is
        still deferred then. (A restart of the triggerer comes to `cleanup` alone.)
        """
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        ti = self.task_instance
        if ti is not None and _state_of(ti) == "deferred":
            self.log.info("another triggerer follows the run in %s", self.directory)
            return
        with contextlib.suppress(OSError, RankZeroError):
            handle = RunHandle[Any].attach(self.directory)
            if handle.submission == self.submission:
                handle.cancel()

    def _show_new(self, follower: Follower) -> bool:
        """Logs the lines since the last call, and returns True if the run has ended."""
        for event in follower.poll():
            if isinstance(event, LineWritten):
                self.log.info("%s", event.text)
        return follower.ended


async def _in_thread(action: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``action`` returns, in a thread of our own, with this task's context, as `asyncio.to_thread`."""
    call = functools.partial(contextvars.copy_context().run, action, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads, call)


def _state_of(ti: Any) -> str | None:
    """What Airflow says of the task now; ``"deferred"`` if it cannot be asked."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    try:
        return tries.state_of(ti, RuntimeTaskInstance.get_task_states)
    except Exception:
        logger.warning("cannot ask Airflow whether the task was ended by a user", exc_info=True)
        return "deferred"
