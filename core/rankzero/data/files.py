"""Files of datasets through pyarrow, local or behind a URL."""

from __future__ import annotations

from typing import Any

from rankzero import store
from rankzero.store import remote


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
