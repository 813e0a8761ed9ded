"""Advice about errors of other software, by their texts, and about packages that are missing.

`TABLE` is the only place that knows such texts. An error of a rank, of its process and of an engine is looked up here.
"""

from __future__ import annotations

import importlib.util
import re
import socket
import sys

from rankzero.errors import InvalidJobError

TABLE: tuple[tuple[str, str], ...] = (
    (
        r"^ModuleNotFoundError: No module named '(?:horovod|sparkdl)\b",
        "Import rankzero.compat.horovod and rankzero.compat.horovod.torch instead: docs/migrate.md#horovod",
    ),
    (
        r"^ModuleNotFoundError: No module named '([^']+)'",
        "It is not installed for {python} on {host}, and no user module that travelled: those do that code imports by "
        "their names. Write `import {0}` in the training's own module, or install it there",
    ),
    (r"No module named 'pyarrow'|PyArrow .*must be installed", "Spark's executors have no pyarrow: install it there"),
    ("PYTHON_VERSION_MISMATCH", "set spark.pyspark.python to a Python of the driver's minor version on the executors"),
    (
        r'Cannot run program "([^"]+)"',
        "the executors have no Python at {0!r}: set spark.pyspark.python to one they have",
    ),
    (
        r"unable to allocate shared memory|unable to open shared memory object",
        "/dev/shm of the host is full: give its container more (docker run --shm-size=8g; on Kubernetes an emptyDir "
        "with medium Memory at /dev/shm), or use fewer workers of data loaders",
    ),
    ("No space left on device|Disk quota exceeded", "the store or a local disk (TMPDIR, spark.local.dir) is full"),
    ("^killed by SIGKILL", "often the kernel's out-of-memory killer"),
    ("^killed by SIGABRT", "often a NCCL timeout or a failed assertion in native code"),
    ("^killed by SIGSEGV", "a crash in native code; the log shows the Python stack"),
    ("^killed by SIGBUS", "often a full /dev/shm, or a result's file that was overwritten in place"),
    ("^killed by SIGTERM", "something outside of the run asked it to end"),
)
"""Patterns of texts, each with what to do. The first that matches counts; an exception's text begins with its type.

``{0}`` in an advice is the first group of the pattern; ``{python}`` and ``{host}`` are those of the current process.
"""


def known(text: str) -> tuple[str, str] | None:
    """Returns the line that is known of a text of other software, and what to do; None if there is none."""
    for pattern, advice in TABLE:
        if found := re.search(pattern, text):
            start = text.rfind("\n", 0, found.start()) + 1
            line = text[start:].partition("\n")[0].strip()
            return line, advice.format(*found.groups(), python=sys.executable, host=socket.gethostname())
    return None


def advised(message: str, text: str = "") -> str:
    """Returns a message, followed by the advice about it, or about another text, if there is one."""
    found = known(text or message)
    return f"{message.rstrip('. ')}. {found[1][0].upper()}{found[1][1:]}" if found else message


def require(need: str, requirement: str, *modules: str) -> None:
    """Raises InvalidJobError, which names ``pip install``'s argument, unless modules are installed; imports none."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise InvalidJobError(f"{need} {' and '.join(missing)} here: pip install {requirement}")
