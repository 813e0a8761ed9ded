"""All crash points, by hand: ``python -m tests.faults.crash --store local --scenario run --sample 100 --jobs 4``."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.faults.crash.bench import SCENARIOS, Bench, Violation
from tests.faults.crash.points import Point, answers_of, points_of
from tests.s3 import s3_server

RECORDINGS = 3
"""Runs of a scenario whose operations are its points."""

TRIES = 3
"""Runs in which a process may come to a point that depends on timing."""

SLOW = 12.0
"""Seconds after which a point is printed: somebody has waited there for a process that could be queried."""

_bench: Bench
"""The bench of this process."""


def main() -> None:
    """Prints a table of scenarios with the number of points, and each violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=["local", "s3"], default="local")
    parser.add_argument("--answers", action="store_true", help="wrong answers of the S3 server, in place of kills")
    parser.add_argument("--scenario", choices=SCENARIOS, nargs="*", default=list(SCENARIOS))
    parser.add_argument("--sample", type=int, help="points of each scenario; all by default")
    parser.add_argument("--match", default="", help="only points whose name holds this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="points that are tried at the same time")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crash-") as folder:
        if asked.store == "local" and not asked.answers:
            _enumerate(folder, None, asked)
            return
        with s3_server(Path(folder)) as server:
            import s3fs

            os.environ.update(server.environment)
            s3fs.S3FileSystem(endpoint_url=server.url).mkdir("crash")
            _enumerate(folder, "s3://crash", asked)


def _open(folder: str, root: str | None) -> None:
    global _bench
    bench, notes = (Path(folder, f"{part}-{os.getpid()}") for part in ("bench", "notes"))
    for place in (bench, notes):
        place.mkdir()
    _bench = Bench(bench, notes, f"crash-{os.getpid()}", root)


def _record(title: str) -> list[str]:
    """Returns the names of a scenario's points. Which exist depends on timing, so several runs are recorded."""
    recordings = [_bench.record(SCENARIOS[title]) for _ in range(RECORDINGS)]
    return list(dict.fromkeys(name for names in recordings for name in names))


@dataclass(frozen=True)
class Outcome:
    """The outcome of one point.

    Attributes:
        seconds: How long the scenario and its recovery took.
        point: The point, in words.
        reached: True if a process came to the point.
        wrong: The violation; empty if there was none.
    """

    seconds: float
    point: str
    reached: bool
    wrong: str = ""


def _try(title: str, point: Point) -> Outcome:
    began, reached, wrong = time.monotonic(), True, ""
    for _ in range(TRIES):
        try:
            reached = _bench.hurt(SCENARIOS[title], *point)
        except Violation as violation:
            wrong = str(violation)
        except Exception:
            wrong = traceback.format_exc()
        if reached or wrong:
            break
    return Outcome(time.monotonic() - began, f"{point[1]} {point[0]}", reached, wrong)


def _enumerate(folder: str, root: str | None, asked: argparse.Namespace) -> None:
    context, began = multiprocessing.get_context("fork"), time.monotonic()
    with ProcessPoolExecutor(asked.jobs, context, _open, (folder, root)) as pool:
        recorded = pool.map(_record, asked.scenario)
        # The points of all scenarios are in one queue, in which the next one is tried while the last ones wait.
        tried = [
            (title, _submit(pool, title, names, asked)) for title, names in zip(asked.scenario, recorded, strict=True)
        ]
        print("| scenario | store | points | reached | violations | slowest |")
        print("|---" * 6 + "|", flush=True)
        store = "S3, answers" if asked.answers else asked.store
        total = [_row(title, store, [_shown(title, future.result()) for future in futures]) for title, futures in tried]
    points, reached, violations = map(sum, zip(*total, strict=True))
    print(f"| all | {store} | {points} | {reached} | {violations} | {time.monotonic() - began:.0f} s in all |")


def _submit(
    pool: ProcessPoolExecutor, title: str, names: list[str], asked: argparse.Namespace
) -> list[Future[Outcome]]:
    points = answers_of(names) if asked.answers else points_of(names)
    chosen = [point for point in points if asked.match in " ".join(point)]
    if asked.sample and asked.sample < len(chosen):
        chosen = sorted(random.Random(asked.seed).sample(chosen, asked.sample))
    return [pool.submit(_try, title, point) for point in chosen]


def _row(title: str, store: str, outcomes: list[Outcome]) -> tuple[int, int, int]:
    """Prints the row of a scenario; returns its points, those that were reached, and violations."""
    counts = len(outcomes), sum(one.reached for one in outcomes), sum(bool(one.wrong) for one in outcomes)
    slowest = max(outcomes, key=lambda one: one.seconds, default=Outcome(0.0, "none", False))
    print("|", title, "|", store, *(f"| {count}" for count in counts), f"| {slowest.seconds:.0f} s: {slowest.point} |")
    for one in outcomes:
        if not one.reached:
            print(f"{title}: not reached: {one.point}")
    sys.stdout.flush()
    return counts


def _shown(title: str, outcome: Outcome) -> Outcome:
    if outcome.seconds > SLOW or outcome.wrong:
        print(f"{title}: {outcome.point}: {outcome.wrong or 'slow'} ({outcome.seconds:.0f} s)", flush=True)
    return outcome


if __name__ == "__main__":
    main()
