"""`TorchDistributorOperator`: a training function or script as an Airflow task."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_rankzero.connection import SparkTarget
from airflow_rankzero.run_id import run_id_of
from rankzero.engines.spark import SparkEngine
from rankzero.errors import InvalidJobError, RankZeroError
from rankzero.launcher import Launcher, start_owned
from rankzero.policy import STOP_GRACE

if TYPE_CHECKING:
    from airflow.sdk import Context

    from rankzero.run import RunHandle


class TorchDistributorOperator(BaseOperator):
    """Runs PyTorch on ``num_processes`` ranks as a barrier Spark job; rank 0's value is the task's XCom.

    A small JSON value is pushed as itself. Everything else (tensors, a state dict, a model, a ``nan``)
    stays in the run directory and a `rankzero.ResultRef` is pushed: any task of any DAG may pull it and call
    ``.load()``; given to another operator of this kind it is opened inside the ranks.

    The run belongs to the task: it ends when the task is marked failed, cleared, timed out or killed.
    What the ranks write appears in the task log while they run, with the rank before each line.

    Args:
        train: What every rank calls or runs: a function (of the DAG file, too), ``"package.module:function"``,
            or the path of a script.
        op_args: Positional arguments of the function, or the script's command line (templated).
        op_kwargs: Keyword arguments of the function (templated). XCom values are given as
            ``op_kwargs={"data": prepare.output}``.
        num_processes: World size, the number of ranks.
        processes_per_task: Ranks in one Spark task. Must divide ``num_processes``.
        use_gpu: Give every rank one GPU. Without enough GPUs the task fails.
        backend: Of the process group: ``"auto"`` (nccl with GPUs, else gloo), ``"nccl"``, ``"gloo"``, or
            None if the function decides.
        conn_id: Connection of type ``spark`` (templated). None: an embedded ``local[N]`` Spark.
        spark_conf: Spark configuration (templated); wins over what the connection says.
        env: Environment variables for the ranks (templated).
        store: Root of the run directories, a path or an fsspec URL that the next tasks can read
            (templated). None: ``$RANKZERO_STORE``, else ``~/.rankzero/runs``.
        timeout: Seconds the run may take once every rank has started; None for no bound.
        start_timeout: Seconds until every rank must have started.
        hang_timeout: Seconds without a report or an optimizer step of any rank after which an attempt ends.
        max_restarts: New attempts, from the last checkpoint, within this try of the task: after a killed rank, a
            lost host or executor, a hang, a `rankzero.RetryableError`.
        stop_grace: Seconds between SIGTERM and SIGKILL when the run ends early.
        kwargs: Arguments of every Airflow operator, ``task_id`` first of all.

    Raises:
        AirflowFailException: the job cannot be run as described, so no retry can help.
        rankzero.WorkerFailedError: a rank failed; holds the first cause.
        rankzero.RankZeroError: other subclasses for slots, time, cancellation, the result.

    Example:
        >>> train_model = TorchDistributorOperator(          # doctest: +SKIP
        ...     task_id="train",
        ...     train=train,
        ...     op_kwargs={"lr": "{{ params.lr }}", "data": prepared},
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
    ui_color = "#f4e3d7"

    # Template fields are assigned unchanged: when a DAG file is parsed they may be XComArgs.
    def __init__(
        self,
        *,
        train: Callable[..., Any] | str | os.PathLike[str],
        op_args: Collection[Any] = (),
        op_kwargs: Mapping[str, Any] | None = None,
        num_processes: int = 2,
        processes_per_task: int = 1,
        use_gpu: bool = False,
        backend: str | None = "auto",
        conn_id: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        store: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        start_timeout: float = 600.0,
        hang_timeout: float | None = None,
        max_restarts: int = 0,
        stop_grace: float = STOP_GRACE,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
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
        self.stop_grace = stop_grace
        self._handle: RunHandle[Any] | None = None
        self._killed = False

    def execute(self, context: Context) -> Any:
        """Runs the training to its end and returns rank 0's value or its handle."""
        try:
            handle = start_owned(
                self._launcher(context),
                self._log_line,
                self.train,
                self._positional(),
                self._keyword(),
                on_start=self._on_start,
            )
            status = handle.status()
            if status.value and _is_strict_json(status.value[0]):
                return status.value[0]
            return handle.result_ref()
        except InvalidJobError as error:
            raise AirflowFailException(f"{type(error).__name__}: {error}") from error

    def on_kill(self) -> None:
        """Asks for the end of the run; `execute` waits for it and raises.

        Airflow calls this inside its signal handler, which interrupts the thread of `execute`
        anywhere, so this neither waits nor talks to Airflow.
        """
        self._killed = True
        self._cancel()

    def _on_start(self, handle: RunHandle[Any]) -> None:
        self.log.info("run directory: %s", handle.directory)
        self._handle = handle
        if self._killed:
            self._cancel()

    def _cancel(self) -> None:
        if self._handle:
            # If the request cannot be written: Airflow's SIGKILL follows, and ends the run too.
            with contextlib.suppress(OSError, RankZeroError):
                self._handle.cancel()

    def _log_line(self, line: str) -> None:
        self.log.info("%s", line)

    def _positional(self) -> tuple[Any, ...]:
        if isinstance(self.op_args, (str, bytes, Mapping)) or not isinstance(self.op_args, Iterable):
            raise InvalidJobError(f"op_args is {self.op_args!r}; it must be a list of arguments")
        return tuple(self.op_args)

    def _keyword(self) -> dict[str, Any]:
        if not isinstance(self.op_kwargs, Mapping):
            raise InvalidJobError(f"op_kwargs is {self.op_kwargs!r}; it must map names to arguments")
        return dict(self.op_kwargs)

    def _launcher(self, context: Context) -> Launcher:
        target = SparkTarget.from_conn_id(self.conn_id)
        conf = {**target.conf, **_as_text("spark_conf", self.spark_conf)}
        ti = context["ti"]
        map_index = -1 if ti.map_index is None else ti.map_index
        launcher = Launcher(
            self.num_processes,
            engine=SparkEngine(master=target.master, conf=conf),
            use_gpu=self.use_gpu,
            processes_per_task=self.processes_per_task,
            backend=self.backend,
            env=_as_text("env", self.env),
            timeout=self.timeout,
            start_timeout=self.start_timeout,
            hang_timeout=self.hang_timeout,
            max_restarts=self.max_restarts,
            stop_grace=self.stop_grace,
            store=self.store,
            run_id=run_id_of(ti.dag_id, ti.run_id, ti.task_id, map_index, ti.try_number),
        )
        self.log.info("%s ranks on %s", self.num_processes, target.master or "an embedded local Spark")
        return launcher


def _is_strict_json(value: Any) -> bool:
    """False for a diverged loss: Airflow's API server refuses ``nan`` and ``inf``."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _as_text(name: str, pairs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Numbers and flags as Spark spells them; core refuses what else is no string.

    A DAG with ``render_template_as_native_obj`` turns every ``"2"`` into a number.
    """
    if pairs is None:
        return {}
    if not isinstance(pairs, Mapping):
        raise InvalidJobError(f"{name} is {pairs!r}; it must map strings to strings")
    texts = {}
    for key, value in pairs.items():
        if isinstance(value, bool):
            value = str(value).lower()
        elif isinstance(value, (int, float)):
            value = str(value)
        if not isinstance(value, str):
            raise InvalidJobError(f"{name}[{key!r}] is a {type(value).__name__}; names and values must be strings")
        texts[key] = value
    return texts
