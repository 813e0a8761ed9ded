"""`Inputs`: the files that the workers of one task need: payload, modules, user code, referenced files.

A file is used in place if this host sees it under its path. Else it is fetched from the driver once for each task.
Files on an object store, and the checkpoint to start from, are fetched only when a worker requests them because it
cannot read them itself.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from typing import Any

from rankzero import store
from rankzero.channel.messages import Assign, Start
from rankzero.data import manifest
from rankzero.errors import EngineError
from rankzero.values.formats import digest_of_file

PAYLOAD, MODULES, CODE = "payload.pkl", "modules.zip", "code.zip"


class Inputs:
    """Finds and unpacks the files of the ranks of one agent.

    Attributes:
        shared: True if this host sees the driver's run directory under the same path.
        missing: The files to fetch: name to local path.
    """

    def __init__(self, assigned: Assign, digests: dict[str, str], scratch: str) -> None:
        """Finds out which files this host has and which are missing: those are fetched into ``scratch``.

        For the ``digests``, those of the files that ranks execute, the driver has given a proof.
        """
        self._assigned, self._digests, self._scratch = assigned, digests, scratch
        self.shared = self._sees_run_directory()
        self._here: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        for name, file in assigned.files.items():
            if name.startswith("checkpoint-") or ("uri" in file and store.is_url(file["uri"])):
                # Workers request it.
                continue
            path, size = file["location"], -1
            if self.shared or file.get("absolute"):
                with contextlib.suppress(OSError):
                    size = os.path.getsize(path)
            if size != file["size"]:
                path = self.missing[name] = os.path.join(scratch, name)
            self._here[name] = path

    def _sees_run_directory(self) -> bool:
        directory = self._assigned.run_directory
        with contextlib.suppress(OSError):
            if not store.is_url(directory):
                with open(os.path.join(directory, "driver")) as file:
                    return file.read() == self._assigned.run_token and os.access(directory, os.W_OK)
        return False

    def message(self, config: dict[str, Any], began: float) -> Start:
        """Returns the `Start` of every worker of this task, without its context; requires that no file is missing.

        Raises:
            EngineError: the digest of a file differs from the driver's.
            OSError, ValueError: an archive cannot be unpacked.
        """
        assigned = self._assigned
        # Checked once here for all workers, which execute them.
        for name in {PAYLOAD, MODULES, CODE} & self._here.keys():
            if digest_of_file(self._here[name]) != self._digests[name]:
                raise EngineError(
                    f"{name} does not carry the digest that the driver recorded: it was changed or damaged, or an "
                    "argument changed while it was submitted"
                )
        facts: dict[str, Any] = {
            "payload": self._here[PAYLOAD],
            "modules": self._unpack(MODULES),
            "code": self._unpack(CODE),
            "refs": {
                file["uri"]: [name, self._here.get(name)] for name, file in assigned.files.items() if "uri" in file
            },
            "result_directory": os.path.join(assigned.run_directory, "result") if self.shared else self._scratch,
            "shared": self.shared,
            "scratch": self._scratch,
            "datasets": self._here.get(manifest.FILE),
            "exit_timeout": config["exit_timeout"],
            "began": began,
        }
        return Start(**vars(assigned), **facts)

    def _unpack(self, name: str) -> str | None:
        """Unpacks an archive of the user's code for this task's ranks, which may write into it; None without one."""
        if name not in self._here:
            return None
        directory = os.path.join(self._scratch, name.removesuffix(".zip"))
        with zipfile.ZipFile(self._here[name]) as archive:
            archive.extractall(directory)
            for file in archive.infolist():
                if (mode := file.external_attr >> 16) & 0o100:
                    os.chmod(os.path.join(directory, file.filename), mode & 0o777 | 0o200)
        return directory

    def context(self, local_rank: int, local_world_size: int, use_gpu: bool) -> dict[str, Any]:
        """Returns the fields of one worker's `rankzero.train.TrainContext`."""
        return {
            **self._assigned.context,
            "rank": self._assigned.first_rank + local_rank,
            "local_rank": local_rank,
            "local_world_size": local_world_size,
            "node_rank": self._assigned.node_rank,
            "use_gpu": use_gpu,
            "storage_path": self._assigned.context["storage_path"] if self.shared else None,
        }
