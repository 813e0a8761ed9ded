"""`RankZeroHook`: the hook of the connection type ``rankzero``."""

from __future__ import annotations

import socket
from typing import Any

from airflow.sdk import BaseHook

from airflow_rankzero.connection.examined import arguments
from airflow_rankzero.connection.target import Target
from rankzero import SparkConnectEngine
from rankzero.errors import RankZeroError
from rankzero.pipeline import OK, Examination, examine, find_problems, store

TEST_START_TIMEOUT = 30.0
"""Seconds for ranks to start while a user waits at a web page."""


class RankZeroHook(BaseHook):
    """Reads a connection of type ``rankzero`` (or ``spark``) and tests whether trainings can run there.

    Args:
        rankzero_conn_id: Id of the connection.

    Example:
        >>> RankZeroHook("gpu_cluster").get_conn().master           # doctest: +SKIP
        'spark://head:7077'
    """

    conn_name_attr = "rankzero_conn_id"
    default_conn_name = "rankzero_default"
    conn_type = "rankzero"
    hook_name = "rankzero"

    def __init__(self, rankzero_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rankzero_conn_id = rankzero_conn_id

    def get_conn(self) -> Target:
        """Returns the target that the connection describes. Raises InvalidJobError."""
        return Target.from_conn_id(self.rankzero_conn_id)

    def test_connection(self) -> tuple[bool, str]:
        """Searches for problems that would stop a training, from this machine. Starts no JVM.

        Airflow calls it on the API server or on a worker; results about Java, GPUs and local paths
        hold for that machine. On Spark Connect, which needs no JVM here, two ranks (or those of one
        task, if these are more) examine the cluster.

        Returns:
            True if no problem was found, and a message with the problems or the checks.
        """
        here = socket.gethostname()
        try:
            target = self.get_conn()
            given = arguments(target, {})
            if isinstance(given["engine"], SparkConnectEngine):
                return _say(examine(**given, start_timeout=TEST_START_TIMEOUT), here)
            root = store.root_of(given.pop("store"))
            problems = find_problems(given.pop("engine"), root, **given)
        except RankZeroError as error:
            return False, str(error)
        if problems:
            return False, f"seen from {here}: " + "; ".join(problems)
        return True, (
            f"seen from {here}: nothing stands against a training on {target}, and {root} can be written. "
            f"What its ranks see shows `rankzero doctor --conn-id {self.rankzero_conn_id}`"
        )


def _say(found: Examination, here: str) -> tuple[bool, str]:
    """Returns the outcome of an examination and a message: all problems, or else all findings."""
    wrong = [finding for finding in found.findings if finding.level != OK]
    texts = [
        f"{each.about}: {each.what}" + (f" ({each.mend})" if each.mend else "") for each in wrong or found.findings
    ]
    return found.healthy, f"seen from {here} and by {len(found.ranks)} ranks: " + "; ".join(texts)
