"""Opens files of datasets with pyarrow, by a local path or a URL, and tells whether they have changed."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from rankzero import store
from rankzero.store import remote

PARQUET_OPTIONS = {"coerce_int96_timestamp_unit": "us"}
"""pyarrow's options for every Parquet file. Spark writes timestamps as INT96. pyarrow reads them as nanoseconds by
default, which overflow silently outside of the years 1677 to 2262."""

_CHUNK = 8 << 20
_DIGITS = 64


def filesystem_of(location: str) -> tuple[Any, str]:
    """Returns a picklable `pyarrow.fs.FileSystem`, and the path of a location in it.

    The file system is pyarrow's if it has one for the scheme, else fsspec's.

    Raises:
        ImportError: the package for the scheme is not installed.
        ValueError: neither pyarrow nor fsspec has the scheme.
    """
    from pyarrow import fs

    if not store.is_url(location):
        return fs.LocalFileSystem(), location
    try:
        client = remote.Client.of(location)
    except Exception:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(location)
        return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), path
    return client.filesystem, client.path


def open_file(location: str) -> Any:
    """Returns an open pyarrow file with random access."""
    filesystem, path = filesystem_of(location)
    return filesystem.open_input_file(path)


def tags_of(location: str) -> dict[str, str]:
    """Returns the ETags of a file, or of each file below a directory, by the file's path relative to the location.

    An ETag changes whenever the file is written. The dict is empty for local paths, and for stores without ETags.
    """
    if not store.is_url(location):
        return {}
    try:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(location)
    except (ImportError, ValueError):
        return {}
    filesystem.invalidate_cache()
    found = filesystem.find(path, detail=True)
    tags = {name[len(path.rstrip("/")) :]: info.get("ETag") or info.get("etag") for name, info in found.items()}
    return {name: str(tag) for name, tag in tags.items() if tag}


def digest_of(location: str) -> str:
    """Returns the sha256 of a file, hex."""
    found = hashlib.sha256()
    with open_file(location) as file:
        while data := file.read(_CHUNK):
            found.update(data)
    return found.hexdigest()


def stamp_of(location: str) -> str:
    """Returns the size and the time of the last change of a file, without reading it."""
    filesystem, path = filesystem_of(location)
    info = filesystem.get_file_info(path)
    return f"{info.size}-{info.mtime_ns}"


def is_changed(location: str, stamp: str, content: str) -> bool:
    """Returns True if a file is not the one of that stamp and content; a copy of that file is no change.

    Args:
        location: Path or URL.
        stamp: The result of `stamp_of` for that file; empty if it never changes.
        content: Its ETag from `tags_of`, or else its `digest_of`.
    """
    return bool(stamp) and (now := stamp_of(location)) != stamp and not _has_content(location, now, content)


@functools.lru_cache(1 << 10)
def _has_content(location: str, stamp: str, content: str) -> bool:
    if len(content) == _DIGITS:
        return digest_of(location) == content
    # A host without a client for ETags cannot know.
    return tags_of(location).get("") in (None, content)
