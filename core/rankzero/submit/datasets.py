"""Turns the datasets that a user gives a launcher into manifests of files that ranks read.

A DataFrame is computed and written to the run's directory before the run is submitted; a path is read in place. A
table or a query for which the caller's process has no SparkSession is left to the driver, which opens one.

A training reads one snapshot: a resumed run finds the same rows. The identity of a DataFrame is its content, that of a
path its files' bytes or tags, since Parquet footers are the same for values in another order, and that of a table or
query its text.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from rankzero import store
from rankzero.data import kinds
from rankzero.data.files import PARQUET_OPTIONS, digest_of, filesystem_of, stamp_of, tags_of
from rankzero.data.manifest import FILE, File, Manifest, encode_schema, from_bytes
from rankzero.data.schemas import check_missing, schema_of_files
from rankzero.data.table import Table
from rankzero.engines.base import Engine
from rankzero.errors import InvalidJobError, require
from rankzero.job import qualified_name
from rankzero.run.directory import Submission
from rankzero.submit.existing import storing
from rankzero.train.dataset import DEFAULT
from rankzero.values.ref import ResultRef

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_PATH = re.compile(r"([A-Za-z][\w+.-]*:/|~|\.{0,2}/(?!\*)).*|\S*(/\S*|\.parquet)", re.DOTALL)
"""A URL, a path from the root, the home or the working directory, or a text without spaces that has a slash or ends in
``.parquet``. A comment of SQL begins with a slash, too."""

_READERS = 16  # Files that are read in parallel
_BY_SPARK = 'Have Spark read it: dataset="SELECT * FROM delta.`%s`"'


def check(given: object) -> dict[str, Any]:
    """Returns the given datasets by name, texts without whitespace around them. Raises InvalidJobError."""
    if given is None:
        return {}
    every = given if isinstance(given, Mapping) else {DEFAULT: given}
    named = {name: source.strip() if isinstance(source, str) else source for name, source in every.items()}
    for name, source in named.items():
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise InvalidJobError(f"{name!r} cannot name a dataset: use letters, digits and _ . -")
        is_text = isinstance(source, (str, os.PathLike)) and os.fspath(source)
        if not (is_text or isinstance(source, ResultRef) or is_frame(source)):
            raise InvalidJobError(
                f"dataset {name!r} is of type {qualified_name(type(source))}; give a Spark DataFrame, the path of a "
                "table, or with a Spark engine the name of a table or a query; write other frames as Parquet"
            )
    return named


def is_frame(source: object) -> bool:
    """Returns True for a DataFrame of Spark or Spark Connect."""
    return type(source).__module__.startswith("pyspark.sql.") and hasattr(source, "mapInArrow")


def is_path(source: Any) -> bool:
    """Returns True for the path of a table's files, False for the name of a table or a query."""
    return not isinstance(source, str) or _PATH.fullmatch(source) is not None


class Sources:
    """The datasets that a user gave for one run. Each path is read once, and each query opened once."""

    def __init__(self, given: Mapping[str, Any], engine: Engine, generation: str) -> None:
        """Prepares to open the result of `check`, for a chain of tries of an orchestrator, and opens nothing yet."""
        self._given = given
        self._engine = engine
        self._generation = generation
        self._open = functools.cache(self._read)

    def _read(self, name: str) -> Any:
        """Returns a manifest, a DataFrame, or the text of a query that the driver has Spark compute."""
        source = self._given[name]
        if isinstance(source, ResultRef) and not isinstance(source := source.load(), Table):
            kind = type(source).__name__
            raise InvalidJobError(f"dataset {name!r} is a result of type {kind}, which is no table: write_rows")
        if is_frame(source):
            return source
        if is_path(source):
            require("a dataset needs", "pyarrow", "pyarrow")
            return manifest_of_path(os.fspath(source), name)
        if not self._engine.has_tables:
            raise InvalidJobError(
                f"dataset {name!r} is {source!r}: a table or a query needs Spark: give engine=SparkEngine(...), or a "
                "DataFrame; a path has a slash, such as ./events, or ends in .parquet"
            )
        from rankzero.engines.spark.materialize import open_query

        session = getattr(self._engine, "session", None)
        return source if session is None else open_query(session, source)

    def digests(self, *, frames: bool = True) -> dict[str, str]:
        """Returns checksums of the datasets by name, for the identity, perhaps without those that Spark computes."""
        sources = {name: self._open(name) for name in self._given}
        return {name: self._digest(source) for name, source in sources.items() if frames or not is_frame(source)}

    def _digest(self, source: Any) -> str:
        if isinstance(source, Manifest):
            return source.digest
        if is_frame(source):
            from rankzero.engines.spark.materialize import content_of

            return content_of(source)
        # The driver computes the rows. The text counts for one chain of tries: a user's clear reads the rows again.
        return f"{source} {self._generation}".strip()

    def collect(
        self, own: Submission, before: Submission | None
    ) -> tuple[dict[str, Manifest], dict[str, str], dict[str, str]]:
        """Computes or reads the datasets of a submission that is being written.

        A DataFrame with the same rows as in the submission ``before`` is reused from there, so that resumed ranks find
        the same order, and Spark writes nothing. Returns the manifests, the queries that are left to the driver, and
        the checksums of both, by name. Raises InvalidJobError, or EngineError if Spark failed.
        """
        found = {}
        for name in self._given:
            source = self._open(name)
            found[name] = source = _of_frame(source, name, own, before) if is_frame(source) else source
            if isinstance(source, Manifest):
                source.check_rows(name, own.job.num_processes)
        manifests = {name: source for name, source in found.items() if isinstance(source, Manifest)}
        queries = {name: source for name, source in found.items() if isinstance(source, str)}
        return manifests, queries, {name: self._digest(source) for name, source in found.items()}


