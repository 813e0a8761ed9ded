"""Turns the datasets that a user gives a launcher into manifests of files that ranks read.

A DataFrame is computed and written to the run's directory before the run is submitted; a path is read in place. A
table or a query for which the caller's process has no SparkSession is left to the driver, which opens one.

A training reads one snapshot: a resumed run finds the same rows. The identity of a DataFrame is its content, that of a
path its files' content, that of a table or query its text.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rankzero import store
from rankzero.advice import require
from rankzero.data.manifest import FILE, Manifest, from_bytes, to_bytes
from rankzero.data.table import Table
from rankzero.engines.base import Engine
from rankzero.errors import InvalidJobError
from rankzero.job import qualified_name
from rankzero.run.directory import Submission
from rankzero.train.dataset import DEFAULT
from rankzero.values.pickled import Part
from rankzero.values.ref import ResultRef

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_TABLE = re.compile(r"[A-Za-z_`][\w`-]*(\.[\w`-]+){0,3}")
_PATH = re.compile(r".*(/|\\|\.parquet$)")
_BEGIN_OF_PATH = re.compile(r"[A-Za-z][\w+.-]*:/|~|\.{0,2}/(?!\*)")
"""URLs, and paths from the root, the home or the working directory; a comment of SQL begins with a slash, too."""


@dataclass(frozen=True)
class Datasets:
    """The datasets of one run.

    Attributes:
        manifests: By name, the datasets that are known before the run is submitted.
        queries: By name, the tables and queries that the run's driver has Spark compute.
    """

    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    queries: Mapping[str, str] = field(default_factory=dict)

    @property
    def digests(self) -> list[tuple[str, str]]:
        """Names and checksums of the datasets, for the identity of a training."""
        known = {name: manifest.digest for name, manifest in self.manifests.items()}
        return sorted({**known, **self.queries}.items())

    def files(self) -> dict[str, list[Part]]:
        """Returns the file with the manifests, which is sent to the ranks; empty if there are none."""
        if not self.manifests:
            return {}
        return {FILE: [to_bytes(self.manifests)]}

    def discard(self, before: Mapping[str, Manifest]) -> None:
        """Removes the rows that were written for a run that is not started, except those of an earlier submission."""
        kept = {manifest.folder for manifest in before.values()}
        for manifest in self.manifests.values():
            if manifest.folder and manifest.folder not in kept:
                store.remove(manifest.folder)


def check(given: object) -> dict[str, Any]:
    """Returns the given datasets by name, texts without whitespace around them.

    Raises:
        InvalidJobError: a value is no dataset.
    """
    if given is None:
        return {}
    every = given if isinstance(given, Mapping) else {DEFAULT: given}
    named = {name: source.strip() if isinstance(source, str) else source for name, source in every.items()}
    for name, source in named.items():
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise InvalidJobError(f"{name!r} cannot name a dataset: use letters, digits and _ . -")
        is_text = isinstance(source, (str, os.PathLike)) and os.fspath(source)
        if not (is_text or isinstance(source, (ResultRef, Manifest)) or is_frame(source)):
            raise InvalidJobError(
                f"dataset {name!r} is of type {qualified_name(type(source))}; give a Spark DataFrame, the path of a "
                "table, or with a Spark engine the name of a table or a query; write other frames as Parquet"
            )
        if is_frame(source):
            _require_arrow(name)
    return named


def read_paths(sources: Mapping[str, Any], engine: Engine, read: dict[str, Manifest]) -> dict[str, Any]:
    """Returns the sources, each path replaced by the manifest of its files.

    Args:
        sources: The result of `check`.
        engine: The engine of the run.
        read: The manifests that were read before, by name, to which this call adds.
    """
    found = {}
    for name, source in sources.items():
        opened = _opened(source, engine)
        if not isinstance(opened, Manifest) and not is_frame(opened) and is_path(opened):
            read[name] = read.get(name) or replace(_of_path(opened, name), source=_source_of(source))
            opened = read[name]
        found[name] = source if opened is source else opened
    return found


def digests_of(
    sources: Mapping[str, Any], engine: Engine, assumed: Mapping[str, str] | None = None
) -> list[tuple[str, str]]:
    """Returns names and checksums of the datasets for the identity of a training; writes nothing.

    Args:
        sources: The result of `check`.
        engine: The engine of the run.
        assumed: Checksums of DataFrames, by name, which Spark then does not compute.
    """
    found = {}
    for name, source in sources.items():
        source = _opened(source, engine)
        if isinstance(source, Manifest):
            found[name] = source.digest
        elif is_frame(source):
            from rankzero.engines.spark.materialize import content_of

            found[name] = content_of(source) if assumed is None else assumed.get(name, "")
        elif is_path(source):
            found[name] = _of_path(source, name).digest
        else:
            found[name] = source
    return sorted(found.items())


def collect(sources: Mapping[str, Any], engine: Engine, own: Submission, before: Mapping[str, Manifest]) -> Datasets:
    """Computes or reads the datasets of a run, except queries, which are left to the driver.

    Args:
        sources: The result of `check`.
        engine: The engine of the run.
        own: The submission that is being written.
        before: The datasets of an earlier submission of the run. One with the same rows is reused, so that resumed
            ranks find the same order, and Spark writes nothing.

    Raises:
        InvalidJobError: there is no such table, too few rows, or a column that no tensor can represent.
        EngineError: Spark failed.
    """
    manifests: dict[str, Manifest] = {}
    queries: dict[str, str] = {}
    try:
        for name, source in sources.items():
            source = _opened(source, engine)
            if isinstance(source, Manifest):
                manifests[name] = source
            elif is_frame(source):
                manifests[name] = _of_frame(source, name, own, before.get(name))
            elif is_path(source):
                manifests[name] = _of_path(source, name)
            else:
                queries[name] = source
                _check_query(name, source, engine)
        for name, manifest in manifests.items():
            manifest.check_rows(name, own.job.num_processes)
            if (groups := sum(len(file.rows) for file in manifest.files)) < own.job.num_processes:
                logger.info("dataset %r has %d row groups: ranks decode the same ones; write more", name, groups)
            manifests[name] = replace(manifest, source=manifest.source or _source_of(sources[name]))
    except BaseException:
        Datasets(manifests).discard(before)
        raise
    return Datasets(manifests, queries)


def _of_frame(frame: Any, name: str, own: Submission, before: Manifest | None) -> Manifest:
    from rankzero.engines.spark.materialize import content_of, materialize

    if before and before.folder and store.exists(before.files[0].location):
        if content_of(frame) == before.digest:
            return before
        logger.info("dataset %r has other rows than in the submission of %s before", name, own.run.directory)
    own.make()
    return materialize(frame, own.new_dataset(name), name, lambda text: logger.info("%s", text))


def earlier(before: Submission) -> dict[str, Manifest]:
    """Returns the datasets of a submission, by name."""
    try:
        return from_bytes(store.read_bytes(before.path(FILE)))
    except FileNotFoundError:
        return {}


def of_earlier_try(before: Submission, sources: Mapping[str, Any], generation: str) -> dict[str, Manifest]:
    """Returns the datasets that a submission has if an earlier try of the same chain made it with the same sources.

    Args:
        before: The submission.
        sources: The result of `check`.
        generation: Name of the chain of tries that an orchestrator starts by itself; empty without an orchestrator.
    """
    job = before.job
    if not sources or not generation or job.generation != generation:
        return {}
    return {
        name: manifest
        for name, manifest in earlier(before).items()
        # The identity has the text of a query that the driver computes.
        if name in sources and name not in job.queries and manifest.source in (None, _source_of(sources[name]))
    }


def are_readable(manifests: Mapping[str, Manifest], sources: Mapping[str, Any], engine: Engine) -> bool:
    """Returns True if every file of these datasets still has the rows that its manifest describes.

    Args:
        manifests: The datasets, by name.
        sources: The result of `check`.
        engine: The engine of the run.
    """
    for name, manifest in manifests.items():
        if manifest.folder is not None:
            is_readable = store.exists(manifest.files[0].location)
        else:
            from rankzero.submit.paths import is_unchanged

            source = _opened(sources[name], engine)
            is_path_of_rows = not is_frame(source) and not isinstance(source, Manifest)
            is_readable = not is_path_of_rows or is_unchanged(manifest, os.fspath(source), name)
        if not is_readable:
            logger.warning("dataset %r has other rows than in the try before", name)
            return False
    return True


def remove_replaced(before: Mapping[str, Manifest], now: Datasets) -> None:
    """Removes rows of an earlier submission that this one does not read; the driver does so for queries."""
    kept = {manifest.folder for manifest in now.manifests.values()}
    for name, manifest in before.items():
        if manifest.folder and manifest.folder not in kept and name not in now.queries:
            store.remove(manifest.folder)


def _source_of(source: Any) -> str:
    """Returns a name of what the user gave, equal in all tries of a step."""
    if isinstance(source, (ResultRef, Manifest)):
        return source.digest
    return "a DataFrame" if is_frame(source) else os.fspath(source)


def is_frame(source: object) -> bool:
    """Returns True for a DataFrame of Spark or Spark Connect."""
    return type(source).__module__.startswith("pyspark.sql.") and hasattr(source, "mapInArrow")


def is_path(source: Any) -> bool:
    """Returns True for the path of a table's files, False for the name of a table or a query."""
    text = os.fspath(source)
    if not isinstance(source, str) or _BEGIN_OF_PATH.match(text) or os.path.exists(text):
        return True
    return _PATH.match(text) is not None and not any(character.isspace() for character in text.strip())


