"""`SparkConnectEngine`: agents as the tasks of one barrier stage, launched through a Spark Connect server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankzero.engines.base import Engine
from rankzero.engines.connect.client import (
    CONNECT_SERVER_TIMEOUT,
    DEFAULT_PORT,
    ServerUrl,
    connect,
    require_client,
    require_server,
    require_version,
)
from rankzero.engines.connect.session import ConnectSession
from rankzero.errors import InvalidJobError
from rankzero.host.network import without_brackets
from rankzero.job import Job

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession

    from rankzero.run.directory import RunDirectory


@dataclass(frozen=True)
class SparkConnectEngine(Engine):
    """Runs the ranks as one barrier stage of the cluster behind a Spark Connect server. Needs no Java on this machine.

    The launches of one user share a session of the server, so all but the first find Python processes and
    zygotes running on the executors.

    Attributes:
        url: ``sc://host:port``, with the parameters that a client needs: ``sc://host:443/;use_ssl=true;token=...``.
        session: A SparkSession of Spark Connect in this process, which is used instead and left running.

    Raises:
        InvalidJobError: both or none were given, the URL has another form, or the session is of another kind.

    Example:
        >>> from rankzero import SparkConnectEngine
        >>> SparkConnectEngine("sc://head:15002")
        SparkConnectEngine('sc://head:15002')
    """

    url: str | None = None
    session: SparkSession | None = None
    has_tables = True

    def __post_init__(self) -> None:
        if (self.url is None) == (self.session is None):
            raise InvalidJobError('give the URL of a server, SparkConnectEngine("sc://host:port"), or session= alone')
        if self.session is not None and not is_connect_session(self.session):
            raise InvalidJobError(
                f"session is a {type(self.session).__module__}.{type(self.session).__name__}; a SparkSession of Spark "
                "Connect is needed: give a classic one to SparkEngine(session=...)"
            )
        if self.url is not None:
            ServerUrl.parse(self.url)

    def __repr__(self) -> str:
        return f"SparkConnectEngine({str(self._server)!r})" if self.url else "SparkConnectEngine(session=...)"

    @property
    def _server(self) -> ServerUrl:
        if self.session is not None:
            return ServerUrl(without_brackets(self.session.client.host), DEFAULT_PORT)
        return ServerUrl.parse(self.url)

    def check(self, job: Job) -> None:
        """Refuses a URL at which no server listens, and a client without its packages."""
        require_client()
        if self.url is not None:
            require_server(self._server)

    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns host and port, which may be shown, and the whole URL, whose parameters may hold a token."""
        private = {"url": self.url, "conf": dict(self._server.parameters) if self.url else {}}
        return {"kind": "spark-connect", "server": str(self._server)}, private

    def can_host_driver(self, run: RunDirectory, job: Job) -> bool:
        """Returns True for a run that outlives its caller, on a path, which all executors may see.

        Tables and queries are computed by the session of the submitter's process, so a run with those is driven there.
        """
        return job.owner is None and not job.queries and not run.is_remote

    def open(self, job: Job, env: Mapping[str, str]) -> ConnectSession:
        """Connects, and checks the server's slots and resources."""
        session = self.session
        if session is None:
            # Gives up before the driver does, whose error would have no details.
            session = connect(self._server, max(0.0, job.start_timeout - CONNECT_SERVER_TIMEOUT()))
        else:
            require_version(str(session.version), str(self._server))
        opened = ConnectSession(session, self._server, job, owned=self.session is None)
        try:
            opened.check()
        except BaseException:
            opened.close()
            raise
        return opened


def is_connect_session(session: Any) -> bool:
    """Returns True for a SparkSession of Spark Connect. Imports no package."""
    # In this order: the attribute ``client`` of a classic session raises an error other than AttributeError.
    return not hasattr(session, "_jsparkSession") and hasattr(session, "client")
