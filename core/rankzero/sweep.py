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
        """Returns the successful trial with the best value of the metric; nan and infinity are the worst values.

        Raises:
            RankZeroError: the sweep has no metric, no trial succeeded, or none that did has reported the metric.
        """
        if self.metric is None:
            raise InvalidJobError('the sweep has no metric to compare trials by: give map(..., metric="loss")')
        done = [trial for trial in self if trial.state == "succeeded"]
        if not done:
            raise next((trial.error for trial in self if trial.error), None) or ResultError("no trial succeeded")
        scored = [trial for trial in done if isinstance(trial.value, (int, float))]
        if not scored:
            raise ResultError(f"no trial that succeeded has reported {self.metric!r} on rank 0")
        sign = 1.0 if self.mode == "min" else -1.0
        return min(scored, key=lambda trial: sign * float(trial.value) if is_number(trial.value) else math.inf)


def named(sweep: str | None, params: Iterable[Mapping[str, Any]]) -> list[tuple[str | None, Params]]:
    """Returns the arguments of all trials, each with a run id that depends on them and not on their position.

    Raises InvalidJobError if these are not dicts with names, or none.
    """
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
    say: Callable[[str, str], object],
) -> Sweep:
    """Runs all trials, as `Launcher.map` does. ``start`` begins a trial's run; ``say`` receives lines and run ids."""
    handles: dict[int, RunHandle[Any]] = {}
    is_cancelled = threading.Event()

    def run(number: int) -> Trial:
        result, error, directory, metrics = None, None, "", {}
        try:
            with start(number) as handle:
                handles[number] = handle
                if is_cancelled.is_set():
                    handle.cancel()
                say(f"trial {number} ({params[number]}) runs in {handle.directory}", handle.id)
                handle.wait()
            result = handle.result_ref()
        except Exception as caught:
            if isinstance(caught, InvalidJobError) and number == 0 and number not in handles:
                # All other trials would be refused, too.
                raise
            error = caught
        if number in handles:
            directory = handles[number].directory
            with contextlib.suppress(Exception):
                metrics = handles[number].status().metrics
        state = "cancelled" if isinstance(error, RunCancelledError) else "failed" if error else "succeeded"
        trial = Trial(number, params[number], state, metrics.get(metric or ""), metrics, directory, error, result)
        outcome = f": {error}" if error else "" if trial.value is None else f": {metric} {trial.value}"
        say(f"trial {number} ({params[number]}) {state}{outcome}".partition("\n")[0], directory.rsplit("/", 1)[-1])
        return trial

    pool = ThreadPoolExecutor(max_parallel, thread_name_prefix="rankzero-trial")
    futures = [pool.submit(run, number) for number in range(len(params))]
    try:
        for future in as_completed(futures):
            future.result()
    except BaseException:
        is_cancelled.set()
        for handle in list(handles.values()):
            with contextlib.suppress(Exception):
                handle.cancel()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return Sweep(future.result() for future in futures)
