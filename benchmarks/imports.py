"""What the imports cost, in milliseconds; each in a fresh interpreter, over what its orchestrator costs by itself.

Run: ``python benchmarks/imports.py``. The packages load their parts when they are asked for, so these are the
names that people use.
"""

import os
import statistics
import subprocess
import sys
import tempfile

from measure import Report

RUNS = 7
CACHE = tempfile.TemporaryDirectory(prefix="rankzero-bench-")
PROGRAM = """
import time
{before}
started = time.perf_counter()
{statement}
print((time.perf_counter() - started) * 1000)
"""
AIRFLOW = "from airflow.sdk import DAG, BaseOperator, task"
STATEMENTS = {
    "import rankzero": ("", 50),
    "from rankzero import Launcher, SparkEngine": ("", 50),
    "from airflow_rankzero import TorchDistributorOperator, torch_distributor": (AIRFLOW, 30),
    "from dagster_rankzero import TorchDistributorResource, torch_asset": ("import dagster", 30),
}


def took(before: str, statement: str) -> float:
    program = PROGRAM.format(before=before, statement=statement)
    # Compiled once, as in any installation.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": CACHE.name}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout.split()[-1])


def main() -> None:
    report = Report("imports", "Imports")
    for statement, (before, limit) in STATEMENTS.items():
        took(before, statement)
        values = [took(before, statement) for _ in range(RUNS)]
        report.add(f"`{statement}`" + (f" after `{before}`" if before else ""), values, "ms")
        report.hold(f"`{statement}`, ms", statistics.median(values), limit)
    report.finish()


if __name__ == "__main__":
    main()
