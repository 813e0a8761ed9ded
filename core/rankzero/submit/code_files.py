"""Finds the files of the user's code that are sent with a job, all of which count, and packs them.

The whole top-level package or module that the code imports, or that a text in it names, is sent, and those that its
files import or name in turn. So are ``working_dir`` and ``py_files``. Never sent are files that ``.rankzeroignore`` of
a folder names, hidden ones, those named like a key or a password, data files in folders that are no package, and
installed modules, which the executors have. A source whose functions are sent by value counts only if others name it.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import os
import re
import sys
import zipfile
from collections.abc import Iterable
from typing import Any

from rankzero.errors import InvalidJobError
from rankzero.submit import code
from rankzero.values.formats import digest_of_file

logger = logging.getLogger(__name__)

LIMIT = 64 << 20  # Most bytes of user modules, and of a working directory, that are shipped with a job
IGNORE_FILE = ".rankzeroignore"  # In a folder: patterns of files that are not shipped, in the format of .gitignore

_SKIPPED = frozenset({"__pycache__", "node_modules"})

_SECRETS = re.compile(
    r".*\.(pem|key|p12|pfx|jks|keystore|kdbx|ppk|keytab|env)|id_(rsa|dsa|ecdsa|ed25519).*|credentials.*"
    r"|.*credentials\.json|secrets?(\..*)?|service[-_]account.*\.json|kube[-_]?config(\..*)?"
    r"|profiles\.ya?ml|.*\.tfstate(\..*)?|airflow\.(cfg|db)|simple_auth_manager_passwords\..*|dagster(_cloud)?\.yaml",
    re.IGNORECASE,
)
"""Names of data files, or folders of them, that may hold keys or passwords. Sources are shipped: they are imported."""


class Bundle:
    """Files that are sent as one zip."""

    def __init__(self) -> None:
        # The paths by their names in the zip. The first one of a name counts, as on a search path.
        self.files: dict[str, str] = {}
        self._missed: set[str] = set()

    def add(self, name: str, path: str) -> None:
        """Adds a regular file, if its name is UTF-8: no zip has another one."""
        if name != name.encode(errors="ignore").decode():
            self._missed.add(name)
        elif os.path.isfile(path):
            self.files.setdefault(name, path)

    def add_folder(self, base: str, prefix: str, *, is_package: bool = True) -> None:
        """Adds the files of a folder that may be sent; of one that is no package, data files of packages alone."""
        ignored = _matcher(os.path.join(base, IGNORE_FILE))
        packages: set[str] = set()
        for directory, children, names in os.walk(base):
            # Not by os.path.relpath, which took half of the time.
            below = directory[len(base) :].strip(os.sep)
            if is_package or "__init__.py" in names or os.path.dirname(directory) in packages:
                packages.add(directory)
            hidden = {name for name in (*children, *names) if name.startswith(".") or name in _SKIPPED}
            hidden |= {name for name in children if ignored(os.path.join(below, name, ""))}
            children[:] = sorted({*children} - hidden)
            # Links to folders may lead to large datasets, or back here.
            links = [name for name in children if os.path.islink(os.path.join(directory, name))]
            is_in_secret = any(map(_is_secret, below.split(os.sep)))
            for name in sorted({*links, *names} - hidden):
                is_source, path = name.endswith(".py"), os.path.join(below, name)
                if ignored(path) or not (is_source or directory in packages):
                    continue
                if name in links or _is_secret(name) or (is_in_secret and not is_source):
                    self._missed.add(os.path.join(prefix, path))
                else:
                    self.add(os.path.join(prefix, path), os.path.join(directory, name))

    def digest(self, names: Iterable[str]) -> str:
        """Returns a checksum of some of the files, with their names and whether they are programs."""
        paths = [(name, self.files[name]) for name in names]
        facts = [(name, os.stat(path).st_mode & 0o100, digest_of_file(path)) for name, path in paths]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def zipped(self, what: str) -> bytes:
        """Returns the zip, and logs the names of what does not travel, since ranks may miss it.

        Raises InvalidJobError, which names the files so, if they are larger than `LIMIT`.
        """
        sizes = {name: os.path.getsize(path) for name, path in self.files.items()}
        if (total := sum(sizes.values())) > LIMIT:
            largest = max(sizes, key=sizes.__getitem__)
            raise InvalidJobError(
                f"{what} hold {total >> 20} MiB, over the limit of {LIMIT >> 20} MiB that travel with a job; the "
                f"largest is {largest} ({sizes[largest] >> 20} MiB): name what stays in {IGNORE_FILE} in its folder, "
                "or put it where the ranks run"
            )
        if self._missed:
            named = ascii(", ".join(sorted(self._missed)))
            logger.warning("%s do not travel with the job: links to folders, odd names, or possible secrets", named)
        buffer = io.BytesIO()
        # Not compressed: that makes a third of the bytes, and takes six times as long here.
        with zipfile.ZipFile(buffer, "w", strict_timestamps=False) as archive:
            for name, path in self.files.items():
                archive.write(path, name)
        return buffer.getvalue()


def _matcher(ignore_file: str) -> Any:
    """Returns a function that is True for a relative path, with a slash after a directory's, that is not shipped."""
    if not os.path.isfile(ignore_file):
        return lambda path: False
    from pathspec import GitIgnoreSpec

    with open(ignore_file, encoding="utf-8") as file:
        return GitIgnoreSpec.from_lines(file.read().splitlines()).match_file


