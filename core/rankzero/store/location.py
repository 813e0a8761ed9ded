"""Checks and normalizes locations of files: a local path, or a URL of a scheme with known guarantees.

It also checks the owner of a run directory: its content is executed, so another user's directory is not used. A
directory is trusted if it belongs to this user or to root, and only its owner and group may write there. Some file
systems show every file as another user's (a root squash, a mount with a fixed user), or as writable for all. So before
a directory is rejected, it is compared with a new directory of this process beside it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import tempfile
from typing import Any

from rankzero.errors import InvalidJobError

_LOCAL = re.compile(r"(?:file|local):(?://(?=/)|(?=/))")
"""Scheme that may precede an absolute path. Java writes ``file:/x``."""
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_NO_COLON = re.compile(r"(s3a?|gc?s|abfss?|az|hdfs|viewfs|webhdfs|dbfs|file|local|memory)//")
"""A URL without its colon, which would otherwise be a folder of the working directory."""

DRIVERS = {
    "s3": "s3fs>=2024.12",
    "s3a": "s3fs>=2024.12",
    "gs": "gcsfs>=2024.12",
    "gcs": "gcsfs>=2024.12",
    "abfs": "adlfs>=2024.12",
    "abfss": "adlfs>=2024.12",
    "az": "adlfs>=2024.12",
    "memory": "fsspec>=2024.12",
}
"""Schemes with atomic replacement and exclusive creation, with the requirement of the driver that has both.

For ``memory``, this holds within one process.
"""

_REFUSED = {
    "hdfs": "Arrow's driver deletes a file before it renames another onto it, and creates none exclusively",
    "viewfs": "Arrow's driver deletes a file before it renames another onto it, and creates none exclusively",
    "webhdfs": "fsspec's driver writes files in place and creates none exclusively",
    "dbfs": "it writes files in blocks that readers see; give a bucket's URL, or the path of a shared disk",
}


def is_url(location: str) -> bool:
    """Returns True for a URL such as ``s3://...``, False for a local path, ``file://`` or ``local://``."""
    return "://" in location and not _LOCAL.match(location)


def has_scheme(location: str) -> bool:
    """Returns True for a URL and for a path behind a scheme, as Java writes ``file:/x`` and Databricks ``dbfs:/x``."""
    return "://" in location or bool(_ONE_SLASH.match(location))


def is_absolute(location: str | os.PathLike[str]) -> bool:
    """Returns True for a URL, and for a path that is the same in every working directory."""
    text = os.fspath(location)
    return is_url(text) or os.path.isabs(os.path.expanduser(_LOCAL.sub("", text, count=1)))


def scheme_of(location: str) -> str:
    """Returns the scheme of a URL: ``"s3"`` for ``s3://bucket``."""
    return location.partition("://")[0].lower()


STORE_VARIABLE = "RANKZERO_STORE"
DEFAULT_STORE = "~/.rankzero/runs"


def root_of(location: str | os.PathLike[str] | None) -> str:
    """Returns a given root of run directories; for None or "" ``$RANKZERO_STORE``, else `DEFAULT_STORE`."""
    return os.fspath(location or os.environ.get(STORE_VARIABLE) or DEFAULT_STORE)


def normalize(location: str | os.PathLike[str]) -> str:
    """Returns an absolute local path, or the URL without its trailing slash.

    Raises:
        InvalidJobError: the location is neither, or its scheme lacks the guarantees that a run directory needs.
    """
    text = os.fspath(location)
    if is_url(text):
        _check_scheme(text)
        return text.rstrip("/")
    path = os.path.expanduser(_LOCAL.sub("", text, count=1))
    if path.startswith("~"):
        raise InvalidJobError(
            f"the path {text!r} begins in a home directory that is not known: HOME is not set and the system has no "
            "entry for the user; set HOME, or give an absolute path, as store= or in RANKZERO_STORE"
        )
    if found := _ONE_SLASH.match(path) or _NO_COLON.match(path):
        advice = _REFUSED.get(found[1].lower(), f"a URL begins with {found[1]}://, a local path with / or ./")
        raise InvalidJobError(f"{text!r} is neither a path nor a URL: {advice}")
    return os.path.abspath(path)


