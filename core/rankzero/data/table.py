"""`Table`: a handle to the rows that the ranks of a run have written."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankzero import store
from rankzero.data import schemas
from rankzero.data.files import filesystem_of
from rankzero.data.widening import widened
from rankzero.errors import ResultError

if TYPE_CHECKING:
    import pandas
    import pyarrow.dataset
    from pyspark.sql import DataFrame, SparkSession

FOLDER = "tables"
"""Folder of the run directory with the tables: a folder for each attempt, in it one for each table."""


def folder_of(attempt: int) -> str:
    """Returns the name of the folder of one attempt."""
    return f"{attempt:04d}"


Written = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Rows that belong to a checkpoint: by table, attempt and rank (as text) how many files the rank had begun."""

_FILE = re.compile(r"part-(\d+)-(\d+)-(\d+)\.parquet")


def file_of(attempt: int, rank: int, number: int) -> str:
    """Returns the name of a table's file, unique over all attempts: a later attempt's folder may get the file, too."""
    return f"part-{attempt:04d}-{rank:05d}-{number:06d}.parquet"


def is_file(name: str) -> bool:
    """Returns True for the name of a file of a table: of rows, a schema, or one that is being written."""
    return bool(_FILE.fullmatch(name) or schemas.is_schema(name) or store.is_unfinished(name))


def belongs(file: str, table: str, written: Written) -> bool:
    """Returns True if a file of a table holds rows that belong to a checkpoint."""
    if not (found := _FILE.fullmatch(file)):
        return False
    attempt, rank, number = (int(digits) for digits in found.groups())
    return number < written.get(table, {}).get(str(attempt), {}).get(str(rank), 0)


@dataclass(frozen=True)
class Table:
    """A directory of Parquet files that `rankzero.train.write_rows` has written. It is a path: ``dataset=table``.

    The table is committed with its run: a training function that returns it makes it the run's result. Rows of a failed
    attempt are removed. The table is deleted with its run directory.

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
        """Returns the rows as a ``pyarrow.dataset.Dataset``, which reads them when they are used.

        Raises:
            ResultError: the directory was removed, or no rank had rows.
        """
        from pyarrow import dataset

        if not any(_FILE.fullmatch(name) for name in store.list_names(self.uri)):
            raise ResultError(f"the table {self.uri} has no files: no rank had rows, or its run directory was removed")
        filesystem, path = filesystem_of(self.uri)
        open_dataset = functools.partial(dataset.dataset, path, format="parquet", filesystem=filesystem)
        return open_dataset(schema=self._schema(open_dataset))

    def _schema(self, open_dataset: Callable[[], pyarrow.dataset.Dataset]) -> Any:
        """Returns the columns of all files."""
        import pyarrow as pa

        with contextlib.suppress(pa.ArrowException):
            if known := schemas.published(self.uri):
                return schemas.unify(known.values())
        # The schema of a rank whose rows were refused does not count, so the schemas of the data files decide.
        return schemas.unify(fragment.physical_schema for fragment in open_dataset().get_fragments())

    def to_pandas(self) -> pandas.DataFrame:
        """Returns all rows as a pandas DataFrame. Raises ResultError as `to_arrow`."""
        return self.to_arrow().to_table().to_pandas()

    def to_spark(self, session: SparkSession) -> DataFrame:
        """Returns the rows as a Spark DataFrame, read by the session's executors.

        Args:
            session: A session whose executors see the store; ``s3://`` is read by Spark's ``s3a``.

        Raises:
            ResultError: as `to_arrow`.
        """
        from pyspark.sql import functions as F

        table = self.to_arrow()
        files: dict[Any, list[str]] = {}
        for fragment in table.get_fragments() if len(schemas.published(self.uri)) != 1 else ():
            files.setdefault(fragment.physical_schema.remove_metadata(), []).append(fragment.path.rsplit("/", 1)[-1])
        # Spark would look for a path without a scheme in the cluster's default file system.
        uri = self.uri.replace("s3://", "s3a://", 1) if store.is_url(self.uri) else f"file://{self.uri}"
        read: Any = session.read
        # Spark reads files with different types of a column only separately.
        frames = [
            widened(read.parquet(*(store.join(uri, name) for name in names)).drop(*schemas.nulls(schema)), table.schema)
            for schema, names in files.items()
        ]
        frame = functools.reduce(
            lambda one, other: one.unionByName(other, allowMissingColumns=True), frames or [read.parquet(uri)]
        )
        missing = {name: F.lit(None) for name in table.schema.names if name not in frame.columns}
        found: DataFrame = frame.withColumns(missing).select([f"`{name}`" for name in table.schema.names])
        return found
