"""Checks and normalizes locations of files: a local path, or a URL of a scheme with known guarantees."""

from __future__ import annotations

import os
import re

from rankzero.errors import InvalidJobError

_LOCAL = re.compile(r"(?:file|local):(?://(?=/)|(?=/))")
"""Scheme that may precede an absolute path. Java writes ``file:/x``."""

_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")

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


def is_absolute(location: str | os.PathLike[str]) -> bool:
    """Returns True for a URL, and for a path that is the same in every working directory."""
    text = os.fspath(location)
    return is_url(text) or os.path.isabs(os.path.expanduser(_LOCAL.sub("", text, count=1)))


def scheme_of(location: str) -> str:
    """Returns the scheme of a URL: ``"s3"`` for ``s3://bucket``."""
    return location.partition("://")[0].lower()


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
    if found := _ONE_SLASH.match(path):
        advice = _REFUSED.get(found[1].lower(), f"a URL begins with {found[1]}://, a local path with / or ./")
        raise InvalidJobError(f"{text!r} is neither a path nor a URL: {advice}")
    return os.path.abspath(path)


def _check_scheme(url: str) -> None:
    scheme = scheme_of(url)
    if scheme not in DRIVERS:
        why = _REFUSED.get(scheme, "rankzero does not know that it replaces files as a whole and creates exclusively")
        raise InvalidJobError(
            f"{url!r} cannot hold runs or values: {why}. Give a path that all machines see, or a URL that begins with "
            f"{', '.join(sorted(f'{name}://' for name in DRIVERS if name != 'memory'))} (what speaks S3 goes by s3://)"
        )


def join(base: str, *parts: str) -> str:
    """Joins ``base`` and ``parts`` to one location."""
    return "/".join([base.rstrip("/"), *parts])
