"""OpenLineage: inputs, outputs and run directory of a training. Nothing here stops a task.

Only this module imports the OpenLineage provider or its client, which need not be installed.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import rankzero
from rankzero.pipeline import map_refs, store

logger = logging.getLogger(__name__)

FACET_NAME = "rankzero_run"
"""Key of the run facet that holds the run directory."""

_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")
"""Schemes of URLs in which the name of a container precedes the ``@``, instead of a user and a password."""

_QUERY = re.compile(r"\?[\w.-]+=.*")
"""The query of a URL, such as a signature; a pattern such as ``part-?.parquet`` has none."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run for OpenLineage, as far as they are known at the time.

    Attributes:
        inputs: Namespaces and names of the inputs.
        directory: Run directory, path or URL.
        result: Location of rank 0's value; None if it is small enough for the status.
    """

    inputs: tuple[tuple[str, str], ...] = ()
    directory: str | None = None
    result: str | None = None


def is_installed() -> bool:
    """Returns True if the OpenLineage provider can be imported."""
    try:
        importlib.import_module("airflow.providers.openlineage")
    except ImportError:
        return False
    return True


def inputs_of(arguments: Any, dataset: Any) -> tuple[tuple[str, str], ...]:
    """Returns namespaces and names of the results, files and tables that a training is given; queries are left out.

    Args:
        arguments: Arguments of the function, which may contain `ResultRef` objects at any depth.
        dataset: The operator's ``dataset``.
    """
    found: list[tuple[str, str]] = []
    try:
        if is_installed():
            from rankzero.pipeline import datasets

            map_refs(arguments, lambda ref: found.append(dataset_name(ref.uri)))
            for source in dataset.values() if isinstance(dataset, Mapping) else [dataset] if dataset else []:
                if isinstance(source, rankzero.ResultRef):
                    found.append(dataset_name(source.uri))
                elif datasets.is_path(source):
                    found.append(dataset_name(os.fspath(source)))
                elif not re.search(r"\s", source.strip()):
                    found.append(("spark", source.strip().replace("`", "")))
    except Exception:
        logger.warning("the inputs of the training are not all known to OpenLineage", exc_info=True)
    return tuple(dict.fromkeys(found))


def facets(facts: RunFacts) -> Any:
    """Returns an ``OperatorLineage`` for the methods ``get_openlineage_facets_on_...``; None without the provider."""
    if not is_installed():
        return None
    try:
        return _build(facts)
    except Exception:
        logger.warning("the run has no OpenLineage facets", exc_info=True)
        return None


def _build(facts: RunFacts) -> Any:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from attrs import define
    from openlineage.client.event_v2 import Dataset
    from openlineage.client.facet_v2 import RunFacet

    @define
    class RankZeroRunFacet(RunFacet):  # type: ignore[misc]
        runDirectory: str

    return OperatorLineage(
        inputs=[Dataset(*name) for name in facts.inputs],
        outputs=[Dataset(*dataset_name(facts.result))] if facts.result else [],
        run_facets={FACET_NAME: RankZeroRunFacet(facts.directory)} if facts.directory else {},
    )


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
