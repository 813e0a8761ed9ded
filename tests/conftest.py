"""What every room's tests share: a store of their own, and proof that nothing outlives the suite."""

import contextlib
import gc
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from tests import spark_classes

from rankzero import Launcher
from rankzero.task import scratch, zygotes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.engines.connect_server import ConnectServer
    from tests.s3 import S3Server

ROOT = Path(__file__).parents[1]

pytest_plugins = ("tests.schedule", "tests.durations")

os.environ.setdefault("JDK_JAVA_OPTIONS", spark_classes.options())

PRELOADED = (
    "pytest",
    "hypothesis",
    "filecmp",
    "pyarrow",
    "rankzero.compat.horovod.torch",
    "rankzero.compat.ray_train",
    "rankzero.driver.driver",
    "rankzero.submit.durable",
    "rankzero.testing",
)
"""Test modules import these, and so would each rank that runs a function of theirs: up to 0.2 s of processor time."""

os.environ.setdefault("RANKZERO_PRELOAD", ",".join(PRELOADED))

# Test modules are compiled once, also where the environment forbids it: each process of the suite imports all of them.
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job, which would pass it on: programs of users are interrupted by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

ORPHAN_TIMEOUT = 12.0
"""Seconds for what a run has started to end; less than those after which agents take a silent driver for dead."""

JVM_TIMEOUT = 60.0
"""Seconds for a JVM to end by itself: it removes its files, and other suites may be at work."""

LOOK = 0.02
"""Seconds between two looks at a condition."""

T = TypeVar("T")


MEMORY = Path("/dev/shm")
"""A file system in memory, where the suite keeps its files."""

ROOM_IN_MEMORY = 8 << 30
"""Bytes that must be free there. The suite needs about 1 GiB."""

_in_memory = pytest.StashKey[str]()
_broker = pytest.StashKey["subprocess.Popen[bytes]"]()


