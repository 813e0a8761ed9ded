"""`write_rows`: rows that ranks compute, as a table that is committed with the run."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from rankzero import store
from rankzero.data import schemas
from rankzero.data.table import FOLDER, Table, file_of, folder_of
from rankzero.errors import InvalidJobError, ResultError
from rankzero.train import context

if TYPE_CHECKING:
    from rankzero.store.remote import Client
    from rankzero.train.tables import RankTables

GROUP_BYTES = 64 << 20
"""Bytes of a row group, about, before it is compressed."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def write_rows(batches: Any, name: str = "rows") -> Table:
    """Writes rows of this rank, of any number, into a table to which all ranks write.

    Every rank may call it, several times too; it waits for nobody. The table is complete when the run has succeeded,
    and whoever has its handle then reads all of it: return the handle, so that it is the run's result.

    Rows that a rank has written when it reports a checkpoint belong to it, also those that a generator has given so
    far: an attempt that starts from this checkpoint has them in its table, with any number of ranks. All others of a
    failed attempt are removed. Where several ranks write, give checkpoints with ``sharded=True``.

    Args:
        batches: An iterable of batches, or one: a dict of columns (tensors, arrays, lists, `Ragged`), a
            ``pyarrow.RecordBatch`` or ``Table``, or a pandas DataFrame. Of a generator 64 MiB are held at a time. A
            tensor of two dimensions is a column of arrays of one length. Batches and ranks may have different columns:
            the table has all of them, each of the widest type, with nulls where a batch has none; no number is
            rounded. Times are stored in microseconds and half precision as float32, since Spark reads nothing else.
        name: Of the table.

    Returns:
        Its handle, the same on every rank.

    Raises:
        InvalidJobError: the name cannot be that of a directory.
        ResultError: this host reaches the run's store neither as a path nor by a client of its own, or the store does
            not take the rows (a full disk) or does not remove those of a call that raised; or the table lacks rows of
            before the checkpoint, or has some that this rank would write again, since it has not called
            `get_checkpoint`.
        TypeError: a batch is of another kind, a column has two types, in batches or on ranks, of which no type holds
            every value exactly, or two columns differ only in case.
        Exception: whatever the iterable raises; of its rows and columns only those of before the last checkpoint are in
            the table.

    Example:
        >>> import torch
        >>> import rankzero.train as rt
        >>> table = rt.write_rows({"id": torch.arange(3), "score": torch.rand(3)}, "scores")
        >>> table.to_arrow().count_rows()
        3
    """
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise InvalidJobError(f"{name!r} cannot name a table: use letters, digits and _ . -")
    session = context.own("write_rows")
    _check_rows_of_before(session, name)
    session.tables.remove_refused()
    place = _place(session)
    folder = store.join(place.location, FOLDER, folder_of(session.context.attempt), name)
    session.tables.files[name] += 0
    writer = TableWriter(session, folder, name, place)
    session.tables.writing.append(writer)
    try:
        for table in _tables(batches):
            writer.add(table)
        writer.complete()
    except BaseException:
        writer.discard()
        raise
    finally:
        session.tables.writing.remove(writer)
    return Table(folder)


def _check_rows_of_before(session: Any, name: str) -> None:
    if name in session.tables.lost:
        raise ResultError(
            f"the table {name!r} would lack rows that were written before the cursor that this attempt has loaded: "
            "they did not belong to its checkpoint. Report it from every rank with sharded=True, or begin the epoch "
            "anew, without load_state_dict"
        )
    if name in session.carried_tables and not session.resumed:
        raise ResultError(
            f"the table {name!r} has rows of before the checkpoint that this attempt starts from, and would get them "
            "twice: call get_checkpoint() first, on every rank that writes, and go on from there"
        )


@dataclass(frozen=True)
class _Place:
    """Where this rank writes its rows.

    Attributes:
        location: Path or URL of the directory.
        open_write: Opens a file there that appears as a whole, as a context manager, for its path or URL.
        remove: Removes a file there.
    """

    location: str
    open_write: Callable[[str], AbstractContextManager[IO[bytes]]]
    remove: Callable[[str], object]


