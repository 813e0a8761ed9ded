"""Checks the owner of a run directory: its content is executed, so another user's directory is not used.

A directory is trusted if it belongs to this user or to root, and only its owner and group may write there. Some file
systems show every file as another user's (a root squash, a mount with a fixed user), or as writable for all. So before
a directory is rejected, it is compared with a new directory of this process beside it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile

from rankzero.store.location import is_url

TRUSTED_OWNERS = "RANKZERO_TRUSTED_OWNERS"
"""Environment variable with ids of further users, separated by commas, whose run directories may be used."""


def why_untrusted(directory: str) -> str | None:
    """Returns why a directory is not trusted, as the end of a sentence; None if it is, or does not exist.

    Args:
        directory: The run directory, normalized. On an object store, which has no owners, the bucket's permissions
            decide.
    """
    if is_url(directory) or not hasattr(os, "geteuid"):
        return None
    try:
        found = [os.lstat(directory), os.stat(directory)]
    except OSError:
        return None
    trusted = {os.geteuid(), 0, *_further()}
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


def _further() -> set[int]:
    named = os.environ.get(TRUSTED_OWNERS, "").split(",")
    return {int(name) for name in named if name.strip().isdecimal()}


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
