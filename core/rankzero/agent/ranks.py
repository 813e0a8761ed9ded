"""`Rank`: the agent's handle of one worker process, which it starts, and its environment."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from rankzero.agent.output import Outbox, RankOutput, is_own_frame
from rankzero.channel import messages
from rankzero.channel.messages import Decoder, Message, encode
from rankzero.host import forks
from rankzero.host.network import socket_environment
from rankzero.host.processes import cpu_seconds, process_state, signal_main_thread
from rankzero.worker import main as worker

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

    def __init__(self, local_rank: int, config: dict[str, Any], outbox: Outbox) -> None:
        """Starts the worker process, which imports torch and waits for its `Start`.

        Args:
            local_rank: Index within the task.
            config: The agent's configuration.
            outbox: The way of its messages and output to the driver.
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
        self._outbox = outbox
        self.output = RankOutput(local_rank, outbox)
        self.decoder = Decoder()
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
        """Sends a message to the worker; without blocking, since it may be stopped. Ignores a dead worker."""
        self._unsent += encode(message)
        self._flush()

    def send(self, message: Message) -> None:
        """Sends a message of the worker, or about it, to the driver."""
        self._outbox.send(message, self.local_rank)

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_writer(self.control)
        try:
            while self._unsent:
                del self._unsent[: self.control.send(self._unsent)]
        except BlockingIOError:
            loop.add_writer(self.control, self._flush)
        except OSError:
            self._unsent.clear()

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
        elif isinstance(message, messages.Flush):
            # The worker may have reported some that were on their way when the agent stopped it.
            self.has_flushed, self.begun = True, frozenset(self.writing)
        elif isinstance(message, (messages.Finished, messages.Failed)):
            self.outcome = message

    def ask_for_stack(self, *, quiet: bool) -> None:
        """Makes the worker write its stack, which `take_stack` collects; also to its log, unless it is ``quiet``."""
        self._stack = b""
        if self.outcome is None:
            self.kill(worker.STACK_SIGNAL, signal_main_thread)
        if not quiet:
            # After the signal: the worker handles the message in a thread, which may wait for the GIL or a device.
            self.tell(messages.Dump())

    def take_stack(self, data: bytes) -> None:
        """Adds bytes that were read from the stack pipe."""
        self._stack += data

    def stack(self, *, quiet: bool) -> messages.Stack:
        """Returns the Python stack of the worker's main thread, innermost call first, or a text if there is none.

        The stack is also added to the rank's log, where the worker adds those of all threads unless it holds the GIL.
        """
        if isinstance(self.outcome, messages.Finished):
            return messages.Stack("it had returned")
        if not self.alive:
            return messages.Stack("its process had ended")
        text = self._stack.decode(errors="replace")
        if not quiet:
            self.output.add(text.splitlines())
        # The frames in faulthandler's output, without those of rankzero.
        lines = [line.strip() for line in text.splitlines() if line.startswith("  File") and not is_own_frame(line)]
        if not lines:
            state = process_state(self.pid, None)
            what = "has exited" if state is None else _STATES.get(state, "does not answer (blocked in native code)")
            lines = [f"its process {what}, no heartbeat for {time.monotonic() - self._beat_at:.0f} s"]
        return messages.Stack("\n".join(lines), cpu_seconds(self.pid))


def _start_worker(
    config: dict[str, Any], local_rank: int, stdio: tuple[int, int, int], control: int, stack: int
) -> int:
    """Starts a worker process: a fork if this agent has torch loaded, else a fresh interpreter."""
    agent = os.getpid()
    if "torch" in sys.modules:

        def main() -> None:
            forks.forget()
            worker.main(control, stack, agent, config["exit_timeout"])

        return forks.fork(
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
