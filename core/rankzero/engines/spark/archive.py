"""Archives of the classes that Spark loads (Java's class data sharing), with which a JVM starts in half the time.

There is one for each Java and Spark, in the user's cache directory. `dump` makes it; otherwise the first run starts a
process that makes it in the background, when the run has ended. The JVM itself checks whether an archive fits, and
continues without one that does not.
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
"""Variable of a process that Spark started below its own JVM, whose options rankzero does not control."""


_VERSION = 1
"""Version of the program that `dump` runs in the JVM: another program makes other archives."""

# Hides warnings about archives that do not fit and about classes that cannot be archived. Errors are still shown.
QUIET = "-Xlog:disable -Xlog:all=error:stderr"


def directory() -> str:
    """Returns the directory of the archives."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "rankzero", "jvm")


def path_for(java: str) -> str:
    """Returns the path of the archive for this Java and this Spark, which may not exist.

    Args:
        java: Home directory of the Java.

    Raises:
        OSError: this Java or Spark does not exist.
    """
    jars = os.path.join(spark_home(), "jars")
    with os.scandir(jars) as entries:
        facts: list[Any] = sorted(_fingerprint_of(entry.name, entry.stat()) for entry in entries)
    modules = os.path.join(java, "lib", "modules")
    facts += [_VERSION, os.path.realpath(java), _fingerprint_of("modules", os.stat(modules)), os.path.realpath(jars)]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return os.path.join(directory(), name + SUFFIX)


def _fingerprint_of(name: str, found: os.stat_result) -> list[Any]:
    # Whole seconds, because the layers of an image and the JVM keep no fractions.
    return [name, found.st_size, int(found.st_mtime)]


def options(java: str) -> str:
    """Returns the JVM options that use the archive; empty if there is none."""
    with contextlib.suppress(OSError):
        path = path_for(java)
        # An archive holds code, so one that other users can write is not used.
        if _is_private(os.path.dirname(path)) and os.path.getsize(path) and not set(path) & set(" \t\"'\\"):
            # The least recently used archives are removed first.
            os.utime(path)
            return f"-XX:SharedArchiveFile={path} -Xshare:auto {QUIET}"
    return ""


def _is_private(place: str) -> bool:
    found = os.stat(place)
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def make_in_background(java: str) -> None:
    """Starts a process that makes a missing archive when this machine is idle."""
    if _SPARKS_JVM in os.environ:
        return
    try:
        path = path_for(java)
        if os.path.exists(path):
            return
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        if not _is_private(os.path.dirname(path)):
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
        # Collects its exit status if this process outlives it.
        threading.Thread(target=maker.wait, name="rankzero-archive", daemon=True).start()
