"""The run directory, which is the truth about a run: what lies where, and how it is read and written.

    job.json      what the current submission asked for; a directory without it is no run yet
    status.json   state, heartbeat, error, result: replaced atomically by the driver
    submissions/  0, 1, ...: what one submission gave
        claim         whose submission this is: made once, so that a run id submitted twice starts once
        payload.pkl   function or script and arguments
        job.json      what it asked for
        identity.json what its training is, by parts; see `rankzero.run.identity`
        modules.zip   the user's modules;  modules.txt  the list of its files, and of what was left out, for people
        driver        whose driver this is
        starting      the process of its driver, until that writes a status; not on an object store
        stage-K/      where a driver in its own stage meets its tasks and its submitter; see `rankzero.task.staged`
        cancel        a request to end this submission
    token         tells an agent that it sees this very directory
    events.jsonl  state changes, metrics, checkpoints and failures, one JSON object a line
    logs/         rank-N.log for every rank; on an object store one stream, ``lines``, for all of them
    checkpoints/  see `rankzero.run.checkpoints`
    flight/       of ranks that hung: what torch's flight recorder knew of their collectives
    datasets/     rows that Spark has computed for the ranks; their manifests are ``submissions/N/datasets.json``
    result/       rank 0's value
    tables/       rows that ranks have written, by attempt; see `rankzero.data.table`
    lease         renewed by whoever follows a run with an ``orphan_timeout``; may hold a shorter bound
    delivery      who was offered the last result, and whether they have acknowledged it; see `rankzero.run.delivery`
    driver.log    what a detached driver wrote

On an object store ``events.jsonl`` and ``logs/lines`` are folders of numbered pieces; see `rankzero.run.pieces`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rankzero import store
from rankzero.bounds import HEARTBEAT_INTERVAL
from rankzero.errors import RunNotFoundError
from rankzero.host.processes import this_process
from rankzero.job import PYTHON, Job, strange
from rankzero.run.identity import Asked, Comparison, Identity, compare
from rankzero.values.envelope import Part

_REMOVAL = "removal "
"""Begins the claim of whoever removes an old run, so that the next one can tell and finish."""

EVENTS = "events.jsonl"

LINES = "logs/lines"
"""What all ranks write, on an object store."""

IDENTITY = "identity.json"
"""What a submission trains, by parts."""

DATASETS = "datasets"
"""Rows that Spark has computed for the ranks, a folder for each dataset."""

STATES = ("pending", "starting", "running", "succeeded", "failed", "cancelled")

FINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True)
class RunStatus:
    """A run's state at one moment.

    Attributes:
        state: ``"pending"``, ``"starting"``, ``"running"``, ``"succeeded"``, ``"failed"`` or
            ``"cancelled"``.
        attempt: Number of the current attempt, from 0.
        preemptions: How many attempts of this submission were preempted.
        submission: How often the run id was submitted before.
        nonce: `Job.nonce` of the submission whose driver, or submitter, has written this.
        heartbeat: Unix time at which the driver last wrote.
        interval: Seconds after which it writes again.
        patience: Seconds without a heartbeat before its driver counts as dead, while a cluster has not started it yet;
            0: the interval decides.
        written: On an object store, how far `EVENTS` and `LINES` can be read: piece and offset of each.
        driver_host: Host of the driver, or None before it started.
        driver_pid: Its process id.
        driver_namespace: The process namespace in which that id means something; None if its death may not be the
            run's, so that only the heartbeat tells.
        driver_start: When that process started, in ticks since the boot.
        driver_thread: Id and start of the driver's thread, if the driver is a thread of its caller's process; else
            None. The process may outlive the driver.
        started: Unix time at which every rank had started, or None.
        ended: Unix time of the end, or None.
        error: The error of a run that did not succeed, as JSON.
        result: The handle of the value, as JSON; there as soon as success is certain, before the run has ended.
        value: A small JSON value itself, in a list of one; else empty.
        metrics: The last value of every metric that rank 0 reported.
        checkpoint: Id of the newest committed checkpoint, or None.
        world_size: Number of ranks of the current attempt of an elastic run; None if that is the job's.
        engine_url: Where the engine shows itself to people, such as the Spark UI, while the run lives; or None.
        held_seconds: For which ranks have held their places, all of them together, in the attempts that have ended.
        held_since: Unix time since which those of the current attempt hold theirs; None between attempts.
    """

    state: str = "pending"
    attempt: int = 0
    preemptions: int = 0
    submission: int = 0
    nonce: str = ""
    heartbeat: float = 0.0
    interval: float = HEARTBEAT_INTERVAL
    patience: float = 0.0
    written: dict[str, list[int]] = field(default_factory=dict)
    driver_host: str | None = None
    driver_pid: int | None = None
    driver_namespace: str | None = None
    driver_start: str | None = None
    driver_thread: str | None = None
    started: float | None = None
    ended: float | None = None
    error: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    value: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    engine_url: str | None = None
    world_size: int | None = None
    held_seconds: float = 0.0
    held_since: float | None = None

    @property
    def final(self) -> bool:
        """True if the run has ended."""
        return self.state in FINAL_STATES

    @property
    def certain(self) -> bool:
        """True if the outcome is known: the run has ended, or will have succeeded whatever comes."""
        return self.final or self.result is not None


_STATUS_FIELDS = frozenset(field.name for field in fields(RunStatus))

# What readers look into.
_STATUS_KINDS: dict[str, type | tuple[type, ...]] = {
    "state": str,
    "heartbeat": (int, float),
    "metrics": dict,
    "value": list,
    "error": (dict, type(None)),
    "result": (dict, type(None)),
}


_NUMBER = (int, float)

# The same, of what an earlier version has not written.
_LATER_KINDS: dict[str, type | tuple[type, ...]] = {
    "attempt": int,
    "interval": _NUMBER,
    "patience": _NUMBER,
    "started": (*_NUMBER, type(None)),
    "ended": (*_NUMBER, type(None)),
    "world_size": (int, type(None)),
    "held_seconds": _NUMBER,
    "held_since": (*_NUMBER, type(None)),
}


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

    def new_dataset(self, name: str, submission: int | None = None) -> str:
        """A location for the rows of a dataset that nobody else uses.

        Args:
            name: Of the dataset.
            submission: Whose driver computes it; None if a submitter does, before there is one.
        """
        suffix = "" if submission is None else f".{submission}"
        return self.path(DATASETS, f"{name}-{secrets.token_hex(4)}{suffix}")

    def datasets_before(self, submission: int) -> list[str]:
        """Locations that drivers of earlier submissions have used; some may have died there."""
        names = store.list_names(self.path(DATASETS))
        found = [(name, re.fullmatch(r".*-[0-9a-f]{8}\.(\d+)", name)) for name in names]
        return [self.path(DATASETS, name) for name, of in found if of and int(of[1]) < submission]

    def claim(self, submission: int) -> bool:
        """True for the one caller that may write this submission. Raises OSError."""
        try:
            return self._write_claim(submission)
        except FileNotFoundError:
            # An old run was removed between two steps; see `rankzero.run.retention`.
            return self._write_claim(submission)

    def _write_claim(self, submission: int) -> bool:
        for part in ("", "logs", "result", "checkpoints", f"submissions/{submission}"):
            store.make_directory(self.path(part).rstrip("/"))
        return store.create(self.submission_path(submission, "claim"), _new_claim())

    def claim_removal(self, submission: int) -> bool:
        """True for the one caller that may remove this run, unless somebody claims a later submission."""
        store.make_directory(self.submission_path(submission))
        return store.create(self.submission_path(submission, "claim"), _new_claim(_REMOVAL))

    def is_claimed(self, submission: int) -> bool:
        """True if somebody claimed this submission (or the removal of the run before it)."""
        return store.exists(self.submission_path(submission, "claim"))

    def claim_text(self, submission: int) -> bytes:
        """Returns the text of a claim, which no other claim has; empty if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return store.read_bytes(self.submission_path(submission, "claim"))
        return b""

    def claimant(self, submission: int) -> dict[str, Any] | None:
        """Returns the process that claimed a submission, for `is_gone`; None if that is not recorded."""
        _, brace, rest = self.claim_text(submission).decode().partition("{")
        return json.loads(brace + rest) if brace else None

    def removal_claimed(self, submission: int) -> bool:
        """True if this claim is one of `claim_removal`."""
        return self.claim_text(submission).startswith(_REMOVAL.encode())

    def claimed_at(self, submission: int) -> float | None:
        """Unix time of a claim, by the store's clock; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return store.modified(self.submission_path(submission, "claim"))
        return None

    def release(self, submission: int) -> None:
        """Gives a claim back, and what was written for it. Raises OSError."""
        store.remove(self.submission_path(submission))

    def claim_driver(self, submission: int) -> bool:
        """Returns True to the first driver that claims this submission, and False to every other one."""
        return store.create(self.submission_path(submission, "driver"), secrets.token_hex(8).encode())

    def has_driver(self, submission: int) -> bool:
        """Returns True if a driver has claimed this submission."""
        return store.exists(self.submission_path(submission, "driver"))

    def record_starting(self, submission: int, process: dict[str, Any]) -> None:
        """Records the process that was started as a submission's driver, for readers on this host. Raises OSError.

        Args:
            submission: Number of the submission.
            process: The process, as `rankzero.host.processes.describe_process` describes it.
        """
        if not self.is_remote:
            store.write_bytes(self.submission_path(submission, "starting"), json.dumps(process).encode())

    def starting(self, submission: int) -> dict[str, Any] | None:
        """Returns the process that was started as a submission's driver; None if that is not recorded."""
        if self.is_remote:
            return None
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(store.read_bytes(self.submission_path(submission, "starting")))
            return found
        return None

    def newest_claim(self) -> int:
        """Number of the newest submission that somebody claimed; -1 if there is none."""
        return max((int(name) for name in store.list_names(self.path("submissions")) if name.isdecimal()), default=-1)

    def write_files(self, submission: int, files: dict[str, list[Part]]) -> None:
        """Writes what a driver needs beside the job. For who `claim`ed the submission. Raises OSError."""
        for name, parts in files.items():
            store.write_parts(self.submission_path(submission, name), parts)

    def write_submission(self, job: Job, patience: float = 0.0) -> None:
        """Makes what `write_files` wrote the current submission; the last write does. Raises OSError.

        Whoever finds that a later submission was claimed meanwhile leaves its status and job as they are.

        Args:
            job: What was asked for.
            patience: Seconds for which its driver may not have started.
        """
        if not (store.exists(self.path("token")) and self.token()):
            store.write_bytes(self.path("token"), secrets.token_hex(16).encode())
        store.remove(self.path("lease"))
        if self.newest_claim() > job.submission:
            return
        # Before job.json: nobody may take an earlier submission's end for this one's.
        started = RunStatus(heartbeat=time.time(), attempt=job.first_attempt, patience=patience)
        self.write_status(replace(started, submission=job.submission, nonce=job.nonce))
        store.write_bytes(self.submission_path(job.submission, "job.json"), job.to_json())
        self.restore(job.submission)
        store.sync_directory(os.path.dirname(self.directory))

    def identity(self, submission: int) -> Identity | None:
        """Returns what a submission trains, by parts; None if that is not recorded."""
        with contextlib.suppress(FileNotFoundError):
            return Identity.from_json(store.read_bytes(self.submission_path(submission, IDENTITY)))
        return None

    def restore(self, submission: int) -> None:
        """Makes this the current submission (again): one that was held up may have written over a later one.

        Raises:
            FileNotFoundError: it was never written.
        """
        data = store.read_bytes(self.submission_path(submission, "job.json"))
        store.write_bytes(self.path("job.json"), data, durable=True)

    def job(self) -> Job:
        """What was asked for. Raises RunNotFoundError."""
        return self._read_job(self.path("job.json"))

    def job_of(self, submission: int) -> Job:
        """Returns what one submission asked for. Raises RunNotFoundError."""
        return self._read_job(self.submission_path(submission, "job.json"))

    def _read_job(self, path: str) -> Job:
        try:
            return Job.from_json(store.read_bytes(path))
        except FileNotFoundError:
            raise RunNotFoundError(f"no run lives in {self.directory}") from None

    def token(self) -> str:
        """What an agent compares to know that it sees this directory."""
        return store.read_bytes(self.path("token")).decode()

    def status(self) -> RunStatus:
        """The last status written. Raises RunNotFoundError."""
        try:
            data = store.read_bytes(self.path("status.json"))
        except FileNotFoundError:
            raise RunNotFoundError(f"no run lives in {self.directory}") from None
        if not data.strip(b"\0"):
            # A heartbeat that a power failure has emptied: its driver is dead.
            job = self.job()
            return RunStatus(submission=job.submission, nonce=job.nonce)
        try:
            facts = json.loads(data)
            kinds = _STATUS_KINDS | {name: kind for name, kind in _LATER_KINDS.items() if name in facts}
            if found := strange(facts, kinds):
                raise ValueError(found)
            # A driver of a later version may say more.
            return RunStatus(**{name: value for name, value in facts.items() if name in _STATUS_FIELDS})
        except (AttributeError, TypeError, ValueError) as error:
            raise RunNotFoundError(f"status.json in {self.directory} was not written by rankzero: {error}") from None

    def write_status(self, status: RunStatus) -> None:
        """Replaces the status, durably once its outcome is certain: a heartbeat is not worth that."""
        store.write_bytes(self.path("status.json"), json.dumps(vars(status)).encode(), durable=status.certain)

    def put_status_back(self, data: bytes) -> None:
        """Writes a status again that was read elsewhere, durably."""
        store.write_bytes(self.path("status.json"), data, durable=True)

    def request_cancel(self, submission: int) -> None:
        """Leaves the request for one submission; its driver acts on it."""
        store.write_bytes(self.submission_path(submission, "cancel"), b"requested")

    def cancel_requested(self, submission: int) -> bool:
        """True if somebody asked for the end of this submission. One request of an object store."""
        try:
            store.read_bytes(self.submission_path(submission, "cancel"))
        except FileNotFoundError:
            return False
        return True

    def renew_lease(self, bound: float | None = None) -> None:
        """Records that somebody follows this run, and for how many seconds that holds; None: its ``orphan_timeout``."""
        words = [secrets.token_hex(8), *([] if bound is None else [str(bound)])]
        store.write_bytes(self.path("lease"), " ".join(words).encode())

    def lease(self) -> bytes:
        """What the last follower wrote; empty if nobody has."""
        with contextlib.suppress(FileNotFoundError):
            return store.read_bytes(self.path("lease"))
        return b""


def _new_claim(kind: str = "") -> bytes:
    """Returns the text of a claim of this process."""
    return f"{kind}{secrets.token_hex(8)} {json.dumps(this_process())}".encode()


def compare_job(run: RunDirectory, job: Job, asked: Asked) -> Comparison:
    """Compares the training of a submission with the one that is asked for.

    Args:
        run: The run directory.
        job: What the submission asked for.
        asked: What is asked for.
    """
    if job.identity == asked.identity.digest:
        return Comparison()
    automatic = bool(asked.generation) and asked.generation == job.generation
    same_python = job.python == PYTHON
    return compare(run.identity(job.submission), asked.identity, automatic=automatic, same_python=same_python)


def log_name(rank: int) -> str:
    """Where a rank's lines are, within the run directory."""
    return f"logs/rank-{rank}.log"
