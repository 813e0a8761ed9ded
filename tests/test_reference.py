"""docs/reference.md says what the docstrings say."""

import os
import subprocess
import sys

from tests.conftest import ROOT


def test_the_reference_is_what_the_docstrings_say() -> None:
    # In a process of its own: no variable of Airflow changes the defaults that it shows.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    command = [sys.executable, str(ROOT / "scripts" / "reference.py"), "--check"]
    checked = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stderr[-2000:]