def start_broker() -> "subprocess.Popen[bytes]":
    """Starts the process that forks zygotes for all processes of the suite, and ends with this one."""
    os.environ[zygotes.SHARED] = os.path.join(tempfile.mkdtemp(prefix="rz-zygotes-", dir="/tmp"), "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[zygotes.SHARED])
        listener.listen(128)
        # Not in the group of this process, which may be interrupted by a terminal.
        command = [sys.executable, "-m", "tests.zygotes"]
        return subprocess.Popen(command, stdin=listener, cwd=ROOT, start_new_session=True)


def pytest_configure(config: pytest.Config) -> None:
    """Keeps temporary files in memory if there is room, and lets an example of hypothesis take as long as it likes.

    Five processes that make a hundred thousand small files and flush most of them wait for one disk's journal.
    ``TMPDIR`` names another place.
    """
    if not hasattr(config, "workerinput"):
        config.stash[_broker] = start_broker()
    if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM_IN_MEMORY:
        for left in MEMORY.glob("rz-*"):
            # Of a suite that failed: its files were kept.
            if not Path("/proc", left.name.rpartition("-")[2]).exists():
                shutil.rmtree(left, ignore_errors=True)
        # A short name, since the path of a socket has at most 107 characters.
        place = MEMORY / f"rz-{os.getpid()}"
        place.mkdir(0o711)
        os.environ["TMPDIR"] = tempfile.tempdir = config.stash[_in_memory] = str(place)
    # Each rank imports this module, most of them for a function that only waits.
    import hypothesis

    hypothesis.settings.register_profile(
        "rankzero", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
    )
    hypothesis.settings.load_profile("rankzero")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keeps the garbage collector from what is imported and collected: nothing of it becomes garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Soak tests run only when asked for (`make faults`)."""
    if "soak" not in config.getoption("-m"):
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="takes minutes; run it with -m soak"))


TEMPORARY = ("rankzero-", "pymp-", "spark-")
"""Beginnings of the names of temporary directories that a run, its ranks or its JVMs make and have to remove."""

SHARED = ("rankzero-gpus",)
"""Beginnings of the names of those that stay for later runs."""

ABANDONED = ("rankzero-agent-", "rankzero-driver-")
"""Beginnings of the names of those that the next run of the host removes."""

_before = pytest.StashKey[set[str]]()
_left = pytest.StashKey[list[str]]()
_passed = pytest.StashKey[bool]()


def temporary_files() -> set[str]:
    """Returns the names of the temporary directories that runs have made, but for those that all runs share."""
    names = os.listdir(tempfile.gettempdir())
    return {name for name in names if name.startswith(TEMPORARY) and not name.startswith(SHARED)}


def pytest_sessionstart(session: pytest.Session) -> None:
    """Notes the temporary directories that were there before, in the process that starts the others.

    It also compiles the modules that have changed, so that the thousands of processes of the suite need not: each of
    them would do it again where the environment forbids Python to write compiled modules.
    """
    if not hasattr(session.config, "workerinput"):
        # Not above: ranks import this module.
        import compileall

        session.config.stash[_before] = temporary_files()
        for folder in ("core", "airflow_provider", "dagster_integration", "tests"):
            compileall.compile_dir(ROOT / folder, quiet=2)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the suite if temporary directories are left; beside another suite, which has its own, it is not known."""
    session.config.stash[_passed] = session.exitstatus == pytest.ExitCode.OK
    if hasattr(session.config, "workerinput") or processes_with("RANKZERO_TEST_SUITE=suite-"):
        return
    # Some objects have temporary directories.
    gc.collect()
    # Tests kill processes, and the next run of the host would remove what these left. None is being made now.
    scratch.ABANDONED_AFTER = 0.0
    for prefix in ABANDONED:
        scratch.remove_abandoned(tempfile.gettempdir(), prefix)
    deadline = time.monotonic() + ORPHAN_TIMEOUT
    # Tests kill executors' JVMs, which leave an empty directory each.
    for name in temporary_files() - session.config.stash[_before]:
        if name.startswith("spark-"):
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(tempfile.gettempdir(), name))
    while (left := temporary_files() - session.config.stash[_before]) and time.monotonic() < deadline:
        time.sleep(LOOK)
    if left:
        session.config.stash[_left] = sorted(left)
        session.config.stash[_passed] = False
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the files that were kept in memory, after a failure the next suite does; names what the suite has left.

    Behind the summary, where also who sees only the end of the output reads it.
    """
    for name in config.stash.get(_left, []):
        files = [str(path) for path in Path(tempfile.gettempdir(), name).rglob("*")]
        print(f"LEFT {tempfile.gettempdir()}/{name}: {files[:5]}")
    if broker := config.stash.get(_broker, None):
        broker.kill()
        broker.wait()
        shutil.rmtree(os.path.dirname(os.environ[zygotes.SHARED]), ignore_errors=True)
    if (place := config.stash.get(_in_memory, None)) and config.stash.get(_passed, False):
        shutil.rmtree(place, ignore_errors=True)


def until(look: Callable[[], T | None], bound: float, what: str, pause: float = LOOK) -> T:
    """What ``look`` gives as soon as it is true. Raises TimeoutError, in the words of ``what``."""
    deadline = time.monotonic() + bound
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {bound} s")
        time.sleep(pause)
    return found


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has now, as `free_ports`."""
    return free_ports(1)[0]


def free_ports(count: int) -> tuple[int, int]:
    """The first and last of consecutive ports of 127.0.0.1 that nobody has now.

    The system gives none of them to who asks for any, nor to an outgoing connection, before the test has taken it.
    """
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        # Suites that run at once look at different places.
        first = random.SystemRandom().randrange(10_000, max(given, 20_000) - count)
        with contextlib.ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first, first + count - 1
    raise AssertionError("no free ports")


def of_ranks(lines: Iterable[str]) -> list[str]:
    """The lines without those of rankzero itself: a start on a busy machine may say that it waits."""
    return [line for line in lines if "rankzero: " not in line]


