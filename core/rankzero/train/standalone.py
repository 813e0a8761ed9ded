"""Stores the checkpoints of a script that is started by hand, in the layout of a run directory. For one rank only."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os

from rankzero import store
from rankzero.channel import messages
from rankzero.errors import ResultError
from rankzero.job import CheckpointConfig
from rankzero.run.checkpoints import (
    FOLDER,
    MANIFEST,
    PIECES,
    Manifest,
    list_committed,
    mark_damaged,
    remove,
    to_remove,
    up_to_whole,
)
from rankzero.run.directory import RunDirectory
from rankzero.train.parts import Parts
from rankzero.train.writer import CheckpointWriter


def open_writer(directory: str, name: str) -> CheckpointWriter:
    """Returns a writer that commits its own checkpoints, and starts from the last one in the directory.

    Args:
        directory: Local directory of the checkpoints.
        name: Name of the setting that gave the directory, for errors.

    Raises:
        ResultError: the directory is a URL, belongs to a run, or cannot be read.
    """
    if store.is_url(directory):
        raise ResultError(f"{name} is {directory!r}; it must be a local directory")
    run = RunDirectory(os.path.abspath(directory))
    try:
        if run.is_own():
            # The run may keep more checkpoints than a script does, and may be running.
            raise ResultError(
                f"{name} is {directory!r}, which is the directory of a run: submit the run again under its run_id to "
                "continue it, or copy its folder checkpoints into another directory and give that one"
            )
        listed = list_committed([run.directory])
        committed = up_to_whole(listed)
    except OSError as error:
        raise ResultError(f"{name} is {directory!r}, which cannot be read: {error}") from error
    last = committed[-1] if committed else None
    attempt = listed[-1].attempt + 1 if listed else 0

    def send(message: messages.Message) -> None:
        if isinstance(message, messages.Part):
            writer.committed(_commit(run, attempt, message, last).for_ranks([0]))
        elif isinstance(message, messages.PartFailed):
            writer.on_message(messages.NotCommitted(message.index))
        elif isinstance(message, messages.Damaged):
            mark_damaged(run.path(FOLDER, message.id))

    start = messages.Start(run_directory=run.directory, run_token="", shared=True, scratch=run.directory)
    parts = Parts(dataclasses.replace(start, checkpoint={"id": last.id} if last else None), _nothing_to_fetch)
    writer = CheckpointWriter(parts, attempt, 0, 1, send)
    if last:
        writer.committed(last.for_ranks([0]))
    pid = os.getpid()

    @atexit.register
    def finish() -> None:
        """Waits for the daemon thread that writes the checkpoints, which a forked child does not have."""
        if os.getpid() == pid:
            writer.finish()

    return writer


def _commit(run: RunDirectory, attempt: int, part: messages.Part, resumed: Manifest | None) -> Manifest:
    """Commits a written checkpoint, and removes the checkpoints that are not kept."""
    manifest = Manifest.of_parts(run.directory, attempt, 1, {0: part.facts()})
    if part.pieces is not None:
        store.write_bytes(store.join(manifest.folder, PIECES), part.pieces.encode(), durable=True)
    file = store.join(manifest.folder, MANIFEST)
    store.write_bytes(file, json.dumps(manifest.to_json()).encode(), durable=True)
    for old in to_remove(list_committed([run.directory]), CheckpointConfig(), [resumed.id] if resumed else []):
        remove(old)
    return manifest


def _nothing_to_fetch(name: str) -> str:
    raise ResultError(f"{name} is not there")