def _check_scheme(url: str) -> None:
    scheme = scheme_of(url)
    if scheme not in DRIVERS:
        why = _REFUSED.get(scheme, "rankzero does not know that it replaces files as a whole and creates exclusively")
        raise InvalidJobError(
            f"{url!r} cannot hold runs or values: {why}. Give a path that all machines see, or a URL that begins with "
            f"{', '.join(sorted(f'{name}://' for name in DRIVERS if name != 'memory'))} (what speaks S3 goes by s3://)",
            code="RZ-1007",
        )


def filesystem_of(location: str) -> tuple[Any, str]:
    """Returns the file system of a URL and the path in it. Raises InvalidJobError if its driver is not installed."""
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(location)
        return filesystem, path
    except ImportError as error:
        driver = DRIVERS.get(scheme_of(location), "fsspec")
        raise InvalidJobError(f"{location} needs {driver} here: pip install '{driver}'") from error


def join(base: str, *parts: str) -> str:
    """Joins ``base`` and ``parts`` to one location."""
    return "/".join([base.rstrip("/"), *parts])


TRUSTED_OWNERS = "RANKZERO_TRUSTED_OWNERS"
"""Environment variable with ids of further users, separated by commas, whose run directories may be used."""


def why_untrusted(directory: str) -> str | None:
    """Returns why a run directory is not trusted, as the end of a sentence; None if it is, or does not exist.

    On an object store, which has no owners, the bucket's permissions decide.
    """
    if is_url(directory) or not hasattr(os, "geteuid"):
        return None
    try:
        found = [os.lstat(directory), os.stat(directory)]
    except OSError:
        return None
    further = os.environ.get(TRUSTED_OWNERS, "").split(",")
    trusted = {os.geteuid(), 0, *(int(name) for name in further if name.strip().isdecimal())}
    foreign = next((facts.st_uid for facts in found if facts.st_uid not in trusted), None)
    is_open = bool(found[1].st_mode & stat.S_IWOTH)
    if foreign is None and not is_open:
        return None
    probe = _probe(os.path.dirname(directory))
    if foreign is not None and (probe is None or foreign != probe.st_uid):
        return (
            f"belongs to {_name(foreign)}, and not to {_name(os.geteuid())}: choose another run_id or store, have it "
            f"removed, or set {TRUSTED_OWNERS}={foreign} if that user may run code as you"
        )
    if is_open and not (probe and probe.st_mode & stat.S_IWOTH):
        return f"can be written by every user of this machine: chmod o-w {directory}"
    return None


def _probe(parent: str) -> os.stat_result | None:
    """Returns owner and mode of a new directory of this process; None if none can be created here."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix=".rankzero-probe-", dir=parent) as made:
        return os.stat(made)
    return None


def _name(uid: int) -> str:
    with contextlib.suppress(KeyError, ImportError):
        import pwd

        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    return f"user {uid}"


# Found beside the user's modules in some layouts ($SPARK_HOME/python), and never the user's. The search for pip alone
# makes setuptools fail to import in this process.
BESIDE = frozenset({"rankzero", "pip", "pyspark", "py4j", "torch", "numpy", "cloudpickle", "__main__", "__mp_main__"})


@functools.cache
def _installed_roots() -> tuple[str, ...]:
    # Imported here, since most processes judge no file.
    import site
    import sysconfig

    names = ("stdlib", "platstdlib", "purelib", "platlib")
    places = [*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages()]
    return tuple(os.path.realpath(path) + os.sep for path in places if path)


@functools.lru_cache(maxsize=16384)
def is_user_file(path: str) -> bool:
    """Returns True for the file of a module that no package installer has put there."""
    real = os.path.realpath(path)
    is_installed = path.startswith(_installed_roots()) or real.startswith(_installed_roots()) or ".zip" in real
    return not (is_installed or {"site-packages", "dist-packages"} & {*real.split(os.sep)})
