"""The states of an attempt, and the loop that follows them.

An attempt is in one state at a time. A state has a method for a message of an agent (`State.on`), one for the passing
of time (`State.tick`), and one for an error (`State.fail`); each returns the next state, which may be the same. The
column "phase" is what `status.json` shows. "Verdict" is the result of `rankzero.driver.ending.judge`.

===============  =================  ===========================================  ===============  =====================
State            Phase              Event                                        Next state       Effect
===============  =================  ===========================================  ===============  =====================
Opening          opening            the session is open                          WaitingForSlots  keeps the session
Opening          opening            the session is open, the job has queries     Reading          keeps the session
Opening          opening            no reply until the deadline                  error
Reading          opening            the tables are computed                      WaitingForSlots  renews the deadline
WaitingForSlots  waiting for slots  enough slots are reserved                    Placed
WaitingForSlots  waiting for slots  too few slots                                WaitingForSlots  polls again
WaitingForSlots  waiting for slots  too few slots at the deadline                error
Starting         starting           the last agent joins                         Starting         sends Assign
Starting         starting           rank 0 binds the rendezvous                  Starting         sends Go
Starting         starting           the last rank is ready                       Running          records the start
Starting         starting           the verdict is an error                      Leaving          sends Stop
Starting         starting           a rank is not ready at the deadline          Leaving          sends Stop
Starting         starting           the run must end                             Leaving          sends Stop
Running          running            every rank has finished                      Recording        writes the success
Running          running            the verdict is an error                      Leaving          sends Stop
Running          running            the run must end                             Leaving          sends Stop
Running          running            the run takes longer than its timeout        Leaving          sends Stop
Running          running            no rank makes progress                       Leaving          sends Stop
Recording        ending             the record is durable                        Leaving          sends End
Recording        ending             the run must end                             Leaving          sends End
Leaving          ending             every rank is over                           Leaving          sends End
Leaving          ending             an agent joins after an error                Leaving          sends Stop to it
Leaving          ending             the agents have ended                        Storing
Leaving          ending             the deadline                                 Storing          cancels the agents
Leaving          ending             an agent is lost                             Storing          cancels the agents
Leaving          ending             the run must end after its success           Leaving          sends Stop
Storing          ending             everything is stored after a success         Final            aborts uploads
Storing          ending             everything is stored after an error          Final            deletes the rest
===============  =================  ===========================================  ===============  =====================

An error before the agents start ends the attempt without further states.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar, TypeVar

from rankzero import bounds
from rankzero.driver.recorder import Recorder
from rankzero.driver.watch import Mailbox, Received

S = TypeVar("S", bound="State")


class State:
    """A state of an attempt, which decides about the next one."""

    phase: ClassVar[str]

    @property
    def pause(self) -> float:
        """The seconds from a tick to the next one if no message arrives."""
        return bounds.TICK

    def on(self, received: Received) -> State:
        """Handles a message of an agent; returns the next state."""
        return self

    def tick(self, now: float) -> State:
        """Polls other threads and applies the time limits; returns the next state.

        A new state ticks immediately, later after each batch of messages and every `pause` seconds.
        """
        return self

    def fail(self, error: BaseException) -> State:
        """Handles an error that `on` or `tick` has raised; returns the next state or raises the error."""
        raise error


def follow(state: State, last: type[S], mailbox: Mailbox, recorder: Recorder) -> S:
    """Follows the states of an attempt until a state of the class ``last``, which is returned.

    Args:
        state: The first state.
        last: The class of the last state.
        mailbox: The messages and wake-ups of the attempt.
        recorder: Records the phase.
    """
    pause = 0.0
    while not isinstance(state, last):
        recorder.note_phase(state.phase)
        before, state = state, step(state, mailbox, pause)
        # Messages that arrived before a state has ended are received before the next one judges.
        pause = state.pause if state is before else 0.0
    return state


def step(state: State, mailbox: Mailbox, pause: float, clock: Callable[[], float] = time.monotonic) -> State:
    """Returns the state after the messages that have arrived, and one tick.

    Args:
        state: The current state.
        mailbox: The messages and wake-ups of the attempt.
        pause: Seconds to wait for the first of them.
        clock: Returns the monotonic time.
    """
    try:
        began = clock()
        # Many agents may have sent messages meanwhile: one tick after all of them is enough.
        for received in mailbox.receive(pause):
            state = state.on(received)
        if clock() - began >= pause + bounds.TICK:
            # This process stood still: no time limit may end before its channel has read what came meanwhile.
            until = clock() + bounds.TICK
            while (left := until - clock()) > 0:
                for received in mailbox.receive(left):
                    state = state.on(received)
        return state.tick(clock())
    except BaseException as error:
        return state.fail(error)
