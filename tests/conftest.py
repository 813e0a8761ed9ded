"""The fixtures and functions that tests of every room use. The plugins named below hold the rest."""

import contextlib
import gc
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests import spark_classes

from rankzero import Launcher
from rankzero.run.directory import RunDirectory
from rankzero.submit import existing
from rankzero.task import hold

ROOT = Path(__file__).parents[1]

pytest_plugins = ("tests.handlers", "tests.services", "tests.suite", "tests.schedule", "tests.durations")

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

LOOK = 0.02  # Seconds between two checks of a condition

T = TypeVar("T")


def find(launcher: Launcher) -> Any:
    """The run of a launcher with a run_id, or None."""
    return existing.find(RunDirectory(launcher._request().directory))


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


def until(look: Callable[[], T | None], bound: float, what: str, pause: float = LOOK) -> T:
    """Returns what ``look`` returns once that is true. Raises TimeoutError, whose message begins with ``what``."""
    deadline = time.monotonic() + bound
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {bound} s")
        time.sleep(pause)
    return found


def free_port() -> int:
    """Returns a port of 127.0.0.1 that no process uses, as `free_ports` does."""
    return free_ports(1)[0]


def free_ports(count: int) -> tuple[int, int]:
    """Returns the first and the last of consecutive ports of 127.0.0.1 that no process uses.

    They lie outside the range from which the system takes ports of its own choice.
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
    """Returns the lines without those of rankzero itself: a start on a busy machine may say that it waits."""
    return [line for line in lines if "rankzero: " not in line]


def processes_with(marker: str) -> list[int]:
    """Returns the ids of live processes whose initial environment holds ``marker``."""
    found, sought, own = [], marker.encode(), str(os.getpid())
    for name in os.listdir("/proc"):
        if name.isdigit() and name != own:
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb", buffering=0) as environ:
                if sought in environ.read() and not is_idle_zygote(int(name)):
                    found.append(int(name))
    return found


def is_idle_zygote(pid: int) -> bool:
    """Returns True for a zygote that waits for its owner's next launch, its agent and its ranks."""
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    if command == [""]:
        # An agent that is exiting.
        return True
    if len(command) < 5 or "rankzero.task.zygote" not in command[2]:
        return False
    forks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    # A zygote knows its owner by the id that this has in its own namespace.
    if re.findall(r"NSpid:.*?(\d+)$", Path(f"/proc/{parent}/status").read_text(), re.MULTILINE) == [command[4]]:
        return all(is_idle_zygote(int(fork)) for fork in forks)
    # All forks show the command of the zygote.
    return waits_for_launch(str(pid)) or waits_for_launch(parent)


def waits_for_launch(pid: str) -> bool:
    """Returns True for an agent that was forked ahead: ranks have no socket there, and other agents poll."""
    is_agent = os.readlink(f"/proc/{pid}/fd/0").startswith("socket:")
    return is_agent and Path(f"/proc/{pid}/wchan").read_text().startswith("unix_stream")


def wait_until_gone(marker: str, timeout: float = ORPHAN_TIMEOUT) -> list[int]:
    """Returns the processes with the marker that are left after ``timeout`` seconds; empty if all have ended."""
    deadline = time.monotonic() + timeout
    while (left := processes_with(marker)) and time.monotonic() < deadline:
        # To read the environment of every process costs as much as this test may have to wait. A zygote becomes idle.
        again = min(deadline, time.monotonic() + 1.0)
        while any(map(is_alive, left)) and time.monotonic() < again:
            time.sleep(LOOK)
    return left


def is_alive(pid: int) -> bool:
    """Returns False for a process that has exited, also if its parent has not collected its status."""
    try:
        state, *_, threads = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:18]
        # The first thread becomes a zombie before the others have ended, and so before the parent may collect it.
        return state not in "ZX" or int(threads) > 1
    except OSError:
        return False


def describe(pid: int) -> str:
    """Returns id, state, parent, wait channel, test and command line of a process, for a message."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        origin = re.search(rb"PYTEST_CURRENT_TEST=([^\0]*)", Path(f"/proc/{pid}/environ").read_bytes())
        waits = Path(f"/proc/{pid}/wchan").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_text()[-300:]
    except OSError:
        return f"{pid} (gone)"
    return f"{pid} {state} of {parent} in {waits} since {origin and origin[1].decode()}: {command!r}"


@pytest.fixture
def own_zygotes(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Lets each process start its own zygotes, as for users; returns the address of what forks the suite's."""
    address = os.environ[hold.SHARED]
    monkeypatch.delenv(hold.SHARED)
    yield address
    # Their environment is that of the launch that started them.
    idle, _ = hold._kept()
    while idle:
        idle.pop().close()


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
    """Returns a value for the ranks' environment; after the test no process may have it."""
    value = f"mark-{tmp_path.name}-{os.getpid()}"
    yield value
    left = [describe(pid) for pid in wait_until_gone(value)]
    assert left == [], "processes outlived their run"


@pytest.fixture
def launcher(tmp_path: Path, marker: str) -> Launcher:
    """Returns a launcher of two ranks on this machine."""
    return Launcher(2, store=tmp_path / "store", env={"MARK": marker}, start_timeout=240)
