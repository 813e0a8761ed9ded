"""Whose directory this is: what a run directory holds is executed, so another user's is not used.

A directory is trusted if it belongs to this user or to root, and if only its owner and its group may write there. Some
file systems show every file as another user's (a root squash, a mount with a fixed user), or as writable for all: so
before a directory is refused, a probe shows how a new directory of this process looks beside it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile

from rankzero.store.location import is_url

TRUSTED_OWNERS = "RANKZERO_TRUSTED_OWNERS"
"""Environment variable: ids of further users, separated by commas, whose run directories may be used."""


def why_untrusted(directory: str) -> str | None:
    """Returns why a directory is not used, as the end of a sentence; None if it may be, or is not there.

    Args:
        directory: Of a run, normalized. An object store has no owners: who may write there is the bucket's to decide.
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
    """Returns how a new directory of this process looks; None if none can be made here."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix=".rankzero-probe-", dir=parent) as made:
        return os.stat(made)
    return None


def _name(uid: int) -> str:
    with contextlib.suppress(KeyError, ImportError):
        import pwd

        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    return f"user {uid}"
