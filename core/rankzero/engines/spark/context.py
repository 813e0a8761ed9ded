"""What is asked of a SparkContext, and put there, once: every question is a call into the JVM."""

from __future__ import annotations

import functools
import io
import os
from typing import Any

from rankzero.engines.spark.resources import TaskResources
from rankzero.host.network import addresses_of
from rankzero.task import hold, staged, start

_KNOWN = "_rankzero"
_DRIVER = "driver"


class KnownContext:
    """A SparkContext's settings and slots, and rankzero's code there."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._scala = context._jsc.sc()
        self._conf = self._scala.conf()
        self._profiles: dict[TaskResources, Any] = {}
        self._default_profile = self._scala.resourceProfileManager().defaultResourceProfile()
        self._settings: dict[str, str | None] = {}
        self._codes: dict[bool, Any] = {}

    @functools.cached_property
    def url(self) -> str | None:
        """Of the Spark UI; None where it is switched off."""
        found: str | None = self._context.uiWebUrl
        return found

    def code(self, *, zipped: bool = True) -> Any:
        """Broadcast of `agent_code`, which so goes to every executor once, and not with every task.

        It stays with the SparkContext. Tasks of a local master read the file that pyspark made of it, which who cleans
        the temporary directory may have removed.
        """
        code = self._codes.get(zipped)
        if code is None or not os.path.exists(getattr(code, "_path", None) or os.curdir):
            code = self._codes[zipped] = self._context.broadcast(agent_code(zipped=zipped))
        return code

    def setting(self, key: str) -> str | None:
        """One setting; a SparkContext's do not change."""
        if key not in self._settings:
            self._settings[key] = str(self._conf.get(key)) if self._conf.contains(key) else None
        return self._settings[key]

    def profile(self, resources: TaskResources | None) -> Any:
        """Spark's name of what a task is given; None stands for the session's own settings."""
        if resources is not None and resources not in self._profiles:
            package = self._context._jvm.org.apache.spark.resource
            requests = package.TaskResourceRequests().cpus(resources.cpus)
            if resources.gpus:
                requests = requests.resource("gpu", float(resources.gpus))
            profile = package.ResourceProfileBuilder().require(requests).build()
            # Else Spark knows it when the first stage with it comes, and counts no places before.
            self._scala.resourceProfileManager().addResourceProfile(profile)
            self._profiles[resources] = profile
        return None if resources is None else self._profiles[resources]

    def slots(self, resources: TaskResources | None = None) -> int:
        """Tasks that can run at once now, each with these resources."""
        return int(self._scala.maxNumConcurrentTasks(self.profile(resources) or self._default_profile))

    def slots_by_host(self, resources: TaskResources | None = None) -> dict[str, int]:
        """Tasks that can run at once on each host, as far as cores tell; a host by each of its addresses.

        A barrier task knows its host by address, an executor may know it by name.
        """
        executors = self._scala.statusStore().executorList(True)
        found = [executors.apply(index) for index in range(executors.length())]
        slots: dict[str, int] = {}
        for executor in found:
            if executor.id() != _DRIVER:
                for address in addresses_of(str(executor.hostPort()).rpartition(":")[0]):
                    tasks = executor.totalCores() // resources.cpus if resources else executor.maxTasks()
                    slots[address] = slots.get(address, 0) + int(tasks)
        return slots

    def is_stopped(self) -> bool:
        """True if nothing runs there any more. Raises a Py4JError if the JVM has exited."""
        return bool(self._scala.isStopped())


def known(context: Any) -> KnownContext:
    """What is known of a SparkContext; kept with it, and so no longer than it is."""
    attributes = vars(context)
    if _KNOWN not in attributes:
        attributes[_KNOWN] = KnownContext(context)
    found: KnownContext = attributes[_KNOWN]
    return found


_TRAVELS = (".py", ".html", ".css", ".js")
"""Endings of the files that a driver in a cluster needs: its code, and the page of a run."""


@functools.cache
def agent_code(*, zipped: bool = True) -> bytes:
    """A pickle of the function `run_task`, and of a zip of the rankzero and cloudpickle packages.

    Executors need nothing of rankzero installed: the one is pickled by value, and from the other agents import.

    Args:
        zipped: False leaves the zip out, for agents that find the packages where this process has them.
    """
    from pyspark import cloudpickle

    untyped: Any = cloudpickle
    for module in (staged, hold, start):
        untyped.register_pickle_by_value(module)
    pickled: bytes = untyped.dumps((staged.run_task, zipped_packages() if zipped else None))
    return pickled


def zipped_packages() -> bytes:
    """The rankzero and cloudpickle packages as a zip that Python can import from."""
    import zipfile
    import zipimport

    import cloudpickle

    import rankzero

    if isinstance(rankzero.__loader__, zipimport.zipimporter):
        # A driver in a cluster, which has them from such a zip itself.
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
