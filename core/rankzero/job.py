"""`Job`: the description of a run as pure data, validated before anything starts."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rankzero.bounds import EXIT_TIMEOUT, STOP_GRACE
from rankzero.errors import InvalidJobError, RunNotFoundError

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,199}")
_PAIR = 2
BACKENDS = ("auto", "nccl", "gloo", None)

WorldSize = int | tuple[int, int]
"""Number of ranks, or for an elastic job the smallest and the largest."""

NumProcesses = WorldSize | Literal["auto"]
"""World size of a launcher; ``"auto"`` is the number of slots of its engine."""

AUTO: Literal["auto"] = "auto"


PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
"""``major.minor`` of this interpreter."""


@dataclass(frozen=True)
class Job:
    """The description of a run, which is written into the run directory as ``job.json``.

    Attributes:
        run_id: Name of the run and of its directory.
        name: Display name: that of the function or script.
        num_processes: World size; for an elastic job the largest.
        min_processes: The smallest world size of an elastic job; None if the size is fixed.
        processes_per_task: Workers in one Spark task.
        cpus_per_process: Cores of each worker; None: the engine's settings decide.
        use_gpu: True assigns one GPU to each worker.
        backend: ``"auto"``, ``"nccl"``, ``"gloo"`` or None.
        timeout: Seconds the run may take, all attempts together, or None.
        start_timeout: Seconds until every rank of an attempt must have started.
        hang_timeout: Seconds without progress of any rank after which an attempt ends, or None.
        orphan_timeout: Seconds without a follower after which the run ends, or None.
        max_restarts: New attempts after a killed rank, a lost host, a hang or a `RetryableError`.
        max_preemptions: New attempts after a preemption.
        stop_grace: Seconds between SIGTERM and SIGKILL.
        exit_timeout: Seconds that exit handlers and threads of a rank get after it has returned.
        ports: First and last port that rankzero may listen on, or None.
        checkpoints: Retention of checkpoints: the fields of `CheckpointConfig`.
        warm_start: True if ranks may be forks of a process that has torch loaded.
        encrypt: True encrypts the connections between agents and driver; None: if the engine encrypts its own.
        params: The arguments by name, as short plain values: see `RunHandle.params`.
        code_version: The user's replacement for the code in the identity, or None.
        labels: The caller's labels of the run, such as the task that started it.
        prices: The submitter's prices of an hour of ``gpu`` and ``core``, in ``currency``; see `rankzero.report.cost`.
        owner: Process with which the run ends (``pid``, ``start``, ``namespace``); None if it ends with none.
        submission: Number of earlier submissions of this run id.
        nonce: Random digits of this submission, since the numbers restart when the directory was removed.
        first_attempt: Number of this submission's first attempt.
        fresh_since: First attempt whose checkpoints count: the training of earlier ones was delivered.
        identity: Digest of code, arguments and world size: `rankzero.submit.identity`. Its parts are in
            ``submissions/N/identity.json``.
        generation: The orchestrator's chain of automatic retries that this submission belongs to.
        log_starts: By rank (as text, for JSON): piece and offset at which its log lines of this submission begin.
        engine: The engine's specification, without secrets.
        files: Name to location, size and checksum of the files that the workers need.
        queries: Datasets that the driver has Spark compute: name to table or query.
        python: ``major.minor`` of the Python that made the payload.
        torch: Version of torch where the payload was made; None if it was not installed.
        created: Unix time of the submission.
    """

    run_id: str
    name: str
    num_processes: int
    processes_per_task: int
    use_gpu: bool
    backend: str | None
    timeout: float | None
    start_timeout: float
    engine: dict[str, Any]
    min_processes: int | None = None
    cpus_per_process: int | None = None
    hang_timeout: float | None = None
    orphan_timeout: float | None = None
    max_restarts: int = 0
    max_preemptions: int = 0
    stop_grace: float = STOP_GRACE
    exit_timeout: float = EXIT_TIMEOUT
    ports: list[int] | None = None
    checkpoints: dict[str, Any] = field(default_factory=dict)
    warm_start: bool = True
    encrypt: bool | None = None
    params: dict[str, Any] = field(default_factory=dict)
    code_version: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    prices: dict[str, Any] = field(default_factory=dict)
    owner: dict[str, Any] | None = None
    submission: int = 0
    nonce: str = ""
    first_attempt: int = 0
    fresh_since: int = 0
    identity: str = ""
    generation: str = ""
    log_starts: dict[str, list[int]] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    queries: dict[str, str] = field(default_factory=dict)
    python: str = PYTHON
    torch: str | None = None
    created: float = field(default_factory=time.time)

    def encrypts(self, *, by_default: bool) -> bool:
        """Returns True if connections between agents and driver are encrypted; ``by_default`` applies to None."""
        return by_default if self.encrypt is None else self.encrypt

    @property
    def num_tasks(self) -> int:
        """Number of tasks; for an elastic job the largest."""
        return self.num_processes // self.processes_per_task

    @property
    def least_processes(self) -> int:
        """The smallest world size of the job."""
        return self.num_processes if self.min_processes is None else self.min_processes

    @property
    def least_tasks(self) -> int:
        """Smallest number of tasks with which an attempt starts."""
        return self.least_processes // self.processes_per_task

    @property
    def world_size(self) -> WorldSize:
        """The world size that `Launcher` was given, or the one that ``"auto"`` was resolved to."""
        return self.num_processes if self.min_processes is None else (self.min_processes, self.num_processes)

    @property
    def world(self) -> str:
        """The world size as text: ``4`` or ``2 to 8``."""
        return describe_world(self.world_size)

    def sized(self, num_tasks: int) -> Job:
        """Returns the job of an attempt with the given number of tasks."""
        return dataclasses.replace(self, num_processes=num_tasks * self.processes_per_task, min_processes=None)

    def resolved_backend(self) -> str | None:
        """Returns the backend; for ``"auto"``, nccl with GPUs and else gloo."""
        return ("nccl" if self.use_gpu else "gloo") if self.backend == "auto" else self.backend

    def to_json(self) -> bytes:
        """Returns the job as JSON, for `from_json`."""
        # With indent= the encoder of json is not the one written in C.
        lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in vars(self).items())
        return "{{\n{}\n}}".format(",\n".join(lines)).encode()

    @staticmethod
    def from_json(data: bytes) -> Job:
        """Rebuilds a job from the JSON of `to_json`. Raises RunNotFoundError if this version cannot read it."""
        try:
            facts = json.loads(data)
            if found := strange(facts, {name: kind for name, kind in _KINDS.items() if name in facts}):
                raise ValueError(found)
            known = {field.name for field in dataclasses.fields(Job)}
            # A live run of a later version may have further fields.
            return Job(**{name: value for name, value in facts.items() if name in known})
        except (AttributeError, TypeError, ValueError) as error:
            raise RunNotFoundError(f"job.json was written by another version of rankzero: {error}") from None


# Types of the fields that readers use.
_KINDS: dict[str, type | tuple[type, ...]] = {
    "run_id": str,
    "name": str,
    "created": (int, float),
    "cpus_per_process": (int, type(None)),
    "params": dict,
    "labels": dict,
    "prices": dict,
    "engine": dict,
}


def strange(facts: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]]) -> str | None:
    """Returns a sentence about the first fact of a wrong type; None if there is none.

    Args:
        facts: Values from a file, whose author is unknown.
        kinds: Expected types by name; a missing fact counts as None.
    """
    found = (name for name, kind in kinds.items() if not isinstance(facts.get(name), kind))
    return next((f"{name} is {facts.get(name)!r:.100}" for name in found), None)


def new_run_id(name: str) -> str:
    """Returns a new run id: time, display name, and random digits that make it unique."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:40] or "run"
    return f"{time.strftime('%Y%m%dT%H%M%S')}-{stem}-{secrets.token_hex(4)}"


