"""`SparkEngine`: agents as the tasks of one barrier stage.

With ``master=`` the session lives in the driver's own process and ends with the run, so the
caller's process does not change; with ``session=`` the caller's session is used and left running.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankzero.data.manifest import Manifest
from rankzero.engines.base import CODE_PATH, AgentConfig, Engine, EngineSession, OnEnd
from rankzero.engines.gpus import GpuClaims, local_gpus, require_local_gpus
from rankzero.engines.local import LOOPBACK, LocalEngine
from rankzero.engines.spark import jvm
from rankzero.engines.spark.conf import (
    DYNAMIC_ALLOCATION,
    ENCRYPTION,
    EXECUTOR_ENV,
    LOCAL,
    SETTINGS,
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
    task_resources,
)
from rankzero.engines.spark.context import KnownContext, known
from rankzero.engines.spark.materialize import materialize, open_query
from rankzero.engines.spark.stage import SparkGroup, make_task, task_config
from rankzero.errors import EngineError, InvalidJobError, require
from rankzero.host.network import without_brackets
from rankzero.job import Job
from rankzero.kinds import STRINGS
from rankzero.masking import without_credentials
from rankzero.task import hold

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_APP_ID, _WITHOUT_MASTER = "spark.app.id", "spark-application-"  # The ID's prefix if no master has given one


@dataclass(frozen=True)
class SparkEngine(Engine):
    """Runs the ranks as one barrier stage of a Spark cluster.

    Attributes:
        master: ``local[N]``, ``local-cluster[...]``, ``spark://host:port``, ``yarn`` or ``k8s://...``.
            None, without a session, is an embedded ``local[N]`` with as many slots as tasks.
        conf: Spark configuration for a session that the engine starts.
        session: A SparkSession of this process, which is used instead and left running.

    Raises:
        InvalidJobError: both master and session, an unknown master, or conf that is not strings.
    """

    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict, repr=False)
    session: SparkSession | None = field(default=None, repr=False)
    has_tables = True

    @staticmethod
    def embedded(conf: Mapping[str, str]) -> Engine:
        """Returns the engine of a pipeline step that names no cluster: a Spark on this machine, or its processes.

        With a configuration Spark is needed, so a run without pyspark is refused.
        """
        if conf or importlib.util.find_spec("pyspark"):
            return SparkEngine(conf=conf)
        logger.info("pyspark is not installed here, so the ranks are processes of this machine")
        return LocalEngine()

    def __post_init__(self) -> None:
        object.__setattr__(self, "conf", STRINGS.check("conf", self.conf))
        cpus = self.conf.get(TASK_CPUS, "1")
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
            # Parameters of Spark Connect may be tokens, whatever their names.
            given = re.sub(r"(?s);.+", ";...", without_credentials(str(self.master)))
            advice = "use local[N], local-cluster[N,C,M], spark://host:port, yarn or k8s://..."
            if given.startswith("sc://"):
                advice = f"give SparkConnectEngine({given!r})"
            elif hasattr(self.master, "createDataFrame"):
                given, advice = type(self.master).__name__, "give session="
            raise InvalidJobError(f"master is {given!r}; {advice}")

    def num_processes(self, processes_per_task: int, *, use_gpu: bool) -> int | None:
        """Returns the ranks of all slots that master and conf prove; without a master, or with local GPUs, as
        `LocalEngine`.
        """
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
        """Refuses a job that is impossible by master and conf alone."""
        if self.session is not None:
            return
        refuse_dynamic_allocation(self.conf.get(DYNAMIC_ALLOCATION))
        master, conf = self._master(job), self._whole_conf(job)
        conf |= task_resources(job, master, conf)
        slots = most_slots(master, conf)
        if slots is not None:
            require_slots(job, slots, f"master {master!r}")
        if job.use_gpu and LOCAL.fullmatch(master):
            require_local_gpus(job.least_processes)
        elif job.use_gpu:
            require_task_gpus(job, conf.get(TASK_GPUS))
        jvm.require_pyspark()
        jvm.require_java()
        if LOCAL.fullmatch(master) and jvm.own_python(conf) == sys.executable:
            require("the ranks need", "torch", "torch")

    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the master, which may be shown, and the conf, which may hold credentials."""
        return {"kind": "spark", "master": self.master}, {"conf": dict(self.conf)}

    def open(self, job: Job, env: Mapping[str, str]) -> SparkEngineSession:
        """Starts or takes the session, and checks its slots and resources."""
        if self.session is not None:
            opened = SparkEngineSession(self.session.sparkContext, job)
        else:
            with contextlib.ExitStack() as own:
                asked, place = self._asked(job), self._place(job, env, own)
                context = jvm.start_context(self._master(job), job.name, self.conf, asked)
                opened = SparkEngineSession(context, job, own.pop_all(), asked=asked, place=place)
        try:
            opened.check()
        except BaseException:
            opened.close()
            raise
        return opened

    def _asked(self, job: Job) -> dict[str, str]:
        return conf_for(job, self._master(job), self.conf, spark_defaults())

    def _whole_conf(self, job: Job) -> dict[str, str]:
        return {**spark_defaults(), **self._asked(job), **self.conf}

    def _place(self, job: Job, env: Mapping[str, str], own: contextlib.ExitStack) -> AgentConfig | None:
        """Returns where agents with this machine's Python find rankzero and zygotes; None if others will run them.

        The process that forks the zygotes imports torch while the JVM starts. ``own`` ends it.
        """
        conf = self._whole_conf(job)
        if not LOCAL.fullmatch(self._master(job)) or jvm.own_python(conf) != sys.executable:
            return None
        place: AgentConfig = {"code_path": CODE_PATH}
        is_usual = hold.SHARED not in os.environ and not any(name.startswith(EXECUTOR_ENV) for name in conf)
        if job.warm_start and is_usual and hasattr(os, "pidfd_open"):
            # Python reads what Spark sets for its Python workers as it starts.
            config = {**place, "env": {"PYTHONUNBUFFERED": "YES", **env}}
            config = task_config(config, int(conf.get(TASK_CPUS, "1")), job.processes_per_task, threads_set=False)
            config["env"] = hold.with_defaults(config)
            # The name of a socket must be short. Otherwise each task starts a zygote of its own.
            with contextlib.suppress(OSError):
                zygote = hold.start_zygote(config, None, is_warm=True, name=hold.key_of(config))
                own.callback(zygote.close)
                place["shared"] = zygote.path
        return place

    def _master(self, job: Job) -> str:
        cores = (job.cpus_per_process or 0) * job.processes_per_task or int(self.conf.get(TASK_CPUS, "1"))
        return self.master or f"local[{job.num_tasks * cores}]"


