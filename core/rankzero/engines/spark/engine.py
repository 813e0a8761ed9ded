"""`SparkEngine`: agents as the tasks of one barrier stage.

With ``master=`` the session lives in the driver's own process and ends with the run, so the
caller's process stays as it was; with ``session=`` the caller's session is used and left alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankzero.data.manifest import Manifest
from rankzero.engines.base import AgentConfig, Engine, EngineSession, OnEnd
from rankzero.engines.gpus import GpuClaims, local_gpus, require_local_gpus
from rankzero.engines.local import LOOPBACK, LocalEngine
from rankzero.engines.spark.conf import (
    CORES_MAX,
    DYNAMIC_ALLOCATION,
    ENCRYPTION,
    EXECUTOR_CORES,
    EXECUTOR_GPUS,
    INSTANCES,
    LOCAL,
    TASK_CPUS,
    TASK_GPUS,
    THREADS,
    conf_for,
    is_master,
    most_slots,
    refuse_dynamic_allocation,
    require_slots,
    require_task_gpus,
    spark_defaults,
    whole_gpus,
)
from rankzero.engines.spark.context import KnownContext, known
from rankzero.engines.spark.errors import first_lines
from rankzero.engines.spark.materialize import materialize, open_query
from rankzero.engines.spark.stage import SparkGroup, make_task, task_config
from rankzero.errors import EngineError, InvalidJobError
from rankzero.host.network import address_towards, without_brackets
from rankzero.job import Job, check_strings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

# Spark's default retries an unready barrier stage every 15 s; a session of our own looks each second.
_OWN_DEFAULTS = {
    "spark.ui.showConsoleProgress": "false",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
}
_DRIVER_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
# A JVM that lives for one launch: what it would gain by compiling better, or collecting in parallel, it never earns
# back. Half the processor time of its start.
_SHORT_LIVED_JVM = "-XX:TieredStopAtLevel=1"
_SIMPLE_COLLECTOR = "-XX:+UseSerialGC"
# A JVM that is told of two collectors does not start.
_OTHER_JAVA_OPTIONS = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")

_CONNECT_MODE = ("SPARK_REMOTE", "SPARK_LOCAL_REMOTE", "SPARK_CONNECT_MODE_ENABLED")

_OWN_LOCAL_DEFAULTS = {
    "spark.driver.host": LOOPBACK,
    "spark.driver.bindAddress": LOOPBACK,
    "spark.ui.enabled": "false",
}


@dataclass(frozen=True)
class SparkEngine(Engine):
    """Runs the ranks as one barrier stage of a Spark cluster.

    Attributes:
        master: ``local[N]``, ``local-cluster[...]``, ``spark://host:port``, ``yarn`` or ``k8s://...``.
            None, without a session, is an embedded ``local[N]`` with as many slots as tasks.
        conf: Spark configuration for a session that the engine starts.
        session: A SparkSession of this process, to be used instead and left running.

    Raises:
        InvalidJobError: both master and session, an unknown master, or conf that is not strings.
    """

    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict, repr=False)
    session: SparkSession | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        cpus = check_strings("conf", self.conf).get(TASK_CPUS, "1")
        if not cpus.isdecimal() or int(cpus) < 1:
            raise InvalidJobError(f"{TASK_CPUS} is {cpus!r}; it must be a positive whole number")
        if self.session is not None and (self.master is not None or self.conf):
            raise InvalidJobError("a session has its master and conf already: give session= alone")
        if self.session is not None and not hasattr(self.session, "_jsparkSession"):
            raise InvalidJobError(
                f"session is a {type(self.session).__module__}.{type(self.session).__name__}; a classic "
                "SparkSession is needed: give one of Spark Connect to SparkConnectEngine(session=...)"
            )
        if self.master is not None and not is_master(self.master):
            raise InvalidJobError(
                f"master is {self.master!r}; use local[N], local-cluster[N,C,M], spark://host:port, yarn or k8s://..."
            )

    def num_processes(self, processes_per_task: int, *, use_gpu: bool) -> int | None:
        """A task in each slot that master and conf tell; without a master, and with GPUs here, as `LocalEngine`."""
        if self.session is not None:
            context = self.session.sparkContext
            master, conf = str(context.master), dict(context.getConf().getAll())
        else:
            master, conf = self.master or "", {**spark_defaults(), **self.conf}
        is_local = LOCAL.fullmatch(master) is not None
        if not master or (is_local and use_gpu):
            return LocalEngine().num_processes(processes_per_task, use_gpu=use_gpu)
        slots = most_slots(master, conf) if is_local or not master.startswith("spark:") else None
        return slots * processes_per_task if slots else None

    def check(self, job: Job) -> None:
        """Refuses what master and conf alone show to be impossible."""
        if self.session is not None:
            return
        master, defaults = self._master(job), spark_defaults()
        refuse_dynamic_allocation(self.conf.get(DYNAMIC_ALLOCATION))
        conf = {**defaults, **conf_for(job, master, self.conf, defaults), **self.conf}
        slots = most_slots(master, conf)
        if slots is not None:
            require_slots(job, slots, f"master {master!r}")
        if job.use_gpu and LOCAL.fullmatch(master):
            require_local_gpus(job.least_processes)
        elif job.use_gpu:
            require_task_gpus(job, conf.get(TASK_GPUS))
        if not find_java():
            raise EngineError(
                "Spark needs Java 17 or newer and none was found (JAVA_HOME, PATH): install a JRE, for "
                "example `apt-get install openjdk-17-jre-headless`"
            )

    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The master may be shown; the conf may hold credentials."""
        return {"kind": "spark", "master": self.master}, {"conf": dict(self.conf)}

    @property
    def has_tables(self) -> bool:
        """Always."""
        return True

    @property
    def can_detach(self) -> bool:
        """Not with a session of the caller's process."""
        return self.session is None

    @property
    def prefers_own_process(self) -> bool:
        """A session of our own is started where it cannot disturb the caller."""
        return self.session is None

    def open(self, job: Job) -> SparkEngineSession:
        """Starts or takes the session, and checks slots and resources there."""
        asked = {} if self.session else conf_for(job, self._master(job), self.conf, spark_defaults())
        session = self.session or self._start_session(job, asked)
        opened = SparkEngineSession(session, job, owned=self.session is None, asked=asked)
        try:
            opened.check()
        except BaseException:
            opened.close()
            raise
        return opened

    def _master(self, job: Job) -> str:
        return self.master or f"local[{job.num_tasks}]"

    def _start_session(self, job: Job, asked: Mapping[str, str]) -> SparkSession:
        from pyspark import SparkConf
        from pyspark.sql import SparkSession

        java = find_java()
        if java:
            os.environ.setdefault("JAVA_HOME", java)
        for name in _CONNECT_MODE:
            # Of a process above us that uses Spark Connect; with them pyspark starts no session of its own.
            os.environ.pop(name, None)
        # Without this Spark runs whatever `python3` is first on the PATH.
        os.environ["PYSPARK_PYTHON"] = self.conf.get(
            "spark.pyspark.python", os.environ.get("PYSPARK_PYTHON", sys.executable)
        )
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        master = self._master(job)
        if master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
            # For the JVM that makes the command line of the next one.
            os.environ.setdefault("SPARK_LAUNCHER_OPTS", _short_lived_jvm(self.conf))
        conf = SparkConf().setMaster(master).setAppName(f"rankzero {job.name}")
        local_defaults = _OWN_LOCAL_DEFAULTS if master.startswith("local") else {}
        if local_defaults and not spark_defaults():
            local_defaults = {**local_defaults, _DRIVER_JAVA_OPTIONS: _short_lived_jvm(self.conf)}
        for key, value in {**_OWN_DEFAULTS, **local_defaults, **asked}.items():
            conf.setIfMissing(key, value)
        for key, value in self.conf.items():
            conf.set(key, value)
        try:
            return SparkSession.builder.config(conf=conf).getOrCreate()
        except Exception as error:
            raise EngineError(f"no SparkSession on master {master!r}: {first_lines(str(error))}") from error


