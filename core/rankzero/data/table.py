"""`Table`: a handle to the rows that the ranks of a run have written."""

from __future__ import annotations

import contextlib
import hashlib
import re
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
"""Folder of the run directory with the tables: a folder for each attempt, in it one for each table."""


def folder_of(attempt: int) -> str:
    """Returns the name of the folder of one attempt."""
    return f"{attempt:04d}"


_FILE = re.compile(r"part-\d+-\d+-([0-9a-f]{16})\.parquet")


def file_of(rank: int, number: int, schema: Any) -> str:
    """Returns the name of a rank's file, which has a digest of its schema: of files with the same one is read once."""
    digest = hashlib.sha256(schema.serialize().to_pybytes()).hexdigest()[:16]
    return f"part-{rank:05d}-{number:06d}-{digest}.parquet"


def read_schemas(folder: str) -> dict[str, Any]:
    """Returns the distinct schemas of the files of a table, by the digest in the name of each file."""
    import pyarrow.parquet as pq
    from pyarrow import fs

    found: dict[str, Any] = {}
    filesystem, path = filesystem_of(folder)
    for info in filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True)):
        if (match := _FILE.fullmatch(info.base_name)) and match[1] not in found:
            # A rank removes the files of a call that raises.
            with contextlib.suppress(FileNotFoundError):
                found[match[1]] = pq.read_schema(info.path, filesystem=filesystem).remove_metadata()
    return found


@dataclass(frozen=True)
class Table:
    """A directory of Parquet files that `rankzero.train.write_rows` has written. It is a path: ``dataset=table``.

    The table is committed with its run: a training function that returns it makes it the run's result. Rows of a failed
    attempt are in no table. The table is deleted with its run directory.

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
        import pyarrow as pa
        from pyarrow import dataset

        if not (found := read_schemas(self.uri)):
            raise ResultError(f"the table {self.uri} has no files: no rank had rows, or its run directory was removed")
        filesystem, path = filesystem_of(self.uri)
        schema = pa.unify_schemas(list(found.values()))
        return dataset.dataset(path, format="parquet", filesystem=filesystem, schema=schema)

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
        names = self.to_arrow().schema.names
        # Spark would look for a path without a scheme in the cluster's default file system.
        uri = self.uri.replace("s3://", "s3a://", 1) if store.is_url(self.uri) else f"file://{self.uri}"
        frame: DataFrame = session.read.option("mergeSchema", "true").parquet(uri)
        return frame.select([f"`{name}`" for name in names])
