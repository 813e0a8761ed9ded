"""The agent: starts the workers of one task, forwards what they say, leaves nothing behind.

One thread, one selector. It ends when the driver says so, when the driver is gone, or when the
process that holds it is gone (end of file on standard input), and always takes every descendant
with it. Ranks are not known here until the driver's ``start``: workers import torch meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from typing import IO, Any

from rankzero.agent import descendants
from rankzero.agent.lines import LineSplitter
from rankzero.agent.worker import EXIT_HANDLERS_TIMEOUT
from rankzero.channel import frames
from rankzero.channel.client import ChannelClient, ChannelClosed
from rankzero.channel.frames import FrameError, Message
from rankzero.formats import sha256_of

ORPHAN_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL when driver or task died without saying so."""

END_GRACE = EXIT_HANDLERS_TIMEOUT + 1.0
"""Seconds that committed workers get to run their exit handlers."""

FAREWELL_TIMEOUT = 2.0
"""Seconds to hand the last frames to the driver."""

LOG_BUFFER = 64 << 20
"""Bytes waiting for the driver above which log lines are dropped and counted."""

UPLOAD_WINDOW = 8 << 20
"""Bytes waiting for the driver above which an upload pauses."""

DRAIN_READS = 1024
"""Reads after which an ended worker's pipe, which a child may still fill, is left alone."""

_READ = 1 << 18
# rankzero and its cloudpickle come from the given place; the user's imports do not look there first.
_WORKER = (
    "import sys; sys.path[:1] = [sys.argv[1]]; import rankzero, cloudpickle; "
    "sys.path.append(sys.path.pop(0)); from rankzero.agent.worker import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]))"
)


class Worker:
    """A started rank, as the agent sees it."""

    def __init__(self, local_rank: int, pid: int, control: socket.socket, output: IO[bytes]) -> None:
        self.local_rank = local_rank
        self.pid = pid
        self.control = control
        self.output = output
        self.lines = LineSplitter()
        self.decoder = frames.Decoder()
        self.decoder.trust(None)
        self.alive = True
        self.outcome: str | None = None
        self.dropped = 0