class SparkEngineSession(EngineSession):
    """A SparkContext that runs one barrier stage for each attempt."""

    def __init__(self, session: SparkSession, job: Job, *, owned: bool, asked: Mapping[str, str] | None = None) -> None:
        self._session = session
        self._context = session.sparkContext
        self._job = job
        self._owned = owned
        self._master = str(self._context.master)
        self._asked = dict(asked or {})
        self._gpus: list[str] | None = None
        self._claims = GpuClaims()

    @property
    def place(self) -> str:
        """The cluster, by its master."""
        return f"the cluster at {self._master!r}"

    @property
    def notes(self) -> list[str]:
        """The settings that a session of our own was given for this run."""
        settings = " ".join(f"{name}={value}" for name, value in sorted(self._asked.items()))
        return [f"asked {self.place} for {settings}, which this run needs"] if settings else []

    def slots(self) -> int:
        """What the executors that have registered offer; of a machine's own GPUs, those that no other run holds."""
        slots = self._known.slots()
        if self._gpus is None:
            return slots
        return min(slots, len(self._claims.free(self._gpus)) // self._job.processes_per_task)

    @property
    def most_slots(self) -> int | None:
        """What master and settings prove."""
        names = (TASK_CPUS, TASK_GPUS, INSTANCES, EXECUTOR_CORES, EXECUTOR_GPUS, CORES_MAX)
        settings = {name: value for name in names if (value := self._known.setting(name)) is not None}
        most = most_slots(self._master, settings)
        return most if self._gpus is None else min(most or 0, len(self._gpus) // self._job.processes_per_task)

    def slots_by_host(self) -> dict[str, int]:
        """By the addresses under which barrier tasks know their hosts; empty if this Spark does not tell."""
        try:
            return self._known.slots_by_host()
        except Exception as error:
            logger.warning("no host can be left out, since the executors cannot be listed: %s", error)
            return {}

    def num_agents(self, num_tasks: int) -> int:
        """One for each task."""
        return num_tasks

    def reserve(self, num_tasks: int) -> bool:
        """Holds the GPUs of this machine, where the ranks run on it; Spark reserves those of a cluster."""
        count = num_tasks * self._job.processes_per_task
        return self._gpus is None or self._claims.take(self._gpus, count)

    @property
    def _known(self) -> KnownContext:
        return known(self._context)

    @property
    def driver_host(self) -> str:
        """The host that Spark's own executors use to reach the driver."""
        if self._master.startswith("local"):
            return LOOPBACK
        return without_brackets(str(self._known.setting("spark.driver.host")))

    @property
    def driver_hosts(self) -> list[str]:
        """That one, then what this host's name and its way to the master stand for."""
        if self._master.startswith("local"):
            return [LOOPBACK]
        found = [self.driver_host]
        if address := re.fullmatch(r"spark://\[?(.+?)\]?:(\d+).*", self._master):
            found.append(address_towards([address[1]], int(address[2])) or self.driver_host)
        return list(dict.fromkeys(found))

    @property
    def bind_host(self) -> str:
        """The address that Spark's own driver binds."""
        if self._master.startswith("local"):
            return LOOPBACK
        return without_brackets(self._known.setting("spark.driver.bindAddress") or self.driver_host)

    @property
    def encrypts(self) -> bool:
        """True where executors reach Spark's own driver by encrypted connections."""
        return not self._master.startswith("local") and any(self._known.setting(name) == "true" for name in ENCRYPTION)

    @property
    def url(self) -> str | None:
        """The Spark UI; None where it is switched off, as in an embedded Spark."""
        return self._known.url

    def check(self) -> None:
        """Raises EngineError or InsufficientSlotsError for what Spark would refuse, hang on or ignore."""
        if self._context._jsc is None or self._known.is_stopped():
            raise EngineError("the SparkContext of this session was stopped: give a session that lives")
        refuse_dynamic_allocation(self._known.setting(DYNAMIC_ALLOCATION))
        if self._job.use_gpu and LOCAL.fullmatch(self._master):
            require_local_gpus(self._job.least_processes)
            self._gpus = local_gpus()
        elif self._job.use_gpu:
            require_task_gpus(self._job, self._known.setting(TASK_GPUS))
        most = self.most_slots
        if most is not None and self._known.slots() < self._job.least_tasks:
            require_slots(self._job, most, self.place)
        # Here, where somebody watches the clock.
        _ = self._known.code

    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> SparkGroup:
        """Starts the barrier stage in a thread with its own job group."""
        is_local = self._master.startswith("local")
        cores, workers = int(self._known.setting(TASK_CPUS) or "1"), self._job.processes_per_task
        task = make_task(
            task_config(config, cores, workers, threads_set=self._known.setting(THREADS) is not None),
            self._known.code,
            None if self._gpus is None else self._claims.held,
            LOOPBACK if is_local else None,
        )
        return SparkGroup(self._context, self._job, num_tasks, task, on_end)

    def read_table(
        self, query: str, folder: str, name: str, say: Callable[[str], None], check: Callable[[], None]
    ) -> Manifest:
        """By this session; see `EngineSession.read_table`."""
        return materialize(open_query(self._session, query), folder, name, say, check)

    def is_usable(self) -> bool:
        """False if the JVM has exited or the SparkContext was stopped."""
        try:
            return not self._known.is_stopped()
        except Exception:
            return False

    def close(self) -> None:
        """Stops the SparkContext if the engine started it, and gives the GPUs back."""
        self._claims.release()
        if not self._owned:
            return
        alive = self.is_usable()
        with contextlib.suppress(Exception):
            self._session.stop()
        if not alive:
            _forget_jvm()


def _forget_jvm() -> None:
    """Makes pyspark start a new JVM: it keeps the gateway to the one that died. For a process of our own only."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    gateway = SparkContext._gateway
    if gateway is not None:
        with contextlib.suppress(Exception):
            gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = SparkSession._activeSession = None


def gpus_per_task(session: SparkSession) -> int:
    """GPUs that one task of this session gets. Raises InvalidJobError if the conf says none."""
    amount = session.sparkContext.getConf().get(TASK_GPUS)
    master = str(session.sparkContext.master)
    if amount is None and LOCAL.fullmatch(master):
        return 1
    return whole_gpus(amount)


def find_java() -> str | None:
    """The home of a Java: ``JAVA_HOME``, else the one on the PATH. Its version is Spark's to check."""
    home = os.environ.get("JAVA_HOME")
    if home and os.access(os.path.join(home, "bin", "java"), os.X_OK):
        return home
    java = shutil.which("java")
    return os.path.dirname(os.path.dirname(os.path.realpath(java))) if java else None


def _short_lived_jvm(conf: Mapping[str, str]) -> str:
    said = [os.environ.get(name, "") for name in _OTHER_JAVA_OPTIONS]
    said.append(conf.get("spark.driver.defaultJavaOptions", ""))
    return _SHORT_LIVED_JVM if "GC" in " ".join(said) else f"{_SHORT_LIVED_JVM} {_SIMPLE_COLLECTOR}"
