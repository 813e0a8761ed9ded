"""The part of the agents' configuration that is the same for every agent of an attempt."""

from __future__ import annotations

from rankzero.driver import policy
from rankzero.engines.base import AgentConfig
from rankzero.job import Job


def agent_config(job: Job, number: int, env: dict[str, str], seconds: float) -> AgentConfig:
    """Returns the configuration that the agents of an attempt share, except the address of their driver.

    Args:
        job: The job of the run.
        number: The number of the attempt.
        env: The user's environment for the ranks.
        seconds: Seconds within which every rank must have started.
    """
    return {
        "attempt": number,
        "use_gpu": job.use_gpu,
        "ports": job.ports,
        "grace": job.stop_grace,
        "connect_timeout": policy.connect_timeout(seconds),
        "exit_timeout": job.exit_timeout,
        "restart_count": number - job.first_attempt,
        "max_restarts": job.max_restarts,
        "warm_start": job.warm_start,
        "env": env,
    }
