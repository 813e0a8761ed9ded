"""`ChannelClient`: the agent's interface to the channel. None of its methods but `close` blocks.

Standard library only: this module travels to executors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rankzero import bounds
from rankzero.channel.exchange import ChannelClosed, Exchange
from rankzero.channel.frames import Message
from rankzero.channel.keeper import Keeper
from rankzero.channel.session import BULK, CONTROL, LOGS, message_body

CHANNEL_JOIN_MARGIN = bounds.stretched(0.5)  # Beyond its timeout that `close` waits for a thread in a name lookup

__all__ = ["ChannelClient", "ChannelClosed"]


class ChannelClient:
    """An agent's session with the driver; one thread of its own does all the work.

    Example:
        >>> client = ChannelClient(["localhost", "127.0.0.1"], 40400, secret="00" * 32, task=0)
        >>> client.start()
        >>> client.queue({"type": "join"})
        >>> client.receive()  # no message yet: `fileno` becomes readable when one has arrived
        []
        >>> client.close(timeout=0.0)
    """

    def __init__(
        self,
        hosts: Sequence[str],
        port: int,
        secret: str,
        task: int,
        connect_timeout: float | None = None,
        certificate: bytes | None = None,
        driver_lives: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepares the client; `start` begins to connect.

        Args:
            hosts: Names and addresses of the driver, the likeliest first.
            port: The driver's port.
            secret: The run's secret, hex.
            task: This agent's number.
            connect_timeout: Seconds from its start to find the driver; None for `bounds.AGENT_CONNECT_TIMEOUT`.
            certificate: The driver's certificate as DER, if the connection is encrypted.
            driver_lives: Returns True while the kernel of this host reports that the driver's process lives: then a
                driver that sends nothing is paused, not lost.
        """
        self._exchange = Exchange()
        connect_timeout = connect_timeout or bounds.AGENT_CONNECT_TIMEOUT()
        keeper = Keeper(self._exchange, hosts, port, secret, task, connect_timeout, certificate, driver_lives)
        self._thread = threading.Thread(target=keeper.run, name=f"rankzero-channel-{task}", daemon=True)

    def start(self) -> None:
        """Starts the thread, which searches for the driver, and returns immediately."""
        self._thread.start()

    def fileno(self) -> int:
        """Returns a descriptor, always the same, that is readable whenever `receive` returns messages or raises."""
        return self._exchange.readable.fileno()

    def receive(self) -> list[Message]:
        """Returns all messages that have arrived, perhaps none. Does not block.

        Raises:
            ChannelClosed: The channel is closed or the driver is lost, for the reason given, and every message that
                arrived before has been returned.
        """
        return self._exchange.collect()

    def queue(self, message: Message, *, bulk: bool = False) -> None:
        """Sends a message as soon as the driver can be reached. Does not block.

        Any thread may call this, but no signal handler: it may have interrupted another call, which has the lock.

        Args:
            message: A JSON object with a ``type``.
            bulk: True for a message that may wait behind others, such as log lines.

        Raises:
            FrameError: It is too large, or its type is one that the channel synthesizes.
        """
        if bulk:
            self._exchange.queue_bulk(LOGS, message_body(BULK, message))
        else:
            self._exchange.queue(message_body(CONTROL, message))
        self._exchange.wake()

    def send_file(self, name: str, path: str, then: Message) -> None:
        """Streams a file to the driver, after earlier files, and then sends a message.

        Args:
            name: The name that the driver gives to the file, without a path.
            path: The local file. If it cannot be read, the driver receives the error instead.
            then: The message that follows its last byte.

        Raises:
            FrameError: The message is too large, or its type is one that the channel synthesizes.
        """
        message_body(CONTROL, then)
        self._exchange.add_upload(name, path, then)
        self._exchange.wake()

    def fetch(self, name: str, path: str) -> None:
        """Requests a file that the driver offers.

        A message ``{"type": "fetched", "name", "path"}`` reports its end. With ``"error"`` in place of ``"path"``
        there is no file.

        Args:
            name: The driver's name for the file.
            path: The path to which its content is written as it arrives.
        """
        self._exchange.add_fetch(name, path)
        self._exchange.wake()

    @property
    def bulk_bytes(self) -> int:
        """Bytes of queued bulk messages that the driver has not acknowledged."""
        return self._exchange.session.bulk_bytes

    @property
    def unaccepted(self) -> int:
        """Bytes of bulk messages and files that were sent and that the driver has not accepted."""
        return self._exchange.session.unaccepted

    def close(self, timeout: float) -> None:
        """Delivers queued messages and files, then ends the thread. Does not raise.

        Args:
            timeout: Seconds to wait for the driver's acknowledgement.
        """
        self._exchange.close_within(timeout)
        if self._thread.ident is not None:
            self._thread.join(timeout + CHANNEL_JOIN_MARGIN())
        self._exchange.close()
