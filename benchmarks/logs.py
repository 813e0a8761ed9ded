"""A million lines of two ranks to the caller: lines per second, none lost, and what it costs the rank that prints.

Run: ``python benchmarks/logs.py [lines]``. The floor is the same two processes printing into a file.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time

from measure import Report

from rankzero import Launcher
from rankzero.pipeline import open_run

RANKS = 2
LINES = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 1_000_000
RUNS = 5


def talk(lines: int) -> float:
    """Prints; returns the seconds that took."""
    started = time.perf_counter()
    for number in range(lines):
        print(f"step {number} loss 0.123456 of a line that is about as long as they are")
    return time.perf_counter() - started


def to_file(lines: int) -> float:
    started = time.perf_counter()
    with tempfile.TemporaryFile() as file:
        program = "import sys; sys.stdout.reconfigure(line_buffering=True); import logs; logs.talk(int(sys.argv[1]))"
        command = [sys.executable, "-c", program, str(lines // RANKS)]
        directory = os.path.dirname(os.path.abspath(__file__))
        ranks = [subprocess.Popen(command, stdout=file, cwd=directory) for _ in range(RANKS)]
        assert [rank.wait() for rank in ranks] == [0] * RANKS
    return time.perf_counter() - started


def main() -> None:
    report = Report("logs", f"{LINES:,} lines of {RANKS} ranks")
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as store:
        launcher = Launcher(RANKS, store=store)
        launcher.run(int)
        rates, shows, printed, floors = [], [], [], []
        for _ in range(RUNS):
            count = 0

            def take(_: str) -> None:
                nonlocal count
                count += 1

            started = time.perf_counter()
            with open_run(launcher, talk, (LINES // RANKS,), {}) as handle:
                for line in handle.lines(follow=True):
                    take(line.prefixed)
            rates.append(count / (time.perf_counter() - started))
            printed.append(handle.result())
            assert count == LINES, f"{LINES - count} lines are lost"
            shown = time.perf_counter()
            with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
                launcher.run(talk, LINES // RANKS)
            shows.append(LINES / (time.perf_counter() - shown))
            floors.append(LINES / to_file(LINES))
    rate = report.add("to the caller, from launch to the last line", rates, "lines/s")
    report.add("run() with standard output to /dev/null", shows, "lines/s")
    report.add("two processes into one file (floor)", floors, "lines/s")
    report.add("seconds in which rank 0 printed its half", printed)
    report.hold("lines per second to the caller", rate, 200_000, at_least=True)
    report.finish()


if __name__ == "__main__":
    main()
