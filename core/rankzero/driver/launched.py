"""The states of an attempt whose agents have been launched; `states` has the table of their transitions."""

from __future__ import annotations

import time

from rankzero import bounds
from rankzero.bounds import STORE_OUTAGE
from rankzero.channel import messages
from rankzero.driver.attempt import Attempt
from rankzero.driver.ending import Verdict
from rankzero.driver.states import State
from rankzero.driver.watch import Received
from rankzero.errors import RunCancelledError

TICK_OF_TRAINING = 0.5  # As `bounds.TICK`, while every rank trains


class _Training(State):
    """The part that Starting and Running share: the attempt may still succeed, and any error stops its agents."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def on(self, received: Received) -> State:
        self._attempt.on(received)
        return self

    def tick(self, now: float) -> State:
        self._attempt.poll()
        if verdict := self._attempt.judge(now):
            return Recording(self._attempt, verdict) if verdict.success else _stopped(self._attempt, verdict)
        self._attempt.check(now)
        return self

    def fail(self, error: BaseException) -> State:
        return _stopped(self._attempt, Verdict(error=error))


class Starting(_Training):
    """The agents join and get their ranks, and the ranks import torch."""

    phase = "starting"

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self._report_at = time.monotonic() + bounds.WAITING_INTERVAL()

    def on(self, received: Received) -> State:
        """Applies the message, which may complete the start."""
        super().on(received)
        return Running(self._attempt) if self._attempt.has_started else self

    def tick(self, now: float) -> State:
        """Applies the time limit of the start."""
        after = super().tick(now)
        if after is self and now > self._attempt.start_deadline:
            raise self._attempt.start_timeout()
        if after is self and now > self._report_at:
            self._report_at = now + bounds.WAITING_INTERVAL()
            self._attempt.report_waiting()
        return after


class Running(_Training):
    """Every rank has started, and calls the user's code."""

    phase = "running"

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        attempt.note_start()

    @property
    def pause(self) -> float:
        """More seconds while every rank trains: each tick takes processor time that the ranks could use."""
        return TICK_OF_TRAINING if self._attempt.is_undisturbed else bounds.TICK

    def tick(self, now: float) -> State:
        """Raises the error of ranks that hang."""
        after = super().tick(now)
        if after is self:
            self._attempt.check_hangs(now)
        return after


def _stopped(attempt: Attempt, verdict: Verdict) -> Leaving:
    """Stops the agents of an attempt that cannot succeed any more."""
    attempt.broadcast(messages.Stop(attempt.job.stop_grace))
    return Leaving(attempt, verdict, attempt.job.stop_grace + bounds.STOP_MARGIN())


class _Ending(State):
    """The part that the last states share: the verdict is known, and success stands whatever fails later."""

    phase = "ending"

    def __init__(self, attempt: Attempt, verdict: Verdict, timeout: float) -> None:
        self._attempt = attempt
        self._verdict = verdict
        self._deadline = time.monotonic() + timeout

    def on(self, received: Received) -> State:
        # Reports of ranks may still complete a checkpoint, and even the training.
        self._attempt.on(received, is_stopping=self._verdict.error is not None)
        return self

    def fail(self, error: BaseException) -> State:
        if self._attempt.facts.success is None:
            raise error
        return Final(Verdict(success=self._attempt.facts.success))


class Recording(_Ending):
    """Success becomes durable first: disconnects and exit handlers take time, and the driver may die meanwhile."""

    def __init__(self, attempt: Attempt, verdict: Verdict) -> None:
        super().__init__(attempt, verdict, STORE_OUTAGE())
        self._recorded = attempt.record(verdict)

    def tick(self, now: float) -> State:
        """Lets the ranks exit once the record is written."""
        self._attempt.poll()
        if not self._recorded.done() and now < self._deadline and not self._attempt.watch.is_called_off():
            return self
        self._attempt.broadcast(messages.End())
        return Leaving(
            self._attempt, self._verdict, self._attempt.job.exit_timeout + bounds.SUCCESS_END_TIMEOUT(), is_patient=True
        )


class Leaving(_Ending):
    """The ranks exit, and the agents deliver what they still have; agents that take too long are cancelled.

    After a success each message about ranks restarts the time-out, since agents may still send lines that waited for a
    slow driver. Samples of hosts do not count: an agent sends them also while the kernel cannot end a rank.
    """

    def __init__(self, attempt: Attempt, verdict: Verdict, timeout: float, *, is_patient: bool = False) -> None:
        super().__init__(attempt, verdict, timeout)
        self._timeout = timeout
        self._is_patient = self._is_released = is_patient

    def on(self, received: Received) -> State:
        """Restarts the time-out, or ends the wait for an agent that is lost."""
        super().on(received)
        if isinstance(received.message, messages.Lost):
            self._deadline, self._is_patient = 0.0, False
        elif self._is_patient and not isinstance(received.message, (messages.Disconnected, messages.Usage)):
            self._deadline = time.monotonic() + self._timeout
        return self

    def tick(self, now: float) -> State:
        """Continues when the agents have ended."""
        attempt = self._attempt
        attempt.poll()
        if not self._is_released and len(attempt.facts.over) >= attempt.facts.num_processes:
            # Ranks that have committed wait for their peers. No rank is left that needs the rest of the grace.
            self._is_released = True
            attempt.broadcast(messages.End())
        if self._is_patient and attempt.watch.is_called_off():
            attempt.broadcast(messages.Stop(attempt.job.stop_grace))
            self._deadline, self._is_patient = now + attempt.job.stop_grace + bounds.STOP_MARGIN(), False
        if not attempt.facts.engine_ended and now < self._deadline:
            return self
        if not attempt.facts.engine_ended:
            attempt.cancel()
        is_cancelled = isinstance(self._verdict.error, RunCancelledError)
        bound = bounds.STOP_MARGIN if is_cancelled else bounds.CHECKPOINT_COMMIT_TIMEOUT
        return Storing(attempt, self._verdict, bound())


class Storing(_Ending):
    """Uploads to the store end, for less time once the run is cancelled; then unfinished ones are deleted."""

    def __init__(self, attempt: Attempt, verdict: Verdict, timeout: float) -> None:
        super().__init__(attempt, verdict, timeout)
        self._is_swept = False
        attempt.committer.release()

    def tick(self, now: float) -> State:
        """Continues when everything that arrived is stored."""
        self._attempt.poll()
        if self._waits(now):
            return self
        if not self._is_swept:
            self._is_swept = True
            # The committer may have stored the value since.
            self._attempt.poll()
            # Only now: until here, a value that was still being stored could have made the attempt a success.
            if self._verdict.error and not self._attempt.facts.success:
                self._attempt.storage.sweep()
            else:
                self._attempt.storage.abort_uploads()
                if self._attempt.committer.dropped:
                    self._attempt.committer.sweep()
            if self._waits(now):
                return self
        committer = self._attempt.committer
        committer.close(0.0 if committer.is_busy else bounds.TICK)
        self._attempt.poll()
        return Final(self._attempt.settled(self._verdict))

    def _waits(self, now: float) -> bool:
        if self._attempt.mailbox.is_empty and not self._attempt.committer.is_busy:
            return False
        if self._attempt.watch.is_called_off():
            self._deadline = min(self._deadline, now + bounds.STOP_MARGIN())
        return now < self._deadline


class Final(State):
    """The attempt has ended."""

    phase = "final"

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
