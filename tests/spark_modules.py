"""The zips from which Spark's Python workers import pyspark, with compiled modules beside the sources.

pip's pyspark holds sources alone in them, and Python writes nothing into a zip: each daemon of Python workers would
compile them again, for 0.4 s of processor time. ``python -m tests.spark_modules``, which `scripts/setup.sh` runs,
compiles them once. Another Python ignores what it cannot read, and compiles the sources as before.
"""

from __future__ import annotations

import compileall
import importlib.util
import os
import py_compile
import re
import tempfile
import zipfile
from pathlib import Path

UNUSED = re.compile("/tests/")
"""pyspark's own tests, half of its files: a Python worker reads the list of all files some twenty times."""


def add_compiled(path: Path) -> None:
    """Replaces a zip by one that also holds its modules in compiled form, unless it does already."""
    with zipfile.ZipFile(path) as sources, tempfile.TemporaryDirectory() as folder:
        if any(name.endswith(".pyc") for name in sources.namelist()):
            return
        sources.extractall(folder, [name for name in sources.namelist() if not UNUSED.search(name)])
        compileall.compile_dir(
            folder,
            quiet=2,
            legacy=True,
            stripdir=folder,
            prependdir=str(path),
            # Nobody changes the sources, so that no reader needs to compare them.
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        # The package manager may share the old file with its cache, so that file stays unchanged.
        unfinished = path.with_suffix(f".{os.getpid()}")
        with zipfile.ZipFile(unfinished, "w") as both:
            for file in Path(folder).rglob("*"):
                both.write(file, file.relative_to(folder))
    unfinished.replace(path)


def main() -> None:
    """Compiles what the pyspark of this virtual environment gives to Python workers."""
    package = importlib.util.find_spec("pyspark")
    assert package is not None
    for path in Path(str(package.origin)).parent.glob("python/lib/*.zip"):
        add_compiled(path)


if __name__ == "__main__":
    main()
