"""`ConnectSession`: one barrier stage for each attempt, on the cluster behind a Spark Connect server."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from rankzero import bounds
from rankzero.data.manifest import Manifest
from rankzero.engines.base import AgentConfig, AgentGroup, EngineSession, OnEnd
from rankzero.engines.connect.client import (
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
    DYNAMIC_ALLOCATION,
    ENCRYPTION,
    MASTER,
    SETTINGS,
    TASK_CPUS,
    TASK_GPUS,
    THREADS,
    create_profile,
    most_slots,
    refuse_dynamic_allocation,
    require_slots,
    require_task_gpus,
    task_resources,
)
from rankzero.engines.spark.context import task_code
from rankzero.engines.spark.materialize import materialize, open_query
from rankzero.engines.spark.stage import make_task, task_config
from rankzero.errors import InvalidJobError, RankZeroError
from rankzero.host.network import address_towards, bind_address, is_loopback, own_addresses
from rankzero.job import Job
from rankzero.task.hold import hold
from rankzero.task.stage import run_task

CONNECT_DRIVER_TIMEOUT = bounds.stretched(20.0)  # For an agent to reach the driver, to which it may have no route


class ConnectSession(EngineSession):
    """A session of a Spark Connect server that places agents."""

    def __init__(self, session: Any, server: ServerUrl, job: Job, *, owned: bool) -> None:
        self._session = session
        self._server = server
        self._job = job
        self._owned = owned
        self._is_lost = False
        self.place = f"the cluster behind {server}"

    def check(self) -> None:
        """Raises EngineError, InvalidJobError or InsufficientSlotsError if Spark would refuse the job or hang on it."""
        import pyspark

        job, server = self._job, self._server
        settings = settings_of(self._session, [MASTER, DYNAMIC_ALLOCATION, *SETTINGS])
        master = settings.get(MASTER, "")
        refuse_dynamic_allocation(settings.get(DYNAMIC_ALLOCATION))
        self._resources = task_resources(job, master, settings)
        if self._resources and min(pyspark.__version__, str(self._session.version)) < "4":
            raise InvalidJobError(f"Spark Connect has no resource profiles before Spark 4: set {self._resources} there")
        self._settings = {**settings, **self._resources}
        if job.use_gpu:
            require_task_gpus(job, self._settings.get(TASK_GPUS))
        self.most_slots = most_slots(master, self._settings)
        if self.most_slots is not None:
            require_slots(job, self.most_slots, self.place)
        self._is_local = master.startswith("local[")
        towards = address_towards([server.host], server.port) or socket.gethostname()
        # Executors may be in another network than the server; a local server runs its tasks itself.
        others = [] if self._is_local and is_loopback(towards) else [*own_addresses(), socket.gethostname()]
        self.driver_hosts = list(dict.fromkeys([towards, *others]))
        self.bind_host = bind_address(towards)
        self.encrypts = not self._is_local and any(settings.get(name) == "true" for name in ENCRYPTION)

    def slots(self) -> int:
        """Returns the slots that the settings prove, else those that the job needs, for which Spark itself waits."""
        return self._job.num_tasks if self.most_slots is None else self.most_slots

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
        profile = create_profile(self._session, self._resources) if self._resources else None
        if self._owned:
            # A client that gives up ends its stage as soon as the server is reachable again.
            limit_retries(self._session.client, STAGE_RETRIES)

        def ended(error: BaseException | None) -> None:
            self._is_lost = self._is_lost or is_server_lost(str(error))
            on_end(error)

        group = ConnectGroup(self._session, self._server, f"rankzero-{self._job.run_id}-{secrets.token_hex(4)}")
        group.start(num_tasks, task, {"profile": profile} if profile else {}, ended)
        return group

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
    """The barrier stage of one attempt, under a tag of its own, since other runs use the session, too."""

    def __init__(self, session: Any, server: ServerUrl, tag: str) -> None:
        super().__init__()
        self._session = session
        self._server = server
        self._tag = tag

    def start(self, num_tasks: int, task: Callable[[Any], Any], options: Mapping[str, Any], on_end: OnEnd) -> None:
        """Starts the tasks in a thread; ``options`` are those of `mapInArrow`."""

        def collect() -> None:
            # The tag applies to this thread alone.
            self._session.addTag(self._tag)
            tasks = self._session.range(num_tasks, numPartitions=num_tasks)
            tasks.mapInArrow(task, "task long", barrier=True, **options).collect()

        self._hold(collect, on_end)

    def cancel(self) -> None:
        """Interrupts the stage, as soon as the server has it; its tasks, agents and ranks end with it."""
        with contextlib.suppress(Exception):
            # The server has no stage whose task is still pickled.
            while not self._session.interruptTag(self._tag) and not self._ended.wait(bounds.POLL_INTERVAL_LONGEST):
                pass

    def explain(self, error: BaseException) -> RankZeroError:
        """Returns the typed error for an error of the server."""
        return explain(str(error), str(self._server))
