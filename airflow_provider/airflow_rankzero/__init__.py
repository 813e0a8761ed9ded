"""Airflow provider of rankzero: runs PyTorch training as a task and passes rank 0's result on through XCom.

The modules are thin layers over core, which launches, follows and ends runs. `hooks` and `connection` (the target of a
training) are packages; beside them are the operator with its parts, the decorator, the trigger,
links, options (`config`) and the plugin. Importing this package imports neither torch nor pyspark, and Airflow only
when a name is used, since Airflow imports the package while it configures itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankzero import lazy_names

if TYPE_CHECKING:
    from airflow_rankzero.decorators import torch_distributor
    from airflow_rankzero.operators import TorchDistributorOperator

__all__ = ["TorchDistributorOperator", "torch_distributor"]

_load = lazy_names(
    __name__,
    "_compat.AirflowFailException _compat.AirflowRescheduleException _compat.TaskDeferred arguments.TaskArguments "
    "arguments.TrainingArguments call.keyword call.positional connection.fields.CONN_FIELDS connection.target.Target "
    "decorators.torch_distributor links.DIRECTORY_KEY links.push_links links.ReportLink links.RunDirectoryLink "
    "links.SparkUILink links.web_address "
    "operators.TorchDistributorOperator outlets.fill_outlets paths.dataset_beside plugin.RankZeroPlugin "
    "provider_info.get_provider_info tries.run_id_of tries.TaskTry triggers.RunTrigger xcom.find_lost_key",
)


def __getattr__(name: str) -> Any:
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if error.name not in ("airflow", "airflow.sdk"):
            raise
        raise ImportError(f"{name} needs Airflow 3.1 or newer: pip install 'apache-airflow>=3.1'") from error


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
