"""All crash points, by hand: ``python -m tests.faults.crash --store local --scenario run --sample 100 --jobs 4``."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.faults.crash.bench import SCENARIOS, Bench, Point, Violation, answers_of, points_of
from tests.s3 import s3_server
from tests.suite import end_broker, start_broker

RECORDINGS = 3  # Runs of a scenario whose operations are its points: which exist depends on timing

_bench: Bench  # Of this process


def main() -> None:
    """Prints the number of points of each scenario, and each violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=["local", "s3"], default="local")
    parser.add_argument("--answers", action="store_true", help="wrong answers of the S3 server, in place of kills")
    parser.add_argument("--scenario", choices=SCENARIOS, nargs="*", default=list(SCENARIOS))
    parser.add_argument("--sample", type=int, help="points of each scenario; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="points that are tried at the same time")
    asked = parser.parse_args()
    violations = 0
    with contextlib.ExitStack() as stack:
        stack.callback(end_broker, start_broker())
        folder, root = stack.enter_context(tempfile.TemporaryDirectory(prefix="crash-")), None
        if asked.store == "s3" or asked.answers:
            import s3fs

            server, root = stack.enter_context(s3_server(Path(folder))), "s3://crash"
            os.environ.update(server.environment)
            s3fs.S3FileSystem(endpoint_url=server.url).mkdir("crash")
        fork = multiprocessing.get_context("fork")
        pool = stack.enter_context(ProcessPoolExecutor(asked.jobs, fork, _open, (folder, root)))
        for title, names in zip(asked.scenario, pool.map(_record, asked.scenario), strict=True):
            points = answers_of(names) if asked.answers else points_of(names)
            points = random.Random(asked.seed).sample(points, min(asked.sample or len(points), len(points)))
            wrong = list(filter(None, pool.map(_try, [title] * len(points), points)))
            violations += len(wrong)
            print(f"{title}: {len(points)} points, {len(wrong)} violations", *wrong, sep="\n", flush=True)
    raise SystemExit(violations > 0)


def _open(folder: str, root: str | None) -> None:
    global _bench
    bench, notes = (Path(folder, f"{part}-{os.getpid()}") for part in ("bench", "notes"))
    for place in (bench, notes):
        place.mkdir()
    _bench = Bench(bench, notes, f"crash-{os.getpid()}", root)


def _record(title: str) -> list[str]:
    recordings = [_bench.record(SCENARIOS[title]) for _ in range(RECORDINGS)]
    return list(dict.fromkeys(name for names in recordings for name in names))


def _try(title: str, point: Point) -> str:
    """Returns the violation at a point; empty if there was none, also if no process came there in this run."""
    try:
        _bench.hurt(SCENARIOS[title], *point)
    except Violation as violation:
        return f"{point[1]} {point[0]}: {violation}"
    except Exception:
        return f"{point[1]} {point[0]}: {traceback.format_exc()}"
    return ""


if __name__ == "__main__":
    main()
