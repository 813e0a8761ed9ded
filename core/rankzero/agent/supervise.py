"""The agent: starts the workers of one task, forwards what they say, leaves nothing behind.

One selector loop; the channel has a thread of its own. The agent ends when the driver says so, when the driver is
lost for good, or when the process that holds it is gone (end of file on standard input), and always takes every
descendant with it. Ranks are not known here until the driver's ``start``: workers import torch meanwhile.
"""

from __future__ import annotations

import contextlib
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

from rankzero.agent import descendants, network
from rankzero.agent.inputs import Inputs
from rankzero.agent.pace import next_delivery
from rankzero.agent.ranks import Rank, rank_environment
from rankzero.agent.worker import EXIT_HANDLERS_TIMEOUT
from rankzero.channel.client import ChannelClient, ChannelClosed
from rankzero.channel.frames import Message
from rankzero.policy import LOST, PREEMPTED

END_GRACE = EXIT_HANDLERS_TIMEOUT + 1.0
"""Seconds that committed workers get to run their exit handlers."""

FAREWELL_PATIENCE = 15.0
"""Seconds without any line taken by the driver after which the rest is given up, after a success."""

FAREWELL_LIMIT = 600.0
"""Seconds for all of them."""

STOP_FAREWELL_TIMEOUT = 1.5
"""Seconds to hand over the last lines after a failure or a cancel."""

STACKS_WAIT = 1.0
"""Seconds for the workers to write their stacks."""

PUMP_INTERVAL = 0.05
"""Seconds between two looks whether the driver takes lines that wait on disk, or a worker what it is told."""

FIRST_LOOK = 0.001
"""Seconds to the first of these looks at the end of a run; the pauses double."""

DRAIN_READS = 16
"""Reads that empty a pipe of what was written before; a child may go on writing for ever."""

_READ = 1 << 18


