"""Reads the manifest of a table from the path of its files: Parquet and Delta, without Spark.

The checksum of a file is that of its bytes, which are read once, or its tag on an object store. A Parquet footer does
not suffice: its sizes and extremes are the same if values are in another order.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import re
from typing import Any

from rankzero import store
from rankzero.data import kinds
from rankzero.data.files import PARQUET_OPTIONS, digest_of, filesystem_of, stamp_of, tags_of
from rankzero.data.manifest import File, Manifest, encode_schema
from rankzero.data.schemas import check_missing, schema_of_files
from rankzero.errors import InvalidJobError

READERS = 16
"""Files that are read in parallel."""

_DELTA_LOG = "_delta_log"
_SAMPLED_ROWS = 16
_PAGES = 64 << 10


def manifest_of_path(location: str, name: str) -> Manifest:
    """Returns the manifest, for ranks, of the table at a path.

    Args:
        location: A file or a directory, as a path or a URL. Directories ``column=value`` below it are columns.
        name: The dataset's name for errors.

    Raises:
        InvalidJobError: there is no table, it cannot be read, or a column cannot be represented by a tensor.
    """
    location = location.rstrip("/") if store.is_url(location) else store.normalize(location)
    where = f"the dataset {name!r}"
    try:
        if store.exists(store.join(location, _DELTA_LOG)):
            data, digest = _delta(location)
        else:
            data, digest = _directory(location, where), None
        return _manifest(data, location, digest, where)
    except InvalidJobError:
        raise
    except Exception as error:
        # Drivers of object stores raise their own exceptions, and Arrow's of hdfs lists each library it has tried.
        reason = str(error).partition("\n")[0]
        raise InvalidJobError(
            f"{where} cannot be read from {location}: {type(error).__name__}: {reason}. Ranks read Parquet and Delta "
            "files; have Spark read others, or from where this host cannot: dataset=a DataFrame or a query"
        ) from error


def _directory(location: str, where: str) -> Any:
    from pyarrow import dataset, fs

    filesystem, path = filesystem_of(location)
    found = filesystem.get_file_info(path)
    if found.type == fs.FileType.NotFound:
        hint = "; a pattern is not expanded: give the folder of the files" if re.search(r"[*?\[]", location) else ""
        raise InvalidJobError(f"{where} does not exist: {location}{hint}", code="RZ-1012")
    if found.type == fs.FileType.File:
        names = [path]
    else:
        # Like Spark and pyarrow, without names that begin with _ or a dot.
        every = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
        below = {info.path: info.path[len(path.rstrip("/")) + 1 :] for info in every if info.type == fs.FileType.File}
        names = sorted(name for name, short in below.items() if not re.search(r"(^|/)[._][^/=]*(/|$)", short))
    if not names:
        raise InvalidJobError(f"{where} has no files: {location}")
    kind = dataset.ParquetFileFormat(**PARQUET_OPTIONS)
    # Directories above the table are not its partition columns.
    return dataset.dataset(names, format=kind, filesystem=filesystem, partitioning="hive", partition_base_dir=path)


def _delta(location: str) -> tuple[Any, str]:
    try:
        import deltalake
    except ImportError:
        raise InvalidJobError(
            f"{location} is a Delta table: pip install deltalake here, or have Spark read it: "
            f'dataset="SELECT * FROM delta.`{location}`"'
        ) from None
    table = deltalake.DeltaTable(location)
    mapping = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mapping != "none":
        # The files have other column names, so that the columns would be read as nulls.
        raise InvalidJobError(
            f"{location} is a Delta table with column mapping ({mapping}), which ranks cannot read. Have Spark read "
            f'it: dataset="SELECT * FROM delta.`{location}`"'
        )
    from pyarrow.dataset import ParquetReadOptions

    options = ParquetReadOptions(**PARQUET_OPTIONS)
    return table.to_pyarrow_dataset(parquet_read_options=options), f"{table.metadata().id} {table.version()}"


def _manifest(data: Any, location: str, digest: str | None, where: str) -> Manifest:
    from pyarrow import dataset

    # Positions of earlier attempts count in this order.
    fragments = sorted(data.get_fragments(), key=lambda fragment: fragment.path)
    base = filesystem_of(location)[1]
    tags = {} if digest else tags_of(location)

    def describe(fragment: Any) -> tuple[File, int, str]:
        keys = dataset.get_partition_keys(fragment.partition_expression)
        if binary := [key for key, value in keys.items() if isinstance(value, bytes)]:
            raise InvalidJobError(f"{location} is partitioned by {binary[0]!r}, which is binary: have Spark read it")
        partition = {key: None if value is None else str(value) for key, value in keys.items()}
        place, short = _place(fragment.path, location, base)
        groups = [fragment.metadata.row_group(number) for number in range(fragment.metadata.num_row_groups)]
        rows, size = tuple(group.num_rows for group in groups), sum(group.total_byte_size for group in groups)
        # Before the content is read, which may change meanwhile.
        stamp = "" if digest else stamp_of(place)
        content = "" if digest else tags.get(short) or digest_of(place)
        return File(place, rows, partition, stamp, content), size, f"{short} {content}"

    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        described = list(pool.map(describe, fragments))
        schemas = list(pool.map(lambda fragment: fragment.physical_schema, fragments))
    files = tuple(file for file, *_ in described)
    # The larger of encoded and decoded size: a dictionary encodes a long text in a byte, a repeated value in none.
    decoded = int(sum(sum(file.rows) for file in files) * _decoded_row(fragments))
    size = max(decoded, sum(size for _, size, _ in described))
    # The log of a Delta table has its schema.
    schema = schema_of_files([data.schema] if digest else [data.schema, *schemas], where)
    kinds.check(schema, where)
    for file, inside in zip(files, schemas, strict=True):
        check_missing(file, inside, schema, where)
    content = digest or " ".join([*(facts for _, _, facts in described), str(schema)])
    return Manifest(
        schema=encode_schema(schema), files=files, size=size, digest=hashlib.sha256(content.encode()).hexdigest()
    )


def _place(path: str, location: str, base: str) -> tuple[str, str]:
    """Returns a file's location, and its path relative to the dataset."""
    below = path[len(base.rstrip("/")) :] if path.startswith(base.rstrip("/")) else None
    if below is not None:
        return location + below, below
    # Delta names its files relative to the table.
    return store.join(location, path), path


def _decoded_row(fragments: list[Any]) -> float:
    """Returns the bytes of a decoded row, estimated from the first rows of the first file that has any."""
    import pyarrow.parquet as pq

    for fragment in fragments:
        if fragment.metadata.num_rows:
            with fragment.open() as source:
                batch = next(pq.ParquetFile(source, buffer_size=_PAGES, pre_buffer=False).iter_batches(_SAMPLED_ROWS))
            # A dictionary counts once for any number of rows, so columns are decoded first.
            columns = (each.dictionary_decode() if hasattr(each, "dictionary") else each for each in batch.columns)
            return float(sum(column.nbytes for column in columns) / batch.num_rows)
    return 0.0
