"""The messages of driver, agents and ranks: one class for each kind, and its form on the wire.

On the wire a message is a line of JSON: ``[kind, local rank, fields]``. An agent adds the local rank of the sender to
the messages of its ranks; it is null in all others. An empty line is a sign of life. In this order: what agents send to
the driver, what ranks send (`Transfer` to their agent), what the driver sends, what an agent sends to its ranks, and
its goodbye to the driver. Standard library only: this module travels to executors.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

LINE_MAX = 64 << 20  # Most bytes of one message

KINDS: dict[str, type[Message]] = {}
"""The class of each kind of message."""

NEVER = sys.maxsize
"""Number in `Lost` that is greater than that of any checkpoint."""

_to_json = json.JSONEncoder(separators=(",", ":")).encode


class MessageError(ValueError):
    """A line that is no message, or is too long."""


class Message:
    """The base of all messages, which are frozen dataclasses."""

    def __init_subclass__(cls) -> None:
        KINDS[cls.__name__] = cls


def encode(message: Message, local_rank: int | None = None) -> bytes:
    """Returns the line of a message, with the local rank of its sender. Raises MessageError if it is too long."""
    line = _to_json([type(message).__name__, local_rank, vars(message)]).encode() + b"\n"
    if len(line) > LINE_MAX:
        raise MessageError(f"a message of {len(line)} bytes is over the limit of {LINE_MAX}")
    return line


def decode(line: bytes) -> tuple[Message, int | None]:
    """Returns the message in a line, and the local rank of its sender. Raises MessageError."""
    try:
        name, local_rank, values = json.loads(line)
        message = KINDS[name](**values)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MessageError(f"{line[:100]!r} is no message: {type(error).__name__}: {error}") from None
    return message, local_rank


class Decoder:
    """Splits received bytes, in pieces of any size, into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[tuple[Message, int | None]]:
        """Returns the messages that these bytes complete, with the local rank of each sender. Raises MessageError."""
        first, *others = data.split(b"\n")
        self._rest += first
        if len(self._rest) > LINE_MAX:
            raise MessageError(f"a message is longer than {LINE_MAX} bytes")
        if not others:
            return []
        lines = [bytes(self._rest), *others[:-1]]
        self._rest = bytearray(others[-1])
        return [decode(line) for line in lines if line]


@dataclass(frozen=True)
class Join(Message):
    """An agent has started its workers, which import torch, and waits for its ranks."""

    host: str
    address: str
    hostname: str
    python: str
    gpus: list[str]
    workers: int


@dataclass(frozen=True)
class Leaving(Message):
    """An agent stops its ranks although the driver has not asked for it; ``cause`` decides about a restart."""

    why: str
    cause: str


@dataclass(frozen=True)
class Usage(Message):
    """A sample of the CPU, memory, network and GPUs of an agent's host (`rankzero.host.usage`)."""

    sample: dict[str, Any]


@dataclass(frozen=True)
class Log(Message):
    """Lines that a rank printed."""

    lines: list[str]


@dataclass(frozen=True)
class Stack(Message):
    """The reply to `Dump`: the stack of a rank's main thread, and the processor seconds that its process has used."""

    text: str
    cpu: float | None = None


@dataclass(frozen=True)
class Reached(Message):
    """A rank has reached a phase.

    Attributes:
        phase: ``"ready"``: it has imported torch; ``"bound"``: rank 0 has bound the port at which the ranks meet;
            ``"entered"``: it calls the user's code; ``"returned"``: that has returned before the rank was asked to
            stop; ``"exited"``: asked to stop, it has exited without an outcome.
        values: ``time``, the Unix time; of ``"entered"`` also ``started`` (its process), ``imported`` and ``torch``;
            of ``"bound"`` the ``port``.
    """

    phase: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Beat(Message):
    """The heartbeat of a rank, with the count of its progress so far."""

    progress: int


@dataclass(frozen=True)
class Metrics(Message):
    """Reports of a rank: the metrics and the Unix time of each."""

    rows: list[tuple[dict[str, Any], float]]


