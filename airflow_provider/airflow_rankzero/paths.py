"""Relative paths of an operator: each begins in the folder of the DAG file, as the task has it.

The directory of the worker's process means nothing, and may hold Airflow's configuration and logs. A git bundle lies at
another place for each version.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from rankzero.errors import InvalidJobError
from rankzero.pipeline import store


def beside(dag_file: str, train: Any) -> Any:
    """Returns ``train`` with the relative path of a script, also in a command, as the path beside the DAG file.

    Example:
        >>> beside("/bundles/v2/dags/daily.py", "../train.py"), beside("/dags/daily.py", "package.module:function")
        ('/bundles/v2/train.py', 'package.module:function')
    """
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
    """Returns a path of this machine, or a list of paths, as absolute ones; None and other objects unchanged.

    Example:
        >>> path_beside("/dags/daily.py", "lib"), path_beside("/dags/daily.py", "/data/lib")
        ('/dags/lib', '/data/lib')
    """
    if isinstance(path, (list, tuple)):
        return [path_beside(dag_file, each) for each in path]
    if not isinstance(path, (str, os.PathLike)):
        return path
    return os.path.normpath(os.path.join(_folder(dag_file), os.path.expanduser(os.fspath(path))))


def dataset_beside(dag_file: str, dataset: Any) -> Any:
    """Returns a dataset, or a dict of them by name, with relative paths as those beside the DAG file.

    Spaces around a text are removed. Names of tables, queries, URLs (also ``file:/x``) and results of other tasks are
    unchanged.

    Example:
        >>> dataset_beside("/dags/daily.py", {"train": "data/", "test": "catalog.rows", "more": "s3://bucket/rows"})
        {'train': '/dags/data', 'test': 'catalog.rows', 'more': 's3://bucket/rows'}
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
