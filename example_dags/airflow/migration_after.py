"""After: the same training function as in migration_before.py, as a task of rankzero.

What changed: ``train`` stands at module level, the session and its configuration are the operator's (a connection of
type ``spark`` instead of ``SPARK_MASTER``), and the task is called ``TorchDistributorOperator``. What that gives:

- A rank that fails is named in the task's log, with its host and traceback.
- The training ends when a user ends the task; when only the worker is lost, the next try attaches to it.
- Whatever rank 0 returns reaches the next task: a number as itself, tensors and models as a `ResultRef`.
- The lines of all ranks appear in the task's log while they train.

Scripts and notebooks that call ``TorchDistributor`` themselves only need another import:
``from rankzero import TorchDistributor``.
"""

import os
from datetime import datetime

from airflow.sdk import dag

from airflow_rankzero import TorchDistributorOperator


def train(steps: int, lr: float) -> float:
    """Fits a line to points, each rank with its own points; returns the loss after the last step."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)[dist.get_rank() :: dist.get_world_size()]
    y = 3 * x + 1
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    loss = torch.nn.functional.mse_loss(model(x), y).detach()
    dist.all_reduce(loss)
    loss /= dist.get_world_size()
    dist.destroy_process_group()
    return loss.item()


@dag(schedule=None, start_date=datetime(2026, 1, 1), tags=["rankzero"])
def migration_after() -> None:
    """Trains with the operator of rankzero."""
    TorchDistributorOperator(
        task_id="train",
        train=train,
        op_kwargs={"steps": 50, "lr": 0.1},
        num_processes=2,
        retries=1,
        conn_id=os.environ.get("SPARK_CONN_ID"),
    )


migration_after()