class Agent:
    """The workers of one task and the channel to the driver."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._selector = selectors.DefaultSelector()
        self._ranks: list[Rank] = []
        hosts, port = config["driver"]
        self._client = ChannelClient(hosts, port, config["secret"], config["task"])
        self._inputs: Inputs | None = None
        self._stopping = False
        self._stopped_early = False
        self._orphaned = False
        self._lost: str | None = None
        self._kill_at: float | None = None
        self._stacks_at: float | None = None
        self._quiet: list[Rank] = []
        self._listen_at: float | None = None

    def run(self) -> None:
        """Runs until everything below this process has ended."""
        descendants.become_subreaper()
        wakeup, signalled = socket.socketpair()
        for end in (wakeup, signalled):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Handled in the loop: a handler may run while a lock of the channel is held.
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
        self._watch(wakeup, lambda: self._on_signal(wakeup))
        self._watch(sys.stdin.fileno(), self._on_stdin)
        try:
            # Before any thread is there: these may be forks.
            for local_rank in range(self._config["workers"]):
                self._start_rank(local_rank)
            self._client.start()
            self._watch(self._client.fileno(), self._on_driver)
            self._join()
            while not self._finished():
                self._step()
        finally:
            self._end_everything()
        if self._lost and not self._orphaned:
            sys.exit(f"the driver is lost: {self._lost}")

    # -- the loop ------------------------------------------------------------------------------

    def _watch(self, source: Any, callback: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def _unwatch(self, source: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def _step(self) -> None:
        for key, _ in self._selector.select(self._time_left()):
            key.data()
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            for rank in self._ranks:
                rank.kill(signal.SIGKILL)
        if self._stacks_at is not None and now >= self._stacks_at:
            self._stacks_at = None
            for rank in self._ranks:
                self._client.queue({"type": "stack", "local_rank": rank.local_rank, "text": rank.stack()})
        if self._listen_at is not None and now >= self._listen_at:
            self._listen_at = None
            for rank in self._quiet:
                self._listen_to(rank)
            self._quiet.clear()
        for rank in self._ranks:
            rank.output.pump()
            rank.flush()

    def _time_left(self) -> float | None:
        times = [at - time.monotonic() for at in (self._kill_at, self._stacks_at, self._listen_at) if at is not None]
        if any(rank.output.waiting or rank.flush() for rank in self._ranks):
            times.append(PUMP_INTERVAL)
        return max(0.0, min(times)) if times else None

    def _finished(self) -> bool:
        return self._stopping and not any(rank.alive for rank in self._ranks)

    # -- the driver ----------------------------------------------------------------------------

    def _join(self) -> None:
        hosts, port = self._config["driver"]
        self._client.queue(
            {
                "type": "join",
                "host": self._config["host"],
                "address": network.address_towards(hosts, port) or self._config["host"],
                "hostname": socket.gethostname(),
                "pid": os.getpid(),
                "python": ".".join(map(str, sys.version_info[:3])),
                "gpus": self._config["gpus"],
                "workers": len(self._ranks),
            }
        )

    def _on_driver(self) -> None:
        try:
            for message in self._client.receive():
                self._on_message(message)
        except ChannelClosed as error:
            self._lost = str(error)
            self._unwatch(self._client.fileno())
            self._stop(self._config["grace"])

    def _on_message(self, message: Message) -> None:
        kind = message["type"]
        if kind == "start":
            self._inputs = Inputs(message, self._config["scratch"], len(self._ranks))
            self._inputs.fetch(self._client.fetch)
            self._start_when_complete()
        elif kind == "fetched":
            self._on_fetched(message)
        elif kind in ("go", "checkpoint", "checkpoint-lost"):
            for rank in self._ranks:
                rank.tell(message)
        elif kind == "dump":
            for rank in self._ranks:
                rank.ask_for_stack()
            self._stacks_at = time.monotonic() + STACKS_WAIT
        elif kind == "stop":
            self._stop(message["grace"])
        elif kind == "end":
            self._await_exits()

    def _on_fetched(self, message: Message) -> None:
        assert self._inputs is not None
        if "error" in message:
            text = f"{message['name']} cannot be had from the driver: {message['error']}"
            facts = {"exception_type": "rankzero.errors.ResultError", "message": text, "exit_code": 1}
            self._client.queue({"type": "failure", "local_rank": 0, "time": time.time(), **facts})
            return
        del self._inputs.missing[message["name"]]
        self._start_when_complete()

    def _start_when_complete(self) -> None:
        inputs = self._inputs
        if inputs is None or inputs.missing:
            return
        common = inputs.message()
        for rank in self._ranks:
            context = inputs.context(rank.local_rank, len(self._ranks), self._config["use_gpu"])
            env = {**rank_environment(context), **self._interfaces()}
            rank.tell({**common, "context": context, "env": env, "ports": self._config["ports"]})

    def _interfaces(self) -> dict[str, str]:
        """The interface that the collective libraries shall use, where the user did not choose one."""
        chosen = {**os.environ, **self._config["env"]}
        found = network.socket_environment(self._config["host"])
        return {name: value for name, value in found.items() if name not in chosen}

    # -- workers -------------------------------------------------------------------------------

    def _start_rank(self, local_rank: int) -> None:
        rank = Rank(local_rank, self._config, self._client)
        self._ranks.append(rank)
        self._watch(rank.control, lambda: self._on_control(rank))
        self._listen_to(rank)
        self._watch(rank.stack_pipe, lambda: self._on_stack(rank))

    def _on_control(self, rank: Rank) -> bool:
        """Takes one read's worth, so that a worker that never pauses cannot hold the loop.

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
            return False
        rank.decoder.feed(data)
        for message in rank.decoder:
            assert isinstance(message, dict)
            self._on_rank_message(rank, message)
        return True

    def _on_rank_message(self, rank: Rank, message: Message) -> None:
        kind = message["type"]
        message["local_rank"] = rank.local_rank
        rank.note(message)
        if kind == "commit":
            # What the rank printed before belongs before it for the reader too.
            self._drain(rank, self._on_output)
            result = message.get("result")
            if result and os.path.dirname(result["path"]) == self._config["scratch"]:
                self._client.queue({"type": "returned", "local_rank": rank.local_rank})
                self._client.send_file("value", result["path"], message)
                return
        elif kind == "failure":
            self._drain(rank, self._on_output)
            message["log_tail"] = rank.output.tail
            # What a rank does when it is told to go explains nothing.
            message["collateral"] = message["collateral"] or self._stopped_early
        elif kind == "checkpoint" and not message["shared"]:
            name = f"checkpoint-{message['index']}-{rank.local_rank}"
            self._client.send_file(name, message["path"], {**message, "upload": name})
            return
        elif kind == "rendezvous":
            del message["local_rank"]
        self._client.queue(message)

    def _listen_to(self, rank: Rank) -> None:
        self._watch(rank.pipe, lambda: self._on_printed(rank))

    def _on_printed(self, rank: Rank) -> None:
        """Takes lines, and after few lines waits for others: each look wakes agent, channel and driver."""
        if self._on_output(rank) and rank.output.is_quiet:
            self._unwatch(rank.pipe)
            self._quiet.append(rank)
            if self._listen_at is None:
                self._listen_at = next_delivery()

    def _on_output(self, rank: Rank) -> bool:
        """Takes one read's worth of what a worker printed; True if there may be more."""
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
        """One read; None if there is nothing now, empty at the end."""
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
                self._leave("it got SIGTERM: the cluster takes the place back", PREEMPTED)
        for pid, status in descendants.ended_children():
            for rank in self._ranks:
                if rank.pid == pid:
                    self._on_exit(rank, status)

    def _on_exit(self, rank: Rank, status: int) -> None:
        rank.alive = False
        self._drain(rank, self._on_control)
        self._drain(rank, self._on_output)
        code = os.waitstatus_to_exitcode(status)
        if rank.outcome is None and not self._stopping:
            self._client.queue(
                {
                    "type": "failure",
                    "local_rank": rank.local_rank,
                    "time": time.time(),
                    "exit_code": code if code >= 0 else None,
                    "signal": _signal_name(-code) if code < 0 else None,
                    "log_tail": rank.output.tail,
                }
            )

    def _on_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), _READ):
            self._unwatch(sys.stdin.fileno())
            self._orphaned = True
            self._leave("the process that held its ranks died (executor, driver or JVM)", LOST)

    def _leave(self, why: str, cause: str) -> None:
        if not self._stopping:
            self._client.queue({"type": "leaving", "why": why, "cause": cause})
        self._stop(self._config["grace"])

    def _stop(self, grace: float) -> None:
        """SIGTERM now, SIGKILL after ``grace`` seconds; a second call can only hurry."""
        deadline = time.monotonic() + grace
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)
        self._stopped_early = True
        if not self._stopping:
            self._stopping = True
            for rank in self._ranks:
                rank.kill(signal.SIGTERM)

    def _await_exits(self) -> None:
        """All ranks have committed: let them run their exit handlers, and rank 0 go."""
        for rank in self._ranks:
            rank.tell({"type": "end"})
        self._stopping = True
        self._kill_at = time.monotonic() + END_GRACE

    def _end_everything(self) -> None:
        signal.set_wakeup_fd(-1)
        descendants.kill_all()
        for rank in self._ranks:
            # A child that held the pipe is gone now; what is in it can be read to the end.
            with contextlib.suppress(Exception):
                self._drain(rank, self._on_output)
        with contextlib.suppress(Exception):
            self._say_goodbye()
        # Whoever holds this agent does the same, for one that was killed; but it may be stopped, or die before it can.
        shutil.rmtree(self._config["scratch"], ignore_errors=True)

    def _say_goodbye(self) -> None:
        """Hands over the lines that wait: as long as the driver takes them, or briefly if the run is stopped."""
        deadline = progress_at = now = time.monotonic()
        deadline += STOP_FAREWELL_TIMEOUT if self._stopped_early else FAREWELL_LIMIT
        left, pause = self._waiting(), FIRST_LOOK
        while left and now < min(deadline, progress_at + FAREWELL_PATIENCE):
            for rank in self._ranks:
                rank.output.pump()
            for key, _ in self._selector.select(pause):
                key.data()
            pause = min(2 * pause, PUMP_INTERVAL)
            now = time.monotonic()
            if self._stopped_early:
                # A stop, or the end of who holds this agent, may come meanwhile.
                deadline = min(deadline, now + STOP_FAREWELL_TIMEOUT)
            if (waiting := self._waiting()) != left:
                left, progress_at = waiting, now
        for rank in self._ranks:
            rank.output.drop_rest()
        self._client.close(STOP_FAREWELL_TIMEOUT)

    def _waiting(self) -> int:
        """Bytes of lines that the driver has not taken."""
        return self._client.bulk_bytes + sum(rank.output.waiting for rank in self._ranks)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main() -> None:
    """Entry point of the agent process: one line of JSON on standard input, then end of file."""
    if "torch" not in sys.modules:
        # A stopped agent whose holder dies wakes up and reads the end of its standard input.
        descendants.signal_on_parent_death(signal.SIGCONT)
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(sys.stdin.fileno(), _READ)
        if not piece:
            if "torch" not in sys.modules:
                # Who would remove it is gone; of a warm server's agent, who asked may have turned to a fresh one.
                shutil.rmtree(os.environ["RANKZERO_SCRATCH"], ignore_errors=True)
            sys.exit("the process that started this agent died before it said what to do")
        line += piece
    Agent(json.loads(line)).run()
