"""Finds the files of the user's modules that are sent with a job, and which of them count.

======================================================  ===============================================
file                                                    sent
======================================================  ===============================================
the source of a user module that the code imports       always, with the modules that this one imports
another file in the package of such a module            unless it is named like a key or a password
a file in no folder with an ``__init__.py``             only if it is a source
a file that ``.rankzeroignore`` of its package names    never
a hidden file or folder, ``__pycache__``                never
an installed module, rankzero, torch, pyspark           never: the executors have them
======================================================  ===============================================

A source counts if the code imports it, in turn; the other files of its package count together. If a name is computed,
or a text names a module, the whole package counts.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rankzero.errors import InvalidJobError
from rankzero.store import fingerprint
from rankzero.submit.code_modules import package_of, parents_of, source_of, spec_of
from rankzero.submit.code_source import IMPORTERS, Source, source_of_file

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

_SEARCHED = re.compile("|".join(IMPORTERS).encode())
_ROOTS = re.compile(rb"(?:\bfrom|\bimport|,)[\s\\]+([A-Za-z_]\w*)")


class _File(NamedTuple):
    """A file that is shipped, as a key of caches: once it is changed, it has another fingerprint."""

    path: str
    size: int
    fingerprint: str


@dataclass
class Needs:
    """What code needs of the user's modules.

    Attributes:
        modules: Names that it imports; some may be no modules.
        texts: Texts that may name a module.
        words: Names and texts by which it may reach a module below a package that it refers to.
        packages: These packages.
        computes: True if it imports by a text that may be any.
        first: A directory that is searched before `sys.path`, such as that of a script.
    """

    modules: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    packages: set[str] = field(default_factory=set)
    computes: bool = False
    first: str | None = None

    def add(self, source: Source) -> None:
        """Adds what a source needs."""
        self.modules |= source.imports
        self.texts |= source.texts
        self.computes |= source.computes


class Files:
    """The files of the user's modules that code needs.

    Attributes:
        counted: Checksum of each module that counts, by its name.
    """

    def __init__(self, needs: Needs) -> None:
        """Finds the files."""
        self._first = needs.first
        self._sent: dict[str, _File] = {}
        self._left_out: set[str] = set()
        self._roots: dict[str, bool] = {}
        self.counted: dict[str, str] = {}
        self._whole: set[str] = set()
        self._count(needs.modules)
        self._count(self._named(needs.texts, needs.computes))
        every = self._modules()
        for package in needs.packages:
            below = [name for name in every if name.startswith(f"{package}.")]
            self._count({name for name in below if needs.words.issuperset(name[len(package) + 1 :].split("."))})
        self._follow()
        if needs.computes:
            self._count(self._modules())

    # -- what counts

    def _count(self, names: Iterable[str]) -> None:
        """Counts modules, and those that they import in turn."""
        waiting, seen = set(names), set(self.counted)
        while waiting:
            for part in parents_of(waiting.pop()):
                if part in seen:
                    continue
                seen.add(part)
                if not self._send(part.partition(".")[0]) or not (path := source_of(part, self._first)):
                    continue
                if not self._is_sent(part, path):
                    continue
                with contextlib.suppress(OSError):
                    found = source_of_file(path, package_of(part, path))
                    self.counted[part] = found.digest
                    waiting |= found.imports | self._named(found.texts, found.computes)
                    if found.computes:
                        waiting |= self._all_of(part.partition(".")[0])

    def _named(self, texts: Iterable[str], computes: bool) -> set[str]:
        """Returns all modules of the packages that texts name, as "acme.models.Net" does."""
        found: set[str] = set()
        for text in texts:
            root, _, rest = text.partition(".")
            if root not in self._whole and spec_of(root, self._first) and (computes or self._has(root, rest)):
                found |= self._all_of(root)
        return found

    def _has(self, root: str, rest: str) -> bool:
        """Returns True if the word behind the root of a text names something in the package: "train.py" does not."""
        word = rest.partition(".")[0]
        path = source_of(root, self._first)
        if source_of(f"{root}.{word}", self._first) or not path:
            return bool(word)
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return re.search(rf"\b{word}\b".encode(), file.read()) is not None
        return False

    def _all_of(self, root: str) -> set[str]:
        if root in self._whole or not self._send(root):
            return set()
        self._whole.add(root)
        return {root, *(name for name in self._modules() if name.startswith(f"{root}."))}

    def _modules(self) -> set[str]:
        """Returns the names of all modules that are sent."""
        places = (name[:-3].replace(os.sep, ".") for name in self._sent if name.endswith(".py"))
        return {place.removesuffix(".__init__") for place in places}

    def data_files(self) -> dict[str, str]:
        """Returns a checksum of the files other than sources, for each top-level package that counts and has some."""
        digests: dict[str, str] = {}
        for root in sorted({name.partition(".")[0] for name in self.counted}):
            names = sorted(name for name in self._sent if name.startswith(root + os.sep) and not name.endswith(".py"))
            if names:
                contents = [(name, _digest_of_file(self._sent[name])) for name in names]
                digests[root] = hashlib.sha256(repr(contents).encode(errors="surrogateescape")).hexdigest()
        return digests

    # -- what is sent

    def send(self, names: Iterable[str]) -> None:
        """Sends modules that do not count, with those that they import in turn."""
        for name in names:
            self._send(name.partition(".")[0])
        self._follow()

    def _send(self, root: str) -> bool:
        """Sends a top-level module or package as a whole; returns False for one that is not the user's."""
        if root not in self._roots:
            spec = spec_of(root, self._first)
            self._roots[root] = spec is not None
            for base in spec.submodule_search_locations or () if spec else ():
                self._send_folder(root, base, is_package=spec.origin is not None)
            if spec and not spec.submodule_search_locations and spec.origin and (file := _file(spec.origin)):
                self._sent[os.path.basename(spec.origin)] = file
        return self._roots[root]

    def _send_folder(self, prefix: str, base: str, *, is_package: bool) -> None:
        for name, path in walk(base, matcher((), os.path.join(base, IGNORE_FILE)), self._left_out, prefix, is_package):
            if file := _file(path):
                self._sent[name] = file

    def _is_sent(self, name: str, path: str) -> bool:
        """Returns False for a module that a pattern leaves out. Sends one that an editable install has elsewhere."""
        place, root = name.replace(".", os.sep), spec_of(name.partition(".")[0], self._first)
        if not any(
            path.startswith(base + os.sep) for base in root.submodule_search_locations or [os.path.dirname(path)]
        ):
            if os.path.basename(path) == "__init__.py":
                self._send_folder(place, os.path.dirname(path), is_package=True)
            elif file := _file(path):
                self._sent[f"{place}.py"] = file
        return f"{place}.py" in self._sent or os.path.join(place, "__init__.py") in self._sent

    def _follow(self) -> None:
        """Sends what files import that are sent and do not count: a computed name may reach them."""
        seen: set[str] = set()
        while waiting := [name for name in self._sent if name.endswith(".py") and name not in seen]:
            for name in waiting:
                seen.add(name)
                with contextlib.suppress(OSError):
                    self._follow_file(self._sent[name], os.path.dirname(name).replace(os.sep, "."))

    def _follow_file(self, file: _File, package: str) -> None:
        roots = _roots_of_file(file)
        if roots is not None and all(root in self._roots or not spec_of(root, self._first) for root in roots):
            # Most files import what is installed or sent already. They are not read by their tokens, which takes
            # milliseconds for each.
            return
        found = source_of_file(file.path, package)
        for name in found.imports | (found.texts if found.computes else set()):
            self._send(name.partition(".")[0])

    def zipped(self) -> Shipped | None:
        """Returns the zip of the files; None if there are none.

        Raises:
            InvalidJobError: the files are larger than `MODULES_LIMIT`.
        """
        if not self._sent:
            return None
        names = {name: os.path.basename(name) for name in self._left_out}
        if named := [name for name, file in names.items() if is_private(file) and not file.startswith(".")]:
            logger.warning("%s may hold secrets, and do not travel with the job", ", ".join(sorted(named)))
        sizes = {name: file.size for name, file in self._sent.items()}
        if (total := sum(sizes.values())) > MODULES_LIMIT:
            shipped = ", ".join(sorted({name.split(os.sep)[0].removesuffix(".py") for name in sizes}))
            raise InvalidJobError(
                f"the user modules {shipped} hold {total >> 20} MiB, over the limit of {MODULES_LIMIT >> 20} MiB that "
                f"travel with a job; the largest are {largest(sizes)}: name what stays in {IGNORE_FILE} in the "
                "package's folder, or install them where the ranks run"
            )
        lines = [f"{sizes[name]:>12}  {name}" for name in sorted(sizes)]
        lines += [f"{'left out':>12}  {name}" for name in sorted(self._left_out)]
        return Shipped(_zip(tuple(sorted(self._sent.items()))), "\n".join(lines) + "\n")


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
def _roots_of_file(file: _File) -> frozenset[str] | None:
    """Returns the first words of all names that a source may import; None if it may import by a text."""
    with open(file.path, "rb") as opened:
        source = opened.read()
    return None if _SEARCHED.search(source) else frozenset(root.decode() for root in _ROOTS.findall(source))


