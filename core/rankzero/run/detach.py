"""Who follows a run for a pipeline step, and whether it goes on without them: detached for the next try, or ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from rankzero.bounds import CANCEL_TIMEOUT
from rankzero.errors import RankZeroError
from rankzero.run.handle import RunHandle


class PipelineTry(Protocol):
    """One try of a pipeline step, which answers questions about its orchestrator."""

    @property
    def is_followed_by_another(self) -> bool:
        """True if the orchestrator would start another try by itself, should this process die."""

    @property
    def lease_when_attached(self) -> float | None:
        """Seconds for which a run that this try has attached to outlives it; None: as its submission says."""

    @property
    def retrier(self) -> Mapping[str, Any] | None:
        """The process of this machine that starts the next try (`describe_process`); None where none does alone.

        When it has exited, no try comes any more, and a run that nobody follows ends soon.
        """

    @property
    def generation(self) -> str:
        """Names the chain of tries that the orchestrator starts by itself; a user's doing begins another one.

        In a chain, a change of a module between two tries does not make the training another one.
        """

    def has_accepted(self, receiver: Mapping[str, Any]) -> bool:
        """True if the orchestrator has for good what `RunHandle.offer` offered to this receiver."""

    def repeats(self, receiver: Mapping[str, Any]) -> bool:
        """True if no user stands between this try and that receiver: the orchestrator repeats what had succeeded."""

    def detaches(self, error: BaseException) -> bool:
        """True if the run shall outlive the follower that this interrupts."""


@contextlib.contextmanager
def detaching(
    find: Callable[[], RunHandle[Any] | None], caller: PipelineTry, stop_grace: float, log: Any
) -> Iterator[None]:
    """Around a run that outlives this process: decides about it when its start or its following is interrupted.

    Args:
        find: Gives the run, if there is one by then.
        caller: The step.
        stop_grace: Seconds that the ranks get to end.
        log: The step's.
    """
    try:
        yield
    except RankZeroError:
        # The run's own end, or nothing has begun.
        raise
    except BaseException as error:
        # Found by its name: the interrupt may have come before there was a handle. What cannot be found or cancelled
        # now is ended by its lease.
        for _ in range(_INTERRUPTS):
            try:
                _detach_or_end(find(), caller, error, stop_grace, log)
            except Exception as problem:
                log.warning("the run is left to its lease: %s: %s", type(problem).__name__, problem)
            except BaseException:
                # Once more, by a person without patience, or by a run's process that passes it on to its steps.
                continue
            break
        raise


_INTERRUPTS = 5
"""Times that the end of a run is begun again when it is interrupted."""


def _detach_or_end(
    handle: RunHandle[Any] | None, caller: PipelineTry, error: BaseException, stop_grace: float, log: Any
) -> None:
    if handle is None:
        return
    if caller.detaches(error):
        log.warning("%s; the run in %s goes on for the next try", type(error).__name__, handle.directory)
    else:
        end(handle, stop_grace)


def end(handle: RunHandle[Any], stop_grace: float) -> None:
    """Cancels a run and waits for its end. What cannot be cancelled now is ended by its lease."""
    with contextlib.suppress(OSError, RankZeroError):
        handle.cancel()
        handle.wait(stop_grace + CANCEL_TIMEOUT)
