"""`Server`: the driver's end of the channel, in the driver's own event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from rankzero import bounds, store
from rankzero.channel.connection import CHUNK, LINE_LIMIT, READ_SIZE, ChannelError, Connection, Limits, write_all
from rankzero.channel.messages import Bye, Message, MessageError, Ping
from rankzero.host.network import BACKLOG
from rankzero.threads import ActionThread, reply_of

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


class Server:
    """Listens for the agents of one attempt.

    Attributes:
        received: The size of each file that arrived, or a text that says why it did not, by its path.
    """

    def __init__(
        self,
        secret: str,
        receiver: Receiver,
        *,
        served: Mapping[str, str] | None = None,
        digests: Mapping[str, str] | None = None,
        directory: str = ".",
        tls: ssl.SSLContext | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Prepares the server; `start` runs it.

        Args:
            secret: The attempt's secret, hex.
            receiver: Receives the messages.
            served: Locations of the files that agents may fetch, by name.
            digests: Digests of those that ranks execute, which agents compare.
            directory: Local directory for the files that agents send.
            tls: Context for encrypted connections; None for plain ones.
            limits: Time limits; None for the usual ones.
        """
        self._secret = secret
        self._receiver = receiver
        self._served = served if served is not None else {}
        self._digests = dict(digests or {})
        self._directory = directory
        self._tls = tls
        self._limits = limits or Limits()
        self._server: asyncio.Server | None = None
        self._agents: dict[int, Connection] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self.received: dict[str, int | str] = {}

    async def start(self, listener: socket.socket) -> int:
        """Accepts connections at a socket that `rankzero.host.network.listen` has made; returns its port."""
        timeout = self._limits.handshake if self._tls else None
        self._server = await asyncio.start_server(
            self._accept, sock=listener, limit=READ_SIZE, backlog=BACKLOG, ssl=self._tls, ssl_handshake_timeout=timeout
        )
        self._sweeper = asyncio.create_task(self._sweep())
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
            self._sweeper.cancel()
        for connection in self._agents.values():
            connection.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=LAST_READ_TIMEOUT())

    async def _sweep(self) -> None:
        """Sends signs of life, and disconnects agents that send none.

        This process may have stood still, under a debugger or on a starved host, and could not read what had arrived.
        Then all agents have their whole time again.
        """
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._limits.ping)
            now = time.monotonic()
            for connection in list(self._agents.values()):
                if now - before > 2 * self._limits.ping:
                    connection.received_at = now
                if connection.is_silent(now):
                    connection.abort(f"nothing was received from it for {now - connection.received_at:.0f} s")
                connection.send(Ping())

    # -- a connection --------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        connection = Connection(reader, writer, self._limits)
        try:
            async with asyncio.timeout(self._limits.handshake):
                await connection.admit(self._secret, self._digests)
            words = (await connection.read_line(self._limits.handshake)).split(" ")
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
        why: str | None = "its connection was closed"
        try:
            async for message, local_rank in connection.messages(self._receiver.room):
                if isinstance(message, Bye):
                    why = None
                    break
                self._receiver.on_message(task, local_rank, message)
        except (OSError, MessageError) as error:
            why = str(error) or type(error).__name__
        except Exception as error:
            logger.exception("the driver failed on a message of the agent of task %d", task)
            why = f"the driver failed on a message of it: {type(error).__name__}: {error}"
        finally:
            del self._agents[task]
            self._receiver.on_end(task, why and (connection.reason or why))

    async def _give(self, name: str, connection: Connection) -> None:
        """Sends a file that agents may fetch. Its store may hang, so it is read in a thread."""
        thread = ActionThread("rankzero-files")
        try:
            location = self._served[name]
            size = await reply_of(thread.submit(partial(store.size, location)))
            file = await reply_of(thread.submit(partial(store.open_read, location)))
        except KeyError:
            connection.write(b"no such file is offered\n")
        # Drivers of object stores raise exceptions of their own types. The agent receives any of them as text.
        except Exception as error:
            connection.write(_answer(f"{location}: {type(error).__name__}: {error}"))
        else:
            connection.write(b"ok %d\n" % size)
            try:
                await connection.send_file(size, lambda: reply_of(thread.submit(partial(file.read, CHUNK))))
                await connection.drain()
            finally:
                thread.submit(file.close)
        finally:
            thread.end()

    async def _take(self, name: str, size: int, connection: Connection) -> None:
        """Receives a file. Its disk may hang or be full, so it is written in a thread."""
        path = os.path.join(self._directory, f"{UPLOAD}{name}")
        if not name or name.startswith(".") or os.sep in name or "\0" in name or size < 0:
            raise ChannelError(f"{name!r} is no plain file name, or {size} no size")
        thread, problem = ActionThread("rankzero-files"), "the driver has ended"
        try:
            connection.write(b"ok\n")
            file = await reply_of(thread.submit(lambda: open(path, "wb", buffering=0)))
            try:
                await connection.receive_file(size, lambda data: reply_of(thread.submit(lambda: write_all(file, data))))
            finally:
                # A file server may report a full disk only now.
                await reply_of(thread.submit(file.close))
            problem = ""
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            self.received[path] = problem or size
            if problem:
                thread.submit(partial(os.unlink, path))
            thread.end()
        connection.write(_answer(problem or "ok"))


def _answer(text: str) -> bytes:
    return text.encode()[: LINE_LIMIT - 1].replace(b"\n", b" ") + b"\n"