def check_run_id(run_id: str | None) -> None:
    """Raises InvalidJobError unless the id can name a directory on every file system."""
    if run_id is not None and not (isinstance(run_id, str) and _RUN_ID.fullmatch(run_id)):
        raise InvalidJobError(
            f"run_id {run_id!r} cannot name a directory: use letters, digits and . _ = + -, "
            "200 characters at most, starting with a letter or digit"
        )


def world_bounds(num_processes: WorldSize) -> tuple[int, int]:
    """Returns the smallest and the largest world size."""
    return (num_processes, num_processes) if isinstance(num_processes, int) else num_processes


def describe_world(num_processes: NumProcesses) -> str:
    """Returns a world size as text: ``4``, ``2 to 8`` or ``auto``."""
    return "{} to {}".format(*num_processes) if isinstance(num_processes, tuple) else str(num_processes)


def check_counts(num_processes: object, processes_per_task: object) -> WorldSize:
    """Checks and returns the world size.

    Args:
        num_processes: The number of ranks, or the smallest and the largest.
        processes_per_task: Ranks of one task.

    Raises:
        InvalidJobError: a count is no positive integer, or ``processes_per_task`` does not divide the world size.
    """
    is_pair = isinstance(num_processes, (tuple, list))
    pair: list[Any] = list(num_processes) if isinstance(num_processes, (tuple, list)) else [num_processes]
    if is_pair and not (len(pair) == _PAIR and all(type(count) is int for count in pair) and 0 < pair[0] <= pair[1]):
        raise InvalidJobError(
            f"num_processes is {num_processes!r}; an elastic world has a smallest and a largest size, such as (2, 8)"
        )
    for name, value in (("num_processes", pair[0]), ("processes_per_task", processes_per_task)):
        if type(value) is not int or value < 1:
            raise InvalidJobError(f"{name} is {value!r}; it must be a positive integer")
    for count in pair:
        if count % processes_per_task:
            raise InvalidJobError(
                f"processes_per_task={processes_per_task} does not divide num_processes={count}: "
                "every task runs the same number of workers"
            )
    return (pair[0], pair[1]) if is_pair else pair[0]


