"""`Rank`: the agent's handle of one worker process: starts it, and reads what it sends, prints and reports."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from rankzero import bounds
from rankzero.agent.output import Output, release
from rankzero.channel import messages
from rankzero.channel.connection import Connection
from rankzero.channel.messages import Decoder, Message, encode
from rankzero.host import forks
from rankzero.host.network import socket_environment
from rankzero.host.processes import signal_name, unnamed_file
from rankzero.worker import main as worker

PIPE_SIZE = 1 << 20  # Capacity of the pipe for a rank's output, where the system allows it (macOS does not)
READ_SIZE = 1 << 18  # Most bytes of one read
DRAIN_READS = 16  # Most reads that drain a pipe or a socket; a limit, because a process may write without end
MUCH = 8 << 10  # Bytes of one read from which on the pipe is read again soon: it holds what is printed meanwhile
BRISK = 0.005  # Seconds until then
REPORTS_SIZE = 4 << 20  # Most bytes of reports in one message, more than one report has

# rankzero and its cloudpickle are imported from the given path, which is then moved to the end of the search path.
_BOOTSTRAP = (
    "import json, sys; sys.path[:1] = [sys.argv[1]]; import rankzero, cloudpickle; "
    "sys.path.append(sys.path.pop(0)); from rankzero.worker.main import main; "
    "main(*map(json.loads, sys.argv[2:]))"
)


class Rank:
    """A worker process that this agent has started.

    Attributes:
        local_rank: Index within the task.
        pid: Its process id.
        alive: False once its exit status was collected.
        outcome: What it has sent last about itself.
        output: What it prints.
    """

    def __init__(self, local_rank: int, config: dict[str, Any] | None = None) -> None:
        """Starts the worker process, which imports torch and waits for its `Start`; ahead of a ``config`` by a fork."""
        self.local_rank = local_rank
        self.alive = True
        self.outcome: messages.Finished | messages.Failed | None = None
        self.output: Output
        self._decoder = Decoder()
        self._unsent = bytearray()
        self._reports, self._reported = unnamed_file(), 0
        # Threads of the rank write at the same time, and the kernel locks no file's offset for a file in memory.
        fcntl.fcntl(self._reports, fcntl.F_SETFL, os.O_APPEND)
        self._control, control = socket.socketpair()
        read, write = os.pipe()
        with contextlib.suppress(OSError, AttributeError):
            # The pipe of a quiet rank is read up to `DELIVERY_INTERVAL` late: a burst should fit.
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        with open(os.devnull) as nothing:
            stdio = (nothing.fileno(), write, write)
            self.pid = _start_worker(config, stdio, (control.fileno(), self._reports.fileno()))
        control.close()
        os.close(write)
        self._control.setblocking(False)
        os.set_blocking(read, False)
        self._pipe: IO[bytes] = open(read, "rb", buffering=0)

    def listen(self, connection: Connection, scratch: str, on_message: Callable[[Rank, Message], None]) -> None:
        """Begins to read from the worker, whose messages ``on_message`` receives; the driver gets the rest."""
        self._connection, self.output = connection, Output(self.local_rank, scratch, connection)
        self._on_message = on_message
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control, self.read_messages)
        loop.add_reader(self._pipe, self._on_printed)

    def tell(self, message: Message) -> None:
        """Sends a message to the worker; without blocking, since it may be stopped. Ignores a dead worker."""
        self._unsent += encode(message)
        self._flush()

    def send(self, message: Message) -> None:
        """Sends a message of the worker, or about it, to the driver."""
        self._connection.send(message, self.local_rank)

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_writer(self._control)
        try:
            while self._unsent:
                del self._unsent[: self._control.send(self._unsent)]
        except BlockingIOError:
            loop.add_writer(self._control, self._flush)
        except OSError:
            self._unsent.clear()

    def kill(self, number: int) -> None:
        """Sends a signal to the worker if it is alive."""
        if self.alive:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def note_exit(self, status: int, *, was_asked: bool) -> None:
        """Sends what an exited worker has left, and how it ended, unless it was asked to or has an outcome."""
        self.alive = False
        self.read_messages()
        tail, code = self.drain(), os.waitstatus_to_exitcode(status)
        if self.outcome is None and was_asked:
            # Ranks of other agents may wait for this one to exit.
            self.send(messages.Reached("exited"))
        elif self.outcome is None:
            how = {"exit_code": code} if code >= 0 else {"signal": signal_name(-code)}
            self.send(messages.Failed(time.time(), log_tail=tail, **how))

    # -- messages and reports ------------------------------------------------------------------

    def read_messages(self) -> None:
        """Handles the messages that the worker has sent until now."""
        for _ in range(DRAIN_READS):
            try:
                data = self._control.recv(READ_SIZE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                asyncio.get_running_loop().remove_reader(self._control)
                return
            for message, _ in self._decoder.feed(data):
                self._on_message(self, message)

    def send_reports(self) -> None:
        """Sends the metrics that the worker has reported since the last call."""
        descriptor = self._reports.fileno()
        while size := min(os.fstat(descriptor).st_size - self._reported, REPORTS_SIZE):
            lines = os.pread(descriptor, size, self._reported).split(b"\n")
            if not (taken := size - len(lines.pop())):
                return
            self.send(messages.Metrics([json.loads(line) for line in lines]))
            self._reported += taken
            release(descriptor, self._reported)

    # -- output --------------------------------------------------------------------------------

    def _on_printed(self) -> None:
        """Forwards printed lines. A pipe with few lines is read again later, since each read wakes the driver."""
        loop = asyncio.get_running_loop()
        size = self._read_output()
        if self._pipe.closed:
            return
        loop.remove_reader(self._pipe)
        if size:
            loop.call_later(BRISK if size >= MUCH else bounds.DELIVERY_INTERVAL, self._on_printed)
        else:
            loop.add_reader(self._pipe, self._on_printed)

    def _read_output(self) -> int:
        """Forwards the output of one read of the worker's pipe; returns its size."""
        try:
            data = self._pipe.read(READ_SIZE)
        except (OSError, ValueError):
            data = b""
        if data is None:
            return 0
        if not data and not self._pipe.closed:
            asyncio.get_running_loop().remove_reader(self._pipe)
            self._pipe.close()
        self.output.feed(data, final=not data)
        return len(data)

    def drain(self) -> list[str]:
        """Forwards what the worker has printed and reported until now; returns its last lines, oldest first."""
        for _ in range(DRAIN_READS):
            if not self._read_output():
                break
        self.send_reports()
        return self.output.tail


