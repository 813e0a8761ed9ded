"""What a submission has left stays when another training begins under the same run id, until it is collected."""

from rankzero import Launcher
from rankzero.run.checkpoints import list_committed


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
    handles = [launcher.find()]
    # Another one; then the same one after its delivery.
    for lr in (0.2, 0.2):
        assert launcher.run(train, lr) == lr
        handles.append(launcher.find())
    folders = [handle.own.directory for handle in handles if handle]
    assert len(list_committed(folders)) == 3 * len(list_committed(folders[-1:]))
