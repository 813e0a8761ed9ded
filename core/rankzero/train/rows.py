"""`write_rows`: writes rows that ranks compute into a table that is committed with the run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

from rankzero import store
from rankzero.data import schemas
from rankzero.data.table import FOLDER, Table, file_of, folder_of, read_schemas
from rankzero.errors import InvalidJobError, ResultError
from rankzero.run.checkpoints import begun_file
from rankzero.store import remote
from rankzero.train import context

GROUP_BYTES = 64 << 20
"""Approximate number of bytes of a row group before it is compressed."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def write_rows(batches: Any, name: str = "rows") -> Table:
    """Writes rows of this rank, of any number, into a table to which all ranks write.

    Every rank calls it, also several times; it does not wait for other ranks. The table is complete when the run has
    succeeded: return its handle, so that it is the run's result. The rows of an attempt that fails are in no table. If
    all its checkpoints are behind them, the run ends with a `ResultError`: write rows behind the training.

    Args:
        batches: An iterable of batches, or one batch: a dict of columns (tensors, arrays, lists, `Ragged`), a
            ``pyarrow.RecordBatch`` or ``Table``, or a pandas DataFrame. A tensor of two dimensions is a column of
            arrays of one length. Batches and ranks may have different columns: the table has all of them, and nulls
            where a batch lacks a column. A column has one type in all batches and on all ranks. Times are stored in
            microseconds and half precision as float32, since Spark cannot read other units and types.
        name: Name of the table.

    Returns:
        The handle of the table, the same on every rank.

    Raises:
        InvalidJobError: the name cannot be the name of a directory.
        ResultError: this host does not reach the run's store, or the store refuses the rows (a full disk).
        TypeError: a batch has an unknown type; a column has several types, in batches or on ranks; or two columns have
            one name as text, or differ only in case.
        Exception: the iterable's exception; the table keeps no row of this call.

    Example:
        >>> import torch
        >>> import rankzero.train as rt
        >>> table = rt.write_rows({"id": torch.arange(3), "score": torch.rand(3)}, "scores")
        >>> table.to_arrow().count_rows()
        3
    """
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise InvalidJobError(f"{name!r} cannot name a table: use letters, digits and _ . -")
    is_one = isinstance(batches, Mapping) or hasattr(batches, "schema") or hasattr(batches, "iloc")
    if not is_one and not isinstance(batches, Iterable):
        raise TypeError(f"rows are batches, such as dicts of columns, not a {type(batches).__name__}")
    writer = _TableWriter(context.own("write_rows"), name)
    try:
        for batch in [batches] if is_one else batches:
            writer.add(batch)
        writer.write()
        writer.close()
    except BaseException:
        for undo in (functools.partial(writer.files.__exit__, *sys.exc_info()), writer.remove):
            with contextlib.suppress(Exception):
                undo()
        raise
    return Table(writer.folder)


