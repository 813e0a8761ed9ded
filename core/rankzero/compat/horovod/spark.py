"""``horovod.spark``: `run` and `run_elastic` on the active SparkSession."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankzero.compat.horovod import runner
from rankzero.launcher import Launcher

RESETS = 100
"""New attempts without ``reset_limit``. Horovod has no limit, but excludes the host of each failure."""

_OTHERWISE = "give launcher=Launcher(...)"

# Makes this module a package for the import system: the importer refuses its submodules with advice.
__path__: list[str] = []


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    *,
    env: Mapping[str, str] | None = None,
    launcher: Launcher | None = None,
    **options: Any,
) -> list[Any]:
    """``horovod.spark.run``: `rankzero.compat.horovod.run`, which needs an active SparkSession.

    Args:
        fn: The training function.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
        num_proc: Number of ranks; None: as many as the SparkSession has slots.
        start_timeout: Seconds until every rank must have started.
        env: Environment variables of the ranks.
        launcher: All other options, and the engine. None: the active SparkSession.
        options: Horovod's other options, as for `rankzero.compat.horovod.run`.

    Raises:
        EngineError: no active SparkSession.
        InvalidJobError: a value is wrong.
        RankZeroError: see `Launcher.run`.
    """
    launcher = launcher or runner.on_spark("horovod.spark.run", num_proc, _OTHERWISE)
    return runner.run(fn, args, kwargs, num_proc, start_timeout=start_timeout, env=env, launcher=launcher, **options)


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    launcher: Launcher | None = None,
    **options: Any,
) -> list[Any]:
    """Runs ``fn`` in an elastic world, whose attempts resume from the last ``state.commit()``, as Horovod's does.

    Args:
        fn: The training function, which uses `rankzero.compat.horovod.torch.elastic.run`.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
        num_proc: Number of ranks; None: as many as the SparkSession has slots.
        min_num_proc: Smallest number of ranks of an attempt; None: ``num_proc``.
        max_num_proc: Largest number of ranks of an attempt; None: ``num_proc``.
        start_timeout: Seconds until every rank must have started.
        elastic_timeout: The same limit for later attempts; the longer one of both is used for all.
        reset_limit: New attempts after any end of a rank but a value (``max_restarts``); None: 100.
        env: Environment variables of the ranks.
        launcher: All other options, and the engine. None: the active SparkSession.
        options: Horovod's other options, as for `rankzero.compat.horovod.run`.

    Returns:
        The values of all ranks of the last attempt.

    Raises:
        EngineError: no active SparkSession.
        InvalidJobError: a value is wrong.
        RankZeroError: see `Launcher.run`.
    """
    least = _first(min_num_proc, options.pop("min_np", None), num_proc)
    most = _first(max_num_proc, options.pop("max_np", None), num_proc)
    runner.check_options(options)
    launcher = launcher or runner.on_spark("horovod.spark.run_elastic", _first(most, least), _OTHERWISE)
    world = launcher.num_processes
    least, most = _first(least, most, world), _first(most, least, world)
    timeouts = [seconds for seconds in (start_timeout, elastic_timeout) if seconds is not None]
    resets = RESETS if reset_limit is None else reset_limit
    launcher = launcher.options(
        num_processes=least if least == most else (least, most),
        max_restarts=resets,
        restart_on=(BaseException,) if resets else (),
        start_timeout=max(timeouts, default=launcher.start_timeout),
    )
    return runner.run_all(runner.with_names(launcher, env), fn, args, kwargs)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
