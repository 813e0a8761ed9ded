"""`write_rows`: writes rows that ranks compute into a table that is committed with the run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from rankzero import store
from rankzero.data import schemas
from rankzero.data.table import FOLDER, Table, file_of, folder_of, read_schemas
from rankzero.errors import InvalidJobError, ResultError
from rankzero.run.checkpoints import begun_file
from rankzero.store import remote
from rankzero.train import context

if TYPE_CHECKING:
    from rankzero.train.parts import Parts

GROUP_BYTES = 64 << 20
"""Approximate number of bytes of a row group before it is compressed."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def write_rows(batches: Any, name: str = "rows") -> Table:
    """Writes rows of this rank, of any number, into a table to which all ranks write.

    Every rank may call it, also several times; it does not wait for other ranks. The table is complete when the run has
    succeeded, and its handle then reads all rows: return the handle, so that it is the run's result.

    The rows of an attempt that fails are removed, and the next attempt writes them again: it starts from the last
    checkpoint that ranks reported before they began to write rows. So write rows behind the training.

    Args:
        batches: An iterable of batches, or one batch: a dict of columns (tensors, arrays, lists, `Ragged`), a
            ``pyarrow.RecordBatch`` or ``Table``, or a pandas DataFrame. At most about 64 MiB of a generator's rows are
            in memory. A tensor of two dimensions is a column of arrays of one length. Batches and ranks may have
            different columns: the table has all of them, and nulls where a batch lacks a column. A column has one type
            in all batches and on all ranks; one without any value is in no table. Times are stored in microseconds and
            half precision as float32, since Spark cannot read other units and types.
        name: Name of the table.

    Returns:
        The handle of the table, the same on every rank.

    Raises:
        InvalidJobError: the name cannot be the name of a directory.
        ResultError: this host reaches the run's store neither as a path nor with a client; the store refuses the rows
            (a full disk), or to remove those of a call that raised.
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
    session = context.own("write_rows")
    remove_refused(session)
    place = _place(session)
    folder = store.join(place.location, FOLDER, folder_of(session.context.attempt), name)
    writer = TableWriter(session, folder, name, place)
    try:
        for batch in _iterable(batches):
            writer.add(batch)
        writer.complete()
    except BaseException:
        writer.discard()
        raise
    return Table(folder)


def remove_refused(session: Any) -> None:
    """Removes the files of calls that raised, which the store has refused to remove before.

    Raises:
        ResultError: the store refuses it again; the table would have rows of a call that raised.
    """
    for path, remove in list(session.unremoved.items()):
        try:
            remove(path)
        except FileNotFoundError:
            pass
        except Exception as error:
            # Clients of object stores raise their own exceptions.
            raise ResultError(
                f"rows of a call that raised cannot be removed: {path}: {error}. The table would contain them together "
                "with those of a later call"
            ) from error
        del session.unremoved[path]


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

    A row group whose columns differ from those of the one before begins a new file. If the call raises, its files are
    removed. An exception of the caller's iterable is raised unchanged, not as an error of the store.
    """

    def __init__(self, session: Any, folder: str, name: str, place: _Place) -> None:
        """Prepares the writer without opening a file.

        Args:
            session: Session of this rank.
            folder: Path or URL of the table's directory.
            name: Name of the table.
            place: Opens and removes files of the directory.
        """
        self._session = session
        self._folder = folder
        self._name = name
        self._place = place
        self._before = session.row_schemas.get(name)
        self._waiting: list[Any] = []
        self._size = 0
        self._begun: list[str] = []
        self._opened = contextlib.ExitStack()
        self._writer: Any = None
        self._file: Any = None
        self._failure: ResultError | None = None

    def add(self, batch: Any) -> None:
        """Adds rows. Raises TypeError for a column whose type fits no earlier one, ResultError as `write_rows`."""
        from rankzero.data.columns import as_table

        table = schemas.portable(as_table(batch))
        if not table.num_rows:
            return
        if self._name not in self._session.row_schemas:
            self._note_begun()
        self._unify(table.schema)
        self._waiting.append(_owned(table))
        self._size += table.nbytes
        if self._size >= GROUP_BYTES:
            self._write()

    def _note_begun(self) -> None:
        """Writes the file by which no attempt starts from a checkpoint that this rank reports from now on."""
        writer, world = self._session.writer, self._session.context
        if self._session.parts is not None and writer is not None:
            path = store.join(os.path.dirname(self._folder), begun_file(self._name, world.rank, writer.count))
            self._begun.append(path)
            with self._storing(), self._place.open_write(path):
                pass

    def _unify(self, *found: Any) -> None:
        """Adds columns to the schema of this rank's rows. Raises TypeError if they do not fit together."""
        known = self._session.row_schemas.get(self._name)
        try:
            self._session.row_schemas[self._name] = schemas.unify_written([*([known] if known else []), *found])
        except TypeError as error:
            raise TypeError(f"rows do not fit into the table {self._name!r}: {error}") from error

    def complete(self) -> None:
        """Completes all files, which are then kept. Raises ResultError and TypeError as `write_rows`."""
        self._close_file()
        if self._begun and self._session.context.world_size > 1:
            with self._storing():
                others = read_schemas(self._folder)
            # Of two ranks whose columns do not fit together, the one that completes its rows last finds out.
            self._unify(*others.values())

    def _close_file(self) -> None:
        if self._waiting:
            self._write()
        with self._storing():
            self._opened.close()
        self._writer = None

    def discard(self) -> None:
        """Removes the files of the call, while an exception is being handled."""
        with contextlib.suppress(Exception):
            self._opened.__exit__(*sys.exc_info())
        # The rows before the file by which they have begun.
        self._session.unremoved.update(dict.fromkeys(reversed(self._begun), self._place.remove))
        self._begun.clear()
        if self._before is None:
            self._session.row_schemas.pop(self._name, None)
        else:
            self._session.row_schemas[self._name] = self._before
        try:
            remove_refused(self._session)
        except ResultError:
            # The result must not contain rows of calls that raised.
            context.at_return(functools.partial(remove_refused, self._session))

    def _write(self) -> None:
        """Writes the buffered rows as one row group."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables, self._waiting, self._size = self._waiting, [], 0
        table = pa.concat_tables(tables, promote_options="default")
        without_type = schemas.nulls(table.schema)
        if len(without_type) < table.num_columns:
            table = table.drop_columns(without_type)
        with self._storing():
            if self._writer is not None and not table.schema.equals(self._writer.schema):
                self._opened.close()
                self._writer = None
            if self._writer is None:
                number = next(self._session.row_files)
                path = store.join(self._folder, file_of(self._session.context.rank, number, table.schema))
                self._begun.append(path)
                self._file = self._opened.enter_context(self._place.open_write(path))
                self._writer = self._opened.enter_context(pq.ParquetWriter(self._file, table.schema))
            self._writer.write_table(table)
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
            self._failure = ResultError(f"rows cannot be written to {self._folder}: {error}")
            raise self._failure from error


def _owned(table: Any) -> Any:
    """Returns a copy of the rows: arrays and tensors share their memory with Arrow, and their owner may reuse it."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def _iterable(batches: Any) -> Iterable[Any]:
    is_one = isinstance(batches, Mapping) or hasattr(batches, "schema") or hasattr(batches, "iloc")
    if not is_one and not isinstance(batches, Iterable):
        raise TypeError(f"rows are batches, such as dicts of columns, not a {type(batches).__name__}")
    return [batches] if is_one else batches
