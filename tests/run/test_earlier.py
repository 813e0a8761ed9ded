"""What a user reported stays when another training begins under the same run id, until it is collected."""

import logging
import time
from pathlib import Path

import pytest

from rankzero import Launcher
from rankzero.run.checkpoints import list_committed
from rankzero.run.directory import RunDirectory
from rankzero.run.retention import EARLIER, collect

DAY = 86400.0


def train(lr: float) -> float:
    """Reports three checkpoints, of which the newest is kept."""
    import rankzero.train as rt

    assert rt.get_checkpoint() is None, "another training lends nothing"
    for number in range(3):
        rt.report({"number": number}, checkpoint={"lr": lr, "number": number})
    return lr


def test_a_fresh_training_leaves_the_checkpoints_of_the_one_before(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = launcher.options(num_processes=1, run_id="same")
    assert launcher.run(train, 0.1) == 0.1
    handle = launcher.find()
    assert handle
    before = [manifest.id for manifest in handle.checkpoints()]
    assert before
    caplog.set_level(logging.WARNING)
    # Another one; then the same one after its delivery.
    for number, lr in enumerate((0.2, 0.2)):
        caplog.clear()
        assert launcher.run(train, lr) == lr
        (line,) = [record.getMessage() for record in caplog.records if "`rankzero gc`" in record.getMessage()]
        assert all(name in line for name in before[number:])
        before += [manifest.id for manifest in handle.checkpoints()]
    run = RunDirectory(handle.directory)
    assert [manifest.id for manifest in list_committed(run)] == before
    assert len(handle.checkpoints()) < len(before)

    root, now = str(Path(handle.directory).parent), time.time()
    newest = [manifest.id for manifest in handle.checkpoints()]
    assert collect(root, DAY, now=now).checkpoints == []
    # The run itself is younger than that, by its end.
    run.write_status(handle.status().__class__(**{**vars(handle.status()), "ended": now + 10 * DAY}))
    would = collect(root, DAY, dry_run=True, now=now + 2 * DAY)
    assert [Path(removed.directory).name for removed in would.checkpoints] == [n for n in before if n not in newest]
    assert {removed.state for removed in would.checkpoints} == {EARLIER}
    assert would.size > 0
    assert [manifest.id for manifest in list_committed(run)] == before
    collect(root, DAY, now=now + 2 * DAY)
    assert [manifest.id for manifest in list_committed(run)] == newest