def processes_with(marker: str) -> list[int]:
    """Ids of live processes whose initial environment holds ``marker``. A process that has exited shows none."""
    found, sought, own = [], marker.encode(), str(os.getpid())
    for name in os.listdir("/proc"):
        if name.isdigit() and name != own:
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb", buffering=0) as environ:
                if sought in environ.read() and not is_idle_zygote(int(name)):
                    found.append(int(name))
    return found


def is_idle_zygote(pid: int) -> bool:
    """True for a zygote that waits for the next launch of its owner: it has the environment of an earlier one."""
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    if (
        len(command) < 5
        or "rankzero.task.zygote" not in command[2]
        or Path(f"/proc/{pid}/task/{pid}/children").read_text()
    ):
        return False
    # Its forks show the same command.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == command[4]


def wait_until_gone(marker: str, timeout: float = ORPHAN_TIMEOUT) -> list[int]:
    """The processes with the marker that are left after ``timeout`` seconds; empty when all ended."""
    deadline = time.monotonic() + timeout
    while (left := processes_with(marker)) and time.monotonic() < deadline:
        # To read the environment of every process costs as much as this test may have to wait.
        while any(map(is_alive, left)) and time.monotonic() < deadline:
            time.sleep(LOOK)
    return left


def is_alive(pid: int) -> bool:
    """False for a process that has exited, and for one whose parent has not collected its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def describe(pid: int) -> str:
    """Id, state, parent, what it waits in, the test that it comes from and its command line, for a message."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        origin = re.search(rb"PYTEST_CURRENT_TEST=([^\0]*)", Path(f"/proc/{pid}/environ").read_bytes())
        waits = Path(f"/proc/{pid}/wchan").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_text()[-300:]
    except OSError:
        return f"{pid} (gone)"
    return f"{pid} {state} of {parent} in {waits} since {origin and origin[1].decode()}: {command!r}"


def end_own_jvm() -> None:
    """Ends the Spark gateway that pyspark started in this process, as the end of the process would.

    A session that stops while its tasks start may leave a Python daemon: Spark starts another one when it has just
    stopped the first, and that lives, with its workers, as long as the JVM.
    """
    pyspark = sys.modules.get("pyspark")
    gateway = pyspark and pyspark.SparkContext._gateway
    if gateway is not None and hasattr(gateway, "proc"):
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(JVM_TIMEOUT)


@pytest.fixture(autouse=True, scope="session")
def suite_marker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Marks every process that the suite starts; none may be left at its end."""
    marker = f"suite-{os.getpid()}"
    os.environ["RANKZERO_TEST_SUITE"] = marker
    os.environ["RANKZERO_STORE"] = str(tmp_path_factory.mktemp("default-store"))
    # A rank has one thread, however many ranks its run has: processes with torch loaded would differ.
    os.environ["OMP_NUM_THREADS"] = "1"
    # A JVM that was killed leaves its files where pytest removes them.
    os.environ["JDK_JAVA_OPTIONS"] += f" -Djava.io.tmpdir={tmp_path_factory.mktemp('java')}"
    yield marker
    end_own_jvm()
    left = [describe(pid) for pid in wait_until_gone(marker)]
    assert left == [], "processes outlived the suite"


@pytest.fixture
def own_zygotes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each process starts zygotes of its own, as users have it: for tests of what becomes of them."""
    monkeypatch.delenv(zygotes.SHARED)
    yield
    end_idle_zygotes()


def end_idle_zygotes() -> None:
    """Ends those of this process, whose environment has that of the launch that started them."""
    idle, _ = zygotes._kept()
    while idle:
        idle.pop().close(ORPHAN_TIMEOUT)


SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGPIPE", "SIGUSR1", "SIGUSR2")
"""Those of which every test must leave the handlers as they were. pytest-timeout has SIGALRM."""


def signal_handlers() -> dict[str, Any]:
    """What happens on each of these signals in this process."""
    return {name: signal.getsignal(getattr(signal, name)) for name in SIGNALS}


def restore_signal_handlers(before: dict[str, Any]) -> dict[str, Any]:
    """Sets them again; those that were others."""
    changed = {name: handler for name, handler in signal_handlers().items() if handler is not before[name]}
    for name in changed:
        signal.signal(getattr(signal, name), before[name])
    return changed


