"""Packs the user's modules into the zip that is shipped with a job, without files that may hold secrets.

======================================================  ===============================================
file                                                    shipped
======================================================  ===============================================
the source of a user module that the code imports       always, with the modules that this one imports
another file in the package of such a module            unless it is named like a key or a password
a file in no folder with an ``__init__.py``             only if it is a source
a file that ``.rankzeroignore`` of its package names    never
a hidden file or folder, ``__pycache__``                never
an installed module, rankzero, torch, pyspark           never: the executors have them
======================================================  ===============================================

`rankzero.submit.modules` decides what a user module is.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rankzero.errors import InvalidJobError
from rankzero.store import fingerprint
from rankzero.submit.imports import imports_of_tree, modules_in_text, parse
from rankzero.submit.modules import spec_of

logger = logging.getLogger(__name__)

MODULES_LIMIT = 64 << 20
"""Most bytes of user modules that are shipped with a job."""

IGNORE_FILE = ".rankzeroignore"
"""File in a working directory or a package with patterns of files that are not shipped, in the format of .gitignore."""

_LARGEST = 3

_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "node_modules"})

_SECRETS = re.compile(
    r".*\.(pem|key|p12|pfx|jks|keystore|kdbx|ppk|keytab|env)|id_(rsa|dsa|ecdsa|ed25519).*|credentials.*"
    r"|.*credentials\.json|secrets?\..*|service[-_]account.*\.json|kube[-_]?config(\..*)?"
    r"|profiles\.ya?ml|.*\.tfstate(\..*)?",
    re.IGNORECASE,
)
"""Names of data files that may hold keys or passwords. Sources of any name are shipped, since they are imported."""


@dataclass(frozen=True)
class Shipped:
    """User modules that are shipped with a job.

    Attributes:
        data: A zip of their sources, and of the other files in their packages.
        listing: Readable text: a line for each file with its size, and for each that was left out.
    """

    data: bytes
    listing: str


class _File(NamedTuple):
    """A file that is shipped, as a key of caches: once it is changed, it has another fingerprint."""

    path: str
    size: int
    fingerprint: str


@functools.lru_cache(maxsize=4096)
def _modules_in_file(file: _File, package: str) -> frozenset[str] | None:
    with open(file.path, "rb") as source:
        return modules_in_text(source.read(), package)


@functools.lru_cache(maxsize=4096)
def _imports_of_file(file: _File, package: str) -> set[str]:
    """Returns the names that a source file imports. Raises OSError, which is not cached."""
    with open(file.path, "rb") as opened:
        source = opened.read()
    try:
        return imports_of_tree(parse(source), source, package)
    except (SyntaxError, ValueError):
        return set()


def zip_modules(names: Iterable[str], first: str | None = None) -> Shipped | None:
    """Packs the user modules among ``names``, and those that they import in turn; None if there are none.

    Args:
        names: Absolute names; those that are no user modules are ignored.
        first: A directory that is searched before `sys.path`, such as that of a script.

    Raises:
        InvalidJobError: the files are larger than `MODULES_LIMIT`.
    """
    files, left_out = _files_for(names, first)
    if not files:
        return None
    names_of_files = {name: os.path.basename(name) for name in left_out}
    if named := [name for name, file in names_of_files.items() if is_private(file) and not file.startswith(".")]:
        logger.warning("%s may hold secrets, and do not travel with the job", ", ".join(sorted(named)))
    sizes = {archive_name: file.size for archive_name, file in files.items()}
    _check_size(sizes)
    lines = [f"{sizes[name]:>12}  {name}" for name in sorted(files)]
    lines += [f"{'left out':>12}  {name}" for name in sorted(left_out)]
    return Shipped(_zip(tuple(sorted(files.items()))), "\n".join(lines) + "\n")


def digests_of_data_files(modules: Iterable[str], first: str | None = None) -> dict[str, str]:
    """Returns a checksum for each top-level package of ``modules`` that is shipped with other files than sources.

    Args:
        modules: Absolute names of user modules.
        first: As for `zip_modules`.

    Raises:
        InvalidJobError: the files are larger than `MODULES_LIMIT`.
    """
    digests: dict[str, str] = {}
    for root in sorted({name.partition(".")[0] for name in modules}):
        found = _files_of(root, spec) if (spec := spec_of(root, first)) else ()
        files = {name: file for name, file in found if not (name.endswith(".py") or is_private(os.path.basename(name)))}
        _check_size({name: file.size for name, file in files.items()})
        if files:
            contents = [(name, _digest_of_file(files[name])) for name in sorted(files)]
            digests[root] = hashlib.sha256(repr(contents).encode()).hexdigest()
    return digests


@functools.lru_cache(maxsize=4096)
def _digest_of_file(file: _File) -> str:
    with open(file.path, "rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _files_for(names: Iterable[str], first: str | None) -> tuple[dict[str, _File], list[str]]:
    """Returns the files of the user modules that ``names`` need, by name in the zip, and the names left out."""
    waiting = list(names)
    seen: set[str] = set()
    roots: dict[str, bool] = {}
    settled: set[str] = set()
    files: dict[str, _File] = {}
    left_out: list[str] = []

    def are_settled(modules: frozenset[str]) -> bool:
        """Returns True for modules that are never shipped or whose files are packed; False if one may be a package."""
        for module in modules - settled:
            root = module.partition(".")[0]
            if root not in roots and not spec_of(root, first):
                roots[root] = False
            if roots.get(root, True) and f"{module.replace('.', os.sep)}.py" not in files:
                return False
            settled.add(module)
        return True

    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        root = name.partition(".")[0]
        if root not in roots:
            roots[root] = spec_of(root, first) is not None
            if roots[root]:
                # Loaded submodules may have been imported by a computed name. The package comes first, as a whole.
                waiting += [name, *(loaded for loaded in list(sys.modules) if loaded.startswith(f"{root}.")), root]
                continue
        seen.add(name)
        if not roots[root] or _is_known(name, files) or not (spec := spec_of(name, first)):
            continue
        found = dict(_files_of(name, spec))
        if not found and spec.origin:
            left_out.append(name.replace(".", os.sep))
        private = {archive_name for archive_name in found if is_private(os.path.basename(archive_name))}
        left_out += private
        new = {archive_name: file for archive_name, file in found.items() if archive_name not in private}
        files |= new
        for archive_name, file in new.items():
            waiting += _imports_of(archive_name, file, are_settled)
    return files, left_out


def _imports_of(archive_name: str, file: _File, are_settled: Callable[[frozenset[str]], bool]) -> set[str]:
    """Returns the names that a file imports; empty if it is no source, was removed, or imports nothing unsettled.

    Most files of a package import what is installed or packed already: they are not parsed, which takes milliseconds
    for each.
    """
    if archive_name.endswith(".py"):
        with contextlib.suppress(OSError):
            package = os.path.dirname(archive_name).replace(os.sep, ".")
            modules = _modules_in_file(file, package)
            if modules is None or not are_settled(modules):
                return _imports_of_file(file, package)
    return set()


def _check_size(sizes: Mapping[str, int]) -> None:
    if (total := sum(sizes.values())) > MODULES_LIMIT:
        shipped = ", ".join(sorted({name.split(os.sep)[0].removesuffix(".py") for name in sizes}))
        raise InvalidJobError(
            f"the user modules {shipped} hold {total >> 20} MiB, over the limit of {MODULES_LIMIT >> 20} MiB that "
            f"travel with a job; the largest are {largest(sizes)}: name what stays in {IGNORE_FILE} in the package's "
            "folder, or install them where the ranks run"
        )


def largest(sizes: Mapping[str, int]) -> str:
    """Returns the names and sizes of the largest files, as text."""
    found = sorted(sizes, key=sizes.__getitem__, reverse=True)[:_LARGEST]
    return ", ".join(f"{name} ({sizes[name] >> 20} MiB)" for name in found)


def matcher(excludes: Sequence[str], ignore_file: str | None = None) -> Callable[[str], bool]:
    """Returns a function that is True for a relative path, with a slash after a directory's, that is not shipped."""
    lines: list[str] = []
    if ignore_file and os.path.isfile(ignore_file):
        with open(ignore_file, encoding="utf-8") as file:
            lines += file.read().splitlines()
    lines += excludes
    if not lines:
        return lambda path: False
    from pathspec import GitIgnoreSpec

    spec = GitIgnoreSpec.from_lines(lines)
    return lambda path: bool(spec.match_file(path))


