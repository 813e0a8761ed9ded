"""OpenLineage facts of a training: the Airflow task that a Spark job belongs to, and a run's inputs and outputs.

The OpenLineage provider need not be installed, and is imported only if it is. Problems with lineage never stop a task.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import rankzero
from rankzero.pipeline import map_refs, store

if TYPE_CHECKING:
    from airflow.sdk import Context

logger = logging.getLogger(__name__)

FACET_NAME = "rankzero_run"
"""Key of the run facet that holds world size, run directory and the first cause of a failure."""

_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")
"""Schemes of URLs in which the name of a container precedes the ``@``, instead of a user and a password."""

_QUERY = re.compile(r"\?[\w.-]+=.*")
"""The query of a URL, such as a signature; a pattern such as ``part-?.parquet`` has none."""

_METASTORE = "spark.hadoop.hive.metastore.uris"
_PROVIDER = "airflow.providers.openlineage"
_INJECTIONS = "airflow.providers.common.compat.openlineage.utils.spark"
# Option of the section [openlineage], and the function that it asks for; the Spark provider uses the same two.
_INJECTION_OF = {
    "spark_inject_parent_job_info": "inject_parent_job_information_into_spark_properties",
    "spark_inject_transport_info": "inject_transport_information_into_spark_properties",
}


def spark_properties(conf: Mapping[str, str], context: Context) -> dict[str, str]:
    """Spark configuration that tells Spark's OpenLineage listener which Airflow task started the job.

    Args:
        conf: The configuration so far. What it says about the parent job or the transport stays.
        context: Of the task.

    Returns:
        A copy, with ``spark.openlineage.*`` where ``[openlineage] spark_inject_parent_job_info`` or
        ``spark_inject_transport_info`` is on and the provider is installed. It may then hold credentials.
    """
    properties = dict(conf)
    try:
        for option, name in _INJECTION_OF.items():
            if _is_on(option) and is_installed():
                inject = getattr(importlib.import_module(_INJECTIONS), name)
                properties = {key: str(value) for key, value in inject(properties, context).items()}
    except Exception:
        logger.warning("the Spark job gets no OpenLineage information of its task", exc_info=True)
    return properties


def is_installed() -> bool:
    """True if the OpenLineage provider can be imported."""
    try:
        importlib.import_module(_PROVIDER)
    except ImportError:
        return False
    return True


def _is_on(option: str) -> bool:
    from airflow_rankzero._compat import conf

    return bool(conf.getboolean("openlineage", option, fallback=False))


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run.

    Attributes:
        files: Paths and URLs of datasets, and of the results of other runs that were given as arguments.
        queries: Names of tables, and queries, that Spark computes.
        metastore: Address of the Hive metastore with the tables; None if the Spark configuration has none.
    """

    files: tuple[str, ...] = ()
    queries: tuple[str, ...] = ()
    metastore: str | None = None


