"""Values that are queried from a SparkContext, or put there, only once, because each query is a call into the JVM."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Mapping
from typing import Any

from rankzero.engines.spark.conf import TASK_CPUS, TASK_GPUS
from rankzero.task import hold, stage


class KnownContext:
    """The cached settings and slots of a SparkContext, and rankzero's code in it.

    Attributes:
        url: URL of the Spark UI; None if it is switched off.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self.url: str | None = context.uiWebUrl
        self._scala = context._jsc.sc()
        self._conf = self._scala.conf()
        self._profiles: dict[tuple[str, ...], Any] = {}
        self._default_profile = self._scala.resourceProfileManager().defaultResourceProfile()
        self._settings: dict[str, str | None] = {}
        self._codes: dict[bool, Any] = {}

    def code(self, *, zipped: bool = True) -> Any:
        """Returns a broadcast of `task_code`, which reaches every executor once instead of with every task.

        The SparkContext keeps it. Tasks of a local master read a file that pyspark made of it; a cleaner of the
        temporary directory may have removed that file, and then it is made again.
        """
        code = self._codes.get(zipped)
        if code is None or not os.path.exists(getattr(code, "_path", None) or os.curdir):
            code = self._codes[zipped] = self._context.broadcast(task_code(hold.hold, zipped=zipped))
        return code

    def setting(self, key: str) -> str | None:
        """Returns one setting, or None; the settings of a SparkContext do not change."""
        if key not in self._settings:
            self._settings[key] = str(self._conf.get(key)) if self._conf.contains(key) else None
        return self._settings[key]

    def profile(self, resources: Mapping[str, str]) -> Any:
        """Returns Spark's resource profile for the result of `task_resources`; None for the session's own settings."""
        key = tuple(resources.values())
        if key and key not in self._profiles:
            package = self._context._jvm.org.apache.spark.resource
            requests = package.TaskResourceRequests().cpus(int(resources[TASK_CPUS]))
            if gpus := int(resources[TASK_GPUS]):
                requests = requests.resource("gpu", float(gpus))
            profile = package.ResourceProfileBuilder().require(requests).build()
            # Otherwise Spark registers it with the first stage that uses it, and counts no slots before.
            self._scala.resourceProfileManager().addResourceProfile(profile)
            self._profiles[key] = profile
        return self._profiles.get(key)

    def slots(self, resources: Mapping[str, str]) -> int:
        """Returns the number of tasks with these resources that can run in parallel now."""
        return int(self._scala.maxNumConcurrentTasks(self.profile(resources) or self._default_profile))

    def is_stopped(self) -> bool:
        """Returns True if the SparkContext was stopped. Raises a Py4JError if the JVM has exited."""
        return bool(self._scala.isStopped())


def known(context: Any) -> KnownContext:
    """Returns the cached values of a SparkContext, which live as long as the context."""
    if "_rankzero" not in vars(context):
        context._rankzero = KnownContext(context)
    found: KnownContext = context._rankzero
    return found


_TRAVELS = (".py", ".html", ".css", ".js")
"""File endings of the code, and of the web pages, that a driver in a cluster needs."""


@functools.cache
def task_code(run: Callable[[dict[str, Any]], None], *, zipped: bool = True) -> bytes:
    """Returns a pickle of a task's function and of a zip of the rankzero and cloudpickle packages.

    rankzero does not need to be installed on executors: the function is pickled by value, and agents import the zip.

    Args:
        run: The function: `hold`, or `run_task` of a stage that has the driver of the run.
        zipped: False leaves out the zip, for agents that can import the packages from this process's paths.
    """
    from pyspark import cloudpickle

    untyped: Any = cloudpickle
    for module in (stage, hold):
        untyped.register_pickle_by_value(module)
    pickled: bytes = untyped.dumps((run, zipped_packages() if zipped else None))
    return pickled


def zipped_packages() -> bytes:
    """Returns the rankzero and cloudpickle packages as a zip that Python can import."""
    import zipfile
    import zipimport

    import cloudpickle

    import rankzero

    if isinstance(rankzero.__loader__, zipimport.zipimporter):
        # A driver in a cluster has itself been imported from such a zip.
        with open(rankzero.__loader__.archive, "rb") as file:
            return file.read()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for package in (rankzero, cloudpickle):
            base = os.path.dirname(os.path.abspath(str(package.__file__)))
            for directory, _, names in os.walk(base):
                for name in sorted(names):
                    if name.endswith(_TRAVELS):
                        path = os.path.join(directory, name)
                        archive.write(path, os.path.relpath(path, os.path.dirname(base)))
    return buffer.getvalue()
