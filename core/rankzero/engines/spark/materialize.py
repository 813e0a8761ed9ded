"""A DataFrame as Parquet files of the run's store, written by Spark's own Python workers, and the checksum of its rows.

Each task writes its rows, in row groups of 4 MiB, into one file, and returns a row about it to Spark. Only the files
that these rows name are in the manifest, so files of tasks that failed or ran twice do not count. The JVM's file
systems are not used, which would need Hadoop's clients for S3: executors need pyarrow and access to the store.

An action of Spark runs in a thread, with progress, cancellation and translated errors (`action`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import logging
import queue
import re
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from rankzero import bounds, store
from rankzero.data import kinds
from rankzero.data.files import filesystem_of, open_file
from rankzero.data.kinds import VECTOR
from rankzero.data.manifest import File, Manifest, encode_schema
from rankzero.engines.spark import part as part_module
from rankzero.engines.spark.stage import first_lines, reason, with_own_python
from rankzero.errors import EngineError, InvalidJobError, require
from rankzero.threads import in_thread

DATAFRAME_PROGRESS_INTERVAL = bounds.scaled(10.0)  # Between two lines about a DataFrame that Spark is computing

logger = logging.getLogger(__name__)

_HASH = "__rankzero_hash__"

_VARIANT = re.compile(r'^"variant"$|[tT]ype": ?"variant"')  # A type of Spark 4, in the JSON of a type


def open_query(session: Any, query: str) -> Any:
    """Returns the DataFrame of a table or a query. Raises InvalidJobError if Spark cannot resolve it."""
    text = query.strip().rstrip(";")
    is_query = any(character.isspace() for character in text)
    try:
        frame = session.sql(text) if is_query else session.table(text)
        # Spark Connect sends no request before the schema is needed.
        _ = frame.schema
    except Exception as error:
        why = str(error).strip().splitlines()[0]
        raise InvalidJobError(f"the dataset {query!r} cannot be read by Spark: {why}") from error
    return frame


def content_of(frame: Any) -> str:
    """Returns a checksum of a DataFrame's rows, in any order, which Spark computes without writing them."""
    from pyspark.sql import functions as F

    check_frame(frame, "the dataset")
    numbered = _numbered(frame)
    total = F.sum(row_hash(numbered).cast("decimal(38,0)"))
    row = action(lambda: numbered.select(total, F.count(F.lit(1))).collect(), frame, "the dataset", logger.info)[0]
    return digest_of(int(row[0] or 0), int(row[1]), frame)


def materialize(
    frame: Any, folder: str, name: str, say: Callable[[str], None], check: Callable[[], None] = lambda: None
) -> Manifest:
    """Makes Spark compute a DataFrame and write its rows.

    Args:
        frame: The DataFrame.
        folder: A new directory of the run's store. It is removed again if this raises.
        name: Name of the dataset.
        say: Receives lines about progress.
        check: Called periodically; an exception that it raises ends Spark's work.

    Raises:
        InvalidJobError: a column has no tensor type, or has nulls that a tensor cannot represent.
        EngineError: Spark failed, or its executors do not see the store.
    """
    where = f"the dataset {name!r}"
    check_frame(frame, where)
    store.make_directory(folder)
    try:
        numbered = _numbered(frame)
        hashed = numbered.withColumn(_HASH, row_hash(numbered))
        task = _make_task(list(frame.columns), *filesystem_of(folder))
        context = context_of(frame)
        # A Spark Connect server has a Python of its own.
        with with_own_python(context) if context else contextlib.nullcontext():
            written = hashed.mapInArrow(task, part_module.FACTS)
        rows = action(written.collect, frame, where, say, check)
        return _manifest(rows, folder, frame, where)
    except BaseException:
        store.remove(folder)
        raise


def _numbered(frame: Any) -> Any:
    """Returns a DataFrame with columns c0, c1, ...: Spark cannot resolve every name, such as one with a dot."""
    return frame.toDF(*(f"c{number}" for number in range(len(frame.columns))))


def require_arrow(where: str) -> None:
    """Raises InvalidJobError unless the packages are installed here that pyspark needs to compute a dataset."""
    require(f"{where} is computed by Spark, which needs", "pandas pyarrow", "pandas", "pyarrow")


