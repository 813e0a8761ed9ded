"""What a stop leaves to a rank: the checkpoints that it had reported are written first."""

import asyncio
import signal
from typing import Any

from rankzero.agent.ending import Ending
from rankzero.agent.ranks import Rank
from rankzero.channel.messages import Flush, Flushed, Message, PartBegun, PartFailed


class Told(Rank):
    """A rank without a process, and what it was sent."""

    def __init__(self) -> None:
        self.alive, self.has_flushed = True, False
        self.outcome = self.begun = None
        self.writing = set[int]()
        self.sent: list[Any] = []

    def tell(self, message: Message) -> None:
        self.sent.append(message)

    def kill(self, number: int) -> None:
        self.sent.append(number)


def test_a_checkpoint_whose_report_was_on_its_way_is_written_first() -> None:
    async def main() -> None:
        rank = Told()
        ending = Ending([rank], Any, 30.0, 30.0)
        ending.stop()
        rank.note(PartBegun(0))
        ending.ask_written()
        rank.note(Flushed())
        ending.ask_written()
        assert rank.sent == [Flush()]
        # Later ones are none of the stop's.
        rank.note(PartBegun(1))
        rank.note(PartFailed(0))
        ending.ask_written()
        assert rank.sent == [Flush(), signal.SIGTERM]

    asyncio.run(main())