def _start_worker(config: dict[str, Any] | None, stdio: tuple[int, int, int], descriptors: tuple[int, int]) -> int:
    """Starts a worker process: a fork if this agent has torch loaded, else a fresh interpreter.

    It keeps the ``descriptors`` of its control socket and of the file for its reports.
    """
    arguments = *descriptors, os.getpid()
    if config is None or "torch" in sys.modules:

        def main() -> None:
            # Zygotes and agents outlive it by a handler.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            forks.forget()
            worker.main(*arguments, forks.set_environment)

        return forks.fork(main, env=os.environ, stdio=stdio, keep=descriptors)
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, config["code_path"], *map(str, arguments)],
        stdin=stdio[0],
        stdout=stdio[1],
        stderr=stdio[2],
        pass_fds=descriptors,
        start_new_session=True,
        env=environment(config),
    )
    # Exit statuses are collected by waitpid(-1), since orphaned grandchildren are re-parented to the agent too.
    process.returncode = 0
    return process.pid


def environment(config: dict[str, Any]) -> dict[str, str]:
    """Returns the environment of a worker that is no rank yet."""
    # torchrun sets the first one too, unless the user did. The others are the network interface of gloo and NCCL.
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **socket_environment(config["host"])}
    env = {**defaults, **os.environ, **config["env"]}
    return env | visible_gpus(config["gpus"] if config["use_gpu"] else [], env)


def rank_environment(config: dict[str, Any], context: dict[str, Any]) -> dict[str, str]:
    """Returns what a rank with this context adds to the environment of its worker: all variables that torchrun sets."""
    rank, world_size = str(context["rank"]), str(context["world_size"])
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
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        # `record` of torch.distributed.elastic writes an exception there.
        "TORCHELASTIC_ERROR_FILE": os.path.join(config["scratch"], f"error-{context['local_rank']}.json"),
        "RANKZERO_RUN_ID": str(context["run_id"]),
    }


def visible_gpus(gpus: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that limit a rank to the GPUs of its task; AMD's only if ``env`` has it."""
    # AMD's driver reads CUDA's variable, unless its own is set.
    names = {"CUDA_VISIBLE_DEVICES", *{"HIP_VISIBLE_DEVICES"} & env.keys()}
    # Intel's variable takes numbers only; an empty value would select all GPUs.
    names |= {"ZE_AFFINITY_MASK"} if gpus and all(map(str.isdecimal, gpus)) else set()
    return dict.fromkeys(names, ",".join(gpus))
