"""Trainings of other launchers, as tasks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def hvd_loop(lr: float) -> float:
    import torch

    import rankzero.compat.horovod.torch as hvd

    hvd.init()
    return hvd.allreduce(torch.tensor(lr * (hvd.rank() + 1)), op=hvd.Sum).item()


def ray_loop(config: dict) -> float:
    from rankzero.compat.ray_train import train

    train.report({"lr": config["lr"]})
    return config["lr"] * train.get_context().get_world_size()


def test_a_trainer_of_ray_and_a_function_of_horovod(dag: Any, run_dag: Callable[..., Any], tmp_path: Path) -> None:
    from airflow_rankzero import TorchDistributorOperator
    from rankzero.compat.ray_train import ScalingConfig, TorchTrainer

    trainer = TorchTrainer(ray_loop, train_loop_config={"lr": 0.5}, scaling_config=ScalingConfig(num_workers=2))
    TorchDistributorOperator(task_id="ray", train=trainer, num_processes=1, conn_id="here", store=str(tmp_path))
    TorchDistributorOperator(task_id="hvd", train=hvd_loop, op_args=[0.5], conn_id="here", store=str(tmp_path))
    done = run_dag(dag)
    assert done.state == "success", done.errors
    assert done.xcom("ray") == 1.0, "with the trainer's number of workers"
    assert done.xcom("hvd") == 1.5


def test_a_tracker_of_a_task(dag: Any, run_dag: Callable[..., Any], tmp_path: Path) -> None:
    from airflow_rankzero import TorchDistributorOperator
    from rankzero.tracking import Tracker

    class Ends(Tracker):
        def __init__(self, path: Path) -> None:
            self.path = path

        def end(self, run: Any, status: Any) -> None:
            self.path.write_text(f"{run.labels['task_id']} {status.state}")

    ends = tmp_path / "ends"
    TorchDistributorOperator(
        task_id="train",
        train=ray_loop,
        op_args=[{"lr": 1.0}],
        num_processes=1,
        conn_id="here",
        store=str(tmp_path / "runs"),
        trackers=[Ends(ends)],
    )
    done = run_dag(dag)
    assert done.state == "success", done.errors
    assert ends.read_text() == "train succeeded"
