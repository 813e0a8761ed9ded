"""Every measurement, one after the other: a table and JSON. ``python benchmarks/all.py [name ...]``.

Takes about an hour on two cores, which should have nothing else to do. Pages of the docs that quote a number are
written again, too (`quotes.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import quotes
from measure import RESULTS_VARIABLE, to_markdown

HERE = Path(__file__).parent
NAMES = [
    "launch",
    "fresh",
    "scale",
    "results",
    "arguments",
    "data",
    "encryption",
    "checkpoints",
    "logs",
    "steps",
    "training",
    "horovod",
    "hvd_commit",
    "control_plane",
    "imports",
    "connect",
    "airflow_task",
    "airflow_scheduler",
    "dagster_step",
    "dagster_cancel",
    "failure",
    "recovery",
    "usage",
]


def main() -> None:
    unknown = set(sys.argv[1:]) - set(NAMES)
    if unknown:
        sys.exit(f"there is no {', '.join(sorted(unknown))}; choose of {', '.join(NAMES)}")
    table = HERE / "results.json"
    results = json.loads(table.read_text()) if table.exists() else {}
    with tempfile.TemporaryDirectory() as directory:
        for name in sys.argv[1:] or NAMES:
            print(f"\n# {name}", flush=True)
            environment = {**os.environ, RESULTS_VARIABLE: directory}
            began = time.monotonic()
            done = subprocess.run([sys.executable, HERE / f"{name}.py"], env=environment)
            took = time.monotonic() - began
            print(f"{name} took {took:.0f} s", flush=True)
            if done.returncode:
                print(f"{name} failed with code {done.returncode}; its last results stay")
                continue
            results[name] = {**json.loads(Path(directory, f"{name}.json").read_text()), "seconds": took}
    table.write_text(json.dumps(results, indent=1) + "\n")
    reports = [results[name] for name in NAMES if name in results]
    (HERE / "results.md").write_text("\n".join(to_markdown(report) for report in reports))
    quotes.write(results)


if __name__ == "__main__":
    main()
