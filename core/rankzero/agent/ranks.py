"""The agent's handle of one worker process, and the end of all ranks of its task.

`Rank` starts a worker, sends it messages and signals, and reads its stack. `Ending` ends the ranks of one task and
their agent: SIGTERM, then SIGKILL, then delivery of the last log lines.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from rankzero import bounds
from rankzero.agent.output import RankOutput, is_own_frame
from rankzero.channel import frames, messages
from rankzero.channel.client import ChannelClient
from rankzero.channel.messages import Message, encode
from rankzero.errors import LOST
from rankzero.host import forked
from rankzero.host.network import socket_environment
from rankzero.host.processes import cpu_seconds, process_state, signal_main_thread
from rankzero.worker import main as worker
from rankzero.worker.call import cut_off_message

FLUSH_TIMEOUT = bounds.stretched(1.0)  # For stopped ranks to send reports that they hold; native code may not answer
LAST_LINES_POLL_INTERVAL = 0.001  # Seconds until the driver is first polled for the last lines; the interval doubles
PIPE_SIZE = 1 << 20  # Capacity of the pipe for a rank's output, where the system allows it (macOS does not)

# rankzero and its cloudpickle are imported from the given path, which is then moved to the end of the search path.
_BOOTSTRAP = (
    "import json, sys; sys.path[:1] = [sys.argv[1]]; import rankzero, cloudpickle; "
    "sys.path.append(sys.path.pop(0)); from rankzero.worker.main import main; "
    "main(*map(json.loads, sys.argv[2:]))"
)

_STATES = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "D": "is blocked in the kernel"}
"""Display texts for the kernel's states of a process."""


