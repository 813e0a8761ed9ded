"""Decides whether a run continues for the next try or ends, when the pipeline step that follows it is interrupted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from rankzero.bounds import CANCEL_TIMEOUT
from rankzero.errors import RankZeroError
from rankzero.run.handle import RunHandle


class PipelineTry(Protocol):
    """A try of a pipeline step, with facts about its orchestrator."""

    @property
    def is_followed_by_another(self) -> bool:
        """True if the orchestrator starts another try by itself when this process dies."""

    @property
    def lease_when_attached(self) -> float | None:
        """Seconds for which a run that this try attached to may outlive it; None keeps the lease of its submission."""

    @property
    def retrier(self) -> Mapping[str, Any] | None:
        """The only process that starts the next try (`describe_process`), if it is on this machine; else None.

        After it has exited there is no further try, so a run without a follower ends soon.
        """

    @property
    def generation(self) -> str:
        """The name of the chain of tries that the orchestrator starts by itself. A user's action starts a new chain.

        Within a chain, a training stays the same if one of its modules changes between two tries.
        """

    def has_accepted(self, receiver: Mapping[str, Any]) -> bool:
        """Returns True if the orchestrator has durably stored the result that was offered to a receiver."""

    def repeats(self, receiver: Mapping[str, Any]) -> bool:
        """Returns True if the orchestrator, and not a user, repeats the step of a receiver that had succeeded."""

    def detaches(self, error: BaseException) -> bool:
        """Returns True if the run should outlive its follower, which this error interrupts."""


@contextlib.contextmanager
def detaching(
    find: Callable[[], RunHandle[Any] | None], caller: PipelineTry, stop_grace: float, log: Any
) -> Iterator[None]:
    """Context manager around starting and following a run: detaches the run or ends it when the block is interrupted.

    Args:
        find: Returns the run, or None if it has not been submitted.
        caller: The try of the pipeline step.
        stop_grace: Seconds between SIGTERM and SIGKILL for the ranks.
        log: Logger of the step.
    """
    try:
        yield
    except RankZeroError:
        # The run itself failed, or it was not started.
        raise
    except BaseException as error:
        # The run is found by its name, since the interrupt may have come before there was a handle. A run that cannot
        # be found or cancelled now ends when its lease expires.
        for _ in range(_INTERRUPTS):
            try:
                _detach_or_end(find(), caller, error, stop_grace, log)
            except Exception as problem:
                log.warning("the run is left to its lease: %s: %s", type(problem).__name__, problem)
            except BaseException:
                # A second interrupt: a user pressed the keys again, or the orchestrator passed the signal on.
                continue
            break
        raise


_INTERRUPTS = 5
"""Number of times that ending a run is tried, since further interrupts may stop it."""


def _detach_or_end(
    handle: RunHandle[Any] | None, caller: PipelineTry, error: BaseException, stop_grace: float, log: Any
) -> None:
    if handle is None:
        return
    if caller.detaches(error):
        log.warning("%s; the run in %s continues for the next try", type(error).__name__, handle.directory)
    else:
        end(handle, stop_grace)


def end(handle: RunHandle[Any], stop_grace: float) -> None:
    """Cancels a run and waits for its end. A run that cannot be cancelled now ends when its lease expires."""
    with contextlib.suppress(OSError, RankZeroError):
        handle.cancel()
        handle.wait(stop_grace + CANCEL_TIMEOUT)
