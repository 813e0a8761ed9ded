"""`LocalEngine`: one agent and its workers as processes of this machine. No JVM."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import threading
from dataclasses import dataclass
from typing import Any

import rankzero
from rankzero.engines.base import AgentConfig, AgentGroup, Engine, EngineSession, OnEnd
from rankzero.errors import LOST, EngineError, InsufficientSlotsError, RankZeroError
from rankzero.job import Job
from rankzero.task.hold import hold

LOOPBACK = "127.0.0.1"
CUT_OFF = "nothing was heard from the driver for"
"""What an agent reports that had found the driver and lost it; one that never found it would not the next time."""

NVIDIA_SMI_TIMEOUT = 20.0
"""Seconds for ``nvidia-smi`` to list the GPUs."""


@dataclass(frozen=True)
class LocalEngine(Engine):
    """Runs all ranks on this machine, as one task. ``local_rank`` equals ``rank``."""

    def check(self, job: Job) -> None:
        """Raises InsufficientSlotsError if there are fewer GPUs than ranks."""
        if job.use_gpu:
            require_local_gpus(job.num_processes)

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

    num_agents = 1
    bind_host = LOOPBACK
    driver_host = LOOPBACK

    def __init__(self, job: Job) -> None:
        self._job = job

    def launch(self, config: AgentConfig, on_end: OnEnd) -> LocalGroup:
        """Starts the agent, held by a thread of this process."""
        gpus = local_gpus()[: self._job.num_processes] if self._job.use_gpu else []
        return LocalGroup(
            {
                **config,
                "task": 0,
                "host": LOOPBACK,
                "workers": self._job.num_processes,
                "gpus": gpus,
                "cores": os.cpu_count(),
                "owner": os.getpid(),
                "code_path": os.path.dirname(os.path.dirname(os.path.abspath(rankzero.__file__))),
            },
            on_end,
        )

    def close(self) -> None:
        """Nothing was opened."""


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
        is_lost = "ended by signal" in text or CUT_OFF in text
        return EngineError(text, cause=LOST if is_lost else None)


def local_gpus() -> list[str]:
    """Ids of the GPUs this process may use: ``CUDA_VISIBLE_DEVICES``, else what the driver lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # As CUDA reads it: nothing counts after the first that is no device.
        listed = [gpu.strip() for gpu in visible.split(",")]
        return list(itertools.takewhile(lambda gpu: gpu and not gpu.startswith("-"), listed))
    if not shutil.which("nvidia-smi"):
        return []
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return listing.stdout.split() if listing.returncode == 0 else []


def require_local_gpus(needed: int) -> None:
    """Raises InsufficientSlotsError unless this machine offers so many GPUs."""
    gpus = local_gpus()
    if len(gpus) < needed:
        raise InsufficientSlotsError(
            f"use_gpu=True needs {needed} GPUs, one for each rank, but this machine offers "
            f"{len(gpus)} ({', '.join(gpus) or 'nvidia-smi lists none'}; CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', '(unset)')}). Lower num_processes or set use_gpu=False",
            needed=needed,
            available=len(gpus),
        )
