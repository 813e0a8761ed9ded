"""What Airflow's provider manager reads about this package."""

from __future__ import annotations

from typing import Any

from rankzero import __version__


def get_provider_info() -> dict[str, Any]:
    """The provider's description, for the ``apache_airflow_provider`` entry point."""
    return {
        "package-name": "rankzero",
        "name": "rankzero",
        "description": "Distributed PyTorch as barrier Spark jobs; rank 0's result goes to the next task.",
        "versions": [__version__],
        "task-decorators": [
            {"name": "torch_distributor", "class-name": "airflow_rankzero.decorators.torch_distributor"}
        ],
    }
