"""What the imports cost, in milliseconds; each in a fresh interpreter, over what its orchestrator costs by itself.

Run: ``python benchmarks/imports.py``.
"""

import statistics
import subprocess
import sys

from measure import Report

RUNS = 7
PROGRAM = """
import sys, time
for name in sys.argv[1].split(","):
    if name: __import__(name)
started = time.perf_counter()
__import__(sys.argv[2])
print((time.perf_counter() - started) * 1000)
"""
LIMITS = {("", "rankzero"): 50, ("airflow.sdk", "airflow_rankzero"): 30, ("dagster", "dagster_rankzero"): 30}


def took(before: str, name: str) -> float:
    done = subprocess.run([sys.executable, "-c", PROGRAM, before, name], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    report = Report("imports", "Imports")
    for (before, name), limit in LIMITS.items():
        took(before, name)
        values = [took(before, name) for _ in range(RUNS)]
        what = f"import {name}" + (f" after {before}" if before else "")
        report.add(what, values, "ms")
        report.hold(f"{what}, ms", statistics.median(values), limit)
    report.finish()


if __name__ == "__main__":
    main()
