"""Files of datasets through pyarrow, local or behind a URL."""

from __future__ import annotations

from typing import Any

from rankzero import store
from rankzero.store import remote

PARQUET_OPTIONS = {"coerce_int96_timestamp_unit": "us"}
"""Options of pyarrow for every Parquet file. Spark writes timestamps as INT96, which in nanoseconds, pyarrow's default,
wrap silently outside of the years 1677 to 2262."""


def filesystem_of(location: str) -> tuple[Any, str]:
    """A `pyarrow.fs.FileSystem`, which can be pickled, and the path of a location there.

    pyarrow's own where it has one for the scheme, else fsspec's.

    Raises:
        ImportError: there is no driver for the scheme.
        ValueError: nobody knows the scheme.
    """
    from pyarrow import fs

    if not store.is_url(location):
        return fs.LocalFileSystem(), location
    try:
        client = remote.ArrowClient.of(location)
    except Exception:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(location)
        return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), path
    return client.filesystem, client.path


def open_file(location: str) -> Any:
    """An open file that can be read from any place, as pyarrow has it."""
    filesystem, path = filesystem_of(location)
    return filesystem.open_input_file(path)


def tags_of(location: str) -> dict[str, str]:
    """What a store says of the content of a file, or of each file below a directory, by its name below the location.

    It changes whenever the file is written. Empty where the store says nothing of the kind, and for local paths.
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
