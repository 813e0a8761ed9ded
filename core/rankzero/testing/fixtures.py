"""Fixtures for pytest: ``pytest_plugins = ["rankzero.testing.fixtures"]`` in your ``conftest.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rankzero.engines.local import LocalEngine
from rankzero.launcher import Launcher
from rankzero.store import STORE_VARIABLE
from rankzero.submit import durable
from rankzero.submit.start import Request


@pytest.fixture
def local_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes trainings of launchers, operators, resources and assets run on this machine, without Spark.

    Whatever engine, connection or master they name is left alone; all else is as it is: processes, checkpoints,
    results.

    Returns:
        The store: a temporary directory that holds the run directories of all that name no store.
    """
    store = tmp_path / "rankzero-runs"
    request = Launcher._request
    monkeypatch.setenv(STORE_VARIABLE, str(store))
    monkeypatch.setattr(Launcher, "_request", lambda launcher: request(launcher.options(engine=LocalEngine())))
    return store


@dataclass
class FakeTrainings:
    """Replaces every training of a test.

    Attributes:
        result: Value that each training returns, or a function of the training's arguments.
        error: Error with which each training fails instead, or None.
        calls: Trainings that were called: function, positional and keyword arguments.
    """

    result: Any = None
    error: str | None = None
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def stand_in(self) -> Callable[..., Any]:
        """Returns the function that runs instead of the training."""
        result, error = self.result, self.error

        def fake(*args: Any, **kwargs: Any) -> Any:
            if error is not None:
                raise RuntimeError(error)
            return result(*args, **kwargs) if callable(result) else result

        return fake


@pytest.fixture
def fake_trainings(local_trainings: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTrainings:
    """Makes every training return the value that the test gives, without training; the rest of the path is real.

    Example:
        A test of a pipeline's other steps::

            def test_the_champion_gate(fake_trainings):
                fake_trainings.result = {"accuracy": 0.99}
                result = dg.materialize([model, champion], resources=...)
                assert fake_trainings.calls[0][2]["lr"].load() == 0.01
    """
    fakes = FakeTrainings()

    opened = durable.opened

    def faked(request: Request, train: Any, args: Any, kwargs: Any, **how: Any) -> Any:
        fakes.calls.append((train, args, kwargs))
        return opened(request, fakes.stand_in(), args, kwargs, **how)

    # Every launcher, operator and resource opens its runs by this.
    monkeypatch.setattr(durable, "opened", faked)
    return fakes
