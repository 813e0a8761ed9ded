"""OpenLineage: inputs, outputs and run directory of a training. Nothing here stops a task.

Only this module imports the OpenLineage provider or its client, which need not be installed.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

import rankzero
from rankzero.pipeline import map_refs, store

logger = logging.getLogger(__name__)

_QUERY = re.compile(r"\?[\w.-]+=.*")
"""The query of a URL, such as a signature; a pattern such as ``part-?.parquet`` has none."""


def facets(arguments: Any, dataset: Any, directory: str | None = None, result: str | None = None) -> Any:
    """Returns an ``OperatorLineage`` for the methods ``get_openlineage_facets_on_...``; None without the provider.

    Args:
        arguments: Arguments of the function, which may contain `ResultRef` objects at any depth.
        dataset: The operator's ``dataset``; queries are left out.
        directory: The run directory, if the training has one by now; the run facet ``rankzero_run`` holds it.
        result: Location of rank 0's value; None if it is small enough for the status.
    """
    try:
        from airflow.providers.openlineage.extractors import OperatorLineage
        from attrs import define
        from openlineage.client.event_v2 import Dataset
        from openlineage.client.facet_v2 import RunFacet
    except ImportError:
        return None
    try:

        @define
        class RankZeroRunFacet(RunFacet):  # type: ignore[misc]
            runDirectory: str

        return OperatorLineage(
            inputs=[Dataset(*name) for name in inputs_of(arguments, dataset)],
            outputs=[Dataset(*dataset_name(result))] if result else [],
            run_facets={"rankzero_run": RankZeroRunFacet(directory)} if directory else {},
        )
    except Exception:
        logger.warning("the run has no OpenLineage facets", exc_info=True)
        return None


def inputs_of(arguments: Any, dataset: Any) -> tuple[tuple[str, str], ...]:
    """Returns namespaces and names of the inputs of a training, as for `facets`."""
    from rankzero.pipeline import datasets

    found: list[tuple[str, str]] = []
    map_refs(arguments, lambda ref: found.append(dataset_name(ref.uri)))
    for source in dataset.values() if isinstance(dataset, Mapping) else [dataset] if dataset else []:
        if isinstance(source, rankzero.ResultRef):
            found.append(dataset_name(source.uri))
        elif datasets.is_path(source):
            found.append(dataset_name(os.fspath(source)))
        elif not re.search(r"\s", source.strip()):
            found.append(("spark", source.strip().replace("`", "")))
    return tuple(dict.fromkeys(found))


def dataset_name(uri: str) -> tuple[str, str]:
    """Returns the namespace and name of a file, as OpenLineage's naming has them, without a user and credentials."""
    if not store.is_url(uri):
        return "file", store.normalize(uri)
    scheme, _, path = uri.partition("://")
    authority, _, name = path.partition("/")
    if not scheme.startswith(("abfs", "wasb")):
        # There the name of a container precedes the @, elsewhere a user and a password.
        authority = authority.rpartition("@")[2]
    return f"{'s3' if scheme == 's3a' else scheme}://{authority}", _QUERY.sub("", name) or "/"