class _TableWriter:
    """Writes the rows of one call: a file for each set of columns, which all appear when the call ends."""

    def __init__(self, session: Any, name: str) -> None:
        self._session = session
        self._name = name
        self._parts = parts = session.parts
        self._client: remote.Client | None = None
        if parts is not None:
            parts.check_directory()
            self._client = parts.client()
            if not (parts.shared or self._client):
                raise ResultError(
                    f"this host does not reach {parts.run_directory}, where rows are to be written: give a store that "
                    "all ranks see, a shared path or the URL of an object store to which they have the right"
                )
        place = session.directory if parts is None else parts.run_directory
        self.folder = store.join(place, FOLDER, folder_of(session.context.attempt), name)
        self._schema: Any = session.row_schemas.get(name)
        self._has_begun = name in session.row_schemas
        self._waiting: list[Any] = []
        self._size = 0
        self.files = contextlib.ExitStack()
        """The open files, which appear when it is closed, and never after an exception."""
        self._writers: dict[str, tuple[Any, IO[bytes]]] = {}
        self._appeared: list[str] = []

    def add(self, batch: Any) -> None:
        """Adds rows. Raises TypeError for a column whose type fits no earlier one, ResultError as `write_rows`."""
        import pyarrow as pa

        from rankzero.data.columns import as_table

        table = schemas.portable(as_table(batch))
        self._note_begun()
        if not table.num_rows:
            return
        self._unify(table.schema)
        # Copied: arrays and tensors share their memory with Arrow, and their owner may reuse it.
        parts = [pa.ipc.read_record_batch(part.serialize(), part.schema) for part in table.to_batches()]
        self._waiting.append(pa.Table.from_batches(parts))
        self._size += table.nbytes
        if self._size >= GROUP_BYTES:
            self.write()

    def close(self) -> None:
        """Completes all files. Raises ResultError and TypeError as `write_rows`."""
        self._note_begun()
        with self._storing():
            self.files.close()
            others = read_schemas(self.folder) if self._writers and self._session.context.world_size > 1 else {}
        # Of two ranks whose columns do not fit together, the one that completes its rows last finds out.
        self._unify(*others.values())
        self._session.row_schemas[self._name] = self._schema

    def remove(self) -> None:
        """Removes the files that have appeared, of a call that raises."""
        if self._parts is not None:
            self._parts.check_directory()
        # The file by which it has begun comes last.
        while self._appeared:
            (self._client.remove if self._client else os.remove)(self._appeared.pop())

    def _unify(self, *found: Any) -> None:
        """Adds columns to the schema of this rank's rows. Raises TypeError if they do not fit together."""
        try:
            known = [] if self._schema is None else [self._schema]
            self._schema = schemas.unify_written([*known, *found]) if known or found else None
        except TypeError as error:
            raise TypeError(f"rows do not fit into the table {self._name!r}: {error}") from error

    def write(self) -> None:
        """Writes the buffered rows as one row group."""
        if not self._waiting:
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables, self._waiting, self._size = self._waiting, [], 0
        table = pa.concat_tables(tables, promote_options="default")
        without_type = schemas.nulls(table.schema)
        if len(without_type) < table.num_columns:
            table = table.drop_columns(without_type)
        with self._storing():
            columns = table.schema.to_string()
            if columns not in self._writers:
                number = next(self._session.row_files)
                path = store.join(self.folder, file_of(self._session.context.rank, number, table.schema))
                file = self.files.enter_context(self._opened(path))
                self._writers[columns] = self.files.enter_context(pq.ParquetWriter(file, table.schema)), file
            writer, file = self._writers[columns]
            writer.write_table(table)
            # The iterable may fork, and no request may be in flight then (see `rankzero.host.forks`).
            file.flush()

    def _note_begun(self) -> None:
        """Writes the file by which no attempt resumes from a checkpoint that this rank reports from now on."""
        writer = self._session.writer
        if not self._has_begun and self._parts is not None and writer is not None:
            name = begun_file(self._name, self._session.context.rank, writer.count)
            with self._storing(), self._opened(store.join(os.path.dirname(self.folder), name)):
                pass
        self._has_begun = True

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[IO[bytes]]:
        """Opens a file that appears if the block raises nothing, durably, as do the directories above it."""
        if self._client is not None:
            file = self._client.open_write(path)
            try:
                yield file
                self._parts.check_directory()
            except BaseException as error:
                # After this error the file never appears.
                remote.discard(file, ResultError(str(error)))
                raise
            file.close()
            self._appeared.append(path)
            return
        store.make_directory(os.path.dirname(path))
        with store.atomic_file(path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if self._parts is not None:
                self._parts.check_directory()
        self._appeared.append(path)
        # Up to the run directory.
        for folder in itertools.islice(pathlib.PurePath(path).parents, 4):
            store.sync_directory(str(folder))

    @contextlib.contextmanager
    def _storing(self) -> Iterator[None]:
        """Turns errors of the store in the block into ResultError."""
        try:
            yield
        except Exception as error:
            # Clients of object stores raise their own exceptions.
            raise ResultError(f"rows cannot be written to {self.folder}: {error}") from error
