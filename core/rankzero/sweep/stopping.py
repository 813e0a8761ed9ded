"""Rules that decide which trials to stop early: pure functions of the reported values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rankzero.errors import InvalidJobError
from rankzero.run.reports import is_number

Curves = Mapping[int, Sequence[float]]
"""By trial, the values of the metric, one for each report of rank 0. Smaller is better; infinity means divergence."""


def loss_of(value: float, sign: float = 1.0) -> float:
    """Returns a value for a curve: infinity for nan, for either infinity, and for integers too large for a float.

    Args:
        value: The reported value.
        sign: -1.0 if a larger value is better.
    """
    return sign * float(value) if is_number(value) else math.inf


def _has_diverged(values: Sequence[float]) -> bool:
    """Returns True for a trial whose last value is nan or infinity."""
    return bool(values) and math.isinf(values[-1])


def _best(values: Sequence[float]) -> float:
    """Returns the best value of a trial so far; a diverged trial has none."""
    return math.inf if _has_diverged(values) else min(values)


class StopRule(Protocol):
    """A rule that decides after each report of a trial whether to stop it."""

    def stops(self, trial: int, curves: Curves) -> bool:
        """Returns True if the trial should stop now.

        Args:
            trial: Number of the trial.
            curves: Curves of all trials so far, also of trials that have ended; smaller is better.
        """


@dataclass(frozen=True)
class MedianRule:
    """Stops a trial whose best value so far is worse than the median of the others' means up to the same report.

    A trial that reports nan or infinity after its `grace` is stopped, whatever the others report. The rule is that of
    Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017, section 3.2.2.

    Attributes:
        grace: Number of reports before a trial can be stopped.
        min_trials: Number of other trials that must have made as many reports before a trial is compared with them.

    Example:
        >>> MedianRule(grace=1, min_trials=2).stops(2, {0: [1.0, 0.5], 1: [1.0, 0.4], 2: [3.0, 2.9]})
        True
    """

    grace: int = 5
    min_trials: int = 3

    def __post_init__(self) -> None:
        if self.grace < 1 or self.min_trials < 1:
            raise InvalidJobError(f"{self}: grace and min_trials must be 1 or more")

    def stops(self, trial: int, curves: Curves) -> bool:
        """Returns True if the trial has diverged, or its best value is worse than the median of the others' means."""
        own = curves[trial]
        if _has_diverged(own) and len(own) > self.grace:
            return True
        others = [values[: len(own)] for other, values in curves.items() if other != trial and len(values) >= len(own)]
        if len(own) <= self.grace or len(others) < self.min_trials:
            return False
        return _best(own) > statistics.median(statistics.fmean(values) for values in others)


@dataclass(frozen=True)
class SuccessiveHalving:
    """Continues only the best trials at each rung. It is asynchronous: no trial waits for others.

    The rungs are at ``first``, ``first * factor``, ``first * factor**2``, ... reports. At each rung a trial continues
    if it is among the best 1/``factor`` of the trials that have reached the rung so far; the first one always
    continues. A trial that reports nan or infinity at the first rung or later is stopped, also between rungs. The rule
    is that of Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020 (ASHA).

    Attributes:
        first: Number of reports of the first rung.
        factor: Number of trials at a rung for each one that continues.

    Example:
        >>> SuccessiveHalving(first=2, factor=2).stops(1, {0: [1.0, 0.5], 1: [1.0, 0.9]})
        True
    """

    first: int = 4
    factor: int = 3

    def __post_init__(self) -> None:
        if self.first < 1 or self.factor < 2:
            raise InvalidJobError(f"{self}: first must be 1 or more, and factor 2 or more")

    def stops(self, trial: int, curves: Curves) -> bool:
        """Returns True if the trial has diverged, or has reached a rung and is not among the best there."""
        rung, reports = self.first, len(curves[trial])
        if _has_diverged(curves[trial]) and reports >= self.first:
            return True
        while rung < reports:
            rung *= self.factor
        if rung != reports:
            # Trials that reach a rung later do not stop a trial that has passed it.
            return False
        reached = sorted(_best(values[:rung]) for values in curves.values() if len(values) >= rung)
        return _best(curves[trial]) > reached[max(0, len(reached) // self.factor - 1)]
