"""`HorovodRunner` of sparkdl, and ``horovod.spark.run``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankzero.errors import EngineError, InvalidJobError
from rankzero.launcher import Launcher, print_line

MESSAGE = "log_to_driver: "
"""What a line of `log_to_driver` begins with."""

VERBOSITIES = ("log_callback_only", "all")


class HorovodRunner:
    """Runs a training function on ``np`` ranks.

    Args:
        np: Above 0: ranks of a barrier job of the active SparkSession. Below 0: so many processes on this machine.
        driver_log_verbosity: ``"log_callback_only"`` shows what ranks give to `log_to_driver`, ``"all"`` their output.
        launcher: Where and how it runs otherwise; its engine is used for ``np > 0``.

    Raises:
        InvalidJobError: a value is wrong.

    Example:
        >>> from rankzero.compat.horovod import HorovodRunner
        >>> HorovodRunner(np=-2).run(dict, lr=0.5)
        {'lr': 0.5}
    """

    def __init__(
        self, *, np: int, driver_log_verbosity: str = "log_callback_only", launcher: Launcher | None = None
    ) -> None:
        if isinstance(np, bool) or not isinstance(np, int) or np == 0:
            raise InvalidJobError(f"np is {np!r}; give ranks on the cluster, or processes on this machine below 0")
        if driver_log_verbosity not in VERBOSITIES:
            raise InvalidJobError(
                f"driver_log_verbosity is {driver_log_verbosity!r}; choose 'all' or 'log_callback_only'"
            )
        self.num_processor = np
        self.driver_log_verbosity = driver_log_verbosity
        self._launcher = launcher or Launcher()

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Calls ``main(**kwargs)`` on every rank and returns rank 0's value.

        Raises:
            EngineError: ``np > 0`` without an active SparkSession.
            RankZeroError: see `Launcher.run`.
        """
        launcher = self._launcher.options(num_processes=abs(self.num_processor))
        if self.num_processor > 0 and launcher.engine is None:
            launcher = launcher.options(engine=_spark(self.num_processor))
        value, _ = launcher.followed(main, (), kwargs, self._show)
        return value

    def _show(self, line: str) -> None:
        if self.driver_log_verbosity == "all":
            print_line(line)
        elif MESSAGE in line:
            print_line(line.replace(MESSAGE, "", 1))


def _spark(np: int) -> Any:
    from rankzero.compat.torch_distributor import active_session
    from rankzero.engines.specs import engine_of_session

    session = active_session()
    if session is None:
        raise EngineError(
            f"HorovodRunner(np={np}) needs an active SparkSession: create one with SparkSession.builder, or give "
            f"np=-{np} for processes on this machine"
        )
    return engine_of_session(session)


def log_to_driver(message: str) -> None:
    """Shows a message of a rank where `HorovodRunner.run` was called.

    Raises:
        TypeError: no text.
    """
    if not isinstance(message, str):
        raise TypeError(f"log_to_driver takes a text, not a {type(message).__name__}")
    for line in message.splitlines() or [""]:
        print(f"{MESSAGE}{line}", file=sys.stdout, flush=True)


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    launcher: Launcher | None = None,
    **options: Any,
) -> list[Any]:
    """``horovod.spark.run``: calls ``fn`` on every rank and returns the values of all, in the order of ranks.

    Args:
        fn: The training function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_proc: Ranks; None: as many as the SparkSession has slots.
        start_timeout: Seconds until every rank must have started.
        env: Environment variables of the ranks.
        launcher: Where and how it runs otherwise. None: the active SparkSession.
        options: Horovod's others, of its own launcher: ``verbose``, ``stdout``, ``nics``, ...; they change nothing.

    Raises:
        InvalidJobError: a value is wrong, or ``use_mpi=True``.
        RankZeroError: see `Launcher.run`.
    """
    if options.get("use_mpi"):
        raise InvalidJobError("use_mpi=True is not supported: ranks meet by torch.distributed")
    if launcher is None:
        engine = _spark(num_proc or 1)
        launcher = Launcher(engine=engine)
        num_proc = num_proc or int(engine.session.sparkContext.defaultParallelism)
    changes: dict[str, Any] = {"num_processes": num_proc or launcher.num_processes}
    if start_timeout is not None:
        changes["start_timeout"] = float(start_timeout)
    if env is not None:
        changes["env"] = dict(env)
    found: list[Any] = launcher.options(**changes).run(_gathered, fn, tuple(args), dict(kwargs or {}))
    return found


def _gathered(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    import rankzero.train as rt

    return rt.all_gather_object(fn(*args, **kwargs))
