"""The engine's side of an agent: starts it, waits for it, and by dying takes it along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hold(config: dict[str, Any], on_start: Callable[[Any], None] | None = None) -> None:
    """Runs one agent to its end.

    Args:
        config: What the agent reads from its standard input.
        on_start: Gets the started process (a ``subprocess.Popen``).

    Runs in Spark's Python worker or in the driver, where nothing of rankzero may be imported:
    it is pickled by value, so it uses the standard library only and everything is local to it.
    The agent watches its standard input; when this process dies, however it dies, the agent
    reads end of file and ends its workers.

    Raises:
        RuntimeError: the agent crashed; holds the end of what it wrote.
    """
    import contextlib
    import json
    import os
    import secrets
    import shutil
    import signal
    import subprocess
    import sys
    import tempfile

    agent_exit_timeout = 3.0
    marker = secrets.token_hex(8)
    scratch = tempfile.mkdtemp(prefix="rankzero-agent-")
    log = os.path.join(scratch, "agent.log")
    code = config["code_path"]
    if code is None:
        code = os.path.join(scratch, "rankzero.zip")
        with open(code, "wb") as file:
            file.write(config["code_zip"])
    start = "import sys; sys.path[:1] = [sys.argv[1]]; import rankzero; sys.path.append(sys.path.pop(0)); "
    start += "from rankzero.agent.supervise import main; main()"
    agent_config = {key: value for key, value in config.items() if key != "code_zip"}
    agent_config.update(scratch=scratch, code_path=code)

    def kill_marked() -> None:
        # An agent that was killed could not end what it started.
        needle = f"RANKZERO_AGENT={marker}".encode()
        for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(name)}/environ", "rb") as file:
                if needle in file.read().split(b"\0"):
                    os.kill(int(name), signal.SIGKILL)

    try:
        with open(log, "wb") as output:
            agent = subprocess.Popen(
                [sys.executable, "-u", "-c", start, code, scratch],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "RANKZERO_AGENT": marker},
            )
        try:
            with contextlib.suppress(BrokenPipeError):
                agent.stdin.write(json.dumps(agent_config).encode() + b"\n")  # type: ignore[union-attr]
                agent.stdin.flush()  # type: ignore[union-attr]
            if on_start:
                on_start(agent)
            code_of_agent = agent.wait()
        finally:
            # Reached early when this process is interrupted: end of file ends the agent.
            with contextlib.suppress(OSError):
                agent.stdin.close()  # type: ignore[union-attr]
            try:
                agent.wait(agent_exit_timeout)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
            if agent.returncode != 0:
                kill_marked()
        if code_of_agent != 0:
            with open(log, "rb") as written:
                tail = written.read()[-4096:].decode(errors="replace").strip()
            how = f"signal {-code_of_agent}" if code_of_agent < 0 else f"exit code {code_of_agent}"
            raise RuntimeError(f"rankzero agent of task {config['task']} ended by {how}: {tail}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
