"""The interface between the driver and an engine."""

from __future__ import annotations

import abc
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rankzero.channel.auth import new_secret
from rankzero.channel.sockets import listen
from rankzero.data.manifest import Manifest
from rankzero.errors import EngineError, RankZeroError
from rankzero.job import Job

if TYPE_CHECKING:
    from rankzero.channel.driver_end.tls import Identity
    from rankzero.run.directory import RunDirectory

logger = logging.getLogger(__name__)

AgentConfig = dict[str, Any]
OnEnd = Callable[[BaseException | None], None]


class Engine(abc.ABC):
    """A frozen description of where agents run."""

    @abc.abstractmethod
    def check(self, job: Job) -> None:
        """Refuses what can be known to fail before anything starts.

        Raises:
            InvalidJobError, InsufficientSlotsError, EngineError
        """

    def check_store(self, root: str) -> None:  # noqa: B027 - most engines see whatever this process sees
        """Refuses a root of run directories that the driver of a run could not use. Raises InvalidJobError."""

    @abc.abstractmethod
    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The engine as JSON: what may be shown, and what must stay private."""

    @property
    @abc.abstractmethod
    def can_detach(self) -> bool:
        """True if a driver in a process of its own can open this engine."""

    @property
    @abc.abstractmethod
    def prefers_own_process(self) -> bool:
        """True if opening it would change the caller's process."""

    @property
    def has_tables(self) -> bool:
        """True if a session of this engine can compute tables and queries: `EngineSession.read_table`."""
        return False

    @property
    def drives_elsewhere(self) -> bool:
        """True if `start_driver` starts the driver of a run, in a place that outlives this machine's part in it."""
        return False

    def start_driver(self, run: RunDirectory, private: Mapping[str, Any]) -> None:
        """Starts the driver of the run's current submission where the engine has a place for it.

        Args:
            run: What it drives. Its status has no driver yet.
            private: What may hold secrets: for the driver, and for no file or command line.

        Raises:
            EngineError: the place does not take it; nothing was started.
        """
        raise NotImplementedError

    def num_processes(self, processes_per_task: int, *, use_gpu: bool) -> int | None:
        """Ranks for ``num_processes="auto"``: as many as there are places; None where nothing says how many.

        Raises:
            InsufficientSlotsError: there is no place for one.
        """
        return None

    def start_ahead(self, job: Job, env: Mapping[str, str]) -> None:  # noqa: B027
        """Starts what need not wait for `open`, such as loading torch. Nothing depends on it, and it does not fail.

        Args:
            job: What will run.
            env: The user's environment for the ranks.
        """

    @abc.abstractmethod
    def open(self, job: Job) -> EngineSession:
        """Connects to the engine and checks what only it can tell. Raises EngineError."""


