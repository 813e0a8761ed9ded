"""`ChannelServer`: the driver's end of the channel, with one thread, one asyncio loop and any number of agents.

A peer that does not prove the secret in time is dropped, without any effect on others. An agent's session outlives its
connections: messages to a disconnected agent arrive when it is connected again. One periodic sweep checks the liveness
of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from rankzero import bounds
from rankzero.channel import frames
from rankzero.channel.auth import Hello
from rankzero.channel.frames import FrameError, Message
from rankzero.channel.peer import Connection, OnMessage, Peer
from rankzero.channel.session import CONTROL, message_body
from rankzero.channel.tls import Identity

DISCONNECT_TIMEOUT = bounds.stretched(1.0)  # For agents to receive the server's disconnect

logger = logging.getLogger(__name__)

DISCONNECTED = "disconnected"
"""Type of the message that the server synthesizes when an agent's connection ends or times out."""

RECONNECTED = "reconnected"
"""Type of the message that the server synthesizes when a disconnected agent is connected again."""

LOST = "lost"  # Type of the message that the server synthesizes when an agent is lost without having disconnected


class ChannelServer:
    """Listens for the agents of one attempt."""

    def __init__(
        self,
        secret: str,
        on_message: OnMessage,
        *,
        served: dict[str, str] | None = None,
        upload_directory: str = ".",
        can_take: Callable[[], bool] = lambda: True,
        identity: Identity | None = None,
    ) -> None:
        """Prepares the server; `start` runs it.

        Args:
            secret: The run's secret, hex.
            on_message: Called in the server's thread for every message of an agent, in order.
            served: Locations of the files that agents may fetch, by name.
            upload_directory: Local directory that receives uploads.
            can_take: While it returns False, agents may send no more bulk (logs, uploads) than `frames.BULK_WINDOW`;
                other messages are not delayed.
            identity: Certificate and key for encrypted connections; None for plain ones.
        """
        self._secret = secret
        self._on_message = on_message
        self._served = served or {}
        self._upload_directory = upload_directory
        self._can_take = can_take
        self._identity = identity
        self._loop = asyncio.new_event_loop()
        self._peers: dict[int, Peer] = {}
        self._unproved: dict[Connection, None] = {}
        self._ended = asyncio.Event()
        self._withheld: set[Peer] = set()
        self._is_closing = False
        self._when_alone: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run_loop, name="rankzero-channel", daemon=True)
        self._stopped = threading.Event()
        self.failure: BaseException | None = None
        """The exception that has ended the thread; None while it runs, and after `close`."""
        self._swept = time.monotonic()

    def start(self, listener: socket.socket) -> int:
        """Starts the thread, which accepts connections; returns the port.

        Args:
            listener: A socket that `listen` made. The server closes it at its end.
        """
        self._listener = listener
        port = int(listener.getsockname()[1])
        self._thread.start()
        return port

    def send(self, task: int, message: Message) -> None:
        """Queues a message for one agent, which may be disconnected; ignores a lost one. Any thread may call it."""
        body = message_body(CONTROL, message)
        self._call(lambda: self._queue([peer] if (peer := self._peers.get(task)) else [], body))

    def broadcast(self, message: Message) -> None:
        """Queues a message for every agent that has joined, including disconnected ones. Any thread may call it."""
        body = message_body(CONTROL, message)
        self._call(lambda: self._queue(list(self._peers.values()), body))

    def when_alone(self, act: Callable[[], None]) -> None:
        """Calls ``act`` once what agents that have ended sent is delivered. Any thread may call it.

        That is when no agent is connected, or after `bounds.LAST_READ_TIMEOUT`: one may have lost its network.
        """

        def begin() -> None:
            self._when_alone.append(act)
            self._loop.call_later(bounds.LAST_READ_TIMEOUT(), self._act_alone)
            self._stop_when_alone()

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:
            # The loop is closed: nothing more will be read.
            act()

    def close(self) -> None:
        """Disconnects every agent and ends the thread, within `bounds.CHANNEL_CLOSE_TIMEOUT`."""
        if not self._thread.ident:
            self._loop.close()
            return
        self._call(self._begin_close)
        if threading.current_thread() is not self._thread:
            self._stopped.wait(bounds.CHANNEL_CLOSE_TIMEOUT())

    def _call(self, act: Callable[[], None]) -> None:
        # The loop is closed after the end of the thread.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act)

    @staticmethod
    def _queue(peers: list[Peer], body: bytes) -> None:
        for peer in peers:
            if peer.is_live:
                peer.queue(body)

    # -- the thread ----------------------------------------------------------------------------

    def _run_loop(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        executor = ThreadPoolExecutor(frames.FILE_THREADS, "rankzero-channel-files")
        loop.set_default_executor(executor)
        self._swept = time.monotonic()
        try:
            self._sweep()
            self._acceptor = loop.create_task(self._accept())
            loop.run_until_complete(self._ended.wait())
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        except BaseException as error:
            logger.exception("channel: its thread has failed")
            self.failure = error
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            loop.close()
            self._stopped.set()

    def _begin_close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._acceptor.cancel()
        for connection in list(self._unproved):
            connection.close()
        for peer in self._peers.values():
            if peer.is_live:
                peer.confirm_disconnect()
        self._loop.call_later(DISCONNECT_TIMEOUT(), self._ended.set)
        self._stop_when_alone()

    def _stop_when_alone(self) -> None:
        if any(peer.connection for peer in self._peers.values()):
            return
        self._act_alone()
        if self._is_closing:
            self._ended.set()

    def _act_alone(self) -> None:
        while self._when_alone:
            self._when_alone.pop()()

    async def _accept(self) -> NoReturn:
        with self._listener:
            while True:
                await self._await_caller()
                # Many agents connect in the same moment: accept all that are waiting.
                while await self._accept_one():
                    pass

    async def _accept_one(self) -> bool:
        """Accepts the next connection; returns False if none is waiting."""
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            logger.warning("channel: cannot accept a connection: %s", error)
            await asyncio.sleep(bounds.POLL_INTERVAL)
            return False
        accepted.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(lambda: Connection(self, self._secret, self._identity), accepted)
        except OSError:
            accepted.close()
        return True

    async def _await_caller(self) -> None:
        # loop.sock_accept loses a connection that arrives at the moment of its cancellation.
        called = asyncio.Event()
        self._loop.add_reader(self._listener, called.set)
        try:
            await called.wait()
        finally:
            self._loop.remove_reader(self._listener)

    def _sweep(self) -> None:
        self._loop.call_later(bounds.PING_INTERVAL / 4, self._sweep)
        now = time.monotonic()
        self._forgive(now - self._swept - bounds.PING_INTERVAL / 4)
        self._swept = now
        for connection in list(self._unproved):
            if now - connection.made >= bounds.HANDSHAKE_TIMEOUT():
                connection.drop("it did not prove the secret in time")
        for peer in list(self._peers.values()):
            if peer.connection is not None:
                if now - peer.received_at >= bounds.CONNECTION_SILENCE():
                    peer.connection.drop(f"agent {peer.task} sent nothing for {bounds.CONNECTION_SILENCE():g} s")
                elif now - peer.pinged >= bounds.PING_INTERVAL:
                    peer.pinged = now
                    peer.session.ping()
                    peer.pump()
            elif peer.is_live and now - peer.received_at >= bounds.CONNECTION_LOST_AFTER():
                self.lose(peer, f"nothing was received from agent {peer.task} for {bounds.CONNECTION_LOST_AFTER():g} s")

    def _forgive(self, pause: float) -> None:
        """Extends all time-outs by a pause of this process itself, which was stopped or did not get the GIL."""
        if pause < bounds.PING_INTERVAL:
            return
        now = time.monotonic()
        for connection in self._unproved:
            connection.made = min(now, connection.made + pause)
        for peer in self._peers.values():
            peer.received_at = min(now, peer.received_at + pause)

    # -- what connections and peers need -------------------------------------------------------

    def on_made(self, connection: Connection) -> None:
        """Registers a new connection, which has not proved the secret."""
        self._unproved[connection] = None

    def admit(self, connection: Connection, hello: Hello) -> Peer | str:
        """Assigns a connection that has proved the secret to its agent.

        Returns:
            The agent, or the reason why it is refused.

        Raises:
            FrameError: The answer is older than one that was accepted.
        """
        peer = self._peers.get(hello.task)
        if peer is None or peer.name != hello.session:
            if peer is not None and peer.is_live:
                return f"another agent serves task {hello.task}"
            if hello.resume:
                return "its session is not known here"
            peer = Peer(hello.task, hello.session, self._on_message, self._served, self._upload_directory, self._grant)
            self._peers[hello.task] = peer
        if hello.number <= peer.number:
            raise FrameError("an answer that is older than the last")
        if peer.is_lost:
            return "it was given up as lost"
        if not peer.session.can_resume(hello.received):
            self.lose(peer, f"agent {peer.task} broke the channel's rules: it cannot have {hello.received} frames")
            return "its count of received frames is impossible"
        if peer.connection is not None:
            peer.connection.drop(f"agent {peer.task} made a new connection")
            self._disconnect(peer, peer.connection)
        is_back = peer.number >= 0
        peer.number, peer.connection, peer.received_at = hello.number, connection, time.monotonic()
        peer.session.resume(hello.received)
        self._unproved.pop(connection, None)
        if is_back and peer.is_live and not self._is_closing:
            peer.deliver({"type": RECONNECTED, "reason": "the agent made a new connection"})
        return peer

    def lose(self, peer: Peer, reason: str) -> None:
        """Gives an agent up as lost."""
        was_live, peer.is_lost = peer.is_live, True
        if peer.connection is not None:
            peer.connection.drop(reason)
            peer.connection = None
        peer.end()
        self._withheld.discard(peer)
        if was_live and not self._is_closing:
            peer.deliver({"type": LOST, "reason": reason})

    def on_end(self, connection: Connection) -> None:
        """Removes a closed connection."""
        self._unproved.pop(connection, None)
        if connection.peer is not None:
            self._disconnect(connection.peer, connection)
        self._stop_when_alone()

    def _disconnect(self, peer: Peer, connection: Connection) -> None:
        if peer.connection is not connection:
            return
        peer.connection = None
        if peer.is_live and not self._is_closing:
            peer.deliver({"type": DISCONNECTED, "reason": connection.reason})

    def _grant(self, peer: Peer, size: int) -> None:
        """Gives credit for accepted bulk now, or when the driver can take more."""
        if not peer.withheld and self._driver_can_take():
            peer.session.grant(size)
            return
        peer.withheld += size
        if not self._withheld:
            self._loop.call_later(bounds.POLL_INTERVAL_SHORT, self._grant_withheld)
        self._withheld.add(peer)

    def _grant_withheld(self) -> None:
        if not self._driver_can_take():
            self._loop.call_later(bounds.POLL_INTERVAL_SHORT, self._grant_withheld)
            return
        for peer in list(self._withheld):
            peer.session.grant(peer.withheld)
            peer.withheld = 0
            peer.pump()
        self._withheld.clear()

    def _driver_can_take(self) -> bool:
        try:
            return self._can_take()
        except Exception:
            logger.exception("channel: can_take failed")
            return True
