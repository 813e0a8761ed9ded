"""What the tests of trackers share: a training that is restarted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def train(lr: float, steps: int = 2, api_key: str = "") -> dict[str, float]:
    import os
    import signal

    import rankzero.train as rt

    context = rt.get_context()
    for step in range(steps):
        rt.report({"step": step, "loss": lr / (step + 1)})
    rt.barrier()
    if context.attempt == 0 and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rt.barrier()
    return {"accuracy": 0.5}


@pytest.fixture
def training() -> Callable[..., Any]:
    return train
