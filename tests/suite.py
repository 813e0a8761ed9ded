"""The life of the whole suite: its files lie in memory, its processes share zygotes, and nothing outlives it.

A pytest plugin, which `tests/conftest.py` loads.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import LOOK, ORPHAN_TIMEOUT, ROOT, describe, processes_with, wait_until_gone
from tests.services import end_own_jvm

from rankzero.task import hold

MEMORY = Path("/dev/shm")  # The file system in memory in which the suite keeps its files

ROOM_IN_MEMORY = 8 << 30  # Bytes that must be free there. The suite needs about 1 GiB

TEMPORARY = ("rankzero-", "pymp-", "spark-")
"""Beginnings of the names of temporary directories that a run, its ranks or its JVMs make and have to remove."""

SHARED = ("rankzero-gpus",)  # Beginnings of the names of the temporary directories that stay for later runs

ABANDONED = ("rankzero-agent-", "rankzero-driver-")
"""Beginnings of the names of the temporary directories that stay after all processes of a host were killed."""

_in_memory = pytest.StashKey[str]()
_broker = pytest.StashKey["subprocess.Popen[bytes]"]()
_before = pytest.StashKey[set[str]]()
_left = pytest.StashKey[list[str]]()
_passed = pytest.StashKey[bool]()


def start_broker() -> subprocess.Popen[bytes]:
    """Starts the process that forks zygotes for all processes of the suite, and ends with this one."""
    os.environ[hold.SHARED] = os.path.join(tempfile.mkdtemp(prefix="rz-zygotes-", dir="/tmp"), "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[hold.SHARED])
        listener.listen(128)
        # Not in the group of this process, which a terminal may interrupt.
        command = [sys.executable, "-m", "tests.zygotes"]
        return subprocess.Popen(command, stdin=listener, cwd=ROOT, start_new_session=True)


def end_broker(broker: subprocess.Popen[bytes]) -> None:
    """Ends what `start_broker` has started."""
    broker.kill()
    broker.wait()
    shutil.rmtree(os.path.dirname(os.environ[hold.SHARED]), ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    """Keeps temporary files in memory if there is room; ``TMPDIR`` names another place.

    Five processes that make a hundred thousand small files and flush most of them wait for one disk's journal.
    """
    if not hasattr(config, "workerinput"):
        config.stash[_broker] = start_broker()
    if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM_IN_MEMORY:
        for left in MEMORY.glob("rz-*"):
            # The files of a suite that failed were kept.
            if not Path("/proc", left.name.rpartition("-")[2]).exists():
                shutil.rmtree(left, ignore_errors=True)
        # A short name, since the path of a socket has at most 107 characters.
        place = MEMORY / f"rz-{os.getpid()}"
        place.mkdir(0o711)
        os.environ["TMPDIR"] = tempfile.tempdir = config.stash[_in_memory] = str(place)
    import hypothesis

    hypothesis.settings.register_profile(
        "rankzero", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
    )
    hypothesis.settings.load_profile("rankzero")


def temporary_files() -> set[str]:
    """Returns the names of the temporary directories that runs have made, except those that all runs share."""
    names = os.listdir(tempfile.gettempdir())
    return {name for name in names if name.startswith(TEMPORARY) and not name.startswith(SHARED)}


def pytest_sessionstart(session: pytest.Session) -> None:
    """Records the temporary directories that exist before the first test, and compiles the modules that have changed.

    Each of the suite's thousands of processes would compile them where the environment forbids Python to write compiled
    modules.
    """
    if not hasattr(session.config, "workerinput"):
        import compileall

        session.config.stash[_before] = temporary_files()
        for folder in ("core", "airflow_provider", "dagster_integration", "tests"):
            compileall.compile_dir(ROOT / folder, quiet=2)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the suite if temporary directories are left, unless another suite runs, whose directories they may be."""
    session.config.stash[_passed] = session.exitstatus == pytest.ExitCode.OK
    if hasattr(session.config, "workerinput") or processes_with("RANKZERO_TEST_SUITE=suite-"):
        return
    # Some objects own temporary directories.
    gc.collect()
    # Tests kill processes, which leave their directories.
    for name in temporary_files() - session.config.stash[_before]:
        if name.startswith(ABANDONED):
            print(f"\nLEFT by killed processes: {name}: {os.listdir(os.path.join(tempfile.gettempdir(), name))[:5]}")
            shutil.rmtree(os.path.join(tempfile.gettempdir(), name), ignore_errors=True)
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
    """Names what the suite has left, below the summary; removes the files in memory unless a test has failed."""
    for name in config.stash.get(_left, []):
        files = [str(path) for path in Path(tempfile.gettempdir(), name).rglob("*")]
        print(f"LEFT {tempfile.gettempdir()}/{name}: {files[:5]}")
    if broker := config.stash.get(_broker, None):
        count = len(os.listdir(os.path.dirname(os.environ[hold.SHARED]))) - 1
        print(f"the suite's zygotes were forked from {count} processes that imported torch", flush=True)
        end_broker(broker)
    if (place := config.stash.get(_in_memory, None)) and config.stash.get(_passed, False):
        shutil.rmtree(place, ignore_errors=True)


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
