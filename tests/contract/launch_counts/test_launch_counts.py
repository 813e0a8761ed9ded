"""What a warm launch costs, in things that do not depend on the clock, beside `counts.json`.

``python -m tests.contract.launch_counts.test_launch_counts`` writes that file anew. RANKZERO_SHOW names a folder where
each process lists the files that it opens and the modules that it imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.contract.launch_counts.growth import Counts, grown

HERE = Path(__file__).parent
COUNTS = HERE / "counts.json"
ENGINES = ("local", "spark")

TIMEOUT = 500.0

SUITE = ("RANKZERO_", "SPARK_", "PYTEST_", "JDK_JAVA_OPTIONS")
"""Beginnings of the names of variables that the suite sets."""


def counted(engine: str, known: Counts, place: Path) -> Counts:
    """Returns the counts of a warm launch, by role."""
    folder = place / "counts"
    folder.mkdir()
    # The environment is sent, too. What the suite adds to it is left out, but for the mark of its processes.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(SUITE)}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (HERE / "hook", ROOT)))
    environment["RANKZERO_COUNTS"] = str(folder)
    environment["TMPDIR"] = str(place)
    environment["RANKZERO_TEST_SUITE"] = os.environ.get("RANKZERO_TEST_SUITE", "suite-none").ljust(14)
    if "RANKZERO_SHOW" in os.environ:
        environment["RANKZERO_SHOW"] = os.environ["RANKZERO_SHOW"]
    command = [sys.executable, str(HERE / "program.py"), engine, str(place / "store"), json.dumps(known)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def counted_anywhere(engine: str, known: Counts) -> Counts:
    """Returns the counts in a directory whose path is always of one length, since paths are sent."""
    with tempfile.TemporaryDirectory(prefix="launch-counts-", dir="/tmp") as place:
        return counted(engine, known, Path(place))


@pytest.mark.parametrize("engine", ["local", pytest.param("spark", marks=pytest.mark.soak)])
def test_a_warm_launch_costs_what_it_did(engine: str) -> None:
    known = json.loads(COUNTS.read_text())[engine]
    found = counted_anywhere(engine, known)
    assert found.keys() == known.keys()
    assert not (more := grown(known, found)), "a warm launch costs more than before:\n" + "\n".join(more)


def test_growth_shows_both_numbers() -> None:
    known = {"caller": {"fsyncs": 8, "pages": 1000}}
    assert grown(known, {"caller": {"fsyncs": 8, "pages": 1050}}) == []
    assert grown(known, {"caller": {"fsyncs": 9}, "rank": {"forks": 1}}) == [
        "caller, fsyncs: 9, and 8 in counts.json",
        "rank, forks: 1, and 0 in counts.json",
    ]


def main() -> None:
    """Writes the file anew."""
    found = {engine: counted_anywhere(engine, {}) for engine in ENGINES}
    COUNTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
