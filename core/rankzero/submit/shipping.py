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
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankzero import store
from rankzero.errors import InvalidJobError
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


@functools.lru_cache(maxsize=4096)
def _modules_in_file(path: str, _fingerprint: str, package: str) -> frozenset[str] | None:
    with open(path, "rb") as file:
        return modules_in_text(file.read(), package)


@functools.lru_cache(maxsize=4096)
def _imports_of_file(path: str, _fingerprint: str, package: str) -> set[str]:
    """Returns the names that a source file imports. Raises OSError, which is not cached."""
    with open(path, "rb") as file:
        source = file.read()
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
    sizes = {archive_name: os.path.getsize(path) for archive_name, path in files.items()}
    _check_size(sizes)
    lines = [f"{sizes[name]:>12}  {name}" for name in sorted(files)]
    lines += [f"{'left out':>12}  {name}" for name in sorted(left_out)]
    packed = tuple((name, path, store.fingerprint(path)) for name, path in sorted(files.items()))
    return Shipped(_zip(packed), "\n".join(lines) + "\n")


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
        files = {name: path for name, path in found if not (name.endswith(".py") or is_private(os.path.basename(name)))}
        _check_size({name: os.path.getsize(path) for name, path in files.items()})
        if files:
            contents = [(name, _digest_of_file(files[name], store.fingerprint(files[name]))) for name in sorted(files)]
            digests[root] = hashlib.sha256(repr(contents).encode()).hexdigest()
    return digests


@functools.lru_cache(maxsize=4096)
def _digest_of_file(path: str, _fingerprint: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files_for(names: Iterable[str], first: str | None) -> tuple[dict[str, str], list[str]]:
    """Returns the files of the user modules that ``names`` need: name in the zip to path, and the names left out."""
    waiting = list(names)
    seen: set[str] = set()
    roots: dict[str, bool] = {}
    files: dict[str, str] = {}
    left_out: list[str] = []

    def is_settled(module: str) -> bool:
        """Returns True for a module that is never shipped, and for one whose file is packed; False for a package."""
        root = module.partition(".")[0]
        if root not in roots and not spec_of(root, first):
            roots[root] = False
        return not roots.get(root, True) or f"{module.replace('.', os.sep)}.py" in files

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
        private = {archive_name for archive_name, path in found.items() if is_private(os.path.basename(path))}
        left_out += private
        new = {archive_name: path for archive_name, path in found.items() if archive_name not in private}
        files |= new
        for archive_name, path in new.items():
            waiting += _imports_of(archive_name, path, is_settled)
    return files, left_out


def _imports_of(archive_name: str, path: str, is_settled: Callable[[str], bool]) -> set[str]:
    """Returns the names that a file imports; empty if it is no source, was removed, or imports nothing unsettled.

    Most files of a package import what is installed or packed already: they are not parsed, which takes milliseconds
    for each.
    """
    if path.endswith(".py"):
        with contextlib.suppress(OSError):
            package = os.path.dirname(archive_name).replace(os.sep, ".")
            fingerprint = store.fingerprint(path)
            modules = _modules_in_file(path, fingerprint, package)
            if modules is None or not all(map(is_settled, modules)):
                return _imports_of_file(path, fingerprint, package)
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
def _zip(files: tuple[tuple[str, str, str], ...]) -> bytes:
    """Returns a zip of files, each given by its name there, its path and its fingerprint.

    The last one is kept: to pack 300 modules takes 0.1 s, and the next training mostly needs the same.
    """
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive:
        for archive_name, path, _ in files:
            archive.write(path, archive_name)
        origins = json.dumps(_origins_of(files)).encode()
        archive.comment = origins if len(origins) <= zipfile.ZIP_MAX_COMMENT else b"{}"
    return buffer.getvalue()


def _origins_of(files: tuple[tuple[str, str, str], ...]) -> dict[str, str]:
    """Returns the directory that each top-level module is in; none for one that is linked together of several."""
    found: dict[str, set[str]] = {}
    for archive_name, path, _ in files:
        origin = path.removesuffix(f"{os.sep}{archive_name}")
        found.setdefault(archive_name.split(os.sep)[0].partition(".")[0], set()).add("" if origin == path else origin)
    return {root: origin for root, (origin, *others) in found.items() if origin and not others}


def _is_known(name: str, files: Mapping[str, str]) -> bool:
    """Returns True for a module whose file is known, and for a name in a module, such as a function."""
    place = name.replace(".", os.sep)
    is_module = f"{place}.py" in files or os.path.join(place, "__init__.py") in files
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


def _files_of(module: str, spec: Any) -> Iterator[tuple[str, str]]:
    *parents, _ = parts = module.split(".")
    if not spec.submodule_search_locations:
        if spec.origin and os.path.isfile(spec.origin) and not _is_ignored(parents, spec.origin):
            yield os.path.join(*parents, os.path.basename(spec.origin)), spec.origin
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
                if os.path.isfile(path) and not ignored(os.path.join(below, name)):
                    yield os.path.join(*parts, beneath, name), path
