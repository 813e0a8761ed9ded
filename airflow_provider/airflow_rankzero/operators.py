"""`TorchDistributorOperator`: a training function or script as an Airflow task."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator, conf
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowNotFoundException,
    TaskDeferralError,
    TaskDeferralTimeout,
)

from airflow_rankzero import delivery, lineage, lines, log_groups, settings, tries
from airflow_rankzero.call import check_early, plain
from airflow_rankzero.connection import Target
from airflow_rankzero.links import DIRECTORY_KEY, RunDirectoryLink, SparkUILink, push_links
from airflow_rankzero.run_id import run_id_of
from airflow_rankzero.spark_conf import as_text
from airflow_rankzero.task_run import TaskRun
from rankzero.checkpoint import CheckpointConfig
from rankzero.digest import digest_of
from rankzero.errors import InvalidJobError, RankZeroError
from rankzero.launcher import Launcher
from rankzero.policy import STOP_GRACE
from rankzero.result import map_refs
from rankzero.run import RunHandle

if TYPE_CHECKING:
    from airflow.sdk import Context


class TorchDistributorOperator(BaseOperator):
    """Runs PyTorch on ``num_processes`` ranks as a barrier Spark job; rank 0's value is the task's XCom.

    A small JSON value is pushed as itself. Everything else (tensors, a state dict, a model, a ``nan``)
    stays in the run directory and a `rankzero.ResultRef` is pushed: any task of any DAG may pull it and call
    ``.load()``; given to another operator of this kind it is opened inside the ranks.

    The training belongs to its run directory. When the task's process or its worker dies, is restarted or drained,
    it goes on, and the next try (``retries``) takes it up or gets its result. It ends when a user marks the task or
    clears it, with ``execution_timeout``, and when no try is left to come back for it. A retry after a failure goes
    on from the last checkpoint; a task that succeeded and is cleared trains from scratch. What the ranks write
    appears in the task log while they run, with the rank before each line.

    Args:
        train: What every rank calls or runs: a function (of the DAG file, too), ``"package.module:function"``,
            or the path of a script.
        op_args: Positional arguments of the function, or the script's command line (templated).
        op_kwargs: Keyword arguments of the function (templated). XCom values are given as
            ``op_kwargs={"data": prepare.output}``.
        num_processes: World size, the number of ranks.
        processes_per_task: Ranks in one Spark task. Must divide ``num_processes``. None: what the connection says,
            else 1.
        use_gpu: Give every rank one GPU. Without enough GPUs the task fails. None: what the connection says.
        backend: Of the process group: ``"auto"`` (nccl with GPUs, else gloo), ``"nccl"``, ``"gloo"``, or
            None if the function decides.
        conn_id: Connection of type ``rankzero`` or ``spark`` (templated). None: an embedded ``local[N]`` Spark.
        spark_conf: Spark configuration (templated); wins over what the connection says.
        env: Environment variables for the ranks (templated).
        store: Root of the run directories, a path or an fsspec URL that the next tasks can read
            (templated). None: what the connection says, else ``[rankzero] store`` of Airflow's configuration, else
            ``$RANKZERO_STORE``, else ``~/.rankzero/runs``.
        timeout: Seconds the run may take once every rank has started; None for no bound.
        start_timeout: Seconds until every rank must have started.
        hang_timeout: Seconds without a report or an optimizer step of any rank after which an attempt ends.
        max_restarts: New attempts, from the last checkpoint, within this try of the task: after a killed rank, a
            lost host or executor, a hang, a `rankzero.RetryableError`.
        max_preemptions: The same after the cluster took a place back; None for as many.
        checkpoints: Which checkpoints are kept; None for the newest two.
        ports: First and last port on which the run's driver and rank 0 may listen, for firewalls.
        stop_grace: Seconds between SIGTERM and SIGKILL when the run ends early.
        orphan_timeout: Seconds for which the run goes on while nobody follows it; None computes it from the
            task's retries and their delays.
        deferrable: Give the worker slot back while the ranks train; the triggerer follows them. The driver of the
            run stays on the worker's host, so it must be one that outlives the task (not a pod for each task).
        kwargs: Arguments of every Airflow operator, ``task_id`` first of all.

    Raises:
        AirflowFailException: the job cannot be run as described, so no retry can help.
        rankzero.WorkerFailedError: a rank failed; holds the first cause.
        rankzero.RankZeroError: other subclasses for slots, time, cancellation, the result.
        AirflowRescheduleException: this worker goes away; the training does not, and the task comes back to it.

    Example:
        >>> train_model = TorchDistributorOperator(
        ...     task_id="train",
        ...     train="train.py",
        ...     op_args=["--lr", "{{ params.lr }}"],
        ...     num_processes=4,
        ...     conn_id="spark_default",
        ... )
    """

    template_fields: Sequence[str] = ("op_args", "op_kwargs", "conn_id", "spark_conf", "env", "store")
    template_fields_renderers: ClassVar[dict[str, str]] = {
        "op_args": "py",
        "op_kwargs": "py",
        "spark_conf": "json",
        "env": "json",
    }
    shallow_copy_attrs: Sequence[str] = ("train",)
    operator_extra_links = (SparkUILink(), RunDirectoryLink())
    ui_color = "#f4e3d7"

    # Template fields are assigned unchanged: when a DAG file is parsed they may be XComArgs.
    def __init__(
        self,
        *,
        train: Callable[..., Any] | str | os.PathLike[str],
        op_args: Collection[Any] = (),
        op_kwargs: Mapping[str, Any] | None = None,
        num_processes: int = 2,
        processes_per_task: int | None = None,
        use_gpu: bool | None = None,
        backend: str | None = "auto",
        conn_id: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        store: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        start_timeout: float = 600.0,
        hang_timeout: float | None = None,
        max_restarts: int = 0,
        max_preemptions: int | None = None,
        checkpoints: CheckpointConfig | None = None,
        ports: tuple[int, int] | None = None,
        stop_grace: float = STOP_GRACE,
        orphan_timeout: float | None = None,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_early(num_processes, processes_per_task, backend)
        self.train = train
        self.op_args = op_args
        self.op_kwargs: Mapping[str, Any] = op_kwargs or {}
        self.num_processes = num_processes
        self.processes_per_task = processes_per_task
        self.use_gpu = use_gpu
        self.backend = backend
        self.conn_id = conn_id
        self.spark_conf = spark_conf
        self.env = env
        self.store = store
        self.timeout = timeout
        self.start_timeout = start_timeout
        self.hang_timeout = hang_timeout
        self.max_restarts = max_restarts
        self.max_preemptions = max_preemptions
        self.checkpoints = checkpoints
        self.ports = ports
        self.stop_grace = stop_grace
        self.orphan_timeout = orphan_timeout
        self.deferrable = deferrable
        self._killed = False
        self._facts = lineage.RunFacts(num_processes)

    def execute(self, context: Context) -> Any:
        """Starts the training, or takes up what an earlier try started; returns rank 0's value or its handle."""
        ti = context["ti"]
        try:
            args, kwargs = self._positional(), self._keyword()
            launcher = self._launcher(context, digest_of(args, kwargs))
            run = TaskRun.start(launcher, self.train, args, kwargs, ti, lambda: self._killed, self.log)
        except InvalidJobError as error:
            if isinstance(error.__cause__, (OSError, AirflowNotFoundException)):
                # A store or a secrets backend may be back at the next try.
                raise
            raise AirflowFailException(f"{type(error).__name__}: {error}") from error
        push_links(ti, directory=run.handle.directory)
        log_groups.show(self.log, "Training run", self._describe_run(run.handle, launcher))
        if self.deferrable and not run.handle.status().final:
            if self._killed or tries.was_ended_by_a_user(ti):
                run.leave()
            from airflow_rankzero.triggers import RunTrigger

            self.defer(
                trigger=RunTrigger(run.handle.directory, run.handle.submission, lines.to_json(run.since)),
                method_name="execute_complete",
                timeout=self.execution_timeout,
            )
        run.follow()
        return self._deliver(context, run.handle, (args, kwargs))

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Returns what `execute` does, after the trigger has seen the end of the run."""
        if error := event.get("error"):
            self.log.warning("the trigger could not follow the run: %s", error)
        # Another process than that of `execute`: what the connection holds must not be shown here either.
        with contextlib.suppress(RankZeroError):
            Target.from_conn_id(self.conn_id).engine(as_text("spark_conf", self.spark_conf))
        handle: RunHandle[Any] = RunHandle.attach(event["directory"])
        push_links(context["ti"], spark_ui=handle.status().engine_url, directory=handle.directory)
        if not handle.status().final:
            # The trigger has lost sight of it; its training has not.
            TaskRun(handle, handle.ends(), context["ti"], self.stop_grace, lambda: self._killed, self.log).follow()
        return self._deliver(context, handle, (self._positional(), self._keyword()))

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """As every operator; a deferral that has failed for good ends the run, as a failure in `execute` does."""
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except (TaskDeferralError, TaskDeferralTimeout) as error:
            if isinstance(error, TaskDeferralTimeout) or not tries.another_follows(context["ti"]):
                with contextlib.suppress(Exception):
                    # By its XCom: the connection may be gone.
                    ti = context["ti"]
                    index = -1 if ti.map_index is None else ti.map_index
                    directory = ti.xcom_pull(key=DIRECTORY_KEY, task_ids=self.task_id, map_indexes=index)
                    handle: RunHandle[Any] = RunHandle.attach(directory)
                    TaskRun(handle, {}, ti, self.stop_grace, lambda: False, self.log).end()
            raise

    def on_kill(self) -> None:
        """Has `execute` find out why this process is to go, and act on it.

        Airflow calls this for a user's action and for a worker that goes away alike, inside its signal handler, which
        interrupts the thread of `execute` anywhere: so this neither waits nor talks to Airflow.
        """
        self._killed = True

    def get_openlineage_facets_on_start(self) -> Any:
        """What the OpenLineage provider asks for: the world size by now. None without that provider."""
        return lineage.facets(self._facts)

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """The same with the run directory, the results that were given as arguments, and the one that came of it."""
        return lineage.facets(self._facts)

    def get_openlineage_facets_on_failure(self, task_instance: Any) -> Any:
        """The same with the error."""
        return lineage.facets(self._facts)

    def _deliver(self, context: Context, handle: RunHandle[Any], arguments: tuple[Any, ...]) -> Any:
        inputs: list[str] = []
        map_refs(arguments, lambda ref: inputs.append(ref.uri))
        self._facts = replace(self._facts, directory=handle.directory, inputs=inputs)
        try:
            value = delivery.value_of(handle)
        except RankZeroError as error:
            self._facts = replace(self._facts, error=error)
            raise
        described = delivery.describe(handle, self.num_processes)
        delivery.fill_outlets(context, described)
        self._facts = replace(self._facts, result=described["uri"])
        log_groups.show(self.log, "Result", described)
        delivery.hand(handle, context["ti"])
        return value

    @staticmethod
    def _describe_run(handle: RunHandle[Any], launcher: Launcher) -> dict[str, Any]:
        assert launcher.engine
        return {
            "run directory": handle.directory,
            "engine": ", ".join(str(word) for word in launcher.engine.to_spec()[0].values() if word),
            "ranks": launcher.num_processes,
            "GPUs": launcher.num_processes if launcher.use_gpu else None,
            "attempt": handle.status().attempt,
            "goes on without a follower, s": launcher.orphan_timeout,
        }

    def _positional(self) -> tuple[Any, ...]:
        if isinstance(self.op_args, (str, bytes, Mapping)) or not isinstance(self.op_args, Iterable):
            raise InvalidJobError(f"op_args is {self.op_args!r}; it must be a list of arguments")
        return tuple(plain(list(self.op_args)))

    def _keyword(self) -> dict[str, Any]:
        if not isinstance(self.op_kwargs, Mapping):
            raise InvalidJobError(f"op_kwargs is {self.op_kwargs!r}; it must map names to arguments")
        return dict(plain(dict(self.op_kwargs)))

    def _launcher(self, context: Context, arguments: str) -> Launcher:
        target = Target.from_conn_id(self.conn_id)
        spark_conf = lineage.spark_properties(as_text("spark_conf", self.spark_conf), context)
        ti = context["ti"]
        map_index = -1 if ti.map_index is None else ti.map_index
        names = {"dag_id": ti.dag_id, "dag_run_id": ti.run_id, "task_id": ti.task_id, "map_index": str(map_index)}
        return Launcher(
            self.num_processes,
            engine=target.engine(spark_conf),
            use_gpu=target.use_gpu if self.use_gpu is None else self.use_gpu,
            processes_per_task=(target.processes_per_task or 1)
            if self.processes_per_task is None
            else self.processes_per_task,
            backend=self.backend,
            env=as_text("env", self.env),
            timeout=self.timeout,
            start_timeout=self.start_timeout,
            hang_timeout=self.hang_timeout,
            max_restarts=self.max_restarts,
            stop_grace=self.stop_grace,
            store=self.store or target.store or settings.store(),
            max_preemptions=self.max_preemptions,
            checkpoints=self.checkpoints or CheckpointConfig(),
            ports=self.ports,
            orphan_timeout=tries.lease(self, ti, deferred=self.deferrable)
            if self.orphan_timeout is None
            else self.orphan_timeout,
            run_id=run_id_of(ti.dag_id, ti.run_id, ti.task_id, map_index),
            labels={**names, "generation": tries.generation(ti), "arguments": arguments},
        )
