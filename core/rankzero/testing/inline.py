"""`run_inline`: a training of one rank in this thread, where breakpoints work and coverage counts."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from rankzero import bounds
from rankzero.channel import messages
from rankzero.driver.commits import Committer
from rankzero.job import CheckpointConfig
from rankzero.run.checkpoints import Manifest
from rankzero.run.directory import RunDirectory
from rankzero.train import context, parts, writer
from rankzero.train.tables import RankTables

if TYPE_CHECKING:
    from rankzero.train.checkpoint import Checkpoint

HOST = "127.0.0.1"


@dataclass(frozen=True)
class InlineRun:
    """Result of a training function under `run_inline`.

    Attributes:
        value: The object that the function returned, or gave to `rankzero.train.set_result`.
        metrics: A row for each report: ``rank``, ``time`` and the metrics.
        checkpoint: Last checkpoint that was reported, as a new attempt would get it; None if there is none.
    """

    value: Any
    metrics: list[dict[str, Any]]
    checkpoint: Checkpoint | None = field(default=None, repr=False)
    _home: Any = field(default=None, repr=False, compare=False)


def run_inline(
    train: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    checkpoint: object = None,
    env: Mapping[str, str] | None = None,
) -> InlineRun:
    """Calls a training function in this thread, as the only rank of a run.

    Nothing is pickled, and exceptions are raised unchanged, so breakpoints work and coverage counts the lines. The
    rank runs on the CPU, with gloo. The environment of this process and `rankzero.train` are restored afterwards. A
    test that needs several ranks runs ``Launcher(2).run(train)``.

    Args:
        train: The function.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
        checkpoint: Checkpoint that `rankzero.train.get_checkpoint` returns: a directory or a dict, as for
            `rankzero.train.report`.
        env: Environment variables for the rank.

    Returns:
        An `InlineRun`.

    Raises:
        Exception: the exception that the function raised.

    Example:
        >>> import torch
        >>> import rankzero.train as rt
        >>> from rankzero.testing import run_inline
        >>> def train(lr: float) -> float:
        ...     rt.report({"loss": lr}, checkpoint={"weight": torch.ones(1)})
        ...     return lr * 2
        >>> run = run_inline(train, (0.5,))
        >>> run.value, run.metrics[0]["loss"], run.checkpoint.load()["weight"]
        (1.0, 0.5, tensor([1.]))
    """
    import torch.distributed as dist

    home = tempfile.TemporaryDirectory(prefix="rankzero-inline-", ignore_cleanup_errors=True)
    had_group, is_over = dist.is_initialized(), False
    # This process keeps the store open, so that the rank does not have to guess a free port.
    store: list[Any] = [dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)]  # type: ignore[attr-defined]
    variables = {
        **dict(env or {}),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store[0].port),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1"),
        **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"), "0"),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"inline-{secrets.token_hex(4)}",
    }
    try:
        seeded = _seed(home.name, checkpoint) if checkpoint is not None else None
        with _environment(variables):
            value, metrics, last = _call(home.name, seeded, lambda: train(*args, **dict(kwargs or {})))
        is_over = True
    finally:
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()
        store.clear()
        if not is_over:
            # The exception's traceback would keep it.
            home.cleanup()
    return InlineRun(value, metrics, last, home)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _call(
    home: str, seeded: Manifest | None, train: Callable[[], Any]
) -> tuple[Any, list[dict[str, Any]], Checkpoint | None]:
    """Returns the function's value, the rows of its reports and its last checkpoint."""
    metrics: list[dict[str, Any]] = []

    def note(row: str) -> None:
        reported, when = json.loads(row)
        metrics.append({"rank": 0, "time": when, **reported})

    with _checkpoints(home, 1) as (checkpoints, files):
        if seeded:
            checkpoints.committed(seeded.for_ranks([0]))
        world = context.TrainContext(0, 1, 0, 1, run_id="inline", backend="gloo", storage_path=home)
        before = context._session
        session = context.install(world, note, checkpoints, files, None, home)
        try:
            value = train()
            for function in session.at_return:
                function()
            checkpoints.finish()
        finally:
            context._session = before
    # Behind the last commit.
    return session.result if value is None else value, metrics, checkpoints.last


def _seed(home: str, state: object) -> Manifest:
    """Commits a checkpoint for the rank to start from; returns its manifest. Raises as `rankzero.train.report`."""
    committed: list[Manifest] = []
    with _checkpoints(home, 0, committed.append) as (checkpoints, _):
        checkpoints.write(state, {}, time.time(), RankTables(), sharded=False)
        checkpoints.finish()
    return committed[-1]


@contextlib.contextmanager
def _checkpoints(
    home: str, attempt: int, on_commit: Callable[[Manifest], None] = lambda _: None
) -> Iterator[tuple[writer.CheckpointWriter, parts.Parts]]:
    """Yields the writer of the rank; the driver's part of a commit happens in this process, too."""
    committer = Committer(RunDirectory(home), attempt, 1, CheckpointConfig(), 0)
    files = parts.Parts(messages.Start(run_directory=home, run_token="", shared=True, scratch=home), _no_fetch)

    def on_message(message: messages.Message) -> None:
        if isinstance(message, messages.PartFailed):
            checkpoints.on_message(messages.NotCommitted(message.index))
        if not isinstance(message, messages.Part):
            return
        index, commit = message.index, committer.add(0, message.facts())
        assert commit is not None, "one rank has all parts of a checkpoint"

        def on_end(commit: Future[Manifest]) -> None:
            if commit.exception():
                checkpoints.on_message(messages.NotCommitted(index))
                return
            on_commit(commit.result())
            checkpoints.committed(commit.result().for_ranks([0]))

        commit.add_done_callback(on_end)

    checkpoints = writer.CheckpointWriter(files, attempt, 0, 1, on_message)
    try:
        yield checkpoints, files
    finally:
        committer.close(bounds.INLINE_COMMIT_TIMEOUT)


def _no_fetch(name: str) -> NoReturn:
    raise FileNotFoundError(f"{name}: an inline run has no driver to fetch from")
