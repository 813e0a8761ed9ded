"""Arguments of the operator: which may be templates, what becomes of them, and how ranks get them.

`check_early` and `check_context` refuse mistakes when a DAG file is parsed. `convert` reads rendered texts. `beside`,
`path_beside` and `dataset_beside` resolve relative paths, which begin in the folder of the DAG file: the directory of
the worker's process means nothing, and a git bundle lies at another place for each version. `positional` and `keyword`
make plain arguments, since ranks may run where Airflow cannot be imported.
"""

from __future__ import annotations

import inspect
import logging
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import PurePath
from typing import Any, TypeVar

import attrs
from airflow.sdk import ObjectStoragePath
from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS
from airflow.sdk.definitions.xcom_arg import PlainXComArg, XComArg

from rankzero import Launcher
from rankzero.errors import InvalidJobError
from rankzero.pipeline import Option, check_callable, step_options, store

logger = logging.getLogger(__name__)

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

TEMPLATE_FIELDS = (
    *("train", "op_args", "op_kwargs", "conn_id", "master", "spark_conf"),
    *(name for name, option in OPTIONS.items() if option.late),
)
"""What may be a template, or an XCom. ``train`` only while it is a string: Airflow calls what can be called."""

_FLAGS = ("retry_user_errors", "deferrable")
_NUMBERS = {"log_ranks": "a list of ranks, such as [0]", "skip_on_exit_code": "exit codes, such as 99 or [98, 99]"}
# Arguments of the operator that are no options of a run.


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


def fields_to_render(task: Any, names: Iterable[str]) -> list[str]:
    """Returns the template fields that may be templates: some may be functions, others paths."""

    def may_be_template(name: str) -> bool:
        value = getattr(task, name)
        if isinstance(value, PurePath) and not isinstance(value, ObjectStoragePath):
            # Airflow 3.1 takes a path's `resolve` for its own.
            return False
        return name not in ("train", "restart_on") or not callable(value)

    return list(filter(may_be_template, names))


def unsteady(task: Any, context: Any, jinja_env: Any) -> list[str]:
    """Returns the names of arguments whose templates render to another text each time, such as the current time."""
    positional = enumerate(task.op_args) if isinstance(task.op_args, (list, tuple)) else ()
    named = task.op_kwargs.items() if isinstance(task.op_kwargs, Mapping) else ()
    texts = {f"argument {name}": value for name, value in (*positional, *named) if _is_late(value, of_xcom=False)}
    renderings = ({name: task.render_template(texts[name], context, jinja_env) for name in texts} for _ in range(2))
    first, second = renderings
    return [name for name in texts if first[name] != second[name]]


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
    given = {name: getattr(task, name) for name in OPTIONS}
    late = {name for name, value in given.items() if _is_late(value)}
    own = {name: getattr(task, name) for name in (*_FLAGS, *_NUMBERS)}
    if fixed := sorted(late.union(name for name in own if _is_late(own[name])).difference(TEMPLATE_FIELDS)):
        raise InvalidJobError(
            f"{fixed[0]} is {getattr(task, fixed[0])!r}, but cannot be a template or an XCom; "
            f"these can: {', '.join(TEMPLATE_FIELDS)}"
        )
    if not (callable(task.train) or isinstance(task.train, (str, os.PathLike, list, tuple)) or _is_late(task.train)):
        raise InvalidJobError(
            f"train is {task.train!r}; give a function, 'path/to/script.py', 'package.module:function', "
            "'-m package.module' or a list of words that are a command"
        )
    if not _is_late(task.op_args) and (
        isinstance(task.op_args, (str, bytes)) or not isinstance(task.op_args, Iterable)
    ):
        raise InvalidJobError(f"op_args is {task.op_args!r}; it must be a list of arguments")
    if not _is_late(task.op_kwargs) and not isinstance(task.op_kwargs, Mapping):
        raise InvalidJobError(f"op_kwargs is {task.op_kwargs!r}; it must map names to arguments")
    if callable(task.train) and isinstance(task.op_args, (list, tuple)) and isinstance(task.op_kwargs, Mapping):
        # Names are known before the values. A subclass may add arguments when the task runs.
        check_callable(task.train, tuple(task.op_args), dict(task.op_kwargs), are_all=False)
    for name in _FLAGS:
        if not isinstance(own[name], bool):
            raise InvalidJobError(f"{name} is {own[name]!r}; give True or False")
    for name, wanted in _NUMBERS.items():
        if own[name] is not None and not _are_whole_numbers(own[name]):
            raise InvalidJobError(f"{name} is {own[name]!r}; give {wanted}")
    if task.conn_id is not None and task.master is not None:
        raise InvalidJobError(
            f"conn_id is {task.conn_id!r}, and master is given: a connection names its master, so give one of the two "
            "(conn_id=None where default_args hold one)"
        )
    # The variables of the process that reads the DAG file may differ from the worker's; the others need heavy imports.
    known = {name: convert(name, given[name]) for name in set(given) - late - {"env", "dataset", "trackers"}}
    # The connection decides about GPUs later, and with GPUs every backend is valid.
    values = {name: value for name, value in known.items() if value is not None or OPTIONS[name].default is not None}
    values.setdefault("use_gpu", True)
    if "num_processes" not in values:
        values["num_processes"] = values.get("processes_per_task", 1)
    Launcher(**values)
    if values.get("store"):
        check_store(values["store"])


