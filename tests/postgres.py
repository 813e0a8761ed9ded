"""A PostgreSQL server for one suite of processes, where its programs are installed."""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.conftest import free_port

_DEBIAN = "/usr/lib/postgresql/*/bin"


def find_programs() -> str | None:
    """The directory of ``initdb`` and ``pg_ctl``; None if PostgreSQL is not here."""
    found = shutil.which("initdb")
    if found:
        return os.path.dirname(os.path.realpath(found))
    return next((path for path in sorted(glob.glob(_DEBIAN), reverse=True) if os.path.exists(f"{path}/initdb")), None)


class Postgres:
    """A server of its own data directory on a free port of the loopback."""

    def __init__(self, programs: str) -> None:
        self._programs = programs
        # PostgreSQL refuses to run as root; the user of its package may read what lies directly below /tmp.
        self._user = "postgres" if os.getuid() == 0 else None
        self._directory = Path(tempfile.mkdtemp(prefix="rankzero-postgres-"))
        if self._user:
            entry = pwd.getpwnam(self._user)
            os.chown(self._directory, entry.pw_uid, entry.pw_gid)
        port = free_port()
        self._run("initdb", "-D", f"{self._directory}/data", "-A", "trust", "-U", "postgres")
        options = f"-p {port} -h 127.0.0.1 -k {self._directory} -c fsync=off"
        self._run(
            "pg_ctl", "-D", f"{self._directory}/data", "-w", "-l", f"{self._directory}/log", "-o", options, "start"
        )
        self.url = f"postgresql+psycopg2://postgres@127.0.0.1:{port}/postgres"

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [f"{self._programs}/{program}", *arguments],
            user=self._user,
            cwd=self._directory,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=180,
        )

    def stop(self) -> None:
        """Ends the server and removes its data."""
        self._run("pg_ctl", "-D", f"{self._directory}/data", "-m", "immediate", "-w", "stop")
        shutil.rmtree(self._directory)
