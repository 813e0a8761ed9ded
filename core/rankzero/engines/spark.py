"""`SparkEngine`: agents as the tasks of one barrier stage.

With ``master=`` the session lives in the driver's own process and ends with the run, so the
caller's process stays as it was; with ``session=`` the caller's session is used and left alone.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import re
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankzero.agent import hold as hold_module
from rankzero.agent import start as start_module
from rankzero.agent.network import address_towards
from rankzero.engines.base import AgentConfig, AgentGroup, Engine, EngineSession, OnEnd
from rankzero.engines.local import CUT_OFF, LOOPBACK, local_gpus, require_local_gpus
from rankzero.errors import EngineError, InsufficientSlotsError, InvalidJobError, RankZeroError, StartTimeoutError
from rankzero.job import Job, check_strings
from rankzero.policy import LOST, PREEMPTED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

SLOTS_SETTLE = 15.0
"""Seconds without a new executor after which a cluster counts as complete."""

SLOTS_INTERVAL = 0.1
"""Seconds between two looks at the number of slots while executors register."""

ERROR_LIMIT = 2000
"""Characters of Spark's own text that an error quotes."""

_SLOTS_SHARE = 0.9

_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:\s*,\s*\d+)?\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\]")
_REMOTE = re.compile(r"(spark://.+|yarn|k8s://.+)")

