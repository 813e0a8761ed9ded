"""What can be launched, what is refused, and what travels along."""

import io
import os
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rankzero import InvalidJobError, ResultRef
from rankzero.submit import pack


def train(lr: float, *, steps: int = 1) -> float:
    return lr * steps


def refused(train: object, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(InvalidJobError) as caught:
        pack.build(train, args, kwargs)
    return str(caught.value)


@pytest.mark.parametrize("value", [None, 3, [], ["bash", 3]])
def test_train_must_be_launchable(value: object) -> None:
    assert f"train is {value!r}" in refused(value)


def test_a_script_must_be_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def (")
    assert "is not Python" in refused(str(tmp_path / "train.py"))


def test_module_references_are_resolved_and_checked() -> None:
    assert pack.build("json:dumps", ({},), {}).name == "dumps"
    assert "has no attribute 'nothing'" in refused("json:nothing")
    assert "cannot be imported" in refused("no_such_module:train")


def test_an_argument_and_a_closure_that_cannot_be_pickled_are_refused() -> None:
    lock = threading.Lock()
    assert "argument 'lr' (a lock) cannot be pickled: cannot pickle '_thread.lock' object" in refused(train, lock)
    assert "cannot be pickled: cannot pickle '_thread.lock' object" in refused(lambda: lock)


def test_references_are_found_wherever_they_are() -> None:
    one, two, three = (ResultRef(path, "json", "0", 1) for path in ("/x", "/y", "/z"))
    built = pack.build(dict, (), {"a": one, "b": [two, {"c": (three,)}, one]})
    assert sorted(ref.uri for ref in built.refs) == ["/x", "/y", "/z"]


def run_elsewhere(built: pack.Payload, tmp_path: Path) -> str:
    """Unpickles and calls the payload in a process that knows nothing of this one's modules."""
    (tmp_path / "payload.pkl").write_bytes(b"".join(built.data))
    extra = []
    if built.modules.zipped:
        with zipfile.ZipFile(io.BytesIO(built.modules.zipped)) as archive:
            archive.extractall(tmp_path / "modules")
        extra = [str(tmp_path / "modules")]
    program = f"""
        import sys
        from rankzero.values.pickled import open_packed
        sys.path[:0] = {extra!r}
        payload = open_packed({str(tmp_path / "payload.pkl")!r})
        print(payload["function"](*payload["args"], **payload["kwargs"]))
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(program)], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def closure(factor: int) -> Callable[[int], int]:
    return lambda value: value * factor


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "value"),
    [
        (train, (0.5,), {"steps": 4}, "2.0"),
        (closure(3), (2,), {}, "6"),
        (partial(train, steps=2), (1.5,), {}, "3.0"),
        (lambda: train(1.0), (), {}, "1.0"),
    ],
)
def test_functions_travel_by_value(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: str, tmp_path: Path
) -> None:
    assert run_elsewhere(pack.build(function, args, kwargs), tmp_path) == value


CACHED = """
import functools

@functools.lru_cache(maxsize=3)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

class Job:
    @functools.cached_property
    def lr(self):
        return 0.5

    @functools.cache
    def scaled(self, factor):
        return self.lr * factor

def train():
    job = Job()
    assert fib.__name__ == "fib"
    return fib(10), fib.cache_parameters(), job.scaled(2), Job.scaled.cache_info().misses, job.__dict__
"""


def test_cached_functions_of_a_notebook_travel_with_an_empty_cache(tmp_path: Path) -> None:
    notebook: dict[str, Any] = {"__name__": "__main__"}
    exec(CACHED, notebook)
    expected = notebook["train"]()
    found = run_elsewhere(pack.build(notebook["train"], (), {}), tmp_path)
    assert found == str((55, {"maxsize": 3, "typed": False}, 1.0, 1, {"lr": 0.5})) == str(expected)


@pytest.fixture
def user_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    package = tmp_path / "src" / "acme_models"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text("import acme_constants\nSIZE = acme_constants.SIZE\ndef size(): return SIZE\n")
    (package / "builder.py").write_text("from acme_models.training import Net\ndef build(): return Net()\n")
    (package.parent / "acme_constants.py").write_text("SIZE = 8\n")
    (package / "training.py").write_text(
        textwrap.dedent(
            """
            import functools
            import threading
            import acme_models.nets as nets
            from .nets import size

            class Net:
                def size(self): return size()

            def by_value(): return Net().size()
            def by_module(): return nets.size()
            def lazily():
                from acme_models.nets import size as lazy
                return lazy()
            def relatively():
                from .nets import size as relative
                return relative()
            def same_class():
                from acme_models import builder
                return isinstance(builder.build(), Net)
            def torch_save():
                import io, torch
                torch.save(Net(), io.BytesIO())
                return "saved"
            @functools.lru_cache
            def cached(): return SIZE
            SIZE = size()
            LOCK = threading.Lock()
            def uses_cached():
                with LOCK:
                    return cached()
            """
        )
    )
    monkeypatch.syspath_prepend(str(package.parent))
    import importlib

    module = importlib.import_module("acme_models.training")
    yield module
    for name in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["by_value", "by_module", "lazily", "relatively", "uses_cached"])
def test_functions_of_a_user_package_bring_the_modules_they_need(user_package: Any, name: str, tmp_path: Path) -> None:
    built = pack.build(getattr(user_package, name), (), {})
    assert run_elsewhere(built, tmp_path) == "8"


@pytest.mark.parametrize(("name", "value"), [("same_class", "True"), ("torch_save", "saved")])
def test_every_class_of_a_user_package_exists_once(user_package: Any, name: str, value: str, tmp_path: Path) -> None:
    """By value and by source at the same time, isinstance, except and pickle would silently go wrong."""
    assert run_elsewhere(pack.build(getattr(user_package, name), (), {}), tmp_path) == value


@pytest.mark.parametrize("line", ["import dagster", "from airflow.sdk import task", "from . import pipeline"])
def test_a_module_that_imports_an_orchestrator_travels_by_value(
    user_package: Any, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors have no orchestrator; what the function itself does not use is not needed there."""
    # Airflow, which takes seconds to import, is not imported: the source counts.
    monkeypatch.setitem(sys.modules, "airflow", None)
    package = Path(user_package.__file__).parent
    (package / "pipeline.py").write_text("import dagster\n")
    (package / "defs.py").write_text(f"try:\n    {line}\nexcept ImportError: pass\ndef train(): return 'trained'\n")
    import importlib

    importlib.invalidate_caches()
    defs = importlib.import_module("acme_models.defs")
    built = pack.build(defs.train, (), {})
    assert run_elsewhere(built, tmp_path) == "trained"
    assert built.modules.zipped is None


def test_files_without_a_date_and_dead_links_do_no_harm(user_package: Any, tmp_path: Path) -> None:
    package = Path(user_package.__file__).parent
    os.utime(package / "nets.py", (0, 0))
    (package / ".#nets.py").symlink_to("nobody@nowhere")
    assert run_elsewhere(pack.build(user_package.by_value, (), {}), tmp_path) == "8"


def test_a_module_of_the_user_wins_over_an_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "iniconfig.py").write_text("MARK = 'mine'\n")
    monkeypatch.syspath_prepend(str(tmp_path / "project"))

    def train() -> str:
        import iniconfig

        return str(iniconfig.MARK)

    assert run_elsewhere(pack.build(train, (), {}), tmp_path) == "mine"


class Submitting:
    """An argument that submits something itself while it is pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (pack.build(train, (0.1,), {}).name,)


def test_what_is_submitted_may_submit() -> None:
    assert pack.build(len, ([Submitting()],), {}).name == "len"


def test_installed_packages_do_not_travel() -> None:
    def uses_torch() -> str:
        import torch

        return torch.__version__

    assert pack.build(uses_torch, (), {}).modules.zipped is None


def test_the_world_of_this_process_is_refused() -> None:
    state = type("PartialState", (), {"__module__": "accelerate.state"})()
    assert "every rank would train alone" in refused(lambda: state.num_processes)
