"""A server, its agents, and a network between them that can be cut and healed."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.faults.kit import Proxy

from rankzero import bounds
from rankzero.channel import connection
from rankzero.channel.connection import Connection, Driver, new_secret
from rankzero.channel.messages import Message, MessageError
from rankzero.channel.server import Server
from rankzero.channel.tls import make_identity
from rankzero.host.network import listen

TIMEOUT = 60.0
PING = 0.1
SILENCE = 2.0


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the time limits of a channel short; a test may call it for others."""

    def limit(*, silence: float = SILENCE, handshake: float = 5.0) -> None:
        monkeypatch.setattr(connection, "PING_INTERVAL", PING)
        monkeypatch.setattr(bounds, "CONNECTION_LOST_AFTER", lambda: silence)
        monkeypatch.setattr(connection, "HANDSHAKE_TIMEOUT", lambda: handshake)
        monkeypatch.setattr(connection, "CONNECT_TIMEOUT", lambda: handshake)

    limit()
    return limit


@dataclass
class Received:
    """The driver, as the channel calls it."""

    messages: list[tuple[int, int | None, Message]] = field(default_factory=list)
    ended: dict[int, str | None] = field(default_factory=dict)

    def on_message(self, task: int, local_rank: int | None, message: Message) -> None:
        self.messages.append((task, local_rank, message))

    def on_end(self, task: int, why: str | None) -> None:
        self.ended[task] = why


async def until(condition: Any) -> None:
    """Waits until a condition holds."""
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.01)


def is_dead() -> bool:
    return False


@dataclass
class Agent:
    """The agent's end of a channel: what it received, and why it has ended."""

    driver: Driver
    connection: Connection
    messages: list[Message] = field(default_factory=list)
    ended: str | None = None


class Serving:
    """A running server, what it received, and the agents that were made for it."""

    def __init__(self, directory: Path, identity: Any) -> None:
        self.received = Received()
        self.secret = new_secret()
        self.directory = directory
        self.offered = directory / "offered"
        self.offered.write_bytes(os.urandom((3 << 20) + 3))
        self.identity = identity
        served = {"payload": str(self.offered), "missing": str(directory / "missing"), "long": "/long" * 2000}
        tls = identity[1] if identity else None
        on_message = lambda *message: self.received.on_message(*message)  # noqa: E731 - a test may replace it
        digests = {"payload": "x"}
        self.server = Server(self.secret, on_message, self.received.on_end, served, digests, str(directory), tls)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, host: str = "127.0.0.1") -> None:
        self.host, self.port = host, await self.server.start(listen(host, None))

    def driver(self, *hosts: str, port: int = 0, secret: str = "") -> Driver:
        certificate = self.identity[0] if self.identity else None
        return Driver(list(hosts or [self.host]), port or self.port, secret or self.secret, certificate)

    async def agent(self, task: int = 0, driver: Driver | None = None, *, lives: Any = is_dead) -> Agent:
        """Connects an agent, which reads until its connection ends."""
        driver = driver or self.driver()
        agent = Agent(driver, await driver.find(task, TIMEOUT))

        async def read() -> None:
            why = "closed"
            try:
                async for message, _ in agent.connection.messages():
                    agent.messages.append(message)
            except (OSError, MessageError) as error:
                why = str(error)
            agent.ended = agent.connection.reason or why

        self._tasks += [asyncio.create_task(read()), asyncio.create_task(agent.connection.keep("the driver", lives))]
        return agent

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.server.close()


@contextlib.asynccontextmanager
async def serving(directory: Path, host: str = "127.0.0.1", *, encrypt: bool = False) -> Any:
    """A server on a host."""
    made = Serving(directory, make_identity() if encrypt else None)
    await made.start(host)
    try:
        yield made
    finally:
        await made.close()


@contextlib.asynccontextmanager
async def proxied(serving: Serving) -> AsyncIterator[tuple[Proxy, int]]:
    """A proxy before a server, and its port."""
    file = serving.directory / "port"
    file.write_text(str(serving.port))
    proxy = Proxy(file)
    try:
        yield proxy, proxy.port
    finally:
        proxy.close()
