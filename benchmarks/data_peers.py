"""Rows per second of Petastorm and of Ray Data, one reader of Parquet files each, as many times as asked for.

Prints them as JSON, those that can be imported: Petastorm 0.13 is in want of a pyarrow below 12. A program of its own:
a Ray that runs takes time from what is measured beside it.

Run: ``python benchmarks/data_peers.py folder runs``.
"""

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from data import BATCH, touch


def petastorm(folder: str) -> Iterator[Any]:
    """Whole batches, as its documentation has it for PyTorch; of one epoch, in the order of the files."""
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader

    reader = make_batch_reader(f"file://{folder}", num_epochs=1, shuffle_row_groups=False, workers_count=2)
    with BatchedDataLoader(reader, batch_size=BATCH) as loader:
        yield from loader


def ray_data(folder: str) -> Iterator[Any]:
    """As a worker of Ray Train reads its shard."""
    import ray

    if not ray.is_initialized():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
    yield from ray.data.read_parquet(folder).iter_torch_batches(batch_size=BATCH)


def rate(batches: Iterator[Any]) -> float:
    """Rows per second, from the call to the last row."""
    started, rows = time.perf_counter(), 0
    for batch in batches:
        touch(batch)
        rows += len(batch["c0"])
    return rows / (time.perf_counter() - started)


def main() -> None:
    folder, runs = sys.argv[1], int(sys.argv[2])
    warnings.simplefilter("ignore")
    found = {}
    with contextlib.redirect_stdout(sys.stderr):
        for name, batches in (("Petastorm", petastorm), ("Ray Data", ray_data)):
            with contextlib.suppress(ImportError):
                # What the first one imports and starts is nobody's time.
                found[name] = [rate(batches(folder)) for _ in range(runs + 1)][1:]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