def _place(session: Any) -> _Place:
    parts = session.parts
    if parts is None:
        return _Place(session.directory, _open_local, store.remove)
    if parts.shared:
        return _Place(parts.run_directory, _open_local, store.remove)
    if client := parts.client():
        return _Place(parts.run_directory, functools.partial(_open_remote, client), client.remove)
    raise ResultError(
        f"this host does not reach {parts.run_directory}, where rows are to be written: give a store that all ranks "
        "see, a shared path or the URL of an object store to which they have the right"
    )


@contextlib.contextmanager
def _open_local(path: str) -> Iterator[IO[bytes]]:
    """A file that is there as a whole or not at all."""
    store.make_directory(os.path.dirname(path))
    with store.atomic_file(path) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _open_remote(client: Client, url: str) -> Iterator[IO[bytes]]:
    """Opens a file of an object store. After an exception it may be there in part, and its writer removes it."""
    file = client.open_write(url)
    try:
        yield file
    except BaseException:
        # Not every client can abandon a file.
        with contextlib.suppress(Exception):
            getattr(file, "discard", file.close)()
        raise
    file.close()


class TableWriter:
    """The rows of one call, in files each of which is there as a whole or not at all.

    A checkpoint, and a column that is new, end a file. Files that no checkpoint has sealed are removed if the call
    raises. What fails while rows are made is the caller's error, not the store's.
    """

    def __init__(self, session: Any, folder: str, name: str, place: _Place) -> None:
        """Opens nothing yet.

        Args:
            session: This process as a worker.
            folder: Where the files go.
            name: Of the table.
            place: Opens and removes files there.
        """
        self._tables: RankTables = session.tables
        self._world = session.context
        self._folder = folder
        self._name = name
        self._place = place
        self._schema: Any = None
        self._waiting: list[Any] = []
        self._size = 0
        self._begun: list[str] = []
        self._opened = contextlib.ExitStack()
        self._writer: Any = None
        self._failure: ResultError | None = None

    def add(self, table: Any) -> None:
        """Takes rows. Raises TypeError if a column fits to no column so far, ResultError as `write_rows`."""
        table = schemas.portable(table)
        with self._tables.lock:
            if self._schema is None or not table.schema.equals(self._schema):
                table = self._unified(table)
            self._waiting.append(table)
            self._size += table.nbytes
            if self._size >= GROUP_BYTES:
                self._write()

    def _unified(self, table: Any) -> Any:
        """Returns the rows in the schema of this table so far, which grows if they do not fit into it."""
        import pyarrow as pa

        try:
            wanted = schemas.unify([self._schema or table.schema, table.schema], exact=True)
            if self._schema is None or not wanted.equals(self._schema):
                self._close_file()
                self._schema = self._published(wanted)
            return schemas.fit(table, self._schema)
        except pa.ArrowException as error:
            raise TypeError(f"rows do not fit into the table {self._name!r}: {error}") from error

    def _published(self, schema: Any) -> Any:
        import pyarrow as pa

        try:
            owner = f"{self._world.attempt:04d}-{self._world.rank:05d}-{next(self._tables.serials):06d}"
            return schemas.publish(self._folder, schema, owner, self._tables.schemas, self._open)
        except pa.ArrowException:
            raise
        except Exception as error:
            raise self._refusal(error) from error

    def _open(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """Opens a file, which is removed if the call raises before the file is sealed."""
        self._begun.append(path)
        return self._place.open_write(path)

    def complete(self) -> None:
        """Puts what was taken into its place, where it stays. Raises ResultError as `write_rows`."""
        with self._tables.lock:
            self._close_file()
            self._tables.schemas.update(path for path in self._begun if schemas.is_schema(os.path.basename(path)))
            self._begun.clear()

    def _close_file(self) -> None:
        if self._waiting:
            self._write()
        with self._storing():
            self._opened.close()
        self._writer = None

    def discard(self) -> None:
        """Removes what is not sealed, because of the exception that is being handled."""
        with self._tables.lock:
            with contextlib.suppress(Exception):
                self._opened.__exit__(*sys.exc_info())
            begun, self._begun = self._begun, []
            # Rows before the schema that describes them.
            self._tables.remove(reversed(begun), self._place.remove)

    def _write(self) -> None:
        """Writes what waits as one group of rows."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables, self._waiting, self._size = self._waiting, [], 0
        with self._storing():
            if self._writer is None:
                number = self._tables.files[self._name]
                self._tables.files[self._name] += 1
                path = store.join(self._folder, file_of(self._world.attempt, self._world.rank, number))
                file = self._opened.enter_context(self._open(path))
                self._writer = self._opened.enter_context(pq.ParquetWriter(file, _stored(self._schema)))
            self._writer.write_table(pa.concat_tables(tables).select(_stored(self._schema).names))

    @contextlib.contextmanager
    def _storing(self) -> Iterator[None]:
        """The store takes all of a file: nothing is written behind what it has refused."""
        if self._failure:
            raise self._failure
        try:
            yield
        except Exception as error:
            # Drivers of object stores have exceptions of their own.
            self.discard()
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> ResultError:
        self._failure = ResultError(f"rows cannot be written to {self._folder}: {error}")
        return self._failure


def _stored(schema: Any) -> Any:
    """Returns the columns of a data file: those of nulls alone have a type in the schema file only."""
    import pyarrow as pa

    without_type = schemas.nulls(schema)
    fields = [field for field in schema if field.name not in without_type]
    return pa.schema(fields) if fields else schema


def _tables(batches: Any) -> Iterator[Any]:
    is_one = isinstance(batches, Mapping) or hasattr(batches, "schema") or hasattr(batches, "iloc")
    if not is_one and not isinstance(batches, Iterable):
        raise TypeError(f"rows are batches, such as dicts of columns, not a {type(batches).__name__}")
    for batch in [batches] if is_one else batches:
        table = _table(batch)
        if table.num_rows:
            yield table


def _table(batch: Any) -> Any:
    import pyarrow as pa

    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, pa.RecordBatch):
        return pa.Table.from_batches([batch])
    if hasattr(batch, "iloc"):
        return pa.Table.from_pandas(batch, preserve_index=False)
    if isinstance(batch, Mapping):
        try:
            return pa.table({str(name): _array(column) for name, column in batch.items()})
        except pa.ArrowInvalid as error:
            lengths = {name: len(column) for name, column in batch.items()}
            raise TypeError(f"a batch has columns of different lengths or types: {lengths}: {error}") from error
    raise TypeError(f"a batch is a dict of columns, an Arrow table or a DataFrame, not a {type(batch).__name__}")


def _array(column: Any) -> Any:
    """A column of a batch as an Arrow array."""
    import pyarrow as pa
    import torch

    from rankzero.data import columns

    if isinstance(column, columns.Ragged):
        if len(column.offsets) and int(column.offsets[-1]) > columns.MAX_VALUES:
            count = int(column.offsets[-1])
            raise TypeError(f"a column of arrays has {count} values in one batch, too many: write smaller batches")
        return pa.ListArray.from_arrays(_array(column.offsets.int()), _array(column.values))
    if isinstance(column, torch.Tensor):
        column = column.detach().cpu()
        column = (column.float() if column.dtype == torch.bfloat16 else column).numpy()
    if isinstance(column, Mapping):
        arrays = {str(name): _array(inner) for name, inner in column.items()}
        return pa.StructArray.from_arrays(list(arrays.values()), list(arrays))
    if getattr(column, "ndim", 1) > 1:
        inner = _array(column.reshape(-1, *column.shape[2:]))
        return pa.FixedSizeListArray.from_arrays(inner, column.shape[1])
    return pa.array(column)
