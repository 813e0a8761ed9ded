"""The run directory, which is the truth about a run: what lies where, and how it is read and written.

    job.json      what was asked for; a directory without it is no run yet
    status.json   state, heartbeat, error, result: replaced atomically by the driver
    submissions/  0, 1, ...: what one submission gave
        claim         whose submission this is: made once, so that a run id submitted twice starts once
        payload.pkl   function or script and arguments
        modules.zip   the user's modules;  modules.txt  the list of its files, and of what was left out, for people
        driver        whose driver this is
    token         tells an agent that it sees this very directory
    events.jsonl  state changes, metrics, checkpoints and failures, one JSON object a line
    logs/         rank-N.log for every rank
    checkpoints/  see `rankzero.checkpoint`
    result/       rank 0's value
    cancel        a request to end
    lease         renewed by whoever follows a run with an ``orphan_timeout``; may hold a shorter bound
    delivered     the submission whose result was handed on
    handed        which try of an orchestrator got it; see `rankzero.handover`
    driver.log    what a detached driver wrote

On an object store ``events.jsonl`` and the logs are folders of numbered pieces.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from dataclasses import dataclass, field, fields
from typing import IO, Any

from rankzero import store
from rankzero.envelope import Part
from rankzero.errors import RunNotFoundError
from rankzero.job import Job

_REMOVAL = b"removal"
"""In the claim of whoever removes an old run, so that the next one can tell and finish."""

FINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True)
class RunStatus:
    """A run's state at one moment.

    Attributes:
        state: ``"pending"``, ``"starting"``, ``"running"``, ``"succeeded"``, ``"failed"`` or
            ``"cancelled"``.
        attempt: Number of the current attempt, from 0.
        submission: How often the run id was submitted before.
        heartbeat: Unix time at which the driver last wrote.
        driver_host: Host of the driver, or None before it started.
        driver_pid: Its process id.
        driver_namespace: The process namespace in which that id means something.
        driver_start: When that process started, in ticks since the boot.
        started: Unix time at which every rank had started, or None.
        ended: Unix time of the end, or None.
        error: The error of a run that did not succeed, as JSON.
        result: The handle of the value, as JSON.
        value: A small JSON value itself, in a list of one; else empty.
        metrics: The last value of every metric that rank 0 reported.
        checkpoint: Id of the newest committed checkpoint, or None.
        engine_url: Where the engine shows itself to people, such as the Spark UI, while the run lives; or None.
    """

    state: str = "pending"
    attempt: int = 0
    submission: int = 0
    heartbeat: float = 0.0
    driver_host: str | None = None
    driver_pid: int | None = None
    driver_namespace: str | None = None
    driver_start: str | None = None
    started: float | None = None
    ended: float | None = None
    error: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    value: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    engine_url: str | None = None

    @property
    def final(self) -> bool:
        """True if the run has ended."""
        return self.state in FINAL_STATES


_STATUS_FIELDS = frozenset(field.name for field in fields(RunStatus))


class RunDirectory:
    """Reads and writes one run directory. Holds nothing that is not on disk."""

    def __init__(self, directory: str) -> None:
        self.directory = store.normalize(directory)
        self.is_remote = store.is_url(self.directory)

    def path(self, *parts: str) -> str:
        """A location inside."""
        return store.join(self.directory, *parts)

    def submission_path(self, submission: int, *parts: str) -> str:
        """A location inside of one submission."""
        return self.path("submissions", str(submission), *parts)

    def claim(self, submission: int) -> bool:
        """True for the one caller that may write this submission. Raises OSError."""
        try:
            return self._write_claim(submission)
        except FileNotFoundError:
            # An old run was removed between two steps; see `rankzero.retention`.
            return self._write_claim(submission)

    def _write_claim(self, submission: int) -> bool:
        for part in ("", "logs", "result", "checkpoints", f"submissions/{submission}"):
            store.make_directory(self.path(part).rstrip("/"))
        return store.create(self.submission_path(submission, "claim"), secrets.token_hex(8).encode())

    def claim_removal(self, submission: int) -> bool:
        """True for the one caller that may remove this run, unless somebody claims a later submission."""
        store.make_directory(self.submission_path(submission))
        return store.create(self.submission_path(submission, "claim"), _REMOVAL)

    def is_claimed(self, submission: int) -> bool:
        """True if somebody claimed this submission (or the removal of the run before it)."""
        return store.exists(self.submission_path(submission, "claim"))

    def removal_claimed(self, submission: int) -> bool:
        """True if this claim is one of `claim_removal`."""
        with contextlib.suppress(FileNotFoundError):
            return store.read_bytes(self.submission_path(submission, "claim")) == _REMOVAL
        return False

    def claimed_at(self, submission: int) -> float | None:
        """Unix time of a claim, by the store's clock; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return store.modified(self.submission_path(submission, "claim"))
        return None

    def release(self, submission: int) -> None:
        """Gives a claim back, and what was written for it. Raises OSError."""
        store.remove(self.submission_path(submission))

    def claim_driver(self, submission: int) -> bool:
        """True for the one driver of this submission."""
        return store.create(self.submission_path(submission, "driver"), secrets.token_hex(8).encode())

    def newest_claim(self) -> int:
        """Number of the newest submission that somebody claimed; -1 if there is none."""
        return max((int(name) for name in store.list_names(self.path("submissions")) if name.isdecimal()), default=-1)

    def write_files(self, submission: int, files: dict[str, list[Part]]) -> None:
        """Writes what a driver needs beside the job. For who `claim`ed the submission. Raises OSError."""
        for name, parts in files.items():
            store.write_parts(self.submission_path(submission, name), parts)

    def write_submission(self, job: Job) -> None:
        """Makes what `write_files` wrote the current submission; the last write does. Raises OSError."""
        if not store.exists(self.path("token")):
            store.write_bytes(self.path("token"), secrets.token_hex(16).encode())
        for said_of_earlier_ones in ("cancel", "lease"):
            store.remove(self.path(said_of_earlier_ones))
        # Before job.json: nobody may take an earlier submission's end for this one's.
        self.write_status(RunStatus(heartbeat=time.time(), attempt=job.first_attempt, submission=job.submission))
        store.write_bytes(self.path("job.json"), job.to_json())

    def job(self) -> Job:
        """What was asked for. Raises RunNotFoundError."""
        try:
            return Job.from_json(store.read_bytes(self.path("job.json")))
        except FileNotFoundError:
            raise RunNotFoundError(f"no run lives in {self.directory}") from None

    def token(self) -> str:
        """What an agent compares to know that it sees this directory."""
        return store.read_bytes(self.path("token")).decode()

    def status(self) -> RunStatus:
        """The last status written. Raises RunNotFoundError."""
        try:
            facts = json.loads(store.read_bytes(self.path("status.json")))
        except FileNotFoundError:
            raise RunNotFoundError(f"no run lives in {self.directory}") from None
        # A driver of a later version may say more.
        return RunStatus(**{name: value for name, value in facts.items() if name in _STATUS_FIELDS})

    def write_status(self, status: RunStatus) -> None:
        """Replaces the status."""
        store.write_bytes(self.path("status.json"), json.dumps(vars(status)).encode())

    def request_cancel(self) -> None:
        """Leaves the request; the driver acts on it."""
        store.write_bytes(self.path("cancel"), b"")

    def end_of(self, name: str) -> Position:
        """Where a growing file ends now, for `read_lines`."""
        if self.is_remote:
            return Position(len(store.list_names(self.path(name))), 0)
        with contextlib.suppress(FileNotFoundError):
            return Position(0, store.size(self.path(name)))
        return Position()

    def cancel_requested(self) -> bool:
        """True if somebody asked for the end."""
        return store.exists(self.path("cancel"))

    def mark_delivered(self, submission: int) -> None:
        """Notes that this submission's result was handed on."""
        store.write_bytes(self.path("delivered"), str(submission).encode())

    def is_delivered(self, submission: int) -> bool:
        """True if `mark_delivered` was called for it."""
        with contextlib.suppress(FileNotFoundError):
            return store.read_bytes(self.path("delivered")) == str(submission).encode()
        return False

    def renew_lease(self, bound: float | None = None) -> None:
        """Says that somebody follows this run, and for how many seconds that holds; None for its ``orphan_timeout``."""
        words = [secrets.token_hex(8), *([] if bound is None else [str(bound)])]
        store.write_bytes(self.path("lease"), " ".join(words).encode())

    def lease(self) -> bytes:
        """What the last follower wrote; empty if nobody has."""
        with contextlib.suppress(FileNotFoundError):
            return store.read_bytes(self.path("lease"))
        return b""

    def grown_logs(self, positions: dict[int, Position]) -> set[int]:
        """The ranks, of those whose positions are given, whose logs are larger than what was read; on a URL all.

        A file server may be asked for sizes seldom (NFS: 3 to 60 s): a file that has grown may not be among them.
        """
        return set(positions) if self.is_remote else {rank for rank in positions if self._has_grown(rank, positions)}

    def _has_grown(self, rank: int, positions: dict[int, Position]) -> bool:
        try:
            return os.stat(self.path(log_name(rank))).st_size > positions[rank].offset
        except FileNotFoundError:
            return False

    def read_lines(self, name: str, position: Position) -> tuple[list[str], Position]:
        """Complete lines of a growing file after ``position``, and the new position."""
        if not self.is_remote:
            return _read_file(self.path(name), position)
        lines: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            while len(lines) < _MANY_LINES:
                text = store.read_bytes(self.path(name, _piece(position.piece))).decode("utf-8", "replace")
                lines += text.split("\n")[:-1]
                position = Position(position.piece + 1, 0)
        return lines, position


