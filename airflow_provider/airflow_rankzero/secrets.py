"""The secrets backend of ranks, which refuses every look-up: Airflow's own way to deny one, and the same everywhere.

A rank may run where no Airflow is reachable. It imports this module while it configures Airflow, so it stands alone.
"""

from __future__ import annotations

from typing import Any

from airflow.secrets.base_secrets import BaseSecretsBackend

try:
    from airflow.sdk.exceptions import AirflowSecretsBackendAccessDenied as AccessDenied
except ImportError:
    # Before Airflow 3.2.2, which passes over every Exception of a backend.
    AccessDenied = BaseException  # type: ignore[misc, assignment]


_DATABASE = ("DATABASE__SQL_ALCHEMY_CONN", "DATABASE__SQL_ALCHEMY_CONN_ASYNC", "CORE__SQL_ALCHEMY_CONN")
_BACKEND = ("SECRETS__BACKEND", "WORKERS__SECRETS_BACKEND")

RANK_ENVIRONMENT = {
    # Importing Airflow opens no database.
    "_AIRFLOW__AS_LIBRARY": "1",
    **{f"AIRFLOW__{name}": "ranks-have-no-database-of-airflow://" for name in _DATABASE},
    **{f"AIRFLOW__{name}": f"{__name__}.NoSecrets" for name in _BACKEND},
    **{f"AIRFLOW__{name}_KWARGS": "" for name in _BACKEND},
}
"""Variables of every rank, in place of the worker's."""


class LookupInRankError(AccessDenied):
    """Raised in a rank that looks up a variable or connection of Airflow: ranks get values as arguments."""


class NoSecrets(BaseSecretsBackend):
    """Raises `LookupInRankError` for every variable and connection, also for those of environment variables."""

    def get_variable(self, key: str, *args: Any, **kwargs: Any) -> None:
        """Raises LookupInRankError with a template of the variable."""
        raise LookupInRankError(_explain("variable", key, f"var.value.{key}"))

    def get_connection(self, conn_id: str, *args: Any, **kwargs: Any) -> None:
        """Raises LookupInRankError with a template of the connection."""
        raise LookupInRankError(_explain("connection", conn_id, f"conn.{conn_id}.password"))


def _explain(kind: str, name: str, template: str) -> str:
    return (
        f"the {kind} {name!r} of Airflow was looked up in a rank, and ranks run outside of Airflow: pass the value as "
        f'an argument of the training, such as "{{{{ {template} }}}}"'
    )