class Agent:
    """The workers of one task and the channel to the driver."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        self._client = ChannelClient(tuple(config["driver"]), config["secret"], config["task"])
        self._start: Message | None = None
        self._missing_files: dict[str, str] = {}
        self._incoming: tuple[IO[bytes], int] | None = None
        self._upload: IO[bytes] | None = None
        self._after_upload: list[Message] = []
        self._stopping = False
        self._orphaned = False
        self._kill_at: float | None = None

    def run(self) -> None:
        """Runs until everything below this process has ended."""
        descendants.become_subreaper()
        wakeup, signalled = socket.socketpair()
        for end in (wakeup, signalled):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._stop(ORPHAN_GRACE))
        signal.set_wakeup_fd(signalled.fileno())
        self._watch(wakeup, lambda: self._on_signal(wakeup))
        self._watch(sys.stdin.fileno(), self._on_stdin)
        try:
            for local_rank in range(self._config["workers"]):
                self._workers.append(self._start_worker(local_rank))
            self._connect()
            while not self._finished():
                self._step()
        finally:
            self._end_everything()

    # -- the loop ------------------------------------------------------------------------------

    def _watch(self, source: Any, callback: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def _unwatch(self, source: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def _step(self) -> None:
        timeout = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        for key, _ in self._selector.select(timeout):
            key.data()
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = None
            self._kill_workers()
        self._pump()

    def _pump(self) -> None:
        """Sends what waits for the driver, and asks to be woken when there is room for more."""
        try:
            while self._upload and self._client.unsent_bytes < UPLOAD_WINDOW:
                self._continue_upload(self._upload)
                self._client.flush()
            self._client.flush()
        except ChannelClosed:
            self._lose_driver()
            return
        events = selectors.EVENT_READ
        if self._client.unsent_bytes:
            events |= selectors.EVENT_WRITE
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(self._client.socket, events, self._on_driver)

    def _finished(self) -> bool:
        return self._stopping and not any(worker.alive for worker in self._workers)

    # -- the driver ----------------------------------------------------------------------------

    def _connect(self) -> None:
        self._client.connect()
        self._watch(self._client.socket, self._on_driver)
        self._send(
            {
                "type": "join",
                "host": self._config["host"],
                "hostname": socket.gethostname(),
                "pid": os.getpid(),
                "python": ".".join(map(str, sys.version_info[:3])),
                "gpus": self._config["gpus"],
                "workers": len(self._workers),
            }
        )

    def _send(self, message: Message) -> None:
        if self._upload:
            # Nothing may come between the chunks of an upload.
            self._after_upload.append(message)
        else:
            self._client.queue(message)

    def _on_driver(self) -> None:
        try:
            for frame in self._client.receive():
                if isinstance(frame, bytes):
                    self._on_file_content(frame)
                else:
                    self._on_message(frame)
        except (ChannelClosed, FrameError):
            self._lose_driver()

    def _lose_driver(self) -> None:
        self._unwatch(self._client.socket)
        self._client.close()
        self._upload = None
        self._stop(ORPHAN_GRACE)

    def _on_message(self, message: Message) -> None:
        kind = message["type"]
        if kind == "start":
            self._on_start(message)
        elif kind == "go":
            for worker in self._workers:
                self._tell(worker, message)
        elif kind == "file":
            self._on_file(message)
        elif kind == "stop":
            self._stop(message["grace"])
        elif kind == "end":
            self._await_exits()

    # -- files the workers need ----------------------------------------------------------------

    def _on_start(self, start: Message) -> None:
        """Finds payload, modules and references, here if the store is shared, else at the driver."""
        shared = self._is_shared(start["run_directory"], start["run_token"])
        start["result_directory"] = self._config["scratch"]
        if shared:
            start["result_directory"] = os.path.join(start["run_directory"], "result")
        self._start = start
        for name, file in start["files"].items():
            here = file["location"]
            if not (shared or file["absolute"]) or not _has_size(here, file["size"]):
                here = os.path.join(self._config["scratch"], name)
                self._missing_files[name] = here
                self._send({"type": "fetch", "name": name})
            file["here"] = here
        self._start_workers_when_complete()

    @staticmethod
    def _is_shared(run_directory: str | None, token: str) -> bool:
        """True if the driver's run directory is the one that this host sees under that path."""
        if run_directory is None:
            return False
        try:
            with open(os.path.join(run_directory, "token")) as file:
                return file.read() == token and os.access(os.path.join(run_directory, "result"), os.W_OK)
        except OSError:
            return False

    def _on_file(self, message: Message) -> None:
        if "error" in message:
            text = f"{message['name']} cannot be had from the driver: {message['error']}"
            facts = {"exception_type": "rankzero.errors.ResultError", "message": text, "exit_code": 1}
            self._send({"type": "failure", "local_rank": 0, "time": time.time(), **facts})
            return
        path = self._missing_files[message["name"]]
        self._incoming = open(path, "wb"), message["size"]
        self._on_file_content(b"")

    def _on_file_content(self, data: bytes) -> None:
        assert self._incoming is not None
        file, left = self._incoming
        file.write(data)
        left -= len(data)
        self._incoming = file, left
        if left == 0:
            file.close()
            self._incoming = None
            name = next(name for name, path in self._missing_files.items() if path == file.name)
            del self._missing_files[name]
            self._start_workers_when_complete()

    def _start_workers_when_complete(self) -> None:
        if self._missing_files:
            return
        assert self._start is not None
        files = self._start["files"]
        modules = None
        if "modules.zip" in files:
            if sha256_of(files["modules.zip"]["here"]) != files["modules.zip"]["sha256"]:
                raise RuntimeError("modules.zip does not carry the checksum that the driver recorded")
            modules = os.path.join(self._config["scratch"], "modules")
            with zipfile.ZipFile(files["modules.zip"]["here"]) as archive:
                archive.extractall(modules)
        common = {
            "type": "start",
            "master_addr": self._start["master_addr"],
            "payload": files["payload.pkl"]["here"],
            "payload_sha256": files["payload.pkl"]["sha256"],
            "modules": modules,
            "refs": {file["uri"]: file["here"] for file in files.values() if "uri" in file},
            "result_directory": self._start["result_directory"],
        }
        for worker in self._workers:
            context = self._context(worker)
            self._tell(worker, {**common, "context": context, "env": _rank_environment(context)})

    def _context(self, worker: Worker) -> dict[str, Any]:
        assert self._start is not None
        return {
            **self._start["context"],
            "rank": self._start["first_rank"] + worker.local_rank,
            "local_rank": worker.local_rank,
            "local_world_size": len(self._workers),
            "node_rank": self._start["node_rank"],
            "use_gpu": self._config["use_gpu"],
        }

    # -- workers -------------------------------------------------------------------------------

    def _start_worker(self, local_rank: int) -> Worker:
        ours, theirs = socket.socketpair()
        read, write = os.pipe()
        arguments = [self._config["code_path"], str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", _WORKER, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=self._worker_environment(),
        )
        # Exit statuses are collected by waitpid(-1), since orphaned grandchildren come here too.
        process.returncode = 0
        theirs.close()
        os.close(write)
        ours.setblocking(False)
        os.set_blocking(read, False)
        worker = Worker(local_rank, process.pid, ours, open(read, "rb", buffering=0))
        self._watch(ours, lambda: self._on_control(worker))
        self._watch(worker.output, lambda: self._on_output(worker))
        return worker

    def _worker_environment(self) -> dict[str, str]:
        env = {**os.environ, **self._config["env"], "RANKZERO_SCRATCH": self._config["scratch"]}
        gpus = self._config["gpus"]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus) if self._config["use_gpu"] else ""
        cores = self._config["cores"] or os.cpu_count() or 1
        env.setdefault("PYTHONIOENCODING", "utf-8")
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores // self._config["workers"])))
        return env

    def _tell(self, worker: Worker, message: Message) -> None:
        data = frames.encode(message)
        worker.control.setblocking(True)
        with contextlib.suppress(OSError):
            worker.control.sendall(data)
        worker.control.setblocking(False)

    def _on_control(self, worker: Worker) -> bool:
        """Takes one read's worth, so that a worker that never pauses cannot hold the loop.

        Returns:
            True if there may be more.
        """
        try:
            data = worker.control.recv(_READ)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._unwatch(worker.control)
            return False
        worker.decoder.feed(data)
        for message in worker.decoder:
            assert isinstance(message, dict)
            self._on_worker_message(worker, message)
        return True

    def _on_worker_message(self, worker: Worker, message: Message) -> None:
        kind = message["type"]
        message["local_rank"] = worker.local_rank
        if kind in ("commit", "failure"):
            worker.outcome = kind
            # What the rank printed before its outcome belongs before it for the reader too.
            self._drain(worker, self._on_output)
        if kind == "commit" and self._needs_upload(message):
            result = message["result"]
            self._send({"type": "upload", "name": "value", "size": result["size"]})
            self._upload = open(result["path"], "rb")
        self._send(message)

    def _needs_upload(self, commit: Message) -> bool:
        scratch = self._config["scratch"]
        return "result" in commit and os.path.dirname(commit["result"]["path"]) == scratch

    def _continue_upload(self, file: IO[bytes]) -> None:
        if chunk := file.read(frames.CHUNK):
            self._client.queue(chunk)
            return
        file.close()
        self._upload = None
        waiting, self._after_upload = self._after_upload, []
        for message in waiting:
            self._send(message)

    def _on_output(self, worker: Worker) -> bool:
        """Takes one read's worth of what a worker printed; True if there may be more."""
        try:
            data = worker.output.read(_READ)
        except (OSError, ValueError):
            data = b""
        if data is None:
            return False
        if not data:
            self._unwatch(worker.output)
            self._send_lines(worker, worker.lines.finish())
            return False
        self._send_lines(worker, worker.lines.feed(data))
        return True

    @staticmethod
    def _drain(worker: Worker, read: Callable[[Worker], bool]) -> None:
        """Reads what is there, within a bound: a child may go on writing."""
        for _ in range(DRAIN_READS):
            if not read(worker):
                return

    def _send_lines(self, worker: Worker, lines: list[str]) -> None:
        if self._client.unsent_bytes > LOG_BUFFER:
            worker.dropped += len(lines)
            return
        if worker.dropped:
            lines.append(f"rankzero: {worker.dropped} log lines were dropped, the driver was too slow")
            worker.dropped = 0
        if lines:
            self._send({"type": "log", "local_rank": worker.local_rank, "lines": lines})

    # -- ending --------------------------------------------------------------------------------

    def _on_signal(self, wakeup: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            wakeup.recv(_READ)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for worker in self._workers:
                if worker.pid == pid:
                    self._on_exit(worker, status)

    def _on_exit(self, worker: Worker, status: int) -> None:
        worker.alive = False
        self._drain(worker, self._on_control)
        self._drain(worker, self._on_output)
        code = os.waitstatus_to_exitcode(status)
        if worker.outcome is None and not self._stopping:
            self._send(
                {
                    "type": "failure",
                    "local_rank": worker.local_rank,
                    "time": time.time(),
                    "exit_code": code if code >= 0 else None,
                    "signal": _signal_name(-code) if code < 0 else None,
                }
            )

    def _on_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), _READ):
            self._unwatch(sys.stdin.fileno())
            self._orphaned = True
            self._stop(ORPHAN_GRACE)

    def _stop(self, grace: float) -> None:
        """SIGTERM now, SIGKILL after ``grace`` seconds; a second call can only hurry."""
        deadline = time.monotonic() + grace
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)
        if not self._stopping:
            self._stopping = True
            for worker in self._workers:
                if worker.alive:
                    with contextlib.suppress(OSError):
                        os.kill(worker.pid, signal.SIGTERM)

    def _await_exits(self) -> None:
        """All ranks have committed: let them run their exit handlers, and rank 0 go."""
        for worker in self._workers:
            self._tell(worker, {"type": "end"})
        self._stopping = True
        self._kill_at = time.monotonic() + END_GRACE

    def _kill_workers(self) -> None:
        for worker in self._workers:
            if worker.alive:
                with contextlib.suppress(OSError):
                    os.killpg(worker.pid, signal.SIGKILL)

    def _end_everything(self) -> None:
        signal.set_wakeup_fd(-1)
        descendants.kill_all([worker.pid for worker in self._workers if worker.alive])
        for worker in self._workers:
            # A child that held the pipe is gone now; what is in it can be read to the end.
            with contextlib.suppress(Exception):
                self._drain(worker, self._on_output)
        with contextlib.suppress(Exception):
            self._send({"type": "bye"})
            self._client.socket.settimeout(FAREWELL_TIMEOUT)
            self._client.flush()
        self._client.close()
        if self._orphaned:
            # Whoever holds this agent would read its log and then remove the directory.
            shutil.rmtree(self._config["scratch"], ignore_errors=True)


def _has_size(path: str, size: int) -> bool:
    try:
        return os.path.getsize(path) == size
    except OSError:
        return False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _rank_environment(context: dict[str, Any]) -> dict[str, str]:
    """The variables that ``init_process_group`` and the libraries above it read."""
    return {
        "RANK": str(context["rank"]),
        "WORLD_SIZE": str(context["world_size"]),
        "LOCAL_RANK": str(context["local_rank"]),
        "LOCAL_WORLD_SIZE": str(context["local_world_size"]),
        "NODE_RANK": str(context["node_rank"]),
        "GROUP_RANK": str(context["node_rank"]),
        "RANKZERO_RUN_ID": str(context["run_id"]),
    }


def main() -> None:
    """Entry point of the agent process: one line of JSON on standard input, then end of file."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(sys.stdin.fileno(), _READ)
        if not piece:
            sys.exit("the process that started this agent died before it said what to do")
        line += piece
    Agent(json.loads(line)).run()
