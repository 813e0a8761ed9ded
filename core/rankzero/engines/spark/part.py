"""A Spark task's part of a DataFrame: it writes one Parquet file, and returns a row of facts about it.

This module is pickled by value, since rankzero does not need to be installed on executors. It uses only the standard
library, pyspark and pyarrow.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rankzero.data.kinds import count_nulls, is_vector

PREFIX = "rankzero-part-"
"""Beginning of the names of the files."""

GROUP_BYTES = 4 << 20
"""Approximate number of bytes of a row group before it is encoded: a window of a shuffle has 32 of them."""

_DENSE = 1

FACTS = "facts string"
"""Spark's schema of the row that a task returns about its file: the facts as JSON."""


@dataclass
class Part:
    """The facts about the file of one task, which grow while it is written.

    Attributes:
        file: Name of the file.
        rows: Number of rows in each row group.
        size: Bytes of all rows.
        digest: Sum of the checksums of all rows.
        lengths: For each column of arrays or vectors, the smallest and the largest length.
        nulls: Number of nulls that a tensor cannot hold, by the path of their column.
    """

    file: str
    rows: list[int] = field(default_factory=list)
    size: int = 0
    digest: int = 0
    lengths: dict[str, list[int]] = field(default_factory=dict)
    nulls: dict[str, int] = field(default_factory=dict)

    def note(self, batch: Any, names: list[str]) -> Any:
        """Records the facts about rows whose last column is their checksum; returns the other columns, renamed."""
        import pyarrow as pa
        import pyarrow.compute as pc

        *columns, hashed = batch.columns
        # Summed as two halves, which do not overflow.
        high = pc.sum(pc.shift_right(hashed, 32)).as_py()
        self.digest += (high << 32) + pc.sum(pc.bit_wise_and(hashed, 0xFFFFFFFF)).as_py()
        for name, column in zip(names, columns, strict=True):
            for path, count in count_nulls(name, column):
                self.nulls[path] = self.nulls.get(path, 0) + count
            counts = _lengths(column)
            if counts is not None and len(counts) > counts.null_count:
                found = pc.min_max(counts)
                bounds = [found["min"].as_py(), found["max"].as_py(), *self.lengths.get(name, [])]
                self.lengths[name] = [min(bounds), max(bounds)]
        return pa.RecordBatch.from_arrays(columns, names)


def _lengths(column: Any) -> Any:
    """Returns the length of each array or vector of a column; None for a column of another type."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_list(column.type):
        return column.value_lengths()
    if is_vector(column.type):
        kinds, sizes, _, values = column.flatten()
        return pc.if_else(pc.equal(kinds, _DENSE), values.value_lengths(), sizes)
    return None


def write_part(batches: Iterator[Any], names: list[str], filesystem: Any, folder: str) -> Iterator[Any]:
    """Writes the rows of one task into a file, and yields a row about it.

    Args:
        batches: The task's record batches, whose last column is a checksum of each row.
        names: The original names of the other columns; in Spark, names must not differ in case only.
        filesystem: A file system of pyarrow.
        folder: Directory of the file.

    Yields:
        One row of `FACTS`; none if there were no rows.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    # The partition number sorts files in the order of the DataFrame's rows; the rest keeps tasks that ran twice apart.
    part = Part(f"{PREFIX}{context.partitionId():06d}-{secrets.token_hex(16)}.parquet")
    groups = _groups(part.note(batch, names) for batch in batches if batch.num_rows)
    first = next(groups, None)
    if first is None:
        return
    # Dictionaries pay for texts; numbers are read faster without.
    texts = [field.name for field in first.schema if pa.types.is_string(field.type) or pa.types.is_binary(field.type)]
    with (
        filesystem.open_output_stream(f"{folder}/{part.file}") as sink,
        pq.ParquetWriter(sink, first.schema, compression="lz4", use_dictionary=texts, write_statistics=False) as writer,
    ):
        for table in itertools.chain([first], groups):
            writer.write_table(table, table.num_rows)
            part.rows.append(table.num_rows)
            part.size += table.nbytes
    yield pa.RecordBatch.from_pydict({"facts": [json.dumps(vars(part))]})


def _groups(batches: Iterator[Any]) -> Iterator[Any]:
    """Yields the same rows in tables of about `GROUP_BYTES`."""
    import pyarrow as pa

    waiting: list[Any] = []
    size = 0
    for batch in batches:
        # A batch of Spark has ten thousand rows, however wide they are; a group is at most a quarter too large.
        rows = max(1, batch.num_rows * (GROUP_BYTES // 4) // max(1, batch.nbytes))
        for low in range(0, batch.num_rows, rows):
            waiting.append(batch.slice(low, rows))
            size += waiting[-1].nbytes
            if size >= GROUP_BYTES:
                yield pa.Table.from_batches(waiting)
                waiting, size = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)
