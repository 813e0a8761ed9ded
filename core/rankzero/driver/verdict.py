"""The errors that an attempt ends with, made from the facts that its driver has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from rankzero import bounds
from rankzero.driver import policy
from rankzero.driver.failure import Failure, failure_message, first_cause, group_others, name_ranks, same_as
from rankzero.errors import EngineError, HangError, RankZeroError, ResultError, StartTimeoutError, WorkerFailedError


def failed(failures: Sequence[Failure], tail: Callable[[int], list[str]], directory: str) -> RankZeroError:
    """Ranks failed: the first cause, with what it led to.

    Args:
        failures: What is known of each.
        tail: Gives the last lines of a rank, for one that could not deliver them.
        directory: The run directory.
    """
    cause = first_cause(failures)
    if cause.cause == "no-torch":
        return EngineError(cause.message)
    if cause.exception_type == "rankzero.errors.ResultError":
        return ResultError(cause.message)
    others = group_others(failures, cause)
    same = same_as(cause, failures)
    log_tail = list(cause.log_tail) or tail(cause.rank)
    return WorkerFailedError(
        failure_message(cause, same, others, log_tail, directory),
        rank=cause.rank,
        host=cause.host,
        exception_type=cause.exception_type,
        traceback=cause.traceback,
        exit_code=cause.exit_code,
        signal=cause.signal,
        log_tail=log_tail,
        others=([f"{name_ranks(same)}: the same"] if same else []) + others,
        cause=cause.restart_cause,
    )


def lost(
    task: str, ranks: range, why: str, cause: str, explained: RankZeroError | None, failures: Sequence[Failure]
) -> EngineError:
    """An agent has left before it was asked to.

    Args:
        task: Its task and host, in words.
        ranks: Its ranks.
        why: What the driver saw.
        cause: What a restart is decided by, unless the engine knows better.
        explained: What the engine reports, if it has ended.
        failures: What ranks reported meanwhile.
    """
    text = [f"{task} ({name_ranks(ranks)}) was lost: {why}"]
    if explained:
        text.append(str(explained))
        cause = getattr(explained, "cause", None) or cause
    if others := group_others(failures, Failure(rank=-1, host="")):
        text += ["Then failed:", *(f"  {line}" for line in others)]
    return EngineError("\n".join(text), cause=cause)


def hung(bound: float, stacks: Mapping[int, str], directory: str) -> HangError:
    """No rank made progress for ``bound`` seconds; ``stacks`` tells for each where it stood."""
    missing = policy.not_in_collective(stacks)
    message = policy.hang_message(f"no rank made progress for hang_timeout={bound} s", stacks, missing, directory)
    return HangError(message, stacks={str(rank): stack for rank, stack in stacks.items()}, missing=missing)


def left_waiting(returned: Collection[int], stacks: Mapping[int, str], directory: str) -> HangError:
    """Some ranks have returned, and the others wait for them in a collective; ``stacks`` has where each rank is."""
    names = name_ranks(sorted(returned))
    others = name_ranks(sorted(set(stacks) - set(returned)))
    why = (
        f"{names} returned, and {others} waited for {bounds.RETURNED_HANG:g} s in a collective that never ends without "
        f"{names}: a training must call every collective in every rank equally often"
    )
    message = policy.hang_message(why, stacks, sorted(returned), directory)
    return HangError(message, stacks={str(rank): stack for rank, stack in stacks.items()}, missing=sorted(returned))


def start_timeout(
    bound: float, num_tasks: int, missing_tasks: Sequence[int], missing_ranks: Sequence[int]
) -> StartTimeoutError:
    """The ranks had not started after ``bound`` seconds, because of these tasks, or else of these ranks."""
    if missing_tasks:
        missing = [f"task {task}" for task in missing_tasks]
        text = f"{len(missing)} of {num_tasks} tasks were not started: {', '.join(missing)} (are slots free there?)"
    else:
        # Everybody is ready, and rank 0 has not opened the rendezvous.
        missing = [f"rank {rank}" for rank in missing_ranks] or ["rank 0"]
        text = f"every task was started, but {', '.join(missing)} not (is torch slow to import there?)"
    what = f"the ranks did not start within start_timeout={bound} s: {text}; give more time where all is only slow"
    return StartTimeoutError(what, missing=missing)


def not_stored(error: object) -> ResultError:
    """The store does not take rank 0's value."""
    return ResultError(f"rank 0 returned, but its value could not be stored: {error}")
