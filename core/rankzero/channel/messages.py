"""The messages of driver, agents and ranks: one class for each kind. Standard library only, as for `Message`."""

from __future__ import annotations

import sys
from dataclasses import field
from typing import Any

from rankzero.channel.message import KINDS as KINDS
from rankzero.channel.message import Message as Message
from rankzero.channel.message import decode as decode
from rankzero.channel.message import encode as encode

NEVER = sys.maxsize
"""Number in `NotCommitted` that is greater than that of any checkpoint."""

FINISHED = "finished-"
"""Beginning of the name of an empty file, behind which a rank's `Finished` follows the files of its checkpoints."""

# -- an agent to the driver ------------------------------------------------------------------------


class Join(Message, kind="join"):
    """An agent has started its workers, which import torch, and waits for its ranks."""

    host: str
    address: str
    hostname: str
    pid: int
    python: str
    gpus: list[str]
    workers: int


class Leaving(Message, kind="leaving"):
    """An agent stops its ranks although the driver has not asked for it; ``cause`` decides about a restart."""

    why: str
    cause: str


class Usage(Message, kind="usage"):
    """A sample of the CPU, memory, network and GPUs of an agent's host (`rankzero.host.usage`)."""

    sample: dict[str, Any]


class Log(Message, kind="log"):
    """Lines that a rank printed."""

    lines: list[str]


class Stack(Message, kind="stack"):
    """The stack of a rank, or a text that says why there is none: the reply to `Dump`."""

    text: str


class Position(Message, kind="position"):
    """The stack of a rank and the processor seconds that it has used: the reply to `Peek`."""

    stack: str
    cpu: float | None = None


class Exited(Message, kind="exited"):
    """A rank that was asked to stop has exited without an outcome."""


# -- a rank to the driver, through its agent -------------------------------------------------------


class Ready(Message, kind="ready"):
    """A rank has imported this version of torch."""

    torch: str


class Rendezvous(Message, kind="rendezvous"):
    """Rank 0 has bound the port at which the ranks meet."""

    port: int


class Entered(Message, kind="entered"):
    """A rank calls the user's code; the Unix times are those of its process's start, of torch's import, and now."""

    started: float
    imported: float
    time: float
    torch: str


class Beat(Message, kind="beat"):
    """The heartbeat of a rank, with the count of its progress so far."""

    progress: int


class Metrics(Message, kind="metric"):
    """Reports of a rank: the metrics and the Unix time of each."""

    rows: list[tuple[dict[str, Any], float]]


class PartKind(Message, kind="checkpoint-kind"):
    """A rank of several reports its first checkpoint, with the fact whether its checkpoints are sharded."""

    sharded: bool


class Part(Message, kind="checkpoint"):
    """A rank has written its part of a checkpoint.

    Attributes:
        index: Number of the checkpoint within the attempt.
        shared: True if ``path`` is in the run directory or its object store.
        positions: Positions in datasets that the checkpoint may hold.
        pieces: Index of a sharded state.
        has_result: True if this rank had set the value of the run by then: `rankzero.train.set_result`.
        upload: Name under which the agent sends the part over the channel.
    """

    id: str
    index: int
    file: str
    path: str
    shared: bool
    format: str
    size: int
    sha256: str
    sharded: bool
    metrics: dict[str, Any]
    time: float
    positions: dict[str, Any] = field(default_factory=dict)
    pieces: str | None = None
    has_result: bool = False
    upload: str | None = None


class PartFailed(Message, kind="checkpoint-failed"):
    """A rank could not write its part of a checkpoint."""

    index: int


class Damaged(Message, kind="checkpoint-damaged"):
    """A rank has found that a file of a committed checkpoint is not the one that was written."""

    id: str


class Returned(Message, kind="returned"):
    """The user's code has returned in a rank, before the rank was asked to stop."""

    time: float


class Finished(Message, kind="commit"):
    """A rank has written everything that the run needs from it.

    Attributes:
        result: The value of rank 0: ``format``, ``size``, ``digest``, ``path`` of its file, ``summary``; and ``value``
            if it is small JSON.
    """

    time: float
    result: dict[str, Any] | None = None


