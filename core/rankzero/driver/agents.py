"""What all agents of an attempt are told, beside where its driver is."""

from __future__ import annotations

from rankzero.driver import policy
from rankzero.engines.base import AgentConfig
from rankzero.job import Job


def agent_config(job: Job, number: int, env: dict[str, str], seconds: float) -> AgentConfig:
    """What is known of an attempt before it begins.

    Args:
        job: Of the run.
        number: The attempt's.
        env: The user's environment for the ranks.
        seconds: Until every rank must have started.
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
