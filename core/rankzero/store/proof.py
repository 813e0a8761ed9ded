"""Tests the guarantees of a store: its driver may be too old, its server or its mount incapable."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets

from rankzero.errors import InvalidJobError
from rankzero.store import files
from rankzero.store.leftovers import remove_unfinished
from rankzero.store.location import DRIVERS, is_url, join, scheme_of

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
