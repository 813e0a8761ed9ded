"""Creates the engine from its specification in the run directory, or from a session."""

from __future__ import annotations

from typing import Any

from rankzero.engines.base import Engine
from rankzero.errors import InvalidJobError


def engine_from_spec(spec: dict[str, Any], private: dict[str, Any]) -> Engine:
    """Returns the engine that `Engine.to_spec` described. Raises InvalidJobError for an unknown kind."""
    if spec["kind"] == "local":
        from rankzero.engines.local import LocalEngine

        return LocalEngine()
    if spec["kind"] == "spark":
        from rankzero.engines.spark.engine import SparkEngine

        return SparkEngine(master=spec["master"], conf=private["conf"])
    if spec["kind"] == "spark-connect":
        from rankzero.engines.connect.engine import SparkConnectEngine

        return SparkConnectEngine(private["url"])
    raise InvalidJobError(f"unknown engine {spec['kind']!r} in job.json")


def engine_of_session(session: Any) -> Engine:
    """Returns the engine that uses a SparkSession of this process, classic or of Spark Connect."""
    from rankzero.engines.connect.engine import SparkConnectEngine, is_connect_session

    if is_connect_session(session):
        return SparkConnectEngine(session=session)
    from rankzero.engines.spark.engine import SparkEngine

    return SparkEngine(session=session)