def _of_frame(frame: Any, name: str, own: Submission, before: Submission | None) -> Manifest:
    from rankzero.engines.spark.materialize import content_of, materialize

    known: Manifest | None = None
    with storing(own.run):
        store.make_directory(own.directory)
        with contextlib.suppress(FileNotFoundError):
            known = from_bytes(store.read_bytes(before.path(FILE))).get(name) if before else None
    if known and known.folder and store.exists(known.files[0].location):
        if content_of(frame) == known.digest:
            return known
        logger.info("dataset %r has other rows than in the submission of %s before", name, own.run.directory)
    return materialize(frame, own.new_dataset(name), name, lambda text: logger.info("%s", text))


# -- Parquet and Delta tables at a path, without Spark ------------------------------------------


def manifest_of_path(location: str, name: str) -> Manifest:
    """Returns the manifest, for ranks, of a file or a directory, in which directories ``column=value`` are columns.

    Raises InvalidJobError if there is no table, it cannot be read, or a column cannot be represented by a tensor.
    """
    location = location.rstrip("/") if store.is_url(location) else store.normalize(location)
    where = f"the dataset {name!r}"
    try:
        if store.exists(store.join(location, "_delta_log")):
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
        what = f"{location} is a Delta table: pip install deltalake here. Or {_BY_SPARK % location}"
        raise InvalidJobError(what) from None
    from pyarrow.dataset import ParquetReadOptions

    table = deltalake.DeltaTable(location)
    if (mapping := table.metadata().configuration.get("delta.columnMapping.mode", "none")) != "none":
        # The files have other column names, so that the columns would be read as nulls.
        raise InvalidJobError(f"{location} is a Delta table with column mapping ({mapping}): {_BY_SPARK % location}")
    options = ParquetReadOptions(**PARQUET_OPTIONS)
    return table.to_pyarrow_dataset(parquet_read_options=options), f"{table.metadata().id} {table.version()}"


def _manifest(data: Any, location: str, digest: str | None, where: str) -> Manifest:
    from pyarrow import dataset

    # Positions of earlier attempts count in this order.
    fragments = sorted(data.get_fragments(), key=lambda fragment: fragment.path)
    base = filesystem_of(location)[1].rstrip("/")
    tags = {} if digest else tags_of(location)

    def describe(fragment: Any) -> tuple[File, int, str, Any]:
        keys = dataset.get_partition_keys(fragment.partition_expression)
        if binary := [key for key, value in keys.items() if isinstance(value, bytes)]:
            raise InvalidJobError(f"{location} is partitioned by {binary[0]!r}, which is binary: have Spark read it")
        partition = {key: None if value is None else str(value) for key, value in keys.items()}
        short = fragment.path.removeprefix(base)
        # Delta names its files relative to the table.
        place = location + short if short[:1] in ("", "/") else store.join(location, short)
        groups = [fragment.metadata.row_group(number) for number in range(fragment.metadata.num_row_groups)]
        rows, size = tuple(group.num_rows for group in groups), sum(group.total_byte_size for group in groups)
        # Before the content is read, which may change meanwhile.
        stamp = "" if digest else stamp_of(place)
        content = "" if digest else tags.get(short) or digest_of(place)
        return File(place, rows, partition, stamp, content), size, f"{short} {content}", fragment.physical_schema

    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        described = list(pool.map(describe, fragments))
    files, sizes, facts, schemas = zip(*described, strict=True) if described else ((), (), (), ())
    # The larger of encoded and decoded size: a dictionary encodes a long text in a byte, a repeated value in none.
    decoded = int(sum(sum(file.rows) for file in files) * _decoded_row(fragments))
    size = max(decoded, sum(sizes))
    # The log of a Delta table has its schema.
    schema = schema_of_files([data.schema] if digest else [data.schema, *schemas], where)
    kinds.check(schema, where)
    for file, inside in zip(files, schemas, strict=True):
        check_missing(file, inside, schema, where)
    content = digest or " ".join([*facts, str(schema)])
    checksum = hashlib.sha256(content.encode()).hexdigest()
    return Manifest(schema=encode_schema(schema), files=files, size=size, digest=checksum)


def _decoded_row(fragments: list[Any]) -> float:
    """Returns the bytes of a decoded row, estimated from the first rows of the first file that has any."""
    import pyarrow.parquet as pq

    for fragment in fragments:
        if fragment.metadata.num_rows:
            with fragment.open() as source:
                # Not all of a row group.
                batch = next(pq.ParquetFile(source, buffer_size=64 << 10, pre_buffer=False).iter_batches(16))
            # A dictionary counts once for any number of rows, so columns are decoded first.
            columns = (each.dictionary_decode() if hasattr(each, "dictionary") else each for each in batch.columns)
            return float(sum(column.nbytes for column in columns) / batch.num_rows)
    return 0.0