def _is_secret(name: str) -> bool:
    """Returns True for a data file that is named like a key or a password, which is never shipped."""
    # Airflow's, which only its webserver imports.
    return name == "webserver_config.py" or (not name.endswith(".py") and _SECRETS.fullmatch(name) is not None)


class Modules:
    """The user's top-level packages and modules that code needs, in turn.

    Attributes:
        counted: Checksum of each source that is sent, and of the data files of each package, by name.
        zipped: The zip of the files; None if there are none.
    """

    def __init__(self, needs: code.Source, first: str | None = None, by_value: Iterable[str] = ()) -> None:
        """Finds the files, first in a directory that is given. Code of some modules is sent by value."""
        self.counted: dict[str, str] = {}
        bundle, waiting, found, aside = Bundle(), [needs], set[str](), set[str]()
        sources: dict[str, code.Source] = {}
        modules = [sys.modules.get(name) for name in by_value if code.is_sent_by_value(name)]
        apart = {os.path.realpath(getattr(each, "__file__", None) or "") for each in modules}
        while waiting:
            for root in sorted(_roots(waiting.pop(), first) - found):
                found.add(root)
                before, spec = len(bundle.files), code.spec_of(root, first)
                for base in (spec and spec.submodule_search_locations) or ():
                    bundle.add_folder(base, root, is_package=spec.origin is not None)
                if spec and not spec.submodule_search_locations:
                    bundle.add(os.path.basename(spec.origin), spec.origin)
                files = [*bundle.files][before:]
                if data := [name for name in files if not name.endswith(".py")]:
                    self.counted[f"{root} (data files)"] = bundle.digest(data)
                for name in sorted({*files}.difference(data)):
                    path, module = bundle.files[name], name[:-3].removesuffix(os.sep + "__init__")
                    module = module.replace(os.sep, ".")
                    sources[module] = source = code.source_of_file(path, code.package_of(module, path))
                    waiting.append(source)
                    if apart and os.path.realpath(path) in apart:
                        aside.add(module)
        # What ranks get of such a file counts with the function. The file counts only if another one names it.
        users = [needs, *(source for module, source in sources.items() if module not in aside)]
        aside -= {part for user in users for name in user.imports | user.texts for part in code.parents_of(name)}
        begun = tuple(text for user in users for text in user.texts)
        aside = {module for module in aside if not module.startswith(begun)}
        self.counted |= {module: source.digest for module, source in sources.items() if module not in aside}
        names = ", ".join(sorted({name.partition(os.sep)[0] for name in bundle.files}))
        self.zipped = bundle.zipped(f"the user modules {names}") if names else None


def _roots(source: code.Source, first: str | None) -> set[str]:
    """Returns the top-level names that code imports, and those that a text in it begins with."""
    named = {text.partition(".")[0] for text in source.texts} & code.top_level_names(first)
    # Any folder has the name of a module without a file.
    named = {root for root in named if (spec := code.spec_of(root, first)) and spec.origin}
    return named | {name.partition(".")[0] for name in source.imports}


class UserCode:
    """The user's ``working_dir`` and ``py_files`` of a `Launcher`."""

    def __init__(
        self, working_dir: str | os.PathLike[str] | None = None, py_files: Iterable[str | os.PathLike[str]] = ()
    ) -> None:
        """Checks the paths, which may begin with ``~``; raises InvalidJobError. Ranks start in a copy of the directory.

        Files are ``.py``, ``.zip``, ``.egg`` and ``.whl``, and directories of packages.
        """
        self._paths: dict[str, str] = {}
        if working_dir is not None:
            self._paths["working_dir"] = path = os.path.expanduser(os.fspath(working_dir))
            if not os.path.isdir(path):
                raise InvalidJobError(f"working_dir={path!r} is no directory of this machine")
        for path in (os.path.expanduser(os.fspath(each)) for each in py_files):
            if not (os.path.isdir(path) or (os.path.isfile(path) and path.endswith((".py", ".zip", ".egg", ".whl")))):
                raise InvalidJobError(
                    f"py_files has {path!r}; give .py, .zip, .egg or .whl files and directories of packages that exist"
                )
            root = f"py_files/{os.path.basename(os.path.abspath(path))}"
            if (other := self._paths.setdefault(root, path)) != path:
                raise InvalidJobError(f"py_files has {other} and {path}, and ranks get one of a name: rename one")

    @functools.cached_property
    def sent(self) -> tuple[str, bytes] | None:
        """The checksum of the files and a zip of them; None if there is nothing to ship. Raises InvalidJobError."""
        bundle = Bundle()
        for name, path in self._paths.items():
            if os.path.isdir(path):
                bundle.add_folder(path, name)
            else:
                bundle.add(name, path)
        return (bundle.digest(sorted(bundle.files)), bundle.zipped("working_dir and py_files")) if self._paths else None
