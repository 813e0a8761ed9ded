"""Reads, writes, creates, lists and removes files of a store: a local path or a URL."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import IO, Any

from rankzero.store.location import filesystem_of, is_url
from rankzero.store.waiting import brief

PRIVATE_DIRECTORY = 0o700


def _current(location: str) -> tuple[Any, str]:
    """Returns the file system of a URL and the path in it, without cached listings, which may be old."""
    filesystem, path = filesystem_of(location)
    filesystem.invalidate_cache()
    return filesystem, path


def make_directory(location: str) -> None:
    """Creates a directory, private to this user, with its parents; a no-op on an object store."""
    if is_url(location):
        return
    parent = os.path.dirname(location.rstrip(os.sep))
    if parent and not os.path.isdir(parent):
        # Not os.makedirs, which creates parents by the umask: other users could replace files in them.
        make_directory(parent)
    try:
        os.mkdir(location, PRIVATE_DIRECTORY)
    except FileExistsError:
        if not os.path.isdir(location):
            raise


@brief
def exists(location: str) -> bool:
    """Returns True if the file or directory exists."""
    if is_url(location):
        filesystem, path = _current(location)
        return bool(filesystem.exists(path))
    return os.path.exists(location)


@brief
def size(location: str) -> int:
    """Returns the size of a file in bytes."""
    if is_url(location):
        filesystem, path = _current(location)
        return int(filesystem.size(path))
    return os.path.getsize(location)


@brief
def modified(location: str) -> float:
    """Returns the Unix time at which a file was written. Raises FileNotFoundError, or OSError if it is unknown."""
    if not is_url(location):
        return os.stat(location).st_mtime
    filesystem, path = _current(location)
    try:
        return float(filesystem.modified(path).timestamp())
    except NotImplementedError:
        raise OSError(f"the store does not tell when {location} was written") from None


def fingerprint(file: str | int | os.stat_result) -> str:
    """Returns inode, size and change times of a local file, which differ once the file is changed.

    The last of these times (ctime) changes when the file is written, renamed or linked, and only the kernel sets it.
    """
    found = file if isinstance(file, os.stat_result) else os.stat(file)
    return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}-{found.st_ctime_ns}"


@brief
def list_names(location: str) -> list[str]:
    """Returns the sorted base names in a directory; empty if the directory does not exist."""
    if is_url(location):
        filesystem, path = _current(location)
        with contextlib.suppress(FileNotFoundError):
            return sorted(p.rstrip("/").rsplit("/", 1)[-1] for p in filesystem.ls(path, detail=False))
        return []
    with contextlib.suppress(FileNotFoundError):
        return sorted(os.listdir(location))
    return []


def list_files(location: str) -> list[str]:
    """Returns the paths of all files below a directory, relative to it; links are not followed, and count as files."""
    if is_url(location):
        filesystem, path = _current(location)
        with contextlib.suppress(FileNotFoundError):
            return sorted(found[len(path.rstrip("/")) + 1 :] for found in filesystem.find(path))
        return []
    found = []
    for place, below, names in os.walk(location):
        links = [name for name in below if os.path.islink(os.path.join(place, name))]
        found += [os.path.relpath(os.path.join(place, name), location) for name in names + links]
    return sorted(found)


@brief
def sizes(location: str) -> dict[str, int]:
    """Returns the bytes of each file in a directory, by base name; one request for 1,000 files of an object store."""
    if not is_url(location):
        with contextlib.suppress(FileNotFoundError):
            return {entry.name: entry.stat().st_size for entry in os.scandir(location) if entry.is_file()}
        return {}
    filesystem, path = _current(location)
    with contextlib.suppress(FileNotFoundError):
        files = [entry for entry in filesystem.ls(path, detail=True) if entry["type"] == "file"]
        return {entry["name"].rsplit("/", 1)[-1]: int(entry["size"]) for entry in files}
    return {}


@brief
def read_bytes(location: str) -> bytes:
    """Returns the bytes of a whole file, by one request to an object store. Raises FileNotFoundError."""
    if is_url(location):
        try:
            # As a range: for a whole object, some drivers request its size first.
            return read_from(location, 0)
        except FileNotFoundError:
            raise
        except Exception:
            # An empty object has no range.
            filesystem, path = filesystem_of(location)
            return bytes(filesystem.cat_file(path))
    with open(location, "rb") as file:
        return file.read()


@brief
def read_from(location: str, start: int) -> bytes:
    """Returns the bytes of a file on a URL from ``start`` on, by one request. Raises FileNotFoundError."""
    filesystem, path = filesystem_of(location)
    return bytes(filesystem.cat_file(path, start=start))


def open_read(location: str) -> IO[bytes]:
    """Opens a binary file for reading. Raises FileNotFoundError."""
    if is_url(location):
        filesystem, path = _current(location)
        return filesystem.open(path, "rb")  # type: ignore[no-any-return]
    return open(location, "rb")


def write_bytes(location: str, data: bytes, *, durable: bool = False) -> None:
    """Replaces the file by ``data``, atomically; if ``durable``, so that it survives a power failure."""
    write_parts(location, [data], durable=durable)


def write_parts(location: str, parts: Sequence[bytes | memoryview], *, durable: bool = False) -> None:
    """Replaces the file by the concatenated parts, atomically; see `write_bytes`."""
    if is_url(location):
        filesystem, path = filesystem_of(location)
        filesystem.pipe_file(path, b"".join(parts))
        return
    with atomic_file(location) as file:
        file.writelines(parts)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        sync_directory(os.path.dirname(location))


def sync_directory(path: str) -> None:
    """Makes the names in a local directory durable; a no-op for a URL."""
    if is_url(path):
        return
    # Some file systems cannot.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@brief
def create(location: str, data: bytes, *, beside: str | None = None, durable: bool = False) -> bool:
    """Writes a file that does not exist yet; returns False, without a change, if it does. Of two callers one wins.

    Args:
        location: Path or URL. On an object store this is a conditional write, which `prove` has tested there.
        data: Bytes that no other caller writes: after a lost response they show whether this call has won.
        beside: On a disk, a path whose directory must exist, or FileNotFoundError is raised.
        durable: The file survives a power failure.
    """
    if is_url(location):
        return _create_object(location, data)
    # The file appears with its content: readers would wait for a process that was killed before it wrote an empty one.
    temporary = temporary_beside(beside or location)
    try:
        _write_new(temporary, data, durable=durable)
        os.link(temporary, location)
    except FileExistsError:
        # A file server may have executed the request twice, because its first response was lost.
        return os.stat(temporary).st_nlink > 1
    except OSError:
        if not os.path.isdir(os.path.dirname(temporary)):
            raise
        # A file system without links, or a full disk, which raises again.
        try:
            _write_new(location, data, durable=durable)
        except FileExistsError:
            return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    if durable:
        sync_directory(os.path.dirname(location))
    return True


def _write_new(path: str, data: bytes, *, durable: bool = False) -> None:
    """Writes a local file that does not exist yet; removes it if that fails. Raises FileExistsError."""
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(handle)
    except BaseException:
        # A full disk, an interrupt: the empty file would count as the claim of a caller that died.
        os.unlink(path)
        raise


def temporary_beside(path: str) -> str:
    """Returns an unused name beside a local file, which `remove_unfinished` recognizes."""
    return os.path.join(os.path.dirname(path), f".writing-{secrets.token_hex(8)}")


def _create_object(location: str, data: bytes) -> bool:
    filesystem, path = filesystem_of(location)
    try:
        filesystem.pipe_file(path, data, mode="create")
    except Exception:
        # Each driver has its own exception for an existing file, and a request that it repeated may find its own file.
        try:
            found = read_bytes(location)
        except FileNotFoundError:
            pass
        else:
            return found == data
        raise
    return True


@contextlib.contextmanager
def atomic_file(path: str) -> Iterator[IO[bytes]]:
    """Opens a temporary file beside local ``path`` for writing, which replaces it if the block raises nothing."""
    temporary = temporary_beside(path)
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with open(handle, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def upload(local_path: str, location: str, *, durable: bool = False) -> None:
    """Copies a local file to ``location``, atomically and durably; moves it if both are on one file system.

    A file that is moved is synced if ``durable``; its writer may have done so.
    """
    if is_url(location):
        filesystem, path = filesystem_of(location)
        filesystem.put_file(local_path, path)
        return
    if durable:
        with open(local_path, "rb") as file:
            os.fsync(file.fileno())
    try:
        os.replace(local_path, location)
    except OSError:
        import shutil

        with open(local_path, "rb") as source, atomic_file(location) as file:
            shutil.copyfileobj(source, file)
            file.flush()
            os.fsync(file.fileno())
    sync_directory(os.path.dirname(location))


def copy_within(source: str, target: str) -> bool:
    """Copies a file inside its store without reading it: by a hard link, or by the store's own copy.

    Args:
        source: Location of the file.
        target: Location of the copy, which appears atomically. A local one must not exist yet.

    Returns:
        False, without a change, if the two are in different stores or the store cannot copy.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    if is_url(source) != is_url(target):
        return False
    if not is_url(source):
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:
            # Another file system, or one without links.
            return False
        return True
    filesystem, path = filesystem_of(source)
    other, target_path = filesystem_of(target)
    if filesystem != other:
        return False
    try:
        filesystem.cp_file(path, target_path)
    except Exception:
        # The driver has no copy, or it is not permitted; reading and writing may be.
        if filesystem.exists(path):
            return False
        raise
    return True


def remove(location: str) -> None:
    """Deletes a file or a directory tree; no error when it does not exist."""
    if is_url(location):
        filesystem, path = filesystem_of(location)
        with contextlib.suppress(FileNotFoundError):
            filesystem.rm(path, recursive=True)
        return
    if os.path.isdir(location):
        import shutil

        shutil.rmtree(location, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(location)
