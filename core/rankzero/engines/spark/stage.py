"""The barrier stage of one attempt, the function of its tasks on the executors, and typed errors for Spark's."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rankzero.engines.base import AgentConfig, AgentGroup, OnEnd, words_of
from rankzero.engines.local import CUT_OFF
from rankzero.errors import LOST, PREEMPTED, EngineError, InsufficientSlotsError, RankZeroError, advised, known
from rankzero.host.processes import fork_safe
from rankzero.job import Job

_python_lock = fork_safe(threading.Lock())
"""Held while the Python of a context is replaced, which runs in several threads would restore in the wrong order."""


class SparkGroup(AgentGroup):
    """The barrier stage of one attempt, while it runs."""

    def __init__(
        self, context: Any, job: Job, num_tasks: int, task: Callable[[Any], Any], on_end: OnEnd, profile: Any = None
    ) -> None:
        super().__init__()
        from pyspark import InheritableThread

        self._context = context
        # Runs of other stores may have this name and share the session.
        self._group = f"rankzero-{job.run_id}-{secrets.token_hex(4)}"

        def collect() -> None:
            description = f"rankzero: {job.name} on {job.world} ranks, run {job.run_id}"
            context.setJobGroup(self._group, description, interruptOnCancel=True)
            rows = context.parallelize(range(num_tasks), num_tasks)
            if profile is not None:
                from pyspark.resource import ResourceProfile

                rows = rows.withResources(ResourceProfile(profile))
            rdd = rows.barrier().mapPartitions(task)
            with with_own_python(context):
                # Fixes the executors' Python and pickles the task.
                rdd._jrdd  # noqa: B018
            rdd.collect()

        self._hold(collect, on_end, InheritableThread)

    def cancel(self) -> None:
        """Cancels the stage with its tasks, agents and ranks; from Spark 4 on also a stage that has not started."""
        with contextlib.suppress(Exception):
            try:
                # The task may still be pickled. Before Spark 4.3 a stage that waits for slots is a future job, too.
                self._context._jsc.sc().cancelJobGroupAndFutureJobs(self._group)
            except Exception:
                # Spark 3.5 has no such method.
                self._context.cancelJobGroup(self._group)

    def explain(self, error: BaseException) -> RankZeroError:
        """Returns the typed error for an exception of Spark."""
        return explain(words_of(error))


def task_config(config: AgentConfig, cores: int, workers: int, *, threads_set: bool) -> AgentConfig:
    """Returns the configuration of a stage's agents, from the one that all agents share.

    Args:
        config: The configuration that all agents share.
        cores: Cores of one task.
        workers: Ranks of one task.
        threads_set: True if the user has set the number of threads of a rank.
    """
    env = config["env"]
    if not threads_set:
        # Spark sets it in every Python worker to the cores of the whole task.
        env = {"OMP_NUM_THREADS": str(max(1, cores // workers)), **env}
    return {**config, "env": env, "workers": workers, "cores": cores}


def make_task(
    config: AgentConfig, code: Any, local_gpus: list[str] | None, local_host: str | None
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Returns the function of one barrier task, which is pickled by value because it is a local function.

    Args:
        config: The result of `task_config`.
        code: An object whose ``value`` is `task_code`: a broadcast, if the session has broadcasts.
        local_gpus: GPUs of this machine, which the tasks of a local master share; None for a cluster.
        local_host: The address of every agent; None if Spark knows the addresses.
    """

    def task(rows: Iterable[Any]) -> Iterator[Any]:
        for _ in rows:
            # Spark discards the Python worker of a task that does not read its input.
            pass
        import pickle

        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        index = context.partitionId()
        address = context.getTaskInfos()[index].address
        host = local_host or address.rpartition(":")[0].strip("[]") or address
        count = config["workers"]
        gpus = []
        if config["use_gpu"] and local_gpus is not None:
            gpus = local_gpus[index * count : (index + 1) * count]
        elif config["use_gpu"] and "gpu" in context.resources():
            gpus = list(context.resources()["gpu"].addresses)
        run, code_zip = pickle.loads(code.value)
        found = {"code_path": None, "code_zip": code_zip}
        run({**found, **config, "task": index, "host": host, "gpus": gpus})
        return iter(())

    return task


@contextlib.contextmanager
def with_own_python(context: Any) -> Iterator[None]:
    """Makes executors on this machine run this process's Python, unless the user chose one."""
    with _python_lock:
        before = context.pythonExec
        if "PYSPARK_PYTHON" not in os.environ and str(context.master).startswith("local"):
            context.pythonExec = sys.executable
        try:
            yield
        finally:
            context.pythonExec = before


ERROR_LIMIT = 2000
"""Most characters of Spark's own text that an error quotes."""


def explain(text: str) -> RankZeroError:
    """Returns the typed error for the text of an exception of Spark."""
    if "SPARK-24819" in text:
        return InsufficientSlotsError(f"the cluster lost slots before the barrier stage began: {first_lines(text)}")
    if found := re.search(r"rankzero agent of task \d+ ended by (signal)?.*", text):
        is_lost = found[1] or any(words in found[0] for words in CUT_OFF)
        return EngineError(advised(first_lines(text[found.start() :])), cause=LOST if is_lost else None, code="RZ-2003")
    if found := re.search(r"rankzero: .+", text):
        return EngineError(found[0].removeprefix("rankzero: "))
    if re.search(_PREEMPTED, text, re.IGNORECASE):
        return EngineError(f"the cluster took an executor back: {first_lines(text)}", cause=PREEMPTED)
    if found := re.search(_EXECUTOR_LOST, text):
        # Only this line names the executor and the reason, and not the Java text before it.
        line = text[text.rfind("\n", 0, found.start()) + 1 :]
        return EngineError(f"Spark lost an executor: {first_lines(line)}", cause=LOST)
    if re.search(_SESSION_LOST, text):
        return EngineError(f"the SparkContext or its JVM ended: {reason(text)}", cause=LOST)
    if "cancelled" in text and not known(text):
        return EngineError(f"the Spark job was cancelled from outside of rankzero: {first_lines(text)}")
    return EngineError(f"the Spark job failed: {reason(text)}")


_PREEMPTED = r"preempt|decommission"
_EXECUTOR_LOST = (
    r"ExecutorLostFailure|Executor.{0,40} lost|Lost executor|ExecutorDeadException|worker lost|executor \S+ exited"
)
_SESSION_LOST = (
    r"SparkContext was shut down|stopped SparkContext|Py4JNetworkError|Answer from Java side is empty|"
    r"Connection refused|Error while receiving|Connection reset by peer"
)


def reason(text: str) -> str:
    """Returns the advice about an exception of Spark with the line that it is about, else the readable part."""
    found = known(text)
    return f"{found[1]} ({found[0]})" if found else first_lines(text)


def first_lines(text: str) -> str:
    """Returns the readable part of a Java exception: what failed, without the stacks."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    return "\n".join(lines)[:ERROR_LIMIT]
