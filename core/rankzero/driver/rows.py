"""Rows that ranks wrote with `rankzero.train.write_rows`: a restart keeps those that its checkpoint covers.

tables/0001/rows/part-0000-00001-000003.parquet     of attempt 0, carried into attempt 1 by its checkpoint
tables/0001/rows/part-0001-00000-000000.parquet     of attempt 1 itself
"""

from __future__ import annotations

import os
import shutil

from rankzero import store
from rankzero.data.schemas import is_schema
from rankzero.data.table import FOLDER, Written, belongs, folder_of, is_file
from rankzero.run.directory import RunDirectory


def carry_rows(run: RunDirectory, attempt: int, written: Written) -> None:
    """Moves rows that belong to an attempt's starting checkpoint into the folder of that attempt.

    If this process dies meanwhile, each file is in the folder of some attempt, where the next attempt finds it. Rows of
    an attempt that has a result are copied, since the result may be a handle of their table.

    Args:
        run: The run.
        attempt: Number of the attempt; the rows are in the folders of earlier ones.
        written: The rows that the checkpoint covers.

    Raises:
        OSError: the store refuses to move a file. Its fsspec driver may raise errors of other types.
    """
    values = store.list_names(run.path("result")) if written else []
    for number in _attempts_before(run, attempt) if written else ():
        keep = _has_result(number, values)
        for table, file in _carried(_rows(store.list_files(run.path(FOLDER, folder_of(number)))), written):
            folder = run.path(FOLDER, folder_of(attempt), table)
            store.make_directory(folder)
            carry(run.path(FOLDER, folder_of(number), table, file), store.join(folder, file), keep=keep)


def remove_rows(run: RunDirectory, attempts: range, written: Written, fresh_since: int = 0) -> None:
    """Deletes rows of these failed attempts, and of earlier ones whose value was never stored.

    Rows of later attempts stay: a delayed driver may have been replaced by now.

    Args:
        run: The run.
        attempts: The failed attempts.
        written: Rows to keep, because they belong to the checkpoint that the next attempt starts from.
        fresh_since: First attempt of this training. The rows of an earlier training belong to its checkpoints.
    """
    values = store.list_names(run.path("result"))
    for number in _attempts_before(run, attempts.stop):
        if number >= fresh_since and (number in attempts or not _has_result(number, values)):
            _remove_all_but(run, number, written)


def _remove_all_but(run: RunDirectory, number: int, written: Written) -> None:
    folder = run.path(FOLDER, folder_of(number))
    paths = store.list_files(folder)
    rows = _rows(paths)
    carried = set(_carried(rows, written))
    if not carried and len(rows) == len(paths):
        store.remove(folder)
        return
    # Other files in the folder are a user's.
    for table, file in set(rows) - carried:
        store.remove(store.join(folder, table, file))


def _carried(files: list[tuple[str, str]], written: Written) -> list[tuple[str, str]]:
    """Returns table and name of each file that a checkpoint covers, and of the schemas of its tables."""
    rows = [(table, file) for table, file in files if belongs(file, table, written)]
    tables = {table for table, _ in rows}
    return [(table, file) for table, file in files if table in tables and is_schema(file)] + rows


def _attempts_before(run: RunDirectory, attempt: int) -> list[int]:
    names = store.list_names(run.path(FOLDER))
    return [int(name) for name in names if name.isdecimal() and int(name) < attempt]


def _rows(paths: list[str]) -> list[tuple[str, str]]:
    """Returns table and name of each path that is a file which ranks have written, completely or not."""
    return [(table, file) for table, _, file in (path.partition("/") for path in paths) if is_file(file)]


def _has_result(attempt: int, values: list[str]) -> bool:
    return any(value.startswith(f"value-{attempt}.") for value in values)


def carry(source: str, target: str, *, keep: bool) -> None:
    """Moves a file within the store, or copies it if it has to be kept. Raises OSError."""
    if not store.is_url(source):
        if not keep:
            store.upload(source, target)
        elif not store.exists(target):
            if not store.copy_within(source, target):
                # A file system without hard links.
                with open(source, "rb") as rows, store.atomic_file(target) as file:
                    shutil.copyfileobj(rows, file)
                    file.flush()
                    os.fsync(file.fileno())
            store.sync_directory(os.path.dirname(target))
    elif not store.copy_within(source, target):
        raise OSError(f"{source} cannot be copied to {target} within its store")
    elif not keep:
        store.remove(source)
