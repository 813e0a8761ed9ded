"""An agent's scratch directory goes with the agent, whatever becomes of the process that holds it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import ROOT, until

import rankzero
from rankzero.channel.auth import new_secret
from rankzero.channel.driver_end.server import ChannelServer

BOUND = 60.0

HOLD = """
import json, os, sys
from rankzero.task.hold import hold
hold({**json.loads(sys.argv[1]), "owner": os.getpid()})
"""


@pytest.mark.parametrize("warm_start", [False, True])
def test_of_a_holder_that_stands_still_and_dies_nothing_is_left(
    tmp_path: Path, marker: str, warm_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a driver that was stopped: its agent loses it, ends, and finds it alive; then it is killed."""
    monkeypatch.setenv("MARK", marker)
    inbox: queue.Queue[dict[str, Any]] = queue.Queue()
    secret = new_secret()
    server = ChannelServer(secret, "127.0.0.1", lambda _, message: inbox.put(message), upload_directory=str(tmp_path))
    config = {
        "driver": [["127.0.0.1"], server.start()],
        "secret": secret,
        "use_gpu": False,
        "ports": None,
        "grace": 1.0,
        "exit_timeout": 5.0,
        "restart_count": 0,
        "max_restarts": 0,
        "warm_start": warm_start,
        "env": {},
        "task": 0,
        "host": "127.0.0.1",
        "workers": 1,
        "gpus": [],
        "cores": 1,
        "code_path": os.path.dirname(os.path.dirname(rankzero.__file__)),
    }
    # Short: the ranks' sockets lie below it.
    temporary = tmp_path / "t"
    temporary.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, json.dumps(config)], cwd=ROOT, env={**os.environ, "TMPDIR": str(temporary)}
    )
    try:
        agent = psutil.Process(inbox.get(timeout=BOUND)["pid"])
        assert list(temporary.glob("rankzero-agent-*"))
        holder.send_signal(signal.SIGSTOP)
        server.close()
        until(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE, BOUND, "the agent's end")
    finally:
        server.close()
        holder.kill()
        holder.wait()
    assert list(temporary.glob("rankzero-agent-*")) == []
