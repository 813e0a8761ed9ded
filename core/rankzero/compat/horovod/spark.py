"""``horovod.spark``: `run` and `run_elastic` on the active SparkSession."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankzero.compat.horovod import runner
from rankzero.launcher import Launcher

RESETS = 100
"""New attempts without ``reset_limit``. Horovod has no limit, but excludes the host of each failure."""


def run(
    fn: Callable[..., Any],
    args: Any = (),
    kwargs: Any = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    *,
    launcher: Launcher | None = None,
    **options: Any,
) -> list[Any]:
    """Does what `rankzero.compat.horovod.run` does, with the same arguments, on the active SparkSession.

    Raises EngineError if there is neither a ``launcher`` nor an active SparkSession.
    """
    launcher = launcher or runner.on_spark("horovod.spark.run", num_proc)
    return runner.run(fn, args, kwargs, num_proc, start_timeout, launcher=launcher, **options)


def run_elastic(
    fn: Callable[..., Any],
    args: Any = (),
    kwargs: Any = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    *,
    launcher: Launcher | None = None,
    **options: Any,
) -> list[Any]:
    """Runs ``fn`` in an elastic world, whose attempts resume from the last ``state.commit()``, as Horovod's does.

    ``fn`` uses `rankzero.compat.horovod.torch.elastic.run`. An attempt has ``min_num_proc`` to ``max_num_proc`` ranks,
    or ``num_proc``; ``np``, ``min_np`` and ``max_np`` are aliases. ``elastic_timeout`` is ``start_timeout`` for later
    attempts; the longer one of both is used for all. ``reset_limit`` is ``max_restarts``, and counts each end of a rank
    but a value; None: 100. The other arguments, and the errors, are those of `run`.

    Returns:
        The values of all ranks of the last attempt.
    """
    num_proc = options.pop("np", None) if num_proc is None else num_proc
    given = min_num_proc, options.pop("min_np", None), num_proc, options.pop("max_np", None), max_num_proc
    numbers: list[Any] = [each for each in given if each is not None]
    own = launcher is None
    launcher = launcher or runner.on_spark("horovod.spark.run_elastic", numbers[-1] if numbers else None)
    numbers = numbers or [launcher.num_processes]
    world: Any = numbers[0] if numbers[0] == numbers[-1] else (numbers[0], numbers[-1])
    resets = RESETS if reset_limit is None else reset_limit
    if own or reset_limit is not None:
        launcher = launcher.options(max_restarts=resets, restart_on=(BaseException,) if resets else ())
    timeout = max((each for each in (start_timeout, elastic_timeout) if each is not None), default=None)
    return runner.run(fn, args, kwargs, world, timeout, launcher=launcher, **options)