@dataclass(frozen=True)
class Part(Message):
    """A rank has written its part of a checkpoint.

    Attributes:
        has_result: True if this rank had set the value of the run by then: `rankzero.train.set_result`.
        loaded: `rankzero.run.checkpoints.loaded_sources` of rank 0.
        upload: Name under which the agent has sent the part over the channel; empty if the rank has stored it.
    """

    id: str
    index: int
    file: str
    format: str
    size: int
    sha256: str
    sharded: bool
    metrics: dict[str, Any]
    time: float
    has_result: bool = False
    loaded: dict[str, str] = field(default_factory=dict)
    upload: str = ""


@dataclass(frozen=True)
class Lost(Message):
    """A checkpoint will not be committed. To ranks, `NEVER` means that no whole one will be any more."""

    index: int


@dataclass(frozen=True)
class Damaged(Message):
    """A rank has found that a file of a committed checkpoint is not the one that was written."""

    id: str


@dataclass(frozen=True)
class Finished(Message):
    """A rank has written everything that the run needs from it.

    The value of rank 0 has ``format``, ``size``, ``digest``, ``path``, ``summary``; and ``value`` if it is small JSON.
    """

    time: float
    result: dict[str, Any] | None = None


@dataclass(frozen=True)
class Failed(Message):
    """The facts about a rank that has failed.

    Attributes:
        collateral: True if the exception looks like a consequence of another rank's death.
        cause: ``"no-torch"`` or None.
        retryable: True if the user's code asked for another attempt.
        matched: The entry of the job's ``restart_on`` that the exception matches; None if no entry does.
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


@dataclass(frozen=True)
class Transfer(Message):
    """A rank requests a file that the driver offers or, with a path, that its file is sent to the driver."""

    name: str
    path: str = ""


@dataclass(frozen=True)
class Assign(Message):
    """The ranks of an agent, and what it needs to start them. Rank 0 gets it, too, so that it binds before its `Start`.

    Attributes:
        run_directory: The submission's folder; ``run_token`` is the text of the file ``driver`` in it.
        context: The fields of `rankzero.train.TrainContext` that are the same for all ranks.
        checkpoint: Manifest of the checkpoint to start from.
        ports: First and last port that may be bound; None for any.
    """

    run_directory: str
    run_token: str
    master_addr: str = ""
    ports: list[int] | None = None
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    beat_interval: float = 0.0
    context: dict[str, Any] = field(default_factory=dict)
    first_rank: int = 0
    node_rank: int = 0
    sample_usage: bool = False
    checkpoint: dict[str, Any] | None = None


@dataclass(frozen=True)
class Go(Message):
    """The addresses and the port of rank 0: the ranks connect, then call the user's code."""

    master_hosts: list[str]
    master_port: int
    one_host: bool


@dataclass(frozen=True)
class Committed(Message):
    """A checkpoint is committed, with the part of its manifest that the ranks of the agent need."""

    manifest: dict[str, Any]


@dataclass(frozen=True)
class Dump(Message):
    """Requests the stacks of all ranks. Their logs show them, too, unless it is ``quiet``."""

    quiet: bool = False


@dataclass(frozen=True)
class Stop(Message):
    """Stops the ranks: SIGTERM now, SIGKILL after ``grace`` seconds."""

    grace: float


@dataclass(frozen=True)
class End(Message):
    """Every rank has finished: the ranks run their exit handlers and exit."""


@dataclass(frozen=True)
class Start(Assign):
    """The work of a rank: what its agent was assigned, with the rank's own context, and what this host has of it.

    Attributes:
        refs: The name and the local path, if there is one, of each referenced file, by URI.
        result_directory: Directory to which rank 0 writes its value.
        shared: True if this host sees the submission's folder.
        began: Unix time at which the agent began. The rank may have been forked long before.
    """

    shared: bool = False
    scratch: str = ""
    payload: str = ""
    result_directory: str = ""
    refs: dict[str, list[str | None]] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    modules: str | None = None
    code: str | None = None
    datasets: str | None = None
    began: float = 0.0
    exit_timeout: float = 0.0


@dataclass(frozen=True)
class Transferred(Message):
    """The reply to `Transfer`: the file is at ``path``, or was not transferred because of ``error``."""

    name: str
    path: str = ""
    error: str | None = None


@dataclass(frozen=True)
class Bye(Message):
    """An agent has sent everything, and closes its connection."""
