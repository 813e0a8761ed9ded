"""`HorovodRunner` of sparkdl, and ``horovod.run``."""

from __future__ import annotations

import functools
import pickle
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankzero.errors import EngineError, InvalidJobError
from rankzero.launcher import Launcher
from rankzero.run.output import is_own
from rankzero.run.printing import print_line
from rankzero.submit.training import check_callable
from rankzero.worker.main import HOROVOD

MESSAGE = "log_to_driver: "
"""Prefix of a line of `log_to_driver`."""

VERBOSITIES = ("log_callback_only", "all")


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
            raise InvalidJobError(
                f"np is {np!r}; give 2 for two ranks on Spark, or -2 for two processes on this machine"
            )
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
        launcher = with_names(self._launcher).options(num_processes=abs(self.num_processor))
        if self.num_processor < 0:
            launcher = launcher.options(engine=None)
        elif launcher.engine is None:
            np = self.num_processor
            otherwise = f"give np=-{np} for processes on this machine"
            launcher = launcher.options(engine=on_spark(f"HorovodRunner(np={np})", np, otherwise).engine)
        value, _ = launcher.followed(main, (), kwargs, self._show)
        return value

    def _show(self, line: str, run_id: str) -> None:
        if self.driver_log_verbosity == "all" or is_own(line):
            print_line(line, run_id)
        elif MESSAGE in line:
            print_line(line.replace(MESSAGE, "", 1), run_id)


def on_spark(caller: str, num_proc: int | None, otherwise: str) -> Launcher:
    """Returns a launcher for the active SparkSession.

    Args:
        caller: Name of the calling function, for errors.
        num_proc: Number of ranks; None: as many as the session has slots.
        otherwise: Advice for the error without a session.

    Raises:
        EngineError: there is no session.
        InvalidJobError: ``num_proc`` is None, and the session is one of Spark Connect.
    """
    from rankzero.compat.torch_distributor import active_session
    from rankzero.engines.specs import engine_of_session

    session = active_session()
    if session is None:
        raise EngineError(
            f"{caller} needs an active SparkSession: create one with SparkSession.builder, or {otherwise}"
        )
    if num_proc is None:
        context = getattr(session, "sparkContext", None)
        if context is None:
            raise InvalidJobError("num_proc is None, and Spark Connect does not tell how many slots there are: give it")
        num_proc = int(context.defaultParallelism)
    return Launcher(num_processes=num_proc, engine=engine_of_session(session))


def with_names(launcher: Launcher, env: Mapping[str, str] | None = None) -> Launcher:
    """Returns a launcher whose ranks can import ``horovod`` and ``sparkdl``, with more environment variables."""
    return launcher.options(env={HOROVOD: "1", **(launcher.env or {}), **(env or {})})


def log_to_driver(message: str) -> None:
    """Shows a message of a rank in the process that called `HorovodRunner.run`.

    Raises:
        TypeError: the message is not a string.
    """
    if not isinstance(message, str):
        raise TypeError(f"log_to_driver takes a text, not {type(message).__name__}")
    for line in message.splitlines() or [""]:
        print(f"{MESSAGE}{line}", file=sys.stdout, flush=True)


_CHANGE_NOTHING = frozenset(
    {"verbose", "stdout", "stderr", "nics", "network_interface", "network_interfaces", "use_gloo", "disable_cache",
     "prefix_output_with_timestamp"}
)  # fmt: skip

_LOCALHOST = re.compile(r"(?:localhost|127\.0\.0\.1):(\d+)")
"""Hosts that are this machine, with its number of slots."""

_ELSEWHERE = "the engine knows its hosts. Leave it out, or give launcher=Launcher(engine=...)"
_MPI = "ranks meet by torch.distributed. Leave it out"
_RESIZED = "use rankzero.compat.horovod.spark.run_elastic"