@functools.lru_cache(maxsize=4096)
def _digest_of_file(file: _File) -> str:
    with open(file.path, "rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


@functools.lru_cache(maxsize=1)
def _zip(files: tuple[tuple[str, _File], ...]) -> bytes:
    """Returns a zip of files, each given by its name there.

    They are not compressed: that makes a third of the bytes, and takes six times as long here.
    The last zip is kept: the next training mostly needs the same.
    """
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", strict_timestamps=False) as archive:
        for name, file in files:
            archive.write(file.path, name)
    return buffer.getvalue()


def _file(path: str) -> _File | None:
    """Returns a regular file with its size and fingerprint; None for all else."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG((found := os.stat(path)).st_mode):
            return _File(path, found.st_size, fingerprint(found))
    return None


# -- folders -----------------------------------------------------------------------------------


def walk(
    base: str, ignored: Callable[[str], bool], left_out: set[str], prefix: str = "", is_package: bool = True
) -> Iterator[tuple[str, str]]:
    """Yields the files of a folder that may be sent, in order: their names below ``prefix``, and their paths.

    Args:
        base: The folder.
        ignored: True for a path, relative to the folder, that is not sent: `matcher`.
        left_out: Receives the names of files and folders that a pattern or their own name keeps here, and of links to
            folders, which may lead to large datasets, or back here.
        prefix: First part of all names.
        is_package: False for a folder of which only packages have other files than sources.
    """
    packages: set[str] = set()
    for directory, children, names in os.walk(base):
        # Not by os.path.relpath, which took half of the time.
        below = directory[len(base) :].strip(os.sep)
        if is_package or "__init__.py" in names or os.path.dirname(directory) in packages:
            packages.add(directory)
        found = sorted(name for name in children if not (name.startswith(".") or name in _SKIPPED_DIRECTORIES))
        children[:] = [name for name in found if not ignored(os.path.join(below, name, ""))]
        links = (name for name in children if os.path.islink(os.path.join(directory, name)))
        out = [*links, *(os.path.join(name, "") for name in found if name not in children)]
        for name in sorted(names if directory in packages else (name for name in names if name.endswith(".py"))):
            if is_private(name) or ignored(os.path.join(below, name)):
                out.append(name)
            else:
                yield os.path.join(prefix, below, name), os.path.join(directory, name)
        left_out |= {os.path.join(prefix, below, name) for name in out}


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


def is_private(name: str) -> bool:
    """Returns True for a file that is never shipped: hidden, or named like a key or a password."""
    return name.startswith(".") or (not name.endswith(".py") and _SECRETS.fullmatch(name) is not None)
