"""How long after `terminateRun` the ranks have exited and the run is CANCELED, in a whole `dagster dev`.

Run: ``python benchmarks/dagster_cancel.py [cancels]``. Half of the trainings would die with their step. A few more, on
Spark, ignore every signal that can be ignored.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from measure import Report

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.conftest import processes_with, until  # noqa: E402
from tests.dagster.deployment import Deployment  # noqa: E402
from tests.dagster.durable_training import FOLDER_TAG  # noqa: E402

CANCELS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 10
STUBBORN = 3
JOBS = {
    "fragile_job": ("ends with its step", CANCELS // 2),
    "durable_job": ("outlives its step", CANCELS // 2),
    "stubborn_job": ("ignores signals, on Spark", STUBBORN),
}
"""What its training does, and how often it is cancelled."""
MARK = f"of-benchmark-{os.getpid()}"
TARGET = 3.0
START_TIMEOUT = 180.0


def cancel_once(dagster: Deployment, root: Path, job: str) -> tuple[float, float]:
    """Seconds from the call until no rank is left, and until the run is CANCELED."""
    run_id = dagster.launch(job, {FOLDER_TAG: str(root)})

    def trains() -> bool:
        states = (root / "runs").glob(f"{run_id[:8]}-*/submissions/*/status.json")
        return any(json.loads(state.read_text())["checkpoint"] for state in states)

    until(trains, START_TIMEOUT, "ranks that train")
    assert processes_with(f"OF_RANK={MARK}")
    called = time.perf_counter()
    dagster.terminate(run_id)
    until(lambda: not processes_with(f"OF_RANK={MARK}"), START_TIMEOUT, "the end of the ranks")
    gone = time.perf_counter() - called
    until(lambda: dagster.status(run_id) == "CANCELED", START_TIMEOUT, "a canceled run")
    return gone, time.perf_counter() - called


def main() -> None:
    report = Report("dagster_cancel", f"Terminating a Dagster run, {CANCELS} times: from the call in GraphQL")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "home").mkdir()
        variables = {"TEST_STORE": f"{root}/runs", "TEST_ASSETS": f"{root}/assets", "TEST_RANK_MARK": MARK}
        dagster = Deployment(root / "home", ROOT / "tests/dagster/durable_training.py", variables)
        everything: list[float] = []
        try:
            for job, (what, count) in JOBS.items():
                measured = [cancel_once(dagster, root, job) for _ in range(count)]
                gone, canceled = zip(*measured, strict=True)
                report.add(f"a training that {what}: ranks gone", gone)
                report.add(f"a training that {what}: run CANCELED", canceled)
                everything += gone
        finally:
            dagster.stop()
    print(f"median {statistics.median(everything):.2f} s, worst {max(everything):.2f} s")
    report.hold("ranks gone, worst", max(everything), TARGET)
    report.finish()


if __name__ == "__main__":
    main()
