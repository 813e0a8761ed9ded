"""`HorovodRunner` of sparkdl, ``horovod.run`` and ``horovod.spark.run``, which are one function."""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankzero.compat.torch_distributor import active_session, engine_of_session
from rankzero.errors import EngineError, InvalidJobError
from rankzero.launcher import Launcher, follow_run
from rankzero.run.lines import print_line

_OWN = re.compile(r"(?:\[\d+\] )?rankzero: ")  # Begins a line of rankzero itself, which no verbosity hides

MESSAGE = "log_to_driver: "
"""Prefix of a line of `log_to_driver`."""

_IGNORED = ("verbose", "stdout", "stderr", "nics", "network_interface", "network_interfaces", "use_gloo",
            "disable_cache", "prefix_output_with_timestamp")  # fmt: skip
"""Options of Horovod that are accepted and have no effect."""


class HorovodRunner:
    """Runs a training function on ``np`` ranks.

    Args:
        np: Above 0: ranks of a barrier job of the active SparkSession. Below 0: ``-np`` processes on this machine.
        driver_log_verbosity: ``"log_callback_only"`` shows the messages of `log_to_driver` and the lines of rankzero,
            ``"all"`` all output of the ranks.
        launcher: All other options; its engine is used for ``np > 0``.

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
            raise InvalidJobError(f"np is {np!r}; give 2 for two ranks on Spark, -2 for two processes on this machine")
        if driver_log_verbosity not in ("all", "log_callback_only"):
            raise InvalidJobError(f"driver_log_verbosity is {driver_log_verbosity!r}; choose all or log_callback_only")
        self.num_processor, self.driver_log_verbosity = np, driver_log_verbosity
        self._launcher = launcher or Launcher()

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Calls ``main(**kwargs)`` on every rank and returns rank 0's value.

        Raises EngineError for ``np > 0`` without an active SparkSession, and what `Launcher.run` raises.
        """
        np, engine = self.num_processor, self._launcher.engine if self.num_processor > 0 else None
        if np > 0 and engine is None:
            engine = _on_spark(np).engine
        launcher = self._launcher.options(num_processes=abs(np), engine=engine)
        return follow_run(launcher, main, (), kwargs, self._show)[0]

    def _show(self, line: str, run_id: str) -> None:
        if self.driver_log_verbosity == "all" or _OWN.match(line):
            print_line(line, run_id)
        elif MESSAGE in line:
            print_line(line.replace(MESSAGE, "", 1), run_id)


def log_to_driver(message: str) -> None:
    """Shows a message of a rank in the process that called `HorovodRunner.run`."""
    for line in message.splitlines() or [""]:
        print(f"{MESSAGE}{line}", flush=True)


def run(
    fn: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    *,
    launcher: Launcher | None = None,
    **options: Any,
) -> list[Any]:
    """Calls ``fn`` on every rank and returns the values of all, by rank, as Horovod's functions do.

    The ranks run on the active SparkSession; without one, in ``num_proc`` processes of this machine.

    Args:
        fn: The training function; ``func`` is an alias.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
        num_proc: Number of ranks; ``np`` is an alias. None: as many as the SparkSession has slots.
        start_timeout: Seconds until every rank must have started.
        launcher: All other options, and the engine.
        options: Horovod's other options. ``env`` is a dict of environment variables; ``verbose``, ``stdout``, ``nics``
            and similar ones have no effect; all others are refused.

    Raises:
        EngineError: neither a SparkSession nor ``num_proc``.
        InvalidJobError: a value is wrong, or an option is not supported.
        RankZeroError: see `Launcher.run`.

    Example:
        >>> from rankzero.compat.horovod import run
        >>> run(max, args=(1, 2), np=2)
        [2, 2]
    """
    fn, num_proc = options.pop("func", fn), options.pop("np", num_proc)
    if launcher is None:
        is_here = num_proc is not None and active_session() is None
        launcher = Launcher() if is_here else _on_spark(num_proc)
    if env := options.pop("env", None):
        launcher = launcher.options(env={**(launcher.env or {}), **env})
    for name, value in options.items():
        if name not in _IGNORED and value not in (None, False):
            raise InvalidJobError(f"no {name}={value!r}: give launcher=Launcher(...), see docs/migrate.md#horovod")
    given = {"num_processes": num_proc, "start_timeout": start_timeout}
    launcher = launcher.options(**{name: value for name, value in given.items() if value is not None})

    # The name of the function becomes the name of the run, and its signature checks the arguments.
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> list[Any] | None:
        import cloudpickle

        import rankzero.train as rt

        pickles = rt.all_gather_object(cloudpickle.dumps(fn(*args, **kwargs)))
        return [pickle.loads(each) for each in pickles] if rt.get_context().rank == 0 else None

    return list(launcher.run(call, *args, **(kwargs or {})) or ())


def _on_spark(num_proc: int | None) -> Launcher:
    """Returns a launcher of ``num_proc`` ranks on the active SparkSession: by default of as many as it has slots."""
    if (session := active_session()) is None:
        raise EngineError("there is no active SparkSession: create one; for processes here give np=-2, or num_proc=2")
    if num_proc is None:
        num_proc = int(session.sparkContext.defaultParallelism)
    return Launcher(num_processes=num_proc, engine=engine_of_session(session))
