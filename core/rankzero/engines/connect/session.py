"""`ConnectSession`: one barrier stage for each attempt, on the cluster behind a Spark Connect server."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rankzero import bounds
from rankzero.data.manifest import Manifest
from rankzero.engines.base import AgentConfig, AgentGroup, EngineSession, OnEnd
from rankzero.engines.connect.client import (
    RETRIES,
    STAGE_RETRIES,
    ServerUrl,
    explain,
    is_server_lost,
    limit_retries,
    require_server,
    settings_of,
)
from rankzero.engines.local import LOOPBACK
from rankzero.engines.spark.conf import (
    CORES_MAX,
    DYNAMIC_ALLOCATION,
    ENCRYPTION,
    EXECUTOR_CORES,
    EXECUTOR_GPUS,
    INSTANCES,
    MASTER,
    TASK_CPUS,
    TASK_GPUS,
    THREADS,
    TaskResources,
    can_have_profiles,
    create_profile,
    most_slots,
    refuse_dynamic_allocation,
    require_slots,
    require_task_cpus,
    require_task_gpus,
    task_resources,
)
from rankzero.engines.spark.context import task_code
from rankzero.engines.spark.materialize import materialize, open_query
from rankzero.engines.spark.stage import make_task, task_config
from rankzero.errors import RankZeroError
from rankzero.host.network import address_towards, bind_address, is_loopback, own_addresses
from rankzero.job import Job
from rankzero.task.hold import hold
from rankzero.task.stage import run_task

CONNECT_DRIVER_TIMEOUT = bounds.stretched(20.0)  # For an agent to reach the driver, to which it may have no route

logger = logging.getLogger(__name__)

_SETTINGS = [
    MASTER,
    DYNAMIC_ALLOCATION,
    TASK_CPUS,
    TASK_GPUS,
    INSTANCES,
    EXECUTOR_CORES,
    EXECUTOR_GPUS,
    CORES_MAX,
    THREADS,
    *ENCRYPTION,
]


class ConnectSession(EngineSession):
    """A session of a Spark Connect server that places agents."""

    def __init__(self, session: Any, server: ServerUrl, job: Job, *, owned: bool) -> None:
        self._session = session
        self._server = server
        self._job = job
        self._owned = owned
        self._is_lost = False

    @functools.cached_property
    def _own_settings(self) -> dict[str, str]:
        return settings_of(self._session, _SETTINGS)

    @functools.cached_property
    def _resources(self) -> TaskResources | None:
        return task_resources(self._job, self._own_settings.get(MASTER, ""), self._own_settings)

    @functools.cached_property
    def _settings(self) -> dict[str, str]:
        """The server's settings, as they apply to the tasks of this job."""
        return {**self._own_settings, **(self._resources.settings if self._resources else {})}

    @property
    def _is_local(self) -> bool:
        """True if the server runs its tasks itself."""
        return self._settings.get(MASTER, "").startswith("local[")

    @property
    def place(self) -> str:
        """Display name of the cluster, by the URL of its server."""
        return f"the cluster behind {self._server}"

    def check(self) -> None:
        """Raises EngineError, InvalidJobError or InsufficientSlotsError if Spark would refuse the job or hang on it."""
        refuse_dynamic_allocation(self._settings.get(DYNAMIC_ALLOCATION))
        if self._resources and not can_have_profiles(self._session):
            require_task_cpus(self._job, self._own_settings.get(TASK_CPUS, "1"))
            require_task_gpus(self._job, self._own_settings.get(TASK_GPUS))
        if self._job.use_gpu:
            require_task_gpus(self._job, self._settings.get(TASK_GPUS))
        if self.most_slots is not None:
            require_slots(self._job, self.most_slots, self.place)

    @property
    def most_slots(self) -> int | None:
        """Most task slots that the cluster can have, by the server's settings; None if they do not limit them."""
        return most_slots(self._settings.get(MASTER, ""), self._settings)

    def slots(self) -> int:
        """Returns the slots that the settings prove, else those that the job needs, for which Spark itself waits."""
        return self._job.num_tasks if self.most_slots is None else self.most_slots

    @property
    def driver_host(self) -> str:
        """The address of this host towards the server."""
        return self.driver_hosts[0]

    @functools.cached_property
    def driver_hosts(self) -> list[str]:
        """All addresses of this host, the one towards the server first: executors may be in another network than the
        server.
        """
        towards = address_towards([self._server.host], self._server.port) or socket.gethostname()
        if self._is_local and is_loopback(towards):
            return [LOOPBACK]
        return list(dict.fromkeys([towards, *own_addresses(), socket.gethostname()]))

    @property
    def bind_host(self) -> str:
        """Any address, since the one that executors reach is unknown; loopback if they run on this host."""
        return bind_address(self.driver_hosts[0])

    @property
    def encrypts(self) -> bool:
        """True if the cluster encrypts its own connections."""
        return not self._is_local and any(self._settings.get(name) == "true" for name in ENCRYPTION)

    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> ConnectGroup:
        """Starts the barrier stage in a thread, under a tag of its own."""
        config = {**config, "connect_timeout": min(config["connect_timeout"], CONNECT_DRIVER_TIMEOUT())}
        return self._start(num_tasks, config, on_end, hold)

    def host_driver(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> ConnectGroup:
        """Starts a stage whose task 0 runs the driver, which gives the agents their configuration.

        Args:
            num_tasks: Number of tasks.
            config: The configuration of the tasks, as `run_task` needs it.
            on_end: Called once, from another thread, when the stage has ended.
        """
        return self._start(num_tasks, config, on_end, run_task)

    def _start(
        self, num_tasks: int, config: AgentConfig, on_end: OnEnd, run: Callable[[dict[str, Any]], None]
    ) -> ConnectGroup:
        cores = int(self._settings.get(TASK_CPUS, "1"))
        task = make_task(
            task_config(config, cores, self._job.processes_per_task, threads_set=THREADS in self._settings),
            # A part of the task's function, which Spark sends to each executor once for all its tasks.
            SimpleNamespace(value=task_code(run)),
            None,
            LOOPBACK if self._is_local else None,
        )
        self._limit_retries(RETRIES)
        profile = create_profile(self._session, self._resources) if self._resources else None
        retry_longer = functools.partial(self._limit_retries, STAGE_RETRIES)

        def ended(error: BaseException | None) -> None:
            self._is_lost = self._is_lost or is_server_lost(str(error))
            on_end(error)

        return ConnectGroup(self._session, self._server, self._job, num_tasks, task, ended, retry_longer, profile)

    def _limit_retries(self, count: int) -> None:
        # A caller's session keeps the retries that its user set.
        if self._owned:
            limit_retries(self._session.client, count)

    def read_table(
        self, query: str, folder: str, name: str, say: Callable[[str], None], check: Callable[[], None]
    ) -> Manifest:
        """Computes a table with this session, as `EngineSession.read_table` describes."""
        return materialize(open_query(self._session, query), folder, name, say, check)

    def is_usable(self) -> bool:
        """Returns False if the server has ended, or has ended the session."""
        try:
            if self._is_lost:
                return False
            if self._owned:
                # A request would be retried for as long as the stage is.
                require_server(self._server)
            return bool(self._session.version)
        except Exception:
            return False

    def close(self) -> None:
        """Closes the connection, if the engine opened it. The session stays for the next launch, until it times out."""
        if self._owned:
            with contextlib.suppress(Exception):
                self._session.client.close()


class ConnectGroup(AgentGroup):
    """The barrier stage of one attempt, while it runs."""

    def __init__(
        self,
        session: Any,
        server: ServerUrl,
        job: Job,
        num_tasks: int,
        task: Callable[[Any], Any],
        on_end: OnEnd,
        retry_longer: Callable[[], None],
        profile: Any,
    ) -> None:
        super().__init__()
        self._session = session
        self._server = server
        self._num_tasks = num_tasks
        self._task = task
        self._retry_longer = retry_longer
        self._profile = profile
        # Other runs use this session, too.
        self._tag = f"rankzero-{job.run_id}-{secrets.token_hex(4)}"
        self._hold(self._collect, on_end)

    def _collect(self) -> None:
        # The tag applies to this thread alone.
        self._session.addTag(self._tag)
        tasks = self._session.range(self._num_tasks, numPartitions=self._num_tasks)
        with_profile = {"profile": self._profile} if self._profile else {}
        tasks.mapInArrow(self._task, "task long", barrier=True, **with_profile).collect()

    def tolerate_outage(self) -> None:
        """Retries for longer: a client that gives up ends its stage as soon as the server is reachable again."""
        self._retry_longer()

    def cancel(self) -> None:
        """Interrupts the stage, as soon as the server has it; its tasks, agents and ranks end with it."""
        with contextlib.suppress(Exception):
            # The server has no stage whose task is still pickled.
            while not self._session.interruptTag(self._tag) and not self._ended.wait(bounds.POLL_INTERVAL_LONGEST):
                pass

    def explain(self, error: BaseException) -> RankZeroError:
        """Returns the typed error for an error of the server."""
        return explain(str(error), str(self._server))
