"""What Airflow's provider manager reads about this package."""

from __future__ import annotations

from typing import Any

from airflow_rankzero import config
from airflow_rankzero.connection.fields import CONN_FIELDS, UI_FIELD_BEHAVIOUR
from rankzero import __version__

_INTEGRATION = "rankzero"


def get_provider_info() -> dict[str, Any]:
    """The provider's description, for the ``apache_airflow_provider`` entry point.

    The plugin is not in it: Airflow loads it by its entry point, also in task processes, and would warn of a second.
    """
    named = {
        "package-name": "rankzero",
        "name": "rankzero",
        "description": "Distributed PyTorch as barrier Spark jobs; rank 0's result goes to the next task.",
        "versions": [__version__],
    }
    if not config.is_airflow_3():
        return named
    return {
        **named,
        "integrations": [{"integration-name": _INTEGRATION, "tags": ["apache", "ml"]}],
        "operators": [{"integration-name": _INTEGRATION, "python-modules": ["airflow_rankzero.operators"]}],
        "hooks": [{"integration-name": _INTEGRATION, "python-modules": ["airflow_rankzero.hooks.rankzero"]}],
        "triggers": [{"integration-name": _INTEGRATION, "python-modules": ["airflow_rankzero.triggers"]}],
        "connection-types": [
            {
                "connection-type": "rankzero",
                "hook-class-name": "airflow_rankzero.hooks.rankzero.RankZeroHook",
                "hook-name": "rankzero",
                "ui-field-behaviour": UI_FIELD_BEHAVIOUR,
                "conn-fields": CONN_FIELDS,
            }
        ],
        "extra-links": [f"airflow_rankzero.links.{name}" for name in ("SparkUILink", "RunDirectoryLink", "ReportLink")],
        "config": {
            config.SECTION: {
                "description": "Options of the tasks that run distributed PyTorch.",
                "options": config.OPTIONS,
            }
        },
        "task-decorators": [
            {"name": "torch_distributor", "class-name": "airflow_rankzero.decorators.torch_distributor"}
        ],
    }
