"""The agent's end of the channel: what the agent's own thread calls, none of which blocks.

Standard library only: this module travels to executors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rankzero.channel import limits
from rankzero.channel.agent_end.exchange import ChannelClosed, Exchange
from rankzero.channel.agent_end.keeper import Keeper
from rankzero.channel.frames import Message
from rankzero.channel.session import BULK, CONTROL, LOGS, message_body

__all__ = ["ChannelClient", "ChannelClosed"]


class ChannelClient:
    """An agent's session with the driver; one thread of its own does all the work.

    Example:
        >>> client = ChannelClient(["localhost", "127.0.0.1"], 40400, secret="00" * 32, task=0)
        >>> client.start()
        >>> client.queue({"type": "join"})
        >>> client.receive()  # nothing yet: `fileno` becomes readable when there is
        []
        >>> client.close(timeout=0.0)
    """

    def __init__(
        self,
        hosts: Sequence[str],
        port: int,
        secret: str,
        task: int,
        patience: float | None = None,
        certificate: bytes | None = None,
        driver_lives: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepares the client; `start` begins to connect.

        Args:
            hosts: Names and addresses under which the driver may be reached, the likeliest first.
            port: The driver's port.
            secret: The run's secret, hex.
            task: This agent's number.
            patience: Seconds from its start to find the driver; None for `limits.CONNECT_TIMEOUT`.
            certificate: The driver's, as DER, if the connection is encrypted.
            driver_lives: True while the kernel of this host says that the driver's process lives, so that its silence
                is a pause and no loss.
        """
        self._exchange = Exchange()
        patience = patience or limits.CONNECT_TIMEOUT
        keeper = Keeper(self._exchange, hosts, port, secret, task, patience, certificate, driver_lives)
        self._thread = threading.Thread(target=keeper.run, name=f"rankzero-channel-{task}", daemon=True)

    def start(self) -> None:
        """Starts the thread, which looks for the driver. Returns at once."""
        self._thread.start()

    def fileno(self) -> int:
        """A descriptor, always the same, that is readable whenever `receive` has something to say."""
        return self._exchange.readable.fileno()

    def receive(self) -> list[Message]:
        """All messages that have arrived, perhaps none; never blocks.

        Raises:
            ChannelClosed: The driver is lost for good, for the reason given, and everything that
                arrived before has been given out.
        """
        return self._exchange.collect()

    def queue(self, message: Message, *, bulk: bool = False) -> None:
        """Sends a message as soon as the driver can be reached. Never blocks.

        From any thread, but not from a signal handler: it may have interrupted this very call.

        Args:
            message: A JSON object with a ``type``.
            bulk: True for what may wait behind other messages, such as log lines.

        Raises:
            FrameError: It is too large, or its type is one that the channel synthesizes.
        """
        if bulk:
            self._exchange.queue_bulk(LOGS, message_body(BULK, message))
        else:
            self._exchange.queue(message_body(CONTROL, message))
        self._exchange.wake()

    def send_file(self, name: str, path: str, then: Message, like: str = "") -> None:
        """Streams a file to the driver, one after the other, and then sends a message.

        Args:
            name: What the driver is to call it: a plain file name.
            path: The local file. If it cannot be read, the driver hears why instead.
            then: The message that follows its last byte.
            like: A digest (`rankzero.values.digest`), of whose algorithm the driver's shall be.

        Raises:
            FrameError: The message is too large, or its type is one that the channel synthesizes.
        """
        message_body(CONTROL, then)
        self._exchange.add_upload(name, path, then, like)
        self._exchange.wake()

    def fetch(self, name: str, path: str) -> None:
        """Asks the driver for a file that it offers.

        Ends with a message ``{"type": "fetched", "name", "path"}``, or with ``"error"`` in place of
        ``"path"``; then there is no file.

        Args:
            name: What the driver calls it.
            path: Where it goes; written as it comes.
        """
        self._exchange.add_fetch(name, path)
        self._exchange.wake()

    @property
    def bulk_bytes(self) -> int:
        """Bytes of bulk messages that were queued and that the driver has not acknowledged."""
        return self._exchange.session.bulk_bytes

    @property
    def unaccepted(self) -> int:
        """Bytes of bulk messages and files that were sent, and that the driver has not accepted."""
        return self._exchange.session.unaccepted

    def close(self, timeout: float) -> None:
        """Delivers what is queued, files too, and ends the thread. Never raises.

        Args:
            timeout: Seconds until what the driver has not acknowledged is given up.
        """
        self._exchange.close_within(timeout)
        if self._thread.ident is not None:
            self._thread.join(timeout + limits.JOIN_TIMEOUT)
        self._exchange.close()
