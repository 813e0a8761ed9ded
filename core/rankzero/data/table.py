"""`Table`: the handle of rows that the ranks of a run have written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankzero import store
from rankzero.data.files import filesystem_of
from rankzero.errors import ResultError

if TYPE_CHECKING:
    import pandas
    import pyarrow.dataset
    from pyspark.sql import DataFrame, SparkSession

FOLDER = "tables"
"""Where tables lie in the run directory: a folder for each attempt, in it one for each table."""


def folder_of(attempt: int) -> str:
    """The name of the folder of one attempt."""
    return f"{attempt:04d}"


Written = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Rows that belong to a checkpoint: by table, attempt and rank (as text) how many files that rank had begun there."""

_FILE = re.compile(r"part-(\d+)-(\d+)-(\d+)\.parquet")


def file_of(attempt: int, rank: int, number: int) -> str:
    """The name of a file of a table. Every attempt has its own: it may be carried into the folder of a later one."""
    return f"part-{attempt:04d}-{rank:05d}-{number:06d}.parquet"


def belongs(file: str, table: str, written: Written) -> bool:
    """True if a file of a table holds rows that belong to a checkpoint."""
    if not (found := _FILE.fullmatch(file)):
        return False
    attempt, rank, number = (int(digits) for digits in found.groups())
    return number < written.get(table, {}).get(str(attempt), {}).get(str(rank), 0)


@dataclass(frozen=True)
class Table:
    """A directory of Parquet files, which `rankzero.train.write_rows` has written. It is a path: ``dataset=table``.

    It is committed with its run: a function that returns it makes it the run's result, and what a failed attempt wrote
    is removed. It lives as long as its run directory.

    Attributes:
        uri: Absolute local path or URL of the directory.

    Example:
        >>> from rankzero import Launcher
        >>> def score(rows: int) -> object:
        ...     import rankzero.train as rt
        ...     return rt.write_rows({"row": list(range(rows)), "rank": [rt.get_context().rank] * rows})
        >>> Launcher(2).run(score, 3).to_arrow().count_rows()
        6
    """

    uri: str

    def __fspath__(self) -> str:
        return self.uri

    def to_arrow(self) -> pyarrow.dataset.Dataset:
        """The rows as a ``pyarrow.dataset.Dataset``, of which nothing is read yet.

        Raises:
            ResultError: the directory was removed, or no rank had rows.
        """
        from pyarrow import dataset

        if not store.list_names(self.uri):
            raise ResultError(f"the table {self.uri} has no files: no rank had rows, or its run directory was removed")
        filesystem, path = filesystem_of(self.uri)
        return dataset.dataset(path, format="parquet", filesystem=filesystem)

    def to_pandas(self) -> pandas.DataFrame:
        """All rows in memory. Raises ResultError as `to_arrow`."""
        return self.to_arrow().to_table().to_pandas()

    def to_spark(self, session: SparkSession) -> DataFrame:
        """The rows as a Spark DataFrame, read by the session's executors.

        Args:
            session: One whose executors see the store; ``s3://`` is read by Spark's ``s3a``.
        """
        uri: Any = self.uri
        return session.read.parquet(uri.replace("s3://", "s3a://", 1) if uri.startswith("s3://") else uri)