@functools.lru_cache(maxsize=1)
def _zip(files: tuple[tuple[str, _File], ...]) -> bytes:
    """Returns a zip of files, each given by its name there.

    They are not compressed: that makes a third of the bytes, and takes six times as long here.
    The last zip is kept: the next training mostly needs the same.
    """
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", strict_timestamps=False) as archive:
        for archive_name, file in files:
            archive.write(file.path, archive_name)
    return buffer.getvalue()


def _is_known(name: str, files: Mapping[str, _File]) -> bool:
    """Returns True for a module whose file is known, and for a name in a module, such as a function."""
    place = name.replace(".", os.sep)
    is_module = f"{place}.py" in files or f"{place}{os.sep}__init__.py" in files
    return is_module or f"{os.path.dirname(place)}.py" in files


def is_skipped(directory: str) -> bool:
    """Returns True for a folder that is never shipped: hidden, or generated such as ``__pycache__``."""
    return directory.startswith(".") or directory in _SKIPPED_DIRECTORIES


def is_private(name: str) -> bool:
    """Returns True for a file that is never shipped: hidden, or named like a key or a password."""
    return name.startswith(".") or (not name.endswith(".py") and _SECRETS.fullmatch(name) is not None)


def _is_ignored(parents: Sequence[str], path: str) -> bool:
    """Returns True for a module's file that is named by the patterns of the top-level package above it."""
    if not parents:
        return False
    inner = os.path.join(*parents[1:], os.path.basename(path))
    top = os.path.normpath(os.path.join(os.path.dirname(path), *([os.pardir] * (len(parents) - 1))))
    return matcher((), os.path.join(top, IGNORE_FILE))(inner)


