"""The trials of a sweep: starts parallel runs, follows their metric, and collects the results."""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rankzero.errors import InvalidJobError, ResultError, RunCancelledError
from rankzero.run.directory import RunDirectory
from rankzero.run.handle import RunHandle
from rankzero.run.reports import OfTraining, is_number
from rankzero.submit.content import digest_of
from rankzero.sweep.search import Params, Search
from rankzero.sweep.stopping import StopRule, loss_of
from rankzero.values.ref import ResultRef

_DIGITS = 10
"""Digits of a digest in the name of a run: two of 1,000 trials collide with a probability of 1 in two million."""

logger = logging.getLogger(__name__)

Mode = Literal["min", "max"]

STOPPED = "stopped"
"""The state of a trial that a rule has stopped."""


class Start(Protocol):
    """A function that starts the run of a trial."""

    def __call__(self, params: Params, /) -> AbstractContextManager[RunHandle[Any]]:
        """Returns a context manager that starts the run, and ends it with the block."""


class RunNames:
    """Names the runs of trials: a trial gets the same name in each call of a sweep, in whatever order they come."""

    def __init__(self, sweep: str | None) -> None:
        self._sweep = sweep
        self._lock = threading.Lock()
        self._given: collections.Counter[str] = collections.Counter()

    def of(self, params: Params) -> str | None:
        """Returns the run id of the next trial with these arguments; None if the sweep has none."""
        if self._sweep is None:
            return None
        name = f"{self._sweep}-{digest_of(params)[:_DIGITS]}"
        with self._lock:
            self._given[name] += 1
            count = self._given[name]
        return name if count == 1 else f"{name}-{count}"


@dataclass(frozen=True)
class Trial:
    """A set of arguments, and the result of its run.

    Attributes:
        number: Number of the trial, from 0 in the order of starts.
        params: The keyword arguments.
        state: ``"succeeded"``, ``"failed"``, ``"cancelled"``, or ``"stopped"`` by a rule.
        value: The last value of the sweep's metric that rank 0 has reported; None if there was none.
        metrics: The last value of every metric.
        directory: The run directory; ``""`` if none was created.
        error: The error if the trial did not succeed; else None.
        result: Handle of rank 0's value; None unless the trial succeeded.
    """

    number: int
    params: Params
    state: str
    value: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    directory: str = ""
    error: Exception | None = field(default=None, repr=False)
    result: ResultRef | None = field(default=None, repr=False)

    def load(self) -> Any:
        """Loads the value that the training function returned on rank 0.

        Raises:
            RankZeroError: the error because of which the trial has no value.
        """
        if self.result is None:
            raise self.error or ResultError(f"trial {self.number} was {self.state} and has no result")
        return self.result.load()


@dataclass(frozen=True)
class Sweep(Sequence[Trial]):
    """A sequence of the trials, in the order in which they were started.

    Attributes:
        trials: All trials.
        metric: Name of the metric that compares trials; None if they are not compared.
        mode: ``"min"`` if smaller values of the metric are better, ``"max"`` if larger ones are.
    """

    trials: tuple[Trial, ...]
    metric: str | None
    mode: Mode

    def __getitem__(self, index: Any) -> Any:
        return self.trials[index]

    def __len__(self) -> int:
        return len(self.trials)

    @property
    def best(self) -> Trial:
        """Returns the successful trial with the best value of the metric; nan and infinity are the worst values.

        Raises:
            InvalidJobError: the sweep has no metric.
            RankZeroError: no trial succeeded; the error is that of the first one.
            ResultError: no successful trial has reported the metric.
        """
        if self.metric is None:
            raise InvalidJobError('the sweep has no metric to compare trials by: give map(..., metric="loss")')
        done = [trial for trial in self.trials if trial.state == "succeeded"]
        if not done:
            raise next((trial.error for trial in self.trials if trial.error), None) or ResultError("no trial succeeded")
        sign = 1.0 if self.mode == "min" else -1.0
        scored = [(loss_of(trial.value, sign), trial) for trial in done if trial.value is not None]
        if not scored:
            raise ResultError(f"no trial that succeeded has reported {self.metric!r} on rank 0")
        return min(scored, key=lambda pair: pair[0])[1]

    def rows(self) -> list[dict[str, Any]]:
        """Returns a dict of plain values for each trial, for ``pandas.DataFrame(sweep.rows())``.

        The keys are ``trial``, ``state``, ``directory``, and the names of params and metrics. If a name occurs in
        several of these, the param is ``params.NAME`` and the metric ``metrics.NAME``.
        """
        own = {"trial", "state", "directory"}
        params, metrics = (
            {name for each in self.trials for name in getattr(each, kind)} for kind in ("params", "metrics")
        )
        shared = {*own & params, *own & metrics, *params & metrics}

        def named(kind: str, values: dict[str, Any]) -> dict[str, Any]:
            return {f"{kind}.{name}" if name in shared else name: value for name, value in values.items()}

        return [
            {
                "trial": trial.number,
                "state": trial.state,
                **named("params", trial.params),
                **named("metrics", trial.metrics),
                "directory": trial.directory,
            }
            for trial in self.trials
        ]


