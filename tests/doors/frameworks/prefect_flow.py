"""A flow that trains with the Prefect integration of `example_integrations`, served by a runner of Prefect."""

import os
import sys
import time
from pathlib import Path

from prefect import flow
from prefect_rankzero import retry_after_crash, train

from rankzero import Launcher


def fit(folder: str, lr: float) -> float:
    """Trains until the test lets it finish."""
    import rankzero.train as rt

    with open(f"{folder}/began-{rt.get_context().rank}", "a") as began:
        began.write("once ")
    print("training", flush=True)
    rt.report({"loss": lr})
    while not os.path.exists(f"{folder}/may-finish"):
        time.sleep(0.05)
    return lr * 2


@flow(retries=2, on_crashed=[retry_after_crash])
def pipeline(folder: str) -> None:
    """Trains, and fails once after the training."""
    Path(folder, "process").write_text(str(os.getpid()))
    value = train(fit, folder, 0.25, launcher=Launcher(2, store=f"{folder}/runs"))
    with open(f"{folder}/delivered", "a") as delivered:
        delivered.write(f"{value} ")
    if not os.path.exists(f"{folder}/failed"):
        Path(folder, "failed").touch()
        raise RuntimeError("the step after the training failed")


def fail(folder: str) -> None:
    """Fails in each try."""
    raise ValueError("no data")


@flow
def failing(folder: str, *args: str) -> None:
    """Fails in the training, or before it if there are too many arguments."""
    train.with_options(retries=1)(fail, folder, *args, launcher=Launcher(1, store=f"{folder}/runs"))


def double(number: int) -> int:
    """Returns a value immediately."""
    return number * 2


@flow
def several(folder: str) -> None:
    """Trains twice under two names, and a third time under one of them."""
    launcher = Launcher(1, store=f"{folder}/runs")
    second = train.with_options(name="second")
    print("values", train(double, 1, launcher=launcher), second(double, 2, launcher=launcher))
    train.with_options(retries=1)(double, 3, launcher=launcher)


if __name__ == "__main__":
    if sys.argv[2:3] == ["several"]:
        several(sys.argv[1])
    if sys.argv[1:]:
        failing(*sys.argv[1:])
    pipeline.serve(name="local")
