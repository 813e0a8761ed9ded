"""Spark configuration as a connection or a DAG gives it: as text, with what is secret masked in Airflow's logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_rankzero._compat import mask_secret
from rankzero.errors import InvalidJobError
from rankzero.pipeline import secrets_of, spelt


def as_text(name: str, pairs: Mapping[str, Any] | None) -> dict[str, str]:
    """Numbers and flags as Spark spells them.

    JSON has numbers and flags, and a DAG with ``render_template_as_native_obj`` turns every ``"2"`` into a number.

    Args:
        name: What the pairs are called, for the error.
        pairs: Names to values; None is empty.

    Raises:
        InvalidJobError: it is no mapping, or a value is neither text, number nor flag.

    Example:
        >>> as_text("conf", {"spark.executor.cores": 2, "spark.ui.enabled": False})
        {'spark.executor.cores': '2', 'spark.ui.enabled': 'false'}
    """
    if pairs is None:
        return {}
    if not isinstance(pairs, Mapping):
        raise InvalidJobError(f"{name} is a {type(pairs).__name__}; it must map strings to strings")
    texts = {}
    for key, value in pairs.items():
        value = spelt(value)
        if not isinstance(value, str) or not isinstance(key, str):
            raise InvalidJobError(f"{name}[{key!r}] is a {type(value).__name__}; names and values must be strings")
        texts[key] = value
    return texts


def mask_secrets(pairs: Mapping[str, Any]) -> None:
    """Makes Airflow write ``***`` for the secret values, from now on.

    In every log line of this task or trigger, in every rendered field that is stored later, under whatever name.
    """
    for secret in secrets_of(pairs):
        mask_secret(secret)