class Rank:
    """A worker process that this agent has started."""

    def __init__(self, local_rank: int, config: dict[str, Any], client: ChannelClient) -> None:
        """Starts the worker process, which imports torch and waits for its ``start`` message.

        Args:
            local_rank: Index within the task.
            config: The agent's configuration.
            client: The channel that carries its output.
        """
        self.local_rank = local_rank
        self.alive = True
        self.outcome: messages.Finished | messages.Failed | None = None
        self.writing: set[int] = set()
        """Numbers of the checkpoints that the training reported and the worker has not written yet."""
        self.has_flushed = True
        """False from the call of the training until the worker has sent all reports that preceded a stop."""
        self.begun: frozenset[int] | None = None
        """Numbers of the checkpoints that the training reported before the stop; None until a stop."""
        self._client = client
        self.output = RankOutput(local_rank, client, config["scratch"])
        self.decoder = frames.Decoder()
        self.decoder.trust(None)
        self._beat_at = time.monotonic()
        self._stack = b""
        self._unsent = bytearray()
        self.control, control = socket.socketpair()
        read, write = os.pipe()
        with contextlib.suppress(OSError, AttributeError):
            # The pipe of a quiet rank is read up to `DELIVERY_INTERVAL` late: a burst should fit.
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        stack_read, stack_write = os.pipe()
        with open(os.devnull) as nothing:
            stdio = (nothing.fileno(), write, write)
            self.pid = _start_worker(config, local_rank, stdio, control.fileno(), stack_write)
        control.close()
        os.close(write)
        os.close(stack_write)
        self.control.setblocking(False)
        for descriptor in (read, stack_read):
            os.set_blocking(descriptor, False)
        self.pipe: IO[bytes] = open(read, "rb", buffering=0)
        self.stack_pipe: IO[bytes] = open(stack_read, "rb", buffering=0)

    def tell(self, message: Message) -> None:
        """Sends a message now, or later by `flush` if the worker does not read; ignores a dead worker."""
        self._unsent += frames.encode(encode(message))
        self.flush()

    def send(self, message: Message) -> None:
        """Sends a message of the worker, or about it, to the driver."""
        self._client.queue(encode(message, self.local_rank))

    def flush(self) -> bool:
        """Sends pending bytes without blocking, since the worker may be stopped; returns True if some are left."""
        try:
            while self._unsent:
                del self._unsent[: self.control.send(self._unsent)]
        except BlockingIOError:
            return True
        except OSError:
            self._unsent.clear()
        return False

    def kill(self, number: int, send: Callable[[int, int], None] = os.kill) -> None:
        """Sends a signal to the worker if it is alive."""
        if self.alive:
            with contextlib.suppress(OSError):
                send(self.pid, number)

    def note(self, message: Message) -> None:
        """Records the state that a message of the worker reports: heartbeat, checkpoints, outcome."""
        self._beat_at = time.monotonic()
        if isinstance(message, messages.PartBegun):
            self.writing.add(message.index)
        elif isinstance(message, (messages.Part, messages.PartFailed)):
            self.writing.discard(message.index)
        elif isinstance(message, messages.Entered):
            self.has_flushed = False
        elif isinstance(message, messages.Flushed):
            # The worker may have reported some that were on their way when the agent stopped it.
            self.has_flushed, self.begun = True, frozenset(self.writing)
        elif isinstance(message, (messages.Finished, messages.Failed)):
            self.outcome = message

    def ask_for_stack(self) -> None:
        """Makes the worker write its stack, which `take_stack` collects."""
        self._stack = b""
        self.kill(worker.STACK_SIGNAL, signal_main_thread)
        # Sent after the signal: the worker handles the message in a thread, which may wait for the GIL or a device.
        self.tell(messages.Dump())

    def peek(self) -> None:
        """Makes the worker write the stack of its main thread for `position`; the log does not show it."""
        self._stack = b""
        if self.outcome is None:
            self.kill(worker.STACK_SIGNAL, signal_main_thread)

    def position(self) -> messages.Position | None:
        """Returns the worker's stack and used processor time; None if it has finished or exited."""
        if self.outcome is not None or not self.alive:
            return None
        return messages.Position(self._stack.decode(errors="replace"), cpu_seconds(self.pid))

    def take_stack(self, data: bytes) -> None:
        """Adds bytes that were read from the stack pipe."""
        self._stack += data

    def stack(self) -> str:
        """Returns the Python stack of the worker's main thread, innermost call first, or a text if there is none.

        The stack is also added to the rank's log, where the worker adds those of all threads unless it holds the GIL.
        """
        if isinstance(self.outcome, messages.Finished):
            return "it had returned"
        if not self.alive:
            return "its process had ended"
        text = self._stack.decode(errors="replace")
        self.output.add(text.splitlines())
        # The frames in faulthandler's output, without those of rankzero.
        lines = [line.strip() for line in text.splitlines() if line.startswith("  File") and not is_own_frame(line)]
        if lines:
            return "\n".join(lines)
        state = process_state(self.pid, None)
        what = "has exited" if state is None else _STATES.get(state, "does not answer (blocked in native code)")
        return f"its process {what}, no heartbeat for {time.monotonic() - self._beat_at:.0f} s"


def _start_worker(
    config: dict[str, Any], local_rank: int, stdio: tuple[int, int, int], control: int, stack: int
) -> int:
    """Starts a worker process: a fork if this agent has torch loaded, else a fresh interpreter."""
    agent = os.getpid()
    if "torch" in sys.modules:

        def main() -> None:
            forked.forget()
            worker.main(control, stack, agent, config["exit_timeout"])

        return forked.fork(
            main,
            env=environment(config),
            stdio=stdio,
            keep=(control, stack),
        )
    arguments = map(str, (control, stack, agent, config["exit_timeout"]))
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, config["code_path"], *arguments],
        stdin=stdio[0],
        stdout=stdio[1],
        stderr=stdio[2],
        pass_fds=[control, stack],
        start_new_session=True,
        env=environment(config),
    )
    # Exit statuses are collected by waitpid(-1), since orphaned grandchildren are re-parented to the agent too.
    process.returncode = 0
    return process.pid


def environment(config: dict[str, Any]) -> dict[str, str]:
    """Returns the environment that a worker starts with; the rank's own variables come with ``start``."""
    env = dict(os.environ)
    if config["temporary"]:
        # The agent deletes it, with what a killed rank left there.
        env["TMPDIR"] = config["temporary"]
    env.update(config["env"])
    # torchrun sets it too, unless the user did.
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return {**env, **visible_gpus(config["gpus"] if config["use_gpu"] else [], env)}


