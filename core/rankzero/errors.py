"""The public exceptions, and advice about errors of other software.

Each message names the wrong value and the next thing to do.

An error that ends a run is written into the run directory as JSON and rebuilt by each process
that attaches; exception objects are never sent between processes. The facts of a class are its annotated attributes
that have no value in the class.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import socket
import sys
from collections.abc import Iterator
from typing import Any, ClassVar, Self


def encodable(text: str) -> str:
    r"""Returns the text with lone surrogates and NUL characters written out as escapes, for every log and database.

    `os.listdir` returns lone surrogates for file names that are not UTF-8. A log in UTF-8 or JSON cannot store them,
    and a PostgreSQL column cannot store a NUL.
    """
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


class RankZeroError(Exception):
    """Base of all errors that rankzero raises on purpose.

    Attributes:
        code: A stable name of the problem, which docs/errors.md explains.
        directory: The run directory of the run that the error is about; None if there is no run.
    """

    directory: str | None = None
    code: str = "RZ-0000"
    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        # A subclass of a user's own has its own attributes.
        if cls.__module__ == __name__:
            cls._fields = (*cls._fields, *(name for name in cls.__annotations__ if name not in vars(cls)))

    def __init__(self, message: str = "", *, code: str = "", **facts: Any) -> None:
        self.code = code or type(self).code
        # Messages contain texts of users and files, which an orchestrator's log must be able to store.
        self.message = encodable(str(message))
        super().__init__(self.message)
        for name in self._fields:
            setattr(self, name, _encodable(facts.pop(name, None)))
        if facts:
            raise TypeError(f"{type(self).__name__} has no field {sorted(facts)}")

    @property
    def run_id(self) -> str | None:
        """Name of the run, or None."""
        return self.directory and self.directory.rsplit("/", 1)[-1]

    def locate(self, directory: str) -> Self:
        """Records the run directory, which tracebacks then show, too, and returns the error."""
        if self.directory is None:
            self.directory = directory
            self.add_note(f"run directory: {directory}\n{self.code}: docs/errors.md#{self.code.lower()}")
        return self

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return error_from_json, (self.to_json(),)

    def to_json(self) -> dict[str, Any]:
        """Returns the facts as plain JSON values, for `error_from_json`."""
        facts = {name: getattr(self, name) for name in self._fields}
        located = {"directory": self.directory} if self.directory else {}
        return {"type": type(self).__name__, "code": self.code, "message": self.message, **facts, **located}


@contextlib.contextmanager
def located(directory: str) -> Iterator[None]:
    """Context manager that records the run directory in errors of the block; see `RankZeroError.locate`."""
    try:
        yield
    except RankZeroError as error:
        error.locate(directory)
        raise


def _encodable(fact: Any) -> Any:
    if isinstance(fact, str):
        return encodable(fact)
    if isinstance(fact, list):
        return [_encodable(item) for item in fact]
    return {name: _encodable(item) for name, item in fact.items()} if isinstance(fact, dict) else fact


class InvalidJobError(RankZeroError, ValueError):
    """Raised before anything starts if the job cannot be run as described."""

    code = "RZ-1000"


class EngineError(RankZeroError, RuntimeError):
    """Raised if the engine (local processes or Spark) cannot start or keep the agents.

    Attributes:
        cause: ``"lost"`` (a host, executor, agent or its connection was lost), ``"preempted"`` (the
            cluster took the slot back), or None: the engine rejected the job, and would do so again.
    """

    code = "RZ-2000"
    cause: str | None


class InsufficientSlotsError(EngineError):
    """Raised if the cluster has fewer task slots (or GPUs) than the job needs."""

    code = "RZ-2100"


class StartTimeoutError(EngineError, TimeoutError):
    """Raised if some rank did not start within ``start_timeout`` seconds."""

    code = "RZ-2200"
    missing: list[str] | None


class WorkerFailedError(RankZeroError, RuntimeError):
    """Raised if a rank failed. The fields describe the failure that came first.

    Attributes:
        rank: Global rank of the first cause.
        host: Host of that rank.
        exception_type: Qualified name of the exception, or None if the process died without one.
        traceback: Formatted traceback of the rank, or None.
        exit_code: Exit code of the process, or None if it was killed by a signal.
        signal: Name of the signal that killed it (``"SIGKILL"``), or None.
        log_tail: The last log lines of that rank, oldest first.
        others: Later failures of other ranks, one line each.
        cause: Reason by which a restart is decided: ``"killed"``, ``"preempted"``, ``"lost"`` (it exited without a
            word, or only consequences are known), ``"retryable"``, ``"matched"`` (an exception that ``restart_on``
            names), or None for other exceptions of the user's code.
    """

    code = "RZ-3000"
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
    """Raised by a training function to request a restart from the last checkpoint, within ``max_restarts``.

    Every other exception of the user's code, unless ``restart_on`` names it, ends the run without a restart.
    """

    code = "RZ-3100"


class HangError(RankZeroError, TimeoutError):
    """Raised if no rank made progress for ``hang_timeout`` seconds.

    Attributes:
        stacks: By rank, the Python stack of its main thread, or the reason why there is none.
        missing: Ranks that had not joined the collective in which others waited; empty if none waited.
    """

    code = "RZ-4000"
    stacks: dict[str, str] | None
    missing: list[int] | None


class RunTimeoutError(RankZeroError, TimeoutError):
    """Raised if the run took longer than ``timeout`` seconds and was ended."""

    code = "RZ-4100"


class RunCancelledError(RankZeroError):
    """Raised if the run was cancelled.

    Attributes:
        requested: True after a cancel request; else the driver was ended, or no process followed the run.
    """

    code = "RZ-5000"
    requested: bool | None


class ResultError(RankZeroError):
    """Raised if rank 0's value cannot be stored, found, verified or loaded.

    Attributes:
        is_damage: True if a file was found that is not the one that was recorded; else None.
    """

    code = "RZ-6000"
    is_damage: bool | None


class RunNotFoundError(RankZeroError, LookupError):
    """Raised if a directory contains no run."""

    code = "RZ-7000"


_BY_NAME = {
    name: each for name, each in globals().items() if isinstance(each, type) and issubclass(each, RankZeroError)
}


def error_from_json(facts: dict[str, Any]) -> RankZeroError:
    """Rebuilds an error from `RankZeroError.to_json`; an unknown type becomes the base class."""
    cls = _BY_NAME.get(facts.get("type", ""), RankZeroError)
    known = {name: facts[name] for name in cls._fields if name in facts}
    error = cls(str(facts.get("message", "")), code=str(facts.get("code", "")), **known)
    return error.locate(str(facts["directory"])) if facts.get("directory") else error


KILLED, LOST, PREEMPTED, HANG, RETRYABLE, MATCHED = "killed", "lost", "preempted", "hang", "retryable", "matched"
"""Reasons for the end of an attempt after which a restart may help; None is any other reason."""


# -- advice about errors of other software, and about packages that are missing --------------------

KNOWN_TEXTS: tuple[tuple[str, str], ...] = (
    (
        r"^ModuleNotFoundError: No module named '(?:horovod|sparkdl)\b",
        "Import rankzero.compat.horovod and rankzero.compat.horovod.torch instead: docs/migrate.md#horovod",
    ),
    (
        r"^ModuleNotFoundError: No module named '([^']+)'",
        "It is not installed for {python} on {host}, and no user module that travelled: those do that code imports by "
        "their names. Write `import {0}` in the training's own module, or install it there",
    ),
    (r"No module named 'pyarrow'|PyArrow .*must be installed", "Spark's executors have no pyarrow: install it there"),
    ("PYTHON_VERSION_MISMATCH", "set spark.pyspark.python to a Python of the driver's minor version on the executors"),
    (
        r'Cannot run program "([^"]+)"',
        "the executors have no Python at {0!r}: set spark.pyspark.python to one they have",
    ),
    (
        r"unable to allocate shared memory|unable to open shared memory object",
        "/dev/shm of the host is full: give its container more (docker run --shm-size=8g; on Kubernetes an emptyDir "
        "with medium Memory at /dev/shm), or use fewer workers of data loaders",
    ),
    ("No space left on device|Disk quota exceeded", "the store or a local disk (TMPDIR, spark.local.dir) is full"),
    ("^killed by SIGKILL", "often the kernel's out-of-memory killer"),
    ("^killed by SIGABRT", "often a NCCL timeout or a failed assertion in native code"),
    ("^killed by SIGSEGV", "a crash in native code; the log shows the Python stack"),
    ("^killed by SIGBUS", "often a full /dev/shm, or a result's file that was overwritten in place"),
    ("^killed by SIGTERM", "something outside of the run asked it to end"),
)
"""Patterns of texts, each with what to do. The first that matches counts; an exception's text begins with its type.

``{0}`` in an advice is the first group of the pattern; ``{python}`` and ``{host}`` are those of the current process.
"""


def known(text: str) -> tuple[str, str] | None:
    """Returns the line that is known of a text of other software, and what to do; None if there is none."""
    for pattern, advice in KNOWN_TEXTS:
        if found := re.search(pattern, text):
            start = text.rfind("\n", 0, found.start()) + 1
            line = text[start:].partition("\n")[0].strip()
            return line, advice.format(*found.groups(), python=sys.executable, host=socket.gethostname())
    return None


def advised(message: str, text: str = "") -> str:
    """Returns a message, followed by the advice about it, or about another text, if there is one."""
    found = known(text or message)
    return f"{message.rstrip('. ')}. {found[1][0].upper()}{found[1][1:]}" if found else message


def require(need: str, requirement: str, *modules: str) -> None:
    """Raises InvalidJobError, which names ``pip install``'s argument, unless modules are installed; imports none."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise InvalidJobError(f"{need} {' and '.join(missing)} here: pip install {requirement}")
