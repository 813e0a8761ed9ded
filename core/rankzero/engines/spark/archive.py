"""Archives of the classes that Spark loads (Java's class data sharing): with one a JVM of ours starts in half the time.

One for each Java and Spark, in the user's cache directory. `dump` makes it; else the first run has it made in the
background, when it has ended. The JVM itself checks that an archive fits, and goes on without one that does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from typing import Any

from rankzero.engines.spark.conf import spark_home

SUFFIX = ".jsa"

_SPARKS_JVM = "PYSPARK_GATEWAY_PORT"
"""Variable of a process that Spark has started below a JVM of its own, in whose options we have no say."""


_VERSION = 1
"""Of what `dump` has a JVM do: another one makes other archives."""

# An archive that does not fit is no news, and nor is what cannot be put into one. What is an error is still shown.
QUIET = "-Xlog:disable -Xlog:all=error:stderr"


def directory() -> str:
    """Where the archives lie."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "rankzero", "jvm")


def path_for(java: str) -> str:
    """The archive of this Java and this Spark, made or not.

    Args:
        java: The home of the Java.

    Raises:
        OSError: there is no such Java, or no Spark.
    """
    jars = os.path.join(spark_home(), "jars")
    with os.scandir(jars) as entries:
        facts: list[Any] = sorted(_look_of(entry.name, entry.stat()) for entry in entries)
    modules = os.path.join(java, "lib", "modules")
    facts += [_VERSION, os.path.realpath(java), _look_of("modules", os.stat(modules)), os.path.realpath(jars)]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return os.path.join(directory(), name + SUFFIX)


def _look_of(name: str, found: os.stat_result) -> list[Any]:
    # Whole seconds: an image's layers keep no more, and nor does the JVM.
    return [name, found.st_size, int(found.st_mtime)]


def options(java: str) -> str:
    """Options for the JVM to use the archive; empty where there is none."""
    with contextlib.suppress(OSError):
        path = path_for(java)
        # An archive holds code: what others may write is none.
        if _is_ours(os.path.dirname(path)) and os.path.getsize(path) and not set(path) & set(" \t\"'\\"):
            # Else it would be the first to be removed.
            os.utime(path)
            return f"-XX:SharedArchiveFile={path} -Xshare:auto {QUIET}"
    return ""


def _is_ours(place: str) -> bool:
    found = os.stat(place)
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def make_in_background(java: str) -> None:
    """Starts a process that makes the archive when this machine has nothing else to do, if there is none."""
    if _SPARKS_JVM in os.environ:
        return
    try:
        path = path_for(java)
        if os.path.exists(path):
            return
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        if not _is_ours(os.path.dirname(path)):
            return
    except OSError:
        return
    import rankzero

    package_root = os.path.dirname(os.path.dirname(os.path.abspath(rankzero.__file__)))
    program = "import sys; sys.path.append(sys.argv.pop(1)); from rankzero.engines.spark.dump import main; main()"
    with contextlib.suppress(OSError):
        maker = subprocess.Popen(
            [sys.executable, "-P", "-c", program, package_root, "--idle"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        # Collects its exit status, should this process live longer.
        threading.Thread(target=maker.wait, name="rankzero-archive", daemon=True).start()
