"""`Reader`: reads the rows of a dataset as Arrow record batches, mapped into memory if the files allow it.

Row groups that cannot be mapped are decoded once for all tasks of a host, into Arrow files in the tasks' scratch
directories. Tasks share a file by hard links, and every task removes its own scratch directory. A file therefore exists
as long as one of its tasks, and a task that is killed leaves no duty to another one.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import functools
import glob
import hashlib
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rankzero import bounds, store
from rankzero.data import files
from rankzero.data.files import PARQUET_OPTIONS, is_changed, open_file
from rankzero.data.manifest import ARROW, File, Manifest
from rankzero.data.schemas import fit
from rankzero.errors import ResultError

DECODE_LOCK_TIMEOUT = bounds.scaled(120.0)  # For another rank to decode a group; then this rank decodes it, too

FILES = 64
"""Most Arrow files that stay open, so that their footers are not read for every group."""

KEPT = 1 << 14
"""Most groups that stay mapped for random reads; a process may have about 65,000 mappings."""

NEAR = 64 << 10
"""Most bytes between two rows of a group that are read from the disk together."""


class Reader:
    """Opens the groups of a dataset: the record batches of Arrow files, the row groups of Parquet files.

    An uncompressed Arrow file that this host sees is mapped directly. Every other group is decoded once, when the first
    rank needs it, into an Arrow file in the scratch directory of its task; other tasks on the host link that file. If
    the scratch disk has no room, each rank decodes the group every time.
    """

    def __init__(self, manifest: Manifest, columns: Sequence[str] | None, scratch: str) -> None:
        """Prepares the reader without opening a file.

        Args:
            manifest: Manifest of the dataset.
            columns: Names of the columns to read; None for all.
            scratch: Scratch directory of this task.
        """
        self._manifest = manifest
        self._schema = manifest.arrow_schema()
        self.columns = list(columns) if columns is not None else list(self._schema.names)
        self._scratch = scratch
        self._groups = [(file, number) for file in manifest.files for number in range(len(file.rows))]
        counts = [rows for file in manifest.files for rows in file.rows]
        self._starts = [0, *itertools.accumulate(counts)]
        self._key = hashlib.sha256(f"{manifest.digest} {self.columns}".encode()).hexdigest()[:16]
        self._kept: dict[int, Any] = {}
        self._file = functools.lru_cache(FILES)(_opened_file)

    def rows(self, low: int, high: int) -> Iterator[Any]:
        """Yields the rows ``low`` to ``high - 1`` as record batches, each from one group.

        Their memory is writable and private: each batch has its own mapping.
        """
        number = bisect.bisect_right(self._starts, low) - 1
        while low < high:
            begin, end = self._starts[number], min(high, self._starts[number + 1])
            if low < end:
                yield self._opened(number, writable=True)[0].slice(low - begin, end - low)
                low = end
            number += 1

    def take(self, rows: torch.Tensor, count: int) -> Iterator[Any]:
        """Yields the given rows, in the given order, as record batches with their own memory.

        The rows are read once, in the order of the files, and all are kept in memory until the last batch.

        Args:
            rows: Numbers of the rows, without duplicates.
            count: Number of rows of a batch.
        """
        batch, places = self._gathered(rows)
        for part in torch.split(places, count):
            yield batch.take(_indices(part))

    def _gathered(self, rows: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Returns a record batch in memory that contains the given rows, and their indices in it."""
        if 2 * len(rows) >= self._manifest.rows:
            # Copying all groups is faster than selecting half of the rows.
            return _in_one([self._opened(number)[0] for number in range(len(self._groups))]), rows
        ordered, order = rows.sort()
        bounds = torch.searchsorted(ordered, torch.tensor(self._starts, device="cpu")).tolist()
        found = []
        for number, (low, high) in enumerate(itertools.pairwise(bounds)):
            if low < high:
                wanted = ordered[low:high] - self._starts[number]
                batch = self._keep(number)
                if number in self._kept:
                    self._read_ahead(batch, wanted)
                found.append(batch.take(_indices(wanted)))
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device="cpu")
        return _in_one(found), places

    def _read_ahead(self, batch: Any, wanted: torch.Tensor) -> None:
        """Requests the pages of some rows of a group, since a page fault would read megabytes of adjacent pages."""
        runs = _runs(wanted, NEAR // self._manifest.row_size)
        for column in batch.columns:
            for buffer in column.buffers():
                for low, high in runs if buffer else ():
                    # An estimate if rows have different lengths.
                    begin, end = (buffer.size * row // batch.num_rows for row in (low, high))
                    files.read_ahead(buffer.address + begin, end - begin)

    def _keep(self, number: int) -> Any:
        """Returns a group for reading, which stays mapped for later calls."""
        if number not in self._kept:
            batch, is_mapped = self._opened(number)
            if not is_mapped:
                # The group is in this rank's memory, which may be too small for all groups.
                return batch
            if len(self._kept) == KEPT:
                self._kept.clear()
            self._kept[number] = batch
        return self._kept[number]

    def _opened(self, number: int, *, writable: bool = False) -> tuple[Any, bool]:
        """Returns a group, and whether it is mapped; with ``writable`` its memory may be written to."""
        file, group = self._groups[number]
        try:
            batch, is_mapped = self._group(file, group, writable)
        except FileNotFoundError:
            raise ResultError(f"{file.location} of the dataset does not exist, or this host does not see it") from None
        except (OSError, ValueError, KeyError) as error:
            raise ResultError(f"{file.location} of the dataset cannot be read: {error}") from error
        return batch, is_mapped

    def _group(self, file: File, group: int, writable: bool) -> tuple[Any, bool]:
        if self._manifest.format == ARROW and not store.is_url(file.location):
            batch, is_mapped = self._mapped(file.location, group, writable)
            if is_mapped and all(batch.column(name).type == kind for name, kind in self._stored(file)):
                _check(batch, file, group)
                return self._selected(batch, file), True
        path = os.path.join(self._scratch, f"{self._key}-{_digits(file.location)}-{group}.arrow")

        def decode() -> Any:
            batch = self._decoded(file, group)
            _check(batch, file, group)
            return self._selected(batch, file)

        found = place_decoded(path, decode)
        return (self._mapped(path, 0, writable)[0], True) if found is None else (found, False)

    def _mapped(self, path: str, group: int, writable: bool) -> tuple[Any, bool]:
        """Returns a record batch of a local Arrow file, and whether it is mapped (False: it was compressed)."""
        import pyarrow as pa

        if writable:
            # Each group has its own mapping, so that its written pages are freed with it.
            memory = files.map_private(path)
            file = pa.ipc.open_file(memory)
        else:
            file, memory = self._file(path)
        batch = file.get_batch(group)
        return batch, _is_inside(batch, memory)

    def _selected(self, batch: Any, file: File) -> Any:
        """Returns the columns to read, including partition columns, whose values are in the names of the files."""
        import pyarrow as pa

        arrays = []
        for name in self.columns:
            if name in file.partition:
                value = pa.scalar(file.partition[name]).cast(self._schema.field(name).type)
                arrays.append(pa.repeat(value, batch.num_rows))
            else:
                arrays.append(batch.column(name))
        return pa.RecordBatch.from_arrays(arrays, self.columns)

    def _stored(self, file: File) -> list[tuple[str, Any]]:
        """Returns name and type of the columns to read that are in a file, and not in its name."""
        return [(name, self._schema.field(name).type) for name in self.columns if name not in file.partition]

    def _decoded(self, file: File, group: int) -> Any:
        """Decodes a group into memory of this process."""
        import pyarrow as pa

        kinds = pa.schema(self._stored(file))
        # A mapping avoids a copy of a local file.
        opened = open_file(file.location) if store.is_url(file.location) else pa.memory_map(file.location)
        with opened as source:
            if self._manifest.format == ARROW:
                table = pa.Table.from_batches([pa.ipc.open_file(source).get_batch(group)])
            else:
                import pyarrow.parquet as pq

                table = pq.ParquetFile(source, **PARQUET_OPTIONS).read_row_group(group, columns=kinds.names)
        if not kinds.names:
            return pa.RecordBatch.from_arrays([pa.nulls(file.rows[group])], [""])
        # A column has one type in the dataset, which can differ from its type in this file.
        batches = fit(table, kinds).to_batches()
        return _in_one(batches) if batches else pa.RecordBatch.from_pylist([], kinds)


def _in_one(batches: list[Any]) -> Any:
    """Returns record batches as one. Columns that do not fit into one of their type get a wider type; see `_wide`."""
    import pyarrow as pa

    tables = [pa.Table.from_batches([batch]) for batch in batches]
    kinds = tables[0].schema
    found = []
    if all(table.schema == kinds for table in tables):
        # It raises if there are more categories together than their indices can count.
        with contextlib.suppress(pa.ArrowInvalid):
            found = pa.concat_tables(tables).combine_chunks().to_batches()
    if len(found) != 1:
        kinds = pa.schema([field.with_type(_wide(field.type)) for field in kinds])
        found = pa.concat_tables([table.cast(kinds) for table in tables]).combine_chunks().to_batches()
    [batch] = found
    return batch


def _wide(kind: Any) -> Any:
    """Returns a type with room for more than 2 GiB of text, and for the categories of several files."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_wide(field.type)) for field in kind])
    if pa.types.is_dictionary(kind):
        return pa.dictionary(pa.int32(), kind.value_type, kind.ordered)
    return {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)


def _runs(rows: torch.Tensor, gap: int) -> list[tuple[int, int]]:
    """Groups ascending numbers that are at most ``gap`` apart, or consecutive: first number, and last plus one."""
    breaks = torch.nonzero(rows.diff() > max(1, gap)).flatten()
    first = torch.cat([rows[:1], rows[breaks + 1]])
    last = torch.cat([rows[breaks], rows[-1:]])
    return list(zip(first.tolist(), (last + 1).tolist(), strict=True))


def _check(batch: Any, file: File, group: int) -> None:
    """Raises ResultError if a group is not the one that the run was submitted with; called after reading it."""
    if batch.num_rows != file.rows[group]:
        raise ResultError(
            f"{file.location} has {batch.num_rows} rows where it had {file.rows[group]} when the run was submitted"
        )
    if is_changed(file.location, file.stamp, file.content):
        raise ResultError(
            f"{file.location} of the dataset has other rows than when the run was submitted: submit the run "
            "again to train on them from scratch, or write the rows as they were"
        )


def _is_inside(batch: Any, memory: Any) -> bool:
    """Returns True if a batch lies inside the given memory, so its file is not compressed."""
    buffers = (buffer for column in batch.columns for buffer in column.buffers() if buffer is not None and buffer.size)
    begin, end = memory.address, memory.address + memory.size
    return all(begin <= buffer.address < end for buffer in buffers)


def _opened_file(path: str) -> tuple[Any, Any]:
    """Returns a local Arrow file that is opened for reading, and its memory."""
    import pyarrow as pa

    memory = files.map_shared(path)
    return pa.ipc.open_file(memory), memory


def _indices(numbers: torch.Tensor) -> Any:
    """Returns an Arrow array that shares the memory of a tensor of integers."""
    import pyarrow as pa

    numbers = numbers.contiguous()
    buffer = pa.foreign_buffer(numbers.data_ptr(), numbers.nbytes, base=numbers)
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, buffer])


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


SPARE = 2 << 30
"""Bytes that decoded rows leave free on the disk of the scratch directory; of a tmpfs at least half."""


def place_decoded(path: str, decode: Callable[[], Any]) -> Any:
    """Writes a decoded group to a path, unless it exists there or can be linked from another task's directory.

    Args:
        path: A path in the scratch directory of this task; its name identifies the content.
        decode: Returns the group as a record batch.

    Returns:
        None if the file exists now; the record batch if the disk has no room for it.
    """
    if os.path.exists(path):
        return None
    with _locked(path):
        if os.path.exists(path) or _link(path, _is_whole):
            return None
        batch = decode()
        return None if _write(path, batch) else batch


def _write(path: str, batch: Any) -> bool:
    """Writes a group atomically; returns False if the disk has no room."""
    import pyarrow as pa

    directory = os.path.dirname(path)
    room = shutil.disk_usage(directory)
    spare = max(SPARE, room.total // 2) if _is_memory(directory) else SPARE
    if room.free < batch.nbytes + spare:
        return False
    writing = f"{path}.{threading.get_native_id()}.writing"
    try:
        with pa.OSFile(writing, "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        os.replace(writing, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(writing)
        return False
    return True


@functools.cache
def _is_memory(directory: str) -> bool:
    """Returns True for a directory of a tmpfs, whose files are memory of this host or container."""
    device = os.stat(directory).st_dev
    mount = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as mounts:
        return any(line.split()[2] == mount and " - tmpfs " in line for line in mounts)
    return False


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Runs the block on one rank at a time of all tasks that link the same lock file, or after a time-out."""
    name = f"{path}.lock"
    if not os.path.exists(name):
        # Two tasks that come here at the same moment create a lock file each, and both decode.
        _link(name, os.path.exists)
    end = time.monotonic() + DECODE_LOCK_TIMEOUT()
    with open(name, "ab") as lock:
        while time.monotonic() < end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(bounds.POLL_INTERVAL_BRIEF)
            except OSError:
                # The file system has no locks: ranks that need the group at the same time all decode it.
                break
        try:
            yield
        finally:
            # Unlocked explicitly: a process that was forked meanwhile shares the lock as long as it lives.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)


def _link(path: str, is_good: Callable[[str], bool]) -> bool:
    """Links a good file of the same name from another task of this user and host; returns False if there is none."""
    scratch, name = os.path.split(path)
    for other in glob.glob(os.path.join(glob.escape(os.path.dirname(scratch)), "rankzero-*", name)):
        # Opened by a descriptor and without following links, which other users can create in a shared directory.
        with contextlib.suppress(OSError):
            directory = os.open(os.path.dirname(other), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(directory).st_uid == os.geteuid() and is_good(other):
                    os.link(name, path, src_dir_fd=directory)
                    return True
            finally:
                os.close(directory)
    return False


def _is_whole(path: str) -> bool:
    """Returns False for a file without content, which a power failure of the host can leave behind."""
    import pyarrow as pa

    try:
        with pa.memory_map(path) as file:
            return bool(pa.ipc.open_file(file).num_record_batches)
    except (OSError, ValueError):
        return False