RestartOn = str | type[BaseException] | Callable[[BaseException], Any] | Sequence[str | type[BaseException]]
"""Exceptions of the user's code after which a run is restarted: texts, classes, or a function of the exception."""


def check_restart_on(value: object) -> Callable[[BaseException], Any] | tuple[str | type[BaseException], ...]:
    """Returns a function of the exception, or a tuple of texts and classes. Raises InvalidJobError for other values."""
    if callable(value) and not isinstance(value, type):
        return value
    items = tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else (value,)
    for item in items:
        is_class = isinstance(item, type) and issubclass(item, BaseException)
        if not (is_class or (isinstance(item, str) and item)):
            raise InvalidJobError(
                f"restart_on has {item!r}; give texts of errors and classes of exceptions, or one function of the "
                "exception that returns True for another attempt"
            )
    return items


def qualified_name(cls: type) -> str:
    """Returns the name of a class with its module, except for builtin classes."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def check_seconds(name: str, value: object, *, optional: bool = True) -> None:
    """Raises InvalidJobError unless the value is a positive, finite number of seconds."""
    if value is None and optional:
        return
    if type(value) not in (int, float) or not 0 < value < math.inf:  # type: ignore[operator]
        raise InvalidJobError(f"{name} is {value!r}; it must be a positive number of seconds")


def check_limit(name: str, value: object, *, optional: bool = False, least: int = 0) -> None:
    """Raises InvalidJobError unless the value is an integer of at least ``least``."""
    if value is None and optional:
        return
    if type(value) is not int or value < least:
        raise InvalidJobError(f"{name} is {value!r}; it must be a whole number, {least} or more")


def check_ports(value: object) -> None:
    """Raises InvalidJobError unless the value is None or a pair of ports, lowest first."""
    if value is None:
        return
    numbers = list(value) if isinstance(value, (tuple, list)) else []
    whole = all(type(number) is int and 0 < number < 65536 for number in numbers)
    if len(numbers) != 2 or not whole or numbers[0] > numbers[1]:
        raise InvalidJobError(f"ports is {value!r}; give the first and the last port, for example (40000, 40100)")


def check_flag(name: str, value: object) -> None:
    """Raises InvalidJobError for a flag that is not a bool."""
    if type(value) is not bool:
        raise InvalidJobError(f"{name} is {value!r}; it must be True or False")


def check_choices(use_gpu: object, backend: object) -> None:
    """Raises InvalidJobError for a flag that is not a bool or an unknown backend."""
    check_flag("use_gpu", use_gpu)
    if backend not in BACKENDS:
        raise InvalidJobError(f"backend is {backend!r}; choose one of {', '.join(map(repr, BACKENDS))}")
    if backend == "nccl" and not use_gpu:
        raise InvalidJobError('backend="nccl" needs use_gpu=True; on CPUs use "gloo" or "auto"')


def check_paths(name: str, value: object) -> None:
    """Raises InvalidJobError unless the value is a sequence of texts or paths, none of them empty."""
    if isinstance(value, (str, bytes, os.PathLike)) or not isinstance(value, Sequence):
        raise InvalidJobError(f"{name} is {value!r}; give a list")
    for item in value:
        if not isinstance(item, (str, os.PathLike)) or not str(item):
            raise InvalidJobError(f"{name} has {item!r}; give texts")


def check_strings(name: str, value: object) -> dict[str, str]:
    """Returns the mapping as a dict. Raises InvalidJobError unless it maps strings to strings."""
    pairs = {} if value is None else dict(value) if hasattr(value, "keys") else value  # type: ignore[call-overload]
    if not isinstance(pairs, dict):
        raise InvalidJobError(f"{name} is {value!r}; it must map strings to strings")
    for key, item in pairs.items():
        if not isinstance(key, str) or not isinstance(item, str):
            raise InvalidJobError(f"{name}[{key!r}] is {item!r}; names and values must be strings")
    return pairs
