"""The client of a Spark Connect server: pyspark's own, in a session that earlier launches have warmed."""

from __future__ import annotations

import importlib.util
import logging
import time
import uuid
from typing import Any

from rankzero import bounds
from rankzero.engines.connect.server import ServerUrl
from rankzero.engines.spark.errors import first_lines
from rankzero.errors import LOST, EngineError
from rankzero.host.network import first_reachable

logger = logging.getLogger(__name__)

FIRST_RETRIES = 3
"""Retries of the first request, which take 1 s, for a server that has just started to accept connections."""

RETRIES = 8
MAX_BACKOFF = 2000
"""Most milliseconds between two of the `RETRIES` of a request. They take 11 s in all, less than agents wait for their
driver (15 s). By default, pyspark retries a dead server for ten minutes."""

STAGE_RETRIES = 210
"""Retries for a stage whose agents report to the driver directly: 7 minutes, as long as a server keeps a stage without
its client."""

OLDEST = (3, 5)
"""The first version of Spark whose Connect server runs barrier stages."""

_PACKAGES = ("pyspark", "grpc", "grpc_status", "google.rpc", "pandas", "pyarrow")
# The id of a session that the server has ended cannot be used again.
_ENDED = ("SESSION_CLOSED", "SESSION_CHANGED")


def require_client() -> None:
    """Raises EngineError if packages are missing. Imports none of them."""
    missing = [name for name in _PACKAGES if not _is_there(name)]
    if missing:
        raise EngineError(
            f"a client of Spark Connect needs {', '.join(missing)}: install rankzero[connect], or pyspark[connect]"
        )


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def require_server(url: ServerUrl, timeout: float = 0.0) -> None:
    """Raises EngineError if no server accepts a connection within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not first_reachable([url.host], url.port, bounds.CONNECT_SERVER_TIMEOUT):
        if time.monotonic() >= deadline:
            raise EngineError(
                f"no Spark Connect server answers at {url}: start it (start-connect-server.sh), or correct the host "
                "and port",
                cause=LOST,
            )
        time.sleep(bounds.CONNECT_SERVER_POLL_INTERVAL)


def connect(url: ServerUrl, timeout: float) -> Any:
    """Returns a session of the server. Closing its ``client`` leaves the session to the next launch.

    Args:
        url: The address of the server.
        timeout: Seconds to wait for the server, which may have been restarted since the run was submitted.

    Raises:
        EngineError: there is no server, it is of another kind or too old, or it refuses this user.
    """
    require_client()
    require_server(url, timeout)
    from pyspark.sql.connect.session import SparkSession

    for session_id in (url.shared_session(), str(uuid.uuid4())):
        session = SparkSession(url.in_session(session_id))
        limit_retries(session.client, FIRST_RETRIES)
        try:
            require_version(str(session.version), str(url))
            limit_retries(session.client, RETRIES)
            return session
        except Exception as error:
            session.client.close()
            if isinstance(error, EngineError):
                raise
            if not any(words in str(error) for words in _ENDED):
                raise EngineError(
                    f"{url} does not answer as a Spark Connect server: {first_lines(str(error))}"
                ) from error
            logger.info("the session %s of %s has ended; a new one is used", session_id, url)
            ended = error
    raise EngineError(f"{url} refuses the session: {first_lines(str(ended))}; remove session_id from the URL")


def require_version(version: str, place: str) -> None:
    """Raises EngineError if a server of this Spark cannot run barrier stages."""
    major, minor = (int(part) if part.isdecimal() else 0 for part in [*version.split("."), "0"][:2])
    if (major, minor) < OLDEST:
        raise EngineError(f"{place} runs Spark {version}; barrier stages of Spark Connect need 3.5 or newer")


def limit_retries(client: Any, count: int) -> None:
    """Limits the retries of each request after a broken connection, including requests under way."""
    # In Spark 3.5 the policy is fixed once the client exists.
    for policy in client.get_retry_policies() if hasattr(client, "get_retry_policies") else ():
        policy.max_retries, policy.max_backoff = count, MAX_BACKOFF


def settings_of(session: Any, names: list[str]) -> dict[str, str]:
    """Returns those of the settings that the server has, with one request."""
    found = session.client.get_config_with_defaults(*((name, None) for name in names))
    return {name: value for name, value in zip(names, found, strict=True) if value is not None}
