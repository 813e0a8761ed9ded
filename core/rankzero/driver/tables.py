"""`Tables`: the datasets that an engine computes before the first attempt; and rows of failed attempts are removed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from rankzero import store
from rankzero.data.manifest import FILE, Manifest, from_bytes, to_bytes
from rankzero.data.table import FOLDER, is_file
from rankzero.engines.base import EngineSession
from rankzero.errors import RunCancelledError
from rankzero.job import Job
from rankzero.run.directory import Submission
from rankzero.run.names import DATASETS
from rankzero.values.digest import digest_of

logger = logging.getLogger(__name__)


def remove_computed(job: Job) -> None:
    """Removes the rows that were computed for a training that has succeeded, since no attempt reads them again."""
    if FILE not in job.files:
        return
    try:
        for manifest in from_bytes(store.read_bytes(job.files[FILE]["location"])).values():
            if manifest.folder:
                store.remove(manifest.folder)
    except Exception as error:
        # The run has succeeded nevertheless, and removing its directory removes the rows, too.
        logger.warning("the rows of run %s were not removed: %s", job.run_id, error)


class Tables:
    """Computes the tables and queries of a job; a resumed training gets the rows with which it began."""

    def __init__(self, own: Submission, job: Job, session: EngineSession) -> None:
        self._own = own
        self._job = job
        self._session = session
        self._stopped = threading.Event()
        self._ended = threading.Event()

    def read(self, say: Callable[[str], None]) -> Job:
        """Computes the datasets and returns the job with their locations.

        Args:
            say: Receives lines about progress.

        Raises:
            InvalidJobError: a table does not exist, has too few rows, or has a column that cannot become a tensor.
            EngineError: the engine failed.
            RunCancelledError: `stop` was called.
        """
        made: dict[str, Manifest] = {}
        try:
            known = self._known()
            before = self._before()
            for name, query in self._job.queries.items():
                if name in before:
                    known[name] = before[name]
                    continue
                folder = self._own.new_dataset(name)
                known[name] = made[name] = self._session.read_table(query, folder, name, say, self._check)
                known[name].check_rows(name, self._job.num_processes)
            data = to_bytes(known)
            location = self._own.path(FILE)
            store.write_bytes(location, data, durable=True)
            self._remove_replaced(known)
        except BaseException:
            for manifest in made.values():
                store.remove(str(manifest.folder))
            raise
        finally:
            self._ended.set()
        described = {"location": location, "size": len(data), "absolute": False, "digest": digest_of([data])}
        return replace(self._job, files={**self._job.files, FILE: described}, queries={})

    def stop(self, timeout: float) -> None:
        """Makes `read` stop in whichever thread it runs; returns when it has, or after ``timeout`` seconds."""
        self._stopped.set()
        self._ended.wait(timeout)

    def _check(self) -> None:
        if self._stopped.is_set():
            raise RunCancelledError("the run was cancelled while its datasets were computed")

    def _known(self) -> dict[str, Manifest]:
        """Returns the datasets that the submitter has made."""
        if FILE not in self._job.files:
            return {}
        return from_bytes(store.read_bytes(self._job.files[FILE]["location"]))

    def _before(self) -> dict[str, Manifest]:
        """Returns the datasets that were computed earlier for this training, the newest of each name.

        Drivers of earlier submissions computed them, or an earlier driver of this one.
        """
        found: dict[str, Manifest] = {}
        for place in reversed([*self._own.earlier(), self._own.directory]):
            for name, manifest in _of(place).items():
                if name in self._own.job.queries and name not in found and store.exists(manifest.files[0].location):
                    found[name] = manifest
        return found

    def _remove_replaced(self, now: dict[str, Manifest]) -> None:
        # By name: another submitter may know the same store by another path or URL.
        kept = {_name_of(manifest.folder) for manifest in now.values() if manifest.folder}
        for place in self._own.earlier():
            # Drivers that died while they computed left no manifest.
            for name in store.list_names(store.join(place, DATASETS)):
                if name not in kept:
                    store.remove(store.join(place, DATASETS, name))


def _of(place: str) -> dict[str, Manifest]:
    try:
        return from_bytes(store.read_bytes(store.join(place, FILE)))
    except FileNotFoundError:
        return {}


def _name_of(folder: str) -> str:
    return folder.rstrip("/").rpartition("/")[2]


def remove_rows(place: str, attempts: range | None) -> None:
    """Deletes rows of failed attempts.

    The files by which rows have begun stay, as long as the checkpoints behind them.

    Args:
        place: The folder of a submission.
        attempts: The attempts; None for those of an earlier submission that have stored no value.
    """
    values = store.list_names(store.join(place, "result")) if attempts is None else []
    for name in store.list_names(store.join(place, FOLDER)):
        if name.isdecimal() and (int(name) in attempts if attempts is not None else not _has_result(name, values)):
            folder = store.join(place, FOLDER, name)
            # Other files in the folder are a user's.
            for path in store.list_files(folder):
                if is_file(path.partition("/")[2]):
                    store.remove(store.join(folder, path))


def _has_result(attempt: str, values: list[str]) -> bool:
    return any(value.startswith(f"value-{int(attempt)}.") for value in values)
