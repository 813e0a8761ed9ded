"""Packs the code that the user chose to ship: a working directory and Python files, without excluded files."""

from __future__ import annotations

import functools
import gzip
import io
import os
import tarfile
from collections.abc import Iterable, Sequence

from rankzero.errors import InvalidJobError
from rankzero.submit.code_files import IGNORE_FILE, check_size, matcher, walk, warn_of

ARCHIVE = "code.tar.gz"
WORKING_DIR, PY_FILES = "working_dir", "py_files"
"""Names of the folders in the archive."""

_SUFFIXES = (".py", ".zip", ".egg", ".whl")


class UserCode:
    """The user's ``working_dir``, ``py_files`` and ``excludes`` of a `Launcher`."""

    def __init__(
        self,
        working_dir: str | os.PathLike[str] | None = None,
        py_files: Iterable[str | os.PathLike[str]] = (),
        excludes: Sequence[str] = (),
    ) -> None:
        """Checks the paths, which may begin with ``~``.

        Args:
            working_dir: A directory of this machine; ranks start in a copy of it. None ships no directory.
            py_files: Files ``.py``, ``.zip``, ``.egg``, ``.whl`` and directories of packages.
            excludes: Patterns, as in a .gitignore, of files that are not shipped.

        Raises:
            InvalidJobError: a path does not exist, or is of another kind.
        """
        self._working_dir = None if working_dir is None else os.path.expanduser(os.fspath(working_dir))
        self._py_files = [os.path.expanduser(os.fspath(path)) for path in py_files]
        self._excludes = excludes
        if self._working_dir is not None and not os.path.isdir(self._working_dir):
            raise InvalidJobError(f"working_dir={self._working_dir!r} is no directory of this machine")
        for path in self._py_files:
            if not (os.path.isdir(path) or (os.path.isfile(path) and path.endswith(_SUFFIXES))):
                raise InvalidJobError(
                    f"py_files has {path!r}; give .py, .zip, .egg or .whl files and directories of packages that exist"
                )

    @functools.cached_property
    def files(self) -> dict[str, str]:
        """The files to ship: name in the archive to local path."""
        found, missed, paths = dict[str, str](), set[str](), dict[str, str]()
        folders = [(WORKING_DIR, self._working_dir)] if self._working_dir is not None else []
        for path in self._py_files:
            root = os.path.basename(os.path.abspath(path))
            if (other := paths.setdefault(root.removesuffix(".py"), path)) != path:
                raise InvalidJobError(f"py_files has {other} and {path}, and ranks get one {root!r}: rename one")
            if os.path.isdir(path):
                folders.append((f"{PY_FILES}/{root}", path))
            else:
                found[f"{PY_FILES}/{root}"] = path
        for prefix, folder in folders:
            ignore_file = os.path.join(folder, IGNORE_FILE) if prefix == WORKING_DIR else None
            every = walk(folder, matcher(self._excludes, ignore_file), missed, prefix)
            found |= {name: path for name, path in every if os.path.isfile(path)}
        warn_of(missed)
        return dict(sorted(found.items()))

    @functools.cached_property
    def archive(self) -> bytes | None:
        """A tar archive of the files, with equal bytes for equal contents; None if there is nothing to ship.

        Raises:
            InvalidJobError: the files are too large; the message names the largest.
        """
        if self._working_dir is None and not self._py_files:
            return None
        sizes = {name: os.path.getsize(path) for name, path in self.files.items()}
        check_size("working_dir and py_files", sizes, f"excludes= or {IGNORE_FILE}")
        buffer = io.BytesIO()
        with (
            gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            if self._working_dir is not None:
                archive.addfile(_entry(WORKING_DIR, 0o755, tarfile.DIRTYPE))
            for name, path in self.files.items():
                with open(path, "rb") as file:
                    data = file.read()
                entry = _entry(name, 0o755 if os.access(path, os.X_OK) else 0o644)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        return buffer.getvalue()


def _entry(name: str, mode: int, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    # Without times and owners, which are not part of the identity of a training.
    entry = tarfile.TarInfo(name)
    entry.mode, entry.type = mode, kind
    return entry
