"""DAGs for a real worker, where this file is a module of a name that nobody else can import."""

from datetime import datetime

import ranks_code
from airflow.sdk import dag
from ranks_code import scale

from airflow_rankzero import TorchDistributorOperator, torch_distributor


def double(value: int) -> int:
    return 2 * value


def train(start: int) -> dict:
    import ranks_code as imported_when_called
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([double(scale(start)) + imported_when_called.rank()])
    dist.all_reduce(total)
    print(f"rank {ranks_code.rank()} of {__name__}")
    return {"total": total}


@torch_distributor(num_processes=1)
def diverge(given: dict) -> float:
    import rankzero.train as rt

    loss = float("nan") if given["total"].item() == 85 else 0.0
    rt.report({"loss": loss})
    return loss


@dag(schedule=None, start_date=datetime(2026, 1, 1))
def shipped() -> None:
    trained = TorchDistributorOperator(task_id="train", train=train, op_kwargs={"start": 1})
    diverge(trained.output)


def never_ends() -> None:
    import signal
    import threading

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("never ends", flush=True)
    threading.Event().wait()


@dag(schedule=None, start_date=datetime(2026, 1, 1), params={"mark": "none"})
def endless() -> None:
    TorchDistributorOperator(task_id="train", train=never_ends, env={"MARK": "{{ params.mark }}"}, retries=0)


shipped()
endless()
