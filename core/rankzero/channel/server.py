"""`Server`: the driver's end of the channel, in the driver's own event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rankzero import bounds, store
from rankzero.channel import connection as connections
from rankzero.channel.connection import LINE_LIMIT, READ_SIZE, ChannelError, Connection
from rankzero.channel.messages import Bye, Message, MessageError
from rankzero.host.network import BACKLOG
from rankzero.threads import in_thread, reply_of

if TYPE_CHECKING:
    import ssl

LAST_READ_TIMEOUT = bounds.stretched(2.0)  # For the driver to read what ended agents sent, if a network is cut

UPLOAD = ".upload-"
"""Beginning of the name of a file that an agent sends; the rest is the name that the agent gives to it."""

logger = logging.getLogger(__name__)


class Receiver(Protocol):
    """The driver, as the channel calls it, always in the event loop."""

    def on_message(self, task: int, local_rank: int | None, message: Message) -> None:
        """Applies a message of an agent or of one of its ranks."""

    def on_end(self, task: int, why: str | None) -> None:
        """Notes that an agent's connection has ended: for this reason, or as agreed if there is none."""

    async def room(self) -> None:
        """Waits while the driver cannot take more lines of ranks."""


@dataclass
class Server:
    """Listens for the agents of one attempt.

    Attributes:
        secret: The attempt's secret, hex.
        receiver: Receives the messages.
        served: Locations of the files that agents may fetch, by name.
        digests: Digests of those that ranks execute, which agents compare.
        directory: Local directory for the files that agents send.
        tls: Context for encrypted connections; None for plain ones.
        received: The size of each file that arrived, or a text that says why it did not, by its path.
    """

    secret: str
    receiver: Receiver
    served: Mapping[str, str]
    digests: dict[str, str]
    directory: str
    tls: ssl.SSLContext | None = None
    received: dict[str, int | str] = field(default_factory=dict)
    _server: asyncio.Server | None = None
    _agents: dict[int, Connection] = field(default_factory=dict)
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
        if connection := self._agents.get(task):
            connection.send(message)

    def broadcast(self, message: Message) -> None:
        """Sends a message to every agent that is connected."""
        for connection in self._agents.values():
            connection.send(message)

    @property
    def connected(self) -> set[int]:
        """The tasks whose agents are connected."""
        return set(self._agents)

    def silent(self, seconds: float) -> set[int]:
        """Returns the tasks whose agents have sent nothing for so long."""
        now = time.monotonic()
        return {task for task, connection in self._agents.items() if now - connection.received_at >= seconds}

    async def read_rest(self) -> None:
        """Waits until the agents have disconnected, whose processes have ended; briefly, if a network is cut."""
        if self._connections:
            await asyncio.wait(self._connections, timeout=LAST_READ_TIMEOUT())

    async def close(self) -> None:
        """Ends all connections, and accepts no more."""
        if self._server:
            self._server.close()
        for connection in self._agents.values():
            connection.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=LAST_READ_TIMEOUT())

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
        # Drivers of object stores raise exceptions of their own types.
        except Exception as error:
            logger.debug("channel: a connection ended: %s: %s", type(error).__name__, error)
        except asyncio.CancelledError:
            # By `close`. The task itself is not awaited.
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve_agent(self, task: int, connection: Connection) -> None:
        if task in self._agents:
            connection.write(b"another agent serves this task\n")
            return
        connection.write(b"ok\n")
        self._agents[task] = connection
        keeper = asyncio.create_task(connection.keep("it"))
        why: str | None = "its connection was closed"
        try:
            async for message, local_rank in connection.messages(self.receiver.room):
                if isinstance(message, Bye):
                    why = None
                    break
                self.receiver.on_message(task, local_rank, message)
        except (OSError, MessageError) as error:
            why = str(error) or type(error).__name__
        except Exception as error:
            logger.exception("the driver failed on a message of the agent of task %d", task)
            why = f"the driver failed on a message of it: {type(error).__name__}: {error}"
        finally:
            keeper.cancel()
            del self._agents[task]
            self.receiver.on_end(task, why and (connection.reason or why))

    async def _give(self, name: str, connection: Connection) -> None:
        """Sends a file that agents may fetch. Its store may hang, so a thread opens it."""
        location = self.served.get(name)
        if location is None:
            connection.write(b"no such file is offered\n")
            return
        try:
            opened = in_thread(lambda: (store.size(location), store.open_read(location)), "rankzero-files")
            size, file = await reply_of(opened)
        # Drivers of object stores raise exceptions of their own types. The agent receives any of them as text.
        except Exception as error:
            connection.write(_answer(f"{location}: {type(error).__name__}: {error}"))
            return
        connection.write(b"ok %d\n" % size)
        await connection.send_file(file, size)
        await connection.drain()

    async def _take(self, name: str, size: int, connection: Connection) -> None:
        """Receives a file of an agent, and notes whether it is there."""
        path = os.path.join(self.directory, f"{UPLOAD}{name}")
        if not name or name.startswith(".") or os.sep in name or "\0" in name or size < 0:
            raise ChannelError(f"{name!r} is no plain file name, or {size} no size")
        connection.write(b"ok\n")
        problem = "the driver has ended"
        try:
            await connection.receive_file(path, size)
            problem = ""
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            self.received[path] = problem or size
        connection.write(_answer(problem or "ok"))


def _answer(text: str) -> bytes:
    return text.encode()[: LINE_LIMIT - 1].replace(b"\n", b" ") + b"\n"
