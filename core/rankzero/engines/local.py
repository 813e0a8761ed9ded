"""`LocalEngine`: one agent and its workers as processes of this machine. No JVM."""

from __future__ import annotations

import os
import subprocess
import threading
from dataclasses import dataclass
from typing import Any

import rankzero
from rankzero.engines.base import AgentConfig, AgentGroup, Engine, EngineSession, OnEnd
from rankzero.engines.gpus import GpuClaims, local_gpus, require_local_gpus
from rankzero.errors import LOST, EngineError, RankZeroError
from rankzero.host.cores import available_cores
from rankzero.job import Job
from rankzero.task.hold import hold

LOOPBACK = "127.0.0.1"
CUT_OFF = ("nothing was received from the driver for", "no driver was found on port")
"""What an agent says that lost its driver, or did not find it: another host, or another moment, may be better."""


@dataclass(frozen=True)
class LocalEngine(Engine):
    """Runs all ranks on this machine, as one task. ``local_rank`` equals ``rank``."""

    def check(self, job: Job) -> None:
        """Raises InsufficientSlotsError if there are fewer GPUs than ranks."""
        if job.use_gpu:
            require_local_gpus(job.least_processes)

    def num_processes(self, processes_per_task: int, *, use_gpu: bool) -> int:
        """A rank for each GPU or core of this machine."""
        if use_gpu:
            require_local_gpus(processes_per_task)
        places = len(local_gpus()) if use_gpu else available_cores()
        return places // processes_per_task * processes_per_task or processes_per_task

    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """``{"kind": "local"}``; nothing is private."""
        return {"kind": "local"}, {}

    @property
    def can_detach(self) -> bool:
        """Always: any process of this machine will do."""
        return True

    @property
    def prefers_own_process(self) -> bool:
        """No: nothing of the caller changes."""
        return False

    def open(self, job: Job) -> LocalSession:
        """A session on this machine."""
        self.check(job)
        return LocalSession(job)


class LocalSession(EngineSession):
    """Places one agent that owns all workers."""

    bind_host = LOOPBACK
    driver_host = LOOPBACK

    def __init__(self, job: Job) -> None:
        self._job = job
        self._gpus = local_gpus() if job.use_gpu else []
        self._claims = GpuClaims()

    @property
    def place(self) -> str:
        """With what limits the number of ranks here."""
        return "this machine's GPUs, of which other runs hold some" if self._job.use_gpu else "this machine"

    @property
    def most_slots(self) -> int | None:
        """What the GPUs allow; processes without one are as many as the job wants."""
        return len(self._gpus) // self._job.processes_per_task if self._job.use_gpu else None

    def slots(self) -> int:
        """The GPUs that no other run holds; without GPUs there is room for the whole job."""
        if not self._job.use_gpu:
            return self._job.num_tasks
        return len(self._claims.free(self._gpus)) // self._job.processes_per_task

    def num_agents(self, num_tasks: int) -> int:
        """One."""
        return 1

    def reserve(self, num_tasks: int) -> bool:
        """Holds a GPU for each rank."""
        count = num_tasks * self._job.processes_per_task
        return not self._job.use_gpu or self._claims.take(self._gpus, count)

    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> LocalGroup:
        """Starts the agent, held by a thread of this process."""
        workers = num_tasks * self._job.processes_per_task
        return LocalGroup(
            {
                **config,
                "task": 0,
                "host": LOOPBACK,
                "workers": workers,
                "gpus": self._claims.held,
                "cores": (self._job.cpus_per_process or 0) * workers or available_cores(),
                "owner": os.getpid(),
                "code_path": os.path.dirname(os.path.dirname(os.path.abspath(rankzero.__file__))),
            },
            on_end,
        )

    def close(self) -> None:
        """Gives the GPUs back."""
        self._claims.release()


class LocalGroup(AgentGroup):
    """The one agent of a local attempt."""

    def __init__(self, config: AgentConfig, on_end: OnEnd) -> None:
        super().__init__()
        self._config = config
        self._on_end = on_end
        self._agent: subprocess.Popen[bytes] | None = None
        self._cancelled = False
        threading.Thread(target=self._hold, name="rankzero-agent", daemon=True).start()

    def _hold(self) -> None:
        error: BaseException | None = None
        try:
            hold(self._config, self._on_start)
        except BaseException as caught:
            error = caught
        self._ended.set()
        self._on_end(error)

    def _on_start(self, agent: subprocess.Popen[bytes]) -> None:
        self._agent = agent
        if self._cancelled:
            agent.kill()

    def cancel(self) -> None:
        """Kills the agent, also one that is still to come; its workers die with it, `hold` ends what they started."""
        self._cancelled = True
        if self._agent:
            self._agent.kill()

    def explain(self, error: BaseException) -> RankZeroError:
        """The agent's own words; lost if something killed it or cut it off from the driver."""
        text = str(error)
        is_lost = "ended by signal" in text or any(words in text for words in CUT_OFF)
        return EngineError(text, cause=LOST if is_lost else None)
