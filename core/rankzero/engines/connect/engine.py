"""`SparkConnectEngine`: agents as the tasks of one barrier stage, launched through a Spark Connect server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankzero.engines.base import Engine
from rankzero.engines.connect.client import REACH_TIMEOUT, connect, require_client, require_server, require_version
from rankzero.engines.connect.server import DEFAULT_PORT, ServerUrl
from rankzero.engines.connect.session import ConnectSession
from rankzero.errors import InvalidJobError
from rankzero.host.network import without_brackets
from rankzero.job import Job

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession


@dataclass(frozen=True)
class SparkConnectEngine(Engine):
    """Runs the ranks as one barrier stage of the cluster behind a Spark Connect server. Needs no Java on this machine.

    The launches of one user share a session of the server, so all but the first find its Python processes, and the
    executors' warm servers, ready.

    Attributes:
        url: ``sc://host:port``, with what a client needs beside that: ``sc://host:443/;use_ssl=true;token=...``.
        session: A SparkSession of Spark Connect in this process, to be used instead and left running.

    Raises:
        InvalidJobError: neither or both, a URL of another form, a session of another kind.

    Example:
        >>> from rankzero import SparkConnectEngine
        >>> SparkConnectEngine("sc://head:15002")
        SparkConnectEngine('sc://head:15002')
    """

    url: str | None = None
    session: SparkSession | None = field(default=None)

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
        """Refuses a server that nothing listens for, and a client without its packages."""
        require_client()
        if self.url is not None:
            require_server(self._server)

    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Host and port may be shown; the parameters of the URL may hold a token."""
        private = {"url": self.url, "conf": dict(self._server.parameters) if self.url else {}}
        return {"kind": "spark-connect", "server": str(self._server)}, private

    @property
    def has_tables(self) -> bool:
        """Always."""
        return True

    @property
    def can_detach(self) -> bool:
        """Not with a session of the caller's process."""
        return self.session is None

    @property
    def prefers_own_process(self) -> bool:
        """The threads of gRPC do not go well with forks of the caller."""
        return self.session is None

    def open(self, job: Job) -> ConnectSession:
        """Connects, and checks what the server says about slots and resources."""
        session = self.session
        if session is None:
            # Its own error says more than that the engine did not answer in time.
            session = connect(self._server, max(0.0, job.start_timeout - REACH_TIMEOUT))
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
    """True for a SparkSession of Spark Connect. Imports nothing."""
    # In this order: a session of the other kind raises what is no AttributeError when it is asked for a client.
    return not hasattr(session, "_jsparkSession") and hasattr(session, "client")
