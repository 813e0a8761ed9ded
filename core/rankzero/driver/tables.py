"""The rows of a run: `Tables` are the datasets that an engine computes, and ranks write rows by `write_rows`.

The datasets are computed before the first attempt of a run. Of the rows that ranks wrote with
`rankzero.train.write_rows`, a restart keeps those that its checkpoint covers:

tables/0001/rows/part-0000-00001-000003.parquet     of attempt 0, carried into attempt 1 by its checkpoint
tables/0001/rows/part-0001-00000-000000.parquet     of attempt 1 itself
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace

from rankzero import store
from rankzero.data.manifest import FILE, Manifest, from_bytes, to_bytes
from rankzero.data.schemas import is_schema
from rankzero.data.table import FOLDER, Written, belongs, folder_of, is_file
from rankzero.engines.base import EngineSession
from rankzero.errors import RunCancelledError
from rankzero.job import Job
from rankzero.run.directory import RunDirectory
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

    def __init__(self, run: RunDirectory, job: Job, session: EngineSession) -> None:
        self._run = run
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
                folder = self._run.new_dataset(name, self._job.submission)
                known[name] = made[name] = self._session.read_table(query, folder, name, say, self._check)
                known[name].check_rows(name, self._job.num_processes)
            data = to_bytes(known)
            location = self._run.submission_path(self._job.submission, FILE)
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
        for number in range(self._job.submission, -1, -1):
            try:
                job = Job.from_json(store.read_bytes(self._run.submission_path(number, "job.json")))
            except FileNotFoundError:
                # The process that claimed this submission died before it had submitted it.
                continue
            if job.fresh_since != self._job.fresh_since:
                break
            for name, manifest in self._of(number).items():
                if name in self._job.queries and name not in found and store.exists(manifest.files[0].location):
                    found[name] = manifest
        return found

    def _of(self, submission: int) -> dict[str, Manifest]:
        try:
            return from_bytes(store.read_bytes(self._run.submission_path(submission, FILE)))
        except FileNotFoundError:
            return {}

    def _remove_replaced(self, now: dict[str, Manifest]) -> None:
        # By name: another submitter may know the same store by another path or URL.
        kept = {_name_of(manifest.folder) for manifest in now.values() if manifest.folder}
        manifests = [manifest for number in range(self._job.submission) for manifest in self._of(number).values()]
        # Drivers that died while they computed left no manifest.
        begun = self._run.datasets_before(self._job.submission)
        for folder in {*begun, *(manifest.folder for manifest in manifests if manifest.folder)}:
            if _name_of(folder) not in kept:
                store.remove(folder)


def _name_of(folder: str) -> str:
    return folder.rstrip("/").rpartition("/")[2]


def carry_rows(run: RunDirectory, attempt: int, written: Written) -> None:
    """Moves rows that belong to an attempt's starting checkpoint into the folder of that attempt.

    If this process dies meanwhile, each file is in the folder of some attempt, where the next attempt finds it. Rows of
    an attempt that has a result are copied, since the result may be a handle of their table.

    Args:
        run: The run.
        attempt: Number of the attempt; the rows are in the folders of earlier ones.
        written: The rows that the checkpoint covers.

    Raises:
        OSError: the store refuses to move a file. Its fsspec driver may raise errors of other types.
    """
    values = store.list_names(run.path("result")) if written else []
    for number in _attempts_before(run, attempt) if written else ():
        keep = _has_result(number, values)
        for table, file in _carried(_rows(store.list_files(run.path(FOLDER, folder_of(number)))), written):
            folder = run.path(FOLDER, folder_of(attempt), table)
            store.make_directory(folder)
            carry(run.path(FOLDER, folder_of(number), table, file), store.join(folder, file), keep=keep)


def remove_rows(run: RunDirectory, attempts: range, written: Written, fresh_since: int = 0) -> None:
    """Deletes rows of these failed attempts, and of earlier ones whose value was never stored.

    Rows of later attempts stay: a delayed driver may have been replaced by now.

    Args:
        run: The run.
        attempts: The failed attempts.
        written: Rows to keep, because they belong to the checkpoint that the next attempt starts from.
        fresh_since: First attempt of this training. The rows of an earlier training belong to its checkpoints.
    """
    values = store.list_names(run.path("result"))
    for number in _attempts_before(run, attempts.stop):
        if number >= fresh_since and (number in attempts or not _has_result(number, values)):
            _remove_all_but(run, number, written)


def _remove_all_but(run: RunDirectory, number: int, written: Written) -> None:
    folder = run.path(FOLDER, folder_of(number))
    paths = store.list_files(folder)
    rows = _rows(paths)
    carried = set(_carried(rows, written))
    if not carried and len(rows) == len(paths):
        store.remove(folder)
        return
    # Other files in the folder are a user's.
    for table, file in set(rows) - carried:
        store.remove(store.join(folder, table, file))


def _carried(files: list[tuple[str, str]], written: Written) -> list[tuple[str, str]]:
    """Returns table and name of each file that a checkpoint covers, and of the schemas of its tables."""
    rows = [(table, file) for table, file in files if belongs(file, table, written)]
    tables = {table for table, _ in rows}
    return [(table, file) for table, file in files if table in tables and is_schema(file)] + rows


def _attempts_before(run: RunDirectory, attempt: int) -> list[int]:
    names = store.list_names(run.path(FOLDER))
    return [int(name) for name in names if name.isdecimal() and int(name) < attempt]


def _rows(paths: list[str]) -> list[tuple[str, str]]:
    """Returns table and name of each path that is a file which ranks have written, completely or not."""
    return [(table, file) for table, _, file in (path.partition("/") for path in paths) if is_file(file)]


def _has_result(attempt: int, values: list[str]) -> bool:
    return any(value.startswith(f"value-{attempt}.") for value in values)


def carry(source: str, target: str, *, keep: bool) -> None:
    """Moves a file within the store, or copies it if it has to be kept. Raises OSError."""
    if not store.is_url(source):
        if not keep:
            store.upload(source, target)
        elif not store.exists(target):
            if not store.copy_within(source, target):
                # A file system without hard links.
                with open(source, "rb") as rows, store.atomic_file(target) as file:
                    shutil.copyfileobj(rows, file)
                    file.flush()
                    os.fsync(file.fileno())
            store.sync_directory(os.path.dirname(target))
    elif not store.copy_within(source, target):
        raise OSError(f"{source} cannot be copied to {target} within its store")
    elif not keep:
        store.remove(source)
