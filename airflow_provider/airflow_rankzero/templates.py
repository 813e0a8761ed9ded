"""Arguments of the operator: which may be templates, what is refused early, and what becomes of them.

`check_early` and `check_context` refuse mistakes when a DAG file is parsed. `options_of` reads rendered values.
Relative paths begin in the folder of the DAG file: the directory of the worker's process means nothing, and a git
bundle lies at another place for each version.
"""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from datetime import datetime, timedelta
from numbers import Integral
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS

from airflow_rankzero import xcom
from rankzero import Launcher
from rankzero.errors import InvalidJobError
from rankzero.pipeline import Option, check_callable, step_options, store

if TYPE_CHECKING:
    from airflow.sdk import DAG, TaskGroup
    from airflow.sdk.definitions.retry_policy import RetryPolicy

    from rankzero import CheckpointConfig
    from rankzero.pipeline import NumProcesses, RestartOn
    from rankzero.tracking import Tracker

F = TypeVar("F", bound=Callable[..., None])

OPTIONS = step_options(
    late="Templated.",
    num_processes={"default": 2},
    processes_per_task={"default": None, "more": "None: the connection's value, else 1."},
    use_gpu={"default": None, "more": "None: the connection's value."},
    store={"more": "The connection's value, and ``[rankzero] store`` of Airflow's configuration, come before these."},
    orphan_timeout={"help": "Seconds that a run continues without a follower; None: until the next try of the task."},
    checkpoints={"default": None, "more": "None: the newest two."},
)
"""The options of a run, by name, that are arguments of the operator; None as a default: the connection decides."""

ARGUMENTS = (
    "op_args",
    "op_kwargs",
    "conn_id",
    "master",
    "spark_conf",
    *(each for each in OPTIONS if OPTIONS[each].late),
)
"""Arguments that may be templates or XComs, and ``train`` unless it is a function."""

_FLAGS = ("retry_user_errors", "deferrable")
_NUMBERS = {"log_ranks": "a list of ranks, such as [0]", "skip_on_exit_code": "exit codes, such as 99 or [98, 99]"}


def annotation(option: Option) -> str:
    """Returns the type of an operator's argument: that of the option, or a text that is rendered to a number."""
    types = [kind for kind in option.type.split(" | ") if kind != "None"]
    late = ["str"] if option.is_number else []
    optional = ["None"] if option.default is None or "None" in option.type else []
    return " | ".join([*types, *late, *optional])


def takes_options(init: F) -> F:
    """Gives a constructor a signature with an argument for each option, by which Airflow finds default arguments."""
    signature = inspect.signature(init)
    *own, rest = signature.parameters.values()
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=annotation(option))
        for name, option in OPTIONS.items()
    ]
    parameters = [*own, *added, rest.replace(annotation="Any")]
    init.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return init


def convert(name: str, value: Any) -> Any:
    """Returns a rendered text as the number that it stands for, and everything else unchanged.

    ``""`` and ``"None"`` are None where the argument may be None. Raises InvalidJobError if the text is no number.

    Example:
        >>> convert("num_processes", "2:8"), convert("timeout", "None"), convert("store", "4")
        ((2, 8), None, '4')
    """
    option = OPTIONS.get(name)
    if not isinstance(value, str) or option is None or not option.is_number:
        return value
    if option.default is None and value.strip() in ("", "None"):
        return None
    try:
        return option.read(value)
    except InvalidJobError as error:
        raise InvalidJobError(f"{error}, or render to one") from None


