"""What a store does in truth: its driver may be old, its server know no conditions, its mount not append."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets

from rankzero.errors import InvalidJobError
from rankzero.store import files
from rankzero.store.location import DRIVERS, is_url, join, scheme_of

_proved: set[str] = set()
"""Roots that passed, in this process."""


def prove(root: str) -> None:
    """Tries, once in each process, that of two creators one wins; locally that files can be appended to and replaced.

    Four requests of an object store. A driver that does not know conditional writes (s3fs, gcsfs, adlfs before
    2024.12) ignores the condition, and so does many a server that speaks S3.

    Args:
        root: Of run directories, normalized; a local one is made if it is not there.

    Raises:
        InvalidJobError: it cannot hold runs.
        OSError: it cannot be written (or an error of its fsspec driver).
    """
    if root in _proved:
        return
    name = f".rankzero-probe-{secrets.token_hex(4)}"
    if is_url(root):
        _prove_exclusive(root, join(root, name))
    else:
        files.make_directory(root)
        files.remove_unfinished(root, deep=False)
        _prove_directory(root, os.path.join(root, name))
    _proved.add(root)


def _prove_exclusive(root: str, probe: str) -> None:
    try:
        won = [files.create(probe, secrets.token_bytes(8)) for _ in range(2)]
    except TypeError:
        # An old driver of Google's or Azure's store knows no such argument; one of S3 ignores it.
        won = []
    finally:
        # Who may not delete leaves eight bytes.
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
