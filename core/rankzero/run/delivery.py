"""The note of who got a run's result: for those who may ask for it again."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from rankzero import store
from rankzero.run.handle import RunHandle

_NOTE = "handed"


def note(handle: RunHandle[Any], **taker: Any) -> None:
    """Before the result is handed on: notes who gets it.

    Args:
        handle: A run that has succeeded.
        taker: What `taker_of` shall tell, JSON values by name.
    """
    facts = {"submission": handle.submission, **taker}
    store.write_bytes(store.join(handle.directory, _NOTE), json.dumps(facts).encode())


def taker_of(handle: RunHandle[Any]) -> dict[str, Any] | None:
    """Who got the result of the last submission, as `note` was told; None if nobody did."""
    with contextlib.suppress(FileNotFoundError):
        facts: dict[str, Any] = json.loads(store.read_bytes(store.join(handle.directory, _NOTE)))
        if facts.get("submission") == handle.submission:
            return facts
    return None
