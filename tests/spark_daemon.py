"""Spark's daemon of Python workers, with what their queries import: else each worker imports it anew, for 0.6 s."""

import contextlib
import importlib

from pyspark import daemon

if __name__ == "__main__":
    for name in ("pandas", "pyarrow", "pyspark.worker"):
        # The Python of a query need not be the suite's.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    daemon.manager()