def _opened(source: Any, engine: Engine) -> Any:
    """Opens a table or query as a DataFrame if the engine uses the caller's session; else returns its text.

    Raises:
        InvalidJobError: the name of a table is that of a folder, too.
    """
    session = getattr(engine, "session", None)
    if isinstance(source, ResultRef):
        source = _table_of(source)
    if engine.has_tables and isinstance(source, str) and _TABLE.fullmatch(source) and os.path.exists(source):
        raise InvalidJobError(
            f'dataset "{source}" may be a table of Spark, and is a path here: give "./{source}" for the path, or '
            f'"SELECT * FROM {source}" for the table'
        )
    if isinstance(source, Manifest) or is_frame(source) or is_path(source):
        return source
    if session is None:
        return source
    from rankzero.engines.spark.materialize import open_query

    return open_query(session, source)


def _table_of(ref: ResultRef) -> Table:
    """Loads the table that a run's function returned. Raises InvalidJobError if the result is no table."""
    value = ref.load()
    if not isinstance(value, Table):
        raise InvalidJobError(
            f"the dataset {ref.uri} is a result of type {type(value).__name__}; what rankzero.train.write_rows returns "
            "is a table, give it to the function as an argument otherwise"
        )
    return value


def _check_query(name: str, query: str, engine: Engine) -> None:
    if not engine.has_tables:
        raise InvalidJobError(
            f"dataset {name!r} is {query!r}: there is no such path, and a table or a query needs Spark: give "
            "engine=SparkEngine(...), or a DataFrame"
        )
    if not (_TABLE.fullmatch(query) or any(character.isspace() for character in query)):
        raise InvalidJobError(f"dataset {name!r} is {query!r}, which is no path, no name of a table and no query")
    if not engine.drives_elsewhere:
        _require_arrow(name)


def _require_arrow(name: str) -> None:
    from rankzero.engines.spark.materialize import require_arrow

    require_arrow(f"the dataset {name!r}")


def _of_path(source: Any, name: str) -> Manifest:
    require("a dataset needs", "pyarrow", "pyarrow")
    from rankzero.submit.paths import manifest_of_path

    return manifest_of_path(os.fspath(source), name)
