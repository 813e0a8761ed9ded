"""`@distributed`: a function that trains on all ranks when it is called."""

from __future__ import annotations

import pickle
import secrets
import types
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from tests.loading import load_module

from rankzero import InvalidJobError, Launcher, distributed

WAIT = 120.0


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKZERO_STORE", str(tmp_path / "runs"))


@distributed(num_processes=2)
def world(factor: int = 1) -> int:
    import rankzero.train as rt

    return factor * rt.get_context().world_size


@distributed(num_processes=2)
def nested() -> tuple[int, bool]:
    """Calls another decorated function, which in a rank is the plain function."""
    import os

    return world(10), "RANKZERO_RANK_PROCESS" in os.environ


def test_a_call_trains_on_all_ranks() -> None:
    assert world(factor=3) == 6
    assert world.local(3) == 3
    assert world.options(num_processes=1)(3) == 3
    assert world.launcher.num_processes == 2
    assert nested() == (20, True)


def test_a_launcher_runs_the_plain_function_with_its_own_options() -> None:
    launcher = Launcher(1)
    assert launcher.submit(world, 5).result(WAIT) == 5
    assert launcher.run(f"{__name__}:world", 5) == 5
    with pytest.raises(InvalidJobError, match=r"the arguments do not fit world\(factor"):
        launcher.run(world, 1, 2)


MODULE = """
from rankzero import distributed

SEEN = []

def seen():
    return SEEN

@distributed(num_processes=1)
def train():
    return SEEN is seen(), __name__
"""


def test_a_module_of_a_decorated_function_exists_once_in_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"jobs_{secrets.token_hex(4)}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = load_module(name)
    assert module.train() == module.train.options(start_timeout=60.0)() == (True, name)
    assert pickle.loads(pickle.dumps(module.train)) is module.train


def test_a_decorated_function_of_main_keeps_its_options_in_another_process() -> None:
    made: dict[str, Any] = {"__name__": "__main__", "distributed": distributed}
    exec("@distributed(num_processes=3)\ndef train(): return 1", made)
    again = pickle.loads(cloudpickle.dumps(made["train"]))
    assert again.launcher.num_processes == 3
    assert again.local() == 1


@distributed(num_processes=2)
def scaled(lr: float) -> float:
    """Returns a multiple."""
    return 2 * lr


def test_ranks_have_the_methods_of_a_decorated_function_that_is_pickled_by_value() -> None:
    # As in a notebook.
    own = types.FunctionType(scaled.launch_function.__code__, {"__name__": "__main__"}, "scaled")
    fit = Launcher(1)
    decorated = type(scaled)(own, fit)

    def train() -> list[Any]:
        return [decorated(1.0), decorated.local(lr=1.5), decorated.options(num_processes=4)(lr=2.0), decorated.__name__]

    assert fit.run(train) == [2.0, 3.0, 4.0, "scaled"]


class Trainer:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    @distributed(num_processes=2)
    def fit(self, steps: int) -> float:
        """Trains."""
        import rankzero.train as rt

        return self.rate * steps * rt.get_context().world_size

    def double(self, steps: int) -> float:
        return 2 * self.fit.local(steps)


def test_a_method_trains_with_the_object_that_it_belongs_to() -> None:
    trainer = Trainer(0.5)
    assert trainer.fit(3) == 3.0
    assert trainer.fit.options(num_processes=1)(steps=4) == 2.0
    assert trainer.double(3) == 3.0
    assert trainer.fit.__doc__ == "Trains."
    assert Trainer.fit.launcher.num_processes == 2


def test_a_wrong_use_is_refused() -> None:
    with pytest.raises(InvalidJobError, match=r"@distributed\(...\) decorates a function, not 4"):
        distributed(2)(4)  # type: ignore[arg-type]
    with pytest.raises(InvalidJobError, match="num_processes"):
        distributed(lambda: 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'procs'"):
        world.options(procs=2)
