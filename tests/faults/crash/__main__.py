"""All crash points, by hand: ``python -m tests.faults.crash --store local --scenario run --sample 100``."""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path

from tests.faults.crash.bench import SCENARIOS, Bench, Violation
from tests.faults.crash.points import points_of
from tests.s3 import s3_server


def main() -> None:
    """Prints a table of scenarios with the number of points, and each violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=["local", "s3"], default="local")
    parser.add_argument("--scenario", choices=SCENARIOS, nargs="*", default=list(SCENARIOS))
    parser.add_argument("--sample", type=int, help="points of each scenario; all by default")
    parser.add_argument("--match", default="", help="only points whose name holds this")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crash-") as folder:
        place = Path(folder)
        for part in ("bench", "notes"):
            (place / part).mkdir()
        if asked.store == "local":
            _enumerate(Bench(place / "bench", place / "notes", f"crash-{os.getpid()}"), asked)
            return
        with s3_server(place) as server:
            import s3fs

            os.environ.update(server.environment)
            s3fs.S3FileSystem(endpoint_url=server.url).mkdir("crash")
            _enumerate(Bench(place / "bench", place / "notes", f"crash-{os.getpid()}", "s3://crash"), asked)


def _enumerate(bench: Bench, asked: argparse.Namespace) -> None:
    print("| scenario | store | points | reached | violations | seconds |\n|---|---|---|---|---|---|", flush=True)
    for title in asked.scenario:
        began = time.monotonic()
        points = [point for point in points_of(bench.record(SCENARIOS[title])) if asked.match in point[0]]
        if asked.sample and asked.sample < len(points):
            points = sorted(random.Random(asked.seed).sample(points, asked.sample))
        reached = bad = 0
        for name, when in points:
            try:
                reached += bench.kill(SCENARIOS[title], name, when)
            except Violation as violation:
                reached, bad = reached + 1, bad + 1
                print(f"{title}: {when} {name}: {violation}", flush=True)
        seconds = time.monotonic() - began
        print(f"| {title} | {asked.store} | {len(points)} | {reached} | {bad} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