def log_name(rank: int) -> str:
    """Where a rank's lines are, within the run directory."""
    return f"logs/rank-{rank}.log"


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
    """Appends lines to a growing file of a run: one file locally, numbered pieces on a URL.

    A line that was torn (by a full disk, or by the death of the driver before this one) ends where it was torn.
    """

    def __init__(self, run: RunDirectory, name: str) -> None:
        self._run = run
        self._name = name
        self._file: IO[bytes] | None = None
        self._torn = False
        self._waiting: list[bytes] = []
        self._piece = len(store.list_names(run.path(name))) if run.is_remote else 0

    def append(self, lines: list[str]) -> None:
        """Adds lines; locally they can be read at once. Raises OSError when there is no room for them."""
        data = ("\n".join(lines) + "\n").encode("utf-8", "replace") if lines else b""
        if self._run.is_remote:
            if sum(map(len, self._waiting)) + len(data) > WAITING_LIMIT:
                raise OSError(f"{self._run.directory} takes no lines, and {WAITING_LIMIT} bytes wait already")
            self._waiting.append(data)
            return
        if self._file is None:
            path = self._run.path(self._name)
            self._file = open(path, "ab", buffering=0)
            self._torn = _ends_torn(path)
        rest = memoryview(b"\n" + data if self._torn else data)
        while rest:
            written = self._file.write(rest)
            self._torn = rest[written - 1] != _NEWLINE if written else self._torn
            rest = rest[written:]

    def flush(self) -> None:
        """Writes what waits for an object store as the next piece. Lines may be added meanwhile; one caller only."""
        waiting = list(self._waiting)
        if data := b"".join(waiting):
            piece = self._run.path(self._name, _piece(self._piece))
            store.write_bytes(piece, data)
            self._piece += 1
            del self._waiting[: len(waiting)]

    def close(self) -> None:
        """Writes what is left."""
        self.flush()
        if self._file:
            self._file.close()


def _piece(number: int) -> str:
    return f"{number:08d}"


_MANY_LINES = 100_000

WAITING_LIMIT = 64 << 20
"""Bytes of lines that may wait for an object store which does not take them."""

_NEWLINE = ord("\n")


def _ends_torn(path: str) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
