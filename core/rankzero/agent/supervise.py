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
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import IO, Any

from rankzero import bounds
from rankzero.agent.ending import Ending
from rankzero.agent.inputs import InputError, Inputs, Requests
from rankzero.agent.ranks import Rank, rank_environment
from rankzero.channel import messages
from rankzero.channel.agent_end.client import ChannelClient, ChannelClosed
from rankzero.channel.messages import FINISHED, Message, decode, encode
from rankzero.channel.pace import next_delivery
from rankzero.errors import PREEMPTED
from rankzero.host import descendants, network
from rankzero.host.guard import watch as watch_guard
from rankzero.host.processes import (
    allow_open_files,
    is_gone,
    pidfd_of,
    process_namespace,
    settle_signals,
    signal_name,
    watcher_of,
)
from rankzero.host.usage import UsageSampler

DRAIN_READS = 16
"""Most reads that drain a pipe; a limit, because a child may write without end."""

_READ = 1 << 18


class Agent:
    """The workers of one task and the channel to the driver."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._selector = selectors.DefaultSelector()
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
        self._requests = Requests(self._client.fetch, config["scratch"])
        self._lost: str | None = None
        self._stacks_at: float | None = None
        self._positions_at: float | None = None
        self._quiet: list[Rank] = []
        self._listen_at: float | None = None
        self._usage: UsageSampler | None = None
        # The task process may be killed first; then only this lock shows that the directories are in use.
        self._locks = [_locked(place) for place in (config["scratch"], config["temporary"]) if place]

    def run(self) -> None:
        """Runs until every descendant of this process has ended."""
        descendants.become_subreaper()
        wakeup, signalled = socket.socketpair()
        for end in (wakeup, signalled):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # The loop handles it by the wakeup socket: a handler could run while a lock of the channel is held.
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
        self._watch(wakeup, lambda: self._on_signal(wakeup))
        self._watch(sys.stdin.fileno(), self._on_stdin)
        self._watch_holder()
        if (guard := watch_guard()) is not None:
            self._watch(guard, lambda: self._on_guard(guard))
        try:
            # Before any thread exists: the workers may be forks.
            for local_rank in range(self._config["workers"]):
                self._start_rank(local_rank)
            self._client.start()
            self._watch(self._client.fileno(), self._on_driver)
            self._join()
            while not self._ending.is_complete:
                self._step()
        finally:
            self._end_everything()
        if self._lost and not self._ending.is_orphaned:
            sys.exit(f"the driver is lost: {self._lost}")

    def _driver_lives(self) -> bool:
        """Returns True while a silent driver lives and has the run: it may have been stopped, and another submitted."""
        return self._caller_lives() and not (self._inputs and self._inputs.is_resubmitted())

    # -- the loop ------------------------------------------------------------------------------

    def _watch(self, source: Any, callback: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def _unwatch(self, source: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def _dispatch(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()

    def _step(self) -> None:
        self._dispatch(self._time_left())
        now = time.monotonic()
        self._ending.ask_written(now)
        self._ending.kill_overdue(now)
        for rank in self._ranks:
            if rank.cut_off_at is not None and now >= rank.cut_off_at:
                self._on_cut_off(rank)
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
        if self._listen_at is not None and now >= self._listen_at:
            self._listen_at = None
            for rank in self._quiet:
                self._listen_to(rank)
            self._quiet.clear()
        if self._usage and (sample := self._usage.sample(now)):
            self._client.queue(encode(messages.Usage(sample)))
        for rank in self._ranks:
            rank.output.pump()
            rank.flush()

    def _time_left(self) -> float | None:
        sample_at = self._usage.next_at if self._usage else None
        moments = [
            self._ending.kill_at,
            self._ending.flush_by,
            self._stacks_at,
            self._positions_at,
            self._listen_at,
            sample_at,
        ]
        moments += [rank.cut_off_at for rank in self._ranks]
        times = [at - time.monotonic() for at in moments if at is not None]
        if any(rank.output.waiting or rank.flush() for rank in self._ranks):
            times.append(bounds.PUMP_INTERVAL)
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
            self._unwatch(self._client.fileno())
            self._ending.stop()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, messages.Assign):
            if message.sample_usage:
                self._usage = UsageSampler(use_gpu=self._config["use_gpu"], now=time.monotonic())
            self._inputs = Inputs(message, self._config["scratch"])
            self._inputs.fetch(self._client.fetch)
            self._start_when_complete()
        elif isinstance(message, messages.Fetched):
            if not self._requests.answer(message):
                self._on_fetched(message)
        elif isinstance(message, (messages.Go, messages.Committed, messages.NotCommitted)):
            for rank in self._ranks:
                rank.tell(message)
        elif isinstance(message, messages.Dump):
            for rank in self._ranks:
                rank.ask_for_stack()
            self._stacks_at = time.monotonic() + bounds.STACKS_TIMEOUT
        elif isinstance(message, messages.Peek):
            for rank in self._ranks:
                rank.peek()
            self._positions_at = time.monotonic() + bounds.STACKS_TIMEOUT
        elif isinstance(message, messages.Stop):
            for rank in self._ranks:
                # A rank may just have reported a checkpoint that it is writing.
                self._drain(rank, self._on_control)
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
        for rank in self._ranks:
            context = inputs.context(rank.local_rank, len(self._ranks), self._config["use_gpu"])
            rank.tell(common.having(context=context, env=rank_environment(context, self._config)))

    # -- workers -------------------------------------------------------------------------------

    def _start_rank(self, local_rank: int) -> None:
        rank = Rank(local_rank, self._config, self._client)
        self._ranks.append(rank)
        self._watch(rank.control, lambda: self._on_control(rank))
        if hasattr(os, "pidfd_open"):
            # The kernel reports the exit of a rank even if the user's libraries change the handling of SIGCHLD.
            ended = os.pidfd_open(rank.pid)
            self._watch(ended, lambda: self._on_end(ended))
        self._listen_to(rank)
        self._watch(rank.stack_pipe, lambda: self._on_stack(rank))

    def _on_control(self, rank: Rank) -> bool:
        """Handles the messages of one read, so that a worker that never pauses cannot block the loop.

        Returns:
            True if there may be more.
        """
        try:
            data = rank.control.recv(_READ)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._unwatch(rank.control)
            rank.cut_off_at = time.monotonic() + bounds.CUT_OFF_GRACE
            return False
        rank.decoder.feed(data)
        for message in rank.decoder:
            assert isinstance(message, dict)
            self._on_rank_message(rank, decode(message))
        return True

    def _on_rank_message(self, rank: Rank, message: Message) -> None:
        if isinstance(message, messages.Fetch):
            self._requests.ask(rank, message.name)
            return
        rank.note(message)
        if isinstance(message, (messages.PartBegun, messages.Flushed)):
            return
        if isinstance(message, messages.Finished):
            # Lines that the rank printed before it committed must appear before that in the log.
            self._drain(rank, self._on_output)
            result = message.result
            if result and os.path.dirname(result["path"]) == self._config["scratch"]:
                then = encode(message, rank.local_rank)
                self._client.send_file("value", result["path"], then, result["digest"])
                return
            if self._ending.has_parts:
                # Behind its parts of checkpoints: the driver ends the run when all ranks have finished.
                self._client.send_file(f"{FINISHED}{rank.local_rank}", os.devnull, encode(message, rank.local_rank))
                return
        elif isinstance(message, messages.Failed):
            self._drain(rank, self._on_output)
            # A failure after a request to exit is not the cause of the run's end.
            is_secondary = message.collateral or self._ending.is_early
            message = message.having(log_tail=rank.output.tail, collateral=is_secondary)
        elif isinstance(message, messages.Part) and not message.shared:
            self._ending.has_parts = True
            name = f"checkpoint-{message.index}-{rank.local_rank}"
            then = encode(message.having(upload=name), rank.local_rank)
            self._client.send_file(name, message.path, then, message.sha256)
            return
        rank.send(message)

    def _on_cut_off(self, rank: Rank) -> None:
        """Kills a rank that has closed its connection, and reports a failure: its outcome could not be received."""
        rank.cut_off_at = None
        if not rank.alive or rank.outcome:
            return
        text = (
            f"it closed the connection to its agent and did not end within {bounds.CUT_OFF_GRACE:g} s: a rank must not "
            "replace its program (exec) or close descriptors that it has not opened"
        )
        self._on_rank_message(rank, messages.Failed(time.time(), message=text, exit_code=1))
        rank.kill(signal.SIGKILL)

    def _listen_to(self, rank: Rank) -> None:
        self._watch(rank.pipe, lambda: self._on_printed(rank))

    def _on_printed(self, rank: Rank) -> None:
        """Forwards printed lines. A pipe with few lines is read again later, since each read wakes the driver."""
        if self._on_output(rank) and rank.output.is_quiet:
            self._unwatch(rank.pipe)
            self._quiet.append(rank)
            if self._listen_at is None:
                self._listen_at = next_delivery()

    def _on_output(self, rank: Rank) -> bool:
        """Adds the output of one read of a worker's pipe; returns True if there may be more."""
        data = self._read(rank.pipe)
        if data is None:
            return False
        if not data:
            rank.output.finish()
            return False
        rank.output.feed(data)
        return True

    def _on_stack(self, rank: Rank) -> None:
        rank.take_stack(self._read(rank.stack_pipe) or b"")

    def _read(self, source: IO[bytes]) -> bytes | None:
        """Reads once from a pipe: None if no data is available, empty bytes at the end of file."""
        try:
            data = source.read(_READ)
        except (OSError, ValueError):
            data = b""
        if data == b"":
            self._unwatch(source)
        return data

    @staticmethod
    def _drain(rank: Rank, read: Callable[[Rank], bool]) -> None:
        for _ in range(DRAIN_READS):
            if not read(rank):
                return

    # -- ending --------------------------------------------------------------------------------

    def _on_signal(self, wakeup: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in wakeup.recv(_READ):
                self._ending.leave("it got SIGTERM: the cluster takes the place back", PREEMPTED)
        self._collect()

    def _on_end(self, pidfd: int) -> None:
        self._unwatch(pidfd)
        os.close(pidfd)
        self._collect()

    def _collect(self) -> None:
        """Reaps exited children: ranks, and orphans that were re-parented to this process."""
        for pid, status in descendants.ended_children():
            for rank in self._ranks:
                if rank.pid == pid:
                    self._on_exit(rank, status)

    def _on_exit(self, rank: Rank, status: int) -> None:
        rank.alive = False
        self._drain(rank, self._on_control)
        self._drain(rank, self._on_output)
        code = os.waitstatus_to_exitcode(status)
        if rank.outcome is None and self._ending.has_begun:
            # Ranks of other agents may wait for this one to exit.
            rank.send(messages.Exited())
        elif rank.outcome is None:
            how = {"exit_code": code} if code >= 0 else {"signal": signal_name(-code)}
            rank.send(messages.Failed(time.time(), log_tail=rank.output.tail, **how))

    def _on_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), _READ):
            self._unwatch(sys.stdin.fileno())
            self._ending.orphan()

    def _watch_holder(self) -> None:
        """Ends the agent with the task process that started it, even if a child of that keeps standard input open."""
        if holder := self._config.get("holder"):
            process = {"pid": holder[0], "start": holder[1], "namespace": process_namespace()}
            if watched := pidfd_of(process):
                self._watch(watched, lambda: self._on_holder(watched))
            elif is_gone(process):
                self._ending.orphan()

    def _on_holder(self, watched: int) -> None:
        self._unwatch(watched)
        self._ending.orphan()

    def _on_guard(self, watched: int) -> None:
        """Kills all descendants because the guard died: later no process could find them."""
        self._unwatch(watched)
        self._ending.orphan()
        self._ending.stop(0.0)

    def _end_everything(self) -> None:
        signal.set_wakeup_fd(-1)
        descendants.kill_all(groups=[rank.pid for rank in self._ranks])
        for rank in self._ranks:
            # Every child that kept the pipe open has exited, so it can be read to its end.
            with contextlib.suppress(Exception):
                self._drain(rank, self._on_output)
        with contextlib.suppress(Exception):
            self._ending.deliver_last_lines(self._dispatch)
        # The task process deletes them for an agent that was killed; but it may be stopped, or die first.
        for directory in (self._config["scratch"], self._config["temporary"]):
            if directory:
                shutil.rmtree(directory, ignore_errors=True)


def _locked(directory: str) -> int:
    """Locks a directory until this process exits, as `rankzero.task.hold.lock_directory` does."""
    lock = os.open(directory, os.O_RDONLY)
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return lock


def main() -> None:
    """Entry point of the agent process; its configuration is one line of JSON on standard input."""
    settle_signals()
    if "torch" not in sys.modules:
        # SIGCONT wakes a stopped agent whose guard dies; the guard wakes it when the task process dies.
        descendants.signal_on_parent_death(signal.SIGCONT)
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(sys.stdin.fileno(), _READ)
        if not piece:
            if "torch" not in sys.modules:
                # The task process, which would remove the directory, has exited. An agent of a warm server leaves it
                # (torch is loaded there): its task process may live, and use the directory for a fresh agent.
                shutil.rmtree(os.environ["RANKZERO_SCRATCH"], ignore_errors=True)
            sys.exit("the process that started this agent died before it sent the configuration")
        line += piece
    allow_open_files()
    Agent(json.loads(line)).run()
