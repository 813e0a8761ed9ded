"""The run directory, the only record of a run: its submissions, and the functions that read and write their files.

Files that decide something are created once and never replaced: the job of a submission, which is its claim, its
driver and its end. Everything else of a submission lies in a folder whose name contains its nonce, so a process of
another submission, or of a run that was removed, writes into none of its files. docs/architecture.md#the-run-directory
has a table of all files.
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
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rankzero import bounds, store
from rankzero.errors import RunNotFoundError
from rankzero.host.processes import this_process
from rankzero.job import Job
from rankzero.run.status import RunStatus
from rankzero.values.pickled import Part

SUBMISSIONS = "submissions"  # The folder of all submissions
_OF_SUBMISSION = re.compile(r"([0-9]+)(?:\.json|-[0-9a-f]+)")  # The job there, which is its claim, and its folder
REPORT_FILE = "report.html"  # The report, which shows the run in a browser, in the run directory itself

# In the folder of a submission:
EVENTS = "events.jsonl"
LINES = "lines"  # The lines of all ranks, each as ``[rank] time text``
DRIVER_LOG = "driver.log"  # The output of a driver with a process of its own, and of its JVM; not on an object store
DATASETS_FILE = "datasets.json"  # The manifests of the datasets that the ranks read, by name
TABLES = "tables"  # The folder of rows that ranks have written, with a folder for each attempt

RENEWAL_INTERVAL = 10.0  # Most seconds between two renewals of a lease on a disk
RENEWAL_INTERVAL_REMOTE = 60.0  # The same on an object store, where each is a request

_job_from_json = functools.lru_cache(maxsize=4)(Job.from_json)
"""Parses a job. One launch reads the same text a dozen times."""

_REMOVED = b'{"removed": true'  # Begins the file that takes the place of a job once the run is removed


class RunDirectory:
    """Finds and claims the submissions of one run directory, and keeps no state in memory."""

    def __init__(self, directory: str) -> None:
        self.directory = store.normalize(directory)
        self.is_remote = store.is_url(self.directory)

    def path(self, *parts: str) -> str:
        """Returns the location of a file or folder of the run directory."""
        return store.join(self.directory, *parts)

    def job_path(self, number: int) -> str:
        """Returns the location of the job of a submission."""
        return self.path(SUBMISSIONS, f"{number}.json")

    def names(self) -> list[str]:
        """Returns the names of all jobs and folders of submissions; empty if rankzero has not made this directory."""
        with contextlib.suppress(NotADirectoryError):
            return [name for name in store.list_names(self.path(SUBMISSIONS)) if _OF_SUBMISSION.fullmatch(name)]
        return []

    def numbers(self) -> list[int]:
        """Returns the numbers of the submissions, and of the removal of the run, in order."""
        return sorted(int(name[: -len(".json")]) for name in self.names() if name.endswith(".json"))

    def newest(self) -> tuple[int, Job | None]:
        """Returns the number of the last submission, and its job, which is None behind a removal; -1 if there is none.

        Raises RunNotFoundError for a job that this version of rankzero cannot read.
        """
        while (number := max(self.numbers(), default=-1)) >= 0:
            # It may be removed meanwhile, perhaps with others.
            with contextlib.suppress(FileNotFoundError):
                return number, self._read(number)
        return -1, None

    def _read(self, number: int) -> Job | None:
        data = store.read_bytes(self.job_path(number))
        return None if data.startswith(_REMOVED) else _job_from_json(data)

    def job(self) -> Job:
        """Returns the job of the last submission. Raises RunNotFoundError."""
        if job := self.newest()[1]:
            return job
        raise RunNotFoundError(f"no run lives in {self.directory}")

    def job_of(self, number: int) -> Job | None:
        """Returns the job of one submission, or None. Raises like `newest`."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return self._read(number)
        return None

    def current(self) -> Submission:
        """Returns the last submission. Raises RunNotFoundError."""
        return Submission(self, self.job())

    def claim(self, job: Job) -> bool:
        """Makes this job the last submission, after its files were written; False if its number is taken.

        Raises OSError if the store cannot be written, or the folder of the submission was removed meanwhile.
        """
        # Beside the submission's own files: what was removed and submitted again has no such folder.
        folder = Submission(self, job).directory
        beside = store.join(folder, "job")
        won = store.create(self.job_path(job.submission), job.to_json(), beside=beside, durable=True)
        for directory in (folder, self.directory, os.path.dirname(self.directory)):
            store.sync_directory(directory)
        return won

    def claim_removal(self, number: int) -> bool:
        """Takes a number for the removal of the run, unless a submission has it."""
        text = b"%s, %s}" % (_REMOVED, json.dumps({"by": this_process(), "nonce": secrets.token_hex(8)})[1:-1].encode())
        return store.create(self.job_path(number), text)

    def strangers(self) -> list[str]:
        """Returns names in the directory that rankzero does not write there."""
        known = {SUBMISSIONS, REPORT_FILE}
        names = [name for name in store.list_names(self.directory) if not (name in known or store.is_unfinished(name))]
        below = [name for name in store.list_names(self.path(SUBMISSIONS)) if not store.is_unfinished(name)]
        return names + [f"{SUBMISSIONS}/{name}" for name in below if not _OF_SUBMISSION.fullmatch(name)]


