"""Before: distributed training with pyspark's TorchDistributor inside a PythonOperator. Compare migration_after.py.

It works, with these limits:

- The SparkSession, and with it the JVM, lives in the Airflow worker; the session must be stopped whatever happens.
- ``train`` has to be nested: Airflow loads this file under a synthetic name, so a function at module level is pickled
  by reference to a module that no executor has.
- What ``train`` returns becomes an XCom as it is: a number may pass, a state dict may not. So weights are written to a
  place that all executors and workers share, under a name that the author has to invent, check and clean up.
- Nor is it always rank 0's: with several ranks in one task it is that of whichever wrote last.
- A rank that fails shows as a general error and pages of Java; its traceback is in the logs, if anywhere.
- A worker that is lost loses the training, and every retry starts from nothing.
"""

import os
from datetime import datetime

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import dag

NUM_PROCESSES = 2


def train_on_spark(steps: int, lr: float) -> float:
    """Trains on Spark; the function that the task calls."""
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

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

    master = os.environ.get("SPARK_MASTER", f"local[{NUM_PROCESSES}]")
    session = SparkSession.builder.master(master).getOrCreate()
    try:
        return TorchDistributor(NUM_PROCESSES, local_mode=False, use_gpu=False).run(train, steps, lr)
    finally:
        session.stop()


@dag(schedule=None, start_date=datetime(2026, 1, 1), tags=["rankzero"])
def migration_before() -> None:
    """Trains with a PythonOperator and TorchDistributor."""
    PythonOperator(task_id="train", python_callable=train_on_spark, op_kwargs={"steps": 50, "lr": 0.1})


migration_before()
