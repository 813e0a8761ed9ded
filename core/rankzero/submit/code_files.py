"""Finds the files of the user's modules that are sent with a job, and which of them count.

The whole top-level package or module that the code imports is sent, and those that its files import in turn. Never sent
are files that ``.rankzeroignore`` of the package names, hidden ones, those named like a key or a password, data files
in folders that are no package, and installed modules, which the executors have.

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
import pkgutil
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any, NamedTuple

from rankzero.errors import InvalidJobError
from rankzero.store import fingerprint
from rankzero.submit.code_modules import NEVER_SHIPPED, package_of, parents_of, spec_of, top_level_names
from rankzero.submit.code_source import Source, source_of_file

logger = logging.getLogger(__name__)

LIMIT = 64 << 20
"""Most bytes of user modules, and of a working directory, that are shipped with a job."""

IGNORE_FILE = ".rankzeroignore"
"""File in a working directory or a package with patterns of files that are not shipped, in the format of .gitignore."""

_LARGEST = 3

_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "node_modules"})

_SECRETS = re.compile(
    r".*\.(pem|key|p12|pfx|jks|keystore|kdbx|ppk|keytab|env)|id_(rsa|dsa|ecdsa|ed25519).*|credentials.*"
    r"|.*credentials\.json|secrets?(\..*)?|service[-_]account.*\.json|kube[-_]?config(\..*)?"
    r"|profiles\.ya?ml|.*\.tfstate(\..*)?|airflow\.(cfg|db)|simple_auth_manager_passwords\..*|dagster(_cloud)?\.yaml",
    re.IGNORECASE,
)
"""Names of data files, or folders of them, that may hold keys or passwords. Sources are shipped: they are imported."""


class _File(NamedTuple):
    """A file that is shipped, as a key of caches: once it is changed, it has another fingerprint."""

    path: str
    size: int
    fingerprint: str


@dataclass
class Needs:
    """The names by which code reaches the user's modules.

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
        """Finds the files of the modules that code needs, and of those that they import in turn."""
        self._first = needs.first
        self._roots: dict[str, bool] = {}
        self._sent: dict[str, _File] = {}
        self._missed: set[str] = set()
        self._seen: set[str] = set()
        self.counted: dict[str, str] = {}
        self._follow(needs.modules | self._named_by(needs), counts=True)
        for package in needs.packages:
            below = self._modules_below(package)
            reached = {name for name in below if needs.words.issuperset(name[len(package) + 1 :].split("."))}
            self._follow(reached, counts=True)
        while needs.computes and (others := self._modules_below("") - self._seen):
            self._follow(others, counts=True)

    def send(self, names: Iterable[str]) -> None:
        """Sends modules, and those that they import in turn, which do not count unless the code needs them."""
        self._follow({*names}, counts=False)

    def _follow(self, waiting: set[str], *, counts: bool) -> None:
        while waiting:
            # Importing a.b.c imports a and a.b first.
            for part in set(parents_of(waiting.pop())) - self._seen:
                self._seen.add(part)
                name = part.removesuffix(".*")
                if self._send(root := name.partition(".")[0]) and (file := self._file_of(name)):
                    with contextlib.suppress(OSError):
                        found = source_of_file(file.path, package_of(name, file.path))
                        waiting |= found.imports | self._named_by(found)
                        waiting |= self._modules_below(root) if found.computes else set()
                        if name != part:
                            waiting |= {f"{name}.{word}" for word in found.words} & self._modules_below(name)
                        self.counted |= {name: found.digest} if counts else {}

    def _named_by(self, found: Needs | Source) -> set[str]:
        """Returns all modules of the packages that texts name, as "acme.models.Net" does, and "train.csv" does not."""
        words: dict[str, set[str]] = {}
        for text in found.texts:
            root, dot, rest = text.partition(".")
            if root not in NEVER_SHIPPED:
                words.setdefault(root, set()).add(rest.partition(".")[0] or dot)
        names: set[str] = set()
        # There may be a million texts.
        for root in words.keys() & top_level_names(self._first) if words else ():
            spec = spec_of(root, self._first)
            # A text of one word may be the name of any folder, which imports nothing.
            is_module = spec and (spec.origin or words[root] != {""})
            if is_module and (found.computes or words[root] & _names_in(spec)):
                self._send(root)
                names |= {root, *self._modules_below(root)}
        return names

    def _modules_below(self, package: str) -> set[str]:
        """Returns the names of all modules below a package that are sent; of all that are sent if it is empty."""
        beginning = package.replace(".", os.sep) + os.sep if package else ""
        names = (name[:-3] for name in self._sent if name.endswith(".py") and name.startswith(beginning))
        return {name.removesuffix(os.sep + "__init__").replace(os.sep, ".") for name in names}

    def _file_of(self, name: str) -> _File | None:
        """Returns the file of a module that is sent; None if a pattern leaves it out, or it is no module."""
        place = name.replace(".", os.sep)
        places = [os.path.join(place, "__init__.py"), *(place + suffix for suffix in (".py", *EXTENSION_SUFFIXES))]
        return next((self._sent[each] for each in places if each in self._sent), None)

    def data_files(self) -> dict[str, str]:
        """Returns a checksum of the files other than sources, for each top-level package that counts and has some."""
        digests: dict[str, str] = {}
        for root in sorted({name.partition(".")[0] for name in self.counted}):
            names = sorted(name for name in self._sent if name.startswith(root + os.sep) and not name.endswith(".py"))
            if names:
                contents = [(name, _digest_of_file(self._sent[name])) for name in names]
                digests[root] = hashlib.sha256(repr(contents).encode(errors="surrogateescape")).hexdigest()
        return digests

    def _send(self, root: str) -> bool:
        """Sends a top-level module or package as a whole; returns False for one that is not the user's."""
        if root not in self._roots:
            spec = spec_of(root, self._first)
            self._roots[root] = spec is not None
            for base in spec.submodule_search_locations or () if spec else ():
                ignored = matcher((), os.path.join(base, IGNORE_FILE))
                for name, path in walk(base, ignored, self._missed, root, spec.origin is not None):
                    self._add(name, path)
            if spec and not spec.submodule_search_locations:
                self._add(os.path.basename(spec.origin), spec.origin)
        return self._roots[root]

    def _add(self, name: str, path: str) -> None:
        """Sends a regular file, unless one of this name comes first on the path of its package."""
        with contextlib.suppress(OSError):
            if name not in self._sent and stat.S_ISREG((found := os.stat(path)).st_mode):
                self._sent[name] = _File(path, found.st_size, fingerprint(found))

    def zipped(self) -> bytes | None:
        """Returns the zip of the files; None if there are none.

        Raises:
            InvalidJobError: the files are larger than `LIMIT`.
        """
        if not self._sent:
            return None
        sizes = {name: file.size for name, file in self._sent.items()}
        names = ", ".join(sorted(root for root, is_user_s in self._roots.items() if is_user_s))
        check_size(f"the user modules {names}", sizes, f"{IGNORE_FILE} in the package's folder")
        warn_of(self._missed)
        return _zip(tuple(sorted(self._sent.items())))


def _names_in(spec: Any) -> set[str]:
    """Returns the names of the modules in a package, and the words of its source."""
    found = {module.name for module in pkgutil.iter_modules(spec.submodule_search_locations or ())}
    with contextlib.suppress(OSError), open(spec.origin or "", encoding="utf-8", errors="replace") as file:
        found.update(re.findall(r"\w+", file.read()))
    return found


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


# -- folders -----------------------------------------------------------------------------------


def walk(
    base: str, ignored: Callable[[str], bool], missed: set[str], prefix: str = "", is_package: bool = True
) -> Iterator[tuple[str, str]]:
    """Yields the files of a folder that may be sent, in order: their names below ``prefix``, and their paths.

    Args:
        base: The folder.
        ignored: True for a path, relative to the folder, that is not sent: `matcher`.
        missed: Receives the names of what their own name keeps here, and of links to folders, which may lead to large
            datasets, or back here.
        prefix: First part of all names.
        is_package: False for a folder of which only packages have other files than sources.
    """
    packages: set[str] = set()
    for directory, children, names in os.walk(base):
        # Not by os.path.relpath, which took half of the time.
        below = directory[len(base) :].strip(os.sep)
        if is_package or "__init__.py" in names or os.path.dirname(directory) in packages:
            packages.add(directory)
        seen = sorted(name for name in children if not (name.startswith(".") or name in _SKIPPED_DIRECTORIES))
        seen = [name for name in seen if not ignored(os.path.join(below, name, ""))]
        children[:] = [name for name in seen if not _is_of_secrets(os.path.join(directory, name))]
        out = [name for name in seen if name not in children or os.path.islink(os.path.join(directory, name))]
        for name in sorted(names if directory in packages else (name for name in names if name.endswith(".py"))):
            if is_secret(name):
                out.append(name)
            elif not (name.startswith(".") or ignored(os.path.join(below, name))):
                yield os.path.join(prefix, below, name), os.path.join(directory, name)
        missed |= {os.path.join(prefix, below, name) for name in out if not ignored(os.path.join(below, name))}


def warn_of(missed: set[str]) -> None:
    """Logs the names of files and folders that do not travel, since ranks may miss them."""
    if named := sorted(name for name in missed if not os.path.basename(name).startswith(".")):
        logger.warning("%s do not travel with the job: links to folders, or they may hold secrets", ", ".join(named))


def check_size(what: str, sizes: Mapping[str, int], place: str) -> None:
    """Raises InvalidJobError if files, given by name and size, are larger than `LIMIT`."""
    if (total := sum(sizes.values())) > LIMIT:
        found = sorted(sizes, key=sizes.__getitem__, reverse=True)[:_LARGEST]
        named = ", ".join(f"{name} ({sizes[name] >> 20} MiB)" for name in found)
        raise InvalidJobError(
            f"{what} hold {total >> 20} MiB, over the limit of {LIMIT >> 20} MiB that travel with a job; the largest "
            f"are {named}: name what stays in {place}, or put it where the ranks run"
        )


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


def is_secret(name: str) -> bool:
    """Returns True for a data file that is named like a key or a password, which is never shipped."""
    # Airflow's, which only its webserver imports.
    return name == "webserver_config.py" or (not name.endswith(".py") and _SECRETS.fullmatch(name) is not None)


def _is_of_secrets(folder: str) -> bool:
    is_named = is_secret(os.path.basename(folder))
    return is_named and not any(name.endswith(".py") for _, _, names in os.walk(folder) for name in names)
