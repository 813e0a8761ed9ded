"""The agent's main loop: starts the workers of one task, forwards their messages and output, and ends them.

One event loop, and one thread that reads large files. The agent ends when the driver asks for it, when the driver is
lost for good, or when the task process that started it has exited (end of file on standard input, and a pidfd where
there is one). It always ends every descendant. The driver's `Assign` numbers the ranks; until then they import torch.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from rankzero import bounds
from rankzero.agent.ending import Ending
from rankzero.agent.forwarder import READ_SIZE, Forwarder
from rankzero.agent.inputs import InputError, Inputs
from rankzero.agent.output import Outbox
from rankzero.agent.ranks import Rank, rank_environment
from rankzero.channel import messages
from rankzero.channel.client import Driver
from rankzero.channel.messages import Message, MessageError
from rankzero.errors import PREEMPTED
from rankzero.host import network, processes
from rankzero.host.processes import (
    allow_open_files,
    settle_signals,
    signal_name,
    watcher_of,
)
from rankzero.host.usage import UsageSampler
from rankzero.threads import ActionThread, reply_of

AGENT_CONNECT_TIMEOUT = bounds.stretched(20.0)  # For an agent to find a driver that proves the secret
STACKS_TIMEOUT = bounds.stretched(2.0)  # For workers to write their stacks
STOPPED_LINES_TIMEOUT = bounds.stretched(1.5)  # To deliver the last lines after a failure or a cancel
LAST_LINES_TIMEOUT = bounds.stretched(600.0)  # The same after a success


class Agent:
    """The workers of one task and the channel to the driver."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Starts the workers, which may be forks: there must be neither an event loop nor a thread yet."""
        self._config = config
        self._outbox = Outbox(config["scratch"])
        processes.become_subreaper()
        # The task process may be killed first; then only this lock shows that the directories are in use.
        self._locks = [_locked(place) for place in (config["scratch"], config["temporary"]) if place]
        self._ranks = [Rank(local_rank, config, self._outbox) for local_rank in range(config["workers"])]
        self._caller_lives = watcher_of(config.get("caller"))
        self._inputs: Inputs | None = None
        self._reader = ActionThread("rankzero-inputs")
        self._tasks: set[asyncio.Task[None]] = set()
        self.lost: str | None = None
        """The reason for which the connection to the driver has ended."""
        self.has_failed = False
        """True if that was too early."""

    async def run(self) -> None:
        """Runs until every descendant of this process has ended, and the driver has what they sent."""
        hosts, port = self._config["driver"]
        certificate = base64.b64decode(self._config["certificate"]) if self._config.get("certificate") else None
        self._driver = Driver(hosts, port, self._config["secret"], certificate)
        grace, exit_timeout = self._config["grace"], self._config["exit_timeout"]
        self._ending = Ending(self._ranks, self._outbox, grace, exit_timeout)
        self._forwarder = Forwarder(self._driver, self._config["task"], self._ending, self._config["scratch"])
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._collect)
        what = "it got SIGTERM: the cluster takes the place back"
        loop.add_signal_handler(signal.SIGTERM, lambda: self._ending.leave(what, PREEMPTED))
        loop.add_reader(sys.stdin.fileno(), self._on_stdin)
        self._watch_processes()
        for rank in self._ranks:
            self._forwarder.listen(rank)
        self._join()
        try:
            self._following = self._do(self._follow_driver())
            self._do(self._outbox.pump())
            self._do(self._forwarder.upload())
            self._collect()
            await self._ending.complete.wait()
        finally:
            await self._end_everything()

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """Ends the agent with the error of a task that failed."""
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            traceback.print_exception(error)
            sys.exit(f"on {socket.gethostname()}: {type(error).__name__}: {error}")

    # -- the driver ----------------------------------------------------------------------------

    def _join(self) -> None:
        hosts, port = self._config["driver"]
        join = messages.Join(
            host=self._config["host"],
            address=network.address_towards(hosts, port) or self._config["host"],
            hostname=socket.gethostname(),
            pid=os.getpid(),
            python=".".join(map(str, sys.version_info[:3])),
            gpus=self._config["gpus"],
            workers=len(self._ranks),
        )
        self._outbox.send(join)

    async def _follow_driver(self) -> None:
        """Finds the driver and handles its messages, until either end closes the connection."""
        timeout = self._config.get("connect_timeout") or AGENT_CONNECT_TIMEOUT()
        connection = None
        try:
            connection = await self._driver.find(self._config["task"], timeout)
            self._outbox.attach(connection)
            self._do(self._driver.keep(connection, self._driver_lives))
            async for message, _ in connection.messages():
                self._on_message(message)
            why = "the driver closed the channel"
        except (OSError, MessageError) as error:
            why = str(error) or type(error).__name__
        self.lost = (connection and connection.reason) or why
        self._ending.stop()
        self._ending.release()

    async def _driver_lives(self) -> bool:
        """Returns True while a silent driver lives and has the run: it may have been stopped, and another submitted."""
        inputs = self._inputs
        return self._caller_lives() and (inputs is None or not await reply_of(self._reader.submit(inputs.is_ended)))

    def _on_message(self, message: Message) -> None:
        if isinstance(message, messages.Assign):
            if message.sample_usage:
                self._do(self._sample_usage())
            self._do(self._start(message))
        elif isinstance(message, (messages.Go, messages.Committed, messages.NotCommitted)):
            for rank in self._ranks:
                rank.tell(message)
        elif isinstance(message, messages.Dump):
            self._do(self._send_stacks(quiet=message.quiet))
        elif isinstance(message, messages.Stop):
            for rank in self._ranks:
                # A rank may just have reported a checkpoint that it is writing.
                self._forwarder.drain(rank, self._forwarder.on_control)
            # A rank that has ended before may be the first cause of what the driver has judged.
            self._collect()
            self._ending.stop(message.grace)
        elif isinstance(message, messages.End):
            with contextlib.suppress(OSError):
                open(os.path.join(self._config["scratch"], "agreed"), "w").close()
            self._ending.await_exits()

    async def _start(self, assigned: messages.Assign) -> None:
        """Gets the files of the ranks, and gives the ranks their work. A thread reads files, which may be large."""
        digests, scratch = self._driver.digests, self._config["scratch"]
        inputs = self._inputs = await reply_of(self._reader.submit(lambda: Inputs(assigned, digests, scratch)))
        for name, path in inputs.missing.items():
            try:
                await self._driver.fetch(name, path)
            except OSError as error:
                text = f"{name} cannot be had from the driver: {error}"
                kind = "rankzero.errors.ResultError"
                self._ranks[0].send(messages.Failed(time.time(), exception_type=kind, message=text, exit_code=1))
                return
        try:
            common = await reply_of(self._reader.submit(lambda: inputs.message(self._config["ports"])))
        except InputError as error:
            sys.exit(f"on {socket.gethostname()}: {error}")
        self._ranks[0].output.add(self._config["notes"])
        for rank in self._ranks:
            context = inputs.context(rank.local_rank, len(self._ranks), self._config["use_gpu"])
            env = rank_environment(context, self._config)
            rank.tell(dataclasses.replace(common, context=context, env=env))

    async def _send_stacks(self, *, quiet: bool) -> None:
        for rank in self._ranks:
            rank.ask_for_stack(quiet=quiet)
        await asyncio.sleep(STACKS_TIMEOUT())
        for rank in self._ranks:
            rank.send(rank.stack(quiet=quiet))

    async def _sample_usage(self) -> None:
        usage = UsageSampler(use_gpu=self._config["use_gpu"], now=time.monotonic())
        while True:
            await asyncio.sleep(usage.next_at - time.monotonic())
            if sample := usage.sample(time.monotonic()):
                self._outbox.send(messages.Usage(sample))

    # -- ending --------------------------------------------------------------------------------

    def _watch_processes(self) -> None:
        """Ends the agent with its zygote, and with the process that holds it."""
        loop = asyncio.get_running_loop()
        if "zygote" in self._config:
            # A child that the holder has forked may keep the zygote's standard input open, or the zygote may hang.
            owner, zygote = self._config["owner"], os.pidfd_open(self._config["zygote"])
            loop.add_reader(owner, self._on_end_of, owner, self._ending.orphan)
            loop.add_reader(zygote, self._on_end_of, zygote, self._on_zygote)
        if hasattr(os, "pidfd_open"):
            # The kernel reports the exit of a rank even if the user's libraries change the handling of SIGCHLD.
            for rank in self._ranks:
                ended = os.pidfd_open(rank.pid)
                loop.add_reader(ended, self._on_end_of, ended, self._collect)

    def _on_end_of(self, watched: int, then: Callable[[], None]) -> None:
        asyncio.get_running_loop().remove_reader(watched)
        os.close(watched)
        then()

    def _on_zygote(self) -> None:
        """Kills all descendants because the zygote died: later no process could find them."""
        self._ending.orphan()
        self._ending.stop(0.0)

    def _on_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), READ_SIZE):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._ending.orphan()

    def _collect(self) -> None:
        """Reaps exited children: ranks, and orphans that were re-parented to this process."""
        for pid, status in processes.ended_children():
            for rank in self._ranks:
                if rank.pid == pid:
                    self._on_exit(rank, status)

    def _on_exit(self, rank: Rank, status: int) -> None:
        rank.alive = False
        self._forwarder.drain(rank, self._forwarder.on_control)
        self._forwarder.drain(rank, self._forwarder.on_output)
        code = os.waitstatus_to_exitcode(status)
        if rank.outcome is None and self._ending.has_begun:
            # Ranks of other agents may wait for this one to exit.
            rank.send(messages.Exited())
        elif rank.outcome is None:
            how = {"exit_code": code} if code >= 0 else {"signal": signal_name(-code)}
            rank.send(messages.Failed(time.time(), log_tail=rank.output.tail, **how))
        self._ending.check()

    async def _end_everything(self) -> None:
        """Kills what ranks have left, and delivers the last lines and files."""
        self.has_failed = self.lost is not None and not (self._ending.is_orphaned or self._ending.is_agreed)
        processes.kill_descendants(groups=[rank.pid for rank in self._ranks])
        for rank in self._ranks:
            # Every child that kept the pipe open has exited, so it can be read to its end.
            self._forwarder.drain(rank, self._forwarder.on_output)
            rank.output.finish()
        begun = time.monotonic()

        def deadline() -> float:
            # A stop, or the death of the task process, may arrive meanwhile.
            return begun + (STOPPED_LINES_TIMEOUT() if self._ending.is_early else LAST_LINES_TIMEOUT())

        if not self.lost:
            left = deadline() if not self._ending.is_early else max(deadline(), self._ending.stop_by)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._forwarder.uploads.join(), left - time.monotonic())
            await self._outbox.deliver(deadline)
            # The driver closes the connection when it has read everything.
            await asyncio.wait([self._following], timeout=STOPPED_LINES_TIMEOUT())


def _locked(directory: str) -> int:
    """Locks a directory until this process exits, as `rankzero.task.scratch.lock_directory` does."""
    lock = os.open(directory, os.O_RDONLY)
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return lock


def main() -> None:
    """Entry point of the agent process; its configuration is one line of JSON on standard input."""
    settle_signals()
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(sys.stdin.fileno(), READ_SIZE)
        if not piece:
            sys.exit("the process that started this agent died before it sent the configuration")
        line += piece
    allow_open_files()
    config = json.loads(line)
    os.environ.update(bounds.environment(config["env"]))
    agent = Agent(config)
    try:
        asyncio.run(agent.run())
    finally:
        # The task process deletes them for an agent that was killed; but it may be stopped, or die first.
        for directory in (config["scratch"], config["temporary"]):
            if directory:
                shutil.rmtree(directory, ignore_errors=True)
    if agent.has_failed:
        sys.exit(f"the driver is lost: {agent.lost}")