def visible_gpus(gpus: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that limit a rank to the GPUs of its task.

    Args:
        gpus: Ids of the GPUs.
        env: The environment so far: AMD's variable is set only if it is there.
    """
    ids = ",".join(gpus)
    # AMD's driver reads CUDA's variable, unless its own is set.
    found = {"CUDA_VISIBLE_DEVICES": ids} | ({"HIP_VISIBLE_DEVICES": ids} if "HIP_VISIBLE_DEVICES" in env else {})
    # Intel's variable takes numbers only; an empty value would select all GPUs.
    return found | ({"ZE_AFFINITY_MASK": ids} if gpus and all(map(str.isdecimal, gpus)) else {})


def rank_environment(context: dict[str, Any], config: dict[str, Any]) -> dict[str, str]:
    """Returns the variables that ``init_process_group`` and libraries above it read: all those that torchrun sets.

    Args:
        context: The fields of the rank's `rankzero.train.TrainContext`.
        config: The agent's configuration.
    """
    rank, world_size, chosen = str(context["rank"]), str(context["world_size"]), {**os.environ, **config["env"]}
    return {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(context["local_rank"]),
        "LOCAL_WORLD_SIZE": str(context["local_world_size"]),
        "NODE_RANK": str(context["node_rank"]),
        "GROUP_RANK": str(context["node_rank"]),
        "GROUP_WORLD_SIZE": str(context["world_size"] // context["local_world_size"]),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "TORCHELASTIC_RUN_ID": str(context["run_id"]),
        "TORCHELASTIC_RESTART_COUNT": str(config["restart_count"]),
        "TORCHELASTIC_MAX_RESTARTS": str(config["max_restarts"]),
        # `record` of torch.distributed.elastic writes an exception there.
        "TORCHELASTIC_ERROR_FILE": os.path.join(config["scratch"], f"error-{context['local_rank']}.json"),
        "RANKZERO_RUN_ID": str(context["run_id"]),
        # The network interface of gloo and NCCL, unless the user has chosen one.
        **{name: value for name, value in socket_environment(config["host"]).items() if name not in chosen},
    }


class Ending:
    """The end of the ranks of one task.

    Attributes:
        has_begun: The ranks were asked to exit.
        is_early: The ranks were asked to exit before all had committed.
        is_orphaned: The task process that started the agent has exited.
        asked: The ranks that were sent SIGTERM.
        kill_at: Monotonic time at which the remaining ranks get SIGKILL; None if no such time is set.
        flush_by: Monotonic time until which a stop waits for the reports that ranks still hold; None without one.
    """

    def __init__(self, ranks: Sequence[Rank], client: ChannelClient, grace: float, exit_timeout: float) -> None:
        """Prepares the end; sends no signal yet.

        Args:
            ranks: The ranks of the task; the caller may still append to the list.
            client: The channel that carries the final messages and lines.
            grace: Seconds between SIGTERM and SIGKILL unless `stop` is given another value.
            exit_timeout: Seconds that committed workers get to run their exit handlers.
        """
        self._ranks = ranks
        self._client = client
        self._grace = grace
        self._exit_timeout = exit_timeout
        self.has_begun = False
        self.is_early = False
        self.is_orphaned = False
        self.kill_at: float | None = None
        self.flush_by: float | None = None
        self._released: list[Rank] = []
        self.asked: set[Rank] = set()
        self._stop_by = 0.0
        self.has_parts = False
        """True once parts of checkpoints are queued on the channel: their delivery may use the rest of the grace."""

    @property
    def is_complete(self) -> bool:
        """True if the ranks were asked to exit and have exited."""
        return self.has_begun and not any(rank.alive for rank in self._ranks)

    def stop(self, grace: float | None = None) -> None:
        """Sends SIGTERM now and SIGKILL after ``grace`` seconds; a second call can only shorten the grace."""
        now = time.monotonic()
        deadline = now + (self._grace if grace is None else grace)
        self._stop_by = deadline if self.kill_at is None else min(self._stop_by, deadline)
        self.kill_at = deadline if self.kill_at is None else min(self.kill_at, deadline)
        self.is_early = True
        if not self.has_begun:
            self.has_begun = True
            self.flush_by = now + min(FLUSH_TIMEOUT(), (deadline - now) / 2)
            for rank in self._ranks:
                rank.begun = frozenset(rank.writing)
                rank.tell(messages.Flush())
            self.ask_written(now)

    def ask_written(self, now: float) -> None:
        """Sends SIGTERM to each rank whose reports are sent, and whose checkpoints begun before the stop are written.

        Most ranks have no handler for SIGTERM: it would kill them before they send what was reported.
        """
        if self.flush_by is not None and now >= self.flush_by:
            self.flush_by = None
        for rank in self._ranks:
            has_flushed = self.flush_by is None or rank.has_flushed or rank.outcome is not None or not rank.alive
            is_written = rank.begun is not None and not rank.begun & rank.writing
            if rank not in self.asked and has_flushed and is_written:
                self.asked.add(rank)
                rank.kill(signal.SIGTERM)

    def leave(self, why: str, cause: str) -> None:
        """Stops the ranks without a request of the driver, and reports the reason to it."""
        if not self.has_begun:
            self._client.queue(messages.encode(messages.Leaving(why, cause)))
        self.stop()

    def orphan(self) -> None:
        """Stops the ranks because the task process that started this agent has exited."""
        if self.is_orphaned:
            return
        self.is_orphaned = True
        self.leave("the process that held its ranks died (executor, driver or JVM)", LOST)

    def release(self) -> None:
        """Lets the ranks that have committed exit: without a driver, waiting for their peers is of no use."""
        for rank in self._ranks:
            if isinstance(rank.outcome, messages.Finished) and rank not in self._released:
                self._released.append(rank)
                rank.tell(messages.End())

    def await_exits(self) -> None:
        """Lets all ranks run their exit handlers and exit, once each has finished; a `stop` keeps its grace."""
        for rank in self._ranks:
            rank.tell(messages.End())
        self.has_begun = True
        if not self.is_early:
            self.kill_at = time.monotonic() + self._exit_timeout + bounds.WORKER_EXIT_MARGIN()

    def kill_overdue(self, now: float) -> None:
        """Sends SIGKILL to all ranks once `kill_at` has passed."""
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = None
            for rank in self._ranks:
                if rank.alive and not self.is_early:
                    rank.output.add([cut_off_message(self._exit_timeout, "native code that holds the GIL")])
                rank.kill(signal.SIGKILL)

    def deliver_last_lines(self, dispatch: Callable[[float], None]) -> None:
        """Delivers the lines that wait, for as long as the driver accepts them, or briefly if the run is stopped.

        Args:
            dispatch: Handles the events of the agent's loop that arrive within the given seconds.
        """
        deadline = progress_at = now = time.monotonic()
        deadline += bounds.STOPPED_LINES_TIMEOUT() if self.is_early else bounds.LAST_LINES_TIMEOUT()
        left, pause = self._waiting(), LAST_LINES_POLL_INTERVAL
        while left and now < min(deadline, progress_at + bounds.LAST_LINES_STALL_TIMEOUT()):
            for rank in self._ranks:
                rank.output.pump()
            dispatch(pause)
            pause = min(2 * pause, bounds.POLL_INTERVAL_SHORT)
            now = time.monotonic()
            if self.is_early:
                # A stop, or the death of the task process, may have arrived in this loop.
                deadline = min(deadline, now + bounds.STOPPED_LINES_TIMEOUT())
            if (waiting := self._waiting()) != left:
                left, progress_at = waiting, now
        for rank in self._ranks:
            rank.output.drop_rest()
        has_parts = self.has_parts and not self.is_orphaned
        self._client.close(max(bounds.STOPPED_LINES_TIMEOUT(), self._stop_by - time.monotonic() if has_parts else 0.0))

    def _waiting(self) -> int:
        """Returns the bytes of lines that the driver has not accepted."""
        return self._client.bulk_bytes + sum(rank.output.waiting for rank in self._ranks)
