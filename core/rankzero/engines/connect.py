"""`SparkConnectEngine`: the name is reserved; the engine is not part of this version."""

from __future__ import annotations

from rankzero.errors import InvalidJobError


class SparkConnectEngine:
    """Refuses: Spark Connect is not supported by this version.

    Raises:
        InvalidJobError: always.
    """

    def __init__(self, url: str = "", **_: object) -> None:
        raise InvalidJobError(
            f"Spark Connect ({url or 'sc://...'}) is not supported by this version of rankzero; "
            "use SparkEngine(master=...) or SparkEngine(session=...) with a classic SparkSession"
        )
