"""Sweeps: `Launcher.map` runs one training with many sets of arguments, each as a run, and finds the best."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from rankzero.errors import InvalidJobError, ResultError, RunCancelledError
from rankzero.run.handle import RunHandle
from rankzero.run.lines import print_line
from rankzero.run.reports import is_number
from rankzero.submit.pack import Contents
from rankzero.values.ref import ResultRef

__all__ = ["Sweep", "Trial"]


@dataclass(frozen=True)
class Trial:
    """A set of arguments, and the result of its run.

    Attributes:
        number: Position of the arguments in the list, from 0.
        params: The keyword arguments.
        state: ``"succeeded"``, ``"failed"`` or ``"cancelled"``.
        value: The last value of the sweep's metric that rank 0 has reported, if the trial succeeded.
        directory: The run directory; ``""`` if none was created.
        error: The error of a trial that did not succeed.
        result: Handle of rank 0's value if the trial succeeded.
    """

    number: int
    params: dict[str, Any]
    state: str
    value: Any = None
    directory: str = ""
    error: Exception | None = field(default=None, repr=False)
    result: ResultRef | None = field(default=None, repr=False)

    def load(self) -> Any:
        """Loads the value that the training function returned on rank 0. Raises the error of a trial without value."""
        if self.result is None:
            raise self.error or ResultError(f"trial {self.number} was {self.state} and has no result")
        return self.result.load()


class Sweep(tuple[Trial, ...]):
    """The trials, in the order of their arguments; ``metric`` and ``mode`` are those of `Launcher.map`."""

    metric: str | None = None
    mode: str = "min"

    @property
    def best(self) -> Trial:
        """The successful trial with the best value of the metric. Raises RankZeroError if there is none."""
        scored = [trial for trial in self if trial.result and isinstance(trial.value, (int, float))]
        if not scored:
            lost = ResultError(f"no trial that succeeded has reported the metric {self.metric!r} of map() on rank 0")
            raise next((trial.error for trial in self if trial.error), lost)
        sign = 1.0 if self.mode == "min" else -1.0
        return min(scored, key=lambda trial: sign * float(trial.value) if is_number(trial.value) else math.inf)


def run_trials(
    start: Callable[[str | None, dict[str, Any]], contextlib.AbstractContextManager[RunHandle[Any]]],
    sweep: str | None,
    params: Iterable[Mapping[str, Any]],
    metric: str | None,
    max_parallel: int,
) -> Sweep:
    """Runs all trials, as `Launcher.map` does; ``start`` opens the run of one, which ends with its block."""
    trials: list[tuple[str | None, dict[str, Any]]] = []
    for each in params:
        if not isinstance(each, Mapping) or not all(isinstance(name, str) for name in each):
            raise InvalidJobError(f"params has {each!r}; each trial is a dict of keyword arguments of the function")
        try:
            # The name of a trial depends on its arguments, and not on its position.
            trials.append((sweep and f"{sweep}-{Contents().digest_of(dict(each))[:10]}", dict(each)))
        except Exception as error:
            raise InvalidJobError(f"params has {each!r}, which cannot be pickled: {error}", code="RZ-1004") from error
    if sweep and len(dict(trials)) < len(trials):
        raise InvalidJobError(
            "params has equal arguments twice, and the runs of a sweep with a run_id have names of their arguments: "
            "leave one out, or add an argument by which the trials differ, such as a seed"
        )
    handles: list[RunHandle[Any]] = []
    is_stopped = threading.Event()

    def run(number: int, run_id: str | None, params: dict[str, Any]) -> Trial:
        handle, result, error, value = None, None, None, None
        try:
            with start(run_id, params) as handle:
                print_line(f"trial {number} ({params}) runs in {handle.directory}", handle.id)
                handles.append(handle)
                if is_stopped.is_set():
                    handle.cancel()
                handle.wait()
            result, value = handle.result_ref(), handle.status().metrics.get(metric or "")
        except Exception as caught:
            if isinstance(caught, InvalidJobError) and number == 0 and handle is None:
                # All other trials would be refused, too.
                raise
            error = caught
        state = "cancelled" if isinstance(error, RunCancelledError) else "failed" if error else "succeeded"
        outcome = f": {error}" if error else "" if value is None else f": {metric} {value}"
        print_line(f"trial {number} ({params}) {state}{outcome}".partition("\n")[0], handle.id if handle else "")
        return Trial(number, params, state, value, handle.directory if handle else "", error, result)

    pool = ThreadPoolExecutor(max_parallel, thread_name_prefix="rankzero-trial")
    futures = [pool.submit(run, number, *trial) for number, trial in enumerate(trials)]
    try:
        for future in as_completed(futures):
            future.result()
    except BaseException:
        # An interrupt, or a refusal of all trials.
        is_stopped.set()
        for handle in handles:
            with contextlib.suppress(Exception):
                handle.cancel()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return Sweep(future.result() for future in futures)
