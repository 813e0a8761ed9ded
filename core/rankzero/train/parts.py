"""`Parts`: reads and writes a rank's files (checkpoints, its value), wherever the run directory is."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from rankzero import bounds, store
from rankzero.bounds import STORE_OUTAGE
from rankzero.channel.messages import Start
from rankzero.errors import ResultError
from rankzero.host import forks
from rankzero.run.checkpoints import FOLDER, MANIFEST
from rankzero.store import remote
from rankzero.values import formats

PART_UPLOAD_TIMEOUT = bounds.scaled(30.0)  # From the first failed write of a part until the rank gives up
_COPY_CHUNK = 8 << 20

Part = Mapping[str, Any]


class NotTakenError(Exception):
    """The store or the driver has not taken a part; it may take the next one."""


class Parts:
    """Reads and writes files of checkpoints, in the best way that this host has.

    1. The run directory itself, where this host sees it.
    2. Its object store, where this rank has a client and the right to it.
    3. The host's scratch directory: the agent sends what is written there to the driver, and fetches what is needed.
    """

    def __init__(
        self, start: Start, fetch: Callable[[str], str], put: Callable[[str, str], str | None] = lambda name, path: None
    ) -> None:
        """Prepares the access without connecting to a store.

        Args:
            start: The work of this rank.
            fetch: Makes the agent fetch a file of the driver.
            put: Makes the agent send a file to the driver, under a name, and returns an error if it has not arrived.
        """
        self.shared = start.shared
        self.run_directory = start.run_directory
        self._token = start.run_token
        self._scratch = start.scratch
        checkpoint = start.checkpoint or {}
        self._resumed, self._resumed_place = checkpoint.get("id"), checkpoint.get("place") or start.run_directory
        self._fetch = fetch
        self.put = put
        self._lock = threading.Lock()
        self._client: remote.Client | None = None
        self._is_connected = False
        self.is_being_read = False
        """True while training waits for a part, which may be slow and is no hang."""

    def client(self) -> remote.Client | None:
        """Returns this rank's client of the object store; None if it has none."""
        with forks.held(), self._lock:
            if not (self._is_connected or self.shared) and store.is_url(self.run_directory):
                self._client = remote.reach(self.run_directory, self._token)
            self._is_connected = True
            return self._client

    def check_directory(self) -> None:
        """Raises ResultError if the run directory, to which this rank writes, was removed or given to another run."""
        client = None if self.shared else self.client()
        if not self._token or not (self.shared or client):
            return
        path = store.join(self.run_directory, "driver")
        try:
            with forks.held(), client.open_read(path) if client else open(path, "rb") as file:
                is_this = file.read().decode() == self._token
        except FileNotFoundError:
            is_this = False
        if not is_this:
            raise ResultError(f"{self.run_directory} was removed, or is another run's by now: this rank writes no more")

    def place(self, checkpoint: str) -> str:
        """Returns the folder of the submission that has a checkpoint."""
        return self._resumed_place if checkpoint == self._resumed else self.run_directory

    def folder(self, checkpoint: str) -> str:
        """Returns the local folder in which this host writes its parts of a checkpoint."""
        return os.path.join(self.run_directory if self.shared else self._scratch, FOLDER, checkpoint)

    def archive(self, directory: str) -> IO[bytes]:
        """Archives a directory on this host; returns the open file, which its end deletes."""
        file: Any = tempfile.NamedTemporaryFile(prefix="archive-", dir=self._scratch or None)
        formats.write_directory(directory, file)
        return file  # type: ignore[no-any-return]

    def write(self, checkpoint: str, file: str, source: IO[bytes]) -> tuple[str, str]:
        """Copies an open file to a part, which exists completely or not at all.

        Returns its digest, and the name under which the driver has it; an empty text if it is in the run directory or
        its store. Raises NotTakenError, or OSError if the disk cannot hold the part.
        """
        if client := self.client():
            url = store.join(self.run_directory, FOLDER, checkpoint, file)
            if digest := self._upload(client, url, source, PART_UPLOAD_TIMEOUT(), formats.digest_of):
                return digest, ""
        self.check_directory()
        folder = self.folder(checkpoint)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, file)
        with store.atomic_file(path) as local:
            digest = formats.digest_of(_copied(source, local))
            local.flush()
            os.fsync(local.fileno())
            self.check_directory()
        name = "" if self.shared else f"{checkpoint}-{file}"
        if name and (error := self.put(name, path)):
            raise NotTakenError(f"it was not sent to the driver: {error}")
        return digest, name

    def upload_value(self, path: str, name: str) -> str | None:
        """Copies rank 0's value to the store and returns its URL; None if this rank cannot, and the driver must."""
        if (client := self.client()) is None:
            return None
        url = store.join(self.run_directory, "result", name)
        try:
            with open(path, "rb") as file:
                return url if self._upload(client, url, file, STORE_OUTAGE(), lambda got: sum(map(len, got))) else None
        except Exception as error:
            print(f"rankzero: the store does not take the value of this rank, which sends it to the driver: {error}")
            return None

    def _upload(self, client: remote.Client, url: str, source: IO[bytes], timeout: float, use: Any) -> Any:
        """Uploads an open file, and returns what ``use`` makes of its chunks; None if the store refuses this rank's."""
        deadline: float | None = None
        while True:
            try:
                with forks.held(), remote.Upload(client, url) as upload:
                    made = use(_copied(source, upload))
                    self.check_directory()
                return made
            except ResultError:
                raise
            except Exception as error:
                if remote.is_refusal(error):
                    print(f"rankzero: the store refuses files of this rank, which sends them to the driver: {error}")
                    self._client = None
                    return None
                # Counted from the first failure, since a large part alone may take longer.
                deadline = deadline or time.monotonic() + timeout
                if time.monotonic() > deadline:
                    raise NotTakenError(f"the store does not accept it: {error}") from error
            time.sleep(bounds.WRITE_RETRY_INTERVAL())

    def all_of(self, manifest: Mapping[str, Any]) -> Mapping[str, Part]:
        """Returns all parts of a checkpoint by rank, as text, of which its manifest here has this task's. Reads one."""
        if not manifest["sharded"] or len(manifest["parts"]) == manifest["world_size"]:
            return manifest["parts"]  # type: ignore[no-any-return]
        with open(self.path(manifest["id"], "manifest", {"file": MANIFEST})) as file:
            return json.load(file)["parts"]  # type: ignore[no-any-return]

    def path(self, checkpoint: str, rank: str, part: Part) -> str:
        """Returns a local path of a part, which is fetched to this host if necessary.

        Raises:
            FileNotFoundError: the part was deleted.
            ResultError: this host cannot reach the part.
        """
        if here := self._here(checkpoint, part):
            return here
        if self.shared:
            raise FileNotFoundError(self._location(checkpoint, part))
        if client := self.client():
            return remote.download(client, self._location(checkpoint, part), self._fetched(checkpoint, part))
        if checkpoint != self._resumed:
            raise ResultError(f"this host cannot reach the part of rank {rank} of checkpoint {checkpoint}")
        return self._fetch(f"checkpoint-{rank}")

    def _location(self, checkpoint: str, part: Part) -> str:
        return store.join(self.place(checkpoint), FOLDER, checkpoint, part["file"])

    def _fetched(self, checkpoint: str, part: Part) -> str:
        return os.path.join(self._scratch, f"fetched-{checkpoint}-{part['file']}")

    def _here(self, checkpoint: str, part: Part) -> str | None:
        """Returns the local path of a part that this host has, else None."""
        own = os.path.join(self.folder(checkpoint), part["file"])
        paths = [self._location(checkpoint, part)] if self.shared else [own, self._fetched(checkpoint, part)]
        return next(filter(os.path.exists, paths), None)


def _copied(source: IO[bytes], file: Any) -> Iterator[bytes]:
    """Yields each chunk once it is written, for a caller that hashes it meanwhile; copies only what is consumed."""
    source.seek(0)
    while chunk := source.read(_COPY_CHUNK):
        file.write(chunk)
        yield chunk