def inputs_of(arguments: Any, dataset: Any, spark_conf: Mapping[str, Any] | None) -> Inputs:
    """Returns the inputs of a training that its arguments show.

    Args:
        arguments: Arguments of the function, which may contain `ResultRef` objects at any depth.
        dataset: The operator's ``dataset``.
        spark_conf: The operator's ``spark_conf``.

    Returns:
        The inputs, without those that cannot be determined: problems with lineage never stop a task.
    """
    from rankzero.pipeline import datasets

    files: list[str] = []
    queries: list[str] = []
    try:
        map_refs(arguments, lambda ref: files.append(ref.uri))
        for source in dataset.values() if isinstance(dataset, Mapping) else [dataset] if dataset else []:
            if isinstance(source, rankzero.ResultRef):
                files.append(source.uri)
            elif datasets.is_path(source):
                files.append(os.fspath(source))
            else:
                queries.append(source.strip())
    except Exception:
        logger.warning("the inputs of the training are not all known to OpenLineage", exc_info=True)
    metastore = str((spark_conf or {}).get(_METASTORE, "")).partition(",")[0]
    return Inputs(tuple(dict.fromkeys(files)), tuple(queries), metastore or None)


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run for OpenLineage, as far as they are known at the time.

    Attributes:
        world_size: Number of ranks; None before the templates are rendered.
        directory: Run directory, path or URL; None before it exists.
        result: Location of rank 0's value; None before it exists, or if it is small enough for the status.
        inputs: The inputs of the run.
        error: The error of a run that failed.
    """

    world_size: int | None = None
    directory: str | None = None
    result: str | None = None
    inputs: Inputs = Inputs()
    error: BaseException | None = None


def facets(facts: RunFacts) -> Any:
    """Builds the result of the methods ``get_openlineage_facets_on_start``, ``_on_complete`` and ``_on_failure``.

    Args:
        facts: The facts that are known at the time.

    Returns:
        An ``OperatorLineage``: the result as output; files, tables and results given as arguments as inputs; queries
        as a job facet; and a run facet `FACET_NAME`. None without the OpenLineage provider.
    """
    if not is_installed():
        return None
    try:
        return _build(facts)
    except Exception:
        logger.warning("the run has no OpenLineage facets", exc_info=True)
        return None


def _build(facts: RunFacts) -> Any:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from openlineage.client.event_v2 import Dataset

    from airflow_rankzero.openlineage.facet import RankZeroRunFacet

    # Not the standard facet `errorMessage`: Airflow puts its own in its place, with the traceback of the task.
    cause = None if facts.error is None else getattr(facts.error, "traceback", None) or str(facts.error)
    return OperatorLineage(
        inputs=[Dataset(*name) for name in _names_of(facts.inputs)],
        job_facets=_sql_facet([query for query in facts.inputs.queries if _is_query(query)]),
        outputs=[Dataset(*dataset_name(facts.result))] if facts.result else [],
        run_facets={FACET_NAME: RankZeroRunFacet(facts.world_size, facts.directory, cause)},
    )


def _names_of(inputs: Inputs) -> list[tuple[str, str]]:
    tables = [table for query in inputs.queries for table in (_tables_in(query) if _is_query(query) else [query])]
    # As OpenLineage names the tables of Hive; of other catalogs nothing tells where they are.
    namespace = "hive://" + inputs.metastore.partition("://")[2] if inputs.metastore else "spark"
    named = [*map(dataset_name, inputs.files), *((namespace, table.replace("`", "")) for table in tables)]
    return list(dict.fromkeys(named))


def _is_query(text: str) -> bool:
    return any(character.isspace() for character in text)


def _tables_in(query: str) -> list[str]:
    """The tables that a query reads, by the parser that the provider brings along."""
    from openlineage_sql import parse

    found = parse([query], dialect="spark")
    return [] if found is None else [table.qualified_name for table in found.in_tables]


def _sql_facet(queries: list[str]) -> dict[str, Any]:
    if not queries:
        return {}
    from openlineage.client.facet_v2 import sql_job

    return {"sql": sql_job.SQLJobFacet(query=";\n".join(queries))}


def dataset_name(uri: str) -> tuple[str, str]:
    """Returns the namespace and name of a file, as OpenLineage's naming has them, without a user and credentials.

    Args:
        uri: Path or URL.

    Example:
        >>> dataset_name("s3://bucket/runs/a/result/value.json")
        ('s3://bucket', 'runs/a/result/value.json')
        >>> dataset_name("/data/runs/a/result/value.json")
        ('file', '/data/runs/a/result/value.json')
    """
    if not store.is_url(uri):
        return "file", store.normalize(uri)
    scheme, _, path = uri.partition("://")
    authority, _, name = path.partition("/")
    if scheme not in _CONTAINERS:
        authority = authority.rpartition("@")[2]
    return f"{'s3' if scheme == 's3a' else scheme}://{authority}", _QUERY.sub("", name) or "/"
