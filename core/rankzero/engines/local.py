"""`LocalEngine`: one agent and its workers as processes of this machine, without a JVM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankzero.engines.base import CODE_PATH, AgentConfig, AgentGroup, Engine, EngineSession, OnEnd
from rankzero.engines.gpus import GpuClaims, local_gpus, require_local_gpus
from rankzero.errors import LOST, EngineError, RankZeroError, advised, require
from rankzero.host.usage import available_cores
from rankzero.job import Job
from rankzero.task.hold import hold

LOOPBACK = "127.0.0.1"
CUT_OFF = ("nothing was received from the driver for", "no driver was found on port")
"""Texts of the errors of an agent that lost or did not find its driver, after which a restart may succeed."""


@dataclass(frozen=True)
class LocalEngine(Engine):
    """Runs all ranks on this machine, as one task. ``local_rank`` equals ``rank``."""

    prefers_own_process = False

    def check(self, job: Job) -> None:
        """Raises InsufficientSlotsError if there are fewer GPUs than ranks, and InvalidJobError without torch."""
        # The ranks have this Python, too.
        require("the ranks need", "torch", "torch")
        if job.use_gpu:
            require_local_gpus(job.least_processes)

    def num_processes(self, processes_per_task: int, *, use_gpu: bool) -> int:
        """Returns one rank for each GPU or core of this machine."""
        if use_gpu:
            require_local_gpus(processes_per_task)
        places = len(local_gpus()) if use_gpu else available_cores()
        return places // processes_per_task * processes_per_task or processes_per_task

    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns ``{"kind": "local"}``; no part is private."""
        return {"kind": "local"}, {}

    def open(self, job: Job, env: Mapping[str, str]) -> LocalSession:
        """Returns a session on this machine."""
        self.check(job)
        return LocalSession(job)


class LocalSession(EngineSession):
    """Places one agent, which starts all ranks."""

    bind_host = LOOPBACK

    def __init__(self, job: Job) -> None:
        self._job = job
        self._gpus = local_gpus() if job.use_gpu else []
        self._claims = GpuClaims()
        self.driver_hosts = [LOOPBACK]
        self.place = "this machine's GPUs, some of which other runs use" if job.use_gpu else "this machine"
        # Processes are not limited, GPUs are.
        self.most_slots = len(self._gpus) // job.processes_per_task if job.use_gpu else None

    def slots(self) -> int:
        """Returns the tasks for which other runs leave GPUs; without GPUs, all tasks of the job."""
        if not self._job.use_gpu:
            return self._job.num_tasks
        return len(self._claims.free(self._gpus)) // self._job.processes_per_task

    def num_agents(self, num_tasks: int) -> int:
        """Returns 1, since one agent starts all ranks."""
        return 1

    def reserve(self, num_tasks: int) -> bool:
        """Locks a GPU for each rank."""
        count = num_tasks * self._job.processes_per_task
        return not self._job.use_gpu or self._claims.take(self._gpus, count)

    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> LocalGroup:
        """Starts the agent, which a thread of this process watches."""
        workers = num_tasks * self._job.processes_per_task
        return LocalGroup(
            {
                **config,
                "task": 0,
                "host": LOOPBACK,
                "workers": workers,
                "gpus": self._claims.held,
                "cores": (self._job.cpus_per_process or 0) * workers or available_cores(),
                "zygotes": 2,
                "code_path": CODE_PATH,
            },
            on_end,
        )

    def close(self) -> None:
        """Releases this run's claims of GPUs."""
        self._claims.release()


class LocalGroup(AgentGroup):
    """The one agent of a local attempt."""

    def __init__(self, config: AgentConfig, on_end: OnEnd) -> None:
        super().__init__()
        self._agent: Any = None
        self._cancelled = False
        self._hold(lambda: hold(config, self._on_start), on_end)

    def _on_start(self, agent: Any) -> None:
        self._agent = agent
        if self._cancelled:
            agent.kill()

    def cancel(self) -> None:
        """Kills the agent, even one that is not started yet; its ranks die with it, and `hold` ends their children."""
        self._cancelled = True
        if self._agent:
            self._agent.kill()

    def explain(self, error: BaseException) -> RankZeroError:
        """Returns the agent's error; its cause is a loss if the agent was killed or lost its driver."""
        text = str(error)
        is_lost = "ended by signal" in text or any(words in text for words in CUT_OFF)
        return EngineError(advised(text), cause=LOST if is_lost else None, code="RZ-2003")
