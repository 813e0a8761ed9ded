"""A Prefect task that trains with rankzero: a training outlives its flow's process, and the retry attaches to it.

    @flow(retries=2, on_crashed=[retry_after_crash])
    def pipeline() -> float:
        return train(fit, 0.1, launcher=Launcher(4, store="s3://bucket/runs"))

Prefect itself retries a flow run after an exception only. `retry_after_crash` schedules the next try of a flow run
whose process has died. The task must be called in the flow's own thread, since Prefect interrupts only that thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from prefect import Flow, Task, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas import FlowRun, TaskRun
from prefect.context import FlowRunContext, TaskRunContext
from prefect.states import AwaitingRetry, State

from rankzero import Launcher
from rankzero.errors import InvalidJobError, RankZeroError
from rankzero.pipeline import Follower, LineWritten, MetricsReported, attempt, may_retry, open_run, plain, tries

CRASH_UNNOTICED = 60.0
"""Seconds after which Prefect notices that the process of a flow run has died."""

_names: dict[tuple[UUID, int, str], UUID] = {}
# The task run that has a name in a try of a flow run.


def retry_after_crash(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Schedules the next try of a flow run whose process has died, as far as the flow's ``retries`` allow."""
    with get_client(sync_client=True) as client:
        if client.read_flow_run(flow_run.id).run_count <= flow.retries:
            client.set_flow_run_state(flow_run.id, AwaitingRetry(), force=True)


@dataclass(frozen=True)
class FlowTry:
    """A try of a flow run, which answers rankzero's questions about Prefect."""

    flow: Flow[..., Any]
    flow_run: UUID
    number: int
    retrier: None = None
    lease_when_attached: None = None

    @property
    def is_followed_by_another(self) -> bool:
        """Returns True if the flow run is tried again when this process dies."""
        return retry_after_crash in self.flow.on_crashed_hooks and self.number <= self.flow.retries

    @property
    def generation(self) -> str:
        """Identifies the chain of automatic tries: a user's retry comes after the last of them."""
        return f"{self.flow_run}#{max(self.number, self.flow.retries + 1)}"

    def has_accepted(self, receiver: Mapping[str, Any]) -> bool:
        """Returns False, so that every try of a flow run gets the result; another flow run has its own training."""
        return False

    def repeats(self, receiver: Mapping[str, Any]) -> bool:
        """Returns False, since this integration acknowledges no result: the question concerns acknowledged ones."""
        return False

    def detaches(self, error: BaseException) -> bool:
        """Returns True if the training continues for the next try: after an error of this process, but no timeout.

        A `TerminationSignal` ends it: Prefect sends that for a cancel, and cancels what runs when a worker shuts down.
        """
        return isinstance(error, Exception) and not isinstance(error, TimeoutError) and self.is_followed_by_another


def _can_help(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Returns True if another try of the task can help, so that a wrong argument is not retried."""
    error = state.result(raise_on_failure=False)
    return not isinstance(error, RankZeroError) or may_retry(error, has_checkpoint=True)


@task(retry_condition_fn=_can_help, log_prints=False)
def train(function: Callable[..., Any], *args: Any, launcher: Launcher, **kwargs: Any) -> Any:
    """Trains a function on the launcher's ranks and returns rank 0's value.

    Args:
        function: The training function, or a script, as for `Launcher.run`.
        args: Its positional arguments.
        launcher: The options, with a store. Every try finds the run by the flow run's id and the task's name,
            so two trainings of one flow need two names: ``train.with_options(name="second")(...)``.
        kwargs: Its keyword arguments.
    """
    context, this = FlowRunContext.get(), TaskRunContext.get()
    if not (context and context.flow and context.flow_run and this):
        raise RuntimeError("train() was called outside of a flow; call it in a function that @flow decorates")
    with get_client(sync_client=True) as client:
        number = client.read_flow_run(context.flow_run.id).run_count
    if _names.setdefault((context.flow_run.id, number, this.task.name), this.task_run.id) != this.task_run.id:
        raise InvalidJobError(
            f"this flow run has already trained under the name {this.task.name!r}: use with_options(name=...)"
        )
    step = FlowTry(context.flow, context.flow_run.id, number)
    name = f"{context.flow_run.id}-{this.task.name}"
    delay = max(context.flow.retry_delay_seconds or 0.0, CRASH_UNNOTICED)
    log = get_run_logger()
    launcher = launcher.options(run_id=name, orphan_timeout=tries.lease(delay))
    with open_run(launcher, function, args, kwargs, step, log) as handle:
        for event in Follower(handle).follow():
            if isinstance(event, LineWritten):
                log.info("%s", event.text)
            elif isinstance(event, MetricsReported):
                table = partial(create_table_artifact, [plain.storable(event.values)], key="rankzero-metrics")
                attempt(log, "the table of metrics", table, None)
    return handle.result()
