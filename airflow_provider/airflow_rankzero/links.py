"""The buttons of a training task: the Spark UI and the report; and the run directory as an XCom.

Airflow's web page shows what it finds under a link's XCom key, while the task runs, too; it shows no button for an
address other than ``http``, ``https`` or ``mailto``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink

from airflow_rankzero import provider_info
from airflow_rankzero._compat import conf
from rankzero.pipeline import store

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

logger = logging.getLogger(__name__)

DIRECTORY_KEY = "run_directory"
"""XCom key of the run directory itself, for `rankzero.RunHandle.attach`."""

PAGES = "/rankzero"
"""Path of the plugin's pages below the address of Airflow."""

# Attribute of the task with the addresses that are known, by the key of the link.
_ADDRESSES = "_rankzero_addresses"


class _XComLink(BaseOperatorLink):
    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Returns the address, which Airflow pushes once more at the end of the task; ``""`` shows no button."""
        return str(vars(operator).get(_ADDRESSES, {}).get(self.xcom_key, ""))


class SparkUILink(_XComLink):
    """The web page of the SparkContext, which exists as long as the run."""

    name, xcom_key = "Spark UI", "rankzero_spark_ui"


class ReportLink(_XComLink):
    """The report of the run, which exists once the run has ended."""

    name, xcom_key = "Report", "rankzero_report_url"


def push_links(ti: Any, *, spark_ui: str | None = None, directory: str | None = None) -> None:
    """Pushes the addresses of the buttons that are known, and the run directory as the XCom ``run_directory``."""
    addresses: dict[str, Callable[[], str | None]] = {
        DIRECTORY_KEY: lambda: directory,
        SparkUILink.xcom_key: lambda: spark_ui,
        ReportLink.xcom_key: lambda: report_address(directory) if directory else None,
    }
    for key, address_of in addresses.items():
        try:
            if address := address_of():
                vars(ti.task).setdefault(_ADDRESSES, {})[key] = address
                ti.xcom_push(key=key, value=address)
        except Exception:
            # A button is not worth a training.
            logger.warning("the link %s of this task could not be pushed", key, exc_info=True)


def report_address(directory: str) -> str | None:
    """Returns the address of the plugin's page of a run, or None.

    A run of the configured store has a page among those of Airflow, if ``[api] base_url`` is set.
    """
    root, _, name = store.normalize(directory).rpartition("/")
    base = str(conf.get("api", "base_url", fallback="") or "").rstrip("/")
    is_shown = base and root == store.normalize(provider_info.store_or_default())
    return f"{base}{PAGES}/runs/{quote(name)}" if is_shown else None
