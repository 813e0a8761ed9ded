"""The upkeep of a store: tests its guarantees before the first run, and removes what killed processes have left there.

A store's driver may be too old, its server or its mount incapable. A killed process leaves files that it was writing,
and files that nothing names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Collection

from rankzero import bounds
from rankzero.errors import InvalidJobError
from rankzero.store import files
from rankzero.store.location import DRIVERS, filesystem_of, is_url, join, scheme_of

_proved: set[str] = set()
"""Roots that passed the test in this process."""


def prove(root: str) -> None:
    """Tests, once in each process, exclusive creation, and on local paths also appending and replacement.

    Takes four requests to an object store. Drivers without conditional writes (s3fs, gcsfs, adlfs before 2024.12)
    ignore the condition, and so do many servers with an S3 API.

    Args:
        root: Root of run directories, normalized; a local one is created if it does not exist.

    Raises:
        InvalidJobError: the root cannot hold runs.
        OSError: the root cannot be written (or an error of its fsspec driver).
    """
    if root in _proved:
        return
    name = f".rankzero-probe-{secrets.token_hex(4)}"
    if is_url(root):
        _prove_exclusive(root, join(root, name))
    else:
        files.make_directory(root)
        remove_unfinished(root, deep=False)
        _prove_directory(root, os.path.join(root, name))
    _proved.add(root)


def _prove_exclusive(root: str, probe: str) -> None:
    try:
        won = [files.create(probe, secrets.token_bytes(8)) for _ in range(2)]
    except TypeError:
        # Old drivers of Google's and Azure's stores lack the argument; that of S3 ignores it.
        won = []
    finally:
        # Without permission to delete, eight bytes remain.
        with contextlib.suppress(Exception):
            files.remove(probe)
    if won != [True, False]:
        raise InvalidJobError(
            f"{root} cannot hold runs: of two callers that create one file there, both would win. Install "
            f"{DRIVERS[scheme_of(root)]}; if that is there, the server does not know conditional writes (If-None-Match)"
        )


def _prove_directory(root: str, probe: str) -> None:
    what = "create files exclusively"
    try:
        if [files.create(probe, b"one"), files.create(probe, b"other")] != [True, False]:
            raise OSError(errno.ENOTSUP, "a file that was there was created again")
        what = "append to files"
        with open(probe, "ab") as file:
            file.write(b"two")
        if files.read_bytes(probe) != b"onetwo":
            raise OSError(errno.ENOTSUP, "what was appended is not there")
        what = "replace files"
        files.write_bytes(probe, b"three")
        if files.read_bytes(probe) != b"three":
            raise OSError(errno.ENOTSUP, "the file that was replaced is there still")
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.ENOENT):
            raise
        raise InvalidJobError(
            f"{root} cannot hold runs, for which its file system must {what}: {error}. If it is a bucket that is "
            "mounted, give the bucket's URL instead"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(probe)


# -- what killed processes have left ----------------------------------------------------------------

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
                    action = files.remove if is_scratch else os.rmdir if name in below else os.unlink
                    action(path)
        if not deep:
            below.clear()


def remove_strays(directory: str, names: re.Pattern[str], kept: Collection[str | None]) -> None:
    """Removes the files in a directory with such whole names, except ``kept``, older than `UNFINISHED_AFTER`."""
    for name in files.list_names(directory):
        if names.fullmatch(name) and name not in kept:
            path = join(directory, name)
            # Another process may have removed it. The time of its content says nothing about a file that was linked.
            with contextlib.suppress(OSError):
                stored = files.modified(path) if is_url(path) else os.lstat(path).st_ctime
                if time.time() - stored > UNFINISHED_AFTER() and (is_url(path) or os.path.isfile(path)):
                    files.remove(path)


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
