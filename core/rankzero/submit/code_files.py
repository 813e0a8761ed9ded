"""Finds the files of the user's code that are sent with a job, all of which count, and packs them.

The whole top-level package or module that the code imports, or that a text in it names, is sent, and those that its
files import or name in turn. So are ``working_dir`` and ``py_files``. Never sent are files that ``.rankzeroignore`` of
a folder names, hidden ones, those named like a key or a password, data files in folders that are no package, and
installed modules, which the executors have. A source that imports an orchestrator counts only if others import it.
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
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rankzero.errors import InvalidJobError
from rankzero.store import fingerprint
from rankzero.submit.code_modules import NEVER_SHIPPED, ORCHESTRATORS, package_of, parents_of, spec_of, top_level_names
from rankzero.submit.code_source import Source, source_of_file

logger = logging.getLogger(__name__)

LIMIT = 64 << 20
"""Most bytes of user modules, and of a working directory, that are shipped with a job."""

IGNORE_FILE = ".rankzeroignore"
"""File in a working directory or a package with patterns of files that are not shipped, in the format of .gitignore."""

_SUFFIXES = (".py", ".zip", ".egg", ".whl")

_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "node_modules"})

_SECRETS = re.compile(
    r".*\.(pem|key|p12|pfx|jks|keystore|kdbx|ppk|keytab|env)|id_(rsa|dsa|ecdsa|ed25519).*|credentials.*"
    r"|.*credentials\.json|secrets?(\..*)?|service[-_]account.*\.json|kube[-_]?config(\..*)?"
    r"|profiles\.ya?ml|.*\.tfstate(\..*)?|airflow\.(cfg|db)|simple_auth_manager_passwords\..*|dagster(_cloud)?\.yaml",
    re.IGNORECASE,
)
"""Names of data files, or folders of them, that may hold keys or passwords. Sources are shipped: they are imported."""


class _File(NamedTuple):
    """A file that is sent, as a key of caches: once it is changed, it has another fingerprint."""

    path: str
    size: int
    mode: int
    fingerprint: str


class Bundle:
    """Files that are sent as one zip.

    Attributes:
        files: The files by their names in the zip. The first one of a name counts, as on a search path.
    """

    def __init__(self) -> None:
        self.files: dict[str, _File] = {}
        self._missed: set[str] = set()

    def add(self, name: str, path: str) -> None:
        """Adds a regular file."""
        with contextlib.suppress(OSError):
            # No zip has a name that is not UTF-8.
            if (shown := os.fsencode(name).decode(errors="backslashreplace")) != name:
                self._missed.add(shown)
            elif name not in self.files and stat.S_ISREG((found := os.stat(path)).st_mode):
                self.files[name] = _File(path, found.st_size, stat.S_IMODE(found.st_mode), fingerprint(found))

    def add_folder(self, base: str, prefix: str, *, is_package: bool = True) -> None:
        """Adds the files of a folder that may be sent.

        Args:
            base: The folder.
            prefix: First part of all names.
            is_package: False for a folder of which only packages have other files than sources.
        """
        ignored = _matcher(os.path.join(base, IGNORE_FILE))
        packages: set[str] = set()
        for directory, children, names in os.walk(base):
            # Not by os.path.relpath, which took half of the time.
            below = directory[len(base) :].strip(os.sep)
            if is_package or "__init__.py" in names or os.path.dirname(directory) in packages:
                packages.add(directory)
            seen = sorted(name for name in children if not (name.startswith(".") or name in _SKIPPED_DIRECTORIES))
            seen = [name for name in seen if not ignored(os.path.join(below, name, ""))]
            children[:] = [name for name in seen if not _is_of_secrets(os.path.join(directory, name))]
            # Links to folders may lead to large datasets, or back here.
            out = [name for name in seen if name not in children or os.path.islink(os.path.join(directory, name))]
            for name in sorted(names if directory in packages else (name for name in names if name.endswith(".py"))):
                if is_secret(name):
                    out.append(name)
                elif not (name.startswith(".") or ignored(os.path.join(below, name))):
                    self.add(os.path.join(prefix, below, name), os.path.join(directory, name))
            missed = (os.path.join(below, name) for name in out if not name.startswith("."))
            self._missed |= {os.path.join(prefix, name) for name in missed if not ignored(name)}

    def digest(self, names: Iterable[str]) -> str:
        """Returns a checksum of some of the files, with their names and whether they are programs."""
        facts = [(name, file.mode & 0o100, _digest_of_file(file)) for name in names if (file := self.files[name])]
        return hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()

    def zipped(self, what: str) -> bytes:
        """Returns the zip, and logs the names of what does not travel, since ranks may miss it.

        Args:
            what: The name of the files for errors.

        Raises:
            InvalidJobError: the files are larger than `LIMIT`.
        """
        sizes = {name: file.size for name, file in self.files.items()}
        if (total := sum(sizes.values())) > LIMIT:
            found = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
            named = ", ".join(f"{name} ({sizes[name] >> 20} MiB)" for name in found)
            raise InvalidJobError(
                f"{what} hold {total >> 20} MiB, over the limit of {LIMIT >> 20} MiB that travel with a job; the "
                f"largest are {named}: name what stays in {IGNORE_FILE} in their folder, or put it where the ranks run"
            )
        if missed := sorted(self._missed):
            named = ", ".join(missed)
            logger.warning(
                "%s do not travel with the job: links to folders, names that are not UTF-8, or possible secrets", named
            )
        return _zip(tuple(sorted(self.files.items())))


@functools.lru_cache(maxsize=4096)
def _digest_of_file(file: _File) -> str:
    with open(file.path, "rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


@functools.lru_cache(maxsize=2)
def _zip(files: tuple[tuple[str, _File], ...]) -> bytes:
    """Returns a zip of files, each given by its name there.

    They are not compressed: that makes a third of the bytes, and takes six times as long here.
    The last ones are kept: the next training mostly needs the same.
    """
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", strict_timestamps=False) as archive:
        for name, file in files:
            archive.write(file.path, name)
    return buffer.getvalue()


def _matcher(ignore_file: str) -> Any:
    """Returns a function that is True for a relative path, with a slash after a directory's, that is not shipped."""
    if not os.path.isfile(ignore_file):
        return lambda path: False
    from pathspec import GitIgnoreSpec

    with open(ignore_file, encoding="utf-8") as file:
        return GitIgnoreSpec.from_lines(file.read().splitlines()).match_file


