"""`Attempt`: one attempt of a run, as one coroutine: `_prepare`, `_launch`, `_train`, `_end`, `_settle`.

It succeeds once every rank has finished and rank 0's value is stored. Nothing takes that back. `_end` first records it,
until a cancel or for `STORE_OUTAGE`; then ranks run their exit handlers, which a cancel stops. The attempt ends before
that if

- a rank raises or is killed. Its agent reports that, `_judge` waits up to two seconds for an earlier cause and asks
  where the others stand, and `_end` makes all agents stop their ranks: SIGTERM, then SIGKILL after ``stop_grace``.
- the host of an agent dies, or the network to it is cut. The connection breaks, or `Agents.gone` names an agent that
  has sent nothing for 45 seconds, and the same follows. Its ranks are the cause; until its loss is known, a peer whose
  collective broke is named, with the cause ``"lost"``, which restarts likewise. A host that dies before its agent has
  joined is missed until ``start_timeout``, unless the engine reports it.
- the engine ends the agents, or the store refuses rank 0's value, also by not taking it in time. Both are judged, too.
- the user cancels the run, ``timeout`` or ``start_timeout`` is over, or the ranks hang. What waits then raises the
  error: `Watch.check`, `_check_start`, `_check_run`. Until `_launch` returns, it leaves `live`; in `_train` it is the
  verdict, and `_end` stops the ranks. A failure that was seen before a cancel is judged, without further waiting. A
  value that the store takes meanwhile makes the run a success nevertheless (`ending.settled`).

`rankzero.driver.driver` then decides by the cause whether another attempt follows: not after a cancel or a time limit,
and after an exception of the user's code only if ``restart_on`` names it or it is a `RetryableError`. The engine's
session belongs to `Places`, and outlives attempts.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from rankzero import bounds
from rankzero.bounds import STORE_OUTAGE
from rankzero.channel import messages
from rankzero.channel.connection import new_secret
from rankzero.driver import ending
from rankzero.driver.agents import Agents
from rankzero.driver.ending import Facts, Verdict
from rankzero.driver.places import Places
from rankzero.driver.storage import Storage, files_of
from rankzero.driver.watch import CHECK_INTERVAL
from rankzero.engines.base import AgentGroup, EngineSession
from rankzero.errors import RankZeroError, ResultError, RunCancelledError, StartTimeoutError
from rankzero.host.network import listen
from rankzero.host.processes import allow_open_files, this_process
from rankzero.job import CheckpointConfig, Job
from rankzero.run.checkpoints import Manifest
from rankzero.task.hold import Directory
from rankzero.threads import done_within, in_thread, reply_of

CAUSE_WINDOW = bounds.stretched(2.0)  # For the first cause of failures that may be consequences, or of a lost agent
SUCCESS_END_TIMEOUT = bounds.stretched(25.0)  # Without a message, until agents are cancelled after a success
AGENT_CONNECT_TIMEOUT_MIN = bounds.stretched(1.0)  # That an agent has at least to find its driver
PRELOAD_TIMEOUT = bounds.scaled(20.0)  # For a new zygote to import torch, until the agent is started without it
WINDOW_STEP = 0.1  # Seconds by which the window for the first cause ends at most for each read of what has arrived
MANY_AGENTS = 256  # Above which the driver raises the limit of open files of its process, which may be the caller's

logger = logging.getLogger(__name__)


class _TroubleError(Exception):
    """A report excludes success: of a rank that failed, a lost agent, the engine, or a store that refuses the value."""


class Attempt:
    """Makes one attempt of a run.

    Attributes:
        job: The job, with the locations of tables and, once it is known, for the size of this attempt's world.
    """

    def __init__(self, places: Places, job: Job, number: int) -> None:
        """Prepares an attempt, which `live` makes. All attempts of a run share ``places``."""
        self.job = job
        self._places = places
        self._number = number
        self._group: AgentGroup | None = None
        self._files = contextlib.ExitStack()

    async def live(self) -> Verdict:
        """Makes the attempt, and returns how it has ended. Raises the error of one that has no agents."""
        recorder, places = self._places.recorder, self._places
        recorder.note_phase("opening")
        self._deadline = time.monotonic() + self.job.start_timeout
        session = await places.open(self._deadline)
        if self.job.queries:
            self.job = await places.read_tables(self.job, session)
            self._deadline = time.monotonic() + self.job.start_timeout

        recorder.note_phase("waiting for slots")
        num_tasks = await places.reserve(session, self._deadline)

        recorder.note_phase("starting")
        await self._prepare(session, num_tasks)
        try:
            await self._launch(session, num_tasks)
            verdict = await self._train()
            recorder.note_phase("ending")
            await self._end(verdict)
            return await self._settle(verdict)
        finally:
            await self._agents.server.close()
            self._storage.close(0.0)
            self._files.close()

    # -- starting ------------------------------------------------------------------------------

    async def _prepare(self, session: EngineSession, num_tasks: int) -> None:
        """Makes the parts of the attempt for its number of tasks."""
        places, whole, size = self._places, self.job, num_tasks * self.job.processes_per_task
        self.job = replace(whole, num_processes=size, min_processes=None)
        if whole.min_processes is not None:
            # The job alone does not determine the size of the world.
            what = f"attempt {self._number} starts with {size} ranks, of {whole.world}, on {session.place}"
            places.recorder.announce("world", what, attempt=self._number, world_size=size)
            places.recorder.update(world_size=size)
        job, num_agents = self.job, session.num_agents(num_tasks)
        if num_agents > MANY_AGENTS:
            allow_open_files()
        self._secret, self._identity = new_secret(), None
        if session.encrypts if job.encrypt is None else job.encrypt:
            # Imported here, so that most drivers do not load TLS.
            from rankzero.channel.tls import make_identity

            # In a thread: it runs a command.
            self._identity = await reply_of(in_thread(make_identity, "rankzero-openssl"))
            logger.info("the connections of attempt %s are encrypted", self._number)
        directory = places.own.path("result")
        if places.own.is_remote:
            own = self._files.enter_context(contextlib.closing(Directory("driver")))
            own.sweep()
            directory = own.path
        self._facts, kept = Facts(job.num_processes, places.own.run.directory), CheckpointConfig(**job.checkpoints)
        self._storage = Storage(places.own, self._number, kept, self._facts, directory, places.watch.wake)
        tls = self._identity[1] if self._identity else None
        self._agents = Agents(places, job, self._number, num_agents, self._storage, self._secret, tls)

    async def _launch(self, session: EngineSession, num_tasks: int) -> None:
        """Makes the engine start the agents, for which the driver listens."""
        job = self.job
        self._resume, self._token = await self._read_store()
        if self._resume:
            self._agents.served |= files_of(self._resume)

        bind = lambda: (listen(session.bind_host, job.ports), session.driver_hosts)  # noqa: E731
        listener, hosts = await self._places.request(bind, self._deadline)
        port = await self._agents.server.start(listener)
        config = {
            "attempt": self._number,
            "use_gpu": job.use_gpu,
            "grace": job.stop_grace,
            # Less than all, so that an agent's own error comes first: it lists the addresses that it tried.
            "connect_timeout": max(AGENT_CONNECT_TIMEOUT_MIN(), 0.9 * (self._deadline - time.monotonic())),
            "exit_timeout": job.exit_timeout,
            "restart_count": self._number - job.first_attempt,
            "max_restarts": job.max_restarts,
            "preload_timeout": PRELOAD_TIMEOUT() if job.warm_start else None,
            "env": self._places.env,
            "driver": [hosts, port],
            "secret": self._secret,
            # A driver in a thread stops whenever its caller does: in a call of native code, by Ctrl-Z, in a debugger.
            "caller": this_process() if self._places.recorder.status.driver_thread else None,
            "certificate": base64.b64encode(self._identity[0]).decode() if self._identity else None,
        }
        loop = asyncio.get_running_loop()

        def on_end(error: BaseException | None) -> None:
            # In the engine's thread. The loop is closed if the driver has not waited for the end.
            if not loop.is_closed():
                asyncio.run_coroutine_threadsafe(self._agents.note_engine_end(error), loop)

        launch = functools.partial(session.launch, num_tasks, config, on_end)
        self._group = await self._places.request(launch, self._deadline, lambda late: late.cancel())

    async def _read_store(self) -> tuple[Manifest | None, str]:
        """Returns the checkpoint to start from, and the text by which agents recognize the folder."""
        watch, recorder, began = self._places.watch, self._places.recorder, time.monotonic()
        try:
            # `begin` tries again for half as long, if the store replies.
            async with asyncio.timeout(2 * STORE_OUTAGE()):
                resume, token = await watch.reply_of(self._storage.submit(self._storage.begin), watch.check)
        except RankZeroError:
            # RunTimeoutError is a TimeoutError, too.
            raise
        except TimeoutError as error:
            raise ResultError(f"the store of {self._places.own.run.directory} does not answer") from error
        # An outage of the store takes no time from the ranks' start.
        self._deadline += time.monotonic() - began
        if (found := resume and resume.id) != recorder.status.checkpoint:
            recorder.update(checkpoint=found)
        if self._number > self.job.first_attempt:
            begin = f"checkpoint {resume.id}" if resume else "the beginning"
            logger.warning("attempt %s begins at %s", self._number, begin)
        return resume, token

    # -- the training --------------------------------------------------------------------------

    async def _train(self) -> Verdict:
        """Starts the ranks, and returns how the training has ended."""
        agents, facts, watch, recorder = self._agents, self._facts, self._places.watch, self._places.recorder
        try:
            await self._until(lambda: len(agents.members) >= agents.num_agents, self._check_start)
            agents.assign_ranks(self._resume, self._token)
            await self._until(lambda: agents.is_bound and not any(agents.missing()), self._check_start)
            recorder.note_phase("running")
            recorder.update(state="running", phase="running", started=recorder.status.started or time.time())
            await self._until(lambda: agents.has_begun or facts.success is not None, self._check_start)
            agents.hangs.begin(now := time.monotonic())
            watch.started_at = watch.started_at or now
            await self._until(lambda: facts.success is not None, self._check_run)
        except _TroubleError:
            return await self._judge()
        except RankZeroError as error:
            # Cancelled, a time limit, or a hang.
            return Verdict(error=error)
        return Verdict(success=facts.success)

    async def _until(self, goal: Callable[[], bool], check: Callable[[float], Awaitable[None]]) -> None:
        """Waits for a goal. Raises _TroubleError if a report excludes the success, else as the watch and ``check``."""
        while not goal():
            if ending.cannot_succeed(self._facts, self._agents.gone()):
                raise _TroubleError
            self._places.watch.check()
            await check(time.monotonic())
            await self._places.watch.wait(CHECK_INTERVAL)
            self._agents.note_stored()

    async def _check_start(self, now: float) -> None:
        """Raises StartTimeoutError if the ranks take too long to start; names those that are missing meanwhile."""
        tasks, ranks = self._agents.missing()
        what = starting_message(self._agents.num_agents, tasks, ranks)
        self._places.recorder.note_waiting(f"waiting: {what}")
        if now > self._deadline:
            missing = [f"task {task}" for task in tasks] or [f"rank {rank}" for rank in ranks] or ["rank 0"]
            why = f"the ranks did not start within start_timeout={self.job.start_timeout} s: {what}"
            to_do = "raise start_timeout of the Launcher if they are only slow"
            raise StartTimeoutError(f"{why}; {to_do}", missing=missing)

    async def _check_run(self, now: float) -> None:
        """Raises HangError if the ranks wait for each other and always will."""
        agents, hangs, facts, bound = self._agents, self._agents.hangs, self._facts, self.job.hang_timeout

        def is_over() -> bool:
            return ending.cannot_succeed(facts, agents.gone()) or self._places.watch.is_called_off()

        if hangs.must_look(now):
            await agents.request_stacks(is_over, quiet=True)
            if line := hangs.look(time.monotonic()):
                self._places.recorder.announce("waiting", line)
        if hangs.find(now, bound):
            await agents.request_stacks(is_over)
            if (found := hangs.find(time.monotonic(), bound)) and not is_over():
                why, missing = found
                raise ending.hung(why, hangs.texts, missing, facts.directory)

    async def _judge(self) -> Verdict:
        """Returns how an attempt has ended that cannot succeed: by the first cause, not by its consequences."""
        agents, facts = self._agents, self._facts

        def is_over() -> bool:
            # Asked first, so that a cancel is noted as soon as it arrives.
            return self._places.watch.is_called_off() or ending.is_certain(facts)

        # Not by the clock alone: a driver that stood still reads what has arrived before it judges.
        left = CAUSE_WINDOW()
        while not is_over() and left > 0:
            began = time.monotonic()
            await self._places.watch.wait(WINDOW_STEP)
            agents.note_stored()
            left -= min(WINDOW_STEP, time.monotonic() - began)
        if facts.failures and not agents.gone() and not is_over():
            await agents.request_stacks(lambda: is_over() or bool(agents.gone()))
        explained: RankZeroError | None = None
        if facts.engine_ended:
            assert self._group is not None
            error = facts.engine_error or RuntimeError("the agents ended before every rank had returned")
            # In a thread, with a limit of its own: the JVM has the text, and may hang.
            explained = await reply_of(in_thread(functools.partial(self._group.explain, error)))
        return ending.judge(facts, agents.gone(), explained, agents.hangs.texts)

    # -- ending --------------------------------------------------------------------------------

    async def _end(self, verdict: Verdict) -> None:
        """Ends the agents: after a success ranks run their exit handlers, else they are stopped.

        Agents that do not end in time are cancelled at the engine. After a success the time counts from their last
        message, since they deliver the last lines; a cancel then stops the ranks.
        """
        agents, facts, watch, server = self._agents, self._facts, self._places.watch, self._agents.server
        agents.is_leaving = True
        is_patient = is_end_sent = verdict.success is not None
        if verdict.success:
            # Durable first: exit handlers and disconnects take time, and the driver may die meanwhile.
            recorded = self._places.recorder.update(result=verdict.success[0].to_json(), value=verdict.success[1])
            with contextlib.suppress(RankZeroError, TimeoutError):
                async with asyncio.timeout(STORE_OUTAGE()):
                    await watch.reply_of(recorded, watch.check)
            server.broadcast(messages.End())
            timeout = self.job.exit_timeout + SUCCESS_END_TIMEOUT()
        else:
            agents.is_stopping = True
            server.broadcast(messages.Stop(self.job.stop_grace))
            timeout = self.job.stop_grace + bounds.STOP_MARGIN()
        asked_at = connected_at = time.monotonic()
        while not facts.engine_ended:
            now = time.monotonic()
            connected_at = now if server.agents else connected_at
            since = max(asked_at, agents.heard_at) if is_patient else asked_at
            # After a success, the processes that held agents may still remove files.
            if now - since > timeout or (not is_patient and now - connected_at > bounds.STOP_MARGIN()):
                break
            if not is_end_sent and len(facts.over) >= facts.num_processes:
                # Ranks that have committed wait for their peers. No rank is left that needs the rest of the grace.
                is_end_sent = True
                server.broadcast(messages.End())
            if watch.is_called_off() and is_patient:
                server.broadcast(messages.Stop(self.job.stop_grace))
                timeout, is_patient = self.job.stop_grace + bounds.STOP_MARGIN(), False
                asked_at = connected_at = now
            await self._places.watch.wait(WINDOW_STEP)
            agents.note_stored()
        else:
            return
        assert self._group is not None
        logger.warning("agents did not end in time; cancelling them at the engine")
        await done_within(bounds.STOP_MARGIN(), self._group.cancel)
        await server.close()
        await done_within(bounds.STOP_MARGIN() + 1, functools.partial(self._group.wait, bounds.STOP_MARGIN()))

    async def _settle(self, verdict: Verdict) -> Verdict:
        """Waits for the store, removes what does not count, and returns the verdict: late reports may be a success."""
        is_cancelled = isinstance(verdict.error, RunCancelledError)
        timeout = bounds.STOP_MARGIN() if is_cancelled else bounds.CHECKPOINT_COMMIT_TIMEOUT()
        deadline = await self._await_store(time.monotonic() + timeout)
        # Only now: until here, a value that was still being stored could have made the attempt a success.
        verdict = ending.settled(verdict, self._facts)
        self._storage.end(verdict.success[0].uri if verdict.success else "")
        await self._await_store(deadline)
        return verdict

    async def _await_store(self, deadline: float) -> float:
        """Waits until everything that arrived is stored; returns the deadline, which a cancel brings forward."""
        while self._storage.is_busy:
            now = time.monotonic()
            if self._places.watch.is_called_off():
                deadline = min(deadline, now + bounds.STOP_MARGIN())
            if now >= deadline:
                break
            await self._places.watch.wait(CHECK_INTERVAL)
        self._agents.note_stored()
        return deadline


def starting_message(num_tasks: int, missing_tasks: Sequence[int], missing_ranks: Sequence[int]) -> str:
    """Returns the message about why a launched attempt has not started yet."""
    if missing_tasks:
        started = f"{num_tasks - len(missing_tasks)} of {num_tasks} tasks have started"
        return f"{started}, not {ending.name_ranks(missing_tasks, 'task')} (are its slots in use?)"
    what = f"{ending.name_ranks(missing_ranks)} still imports torch" if missing_ranks else "no rank has begun"
    return f"every task has started, but {what}"
