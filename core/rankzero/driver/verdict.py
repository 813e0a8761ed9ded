"""The errors that an attempt ends with, made from the facts that its driver has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from rankzero import bounds
from rankzero.driver import policy
from rankzero.driver.failure import Failure, failure_message, first_cause, group_others, name_ranks, same_as
from rankzero.errors import EngineError, HangError, RankZeroError, ResultError, StartTimeoutError, WorkerFailedError


def failed(failures: Sequence[Failure], tail: Callable[[int], list[str]], directory: str) -> RankZeroError:
    """Returns the error of an attempt in which ranks failed: the first cause, with its consequences.

    Args:
        failures: The facts about each failed rank.
        tail: Returns the last log lines of a rank, for a rank that could not send them itself.
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
    """Returns the error of an attempt whose agent exited before it was asked to.

    Args:
        task: Text that names the agent's task and host.
        ranks: The agent's ranks.
        why: What the driver observed.
        cause: The cause that decides about a restart, unless the engine has a better one.
        explained: The engine's error, if it has ended.
        failures: The failures that ranks reported meanwhile.
    """
    text = [f"{task} ({name_ranks(ranks)}) was lost: {why}"]
    if explained:
        text.append(str(explained))
        cause = getattr(explained, "cause", None) or cause
    if others := group_others(failures, Failure(rank=-1, host="")):
        text += ["Then failed:", *(f"  {line}" for line in others)]
    return EngineError("\n".join(text), cause=cause)


def hung(bound: float, stacks: Mapping[int, str], directory: str) -> HangError:
    """Returns the error of a run in which no rank made progress for ``bound`` seconds, with the stack of each rank."""
    missing = policy.not_in_collective(stacks)
    message = policy.hang_message(f"no rank made progress for hang_timeout={bound} s", stacks, missing, directory)
    return HangError(message, stacks={str(rank): stack for rank, stack in stacks.items()}, missing=missing)


def left_waiting(returned: Collection[int], stacks: Mapping[int, str], directory: str) -> HangError:
    """Returns the error of ranks that wait in a collective for ranks that have returned, with the stack of each."""
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
    """Returns the error of ranks that did not start within ``bound`` seconds; it names the missing tasks or ranks."""
    if missing_tasks:
        missing = [f"task {task}" for task in missing_tasks]
        text = f"{len(missing)} of {num_tasks} tasks were not started: {', '.join(missing)} (are slots free there?)"
    else:
        # Without missing ranks, only rank 0 is missing, which opens the rendezvous.
        missing = [f"rank {rank}" for rank in missing_ranks] or ["rank 0"]
        text = f"every task was started, but {', '.join(missing)} not (is torch slow to import there?)"
    what = f"the ranks did not start within start_timeout={bound} s: {text}; raise start_timeout if they are only slow"
    return StartTimeoutError(what, missing=missing)


def not_stored(error: object) -> ResultError:
    """Returns the error of a run whose store refused rank 0's value."""
    return ResultError(f"rank 0 returned, but its value could not be stored: {error}")
