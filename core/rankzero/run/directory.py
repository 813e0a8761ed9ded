"""The run directory, the only record of a run: its files, and the functions that read and write them.

    job.json      the job of the current submission; a directory without it holds no run
    status.json   state, heartbeat, error, result: replaced atomically by the driver
    submissions/  0, 1, ...: the files of each submission
        claim         names the submitter; created once, so that a run id submitted twice starts once
        payload.pkl   function or script and arguments
        job.json      the submission's job
        modules.zip   the user's modules;  modules.txt  lists the files in it, and those left out, for people
        driver        names the driver; created once, so that one driver runs the submission
        starting      the driver's process, until it writes a status; not on an object store
        outcome.json  the final status; on an object store, the status since success or the end is certain
        delivery      the receiver of the result, and its acknowledgement; see `rankzero.run.delivery`
        stage/        files between a driver in a stage and its tasks; see `rankzero.task.stage`
        cancel        a request to end this submission; may name the orchestrator's try for which it is
    token         marks a directory of rankzero's, before there is a job; agents see by it that it is their driver's
    events.jsonl  state changes, metrics, checkpoints and failures, one JSON object a line
    logs/         rank-N.log for every rank; on an object store one stream, ``lines``, for all of them
    checkpoints/  see `rankzero.run.checkpoints`
    flight/       collectives of ranks that hung, from torch's flight recorder
    datasets/     rows that Spark has computed for the ranks; their manifests are ``submissions/N/datasets.json``
    result/       rank 0's value
    tables/       rows that ranks have written, by attempt; see `rankzero.data.table`
    lease         renewed by followers of a run with an ``orphan_timeout``; may hold a shorter timeout
    driver.log    output of a detached driver

On an object store ``events.jsonl`` and ``logs/lines`` are folders of numbered pieces; see `rankzero.run.growing`.

A directory with a token or a claim belongs to rankzero. A driver deletes only files of the names that rankzero writes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rankzero import bounds, store
from rankzero.errors import RunNotFoundError
from rankzero.host.processes import this_process
from rankzero.job import Job
from rankzero.run.identity import Asked, Comparison, Identity, compare
from rankzero.run.names import DATASETS, FOLDERS, OUTCOME, TOKEN, is_run_file
from rankzero.run.status import RunStatus
from rankzero.values.pickled import Part

_REMOVAL = "removal "
"""The beginning of a claim for removing a run. If that process dies, the next one recognizes the claim and finishes."""

_job_from_json = functools.lru_cache(maxsize=4)(Job.from_json)
"""Parses a job. One launch reads the same text a dozen times."""


class RunDirectory:
    """Reads and writes one run directory, and keeps no state in memory."""

    def __init__(self, directory: str) -> None:
        self.directory = store.normalize(directory)
        self.is_remote = store.is_url(self.directory)

    def path(self, *parts: str) -> str:
        """Returns the location of a file or folder of the run directory."""
        return store.join(self.directory, *parts)

    def submission_path(self, submission: int, *parts: str) -> str:
        """Returns the location of a file or folder of one submission."""
        return self.path("submissions", str(submission), *parts)

    def result_path(self, uri: str) -> str:
        """Returns where the value with this location is now, since the run directory may have been moved."""
        return self.path("result", uri.rsplit("/", 1)[-1])

    def new_dataset(self, name: str, submission: int | None = None) -> str:
        """Returns an unused location for the rows of a dataset.

        Args:
            name: Name of the dataset.
            submission: Submission whose driver computes the rows; None if a submitter does, before the submission.
        """
        suffix = "" if submission is None else f".{submission}"
        return self.path(DATASETS, f"{name}-{secrets.token_hex(4)}{suffix}")

    def datasets_before(self, submission: int) -> list[str]:
        """Returns the locations of datasets that drivers of earlier submissions have written, completely or not."""
        names = store.list_names(self.path(DATASETS))
        found = [(name, re.fullmatch(r".*-[0-9a-f]{8}\.(\d+)", name)) for name in names]
        return [self.path(DATASETS, name) for name, of in found if of and int(of[1]) < submission]

    def is_own(self) -> bool:
        """Returns True if rankzero has made this directory."""
        return self._has_token() or self.claimed_at(max(self.newest_claim(), 0)) is not None

    def _has_token(self) -> bool:
        # Other programs have files with this name, and a power failure may have emptied this one.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return TOKEN.fullmatch(store.read_bytes(self.path("token"))) is not None
        return False

    def strangers(self) -> list[str]:
        """Returns names in a directory without a submission that rankzero does not write there.

        All other files there were left by a submitter that died, or by the driver and the ranks of a removed run.
        """
        known = {"token"} if self._has_token() else set()

        def is_strange(path: str) -> bool:
            return not (path in known or is_run_file(path) or store.is_unfinished(path.rpartition("/")[2]))

        # Folders of others may be large, so they are read only where all names are those of rankzero.
        names = [name for name in store.list_names(self.directory) if name not in FOLDERS]
        return list(filter(is_strange, names)) or list(filter(is_strange, store.list_files(self.directory)))

    def make(self) -> None:
        """Makes the directory. Of several processes that call this, each finds it made. Raises OSError."""
        store.make_directory(self.directory)
        store.create(self.path("token"), _new_token())

    def claim(self, submission: int, text: bytes = b"") -> bool:
        """Returns True to the one caller that may write this submission. Raises OSError.

        Args:
            submission: Number of the submission.
            text: A result of `new_claim`, which `claim_text` returns from now on; empty for a new one.
        """
        text = text or new_claim()
        try:
            return self._write_claim(submission, text)
        except FileNotFoundError:
            # An old run was removed at the same time; see `rankzero.run.retention`.
            return self._write_claim(submission, text)

    def _write_claim(self, submission: int, text: bytes) -> bool:
        for part in ("", "logs", "result", "checkpoints", f"submissions/{submission}"):
            store.make_directory(self.path(part).rstrip("/"))
        return store.create(self.submission_path(submission, "claim"), text)

    def claim_removal(self, submission: int) -> bool:
        """Returns True to the one caller that may remove this run, unless a later submission is claimed."""
        store.make_directory(self.submission_path(submission))
        return store.create(self.submission_path(submission, "claim"), new_claim(_REMOVAL))

    def is_claimed(self, submission: int) -> bool:
        """Returns True if this submission, or the removal of the run before it, is claimed."""
        return store.exists(self.submission_path(submission, "claim"))

    def claim_text(self, submission: int) -> bytes:
        """Returns the text of a claim, which is unique; empty if there is no claim."""
        with contextlib.suppress(FileNotFoundError):
            return store.read_bytes(self.submission_path(submission, "claim"))
        return b""

    def claimant(self, submission: int) -> dict[str, Any] | None:
        """Returns the process that claimed a submission, as `is_gone` needs it; None if it is not recorded."""
        _, brace, rest = self.claim_text(submission).decode().partition("{")
        return json.loads(brace + rest) if brace else None

    def removal_claimed(self, submission: int) -> bool:
        """Returns True if `claim_removal` made this claim."""
        return self.claim_text(submission).startswith(_REMOVAL.encode())

    def claimed_at(self, submission: int) -> float | None:
        """Returns the Unix time of a claim, by the store's clock; None if there is no claim."""
        with contextlib.suppress(FileNotFoundError):
            return store.modified(self.submission_path(submission, "claim"))
        return None

    def release(self, submission: int) -> None:
        """Removes a claim and all files of its submission. Raises OSError."""
        store.remove(self.submission_path(submission))

    def claim_driver(self, submission: int, timeout: float = 0.0) -> bool:
        """Returns True to the first driver that claims this submission, and False to other drivers.

        Args:
            submission: Number of the submission.
            timeout: Seconds for which a store that fails is retried.
        """
        # The same bytes at each try: they show whether an earlier one was executed although it failed.
        path, claim = self.submission_path(submission, "driver"), secrets.token_hex(8).encode()
        return store.patiently(
            lambda: store.create(path, claim), timeout, bounds.STORE_RETRY_INTERVAL(), store.is_missing
        )

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
        """Returns the number of the newest claimed submission; -1 if there is none."""
        return max((int(name) for name in store.list_names(self.path("submissions")) if name.isdecimal()), default=-1)

    def write_files(self, submission: int, files: dict[str, list[Part]]) -> None:
        """Writes the files that a driver needs beside the job. The caller must hold the `claim`. Raises OSError."""
        for name, parts in files.items():
            store.write_parts(self.submission_path(submission, name), parts)

    def write_submission(self, job: Job, patience: float = 0.0) -> bool:
        """Makes a submission the current one, after `write_files`; the last write has that effect. Raises OSError.

        If a later submission was claimed in the meantime, nothing is written, and this returns False.

        Args:
            job: Job of the submission.
            patience: `RunStatus.patience`: seconds that a cluster may take to start the driver.
        """
        if not (store.exists(self.path("token")) and self._has_token()):
            store.write_bytes(self.path("token"), _new_token())
        store.remove(self.path("lease"))
        if self.newest_claim() > job.submission:
            return False
        # Written before job.json, so that no reader takes the end of an earlier submission for the end of this one.
        started = RunStatus(heartbeat=time.time(), attempt=job.first_attempt, patience=patience)
        self.write_status(replace(started, submission=job.submission, nonce=job.nonce, metrics=job.metrics))
        data = job.to_json()
        store.write_bytes(self.submission_path(job.submission, "job.json"), data)
        store.write_bytes(self.path("job.json"), data, durable=True)
        store.sync_directory(os.path.dirname(self.directory))
        return True

    def restore(self, submission: int) -> None:
        """Makes a submission the current one: copies its job to the ``job.json`` of the run.

        Raises:
            FileNotFoundError: the submission was never written.
        """
        data = store.read_bytes(self.submission_path(submission, "job.json"))
        store.write_bytes(self.path("job.json"), data, durable=True)

    def job(self) -> Job:
        """Returns the job of the current submission. Raises RunNotFoundError."""
        if job := self.find_job():
            return job
        raise RunNotFoundError(f"no run lives in {self.directory}")

    def find_job(self) -> Job | None:
        """Returns the job of the current submission; None if there is no run yet.

        Raises:
            RunNotFoundError: there is a job that this version of rankzero cannot read.
        """
        return self._read_job(self.path("job.json"))

    def job_of(self, submission: int) -> Job | None:
        """Returns the job of one submission, or None. Raises like `find_job`."""
        return self._read_job(self.submission_path(submission, "job.json"))

    def _read_job(self, path: str) -> Job | None:
        try:
            return _job_from_json(store.read_bytes(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def token(self) -> str:
        """Returns the token by which an agent checks that it sees this directory."""
        return store.read_bytes(self.path("token")).decode()

    def status(self) -> RunStatus:
        """Returns the last status that was written. Raises RunNotFoundError."""
        return self._read_status(self.path("status.json"))

    def outcome(self, submission: int) -> RunStatus | None:
        """Returns the recorded status with which a submission ended or was certain to succeed; None if there is none.

        It is recorded before ``status.json``, which a late write of another driver may replace: one that was stopped,
        and counted as dead. On an object store it is recorded as soon as the status is certain, since the server may
        execute a delayed request of an earlier heartbeat after the final write.
        """
        with contextlib.suppress(RunNotFoundError):
            return self._read_status(self.submission_path(submission, OUTCOME))
        return None

    def _read_status(self, path: str) -> RunStatus:
        try:
            data = store.read_bytes(path)
        except FileNotFoundError:
            raise RunNotFoundError(f"no run lives in {self.directory}") from None
        if not data.strip(b"\0"):
            # A power failure has emptied the file, and has also ended the driver.
            job = self.job()
            return RunStatus(submission=job.submission, nonce=job.nonce)
        return RunStatus.from_json(data, path)

    def keep_outcome(self, status: RunStatus) -> None:
        """Records how a submission ended, before the status of the next one replaces its status. Raises OSError."""
        found = self.outcome(status.submission)
        if found is None or found.nonce != status.nonce:
            self._write_outcome(status)

    def _write_outcome(self, status: RunStatus) -> None:
        store.write_bytes(self.submission_path(status.submission, OUTCOME), status.to_json())

    def write_status(self, status: RunStatus) -> None:
        """Replaces the status. The write is durable if the outcome is certain; a heartbeat is not worth an fsync."""
        data = status.to_json()
        # A late write of a driver that counted as dead may replace the status, and no outcome.
        if status.final or (self.is_remote and status.certain):
            # A driver of a run that was removed may write into a directory that has fewer submissions.
            with contextlib.suppress(FileNotFoundError):
                self._write_outcome(status)
        store.write_bytes(self.path("status.json"), data, durable=status.certain)

    def request_cancel(self, submission: int, receiver: Mapping[str, Any] | None = None, reason: str = "") -> None:
        """Stores a request to end one submission, which its driver polls for.

        Args:
            submission: Number of the submission.
            receiver: The orchestrator's try for which the end is requested; None if it is requested for all.
            reason: The cause of the request, for the error of the run.
        """
        request = {"receiver": receiver or {}, "reason": reason}
        store.write_bytes(self.submission_path(submission, "cancel"), json.dumps(request).encode())

    def cancel_request(self, submission: int) -> dict[str, Any] | None:
        """Returns ``receiver`` and ``reason`` of the request to end this submission; None if there is no request.

        Makes one request to an object store.
        """
        try:
            text = store.read_bytes(self.submission_path(submission, "cancel"))
        except FileNotFoundError:
            return None
        request: dict[str, Any] = {}
        with contextlib.suppress(ValueError, TypeError):
            request = dict(json.loads(text))
        # A process of another version writes the receiver alone.
        return request if "reason" in request else {"receiver": request, "reason": ""}

    def renew_lease(self, bound: float | None = None) -> None:
        """Renews the lease of the run for ``bound`` seconds; None renews it for its ``orphan_timeout``."""
        words = [secrets.token_hex(8), *([] if bound is None else [str(bound)])]
        store.write_bytes(self.path("lease"), " ".join(words).encode())

    def lease(self) -> bytes:
        """Returns the lease that the last follower wrote; empty if no follower has."""
        with contextlib.suppress(FileNotFoundError):
            return store.read_bytes(self.path("lease"))
        return b""

    def lease_bound(self) -> float | None:
        """Returns the seconds for which the last follower renewed the lease; None for the run's ``orphan_timeout``."""
        return bound_of(self.lease())


def bound_of(lease: bytes) -> float | None:
    """Returns the seconds of a lease; None for the run's ``orphan_timeout``."""
    _, _, bound = lease.partition(b" ")
    return float(bound) if bound else None


def _new_token() -> bytes:
    """Returns a unique text by which a directory is recognized as one of rankzero's."""
    return f"rankzero-{secrets.token_hex(16)}".encode()


def new_claim(kind: str = "") -> bytes:
    """Returns a unique text with which this process claims a submission or a removal."""
    return f"{kind}{secrets.token_hex(8)} {json.dumps(this_process())}".encode()


def compare_job(job: Job, asked: Asked) -> Comparison:
    """Compares the training of a submission with a requested training.

    Args:
        job: Job of the submission.
        asked: The requested training.
    """
    before = Identity.of(job.identity_parts)
    return compare(before, asked.identity, automatic=asked.repeats(job.generation))