def check_early(task: Any) -> None:
    """Raises InvalidJobError for obvious mistakes in a DAG file; templates and XComs are not known yet, and pass."""
    given = {name: getattr(task, name) for name in (*OPTIONS, *_FLAGS, *_NUMBERS)}
    late = {name for name, value in given.items() if _is_late(value)}
    if fixed := sorted(late.difference(ARGUMENTS)):
        raise InvalidJobError(
            f"{fixed[0]} is {given[fixed[0]]!r}, but cannot be a template or an XCom; "
            f"these can: train, {', '.join(ARGUMENTS)}"
        )
    is_known = not _is_late(task.script)
    if is_known and not (callable(task.train) or isinstance(task.train, (str, os.PathLike, list, tuple))):
        check_callable(task.train, (), {})
    if not _is_late(task.op_args):
        xcom.positional(task.op_args)
    if not _is_late(task.op_kwargs):
        xcom.keyword(task.op_kwargs)
    if callable(task.train) and isinstance(task.op_args, (list, tuple)) and isinstance(task.op_kwargs, Mapping):
        # Names are known before the values. A subclass may add arguments when the task runs.
        check_callable(task.train, tuple(task.op_args), dict(task.op_kwargs), are_all=False)
    for name in _FLAGS:
        if not isinstance(given[name], bool):
            raise InvalidJobError(f"{name} is {given[name]!r}; give True or False")
    for name, wanted in _NUMBERS.items():
        numbers = given[name]
        is_one = name == "skip_on_exit_code" and isinstance(numbers, Integral)
        if numbers is not None and not _are_whole_numbers([numbers] if is_one else numbers):
            raise InvalidJobError(f"{name} is {numbers!r}; give {wanted}")
    if task.conn_id is not None and task.master is not None:
        raise InvalidJobError(
            f"conn_id is {task.conn_id!r}, and master is given: a connection names its master, so give one of the two "
            "(conn_id=None where default_args hold one)"
        )
    # The variables of the process that reads the DAG file may differ from the worker's; the others need heavy imports.
    known = {name: convert(name, given[name]) for name in set(OPTIONS) - late - {"env", "dataset", "trackers"}}
    # The connection decides about GPUs later, and with GPUs every backend is valid.
    values = {name: value for name, value in known.items() if value is not None or OPTIONS[name].default is not None}
    values.setdefault("use_gpu", True)
    if "num_processes" not in values:
        values["num_processes"] = values.get("processes_per_task", 1)
    Launcher(**values)
    if values.get("store"):
        check_store(values["store"])


def prepare(task: Any) -> None:
    """Brings checked arguments into a form that Airflow can render, and the trigger can serialize as JSON."""
    if task.skip_on_exit_code is not None and not isinstance(task.skip_on_exit_code, Collection):
        task.skip_on_exit_code = [task.skip_on_exit_code]
    task.log_ranks, task.skip_on_exit_code = as_list(task.log_ranks), as_list(task.skip_on_exit_code) or []
    if callable(task.restart_on):
        # Airflow would call it.
        task.restart_on = [task.restart_on]
    for name in ("script", "store", "dataset"):
        # Airflow 3.1 takes a path's `resolve` for that of an XCom.
        if type(path := getattr(task, name)).__module__.startswith("pathlib"):
            setattr(task, name, os.fspath(path))


def options_of(task: Any, dag_file: str) -> dict[str, Any]:
    """Returns the rendered options of a run. Raises InvalidJobError if one cannot be read."""
    options = {name: convert(name, getattr(task, name)) for name in OPTIONS}
    restart_on = options["restart_on"]
    if isinstance(restart_on, list) and len(restart_on) == 1 and callable(restart_on[0]):
        options["restart_on"] = restart_on[0]
    for name in ("working_dir", "py_files"):
        options[name] = path_beside(dag_file, options[name])
    options["dataset"] = dataset_beside(dag_file, options["dataset"])
    return options


def as_list(numbers: Any) -> list[int] | None:
    """Returns whole numbers, also those of numpy, as a list of ``int``; None unchanged."""
    return None if numbers is None else [operator.index(number) for number in numbers]


def _are_whole_numbers(value: Any) -> bool:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection):
        return False
    return all(isinstance(each, Integral) and not isinstance(each, bool) for each in value)


def _is_late(value: Any) -> bool:
    """Returns True for a value that is resolved at run time: a template, an XCom, a mapped task group's argument."""
    if isinstance(value, (list, tuple, dict)):
        return any(map(_is_late, value.values() if isinstance(value, dict) else value))
    if isinstance(value, str):
        return any(mark in value for mark in ("{{", "{%", "{#"))
    return hasattr(value, "resolve") and not isinstance(value, os.PathLike)