def _files_of(module: str, spec: Any) -> Iterator[tuple[str, _File]]:
    *parents, _ = parts = module.split(".")
    if not spec.submodule_search_locations:
        if spec.origin and (file := _file(spec.origin)) and not _is_ignored(parents, spec.origin):
            yield os.path.join(*parents, os.path.basename(spec.origin)), file
        return
    for base in spec.submodule_search_locations:
        # Patterns count from the folder of the top-level package.
        inner = os.path.join("", *parts[1:])
        top = os.path.normpath(os.path.join(base, *([os.pardir] * (len(parts) - 1))))
        ignored = matcher((), os.path.join(top, IGNORE_FILE))
        # A folder without __init__.py may be no package, and only have the name: ship its sources alone.
        packages: set[str] = set()
        for directory, children, names in os.walk(base):
            # Not by os.path.relpath, which took half of the time.
            beneath = directory[len(base) :].strip(os.sep)
            below = os.path.normpath(os.path.join(inner, beneath))
            children[:] = [
                name for name in children if not (is_skipped(name) or ignored(f"{os.path.join(below, name)}/"))
            ]
            if spec.origin or "__init__.py" in names or os.path.dirname(directory) in packages:
                packages.add(directory)
            for name in names if directory in packages else [name for name in names if name.endswith(".py")]:
                path = os.path.join(directory, name)
                if (file := _file(path)) and not ignored(os.path.join(below, name)):
                    yield os.path.join(*parts, beneath, name), file


def _file(path: str) -> _File | None:
    """Returns a regular file with its size and fingerprint; None for all else."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG((found := os.stat(path)).st_mode):
            return _File(path, found.st_size, fingerprint(found))
    return None
