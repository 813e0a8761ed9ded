"""The agent's main loop: starts the workers of one task, forwards their messages and output, and ends them.

One selector loop; the channel has a thread of its own. The agent ends when the driver asks for it, when the driver is
lost for good, or when the task process that started it has exited (end of file on standard input, and a pidfd where
there is one). It always ends every descendant. The driver's `Assign` numbers the ranks; until then they import torch.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import time
from typing import Any

from rankzero import bounds
from rankzero.agent.forwarder import READ_SIZE, Forwarder, Loop
from rankzero.agent.inputs import InputError, Inputs
from rankzero.agent.ranks import Ending, Rank, rank_environment
from rankzero.channel import messages
from rankzero.channel.client import ChannelClient, ChannelClosed
from rankzero.channel.messages import Message, decode, encode
from rankzero.errors import PREEMPTED
from rankzero.host import network, processes
from rankzero.host.processes import (
    allow_open_files,
    settle_signals,
    signal_name,
    watcher_of,
)
from rankzero.host.usage import UsageSampler


class Agent:
    """The workers of one task and the channel to the driver."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._loop = Loop()
        self._ranks: list[Rank] = []
        hosts, port = config["driver"]
        certificate = base64.b64decode(config["certificate"]) if config.get("certificate") else None
        self._client = ChannelClient(
            hosts,
            port,
            config["secret"],
            config["task"],
            config.get("connect_timeout"),
            certificate,
            self._driver_lives,
        )
        self._caller_lives = watcher_of(config.get("caller"))
        self._ending = Ending(self._ranks, self._client, config["grace"], config["exit_timeout"])
        self._inputs: Inputs | None = None
        self._forwarder = Forwarder(self._loop, self._client, self._ending, config["scratch"])
        self._lost: str | None = None
        self._stacks_at: float | None = None
        self._positions_at: float | None = None
        self._usage: UsageSampler | None = None
        # The task process may be killed first; then only this lock shows that the directories are in use.
        self._locks = [_locked(place) for place in (config["scratch"], config["temporary"]) if place]

    def run(self) -> None:
        """Runs until every descendant of this process has ended."""
        processes.become_subreaper()
        wakeup, signalled = socket.socketpair()
        for end in (wakeup, signalled):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # The loop handles it by the wakeup socket: a handler could run while a lock of the channel is held.
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
        self._loop.watch(wakeup, lambda: self._on_signal(wakeup))
        self._loop.watch(sys.stdin.fileno(), self._on_stdin)
        if "zygote" in self._config:
            # A child that the holder has forked may keep the zygote's standard input open, or the zygote may hang.
            self._loop.watch_end(self._config["owner"], self._ending.orphan)
            self._loop.watch_end(os.pidfd_open(self._config["zygote"]), self._on_zygote)
        try:
            # Before any thread exists: the workers may be forks.
            for local_rank in range(self._config["workers"]):
                self._start_rank(local_rank)
            self._client.start()
            self._loop.watch(self._client.fileno(), self._on_driver)
            self._join()
            while not self._ending.is_complete:
                self._step()
        finally:
            self._end_everything()
        if self._lost and not self._ending.is_orphaned:
            sys.exit(f"the driver is lost: {self._lost}")

    def _driver_lives(self) -> bool:
        """Returns True while a silent driver lives and has the run: it may have been stopped, and another submitted."""
        return self._caller_lives() and not (self._inputs and self._inputs.is_ended())

    # -- the loop ------------------------------------------------------------------------------

    def _step(self) -> None:
        self._loop.dispatch(self._time_left())
        now = time.monotonic()
        self._ending.ask_written(now)
        self._ending.kill_overdue(now)
        self._forwarder.step(now)
        if self._lost or self._ending.is_orphaned:
            self._ending.release()
        if self._stacks_at is not None and now >= self._stacks_at:
            self._stacks_at = None
            for rank in self._ranks:
                rank.send(messages.Stack(rank.stack()))
        if self._positions_at is not None and now >= self._positions_at:
            self._positions_at = None
            for rank in self._ranks:
                if position := rank.position():
                    rank.send(position)
        if self._usage and (sample := self._usage.sample(now)):
            self._client.queue(encode(messages.Usage(sample)))
        for rank in self._ranks:
            rank.output.pump()
            rank.flush()

    def _time_left(self) -> float | None:
        sample_at = self._usage.next_at if self._usage else None
        moments = [self._ending.kill_at, self._ending.flush_by, self._stacks_at, self._positions_at, sample_at]
        moments += self._forwarder.next_at
        times = [at - time.monotonic() for at in moments if at is not None]
        if any(rank.output.waiting or rank.flush() for rank in self._ranks):
            times.append(bounds.POLL_INTERVAL_SHORT)
        return max(0.0, min(times)) if times else None

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
        self._client.queue(encode(join))

    def _on_driver(self) -> None:
        try:
            for message in self._client.receive():
                self._on_message(decode(message))
        except ChannelClosed as error:
            self._lost = str(error)
            self._loop.unwatch(self._client.fileno())
            self._ending.stop()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, messages.Assign):
            if message.sample_usage:
                self._usage = UsageSampler(use_gpu=self._config["use_gpu"], now=time.monotonic())
            self._inputs = Inputs(message, self._config["scratch"])
            self._inputs.fetch(self._client.fetch)
            self._start_when_complete()
        elif isinstance(message, messages.Fetched):
            if not self._forwarder.requests.answer(message):
                self._on_fetched(message)
        elif isinstance(message, (messages.Go, messages.Committed, messages.NotCommitted)):
            for rank in self._ranks:
                rank.tell(message)
        elif isinstance(message, messages.Dump):
            for rank in self._ranks:
                rank.ask_for_stack()
            self._stacks_at = time.monotonic() + bounds.STACKS_TIMEOUT()
        elif isinstance(message, messages.Peek):
            for rank in self._ranks:
                rank.peek()
            self._positions_at = time.monotonic() + bounds.STACKS_TIMEOUT()
        elif isinstance(message, messages.Stop):
            for rank in self._ranks:
                # A rank may just have reported a checkpoint that it is writing.
                self._forwarder.drain(rank, self._forwarder.on_control)
            # A rank that has ended before may be the first cause of what the driver has judged.
            self._collect()
            self._ending.stop(message.grace)
        elif isinstance(message, messages.End):
            self._ending.await_exits()

    def _on_fetched(self, message: messages.Fetched) -> None:
        assert self._inputs is not None
        if message.error is not None:
            text = f"{message.name} cannot be had from the driver: {message.error}"
            kind = "rankzero.errors.ResultError"
            self._ranks[0].send(messages.Failed(time.time(), exception_type=kind, message=text, exit_code=1))
            return
        del self._inputs.missing[message.name]
        self._start_when_complete()

    def _start_when_complete(self) -> None:
        inputs = self._inputs
        if inputs is None or inputs.missing:
            return
        try:
            common = inputs.message(self._config["ports"])
        except InputError as error:
            sys.exit(f"on {socket.gethostname()}: {error}")
        self._ranks[0].output.add(self._config["notes"])
        for rank in self._ranks:
            context = inputs.context(rank.local_rank, len(self._ranks), self._config["use_gpu"])
            rank.tell(common.having(context=context, env=rank_environment(context, self._config)))

    # -- workers -------------------------------------------------------------------------------

    def _start_rank(self, local_rank: int) -> None:
        rank = Rank(local_rank, self._config, self._client)
        self._ranks.append(rank)
        self._forwarder.listen(rank)
        if hasattr(os, "pidfd_open"):
            # The kernel reports the exit of a rank even if the user's libraries change the handling of SIGCHLD.
            ended = os.pidfd_open(rank.pid)
            self._loop.watch_end(ended, lambda: self._on_end(ended))

    # -- ending --------------------------------------------------------------------------------

    def _on_signal(self, wakeup: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in wakeup.recv(READ_SIZE):
                self._ending.leave("it got SIGTERM: the cluster takes the place back", PREEMPTED)
        self._collect()

    def _on_end(self, pidfd: int) -> None:
        os.close(pidfd)
        self._collect()

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

    def _on_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), READ_SIZE):
            self._loop.unwatch(sys.stdin.fileno())
            self._ending.orphan()

    def _on_zygote(self) -> None:
        """Kills all descendants because the zygote died: later no process could find them."""
        self._ending.orphan()
        self._ending.stop(0.0)

    def _end_everything(self) -> None:
        signal.set_wakeup_fd(-1)
        processes.kill_descendants(groups=[rank.pid for rank in self._ranks])
        for rank in self._ranks:
            # Every child that kept the pipe open has exited, so it can be read to its end.
            with contextlib.suppress(Exception):
                self._forwarder.drain(rank, self._forwarder.on_output)
        with contextlib.suppress(Exception):
            self._ending.deliver_last_lines(self._loop.dispatch)
        # The task process deletes them for an agent that was killed; but it may be stopped, or die first.
        for directory in (self._config["scratch"], self._config["temporary"]):
            if directory:
                shutil.rmtree(directory, ignore_errors=True)


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
    Agent(config).run()
