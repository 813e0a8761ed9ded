"""`ServerUrl`: the address of a Spark Connect server, and which of its sessions a launch uses."""

from __future__ import annotations

import os
import re
import time
import uuid
from dataclasses import dataclass
from urllib.parse import quote, unquote

from rankzero import bounds
from rankzero.errors import InvalidJobError
from rankzero.host.network import without_brackets

DEFAULT_PORT = 15002

# Matches up to the first part that may hold a token.
_HARMLESS = re.compile(r"(\w+://)?[^:;?@/\s]*(:\d{1,5}(?![^/;?]))?")
_URL = re.compile(r"sc://(\[[0-9A-Fa-f:.%]+\]|[^\s:/;\[\]]+)(?::(\d{1,5}))?/?((?:;[^;=\s]+=[^;]*)*);?")


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
        known = (str(self), self.parameters, user, int(time.time() // bounds.CONNECT_SESSION_WINDOW))
        return str(uuid.uuid5(uuid.NAMESPACE_URL, f"rankzero {known}"))
