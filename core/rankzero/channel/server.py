"""The driver's end of the channel: one thread, one asyncio loop, any number of agents.

A peer that does not prove the secret in time is dropped and has no effect on the others.
Messages are handed to ``on_message(task, message)`` in the server's thread, in order per agent.
File content goes both ways in chunks: agents fetch what `serve` offers, and what they upload
lands in `upload_directory` under the name it is announced with.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rankzero import store
from rankzero.channel import auth, frames
from rankzero.channel.frames import Decoder, FrameError, Message, Sealer

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT = 10.0
"""Seconds a new connection has to prove the secret."""

CLOSE_TIMEOUT = 5.0
"""Seconds to end the server's thread."""

LOST = "lost"
"""Type of the message that the server makes up when an agent's connection ends."""


class ChannelServer:
    """Listens for the agents of one attempt."""

    def __init__(
        self,
        secret: str,
        bind_host: str,
        on_message: Callable[[int, Message], None],
        *,
        served: dict[str, str] | None = None,
        upload_directory: str = ".",
    ) -> None:
        """Prepares the server; `start` opens the port.

        Args:
            secret: The run's secret, hex.
            bind_host: Address to bind; the port is chosen by the system.
            on_message: Called in the server's thread for every message of an agent.
            served: Name to location of the files that agents may fetch.
            upload_directory: Local directory that receives uploads.
        """
        self._secret = secret
        self._bind_host = bind_host
        self._on_message = on_message
        self._served = served or {}
        self._upload_directory = upload_directory
        self._loop = asyncio.new_event_loop()
        self._connections: dict[int, _Connection] = {}
        self._thread = threading.Thread(target=self._run_loop, name="rankzero-channel", daemon=True)
        self._stopped = threading.Event()

    def start(self) -> int:
        """Opens the port, starts the thread, returns the port."""
        infos = socket.getaddrinfo(self._bind_host, 0, type=socket.SOCK_STREAM)
        listener = socket.socket(infos[0][0], socket.SOCK_STREAM)
        listener.bind((self._bind_host, 0))
        listener.listen(1024)
        listener.setblocking(False)
        port = int(listener.getsockname()[1])
        self._listener = listener
        self._thread.start()
        return port

    def send(self, task: int, message: Message) -> None:
        """Queues a message for one agent; a lost agent is ignored. From any thread."""
        self._loop.call_soon_threadsafe(self._send, task, message)

    def broadcast(self, message: Message) -> None:
        """Queues a message for every connected agent. From any thread."""
        self._loop.call_soon_threadsafe(self._broadcast, message)

    def close(self) -> None:
        """Closes every connection and ends the thread, within `CLOSE_TIMEOUT`."""
        if not self._thread.ident:
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._stopped.wait(CLOSE_TIMEOUT)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            server = self._loop.run_until_complete(
                asyncio.start_server(self._accept, sock=self._listener, limit=frames.CHUNK * 2)
            )
            self._loop.run_forever()
            server.close()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()
            self._stopped.set()

    def _send(self, task: int, message: Message) -> None:
        if connection := self._connections.get(task):
            connection.write(message)

    def _broadcast(self, message: Message) -> None:
        for connection in self._connections.values():
            connection.write(message)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = -1
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                connection = await self._handshake(reader, writer)
            task = connection.task
            if task in self._connections:
                raise FrameError(f"agent {task} is connected already")
            self._connections[task] = connection
            await self._serve(connection)
        except asyncio.CancelledError:
            logger.debug("channel: closed while a connection was open")
        except (FrameError, TimeoutError, OSError) as error:
            level = logging.WARNING if task < 0 else logging.DEBUG
            logger.log(level, "channel: dropped a connection: %s", error or type(error).__name__)
        finally:
            writer.close()
            if task >= 0 and self._connections.get(task) is connection:
                del self._connections[task]
                self._on_message(task, {"type": LOST})

    async def _handshake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Connection:
        driver_nonce = auth.new_nonce()
        writer.write(frames.encode({"type": "challenge", "nonce": driver_nonce}))
        connection = _Connection(reader, writer)
        answer = await connection.read()
        if not isinstance(answer, dict) or answer["type"] != "answer":
            raise FrameError("the peer did not answer the challenge")
        agent_nonce, task = answer.get("nonce"), answer.get("task")
        if not isinstance(agent_nonce, str) or type(task) is not int or task < 0:
            raise FrameError("the answer to the challenge is malformed")
        expected = auth.proof(self._secret, auth.TO_DRIVER, driver_nonce, agent_nonce, task)
        auth.check(expected, answer)
        welcome = auth.proof(self._secret, auth.TO_AGENT, driver_nonce, agent_nonce, task)
        writer.write(frames.encode({"type": "welcome", "proof": welcome}))
        connection.trust(task, *auth.sealers(self._secret, driver_nonce, agent_nonce))
        return connection

    async def _serve(self, connection: _Connection) -> None:
        while True:
            message = await connection.read()
            if isinstance(message, bytes):
                raise FrameError("file content that was not announced")
            if message["type"] == "fetch":
                await self._send_file(connection, str(message.get("name")))
            elif message["type"] == "upload":
                message = await self._receive_file(connection, message)
                self._on_message(connection.task, message)
            else:
                self._on_message(connection.task, message)

    async def _send_file(self, connection: _Connection, name: str) -> None:
        location = self._served.get(name)
        if location is None:
            connection.write({"type": "file", "name": name, "error": "no such file is offered"})
            return
        try:
            size = store.size(location)
        except OSError as error:
            connection.write({"type": "file", "name": name, "error": f"{location}: {error}"})
            return
        connection.write({"type": "file", "name": name, "size": size})
        try:
            with store.open_read(location) as file:
                while chunk := file.read(frames.CHUNK):
                    connection.write(chunk)
                    await connection.writer.drain()
        except OSError as error:
            raise FrameError(f"{location} cannot be read: {error}") from None

    async def _receive_file(self, connection: _Connection, message: Message) -> Message:
        """Writes an announced upload beside its final name; the driver renames it when it commits."""
        size, name = message.get("size"), message.get("name")
        if type(size) is not int or not isinstance(name, str) or os.path.basename(name) != name:
            raise FrameError("a malformed upload")
        path = Path(self._upload_directory) / f".upload-{connection.task}-{name}"
        digest = hashlib.sha256()
        problem: OSError | None = None
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open(path, "wb", buffering=0))
            except OSError as error:
                problem = error
            while size > 0:
                chunk = await connection.read()
                if not isinstance(chunk, bytes) or len(chunk) > size:
                    raise FrameError("an upload was cut short or is too long")
                digest.update(chunk)
                size -= len(chunk)
                # After a full disk the rest is still taken off the wire: the channel must go on.
                if problem is None:
                    try:
                        written = 0
                        while written < len(chunk):
                            written += file.write(chunk[written:])
                    except OSError as error:
                        problem = error
        if problem is not None:
            return {**message, "type": "uploaded", "path": None, "error": str(problem)}
        return {**message, "type": "uploaded", "path": str(path), "sha256": digest.hexdigest()}


class _Connection:
    """One agent's socket: whole frames in, sealed frames out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._decoder = Decoder()
        self._frames: Iterator[Any] = iter(self._decoder)
        self._sealer: Sealer | None = None
        self.task = -1

    def trust(self, task: int, incoming: Sealer, outgoing: Sealer) -> None:
        self.task = task
        self._sealer = outgoing
        self._decoder.trust(incoming)

    async def read(self) -> Message | bytes:
        while True:
            for frame in self._decoder:
                return frame
            data = await self._reader.read(frames.CHUNK)
            if not data:
                raise ConnectionResetError("the peer closed the connection")
            self._decoder.feed(data)

    def write(self, frame: Message | bytes) -> None:
        self.writer.write(frames.encode(frame, self._sealer))
