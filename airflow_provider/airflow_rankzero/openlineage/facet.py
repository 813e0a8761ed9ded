"""`RankZeroRunFacet`: what OpenLineage shows of a run. Import it only where the OpenLineage client is installed."""

from __future__ import annotations

from attrs import define
from openlineage.client.facet_v2 import RunFacet


@define
class RankZeroRunFacet(RunFacet):  # type: ignore[misc]
    """Facts about one run.

    Attributes:
        worldSize: Number of ranks; None before it is known.
        runDirectory: Path or URL of the run directory; None before it is there.
        firstCause: Traceback of the rank that failed first, or what the error says; None without an error.
    """

    worldSize: int | None = None
    runDirectory: str | None = None
    firstCause: str | None = None
