"""Every public exception. Each names the value that was wrong and the next thing to do.

An error that ends a run is written into the run directory as JSON and rebuilt by whoever
attaches, so each class lists its facts in ``_fields``; exception objects never cross a process.
"""

from __future__ import annotations

from typing import Any, ClassVar

from rankzero.texts import encodable


class RankZeroError(Exception):
    """Base of all errors that rankzero raises on purpose."""

    _fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str = "", **facts: Any) -> None:
        # The texts of users and files are in there, and an orchestrator's log must be able to store them.
        self.message = encodable(str(message))
        super().__init__(self.message)
        for name in self._fields:
            setattr(self, name, _encodable(facts.pop(name, None)))
        if facts:
            raise TypeError(f"{type(self).__name__} has no field {sorted(facts)}")

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return error_from_json, (self.to_json(),)

    def to_json(self) -> dict[str, Any]:
        """The facts as plain JSON values, for `error_from_json`."""
        facts = {name: getattr(self, name) for name in self._fields}
        return {"type": type(self).__name__, "message": self.message, **facts}


def _encodable(fact: Any) -> Any:
    if isinstance(fact, str):
        return encodable(fact)
    if isinstance(fact, list):
        return [_encodable(item) for item in fact]
    return {name: _encodable(item) for name, item in fact.items()} if isinstance(fact, dict) else fact


class InvalidJobError(RankZeroError, ValueError):
    """The job cannot be run as described. Raised before anything starts.

    Its messages, their causes and what to do: docs/errors.md#invalidjoberror
    """


class EngineError(RankZeroError, RuntimeError):
    """The engine (local processes or Spark) could not place or keep the agents.

    Its messages, their causes and what to do: docs/errors.md#engineerror

    Attributes:
        cause: ``"lost"`` (a host, executor, agent or its connection was lost), ``"preempted"`` (the
            cluster took the place back), or None: the engine refused, and would again.
    """

    _fields: ClassVar[tuple[str, ...]] = ("cause",)
    cause: str | None


class InsufficientSlotsError(EngineError):
    """The cluster has fewer task slots (or GPUs) than the job needs.

    Its messages, their causes and what to do: docs/errors.md#insufficientslotserror
    """

    _fields = ("cause", "needed", "available")
    needed: int | None
    available: int | None


class StartTimeoutError(EngineError, TimeoutError):
    """The ranks did not all start within ``start_timeout`` seconds.

    Its messages, their causes and what to do: docs/errors.md#starttimeouterror
    """

    _fields = ("cause", "missing")
    missing: list[str] | None


class WorkerFailedError(RankZeroError, RuntimeError):
    """A rank failed. The fields describe the failure that came first.

    Its messages, their causes and what to do: docs/errors.md#workerfailederror

    Attributes:
        rank: Global rank of the first cause.
        host: Host it ran on.
        exception_type: Qualified name of the exception, or None when the process died without one.
        traceback: Formatted traceback of the rank, or None.
        exit_code: Exit code of the process, or None when it was ended by a signal.
        signal: Name of the signal that ended it (``"SIGKILL"``), or None.
        log_tail: The last log lines of that rank, oldest first.
        others: What the other ranks reported after it, one line each.
        cause: What a restart is decided by: ``"killed"``, ``"preempted"``, ``"lost"``, ``"retryable"``, ``"matched"``
            (an exception that ``restart_on`` names), or None for any other exception of the user's code.
    """

    _fields = (
        "rank",
        "host",
        "exception_type",
        "traceback",
        "exit_code",
        "signal",
        "log_tail",
        "others",
        "cause",
    )
    rank: int | None
    host: str | None
    exception_type: str | None
    traceback: str | None
    exit_code: int | None
    signal: str | None
    log_tail: list[str] | None
    others: list[str] | None
    cause: str | None


class RetryableError(RankZeroError):
    """For training functions to raise: try again from the last checkpoint, if ``max_restarts`` allows.

    Every other exception of the user's code ends the run at once, since it would come again.

    Its messages, their causes and what to do: docs/errors.md#retryableerror
    """


class HangError(RankZeroError, TimeoutError):
    """No rank made progress for ``hang_timeout`` seconds.

    Its messages, their causes and what to do: docs/errors.md#hangerror

    Attributes:
        stacks: Where each rank stood, by rank: the Python stack of its main thread, or why there is none.
        missing: Ranks that had not joined the collective in which others waited; empty if none waited.
    """

    _fields = ("stacks", "missing")
    stacks: dict[str, str] | None
    missing: list[int] | None


class RunTimeoutError(RankZeroError, TimeoutError):
    """The run took longer than ``timeout`` seconds and was ended.

    Its messages, their causes and what to do: docs/errors.md#runtimeouterror
    """


class RunCancelledError(RankZeroError):
    """The run was cancelled.

    Its messages, their causes and what to do: docs/errors.md#runcancellederror

    Attributes:
        requested: True if somebody asked for it; else its driver was ended, or nobody followed the run.
    """

    _fields = ("requested",)
    requested: bool | None


class ResultError(RankZeroError):
    """Rank 0's value could not be stored, found, verified or loaded.

    Its messages, their causes and what to do: docs/errors.md#resulterror
    """


class RunNotFoundError(RankZeroError, LookupError):
    """No run lives in that directory.

    Its messages, their causes and what to do: docs/errors.md#runnotfounderror
    """


_BY_NAME: dict[str, type[RankZeroError]] = {
    cls.__name__: cls
    for cls in (
        RankZeroError,
        InvalidJobError,
        EngineError,
        InsufficientSlotsError,
        StartTimeoutError,
        WorkerFailedError,
        RetryableError,
        HangError,
        RunTimeoutError,
        RunCancelledError,
        ResultError,
        RunNotFoundError,
    )
}


def error_from_json(facts: dict[str, Any]) -> RankZeroError:
    """Rebuilds an error from `RankZeroError.to_json`; an unknown type becomes the base class."""
    cls = _BY_NAME.get(facts.get("type", ""), RankZeroError)
    known = {name: facts[name] for name in cls._fields if name in facts}
    return cls(str(facts.get("message", "")), **known)


KILLED, LOST, PREEMPTED, HANG, RETRYABLE, MATCHED = "killed", "lost", "preempted", "hang", "retryable", "matched"
"""Why an attempt ended, as far as a restart may help; None stands for everything else."""
