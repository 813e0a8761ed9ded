"""Sources of the arguments of the next trial: a list, or an Optuna study."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from rankzero.errors import InvalidJobError

Params = dict[str, Any]


@runtime_checkable
class Search(Protocol):
    """A source of arguments, which gets the result of each trial."""

    def ask(self) -> Params | None:
        """Returns the keyword arguments of the next trial; None if there is none. Called by one thread at a time."""

    def tell(self, number: int, value: float | None) -> None:
        """Receives the final value of a trial's metric; None if the trial failed or has not reported the metric."""

    def pruned(self, number: int, value: float | None) -> None:
        """Receives the last value of a trial that a rule has stopped."""


def _checked(origin: str, item: Any) -> Params:
    if not isinstance(item, Mapping) or not all(isinstance(name, str) for name in item):
        raise InvalidJobError(f"{origin} {item!r}; each trial is a dict of keyword arguments of the function")
    return dict(item)


class ListedParams:
    """A list of arguments, one trial for each item.

    Args:
        params: Keyword arguments of each trial.

    Raises:
        InvalidJobError: an item is not a mapping with names, or the list is empty.
    """

    def __init__(self, params: Iterable[Mapping[str, Any]]) -> None:
        listed = list(params)
        if not listed:
            raise InvalidJobError("params is empty: a sweep needs the arguments of one trial at least")
        self._left: Iterator[Params] = iter([_checked("params has", item) for item in listed])

    def ask(self) -> Params | None:
        """Returns the next item of the list; None after the last one."""
        return next(self._left, None)

    def tell(self, number: int, value: float | None) -> None:
        """Ignores the result, since the list is fixed."""

    def pruned(self, number: int, value: float | None) -> None:
        """Ignores the result, since the list is fixed."""


class OptunaSearch:
    """Arguments that an Optuna study suggests.

    Args:
        study: An ``optuna.Study``, with the same direction as ``mode`` of ``Launcher.map``.
        suggest: Takes an ``optuna.Trial`` and returns the keyword arguments of the training function.
        num_trials: Number of trials.

    Example:
        A sweep of 20 trials, four at a time::

            study = optuna.create_study(direction="minimize")
            search = OptunaSearch(study, lambda trial: {"lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True)}, 20)
            Launcher(2).map(train, search, metric="loss", max_parallel=4).best.params
    """

    def __init__(self, study: Any, suggest: Callable[[Any], Params], num_trials: int) -> None:
        self._study, self._suggest, self._left = study, suggest, num_trials
        self._asked: list[Any] = []
        self._lock = threading.Lock()

    def ask(self) -> Params | None:
        """Returns the arguments that the study suggests; None after ``num_trials`` trials.

        Raises:
            InvalidJobError: ``suggest`` returned something else than a mapping with names.
        """
        with self._lock:
            if self._left <= 0:
                return None
            self._left -= 1
            trial = self._study.ask()
            self._asked.append(trial)
            return _checked("suggest returned", self._suggest(trial))

    def tell(self, number: int, value: float | None) -> None:
        """Reports a trial's final value to the study, or its failure if the value is None."""
        with self._lock:
            if value is None:
                self._study.tell(self._asked[number], state=self._state("FAIL"))
            else:
                self._study.tell(self._asked[number], value)

    def pruned(self, number: int, value: float | None) -> None:
        """Reports to the study that a rule has stopped a trial, with its last value."""
        with self._lock:
            if value is not None:
                self._asked[number].report(value, step=0)
            self._study.tell(self._asked[number], state=self._state("PRUNED"))

    @staticmethod
    def _state(name: str) -> Any:
        return getattr(importlib.import_module("optuna.trial").TrialState, name)
