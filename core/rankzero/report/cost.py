"""The GPU-hours or core-hours of a run, and their estimated cost by the prices of its submitter.

A rank counts from the launch of its attempt until the end of the attempt: for so long no other job can use its slot.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from rankzero.errors import InvalidJobError
from rankzero.job import Job
from rankzero.run.reports import is_number
from rankzero.run.status import RunStatus

PRICES_VARIABLE = "RANKZERO_PRICES"
"""The variable with the prices of an hour, for example ``gpu=2.49,core=0.04,currency=EUR``."""


@dataclass(frozen=True)
class Usage:
    """The usage of a run until now.

    Attributes:
        hours: GPU-hours, or core-hours of a run without GPUs.
        resource: ``"gpu"`` or ``"core"``. A rank without ``cpus_per_process`` counts as one core.
        cost: The cost by the submitter's prices; None without a price for this resource.
        currency: The currency of the cost; may be empty.
    """

    hours: float
    resource: str
    cost: float | None = None
    currency: str = ""

    def __str__(self) -> str:
        """Returns text such as ``3.20 GPU-hours, about 7.97 EUR``."""
        return f"{self.amount}ours{self.price and f', about {self.price}'}"

    @property
    def amount(self) -> str:
        """The hours as text, such as ``3.20 GPU-h``."""
        return f"{_few_digits(self.hours)} {'GPU' if self.resource == 'gpu' else 'core'}-h"

    @property
    def price(self) -> str:
        """The cost as text, such as ``7.97 EUR``; empty without a price."""
        return "" if self.cost is None else f"{_few_digits(self.cost)} {self.currency}".rstrip()


def usage(job: Job, status: RunStatus, now: float) -> Usage | None:
    """Returns the usage of the last submission of a run until a Unix time; None before it had a slot."""
    seconds = status.held_seconds
    if status.held_since is not None:
        # A driver that has died is known to have lived until its last heartbeat.
        until = (status.ended or status.heartbeat) if status.final else now
        seconds += (status.world_size or job.num_processes) * max(0.0, until - status.held_since)
    if not seconds:
        return None
    resource = "gpu" if job.use_gpu else "core"
    hours = seconds / 3600 * (1 if job.use_gpu else job.cpus_per_process or 1)
    price = job.prices.get(resource)
    return Usage(hours, resource, hours * price if is_number(price) else None, str(job.prices.get("currency", "")))


def prices_from_environment() -> dict[str, Any]:
    """Returns the prices in `PRICES_VARIABLE`, such as ``{"gpu": 2.49, "core": 0.04, "currency": "EUR"}``.

    Raises:
        InvalidJobError: it has something else than prices from 0 on for ``gpu`` and ``core``, and a ``currency``.
    """
    prices: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in os.environ.get(PRICES_VARIABLE, "").split(","))):
        name, _, value = (part.strip() for part in pair.partition("="))
        number = None
        if name in ("gpu", "core"):
            with contextlib.suppress(ValueError):
                number = float(value)
        if is_number(number) and number >= 0:
            prices[name] = number
        elif name == "currency" and value:
            prices[name] = value
        else:
            raise InvalidJobError(
                f"{PRICES_VARIABLE} has {pair!r}; give what an hour costs, such as gpu=2.49,core=0.04,currency=EUR"
            )
    return prices


def _few_digits(number: float) -> str:
    """Returns a number with two decimals, or below 0.1 with two significant digits."""
    if number >= 0.1 or not number:
        return f"{number:.2f}"
    return f"{number:.2g}" if number >= 0.0001 else "<0.0001"
