"""The client of a Spark Connect server: the server's address, a session that is kept warm, and typed errors."""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from rankzero import bounds
from rankzero.engines.spark import stage as spark
from rankzero.errors import LOST, EngineError, InvalidJobError, RankZeroError, require
from rankzero.host.network import first_reachable, without_brackets

CONNECT_SERVER_TIMEOUT = bounds.stretched(10.0)  # For a Spark Connect server to accept a TCP connection
CONNECT_SESSION_WINDOW = 1800.0  # Seconds for which launches share a session, which the server keeps for an unused hour

logger = logging.getLogger(__name__)

RETRIES, MAX_BACKOFF = 8, 2000  # Of a request, and milliseconds between two: 11 s in all, not ten minutes

STAGE_RETRIES = 210  # Once a stage was started: 7 minutes, as long as a server keeps a stage without its client

_PACKAGES = ("pyspark", "grpc", "grpc_status", "pandas", "pyarrow")
# The id of a session that the server has ended cannot be used again.
_ENDED = ("SESSION_CLOSED", "SESSION_CHANGED")

DEFAULT_PORT = 15002

# Matches up to the first part that may hold a token.
_HARMLESS = re.compile(r"(\w+://)?[^:;?@/\s]*(:\d{1,5}(?![^/;?]))?")
_URL = re.compile(r"sc://(\[[0-9A-Fa-f:.%]+\]|[^\s:/;\[\]]+)(?::(\d{1,5}))?/?((?:;[^;=\s]+=[^;]*)*);?")

_SERVER_LOST = (
    r"SESSION_CHANGED|SESSION_CLOSED|SESSION_NOT_FOUND|OPERATION_NOT_FOUND|OPERATION_ABANDONED|OPERATION_ALREADY_EXISTS|"
    r"RESPONSE_ALREADY_RECEIVED|StatusCode\.UNAVAILABLE|failed to connect|Connection refused|Socket closed|GOAWAY|"
    r"NO_ACTIVE_SESSION"
)
UNREACHED = "no driver was found on port"
_INTERRUPTED = r"OPERATION_CANCELED|OPERATION_CANCELLED"


def require_client() -> None:
    """Raises InvalidJobError if packages are missing. Imports none of them."""
    require("a client of Spark Connect needs", "'pyspark[connect]'", *_PACKAGES)


def require_server(url: ServerUrl, timeout: float = 0.0) -> None:
    """Raises EngineError if no server accepts a connection within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not first_reachable([url.host], url.port, CONNECT_SERVER_TIMEOUT()):
        if time.monotonic() >= deadline:
            raise EngineError(
                f"no Spark Connect server answers at {url}: start it (start-connect-server.sh), or correct the host "
                "and port",
                cause=LOST,
                code="RZ-2002",
            )
        time.sleep(bounds.POLL_INTERVAL_LONG)


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
        limit_retries(session.client, RETRIES)
        try:
            require_version(str(session.version), str(url))
            return session
        except Exception as error:
            session.client.close()
            if isinstance(error, EngineError):
                raise
            if not any(words in str(error) for words in _ENDED):
                raise EngineError(
                    f"{url} does not answer as a Spark Connect server: {spark.first_lines(str(error))}"
                ) from error
            logger.info("the session %s of %s has ended; a new one is used", session_id, url)
            ended = error
    raise EngineError(f"{url} refuses the session: {spark.first_lines(str(ended))}; remove session_id from the URL")


def require_version(version: str, place: str) -> None:
    """Raises EngineError if a server of this Spark cannot run barrier stages."""
    major, minor, *_ = (int(part) if part.isdecimal() else 0 for part in [*version.split("."), "0"])
    if (major, minor) < (3, 5):
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


@dataclass(frozen=True)
class ServerUrl:
    """The URL ``sc://host:port/;name=value;...``, as every client of Spark Connect parses it.

    Attributes:
        host: Name or address, without brackets.
        port: TCP port.
        parameters: ``use_ssl``, ``token``, ``user_id``, ``session_id``, or a header of each request. May be secret.
    """

    host: str
    port: int
    parameters: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def parse(url: object) -> ServerUrl:
        """Parses a URL. Raises InvalidJobError, which shows no parameter."""
        found = _URL.fullmatch(url) if isinstance(url, str) else None
        port = int(found[2] or DEFAULT_PORT) if found else 0
        if not found or not 0 < port < 1 << 16:
            shown = _HARMLESS.match(url)[0] if isinstance(url, str) else url  # type: ignore[index]
            raise InvalidJobError(f"{shown!r} is no Spark Connect URL: use sc://host:port/;name=value;...")
        pairs = [pair.split("=", 1) for pair in found[3].split(";") if pair]
        return ServerUrl(without_brackets(found[1]), port, tuple((name, unquote(value)) for name, value in pairs))

    def __str__(self) -> str:
        """Returns the URL without parameters, for display."""
        return f"sc://{self._bracketed}:{self.port}"

    @property
    def _bracketed(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def in_session(self, session_id: str) -> str:
        """Returns the whole URL with the id of a session; an id that the user gave stays."""
        chosen = {"session_id": session_id, **dict(self.parameters)}
        return f"{self}/" + "".join(f";{name}={quote(value)}" for name, value in chosen.items())

    def shared_session(self) -> str:
        """Returns the id of the session that all launches of one user share for a while, on any host.

        In a new session the first job starts a Python daemon on every executor, which takes a second. Later jobs
        reuse the daemon, and take a fifth of that.
        """
        user = os.environ.get("SPARK_USER") or os.environ.get("USER")
        known = (str(self), self.parameters, user, int(time.time() // CONNECT_SESSION_WINDOW))
        return str(uuid.uuid5(uuid.NAMESPACE_URL, f"rankzero {known}"))


def explain(text: str, server: str) -> RankZeroError:
    """Returns the typed error for the text of an exception of a Spark Connect client."""
    if re.search(_INTERRUPTED, text):
        return EngineError(f"the stage was interrupted at {server} from outside of rankzero: {spark.first_lines(text)}")
    if UNREACHED in text:
        found = spark.explain(text)
        return EngineError(
            f"{found}. Executors must reach this host by TCP (ports= for a firewall), or see the run directory: then "
            "the driver of a submitted run, or of a pipeline's step, runs inside the stage",
            cause=LOST,
        )
    if is_server_lost(text):
        return EngineError(
            f"the Spark Connect server {server} has ended, was restarted or cannot be reached: "
            f"{spark.first_lines(text)}",
            cause=LOST,
        )
    return spark.explain(text)


def is_server_lost(text: str) -> bool:
    """Returns True for an exception that shows that the server, or its session, ended or was replaced."""
    return re.search(_SERVER_LOST, text) is not None and "rankzero agent" not in text
