"""DAGs for a real worker, where this file is a module of a name that nobody else can import."""

from datetime import datetime, timedelta

import ranks_code
from airflow.sdk import DAG, dag, task
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


@torch_distributor(num_processes=1, conn_id="here")
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


with DAG("endless", schedule=None, start_date=datetime(2026, 1, 1), params={"mark": "none"}):
    TorchDistributorOperator(
        task_id="train",
        train=never_ends,
        env={"MARK": "{{ params.mark }}"},
        conn_id="here",
        retries=0,
        orphan_timeout=60,
    )


def train_until_told(folder: str) -> dict:
    """Ends when the file ``go`` is there; the result tells which process trained, and on what it went on."""
    import os
    import time
    from pathlib import Path

    import numpy as np

    import rankzero.train as rt

    checkpoint = rt.get_checkpoint()
    print(f"rank {os.environ['RANK']} trains", flush=True)
    if checkpoint is None:
        rt.report({"epoch": 1}, checkpoint={"epoch": 1})
    while not Path(folder, "go").exists():
        time.sleep(0.05)
    print("rank has seen it", flush=True)
    epoch = checkpoint.load()["epoch"] if checkpoint else 0
    # Numbers alone would be the XCom itself.
    return {"pid": np.array(os.getpid()), "epoch": np.array(epoch), "array": np.zeros(0)}


@task
def describe(trained) -> dict:
    loaded = trained.load()
    return {name: int(loaded[name].sum()) for name in ("pid", "epoch")}


def make_told(dag_id: str, **kwargs: object) -> None:
    with DAG(dag_id, schedule=None, start_date=datetime(2026, 1, 1), params={"mark": "none", "folder": "/nowhere"}):
        trained = TorchDistributorOperator(
            task_id="train",
            train=train_until_told,
            op_args=["{{ params.folder }}"],
            env={"MARK": "{{ params.mark }}"},
            conn_id="here",
            **{"retry_delay": timedelta(seconds=1), **kwargs},
        )
        describe(trained.output)


def tell_a_secret(folder: str) -> None:
    import os
    import time
    from pathlib import Path

    while not Path(folder, "go").exists():
        time.sleep(0.05)
    print("the token is", os.environ["HF_TOKEN"])


with DAG("secretive", schedule=None, start_date=datetime(2026, 1, 1), params={"folder": "/nowhere", "token": ""}):
    TorchDistributorOperator(
        task_id="train",
        train=tell_a_secret,
        op_args=["{{ params.folder }}"],
        env={"HF_TOKEN": "{{ params.token }}"},
        num_processes=1,
        conn_id="here",
        deferrable=True,
    )


class OfThisFileError(Exception):
    pass


def fail() -> None:
    raise OfThisFileError("no rows")


def look_up() -> str:
    from airflow.sdk import Variable

    return Variable.get("x", default="d")


with DAG("failing", schedule=None, start_date=datetime(2026, 1, 1)):
    for name, function in {"own": fail, "look_up": look_up}.items():
        TorchDistributorOperator(task_id=name, train=function, num_processes=1, conn_id="here")

make_told("durable", retries=3)
make_told("forgotten", retries=1, retry_delay=timedelta(hours=1))
shipped()
