"""The interface between the driver and an engine."""

from __future__ import annotations

import abc
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import rankzero
from rankzero import bounds
from rankzero.data.manifest import Manifest
from rankzero.errors import EngineError, RankZeroError
from rankzero.job import Job
from rankzero.threads import in_thread

if TYPE_CHECKING:
    from rankzero.run.directory import RunDirectory, Submission

ENGINE_ERROR_TIMEOUT = bounds.scaled(10.0)  # To get the text of an engine's error

CODE_PATH = os.path.dirname(os.path.dirname(os.path.abspath(rankzero.__file__)))  # From which agents import rankzero

AgentConfig = dict[str, Any]
OnEnd = Callable[[BaseException | None], None]


class Engine(abc.ABC):
    """A frozen description of where agents run.

    Attributes:
        has_tables: True if a session of this engine can compute tables and queries (`EngineSession.read_table`).
        drives_elsewhere: True if `start_driver` starts the driver on a cluster, so that it outlives this machine.
    """

    has_tables = False
    drives_elsewhere = False

    @property
    def can_detach(self) -> bool:
        """True if a driver in a process of its own can open this engine: not with a session of this process."""
        return getattr(self, "session", None) is None

    @property
    def prefers_own_process(self) -> bool:
        """True if opening the engine would change the caller's process, as each session does that it starts."""
        return self.can_detach

    @abc.abstractmethod
    def check(self, job: Job) -> None:
        """Raises InvalidJobError or EngineError for a job that is known to fail, before anything starts."""

    def check_store(self, root: str) -> None:  # noqa: B027 - most engines see whatever this process sees
        """Refuses a root of run directories that the driver of a run could not use. Raises InvalidJobError."""

    @abc.abstractmethod
    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the engine as JSON, in two parts: one that may be shown, and one that must stay private."""

    def start_driver(self, own: Submission, private: Mapping[str, Any]) -> None:
        """Starts the driver of a submission on the engine's cluster. Raises EngineError if the cluster refuses it.

        Args:
            own: The submission to drive, which has no status yet.
            private: Data that may hold secrets: for the driver only, and for no file or command line.
        """
        raise NotImplementedError

    def can_host_driver(self, run: RunDirectory, job: Job) -> bool:
        """Returns True if the driver of a submitted run may run inside its stage, which its submitter starts."""
        return False

    def num_processes(self, processes_per_task: int, *, use_gpu: bool) -> int | None:
        """Returns the ranks for ``num_processes="auto"``, one for each slot; None if the number of slots is unknown."""
        return None

    @abc.abstractmethod
    def open(self, job: Job, env: Mapping[str, str]) -> EngineSession:
        """Connects to the engine and checks the job against it. Raises EngineError."""


class EngineSession(abc.ABC):
    """An open engine, which places the agents of one attempt at a time.

    Attributes:
        place: Display name of the cluster or machine.
        bind_host: Address on which the driver's channel listens.
        driver_hosts: Addresses of the driver, preferred first; an agent takes the first that proves the run's secret.
        most_slots: Most task slots that the engine can ever have, by its configuration; None if that does not limit
            them.
        notes: Display messages about settings that the engine added to those of the user.
        url: URL of the engine's web page; None if it has none.
        encrypts: True if the engine encrypts its own connections, so that those of the run are by default, too.
    """

    place: str
    bind_host: str
    driver_hosts: list[str]
    most_slots: int | None = None
    notes: Sequence[str] = ()
    url: str | None = None
    encrypts = False

    @abc.abstractmethod
    def slots(self) -> int:
        """Returns the number of the job's tasks that can run at the same time now."""

    def num_agents(self, num_tasks: int) -> int:
        """Returns the number of agents that run this many tasks of the job: one for each."""
        return num_tasks

    def reserve(self, num_tasks: int) -> bool:
        """Reserves the slots of the next attempt; returns False if another run took them first."""
        return True

    @abc.abstractmethod
    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> AgentGroup:
        """Starts the agents of this many tasks, which `reserve` has granted, all together.

        Args:
            num_tasks: Number of tasks.
            config: The configuration that all agents share.
            on_end: Called once, from another thread, when all agents have ended.
        """

    def read_table(
        self, query: str, folder: str, name: str, say: Callable[[str], None], check: Callable[[], None]
    ) -> Manifest:
        """Computes a table or a query, and writes its rows for the ranks.

        Args:
            query: Name of the table, or the query.
            folder: A new directory of the run's store.
            name: Name of the dataset.
            say: Receives lines about progress.
            check: Called periodically; an exception that it raises ends the work.

        Raises:
            InvalidJobError: the table does not exist, or a column has no tensor type.
            EngineError: the engine failed, or has no tables.
        """
        raise EngineError(f"dataset {name!r} is {query!r}: {self.place} has no tables; give a path")

    def is_usable(self) -> bool:
        """Returns False if the next attempt needs a new session. Called between two attempts."""
        return True

    @abc.abstractmethod
    def close(self) -> None:
        """Stops whatever `Engine.open` started, and nothing else."""


class AgentGroup(abc.ABC):
    """The running agents of one attempt."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def _hold(
        self, work: Callable[[], object], on_end: OnEnd, kind: Callable[..., threading.Thread] = threading.Thread
    ) -> None:
        """Calls the function that holds the agents in a daemon thread of this kind, and reports its end."""

        def hold() -> None:
            error: BaseException | None = None
            try:
                work()
            except BaseException as caught:
                error = caught
            self._ended.set()
            on_end(error)

        thread = kind(target=hold)
        thread.daemon = True
        thread.start()

    def wait(self, timeout: float) -> bool:
        """Waits for the agents; returns True if all have ended within ``timeout`` seconds."""
        return self._ended.wait(timeout)

    @abc.abstractmethod
    def cancel(self) -> None:
        """Ends the agents without their cooperation."""

    @abc.abstractmethod
    def explain(self, error: BaseException) -> RankZeroError:
        """Returns the typed error for the engine's error that ended the agents early."""


def words_of(error: BaseException) -> str:
    """Returns the text of an engine's error. An error of py4j gets it from the JVM, which may be too dead to answer."""
    try:
        return in_thread(lambda: str(error)).result(ENGINE_ERROR_TIMEOUT())
    except Exception:
        return f"{type(error).__name__}, whose text the JVM did not return: see driver.log"
