"""`write_rows`: rows that ranks compute, as a table that is committed with the run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from rankzero import store
from rankzero.data.table import FOLDER, Table, folder_of
from rankzero.errors import InvalidJobError, ResultError
from rankzero.train import context

if TYPE_CHECKING:
    from rankzero.store.remote import Client

GROUP_BYTES = 64 << 20
"""Bytes of a row group, about, before it is compressed."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def write_rows(batches: Any, name: str = "rows") -> Table:
    """Writes rows of this rank, of any number, into a table to which all ranks write.

    Every rank may call it, several times too; it waits for nobody. The table is complete when the run has succeeded,
    and whoever has its handle then reads all of it: return the handle, so that it is the run's result. What ranks of a
    failed attempt have written is removed. So an attempt that has loaded a cursor (``state_dict``) of after the table
    was begun cannot write to it.

    Args:
        batches: An iterable of batches, or one: a dict of columns (tensors, arrays, lists, `Ragged`), a
            ``pyarrow.RecordBatch`` or ``Table``, or a pandas DataFrame. Of a generator 64 MiB are held at a time. A
            tensor of two dimensions is a column of arrays of one length.
        name: Of the table.

    Returns:
        Its handle, the same on every rank.

    Raises:
        InvalidJobError: the name cannot be that of a directory.
        ResultError: this host reaches the run's store neither as a path nor by a client of its own, or the store does
            not take the rows (a full disk); or this attempt began behind rows of the table that are gone.
        TypeError: a batch is of another kind, or batches have different columns.
        Exception: whatever the iterable raises; nothing of its rows is in the table then.

    Example:
        >>> import torch
        >>> import rankzero.train as rt
        >>> table = rt.write_rows({"id": torch.arange(3), "score": torch.rand(3)}, "scores")
        >>> table.to_arrow().count_rows()
        3
    """
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise InvalidJobError(f"{name!r} cannot name a table: use letters, digits and _ . -")
    session = context.current()
    if name in session.lost_tables:
        raise ResultError(
            f"the table {name!r} would lack the rows that were written before the cursor that this attempt has loaded: "
            "they went with their attempt. Begin the epoch anew instead, without load_state_dict"
        )
    location, open_write = _place(session)
    folder = store.join(location, FOLDER, folder_of(session.context.attempt), name)
    number = session.tables[name]
    session.tables[name] += 1
    groups = _groups(_tables(batches))
    if (first := next(groups, None)) is not None:
        file = store.join(folder, f"part-{session.context.rank:05d}-{number:03d}.parquet")
        _write(file, itertools.chain([first], groups), open_write)
    return Table(folder)


def _place(session: Any) -> tuple[str, Any]:
    """Where this rank may write, and what opens a file there."""
    parts = session.parts
    if parts is None:
        # Outside of a run: a directory of its own, once for the process.
        session.scratch = session.scratch or tempfile.mkdtemp(prefix="rankzero-rows-")
        return session.scratch, _open_local
    if parts.shared:
        return parts.run_directory, _open_local
    if client := parts.client():
        return parts.run_directory, functools.partial(_open_remote, client)
    raise ResultError(
        f"this host does not reach {parts.run_directory}, where rows are to be written: give a store that all ranks "
        "see, a shared path or the URL of an object store to which they have the right"
    )


@contextlib.contextmanager
def _open_local(path: str) -> Iterator[IO[bytes]]:
    """A file that is there as a whole or not at all."""
    store.make_directory(os.path.dirname(path))
    with store.atomic_file(path) as temporary, open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _open_remote(client: Client, url: str) -> Iterator[IO[bytes]]:
    """A file that is there as a whole or, unless the store refuses even that, not at all."""
    file = client.open_write(url)
    try:
        yield file
    except BaseException:
        # Not every client can abandon a file: closed, it is there, and would be read as a part of the table.
        with contextlib.suppress(Exception):
            getattr(file, "discard", file.close)()
        with contextlib.suppress(Exception):
            client.remove(url)
        raise
    file.close()


def _write(path: str, tables: Iterator[Any], open_write: Any) -> None:
    """Writes tables into one file. What fails while they are made is the caller's error, not the store's."""
    import pyarrow.parquet as pq

    first = next(tables)
    with contextlib.ExitStack() as opened:
        with _storing(path):
            file = opened.enter_context(open_write(path))
            writer = opened.enter_context(pq.ParquetWriter(file, first.schema))
            writer.write_table(first)
        for table in tables:
            if not table.schema.equals(first.schema):
                raise TypeError(f"batches have different columns: {first.schema} and {table.schema}")
            with _storing(path):
                writer.write_table(table)
        with _storing(path):
            opened.close()


@contextlib.contextmanager
def _storing(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Drivers of object stores have exceptions of their own.
        raise ResultError(f"rows cannot be written to {os.path.dirname(path)}: {error}") from error


def _groups(tables: Iterator[Any]) -> Iterator[Any]:
    """The same rows in tables of `GROUP_BYTES`."""
    import pyarrow as pa

    waiting: list[Any] = []
    size = 0
    for table in tables:
        if waiting and not table.schema.equals(waiting[0].schema):
            raise TypeError(f"batches have different columns: {waiting[0].schema} and {table.schema}")
        waiting.append(table)
        size += table.nbytes
        if size >= GROUP_BYTES:
            yield pa.concat_tables(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.concat_tables(waiting)


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

    from rankzero.data.columns import Ragged

    if isinstance(column, Ragged):
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
