"""Direct access of ranks to an object store, through pyarrow's file systems.

An executor may lack pyarrow, or permission: then the driver reads and writes for it. Credentials come from the rank's
environment: `Launcher`'s ``env``, the executor's own variables, a role of its machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from rankzero import bounds
from rankzero.errors import ResultError
from rankzero.host import forks
from rankzero.store.location import join

S3_REQUEST_TIMEOUT = bounds.stretched(60.0)  # Without a byte of a request, as for boto3; pyarrow's 3 are too few
S3_CONNECT_TIMEOUT = bounds.stretched(5.0)  # To connect

_COPY_CHUNK = 8 << 20
_FLUSH_EVERY = 128 << 20  # After so much a writer waits for its uploads: pyarrow buffers without limit

_REFUSALS = ("ACCESS_DENIED", "AccessDenied", "Forbidden", "HTTP status 403", "HTTP status 411", "HTTP status 501")
"""Parts of the errors for a missing permission, or for a server without this kind of request."""

_abandoned: list[Any] = []  # Files whose upload must never be complete: they stay open until the process exits
_CHECKSUMS = "AWS_REQUEST_CHECKSUM_CALCULATION"


@dataclass(frozen=True)
class Client:
    """A client of one object store."""

    filesystem: Any
    url: str
    path: str

    @staticmethod
    def of(url: str) -> Client:
        """Creates a client for files below a URL.

        Raises:
            ImportError: pyarrow is not installed.
            RuntimeError: see `forks.check`.
            Exception: pyarrow's errors for an unknown scheme.
        """
        forks.check()
        from pyarrow import fs

        scheme, _, path = url.partition("://")
        if scheme not in ("s3", "s3a"):
            # Without the path, whose percent escapes pyarrow would decode: Spark's names of partitions contain them.
            path, mark, query = path.partition("?")
            bucket, slash, name = path.partition("/")
            filesystem, root = fs.FileSystem.from_uri(f"{scheme}://{bucket}/{mark}{query}")
            place = root.rstrip("/") + slash + name
            # Azure's URLs may name the account first, and its paths begin with the container.
            return Client(filesystem, url, place.lstrip("/") if filesystem.type_name == "abfs" else place)
        timeouts = {"request_timeout": S3_REQUEST_TIMEOUT(), "connect_timeout": S3_CONNECT_TIMEOUT()}
        options: dict[str, Any] = {**timeouts}
        if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
            # Some versions do not read the variables.
            protocol, _, host = endpoint.rstrip("/").rpartition("://")
            options |= {"endpoint_override": host, "scheme": protocol or "https"}
            options["region"] = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        else:
            options["region"] = fs.resolve_s3_region(path.partition("/")[0])
        with _without_trailing_checksums():
            return Client(fs.S3FileSystem(**options), url, path)

    def _path(self, url: str) -> str:
        return self.path + url.removeprefix(self.url)

    def open_read(self, url: str) -> IO[bytes]:
        """Opens a seekable file for reading. Raises FileNotFoundError, or pyarrow's own errors. So do the others."""
        return self.filesystem.open_input_file(self._path(url))  # type: ignore[no-any-return]

    def open_write(self, url: str) -> IO[bytes]:
        """Opens a file for writing, which is uploaded in parallel pieces; it exists once it is closed."""
        return self.filesystem.open_output_stream(self._path(url))  # type: ignore[no-any-return]

    def remove(self, url: str) -> None:
        """Deletes the file at a URL."""
        self.filesystem.delete_file(self._path(url))


@contextlib.contextmanager
def _without_trailing_checksums() -> Iterator[None]:
    """Configures AWS clients that are created in the block for servers without trailing checksums.

    By default, uploads are sent in chunks with a trailing checksum and without a length, which many servers with an S3
    API reject (Ceph 16: 411). rankzero's files have their own digests. A value that the user has set remains.
    """
    if _CHECKSUMS in os.environ:
        yield
        return
    os.environ[_CHECKSUMS] = "when_required"
    try:
        yield
    finally:
        os.environ.pop(_CHECKSUMS, None)


def find_client(url: str) -> Client | None:
    """Returns the client that this process has for the store of a URL; None without pyarrow, or for other schemes."""
    with contextlib.suppress(Exception):
        return Client.of(url)
    return None


def reach(directory: str, token: str) -> Client | None:
    """Returns a client that can read the file ``driver`` with this text in a directory; None if none can."""
    client = find_client(directory.rpartition("/")[0])
    with contextlib.suppress(Exception):
        if client:
            with client.open_read(join(directory, "driver")) as file:
                return client if file.read().decode() == token else None
    return None


def is_refusal(error: BaseException) -> bool:
    """Returns True for an error that will occur again: no permission, or a kind of request that the server lacks."""
    return isinstance(error, PermissionError) or any(sign in str(error) for sign in _REFUSALS)


class Upload:
    """An upload of one file to a store, used as a context manager: the file exists if the block raises nothing."""

    def __init__(self, client: Client, url: str) -> None:
        self._file = client.open_write(url)
        self._unflushed = 0

    def write(self, data: Any) -> int:
        """Uploads bytes, or an object with a buffer of bytes; returns their number."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._unflushed += len(view)
        if self._unflushed >= _FLUSH_EVERY:
            self._unflushed = 0
            self._file.flush()
        forks.pause(self._file.flush)
        return len(view)

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, _: object, error: BaseException | None, *more: object) -> None:
        if error is None:
            self._file.close()
            return
        # No manifest refers to a file that exists nevertheless.
        discard(self._file, error)


def discard(file: Any, error: BaseException) -> None:
    """Ends an upload after an error. The file may exist under its name, except after a ResultError.

    A directory that was removed, which is the reason of a ResultError, may be another run's, with a file of this name.
    """
    with contextlib.suppress(Exception):
        if isinstance(error, ResultError):
            # pyarrow completes an upload when its file is closed or garbage-collected.
            _abandoned.append(file)
            file.flush()
        else:
            file.close()


def download(client: Client, url: str, path: str) -> str:
    """Copies a file of the store to a local path, once for all processes of this host that need it; returns the path.

    Raises:
        FileNotFoundError: the file does not exist.
        Exception: any error of the client.
    """
    with open(f"{path}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            with client.open_read(url) as remote, open(f"{path}.fetching", "wb") as local:
                while chunk := remote.read(_COPY_CHUNK):
                    local.write(chunk)
            os.replace(f"{path}.fetching", path)
    return path
