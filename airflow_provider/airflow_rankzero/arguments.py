"""The arguments of the decorator, for type checkers: a misspelt one is an error before a DAG is parsed."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from airflow.sdk import DAG, TaskGroup
    from airflow.sdk.definitions.retry_policy import RetryPolicy

    from rankzero import CheckpointConfig
    from rankzero.pipeline import NumProcesses, RestartOn
    from rankzero.tracking import Tracker


Callbacks = Callable[..., Any] | Collection[Callable[..., Any]] | None


class TaskArguments(TypedDict, total=False):
    """Keyword arguments of every Airflow operator."""

    task_id: str
    owner: str
    email: str | Sequence[str] | None
    email_on_retry: bool
    email_on_failure: bool
    retries: int | None
    retry_delay: timedelta | float
    retry_exponential_backoff: float
    max_retry_delay: timedelta | float | None
    retry_policy: RetryPolicy | None
    start_date: datetime | None
    end_date: datetime | None
    depends_on_past: bool
    ignore_first_depends_on_past: bool
    wait_for_past_depends_before_skipping: bool
    wait_for_downstream: bool
    dag: DAG | None
    params: MutableMapping[str, Any] | None
    default_args: dict[str, Any] | None
    priority_weight: int
    weight_rule: Any
    queue: str
    pool: str | None
    pool_slots: int
    execution_timeout: timedelta | None
    on_execute_callback: Callbacks
    on_failure_callback: Callbacks
    on_success_callback: Callbacks
    on_retry_callback: Callbacks
    on_skipped_callback: Callbacks
    pre_execute: Callable[..., Any] | None
    post_execute: Callable[..., Any] | None
    trigger_rule: str
    resources: dict[str, Any] | None
    run_as_user: str | None
    map_index_template: str | None
    max_active_tis_per_dag: int | None
    max_active_tis_per_dagrun: int | None
    executor: str | None
    executor_config: dict[str, Any] | None
    do_xcom_push: bool
    inlets: Any
    outlets: Any
    task_group: TaskGroup | None
    doc: str | None
    doc_md: str | None
    doc_json: str | None
    doc_yaml: str | None
    doc_rst: str | None
    task_display_name: str | None
    logger_name: str | None
    allow_nested_operators: bool
    render_template_as_native_obj: bool | None


class OperatorArguments(TaskArguments, total=False):
    """Keyword arguments for the options of a run, and those of every Airflow operator."""

    # Options of a run, made by `make reference`:
    num_processes: NumProcesses | str
    use_gpu: bool | None
    processes_per_task: int | str | None
    cpus_per_process: int | None
    backend: str | None
    env: Mapping[str, str] | None
    timeout: float | str | None
    start_timeout: float | str
    hang_timeout: float | str | None
    orphan_timeout: float | None
    max_restarts: int | str
    restart_on: RestartOn
    store: str | os.PathLike[str] | None
    dataset: Any | None
    max_preemptions: int | None
    stop_grace: float
    exit_timeout: float
    ports: tuple[int, int] | None
    checkpoints: CheckpointConfig | None
    warm_start: bool
    encrypt: bool | None
    code_version: str | None
    working_dir: str | os.PathLike[str] | None
    py_files: Sequence[str | os.PathLike[str]]
    excludes: Sequence[str]
    trackers: Sequence[Tracker]
    # The end of these options.


class TrainingArguments(OperatorArguments, total=False):
    """Keyword arguments of `TorchDistributorOperator`, which describes them, and of every Airflow operator."""

    conn_id: str | None
    master: str | None
    spark_conf: Mapping[str, str] | None
    retry_user_errors: bool
    skip_on_exit_code: int | Collection[int] | None
    log_ranks: Sequence[int] | None
    deferrable: bool
