"""Optuna's ask and tell drive a sweep, on a real study."""

from pathlib import Path

import pytest

from rankzero import Launcher
from rankzero.sweep import MedianRule, OptunaSearch

optuna = pytest.importorskip("optuna")


def train(lr: float, steps: int = 4) -> float:
    import rankzero.train as rt

    for step in range(steps):
        rt.report({"loss": (lr - 0.3) ** 2 + 1 / (step + 1)})
    if lr > 0.95:
        raise ValueError("diverged")
    return lr


def test_a_study_suggests_and_learns(tmp_path: Path) -> None:
    study = optuna.create_study(direction="minimize", sampler=optuna.samplers.TPESampler(seed=1))
    search = OptunaSearch(study, lambda trial: {"lr": trial.suggest_float("lr", 0.0, 1.0)}, num_trials=12)
    sweep = Launcher(store=tmp_path).map(train, search, metric="loss", max_parallel=2, stop=MedianRule(grace=1))
    assert len(sweep) == len(study.trials) == 12
    assert study.best_params == sweep.best.params
    states = {"succeeded": "COMPLETE", "failed": "FAIL", "stopped": "PRUNED"}
    found = {trial.params["lr"]: trial.state.name for trial in study.trials}
    for trial in sweep:
        assert found[trial.params["lr"]] == states[trial.state]
