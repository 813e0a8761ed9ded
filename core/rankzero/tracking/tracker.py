"""`Tracker`: sends the events of a run to an external system."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from rankzero.errors import InvalidJobError

if TYPE_CHECKING:
    from rankzero.run.directory import RunStatus
    from rankzero.run.handle import RunHandle


class Tracker:
    """Sends the events of a run to an external system: subclass it, and pass it to ``Launcher(trackers=[...])``.

    A tracker works in the process that drives the run, in a thread of its own, and reads the run directory. It may be
    slow, hang or raise: the run neither waits for it nor fails. An exception is one line in the driver's log, and the
    tracker is called again later. When the run has ended, it has 10 s for the remaining events.

    Each run has a copy of its own: a tracker is pickled when the run is submitted, and goes to the driver directly,
    so its secrets are in no file of the run. Create objects that cannot be pickled (a client, a socket) in `begin`.

    Attributes:
        is_idempotent: True if an event may be delivered twice: events for which `add` raised, and all events of the
            training when another driver resumes it. False: each event is delivered at most once.

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
        """Called once, before the first `add`, and again if it raised an exception.

        Args:
            run: The run: ``id``, ``directory``, ``params``, ``labels``, ``world_size``, ``status()``.
        """

    def add(self, run: RunHandle[Any], events: list[dict[str, Any]]) -> None:
        """Called about once a second while the run lives, and once when it has ended.

        Args:
            run: The run.
            events: New events of `RunHandle.events`, in order. The list is often empty.
        """

    def end(self, run: RunHandle[Any], status: RunStatus) -> None:
        """Called once, after the last `add`.

        Args:
            run: The run.
            status: Last state of the run. It is not ``final`` if another process drives the run from now on.
        """


def require(module: str, extra: str, whose: Tracker) -> None:
    """Raises InvalidJobError unless a module is installed; it is not imported.

    Args:
        module: Name of the module; no submodule.
        extra: Extra of rankzero that installs the module.
        whose: Tracker that needs the module.
    """
    if importlib.util.find_spec(module) is None:
        name = type(whose).__name__
        raise InvalidJobError(f"trackers has {name}, which needs {module}: pip install 'rankzero[{extra}]'")
