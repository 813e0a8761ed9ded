"""Airflow provider of rankzero: runs PyTorch training as a task and passes rank 0's result on through XCom.

The modules are thin layers over core, which launches, follows and ends runs, and have the names of Airflow's nouns.
Three stand apart because of what imports them: `provider_info` (Airflow, while it configures itself), `secrets` (ranks)
and `arguments` (type checkers). `templates` has the arguments of `operators`, and `_compat` what differs between
versions of Airflow. Importing this package imports neither torch nor pyspark, and Airflow only when a name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankzero import lazy_names

if TYPE_CHECKING:
    from airflow_rankzero.decorators import torch_distributor
    from airflow_rankzero.operators import TorchDistributorOperator
    from airflow_rankzero.provider_info import store_or_default

__all__ = ["TorchDistributorOperator", "store_or_default", "torch_distributor"]

_load = lazy_names(
    __name__,
    "_compat.AirflowFailException _compat.AirflowRescheduleException _compat.TaskDeferred arguments.TaskArguments "
    "arguments.TrainingArguments decorators.torch_distributor hooks.rankzero.Target links.DIRECTORY_KEY "
    "links.push_links links.ReportLink links.RunDirectoryLink links.SparkUILink links.web_address "
    "operators.TorchDistributorOperator plugin.RankZeroPlugin provider_info.CONN_FIELDS "
    "provider_info.get_provider_info provider_info.store_or_default templates.dataset_beside templates.keyword "
    "templates.positional tries.run_id_of tries.TaskTry triggers.RunTrigger xcom.fill_outlets xcom.find_lost_key",
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
