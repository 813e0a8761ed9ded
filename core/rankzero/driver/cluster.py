"""The driver that a Spark cluster starts as the program of an application, as a child process of the driver's JVM.

Its session is the session of that application: pyspark finds the JVM by the environment variables of this process.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import signal
import socket
import sys
from typing import Any

from rankzero.driver.main import LOG_FORMAT, drive, when_gone
from rankzero.engines.spark.deploy import unpack
from rankzero.errors import RunNotFoundError
from rankzero.host.processes import process_namespace, process_start, settle_signals
from rankzero.run.directory import RunDirectory


def main() -> None:
    """Entry point; `rankzero.engines.spark.deploy` makes its arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_directory")
    parser.add_argument("--submission", type=int, required=True, help="which submission of the run to drive")
    parser.add_argument("--private", required=True, help="where the secrets are: env:NAME, conf:NAME or file:PATH")
    arguments = parser.parse_args()
    settle_signals()
    parent = {"pid": os.getppid(), "start": process_start(os.getppid()), "namespace": process_namespace()}
    private = unpack(_read_private(arguments.private))
    run = RunDirectory(arguments.run_directory)
    try:
        is_same = run.token() == private.pop("token")
    except FileNotFoundError:
        is_same = False
    if not is_same:
        sys.exit(
            f"{run.directory} on {socket.gethostname()} is not the directory of the run: the store must be a path that "
            "the submitter and the cluster's hosts share, or the URL of an object store"
        )
    log: list[logging.Handler] = [logging.StreamHandler()]
    if not run.is_remote:
        log.append(logging.FileHandler(run.path("driver.log")))
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=log)
    # A cluster that kills an application kills the JVM, not this process.
    when_gone(parent, functools.partial(os.kill, os.getpid(), signal.SIGTERM))
    try:
        drive(run, arguments.submission, lambda: private)
    except RunNotFoundError as error:
        sys.exit(str(error))


def _read_private(place: str) -> str:
    kind, _, name = place.partition(":")
    if kind == "env":
        # Child processes of this one must not inherit it.
        return os.environ.pop(name)
    if kind == "file":
        with open(name) as file:
            return file.read()
    from pyspark import SparkContext

    gateway: Any = SparkContext
    gateway._ensure_initialized()
    # The application's SparkContext must not keep it either.
    return str(gateway._jvm.java.lang.System.clearProperty(name))
