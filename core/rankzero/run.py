"""The run directory, which is the truth about a run, and `RunHandle`, which reads it.

    job.json      what was asked for
    private.json  environment and engine configuration of the user (may hold secrets)
    payload.pkl   function or script and arguments;  modules.zip  the user's modules
    token         tells an agent that it sees this very directory
    status.json   state, heartbeat, error, result: replaced atomically by the driver
    events.jsonl  state changes, metrics and failures, one JSON object a line
    logs/         rank-N.log for every rank
    result/       rank 0's value
    cancel        a request to end
    driver.log    what a detached driver wrote

On an object store ``events.jsonl`` and the logs are folders of numbered pieces.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, TypeVar, cast

from rankzero import store
from rankzero.errors import (
    EngineError,
    InvalidJobError,
    ResultError,
    RunNotFoundError,
    error_from_json,
)
from rankzero.job import Job
from rankzero.policy import DRIVER_DEAD_AFTER, driver_is_dead
from rankzero.result import ResultRef

R = TypeVar("R")

FOLLOW_INTERVAL = 0.05
"""Seconds between two looks at a run directory on a local disk."""

FOLLOW_INTERVAL_REMOTE = 1.0
"""Seconds between two looks at a run directory on an object store."""

DRIVER_LOG_TAIL = 15
"""Lines of a dead driver's log that its error shows."""

FINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True)
class RunStatus:
    """A run's state at one moment.

    Attributes:
        state: ``"pending"``, ``"starting"``, ``"running"``, ``"succeeded"``, ``"failed"`` or
            ``"cancelled"``.
        attempt: Number of the current try, from 0.
        heartbeat: Unix time at which the driver last wrote.
        driver_host: Host of the driver, or None before it started.
        driver_pid: Its process id.
        driver_namespace: The process namespace in which that id means something.
        started: Unix time at which every rank had started, or None.
        ended: Unix time of the end, or None.
        error: The error of a run that did not succeed, as JSON.
        result: The handle of the value, as JSON.
        value: A small JSON value itself, in a list of one; else empty.
        metrics: The last value of every metric that rank 0 reported.
    """

    state: str = "pending"
    attempt: int = 0
    heartbeat: float = 0.0
    driver_host: str | None = None
    driver_pid: int | None = None
    driver_namespace: str | None = None
    started: float | None = None
    ended: float | None = None
    error: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    value: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def final(self) -> bool:
        """True if the run has ended."""
        return self.state in FINAL_STATES


class RunDirectory:
    """Reads and writes one run directory. Holds nothing that is not on disk."""

    def __init__(self, directory: str) -> None:
        self.directory = store.normalize(directory)
        self.is_remote = store.is_url(self.directory)

    def path(self, *parts: str) -> str:
        """A location inside."""
        return store.join(self.directory, *parts)

    @staticmethod
    def create(root: str, job: Job, private: dict[str, Any], files: dict[str, bytes]) -> RunDirectory:
        """Makes the directory of a new run.

        Raises:
            InvalidJobError: the store cannot be written, or the run id is taken.
        """
        run = RunDirectory(store.join(store.normalize(root), job.run_id))
        # Made beside and renamed: a crash leaves no half of a run under its name.
        new = run if run.is_remote else RunDirectory(f"{run.directory}.creating-{secrets.token_hex(4)}")
        try:
            if store.exists(run.path("job.json")):
                raise _taken(run, job, root)
            for part in ("", "logs", "result"):
                store.make_directory(new.path(part).rstrip("/"))
            for name, data in files.items():
                store.write_bytes(new.path(name), data)
            store.write_bytes(new.path("private.json"), json.dumps(private).encode())
            store.write_bytes(new.path("token"), secrets.token_hex(16).encode())
            new.write_status(RunStatus(heartbeat=time.time()))
            # Last: a directory with job.json is whole.
            store.write_bytes(new.path("job.json"), job.to_json())
            if new is not run:
                os.rename(new.directory, run.directory)
        except (OSError, ImportError, ValueError) as error:
            if isinstance(error, InvalidJobError):
                raise
            if not run.is_remote:
                store.remove(new.directory)
            if isinstance(error, OSError) and store.exists(run.path("job.json")):
                raise _taken(run, job, root) from None
            raise InvalidJobError(f"the store {root!r} cannot be written: {error}") from error
        return run

    def job(self) -> Job:
        """What was asked for. Raises RunNotFoundError."""
        try:
            return Job.from_json(store.read_bytes(self.path("job.json")))
        except FileNotFoundError:
            raise RunNotFoundError(f"no run lives in {self.directory}") from None

    def private(self) -> dict[str, Any]:
        """The user's environment and the engine's private configuration."""
        return cast("dict[str, Any]", json.loads(store.read_bytes(self.path("private.json"))))

    def token(self) -> str:
        """What an agent compares to know that it sees this directory."""
        return store.read_bytes(self.path("token")).decode()

    def status(self) -> RunStatus:
        """The last status written. Raises RunNotFoundError."""
        try:
            return RunStatus(**json.loads(store.read_bytes(self.path("status.json"))))
        except FileNotFoundError:
            raise RunNotFoundError(f"no run lives in {self.directory}") from None

    def write_status(self, status: RunStatus) -> None:
        """Replaces the status."""
        store.write_bytes(self.path("status.json"), json.dumps(asdict(status)).encode())

    def request_cancel(self) -> None:
        """Leaves the request; the driver acts on it."""
        store.write_bytes(self.path("cancel"), b"")

    def cancel_requested(self) -> bool:
        """True if somebody asked for the end."""
        return store.exists(self.path("cancel"))

    def read_lines(self, name: str, position: Position) -> tuple[list[str], Position]:
        """Complete lines of a growing file after ``position``, and the new position."""
        if not self.is_remote:
            return _read_file(self.path(name), position)
        lines: list[str] = []
        for piece in store.list_names(self.path(name))[position.piece :]:
            text = store.read_bytes(self.path(name, piece)).decode()
            lines += text.split("\n")[:-1]
            position = Position(position.piece + 1, 0)
        return lines, position