def is_secret(name: str) -> bool:
    """Returns True for a data file that is named like a key or a password, which is never shipped."""
    # Airflow's, which only its webserver imports.
    return name == "webserver_config.py" or (not name.endswith(".py") and _SECRETS.fullmatch(name) is not None)


def _is_of_secrets(folder: str) -> bool:
    is_named = is_secret(os.path.basename(folder))
    return is_named and not any(name.endswith(".py") for _, _, names in os.walk(folder) for name in names)


# -- modules -----------------------------------------------------------------------------------


@dataclass
class Needs:
    """The names by which code reaches the user's modules.

    Attributes:
        modules: Names that it imports; some may be no modules.
        texts: Texts that may name a module.
        computes: True if it imports by a text, which may be one word of an argument.
        first: A directory that is searched before `sys.path`, such as that of a script.
    """

    modules: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    computes: bool = False
    first: str | None = None

    def add(self, source: Source) -> None:
        """Adds what a source needs."""
        self.modules |= source.imports
        self.texts |= source.texts
        self.computes |= source.computes


class Modules:
    """The user's top-level packages and modules that code needs, in turn.

    Attributes:
        counted: Checksum of each source that is sent, and of the data files of each package, by name.
        zipped: The zip of the files; None if there are none.
    """

    def __init__(self, needs: Needs) -> None:
        """Finds the files. Raises InvalidJobError if they are larger than `LIMIT`."""
        self._bundle, self._first = Bundle(), needs.first
        self._seen: set[str] = set()
        self.counted: dict[str, str] = {}
        waiting, imported, aside = self._roots_of(needs), needs.modules | needs.texts, dict[str, str]()
        while waiting:
            name = waiting.pop()
            others: list[str] = []
            for file in self._sent(name):
                if not file.endswith(".py"):
                    others.append(file)
                    continue
                with contextlib.suppress(OSError):
                    module = file[:-3].removesuffix(os.sep + "__init__").replace(os.sep, ".")
                    source = source_of_file(path := self._bundle.files[file].path, package_of(module, path))
                    waiting |= self._roots_of(source)
                    if ORCHESTRATORS.isdisjoint(each.partition(".")[0] for each in source.early):
                        self.counted[module] = source.digest
                        imported |= source.imports | source.texts
                    else:
                        # Ranks get its functions by value.
                        aside[module] = source.digest
            if others:
                self.counted[f"{name} (data files)"] = self._bundle.digest(others)
        # There may be a million texts.
        reached = {part for name in imported for part in parents_of(name)} if aside else set[str]()
        self.counted |= {module: aside[module] for module in aside.keys() & reached}
        names = ", ".join(sorted({file.partition(os.sep)[0].partition(".")[0] for file in self._bundle.files}))
        self.zipped = self._bundle.zipped(f"the user modules {names}") if names else None

    def _sent(self, root: str) -> list[str]:
        """Adds a top-level module or package as a whole, and returns the names of its files."""
        spec, before = spec_of(root, self._first), len(self._bundle.files)
        for base in spec.submodule_search_locations or () if spec else ():
            self._bundle.add_folder(base, root, is_package=spec.origin is not None)
        if spec and not spec.submodule_search_locations:
            self._bundle.add(os.path.basename(spec.origin), spec.origin)
        return [*self._bundle.files][before:]

    def _roots_of(self, needs: Needs | Source) -> set[str]:
        """Returns the top-level names that code imports, or names as "acme.models.Net" does, and "train.csv" not."""
        imports = needs.modules if isinstance(needs, Needs) else needs.imports
        roots = {name.partition(".")[0] for name in imports}
        parts: dict[str, set[str]] = {}
        for text in needs.texts:
            root, _, rest = text.partition(".")
            parts.setdefault(root, set()).add(rest.partition(".")[0])
        # There may be a million texts.
        for root in parts.keys() & top_level_names(self._first) - NEVER_SHIPPED - self._seen - roots if parts else ():
            spec = spec_of(root, self._first)
            # Any folder has the name of a module without a file.
            if spec and spec.origin and ("" in parts[root] or parts[root] & _names_in(spec)):
                roots.add(root)
        roots -= self._seen
        self._seen |= roots
        return roots


