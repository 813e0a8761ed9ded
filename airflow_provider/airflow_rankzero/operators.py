"""`TorchDistributorOperator`: a training function or script as an Airflow task."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator, get_current_context

from airflow_rankzero import hooks, openlineage, provider_info, tries, xcom
from airflow_rankzero._compat import (
    AirflowFailException,
    AirflowNotFoundException,
    AirflowRescheduleException,
    AirflowSkipException,
    TaskDeferralError,
    TaskDeferralTimeout,
    TaskDeferred,
    conf,
)
from airflow_rankzero.links import DIRECTORY_KEY, ReportLink, SparkUILink, push_links
from airflow_rankzero.tries import TaskLog, TaskTry
from airflow_rankzero.xcom import OPTIONS, TEMPLATED
from rankzero import CheckpointConfig, Launcher, RunHandle
from rankzero.errors import InvalidJobError, RankZeroError, WorkerFailedError, error_from_json
from rankzero.pipeline import attempt, may_retry, open_run

if TYPE_CHECKING:
    from airflow.sdk import Context

    from rankzero.tracking import Tracker


_DAG_PREFIX = re.compile("unusual_prefix_[0-9a-f]{40}_")

_TASK_CONTAINER_MARKS = ("AIRFLOW_IS_K8S_EXECUTOR_POD", "AIRFLOW_IS_EXECUTOR_CONTAINER")
# Set by executors that start a container for each task: Kubernetes; AWS ECS and Batch.


class TorchDistributorOperator(BaseOperator):
    """Runs PyTorch on ``num_processes`` ranks as a barrier Spark job; rank 0's value is the task's XCom.

    A small JSON value is pushed directly. Every other value (tensors, a state dict, a model, a ``nan``)
    stays in the run directory and a `rankzero.ResultRef` is pushed: any task of any DAG may pull it and call
    ``.load()``; given to another `TorchDistributorOperator` it is opened inside the ranks.

    The training is independent of the task's process. When that process or its worker dies, is restarted or drained,
    the training continues, and the next try (``retries``) attaches to it or gets its result. It ends when a user marks
    or clears the task, with ``execution_timeout``, and when no further try follows. A retry after a failure resumes
    from the last checkpoint; a task that succeeded and is cleared trains from scratch. The ranks' output appears in the
    task log while they run, with the rank before each line.

    Args:
        train: The function, script or command of every rank: a function (also of the DAG file),
            ``"package.module:function"``, the path of a script (a relative one starts at the DAG file's directory),
            ``"-m package.module"``, or a command as a list of words, ``["bash", "train.sh"]`` (strings are templated).
        op_args: Positional arguments of the function, or the rest of the command line (templated).
        op_kwargs: Keyword arguments of the function (templated). XCom values are given as
            ``op_kwargs={"data": prepare.output}``.
        conn_id: Connection of type ``rankzero`` or ``spark`` (templated). None: ``master``.
        master: Spark's master in place of a connection: ``spark://host:7077``, ``yarn``, ``k8s://...``, ``local[4]``
            (templated). None: an embedded ``local[N]`` Spark.
        spark_conf: Spark configuration (templated); overrides the connection's.
        retry_user_errors: True applies ``retries`` to exceptions of the training function, too.
        skip_on_exit_code: Exit codes with which the training function skips the task, as by ``sys.exit(99)``: one, or
            several; None for none.
        log_ranks: Ranks whose lines the task's log shows, such as ``[0]``; None for all. A rank whose failure ends the
            run is shown as well, and every line is in the run directory.
        deferrable: True frees the worker slot while the ranks train; the triggerer follows them. The driver of the
            run stays on the worker's host. In a container for this task alone (KubernetesExecutor) it would end
            with the container, so there the task does not defer, and warns.
        **options: Every option of a run.
        kwargs: Arguments of every Airflow operator, ``task_id`` first of all.

    Raises:
        AirflowFailException: the job cannot be run as described, so no retry can help.
        AirflowSkipException: the first rank to end did so with one of ``skip_on_exit_code``.
        rankzero.WorkerFailedError: a rank failed; holds the first cause.
        rankzero.RankZeroError: other subclasses for slots, time, cancellation, the result.

    Example:
        >>> train_model = TorchDistributorOperator(
        ...     task_id="train",
        ...     train="train.py",
        ...     num_processes=4,
        ...     conn_id="spark_default",
        ... )
    """

    template_fields: Sequence[str] = ("script", *TEMPLATED)
    template_fields_renderers: ClassVar = {"op_args": "py", "op_kwargs": "py", "spark_conf": "json", "env": "json"}
    shallow_copy_attrs: Sequence[str] = ("train",)
    operator_extra_links = (SparkUILink(), ReportLink())

    dataset: Any
    env: Any
    restart_on: Any
    stop_grace: float
    store: Any

    # Template fields are assigned unchanged: when a DAG file is parsed they may be XComArgs.
    def __init__(
        self,
        *,
        train: Callable[..., Any] | str | os.PathLike[str] | Sequence[str],
        op_args: Collection[Any] = (),
        op_kwargs: Mapping[str, Any] | None = None,
        conn_id: str | None = None,
        master: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
        retry_user_errors: bool = True,
        skip_on_exit_code: int | Collection[int] | None = None,
        log_ranks: Sequence[int] | None = None,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        # Options of a run, made by `make reference`:
        num_processes: int | tuple[int, int] | str = 2,
        use_gpu: bool | None = None,
        processes_per_task: int | str | None = None,
        cpus_per_process: int | None = None,
        backend: str | None = "auto",
        env: Mapping[str, str] | None = None,
        timeout: float | str | None = None,
        start_timeout: float | str = 600.0,
        hang_timeout: float | str | None = None,
        orphan_timeout: float | None = None,
        max_restarts: int | str = 0,
        restart_on: str | type[BaseException] | Callable[[BaseException], Any] | Sequence[Any] = (),
        store: str | os.PathLike[str] | None = None,
        dataset: Any | None = None,
        max_preemptions: int | None = None,
        stop_grace: float = 2.0,
        exit_timeout: float = 5.0,
        ports: tuple[int, int] | None = None,
        checkpoints: CheckpointConfig | None = None,
        warm_start: bool = True,
        encrypt: bool | None = None,
        code_version: str | None = None,
        working_dir: str | os.PathLike[str] | None = None,
        py_files: Sequence[str | os.PathLike[str]] = (),
        trackers: Sequence[Tracker] = (),
        # The end of these options.
        **kwargs: Any,
    ) -> None:
        given = locals()
        super().__init__(**kwargs)
        for name in OPTIONS:
            setattr(self, name, given[name])
        self.train = train
        # Airflow calls a template field that can be called, so a function is none.
        self.script = None if callable(train) else train
        self.op_args = op_args
        self.op_kwargs: Mapping[str, Any] = op_kwargs or {}
        self.conn_id = conn_id
        self.master = master
        self.spark_conf = spark_conf
        # Default arguments may have None for a flag.
        self.retry_user_errors = retry_user_errors is not None and retry_user_errors
        self.skip_on_exit_code: Any = skip_on_exit_code
        self.log_ranks: Any = log_ranks
        self.deferrable = deferrable is not None and deferrable
        self.is_killed = False
        # Run directory and result of `openlineage.facets`, as far as they are known.
        self._lineage: dict[str, Any] = {}
        try:
            xcom.check_early(self)
        except InvalidJobError as error:
            try:
                get_current_context()
            except RuntimeError:
                raise error from None
            # A mapped task is created from its values in each try.
            raise self._final(error) from error
        self._prepare()

    def render_template(
        self, content: Any, context: Any, jinja_env: Any = None, seen_oids: set[int] | None = None
    ) -> Any:
        """Renders like every operator, and masks secrets before Airflow stores the rendered fields.

        Secrets are the values of `env` and `spark_conf` whose names say so, and passwords and tokens in addresses.
        The output of a mapped task group is a list by map index.
        """
        content = xcom.by_map_index(content, self.get_closest_mapped_task_group())
        rendered = super().render_template(content, context, jinja_env, seen_oids)
        if isinstance(rendered, str):
            hooks.mask_secrets({"": rendered})
        elif isinstance(rendered, Mapping) and (content is self.env or content is self.spark_conf):
            hooks.mask_secrets(rendered)
        return rendered

    def execute(self, context: Context) -> Any:
        """Starts the training, or attaches to what an earlier try started; returns rank 0's value or its handle."""
        with tries.interrupts_end():
            return self._execute(context)

    def _execute(self, context: Context) -> Any:
        task_try = TaskTry(context["ti"])
        try:
            args, kwargs = xcom.positional(self.op_args), xcom.keyword(self.op_kwargs)
            launcher = self._launcher(context)
            train = hooks.train_beside(self._folder, self.script) if self.script else self.train
            tries.end_cleared(launcher, task_try, self.log)
            while True:
                left: BaseException | None = None
                with open_run(launcher, train, args, kwargs, task_try, self.log) as handle:
                    try:
                        self._follow(handle, launcher, task_try)
                    except (TaskDeferred, AirflowRescheduleException) as leaving:
                        # Not an interruption: the run continues, and Airflow comes back to it.
                        left = leaving
                if left:
                    raise left
                if not task_try.is_replaced(handle):
                    break
                self.log.info("the run was ended for an earlier try, which was cleared; this try submits it again")
        except InvalidJobError as error:
            if isinstance(error.__cause__, AirflowNotFoundException):
                # A secrets backend may be back at the next try.
                raise
            raise self._final(error) from error
        return self._deliver(context, handle)

    def _follow(self, handle: RunHandle[Any], launcher: Launcher, task_try: TaskTry) -> None:
        """Follows the run to its end, here or in the triggerer."""
        push_links(task_try.ti, directory=handle.directory)
        assert launcher.engine
        facts = {
            "run directory": handle.directory,
            "engine": ", ".join(str(word) for word in launcher.engine.to_spec()[0].values() if word),
            "ranks": handle.job.world,
            "GPUs": handle.job.world if launcher.use_gpu else None,
            "continues without a follower, s": launcher.orphan_timeout if task_try.is_followed_by_another else None,
        }
        tries.show(self.log, "Training run", facts)
        task_log = TaskLog(handle, task_try, self)
        if self.deferrable and not handle.status().final:
            task_log.detach_if_killed()
            from airflow_rankzero.triggers import RunTrigger

            # From here on no process of this try runs: the next try finds out by this whether a user has cleared it.
            follower = {**task_try.receiver, tries.GENERATION: task_try.generation}
            attempt(self.log, "the record of the deferral", lambda: handle.offer(follower), None)
            self.defer(
                trigger=RunTrigger(handle.directory, handle.job.nonce, self.conn_id, self.log_ranks),
                method_name="execute_complete",
                timeout=self.execution_timeout,
            )
        task_log.follow()

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Returns what `execute` does, after the trigger has seen the end of the run."""
        if error := event.get("error"):
            self.log.warning("the trigger could not follow the run: %s", error)
            self.deferrable = False
        # Another process than that of `execute`: what the connection holds must not be shown here either.
        try:
            hooks.Target.from_conn_id(self.conn_id)
        except Exception as problem:
            # The training has an end of its own, whatever becomes of the secrets backend meanwhile.
            self.log.warning("the connection's secrets cannot be masked: %s", type(problem).__name__)
        task_try = TaskTry(context["ti"])
        handle: RunHandle[Any] = RunHandle.attach(event["directory"])
        if handle.job.nonce != event["nonce"] or not handle.status().final or task_try.is_replaced(handle):
            return self._execute(context)
        push_links(task_try.ti, spark_ui=handle.status().engine_url, directory=handle.directory)
        return self._deliver(context, handle)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Resumes like every operator; a final failure of the deferral ends the run, like a failure in `execute`."""
        try:
            with tries.interrupts_end():
                return super().resume_execution(next_method, next_kwargs, context)
        except (TaskDeferralError, TaskDeferralTimeout) as error:
            ti = context["ti"]
            if isinstance(error, TaskDeferralTimeout) or not TaskTry(ti).is_retried:
                with contextlib.suppress(Exception):
                    # By its XCom: the connection may be deleted.
                    index = TaskTry(ti).map_index
                    directory = ti.xcom_pull(key=DIRECTORY_KEY, task_ids=self.task_id, map_indexes=index)
                    why = f"the deferral of the Airflow task failed: {type(error).__name__}"
                    tries.end(RunHandle.attach(directory), self.stop_grace, None, why)
            raise

    def on_kill(self) -> None:
        """Makes `execute` determine why this process was asked to exit, and react.

        Airflow calls this both for a user's action and for a worker's shutdown, inside its signal handler, which
        interrupts the thread of `execute` anywhere: so this neither blocks nor sends requests to Airflow.
        """
        self.is_killed = True

    def get_openlineage_facets_on_start(self, task_instance: Any = None) -> Any:
        """Returns what is known of inputs, run directory and result for the OpenLineage provider; None without it."""
        dataset = hooks.dataset_beside(self._folder, self.dataset)
        return openlineage.facets((self.op_args, self.op_kwargs), dataset, **self._lineage)

    get_openlineage_facets_on_complete = get_openlineage_facets_on_failure = get_openlineage_facets_on_start

    def _final(self, error: RankZeroError, *, has_checkpoint: bool = False) -> Exception:
        """Returns the error for Airflow: one that no retry can help costs none."""
        if may_retry(error, has_checkpoint=has_checkpoint, retry_user_errors=self.retry_user_errors):
            return error
        failure: Exception = AirflowFailException(f"{type(error).__name__}: {error}")
        return failure

    def _deliver(self, context: Context, handle: RunHandle[Any]) -> Any:
        self._lineage["directory"] = handle.directory
        try:
            value = xcom.value_of(handle, self, context["ti"])
        except RankZeroError as error:
            if isinstance(error, WorkerFailedError):
                # Airflow imports a DAG file under another name.
                error = error_from_json(json.loads(_DAG_PREFIX.sub("", json.dumps(error.to_json()))))
            if isinstance(error, WorkerFailedError) and error.exit_code in self.skip_on_exit_code:
                raise AirflowSkipException(f"rank {error.rank} exited with code {error.exit_code}") from error
            final = self._final(error, has_checkpoint=handle.status().checkpoint is not None)
            raise final from (error.__cause__ if final is error else error)
        self._lineage["result"] = xcom.record(self, context, handle)
        return value

    @property
    def _folder(self) -> str:
        """The folder of the DAG file."""
        return os.path.dirname(os.path.abspath(self.dag.fileloc))

    def _launcher(self, context: Context) -> Launcher:
        target = (
            hooks.Target.from_conn_id(self.conn_id) if self.conn_id is not None else hooks.Target(master=self.master)
        )
        engine = target.engine(self.spark_conf)
        if self.deferrable and not engine.drives_elsewhere and any(map(os.environ.get, _TASK_CONTAINER_MARKS)):
            self.deferrable = False
            self.log.warning(
                "not deferred, although deferrable=True: this container ends when the task defers, and the driver of "
                "the training with it; the task follows the training instead"
            )
        ti, map_index = context["ti"], TaskTry(context["ti"]).map_index
        labels = {"dag_id": ti.dag_id, "dag_run_id": ti.run_id, "task_id": ti.task_id, "map_index": str(map_index)}
        # Airflow 3.2 and later; the events of the task's assets have it by Airflow itself.
        if key := context.get("partition_key"):
            labels["partition_key"] = str(key)
        options = {name: xcom.convert(name, getattr(self, name)) for name in OPTIONS}
        decided_here = {
            "use_gpu": target.use_gpu,
            "processes_per_task": target.processes_per_task or 1,
            "checkpoints": CheckpointConfig(),
            "orphan_timeout": tries.lease(self, ti, deferred=self.deferrable),
        }
        options |= {name: value for name, value in decided_here.items() if options[name] is None}
        options["env"] = {**provider_info.RANK_ENVIRONMENT, **OPTIONS["env"].kind.check("env", options["env"])}
        options["store"] = self.store or target.store or provider_info.store_or_default()
        restart_on = options["restart_on"]
        if isinstance(restart_on, list) and len(restart_on) == 1 and callable(restart_on[0]):
            options["restart_on"] = restart_on[0]
        for name in ("working_dir", "py_files"):
            options[name] = hooks.path_beside(self._folder, options[name])
        options["dataset"] = hooks.dataset_beside(self._folder, options["dataset"])
        # A task that executes operators itself has a run for each.
        task_id = ti.task_id if ti.task_id == self.task_id else f"{ti.task_id}.{self.task_id}"
        run_id = tries.run_id_of(ti.dag_id, ti.run_id, task_id, map_index)
        return Launcher(**options, engine=engine, run_id=run_id, labels=labels)

    def _prepare(self) -> None:
        """Brings checked arguments into a form that Airflow can render, and the trigger can serialize as JSON."""
        codes = self.skip_on_exit_code
        codes = codes if isinstance(codes, Collection) else [] if codes is None else [codes]
        # Numbers of numpy, too.
        self.skip_on_exit_code = [operator.index(code) for code in codes]
        self.log_ranks = None if self.log_ranks is None else [operator.index(rank) for rank in self.log_ranks]
        if callable(self.restart_on):
            # Airflow would call it.
            self.restart_on = [self.restart_on]
        for name in ("script", "store", "dataset"):
            # Airflow 3.1 takes a path's `resolve` for that of an XCom.
            if type(path := getattr(self, name)).__module__.startswith("pathlib"):
                setattr(self, name, os.fspath(path))


TorchDistributorOperator.__doc__ = (TorchDistributorOperator.__doc__ or "").replace(
    "        **options: Every option of a run.\n",
    "".join(f"        {name}: {option.help}\n" for name, option in OPTIONS.items()),
)
