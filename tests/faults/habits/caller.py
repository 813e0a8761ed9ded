"""A process that submits runs and waits for them, as a user's shell or notebook does: one JSON command a line."""

from __future__ import annotations

import json
import sys
from typing import Any

from rankzero import Launcher, RankZeroError, RunHandle
from rankzero.run.retention import collect

RUN = "r"
BEGUN = "begun\n"  # The answer of a caller that has taken a command, and may be interrupted from then on

START_TIMEOUT = 240.0
END_TIMEOUT = 120.0

STOP_GRACE = 30.0
"""More than a rank that fails needs to write its last checkpoint on a busy machine; nothing waits for it."""

SOURCE = """
def train(folder, lr):
    import json, os, time
    from pathlib import Path
    import rankzero.train as rt
    from rankzero.host.processes import process_start

    orders = Path(folder, "orders")
    checkpoint = rt.get_checkpoint()
    step = checkpoint.load()["step"] if checkpoint else 0
    with open(Path(folder, "begun"), "a") as file:
        rank = {{"pid": os.getpid(), "start": process_start(os.getpid())}}
        file.write(json.dumps({{**rank, "step": step, "training": [{version}, lr]}}) + "\\n")
    while True:
        target, end = json.loads(orders.read_text())
        if step < target:
            step += 1
            rt.report({{"step": step}}, checkpoint={{"step": step}})
        elif end == "succeed":
            return [{version}, lr, step]
        elif end == "fail":
            raise ValueError("ordered to fail")
        else:
            time.sleep(0.01)
"""


def edited(version: int) -> Any:
    """Returns the training as it reads after so many edits."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SOURCE.format(version=version), names)
    return names["train"]


def act(store: str, folder: str, verb: str, version: int, lr: float) -> Any:
    """Does what a user would do in one call, and returns what the call returned."""
    launcher = Launcher(1, store=store, run_id=RUN, start_timeout=START_TIMEOUT, stop_grace=STOP_GRACE)
    directory = f"{store}/{RUN}"
    if verb == "run":
        return launcher.run(edited(version), folder, lr)
    if verb == "submit":
        launcher.submit(edited(version), folder, lr)
        return None
    if verb == "deliver":
        handle = launcher.submit(edited(version), folder, lr)
        value = handle.result(END_TIMEOUT)
        handle.acknowledge()
        return value
    if verb == "attach":
        return RunHandle.attach(directory).result(END_TIMEOUT)
    if verb == "cancel":
        handle = RunHandle.attach(directory)
        handle.cancel()
        handle.wait(END_TIMEOUT)
        return handle.status().state
    assert verb == "gc"
    return len(collect(store, older_than=0.001).removed)


def main() -> None:
    """Does what its standard input says, and answers each line by `BEGUN` and by what came of it."""
    answers = sys.stdout
    # The lines of ranks are none of the answers.
    sys.stdout = sys.stderr
    for line in sys.stdin:
        try:
            answers.write(BEGUN)
            answers.flush()
            answer = {"value": act(*json.loads(line))}
        except RankZeroError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        except KeyboardInterrupt:
            answer = {"error": "KeyboardInterrupt", "message": ""}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
