"""One rank of `run_inline`: in the caller's thread, or as a process of its own (``main``)."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn

from rankzero import bounds
from rankzero.channel import messages
from rankzero.driver.commits import Committer
from rankzero.host.processes import die_with_parent
from rankzero.job import CheckpointConfig
from rankzero.run.checkpoints import Manifest
from rankzero.run.directory import RunDirectory
from rankzero.train import context, parts, writer
from rankzero.train.checkpoint import Checkpoint
from rankzero.train.tables import RankTables
from rankzero.worker import failures
from rankzero.worker.call import run_exit_handlers

ATTEMPT = 1
"""Attempt of the ranks; a checkpoint that the caller gave belongs to attempt 0."""


@dataclass
class Outcome:
    """The outcome of a rank: its value, metrics and checkpoint.

    Attributes:
        value: Value that the rank returned.
        metrics: Reported metrics, one row for each report.
        checkpoint: Last checkpoint; only of rank 0.
    """

    value: Any = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: Checkpoint | None = None


def call(rank: int, world_size: int, home: str, seeded: dict[str, Any] | None, train: Callable[[], Any]) -> Outcome:
    """Calls the function as this rank, with `rankzero.train` as it is in a run.

    Args:
        rank: Number of the rank.
        world_size: Number of ranks.
        home: Directory of checkpoints.
        seeded: Manifest of the checkpoint to start from, or None.
        train: The function with its arguments.
    """
    outcome = Outcome()

    def note(row: str) -> None:
        metrics, when = json.loads(row)
        outcome.metrics.append({"rank": rank, "time": when, **metrics})

    files = _files(home)
    with _checkpoints(rank, world_size, files, home, ATTEMPT) as checkpoints:
        if seeded:
            checkpoints.committed(seeded)
        world = context.TrainContext(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            run_id="inline",
            backend="gloo",
            storage_path=home,
        )
        before = context._session
        session = context.install(world, note, checkpoints, files, None, home)
        try:
            value = train()
            for function in session.at_return:
                function()
            checkpoints.finish()
        finally:
            context._session = before
        outcome.value = session.result if value is None else value
    # After the last commit.
    outcome.checkpoint = checkpoints.last
    return outcome


def seed_checkpoint(home: str, state: object) -> dict[str, Any]:
    """Commits a checkpoint for the ranks to start from; its manifest. Raises as `rankzero.train.report`."""
    with _checkpoints(0, 1, _files(home), home, 0) as checkpoints:
        committed: list[dict[str, Any]] = []
        checkpoints.committed = committed.append  # type: ignore[assignment,method-assign]
        checkpoints.write(state, {}, time.time(), RankTables(), sharded=False)
        checkpoints.finish()
    return committed[-1]


@contextlib.contextmanager
def _checkpoints(
    rank: int, world_size: int, files: parts.Parts, home: str, attempt: int
) -> Iterator[writer.CheckpointWriter]:
    """The writer of a rank, and what the driver does of the commit, in this process."""
    run = RunDirectory(home)

    committer = Committer(run, attempt, 1, CheckpointConfig(), 0)

    def on_message(message: messages.Message) -> None:
        if isinstance(message, messages.PartFailed):
            checkpoints.on_message(messages.NotCommitted(message.index))
        if not isinstance(message, messages.Part):
            return
        if message.sharded and world_size > 1:
            raise NotImplementedError("sharded checkpoints of several ranks need a run: Launcher(n).run(train)")
        index, commit = message.index, committer.add(0, message.facts())
        assert commit is not None, "one rank has all parts of a checkpoint"

        def on_end(commit: Future[Manifest]) -> None:
            if commit.exception():
                checkpoints.on_message(messages.NotCommitted(index))
                return
            # By its attribute: `seed_checkpoint` takes the manifest.
            checkpoints.committed(commit.result().for_ranks([rank]))

        commit.add_done_callback(on_end)

    checkpoints = writer.CheckpointWriter(files, attempt, rank, world_size, on_message)
    if rank:
        # No driver tells this process when rank 0's checkpoints are committed.
        checkpoints.on_message(messages.NotCommitted(messages.NEVER))
    try:
        yield checkpoints
    finally:
        committer.close(bounds.INLINE_PEER_TIMEOUT)


def _files(home: str) -> parts.Parts:
    return parts.Parts(messages.Start(run_directory=home, run_token="", shared=True, scratch=home), _no_fetch)


def _no_fetch(name: str) -> str:
    raise FileNotFoundError(f"{name}: an inline run has no driver to fetch from")


# -- ranks that are processes ---------------------------------------------------------------------


def dump(call: tuple[Any, ...], file: IO[bytes]) -> None:
    """Writes the function and its arguments, by value where this process alone can import it."""
    import cloudpickle

    untyped: Any = cloudpickle
    module = sys.modules.get(getattr(call[0], "__module__", None) or "")
    own = module is not None and module.__name__ != "__main__" and "site-packages" not in (module.__file__ or "")
    if own:
        untyped.register_pickle_by_value(module)
    try:
        untyped.dump(call, file)
    finally:
        if own:
            untyped.unregister_pickle_by_value(module)


def main() -> NoReturn:
    """Entry point of a rank with its own process, which gets its settings on the command line."""
    import cloudpickle

    start = json.loads(sys.argv[1])
    die_with_parent(os.getppid())
    rank, home = start["rank"], start["home"]
    try:
        with open(start["payload"], "rb") as file:
            train, args, kwargs = cloudpickle.load(file)
        outcome = call(rank, start["world_size"], home, start["seeded"], lambda: train(*args, **kwargs))
        outcome.checkpoint = None
        with open(_outcome(home, rank), "wb") as file:
            untyped: Any = cloudpickle
            untyped.dump(outcome, file)
        code = 0
    except BaseException as error:
        facts = {**vars(failures.describe(error)), "rank": rank}
        with open(_failure(home, rank) + ".new", "w") as text:
            json.dump(facts, text)
        os.replace(_failure(home, rank) + ".new", _failure(home, rank))
        traceback.print_exc()
        code = 1
    else:
        # A group that a peer is still making would break: the caller's process says when all have returned.
        sys.stdin.read()
        run_exit_handlers(bounds.INLINE_EXIT_TIMEOUT)
    sys.stdout.flush()
    sys.stderr.flush()
    # As the rank of a run: an interpreter that takes itself down beneath gloo's threads aborts, 4 times in 100.
    os._exit(code)


def read_outcome(home: str, rank: int) -> Outcome:
    """Returns the outcome of a rank that is a process of its own."""
    import cloudpickle

    with open(_outcome(home, rank), "rb") as file:
        found: Outcome = cloudpickle.load(file)
    return found


def read_failure(home: str, rank: int) -> dict[str, Any] | None:
    """Returns the failure of a rank; None if it has not failed."""
    with contextlib.suppress(FileNotFoundError), open(_failure(home, rank)) as file:
        found: dict[str, Any] = json.load(file)
        return found
    return None


def _outcome(home: str, rank: int) -> str:
    return os.path.join(home, f"outcome-{rank}.pkl")


def _failure(home: str, rank: int) -> str:
    return os.path.join(home, f"failure-{rank}.json")