def check_frame(frame: Any, where: str) -> None:
    """Raises InvalidJobError for a column of a DataFrame that has no tensor type, and for a missing package."""
    require_arrow(where)
    import pyarrow as pa

    to_arrow = _to_arrow()
    fields = []
    for field in frame.schema.fields:
        kind = field.dataType
        try:
            if _VARIANT.search(kind.json()):
                raise TypeError("variant")
            # For a user-defined type, the type in which Spark stores it.
            fields.append(pa.field(field.name, to_arrow(stored(kind))))
        except Exception:
            raise InvalidJobError(
                f"column {field.name!r} of {where} is {kind.simpleString()}: this type cannot become a tensor; leave "
                "the column out, or convert it to numbers"
            ) from None
    names = [field.name for field in fields]
    for column in names:
        if names.count(column) > 1:
            raise InvalidJobError(f"{where} has two columns {column!r}: give them different names")
    kinds.check(pa.schema(fields), where)


def _to_arrow() -> Callable[[Any], Any]:
    """Returns a function that converts a type of Spark to a type of Arrow."""
    from pyspark.sql.pandas import types

    convert: Callable[..., Any] = types.to_arrow_type
    # Newer versions of Spark refuse a timestamp without a time zone.
    has_zone = "timezone" in inspect.signature(convert).parameters
    return functools.partial(convert, timezone="UTC") if has_zone else convert


def _make_task(names: list[str], filesystem: Any, folder: str) -> Callable[[Any], Iterator[Any]]:
    """Returns the function of one Spark task, which is pickled by value together with the functions that it calls."""
    from pyspark import cloudpickle

    untyped: Any = cloudpickle
    for module in (part_module, kinds):
        untyped.register_pickle_by_value(module)
    write_part = part_module.write_part
    return lambda batches: write_part(batches, names, filesystem, folder)


def _manifest(rows: list[Any], folder: str, frame: Any, where: str) -> Manifest:
    import pyarrow.parquet as pq

    if not rows:
        raise InvalidJobError(f"{where} has no rows")
    rows = sorted((json.loads(row["facts"]) for row in rows), key=lambda row: row["file"])
    sizes = store.sizes(folder)
    missing = [row["file"] for row in rows if row["file"] not in sizes]
    if missing:
        raise _not_shared(where, f"{len(missing)} of {len(rows)} files have not arrived in {folder}")
    with open_file(store.join(folder, rows[0]["file"])) as file:
        schema = pq.read_schema(file)
    kinds.check_nulls((row["nulls"] for row in rows), where)
    lengths = _lengths(rows, schema, where)
    files = tuple(File(store.join(folder, row["file"]), tuple(row["rows"])) for row in rows)
    total = sum(sum(file.rows) for file in files)
    for name in set(sizes) - {row["file"] for row in rows}:
        # Files of tasks that failed or ran twice.
        store.remove(store.join(folder, name))
    return Manifest(
        schema=encode_schema(schema),
        files=files,
        size=sum(row["size"] for row in rows),
        digest=digest_of(sum(row["digest"] for row in rows), total, frame),
        lengths=lengths,
        folder=folder,
    )


def _lengths(rows: list[Any], schema: Any, where: str) -> dict[str, int]:
    """Returns the length of each column whose arrays or vectors all have the same one."""
    found = {}
    for name in {name for row in rows for name in row["lengths"]}:
        bounds = {count for row in rows for count in row["lengths"].get(name, [])}
        if len(bounds) == 1:
            found[name] = bounds.pop()
        elif kinds.is_vector(schema.field(name).type):
            raise InvalidJobError(
                f"column {name!r} of {where} has vectors of {min(bounds)} to {max(bounds)} numbers: a tensor needs "
                "vectors of one length"
            )
    return found


def _not_shared(where: str, why: str) -> EngineError:
    return EngineError(
        f"Spark's executors and this process do not see the same store for {where}, or may not write there: choose a "
        f"store that both see, a shared path or the URL of an object store ({why})"
    )


_WORD = 1 << 64


def row_hash(frame: Any) -> Any:
    """Returns a column with a checksum of each row.

    Spark's own hash ignores the positions of nulls and the ends of arrays. So this one also hashes where nulls are, at
    every depth, and hashes each array by itself.
    """
    from pyspark.sql import functions as F

    return F.xxhash64(*(part for field in frame.schema for part in _parts(frame[f"`{field.name}`"], field.dataType)))


