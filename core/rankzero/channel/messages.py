"""The messages of driver, agents and ranks: one class for each kind, and its form on the wire.

On the wire a message is a line of JSON: ``[kind, local rank, fields]``. An agent adds the local rank of the sender to
the messages of its ranks; it is null in all others. Standard library only: this module travels to executors.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

LINE_MAX = 64 << 20  # Most bytes of one message

KINDS: dict[str, type[Message]] = {}
"""The class of each kind of message."""

NEVER = sys.maxsize
"""Number in `NotCommitted` that is greater than that of any checkpoint."""

M = TypeVar("M", bound="Message")

_to_json = json.JSONEncoder(separators=(",", ":")).encode


class MessageError(ValueError):
    """A line that is no message, or is too long."""


class Message:
    """The base of all messages, which are frozen dataclasses."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def facts(self) -> dict[str, Any]:
        """Returns the fields whose value is not None."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def kind(cls: type[M]) -> type[M]:
    """Makes a class a kind of message. `Message` has what each of them would otherwise compile at its import."""
    KINDS[cls.__name__] = made = dataclass(frozen=True, eq=False, repr=False)(cls)
    return made


def encode(message: Message, local_rank: int | None = None) -> bytes:
    """Returns the line of a message.

    Args:
        message: The message.
        local_rank: The rank that sent it, if an agent forwards it.

    Raises:
        MessageError: it is too long.
    """
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
    if not isinstance(local_rank, int | None):
        raise MessageError(f"{local_rank!r} is no local rank")
    return message, local_rank


class Decoder:
    """Splits received bytes, in pieces of any size, into messages."""

    def __init__(self, limit: int = LINE_MAX) -> None:
        self._limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[tuple[Message, int | None]]:
        """Returns the messages that these bytes complete, with the local rank of each sender. Raises MessageError."""
        first, *others = data.split(b"\n")
        self._rest += first
        if len(self._rest) > self._limit:
            raise MessageError(f"a message is longer than {self._limit} bytes")
        if not others:
            return []
        lines = [bytes(self._rest), *others[:-1]]
        self._rest = bytearray(others[-1])
        return [decode(line) for line in lines]


# -- an agent to the driver ------------------------------------------------------------------------


@kind
class Join(Message):
    """An agent has started its workers, which import torch, and waits for its ranks."""

    host: str
    address: str
    hostname: str
    pid: int
    python: str
    gpus: list[str]
    workers: int


@kind
class Leaving(Message):
    """An agent stops its ranks although the driver has not asked for it; ``cause`` decides about a restart."""

    why: str
    cause: str


@kind
class Usage(Message):
    """A sample of the CPU, memory, network and GPUs of an agent's host (`rankzero.host.usage`)."""

    sample: dict[str, Any]


@kind
class Log(Message):
    """Lines that a rank printed."""

    lines: list[str]


@kind
class Stack(Message):
    """The reply to `Dump`.

    Attributes:
        text: The stack of the rank, or a text that says why there is none.
        cpu: Processor seconds that the rank has used; None if it is not known.
    """

    text: str
    cpu: float | None = None


@kind
class Exited(Message):
    """A rank that was asked to stop has exited without an outcome."""


# -- a rank to the driver, through its agent -------------------------------------------------------


@kind
class Ready(Message):
    """A rank has imported torch."""


@kind
class Rendezvous(Message):
    """Rank 0 has bound the port at which the ranks meet."""

    port: int


@kind
class Entered(Message):
    """A rank calls the user's code; the Unix times are those of its process's start, of torch's import, and now."""

    started: float
    imported: float
    time: float
    torch: str


@kind
class Beat(Message):
    """The heartbeat of a rank, with the count of its progress so far."""

    progress: int


@kind
class Metrics(Message):
    """Reports of a rank: the metrics and the Unix time of each."""

    rows: list[tuple[dict[str, Any], float]]


@kind
class Part(Message):
    """A rank has written its part of a checkpoint.

    Attributes:
        index: Number of the checkpoint within the attempt.
        shared: True if ``path`` is in the run directory or its object store.
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
    has_result: bool = False
    upload: str | None = None


@kind
class PartFailed(Message):
    """A rank could not write its part of a checkpoint."""

    index: int


@kind
class Damaged(Message):
    """A rank has found that a file of a committed checkpoint is not the one that was written."""

    id: str


@kind
class Returned(Message):
    """The user's code has returned in a rank, before the rank was asked to stop."""

    time: float


@kind
class Finished(Message):
    """A rank has written everything that the run needs from it.

    Attributes:
        result: The value of rank 0: ``format``, ``size``, ``digest``, ``path`` of its file, ``summary``; and ``value``
            if it is small JSON.
    """

    time: float
    result: dict[str, Any] | None = None


@kind
class Failed(Message):
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


@kind
class PartBegun(Message):
    """The user's code has reported a checkpoint, and the rank writes its part."""

    index: int


@kind
class Fetch(Message):
    """A rank requests a file that the driver offers; the reply is `Fetched`."""

    name: str


# -- the driver to the agents; an agent forwards some of them to its ranks -------------------------


@kind
class Assign(Message):
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


@kind
class Go(Message):
    """The addresses and the port of rank 0: the ranks connect, then call the user's code."""

    master_hosts: list[str]
    master_port: int
    one_host: bool


@kind
class Committed(Message):
    """A checkpoint is committed, with the part of its manifest that the ranks of the agent need."""

    manifest: dict[str, Any]


@kind
class NotCommitted(Message):
    """A checkpoint cannot be committed; with `NEVER`, no later one will be."""

    index: int


@kind
class Flush(Message):
    """Requests the reports that a rank still holds, before the agent stops it; the rank sends it back behind them."""


@kind
class Dump(Message):
    """Requests the stacks of all ranks. Their logs show them, too, unless it is ``quiet``."""

    quiet: bool = False


@kind
class Stop(Message):
    """Stops the ranks: SIGTERM now, SIGKILL after ``grace`` seconds."""

    grace: float


@kind
class End(Message):
    """Every rank has finished: the ranks run their exit handlers and exit."""


# -- an agent to a rank ----------------------------------------------------------------------------


@kind
class Start(Message):
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


@kind
class Fetched(Message):
    """A file that was requested from the driver is at ``path``, or cannot be had because of ``error``."""

    name: str
    path: str = ""
    error: str | None = None


# -- both ends of a connection ---------------------------------------------------------------------


@kind
class Ping(Message):
    """The other end is alive."""


@kind
class Bye(Message):
    """An agent has sent everything, and closes its connection."""
