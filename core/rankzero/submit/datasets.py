"""Turns the datasets that a user gives a launcher into manifests of files that ranks read.

A DataFrame is computed and written to the run's directory before the run is submitted; a path is read in place. A
table or a query for which the caller's process has no SparkSession is left to the driver, which opens one.

A training reads one snapshot: a resumed run finds the same rows. The identity of a DataFrame is its content, that of a
path its files' content, that of a table or query its text.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from rankzero import store
from rankzero.advice import require
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
_PATH = re.compile(r"([A-Za-z][\w+.-]*:/|~|\.{0,2}/(?!\*)).*|\S*(/\S*|\.parquet)", re.DOTALL)
"""A URL, a path from the root, the home or the working directory, or a text without spaces that has a slash or ends in
``.parquet``. A comment of SQL begins with a slash, too."""


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
        self._opened: dict[str, Any] = {}

    def _open(self, name: str) -> Any:
        """Returns a manifest, a DataFrame, or the text of a query that the driver has Spark compute."""
        if name not in self._opened:
            self._opened[name] = self._read(name, self._given[name])
        return self._opened[name]

    def _read(self, name: str, source: Any) -> Any:
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

    def digests(self, frames: Mapping[str, str] | None = None) -> dict[str, str]:
        """Returns checksums of the datasets by name, for the identity of a training; writes nothing.

        Args:
            frames: Checksums of DataFrames, by name, which Spark then does not compute.
        """
        found = {}
        for name in self._given:
            source = self._open(name)
            if isinstance(source, Manifest):
                found[name] = source.digest
            elif is_frame(source):
                found[name] = _content_of(source) if frames is None else frames.get(name, "")
            else:
                found[name] = self._text(source)
        return found

    def _text(self, query: str) -> str:
        # The driver computes the rows. The text counts for one chain of tries: a user's clear reads the rows again.
        return f"{query} {self._generation}".strip()

    @property
    def has_frames(self) -> bool:
        """Returns True if Spark must compute the checksum of a DataFrame to know the identity."""
        return any(is_frame(self._open(name)) for name in self._given)

    def collect(
        self, own: Submission, before: Submission | None
    ) -> tuple[dict[str, Manifest], dict[str, str], dict[str, str]]:
        """Computes or reads the datasets of a run.

        Args:
            own: The submission that is being written.
            before: The submission before it. A DataFrame with the same rows is reused from there, so that resumed ranks
                find the same order, and Spark writes nothing.

        Returns:
            The manifests, the queries that are left to the driver, and the checksums of both, by name.

        Raises:
            InvalidJobError: there is no such table, too few rows, or a column that no tensor can represent.
            EngineError: Spark failed.
        """
        manifests: dict[str, Manifest] = {}
        queries: dict[str, str] = {}
        for name in self._given:
            source = self._open(name)
            if is_frame(source):
                source = _of_frame(source, name, own, before)
            if isinstance(source, Manifest):
                source.check_rows(name, own.job.num_processes)
                manifests[name] = source
            else:
                queries[name] = source
        digests = {name: manifest.digest for name, manifest in manifests.items()}
        return manifests, queries, digests | {name: self._text(query) for name, query in queries.items()}


def _content_of(frame: Any) -> str:
    from rankzero.engines.spark.materialize import content_of

    return content_of(frame)


def _of_frame(frame: Any, name: str, own: Submission, before: Submission | None) -> Manifest:
    from rankzero.engines.spark.materialize import materialize

    known: Manifest | None = None
    with storing(own.run):
        store.make_directory(own.directory)
        with contextlib.suppress(FileNotFoundError):
            known = from_bytes(store.read_bytes(before.path(FILE))).get(name) if before else None
    if known and known.folder and store.exists(known.files[0].location):
        if _content_of(frame) == known.digest:
            return known
        logger.info("dataset %r has other rows than in the submission of %s before", name, own.run.directory)
    return materialize(frame, own.new_dataset(name), name, lambda text: logger.info("%s", text))
