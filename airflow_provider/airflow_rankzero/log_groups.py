"""Facts of a phase of a training, folded together in the task's log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def show(log: Any, title: str, facts: Mapping[str, Any]) -> None:
    """Writes a group of lines, which Airflow's UI shows as one that can be opened.

    Args:
        log: The operator's logger.
        title: What is shown while the group is closed.
        facts: One line each; those that are None or empty are left out.
    """
    log.info("::group::%s", title)
    for name, value in facts.items():
        if value not in (None, "", {}, []):
            log.info("%s: %s", name, value)
    log.info("::endgroup::")
