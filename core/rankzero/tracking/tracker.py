"""`Tracker`: takes what happens in a run to a system outside."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from rankzero.errors import InvalidJobError

if TYPE_CHECKING:
    from rankzero.run.directory import RunStatus
    from rankzero.run.handle import RunHandle


class Tracker:
    """Takes what happens in a run to a system of yours: subclass it, and give it to ``Launcher(trackers=[...])``.

    A tracker works in the process that drives the run, in a thread of its own, and reads the run directory. It may be
    slow, hang or raise: the run neither waits for it nor fails. What it raises is one line in the driver's log, and it
    is called again later. When the run has ended it has 10 s for the rest.

    Each run has a copy of its own: a tracker is pickled when the run is submitted, and goes to the driver directly,
    so what is secret in it is in no file of the run. What cannot be pickled (a client, a socket) is made in `begin`.

    Attributes:
        is_idempotent: True if the same event may come twice: then events for which `add` raised come again, and all of
            the training come again when it is resumed by another driver. False: each comes once at most.

    Example:
        >>> import urllib.request
        >>> from rankzero import Launcher
        >>> class Pager(Tracker):
        ...     def __init__(self, url: str) -> None:
        ...         self.url = url
        ...     def add(self, run, events):
        ...         for event in events:
        ...             if event["type"] in ("failure", "restart"):
        ...                 body = f"{run.id}: {event['what']}".encode()
        ...                 urllib.request.urlopen(self.url, body, timeout=5)
        >>> launcher = Launcher(2, trackers=[Pager("http://pager.example/notify")])
    """

    is_idempotent = False

    def check(self) -> None:
        """Called when the run is submitted, before anything starts.

        Raises:
            InvalidJobError: this tracker cannot work, since a package or a setting is missing.
        """

    def begin(self, run: RunHandle[Any]) -> None:
        """Called once, before the first `add`; again if it raised.

        Args:
            run: The run: ``id``, ``directory``, ``params``, ``labels``, ``world_size``, ``status()``.
        """

    def add(self, run: RunHandle[Any], events: list[dict[str, Any]]) -> None:
        """Called about once a second while the run lives, and once when it has ended.

        Args:
            run: The run.
            events: What has happened since: those of `RunHandle.events`, in their order. Often there are none.
        """

    def end(self, run: RunHandle[Any], status: RunStatus) -> None:
        """Called once, after the last `add`.

        Args:
            run: The run.
            status: Its last state. It is not ``final`` if another process drives the run from now on.
        """


def require(module: str, extra: str, whose: Tracker) -> None:
    """Raises InvalidJobError unless a module is installed; it is not imported.

    Args:
        module: Its name; no submodule.
        extra: Of rankzero, that installs it.
        whose: The tracker that needs it.
    """
    if importlib.util.find_spec(module) is None:
        name = type(whose).__name__
        raise InvalidJobError(f"trackers has {name}, which needs {module}: pip install 'rankzero[{extra}]'")
