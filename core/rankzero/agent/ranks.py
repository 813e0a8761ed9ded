"""One worker as its agent sees it: how it is started, sent messages, asked where it stands."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rankzero.agent.lines import is_own_frame
from rankzero.agent.output import RankOutput
from rankzero.channel import frames
from rankzero.channel.agent_end.client import ChannelClient
from rankzero.channel.frames import Message
from rankzero.host import forked
from rankzero.host.processes import cpu_seconds
from rankzero.worker import main as worker

PIPE_SIZE = 1 << 20
"""Bytes that a rank may print ahead of its agent, where the system lets a user have so many (macOS: no)."""

# rankzero and its cloudpickle come from the given place; the user's imports do not look there first.
_BOOTSTRAP = (
    "import json, sys; sys.path[:1] = [sys.argv[1]]; import rankzero, cloudpickle; "
    "sys.path.append(sys.path.pop(0)); from rankzero.worker.main import main; "
    "main(*map(json.loads, sys.argv[2:]))"
)


class Rank:
    """A started worker."""

    def __init__(self, local_rank: int, config: dict[str, Any], client: ChannelClient) -> None:
        """Starts the worker process, which imports torch and waits for its ``start``.

        Args:
            local_rank: Index within the task.
            config: The agent's configuration.
            client: Where its output goes.
        """
        self.local_rank = local_rank
        self.alive = True
        self.outcome: str | None = None
        self.writing: set[int] = set()
        """Numbers of the checkpoints that it was given by the training, and has not written yet."""
        self.cut_off_at: float | None = None
        self.output = RankOutput(local_rank, client, config["scratch"])
        self.decoder = frames.Decoder()
        self.decoder.trust(None)
        self._beat_at = time.monotonic()
        self._stack = b""
        self._untold = bytearray()
        self.control, control = socket.socketpair()
        read, write = os.pipe()
        with contextlib.suppress(OSError, AttributeError):
            # A burst after few lines is fetched up to `DELIVERY_INTERVAL` later: it should fit.
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        stack_read, stack_write = os.pipe()
        with open(os.devnull) as nothing:
            stdio = (nothing.fileno(), write, write)
            self.pid = _start_worker(config, local_rank, stdio, control.fileno(), stack_write)
        control.close()
        os.close(write)
        os.close(stack_write)
        self.control.setblocking(False)
        self.pipe = _reader(read)
        self.stack_pipe = _reader(stack_read)

    def tell(self, message: Message) -> None:
        """Sends a message, now or when the worker reads again (`flush`); a dead worker is ignored."""
        self._untold += frames.encode(message)
        self.flush()

    def flush(self) -> bool:
        """Sends what the worker has not taken yet; True if something is left. Never waits: it may be stopped."""
        try:
            while self._untold:
                del self._untold[: self.control.send(self._untold)]
        except BlockingIOError:
            return True
        except OSError:
            self._untold.clear()
        return False

    def kill(self, number: int) -> None:
        """Sends a signal to the worker, if it lives."""
        if self.alive:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def note(self, message: Message) -> None:
        """Remembers what a message reports of the worker's state."""
        kind = message["type"]
        self._beat_at = time.monotonic()
        if kind == "checkpoint-begun":
            self.writing.add(message["index"])
        elif kind in ("checkpoint", "checkpoint-failed"):
            self.writing.discard(message["index"])
        if kind in ("commit", "failure"):
            self.outcome = kind

    def ask_for_stack(self) -> None:
        """Makes the worker write its stack, which `take_stack` collects."""
        self._stack = b""
        self.kill(worker.STACK_SIGNAL)
        # After it: this may wait for the interpreter's lock, or for a device.
        self.tell({"type": "dump"})

    def peek(self) -> None:
        """Makes the worker write the stack of its main thread, for `position`; nothing of it goes to its log."""
        self._stack = b""
        if self.outcome is None:
            self.kill(worker.STACK_SIGNAL)

    def position(self) -> dict[str, Any] | None:
        """Returns the worker's stack and the processor time that it has used; None if it has ended or does not run."""
        if self.outcome is not None or not self.alive:
            return None
        return {"stack": self._stack.decode(errors="replace"), "cpu": cpu_seconds(self.pid)}

    def take_stack(self, data: bytes) -> None:
        """Adds what came out of the stack pipe."""
        self._stack += data

    def stack(self) -> str:
        """Where the worker stands, in words or as the Python stack of its main thread, innermost call first.

        That goes to its log, too, where those of all its threads follow, unless it holds the interpreter's lock.
        """
        if self.outcome == "commit":
            return "it had returned"
        if not self.alive:
            return "its process had ended"
        text = self._stack.decode(errors="replace")
        self.output.add(text.splitlines())
        silence = f"no heartbeat for {time.monotonic() - self._beat_at:.0f} s"
        lines = _calls(text)
        if lines:
            return "\n".join(lines)
        state = _state_words(self.pid)
        return f"its process {state}, {silence}"


