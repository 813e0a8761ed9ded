"""The tests that need no deployment, with other versions than the lock's, each row in a venv of its own.

Run by ``make test-matrix``; ``ROWS="airflow-3.1.0 torch-2.4.0"`` names some. docs/before-you-adopt.md has what was run.
Needs uv: old releases get the other packages of their time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venv-matrix"

TOOLS = "numpy pandas<3 pyarrow psutil pytest pytest-timeout pytest-xdist hypothesis scikit-learn mypy s3fs"
TOOLS += " moto[s3] flask flask-cors hatchling editables setuptools wheel universal-pathlib"

AIRFLOW = "operator trigger links provider connection tries listeners arguments templates outlets secrets"
AIRFLOW += " xcom compat"
DAGSTER = "asset multi_asset op resource stream failure step io_manager partitions checks metadata"
DAGSTER += " fields output by_reference step_run"


@dataclass(frozen=True)
class Row:
    """A version and what it is tested by.

    Attributes:
        release: The package whose version differs from the lock's.
        tests: Files below tests/; none where the package only has to be silent.
        unlocked: What else of the lock does not fit to it, as the beginning of its name.
        date: The other packages are the newest of this day; None takes the lock's.
        python: The interpreter of the row's venv.
    """

    release: str
    tests: tuple[str, ...] = ()
    unlocked: tuple[str, ...] = ()
    date: str | None = None
    python: str = sys.executable

    @property
    def name(self) -> str:
        """``airflow-3.1.0`` for ``apache-airflow==3.1.0``; ``system-python`` for the machine's own Python."""
        if self.python != sys.executable:
            return "system-python"
        return self.release.removeprefix("apache-").replace("==", "-")


def _files(pattern: str, names: str) -> tuple[str, ...]:
    return tuple(pattern.format(name) for name in names.split())


_AIRFLOW = _files("airflow/test_{}.py", AIRFLOW)
_DAGSTER = _files("dagster/test_dagster_{}.py", DAGSTER)
_SPARK = ("contract/engines/test_spark.py", "contract/engines/test_spark_refusals.py", "doors/compat", "contract/data")
_TORCH = _files("contract/test_{}.py", "launcher result")
_PYTHON = ("tries", "protocol/agent", "docs/packaging", *_TORCH, "contract/engines/test_spark.py")

ROWS = (
    # Beside it the package is silent.
    Row("apache-airflow==2.11.0", date="2025-08-01"),
    Row("apache-airflow==3.1.0", _AIRFLOW, date="2025-10-15"),
    Row("apache-airflow==3.2.0", _AIRFLOW, date="2026-05-15"),
    # Before it a partition key like "../x" could leave its asset's folder.
    Row("dagster==1.13.6", _DAGSTER, ("dagster",)),
    Row("pyspark==3.5.0", _SPARK, ("pyspark", "py4j")),
    Row("pyspark==4.0.0", _SPARK, ("pyspark", "py4j")),
    Row("torch==2.4.0", _TORCH, ("torch",)),
    Row("torch==2.15.0", _TORCH, ("torch",)),
    # Debian 12 has Python 3.11.2, whose tarfile lacks the filters that 3.11.4 has.
    Row("pyspark", _PYTHON, python="/usr/bin/python3"),
)

_SILENT = "import sys; from airflow.plugins_manager import ensure_plugins_loaded as load; load()\n"
_SILENT += "from airflow.providers_manager import ProvidersManager as P; P().initialize_providers_hooks(); P().hooks"


def run(row: Row) -> bool:
    """Installs a row and runs its tests; True if they passed."""
    print(f"\n== {row.name}", flush=True)
    venv = VENVS / row.name
    python = str(venv / "bin" / "python")
    _uv("venv", "--allow-existing", "--python", row.python, str(venv))
    install = ("pip", "install", "--python", python)
    own = re.compile("|".join(["uv==", *row.unlocked]))
    lock = venv / "constraints.txt"
    lock.write_text("".join(line for line in _lock_of(python).open() if not own.match(line) and not row.date))
    if row.date:
        _uv(*install, "--exclude-newer", row.date, row.release)
    if not row.tests:
        _uv(*install, "--no-deps", str(ROOT))
        return _is_silent(python, venv)
    _uv(*install, "--constraint", str(lock), row.release, *TOOLS.split())
    _uv(*install, "--constraint", str(lock), row.release, "--no-build-isolation", "-e", f"{ROOT}[spark,torch]")
    tests = [f"tests/{name}" for name in row.tests]
    return not subprocess.run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], cwd=ROOT).returncode


def _lock_of(python: str) -> Path:
    """Returns the lock for the version of an interpreter."""
    version = "import sys; print('{}.{}'.format(*sys.version_info))"
    found = subprocess.run([python, "-c", version], check=True, capture_output=True, text=True)
    return ROOT / "constraints" / f"{found.stdout.strip()}.txt"


def _is_silent(python: str, venv: Path) -> bool:
    """True if neither plugins nor providers of an old Airflow say a word of this package."""
    env = {"AIRFLOW_HOME": str(venv / "home"), "PATH": str(venv / "bin")}
    done = subprocess.run([python, "-c", _SILENT], env=env, capture_output=True, text=True)
    words = [line for line in (done.stdout + done.stderr).splitlines() if "rankzero" in line]
    print(*(words or ["silent"]), sep="\n")
    return done.returncode == 0 and not words


def _uv(*arguments: str) -> None:
    uv = shutil.which("uv") or str(Path(sys.executable).parent / "uv")
    # As in scripts/setup.sh: the certificates of the system.
    env = {**os.environ, "UV_SYSTEM_CERTS": "true", "UV_NATIVE_TLS": "true"}
    subprocess.run([uv, arguments[0], *(arguments[1:2]), "--quiet", *arguments[2:]], check=True, cwd=ROOT, env=env)


def main() -> None:
    """Runs the named rows, or all."""
    known = {row.name: row for row in ROWS}
    names = sys.argv[1:] or list(known)
    if unknown := set(names) - set(known):
        sys.exit(f"there is no row {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    failed = [name for name in names if not run(known[name])]
    sys.exit(f"\nfailed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
