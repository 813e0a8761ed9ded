"""`Server`: the driver's end of the channel, in the driver's own event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankzero import bounds, store
from rankzero.channel import connection as connections
from rankzero.channel.connection import READ_SIZE, ChannelError, Connection
from rankzero.channel.messages import Bye, Message, MessageError
from rankzero.host.network import BACKLOG
from rankzero.threads import in_thread, reply_of

if TYPE_CHECKING:
    import ssl

LAST_READ_TIMEOUT = bounds.stretched(2.0)  # For the driver to read what ended agents sent, if a network is cut

UPLOAD = ".upload-"
"""Beginning of the name of a file that an agent sends; the rest is the name that the agent gives to it."""

logger = logging.getLogger(__name__)


@dataclass
class Server:
    """Listens for the agents of one attempt.

    Attributes:
        secret: The attempt's secret, hex.
        on_message: Receives each message, with the task of the agent, and the local rank of a rank that has sent it.
        on_end: Called when an agent's connection has ended: with the reason, or with None if it said goodbye.
        served: Locations of the files that agents may fetch, by name.
        digests: Digests of those that ranks execute, which agents compare.
        directory: Local directory for the files that agents send.
        tls: Context for encrypted connections; None for plain ones.
        agents: The connections of agents, by task.
    """

    secret: str
    on_message: Callable[[int, int | None, Message], None]
    on_end: Callable[[int, str | None], None]
    served: Mapping[str, str]
    digests: dict[str, str]
    directory: str
    tls: ssl.SSLContext | None = None
    _server: asyncio.Server | None = None
    agents: dict[int, Connection] = field(default_factory=dict)
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, listener: socket.socket) -> int:
        """Accepts connections at a socket that `rankzero.host.network.listen` has made; returns its port."""
        timeout = connections.HANDSHAKE_TIMEOUT() if self.tls else None
        self._server = await asyncio.start_server(
            self._accept, sock=listener, limit=READ_SIZE, backlog=BACKLOG, ssl=self.tls, ssl_handshake_timeout=timeout
        )
        return int(listener.getsockname()[1])

    def send(self, task: int, message: Message) -> None:
        """Sends a message to an agent, if it is connected."""
        if connection := self.agents.get(task):
            connection.send(message)

    def broadcast(self, message: Message) -> None:
        """Sends a message to every agent that is connected."""
        for connection in self.agents.values():
            connection.send(message)

    async def read_rest(self) -> None:
        """Waits until the agents have disconnected, whose processes have ended; briefly, if a network is cut."""
        if self._connections:
            await asyncio.wait(self._connections, timeout=LAST_READ_TIMEOUT())

    async def close(self) -> None:
        """Ends all connections, and accepts no more."""
        if self._server:
            self._server.close()
        for task in self._connections:
            # Which closes its connection, after everything that was written.
            task.cancel()
        await self.read_rest()

    # -- a connection --------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        connection = Connection(reader, writer)
        try:
            async with asyncio.timeout(connections.HANDSHAKE_TIMEOUT()):
                await connection.admit(self.secret, self.digests)
                words = (await connection.read_line(connections.HANDSHAKE_TIMEOUT())).split(" ")
            match words:
                case ["AGENT", number]:
                    await self._serve_agent(int(number), connection)
                case ["GET", name]:
                    await self._give(name, connection)
                case ["PUT", name, size]:
                    await self._take(name, int(size), connection)
                case _:
                    raise ChannelError(f"no request: {words}")
        # Drivers of object stores raise exceptions of their own types; `close` cancels.
        except (Exception, asyncio.CancelledError) as error:
            logger.debug("channel: a connection ended: %s: %s", type(error).__name__, error)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve_agent(self, task: int, connection: Connection) -> None:
        if task in self.agents:
            connection.write(b"another agent serves this task\n")
            return
        connection.write(b"ok\n")
        self.agents[task] = connection
        keeper = asyncio.create_task(connection.keep("it"))
        why: str | None = "its connection was closed"
        try:
            async for message, local_rank in connection.messages():
                if isinstance(message, Bye):
                    why = None
                    break
                self.on_message(task, local_rank, message)
        except (OSError, MessageError) as error:
            why = str(error) or type(error).__name__
        except Exception as error:
            logger.exception("the driver failed on a message of the agent of task %d", task)
            why = f"the driver failed on a message of it: {type(error).__name__}: {error}"
        finally:
            keeper.cancel()
            del self.agents[task]
            self.on_end(task, why and (connection.reason or why))

    async def _give(self, name: str, connection: Connection) -> None:
        """Sends a file that agents may fetch. Its store may hang, so a thread opens it."""
        location = self.served.get(name)
        if location is None:
            connection.write(b"no such file is offered\n")
            return
        try:
            opened = in_thread(lambda: (store.size(location), store.open_read(location)), "rankzero-files")
            size, file = await reply_of(opened, at_once=0)
        # Drivers of object stores raise exceptions of their own types. The agent receives any of them as text.
        except Exception as error:
            connection.write(_answer(f"{location}: {type(error).__name__}: {error}"))
            return
        connection.write(b"ok %d\n" % size)
        await connection.send_file(file, size)

    async def _take(self, name: str, size: int, connection: Connection) -> None:
        """Receives a file of an agent, which gets the error if it cannot be written."""
        path = os.path.join(self.directory, f"{UPLOAD}{name}")
        if not name or name.startswith(".") or os.sep in name or "\0" in name or size < 0:
            raise ChannelError(f"{name!r} is no plain file name, or {size} no size")
        connection.write(b"ok\n")
        try:
            await connection.receive_file(path, size)
        except OSError as error:
            connection.write(_answer(f"{type(error).__name__}: {error}"))
        else:
            connection.write(b"ok\n")


def _answer(text: str) -> bytes:
    return text.encode().replace(b"\n", b" ") + b"\n"