def _names_in(spec: Any) -> set[str]:
    """Returns the names of the modules in a package, and the words of its source."""
    found = {module.name for module in pkgutil.iter_modules(spec.submodule_search_locations or ())}
    with contextlib.suppress(OSError), open(spec.origin, encoding="utf-8", errors="replace") as file:
        found.update(re.findall(r"\w+", file.read()))
    return found


# -- what the user names -----------------------------------------------------------------------


class UserCode:
    """The user's ``working_dir`` and ``py_files`` of a `Launcher`."""

    def __init__(
        self, working_dir: str | os.PathLike[str] | None = None, py_files: Iterable[str | os.PathLike[str]] = ()
    ) -> None:
        """Checks the paths, which may begin with ``~``.

        Args:
            working_dir: A directory of this machine; ranks start in a copy of it. None ships no directory.
            py_files: Files ``.py``, ``.zip``, ``.egg``, ``.whl`` and directories of packages.

        Raises:
            InvalidJobError: a path does not exist, or is of another kind.
        """
        self._paths: dict[str, str] = {}
        if working_dir is not None:
            self._paths["working_dir"] = path = os.path.expanduser(os.fspath(working_dir))
            if not os.path.isdir(path):
                raise InvalidJobError(f"working_dir={path!r} is no directory of this machine")
        for path in (os.path.expanduser(os.fspath(each)) for each in py_files):
            if not (os.path.isdir(path) or (os.path.isfile(path) and path.endswith(_SUFFIXES))):
                raise InvalidJobError(
                    f"py_files has {path!r}; give .py, .zip, .egg or .whl files and directories of packages that exist"
                )
            root = os.path.basename(os.path.abspath(path))
            for suffix in ("", ".py"):
                if (other := self._paths.get(f"py_files/{root.removesuffix('.py')}{suffix}", path)) != path:
                    raise InvalidJobError(f"py_files has {other} and {path}, and ranks get one {root!r}: rename one")
            self._paths[f"py_files/{root}"] = path

    @functools.cached_property
    def sent(self) -> tuple[str, bytes] | None:
        """The checksum of the files and a zip of them; None if there is nothing to ship.

        Raises:
            InvalidJobError: the files are too large; the message names the largest.
        """
        bundle = Bundle()
        for name, path in self._paths.items():
            if os.path.isdir(path):
                bundle.add_folder(path, name)
            else:
                bundle.add(name, path)
        return (bundle.digest(sorted(bundle.files)), bundle.zipped("working_dir and py_files")) if self._paths else None