class Failed(Message, kind="failure"):
    """The facts about a rank that has failed.

    Attributes:
        exception_type: None if the process died without an exception.
        exit_code: Exit code of the process; None if a signal ended it.
        collateral: True if the exception looks like a consequence of another rank's death.
        cause: ``"no-torch"`` or None.
        retryable: True if the user's code asked for another attempt.
        matched: The entry of the job's ``restart_on`` that the exception matches; None if no entry does.
        log_tail: The last lines that the rank printed, oldest first.
    """

    time: float
    exception_type: str | None = None
    message: str = ""
    traceback: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    collateral: bool = False
    cause: str | None = None
    retryable: bool = False
    matched: str | None = None
    log_tail: list[str] = field(default_factory=list)


# -- a rank to its agent ---------------------------------------------------------------------------


class PartBegun(Message, kind="checkpoint-begun"):
    """The user's code has reported a checkpoint, and the rank writes its part."""

    index: int


class Fetch(Message, kind="fetch"):
    """A rank requests a file that the driver offers; the reply is `Fetched`."""

    name: str


# -- the driver to the agents; an agent forwards some of them to its ranks -------------------------


class Assign(Message, kind="assign"):
    """The ranks of an agent, and what it needs to start them.

    Attributes:
        run_directory: The submission's folder; ``run_token`` is the text of the file ``driver`` in it.
        context: The fields of `rankzero.train.TrainContext` that are the same for all ranks.
        checkpoint: Manifest of the checkpoint to start from.
    """

    master_addr: str
    run_directory: str
    run_token: str
    files: dict[str, dict[str, Any]]
    beat_interval: float
    context: dict[str, Any]
    first_rank: int
    node_rank: int
    sample_usage: bool
    checkpoint: dict[str, Any] | None = None


class Go(Message, kind="go"):
    """The addresses and the port of rank 0: the ranks connect, then call the user's code."""

    master_hosts: list[str]
    master_port: int
    one_host: bool


class Committed(Message, kind="checkpoint-committed"):
    """A checkpoint is committed, with the part of its manifest that the ranks of the agent need."""

    manifest: dict[str, Any]


class NotCommitted(Message, kind="checkpoint-lost"):
    """A checkpoint cannot be committed; with `NEVER`, no later one will be."""

    index: int


class Flush(Message, kind="flush"):
    """Requests the reports that a rank still holds, before the agent stops it."""


class Flushed(Message, kind="flushed"):
    """Answers `Flush`: the rank has sent every report that preceded it."""


class Dump(Message, kind="dump"):
    """Requests the stacks of all ranks, which they also write to their logs."""


class Peek(Message, kind="peek"):
    """Requests the positions of all ranks, which their logs do not show."""


class Stop(Message, kind="stop"):
    """Stops the ranks: SIGTERM now, SIGKILL after ``grace`` seconds."""

    grace: float


class End(Message, kind="end"):
    """Every rank has finished: the ranks run their exit handlers and exit."""


# -- an agent to a rank ----------------------------------------------------------------------------


class Start(Message, kind="start"):
    """The work of a rank.

    Attributes:
        modules: Directory of the modules that travelled with the job.
        code: The rank's copy of the user's code.
        refs: The name and the local path, if there is one, of each referenced file, by URI.
        result_directory: Directory to which rank 0 writes its value.
        shared: True if this host sees the submission's folder.
        context: The fields of the rank's `rankzero.train.TrainContext`.
        ports: First and last port that may be bound; None for any.
    """

    run_directory: str
    run_token: str
    shared: bool
    scratch: str
    master_addr: str = ""
    payload: str = ""
    result_directory: str = ""
    refs: dict[str, list[str | None]] = field(default_factory=dict)
    beat_interval: float = 0.0
    context: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    modules: str | None = None
    code: str | None = None
    datasets: str | None = None
    ports: list[int] | None = None
    checkpoint: dict[str, Any] | None = None


# -- the channel itself ----------------------------------------------------------------------------


class Fetched(Message, kind="fetched"):
    """A file that was requested from the driver is at ``path``, or cannot be had because of ``error``."""

    name: str
    path: str = ""
    error: str | None = None


class Uploaded(Message, kind="uploaded"):
    """A file of an agent is at ``path``, or was not received because of ``error``."""

    name: str
    path: str = ""
    error: str | None = None
    digest: str | None = None
    size: int | None = None


class Disconnected(Message, kind="disconnected"):
    """The connection of an agent has ended, and the agent may make a new one."""


class Reconnected(Message, kind="reconnected"):
    """A disconnected agent has made a new connection."""


class Lost(Message, kind="lost"):
    """An agent is lost, and no new connection of it is accepted."""
