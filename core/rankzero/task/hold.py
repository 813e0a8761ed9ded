"""Starts an agent and waits for it. The agent ends when this process dies.

Runs in Spark's Python worker or in the driver, where rankzero may not be importable: this module is pickled by value,
and uses the standard library only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

from rankzero.task.scratch import lock_directory, make_scratch, make_temporary, scratch_root
from rankzero.task.zygotes import printed, start

AGREED = "agreed"  # File in an agent's directory from when the driver has asked it to end


def hold(config: dict[str, Any], on_start: Callable[[Any], None] | None = None) -> None:
    """Runs one agent to its end.

    Args:
        config: The agent's configuration, and what is needed to start it.
        on_start: Receives the agent, whose ``kill`` ends it from any thread.

    The agent and its zygote watch this process; when it dies in any way, the agent ends its workers.

    Raises:
        RuntimeError: the agent crashed; the message has the end of its output.
    """
    scratch = make_scratch(scratch_root())
    temporary = make_temporary(scratch)
    lock = lock_directory(scratch)
    # Kept open: an agent removes its directory when it ends, and the log is read after that.
    log = open(os.path.join(scratch, "agent.log"), "w+b")
    config = {**config, "env": with_defaults(config), "scratch": scratch, "temporary": temporary}
    try:
        zygote = start(config, log)
        try:
            if on_start:
                on_start(zygote.agent)
            code = zygote.wait()
        finally:
            # Reached early when this process is interrupted.
            zygote.release()
        # An agent that the driver has asked to end after a success must not fail its task: others still exit.
        if code != 0 and not os.path.exists(os.path.join(scratch, AGREED)):
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise RuntimeError(f"rankzero agent of task {config['task']} ended by {how}{printed(log)}")
    finally:
        log.close()
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def with_defaults(config: dict[str, Any]) -> dict[str, str]:
    """Returns the user's variables and rankzero's defaults for those that neither the user nor this host sets."""
    cores = config["cores"] or os.cpu_count() or 1
    # Forks of a zygote share its hash seed. With one seed everywhere, sets of texts have one order on all ranks.
    defaults = {
        "PYTHONIOENCODING": "utf-8",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": str(max(1, cores // config["workers"])),
    }
    return {**{name: value for name, value in defaults.items() if name not in os.environ}, **config["env"]}
