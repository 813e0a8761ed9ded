"""The files that a worker's arguments refer to, as local paths."""

from __future__ import annotations

import os
from collections.abc import Callable

from rankzero.channel.messages import Start
from rankzero.store import remote
from rankzero.values.ref import ResultRef


def path_of(ref: ResultRef, start: Start, fetch: Callable[[str], str]) -> str:
    """Returns the local path of a referenced file; downloads the file if needed.

    A file on an object store is read directly if this worker has a client and the permission; else the driver sends
    it. Either happens once for all workers of a task.

    Args:
        ref: The reference.
        start: The agent's message.
        fetch: Makes the agent fetch a file from the driver; returns its local path.

    Raises:
        ResultError: neither this worker nor the driver can read the file.
    """
    name, path = start.refs[ref.uri]
    assert name is not None
    if path is not None:
        return path
    for client in remote.clients(ref.uri):
        here = os.path.join(start.scratch, f"read-{name}")
        try:
            return remote.download(client, ref.uri, here)
        except Exception:
            # The driver's error is the one to report: it has the credentials that the run was given.
            continue
    return fetch(name)
