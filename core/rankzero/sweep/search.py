"""Where the arguments of the next trial come from."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from rankzero.errors import InvalidJobError

Params = dict[str, Any]


@runtime_checkable
class Search(Protocol):
    """Asked for arguments, and told how they did."""

    def ask(self) -> Params | None:
        """Keyword arguments of the next trial; None if there is none. One thread at a time."""

    def tell(self, number: int, value: float | None) -> None:
        """The trial of that number has ended, with this value of the metric; None if it failed or reported none."""

    def pruned(self, number: int, value: float | None) -> None:
        """A rule has stopped it."""


class ListedParams:
    """Arguments that are known beforehand.

    Args:
        params: Keyword arguments of each trial.

    Raises:
        InvalidJobError: an item is no mapping with names, or there is none.
    """

    def __init__(self, params: Iterable[Mapping[str, Any]]) -> None:
        listed = list(params)
        for item in listed:
            if not isinstance(item, Mapping) or not all(isinstance(name, str) for name in item):
                raise InvalidJobError(f"params has {item!r}; each trial is a dict of keyword arguments of the function")
        if not listed:
            raise InvalidJobError("params is empty: a sweep needs the arguments of one trial at least")
        self._left: Iterator[Params] = iter([dict(item) for item in listed])

    def ask(self) -> Params | None:
        """See `Search`."""
        return next(self._left, None)

    def tell(self, number: int, value: float | None) -> None:
        """Nothing is learnt."""

    def pruned(self, number: int, value: float | None) -> None:
        """Nothing is learnt."""


class OptunaSearch:
    """Arguments that an Optuna study suggests.

    Args:
        study: An ``optuna.Study``; its direction has to be that of ``Launcher.map``.
        suggest: Gets an ``optuna.Trial`` and returns the keyword arguments of the training function.
        num_trials: How many.

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
        """See `Search`."""
        with self._lock:
            if self._left <= 0:
                return None
            self._left -= 1
            trial = self._study.ask()
            self._asked.append(trial)
            return self._suggest(trial)

    def tell(self, number: int, value: float | None) -> None:
        """See `Search`."""
        with self._lock:
            if value is None:
                self._study.tell(self._asked[number], state=self._state("FAIL"))
            else:
                self._study.tell(self._asked[number], value)

    def pruned(self, number: int, value: float | None) -> None:
        """See `Search`."""
        with self._lock:
            if value is not None:
                self._asked[number].report(value, step=0)
            self._study.tell(self._asked[number], state=self._state("PRUNED"))

    @staticmethod
    def _state(name: str) -> Any:
        return getattr(importlib.import_module("optuna.trial").TrialState, name)