class EngineSession(abc.ABC):
    """An open engine: places the agents of one attempt at a time."""

    @property
    @abc.abstractmethod
    def place(self) -> str:
        """Where it is, in words."""

    @property
    def notes(self) -> list[str]:
        """What it was asked for beyond what the user said, for people."""
        return []

    @abc.abstractmethod
    def slots(self) -> int:
        """Tasks of the job that can run at once here now."""

    @property
    def most_slots(self) -> int | None:
        """More of them there can never be, as its configuration proves; None if that proves nothing."""
        return None

    def slots_by_host(self) -> dict[str, int]:
        """How many of them each host has at most; empty if there is only one host."""
        return {}

    @abc.abstractmethod
    def num_agents(self, num_tasks: int) -> int:
        """Agents that so many tasks of the job are placed as."""

    @property
    @abc.abstractmethod
    def bind_host(self) -> str:
        """Address on which the driver's channel listens."""

    def listen(self, ports: Sequence[int] | None) -> socket.socket:
        """A socket on which the driver's channel listens for the agents of an attempt.

        Args:
            ports: First and last that may be; None for any.

        Raises:
            OSError: none is free.
        """
        return listen(self.bind_host, ports)

    def identity(self) -> Identity:
        """With what the connections of an attempt are encrypted. Raises EngineError."""
        # Here: who only describes an engine need not load TLS.
        from rankzero.channel.driver_end.tls import make_identity

        return make_identity()

    @property
    @abc.abstractmethod
    def driver_host(self) -> str:
        """Address under which agents reach the driver."""

    @property
    def driver_hosts(self) -> list[str]:
        """All of them, best first: an agent takes the first that proves the run's secret."""
        return [self.driver_host]

    @property
    def url(self) -> str | None:
        """Where people can look at the engine, if it shows itself."""
        return None

    @property
    def encrypts(self) -> bool:
        """True if the engine encrypts its own connections, as those of the run then shall be."""
        return False

    @property
    def can_host_driver(self) -> bool:
        """True if the run may be driven from within: `launch` takes a ``"stage"`` for its tasks."""
        return False

    def secret(self, attempt: int) -> str:
        """Of the channel of an attempt."""
        return new_secret()

    def reserve(self, num_tasks: int) -> bool:
        """Sees to it that nobody else takes the places of the next attempt; False if somebody was faster."""
        return True

    @abc.abstractmethod
    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> AgentGroup:
        """Starts the agents of so many tasks, all at once.

        Args:
            num_tasks: How many; `reserve` has said yes to as many.
            config: What is the same for all agents.
            on_end: Called once, from another thread, when all have ended.
        """

    def read_table(
        self, query: str, folder: str, name: str, say: Callable[[str], None], check: Callable[[], None]
    ) -> Manifest:
        """Computes a table or a query, and writes its rows for the ranks.

        Args:
            query: Name of the table, or the query.
            folder: A new directory of the run's store.
            name: Of the dataset.
            say: Takes lines about progress.
            check: Called now and then; what it raises ends the work.

        Raises:
            InvalidJobError: there is no such table, or a column that there is no tensor of.
            EngineError: the engine failed, or has no tables.
        """
        raise EngineError(f"dataset {name!r} is {query!r}: {self.place} has no tables; give a path")

    def is_usable(self) -> bool:
        """False if another attempt needs a new session. Asked between two attempts."""
        return True

    @abc.abstractmethod
    def close(self) -> None:
        """Ends what `Engine.open` started, and only that."""


class AgentGroup(abc.ABC):
    """The running agents of one attempt."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def wait(self, timeout: float) -> bool:
        """True if all agents ended within ``timeout`` seconds."""
        return self._ended.wait(timeout)

    def hold_on(self) -> None:  # noqa: B027 - most engines have no connection that may break and come back
        """Sees to it that a connection to the engine that breaks for a while ends nothing.

        From now on the agents, or the driver beside them, are heard of without the engine.
        """

    def note_farewell(self, task: int) -> None:  # noqa: B027 - most engines hear of the end at once
        """An agent has said farewell: nothing of it is left, and it is about to exit."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Ends the agents without their help."""

    @abc.abstractmethod
    def explain(self, error: BaseException) -> RankZeroError:
        """The typed error for what ended the agents early."""


WORDS_TIMEOUT = 10.0
"""Seconds for an engine's error to say what it is."""


def words_of(error: BaseException) -> str:
    """What an engine's error says. One of py4j asks the JVM for it, which may have none left to answer."""
    words: list[str] = []
    within(WORDS_TIMEOUT, lambda: words.append(str(error)))
    return words[0] if words else f"{type(error).__name__}, of which nothing more is known: see driver.log"


def within(seconds: float, action: Callable[[], None]) -> bool:
    """Runs an engine's action in a thread and gives it up after a bound; False if it took longer.

    A call into a JVM that was stopped never comes back.
    """
    done = threading.Event()

    def act() -> None:
        try:
            action()
        except Exception:
            logger.warning("the engine failed", exc_info=True)
        finally:
            done.set()

    threading.Thread(target=act, name="rankzero-engine", daemon=True).start()
    if done.wait(seconds):
        return True
    logger.warning("the engine did not answer within %s s", seconds)
    return False
