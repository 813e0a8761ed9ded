"""`Tables`: the datasets that an engine computes before the first attempt."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from rankzero import store
from rankzero.data.manifest import FILE, Manifest, from_bytes, to_bytes
from rankzero.engines.base import EngineSession
from rankzero.errors import RunCancelledError
from rankzero.job import Job
from rankzero.run.directory import Submission
from rankzero.values.digest import digest_of

logger = logging.getLogger(__name__)


def remove_computed(job: Job) -> None:
    """Removes the rows that were computed for a training that has succeeded, since no attempt reads them again."""
    try:
        for manifest in (_read(job.files[FILE]["location"]) if FILE in job.files else {}).values():
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
            known = from_bytes(store.read_bytes(self._job.files[FILE]["location"])) if FILE in self._job.files else {}
            known |= self._before()
            for name, query in self._job.queries.items():
                if name in known:
                    continue
                folder = self._own.new_dataset(name)
                known[name] = made[name] = self._session.read_table(query, folder, name, say, self._check)
                known[name].check_rows(name, self._job.num_processes)
            data = to_bytes(known)
            location = self._own.path(FILE)
            store.write_bytes(location, data, durable=True)
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

    def _before(self) -> dict[str, Manifest]:
        """Returns the datasets that were computed earlier for this training, the newest of each name.

        Drivers of earlier submissions computed them, or an earlier driver of this one.
        """
        found: dict[str, Manifest] = {}
        for place in [*self._own.earlier(), self._own.directory]:
            computed = _read(store.join(place, FILE))
            names = [name for name in computed if name in self._job.queries]
            found |= {name: computed[name] for name in names if store.exists(computed[name].files[0].location)}
        return found


def _read(location: str) -> dict[str, Manifest]:
    try:
        return from_bytes(store.read_bytes(location))
    except FileNotFoundError:
        return {}
