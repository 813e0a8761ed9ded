"""The script and the arguments of a training as its ranks get them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from rankzero.errors import InvalidJobError


def beside(dag_file: str, train: Any) -> Any:
    """``train``, where it is the relative path of a script or names one in a command, as the path beside the DAG file.

    A worker's own directory means nothing, and a git bundle lies at another place for each version.

    Example:
        >>> beside("/bundles/v2/dags/daily.py", "../train.py"), beside("/dags/daily.py", "package.module:function")
        ('/bundles/v2/train.py', 'package.module:function')
    """
    folder = os.path.dirname(os.path.abspath(dag_file))
    if isinstance(train, (list, tuple)):
        return [_word_beside(folder, word, is_program=number == 0) for number, word in enumerate(train)]
    if not isinstance(train, (str, os.PathLike)):
        return train
    # Here: whoever only reads a DAG file needs no pickler.
    from rankzero.submit.training import is_module_reference

    path = os.path.expanduser(os.fspath(train))
    if isinstance(train, str) and is_module_reference(path):
        return train
    return os.path.normpath(os.path.join(folder, path))


def _word_beside(folder: str, word: Any, *, is_program: bool) -> Any:
    """A word of a command: still a relative path, by which the file travels."""
    is_path = isinstance(word, str) and not os.path.isabs(word) and (os.sep in word or not is_program)
    if is_path and os.path.isfile(os.path.join(folder, word)):
        return os.path.join(os.curdir, os.path.relpath(os.path.join(folder, word)))
    return word


def positional(op_args: Any) -> tuple[Any, ...]:
    """``op_args`` for the ranks. Raises InvalidJobError if it is no list."""
    if isinstance(op_args, (str, bytes, Mapping)) or not isinstance(op_args, Iterable):
        raise InvalidJobError(f"op_args is {op_args!r}; it must be a list of arguments")
    return tuple(plain(list(op_args)))


def keyword(op_kwargs: Any) -> dict[str, Any]:
    """``op_kwargs`` for the ranks. Raises InvalidJobError if it is no mapping."""
    if not isinstance(op_kwargs, Mapping):
        raise InvalidJobError(f"op_kwargs is {op_kwargs!r}; it must map names to arguments")
    return dict(plain(dict(op_kwargs)))


def plain(value: Any) -> Any:
    """``value`` with the lazy sequences of mapped tasks, also inside lists, tuples and dicts, as lists.

    The ranks cannot ask Airflow for their items.
    """
    from airflow.sdk.execution_time.lazy_sequence import LazyXComSequence

    if type(value) is list or isinstance(value, LazyXComSequence):
        return [plain(item) for item in value]
    if type(value) is tuple:
        return tuple(plain(item) for item in value)
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    return value