@pytest.fixture(autouse=True)
def same_signal_handlers() -> Iterator[None]:
    """No test changes what a signal does: what is ignored would be so in every process that a later test starts."""
    before = signal_handlers()
    yield
    assert restore_signal_handlers(before) == {}, "handlers of signals are others after the test"


@pytest.fixture(autouse=True, scope="module")
def same_signal_handlers_of_fixtures() -> Iterator[None]:
    """The same for what is there for a file of tests."""
    before = signal_handlers()
    yield
    assert restore_signal_handlers(before) == {}, "handlers of signals are others after the tests of this file"


@pytest.fixture(autouse=True)
def no_rank() -> Iterator[None]:
    """Makes the process forget what a test reported to `rankzero.train` outside of a run."""
    yield
    context = sys.modules.get("rankzero.train.context")
    if context is not None:
        context._session = None


@pytest.fixture
def hangups() -> Iterator[None]:
    """Lets processes that the test starts get SIGHUP, even where the suite itself runs under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[str]:
    """A value for the ranks' environment; after the test no process carries it any more."""
    value = f"mark-{tmp_path.name}-{os.getpid()}"
    yield value
    left = [describe(pid) for pid in wait_until_gone(value)]
    assert left == [], "processes outlived their run"


@pytest.fixture
def launcher(tmp_path: Path, marker: str) -> Launcher:
    """Two ranks on this machine, with a store of their own. ``RANKZERO_TEST_WARM_START=0`` starts them fresh."""
    warm_start = os.environ.get("RANKZERO_TEST_WARM_START") != "0"
    return Launcher(2, store=tmp_path / "store", env={"MARK": marker}, start_timeout=240, warm_start=warm_start)


def start_own_jvm() -> None:
    """Starts pyspark's JVM in this process without a configuration, if it does not run.

    A JVM that a SparkContext starts keeps the configuration of that context, and gives it to all later ones.
    """
    from pyspark import SparkContext

    SparkContext._ensure_initialized()


@contextlib.contextmanager
def spark_session(master: str, **conf: str) -> "Iterator[SparkSession]":
    """Starts a session in this process, and stops it. No later session has anything of its configuration."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    start_own_jvm()
    assert SparkContext._active_spark_context is None
    handlers = signal_handlers()
    spark = SparkSession.builder.master(master).config(map={"spark.ui.enabled": "false", **conf}).getOrCreate()
    # A SparkContext takes SIGINT, and leaves its handler.
    restore_signal_handlers(handlers)
    try:
        yield spark
    finally:
        spark.stop()


@pytest.fixture(scope="module")
def default_python() -> Iterator[None]:
    """No PYSPARK_PYTHON, as users have it; afterwards it is as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYSPARK_PYTHON", raising=False)
        yield


@pytest.fixture(scope="module")
def session(default_python: None) -> "Iterator[SparkSession]":
    """A SparkSession of the test's own process."""
    with spark_session("local[4]") as spark:
        yield spark


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[S3Server]":
    """One S3 server for all tests that need it."""
    from tests.s3 import s3_server

    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[ConnectServer]":
    """One Spark Connect server with four slots for all tests that need it."""
    from tests.engines.connect_server import connect_server

    with connect_server(tmp_path_factory.mktemp("connect")) as started:
        yield started


@pytest.fixture(scope="module")
def connect_session(server: "ConnectServer") -> Iterator[Any]:
    """A session of the test's own process."""
    from pyspark.sql import SparkSession

    with pytest.MonkeyPatch.context() as patch:
        # Restores it, which pyspark sets and leaves.
        patch.delenv("SPARK_CONNECT_MODE_ENABLED", raising=False)
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        session = SparkSession.builder.remote(server.url).create()
        yield session
        session.stop()


@pytest.fixture
def bucket(s3_server: "S3Server", monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL of an empty bucket that every process of the test can reach."""
    import s3fs

    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    name = f"test-{os.getpid()}-{tmp_path.name}".replace("_", "-").lower()[:60]
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}"
