"""The agent's main loop: starts the workers of one task, forwards their messages and output, and ends them.

One event loop, and threads that read large files and sample the host. The agent ends when the driver asks for it, when
the driver is lost for good, or when the task process that started it has exited. It always ends every descendant.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine, Sequence
from typing import Any

from rankzero import bounds
from rankzero.agent.inputs import Inputs
from rankzero.agent.ranks import Rank, environment, rank_environment
from rankzero.channel import messages
from rankzero.channel.connection import Connection, Driver
from rankzero.channel.messages import Message, MessageError
from rankzero.errors import LOST, PREEMPTED, RankZeroError, ResultError
from rankzero.host import network, processes
from rankzero.host.processes import pidfd_of, readable
from rankzero.host.usage import UsageSampler
from rankzero.threads import ActionThread, reply_of
from rankzero.worker import failures
from rankzero.worker.call import cut_off_message

WORKER_EXIT_MARGIN = bounds.stretched(4.0)  # To exit for a rank whose exit_timeout is over
STOPPED_LINES_TIMEOUT = bounds.stretched(1.5)  # To deliver the last lines after a failure or a cancel
LAST_LINES_TIMEOUT = bounds.stretched(600.0)  # The same after a success


class Agent:
    """The workers of one task and the channel to the driver.

    Attributes:
        lost: The reason for which there is no connection to the driver.
        has_failed: True if that was too early.
    """

    def __init__(self, config: dict[str, Any], ahead: Sequence[Rank]) -> None:
        """Starts the workers that were not forked ahead: there must be neither a running loop nor a thread yet."""
        self._config, self._scratch, self._began = config, config["scratch"], time.time()
        processes.become_subreaper()
        gone = {pid for pid, _ in processes.ended_children()}
        ready = {rank.local_rank: rank for rank in ahead if rank.pid not in gone}
        numbers = range(config["workers"])
        self._ranks = [ready.pop(number) if number in ready else Rank(number, config) for number in numbers]
        for spare in ready.values():
            spare.kill(signal.SIGKILL)
        self._connection: Connection | None = None
        self._caller = pidfd_of(config["caller"]) if config.get("caller") else None
        self._reader = ActionThread("rankzero-inputs")
        self._tasks: set[asyncio.Task[None]] = set()
        self._fetches: dict[str, asyncio.Task[None]] = {}
        # How the ranks end: asked to exit; before all had committed; since the task process has exited; as agreed.
        self._is_ending = self._is_early = self._is_orphaned = self._is_agreed = False
        self._complete = asyncio.Event()
        self._stop_by = self._deliver_by = float("inf")
        self._kill: asyncio.TimerHandle | None = None
        self.lost: str | None = None
        self.has_failed = False

    async def run(self) -> None:
        """Runs until every descendant of this process has ended, and the driver has what they sent."""
        hosts, port = self._config["driver"]
        certificate = base64.b64decode(self._config.get("certificate") or "") or None
        self._driver = Driver(hosts, port, self._config["secret"], certificate)
        self._watch_processes()
        self._following = self._do(self._follow_driver())
        try:
            await self._complete.wait()
        finally:
            await self._end_everything()
        if not self.has_failed:
            # To the process that holds this agent. Nothing is left, and to release this process's memory takes 10 ms.
            with contextlib.suppress(OSError):
                os.write(0, b'{"status": 0}\n')

    def _send(self, message: Message) -> None:
        if self._connection:
            self._connection.send(message)

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """Ends the agent with the error of a task that failed."""
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            if not isinstance(error, RankZeroError):
                traceback.print_exception(error)
            sys.exit(f"on {socket.gethostname()}: {type(error).__name__}: {error}")

    # -- the driver ----------------------------------------------------------------------------

    async def _follow_driver(self) -> None:
        """Finds the driver and handles its messages, until either end closes the connection."""
        try:
            found = self._driver.find(self._config["task"], self._config["connect_timeout"])
            self._connection = connection = await found
            self._do(connection.keep("the driver", self._driver_lives))
            self._join(connection)
            async for message, _ in connection.messages():
                self._on_message(message)
            why = "the driver closed the channel"
        except (OSError, MessageError) as error:
            why = str(error) or type(error).__name__
        self.lost = f"the driver is lost: {(self._connection and self._connection.reason) or why}"
        self._stop()
        self._release()

    def _join(self, connection: Connection) -> None:
        """Announces this agent, and begins to forward what its ranks send and print, also before."""
        hosts, port = self._config["driver"]
        join = messages.Join(
            host=self._config["host"],
            address=network.address_towards(hosts, port) or self._config["host"],
            hostname=socket.gethostname(),
            python=".".join(map(str, sys.version_info[:3])),
            gpus=self._config["gpus"],
            workers=len(self._ranks),
        )
        connection.send(join)
        for rank in self._ranks:
            rank.listen(connection, self._scratch, self._on_rank_message)
        self._do(self._send_reports())
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._collect)
        self._collect()

    def _driver_lives(self) -> bool:
        """Returns True while a silent driver on this host lives: it may be stopped."""
        return self._caller is not None and not readable([self._caller], 0)

    def _on_message(self, message: Message) -> None:
        match message:
            case messages.Assign():
                if message.first_rank == 0:  # It binds the port of the ranks while this agent gets their files
                    self._ranks[0].tell(message)
                if message.sample_usage:
                    self._do(self._sample_usage())
                self._do(self._start(message))
            case messages.Stop():
                self._stop(message.grace)
            case messages.End():
                with contextlib.suppress(OSError):
                    open(os.path.join(self._scratch, "agreed"), "w").close()
                self._await_exits()
            case messages.Go() | messages.Committed() | messages.Lost() | messages.Dump():
                for rank in self._ranks:
                    if rank.outcome is None:
                        rank.tell(message)

    async def _start(self, assigned: messages.Assign) -> None:
        """Gets the files of the ranks, and gives the ranks their work. A thread reads files, which may be large."""
        digests, scratch = self._driver.digests, self._scratch
        inputs = await reply_of(self._reader.submit(lambda: Inputs(assigned, digests, scratch)))
        for name, path in inputs.missing.items():
            try:
                await self._driver.fetch(name, path)
            except OSError as error:
                self._ranks[0].send(failures.describe(ResultError(f"{name} cannot be had from the driver: {error}")))
                return
        common = await reply_of(self._reader.submit(lambda: inputs.message(self._config, self._began)))
        self._ranks[0].output.add(self._config["notes"])
        env = environment(self._config)
        for rank in self._ranks:
            context = inputs.context(rank.local_rank, len(self._ranks), self._config["use_gpu"])
            own = rank_environment(self._config, context)
            rank.tell(dataclasses.replace(common, context=context, env=env | own))

    async def _sample_usage(self) -> None:
        thread = ActionThread("rankzero-usage")
        usage = UsageSampler(use_gpu=self._config["use_gpu"], now=time.monotonic())
        while True:
            await asyncio.sleep(usage.next_at - time.monotonic())
            sample = await reply_of(thread.submit(lambda: usage.sample(time.monotonic())))
            self._send(messages.Usage(sample))

    async def _send_reports(self) -> None:
        while True:
            await asyncio.sleep(bounds.DELIVERY_INTERVAL)
            for rank in self._ranks:
                rank.send_reports()

    # -- the ranks -----------------------------------------------------------------------------

    def _on_rank_message(self, rank: Rank, message: Message) -> None:
        match message:
            case messages.Transfer():
                self._do(self._transfer(rank, message))
            case messages.Finished():
                rank.outcome = message
                # What the rank printed and reported before it committed must appear before that.
                rank.drain()
                rank.send(message)
                self._release()
            case messages.Failed():
                rank.outcome, tail = message, rank.drain()
                # A failure after SIGTERM is not the cause of the run's end.
                is_secondary = message.collateral or self._is_early
                rank.send(dataclasses.replace(message, log_tail=tail, collateral=is_secondary))
            case _:
                # Else a checkpoint would overtake the reports before it.
                rank.send_reports()
                rank.send(message)

    async def _transfer(self, rank: Rank, request: messages.Transfer) -> None:
        """Sends a file of a rank to the driver, or fetches one, once for all ranks that request it."""
        name, path = request.name, request.path or os.path.join(self._scratch, request.name)
        try:
            if request.path:
                await self._driver.put(name, path)
            else:
                if name not in self._fetches:
                    self._fetches[name] = asyncio.create_task(self._driver.fetch(name, path))
                await self._fetches[name]
        except OSError as error:
            self._fetches.pop(name, None)
            rank.tell(messages.Transferred(name, error=str(error)))
        else:
            rank.tell(messages.Transferred(name, path))

    def _collect(self) -> None:
        """Reaps exited children, among which may be orphans."""
        for pid, status in processes.ended_children():
            for rank in self._ranks:
                if rank.pid == pid:
                    rank.note_exit(status, was_asked=self._is_ending)
        if self._is_ending and not any(rank.alive for rank in self._ranks):
            self._complete.set()

    # -- ending --------------------------------------------------------------------------------

    def _watch_processes(self) -> None:
        """Ends the agent with its zygote, with the process that holds it, and at a SIGTERM."""
        loop = asyncio.get_running_loop()
        what = "it got SIGTERM: the cluster takes the place back"
        loop.add_signal_handler(signal.SIGTERM, lambda: self._leave(what, PREEMPTED))
        for descriptor in (sys.stdin.fileno(), *self._config["watched"]):
            # At its end of file: nothing is sent.
            loop.add_reader(descriptor, self._orphan, descriptor)

    def _orphan(self, watched: int) -> None:
        """Stops the ranks because a process has exited that started or holds this agent."""
        asyncio.get_running_loop().remove_reader(watched)
        if not self._is_orphaned:
            self._is_orphaned = True
            self._leave("the process that held its ranks died (executor, driver or JVM)", LOST)
            self._release()

    def _leave(self, why: str, cause: str) -> None:
        """Stops the ranks without a request of the driver, and reports the reason to it, or by the exit status."""
        if not self._connection:
            self.lost = self.lost or why
        if not self._is_ending:
            self._send(messages.Leaving(why, cause))
        self._stop()

    def _release(self) -> None:
        """Lets the ranks that have committed exit, if there is no driver: waiting for their peers is of no use then."""
        for rank in self._ranks:
            if (self.lost or self._is_orphaned) and isinstance(rank.outcome, messages.Finished):
                rank.tell(messages.End())

    def _stop(self, grace: float | None = None) -> None:
        """Sends SIGTERM now and SIGKILL after ``grace`` seconds; a second call can only shorten the grace."""
        if not self._connection:
            # There is nothing to save.
            self._complete.set()
            return
        if not self._is_ending:
            # A rank that has failed or ended before may be the first cause of what the driver has judged.
            for rank in self._ranks:
                rank.read_messages()
            self._collect()
        self._stop_by = min(self._stop_by, time.monotonic() + (self._config["grace"] if grace is None else grace))
        was_ending, self._is_ending, self._is_early = self._is_ending, True, True
        self._kill_at(self._stop_by)
        for rank in self._ranks if not was_ending else ():
            rank.kill(signal.SIGTERM)
        self._deliver_by = min(self._deliver_by, time.monotonic() + STOPPED_LINES_TIMEOUT())
        self._collect()

    def _await_exits(self) -> None:
        """Lets all ranks run their exit handlers and exit, once each has finished; a `stop` keeps its grace."""
        self._is_ending = self._is_agreed = True
        for rank in self._ranks:
            rank.tell(messages.End())
        if not self._is_early:
            self._kill_at(time.monotonic() + self._config["exit_timeout"] + WORKER_EXIT_MARGIN())
        self._collect()

    def _kill_at(self, when: float) -> None:
        if self._kill:
            self._kill.cancel()
        self._kill = asyncio.get_running_loop().call_at(when, self._kill_all)

    def _kill_all(self) -> None:
        for rank in self._ranks:
            if rank.alive and not self._is_early:
                rank.output.add([cut_off_message(self._config["exit_timeout"], "native code that holds the GIL")])
            rank.kill(signal.SIGKILL)

    async def _end_everything(self) -> None:
        """Kills what ranks have left, and delivers the last lines and files."""
        self.has_failed = self.lost is not None and not (self._is_orphaned or self._is_agreed)
        processes.kill_descendants(groups=[rank.pid for rank in self._ranks])
        if not self._connection:
            return
        for rank in self._ranks:
            # Every child that kept the pipe open has exited, so it can be read to its end.
            rank.drain()
        if not self.lost:
            # A run that was stopped has no time for all of them.
            timeout = STOPPED_LINES_TIMEOUT() if self._is_early else LAST_LINES_TIMEOUT()
            self._deliver_by = time.monotonic() + timeout
            await self._deliver(asyncio.gather(*(rank.output.send_waiting() for rank in self._ranks)))
            for rank in self._ranks:
                rank.output.finish()
            self._send(messages.Bye())
            # The driver closes the connection when it has read everything.
            await self._deliver(self._following, STOPPED_LINES_TIMEOUT())

    async def _deliver(self, work: asyncio.Future[Any], margin: float = 0.0) -> None:
        """Waits for a part of the last delivery until its time is over, which a `_stop` meanwhile shortens."""
        while not work.done() and (left := self._deliver_by + margin - time.monotonic()) > 0:
            await asyncio.wait([work], timeout=min(left, bounds.DELIVERY_INTERVAL))


def run(config: dict[str, Any], runner: asyncio.Runner, ahead: Sequence[Rank] = ()) -> None:
    """Runs an agent in this process, whose standard input ends when the process that holds it lets go of it.

    Before there was a configuration, the ranks in ``ahead`` were forked, and then the loop of ``runner`` was made.
    """
    os.environ.update(bounds.environment(config["env"]))
    agent = Agent(config, ahead)
    try:
        with runner:
            runner.run(agent.run())
    finally:
        # The task process deletes it for an agent that was killed; but it may be stopped, or die first.
        shutil.rmtree(config["scratch"], ignore_errors=True)
    if agent.has_failed:
        sys.exit(agent.lost)
