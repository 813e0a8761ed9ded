"""An object store as a rank reaches it by itself: through pyarrow's file systems, or fsspec's, whichever it has.

An executor may have neither, or no right to the store: then what it needs passes through the driver. Credentials are
those of the rank's environment: `Launcher`'s ``env``, the executor's own variables, a role of its machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Protocol

from rankzero.store.location import join

_COPY_CHUNK = 8 << 20

_FLUSH_EVERY = 128 << 20
"""Bytes after which a writer waits for those on their way: pyarrow copies what a slow store has to take, unbounded."""

_REQUEST_TIMEOUT = 60.0
"""Seconds without a byte after which a request to S3 has failed, as with boto3; pyarrow's 3 are too few."""

_CONNECT_TIMEOUT = 5.0

_REFUSALS = ("ACCESS_DENIED", "AccessDenied", "Forbidden", "HTTP status 403", "HTTP status 411", "HTTP status 501")
"""No right, or a server that does not know this kind of request."""

_CHECKSUMS = "AWS_REQUEST_CHECKSUM_CALCULATION"


class Client(Protocol):
    """A way to one store."""

    def open_read(self, url: str) -> IO[bytes]:
        """An open file that can be read from any place. Raises FileNotFoundError, or the client's own errors."""

    def open_write(self, url: str) -> IO[bytes]:
        """A file whose bytes are sent while it is written, several pieces at once; closing it makes it appear."""

    def remove(self, url: str) -> None:
        """Deletes a file. Raises FileNotFoundError, or the client's own errors."""


@dataclass(frozen=True)
class ArrowClient:
    """The store through pyarrow."""

    filesystem: Any
    url: str
    path: str

    @staticmethod
    def of(url: str) -> ArrowClient:
        """A client for what lies below a URL. Raises ImportError, or pyarrow's errors: it does not know the scheme."""
        from pyarrow import fs

        scheme, _, path = url.partition("://")
        if scheme not in ("s3", "s3a"):
            filesystem, path = fs.FileSystem.from_uri(url)
            return ArrowClient(filesystem, url, path)
        options: dict[str, Any] = {"request_timeout": _REQUEST_TIMEOUT, "connect_timeout": _CONNECT_TIMEOUT}
        if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
            # Not every version reads it from there.
            protocol, _, host = endpoint.rstrip("/").rpartition("://")
            options |= {"endpoint_override": host, "scheme": protocol or "https"}
            options["region"] = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        else:
            options["region"] = fs.resolve_s3_region(path.partition("/")[0])
        with _without_trailing_checksums():
            return ArrowClient(fs.S3FileSystem(**options), url, path)

    def _path(self, url: str) -> str:
        return self.path + url.removeprefix(self.url)

    def open_read(self, url: str) -> IO[bytes]:
        """As `Client.open_read`."""
        return self.filesystem.open_input_file(self._path(url))  # type: ignore[no-any-return]

    def open_write(self, url: str) -> IO[bytes]:
        """As `Client.open_write`."""
        return self.filesystem.open_output_stream(self._path(url))  # type: ignore[no-any-return]

    def remove(self, url: str) -> None:
        """As `Client.remove`."""
        self.filesystem.delete_file(self._path(url))


@dataclass(frozen=True)
class FsspecClient:
    """The store through fsspec."""

    filesystem: Any

    @staticmethod
    def of(url: str) -> FsspecClient:
        """A client for the store of a URL. Raises ImportError, or ValueError for a scheme that fsspec does not know."""
        import fsspec

        return FsspecClient(fsspec.core.url_to_fs(url)[0])

    def open_read(self, url: str) -> IO[bytes]:
        """As `Client.open_read`."""
        self.filesystem.invalidate_cache()
        return self.filesystem.open(url, "rb")  # type: ignore[no-any-return]

    def open_write(self, url: str) -> IO[bytes]:
        """As `Client.open_write`."""
        return self.filesystem.open(url, "wb")  # type: ignore[no-any-return]

    def remove(self, url: str) -> None:
        """As `Client.remove`."""
        self.filesystem.rm_file(url)


@contextlib.contextmanager
def _without_trailing_checksums() -> Iterator[None]:
    """Whoever sets up AWS's client in the block gets one that any server understands, unless the user has decided it.

    Else it sends uploads in chunks with a checksum behind them and no length before them, which many a server that
    speaks S3 refuses (Ceph 16: 411). What is written has a digest of ours.
    """
    if _CHECKSUMS in os.environ:
        yield
        return
    os.environ[_CHECKSUMS] = "when_required"
    try:
        yield
    finally:
        os.environ.pop(_CHECKSUMS, None)


def clients(url: str) -> Iterator[Client]:
    """The ways that this process has to the store of a URL, the faster first."""
    for of in (ArrowClient.of, FsspecClient.of):
        with contextlib.suppress(Exception):
            yield of(url)


def reach(directory: str, token: str) -> Client | None:
    """A client that reads the run's token in its directory, as the driver wrote it; None if no client can."""
    for client in clients(directory):
        with contextlib.suppress(Exception), client.open_read(join(directory, "token")) as file:
            if file.read().decode() == token:
                return client
    return None


def is_refusal(error: BaseException) -> bool:
    """True for the error of a store that will not take it later either: this process has no right to it, or no way."""
    return isinstance(error, PermissionError) or any(sign in str(error) for sign in _REFUSALS)


class Upload:
    """A file of a store that is being written: `write` it, then leave its block without an error, and it is there."""

    def __init__(self, client: Client, url: str) -> None:
        self._file = client.open_write(url)
        self._unflushed = 0

    def write(self, data: Any) -> int:
        """Takes bytes, or anything that has the buffer of some."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._unflushed += len(view)
        if self._unflushed >= _FLUSH_EVERY:
            self._unflushed = 0
            self._file.flush()
        return len(view)

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._file.close()
            return
        # It may appear under its name, and is no part of anything: nobody was told of it.
        with contextlib.suppress(Exception):
            getattr(self._file, "discard", self._file.close)()


def download(client: Client, url: str, path: str) -> str:
    """Copies a file of the store to a local path, once for all processes of this host that ask for it.

    Returns:
        The path.

    Raises:
        FileNotFoundError: there is no such file.
        Exception: whatever the client raises.
    """
    with open(f"{path}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            with client.open_read(url) as remote, open(f"{path}.fetching", "wb") as local:
                while chunk := remote.read(_COPY_CHUNK):
                    local.write(chunk)
            os.replace(f"{path}.fetching", path)
    return path
