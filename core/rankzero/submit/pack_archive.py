"""Packs the code that the user chose to ship: a working directory and Python files, without excluded files."""

from __future__ import annotations

import filecmp
import functools
import gzip
import io
import logging
import os
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass

from rankzero.errors import InvalidJobError
from rankzero.submit.code_files import IGNORE_FILE, is_secret, largest, matcher, walk

logger = logging.getLogger(__name__)

LIMIT = 64 << 20
"""Most bytes of files that are shipped."""

ARCHIVE = "code.tar.gz"
WORKING_DIR, PY_FILES = "working_dir", "py_files"
"""Names of the folders in the archive."""

_ARCHIVES = (".zip", ".egg", ".whl")


@dataclass(frozen=True)
class UserCode:
    """The user's ``working_dir``, ``py_files`` and ``excludes`` of a `Launcher`.

    Attributes:
        working_dir: A directory of this machine; ranks start in a copy of it. None ships no directory.
        py_files: Files ``.py``, ``.zip``, ``.egg``, ``.whl`` and directories of packages.
        excludes: Patterns, as in a .gitignore, of files that are not shipped.

    Raises:
        InvalidJobError: a path does not exist, or is of another kind.
    """

    working_dir: str | None = None
    py_files: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        working_dir: str | os.PathLike[str] | None,
        py_files: Iterable[str | os.PathLike[str]],
        excludes: Iterable[str],
    ) -> UserCode:
        """Returns the code that the options of a launcher name, whose paths may begin with ``~``."""
        paths = tuple(os.path.expanduser(os.fspath(path)) for path in py_files)
        own = None if working_dir is None else os.path.expanduser(os.fspath(working_dir))
        return cls(own, paths, tuple(excludes))

    def __post_init__(self) -> None:
        if self.working_dir is not None and not os.path.isdir(self.working_dir):
            raise InvalidJobError(f"working_dir={self.working_dir!r} is no directory of this machine")
        for path in self.py_files:
            kind = os.path.splitext(path)[1]
            if not (os.path.isdir(path) or (os.path.isfile(path) and kind in (".py", *_ARCHIVES))):
                raise InvalidJobError(
                    f"py_files has {path!r}; give .py, .zip, .egg or .whl files and directories of packages that exist"
                )

    @functools.cached_property
    def files(self) -> dict[str, str]:
        """The files to ship: name in the archive to local path."""
        found: dict[str, str] = {}
        modules: dict[str, str] = {}
        if self.working_dir is not None:
            found |= self._below(self.working_dir, WORKING_DIR, os.path.join(self.working_dir, IGNORE_FILE))
        for path in self.py_files:
            root = os.path.basename(os.path.abspath(path))
            named = self._below(path, f"{PY_FILES}/{root}") if os.path.isdir(path) else {f"{PY_FILES}/{root}": path}
            module = root.removesuffix(".py")
            if os.path.isdir(other := modules.setdefault(module, path)) != os.path.isdir(path):
                raise InvalidJobError(
                    f"py_files has {other} and {path}, and ranks import one {module!r}: rename one of them"
                )
            for name in sorted(named.keys() & found.keys()):
                if not filecmp.cmp(named[name], found[name], shallow=False):
                    raise InvalidJobError(
                        f"py_files has {found[name]} and {named[name]}, and ranks get one "
                        f"{name.partition('/')[2]!r}: rename one of them, or leave them out by excludes="
                    )
            found |= named
        return dict(sorted(found.items()))

    def _below(self, folder: str, prefix: str, ignore_file: str | None = None) -> dict[str, str]:
        left_out: set[str] = set()
        every = walk(folder, matcher(self.excludes, ignore_file), left_out)
        found = {f"{prefix}/{name}": path for name, path in every if os.path.isfile(path)}
        paths = [os.path.join(folder, name) for name in sorted(left_out)]
        if linked := ", ".join(path for path in paths if path[-1] != os.sep and os.path.isdir(path)):
            logger.warning("%s: a link to a directory, whose files do not travel (py_files= takes one)", linked)
        if private := ", ".join(path for path in paths if is_secret(os.path.basename(path.rstrip(os.sep)))):
            logger.warning("%s may hold secrets, and does not travel with the job", private)
        return found

    @functools.cached_property
    def archive(self) -> bytes | None:
        """A tar archive of the files, with equal bytes for equal contents; None if there is nothing to ship.

        Raises:
            InvalidJobError: the files are too large; the message names the largest.
        """
        if self.working_dir is None and not self.py_files:
            return None
        sizes = {name: os.path.getsize(path) for name, path in self.files.items()}
        total = sum(sizes.values())
        if total > LIMIT:
            shown = {name.partition("/")[2]: size for name, size in sizes.items()}
            raise InvalidJobError(
                f"working_dir and py_files hold {total >> 20} MiB, over the limit of {LIMIT >> 20} MiB that travel "
                f"with a job; the largest are {largest(shown)}: name what stays in excludes= or {IGNORE_FILE}"
            )
        logger.info("%s files of working_dir and py_files travel with the job, %.1f MiB", len(sizes), total / (1 << 20))
        buffer = io.BytesIO()
        with (
            gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            if self.working_dir is not None:
                archive.addfile(_entry(WORKING_DIR, 0o755, tarfile.DIRTYPE))
            for name, path in self.files.items():
                with open(path, "rb") as file:
                    data = file.read()
                entry = _entry(name, 0o755 if os.access(path, os.X_OK) else 0o644)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        return buffer.getvalue()

    @property
    def listing(self) -> str:
        """Readable text with a line for each file and its size."""
        return "".join(f"{os.path.getsize(path):>12}  {name}\n" for name, path in self.files.items())


def _entry(name: str, mode: int, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    # Without times and owners, which are not part of the identity of a training.
    entry = tarfile.TarInfo(name)
    entry.mode, entry.type = mode, kind
    return entry
