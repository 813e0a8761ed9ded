"""`RunTrigger`: follows a run for a deferred task, in the triggerer, while no worker slot is taken."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_rankzero import _compat, tries
from airflow_rankzero.hooks import Target
from rankzero import RunHandle
from rankzero.errors import RankZeroError, RunNotFoundError
from rankzero.pipeline import Follower, LineWritten

P = ParamSpec("P")
T = TypeVar("T")

POLL_INTERVAL = 0.5
"""Seconds between two polls of a run directory on a disk."""

THREADS = 8
"""Threads that poll the runs of a store. The triggerer's own threads are for all triggers, and a store that does not
respond would block them, as it would block the threads of other stores."""


@functools.cache
def _threads_of(store: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "rankzero-trigger")


class RunTrigger(BaseTrigger):
    """Fires when a run has ended, successfully or not; logs the ranks' output meanwhile.

    Its whole state is in the run directory, so a triggerer may be restarted or replaced by another one.

    Args:
        directory: The run directory, which the triggerer must be able to read and to write.
        nonce: The nonce of the submission that this trigger follows; it must neither deliver nor end another.
        conn_id: The task's connection, whose secrets are masked in the lines; None if it has none.
        log_ranks: Ranks whose lines are shown; None for all.
    """

    def __init__(
        self,
        directory: str,
        nonce: str,
        conn_id: str | None = None,
        log_ranks: list[int] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.directory, self.nonce, self.conn_id, self.log_ranks = directory, nonce, conn_id, log_ranks

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Returns the class and arguments from which Airflow recreates this trigger."""
        names = ("directory", "nonce", "conn_id", "log_ranks")
        return "airflow_rankzero.triggers.RunTrigger", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yields one event: ``directory``, ``nonce`` and, if the run can no longer be read, ``error``."""
        event = {"directory": self.directory, "nonce": self.nonce}
        try:
            handle = await self._in_thread(self._attach)
            # A triggerer that cannot write there cannot keep the run alive: its task has to follow.
            await self._in_thread(handle.renew_lease)
            with contextlib.suppress(Exception):
                # The connection's secrets are masked in this process; it may only be readable on workers.
                await self._in_thread(Target.from_conn_id, self.conn_id)
            follower = await self._in_thread(Follower, handle, ranks=self.log_ranks)
            self.log.info("following the run in %s", self.directory)
            while not await self._in_thread(self._show_new, follower):
                await asyncio.sleep(max(POLL_INTERVAL, handle.pace))
        except Exception as error:
            # The task reports it, with its own retries.
            event["error"] = f"{type(error).__name__}: {error}"
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]

    def _attach(self) -> RunHandle[Any]:
        """Returns the run. Raises RunNotFoundError if it was submitted again, because another try has it then."""
        handle = RunHandle[Any].attach(self.directory)
        if handle.job.nonce != self.nonce:
            raise RunNotFoundError(f"the run in {self.directory} was submitted again")
        return handle

    async def on_kill(self) -> None:
        """Ends the run after a user has marked or cleared the task.

        Airflow also calls this in a triggerer that was blocked and whose triggers were assigned to another one; the
        task is still deferred then, or a worker follows the run or is about to, since the other triggerer could not. (A
        restart of the triggerer only calls `cleanup`.)
        """
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        ti = self.task_instance
        state: str | None = None
        receiver: dict[str, Any] = {}
        if ti is not None:
            state, receiver = tries.TaskTry(ti).state(_compat.task_states, "deferred"), tries.TaskTry(ti).receiver
        if state == "deferred":
            self.log.info("another triggerer follows the run in %s", self.directory)
            return
        with contextlib.suppress(OSError, RankZeroError):
            handle = self._attach()
            if state not in tries.STATES_OF_USERS and receiver.items() <= handle.delivery().receiver.items():
                # A worker of the same try follows the run. After a clear the next try finds the record of the deferral,
                # and ends the run.
                self.log.info("the run in %s is left to the task's next process", self.directory)
                return
            handle.cancel(receiver, tries.has_set(state))

    async def _in_thread(self, action: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls ``action`` in a thread of the run's store with the task's context, like `asyncio.to_thread`."""
        call = functools.partial(contextvars.copy_context().run, action, *args, **kwargs)
        threads = _threads_of(self.directory.rpartition("/")[0])
        return await asyncio.get_running_loop().run_in_executor(threads, call)

    def _show_new(self, follower: Follower) -> bool:
        """Logs the lines since the last call, and returns True if the run has ended."""
        for event in follower.poll():
            if isinstance(event, LineWritten):
                tries.show_line(self.log, event)
        return follower.ended