def digest_of(total: int, rows: int, frame: Any) -> str:
    """Returns the checksum of a DataFrame from the sum of its rows' checksums and their number."""
    facts = (total % _WORD, rows, frame.schema.simpleString())
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def stored(kind: Any) -> Any:
    """Returns the type in which Spark stores a user-defined type; other types stay unchanged."""
    return kind.sqlType() if hasattr(kind, "sqlType") else kind


def _parts(column: Any, kind: Any) -> list[Any]:
    from pyspark.sql import functions as F
    from pyspark.sql import types

    parts = [F.isnull(column)]
    if isinstance(kind, types.StructType):
        # Spark cannot resolve a field by name if the name of another one differs in case only.
        kind = types.StructType([types.StructField(f"f{at}", field.dataType) for at, field in enumerate(kind)])
        column = column.cast(kind)
        fields = ((column.getField(field.name), field.dataType) for field in kind)
        return parts + [part for field in fields for part in _parts(*field)]
    if stored(kind) is not kind:
        # The first field of a vector is its kind. For other types, only Spark's JSON exposes the fields.
        is_vector = getattr(stored(kind), "names", None) == list(VECTOR)
        return [*parts, F.xxhash64(column if is_vector else F.to_json(F.struct(column)))]
    if not isinstance(kind, types.ArrayType):
        return [*parts, column]
    return [*parts, F.xxhash64(column), F.xxhash64(F.transform(column, F.isnull))]


def context_of(frame: Any) -> Any:
    """Returns the SparkContext of a DataFrame; None for one of Spark Connect, which has none."""
    return frame.sparkSession.sparkContext if hasattr(frame, "_jdf") else None


def action(
    run: Callable[[], Any],
    frame: Any,
    where: str,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> Any:
    """Returns the result of an action of Spark, which ends with this call, however that ends.

    It runs in a thread, because py4j cannot be interrupted while it waits. `materialize` describes the other arguments.
    Raises EngineError if Spark fails.
    """
    tag = f"rankzero-data-{secrets.token_hex(8)}"
    # No Event: an exception that a signal handler raises inside its wait() may leave its lock held.
    done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def act() -> Any:
        try:
            _tag(frame, tag)
            return run()
        finally:
            done.put(None)

    def cancel() -> None:
        # Repeated, because a single cancel would not reach a job that Spark has not started yet.
        while not result.done():
            with contextlib.suppress(Exception):
                if context := context_of(frame):
                    context.cancelJobGroup(tag)
                else:
                    frame.sparkSession.interruptTag(tag)
            time.sleep(bounds.POLL_INTERVAL)

    result = in_thread(act, "rankzero-data")
    try:
        begun = time.monotonic()
        say_at = begun + DATAFRAME_PROGRESS_INTERVAL()
        while done.empty():
            time.sleep(bounds.POLL_INTERVAL_SHORT)
            check()
            now = time.monotonic()
            if now >= say_at:
                say_at = now + DATAFRAME_PROGRESS_INTERVAL()
                say(f"Spark computes {where}: {_progress(frame)}, {now - begun:.0f} s")
    except BaseException:
        in_thread(cancel, "rankzero-cancel")
        with contextlib.suppress(queue.Empty):
            done.get(timeout=DATAFRAME_PROGRESS_INTERVAL())
        raise
    if error := result.exception():
        text = str(error)
        if part_module.PREFIX in text:
            # A task could not write its file.
            raise _not_shared(where, first_lines(text)) from error
        raise EngineError(f"Spark could not compute {where}: {reason(text)}") from error
    return result.result()


def _tag(frame: Any, tag: str) -> None:
    """Marks the jobs of this thread, so that they can be cancelled."""
    if context := context_of(frame):
        # A job group and not a tag: a tag does not interrupt tasks, which may wait for their Python for minutes.
        context.setJobGroup(tag, "rankzero: dataset", interruptOnCancel=True)
    else:
        frame.sparkSession.addTag(tag)


def _progress(frame: Any) -> str:
    """Returns how many tasks have ended, if this Spark reports it."""
    with contextlib.suppress(Exception):
        tracker = context_of(frame).statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        done = sum(stage.numCompletedTasks for stage in stages if stage)
        return f"{done} of {sum(stage.numTasks for stage in stages if stage)} tasks"
    return "running"
