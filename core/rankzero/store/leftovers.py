"""Removes what a killed process has left in a store: files that it was writing, and files that nothing names."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection

from rankzero import bounds
from rankzero.store.files import list_names, modified, remove
from rankzero.store.location import filesystem_of, is_url, join

UNFINISHED_AFTER = bounds.stretched(3600.0)  # Since its last change, for a temporary file to count as left
_UNFINISHED = re.compile(
    r"""\.writing-[0-9a-f]{16} | \.rankzero-probe-[a-z0-9_]{8} | \.committing-[0-9]+\.[a-z]+
    | \.upload-(?:rank-0-value | [0-9]+-[0-9]+-rank-[0-9]+\.[a-z.]+)""",
    re.VERBOSE,
)
"""Name of a file while it is written: `temporary_beside`, a store's probe, and a value or part on its way to there."""

_SCRATCH = re.compile(r"\.writing-[a-z0-9_]{8}")
"""Name that `tempfile` gives a folder with the prefix ``.writing-``."""


def is_unfinished(name: str) -> bool:
    """Returns True for the name of a local file that a process has begun to write."""
    return _UNFINISHED.fullmatch(name) is not None


def remove_unfinished(directory: str, *, deep: bool = True, folders: bool = False) -> None:
    """Removes local files that a killed process began to write: those unchanged for `UNFINISHED_AFTER`.

    Args:
        directory: A path; an object store has no such files.
        deep: True to descend into the directories below it.
        folders: True to remove also folders of `tempfile` with the prefix ``.writing-``.
    """
    if is_url(directory):
        return
    for place, below, names in os.walk(directory):
        for name in below + names:
            is_scratch = folders and name in below and _SCRATCH.fullmatch(name)
            if not (is_scratch or is_unfinished(name)):
                continue
            path = os.path.join(place, name)
            # The writer may have completed it meanwhile.
            with contextlib.suppress(OSError):
                if time.time() - _last_change(path) > UNFINISHED_AFTER():
                    # A probe may be a folder, which is empty.
                    action = remove if is_scratch else os.rmdir if name in below else os.unlink
                    action(path)
        if not deep:
            below.clear()


def remove_strays(directory: str, names: re.Pattern[str], kept: Collection[str | None]) -> None:
    """Removes the files in a directory with such whole names, except ``kept``, older than `UNFINISHED_AFTER`."""
    for name in list_names(directory):
        if names.fullmatch(name) and name not in kept:
            path = join(directory, name)
            # Another process may have removed it. The time of its content says nothing about a file that was linked.
            with contextlib.suppress(OSError):
                stored = modified(path) if is_url(path) else os.lstat(path).st_ctime
                if time.time() - stored > UNFINISHED_AFTER() and (is_url(path) or os.path.isfile(path)):
                    remove(path)


def _last_change(path: str) -> float:
    """Returns when a file, or a folder or one of the files in it, was last changed. Raises OSError."""
    inside = os.scandir(path) if os.path.isdir(path) else ()
    return max(os.lstat(each).st_mtime for each in (path, *inside))


def abort_uploads(prefix: str) -> None:
    """Deletes the parts of unfinished uploads on S3, which no listing shows, but which cost money until deleted.

    Other stores delete them by themselves, after a week (GCS, Azure), or show them as files.

    Args:
        prefix: Prefix of the URLs of the files.
    """
    if not prefix.startswith(("s3://", "s3a://")):
        return
    filesystem, _ = filesystem_of(prefix)
    bucket, _, key = prefix.partition("://")[2].partition("/")
    while found := filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key).get("Uploads"):
        for upload in found:
            with contextlib.suppress(FileNotFoundError):
                filesystem.call_s3(
                    "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )
