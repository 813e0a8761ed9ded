"""Ranks that report at their own pace: those that have returned do not cost the others their checkpoints."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import rankzero.train as rt
from rankzero import Launcher

ROWS = 60
KILLED_AT = 20


def score(folder: str) -> object:
    """Rank 1 reports twice and returns; rank 0 reports each batch, and is killed long after that."""
    shard, checkpoint, context = rt.get_dataset_shard(), rt.get_checkpoint(), rt.get_context()
    if checkpoint:
        shard.load_state_dict(checkpoint.load(rank=0))
    Path(folder, f"from-{context.attempt}-{context.rank}").write_text(checkpoint.id if checkpoint else "")

    def scored() -> object:
        for number, batch in enumerate(shard.iter_batches(1, pad=False), 1):
            yield {"id": batch["x"]}
            if context.attempt:
                continue
            if context.rank == 0:
                while number == 3 and not Path(folder, "read").exists():
                    time.sleep(0.01)
                rt.report({}, checkpoint=shard.state_dict(), sharded=True)
                if number > 2:
                    # Until rank 1 has returned.
                    rt.context.await_checkpoint()
                if number == KILLED_AT:
                    os.kill(os.getpid(), signal.SIGKILL)
            elif number in (5, 10):
                rt.report({}, checkpoint=shard.state_dict(), sharded=True)
        if context.rank:
            Path(folder, "read").touch()

    return rt.write_rows(scored())  # type: ignore[arg-type]


def test_the_slower_rank_loses_no_more_than_one_report(launcher: Launcher, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(pa.table({"x": list(range(ROWS))}), data / "part.parquet")
    table = Launcher(2, store=launcher.store, dataset=str(data), max_restarts=1).run(score, str(tmp_path))
    assert sorted(table.to_pandas()["id"]) == list(range(ROWS))
    started_from = f"0000-{KILLED_AT - 1:06d}"
    assert [(tmp_path / f"from-1-{rank}").read_text() for rank in (0, 1)] == [started_from] * 2
