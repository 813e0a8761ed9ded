"""The buttons of a training task: the Spark UI, the run directory and its report.

Airflow's web page shows what it finds under a link's XCom key, while the task runs, too; it shows no button for an
address other than ``http``, ``https`` or ``mailto``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink

from airflow_rankzero import provider_info
from airflow_rankzero._compat import conf
from rankzero.errors import InvalidJobError
from rankzero.pipeline import REPORT_FILE, store

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

logger = logging.getLogger(__name__)

DIRECTORY_KEY = "run_directory"
"""XCom key of the run directory itself, for `rankzero.RunHandle.attach`."""

# With another endpoint, a bucket is not one of AWS.
_OTHER_S3 = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "FSSPEC_S3_ENDPOINT_URL")

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


class RunDirectoryLink(_XComLink):
    """The run directory in the web page of its store."""

    name, xcom_key = "Run directory", "rankzero_run_directory_url"


class ReportLink(_XComLink):
    """The report of the run, which exists once the run has ended."""

    name, xcom_key = "Report", "rankzero_report_url"


def push_links(ti: Any, *, spark_ui: str | None = None, directory: str | None = None) -> None:
    """Pushes the addresses of the buttons that are known, and the run directory as the XCom ``run_directory``."""
    addresses: dict[str, Callable[[], str | None]] = {
        DIRECTORY_KEY: lambda: directory,
        SparkUILink.xcom_key: lambda: spark_ui,
        RunDirectoryLink.xcom_key: lambda: web_address(directory) if directory else None,
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


def web_address(directory: str) -> str | None:
    """Returns the address of a directory by ``[rankzero] directory_url``, else in the console of GCS or S3, or None.

    Raises InvalidJobError if the option has unknown placeholders.
    """
    return _address(directory, "directory_url", "{bucket}/{key}", "buckets/{bucket}?prefix={key}/")


def report_address(directory: str) -> str | None:
    """Returns the address of a report by ``[rankzero] report_url``, else in the console of GCS or S3, or of a page.

    A run of the configured store has a page among those of Airflow, if ``[api] base_url`` is set; another one has no
    address. Raises InvalidJobError if the option has unknown placeholders.
    """
    gcs, s3 = f"_details/{{bucket}}/{{key}}/{REPORT_FILE}", f"object/{{bucket}}?prefix={{key}}/{REPORT_FILE}"
    if address := _address(directory, "report_url", gcs, s3):
        return address
    root, _, name = store.normalize(directory).rpartition("/")
    base = str(conf.get("api", "base_url", fallback="") or "").rstrip("/")
    is_shown = base and root == store.normalize(provider_info.store_or_default())
    return f"{base}{PAGES}/runs/{quote(name)}" if is_shown else None


def _address(directory: str, option: str, gcs: str, s3: str) -> str | None:
    scheme, _, path = directory.rstrip("/").rpartition("://")
    path = quote(path)
    if template := provider_info.option(option):
        try:
            return template.format(path=path, name=path.rpartition("/")[2])
        except (KeyError, IndexError, ValueError, AttributeError):
            wrong = f"[{provider_info.SECTION}] {option} is {template!r}; only {{path}} and {{name}} can stand in it"
            raise InvalidJobError(wrong) from None
    bucket, _, key = path.partition("/")
    if scheme in ("gs", "gcs"):
        return "https://console.cloud.google.com/storage/browser/" + gcs.format(bucket=bucket, key=key)
    if scheme in ("s3", "s3a") and not any(map(os.environ.get, _OTHER_S3)):
        return "https://s3.console.aws.amazon.com/s3/" + s3.format(bucket=bucket, key=key)
    return None
