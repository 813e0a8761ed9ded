"""The digits pipelines, whole, once in Airflow and once in Dagster, on embedded defaults.

Run by ``make demo``. Everything it makes lies in ``.demo/``.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".demo"
BIN = Path(sys.executable).parent
EXAMPLES = ROOT / "example_dags"
REQUIRED_ACCURACY = 0.95
EVERY_FIFTH_EPOCH = re.compile(r"\[0\] epoch \d*[49]: loss [\d.]+")


def run(title: str, command: list[str], env: dict[str, str], log: Path) -> None:
    """Runs a command, shows the ranks' own lines, and keeps everything in a log."""
    print(f"\n== {title}\n   $ {' '.join(command)}\n   log: {log.relative_to(ROOT)}", flush=True)
    started = time.monotonic()
    with open(log, "w") as file:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if found := EVERY_FIFTH_EPOCH.search(line):
                print(f"   {found[0]}", flush=True)
    if process.wait() != 0:
        sys.exit(f"   failed with exit code {process.returncode}; see {log}")
    print(f"   done in {time.monotonic() - started:.0f} s", flush=True)


def environment(name: str) -> dict[str, str]:
    """A home of its own for each pipeline."""
    home = HOME / name
    for part in ("home", "runs"):
        (home / part).mkdir(parents=True, exist_ok=True)
    (home / "digits" / "champion.json").unlink(missing_ok=True)
    return {**os.environ, "RANKZERO_STORE": str(home / "runs"), "DIGITS_HOME": str(home / "digits")}


def report(name: str) -> float:
    """Prints where things are and how good the new champion is."""
    home = HOME / name
    champion = json.loads((home / "digits" / "champion.json").read_text())
    runs = sorted(path.parents[1] for path in (home / "runs").glob("*/submissions/0.json"))
    print(f"   run directories: {home.relative_to(ROOT)}/runs ({len(runs)}), newest {runs[-1].name}")
    print(f"   model: {champion['model']['format']}, {champion['model']['size']:,} bytes, {champion['model']['uri']}")
    print(f"   champion's test accuracy: {champion['accuracy']:.4f}")
    return float(champion["accuracy"])


def airflow() -> float:
    """Prepare -> train (2 ranks, barrier Spark job) -> evaluate -> gate -> promote, as a DAG."""
    env = {
        **environment("airflow"),
        "AIRFLOW_HOME": str(HOME / "airflow" / "home"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(EXAMPLES),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }
    command = [str(BIN / "airflow")]
    run("Airflow: database", [*command, "db", "migrate"], env, HOME / "airflow-db.log")
    run("Airflow: retraining", [*command, "dags", "test", "digits_retraining"], env, HOME / "airflow.log")
    return report("airflow")


def dagster() -> float:
    """The same as assets, with the gate as a blocking check."""
    env = {**environment("dagster"), "DAGSTER_HOME": str(HOME / "dagster" / "home")}
    (HOME / "dagster" / "home" / "dagster.yaml").touch()
    command = [str(BIN / "dagster"), "job", "execute", "-f", str(EXAMPLES / "dagster" / "digits_retraining.py")]
    run("Dagster: retraining", [*command, "-d", str(EXAMPLES), "-j", "digits_retraining"], env, HOME / "dagster.log")
    return report("dagster")


def main() -> None:
    """Runs both and says how it went."""
    HOME.mkdir(exist_ok=True)
    accuracies = {"Airflow": airflow(), "Dagster": dagster()}
    print("\n== " + ", ".join(f"{name}: accuracy {accuracy:.4f}" for name, accuracy in accuracies.items()))
    if min(accuracies.values()) < REQUIRED_ACCURACY:
        sys.exit(f"an accuracy is below {REQUIRED_ACCURACY}")


if __name__ == "__main__":
    main()
