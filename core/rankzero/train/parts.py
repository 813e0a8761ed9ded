"""`Parts`: a rank's files, of checkpoints and its value, as it writes and reads them wherever the run directory is."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import IO, Any

from rankzero import store
from rankzero.bounds import STORE_OUTAGE
from rankzero.errors import ResultError
from rankzero.run.checkpoints import FOLDER, MANIFEST, PIECES
from rankzero.store import remote
from rankzero.values.formats import Writable

STORE_PATIENCE = 30.0
"""Seconds from its first failure for which a store that does not take a part is asked again."""

STORE_INTERVAL = 0.5
"""Seconds between two of these tries."""

READ_AHEAD = 4 << 20
"""Bytes that are asked of a store at once, where less is wanted."""

_COPY_CHUNK = 8 << 20

Part = Mapping[str, Any]
Message = dict[str, Any]
Produce = Callable[[Writable], Message]


class ListedParts(Mapping[str, Part]):
    """The parts of a checkpoint by rank, as text: some are known, all are read once another is asked for.

    Attributes:
        formats: Those of all parts.
    """

    def __init__(
        self, known: Mapping[str, Part], formats: Collection[str], read: Callable[[], Mapping[str, Part]]
    ) -> None:
        """Reads nothing yet.

        Args:
            known: The parts that the driver told this task of.
            formats: Those of all parts.
            read: Gives all parts.
        """
        self.formats = frozenset(formats)
        self._known = known
        self._read = read

    @functools.cached_property
    def _all(self) -> Mapping[str, Part]:
        return self._read()

    def __getitem__(self, rank: str) -> Part:
        return self._known[rank] if rank in self._known else self._all[rank]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


class NotTakenError(Exception):
    """The store did not take a part; it may be back for the next one."""


class Parts:
    """Files of checkpoints, by the best way that there is from this host.

    1. The run directory itself, where this host sees it.
    2. Its object store, where this rank has a client and the right to it.
    3. The host's scratch directory: the agent sends what is written there to the driver, and fetches what is needed.
    """

    def __init__(self, start: Mapping[str, Any], fetch: Callable[[str], str]) -> None:
        """Tries nothing yet.

        Args:
            start: The agent's message: ``run_directory`` and its ``run_token``; ``shared``, if this host sees it;
                ``scratch``, a directory of this task.
            fetch: Has the agent fetch a file that the driver offers; gives its path, or raises ResultError.
        """
        self.shared: bool = start["shared"]
        self.run_directory: str = start["run_directory"]
        self._token: str = start["run_token"]
        self._scratch: str = start["scratch"]
        self._resumed: str | None = (start["checkpoint"] or {}).get("id")
        self._fetch = fetch
        self._lock = threading.Lock()
        self._client: remote.Client | None = None
        self._has_looked = False
        self._readers = 0

    def client(self) -> remote.Client | None:
        """This rank's way to the object store; None if there is none."""
        with self._lock:
            if not self._has_looked:
                self._has_looked = True
                if not self.shared and store.is_url(self.run_directory):
                    self._client = remote.reach(self.run_directory, self._token)
            return self._client

    def local_path(self, checkpoint: str, file: str) -> str:
        """Returns where a part that is written as a local file lies, and makes its folder.

        Raises:
            OSError: the folder cannot be made, or the run directory was removed, and may be another run's by now.
        """
        if self.shared and self._token:
            self._check_directory()
        folder = os.path.join(self.run_directory if self.shared else self._scratch, FOLDER, checkpoint)
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, file)

    def _check_directory(self) -> None:
        # A directory that was removed and submitted again has the same name, and files of the same names.
        with open(os.path.join(self.run_directory, "token")) as file:
            if file.read() != self._token:
                raise OSError(f"{self.run_directory} was removed, and is another run's by now")

    def folder(self, checkpoint: str) -> str:
        """The scratch folder of a checkpoint."""
        return os.path.join(self._scratch, FOLDER, checkpoint)

    # -- writing ---------------------------------------------------------------------------------

    def write(self, checkpoint: str, file: str, produce: Produce) -> Message:
        """Writes a part, so that it is there as a whole or not at all.

        Args:
            checkpoint: Its id.
            file: The part's name.
            produce: Writes it; gives its ``size``, its ``sha256`` and more. May be called again, after an error of the
                store.

        Returns:
            That, ``path``, and ``shared``: it is in its place, and not to be sent.

        Raises:
            NotTakenError: the store has not taken it for `STORE_PATIENCE` seconds.
            OSError: the disk does not take it.
        """
        if client := self.client():
            try:
                return self._upload(client, store.join(self.run_directory, FOLDER, checkpoint, file), produce)
            except Exception as error:
                if isinstance(error, ResultError):
                    raise
                if not remote.is_refusal(error):
                    raise NotTakenError(f"the store does not take it: {error}") from error
                print(f"rankzero: checkpoints pass through the driver: the store refuses this rank's ({error})")
                self._client = None
        path = self.local_path(checkpoint, file)
        return {**_write_local(path, produce), "path": path, "shared": self.shared}

    def upload_value(self, path: str, name: str) -> str | None:
        """Copies rank 0's value to the object store; None where only the driver can.

        Args:
            path: The local file.
            name: Its name among the run's results.

        Returns:
            Its URL, where it is as a whole.
        """
        if (client := self.client()) is None:
            return None
        url = store.join(self.run_directory, "result", name)
        try:
            self._upload(client, url, functools.partial(copy_file, path), STORE_OUTAGE)
        except Exception as error:
            print(f"rankzero: the value passes through the driver: the store does not take this rank's ({error})")
            return None
        return url

    @staticmethod
    def _upload(client: remote.Client, url: str, produce: Produce, patience: float = STORE_PATIENCE) -> Message:
        deadline: float | None = None
        while True:
            try:
                with remote.Upload(client, url) as upload:
                    facts = produce(upload)
                return {**facts, "path": url, "shared": True}
            except ResultError:
                raise
            except Exception as error:
                # From the first failure on: a large part may take longer than that by itself.
                deadline = deadline or time.monotonic() + patience
                if remote.is_refusal(error) or time.monotonic() > deadline:
                    raise
            threading.Event().wait(STORE_INTERVAL)

    # -- reading ---------------------------------------------------------------------------------

    @property
    def is_being_read(self) -> bool:
        """True while training waits for a part."""
        return self._readers > 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """The block reads parts: slow, but no hang."""
        with self._lock:
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1

    def listed(self, manifest: Mapping[str, Any]) -> ListedParts:
        """The parts of a checkpoint of which the driver told this task those of its own ranks."""
        known, formats = manifest["parts"], manifest["formats"]
        if not manifest["sharded"]:
            return ListedParts(known, formats, lambda: known)

        def read() -> Mapping[str, Part]:
            try:
                with self.open(manifest["id"], "manifest", {"file": MANIFEST}) as file:
                    parts: Mapping[str, Part] = json.load(file)["parts"]
            except FileNotFoundError:
                raise ResultError(
                    f"checkpoint {manifest['id']} is not kept any more: ask get_checkpoint() for the newest"
                ) from None
            return parts

        return ListedParts(known, formats, read)

    def indexes(self, checkpoint: str, ranks: Collection[str]) -> dict[str, bytes]:
        """The indexes of a sharded checkpoint's parts, those that lie together; by rank, as text."""
        try:
            with self.open(checkpoint, "pieces", {"file": PIECES}) as file:
                lines = file.read().split(b"\n")
        except (FileNotFoundError, ResultError):
            # Not within reach: each part has its own.
            return {}
        return {rank: line for rank, line in zip(sorted(ranks, key=int), lines, strict=False) if line}

    def path(self, checkpoint: str, rank: str, part: Part) -> str:
        """A local path of a part, fetched to this host if need be.

        Raises:
            FileNotFoundError: it was deleted.
            ResultError: it is not within reach of this host.
        """
        for here in self._places(checkpoint, part):
            if os.path.exists(here):
                return here
        if self.shared:
            raise FileNotFoundError(self._places(checkpoint, part)[0])
        if client := self.client():
            url = store.join(self.run_directory, FOLDER, checkpoint, part["file"])
            here = os.path.join(self._scratch, f"fetched-{checkpoint}-{part['file']}")
            return remote.download(client, url, here)
        if checkpoint != self._resumed:
            raise ResultError(f"the part of rank {rank} of checkpoint {checkpoint} is not within reach of this host")
        return self._fetch(f"checkpoint-{rank}")

    def open(self, checkpoint: str, rank: str, part: Part) -> IO[bytes]:
        """An open part, of which only what is asked for is read. Raises like `path`."""
        is_here = self.shared or any(map(os.path.exists, self._places(checkpoint, part)))
        if not is_here and (client := self.client()):
            url = store.join(self.run_directory, FOLDER, checkpoint, part["file"])
            # Pieces are small, and lie one after the other.
            return io.BufferedReader(client.open_read(url), READ_AHEAD)  # type: ignore[type-var]
        return open(self.path(checkpoint, rank, part), "rb")

    def _places(self, checkpoint: str, part: Part) -> list[str]:
        if self.shared:
            return [os.path.join(self.run_directory, FOLDER, checkpoint, part["file"])]
        fetched = os.path.join(self._scratch, f"fetched-{checkpoint}-{part['file']}")
        return [os.path.join(self.folder(checkpoint), part["file"]), fetched]


def copy_file(path: str, file: Writable) -> Message:
    """Writes what a local file holds."""
    with open(path, "rb") as source:
        while chunk := source.read(_COPY_CHUNK):
            file.write(chunk)
    return {}


def _write_local(path: str, produce: Produce) -> Message:
    writing = f"{path}.writing"
    try:
        with open(writing, "wb") as file:
            facts = produce(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(writing, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(writing)
    return facts
