"""Sweeps: `Launcher.map` runs one training with many sets of arguments, each as a run, and finds the best."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from rankzero.errors import InvalidJobError, ResultError, RunCancelledError
from rankzero.run.handle import RunHandle
from rankzero.run.printing import print_line
from rankzero.run.reports import is_number
from rankzero.submit.pack_content import Contents
from rankzero.values.ref import ResultRef

__all__ = ["Sweep", "Trial"]

Mode = Literal["min", "max"]
Params = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """A set of arguments, and the result of its run.

    Attributes:
        number: Position of the arguments in the list, from 0.
        params: The keyword arguments.
        state: ``"succeeded"``, ``"failed"`` or ``"cancelled"``.
        metrics: The last value of every metric that rank 0 has reported; ``value`` is that of the sweep's metric.
        directory: The run directory; ``""`` if none was created.
        error: The error of a trial that did not succeed.
        result: Handle of rank 0's value if the trial succeeded.
    """

    number: int
    params: Params
    state: str
    value: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)
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
    mode: Mode = "min"

    @property
    def best(self) -> Trial:
        """The successful trial with the best value of the metric. Raises RankZeroError if there is none."""
        if self.metric is None:
            raise InvalidJobError('the sweep has no metric to compare trials by: give map(..., metric="loss")')
        scored = [trial for trial in self if trial.result and isinstance(trial.value, (int, float))]
        if not scored:
            lost = ResultError(f"no trial that succeeded has reported {self.metric!r} on rank 0")
            raise next((trial.error for trial in self if trial.error), lost)
        sign = 1.0 if self.mode == "min" else -1.0
        return min(scored, key=lambda trial: sign * float(trial.value) if is_number(trial.value) else math.inf)


def named(sweep: str | None, params: Iterable[Mapping[str, Any]]) -> list[tuple[str | None, Params]]:
    """Returns the arguments of all trials, each with a run id that depends on them and not on their position."""
    found: list[tuple[str | None, Params]] = []
    for each in params:
        if not isinstance(each, Mapping) or not all(isinstance(name, str) for name in each):
            raise InvalidJobError(f"params has {each!r}; each trial is a dict of keyword arguments of the function")
        name = None if sweep is None else f"{sweep}-{Contents().digest_of(dict(each))[:10]}"
        count = sum((other or "").startswith(name) for other, _ in found) if name else 0
        found.append((f"{name}-{count + 1}" if count else name, dict(each)))
    if not found:
        raise InvalidJobError("params is empty; give a dict of keyword arguments for each trial")
    return found


def run_trials(
    start: Callable[[int], AbstractContextManager[RunHandle[Any]]],
    params: list[Params],
    metric: str | None,
    max_parallel: int,
) -> Sweep:
    """Runs all trials, as `Launcher.map` does; ``start`` opens the run of one, which ends with its block."""
    handles: list[RunHandle[Any]] = []
    is_stopped = threading.Event()

    def run(number: int) -> Trial:
        handle, result, error, metrics = None, None, None, {}
        name = f"trial {number} ({params[number]})"
        try:
            with start(number) as handle:
                print_line(f"{name} runs in {handle.directory}", handle.id)
                handles.append(handle)
                if is_stopped.is_set():
                    handle.cancel()
                handle.wait()
            result = handle.result_ref()
        except Exception as caught:
            if isinstance(caught, InvalidJobError) and number == 0 and handle is None:
                # All other trials would be refused, too.
                raise
            error = caught
        with contextlib.suppress(Exception):
            metrics = handle.status().metrics if handle else {}
        state = "cancelled" if isinstance(error, RunCancelledError) else "failed" if error else "succeeded"
        directory = handle.directory if handle else ""
        trial = Trial(number, params[number], state, metrics.get(metric or ""), metrics, directory, error, result)
        outcome = f": {error}" if error else "" if trial.value is None else f": {metric} {trial.value}"
        print_line(f"{name} {state}{outcome}".partition("\n")[0], handle.id if handle else "")
        return trial

    pool = ThreadPoolExecutor(max_parallel, thread_name_prefix="rankzero-trial")
    futures = [pool.submit(run, number) for number in range(len(params))]
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