_DYNAMIC_ALLOCATION = "spark.dynamicAllocation.enabled"
_TASK_CPUS = "spark.task.cpus"
_TASK_GPUS = "spark.task.resource.gpu.amount"

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
        cpus = check_strings("conf", self.conf).get(_TASK_CPUS, "1")
        if not cpus.isdecimal() or int(cpus) < 1:
            raise InvalidJobError(f"{_TASK_CPUS} is {cpus!r}; it must be a positive whole number")
        if self.session is not None and (self.master is not None or self.conf):
            raise InvalidJobError("a session has its master and conf already: give session= alone")
        if self.session is not None and not hasattr(self.session, "_jsparkSession"):
            raise InvalidJobError(
                f"session is a {type(self.session).__module__}.{type(self.session).__name__}; a classic "
                "SparkSession is needed, Spark Connect is not supported by this version"
            )
        if self.master is not None and not _is_master(self.master):
            raise InvalidJobError(
                f"master is {self.master!r}; use local[N], local-cluster[N,C,M], spark://host:port, yarn or k8s://..."
            )

    def check(self, job: Job) -> None:
        """Refuses what master and conf alone show to be impossible."""
        if self.session is not None:
            return
        conf, master = self.conf, self._master(job)
        _refuse_dynamic_allocation(conf.get(_DYNAMIC_ALLOCATION))
        slots = _known_slots(master, conf)
        if slots is not None:
            _require_slots(job, slots, f"master {master!r}")
        if job.use_gpu and _LOCAL.fullmatch(master):
            require_local_gpus(job.num_processes)
        elif job.use_gpu and (_TASK_GPUS in conf or not _has_spark_defaults()):
            _require_task_gpus(job, conf.get(_TASK_GPUS))
        if not find_java():
            raise EngineError(
                "Spark needs Java 17 or newer and none was found (JAVA_HOME, PATH): install a JRE, for "
                "example `apt-get install openjdk-17-jre-headless`"
            )

    def to_spec(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The master may be shown; the conf may hold credentials."""
        return {"kind": "spark", "master": self.master}, {"conf": dict(self.conf)}

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
        session = self.session or self._start_session(job)
        opened = SparkEngineSession(session, job, owned=self.session is None)
        try:
            opened.check()
        except BaseException:
            opened.close()
            raise
        return opened

    def _master(self, job: Job) -> str:
        return self.master or f"local[{job.num_tasks}]"

    def _start_session(self, job: Job) -> SparkSession:
        from pyspark import SparkConf
        from pyspark.sql import SparkSession

        java = find_java()
        if java:
            os.environ.setdefault("JAVA_HOME", java)
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
        if local_defaults and not _has_spark_defaults():
            local_defaults = {**local_defaults, _DRIVER_JAVA_OPTIONS: _short_lived_jvm(self.conf)}
        for key, value in {**_OWN_DEFAULTS, **local_defaults}.items():
            conf.setIfMissing(key, value)
        for key, value in self.conf.items():
            conf.set(key, value)
        try:
            return SparkSession.builder.config(conf=conf).getOrCreate()
        except Exception as error:
            raise EngineError(f"no SparkSession on master {master!r}: {_first_lines(str(error))}") from error


class SparkEngineSession(EngineSession):
    """A SparkContext that runs one barrier stage for each attempt."""

    def __init__(self, session: SparkSession, job: Job, *, owned: bool) -> None:
        self._session = session
        self._context = session.sparkContext
        self._job = job
        self._owned = owned
        self._master = str(self._context.master)

    @property
    def num_agents(self) -> int:
        """One for each task."""
        return self._job.num_tasks

    @property
    def driver_host(self) -> str:
        """The host that Spark's own executors use to reach the driver."""
        if self._master.startswith("local"):
            return LOOPBACK
        return str(self._setting("spark.driver.host"))

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
        return self._setting("spark.driver.bindAddress") or self.driver_host

    @property
    def url(self) -> str | None:
        """The Spark UI; None where it is switched off, as in an embedded Spark."""
        return self._context.uiWebUrl

    def check(self) -> None:
        """Raises EngineError or InsufficientSlotsError for what Spark would refuse, hang on or ignore."""
        _refuse_dynamic_allocation(self._setting(_DYNAMIC_ALLOCATION))
        if self._job.use_gpu and _LOCAL.fullmatch(self._master):
            require_local_gpus(self._job.num_processes)
        elif self._job.use_gpu:
            _require_task_gpus(self._job, self._setting(_TASK_GPUS))
        self._await_slots(growing=False)

    def _setting(self, key: str) -> str | None:
        """One setting of the SparkContext; ``getConf()`` copies all of them, one call into the JVM each."""
        conf = self._context._jsc.sc().conf()
        return str(conf.get(key)) if conf.contains(key) else None

    def _await_slots(self, *, growing: bool) -> None:
        """Waits while executors register; a cluster that has stopped growing is what it is.

        Args:
            growing: After a loss: new executors may take their time, up to ``start_timeout``.
        """
        scala = self._context._jsc.sc()
        profile = scala.resourceProfileManager().defaultResourceProfile()
        # Before the driver's own deadline, which can only say that the engine did not answer.
        deadline = time.monotonic() + self._job.start_timeout * _SLOTS_SHARE
        settled = time.monotonic() + SLOTS_SETTLE
        most = 0
        tick = threading.Event()
        while (slots := int(scala.maxNumConcurrentTasks(profile))) < self._job.num_tasks:
            if slots > most:
                most, settled = slots, time.monotonic() + SLOTS_SETTLE
            # With no executor at all the cluster may still be starting; `start_timeout` bounds that.
            settling = most and time.monotonic() > settled and not growing
            complete = _LOCAL.fullmatch(self._master) or settling
            if complete:
                _require_slots(self._job, slots, f"the cluster at {self._master!r}")
            if time.monotonic() > deadline:
                raise StartTimeoutError(
                    f"the cluster at {self._master!r} offered {slots} of {self._job.num_tasks} task slots within "
                    f"start_timeout={self._job.start_timeout} s: add executors, or wait longer",
                    missing=[f"task {task}" for task in range(slots, self._job.num_tasks)],
                )
            tick.wait(SLOTS_INTERVAL)

    def launch(self, config: AgentConfig, on_end: OnEnd) -> SparkGroup:
        """Starts the barrier stage in a thread with its own job group."""
        gpus = None
        if self._job.use_gpu and _LOCAL.fullmatch(self._master):
            gpus = local_gpus()
        task = make_task(
            {**config, "workers": self._job.processes_per_task, "code_path": None, "code_zip": code_zip()},
            gpus,
            LOOPBACK if self._master.startswith("local") else None,
            int(self._setting(_TASK_CPUS) or "1"),
        )
        return SparkGroup(self._context, self._job, task, on_end)

    def is_usable(self) -> bool:
        """False if the JVM is gone or the SparkContext was stopped."""
        try:
            return not self._context._jsc.sc().isStopped()
        except Exception:
            return False

    def refill(self) -> None:
        """Waits up to ``start_timeout`` for executors to come back."""
        self._await_slots(growing=True)

    def close(self) -> None:
        """Stops the SparkContext if the engine started it."""
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


class SparkGroup(AgentGroup):
    """The running barrier stage."""

    def __init__(self, context: Any, job: Job, task: Callable[[Any], Any], on_end: OnEnd) -> None:
        super().__init__()
        from pyspark import InheritableThread

        self._context = context
        self._job = job
        self._task = task
        self._on_end = on_end
        self._group = f"rankzero-{job.run_id}"
        thread = InheritableThread(target=self._collect)
        thread.daemon = True
        thread.start()

    def _collect(self) -> None:
        error: BaseException | None = None
        try:
            description = f"rankzero: {self._job.name} on {self._job.num_processes} ranks"
            self._context.setJobGroup(self._group, description, interruptOnCancel=True)
            tasks = self._job.num_tasks
            rdd = self._context.parallelize(range(tasks), tasks).barrier().mapPartitions(self._task)
            with _own_python(self._context):
                # Fixes the executors' Python and pickles the task.
                rdd._jrdd  # noqa: B018
            rdd.collect()
        except BaseException as caught:
            error = caught
        self._ended.set()
        self._on_end(error)

    def cancel(self) -> None:
        """Cancels the stage; Spark kills the tasks, and with them go agents and ranks."""
        with contextlib.suppress(Exception):
            self._context.cancelJobGroup(self._group)

    def explain(self, error: BaseException) -> RankZeroError:
        """What Spark's exception means."""
        return explain(str(error))


def make_task(
    config: AgentConfig, local_gpus: list[str] | None, local_host: str | None, cores: int
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """The function of one barrier task.

    It is pickled by value, since it is local to this function, and so are ``hold`` and what it needs: executors
    need nothing of rankzero installed.
    """
    from pyspark import cloudpickle

    for module in (hold_module, start_module):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    hold = hold_module.hold

    def task(rows: Iterable[Any]) -> Iterator[Any]:
        for _ in rows:
            # A task that leaves its input unread costs Spark its Python worker.
            pass
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        index = context.partitionId()
        address = context.getTaskInfos()[index].address
        host = local_host or address.rpartition(":")[0].strip("[]") or address
        count = config["workers"]
        gpus = []
        if config["use_gpu"] and local_gpus is not None:
            gpus = local_gpus[index * count : (index + 1) * count]
        elif config["use_gpu"] and "gpu" in context.resources():
            gpus = list(context.resources()["gpu"].addresses)
        hold({**config, "task": index, "host": host, "gpus": gpus, "cores": cores})
        return iter(())

    return task


def explain(text: str) -> RankZeroError:
    """The typed error for the text of an exception of Spark."""
    if "PYTHON_VERSION_MISMATCH" in text:
        found = re.search(r"different version: ([\d.]+) than that in driver: ([\d.]+)", text)
        versions = f" (executor {found[1]}, driver {found[2]})" if found else ""
        return EngineError(
            f"driver and executors run different Python minor versions{versions}: "
            "set spark.pyspark.python to a Python of the driver's version on the executors"
        )
    if "SPARK-24819" in text:
        return InsufficientSlotsError(f"the cluster lost slots before the barrier stage began: {_first_lines(text)}")
    if "SPARK-24942" in text:
        return _dynamic_allocation_error()
    if found := re.search(r'Cannot run program "([^"]+)"', text):
        return EngineError(f"the executors have no Python at {found[1]!r}: set spark.pyspark.python to one they have")
    if found := re.search(r"rankzero agent of task \d+ ended by (signal)?.*", text):
        is_lost = found[1] or CUT_OFF in found[0]
        return EngineError(_first_lines(text[found.start() :]), cause=LOST if is_lost else None)
    if re.search(_PREEMPTED, text, re.IGNORECASE):
        return EngineError(f"the cluster took an executor back: {_first_lines(text)}", cause=PREEMPTED)
    if found := re.search(_EXECUTOR_LOST, text):
        # The line that says which executor, and why; the Java text before it says neither.
        line = text[text.rfind("\n", 0, found.start()) + 1 :]
        return EngineError(f"Spark lost an executor: {_first_lines(line)}", cause=LOST)
    if re.search(_SESSION_LOST, text):
        return EngineError(f"the SparkContext or its JVM ended: {_first_lines(text)}", cause=LOST)
    if "cancelled" in text:
        return EngineError(f"the Spark job was cancelled from outside of rankzero: {_first_lines(text)}")
    return EngineError(f"the Spark job failed: {_first_lines(text)}")


_PREEMPTED = r"preempt|decommission"
_EXECUTOR_LOST = (
    r"ExecutorLostFailure|Executor.{0,40} lost|Lost executor|ExecutorDeadException|worker lost|executor \S+ exited"
)
_SESSION_LOST = (
    r"SparkContext was shut down|stopped SparkContext|Py4JNetworkError|Answer from Java side is empty|"
    r"Connection refused|Error while receiving|Connection reset by peer"
)


def gpus_per_task(session: SparkSession) -> int:
    """GPUs that one task of this session gets. Raises InvalidJobError if the conf says none."""
    amount = session.sparkContext.getConf().get(_TASK_GPUS)
    master = str(session.sparkContext.master)
    if amount is None and _LOCAL.fullmatch(master):
        return 1
    return _whole_gpus(amount)


def find_java() -> str | None:
    """The home of a Java: ``JAVA_HOME``, else the one on the PATH. Its version is Spark's to check."""
    home = os.environ.get("JAVA_HOME")
    if home and os.access(os.path.join(home, "bin", "java"), os.X_OK):
        return home
    java = shutil.which("java")
    return os.path.dirname(os.path.dirname(os.path.realpath(java))) if java else None


@functools.cache
def code_zip() -> bytes:
    """The rankzero and cloudpickle packages, which travel to the executors with every job."""
    import cloudpickle

    import rankzero

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for package in (rankzero, cloudpickle):
            base = os.path.dirname(os.path.abspath(str(package.__file__)))
            for directory, _, names in os.walk(base):
                for name in sorted(names):
                    if name.endswith(".py"):
                        path = os.path.join(directory, name)
                        archive.write(path, os.path.relpath(path, os.path.dirname(base)))
    return buffer.getvalue()


@contextlib.contextmanager
def _own_python(context: Any) -> Iterator[None]:
    """Executors on this machine run this very Python, unless the user chose one."""
    before = context.pythonExec
    if "PYSPARK_PYTHON" not in os.environ and str(context.master).startswith("local"):
        context.pythonExec = sys.executable
    try:
        yield
    finally:
        context.pythonExec = before


def _short_lived_jvm(conf: Mapping[str, str]) -> str:
    said = [os.environ.get(name, "") for name in _OTHER_JAVA_OPTIONS]
    said.append(conf.get("spark.driver.defaultJavaOptions", ""))
    return _SHORT_LIVED_JVM if "GC" in " ".join(said) else f"{_SHORT_LIVED_JVM} {_SIMPLE_COLLECTOR}"


def _is_master(master: object) -> bool:
    if not isinstance(master, str):
        return False
    return any(pattern.fullmatch(master) for pattern in (_LOCAL, _LOCAL_CLUSTER, _REMOTE))


def _known_slots(master: str, conf: Mapping[str, str]) -> int | None:
    """Task slots, where the master's name tells."""
    cpus = int(conf.get(_TASK_CPUS, "1"))
    if found := _LOCAL.fullmatch(master):
        cores = (os.cpu_count() or 1) if found[1] == "*" else int(found[1] or 1)
        return cores // cpus
    if found := _LOCAL_CLUSTER.fullmatch(master):
        return int(found[1]) * (int(found[2]) // cpus)
    return None


def _require_slots(job: Job, slots: int, where: str) -> None:
    if slots < job.num_tasks:
        raise InsufficientSlotsError(
            f"num_processes={job.num_processes} needs {job.num_tasks} task slots at once, but {where} has "
            f"{slots}: lower num_processes, raise processes_per_task, or add executors",
            needed=job.num_tasks,
            available=slots,
        )


def _refuse_dynamic_allocation(value: str | None) -> None:
    if value is not None and value.lower() == "true":
        raise _dynamic_allocation_error()


def _dynamic_allocation_error() -> InvalidJobError:
    return InvalidJobError(
        f"{_DYNAMIC_ALLOCATION} is true; Spark runs no barrier stage with dynamic allocation (SPARK-24942): "
        "set it to false and fix the number of executors"
    )


def _whole_gpus(amount: str | None) -> int:
    if amount is None:
        raise InvalidJobError(
            f"use_gpu=True, but {_TASK_GPUS} is not set, so Spark gives tasks no GPU: "
            "set it, spark.executor.resource.gpu.amount and a discovery script"
        )
    try:
        whole = int(amount)
    except ValueError:
        whole = 0
    if whole < 1:
        raise InvalidJobError(f"{_TASK_GPUS} is {amount!r}; a rank needs a whole GPU: set it to 1 or more")
    return whole


def _require_task_gpus(job: Job, amount: str | None) -> None:
    whole = _whole_gpus(amount)
    if whole < job.processes_per_task:
        raise InvalidJobError(
            f"{_TASK_GPUS} is {whole}, but processes_per_task={job.processes_per_task} ranks of a task "
            "need a GPU each: raise the one or lower the other"
        )


def _has_spark_defaults() -> bool:
    """True if a spark-defaults.conf may set what conf does not show."""
    places = [os.environ.get("SPARK_CONF_DIR")]
    if home := os.environ.get("SPARK_HOME"):
        places.append(os.path.join(home, "conf"))
    return any(place and os.path.exists(os.path.join(place, "spark-defaults.conf")) for place in places)


def _first_lines(text: str) -> str:
    """The part of a Java exception that a person needs: what failed, without the stacks."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    return "\n".join(lines)[:ERROR_LIMIT]
