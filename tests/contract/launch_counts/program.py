"""Launches until no count exceeds those that are KNOWN, and prints the counts of one launch as JSON.

``python program.py ENGINE STORE KNOWN``
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import sitecustomize
from tests import spark_classes
from tests.contract.launch_counts.growth import Counts, grown

from rankzero import Launcher, SparkEngine

LAUNCHES = 60
"""At most so many are counted; each count is the smallest of them, since heartbeats and polls come by the clock."""

PAUSE = 3.0  # Seconds after the first launch, in which a zygote loads the rest and gathers its memory

PAUSE_EVERY = 10
"""So many launches that count more are followed by another pause: on a busy machine the server needs longer."""

LAST_LAUNCH = 200.0  # Seconds from the start of this program after which no further launch begins

RANKS = 2
END_TIMEOUT = 30.0


def nothing() -> int:
    """Does what a training without any work does."""
    return 0


def launch(launcher: Launcher, folder: Path) -> Counts:
    """Returns the counts of one launch, by role; those of ranks are their sum."""
    sitecustomize.counts.clear()
    launcher.run(nothing)
    found: Counts = {"caller": dict(sitecustomize.counts)}
    deadline = time.monotonic() + END_TIMEOUT
    while len(files := list(folder.glob("*.json"))) < RANKS + 1:
        assert time.monotonic() < deadline, files
        time.sleep(0.01)
    for path in files:
        role = found.setdefault(path.name.partition("-")[0], {})
        for name, count in json.loads(path.read_text()).items():
            role[name] = role.get(name, 0) + count
        path.unlink()
    return found


def smallest(launches: list[Counts]) -> Counts:
    """Returns the smallest of each count."""
    names = {role: {name for counts in launches for name in counts[role]} for role in launches[0]}
    return {
        role: {name: min(counts[role].get(name, 0) for counts in launches) for name in sorted(found)}
        for role, found in names.items()
    }


def count_py4j(connection: Any) -> None:
    """Counts the calls into the JVM."""
    real = connection.send_command

    def counting(*args: Any, **kwargs: Any) -> Any:
        sitecustomize.counts["py4j calls"] = sitecustomize.counts.get("py4j calls", 0) + 1
        return real(*args, **kwargs)

    connection.send_command = counting


def main() -> None:
    """Counts warm launches: more of them only while a count exceeds the known one."""
    _, engine, store, known = sys.argv
    deadline = time.monotonic() + LAST_LAUNCH
    folder = Path(os.environ["RANKZERO_COUNTS"])
    launcher = Launcher(RANKS, store=store, start_timeout=240)
    if engine == "spark":
        from py4j.clientserver import ClientServerConnection
        from py4j.java_gateway import GatewayConnection
        from pyspark.sql import SparkSession

        # Only the JVM gets these options, since nothing that runs in it is counted.
        os.environ["JDK_JAVA_OPTIONS"] = spark_classes.options()
        session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
        del os.environ["JDK_JAVA_OPTIONS"]
        for connection in (ClientServerConnection, GatewayConnection):
            count_py4j(connection)
        launcher = launcher.options(engine=SparkEngine(session=session))
    launch(launcher, folder)
    time.sleep(PAUSE)
    launch(launcher, folder)
    launches = [launch(launcher, folder)]
    while len(launches) < LAUNCHES and time.monotonic() < deadline and grown(json.loads(known), smallest(launches)):
        if len(launches) % PAUSE_EVERY == 0:
            time.sleep(PAUSE)
        launches.append(launch(launcher, folder))
    print(json.dumps(smallest(launches)))


if __name__ == "__main__":
    main()
