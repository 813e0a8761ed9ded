"""`write_rows`: writes rows that ranks compute into a table that is committed with the run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from rankzero import store
from rankzero.data import schemas
from rankzero.data.table import FOLDER, Table, file_of, folder_of
from rankzero.errors import InvalidJobError, ResultError
from rankzero.store import remote
from rankzero.train import context

if TYPE_CHECKING:
    from rankzero.train.parts import Parts
    from rankzero.train.tables import RankTables

GROUP_BYTES = 64 << 20
"""Approximate number of bytes of a row group before it is compressed."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def write_rows(batches: Any, name: str = "rows") -> Table:
    """Writes rows of this rank, of any number, into a table to which all ranks write.

    Every rank may call it, also several times; it does not wait for other ranks. The table is complete when the run has
    succeeded, and its handle then reads all rows: return the handle, so that it is the run's result.

    Rows that a rank has written before it reports a checkpoint belong to the checkpoint, including those that a
    generator has yielded so far. An attempt that starts from this checkpoint has them in its table, with any number of
    ranks. All other rows of a failed attempt are removed. If several ranks write, report checkpoints with
    ``sharded=True``.

    Args:
        batches: An iterable of batches, or one batch: a dict of columns (tensors, arrays, lists, `Ragged`), a
            ``pyarrow.RecordBatch`` or ``Table``, or a pandas DataFrame. At most about 64 MiB of a generator's rows are
            in memory. A tensor of two dimensions is a column of arrays of one length. Batches and ranks may have
            different columns: the table has all of them, each with the widest type, and nulls where a batch lacks a
            column. No number is rounded. Times are stored in microseconds and half precision as float32, since Spark
            cannot read other units and types.
        name: Name of the table.

    Returns:
        The handle of the table, the same on every rank.

    Raises:
        InvalidJobError: the name cannot be the name of a directory.
        ResultError: this host reaches the run's store neither as a path nor with a client; the store refuses the rows
            (a full disk), or to remove those of a call that raised; the table lacks rows from before the checkpoint, or
            has rows that this rank would write a second time, since it has not called `get_checkpoint`.
        TypeError: a batch has an unknown type; a column has types, in batches or on ranks, whose values no common type
            holds exactly; or two columns have one name as text, or differ only in case.
        Exception: the iterable's exception; the table keeps only rows and columns from before the last checkpoint.

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
        thread = threading.get_ident()
        for batch in _iterable(batches):
            # The iterable may have counted the batch. No signal handler runs between its end and this assignment.
            writer.taking = thread
            writer.add(batch)
            writer.taking = None
        writer.taking = thread
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
            "they did not belong to its checkpoint. Report checkpoints from every rank with sharded=True, or restart "
            "the epoch, without load_state_dict"
        )
    if name in session.carried_tables and not session.resumed:
        raise ResultError(
            f"the table {name!r} has rows from before the checkpoint that this attempt starts from, and would get them "
            "twice: call get_checkpoint() first, on every rank that writes, and continue from it"
        )


@dataclass(frozen=True)
class _Place:
    """The directory for this rank's rows, and the functions that write and remove files in it.

    Attributes:
        location: Path or URL of the directory.
        open_write: Opens a file by its path or URL, as a context manager that writes it atomically.
        remove: Removes a file by its path or URL.
    """

    location: str
    open_write: Callable[[str], AbstractContextManager[IO[bytes]]]
    remove: Callable[[str], object]


def _place(session: Any) -> _Place:
    parts = session.parts
    if parts is None:
        return _Place(session.directory, _open_local, store.remove)
    parts.check_directory()
    if parts.shared:
        open_write = functools.partial(_open_local, check=parts.check_directory)
        return _Place(parts.run_directory, open_write, _checked(store.remove, parts))
    if client := parts.client():
        open_write = functools.partial(_open_remote, client, check=parts.check_directory)
        return _Place(parts.run_directory, open_write, _checked(client.remove, parts))
    raise ResultError(
        f"this host does not reach {parts.run_directory}, where rows are to be written: give a store that all ranks "
        "see, a shared path or the URL of an object store to which they have the right"
    )


def _checked(remove: Callable[[str], object], parts: Parts) -> Callable[[str], object]:
    """Returns a function that removes a file of this run, and none of another run that has the directory by now."""

    def checked(path: str) -> None:
        parts.check_directory()
        remove(path)

    return checked


@contextlib.contextmanager
def _open_local(path: str, check: Callable[[], None] = lambda: None) -> Iterator[IO[bytes]]:
    """Opens a local file that is written atomically and durably, like the directories of its table.

    Args:
        path: Path of the file.
        check: Called before the file appears; raises an exception if it must not appear.
    """
    folder = os.path.dirname(path)
    if is_new := not os.path.isdir(folder):
        store.make_directory(folder)
    with store.atomic_file(path) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
        check()
    store.sync_directory(folder)
    if is_new:
        # The folder of the attempt, the one of all tables, and the run directory.
        for above in itertools.islice(map(str, pathlib.PurePath(folder).parents), 3):
            store.sync_directory(above)


@contextlib.contextmanager
def _open_remote(client: remote.Client, url: str, check: Callable[[], None]) -> Iterator[IO[bytes]]:
    """Opens a file of an object store. After an exception a part of it may exist, which the caller removes."""
    file = client.open_write(url)
    try:
        try:
            yield file
        finally:
            check()
    except BaseException as error:
        remote.discard(file, error)
        raise
    file.close()


class TableWriter:
    """Writes the rows of one call into files, each of them atomically.

    A checkpoint and a new column each end the current file. If the call raises, the files that no checkpoint has sealed
    are removed. An exception of the caller's iterable is raised unchanged, not as an error of the store.
    """

    def __init__(self, session: Any, folder: str, name: str, place: _Place) -> None:
        """Prepares the writer without opening a file.

        Args:
            session: Session of this rank.
            folder: Path or URL of the table's directory.
            name: Name of the table.
            place: Opens and removes files of the directory.
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
        self._file: Any = None
        self._failure: ResultError | None = None
        self.taking: int | None = None
        """The thread that takes a batch which the iterable has given; None while the iterable computes the next one."""

    def add(self, batch: Any) -> None:
        """Adds rows. Raises TypeError for a column whose type fits no earlier one, ResultError as `write_rows`."""
        from rankzero.data.columns import as_table

        with self._tables.lock:
            table = schemas.portable(as_table(batch))
            if not table.num_rows:
                return
            if self._schema is None or not table.schema.equals(self._schema):
                table = self._unified(table)
            self._waiting.append(_owned(table))
            self._size += table.nbytes
            if self._size >= GROUP_BYTES:
                self._write()

    def _unified(self, table: Any) -> Any:
        """Returns the rows in the table's current schema, which is extended if they do not fit."""
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
            owner = self._world.attempt, self._world.rank, next(self._tables.serials)
            return schemas.publish(self._folder, schema, owner, self._tables.schemas, self._open)
        except pa.ArrowException:
            raise
        except Exception as error:
            raise self._refusal(error) from error

    def _open(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """Opens a file that is removed if the call raises before the file is sealed."""
        self._begun.append(path)
        return self._place.open_write(path)

    def complete(self) -> None:
        """Completes and seals all files, which are then kept. Raises ResultError as `write_rows`."""
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
        """Removes the files that are not sealed, while an exception is being handled."""
        with self._tables.lock:
            with contextlib.suppress(Exception):
                self._opened.__exit__(*sys.exc_info())
            begun, self._begun = self._begun, []
            # Rows are removed before the schema that describes them.
            self._tables.remove(reversed(begun), self._place.remove)

    def _write(self) -> None:
        """Writes the buffered rows as one row group."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables, self._waiting, self._size = self._waiting, [], 0
        with self._storing():
            if self._writer is None:
                number = self._tables.files[self._name]
                self._tables.files[self._name] += 1
                path = store.join(self._folder, file_of(self._world.attempt, self._world.rank, number))
                self._file = self._opened.enter_context(self._open(path))
                self._writer = self._opened.enter_context(pq.ParquetWriter(self._file, _stored(self._schema)))
            self._writer.write_table(pa.concat_tables(tables).select(_stored(self._schema).names))
            # The iterable may fork, and no request may be in flight then (see `rankzero.host.forks`).
            self._file.flush()

    @contextlib.contextmanager
    def _storing(self) -> Iterator[None]:
        """Turns errors of the store in the block into ResultError, after which every further write raises, too."""
        if self._failure:
            raise self._failure
        try:
            yield
        except Exception as error:
            # Clients of object stores raise their own exceptions.
            self.discard()
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> ResultError:
        self._failure = ResultError(f"rows cannot be written to {self._folder}: {error}")
        return self._failure


def _owned(table: Any) -> Any:
    """Returns a copy of the rows: arrays and tensors share their memory with Arrow, and their owner may reuse it."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def _stored(schema: Any) -> Any:
    """Returns the schema of a data file, which leaves out columns that have only nulls and so no type."""
    import pyarrow as pa

    without_type = schemas.nulls(schema)
    fields = [field for field in schema if field.name not in without_type]
    return pa.schema(fields) if fields else schema


def _iterable(batches: Any) -> Iterable[Any]:
    is_one = isinstance(batches, Mapping) or hasattr(batches, "schema") or hasattr(batches, "iloc")
    if not is_one and not isinstance(batches, Iterable):
        raise TypeError(f"rows are batches, such as dicts of columns, not a {type(batches).__name__}")
    return [batches] if is_one else batches
