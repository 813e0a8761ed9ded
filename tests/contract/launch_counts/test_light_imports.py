"""Importing rankzero, and what travels to executors, stays light."""

import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "pyspark", "numpy", "pandas", "airflow", "dagster", "fsspec", "cloudpickle", "asyncio", "click")


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(output.stdout.split())


def test_import_rankzero_loads_nothing_heavy() -> None:
    assert loaded_after("import rankzero").isdisjoint(HEAVY)


def test_trackers_load_their_libraries_when_they_are_used() -> None:
    loaded = loaded_after("from rankzero.tracking import *")
    assert loaded.isdisjoint({*HEAVY, "mlflow", "tensorboard"})


def test_every_public_name_is_there_and_imports_no_orchestrator_nor_changes_the_logger_of_ranks() -> None:
    loaded = loaded_after(
        "import logging, rankzero\nfor name in rankzero.__all__: getattr(rankzero, name)\n"
        "assert set(rankzero.__all__) <= set(dir(rankzero))\nranks = logging.getLogger('rankzero.ranks')\n"
        "assert not (ranks.level or ranks.handlers) and ranks.propagate"
    )
    assert loaded.isdisjoint({"airflow", "dagster", "torch", "pyspark", "numpy"})


def test_agent_and_worker_need_only_the_standard_library() -> None:
    """An executor has Python and torch; nothing of what the driver's side installs."""
    code = Path(__file__).parents[3] / "core"
    # -S: no site-packages at all.
    program = (
        f"import sys; sys.path.insert(0, {str(code)!r})\n"
        "import rankzero.agent.supervise, rankzero.worker.main, rankzero.train\n"
        "import rankzero.values.ref, rankzero.values.formats"
    )
    done = subprocess.run([sys.executable, "-S", "-I", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