def check_context(function: Any, op_args: Any, op_kwargs: Any) -> None:
    """Raises InvalidJobError for a parameter that is named like a variable of Airflow's context and is not passed."""
    if not isinstance(op_args, (list, tuple)) or not isinstance(op_kwargs, Mapping):
        # They come from another task.
        return
    try:
        signature = inspect.signature(function)
        passed = signature.bind_partial(*op_args, **op_kwargs).arguments
    except (TypeError, ValueError):
        # It is no function, or the arguments do not fit, which has its own error.
        return
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            is_context = name == "context"
        else:
            is_context = name in KNOWN_CONTEXT_KEYS
        if is_context and name not in passed:
            raise InvalidJobError(
                f"the parameter {str(parameter).partition(':')[0].partition('=')[0]} is named like a variable of "
                "Airflow's context, which ranks do not have: pass the value that the training needs, such as "
                'ds="{{ ds }}", or rename the parameter'
            )


# -- paths --------------------------------------------------------------------------------------


def train_beside(dag_file: str, train: Any) -> Any:
    """Returns ``train`` with the relative path of a script, also in a command, as the path beside the DAG file."""
    if isinstance(train, (list, tuple)):
        folder = _folder(dag_file)
        return [_word_beside(folder, word, is_program=number == 0) for number, word in enumerate(train)]
    if not isinstance(train, (str, os.PathLike)):
        return train
    # Imported here: a process that only reads a DAG file needs no pickler.
    from rankzero.pipeline import is_module_reference

    if isinstance(train, str) and is_module_reference(os.path.expanduser(train)):
        return train
    return path_beside(dag_file, train)


def path_beside(dag_file: str, path: Any) -> Any:
    """Returns a path of this machine, or a list of paths, as absolute ones; None and other objects unchanged."""
    if isinstance(path, (list, tuple)):
        return [path_beside(dag_file, each) for each in path]
    if not isinstance(path, (str, os.PathLike)):
        return path
    return os.path.normpath(os.path.join(_folder(dag_file), os.path.expanduser(os.fspath(path))))


def dataset_beside(dag_file: str, dataset: Any) -> Any:
    """Returns a dataset, or a dict of them by name, with relative paths as those beside the DAG file.

    Spaces around a text are removed. Names of tables, queries, URLs (also ``file:/x``) and results of other tasks are
    unchanged.
    """
    if isinstance(dataset, Mapping):
        return {name: dataset_beside(dag_file, source) for name, source in dataset.items()}
    if isinstance(dataset, str):
        dataset = dataset.strip()
    if not isinstance(dataset, (str, PurePath)) or not dataset or store.has_scheme(os.fspath(dataset)):
        return dataset
    from rankzero.pipeline import datasets

    found = path_beside(dag_file, dataset)
    return found if datasets.is_path(dataset) or os.path.exists(found) else dataset


def check_store(root: str | os.PathLike[str]) -> None:
    """Raises InvalidJobError for a relative path: the tries of a task would not find the same run directory by it."""
    if not store.is_absolute(root):
        raise InvalidJobError(
            f"store is {os.fspath(root)!r}, a relative path, which would begin in the worker's own directory; "
            "give an absolute path or a URL"
        )


def _folder(dag_file: str) -> str:
    return os.path.dirname(os.path.abspath(dag_file))


def _word_beside(folder: str, word: Any, *, is_program: bool) -> Any:
    """Returns a word of a command: still a relative path, by which the file travels."""
    is_path = isinstance(word, str) and not os.path.isabs(word) and (os.sep in word or not is_program)
    if is_path and os.path.isfile(os.path.join(folder, word)):
        return os.path.join(os.curdir, os.path.relpath(os.path.join(folder, word)))
    return word


# -- the arguments, for type checkers: a misspelt one is an error before a DAG is parsed --------

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