def _start_worker(
    config: dict[str, Any], local_rank: int, stdio: tuple[int, int, int], control: int, stack: int
) -> int:
    """A worker process: a fork if this agent is one and has torch loaded, else a fresh interpreter."""
    agent = os.getpid()
    if "torch" in sys.modules:

        def main() -> None:
            forked.forget()
            worker.main(control, stack, agent, config["exit_timeout"])

        return forked.fork(
            main,
            title=f"rankzero.worker.main local rank {local_rank}",
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
    # Exit statuses are collected by waitpid(-1), since orphaned grandchildren come to the agent too.
    process.returncode = 0
    return process.pid


def environment(config: dict[str, Any]) -> dict[str, str]:
    """The environment that a worker starts with; what depends on its rank comes with ``start``."""
    env = dict(os.environ)
    if config["temporary"]:
        # What a killed rank left there goes with its agent.
        env["TMPDIR"] = config["temporary"]
    env.update(config["env"])
    # As torchrun does, which leaves it to the user, too.
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return {**env, **visible_gpus(config["gpus"] if config["use_gpu"] else [], env)}


def visible_gpus(gpus: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """The variables by which the drivers of GPUs show a rank those of its task.

    Args:
        gpus: Their ids.
        env: What is set already: a variable of AMD's or Intel's is left out unless it is, or is needed.
    """
    ids = ",".join(gpus)
    # AMD's driver reads CUDA's variable, too, unless it has its own.
    found = {"CUDA_VISIBLE_DEVICES": ids} | ({"HIP_VISIBLE_DEVICES": ids} if "HIP_VISIBLE_DEVICES" in env else {})
    # Intel's takes numbers only; nothing would stand for all.
    return found | ({"ZE_AFFINITY_MASK": ids} if gpus and all(map(str.isdecimal, gpus)) else {})


def rank_environment(context: dict[str, Any], config: dict[str, Any]) -> dict[str, str]:
    """The variables that ``init_process_group`` and the libraries above it read: all those that torchrun sets.

    Args:
        context: The fields of the rank's `rankzero.train.TrainContext`.
        config: The agent's configuration.
    """
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
        # Where `record` of torch.distributed.elastic writes an exception.
        "TORCHELASTIC_ERROR_FILE": os.path.join(config["scratch"], f"error-{context['local_rank']}.json"),
        "RANKZERO_RUN_ID": str(context["run_id"]),
    }


def _reader(fd: int) -> IO[bytes]:
    os.set_blocking(fd, False)
    return open(fd, "rb", buffering=0)


def _calls(text: str) -> list[str]:
    """The calls in what faulthandler wrote, without rankzero's own."""
    return [line.strip() for line in text.splitlines() if line.startswith("  File") and not is_own_frame(line)]


def _state_words(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "has exited"
    return {
        "T": "is stopped (SIGSTOP)",
        "t": "is stopped by a debugger",
        "D": "is blocked in the kernel",
    }.get(state, "does not answer (blocked in native code)")
