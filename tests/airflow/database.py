"""Airflow's metadata database, migrated once for each virtual environment: a migration takes three CPU seconds."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.postgres import find_programs

TIMEOUT = 240.0

_SQLITE = "sqlite:///"
_POSTGRES = "postgresql+psycopg2:"


def migrate(env: Mapping[str, str]) -> None:
    """Makes the database that an environment names, as a copy of the one that this Airflow's migrations made first."""
    url = env["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"]
    first = Path(sys.prefix, f"airflow-{importlib.metadata.version('apache-airflow-core')}")
    with open(first.with_name("airflow.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if url.startswith(_POSTGRES):
            _migrate_postgres(url.replace(_POSTGRES, "postgresql:"), Path(f"{first}.sql"), env)
        else:
            _migrate_sqlite(url.removeprefix(_SQLITE), Path(f"{first}.db"), env)


def _migrate_sqlite(path: str, first: Path, env: Mapping[str, str]) -> None:
    if not first.exists():
        # A migration that was killed has left half of it.
        Path(f"{first}.new").unlink(missing_ok=True)
        _migrate({**env, "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"{_SQLITE}{first}.new"})
        Path(f"{first}.new").rename(first)
    shutil.copyfile(first, path)


def _migrate_postgres(url: str, first: Path, env: Mapping[str, str]) -> None:
    programs = find_programs()
    if first.exists():
        _run(f"{programs}/psql", "--quiet", "--set", "ON_ERROR_STOP=1", "--dbname", url, "--file", str(first))
        return
    _migrate(env)
    _run(f"{programs}/pg_dump", "--dbname", url, "--file", f"{first}.new")
    Path(f"{first}.new").rename(first)


def _migrate(env: Mapping[str, str]) -> None:
    _run(sys.executable, "-m", "airflow", "db", "migrate", env=env)


def _run(*command: str, env: Mapping[str, str] | None = None) -> None:
    subprocess.run(command, env=env or os.environ, check=True, capture_output=True, timeout=TIMEOUT)
