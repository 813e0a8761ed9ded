"""The process that makes an archive of Spark's classes.

``python -m rankzero.engines.spark.dump`` makes one for an image or a set-up. Otherwise a run that found none starts
this process in the background, when the run has ended. Only one process works at a time, and only for a limited time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

from rankzero import bounds
from rankzero.engines.spark import archive
from rankzero.engines.spark.context import known
from rankzero.engines.spark.jvm import DRIVER_JAVA_OPTIONS, find_java, short_lived, start_context
from rankzero.host import processes

KEPT = 3
"""Number of archives that stay, the most recently used ones; each has about 70 MB."""

UNFINISHED = ".tmp"


def main() -> None:
    """Makes the archive, unless it exists or another process is making it; with ``--idle`` only on idle cores."""
    java = find_java()
    if java is None:
        sys.exit("an archive of Spark's classes needs a Java, and none was found (JAVA_HOME, PATH)")
    path = archive.path_for(java)
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    lock = os.open(os.path.join(os.path.dirname(path), "lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    if os.path.exists(path):
        return
    _end_in_time()
    if "--idle" in sys.argv:
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _remove(_superfluous(os.path.dirname(path)))
    # A JVM with a folder of files on its class path makes no archive.
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"):
        os.environ.pop(name, None)
    os.environ["SPARK_CONF_DIR"] = os.path.join(os.path.dirname(path), "no-conf")
    unfinished = f"{path}.{os.getpid()}{UNFINISHED}"
    try:
        _dump(unfinished)
        # An empty file marks a Java that cannot make an archive, which is not tried again.
        open(unfinished, "ab").close()
        os.replace(unfinished, path)
    finally:
        _remove([unfinished])
        processes.kill_descendants()


def _end_in_time() -> None:
    def give_up(*_: object) -> None:
        processes.kill_descendants()
        os._exit(1)

    processes.become_subreaper()
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, give_up)
    signal.setitimer(signal.ITIMER_REAL, bounds.ARCHIVE_TIMEOUT)


def _superfluous(place: str) -> list[str]:
    """Returns files of killed makers and the least recently used archives. The caller holds the lock."""
    names = os.listdir(place)
    archives = [os.path.join(place, name) for name in names if name.endswith(archive.SUFFIX)]
    unfinished = [os.path.join(place, name) for name in names if name.endswith(UNFINISHED)]
    return unfinished + sorted(archives, key=os.path.getmtime, reverse=True)[KEPT - 1 :]


def _remove(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _dump(path: str) -> None:
    """Runs a JVM through what it does for a run, and has it archive its classes as it ends."""
    from pyspark import SparkContext

    dumping = f"{short_lived({})} -XX:ArchiveClassesAtExit={path} {archive.QUIET}"
    context = start_context("local[2]", "archive", {DRIVER_JAVA_OPTIONS: dumping}, {})
    found = known(context)
    code = context.broadcast(b"code")
    context.setJobGroup("archive", "rankzero: archive", interruptOnCancel=True)

    def task(rows: Iterable[int]) -> list[int]:
        from pyspark import BarrierTaskContext

        return [len(code.value), len(BarrierTaskContext.get().getTaskInfos()), *rows]

    context.parallelize(range(found.slots()), 2).barrier().mapPartitions(task).collect()
    context.cancelJobGroup("archive")
    context.stop()
    gateway: Any = SparkContext._gateway
    jvm = gateway.proc
    jvm.stdin.close()
    jvm.wait()


if __name__ == "__main__":
    main()