def run_trials(
    start: Start,
    search: Search,
    metric: str | None,
    mode: Mode,
    max_parallel: int,
    stop: StopRule | None,
    say: Callable[[str, str], object],
) -> Sweep:
    """Runs trials until the search has no more. A trial that fails does not end the sweep; an interrupt does.

    Args:
        start: Starts the run of a trial.
        search: Source of the arguments.
        metric: Name of the metric that compares trials, as rank 0 reports it.
        mode: ``"min"`` or ``"max"``.
        max_parallel: Most trials at the same time.
        stop: Rule that stops trials early, or None.
        say: Receives a line when a trial begins, and one when it has ended, each with the name of its run.
    """
    board = _Board(search, metric, mode, stop, say)
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            for number, params in board.next_trials():
                board.end(_run(start, number, params, board))
        except BaseException as error:
            done.put(error)
        else:
            done.put(None)

    threads = [
        threading.Thread(target=work, name=f"rankzero-trial-{index}", daemon=True) for index in range(max_parallel)
    ]
    for thread in threads:
        thread.start()
    first: BaseException | None = None
    try:
        for _ in threads:
            # The exception of a signal handler is raised here.
            first = done.get() or first
            if first:
                board.cancel()
    except BaseException:
        board.cancel()
        for thread in threads:
            thread.join()
        raise
    if first:
        raise first
    return Sweep(tuple(board.ended[number] for number in sorted(board.ended)), metric, mode)