def _taken(run: RunDirectory, job: Job, root: str) -> InvalidJobError:
    return InvalidJobError(
        f"run_id {job.run_id!r} exists in {root}: attach to it with "
        f"RunHandle.attach({run.directory!r}), or choose another run_id"
    )


@dataclass(frozen=True)
class Position:
    """How far a growing file was read: whole pieces, and bytes of the current one."""

    piece: int = 0
    offset: int = 0


_READ = 4 << 20


def _read_file(path: str, position: Position) -> tuple[list[str], Position]:
    try:
        with open(path, "rb") as file:
            file.seek(position.offset)
            data = file.read(_READ)
            while data and b"\n" not in data and (more := file.read(_READ)):
                data += more
    except FileNotFoundError:
        return [], position
    end = data.rfind(b"\n") + 1
    return data[:end].decode("utf-8", "replace").split("\n")[:-1], Position(0, position.offset + end)


class Appender:
    """Appends lines to a growing file of a run: one file locally, numbered pieces on a URL."""

    def __init__(self, run: RunDirectory, name: str) -> None:
        self._run = run
        self._name = name
        self._file = None if run.is_remote else open(run.path(name), "ab", buffering=0)
        self._waiting: list[bytes] = []
        self._piece = 0

    def append(self, lines: list[str]) -> None:
        """Adds lines; locally they can be read at once."""
        data = ("\n".join(lines) + "\n").encode("utf-8", "replace")
        if self._file:
            self._file.write(data)
        else:
            self._waiting.append(data)

    def flush(self) -> None:
        """Writes what waits for an object store as the next piece."""
        if self._waiting:
            piece = self._run.path(self._name, f"{self._piece:08d}")
            store.write_bytes(piece, b"".join(self._waiting))
            self._piece += 1
            self._waiting.clear()

    def close(self) -> None:
        """Writes what is left."""
        self.flush()
        if self._file:
            self._file.close()


