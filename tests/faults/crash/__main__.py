"""All crash points, by hand: ``python -m tests.faults.crash --store local --scenario run --sample 100 --jobs 4``."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.faults.crash.bench import SCENARIOS, Bench, Violation
from tests.faults.crash.points import Point, answers_of, points_of
from tests.s3 import s3_server

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
    place = Path(folder, str(os.getpid()))
    for part in ("bench", "notes"):
        (place / part).mkdir(parents=True)
    _bench = Bench(place / "bench", place / "notes", f"crash-{os.getpid()}", root)


def _record(title: str) -> list[str]:
    return _bench.record(SCENARIOS[title])


Outcome = tuple[float, str, bool, str]
"""Seconds, the point, whether a process came to it, and the violation if there was one."""


def _try(title: str, point: Point) -> Outcome:
    began, reached, wrong = time.monotonic(), True, ""
    try:
        reached = _bench.hurt(SCENARIOS[title], *point)
    except Violation as violation:
        wrong = str(violation)
    return time.monotonic() - began, f"{point[1]} {point[0]}", reached, wrong


def _enumerate(folder: str, root: str | None, asked: argparse.Namespace) -> None:
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(asked.jobs, context, _open, (folder, root)) as pool:
        print("| scenario | store | points | reached | violations | seconds | slowest |")
        print("|---" * 7 + "|", flush=True)
        for title, names in zip(asked.scenario, pool.map(_record, asked.scenario), strict=True):
            points = answers_of(names) if asked.answers else points_of(names)
            chosen = [point for point in points if asked.match in " ".join(point)]
            if asked.sample and asked.sample < len(chosen):
                chosen = sorted(random.Random(asked.seed).sample(chosen, asked.sample))
            began = time.monotonic()
            outcomes = [_shown(title, outcome) for outcome in pool.map(_try, [title] * len(chosen), chosen)]
            reached, bad = sum(outcome[2] for outcome in outcomes), sum(bool(outcome[3]) for outcome in outcomes)
            slowest = max(outcomes, default=(0.0, "none"))
            row = [
                title,
                "S3, answers" if asked.answers else asked.store,
                len(chosen),
                reached,
                bad,
                f"{time.monotonic() - began:.0f}",
            ]
            print("|", *(f"{part} |" for part in row), f"{slowest[0]:.0f}: {slowest[1]} |", flush=True)


def _shown(title: str, outcome: Outcome) -> Outcome:
    if outcome[0] > SLOW or outcome[3]:
        print(f"{title}: {outcome[1]}: {outcome[3] or 'slow'} ({outcome[0]:.0f} s)", flush=True)
    return outcome


if __name__ == "__main__":
    main()
