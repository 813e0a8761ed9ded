"""Starts a JVM with the SparkContext of one run, tuned for a short life, and discards it when it has died."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import stat
import sys
from collections.abc import Mapping
from typing import Any

from rankzero.engines.base import words_of
from rankzero.engines.local import LOOPBACK
from rankzero.engines.spark.conf import LOCAL, spark_defaults
from rankzero.engines.spark.stage import first_lines
from rankzero.errors import EngineError, InvalidJobError, advised, require

# Spark retries a barrier stage that lacks slots every 15 s; a session of the engine retries each second.
_OWN_DEFAULTS = {
    "spark.ui.showConsoleProgress": "false",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
}
_OWN_LOCAL_DEFAULTS = {
    "spark.driver.host": LOOPBACK,
    "spark.driver.bindAddress": LOOPBACK,
    "spark.ui.enabled": "false",
}
_NO_REASON = re.compile(r"^\s*$|^\s+at |\b(?:WARN|WARNING|INFO)\b|log4j|log level")

PYTHON = "spark.pyspark.python"
# Spark puts these options before the user's extraJavaOptions.
DRIVER_JAVA_OPTIONS = "spark.driver.defaultJavaOptions"
_USERS_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
# Simple compilation and collection halve the processor time of a JVM's start, and no verification of the classes, which
# are Spark's own, saves another tenth. A JVM that lives for one launch is too short-lived to profit from more.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
_SIMPLE_COLLECTOR = "-XX:+UseSerialGC"
# A JVM with options for two collectors does not start.
_OTHER_JAVA_OPTIONS = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")

_CONNECT_MODE = ("SPARK_REMOTE", "SPARK_LOCAL_REMOTE", "SPARK_CONNECT_MODE_ENABLED")


def find_java() -> str | None:
    """Returns the home of a Java: ``JAVA_HOME``, else the one on the PATH. Spark itself checks its version."""
    home = os.environ.get("JAVA_HOME")
    if home and os.access(os.path.join(home, "bin", "java"), os.X_OK):
        return home
    java = shutil.which("java")
    return os.path.dirname(os.path.dirname(os.path.realpath(java))) if java else None


def require_pyspark() -> None:
    """Raises InvalidJobError unless a pyspark with its JVM part is installed here."""
    require("Spark needs", "pyspark", "pyspark")
    spec = importlib.util.find_spec("pyspark")
    places = (spec and spec.submodule_search_locations) or []
    if "SPARK_HOME" not in os.environ and not any(os.path.isdir(os.path.join(place, "jars")) for place in places):
        raise InvalidJobError(
            "the pyspark here has no JVM part (pyspark-client?): pip install pyspark, or set SPARK_HOME"
        )


def require_java() -> None:
    """Raises InvalidJobError unless there is a Java that Spark can use. Starts no process."""
    home, java = os.environ.get("JAVA_HOME"), find_java()
    if not java:
        raise InvalidJobError(
            "Spark needs Java 17 or newer and none was found (JAVA_HOME, PATH): install a JRE, for "
            "example `apt-get install openjdk-17-jre-headless`",
            code="RZ-1013",
        )
    if home and java != home:
        raise InvalidJobError(f"JAVA_HOME is {home!r}, which has no bin/java: correct it, or unset it to use {java}")
    # Imported here: it takes as long as the rest of this module's imports.
    import importlib.metadata

    with contextlib.suppress(OSError, importlib.metadata.PackageNotFoundError):
        with open(os.path.join(java, "release"), encoding="utf-8", errors="replace") as file:
            found = re.search(r'JAVA_VERSION="(?:1\.)?(\d+)', file.read())
        if found and int(found[1]) < 17 and importlib.metadata.version("pyspark") >= "4":
            raise InvalidJobError(f"Spark needs Java 17 or newer, and {java} is {found[1]}: set JAVA_HOME")


def own_python(conf: Mapping[str, str]) -> str:
    """Returns the Python of the executors of a SparkContext that the engine starts."""
    return conf.get(PYTHON, os.environ.get("PYSPARK_PYTHON", sys.executable))


def start_context(master: str, name: str, conf: Mapping[str, str], asked: Mapping[str, str]) -> Any:
    """Starts a SparkContext, without an SQL session around it, which no barrier stage needs.

    Args:
        master: The cluster.
        name: Name of the application.
        conf: The user's settings, which come first.
        asked: Settings that the run needs.

    Raises:
        EngineError: Spark does not start, or does not reach the master.
    """
    from pyspark import SparkConf, SparkContext

    java, is_local, said = find_java(), master.startswith("local"), {**spark_defaults(), **conf}
    for variable in _CONNECT_MODE:
        # A parent process that uses Spark Connect may have set them; with them pyspark starts no JVM.
        os.environ.pop(variable, None)
    if java:
        os.environ.setdefault("JAVA_HOME", java)
    # Without this Spark runs whatever `python3` is first on the PATH.
    os.environ["PYSPARK_PYTHON"] = own_python(conf)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
        # For the JVM that makes the command line of the next one.
        os.environ.setdefault("SPARK_LAUNCHER_OPTS", short_lived(said))
    ours = {**_OWN_DEFAULTS, **(_OWN_LOCAL_DEFAULTS if is_local else {}), **asked}
    if DRIVER_JAVA_OPTIONS not in said and LOCAL.fullmatch(master):
        # Only if this JVM runs all tasks itself.
        ours[DRIVER_JAVA_OPTIONS] = short_lived(said)
    # In a driver that spark-submit has started, SparkConf has the settings that were submitted.
    spark_conf = SparkConf().setMaster(master).setAppName(f"rankzero {name}")
    for key, value in ours.items():
        spark_conf.setIfMissing(key, value)
    before = _printed()
    try:
        return SparkContext.getOrCreate(spark_conf.setAll(list(conf.items())))
    except Exception as error:
        why = first_lines(words_of(error))
        lines = [line for line in _printed().removeprefix(before).splitlines() if not _NO_REASON.search(line)]
        why = "\n".join([*lines[:3], why])
        raise EngineError(f"no SparkContext on master {master!r}: {advised(why)}") from None


def _printed() -> str:
    """Returns what this process and its JVM have written to standard error, if that is a file, such as driver.log."""
    with contextlib.suppress(OSError, ValueError):
        if stat.S_ISREG(os.fstat(2).st_mode):
            return os.pread(2, 1 << 20, 0).decode("utf-8", "replace")
    return ""


def short_lived(conf: Mapping[str, str]) -> str:
    """Returns options of a JVM that lives for one launch; options that the user gave it take precedence."""
    said = [os.environ.get(name, "") for name in _OTHER_JAVA_OPTIONS]
    said += [conf.get(_USERS_JAVA_OPTIONS, ""), conf.get(DRIVER_JAVA_OPTIONS, "")]
    return SHORT_LIVED if "GC" in " ".join(said) else f"{SHORT_LIVED} {_SIMPLE_COLLECTOR}"


def forget() -> None:
    """Makes pyspark start a new JVM, since it keeps the gateway to the dead one. Not for a caller's process."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is not None:
        with contextlib.suppress(Exception):
            gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
