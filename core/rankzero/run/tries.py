"""Rules for the tries of a pipeline step, which are the same for every orchestrator.

They decide whether a run continues for the next try or ends when its follower is interrupted, for how long it continues
without a follower (its lease), and whether another try can help. Optional work of a step, such as a table of metrics,
is an `attempt`: a failure of it is only logged.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rankzero import bounds, errors
from rankzero.errors import InvalidJobError, RankZeroError, RunCancelledError, RunTimeoutError, WorkerFailedError

if TYPE_CHECKING:
    from rankzero.run.handle import RunHandle

T = TypeVar("T")

_INTERRUPTS = 5  # Number of times that ending a run is tried, since further interrupts may stop it

RETRY_DELAY_MAX = 24 * 3600.0  # Longest delay in seconds between two tries, if the delay grows
SCHEDULING_SLACK = 900.0  # Seconds from when a try is due to its first poll: a pool may be full, a deployment slow
DETACHED_LEASE = 1800.0  # Shortest lease of a run that a service follows, such as a triggerer, which may restart
LAST_LEASE = bounds.scaled(60.0)  # For which a run outlives its last try: longer than a short outage of a store
QUERY_INTERVAL = bounds.scaled(60.0)  # Between two queries whether the orchestrator's run of a training has ended


class PipelineTry(Protocol):
    """A try of a pipeline step, with facts about its orchestrator."""

    @property
    def is_followed_by_another(self) -> bool:
        """True if the orchestrator starts another try by itself when this process dies."""

    @property
    def lease_when_attached(self) -> float | None:
        """Seconds without a follower after which an attached run ends; None keeps the run's lease."""

    @property
    def retrier(self) -> int | None:
        """The id of the only process that starts the next try, if it is on this machine; else None.

        After it has exited there is no further try, so a run without a follower ends soon.
        """

    @property
    def generation(self) -> str:
        """The name of the chain of tries that the orchestrator starts by itself. A user's action starts a new chain."""

    def has_accepted(self, receiver: Mapping[str, Any]) -> bool:
        """Returns True if the orchestrator has durably stored the result that was offered to a receiver."""

    def repeats(self, receiver: Mapping[str, Any]) -> bool:
        """Returns True if the orchestrator, and not a user, repeats the step of this receiver, which had succeeded."""

    def detaches(self, error: BaseException) -> bool:
        """Returns True if the run should outlive its follower, which this error interrupts."""


@contextlib.contextmanager
def detaching(
    find: Callable[[], RunHandle[Any] | None], caller: PipelineTry, stop_grace: float, log: Any
) -> Iterator[None]:
    """Context manager around starting and following a run: detaches the run or ends it when the block is interrupted.

    ``find`` returns the run, or None if it has not been submitted.
    """
    try:
        yield
    except RankZeroError:
        # The run itself failed, or it was not started.
        raise
    except BaseException as error:
        name = type(error).__name__
        for _ in range(_INTERRUPTS):
            try:
                # Found by its name, since the interrupt may have come before there was a handle.
                if (handle := find()) and caller.detaches(error):
                    log.warning("%s; the run in %s continues for the next try", name, handle.directory)
                elif handle:
                    # If it cannot be cancelled now, it ends when its lease expires.
                    with contextlib.suppress(OSError, RankZeroError):
                        handle.cancel(reason=f"its pipeline step was ended by {name}")
                        handle.wait(stop_grace + bounds.CANCEL_TIMEOUT())
                    log.warning("ended the run in %s, whose step was ended by %s", handle.directory, name)
            except Exception as problem:
                log.warning("the run is left to its lease: %s: %s", type(problem).__name__, problem)
            except BaseException:
                # A second interrupt: a user pressed the keys again, or the orchestrator passed the signal on.
                continue
            break
        raise


def longest_delay(base: float, growth: float, bound: float = RETRY_DELAY_MAX) -> float:
    """Returns the longest delay between two tries, which grow from ``base`` by a factor, up to a bound, in seconds."""
    return float(base if growth <= 1 else max(base, min(base * growth, bound) if base else 0.0))


def lease(delay: float, *, unnoticed: float = 0.0, least: float = SCHEDULING_SLACK) -> float:
    """Returns the seconds for which a run continues without a follower.

    Args:
        delay: The longest delay before the next try, in seconds.
        unnoticed: Seconds until the orchestrator notices that a try has died.
        least: Shortest lease to return, in seconds.
    """
    return max(least, unnoticed + delay + SCHEDULING_SLACK)


def power(base: float, exponent: int) -> float:
    """Returns ``base ** exponent``, or infinity if that is too large for a float."""
    try:
        return float(base) ** exponent
    except OverflowError:
        return math.inf


def attempt(log: Any, what: str, action: Callable[[], T], otherwise: T) -> T:
    """Returns the result of an action. If it raises an `Exception`, logs a warning and returns ``otherwise``.

    Args:
        log: Logger of the pipeline step.
        what: The name of the action in the warning, such as "the table of reports".
        action: A function that reads or writes facts about a run whose result is stored.
        otherwise: The value to return if the action raises.
    """
    try:
        return action()
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        log.warning("%s", errors.encodable(f"{what} is left out, which does not affect the training: {why}"))
        return otherwise


def may_retry(error: RankZeroError, *, has_checkpoint: bool, retry_user_errors: bool = True) -> bool:
    """Returns True unless the next try would fail in the same way, or a user cancelled the run.

    Args:
        error: The error of the run.
        has_checkpoint: True if the next try resumes from a checkpoint.
        retry_user_errors: True if exceptions of the training function are retried, like those of other steps.
    """
    if isinstance(error, WorkerFailedError):
        # Without an exception, the rank was killed. With a cause, it lost its peers or requested another attempt.
        return error.exception_type is None or error.cause is not None or retry_user_errors
    if isinstance(error, InvalidJobError):
        # A store that cannot be written may recover; a wrong argument stays wrong.
        return isinstance(error.__cause__, OSError)
    if isinstance(error, RunTimeoutError):
        return has_checkpoint
    return not (isinstance(error, RunCancelledError) and error.requested)
