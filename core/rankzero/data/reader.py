"""`Reader`: decodes row groups of a dataset's Parquet files with pyarrow: one after the other, or those of a window."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from rankzero.data import order
from rankzero.data.files import PARQUET_OPTIONS, is_changed, open_file
from rankzero.data.manifest import File, Manifest
from rankzero.data.order import Piece, pieces_of, windows_of
from rankzero.data.shares import Spans
from rankzero.errors import ResultError
from rankzero.host import forks

FILES = 64
"""Most files that stay open, so that their footers are not read for every row group."""

BUFFER = 256 << 10
"""Bytes of each column that are read at a time of a row group that is decoded in pieces."""

_kept: dict[tuple[str, ...], Any] = {}
"""By files and columns, all rows of datasets of one window, which every epoch reads; any thread may clear it."""


class Reader:
    """Reads the rows of a dataset as Arrow record batches. One thread uses it."""

    def __init__(self, manifest: Manifest, columns: Sequence[str] | None) -> None:
        """Prepares the reader without opening a file.

        Args:
            manifest: Manifest of the dataset.
            columns: Names of the columns to read; None for all.
        """
        self._manifest = manifest
        self._schema = manifest.arrow_schema()
        self.columns = list(columns) if columns is not None else list(self._schema.names)
        self._groups = [(file, number) for file in manifest.files for number in range(len(file.rows))]
        self._open = functools.lru_cache(FILES)(_opened)
        self._streams: dict[int, tuple[int, Iterator[Any]]] = {}
        files = [f"{file.location} {file.content}" for file in manifest.files]
        self._key = (*files, "", *self.columns) if windows_of(manifest) == 1 else ()

    def rows(self, spans: Spans) -> Iterator[Any]:
        """Yields the rows of these ascending ranges, in the order of the files, as record batches."""
        before, at = 0, 0
        for piece in itertools.chain.from_iterable(pieces_of(self._manifest, ordered=True)):
            read = None
            while at < len(spans) and spans[at][0] < before + piece.length:
                low, high = max(spans[at][0], before), min(spans[at][1], before + piece.length)
                if low < high:
                    read = self._read(piece) if read is None else read
                    yield read.slice(low - before, high - low)
                if spans[at][1] > before + piece.length:
                    break
                at += 1
            before += piece.length

    def window(self, pieces: list[Piece]) -> Any:
        """Returns the rows of these pieces as one record batch; those of a dataset of one window are kept."""
        import pyarrow as pa

        if (kept := _kept.get(self._key)) is not None:
            return kept
        read = []
        last = {self._groups[piece.group][0].location: piece for piece in pieces}
        for piece in pieces:
            forks.pause(lambda: None)
            read.append(self._read(piece, check=piece in last.values()))
        batches = pa.Table.from_batches(read).combine_chunks().to_batches()
        if len(batches) != 1:
            raise ResultError("a window of rows has more than 2 GiB of text: write the table in smaller row groups")
        if self._key:
            if sum(batch.nbytes for batch in (*_kept.values(), *batches)) > order.WINDOW:
                _kept.clear()
            [_kept[self._key]] = batches
        return batches[0]

    def _read(self, piece: Piece, *, check: bool = True) -> Any:
        """Returns the rows of a piece as a record batch, and may check afterwards that its file is unchanged."""
        file, number = self._groups[piece.group]
        try:
            is_whole = piece.length == file.rows[number]
            table = self._whole(file, number) if is_whole else self._streamed(piece, file, number)
            if check and is_changed(file.location, file.stamp, file.content):
                raise ResultError(
                    f"{file.location} of the dataset has other rows than when the run was submitted: submit the run "
                    "again to train on them from scratch, or write the rows as they were"
                )
            return self._in_schema(table, file, piece.length)
        except FileNotFoundError:
            raise ResultError(f"{file.location} of the dataset does not exist, or this host does not see it") from None
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ResultError(f"{file.location} of the dataset cannot be read: {error}") from error

    def _whole(self, file: File, number: int) -> Any:
        opened = self._open(file.location)
        if number >= opened.num_row_groups:
            raise ResultError(_shorter(file, number, 0))
        table = opened.read_row_group(number, columns=self._stored(file))
        if table.num_rows != file.rows[number]:
            raise ResultError(_shorter(file, number, table.num_rows))
        return table

    def _streamed(self, piece: Piece, file: File, number: int) -> Any:
        """Returns a piece of a row group that is decoded from its first row on, a piece at a time."""
        import pyarrow as pa

        at, stream = self._streams.pop(piece.group, (-1, iter(())))
        if not 0 <= at <= piece.low:
            # An own handle, which reads little at a time: a window has pieces of many groups.
            opened = _opened(file.location, buffer_size=BUFFER, pre_buffer=False)
            stream, at = opened.iter_batches(piece.step, [number], columns=self._stored(file)), 0
        batches = []
        while at < piece.low + piece.length:
            batch = next(stream, None)
            if batch is None:
                raise ResultError(_shorter(file, number, at))
            at += batch.num_rows
            if at > piece.low:
                batches.append(batch.slice(max(0, piece.low - (at - batch.num_rows))))
        if at < file.rows[number]:
            self._streams[piece.group] = at, stream
        return pa.Table.from_batches(batches)

    def _stored(self, file: File) -> list[str]:
        """Returns the names of the columns to read that are in a file, and not in its name."""
        return [name for name in self.columns if name not in file.partition]

    def _in_schema(self, table: Any, file: File, rows: int) -> Any:
        """Returns rows of a file in the dataset's types, with the columns whose values are in its name, or nulls."""
        import pyarrow as pa
        import pyarrow.compute as pc

        arrays = []
        for name in self.columns:
            kind = self._schema.field(name).type
            if name in file.partition or name not in table.column_names:
                arrays.append(pa.repeat(pa.scalar(file.partition.get(name)).cast(kind), rows))
            else:
                # Categories become values, and times are truncated.
                options = pc.CastOptions(target_type=kind, allow_time_truncate=True)
                arrays.append(pc.cast(table.column(name), options=options).combine_chunks())
        return pa.RecordBatch.from_arrays(arrays, self.columns)


def _opened(location: str, **options: Any) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(open_file(location), **PARQUET_OPTIONS, **options)


def _shorter(file: File, number: int, rows: int) -> str:
    return f"{file.location} has {rows} rows where it had {file.rows[number]} when the run was submitted"
