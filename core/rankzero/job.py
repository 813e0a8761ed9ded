"""`Job`: the description of a run as pure data, validated before anything starts."""

from __future__ import annotations

import json
import re
import secrets
import sys
import time
from dataclasses import dataclass, field, fields
from typing import Any

from rankzero.bounds import EXIT_TIMEOUT, STOP_GRACE
from rankzero.errors import RunNotFoundError
from rankzero.kinds import MODE, POSITIVE, TEXT, WorldSize

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
"""``major.minor`` of this interpreter."""

FORMAT = 3
"""Version of the files of a run directory. A reader refuses another one."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Decides which checkpoints of a run are kept.

    The newest is always kept, since a restart needs it. While ranks train, the one before it and the one from which
    they started are kept, too, since they may be reading these.

    Attributes:
        num_to_keep: Number of checkpoints to keep; None keeps all.
        metric: Keeps the checkpoints whose reports have the best values of this metric; None keeps the newest. A
            checkpoint whose report lacks the metric, or has nan, is worse than any other.
        mode: ``"min"`` if smaller values of the metric are better, ``"max"`` if larger ones are.

    Raises:
        InvalidJobError: a value is wrong.
    """

    num_to_keep: int | None = 2
    metric: str | None = None
    mode: str = "min"

    def __post_init__(self) -> None:
        if self.num_to_keep is not None:
            # A plain number, which can be written as JSON.
            object.__setattr__(self, "num_to_keep", POSITIVE.check("num_to_keep", self.num_to_keep))
        if self.metric is not None:
            TEXT.check("metric", self.metric)
        MODE.check("mode", self.mode)


@dataclass(frozen=True)
class Job:
    """The description of a run, which is written into the run directory.

    `rankzero.options` describes the fields that are options of a run; here each has its decided value.

    Attributes:
        run_id: Name of the run and of its directory.
        name: Display name: that of the function or script.
        num_processes: World size; for an elastic job the largest.
        min_processes: The smallest world size of an elastic job; None if the size is fixed.
        params: The arguments by name, as short plain values: see `RunHandle.params`.
        prices: The submitter's prices of an hour of ``gpu`` and ``core``, in ``currency``.
        owner: Process with which the run ends (``pid``, ``start``, ``namespace``); None if it ends with none.
        submission: Number of earlier submissions of this run id.
        nonce: Random digits of this submission, since the numbers restart when the directory was removed.
        earlier: Names of the folders of earlier submissions of this training, the first one first.
        first_attempt: Number of this submission's first attempt.
        beginning: Where this submission began and why: "resumed from checkpoint ..." or "from scratch: ...".
        metrics: The last values of the metrics that earlier submissions of the same training reported.
        identity: Digest of code, arguments and world size: `rankzero.submit.pack`.
        identity_parts: Name and checksum of each part of the identity.
        generation: The orchestrator's chain of automatic retries that this submission belongs to.
        queue_time: Seconds that a cluster may take to start the driver; 0 for a driver that this host starts.
        engine: The engine's specification, without secrets.
        files: Name to location, size and checksum of the files that the workers need.
        queries: Datasets that the driver has Spark compute: name to table or query.
        python: ``major.minor`` of the Python that made the payload.
        created: Unix time of the submission.
        format: `FORMAT` of the version of rankzero that submitted the job.
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
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    earlier: list[str] = field(default_factory=list)
    first_attempt: int = 0
    beginning: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    identity: str = ""
    identity_parts: dict[str, str] = field(default_factory=dict)
    generation: str = ""
    queue_time: float = 0.0
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    queries: dict[str, str] = field(default_factory=dict)
    python: str = PYTHON
    created: float = field(default_factory=time.time)
    format: int = FORMAT

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
    def world(self) -> str:
        """The world size as text: ``4`` or ``2 to 8``."""
        least = "" if self.min_processes is None else f"{self.min_processes} to "
        return f"{least}{self.num_processes}"

    def to_json(self) -> bytes:
        """Returns the job as JSON, for `from_json`."""
        # With indent= the encoder of json is not the one written in C.
        return json.dumps(vars(self), separators=(",\n", ": ")).encode()

    @staticmethod
    def from_json(data: bytes) -> Job:
        """Rebuilds a job from the JSON of `to_json`. Raises RunNotFoundError if this version cannot read it."""
        try:
            facts = json.loads(data)
            if facts.get("format") != FORMAT:
                raise RunNotFoundError(
                    f"the job has format {facts.get('format')}, and this version of rankzero reads format {FORMAT}: "
                    "use the version that submitted the run"
                )
            known = {field.name for field in fields(Job)}
            # A live run of a later version may have further fields.
            return Job(**{name: value for name, value in facts.items() if name in known})
        except (AttributeError, TypeError, ValueError) as error:
            raise RunNotFoundError(f"the job was written by another version of rankzero: {error}") from None


def new_run_id(name: str) -> str:
    """Returns a new run id: time, display name, and random digits that make it unique."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:40] or "run"
    return f"{time.strftime('%Y%m%dT%H%M%S')}-{stem}-{secrets.token_hex(4)}"


def world_bounds(num_processes: WorldSize) -> tuple[int, int]:
    """Returns the smallest and the largest world size."""
    return (num_processes, num_processes) if isinstance(num_processes, int) else num_processes


def qualified_name(cls: type) -> str:
    """Returns the name of a class with its module, except for builtin classes."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
