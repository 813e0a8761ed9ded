"""What a submission has left stays when another training begins under the same run id, until it is collected."""

import time
from pathlib import Path

from tests.conftest import find

from rankzero import Launcher
from rankzero.run.checkpoints import list_committed
from rankzero.run.retention import REPLACED, collect

DAY = 86400.0


def train(lr: float) -> float:
    """Reports three checkpoints, of which the newest is kept."""
    import rankzero.train as rt

    assert rt.get_checkpoint() is None, "another training lends nothing"
    for number in range(3):
        rt.report({"number": number}, checkpoint={"lr": lr, "number": number})
    return lr


def test_a_fresh_training_leaves_the_checkpoints_of_the_one_before(
    launcher: Launcher,
) -> None:
    launcher = launcher.options(num_processes=1, run_id="same")
    assert launcher.run(train, 0.1) == 0.1
    handles = [find(launcher)]
    # Another one; then the same one after its delivery.
    for lr in (0.2, 0.2):
        assert launcher.run(train, lr) == lr
        handles.append(find(launcher))
    folders = [handle.own.directory for handle in handles if handle]
    assert len(list_committed(folders)) == 3 * len(list_committed(folders[-1:]))

    root, now = str(Path(folders[0]).parents[2]), time.time()
    assert collect(root, DAY, now=now).removed == []
    # The run itself is younger than that, by its end.
    last = find(launcher)
    assert last
    status = last.status()
    last.own.write_status(status.__class__(**{**vars(status), "ended": now + 10 * DAY}))
    would = collect(root, DAY, dry_run=True, now=now + 2 * DAY)
    assert [removed.directory for removed in would.removed] == folders[:-1]
    assert {removed.state for removed in would.removed} == {REPLACED}
    collect(root, DAY, now=now + 2 * DAY)
    assert [Path(folder).is_dir() for folder in folders] == [False, False, True]
    assert last.result() == 0.2
