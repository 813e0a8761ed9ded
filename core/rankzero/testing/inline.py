"""`run_inline`: a training of one rank in this thread, where breakpoints work and coverage counts."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rankzero.channel import messages
from rankzero.run.checkpoints import Manifest
from rankzero.train import context
from rankzero.train.parts import Parts
from rankzero.train.writer import CheckpointWriter

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
    # This process keeps it open, so that the rank does not have to guess a free port.
    rendezvous: list[Any] = [dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)]  # type: ignore[attr-defined]
    variables = {
        **dict(env or {}),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(rendezvous[0].port),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1"),
        **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"), "0"),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"inline-{secrets.token_hex(4)}",
    }
    metrics: list[dict[str, Any]] = []

    def note(row: str) -> None:
        reported, when = json.loads(row)
        metrics.append({"rank": 0, "time": when, **reported})

    before = context._session
    try:
        writer = _writer(home.name)
        if checkpoint is not None:
            writer.write(checkpoint, {}, time.time(), sharded=False)
            writer.finish()
        with patch.dict(os.environ, variables):
            world = context.TrainContext(0, 1, 0, 1, run_id="inline", backend="gloo", storage_path=home.name)
            session = context._session = context._Session(world, note, writer, scratch=home.name)
            value = train(*args, **dict(kwargs or {}))
            for function in session.at_return:
                function()
            writer.finish()
        is_over = True
    finally:
        context._session = before
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()
        rendezvous.clear()
        if not is_over:
            # The exception's traceback would keep it.
            home.cleanup()
    return InlineRun(session.result if value is None else value, metrics, writer.last, home)


def _writer(home: str) -> CheckpointWriter:
    """Returns a writer in a directory, whose checkpoints count as soon as they are written."""

    def send(message: messages.Message) -> None:
        if isinstance(message, messages.Part):
            manifest = Manifest.of_parts(home, 0, 1, {0: vars(message)})
            writer.committed(manifest.for_ranks([0]))
        elif isinstance(message, messages.Lost):
            writer.on_message(message)

    start = messages.Start(run_directory=home, run_token="", shared=True, scratch=home)
    writer = CheckpointWriter(Parts(start, str), 0, 0, 1, send)
    return writer