_REFUSED = {
    "np": "it is num_proc, which is given, too",
    "func": "it is fn, which is given, too",
    "hosts": _ELSEWHERE,
    "hostfile": _ELSEWHERE,
    "host_discovery_script": _ELSEWHERE,
    "slots": _ELSEWHERE,
    "ssh_port": _ELSEWHERE,
    "ssh_identity_file": _ELSEWHERE,
    "executable": "the engine has a Python for its ranks. Leave it out",
    "output_filename": "the run directory has the lines of each rank. Leave it out",
    "use_mpi": _MPI,
    "mpi_args": _MPI,
    "extra_mpi_args": _MPI,
    "min_num_proc": _RESIZED,
    "max_num_proc": _RESIZED,
    "min_np": _RESIZED,
    "max_np": _RESIZED,
    "reset_limit": _RESIZED,
    "cooldown_range": _RESIZED,
}


def run(
    fn: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    start_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    launcher: Launcher | None = None,
    **options: Any,
) -> list[Any]:
    """Calls ``fn`` on every rank and returns the values of all, by rank, as ``horovod.run`` does.

    The ranks run on the active SparkSession; without one, in ``num_proc`` processes of this machine.

    Args:
        fn: The training function; ``func`` is an alias.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
        num_proc: Number of ranks; ``np`` is an alias. None: as many as the SparkSession has slots.
        start_timeout: Seconds until every rank must have started.
        env: Environment variables of the ranks.
        launcher: All other options, and the engine.
        options: Horovod's other options. ``hosts="localhost:4"`` is this machine. ``verbose``, ``stdout``, ``stderr``,
            ``nics``, ``use_gloo`` and similar ones are accepted and have no effect.

    Raises:
        EngineError: neither a SparkSession nor ``num_proc``.
        InvalidJobError: a value is wrong, or an option is not supported.
        RankZeroError: see `Launcher.run`.

    Example:
        >>> from rankzero.compat.horovod import run
        >>> run(max, args=(1, 2), np=2)
        [2, 2]
    """
    fn = options.pop("func", None) if fn is None else fn
    num_proc = options.pop("np", None) if num_proc is None else num_proc
    if launcher is None and (here := _LOCALHOST.fullmatch(str(options.get("hosts")))):
        del options["hosts"]
        num_proc, launcher = num_proc or int(here[1]), Launcher()
    check_options(options)
    if launcher is None:
        from rankzero.compat.torch_distributor import active_session

        is_here = num_proc is not None and active_session() is None
        otherwise = "give num_proc for processes on this machine"
        launcher = Launcher() if is_here else on_spark("horovod.run", num_proc, otherwise)
    if num_proc is not None:
        launcher = launcher.options(num_processes=num_proc)
    if start_timeout is not None:
        launcher = launcher.options(start_timeout=start_timeout)
    return run_all(with_names(launcher, env), fn, args, kwargs)


def run_all(
    launcher: Launcher, fn: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> list[Any]:
    """Calls ``fn`` on every rank and returns the values of all ranks."""
    if not callable(fn):
        raise InvalidJobError(f"fn is {fn!r}; give a function. Launcher runs scripts, too")
    if not isinstance(args, (tuple, list)):
        raise InvalidJobError(f"args is {args!r}; give a tuple, such as ({args!r},)")
    if not isinstance(kwargs or {}, Mapping):
        raise InvalidJobError(f"kwargs is {kwargs!r}; give a dict")
    check_callable(fn, tuple(args), dict(kwargs or {}))
    return list(launcher.run(_gathered(fn), *args, **(kwargs or {})) or ())


def check_options(options: Mapping[str, Any]) -> None:
    """Raises InvalidJobError for an option of Horovod that is not supported, and for an unknown one."""
    for name, value in options.items():
        if name in _REFUSED and value not in (None, False):
            raise InvalidJobError(f"{name}={value!r} is not supported: {_REFUSED[name]}")
        if name not in _CHANGE_NOTHING and name not in _REFUSED:
            raise InvalidJobError(f"there is no option {name!r}; give those of Launcher by launcher=Launcher(...)")


def _gathered(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that it returns the list of all ranks' values on rank 0."""

    # The wrapped name becomes the name of the run, and the signature checks the arguments.
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> list[Any] | None:
        import cloudpickle

        import rankzero.train as rt

        pickles = rt.all_gather_object(cloudpickle.dumps(fn(*args, **kwargs)))
        return [pickle.loads(each) for each in pickles] if rt.get_context().rank == 0 else None

    return call
