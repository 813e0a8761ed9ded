"""What a stop leaves to a rank: the checkpoints that it had reported are written first."""

import signal
import time
from typing import Any

from rankzero.agent.ranks import Ending, Rank
from rankzero.channel.frames import Message
from rankzero.channel.messages import decode


class Told(Rank):
    """A rank without a process, and what it was sent."""

    def __init__(self) -> None:
        self.alive, self.has_flushed = True, False
        self.outcome = self.begun = None
        self.writing = set[int]()
        self.sent: list[Any] = []

    def tell(self, message: Message) -> None:
        self.sent.append(message.kind)

    def kill(self, number: int) -> None:
        self.sent.append(number)


def test_a_checkpoint_whose_report_was_on_its_way_is_written_first() -> None:
    rank = Told()
    ending = Ending([rank], Any, 30.0, 30.0)
    ending.stop()
    rank.note(decode({"type": "checkpoint-begun", "index": 0}))
    ending.ask_written(time.monotonic())
    rank.note(decode({"type": "flushed"}))
    ending.ask_written(time.monotonic())
    assert rank.sent == ["flush"]
    # Later ones are none of the stop's.
    rank.note(decode({"type": "checkpoint-begun", "index": 1}))
    rank.note(decode({"type": "checkpoint-failed", "index": 0}))
    ending.ask_written(time.monotonic())
    assert rank.sent == ["flush", signal.SIGTERM]