class SparkEngineSession(EngineSession):
    """A SparkContext that runs one barrier stage for each attempt."""

    def __init__(
        self,
        context: SparkContext,
        job: Job,
        own: contextlib.ExitStack | None = None,
        *,
        asked: Mapping[str, str] | None = None,
        place: AgentConfig | None = None,
    ) -> None:
        self._context = context
        self._agents_place = place
        self._job = job
        self._own = own
        self._master = str(self._context.master)
        self._gpus: list[str] | None = None
        self._claims = GpuClaims()
        self.place = f"the cluster at {self._master!r}"
        if asked:
            settings = " ".join(f"{name}={value}" for name, value in sorted(asked.items()))
            self.notes = [f"asked {self.place} for {settings}, which this run needs"]

    def slots(self) -> int:
        """Returns the slots of the registered executors; with local GPUs, at most those that other runs leave."""
        slots = self._known.slots(self._resources)
        if self._gpus is None:
            return slots
        return min(slots, len(self._claims.free(self._gpus)) // self._job.processes_per_task)

    def reserve(self, num_tasks: int) -> bool:
        """Claims local GPUs for ranks that run on this machine; Spark reserves those of a cluster."""
        count = num_tasks * self._job.processes_per_task
        return self._gpus is None or self._claims.take(self._gpus, count)

    @property
    def _known(self) -> KnownContext:
        return known(self._context)

    def check(self) -> None:
        """Raises EngineError or InsufficientSlotsError for a job that Spark would refuse, hang on or ignore."""
        self._require_running()
        try:
            self._check()
        except Exception:
            # Spark may have stopped the context meanwhile, which explains any other error.
            self._require_running()
            raise

    def _require_running(self) -> None:
        is_running = self._context._jsc is not None and not self._known.is_stopped()
        # Spark gives up after a minute, makes a context with an ID of its own, and stops it a moment later.
        if is_running and not (self._own and str(self._known.setting(_APP_ID)).startswith(_WITHOUT_MASTER)):
            return
        if not self._own:
            raise EngineError("the SparkContext of this session was stopped: pass a session that is running")
        what = f"no Spark master answers at {self._master!r}, or it refused the application"
        raise EngineError(f"{what}: start it, or correct the host and port", code="RZ-2001")

    def _check(self) -> None:
        """Checks the job against the settings, and sets the attributes that follow from them."""
        job, setting = self._job, self._known.setting
        refuse_dynamic_allocation(setting(DYNAMIC_ALLOCATION))
        settings = {name: value for name in SETTINGS if (value := setting(name)) is not None}
        self._resources = task_resources(job, self._master, settings)
        self._settings = {**settings, **self._resources}
        self.most_slots = most_slots(self._master, self._settings)
        if job.use_gpu and LOCAL.fullmatch(self._master):
            require_local_gpus(job.least_processes)
            self._gpus = local_gpus()
            self.most_slots = min(self.most_slots or 0, len(self._gpus) // job.processes_per_task)
        elif job.use_gpu:
            require_task_gpus(job, self._settings.get(TASK_GPUS))
        if self.most_slots is not None and self._known.slots(self._resources) < job.least_tasks:
            require_slots(job, self.most_slots, self.place)
        is_local = self._master.startswith("local")
        # Spark's own executors reach the driver at this host.
        host = LOOPBACK if is_local else without_brackets(str(setting("spark.driver.host")))
        self.driver_hosts = [host]
        self.bind_host = host if is_local else without_brackets(setting("spark.driver.bindAddress") or host)
        self.encrypts = not is_local and any(settings.get(name) == "true" for name in ENCRYPTION)
        self.url = self._known.url
        # The broadcast is made here, because `open` has a time limit.
        self._known.code(zipped=not self._agents_place)

    def launch(self, num_tasks: int, config: AgentConfig, on_end: OnEnd) -> SparkGroup:
        """Starts the barrier stage in a thread with its own job group."""
        is_local = self._master.startswith("local")
        cores, workers = int(self._settings.get(TASK_CPUS, "1")), self._job.processes_per_task
        config = {**config, **(self._agents_place or {})}
        config = task_config(config, cores, workers, threads_set=THREADS in self._settings)
        task = make_task(
            config,
            self._known.code(zipped=not self._agents_place),
            None if self._gpus is None else self._claims.held,
            LOOPBACK if is_local else None,
        )
        return SparkGroup(self._context, self._job, num_tasks, task, on_end, self._known.profile(self._resources))

    def read_table(
        self, query: str, folder: str, name: str, say: Callable[[str], None], check: Callable[[], None]
    ) -> Manifest:
        """Computes a table with a session of this context, as `EngineSession.read_table` describes."""
        from pyspark.sql import SparkSession

        session = SparkSession.builder.getOrCreate()
        return materialize(open_query(session, query), folder, name, say, check)

    def is_usable(self) -> bool:
        """Returns False if the JVM has exited or the SparkContext was stopped."""
        try:
            return not self._known.is_stopped()
        except Exception:
            return False

    def close(self) -> None:
        """Stops the SparkContext if the engine started it, and releases the run's claims of GPUs."""
        self._claims.release()
        if not self._own:
            return
        self._own.close()
        alive = self.is_usable()
        with contextlib.suppress(Exception):
            self._context.stop()
        if not alive:
            jvm.forget()
