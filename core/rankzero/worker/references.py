"""The files that a worker's arguments refer to, as local paths."""

from __future__ import annotations

import os
from collections.abc import Callable

from rankzero.channel.frames import Message
from rankzero.store import remote
from rankzero.values.ref import ResultRef


def path_of(ref: ResultRef, start: Message, fetch: Callable[[str], str]) -> str:
    """Where the file lies on this host, once it does.

    A file of an object store is read there, if this worker has a client and the right to it; else the driver, which has
    both, sends it. Either happens once for all workers of a task.

    Args:
        ref: The reference.
        start: The agent's message.
        fetch: Has the agent fetch a file from the driver.

    Raises:
        ResultError: neither way leads there.
    """
    name, path = start["refs"][ref.uri]
    if path is not None:
        return str(path)
    for client in remote.clients(ref.uri):
        here = os.path.join(start["scratch"], f"read-{name}")
        try:
            return remote.download(client, ref.uri, here)
        except Exception:
            # The driver's reason is the one to be reported: it has what the run was given.
            continue
    return fetch(name)
