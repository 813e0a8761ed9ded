"""Secrets: those of a task are masked in Airflow's logs and pages, and ranks look none up.

Ranks import this module while Airflow configures itself, so nothing here imports Airflow before a function is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankzero.pipeline import secrets_of


def mask_secrets(pairs: Mapping[str, Any]) -> None:
    """Makes Airflow write ``***`` for the secret values in all later log lines and rendered fields of this process."""
    # Not above: ranks import this module while Airflow configures itself.
    from airflow_rankzero._compat import mask_secret

    for secret in secrets_of(pairs):
        mask_secret(secret)


_DATABASE = ("DATABASE__SQL_ALCHEMY_CONN", "DATABASE__SQL_ALCHEMY_CONN_ASYNC", "CORE__SQL_ALCHEMY_CONN")
_BACKEND = ("SECRETS__BACKEND", "WORKERS__SECRETS_BACKEND")

RANK_ENVIRONMENT = {
    # Importing Airflow opens no database.
    "_AIRFLOW__AS_LIBRARY": "1",
    **{f"AIRFLOW__{name}": "ranks-have-no-database-of-airflow://" for name in _DATABASE},
    **{f"AIRFLOW__{name}": f"{__name__}.NoSecrets" for name in _BACKEND},
    **{f"AIRFLOW__{name}_KWARGS": "" for name in _BACKEND},
}
"""Variables of every rank, in place of the worker's: a rank may run where no Airflow is reachable."""


def __getattr__(name: str) -> Any:
    if name != "NoSecrets":
        raise AttributeError(name)
    from airflow.secrets.base_secrets import BaseSecretsBackend

    class NoSecrets(BaseSecretsBackend):
        """The secrets backend of ranks: refuses every variable and connection, also those of environment variables."""

        def get_variable(self, key: str, *args: Any, **kwargs: Any) -> None:
            raise _refusal("variable", key, f"var.value.{key}")

        def get_connection(self, conn_id: str, *args: Any, **kwargs: Any) -> None:
            raise _refusal("connection", conn_id, f"conn.{conn_id}.password")

    return NoSecrets


def _refusal(kind: str, name: str, template: str) -> BaseException:
    try:
        from airflow.sdk.exceptions import AirflowSecretsBackendAccessDenied as Denied
    except ImportError:
        # Before Airflow 3.2.2, which passes over every Exception of a backend.
        Denied = BaseException  # type: ignore[misc, assignment]

    class LookupInRankError(Denied):
        """Raised in a rank that looks up a variable or connection of Airflow: ranks get values as arguments."""

        __qualname__ = "LookupInRankError"

    return LookupInRankError(
        f"the {kind} {name!r} of Airflow was looked up in a rank, and ranks run outside of Airflow: pass the value as "
        f'an argument of the training, such as "{{{{ {template} }}}}"'
    )
