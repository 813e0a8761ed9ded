"""Airflow's metadata database, migrated once for the whole suite: a migration takes ten seconds of processor time."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TIMEOUT = 240.0

SHARED = "RANKZERO_TEST_SHARED"
"""Variable with the directory that all processes of the suite share."""

_SQLITE = "sqlite:///"


def migrate(env: Mapping[str, str]) -> None:
    """Makes the database that an environment names; on SQLite a copy of the one that was made first."""
    url = env["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"]
    if not url.startswith(_SQLITE):
        _run(env)
        return
    template = Path(os.environ[SHARED], "airflow.db")
    with open(template.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not template.exists():
            _run({**env, "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"{_SQLITE}{template}.new"})
            Path(f"{template}.new").rename(template)
    shutil.copyfile(template, url.removeprefix(_SQLITE))


def _run(env: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "airflow", "db", "migrate"]
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=TIMEOUT)