def process_namespace() -> str:
    """Names the boot and the process namespace (Linux), else the host: where a process id is valid."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def process_is_alive(pid: int) -> bool:
    """True if a process of this host has that id and has not ended (a zombie has)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class RunHandle(Generic[R]):
    """A run, from any process that knows its directory.

    Attributes:
        directory: Absolute path or URL of the run directory.
        id: The run's name.
    """

    def __init__(self, directory: str, driver: subprocess.Popen[bytes] | None = None) -> None:
        self._run = RunDirectory(directory)
        self._driver = driver
        self.directory = self._run.directory
        self.id = self.directory.rsplit("/", 1)[-1]
        self._tick = threading.Event()
        self._heartbeat = self._heartbeat_seen = 0.0

    @staticmethod
    def attach(directory: str | os.PathLike[str]) -> RunHandle[Any]:
        """The handle of a run that somebody started.

        Raises:
            RunNotFoundError: no run lives there.
        """
        handle: RunHandle[Any] = RunHandle(os.fspath(directory))
        handle._run.job()
        return handle

    def __repr__(self) -> str:
        return f"RunHandle({self.directory!r})"

    def status(self) -> RunStatus:
        """The run's state now. A run whose driver died is reported as failed."""
        status = self._run.status()
        if status.final or not self._driver_died(status):
            return status
        # It may have written its last word between the two looks.
        status = self._run.status()
        if status.final:
            return status
        who = f"process {status.driver_pid} on {status.driver_host}" if status.driver_pid else "not started"
        text = f"the driver of run {self.id} ({who}) died without ending the run"
        error = EngineError("\n".join([text, *self._driver_log_tail()]))
        return replace(status, state="failed", error=error.to_json())

    def _driver_log_tail(self) -> list[str]:
        with contextlib.suppress(OSError):
            text = store.read_bytes(self._run.path("driver.log")).decode("utf-8", "replace")
            return [f"  {line}" for line in text.splitlines()[-DRIVER_LOG_TAIL:]]
        return []

    def _driver_died(self, status: RunStatus) -> bool:
        if self._driver is not None:
            return self._driver.poll() is not None
        if status.driver_pid is not None and status.driver_namespace == process_namespace():
            return not process_is_alive(status.driver_pid)
        if status.heartbeat != self._heartbeat:
            self._heartbeat, self._heartbeat_seen = status.heartbeat, time.monotonic()
        return driver_is_dead(status.heartbeat, time.time(), time.monotonic() - self._heartbeat_seen)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the run, however it ends.

        Args:
            timeout: Seconds to wait; None waits as long as the run lasts.

        Returns:
            True if the run has ended, False if the time is up.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.status().final:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self._pause()
        return True

    def _pause(self) -> None:
        # An Event, not a sleep: exceptions of signal handlers get out at once.
        self._tick.wait(FOLLOW_INTERVAL_REMOTE if self._run.is_remote else FOLLOW_INTERVAL)

    def result_ref(self, timeout: float | None = None) -> ResultRef:
        """Waits and returns the handle of rank 0's value.

        Raises:
            TimeoutError: the run has not ended after ``timeout`` seconds.
            RankZeroError: the run did not succeed; the type says why.
        """
        return ResultRef.from_json(cast("dict[str, Any]", self._outcome(timeout).result))

    def result(self, timeout: float | None = None) -> R:
        """Waits and returns rank 0's value. Raises like `result_ref`."""
        status = self._outcome(timeout)
        if status.value:
            return cast(R, status.value[0])
        return cast(R, ResultRef.from_json(cast("dict[str, Any]", status.result)).load())

    def _outcome(self, timeout: float | None) -> RunStatus:
        if not self.wait(timeout):
            raise TimeoutError(f"run {self.id} has not ended after {timeout} s; it goes on")
        status = self.status()
        if status.error is not None:
            raise error_from_json(status.error)
        if status.result is None:
            raise ResultError(f"run {self.id} ended as {status.state} without a result")
        return status

    def cancel(self) -> None:
        """Asks the driver to end the run; no error if it has ended. `wait` for the end."""
        if not self._run.status().final:
            self._run.request_cancel()

    def logs(self, rank: int | None = None, follow: bool = False) -> Iterator[str]:
        """Lines that the ranks wrote.

        Args:
            rank: One rank's lines as they were; None gives all ranks' with a ``[rank]`` prefix.
            follow: Go on until the run ends.
        """
        ranks = range(self._run.job().num_processes) if rank is None else [rank]
        positions = dict.fromkeys(ranks, Position())
        for _ in self._looks(follow):
            unread = set(ranks)
            while unread:
                for number in sorted(unread):
                    name = f"logs/rank-{number}.log"
                    lines, positions[number] = self._run.read_lines(name, positions[number])
                    yield from lines if rank is not None else (f"[{number}] {line}" for line in lines)
                    if not lines:
                        unread.discard(number)

    def events(self, follow: bool = False) -> Iterator[dict[str, Any]]:
        """State changes, metrics and failures in the order in which the driver heard of them.

        Each is a dict with ``type`` (``"state"``, ``"metric"``, ``"failure"``) and ``time``.
        """
        position = Position()
        for _ in self._looks(follow):
            while True:
                lines, position = self._run.read_lines("events.jsonl", position)
                yield from (json.loads(line) for line in lines)
                if not lines:
                    break

    def _looks(self, follow: bool) -> Iterator[None]:
        """One round for every look at a growing file; the last comes after the run's end."""
        while follow and not self.status().final:
            yield
            self._pause()
        yield

    def metrics(self) -> list[dict[str, Any]]:
        """What the ranks reported: rows with ``rank``, ``time`` and the metrics' names."""
        return [
            {"rank": event["rank"], "time": event["time"], **event["metrics"]}
            for event in self.events()
            if event["type"] == "metric"
        ]


CANCEL_TIMEOUT = DRIVER_DEAD_AFTER
"""Seconds to wait for the end of a run that was cancelled."""
