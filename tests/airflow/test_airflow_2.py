"""Beside an Airflow 2 the package offers nothing and says nothing. (A real one: `scripts/test-matrix.py`.)"""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def airflow_2(tmp_path: Path) -> Path:
    """As much of an Airflow 2 as is looked at: it has no `airflow.sdk`."""
    package = tmp_path / "airflow"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.11.2'\n")
    (package / "plugins_manager.py").write_text("class AirflowPlugin:\n    listeners = []\n")
    return tmp_path


def beside(airflow_2: Path, code: str) -> str:
    program = f"import sys; sys.path.insert(0, {str(airflow_2)!r})\n{code}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def test_its_managers_find_nothing_and_a_user_is_told_what_it_needs(airflow_2: Path) -> None:
    code = (
        "import airflow_rankzero\n"
        "from airflow_rankzero.plugin import RankZeroPlugin\n"
        "RankZeroPlugin.on_load()\n"
        "from airflow_rankzero.provider_info import get_provider_info\n"
        "print(RankZeroPlugin.listeners, sorted(get_provider_info()))\n"
        "try:\n"
        "    airflow_rankzero.TorchDistributorOperator\n"
        "except ImportError as error:\n"
        "    print(error)"
    )
    nothing, error = beside(airflow_2, code).splitlines()
    assert nothing == "[] ['description', 'name', 'package-name', 'versions']"
    assert "Airflow 3.1 or newer" in error