@dataclass(frozen=True)
class Delivery:
    """Records who has a result: until the acknowledgement, the next submission of the same training gets it."""

    receiver: dict[str, Any] = field(default_factory=dict)  # Identifies the receiver to its orchestrator; or empty
    acknowledged: bool = False  # The receiver has stored the result durably


class Submission:
    """Reads and writes the files of one submission. Methods raise OSError, or an error of the store's fsspec driver.

    Attributes:
        name: Name of its folder.
        directory: Path or URL of its folder.
        me: Identifies this object as the writer of `end`.
    """

    def __init__(self, run: RunDirectory, job: Job) -> None:
        self.run = run
        self.job = job
        self.name = f"{job.submission}-{job.nonce}"
        self.directory = run.path(SUBMISSIONS, self.name)
        self.is_remote = run.is_remote
        self.me = secrets.token_hex(8)
        self._has_claimed = False

    def path(self, *parts: str) -> str:
        """Returns the location of a file or folder of the submission."""
        return store.join(self.directory, *parts)

    def earlier(self) -> list[str]:
        """Returns the folders of earlier submissions of the same training, the first one first."""
        return [self.run.path(SUBMISSIONS, name) for name in self.job.earlier]

    def result_path(self, uri: str) -> str:
        """Returns where the value with this location is now, since the run directory may have been moved."""
        return self.path("result", uri.rsplit("/", 1)[-1])

    def new_dataset(self, name: str) -> str:
        """Returns an unused location for the rows of a dataset."""
        return self.path("datasets", f"{name}-{secrets.token_hex(4)}")

    def write_files(self, files: Mapping[str, list[Part]]) -> None:
        """Makes the folder and writes the files that a driver needs beside the job."""
        store.make_directory(self.directory)
        for folder in ("result", "checkpoints"):
            store.make_directory(self.path(folder))
        for name, parts in files.items():
            store.write_parts(self.path(name), parts)

    def is_there(self) -> bool:
        """Returns False if the run was removed, and perhaps submitted again under its name."""
        job = self.run.job_of(self.job.submission)
        return job is not None and job.nonce == self.job.nonce

    def _find(self, name: str) -> bytes | None:
        """Returns the bytes of a file, by one request to an object store; None if it does not exist."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return store.read_bytes(self.path(name))
        return None

    # -- the driver ------------------------------------------------------------------------------

    def claim_driver(self, timeout: float = 0.0) -> bool:
        """Returns True to the first driver that claims this submission, and False to other drivers.

        A store that fails is tried again for ``timeout`` seconds.
        """
        # The same bytes at each try: they show whether an earlier one was executed although it failed.
        text = json.dumps({"nonce": self.me, **this_process()}).encode()
        self._has_claimed = store.patiently(
            lambda: store.create(self.path("driver"), text), timeout, bounds.STORE_RETRY_INTERVAL(), store.is_missing
        )
        return self._has_claimed

    def has_driver(self) -> bool:
        """Returns True if a driver has claimed this submission."""
        return store.exists(self.path("driver"))

    # -- status and end --------------------------------------------------------------------------

    def status(self) -> RunStatus:
        """Returns the last status that the driver has written; the end if there is no status.

        Raises RunNotFoundError if the run was removed.
        """
        data = self._find("status.json")
        # A power failure may have emptied or cut off the file, and has also ended the driver.
        if data and data.endswith(b"}"):
            return RunStatus.from_json(data, self.path("status.json"))
        # A later submission is made behind the end of this one, which only a collector removes.
        is_last = data is not None or self.run.numbers()[-1:] == [self.job.submission]
        if end := self.end():
            return end
        if data is None and not (is_last and self.is_there()):
            raise RunNotFoundError(f"the run in {self.run.directory} was removed, and perhaps submitted again")
        job = self.job
        status = RunStatus(attempt=job.first_attempt, queue_time=job.queue_time, submission=job.submission)
        return replace(status, heartbeat=job.created if data is None else 0.0, metrics=job.metrics)

    def write_status(self, status: RunStatus) -> None:
        """Replaces the status, as the submission's driver alone may. No fsync: the end is durable."""
        store.write_bytes(self.path("status.json"), status.to_json())

    def end(self) -> RunStatus | None:
        """Returns how the submission has ended, or is certain to; None before that."""
        data = self._find("end.json")
        return None if data is None else RunStatus.from_json(data, self.path("end.json"))

    def finish(self, status: RunStatus) -> RunStatus:
        """Creates the end of the submission. Returns the end that counts, which is that of the first caller.

        Raises FileNotFoundError if the run was removed.
        """
        ended = replace(status, ended=status.ended or time.time(), ended_by=self.me)
        if not store.create(self.path("end.json"), ended.to_json(), durable=True):
            ended = self.end() or ended
        # An object store has no folders that could be missing.
        if self.is_remote and not self.is_there():
            raise FileNotFoundError(self.path("end.json"))
        return ended

    def is_lost(self) -> bool:
        """Returns True if another process has ended this submission, or the run was removed: its driver must stop."""
        if end := self.end():
            return end.ended_by != self.me
        return not (self.has_driver() if self._has_claimed else self.is_there())

    # -- followers -------------------------------------------------------------------------------

    def request_cancel(self, receiver: Mapping[str, Any] | None = None, reason: str = "") -> None:
        """Stores a request to end the submission, which its driver polls for: see `RunHandle.cancel`."""
        request = {"receiver": receiver or {}, "reason": reason}
        store.write_bytes(self.path("cancel"), json.dumps(request).encode())

    def cancel_request(self) -> dict[str, Any] | None:
        """Returns ``receiver`` and ``reason`` of the request to end the submission; None if there is no request."""
        if (text := self._find("cancel")) is None:
            return None
        with contextlib.suppress(ValueError, TypeError):
            return {"receiver": {}, "reason": "", **json.loads(text)}
        return {"receiver": {}, "reason": ""}

    def renew_lease(self, bound: float | None = None) -> None:
        """Renews the lease for ``bound`` seconds; None renews it for the run's ``orphan_timeout``."""
        words = [secrets.token_hex(8), *([] if bound is None else [str(bound)])]
        store.write_bytes(self.path("lease"), " ".join(words).encode())

    def renewal_interval(self, bound: float) -> float:
        """Returns the seconds between two renewals of a run that ends after ``bound`` seconds without a renewal."""
        return min(RENEWAL_INTERVAL_REMOTE if self.is_remote else RENEWAL_INTERVAL, bound / 4)

    def lease(self) -> bytes:
        """Returns the lease that the last follower wrote; empty if no follower has."""
        return self._find("lease") or b""

    def delivery(self) -> Delivery:
        """Returns the delivery of the result, which is empty if the result was not offered."""
        # A power failure may have emptied the file. The result is then delivered again.
        with contextlib.suppress(ValueError, TypeError):
            return Delivery(**json.loads(self._find("delivery") or b"{}"))
        return Delivery()

    def record_delivery(self, delivery: Delivery) -> None:
        """Replaces the recorded delivery."""
        store.write_bytes(self.path("delivery"), json.dumps(asdict(delivery)).encode())


def bound_of(lease: bytes) -> float | None:
    """Returns the seconds of a lease; None for the run's ``orphan_timeout``."""
    _, _, bound = lease.partition(b" ")
    return float(bound) if bound else None