def as_list(numbers: Any) -> list[int] | None:
    """Returns whole numbers, also those of numpy, as a list of ``int``; None unchanged."""
    return None if numbers is None else [operator.index(number) for number in numbers]


def _are_whole_numbers(value: Any) -> bool:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection):
        return False
    return all(isinstance(each, Integral) and not isinstance(each, bool) for each in value)


def _is_late(value: Any, of_xcom: bool = True) -> bool:
    """Returns True for a value that is resolved at run time: a template, an XCom, a mapped task group's argument."""
    if isinstance(value, (list, tuple, dict)):
        return any(_is_late(each, of_xcom) for each in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, str):
        return any(mark in value for mark in ("{{", "{%", "{#"))
    return of_xcom and hasattr(value, "resolve") and not isinstance(value, os.PathLike)


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


def beside(dag_file: str, train: Any) -> Any:
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


# -- the arguments of ranks ---------------------------------------------------------------------


class _OfGroup(PlainXComArg):
    """The output of a task in a mapped task group for a task outside of it: a list by map index.

    Airflow itself gives the value of a single instance, None for no instance, and a list without skipped instances.
    """

    def resolve(self, context: Mapping[str, Any]) -> Any:
        """Returns the list; None stands for an instance without a value, which the log names."""
        ti, task_id = context["ti"], self.operator.task_id
        states = ti.get_task_states(dag_id=ti.dag_id, task_ids=[task_id], run_ids=[ti.run_id]).get(ti.run_id, {})
        # The key of an instance has its map index at the end; a group without instances has one key without.
        count = sum(key != task_id and state != "removed" for key, state in states.items())
        values: list[Any] = ti.xcom_pull(task_ids=task_id, key=self.key, map_indexes=range(count))
        if missing := [str(index) for index, value in enumerate(values) if value is None]:
            logger.info("%s has no value of map index %s: None stands for each", task_id, ", ".join(missing))
        return values


def by_map_index(value: Any, group: Any) -> Any:
    """Returns an argument in which outputs of mapped task groups, but not of the task's own group, are `_OfGroup`."""
    if type(value) is PlainXComArg:
        of_value = value.operator.get_closest_mapped_task_group()
        return value if of_value in (None, group) else _OfGroup(value.operator, value.key)
    if isinstance(value, XComArg):
        # Those of `.map()`, `.zip()` and `.concat()`.
        inner = {name: by_map_index(getattr(value, name), group) for name in ("arg", "args") if hasattr(value, name)}
        return attrs.evolve(value, **inner) if inner else value  # type: ignore[misc]
    if type(value) in (list, tuple):
        return type(value)(by_map_index(each, group) for each in value)
    if type(value) is dict:
        return {name: by_map_index(each, group) for name, each in value.items()}
    return value


def positional(op_args: Any) -> tuple[Any, ...]:
    """Returns ``op_args`` for the ranks. Raises InvalidJobError if it is no list, or as `plain`."""
    if isinstance(op_args, (str, bytes, Mapping)) or not isinstance(op_args, Iterable):
        raise InvalidJobError(f"op_args is {op_args!r}; it must be a list of arguments")
    return tuple(plain(list(op_args), "op_args"))


def keyword(op_kwargs: Any) -> dict[str, Any]:
    """Returns ``op_kwargs`` for the ranks. Raises InvalidJobError if it is no mapping, or as `plain`."""
    if not isinstance(op_kwargs, Mapping):
        raise InvalidJobError(f"op_kwargs is {op_kwargs!r}; it must map names to arguments")
    return dict(plain(dict(op_kwargs), "op_kwargs"))


def plain(value: Any, name: str) -> Any:
    """Returns an argument, also inside lists, tuples and dicts, with objects of Airflow as plain ones.

    Airflow's sequences become lists, its mappings dicts, and an ``ObjectStoragePath`` the text of its path or URL.
    Raises InvalidJobError, with the expression ``name``, for others, and for an undefined variable of a template.
    """
    of_airflow = type(value).__module__.partition(".")[0] == "airflow"
    if type(value) is tuple:
        return tuple(plain(item, f"{name}[{number}]") for number, item in enumerate(value))
    if type(value) is list or (of_airflow and isinstance(value, Sequence)):
        return [plain(item, f"{name}[{number}]") for number, item in enumerate(value)]
    if type(value) is dict or (of_airflow and isinstance(value, Mapping)):
        return {key: plain(value[key], f"{name}[{key!r}]") for key in value}
    if isinstance(value, ObjectStoragePath):
        # Without the connection, which no rank can look up.
        return value.path if value.protocol in ("", "file") else f"{value.protocol}://{value.path}"
    if of_airflow:
        raise InvalidJobError(
            f"{name} is a {type(value).__qualname__} of Airflow, which ranks cannot import: give the plain values in "
            "it that the training needs"
        )
    if type(value).__module__ == "jinja2.runtime" and hasattr(value, "_undefined_message"):
        raise InvalidJobError(f"{name} is a template whose variable is not defined: {value._undefined_message}")
    return value
