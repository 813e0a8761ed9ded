"""What ranks run on executors that have torch alone: nothing of the suite is imported there."""

import importlib.util
import os
import sys

# As `tests.loading` does, which is not imported there.
from importlib import import_module as load_module
from typing import Any

import rankzero.train as rt

NOT_THERE = ("rankzero", "cloudpickle", "fsspec", "pyarrow", "pandas", "psutil", "click", "airflow", "dagster")


def what_is_there() -> dict[str, Any]:
    import rankzero as own

    found = [name for name in NOT_THERE if importlib.util.find_spec(name)]
    return {"python": sys.executable, "found": found, "rankzero": own.__file__}


def from_the_environment(name: str) -> list[dict[str, Any]]:
    """Each rank's interpreter, directory, and the value of a module that only its environment has."""
    import torch
    import torch.distributed as dist

    import rankzero as own

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    value = load_module(name).VALUE
    found = {"python": sys.executable, "value": value, "sum": total.item(), "rankzero": own.__file__}
    return list(rt.all_gather_object({**found, "directory": os.getcwd()}))
