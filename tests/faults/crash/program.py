"""The program that a crash bench starts once, and that forks a process for each action: it has rankzero imported.

Each line of its standard input is ``ROLE ACTION STORE NOTES MARK``. It writes the id of the new process, and a line
when that has ended. The value, or the error, goes into the file ``value`` in the folder NOTES, which no point watches.
Ranks note there at which step they begin.
"""

import atexit
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from rankzero import Launcher, RankZeroError, RunHandle
from rankzero.run.retention import collect

IMPORTED = (
    "rankzero.driver.driver",
    "rankzero.engines.local",
    "rankzero.report.card",
    "rankzero.report.page",
    "rankzero.report.summary",
    "rankzero.submit.durable",
    "s3fs",
)
"""The modules that an action would import: imports are no points, and no action pays for them again."""

STEPS = 3
RUN = "r"


def note(folder: str, name: str, text: str) -> None:
    """Appends a line, in one write, which the shim does not see."""
    with open(Path(folder, name), "a") as file:
        file.write(text + "\n")


def train(folder: str, how: str) -> int:
    """Counts its steps, and ends as the folder says."""
    import rankzero.train as rt

    context = rt.get_context()
    checkpoint = rt.get_checkpoint()
    first = checkpoint.load()["step"] + 1 if checkpoint else 0
    note(folder, f"began-{context.rank}", f"{context.attempt} {first}")
    for step in range(first, STEPS):
        rt.report({"step": step}, checkpoint={"step": step}, sharded=how == "sharded")
        if how == "fails" and not Path(folder, "go").exists() and step == 1:
            raise ValueError("as it was told")
        if how == "dies" and context.attempt == 0 and context.rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "long":
            while not Path(folder, "go").exists():
                time.sleep(0.01)
    if how == "rows":
        return rt.write_rows({"rank": [context.rank] * STEPS})  # type: ignore[return-value]
    return STEPS


def act(action: str, store: str, folder: str) -> None:
    """Does one action."""
    how, _, verb = action.partition("-")
    launcher = Launcher(2, store=store, run_id=RUN, max_restarts=int(how == "dies"), start_timeout=120)
    directory = f"{store}/{RUN}"
    try:
        if verb == "run":
            value = launcher.run(train, folder, how)
        elif verb == "submit":
            launcher.submit(train, folder, how)
            value = None
        elif verb == "deliver":
            handle = launcher.submit(train, folder, how)
            value = handle.result(timeout=120)
            handle.acknowledge()
        elif verb == "attach":
            value = RunHandle.attach(directory).result(timeout=120)
        elif verb == "cancel":
            handle = RunHandle.attach(directory)
            handle.cancel()
            handle.wait(timeout=60)
            # Its driver may have been killed before it read the request.
            value = "ended" if handle.status().final else handle.status().state
        elif verb == "gc":
            collect(store, older_than=0.001)
            value = "collected"
        if how == "rows":
            value = value.to_arrow().count_rows()
        found = {"value": value}
    except RankZeroError as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    Path(folder, "value").write_text(json.dumps(found))


def serve() -> None:
    """Forks a process for each line, which does that action and ends as a program does."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    # A collection in a forked process would copy every page that it shares with this one.
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        if pid := os.fork():
            print(pid, flush=True)
            os.waitpid(pid, 0)
            print(flush=True)
            continue
        role, action, store, folder, os.environ["MARK"] = line.split()
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        # The shim names points by it.
        sys.argv[1:] = [role]
        act(action, store, folder)
        _end()


def _end() -> None:
    """Ends this process as the interpreter does, without the deletion of each object."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


if __name__ == "__main__":
    serve()
