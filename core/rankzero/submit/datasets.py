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
from dataclasses import replace
from typing import Any

from rankzero import store
from rankzero.advice import require
from rankzero.data.files import is_changed
from rankzero.data.manifest import FILE, Manifest, from_bytes
from rankzero.data.table import Table
from rankzero.engines.base import Engine
from rankzero.errors import InvalidJobError
from rankzero.job import qualified_name
from rankzero.run.directory import Submission
from rankzero.submit.existing import storing
from rankzero.submit.paths import manifest_of_path
from rankzero.train.dataset import DEFAULT
from rankzero.values.ref import ResultRef

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_TABLE = re.compile(r"[A-Za-z_`][\w`-]*(\.[\w`-]+){0,3}")
_PATH = re.compile(r".*(/|\\|\.parquet$)")
_BEGIN_OF_PATH = re.compile(r"[A-Za-z][\w+.-]*:/|~|\.{0,2}/(?!\*)")
"""URLs, and paths from the root, the home or the working directory; a comment of SQL begins with a slash, too."""


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


class Sources:
    """The datasets that a user gave for one run. Each path is read once, and each query opened once.

    Attributes:
        given: The result of `check`.
    """

    def __init__(self, given: Mapping[str, Any], engine: Engine) -> None:
        self.given = given
        self._engine = engine
        self._opened: dict[str, Any] = {}

    def _open(self, name: str) -> Any:
        """Returns a manifest, a DataFrame, or the text of a query that the driver has Spark compute."""
        if name not in self._opened:
            found = _opened(self.given[name], self._engine)
            if not isinstance(found, Manifest) and not is_frame(found) and is_path(found):
                require("a dataset needs", "pyarrow", "pyarrow")
                found = manifest_of_path(os.fspath(found), name)
            self._opened[name] = found
        return self._opened[name]

    def digests(
        self, kept: Mapping[str, Manifest], generation: str, assumed: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Returns checksums of the datasets by name, for the identity of a training; writes nothing.

        Args:
            kept: Datasets that are those of an earlier try.
            generation: Name of the chain of tries. The driver computes the rows of a query, so only its text is known
                here, which counts for one chain: a user's clear reads the rows again.
            assumed: Checksums of DataFrames, by name, which Spark then does not compute.
        """
        found = {}
        for name in self.given:
            source = kept.get(name) or self._open(name)
            if isinstance(source, Manifest):
                found[name] = source.digest
            elif is_frame(source):
                found[name] = _content_of(source) if assumed is None else assumed.get(name, "")
            else:
                found[name] = f"{source} {generation}".strip()
        return found

    def has_frames(self, kept: Mapping[str, Manifest]) -> bool:
        """Returns True if Spark must compute the checksum of a DataFrame to know the identity."""
        return any(is_frame(self._open(name)) for name in self.given.keys() - kept.keys())

    def collect(
        self, own: Submission, kept: Mapping[str, Manifest], before: Mapping[str, Manifest]
    ) -> tuple[dict[str, Manifest], dict[str, str]]:
        """Computes or reads the datasets of a run. Returns the manifests, and the queries that are left to the driver.

        Args:
            own: The submission that is being written.
            kept: Datasets that are those of an earlier try.
            before: The datasets of an earlier submission of the run. One with the same rows is reused, so that resumed
                ranks find the same order, and Spark writes nothing.

        Raises:
            InvalidJobError: there is no such table, too few rows, or a column that no tensor can represent.
            EngineError: Spark failed.
        """
        manifests: dict[str, Manifest] = {}
        queries: dict[str, str] = {}
        for name, given in self.given.items():
            source = kept.get(name) or self._open(name)
            if is_frame(source):
                source = _of_frame(source, name, own, before.get(name))
            if isinstance(source, Manifest):
                source.check_rows(name, own.job.num_processes)
                manifests[name] = replace(source, source=source.source or _source_of(given))
            else:
                queries[name] = source
                _check_query(name, source, self._engine)
        return manifests, queries


def _content_of(frame: Any) -> str:
    from rankzero.engines.spark.materialize import content_of

    return content_of(frame)


def _of_frame(frame: Any, name: str, own: Submission, before: Manifest | None) -> Manifest:
    from rankzero.engines.spark.materialize import materialize

    if before and before.folder and store.exists(before.files[0].location):
        if _content_of(frame) == before.digest:
            return before
        logger.info("dataset %r has other rows than in the submission of %s before", name, own.run.directory)
    with storing(own.run):
        store.make_directory(own.directory)
    return materialize(frame, own.new_dataset(name), name, lambda text: logger.info("%s", text))


def earlier(before: Submission) -> dict[str, Manifest]:
    """Returns the datasets of a submission, by name."""
    try:
        return from_bytes(store.read_bytes(before.path(FILE)))
    except FileNotFoundError:
        return {}


def of_earlier_try(before: Submission, given: Mapping[str, Any], generation: str) -> dict[str, Manifest]:
    """Returns the datasets that a submission has if an earlier try of the same chain made it with the same sources.

    A dataset that has changed since does not make an automatic try another training.

    Args:
        before: The submission.
        given: The result of `check`.
        generation: Name of the chain of tries that an orchestrator starts by itself; empty without an orchestrator.
    """
    job = before.job
    if not given or not generation or job.generation != generation:
        return {}
    return {
        name: manifest
        for name, manifest in earlier(before).items()
        # The identity has the text of a query that the driver computes.
        if name in given and name not in job.queries and manifest.source in (None, _source_of(given[name]))
    }


def are_readable(manifests: Mapping[str, Manifest]) -> bool:
    """Returns True if every file of these datasets still has the rows that its manifest describes."""
    for name, manifest in manifests.items():
        for file in manifest.files if manifest.folder is None else manifest.files[:1]:
            if not store.exists(file.location) or is_changed(file.location, file.stamp, file.content):
                logger.warning("dataset %r has other rows than in the try before", name)
                return False
    return True


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
    if isinstance(source, ResultRef) and not isinstance(source := source.load(), Table):
        raise InvalidJobError(f"a dataset is a result of type {type(source).__name__}, which is no table: write_rows")
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


def _check_query(name: str, query: str, engine: Engine) -> None:
    if not engine.has_tables:
        raise InvalidJobError(
            f"dataset {name!r} is {query!r}: there is no such path, and a table or a query needs Spark: give "
            "engine=SparkEngine(...), or a DataFrame"
        )
    if not engine.drives_elsewhere:
        _require_arrow(name)


def _require_arrow(name: str) -> None:
    from rankzero.engines.spark.materialize import require_arrow

    require_arrow(f"the dataset {name!r}")