class _Board:
    """State that the threads of a sweep share: the curves so far, and the trials that a rule has stopped."""

    def __init__(
        self, search: Search, metric: str | None, mode: Mode, stop: StopRule | None, say: Callable[[str, str], object]
    ) -> None:
        self._search, self._stop, self._say = search, stop, say
        self.metric, self._mode, self._sign = metric, mode, 1.0 if mode == "min" else -1.0
        self._lock = threading.Lock()
        self._curves: dict[int, list[float]] = {}
        self._last: dict[int, float] = {}
        self._handles: dict[int, RunHandle[Any]] = {}
        self._is_cancelled = False
        self._started = 0
        self.ended: dict[int, Trial] = {}
        self.stopped: set[int] = set()

    def next_trials(self) -> Iterator[tuple[int, Params]]:
        """Yields numbers and arguments of trials, until the search has no more or the sweep is cancelled."""
        while True:
            with self._lock:
                params = None if self._is_cancelled else self._search.ask()
                if params is None:
                    return
                number, self._started = self._started, self._started + 1
            yield number, params

    def begin(self, number: int, params: Params, handle: RunHandle[Any]) -> None:
        """Records that a trial runs, and cancels its run if the sweep is cancelled."""
        with self._lock:
            self._say(f"trial {number} ({params}) runs in {handle.directory}", handle.id)
            self._handles[number] = handle
            self._curves[number] = []
            is_late = self._is_cancelled
        if is_late:
            handle.cancel()

    def report(self, number: int, value: float) -> bool:
        """Records a value that rank 0 of a trial has reported; returns True if a rule stops the trial now."""
        with self._lock:
            self._last[number] = value
            self._curves[number].append(loss_of(value, self._sign))
            if self._stop and number not in self.stopped and self._stop.stops(number, self._curves):
                self.stopped.add(number)
                return True
        return False

    def length(self, number: int) -> int:
        """Returns the number of values in a trial's curve."""
        with self._lock:
            return len(self._curves[number])

    def cut(self, number: int, length: int) -> None:
        """Removes the values of a trial that an attempt has reported whose work is repeated now."""
        with self._lock:
            del self._curves[number][length:]

    def last(self, number: int) -> float | None:
        """Returns the last value that a trial has reported; None if there is none."""
        with self._lock:
            return self._last.get(number)

    def end(self, trial: Trial) -> None:
        """Records a trial that has ended, and passes its value to the search."""
        with self._lock:
            self.ended[trial.number] = trial
            self._handles.pop(trial.number, None)
            self._say(self._describe(trial), trial.directory.rsplit("/", 1)[-1])
        if trial.result and self.metric and trial.value is None:
            logger.warning(
                "trial %s has not reported %r, by which the sweep compares trials, but: %s",
                trial.number,
                self.metric,
                ", ".join(trial.metrics) or "nothing",
            )
        if trial.state == STOPPED:
            self._search.pruned(trial.number, trial.value if is_number(trial.value) else None)
        else:
            is_result = trial.state == "succeeded" and is_number(trial.value)
            self._search.tell(trial.number, trial.value if is_result else None)

    def _describe(self, trial: Trial) -> str:
        text = f"trial {trial.number} ({trial.params}) {trial.state}"
        if trial.error:
            return f"{text}: {str(trial.error).partition(chr(10))[0]}"
        if self.metric is None or trial.value is None:
            return text
        is_best = Sweep(tuple(self.ended.values()), self.metric, self._mode).best is trial
        return f"{text}: {self.metric} {trial.value}{', the best so far' if is_best else ''}"

    def cancel(self) -> None:
        """Cancels all running trials, and starts no more."""
        with self._lock:
            self._is_cancelled = True
            handles = list(self._handles.values())
        for handle in handles:
            try:
                handle.cancel()
            except Exception:
                logger.warning("run %s could not be cancelled", handle.id, exc_info=True)


def _run(start: Start, number: int, params: Params, board: _Board) -> Trial:
    """Runs one trial to its end; its error becomes part of the returned trial."""
    directory = ""
    try:
        with start(params) as handle:
            directory = handle.directory
            board.begin(number, params, handle)
            _follow(handle, number, board)
        status = handle.status()
        ref = handle.result_ref()
    except Exception as error:
        if isinstance(error, InvalidJobError) and number == 0 and not directory:
            # All other trials would be refused, too.
            raise
        state = (
            STOPPED if number in board.stopped else "cancelled" if isinstance(error, RunCancelledError) else "failed"
        )
        return Trial(number, params, state, board.last(number), _last_metrics(directory), directory, error)
    return Trial(number, params, status.state, board.last(number), status.metrics, directory, None, ref)


def _last_metrics(directory: str) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        return RunHandle[Any](directory).status().metrics if directory else {}
    return {}


_MOST_REPORTS = 1000
"""Reports among which that of a checkpoint is searched: others may come before it is committed."""


def _follow(handle: RunHandle[Any], number: int, board: _Board) -> None:
    is_ours = OfTraining(RunDirectory(handle.directory).job().fresh_since)
    # Metrics of the last reports, each with the length of the curve after it.
    reports: deque[tuple[dict[str, Any], int]] = deque(maxlen=_MOST_REPORTS)
    committed = 0
    for event in filter(is_ours, handle.events(follow=True)):
        if event["type"] == "metric" and event["rank"] == 0:
            value = event["metrics"].get(board.metric)
            if isinstance(value, (int, float)) and board.report(number, value):
                handle.cancel()
            reports.append((event["metrics"], board.length(number)))
        elif event["type"] == "checkpoint":
            # Reports that came while it was committed are not in it.
            committed = next(
                (length for metrics, length in reversed(reports) if metrics == event["metrics"]), committed
            )
            reports.clear()
        elif event["type"] == "state" and event["state"] == "starting":
            board.cut(number, committed)
            reports.clear()
